"""A clean stop: everything ordered gets onto disks, sessions too, and ranges are sealed where they end.

So the next run finds a sealed last range in each lane and goes on at that very place, with nothing lost. Every wait is
bounded; a lane that did not get there in time keeps its open range, and the next run recovers it like after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from embarcadero.env import Journal
from embarcadero.limits import DRAIN_CHECKPOINT_S_MAX, DRAIN_DURABLE_S_MAX
from embarcadero.sequencer.lane import Lane
from embarcadero.sequencer.ranges import RangeKeeper

_DURABLE_US: Final = int(DRAIN_DURABLE_S_MAX * 1_000_000)
_CHECKPOINT: Final = 1
_CHECKPOINT_US: Final = int(DRAIN_CHECKPOINT_S_MAX * 1_000_000)


class Drain:
    """The end of a reign that was told to stop. Nothing is ordered any more."""

    def __init__(self, lanes: Mapping[int, Lane], keeper: RangeKeeper, journal: Journal, now_us: int) -> None:
        self._all_lanes, self._keeper, self._journal = lanes, keeper, journal
        self._until_us = now_us + _DURABLE_US
        self._unsaved: set[int] | None = None  # lanes whose checkpoint is on no disk yet

    def step(self, now_us: int) -> bool:
        """One step; True when all is done that can be done."""
        if self._unsaved is None:
            if not self._all_durable() and now_us < self._until_us:
                return False
            self._unsaved = self._save(now_us)
            self._until_us = now_us + _CHECKPOINT_US
        self._unsaved = {number for number in self._unsaved if not self._is_saved(number)}
        if self._unsaved and now_us < self._until_us:
            return False
        self._seal()
        return True

    @property
    def _lanes(self) -> dict[int, Lane]:
        """Lanes with replicas; topics may be deleted meanwhile."""
        return {number: lane for number, lane in self._all_lanes.items() if number in self._keeper.kept}

    def _all_durable(self) -> bool:
        """Closed lanes of brokers are sealed when they are; one whose broker lives just has to be on disk."""
        return all(
            self._keeper.durable(number) >= kept.ordered() and (kept.broker_lane is None or kept.broker_lane.open)
            for number, kept in self._keeper.kept.items()
        )

    def _save(self, now_us: int) -> set[int]:
        """Write last checkpoints, where there is something new. Returns the lanes to wait for."""
        durable = {n for n, lane in self._lanes.items() if self._keeper.durable(n) >= lane.order.next_index}
        for number in durable:
            self._lanes[number].save(now_us)
        return {number for number in durable if self._lanes[number].order.table.used}

    def _is_saved(self, number: int) -> bool:
        """Whether a replica says that it has the checkpoint on disk: the second value of its durable line."""
        kept = self._keeper.kept.get(number)
        if kept is None or kept.lane is None:
            return True
        tables = [self._keeper.lines.of(ref) for ref in kept.range_.replicas]
        tags, end = (number, kept.range_.number), kept.lane.order.next_index
        return any(table is not None and table.load(tags, _CHECKPOINT) == end for table in tables)

    def _seal(self) -> None:
        """Seal what is durable through its end."""
        for number, lane in self._lanes.items():
            kept, order = self._keeper.kept[number], lane.order
            if kept.range_.open and self._keeper.durable(number) >= order.next_index:
                self._keeper.seal_for_good(kept, order.next_index, order.next_seq)
        left = sorted(
            number
            for number, kept in self._keeper.kept.items()
            if kept.range_.open and self._keeper.durable(number) < kept.ordered()
        )
        if left:
            self._journal.warn("ranges left open", lanes=left, why="not all of them is durable")
