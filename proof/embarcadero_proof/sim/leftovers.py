"""Resources that a cluster still keeps when it is quiet: memory, files, values in the store, objects, acks.

Each has a bound. They are counted at the end of a rest and at the end of the run: by then cleanup has had time to
finish. The counts do not go into the trace, so the digests of runs do not depend on them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from embarcadero.limits import EPOCHS_AHEAD_MAX
from embarcadero.placement.directory import STARTS_KEPT
from embarcadero.storage.layout import (
    DAMAGED,
    INDEX_FILE,
    LOG,
    MARK_FILE,
    MENDED,
    START_FILE,
    TIME_INDEX_FILE,
    begun_range,
)
from embarcadero.types import MemberState, Range
from embarcadero_proof.sim.history import Sampled
from embarcadero_proof.sim.holdings import tables_of_broker, tables_of_replica, tables_of_sequencer
from embarcadero_proof.sim.medium import SimFolder

if TYPE_CHECKING:
    from embarcadero_proof.sim.roles import BrokerProcess, ReplicaProcess
    from embarcadero_proof.sim.world import World

_EPOCHS_KEPT: Final = 2
"""Epochs with regions: the leader's, and its predecessor's, which processes may still follow."""

_CHECKPOINTS_KEPT: Final = 2
"""Checkpoints of a lane's sessions on one disk: the newest, and an older one about to be replaced."""

_OBJECTS: Final = "objects of deleted topics"
_CACHES: Final = (INDEX_FILE, TIME_INDEX_FILE)
_COPY: Final = re.compile(r"lane-(\d{10})/range-(\d{10})(\.repair)?")
_CHECKPOINT: Final = re.compile(r"lane-(\d{10})/sessions-[^/]*")
_OF_LANE: Final = re.compile(r"([^/]+)/(?:order|checkpoint)-(\d+)(?:-.*)?")
_IN_COPY: Final = re.compile(r"lane-(\d{10})/range-(\d{10})/(.*)")


class Amount(NamedTuple):
    """The amount of a resource, and its bound."""

    who: str
    what: str
    value: float
    bound: float


def see_leftovers(world: World) -> None:
    """Record the amounts of all resources."""
    for who, what, value, bound in leftovers(world):
        world.history.add(Sampled(at=world.queue.now_us, process=who, what=what, value=value, bound=bound))


def leftovers(world: World) -> Iterator[Amount]:
    """Yield the amounts of all resources."""
    yield from _regions(world)
    yield from _values(world)
    ranges, lanes = world.directory.ranges.all(), _lanes(world)
    for replica in world.replicas.values():
        if replica.alive and replica.replica is not None:
            yield from _files(replica, ranges, lanes)
    for broker in world.brokers.values():
        if broker.alive and broker.broker is not None:
            yield from _connections(broker)
    yield from _objects(world, lanes)


def _lanes(world: World) -> set[int]:
    """Return the lanes of topics that exist."""
    directory = world.directory
    return {topic.lane for topic in directory.topics.all()} | {lane.lane for lane in directory.lanes.all()}


def _regions(world: World) -> Iterator[Amount]:
    """Count regions of the fabric: those of unneeded epochs and incarnations must be removed."""
    directory, regions = world.directory, world.memory.regions
    owners = {name.split("/")[0] for name in regions}
    epochs = [int(owner.removeprefix("epoch-")) for owner in owners if owner.startswith("epoch-")]
    started = directory.elections.started_epoch()
    yield Amount("fabric", "epochs with regions", sum(epoch <= started for epoch in epochs), _EPOCHS_KEPT)
    yield Amount("fabric", "epochs made and never started", sum(epoch > started for epoch in epochs), EPOCHS_AHEAD_MAX)
    members = {member.region_prefix: member for member in directory.members.all()}
    named = {ref.region_prefix for range_ in directory.ranges.all() if range_.open for ref in range_.replicas}
    known = members.keys() | named | {member.ref.region_prefix for member in directory.replicas.all()}
    strangers = [owner for owner in owners if owner.startswith(("broker-", "replica-")) and owner not in known]
    yield Amount("fabric", "incarnations with regions that are forgotten", len(strangers), 0)
    answers = {name.split("/results-")[1] for name in regions if name.startswith(f"epoch-{started}/results-")}
    alive = {prefix.removeprefix("broker-") for prefix in members}
    yield Amount("fabric", "answers to brokers that are gone", len(answers - alive), 0)
    kept = [
        medium.size
        for name, medium in regions.items()
        if (member := members.get(name.split("/")[0])) is not None and member.state is MemberState.DEAD
        and name.split("/")[1].startswith(("log", "order-"))
    ]  # fmt: skip
    lanes, serving = _lanes(world), {f"epoch-{started}", *members}
    of_lanes = [found for found in map(_OF_LANE.fullmatch, regions) if found is not None and found[1] in serving]
    dropped = [found[0] for found in of_lanes if int(found[2]) not in lanes]
    what = f"regions of deleted topics ({', '.join(sorted(dropped)[:3])})" if dropped else "regions of deleted topics"
    yield Amount("fabric", what, len(dropped), 0)
    on_disk = all(topic.replicas for topic in world.plan.topics)
    yield Amount("fabric", "bytes of dead brokers", sum(kept), 0 if on_disk else world.sizes.dead_log_bytes)


