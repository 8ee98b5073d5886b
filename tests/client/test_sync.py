"""The synchronous client against fake brokers on loopback."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import (
    Backpressure,
    BadValue,
    Closed,
    NotAvailable,
    OutcomeUnknown,
    SessionFenced,
    TimedOut,
    Unreachable,
)
from embarcadero.limits import RECORD_BYTES_MAX
from embarcadero.types import Position
from embarcadero.wire.messages import OpenSession
from embarcadero.wire.partitioners import CRC32C, partition_of
from embarcadero.wire.schemas import RAW_SCHEMA
from tests.client.fake_cluster import LANE
from tests.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(order=5) as server:
        yield server


@pytest.fixture
def log(server: FakeServer) -> Iterator[Any]:
    with emb.connect(server.addresses) as log:
        yield log


def values(log: Any) -> list[bytes]:
    return log.read("t").column("value").to_pylist()


def test_send_gives_a_future_of_the_records_position(log: Any) -> None:
    """Each record of a batch has its own position, and reads back as it was sent."""
    when = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    with log.publisher("t", linger_ms=10_000) as publisher:
        futures = [publisher.send(b"v%d" % n, key=b"k", headers={"a": b"b"}, timestamp=when) for n in range(3)]
        publisher.flush(10)
        assert [future.result(10) for future in futures] == [Position(LANE, 0, n) for n in range(3)]
        assert futures[0].done()
        assert futures[0].exception() is None
    batch = log.subscribe("t").poll(10)
    stamp = 1714979289_123456
    assert batch.records() == [emb.Record(n, b"k", b"v%d" % n, {"a": b"b"}, stamp) for n in range(3)]
    assert batch.records()[0].timestamp == when
    assert [batch.seq_of(n) for n in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError):
        batch.seq_of(3)


def test_records_of_many_threads_are_all_stored_each_threads_in_order(server: FakeServer, log: Any) -> None:
    """A publisher may be shared; the order of each thread's records is kept."""
    with log.publisher("t", batch_bytes=2000, linger_ms=1) as publisher:

        def work(name: int) -> None:
            for n in range(300):
                publisher.send(b"%d:%d" % (name, n))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        publisher.flush(10)
    found = [tuple(map(int, value.split(b":"))) for value in values(log)]
    assert len(found) == 1200
    for name in range(4):
        assert [n for who, n in found if who == name] == list(range(300))
    assert len(server.cluster.log) > 5


def test_publish_takes_arrow(log: Any) -> None:
    """A RecordBatch of the topic's schema, or a table of values, or of keys and values."""
    with log.publisher("t") as publisher:
        assert publisher.publish(pa.table({"value": ["a", "b"]})).result(10) == Position(LANE, 0, 0)
        publisher.publish(pa.table({"key": [b"k", None], "value": [b"c", b"d"]})).result(10)
        whole = pa.RecordBatch.from_pylist(
            [{"key": None, "value": b"e", "headers": [("h", b"1")], "timestamp": datetime.now(UTC)}], schema=RAW_SCHEMA
        )
        assert publisher.publish(whole).result(10) == Position(LANE, 2, 4)
    table = log.read("t")
    assert table.column("value").to_pylist() == [b"a", b"b", b"c", b"d", b"e"]
    assert table.column("key").to_pylist() == [None, None, b"k", None, None]
    assert table.column("headers").to_pylist()[-1] == [("h", b"1")]


def test_a_table_comes_after_the_records_sent_before_it(log: Any) -> None:
    """Records in the linger buffer go first, so the order of one thread's calls is the order of its records."""
    with log.publisher("t", linger_ms=10_000) as publisher:
        publisher.send(b"1")
        publisher.publish(pa.table({"value": [b"2"]})).result(10)
        publisher.send(b"3")
    assert values(log) == [b"1", b"2", b"3"]


