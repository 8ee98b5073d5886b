"""A snapshot of the replicas and lanes of a running cluster, read from its store and its fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cached_property

import msgspec

from embarcadero.env import Disk
from embarcadero.errors import BadRegion, EmbarcaderoError
from embarcadero.fabric.layout import ORDER, RangeWord
from embarcadero.fabric.leader import durable_through
from embarcadero.fabric.lines import TaggedReader, attach_ring
from embarcadero.fabric.region import Fabric, durable_region, order_region, ranges_region
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.node.process import candidate_role
from embarcadero.placement.directory import Directory
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.types import Range, RangeKey, ReplicaMember, ReplicaRef, ReplicaState, Trouble, health_in_words

_CANT_WRITE = Trouble.DISK_FULL | Trouble.DISK_FAILED | Trouble.READ_ONLY
_NO_NODES: Mapping[str, int] = {}
_SILENT = (
    "silent: its process is stopped, or waits for its disk; other replicas take its place: check both, or kill the "
    "process"
)


class LaneState(StrEnum):
    """The state of the last range of a lane."""

    OPEN = "open"
    CLOSING = "closing"  # the sequencer is about to open the next range
    RECOVERING = "recovering"  # memory was lost, and the sequencer determines the end from disks
    WAITING = "waiting"  # sealed by a clean stop; the next range is not open yet
    SEALED = "sealed"  # permanently: the lane of a broker incarnation that has ended


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest incarnation of a replica."""

    id: int
    incarnation: int
    pid: int
    state: str
    health: list[str]  # troubles, each with the action to take; empty: healthy
    lag: int  # batches that its slowest lane is behind the order
    open_ranges: int
    sealed_ranges: int
    folder: str
    disk: str
    metrics: str = ""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """A lane with ranges."""

    lane: int
    topic: str
    ranges: int
    range: int  # number of the last range
    state: str  # a LaneState
    replicas: list[int]
    durable_on: int
    ordered: int | None
    durable: int


