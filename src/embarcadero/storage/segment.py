"""One segment: writing it, and reading it, from any process, while it grows, is finished or removed.

This module also has the types that describe segments and damage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from embarcadero.env import Disk, File, Part
from embarcadero.errors import BadSegment, BadValue, DiskFailed, EmbarcaderoError, invariant
from embarcadero.fabric.layout import ORDER, Entries, sealed
from embarcadero.fabric.layout import join as join_entries
from embarcadero.limits import (
    INDEX_EVERY_BYTES,
    KIB,
    LINE_BYTES,
    LOCATE_BYTES,
    READ_BYTES,
    SEGMENT_AGE_S,
    SEGMENT_BYTES,
    SEGMENT_BYTES_MAX,
)  # fmt: skip
from embarcadero.storage.disk import join, read_whole
from embarcadero.storage.layout import (
    DAMAGED,
    FOOTER_BYTES,
    HEADER_BYTES,
    INDEX_FILE,
    LOG,
    TIME_INDEX_FILE,
    FilePosition,
    Footer,
    Header,
    decode_footer,
    decode_header,
    decode_position,
    encode_footer,
    encode_header,
    record_bytes,
    segment_name,
)  # fmt: skip  # fmt: skip
from embarcadero.storage.scan import (
    NO_ENTRIES,
    RECORD_BYTES_LARGEST,
    FileIndex,
    Parsed,
    SparseIndex,
    intact,
    load_index,
    parse,
    payloads,
    write_indexes,
)

# --- writing ----------------------------------------------------------------------------------------------------------
_INDEX, _SEQ, _APPEND_US, _COUNT = map((ORDER.names or ()).index, ("index", "seq", "append_us", "count"))
_FEW = 8
"""Up to this many records, plain numbers are faster than arrays."""
_ZEROS = bytes(LINE_BYTES)
_JOINED_BYTES_MAX = 128 * KIB
"""Up to this size, joining the parts is faster than passing them to the system one by one."""


@dataclass(frozen=True, slots=True)
class RangeSettings:
    """Settings of a range's copy. `cluster` is written into every segment."""

    cluster: str = ""
    segment_bytes: int = SEGMENT_BYTES
    segment_age_s: float = SEGMENT_AGE_S
    index_every_bytes: int = INDEX_EVERY_BYTES

    def __post_init__(self) -> None:
        if not HEADER_BYTES < self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise BadValue(f"segment_bytes={self.segment_bytes} is too large", f"use at most {SEGMENT_BYTES_MAX}")
        if self.segment_age_s <= 0 or self.index_every_bytes <= 0:
            raise BadValue("segment_age_s and index_every_bytes must be above zero")


class SegmentInfo(NamedTuple):
    """A segment as seen by others. `sealed`: complete, synced, never written again."""

    base_index: int
    base_seq: int
    end_index: int
    end_seq: int
    bytes: int
    last_us: int
    sealed: bool


class DamageKind(StrEnum):
    """Kinds of damage of a copy."""

    SPAN = "span"  # some records of a segment
    FILE = "file"  # a whole segment that is missing, or does not belong to the range
    TAIL = "tail"  # everything from here on, with unknown end


class Damage(NamedTuple):
    """Indices [first, end) that the copy should have and has not; for a TAIL at least these.

    `name` is the file with the damaged bytes that were put aside.
    """

    first: int
    end: int
    kind: DamageKind
    name: str

    def overlaps(self, info: SegmentInfo) -> bool:
        """Return whether it overlaps a segment."""
        return self.first < info.end_index and self.end > info.base_index

    def covers(self, other: Damage) -> bool:
        """Return whether repairing this repairs the other.

        A FILE covers SPANs, because a segment is restored as a whole. A TAIL covers only a TAIL.
        """
        kinds = (other.kind, DamageKind.FILE) if other.kind is DamageKind.SPAN else (other.kind,)
        return self.kind in kinds and self.first <= other.first and other.end <= self.end

    def is_below(self, start: int) -> bool:
        """Return whether a copy that starts there does not need it. That is unknown for a tail."""
        return self.kind is not DamageKind.TAIL and self.end <= start


