"""A replica's copies of ranges: entries are read from the fabric, appended, synced, and only then reported.

The order of loads is the safety argument: ordered frontier, entries, payload copies (each checked against its chunk and
its checksum), fence, and last whether the writer of the order is still valid. A sequencer is valid if no later epoch is
open. The writer of a broker's lane is valid if no sequencer counts that incarnation as closed. Only then is anything
appended. Everything in a replica's files is therefore in the one order, whichever sequencer takes over. The durable
line moves after the sync.

`Health` tracks disk trouble: a copy that cannot be written stops counting, and is retried later. `ReplicaCounters` are
plain numbers, updated once per commit or per piece of repair.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from embarcadero.config import Config
from embarcadero.env import COUNTS, LATENCY_US, Disk, Doorbell, Env, Histogram, Journal, Missing, Part
from embarcadero.errors import BadSegment, DiskFull, EmbarcaderoError
from embarcadero.fabric.layout import LINE, ORDER, BrokerLine, Entries, fold_line, frontier_offset
from embarcadero.fabric.leader import DurableLines, LeaderView, create_durable, durable_through, first_woken
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, RingReader, TaggedWriter
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import Fabric, attach_unless_removed, broker_frontiers_region
from embarcadero.limits import BROKER_LANES_FIRST, MIB
from embarcadero.placement.directory import Directory
from embarcadero.steps import Step
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.segment import Damage, DamageKind
from embarcadero.types import Member, MemberState, Range, RangeKey, ReplicaMember, ReplicaRef, TopicLane, Trouble
from embarcadero.wire.codec import payload_crc


class ReplicaCounters:
    """Counters of one incarnation."""

    def __init__(self) -> None:
        self.entries = self.bytes = 0  # appended from the fabric
        self.commits = 0
        self.commit_entries = Histogram(COUNTS)
        self.sync_us = Histogram(LATENCY_US)
        self.repaired_entries = self.repaired_bytes = 0  # appended from other replicas' files
        self.damage_found = 0
        self.disk_errors = 0
        self.checkpoints = 0
        self.dropped_bytes = 0  # by trims and retention
        self.ranges_removed = 0
        self.scrubbed_bytes = 0


_RETRY_US_FIRST = 100_000
_RETRY_US_MAX = 3_000_000
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def trouble_of(error: Exception) -> Trouble:
    """Return the kind of trouble that a disk error means."""
    if isinstance(error, DiskFull):
        return Trouble.DISK_FULL
    if isinstance(error, BadSegment):
        return Trouble.DAMAGED
    cause = error.__cause__ if isinstance(error, EmbarcaderoError) else error
    return Trouble.READ_ONLY if isinstance(cause, OSError) and cause.errno in _REFUSED else Trouble.DISK_FAILED


@dataclass(slots=True)
class _CopyTrouble:
    trouble: Trouble
    retry_us: int
    wait_us: int


class Health:
    """The trouble of each copy. All of it together is the published health word."""

    def __init__(self, word: FrontierWriter, journal: Journal) -> None:
        self._word, self._journal = word, journal
        self._ill: dict[RangeKey, _CopyTrouble] = {}
        self._lacking = False
        self.reason = ""  # of the latest trouble

    @property
    def trouble(self) -> Trouble:
        """All current trouble."""
        return Trouble(self._word.value)

    def may_try(self, tags: RangeKey, now_us: int) -> bool:
        """Return whether a copy is healthy, or due for a retry."""
        ill = self._ill.get(tags)
        return ill is None or now_us >= ill.retry_us

    def failed(self, tags: RangeKey, error: Exception, doing: str, now_us: int) -> None:
        """Record a failed operation. The copy reports no progress until the operation succeeds."""
        before, found = self._ill.get(tags), trouble_of(error)
        self.reason = str(error)
        if before is None or before.trouble != found:
            self._journal.warn(
                "disk trouble", trouble=found.name, doing=doing, lane=tags[0], range=tags[1], reason=self.reason
            )
        wait_us = min(2 * before.wait_us, _RETRY_US_MAX) if before else _RETRY_US_FIRST
        self._ill[tags] = _CopyTrouble(found, now_us + wait_us, wait_us)
        self._publish()

    def worked(self, tags: RangeKey) -> None:
        """Clear a copy's trouble after a success, or when the copy is removed."""
        if (ill := self._ill.pop(tags, None)) is not None:
            self._journal.note("disk trouble is over", was=ill.trouble.name, lane=tags[0], range=tags[1])
            self._publish()

    def keep(self, tags: set[RangeKey]) -> None:
        """Clear the trouble of all other copies, which this replica no longer has."""
        for gone in self._ill.keys() - tags:
            self.worked(gone)

    def lacking(self, now: bool) -> None:
        """Record whether copies are damaged or incomplete, and in repair."""
        if now != self._lacking:
            self._lacking = now
            self._publish()

    def _publish(self) -> None:
        word = int(Trouble.DAMAGED) if self._lacking else 0
        for ill in self._ill.values():
            word |= ill.trouble
        if word != self._word.value:
            self._word.restart(word)


