"""Checkpoints on disk: the newest whole one at or below an index."""

from __future__ import annotations

import pytest

from embarcadero.storage.folder import checkpoints, drop_older, newest_checkpoint, sweep_drafts, write_checkpoint
from embarcadero.storage.layout import lane_folder
from tests.storage.crash_disk import World

FOLDER = lane_folder(3)


def test_the_newest_one_at_or_below_an_index() -> None:
    """Others are skipped; dropping keeps those at or above."""
    disk = World().disk()
    assert newest_checkpoint(disk, FOLDER, 100, (0,)) is None
    for index in (0, 10, 30):
        write_checkpoint(disk, FOLDER, index, b"table" * index, 0)

    assert newest_checkpoint(disk, FOLDER, 29, (0,)) == (10, b"table" * 10)
    assert newest_checkpoint(disk, FOLDER, 30, (0,)) == (30, b"table" * 30)
    assert drop_older(disk, FOLDER, 30) == 2
    assert checkpoints(disk, FOLDER) == [30]
    assert newest_checkpoint(disk, FOLDER, 29, (0,)) is None


@pytest.mark.parametrize("place", [0, 9, 13, 17, 25, 62, 64, 90])
def test_a_damaged_checkpoint_is_skipped(place: int) -> None:
    """Any flipped bit, in header or table, or a short file: the older checkpoint is used."""
    world = World()
    disk = world.disk()
    write_checkpoint(disk, FOLDER, 10, b"old" * 9, 0)
    write_checkpoint(disk, FOLDER, 20, b"new" * 9, 0)
    data = world.names[f"{FOLDER}/sessions-{20:020d}.checkpoint"].data
    data[place] ^= 8
    assert newest_checkpoint(disk, FOLDER, 99, (0,)) == (10, b"old" * 9)
    data[place] ^= 8
    assert newest_checkpoint(disk, FOLDER, 99, (0,)) == (20, b"new" * 9)
    del data[-1:]
    assert newest_checkpoint(disk, FOLDER, 99, (0,)) == (10, b"old" * 9)


def test_an_unreadable_checkpoint_is_skipped() -> None:
    """A bad sector is under the newest one: the older checkpoint is used."""
    world = World()
    disk = world.disk()
    for index in (10, 20):
        write_checkpoint(disk, FOLDER, index, b"table" * index, 0)
    world.unreadable.add(f"{FOLDER}/sessions-{20:020d}.checkpoint")
    assert newest_checkpoint(disk, FOLDER, 99, (0,)) == (10, b"table" * 10)

    world.unreadable.add(f"{FOLDER}/sessions-{10:020d}.checkpoint")
    assert newest_checkpoint(disk, FOLDER, 99, (0,)) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_written_checkpoint_survives_a_crash(seed: int) -> None:
    """Once write returns, it is there."""
    world = World(seed)
    write_checkpoint(world.disk(), FOLDER, 10, b"a" * 5_000, 0)
    world.crash()

    assert newest_checkpoint(world.disk(), FOLDER, 10, (0,)) == (10, b"a" * 5_000)


def test_incomplete_checkpoints_of_a_crash_are_swept() -> None:
    """And nothing else: checkpoints stay, and so do drafts of others."""
    disk = World().disk()
    sweep_drafts(disk, FOLDER)
    write_checkpoint(disk, FOLDER, 10, b"table", 0)
    for name in (f"sessions-{20:020d}.checkpoint.tmp", f"sessions-{30:020d}.checkpoint.tmp", "other.tmp"):
        disk.open(f"{FOLDER}/{name}", create=True).close()
    sweep_drafts(disk, FOLDER)

    assert disk.list(FOLDER) == ["other.tmp", f"sessions-{10:020d}.checkpoint"]