@dataclass(slots=True)
class SegmentWriter:
    """The active segment. Everything in it below `position` is complete."""

    file: File
    header: Header
    position: int
    end: int
    end_seq: int
    index: SparseIndex
    last_us: int = 0
    opened_us: int | None = None
    footer: Footer | None = field(default=None)

    @property
    def may_roll(self) -> bool:
        """Whether a new segment may follow: two segments never share a base seq."""
        return self.end_seq > self.header.base_seq

    @property
    def info(self) -> SegmentInfo:
        """The segment as seen by others."""
        return SegmentInfo(
            self.header.base_index,
            self.header.base_seq,
            self.end,
            self.end_seq,
            self.position,
            self.last_us,
            self.footer is not None,
        )

    def write(self, entries: Entries, payloads: Sequence[Part], bytes_each: Sequence[int]) -> None:
        """Append consecutive records with one write."""
        total = sum(bytes_each)
        parts = record_parts(entries, payloads)
        try:
            self.file.pwrite([b"".join(parts)] if total <= _JOINED_BYTES_MAX else parts, self.position)
        except EmbarcaderoError:
            with suppress(EmbarcaderoError):
                self.file.truncate(self.position)  # a partial record is useless
            raise
        positions, position = [], self.position
        for size in bytes_each:
            positions.append(position)
            position += size
        self.index.add(entries, positions)
        self.position = position
        last = entries[-1].item()
        self.end = last[_INDEX] + 1
        self.end_seq = last[_SEQ] + last[_COUNT]
        self.last_us = last[_APPEND_US]

    def finish(self, disk: Disk, folder: str, last: bool) -> None:
        """Write footer and indexes. Everything must be synced, including the next segment's header."""
        footer = Footer(
            self.header.base_index, self.header.base_seq, self.end, self.end_seq, self.position, self.last_us, last
        )
        if self.file.size() > self.position:
            self.file.truncate(self.position)  # a failed write left data there
        self.file.pwrite([encode_footer(footer)], self.position)
        self.file.sync()
        with suppress(EmbarcaderoError):  # indexes are only caches
            write_indexes(disk, folder, self.index, footer)
        self.footer = footer


def check_records(entries: Entries, payloads: Sequence[Part], index: int, seq: int) -> list[int]:
    """Return the payloads' sizes. Checks that the records continue a log that ends at this index and seq."""
    sizes: list[int] = entries["size"].tolist()
    invariant(sizes == list(map(len, payloads)), "each entry has its payload")
    if len(sizes) <= _FEW:
        for row in entries.tolist():
            invariant(row[_INDEX] == index and row[_SEQ] == seq, "records continue the log")
            index, seq = index + 1, seq + row[_COUNT]
        return sizes
    seqs = np.cumsum(entries["count"], dtype=np.uint64)
    seqs += np.uint64(seq) - entries["count"]
    invariant(
        (entries["index"] == np.arange(index, index + len(sizes), dtype=np.uint64)).all()
        and (entries["seq"] == seqs).all(),
        "records continue the log",
    )
    return sizes


def record_parts(entries: Entries, payloads: Sequence[Part]) -> list[Part]:
    """Return records in their on-disk form: entry, payload, padding."""
    lines = memoryview(np.ascontiguousarray(entries).view(np.uint8))  # type: ignore[arg-type]
    parts: list[Part] = []
    for number, payload in enumerate(payloads):
        parts.append(lines[number * LINE_BYTES : (number + 1) * LINE_BYTES])
        if size := len(payload):
            parts.append(payload)
            if size % LINE_BYTES:
                parts.append(_ZEROS[size % LINE_BYTES :])
    return parts


def begin_segment(disk: Disk, folder: str, header: Header, settings: RangeSettings) -> SegmentWriter:
    """Create a new, empty segment. Neither its header nor its name is synced yet."""
    path = join(folder, segment_name(header.base_seq))
    file = disk.open(path, create=True)
    try:
        file.pwrite([encode_header(header)], 0)
    except EmbarcaderoError:
        file.close()
        with suppress(EmbarcaderoError):
            disk.remove(path)
        raise
    index = SparseIndex(settings.index_every_bytes)
    return SegmentWriter(file, header, HEADER_BYTES, header.base_index, header.base_seq, index)


def remove_segment(disk: Disk, folder: str, base_seq: int) -> None:
    """Remove a segment's files. The log is removed last, so that no index remains without it."""
    _remove_files(disk, folder, base_seq, (INDEX_FILE, TIME_INDEX_FILE, LOG))


def put_segment_aside(disk: Disk, folder: str, base_seq: int) -> None:
    """Keep a segment that does not match its name, for inspection. Its indexes are removed."""
    path = join(folder, segment_name(base_seq))
    if disk.exists(path):
        disk.rename(path, path + DAMAGED)
    _remove_files(disk, folder, base_seq, (INDEX_FILE, TIME_INDEX_FILE))
    disk.sync_folder(folder)


