"""One leadership: the state that its parts share, the lanes that it writes, and its work between rounds.

`Leadership` is the epoch, its clock, its access to the store, and whether it is over. `LeaderLanes` makes lanes, drops
them and has them recovered. It also has the reorder buffer that lanes share. `Upkeep` follows the store, publishes the
heartbeat, and cleans up.

Garbage collection: the sweeper removes unused regions, of epochs before our predecessor's and of unknown incarnations.
The regions of a role that stopped permanently are removed. But a paused process may make another such region when it
wakes up much later. So the leader checks periodically, beside its rounds. Within one generation of the fabric names are
never reused, so it does not matter when that happens, or which sequencer leads then.

A clean stop: everything ordered gets onto disks, sessions too, and ranges are sealed at their ends. So the next run
finds a sealed last range in each lane and continues at that position, with nothing lost. Every wait is bounded. A lane
that is not complete in time keeps its open range, and the next run recovers it as after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

import numpy as np

from embarcadero.config import DEFAULTS, FabricSizes
from embarcadero.config.table import SequencerKeys as Settings
from embarcadero.env import Env, Journal
from embarcadero.errors import LATER, BadRegion, FabricFull
from embarcadero.fabric.layout import (
    ORDER,
    SEQUENCER_FRONTIERS_BYTES,
    Entries,
    RegionKind,
    SequencerLine,
    frontier_offset,
    pick,
)
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.lines import FrontierWriter
from embarcadero.fabric.region import (
    EPOCHS_REGION,
    Fabric,
    Shape,
    checkpoint_region,
    epoch_of,
    frontiers_region,
    held_region,
    is_incarnation,
    is_replica,
    order_region,
    writer_of,
)
from embarcadero.limits import DRAIN_CHECKPOINT_S_MAX, DRAIN_DURABLE_S_MAX, HEARTBEAT_S
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.placement.store import rested_us
from embarcadero.sequencer.leader.brokers import BrokerIncarnations
from embarcadero.sequencer.order.batches import Decisions, FenceReason, LaneOrder, LaneTerms
from embarcadero.sequencer.order.lane import Lane, LedEpoch, detach_broker, fence
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable, Slots, create_reorder_region
from embarcadero.sequencer.ranges.keeper import RangeKeeper, SequencerCounters
from embarcadero.sequencer.ranges.recovery import BrokerRanges, Recovered, Recovery
from embarcadero.sequencer.ranges.recovery_sources import Mirrors
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState, Order, Outcome, Range, RangeKey, ReplicaState, Topic

_STORE_QUIET_US: Final = 60_000_000
"""The journal reports a failure of the store only after this time without one."""

T = TypeVar("T")


class ClusterParts(NamedTuple):
    """Parts that all sequencers of a cluster share: its memory, its store, and the mirrors of lost memory."""

    fabric: Fabric
    directory: Directory
    sizes: FabricSizes
    mirrors: Mirrors | None = None


class Leadership:
    """One epoch that this process leads, or is about to lead. `deposed` is set when a later epoch has begun."""

    def __init__(
        self, env: Env, cluster: ClusterParts, settings: Settings = DEFAULTS.sequencer, epoch: int | None = None
    ) -> None:
        """Take `epoch`, which was won in an election; without it, the next epoch, whichever sequencer leads."""
        fabric, directory = cluster.fabric, cluster.directory
        self.env, self.fabric, self.directory = env, fabric, directory
        self.sizes, self.settings = cluster.sizes, settings
        self.deposed = False
        self.problems: list[str] = []  # of rings, for the log
        self.counters = SequencerCounters()
        self.epochs = EpochTable(fabric, fabric.attach(EPOCHS_REGION, writable=True))
        if epoch is None:
            last = directory.elections.started_epoch()
            epoch = directory.elections.next_epoch(last if self.epochs.superseded(last) else None)
        self.epoch = epoch
        env.steps.at(Step.TAKEOVER_EPOCH_GIVEN)
        if epoch > directory.elections.started_epoch() + 1:
            self.epochs.open(epoch)  # earlier winners never started; if we fail too, more epochs may follow
        frontiers = fabric.create(
            frontiers_region(epoch), Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self.led = LedEpoch(env, fabric, epoch, cluster.sizes, frontiers)
        self.now_us, self.wall_us = env.clock.now_us(), env.clock.wall_us()
        self.began_us = self.now_us
        self._store_us = self.now_us - _STORE_QUIET_US  # the store has failed, and is not asked before this time

    def tick(self) -> None:
        """Read the clock. Everything until the next tick uses this time."""
        self.now_us, self.wall_us = self.env.clock.now_us(), self.env.clock.wall_us()

    def tick_monotonic(self) -> None:
        """Read the monotonic clock only, for timeouts: no entry is written meanwhile."""
        self.now_us = self.env.clock.now_us()

    # --- the end ------------------------------------------------------------------------------------------------------
    def is_over(self) -> bool:
        """Whether a later epoch is open: then this leadership must not act any more."""
        if self.deposed or self.epochs.superseded(self.epoch):
            self.deposed = True
        return self.deposed

    def depose(self) -> None:
        """End the leadership: the store has handed out a later epoch."""
        self.deposed = True

    def unless_deposed(self, part: Callable[[], T], otherwise: T) -> T:
        """Run a part. If a successor has removed a region that it needs, we are deposed; that is no error."""
        try:
            return part()
        except BadRegion:
            if not self.epochs.superseded(self.epoch):
                raise
            self.deposed = True
            return otherwise

    # --- the store ----------------------------------------------------------------------------------------------------
    def ask_store(self, part: Callable[[], object]) -> bool:
        """Run a part that needs the store. False if the store fails, or has just failed: retry later; ordering goes on.

        Each part can be repeated after a failure.
        """
        if self.store_is_failing:
            return False
        began_us = self.env.clock.now_us()
        try:
            part()
        except LATER as error:
            now_us = self.env.clock.now_us()
            if now_us - self._store_us >= _STORE_QUIET_US:
                self.env.journal.warn("store fails", reason=error.message, then="seals, new topics and cleanup wait")
            self._store_us = rested_us(began_us, now_us)
            return False
        return True

    @property
    def store_is_failing(self) -> bool:
        """Whether the store has just failed, and is not asked for a while."""
        return self.now_us < self._store_us


# --- lanes ------------------------------------------------------------------------------------------------------------
_ORDERED: Final = (Order.TOTAL, Order.STRONG)


class InheritedLane(NamedTuple):
    """The state of a predecessor's lane: its order, and the entries to re-issue."""

    order: LaneOrder
    entries: Entries


