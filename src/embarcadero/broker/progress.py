"""How far readers say they are: kept in the store, but not for each word at once. A commit there waits for a disk."""

from __future__ import annotations

from embarcadero.env import Clock
from embarcadero.errors import Backpressure, BadName, BadValue, EmbarcaderoError
from embarcadero.limits import (
    READER_LANES_MAX,
    READER_NAME_BYTES_MAX,
    READER_NOTES_S,
    READERS_ANSWER_BYTES_MAX,
    READERS_PER_TOPIC_MAX,
)
from embarcadero.placement.decisions import check_id
from embarcadero.placement.directory import Directory
from embarcadero.placement.progress import ReaderNote
from embarcadero.placement.store import rested_us
from embarcadero.types import ReaderProgress
from embarcadero.wire import messages as m

_PLACE_BYTES = 32


class ReaderNotes:
    """What readers told this broker. What comes within a second of the last write is written with the next one."""

    def __init__(self, directory: Directory, clock: Clock) -> None:
        self._directory, self._clock = directory, clock
        self._notes: dict[tuple[str, str], ReaderNote] = {}
        self._write_from_us = 0

    def take(self, ask: m.NoteProgress | m.RemoveReader) -> None:
        """Note how far a reader is, or forget it. Raises UnknownTopic, BadName, BadValue."""
        if isinstance(ask, m.RemoveReader):
            self.remove(ask)
        else:
            self.note(ask)

    def note(self, ask: m.NoteProgress) -> None:
        """Take a reader's note of how far it is. Raises UnknownTopic, BadName, BadValue."""
        if not 0 < len(ask.reader.encode()) <= READER_NAME_BYTES_MAX:
            raise BadName(
                f"a reader's name of {len(ask.reader.encode())} bytes", f"use 1 to {READER_NAME_BYTES_MAX}"
            )
        if len(ask.places) > READER_LANES_MAX:
            raise BadValue(f"places in {len(ask.places)} lanes", f"tell those of at most {READER_LANES_MAX}")
        if len(self._notes) >= READERS_PER_TOPIC_MAX and (ask.topic, ask.reader) not in self._notes:
            raise Backpressure(f"{len(self._notes)} readers wait for the store to take their notes", "tell it later")
        topic = self._directory.topic(ask.topic)
        check_id(topic, ask.topic_id)
        note = ReaderNote(
            reader=ask.reader, places=dict(ask.places), at_us=self._clock.wall_us(), topic_id=topic.id
        )  # fmt: skip
        self._notes[ask.topic, ask.reader] = note
        self.poll(self._clock.now_us())

    def poll(self, now_us: int) -> None:
        """Write what waits, if it is time."""
        if self._notes and now_us >= self._write_from_us:
            self._write_from_us = now_us + int(READER_NOTES_S * 1_000_000)
            self._write(now_us)

    def readers(self, topic: str) -> m.ReadersAre:
        """What readers of a topic told, whichever broker they told it."""
        self._directory.topic(topic)
        self._write(self._clock.now_us())
        now_us, room, found = self._clock.wall_us(), READERS_ANSWER_BYTES_MAX, []
        for note in self._directory.readers(topic, now_us):
            room -= len(note.reader.encode()) + _PLACE_BYTES * (1 + len(note.places))
            if room < 0:
                break
            ago_s = max(0, now_us - note.at_us) / 1e6
            found.append(ReaderProgress(reader=note.reader, places=note.places, ago_s=ago_s))
        return m.ReadersAre(topic=topic, readers=found)

    def remove(self, ask: m.RemoveReader) -> None:
        """Forget a reader. Raises UnknownTopic, BadValue if the topic has no such reader.

        What another broker was told within the last second may still be written; so may what the reader tells next.
        """
        topic = self._directory.topic(ask.topic)
        check_id(topic, ask.topic_id)
        told = self._notes.pop((ask.topic, ask.reader), None)
        if not self._directory.remove_reader(ask.topic, ask.reader) and told is None:
            raise BadValue(
                f"topic {ask.topic!r} has no reader {ask.reader[:60]!r}",
                f"`embarcadero topic readers {ask.topic}` lists them",
            )

    def _write(self, began_us: int) -> None:
        if not self._notes:
            return
        notes, self._notes = self._notes, {}
        try:
            self._directory.note_progress(notes, self._clock.wall_us())
        except EmbarcaderoError:
            self._notes = notes | self._notes  # the store is busy, or its disk is full: with the next write
            self._write_from_us = max(self._write_from_us, rested_us(began_us, self._clock.now_us()))
