"""Counting as durable: how far a lane is on enough disks, without asking anybody.

Each replica incarnation has a table of durable lines: (lane, range) -> synced through. The sequencer of the epoch has a
table of range lines: lane -> which range is open, and whether it is closing. A lane is durable through the A-th largest
line of its open range, dead replicas included; everything below the range's start is in sealed ranges.

The order of loads is the safety argument. Who counts: range line, durable lines, fence, range line again, epoch lines;
and counts only if nothing changed. Who seals: writes "closing", flushes, fences, and only then reads the durable lines.
So either the counter sees that the range is closing, or the sealer sees every line that was counted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.lines import TaggedReader, TaggedWriter, create_tagged
from embarcadero.fabric.region import Fabric, durable_region, ranges_region
from embarcadero.limits import DURABLE_LINES, RANGE_LINES
from embarcadero.steps import Step
from embarcadero.types import Range, RangeKey, ReplicaRef

NO_RANGE: Final = 0
"""The word of a lane that has no open range."""


def create_durable(fabric: Fabric, ref: ReplicaRef) -> TaggedWriter:
    """Make a replica incarnation's durable lines."""
    return create_tagged(fabric, durable_region(ref), RegionKind.DURABLE, DURABLE_LINES, ref.replica, ref.incarnation)


def create_ranges(fabric: Fabric, epoch: int) -> TaggedWriter:
    """Make an epoch's range lines."""
    return create_tagged(fabric, ranges_region(epoch), RegionKind.RANGES, RANGE_LINES, epoch)


class DurableLines:
    """The durable lines of all replicas, as far as their regions exist."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._readers: dict[tuple[int, int], TaggedReader] = {}  # by replica and incarnation

    def of(self, ref: ReplicaRef) -> TaggedReader | None:
        """One incarnation's table; None before its region exists, or after it was removed unseen."""
        key = (ref.replica, ref.incarnation)
        reader = self._readers.get(key)
        if reader is None and self._fabric.exists(name := durable_region(ref)):
            reader = self._readers[key] = TaggedReader(self._fabric.attach(name))
        return reader

    def load(self, range_: Range) -> list[int | None]:
        """The line of each replica of a range; None for one that has not begun it."""
        tables = [self.of(ref) for ref in range_.replicas]
        key = range_.key
        return [None if table is None else table.load(key) for table in tables]

    def forget(self, ref: ReplicaRef) -> None:
        """Let go of an incarnation's region."""
        self._readers.pop((ref.replica, ref.incarnation), None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop what is known of other lanes, which are gone."""
        for reader in self._readers.values():
            reader.keep(lanes)

    def forget_removed(self) -> None:
        """Let go of regions that were removed: else their memory stays. No open range names these incarnations."""
        for replica, incarnation in list(self._readers):
            ref = ReplicaRef(replica=replica, incarnation=incarnation, disk="")
            if not self._fabric.exists(durable_region(ref)):
                self.forget(ref)


def durable_through(range_: Range, lines: list[int | None]) -> int:
    """The A-th largest line; the range's start while fewer than A replicas have begun."""
    known = sorted([line for line in lines if line is not None], reverse=True)
    if range_.durable_on == 0 or len(known) < range_.durable_on:
        return range_.start
    return max(range_.start, known[range_.durable_on - 1])


def first_woken(range_: Range) -> list[ReplicaRef]:
    """The replicas that are woken for a batch that comes alone: enough to make it durable.

    They do not have to share processors and disks with the others, which are woken by the first of these that has the
    batch on disk. Only where any set that is enough has one of these: else no woken replica might wake the others.
    """
    enough = range_.durable_on
    return range_.replicas[:enough] if len(range_.replicas) < 2 * enough else range_.replicas


class Durability:
    """How far lanes are durable, as a role that acts on it may count: a number that was counted once stays true."""

    def __init__(
        self, fabric: Fabric, epochs: EpochTable, find: Callable[[int, int], Range | None], steps: Steps = NO_STEPS
    ) -> None:
        self._fabric, self._epochs, self._find, self._steps = fabric, epochs, find, steps
        self.lines = DurableLines(fabric)
        self._epoch = 0
        self._words: TaggedReader | None = None
        self._open: dict[int, Range] = {}
        self._known: dict[int, int] = {}

    def follow(self, epoch: int) -> None:
        """A new epoch has started: its range lines count from now on."""
        self._epoch, self._words = epoch, None

    def known(self, lane: int) -> int:
        """What was counted last."""
        return self._known.get(lane, 0)

    def through(self, lane: int) -> int:
        """How far a lane is durable. May be acted on at once."""
        counted = self._count(lane)
        if counted is not None and counted > self.known(lane):
            self._known[lane] = counted
        return self.known(lane)

    def countable(self, lane: int) -> bool:
        """Whether it could be counted just now: then `known` is no less than what anybody counted before."""
        counted = self._count(lane)
        if counted is None:
            return False
        self._known[lane] = max(counted, self.known(lane))
        return True

    def forget(self, lane: int) -> None:
        """The lane is gone."""
        self._known.pop(lane, None)
        self._open.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop what is known of other lanes, which are gone."""
        for lane in (self._known.keys() | self._open.keys()) - lanes:
            self.forget(lane)
        self.lines.keep(lanes)
        if self._words is not None:
            self._words.keep(lanes)

    def _count(self, lane: int) -> int | None:
        word = self._word(lane)
        if not word or word & 1 or (range_ := self._range(lane, word >> 1)) is None:  # none is open, or it is closing
            return None
        self._steps.at(Step.COUNT_WORD)
        counted = durable_through(range_, self.lines.load(range_))
        self._steps.at(Step.COUNT_LINES)
        self._fabric.fence()
        if self._word(lane) != word or self._epochs.superseded(self._epoch):
            return None
        self._steps.at(Step.COUNT_CHECKED)
        return counted

    def _word(self, lane: int) -> int | None:
        """The range word of a lane, as it is written."""
        if self._words is None:
            if not self._epoch or not self._fabric.exists(name := ranges_region(self._epoch)):
                return None
            self._words = TaggedReader(self._fabric.attach(name))
        return self._words.load(RangeKey(lane, 0))

    def _range(self, lane: int, number: int) -> Range | None:
        range_ = self._open.get(lane)
        if range_ is None or range_.number != number:
            range_ = self._find(lane, number)
            if range_ is not None:
                self._open[lane] = range_
        return range_
