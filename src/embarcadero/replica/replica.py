"""The replica's logic, without files, clock or threads of its own.

The driver and the simulator run the same code. One pass: take newly ordered entries, append and sync them, publish the
durable lines, and ring the brokers and replicas that wait for them (copies.py). Besides that, in small steps: read the
store and take over ranges of other replicas (ranges.py); copy records that left the fabric from other replicas' files
and scrub old files (repair.py); keep session checkpoints and drop trimmed records (retention.py).
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
"""Checking the store for changes is cheap, but more expensive than an idle pass."""

_TEND_US: Final = 5_000
"""While entries arrive one by one, other tasks wait at most this long."""
_SESSIONS_US: Final = 100_000
_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)


@dataclass(slots=True)
class _Due:
    """When each task is due."""

    beat_us: int = 0
    store_us: int = 0
    look_us: int = 0
    sessions_us: int = 0
    tend_us: int = 0


@dataclass(frozen=True, slots=True)
class _Stock:
    """Copies by the task that they need."""

    following: list[Copy] = field(default_factory=list)
    open: list[Copy] = field(default_factory=list)
    lacking: list[Copy] = field(default_factory=list)  # incomplete copies of sealed ranges


class Replica:
    """One incarnation of one replica. `deposed` is set when another one replaced it, or it was declared dead."""

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
        self.topics: dict[int, Topic] = {}  # by lane, including lanes of brokers
        self._ranges: list[Range] = []
        self._watch = StoreWatch(context.directory)
        self._due = _Due()
        self._stock = _Stock()
        self._has_identity = context.disk.exists(IDENTITY_FILE)
        self._refresh()

    # --- facts --------------------------------------------------------------------------------------------------------
    @property
    def leader(self) -> LeaderView:
        """The replica's view of the leader."""
        return self._context.leader

    @property
    def member(self) -> ReplicaMember:
        """This incarnation's record in the store."""
        return self._context.member

    @property
    def settings(self) -> Settings:
        """The replica's settings."""
        return self._context.config.replica

    @property
    def journal(self) -> Journal:
        """The journal of events."""
        return self._context.env.journal

    @property
    def counters(self) -> ReplicaCounters:
        """The replica's counters."""
        return self._context.counters

    @property
    def health(self) -> Health:
        """The trouble of its disk."""
        return self._context.health

    @property
    def lines(self) -> TaggedWriter:
        """The replica's durable lines."""
        return self._context.lines

    # --- changes in the store -----------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Read the store if it changed."""
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
        """After a change of copies: publish their lines, and collect those that follow a lane."""
        for copy in self.ranges.copies.values():
            self.sessions.tidy(copy.range_.lane)
            if copy.range_.open and (self._may_start_counting(copy) or self._accept_loss(copy)):
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

    def _may_start_counting(self, copy: Copy) -> bool:
        return copy.whole and copy.tags not in self.lines

    def _accept_loss(self, copy: Copy) -> bool:
        """Accept the loss in a copy, if there is damage, an operator accepted it, and the disk takes the write."""
        if not copy.log.damage or copy.busy or self.ranges.follows(copy):
            return False
        return self._directory.ranges.loss_accepted(copy.range_.lane) and self.ranges.accept_loss(copy)

    def _begin_counting(self, copy: Copy) -> None:
        """Sync a recovered copy, then publish its first line: the earlier incarnation may not have synced all of it."""
        if copy.log.dirty:
            self.commits.sync(copy)
            return
        try:
            self.lines.add(copy.tags, copy.log.synced, self.sessions.on_disk(copy.range_.lane))
        except TooMany as error:
            self.journal.warn("no free durable line", reason=str(error))
            self.deposed = True  # the next incarnation has its own table
            return
        self._context.env.steps.at(Step.REPLICA_COUNTING)
        self._context.env.bell.ring("sequencer")

    # --- the pass -----------------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """Run one pass. True if there may be more work now.

        After a single entry the result is False: the writer of the next one rings.
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
        """Read, append, sync, publish, ring. Returns how many entries were taken."""
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
        """Return whether a copy may take more entries. During a sync, some more may wait for the next one."""
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

    # --- other tasks --------------------------------------------------------------------------------------------------
    def _tend(self, now_us: int, idle: bool) -> bool:
        """Run a step of each other task. True if there is more work now."""
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
        """End this incarnation if its folder is missing. The next one has an empty disk with another id."""
        with suppress(EmbarcaderoError):
            if self._has_identity and not self._context.disk.exists(IDENTITY_FILE):
                do = "find out who removed it; copies come from other replicas"
                self.journal.warn("its folder is missing", do=do)
                self.deposed = True

    def _complete(self, now_us: int) -> bool:
        """Complete copies from peers, and finish those that are complete."""
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
        """Sync records that were unsynced when their range was sealed: no other pass would do that."""
        end = copy.range_.end
        if copy.log.dirty and end is not None and copy.log.end <= end and self.commits.may_try(copy, now_us):
            self.commits.sync(copy)

    def next_deadline_us(self) -> int:
        """Return when the next pass is due without a ring."""
        return min(self._due.beat_us, self._due.store_us, self._due.sessions_us)

    # --- for metrics --------------------------------------------------------------------------------------------------
    def count_ranges(self) -> dict[str, int]:
        """Return the number of copies by state."""
        copies = self.ranges.copies.values()
        open_, complete = sum(copy.range_.open for copy in copies), sum(copy.complete for copy in copies)
        states = {"open": open_, "complete": complete, "incomplete": len(copies) - open_ - complete}
        return states | {"not opened": self.ranges.opening}

    def lags(self) -> dict[int, int]:
        """Return how many batches each followed lane is behind the order."""
        synced = {copy.range_.lane: copy.log.synced for copy in self._stock.following}
        found = {lane: (self.follower.ordered(lane), line) for lane, line in synced.items()}
        return {lane: max(0, ordered - line) for lane, (ordered, line) in found.items() if ordered is not None}

    def disk_bytes(self) -> int:
        """Return the bytes of all segments that are open here."""
        return sum(info.bytes for copy in self.ranges.copies.values() for info in copy.log.segments)

    def free_bytes(self) -> int:
        """Return the free bytes on the disk, or 0 if unknown."""
        try:
            return self._context.disk.free_bytes()
        except EmbarcaderoError:
            return 0

    def close(self) -> None:
        """Close all files. Appended data that is not synced was never counted."""
        self.repair.close()
        self.ranges.close()


# --- the driver -------------------------------------------------------------------------------------------------------
class StopEvent(Protocol):
    """Set when the replica must end."""

    def is_set(self) -> bool: ...


class ReplicaBell(Protocol):
    """A doorbell that its owner can wait for."""

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None: ...


async def serve_replica(replica: Replica, bell: ReplicaBell, stop: StopEvent) -> None:
    """Run until stopped or deposed. Appended data is synced at the end."""
    idle_wait_s = replica.settings.idle_wait_ms / 1_000

    def rung() -> bool:
        return replica.poll() or replica.deposed

    try:
        while not stop.is_set() and not replica.deposed:
            moved = replica.poll()
            await bell.wait(0 if moved else idle_wait_s, rung)
        if replica.deposed:
            replica.journal.warn("deposed", reason="declared dead, or replaced")
        else:
            replica.journal.note("left", commits=replica.counters.commits, entries=replica.counters.entries)
    finally:
        replica.close()
