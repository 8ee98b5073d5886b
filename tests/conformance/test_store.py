"""What every store promises to the directory, in memory and in a file."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import ClusterError, Corrupt
from embarcadero.placement.embedded import SqliteStore
from embarcadero.placement.memory import MemoryStore
from embarcadero.placement.store import ABSENT, NO_LEASE, Check, Delete, Item, Put, Store


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "store.db")
    yield made
    made.close()


@pytest.fixture(params=["memory", "sqlite"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Two users of one store: the same object in memory, two connections to a file."""
    if request.param == "memory":
        memory = MemoryStore()
        yield memory, memory
        return
    first, second = SqliteStore(tmp_path / "store.db"), SqliteStore(tmp_path / "store.db")
    yield first, second
    first.close()
    second.close()


def put(store: Store, key: str, value: bytes) -> None:
    assert store.transact([], [Put(key, value)])


def revision_of(store: Store, key: str) -> int:
    item = store.get(key)
    return item.revision if item else ABSENT


def increment(store: Store, key: str) -> None:
    """Add one to a number, optimistically."""
    while True:
        item = store.get(key)
        number, revision = (int(item.value), item.revision) if item else (0, ABSENT)
        if store.transact([Check(key, revision)], [Put(key, b"%d" % (number + 1))]):
            return


def test_absent_key_has_no_item(store: Store) -> None:
    """A key never written, or deleted, has no item."""
    put(store, "a", b"1")
    assert store.transact([], [Delete("a")])
    assert (store.get("a"), store.get("never")) == (None, None)


def test_value_comes_back_with_its_revision(store: Store) -> None:
    """A value is read back as written, any bytes, with the store's revision at its write."""
    put(store, "a", bytes(range(256)))
    assert store.get("a") == Item("a", bytes(range(256)), store.revision())


def test_all_writes_of_a_transaction_share_one_revision(store: Store) -> None:
    """A transaction is one revision, however much it writes."""
    before = store.revision()
    assert store.transact([], [Put("a", b""), Put("b", b""), Delete("c")])
    assert revision_of(store, "a") == revision_of(store, "b") == store.revision() == before + 1


def test_a_failed_check_changes_nothing(store: Store) -> None:
    """One check that does not hold keeps all writes away, and the revision where it was."""
    put(store, "a", b"old")
    before = store.revision()
    assert not store.transact([Check("a", before), Check("b", before)], [Put("a", b"new"), Put("b", b"new")])
    assert (store.get("a"), store.get("b"), store.revision()) == (Item("a", b"old", before), None, before)


def test_absent_is_a_check(store: Store) -> None:
    """ABSENT holds for a key without a value, and only then."""
    assert store.transact([Check("a", ABSENT)], [Put("a", b"first")])
    assert not store.transact([Check("a", ABSENT)], [Put("a", b"second")])
    assert store.transact([Check("a", revision_of(store, "a"))], [Delete("a")])
    assert store.transact([Check("a", ABSENT)], [])


def test_rewriting_the_same_value_is_a_change(store: Store) -> None:
    """A key that was written again fails an old check, even with the same bytes."""
    put(store, "a", b"same")
    old = revision_of(store, "a")
    put(store, "a", b"same")
    assert not store.transact([Check("a", old)], [Put("a", b"other")])


def test_a_key_that_came_back_has_another_revision(store: Store) -> None:
    """Delete and put again is not the same as nothing happened."""
    put(store, "a", b"x")
    old = revision_of(store, "a")
    assert store.transact([], [Delete("a")])
    put(store, "a", b"x")
    assert revision_of(store, "a") > old


def test_a_transaction_without_writes_keeps_the_revision(store: Store) -> None:
    """Only checking changes nothing."""
    put(store, "a", b"")
    before = store.revision()
    assert store.transact([Check("a", before)], [])
    assert store.revision() == before


def test_list_takes_a_prefix_in_key_order(store: Store) -> None:
    """Only keys under the prefix are listed, sorted; wildcards and neighbours are plain text."""
    for key in ("t/b", "t/a", "t", "t0", "s/a", "t/%", "t/_", "t/é", "t/\U0001f600"):
        put(store, key, key.encode())
    listed = store.list("t/")
    assert [item.key for item in listed] == ["t/%", "t/_", "t/a", "t/b", "t/é", "t/\U0001f600"]
    assert all(item.value == item.key.encode() for item in listed)
    assert len(store.list("")) == 9
    assert store.list("nothing/") == []


