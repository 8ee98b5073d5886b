"""A disk that is as bad as disks may be: unsynced data is lost in part, syncs fail, bits rot, space runs out.

One `SimDisk` is one device with its file system. Each process has a `Mount` of it; all see the same live files, as
processes on one host do. `lose_power` leaves the disk as after a power cut. A killed process leaves everything in place
except its locks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from embarcadero.env import Missing, Part
from embarcadero.errors import DiskFailed, DiskFull, WrongFolder
from embarcadero_proof.sim.medium import SECTOR_BYTES, Names, Naming, Node, SimFile, SimFolder, Write

CAPACITY_BYTES = 1 << 40
"""Free space of an empty disk."""

_HINT = "look at the disk's health"


class SimDisk:
    """One device. Its fields are its faults: set a field to cause the fault."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.names = Names()
        self.locks: dict[str, Mount] = {}
        self.full = self.read_only = False
        self.failing_syncs = 0  # the number of next syncs that fail
        self.slow_us = 0  # added to the time of a sync
        self.on_synced: Callable[[SimDisk, SimFile | None], None] = lambda _disk, _file: None  # None: names were synced

    def lose_power(self) -> None:
        """Lose any part of the unsynced data and names."""
        self.names.lose_power(self.rng)
        self.locks.clear()

    def heal(self) -> None:
        """End all faults; lost data stays lost."""
        self.full = self.read_only = False
        self.failing_syncs = self.slow_us = 0

    def drop_caches(self) -> None:
        """Drop the pages that a failed sync left in the cache."""
        for file in self.names.files():
            file.drop_cache()

    def flip_a_bit(self, chosen: Callable[[str], bool]) -> str | None:
        """Flip a bit of some file. Returns its path, if a file could be chosen."""
        if not (paths := self._files(chosen)):
            return None
        path, file = self.rng.choice(paths)
        file.flip(self.rng.randrange(len(file.medium)), self.rng.randrange(8))
        return path

    def lose_a_file(self, chosen: Callable[[str], bool]) -> str | None:
        """Lose some file. Returns its path."""
        if not (paths := self._files(chosen)):
            return None
        path, _ = self.rng.choice(paths)
        self._lose(path)
        return path

    def lose_a_folder(self, chosen: Callable[[str], bool]) -> str | None:
        """Lose the folder of some file, or its parent, with all contents. Returns its path."""
        if not (paths := self._files(chosen)):
            return None
        folders = self.rng.choice(paths)[0].split("/")[:-1]
        path = "/".join(folders[: self.rng.choice([1, 2, 2, 2])])
        self._lose(path)
        return path

    def _lose(self, path: str) -> None:
        folder: Node | None = self.names.root
        for part in path.split("/")[:-1]:
            folder = folder.medium.get(part) if isinstance(folder, SimFolder) else None
        if isinstance(folder, SimFolder):
            for names in (folder.live, folder.medium):
                names.pop(path.rpartition("/")[2], None)

    def swap_files(self, chosen: Callable[[str], bool]) -> str | None:
        """Swap the contents of two files. Returns their paths."""
        paths = self._files(chosen)
        if len(paths) < 2:
            return None
        (path, file), (other_path, other) = self.rng.sample(paths, 2)
        file.spoil()
        other.spoil()
        file.live, other.live = other.live, file.live
        file.medium, other.medium = other.medium, file.medium
        file.under_way, other.under_way = other.under_way, file.under_way
        return f"{path} and {other_path}"

    def misplace_a_sector(self, chosen: Callable[[str], bool]) -> str | None:
        """Overwrite a sector with another one, like a write to a wrong place. Returns the path of its file."""
        if not (paths := self._files(chosen)):
            return None
        (path, file), (_, source) = self.rng.choice(paths), self.rng.choice(paths)
        at = self.rng.randrange(len(file.medium)) // SECTOR_BYTES * SECTOR_BYTES
        start = self.rng.randrange(len(source.medium)) // SECTOR_BYTES * SECTOR_BYTES
        wrong = bytes(source.medium[start : start + SECTOR_BYTES][: len(file.medium) - at])
        file.spoil()
        for target in (file.live, file.medium):
            target[at : at + len(wrong)] = wrong
        return path

    def _files(self, chosen: Callable[[str], bool]) -> list[tuple[str, SimFile]]:
        return [(path, node) for path, node in self.names.walk(on_medium=True)
                if isinstance(node, SimFile) and node.medium and chosen(path)]  # fmt: skip


