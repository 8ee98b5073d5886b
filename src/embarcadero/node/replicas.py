"""Replicas and ranges as `status` tells them: who has what, how far behind, what is degraded, what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from embarcadero.errors import BadRegion
from embarcadero.fabric.durability import RangeWord, durable_region, durable_through, ranges_region
from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import attach_ring
from embarcadero.fabric.tagged import TaggedReader
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.placement.directory import Directory
from embarcadero.replica.health import health_in_words
from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest incarnation of a replica."""

    id: int
    incarnation: int
    pid: int
    state: str
    health: list[str]  # troubles, each with what to do; empty: well
    lag: int  # batches that its worst lane is behind the order
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
    range: int  # number of the last one
    state: str  # open, closing, recovering, sealed
    replicas: list[int]
    durable_on: int
    ordered: int | None
    durable: int


class _Scene:
    """What the store and the fabric say, read once."""

    def __init__(self, fabric: Fabric, directory: Directory) -> None:
        self.fabric, self.directory = fabric, directory
        self.members = {member.replica: member for member in directory.replicas()}
        self.ranges, self.lanes = directory.ranges(), {lane.lane: lane for lane in directory.lanes()}
        self.topics = {topic.lane: topic for topic in directory.topics()}
        self.epoch = directory.started_epoch()
        self._words = self._table(ranges_region(self.epoch)) if self.epoch else None
        self._lines: dict[ReplicaRef, TaggedReader | None] = {}

    def _table(self, name: str) -> TaggedReader | None:
        with suppress(BadRegion):
            return TaggedReader(self.fabric.attach(name)) if self.fabric.exists(name) else None
        return None

    def lines(self, ref: ReplicaRef) -> TaggedReader | None:
        if ref not in self._lines:
            self._lines[ref] = self._table(durable_region(ref))
        return self._lines[ref]

    def line(self, range_: Range, ref: ReplicaRef) -> int | None:
        table = self.lines(ref)
        return None if table is None else table.load((range_.lane, range_.number))

    def ordered(self, lane: int) -> int | None:
        name = f"epoch-{self.epoch}/order-{lane}"
        if lane >= BROKER_LANES_FIRST:
            found = self.lanes.get(lane)
            if found is None or found.end is not None:
                return None if found is None else found.end
            name = found.region
        with suppress(BadRegion):
            return attach_ring(self.fabric, name, ORDER).frontier.load() if self.fabric.exists(name) else None
        return None

    def topic(self, lane: int) -> str:
        owner = self.lanes[lane].topic if lane in self.lanes else lane
        return self.topics[owner].name if owner in self.topics else ""

    def state(self, range_: Range) -> str:
        word = None if self._words is None else self._words.load((range_.lane, 0))
        if not range_.open:
            return "sealed"
        if not word or not RangeWord.decode(word).closing:
            return "open"
        live = {member.ref for member in self.members.values()}
        return "closing" if any(ref in live for ref in range_.replicas) else "recovering"


def describe(
    fabric: Fabric, directory: Directory, metrics: dict[str, str]
) -> tuple[list[ReplicaReport], list[LaneReport], list[str]]:
    """All replicas, all lanes with ranges, and what is degraded."""
    scene = _Scene(fabric, directory)
    replicas = [_replica(scene, member, metrics) for member in scene.members.values()]
    last = {range_.lane: range_ for range_ in scene.ranges}
    lanes = [_lane(scene, range_) for range_ in last.values()]
    return replicas, lanes, [*_degraded(scene, replicas, lanes)]


def _replica(scene: _Scene, member: ReplicaMember, metrics: dict[str, str]) -> ReplicaReport:
    named = [range_ for range_ in scene.ranges if any(ref.replica == member.replica for ref in range_.replicas)]
    open_ = [range_ for range_ in named if range_.open]
    lags = [0]
    for range_ in open_:
        line, ordered = scene.line(range_, member.ref), scene.ordered(range_.lane)
        if line is not None and ordered is not None and member.ref in range_.replicas:
            lags.append(ordered - line)
    table = scene.lines(member.ref) if member.state is not ReplicaState.DEAD else None
    return ReplicaReport(
        id=member.replica, incarnation=member.incarnation, pid=member.pid, state=member.state.value,
        health=[] if table is None else health_in_words(table.health.load()), lag=max(lags), open_ranges=len(open_),
        sealed_ranges=len(named) - len(open_), folder=member.folder, disk=member.disk,
        metrics=metrics.get(f"replica:{member.replica}", ""),
    )  # fmt: skip


def _lane(scene: _Scene, last: Range) -> LaneReport:
    durable = last.end if last.end is not None else durable_through(
        last, [scene.line(last, ref) for ref in last.replicas]
    )  # fmt: skip
    return LaneReport(
        lane=last.lane, topic=scene.topic(last.lane), range=last.number, state=scene.state(last),
        ranges=sum(range_.lane == last.lane for range_ in scene.ranges), durable=durable,
        replicas=[ref.replica for ref in last.replicas], durable_on=last.durable_on, ordered=scene.ordered(last.lane),
    )  # fmt: skip


def _degraded(scene: _Scene, replicas: list[ReplicaReport], lanes: list[LaneReport]) -> Iterator[str]:
    for replica in replicas:
        if replica.state == ReplicaState.DEAD:
            yield f"replica {replica.id} is down and is started again; if it stays so, see its log and {replica.folder}"
        if replica.state == ReplicaState.DRAINING and (left := replica.open_ranges + replica.sealed_ranges):
            yield f"replica {replica.id} is drained: {left} ranges are still on it; wait"
        for trouble in replica.health:
            yield f"replica {replica.id}: {trouble}"
    for lane in lanes:
        if lane.state == "recovering":
            yield (
                f"topic {lane.topic}, lane {lane.lane}: waits for replicas {lane.replicas} to say what they have; "
                "start those that are down"
            )
    live = sum(replica.state == ReplicaState.LIVE for replica in replicas)
    for topic in scene.topics.values():
        if topic.replicas > live:
            yield f"topic {topic.name} wants {topic.replicas} replicas, {live} are live: `embarcadero replica add`"
