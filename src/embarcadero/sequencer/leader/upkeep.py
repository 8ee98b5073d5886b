"""What a leader does between its rounds: it follows the store, shows that it is alive, and cleans up.

Sweeping: regions that are of no use any more, of epochs before our predecessor's and of incarnations that are
forgotten. Whoever stops a role for good removes its regions; but one that sleeps may make another of them when it wakes
up, long after. So the leader looks again and again, beside its rounds. In one generation of the fabric names are never
used again, so it does not matter when that happens, or who leads then.

A clean stop: everything ordered gets onto disks, sessions too, and ranges are sealed where they end. So the next run
finds a sealed last range in each lane and goes on at that very place, with nothing lost. Every wait is bounded; a lane
that did not get there in time keeps its open range, and the next run recovers it like after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from embarcadero.env import Journal
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.layout import SequencerLine, frontier_offset
from embarcadero.fabric.names import epoch_of, is_incarnation, is_replica, writer_of
from embarcadero.limits import DRAIN_CHECKPOINT_S_MAX, DRAIN_DURABLE_S_MAX, HEARTBEAT_S
from embarcadero.placement.store import NOT_SEEN
from embarcadero.sequencer.leader.brokers import BrokerIncarnations
from embarcadero.sequencer.leader.lanes import LeaderLanes
from embarcadero.sequencer.leader.leadership import Leadership
from embarcadero.sequencer.order.lane import Lane, detach_broker
from embarcadero.sequencer.ranges.keeper import RangeKeeper
from embarcadero.sequencer.ranges.recovery import BrokerRanges
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState, ReplicaState, Topic

_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)
_FIRST_US: Final = 300_000
"""After a takeover publishers come first: what earlier epochs left keeps its memory until then."""
_EVERY_US: Final = 2_000_000


class Sweeper:
    """Looks for what is left and removes it. `look` now and then; it knows when."""

    def __init__(self, leader: Leadership, earlier: int) -> None:
        """`earlier`: our predecessor, whose regions readers may still need."""
        self._fabric, self._directory = leader.fabric, leader.directory
        self._workers, self._steps = leader.env.workers, leader.env.steps
        self._epoch, self._earlier = leader.epoch, earlier
        self._due_us = leader.now_us + _FIRST_US
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
        members, replicas = self._directory.members.all(), self._directory.replicas.all()
        prefixes = {member.region_prefix for member in members} | {member.ref.region_prefix for member in replicas}
        left = [name for name in names if self._is_left(writer_of(name), prefixes)]
        if any(is_replica(name) for name in left):  # lines that an open range names count, whoever is known
            open_ = [range_ for range_ in self._directory.ranges.all() if range_.open]
            named = {ref.region_prefix for range_ in open_ for ref in range_.replicas}
            left = [name for name in left if writer_of(name) not in named]
        return left if self._directory.elections.generation_holds() else []

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


class Upkeep:
    """Follows the store, shows life, closes brokers, and brings a clean stop about."""

    def __init__(self, leader: Leadership, lanes: LeaderLanes, brokers: BrokerIncarnations) -> None:
        self._leader, self._lanes, self._brokers = leader, lanes, brokers
        self._heartbeat = FrontierWriter(leader.frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._awake = FrontierWriter(leader.frontiers, frontier_offset(SequencerLine.AWAKE))
        self._broker_ranges = BrokerRanges(leader.fabric, leader.directory, lanes.ranges, lanes.recovery)
        self._beat_us = 0
        self._revision, self._outline = -1, NOT_SEEN  # of the store, as of the last look
        self._all_on_disk = False  # every topic has replicas
        self._cleanups: dict[int, dict[int, int]] = {}  # dead broker's handle -> lane -> where its batches end
        self._unseen = False  # replicas were not told yet that we lead
        self._sweeper: Sweeper | None = None
        self._drain: Drain | None = None

    # --- beginning ----------------------------------------------------------------------------------------------------
    def look_at_store(self) -> None:
        """Note which revision the values are of that are read from here on."""
        self._revision, self._outline = self._leader.directory.revision(), self._leader.directory.outline()

    def learn_topics(self, topics: dict[int, Topic], members: list[Member]) -> None:
        """Look after the ranges of brokers' lanes."""
        self._all_on_disk = _are_on_disk(topics)
        self._broker_ranges.update(topics, members, self._leader.now_us)

    def begin(self, earlier: int) -> None:
        """We have started, after this epoch: sweep from now on, and wake replicas soon."""
        self._sweeper = Sweeper(self._leader, earlier)
        self._unseen = earlier > 0

    def be_seen(self) -> None:
        """After the first round, wake all replicas, for acks that wait for disks: other answers go first."""
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
        """Beat if it is time, and look at other heartbeats."""
        now_us = self._leader.now_us
        if now_us >= self._beat_us:
            self._beat_us = now_us + _BEAT_US
            self._heartbeat.advance(self._heartbeat.value + 1)
            self._leader.ask_store(self._close_silent)
            if self._sweeper is not None:
                self._leader.ask_store(partial(self._sweeper.look, now_us))

    def awake(self, now: bool) -> bool:
        """Tell brokers whether we look by ourselves; True if that is news. After a no, look again before sleeping."""
        if bool(self._awake.value) == now:
            return False
        self._awake.restart(int(now))
        self._leader.fabric.fence()
        return True

    def _close_silent(self) -> None:
        for member in self._brokers.look(self._leader.now_us):
            self._leader.env.journal.warn("broker silent", broker=member.region_prefix, then="it is closed")

    # --- following the store ------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Learn of topics and brokers that came or went."""
        directory, brokers = self._leader.directory, self._brokers
        revision = directory.revision()
        if revision == self._revision and not brokers.awaited:
            return
        before, self._revision, self._outline = self._outline, -1, NOT_SEEN  # all of it again, if the store fails
        outline = directory.outline()
        if outline != before:
            self._follow_topics({topic.lane: topic for topic in directory.topics.all()})
        brokers.update(brokers.members, {})
        if not self._lanes.roomless:  # else look again soon
            self._revision, self._outline = revision, outline
        while brokers.problems:
            self._leader.problems.append(brokers.problems.pop())

    def _follow_topics(self, topics: dict[int, Topic]) -> None:
        lanes = self._lanes
        for number in lanes.by_number.keys() - topics.keys():
            lanes.drop(number)
        lanes.roomless.clear()
        for number, topic in topics.items():
            if number in lanes.recovery.lanes:
                lanes.recovery.lanes[number].topic = topic
            elif number not in lanes.by_number:
                lanes.add(topic)
            elif topic != lanes.by_number[number].order.topic:
                lanes.by_number[number].order.alter(topic)
                if number in lanes.ranges.kept:
                    lanes.ranges.follow(number, topic)
        self._brokers.learn(self._leader.directory.members.all())
        self.learn_topics(topics, self._brokers.members)

    def meet_new_topic(self) -> None:
        """An entry of an unknown lane came: its topic may be new."""
        self.refresh()
        self._lanes.recovery.step(self._leader.now_us)  # it begins at once

    def look_after_ranges(self) -> None:
        """Seal, reserve and recover what is due."""
        self._lanes.ranges.look(self._leader.now_us)
        if self._lanes.recovery.lanes:
            self._lanes.recovery.step(self._leader.now_us)

    # --- brokers that are gone ----------------------------------------------------------------------------------------
    def finish_closing(self) -> None:
        """Detach the sessions of brokers of which everything was taken, and clean up after earlier ones."""
        for source in self._brokers.take_drained():
            if source.member.state is MemberState.LIVE:  # else an earlier sequencer has told it
                self._leader.counters.brokers_closed += 1
                self._leader.env.journal.warn("broker closed", broker=source.member.region_prefix)
            for lane in self._lanes.by_number.values():
                detach_broker(lane.order, source.member.handle, self._leader.now_us)
        self._leader.ask_store(self._clean_up)

    def _clean_up(self) -> None:
        self._brokers.remove_stale_rings()
        self._brokers.clean_up(self._lanes.buffer.by_origin, self._is_on_disk, keeps=not self._all_on_disk)

    def _is_on_disk(self, member: Member) -> bool:
        """Whether a dead broker's payloads are on disks, as far as they have to be. Nothing of it waits any more."""
        lanes, ranges = self._lanes.by_number, self._lanes.ranges
        whose = (member.broker, member.incarnation)
        for kept in ranges.kept.values():
            if kept.broker_lane is not None and (kept.broker_lane.broker, kept.broker_lane.incarnation) == whose:
                return False
        ends = self._cleanups.get(member.handle)
        if ends is None:
            ends = {number: lane.order.next_index for number, lane in lanes.items() if lane.room is not None}
            self._cleanups[member.handle] = ends
        if any(number in lanes and ranges.durable(number) < end for number, end in ends.items()):
            return False
        del self._cleanups[member.handle]
        return True

    # --- the end ------------------------------------------------------------------------------------------------------
    def drain(self) -> bool:
        """One step towards a clean stop: nothing more is ordered. True when this leadership may end."""
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
    """Whether every topic has replicas: then readers do not need the logs of dead brokers."""
    return bool(topics) and all(topic.replicas for topic in topics.values())