def test_others_see_a_change_at_once(pair: tuple[Store, Store]) -> None:
    """After transact returned, every user of the store sees the value and the grown revision."""
    first, second = pair
    assert second.revision() == first.revision() == 0
    for round_number in range(5):
        put(first, "a", b"%d" % round_number)
        assert (second.revision(), second.get("a")) == (first.revision(), first.get("a"))
        put(second, "b", b"%d" % round_number)
        assert (first.revision(), first.get("b")) == (second.revision(), second.get("b"))


def test_concurrent_increments_lose_nothing(pair: tuple[Store, Store]) -> None:
    """Optimistic increments from several threads and users add up."""
    threads = [
        threading.Thread(target=lambda s=user: [increment(s, "n") for _ in range(50)]) for user in (*pair, *pair)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    item = pair[0].get("n")
    assert item is not None
    assert item.value == b"200"


def test_only_one_of_many_wins_a_key(pair: tuple[Store, Store]) -> None:
    """Of concurrent transactions that all want an absent key, exactly one happens."""
    won: list[bool] = []
    start = threading.Barrier(6)

    def try_it(user: Store, name: bytes) -> None:
        start.wait()
        won.append(user.transact([Check("leader", ABSENT)], [Put("leader", name)]))

    threads = [threading.Thread(target=try_it, args=(pair[n % 2], b"%d" % n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 5 + [True]


KEYS = st.sampled_from(["a", "a/b", "b", "b/c", "c"])
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(KEYS, st.integers(0, 6)), max_size=2),
        st.lists(
            st.one_of(st.builds(Put, KEYS, st.binary(max_size=3), st.just(NO_LEASE)), st.builds(Delete, KEYS)),
            max_size=3,
        ),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS)
def test_both_stores_agree(steps: list[tuple[list[tuple[str, int]], list[Put | Delete]]]) -> None:
    """Any series of transactions gives the same answers, items and revisions in memory and in SQLite."""
    memory, sqlite = MemoryStore(), SqliteStore(Path(":memory:"))
    try:
        for checks, writes in steps:
            conditions = [Check(*check) for check in checks]
            assert memory.transact(conditions, writes) == sqlite.transact(conditions, writes)
            assert (memory.list(""), memory.revision()) == (sqlite.list(""), sqlite.revision())
    finally:
        sqlite.close()


# --- only for files ---------------------------------------------------------------------------------------------------


def test_a_file_keeps_its_values(tmp_path: Path) -> None:
    """What was committed is there after closing and opening again, and revisions go on growing."""
    first = SqliteStore(tmp_path / "store.db")
    put(first, "a", b"kept")
    item, revision = first.get("a"), first.revision()
    first.close()
    second = SqliteStore(tmp_path / "store.db")
    assert (second.get("a"), second.revision()) == (item, revision)
    put(second, "b", b"new")
    assert second.revision() > revision
    second.close()


INCREMENTER = """
import sys
from pathlib import Path
from embarcadero.placement.embedded import SqliteStore
from embarcadero.placement.store import ABSENT, Check, Put
store = SqliteStore(Path(sys.argv[1]))
for _ in range(100):
    while True:
        item = store.get("n")
        number, revision = (int(item.value), item.revision) if item else (0, ABSENT)
        if store.transact([Check("n", revision)], [Put("n", b"%d" % (number + 1))]):
            break
store.close()
"""


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    """Increments from two processes add up, and a third user sees every revision."""
    path = tmp_path / "store.db"
    watcher = SqliteStore(path)
    workers = [subprocess.Popen([sys.executable, "-c", INCREMENTER, str(path)]) for _ in range(2)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    item = watcher.get("n")
    assert item == Item("n", b"200", 200)
    assert watcher.revision() == 200
    watcher.close()


def _garbage(path: Path) -> None:
    path.write_bytes(b"this is no database " * 500)


def _overwritten_pages(path: Path) -> None:
    store = SqliteStore(path)
    for number in range(200):
        put(store, f"key/{number:04}", b"v" * 100)
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE diary (page TEXT)")
    db.close()


def _newer(path: Path) -> None:
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


@pytest.mark.parametrize("damage", [_garbage, _overwritten_pages, _foreign, _newer])
def test_a_damaged_file_is_a_typed_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A file that is no store, a damaged one, a foreign one and a newer one are refused with a hint."""
    path = tmp_path / "store.db"
    damage(path)

    def use() -> None:
        store = SqliteStore(path)
        try:
            store.list("")
            put(store, "a", b"")
        finally:
            store.close()

    with pytest.raises(Corrupt) as error:
        use()
    assert str(path) in error.value.message
    assert error.value.hint


def test_a_folder_that_is_missing_is_a_typed_error(tmp_path: Path) -> None:
    """A store in a folder that does not exist can't be opened, and the error names it."""
    with pytest.raises(ClusterError, match="missing"):
        SqliteStore(tmp_path / "missing" / "store.db")
