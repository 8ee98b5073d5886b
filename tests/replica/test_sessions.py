"""Session checkpoints on disk: only of durable entries, and byte for byte as the sequencer wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.fabric.region import checkpoint_region
from embarcadero.limits import SESSIONS_FILE_BYTES_MAX
from embarcadero.replica.retention import CHECKPOINT
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import CheckpointWriter, read_checkpoint
from embarcadero.sequencer.order.sessions import ReorderBuffer, SessionTable
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import checkpoints, newest_checkpoint, write_checkpoint
from embarcadero.storage.layout import lane_folder
from embarcadero.types import NO_INDEX
from tests.replica.harness import World


def test_the_newest_checkpoint_below_the_line_is_kept(tmp_path: Path) -> None:
    """A checkpoint of entries that are not on disk yet waits for them."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    order = LaneOrder(world.directory.topics.get("t"), SessionTable(8), ReorderBuffer(8))
    name = checkpoint_region(world.reign.number, lane)
    checkpoints = CheckpointWriter(world.reign.fabric, name, 8)
    disk = RealDisk(world.folder(0))
    world.settle()
    writer.batches(b"a", b"b", b"c")
    order.next_index = 5
    checkpoints.write(order, 0)
    world.poll(5, step_us=200_000)
    assert newest_checkpoint(disk, lane_folder(lane), NO_INDEX, world.directory.topics.get("t").checkpoint_ids) is None

    writer.batches(b"d", b"e")
    world.poll(5, step_us=200_000)
    found = newest_checkpoint(disk, lane_folder(lane), NO_INDEX, world.directory.topics.get("t").checkpoint_ids)
    made = read_checkpoint(world.reign.fabric, name)
    assert found is not None
    assert made is not None
    assert found == (5, made.header.tobytes() + made.rows.tobytes())
    assert world.line(world.replicas[0].member.ref, lane, word=CHECKPOINT) == 5

    world.lose_fabric(1)
    world.settle()
    assert world.line(world.replicas[0].member.ref, lane, word=CHECKPOINT) == 5


@pytest.mark.parametrize("others", [0, 1])
def test_an_unreadable_checkpoint_blocks_no_replica(tmp_path: Path, others: int) -> None:
    """The replica starts, counts, and answers with an older checkpoint, or without."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"a", b"b")
    world.settle()
    world.kill_replica(0)
    disk = RealDisk(world.folder(0))
    for index in (1, 2)[1 - others :]:
        write_checkpoint(disk, lane_folder(lane), index, b"table", world.directory.topics.get("t").id)
    with (world.folder(0) / lane_folder(lane) / f"sessions-{2:020d}.checkpoint").open("r+b") as file:
        file.truncate(SESSIONS_FILE_BYTES_MAX + 100)
    world.start_replica(0)

    ref = world.replicas[0].member.ref
    assert (world.line(ref, lane), world.line(ref, lane, word=CHECKPOINT)) == (2, others)


def test_a_crash_in_the_middle_of_a_checkpoint_leaves_no_file_permanently(tmp_path: Path) -> None:
    """The next incarnation removes it when it first looks at the lane."""
    world = World(tmp_path)
    lane = world.topic()
    world.reign.lane(lane)
    world.settle()
    folder = world.folder(0) / lane_folder(lane)
    world.kill_replica(0)
    (folder / f"sessions-{2:020d}.checkpoint.tmp").write_bytes(b"half")
    world.start_replica(0)

    assert [path.name for path in folder.iterdir()] == ["range-0000000001"]


def test_checkpoints_restored_by_a_loss_of_power_are_removed_again(tmp_path: Path) -> None:
    """The removal of older ones is not synced. A replica that gets no more ranges has to remove them at its start."""
    world = World(tmp_path)
    lane = world.topic()
    world.reign.lane(lane).batches(b"a", b"b")
    world.settle()
    disk = RealDisk(world.folder(0))
    for index in (1, 2, 9):
        write_checkpoint(disk, lane_folder(lane), index, b"table", world.directory.topics.get("t").id)
    assert checkpoints(disk, lane_folder(lane)) == [1, 2, 9]
    world.lose_fabric(1)
    world.settle()
    assert checkpoints(disk, lane_folder(lane)) == [9]
