"""The replica's logic: no files of its own, no clock, no threads. The driver and the simulator run the same code.

One pass: take what was ordered since the last one (follow.py), append it, have it synced, publish the durable lines
(copies.py), ring those who wait for them (follow.py). Beside that, a little at a time: see what the store says
(ranges.py), copy from other replicas' files what left the fabric (repair.py), keep session checkpoints (sessions.py),
give up what was trimmed (retention.py), take over what leaves another replica (moving.py), and look through old files
for damage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from embarcadero.config import DEFAULTS, Config, FabricSizes
from embarcadero.env import NO_STEPS, Clock, Disk, Doorbell, Journal, SilentJournal, Steps, Workers
from embarcadero.errors import EmbarcaderoError, TooMany
from embarcadero.fabric.durability import DurableLines, create_durable
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.region import Fabric
from embarcadero.limits import HEARTBEAT_S
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import NOT_SEEN
from embarcadero.replica.copies import Commits, Copy, Health, ReplicaCounters
from embarcadero.replica.follow import COMMIT_BYTES_MAX, BrokerRegions, Follower
from embarcadero.replica.ranges import Moving, Ranges
from embarcadero.replica.repair import Repair
from embarcadero.replica.retention import Retention, Sessions
from embarcadero.steps import Step
from embarcadero.storage.folder import IDENTITY_FILE
from embarcadero.storage.repair import Found, Scrub
from embarcadero.storage.writing import RangeSettings
from embarcadero.types import Range, ReplicaMember, ReplicaState, Topic

_LOOK_AGAIN_US: Final = 2_000
"""Looking whether the store has changed is cheap, but not as cheap as finding nothing to do."""

_TEND_US: Final = 5_000
"""While entries come one by one, what is beside following waits this long at most."""
_SESSIONS_US: Final = 100_000
_IDLE_US: Final = 100_000
_SCRUB_ANYWAY_US: Final = 10_000_000
_BEAT_US: Final = int(HEARTBEAT_S * 1_000_000)


class Replica:
    """One incarnation of one replica. `deposed` is set when another one has its place, or it was taken for dead."""

    def __init__(
        self,
        fabric: Fabric,
        directory: Directory,
        clock: Clock,
        bell: Doorbell,
        workers: Workers,
        disk: Disk,
        member: ReplicaMember,
        sizes: FabricSizes,
        journal: Journal | None = None,
        config: Config = DEFAULTS,
        disks: Callable[[ReplicaMember], Disk] | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._steps = steps = steps or NO_STEPS
        self.member, self.settings, self.sizes = member, config.replica, sizes
        self.journal = journal or SilentJournal()
        self._directory, self._clock, self._bell, self._disk = directory, clock, bell, disk
        self.counters = ReplicaCounters()
        self.deposed = False
        self.lines = create_durable(fabric, member.ref)
        self.health = Health(self.lines.health, self.journal)
        self._everybodys = lines = DurableLines(fabric)
        self.commits = Commits(fabric, self.lines, lines, workers, clock, self.health, self.counters, steps)
        self.leader = LeaderView(fabric, steps=steps)
        self.brokers = BrokerRegions(fabric, self._refresh)
        self.follower = Follower(self.leader, self.brokers)
        settings = RangeSettings(
            cluster=directory.log_id, segment_bytes=self.settings.segment_bytes,
            segment_age_s=self.settings.segment_s,
        )  # fmt: skip
        self.ranges = Ranges(disk, member, settings, clock, self.health, self.journal, self.counters, steps)
        self.sessions = Sessions(fabric, disk, self.lines, clock, self.journal, self.counters)
        self.ranges.folder_gone = self.sessions.forget
        self.repair = Repair(
            self.ranges, self.commits, self.leader, lines, workers, member, disks, clock, self.journal,
            self.counters, self.settings.repair_bytes_per_s,
        )  # fmt: skip
        self.repair.on_change = self._take_stock
        self.retention = Retention(
            member.ref, self.ranges, self.sessions, lines, directory, clock, self.journal, self.counters
        )  # fmt: skip
        self.moving = Moving(
            self.ranges, self.leader, directory, member, self.journal, config.placement.replace_after_s
        )
        self.repair.on_give_up = self.moving.gave_up
        self.topics: dict[int, Topic] = {}  # by lane, those of brokers too
        self._ranges: list[Range] = []
        self._revision, self._outline = -1, NOT_SEEN
        self._beat_us = self._store_us = self._look_us = self._sessions_us = self._tend_us = 0
        self._following: list[Copy] = []
        self._open_copies: list[Copy] = []
        self.scrub = Scrub(clock, self.settings.scrub_bytes_per_s)
        self._workers, self._scrubbing, self._busy_us, self._scrubbed_us = workers, False, 0, clock.now_us()
        self._has_identity = disk.exists(IDENTITY_FILE)
        self._lacking: list[Copy] = []  # sealed ranges that are not all here
        self._refresh()

    # --- the world around ---------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        """Learn from the store, if it changed."""
        revision = self._directory.revision()
        if revision == self._revision:
            return
        if (outline := self._directory.outline()) == self._outline:
            self.leader.advance(self._directory.started_epoch())
        else:
            self._outline = NOT_SEEN  # the store may cease to answer half-way: then all of it is read again
            self._read_all()
        self._revision, self._outline = revision, outline

    def _read_all(self) -> None:
        members = self._directory.replicas()
        me = next((m for m in members if m.ref == self.member.ref), None)
        self.deposed |= me is None or me.state is ReplicaState.DEAD
        self.deposed |= any(
            m.replica == self.member.replica and m.incarnation > self.member.incarnation for m in members
        )
        if self.deposed:
            return
        self._everybodys.forget_removed()
        lanes, topics = self._directory.lanes(), self._directory.topics()
        self.topics = {topic.lane: topic for topic in topics}
        self.topics |= {lane.lane: self.topics[lane.topic] for lane in lanes if lane.topic in self.topics}
        self.sessions.topics = self.topics
        known = {topic.lane for topic in topics} | {lane.lane for lane in lanes}
        self.lines.keep(known)
        self._everybodys.keep(known)
        self.leader.keep_words(known)
        self.brokers.update(self._directory.members(), lanes)
        ranges = self._ranges = self._directory.ranges()
        self.moving.update(members, ranges)
        trims = self._directory.trims()
        self.retention.update(self.topics, ranges, trims, self._directory.tiers())
        self.ranges.update(ranges, trims)
        self.repair.update(members)
        self.leader.advance(self._directory.started_epoch())
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
        self._following = [copy for copy in copies if self.ranges.follows(copy)]
        self._open_copies = [copy for copy in copies if copy.range_.open]
        self._lacking = [copy for copy in copies if not copy.range_.open and not copy.complete]

    def _has_begun_well(self, copy: Copy) -> bool:
        return copy.whole and copy.tags not in self.lines

    def _accept_loss(self, copy: Copy) -> bool:
        """If there is one, an operator said so, and the disk takes it."""
        if not copy.log.damage or copy.busy or self.ranges.follows(copy):
            return False
        return self._directory.loss_accepted(copy.range_.lane) and self.ranges.accept_loss(copy)

    def _begin_counting(self, copy: Copy) -> None:
        """The first line of a copy. What recovery found may not have been synced by whoever wrote it."""
        if copy.log.dirty:
            self.commits.sync(copy)
            return
        try:
            self.lines.add(copy.tags, copy.log.synced, self.sessions.on_disk(copy.range_.lane))
        except TooMany as error:
            self.journal.warn("out of lines", reason=str(error))
            self.deposed = True  # the next incarnation has a table of its own
            return
        self._steps.at(Step.REPLICA_COUNTING)
        self._bell.ring("sequencer")

    # --- the pass -----------------------------------------------------------------------------------------------------
    def poll(self) -> bool:
        """One pass; True if there may be more to do at once.

        After a lone entry there is not: whoever orders the next one rings.
        """
        if self.deposed:
            return False
        now_us = self._clock.now_us()
        if now_us >= self._beat_us:
            self._beat_us = now_us + _BEAT_US
            self.lines.heartbeat.advance(self.lines.heartbeat.value + 1)
        if now_us >= self._store_us:
            self._look(now_us)
        self.leader.advance(0)
        moved = self._follow(now_us)
        if not moved and now_us >= self._look_us:
            self._look(now_us)
            moved = self._follow(now_us)
        if moved == 1 and now_us < self._tend_us:
            return False
        self._tend_us = now_us + _TEND_US
        return self._tend(now_us, idle=not moved) or moved > 1

    def _look(self, now_us: int) -> None:
        self._store_us = now_us + int(self.settings.store_poll_ms * 1_000)
        self._look_us = now_us + _LOOK_AGAIN_US
        self._refresh()

    def _follow(self, now_us: int) -> int:
        """Take, append, sync, publish, ring. How many entries were taken."""
        takes = self.follower.take([copy for copy in self._following if self._takes_more(copy, now_us)])
        for take in takes:
            if self.commits.append(take.copy, take.entries, take.payloads):
                take.copy.unsynced_bytes += take.size
                self.counters.entries += len(take.entries)
                self.counters.bytes += take.size
        for copy in self._following:
            self.commits.sync(copy)
        self._tell()
        return sum(len(take.entries) for take in takes)

    def _takes_more(self, copy: Copy, now_us: int) -> bool:
        """Whether a copy may take what was ordered. While a sync is under way some more may wait for the next one."""
        if copy.behind or copy.doubtful or copy.reading or copy.unsynced_bytes > COMMIT_BYTES_MAX:
            return False
        return copy.tags in self.lines and self.health.may_try(copy.tags, now_us)

    def _tell(self) -> None:
        """Wake those who wait for the lines that moved."""
        if self.commits.news:
            self.commits.news = False
            self.brokers.ring_those_who_wait(self._bell)
        while self.commits.lone:
            for ref in self.commits.late(self.commits.lone.pop(), self.member.ref):
                self._bell.ring(ref.region_prefix)
        self.commits.mark()

    # --- beside following ---------------------------------------------------------------------------------------------
    def _tend(self, now_us: int, idle: bool) -> bool:
        """A little of everything else. True if there is more to do at once."""
        if self.commits.missed:
            self.commits.missed = False
            self._miss_folders()
        moved = self.ranges.step()
        if moved:
            self._take_stock()
        moved |= self._complete(now_us)
        self._scrub(now_us, idle)
        if now_us >= self._sessions_us:
            self._sessions_us = now_us + _SESSIONS_US
            for copy in self._following:
                self.sessions.look(copy, self.leader)
                self.commits.roll(copy, now_us)
            if self.retention.look(now_us):
                self._take_stock()
            self._look_for_folder()
            if self.moving.look(now_us):
                self.ranges.update(self._ranges, self._directory.trims())
                self._take_stock()
        self._tell()
        return moved

    def _look_for_folder(self) -> None:
        """Without its folder this incarnation ends; the next one has an empty disk, and says so by another id."""
        with suppress(EmbarcaderoError):
            if self._has_identity and not self._disk.exists(IDENTITY_FILE):
                self.journal.warn("its folder is gone", do="find out who removed it; copies come from other replicas")
                self.deposed = True

    def _complete(self, now_us: int) -> bool:
        """Have copies completed by what peers have; finish those that are whole."""
        for copy in self._lacking:
            self._sync_rest(copy, now_us)
            self.ranges.settle(copy)
            if copy.complete:
                self.moving.completed(copy)
        self._lacking = [copy for copy in self._lacking if not copy.complete and copy.tags in self.ranges.copies]
        self.health.lacking(bool(self._lacking) or any(copy.log.damage for copy in self._open_copies))
        return self.repair.step([*self._open_copies, *self._lacking], now_us)

    def _sync_rest(self, copy: Copy, now_us: int) -> None:
        """What was appended and not synced when its range was sealed: nobody follows it any more."""
        end = copy.range_.end
        if copy.log.dirty and end is not None and copy.log.end <= end and self.commits.may_try(copy, now_us):
            self.commits.sync(copy)

    def _scrub(self, now_us: int, idle: bool) -> None:
        """Look through a piece of old files, in idle moments; now and then also if there are none."""
        if not idle:
            self._busy_us = now_us
        rested = now_us - self._busy_us >= _IDLE_US or now_us - self._scrubbed_us >= _SCRUB_ANYWAY_US
        if self._scrubbing or not rested or not self.scrub.due or self.ranges.opening:
            return
        self._scrubbing, self._scrubbed_us = True, now_us
        copies = [copy for copy in self.ranges.copies.values() if copy.whole and not copy.busy]
        job = self.scrub.job([copy.log for copy in copies])
        for copy in copies:
            copy.scrubbing = copy.log is self.scrub.log
        self._workers.run(job, partial(self._scrubbed, copies))

    def _scrubbed(self, copies: list[Copy], result: list[Found] | Exception) -> None:
        self._scrubbing = False
        for copy in copies:
            copy.scrubbing = False
        if isinstance(result, Exception):
            self.journal.warn("scrub failed", reason=str(result))
            return
        self.counters.scrubbed_bytes = self.scrub.checked_bytes
        try:
            damage = self.scrub.note([copy.log for copy in copies], result)
        except EmbarcaderoError as error:
            if not self._miss_folders():
                self.journal.warn("scrub failed", reason=str(error))
            return
        if damage:
            self.counters.damage_found += len(damage)
            self.journal.warn("damage found by scrub", pieces=len(damage), where=damage[0].name)
            for copy in self.ranges.copies.values():
                copy.complete &= not copy.log.damage
            self._take_stock()

    def _miss_folders(self) -> bool:
        """Whether somebody removed folders of copies: those begin anew."""
        gone = self.ranges.miss_folders()
        self._take_stock()
        return gone > 0

    def next_deadline_us(self) -> int:
        """When to be called again at the latest, though nobody rings."""
        return min(self._beat_us, self._store_us, self._sessions_us)

    # --- for those who watch ------------------------------------------------------------------------------------------
    def count_ranges(self) -> dict[str, int]:
        """How many copies there are, by state."""
        copies = self.ranges.copies.values()
        open_, complete = sum(copy.range_.open for copy in copies), sum(copy.complete for copy in copies)
        states = {"open": open_, "complete": complete, "incomplete": len(copies) - open_ - complete}
        return states | {"not opened": self.ranges.opening}

    def lags(self) -> dict[int, int]:
        """How many batches each followed lane is behind the order."""
        synced = {copy.range_.lane: copy.log.synced for copy in self._following}
        found = {lane: (self.follower.ordered(lane), line) for lane, line in synced.items()}
        return {lane: max(0, ordered - line) for lane, (ordered, line) in found.items() if ordered is not None}

    def disk_bytes(self) -> int:
        """Bytes of all segments that are open here."""
        return sum(info.bytes for copy in self.ranges.copies.values() for info in copy.log.segments)

    def free_bytes(self) -> int:
        """Room on the disk; 0 when it can't be told."""
        try:
            return self._disk.free_bytes()
        except EmbarcaderoError:
            return 0

    def close(self) -> None:
        """Let go of all files; what was appended last and not synced is not counted by anybody."""
        self.repair.close()
        self.ranges.close()
