"""The store: a few thousand small values, changed only by transactions. One interface, two backends, `open_store`.

A value has the revision of the transaction that last wrote it. Revisions grow with every transaction that changed
something. A transaction names the revisions on which its decision rests, and happens only if all of them still hold.
That is the model of etcd (mod revisions, compare-then-put): a cluster of several hosts can use etcd behind the same
interface.

A lease shows that its holder is alive. Values written under a lease disappear, for every reader, when the lease ends:
when its time is over without `keep_alive`, when it is revoked, or when a store that can see processes finds that the
holder's process has ended. An ended lease never comes back.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from embarcadero.errors import Backpressure, BadValue, ClusterError, Corrupt, DiskFailed, DiskFull, EmbarcaderoError
from embarcadero.limits import STORE_BUSY_S
from embarcadero.liveness import process_mark, same_process

ABSENT = 0
"""The revision of a key without a value."""

NO_LEASE = 0
"""The lease of a value that stays until it is deleted."""

_REST_US: Final = 100_000


def rested_us(began_us: int, now_us: int) -> int:
    """Compute when to ask a store again that has just failed a request from `began_us`.

    The pause is a moment, plus the time for which that request waited, so that the caller can do other work.
    """
    return now_us + _REST_US + now_us - began_us


class Item(NamedTuple):
    """A key's value, and the revision of the transaction that wrote it."""

    key: str
    value: bytes
    revision: int


class Check(NamedTuple):
    """A condition of a transaction: the key still has this revision (ABSENT: no value)."""

    key: str
    revision: int


class Put(NamedTuple):
    """Write a value. Under a lease, it stays only as long as the lease.

    A `volatile` value is meaningless after the machine has lost power, so no caller waits for a disk. A power loss may
    undo a transaction of only such writes, together with all later ones, but no earlier ones.
    """

    key: str
    value: bytes
    lease: int = NO_LEASE
    volatile: bool = False


class Delete(NamedTuple):
    """Remove a value. An absent value is no error."""

    key: str
    volatile: bool = False


Write = Put | Delete


class Outline(NamedTuple):
    """The number of values of some kind, and the newest revision among them."""

    values: int
    revision: int


Items = list[Item]


