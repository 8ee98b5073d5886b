"""A replica's copies of ranges, and how they grow: taken from the fabric, appended, synced, and only then counted.

The order of loads is the safety argument: ordered frontier, entries, payload copies (each checked against its chunk and
its checksum), fence, and last of all whether the writer of the order may still be believed: no later epoch is open, or,
for a lane of a broker, no sequencer counts that incarnation as closed. Only then is anything appended. So whatever is
in a replica's files is in the one order, whichever sequencer takes over. The durable line moves after the sync.

`Health` has the troubles of the disk: a copy that cannot be written stops counting, and is tried again later.
`ReplicaCounters` are plain numbers, touched once per commit or per piece of repair.
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
    """Which trouble an error of the disk means."""
    if isinstance(error, DiskFull):
        return Trouble.DISK_FULL
    if isinstance(error, BadSegment):
        return Trouble.DAMAGED
    cause = error.__cause__ if isinstance(error, EmbarcaderoError) else error
    return Trouble.READ_ONLY if isinstance(cause, OSError) and cause.errno in _REFUSED else Trouble.DISK_FAILED


@dataclass(slots=True)
class _Ill:
    trouble: Trouble
    retry_us: int
    wait_us: int


class Health:
    """What is wrong with which copy; together they are the health word that others see."""

    def __init__(self, word: FrontierWriter, journal: Journal) -> None:
        self._word, self._journal = word, journal
        self._ill: dict[RangeKey, _Ill] = {}
        self._lacking = False
        self.reason = ""  # of the last trouble

    @property
    def trouble(self) -> Trouble:
        """What is wrong now."""
        return Trouble(self._word.value)

    def may_try(self, tags: RangeKey, now_us: int) -> bool:
        """Whether a copy is well, or it is time to try again."""
        ill = self._ill.get(tags)
        return ill is None or now_us >= ill.retry_us

    def failed(self, tags: RangeKey, error: Exception, doing: str, now_us: int) -> None:
        """Something failed: this copy counts no further until it succeeds."""
        before, found = self._ill.get(tags), trouble_of(error)
        self.reason = str(error)
        if before is None or before.trouble != found:
            self._journal.warn(
                "disk trouble", trouble=found.name, doing=doing, lane=tags[0], range=tags[1], reason=self.reason
            )
        wait_us = min(2 * before.wait_us, _RETRY_US_MAX) if before else _RETRY_US_FIRST
        self._ill[tags] = _Ill(found, now_us + wait_us, wait_us)
        self._publish()

    def worked(self, tags: RangeKey) -> None:
        """It succeeded, or the copy is gone."""
        if (ill := self._ill.pop(tags, None)) is not None:
            self._journal.note("disk trouble is over", was=ill.trouble.name, lane=tags[0], range=tags[1])
            self._publish()

    def keep(self, tags: set[RangeKey]) -> None:
        """All others are not ours any more: what was wrong with them never succeeds, and is over."""
        for gone in self._ill.keys() - tags:
            self.worked(gone)

    def lacking(self, now: bool) -> None:
        """Whether copies are damaged or incomplete, and being repaired."""
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
    """The copy of one range. What the store says about the range is in `range_`; the files are behind `log`."""

    def __init__(self, range_: Range, log: RangeLog) -> None:
        self.range_, self.log = range_, log
        self.tags = range_.key
        self.behind = False  # what follows left the fabric: another replica's files have it
        self.syncing = False
        self.reading = False  # a piece of another replica's files is on its way
        self.scrubbing = False  # its old files are looked through; more may be appended and synced
        self.unsynced_bytes = 0  # appended since the last sync began
        self.complete = False  # sealed, and all of it is here, synced
        self.reported = 0  # how far the range was durable when we last rang the brokers that wait for it

    @property
    def busy(self) -> bool:
        """Whether a worker has it: its files are not to be cut, sealed or closed now."""
        return self.syncing or self.reading or self.scrubbing

    @property
    def doubtful(self) -> bool:
        """A sync failed: only what was synced before is to be trusted."""
        return self.log.failed

    @property
    def in_place(self) -> Damage | None:
        """The first damage that is to be repaired where it is; a damaged tail is appended anew instead."""
        found = [damage for damage in self.log.damage if damage.kind is not DamageKind.TAIL]
        return min(found, key=lambda damage: damage.first, default=None)

    @property
    def whole(self) -> bool:
        """Nothing that it once had is damaged."""
        return not self.log.damage and not self.log.failed


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """What the parts of one replica incarnation share."""

    env: Env
    fabric: Fabric
    directory: Directory
    disk: Disk
    member: ReplicaMember
    config: Config
    lines: TaggedWriter  # our durable lines
    all_lines: DurableLines  # those of all replicas
    leader: LeaderView
    health: Health
    counters: ReplicaCounters

    @staticmethod
    def create(
        env: Env, fabric: Fabric, directory: Directory, disk: Disk, member: ReplicaMember, config: Config
    ) -> ReplicaContext:
        """Begin an incarnation: its durable lines are there, and empty."""
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
    """Appends, and group commit: whatever was appended while the disk was busy is synced at once."""

    def __init__(self, context: ReplicaContext) -> None:
        self._fabric, self._steps, self._clock = context.fabric, context.env.steps, context.env.clock
        self.lines, self._all_lines, self._workers = context.lines, context.all_lines, context.env.workers
        self._health, self._counters = context.health, context.counters
        self._files_missed = False  # files of a copy are not where they were
        self._news = False  # something became durable
        self._unmarked: list[Copy] = []
        self._lone: list[Copy] = []  # copies of which one entry alone was synced

    def take_missed(self) -> bool:
        """Whether files of a copy were not where they should be, since the last call."""
        missed, self._files_missed = self._files_missed, False
        return missed

    def take_news(self) -> bool:
        """Whether something became durable since the last call."""
        news, self._news = self._news, False
        return news

    def take_late(self, me: ReplicaRef) -> Iterator[ReplicaRef]:
        """The replicas that wait for us to wake them, after each sync of one entry alone."""
        while self._lone:
            yield from self._late(self._lone.pop(), me)

    def may_try(self, copy: Copy, now_us: int) -> bool:
        """Whether the disk took this copy's last write, or it is time to try again."""
        return self._health.may_try(copy.tags, now_us)

    def append(self, copy: Copy, entries: Entries, payloads: Sequence[Part]) -> bool:
        """Write entries and payloads at the end of a copy; False when the disk did not take them."""
        try:
            copy.log.append(entries, payloads)
        except EmbarcaderoError as error:
            self._failed(copy, error, "append")
            return False
        self._steps.at(Step.REPLICA_APPENDED)
        return True

    def roll(self, copy: Copy, now_us: int) -> None:
        """Begin the next segment of a copy if the last one is old, so that retention by age can drop it."""
        if copy.busy or not self.may_try(copy, now_us):
            return
        try:
            copy.log.roll_if_due(now_us)
        except EmbarcaderoError as error:
            self._failed(copy, error, "roll")

    def sync(self, copy: Copy) -> None:
        """Have what was appended synced, unless that is under way."""
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
        """How far the durable line of a copy goes; None if it has none."""
        return self.lines.value(copy.tags) if copy.tags in self.lines else None

    def publish(self, copy: Copy) -> None:
        """Publish how far a copy is on disk, if it is one that counts."""
        if copy.tags in self.lines and copy.whole and copy.log.synced > self.lines.value(copy.tags):
            self.lines.set(copy.tags, copy.log.synced)
            self._news |= self._is_news(copy)
            self._steps.at(Step.REPLICA_LINE)

    def _is_news(self, copy: Copy) -> bool:
        """Whether more of the range is durable than when we last reported it.

        Of replicas that sync the same entries, those that come too early or too late wake no broker: each looks at the
        lines of all when its own is out, so the one that makes enough of them sees that, or another one did before.
        """
        if copy.range_.durable_on <= 1:
            return True
        self._fabric.fence()
        through = durable_through(copy.range_, self._all_lines.load(copy.range_))
        more, copy.reported = through > copy.reported, through
        return more

    def _late(self, copy: Copy, me: ReplicaRef) -> list[ReplicaRef]:
        """The replicas that wait for one of the first to wake them, if we are one of those, and they lag."""
        range_, first = copy.range_, first_woken(copy.range_)
        if len(first) == len(range_.replicas) or me not in first:
            return []
        lines = self._all_lines.load(range_)[len(first) :]
        others = zip(range_.replicas[len(first) :], lines, strict=True)
        return [ref for ref, line in others if line is None or line < copy.log.synced]

    def mark(self) -> None:
        """Note in the files how far they are synced, when all brokers that wait for that have been woken."""
        while self._unmarked:
            self._unmarked.pop().log.note_mark()

    def _failed(self, copy: Copy, error: Exception, doing: str) -> None:
        self._files_missed |= isinstance(error, Missing)
        self._counters.disk_errors += 1
        self._health.failed(copy.tags, error, doing, self._clock.now_us())


