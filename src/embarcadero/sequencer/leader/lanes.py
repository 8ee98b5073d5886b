"""The lanes of one leadership: how they are made, dropped and brought back, and the reorder buffer that they share."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from embarcadero.errors import FabricFull
from embarcadero.fabric.layout import ORDER, Entries, pick
from embarcadero.fabric.names import checkpoint_region, held_region, order_region
from embarcadero.sequencer.leader.leadership import Leadership
from embarcadero.sequencer.order.batches import Decisions, LaneOrder
from embarcadero.sequencer.order.lane import Lane, Room, fence
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable, Slots, create_reorder_region
from embarcadero.sequencer.ranges.keeper import RangeKeeper
from embarcadero.sequencer.ranges.recovery import Recovered, Recovery
from embarcadero.sequencer.ranges.recovery_sources import Mirrors
from embarcadero.steps import Step
from embarcadero.types import Order, Outcome, Range, Topic

_ORDERED: Final = (Order.TOTAL, Order.STRONG)


class LeaderLanes:
    """All lanes that this leader writes, by number; batches of any of them may wait in the reorder buffer."""

    def __init__(self, leader: Leadership, mirrors: Mirrors | None) -> None:
        self._leader = leader
        sizes = leader.sizes
        self.by_number: dict[int, Lane] = {}
        self.roomless: set[int] = set()  # lanes for which the fabric has no room
        self._told_full = False
        self.refused = Decisions()  # answers to entries of lanes that are not there
        self.backlog: Slots = np.empty(0, dtype=np.int64)  # taken-over batches that the first round decides on
        self.buffer = ReorderBuffer(min(sizes.held_slots, sizes.order_slots - 2 * sizes.round_entries))
        self._reorder_region = create_reorder_region(leader.fabric, held_region(leader.epoch), self.buffer.slots)
        self.ranges = RangeKeeper(
            leader.env, leader.fabric, leader.directory, leader.epoch, leader.now_us, leader.counters
        )
        self.recovery = Recovery(leader.env, leader.directory, leader.epoch, self.ranges, self, mirrors)

    @property
    def sessions(self) -> int:
        """How many sessions a lane may have."""
        return self._leader.sizes.sessions

    # --- making -------------------------------------------------------------------------------------------------------
    def is_ordered_here(self, topic: Topic) -> bool:
        """Whether sequencers order this topic; brokers order the others."""
        return topic.order in _ORDERED

    def ranges_of(self, topic: Topic) -> list[Range]:
        """The ranges of a topic that has replicas."""
        return self._leader.directory.ranges.all(topic.lane) if topic.replicas else []

    def add(self, topic: Topic) -> None:
        """A new topic. While the fabric has no room for it, its publishers wait, and nobody else."""
        if not self.is_ordered_here(topic):
            return
        try:
            self.make(topic, self.ranges_of(topic), None)
        except FabricFull as error:
            self._no_room(topic, error)
            self.roomless.add(topic.lane)

    def make(self, topic: Topic, ranges: list[Range], inherited: tuple[LaneOrder, Entries] | None) -> None:
        """Make a lane, or have it recovered; `inherited` is what a predecessor left of it."""
        if ranges and (inherited is None or inherited[0].next_index < ranges[-1].start):
            # Either its past is on disk only, or it is new and nobody has begun it; recovery knows.
            self.recovery.add(topic, ranges, None, self._leader.now_us)
            return
        order, entries = (self.new_order(topic), None) if inherited is None else inherited
        self.put(self.new_lane(order, entries), ranges[-1] if ranges else None)

    def new_order(self, topic: Topic) -> LaneOrder:
        """An empty lane's order."""
        return LaneOrder(topic, SessionTable(self.sessions), self.buffer)

    def new_lane(self, order: LaneOrder, entries: Entries | None) -> Lane:
        """Make a lane's regions, and issue again what readers may still ask for."""
        leader = self._leader
        order.make_room, order.journal = self._make_room, leader.env.journal
        order.set_departed_timeout(leader.settings.departed_gap_timeout_ms)
        order.peer_share = leader.settings.sessions_per_peer_share
        lane = Lane(leader.env, leader.fabric, leader.epoch, order, leader.sizes, leader.frontiers)
        if entries is not None:
            lane.inherit(entries, leader.now_us)
        return lane

    def put(self, lane: Lane, range_: Range | None) -> Lane:
        """From here on batches of this lane are ordered."""
        topic = lane.order.topic
        number = topic.lane
        self.by_number[number] = lane
        if range_ is not None:
            self.ranges.keep(range_, topic, lane)
            lane.room = Room(lane.slots, self._leader.sizes.round_entries, partial(self.ranges.durable, number))
            if not self._leader.ask_store(partial(self._learn_ceiling, lane)):
                self.ranges.grew(number)  # the next look tries again
        return lane

    def _learn_ceiling(self, lane: Lane) -> None:
        self.ranges.learn_ceiling(lane)
        self.ranges.reserve(lane)

    def begin_recovered(self, found: Recovered) -> bool:
        """A lane has come back from disk. False: the fabric has no room for it now."""
        leader = self._leader
        try:
            lane = self.put(self.new_lane(found.order, np.empty(0, dtype=ORDER)), found.range_)
        except FabricFull as error:
            self._no_room(found.order.topic, error)
            return False
        lane.unfenced = found.fenced
        leader.counters.recovered += 1
        leader.counters.recovery_us = leader.now_us - leader.began_us
        return True

    def _no_room(self, topic: Topic, error: FabricFull) -> None:
        self.remove_regions(topic.lane)
        if not self._told_full:
            self._leader.env.journal.warn("topic waits", topic=topic.name, reason=error.message)
        self._told_full = True

    def remove_regions(self, number: int) -> None:
        """Remove what was made of a lane before the fabric was full."""
        for name in (order_region(self._leader.epoch, number), checkpoint_region(self._leader.epoch, number)):
            self._leader.fabric.remove(name)

    # --- dropping -----------------------------------------------------------------------------------------------------
    def drop(self, number: int) -> None:
        """The lane's topic is gone."""
        lane = self.by_number.pop(number)
        self.ranges.drop(number)
        slots = self.buffer.of_lane(number)
        self.refused.answers += lane.order.out.take_answers()
        self.refused.answer_all(pick(self.buffer.entries, slots), Outcome.UNKNOWN_TOPIC)
        self.buffer.release(slots)
        self.backlog = self.backlog[~np.isin(self.backlog, slots)]  # a slot is given free once
        for name in lane.regions:
            self._leader.fabric.remove(name)
        lane.close()

    # --- the reorder buffer -------------------------------------------------------------------------------------------
    def enlarge_buffer(self, slots: int) -> None:
        """Have so many slots for batches that wait; none does yet."""
        self._leader.fabric.remove(held_region(self._leader.epoch))
        self.buffer.resize(slots)
        self._reorder_region = create_reorder_region(self._leader.fabric, held_region(self._leader.epoch), slots)

    def take_over_waiting(self, undecided: Slots) -> None:
        """A predecessor's waiting batches are in the buffer; these are decided on in the first round."""
        self.backlog = undecided
        self.write_buffer()

    def release_backlog(self) -> None:
        """The batches of the backlog have their outcome."""
        if len(self.backlog):
            self.buffer.release(self.backlog)
            self.backlog = self.backlog[:0]

    def write_buffer(self) -> Slots:
        """Copy new waiting batches to the fabric. Returns the slots that are to be cleared."""
        taken, freed = self.buffer.take_dirty()
        if len(taken):
            self._reorder_region.write(taken, pick(self.buffer.entries, taken))
            self._leader.env.steps.at(Step.ROUND_HELD)
        return freed

    def clear_slots(self, freed: Slots) -> None:
        """Clear slots of batches that wait no longer: all that speaks of them is flushed."""
        self._reorder_region.zero(freed)

    def _make_room(self, count: int) -> None:
        """Fence the sessions with the oldest gaps, of any lane, until so many slots of the reorder buffer are free."""
        while self.buffer.free < count:
            may_fence = [lane.order for lane in self.by_number.values() if lane.can_fence]
            waiting = [order for order in may_fence if order.table.waiting.total]
            if not waiting:
                return
            oldest = min(waiting, key=lambda order: order.table.waiting.oldest_us)
            fence(oldest, oldest.table.waiting.oldest(), self._leader.now_us, "overflow")
