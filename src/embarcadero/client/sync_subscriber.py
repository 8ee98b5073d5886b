"""A subscriber for programs with threads or without: the background thread fetches, the caller takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from embarcadero.client.arguments import check_timeout, seek_place
from embarcadero.client.read.driver import ReaderCore, SubscriberDriver, forked_reader
from embarcadero.client.results import Batch, Waitable
from embarcadero.errors import Closed, EmbarcaderoError, Retriable, fresh
from embarcadero.forks import tell_of_forks
from embarcadero.types import Position

if TYPE_CHECKING:
    from embarcadero.client.sync import Log

_AT_ONCE = 256
Exit = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class Subscriber:
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order (`batch.lane`).

    The background thread fetches ahead, within bounds.
    """

    def __init__(self, log: Log, core: ReaderCore, topic: str) -> None:
        """To be called in the background thread."""
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

    def _after_fork(self) -> None:
        """In a forked child: refuse every call. The position is the parent's."""
        self._forked = True
        self._condition.refuse(forked_reader(self._topic))
        self._lock = self._condition.lock

    def _refill(self) -> None:
        """In the background thread: hand over what was fetched, once the last of it is taken."""
        with self._lock:
            if not self._ready and not self._closed:
                self._ready.extend(self._driver.take(_AT_ONCE))
                self._error = None if self._ready else self._driver.core.failed
                self._condition.notify_all()

    def poll(self, timeout: float | None = None) -> Batch | None:
        """The next batch (or typed gap: `batch.gap`); None when none came in time. Raises what ended the reading.

        TierUnavailable names a store that could not be reached for some seconds; polling again goes on.

            batch = subscriber.poll(timeout=1.0)
        """
        check_timeout(timeout)
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
        """An error for the caller. After one that a later try may not meet, the next poll goes on."""
        if isinstance(error, Retriable):
            self._error = None
            self._thread.call(self._driver.retry)
        return fresh(error)

    def _take(self) -> Batch:
        if len(self._ready) == 1:
            self._thread.call(self._refill)  # it waits for the lock; told before the last one is gone
        return self._ready.popleft()

    def _has_news(self) -> bool:
        return self._closed or (not self._paused and (bool(self._ready) or self._error is not None))

    def seek(
        self,
        where: str | Position | None = None,
        *,
        seq: int | None = None,
        index: int | None = None,
        time: datetime | None = None,
        lane: int | None = None,
    ) -> None:
        """Go on from "earliest", "latest", a Position, the batch that holds a seq, an index, or the first since a time.

        Orders 0 and 1: a seq or an index is a place in one lane, so say which; the other lanes go on as they are.

            subscriber.seek(time=datetime.now(UTC) - timedelta(hours=1))
            subscriber.seek(seq=1_000, lane=4_097)
        """
        if isinstance(where, Position):
            index, lane, where = where.index, where.lane, None
        with self._lock:
            pass  # raises in a forked child
        self._thread.wait(self._seek(*seek_place(where, seq, index, time), lane))

    @property
    def paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        return self._paused

    def pause(self) -> None:
        """Stop fetching and keep the position: until `resume`, polls end with their timeout.

            subscriber.pause()      # while the disk is full; subscriber.resume() goes on
        """
        with self._lock:
            self._paused = True
        self._thread.call(self._driver.pause)

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        with self._lock:
            self._paused = False
            self._condition.notify_all()
        self._thread.call(self._driver.resume)

    async def _seek(self, by: str, value: int, lane: int | None) -> None:
        self._driver.seek(by, value, lane)
        with self._lock:
            self._ready = deque(batch for batch in self._ready if lane is not None and batch.lane != lane)
            self._error = None
        self._refill()

    def position(self) -> int | None:
        """Index of the next batch; None until the cluster has told where that is. Orders 0 and 1: `positions()`."""
        with self._lock:
            place = self._driver.core.position
            return self._ready[0].index if self._ready else place

    def positions(self) -> dict[int, int | None]:
        """By lane: index of the next batch; None until the cluster has told where that is."""
        with self._lock:
            ahead = {batch.lane: batch.index for batch in reversed(self._ready)}
            return self._driver.core.positions() | ahead

    def close(self) -> None:
        """Stop reading. Closing twice is fine; in a forked child it does nothing."""
        if self._forked:
            return
        with self._lock:
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
