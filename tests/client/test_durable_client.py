"""The clients against fake brokers on loopback, of a cluster with replicas: durable acks and reads, and restarts."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.errors import (
    Backpressure,
    BadValue,
    EmbarcaderoError,
    FuturePosition,
    LossUnknown,
    ManyErrors,
    RecordsLost,
    SessionFenced,
    TimedOut,
)
from embarcadero.types import Gap, GapKind, Position
from embarcadero.wire.codec import full_frame
from embarcadero.wire.messages import OpenSession
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
    """Records that are ordered but not durable are served only on request; positions beyond them are in the future."""
    with log.publisher("t") as publisher:
        for n in range(4):
            publisher.send(b"%d" % n).result(10)
    server.do(lambda: server.cluster.make_durable(below=3))
    tail = log.tail("t")
    assert (tail.index, tail.seq, tail.durable_index, tail.durable_seq) == (4, 4, 3, 3)
    assert values(log, end=3) == [b"0", b"1", b"2"]
    assert values(log, read="ordered") == [b"0", b"1", b"2", b"3"]
    with pytest.raises(TimedOut, match="ordered"):
        log.read("t", timeout=2)  # enough for the earlier requests
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
        assert table[0].num_rows == 4, "it waited for records acked before"


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
    """It names the records and their positions; the publisher continues."""
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


def test_an_unclaimed_loss_is_raised_when_the_log_is_closed(server: FakeServer) -> None:
    """A program that only sends learns of it at the end."""
    with pytest.raises(RecordsLost), emb.connect(server.addresses) as log:
        lose(server, log.publisher("t"), b"lost")


def test_many_sends_under_restarts_lose_only_reported_records(server: FakeServer, log: Any) -> None:
    """A publisher that never waits: each record is in the log once, or was reported."""
    server.cluster.at_once = True
    told: set[Position] = set()
    futures: dict[bytes, Any] = {}

    def calling(call: Callable[[], Any]) -> Any:
        """Call until it succeeds; record the losses."""
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


def test_a_subscriber_continues_after_a_lost_span(server: FakeServer, log: Any) -> None:
    """It reconnects by itself, gets a LOST gap, and then the later records. So does a bounded read."""
    server.cluster.at_once = True
    publisher = log.publisher("t")
    publisher.send(b"kept").result(10)
    subscriber = log.subscribe("t")
    assert subscriber.poll(10).count == 1
    server.cluster.at_once = False
    lose(server, publisher, b"lost")
    gap = subscriber.poll(10)
    assert (gap.gap.kind, gap.gap.start, gap.gap.stop) == (GapKind.LOST, 1, server.cluster.lost[0][1])
    assert values(log) == [b"kept"], "the log ends with the lost records"
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


def test_a_scan_clips_a_lost_gap_to_its_span(server: FakeServer, log: Any) -> None:
    """A gap starts where records are lost, possibly before the span: only the part inside the span is delivered."""
    publisher = log.publisher("t")
    lose(server, publisher, b"0", b"1", b"2", b"3")
    with pytest.raises(RecordsLost):
        publisher.flush()
    assert [batch.gap for batches in log.scan("t", start=2, stop=3) for batch in batches] == [Gap(GapKind.LOST, 2, 3)]


def test_a_cluster_that_comes_back_is_found_at_any_known_broker_address() -> None:
    """The seed is gone permanently; another broker that the client knew is there again."""
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


# --- what an end reports ----------------------------------------------------------------------------------------------
def fence(server: FakeServer, name: str) -> None:
    server.do(lambda: server.cluster.open(OpenSession(topic="t", name=name)))


def lose_two_and_fence_one(server: FakeServer, first: Any, second: Any) -> None:
    """`first` and `second` have one acked record each: both are lost, and another process has the name of the first."""
    server.start_anew(end=0)
    fence(server, "job")
    until(lambda: first.intake._lost is not None and second.intake._lost is not None)
    until(lambda: first.driver.core.failed is not None)


def check_merged(lost: RecordsLost) -> None:
    assert sorted(position.index for position in lost.positions) == [0, 1]
    assert isinstance(lost.__cause__, SessionFenced)


def test_closing_a_log_reports_the_losses_of_all_publishers_and_every_failure(server: FakeServer) -> None:
    """One RecordsLost names all; other failures are its cause."""
    log = emb.connect(server.addresses)
    first, second = log.publisher("t", session="job"), log.publisher("t")
    first.publish([{"value": b"a"}]).result(10)
    second.send(b"b").result(10)
    lose_two_and_fence_one(server, first.pump, second.pump)
    with pytest.raises(RecordsLost) as caught:
        log.close()
    check_merged(caught.value)


def test_closing_an_asyncio_log_does_the_same(server: FakeServer) -> None:
    """It used to report nothing."""

    async def body() -> None:
        log = await emb.aio.connect(server.addresses)
        first, second = await log.publisher("t", session="job"), await log.publisher("t")
        await (await first.publish([{"value": b"a"}]))
        await (await second.send(b"b"))
        await asyncio.to_thread(lose_two_and_fence_one, server, first._pump, second._pump)
        with pytest.raises(RecordsLost) as caught:
            await log.close()
        check_merged(caught.value)

    asyncio.run(body())


def test_an_asyncio_close_that_was_cancelled_is_reported_by_the_log(server: FakeServer) -> None:
    """The caller's own time limit ended it, so it raised nothing: the log forgot the publisher, and its losses."""

    async def body() -> None:
        log = await emb.aio.connect(server.addresses)
        publisher = await log.publisher("t", session="job")
        position = await (await publisher.publish([{"value": b"a"}]))
        server.deaf = True
        with pytest.raises(TimeoutError) as cancelled:
            async with asyncio.timeout(0.2):
                await publisher.close()
        assert not isinstance(cancelled.value, EmbarcaderoError)
        with pytest.raises(LossUnknown) as caught:
            await log.close()
        assert caught.value.positions == (position,)

    asyncio.run(body())


