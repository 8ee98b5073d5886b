"""Offline verification: silent about correct files, precise about wrong ones, and without changes."""

from __future__ import annotations

import hashlib
from copy import deepcopy

import msgspec
import pytest

from embarcadero.storage.folder import open_folder, write_checkpoint
from embarcadero.storage.layout import lane_folder, segment_name
from embarcadero.storage.verify import Report, Severity, check_ranges, verify_data_dir, verify_folder
from embarcadero.types import Range, ReplicaRef
from tests.storage.crash_disk import World
from tests.storage.records import FOLDER, LANE, RANGE, SMALL, START, START_SEQ, Source, fill, open_log

COUNT = 150


class Folder:
    """A replica's folder with a range, an identity and a checkpoint."""

    def __init__(self, sealed: bool = False) -> None:
        self.world = World()
        disk = self.world.disk()
        self.disk_id = open_folder(disk, SMALL.cluster, 4, 1).disk
        log = open_log(disk)
        fill(log, Source(), COUNT)
        if sealed:
            log.seal(log.end)
        self.infos, self.end, self.end_seq = log.segments, log.end, log.end_seq
        log.close()
        write_checkpoint(disk, lane_folder(LANE), START + 50, b"sessions", 0)

    def verify(self, ranges: list[Range] | None = None) -> Report:
        before = self.digest()
        report = verify_folder(self.world.disk(), ranges=ranges)
        assert self.digest() == before
        return report

    def digest(self) -> dict[str, str]:
        return {
            path: hashlib.sha256(node.data).hexdigest() for path, node in self.world.names.items() if node is not None
        }

    def log(self, number: int) -> bytearray:
        return self.world.names[f"{FOLDER}/{segment_name(self.infos[number].base_seq)}"].data

    def range(self, number: int = RANGE, start: int = START, end: int | None = None) -> Range:
        ref = ReplicaRef(replica=4, incarnation=1, disk=self.disk_id)
        return Range(
            lane=LANE, number=number, start=start, start_seq=START_SEQ, replicas=[ref], durable_on=1, end=end,
            end_seq=None if end is None else self.end_seq,
        )  # fmt: skip


@pytest.mark.parametrize("sealed", [False, True])
def test_an_intact_folder_has_no_findings(sealed: bool) -> None:
    """All records and bytes are counted."""
    folder = Folder(sealed)
    report = folder.verify([folder.range(end=folder.end if sealed else None)])

    assert report.findings == []
    assert report.ok
    assert (report.replicas, report.ranges, report.batches) == (1, 1, COUNT)
    assert report.segments == len(folder.infos)
    assert report.copies["", LANE, RANGE] == (START, folder.end, True)


def test_every_flipped_bit_in_a_record_is_an_error_that_names_it() -> None:
    """Somewhere in each segment; padding belongs to no record."""
    folder = Folder()
    for number, info in enumerate(folder.infos):
        data = folder.log(number)
        data[128 + 5] ^= 1
        report = folder.verify()
        assert not report.ok
        assert [finding.file for finding in report.findings] == [f"{FOLDER}/{segment_name(info.base_seq)}"]
        assert f"index {info.base_index} " in report.findings[0].problem
        data[128 + 5] ^= 1
    assert folder.verify().ok


def test_missing_and_swapped_segments_are_errors() -> None:
    """By the chain of headers and footers, the last one included."""
    for number in range(4):
        folder = Folder()
        del folder.world.names[f"{FOLDER}/{segment_name(folder.infos[number].base_seq)}"]
        assert not folder.verify().ok
    folder = Folder()
    del folder.world.names[f"{FOLDER}/{segment_name(folder.infos[-1].base_seq)}"]
    assert not folder.verify().ok
    folder = Folder()
    folder.log(1)[:] = deepcopy(folder.log(2))
    assert "another range" in folder.verify().findings[0].problem


def test_a_lost_copy_is_not_an_empty_one() -> None:
    """Neither when all its files are gone, nor with its folder: recovery does not count it either."""
    for gone in (f"{FOLDER}/", FOLDER):
        folder = Folder()
        for path in [path for path in folder.world.names if path.startswith(gone)]:
            del folder.world.names[path]
        report = folder.verify([folder.range(end=None)])
        check_ranges([folder.range(end=None)], report)
        assert not report.ok
        assert any("0 of 1 copies" in finding.problem for finding in report.findings)


def test_caches_and_torn_tails_are_no_errors() -> None:
    """An index, a checkpoint, half a record: the next start repairs them."""
    folder = Folder()
    names = folder.world.names
    names[f"{FOLDER}/{segment_name(folder.infos[1].base_seq, '.index')}"].data[14] ^= 1
    names[f"{lane_folder(LANE)}/sessions-{START + 50:020d}.checkpoint"].data[-1] ^= 1
    folder.log(-1).extend(b"\0" * 100)
    report = folder.verify()

    assert report.ok
    assert sorted(finding.severity for finding in report.findings) == [
        Severity.NOTE, Severity.WARNING, Severity.WARNING
    ]  # fmt: skip
    assert all(finding.advice for finding in report.findings)


def test_an_identity_that_is_damaged_or_gone_is_an_error() -> None:
    """The owner of the folder is unknown."""
    folder = Folder()
    folder.world.names["identity.json"].data[20] ^= 1
    assert not folder.verify().ok
    del folder.world.names["identity.json"]
    assert not folder.verify().ok