def _values(world: World) -> Iterator[Amount]:
    """Count values of the store, by the beginning of their keys."""
    directory = world.directory
    counts = Counter(item.key.split("/")[0] for item in world.store.list(""))
    lanes = len(world.plan.topics) + counts["lanes"]
    trims = directory.topics.trims()
    past = sum(r.end is not None and r.start < r.end <= trims.get(r.lane, 0) for r in directory.ranges.all())
    for what, value, bound in (
        ("starts", counts["starts"], STARTS_KEPT),
        ("chains", counts["chains"], lanes),
        ("saved", counts["saved"], lanes),
        ("incarnations", counts["incarnations"], world.plan.brokers),
        ("candidates", counts["candidates"], world.plan.sequencers),
        ("present", counts["present"], len(world.replicas)),
        ("replicas", counts["replicas"], len(world.replicas) * (1 + lanes)),  # a lane's range names each replica, too
        ("ranges that are trimmed", past, 0),
    ):
        yield Amount("store", what, value, bound)


def _files(process: ReplicaProcess, ranges: list[Range], lanes: set[int]) -> Iterator[Amount]:
    """Count files of a replica: its folders must be those of its ranges."""
    mine = {(r.lane, r.number) for r in ranges if any(ref.replica == process.number for ref in r.replicas)}
    if process.replica is not None:
        mine |= process.replica.ranges.adopted.keys()
    strange, repairs, checkpoints = 0, 0, Counter[int]()
    paths = dict(process.device.names.walk())
    for path, node in paths.items():
        if isinstance(node, SimFolder):
            copy = _COPY.fullmatch(path)
            strange += copy is not None and (int(copy[1]), int(copy[2])) not in mine
            repairs += copy is not None and copy[3] is not None
        elif (begun := begun_range(path)) is not None:
            strange += begun not in mine
        elif (checkpoint := _CHECKPOINT.fullmatch(path)) is not None:
            checkpoints[int(checkpoint[1])] += 1
    ends = {(r.lane, r.number): r.end_seq for r in ranges if r.end is not None}
    yield Amount(process.name, "files of no segment", sum(_is_odd(path, paths, ends) for path in paths), 0)
    yield Amount(process.name, "copies of ranges that are not its own", strange, 0)
    yield Amount(process.name, "repairs under way", repairs, 0)
    stale = sum(count for lane, count in checkpoints.items() if lane not in lanes)
    yield Amount(process.name, "checkpoints of deleted topics", stale, 0)
    yield Amount(process.name, "checkpoints of one lane", max(checkpoints.values(), default=0), _CHECKPOINTS_KEPT)


def _is_odd(path: str, paths: Mapping[str, object], ends: Mapping[tuple[int, int], int | None]) -> bool:
    """Whether a file in the folder of a copy is no segment, no index of one, and no file that each copy has.

    Damaged files are kept for inspection until their range is removed, without a bound. A segment that begins at the
    end of its range (`ends`: seqs) is empty: if it is lost, its indexes stay and no replica misses it.
    """
    inside = _IN_COPY.fullmatch(path)
    if inside is None or inside[3] in (START_FILE, MARK_FILE) or inside[3].endswith((LOG, DAMAGED, MENDED)):
        return False
    cache = next((cache for cache in _CACHES if path.endswith(cache)), None)
    if cache is None:
        return True
    first_seq, end_seq = inside[3].removesuffix(cache), ends.get((int(inside[1]), int(inside[2])))
    if first_seq.isdecimal() and end_seq is not None and int(first_seq) >= end_seq:
        return False
    return path.removesuffix(cache) + LOG not in paths


def _connections(process: BrokerProcess) -> Iterator[Amount]:
    """Count a broker's connections and acks: all requests are answered, and closed connections are forgotten. Output
    queued for a client that does not read is not counted: no simulated socket is ever full.
    """
    if process.broker is not None:
        yield Amount(process.name, "connections", len(process.broker.peers), len(process.wires))
        yield Amount(process.name, "acks that wait for disks", process.broker.awaiting.waiting, 0)


def _objects(world: World, lanes: set[int]) -> Iterator[Amount]:
    """Count objects in tables of the roles: they must belong to existing lanes."""
    held = [(one.name, tables_of_broker(one.broker)) for one in world.brokers.values() if one.alive and one.broker]
    held += [(one.name, tables_of_replica(one.replica)) for one in world.replicas.values() if one.alive and one.replica]
    sequencer = world.sequencer
    if sequencer.alive and sequencer.sequencer is not None:
        held.append((sequencer.name, tables_of_sequencer(sequencer.sequencer)))
    for who, tables in held:
        gone = sorted({table for table, lane in tables if lane not in lanes})
        yield Amount(who, f"objects of deleted topics ({', '.join(gone)})" if gone else _OBJECTS, len(gone), 0)
