"""A disk in memory that crashes: any unsynced sectors and names are lost; syncs fail; space runs out.

After a failed sync it behaves as some systems do: written bytes can still be read, count as clean, and are gone after
the next crash unless they are written again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from embarcadero.env import Missing, Part
from embarcadero.errors import DiskFailed, DiskFull, WrongFolder

SECTOR = 512


class Died(Exception):
    """The host crashed in the middle of an operation."""


class Node:
    """A file: its readable content, its content on the disk, and the sectors that differ."""

    def __init__(self) -> None:
        self.data, self.safe = bytearray(), bytearray()
        self.dirty: set[int] = set()

    def write(self, offset: int, data: bytes) -> None:
        if offset > len(self.data):
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data
        self.dirty.update(range(offset // SECTOR, -(-(offset + len(data)) // SECTOR)))

    def truncate(self, size: int) -> None:
        first = min(size, len(self.data)) // SECTOR
        self.dirty.update(range(first, -(-max(size, len(self.data), len(self.safe)) // SECTOR)))
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def sync(self, kept: set[int] | None = None, size: int | None = None) -> None:
        """Write dirty sectors (only those kept, if a crash chose some) and the size."""
        size = len(self.data) if size is None else size
        safe = self.safe[:size] + bytes(max(0, size - len(self.safe)))
        for sector in self.dirty if kept is None else kept:
            part = slice(sector * SECTOR, min(size, (sector + 1) * SECTOR))
            new = self.data[part] + bytes(max(0, part.stop - part.start - len(self.data[part])))
            if part.start < size:
                safe[part] = new
        self.safe = safe
        self.dirty.clear()


class World:
    """The state that survives processes: files and names. `disk()` is one process's view."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.names: dict[str, Node | None] = {"": None}  # None: a folder
        self.safe_names: dict[str, Node | None] = {"": None}
        self.locks: set[str] = set()
        self.room: int | None = None
        self.syncs_to_fail = 0
        self.syncs_to_live: int | None = None  # then the host crashes
        self.read_only = False
        self.unreadable: set[str] = set()
        self.open_files: set[CrashFile] = set()

    def disk(self) -> CrashDisk:
        return CrashDisk(self)

    def crash(self) -> None:
        """Crash the host: any subset of the unsynced state is lost."""
        for path in set(self.names) | set(self.safe_names):
            now, safe = self.names.get(path, "no"), self.safe_names.get(path, "no")
            if now is not safe and self.random.random() < 0.5:
                _put(self.names, path, safe)
        self.names = {path: node for path, node in self.names.items() if self._reachable(path)}
        for node in {id(node): node for node in self.names.values() if node is not None}.values():
            sizes = [len(node.safe), len(node.data), self.random.randint(*sorted((len(node.safe), len(node.data))))]
            chance = self.random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
            kept = {sector for sector in node.dirty if self.random.random() < chance}
            size = self.random.choice(sizes) if node.dirty else len(node.safe)
            node.sync(kept, size)
            node.data = bytearray(node.safe)
        self.safe_names = dict(self.names)
        self.locks.clear()

    def _reachable(self, path: str) -> bool:
        return path == "" or ((parent := path.rpartition("/")[0]) in self.names and self._reachable(parent))

    def sync_names(self, folder: str) -> None:
        for path in set(self.names) | set(self.safe_names):
            if path and path.rpartition("/")[0] == folder:
                _put(self.safe_names, path, self.names.get(path, "no"))


def _put(names: dict, path: str, node: object) -> None:
    if node == "no":
        names.pop(path, None)
    else:
        names[path] = node


class CrashFile:
    def __init__(self, world: World, path: str, node: Node, writable: bool) -> None:
        self._world, self._path, self.node, self._writable = world, path, node, writable
        world.open_files.add(self)

    def _may_write(self) -> None:
        if not self._writable or self._world.read_only:
            raise DiskFailed(f"can't write {self._path}", "test")

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        self._may_write()
        data = b"".join(parts)
        world = self._world
        if world.room is not None:
            grows = max(0, offset + len(data) - len(self.node.data))
            if grows > world.room:
                fits = max(0, len(data) - grows + world.room)
                self.node.write(offset, data[:fits])
                world.room = 0
                raise DiskFull(f"no room to write {self._path}", "test")
            world.room -= grows
        self.node.write(offset, data)

    def pread(self, size: int, offset: int) -> bytes:
        if self._path in self._world.unreadable:
            raise DiskFailed(f"can't read {self._path}: EIO", "test")
        return bytes(self.node.data[offset : offset + size])

    def sync(self) -> None:
        if self._world.syncs_to_live is not None:
            self._world.syncs_to_live -= 1
            if self._world.syncs_to_live < 0:
                raise Died
        if self._world.syncs_to_fail:
            self._world.syncs_to_fail -= 1
            self.node.dirty.clear()  # still readable, and never written to the medium
            raise DiskFailed(f"can't sync {self._path}: EIO", "test")
        self.node.sync()

    def size(self) -> int:
        return len(self.node.data)

    def truncate(self, size: int) -> None:
        self._may_write()
        self.node.truncate(size)

    def close(self) -> None:
        self._world.open_files.discard(self)


class CrashLock:
    def __init__(self, world: World, path: str) -> None:
        self._world, self._path = world, path

    def close(self) -> None:
        self._world.locks.discard(self._path)


class CrashDisk:
    def __init__(self, world: World) -> None:
        self.world = world
        self._held: list[CrashLock] = []

    def _check(self, path: str, parent: bool = False) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise WrongFolder(f"{path} leads out", "test")
        if (path.rpartition("/")[0] if parent else path) not in self.world.names:
            raise Missing(f"no {path}", "test")
        return path

    def open(self, path: str, create: bool = False, writable: bool = False) -> CrashFile:
        node = self.world.names.get(self._check(path, parent=create))
        if create:
            if self.world.read_only:
                raise DiskFailed(f"can't create {path}", "test")
            if node is None:
                node = self.world.names[path] = Node()
            node.truncate(0)
        assert node is not None
        return CrashFile(self.world, path, node, create or writable)

    def exists(self, path: str) -> bool:
        return path in self.world.names

    def list(self, folder: str) -> list[str]:
        self._check(folder)
        return sorted(
            path.rpartition("/")[2] for path in self.world.names if path and path.rpartition("/")[0] == folder
        )  # fmt: skip

    def make_folder(self, path: str) -> None:
        self.world.names.setdefault(self._check(path, parent=True), None)

    def rename(self, old: str, new: str) -> None:
        self.world.names[new] = self.world.names.pop(self._check(old))

    def remove(self, path: str) -> None:
        del self.world.names[self._check(path)]

    def remove_folder(self, path: str) -> None:
        if self.list(path):
            raise DiskFailed(f"{path} is not empty", "test")
        del self.world.names[path]

    def sync_folder(self, path: str) -> None:
        self._check(path)
        self.world.sync_names(path)

    def free_bytes(self) -> int:
        return 1 << 40 if self.world.room is None else self.world.room

    def lock(self, path: str) -> CrashLock:
        if path in self.world.locks:
            raise WrongFolder("in use", "test")
        self.world.names.setdefault(path, Node())
        self.world.locks.add(path)
        self._held.append(lock := CrashLock(self.world, path))
        return lock

    def make_id(self) -> str:
        return f"{self.world.random.getrandbits(128):032x}"

    def close(self) -> None:
        for lock in self._held:
            lock.close()
