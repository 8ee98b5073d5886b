"""Single-writer rings of 64-byte entries with absolute 64-bit indices.

Entry i lives in slot i mod N. The writer writes whole slices: entries (commit word and check included), flush, and only
then the frontier. Whether a slot may be reused is the caller's knowledge; it says so with every write (`free_below`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from embarcadero.fabric.frontier import FrontierReader, FrontierWriter
from embarcadero.fabric.layout import (
    LINE,
    RING_FRONTIER_OFFSET,
    SLOTS_OFFSET,
    Entries,
    Line,
    RegionKind,
    fold_line,
    seal,
    valid_prefix,
)
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.invariants import invariant
from embarcadero.types import Span

_FIRST_RUN: Final = 64
_RUN_MAX: Final = 4_096


def ring_shape(kind: RegionKind, dtype: np.dtype[np.void], slots: int, owner: int = 0, incarnation: int = 0) -> Shape:
    """Shape of a region that holds a ring of `slots` entries."""
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
        """Slot spans of [start, stop): one, or two when it wraps."""
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

        `free_below`: slots of indices below it may be reused.
        """
        entries[self.commit] = np.arange(self.next, self.next + len(entries), dtype=np.uint64)
        return self.write_sealed(seal(entries), free_below)

    def write_sealed(self, entries: Entries, free_below: int) -> int:
        """The same, of entries that have their index and their check."""
        first, stop = self.next, self.next + len(entries)
        invariant(stop - free_below <= self.slots, "a slot is reused only when it is free")
        raw, done = entries.view(np.uint8), 0  # bytes: numpy copies entries field by field, which takes far longer
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
        """Let readers see all that was written."""
        self.frontier.advance(self.next)


class RingReader(_Ring):
    """A reader of somebody's ring."""

    def __init__(self, region: Region, dtype: np.dtype[np.void], commit: str = "index") -> None:
        super().__init__(region, dtype, commit)
        self.frontier = FrontierReader(region, RING_FRONTIER_OFFSET)

    def line(self, index: int) -> Line:
        """The slot of an index as plain numbers, fresh but unchecked."""
        offset = SLOTS_OFFSET + index % self.slots * LINE.size
        self.region.invalidate(offset, LINE.size)
        return list(LINE.unpack(bytes(self._memory[offset : offset + LINE.size])))

    def load(self, start: int, stop: int) -> Entries:
        """A private copy of the slots of [start, stop), fresh but unchecked."""
        invariant(0 <= stop - start <= self.slots, "at most one lap is read at once")
        spans = [self._bytes(span) for span in self._spans(start, stop)]
        for offset, length in spans:
            self.region.invalidate(offset, length)
        copy = bytearray().join([self._memory[offset : offset + length] for offset, length in spans])
        return np.frombuffer(copy, dtype=self.dtype)

    def parts(self, start: int, stop: int) -> list[Entries]:
        """The slots of [start, stop) as they are in memory, fresh but unchecked: one span, or two."""
        invariant(0 <= stop - start <= self.slots, "at most one lap is read at once")
        parts = []
        for span in self._spans(start, stop):
            self.region.invalidate(*self._bytes(span))
            parts.append(self._entries[span.start : span.stop])
        return parts

    def read(self, start: int, stop: int) -> Entries:
        """The valid entries from `start` on, at most to `stop`: shorter when an entry is not valid."""
        entries = self.load(start, stop)
        return entries[: valid_prefix(entries, start, self.commit)]

    def valid_end(self, start: int) -> int:
        """End of the valid contiguous entries from `start` on, whatever the frontier says (used at takeover)."""
        return start + sum(map(len, self.valid_runs(start)))

    def valid_runs(self, start: int) -> Iterator[Entries]:
        """These entries, piece by piece, at most a lap. Often they are few: the first pieces are small."""
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
    """Attach to somebody's ring."""
    return RingReader(fabric.attach(name), dtype, commit)
