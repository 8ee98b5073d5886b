"""Bounded reads: the records of a span of a topic as one table."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from embarcadero.client.arguments import check_read
from embarcadero.client.net.brokers import BrokerPool
from embarcadero.client.read.driver import SubscriberDriver, forked_reader
from embarcadero.client.read.lanes import LanesCore
from embarcadero.client.read.subscriber import SubscriberCore
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.errors import BadValue, Closed, FuturePosition, TimedOut, Trimmed, fresh
from embarcadero.forks import tell_of_forks
from embarcadero.types import GapKind, Order, ReaderProgress, Tail, Topic
from embarcadero.wire.messages import TailIs
from embarcadero.wire.schemas import RAW, SEQ_COLUMN, TopicSchemas

_AT_ONCE = 256
_LANE = pa.field("_lane", pa.uint32(), nullable=False)


def new_core(
    brokers: BrokerPool,
    lane: int,
    by: str,
    value: int,
    read: str,
    partitions: list[int] | None = None,
    schemas: TopicSchemas = RAW,
    **more: Any,
) -> SubscriberCore:
    """A reader of one lane with the settings of this client. It reads batches by `schemas` for as long as it lives."""
    settings = _settings(brokers) | more
    return SubscriberCore(lane=lane, by=by, start=value, read=read, partitions=partitions, schemas=schemas, **settings)


def reader_core(
    brokers: BrokerPool, topic: TopicInfo, by: str, value: int, read: str, partitions: list[int] | None = None
) -> SubscriberCore | LanesCore:
    """A reader of a whole topic: of its one lane, or (orders 0 and 1) of all its lanes."""
    if topic.order > Order.BROKER:
        return new_core(brokers, topic.lane, by, value, read, partitions, topic.versions, **table_of(topic))
    if by in ("index", "seq"):
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}: a {by} names a place in one of its lanes",
            'start at "earliest", "latest" or a time, then seek(seq=..., lane=...)',
        )
    in_table = frozenset() if topic.tier is None else frozenset(topic.tier.frontiers)
    return LanesCore(
        topic=topic.lane,
        lanes=topic.lanes,
        by=by,
        start=value,
        read=read,
        partitions=partitions,
        schemas=topic.versions,
        in_table=in_table,
        **_settings(brokers),
        **table_of(topic),
    )


def table_of(topic: TopicInfo) -> dict[str, Any]:
    """What the core of a reader has to know about the topic's table. Only topics on disks may have one, or get one."""
    return {"table": topic.replicas > 0, "tiered": topic.tier is not None}


def _settings(brokers: BrokerPool) -> dict[str, Any]:
    return {
        "silent_after_us": int(brokers.settings.resend_after_s * 1e6),
        "wait_ms": brokers.settings.fetch_wait_ms,
        "max_bytes": brokers.settings.fetch_bytes,
        "prefetch": brokers.settings.prefetch,
        "brokers": brokers.broker_of_handle,
        "turn": brokers.next_turn(),
    }


def lanes_of(topic: Topic, lane: int | None) -> list[int]:
    """The lanes that a question is about: all of the topic, or the given one. BadValue if it is of another topic."""
    lanes = [each.lane for each in topic.lanes] if topic.order <= Order.BROKER else [topic.lane]
    if lane is None:
        return lanes
    if lane not in lanes:
        raise BadValue(f"lane {lane} is not a lane of topic {topic.name!r}", f"its lanes are {lanes}")
    return [lane]


def lane_of(topic: Topic, lane: int | None, what: str) -> int:
    """The one lane that a question is about: a topic of order 0 or 1 has several, and BadValue asks for one."""
    if lane is None and topic.order <= Order.BROKER:
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}: {what} names a place in one of its lanes",
            "say which: lane=...; describe() lists them",
        )
    return lanes_of(topic, lane)[0]


def joined(parts: dict[int, pa.Table], schemas: TopicSchemas) -> pa.Table:
    """Tables of several lanes as one, with a column that tells the lane."""
    tables = [
        table.append_column(_LANE, pa.array(np.full(table.num_rows, lane, dtype=np.uint32)))
        for lane, table in parts.items()
    ]
    return pa.concat_tables(tables) if tables else _read_schema(schemas).append(_LANE).empty_table()


