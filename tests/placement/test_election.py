"""Elections, in every store: one permanent winner; standbys exist as long as their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.errors import BadValue
from embarcadero.limits import CANDIDATES_MAX
from embarcadero.liveness import process_mark
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore, SqliteStore, Store


@pytest.fixture(params=["memory", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Store]]:
    """Four users of one store."""
    if request.param == "memory":
        yield [MemoryStore()] * 4
        return
    made = [SqliteStore(tmp_path / "store.db") for _ in range(4)]
    yield [*made]
    for store in made:
        store.close()


def test_one_wins_each_election(stores: list[Store]) -> None:
    """Many standbys that saw the same epoch ask in parallel, again and again: every epoch has one winner."""
    directories = [Directory(store) for store in stores]
    won: list[list[int]] = [[] for _ in directories]
    together = threading.Barrier(len(directories), timeout=30)

    def stand(number: int) -> None:
        for epoch in range(1, 11):
            together.wait()
            if directories[number].elections.elect(number, f"boot/{number}/1", over=epoch - 1) is not None:
                won[number].append(epoch)
                directories[number].elections.start_epoch(epoch, {})

    threads = [threading.Thread(target=stand, args=(number,)) for number in range(len(directories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(epoch for epochs in won for epoch in epochs) == list(range(1, 11))
    reign = directories[0].elections.leadership()
    assert reign is not None
    assert 10 in won[reign.candidate]


def test_a_deposed_winner_starts_nothing(stores: list[Store]) -> None:
    """Only the newest winner may start its epoch."""
    one, two = (Directory(store) for store in stores[:2])
    assert one.elections.elect(0, "boot/1/1", over=0) == 1
    assert two.elections.elect(1, "boot/2/1", over=1) == 2
    assert not one.elections.start_epoch(1, {})
    assert two.elections.start_epoch(2, {})
    assert one.elections.started_epoch() == 2


def test_standbys_exist_until_they_leave(stores: list[Store]) -> None:
    """Withdrawn standbys are gone; a reused number names the newer process; others are out of range."""
    one, two = (Directory(store) for store in stores[:2])
    one.elections.register(0, "boot/10/1", 0)
    two.elections.register(1, "boot/11/1", 0)
    assert [(found.candidate, found.pid) for found in one.elections.candidates()] == [(0, 10), (1, 11)]
    two.elections.withdraw()
    two.elections.withdraw()
    assert [found.candidate for found in one.elections.candidates()] == [0]
    two.elections.register(0, "boot/12/1", 0)
    assert [(found.candidate, found.pid) for found in one.elections.candidates()] == [(0, 12)]
    with pytest.raises(BadValue):
        one.elections.register(CANDIDATES_MAX, "boot/13/1", 0)


def test_a_killed_standby_is_gone_immediately(tmp_path: Path) -> None:
    """A store that can see processes does not wait."""
    store = SqliteStore(tmp_path / "store.db")
    directory = Directory(store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        directory.elections.register(1, process_mark(process.pid), process.pid)
        assert [found.pid for found in directory.elections.candidates()] == [process.pid]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert directory.elections.candidates() == []
    store.close()


def test_volatile_changes_are_visible_immediately_and_synced_with_the_next_transaction(tmp_path: Path) -> None:
    """A takeover waits for no disk: the witness of synced changes moves with the next transaction that syncs."""
    first, second = SqliteStore(tmp_path / "store.db"), SqliteStore(tmp_path / "store.db")
    one, two = Directory(first), Directory(second)
    witness = tmp_path / "store.db-revision"
    before = witness.read_bytes()
    assert one.elections.elect(0, "boot/1/1", over=0) == 1
    assert two.elections.newest_epochs().handed_out == 1
    assert witness.read_bytes() == before
    two.topics.create("t")
    assert witness.read_bytes() != before
    first.close()
    second.close()


def test_elections_do_not_change_the_outline(stores: list[Store]) -> None:
    """A process that follows the outline does not read everything again during a takeover, only when topics change."""
    directory = Directory(stores[0])
    directory.topics.create("t", order=5)
    before, revision = directory.outline(), directory.revision()
    directory.elections.register(1, "boot/1/1", os.getpid())
    directory.elections.ask_hand_over(1, 0)
    assert directory.elections.elect(1, "boot/1/1", over=0) == 1
    assert directory.elections.start_epoch(1, {0: 5})
    directory.elections.withdraw()

    assert directory.revision() > revision
    assert directory.outline() == before
    directory.topics.create("u", order=5)
    assert directory.outline() != before
