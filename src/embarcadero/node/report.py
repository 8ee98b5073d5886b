"""The state of a running cluster, for people and for programs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from embarcadero.fabric.shared import SharedFabric
from embarcadero.limits import BROKER_LANES_FIRST, HEARTBEAT_S, REPLICA_LAG_ENTRIES_MAX
from embarcadero.node.cluster_view import (
    ClusterView,
    LaneReport,
    LaneState,
    ReplicaReport,
    in_words,
    lane_report,
    replica_report,
)
from embarcadero.node.folder import ClusterFolder, ClusterInfo
from embarcadero.node.process import candidate_role
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import open_store
from embarcadero.types import MemberState, Range, ReplicaRef, ReplicaState
from embarcadero.watch.endpoints import EndpointFiles
from embarcadero.watch.logs import last_words

_SEQUENCER = "sequencer"


class BrokerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The newest incarnation of a broker."""

    id: int
    incarnation: int
    address: str
    pid: int
    state: str
    metrics: str = ""  # host:port of its process's metrics


class StandbyReport(msgspec.Struct, frozen=True, kw_only=True):
    """A standby sequencer, and its process id (0 while it is down)."""

    candidate: int
    pid: int
    state: str  # "stands by", or "starting"
    metrics: str = ""


class SequencerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The leading sequencer, with its epoch and its process id (0 while it is down), and the standbys."""

    pid: int
    epoch: int
    metrics: str = ""
    candidate: int = 0
    standbys: list[StandbyReport] = []


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's process."""

    pid: int


class SavedLane(msgspec.Struct, frozen=True, kw_only=True):
    """A lane's ends in the mirror when the fabric was lost before this run: [durable, ordered) is lost."""

    topic: str
    lane: int
    durable: int
    ordered: int
    batches: int  # lost batches
    records: int  # lost records


class MirrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The fabric's mirror: its folder (empty: none), and lanes whose end was recovered from an earlier mirror."""

    folder: str = ""
    saved: list[SavedLane] = []


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster."""

    cluster: str
    version: str
    brokers: list[BrokerReport]
    sequencer: SequencerReport
    supervisor: SupervisorReport
    fabric: str
    data_dir: str
    mirror: MirrorReport = MirrorReport()
    replicas: list[ReplicaReport] = []
    lanes: list[LaneReport] = []  # lanes with ranges
    degraded: list[str] = []  # each a problem and the action to take

    @property
    def addresses(self) -> list[str]:
        """Addresses of the live brokers."""
        return [broker.address for broker in self.brokers if broker.state == MemberState.LIVE]


def sequencer_report(
    directory: Directory, epoch: int, nodes: Mapping[str, int], metrics: Mapping[str, str]
) -> SequencerReport:
    """Report the leader and the standbys."""
    leadership, standing = (
        directory.elections.leadership(),
        {found.candidate: found.pid for found in directory.elections.candidates()},
    )
    leader = 0 if leadership is None else leadership.candidate
    numbers = {int(role.partition(":")[2] or 0) for role in nodes if role.partition(":")[0] == _SEQUENCER}
    pids = {number: standing.get(number) or nodes.get(candidate_role(number), 0) for number in numbers | {*standing}}
    return SequencerReport(
        pid=pids.get(leader, 0),
        epoch=epoch,
        metrics=metrics.get(candidate_role(leader), ""),
        candidate=leader,
        standbys=[
            StandbyReport(
                candidate=number,
                pid=pid,
                state="stands by" if number in standing else "starting",
                metrics=metrics.get(candidate_role(number), ""),
            )
            for number, pid in sorted(pids.items())
            if number != leader
        ],
    )


def report(folder: ClusterFolder, listen_s: float = 0.0) -> ClusterReport:
    """Report on the running cluster of a folder; raise NotRunning if none runs.

    `listen_s`: the longest time to wait for a heartbeat of each replica. With 0, silent replicas count as live.
    """
    info: ClusterInfo = folder.require_running()
    with closing(open_store(folder.store_path)) as store:
        directory = Directory(store)
        newest = directory.members.newest()
        epoch = directory.elections.started_epoch()
        metrics = {
            role: p.address for p in EndpointFiles(folder.path).read() if p.running for role in p.roles.split(",")
        }
        fabric = SharedFabric(Path(info.fabric), info.generation)
        nodes = {role: node.pid for node in info.nodes for role in node.roles.split(",")}
        scene = ClusterView(fabric, directory, nodes)
        if listen_s and scene.members:
            scene.listen(lambda: time.sleep(HEARTBEAT_S), math.ceil(listen_s / HEARTBEAT_S))
        replicas = [replica_report(scene, member, metrics) for member in scene.members.values()]
        lanes = [lane_report(scene, range_) for range_ in scene.last.values()]
        live = [member.ref for member in scene.members.values() if member.state is not ReplicaState.DEAD]
        down = down_roles(nodes, {member.broker: member.state for member in newest}, live)
        hosts = {role: node.roles for node in info.nodes for role in node.roles.split(",")}
        words = {role: last_words(folder.log_of(hosts[role])) for role in down}
        saved = [
            SavedLane(
                topic=scene.topic(one.lane),
                lane=one.lane,
                durable=one.kept,
                ordered=one.index,
                batches=one.batches,
                records=one.records,
            )
            for one in directory.mirrored_ends()
        ]
        wrong = degraded(scene, replicas, lanes, words)
        sequencer = sequencer_report(directory, epoch, nodes, metrics)
    return ClusterReport(
        cluster=info.id,
        version=info.version,
        brokers=[
            BrokerReport(
                id=member.broker,
                incarnation=member.incarnation,
                address=member.address,
                pid=member.pid,
                state=(member.state if member.state is MemberState.LIVE else MemberState.DEAD).value,
                metrics=metrics.get(f"broker:{member.broker}", ""),
            )
            for member in newest
        ],
        sequencer=sequencer,
        supervisor=SupervisorReport(pid=info.supervisor),
        fabric=info.fabric,
        data_dir=str(folder.path),
        mirror=MirrorReport(folder=info.mirror, saved=saved),
        replicas=replicas,
        lanes=lanes,
        degraded=wrong,
    )


# --- degraded ---------------------------------------------------------------------------------------------------------
# Degraded parts of a running cluster: each is a sentence with the action to take.
_NO_WORDS: Mapping[str, str] = {}
_STARTED_AGAIN = "the supervisor restarts it"


def degraded(
    scene: ClusterView,
    replicas: Sequence[ReplicaReport],
    lanes: Sequence[LaneReport],
    down: Mapping[str, str] = _NO_WORDS,
) -> list[str]:
    """All problems, worst first. `down`: the roles that should run but do not, with the last line of their logs."""
    return [
        *_processes(scene, down),
        *(problem for lane in lanes for problem in _lane(scene, lane)),
        *(problem for replica in replicas for problem in _replica(scene, replica, down)),
        *in_words(scene.unreadable, {range_.lane: scene.topic(range_.lane) for range_ in scene.unreadable}),
        *_topics(scene, replicas),
        *_altered(scene, replicas),
    ]


def _processes(scene: ClusterView, down: Mapping[str, str]) -> Iterator[str]:
    for role, words in sorted(down.items()):
        why = f" ({words})" if words else ""
        log = f"if it stays down, see logs/{role.replace(':', '-')}.log"
        if role == scene.leader:
            yield f"the sequencer is down{why}: publishing waits; {_STARTED_AGAIN}; {log}"
        elif role.startswith("sequencer"):
            yield f"{role}, a standby, is down{why}: {_STARTED_AGAIN}; {log}"
        elif role.startswith("broker"):
            yield f"{role.replace(':', ' ')} is down{why}: clients use the other brokers; {_STARTED_AGAIN}; {log}"


# --- lanes ------------------------------------------------------------------------------------------------------------
def _lane(scene: ClusterView, lane: LaneReport) -> Iterator[str]:
    range_ = scene.last[lane.lane]
    name = f"topic {lane.topic}, lane {lane.lane}"
    if lane.state == LaneState.RECOVERING:
        yield from _recovering(scene, lane, range_, name)
    elif lane.state == LaneState.WAITING:
        live = sum(member.state is ReplicaState.LIVE for member in scene.members.values())
        yield (
            f"{name}: stopped cleanly; it needs {lane.durable_on} live replicas to continue, and {live} are live: "
            "publishing waits, reading works; start the missing replicas, or run `embarcadero replica add`"
        )
    elif lane.state in (LaneState.OPEN, LaneState.CLOSING):
        yield from _open(scene, lane, range_, name)


def _recovering(scene: ClusterView, lane: LaneReport, range_: Range, name: str) -> Iterator[str]:
    missing = [(ref, scene.silence(range_, ref)) for ref in range_.replicas]
    silent = [f"replica {ref.replica} ({why})" for ref, why in missing if why]
    have, needed = len(range_.replicas) - len(silent), len(range_.replicas) - range_.durable_on + 1
    if have >= needed:
        yield f"{name}: recovery from disks is running ({have} copies answered); publishing waits, reading works: wait"
        return
    if scene.directory.ranges.loss_accepted(lane.lane):
        yield f"{name}: recovery runs from fewer copies than needed, because you accepted the loss; wait"
        return
    yield (
        f"{name}: publishing waits, because {have} of the {needed} copies needed for recovery have answered; missing: "
        f"{', '.join(silent)}. Bring them back, or give up the records that only they have: "
        f"`embarcadero topic recover {lane.topic} --accept-loss`"
    )


def _open(scene: ClusterView, lane: LaneReport, range_: Range, name: str) -> Iterator[str]:
    well = sum(scene.well(ref) for ref in range_.replicas)
    if well < range_.durable_on:
        yield (
            f"{name}: {well} of the {range_.durable_on} copies that make a record durable can be written: ack=2 and "
            "durable reads wait, ack=1 continues until memory is full; bring replicas back, or run "
            "`embarcadero replica add`"
        )
    behind = (lane.ordered or 0) - lane.durable
    if behind > REPLICA_LAG_ENTRIES_MAX:
        yield (f"{name}: disks are {behind} batches behind the order: ack=2 is late; publish less, or use faster disks")


# --- replicas ---------------------------------------------------------------------------------------------------------
def _replica(scene: ClusterView, replica: ReplicaReport, down: Mapping[str, str]) -> Iterator[str]:
    name, ranges = f"replica {replica.id}", replica.open_ranges + replica.sealed_ranges
    role = f"replica:{replica.id}"
    if replica.state == ReplicaState.DEAD and role in scene.nodes:
        why = f" ({down[role]})" if down.get(role) else ""
        see = f"logs/replica-{replica.id}.log and {replica.folder}"
        yield f"{name} is down{why}: {_STARTED_AGAIN}; if it stays down, see {see}"
    elif replica.state == ReplicaState.DEAD and ranges:
        yield (
            f"{name} is dead, and {ranges} ranges name it: bring its folder {replica.folder} back. "
            f"{_copied(scene, replica.id)}"
        )
    if replica.state == ReplicaState.DRAINING and ranges:
        why = scene.directory.replicas.drain_blocked(replica.id)
        do = f"{why}: `embarcadero replica add`, or `embarcadero replica drain --undo {replica.id}`" if why else "wait"
        if not why and (stuck := scene.unreadable_on(replica.id)):
            do = f"no copy of {stuck} of them is complete, so these stay until you act on the entries below"
        yield f"{name} is draining: {ranges} ranges are still on it; {do}"
    for trouble in replica.health:
        yield f"{name}: {trouble}"
    if replica.state != ReplicaState.DEAD and (strange := scene.on_another_disk(replica.id)):
        stuck = scene.unreadable_on(replica.id)
        but = f", except {stuck} of which no copy is complete" if stuck else ""
        yield (
            f"{name} has a different disk than {strange} of its ranges name (wiped or swapped): the sealed ranges are "
            f"copied to it from other replicas{but}; no action is needed, unless the old disk can come back"
        )


def _copied(scene: ClusterView, replica: int) -> str:
    """Describe the next step for the sealed ranges of a dead replica."""
    if why := scene.directory.replicas.drain_blocked(replica):
        return f"They are not copied: {why}; run `embarcadero replica add`"
    stuck = scene.unreadable_on(replica)
    but = f", except {stuck} of which no copy is complete" if stuck else ""
    return (
        f"Other replicas copy its sealed ranges after placement.replace_after_s{but}; to start now: "
        "`embarcadero replica drain`"
    )


def _topics(scene: ClusterView, replicas: Sequence[ReplicaReport]) -> Iterator[str]:
    live = sum(replica.state == ReplicaState.LIVE for replica in replicas)
    for topic in scene.topics.values():
        if topic.replicas > live:
            yield (
                f"topic {topic.name} needs {topic.replicas} copies, and {live} replicas are live: start the missing "
                "replicas, or run `embarcadero replica add`"
            )
            continue
        last = scene.last.get(topic.lane) if topic.lane < BROKER_LANES_FIRST else None
        if last is not None and last.open and len(last.replicas) < topic.replicas:
            yield (
                f"topic {topic.name} has {len(last.replicas)} of the {topic.replicas} copies it needs: the next range "
                "gets more; wait"
            )


def _altered(scene: ClusterView, replicas: Sequence[ReplicaReport]) -> Iterator[str]:
    """Topics that were altered, but whose open ranges still use the earlier number of durable copies."""
    live = sum(replica.state == ReplicaState.LIVE for replica in replicas)
    topics = {topic.name: topic for topic in scene.topics.values()}
    counted: dict[str, set[int]] = {}
    for range_ in scene.last.values():
        topic = topics.get(scene.topic(range_.lane))
        if range_.open and topic is not None and range_.durable_on != topic.durable_on:
            counted.setdefault(topic.name, set()).add(range_.durable_on)
    for name, before in counted.items():
        wanted, now = topics[name].durable_on, " or ".join(map(str, sorted(before)))
        do = "the next range begins soon: wait"
        if live < wanted:
            do = (
                f"the next range waits until {wanted} replicas are live: start the missing replicas, or run "
                f"`embarcadero replica add` or `embarcadero topic alter {name} --durable-on {max(1, live)}`"
            )
        yield f"topic {name} has durable_on={wanted}, and ack=2 still waits for {now} copies; {do}"


def down_roles(nodes: Mapping[str, int], brokers: Mapping[int, MemberState], refs: Sequence[ReplicaRef]) -> set[str]:
    """Roles that should run but do not: their process is down, or runs and has not registered yet."""
    found = {role for role, pid in nodes.items() if not pid}
    for role in nodes:
        kind, _, number = role.partition(":")
        if kind == "broker" and brokers.get(int(number)) is not MemberState.LIVE:
            found.add(role)
        if kind == "replica" and not any(ref.replica == int(number) for ref in refs):
            found.add(role)
    return found
