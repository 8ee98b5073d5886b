"""A disk that is as bad as disks may be: what was not synced is lost in part, syncs fail, bits rot, room runs out.

One `SimDisk` is one device with its file system. Each process has a `Mount` of it; all see the same live files, as
processes on one host do. `lose_power` is what a power cut leaves; a process that is killed leaves everything in place
but its locks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from embarcadero.errors import BadValue, DiskFailed, DiskFull, WrongFolder
from embarcadero.sim.medium import Names, Naming, SimFile, SimFolder, Write

CAPACITY_BYTES = 1 << 40
"""Of a disk that is not full."""

_TORN_BYTES_MIN = 512
"""A longer write can be interrupted in its middle."""


class SimDisk:
    """One device. The fields are its faults: set them, and it is so."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.names = Names()
        self.locks: dict[str, str] = {}  # path -> who holds it
        self.full = self.read_only = False
        self.failing_syncs = 0  # so many syncs will fail
        self.sync_us = 0  # on top of what a sync takes anyway
        self.on_synced: Callable[[], None] = lambda: None  # somebody looks at what is on the medium

    def lose_power(self) -> None:
        """Everything that was not synced is lost in part."""
        self.names.lose_power(self.rng)
        self.locks.clear()

    def process_died(self, owner: str) -> None:
        """Its locks are free."""
        self.locks = {path: holder for path, holder in self.locks.items() if holder != owner}

    def heal(self) -> None:
        """Nothing is wrong with it any more."""
        self.full = self.read_only = False
        self.failing_syncs = self.sync_us = 0
        for file in self.names.files():
            file.drop_cache()

    def flip_a_bit(self, chosen: Callable[[str], bool]) -> str | None:
        """Some bit of some file rots; its path, if there was a file to choose."""
        paths = [(path, node) for path, node in self.names.walk(on_medium=True)
                 if isinstance(node, SimFile) and node.medium and chosen(path)]  # fmt: skip
        if not paths:
            return None
        path, file = self.rng.choice(paths)
        file.flip(self.rng.randrange(len(file.medium)), self.rng.randrange(8))
        return path

    def used_bytes(self) -> int:
        """What all files take."""
        return sum(len(file.live) for file in self.names.files())


