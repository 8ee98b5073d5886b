"""A deleted topic leaves nothing with its replicas: no memory, no object, no file, whenever they are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.fabric.region import checkpoint_region
from embarcadero.replica import ranges as replica_ranges
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import CheckpointWriter
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import checkpoints, write_checkpoint
from embarcadero.storage.layout import lane_folder
from tests.replica.harness import Reign, World


class Killed(BaseException):
    """Raised where a SIGKILL would strike."""


def used(world: World, name: str) -> int:
    """A topic with records and a session checkpoint, both on disk; its lane."""
    lane = world.topic(name)
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"a", b"b", b"c")
    order = LaneOrder(world.directory.topics.get(name), SessionTable(8), ReorderBuffer(8))
    order.next_index = 3
    CheckpointWriter(world.reign.fabric, checkpoint_region(world.reign.number, lane), 8).write(order, 0)
    world.poll(10, step_us=200_000)
    assert checkpoints(RealDisk(world.folder(0)), lane_folder(lane)) == [3]
    return lane


def lane_folders(world: World) -> list[str]:
    return sorted(path.name for path in world.folder(0).iterdir() if path.name.startswith("lane-") and path.is_dir())


def test_a_replica_drops_the_memory_of_deleted_topics(tmp_path: Path) -> None:
    """Order rings and checkpoint regions take megabytes; a mapping keeps them though they are unlinked."""
    world = World(tmp_path)
    used(world, "kept")
    replica = world.replicas[0]
    for number in range(5):
        lane = used(world, f"t{number}")
        assert lane in replica.leader._orders
        assert lane in replica.sessions._regions
        world.directory.topics.delete(f"t{number}")
        world.poll(20, step_us=200_000)
    kept = {world.directory.topics.get("kept").lane}
    assert replica.leader._orders.keys() == replica.sessions._regions.keys() == replica.sessions._known.keys() == kept
    assert lane_folders(world) == [lane_folder(*kept)]


def test_a_replica_drops_the_range_words_of_deleted_topics(tmp_path: Path) -> None:
    """Those of other topics stay, since each is learned only once."""
    world = World(tmp_path)
    lanes = [world.topic(name) for name in ("kept", "t")]
    leader = world.replicas[0].leader
    world.settle()
    for lane in lanes:
        world.reign.say(lane, 1)
        assert leader.word(lane) is not None
    world.directory.topics.delete("t")
    world.poll(5, step_us=200_000)
    assert [leader.word(lane) is not None for lane in lanes] == [True, False]


def test_a_new_epoch_drops_the_regions_of_the_previous_one(tmp_path: Path) -> None:
    """The sequencer that takes over has regions of its own."""
    world = World(tmp_path)
    lane = used(world, "t")
    replica = world.replicas[0]
    assert replica.sessions._regions.keys() == {lane}
    successor = Reign(world)
    successor.lane(lane, 3)
    successor.start()
    world.poll(10, step_us=200_000)
    assert replica.sessions._regions == {}


def test_a_kill_before_the_folder_of_a_lane_is_removed_leaves_no_files_permanently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last range is removed, the session checkpoints beside it are not: the next incarnation removes them."""
    world = World(tmp_path)
    lane = used(world, "t")
    real, folder = replica_ranges.remove_range, world.folder(0) / lane_folder(lane)

    def killed_after(disk: RealDisk, name: str) -> None:
        real(disk, name)
        if name.endswith("range-0000000001"):
            raise Killed

    monkeypatch.setattr(replica_ranges, "remove_range", killed_after)
    world.directory.topics.delete("t")
    with pytest.raises(Killed):
        world.poll(50, step_us=200_000)
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == [f"sessions-{3:020d}.checkpoint"]

    world.kill_replica(0)
    world.start_replica(0)
    world.poll(20, step_us=200_000)
    assert lane_folders(world) == []


def test_leftovers_beside_ranges_of_this_replica_stay(tmp_path: Path) -> None:
    """A lane whose folder has checkpoints only, and whose range will be copied again: nothing there is removed."""
    world = World(tmp_path)
    lane = used(world, "t")
    world.kill_replica(0)
    folder = world.folder(0) / lane_folder(lane)
    for path in (folder / "range-0000000001").iterdir():
        path.unlink()
    (folder / "range-0000000001").rmdir()
    world.start_replica(0)
    world.poll(20, step_us=200_000)
    assert checkpoints(RealDisk(world.folder(0)), lane_folder(lane)) == [3]


def test_the_next_topic_of_a_lane_reads_no_checkpoint_of_the_previous_one(tmp_path: Path) -> None:
    """Lane numbers are reused after a restart; a file that a crash left may have a higher index than new ones."""
    world = World(tmp_path)
    lane = world.topic()
    world.kill_replica(0)
    disk = RealDisk(world.folder(0))
    write_checkpoint(disk, lane_folder(lane), 9, b"of a deleted topic", topic_id=7)
    world.start_replica(0)
    world.settle()

    assert world.replicas[0].sessions.on_disk(lane) == 0
    assert checkpoints(disk, lane_folder(lane)) == []
