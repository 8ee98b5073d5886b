"""Records out of bytes, many at once: hop from entry to entry, then check them all together."""

from __future__ import annotations

from typing import Final, NamedTuple

import google_crc32c
import numpy as np

from embarcadero.fabric.layout import ORDER, Entries, every, pick, sealed
from embarcadero.limits import FRAME_BYTES_MAX, LINE_BYTES
from embarcadero.types import EntryKind

_WORDS, _HALVES = LINE_BYTES // 8, LINE_BYTES // 4
_SIZE_HALF = 10
"""Which 32-bit half of an entry is its payload's size."""
_KIND_MAX = EntryKind.SKIP
_FEW = 8
_INDEX, _SEQ, _SIZE, _COUNT, _KIND = map((ORDER.names or ()).index, ("index", "seq", "size", "count", "kind"))
NO_ENTRIES: Final = np.zeros(0, dtype=ORDER)
RECORD_BYTES_LARGEST: Final = LINE_BYTES + -(-FRAME_BYTES_MAX // LINE_BYTES) * LINE_BYTES


class Parsed(NamedTuple):
    """Valid entries that follow each other, where they are in the data, and where the first byte after them is.

    `wanted`: how many bytes from the start the record after them needs, if its payload is cut off by the data's end.
    """

    entries: Entries
    offsets: list[int]
    end: int
    wanted: int


def parse(data: bytes, index: int, end: int, seq: int | None = None, whole: bool = True) -> Parsed:
    """Entries `index` to `end` as far as they are in `data` (which begins with the first of them) and valid.

    `whole`: only records whose payload is there too; otherwise the last one may be cut off by the data's end.
    """
    lines = len(data) // LINE_BYTES
    found, after = _hop(data, lines, index, end)
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


def _hop(data: bytes, lines: int, index: int, end: int) -> tuple[list[int], int]:
    """Lines that seem to be the entries we look for, and the line after the last record."""
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
    """How many from the start are valid and continue each other."""
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
    """The same with plain numbers: quicker for some large records."""
    checks = sealed(entries).tolist()
    for number, row in enumerate(entries.tolist()):
        fits = checks[number] and row[_INDEX] == index and (seq is None or row[_SEQ] == seq)
        if not fits or row[_SIZE] > FRAME_BYTES_MAX or not 0 < row[_KIND] <= _KIND_MAX:
            return number
        index, seq = index + 1, row[_SEQ] + row[_COUNT]
    return len(checks)


def intact(data: bytes, entries: Entries, offsets: list[int]) -> int:
    """How many records from the start have the payload that their entry's CRC32C speaks of."""
    raw = np.frombuffer(data, dtype=np.uint8)
    crc = google_crc32c.value
    rows = zip(offsets, entries["size"].tolist(), entries["crc"].tolist(), strict=True)
    for number, (offset, size, expected) in enumerate(rows):
        if size and crc(raw[offset + LINE_BYTES : offset + LINE_BYTES + size]) != expected:
            return number
    return len(offsets)


def payloads(data: bytes, entries: Entries, offsets: list[int]) -> list[memoryview]:
    """The payloads, as views into the data."""
    view = memoryview(data)
    sizes = entries["size"].tolist()
    return [view[offset + LINE_BYTES : offset + LINE_BYTES + size] for offset, size in zip(offsets, sizes, strict=True)]
