"""Publishers and subscribers for asyncio. A program opens them with `async with`, or awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from embarcadero.client.arguments import Moment, PublisherOptions, close_patience, seek_lookup, timeout_s
from embarcadero.client.brokers import BrokerPool
from embarcadero.client.reads import ReaderCore, SubscriberDriver, forked_reader, reader_state
from embarcadero.client.results import Batch, RecordFuture, TableResult, TopicInfo
from embarcadero.config.key import Duration
from embarcadero.errors import (
    Backpressure,
    Closed,
    EmbarcaderoError,
    OutcomeUnknown,
    TimedOut,
    fresh,
    invariant,
    raise_as_one,
)
from embarcadero.forks import tell_of_forks
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Position, StagedBatch, public_names

if TYPE_CHECKING:
    from embarcadero.client.intake import Sealed

# ruff: noqa: ASYNC109 - a timeout ends these calls with a typed error, so they take a `timeout` argument


Opened = TypeVar("Opened", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[Any, Any, Opened], Generic[Opened]):
    """The result of `connect`, `publisher` and `subscribe`, before it is open.

    `async with` opens it and closes it at the end of the block. After `await`, the program closes it.

    Example:
        async with log.publisher("orders") as publisher: ...
        publisher = await log.publisher("orders")
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Opened], what: str = "object") -> None:
        self._coroutine, self._what = coroutine, what
        self._opened: Opened | None = None

    def __repr__(self) -> str:
        return f"<Opening of a {self._what}: use it with 'async with', or await it>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("send", "throw", "close"))

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resume the coroutine, for `asyncio.run` and tasks."""
        return self._coroutine.send(value)

    def throw(self, *failure: Any) -> Any:
        """Raise an error inside the coroutine."""
        return self._coroutine.throw(*failure)

    def close(self) -> None:
        """Cancel the opening before it begins, or while it waits."""
        self._coroutine.close()

    async def __aenter__(self) -> Opened:
        opened: Opened = await self._coroutine
        self._opened = opened
        await opened.__aenter__()
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return None if self._opened is None else await self._opened.__aexit__(kind, error, trace)


class RecordAwaitable(RecordFuture):
    """The future position of a record. `await` it for the outcome; cancelling the wait does not cancel the record."""

    def __await__(self) -> Generator[Any, None, Position | None]:
        if not self._result.done:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            self._result.on_done(lambda: None if done.done() else done.set_result(None))
            yield from done
            self._result.waited_for()
        return self._outcome()


class Publisher:
    """Publishes records into one topic. Close it, or use it with `async with`: both wait for every outcome."""

    def __init__(
        self, brokers: BrokerPool, forget: Callable[[Publisher], None], topic: TopicInfo, options: PublisherOptions
    ) -> None:
        from embarcadero.client.intake import Pump  # programs that only read do not load it

        self._forget = forget
        self._pump = Pump(brokers, topic, options, RecordAwaitable)
        tell_of_forks(self)

    def __repr__(self) -> str:
        return f"<embarcadero.aio.Publisher into {self._pump.label}, {self._pump.state}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def _after_fork(self) -> None:
        """In a forked child, refuse every call. The session stays with the parent."""
        self._pump._after_fork()

    async def send(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: Any = None,
        *,
        timeout: Duration | None = None,
    ) -> RecordAwaitable:
        """Add a record to the current batch. Wait while the window is full.

        Topics with a schema and named sessions need `publish`.

        Args:
            value: The record.
            key: Chooses the partition. Records without a key rotate over the partitions.
            headers: Names and values.
            timestamp: A datetime with a time zone, or microseconds since 1970. None: now.
            timeout: Seconds to wait for space in the window. None: as long as the cluster is not full for
                `broker.backpressure_after_s`.

        Returns:
            A future. Its result is the `Position` of the record.

        Raises:
            Backpressure: There was no space in time. This record was not accepted; earlier records are not lost, and
                the publisher continues when there is space. The message has the cause.
            RecordsLost: Earlier records that were acked with ack=1 are lost. This record was not accepted. The error is
                raised once, and the publisher continues.
            Closed, or the error with which the publisher failed.

        Example:
            future = await publisher.send(b"two coffees", key=b"table 4", headers={"trace": b"1"})
            await future                        # Position(lane=0, index=17, seq=4242)
        """
        intake = self._pump.intake
        record, size = intake.checked(value, key, headers, timestamp)
        builder = intake.current  # only this event loop changes it
        if builder is None or size > builder.room:
            self._pump.raise_lost()
            intake.check_size(size)
            await self._room(timeout)
        with intake.lock:
            future = intake.add(record, size)
        if intake.news:
            self._pump.poke()
        invariant(isinstance(future, RecordAwaitable), "the intake creates RecordAwaitables")
        return future  # type: ignore[return-value]

    async def publish(
        self,
        data: Any,
        *,
        partition: int | None = None,
        session_seq: int | None = None,
        timeout: Duration | None = None,
    ) -> RecordAwaitable:
        """Publish rows. Wait while the window is full.

        The rows are checked against the topic's schema before they are sent. Columns may be in any order, and nullable
        columns may be missing. Arrow data must have exactly the types of the topic; other data is converted if nothing
        is lost. A topic without a schema accepts the column `value` and optionally `key`, `headers` and `timestamp`.

        A RecordBatch that fits a frame (8 MiB) stays one batch. Other data is split by `batch_bytes`, and batches of
        other publishers may come between.

        Args:
            data: A pyarrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, or a dict of columns.
            partition: The partition of all rows. None: by key.
            session_seq: The sequence that the first batch must get.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            One future. It completes when all rows are stored, with the `Position` of the first row.

        Raises:
            BadSchema: The data does not fit the schema. The message names the column and both types.
            OutOfSequence: The session has another next sequence than `session_seq`.
            Backpressure: There was no space in time, and no row was accepted.
            OutcomeUnknown: There was no space in time after some of the rows were accepted.
            RecordsLost: As for `send`.

        Example:
            await (await publisher.publish(pa.table({"symbol": ["EMB"], "price": [12.5]})))
            await publisher.publish([{"symbol": "EMB", "price": 12.5}, {"symbol": "ARC", "price": 3.25}])
            await publisher.publish(data_frame, partition=3)
        """
        timeout = timeout_s(timeout)
        self._pump.raise_lost()
        first = None if session_seq is None else await self._pump.first_sequence(timeout)
        intake, whole = self._pump.intake, TableResult(self._pump.intake.condition)
        for number, piece in enumerate(intake.pieces(data, partition)):
            try:
                await self._room(timeout, patient=number > 0)
            except Backpressure as error:
                if not number:
                    raise
                problem = f"only a part of the table was accepted: {error.message}"
                raise OutcomeUnknown(problem, "read the log to find out which rows are stored") from None
            with intake.lock:
                if session_seq is not None and first is not None and not number:
                    self._pump.continues(session_seq, first)
                intake.add_piece(piece)
            whole.add(piece.result)
            self._pump.poke()
        whole.complete()
        return RecordAwaitable(whole, 0)

    async def publish_encoded(
        self, payload: pa.Buffer, count: int, *, partition: int = 0, timeout: Duration | None = None
    ) -> RecordAwaitable:
        """Publish one batch that the caller has encoded, for programs that must know its bytes before it is sent.

        Nothing is checked here.

        Args:
            payload: The result of `encode_batch`, in the topic's schema.
            count: Number of records.
            partition: The partition of the batch.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            A future. Its result is the `Position` of the first record.

        Raises:
            Backpressure, RecordsLost: As for `send`.

        Example:
            await publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows)
        """
        timeout = timeout_s(timeout)
        self._pump.raise_lost()
        return await self._add_alone(self._pump.intake.encoded_piece(payload, count, partition), timeout)

    async def publish_reference(
        self, reference: StagedBatch, *, partition: int = 0, timeout: Duration | None = None
    ) -> RecordAwaitable:
        """Publish a batch that is staged in a topic of order 0 or 1. A broker copies its bytes inside the cluster.

        The batch uses one sequence of the session, and as much of the window as its bytes would.

        Args:
            reference: The result of `staged()` of the staged batch's future.
            partition: The partition of the batch.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            A future. It ends with BadReference if the staged batch is gone or differs from the reference, and with
            NotAvailable if the connected brokers have a version without references.

        Raises:
            Backpressure, RecordsLost: As for `send`.

        Example:
            staged = (await staging.publish_encoded(payload, count)).staged(schema=1)   # once it is awaited
            position = await (await publisher.publish_reference(staged))
        """
        timeout = timeout_s(timeout)
        self._pump.raise_lost()
        return await self._add_alone(self._pump.intake.reference_piece(reference, partition), timeout)

    async def _add_alone(self, piece: Sealed, timeout: Duration | None) -> RecordAwaitable:
        intake = self._pump.intake
        whole = TableResult(intake.condition)
        await self._room(timeout)
        with intake.lock:
            intake.add_piece(piece)
        whole.add(piece.result)
        self._pump.poke()
        whole.complete()
        return RecordAwaitable(whole, 0)

    async def next_session_seq(self, timeout: Duration | None = None) -> int:
        """Wait until the session is open, and return the sequence of its next batch.

        Raises:
            TimedOut: The session was not open in time.

        Example:
            async with log.publisher("orders", session="job-7") as publisher:
                done = await publisher.next_session_seq()     # the log has this number of batches
        """
        timeout = timeout_s(timeout)
        first = await self._pump.first_sequence(timeout)
        with self._pump.intake.lock:
            return self._pump.next_sequence(first)

    async def already_in(self, timeout: Duration | None = None) -> int:
        """Return how many sequences from `session_at` on an earlier holder of this session has used.

        The log has some or all of these batches.

        Raises:
            TimedOut: The session was not open in time.

        Example:
            async with log.publisher("orders", session="job-7", session_at=4096) as publisher:
                used = await publisher.already_in()           # 4096 to 4096 + used - 1 were used before
        """
        timeout = timeout_s(timeout)
        return await self._pump.already_in(timeout)

    async def _room(self, timeout: Duration | None, patient: bool = False) -> None:
        """Wait for space in the window. Raise the reason if the publisher accepts no record, now or permanently.

        A caller without a timeout is not `patient`: it does not wait for a cluster that has been full for too long.
        """
        timeout = timeout_s(timeout)
        intake, moved = self._pump.intake, self._pump.moved
        patient |= timeout is not None
        if self._waits(patient):
            try:
                async with asyncio.timeout(timeout):
                    while self._waits(patient):
                        moved.clear()
                        await moved.wait()
            except TimeoutError:
                full = f"the window had no space for {timeout:g} s, and the record was not accepted"
                raise fresh(intake.pressure or Backpressure(full, "send it again later")) from None
        if (why := intake.refusal or (None if patient else intake.pressure)) is not None:
            raise fresh(why)

    def _waits(self, patient: bool) -> bool:
        with self._pump.intake.lock:
            return self._pump.intake.waits(patient)

    async def flush(self, timeout: Duration | None = None) -> None:
        """Wait until every record so far has an outcome.

        Args:
            timeout: Seconds. None means no limit.

        Raises:
            TimedOut: Some records have no outcome yet.
            RecordsLost: Acked records are lost.
            EmbarcaderoError: The error with which the publisher failed.

        Example:
            await publisher.flush(timeout=10)
        """
        timeout = timeout_s(timeout)
        intake, moved = self._pump.intake, self._pump.moved
        with intake.lock:
            intake.seal()
            waiting = list(intake.unsettled)
        self._pump.poke()
        try:
            async with asyncio.timeout(timeout):
                while not all(result.done for result in waiting):
                    moved.clear()
                    await moved.wait()
        except TimeoutError:
            raise TimedOut(f"some records have no outcome after {timeout:g} s", "call flush again") from None
        self._pump.raise_problem()

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, then close. A second call does nothing.

        Args:
            timeout: Seconds. Later, the remaining records end with `OutcomeUnknown`. None means no limit.

        Raises:
            RecordsLost: Acked records are lost. If the publisher failed as well, its error is the cause.
            LossUnknown: The cluster is down, and no broker could answer in time whether records that were acked with
                ack=1 are lost.
            EmbarcaderoError: The error with which the publisher failed.

        Example:
            await publisher.close(timeout=5)
        """
        await self._end(timeout)
        raise_as_one(self._problems())

    async def _end(self, timeout: Duration | None) -> None:
        """Close without raising an error; `_problems` returns the errors."""
        timeout = timeout_s(timeout)
        await self._pump.close(timeout)
        self._forget(self)  # not reached when cancelled: closing the log then raises the errors

    def _problems(self) -> list[EmbarcaderoError]:
        """Return the losses that no caller has received yet, and the error with which the publisher failed."""
        return self._pump.problems()

    async def __aenter__(self) -> Publisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close(close_patience(error))
        except EmbarcaderoError as problem:
            if error is None:
                raise
            error.add_note(f"closing reported {type(problem).__name__}: {problem}")


