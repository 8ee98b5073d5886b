"""Sealed ranges without a remaining copy, according to the folders of replicas."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from embarcadero.errors import DiskFailed
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.node.cluster_view import in_words, unreadable_ranges
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.layout import range_folder
from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState
from tests.cli.folders import COUNT, StoppedCluster


class Folders:
    """Two replicas with a whole copy each of a sealed range."""

    def __init__(self, path: Path) -> None:
        self.cluster = StoppedCluster(path, replicas=2, durable_on=2)
        self.range = msgspec.structs.replace(self.cluster.range, end=COUNT)
        self.members = {
            number: ReplicaMember(
                replica=number, incarnation=1, disk="d", folder=str(self.cluster.folder.replica(number)), host="here",
                pid=0, state=ReplicaState.DEAD,
            )
            for number in range(2)
        }  # fmt: skip

    def folder(self, number: int) -> Path:
        return self.cluster.folder.replica(number) / range_folder(self.range.lane, self.range.number)

    def found(self, trimmed: int = 0, range_: Range | None = None) -> list[Range]:
        return unreadable_ranges([range_ or self.range], self.members, {self.range.lane: trimmed})


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_one_whole_copy_is_enough(folders: Folders) -> None:
    """The folder of the other copy is gone, or its replica is."""
    assert folders.found() == []
    shutil.rmtree(folders.cluster.folder.replica(0))
    assert folders.found() == []
    del folders.members[0]
    assert folders.found() == []


def test_without_a_copy_a_range_is_unreadable(folders: Folders) -> None:
    """Folders, ranges in them, or replicas are gone; not if the range was trimmed, is empty, open, or has no copies."""
    shutil.rmtree(folders.cluster.folder.replica(0))
    shutil.rmtree(folders.folder(1))
    assert folders.found() == [folders.range]
    assert folders.found(trimmed=COUNT) == []
    changes: list[dict[str, Any]] = [{"end": None}, {"end": 0}, {"replicas": []}]
    for change in changes:
        assert folders.found(range_=msgspec.structs.replace(folders.range, **change)) == []
    folders.members.clear()
    assert folders.found() == [folders.range]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_segment_that_is_missing_in_all_copies_is_reported(folders: Folders, gone: int) -> None:
    """The first or the last segment. Copies that lack different segments are complete together."""
    ours, theirs = (sorted(folders.folder(number).glob("*.log")) for number in range(2))
    assert len(ours) == len(theirs) == 2
    ours[gone].unlink()
    assert folders.found() == []
    theirs[1 - gone].unlink()
    assert folders.found() == []
    theirs[gone].unlink()
    assert folders.found() == [folders.range]


def test_a_segment_whose_header_is_damaged_is_reported(folders: Folders) -> None:
    """Its content is unknown."""
    shutil.rmtree(folders.folder(0))
    segment = sorted(folders.folder(1).glob("*.log"))[1]
    segment.write_bytes(bytes(200) + segment.read_bytes()[200:])
    assert folders.found() == [folders.range]


def test_segments_below_the_start_of_the_lane_are_not_reported(folders: Folders) -> None:
    """Segments are removed when they are trimmed."""
    shutil.rmtree(folders.folder(0))
    sorted(folders.folder(1).glob("*.log"))[0].unlink()
    assert folders.found(trimmed=COUNT - 1) == []
    assert folders.found() == [folders.range]


@pytest.mark.parametrize("when", ["list", "open"])
def test_a_folder_without_permission_counts_as_readable(folders: Folders, when: str) -> None:
    """A user without permission to read records may run status."""

    def refuse(*_: object) -> None:
        raise DiskFailed("can't read: permission denied", "ask for it")

    shutil.rmtree(folders.folder(0))
    with patch.object(RealDisk, when, refuse):
        assert folders.found() == []


def test_each_lane_is_described_in_a_sentence() -> None:
    """With some of its batches, and the end of the last range: records below it would be given up."""
    refs = [ReplicaRef(replica=number, incarnation=1, disk="d") for number in (7, 2)]
    lanes = 3, BROKER_LANES_FIRST + 1
    made = [
        Range(lane=lane, number=n + 1, start=10 * n, start_seq=0, replicas=refs[: 1 + n], durable_on=1, end=10 * n + 10)
        for lane in lanes
        for n in range(4 if lane == 3 else 1)
    ]
    first, second = in_words(made, {3: "a", lanes[1]: "b"})
    assert first.startswith("topic a, lane 3: no copy of 4 sealed ranges (batches 0 to 9, 10 to 19, 20 to 29, ...)")
    assert "files of replica 2 or 7;" in first
    assert first.endswith("below 40: `embarcadero topic trim a --before-index 40`")
    assert "no copy of 1 sealed range (batches 0 to 9) is complete" in second
    assert second.endswith(f"`embarcadero topic trim b --before-index 10 --lane {lanes[1]}`")
