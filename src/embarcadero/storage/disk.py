"""The seam to disks. `real.py` is the operating system's; the simulator has its own; one suite holds for both.

Paths are relative, with `/`, below the disk's root. What was written counts as kept only after `sync` of the file, and
a name only after `sync_folder` of its folder. Everything the world does wrong arrives as a typed error: DiskFull,
DiskFailed (and its Missing), WrongFolder.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from embarcadero.errors import DiskFailed, EmbarcaderoError

Part = bytes | bytearray | memoryview


class Missing(DiskFailed):
    """There is no such file or folder: never written, dropped meanwhile, or deleted by somebody."""


class File(Protocol):
    """One open file. Offsets are given with each call, so that threads need not agree on a place."""

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        """Write all parts, one after another, from `offset` on; what is between the end and there reads as zeros."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """So many bytes; fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Return once everything written before this call is on the disk. After an error nothing is known."""
        ...

    def size(self) -> int:
        """How long the file is now."""
        ...

    def truncate(self, size: int) -> None:
        """Make it this long."""
        ...

    def close(self) -> None:
        """Let go of it. Closing twice is harmless."""
        ...


class Lock(Protocol):
    """A folder that is ours until we close this, or end."""

    def close(self) -> None:
        """Give it back."""
        ...


class Disk(Protocol):
    """Files below one folder."""

    def open(self, path: str, create: bool = False, writable: bool = False) -> File:
        """Open a file. `create` makes a new, empty one in place of what may be there, and implies `writable`."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; "" is the root. Missing if there is no such folder."""
        ...

    def make_folder(self, path: str) -> None:
        """Have a folder; its parent exists. One that is there already is fine."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what has it."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        ...

    def sync_folder(self, path: str) -> None:
        """Return once the names in this folder are on the disk."""
        ...

    def free_bytes(self) -> int:
        """Room that is left."""
        ...

    def lock(self, path: str) -> Lock:
        """Be the only holder of this file, until the lock or the disk is closed. WrongFolder if another one is."""
        ...

    def make_id(self) -> str:
        """A fresh random id, 32 hexadecimal digits."""
        ...

    def close(self) -> None:
        """Let go of all locks."""
        ...


def write_whole(disk: Disk, path: str, parts: Sequence[Part]) -> None:
    """Put a whole file under a name at once: others see the earlier one or this one, also after a crash."""
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
    """A small file's bytes. Missing if there is none; DiskFailed if it is longer than anything we wrote."""
    file = disk.open(path)
    try:
        size = file.size()
        if size > bytes_max:
            raise DiskFailed(f"{path} has {size} bytes, at most {bytes_max} were expected", "is it ours?")
        return file.pread(size, 0)
    finally:
        file.close()


def join(folder: str, name: str) -> str:
    """A path below a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name
