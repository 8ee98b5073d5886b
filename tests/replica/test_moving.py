"""Moving sealed ranges to another disk, while no copy of some of them can be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embarcadero.storage.layout import range_folder
from tests.replica.harness import World, Writer
from tests.replica.test_ranges import damage_middle, refs, written

LONE = 5
"""More ranges without a readable copy than one replica takes over at a time."""


def sealed_on(world: World, name: str, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, int, Writer]:
    """Lane and number of a range of ten batches that was sealed on `before`, and the writer; `after` continue."""
    lane = world.topic(name, replicas=len(before), durable_on=len(before))
    writer, number, end = written(world, lane), 1, 10
    if {ref.replica for ref in world.range_(lane).replicas} != set(before):
        assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, *before), world.reign.number)
        world.settle()
        writer.batches(*(bytes([n + 1]) * 300 for n in range(10)))
        world.settle()
        number, end = 2, 20
    assert world.directory.ranges.seal_and_open(lane, number, end, 2 * end, refs(world, *after), world.reign.number)
    world.settle()
    return lane, number, writer


def lose(world: World, replica: int) -> Path:
    """A replica dies, and its folder is moved elsewhere; returns the new path."""
    world.kill_replica(replica)
    return world.folder(replica).rename(world.path / "away")


def on(world: World, replica: int) -> set[tuple[int, int]]:
    return {(range_.lane, range_.number) for range_ in world.directory.replicas.ranges_on(replica)}


def test_ranges_without_a_readable_copy_do_not_block_the_others(tmp_path: Path) -> None:
    """They wait for their disk. A range with a healthy copy elsewhere is copied meanwhile."""
    world = World(tmp_path, replicas=3)
    lone = {sealed_on(world, f"lone{number}", (0,), (1,))[:2] for number in range(LONE)}
    lane, number, writer = sealed_on(world, "safe", (0, 1), (1, 2))
    lose(world, 0)
    world.directory.replicas.drain(0)
    world.poll(60, step_us=200_000)
    world.settle()

    assert on(world, 0) == lone
    assert {ref.replica for ref in world.range_(lane, number).replicas} == {1, 2}
    assert world.files(2, lane, number) == writer.written[-10:]


def test_ranges_without_a_readable_copy_are_copied_once_their_disk_is_back(tmp_path: Path) -> None:
    """Attempts become rare, and restart as soon as a replica comes back."""
    world = World(tmp_path, replicas=2)
    made = [sealed_on(world, f"lone{number}", (0,), (1,)) for number in range(LONE)]
    away = lose(world, 0)
    world.directory.replicas.drain(0)
    world.poll(600, step_us=500_000)
    attempts = world.notes[1].count("can't complete a copy")
    assert attempts < 15 * LONE
    for lane, number, _ in made:
        assert not (world.folder(1) / range_folder(lane, number)).exists()

    away.rename(world.folder(0))
    world.start_replica(0)
    world.poll(20, step_us=200_000)
    world.settle()
    assert not on(world, 0)
    for lane, number, writer in made:
        assert world.files(1, lane, number) == writer.written[-10:]


def test_ranges_whose_folder_comes_back_without_a_process_are_copied_in_time(tmp_path: Path) -> None:
    """The store does not show it: the next attempt finds it."""
    world = World(tmp_path, replicas=2)
    sealed_on(world, "lone", (0,), (1,))
    away = lose(world, 0)
    world.directory.replicas.drain(0)
    world.poll(600, step_us=500_000)
    away.rename(world.folder(0))
    world.poll(140, step_us=500_000)
    world.settle()

    assert not on(world, 0)


def test_a_partial_copy_of_a_range_whose_source_is_gone_stays(tmp_path: Path) -> None:
    """It may be the last copy. It does not block other ranges, and is completed once the rest is there."""
    world = World(tmp_path, replicas=3, segment_bytes=2_048)
    made = [sealed_on(world, f"lone{number}", (0,), (1,)) for number in range(LONE)]
    lane, number, _ = sealed_on(world, "safe", (0, 1), (1, 2))
    world.kill_replica(0)
    for lone, one, _ in made:
        segments = sorted((world.folder(0) / range_folder(lone, one)).glob("*.log"))
        assert len(segments) >= 2
        segments[1].rename(segments[1].with_suffix(".away"))
    world.directory.replicas.drain(0)
    world.poll(200, step_us=200_000)
    assert on(world, 0) == {one[:2] for one in made}
    assert {ref.replica for ref in world.range_(lane, number).replicas} == {1, 2}
    everybodys = {tags: copy for replica in world.replicas.values() for tags, copy in replica.ranges.copies.items()}
    copied = [everybodys[lone, one].log for lone, one, _ in made]
    assert all(log.first < log.end < log.first + 10 for log in copied)

    for path in world.folder(0).glob("*/*/*.away"):
        path.rename(path.with_suffix(".log"))
    world.poll(60, step_us=200_000)
    world.settle()
    assert not on(world, 0)
    for lone, one, writer in made:
        [ref] = world.range_(lone, one).replicas
        assert world.files(ref.replica, lone, one) == writer.written[-10:]


def test_a_trim_gives_up_ranges_without_a_readable_copy(tmp_path: Path) -> None:
    """The operator's remedy if the disk is gone permanently: no range remains on the drained replica."""
    world = World(tmp_path, replicas=2)
    lane, number, _ = sealed_on(world, "lone", (0,), (1,))
    lose(world, 0)
    world.directory.replicas.drain(0)
    world.poll(60, step_us=200_000)
    assert on(world, 0)
    end = world.range_(lane, number).end
    assert end is not None
    world.directory.topics.trim("lone", lane, end)
    assert world.directory.ranges.forget_trimmed(lane, number + 1, end), "a checkpoint of its sessions covers it"
    world.poll(20, step_us=200_000)

    assert not on(world, 0)
    assert not world.replicas[1].ranges.adopted


def test_a_replica_that_is_no_longer_drained_keeps_its_ranges(tmp_path: Path) -> None:
    """No replica keeps trying to copy them."""
    world = World(tmp_path, replicas=2)
    sealed_on(world, "lone", (0,), (1,))
    lose(world, 0)
    world.directory.replicas.drain(0)
    world.poll(20, step_us=200_000)
    world.directory.replicas.undrain(0)
    world.poll(20, step_us=200_000)
    before = world.notes[1].count("can't complete a copy")
    assert before
    world.poll(400, step_us=200_000)

    assert world.notes[1].count("can't complete a copy") == before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_complete_copy_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    """Also if the store could not be updated yet, and a scrub finds damage in it."""
    world = World(tmp_path, replicas=2)
    lane, number, writer = sealed_on(world, "lone", (0,), (1,))
    world.directory.replicas.drain(0)
    monkeypatch.setattr(world.replicas[1].moving, "completed", lambda _copy: None)
    world.poll(20, step_us=200_000)
    world.settle()
    assert world.replicas[1].ranges.copies[lane, number].complete
    shutil.rmtree(world.folder(0) / range_folder(lane, number))
    if damaged:
        damage_middle(world, 1, lane)
    world.poll(60, step_us=200_000)

    assert (lane, number) in world.replicas[1].ranges.adopted
    assert damaged or world.files(1, lane, number) == writer.written[-10:]
