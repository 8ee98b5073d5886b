"""Batches that wait for a gap to close: slots shared by all lanes, and their copy in the fabric.

A slot is written before its pending slot is given free, and zeroed only after its outcome is flushed; so at any crash a
waiting batch is in the pending ring, or here, or has its outcome. A slot given free in a round may be used again in the
same round, because the fabric's copy is written after the round's outcomes are flushed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.errors import invariant
from embarcadero.fabric.layout import PENDING, SLOTS_OFFSET, Entries, RegionKind, pick, seal, sealed
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.limits import LINE_BYTES, REGION_HANDLES
from embarcadero.types import EntryKind

Slots = npt.NDArray[np.int64]

_NONE: Final[Slots] = np.empty(0, dtype=np.int64)
_LINE = np.dtype(f"V{LINE_BYTES}")
_FEW = 256
_FIRST = 2_048
"""Where free slots are looked for first: usually few batches wait, and low slots stay close together."""

_FLUSH_ACROSS = 16
"""Flushing a few untouched lines between two slots is cheaper than another call."""


class HeldSlots:
    """The slots as the sequencer knows them. Dirty ones differ from the fabric."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.entries: Entries = np.zeros(slots, dtype=PENDING)
        self._taken = np.zeros(slots, dtype=bool)
        self._dirty: list[Slots] = []
        self.used = 0
        self.by_origin = np.zeros(REGION_HANDLES + 1, dtype=np.int64)

    def resize(self, slots: int) -> None:
        """Have so many slots; no batch waits yet."""
        invariant(not self.used, "no batch waits while the reorder buffer is made larger")
        self.slots = slots
        self.entries = np.zeros(slots, dtype=PENDING)
        self._taken = np.zeros(slots, dtype=bool)
        self._dirty.clear()

    @property
    def free(self) -> int:
        """Slots that are free now."""
        return self.slots - self.used

    def hold(self, entries: Entries) -> Slots:
        """Keep these entries; there are enough free slots."""
        invariant(len(entries) <= self.free, "waiting batches fit their slots")
        slots = (~self._taken[:_FIRST]).nonzero()[0]
        if len(slots) < len(entries):
            slots = (~self._taken).nonzero()[0]
        slots = slots[: len(entries)]
        self.entries.view(_LINE)[slots] = entries.view(_LINE)
        self._taken[slots] = True
        self._dirty.append(slots)
        self.used += len(slots)
        np.add.at(self.by_origin, entries["origin"], 1)
        return slots

    def release(self, slots: Slots) -> None:
        """These have their outcome."""
        self._taken[slots] = False
        self._dirty.append(slots)
        self.used -= len(slots)
        np.subtract.at(self.by_origin, self.entries["origin"][slots], 1)

    def of_lane(self, lane: int) -> Slots:
        """Slots of all batches of a lane."""
        return np.flatnonzero(self._taken & (self.entries["lane"] == lane))

    def take_dirty(self) -> tuple[Slots, Slots]:
        """Slots whose copy must be written, and slots whose copy must be zeroed, since the last call."""
        if not self._dirty:
            return _NONE, _NONE
        dirty = np.concatenate(self._dirty)
        self._dirty.clear()
        if len(dirty) < _FEW:
            dirty = np.unique(dirty)
        else:  # flags are quicker than sorting many
            flags = np.zeros(self.slots, dtype=bool)
            flags[dirty] = True
            dirty = flags.nonzero()[0]
        taken = self._taken[dirty]
        return dirty[taken], dirty[~taken]


class HeldRegion:
    """The fabric's copy: `epoch-<e>/held`."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._lines = region.data[SLOTS_OFFSET : SLOTS_OFFSET + region.shape.slots * LINE_BYTES].view(_LINE)

    def write(self, slots: Slots, entries: Entries) -> None:
        """Copy these entries into these (ascending) slots, and flush."""
        if not len(slots):
            return
        self._lines[slots] = seal(entries).view(_LINE)
        self._flush(slots)

    def zero(self, slots: Slots) -> None:
        """Clear these (ascending) slots, and flush."""
        if not len(slots):
            return
        self._lines[slots] = np.zeros(1, dtype=_LINE)
        self._flush(slots)

    def _flush(self, slots: Slots) -> None:
        cuts = np.flatnonzero(np.diff(slots) > _FLUSH_ACROSS) + 1
        for run in np.split(slots, cuts):
            first, last = int(run[0]), int(run[-1])
            self._region.flush(SLOTS_OFFSET + first * LINE_BYTES, (last - first + 1) * LINE_BYTES)


def create_held(fabric: Fabric, name: str, slots: int) -> HeldRegion:
    """Make the region of an epoch's waiting batches."""
    size = SLOTS_OFFSET + slots * LINE_BYTES
    return HeldRegion(fabric.create(name, Shape(RegionKind.HELD, size, slots, LINE_BYTES)))


def read_held(fabric: Fabric, name: str) -> Entries:
    """All whole entries that an earlier sequencer kept waiting."""
    region = fabric.attach(name)
    stop = SLOTS_OFFSET + region.shape.slots * LINE_BYTES
    require_shape(region, stop <= region.shape.size)
    region.invalidate(SLOTS_OFFSET, region.shape.slots * LINE_BYTES)
    there = region.data[SLOTS_OFFSET:stop].view(PENDING)
    entries = pick(there, there["kind"] == EntryKind.BATCH)  # few of very many: only these are copied and checked
    return pick(entries, sealed(entries) & (entries["kind"] == EntryKind.BATCH))