class Mount:
    """A disk as one process uses it; the device under it may change. Implements `storage.disk.Disk`."""

    def __init__(self, find: Callable[[], SimDisk], interrupt: Callable[[], None] = lambda: None) -> None:
        self._find, self.interrupted = find, interrupt

    @property
    def device(self) -> SimDisk:
        """The current device."""
        return self._find()

    # --- names --------------------------------------------------------------------------------------------------------
    def open(self, path: str, create: bool = False, writable: bool = False) -> Handle:
        self.interrupted()
        folder, name = self._parent(path)
        node = folder.live.get(name)
        if isinstance(node, SimFolder):
            raise DiskFailed(f"can't open {path}: it is a folder", _HINT)
        if create:
            self.check_writable(path)
            if self.device.full:
                raise DiskFull(f"no space to create {path}", "free space on that disk")
            if node is not None:
                node.write(Write(0, None))
            else:
                node = SimFile()
                self.device.names.change(Naming(folder, name, node))
        if node is None:
            raise _missing(path)
        if writable:
            self.check_writable(path)
        return Handle(self, path, node, writable or create)

    def exists(self, path: str) -> bool:
        return self._node(path) is not None

    def list(self, folder: str) -> list[str]:
        return sorted(self._folder(folder).live)

    def make_folder(self, path: str) -> None:
        self.interrupted()
        folder, name = self._parent(path)
        if isinstance(folder.live.get(name), SimFile):
            raise DiskFailed(f"can't create {path}: a file has that name", _HINT)
        if name not in folder.live:
            self.check_writable(path)
            if self.device.full:
                raise DiskFull(f"no space to create {path}", "free space on that disk")
            self.device.names.change(Naming(folder, name, SimFolder()))

    def rename(self, old: str, new: str) -> None:
        self.interrupted()
        self.check_writable(old)
        (folder, name), (target, other) = self._parent(old), self._parent(new)
        node = folder.live.get(name)
        if node is None:
            raise _missing(old)
        self.device.names.change(Naming(folder, name, None), Naming(target, other, node))

    def remove(self, path: str) -> None:
        self.interrupted()
        self.check_writable(path)
        folder, name = self._parent(path)
        if name not in folder.live:
            raise _missing(path)
        if isinstance(folder.live[name], SimFolder):
            raise DiskFailed(f"can't remove {path}: it is a folder", _HINT)
        self.device.names.change(Naming(folder, name, None))

    def remove_folder(self, path: str) -> None:
        self.interrupted()
        self.check_writable(path)
        if self._folder(path).live:
            raise DiskFailed(f"can't remove {path}: it is not empty", _HINT)
        self.device.names.change(Naming(*self._parent(path), None))

    def sync_folder(self, path: str) -> None:
        self.interrupted()
        folder = self._folder(path)
        self.check_sync(path)
        self.device.names.arrive(folder)
        self.device.on_synced(self.device, None)

    def free_bytes(self) -> int:
        used = sum(len(file.live) for file in self.device.names.files())
        return 0 if self.device.full else CAPACITY_BYTES - used

    def lock(self, path: str) -> Lock:
        if path in self.device.locks:
            hint = "two replicas can't share a folder; stop the other one, or give each its own"
            raise WrongFolder(f"{path} is in use by another process", hint)
        if not self.exists(path):
            self.open(path, create=True)
        self.device.locks[path] = self
        return Lock(self, path)

    def make_id(self) -> str:
        return f"{self.device.rng.getrandbits(128):032x}"

    def close(self) -> None:
        """Release all locks, as the operating system does when a process ends."""
        device = self.device
        device.locks = {path: holder for path, holder in device.locks.items() if holder is not self}

    # --- faults, and helpers ------------------------------------------------------------------------------------------
    def check_sync(self, path: str) -> None:
        """Raise if a sync should fail."""
        if self.device.failing_syncs:
            self.device.failing_syncs -= 1
            raise DiskFailed(f"can't sync {path}: input/output error", _HINT)

    def check_writable(self, path: str) -> None:
        """Raise if the disk is read-only."""
        if self.device.read_only:
            raise DiskFailed(f"can't write {path}: read-only file system", "make the folder writable for this user")

    def _node(self, path: str) -> Node | None:
        parts = path.split("/") if path else []
        if path.startswith("/") or ".." in parts:
            raise WrongFolder(f"{path!r} leads out of this disk", "paths are relative to the replica's folder")
        node: Node | None = self.device.names.root
        for part in parts:
            node = node.live.get(part) if isinstance(node, SimFolder) else None
        return node

    def _folder(self, path: str) -> SimFolder:
        node = self._node(path)
        if node is None:
            raise _missing(path)
        if not isinstance(node, SimFolder):
            raise DiskFailed(f"{path} is not a folder", _HINT)
        return node

    def _parent(self, path: str) -> tuple[SimFolder, str]:
        folder, _, name = path.rpartition("/")
        self._node(path)
        return self._folder(folder), name


