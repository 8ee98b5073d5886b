"""A store in one SQLite file, shared by the processes of one host.

Write-ahead logging lets readers and a writer go on side by side; a transaction takes the write lock first, checks, then
writes. `revision()` asks SQLite's own change counter (`data_version`: other connections' commits, no table is read) and
looks into the table only when that moved or this connection committed something.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from embarcadero.errors import Backpressure, ClusterError, Corrupt, EmbarcaderoError
from embarcadero.limits import STORE_BUSY_S
from embarcadero.placement.store import ABSENT, Check, Item, Items, Put, Write

SCHEMA_VERSION = 1
APPLICATION_ID = 0x454D4253  # "EMBS"

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS items (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counter (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
INSERT OR IGNORE INTO counter VALUES (1, 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_LAST_CHARACTER = "\U0010ffff"


class SqliteStore:
    """Values in a SQLite file. One connection, one lock: any thread may call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        with self._typed_errors():
            self._db = sqlite3.connect(path, timeout=STORE_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with self._typed_errors():
                self._prepare()
        except EmbarcaderoError:
            self._db.close()
            raise
        self._seen_version = -1
        self._seen_revision = 0

    def get(self, key: str) -> Item | None:
        with self._lock, self._typed_errors():
            row = self._db.execute("SELECT key, value, revision FROM items WHERE key = ?", (key,)).fetchone()
        return Item(*row) if row else None

    def list(self, prefix: str) -> Items:
        query = "SELECT key, value, revision FROM items WHERE key >= ? AND key < ? ORDER BY key"
        with self._lock, self._typed_errors():
            return [Item(*row) for row in self._db.execute(query, (prefix, prefix + _LAST_CHARACTER))]

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        with self._lock, self._typed_errors():
            self._db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                done = all(self._holds(check) for check in checks)
                if done and writes:
                    self._write(writes)
                self._db.execute("COMMIT" if done else "ROLLBACK")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        return done

    def revision(self) -> int:
        with self._lock, self._typed_errors():
            version = self._db.execute("PRAGMA data_version").fetchone()[0]
            if version != self._seen_version:
                # The counter is read after the version: it may be newer than the version says, never older.
                self._seen_revision = self._read_counter()
                self._seen_version = version
            return self._seen_revision

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _prepare(self) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        empty = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        self._db.execute("PRAGMA synchronous = NORMAL")
        if empty:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(_SCHEMA)
        elif application != APPLICATION_ID:
            raise Corrupt(f"{self._path} is a SQLite file, but not a store of Embarcadero", "choose another folder")
        elif version != SCHEMA_VERSION:
            raise Corrupt(
                f"{self._path} has store version {version}, this program has {SCHEMA_VERSION}",
                "run the version that made it",
            )

    def _holds(self, check: Check) -> bool:
        row = self._db.execute("SELECT revision FROM items WHERE key = ?", (check.key,)).fetchone()
        return bool((row[0] if row else ABSENT) == check.revision)

    def _write(self, writes: Sequence[Write]) -> None:
        self._db.execute("UPDATE counter SET revision = revision + 1")
        revision = self._read_counter()
        for write in writes:
            if isinstance(write, Put):
                self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", (write.key, write.value, revision))
            else:
                self._db.execute("DELETE FROM items WHERE key = ?", (write.key,))
        self._seen_version = -1

    def _read_counter(self) -> int:
        return int(self._db.execute("SELECT revision FROM counter").fetchone()[0])

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # the primary code, without its extension
            if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise Backpressure(f"the store {self._path} stayed locked for {STORE_BUSY_S} s", "try again") from error
            if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB} or "no such table" in str(error):
                hint = "restore it from a backup, or remove the cluster's folder to start with an empty one"
                raise Corrupt(f"the store {self._path} is damaged: {error}", hint) from error
            raise ClusterError(f"the store {self._path} can't be used: {error}", "check its folder and disk") from error
