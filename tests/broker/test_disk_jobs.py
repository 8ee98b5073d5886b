"""Jobs that read files: few at a time, fair over clients, and none remain after their client disconnects."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from embarcadero.broker import disk_reads
from embarcadero.broker.disk_reads import Segments
from embarcadero.errors import Backpressure
from embarcadero.limits import WARM_JOBS_MAX
from embarcadero.storage.reading import RangeReader
from embarcadero.wire import messages as m
from tests.broker.disks import DiskWorld, Later, fill, payload, texts
from tests.broker.harness import Client


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    return DiskWorld(tmp_path)


def test_few_files_are_read_at_a_time_and_clients_take_turns(tmp_path: Path) -> None:
    """A client with many fetches does not delay another one; publishing needs no file at all."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    writer = fill(world, range_, 100)
    greedy, modest = Client(world.brokers[1]), Client(world.brokers[1])
    many = [greedy.ask(m.Fetch(lane=range_.lane, start=i, max_bytes=1_000)) for i in range(20)]
    one = modest.ask(m.Fetch(lane=range_.lane, start=50, max_bytes=1_000))
    world.run(2, greedy, modest)
    assert later.most == WARM_JOBS_MAX
    for _ in range(4):
        later.step()
    world.run(1, greedy, modest)
    assert one in modest.fetched
    assert sum(request in greedy.fetched for request in many) < 5
    assert world.brokers[1].status()["warm_jobs"] > 10
    writer.acks.clear()
    world.publish(writer, m.Opened(lane=range_.lane, session=1, index=0, expected=0, low=0), 100, 5)
    assert len(writer.acks) == 5
    while later.jobs:
        later.step()
        world.run(1)
    world.run(2, greedy)
    assert [texts(greedy.fetched[request]) for request in many] == [[payload(i, 1_500)] for i in range(20)]


def test_a_client_that_disconnects_leaves_no_jobs_behind(tmp_path: Path) -> None:
    """Its waiting jobs are dropped; the results of running ones are ignored."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client = Client(world.brokers[1])
    for index in range(10):
        client.ask(m.Fetch(lane=range_.lane, start=index, max_bytes=1_000))
    client.connection.closed()
    while later.jobs:
        later.step()
    disk = world.brokers[1].readers.disks
    assert (disk.running, disk.waiting, disk._ahead_bytes) == (0, 0, 0)
    assert world.brokers[1].fetches_waiting == 0


def test_a_client_that_disconnects_before_its_read_ahead_releases_the_reservation(tmp_path: Path) -> None:
    """It asked for a span whose read-ahead was still waiting, because other clients had their turn first."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client, others, disk = Client(world.brokers[1]), Client(world.brokers[1]), world.brokers[1].readers.disks
    client.ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1_000))
    for index in range(10):
        others.ask(m.Fetch(lane=range_.lane, start=index, max_bytes=1_000))
    later.step()
    assert disk._ahead_bytes == world.brokers[1].unread.most(1_000) > 1_500
    client.ask(m.Fetch(lane=range_.lane, start=1, max_bytes=1_000))
    assert disk.ahead_used == 1
    client.connection.closed()
    others.connection.closed()
    while later.jobs:
        later.step()
    assert (disk.running, disk.waiting, disk._ahead_bytes) == (0, 0, 0)


@pytest.mark.parametrize("call", ["fetch", "first"])
def test_a_read_that_fails_in_an_unknown_way_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The client gets an answer, and the bug is visible: the error is raised where drivers log it."""

    def fails(*_: Any) -> None:
        raise ArithmeticError("an unexpected error")

    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client = Client(world.brokers[1])
    ask = {"fetch": m.Fetch(lane=range_.lane, start=0, max_bytes=1_000), "first": m.GetTail(lane=range_.lane)}[call]
    with monkeypatch.context() as patch:
        patch.setattr(Segments, call, fails)
        request = client.ask(ask)
        with pytest.raises(ArithmeticError):
            later.step()
    world.run(2, client)
    failed = client.answers[request]
    assert isinstance(failed, m.Failed)
    assert (failed.code, "an unexpected error" in failed.message) == ("Corrupt", True)
    assert world.brokers[1].fetches_waiting == world.brokers[1].readers.disks.running == 0


def test_a_store_that_fails_while_a_file_is_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is missing, and the store can't confirm a trim: the client gets a retriable error, without waiting."""

    def locked() -> int:
        raise Backpressure("the store is locked", "try again")

    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    for replica in world.replicas:
        for file in replica.folder.rglob("*.log"):
            file.unlink()
    client = Client(world.brokers[1])
    request = client.ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1_000, wait_ms=10_000))
    with monkeypatch.context() as patch:
        patch.setattr(world.directory, "revision", locked)
        later.step()
    client.pump()
    assert client.answers[request] == m.Failed(code="Backpressure", message="the store is locked", hint="try again")


def test_a_closed_reader_of_files_is_never_in_use_by_another_worker(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is about to borrow it while another closes surplus readers: exactly one of them gets it."""
    taking, closed = Event(), list[RangeReader]()

    class Shelf(list[RangeReader]):
        def pop(self, _at: Any = -1) -> RangeReader:
            taking.set()
            sleep(0.05)
            return super().pop()

    range_ = world.topic()
    first, second, _ = range_.replicas
    copies = world.brokers[1].readers.disks.copies
    monkeypatch.setattr(RangeReader, "close", lambda files: closed.append(files))  # noqa: PLW0108 - to be bound
    kept, other = copies.borrow(range_, first), copies.borrow(range_, second)
    copies.give_back(range_, first, kept, good=True)
    copies._idle = {key: Shelf(files) for key, files in copies._idle.items()}
    monkeypatch.setattr(disk_reads, "WARM_READERS_MAX", 0)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(copies.borrow, range_, first)
        assert taking.wait(10)
        copies.give_back(range_, second, other, good=True)
        assert taken.result(10) not in closed
    assert (taken.result() is kept) != (kept in closed)
