"""Where mirrors are, and when they are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.errors import BadRegion, ClusterError
from embarcadero.fabric.leader import create_epochs
from embarcadero.fabric.region import EPOCHS_REGION
from embarcadero.node.fabric_folder import (
    make_mirror,
    mirror_folder,
    mirror_home,
    open_earlier_mirror,
    open_fabric,
    remove_if_clean,
    remove_mirrors,
    remove_strays,
)
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import EarlierGeneration
from embarcadero.placement.store import MemoryStore

CLUSTER = 0x1234_ABCD << 32


def test_no_mirror_is_the_fabric_alone(tmp_path: Path) -> None:
    """Nothing is mirrored unless a folder is given; with one, the mirror is named after the cluster."""
    assert mirror_home("", "1234abcd") == ""
    assert mirror_home(str(tmp_path), "1234abcd") == str(tmp_path / "embarcadero-1234abcd-mirror")
    fabric = open_fabric(str(tmp_path), "", CLUSTER | 1).fabric
    create_epochs(fabric)
    assert fabric.names() == [EPOCHS_REGION]


def test_the_mirror_of_an_earlier_generation_is_found_and_another_is_refused(tmp_path: Path) -> None:
    """Its regions contain their generation."""
    home = str(tmp_path / "home")
    (tmp_path / "first").mkdir()
    create_epochs(open_fabric(str(tmp_path / "first"), str(make_mirror(home, CLUSTER | 3)), CLUSTER | 3).fabric)
    found = open_earlier_mirror(EarlierGeneration(generation=3, epoch=1, mirror=home), CLUSTER | 5)
    assert found is not None
    assert found.attach(EPOCHS_REGION).name == EPOCHS_REGION
    assert open_earlier_mirror(EarlierGeneration(generation=4, epoch=1, mirror=home), CLUSTER | 5) is None
    mirror_folder(home, 3).rename(mirror_folder(home, 4))
    moved = open_earlier_mirror(EarlierGeneration(generation=4, epoch=1, mirror=home), CLUSTER | 5)
    assert moved is not None
    with pytest.raises(BadRegion, match="another cluster"):
        moved.attach(EPOCHS_REGION)


def test_only_needed_mirrors_are_kept(tmp_path: Path) -> None:
    """Unknown mirrors are removed at the start, needed ones when all lanes are back, the folder with the last one."""
    home = str(tmp_path / "home")
    folders = [make_mirror(home, number) for number in range(4)]
    past = [EarlierGeneration(generation=2, epoch=1, mirror=home), EarlierGeneration(generation=1, epoch=1, mirror="")]
    remove_strays(home, past)
    assert [folder.exists() for folder in folders] == [False, False, True, False]
    remove_mirrors(past)
    assert not Path(home).exists()


def test_a_stop_leaves_a_mirror_only_if_a_lane_needs_it(tmp_path: Path) -> None:
    """A range that is still open has to be recovered, and the mirror has its end."""
    directory = Directory(MemoryStore())
    directory.replicas.register(0, "disk", "/0", "host", 0)
    folder = make_mirror(str(tmp_path / "home"), 1)
    topic = directory.topics.create("t", replicas=1)
    remove_if_clean(directory, folder)
    assert folder.exists()
    assert directory.ranges.seal_clean(topic.lane, 1, 0, 0, directory.elections.next_epoch())
    remove_if_clean(directory, folder)
    assert not folder.parent.exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """With the setting to change."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"fabric\.mirror"):
        make_mirror(str(tmp_path / "file"), 1)
