"""Reads on an event loop: the driver of a subscriber, reads of the topic's table, spans, and scans.

Brokers that can read tables are asked first. A client that reads a table itself needs an extra
(`embarcadero[iceberg]`), which loads with the first table, and the keys of the store. The cluster provides the location
of the store. Files of tables are read on worker threads, without Spark.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from embarcadero.client.arguments import Lookup, check_partitions, check_read
from embarcadero.client.brokers import BrokerPool, CoreDriver, now_us
from embarcadero.client.lanes import LanesCore
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore, TableAsk
from embarcadero.errors import (
    BadTable,
    BadValue,
    Closed,
    EmbarcaderoError,
    Forked,
    FuturePosition,
    NotAvailable,
    TierUnavailable,
    TimedOut,
    TooMany,
    Trimmed,
    fresh,
)
from embarcadero.forks import tell_of_forks
from embarcadero.limits import PIECES_MAX
from embarcadero.types import Cut, GapKind, LanePosition, Order, ReaderProgress, Span, Tail, Tier, Topic
from embarcadero.wire import messages as m
from embarcadero.wire.messages import TailIs
from embarcadero.wire.schemas import SEQ_COLUMN, TopicSchemas

if TYPE_CHECKING:
    from embarcadero.tier.table_reads import TopicTable

_LOG: Final = logging.getLogger("embarcadero.client")
_TAKE_MAX = 256  # batches that one step of a read takes
_LANE = pa.field("_lane", pa.uint32(), nullable=False)

ReaderCore = SubscriberCore | LanesCore
Answer = TypeVar("Answer", bound=m.Message)
Found = TypeVar("Found", m.PlaceIs, m.PiecesAre)
Seen = TypeVar("Seen")


def open_table(tier: Tier, brokers: BrokerPool) -> TopicTable:
    """Open a topic's table as its metadata file describes it. Raises NotAvailable without the extra.

    The timeouts are short (FOR_READERS), so that a store that does not answer is reported as fast as by a broker.
    """
    from embarcadero.config.secrets import parse_properties
    from embarcadero.tier.storage import FOR_READERS
    from embarcadero.tier.table_reads import TopicTable

    return TopicTable(tier, {**FOR_READERS, **parse_properties(brokers.table_properties)})


class TableReads:
    """Reads a topic's table for the cores of a driver. Calls `run` when there may be a result."""

    def __init__(self, brokers: BrokerPool, topic: str, run: Callable[[], None]) -> None:
        self._brokers, self._topic, self._run = brokers, topic, run
        self._tasks: set[asyncio.Task[None]] = set()
        self.moved = asyncio.Event()  # batches were taken: the buffer may have space

    def begin(self, asks: Iterable[TableAsk]) -> None:
        """Start a task for each read."""
        for ask in asks:
            task = asyncio.get_running_loop().create_task(self._answer(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Cancel all reads."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, ask: TableAsk) -> None:
        try:
            if ask.by == "span":
                await self._read(ask)
            else:
                ask.core.on_table_position(ask, await self._position(ask), now_us())
        except EmbarcaderoError as error:
            ask.core.on_table_failed(ask, error, now_us())
        except ImportError as error:
            missing = NotAvailable(f"tables need PyIceberg: {error}", 'pip install "embarcadero[iceberg]"')
            ask.core.on_table_failed(ask, missing, now_us())
        except Exception as error:  # after any error, the reader must not wait without end
            problem = f"cannot read the table of {self._topic!r}, lane {ask.lane}, {ask.by} {ask.start}: {error!r}"
            bad = BadTable(problem, "check whether another program has written to it, and restore the changed files")
            ask.core.on_table_failed(ask, bad, now_us())
        self._run()

    async def _read(self, ask: TableAsk) -> None:
        """Deliver the part of a span that the table has, up to its frontier in the store.

        Compaction or garbage collection may remove a file after a read was planned. The read then continues with the
        newest metadata.
        """
        tier = (await describe(self._brokers, self._topic)).tier
        reached = at = ask.start
        while tier is not None and (reached := max(at, min(ask.stop, tier.frontier(ask.lane)[0]))) > at:
            try:
                lists = await asyncio.to_thread(self._open, tier, ask, at, reached)
                while (batches := await asyncio.to_thread(_next_of_table, tier, lists)) is not None:
                    ask.core.on_table_batches(ask, batches)
                    last = batches[-1]
                    at = last.gap.stop if last.kind is None and last.gap is not None else last.index + 1
                    self._run()
                    while ask.core.wants(ask) and not ask.core.has_room:
                        self.moved.clear()
                        await self.moved.wait()
                    if not ask.core.wants(ask):
                        return
                break
            except BadTable:
                planned, tier = tier, (await describe(self._brokers, self._topic)).tier
                if tier is None or tier.metadata == planned.metadata:
                    raise
        ask.core.on_table_end(ask, reached, now_us())

    def _open(self, tier: Tier, ask: TableAsk, start: int, stop: int) -> Iterator[list[Batch]]:
        """Open the table and begin a read. Runs on a worker thread."""
        table = open_table(tier, self._brokers)
        from embarcadero.tier.table_reads import table_batches

        return table_batches(
            table,
            ask.lane,
            start,
            stop,
            ask.schemas,
            partitions=ask.partitions,
            control=ask.control,
            durable=ask.durable,
        )

    async def _position(self, ask: TableAsk) -> int | None:
        """Return the index at which a reader starts. None: brokers know it."""
        about = await describe(self._brokers, self._topic)
        if about.tier is None:
            return None
        if ask.by == "earliest":
            return (await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)).start_index
        try:
            position = await find_position(self._brokers, about, ask.lane, ask.by, ask.start)
        except Trimmed:  # a reader from below the start begins at the start
            return (await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)).start_index
        if ask.by == "time":  # if no batch has this time yet, keep the time, so that no older batch is delivered
            tail = await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)
            return None if position.index >= tail.index else position.index
        return position.index


