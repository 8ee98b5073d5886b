"""Regions that nobody needs any more: of epochs before our predecessor's, and of incarnations that are forgotten.

Whoever stops a role for good removes its regions; but one that sleeps may make another of them when it wakes up, long
after. So the sequencer that reigns looks again and again, beside its rounds. In one generation of the fabric names are
never used again, so it does not matter when that happens, or who reigns then.

A clean stop: everything ordered gets onto disks, sessions too, and ranges are sealed where they end.

So the next run finds a sealed last range in each lane and goes on at that very place, with nothing lost. Every wait is
bounded; a lane that did not get there in time keeps its open range, and the next run recovers it like after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from embarcadero.env import Journal, Steps, Workers
from embarcadero.fabric.names import epoch_of, is_incarnation, is_replica, writer_of
from embarcadero.fabric.region import Fabric
from embarcadero.limits import DRAIN_CHECKPOINT_S_MAX, DRAIN_DURABLE_S_MAX
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.order.lane import Lane
from embarcadero.sequencer.ranges.keeper import RangeKeeper
from embarcadero.steps import Step

_FIRST_US: Final = 300_000
"""After a takeover publishers come first: what earlier epochs left keeps its memory until then."""
_EVERY_US: Final = 2_000_000


class Sweeper:
    """Looks for what is left and removes it. `look` now and then; it knows when."""

    def __init__(
        self, fabric: Fabric, directory: Directory, workers: Workers, steps: Steps, epoch: int, earlier: int,
        now_us: int,
    ) -> None:  # fmt: skip
        """`earlier`: our predecessor, whose regions somebody may still read."""
        self._fabric, self._directory, self._workers, self._steps = fabric, directory, workers, steps
        self._epoch, self._earlier = epoch, earlier
        self._due_us = now_us + _FIRST_US
        self._names: list[str] | None = None  # that there were at the last look, until they are judged
        self._busy = False

    def look(self, now_us: int) -> None:
        """See what there is; judge what was seen. Asks the store."""
        if now_us >= self._due_us and not self._busy:
            self._due_us = now_us + _EVERY_US
            self._beside(self._fabric.names, self._seen)
        if self._names is not None:
            left = self._left(self._names)
            self._names = None
            self._beside(lambda: self._remove(left), lambda _: self._steps.at(Step.TAKEOVER_SWEPT))

    def _beside(self, job: Callable[[], object], done: Callable[[object], None]) -> None:
        self._busy = True

        def ended(result: object) -> None:
            self._busy = False
            done(result)

        self._workers.run(job, ended)

    def _seen(self, names: object) -> None:
        if isinstance(names, list):
            self._names = names

    def _left(self, names: list[str]) -> list[str]:
        """Of these names those that are of no use. Who makes a region is in the store before it, so we ask after it."""
        members, replicas = self._directory.members(), self._directory.replicas()
        prefixes = {member.region_prefix for member in members} | {member.ref.region_prefix for member in replicas}
        left = [name for name in names if self._is_left(writer_of(name), prefixes)]
        if any(is_replica(name) for name in left):  # lines that an open range names count, whoever is known
            open_ = [range_ for range_ in self._directory.ranges() if range_.open]
            named = {ref.region_prefix for range_ in open_ for ref in range_.replicas}
            left = [name for name in left if writer_of(name) not in named]
        return left if self._directory.generation_holds() else []

    def _is_left(self, owner: str, prefixes: set[str]) -> bool:
        if (epoch := epoch_of(owner)) is not None:
            return epoch < self._epoch and epoch != self._earlier
        return is_incarnation(owner) and owner not in prefixes

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._fabric.remove(name)


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
