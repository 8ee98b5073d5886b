"""Real disks whose syncs fail on request.

While `<folder>.failing` exists beside a replica's folder, every sync of the replica fails. Bytes written since its last
sync may be on the disk then, or not.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from embarcadero.errors import DiskFailed
from embarcadero.storage.disk import RealDisk, RealFile


def failing_mark(folder: Path) -> Path:
    """The file that makes the syncs of a replica with this folder fail."""
    return folder.with_name(f"{folder.name}.failing")


def _check(mark: Path, what: str | Path) -> None:
    if mark.exists():
        raise DiskFailed(f"can't sync {what}: {os.strerror(errno.EIO)}", "injected fault: remove the mark to end it")


class _FailingFile(RealFile):
    def __init__(self, path: Path, descriptor: int, mark: Path) -> None:
        super().__init__(path, descriptor)
        self._mark = mark

    def sync(self) -> None:
        _check(self._mark, self._path)
        super().sync()


class _FailingDisk(RealDisk):
    def __init__(self, root: Path, cached: bool) -> None:
        super().__init__(root, create=True, cached=cached)
        self._mark = failing_mark(root)

    def _file(self, path: Path, descriptor: int) -> RealFile:
        return _FailingFile(path, descriptor, self._mark)

    def sync_folder(self, path: str) -> None:
        _check(self._mark, path)
        super().sync_folder(path)


def failing_disk(folder: Path, cached: bool) -> RealDisk:
    """Open the disk of a replica whose syncs fail while its mark is there."""
    return _FailingDisk(folder, cached)