def _next_of_table(tier: Tier, lists: Iterator[list[Batch]]) -> list[Batch] | None:
    """Return the next batches of a read. Runs on a worker thread."""
    from embarcadero.tier.table_reads import naming_the_store

    with naming_the_store(tier):
        return next(lists, None)


async def describe(brokers: BrokerPool, topic: str) -> TopicInfo:
    """Return the current state of a topic in the store."""
    return TopicInfo.of(await brokers.ask(m.DescribeTopic(name=topic), m.TopicIs))


async def find_position(
    brokers: BrokerPool, about: TopicInfo, lane: int, by: str, value: int, patience: float | None = None
) -> LanePosition:
    """Find an index, a seq or a time, at brokers or in the topic's table.

    Raises Trimmed if neither has it, FuturePosition if it is beyond the end.
    """
    try:
        hot = await brokers.ask(m.Find(lane=lane, by=by, start=value), m.PlaceIs, patience)
    except Trimmed:
        if about.tier is None:
            raise
        hot = None
    if about.tier is None or (hot is not None and await _is_exact(brokers, lane, by, value, hot)):
        return LanePosition(0, 0) if hot is None else LanePosition(hot.index, hot.seq)
    tier = (await describe(brokers, about.name)).tier  # read after the answer: brokers drop only what the table has
    cold = None if tier is None else await _find_in_table(brokers, tier, lane, by, value)
    if cold is not None and not _below(tier, lane, by, value):
        return cold
    if hot is None and by == "time":  # the table knows that all dropped batches are older; brokers do not
        tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
        if tail.hot_index is None:
            return LanePosition(tail.start_index, tail.start_seq)
        return LanePosition(tail.hot_index, tail.hot_seq or 0)
    if hot is None or _below(tier, lane, by, value):
        problem = f"the batch with {by} {value} of lane {lane} was trimmed"
        raise Trimmed(problem, "tail(...) has the start of the readable part: start_index, start_seq")
    return LanePosition(hot.index, hot.seq)


async def table_only_cuts(
    brokers: BrokerPool, topic: str, lane: int, start: int, stop: int, piece_bytes: int
) -> list[Cut]:
    """Divide the part of a span that only the topic's table has, from `start` on. A piece there is whole files."""
    tier = (await describe(brokers, topic)).tier
    tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
    hot = tail.start_index if tail.hot_index is None else tail.hot_index
    if tier is None or start >= min(stop, hot):
        return []
    cuts = await _table_cuts(brokers, tier, lane, start, min(stop, hot), piece_bytes)
    if cuts and cuts[-1].index > stop:  # the stop is inside a file
        index, seq = await find_position(brokers, await describe(brokers, topic), lane, "index", stop)
        cuts[-1] = Cut(stop, seq if index == stop else cuts[-1].seq, cuts[-1].bytes)
    return cuts


