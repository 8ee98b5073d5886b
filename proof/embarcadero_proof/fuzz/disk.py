"""A disk in plain memory: fast to fill from an input, and to read. Implements `storage.disk.Disk`."""

from __future__ import annotations

from collections.abc import Sequence

from embarcadero.env import Missing, Part
from embarcadero.errors import DiskFailed
from embarcadero_proof.fuzz.archive import Files


class PlainFile:
    """An open file."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        """Write all parts."""
        whole = b"".join(parts)
        if len(self._data) < offset:
            self._data += bytes(offset - len(self._data))
        self._data[offset : offset + len(whole)] = whole

    def pread(self, size: int, offset: int) -> bytes:
        """Read at most `size` bytes."""
        return bytes(self._data[offset : offset + size]) if size > 0 else b""

    def sync(self) -> None:
        """Do nothing: nothing is ever lost here."""

    def size(self) -> int:
        """Return the size."""
        return len(self._data)

    def truncate(self, size: int) -> None:
        """Set the size."""
        self.pwrite([], size)
        del self._data[size:]

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class PlainDisk:
    """Files by path; folders exist by their contents."""

    def __init__(self, files: Files | None = None) -> None:
        self._files = {path: bytearray(data) for path, data in (files or {}).items()}
        self._folders = {""}
        for path in self._files:
            self._add_folders(path.rpartition("/")[0])

    def _add_folders(self, folder: str) -> None:
        while folder:
            self._folders.add(folder)
            folder = folder.rpartition("/")[0]

    @property
    def files(self) -> Files:
        """All files."""
        return {path: bytes(data) for path, data in self._files.items()}

    def open(self, path: str, create: bool = False, writable: bool = False) -> PlainFile:  # noqa: ARG002
        """Open a file, or create one."""
        if path in self._folders:
            raise DiskFailed(f"can't open {path}: it is a folder", "look at the disk's health")
        if create:
            self._files[path] = bytearray()
        return PlainFile(self._find(path))

    def _find(self, path: str) -> bytearray:
        if path not in self._files:
            raise Missing(f"there is no {path}", "it was deleted, or never there")
        return self._files[path]

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        return path in self._files or path in self._folders

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        if folder not in self._folders:
            raise Missing(f"there is no folder {folder}", "it was deleted, or never there")
        start = f"{folder}/" if folder else ""
        inside = (path[len(start) :] for path in (*self._files, *self._folders) if path.startswith(start))
        return sorted({name.partition("/")[0] for name in inside if name})

    def make_folder(self, path: str) -> None:
        """Create a folder if it does not exist."""
        if path in self._files:
            raise DiskFailed(f"can't make {path}: a file has that name", "look at the disk's health")
        self._add_folders(path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file."""
        data = self._find(old)
        del self._files[old]
        self._files[new] = data

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._find(path)
        del self._files[path]

    def remove_folder(self, path: str) -> None:
        """Remove a folder."""
        self._folders.discard(path)

    def sync_folder(self, path: str) -> None:
        """Do nothing: nothing is ever lost here."""

    def free_bytes(self) -> int:
        """Return a large number."""
        return 1 << 40

    def lock(self, path: str) -> PlainFile:  # noqa: ARG002
        """Return a lock: there is no other process."""
        return PlainFile(bytearray())

    def make_id(self) -> str:
        """Return a constant id."""
        return "f" * 32

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