class ClusterView:
    """A snapshot of the store and the fabric. `nodes`: process ids by role, for all roles that should run."""

    def __init__(self, fabric: Fabric, directory: Directory, nodes: Mapping[str, int] = _NO_NODES) -> None:
        self.fabric, self.directory, self.nodes = fabric, directory, nodes
        self.members = {member.replica: member for member in directory.replicas.all()}
        self.ranges, self.lanes = directory.ranges.all(), {lane.lane: lane for lane in directory.lanes.all()}
        self.last = {range_.lane: range_ for range_ in self.ranges}
        self.topics = {topic.lane: topic for topic in directory.topics.all()}
        self.epoch, leadership = directory.elections.started_epoch(), directory.elections.leadership()
        self.leader = candidate_role(leadership.candidate if leadership is not None else 0)
        self._words = self._table(ranges_region(self.epoch)) if self.epoch else None
        self._lines: dict[ReplicaRef, TaggedReader | None] = {}
        self.silent: set[ReplicaRef] = set()

    def listen(self, wait: Callable[[], None], times: int) -> None:
        """Find live replicas without a heartbeat: check again after each wait, until every replica sent one."""
        before = self._beats()
        self.silent = set(before)
        for _ in range(times):
            if self.silent:
                wait()
                self.silent -= {ref for ref, beat in self._beats().items() if beat != before.get(ref)}

    def _beats(self) -> dict[ReplicaRef, int]:
        live = [member.ref for member in self.members.values() if member.state is not ReplicaState.DEAD]
        return {ref: table.heartbeat.load() for ref in live if (table := self.lines(ref)) is not None}

    def _table(self, name: str) -> TaggedReader | None:
        with suppress(BadRegion):
            return TaggedReader(self.fabric.attach(name)) if self.fabric.exists(name) else None
        return None

    # --- replicas -----------------------------------------------------------------------------------------------------
    def lines(self, ref: ReplicaRef) -> TaggedReader | None:
        """The durable lines of an incarnation; None if the incarnation is not of this generation."""
        if ref not in self._lines:
            self._lines[ref] = self._table(durable_region(ref))
        return self._lines[ref]

    def line(self, range_: Range, ref: ReplicaRef) -> int | None:
        """The end of a range on the disk of one incarnation."""
        table = self.lines(ref)
        return None if table is None else table.load(range_.key)

    def live(self, ref: ReplicaRef) -> bool:
        """Whether exactly this incarnation is live."""
        member = self.members.get(ref.replica)
        return member is not None and member.ref == ref and member.state is not ReplicaState.DEAD

    def well(self, ref: ReplicaRef) -> bool:
        """Whether exactly this incarnation is live and can write."""
        table = self.lines(ref) if self.live(ref) and ref not in self.silent else None
        return table is not None and not table.health.load() & _CANT_WRITE

    def silence(self, range_: Range, ref: ReplicaRef) -> str:
        """The reason why a replica publishes no line for a range in recovery; empty if it publishes one."""
        member = self.members.get(ref.replica)
        if member is None or member.state is ReplicaState.DEAD:
            return "down"
        if member.disk != ref.disk:
            return "its disk was replaced"
        return "" if self.line(range_, member.ref) is not None else "its copy is damaged, or not yet checked"

    def on_another_disk(self, replica: int) -> int:
        """The number of ranges that name a different disk of this replica than its current one."""
        disk = self.members[replica].disk
        return sum(ref.replica == replica and ref.disk != disk for range_ in self.ranges for ref in range_.replicas)

    @cached_property
    def unreadable(self) -> list[Range]:
        """Sealed ranges without a complete copy, of replicas that are dead, drained, removed or have another disk.

        Ranges of healthy replicas are not checked here: those replicas report damage themselves.
        """
        doubtful = [range_ for range_ in self.ranges if not all(map(self._has_its_disk, range_.replicas))]
        return unreadable_ranges(doubtful, self.members, self.directory.topics.trims())

    def _has_its_disk(self, ref: ReplicaRef) -> bool:
        member = self.members.get(ref.replica)
        return member is not None and member.state is ReplicaState.LIVE and member.disk == ref.disk

    def unreadable_on(self, replica: int) -> int:
        """The number of unreadable ranges that name this replica."""
        return sum(any(ref.replica == replica for ref in range_.replicas) for range_ in self.unreadable)

    # --- lanes --------------------------------------------------------------------------------------------------------
    def ordered(self, lane: int) -> int | None:
        """The ordered end of a lane; None if it has no order (yet)."""
        name = order_region(self.epoch, lane)
        if lane >= BROKER_LANES_FIRST:
            found = self.lanes.get(lane)
            if found is None or found.end is not None:
                return None if found is None else found.end
            name = found.region
        with suppress(BadRegion):
            return attach_ring(self.fabric, name, ORDER).frontier.load() if self.fabric.exists(name) else None
        return None

    def topic(self, lane: int) -> str:
        """The name of a lane's topic."""
        owner = self.lanes[lane].topic if lane in self.lanes else lane
        return self.topics[owner].name if owner in self.topics else ""

    def state(self, range_: Range) -> LaneState:
        """The state of a lane's last range."""
        if not range_.open:
            return LaneState.SEALED if range_.lane >= BROKER_LANES_FIRST else LaneState.WAITING
        if not any(self.lines(ref) is not None for ref in range_.replicas):
            return LaneState.RECOVERING  # no replica of this generation writes it
        word = None if self._words is None else self._words.load(RangeKey(range_.lane, 0))
        return LaneState.CLOSING if word and RangeWord.decode(word).closing else LaneState.OPEN


def replica_report(scene: ClusterView, member: ReplicaMember, metrics: Mapping[str, str]) -> ReplicaReport:
    """Report on one replica."""
    named = [range_ for range_ in scene.ranges if any(ref.replica == member.replica for ref in range_.replicas)]
    open_ = [range_ for range_ in named if range_.open]
    lags = [0]
    for range_ in open_:
        line, ordered = scene.line(range_, member.ref), scene.ordered(range_.lane)
        if line is not None and ordered is not None and member.ref in range_.replicas:
            lags.append(ordered - line)
    table = scene.lines(member.ref) if member.state is not ReplicaState.DEAD else None
    health = [] if table is None else health_in_words(table.health.load())
    if member.ref in scene.silent:
        health = [_SILENT, *health]
    return ReplicaReport(
        id=member.replica,
        incarnation=member.incarnation,
        pid=member.pid,
        state=member.state.value,
        health=health,
        lag=max(lags),
        open_ranges=len(open_),
        sealed_ranges=len(named) - len(open_),
        folder=member.folder,
        disk=member.disk,
        metrics=metrics.get(f"replica:{member.replica}", ""),
    )


