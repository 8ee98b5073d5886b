"""A subscriber for asyncio: the same loop fetches and takes."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING

from embarcadero.client.arguments import check_timeout, seek_place
from embarcadero.client.read.driver import ReaderCore, SubscriberDriver, forked_reader
from embarcadero.client.results import Batch
from embarcadero.errors import Closed, fresh
from embarcadero.forks import tell_of_forks
from embarcadero.invariants import invariant
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Position

if TYPE_CHECKING:
    from embarcadero.client.aio import Log

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`


class Subscriber:
    """Reads one topic in its order; of a topic of order 0 or 1 all lanes, each in its own order."""

    def __init__(self, log: Log, core: ReaderCore, topic: str) -> None:
        self._log = log
        self._ready = asyncio.Event()
        self._closed = False
        self._topic, self._forked = topic, False
        self._reader = SubscriberDriver(log.brokers, core, self._ready.set, topic=topic)
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: refuse every call. The position is the parent's."""
        self._forked = True

    @property
    def _driver(self) -> SubscriberDriver:
        if self._forked:
            raise forked_reader(self._topic)
        return self._reader

    async def poll(self, timeout: float | None = None) -> Batch | None:
        """The next batch (or typed gap: `batch.gap`); None when none came in time. Raises what ended the reading.

        TierUnavailable names a store that could not be reached for some seconds; polling again goes on.

            batch = await subscriber.poll(timeout=1.0)
        """
        check_timeout(timeout)
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
        self._driver.seek(*seek_place(where, seq, index, time), lane)

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

    async def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:  # noqa: ARG002 - nothing to wait for
        """Stop reading. In a forked child it does nothing."""
        if self._forked:
            return
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