class LeaderLanes:
    """All lanes that this leader writes, by number; batches of any of them may wait in the reorder buffer."""

    def __init__(self, leader: Leadership, mirrors: Mirrors | None) -> None:
        self._leader = leader
        sizes = leader.sizes
        self.by_number: dict[int, Lane] = {}
        self.without_memory: set[int] = set()  # lanes for which the fabric has no memory left
        self._reported_full = False
        self.refused = Decisions()  # answers to entries of missing lanes
        self.backlog: Slots = np.empty(0, dtype=np.int64)  # taken-over batches that the first round decides on
        self.buffer = ReorderBuffer(min(sizes.held_slots, sizes.order_slots - 2 * sizes.round_entries))
        self._reorder_region = create_reorder_region(leader.fabric, held_region(leader.epoch), self.buffer.slots)
        self._terms = LaneTerms(
            self._free_slots,
            leader.env.journal,
            leader.settings.sessions_per_peer_share,
            leader.settings.departed_gap_timeout_ms,
        )
        self.ranges = RangeKeeper(leader.led, leader.directory, leader.counters, leader.now_us)
        self.recovery = Recovery(leader.led, leader.directory, self.ranges, self, mirrors)

    @property
    def sessions(self) -> int:
        """The maximum number of sessions of a lane."""
        return self._leader.sizes.sessions

    # --- making -------------------------------------------------------------------------------------------------------
    def is_ordered_here(self, topic: Topic) -> bool:
        """Whether sequencers order this topic; brokers order the others."""
        return topic.order in _ORDERED

    def ranges_of(self, topic: Topic) -> list[Range]:
        """The ranges of a topic that has replicas."""
        return self._leader.directory.ranges.all(topic.lane) if topic.replicas else []

    def add(self, topic: Topic) -> None:
        """Add the lane of a new topic. While the fabric has no memory for it, only its publishers wait."""
        if not self.is_ordered_here(topic):
            return
        try:
            self.make(topic, self.ranges_of(topic), None)
        except FabricFull as error:
            self._report_full(topic, error)
            self.without_memory.add(topic.lane)

    def make(self, topic: Topic, ranges: list[Range], inherited: InheritedLane | None) -> None:
        """Make a lane, or have it recovered; `inherited` is its state from a predecessor."""
        if ranges and (inherited is None or inherited.order.next_index < ranges[-1].start):
            # All of it is only on disk, or it is new and no sequencer has begun it. Recovery distinguishes the two.
            self.recovery.add(topic, ranges, None, self._leader.now_us)
            return
        order, entries = (self.new_order(topic), None) if inherited is None else inherited
        self.put(self.new_lane(order, entries), ranges[-1] if ranges else None)

    def new_order(self, topic: Topic) -> LaneOrder:
        """Make the order of an empty lane."""
        return LaneOrder(topic, SessionTable(self.sessions), self.buffer)

    def new_lane(self, order: LaneOrder, entries: Entries | None) -> Lane:
        """Make a lane's regions, and re-issue the entries that readers may still need."""
        lane = Lane(self._leader.led, order, self._terms)
        if entries is not None:
            lane.inherit(entries, self._leader.now_us)
        return lane

    def put(self, lane: Lane, range_: Range | None) -> Lane:
        """Start ordering batches of this lane."""
        topic = lane.order.topic
        number = topic.lane
        self.by_number[number] = lane
        if range_ is not None:
            self.ranges.keep(range_, topic, lane)
            lane.limit(partial(self.ranges.durable, number))
            if not self._leader.ask_store(partial(self._learn_ceiling, lane)):
                self.ranges.grew(number)  # the next look tries again
        return lane

    def _learn_ceiling(self, lane: Lane) -> None:
        self.ranges.learn_ceiling(lane)
        self.ranges.reserve(lane)

    def begin_recovered(self, found: Recovered) -> bool:
        """Begin a lane that was recovered from disk. False if the fabric has no memory for it now."""
        leader = self._leader
        try:
            lane = self.put(self.new_lane(found.order, np.empty(0, dtype=ORDER)), found.range_)
        except FabricFull as error:
            self._report_full(found.order.topic, error)
            return False
        lane.report_fences(found.fenced)
        leader.counters.recovered += 1
        leader.counters.recovery_us = leader.now_us - leader.began_us
        return True

    def _report_full(self, topic: Topic, error: FabricFull) -> None:
        self.remove_regions(topic.lane)
        if not self._reported_full:
            self._leader.env.journal.warn("topic waits", topic=topic.name, reason=error.message)
        self._reported_full = True

    def remove_regions(self, number: int) -> None:
        """Remove the regions of a lane that were made before the fabric was full."""
        for name in (order_region(self._leader.epoch, number), checkpoint_region(self._leader.epoch, number)):
            self._leader.fabric.remove(name)

    # --- dropping -----------------------------------------------------------------------------------------------------
    def drop(self, number: int) -> None:
        """Drop a lane whose topic was deleted."""
        lane = self.by_number.pop(number)
        self.ranges.drop(number)
        slots = self.buffer.of_lane(number)
        self.refused.answers += lane.order.out.take_answers()
        self.refused.answer_all(pick(self.buffer.entries, slots), Outcome.UNKNOWN_TOPIC)
        self.buffer.release(slots)
        self.backlog = self.backlog[~np.isin(self.backlog, slots)]  # a slot is released only once
        for name in lane.regions:
            self._leader.fabric.remove(name)
        lane.close()

    # --- the reorder buffer -------------------------------------------------------------------------------------------
    def enlarge_buffer(self, slots: int) -> None:
        """Make the reorder buffer this large. It must be empty."""
        self._leader.fabric.remove(held_region(self._leader.epoch))
        self.buffer.resize(slots)
        self._reorder_region = create_reorder_region(self._leader.fabric, held_region(self._leader.epoch), slots)

    def take_over_waiting(self, undecided: Slots) -> None:
        """Keep a predecessor's waiting batches, which are in the buffer; the first round decides the given slots."""
        self.backlog = undecided
        self.write_buffer()

    def release_backlog(self) -> None:
        """Release the slots of the backlog, whose batches have their outcome."""
        if len(self.backlog):
            self.buffer.release(self.backlog)
            self.backlog = self.backlog[:0]

    def write_buffer(self) -> Slots:
        """Copy new waiting batches to the fabric. Returns the slots that the caller must clear."""
        taken, freed = self.buffer.take_dirty()
        if len(taken):
            self._reorder_region.write(taken, pick(self.buffer.entries, taken))
            self._leader.env.steps.at(Step.ROUND_HELD)
        return freed

    def clear_slots(self, freed: Slots) -> None:
        """Clear slots of batches that wait no longer. Their outcomes must be flushed."""
        self._reorder_region.zero(freed)

    def _free_slots(self, count: int) -> None:
        """Fence the sessions with the oldest gaps, of any lane, until the reorder buffer has `count` free slots."""
        while self.buffer.free < count:
            may_fence = [lane.order for lane in self.by_number.values() if lane.can_fence]
            waiting = [order for order in may_fence if order.table.waiting.total]
            if not waiting:
                return
            oldest = min(waiting, key=lambda order: order.table.waiting.oldest_us)
            fence(oldest, oldest.table.waiting.oldest(), self._leader.now_us, FenceReason.OVERFLOW)


