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
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client.batch import Batch
from embarcadero.client.brokers import Brokers
from embarcadero.client.drivers import ReaderCore, SubscriberDriver
from embarcadero.client.futures import RecordFuture, TableResult, fresh
from embarcadero.client.options import (
    PublisherArguments,
    PublisherOptions,
    check_read,
    check_timeout,
    parse_addresses,
    place,
    seek_place,
)
from embarcadero.client.pump import Pump
from embarcadero.client.reading import read_lanes, read_span, reader_core, span
from embarcadero.errors import Backpressure, BadFrame, BadValue, Closed, NotAvailable, OutcomeUnknown, TimedOut
from embarcadero.invariants import invariant
from embarcadero.limits import CLOSE_TIMEOUT_S, REQUEST_TIMEOUT_S
from embarcadero.types import Order, Position, Tail, Topic
from embarcadero.wire import messages as m

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Answer = TypeVar("Answer", bound=m.Message)


async def connect(addresses: str | Sequence[str]) -> Log:
    """Connect to a cluster by the addresses of one or several of its brokers. Raises Unreachable."""
    seeds = parse_addresses(addresses)
    brokers = Brokers(seeds)
    try:
        await brokers.start()
    except BaseException:
        await brokers.close()
        raise
    return Log(brokers, ",".join(f"{host}:{port}" for host, port in seeds))


