"""Recovery after a restart with an empty fabric: each lane is recovered from the disks of its replicas.

Theory of operation. If the last range of a lane is sealed, the stop was clean: everything ordered is durable, and the
lane continues at that position with its sessions unchanged. If the last range is open, memory was lost. Then the range
is closing. Replicas of this run that have one of the disks named by the range report in their durable lines how far
their copies go. A wiped disk or a damaged copy is silent. Silence is not "nothing".

All durable entries are on A of R disks, so among R-A+1 replies at least one has them all. The largest reply is the end,
and no copy that was served to a reader is cut off. That copy may be damaged where no other disk has a copy. Then the
lane does not wait forever: given all replies, no more was durable than the A-th largest reply. When A replicas have
copied up to the end, on the range's own disks or on new disks that replace wiped ones, one transaction seals the range
there. It also opens the next one at the ceiling, below which any position may have been handed out. The space between
is lost. Sessions are fenced, since acked batches may be lost. Publishers continue automatically from the end that the
log has.

If the fabric had a mirror, the next range opens where the order ended. The space between is then exactly the entries
that were ordered and are on no disk. It also has one extra position, so that readers at the old end are informed. Often
nothing was lost. Then there is no space, and sessions continue unchanged.

    range open    -> collect -> copy -> read -> seal, open at the ceiling -> begin, sessions fenced
    range sealed  ->                    read -> reopen at its end         -> begin, sessions unchanged
    begun before  ->                    read                              -> begin   (the leader that sealed it is gone)

Until a lane has begun, its entries are answered BACKPRESSURE.

`BrokerRanges` does the same for the ranges of lanes that brokers write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.region import Fabric
from embarcadero.limits import RECOVERY_REPLIES_S, RECOVERY_RETRY_S, RECOVERY_STUCK_S
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import EarlierGeneration, MirroredEnd
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.lane import LedEpoch
from embarcadero.sequencer.order.sessions import ReorderBuffer
from embarcadero.sequencer.ranges.keeper import RangeKeeper
from embarcadero.sequencer.ranges.recovery_sources import (
    DiskSource,
    LaneSnapshot,
    Mirrors,
    MirrorSnapshot,
    RecoverySource,
    fence_all,
    restore_lane,
    seq_at_end,
    snapshot_of,
)
from embarcadero.steps import Step
from embarcadero.types import LanePosition, Member, Range, ReplicaRef, Topic, TopicLane

_REPLIES_US: Final = int(RECOVERY_REPLIES_S * 1_000_000)
_SOON_US: Final = 20_000
_STUCK_US: Final = int(RECOVERY_STUCK_S * 1_000_000)
_RETRY_US: Final = int(RECOVERY_RETRY_S * 1_000_000)
_DO: Final = "start the missing replicas; or give up records that only they have: topic recover --accept-loss"


class Stage(Enum):
    """Stage of a lane's recovery."""

    COLLECT = auto()
    COPY = auto()
    READ = auto()
    READING = auto()
    SEAL = auto()
    BEGIN = auto()
    DONE = auto()


class Ending(Enum):
    """State of a lane's last range when it was found. It decides the store's records once the lane is read."""

    OPEN = auto()  # memory was lost: the range is sealed, and the next one opens above the ceiling
    SEALED = auto()  # the stop was clean: the lane continues at its end
    BEGUN = auto()  # a leader that is gone opened it in this run: it stays open


class CopyProgress(NamedTuple):
    """Sum of the ends of a range's copies, and since when it has not changed."""

    total: int
    since_us: int


class FoundLane(NamedTuple):
    """Result of reading a lane."""

    end_seq: int
    order: LaneOrder | None  # with its sessions, if sequencers order the lane
    snapshot: LaneSnapshot | None  # if a mirror has it
    saved: MirroredEnd | None = None  # end of the order, if the mirror is not behind the disks


class Recovered(NamedTuple):
    """A lane that is ready to begin: its open range, its sessions, and rows of sessions that were fenced just now."""

    range_: Range
    order: LaneOrder
    fenced: list[int]


