"""Publish throughput of a real cluster: Arrow batches, ack 1, several publisher processes, against raw TCP."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pyarrow as pa

from embarcadero.types import Order
from embarcadero.wire.schemas import encode_batch, raw_batch
from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.raw import raw_receive
from embarcadero_proof.lab.rows import STRONG_PERCENTS, size_name
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

_ACK_S = 120.0
_ORDERS = (5, 2, 0)
_SESSIONS = 10  # of each publisher process, where strong and weak sessions share a topic


def records(count: int, size: int) -> pa.RecordBatch:
    """Make a batch of `count` records with values of `size` bytes."""
    now_us = time.time_ns() // 1000
    return raw_batch([None] * count, [bytes(size)] * count, [None] * count, [now_us] * count)


def payload_bytes(count: int, size: int) -> int:
    """Return the bytes of such a batch on the wire."""
    return len(memoryview(encode_batch(records(count, size))))


def _publisher(
    seat: Seat, addresses: list[str], topic: str, batches: int, batch_records: int, record_bytes: int, ack: int,
    orders: tuple[str | None, ...],
) -> tuple[float, float]:  # fmt: skip
    import embarcadero as emb

    batch = records(batch_records, record_bytes)
    with emb.connect(addresses) as log, ExitStack() as stack:
        publishers = [stack.enter_context(log.publisher(topic, ack=ack, order=order)) for order in orders]
        for publisher in publishers:
            publisher.publish(batch).result(timeout=_ACK_S)
        seat.meet()
        began = time.perf_counter()
        futures = [publishers[number % len(publishers)].publish(batch) for number in range(batches)]
        for future in futures:
            future.result(timeout=_ACK_S)
        return began, time.perf_counter()


def publish_throughput(
    addresses: list[str],
    topic: str,
    publishers: int,
    batches_each: int,
    batch_records: int,
    record_bytes: int,
    ack: int = 1,
    orders: tuple[str | None, ...] = (None,),
) -> float:
    """Return the bytes of batch payloads per second from the first publish to the last ack.

    Each publisher process has a session of each of these orders, and uses them in turn.
    """
    with Team() as team:
        for _ in range(publishers):
            team.add(_publisher, addresses, topic, batches_each, batch_records, record_bytes, ack, orders)
        team.meet()
        spans = team.results()
    total = publishers * batches_each * payload_bytes(batch_records, record_bytes)
    return float(total / (max(end for _, end in spans) - min(began for began, _ in spans)))


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure raw TCP, then orders 5, 2 and 0 in one cluster, for each batch size, in another order in each trial."""
    plans = []
    for size in trial.turned(settings.batch_bytes):
        count = settings.records_in(size)
        frame = payload_bytes(count, settings.record_bytes)
        batches = max(settings.brokers, settings.total_bytes // settings.publishers // frame)
        plans.append((size, count, batches))
        announce(f"raw loopback TCP, {size_name(size)}")
        connections = settings.brokers * settings.publishers
        trial.values[f"raw_{size}"] = raw_receive(connections, frame, batches * settings.publishers)
    with cluster_with(settings.brokers, **{f"order{order}": order for order in _ORDERS}) as cluster:
        for size, count, batches in plans:
            for order in trial.turned(_ORDERS):
                announce(f"publish, order {order}, {size_name(size)}")
                trial.values[f"order{order}_{size}"] = publish_throughput(
                    cluster.addresses, f"order{order}", settings.publishers, batches, count, settings.record_bytes,
                    orders=("total",) if order == Order.TOTAL else (None,),
                )  # fmt: skip
            for percent in trial.turned(STRONG_PERCENTS):
                announce(f"publish, order 2, {percent} % strong, {size_name(size)}")
                strong = _SESSIONS * percent // 100
                trial.values[f"strong{percent}_{size}"] = publish_throughput(
                    cluster.addresses, "order2", settings.publishers, batches, count, settings.record_bytes,
                    orders=("strong",) * strong + ("total",) * (_SESSIONS - strong),
                )  # fmt: skip
            _compare(trial, size)


def _compare(trial: Trial, size: int) -> None:
    """Compute ratios of figures that were measured side by side."""
    values = trial.values
    for order in (5, 2):
        values[f"order{order}_{size}_to_raw"] = values[f"order{order}_{size}"] / values[f"raw_{size}"]
    for percent in STRONG_PERCENTS[1:]:
        ratio = values[f"strong{percent}_{size}"] / values[f"strong0_{size}"]
        values[f"strong{percent}_to_weak_{size}"] = ratio
    values[f"order5_to_order0_{size}"] = values[f"order5_{size}"] / values[f"order0_{size}"]
