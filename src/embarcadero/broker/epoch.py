"""A broker's view of the sequencer's reign: which epoch it follows, and whether it may still act on its word."""

from __future__ import annotations

from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.epochs import EPOCHS_REGION, EpochTable
from embarcadero.fabric.frontier import FrontierReader
from embarcadero.fabric.layout import ORDER, RESULT, STANDING_WORD, SequencerLine, Standing, frontier_offset
from embarcadero.fabric.region import Fabric, Region
from embarcadero.fabric.ring import RingReader, attach_ring
from embarcadero.types import Member


class EpochView:
    """Follows the newest started epoch. `number` is 0 until the first one has started."""

    def __init__(self, fabric: Fabric, member: Member, steps: Steps = NO_STEPS) -> None:
        self._fabric, self._member, self.steps = fabric, member, steps
        self.table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
        self.number = 0
        self._frontiers: Region | None = None
        self._read_through: FrontierReader | None = None
        self._standing: FrontierReader | None = None
        self._awake: FrontierReader | None = None
        self._heartbeat: FrontierReader | None = None
        self._results: RingReader | None = None
        self._orders: dict[int, RingReader] = {}
        self._others: dict[int, FrontierReader] = {}  # standings of other incarnations, by region handle

    def advance(self, hint: int) -> bool:
        """Move on to the newest started epoch, known from the table or from the store (`hint`). True if it moved."""
        newest = self.table.newest_started(max(self.number, hint)) or hint
        if newest <= self.number or not self._fabric.exists(f"epoch-{newest}/frontiers"):
            return False
        self.number = newest
        self._frontiers = self._fabric.attach(f"epoch-{newest}/frontiers")
        mine = frontier_offset(SequencerLine.BROKERS + self._member.handle)
        self._read_through = FrontierReader(self._frontiers, mine)
        self._standing = FrontierReader(self._frontiers, mine + 8 * STANDING_WORD)
        self._awake = FrontierReader(self._frontiers, frontier_offset(SequencerLine.AWAKE))
        self._heartbeat = FrontierReader(self._frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._results = None
        self._orders.clear()
        self._others.clear()
        return True

    def may_act(self) -> bool:
        """The last question before acting on what this epoch's sequencer wrote: is there no later one?"""
        return self.number > 0 and not self.table.superseded(self.number)

    def read_through(self) -> int:
        """Pending slots below are free."""
        return self._read_through.load() if self._read_through else 0

    def closing(self) -> bool:
        """Whether the sequencer has closed this broker incarnation: somebody took it for dead."""
        return self._standing is not None and self._standing.load() == Standing.CLOSING

    def sequencer_sleeps(self) -> bool:
        """Whether the sequencer must be woken to see what was published just now."""
        self._fabric.fence()  # our frontier first, then its word: it does the opposite
        return self._awake is None or not self._awake.load()

    def heartbeat(self) -> tuple[int, int]:
        """(epoch, beats of its sequencer): a pair that stays the same for long is that of a silent one."""
        return self.number, self._heartbeat.load() if self._heartbeat else 0

    def still_open(self) -> bool:
        """The last question before acking what we wrote ourselves: does this epoch's sequencer count us as open?

        It comes after the flush of what is acked. A sequencer that closes us says so first and reads our lanes then,
        so either we see that here, or it sees what we wrote. One that has not heard of us may come after one that
        closed us: then we were asleep for so long that nobody knows us any more.
        """
        self._fabric.fence()
        return self._standing is not None and self._standing.load() == Standing.OPEN and self.may_act()

    def counts_as_open(self, handle: int) -> bool:
        """The last question before serving what another incarnation wrote: is it still open?"""
        if self._frontiers is None:
            return False
        if (word := self._others.get(handle)) is None:
            line = frontier_offset(SequencerLine.BROKERS + handle)
            word = self._others[handle] = FrontierReader(self._frontiers, line + 8 * STANDING_WORD)
        self._fabric.fence()
        return word.load() == Standing.OPEN and self.may_act()

    def results(self) -> RingReader | None:
        """The outcomes of our entries, once the sequencer has made the region."""
        if self._results is None and self.number:
            name = f"epoch-{self.number}/results-{self._member.broker}.{self._member.incarnation}"
            if self._fabric.exists(name):
                self._results = attach_ring(self._fabric, name, RESULT, "position")
        return self._results

    def order(self, lane: int) -> RingReader | None:
        """The order index of a lane, once the sequencer has made it."""
        ring = self._orders.get(lane)
        if ring is None and self.number and self._fabric.exists(name := f"epoch-{self.number}/order-{lane}"):
            ring = self._orders[lane] = attach_ring(self._fabric, name, ORDER)
        return ring

    def ordered_end(self, lane: int) -> int | None:
        """Behind the last entry of a lane that is in memory, published or not: a bound of all that was answered."""
        ring = self.order(lane)
        return None if ring is None else ring.valid_end(ring.frontier.load())

    def forget(self, lane: int) -> None:
        """A topic is gone; drop its ring."""
        self._orders.pop(lane, None)