class Copy:
    """The copy of one range. `range_` is the range's record in the store; `log` has the files."""

    def __init__(self, range_: Range, log: RangeLog) -> None:
        self.range_, self.log = range_, log
        self.tags = range_.key
        self.behind = False  # the next entries left the fabric: another replica's files have them
        self.syncing = False
        self.reading = False  # a worker reads a piece of another replica's files
        self.scrubbing = False  # a worker scrubs its old files; appends and syncs may continue
        self.unsynced_bytes = 0  # appended since the last sync began
        self.complete = False  # sealed, completely copied and synced
        self.reported = 0  # how far the range was durable when this replica last rang the waiting brokers

    @property
    def busy(self) -> bool:
        """Whether a worker uses the copy: its files must not be cut, sealed or closed now."""
        return self.syncing or self.reading or self.scrubbing

    @property
    def doubtful(self) -> bool:
        """Whether a sync failed: only data that was synced before is trusted."""
        return self.log.failed

    @property
    def in_place(self) -> Damage | None:
        """The first damage to repair in place. A damaged tail is appended again instead."""
        found = [damage for damage in self.log.damage if damage.kind is not DamageKind.TAIL]
        return min(found, key=lambda damage: damage.first, default=None)

    @property
    def whole(self) -> bool:
        """Whether no part that the copy once had is damaged."""
        return not self.log.damage and not self.log.failed


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """State that the parts of one replica incarnation share."""

    env: Env
    fabric: Fabric
    directory: Directory
    disk: Disk
    member: ReplicaMember
    config: Config
    lines: TaggedWriter  # this incarnation's durable lines
    all_lines: DurableLines  # the lines of all replicas
    leader: LeaderView
    health: Health
    counters: ReplicaCounters

    @staticmethod
    def create(
        env: Env, fabric: Fabric, directory: Directory, disk: Disk, member: ReplicaMember, config: Config
    ) -> ReplicaContext:
        """Start an incarnation with an empty table of durable lines."""
        lines = create_durable(fabric, member.ref)
        return ReplicaContext(
            env,
            fabric,
            directory,
            disk,
            member,
            config,
            lines,
            DurableLines(fabric),
            LeaderView(fabric, steps=env.steps),
            Health(lines.health, env.journal),
            ReplicaCounters(),
        )


