"""Degraded states in status: each is named, with the remedy. A store and a fabric made by hand, no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.fabric.leader import create_durable, create_ranges
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.shared import SharedFabric
from embarcadero.node.cluster_view import ClusterView, LaneState, lane_report, replica_report
from embarcadero.node.report import degraded, down_roles
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.types import MemberState, ReplicaMember, Trouble
from embarcadero.wire.messages import AlterTopic

NODES = {"sequencer": 1, "broker:0": 2, "replica:0": 3, "replica:1": 4, "replica:2": 5}


class Cluster:
    """A topic that is durable on 2 of 3 replicas, in its first run; `again` starts another run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = Directory(MemoryStore())
        self.members: dict[int, ReplicaMember] = {}
        self.begin("disk-0", "disk-1", "disk-2")
        self.topic = self.directory.topics.create("orders", replicas=3, durable_on=2)

    def begin(self, *disks: str | None) -> None:
        """A run of the cluster with these disks; None: that replica does not start."""
        self.directory.begin_generation()
        self.fabric: Fabric = SharedFabric(self.folder / str(self.directory.generation), self.directory.generation)
        self.epoch = self.directory.elections.next_epoch()
        assert self.directory.elections.start_epoch(self.epoch, {})
        self.words = create_ranges(self.fabric, self.epoch)
        self.lines = {}
        for number, disk in enumerate(disks):
            if disk is not None:
                member = self.directory.replicas.register(number, disk, f"/replica-{number}", "here", 0)
                self.members[number] = member
                self.lines[number] = create_durable(self.fabric, member.ref)

    def say(self, number: int, line: int = 0) -> None:
        """Publish how far a replica has the open range."""
        range_ = self.directory.ranges.open_range(self.topic.lane)
        assert range_ is not None
        self.lines[number].add((range_.lane, range_.number), line)

    def scene(self) -> ClusterView:
        return ClusterView(self.fabric, self.directory, NODES)

    def said(self, down: dict[str, str] | None = None) -> list[str]:
        scene = self.scene()
        replicas = [replica_report(scene, member, {}) for member in scene.members.values()]
        lanes = [lane_report(scene, range_) for range_ in scene.last.values()]
        return degraded(scene, replicas, lanes, down or {})

    def state(self) -> str:
        (last,) = self.scene().last.values()
        return lane_report(self.scene(), last).state


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The cluster in a healthy state."""
    return Cluster(tmp_path)


def test_nothing_is_degraded(cluster: Cluster) -> None:
    """No problem is reported."""
    for number in range(3):
        cluster.say(number)

    assert cluster.said() == []
    assert cluster.state() == LaneState.OPEN


def test_processes_that_are_down(cluster: Cluster) -> None:
    """Each with the last line of its log; a replica too, with the effect on its topic."""
    cluster.directory.replicas.mark_dead(1, 1)
    said = cluster.said({"sequencer": "", "broker:0": "FabricFull: no room", "replica:1": "WrongFolder: not ours"})

    assert any("the sequencer is down: publishing waits" in one for one in said)
    assert any("broker 0 is down (FabricFull: no room)" in one for one in said)
    assert any("replica 1 is down (WrongFolder: not ours)" in one and "logs/replica-1.log" in one for one in said)
    assert any("topic orders needs 3 copies, and 2 replicas are live" in one for one in said)
    assert not any("ack=2" in one for one in said), "two of three are enough"


def test_too_few_copies_can_be_written(cluster: Cluster) -> None:
    """Dead, or with a disk that can't be written: ack=2 waits, and the cause and the remedy are reported."""
    cluster.directory.replicas.mark_dead(1, 1)
    cluster.lines[2].health.restart(int(Trouble.DISK_FULL))
    said = cluster.said()

    assert "1 of the 2 copies that make a record durable can be written: ack=2" in said[0]
    assert "replica add" in said[0]
    assert any("replica 2: disk full: free some space" in one for one in said)


@pytest.mark.parametrize("trouble", list(Trouble))
def test_every_trouble_has_a_description(cluster: Cluster, trouble: Trouble) -> None:
    """With the remedy."""
    cluster.lines[0].health.restart(int(trouble))
    (said,) = [one for one in cluster.said() if one.startswith("replica 0: ")]

    assert said.count(": ") >= 2
    assert str(trouble.name).lower().replace("_", " ") in said


def test_a_silent_replica(cluster: Cluster) -> None:
    """A replica without heartbeats is live for the store; watching it for a moment shows that it is silent."""
    scene = cluster.scene()
    beating = [cluster.lines[number].heartbeat for number in (0, 2)]
    scene.listen(lambda: [beat.advance(beat.value + 1) for beat in beating] and None, 3)
    replicas = [replica_report(scene, member, {}) for member in scene.members.values()]
    lanes = [lane_report(scene, range_) for range_ in scene.last.values()]
    (said,) = degraded(scene, replicas, lanes)

    assert said.startswith("replica 1: silent")
    assert [scene.well(cluster.members[number].ref) for number in range(3)] == [True, False, True]


def test_after_a_loss_of_memory(cluster: Cluster) -> None:
    """Which replica has not answered, and why; enough answers: wait. A loss that was accepted: wait."""
    cluster.begin("disk-0", "another", None)
    assert cluster.state() == LaneState.RECOVERING
    cluster.say(0, 5)
    said = cluster.said()
    assert "1 of the 2 copies needed for recovery have answered" in said[0]
    assert "replica 1 (its disk was replaced), replica 2 (down)" in said[0]
    assert "embarcadero topic recover orders --accept-loss" in said[0]
    assert any("replica 1 has a different disk than 1 of its ranges name" in one for one in said)
    cluster.directory.ranges.accept_loss(cluster.topic.lane)
    assert "because you accepted the loss" in cluster.said()[0]


