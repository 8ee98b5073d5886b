"""Ownership of folders: a folder of another owner is never written to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from embarcadero.errors import WrongFolder
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import IDENTITY_FILE, open_folder, read_identity
from tests.storage.crash_disk import World


def opened(folder: Path, cluster: str = "c1", replica: int = 1, generation: int = 1):
    disk = RealDisk(folder, create=True)
    try:
        return open_folder(disk, cluster, replica, generation)
    finally:
        disk.close()


def test_a_folder_gets_an_owner_and_keeps_it(tmp_path: Path) -> None:
    """The same disk id at every start. The generation follows the cluster, and never goes back."""
    first = opened(tmp_path / "a" / "replica-1")
    again = opened(tmp_path / "a" / "replica-1", generation=5)

    assert first.disk == again.disk
    assert (first.generation, again.generation) == (1, 5)
    assert opened(tmp_path / "a" / "replica-1", generation=2).generation == 5
    assert opened(tmp_path / "b").disk != first.disk


def test_a_wiped_disk_has_another_id(tmp_path: Path) -> None:
    """An empty folder under an old name is another disk."""
    first = opened(tmp_path / "r")
    (tmp_path / "r" / IDENTITY_FILE).unlink()

    assert opened(tmp_path / "r").disk != first.disk


def test_other_folders_are_refused(tmp_path: Path) -> None:
    """Another cluster's, another replica's, a newer format's, a damaged one, records without an identity."""
    opened(tmp_path)
    with pytest.raises(WrongFolder, match="cluster c1"):
        opened(tmp_path, cluster="c2")
    with pytest.raises(WrongFolder, match="replica 1"):
        opened(tmp_path, replica=2)
    path = tmp_path / IDENTITY_FILE
    good = path.read_bytes()
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(good), "format": 2}))
    with pytest.raises(WrongFolder, match="format 2"):
        opened(tmp_path)
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(WrongFolder):
            opened(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(WrongFolder, match="damaged"):
        opened(tmp_path)
    path.unlink()
    (tmp_path / "lane-0000000001").mkdir()
    with pytest.raises(WrongFolder, match=r"no identity\.json"):
        opened(tmp_path)


def test_two_replicas_on_one_folder(tmp_path: Path) -> None:
    """The second one is refused while the first one runs."""
    first, second = RealDisk(tmp_path), RealDisk(tmp_path)
    open_folder(first, "c", 1, 1)
    with pytest.raises(WrongFolder, match="in use"):
        open_folder(second, "c", 1, 1)
    first.close()

    assert open_folder(second, "c", 1, 1).replica == 1


@pytest.mark.parametrize("seed", range(40))
def test_an_identity_survives_crashes(seed: int) -> None:
    """Complete or absent: the next start finds the result of a completed call."""
    world = World(seed)
    told = None
    for generation in range(1, 6):
        world.crash()
        disk = world.disk()
        found = open_folder(disk, "c", 3, generation)
        assert told is None or told == found.disk
        told = found.disk
        world.crash()
        kept = read_identity(world.disk())
        assert kept is not None
        assert kept.generation == generation
