"""Frontiers: exclusive, monotonic 64-bit numbers, each alone on its 128-byte line, each with one writer."""

from __future__ import annotations

from embarcadero.fabric.region import Region
from embarcadero.invariants import invariant


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