def lane_report(scene: ClusterView, last: Range) -> LaneReport:
    """Report on one lane."""
    durable = (
        last.end if last.end is not None else durable_through(last, [scene.line(last, ref) for ref in last.replicas])
    )
    return LaneReport(
        lane=last.lane,
        topic=scene.topic(last.lane),
        range=last.number,
        state=scene.state(last).value,
        ranges=sum(range_.lane == last.lane for range_ in scene.ranges),
        durable=durable,
        replicas=[ref.replica for ref in last.replicas],
        durable_on=last.durable_on,
        ordered=scene.ordered(last.lane),
    )


# --- unreadable ranges ------------------------------------------------------------------------------------------------
# Sealed ranges with records that are in no replica's files any more: no replica can copy them.
#
# The check reads names, headers and footers of segments, and ignores damage inside them. A folder that this process
# cannot read counts as readable: this process may lack the permission, and the replicas have it.
_SPANS_MAX = 3
"""Spans of batches that one sentence names."""


def disk_of(member: ReplicaMember) -> Disk:
    """Open a replica's folder on this machine."""
    return RealDisk(member.folder)


def unreadable_ranges(
    ranges: Iterable[Range],
    members: Mapping[int, ReplicaMember],
    trims: Mapping[int, int],
    disk_of: Callable[[ReplicaMember], Disk] = disk_of,
) -> list[Range]:
    """Sealed ranges that are incomplete even in the union of the files of their replicas.

    `members`: the newest incarnation of each replica. `trims`: the start of each lane; records below it do not count.
    """
    return [
        range_
        for range_ in ranges
        if range_.end is not None and range_.replicas and not _is_readable(range_, range_.end, members, trims, disk_of)
    ]


def _is_readable(
    range_: Range,
    end: int,
    members: Mapping[int, ReplicaMember],
    trims: Mapping[int, int],
    disk_of: Callable[[ReplicaMember], Disk],
) -> bool:
    """Whether the copies together hold all records: a replica copies each piece from any peer that has it."""
    folder, index = range_folder(range_.lane, range_.number), max(range_.start, trims.get(range_.lane, 0))
    named = [members[ref.replica] for ref in range_.replicas if ref.replica in members]
    try:
        readers = [RangeReader(disk_of(one), folder, range_.lane, range_.number, range_.start) for one in named]
    except EmbarcaderoError:
        return True
    try:
        while index < end:
            reached = max((reader.covered(index, end) for reader in readers), default=index)
            if reached <= index:
                return False
            index = reached
    except EmbarcaderoError:
        return True
    finally:
        for reader in readers:
            reader.close()
    return True


def topics_by_lane(directory: Directory) -> dict[int, str]:
    """The topic name of each lane, including the lanes of brokers."""
    names = {topic.lane: topic.name for topic in directory.topics.all()}
    return names | {lane.lane: names[lane.topic] for lane in directory.lanes.all() if lane.topic in names}


def in_words(unreadable: Sequence[Range], topics: Mapping[int, str]) -> list[str]:
    """A sentence for each lane: the batches without a copy, and the operator's options."""
    lanes: dict[int, list[Range]] = {}
    for range_ in unreadable:
        lanes.setdefault(range_.lane, []).append(range_)
    return [_lane_in_words(lane, topics.get(lane, ""), ranges) for lane, ranges in sorted(lanes.items())]


def _lane_in_words(lane: int, topic: str, ranges: Sequence[Range]) -> str:
    ends = [range_.end or 0 for range_ in ranges]
    spans = [f"{range_.start} to {end - 1}" for range_, end in zip(ranges, ends, strict=True)]
    more = ", ..." if len(spans) > _SPANS_MAX else ""
    which = "1 sealed range" if len(ranges) == 1 else f"{len(ranges)} sealed ranges"
    replicas = sorted({ref.replica for range_ in ranges for ref in range_.replicas})
    option = f" --lane {lane}" if lane >= BROKER_LANES_FIRST else ""
    return (
        f"topic {topic}, lane {lane}: no copy of {which} (batches {', '.join(spans[:_SPANS_MAX])}{more}) is complete: "
        f"bring back the files of replica {' or '.join(map(str, replicas))}; if they are permanently lost, give up all "
        f"batches below {max(ends)}: `embarcadero topic trim {topic} --before-index {max(ends)}{option}`"
    )
