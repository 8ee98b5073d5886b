"""Publishers and subscribers for asyncio, and how they are opened: with `async with`, or by awaiting."""

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

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`


Opened = TypeVar("Opened", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[Any, Any, Opened], Generic[Opened]):
    """What a call opens. `async with` it, and it is closed at the end of the block; or await it, and close it yourself.

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
        """Go on: it is a coroutine, for `asyncio.run` and tasks."""
        return self._coroutine.send(value)

    def throw(self, *failure: Any) -> Any:
        """Raise an error inside."""
        return self._coroutine.throw(*failure)

    def close(self) -> None:
        """Give it up before it has begun, or while it waits."""
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
    """`await` it to wait for the outcome; cancelling the wait does not take the record back."""

    def __await__(self) -> Generator[Any, None, Position | None]:
        if not self._result.done:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()
            self._result.on_done(lambda: None if done.done() else done.set_result(None))
            yield from done
            self._result.waited_for()
        return self._outcome()


class Publisher:
    """Publishes records into one topic. `async with` it, or close it: closing waits for every outcome."""

    def __init__(
        self, brokers: BrokerPool, forget: Callable[[Publisher], None], topic: TopicInfo, options: PublisherOptions
    ) -> None:
        from embarcadero.client.intake import Pump  # not for those who only read

        self._forget = forget
        self._pump = Pump(brokers, topic, options, RecordAwaitable)
        tell_of_forks(self)

    def __repr__(self) -> str:
        return f"<embarcadero.aio.Publisher into {self._pump.label}, {self._pump.state}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def _after_fork(self) -> None:
        """In a forked child: refuse every call. The session is the parent's."""
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
        """Take a record; waits while the window is full. Returns a future, whose result is the record's Position.

        `timestamp` is a datetime with a time zone or microseconds since 1970; None: now. When there is no room within
        `timeout` seconds it raises Backpressure: the record was not taken. Without a `timeout` it does so once the
        cluster has had no room for `broker.backpressure_after_s`; the message says why, what was taken before is not
        lost, and the publisher goes on when there is room. Topics with a schema and named sessions need `publish`.
        Raises RecordsLost, once, when earlier records are lost that were acked with ack=1; this one was not
        taken, and the publisher goes on.

            future = await publisher.send(b"two coffees", key=b"table 4", headers={"trace": b"1"})
            await future                        # Position(lane=0, index=17, seq=4242)
        """
        intake = self._pump.intake
        record, size = intake.checked(value, key, headers, timestamp)
        builder = intake.current  # this loop is the only one to change it
        if builder is None or size > builder.room:
            self._pump.raise_lost()
            intake.check_size(size)
            await self._room(timeout)
        with intake.lock:
            future = intake.add(record, size)
        if intake.news:
            self._pump.poke()
        invariant(isinstance(future, RecordAwaitable), "the intake makes our futures")
        return future  # type: ignore[return-value]

    async def publish(
        self,
        data: Any,
        *,
        partition: int | None = None,
        session_seq: int | None = None,
        timeout: Duration | None = None,
    ) -> RecordAwaitable:
        """Take rows: a pyarrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, a dict of columns.

        They are checked against the topic's schema before anything is sent (BadSchema names the column and both types);
        columns may be in any order, and those that may be null may be missing. Arrow must have the topic's very types;
        everything else is converted where that loses nothing. Without a schema a topic takes `value`, and if you like
        `key`, `headers` and `timestamp`.

        A RecordBatch that fits a frame (8 MiB) stays one batch; everything else is cut by `batch_bytes`, and other
        publishers' batches may come between. There is one future: its result is the Position of the first record, there
        once all of the rows are stored. Waits while the window is full. `session_seq` says which batch of the session
        the first one must become; OutOfSequence when another one is next.

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
                raise OutcomeUnknown(f"a part of the table was taken: {error.message}", "read the log") from None
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
        """Take one batch of `count` records that is encoded already, by `encode_batch` and the topic's schema.

        For those who have to know the very bytes before they are sent; nothing is checked here.

            await publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows)
        """
        timeout = timeout_s(timeout)
        self._pump.raise_lost()
        return await self._add_alone(self._pump.intake.encoded_piece(payload, count, partition), timeout)

    async def publish_reference(
        self, reference: StagedBatch, *, partition: int = 0, timeout: Duration | None = None
    ) -> RecordAwaitable:
        """Publish a batch that is staged in a topic of order 0 or 1 of this cluster: its bytes are copied there.

        `reference` is what `staged()` of its future returned. The batch has one sequence of the session, like any
        other, and takes as much of the window. The future ends with BadReference if the staged batch is not there or
        is another one, and with NotAvailable if the connected brokers are of a version without references.

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
        """The sequence that the next batch of this session gets; waits until the session is open.

            async with log.publisher("orders", session="job-7") as publisher:
                done = await publisher.next_session_seq()     # so many batches are in the log already
        """
        timeout = timeout_s(timeout)
        first = await self._pump.first_sequence(timeout)
        with self._pump.intake.lock:
            return self._pump.next_sequence(first)

    async def already_in(self, timeout: Duration | None = None) -> int:
        """How many sequences from `session_at` on an earlier holder of this session has used.

            async with log.publisher("orders", session="job-7", session_at=4096) as publisher:
                done = await publisher.already_in()           # batches 4096 to 4096 + done are in, or some of them
        """
        timeout = timeout_s(timeout)
        return await self._pump.already_in(timeout)

    async def _room(self, timeout: Duration | None, patient: bool = False) -> None:
        """Wait until there is room; raise why nothing is taken, now or any more.

        A caller that gave no time is not `patient`: it does not wait for a cluster that has been full for long.
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
                full = f"no room in the window for {timeout:g} s"
                raise fresh(intake.pressure or Backpressure(full, "the record was not taken")) from None
        if (why := intake.refusal or (None if patient else intake.pressure)) is not None:
            raise fresh(why)

    def _waits(self, patient: bool) -> bool:
        with self._pump.intake.lock:
            return self._pump.intake.waits(patient)

    async def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything taken so far has its outcome. Raises TimedOut, RecordsLost, or why it failed.

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
            raise TimedOut(f"not everything was settled within {timeout:g} s", "flush again") from None
        self._pump.raise_problem()

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, at most `timeout` seconds; what is left then has an unknown outcome.

        Raises RecordsLost, or why the publisher failed, if it did; if both, the failure is the cause of the
        RecordsLost. Raises LossUnknown if records were acked with ack=1 and no broker could say in time whether they
        are lost (the cluster is down). Closing twice is fine.
        """
        await self._end(timeout)
        raise_as_one(self._problems())

    async def _end(self, timeout: Duration | None) -> None:
        """Close without raising what there is to report: `_problems` has it."""
        timeout = timeout_s(timeout)
        await self._pump.close(timeout)
        self._forget(self)  # not if it was cancelled: closing the log then raises what there is to report

    def _problems(self) -> list[EmbarcaderoError]:
        """What no caller was told yet, and why the publisher failed."""
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
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order (`batch.lane`).

    It fetches ahead, within bounds.
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
        """In a forked child: refuse every call. The position is the parent's."""
        self._forked = True

    @property
    def _driver(self) -> SubscriberDriver:
        if self._forked:
            raise forked_reader(self._topic)
        return self._reader

    async def poll(self, timeout: Duration | None = None) -> Batch | None:
        """The next batch (or typed gap: `batch.gap`); None when none came in time. Raises what ended the reading.

        TierUnavailable names a store that could not be reached for some seconds; polling again goes on.

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
                        self._driver.retry()  # the next poll goes on, if that may help
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
        """Go on from "earliest", "latest", a Position, the batch that holds a seq, an index, or the first since a time.

        Orders 0 and 1: a seq or an index is a place in one lane, so say which; the other lanes go on as they are.

            subscriber.seek(time=datetime.now(UTC) - timedelta(hours=1))
            subscriber.seek(seq=1_000, lane=4_097)
        """
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        self._driver.seek(*seek_lookup(where, seq, index, time), lane)

    @property
    def paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        return self._driver.core.paused

    def pause(self) -> None:
        """Stop fetching and keep the position: until `resume`, polls end with their timeout.

            subscriber.pause()      # while the disk is full; subscriber.resume() goes on
        """
        self._driver.pause()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._driver.resume()
        self._ready.set()

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is. Orders 0 and 1: `positions()`."""
        return self._driver.core.position

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None until the cluster has told where that is."""
        return self._driver.core.positions()

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:  # noqa: ARG002 - nothing to wait for
        """Stop reading. Closing twice is fine; in a forked child it does nothing."""
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
        invariant(batch is not None, "a poll without a time limit ends with a batch")
        return batch  # type: ignore[return-value]