class LaneRecovery:
    """Recovery of one lane."""

    def __init__(
        self, recovery: Recovery, topic: Topic, ranges: list[Range], broker_lane: TopicLane | None, now_us: int
    ) -> None:
        self._recovery, self.topic, self._broker_lane, self._began_us = recovery, topic, broker_lane, now_us
        self._ranges = ranges
        self.stage, self._ending = Stage.COLLECT, Ending.OPEN
        self._end = self.range_.start
        self._lost = True  # whether something may be lost: then sessions are fenced
        self._enough_us: int | None = None
        self._needed = 0  # number of copies that must reach the end
        self._copied = CopyProgress(0, now_us)
        self._retry_us = 0
        self._failure: Exception | None = None
        self._reported: set[str] = set()
        self._found = FoundLane(0, None, None)
        self._fenced: list[int] | None = None
        self.opened: Range | None = None
        if self.range_.end is not None:
            self._end, self._lost = self.range_.end, False
            self.stage, self._ending = Stage.READ, Ending.SEALED
        elif recovery.opened_in_this_run(self.range_) and broker_lane is None:
            if self.range_.start == 0:
                self._begin_fresh()
                return
            before = ranges[-2].end if len(ranges) > 1 else None
            self._lost = before != self.range_.start
            self.stage, self._ending = Stage.READ, Ending.BEGUN

    @property
    def range_(self) -> Range:
        """The last range of the lane, as found in the store."""
        return self._ranges[-1]

    def follow(self, topic: Topic) -> None:
        """Adopt a change of the lane's topic in the store."""
        self.topic = topic

    # --- steps --------------------------------------------------------------------------------------------------------
    def step(self, now_us: int) -> None:
        """Advance as far as possible."""
        steps = {
            Stage.COLLECT: self._collect,
            Stage.COPY: self._copy,
            Stage.READ: self._read,
            Stage.SEAL: self._record,
            Stage.BEGIN: self._begin,
        }
        if self._failure is not None:
            raise self._failure  # raised here, because a worker's thread would not report it
        before = None
        while self.stage is not before and self.stage in steps and now_us >= self._retry_us:
            before = self.stage
            steps[before](now_us)

    def _replies(self) -> dict[str, int]:
        """Collect the ends of the copies on the range's own disks: disk -> end."""
        recovery, range_ = self._recovery, self.range_
        disks = {ref.disk for ref in range_.replicas}
        found = {}
        for member in recovery.keeper.replicas.live():
            table = recovery.keeper.lines.of(member.ref)
            line = None if table is None else table.load(range_.key)
            if member.disk not in disks:
                continue
            if line is not None:
                found[member.disk] = max(line, range_.start)
        return found

    def _copies(self) -> list[int]:
        """Collect the ends of the copies of the range, one per replica. Disks that replaced its own count here too."""
        recovery, range_ = self._recovery, self.range_
        named = {ref.replica for ref in range_.replicas}
        found: dict[int, int] = {}
        for member in recovery.keeper.replicas.live():
            table = recovery.keeper.lines.of(member.ref) if member.replica in named else None
            line = None if table is None else table.load(range_.key)
            if line is not None:
                found[member.replica] = max(line, found.get(member.replica, 0))
        return list(found.values())

    def _collect(self, now_us: int) -> None:
        """Wait for enough replies, and a little longer for the others."""
        range_, recovery = self.range_, self._recovery
        if self._broker_lane is None and range_.start == 0 and recovery.opened_in_this_run(range_):
            self._begin_fresh()
            return
        recovery.keeper.publish(range_.lane, range_.number, closing=True)
        recovery.env.steps.at(Step.RECOVERY_CLOSING)
        replies, copies = self._replies(), len(range_.replicas)
        needed = copies - range_.durable_on + 1
        accepted = len(replies) < needed and recovery.directory.ranges.loss_accepted(range_.lane)
        if len(replies) < needed and not accepted:
            self._enough_us = None
            if now_us - self._began_us > _REPLIES_US:
                self._report_missing(replies, needed)
            return
        if self._enough_us is None:
            self._enough_us = now_us
        if len(replies) < copies and now_us - self._enough_us < _REPLIES_US:
            return
        self._end = max(replies.values(), default=range_.start)
        self._needed = min(range_.durable_on, len(replies)) if accepted else range_.durable_on
        self._copied = self._copied._replace(since_us=now_us)
        self._ask_for_copies()
        self.stage = Stage.COPY

    def _ask_for_copies(self) -> None:
        recovery, range_ = self._recovery, self.range_
        recovery.keeper.publish(range_.lane, range_.number, closing=True, target=self._end)
        recovery.env.steps.at(Step.RECOVERY_TARGET)
        recovery.wake(range_)

    def _copy(self, now_us: int) -> None:
        """Wait until enough disks have everything up to the end."""
        copies = self._copies()
        there = [line for line in copies if line >= self._end]
        if sum(copies) != self._copied.total:
            self._copied = CopyProgress(sum(copies), now_us)
        if len(there) >= self._needed or self._end == self.range_.start:  # an empty range needs no copies
            self.stage = Stage.READ
        elif not there:
            self.stage, self._enough_us = Stage.COLLECT, None  # the replica with the complete copy is gone again
        elif now_us - (self._enough_us or 0) > 5 * _REPLIES_US:
            self._report_once("lane waits for copies", end=self._end, have=len(there), needed=self._needed, do=_DO)
            if self._recovery.directory.ranges.loss_accepted(self.range_.lane):
                self.stage = Stage.READ
            elif now_us - self._copied.since_us > _STUCK_US:
                self._settle_for_less(copies)

    def _settle_for_less(self, copies: list[int]) -> None:
        """Lower the end when only a damaged disk has the last entries: give up entries that were never durable.

        A disk that does not answer may have all of them, so each counts as one of the A disks that made them durable.
        """
        replies = sorted(self._replies().values(), reverse=True)
        others = self.range_.durable_on - (len(self.range_.replicas) - len(replies))
        if others < 1:
            return
        end = max([replies[others - 1], *sorted(copies, reverse=True)[self._needed - 1 : self._needed]])
        if end < self._end:
            self._recovery.env.journal.warn(
                "lane gives up a damaged end", topic=self.topic.name, lane=self.range_.lane, of=self._end, end=end
            )
            self._end = end
            self._ask_for_copies()

    def _read(self, now_us: int) -> None:
        """Let a worker read the lane from disk."""
        self.stage = Stage.READING
        source, range_, end, recovery = self._recovery.source, self.range_, self._end, self._recovery
        ranges, asks_mirror = self._ranges, self._ending is Ending.OPEN

        def job() -> FoundLane:
            snapshot = snapshot_of(recovery.snapshot, ranges, self._broker_lane) if asks_mirror else None
            if self._broker_lane is not None:
                return FoundLane(seq_at_end(source, range_, end), None, snapshot)
            maker = recovery.maker
            restored = restore_lane(source, self.topic, ranges, end, maker.sessions, maker.buffer, now_us)
            return FoundLane(seq_at_end(source, range_, end), restored, snapshot)

        def done(found: FoundLane | Exception) -> None:
            if isinstance(found, Exception):
                if not isinstance(found, EmbarcaderoError):
                    self._failure = found
                    return
                self._report_once("lane can't be read", reason=found.message, do=found.hint)
                self._retry_us, self.stage = now_us + _RETRY_US, Stage.READ
                return
            self._found = found._replace(snapshot=None)
            if found.snapshot is not None:
                self._compare(found.snapshot)
            self.stage = Stage.SEAL

        recovery.env.workers.run(job, done)

    def _compare(self, snapshot: LaneSnapshot) -> None:
        """Reconcile the mirror's end with the disks. A mirror that is behind the disks is ignored."""
        if snapshot.end < self._end or snapshot.end_seq < self._found.end_seq:
            self._report_once("mirror has less than disks", mirror=snapshot.end, end=self._end)
            return
        batches, records = snapshot.lost_above(self._end)
        saved = MirroredEnd(
            lane=self.range_.lane,
            index=snapshot.end,
            seq=snapshot.end_seq,
            kept=self._end,
            batches=batches,
            records=records,
        )
        self._found = self._found._replace(saved=saved)
        self._lost = snapshot.end > self._end
        if (order := self._found.order) is not None:
            order.not_before(snapshot.append_us)
            order.table.count_on(snapshot.next_handle)

    def _record(self, now_us: int) -> None:
        """Record the end of the last range and the start of the next one in the store."""
        self._retry_us = now_us + _SOON_US  # in case the store refuses, or there are too few replicas
        if self._broker_lane is not None:
            if self._seal_recovered([]) is None:
                return
            self._recovery.keeper.publish(self.range_.lane, 0, closing=False)
            self.stage = Stage.DONE
        else:
            self.opened = self.range_ if self._ending is Ending.BEGUN else self._open_next(now_us)
            if self.opened is None:
                return
            self.stage = Stage.BEGIN
        self._retry_us = 0
        self._recovery.env.steps.at(Step.RECOVERY_DECIDED)
        self._recovery.env.journal.note(
            "lane recovered",
            topic=self.topic.name,
            lane=self.range_.lane,
            end=self._end,
            start=self.opened.start if self.opened else None,
            took_ms=(now_us - self._began_us) // 1000,
            **self._mirror_facts(),
        )

    def _begin(self, now_us: int) -> None:
        """Hand over the lane. There may be no memory for it yet."""
        recovery, opened = self._recovery, self.opened
        if opened is None:
            return
        order = self._found.order or recovery.maker.new_order(self.topic)
        if self._fenced is None and self._lost:
            handles = recovery.directory.ranges.handle_ceiling(opened.lane)  # first, because the store may fail
            self._fenced = fence_all(order, now_us)
            order.table.pass_over(handles)
        order.resume(LanePosition(opened.start, opened.start_seq), order.append_us)
        if recovery.maker.begin_recovered(Recovered(opened, order, self._fenced or [])):
            self.stage = Stage.DONE
            recovery.env.steps.at(Step.RECOVERY_BEGUN)
        else:
            self._retry_us = now_us + _RETRY_US

    # --- records in the store -----------------------------------------------------------------------------------------
    def _open_next(self, now_us: int) -> Range | None:
        """Open the next range: above the ceiling if memory was lost, at the lane's end if the stop was clean."""
        refs, recovery = self._refs(now_us), self._recovery
        if refs is None:
            return None
        if self._ending is Ending.SEALED:
            return recovery.directory.ranges.reopen(self.range_.lane, refs, recovery.epoch)
        return self._seal_recovered(refs)

    def _seal_recovered(self, refs: list[ReplicaRef]) -> Range | None:
        range_, found, recovery = self.range_, self._found, self._recovery
        ended = range_.lane, range_.number, self._end, found.end_seq, refs, recovery.epoch
        return recovery.directory.ranges.seal_recovered(*ended, found.saved)

    def _refs(self, now_us: int) -> list[ReplicaRef] | None:
        """Choose replicas for the next range, with those of the last range first.

        Returns None while more may come, or there are too few.
        """
        replicas = self._recovery.keeper.replicas
        found = self._recovery.directory.replicas.choose(self.topic.replicas, self.range_.replicas, replicas.avoided())
        waited = now_us - self._began_us >= _REPLIES_US
        if len(found) >= (max(1, self.topic.durable_on) if waited else self.topic.replicas):
            return found
        if not waited:
            return None
        self._report_once("lane waits for replicas", live=len(found), needed=self.topic.durable_on, do="start replicas")
        return None

    def _begin_fresh(self) -> None:
        """Begin the lane of a new topic: there is nothing to recover."""
        self.opened, self._lost, self.stage = self.range_, False, Stage.BEGIN

    # --- reports ------------------------------------------------------------------------------------------------------
    def _report_missing(self, replies: dict[str, int], needed: int) -> None:
        missing = [ref.replica for ref in self.range_.replicas if ref.disk not in replies]
        self._report_once("lane waits for replicas", missing=missing, have=len(replies), needed=needed, do=_DO)

    def _mirror_facts(self) -> dict[str, object]:
        saved = self._found.saved
        return {} if saved is None else {"ordered": saved.index, "batches_lost": saved.batches}

    def _report_once(self, event: str, **facts: object) -> None:
        if event not in self._reported:
            self._recovery.env.journal.warn(event, topic=self.topic.name, lane=self.range_.lane, **facts)
        self._reported.add(event)


