"""Jobs that read files: few at once, fair over clients, and nothing left of clients that are gone."""

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


def test_few_files_are_read_at_once_and_clients_take_turns(tmp_path: Path) -> None:
    """A client with many fetches does not keep another one waiting; publishing needs no file at all."""
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


def test_a_client_that_goes_leaves_no_jobs_behind(tmp_path: Path) -> None:
    """What it waited for is dropped; what runs is told to nobody."""
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


def test_a_client_that_goes_before_its_next_span_is_read_gives_back_what_was_reserved_for_that(tmp_path: Path) -> None:
    """It had asked for a span that was to be read ahead, and others had their turn first."""
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
    """Nobody waits for ever, and the bug is seen: it rises where drivers log it."""

    def fails(*_: Any) -> None:
        raise ArithmeticError("nobody has thought of this")

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
    assert (failed.code, "nobody has thought" in failed.message) == ("Corrupt", True)
    assert world.brokers[1].fetches_waiting == world.brokers[1].readers.disks.running == 0


def test_a_store_that_fails_while_a_file_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is gone, and whether it was trimmed nobody knows now: the client asks again, and does not wait for it."""

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


def test_a_reader_of_files_that_is_let_go_is_in_nobody_elses_hands(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is about to take it while another finds that too many are kept: one of them gets it."""
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
