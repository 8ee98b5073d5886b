"""The asyncio client against fake brokers on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client import brokers as brokers_module
from embarcadero.errors import (
    BadMagic,
    BadValue,
    BadVersion,
    Closed,
    FuturePosition,
    NotAvailable,
    TimedOut,
    TopicExists,
    Trimmed,
    UnknownTopic,
    Unreachable,
)
from embarcadero.types import GapKind, Position, Tail
from embarcadero.wire.codec import control_frame
from embarcadero.wire.messages import Failed, OpenSession, Welcome
from tests.client.fake_cluster import LANE
from tests.client.fake_server import FakeServer

Body = Callable[[FakeServer, Any], Awaitable[None]]


def run(body: Body, **options: Any) -> None:
    """Run a test's body with a connected client."""

    async def main(server: FakeServer) -> None:
        async with await emb.aio.connect(server.addresses) as log:
            await asyncio.wait_for(body(server, log), 30)

    with FakeServer(**options) as server:
        asyncio.run(main(server))


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that gives one fixed answer to any input, and closes its connections at the end."""
    transports: list[asyncio.Transport] = []

    class Answers(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            transports.append(self.transport)

        def data_received(self, data: bytes) -> None:
            self.transport.write(answer)
            self.transport.close()

    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for transport in transports:
            transport.close()
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    while not condition():  # noqa: ASYNC110 - there is no event across threads
        await asyncio.sleep(0.001)


def test_records_come_back_in_order() -> None:
    """Published records are read back, with keys, headers and positions."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t") as publisher:
            futures = [await publisher.send(b"%d" % n, key=b"k", headers={"h": b"v"}, timestamp=n) for n in range(10)]
            positions = [await future for future in futures]
        assert [position.seq for position in positions] == list(range(10))
        records = []
        async for batch in await log.subscribe("t"):
            records += batch.records()
            if len(records) == 10:
                break
        assert [(r.seq, r.value, r.key, r.headers) for r in records] == [
            (n, b"%d" % n, b"k", {"h": b"v"}) for n in range(10)
        ]

    run(body, order=5)


def test_topics_are_created_described_listed_and_deleted() -> None:
    """Every call about topics returns its answer or its typed error."""

    async def body(server: FakeServer, log: Any) -> None:
        assert (await log.create_topic("new", order=5, partitions=3)).partitions == 3
        with pytest.raises(TopicExists):
            await log.create_topic("new")
        assert (await log.describe("new")).order == 5
        assert {topic.name for topic in await log.topics()} == {"t", "new"}
        await log.delete_topic("new")
        for call in (log.describe, log.delete_topic, log.tail, log.publisher, log.subscribe, log.read):
            with pytest.raises(UnknownTopic):
                await call("new")
        assert sorted(facts["broker"] for facts in await log.status()) == [0, 1]

    run(body)


def test_unsupported_features_are_reported() -> None:
    """Groups are NotAvailable; an invalid value is BadValue, and so is ack=2 where records never become durable."""

    async def body(server: FakeServer, log: Any) -> None:
        with pytest.raises(NotAvailable):
            await log.subscribe("t", group="g")
        with pytest.raises(BadValue, match="create it with replicas="):
            await log.publisher("t", ack=2)
        for call in (log.publisher("t", ack=3), log.subscribe("t", read="x"), log.subscribe("t", start="middle")):
            with pytest.raises(BadValue):
                await call

    run(body)