# --- between rounds ---------------------------------------------------------------------------------------------------
_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)
_FIRST_US: Final = 300_000
"""Delay of the first sweep. After a takeover publishers come first; earlier epochs keep their memory until then."""
_EVERY_US: Final = 2_000_000


class Sweeper:
    """Garbage collector of unused regions. Call `look` often; it acts when it is due."""

    def __init__(self, leader: Leadership, earlier: int) -> None:
        """Sweep epochs before ours, except `earlier`: readers may still need our predecessor's regions."""
        self._fabric, self._directory = leader.fabric, leader.directory
        self._workers, self._steps = leader.env.workers, leader.env.steps
        self._epoch, self._earlier = leader.epoch, earlier
        self._due_us = leader.now_us + _FIRST_US
        self._names: list[str] | None = None  # regions found by the last look, until they are checked
        self._busy = False

    def look(self, now_us: int) -> None:
        """List regions; check those listed before, and remove the unused ones. Asks the store."""
        if now_us >= self._due_us and not self._busy:
            self._due_us = now_us + _EVERY_US
            self._beside(self._fabric.names, self._seen)
        if self._names is not None:
            unused = self._unused(self._names)
            self._names = None
            self._beside(lambda: self._remove(unused), lambda _: self._steps.at(Step.TAKEOVER_SWEPT))

    def _beside(self, job: Callable[[], object], done: Callable[[object], None]) -> None:
        self._busy = True

        def ended(result: object) -> None:
            self._busy = False
            done(result)

        self._workers.run(job, ended)

    def _seen(self, names: object) -> None:
        if isinstance(names, list):
            self._names = names

    def _unused(self, names: list[str]) -> list[str]:
        """Select the unused regions.

        A role is in the store before its regions are made. So the store is read after the names were listed.
        """
        members, replicas = self._directory.members.all(), self._directory.replicas.all()
        prefixes = {member.region_prefix for member in members} | {member.ref.region_prefix for member in replicas}
        unused = [name for name in names if self._is_unused(writer_of(name), prefixes)]
        if any(is_replica(name) for name in unused):  # the lines of an open range's replicas count, members or not
            open_ = [range_ for range_ in self._directory.ranges.all() if range_.open]
            named = {ref.region_prefix for range_ in open_ for ref in range_.replicas}
            unused = [name for name in unused if writer_of(name) not in named]
        return unused if self._directory.elections.generation_holds() else []

    def _is_unused(self, owner: str, prefixes: set[str]) -> bool:
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
    """Ends a leadership that was asked to stop. Nothing is ordered any more."""

    def __init__(self, lanes: Mapping[int, Lane], keeper: RangeKeeper, journal: Journal, now_us: int) -> None:
        self._all_lanes, self._keeper, self._journal = lanes, keeper, journal
        self._until_us = now_us + _DURABLE_US
        self._unsaved: set[int] | None = None  # lanes whose checkpoint is not on any disk yet

    def step(self, now_us: int) -> bool:
        """Do one step. True when everything is done that can be done."""
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
        return {number: lane for number, lane in self._all_lanes.items() if number in self._keeper.lanes}

    def _all_durable(self) -> bool:
        """Whether all lanes are durable to their ends. Closed lanes of brokers must also be sealed, and so dropped."""
        return all(
            self._keeper.durable(number) >= lane_range.ordered()
            and (lane_range.broker_lane is None or lane_range.broker_lane.open)
            for number, lane_range in self._keeper.lanes.items()
        )

    def _save(self, now_us: int) -> set[int]:
        """Write the last checkpoints of durable lanes. Returns the lanes to wait for."""
        durable = {n for n, lane in self._lanes.items() if self._keeper.durable(n) >= lane.order.next_index}
        for number in durable:
            self._lanes[number].save(now_us)
        return {number for number in durable if self._lanes[number].order.table.used}

    def _is_saved(self, number: int) -> bool:
        """Whether a replica has the checkpoint on disk, by the second value of its durable line."""
        lane_range = self._keeper.lanes.get(number)
        if lane_range is None or lane_range.lane is None:
            return True
        tables = [self._keeper.lines.of(ref) for ref in lane_range.range_.replicas]
        key, end = RangeKey(number, lane_range.range_.number), lane_range.lane.order.next_index
        return any(table is not None and table.load(key, _CHECKPOINT) == end for table in tables)

    def _seal(self) -> None:
        """Seal the ranges that are durable to their ends."""
        for number, lane in self._lanes.items():
            lane_range, order = self._keeper.lanes[number], lane.order
            if lane_range.range_.open and self._keeper.durable(number) >= order.next_index:
                self._keeper.seal_last(lane_range, order.next_index, order.next_seq)
        still_open = sorted(
            number
            for number, lane_range in self._keeper.lanes.items()
            if lane_range.range_.open and self._keeper.durable(number) < lane_range.ordered()
        )
        if still_open:
            self._journal.warn("ranges left open", lanes=still_open, why="some of their records are not durable")


