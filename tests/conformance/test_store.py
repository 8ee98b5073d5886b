"""The promises of every store to the directory, in memory and in a file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import Backpressure, ClusterError, Corrupt, DiskFailed, DiskFull
from embarcadero.liveness import process_mark, same_process
from embarcadero.placement.store import ABSENT, NO_LEASE, Check, Delete, Item, MemoryStore, Put, SqliteStore, Store


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
        with suppress(Backpressure):  # a slow disk, and others were always faster
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
    """Delete and put again differs from no change at all."""
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
    """Only keys under the prefix are listed, sorted; wildcards and neighbors are plain text."""
    for key in ("t/b", "t/a", "t", "t0", "s/a", "t/%", "t/_", "t/é", "t/\U0001f600"):
        put(store, key, key.encode())
    listed = store.list("t/")
    assert [item.key for item in listed] == ["t/%", "t/_", "t/a", "t/b", "t/é", "t/\U0001f600"]
    assert all(item.value == item.key.encode() for item in listed)
    assert len(store.list("")) == 9
    assert store.list("nothing/") == []


def test_an_outline_changes_with_the_values_that_it_covers(store: Store) -> None:
    """Writing, rewriting and deleting change it; values below an excluded prefix do not."""
    for key in ("a/1", "a/2", "b", "ba", "c"):
        put(store, key, b"1")
    seen = [store.outline(("a/", "b"))]
    for writes in ([Put("c", b"1")], [Put("d", b"1")], [Delete("d")], [Delete("c"), Put("e", b"1")], [Delete("e")]):
        put(store, "a/1", b"2")
        assert store.transact([], [Delete("a/2"), Put("ba", b"2")])
        assert store.outline(("a/", "b")) == seen[-1]
        assert store.transact([], writes)
        seen.append(store.outline(("a/", "b")))
        assert seen[-1] != seen[-2]

    assert seen[-1] == (0, 0)
    assert store.outline(()) == (3, store.revision() - 1)


def test_others_see_a_change_immediately(pair: tuple[Store, Store]) -> None:
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


def test_only_one_transaction_wins_a_key(pair: tuple[Store, Store]) -> None:
    """Of concurrent transactions that all require an absent key, exactly one commits."""
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


# --- leases -----------------------------------------------------------------------------------------------------------


class Times:
    """A clock that stands still until a test advances it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["memory", "sqlite"])
def timed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Times]]:
    """A store of each kind with the test's clock."""
    times = Times()
    made: Store = MemoryStore(times) if request.param == "memory" else SqliteStore(tmp_path / "store.db", times)
    yield made, times
    made.close()


def test_a_value_exists_as_long_as_its_lease(timed: tuple[Store, Times]) -> None:
    """Up to its time, and longer with every renewal; afterwards no user sees it in any way."""
    store, times = timed
    lease = store.grant(10.0)
    assert store.transact([], [Put("a", b"mine", lease), Put("b", b"stays")])
    times.now_s += 9.9
    assert store.keep_alive(lease)
    times.now_s += 9.9
    assert store.get("a") == Item("a", b"mine", 1)
    times.now_s += 0.1
    assert store.get("a") is None
    assert [item.key for item in store.list("")] == ["b"]
    assert store.transact([Check("a", ABSENT)], [])
    assert not store.transact([Check("a", 1)], [])


def test_an_ended_lease_does_not_come_back(timed: tuple[Store, Times]) -> None:
    """Neither by a late renewal nor by a write under it, which does not happen at all."""
    store, times = timed
    lease = store.grant(10.0)
    assert store.transact([], [Put("a", b"mine", lease)])
    times.now_s += 10.0
    assert not store.keep_alive(lease)
    assert not store.transact([], [Put("a", b"again", lease), Put("b", b"too")])
    assert not store.transact([], [Put("a", b"again", lease + 1)])
    assert store.list("") == []
    times.now_s -= 5.0
    assert not store.keep_alive(lease)


def test_watchers_notice_expired_leases(timed: tuple[Store, Times]) -> None:
    """The revision moves with `expire`, once, and with the next transaction; never without reason."""
    store, times = timed
    first, second, idle = store.grant(10.0), store.grant(20.0), store.grant(15.0)
    assert store.transact([], [Put("a", b"", first), Put("b", b"", first), Put("c", b"", second)])
    assert not store.expire()
    times.now_s += 10.0
    before = store.revision()
    assert store.expire()
    assert store.revision() == before + 1
    assert not store.expire()
    times.now_s += 5.0
    assert not store.keep_alive(idle)
    assert not store.expire()
    times.now_s += 5.0
    assert store.transact([], [Put("d", b"")])
    assert store.revision() == before + 3
    assert [item.key for item in store.list("")] == ["d"]


