"""Repair from a peer: read the missing records from another replica's files, check them, and write them here.

A damaged span is rewritten in place: records have the same bytes on every replica, so they have the same size. A
missing segment is written in a separate folder and moved in when it is complete. A damaged tail is appended again. Only
a caller that knows where the range ends can decide when it is complete.

Scrubbing: finished segments are read again and again, slowly, so that bit rot is found while peers have good copies.

A step reads a little and sets the time of the next one. Steps are jobs for a worker; the role's own thread records the
damage they find. A step may rewrite a footer or an index, so no caller may cut, drop or seal its log meanwhile.
`position` is the scrub's progress: pass it to the next scrub to continue there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from embarcadero.env import Clock, Disk, File
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import Entries, every, sealed
from embarcadero.limits import SCAN_BYTES, SCRUB_BYTES_PER_S, SCRUB_ROUND_S, SCRUB_STEP_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.layout import (
    HEADER_BYTES,
    INDEX_FILE,
    TIME_INDEX_FILE,
    Header,
    base_seqs,
    decode_header,
    encode_header,
    record_bytes,
    repair_folder,
    segment_name,
    was_header,
)  # fmt: skip
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.recovery import open_as_empty, remove_range
from embarcadero.storage.scan import load_index, scan_segment
from embarcadero.storage.segment import Damage, DamageKind, SegmentInfo, SegmentReader, Spot, record_parts


def copy_span(peer: RangeReader, log: RangeLog, end: int, max_bytes: int = SCAN_BYTES, pieces: int = 1 << 62) -> int:
    """Append a peer's records from the log's end up to `end`. Returns the log's new end. Not synced.

    `pieces`: the most reads, for callers with other work to do.
    """
    while log.end < end and pieces > 0:
        entries, payloads = peer.read(log.end, end, max_bytes)
        if not len(entries):
            break
        log.append(entries, payloads)
        pieces -= 1
    return log.end


def heal_tails(log: RangeLog, end: int) -> None:
    """Clear missing tails of a log that is synced through `end`, if no broker ever counted more than that."""
    if log.synced >= end:
        for damage in [one for one in log.damage if one.kind is DamageKind.TAIL]:
            log.healed(damage)


def mend(log: RangeLog, peer: RangeReader, damage: Damage, trimmed: int = 0) -> bool:
    """Repair a SPAN or FILE from a peer, synced on return. False if this peer lacks it, or it is a TAIL.

    Raises BadSegment if the peer's records are damaged too. A TAIL needs `copy_span` and `heal_tails`. `trimmed`:
    entries below are not needed, and peers may have dropped them.
    """
    if damage.kind is DamageKind.TAIL:
        return False
    is_first = damage.kind is DamageKind.FILE and damage.end <= log.first
    if is_first and damage.first < (start := _start_of(peer)) <= trimmed:
        if start >= damage.end:
            log.healed(damage)  # not needed; the remaining hole, if any, marks where the copy starts
            return True
        first = peer.entry(start)
        if first is None or int(first["seq"][0]) == log.segments[0].base_seq:  # a file's name is its first seq
            return False
        damage = log.begin_later(damage, start, int(first["seq"][0]))
    entries = peer.entries(damage.first, damage.end)
    if len(entries) < damage.end - damage.first:
        return False
    done = _mend_span(log, peer, damage, entries) if damage.kind is DamageKind.SPAN else _mend_file(log, peer, damage)
    if done:
        log.healed(damage)
    return done


def _start_of(peer: RangeReader) -> int:
    """Return where a peer's copy starts. 0 if unknown: it may still have the requested records."""
    with suppress(BadSegment):
        return peer.first or 0
    return 0


def _holding(log: RangeLog, index: int) -> SegmentInfo | None:
    held = [info for info in log.segments if info.base_index <= index < info.end_index]
    return held[0] if held else None


def _mend_span(log: RangeLog, peer: RangeReader, damage: Damage, entries: Entries) -> bool:
    info = _holding(log, damage.first)
    if info is None:
        return False
    header = log.header(info)
    reader = SegmentReader(log.disk, log.folder, info.base_seq, header.lane, header.range_number)
    try:
        position = _end_of(reader, damage.first - 1)
        if position is None:
            return False  # an earlier part is damaged too: repair that first
        stop = position + sum(record_bytes(size) for size in entries["size"].tolist())
        fits = _fits(reader, stop, damage.end, info)
    finally:
        reader.close()
    if not fits:
        return replace_segment(log, peer, info)
    _write_over(log.disk, join(log.folder, segment_name(info.base_seq)), position, peer, damage)
    if not info.sealed:
        return True
    if (made := finish_segment(log, info)) is not None:
        if made != info:  # recovery had not found all of it
            log.adopt([made])
        return True
    return any(one != damage and one.overlaps(info) for one in log.damage)  # finished when the other damage is repaired


