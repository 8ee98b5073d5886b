"""The core promise, with real processes: a million records, a broker killed halfway, and no trace of it afterwards."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.client.results import Batch
from embarcadero.node.local import LocalCluster
from embarcadero.wire.schemas import RAW_SCHEMA

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PUBLISHERS, BATCHES, RECORDS = 8, 500, 250
TOTAL = PUBLISHERS * BATCHES * RECORDS
_VALUE = struct.Struct("<HI")


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Four brokers and a sequencer, a process each."""
    with LocalCluster(brokers=4) as cluster:
        yield cluster


def _batch(publisher: int, number: int) -> pa.RecordBatch:
    first = number * RECORDS
    values = [_VALUE.pack(publisher, n) for n in range(first, first + RECORDS)]
    nulls = pa.nulls(RECORDS)
    times = pa.array([first] * RECORDS, pa.int64()).cast(RAW_SCHEMA.field("timestamp").type)
    headers = nulls.cast(RAW_SCHEMA.field("headers").type)
    columns = [nulls.cast(pa.binary()), pa.array(values, pa.binary()), headers, times]
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


class Watcher(threading.Thread):
    """A subscriber that records its results: (index, seq, publisher, first number) of every batch."""

    def __init__(self, log: emb.Log) -> None:
        super().__init__(daemon=True)
        self._log = log
        self.seen: list[tuple[int, int, int, int]] = []
        self.records = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            with self._log.subscribe("million", start="earliest") as subscriber:
                while self.records < TOTAL:
                    batch = subscriber.poll(timeout=60)
                    if batch is None:
                        raise TimeoutError(f"{self.records} of {TOTAL} records arrived")
                    self._take(batch)
        except Exception as problem:
            self.problem = problem

    def _take(self, batch: Batch) -> None:
        if batch.gap is not None:
            raise ValueError(f"a gap: {batch.gap}")
        values = [_VALUE.unpack(value) for value in batch.to_arrow().column("value").to_pylist()]
        publisher, first = values[0]
        if values != [(publisher, first + i) for i in range(RECORDS)]:
            raise ValueError(f"batch {batch.index} is not as it was sent")
        self.seen.append((batch.index, batch.seq, publisher, first))
        self.records += len(values)


def test_a_million_records_survive_a_broker_killed_half_way(cluster: LocalCluster) -> None:
    """Exactly once, in each publisher's order, at equal positions for both subscribers, and every ack was correct."""
    acks: dict[tuple[int, int], emb.Position] = {}
    half = threading.Event()
    with emb.connect(cluster.addresses) as log:
        log.create_topic("million", order=5)
        watchers = [Watcher(log), Watcher(log)]
        for watcher in watchers:
            watcher.start()

        def publish(number: int) -> None:
            with log.publisher("million", ack=1) as publisher:
                futures = [publisher.publish(_batch(number, n)) for n in range(BATCHES // 2)]
                futures[-1].result(timeout=120)
                half.set()
                futures += [publisher.publish(_batch(number, n)) for n in range(BATCHES // 2, BATCHES)]
                for n, future in enumerate(futures):
                    acks[number, n * RECORDS] = future.result(timeout=120)

        publishers = [threading.Thread(target=publish, args=(n,)) for n in range(PUBLISHERS)]
        for thread in publishers:
            thread.start()
        assert half.wait(120)
        cluster.kill_broker(2)
        for thread in [*publishers, *watchers]:
            thread.join(180)
        while cluster.report().brokers[2].incarnation < 2:
            time.sleep(0.02)
        incarnations = {broker.id: broker.incarnation for broker in cluster.report().brokers}

    first, second = watchers
    assert (first.problem, second.problem) == (None, None)
    assert first.seen == second.seen
    for number in range(PUBLISHERS):
        assert [at for _, _, who, at in first.seen if who == number] == list(range(0, BATCHES * RECORDS, RECORDS))
    positions = {(who, at): (index, seq) for index, seq, who, at in first.seen}
    assert positions == {key: (ack.index, ack.seq) for key, ack in acks.items()}
    assert [seq for _, seq, _, _ in first.seen] == list(range(0, TOTAL, RECORDS))
    assert incarnations == {0: 1, 1: 1, 2: 2, 3: 1}