def test_a_revoked_lease_removes_its_values(timed: tuple[Store, Times]) -> None:
    """And only its own; a lease that expired or never existed may be revoked."""
    store, _ = timed
    first, second = store.grant(10.0), store.grant(float("inf"))
    assert store.transact([], [Put("a", b"", first), Put("b", b"", second)])
    before = store.revision()
    store.revoke(first)
    store.revoke(first)
    store.revoke(99)
    assert [item.key for item in store.list("")] == ["b"]
    assert store.revision() == before + 1


def test_a_value_belongs_to_the_lease_of_its_last_write(timed: tuple[Store, Times]) -> None:
    """Written again without a lease it stays; written under another it expires with that one."""
    store, times = timed
    short, long = store.grant(1.0), store.grant(100.0)
    assert store.transact([], [Put("a", b"", short), Put("b", b"", short), Put("c", b"", short)])
    assert store.transact([], [Put("a", b""), Put("b", b"", long), Delete("c")])
    assert store.transact([Check("c", ABSENT)], [Put("c", b"")])
    times.now_s += 1.0
    store.expire()
    assert [item.key for item in store.list("")] == ["a", "b", "c"]
    times.now_s += 100.0
    assert [item.key for item in store.list("")] == ["a", "c"]


def test_numbers_of_leases_are_never_reused(timed: tuple[Store, Times]) -> None:
    """Also when the newest lease is gone."""
    store, _ = timed
    numbers = []
    for _ in range(4):
        numbers.append(store.grant(1.0))
        store.revoke(numbers[-1])
    assert len({*numbers, NO_LEASE}) == 5


def test_renewals_are_no_change(timed: tuple[Store, Times]) -> None:
    """They are frequent, and must not wake any watcher."""
    store, _ = timed
    lease = store.grant(1.0)
    put(store, "a", b"")
    before = store.revision()
    assert all(store.keep_alive(lease) for _ in range(3))
    assert store.revision() == before


def test_all_users_see_the_same_leases(pair: tuple[Store, Store]) -> None:
    """A lease belongs to the store, not to the connection."""
    first, second = pair
    lease = first.grant(60.0)
    assert second.transact([], [Put("a", b"", lease)])
    assert second.keep_alive(lease)
    second.revoke(lease)
    assert (first.get("a"), first.keep_alive(lease)) == (None, False)


def test_a_lease_ends_with_its_process() -> None:
    """In memory, the simulator decides which processes live."""
    alive = {7}
    store = MemoryStore(alive=alive.__contains__)
    lease, other = store.grant(float("inf"), 7), store.grant(float("inf"))
    assert store.transact([], [Put("a", b"", lease), Put("b", b"", other)])
    alive.clear()
    assert [item.key for item in store.list("")] == ["b"]
    alive.add(7)
    assert store.get("a") is not None  # not noticed yet
    alive.clear()
    assert store.expire()
    alive.add(7)
    assert not store.keep_alive(lease)


def test_a_lease_in_a_file_ends_with_its_process(tmp_path: Path) -> None:
    """However long its time; a process of the same number that started at another time is another process."""
    store = SqliteStore(tmp_path / "store.db")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        lease, mine = store.grant(float("inf"), process.pid), store.grant(float("inf"), os.getpid())
        assert store.transact([], [Put("a", b"", lease), Put("b", b"", mine)])
        assert store.get("a") is not None
        assert same_process(process_mark(process.pid))
        assert not same_process(process_mark(process.pid) + "0")
        process.kill()
        process.wait()
        assert store.get("a") is None
        assert not store.keep_alive(lease)
        assert store.expire()
        assert [item.key for item in store.list("")] == ["b"]
        assert not store.transact([], [Put("c", b"", store.grant(60.0, process.pid))])
    store.close()


KEYS = st.sampled_from(["a", "a/b", "b", "b/c", "c"])
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(KEYS, st.integers(0, 6)), max_size=2),
        st.lists(
            st.one_of(st.builds(Put, KEYS, st.binary(max_size=3), st.integers(0, 3)), st.builds(Delete, KEYS)),
            max_size=3,
        ),
        st.integers(0, 4),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(steps=STEPS)
