"""Single-writer lines: frontiers (one word), tables of words, and rings of entries.

A frontier is an exclusive, monotonic 64-bit number, alone on its 128-byte line.

Tagged lines are a table of 128-byte lines in one region. Each line has the key of a range; each value is a word of its
own. Lines are added, never removed or renamed. Keys and first values are flushed before the count of lines includes the
new line. After that each value is one aligned word, so a reader never sees half of a change.

    line 0            heartbeat (word 0), health (word 1)
    line 1            number of tagged lines
    line 8 + n        word 0, 1: key; word 2, 3: values

A ring has 64-byte entries with absolute 64-bit indices: entry i is in slot i mod N. The writer writes whole slices:
entries (commit word and check included), flush, and only then the frontier. The caller knows which slots may be reused,
and passes that with every write (`free_below`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from embarcadero.errors import TooMany, invariant
from embarcadero.fabric.layout import (
    LINE,
    RING_FRONTIER_OFFSET,
    SLOTS_OFFSET,
    Entries,
    Line,
    RegionKind,
    fold_line,
    frontier_offset,
    seal,
    valid_prefix,
)
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.limits import FRONTIER_BYTES
from embarcadero.types import RangeKey, Span


# --- frontiers --------------------------------------------------------------------------------------------------------
def _word(region: Region, offset: int) -> memoryview:
    """View the word at an offset. A memoryview accesses the whole word in one load or store, faster than numpy."""
    return memoryview(region.data)[offset : offset + 8].cast("Q")  # type: ignore[arg-type]


class FrontierWriter:
    """The one writer of one frontier word."""

    def __init__(self, region: Region, offset: int) -> None:
        self._region, self._offset = region, offset
        self._word = _word(region, offset)
        self.value: int = self._word[0]

    def advance(self, value: int) -> None:
        """Publish a new value. Everything that it covers must be flushed before."""
        invariant(value >= self.value, "a frontier never goes back")
        if value != self.value:
            self.restart(value)

    def restart(self, value: int) -> None:
        """Publish a value that may be lower, because the count has started again."""
        self._word[0] = self.value = value
        self._region.flush(self._offset, 8)


class FrontierReader:
    """A reader of one frontier word."""

    def __init__(self, region: Region, offset: int) -> None:
        self._invalidate, self._offset = region.invalidate, offset
        self._word = _word(region, offset)

    def load(self) -> int:
        """Load the newest value that has reached memory."""
        self._invalidate(self._offset, 8)
        value: int = self._word[0]
        return value


# --- tables of words --------------------------------------------------------------------------------------------------
_HEARTBEAT, _COUNT, _FIRST = 0, 1, 8
COUNT_LINE: Final = _COUNT
FIRST_LINE: Final = _FIRST
_VALUES: Final = 16
"""Byte offset of the first value in its line."""


class TaggedWriter:
    """The one writer of a table."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lines_max = (region.shape.size - frontier_offset(_FIRST)) // FRONTIER_BYTES
        self._count = FrontierWriter(region, frontier_offset(_COUNT))
        self._values: dict[RangeKey, tuple[FrontierWriter, FrontierWriter]] = {}
        self.heartbeat = FrontierWriter(region, frontier_offset(_HEARTBEAT))
        self.health = FrontierWriter(region, frontier_offset(_HEARTBEAT) + 8)

    def __contains__(self, key: RangeKey) -> bool:
        return key in self._values

    def add(self, key: RangeKey, first: int = 0, second: int = 0) -> None:
        """Add a line with this key and these values. Raises TooMany when the table is full."""
        if self._count.value >= self._lines_max:
            raise TooMany(f"all {self._lines_max} lines of {self._region.name} are used", "restart this process")
        at = frontier_offset(_FIRST + self._count.value)
        self._region.data[at : at + 32].view(np.uint64)[:] = (*key, first, second)
        self._region.flush(at, 32)
        self._values[key] = FrontierWriter(self._region, at + _VALUES), FrontierWriter(self._region, at + _VALUES + 8)
        self._count.advance(self._count.value + 1)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the objects of lines of other lanes: their topics are gone, and never come again."""
        self._values = {key: values for key, values in self._values.items() if key[0] in lanes}

    def value(self, key: RangeKey, word: int = 0) -> int:
        """The value that was written last."""
        return self._values[key][word].value

    def set(self, key: RangeKey, value: int, word: int = 0) -> None:
        """Publish a value. Everything that it covers must be flushed, or synced, before."""
        if self._values[key][word].value != value:
            self._values[key][word].restart(value)


class TaggedReader:
    """A reader of another process's table."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lines_max = (region.shape.size - frontier_offset(_FIRST)) // FRONTIER_BYTES
        require_shape(region, self._lines_max == region.shape.slots)
        self._count = FrontierReader(region, frontier_offset(_COUNT))
        self._known = 0
        self._values: dict[RangeKey, tuple[FrontierReader, FrontierReader]] = {}
        self.heartbeat = FrontierReader(region, frontier_offset(_HEARTBEAT))
        self.health = FrontierReader(region, frontier_offset(_HEARTBEAT) + 8)

    def load(self, key: RangeKey, word: int = 0) -> int | None:
        """Load the newest value that has reached memory; None while there is no such line."""
        readers = self._values.get(key)
        if readers is None:
            self._learn()
            readers = self._values.get(key)
        return None if readers is None else readers[word].load()

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the objects of lines of other lanes: their topics are gone, and never come again."""
        self._values = {key: values for key, values in self._values.items() if key[0] in lanes}

    def keys(self) -> list[RangeKey]:
        """Keys of all lines that were not dropped, in the order in which they were added."""
        self._learn()
        return list(self._values)

    def _learn(self) -> None:
        count = self._count.load()
        if count > self._lines_max:
            return  # impossible count: ignore new lines
        for line in range(self._known, count):
            at = frontier_offset(_FIRST + line)
            self._region.invalidate(at, 32)
            key = RangeKey(*self._region.data[at : at + _VALUES].view(np.uint64).tolist())
            self._values[key] = (
                FrontierReader(self._region, at + _VALUES),
                FrontierReader(self._region, at + _VALUES + 8),
            )
            self._known += 1


def create_tagged(
    fabric: Fabric, name: str, kind: RegionKind, lines: int, owner: int = 0, incarnation: int = 0
) -> TaggedWriter:
    """Make a table's region and become its writer. The region is sparse: only used lines cost memory."""
    size = frontier_offset(_FIRST + lines)
    return TaggedWriter(fabric.create(name, Shape(kind, size, lines, FRONTIER_BYTES, owner, incarnation)))


