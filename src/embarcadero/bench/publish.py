"""Publish throughput of a real cluster: Arrow batches of 1 KiB records, ack 1, from several publisher processes."""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import pyarrow as pa

from embarcadero.wire.payload import raw_batch


def records(count: int, size: int) -> pa.RecordBatch:
    """A batch of `count` records with values of `size` bytes."""
    now_us = time.time_ns() // 1000
    return raw_batch([None] * count, [bytes(size)] * count, [None] * count, [now_us] * count)


def _publisher(
    addresses: list[str], topic: str, batches: int, batch_records: int, record_bytes: int, barrier: Barrier, times: Any
) -> None:
    import embarcadero as emb

    batch = records(batch_records, record_bytes)
    with emb.connect(addresses) as log, log.publisher(topic, ack=1) as publisher:
        publisher.publish(batch).result(timeout=30)
        barrier.wait()
        start = time.perf_counter()
        last = [publisher.publish(batch) for _ in range(batches)]
        for future in last:
            future.result(timeout=120)
        times.put((start, time.perf_counter()))


def publish_throughput(
    addresses: list[str], topic: str, publishers: int, batches_each: int, batch_records: int, record_bytes: int
) -> float:
    """Bytes of batch payloads per second from the first publish to the last ack."""
    from embarcadero.wire.payload import encode_batch

    context = mp.get_context("spawn")
    barrier, times = context.Barrier(publishers), context.Queue()
    workers = [
        context.Process(
            target=_publisher, args=(addresses, topic, batches_each, batch_records, record_bytes, barrier, times)
        )
        for _ in range(publishers)
    ]
    for worker in workers:
        worker.start()
    spans = [times.get(timeout=300) for _ in workers]
    for worker in workers:
        worker.join()
    payload = len(memoryview(encode_batch(records(batch_records, record_bytes))))
    return float(publishers * batches_each * payload / (max(e for _, e in spans) - min(s for s, _ in spans)))