class Mount:
    """A disk as one process uses it, whichever device is found there. Implements `storage.disk.Disk`."""

    def __init__(self, find: Callable[[], SimDisk], owner: str, interrupt: Callable[[], None] = lambda: None) -> None:
        self._find, self._owner, self._interrupt = find, owner, interrupt

    @property
    def device(self) -> SimDisk:
        """The device that is there now."""
        return self._find()

    # --- names --------------------------------------------------------------------------------------------------------
    def open(self, path: str, create: bool = False, writable: bool = False) -> Handle:
        """A file; made if asked for."""
        self._interrupt()
        folder, name = self._parent(path)
        node = folder.live.get(name)
        if isinstance(node, SimFolder):
            self._fail(f"{path} is a folder")
        if node is None:
            if not create:
                self._fail(f"{path} does not exist")
            self._check_writable(path)
            if self.device.full:
                raise DiskFull(f"no room to make {path}", "free some space")
            node = SimFile()
            self.device.names.change(Naming(folder, name, node))
        return Handle(self, path, node, writable or create)

    def exists(self, path: str) -> bool:
        """Whether something has that name."""
        folder, name = self._find_parent(path)
        return folder is not None and (not name or name in folder.live)

    def list(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if there is no such folder."""
        found = self._folder(folder)
        return [] if found is None else sorted(found.live)

    def make_folder(self, path: str) -> None:
        """Have a folder; those above it are made too."""
        self._interrupt()
        folder = self.device.names.root
        for name in _parts(path):
            node = folder.live.get(name)
            if node is None:
                self._check_writable(path)
                node = SimFolder()
                self.device.names.change(Naming(folder, name, node))
            if not isinstance(node, SimFolder):
                self._fail(f"{path} is not a folder")
            folder = node

    def rename(self, old: str, new: str) -> None:
        """Give a file or folder another name, at once; what had that name is gone."""
        self._interrupt()
        self._check_writable(old)
        (folder, name), (target, other) = self._parent(old), self._parent(new)
        node = folder.live.get(name)
        if node is None:
            self._fail(f"{old} does not exist")
        self.device.names.change(Naming(folder, name, None), Naming(target, other, node))

    def remove(self, path: str) -> None:
        """A file has no name any more; who has it open may go on reading."""
        self._interrupt()
        self._check_writable(path)
        folder, name = self._parent(path)
        if not isinstance(folder.live.get(name), SimFile):
            self._fail(f"{path} does not exist")
        self.device.names.change(Naming(folder, name, None))

    def remove_folder(self, path: str) -> None:
        """An empty folder goes."""
        self._interrupt()
        self._check_writable(path)
        folder, name = self._parent(path)
        node = folder.live.get(name)
        if not isinstance(node, SimFolder) or node.live:
            self._fail(f"{path} is no empty folder")
        self.device.names.change(Naming(folder, name, None))

    def sync_folder(self, path: str) -> None:
        """The names in a folder will be there after a power cut."""
        self._interrupt()
        folder = self._folder(path)
        if folder is None:
            self._fail(f"{path} does not exist")
        self.check_sync(path)
        self.device.names.arrive(folder)
        self.device.on_synced()

    def free_bytes(self) -> int:
        """Room that is left."""
        return 0 if self.device.full else CAPACITY_BYTES - self.device.used_bytes()

    def lock(self, path: str) -> Lock:
        """Hold a file for this process alone, until closed."""
        self._interrupt()
        if self.device.locks.get(path) is not None:
            raise WrongFolder(f"{path} is locked by another process", "end that process first")
        if not self.exists(path):
            self.open(path, create=True)
        self.device.locks[path] = self._owner
        return Lock(self.device, path, self._owner)

    # --- helpers ------------------------------------------------------------------------------------------------------
    def interrupted(self) -> None:
        """Others may act now."""
        self._interrupt()

    def check_sync(self, path: str) -> None:
        """A sync may fail, once."""
        if self.device.failing_syncs:
            self.device.failing_syncs -= 1
            self._fail(f"sync of {path}: input/output error")

    def check_writable(self, path: str) -> None:
        """A disk may have become read-only."""
        self._check_writable(path)

    def _check_writable(self, path: str) -> None:
        if self.device.read_only:
            self._fail(f"{path}: the file system is read-only")

    def _fail(self, what: str) -> NoReturn:
        raise DiskFailed(what, "look at the disk, then restart the replica")

    def _find_parent(self, path: str) -> tuple[SimFolder | None, str]:
        *folders, name = _parts(path) or [""]
        folder = self.device.names.root
        for part in folders:
            node = folder.live.get(part)
            if not isinstance(node, SimFolder):
                return None, name
            folder = node
        return folder, name

    def _parent(self, path: str) -> tuple[SimFolder, str]:
        folder, name = self._find_parent(path)
        if folder is None:
            self._fail(f"{path} does not exist")
        return folder, name

    def _folder(self, path: str) -> SimFolder | None:
        folder, name = self._find_parent(path)
        if folder is None or not name:
            return folder
        node = folder.live.get(name)
        return node if isinstance(node, SimFolder) else None


class Handle:
    """An open file. Implements `storage.disk.File`."""

    def __init__(self, mount: Mount, path: str, file: SimFile, writable: bool) -> None:
        self._mount, self._path, self._file, self._writable = mount, path, file, writable

    def pwrite(self, parts: Sequence[Any], offset: int) -> None:
        """Write all parts, one behind the other. Long writes may be seen half done, and may stay so."""
        self._check()
        data, device = b"".join(bytes(part) for part in parts), self._mount.device
        if device.full and offset + len(data) > len(self._file.live):
            self._write(offset, data[: device.rng.randrange(len(data) + 1)])
            raise DiskFull(f"no room in {self._path}", "free some space")
        if len(data) > _TORN_BYTES_MIN:
            cut = device.rng.randrange(len(data))
            self._write(offset, data[:cut])
            self._check()
            offset, data = offset + cut, data[cut:]
        self._write(offset, data)

    def _write(self, offset: int, data: bytes) -> None:
        if data:
            self._file.write(Write(offset, data))

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        return bytes(self._file.live[offset : offset + size])

    def sync(self) -> None:
        """What was written is on the medium, or DiskFailed: then nobody knows."""
        self._mount.interrupted()
        try:
            self._mount.check_sync(self._path)
        except DiskFailed:
            self._file.fail(self._mount.device.rng)
            raise
        self._file.arrive()
        self._mount.device.on_synced()

    def size(self) -> int:
        """How long the file is."""
        return len(self._file.live)

    def truncate(self, size: int) -> None:
        """Cut the file, or make it longer with zeros."""
        self._check()
        self._file.write(Write(size, None))

    def close(self) -> None:
        """Done with it. What was written stays as it is."""

    def _check(self) -> None:
        self._mount.interrupted()
        self._mount.check_writable(self._path)
        if not self._writable:
            raise BadValue(f"{self._path} was opened for reading", "open it with writable=True")


class Lock:
    """A lock on a file."""

    def __init__(self, device: SimDisk, path: str, owner: str) -> None:
        self._device, self._path, self._owner = device, path, owner

    def close(self) -> None:
        """Let go."""
        if self._device.locks.get(self._path) == self._owner:
            del self._device.locks[self._path]


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or path.startswith("/"):
        raise BadValue(f"{path!r} is not a path below the disk's root", "use a relative path without '..'")
    return parts