async def _find_in_table(brokers: BrokerPool, tier: Tier, lane: int, by: str, value: int) -> LanePosition | None:
    """Find a position in a table, through a broker or by this client."""

    def find() -> LanePosition | None:
        found = open_table(tier, brokers).find(lane, by, value)
        return None if found is None else LanePosition(*found)

    answer = await _of_table(brokers, tier, m.Find(lane=lane, by=by, start=value, table=True), m.PlaceIs, find)
    if isinstance(answer, m.PlaceIs):
        return None if answer.missing else LanePosition(answer.index, answer.seq)
    return answer


async def _table_cuts(brokers: BrokerPool, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Divide a span by the files of a table, through a broker or by this client."""

    def cuts() -> list[Cut]:
        from embarcadero.tier.table_reads import table_cuts

        return table_cuts(open_table(tier, brokers), lane, start, stop, piece_bytes)

    ask = m.Measure(lane=lane, start=start, stop=stop, piece_bytes=piece_bytes, pieces_max=PIECES_MAX, table=True)
    answer = await _of_table(brokers, tier, ask, m.PiecesAre, cuts)
    return answer.cuts if isinstance(answer, m.PiecesAre) else answer


async def _of_table(
    brokers: BrokerPool, tier: Tier, ask: m.Find | m.Measure, kind: type[Found], look: Callable[[], Seen]
) -> Found | Seen:
    """Ask a broker about a table. If none can answer, this client runs `look` on a worker thread."""
    refused: EmbarcaderoError | None = None
    if any(connection.link.tables for connection in brokers.live()):
        try:
            answer = await brokers.ask(ask, kind)
            if answer.table:
                return answer
        except (TierUnavailable, BadTable, NotAvailable, TooMany) as error:
            refused = error

    def named() -> Seen:
        from embarcadero.tier.table_reads import naming_the_store

        with naming_the_store(tier):
            return look()

    try:
        return await asyncio.to_thread(named)
    except (EmbarcaderoError, ImportError) as error:
        if refused is not None and not isinstance(refused, NotAvailable):
            raise refused from error
        if isinstance(error, EmbarcaderoError):
            raise
        raise NotAvailable(f"tables need PyIceberg: {error}", 'pip install "embarcadero[iceberg]"') from error


async def _is_exact(brokers: BrokerPool, lane: int, by: str, value: int, hot: m.PlaceIs) -> bool:
    """Whether brokers found the position itself, and did not answer with their first position instead."""
    if by == "index":
        return hot.index == value
    if by == "seq":
        return hot.seq <= value
    tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
    return hot.index > (tail.start_index if tail.hot_index is None else tail.hot_index)


def _below(tier: Tier | None, lane: int, by: str, value: int) -> bool:
    """Whether a position is below the start of the table, and so below the start of the topic."""
    index, seq = (0, 0) if tier is None else tier.start(lane)
    return value < {"index": index, "seq": seq}.get(by, 0)


def forked_reader(topic: str) -> Forked:
    """Return the error of a reader that was opened in the parent of a forked child."""
    return Forked(f"this reader of {topic!r} was opened before the process was forked", "subscribe in the child")


def reader_state(core: ReaderCore, ahead: Mapping[int, int], *, closed: bool, forked: bool) -> str:
    """Return the state of a reader in a few words, for people. `ahead`: by lane, the batch that is delivered next."""
    if closed or forked:
        return "closed" if closed else "of the parent process"
    positions = {**core.positions(), **ahead}
    if isinstance(core, LanesCore):
        at = f"reads {len(positions)} lanes"
    else:
        at = "position not known yet" if None in positions.values() else f"at index {next(iter(positions.values()))}"
    return f"{at}, paused" if core.paused else at


class SubscriberDriver(CoreDriver):
    """Runs a subscriber's core. Calls `on_ready` when there may be batches, an error, or when `until` is reached.

    `until` is an index for which the caller waits.
    """

    core: ReaderCore

    def __init__(
        self,
        brokers: BrokerPool,
        core: ReaderCore,
        on_ready: Callable[[], None],
        until: int | None = None,
        topic: str = "",
    ) -> None:
        super().__init__(brokers)
        self.core, self._on_ready, self._until = core, on_ready, until
        self._table = TableReads(brokers, topic, self.run)
        self._topic = topic
        self._logged: EmbarcaderoError | None = None  # the last logged error of the table
        brokers.attach(self)

    def run(self) -> None:
        """Do everything that is possible now."""
        super().run()
        self._table.begin(self.core.take_table_asks())
        self._log_trouble()
        if self.core.ready or self.core.failed is not None or self.arrived:
            self._on_ready()

    @property
    def arrived(self) -> bool:
        """Whether all batches before `until` were taken."""
        position = None if self._until is None else self.core.position
        return position is not None and self._until is not None and position >= self._until

    def _log_trouble(self) -> None:
        """Log each error of the topic's table once, and log when the table can be read again."""
        trouble, before = self.core.trouble, self._logged
        if trouble is not None and (before is None or trouble.message != before.message):
            _LOG.warning("topic %r: %s; retrying", self._topic, trouble.message)
        elif trouble is None and before is not None:
            _LOG.info("topic %r: the table can be read again", self._topic)
        self._logged = trouble

    def retry(self) -> None:
        """Continue after a store did not answer."""
        self.core.retry(now_us())
        self.run()

    def take(self, most: int) -> list[Batch]:
        """Take batches in order. The core continues to fetch."""
        taken = self.core.take_batches(most, now_us())
        super().run()
        self._table.begin(self.core.take_table_asks())
        self._table.moved.set()
        return taken

    def stop(self) -> None:
        """Release connections, timers and reads of the table."""
        super().stop()
        self._table.stop()

    def pause(self) -> None:
        """Stop fetching and keep the position."""
        self.core.pause()

    def resume(self) -> None:
        """Continue to fetch."""
        self.core.resume(now_us())
        self.run()

    def seek(self, by: str, value: int, lane: int | None = None) -> None:
        """Continue at another position."""
        self.core.seek(by, value, now_us(), lane)
        self.run()


def reader_settings(
    brokers: BrokerPool, topic: TopicInfo, read: str, partitions: list[int] | None = None
) -> ReaderSettings:
    """Return the settings for a reader of a topic, with its current schemas. A topic with a table has replicas."""
    return ReaderSettings(
        silent_after_us=int(brokers.settings.resend_after_s * 1e6),
        read=read,
        partitions=partitions,
        wait_ms=brokers.settings.fetch_wait_ms,
        max_bytes=brokers.settings.fetch_bytes,
        prefetch=brokers.settings.prefetch,
        schemas=topic.versions,
        brokers=brokers.broker_of_handle,
        turn=brokers.next_turn(),
        table=topic.replicas > 0,
        tiered=topic.tier is not None,
        in_table=frozenset() if topic.tier is None else frozenset(topic.tier.frontiers),
    )


def reader_core(
    brokers: BrokerPool, topic: TopicInfo, start: Lookup, read: str, partitions: list[int] | None = None
) -> ReaderCore:
    """Create a reader of a whole topic: of its one lane, or (orders 0 and 1) of all its lanes."""
    check_partitions(topic.name, topic.partitions, partitions)
    if partitions is not None and not partitions:
        raise BadValue("partitions=[] reads nothing", "name at least one partition, or leave partitions out")
    if topic.order > Order.BROKER:
        return SubscriberCore(reader_settings(brokers, topic, read, partitions), topic.lane, start)
    if start.by in ("index", "seq"):
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}, so each of its lanes has its own {start.by}",
            'start at "earliest", "latest" or a time, then call seek(seq=..., lane=...)',
        )
    return LanesCore(reader_settings(brokers, topic, read, partitions), topic.lane, topic.lanes, start)