def replace_segment(log: RangeLog, peer: RangeReader, info: SegmentInfo) -> bool:
    """Replace a whole segment in which the peer's records do not fit, although records have the same size everywhere.

    Such a segment does not belong to this range, even if its header does.
    """
    held = len(peer.entries(info.base_index, info.end_index))
    if not info.sealed or held < info.end_index - info.base_index:
        hint = "remove this segment's file and restart the replica: it then gets the whole segment from its peers"
        raise BadSegment(f"a peer's records do not fit {segment_name(info.base_seq)} of {log.folder}", hint)
    return mend(log, peer, log.quarantine(info.base_index, info.end_index, DamageKind.FILE, b""))


def _end_of(reader: SegmentReader, index: int) -> int | None:
    """Return where a record ends, searching from the segment's start because indexes may be wrong too."""
    if index < reader.header.base_index:
        return HEADER_BYTES
    for entries, positions in reader.walk(HEADER_BYTES, reader.header.base_index):
        if index <= int(entries["index"][-1]):
            number = index - int(entries["index"][0])
            return positions[number] + record_bytes(int(entries["size"][number]))
    return None


def _fits(reader: SegmentReader, stop: int, end: int, info: SegmentInfo) -> bool:
    """Return whether the next record, or the segment's end, begins where the span ends."""
    if end >= info.end_index:
        return reader.footer is None or stop == reader.footer.bytes
    entry = reader.entry(stop)
    return len(entry) == 1 and every(sealed(entry)) and int(entry["index"][0]) == end


def _write_over(disk: Disk, path: str, position: int, peer: RangeReader, damage: Damage) -> None:
    file = disk.open(path, writable=True)
    try:
        index = damage.first
        while index < damage.end:
            entries, payloads = peer.read(index, damage.end, SCAN_BYTES)
            if not len(entries):
                raise BadSegment(f"{peer.folder} no longer has record {index}", "try another peer")
            file.pwrite(record_parts(entries, payloads), position)
            position += sum(record_bytes(len(payload)) for payload in payloads)
            index += len(entries)
        file.sync()
    finally:
        file.close()


def finish_segment(log: RangeLog, info: SegmentInfo) -> SegmentInfo | None:
    """Write footer and indexes of a sealed segment that is complete again. None if it is not."""
    header = log.header(info)
    file = log.disk.open(join(log.folder, segment_name(info.base_seq)), writable=True)
    try:
        every_bytes = log.settings.index_every_bytes
        scan = scan_segment(file, header, every_bytes, synced=1 << 63, limit=info.end_index)
        if scan.wrong or scan.end < info.end_index:
            return None
        whole = open_as_empty(file, header, log.settings)
        whole.position, whole.end, whole.end_seq = scan.position, scan.end, scan.end_seq
        whole.last_us, whole.index = scan.last_us, scan.sparse
        whole.finish(log.disk, log.folder, last=log.closes_at(info.end_index))
        return whole.info
    finally:
        file.close()


def _mend_file(log: RangeLog, peer: RangeReader, damage: Damage) -> bool:
    """Write missing segments in a separate folder (or continue an interrupted repair), then move them in."""
    first = peer.entry(damage.first)
    if first is None:
        return False
    folder = repair_folder(log.folder)
    base = log.header(log.segments[0])._replace(base_index=damage.first, base_seq=int(first["seq"][0]))
    parts = RangeLog.recover(
        log.disk, folder, base.lane, base.range_number, base.base_index, base.base_seq, log.settings
    )
    usable, made = not parts.damage and parts.first == damage.first, None
    try:
        if usable and copy_span(peer, parts, damage.end) >= damage.end:
            made = parts.finish(last=log.closes_at(damage.end))
    finally:
        parts.close()
    others = {info.base_seq for info in log.segments if not damage.overlaps(info)}
    if made is not None and any(info.base_seq in others for info in made):
        made, usable = None, False  # split differently: its last file has no records, and the name of a segment here
    if not usable:
        remove_range(log.disk, folder)  # left by another repair and unusable: the next try starts again
    if made is None:
        return False
    _move_in(log, folder)
    log.adopt(made)
    return True