def test_publish_names_the_columns_that_differ(log: Any) -> None:
    """A table that does not fit is refused before anything is sent, by the names of its columns."""
    with log.publisher("t") as publisher:
        for table, words in (
            (pa.table({"value": [1]}), "value.*int64"),
            (pa.table({"value": [b"x"], "other": [1]}), "other.*unknown"),
            (pa.table({"text": ["x"]}), "value.*missing"),
            (pa.table({"value": pa.array([], pa.binary())}), "has no records"),
            (pa.table({"value": pa.array([None], pa.binary())}), "nulls"),
            ("text", "Table or RecordBatch"),
        ):
            with pytest.raises(BadValue, match=words):
                publisher.publish(table)
        with pytest.raises(BadValue, match="partition 1"):
            publisher.publish(pa.table({"value": [b"x"]}), partition=1)
    assert values(log) == []


def test_a_large_table_becomes_several_batches_with_one_future(server: FakeServer, log: Any) -> None:
    """It ends when all of it is stored, with the first record's position."""
    table = pa.table({"value": [bytes(1 << 20)] * 20})
    with log.publisher("t") as publisher:
        publisher.send(b"before")
        assert publisher.publish(table).result(20) == Position(LANE, 1, 1)
        assert len(server.cluster.log) >= 4
        assert sum(stored.count for stored in server.cluster.log) == 21


def test_impossible_records_are_refused_immediately(log: Any) -> None:
    """Too large, or of the wrong type: BadValue, and nothing was sent."""
    with log.publisher("t") as publisher:
        for wrong in (
            {"value": bytes(RECORD_BYTES_MAX + 1)},
            {"value": "text"},
            {"value": None},
            {"value": b"", "key": 3},
            {"value": b"", "headers": {"a": 1}},
            {"value": b"", "headers": [1]},
            {"value": b"", "timestamp": datetime(2024, 1, 1)},
            {"value": b"", "timestamp": "now"},
        ):
            with pytest.raises(BadValue):
                publisher.send(**wrong)
        publisher.send(bytes(RECORD_BYTES_MAX)).result(20)
    assert log.tail("t").seq == 1


def test_headers_are_copied_by_send(log: Any) -> None:
    """Changing the dict afterwards changes nothing."""
    headers = {"a": b"1"}
    with log.publisher("t", linger_ms=10_000) as publisher:
        publisher.send(b"x", headers=headers)
        headers["a"] = b"2"
    assert log.read("t").column("headers").to_pylist() == [[("a", b"1")]]


def test_options_are_checked(log: Any) -> None:
    """An invalid value is BadValue or BadName, an unsupported option NotAvailable, an unknown option a TypeError."""
    for options in ({"ack": 7}, {"linger_ms": -1}, {"batch_bytes": 0}, {"window_bytes": 0}, {"delivery_timeout": 0}):
        with pytest.raises(BadValue):
            log.publisher("t", **options)
    with pytest.raises(emb.errors.BadName):
        log.publisher("t", session="x" * 300)
    with pytest.raises(BadValue, match="create it with replicas="):
        log.publisher("t", ack=2)
    with pytest.raises(NotAvailable):
        log.subscribe("t", group="g")
    with pytest.raises(TypeError):
        log.publisher("t", nonsense=1)


