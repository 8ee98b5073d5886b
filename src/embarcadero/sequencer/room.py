"""How far a lane with replicas may be ordered.

Not beyond its ceiling: positions are reserved in the store ahead of ordering, so none is handed out twice, whatever is
lost. And not a lap ahead of what is durable: a replica, and a successor, must find [durable, ordered end) in the
ring, where readers trust all but one round. Batches leave the last few places to control entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.fabric.layout import Entries
from embarcadero.types import EntryKind

Flags = npt.NDArray[np.bool_]

CONTROL_ENTRIES: Final = 4
"""Order entries that one session request may need."""

_SPARE_MAX: Final = 512


class Room:
    """The bounds of one lane. `stop_index` and `stop_seq` are where its batches have to stop, as far as is known."""

    def __init__(self, slots: int, round_entries: int, find_durable: Callable[[], int]) -> None:
        self._lap, self._find = slots - round_entries, find_durable
        self._spare = min(_SPARE_MAX, round_entries // 2)  # less than a round: what waits always leaves room for some
        self.durable = 0
        self.ceiling = (0, 0)
        self.stop_index = self.stop_seq = 0
        self.refresh()

    def raise_to(self, index: int, seq: int) -> None:
        """The store has reserved positions up to here."""
        self.ceiling = (index, seq)
        self._bound()

    def refresh(self) -> None:
        """Look how far the lane is durable now."""
        self.durable = max(self.durable, self._find())
        self._bound()

    def _bound(self) -> None:
        index, seq = self.ceiling
        self._stop = min(self.durable + self._lap, index)
        self.stop_index, self.stop_seq = self._stop - self._spare, seq

    def controls(self, next_index: int) -> int:
        """For how many more entries of any kind there is room."""
        if next_index + CONTROL_ENTRIES > self._stop:
            self.refresh()
        return max(0, self._stop - next_index)

    def admits(self, next_index: int, next_seq: int, entries: Entries, waiting: int, records: int) -> bool:
        """Whether all of these can be decided on, whatever they turn out to need.

        `waiting` batches with `records` records may be ordered together with them.
        """
        most = waiting + CONTROL_ENTRIES * len(entries)
        if next_index + most > self.stop_index and not self._look_again(next_index, entries, waiting):
            return False
        return next_seq + records + int(entries["count"].sum(dtype=np.uint64)) <= self.stop_seq

    def _look_again(self, next_index: int, entries: Entries, waiting: int) -> bool:
        most = waiting + _needs(entries)
        if next_index + most > self.stop_index:
            self.refresh()
        return next_index + most <= self.stop_index

    def admitted(self, next_index: int, next_seq: int, entries: Entries, waiting: int, records: int) -> Flags:
        """Which of these can be decided on (flags): requests first, then batches as they came."""
        is_batch = entries["kind"] == EntryKind.BATCH
        requests = min(int(np.count_nonzero(~is_batch)), self.controls(next_index) // CONTROL_ENTRIES)
        batches = max(0, self.stop_index - next_index - CONTROL_ENTRIES * requests - waiting)
        counts = np.where(is_batch, entries["count"], 0).astype(np.int64)
        fits = np.cumsum(counts) + (next_seq + records) <= self.stop_seq
        rank = np.where(is_batch, np.cumsum(is_batch) - 1, np.cumsum(~is_batch) - 1)
        admitted: Flags = np.where(is_batch, (rank < batches) & fits, rank < requests)
        return admitted


def _needs(entries: Entries) -> int:
    batches = int(np.count_nonzero(entries["kind"] == EntryKind.BATCH))
    return batches + CONTROL_ENTRIES * (len(entries) - batches)
