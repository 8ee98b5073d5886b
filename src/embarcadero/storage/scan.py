"""Looking through one segment that nobody vouches for: what is whole, what is torn, what is damaged.

A disk writes a sector whole or not at all, and what a crash took away from the end of a file reads as zeros, or the
file is shorter. So an entry line that is neither zero nor valid, or a payload that does not fit its entry though none
of its sectors is zero, was written and has changed since: that is damage, and it is never cut. A hole is cut, unless
the mark says that it was synced. Bytes that look like nothing of ours are cut if no valid record follows.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from embarcadero.env import File
from embarcadero.fabric.layout import ORDER, Entries, every, sealed
from embarcadero.limits import FRAME_BYTES_MAX, LINE_BYTES, SCAN_BYTES, SECTOR_BYTES
from embarcadero.storage.index import SparseIndex
from embarcadero.storage.layout import HEADER_BYTES, Header, decode_footer, record_bytes
from embarcadero.storage.parse import intact, parse
from embarcadero.types import EntryKind

_NEVER_INDEX = 1 << 63


class Wrong(NamedTuple):
    """Records [first, end) at bytes [position, stop) of a segment that are damaged; `end` None: up to its end."""

    first: int
    end: int | None
    position: int
    stop: int


class Scan(NamedTuple):
    """What a segment holds: valid up to `position`, but for what is wrong. `cut`: bytes after it that are torn."""

    position: int
    end: int
    end_seq: int
    last_us: int
    sparse: SparseIndex
    wrong: list[Wrong]
    cut: int


class Look(Enum):
    """What a place is that holds no valid record."""

    END = "nothing more, or a footer"
    HOLE = "never written, as far as one can see"
    CHANGED = "written, and not what was written"
    STRANGE = "nothing of ours"


def scan_segment(file: File, header: Header, every_bytes: int, synced: int, limit: int = _NEVER_INDEX) -> Scan:
    """Look through a segment's records. `synced`: bytes that are known to have been synced. `limit`: where it ends."""
    size = file.size()
    position, index, seq, last_us = HEADER_BYTES, header.base_index, header.base_seq, 0
    sparse = SparseIndex(every_bytes)
    wrong: list[Wrong] = []
    while index < limit:
        good, entries, offsets = _some(file, position, size, index, limit, seq)
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
            return Scan(position, index, seq, last_us, sparse, wrong, size - position)
        if after is None:
            wrong.append(Wrong(index, None, position, size))
            return Scan(position, index, seq, last_us, sparse, wrong, 0)
        found, entry = after
        wrong.append(Wrong(index, int(entry["index"][0]), position, found))
        position, index, seq = found, int(entry["index"][0]), int(entry["seq"][0])
    return Scan(position, index, seq, last_us, sparse, wrong, 0)


def _some(
    file: File, position: int, size: int, index: int, limit: int, seq: int | None
) -> tuple[int, Entries, list[int]]:
    """Valid records from a position on, as many as one read gives: how many, their entries and offsets."""
    data = file.pread(min(SCAN_BYTES, size - position), position)
    parsed = parse(data, index, limit, seq)
    if not parsed.offsets and len(data) < parsed.wanted <= size - position:
        data = file.pread(parsed.wanted, position)
        parsed = parse(data, index, limit, seq)
    return intact(data, parsed.entries, parsed.offsets), parsed.entries, parsed.offsets


def _look(file: File, position: int, size: int, index: int, seq: int) -> tuple[Look, int]:
    """What is at a position where no valid record is, and where to look for the next one."""
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
    """Whether a sector of this span, as far as it is in it, is all zeros."""
    data = np.frombuffer(file.pread(stop - start, start), dtype=np.uint8)
    first = -start % SECTOR_BYTES
    whole = len(data) - (len(data) - first) % SECTOR_BYTES if len(data) > first else first
    pieces = [data[:first], data[whole:]]
    if any(len(piece) and not piece.any() for piece in pieces):
        return True
    return bool(whole > first and (~data[first:whole].reshape(-1, SECTOR_BYTES).any(axis=1)).any())


def _next_valid(file: File, start: int, size: int, index: int, limit: int) -> tuple[int, Entries] | None:
    """The first whole record of a later index at or after a position, and its entry."""
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
            good, entries, _ = _some(file, place, size, int(lines["index"][line]), limit, None)
            if good:
                return place, entries[:1]
    return None
