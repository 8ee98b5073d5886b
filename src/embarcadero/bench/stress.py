"""Two stress runs that the seeds' design fails: ten gigabytes out of order over small rings, and one stuck session.

Both start a real cluster and end by themselves. They are measurements, not tests: ratios within one run.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import random
import time
from typing import Any

import uvloop

from embarcadero.bench.publish import records
from embarcadero.bench.striped import StripedSession
from embarcadero.limits import GAP_TIMEOUT_FENCE_MS, HELD_PER_SESSION_MAX
from embarcadero.wire.payload import encode_batch


async def _shuffled(addresses: list[str], topic: str, batches: int, payload: bytes, count: int, seed: int) -> None:
    session = StripedSession(payload, count, random.Random(seed))
    await session.open(addresses, topic)
    await session.send_shuffled(0, batches)
    session.close()


def _shuffling(addresses: list[str], topic: str, batches: int, batch_records: int, seed: int, times: Any) -> None:
    payload = bytes(memoryview(encode_batch(records(batch_records, 1024))))
    start = time.perf_counter()
    uvloop.run(_shuffled(addresses, topic, batches, payload, batch_records, seed))
    times.put((start, time.perf_counter(), batches * len(payload)))


def out_of_order(addresses: list[str], topic: str, sessions: int, batches_each: int, batch_records: int) -> float:
    """Bytes per second of `sessions` publishers that send everything in shuffled windows, first send to last ack."""
    context = mp.get_context("spawn")
    times = context.Queue()
    workers = [
        context.Process(target=_shuffling, args=(addresses, topic, batches_each, batch_records, seed, times))
        for seed in range(sessions)
    ]
    for worker in workers:
        worker.start()
    spans = [times.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    return float(sum(size for *_, size in spans) / (max(s[1] for s in spans) - min(s[0] for s in spans)))


async def _stuck(addresses: list[str], topic: str, stop: Any) -> None:
    """A session whose first batch never comes: everything behind it waits in the held slots."""
    payload = bytes(memoryview(encode_batch(records(1, 1024))))
    session = StripedSession(payload, 1, random.Random(0))
    await session.open(addresses, topic)
    await session.send(list(range(1, HELD_PER_SESSION_MAX)))
    await asyncio.to_thread(stop.wait)
    session.close()


def _stick(addresses: list[str], topic: str, ready: Any, stop: Any) -> None:
    ready.set()
    uvloop.run(_stuck(addresses, topic, stop))


def beside_a_stuck_session(
    addresses: list[str], topic: str, sessions: int, batches_each: int, batch_records: int
) -> float:
    """Throughput beside one session that waits for a lost batch, divided by throughput without it."""
    context = mp.get_context("spawn")
    without = out_of_order(addresses, topic, sessions, batches_each, batch_records)
    ready, stop = context.Event(), context.Event()
    stuck = context.Process(target=_stick, args=(addresses, topic, ready, stop))
    stuck.start()
    ready.wait(GAP_TIMEOUT_FENCE_MS / 1000)
    beside = out_of_order(addresses, topic, sessions, batches_each, batch_records)
    stop.set()
    stuck.join()
    return beside / without