def _move_in(log: RangeLog, folder: str) -> None:
    names = log.disk.list(folder)
    for base_seq in base_seqs(names):
        stem = segment_name(base_seq, "")
        for name in names:
            if name.startswith(stem):
                log.disk.rename(join(folder, name), join(log.folder, name))
    log.disk.sync_folder(log.folder)
    remove_range(log.disk, folder)


class ScrubPosition(NamedTuple):
    """The position of a scrub: folder, segment, record."""

    folder: str = ""
    base_seq: int = 0
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    position: int = 0


class Found(NamedTuple):
    """Damage that a step found: indices [first, end) of a copy, and the bytes that are there."""

    folder: str
    first: int
    end: int
    kind: DamageKind
    bytes: bytes


class Scrub:
    """Checks the finished segments of some logs, round after round."""

    def __init__(
        self, clock: Clock, bytes_per_s: int = SCRUB_BYTES_PER_S, position: ScrubPosition | None = None
    ) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self.position = position or ScrubPosition()
        self.due_us = clock.now_us()
        self._round_us = 0  # earliest start of the next round
        self.checked_bytes = self.rounds = 0
        self.log: RangeLog | None = None  # the log of the running step, or the last one

    @property
    def due(self) -> bool:
        """Whether the next step may run."""
        return self._bytes_per_s > 0 and self._clock.now_us() >= self.due_us

    def job(self, logs: Sequence[RangeLog]) -> Callable[[], list[Found]]:
        """Return the next step as a job for a worker. Run one at a time; the role continues meanwhile."""
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
        """Quarantine the damage that a step found. Call it in the role's thread."""
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
            # the next step continues after this segment
            self.position = ScrubPosition(log.folder, info.base_seq, info.end_index, info.bytes)
            if isinstance(error, BadSegment):
                return self._explain(log, info)
            if log.disk.exists(join(log.folder, segment_name(info.base_seq))):
                raise  # the disk can't read a part: putting the segment aside would lose the rest
            return [Found(log.folder, info.base_index, info.end_index, DamageKind.FILE, b"")]
        finally:
            self.checked_bytes += checked
            self.due_us = self._clock.now_us() + checked * 1_000_000 // self._bytes_per_s

    def _choose(self, segments: list[tuple[RangeLog, SegmentInfo]]) -> tuple[RangeLog, SegmentInfo] | None:
        """Choose the segment to continue with: the current one, the next one, or the first one if a round is due."""
        position = self.position
        for log, info in segments:
            here = log.folder, info.base_seq
            if here == position[:2] and position.index < info.end_index:
                return log, info
            if here > position[:2]:
                self.position = ScrubPosition(*here, info.base_index, 0)
                return log, info
        now_us = self._clock.now_us()
        if not segments or now_us < self._round_us:
            return None
        self._round_us = now_us + int(SCRUB_ROUND_S * 1_000_000)
        self.rounds += 1
        log, info = segments[0]
        self.position = ScrubPosition(log.folder, info.base_seq, info.base_index, 0)
        return log, info

    def _check(self, log: RangeLog, info: SegmentInfo) -> int:
        """Check some records, and at a segment's end its indexes. Returns how many bytes were read."""
        header = log.header(info)
        reader = SegmentReader(log.disk, log.folder, info.base_seq, header.lane, header.range_number)
        try:
            if reader.footer is None or reader.footer[:-1] != info[:-1]:
                raise BadSegment(f"{reader.name} has a wrong end", "it is repaired from a peer")
            position = self.position
            spot = Spot(position.position, 64) if position.position else reader.locate(position.index)
            if spot is None:
                raise BadSegment(f"record {position.index} is missing from {reader.name}", "it is repaired from a peer")
            piece = reader.read(spot._replace(bytes=64), position.index, info.end_index, SCRUB_STEP_BYTES)
            index = position.index + len(piece.payloads)
            self.position = position._replace(index=index, position=piece.position)
            if index >= info.end_index:
                self._check_indexes(log, info, reader)
            return piece.position - spot.position
        finally:
            reader.close()

    def _explain(self, log: RangeLog, info: SegmentInfo) -> list[Found]:
        """Find out which part is damaged. If only the header or footer is, rewrite it from the records."""
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
    """Return the damaged records of a finished segment."""
    scan = scan_segment(file, header, every_bytes, synced=info.bytes, limit=info.end_index)
    return [
        Found(
            folder,
            wrong.first,
            wrong.end or info.end_index,
            DamageKind.SPAN,
            file.pread(max(0, min(wrong.stop, info.bytes) - wrong.position), wrong.position),
        )
        for wrong in scan.wrong
    ]