class LaneMaker(Protocol):
    """Interface for making lanes, to which recovery hands them over."""

    @property
    def buffer(self) -> ReorderBuffer:
        """The reorder buffer of all lanes."""
        ...

    @property
    def sessions(self) -> int:
        """The maximum number of sessions of a lane."""
        ...

    def new_order(self, topic: Topic) -> LaneOrder:
        """Make the order of an empty lane."""
        ...

    def begin_recovered(self, found: Recovered) -> bool:
        """Begin a recovered lane. False if there is no memory for it now."""
        ...


class Recovery:
    """All lanes that are being recovered."""

    def __init__(
        self, epoch: LedEpoch, directory: Directory, keeper: RangeKeeper, maker: LaneMaker, mirrors: Mirrors | None
    ) -> None:
        self.env, self.epoch = epoch.env, epoch.number
        self.directory, self.keeper, self.maker = directory, keeper, maker
        self.source: RecoverySource = DiskSource(lambda: keeper.replicas.members, epoch.env.disks)
        self._mirrors, self._earlier = mirrors, tuple[EarlierGeneration, ...]()
        self.snapshot = MirrorSnapshot((), mirrors)
        self.lanes: dict[int, LaneRecovery] = {}

    def learn_generations(self) -> None:
        """Read the earlier generations of the fabric from the store."""
        self._earlier = self.directory.earlier_generations()
        self.snapshot = MirrorSnapshot(self._earlier, self._mirrors)

    def add(self, topic: Topic, ranges: list[Range], broker_lane: TopicLane | None, now_us: int) -> None:
        """Add a lane that is only on disk."""
        lane = ranges[-1].lane
        if lane not in self.lanes:
            self.lanes[lane] = LaneRecovery(self, topic, ranges, broker_lane, now_us)

    def drop(self, lane: int) -> None:
        """Drop a deleted lane."""
        self.lanes.pop(lane, None)

    def step(self, now_us: int) -> int:
        """Advance all lanes. Returns how many are done now."""
        if not self.lanes:
            return 0
        self.keeper.look_at_replicas(now_us)
        for lane in list(self.lanes.values()):
            lane.step(now_us)
        done = [number for number, lane in self.lanes.items() if lane.stage is Stage.DONE]
        for number in done:
            del self.lanes[number]
        self.finish()
        return len(done)

    def finish(self) -> None:
        """Let the store forget earlier generations, once all lanes are recovered."""
        if not self.lanes and self._earlier and self.directory.forget_earlier_generations(self.epoch):
            self._earlier = ()

    def opened_in_this_run(self, range_: Range) -> bool:
        """Whether a range was opened in this fabric: only then does the fabric have lines of its replicas."""
        return any(self.keeper.lines.of(ref) is not None for ref in range_.replicas)

    def wake(self, range_: Range) -> None:
        """Wake the replicas of this run that have copies of a range, or must get them."""
        named = {ref.replica for ref in range_.replicas}
        for member in self.keeper.replicas.live():
            if member.replica in named:
                self.keeper.ring(member.ref)