@asynccontextmanager
async def local(brokers: int = 4, **options: Any) -> AsyncIterator[Log]:
    """A private cluster in child processes for as long as the block lasts; `options` as for `embarcadero.local`."""
    from embarcadero.node.local import LocalCluster

    cluster = await asyncio.to_thread(LocalCluster, brokers, **options)
    try:
        async with await connect(cluster.addresses) as log:
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
        order: int = 2,
        partitions: int = 1,
        replicas: int = 0,
        durable_on: int = 0,
        schema: pa.Schema | None = None,
        on_gap: str = "fence",
        gap_timeout_ms: int | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> Topic:
        """Create a topic. Raises TopicExists, BadName, BadValue, NotAvailable."""
        if schema is not None:
            raise NotAvailable("topics with a schema come with a later version", "leave schema out")
        ask = m.CreateTopic(
            name=name, order=order, partitions=partitions, replicas=replicas, durable_on=durable_on, on_gap=on_gap,
            gap_timeout_ms=gap_timeout_ms,
        )  # fmt: skip
        return (await self._ask(ask, m.TopicIs, timeout, again=False)).topic

    async def describe(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> Topic:
        """A topic's settings. Raises UnknownTopic."""
        return (await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout)).topic

    async def topics(self, *, timeout: float = REQUEST_TIMEOUT_S) -> list[Topic]:
        """All topics."""
        return (await self._ask(m.ListTopics(), m.TopicsAre, timeout)).topics

    async def delete_topic(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> None:
        """Delete a topic with all its records. Raises UnknownTopic."""
        await self._ask(m.DeleteTopic(name=topic), m.Done, timeout, again=False)

    async def tail(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> Tail:
        """Where the topic ends: everything acked before this call is below. Orders 0 and 1: `lanes` has each lane's."""
        about, found = await self._tails(topic, timeout)
        tails = tuple(Tail(tail.lane, tail.index, tail.seq) for tail in found)
        if about.order > Order.BROKER:
            return tails[0]
        return Tail(about.lane, sum(tail.index for tail in tails), sum(tail.seq for tail in tails), tails)

    async def _tails(self, topic: str, timeout: float) -> tuple[Topic, list[m.TailIs]]:
        """A topic, and where each of its lanes ends."""
        about = await self.describe(topic, timeout=timeout)
        lanes = [lane.lane for lane in about.lanes] if about.order <= Order.BROKER else [about.lane]
        asked = (self._ask(m.GetTail(lane=lane), m.TailIs, timeout) for lane in lanes)
        return about, list(await asyncio.gather(*asked))

    async def status(self, *, timeout: float = REQUEST_TIMEOUT_S) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
        asked = [connection.ask(m.GetStatus(), timeout) for connection in self.brokers.live()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer.facts for answer in answers if isinstance(answer, m.StatusIs)]

    async def _ask(self, message: m.Message, kind: type[Answer], timeout: float, *, again: bool = True) -> Answer:
        answer = await self.brokers.ask(message, timeout, again=again)
        if not isinstance(answer, kind):
            raise BadFrame(f"{type(message).__name__} was answered with {type(answer).__name__}", "report it: a bug")
        return answer

    # --- records ---
    async def publisher(self, topic: str, **options: Unpack[PublisherArguments]) -> Publisher:
        """A publisher into a topic. Raises UnknownTopic."""
        chosen = PublisherOptions(**options)
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
        """A reader of a topic from "earliest", "latest", or the batch that holds the record of seq `start`."""
        check_read(read, group)
        by, value = place(start)
        wanted = None if partitions is None else list(partitions)
        core = reader_core(self.brokers, await self.describe(topic), by, value, wanted)
        return self._register(Subscriber(self, core))

    async def read(
        self, topic: str, start: int | None = None, end: int | None = None, *, lane: int | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> pa.Table:  # fmt: skip
        """Records with start <= seq < end as a table, with a column `_seq`; by default all there are now.

        A topic of order 0 or 1 is read lane by lane, with a column `_lane`; `start` and `end` then need `lane`.
        `timeout` is for each step of it. Raises FuturePosition beyond the end, NotAvailable for what is trimmed.
        """
        about, tails = await self._tails(topic, timeout)
        if about.order <= Order.BROKER:
            return await read_lanes(self.brokers, tails, start, end, lane, timeout)
        if lane not in (None, about.lane):
            raise BadValue(f"lane {lane} is not a lane of {topic!r}", f"its lane is {about.lane}")
        return await read_span(self.brokers, tails[0], *span(tails[0], start, end), timeout)

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

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Position | None]:
        if not self._result.done:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            self._result.on_done(lambda: None if done.done() else done.set_result(None))
            yield from done
        return self._outcome()


class Publisher:
    """Publishes records into one topic. `with` it, or close it: closing waits for every outcome."""

    def __init__(self, log: Log, topic: Topic, options: PublisherOptions) -> None:
        self._log = log
        self._pump = Pump(log.brokers, topic, options, RecordAwaitable)

    async def send(
        self, value: bytes, key: bytes | None = None, headers: Any = None, timestamp: Any = None,
        *, timeout: float | None = None,
    ) -> RecordAwaitable:  # fmt: skip
        """Take a record; waits while the window is full. Await what it returns for the record's Position."""
        intake = self._pump.intake
        record, size = intake.checked(value, key, headers, timestamp)
        await self._room(timeout)
        with intake.condition:
            future = intake.add(record, size)
        self._pump.poke()
        invariant(isinstance(future, RecordAwaitable), "the intake makes our futures")
        return future  # type: ignore[return-value]

    async def publish(
        self, data: Any, *, partition: int | None = None, timeout: float | None = None
    ) -> RecordAwaitable:
        """Take a pyarrow Table or RecordBatch; waits while the window is full.

        Await what it returns for the Position of the first record: it is there once all of the table is stored.
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
                while intake.full:
                    moved.clear()
                    await moved.wait()
        except TimeoutError:
            raise Backpressure(f"no room in the window for {timeout:g} s", "the record was not taken") from None
        if intake.refusal is not None:
            raise fresh(intake.refusal)

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
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order."""

    def __init__(self, log: Log, core: ReaderCore) -> None:
        self._log = log
        self._ready = asyncio.Event()
        self._closed = False
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

    def seek(
        self, where: str | Position | None = None, *, seq: int | None = None, index: int | None = None,
        lane: int | None = None,
    ) -> None:  # fmt: skip
        """Go on from "earliest", "latest", a Position, the batch that holds a seq, or an index.

        Orders 0 and 1: a seq or an index is a place in one lane, so say which; the other lanes go on as they are.
        """
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        self._driver.seek(*seek_place(where, seq, index), lane)

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is. Orders 0 and 1: `positions()`."""
        return self._driver.core.position

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None until the cluster has told where that is."""
        return self._driver.core.positions()

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