class Store(Protocol):
    """Interface of a backend for the directory. Safe to call from several threads."""

    def get(self, key: str) -> Item | None:
        """Read the newest committed value of a key."""
        ...

    def list(self, prefix: str) -> Items:
        """Read all values whose key starts with `prefix`, sorted by key, as of one moment."""
        ...

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        """Do all writes at one new revision and return True, if all checks hold; otherwise change nothing.

        A write under a lease that has ended counts as a check that does not hold.
        """
        ...

    def revision(self) -> int:
        """The revision of the newest transaction that changed something. Cheap enough to read in every poll."""
        ...

    def outline(self, but: Sequence[str]) -> Outline:
        """Outline the values whose keys begin with none of `but`.

        While the outline is the same, so are these values. A write has a revision that is newer than all, and deletions
        without a write leave fewer values. Values of ended leases count until they are deleted.
        """
        ...

    def grant(self, ttl_s: float, pid: int = 0) -> int:
        """Make a lease; its number is never reused. It ends `ttl_s` (may be infinite) after the last `keep_alive`.

        `pid` is the holder, if it is a process that this store may be able to see; 0: no process.
        """
        ...

    def keep_alive(self, lease: int) -> bool:
        """Restart the time of a lease, because its holder is alive. False when the lease has ended, permanently."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease, and delete its values. An ended lease is no error."""
        ...

    def expire(self) -> bool:
        """Delete the values of leases that have ended, at a new revision, so that watchers notice. True if any.

        Reads hide such values anyway, and every transaction that writes does this first.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


# --- in memory --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Lease:
    ttl_s: float
    pid: int
    ends_s: float


class MemoryStore:
    """Values in a dict under a lock. `clock` returns seconds; `alive` returns whether a process is still alive."""

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
        """Keys with a prefix, sorted. Computed again when the store has changed."""
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


# --- in a SQLite file -------------------------------------------------------------------------------------------------
SCHEMA_VERSION = 2
APPLICATION_ID = 0x454D4253  # "EMBS"

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS items (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
    lease INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s REAL NOT NULL, ends_s REAL NOT NULL,
    holder TEXT NOT NULL);
INSERT OR IGNORE INTO counter VALUES (1, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_COLUMNS = "key, value, revision, lease, crc"
_LAST_CHARACTER = "\U0010ffff"
_NOBODY = "-"
_IN_MEMORY = ":memory:"
_RESTORE = "restore it from a backup, or remove the cluster's folder to start with an empty one"
Row = tuple[str, bytes, int, int, int]
_REVISION = struct.Struct("<Q")
_WITNESS_BYTES = _REVISION.size + 4


def _crc(key: str, value: bytes, revision: int, lease: int) -> int:
    return crc32(value, crc32(f"{key}\0{revision}\0{lease}\0".encode()))


class SqliteStore:
    """Values in a SQLite file, shared by the processes of one host. Any thread may call.

    One connection writes, another one reads, each under its own lock. So a thread that reads never waits for a commit,
    or for a transaction of another process.

    With write-ahead logging, readers and a writer do not block each other, and a commit costs one sync. A transaction
    takes the write lock first, checks, and then writes. Commits are synced (`synchronous = FULL`): ceilings and seals
    rest on them after a power loss. Two kinds of commits are not synced: the time of a lease, since no lease outlives
    the machine's run, and a transaction whose writes are all volatile. The log is written in order, so the next synced
    commit includes them.

    `revision()` reads SQLite's own change counter (`data_version`: commits of connections other than the reading one;
    no table is read), and reads the table only when the counter has changed.

    SQLite detects broken pages, but not flipped bits in a value. So each row has a CRC32 of itself, which is checked at
    each read, and for all rows when the file is opened. SQLite also treats damage in its log as the end of the log. So
    a witness file beside the store has the newest revision, which detects a store that has lost its newest changes.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = self._read_lock = threading.Lock()
        self._seen_version = -1
        self._seen_revision = 0
        self._committing = 0
        self._synced = True
        self._witness: Witness | None = None
        with self._typed_errors():
            self._db = self._reader = self._connect()
        try:
            with self._typed_errors():
                self._prepare()
                if str(path) != _IN_MEMORY:  # a second connection would have its own store
                    self._reader, self._read_lock = self._connect(), threading.Lock()
        except EmbarcaderoError:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=STORE_BUSY_S, isolation_level=None, check_same_thread=False)

    def get(self, key: str) -> Item | None:
        with self._read_lock, self._typed_errors():
            row = self._reader.execute(f"SELECT {_COLUMNS} FROM items WHERE key = ?", (key,)).fetchone()
            return self._item(row) if row else None

    def list(self, prefix: str) -> Items:
        query = f"SELECT {_COLUMNS} FROM items WHERE key >= ? AND key < ? ORDER BY key"
        with self._read_lock, self._typed_errors():
            found = map(self._item, self._reader.execute(query, (prefix, prefix + _LAST_CHARACTER)).fetchall())
            return [item for item in found if item is not None]

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        how = self._without_sync() if writes and all(write.volatile for write in writes) else nullcontext()
        with self._lock, self._typed_errors(), how, self._transaction("BEGIN IMMEDIATE" if writes else "BEGIN"):
            if writes:
                self._end_leases()
            leases = {write.lease for write in writes if isinstance(write, Put)} - {NO_LEASE}
            done = all(self._holds(check) for check in checks) and all(map(self._lease_holds, leases))
            if done and writes:
                self._write(writes)
            return done

    def revision(self) -> int:
        with self._read_lock, self._typed_errors():
            version = self._reader.execute("PRAGMA data_version").fetchone()[0]
            if version != self._seen_version:
                # The counter is read after the version: it may be newer than this version, never older.
                self._seen_revision = self._read_counter(self._reader)
                self._seen_version = version
            return self._seen_revision

    def outline(self, but: Sequence[str]) -> Outline:
        wanted = " AND ".join("(key < ? OR key >= ?)" for _ in but) or "1"
        bounds = [bound for prefix in but for bound in (prefix, prefix + _LAST_CHARACTER)]
        with self._read_lock, self._typed_errors():
            query = f"SELECT count(*), coalesce(max(revision), 0) FROM items WHERE {wanted}"
            values, newest = self._reader.execute(query, bounds).fetchone()
            return Outline(int(values), int(newest))

    def grant(self, ttl_s: float, pid: int = 0) -> int:
        row = (ttl_s, self._clock() + ttl_s, process_mark(pid) if pid else _NOBODY)
        with self._lock, self._typed_errors(), self._transaction():
            made = self._db.execute("INSERT INTO leases (ttl_s, ends_s, holder) VALUES (?, ?, ?)", row)
            return int(made.lastrowid or NO_LEASE)

    def keep_alive(self, lease: int) -> bool:
        with self._lock, self._typed_errors(), self._without_sync(), self._transaction():
            if not self._lease_holds(lease):
                return False
            now_s = self._clock()
            self._db.execute("UPDATE leases SET ends_s = ? + ttl_s WHERE id = ?", (now_s, lease))
            return True

    def revoke(self, lease: int) -> None:
        with self._lock, self._typed_errors(), self._transaction():
            self._db.execute("UPDATE leases SET ends_s = -1 WHERE id = ?", (lease,))
            self._end_leases()

    def expire(self) -> bool:
        with self._read_lock, self._typed_errors():
            numbers = [row[0] for row in self._reader.execute("SELECT id FROM leases").fetchall()]
            if all(self._lease_holds(number, self._reader) for number in numbers):
                return False
        with self._lock, self._typed_errors(), self._transaction():
            return self._end_leases()

    def close(self) -> None:
        with self._read_lock:
            self._reader.close()
        with self._lock:
            self._db.close()
            if self._witness is not None:
                self._witness.close()
                self._witness = None

    # --- opening ------------------------------------------------------------------------------------------------------
    def _prepare(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        empty = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        self._db.execute("PRAGMA synchronous = FULL")
        if empty:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(_SCHEMA)
        elif application != APPLICATION_ID:
            raise Corrupt(f"{self._path} is a SQLite file, but not an Embarcadero store", "choose another folder")
        elif version not in (1, SCHEMA_VERSION):
            raise Corrupt(
                f"{self._path} has store version {version}, this program has {SCHEMA_VERSION}",
                "run the version that made it",
            )
        self._check_file()
        if version == 1 and not empty:
            self._upgrade()
        self._check_rows()
        self._check_witness()

    def _check_file(self) -> None:
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise Corrupt(f"the store {self._path} is damaged: {found}", _RESTORE)

    def _check_rows(self) -> None:
        newest = 0
        self._db.execute("SELECT id, ttl_s, ends_s, holder FROM leases LIMIT 1")
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM items").fetchall():
            self._checked(row)
            newest = max(newest, row[2])
        if self._read_counter(self._db) < newest:
            raise Corrupt(f"the store {self._path} is damaged: its revision is lower than that of a value", _RESTORE)

    def _check_witness(self) -> None:
        if str(self._path) == _IN_MEMORY:
            return
        path = self._path.with_name(f"{self._path.name}-revision")
        try:
            self._witness = Witness(path)
            noted = self._witness.read()  # before the counter, which may only be newer
        except OSError as error:
            raise DiskFailed(f"{path} can't be used: {error.strerror}", "check its folder and disk") from error
        if (revision := self._read_counter(self._db)) < noted:
            raise Corrupt(
                f"the store {self._path} has lost its newest changes: it has revision {revision} and had {noted}",
                f"restore it with its -wal file from a backup; if you restored an older store, remove {path}",
            )

    def _upgrade(self) -> None:
        """Upgrade a store of version 1, which has neither leases nor checksums. Only the first process does it."""
        with self._transaction():
            if self._db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
                return
            old = self._db.execute("SELECT key, value, revision FROM items").fetchall()
            self._db.execute("DROP TABLE items")
            for statement in _SCHEMA.split(";\n")[1:-2]:
                self._db.execute(statement)
            rows = [(key, value, at, NO_LEASE, _crc(key, value, at, NO_LEASE)) for key, value, at in old]
            self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)

    # --- rows ---------------------------------------------------------------------------------------------------------
    def _checked(self, row: Row) -> Row:
        key, value, revision, lease, crc = row
        if _crc(key, value, revision, lease) != crc:
            raise Corrupt(f"the store {self._path} is damaged: the value of {key!r} has another checksum", _RESTORE)
        return row

    def _item(self, row: Row) -> Item | None:
        key, value, revision, lease, _ = self._checked(row)
        return Item(key, value, revision) if lease == NO_LEASE or self._lease_holds(lease, self._reader) else None

    def _holds(self, check: Check) -> bool:
        row = self._db.execute("SELECT revision, lease FROM items WHERE key = ?", (check.key,)).fetchone()
        there = row is not None and (row[1] == NO_LEASE or self._lease_holds(row[1]))
        return bool((row[0] if there else ABSENT) == check.revision)

    def _write(self, writes: Sequence[Write]) -> None:
        revision = self._next_revision()
        for write in writes:
            if isinstance(write, Put):
                row = (write.key, write.value, revision, write.lease)
                self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", (*row, _crc(*row)))
            else:
                self._db.execute("DELETE FROM items WHERE key = ?", (write.key,))

    def _next_revision(self) -> int:
        self._seen_version = -1
        self._db.execute("UPDATE counter SET revision = revision + 1")
        self._committing = self._read_counter(self._db)
        return self._committing

    def _read_counter(self, db: sqlite3.Connection) -> int:
        row = db.execute("SELECT revision FROM counter").fetchone()
        if row is None or not isinstance(row[0], int):
            raise Corrupt(f"the store {self._path} is damaged: its revision is missing or not a number", _RESTORE)
        return row[0]

    # --- leases -------------------------------------------------------------------------------------------------------
    def _lease_holds(self, lease: int, db: sqlite3.Connection | None = None) -> bool:
        row = (db or self._db).execute("SELECT ends_s, holder FROM leases WHERE id = ?", (lease,)).fetchone()
        if row is None:
            return False
        ends_s, holder = row
        if not isinstance(ends_s, int | float) or not isinstance(holder, str):
            raise Corrupt(f"the store {self._path} is damaged: lease {lease} has no end or no holder", _RESTORE)
        return self._clock() < ends_s and (holder == _NOBODY or same_process(holder))

    def _end_leases(self) -> bool:
        numbers = [row[0] for row in self._db.execute("SELECT id FROM leases").fetchall()]
        ended = [(number,) for number in numbers if not self._lease_holds(number)]
        if not ended:
            return False
        self._db.executemany("DELETE FROM leases WHERE id = ?", ended)
        gone = self._db.executemany("DELETE FROM items WHERE lease = ?", ended).rowcount > 0
        if gone:
            self._next_revision()
        return gone

    # --- transactions -------------------------------------------------------------------------------------------------
    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        self._db.execute(begin)
        self._committing = 0
        try:
            yield
            self._db.execute("COMMIT")
            if self._committing and self._synced and self._witness is not None:
                self._witness.write(self._committing)  # all earlier commits are synced as well
        except BaseException:
            self._seen_version = -1
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        """Commit without waiting for the disk, for writes that a power loss may undo."""
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._synced = False
        try:
            yield
        finally:
            self._synced = True
            self._db.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._typed(error) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes bytes of the file
            raise Corrupt(f"the store {self._path} is damaged: {error}", _RESTORE) from error

    def _typed(self, error: sqlite3.Error) -> EmbarcaderoError:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # the primary code, without its extension
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            return Backpressure(f"the store {self._path} stayed locked for {STORE_BUSY_S} s", "try again")
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or "no such table" in str(error):
            return Corrupt(f"the store {self._path} is damaged: {error}", _RESTORE)
        if code == sqlite3.SQLITE_FULL:
            return DiskFull(f"the store {self._path} can't be written: its disk is full", "free space, then try again")
        if code == sqlite3.SQLITE_READONLY:
            hint = "make the file and its folder writable, or mount the disk for writing"
            return DiskFailed(f"the store {self._path} can't be written: it is read-only", hint)
        if code == sqlite3.SQLITE_IOERR:
            return DiskFailed(f"the store {self._path} can't be read or written: {error}", "check its disk")
        return ClusterError(f"the store {self._path} can't be used: {error}", "check its folder and disk")