def test_recovery_under_way(cluster: Cluster) -> None:
    """A copy that does not answer is damaged, or not checked yet; two of three are enough."""
    cluster.begin("disk-0", "disk-1", "disk-2")
    cluster.say(0, 5)
    assert "its copy is damaged, or not yet checked" in cluster.said()[0]
    cluster.say(1, 4)
    assert "recovery from disks is running (2 copies answered)" in cluster.said()[0]
    assert "wait" in cluster.said()[0]


def test_after_a_clean_stop_with_too_few_replicas(cluster: Cluster) -> None:
    """The lane continues when enough replicas are there."""
    assert cluster.directory.ranges.seal_clean(cluster.topic.lane, 1, 0, 0, cluster.epoch)
    cluster.begin("disk-0", None, None)

    assert cluster.state() == LaneState.WAITING
    assert "it needs 2 live replicas to continue, and 1 are live" in cluster.said()[0]


def test_replicas_that_are_drained_or_gone(cluster: Cluster) -> None:
    """Their remaining ranges, and the remedy; a replica without ranges is not mentioned."""
    spare = cluster.directory.replicas.register(4, "disk-4", "/replica-4", "here", 0)
    cluster.directory.replicas.drain(0)
    assert any("replica 0 is draining: 1 ranges are still on it; wait" in one for one in cluster.said())
    cluster.directory.replicas.mark_dead(4, spare.incarnation)
    assert any("have no replica to move to: 2 others are live" in one for one in cluster.said())
    lone = cluster.directory.replicas.register(5, "disk-5", "/replica-5", "here", 0)
    cluster.directory.replicas.mark_dead(5, lone.incarnation)
    assert not any("replica 5" in one for one in cluster.said())
    cluster.directory.replicas.mark_dead(1, 1)
    scene = ClusterView(cluster.fabric, cluster.directory, {"sequencer": 1})
    replicas = [replica_report(scene, member, {}) for member in scene.members.values()]
    assert any("They are not copied: 1 of its ranges have no replica" in one for one in degraded(scene, replicas, []))
    cluster.directory.replicas.register(4, "disk-4", "/replica-4", "here", 0)
    assert any("replica 1 is dead, and 1 ranges name it" in one for one in degraded(scene, replicas, []))
    assert any("copy its sealed ranges after placement.replace" in one for one in degraded(scene, replicas, []))


def test_an_alteration_that_waits_for_replicas(cluster: Cluster) -> None:
    """The open range keeps its copies: the meaning of ack=2 until the next range is reported."""
    for number in range(3):
        cluster.say(number)
    cluster.directory.topics.alter(AlterTopic(name="orders", durable_on=3))
    (said,) = cluster.said()
    assert said.startswith("topic orders has durable_on=3, and ack=2 still waits for 2 copies; the next range begins")
    cluster.directory.replicas.mark_dead(1, 1)
    (said,) = [one for one in cluster.said() if "has durable_on=3" in one]
    assert "the next range waits until 3 replicas are live" in said
    assert "`embarcadero topic alter orders --durable-on 2`" in said


def test_sealed_ranges_without_a_copy(cluster: Cluster) -> None:
    """The folders are missing: these ranges will not be copied, and the remedy is reported."""
    sealed_at_10 = cluster.topic.lane, 1, 10, 10
    live = cluster.directory.replicas.register(4, "disk-4", "/replica-4", "here", 0)
    refs = [cluster.members[1].ref, cluster.members[2].ref, live.ref]
    assert cluster.directory.ranges.seal_and_open(*sealed_at_10, refs, cluster.epoch)
    assert not any("no copy" in one for one in cluster.said()), "replicas that are well say so themselves"
    cluster.directory.replicas.mark_dead(0, 1)
    said = ClusterView(cluster.fabric, cluster.directory, {"sequencer": 1})
    replicas = [replica_report(said, member, {}) for member in said.members.values()]
    words = degraded(said, replicas, [])
    assert any("replace_after_s, except 1 of which no copy is complete" in one for one in words)
    (what,) = [one for one in words if one.startswith("topic orders, lane 0: no copy of 1 sealed range")]
    assert "(batches 0 to 9)" in what
    assert "bring back the files of replica 0 or 1 or 2" in what
    assert "`embarcadero topic trim orders --before-index 10`" in what

    cluster.directory.replicas.register(5, "disk-5", "/replica-5", "here", 0)
    cluster.directory.replicas.drain(1)
    (drained,) = [one for one in cluster.said() if "replica 1 is draining" in one]
    assert "no copy of 1 of them is complete" in drained
    cluster.directory.topics.trim("orders", cluster.topic.lane, 10)
    assert not any("no copy" in one for one in cluster.said())


def test_which_roles_are_down(cluster: Cluster) -> None:
    """A process that is down, a broker that is not live, a replica that is not a member."""
    refs = [cluster.members[0].ref]
    nodes = {"sequencer": 0, "broker:0": 7, "broker:1": 8, "replica:0": 9, "replica:1": 10}
    brokers = {0: MemberState.LIVE, 1: MemberState.DEAD}

    assert down_roles(nodes, brokers, refs) == {"sequencer", "broker:1", "replica:1"}
