"""The handwritten part of the synchronous client: its background thread, and base classes of the generated classes.

Everything here is thread-safe. One background thread per Log runs an event loop for the log's publishers and
subscribers. `send` only appends to a list under a lock. The background thread seals, encodes and sends batches. Ctrl-C
interrupts every wait.

`make faces` generates `sync_log`. A call `x` there is the method `_x` of the base class here if it exists. Otherwise it
runs the coroutine `x` of the asyncio client in the background thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from time import monotonic
from time import time as now_s
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import pyarrow as pa

from embarcadero.client import lifetime
from embarcadero.client.api import aio_log
from embarcadero.client.arguments import (
    Moment,
    PublisherArguments,
    StartPosition,
    Timeout,
    check_read,
    close_patience,
    patience_s,
    publisher_options,
    seek_lookup,
    start_lookup,
    timeout_s,
)
from embarcadero.client.reads import LaneSpan, ReaderCore, SubscriberDriver, forked_reader, reader_core, reader_state
from embarcadero.client.results import Batch, RecordFuture, TableResult, TopicInfo, Waitable
from embarcadero.config.key import Duration
from embarcadero.errors import (
    Backpressure,
    Closed,
    EmbarcaderoError,
    OutcomeUnknown,
    Retriable,
    TimedOut,
    as_reported,
    fresh,
    raise_as_one,
)
from embarcadero.forks import abandon, blank, tell_of_forks
from embarcadero.limits import RECORD_OVERHEAD_BYTES
from embarcadero.types import Position, StagedBatch, public_names

if TYPE_CHECKING:
    from embarcadero.client.encoding import GivenRecord
    from embarcadero.client.intake import Pump, Sealed

Result = TypeVar("Result")
_JOIN_S = 5.0
_LOOK_S = 1.0  # how often a waiting caller checks that the background thread is alive
_AHEAD = 256  # batches that are handed over to a subscriber's caller in one step
Exit = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class _Call(Generic[Result]):
    """A coroutine that a caller waits for. It uses only locks written in C: see `Waitable`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Result] | None = None
        self._given_up = False
        self.ended = allocate_lock()
        self.ended.acquire()

    # --- event loop ---
    def start(self) -> None:
        if self._given_up:
            self._coroutine.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self.ended.release())

    def give_up(self) -> None:
        self._given_up = True
        if self._task is not None:
            self._task.cancel()

    # --- caller, once it has ended ---
    def result(self) -> Result:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            return self._task.result()
        if self._task is None:
            self._coroutine.close()  # the loop ended before it started this call
        raise Closed("the log was closed during the call", "connect again")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop of uvloop if it is installed: it has no build for Windows."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _waiting_descriptor(loop: asyncio.AbstractEventLoop) -> int | None:
    """Return the descriptor on which an event loop waits (epoll, kqueue). None: no descriptor is shared by a fork."""
    backend = getattr(loop, "_get_backend_id", None)  # uvloop
    backend = backend or getattr(getattr(loop, "_selector", None), "fileno", None)  # asyncio
    return None if backend is None else int(backend())


