"""A disk that fails on demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from embarcadero.env import File, Part
from embarcadero.errors import DiskFailed, DiskFull
from embarcadero.storage.disk import RealDisk


class FaultyDisk(RealDisk):
    """Kinds of failure.

    `full`, `read_only`: writes fail. `sync_errors`: this many syncs fail, and lose bytes that were not synced before,
    or (`shows_lost`) still show them to readers, as a page cache may.
    """

    full = read_only = shows_lost = False
    sync_errors = 0

    def open(self, path: str, create: bool = False, writable: bool = False) -> Any:
        if create or writable:
            self.refuse()
        return FaultyFile(self, super().open(path, create, writable), path)

    def refuse(self) -> None:
        if self.full:
            raise DiskFull("no room", "free some")
        if self.read_only:
            raise DiskFailed("can't write") from OSError(errno.EROFS, "read-only file system")


class FaultyFile:
    """Keeps the synced content, so that a failed sync can lose the rest."""

    def __init__(self, disk: FaultyDisk, file: File, path: str) -> None:
        self._disk, self._file, self._path = disk, file, path
        self._synced = file.pread(file.size(), 0)

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        self._disk.refuse()
        self._file.pwrite(parts, offset)

    def sync(self) -> None:
        if self._path.endswith(".log") and self._disk.sync_errors:
            self._disk.sync_errors -= 1
            if not self._disk.shows_lost:
                size = self._file.size()
                self._file.truncate(0)
                self._file.pwrite([self._synced], 0)
                self._file.truncate(size)  # the page cache lost the data: zeros
            raise DiskFailed("can't sync") from OSError(errno.EIO, os.strerror(errno.EIO))
        self._file.sync()
        self._synced = self._file.pread(self._file.size(), 0)

    def truncate(self, size: int) -> None:
        self._disk.refuse()
        self._file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