def broken(*_: Any) -> Any:
    raise RuntimeError("broken")


def check_both(error: RecordsLost) -> None:
    """The loss, and the other failure as its cause."""
    assert [position.index for position in error.positions] == [0]
    assert isinstance(error.__cause__, EmbarcaderoError)
    assert "broken" in error.__cause__.message
    assert isinstance(error.__cause__.__cause__, RuntimeError)


def test_a_subscriber_that_fails_to_close_hides_no_loss(server: FakeServer) -> None:
    """Its error used to be raised instead of the RecordsLost, before any publisher was closed."""
    log = emb.connect(server.addresses)
    lose(server, log.publisher("t"), b"a")
    log.subscribe("t")._close = broken  # type: ignore[method-assign]
    with pytest.raises(RecordsLost) as caught:
        log.close()
    check_both(caught.value)


def test_an_asyncio_subscriber_that_fails_to_close_hides_no_loss(server: FakeServer) -> None:
    """The same there."""

    async def body() -> None:
        log = await emb.aio.connect(server.addresses)
        publisher = await log.publisher("t")
        await (await publisher.send(b"a"))
        server.start_anew(end=0)
        await asyncio.to_thread(until, lambda: publisher._pump.intake._lost is not None)

        async def close(_: float | None) -> None:
            broken()

        (await log.subscribe("t")).close = close
        with pytest.raises(RecordsLost) as caught:
            await log.close()
        check_both(caught.value)

    asyncio.run(body())


def test_failures_of_several_publishers_are_all_raised(server: FakeServer) -> None:
    """ManyErrors is an EmbarcaderoError and an ExceptionGroup."""
    server.cluster.at_once = True
    log = emb.connect(server.addresses)
    for name in ("one", "two"):
        publisher = log.publisher("t", session=name)
        publisher.publish([{"value": b"x"}]).result(10)
        fence(server, name)
        assert isinstance(publisher.publish([{"value": b"late"}]).exception(10), SessionFenced)
    with pytest.raises(ManyErrors, match="taken over") as caught:
        log.close()
    assert [type(error) for error in caught.value.exceptions] == [SessionFenced, SessionFenced]
    assert isinstance(caught.value, EmbarcaderoError)
    assert pickle.loads(pickle.dumps(caught.value)).exceptions[0].message == caught.value.exceptions[0].message