def test_both_stores_agree(steps: list[tuple[list[tuple[str, int]], list[Put | Delete], int]]) -> None:
    """Any series of transactions and leases gives the same answers, items and revisions in memory and in SQLite."""
    times = Times()
    times.now_s = 0.0
    stores: list[Store] = [MemoryStore(times), SqliteStore(Path(":memory:"), times)]
    try:
        for checks, writes, lease in steps:
            times.now_s += 1.0
            one, two = ([
                store.transact([Check(*check) for check in checks], writes), store.list(""), store.revision(),
                store.keep_alive(lease), store.grant(float(lease)), store.expire(), store.revision(), store.list(""),
            ] for store in stores)  # fmt: skip
            assert one == two
    finally:
        for store in stores:
            store.close()


# --- only for files ---------------------------------------------------------------------------------------------------


def test_a_file_keeps_its_values(tmp_path: Path) -> None:
    """Committed values are there after closing and reopening, and revisions keep growing."""
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
from embarcadero.errors import Backpressure
from embarcadero.placement.store import SqliteStore
from embarcadero.placement.store import ABSENT, Check, Put
store = SqliteStore(Path(sys.argv[1]))
for _ in range(100):
    while True:
        item = store.get("n")
        number, revision = (int(item.value), item.revision) if item else (0, ABSENT)
        try:
            if store.transact([Check("n", revision)], [Put("n", b"%d" % (number + 1))]):
                break
        except Backpressure:  # a slow disk, and the other one was always faster
            continue
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


