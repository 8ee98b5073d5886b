"""The clients against fake brokers on loopback, of a cluster with replicas: durable acks and reads, and restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.errors import BadValue, FuturePosition, RecordsLost, TimedOut
from embarcadero.types import GapKind, Position
from tests.client.fake_cluster import LANE
from tests.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(order=5, replicas=1) as server:
        yield server


@pytest.fixture
def log(server: FakeServer) -> Iterator[Any]:
    with emb.connect(server.addresses) as log:
        yield log


def until(condition: Callable[[], Any]) -> None:
    """Wait for something that happens in another thread."""
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.005)


def values(log: Any, **options: Any) -> list[bytes]:
    return log.read("t", **options).column("value").to_pylist()


def lose(server: FakeServer, publisher: Any, *sent: bytes) -> list[Position]:
    """Records that are acked with ack=1, and lost; returns once the publisher knows."""
    positions = [publisher.send(value).result(10) for value in sent]
    server.start_anew(end=positions[0].index)
    until(lambda: publisher.pump.intake._lost is not None)
    return positions


def test_an_ack_2_future_waits_for_the_disk(server: FakeServer, log: Any) -> None:
    """So do flush and close; its position is the same one as ever."""
    publisher = log.publisher("t", ack=2)
    future = publisher.send(b"x")
    with pytest.raises(TimedOut):
        publisher.flush(timeout=0.05)
    until(lambda: server.cluster.log)
    assert not future.done()
    server.do(server.cluster.make_durable)
    assert future.result(10) == Position(LANE, 0, 0)
    publisher.flush(10)
    server.cluster.at_once = True
    last = publisher.send(b"y")
    publisher.close()
    assert last.done()
    assert values(log) == [b"x", b"y"]


def test_reads_and_tails_know_both_ends(server: FakeServer, log: Any) -> None:
    """What is ordered and not durable is served only to who asks for it; beyond it is the future."""
    with log.publisher("t") as publisher:
        for n in range(4):
            publisher.send(b"%d" % n).result(10)
    server.do(lambda: server.cluster.make_durable(below=3))
    tail = log.tail("t")
    assert (tail.index, tail.seq, tail.durable_index, tail.durable_seq) == (4, 4, 3, 3)
    assert values(log, end=3) == [b"0", b"1", b"2"]
    assert values(log, read="ordered") == [b"0", b"1", b"2", b"3"]
    with pytest.raises(TimedOut, match="ordered"):
        log.read("t", timeout=2)  # enough for the questions before
    with pytest.raises(FuturePosition):
        log.read("t", 0, 5)
    with pytest.raises(BadValue):
        log.read("t", read="eager")
    with log.subscribe("t") as durable, log.subscribe("t", read="ordered") as ordered:
        assert [ordered.poll(10).index for _ in range(4)] == [0, 1, 2, 3]
        assert [durable.poll(10).index for _ in range(3)] == [0, 1, 2]
        assert durable.poll(0.05) is None
        reading = Thread(target=lambda: table.append(log.read("t")), daemon=True)
        table: list[Any] = []
        reading.start()
        server.do(server.cluster.make_durable)
        assert durable.poll(10).index == 3
        reading.join(20)
        assert table[0].num_rows == 4, "it waited for what was acked before"


def test_without_replicas_durable_is_ordered() -> None:
    """The default reads everything there, and the tail's ends are the same."""
    with FakeServer() as server, emb.connect(server.addresses) as log:
        with log.publisher("t") as publisher:
            publisher.send(b"x")
        tail = log.tail("t")
        assert (tail.durable_index, tail.durable_seq) == (tail.index, tail.seq) == (1, 1)
        assert values(log) == values(log, read="ordered") == [b"x"]


@pytest.mark.parametrize("call", ["send", "publish", "flush", "close"])
def test_a_loss_is_raised_by_the_next_call_once(server: FakeServer, log: Any, call: str) -> None:
    """It names the records and their positions; the publisher goes on."""
    publisher = log.publisher("t")
    publisher.send(b"kept").result(10)
    server.do(server.cluster.make_durable)
    positions = lose(server, publisher, b"lost 1", b"lost 2")
    calls: dict[str, Callable[[], Any]] = {
        "send": lambda: publisher.send(b"not taken"),
        "publish": lambda: publisher.publish([{"value": b"not taken"}]),
        "flush": publisher.flush,
        "close": publisher.close,
    }
    with pytest.raises(RecordsLost, match="2 records of 't'") as caught:
        calls[call]()
    assert caught.value.positions == tuple(positions)
    assert sum(caught.value.counts) == 2
    if call != "close":
        server.cluster.at_once = True
        after = publisher.send(b"after").result(10)
        assert after.index > positions[-1].index
        assert after.seq > positions[-1].seq
        publisher.close()
        assert values(log) == [b"kept", b"after"]


