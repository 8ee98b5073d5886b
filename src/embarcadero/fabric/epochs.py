"""The epoch table, and the rule for acting on another's word.

A line per epoch, written only by that epoch's sequencer: first "open", later a copy of "started". Before anyone acts on
what epoch e's sequencer wrote (ack, serve, count), it loads all that the act rests on, fences, and then asks
`superseded(e)`: has a later epoch opened? Never the other way round.
"""

from __future__ import annotations

import numpy as np

from embarcadero.fabric.layout import EPOCH_LINE, SUPERBLOCK, RegionKind
from embarcadero.fabric.region import Fabric, Region, Shape
from embarcadero.invariants import invariant
from embarcadero.limits import EPOCHS_AHEAD_MAX, EPOCHS_MAX

EPOCHS_REGION = "epochs"
_FIRST, _EACH = SUPERBLOCK.itemsize, EPOCH_LINE.itemsize


def create_epochs(fabric: Fabric) -> None:
    """Make the table, once per fabric. Whoever makes the fabric does it."""
    fabric.create(EPOCHS_REGION, Shape(RegionKind.EPOCHS, _FIRST + EPOCHS_MAX * _EACH, EPOCHS_MAX, _EACH)).close()


class EpochTable:
    """All epoch lines. `open` and `start` are for the sequencer of that epoch only."""

    def __init__(self, fabric: Fabric, region: Region) -> None:
        self._fabric, self._region = fabric, region
        self._lines = region.data[_FIRST:].view(EPOCH_LINE)
        self._opened, self._started = self._lines["epoch"], self._lines["started"]

    def _offset(self, epoch: int) -> int:
        invariant(0 <= epoch < len(self._lines), "the epoch table is large enough")
        return _FIRST + epoch * _EACH

    def open(self, epoch: int) -> None:
        """Open epoch e: from here on nobody acts on the word of an earlier one."""
        self._lines["epoch"][epoch] = epoch
        self._region.flush(self._offset(epoch), 64)
        self._fabric.fence()

    def start(self, epoch: int) -> None:
        """Copy the fact that the store holds epoch e's start."""
        self._lines["started"][epoch] = epoch + 1
        self._region.flush(self._offset(epoch) + 64, 64)

    def superseded(self, epoch: int) -> bool:
        """Whether a later epoch has opened. Call it after loading what the act rests on; it fences first."""
        self._fabric.fence()
        first, last = epoch + 1, min(epoch + EPOCHS_AHEAD_MAX, len(self._lines) - 1)
        self._region.invalidate(self._offset(first), (last - first + 1) * _EACH)
        return bool(np.count_nonzero(self._opened[first : last + 1]))

    def newest_started(self, after: int) -> int | None:
        """The newest started epoch above `after`, if there is one within reach."""
        last = min(after + EPOCHS_AHEAD_MAX, len(self._lines) - 1)
        self._region.invalidate(self._offset(after + 1), (last - after) * _EACH)
        started = self._started[after + 1 : last + 1]
        if np.count_nonzero(started):
            for epoch in range(last, after, -1):
                if int(started[epoch - after - 1]) == epoch + 1:
                    return epoch
        return None
