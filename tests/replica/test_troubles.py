"""Disks that are full, read-only or failing: unsynced records do not count, and writing resumes by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.replica.copies import trouble_of
from embarcadero.storage.layout import MENDED, damaged_name, range_folder
from embarcadero.storage.segment import DamageKind
from embarcadero.types import Trouble, health_in_words
from embarcadero_proof.bugs.table import injected
from tests.replica.faulty import FaultyDisk
from tests.replica.harness import World, Writer


class Ill(World):
    """One replica, on a disk that can fail."""

    def start_replica(self, number: int, disk: object = None) -> object:  # type: ignore[override]
        self.disk = FaultyDisk(self.folder(number), create=True)
        return super().start_replica(number, self.disk)

    @property
    def trouble(self) -> Trouble:
        """Its published health."""
        table = self.lines.of(self.replicas[0].member.ref)
        assert table is not None
        return Trouble(table.health.load())


@pytest.fixture
def ill(tmp_path: Path) -> tuple[Ill, int, Writer]:
    world = Ill(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"first")
    world.poll()
    return world, lane, writer


@pytest.mark.parametrize(("fault", "trouble"), [("full", Trouble.DISK_FULL), ("read_only", Trouble.READ_ONLY)])
def test_a_disk_that_refuses_writes_stops_counting_until_it_recovers(
    ill: tuple[Ill, int, Writer], fault: str, trouble: Trouble
) -> None:
    """The published health names the trouble; when it is over, everything reaches the disk."""
    world, lane, writer = ill
    setattr(world.disk, fault, True)
    writer.batches(b"second", b"third")
    world.poll(50)
    assert world.durable(lane) == 1
    assert world.trouble == trouble

    setattr(world.disk, fault, False)
    world.poll(50, step_us=100_000)
    assert world.durable(lane) == 3
    assert not world.trouble
    assert world.files(0, lane) == writer.written
    assert world.notes[0].count("disk trouble") == world.notes[0].count("disk trouble is over") == 1


def test_a_segment_that_cannot_be_created_is_created_later(ill: tuple[Ill, int, Writer]) -> None:
    """The old one is closed by its age when there is space for the next."""
    world, lane, writer = ill
    world.poll(2, step_us=1_000_000)
    world.disk.full = True
    world.poll(3, step_us=4_000_000_000)
    assert world.trouble == Trouble.DISK_FULL
    world.disk.full = False
    world.poll(5, step_us=4_000_000)
    assert not world.trouble
    assert [info.sealed for info in world.replicas[0].ranges.copies[lane, 1].log.segments] == [True, False]
    writer.batches(b"second")
    world.poll()
    assert world.files(0, lane) == writer.written


def test_after_a_failed_sync_nothing_unsynced_is_trusted(ill: tuple[Ill, int, Writer]) -> None:
    """The system may have dropped the pages, and marked them clean: they are written again, from the fabric."""
    world, lane, writer = ill
    world.disk.sync_errors = 1
    writer.batches(b"second", b"third")
    world.poll()
    assert world.durable(lane) == 1
    assert world.trouble == Trouble.DISK_FAILED

    world.poll(50, step_us=100_000)
    assert world.durable(lane) == 3
    assert not world.trouble
    assert world.files(0, lane) == writer.written


def test_data_after_a_failed_sync_is_not_trusted_after_a_failed_cut_either(ill: tuple[Ill, int, Writer]) -> None:
    """The files look intact when they are opened again, but the content of the disk is unknown: it is written again."""
    world, lane, writer = ill
    world.disk.sync_errors, world.disk.shows_lost = 1, True
    writer.batches(b"second", b"third")
    world.poll(1)
    world.disk.read_only = True
    world.poll(50, step_us=100_000)
    assert world.durable(lane) == 1

    taken = world.replicas[0].counters.entries
    world.disk.read_only = False
    world.poll(50, step_us=100_000)
    assert world.durable(lane) == 3
    assert world.replicas[0].counters.entries == taken + 2
    assert world.files(0, lane) == writer.written


def test_a_failed_sync_of_a_copy_with_rot_is_recovered(ill: tuple[Ill, int, Writer]) -> None:
    """It can't be cut at the synced end, so it is cut where the rot starts.

    That part is missing until the copy has everything that had counted.
    """
    world, lane, writer = ill
    writer.batches(b"second" * 30, b"third")
    world.poll()
    assert world.durable(lane) == 3
    (path,) = (world.folder(0) / range_folder(lane, 1)).glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(writer.written[1][0]) + 3] ^= 4
    path.write_bytes(data)
    world.disk.sync_errors, world.disk.shows_lost = 1, True
    writer.batches(b"fourth")
    world.poll()
    world.poll(50, step_us=100_000)

    assert world.durable(lane) == 4
    assert world.replicas[0].ranges.copies[lane, 1].whole
    assert path.with_name(damaged_name(1, 3, DamageKind.TAIL)).with_suffix(MENDED).exists()
    assert not world.trouble
    assert world.files(0, lane) == writer.written


def test_a_line_before_the_sync_is_noticed(ill: tuple[Ill, int, Writer]) -> None:
    """The injected bug counts records that a failing disk never stored."""
    with injected("durable-before-sync"), pytest.raises(AssertionError):
        test_after_a_failed_sync_nothing_unsynced_is_trusted(ill)


def test_a_disk_that_keeps_failing_is_tried_less_and_less(ill: tuple[Ill, int, Writer]) -> None:
    """It never counts, and never spins."""
    world, lane, writer = ill
    world.disk.sync_errors = 1 << 30
    writer.batches(b"second")
    world.poll(400, step_us=50_000)

    assert world.durable(lane) == 1
    assert 3 < (1 << 30) - world.disk.sync_errors < 40


def test_every_trouble_has_a_remedy() -> None:
    """In words, for `status`."""
    assert [len(health_in_words(word)) for word in (0, 1, 3, 15)] == [0, 1, 2, 4]
    assert trouble_of(ValueError()) == Trouble.DISK_FAILED


def test_a_range_that_could_not_be_opened_and_is_no_longer_assigned_is_no_trouble(tmp_path: Path) -> None:
    """Otherwise this replica would never be chosen again."""
    world = Ill(tmp_path)
    world.disk.full = True
    world.topic()
    world.poll(3, step_us=4_000_000)
    assert world.trouble == Trouble.DISK_FULL
    world.directory.topics.delete("t")
    world.poll(3, step_us=4_000_000)
    assert not world.trouble