class Subscriber:
    """Reads one topic in order, with bounded read-ahead.

    In a topic of order 0 or 1 it reads all lanes, each in its own order (`batch.lane`). `async for` returns batches
    until the subscriber is closed.
    """

    def __init__(self, brokers: BrokerPool, forget: Callable[[Subscriber], None], core: ReaderCore, topic: str) -> None:
        self._forget = forget
        self._ready = asyncio.Event()
        self._closed = False
        self._topic, self._forked = topic, False
        self._reader = SubscriberDriver(brokers, core, self._ready.set, topic=topic)
        tell_of_forks(self)

    def __repr__(self) -> str:
        state = reader_state(self._reader.core, {}, closed=self._closed, forked=self._forked)
        return f"<embarcadero.aio.Subscriber of topic {self._topic!r}, {state}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def _after_fork(self) -> None:
        """In a forked child, refuse every call. The position stays with the parent."""
        self._forked = True

    @property
    def _driver(self) -> SubscriberDriver:
        if self._forked:
            raise forked_reader(self._topic)
        return self._reader

    async def poll(self, timeout: Duration | None = None) -> Batch | None:
        """Return the next batch. A gap is a batch with `batch.gap`.

        Args:
            timeout: Seconds. None means no limit.

        Returns:
            A batch, or None if there was none in time.

        Raises:
            Closed: The subscriber is closed.
            TierUnavailable: A store did not answer for some seconds. The next poll continues at the same position.
            EmbarcaderoError: The error that ended the reading.

        Example:
            batch = await subscriber.poll(timeout=1.0)
        """
        timeout = timeout_s(timeout)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if self._closed:
                        raise Closed("the subscriber is closed", "subscribe again")
                    if not self.paused and (taken := self._driver.take(1)):
                        return taken[0]
                    if not self.paused and (failed := self._driver.core.failed) is not None:
                        self._driver.retry()  # the next poll continues, if the error allows it
                        raise fresh(failed)
                    self._ready.clear()
                    await self._ready.wait()
        except TimeoutError:
            return None

    def seek(
        self,
        where: str | Position | None = None,
        *,
        seq: int | None = None,
        index: int | None = None,
        time: Moment | None = None,
        lane: int | None = None,
    ) -> None:
        """Continue at another position. Give exactly one.

        Args:
            where: "earliest", "latest" or a `Position`.
            seq: Continue with the batch that contains this record.
            index: Continue with this batch.
            time: Continue with the first batch appended at or after this datetime (with a time zone).
            lane: In a topic of order 0 or 1, required with a seq or an index. The other lanes are not affected.

        Raises:
            BadValue: The position is not valid.

        Example:
            subscriber.seek(time=datetime.now(UTC) - timedelta(hours=1))
            subscriber.seek(seq=1_000, lane=4_097)
        """
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        self._driver.seek(*seek_lookup(where, seq, index, time), lane)

    @property
    def paused(self) -> bool:
        """Whether the subscriber is paused."""
        return self._driver.core.paused

    def pause(self) -> None:
        """Stop fetching and keep the position. Until `resume`, `poll` returns no batch.

        Example:
            subscriber.pause()      # while the disk is full, until subscriber.resume()
        """
        self._driver.pause()

    def resume(self) -> None:
        """Continue after `pause`, at the same position."""
        self._driver.resume()
        self._ready.set()

    def position(self) -> int | None:
        """Return the index of the next batch, or None while it is not known. For orders 0 and 1 use `positions()`."""
        return self._driver.core.position

    def positions(self) -> dict[int, int | None]:
        """Return, by lane, the index of the next batch, or None while it is not known."""
        return self._driver.core.positions()

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:  # noqa: ARG002 - nothing to wait for
        """Stop reading. A second call does nothing, and neither does a call in a forked child."""
        if self._forked:
            return
        self._closed = True
        self._forget(self)
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
        invariant(batch is not None, "a poll without a timeout returns a batch")
        return batch  # type: ignore[return-value]
