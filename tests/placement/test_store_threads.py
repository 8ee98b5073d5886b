"""A SQLite store that several threads of one process use."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

from embarcadero.placement.store import Item, Put, SqliteStore


def put(store: SqliteStore, key: str, value: bytes) -> None:
    """Write one value."""
    assert store.transact((), [Put(key, value)])


def test_reads_do_not_wait_for_a_commit_of_another_thread(tmp_path: Path) -> None:
    """While one thread waits for another process's transaction, others read; they see the commit once it is made."""
    store = SqliteStore(tmp_path / "store.db")
    put(store, "a", b"old")
    revision = store.revision()
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer = threading.Thread(target=put, args=(store, "a", b"new"))
    writer.start()
    while not store._lock.locked():
        time.sleep(0.001)
    assert (store.get("a"), store.list(""), store.revision()) == (
        Item("a", b"old", revision), [Item("a", b"old", revision)], revision,
    )  # fmt: skip
    assert store.outline(()) == (1, revision)
    assert not store.expire()
    assert writer.is_alive()
    other.execute("ROLLBACK")
    writer.join()
    assert (store.get("a"), store.revision()) == (Item("a", b"new", revision + 1), revision + 1)
    other.close()
    store.close()


def test_threads_read_whole_commits_while_others_write(tmp_path: Path) -> None:
    """Any thread may call: no read fails, none goes back, and each sees what was committed before it."""
    store = SqliteStore(tmp_path / "store.db")
    problems: list[str] = []

    def write(key: str) -> None:
        for number in range(50):
            put(store, key, b"%d" % number)
            if (found := store.get(key)) is None or found.value != b"%d" % number:
                problems.append(f"{key} is {found} after {number} was committed")

    def read() -> None:
        before = 0
        while writers_left():
            revision = store.revision()
            newest = max((item.revision for item in store.list("")), default=0)
            if not before <= revision <= newest:
                problems.append(f"revision {before}, then {revision}, and {newest} in the items")
            before = revision

    writers = [threading.Thread(target=write, args=(key,)) for key in "ab"]
    readers = [threading.Thread(target=read) for _ in range(2)]

    def writers_left() -> bool:
        return any(thread.is_alive() for thread in writers)

    for thread in [*writers, *readers]:
        thread.start()
    for thread in [*writers, *readers]:
        thread.join()
    assert problems == []
    store.close()
