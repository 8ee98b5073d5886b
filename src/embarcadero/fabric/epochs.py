"""The epoch table, and the rule for acting on another's word.

A line per epoch, written only by that epoch's sequencer: first "open", later a copy of "started". Before anyone acts on
what epoch e's sequencer wrote (ack, serve, count), it loads all that the act rests on, fences, and then asks
`superseded(e)`: has a later epoch opened? Never the other way round.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from embarcadero.fabric.layout import EPOCH_LINE, SUPERBLOCK, RegionKind
from embarcadero.fabric.names import EPOCHS_REGION
from embarcadero.fabric.region import Fabric, Region, Shape, require_shape
from embarcadero.invariants import invariant
from embarcadero.limits import EPOCHS_AHEAD_MAX, EPOCHS_MAX

_WORDS: Final = EPOCH_LINE.itemsize // 8
_OPENED_WORD, _STARTED_WORD = (EPOCH_LINE.fields[name][1] // 8 for name in ("epoch", "started"))  # type: ignore[index]


def create_epochs(fabric: Fabric) -> None:
    """Make the table, once per fabric. Whoever makes the fabric does it."""
    size = SUPERBLOCK.itemsize + EPOCHS_MAX * EPOCH_LINE.itemsize
    fabric.create(EPOCHS_REGION, Shape(RegionKind.EPOCHS, size, EPOCHS_MAX, EPOCH_LINE.itemsize)).close()


class EpochTable:
    """All epoch lines. `open` and `start` are for the sequencer of that epoch only."""

    def __init__(self, fabric: Fabric, region: Region) -> None:
        self._fabric, self._region = fabric, region
        require_shape(region, (region.shape.size - SUPERBLOCK.itemsize) % EPOCH_LINE.itemsize == 0)
        self._lines = region.data[SUPERBLOCK.itemsize :].view(EPOCH_LINE)
        words = memoryview(region.data)[SUPERBLOCK.itemsize :].cast("Q")  # type: ignore[arg-type]
        self._opened, self._started = (words[field_at::_WORDS] for field_at in (_OPENED_WORD, _STARTED_WORD))

    def _offset(self, epoch: int) -> int:
        invariant(0 <= epoch < len(self._lines), "the epoch table is large enough")
        return SUPERBLOCK.itemsize + epoch * EPOCH_LINE.itemsize

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
        self._region.invalidate(self._offset(first), (last - first + 1) * EPOCH_LINE.itemsize)
        return any(self._opened[first : last + 1])

    def newest_started(self, after: int) -> int | None:
        """The newest started epoch above `after`, if there is one within reach."""
        last = min(after + EPOCHS_AHEAD_MAX, len(self._lines) - 1)
        self._region.invalidate(self._offset(after + 1), (last - after) * EPOCH_LINE.itemsize)
        if not any(started := self._started[after + 1 : last + 1]):
            return None
        return next((epoch for epoch in range(last, after, -1) if started[epoch - after - 1] == epoch + 1), None)

    def last_started(self) -> int:
        """The newest started epoch of all, for one who comes when nobody writes any more; 0: none has started."""
        self._region.invalidate(self._offset(0), len(self._lines) * EPOCH_LINE.itemsize)
        started = np.flatnonzero(self._lines["started"] == np.arange(1, len(self._lines) + 1, dtype=np.uint64))
        return int(started[-1]) if len(started) else 0