class Upkeep:
    """Follows the store, publishes the heartbeat, closes brokers, and runs a clean stop."""

    def __init__(self, leader: Leadership, lanes: LeaderLanes, brokers: BrokerIncarnations) -> None:
        self._leader, self._lanes, self._brokers = leader, lanes, brokers
        self._heartbeat = FrontierWriter(leader.led.frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._awake = FrontierWriter(leader.led.frontiers, frontier_offset(SequencerLine.AWAKE))
        self._broker_ranges = BrokerRanges(leader.fabric, leader.directory, lanes.ranges, lanes.recovery)
        self._beat_us = 0
        self._watch = StoreWatch(leader.directory)
        self._all_on_disk = False  # every topic has replicas
        self._cleanups: dict[int, dict[int, int]] = {}  # dead broker's handle -> lane -> end of its batches
        self._unseen = False  # replicas were not woken yet in this leadership
        self._sweeper: Sweeper | None = None
        self._drain: Drain | None = None

    # --- beginning ----------------------------------------------------------------------------------------------------
    def look_at_store(self) -> None:
        """Note the store's revision. Values that are read from here on are at least as new."""
        self._watch.look()
        self._watch.done()  # if reading fails, the leadership ends

    def learn_topics(self, topics: dict[int, Topic], members: list[Member]) -> None:
        """Manage the ranges of brokers' lanes."""
        self._all_on_disk = _are_on_disk(topics)
        self._broker_ranges.update(topics, members, self._leader.now_us)

    def begin(self, earlier: int) -> None:
        """Begin the upkeep of an epoch that has started after epoch `earlier`: sweep, and wake replicas soon."""
        self._sweeper = Sweeper(self._leader, earlier)
        self._unseen = earlier > 0

    def be_seen(self) -> None:
        """Wake all replicas after the first round, for acks that wait for disks. Other answers go first."""
        if self._unseen:
            self._leader.ask_store(self._wake_replicas)

    def _wake_replicas(self) -> None:
        members = self._leader.directory.replicas.all()
        self._unseen = False
        self._lanes.ranges.wake_replicas(True)
        for member in members:
            if member.state is not ReplicaState.DEAD:
                self._leader.env.bell.ring(member.ref.region_prefix)

    # --- showing life -------------------------------------------------------------------------------------------------
    def show_life(self) -> None:
        """Keep the heartbeat going while many lanes are loaded."""
        leader = self._leader
        if leader.env.clock.now_us() >= max(self._beat_us, leader.began_us + _BEAT_US):
            leader.tick_monotonic()
            self.beat()

    def beat(self) -> None:
        """Publish a heartbeat if it is time, and check the heartbeats of brokers."""
        now_us = self._leader.now_us
        if now_us >= self._beat_us:
            self._beat_us = now_us + _BEAT_US
            self._heartbeat.advance(self._heartbeat.value + 1)
            self._leader.ask_store(self._close_silent)
            if self._sweeper is not None:
                self._leader.ask_store(partial(self._sweeper.look, now_us))

    def awake(self, now: bool) -> bool:
        """Publish whether we look without a ring. True if that changed; after a change to no, look before sleeping."""
        if bool(self._awake.value) == now:
            return False
        self._awake.restart(int(now))
        self._leader.fabric.fence()
        return True

    def _close_silent(self) -> None:
        for member in self._brokers.look(self._leader.now_us):
            self._leader.env.journal.warn("broker silent", broker=member.region_prefix, then="the sequencer closes it")

    # --- following the store ------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Read changes of topics and brokers from the store."""
        directory, brokers = self._leader.directory, self._brokers
        change = self._watch.look()
        if change is StoreChange.NOTHING and not brokers.awaited:
            return
        self._watch.reread()  # if the store fails from here on
        if change is StoreChange.EVERYTHING:
            self._follow_topics({topic.lane: topic for topic in directory.topics.all()})
        brokers.update(brokers.members, {})
        if not self._lanes.without_memory:  # otherwise look again soon
            self._watch.done()
        while brokers.problems:
            self._leader.problems.append(brokers.problems.pop())

    def _follow_topics(self, topics: dict[int, Topic]) -> None:
        lanes = self._lanes
        for number in lanes.by_number.keys() - topics.keys():
            lanes.drop(number)
        lanes.without_memory.clear()
        for number, topic in topics.items():
            if number in lanes.recovery.lanes:
                lanes.recovery.lanes[number].follow(topic)
            elif number not in lanes.by_number:
                lanes.add(topic)
            elif topic != lanes.by_number[number].order.topic:
                lanes.by_number[number].order.alter(topic)
                if number in lanes.ranges.lanes:
                    lanes.ranges.follow(number, topic)
        self._brokers.learn(self._leader.directory.members.all())
        self.learn_topics(topics, self._brokers.members)

    def meet_new_topic(self) -> None:
        """Read the store for the topic of an unknown lane, which may be new."""
        self.refresh()
        self._lanes.recovery.step(self._leader.now_us)  # a new lane begins immediately

    def look_after_ranges(self) -> None:
        """Do the seals, reservations and recoveries that are due."""
        self._lanes.ranges.look(self._leader.now_us)
        if self._lanes.recovery.lanes:
            self._lanes.recovery.step(self._leader.now_us)

    # --- closed brokers -----------------------------------------------------------------------------------------------
    def finish_closing(self) -> None:
        """Detach the sessions of closing brokers whose entries were all taken, and clean up after earlier ones."""
        for source in self._brokers.take_drained():
            if source.member.state is MemberState.LIVE:  # otherwise an earlier sequencer has closed it
                self._leader.counters.brokers_closed += 1
                self._leader.env.journal.warn("broker closed", broker=source.member.region_prefix)
            for lane in self._lanes.by_number.values():
                detach_broker(lane.order, source.member.handle, self._leader.now_us)
        self._leader.ask_store(self._clean_up)

    def _clean_up(self) -> None:
        self._brokers.remove_stale_rings()
        self._brokers.clean_up(self._lanes.buffer.by_origin, self._is_on_disk, keeps=not self._all_on_disk)

    def _is_on_disk(self, member: Member) -> bool:
        """Whether all required payloads of a dead broker are on disks. None of its batches waits."""
        lanes, ranges = self._lanes.by_number, self._lanes.ranges
        owner = (member.broker, member.incarnation)
        for lane_range in ranges.lanes.values():
            if (
                lane_range.broker_lane is not None
                and (lane_range.broker_lane.broker, lane_range.broker_lane.incarnation) == owner
            ):
                return False
        ends = self._cleanups.get(member.handle)
        if ends is None:
            ends = {number: lane.order.next_index for number, lane in lanes.items() if lane.capacity is not None}
            self._cleanups[member.handle] = ends
        if any(number in lanes and ranges.durable(number) < end for number, end in ends.items()):
            return False
        del self._cleanups[member.handle]
        return True

    # --- the end ------------------------------------------------------------------------------------------------------
    def drain(self) -> bool:
        """Do one step towards a clean stop: nothing more is ordered. True when this leadership may end."""
        leader, ranges = self._leader, self._lanes.ranges
        leader.tick()
        if self._drain is None:
            self._drain = Drain(self._lanes.by_number, ranges, leader.env.journal, leader.now_us)
        return leader.unless_deposed(partial(self._step_drain, self._drain), True)

    def _step_drain(self, drain: Drain) -> bool:
        leader = self._leader
        leader.ask_store(self.refresh)
        self.beat()
        leader.ask_store(partial(self._lanes.ranges.look, leader.now_us))
        return drain.step(leader.now_us)


def _are_on_disk(topics: dict[int, Topic]) -> bool:
    """Whether every topic has replicas. If so, readers do not need the logs of dead brokers."""
    return bool(topics) and all(topic.replicas for topic in topics.values())
