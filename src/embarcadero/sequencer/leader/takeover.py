"""Takeover: read the state of the last started sequencer, and continue it.

Theory of operation. Our epoch line is already open, so no process acts any more on writes of the predecessor. But the
predecessor may still be writing: it may be paused in the middle of a round. It writes entries, then answers, then
waiting batches, then "read through". We read in the opposite order, so every entry below "read through" is found in
one of the others:
1. read-through watermarks, 2. waiting batches, 3. answers, 4. checkpoints and order rings. The valid contiguous
entries of an order ring (never its frontier) determine where the order ends.
A batch that has an answer is settled. A waiting batch without an answer waits on, or is decided in our first round. An
entry that was taken and left no trace is still in its pending ring, and is taken again. If it was ordered, the answer
is DUP_OF.

Written entries stay true: an entry, or an answer, is permanently valid at its index, whatever its writer does next. So
most of them are read before our line is open, while no process waits for us (`Prefetched`). With the line open, reading
continues from there, in the order above. Only this second pass determines where the order ends, and which entries are
settled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import Corrupt, FabricFull
from embarcadero.fabric.layout import (
    ORDER,
    RESULT,
    Entries,
    SequencerLine,
    frontier_offset,
    join,
    pick,
)
from embarcadero.fabric.lines import FrontierReader, RingReader, attach_ring
from embarcadero.fabric.region import (
    Fabric,
    broker_frontiers_region,
    checkpoint_region,
    frontiers_region,
    held_region,
    order_region,
    results_region,
)
from embarcadero.sequencer.leader.brokers import BrokerIncarnations, BrokerProgress, ResultsRead
from embarcadero.sequencer.leader.leadership import InheritedLane, LeaderLanes, Leadership, Upkeep
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import learn_positions, read_checkpoint, replay, restore
from embarcadero.sequencer.order.lane import Lane, valid_from, valid_suffix
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable, Slots, W, read_waiting
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState, Range, Topic

_TRIES_MAX = 4
_REHEARSED_LANES = 4


class Answered(NamedTuple):
    """Answers of a predecessor to one broker: the known pending indices of the answers before `end`."""

    end: int
    pending: npt.NDArray[np.uint64]


_NONE_ANSWERED = Answered(0, np.empty(0, dtype=np.uint64))


class Prefetched:
    """Answers of a predecessor that may still lead, by the name of the results ring."""

    def __init__(self, fabric: Fabric, epoch: int, members: list[Member]) -> None:
        self.epoch = epoch
        self.answered: dict[str, Answered] = {}
        for member in members:
            name = results_region(epoch, member)
            if member.state is MemberState.LIVE and fabric.exists(name):
                ring, start = _results_of(fabric, epoch, member)
                self.answered[name] = read_answered(ring, ring.valid_end(start), _NONE_ANSWERED)


def _results_of(fabric: Fabric, epoch: int, member: Member) -> tuple[RingReader, int]:
    """Attach a broker's results ring. Also returns how far the broker has read it."""
    ring = attach_ring(fabric, results_region(epoch, member), RESULT, "position")
    return ring, ResultsRead(fabric.attach(broker_frontiers_region(member.region_prefix))).load(epoch)


def read_answered(ring: RingReader, end: int, known: Answered) -> Answered:
    """Collect the known answers before `end`: those known earlier, and those still in the ring."""
    start = max(0, end - ring.slots)
    if not known.end <= end:
        known = _NONE_ANSWERED
    later = valid_suffix(ring, max(start, known.end), end)["pending"]
    return Answered(end, np.concatenate([known.pending, later])[-ring.slots :])


