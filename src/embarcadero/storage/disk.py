"""The operating system's disk, and small files that are written and read as a whole.

The interface (`Disk`, `File`) is in env.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from embarcadero.env import Disk, Missing, Part
from embarcadero.errors import DiskFailed, DiskFull, EmbarcaderoError, WrongFolder
from embarcadero.limits import PAGE_BYTES, UNCACHED_BYTES_MIN, WRITE_PARTS_MAX


def write_whole(disk: Disk, path: str, parts: Sequence[Part]) -> None:
    """Replace a file atomically: other processes see the old content or the new, also after a crash."""
    folder = path.rpartition("/")[0]
    draft = f"{path}.tmp"
    file = disk.open(draft, create=True)
    try:
        file.pwrite(parts, 0)
        file.sync()
    except EmbarcaderoError:
        with suppress(EmbarcaderoError):
            disk.remove(draft)
        raise
    finally:
        file.close()
    disk.rename(draft, path)
    disk.sync_folder(folder)


def read_whole(disk: Disk, path: str, bytes_max: int) -> bytes:
    """Return a small file's bytes. Raises Missing if there is none, DiskFailed if it is longer than any valid one."""
    file = disk.open(path)
    try:
        size = file.size()
        if size > bytes_max:
            raise DiskFailed(f"{path} has {size} bytes; the maximum is {bytes_max}", "did another program write it?")
        return file.pread(size, 0)
    finally:
        file.close()


def join(folder: str, name: str) -> str:
    """Return a path below a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # limit of the disk, of a user's quota, of a file's size
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def _typed(doing: str, path: str | Path) -> Iterator[None]:
    """Convert errors of the operating system to typed errors, with the file and the operation."""
    try:
        yield
    except OSError as error:
        raise _as_ours(error, doing, path) from error


def _as_ours(error: OSError, doing: str, path: str | Path) -> DiskFailed | DiskFull:
    if error.errno in _FULL:
        return DiskFull(
            f"no space to {doing} {path}", "free space on that disk, or raise the limit; the replica then continues"
        )
    if error.errno == errno.ENOENT:
        return Missing(f"can't {doing} {path}: there is no such file", "was it deleted by hand?")
    if error.errno in _REFUSED:
        return DiskFailed(f"can't {doing} {path}: {error.strerror}", "make the folder writable for this user")
    return DiskFailed(f"can't {doing} {path}: {error.strerror}", "check the disk's health")


class RealFile:
    """A file descriptor. Unless `cached`, synced data leaves the system's page cache once there is much of it."""

    def __init__(self, path: Path, descriptor: int, cached: bool = True) -> None:
        self._path, self._descriptor = path, descriptor
        self._cached = cached or not hasattr(os, "posix_fadvise")
        self._written = self._uncached = 0  # where the last write ended; data below the second is not cached

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        self._written = offset + sum(map(len, parts))
        try:
            if len(parts) == 1:
                _write_all(self._descriptor, memoryview(parts[0]), offset)
                return
            rest = iter(parts)
            while some := list(islice(rest, WRITE_PARTS_MAX)):
                offset = _write_gathered(self._descriptor, some, offset)
        except OSError as error:
            raise _as_ours(error, "write", self._path) from error

    def pread(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, offset)
            if len(data) == size or not data:
                return data
            found = [data]
            while data and (missing := size - sum(map(len, found))):
                data = os.pread(self._descriptor, missing, offset + size - missing)
                found.append(data)
            return b"".join(found)
        except OSError as error:
            raise _as_ours(error, "read", self._path) from error

    def sync(self) -> None:
        written = self._written
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _as_ours(error, "sync", self._path) from error
        if not self._cached:
            self._leave_cache(written)

    def _leave_cache(self, written: int) -> None:
        """Drop whole pages only: the last page is written again, and would have to be read for that."""
        start, end = min(self._uncached, written), written - written % PAGE_BYTES
        if end - start >= UNCACHED_BYTES_MIN:
            with suppress(OSError):  # only a hint to the system
                os.posix_fadvise(self._descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
            self._uncached = end

    def size(self) -> int:
        with _typed("stat", self._path):
            return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        with _typed("truncate", self._path):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with _typed("close", self._path):
                os.close(descriptor)

    def __del__(self) -> None:
        with suppress(DiskFailed, DiskFull):
            self.close()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _write_gathered(descriptor: int, parts: list[Part], offset: int) -> int:
    """Write parts with as few system calls as possible. Returns where they end."""
    size = sum(map(len, parts))
    written = os.pwritev(descriptor, parts, offset)
    if written < size:
        start = 0
        for part in parts:
            if (skip := max(0, written - start)) < len(part):
                _write_all(descriptor, memoryview(part)[skip:], offset + start + skip)
            start += len(part)
    return offset + size


class RealLock:
    """A flock: the system releases it when the process ends, however it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


class RealDisk:
    """Files below one folder, which is created with its parents if `create` is given."""

    def __init__(self, root: Path | str, create: bool = False, cached: bool = True) -> None:
        self.root, self._cached = Path(root), cached
        self._locks: list[RealLock] = []
        if create:
            with _typed("make", self.root):
                self._make_root(self.root)

    @staticmethod
    def _make_root(path: Path) -> None:
        """Sync the name of each new folder in its parent: a folder survives only if the path to it does."""
        if path.is_dir():
            return
        RealDisk._make_root(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)

    def _at(self, path: str) -> Path:
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise WrongFolder(f"{path!r} is outside {self.root}", "paths are relative to the replica's folder")
        return self.root / path

    def open(self, path: str, create: bool = False, writable: bool = False) -> RealFile:
        flags = os.O_RDWR if writable or create else os.O_RDONLY
        flags |= os.O_CREAT | os.O_TRUNC if create else 0
        with _typed("open", self._at(path)):
            return self._file(self._at(path), os.open(self._at(path), flags | os.O_CLOEXEC, 0o644))

    def _file(self, path: Path, descriptor: int) -> RealFile:
        return RealFile(path, descriptor, self._cached)

    def exists(self, path: str) -> bool:
        with _typed("stat", self._at(path)):
            return self._at(path).exists()

    def list(self, folder: str) -> list[str]:
        with _typed("list", self._at(folder)):
            return sorted(os.listdir(self._at(folder)))

    def make_folder(self, path: str) -> None:
        with _typed("make", self._at(path)):
            self._at(path).mkdir(exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        with _typed("rename", self._at(old)):
            self._at(old).replace(self._at(new))

    def remove(self, path: str) -> None:
        with _typed("remove", self._at(path)):
            self._at(path).unlink()

    def remove_folder(self, path: str) -> None:
        with _typed("remove", self._at(path)):
            self._at(path).rmdir()

    def sync_folder(self, path: str) -> None:
        with _typed("sync", self._at(path)):
            _sync_folder(self._at(path))

    def free_bytes(self) -> int:
        with _typed("stat", self.root):
            found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def lock(self, path: str) -> RealLock:
        path_on_disk = self._at(path)
        with _typed("lock", path_on_disk):
            descriptor = os.open(path_on_disk, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                hint = "two replicas can't share a folder; stop the other replica, or use another folder"
                raise WrongFolder(f"{self.root} is in use by another process", hint) from error
            raise _as_ours(error, "lock", path_on_disk) from error
        self._locks.append(lock := RealLock(descriptor))
        return lock

    def make_id(self) -> str:
        return secrets.token_hex(16)

    def close(self) -> None:
        for lock in self._locks:
            lock.close()
        self._locks.clear()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
