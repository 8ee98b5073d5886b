"""How far readers are, for people to see. Nothing depends on it: notes are few, bounded, and forgotten after a day."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from embarcadero.limits import READER_KEPT_S, READERS_PER_TOPIC_MAX
from embarcadero.placement.decisions import Decisions, Plan
from embarcadero.placement.records import reader_key, readers_prefix
from embarcadero.types import Topic


class ReaderNote(msgspec.Struct, frozen=True, kw_only=True):
    """What one reader of a topic told last: by lane the next index and seq, and when; of which topic, 0: not known."""

    reader: str
    places: dict[int, tuple[int, int]]
    at_us: int
    topic_id: int = 0


class Progress(Decisions):
    """The directory's part about readers."""

    def note_progress(self, notes: Mapping[tuple[str, str], ReaderNote], now_us: int) -> None:
        """Keep what readers told, by topic and reader. Of topics that are gone nothing is kept, nor what is too old."""

        def plan_it(plan: Plan) -> None:
            for topic in {topic for topic, _ in notes}:
                if (found := plan.read(f"topics/{topic}", Topic)) is not None:
                    new = {reader: note for (of, reader), note in notes.items() if of == topic}
                    new = {reader: note for reader, note in new.items() if note.topic_id in (0, found.id)}
                    self._keep(plan, topic, new, now_us)

        self._decide(plan_it)

    def _keep(self, plan: Plan, topic: str, new: Mapping[str, ReaderNote], now_us: int) -> None:
        for reader, note in new.items():
            plan.put(reader_key(topic, reader), note)
        others = [note for note in self._notes(topic) if note.reader not in new]
        fresh = [note for note in others if now_us - note.at_us < READER_KEPT_S * 1_000_000]
        fresh.sort(key=lambda note: note.at_us, reverse=True)
        kept = {note.reader for note in fresh[: max(0, READERS_PER_TOPIC_MAX - len(new))]}
        for note in others:
            if note.reader not in kept:
                plan.delete(reader_key(topic, note.reader))

    def readers(self, topic: str, now_us: int) -> list[ReaderNote]:
        """What readers of a topic told within a day, the newest first."""
        fresh = [note for note in self._notes(topic) if now_us - note.at_us < READER_KEPT_S * 1_000_000]
        return sorted(fresh, key=lambda note: note.at_us, reverse=True)

    def remove_reader(self, topic: str, reader: str) -> bool:
        """Forget what a reader told; whether there was anything."""
        known = [False]

        def plan_it(plan: Plan) -> None:
            known[0] = plan.read(reader_key(topic, reader), ReaderNote) is not None
            if known[0]:
                plan.delete(reader_key(topic, reader))

        self._decide(plan_it)
        return known[0]

    def _notes(self, topic: str) -> list[ReaderNote]:
        return self._all(readers_prefix(topic), ReaderNote)

    def _forget_readers(self, plan: Plan, topic: str) -> None:
        """The topic, or all that was in it, is gone."""
        for item in self._store.list(readers_prefix(topic)):
            plan.delete(item.key)