class BrokerRanges:
    """Ensures that every broker's lane with an open range is managed by the keeper, or recovered."""

    def __init__(self, fabric: Fabric, directory: Directory, keeper: RangeKeeper, recovery: Recovery) -> None:
        self._fabric, self._directory, self._keeper, self._recovery = fabric, directory, keeper, recovery
        self._over: set[int] = set()  # lanes whose last range is sealed

    def update(self, topics: Mapping[int, Topic], members: Sequence[Member], now_us: int) -> None:
        """Adopt the topics, lanes and members of the store."""
        mine = {number: topic for number, topic in topics.items() if topic.replicas and topic.order in (0, 1)}
        lanes = {lane.lane: lane for lane in self._directory.lanes.all() if lane.topic in mine} if mine else {}
        ours = [number for number, lane_range in self._keeper.lanes.items() if lane_range.broker_lane is not None]
        for number in ours:
            if number not in lanes:
                self._keeper.drop(number)
        for number in [number for number in self._recovery.lanes if number not in lanes and number not in topics]:
            self._recovery.drop(number)
        self._keeper.keep_only(topics.keys() | lanes.keys())
        self._over &= lanes.keys()
        here = {(member.broker, member.incarnation) for member in members}
        for number, lane in lanes.items():
            topic = mine[lane.topic]
            if number in self._keeper.lanes:
                self._keeper.follow(number, topic, lane)
            elif number not in self._over and number not in self._recovery.lanes:
                self._begin(lane, topic, (lane.broker, lane.incarnation) in here, now_us)

    def _begin(self, lane: TopicLane, topic: Topic, here: bool, now_us: int) -> None:
        range_ = self._directory.ranges.open_range(lane.lane)
        if range_ is None:
            self._over.add(lane.lane)
        elif here or self._fabric.exists(lane.region):
            self._keeper.keep(range_, topic, broker_lane=lane)
        else:
            self._recovery.add(topic, self._directory.ranges.all(lane.lane), lane, now_us)