class Commits:
    """Appends, and group commit: one sync covers everything that was appended while the disk was busy."""

    def __init__(self, context: ReplicaContext) -> None:
        self._fabric, self._steps, self._clock = context.fabric, context.env.steps, context.env.clock
        self.lines, self._all_lines, self._workers = context.lines, context.all_lines, context.env.workers
        self._health, self._counters = context.health, context.counters
        self._files_missed = False  # files of a copy are missing
        self._news = False  # records became durable
        self._unmarked: list[Copy] = []
        self._lone: list[Copy] = []  # copies whose last sync had a single entry

    def take_missed(self) -> bool:
        """Return whether files of a copy were missing since the last call."""
        missed, self._files_missed = self._files_missed, False
        return missed

    def take_news(self) -> bool:
        """Return whether records became durable since the last call."""
        news, self._news = self._news, False
        return news

    def take_late(self, me: ReplicaRef) -> Iterator[ReplicaRef]:
        """Yield the replicas that this one must wake, after each sync of a single entry."""
        while self._lone:
            yield from self._late(self._lone.pop(), me)

    def may_try(self, copy: Copy, now_us: int) -> bool:
        """Return whether the disk took this copy's last write, or a retry is due."""
        return self._health.may_try(copy.tags, now_us)

    def append(self, copy: Copy, entries: Entries, payloads: Sequence[Part]) -> bool:
        """Write entries and payloads at the end of a copy. False if the disk did not take them."""
        try:
            copy.log.append(entries, payloads)
        except EmbarcaderoError as error:
            self._failed(copy, error, "append")
            return False
        self._steps.at(Step.REPLICA_APPENDED)
        return True

    def roll(self, copy: Copy, now_us: int) -> None:
        """Start a new segment if the last one is old, so that retention by age can drop it."""
        if copy.busy or not self.may_try(copy, now_us):
            return
        try:
            copy.log.roll_if_due(now_us)
        except EmbarcaderoError as error:
            self._failed(copy, error, "roll")

    def sync(self, copy: Copy) -> None:
        """Sync the appended data, unless a sync is running."""
        if not copy.syncing and not copy.doubtful and copy.log.dirty:
            copy.syncing, copy.unsynced_bytes = True, 0
            done = partial(self._synced, copy, copy.log.synced, self._clock.now_us())
            self._workers.run(copy.log.sync_job(mark=False), done)

    def _synced(self, copy: Copy, before: int, began_us: int, result: int | Exception) -> None:
        copy.syncing = False
        if isinstance(result, Exception):
            self._failed(copy, result, "sync")
            return
        self._unmarked.append(copy)
        if result - before == 1 and copy.range_.durable_on > 1:
            self._lone.append(copy)
        self._steps.at(Step.REPLICA_SYNCED)
        self.publish(copy)
        self._health.worked(copy.tags)
        self._counters.commits += 1
        self._counters.commit_entries.add(result - before)
        self._counters.sync_us.add(self._clock.now_us() - began_us)

    def published(self, copy: Copy) -> int | None:
        """Return the durable line of a copy, or None if it has none."""
        return self.lines.value(copy.tags) if copy.tags in self.lines else None

    def publish(self, copy: Copy) -> None:
        """Publish how far a copy is synced, if the copy counts."""
        if copy.tags in self.lines and copy.whole and copy.log.synced > self.lines.value(copy.tags):
            self.lines.set(copy.tags, copy.log.synced)
            self._news |= self._is_news(copy)
            self._steps.at(Step.REPLICA_LINE)

    def _is_news(self, copy: Copy) -> bool:
        """Return whether more of the range is durable than last reported.

        Replicas that sync the same entries do not all wake the brokers. Each one reads all lines after publishing its
        own. The replica whose line completes the required number sees that, unless an earlier one saw it already.
        """
        if copy.range_.durable_on <= 1:
            return True
        self._fabric.fence()
        through = durable_through(copy.range_, self._all_lines.load(copy.range_))
        more, copy.reported = through > copy.reported, through
        return more

    def _late(self, copy: Copy, me: ReplicaRef) -> list[ReplicaRef]:
        """Return the lagging replicas that this one must wake, if it is among the first that are woken."""
        range_, first = copy.range_, first_woken(copy.range_)
        if len(first) == len(range_.replicas) or me not in first:
            return []
        lines = self._all_lines.load(range_)[len(first) :]
        others = zip(range_.replicas[len(first) :], lines, strict=True)
        return [ref for ref, line in others if line is None or line < copy.log.synced]

    def mark(self) -> None:
        """Record in the files how far they are synced, after the waiting brokers were woken."""
        while self._unmarked:
            self._unmarked.pop().log.note_mark()

    def _failed(self, copy: Copy, error: Exception, doing: str) -> None:
        self._files_missed |= isinstance(error, Missing)
        self._counters.disk_errors += 1
        self._health.failed(copy.tags, error, doing, self._clock.now_us())


