"""Stores by URL: `open_store`; a store in memory; and what a store says that no process has open."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from embarcadero.errors import BadValue, DiskFailed
from embarcadero.placement.directory import Directory
from embarcadero.placement.sqlite import SqliteStore
from embarcadero.placement.store import ABSENT, NO_LEASE, Check, Item, Items, Outline, Put, Store, Write
from embarcadero.types import Range

_SQLITE: Final = "sqlite"
_MEMORY: Final = "memory"


def open_store(url: Path | str) -> Store:
    """Open the store that a URL names: a path or `sqlite:///path` for a SQLite file, `memory:` for one in this process.

    Raises BadValue for another scheme, and what the store raises for a file that is damaged or can't be opened.
    """
    text = str(url)
    scheme, colon, rest = text.partition(":")
    if not colon or "/" in scheme or isinstance(url, Path):
        return SqliteStore(Path(text))
    if scheme == _SQLITE and rest.startswith("///") and len(rest) > len("///"):
        return SqliteStore(Path(rest.removeprefix("//")))
    if scheme == _MEMORY and not rest:
        return MemoryStore()
    raise BadValue(f"there is no store {text!r}", "use a path, sqlite:///path/to/store.db, or memory:")


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    pid: int
    ends_s: float


class MemoryStore:
    """Values in a dict under a lock. `clock` tells seconds, `alive` whether a process is still there."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0, alive: Callable[[int], bool] = bool) -> None:
        self._items: dict[str, Item] = {}
        self._leases: dict[int, _Lease] = {}
        self._leased: dict[str, int] = {}
        self._granted = NO_LEASE
        self._revision = self._keys_as_of = 0
        self._keys: dict[str, Sequence[str]] = {}  # by prefix, as of that revision
        self._clock, self._alive = clock, alive
        self._lock = threading.Lock()

    def get(self, key: str) -> Item | None:
        with self._lock:
            return self._items.get(key) if self._visible(key) else None

    def list(self, prefix: str) -> Items:
        with self._lock:
            return [self._items[key] for key in self._keys_of(prefix) if self._visible(key)]

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        with self._lock:
            if writes:
                self._end_leases()
            for key, revision in checks:
                item = self._items.get(key) if self._visible(key) else None
                if (item.revision if item else ABSENT) != revision:
                    return False
            if any(isinstance(w, Put) and w.lease != NO_LEASE and w.lease not in self._leases for w in writes):
                return False
            if writes:
                self._write(writes)
            return True

    def revision(self) -> int:
        return self._revision

    def outline(self, but: Sequence[str]) -> Outline:
        with self._lock:
            found = [item.revision for key, item in self._items.items() if not key.startswith(tuple(but))]
            return Outline(len(found), max(found, default=0))

    def grant(self, ttl_s: float, pid: int = 0) -> int:
        with self._lock:
            self._granted += 1
            self._leases[self._granted] = _Lease(ttl_s, pid, self._clock() + ttl_s)
            return self._granted

    def keep_alive(self, lease: int) -> bool:
        with self._lock:
            if (held := self._leases.get(lease)) is None or not self._holds(held):
                return False
            held.ends_s = self._clock() + held.ttl_s
            return True

    def revoke(self, lease: int) -> None:
        with self._lock:
            if (held := self._leases.get(lease)) is not None:
                held.ends_s = float("-inf")
            self._end_leases()

    def expire(self) -> bool:
        with self._lock:
            return self._end_leases()

    def close(self) -> None:
        pass

    def _write(self, writes: Sequence[Write]) -> None:
        self._revision += 1
        for write in writes:
            self._leased.pop(write.key, None)
            if isinstance(write, Put):
                self._items[write.key] = Item(write.key, write.value, self._revision)
                if write.lease != NO_LEASE:
                    self._leased[write.key] = write.lease
            else:
                self._items.pop(write.key, None)

    def _keys_of(self, prefix: str) -> Sequence[str]:
        """Keys that begin so, sorted; worked out again when the store has changed."""
        if self._keys_as_of != self._revision:
            self._keys_as_of, self._keys = self._revision, {}
        keys = self._keys.get(prefix)
        if keys is None:
            keys = self._keys[prefix] = sorted(key for key in self._items if key.startswith(prefix))
        return keys

    def _visible(self, key: str) -> bool:
        lease = self._leased.get(key)
        return lease is None or self._holds(self._leases[lease])

    def _holds(self, lease: _Lease) -> bool:
        return self._clock() < lease.ends_s and (lease.pid == 0 or self._alive(lease.pid))

    def _end_leases(self) -> bool:
        ended = {number for number, lease in self._leases.items() if not self._holds(lease)}
        gone = [key for key, lease in self._leased.items() if lease in ended]
        for number in ended:
            del self._leases[number]
        for key in gone:
            del self._items[key], self._leased[key]
        self._revision += bool(gone)
        return bool(gone)


# --- stores that no process has open ----------------------------------------------------------------------------------
_FILES = ("", "-wal", "-revision")


class Stored(NamedTuple):
    """What a store says about records on disk."""

    cluster: str
    ranges: list[Range]
    trims: dict[int, int]  # where lanes start
    topics: dict[int, str]  # lane -> name of its topic


def read_stored(path: Path) -> Stored:
    """Read a store that no process has open. Corrupt, and what to do, if it is damaged; DiskFailed if unreadable."""
    with tempfile.TemporaryDirectory(prefix="embarcadero-") as folder:
        copy = Path(folder) / path.name
        try:
            for suffix in _FILES:
                if (source := path.with_name(path.name + suffix)).exists():
                    shutil.copyfile(source, copy.with_name(copy.name + suffix))
        except OSError as error:
            raise DiskFailed(f"the store {path} can't be read: {error.strerror}", "check its disk") from error
        with closing(open_store(copy)) as store:
            return stored(Directory(store))


def stored(directory: Directory) -> Stored:
    """The same of a directory that is open."""
    topics = {topic.lane: topic.name for topic in directory.topics.all()}
    topics |= {lane.lane: topics[lane.topic] for lane in directory.lanes.all() if lane.topic in topics}
    return Stored(directory.cluster_id, directory.ranges.all(), directory.topics.trims(), topics)