def _changed(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        store = SqliteStore(path)
        put(store, "key", b"value")
        store.close()
        db = sqlite3.connect(path)
        db.execute(statement)
        db.commit()
        db.close()

    return damage


def _flipped_bit(path: Path) -> None:
    store = SqliteStore(path)
    put(store, "ceiling", b"position 4096")
    store.close()
    content = path.read_bytes()
    assert content.count(b"position 4096") == 1
    path.write_bytes(content.replace(b"position 4096", b"position 0096"))


def _newer(path: Path) -> None:
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


DAMAGES = [
    _garbage, _overwritten_pages, _foreign, _newer, _flipped_bit,
    _changed("UPDATE items SET revision = 0"), _changed("UPDATE items SET lease = 1"),
    _changed("UPDATE items SET key = 'yek'"), _changed("UPDATE counter SET revision = 0"),
    _changed("DELETE FROM counter"), _changed("DROP TABLE leases"),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_typed_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A file that is no store, a damaged one, a foreign one and a newer one are refused immediately, with a hint."""
    path = tmp_path / "store.db"
    damage(path)
    with pytest.raises(Corrupt) as error:
        SqliteStore(path)
    assert str(path) in error.value.message
    assert error.value.hint


def test_a_folder_that_is_missing_is_a_typed_error(tmp_path: Path) -> None:
    """A store in a folder that does not exist can't be opened, and the error names it."""
    with pytest.raises(ClusterError, match="missing"):
        SqliteStore(tmp_path / "missing" / "store.db")


def test_damage_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    """A value that was changed under an open store is not served."""
    store = SqliteStore(tmp_path / "store.db")
    put(store, "a", b"right")
    db = sqlite3.connect(tmp_path / "store.db")
    db.execute("UPDATE items SET value = ?", (b"wrong",))
    db.commit()
    db.close()
    for read in (lambda: store.get("a"), lambda: store.list("")):
        with pytest.raises(Corrupt, match="'a' has another checksum"):
            read()
    store.close()


def test_an_invalid_lease_or_counter_is_damage(tmp_path: Path) -> None:
    """SQLite accepts any content in a column; the reader gets a typed error."""
    store = SqliteStore(tmp_path / "store.db")
    assert store.transact([], [Put("a", b"held", store.grant(60))])
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
        db.execute("UPDATE leases SET ends_s = 'never'")
        for use in (lambda: store.get("a"), store.expire, lambda: store.transact([], [Put("b", b"")])):
            with pytest.raises(Corrupt, match="lease 1 has no end"):
                use()
        db.execute("UPDATE leases SET ends_s = -1, holder = x'00'")
        with pytest.raises(Corrupt, match="no holder"):
            store.get("a")
        db.execute("DELETE FROM leases")
        db.execute("UPDATE counter SET revision = 'many'")
        with pytest.raises(Corrupt, match="not a number"):
            store.revision()
    store.close()
    with pytest.raises(Corrupt, match="not a number"):
        SqliteStore(tmp_path / "store.db")


def test_committed_changes_are_synced(tmp_path: Path) -> None:
    """After a loss of power ceilings and seals are still there; renewals need not be synced, and are not."""
    store = SqliteStore(tmp_path / "store.db")

    def mode() -> int:
        return int(store._db.execute("PRAGMA synchronous").fetchone()[0])

    full = 2
    assert mode() == full
    store.keep_alive(store.grant(60.0))
    assert mode() == full
    assert store._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    store.close()


def test_a_full_disk_is_a_typed_error_and_changes_nothing(tmp_path: Path) -> None:
    """The transaction did not happen; existing values can be read, and with free space writes work again."""
    store = SqliteStore(tmp_path / "store.db")
    put(store, "a", b"old")
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    before = store.revision()
    with pytest.raises(DiskFull, match="free space"):
        put(store, "a", bytes(1 << 20))
    assert (store.get("a"), store.revision()) == (Item("a", b"old", before), before)
    store._db.execute("PRAGMA max_page_count = 1000000")
    put(store, "a", bytes(1 << 20))
    assert store.revision() == before + 1
    store.close()


def test_a_read_only_store_is_a_typed_error(tmp_path: Path) -> None:
    """It can be read, and a write reports the reason for its failure."""
    store = SqliteStore(tmp_path / "store.db")
    put(store, "a", b"old")
    store._db.execute("PRAGMA query_only = 1")
    with pytest.raises(DiskFailed, match="read-only"):
        put(store, "a", b"new")
    assert store.get("a") is not None
    store.close()


def test_a_locked_store_is_a_typed_error(tmp_path: Path) -> None:
    """A transaction that does not end makes others give up, with the advice to try again."""
    store = SqliteStore(tmp_path / "store.db")
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._db.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(Backpressure, match="locked"):
        put(store, "a", b"")
    other.execute("ROLLBACK")
    put(store, "a", b"")
    other.close()
    store.close()


def test_a_store_of_the_previous_version_is_upgraded(tmp_path: Path) -> None:
    """Its values and revisions stay, whichever process opens it first."""
    path = tmp_path / "store.db"
    db = sqlite3.connect(path)
    db.executescript("""
        PRAGMA journal_mode = WAL;
        CREATE TABLE items (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
        CREATE TABLE counter (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
        INSERT INTO counter VALUES (1, 7);
        INSERT INTO items VALUES ('a', x'6b657074', 3);
        PRAGMA application_id = 0x454D4253;
        PRAGMA user_version = 1;
    """)
    db.close()
    for _ in range(2):
        store = SqliteStore(path)
        assert (store.list(""), store.revision()) == ([Item("a", b"kept", 3)], 7)
        store.close()
    store = SqliteStore(path)
    assert store.transact([], [Put("b", b"", store.grant(60.0))])
    assert store.revision() == 8
    store.close()


def _flip_in_log(path: Path) -> None:
    log = path.with_name("store.db-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)


def _no_log(path: Path) -> None:
    path.with_name("store.db-wal").unlink()


@pytest.mark.parametrize("damage", [_flip_in_log, _no_log])
def test_a_store_that_has_lost_its_newest_changes_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """SQLite takes a damaged log for a shorter one, and ceilings would be lower than before."""
    store, killed = SqliteStore(tmp_path / "store.db"), tmp_path / "killed"
    for number in range(10):
        put(store, "ceiling", b"%d" % number)
    killed.mkdir()
    for file in tmp_path.glob("store.db*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, killed)
    store.close()
    whole = SqliteStore(shutil.copytree(killed, tmp_path / "whole") / "store.db")
    assert whole.get("ceiling") == Item("ceiling", b"9", 10)
    whole.close()
    damage(killed / "store.db")
    with pytest.raises(Corrupt, match=r"lost its newest changes|no such table|damaged"):
        SqliteStore(killed / "store.db")


def test_an_invalid_or_late_witness_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """It may be behind after a loss of power; the store itself counts."""
    path, witness = tmp_path / "store.db", tmp_path / "store.db-revision"
    for content in (None, b"", b"nonsense", bytes(12)):
        store = SqliteStore(path)
        put(store, "a", b"")
        store.close()
        assert len(witness.read_bytes()) == 12
        if content is None:
            witness.unlink()
        else:
            witness.write_bytes(content)
    SqliteStore(path).close()
