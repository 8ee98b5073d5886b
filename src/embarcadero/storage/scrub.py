"""Scrubbing: finished segments are read through again and again, slowly, so that rot is found while peers are whole.

A step reads a little and says when the next one is due. Steps are jobs for a worker; what they find is noted in the
role's own thread. A step may write a footer or an index anew: nobody cuts, drops or seals its log meanwhile. `place`
says how far it came: give it to the next scrub to go on there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from embarcadero.env import Clock, File
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.limits import SCRUB_BYTES_PER_S, SCRUB_ROUND_S, SCRUB_STEP_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.index import load_index
from embarcadero.storage.layout import (
    HEADER_BYTES,
    INDEX_FILE,
    TIME_INDEX_FILE,
    Header,
    decode_header,
    encode_header,
    segment_name,
    was_header,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.repair import finish_segment
from embarcadero.storage.scan import scan_segment
from embarcadero.storage.segment import SegmentReader, Spot
from embarcadero.storage.writing import Damage, DamageKind, SegmentInfo


class ScrubPlace(NamedTuple):
    """Where a scrub is: in this folder and segment, at this record."""

    folder: str = ""
    base_seq: int = 0
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    position: int = 0


class Found(NamedTuple):
    """Damage that a step came across: indices [first, end) of a copy, and the bytes that are there."""

    folder: str
    first: int
    end: int
    kind: DamageKind
    bytes: bytes


class Scrub:
    """Goes round and round over the finished segments of some logs."""

    def __init__(self, clock: Clock, bytes_per_s: int = SCRUB_BYTES_PER_S, place: ScrubPlace | None = None) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self.place = place or ScrubPlace()
        self.due_us = clock.now_us()
        self._round_us = 0  # the next round does not begin before
        self.checked_bytes = self.rounds = 0
        self.log: RangeLog | None = None  # that the step under way, or the last one, is about

    @property
    def due(self) -> bool:
        """Whether the next step may run."""
        return self._bytes_per_s > 0 and self._clock.now_us() >= self.due_us

    def job(self, logs: Sequence[RangeLog]) -> Callable[[], list[Found]]:
        """The next step, for a worker: one at a time, while the role goes on."""
        segments = [
            (log, info)
            for log in sorted(logs, key=lambda log: log.folder)
            for info in log.segments
            if info.sealed and not any(one.overlaps(info) for one in log.damage)
        ]
        chosen = self._choose(segments)
        if chosen is None:
            self.log = None
            self.due_us = max(self._clock.now_us() + 1_000_000, self._round_us)
            return list
        self.log = chosen[0]
        return partial(self._step, *chosen)

    def note(self, logs: Sequence[RangeLog], found: list[Found]) -> list[Damage]:
        """Quarantine what a step found. In the role's thread."""
        by_folder = {log.folder: log for log in logs}
        return [
            by_folder[one.folder].quarantine(one.first, one.end, one.kind, one.bytes)
            for one in found
            if one.folder in by_folder
        ]

    def _step(self, log: RangeLog, info: SegmentInfo) -> list[Found]:
        checked = SCRUB_STEP_BYTES
        try:
            checked = self._check(log, info)
            return []
        except EmbarcaderoError as error:
            self.place = ScrubPlace(log.folder, info.base_seq, info.end_index, info.bytes)  # the next one goes on after
            if isinstance(error, BadSegment):
                return self._explain(log, info)
            if log.disk.exists(join(log.folder, segment_name(info.base_seq))):
                raise  # a disk that can't read some of it: put aside, the rest would be gone, too
            return [Found(log.folder, info.base_index, info.end_index, DamageKind.FILE, b"")]
        finally:
            self.checked_bytes += checked
            self.due_us = self._clock.now_us() + checked * 1_000_000 // self._bytes_per_s

    def _choose(self, segments: list[tuple[RangeLog, SegmentInfo]]) -> tuple[RangeLog, SegmentInfo] | None:
        """The segment to go on with: the one we are in, or the next one, or the first one again once that is due."""
        place = self.place
        for log, info in segments:
            here = log.folder, info.base_seq
            if here == place[:2] and place.index < info.end_index:
                return log, info
            if here > place[:2]:
                self.place = ScrubPlace(*here, info.base_index, 0)
                return log, info
        now_us = self._clock.now_us()
        if not segments or now_us < self._round_us:
            return None
        self._round_us = now_us + int(SCRUB_ROUND_S * 1_000_000)
        self.rounds += 1
        log, info = segments[0]
        self.place = ScrubPlace(log.folder, info.base_seq, info.base_index, 0)
        return log, info

    def _check(self, log: RangeLog, info: SegmentInfo) -> int:
        """Read some records; returns how many bytes that were. At a segment's end its indexes are looked at, too."""
        header = log.header(info)
        reader = SegmentReader(log.disk, log.folder, info.base_seq, header.lane, header.range_number)
        try:
            if reader.footer is None or reader.footer[:-1] != info[:-1]:
                raise BadSegment(f"{reader.name} does not end as it should", "it is repaired from a peer")
            place = self.place
            spot = Spot(place.position, 64) if place.position else reader.locate(place.index)
            if spot is None:
                raise BadSegment(f"record {place.index} is not in {reader.name}", "it is repaired from a peer")
            piece = reader.read(spot._replace(bytes=64), place.index, info.end_index, SCRUB_STEP_BYTES)
            index = place.index + len(piece.payloads)
            self.place = place._replace(index=index, position=piece.position)
            if index >= info.end_index:
                self._check_indexes(log, info, reader)
            return piece.position - spot.position
        finally:
            reader.close()

    def _explain(self, log: RangeLog, info: SegmentInfo) -> list[Found]:
        """What is wrong. A damaged header or footer alone is made anew here: the records say all that is in them."""
        header = log.header(info)
        file = log.disk.open(join(log.folder, segment_name(info.base_seq)), writable=True)
        try:
            raw = file.pread(HEADER_BYTES, 0)
            there = decode_header(raw, segment_name(info.base_seq))
            if there != header and not (there is None and was_header(raw, header)):
                return [Found(log.folder, info.base_index, info.end_index, DamageKind.FILE, b"")]
            found = find_damage(file, log.folder, header, info, log.settings.index_every_bytes)
            if there is None:
                file.pwrite([encode_header(header)], 0)
                file.sync()
        finally:
            file.close()
        if not found:
            finish_segment(log, info)
        return found

    def _check_indexes(self, log: RangeLog, info: SegmentInfo, reader: SegmentReader) -> None:
        footer = reader.footer
        if footer is not None and not all(
            load_index(log.disk, log.folder, footer, suffix) for suffix in (INDEX_FILE, TIME_INDEX_FILE)
        ):
            finish_segment(log, info)


def find_damage(file: File, folder: str, header: Header, info: SegmentInfo, every_bytes: int) -> list[Found]:
    """Which records of a finished segment are damaged."""
    scan = scan_segment(file, header, every_bytes, synced=info.bytes, limit=info.end_index)
    return [
        Found(
            folder, wrong.first, wrong.end or info.end_index, DamageKind.SPAN,
            file.pread(max(0, min(wrong.stop, info.bytes) - wrong.position), wrong.position),
        )
        for wrong in scan.wrong
    ]  # fmt: skip