# --- the witness ------------------------------------------------------------------------------------------------------
class Witness:
    """The newest revision of a store, in a small file beside it. Each commit writes it without waiting for the disk.

    A store with a log of its newest changes treats damage in the log as its end, and loses the later changes. Then
    ceilings would be lower than before, and positions would be handed out twice. The witness is written after each
    commit. It may be a little behind, but never ahead, so a store that is behind its witness has lost changes.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int:
        """Read the newest revision that was noted; 0 if there is none, or it is damaged."""
        record = os.pread(self._file, _WITNESS_BYTES, 0)
        number, check = record[: _REVISION.size], record[_REVISION.size :]
        right = len(record) == _WITNESS_BYTES and check == crc32(number).to_bytes(4, "little")
        return int(_REVISION.unpack(number)[0]) if right else 0

    def write(self, revision: int) -> None:
        """Note a committed revision. An error is ignored, because the commit is valid without the note."""
        number = _REVISION.pack(revision)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, number + crc32(number).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


# --- by URL -----------------------------------------------------------------------------------------------------------
_SQLITE: Final = "sqlite"
_MEMORY: Final = "memory"


def open_store(url: Path | str) -> Store:
    """Open the store of a URL: a path or `sqlite:///path` for a SQLite file, `memory:` for a store in this process.

    Raises BadValue for another scheme, and the store's error for a file that is damaged or cannot be opened.
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
