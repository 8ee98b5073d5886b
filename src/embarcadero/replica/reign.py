"""A replica's view of the sequencer's reign: order rings, range words, and whether it may still act on them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.durability import RangeWord, ranges_region
from embarcadero.fabric.epochs import EPOCHS_REGION, EpochTable
from embarcadero.fabric.frontier import FrontierReader
from embarcadero.fabric.layout import ORDER, STANDING_WORD, SequencerLine, Standing, frontier_offset
from embarcadero.fabric.region import Fabric, Region
from embarcadero.fabric.ring import RingReader, attach_ring
from embarcadero.fabric.tagged import TaggedReader
from embarcadero.types import Range

_TARGET = 1
"""Which value of a range line is the index that replicas of a lane in recovery must reach."""


class Reign:
    """Follows the newest started epoch. `number` is 0 until the first one has started."""

    def __init__(self, fabric: Fabric, steps: Steps = NO_STEPS) -> None:
        self._fabric, self.steps = fabric, steps
        self._table = EpochTable(fabric, fabric.attach(EPOCHS_REGION))
        self.number = 0
        self._frontiers: Region | None = None
        self._words: TaggedReader | None = None
        self._orders: dict[int, RingReader] = {}
        self._standings: dict[int, FrontierReader] = {}

    def advance(self, hint: int) -> bool:
        """Move on to the newest started epoch, known from the table or from the store (`hint`). True if it moved."""
        newest = self._table.newest_started(max(self.number, hint)) or hint
        if newest <= self.number or not self._fabric.exists(f"epoch-{newest}/frontiers"):
            return False
        self.number = newest
        self._frontiers = self._fabric.attach(f"epoch-{newest}/frontiers")
        self._words = None
        self._orders.clear()
        self._standings.clear()
        return True

    def may_act(self) -> bool:
        """The last question before appending what this epoch's sequencer ordered: is there no later one?"""
        return self.number > 0 and not self._table.superseded(self.number)

    def counts_as_open(self, handle: int) -> bool:
        """The last question before appending what a broker incarnation ordered: does it count as open?"""
        if self._frontiers is None:
            return False
        if (word := self._standings.get(handle)) is None:
            line = frontier_offset(SequencerLine.BROKERS + handle)
            word = self._standings[handle] = FrontierReader(self._frontiers, line + 8 * STANDING_WORD)
        self._fabric.fence()
        return word.load() == Standing.OPEN and self.may_act()

    def order(self, lane: int) -> RingReader | None:
        """The order index of a lane of the sequencer, once it is there."""
        ring = self._orders.get(lane)
        if ring is None and self.number and self._fabric.exists(name := f"epoch-{self.number}/order-{lane}"):
            ring = self._orders[lane] = attach_ring(self._fabric, name, ORDER)
        return ring

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the rings of all other lanes, and with them their memory: their topics are gone, or their copies are."""
        self._orders = {lane: ring for lane, ring in self._orders.items() if lane in lanes}

    def keep_words(self, lanes: AbstractSet[int]) -> None:
        """Drop the objects of range words of all other lanes, which are gone."""
        if self._words is not None:
            self._words.keep(lanes)

    def word(self, lane: int) -> RangeWord | None:
        """What the sequencer says about a lane's open range; None while it says nothing."""
        table = self._table_of_words()
        word = None if table is None else table.load((lane, 0))
        return RangeWord.decode(word) if word else None

    def target(self, lane: int) -> int:
        """The index that replicas of a lane in recovery must reach; 0 when there is none."""
        table = self._table_of_words()
        return 0 if table is None else table.load((lane, 0), _TARGET) or 0

    def asked(self, range_: Range) -> int:
        """The index that copies of an open range must reach, since its lane is being recovered; 0 when it is not."""
        word = self.word(range_.lane)
        return self.target(range_.lane) if word == RangeWord(range_.number, closing=True) else 0

    def _table_of_words(self) -> TaggedReader | None:
        if self._words is None and self.number and self._fabric.exists(name := ranges_region(self.number)):
            self._words = TaggedReader(self._fabric.attach(name))
        return self._words