# --- rings ------------------------------------------------------------------------------------------------------------
_FIRST_RUN: Final = 64
_RUN_MAX: Final = 4_096


def ring_shape(kind: RegionKind, dtype: np.dtype[np.void], slots: int, owner: int = 0, incarnation: int = 0) -> Shape:
    """Make the shape of a region that holds a ring of `slots` entries."""
    invariant(slots > 0 and slots & (slots - 1) == 0, "a ring has a power of two of slots")
    return Shape(kind, SLOTS_OFFSET + slots * dtype.itemsize, slots, dtype.itemsize, owner, incarnation)


class _Ring:
    def __init__(self, region: Region, dtype: np.dtype[np.void], commit: str) -> None:
        self.region, self.dtype, self.commit = region, dtype, commit
        self.slots = slots = region.shape.slots
        power = slots > 0 and slots & (slots - 1) == 0
        require_shape(region, power and SLOTS_OFFSET + slots * dtype.itemsize <= region.shape.size)
        self._memory = memoryview(region.data)  # type: ignore[arg-type]
        self._entries = region.data[SLOTS_OFFSET : SLOTS_OFFSET + self.slots * dtype.itemsize].view(dtype)

    def _spans(self, start: int, stop: int) -> list[Span]:
        """Slot spans of [start, stop): one, or two when the range wraps."""
        first, count = start % self.slots, stop - start
        if first + count <= self.slots:
            return [Span(first, first + count)]
        return [Span(first, self.slots), Span(0, first + count - self.slots)]

    def _bytes(self, span: Span) -> tuple[int, int]:
        size = self.dtype.itemsize
        return SLOTS_OFFSET + span.start * size, (span.stop - span.start) * size


