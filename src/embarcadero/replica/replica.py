"""The replica's logic: no files of its own, no clock, no threads. The driver and the simulator run the same code.

One pass: take what was ordered since the last one, append it, have it synced, publish the durable lines, and ring the
brokers and replicas that wait for them (copies.py). Beside that, a little at a time: read the store and take over
ranges of other replicas (ranges.py), copy from other replicas' files what left the fabric and look through old files
for damage (repair.py), keep session checkpoints and give up what was trimmed (retention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from embarcadero.config.table import ReplicaKeys as Settings
from embarcadero.env import Journal
from embarcadero.errors import EmbarcaderoError, TooMany
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.lines import TaggedWriter
from embarcadero.limits import HEARTBEAT_S
from embarcadero.placement.directory import StoreChange, StoreWatch
from embarcadero.replica.copies import (
    COMMIT_BYTES_MAX,
    BrokerRegions,
    Commits,
    Copy,
    Follower,
    Health,
    ReplicaContext,
    ReplicaCounters,
)
from embarcadero.replica.ranges import Moving, RangeCopies
from embarcadero.replica.repair import Repair, Scrubber
from embarcadero.replica.retention import LaneRetention, SessionCheckpoints
from embarcadero.steps import Step
from embarcadero.storage.folder import IDENTITY_FILE
from embarcadero.types import Range, ReplicaMember, ReplicaState, Topic

_LOOK_AGAIN_US: Final = 2_000
"""Looking whether the store has changed is cheap, but not as cheap as finding nothing to do."""

_TEND_US: Final = 5_000
"""While entries come one by one, what is beside following waits this long at most."""
_SESSIONS_US: Final = 100_000
_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)


@dataclass(slots=True)
class _Due:
    """When to do what next."""

    beat_us: int = 0
    store_us: int = 0
    look_us: int = 0
    sessions_us: int = 0
    tend_us: int = 0


@dataclass(frozen=True, slots=True)
class _Stock:
    """Copies by what they need."""

    following: list[Copy] = field(default_factory=list)
    open: list[Copy] = field(default_factory=list)
    lacking: list[Copy] = field(default_factory=list)  # sealed ranges that are not all here


class Replica:
    """One incarnation of one replica. `deposed` is set when another one has its place, or it was taken for dead."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context, self._directory = context, context.directory
        self.deposed = False
        self.commits = Commits(context)
        self.brokers = BrokerRegions(context.fabric, self._refresh)
        self.follower = Follower(self.leader, self.brokers)
        self.sessions = SessionCheckpoints(context)
        self.ranges = RangeCopies(context, self.sessions.forget)
        self.moving = Moving(context, self.ranges)
        self.repair = Repair(context, self.ranges, self.commits, self._take_stock, self.moving.gave_up)
        self.retention = LaneRetention(context, self.ranges, self.sessions)
        self.scrubber = Scrubber(context, self.ranges, self._take_stock)
        self.topics: dict[int, Topic] = {}  # by lane, those of brokers too
        self._ranges: list[Range] = []
        self._watch = StoreWatch(context.directory)
        self._due = _Due()
        self._stock = _Stock()
        self._has_identity = context.disk.exists(IDENTITY_FILE)
        self._refresh()

    # --- what others see ----------------------------------------------------------------------------------------------
    @property
    def leader(self) -> LeaderView:
        """The leader, as this replica knows it."""
        return self._context.leader

    @property
    def member(self) -> ReplicaMember:
        """This incarnation, as the store has it."""
        return self._context.member

    @property
    def settings(self) -> Settings:
        """Its settings."""
        return self._context.config.replica

    @property
    def journal(self) -> Journal:
        """Where it reports events."""
        return self._context.env.journal

    @property
    def counters(self) -> ReplicaCounters:
        """What it counts."""
        return self._context.counters

    @property
    def health(self) -> Health:
        """Troubles of its disk."""
        return self._context.health

    @property
    def lines(self) -> TaggedWriter:
        """Its durable lines."""
        return self._context.lines

    # --- the world around ---------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Learn from the store, if it changed."""
        change = self._watch.look()
        if change is StoreChange.NOTHING:
            return
        if change is StoreChange.ELECTIONS:
            self.leader.advance(self._directory.elections.started_epoch())
        else:
            self._read_all()
        self._watch.done()

    def _read_all(self) -> None:
        members = self._directory.replicas.all()
        me = next((m for m in members if m.ref == self.member.ref), None)
        self.deposed |= me is None or me.state is ReplicaState.DEAD
        self.deposed |= any(
            m.replica == self.member.replica and m.incarnation > self.member.incarnation for m in members
        )
        if self.deposed:
            return
        self._context.all_lines.forget_removed()
        lanes, topics = self._directory.lanes.all(), self._directory.topics.all()
        self.topics = {topic.lane: topic for topic in topics}
        self.topics |= {lane.lane: self.topics[lane.topic] for lane in lanes if lane.topic in self.topics}
        self.sessions.update(self.topics)
        known = {topic.lane for topic in topics} | {lane.lane for lane in lanes}
        self.lines.keep(known)
        self._context.all_lines.keep(known)
        self.leader.keep_words(known)
        self.brokers.update(self._directory.members.all(), lanes)
        ranges = self._ranges = self._directory.ranges.all()
        self.moving.update(members, ranges)
        trims = self._directory.topics.trims()
        self.retention.update(self.topics, ranges, trims, self._directory.tiers.all())
        self.ranges.update(ranges, trims)
        self.repair.update(members)
        self.leader.advance(self._directory.elections.started_epoch())
        self._take_stock()

    def _take_stock(self) -> None:
        """After copies came, went or changed: say how far they go, and see which ones follow."""
        for copy in self.ranges.copies.values():
            self.sessions.tidy(copy.range_.lane)
            if copy.range_.open and (self._has_begun_well(copy) or self._accept_loss(copy)):
                self._begin_counting(copy)
            self.commits.publish(copy)
        copies = self.ranges.copies.values()
        lanes = {copy.range_.lane for copy in copies}
        self.leader.keep(lanes)
        self.sessions.keep(lanes)
        self._stock = _Stock(
            following=[copy for copy in copies if self.ranges.follows(copy)],
            open=[copy for copy in copies if copy.range_.open],
            lacking=[copy for copy in copies if not copy.range_.open and not copy.complete],
        )

    def _has_begun_well(self, copy: Copy) -> bool:
        return copy.whole and copy.tags not in self.lines

    def _accept_loss(self, copy: Copy) -> bool:
        """If there is one, an operator said so, and the disk takes it."""
        if not copy.log.damage or copy.busy or self.ranges.follows(copy):
            return False
        return self._directory.ranges.loss_accepted(copy.range_.lane) and self.ranges.accept_loss(copy)

    def _begin_counting(self, copy: Copy) -> None:
        """The first line of a copy. What recovery found may not have been synced by the incarnation that wrote it."""
        if copy.log.dirty:
            self.commits.sync(copy)
            return
        try:
            self.lines.add(copy.tags, copy.log.synced, self.sessions.on_disk(copy.range_.lane))
        except TooMany as error:
            self.journal.warn("out of lines", reason=str(error))
            self.deposed = True  # the next incarnation has a table of its own
            return
        self._context.env.steps.at(Step.REPLICA_COUNTING)
        self._context.env.bell.ring("sequencer")

    # --- the pass -----------------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """One pass; True if there may be more to do at once.

        After a lone entry there is not: the writer of the next one rings.
        """
        if self.deposed:
            return False
        now_us = self._context.env.clock.now_us()
        if now_us >= self._due.beat_us:
            self._due.beat_us = now_us + _BEAT_US
            self.lines.heartbeat.advance(self.lines.heartbeat.value + 1)
        if now_us >= self._due.store_us:
            self._look(now_us)
        self.leader.advance(0)
        moved = self._follow(now_us)
        if not moved and now_us >= self._due.look_us:
            self._look(now_us)
            moved = self._follow(now_us)
        if moved == 1 and now_us < self._due.tend_us:
            return False
        self._due.tend_us = now_us + _TEND_US
        return self._tend(now_us, idle=not moved) or moved > 1

    def _look(self, now_us: int) -> None:
        self._due.store_us = now_us + int(self.settings.store_poll_ms * 1_000)
        self._due.look_us = now_us + _LOOK_AGAIN_US
        self._refresh()

    def _follow(self, now_us: int) -> int:
        """Take, append, sync, publish, ring. How many entries were taken."""
        takes = self.follower.take([copy for copy in self._stock.following if self._takes_more(copy, now_us)])
        for take in takes:
            if self.commits.append(take.copy, take.entries, take.payloads):
                take.copy.unsynced_bytes += take.size
                self.counters.entries += len(take.entries)
                self.counters.bytes += take.size
        for copy in self._stock.following:
            self.commits.sync(copy)
        self._ring()
        return sum(len(take.entries) for take in takes)

    def _takes_more(self, copy: Copy, now_us: int) -> bool:
        """Whether a copy may take what was ordered. While a sync is under way some more may wait for the next one."""
        if copy.behind or copy.doubtful or copy.reading or copy.unsynced_bytes > COMMIT_BYTES_MAX:
            return False
        return copy.tags in self.lines and self.health.may_try(copy.tags, now_us)

    def _ring(self) -> None:
        """Wake brokers and replicas that wait for the lines that moved."""
        bell = self._context.env.bell
        if self.commits.take_news():
            self.brokers.ring_waiting(bell)
        for ref in self.commits.take_late(self.member.ref):
            bell.ring(ref.region_prefix)
        self.commits.mark()

    # --- beside following ---------------------------------------------------------------------------------------------
    def _tend(self, now_us: int, idle: bool) -> bool:
        """A little of everything else. True if there is more to do at once."""
        if self.commits.take_missed():
            self.ranges.miss_folders()
            self._take_stock()
        moved = self.ranges.step()
        if moved:
            self._take_stock()
        moved |= self._complete(now_us)
        self.scrubber.step(now_us, idle)
        if now_us >= self._due.sessions_us:
            self._due.sessions_us = now_us + _SESSIONS_US
            for copy in self._stock.following:
                self.sessions.look(copy, self.leader)
                self.commits.roll(copy, now_us)
            if self.retention.look(now_us):
                self._take_stock()
            self._look_for_folder()
            if self.moving.look(now_us):
                self.ranges.update(self._ranges, self._directory.topics.trims())
                self._take_stock()
        self._ring()
        return moved

    def _look_for_folder(self) -> None:
        """Without its folder this incarnation ends; the next one has an empty disk, and says so by another id."""
        with suppress(EmbarcaderoError):
            if self._has_identity and not self._context.disk.exists(IDENTITY_FILE):
                self.journal.warn("its folder is gone", do="find out who removed it; copies come from other replicas")
                self.deposed = True

    def _complete(self, now_us: int) -> bool:
        """Have copies completed by what peers have; finish those that are whole."""
        for copy in self._stock.lacking:
            self._sync_rest(copy, now_us)
            self.ranges.settle(copy)
            if copy.complete:
                self.moving.completed(copy)
        lacking = [copy for copy in self._stock.lacking if not copy.complete and copy.tags in self.ranges.copies]
        self._stock = stock = replace(self._stock, lacking=lacking)
        self.health.lacking(bool(lacking) or any(copy.log.damage for copy in stock.open))
        return self.repair.step([*stock.open, *lacking], now_us)

    def _sync_rest(self, copy: Copy, now_us: int) -> None:
        """What was appended and not synced when its range was sealed: no pass follows it any more."""
        end = copy.range_.end
        if copy.log.dirty and end is not None and copy.log.end <= end and self.commits.may_try(copy, now_us):
            self.commits.sync(copy)

    def next_deadline_us(self) -> int:
        """When to be called again at the latest, without a ring."""
        return min(self._due.beat_us, self._due.store_us, self._due.sessions_us)

    # --- for metrics --------------------------------------------------------------------------------------------------
    def count_ranges(self) -> dict[str, int]:
        """How many copies there are, by state."""
        copies = self.ranges.copies.values()
        open_, complete = sum(copy.range_.open for copy in copies), sum(copy.complete for copy in copies)
        states = {"open": open_, "complete": complete, "incomplete": len(copies) - open_ - complete}
        return states | {"not opened": self.ranges.opening}

    def lags(self) -> dict[int, int]:
        """How many batches each followed lane is behind the order."""
        synced = {copy.range_.lane: copy.log.synced for copy in self._stock.following}
        found = {lane: (self.follower.ordered(lane), line) for lane, line in synced.items()}
        return {lane: max(0, ordered - line) for lane, (ordered, line) in found.items() if ordered is not None}

    def disk_bytes(self) -> int:
        """Bytes of all segments that are open here."""
        return sum(info.bytes for copy in self.ranges.copies.values() for info in copy.log.segments)

    def free_bytes(self) -> int:
        """Room on the disk; 0 when it can't be told."""
        try:
            return self._context.disk.free_bytes()
        except EmbarcaderoError:
            return 0

    def close(self) -> None:
        """Let go of all files; what was appended last and not synced is not counted by anybody."""
        self.repair.close()
        self.ranges.close()


# --- the driver -------------------------------------------------------------------------------------------------------
class StopEvent(Protocol):
    """Is set when the replica is to end."""

    def is_set(self) -> bool: ...


class ReplicaBell(Protocol):
    """A doorbell that can be waited for."""

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None: ...


async def serve_replica(replica: Replica, bell: ReplicaBell, stop: StopEvent) -> None:
    """Run until stopped or deposed. What was appended is synced before it ends."""
    idle_wait_s = replica.settings.idle_wait_ms / 1_000

    def rung() -> bool:
        return replica.poll() or replica.deposed

    try:
        while not stop.is_set() and not replica.deposed:
            moved = replica.poll()
            await bell.wait(0 if moved else idle_wait_s, rung)
        if replica.deposed:
            replica.journal.warn("deposed", reason="it was taken for dead, or replaced")
        else:
            replica.journal.note("left", commits=replica.counters.commits, entries=replica.counters.entries)
    finally:
        replica.close()
