"""Real replicas whose syncs fail when somebody wishes so. For tests, never for users.

With EMBARCADERO_FAILING_DISKS in the environment, no sync of a replica succeeds while there is `<folder>.failing`
beside its folder. What it wrote since its last sync may be on the disk then, or not: nobody may count on it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from embarcadero.errors import DiskFailed
from embarcadero.storage.real import RealDisk, RealFile

DISKS_VARIABLE: Final = "EMBARCADERO_FAILING_DISKS"


def failing_mark(folder: Path) -> Path:
    """The file that makes the syncs of a replica with this folder fail."""
    return folder.with_name(f"{folder.name}.failing")


def _check(mark: Path, what: str | Path) -> None:
    if mark.exists():
        raise DiskFailed(f"can't sync {what}: {os.strerror(errno.EIO)}", "it was wished for")


class _FailingFile(RealFile):
    def __init__(self, path: Path, descriptor: int, mark: Path) -> None:
        super().__init__(path, descriptor)
        self._mark = mark

    def sync(self) -> None:
        _check(self._mark, self._path)
        super().sync()


class _FailingDisk(RealDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root, create=True)
        self._mark = failing_mark(root)

    def _file(self, path: Path, descriptor: int) -> RealFile:
        return _FailingFile(path, descriptor, self._mark)

    def sync_folder(self, path: str) -> None:
        _check(self._mark, path)
        super().sync_folder(path)


def disk_of_replica(folder: Path, cached: bool) -> RealDisk:
    """The disk of a replica of this process: a usual one, unless the environment wishes for another."""
    return _FailingDisk(folder) if os.environ.get(DISKS_VARIABLE) else RealDisk(folder, create=True, cached=cached)