def test_connect_names_every_address_that_was_tried() -> None:
    """No broker listens: Unreachable with the addresses; invalid addresses are refused before any attempt."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match=address):
            asyncio.run(emb.aio.connect([address]))
    for wrong in ("", "nonsense", "host:", "host:0", "host:99999", []):
        with pytest.raises(BadValue):
            asyncio.run(emb.aio.connect(wrong))


def test_a_server_of_another_kind_is_not_a_broker() -> None:
    """A server with another protocol leads to a typed error, not a hang."""

    async def main() -> None:
        async with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
            with pytest.raises(Unreachable, match=BadMagic.__name__ + "|starts with"):
                await emb.aio.connect(address)

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        control_frame(Failed(code="BadVersion", message="versions differ"), 0),
        control_frame(Welcome(version=99, cluster="c", broker=0, incarnation=1, brokers=[]), 1),
    ],
)
def test_a_broker_of_another_version_is_refused(answer: bytes) -> None:
    """If the broker refuses, or chooses a version that the client does not support: BadVersion, immediately."""

    async def main() -> None:
        async with answering(answer) as address:
            with pytest.raises(BadVersion):
                await emb.aio.connect(address)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_one_seed_is_enough_to_find_all_brokers() -> None:
    """The client connects to every member that the first broker names."""

    async def main(server: FakeServer) -> None:
        async with await emb.aio.connect(server.addresses[1]) as log:
            await until(lambda: len(log.brokers.live()) == 3)
            assert sorted(connection.broker for connection in log.brokers.live()) == [0, 1, 2]

    with FakeServer(brokers=3) as server:
        asyncio.run(asyncio.wait_for(main(server), 30))


def test_pushed_members_are_followed() -> None:
    """A broker that joins gets a connection without a request."""

    async def body(server: FakeServer, log: Any) -> None:
        await until(lambda: len(log.brokers.live()) == 1)
        server.tell_members([0, 1])
        await until(lambda: len(log.brokers.live()) == 2)

    with FakeServer(brokers=2) as server:
        server.cluster.addresses = server.cluster.addresses[:1]

        async def main() -> None:
            async with await emb.aio.connect(server.addresses[0]) as log:
                await body(server, log)

        asyncio.run(asyncio.wait_for(main(), 30))


def test_publishing_goes_on_over_broken_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections break repeatedly; every record is stored once, in order, without waiting for a timeout."""
    monkeypatch.setenv("EMBARCADERO_CLIENT_RESEND_AFTER_S", "1000s")

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t", linger_ms=0) as publisher:
            futures = []
            for n in range(60):
                futures.append(await publisher.send(b"%d" % n))
                if n % 10 == 5:
                    server.cut(n // 10 % 2)
                await asyncio.sleep(0)
            positions = [await future for future in futures]
        assert len(set(positions)) == 60
        table = await log.read("t")
        assert table.column("value").to_pylist() == [b"%d" % n for n in range(60)]

    run(body, order=5)


def test_a_broker_that_comes_back_is_used_again() -> None:
    """While it is away the other one serves; when it listens again it gets its connection back."""

    async def body(server: FakeServer, log: Any) -> None:
        await until(lambda: len(log.brokers.live()) == 2)
        server.stop(0)
        await until(lambda: [c.broker for c in log.brokers.live()] == [1])
        async with await log.publisher("t") as publisher:
            await (await publisher.send(b"x"))
        server.start(0)
        await until(lambda: len(log.brokers.live()) == 2)

    run(body)


def test_a_cluster_that_moved_is_found_through_the_first_address() -> None:
    """All known members are gone; only the address that the user gave still leads to a broker."""

    async def main(server: FakeServer, front: str) -> None:
        async with await emb.aio.connect(front) as log:
            server.stop(0)
            server.cluster.addresses = []
            server.cut()
            await until(lambda: not log.brokers.live())
            await until(lambda: len(log.brokers.live()) == 1)
            assert await log.tail("t") == Tail(LANE, 0, 0)

    with FakeServer(brokers=1) as server:
        asyncio.run(asyncio.wait_for(main(server, server.front(0)), 30))


def test_a_silent_cluster_times_out() -> None:
    """A request that gets no answer ends with TimedOut."""

    async def body(server: FakeServer, log: Any) -> None:
        server.deaf = True
        with pytest.raises(TimedOut):
            await log.topics(timeout=0.05)

    run(body)


def test_without_a_cluster_requests_end_unreachable() -> None:
    """All connections are gone and none comes back in time."""

    async def body(server: FakeServer, log: Any) -> None:
        server.stop(0)
        server.stop(1)
        await until(lambda: not log.brokers.live())
        with pytest.raises(Unreachable):
            await log.topics(timeout=0.05)

    run(body)


def test_closing_without_a_cluster_ends_with_unknown_outcomes() -> None:
    """Records that were sent and not answered end with OutcomeUnknown; closing does not hang."""

    async def body(server: FakeServer, log: Any) -> None:
        publisher = await log.publisher("t", linger_ms=0)
        await (await publisher.send(b"stored"))
        server.deaf = True
        future = await publisher.send(b"lost")
        with pytest.raises(TimedOut):
            await publisher.close(timeout=0.05)
        with pytest.raises(emb.OutcomeUnknown):
            await future
        with pytest.raises(Closed):
            await publisher.send(b"after")

    run(body)


def test_a_full_window_makes_senders_wait() -> None:
    """Without credit nothing is sent; a sender with a time limit gets Backpressure, one without gets its turn."""

    async def body(server: FakeServer, log: Any) -> None:
        publisher = await log.publisher("t", window_bytes=1000, linger_ms=0)
        first = await publisher.send(b"x" * 2000)
        with pytest.raises(emb.errors.Backpressure):
            await publisher.send(b"y", timeout=0.01)
        waiting = asyncio.ensure_future(publisher.send(b"z"))
        await asyncio.sleep(0)
        assert not waiting.done()
        server.do(lambda: [s.far.grant(10_000) for s in server.sockets])
        assert (await first).seq == 0
        assert (await (await waiting)).seq == 1
        await publisher.close()

    run(body, credit=0)


def test_seeking_and_positions() -> None:
    """A subscriber seeks, and reports its position; a position beyond the end is a typed error."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t", linger_ms=0) as publisher:
            for n in range(5):
                await (await publisher.send(b"%d" % n))
        async with await log.subscribe("t", start=2) as subscriber:
            assert (await subscriber.poll()).records()[0].value == b"2"
            assert subscriber.position() == 3
            subscriber.seek(index=1)
            assert (await subscriber.poll()).index == 1
            subscriber.seek("earliest")
            assert (await subscriber.poll()).index == 0
            subscriber.seek("latest")
            assert await subscriber.poll(timeout=0.05) is None
            while subscriber.position() is None:  # the position is not known yet
                assert await subscriber.poll(timeout=0.05) is None
            assert subscriber.position() == 5
            subscriber.seek(seq=77)
            with pytest.raises(FuturePosition):
                await subscriber.poll()
            for wrong in ({}, {"seq": 1, "index": 1}, {"where": "middle"}, {"seq": -1}):
                with pytest.raises(BadValue):
                    subscriber.seek(**wrong)
        with pytest.raises(Closed):
            await subscriber.poll()

    run(body)


def test_reading_a_span_gives_exactly_its_records() -> None:
    """`read` cuts batches at the span's ends, adds `_seq`, and refuses positions that do not exist."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t") as publisher:
            for first in (0, 4, 8):
                await publisher.publish(pa.table({"value": [b"%d" % n for n in range(first, first + 4)]}))
                await publisher.flush()
        table = await log.read("t", 2, 9)
        assert table.column("_seq").to_pylist() == list(range(2, 9))
        assert table.column("value").to_pylist() == [b"%d" % n for n in range(2, 9)]
        assert (await log.read("t", 3, 3)).num_rows == 0
        with pytest.raises(FuturePosition):
            await log.read("t", 0, 13)
        with pytest.raises(BadValue):
            await log.read("t", 5, 4)
        server.cluster.start_index = 1
        with pytest.raises(Trimmed, match="before seq 4"):
            await log.read("t", 0, 9)
        assert (await log.read("t")).column("_seq").to_pylist() == list(range(4, 12))

    run(body)


def test_gaps_reach_the_reader() -> None:
    """A trimmed span is one batch with a gap and no records."""

    async def body(server: FakeServer, log: Any) -> None:
        for n in range(3):
            server.do(lambda n=n: server.cluster.put(b"%d" % n))
        server.cluster.start_index = 2
        async with await log.subscribe("t", start=0) as subscriber:
            gap = (await subscriber.poll()).gap
            assert (gap.kind, gap.start, gap.stop) == (GapKind.TRIMMED, 0, 2)
            assert (await subscriber.poll()).index == 2

    run(body)


def test_a_batch_names_the_broker_that_took_it() -> None:
    """Region handles of entries become broker numbers where the cluster published them."""

    async def body(server: FakeServer, log: Any) -> None:
        server.do(lambda: server.cluster.put(b"x"))
        server.cluster.origin = 11
        async with await log.subscribe("t") as subscriber:
            assert (await subscriber.poll()).broker == 1

    run(body)


def test_fenced_sessions_are_continued_transparently() -> None:
    """A fence in the middle changes nothing for the caller."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t", linger_ms=0) as publisher:
            assert await (await publisher.send(b"a")) == Position(LANE, 0, 0)
            server.do(server.cluster.fence_all)
            assert await (await publisher.send(b"b")) == Position(LANE, 1, 1)

    run(body, order=5)


def test_a_taken_over_session_name_fails_the_publisher() -> None:
    """Its next record fails with SessionFenced, and so does closing it."""

    async def body(server: FakeServer, log: Any) -> None:
        publisher = await log.publisher("t", session="me", linger_ms=0)
        with pytest.raises(emb.errors.BadValue, match="forms batches by time"):
            await publisher.send(b"mine")
        await (await publisher.publish([{"value": b"mine"}]))
        server.do(lambda: server.cluster.open(OpenSession(topic="t", name="me")))
        with pytest.raises(emb.errors.SessionFenced):
            await (await publisher.publish([{"value": b"late"}]))
        with pytest.raises(emb.errors.SessionFenced):
            await publisher.close()

    run(body, order=5)


def test_two_publishers_share_connections_and_stay_independent() -> None:
    """Each gets its own outcomes."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t") as one, await log.publisher("t") as two:
            first = [await one.send(b"1") for _ in range(20)]
            second = [await two.send(b"2") for _ in range(20)]
            found = [await f for f in first] + [await f for f in second]
        assert sorted(position.seq for position in found) == list(range(40))
        assert len(server.cluster.connections) == 2

    run(body)


def test_cancelling_a_wait_does_not_take_the_record_back() -> None:
    """The record is stored although its future is no longer awaited."""

    async def body(server: FakeServer, log: Any) -> None:
        async with await log.publisher("t") as publisher:
            future = await publisher.send(b"x")
            waiter = asyncio.ensure_future(asyncio.wait_for(future, 0))
            with pytest.raises(TimeoutError):
                await waiter
            assert await future == Position(LANE, 0, 0)

    run(body)


def test_closing_the_log_closes_its_publishers() -> None:
    """Records in the linger buffer are stored before the connections close."""

    async def main(server: FakeServer) -> None:
        log = await emb.aio.connect(server.addresses)
        publisher = await log.publisher("t", linger_ms=10_000)
        future = await publisher.send(b"late")
        await log.close()
        assert (await future).seq == 0
        with pytest.raises(Closed):
            await publisher.send(b"after")

    with FakeServer() as server:
        asyncio.run(asyncio.wait_for(main(server), 30))


def test_pauses_between_attempts_are_bounded() -> None:
    """A broker that is away is tried at least once a second."""
    assert brokers_module._PAUSE_FIRST_S <= brokers_module._PAUSE_LAST_S <= 1.0
