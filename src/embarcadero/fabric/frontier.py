"""Frontiers: exclusive, monotonic 64-bit numbers, each alone on its 128-byte line, each with one writer.

Tagged lines: a table of 128-byte lines in one region, each with the key of a range, each value a word of its own.

Lines are added, never taken away or renamed: keys and first values are flushed before the count of lines says that the
line is there. After that each value is one aligned word, so nobody ever sees half of a change.

    line 0            heartbeat (word 0), health (word 1)
    line 1            how many tagged lines there are
    line 8 + n        word 0, 1: key; word 2, 3: values
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

from embarcadero.errors import TooMany
from embarcadero.fabric.layout import RegionKind, frontier_offset
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.invariants import invariant
from embarcadero.limits import FRONTIER_BYTES
from embarcadero.types import RangeKey


def _word(region: Region, offset: int) -> memoryview:
    """The word at an offset. A memoryview: it loads and stores the whole word at once, as numpy does, but quicker."""
    return memoryview(region.data)[offset : offset + 8].cast("Q")  # type: ignore[arg-type]


class FrontierWriter:
    """The one writer of one frontier word."""

    def __init__(self, region: Region, offset: int) -> None:
        self._region, self._offset = region, offset
        self._word = _word(region, offset)
        self.value: int = self._word[0]

    def advance(self, value: int) -> None:
        """Publish a new value. What it speaks of was flushed before."""
        invariant(value >= self.value, "a frontier never goes back")
        if value != self.value:
            self.restart(value)

    def restart(self, value: int) -> None:
        """Publish a value that may be lower: what the line counts has begun anew."""
        self._word[0] = self.value = value
        self._region.flush(self._offset, 8)


class FrontierReader:
    """A reader of one frontier word."""

    def __init__(self, region: Region, offset: int) -> None:
        self._invalidate, self._offset = region.invalidate, offset
        self._word = _word(region, offset)

    def load(self) -> int:
        """The newest value that has reached memory."""
        self._invalidate(self._offset, 8)
        value: int = self._word[0]
        return value


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
        """Have a line with this key and these values. Raises TooMany when the table is full."""
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
        """What was written last."""
        return self._values[key][word].value

    def set(self, key: RangeKey, value: int, word: int = 0) -> None:
        """Publish a value. What it speaks of was flushed, or synced, before."""
        if self._values[key][word].value != value:
            self._values[key][word].restart(value)


class TaggedReader:
    """A reader of somebody's table."""

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
        """The newest value that has reached memory; None while there is no such line."""
        readers = self._values.get(key)
        if readers is None:
            self._learn()
            readers = self._values.get(key)
        return None if readers is None else readers[word].load()

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the objects of lines of other lanes: their topics are gone, and never come again."""
        self._values = {key: values for key, values in self._values.items() if key[0] in lanes}

    def keys(self) -> list[RangeKey]:
        """The keys of all lines that were not dropped, in the order they were added."""
        self._learn()
        return list(self._values)

    def _learn(self) -> None:
        count = self._count.load()
        if count > self._lines_max:
            return  # it can't be: nothing new is believed
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
    """Make a table's region and become its writer. It is sparse: lines cost memory once they are used."""
    size = frontier_offset(_FIRST + lines)
    return TaggedWriter(fabric.create(name, Shape(kind, size, lines, FRONTIER_BYTES, owner, incarnation)))