COMMIT_BYTES_MAX: Final = 16 * MIB
"""Payloads that one commit takes, of all lanes; a batch always fits."""

_LOW: Final = 0xFFFF_FFFF
COMMIT_ENTRIES_MAX: Final = 4_096
"""Entries that one commit takes of one lane."""


class Take(NamedTuple):
    """What one lane has for the next commit."""

    copy: Copy
    entries: Entries
    payloads: list[bytes]  # one per entry; empty for entries without a payload
    size: int
    writer: int  # who ordered it: the region handle of a broker incarnation, or one of the two below


BY_SEQUENCER: Final = -1
BY_STORE: Final = -2
"""The lane is closed: the store has its end, and no writer needs to be asked."""


class BrokerRegions:
    """Regions of brokers: payloads, order rings of lanes of their own, and whether they wait for durable lines."""

    def __init__(self, fabric: Fabric, refresh: Callable[[], None]) -> None:
        self._fabric = fabric
        self._logs = BrokerLogs(fabric, refresh)
        self._waiting: dict[str, FrontierReader] = {}  # by folder of a live incarnation
        self._lanes: dict[int, TopicLane] = {}
        self._rings: dict[int, RingReader] = {}

    def update(self, members: list[Member], lanes: list[TopicLane]) -> None:
        """Take note of all brokers, and of their lanes."""
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
        """A lane of a broker, as the store has it."""
        return self._lanes.get(number)

    def ring(self, number: int) -> RingReader | None:
        """The order ring of a lane of a broker, while its region is there."""
        ring, lane = self._rings.get(number), self._lanes.get(number)
        if ring is None and lane is not None and (regions := attach_unless_removed(self._fabric, lane.region)):
            ring = self._rings[number] = RingReader(regions[0], ORDER)
        return ring

    def payload(self, handle: int, location: int, size: int, crc: int) -> bytes | None:
        """A copy of a payload with the right checksum; None when it left memory."""
        log = self._logs.of(handle)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def ring_waiting(self, bell: Doorbell) -> None:
        """Wake brokers that wait for durable lines. Ours were flushed before; they say that they wait, then look."""
        self._fabric.fence()
        for folder, waiting in self._waiting.items():
            if waiting.load():
                bell.ring(folder)


