"""Order belongs to the session, on a real cluster: strong and weak publishers in one topic, several brokers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadValue
from embarcadero.types import EntryKind, Order
from embarcadero.wire.schemas import raw_batch

pytestmark = pytest.mark.system

RECORDS = 15_000
KEYS = 40
PUBLISHERS = 3


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    with emb.local(brokers=3, log_bytes=64 << 20) as log:
        yield log


def out_of_order(log: Any, topic: str) -> int:
    """The number of records that come after a later one of their key and publisher."""
    table = log.read(topic)
    last: dict[tuple[bytes, bytes], int] = defaultdict(lambda: -1)
    late = 0
    for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True):
        who, _, number = value.partition(b":")
        late += int(number) < last[who, key]
        last[who, key] = max(last[who, key], int(number))
    return late


def opened_strong(log: Any, topic: str) -> list[bool]:
    """For each session in the log, whether its SESSION_OPEN has the strong flag in a topic of order 2."""
    return [
        bool(entry.flags & 2)
        for batches in log.scan(topic, control=True)
        for entry in batches
        if entry.kind == EntryKind.SESSION_OPEN
    ]


def test_send_keeps_the_order_of_each_key_over_partitions_brokers_and_connections(log: Any) -> None:
    """The default publisher into the default topic with four partitions; batches of a few hundred bytes."""
    log.create_topic("keyed", partitions=4)

    def publish(who: int) -> None:
        with emb.connect(log.address) as own, own.publisher("keyed", batch_bytes=600, linger_ms=0.2) as publisher:
            for number in range(RECORDS):
                publisher.send(b"%d:%d" % (who, number), key=b"key-%d" % (number % KEYS))

    with ThreadPoolExecutor(PUBLISHERS) as pool:
        list(pool.map(publish, range(PUBLISHERS)))

    assert log.tail("keyed").seq == PUBLISHERS * RECORDS
    assert out_of_order(log, "keyed") == 0
    assert opened_strong(log, "keyed") == [True] * PUBLISHERS


def test_strong_and_weak_publishers_share_a_topic(log: Any) -> None:
    """Sync and asyncio: the default is strong, "total" opts out, names and numbers mean the same."""
    log.create_topic("shared")
    for order in (None, "total", 2, "strong", 5):
        with log.publisher("shared", order=order) as publisher:
            publisher.send(b"x").result(timeout=30)

    async def publish() -> None:
        async with await emb.aio.connect(log.address) as own:
            for order in (None, "total"):
                async with await own.publisher("shared", order=order) as publisher:
                    await (await publisher.send(b"x"))

    asyncio.run(publish())
    assert opened_strong(log, "shared") == [True, False, False, True, True, True, False]


def test_a_topic_limits_the_orders_of_its_publishers(log: Any) -> None:
    """Order 5 takes strong sessions only; orders 0 and 1 have no choice; names are taken where topics are made."""
    assert log.create_topic("all-strong", order="strong").order == Order.STRONG
    assert log.create_topic("local", order="local").order == Order.BROKER
    assert log.create_topic("none", order="none").order == Order.NONE
    for topic, order in (("all-strong", "total"), ("local", "strong"), ("none", "total"), ("all-strong", "loose")):
        with pytest.raises(BadValue, match="order"):
            log.publisher(topic, order=order)
    with pytest.raises(BadValue, match="'loose' does not exist"):
        log.create_topic("loose", order="loose")
    for topic in ("all-strong", "local", "none"):
        with log.publisher(topic) as publisher:
            publisher.send(b"x").result(timeout=30)


def record(value: bytes) -> pa.RecordBatch:
    return raw_batch([None], [value], [None], [0])


def test_a_named_session_keeps_the_order_it_was_opened_with(log: Any) -> None:
    """Without a choice the next holder continues with its order; a conflicting choice is refused."""
    log.create_topic("named")
    with log.publisher("named", session="till", order="total") as publisher:
        publisher.publish(record(b"0")).result(timeout=30)
    with log.publisher("named", session="till") as publisher:
        publisher.publish(record(b"1")).result(timeout=30)
    assert opened_strong(log, "named") == [False, False]
    publisher = log.publisher("named", session="till", order="strong")
    with pytest.raises(BadValue, match=r"has order 2 \(total\), not 5 \(strong\)"):
        publisher.publish(record(b"2")).result(timeout=30)
    with pytest.raises(BadValue):
        publisher.close()
    with log.publisher("named", session="till", order="total") as publisher:
        publisher.publish(record(b"2")).result(timeout=30)
    assert log.read("named").column("value").to_pylist() == [b"0", b"1", b"2"]