def lanes_of(topic: Topic, lane: int | None) -> list[int]:
    """Return all lanes of the topic, or the given one. Raises BadValue if the lane belongs to another topic."""
    lanes = [each.lane for each in topic.lanes] if topic.order <= Order.BROKER else [topic.lane]
    if lane is None:
        return lanes
    if lane not in lanes:
        raise BadValue(f"lane {lane} is not a lane of topic {topic.name!r}", f"use one of {lanes}")
    return [lane]


def lane_of(topic: Topic, lane: int | None, what: str) -> int:
    """Return the lane of a request. A topic of order 0 or 1 has several: without `lane`, raise BadValue."""
    if lane is None and topic.order <= Order.BROKER:
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}, so {what} needs a lane",
            "pass lane=...; describe() lists the lanes",
        )
    return lanes_of(topic, lane)[0]


def joined(parts: dict[int, pa.Table], schemas: TopicSchemas) -> pa.Table:
    """Concatenate the tables of several lanes, with a column `_lane`."""
    tables = [
        table.append_column(_LANE, pa.array(np.full(table.num_rows, lane, dtype=np.uint32)))
        for lane, table in parts.items()
    ]
    return pa.concat_tables(tables) if tables else _read_schema(schemas).append(_LANE).empty_table()


def _read_schema(schemas: TopicSchemas) -> pa.Schema:
    return schemas.newest.append(pa.field(SEQ_COLUMN, pa.uint64(), nullable=False))


