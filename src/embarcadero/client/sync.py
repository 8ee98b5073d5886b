"""The synchronous client: the calls of `aio`, for programs with threads or without.

One background thread per Log runs an event loop; everything here is thread-safe. `send` only appends to a list under a
lock; sealing, encoding and sending happen in the background thread. Ctrl-C gets through every wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client import aio
from embarcadero.client.batch import Batch
from embarcadero.client.drivers import ReaderCore, SubscriberDriver
from embarcadero.client.futures import RecordFuture, TableResult, fresh
from embarcadero.client.options import (
    PublisherArguments,
    PublisherOptions,
    check_read,
    check_timeout,
    place,
    seek_place,
)
from embarcadero.client.pump import Pump
from embarcadero.client.reading import reader_core
from embarcadero.client.thread import LoopThread
from embarcadero.errors import Backpressure, Closed, EmbarcaderoError, OutcomeUnknown, TimedOut
from embarcadero.limits import CLOSE_TIMEOUT_S, LOG_BYTES, REQUEST_TIMEOUT_S
from embarcadero.types import Position, Tail, Topic

_AT_ONCE = 256
Exit = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


def connect(addresses: str | Sequence[str]) -> Log:
    """Connect to a cluster by the addresses (`host:port`) of one or several of its brokers. Raises Unreachable."""
    thread = LoopThread()
    try:
        return Log(thread, thread.wait(aio.connect(addresses)))
    except BaseException:
        thread.stop()
        raise


def local(brokers: int = 4, *, replicas: int = 0, data_dir: str | None = None, log_bytes: int = LOG_BYTES) -> Log:
    """Start a private cluster in child processes and connect to it; closing the log stops it.

    `data_dir` keeps its files; without, nothing is left. `log.address` and `log.cluster` tell more.
    """
    from embarcadero.errors import NotAvailable
    from embarcadero.node.local import LocalCluster

    if replicas:
        raise NotAvailable("replicas come with a later version", "use replicas=0")
    cluster = LocalCluster(brokers, data_dir, log_bytes)
    try:
        log = connect(cluster.addresses)
    except BaseException:
        cluster.close()
        raise
    log.cluster = cluster
    return log


class Log:
    """A client of one cluster. Its publishers and subscribers share one thread and one connection per broker."""

    def __init__(self, thread: LoopThread, log: aio.Log) -> None:
        self.cluster: Any = None  # the LocalCluster that `local` started
        self.thread, self._log, self.brokers = thread, log, log.brokers
        self._parts: set[Publisher | Subscriber] = set()
        self._closed = False

    @property
    def address(self) -> str:
        """The addresses it was connected with, as `connect` takes them."""
        return self._log.address

    # --- topics ---
    def create_topic(
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
        return self.thread.wait(
            self._log.create_topic(
                name, order=order, partitions=partitions, replicas=replicas, durable_on=durable_on, schema=schema,
                on_gap=on_gap, gap_timeout_ms=gap_timeout_ms, timeout=timeout,
            )
        )  # fmt: skip

    def describe(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> Topic:
        """A topic's settings. Raises UnknownTopic."""
        return self.thread.wait(self._log.describe(topic, timeout=timeout))

    def topics(self, *, timeout: float = REQUEST_TIMEOUT_S) -> list[Topic]:
        """All topics."""
        return self.thread.wait(self._log.topics(timeout=timeout))

    def delete_topic(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> None:
        """Delete a topic with all its records. Raises UnknownTopic."""
        self.thread.wait(self._log.delete_topic(topic, timeout=timeout))

    def tail(self, topic: str, *, timeout: float = REQUEST_TIMEOUT_S) -> Tail:
        """Where the topic ends: everything acked before this call is below. Orders 0 and 1: `lanes` has each lane's."""
        return self.thread.wait(self._log.tail(topic, timeout=timeout))

    def status(self, *, timeout: float = REQUEST_TIMEOUT_S) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
        return self.thread.wait(self._log.status(timeout=timeout))

    # --- records ---
    def publisher(self, topic: str, **options: Unpack[PublisherArguments]) -> Publisher:
        """A publisher into a topic; it may be used by many threads. Raises UnknownTopic."""
        chosen = PublisherOptions(**options)
        return self._register(Publisher(self, self.thread.wait(self._pump(topic, chosen))))

    async def _pump(self, topic: str, options: PublisherOptions) -> Pump:
        return Pump(self.brokers, await self._log.describe(topic), options)

    def subscribe(
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
        wanted = None if partitions is None else list(partitions)
        return self._register(self.thread.wait(self._subscribe(topic, place(start), wanted)))

    async def _subscribe(self, topic: str, where: tuple[str, int], partitions: list[int] | None) -> Subscriber:
        return Subscriber(self, reader_core(self.brokers, await self._log.describe(topic), *where, partitions))

    def read(
        self, topic: str, start: int | None = None, end: int | None = None, *, lane: int | None = None,
        timeout: float = REQUEST_TIMEOUT_S,
    ) -> pa.Table:  # fmt: skip
        """Records with start <= seq < end as a table, with a column `_seq`; by default all there are now.

        A topic of order 0 or 1 is read lane by lane, with a column `_lane`; `start` and `end` then need `lane`.
        `timeout` is for each step of it. Raises FuturePosition beyond the end, NotAvailable for what is trimmed.
        """
        return self.thread.wait(self._log.read(topic, start, end, lane=lane, timeout=timeout))

    def _register(self, part: PartType) -> PartType:
        self._parts.add(part)
        return part

    def forget(self, part: Publisher | Subscriber) -> None:
        """A publisher or subscriber is closed."""
        self._parts.discard(part)

    def close(self) -> None:
        """Close all publishers and subscribers, hang up, and stop the cluster if it is a private one.

        Raises why a publisher failed, if one did. Closing twice is fine.
        """
        if self._closed:
            return
        self._closed = True
        failures: list[EmbarcaderoError] = []
        try:
            for part in list(self._parts):
                try:
                    part.close()
                except EmbarcaderoError as error:
                    failures.append(error)
            self.thread.wait(self._log.close())
        finally:
            self.thread.stop()
            if self.cluster is not None:
                self.cluster.close()
        if failures:
            raise failures[0]

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


class Publisher:
    """Publishes records into one topic; thread-safe. `with` it, or close it: closing waits for every outcome."""

    def __init__(self, log: Log, pump: Pump) -> None:
        self._log, self._thread, self._pump, self._intake = log, log.thread, pump, pump.intake
        self._lock, self._condition = pump.intake.lock, pump.intake.condition
        self._closed = False

    def send(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: Any = None,
        *,
        timeout: float | None = None,
    ) -> RecordFuture:
        """Take a record; waits while the window is full. The future's result is the record's Position.

        `timestamp` is a datetime with a time zone or microseconds since 1970; None: now. When there is no room within
        `timeout` seconds it raises Backpressure: the record was not taken.
        """
        intake = self._intake
        record, size = intake.checked(value, key, headers, timestamp)
        with self._lock:
            if intake.pending_bytes >= intake.window_bytes or intake.refusal is not None:
                self._room(timeout)
            future = intake.add(record, size)
            poke = intake.news and self._pump.needs_poke()
        if poke:
            self._thread.call(self._pump.poke)
        return future

    def publish(self, data: Any, *, partition: int | None = None, timeout: float | None = None) -> RecordFuture:
        """Take a pyarrow Table or RecordBatch; waits while the window is full.

        The future's result is the Position of the first record; it is there once all of the table is stored. A table
        that fits no frame becomes several batches, which other publishers' batches may come between.
        """
        intake, whole = self._intake, TableResult(self._condition)
        for number, piece in enumerate(intake.pieces(data, partition)):
            with self._condition:
                try:
                    self._room(timeout)
                except Backpressure as error:
                    if not number:
                        raise
                    raise OutcomeUnknown(f"a part of the table was taken: {error.message}", "read the log") from None
                whole.add(piece.result)
                intake.add_piece(piece)
                poke = self._pump.needs_poke()
            if poke:
                self._thread.call(self._pump.poke)
        whole.complete()
        return RecordFuture(whole, 0)

    def _room(self, timeout: float | None) -> None:
        """Wait until the window has room, with the condition held; raise why nothing is taken any more."""
        check_timeout(timeout)
        if not self._condition.wait_for(lambda: not self._intake.full, timeout):
            raise Backpressure(f"no room in the window for {timeout:g} s", "the record was not taken; try again")
        if self._intake.refusal is not None:
            raise fresh(self._intake.refusal)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything taken so far has its outcome. Raises TimedOut, or why the publisher failed."""
        check_timeout(timeout)
        with self._condition:
            self._intake.seal()
            waiting = list(self._intake.unsettled)
        self._thread.call(self._pump.poke)
        with self._condition:
            if not self._condition.wait_for(lambda: all(result.done for result in waiting), timeout):
                raise TimedOut(f"not everything was settled within {timeout:g} s", "flush again")
        self._raise_failure()

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, at most `timeout` seconds; what is left then has an unknown outcome.

        Raises why the publisher failed, if it did. Closing twice is fine.
        """
        check_timeout(timeout)
        if self._closed:
            return
        self._closed = True
        self._log.forget(self)
        self._thread.wait(self._pump.close(timeout))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if (failed := self._pump.driver.core.failed) is not None:
            raise fresh(failed)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


class Subscriber:
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order (`batch.lane`).

    The background thread fetches ahead, within bounds.
    """

    def __init__(self, log: Log, core: ReaderCore) -> None:
        """To be called in the background thread."""
        self._log, self._thread = log, log.thread
        self._condition = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._error: EmbarcaderoError | None = None
        self._closed = False
        self._driver = SubscriberDriver(log.brokers, core, self._refill)

    def _refill(self) -> None:
        """In the background thread: hand over what was fetched, once the last of it is taken."""
        with self._condition:
            if not self._ready and not self._closed:
                self._ready.extend(self._driver.take(_AT_ONCE))
                self._error = None if self._ready else self._driver.core.failed
                self._condition.notify_all()

    def poll(self, timeout: float | None = None) -> Batch | None:
        """The next batch (or typed gap: `batch.gap`); None when none came in time. Raises what ended the reading."""
        check_timeout(timeout)
        with self._condition:
            if not self._condition.wait_for(self._has_news, timeout):
                return None
            if self._closed:
                raise Closed("the subscriber is closed", "subscribe again")
            if not self._ready and self._error is not None:
                raise fresh(self._error)
            batch = self._ready.popleft()
            if not self._ready:
                self._thread.call(self._refill)
            return batch

    def _has_news(self) -> bool:
        return bool(self._ready) or self._closed or self._error is not None

    def seek(
        self, where: str | Position | None = None, *, seq: int | None = None, index: int | None = None,
        lane: int | None = None,
    ) -> None:  # fmt: skip
        """Go on from "earliest", "latest", a Position, the batch that holds a seq, or an index.

        Orders 0 and 1: a seq or an index is a place in one lane, so say which; the other lanes go on as they are.

            subscriber.seek(seq=1_000, lane=4_097)
        """
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        self._thread.wait(self._seek(*seek_place(where, seq, index), lane))

    async def _seek(self, by: str, value: int, lane: int | None) -> None:
        self._driver.seek(by, value, lane)
        with self._condition:
            self._ready = deque(batch for batch in self._ready if lane is not None and batch.lane != lane)
            self._error = None
        self._refill()

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is. Orders 0 and 1: `positions()`."""
        with self._condition:
            place = self._driver.core.position
            return self._ready[0].index if self._ready else place

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None until the cluster has told where that is."""
        with self._condition:
            ahead = {batch.lane: batch.index for batch in reversed(self._ready)}
            return self._driver.core.positions() | ahead

    def close(self) -> None:
        """Stop reading. Closing twice is fine."""
        with self._condition:
            self._closed = True
            self._ready.clear()
            self._condition.notify_all()
        self._log.forget(self)
        self._thread.call(self._driver.stop)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        """Batches, waiting for each; ends when the subscriber is closed."""
        while True:
            try:
                batch = self.poll()
            except Closed:
                return
            if batch is not None:
                yield batch


PartType = TypeVar("PartType", Publisher, Subscriber)


def _close_after(part: Log | Publisher, error: BaseException | None) -> None:
    """Close; a failure to close is not to hide the error that ended the block."""
    try:
        part.close()
    except EmbarcaderoError:
        if error is None:
            raise


__all__ = ["Log", "Publisher", "Subscriber", "connect", "local"]