def test_the_fenced_holder_of_a_name_gets_its_losses_and_the_fence(server: FakeServer, log: Any) -> None:
    """close() raises both."""
    publisher = log.publisher("t", session="job")
    publisher.publish([{"value": b"a"}]).result(10)
    server.do(lambda: server.cluster.start_anew(end=0))
    fence(server, "job")
    server.cut()
    until(lambda: publisher.pump.driver.core.failed is not None)
    with pytest.raises(RecordsLost) as caught:
        publisher.close()
    assert [position.index for position in caught.value.positions] == [0]
    assert isinstance(caught.value.__cause__, SessionFenced)


def test_closing_a_named_publisher_while_the_cluster_is_down_reports_the_unknown_positions(
    server: FakeServer, log: Any
) -> None:
    """It waits as long as allowed; it used to return immediately."""
    publisher = log.publisher("t", session="job")
    positions = [publisher.publish([{"value": b"%d" % n}]).result(10) for n in range(3)]
    server.deaf = True
    with pytest.raises(LossUnknown, match="3 records of 't'") as caught:
        publisher.close(timeout=0.2)
    assert caught.value.positions == tuple(positions)
    assert caught.value.counts == (1, 1, 1)


def test_numbers_of_a_named_session_are_correct_after_a_loss(server: FakeServer, log: Any) -> None:
    """The publisher ends, next_session_seq() refuses to guess, and a new publisher continues at the first lost one."""
    publisher = log.publisher("t", session="job")
    for number in range(3):
        publisher.publish([{"value": b"%d" % number}], session_seq=number).result(10)
    server.start_anew(end=1)
    until(lambda: publisher.pump.driver.core.failed is not None)
    with pytest.raises(SessionFenced, match="continues at 1"):
        publisher.next_session_seq()
    with pytest.raises(RecordsLost):
        publisher.close()
    server.cluster.at_once = True
    with log.publisher("t", session="job") as again:
        done = again.next_session_seq()
        assert done == 1
        for number in range(done, 3):
            again.publish([{"value": b"%d" % number}], session_seq=number)
    assert values(log) == [b"0", b"1", b"2"]


# --- back-pressure ----------------------------------------------------------------------------------------------------
def say_full(server: FakeServer) -> None:
    """All brokers report that the disk of replica 1 is full."""

    def say() -> None:
        for socket in server.sockets:
            socket.far._say(full_frame(LANE, 1, 1))

    server.do(say)


def test_send_raises_backpressure_with_the_cause_until_there_is_space(server: FakeServer, log: Any) -> None:
    """Nothing is lost: records accepted before are stored, refused records are not."""
    publisher = log.publisher("t", ack=2, linger_ms=0)
    first = publisher.send(b"first")
    until(lambda: server.cluster.log)
    say_full(server)
    until(lambda: publisher.pump.intake.pressure is not None)
    for call in (lambda: publisher.send(b"x"), lambda: publisher.publish([{"value": b"x"}])):
        with pytest.raises(Backpressure, match=r"replica 1: disk full.*free some space"):
            call()
    with pytest.raises(Backpressure, match="disk full"):
        publisher.send(b"x", timeout=0.05)
    server.cluster.at_once = True
    server.do(server.cluster.make_durable)
    assert first.result(10) == Position(LANE, 0, 0)
    publisher.send(b"second").result(10)
    publisher.close()
    assert values(log) == [b"first", b"second"]


def test_asyncio_callers_get_backpressure_too(server: FakeServer) -> None:
    """A call with a time limit waits that long for space."""

    async def body() -> None:
        async with await emb.aio.connect(server.addresses) as log:
            publisher = await log.publisher("t", ack=2, linger_ms=0)
            first = await publisher.send(b"first")
            await asyncio.to_thread(until, lambda: server.cluster.log)
            await asyncio.to_thread(say_full, server)
            await asyncio.to_thread(until, lambda: publisher._pump.intake.pressure is not None)
            with pytest.raises(Backpressure, match="replica 1: disk full"):
                await publisher.send(b"x")
            patient = asyncio.ensure_future(publisher.send(b"second", timeout=20))
            server.cluster.at_once = True
            await asyncio.to_thread(server.do, server.cluster.make_durable)
            assert (await first).index == 0
            assert (await (await patient)).index == 1
            await publisher.close()

    asyncio.run(body())