def _read_schema(schemas: TopicSchemas) -> pa.Schema:
    return schemas.newest.append(pa.field(SEQ_COLUMN, pa.uint64(), nullable=False))


def tail_of(topic: Topic, told: TailIs) -> Tail:
    """A lane's tail as callers see it. Without replicas there is nothing to wait for: ordered is all there is."""
    durable = (told.durable_index, told.durable_seq) if topic.replicas else (told.index, told.seq)
    hot_index, hot_seq = told.hot_index, told.hot_seq
    hot = (told.start_index, told.start_seq) if hot_index is None or hot_seq is None else (hot_index, hot_seq)
    holes = tuple((start, stop) for start, stop in told.holes)
    return Tail(told.lane, told.index, told.seq, told.start_index, told.start_seq, *durable, *hot, holes=holes)


def with_lags(readers: list[ReaderProgress], tail: Tail) -> list[ReaderProgress]:
    """Readers with the records that each is behind; in lanes that it said nothing of, that is all of them."""
    return [
        msgspec.structs.replace(
            reader,
            lag=sum(
                lane.records(max(lane.start_seq, reader.places.get(lane.lane, (0, 0))[1]), lane.seq)
                for lane in tail.lanes or (tail,)
            ),
        )
        for reader in readers
    ]


def span(tail: Tail, start: int | None, end: int | None) -> tuple[int, int]:
    """The seqs to read; by default from the earliest to the end of the log as it is now."""
    first, stop = tail.start_seq if start is None else start, tail.seq if end is None else end
    if first < 0 or stop < first:
        raise BadValue(f"seqs {first} to {stop} are no span", "start is at least 0 and at most end")
    if stop > tail.seq or first > tail.seq:
        raise FuturePosition(f"seqs {first} to {stop} reach beyond the end ({tail.seq})", "read less, or wait")
    if start is not None and start < tail.start_seq and first < stop:
        raise Trimmed(f"records before seq {tail.start_seq} are trimmed", f"start at {tail.start_seq}, or at None")
    return first, stop


async def read_span(
    brokers: BrokerPool, topic: TopicInfo, tail: Tail, first: int, stop: int, patience: float, read: str = "ordered"
) -> pa.Table:
    """Records with first <= seq < stop, waiting until they are durable if `read` says so; lost ones are missing.

    TimedOut after `patience` seconds without progress.
    """
    parts: list[pa.RecordBatch] = []
    schema = _read_schema(topic.versions)
    if first < stop:
        ready = asyncio.Event()
        core = new_core(brokers, tail.lane, "seq", first, read, None, topic.versions, **table_of(topic))
        driver = SubscriberDriver(brokers, core, ready.set, until=tail.index, topic=topic.name)
        try:
            at = first
            while at < stop and (taken := await _next(driver, ready, patience)):
                for batch in taken:
                    if batch.gap is not None and batch.gap.kind is GapKind.TRIMMED:
                        raise Trimmed(
                            f"records from seq {at} on were trimmed while they were read: index {batch.gap.stop} is "
                            "the first readable one",
                            "read again, with start=None for what is there",
                        )
                    if batch.count and at < stop:
                        parts += [_part(batch, at, stop, schema)] if batch.seq < stop else []
                        at = batch.seq + batch.count
        finally:
            driver.stop()
    return pa.Table.from_batches(parts, schema=schema)


async def _next(driver: SubscriberDriver, ready: asyncio.Event, patience: float) -> list[Batch]:
    """The next batches; waits for them. None are left: the lane ends with records that are lost."""
    while not (taken := driver.take(_AT_ONCE)) and not driver.arrived:
        if driver.core.failed is not None:
            raise fresh(driver.core.failed)
        ready.clear()
        try:
            async with asyncio.timeout(patience):  # wait_for of Python 3.11 may swallow a cancellation
                await ready.wait()
        except TimeoutError:
            raise nothing_came(driver.core, patience) from None
    return taken


def nothing_came(core: object, patience: float) -> TimedOut:
    """Why a reader gives up."""
    trouble = core.trouble if isinstance(core, SubscriberCore) else None
    if trouble is not None:
        return TimedOut(f"nothing could be read for {patience:g} s: {trouble.message}", trouble.hint)
    hint = 'is the cluster up? what is ordered and not durable yet can be read with read="ordered"'
    return TimedOut(f"nothing could be read for {patience:g} s", hint)


