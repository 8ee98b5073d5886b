"""The asyncio client. `embarcadero.client.sync` is its twin for threads; both share everything below them.

    log = await emb.aio.connect("127.0.0.1:9092")
    async with log, await log.publisher("orders") as publisher:
        future = await publisher.send(b"value")     # waits for room only
        position = await future                     # waits for the outcome
    async for batch in await log.subscribe("orders"): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client.batch import Batch
from embarcadero.client.brokers import Brokers
from embarcadero.client.drivers import SubscriberDriver
from embarcadero.client.futures import RecordFuture, TableResult, fresh
from embarcadero.client.options import (
    PublisherArguments,
    PublisherOptions,
    TopicChanges,
    broker_addresses,
    check_read,
    check_timeout,
    checked_changes,
    parse_addresses,
    place,
    publisher_options,
    seek_place,
)
from embarcadero.client.pump import Pump
from embarcadero.client.reading import new_core, read_span, span
from embarcadero.client.topics import TopicInfo
from embarcadero.config import Config, load
from embarcadero.errors import Backpressure, BadFrame, Closed, OutcomeUnknown, TimedOut
from embarcadero.invariants import invariant
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Position, Tail, Topic
from embarcadero.wire import messages as m
from embarcadero.wire.schemas import encode_schema

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Answer = TypeVar("Answer", bound=m.Message)


async def connect(
    addresses: str | Sequence[str] | None = None, *, config: str | Path | Config | None = None
) -> Log:
    """Connect to a cluster by the addresses of one or several of its brokers. Raises Unreachable.

    `config` names an `embarcadero.yaml`; without addresses those of its `client.brokers` are used.

        log = await emb.aio.connect(config="embarcadero.yaml")
    """
    chosen = load(config)
    seeds = parse_addresses(broker_addresses(chosen) if addresses is None else addresses)
    brokers = Brokers(seeds, chosen.client)
    try:
        await brokers.start()
    except BaseException:
        await brokers.close()
        raise
    return Log(brokers, ",".join(f"{host}:{port}" for host, port in seeds))


@asynccontextmanager
async def local(
    brokers: int | None = None, *, config: str | Path | Config | None = None, **options: Any
) -> AsyncIterator[Log]:
    """A private cluster in child processes for as long as the block lasts; `options` as for `embarcadero.local`."""
    from embarcadero.node.local import LocalCluster

    cluster = await asyncio.to_thread(LocalCluster, brokers, config=config, **options)
    try:
        async with await connect(cluster.addresses, config=config) as log:
            log.cluster = cluster
            yield log
    finally:
        await asyncio.to_thread(cluster.close)


class Log:
    """A client of one cluster. Its publishers and subscribers share one connection per broker."""

    def __init__(self, brokers: Brokers, address: str) -> None:
        self.address = address
        self.cluster: Any = None  # the LocalCluster that `local` started
        self.brokers = brokers
        self._parts: set[Publisher | Subscriber] = set()

    # --- topics ---
    async def create_topic(
        self,
        name: str,
        *,
        order: int | None = None,
        partitions: int | None = None,
        replicas: int = 0,
        durable_on: int = 0,
        schema: pa.Schema | None = None,
        on_gap: str | None = None,
        gap_timeout_ms: int | None = None,
        session_ttl_s: int | None = None,
        timeout: float | None = None,
    ) -> TopicInfo:
        """Create a topic; None: the cluster's default. Raises TopicExists, BadName, BadValue, BadSchema, NotAvailable.

        With a `schema`, records are rows of these columns, `publish` takes them and checks them, and `send` is refused.

            await log.create_topic("orders", order=5)
            await log.create_topic("ticks", schema=pa.schema([("symbol", pa.string()), ("price", pa.float64())]))
        """
        ask = m.CreateTopic(
            name=name, order=order, partitions=partitions, replicas=replicas, durable_on=durable_on, on_gap=on_gap,
            gap_timeout_ms=gap_timeout_ms, session_ttl_s=session_ttl_s,
            columns=b"" if schema is None else encode_schema(schema),
        )  # fmt: skip
        return TopicInfo.told(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def alter_topic(
        self, name: str, *, timeout: float | None = None, **changes: Unpack[TopicChanges]
    ) -> TopicInfo:
        """Change a topic that exists: only what is given. BadValue or BadSchema says what can't change, and why.

        `schema` may add columns that may be null. That makes a new version: publishers that know an older one go on,
        and readers get nulls where a batch is older than the column. `partitions` may only grow, `on_gap` may become
        "skip"; open publishers go on with the settings they began with.

            known = (await log.describe("ticks")).schema
            await log.alter_topic("ticks", schema=known.append(pa.field("venue", pa.string())))
            await log.alter_topic("orders", gap_timeout_ms=60_000)
        """
        ask = m.AlterTopic(name=name, **checked_changes(changes))
        return TopicInfo.told(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def describe(self, topic: str, *, timeout: float | None = None) -> TopicInfo:
        """A topic's settings, its `schema` (None: raw records) and all versions of it (`schemas`). Raises UnknownTopic.

            (await log.describe("ticks")).schemas[1]
        """
        return TopicInfo.told(await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout))

    async def topics(self, *, timeout: float | None = None) -> list[Topic]:
        """All topics."""
        return (await self._ask(m.ListTopics(), m.TopicsAre, timeout)).topics

    async def delete_topic(self, topic: str, *, timeout: float | None = None) -> None:
        """Delete a topic with all its records. Raises UnknownTopic."""
        await self._ask(m.DeleteTopic(name=topic), m.Done, timeout, again=False)

    async def tail(self, topic: str, *, timeout: float | None = None) -> Tail:
        """Where the topic ends: everything acked before this call is below."""
        found = await self._tail((await self.describe(topic, timeout=timeout)).lane, timeout)
        return Tail(found.lane, found.index, found.seq)

    async def _tail(self, lane: int, timeout: float | None) -> m.TailIs:
        return await self._ask(m.GetTail(lane=lane), m.TailIs, timeout)

    async def status(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
        asked = [connection.ask(m.GetStatus(), self._patience(timeout)) for connection in self.brokers.live()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer.facts for answer in answers if isinstance(answer, m.StatusIs)]

    def _patience(self, timeout: float | None) -> float:
        return self.brokers.settings.request_timeout_s if timeout is None else timeout

    async def _ask(
        self, message: m.Message, kind: type[Answer], timeout: float | None, *, again: bool = True
    ) -> Answer:
        answer = await self.brokers.ask(message, self._patience(timeout), again=again)
        if not isinstance(answer, kind):
            raise BadFrame(f"{type(message).__name__} was answered with {type(answer).__name__}", "report it: a bug")
        return answer

    # --- records ---
    async def publisher(self, topic: str, **options: Unpack[PublisherArguments]) -> Publisher:
        """A publisher into a topic, with the newest version of its schema as it is now. Raises UnknownTopic.

            async with await log.publisher("ticks", compression="zstd", linger_ms=5) as publisher: ...
        """
        chosen = publisher_options(self.brokers.settings, options)
        return self._register(Publisher(self, await self.describe(topic), chosen))

    async def subscribe(
        self,
        topic: str,
        *,
        start: str | int = "earliest",
        read: str = "ordered",
        partitions: Sequence[int] | None = None,
        group: str | None = None,
    ) -> Subscriber:
        """A reader of a topic from "earliest", "latest", or the batch that holds the record of seq `start`.

        It gives every batch the newest schema that the topic has now, for as long as it lives; subscribe again to see
        columns that were added later.
        """
        check_read(read, group)
        by, value = place(start)
        described = await self.describe(topic)
        wanted = None if partitions is None else list(partitions)
        return self._register(Subscriber(self, described, by, value, wanted))

    async def read(
        self, topic: str, start: int | None = None, end: int | None = None, *, timeout: float | None = None
    ) -> pa.Table:
        """Records with start <= seq < end as a table, with a column `_seq`; by default all there are now.

        With a schema the table has the newest one; columns that a batch was published without are null.
        `timeout` is for each step of it. Raises FuturePosition beyond the end, NotAvailable for what is trimmed.

            (await log.read("ticks", 1_000, 2_000)).to_pandas()
        """
        described = await self.describe(topic, timeout=timeout)
        tail = await self._tail(described.lane, timeout)
        return await read_span(self.brokers, tail, *span(tail, start, end), self._patience(timeout), described.versions)

    def _register(self, part: PartType) -> PartType:
        self._parts.add(part)
        return part

    def forget(self, part: Publisher | Subscriber) -> None:
        """A publisher or subscriber is closed."""
        self._parts.discard(part)

    async def close(self) -> None:
        """Close all publishers and subscribers, then hang up."""
        try:
            await asyncio.gather(*(part.close() for part in list(self._parts)), return_exceptions=True)
        finally:
            await self.brokers.close()

    async def __aenter__(self) -> Log:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class RecordAwaitable(RecordFuture):
    """`await` it to wait for the outcome; cancelling the wait does not take the record back."""

    def __await__(self) -> Generator[Any, None, Position | None]:
        if not self._result.done:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            self._result.on_done(lambda: None if done.done() else done.set_result(None))
            yield from done
        return self._outcome()


class Publisher:
    """Publishes records into one topic. `with` it, or close it: closing waits for every outcome."""

    def __init__(self, log: Log, topic: TopicInfo, options: PublisherOptions) -> None:
        self._log = log
        self._pump = Pump(log.brokers, topic, options, RecordAwaitable)

    async def send(
        self, value: bytes, key: bytes | None = None, headers: Any = None, timestamp: Any = None,
        *, timeout: float | None = None,
    ) -> RecordAwaitable:  # fmt: skip
        """Take a record; waits while the window is full. Await what it returns for the record's Position.

            future = await publisher.send(b"two coffees", key=b"table 4", headers={"trace": b"1"})
            position = await future
        """
        intake = self._pump.intake
        record, size = intake.checked(value, key, headers, timestamp)
        builder = intake.current  # this loop is the only one to change it
        if builder is None or size > builder.room:
            intake.check_size(size)
            await self._room(timeout)
        with intake.lock:
            future = intake.add(record, size)
            poke = intake.news and self._pump.needs_poke()
        if poke:
            self._pump.poke()
        invariant(isinstance(future, RecordAwaitable), "the intake makes our futures")
        return future  # type: ignore[return-value]

    async def publish(
        self, data: Any, *, partition: int | None = None, timeout: float | None = None
    ) -> RecordAwaitable:
        """Take rows; waits while the window is full. As in the synchronous client, they may be a pyarrow Table or
        RecordBatch, a DataFrame of pandas or polars, a list of dicts, or a dict of columns.

        Await what it returns for the Position of the first record: it is there once all of the table is stored.

            position = await (await publisher.publish([{"symbol": "EMB", "price": 12.5}]))
        """
        intake, whole = self._pump.intake, TableResult(self._pump.intake.condition)
        for number, piece in enumerate(intake.pieces(data, partition)):
            try:
                await self._room(timeout)
            except Backpressure as error:
                if not number:
                    raise
                raise OutcomeUnknown(f"a part of the table was taken: {error.message}", "read the log") from None
            whole.add(piece.result)
            with intake.condition:
                intake.add_piece(piece)
            self._pump.poke()
        whole.complete()
        return RecordAwaitable(whole, 0)

    async def _room(self, timeout: float | None) -> None:
        """Wait until the window has room; raise why nothing is taken any more."""
        check_timeout(timeout)
        intake, moved = self._pump.intake, self._pump.moved
        try:
            async with asyncio.timeout(timeout):
                while self._is_full():
                    moved.clear()
                    await moved.wait()
        except TimeoutError:
            raise Backpressure(f"no room in the window for {timeout:g} s", "the record was not taken") from None
        if intake.refusal is not None:
            raise fresh(intake.refusal)

    def _is_full(self) -> bool:
        with self._pump.intake.lock:
            return self._pump.intake.is_full()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until everything taken so far has its outcome. Raises TimedOut, or why the publisher failed."""
        check_timeout(timeout)
        intake, moved = self._pump.intake, self._pump.moved
        with intake.condition:
            intake.seal()
            waiting = list(intake.unsettled)
        self._pump.poke()
        try:
            async with asyncio.timeout(timeout):
                while not all(result.done for result in waiting):
                    moved.clear()
                    await moved.wait()
        except TimeoutError:
            raise TimedOut(f"not everything was settled within {timeout:g} s", "flush again") from None
        if (failed := self._pump.driver.core.failed) is not None:
            raise fresh(failed)

    async def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, at most `timeout` seconds; what is left then has an unknown outcome.

        Raises why the publisher failed, if it did.
        """
        check_timeout(timeout)
        self._log.forget(self)
        await self._pump.close(timeout)
        if (failed := self._pump.driver.core.failed) is not None:
            raise fresh(failed)

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except Exception:
            if error is None:
                raise


class Subscriber:
    """Reads one topic in its order."""

    def __init__(self, log: Log, topic: TopicInfo, by: str, value: int, partitions: list[int] | None) -> None:
        self._log, self._lane = log, topic.lane
        self._ready = asyncio.Event()
        self._closed = False
        core = new_core(log.brokers, topic.lane, by, value, partitions, topic.versions)
        self._driver = SubscriberDriver(log.brokers, core, self._ready.set)

    async def poll(self, timeout: float | None = None) -> Batch | None:
        """The next batch (or typed gap); None when none came in time. Raises what ended the reading."""
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if self._closed:
                        raise Closed("the subscriber is closed", "subscribe again")
                    if taken := self._driver.take(1):
                        return taken[0]
                    if (failed := self._driver.core.failed) is not None:
                        raise fresh(failed)
                    self._ready.clear()
                    await self._ready.wait()
        except TimeoutError:
            return None

    def seek(self, where: str | None = None, *, seq: int | None = None, index: int | None = None) -> None:
        """Go on from "earliest", "latest", the batch that holds a seq, or an index."""
        self._driver.seek(*seek_place(where, seq, index))

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is."""
        return self._driver.core.position

    async def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._log.forget(self)
        self._driver.stop()
        self._ready.set()

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Batch:
        try:
            batch = await self.poll()
        except Closed:
            raise StopAsyncIteration from None
        invariant(batch is not None, "a poll without a time limit ends with a batch")
        return batch  # type: ignore[return-value]


PartType = TypeVar("PartType", Publisher, Subscriber)

__all__ = ["Log", "Publisher", "RecordAwaitable", "Subscriber", "connect", "local"]