def test_copies_are_compared_with_the_store() -> None:
    """A sealed range whose copy is short, or missing, is an error; a longer copy is a note."""
    folder = Folder()
    assert not folder.verify([folder.range(end=folder.end + 1)]).ok
    assert not folder.verify([folder.range(number=9, end=START + 5)]).ok
    assert folder.verify([folder.range(number=9, end=None)]).ok
    report = folder.verify([folder.range(end=folder.end - 1)])

    assert report.ok
    assert [finding.severity for finding in report.findings] == [Severity.NOTE]


def test_a_data_directory_and_its_chain_of_ranges() -> None:
    """All replicas' folders; ranges must follow each other, and a LOST gap is only noted."""
    folder = Folder()
    world = World()
    world.names["replica-4"] = None
    for path, node in folder.world.names.items():
        if path:
            world.names[f"replica-4/{path}"] = node
    world.names["logs"] = None
    chain = [folder.range(end=folder.end), folder.range(number=RANGE + 1, start=folder.end + 7)]
    report = verify_data_dir(world.disk(), chain)

    assert report.ok
    assert report.replicas == 1
    assert [finding.severity for finding in report.findings] == [Severity.NOTE]
    assert not verify_data_dir(world.disk(), [chain[0], folder.range(number=RANGE + 1, start=folder.end - 1)]).ok
    assert not verify_data_dir(world.disk(), [chain[0], folder.range(number=RANGE + 2, start=folder.end)]).ok


def _two_replicas(wrong: str) -> World:
    """replica-4 with a complete copy, and replica-5 with a defect."""
    folder, other, world = Folder(sealed=True), Folder(sealed=True), World()
    for number, source in ((4, folder), (5, other)):
        world.names[f"replica-{number}"] = None
        for path, node in source.world.names.items():
            if path:
                world.names[f"replica-{number}/{path}"] = deepcopy(node)
    made = World()
    disk = made.disk()
    disk.make_id()
    open_folder(disk, "other" if wrong == "cluster" else SMALL.cluster, 4 if wrong == "number" else 5, 1)
    if wrong != "twin":
        world.names["replica-5/identity.json"] = made.names["identity.json"]
    if wrong == "short":
        for path in [path for path in world.names if path.startswith(f"replica-5/{FOLDER}/")]:
            del world.names[path]
    return world


@pytest.mark.parametrize(("wrong", "says"), [
    ("cluster", "belongs to cluster other"), ("number", "belongs to replica 4"),
    ("twin", "a copy of the one in replica-4"),
])  # fmt: skip
def test_folders_in_the_wrong_place(wrong: str, says: str) -> None:
    """Another cluster's, another replica's, or the same folder twice: none of them counts as a copy."""
    report = verify_data_dir(_two_replicas(wrong).disk(), cluster=SMALL.cluster)

    assert [finding.file for finding in report.findings if says in finding.problem] == ["replica-5/identity.json"]
    assert not report.ok


def test_a_copy_that_peers_can_restore_is_a_warning() -> None:
    """One complete copy of a sealed range is enough to fill the others.

    Without one it is an error, whatever the names.
    """
    world = _two_replicas("short")
    disks = verify_data_dir(world.disk(), []).disks
    refs = [ReplicaRef(replica=n, incarnation=1, disk=disks[f"replica-{n}"]) for n in (4, 5)]
    range_ = Range(
        lane=LANE, number=RANGE, start=START, start_seq=START_SEQ, replicas=refs, durable_on=1, end=START + COUNT,
        end_seq=9_999,
    )  # fmt: skip
    report = verify_data_dir(world.disk(), [range_])
    assert [(one.severity, one.file) for one in report.findings] == [
        (Severity.WARNING, f"replica-5/lane {LANE} range {RANGE}")
    ]
    alone = msgspec.structs.replace(range_, replicas=refs[1:])
    assert not verify_data_dir(world.disk(), [alone]).ok
    assert verify_data_dir(world.disk(), [alone], trims={LANE: START + COUNT}).ok


def test_records_that_were_not_trimmed_must_exist() -> None:
    """A copy may start above its range's start only as far as the lane was trimmed."""
    folder = Folder(sealed=True)
    earlier = folder.range(start=START - 5, end=folder.end)
    assert "starts at index" in folder.verify([earlier]).findings[0].problem
    assert not folder.verify([earlier]).ok
    world = World()
    world.names["replica-4"] = None
    for path, node in folder.world.names.items():
        if path:
            world.names[f"replica-4/{path}"] = node
    assert verify_data_dir(world.disk(), [earlier], trims={LANE: START}).ok
    assert not verify_data_dir(world.disk(), [earlier], trims={LANE: START - 1}).ok


@pytest.mark.parametrize(("durable_on", "ok"), [(1, False), (2, True)])
def test_an_open_range_needs_enough_of_its_own_disks(durable_on: int, ok: bool) -> None:
    """R - A + 1 of the disks that it names, or durable records may be missing: a wiped disk is not one of them."""
    folder = Folder()
    world = World()
    world.names["replica-4"] = None
    for path, node in folder.world.names.items():
        if path:
            world.names[f"replica-4/{path}"] = node
    refs = [
        ReplicaRef(replica=4, incarnation=1, disk=folder.disk_id), ReplicaRef(replica=5, incarnation=1, disk="wiped")
    ]  # fmt: skip
    range_ = msgspec.structs.replace(folder.range(), replicas=refs, durable_on=durable_on)
    report = verify_data_dir(world.disk(), [range_])

    assert report.ok is ok
    assert "replicas [5]" in report.findings[0].problem