class _OrderSource(NamedTuple):
    ring: RingReader
    ordered: int
    writer: int


class Follower:
    """Reads order rings and broker logs for all copies that follow."""

    def __init__(self, leader: LeaderView, brokers: BrokerRegions) -> None:
        self._leader, self._brokers = leader, brokers

    def ordered(self, lane: int) -> int | None:
        """How far a lane is ordered, for metrics; None while that is not known."""
        source = self._source(lane)
        return None if source is None else source.ordered

    def take(self, copies: list[Copy]) -> list[Take]:
        """What these copies lack and may append now."""
        room, takes = COMMIT_BYTES_MAX, []
        for copy in copies:
            if room > 0 and (found := self._gather(copy, room)) is not None:
                takes.append(found)
                room -= found.size
        if not takes:
            return takes
        self._leader.steps.at(Step.REPLICA_LOADED)
        takes = self._believed(takes)
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

    def _gather(self, copy: Copy, room: int) -> Take | None:
        source, start = self._source(copy.range_.lane), copy.log.end
        if source is None or source.ordered <= start:
            return None
        if source.ordered == start + 1:
            return self._gather_one(copy, source, start)
        stop = min(source.ordered, start + min(COMMIT_ENTRIES_MAX, source.ring.slots))
        entries = source.ring.read(start, stop)
        payloads, size = self._payloads(entries, room)
        if not payloads:
            copy.behind = True  # the slot or the payload is gone: enough others had it on disk
            return None
        return Take(copy, entries[: len(payloads)], payloads, size, source.writer)

    def _gather_one(self, copy: Copy, source: _OrderSource, index: int) -> Take | None:
        """The same for a single entry, in plain numbers: a publisher waits for just this one."""
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

    def _payloads(self, entries: Entries, room: int) -> tuple[list[bytes], int]:
        """Copies of payloads until the room runs out or one is gone."""
        payloads: list[bytes] = []
        taken = 0
        names = ("size", "origin", "location", "crc")
        for size, origin, location, crc in zip(*(entries[name].tolist() for name in names), strict=True):
            payload: bytes | None = b""
            if size:
                if taken + size > room and payloads:
                    break
                payload = self._brokers.payload(origin, location, size, crc)
            if payload is None:
                break
            payloads.append(payload)
            taken += size
        return payloads, taken

    def _believed(self, takes: list[Take]) -> list[Take]:
        """Takes whose writers may still be believed. Everything they rest on was loaded before."""
        if len(takes) == 1 and takes[0].writer == BY_SEQUENCER:
            return takes if self._leader.may_act() else []
        known = {BY_STORE: True}
        for writer in {take.writer for take in takes} - {BY_STORE}:
            known[writer] = self._leader.may_act() if writer == BY_SEQUENCER else self._leader.counts_as_open(writer)
        return [take for take in takes if known[take.writer]]