def tail_of(topic: Topic, answer: TailIs) -> Tail:
    """Return a lane's tail for callers. Without replicas, the durable end is the ordered end."""
    durable = (answer.durable_index, answer.durable_seq) if topic.replicas else (answer.index, answer.seq)
    hot_index, hot_seq = answer.hot_index, answer.hot_seq
    hot = (answer.start_index, answer.start_seq) if hot_index is None or hot_seq is None else (hot_index, hot_seq)
    start = answer.start_index, answer.start_seq
    return Tail(answer.lane, answer.index, answer.seq, *start, *durable, *hot, holes=tuple(answer.holes))


def with_lags(readers: list[ReaderProgress], tail: Tail) -> list[ReaderProgress]:
    """Add to each reader its lag in records. A lane that it did not report counts as a whole."""
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


def seq_span(tail: Tail, start: int | None, end: int | None) -> Span:
    """Return the seqs to read, by default from the earliest record to the current end."""
    first, stop = tail.start_seq if start is None else start, tail.seq if end is None else end
    if first < 0 or stop < first:
        raise BadValue(f"seqs {first} to {stop} are not a valid span", "use 0 <= start <= end")
    if stop > tail.seq or first > tail.seq:
        problem = f"the span of seqs {first} to {stop} reaches beyond the end of the log, which is {tail.seq}"
        raise FuturePosition(problem, "read less, or wait until the records exist")
    if start is not None and start < tail.start_seq and first < stop:
        problem = f"records before seq {tail.start_seq} were trimmed, and the read starts at seq {start}"
        raise Trimmed(problem, f"start at {tail.start_seq}, or at None")
    return Span(first, stop)


async def read_span(
    brokers: BrokerPool, topic: TopicInfo, tail: Tail, seqs: Span, patience: float, read: str = "ordered"
) -> pa.Table:
    """Read the records with these seqs. With read="durable", wait until they are durable. Lost records are missing.

    Raises TimedOut after `patience` seconds without progress.
    """
    parts: list[pa.RecordBatch] = []
    schema = _read_schema(topic.versions)
    first, stop = seqs
    if first < stop:
        ready = asyncio.Event()
        core = SubscriberCore(reader_settings(brokers, topic, read), tail.lane, Lookup("seq", first))
        driver = SubscriberDriver(brokers, core, ready.set, until=tail.index, topic=topic.name)
        try:
            at = first
            while at < stop and (taken := await _next(driver, ready, patience)):
                for batch in taken:
                    if batch.gap is not None and batch.gap.kind is GapKind.TRIMMED:
                        raise Trimmed(
                            f"records from seq {at} on were trimmed during the read; the first readable index is "
                            f"{batch.gap.stop}",
                            "read again, with start=None for all remaining records",
                        )
                    if batch.count and at < stop:
                        parts += [_part(batch, at, stop, schema)] if batch.seq < stop else []
                        at = batch.seq + batch.count
        finally:
            driver.stop()
    return pa.Table.from_batches(parts, schema=schema)


async def _next(driver: SubscriberDriver, ready: asyncio.Event, patience: float) -> list[Batch]:
    """Wait for the next batches. An empty list: the lane ends with lost records."""
    while not (taken := driver.take(_TAKE_MAX)) and not driver.arrived:
        if driver.core.failed is not None:
            raise fresh(driver.core.failed)
        ready.clear()
        try:
            async with asyncio.timeout(patience):  # wait_for of Python 3.11 may swallow a cancellation
                await ready.wait()
        except TimeoutError:
            raise no_progress(driver.core, patience) from None
    return taken


