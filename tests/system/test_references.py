"""Batches by reference on a real cluster: staged in one topic, published into another, despite kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.client.encoding import encoded
from embarcadero.errors import BadReference
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.schemas import plain_batch

pytestmark = pytest.mark.system

NOISE = os.urandom(4_096)


@pytest.fixture(scope="module")
def log() -> Iterator[Any]:
    """Memory holds a third of the staged batches: the rest is read from the replicas' files."""
    with emb.local(brokers=3, replicas=2, log_bytes=64 << 20) as log:
        yield log


def made(number: int, records: int, size: int) -> Any:
    """An encoded batch of that many records, each of its own bytes."""
    return encoded(plain_batch([b"%d-%d-" % (number, n) + NOISE[:size] for n in range(records)], [0.0] * records), None)


def stage(log: Any, topic: str, batches: int, records: int = 10, size: int = 100) -> list[emb.StagedBatch]:
    """Stage batches durably; return their references."""
    with log.publisher(topic, ack=2) as publisher:
        futures = [publisher.publish_encoded(made(n, records, size), records, partition=n % 4) for n in range(batches)]
        return [future.staged() for future in futures]


def publish_one(log: Any, topic: str, staged: emb.StagedBatch) -> BaseException | None:
    """Publish one batch by reference, in a session of its own; return its error."""
    publisher = log.publisher(topic, ack=2)
    future = publisher.publish_reference(staged)
    error: BaseException | None = future.exception(60)
    with contextlib.suppress(BadReference):  # the same, once more
        publisher.close()
    return error


def test_staged_batches_are_published_once_though_brokers_are_killed(log: Any) -> None:
    """200 MB, kill -9 of a broker that staged some of it, and of a broker that publishes; then all of it once more."""
    log.create_topic("staging", order=0, replicas=2, durable_on=1, partitions=4)
    log.create_topic("target", order=5, replicas=2, durable_on=1, partitions=4)
    staged = stage(log, "staging", batches=100, records=512, size=4_000)
    assert sum(each.size for each in staged) > 200_000_000
    lanes = {lane.lane: lane.broker for lane in log.describe("staging").lanes}
    victim = lanes[staged[0].lane]
    log.cluster.kill_broker(victim)

    placed = []
    for run in range(2):  # the second one is a driver that starts again
        with log.publisher("target", session="job", session_at=0, ack=2) as publisher:
            futures = [publisher.publish_reference(each, partition=n % 4) for n, each in enumerate(staged)]
            if not run:
                futures[10].result(60)
                log.cluster.kill_broker((victim + 1) % 3)
            placed.append([future.result(120) for future in futures])

    assert placed[0] == placed[1]
    found = [batch for batches in log.scan("target") for batch in batches]
    assert [payload_crc(batch.payload) for batch in found] == [each.crc for each in staged]
    assert [batch.partition for batch in found] == [n % 4 for n in range(100)]
    assert [batch.seq for batch in found] == [position.seq for position in placed[0]]


def test_the_asyncio_client_stages_and_publishes_too(log: Any) -> None:
    """The same calls; a wrong reference ends its own future, and a weak session continues."""

    async def run() -> list[Any]:
        async with await emb.aio.connect(log.address) as client:
            await client.create_topic("aio-staging", order=1, replicas=2, durable_on=1)
            await client.create_topic("aio-target", order=2, replicas=2, durable_on=1)
            async with await client.publisher("aio-staging", ack=2) as publisher:
                futures = [await publisher.publish_encoded(made(n, 10, 100), 10) for n in range(3)]
                staged = [(await future, future.staged())[1] for future in futures]
            staged[1] = replace(staged[1], crc=staged[1].crc ^ 1)
            async with await client.publisher("aio-target", order="total", ack=2) as publisher:
                futures = [await publisher.publish_reference(each) for each in staged]
                await publisher.flush(60)
                return [future.exception() for future in futures]

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [type(None), BadReference, type(None)]
    values = log.read("aio-target").column("value").to_pylist()
    assert [value.split(b"-")[0] for value in values[::10]] in ([b"0", b"2"], [b"2", b"0"])
    assert len(values) == 20


def test_a_deleted_or_trimmed_staging_topic_is_reported(log: Any) -> None:
    """The error names the missing part; no record of the batch is in the topic."""
    log.create_topic("gone-staging", order=0, replicas=2, durable_on=1, partitions=4)
    log.create_topic("gone-target", order=5, replicas=2, durable_on=1)
    staged = stage(log, "gone-staging", batches=8)
    last = {each.lane: each.index for each in staged}
    for lane, index in last.items():
        log.trim("gone-staging", before_index=index, lane=lane)
    trimmed = next(each for each in staged if each.index < last[each.lane])
    kept = next(each for each in staged if each.index == last[each.lane])
    told = []
    for each in (trimmed, kept):
        with log.publisher("gone-target", session="s", ack=2) as publisher:
            future = publisher.publish_reference(each)
            told.append(type(future.exception(60)))
            if future.exception() is not None:
                with pytest.raises(BadReference, match="trimmed"):
                    publisher.close()
    assert told == [BadReference, type(None)]
    log.delete_topic("gone-staging")
    outcome, stored = publish_one(log, "gone-target", kept), 1
    while outcome is None:  # the broker does not know of the deletion yet, and copied from memory
        outcome, stored = publish_one(log, "gone-target", kept), stored + 1
    assert isinstance(outcome, BadReference)
    assert "deleted" in outcome.message
    assert log.tail("gone-target").seq == stored * kept.count
