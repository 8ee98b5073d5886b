"""Requests of clients: settings of new topics, tables of topics, progress of readers.

Readers say how far they are often, and a commit in the store waits for a disk: notes are written once a second at most.
"""

from __future__ import annotations

from typing import Any

from embarcadero.config import Config
from embarcadero.env import Clock
from embarcadero.errors import Backpressure, BadName, BadValue, Deposed, EmbarcaderoError
from embarcadero.limits import (
    COPIES_DEFAULT,
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
from embarcadero.types import CRC32C, OnGap, ReaderProgress
from embarcadero.wire import messages as m
from embarcadero.wire.messages import CreateTopic


def check_partitions(partitions: int | None, config: Config) -> None:
    """Refuse more than this cluster allows."""
    most = config.limits.partitions
    if partitions is not None and partitions > most:
        raise BadValue(f"partitions {partitions} is out of range", f"this cluster takes 1 to {most}")


def _copies(ask: CreateTopic, config: Config, live: int) -> tuple[int | None, int | None]:
    """Replicas and durable_on, asked for or configured; None where the directory's usual choice is wanted."""
    usual_replicas, usual_durable_on = config.topic.replicas, config.topic.durable_on
    replicas = int(usual_replicas) if ask.replicas is None and usual_replicas.isdigit() else ask.replicas
    if ask.durable_on is not None or not usual_durable_on.isdigit():
        return replicas, ask.durable_on
    return replicas, min(int(usual_durable_on), min(live, COPIES_DEFAULT) if replicas is None else replicas)


def with_defaults(ask: CreateTopic, config: Config, live: int = 0) -> dict[str, Any]:
    """The settings of the topic that was asked for; BadValue above a limit of this cluster. `live`: its replicas."""
    usual = config.topic
    replicas, durable_on = _copies(ask, config, live)
    on_gap = usual.on_gap if ask.on_gap is None else ask.on_gap
    gap_timeout_ms = usual.gap_timeout_skip_ms if on_gap == OnGap.SKIP else usual.gap_timeout_fence_ms
    partitions = usual.partitions if ask.partitions is None else ask.partitions
    check_partitions(partitions, config)
    return {
        "order": usual.order if ask.order is None else ask.order,
        "partitions": partitions,
        "partitioner": CRC32C if ask.partitioner is None else ask.partitioner,
        "key": ask.key,
        "on_gap": on_gap,
        "gap_timeout_ms": gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms,
        "session_ttl_s": usual.session_ttl_s if ask.session_ttl_s is None else ask.session_ttl_s,
        "replicas": replicas,
        "durable_on": durable_on,
        "retention_bytes": usual.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        "retention_s": usual.retention_s if ask.retention_s is None else ask.retention_s,
    }


TierQuestion = m.OpenTier | m.AdvanceTier | m.KeepTier | m.CloseTier


def answer_tier(directory: Directory, ask: TierQuestion, wall_us: int) -> m.Message:
    """The answer; raises TierBusy or Deposed."""
    match ask:
        case m.OpenTier():
            return m.TierIs(tier=directory.open_tier(ask))
        case m.AdvanceTier():
            return m.TierIs(tier=directory.advance_tier(ask, wall_us))
        case m.KeepTier():
            if not directory.keep_tier(ask.topic, ask.epoch, ask.topic_id):
                raise Deposed(f"epoch {ask.epoch} of the table of {ask.topic!r} is over", "open the tier again")
        case m.CloseTier():
            directory.close_tier(ask.topic, ask.epoch, ask.topic_id)
    return m.Done()


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
