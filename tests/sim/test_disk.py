"""Simulated disks: the state after a power cut, a failed sync, a full disk and bit rot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.errors import DiskFailed, DiskFull
from embarcadero_proof.sim.disk import Mount, SimDisk
from embarcadero_proof.sim.medium import SECTOR_BYTES

SEEDS = range(40)


def new_disk(seed: int = 0) -> tuple[SimDisk, Mount]:
    disk = SimDisk(f"test-{seed}")
    return disk, Mount(lambda: disk)


def test_synced_bytes_survive_a_power_cut() -> None:
    """A file and its name, both synced, are there afterwards, byte for byte."""
    for seed in SEEDS:
        disk, mount = new_disk(seed)
        file = mount.open("a", create=True)
        file.pwrite([b"kept" * 500], 0)
        file.sync()
        mount.sync_folder("")
        disk.lose_power()
        assert mount.open("a").pread(9_999, 0) == b"kept" * 500


def test_unsynced_bytes_are_lost_in_any_part_sector_by_sector() -> None:
    """Over some seeds everything happens: all, nothing, holes in the middle; each sector is whole or untouched."""
    outcomes = set()
    for seed in SEEDS:
        disk, mount = new_disk(seed)
        file = mount.open("a", create=True)
        file.pwrite([bytes(4 * SECTOR_BYTES)], 0)
        file.sync()
        mount.sync_folder("")
        file.pwrite([b"x" * (4 * SECTOR_BYTES)], 0)
        disk.lose_power()
        data = mount.open("a").pread(9_999, 0)
        sectors = [data[at : at + SECTOR_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
        outcomes.add("".join("x" if sector.endswith(b"x") else "." for sector in sectors))
        assert all(len(set(sector)) == 1 for sector in sectors)
    assert {"xxxx", "...."} <= outcomes
    assert any(".x" in outcome.strip(".") or "x." in outcome.strip(".") for outcome in outcomes)


def test_a_name_that_was_not_synced_may_be_lost_with_its_file() -> None:
    """Creating, renaming and removing are kept only once the folder is synced; a rename is never half done."""
    seen = set()
    for seed in SEEDS:
        disk, mount = new_disk(seed)
        for name in ("old", "gone"):
            file = mount.open(name, create=True)
            file.pwrite([name.encode()], 0)
            file.sync()
        mount.sync_folder("")
        mount.open("new", create=True).sync()
        mount.rename("old", "other")
        mount.remove("gone")
        disk.lose_power()
        names = mount.list("")
        assert ("old" in names) != ("other" in names)
        seen.add(tuple(names))
    assert len(seen) == 8


def test_folders_are_names_too() -> None:
    """A synced file in a folder whose own name was not synced may be gone; synced all the way, it stays."""
    kept = set()
    for seed in SEEDS:
        disk, mount = new_disk(seed)
        mount.make_folder("f")
        mount.open("f/a", create=True).sync()
        mount.sync_folder("f")
        disk.lose_power()
        kept.add(mount.exists("f/a"))
    assert kept == {True, False}


def test_after_a_failed_sync_a_later_one_succeeds_without_the_bytes() -> None:
    """The bytes may be seen for a while; a power cut shows that they were never written."""
    lost = False
    for seed in SEEDS:
        disk, mount = new_disk(seed)
        file = mount.open("a", create=True)
        mount.sync_folder("")
        file.pwrite([b"x" * (3 * SECTOR_BYTES)], 0)
        disk.failing_syncs = 1
        with pytest.raises(DiskFailed, match="sync"):
            file.sync()
        file.sync()
        disk.lose_power()
        lost |= mount.open("a").pread(9_999, 0) != b"x" * (3 * SECTOR_BYTES)
    assert lost


def test_a_full_disk_takes_a_part_and_then_refuses() -> None:
    """A write fails with DiskFull, and a part of it may be there; overwriting existing bytes still works."""
    disk, mount = new_disk()
    file = mount.open("a", create=True)
    file.pwrite([b"abc"], 0)
    disk.full = True
    with pytest.raises(DiskFull):
        file.pwrite([b"d" * 100], 3)
    with pytest.raises(DiskFull):
        mount.open("b", create=True)
    file.pwrite([b"x"], 0)
    assert 3 <= file.size() < 103
    assert mount.free_bytes() == 0


def test_a_read_only_disk_is_read_only() -> None:
    """Every change fails; reading works."""
    disk, mount = new_disk()
    file = mount.open("a", create=True)
    file.pwrite([b"abc"], 0)
    disk.read_only = True
    for change in (
        lambda: file.pwrite([b"x"], 0),
        lambda: file.truncate(0),
        lambda: mount.open("b", create=True),
        lambda: mount.make_folder("f"),
        lambda: mount.rename("a", "b"),
        lambda: mount.remove("a"),
    ):
        with pytest.raises(DiskFailed):
            change()
    assert file.pread(9, 0) == b"abc"


def test_a_flipped_bit_is_one_bit() -> None:
    """One bit of one chosen file differs, for every reader, also after a power cut."""
    disk, mount = new_disk()
    for name in ("a", "b"):
        file = mount.open(name, create=True)
        file.pwrite([bytes(64)], 0)
        file.sync()
    mount.sync_folder("")
    assert disk.flip_a_bit(lambda path: path == "b") == "b"
    assert disk.flip_a_bit(lambda path: path == "c") is None
    disk.lose_power()
    assert mount.open("a").pread(64, 0) == bytes(64)
    assert sum(byte.bit_count() for byte in mount.open("b").pread(64, 0)) == 1


def test_the_locks_of_a_process_end_with_it() -> None:
    """Another mount gets the lock once the first one is closed, or the power was cut."""
    disk, first = new_disk()
    second = Mount(lambda: disk)
    first.lock("lock")
    first.close()
    second.lock("lock")
    disk.lose_power()
    first.lock("lock")


def test_a_long_write_can_be_seen_partially() -> None:
    """A process that runs in the middle of a long write finds a part of it."""
    disk = SimDisk("test")
    sizes: list[int] = []
    mount = Mount(lambda: disk, lambda: sizes.extend(len(file.live) for file in disk.names.files()))
    mount.open("a", create=True).pwrite([b"x" * 5_000], 0)
    assert any(0 < size < 5_000 for size in sizes)


WRITES = st.lists(st.tuples(st.integers(0, 2_000), st.binary(max_size=1_500), st.booleans()), max_size=8)


@given(WRITES, st.integers(0, 9))
def test_a_power_cut_keeps_every_synced_byte_that_was_not_written_again(
    writes: list[tuple[int, bytes, bool]], seed: int
) -> None:
    """Whatever is written at any time, a byte reads as it was last synced, or as some later write left it."""
    disk, mount = new_disk(seed)
    file = mount.open("a", create=True)
    mount.sync_folder("")
    possible: dict[int, set[int]] = {}
    for offset, data, synced in writes:
        file.pwrite([data], offset)
        for at, byte in enumerate(data, offset):
            possible.setdefault(at, {0}).add(byte)
        if synced:
            file.sync()
            now = file.pread(9_999, 0)
            possible = {at: {byte} for at, byte in enumerate(now)}
    disk.lose_power()
    data = mount.open("a").pread(9_999, 0)
    assert all(byte in possible.get(at, {0}) for at, byte in enumerate(data))
    assert all(possible[at] & {0} or at < len(data) for at in possible)