class LoopThread:
    """A daemon thread that runs an event loop until stopped."""

    def __init__(self) -> None:
        self.alive = True  # Thread.is_alive is wrong after an interrupt (Python 3.11)
        self._at_end: Callable[[], object] = lambda: None  # called in the loop before the loop ends
        self._after_end: Callable[[], object] = lambda: None  # called in the thread after the loop has ended
        self._start()
        tell_of_forks(self)

    def _start(self) -> None:
        self._loop = _new_event_loop()
        self._over = allocate_lock()
        self._over.acquire()
        self._ending = False
        self._lapsed: Any = None  # after a fork: guards the start of another thread
        self._thread = threading.Thread(target=self._run, name="embarcadero-client", daemon=True)
        self._thread.start()

    def _after_fork(self) -> None:
        """In a forked child the thread does not exist. The first call there starts another, with its own event loop."""
        if self.alive:
            abandon(self._loop, self._thread)
            if (descriptor := _waiting_descriptor(self._loop)) is not None:
                blank(descriptor)
            self._after_end = lambda: None
            self._lapsed = allocate_lock()

    def when_over(self, at_end: Callable[[], object], after_end: Callable[[], object]) -> None:
        """Register functions for the end: the first runs in the loop, the second in the thread without a loop."""
        self._at_end, self._after_end = at_end, after_end

    @property
    def lapsed(self) -> bool:
        """Whether the process was forked, and the child has made no call yet."""
        return self._lapsed is not None

    def _start_again(self) -> None:
        if (lock := self._lapsed) is not None:
            with lock:
                if self._lapsed is lock and self.alive:
                    self._start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_tasks()
            self._at_end()
            self._loop.run_until_complete(asyncio.sleep(0))  # closes connections that were dropped
            self._cancel_tasks()  # of calls that arrived in the meantime
            self._loop.close()
            self.alive = False
            self._over.release()
            self._after_end()

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a function in the loop, without waiting for it. After the end this does nothing."""
        if self._lapsed is not None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and wait for it. Ctrl-C cancels the coroutine and interrupts the wait."""
        if not self.alive:
            coroutine.close()
            raise Closed("the log is closed", "connect again")
        self._start_again()
        call = _Call(coroutine)
        try:
            self.call(call.start)
            while self.alive and not call.ended.acquire(True, _LOOK_S):
                continue
            return call.result()
        except BaseException:
            self.call(call.give_up)
            raise

    def end(self) -> None:
        """End the loop. Runs in the loop."""
        if not self._ending:
            self._ending = True
            self._loop.stop()

    def stop(self) -> None:
        """End the loop and the thread."""
        if self._lapsed is not None:
            self.alive = False
            return
        self.call(self.end)
        if threading.current_thread() is not self._thread and self._over.acquire(True, _JOIN_S):
            self._over.release()  # so that a second stop does not wait


def opened(coroutine: Coroutine[Any, Any, aio_log.Log]) -> tuple[LoopThread, aio_log.Log]:
    """Start a background thread and open an asyncio client there."""
    thread = LoopThread()
    try:
        return thread, thread.wait(coroutine)
    except BaseException:
        thread.stop()
        raise


