"""Resources of repair are released: peers' files once they are not needed, and its own incomplete results."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import write_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder, repair_folder
from tests.replica.harness import World, Writer
from tests.replica.test_ranges import Slow, refs, written


def open_below(folder: Path) -> int:
    """How many files of a folder this process has open."""
    there = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            there += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")
    return there


def lagging(tmp_path: Path) -> tuple[World, int, Writer]:
    """A range that was sealed while one of its two replicas was down, and is complete on the other one."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane, 4)
    world.kill_replica(1)
    writer.batches(*(bytes([n + 1]) * 500 for n in range(20)))
    world.poll()
    assert world.directory.ranges.seal_and_open(lane, 1, 24, 48, refs(world, 0), world.reign.number)
    world.settle()
    return world, lane, writer


def test_files_of_peers_are_closed_once_a_copy_is_complete(tmp_path: Path) -> None:
    """However many ranges are repaired, no more files stay open."""
    world, lane, writer = lagging(tmp_path)
    peers = world.folder(0) / range_folder(lane, 1)
    before = open_below(peers)
    world.start_replica(1)
    world.settle()

    assert world.files(1, lane) == writer.written
    assert world.replicas[1].counters.repaired_entries == 20
    assert open_below(peers) == before


def test_files_that_a_worker_reads_are_closed_when_it_is_done(tmp_path: Path) -> None:
    """Not before, though the peer is declared dead and the topic is deleted meanwhile."""
    world, lane, _ = lagging(tmp_path)
    peers = world.folder(0) / range_folder(lane, 1)
    late = world.start_replica(1)
    late.repair._workers = slow = Slow()
    world.poll(3)
    assert len(slow.jobs) == 1
    world.kill_replica(0)
    world.poll(3)
    assert open_below(peers) == 1
    world.directory.topics.delete("t")
    world.poll(3)
    assert open_below(peers) == 1

    slow.jobs.pop()()
    world.settle()
    assert not open_below(peers)
    assert late.counters.ranges_removed == 1


def test_an_unfinished_repair_is_removed_with_its_range(tmp_path: Path) -> None:
    """The last range of its lane is given up before its missing records have come: nothing of the lane remains."""
    world = World(tmp_path, replicas=2, segment_bytes=2_048)
    lane = world.topic(replicas=2, durable_on=1)
    written(world, lane, 14)
    world.kill_replica(1)
    damaged, good = (sorted((world.folder(n) / range_folder(lane, 1)).glob("*.log")) for n in (1, 0))
    damaged[1].unlink()
    spoiled = bytearray(good[1].read_bytes())
    spoiled[1_000] ^= 0xFF
    good[1].write_bytes(bytes(spoiled))
    assert world.directory.ranges.seal_and_open(lane, 1, 14, 28, refs(world, 0), world.reign.number)
    world.start_replica(1)
    world.poll(20)
    assert (world.folder(1) / repair_folder(range_folder(lane, 1))).exists()
    write_checkpoint(RealDisk(world.folder(1)), lane_folder(lane), 7, b"table", world.directory.topics.get("t").id)
    world.directory.topics.delete("t")
    world.settle()

    assert not [path for path in world.folder(1).iterdir() if path.name.startswith("lane-")]


def test_attempts_for_a_removed_range_are_forgotten(tmp_path: Path) -> None:
    """No peer could help, and then the topic is deleted."""
    world, lane, _ = lagging(tmp_path)
    for path in (world.folder(0) / range_folder(lane, 1)).glob("*.log"):
        path.unlink()
    late = world.start_replica(1)
    world.poll(20)
    assert late.repair._tried
    world.directory.topics.delete("t")
    world.settle()

    assert not late.repair._tried