COMMIT_BYTES_MAX: Final = 16 * MIB
"""Payload bytes that one commit takes, over all lanes. A batch always fits."""

_LOW: Final = 0xFFFF_FFFF
COMMIT_ENTRIES_MAX: Final = 4_096
"""Entries that one commit takes from one lane."""


class Take(NamedTuple):
    """The entries of one lane for the next commit."""

    copy: Copy
    entries: Entries
    payloads: list[bytes]  # one per entry; empty for an entry without a payload
    size: int
    writer: int  # who ordered the entries: a broker incarnation's region handle, or one of the two constants below


BY_SEQUENCER: Final = -1
BY_STORE: Final = -2
"""The lane is closed: the store has its end, and no writer needs to be checked."""


class BrokerRegions:
    """Regions of brokers: payloads, order rings of their own lanes, and whether they wait for durable lines."""

    def __init__(self, fabric: Fabric, refresh: Callable[[], None]) -> None:
        self._fabric = fabric
        self._logs = BrokerLogs(fabric, refresh)
        self._waiting: dict[str, FrontierReader] = {}  # by region prefix of a live incarnation
        self._lanes: dict[int, TopicLane] = {}
        self._rings: dict[int, RingReader] = {}

    def update(self, members: list[Member], lanes: list[TopicLane]) -> None:
        """Update the known brokers and their lanes."""
        self._logs.update(members)
        live = [member.region_prefix for member in members if member.state is MemberState.LIVE]
        self._waiting = {folder: word for folder, word in self._waiting.items() if folder in live}
        for folder in live:
            if folder not in self._waiting and (
                regions := attach_unless_removed(self._fabric, broker_frontiers_region(folder))
            ):
                self._waiting[folder] = FrontierReader(regions[0], frontier_offset(BrokerLine.DURABLE_WAITING))
        self._lanes = {lane.lane: lane for lane in lanes}
        for number in [n for n in self._rings if n not in self._lanes]:
            del self._rings[number]

    def lane(self, number: int) -> TopicLane | None:
        """Return the record of a broker's lane in the store."""
        return self._lanes.get(number)

    def ring(self, number: int) -> RingReader | None:
        """Return the order ring of a broker's lane, while its region exists."""
        ring, lane = self._rings.get(number), self._lanes.get(number)
        if ring is None and lane is not None and (regions := attach_unless_removed(self._fabric, lane.region)):
            ring = self._rings[number] = RingReader(regions[0], ORDER)
        return ring

    def payload(self, handle: int, location: int, size: int, crc: int) -> bytes | None:
        """Copy a payload and check its checksum. None if it left memory."""
        log = self._logs.of(handle)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def ring_waiting(self, bell: Doorbell) -> None:
        """Wake brokers that wait for durable lines.

        This replica flushed its lines before. A broker announces that it waits before it reads the lines.
        """
        self._fabric.fence()
        for folder, waiting in self._waiting.items():
            if waiting.load():
                bell.ring(folder)


class _OrderSource(NamedTuple):
    ring: RingReader
    ordered: int
    writer: int