class PredecessorState:
    """State of the predecessor: waiting batches in `waiting`, the rest by broker handle."""

    def __init__(
        self,
        fabric: Fabric,
        epoch: int,
        members: list[Member],
        steps: Steps = NO_STEPS,
        prefetched: Prefetched | None = None,
    ) -> None:
        self._fabric, self._epoch, self._steps = fabric, epoch, steps
        self._answered = prefetched.answered if prefetched is not None and prefetched.epoch == epoch else {}
        frontiers = fabric.attach(frontiers_region(epoch))
        self.brokers = {
            member.handle: BrokerProgress(
                FrontierReader(frontiers, frontier_offset(SequencerLine.BROKERS + member.handle)).load()
            )
            for member in members
        }
        steps.at(Step.TAKEOVER_MARKS_READ)
        self.waiting = read_waiting(fabric, held_region(epoch))
        steps.at(Step.TAKEOVER_HELD_READ)
        for member in members:
            self._read_broker(member)
        steps.at(Step.TAKEOVER_ANSWERS_READ)

    def _read_broker(self, member: Member) -> None:
        progress, name = self.brokers[member.handle], results_region(self._epoch, member)
        answered = np.empty(0, dtype=np.uint64)
        if member.state is MemberState.LIVE and self._fabric.exists(name):
            ring, start = _results_of(self._fabric, self._epoch, member)
            end = ring.valid_end(start)
            progress.answers = ring.read(start, end)
            answered = read_answered(ring, end, self._answered.get(name, _NONE_ANSWERED)).pending
        if len(self.waiting):
            ours = self.waiting["origin"] == member.handle
            self.waiting = pick(self.waiting, ~(ours & np.isin(self.waiting["index"], answered)))
        waits = self.waiting["index"][self.waiting["origin"] == member.handle]
        progress.settled = np.union1d(answered[answered >= progress.start], waits[waits >= progress.start])

    def lane(self, topic: Topic, sizes: FabricSizes, buffer: ReorderBuffer, now_us: int) -> InheritedLane | None:
        """Read a lane, and the entries to re-issue. None when the predecessor did not have the lane."""
        name = order_region(self._epoch, topic.lane)
        if not self._fabric.exists(name):
            return None
        for _ in range(_TRIES_MAX):
            found = read_lane(self._fabric, self._epoch, topic, sizes, buffer, now_us)
            if not _goes_on(attach_ring(self._fabric, name, ORDER), found.order.next_index):
                self._steps.at(Step.TAKEOVER_READ)
                return found
        raise Corrupt(f"the order ring of topic {topic.name} has a hole after its checkpoint", "restart the cluster")

    def rest(self, order: LaneOrder, now_us: int) -> Entries | None:
        """Read and replay the entries that were ordered since a lane was read.

        Returns None when the whole lane must be read again.
        """
        ring = attach_ring(self._fabric, order_region(self._epoch, order.topic.lane), ORDER)
        for _ in range(_TRIES_MAX):
            after = _read_on(ring, order.next_index)
            if not _goes_on(ring, order.next_index + len(after)):
                break
        else:
            return None
        replay(order, after, now_us)
        order.settle_in(now_us)
        self._steps.at(Step.TAKEOVER_READ)
        return after


def read_lane(
    fabric: Fabric, epoch: int, topic: Topic, sizes: FabricSizes, buffer: ReorderBuffer, now_us: int
) -> InheritedLane:
    """Read a lane of a predecessor, and the entries to re-issue, as far as they are found."""
    ring = attach_ring(fabric, order_region(epoch, topic.lane), ORDER)
    region, checkpoint = checkpoint_region(epoch, topic.lane), None
    rows = None
    if fabric.exists(region):
        checkpoint = read_checkpoint(fabric, region)
        rows = max(sizes.sessions, fabric.attach(region).shape.slots - 1)
    order = LaneOrder(topic, SessionTable(sizes.sessions, rows), buffer)
    start = 0
    if checkpoint is not None:
        restore(order, checkpoint, now_us)
        start = checkpoint.index
    after = _read_on(ring, start)
    end = start + len(after)
    before = valid_suffix(ring, max(0, min(start, end - ring.slots + sizes.round_entries)), start)
    learn_positions(order, before)
    replay(order, after, now_us)
    order.settle_in(now_us)
    readable = join([before, after])
    return InheritedLane(order, readable[max(0, len(readable) - (ring.slots - sizes.round_entries)) :])


def _read_on(ring: RingReader, start: int) -> Entries:
    """Read the valid entries of a lane from `start`."""
    return valid_from(ring, start)


def _goes_on(ring: RingReader, end: int) -> bool:
    """Whether more was ordered than we found, because the running predecessor reused slots while we read them.

    With our line open the predecessor stops after that round.
    """
    return ring.frontier.load() > end


def rehearse(
    fabric: Fabric, epoch: int, members: list[Member], topics: list[Topic], sizes: FabricSizes, now_us: int
) -> None:
    """Read some lanes as a takeover would, and drop the result, so that code and memory are warm.

    May raise any error of a takeover, because the leader continues meanwhile.
    """
    state, buffer = PredecessorState(fabric, epoch, members), ReorderBuffer(sizes.held_slots)
    for topic in topics[:_REHEARSED_LANES]:
        state.lane(topic, sizes, buffer, now_us)


def readmit(orders: dict[int, LaneOrder], buffer: ReorderBuffer, waiting: Entries, now_us: int) -> Slots:
    """Put waiting batches into the reorder buffer. Returns slots of batches that need not wait and must be decided."""
    slots = buffer.hold(waiting)
    undecided = np.ones(len(slots), dtype=bool)
    for lane in np.unique(waiting["lane"]).tolist():
        order = orders.get(lane)
        if order is None:
            continue
        table, mine = order.table, np.flatnonzero(waiting["lane"] == lane)
        sessions, seqs = (waiting[name][mine].astype(np.int64) for name in ("session", "session_seq"))
        rows = sessions & table.mask
        ahead = seqs - table.expected[rows]
        _, firsts = np.unique(rows * (2 * W) + np.clip(ahead, 0, W), return_index=True)
        waits = (table.live[rows] == sessions) & (ahead > 0) & (ahead < W) & np.isin(np.arange(len(mine)), firsts)
        waits &= table.strong[rows]
        table.hold(rows[waits], seqs[waits], slots[mine[waits]], waiting["crc"][mine[waits]], now_us)
        order.look_for_gaps(now_us)
        undecided[mine[waits]] = False
    return slots[undecided]