def test_a_loss_that_nobody_asked_for_is_raised_when_the_log_is_closed(server: FakeServer) -> None:
    """Whoever only ever sends hears of it at the end."""
    with pytest.raises(RecordsLost), emb.connect(server.addresses) as log:
        lose(server, log.publisher("t"), b"lost")


def test_many_sends_under_restarts_lose_only_what_is_told(server: FakeServer, log: Any) -> None:
    """A publisher that is never told to wait: each record is in the log once, or was reported."""
    server.cluster.at_once = True
    told: set[Position] = set()
    futures: dict[bytes, Any] = {}

    def calling(call: Callable[[], Any]) -> Any:
        """Call until it is done; what is lost is noted."""
        while True:
            try:
                return call()
            except RecordsLost as error:
                told.update(error.positions)

    with log.publisher("t", linger_ms=0, batch_bytes=100) as publisher:
        for n in range(600):
            if n % 150 == 149:
                calling(lambda: publisher.flush(20))
                server.start_anew(end=len(server.cluster.log) - 2)
            futures[b"%d" % n] = calling(partial(publisher.send, b"%d" % n))
        calling(lambda: publisher.flush(20))
    found = values(log)
    assert len(found) == len(set(found))
    lost = {(at.lane, at.index) for at in told}
    gone = {value for value, future in futures.items() if (future.result().lane, future.result().index) in lost}
    assert gone
    assert set(found) == futures.keys() - gone


def test_a_subscriber_goes_on_behind_a_lost_span(server: FakeServer, log: Any) -> None:
    """It is connected again by itself, gets a LOST gap, and then what came later. So does a bounded read."""
    server.cluster.at_once = True
    publisher = log.publisher("t")
    publisher.send(b"kept").result(10)
    subscriber = log.subscribe("t")
    assert subscriber.poll(10).count == 1
    server.cluster.at_once = False
    lose(server, publisher, b"lost")
    gap = subscriber.poll(10)
    assert (gap.gap.kind, gap.gap.start, gap.gap.stop) == (GapKind.LOST, 1, server.cluster.lost[0][1])
    assert values(log) == [b"kept"], "the log ends with what is lost"
    with pytest.raises(RecordsLost):
        publisher.flush()
    server.cluster.at_once = True
    publisher.send(b"after").result(10)
    batch = subscriber.poll(10)
    assert [record.value for record in batch] == [b"after"]
    assert values(log) == [b"kept", b"after"]
    assert log.read("t").column("_seq").to_pylist() == [0, batch.seq]
    assert values(log, start=batch.seq - 5) == [b"after"]
    assert log.read("t", 0, batch.seq - 1).num_rows == 1


def test_a_cluster_that_comes_back_elsewhere_is_found_where_its_brokers_ever_were() -> None:
    """The seed is gone for good; another broker that the client heard of is there again."""
    with FakeServer(brokers=2, replicas=1) as server, emb.connect(server.addresses[:1]) as log:
        until(lambda: len(log.brokers.live()) == 2)
        server.cluster.at_once = True
        publisher = log.publisher("t")
        publisher.send(b"0").result(10)
        second = server.cluster.addresses[1]
        server.tell_members([0])
        server.stop(1)
        until(lambda: len(log.brokers.live()) == 1)
        server.stop(0)
        server.do(server.cluster.start_anew)
        server.cluster.addresses = [second, second]  # broker 1 listens where it was
        server.start(1)
        publisher.send(b"1").result(20)
        publisher.close()
        assert values(log) == [b"0", b"1"]


def test_the_asyncio_client_does_the_same() -> None:
    """ack=2, both ends, RecordsLost from send, flush and close, LOST gaps."""

    async def body(server: FakeServer) -> None:
        async with await emb.aio.connect(server.addresses) as log:
            publisher = await log.publisher("t", ack=2)
            future = await publisher.send(b"0")
            with pytest.raises(TimedOut):
                await publisher.flush(0.05)
            assert not future.done()
            server.do(server.cluster.make_durable)
            assert await future == Position(LANE, 0, 0)
            await publisher.close()
            quick = await log.publisher("t")
            subscriber = await log.subscribe("t")
            assert (await subscriber.poll(10)).index == 0
            for raises in (quick.flush, lambda: quick.send(b"not taken"), quick.close):
                position = await (await quick.send(b"lost"))
                server.start_anew(end=position.index)
                await asyncio.to_thread(until, lambda: quick._pump.intake._lost is not None)
                with pytest.raises(RecordsLost) as caught:
                    await raises()
                assert caught.value.positions == (position,)
                gap = await subscriber.poll(10)
                assert gap.gap.kind is GapKind.LOST
            tail = await log.tail("t")
            assert tail.durable_index == tail.index == server.cluster.lost[-1][1]
            assert (await log.read("t")).column("value").to_pylist() == [b"0"]

    with FakeServer(order=5, replicas=1) as server:
        asyncio.run(asyncio.wait_for(body(server), 60))
