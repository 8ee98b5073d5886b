"""What runs in a cluster's folder, for people and for programs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from embarcadero.fabric.shared import SharedFabric
from embarcadero.limits import HEARTBEAT_S
from embarcadero.node.cluster import ClusterFolder, ClusterInfo
from embarcadero.node.degraded import degraded, down_roles
from embarcadero.node.roles import candidate_role
from embarcadero.node.scene import LaneReport, ReplicaReport, Scene, lane_report, replica_report
from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore
from embarcadero.types import MemberState, ReplicaState
from embarcadero.watch.logs import last_words
from embarcadero.watch.places import Places

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
    """A sequencer candidate that does not reign, and its process (0 while it is down)."""

    candidate: int
    pid: int
    state: str  # "stands by", or "starting"
    metrics: str = ""


class SequencerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The sequencer that reigns: its epoch, and its process (0 while it is down); and those that stand by."""

    pid: int
    epoch: int
    metrics: str = ""
    candidate: int = 0
    standbys: list[StandbyReport] = []


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's process."""

    pid: int


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster."""

    cluster: str
    version: str
    brokers: list[BrokerReport]
    sequencer: SequencerReport
    supervisor: SupervisorReport
    fabric: str
    data_dir: str
    replicas: list[ReplicaReport] = []
    lanes: list[LaneReport] = []  # those with ranges
    degraded: list[str] = []  # what is not as it should be, and what to do

    @property
    def addresses(self) -> list[str]:
        """Where clients find the live brokers."""
        return [broker.address for broker in self.brokers if broker.state == MemberState.LIVE]


def sequencer_report(
    directory: Directory, epoch: int, nodes: Mapping[str, int], metrics: Mapping[str, str]
) -> SequencerReport:
    """Who reigns, and who stands by."""
    reign, standing = directory.reign(), {found.candidate: found.pid for found in directory.candidates()}
    reigning = 0 if reign is None else reign.candidate
    numbers = {int(role.partition(":")[2] or 0) for role in nodes if role.partition(":")[0] == _SEQUENCER}
    pids = {number: standing.get(number) or nodes.get(candidate_role(number), 0) for number in numbers | {*standing}}
    return SequencerReport(
        pid=pids.get(reigning, 0), epoch=epoch, metrics=metrics.get(candidate_role(reigning), ""), candidate=reigning,
        standbys=[
            StandbyReport(
                candidate=number, pid=pid, state="stands by" if number in standing else "starting",
                metrics=metrics.get(candidate_role(number), ""),
            )
            for number, pid in sorted(pids.items()) if number != reigning
        ],
    )  # fmt: skip


def report(folder: ClusterFolder, listen_s: float = 0.0) -> ClusterReport:
    """The running cluster of a folder; NotRunning if there is none.

    `listen_s`: how long, at most, to wait for a heartbeat of each replica; without, silent ones pass for live.
    """
    info: ClusterInfo = folder.require_running()
    with closing(SqliteStore(folder.store_path)) as store:
        directory = Directory(store)
        newest = directory.newest_members()
        epoch = directory.started_epoch()
        metrics = {role: p.address for p in Places(folder.path).read() if p.running for role in p.roles.split(",")}
        fabric = SharedFabric(Path(info.fabric), info.generation)
        nodes = {role: node.pid for node in info.nodes for role in node.roles.split(",")}
        scene = Scene(fabric, directory, nodes)
        if listen_s and scene.members:
            scene.listen(lambda: time.sleep(HEARTBEAT_S), math.ceil(listen_s / HEARTBEAT_S))
        replicas = [replica_report(scene, member, metrics) for member in scene.members.values()]
        lanes = [lane_report(scene, range_) for range_ in scene.last.values()]
        live = [member.ref for member in scene.members.values() if member.state is not ReplicaState.DEAD]
        down = down_roles(nodes, {member.broker: member.state for member in newest}, live)
        hosts = {role: node.roles for node in info.nodes for role in node.roles.split(",")}
        words = {role: last_words(folder.log_of(hosts[role])) for role in down}
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
        replicas=replicas,
        lanes=lanes,
        degraded=wrong,
    )
