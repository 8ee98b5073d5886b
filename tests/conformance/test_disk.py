"""One suite for every disk: the operating system's, and any other that is put into DISKS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from embarcadero.env import Disk, Missing
from embarcadero.errors import DiskFailed, WrongFolder
from embarcadero.storage.disk import RealDisk, read_whole, write_whole
from embarcadero_proof.sim.disk import Mount, SimDisk


def simulated(folder: Path) -> Callable[[], Disk]:
    """Each opener is another process on one simulated device."""
    device = SimDisk(str(folder.name))
    return lambda: Mount(lambda: device)


DISKS: list[tuple[str, Callable[[Path], Callable[[], Disk]]]] = [
    ("real", lambda folder: lambda: RealDisk(folder)),
    ("simulated", simulated),
]
"""For each kind of disk: a function that prepares an empty folder, and returns a function that opens the disk."""


@pytest.fixture(params=[pytest.param(make, id=name) for name, make in DISKS])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Disk]:
    """Opens the same disk as often as it is called, as two processes would."""
    return request.param(tmp_path)


@pytest.fixture
def disk(opener: Callable[[], Disk]) -> Disk:
    """One view of an empty disk."""
    return opener()


def test_a_file_returns_the_written_bytes(disk: Disk) -> None:
    """Gathered writes at an offset; short reads only at the end; zeros where nothing was written."""
    file = disk.open("a", create=True)
    file.pwrite([b"one", memoryview(b"two"), bytearray(b"three")], 4)

    assert file.size() == 15
    assert file.pread(100, 0) == b"\0\0\0\0onetwothree"
    assert file.pread(3, 7) == b"two"
    assert file.pread(5, 15) == b""
    assert file.pread(5, 99) == b""

    file.pwrite([b"TWO"], 7)
    file.sync()
    file.truncate(10)
    assert file.pread(100, 0) == b"\0\0\0\0oneTWO"
    file.truncate(12)
    assert file.pread(100, 7) == b"TWO\0\0"
    file.close()
    file.close()


def test_many_parts_and_many_bytes(disk: Disk) -> None:
    """More parts than the system takes at once, and more bytes than one call may write."""
    parts = [bytes([number % 251]) * (number % 7) for number in range(5_000)] + [b"x" * 3_000_000]
    file = disk.open("a", create=True)
    file.pwrite(parts, 1)

    assert file.pread(10_000_000, 1) == b"".join(parts)
    file.pwrite([], 0)
    file.close()


def test_readers_see_a_file_grow(opener: Callable[[], Disk]) -> None:
    """Another process's view of the same file."""
    writer = opener().open("a", create=True)
    reader = opener().open("a")
    writer.pwrite([b"first"], 0)
    assert reader.pread(10, 0) == b"first"
    writer.pwrite([b"second"], 5)

    assert reader.size() == 11
    assert reader.pread(10, 5) == b"second"
    writer.close()
    reader.close()


def test_an_open_file_outlives_its_name(disk: Disk) -> None:
    """A segment that is dropped during a read is read to its end."""
    write_whole(disk, "a", [b"bytes"])
    file = disk.open("a")
    disk.remove("a")

    assert not disk.exists("a")
    assert file.pread(10, 0) == b"bytes"
    file.close()


def test_files_opened_for_reading_are_not_written(disk: Disk) -> None:
    """A reader's mistake can't change another process's file."""
    write_whole(disk, "a", [b"bytes"])
    file = disk.open("a")
    with pytest.raises(DiskFailed):
        file.pwrite([b"x"], 0)
    with pytest.raises(DiskFailed):
        file.truncate(0)

    assert file.pread(10, 0) == b"bytes"
    file.close()


def test_create_empties_the_file_and_writable_keeps_it(disk: Disk) -> None:
    """`create` truncates an existing file; `writable` keeps its content."""
    write_whole(disk, "a", [b"bytes"])
    file = disk.open("a", writable=True)
    file.pwrite([b"B"], 0)
    file.close()
    assert read_whole(disk, "a", 100) == b"Bytes"

    disk.open("a", create=True).close()
    assert read_whole(disk, "a", 100) == b""


def test_missing_is_its_own_error(disk: Disk) -> None:
    """A reader can distinguish "gone" from "broken" while others drop files."""
    for attempt in (
        lambda: disk.open("a"), lambda: disk.open("a", writable=True), lambda: disk.list("no"),
        lambda: disk.remove("a"), lambda: disk.rename("a", "b"), lambda: disk.sync_folder("no"),
        lambda: disk.open("no/a", create=True), lambda: disk.make_folder("no/deeper"),
        lambda: disk.remove_folder("no"),
    ):  # fmt: skip
        with pytest.raises(Missing):
            attempt()


def test_folders(disk: Disk) -> None:
    """Made, listed, emptied, removed."""
    disk.make_folder("lane")
    disk.make_folder("lane")
    disk.make_folder("lane/range")
    write_whole(disk, "lane/range/b", [b"2"])
    write_whole(disk, "lane/range/a", [b"1"])
    disk.sync_folder("lane")
    disk.sync_folder("")

    assert disk.list("") == ["lane"]
    assert disk.list("lane/range") == ["a", "b"]
    assert disk.exists("lane/range")
    with pytest.raises(DiskFailed):
        disk.remove_folder("lane/range")
    disk.remove("lane/range/a")
    disk.remove("lane/range/b")
    disk.remove_folder("lane/range")
    assert disk.list("lane") == []


def test_renaming_replaces(disk: Disk) -> None:
    """The new name has the renamed file, whatever it had before."""
    write_whole(disk, "a", [b"new"])
    write_whole(disk, "b", [b"old"])
    disk.rename("a", "b")

    assert read_whole(disk, "b", 10) == b"new"
    assert disk.list("") == ["b"]


def test_a_whole_file_leaves_no_draft(disk: Disk) -> None:
    """Only the requested name is there, with all parts."""
    write_whole(disk, "a", [b"1", b"2"])

    assert disk.list("") == ["a"]
    with pytest.raises(DiskFailed):
        read_whole(disk, "a", 1)


def test_a_lock_has_one_holder(opener: Callable[[], Disk]) -> None:
    """The second one learns that the folder is in use; closing the lock or the disk frees it."""
    first, second = opener(), opener()
    lock = first.lock("lock")
    with pytest.raises(WrongFolder, match="in use"):
        second.lock("lock")
    lock.close()
    second.lock("lock")
    with pytest.raises(WrongFolder):
        first.lock("lock")
    second.close()
    first.lock("lock")
    first.close()


def test_paths_stay_below_the_root(disk: Disk) -> None:
    """No path leads out."""
    for path in ("../a", "a/../../b", "/etc/passwd"):
        with pytest.raises(WrongFolder):
            disk.open(path, create=True)


def test_ids_differ_and_free_space_is_reported(disk: Disk) -> None:
    """32 hexadecimal digits each; free bytes are a number."""
    ids = {disk.make_id() for _ in range(20)}

    assert len(ids) == 20
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
    assert disk.free_bytes() > 0
