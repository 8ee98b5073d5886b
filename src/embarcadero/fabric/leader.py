"""The view of the leader: the epoch that a process follows, what its sequencer published, and the check before acting.

This module also counts how far lanes are durable, from the lines of the leader and the replicas.

Brokers, replicas and standbys follow the leader with `LeaderView`. Nothing here waits. All attached regions are of one
epoch, and are released when the next epoch starts. Call `keep` or `forget` for deleted topics: a mapped order ring
keeps megabytes of memory, although its region is unlinked.

The epoch table has a line per epoch, written only by that epoch's sequencer: first "open", later a copy of "started".
Before a process acts on data of epoch e's sequencer (ack, serve, count), it loads everything the act rests on, fences,
and then calls `superseded(e)`: has a later epoch opened? Never in the opposite order.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

import numpy as np

from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import BadRegion, invariant
from embarcadero.fabric.layout import (
    EPOCH_LINE,
    ORDER,
    RESULT,
    STANDING_WORD,
    SUPERBLOCK,
    RangeWord,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
)
from embarcadero.fabric.lines import FrontierReader, RingReader, TaggedReader, TaggedWriter, attach_ring, create_tagged
from embarcadero.fabric.region import (
    EPOCHS_REGION,
    Fabric,
    Region,
    Shape,
    durable_region,
    frontiers_region,
    order_region,
    ranges_region,
    require_shape,
    results_region,
)
from embarcadero.limits import DURABLE_LINES, EPOCHS_AHEAD_MAX, EPOCHS_MAX, RANGE_LINES
from embarcadero.steps import Step
from embarcadero.types import Member, Range, RangeKey, ReplicaRef

_WORDS: Final = EPOCH_LINE.itemsize // 8
_OPENED_WORD, _STARTED_WORD = (EPOCH_LINE.fields[name][1] // 8 for name in ("epoch", "started"))  # type: ignore[index]


def create_epochs(fabric: Fabric) -> None:
    """Make the epoch table. Call it once, when the fabric is made."""
    size = SUPERBLOCK.itemsize + EPOCHS_MAX * EPOCH_LINE.itemsize
    fabric.create(EPOCHS_REGION, Shape(RegionKind.EPOCHS, size, EPOCHS_MAX, EPOCH_LINE.itemsize)).close()


class EpochTable:
    """All epoch lines. Only the sequencer of an epoch calls `open` and `start` for it."""

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
        """Open epoch e: from now on no role acts on writes of earlier leaders."""
        self._lines["epoch"][epoch] = epoch
        self._region.flush(self._offset(epoch), 64)
        self._fabric.fence()

    def start(self, epoch: int) -> None:
        """Publish that epoch e has started. Its start must be in the store."""
        self._lines["started"][epoch] = epoch + 1
        self._region.flush(self._offset(epoch) + 64, 64)

    def superseded(self, epoch: int) -> bool:
        """Whether a later epoch has opened. Call it after loading everything the act rests on; it fences first."""
        self._fabric.fence()
        first, last = epoch + 1, min(epoch + EPOCHS_AHEAD_MAX, len(self._lines) - 1)
        self._region.invalidate(self._offset(first), (last - first + 1) * EPOCH_LINE.itemsize)
        return any(self._opened[first : last + 1])

    def newest_started(self, after: int) -> int | None:
        """Find the newest started epoch above `after`, at most `EPOCHS_AHEAD_MAX` ahead; None if there is none."""
        last = min(after + EPOCHS_AHEAD_MAX, len(self._lines) - 1)
        self._region.invalidate(self._offset(after + 1), (last - after) * EPOCH_LINE.itemsize)
        if not any(started := self._started[after + 1 : last + 1]):
            return None
        return next((epoch for epoch in range(last, after, -1) if started[epoch - after - 1] == epoch + 1), None)

    def last_started(self) -> int:
        """Find the newest started epoch of all; 0: none. Call it only when no leader writes any more."""
        self._region.invalidate(self._offset(0), len(self._lines) * EPOCH_LINE.itemsize)
        started = np.flatnonzero(self._lines["started"] == np.arange(1, len(self._lines) + 1, dtype=np.uint64))
        return int(started[-1]) if len(started) else 0


_TARGET: Final = 1
"""Word of a range line with the index that replicas of a lane in recovery must reach."""


class LeaderView:
    """Follows the newest started epoch. `number` is 0 until the first epoch has started.

    A broker passes its own `member`: then the view also reads what the leader publishes for this broker.
    """

    def __init__(self, fabric: Fabric, member: Member | None = None, steps: Steps = NO_STEPS) -> None:
        self._fabric, self._member, self.steps = fabric, member, steps
        self.table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
        self.number = 0
        self._frontiers: Region | None = None
        self._heartbeat: FrontierReader | None = None
        self._awake: FrontierReader | None = None
        self._words: TaggedReader | None = None  # range words
        self._orders: dict[int, RingReader] = {}
        self._standings: dict[int, FrontierReader] = {}  # by region handle of a broker incarnation
        self._read_through: FrontierReader | None = None  # this and the next two: of our own member
        self._standing: FrontierReader | None = None
        self._results: RingReader | None = None
        self._watched = 0  # the epoch whose heartbeat was read last, started or not
        self._watched_heartbeat: FrontierReader | None = None

    def advance(self, hint: int) -> bool:
        """Move to the newest started epoch, known from the table or from the store (`hint`). True if it moved."""
        newest = self.table.newest_started(max(self.number, hint)) or hint
        if newest <= self.number or not self._fabric.exists(frontiers_region(newest)):
            return False
        self.number = newest
        self._frontiers = self._fabric.attach(frontiers_region(newest))
        self._heartbeat = FrontierReader(self._frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._awake = FrontierReader(self._frontiers, frontier_offset(SequencerLine.AWAKE))
        self._words = self._results = None
        self._orders.clear()
        self._standings.clear()
        if self._member is not None:
            mine = frontier_offset(SequencerLine.BROKERS + self._member.handle)
            self._read_through = FrontierReader(self._frontiers, mine)
            self._standing = FrontierReader(self._frontiers, mine + 8 * STANDING_WORD)
        return True

    # --- before acting ------------------------------------------------------------------------------------------------
    def may_act(self) -> bool:
        """Whether no later epoch is open. The last check before acting on data of this epoch's sequencer."""
        return self.number > 0 and not self.table.superseded(self.number)

    def counts_as_open(self, handle: int) -> bool:
        """Whether another broker incarnation is still open. The last check before acting on its data."""
        if self._frontiers is None:
            return False
        if (word := self._standings.get(handle)) is None:
            line = frontier_offset(SequencerLine.BROKERS + handle)
            word = self._standings[handle] = FrontierReader(self._frontiers, line + 8 * STANDING_WORD)
        self._fabric.fence()
        return word.load() == Standing.OPEN and self.may_act()

    def still_open(self) -> bool:
        """Whether this epoch's sequencer counts us as open. The last check before acking our own entries.

        Call it after the flush of the acked entries. A sequencer that closes us first publishes "closing", and then
        reads our lanes. So either we see "closing" here, or the sequencer sees our entries. A sequencer that does not
        know us does not count us as open: an earlier one may have closed us while we were paused, and closed
        incarnations are not listed in later epochs.
        """
        self._fabric.fence()
        return self._standing is not None and self._standing.load() == Standing.OPEN and self.may_act()

    # --- heartbeats ---------------------------------------------------------------------------------------------------
    def heartbeat(self) -> tuple[int, int]:
        """(epoch, heartbeat count of its sequencer). A sequencer is silent when the pair stays the same for long."""
        return self.number, self._heartbeat.load() if self._heartbeat else 0

    def beats(self, epoch: int) -> int:
        """The heartbeat count of an epoch that may not have started; -1 before its region exists."""
        if self._watched_heartbeat is None or self._watched != epoch:
            self._watched_heartbeat = None
            with suppress(BadRegion):  # removed meanwhile: then the store has a later epoch
                if epoch and self._fabric.exists(name := frontiers_region(epoch)):
                    line = frontier_offset(SequencerLine.HEARTBEAT)
                    self._watched_heartbeat = FrontierReader(self._fabric.attach(name), line)
                    self._watched = epoch
        return -1 if self._watched_heartbeat is None else self._watched_heartbeat.load()

    def sequencer_sleeps(self) -> bool:
        """Whether the sequencer must be woken to see entries that were published just now."""
        self._fabric.fence()  # our frontier first, then its word: the sequencer uses the opposite order
        return self._awake is None or not self._awake.load()

    # --- published for our broker -------------------------------------------------------------------------------------
    def read_through(self) -> int:
        """Index in our pending ring: slots below it are free."""
        return self._read_through.load() if self._read_through else 0

    def closing(self) -> bool:
        """Whether the sequencer has closed this broker incarnation, because another process considered it dead."""
        return self._standing is not None and self._standing.load() == Standing.CLOSING

    def results(self) -> RingReader | None:
        """The ring with the outcomes of our entries; None until the sequencer has made it."""
        if self._results is None and self.number and self._member is not None:
            name = results_region(self.number, self._member)
            if self._fabric.exists(name):
                self._results = attach_ring(self._fabric, name, RESULT, "position")
        return self._results

    # --- lanes --------------------------------------------------------------------------------------------------------
    def order(self, lane: int) -> RingReader | None:
        """The order ring of a lane of the sequencer; None until it exists."""
        ring = self._orders.get(lane)
        if ring is None and self.number and self._fabric.exists(name := order_region(self.number, lane)):
            ring = self._orders[lane] = attach_ring(self._fabric, name, ORDER)
        return ring

    def ordered_end(self, lane: int) -> int | None:
        """End of a lane's entries in memory, published or not: every answered entry is below it."""
        ring = self.order(lane)
        return None if ring is None else ring.valid_end(ring.frontier.load())

    def word(self, lane: int) -> RangeWord | None:
        """The range word of a lane; None while the sequencer has not published one."""
        table = self._range_words()
        word = None if table is None else table.load(RangeKey(lane, 0))
        return RangeWord.decode(word) if word else None

    def target(self, lane: int) -> int:
        """The index that replicas of a lane in recovery must reach; 0 when there is none."""
        table = self._range_words()
        return 0 if table is None else table.load(RangeKey(lane, 0), _TARGET) or 0

    def asked(self, range_: Range) -> int:
        """The index that copies of an open range must reach while its lane is recovered; 0 when it is not."""
        word = self.word(range_.lane)
        return self.target(range_.lane) if word == RangeWord(range_.number, closing=True) else 0

    def _range_words(self) -> TaggedReader | None:
        if self._words is None and self.number and self._fabric.exists(name := ranges_region(self.number)):
            self._words = TaggedReader(self._fabric.attach(name))
        return self._words

    # --- deleted topics -----------------------------------------------------------------------------------------------
    def forget(self, lane: int) -> None:
        """Release the order ring of a deleted topic."""
        self._orders.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Release the order rings of all other lanes: their topics are deleted, or are not followed any more."""
        self._orders = {lane: ring for lane, ring in self._orders.items() if lane in lanes}

    def keep_words(self, lanes: AbstractSet[int]) -> None:
        """Release the range words of all other lanes, which are deleted."""
        if self._words is not None:
            self._words.keep(lanes)


# --- durability -------------------------------------------------------------------------------------------------------
NO_RANGE: Final = 0
"""The word of a lane that has no open range."""


def create_durable(fabric: Fabric, ref: ReplicaRef) -> TaggedWriter:
    """Make the durable lines of a replica incarnation."""
    return create_tagged(fabric, durable_region(ref), RegionKind.DURABLE, DURABLE_LINES, ref.replica, ref.incarnation)


def create_ranges(fabric: Fabric, epoch: int) -> TaggedWriter:
    """Make the range lines of an epoch."""
    return create_tagged(fabric, ranges_region(epoch), RegionKind.RANGES, RANGE_LINES, epoch)


class DurableLines:
    """The durable lines of all replicas whose regions exist."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._readers: dict[tuple[int, int], TaggedReader] = {}  # by replica and incarnation

    def of(self, ref: ReplicaRef) -> TaggedReader | None:
        """The table of one incarnation; None before its region exists, or if it was removed before we attached it."""
        key = (ref.replica, ref.incarnation)
        reader = self._readers.get(key)
        if reader is None and self._fabric.exists(name := durable_region(ref)):
            reader = self._readers[key] = TaggedReader(self._fabric.attach(name))
        return reader

    def load(self, range_: Range) -> list[int | None]:
        """Load the line of each replica of a range; None for a replica that has not begun the range."""
        tables = [self.of(ref) for ref in range_.replicas]
        key = range_.key
        return [None if table is None else table.load(key) for table in tables]

    def forget(self, ref: ReplicaRef) -> None:
        """Release an incarnation's region."""
        self._readers.pop((ref.replica, ref.incarnation), None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the state of all other lanes, which are deleted."""
        for reader in self._readers.values():
            reader.keep(lanes)

    def forget_removed(self) -> None:
        """Release regions that were removed, which frees their memory. No open range names these incarnations."""
        for replica, incarnation in list(self._readers):
            ref = ReplicaRef(replica=replica, incarnation=incarnation, disk="")
            if not self._fabric.exists(durable_region(ref)):
                self.forget(ref)


def durable_through(range_: Range, lines: list[int | None]) -> int:
    """Compute the A-th largest line; the range's start while fewer than A replicas have begun."""
    known = sorted([line for line in lines if line is not None], reverse=True)
    if range_.durable_on == 0 or len(known) < range_.durable_on:
        return range_.start
    return max(range_.start, known[range_.durable_on - 1])


def first_woken(range_: Range) -> list[ReplicaRef]:
    """Choose the replicas to wake for a lone batch: just enough to make it durable.

    These replicas then do not share processors and disks with the others. The first of them that has the batch on disk
    wakes the others. This holds only if every set of A replicas includes one of these; if not, all are woken, since
    otherwise no woken replica might wake the others.
    """
    enough = range_.durable_on
    return range_.replicas[:enough] if len(range_.replicas) < 2 * enough else range_.replicas


class Durability:
    """Counts how far lanes are durable, for roles that act on it. A number that was counted once stays true.

    Each replica incarnation has a table of durable lines: (lane, range) -> synced through. The sequencer of the epoch
    has a table of range lines: lane -> its open range, and whether that range is closing. A lane is durable through the
    A-th largest line of its open range, dead replicas included. Everything below the range's start is in sealed ranges.

    The order of loads is the safety argument. The counter loads range line, durable lines, fence, range line again,
    epoch lines; and counts only if nothing changed. The sealer writes "closing", flushes, fences, and only then reads
    the durable lines. So either the counter sees that the range is closing, or the sealer sees every line that was
    counted.
    """

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
        """Follow a new epoch that has started: its range lines count from now on."""
        self._epoch, self._words = epoch, None

    def known(self, lane: int) -> int:
        """The end that was counted last."""
        return self._known.get(lane, 0)

    def through(self, lane: int) -> int:
        """Count how far a lane is durable. The caller may act on the result immediately."""
        counted = self._count(lane)
        if counted is not None and counted > self.known(lane):
            self._known[lane] = counted
        return self.known(lane)

    def countable(self, lane: int) -> bool:
        """Count now. True if that worked: then `known` is at least every count that any process made before."""
        counted = self._count(lane)
        if counted is None:
            return False
        self._known[lane] = max(counted, self.known(lane))
        return True

    def forget(self, lane: int) -> None:
        """Drop the state of a deleted lane."""
        self._known.pop(lane, None)
        self._open.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the state of all other lanes, which are deleted."""
        for lane in (self._known.keys() | self._open.keys()) - lanes:
            self.forget(lane)
        self.lines.keep(lanes)
        if self._words is not None:
            self._words.keep(lanes)

    def _count(self, lane: int) -> int | None:
        word = self._word(lane)
        if not word or word & 1 or (range_ := self._range(lane, word >> 1)) is None:  # no open range, or closing
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
        """The range word of a lane, not decoded."""
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