def no_progress(core: object, patience: float) -> TimedOut:
    """Return the error of a reader without progress."""
    trouble = core.trouble if isinstance(core, SubscriberCore) else None
    if trouble is not None:
        return TimedOut(f"the read made no progress for {patience:g} s: {trouble.message}", trouble.hint)
    hint = 'check that the cluster is up; use read="ordered" for records that are not durable yet'
    return TimedOut(f"the read made no progress for {patience:g} s", hint)


def _part(batch: Batch, first: int, stop: int, schema: pa.Schema) -> pa.RecordBatch:
    """Return the records of a batch in the span, with their seqs."""
    low, high = max(first, batch.seq), min(stop, batch.seq + batch.count)
    rows = batch.to_arrow().slice(low - batch.seq, high - low)
    seqs = pa.array(np.arange(low, high, dtype=np.uint64))
    return pa.RecordBatch.from_arrays([*rows.columns, seqs], schema=schema)


class LaneSpan(NamedTuple):
    """The span of a scan: start <= index < stop. None: from the earliest batch, to the current end."""

    start: int | None
    stop: int | None
    read: str
    partitions: list[int] | None
    control: bool

    def checked(self) -> LaneSpan:
        """Check the span and return it. Raises BadValue."""
        check_read(self.read)
        for number in (self.start, self.stop):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise BadValue(f"{number!r} is not a valid index", "use an integer from 0 on, or None")
        if self.start is not None and self.stop is not None and self.start > self.stop:
            raise BadValue(f"indices {self.start} to {self.stop} are not a valid span", "use start <= stop")
        return self

    def indices(self, tail: Tail) -> Span:
        """Return the first index and the stop in a lane with this tail."""
        frontier = tail.durable_index if self.read == "durable" else tail.index
        stop = frontier if self.stop is None else self.stop
        start = min(tail.start_index, stop) if self.start is None else self.start
        return Span(start, max(start, stop))


class Scan:
    """An open scan. It reads ahead, within bounds, until its end."""

    def __init__(
        self, brokers: BrokerPool, topic: TopicInfo, lane: int, span: LaneSpan, indices: Span, patience: float
    ) -> None:
        self._topic, self._forked = topic.name, False
        self._indices, self._patience, self._ready, self._closed = indices, patience, asyncio.Event(), False
        check_partitions(topic.name, topic.partitions, span.partitions)
        settings = reader_settings(brokers, topic, span.read, span.partitions)
        settings = replace(settings, control=span.control, stop=indices.stop)
        self._core = SubscriberCore(settings, lane, Lookup("index", indices.start))
        self._driver = SubscriberDriver(brokers, self._core, self._ready.set, until=indices.stop, topic=topic.name)
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child, refuse to continue. The position stays with the parent."""
        self._forked = True

    async def next(self) -> list[Batch]:
        """Wait for the next batches. An empty list: the scan has ended. Raises TimedOut."""
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
        position = self._core.position
        self._ready.clear()
        try:
            async with asyncio.timeout(self._patience):  # wait_for of Python 3.11 may swallow a cancellation
                await self._ready.wait()
        except TimeoutError:
            if self._core.position == position:  # otherwise it made progress through batches that are not wanted
                raise no_progress(self._core, self._patience) from None

    def _clipped(self, batch: Batch) -> Batch:
        """Limit a gap to the span: it may begin before the span, or end after it."""
        if (gap := batch.gap) is None or gap.kind in (GapKind.SKIPPED, GapKind.END_OF_LANE):
            return batch
        inside = gap._replace(start=max(gap.start, self._indices.start), stop=min(gap.stop, self._indices.stop))
        return batch if inside == gap else Batch.of_gap(batch.lane, inside, batch.seq)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ARG002, ASYNC109 - nothing to wait for
        """Stop fetching."""
        self.stop()

    def stop(self) -> None:
        """Stop fetching, without waiting."""
        self._closed = True
        if self._forked:
            return
        self._driver.stop()
        self._ready.set()


def check_piece_bytes(piece_bytes: int) -> None:
    """Raise BadValue unless this can be the size of a piece."""
    if piece_bytes < 1:
        raise BadValue(f"piece_bytes is {piece_bytes}, and must be at least 1", "use some MiB, for example 64 << 20")