def test_keys_choose_partitions_and_records_without_take_turns() -> None:
    """The same key always goes to the same partition, in order; keyless batches are distributed in turn."""
    with FakeServer(order=5, partitions=4) as server, emb.connect(server.addresses) as log:
        with log.publisher("t", linger_ms=0) as publisher:
            for n in range(40):
                publisher.send(b"%d" % n, key=b"k%d" % (n % 5))
            publisher.flush(10)
            for _ in range(4):
                publisher.send(b"keyless").result(10)
            publisher.publish(pa.table({"key": [b"k0", b"k1", None], "value": [b"x", b"y", b"z"]})).result(10)
            publisher.publish(pa.table({"value": [b"here"]}), partition=3).result(10)
        subscriber = log.subscribe("t")
        seen: dict[bytes, list[bytes]] = {}
        keyless = set()
        while log.tail("t").index > (subscriber.position() or 0):
            batch = subscriber.poll(10)
            for record in batch.records():
                if record.key is not None:
                    assert batch.partition == partition_of(record.key, 4, CRC32C)
                    seen.setdefault(record.key, []).append(record.value)
                elif record.value == b"keyless":
                    keyless.add(batch.partition)
                elif record.value == b"here":
                    assert batch.partition == 3
        assert seen[b"k3"] == [b"%d" % n for n in range(40) if n % 5 == 3]
        assert keyless == {0, 1, 2, 3}
        only = log.subscribe("t", partitions=[partition_of(b"k0", 4, CRC32C)])
        assert only.poll(10).partition == partition_of(b"k0", 4, CRC32C)


def test_a_full_window_blocks_and_never_raises_without_a_limit() -> None:
    """With a time limit the sender gets Backpressure; without, its record is stored once there is space."""
    with FakeServer(order=5, credit=0) as server, emb.connect(server.addresses) as log:
        publisher = log.publisher("t", window_bytes=1000, linger_ms=0)
        first = publisher.send(bytes(2000))
        with pytest.raises(Backpressure):
            publisher.send(b"x", timeout=0.01)
        with pytest.raises(Backpressure):
            publisher.publish(pa.table({"value": [b"x"]}), timeout=0.01)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(publisher.send(b"y").result(20)))
        thread.start()
        assert results == []
        assert not first.done()
        server.do(lambda: [s.far.grant(10_000) for s in server.sockets])
        thread.join(20)
        assert results == [Position(LANE, 1, 1)]
        publisher.close()


def test_time_limits_of_waits(server: FakeServer, log: Any) -> None:
    """result, exception and flush end with TimedOut, and the record can still be stored later."""
    publisher = log.publisher("t", linger_ms=0)
    publisher.send(b"a").result(10)
    server.deaf = True
    future = publisher.send(b"b")
    for wait in (future.result, future.exception, publisher.flush):
        with pytest.raises(TimedOut):
            wait(timeout=0.01)
    with pytest.raises(BadValue):
        publisher.flush(timeout=-1)
    server.deaf = False
    server.cut()
    assert future.result(20) == Position(LANE, 1, 1)
    publisher.close()


def test_callbacks_are_called_once_with_their_future(log: Any) -> None:
    """Before and after the outcome is known."""
    done = threading.Event()
    called: list[Any] = []
    with log.publisher("t") as publisher:
        future = publisher.send(b"x")
        future.add_done_callback(lambda f: (called.append(f), done.set()))
        assert done.wait(10)
    future.add_done_callback(called.append)
    assert called == [future, future]