class Takeover:
    """Moves state from the predecessor's regions to ours: prefetched while it may still lead, then completed."""

    def __init__(self, leader: Leadership, lanes: LeaderLanes, brokers: BrokerIncarnations, upkeep: Upkeep) -> None:
        self._leader, self._lanes, self._brokers, self._upkeep = leader, lanes, brokers, upkeep
        self._fabric, self._directory, self._steps = leader.fabric, leader.directory, leader.env.steps
        self._prefetched_lanes: dict[int, Lane] = {}  # lanes that our predecessor may still add to
        self._prefetched: Prefetched | None = None

    def prefetch(self) -> None:
        """Read, make and write everything that will not change, before our epoch line is open and processes wait."""
        if not (earlier := self._directory.elections.started_epoch()):
            return
        leader, lanes = self._leader, self._lanes
        members = self._directory.members.all()
        self._prefetched = Prefetched(self._fabric, earlier, members)
        self._brokers.prefetch(members)
        for topic in self._directory.topics.all():
            if lanes.is_ordered_here(topic) and self._fabric.exists(order_region(earlier, topic.lane)):
                found = read_lane(self._fabric, earlier, topic, leader.sizes, lanes.buffer, leader.now_us)
                try:
                    self._prefetched_lanes[topic.lane] = lanes.new_lane(*found)
                except FabricFull:
                    lanes.remove_regions(topic.lane)
                    break  # there may be memory when the lane is needed
            self._upkeep.show_life()
        self._steps.at(Step.TAKEOVER_FORESEEN)

    def begin(self) -> None:
        """Read the rest with our epoch line open, write all of it, and start."""
        leader, lanes = self._leader, self._lanes
        earlier = self._directory.elections.started_epoch()
        self._upkeep.look_at_store()  # note the revision before the values are read
        members = self._directory.members.all()
        state = PredecessorState(self._fabric, earlier, members, self._steps, self._prefetched) if earlier else None
        if state and len(state.waiting) > lanes.buffer.slots:
            lanes.enlarge_buffer(len(state.waiting))
        lanes.recovery.learn_generations()
        topics = {topic.lane: topic for topic in self._directory.topics.all()}
        lanes.ranges.wake_replicas(not earlier)  # no replica follows us before we have started
        for topic in topics.values():
            self._take_lane(topic, state)
            self._upkeep.show_life()
        for number in list(self._prefetched_lanes):
            self._give_up_prefetched(number)  # its topic was deleted
        self._prefetched = None
        self._steps.at(Step.TAKEOVER_REISSUED)
        self._upkeep.learn_topics(topics, members)
        if state:
            orders = {number: lane.order for number, lane in lanes.by_number.items()}
            lanes.take_over_waiting(readmit(orders, lanes.buffer, state.waiting, leader.now_us))
            self._steps.at(Step.TAKEOVER_HELD)
        self._brokers.update(members, state.brokers if state else {})
        self._steps.at(Step.TAKEOVER_ANSWERED)
        self._start(earlier)

    def _start(self, earlier: int) -> None:
        """Record our start in the store, with the ends of the predecessor's order."""
        leader, lanes = self._leader, self._lanes
        ends = {number: lane.order.next_index for number, lane in lanes.by_number.items()}
        if not self._directory.elections.start_epoch(leader.epoch, ends):
            leader.depose()
            return
        self._steps.at(Step.TAKEOVER_DECIDED)
        leader.epochs.start(leader.epoch)
        self._steps.at(Step.TAKEOVER_STARTED)
        leader.ask_store(lanes.recovery.finish)
        leader.env.journal.note(
            "epoch started",
            epoch=leader.epoch,
            after=earlier,
            lanes=len(lanes.by_number),
            brokers=len(self._brokers.sources),
            waiting=lanes.buffer.used,
            recovering=len(lanes.recovery.lanes),
        )
        self._upkeep.begin(earlier)
        self._brokers.wake(list(self._brokers.sources.values()), grown=True)

    # --- lanes --------------------------------------------------------------------------------------------------------
    def _take_lane(self, topic: Topic, state: PredecessorState | None) -> None:
        leader, lanes = self._leader, self._lanes
        if not lanes.is_ordered_here(topic):
            return
        ranges = lanes.ranges_of(topic)
        if state and self._go_on_with(topic, state, ranges):
            return
        inherited = state.lane(topic, leader.sizes, lanes.buffer, leader.now_us) if state else None
        lanes.make(topic, ranges, inherited)

    def _go_on_with(self, topic: Topic, state: PredecessorState, ranges: list[Range]) -> bool:
        """Complete a prefetched lane up to its end. False if there is none, or if it must be read again."""
        lane = self._prefetched_lanes.get(topic.lane)
        if lane is None:
            return False
        entries = state.rest(lane.order, self._leader.now_us) if lane.order.topic == topic else None
        if entries is None or (ranges and lane.order.next_index < ranges[-1].start):
            self._give_up_prefetched(topic.lane)
            return False
        lane.inherit_more(entries)
        del self._prefetched_lanes[topic.lane]
        self._lanes.put(lane, ranges[-1] if ranges else None)
        return True

    def _give_up_prefetched(self, number: int) -> None:
        for name in self._prefetched_lanes.pop(number).regions:
            self._fabric.remove(name)