class Follower:
    """Reads order rings and broker logs for all copies of open ranges."""

    def __init__(self, leader: LeaderView, brokers: BrokerRegions) -> None:
        self._leader, self._brokers = leader, brokers

    def ordered(self, lane: int) -> int | None:
        """Return how far a lane is ordered, for metrics. None if unknown."""
        source = self._source(lane)
        return None if source is None else source.ordered

    def take(self, copies: list[Copy]) -> list[Take]:
        """Return the entries that these copies lack and may append now."""
        budget, takes = COMMIT_BYTES_MAX, []
        for copy in copies:
            if budget > 0 and (found := self._gather(copy, budget)) is not None:
                takes.append(found)
                budget -= found.size
        if not takes:
            return takes
        self._leader.steps.at(Step.REPLICA_LOADED)
        takes = self._still_valid(takes)
        if takes:
            self._leader.steps.at(Step.REPLICA_CHECKED)
        return takes

    def _source(self, lane: int) -> _OrderSource | None:
        if lane < BROKER_LANES_FIRST:
            ring = self._leader.order(lane)
            return None if ring is None else _OrderSource(ring, ring.frontier.load(), BY_SEQUENCER)
        ring, lane_is = self._brokers.ring(lane), self._brokers.lane(lane)
        if ring is None or lane_is is None:
            return None
        if lane_is.end is not None:
            return _OrderSource(ring, lane_is.end, BY_STORE)
        return _OrderSource(ring, ring.frontier.load(), lane_is.handle)

    def _gather(self, copy: Copy, budget: int) -> Take | None:
        source, start = self._source(copy.range_.lane), copy.log.end
        if source is None or source.ordered <= start:
            return None
        if source.ordered == start + 1:
            return self._gather_one(copy, source, start)
        stop = min(source.ordered, start + min(COMMIT_ENTRIES_MAX, source.ring.slots))
        entries = source.ring.read(start, stop)
        payloads, size = self._payloads(entries, budget)
        if not payloads:
            copy.behind = True  # the slot or the payload left memory: enough other replicas had it on disk
            return None
        return Take(copy, entries[: len(payloads)], payloads, size, source.writer)

    def _gather_one(self, copy: Copy, source: _OrderSource, index: int) -> Take | None:
        """Do the same for a single entry without arrays: a publisher waits for just this one."""
        line = source.ring.line(index)
        size, origin_crc = line[5] & _LOW, line[6]
        whole = line[0] == index and line[7] >> 32 == fold_line(line)
        payload: bytes | None = b""
        if whole and size:
            payload = self._brokers.payload(origin_crc >> 32 & 0xFFFF, line[4] >> 32, size, origin_crc & _LOW)
        if not whole or payload is None:
            copy.behind = True
            return None
        entry = np.frombuffer(LINE.pack(*line), dtype=ORDER)
        return Take(copy, entry, [payload], size, source.writer)

    def _payloads(self, entries: Entries, budget: int) -> tuple[list[bytes], int]:
        """Copy payloads until the byte limit is reached or one left memory."""
        payloads: list[bytes] = []
        taken = 0
        names = ("size", "origin", "location", "crc")
        for size, origin, location, crc in zip(*(entries[name].tolist() for name in names), strict=True):
            payload: bytes | None = b""
            if size:
                if taken + size > budget and payloads:
                    break
                payload = self._brokers.payload(origin, location, size, crc)
            if payload is None:
                break
            payloads.append(payload)
            taken += size
        return payloads, taken

    def _still_valid(self, takes: list[Take]) -> list[Take]:
        """Return the entries whose writers are still valid. All their data was loaded before."""
        if len(takes) == 1 and takes[0].writer == BY_SEQUENCER:
            return takes if self._leader.may_act() else []
        known = {BY_STORE: True}
        for writer in {take.writer for take in takes} - {BY_STORE}:
            known[writer] = self._leader.may_act() if writer == BY_SEQUENCER else self._leader.counts_as_open(writer)
        return [take for take in takes if known[take.writer]]
