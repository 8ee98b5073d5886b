"""The sequencer: one reign over all lanes.

Each round takes published entries of all brokers, orders them lane by lane, and writes, in this order: order entries,
answers, frontiers, waiting batches, read-through marks; then it clears the slots of batches that wait no longer. Each
kind is flushed before the next is written, so at any crash a successor finds every entry in one of these places.
A round begins with the question whether a later epoch is open; if so, this reign is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from embarcadero.config import DEFAULTS, FabricSizes
from embarcadero.config.table import Sequencer as Settings
from embarcadero.env import NO_STEPS, Clock, Disk, Doorbell, Inline, Journal, SilentJournal, Steps, Workers
from embarcadero.errors import LATER, BadRegion, FabricFull
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.layout import (
    ORDER,
    SEQUENCER_FRONTIERS_BYTES,
    Entries,
    RegionKind,
    SequencerLine,
    every,
    frontier_offset,
    join,
    pick,
)
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.names import (
    EPOCHS_REGION,
    checkpoint_region,
    epoch_folder,
    frontiers_region,
    held_region,
    order_region,
    writer_of,
)
from embarcadero.fabric.region import Fabric, Shape
from embarcadero.limits import HEARTBEAT_S
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import NOT_SEEN, rested_us
from embarcadero.sequencer.leader.brokers import Brokers, Source, take_plain
from embarcadero.sequencer.leader.takeover import Foreseen, Legacy, read_lane, readmit
from embarcadero.sequencer.leader.upkeep import Drain, Sweeper
from embarcadero.sequencer.order.batches import Decisions, LaneOrder, is_batch, result_line
from embarcadero.sequencer.order.control import detach_broker, fence
from embarcadero.sequencer.order.lane import Lane, Room
from embarcadero.sequencer.order.reorder import HeldSlots, Slots, create_held
from embarcadero.sequencer.order.sessions import NEVER, SessionTable
from embarcadero.sequencer.ranges.keeper import RangeKeeper, SequencerCounters
from embarcadero.sequencer.ranges.recovery import BrokerRanges, Recovered, Recovery
from embarcadero.sequencer.ranges.recovery_sources import DiskSource, Mirrors, RecoverySource
from embarcadero.steps import Step
from embarcadero.types import (
    BATCH_KIND,
    Member,
    MemberState,
    Order,
    Outcome,
    Range,
    ReplicaMember,
    ReplicaState,
    Topic,
)

_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)
_ORDERED: Final = (Order.TOTAL, Order.STRONG)
_LOOK_US: Final = 2_000
"""Looking whether the store has changed is cheap, but not as cheap as an empty round."""
_STORE_TOLD_US: Final = 60_000_000
"""Failures of the store that follow each other more closely are one to the journal."""
_LOOK_LONE_US: Final = 10_000
"""While batches come one by one, somebody waits for each, and for the processor that we would use."""


def _depth(entries: Entries) -> int:
    """How many batches each of these publishers has in flight, at least; 0 if a request waits for its answer."""
    if (entries["kind"] != BATCH_KIND).any():
        return 0
    return int((entries["session_seq"] - entries["low"]).min())


class Sequencer:
    """The sequencer of one epoch. `deposed` is set when a later one has begun."""

    def __init__(
        self,
        fabric: Fabric,
        directory: Directory,
        clock: Clock,
        bell: Doorbell,
        sizes: FabricSizes,
        journal: Journal | None = None,
        settings: Settings = DEFAULTS.sequencer,
        disks: Callable[[ReplicaMember], Disk] | None = None,
        workers: Workers | None = None,
        epoch: int | None = None,
        steps: Steps | None = None,
        mirrors: Mirrors | None = None,
        begins: bool = True,
    ) -> None:
        """`epoch`: one that was won in an election; without, it takes the next one, whoever reigns.

        `begins`: at once; else it is ready, and `begin` is called before anything else.
        """
        self.settings, self._steps, self._mirrors = settings, steps or NO_STEPS, mirrors
        self._past: RecoverySource = DiskSource(lambda: self.ranges.replicas.members, disks)
        self._workers = workers or Inline()
        self._fabric, self._directory, self._clock, self._bell, self._sizes = fabric, directory, clock, bell, sizes
        self.deposed = False
        self.more = False  # the last round left published entries behind, for the next one
        self.depth = 0  # how many batches every publisher heard in the last round had in flight, at least
        self.problems: list[str] = []
        self.journal = journal or SilentJournal()
        self.counters = SequencerCounters()
        self.roomless: set[int] = set()  # lanes for which the fabric has no room
        self._told_full = False
        self.lanes: dict[int, Lane] = {}
        self._early: dict[int, Lane] = {}  # lanes that our predecessor may still add to
        self._epochs = EpochTable(fabric, fabric.attach(EPOCHS_REGION, writable=True))
        if epoch is None:
            last = directory.started_epoch()
            epoch = directory.next_epoch(last if self._epochs.superseded(last) else None)
        self.epoch = epoch
        self._steps.at(Step.TAKEOVER_EPOCH_GIVEN)
        if epoch > directory.started_epoch() + 1:
            self._epochs.open(epoch)  # others came before us and never started: if we end like them, more may follow
        self._frontiers = fabric.create(
            frontiers_region(self.epoch), Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self._heartbeat = FrontierWriter(self._frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._awake = FrontierWriter(self._frontiers, frontier_offset(SequencerLine.AWAKE))
        self._beat_us = 0
        self._now_us, self._wall_us = clock.now_us(), clock.wall_us()
        self._store_us = self._now_us - _STORE_TOLD_US  # until then the store is not asked: it has failed
        self._refused = Decisions()
        self._backlog: Slots = np.empty(0, dtype=np.int64)
        self._revision, self._outline = -1, NOT_SEEN  # of the store, as of the last look
        self._look_us = 0  # when to look into the store next
        self._all_on_disk = False  # every topic has replicas
        self._burials: dict[int, dict[int, int]] = {}  # dead broker's handle -> lane -> where its batches end
        self._drain: Drain | None = None
        self._began_us = self._now_us
        self._unseen = False  # replicas were not told yet that we reign
        self._sweeper: Sweeper | None = None
        self.brokers = Brokers(fabric, self.epoch, sizes, self._frontiers, directory, self._steps)
        self._foreseen: Foreseen | None = None
        self._unless_past(self._foresee)
        if begins:
            self.begin()

    @property
    def held(self) -> HeldSlots:
        """Batches that wait for a gap to close, of all lanes."""
        return self._held

    # --- beginning ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Take over: from the moment that our epoch line is open others wait until we have started."""
        if not self.deposed:
            self._now_us, self._wall_us = self._clock.now_us(), self._clock.wall_us()
            self._epochs.open(self.epoch)
            self._steps.at(Step.TAKEOVER_EPOCH_OPEN)
            self._unless_past(self._begin)

    def _unless_past(self, part: Callable[[], None]) -> None:
        try:
            part()
        except BadRegion:
            if not self._epochs.superseded(self.epoch):
                raise
            self.deposed = True  # our predecessor's regions are gone because others went past us

    def _foresee(self) -> None:
        """Before our epoch line is open: read, make and write what will not change, while nobody waits for us."""
        self._make_held(min(self._sizes.held_slots, self._sizes.order_slots - 2 * self._sizes.round_entries))
        self.ranges = RangeKeeper(
            self._fabric, self._directory, self._bell, self.epoch, self._now_us, self.journal, self.counters,
            self._steps,
        )  # fmt: skip
        if not (earlier := self._directory.started_epoch()):
            return
        members = self._directory.members()
        self._foreseen = Foreseen(self._fabric, earlier, members)
        self.brokers.foresee(members)
        for topic in self._directory.topics():
            if topic.order in _ORDERED and self._fabric.exists(order_region(earlier, topic.lane)):
                found = read_lane(self._fabric, earlier, topic, self._sizes, self._held, self._now_us)
                try:
                    self._early[topic.lane] = self._new_lane(*found)
                except FabricFull:
                    self._remove_lane(topic.lane)
                    break  # when it is needed there may be room
            self._show_life()
        self._steps.at(Step.TAKEOVER_FORESEEN)

    def _make_held(self, slots: int) -> None:
        self._held, self._held_region = HeldSlots(slots), create_held(self._fabric, held_region(self.epoch), slots)

    def _show_life(self) -> None:
        """Many lanes take a while: others see that somebody works."""
        if self._clock.now_us() >= max(self._beat_us, self._began_us + _BEAT_US):
            self._now_us = self._clock.now_us()
            self._beat()

    def _begin(self) -> None:
        earlier = self._directory.started_epoch()
        self._revision, self._outline = self._directory.revision(), self._directory.outline()  # then the values
        members = self._directory.members()
        legacy = Legacy(self._fabric, earlier, members, self._steps, self._foreseen) if earlier else None
        if legacy and len(legacy.waiting) > self._held.slots:
            self._fabric.remove(held_region(self.epoch))
            self._make_held(len(legacy.waiting))
        self.recovery = Recovery(
            self._directory, self.epoch, self.ranges, self._past, self._workers, self.journal, self._held,
            self._sizes.sessions, self._new_order, self._begin_recovered, self._steps, self._mirrors,
        )  # fmt: skip
        self.broker_ranges = BrokerRanges(self._fabric, self._directory, self.ranges, self.recovery)
        topics = {topic.lane: topic for topic in self._directory.topics()}
        self.ranges.rings = not earlier  # nobody follows us before we have started
        for topic in topics.values():
            self._make_lane(topic, legacy)
            self._show_life()
        for number in list(self._early):
            self._give_up_early(number)  # its topic is gone
        self._foreseen = None
        self._steps.at(Step.TAKEOVER_REISSUED)
        self._all_on_disk = _are_on_disk(topics)
        self.broker_ranges.update(topics, members, self._now_us)
        if legacy:
            orders = {number: lane.order for number, lane in self.lanes.items()}
            self._backlog = readmit(orders, self._held, legacy.waiting, self._now_us)
            self._write_held()
            self._steps.at(Step.TAKEOVER_HELD)
        self.brokers.update(members, legacy.brokers if legacy else {})
        self._steps.at(Step.TAKEOVER_ANSWERED)
        ends = {number: lane.order.next_index for number, lane in self.lanes.items()}
        if not self._directory.start_epoch(self.epoch, ends):
            self.deposed = True
            return
        self._steps.at(Step.TAKEOVER_DECIDED)
        self._epochs.start(self.epoch)
        self._steps.at(Step.TAKEOVER_STARTED)
        self._ask_store(self.recovery.finish)
        self.journal.note(
            "epoch started", epoch=self.epoch, after=earlier, lanes=len(self.lanes), brokers=len(self.brokers.sources),
            waiting=self._held.used, recovering=len(self.recovery.lanes),
        )  # fmt: skip
        self._sweeper = Sweeper(
            self._fabric, self._directory, self._workers, self._steps, self.epoch, earlier, self._now_us
        )  # fmt: skip
        self._ring_bells(list(self.brokers.sources.values()), grown=True)
        self._unseen = earlier > 0

    def _be_seen(self) -> None:
        """Wake all replicas, for acks that wait for disks; whoever waits for an answer alone goes first."""
        members = self._directory.replicas()
        self._unseen = False
        self.ranges.rings = True
        for member in members:
            if member.state is not ReplicaState.DEAD:
                self._bell.ring(member.ref.region_prefix)

    def _new_order(self, topic: Topic) -> LaneOrder:
        return LaneOrder(topic, SessionTable(self._sizes.sessions), self._held)

    def _make_lane(self, topic: Topic, legacy: Legacy | None = None) -> None:
        if topic.order not in _ORDERED:
            return
        ranges = self._directory.ranges(topic.lane) if topic.replicas else []
        if legacy and self._go_on_with(topic, legacy, ranges):
            return
        inherited = legacy.lane(topic, self._sizes, self._held, self._now_us) if legacy else None
        if ranges and (inherited is None or inherited[0].next_index < ranges[-1].start):
            # Either its past is on disk only, or it is new and nobody has begun it; recovery knows.
            self.recovery.add(topic, ranges, None, self._now_us)
            return
        order, entries = (self._new_order(topic), None) if inherited is None else inherited
        self._put_lane(self._new_lane(order, entries), ranges[-1] if ranges else None)

    def _go_on_with(self, topic: Topic, legacy: Legacy, ranges: list[Range]) -> bool:
        """Bring a lane that was foreseen up to its end; False if there is none, or if it has to be read again."""
        lane = self._early.get(topic.lane)
        if lane is None:
            return False
        entries = legacy.rest(lane.order, self._now_us) if lane.order.topic == topic else None
        if entries is None or (ranges and lane.order.next_index < ranges[-1].start):
            self._give_up_early(topic.lane)
            return False
        lane.order.held = self._held
        lane.inherit_more(entries)
        del self._early[topic.lane]
        self._put_lane(lane, ranges[-1] if ranges else None)
        return True

    def _give_up_early(self, number: int) -> None:
        for name in self._early.pop(number).regions:
            self._fabric.remove(name)

    def _new_lane(self, order: LaneOrder, entries: Entries | None) -> Lane:
        order.make_room, order.journal = self._make_room, self.journal
        order.set_departed_timeout(self.settings.departed_gap_timeout_ms)
        order.peer_share = self.settings.sessions_per_peer_share
        lane = Lane(self._fabric, self.epoch, order, self._sizes, self._frontiers, self._steps)
        lane.clock = self._clock
        if entries is not None:
            lane.inherit(entries, self._now_us)
        return lane

    def _put_lane(self, lane: Lane, range_: Range | None) -> Lane:
        topic = lane.order.topic
        number = topic.lane
        self.lanes[number] = lane
        if range_ is not None:
            self.ranges.keep(range_, topic, lane)
            lane.room = Room(lane.slots, self._sizes.round_entries, partial(self.ranges.durable, number))
            if not self._ask_store(partial(self._learn_ceiling, lane)):
                self.ranges.grew(number)  # the next look tries again
        return lane

    def _learn_ceiling(self, lane: Lane) -> None:
        self.ranges.learn_ceiling(lane)
        self.ranges.reserve(lane)

    def _begin_recovered(self, found: Recovered) -> bool:
        """A lane has come back from disk. False: the fabric has no room for it now."""
        try:
            lane = self._put_lane(self._new_lane(found.order, np.empty(0, dtype=ORDER)), found.range_)
        except FabricFull as error:
            self._no_room(found.order.topic, error)
            return False
        lane.unfenced = found.fenced
        self.counters.recovered += 1
        self.counters.recovery_us = self._now_us - self._began_us
        return True

    def _add_lane(self, topic: Topic) -> None:
        """A new topic. While the fabric has no room for it, its publishers wait, and nobody else."""
        try:
            self._make_lane(topic)
        except FabricFull as error:
            self._no_room(topic, error)
            self.roomless.add(topic.lane)

    def _no_room(self, topic: Topic, error: FabricFull) -> None:
        self._remove_lane(topic.lane)
        if not self._told_full:
            self.journal.warn("topic waits", topic=topic.name, reason=error.message)
        self._told_full = True

    def _remove_lane(self, number: int) -> None:
        """Remove what was made of a lane before the fabric was full."""
        for name in (order_region(self.epoch, number), checkpoint_region(self.epoch, number)):
            self._fabric.remove(name)

    # --- the round ----------------------------------------------------------------------------------------------------
    def round(self) -> int:
        """One pass over all rings. Returns how much there was to do: 0 when idle."""
        if self.deposed or self._epochs.superseded(self.epoch):
            self.deposed = True
            return 0
        try:
            work = self._round()
            if self._unseen:
                self._ask_store(self._be_seen)
            return work
        except BadRegion:
            if not self._epochs.superseded(self.epoch):
                raise
            self.deposed = True  # regions that we read are gone because a successor needs them no more
            return 0

    def _round(self) -> int:
        self._now_us, self._wall_us = self._clock.now_us(), self._clock.wall_us()
        offers = self._offers()
        lone = len(offers) == 1 and offers[0][1] == 1 and self._one_batch(offers[0][0])
        if self._now_us >= self._look_us + (_LOOK_LONE_US if lone else 0):
            self._look_us = self._now_us + _LOOK_US
            self._ask_store(self._refresh)
            offers = self._offers() if not lone else []
        self._beat()
        self._ask_store(self._look_after_ranges)
        if lone:
            return 1
        entries = self._take(offers)
        if entries is not None:
            self._steps.at(Step.ROUND_TAKEN)
            self.depth = _depth(entries)
            self._decide(entries)
        work = sum(lane.expire(self._now_us, self._wall_us) for lane in self.lanes.values())
        work += len(entries) if entries is not None else 0
        if len(self._backlog):
            self._held.release(self._backlog)
            self._backlog = self._backlog[:0]
        self._write()
        self._finish_closing()
        self._count(len(entries) if entries is not None else 0)
        return work

    def _ask_store(self, part: Callable[[], object]) -> bool:
        """Do what needs the store. False if it fails, or has just failed: it is done later, and ordering goes on.

        Each part leaves things so that it can be done again.
        """
        if self._store_is_failing:
            return False
        began_us = self._clock.now_us()
        try:
            part()
        except LATER as error:
            now_us = self._clock.now_us()
            if now_us - self._store_us >= _STORE_TOLD_US:
                self.journal.warn("store fails", reason=error.message, then="what needs it waits")
            self._store_us = rested_us(began_us, now_us)
            return False
        return True

    @property
    def _store_is_failing(self) -> bool:
        return self._now_us < self._store_us

    def _look_after_ranges(self) -> None:
        self.ranges.look(self._now_us)
        if self.recovery.lanes:
            self.recovery.step(self._now_us)

    def _count(self, entries: int) -> None:
        if entries:
            self.counters.entries += entries
            self.counters.round_entries.add(entries)
            self.counters.round_us.add(self._clock.now_us() - self._now_us)
        self.counters.rounds += 1

    def behind(self) -> bool:
        """Whether more was published since the round began."""
        return any(source.offer(1, 0) for source in self.brokers.sources.values())

    def awake(self, now: bool) -> bool:
        """Tell brokers whether we look by ourselves; True if that is news. After a no, look again before sleeping."""
        if bool(self._awake.value) == now:
            return False
        self._awake.restart(int(now))
        self._fabric.fence()
        return True

    def next_deadline_us(self) -> int | None:
        """When time will have something to do, at the earliest; None when it has not."""
        due = min((lane.due_us for lane in self.lanes.values()), default=NEVER)
        return None if due == NEVER else due

    def _refresh(self) -> None:
        """Learn of topics and brokers that came or went."""
        revision = self._directory.revision()
        if revision == self._revision and not self.brokers.awaited:
            return
        before, self._revision, self._outline = self._outline, -1, NOT_SEEN  # all of it again, if the store fails
        outline = self._directory.outline()
        if outline != before:
            self._follow_topics({topic.lane: topic for topic in self._directory.topics()})
        self.brokers.update(self.brokers.members, {})
        if not self.roomless:  # else look again soon
            self._revision, self._outline = revision, outline
        while self.brokers.problems:
            self.problems.append(self.brokers.problems.pop())

    def _follow_topics(self, topics: dict[int, Topic]) -> None:
        for number in self.lanes.keys() - topics.keys():
            self._drop_lane(number)
        self.roomless.clear()
        for number, topic in topics.items():
            if number in self.recovery.lanes:
                self.recovery.lanes[number].topic = topic
            elif number not in self.lanes:
                self._add_lane(topic)
            elif topic != self.lanes[number].order.topic:
                self.lanes[number].order.alter(topic)
                if number in self.ranges.kept:
                    self.ranges.follow(number, topic)
        self.brokers.members = self._directory.members()
        self.brokers.rings_unchecked = True
        self.broker_ranges.update(topics, self.brokers.members, self._now_us)
        self._all_on_disk = _are_on_disk(topics)

    def _drop_lane(self, number: int) -> None:
        lane = self.lanes.pop(number)
        self.ranges.drop(number)
        slots = self._held.of_lane(number)
        self._refused.answers += lane.order.out.take_answers()
        self._refused.answer_all(pick(self._held.entries, slots), Outcome.UNKNOWN_TOPIC)
        self._held.release(slots)
        self._backlog = self._backlog[~np.isin(self._backlog, slots)]  # a slot is given free once
        for name in lane.regions:
            self._fabric.remove(name)
        lane.close()

    def _beat(self) -> None:
        if self._now_us >= self._beat_us:
            self._beat_us = self._now_us + _BEAT_US
            self._heartbeat.advance(self._heartbeat.value + 1)
            self._ask_store(self._close_silent)
            if self._sweeper is not None:
                self._ask_store(partial(self._sweeper.look, self._now_us))

    def _close_silent(self) -> None:
        for member in self.brokers.look(self._now_us):
            self.journal.warn("broker silent", broker=member.region_prefix, then="it is closed")

    def _offers(self) -> list[tuple[Source, int]]:
        """How many entries to take of which brokers, each round beginning with another one."""
        room, offers = self._sizes.round_entries, []
        for source in self.brokers.in_turn(self.counters.rounds):
            if count := source.offer(room, int(self._held.by_origin[source.member.handle])):
                offers.append((source, count))
                room -= count
        self.more = room <= 0
        return offers

    def _one_batch(self, source: Source) -> bool:
        """A whole round for one batch, if it is as common as can be. The order of stores is that of every round."""
        line, handle = source.line(), source.member.handle
        lane = self.lanes.get(line[3] & 0xFFFF_FFFF)
        if lane is None or len(self._backlog) or not (source.plain and is_batch(line, source.next)) or self._is_due():
            return False
        self._steps.at(Step.ROUND_TAKEN)
        place = lane.decide_one(line, handle, self._now_us, self._wall_us)
        if place is None:
            return False
        self._steps.at(Step.ROUND_ENTRIES)
        self.depth = line[1] - line[2]
        source.next, source.requests = source.next + 1, 0
        source.answer_line(result_line(line, *place))
        self._steps.at(Step.ROUND_RESULTS)
        lane.publish()
        source.publish()
        self._steps.at(Step.ROUND_FRONTIERS)
        source.give_free()
        self._steps.at(Step.ROUND_READ_THROUGH)
        if lane.room is not None:
            self.ranges.grew(lane.order.topic.lane)
        for who in lane.first_bells:
            self._bell.ring(who)
        # An ack that waits for one disk finds its broker prepared; for several, they need the processors more.
        rings = not line[7] & 0xFF or len(lane.first_bells) <= 1
        self._ring_bells([source] if rings else [], grown=True)
        self._finish_closing()
        self._count(1)
        return True

    def _is_due(self) -> bool:
        """Whether time has something to do."""
        due = self.next_deadline_us()
        return due is not None and due <= self._now_us

    def _take(self, offers: list[tuple[Source, int]]) -> Entries | None:
        """The entries that were offered."""
        parts = [pick(self._held.entries, self._backlog)] if len(self._backlog) else []
        requests = self.settings.controls_per_round
        if offers and (plain := take_plain(offers)) is not None:
            return join([*parts, plain]) if parts else plain
        for source, count in offers:
            entries, whole = source.take(count, requests)
            if not whole:
                self.problems.append(f"{source.member.region_prefix}: pending entry {source.next} is not valid; closed")
                source.close(whole=False)
            if len(entries):
                parts.append(entries)
                requests -= source.requests
        self.more |= requests <= 0
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else join(parts)

    def _decide(self, entries: Entries) -> None:
        lanes = entries["lane"]
        if every(lanes == lanes[0]):
            self._decide_lane(int(lanes[0]), entries)
            return
        keys = lanes.astype(np.int64) << 32 | np.arange(len(entries))
        keys.sort()
        for run in np.split(keys, np.flatnonzero(np.diff(keys >> 32)) + 1):
            self._decide_lane(int(run[0] >> 32), pick(entries, run & 0xFFFF_FFFF))

    def _decide_lane(self, number: int, entries: Entries) -> None:
        if number not in self.lanes:
            self._ask_store(self._meet_new_topic)
        lane = self.lanes.get(number)
        if lane is None:
            waits = self._store_is_failing or number in self.roomless or number in self.recovery.lanes
            self._refused.answer_all(entries, Outcome.BACKPRESSURE if waits else Outcome.UNKNOWN_TOPIC)
        else:
            lane.decide(entries, self._now_us, self._wall_us)

    def _meet_new_topic(self) -> None:
        self._refresh()
        self.recovery.step(self._now_us)  # it begins at once

    def _make_room(self, count: int) -> None:
        """Fence the sessions with the oldest gaps, of any lane, until so many held slots are free."""
        while self._held.free < count:
            waiting = [lane.order for lane in self.lanes.values() if lane.order.table.waiting and lane.can_fence]
            if not waiting:
                return
            oldest = min(waiting, key=lambda order: int(order.table.gap_us.min()))
            fence(oldest, int(oldest.table.gap_us.argmin()), self._now_us, "overflow")

    # --- writing ------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        written = [lane for lane in self.lanes.values() if lane.write()]
        if written:
            self._steps.at(Step.ROUND_ENTRIES)
        answers = self._refused.take_answers()
        for lane in self.lanes.values():
            answers += lane.order.out.take_answers()
        answered = self.brokers.answer(answers)
        if answered:
            self._steps.at(Step.ROUND_RESULTS)
        for lane in written:
            lane.publish()
        for source in answered:
            source.publish()
        if answered or written:
            self._steps.at(Step.ROUND_FRONTIERS)
        freed = self._write_held()
        for source in self.brokers.sources.values():
            source.give_free()
        if answered or len(freed):
            self._steps.at(Step.ROUND_READ_THROUGH)
        self._held_region.zero(freed)
        self._ring_replicas(written)
        self._ring_bells(answered, bool(written))

    def _write_held(self) -> Slots:
        """Copy new waiting batches to the fabric. Returns the slots that are to be cleared."""
        taken, freed = self._held.take_dirty()
        if len(taken):
            self._held_region.write(taken, pick(self._held.entries, taken))
            self._steps.at(Step.ROUND_HELD)
        return freed

    def _ring_bells(self, answered: list[Source], grown: bool) -> None:
        """Wake brokers that have answers to relay, or readers to serve."""
        for source in self.brokers.sources.values():
            if source in answered or (grown and source.readers_wait()):
                self._bell.ring(source.member.region_prefix)

    def _ring_replicas(self, lanes: list[Lane]) -> None:
        """Wake the replicas of lanes that got entries."""
        for lane in lanes:
            if lane.room is not None:
                self.ranges.grew(lane.order.topic.lane)
        for who in dict.fromkeys(who for lane in lanes for who in lane.bells):  # in one order, whatever hashes are
            self._bell.ring(who)

    def _finish_closing(self) -> None:
        for source in self.brokers.take_drained():
            if source.member.state is MemberState.LIVE:  # else an earlier sequencer has told it
                self.counters.brokers_closed += 1
                self.journal.warn("broker closed", broker=source.member.region_prefix)
            for lane in self.lanes.values():
                detach_broker(lane.order, source.member.handle, self._now_us)
        self._ask_store(self._bury)

    def _bury(self) -> None:
        self.brokers.remove_stale_rings()
        self.brokers.bury(self._held.by_origin, self._is_on_disk, keeps=not self._all_on_disk)

    def _is_on_disk(self, member: Member) -> bool:
        """Whether nobody needs a dead broker's payloads to get them onto disks. Nothing of it waits any more."""
        whose = (member.broker, member.incarnation)
        for kept in self.ranges.kept.values():
            if kept.broker_lane is not None and (kept.broker_lane.broker, kept.broker_lane.incarnation) == whose:
                return False
        ends = self._burials.get(member.handle)
        if ends is None:
            ends = {number: lane.order.next_index for number, lane in self.lanes.items() if lane.room is not None}
            self._burials[member.handle] = ends
        if any(number in self.lanes and self.ranges.durable(number) < end for number, end in ends.items()):
            return False
        del self._burials[member.handle]
        return True

    # --- the end ------------------------------------------------------------------------------------------------------
    def drain(self) -> bool:
        """One step towards a clean stop: nothing more is ordered. True when this reign may end."""
        if self.deposed or self._epochs.superseded(self.epoch):
            self.deposed = True
            return True
        self._now_us, self._wall_us = self._clock.now_us(), self._clock.wall_us()
        if self._drain is None:
            self._drain = Drain(self.lanes, self.ranges, self.journal, self._now_us)
        try:
            self._ask_store(self._refresh)
            self._beat()
            self._ask_store(partial(self.ranges.look, self._now_us))
            return self._drain.step(self._now_us)
        except BadRegion:
            if not self._epochs.superseded(self.epoch):
                raise
            self.deposed = True
            return True


def _are_on_disk(topics: dict[int, Topic]) -> bool:
    """Whether every topic has replicas: then readers do not need the logs of dead brokers."""
    return bool(topics) and all(topic.replicas for topic in topics.values())


def give_up_epoch(fabric: Fabric, directory: Directory, epoch: int) -> None:
    """Taking over in this epoch has failed: leave no memory behind, and let others try.

    Nobody reads regions of an epoch that has not started, and of those before ours none will: only the newest handed
    out starts.
    """
    started = directory.started_epoch()
    if started >= epoch:
        return
    vain = {epoch_folder(number) for number in range(started + 1, epoch + 1)}
    for name in fabric.names():
        if writer_of(name) in vain:
            fabric.remove(name)