class RingWriter(_Ring):
    """The one writer of a ring. `next` is the index of the next entry."""

    def __init__(self, region: Region, dtype: np.dtype[np.void], commit: str = "index") -> None:
        super().__init__(region, dtype, commit)
        self.frontier = FrontierWriter(region, RING_FRONTIER_OFFSET)
        self.next = self.frontier.value

    def write(self, entries: Entries, free_below: int) -> int:
        """Write and flush entries at `next`, without publishing them. Returns the first index.

        Slots of indices below `free_below` may be reused.
        """
        entries[self.commit] = np.arange(self.next, self.next + len(entries), dtype=np.uint64)
        return self.write_sealed(seal(entries), free_below)

    def write_sealed(self, entries: Entries, free_below: int) -> int:
        """Do the same for entries that already have their index and their check."""
        first, stop = self.next, self.next + len(entries)
        invariant(stop - free_below <= self.slots, "a slot is reused only when it is free")
        raw, done = entries.view(np.uint8), 0  # bytes: numpy copies entries field by field, which is much slower
        for span in self._spans(first, stop):
            offset, length = self._bytes(span)
            self.region.data[offset : offset + length] = raw[done : done + length]
            self.region.flush(offset, length)
            done += length
        self.next = stop
        return first

    def write_line(self, line: Line, free_below: int) -> None:
        """Write and flush one entry, given as plain numbers. Its first word is the commit word."""
        invariant(self.next + 1 - free_below <= self.slots, "a slot is reused only when it is free")
        line[0] = self.next
        line[7] = line[7] & 0xFFFF_FFFF | fold_line(line) << 32
        offset = SLOTS_OFFSET + self.next % self.slots * LINE.size
        self._memory[offset : offset + LINE.size] = LINE.pack(*line)
        self.region.flush(offset, LINE.size)
        self.next += 1

    def publish(self) -> None:
        """Publish all entries that were written."""
        self.frontier.advance(self.next)


class RingReader(_Ring):
    """A reader of another process's ring."""

    def __init__(self, region: Region, dtype: np.dtype[np.void], commit: str = "index") -> None:
        super().__init__(region, dtype, commit)
        self.frontier = FrontierReader(region, RING_FRONTIER_OFFSET)

    def line(self, index: int) -> Line:
        """Load the slot of an index as plain numbers, fresh but unchecked."""
        offset = SLOTS_OFFSET + index % self.slots * LINE.size
        self.region.invalidate(offset, LINE.size)
        return list(LINE.unpack(bytes(self._memory[offset : offset + LINE.size])))

    def load(self, start: int, stop: int) -> Entries:
        """Make a private copy of the slots of [start, stop), fresh but unchecked."""
        invariant(0 <= stop - start <= self.slots, "at most one lap is read at once")
        spans = [self._bytes(span) for span in self._spans(start, stop)]
        for offset, length in spans:
            self.region.invalidate(offset, length)
        copy = bytearray().join([self._memory[offset : offset + length] for offset, length in spans])
        return np.frombuffer(copy, dtype=self.dtype)

    def parts(self, start: int, stop: int) -> list[Entries]:
        """View the slots of [start, stop) in memory, fresh but unchecked: one span, or two."""
        invariant(0 <= stop - start <= self.slots, "at most one lap is read at once")
        parts = []
        for span in self._spans(start, stop):
            self.region.invalidate(*self._bytes(span))
            parts.append(self._entries[span.start : span.stop])
        return parts

    def read(self, start: int, stop: int) -> Entries:
        """Copy the valid entries from `start`, up to `stop` or the first entry that is not valid."""
        entries = self.load(start, stop)
        return entries[: valid_prefix(entries, start, self.commit)]

    def valid_end(self, start: int) -> int:
        """Find the end of the valid contiguous entries from `start`, whatever the frontier is (used at takeover)."""
        return start + sum(map(len, self.valid_runs(start)))

    def valid_runs(self, start: int) -> Iterator[Entries]:
        """Yield these entries in pieces, at most one lap. Often there are few, so the first pieces are small."""
        end, stop, count = start, start + self.slots, _FIRST_RUN
        while end < stop:
            asked = min(count, stop - end)
            entries = self.read(end, end + asked)
            if len(entries):
                yield entries
            if len(entries) < asked:
                return
            end, count = end + asked, min(2 * count, _RUN_MAX)


def create_ring(
    fabric: Fabric,
    name: str,
    kind: RegionKind,
    dtype: np.dtype[np.void],
    slots: int,
    commit: str = "index",
    owner: int = 0,
    incarnation: int = 0,
) -> RingWriter:
    """Make a ring's region and become its writer."""
    return RingWriter(fabric.create(name, ring_shape(kind, dtype, slots, owner, incarnation)), dtype, commit)


def attach_ring(fabric: Fabric, name: str, dtype: np.dtype[np.void], commit: str = "index") -> RingReader:
    """Attach to another process's ring."""
    return RingReader(fabric.attach(name), dtype, commit)
