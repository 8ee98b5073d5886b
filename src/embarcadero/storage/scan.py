"""Parse many records at a time: step from entry to entry, then check them all together.

Sparse indexes map seq -> position and append time -> position, with at most one entry per few KiB of a segment.

They are caches. The active segment has its index in memory. A finished one has it in `.index` and `.timeindex`: 12-byte
big-endian entries in ascending order. A last entry has the segment's end, which ties a file to its segment. A file that
does not match is not used, and a reader that follows an entry checks that it leads to a valid record of that seq. A
wrong index therefore costs time, but never gives wrong records.

Scanning a segment without a footer separates complete, torn and damaged data. A disk writes a sector completely or not
at all. Data that a crash removed from the end of a file reads as zeros, or the file is shorter. So an entry line that
is neither zero nor valid, or a payload that does not match its entry though none of its sectors is zero, was written
and has changed since. That is damage, and it is never cut. A hole is cut unless the mark shows that it was synced.
Bytes in an unknown format are cut if no valid record follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from embarcadero.env import Disk, File
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries, every, pick, sealed
from embarcadero.limits import FRAME_BYTES_MAX, INDEX_EVERY_BYTES, LINE_BYTES, SCAN_BYTES, SECTOR_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.layout import (
    HEADER_BYTES,
    INDEX,
    INDEX_FILE,
    TIME_INDEX_FILE,
    Footer,
    Header,
    decode_footer,
    record_bytes,
    segment_name,
)  # fmt: skip
from embarcadero.types import EntryKind

_WORDS, _HALVES = LINE_BYTES // 8, LINE_BYTES // 4
_SIZE_HALF = 10
"""The 32-bit half of an entry that holds its payload's size."""
_KIND_MAX = EntryKind.SKIP
_FEW = 8
_INDEX, _SEQ, _SIZE, _COUNT, _KIND = map((ORDER.names or ()).index, ("index", "seq", "size", "count", "kind"))
NO_ENTRIES: Final = np.zeros(0, dtype=ORDER)
RECORD_BYTES_LARGEST: Final = LINE_BYTES + -(-FRAME_BYTES_MAX // LINE_BYTES) * LINE_BYTES


class Parsed(NamedTuple):
    """Valid consecutive entries, their offsets in the data, and the offset after them.

    `wanted`: bytes from the start that the next record needs, if the end of the data cuts off its payload.
    """

    entries: Entries
    offsets: list[int]
    end: int
    wanted: int


def parse(data: bytes, index: int, end: int, seq: int | None = None, whole: bool = True) -> Parsed:
    """Parse the valid entries `index` to `end` in `data`, which begins with the first of them.

    `whole`: only records whose payload is complete; otherwise the end of the data may cut off the last one.
    """
    lines = len(data) // LINE_BYTES
    found, after = _step_through(data, lines, index, end)
    if not found:
        return Parsed(NO_ENTRIES, [], 0, 0)
    entries = pick(np.frombuffer(data, dtype=ORDER, count=lines), np.array(found))
    valid = _valid(entries, index, seq)
    if valid < len(found):
        after, found, entries = found[valid], found[:valid], entries[:valid]
    wanted = 0
    if found and after > lines and whole:
        wanted, after = after * LINE_BYTES, found.pop()
        entries = entries[:-1]
    return Parsed(entries, [line * LINE_BYTES for line in found], after * LINE_BYTES, wanted)


def _step_through(data: bytes, lines: int, index: int, end: int) -> tuple[list[int], int]:
    """Return the lines that look like these entries, and the line after the last record."""
    words = memoryview(data)[: lines * LINE_BYTES].cast("Q")
    sizes = memoryview(data)[: lines * LINE_BYTES].cast("I")
    found = []
    line = 0
    while line < lines and index < end and words[line * _WORDS] == index:
        found.append(line)
        line += 1 + (sizes[line * _HALVES + _SIZE_HALF] + LINE_BYTES - 1) // LINE_BYTES
        index += 1
    return found, line


def _valid(entries: Entries, index: int, seq: int | None) -> int:
    """Return how many entries from the start are valid and consecutive."""
    if len(entries) <= _FEW:
        return _valid_few(entries, index, seq)
    valid = sealed(entries)
    valid &= entries["index"] == np.arange(index, index + len(entries), dtype=np.uint64)
    valid &= (entries["size"] <= FRAME_BYTES_MAX) & (entries["kind"] - np.uint8(1) < _KIND_MAX)
    first = int(entries["seq"][0]) if seq is None else seq
    after = np.cumsum(entries["count"], dtype=np.uint64) + np.uint64(first)
    valid[0] &= int(entries["seq"][0]) == first
    valid[1:] &= entries["seq"][1:] == after[:-1]
    return len(entries) if every(valid) else int(valid.argmin())


def _valid_few(entries: Entries, index: int, seq: int | None) -> int:
    """Do the same without arrays: faster for a few large records."""
    checks = sealed(entries).tolist()
    for number, row in enumerate(entries.tolist()):
        fits = checks[number] and row[_INDEX] == index and (seq is None or row[_SEQ] == seq)
        if not fits or row[_SIZE] > FRAME_BYTES_MAX or not 0 < row[_KIND] <= _KIND_MAX:
            return number
        index, seq = index + 1, row[_SEQ] + row[_COUNT]
    return len(checks)


def intact(data: bytes, entries: Entries, offsets: list[int]) -> int:
    """Return how many records from the start have a payload that matches their entry's CRC32C."""
    raw = np.frombuffer(data, dtype=np.uint8)
    crc = google_crc32c.value
    rows = zip(offsets, entries["size"].tolist(), entries["crc"].tolist(), strict=True)
    for number, (offset, size, expected) in enumerate(rows):
        if size and crc(raw[offset + LINE_BYTES : offset + LINE_BYTES + size]) != expected:
            return number
    return len(offsets)


def payloads(data: bytes, entries: Entries, offsets: list[int]) -> list[memoryview]:
    """Return the payloads, as views into the data."""
    view = memoryview(data)
    sizes = entries["size"].tolist()
    return [view[offset + LINE_BYTES : offset + LINE_BYTES + size] for offset, size in zip(offsets, sizes, strict=True)]



class SparseIndex:
    """The index of one segment in memory: points with known index, seq, append time and position."""

    def __init__(self, every: int = INDEX_EVERY_BYTES) -> None:
        self._every = every
        self._piece = -1
        self.indices: list[int] = []
        self.seqs: list[int] = []
        self.times: list[int] = []
        self.positions: list[int] = []

    def add(self, entries: Entries, positions: Sequence[int]) -> None:
        """Add records that were appended to the segment."""
        if len(positions) <= _FEW:
            for number, position in enumerate(positions):
                if position // self._every > self._piece:
                    self._note(entries[number : number + 1], [position])
            return
        pieces = np.asarray(positions) // self._every
        chosen = np.flatnonzero(np.diff(pieces, prepend=self._piece))
        if len(chosen):
            self._note(entries[chosen], [positions[number] for number in chosen.tolist()])

    def _note(self, entries: Entries, positions: Sequence[int]) -> None:
        self.indices += entries["index"].tolist()
        self.seqs += entries["seq"].tolist()
        self.times += entries["append_us"].tolist()
        self.positions += positions
        self._piece = positions[-1] // self._every

    def encode(self, footer: Footer) -> tuple[bytes, bytes]:
        """Encode the contents of `.index` and `.timeindex`."""
        made = []
        for keys, last in ((self.seqs, footer.end_seq), (self.times, footer.last_us)):
            rows = np.zeros(len(keys) + 1, dtype=INDEX)
            rows["key"] = [*keys, last]
            rows["position"] = [*self.positions, footer.bytes]
            made.append(rows.tobytes())
        return made[0], made[1]


class FileIndex:
    """One loaded index file of a finished segment."""

    def __init__(self, rows: Entries) -> None:
        self.keys: npt.NDArray[np.integer[Any]] = rows["key"][:-1].astype(np.uint64)
        self.positions: npt.NDArray[np.integer[Any]] = rows["position"][:-1].astype(np.int64)

    def floor(self, key: int, below: bool = False) -> int | None:
        """Return the number of the last entry at or below a key (`below`: only below); None if there is none."""
        if key < 0:
            return None
        found = int(np.searchsorted(self.keys, np.uint64(key), side="left" if below else "right")) - 1
        return found if found >= 0 else None


def load_index(disk: Disk, folder: str, footer: Footer, suffix: str) -> FileIndex | None:
    """Load an index file, if it exists and matches its segment."""
    try:
        file = disk.open(join(folder, segment_name(footer.base_seq, suffix)))
        try:
            size = file.size()
            rows_max = footer.bytes // 64 + 1
            data = file.pread(size, 0) if size % INDEX.itemsize == 0 and size <= rows_max * INDEX.itemsize else b""
        finally:
            file.close()
    except EmbarcaderoError:
        return None
    rows = np.frombuffer(data, dtype=INDEX)
    return FileIndex(rows) if _fits(rows, footer, suffix) else None


def _fits(rows: Entries, footer: Footer, suffix: str) -> bool:
    empty = footer.end_index == footer.base_index
    if len(rows) < (1 if empty else 2):
        return False
    keys, positions = rows["key"].astype(np.uint64), rows["position"].astype(np.int64)
    end_key = footer.end_seq if suffix == INDEX_FILE else footer.last_us
    if int(keys[-1]) != end_key or int(positions[-1]) != footer.bytes or int(positions[0]) != HEADER_BYTES:
        return False
    if suffix == INDEX_FILE and int(keys[0]) != footer.base_seq:
        return False
    return bool((positions[1:] > positions[:-1]).all() and (keys[1:] >= keys[:-1]).all() and not (positions % 64).any())


def write_indexes(disk: Disk, folder: str, index: SparseIndex, footer: Footer) -> None:
    """Write both index files of a finished segment. They are not synced, because they can be rebuilt."""
    for suffix, data in zip((INDEX_FILE, TIME_INDEX_FILE), index.encode(footer), strict=True):
        file = disk.open(join(folder, segment_name(footer.base_seq, suffix)), create=True)
        try:
            file.pwrite([data], 0)
        finally:
            file.close()


_NEVER_INDEX = 1 << 63


class Wrong(NamedTuple):
    """Damaged records [first, end) at bytes [position, stop) of a segment. `end` None: up to its end."""

    first: int
    end: int | None
    position: int
    stop: int


class SegmentScan(NamedTuple):
    """The content of a segment: valid up to `position`, except for `wrong`. `cut`: torn bytes after it."""

    position: int
    end: int
    end_seq: int
    last_us: int
    sparse: SparseIndex
    wrong: list[Wrong]
    cut: int


class Look(Enum):
    """Kinds of positions without a valid record."""

    END = "end of data, or a footer"
    HOLE = "apparently never written"
    CHANGED = "written, and changed since"
    STRANGE = "unknown format"


def scan_segment(file: File, header: Header, every_bytes: int, synced: int, limit: int = _NEVER_INDEX) -> SegmentScan:
    """Scan a segment's records. `synced`: bytes known to be synced. `limit`: the index where it ends."""
    size = file.size()
    position, index, seq, last_us = HEADER_BYTES, header.base_index, header.base_seq, 0
    sparse = SparseIndex(every_bytes)
    wrong: list[Wrong] = []
    while index < limit:
        good, entries, offsets = _read_valid(file, position, size, index, limit, seq)
        if good:
            sparse.add(entries[:good], [position + offset for offset in offsets[:good]])
            last = entries[good - 1]
            position += offsets[good - 1] + record_bytes(int(last["size"]))
            index, seq = int(last["index"]) + 1, int(last["seq"]) + int(last["count"])
            last_us = int(last["append_us"])
            continue
        look, stop = _look(file, position, size, index, seq)
        if look is Look.END and position >= synced:
            break
        after = _next_valid(file, stop, size, index, limit)
        damaged = look is Look.CHANGED or position < synced or (look is Look.STRANGE and after is not None)
        if not damaged:
            return SegmentScan(position, index, seq, last_us, sparse, wrong, size - position)
        if after is None:
            wrong.append(Wrong(index, None, position, size))
            return SegmentScan(position, index, seq, last_us, sparse, wrong, 0)
        found, entry = after
        wrong.append(Wrong(index, int(entry["index"][0]), position, found))
        position, index, seq = found, int(entry["index"][0]), int(entry["seq"][0])
    return SegmentScan(position, index, seq, last_us, sparse, wrong, 0)


def _read_valid(
    file: File, position: int, size: int, index: int, limit: int, seq: int | None
) -> tuple[int, Entries, list[int]]:
    """Read valid records from a position on: their count, entries and offsets."""
    data = file.pread(min(SCAN_BYTES, size - position), position)
    parsed = parse(data, index, limit, seq)
    if not parsed.offsets and len(data) < parsed.wanted <= size - position:
        data = file.pread(parsed.wanted, position)
        parsed = parse(data, index, limit, seq)
    return intact(data, parsed.entries, parsed.offsets), parsed.entries, parsed.offsets


def _look(file: File, position: int, size: int, index: int, seq: int) -> tuple[Look, int]:
    """Classify a position without a valid record, and return where to look for the next one."""
    line = file.pread(LINE_BYTES, position)
    after = position + LINE_BYTES
    if len(line) < LINE_BYTES:
        return (Look.HOLE if line else Look.END), size
    if not any(line):
        return Look.HOLE, after
    if decode_footer(file.pread(size - position, position) if size - position < 2 * LINE_BYTES else b""):
        return Look.END, size
    entry = np.frombuffer(line, dtype=ORDER)
    known = int(entry["index"][0]) == index, int(entry["seq"][0]) == seq
    if not (known[0] and known[1] and every(sealed(entry)) and int(entry["size"][0]) <= FRAME_BYTES_MAX):
        return (Look.CHANGED if any(known) else Look.STRANGE), after
    stop = position + record_bytes(int(entry["size"][0]))
    if stop > size:
        return Look.HOLE, size
    return (Look.HOLE if _zero_sector(file, after, stop) else Look.CHANGED), stop


def _zero_sector(file: File, start: int, stop: int) -> bool:
    """Return whether a sector of this span, as far as it is inside, is all zeros."""
    data = np.frombuffer(file.pread(stop - start, start), dtype=np.uint8)
    first = -start % SECTOR_BYTES
    whole = len(data) - (len(data) - first) % SECTOR_BYTES if len(data) > first else first
    pieces = [data[:first], data[whole:]]
    if any(len(piece) and not piece.any() for piece in pieces):
        return True
    return bool(whole > first and (~data[first:whole].reshape(-1, SECTOR_BYTES).any(axis=1)).any())


def _next_valid(file: File, start: int, size: int, index: int, limit: int) -> tuple[int, Entries] | None:
    """Find the first complete record of a later index at or after a position. Returns it with its entry."""
    start += -start % LINE_BYTES
    for position in range(start, size, SCAN_BYTES):
        data = file.pread(min(SCAN_BYTES, size - position), position)
        lines = np.frombuffer(data, dtype=ORDER, count=len(data) // LINE_BYTES)
        if not len(lines):
            continue
        likely = (lines["index"] > np.uint64(index)) & (lines["index"] < np.uint64(min(limit, index + (1 << 32))))
        likely &= (lines["kind"] - np.uint8(1) < EntryKind.SKIP) & sealed(lines)
        for line in np.flatnonzero(likely).tolist():
            place = position + line * LINE_BYTES
            good, entries, _ = _read_valid(file, place, size, int(lines["index"][line]), limit, None)
            if good:
                return place, entries[:1]
    return None
