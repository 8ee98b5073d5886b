"""The operating system's own failures as typed errors: short writes, no space, EIO, read-only folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from embarcadero.errors import DiskFailed, DiskFull
from embarcadero.limits import MIB
from embarcadero.storage.disk import RealDisk


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may accept or return a few bytes at a time."""
    pwrite, pwritev, pread = os.pwrite, os.pwritev, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: pwritev(fd, [bytes(parts[0])[:5]], offset))
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 11), offset))
    parts = [bytes([number]) * (number % 13) for number in range(1, 90)]
    file = RealDisk(tmp_path).open("a", create=True)
    file.pwrite(parts, 3)

    assert file.pread(10_000, 3) == b"".join(parts)
    file.pwrite([b"x" * 100], 0)
    assert file.pread(100, 0) == b"x" * 100


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, DiskFailed), (errno.EROFS, DiskFailed)],
)
def test_errors_are_typed_and_name_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    """Whatever the system's error, it names the file, the operation and the remedy."""

    def failing(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    file = RealDisk(tmp_path).open("some-file", create=True)
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("pwrite", lambda: file.pwrite([b"x"], 0)), ("pwritev", lambda: file.pwrite([b"x", b"y"], 0)),
        ("fdatasync", file.sync), ("pread", lambda: file.pread(1, 0)), ("ftruncate", lambda: file.truncate(1)),
    ]  # fmt: skip
    for name, attempt in attempts:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            with pytest.raises(kind, match="some-file") as caught:
                attempt()
            assert caught.value.hint


def test_synced_pages_leave_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole pages, when there are many, once; never the page that is written to next."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, __: told.append((start, size)))
    file = RealDisk(tmp_path, cached=False).open("a", create=True)
    file.pwrite([b"x" * 1_000], 0)
    file.sync()
    assert not told  # a lone record is not worth it

    file.pwrite([b"x" * MIB, b"y" * 500], 1_000)
    assert not told  # no unsynced pages
    file.sync()
    file.sync()
    assert told == [(0, MIB)]
    file.pwrite([bytes(MIB)], MIB + 1_500)
    file.sync()
    assert told[1:] == [(MIB, MIB)]


@pytest.mark.parametrize("cached", [True, False])
def test_the_page_cache_is_left_alone_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """`replica.cached`; and advice that the system refuses is no failure: the written bytes are there."""
    asked: list[int] = []

    def refused(descriptor: int, *_: object) -> None:
        asked.append(descriptor)
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    file = RealDisk(tmp_path, cached=cached).open("a", create=True)
    file.pwrite([bytes(2 * MIB)], 0)
    file.sync()

    assert bool(asked) is not cached
    assert file.pread(2 * MIB, 0) == bytes(2 * MIB)


def test_parents_are_made_on_request(tmp_path: Path) -> None:
    """Only with `create`."""
    disk = RealDisk(tmp_path / "a" / "b", create=True)
    disk.open("x", create=True).close()

    assert (tmp_path / "a" / "b" / "x").exists()
    with pytest.raises(DiskFailed):
        RealDisk(tmp_path / "c").open("x", create=True)