class Handle:
    """An open file. Implements `storage.disk.File`."""

    def __init__(self, mount: Mount, path: str, file: SimFile, writable: bool) -> None:
        self._mount, self._path, self._file, self._writable = mount, path, file, writable
        self._open = True

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        """Write. Readers may see a long write half done, and it may stay half done."""
        self._check_writable()
        data, device = b"".join(parts), self._mount.device
        if device.full and offset + len(data) > len(self._file.live):
            self._write(offset, data[: self._part_of(offset, len(data))])
            raise DiskFull(f"no space to write {self._path}", "free space on that disk")
        if len(data) > 2 * SECTOR_BYTES:
            cut = self._part_of(offset, len(data))
            self._write(offset, data[:cut])
            self._check_writable()
            offset, data = offset + cut, data[cut:]
        self._write(offset, data)

    def _part_of(self, offset: int, size: int) -> int:
        """Return how much of a write is done when it is cut short: up to the end of some sector before its last."""
        last = (offset + size - 1) // SECTOR_BYTES * SECTOR_BYTES - offset
        return max(0, last - SECTOR_BYTES * self._mount.device.rng.randrange(max(1, last // SECTOR_BYTES + 1)))

    def _write(self, offset: int, data: bytes) -> None:
        if data:
            self._file.write(Write(offset, data))

    def pread(self, size: int, offset: int) -> bytes:
        self._check()
        return bytes(self._file.live[offset : offset + size])

    def sync(self) -> None:
        self._check()
        self._mount.interrupted()
        try:
            self._mount.check_sync(self._path)
        except DiskFailed:
            self._file.fail(self._mount.device.rng)
            raise
        self._file.arrive()
        self._mount.device.on_synced(self._mount.device, self._file)

    def size(self) -> int:
        self._check()
        return len(self._file.live)

    def truncate(self, size: int) -> None:
        self._check_writable()
        self._file.write(Write(size, None))

    def close(self) -> None:
        self._open = False

    def _check(self) -> None:
        if not self._open:
            raise DiskFailed(f"can't use {self._path}: bad file descriptor", _HINT)

    def _check_writable(self) -> None:
        self._check()
        self._mount.interrupted()
        self._mount.check_writable(self._path)
        if not self._writable:
            raise DiskFailed(f"can't write {self._path}: bad file descriptor", _HINT)


class Lock:
    """A lock on a file."""

    def __init__(self, mount: Mount, path: str) -> None:
        self._mount, self._path = mount, path

    def close(self) -> None:
        if self._mount.device.locks.get(self._path) is self._mount:
            del self._mount.device.locks[self._path]


def _missing(path: str) -> Missing:
    return Missing(f"can't open {path}: there is no such file", "was it deleted by hand?")