def _part(batch: Batch, first: int, stop: int, schema: pa.Schema) -> pa.RecordBatch:
    """The records of a batch that are in the span, with their seqs."""
    low, high = max(first, batch.seq), min(stop, batch.seq + batch.count)
    rows = batch.to_arrow().slice(low - batch.seq, high - low)
    seqs = pa.array(np.arange(low, high, dtype=np.uint64))
    return pa.RecordBatch.from_arrays([*rows.columns, seqs], schema=schema)


class Span(NamedTuple):
    """What to scan: batches with start <= index < stop. None: from the earliest one, to the frontier as it is now."""

    start: int | None
    stop: int | None
    read: str
    partitions: list[int] | None
    control: bool

    def checked(self) -> Span:
        """The same, if it is a span."""
        check_read(self.read)
        for number in (self.start, self.stop):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise BadValue(f"index {number!r} is no place in a log", "use an index from 0 on, or None")
        if self.start is not None and self.stop is not None and self.start > self.stop:
            raise BadValue(f"indices {self.start} to {self.stop} are no span", "start is at most stop")
        return self

    def ends(self, tail: Tail) -> tuple[int, int]:
        """Where it starts and stops in a lane of this tail."""
        frontier = tail.durable_index if self.read == "durable" else tail.index
        stop = frontier if self.stop is None else self.stop
        start = min(tail.start_index, stop) if self.start is None else self.start
        return start, max(start, stop)


class Scan:
    """One scan under way: fetches ahead, within bounds, until it is closed or over."""

    def __init__(
        self, brokers: BrokerPool, topic: TopicInfo, lane: int, span: Span, ends: tuple[int, int], patience: float
    ) -> None:
        self._topic, self._forked = topic.name, False
        self._ends, self._patience, self._ready, self._closed = ends, patience, asyncio.Event(), False
        self._core = new_core(
            brokers,
            lane,
            "index",
            ends[0],
            span.read,
            span.partitions,
            topic.versions,
            control=span.control,
            stop=ends[1],
            **table_of(topic),
        )
        self._driver = SubscriberDriver(brokers, self._core, self._ready.set, until=ends[1], topic=topic.name)
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: refuse to go on. The position is the parent's."""
        self._forked = True

    async def next(self) -> list[Batch]:
        """The batches that are here; waits for some. None are left: it is over. Raises TimedOut."""
        if self._forked:
            raise forked_reader(self._topic)
        while not (taken := self._driver.take(self._core.ready)) and not self._driver.arrived and not self._core.ended:
            if self._core.failed is not None:
                raise fresh(self._core.failed)
            if self._closed:
                raise Closed("the log was closed during a scan", "connect again")
            await self._wait()
        return [self._clipped(batch) for batch in taken]

    async def _wait(self) -> None:
        place = self._core.position
        self._ready.clear()
        try:
            async with asyncio.timeout(self._patience):  # wait_for of Python 3.11 may swallow a cancellation
                await self._ready.wait()
        except TimeoutError:
            if self._core.position == place:  # it may go on through batches that are not wanted
                raise nothing_came(self._core, self._patience) from None

    def _clipped(self, batch: Batch) -> Batch:
        """The same without what is outside the span: a gap of indices may begin before it, or end behind it."""
        if (gap := batch.gap) is None or gap.kind in (GapKind.SKIPPED, GapKind.END_OF_LANE):
            return batch
        inside = gap._replace(start=max(gap.start, self._ends[0]), stop=min(gap.stop, self._ends[1]))
        return batch if inside == gap else Batch.of_gap(batch.lane, inside, batch.seq)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109 - nothing to wait for
        """Stop fetching."""
        self.stop()

    def stop(self) -> None:
        """The same, at once."""
        self._closed = True
        if self._forked:
            return
        self._driver.stop()
        self._ready.set()


def check_piece_bytes(piece_bytes: int) -> None:
    """How large a piece of a span may be."""
    if piece_bytes < 1:
        raise BadValue(f"pieces of {piece_bytes} bytes", "use at least 1; some MiB are sensible")