class ThreadedLog:
    """The part of a Log about its background thread and its end. `thread` runs the asyncio client."""

    def __init__(self, thread: LoopThread, log: aio_log.Log) -> None:
        self.thread, self._log, self.brokers = thread, log, log.brokers
        self.cluster = log.cluster
        thread.when_over(log.brokers.hang_up, (lambda: None) if log.cluster is None else log.cluster.close)
        self._parts: set[ThreadedPublisher | ThreadedSubscriber] = set()
        self._closed = False
        log._finalizer.detach()
        self._finalizer = lifetime.close_when_dropped(self, log.brokers, thread.end)
        tell_of_forks(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed or self.ended else self.brokers.state
        return f"<embarcadero.Log of {self._log.address}, {state}>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("brokers", "thread"))

    def _after_fork(self) -> None:
        """In a forked child, connect again with the first call. Only the parent keeps publishers and subscribers."""
        self._parts = set()
        self._finalizer.detach()

    def run(self, call: Callable[[aio_log.Log], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine of the asyncio client on this log's event loop, and wait for it.

        Args:
            call: A function from the asyncio client to a coroutine.

        Returns:
            The result of the coroutine.

        Raises:
            Closed: The log is closed.

        Example:
            held = log.run(lambda twin: twin.held_name("orders", "job-7/progress"))
        """
        return self.thread.wait(call(self._log))

    @property
    def twin(self) -> aio_log.Log:
        """The asyncio client below this one. Its coroutines run on the background thread: see `run`."""
        return self._log

    @property
    def ended(self) -> bool:
        """Whether this log was closed, or its thread has died. Every call then raises Closed."""
        return not self.thread.alive

    # --- publishers, subscribers, scans ---
    def _open_publisher(
        self, kind: type[PublisherType], topic: str | TopicInfo, options: PublisherArguments, timeout: Timeout
    ) -> PublisherType:
        chosen = publisher_options(self.brokers.settings, options)

        async def pump() -> Pump:
            from embarcadero.client.intake import Pump  # programs that only read do not load it

            known = topic if isinstance(topic, TopicInfo) else await self._log.describe(topic, timeout=timeout)
            await self.brokers.ready(patience_s(timeout, self.brokers.settings.connect_timeout_s))
            return Pump(self.brokers, known, chosen)

        publisher = kind(self, self.thread.wait(pump()))
        self._parts.add(publisher)
        return publisher

    def _open_subscriber(
        self,
        kind: type[SubscriberType],
        topic: str,
        start: StartPosition,
        read: str,
        partitions: Sequence[int] | None,
        group: str | None,
        timeout: Timeout,
    ) -> SubscriberType:
        check_read(read, group)
        wanted, where = None if partitions is None else list(partitions), start_lookup(start)

        async def subscriber() -> SubscriberType:
            described = await self._log.describe(topic, timeout=timeout)
            return kind(self, reader_core(self.brokers, described, where, read, wanted), described.name)

        opened = self.thread.wait(subscriber())
        self._parts.add(opened)
        return opened

    def _scan(
        self,
        topic: str,
        *,
        lane: int | None,
        start: int | None,
        stop: int | None,
        read: str,
        partitions: Sequence[int] | None,
        control: bool,
        timeout: Timeout,
    ) -> Iterator[list[Batch]]:
        wanted = None if partitions is None else list(partitions)
        return self._scanned(topic, lane, LaneSpan(start, stop, read, wanted, control).checked(), timeout)

    def _scanned(self, topic: str, lane: int | None, span: LaneSpan, timeout: Timeout) -> Iterator[list[Batch]]:
        scan = self.thread.wait(self._log._begin_scan(topic, lane, span, timeout))
        try:
            while taken := self.thread.wait(scan.next()):
                yield taken
        finally:
            self.thread.call(lambda: self._log._end_scan(scan))

    def _forget(self, part: ThreadedPublisher | ThreadedSubscriber) -> None:
        """Remove a closed publisher or subscriber."""
        self._parts.discard(part)

    # --- the end ---
    def _close(self, timeout: Duration | None) -> None:
        """Close. Ctrl-C ends the wait; another call continues the closing."""
        timeout = timeout_s(timeout)
        if self._closed:
            return
        try:
            self._closed = True
            problems = self._end(timeout)
        except BaseException:
            self._closed = not self.thread.alive  # after an early Ctrl-C the caller may close again
            raise
        raise_as_one(problems)

    def _end(self, timeout: float | None) -> list[EmbarcaderoError]:
        self._finalizer.detach()
        if self.thread.lapsed:  # in a forked child that never used it
            self.thread.stop()
            return []
        self.thread.when_over(self.brokers.hang_up, lambda: None)  # the cluster is stopped here
        try:
            problems = self.thread.wait(self._close_parts(timeout))
        finally:
            try:
                self.thread.stop()
            finally:
                if self.cluster is not None:
                    self.cluster.close()
        return problems

    async def _close_parts(self, patience: float | None) -> list[EmbarcaderoError]:
        """Close all publishers and subscribers concurrently, then disconnect. Return losses and failures."""
        publishers = [part for part in self._parts if isinstance(part, ThreadedPublisher)]

        async def close(subscriber: ThreadedSubscriber) -> None:
            subscriber._close(None)

        closed = [close(part) for part in self._parts if isinstance(part, ThreadedSubscriber)]
        closed += [publisher.pump.close(patience) for publisher in publishers]
        ended = await asyncio.gather(*closed, return_exceptions=True)
        ended += await asyncio.gather(self._log.close(patience), return_exceptions=True)
        problems = [problem for publisher in publishers for problem in publisher.pump.problems()]
        failures = [as_reported(error) for error in ended if isinstance(error, Exception)]
        if not publishers:
            return failures
        from embarcadero.client.session import losses_first

        return losses_first(problems + failures)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


class ThreadedPublisher:
    """The thread-safe part of a Publisher: it accepts records, and waits for space and for outcomes."""

    def __init__(self, log: ThreadedLog, pump: Pump) -> None:
        self._log, self._thread, self.pump, self._intake = log, log.thread, pump, pump.intake
        self._lock, self._condition, self._future = pump.intake.lock, pump.intake.condition, pump.intake.future
        self._closed = False
        tell_of_forks(self)

    def __repr__(self) -> str:
        return f"<embarcadero.Publisher into {self.pump.label}, {self.pump.state}>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("pump",))

    def _after_fork(self) -> None:
        """In a forked child, refuse every call. The session stays with the parent."""
        self.pump._after_fork()
        self._lock = self._condition.lock
        self._closed = True

    def send(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: Any = None,
        *,
        timeout: Duration | None = None,
    ) -> RecordFuture:
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
            future = publisher.send(b"two coffees", key=b"table 4", headers={"trace": b"1"})
            future.result()                        # Position(lane=0, index=17, seq=4242)
        """
        intake = self._intake
        plain = key is None and headers is None and timestamp is None and type(value) is bytes
        if plain:
            record: GivenRecord = (value, now_s(), None, None)
            size = len(value) + RECORD_OVERHEAD_BYTES
        else:
            record, size = intake.checked(value, key, headers, timestamp)
        with self._lock:
            builder = intake.current
            if builder is not None and size <= builder.room:  # the hot path: nearly every record
                builder.room -= size
                if not plain:
                    builder.plain = False
                records = builder.records
                number = len(records)
                records.append(record)
                return self._future(builder.result, number)
        return self._send_first(record, size, timeout)

    def _send_first(self, record: GivenRecord, size: int, timeout: Duration | None) -> RecordFuture:
        """Send a record that does not fit the open batch, or when no batch is open."""
        self.pump.raise_lost()
        intake = self._intake
        intake.check_size(size)
        while True:
            with self._lock:
                if intake.refusal is None and not intake.waits(patient=True):
                    future = intake.add(record, size)
                    if intake.news:
                        self.pump.wake(self._thread.call)
                    return future
            timeout = self._room(timeout)

    def _publish(
        self, data: Any, *, partition: int | None, session_seq: int | None, timeout: Duration | None
    ) -> RecordFuture:
        timeout = timeout_s(timeout)
        self.pump.raise_lost()
        first = None if session_seq is None else self._thread.wait(self.pump.first_sequence(timeout))
        intake, whole = self._intake, TableResult(self._condition)
        for number, piece in enumerate(intake.pieces(data, partition)):
            claim = None if number or session_seq is None or first is None else (session_seq, first)
            try:
                self._add_piece(piece, whole, claim, timeout, patient=number > 0)
            except Backpressure as error:
                if not number:
                    raise
                problem = f"only a part of the table was accepted: {error.message}"
                raise OutcomeUnknown(problem, "read the log to find out which rows are stored") from None
        whole.complete()
        return RecordFuture(whole, 0)

    def _publish_encoded(
        self, payload: pa.Buffer, count: int, *, partition: int, timeout: Duration | None
    ) -> RecordFuture:
        timeout = timeout_s(timeout)
        self.pump.raise_lost()
        return self._add_alone(self._intake.encoded_piece(payload, count, partition), timeout)

    def _publish_reference(self, reference: StagedBatch, *, partition: int, timeout: Duration | None) -> RecordFuture:
        timeout = timeout_s(timeout)
        self.pump.raise_lost()
        return self._add_alone(self._intake.reference_piece(reference, partition), timeout)

    def _add_alone(self, piece: Sealed, timeout: Duration | None) -> RecordFuture:
        whole = TableResult(self._condition)
        self._add_piece(piece, whole, None, timeout)
        whole.complete()
        return RecordFuture(whole, 0)

    def _add_piece(
        self,
        piece: Sealed,
        whole: TableResult,
        claim: tuple[int, int] | None,
        timeout: Duration | None,
        patient: bool = False,
    ) -> None:
        """Add a piece of a table as soon as the window has space. `claim` is the sequence that it must get."""
        while True:
            timeout = self._room(timeout, patient)
            with self._lock:
                if self._intake.waits(patient=True) or self._intake.refusal is not None:
                    continue
                if claim is not None:
                    self.pump.continues(*claim)
                whole.add(piece.result)
                self._intake.add_piece(piece)
                self.pump.wake(self._thread.call)
                return

    def _next_session_seq(self, timeout: Duration | None) -> int:
        timeout = timeout_s(timeout)
        first = self._thread.wait(self.pump.first_sequence(timeout))
        with self._lock:
            return self.pump.next_sequence(first)

    def _already_in(self, timeout: Duration | None) -> int:
        timeout = timeout_s(timeout)
        return self._thread.wait(self.pump.already_in(timeout))

    def _room(self, timeout: Duration | None, patient: bool = False) -> float | None:
        """Wait for space in the window, and return the remaining time.

        Raise the reason if the publisher accepts no record, now or permanently. A caller without a timeout is not
        `patient`: it does not wait for a cluster that has been full for too long.
        """
        timeout = timeout_s(timeout)
        began, intake = monotonic(), self._intake
        patient |= timeout is not None
        if not self._condition.wait_for(lambda: not intake.waits(patient), timeout):
            full = f"the window had no space for {timeout:g} s, and the record was not accepted"
            raise fresh(intake.pressure or Backpressure(full, "send it again later"))
        if (why := intake.refusal or (None if patient else intake.pressure)) is not None:
            raise fresh(why)
        return None if timeout is None else max(0.0, timeout - (monotonic() - began))

    def _flush(self, timeout: Duration | None) -> None:
        timeout = timeout_s(timeout)
        with self._lock:
            self._intake.seal()
            waiting = list(self._intake.unsettled)
        self._thread.call(self.pump.poke)
        if not self._condition.wait_for(lambda: not [result for result in waiting if not result.done], timeout):
            raise TimedOut(f"some records have no outcome after {timeout:g} s", "call flush again")
        self.pump.raise_problem()

    def _close(self, timeout: Duration | None) -> None:
        timeout = timeout_s(timeout)
        if self._closed or not self._thread.alive:
            return
        try:
            self._closed = True
            self._thread.wait(self.pump.close(timeout))
            self._log._forget(self)
        except BaseException:
            self._closed = False  # after Ctrl-C, another close (of this or of the log) waits for the records
            raise
        self.pump.raise_problem()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


class ThreadedSubscriber:
    """The thread-safe part of a Subscriber: the background thread reads ahead, the caller takes batches."""

    def __init__(self, log: ThreadedLog, core: ReaderCore, topic: str) -> None:
        """Create it. Runs in the background thread."""
        self._log, self._thread = log, log.thread
        self._condition = Waitable()
        self._lock = self._condition.lock
        self._paused = False
        self._ready: deque[Batch] = deque()
        self._error: EmbarcaderoError | None = None
        self._closed = False
        self._topic, self._forked = topic, False
        self._driver = SubscriberDriver(log.brokers, core, self._refill, topic=topic)
        tell_of_forks(self)

    def __repr__(self) -> str:
        ahead = {batch.lane: batch.index for batch in reversed(list(self._ready))}
        state = reader_state(self._driver.core, ahead, closed=self._closed, forked=self._forked)
        return f"<embarcadero.Subscriber of topic {self._topic!r}, {state}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def _after_fork(self) -> None:
        """In a forked child, refuse every call. The position stays with the parent."""
        self._forked = True
        self._condition.refuse(forked_reader(self._topic))
        self._lock = self._condition.lock

    def _refill(self) -> None:
        """Hand over fetched batches once the caller has taken the earlier ones. Runs in the background thread."""
        with self._lock:
            if not self._ready and not self._closed:
                self._ready.extend(self._driver.take(_AHEAD))
                self._error = None if self._ready else self._driver.core.failed
                self._condition.notify_all()

    def _poll(self, timeout: Duration | None = None) -> Batch | None:
        timeout = timeout_s(timeout)
        give_up = None if timeout is None else monotonic() + timeout
        while True:
            with self._lock:
                if self._closed:
                    raise Closed("the subscriber is closed", "subscribe again")
                if self._ready and not self._paused:
                    return self._take()
                if self._error is not None and not self._paused:
                    raise self._failure(self._error)
            left = None if give_up is None else max(0.0, give_up - monotonic())
            if not self._condition.wait_for(self._has_news, left):
                return None

    def _failure(self, error: EmbarcaderoError) -> EmbarcaderoError:
        """Return an error for the caller. After a retriable one, the next poll continues."""
        if isinstance(error, Retriable):
            self._error = None
            self._thread.call(self._driver.retry)
        return fresh(error)

    def _take(self) -> Batch:
        if len(self._ready) == 1:
            self._thread.call(self._refill)  # _refill waits for the lock, so the deque is empty when it runs
        return self._ready.popleft()

    def _has_news(self) -> bool:
        return self._closed or (not self._paused and (bool(self._ready) or self._error is not None))

    def _seek(
        self,
        where: str | Position | None,
        *,
        seq: int | None,
        index: int | None,
        time: Moment | None,
        lane: int | None,
    ) -> None:
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        with self._lock:
            pass  # raises in a forked child
        self._thread.wait(self._seek_there(*seek_lookup(where, seq, index, time), lane))

    def _pause(self) -> None:
        with self._lock:
            self._paused = True
        self._thread.call(self._driver.pause)

    def _resume(self) -> None:
        with self._lock:
            self._paused = False
            self._condition.notify_all()
        self._thread.call(self._driver.resume)

    async def _seek_there(self, by: str, value: int, lane: int | None) -> None:
        self._driver.seek(by, value, lane)
        with self._lock:
            self._ready = deque(batch for batch in self._ready if lane is not None and batch.lane != lane)
            self._error = None
        self._refill()

    def _position(self) -> int | None:
        with self._lock:
            position = self._driver.core.position
            return self._ready[0].index if self._ready else position

    def _positions(self) -> dict[int, int | None]:
        with self._lock:
            ahead = {batch.lane: batch.index for batch in reversed(self._ready)}
            return self._driver.core.positions() | ahead

    def _close(self, timeout: Duration | None) -> None:  # noqa: ARG002 - nothing to wait for
        if self._forked:
            return
        with self._lock:
            self._closed = True
            self._ready.clear()
            self._condition.notify_all()
        self._log._forget(self)
        self._thread.call(self._driver.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        self._close(None)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over batches, waiting for each. Ends when the subscriber is closed."""
        while True:
            try:
                batch = self._poll()
            except Closed:
                return
            if batch is not None:
                yield batch


Threaded = ThreadedLog | ThreadedPublisher
PublisherType = TypeVar("PublisherType", bound=ThreadedPublisher)
SubscriberType = TypeVar("SubscriberType", bound=ThreadedSubscriber)


def _close_after(part: Threaded, error: BaseException | None) -> None:
    """Close. An error of the close becomes a note on the error that ended the block, if there is one."""
    try:
        part._close(close_patience(error))
    except EmbarcaderoError as problem:
        if error is None:
            raise
        error.add_note(f"closing reported {type(problem).__name__}: {problem}")