def test_a_callback_that_fails_is_logged_and_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Batches that end in the same moment end, other callbacks are called, connections stay."""
    called: list[Any] = []
    with FakeServer(brokers=1, order=5, replicas=1) as server, emb.connect(server.addresses) as log:
        with log.publisher("t", ack=2, linger_ms=0, batch_bytes=1) as publisher:
            futures = [publisher.send(b"%d" % n) for n in range(5)]
            futures[0].add_done_callback(lambda _: 1 // 0)
            futures[0].add_done_callback(called.append)
            while server.do(lambda: len(server.cluster.log)) < 5:
                time.sleep(0.01)
            sockets = list(server.sockets)
            server.do(server.cluster.make_durable)
            assert [future.result(10) for future in futures] == [Position(LANE, n, n) for n in range(5)]
            futures[0].add_done_callback(lambda _: 1 // 0)  # immediately, in this thread
            publisher.flush(10)
        assert called == [futures[0]]
        assert server.sockets == sockets
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_brokers_that_disconnect_after_each_welcome_are_retried_with_backoff() -> None:
    """Pauses grow, as with brokers that do not answer; the client recovers as soon as they do."""
    with FakeServer(brokers=2, order=5) as server, emb.connect(server.addresses) as log:
        server.curt = True
        server.cut()
        time.sleep(0.5)
        while server.accepted <= 2:
            time.sleep(0.01)
        assert server.accepted < 100
        server.curt = False
        assert [topic.name for topic in log.topics(timeout=20)] == ["t"]


def test_closing_without_a_cluster_does_not_hang(server: FakeServer, log: Any) -> None:
    """Records without an answer have an unknown outcome, and close raises an error."""
    publisher = log.publisher("t", linger_ms=0)
    publisher.send(b"a").result(10)
    server.deaf = True
    future = publisher.send(b"b")
    with pytest.raises(TimedOut):
        publisher.close(timeout=0.05)
    with pytest.raises(OutcomeUnknown):
        future.result()
    with pytest.raises(Closed):
        publisher.send(b"c")
    publisher.close()


def test_a_failed_publisher_reports_it_everywhere(server: FakeServer, log: Any) -> None:
    """Futures, send, flush and close raise the reason; a blocked sender is woken."""
    publisher = log.publisher("t", session="me", linger_ms=0)
    publisher.publish([{"value": b"mine"}]).result(10)
    server.do(lambda: server.cluster.open(OpenSession(topic="t", name="me")))
    with pytest.raises(SessionFenced):
        publisher.publish([{"value": b"late"}]).result(10)
    for call in (publisher.flush, publisher.close):
        with pytest.raises(SessionFenced):
            call()
    assert values(log) == [b"mine"]


def test_the_error_of_a_block_is_not_hidden_by_closing(server: FakeServer, log: Any) -> None:
    """An exception in the block is raised unchanged, even if closing fails as well."""

    def block() -> None:
        with log.publisher("t", session="me", linger_ms=0) as publisher:
            publisher.publish([{"value": b"mine"}]).result(10)
            server.do(lambda: server.cluster.open(OpenSession(topic="t", name="me")))
            publisher.publish([{"value": b"late"}]).exception(10)
            raise KeyError

    with pytest.raises(KeyError) as caught:
        block()
    assert "SessionFenced" in caught.value.__notes__[0]


def test_named_sessions_continue(log: Any) -> None:
    """A second publisher under the same name continues the sequence of the first."""
    for n in range(3):
        with log.publisher("t", session="me") as publisher:
            publisher.publish([{"value": b"%d" % n}])
    assert values(log) == [b"0", b"1", b"2"]


def test_send_in_a_named_session_is_refused_with_the_reason(log: Any) -> None:
    """It would cut batches by time: a program that sent everything again after a restart stored records twice."""
    with log.publisher("t", session="import-7") as publisher:
        with pytest.raises(BadValue, match=r"forms batches by time.*session_seq.*next_session_seq"):
            publisher.send(b"x")
        assert publisher.next_session_seq() == 0
        publisher.publish([{"value": b"y"}], session_seq=0).result(10)
    assert values(log) == [b"y"]


def test_without_acks_futures_end_when_sent(server: FakeServer, log: Any) -> None:
    """ack=0: the result is None, before the cluster has answered."""
    publisher = log.publisher("t", ack=0, linger_ms=0)
    assert publisher.send(b"a").result(10) is None
    publisher.flush(10)
    publisher.close()
    assert values(log) == [b"a"]


def test_iteration_waits_and_ends_when_closed(log: Any) -> None:
    """`for batch in subscriber` gets new batches until the subscriber is closed."""
    subscriber = log.subscribe("t")
    got: list[bytes] = []

    def read() -> None:
        for batch in subscriber:
            got.extend(record.value for record in batch)

    thread = threading.Thread(target=read)
    thread.start()
    with log.publisher("t") as publisher:
        publisher.send(b"x").result(10)
    while not got:
        time.sleep(0.001)
    subscriber.close()
    thread.join(10)
    assert not thread.is_alive()
    assert got == [b"x"]
    with pytest.raises(Closed):
        subscriber.poll()


def test_seek_and_position(log: Any) -> None:
    """A subscriber seeks to a position; prefetched batches are dropped."""
    with log.publisher("t", linger_ms=0) as publisher:
        for n in range(20):
            publisher.send(b"%d" % n).result(10)
    with log.subscribe("t", start=5) as subscriber:
        assert subscriber.poll(10).index == 5
        assert subscriber.position() == 6
        subscriber.seek(index=2)
        assert [subscriber.poll(10).index for _ in range(3)] == [2, 3, 4]
        subscriber.seek("latest")
        assert subscriber.poll(0.02) is None
        while subscriber.position() is None:  # the position is not known yet
            time.sleep(0.01)
        assert subscriber.position() == 20
        subscriber.seek(index=99)
        with pytest.raises(emb.errors.FuturePosition):
            subscriber.poll(10)
        subscriber.seek(seq=7)
        assert subscriber.poll(10).index == 7


def test_reading_gives_a_table_with_seqs(log: Any) -> None:
    """All records by default, or a span."""
    with log.publisher("t") as publisher:
        for n in range(10):
            publisher.send(b"%d" % n)
    assert log.read("t").column("_seq").to_pylist() == list(range(10))
    assert log.read("t", 3, 5).column("value").to_pylist() == [b"3", b"4"]
    assert log.read("t").schema.names == [*RAW_SCHEMA.names, "_seq"]


@pytest.mark.parametrize("wait", ["result", "flush", "poll", "send", "close"])
def test_ctrl_c_interrupts_every_wait(server: FakeServer, log: Any, wait: str) -> None:
    """KeyboardInterrupt in the main thread ends the wait immediately, and the client still closes."""
    publisher = log.publisher("t", linger_ms=0, window_bytes=1)
    publisher.send(b"a").result(10)
    subscriber = log.subscribe("t", start="latest")
    server.deaf = True
    future = publisher.send(b"b")
    waits = {
        "result": future.result, "flush": publisher.flush, "poll": subscriber.poll,
        "send": lambda: publisher.send(b"c"), "close": publisher.close,
    }  # fmt: skip
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - a slow machine may be interrupted before it waits
        timer.start()
        waits[wait]()
    timer.join()
    with pytest.raises(TimedOut):
        publisher.close(timeout=0.01)
    assert isinstance(future.exception(10), OutcomeUnknown)


def test_connect_fails_with_the_addresses() -> None:
    """No broker listens: Unreachable, and no thread is left behind."""
    before = threading.active_count()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        emb.connect("127.0.0.1:1")
    assert threading.active_count() == before


def test_a_closed_log_raises_closed(server: FakeServer) -> None:
    """Calls after close raise Closed; closing twice is fine; its thread is gone."""
    before = threading.active_count()
    log = emb.connect(server.addresses)
    subscriber = log.subscribe("t")
    log.close()
    log.close()
    assert threading.active_count() == before
    for call in (log.topics, lambda: log.publisher("t"), subscriber.poll):
        with pytest.raises(Closed):
            call()


def test_closing_the_log_stores_the_linger_buffer(server: FakeServer) -> None:
    """Records that wait for more are sent when the log is closed."""
    with emb.connect(server.addresses) as log:
        future = log.publisher("t", linger_ms=10_000).send(b"x")
    assert future.result() == Position(LANE, 0, 0)


def test_large_records_come_back_whole(log: Any) -> None:
    """Many large batches through small buffers: every byte is there."""
    with log.publisher("t") as publisher:
        futures = [publisher.send(bytes([n]) * 3_000_000) for n in range(12)]
        assert [future.result(30).seq for future in futures] == list(range(12))
    subscriber = log.subscribe("t")
    for n in range(12):
        assert subscriber.poll(10).records()[0].value == bytes([n]) * 3_000_000
