"""Bounded reads: the records of a span of a topic as one table."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa

from embarcadero.client.batch import Batch
from embarcadero.client.brokers import Brokers
from embarcadero.client.drivers import SubscriberDriver
from embarcadero.client.futures import fresh
from embarcadero.client.lanes import LanesCore
from embarcadero.client.subscriber import SubscriberCore
from embarcadero.errors import BadValue, FuturePosition, NotAvailable, TimedOut
from embarcadero.limits import RESEND_AFTER_S
from embarcadero.types import GapKind, Order, Topic
from embarcadero.wire.messages import TailIs
from embarcadero.wire.payload import RAW_SCHEMA

READ_SCHEMA = RAW_SCHEMA.append(pa.field("_seq", pa.uint64(), nullable=False))
_AT_ONCE = 256
_LANE = pa.field("_lane", pa.uint32(), nullable=False)


def new_core(brokers: Brokers, lane: int, by: str, value: int, partitions: list[int] | None = None) -> SubscriberCore:
    """A subscriber's core with the settings of this client."""
    return SubscriberCore(
        lane=lane,
        by=by,
        start=value,
        partitions=partitions,
        silent_after_us=int(RESEND_AFTER_S * 1e6),
        brokers=brokers.broker_of_handle,
        turn=brokers.next_turn(),
    )


def reader_core(
    brokers: Brokers, topic: Topic, by: str, value: int, partitions: list[int] | None = None
) -> SubscriberCore | LanesCore:
    """A reader of a whole topic: of its one lane, or (orders 0 and 1) of all its lanes."""
    if topic.order > Order.BROKER:
        return new_core(brokers, topic.lane, by, value, partitions)
    if by in ("index", "seq"):
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}: a {by} names a place in one of its lanes",
            'start at "earliest" or "latest", then seek(seq=..., lane=...)',
        )
    return LanesCore(
        topic=topic.lane,
        lanes=topic.lanes,
        by=by,
        start=value,
        partitions=partitions,
        silent_after_us=int(RESEND_AFTER_S * 1e6),
        brokers=brokers.broker_of_handle,
        turn=brokers.next_turn(),
    )


async def read_lanes(
    brokers: Brokers, tails: list[TailIs], start: int | None, end: int | None, lane: int | None, patience: float
) -> pa.Table:
    """All lanes of a topic of order 0 or 1 (or one of them), one after the other, with a column `_lane`."""
    if lane is None and (start is not None or end is not None):
        raise BadValue("a seq names a record of one lane", "say which: read(topic, start, end, lane=...)")
    chosen = [tail for tail in tails if lane in (None, tail.lane)]
    if lane is not None and not chosen:
        raise BadValue(f"lane {lane} is not a lane of this topic", f"its lanes are {[t.lane for t in tails]}")
    parts = []
    for tail in chosen:
        table = await read_span(brokers, tail, *span(tail, start, end), patience)
        parts.append(table.append_column(_LANE, pa.array(np.full(table.num_rows, tail.lane, dtype=np.uint32))))
    return pa.concat_tables(parts) if parts else READ_SCHEMA.append(_LANE).empty_table()


def span(tail: TailIs, start: int | None, end: int | None) -> tuple[int, int]:
    """The seqs to read; by default from the earliest to the end of the log as it is now."""
    first, stop = tail.start_seq if start is None else start, tail.seq if end is None else end
    if first < 0 or stop < first:
        raise BadValue(f"seqs {first} to {stop} are no span", "start is at least 0 and at most end")
    if stop > tail.seq or first > tail.seq:
        raise FuturePosition(f"seqs {first} to {stop} reach beyond the end ({tail.seq})", "read less, or wait")
    if start is not None and start < tail.start_seq and first < stop:
        raise NotAvailable(f"records before seq {tail.start_seq} are trimmed", f"start at {tail.start_seq}, or at None")
    return first, stop


async def read_span(brokers: Brokers, tail: TailIs, first: int, stop: int, patience: float) -> pa.Table:
    """Records with first <= seq < stop. TimedOut when nothing comes for `patience` seconds."""
    parts: list[pa.RecordBatch] = []
    if first < stop:
        ready = asyncio.Event()
        driver = SubscriberDriver(brokers, new_core(brokers, tail.lane, "seq", first), ready.set)
        try:
            at = first
            while at < stop:
                for batch in await _next(driver, ready, patience):
                    if batch.gap is not None and batch.gap.kind in (GapKind.TRIMMED, GapKind.LOST):
                        raise NotAvailable(f"records from seq {at} on were trimmed while they were read", "read again")
                    if batch.count and at < stop:
                        parts.append(_part(batch, at, stop))
                        at = batch.seq + batch.count
        finally:
            driver.stop()
    return pa.Table.from_batches(parts, schema=READ_SCHEMA)


async def _next(driver: SubscriberDriver, ready: asyncio.Event, patience: float) -> list[Batch]:
    """The next batches; waits for them."""
    while not (taken := driver.take(_AT_ONCE)):
        if driver.core.failed is not None:
            raise fresh(driver.core.failed)
        ready.clear()
        try:
            await asyncio.wait_for(ready.wait(), patience)
        except TimeoutError:
            raise TimedOut(f"nothing could be read for {patience:g} s", "is the cluster up?") from None
    return taken


def _part(batch: Batch, first: int, stop: int) -> pa.RecordBatch:
    """The records of a batch that are in the span, with their seqs."""
    low, high = max(first, batch.seq), min(stop, batch.seq + batch.count)
    rows = batch.to_arrow().slice(low - batch.seq, high - low)
    seqs = pa.array(np.arange(low, high, dtype=np.uint64))
    return pa.RecordBatch.from_arrays([*rows.columns, seqs], schema=READ_SCHEMA)