def remove_lone_indexes(disk: Disk, folder: str) -> None:
    """Remove indexes without a segment: it was deleted manually, or a crash interrupted putting it aside."""
    names = set(disk.list(folder))
    for name in sorted(names):
        base, _, suffix = name.partition(".")
        if f".{suffix}" in (INDEX_FILE, TIME_INDEX_FILE) and base + LOG not in names:
            disk.remove(join(folder, name))


def _remove_files(disk: Disk, folder: str, base_seq: int, suffixes: Sequence[str]) -> None:
    names = set(disk.list(folder))
    for suffix in suffixes:
        if (name := segment_name(base_seq, suffix)) in names:
            disk.remove(join(folder, name))


# --- reading ----------------------------------------------------------------------------------------------------------
_REPAIR = "the replica repairs it from a peer; read from another replica meanwhile"


class Piece(NamedTuple):
    """Records of one read, and the position of the next one."""

    entries: Entries
    payloads: list[memoryview]
    position: int


class Spot(NamedTuple):
    """The position of a record in its segment, and its size there."""

    position: int
    bytes: int


class Point(NamedTuple):
    """A record at which a segment can be cut: index, seq, and bytes up to the next point."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    bytes: int


def read_footer(disk_bytes: bytes, size: int, header: Header) -> Footer | None:
    """Decode a footer, if these last bytes of a file of this size are one and match this header."""
    footer = decode_footer(disk_bytes)
    if footer is None or footer.bytes + FOOTER_BYTES != size:
        return None
    return footer if (footer.base_index, footer.base_seq) == (header.base_index, header.base_seq) else None


def read_position(disk: Disk, folder: str, name: str, lane: int, number: int) -> FilePosition | None:
    """Read the start file or mark of a range. None if it is missing, damaged or of another range."""
    try:
        position = decode_position(read_whole(disk, join(folder, name), LINE_BYTES), name)
    except DiskFailed:
        return None
    return position if position is not None and position.belongs_to(lane, number) else None


class SegmentReader:
    """One segment, open for reading. Raises Missing if it was removed, BadSegment if it does not match its name."""

    def __init__(self, disk: Disk, folder: str, base_seq: int, lane: int, range_number: int) -> None:
        self._disk, self._folder = disk, folder
        self.name = join(folder, segment_name(base_seq))
        self._file = disk.open(self.name)
        header = decode_header(self._file.pread(HEADER_BYTES, 0), self.name)
        if header is None:
            raise BadSegment(f"the header of {self.name} is damaged", _REPAIR)
        if (header.lane, header.range_number, header.base_seq) != (lane, range_number, base_seq):
            raise BadSegment(f"{self.name} belongs to another range: {header}", _REPAIR)
        self.header = header
        self.footer: Footer | None = None
        self._seq_index: FileIndex | None = None
        self._time_index: FileIndex | None = None
        self._looked = self._indexed = False
        self._learned = SparseIndex(INDEX_EVERY_BYTES)
        self._learned_to = HEADER_BYTES, header.base_index
        self.refresh()

    def refresh(self) -> None:
        """Check whether the segment was finished meanwhile."""
        if self.footer is None:
            size = self._file.size()
            if size % LINE_BYTES == FOOTER_BYTES % LINE_BYTES and size >= HEADER_BYTES + FOOTER_BYTES:
                self.footer = read_footer(self._file.pread(FOOTER_BYTES, size - FOOTER_BYTES), size, self.header)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def data_end(self) -> int:
        """Where records end: permanently if the segment is finished, otherwise currently."""
        return self._file.size() if self.footer is None else self.footer.bytes

    @property
    def end_index(self) -> int:
        """The index after its last record."""
        if self.footer is not None:
            return self.footer.end_index
        self._learn()
        return self._learned_to[1]

    # --- lookups ------------------------------------------------------------------------------------------------------
    def locate(self, index: int) -> Spot | None:
        """Return where a record is; None if it is not there (yet)."""
        if index == self.header.base_index:
            entry = self.entry(HEADER_BYTES)
            return Spot(HEADER_BYTES, record_bytes(int(entry["size"][0]))) if len(entry) else None
        found = self._first("index", index)
        return None if found is None or int(found[0]["index"][0]) != index else _spot(*found)

    def entry(self, position: int) -> Entries:
        """Return the entry at a position, unchecked; an empty array if the file ends before its end."""
        line = self._file.pread(LINE_BYTES, position)
        return np.frombuffer(line if len(line) == LINE_BYTES else b"", dtype=ORDER)  # a file may end within a line

    def index_of_seq(self, seq: int) -> int | None:
        """Return the index of the batch that contains a record; None if it is after the end."""
        found = self._first("seq", seq)
        return None if found is None else int(found[0]["index"][0])

    def index_of_time(self, us: int) -> int | None:
        """Return the index of the first batch appended at or after this time; None if there is none here."""
        found = self._first("append_us", us)
        return None if found is None else int(found[0]["index"][0])

    def _first(self, field: str, value: int) -> tuple[Entries, int] | None:
        """Return the first entry at or above a value, and its position. For seqs: the entry that contains it."""
        for entries, positions in self.walk(*self._floor(field, value)):
            reached = entries[field] + entries["count"] > value if field == "seq" else entries[field] >= value
            if reached.any():
                number = int(reached.argmax())
                return entries[number : number + 1], positions[number]
        return None

    def _floor(self, field: str, value: int) -> tuple[int, int]:
        """Return position and index of a record at or shortly before the requested one."""
        self._load_indexes()
        point = self._floor_in_files(field, value) if self._indexed else None
        if point is None:
            self._indexed = False
            self._learn()
            learned = self._learned
            keys = {"index": learned.indices, "seq": learned.seqs, "append_us": learned.times}[field]
            number = (bisect_left if field == "append_us" else bisect_right)(keys, value) - 1
            return (learned.positions[number], learned.indices[number]) if number >= 0 else self._start
        return point

    @property
    def _start(self) -> tuple[int, int]:
        return HEADER_BYTES, self.header.base_index

    def _load_indexes(self) -> None:
        if self.footer is not None and not self._looked:
            self._looked = True
            self._seq_index = load_index(self._disk, self._folder, self.footer, INDEX_FILE)
            self._time_index = load_index(self._disk, self._folder, self.footer, TIME_INDEX_FILE)
            self._indexed = self._seq_index is not None and self._time_index is not None

    def _floor_in_files(self, field: str, value: int) -> tuple[int, int] | None:
        """Do the same from the index files. None if they lead to a wrong record."""
        index = self._time_index if field == "append_us" else self._seq_index
        if index is None or self.footer is None:
            return None
        if field == "index":
            return self._floor_by_index(index, value)
        number = index.floor(value, below=field == "append_us")
        if number is None:
            return self._start
        position = int(index.positions[number])
        found = self._index_at(position)
        if found is None or int(self.entry(position)[field][0]) != int(index.keys[number]):
            return None
        return position, found

    def _floor_by_index(self, index: FileIndex, value: int) -> tuple[int, int] | None:
        low, high = 0, len(index.positions)
        best = self._start
        while low < high:
            middle = (low + high) // 2
            position = int(index.positions[middle])
            found = self._index_at(position)
            if found is None:
                return None
            if found <= value:
                low, best = middle + 1, (position, found)
            else:
                high = middle
        return best

    def _index_at(self, position: int) -> int | None:
        """Return the index of the record at a position; None if no valid entry is there."""
        entry = self.entry(position)
        if not len(entry) or not sealed(entry)[0] or self.footer is None:
            return None
        index = int(entry["index"][0])
        return index if self.header.base_index <= index < self.footer.end_index else None

    def _learn(self) -> None:
        """Index the unread part: the whole segment only if an index file is missing or wrong."""
        position, index = self._learned_to
        for entries, positions in self.walk(position, index, READ_BYTES):
            self._learned.add(entries, positions)
            last = entries[-1:]
            self._learned_to = positions[-1] + record_bytes(int(last["size"][0])), int(last["index"][0]) + 1

    # --- measuring ----------------------------------------------------------------------------------------------------
    def points(self, first: int, stop: int, every: int) -> list[Point]:
        """Return the first record of [first, stop), and others about `every` bytes apart, from the sparse index.

        Raises BadSegment if a record is missing. `stop` is at most `end_index`.
        """
        begin = self._position(first)
        end = self.data_end if stop >= self.end_index else self._position(stop)
        self._load_indexes()
        if self._indexed and self._seq_index is not None:
            known = self._seq_index.positions
        else:
            self._learn()
            known = np.array(self._learned.positions, dtype=np.int64)
        at = np.searchsorted(known, np.arange(begin + every, end, every))
        chosen = [int(position) for position in known[np.unique(at[at < len(known)])].tolist() if position < end]
        found = [(position, self.entry(position)) for position in (begin, *chosen)]
        marks = [(at_byte, int(e["index"][0]), int(e["seq"][0])) for at_byte, e in found if len(e) and sealed(e)[0]]
        marks = [mark for mark in marks if first <= mark[1] < stop]  # a wrong index only moves a cut
        if not marks or marks[0][1] != first:
            raise BadSegment(f"record {first} in {self.name} at {begin} is damaged", _REPAIR)
        ends = [*(position for position, _, _ in marks[1:]), end]
        return [Point(index, seq, after - at) for (at, index, seq), after in zip(marks, ends, strict=True)]

    def _position(self, index: int) -> int:
        spot = self.locate(index)
        if spot is None:
            raise BadSegment(f"record {index} is missing or damaged in {self.name}", _REPAIR)
        return spot.position

    # --- reading ------------------------------------------------------------------------------------------------------
    def walk(self, position: int, index: int, piece_bytes: int = LOCATE_BYTES) -> Iterator[tuple[Entries, list[int]]]:
        """Yield valid entries and their positions from a record on, some at a time, without payloads."""
        piece = LOCATE_BYTES
        end = self.data_end
        while position < end:
            data = self._file.pread(min(piece, end - position), position)
            parsed = parse(data, index, self._end_index, whole=False)
            if not parsed.offsets:
                return
            yield parsed.entries, [position + offset for offset in parsed.offsets]
            few = len(parsed.offsets) == 1 and parsed.end > piece
            piece = LINE_BYTES if few else LOCATE_BYTES if piece == LINE_BYTES else piece_bytes
            position += parsed.end
            index += len(parsed.offsets)

    @property
    def _end_index(self) -> int:
        return (1 << 63) if self.footer is None else self.footer.end_index

    def read(self, spot: Spot, index: int, end: int, max_bytes: int) -> Piece:
        """Read and check records `index` to `end` from a position on: up to `max_bytes`, but at least one.

        The result is empty if the record is not there yet. Raises BadSegment if it is there, and wrong. Pieces are
        small enough to be checked while they are in the processor's cache.
        """
        found: list[Entries] = []
        views: list[memoryview] = []
        position, budget = spot.position, max(1, max_bytes)
        stride = min(max(LINE_BYTES, spot.bytes), RECORD_BYTES_LARGEST)  # a damaged entry may claim any size
        while index < end and budget > 0 and (not views or budget >= stride):
            count = max(1, min(min(READ_BYTES, budget) // stride, end - index))
            piece = self._read_some(position, count * stride, index, end, first=not views)
            if not piece.payloads:
                break
            found.append(piece.entries)
            views += piece.payloads
            taken, index = piece.position - position, index + len(piece.payloads)
            budget, position, stride = budget - taken, piece.position, taken // len(piece.payloads)
        return Piece(found[0] if len(found) == 1 else join_entries(found) if found else NO_ENTRIES, views, position)

    def _read_some(self, position: int, size: int, index: int, end: int, first: bool) -> Piece:
        data, parsed = self._load(position, size, index, end)
        good = intact(data, parsed.entries, parsed.offsets)
        if not good and first:
            data, parsed = self._load(position, size, index, end)  # it may have been partially written
            good = intact(data, parsed.entries, parsed.offsets)
            if not good and self._broken(data, position, parsed):
                raise BadSegment(f"record {index} in {self.name} at {position} is damaged", _REPAIR)
        after = parsed.offsets[good] if good < len(parsed.offsets) else parsed.end
        entries, offsets = parsed.entries[:good], parsed.offsets[:good]
        return Piece(entries, payloads(data, entries, offsets), position + after)

    def _load(self, position: int, size: int, index: int, end: int) -> tuple[bytes, Parsed]:
        size = max(0, min(size, self.data_end - position))
        data = self._file.pread(size, position)
        parsed = parse(data, index, end)
        if not parsed.offsets and size < parsed.wanted <= RECORD_BYTES_LARGEST:
            data = self._file.pread(parsed.wanted, position)
            parsed = parse(data, index, end)
        return data, parsed

    def _broken(self, data: bytes, position: int, parsed: Parsed) -> bool:
        """Return whether the data is wrong, and not merely missing (yet)."""
        if self.footer is not None:
            return position < self.footer.bytes
        if parsed.offsets:
            return True  # an entry and its whole payload, which do not match
        return not parsed.wanted and len(data) >= LINE_BYTES and any(data[:LINE_BYTES]) and not self._ends_at(position)

    def _ends_at(self, position: int) -> bool:
        """Return whether the segment was finished at this position meanwhile."""
        self.refresh()
        return self.footer is not None and self.footer.bytes == position


def _spot(entry: Entries, position: int) -> Spot:
    return Spot(position, record_bytes(int(entry["size"][0])))
