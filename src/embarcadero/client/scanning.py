"""Scans: the batches of a span of one lane, in lists as they arrive. What machines read, rather than people."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from embarcadero.client.batch import Batch
from embarcadero.client.brokers import Brokers
from embarcadero.client.drivers import SubscriberDriver, forked_reader
from embarcadero.client.futures import fresh
from embarcadero.client.options import check_read
from embarcadero.client.reading import new_core, nothing_came, table_of
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadValue, Closed
from embarcadero.forks import tell_of_forks
from embarcadero.types import GapKind, Tail


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
        self, brokers: Brokers, topic: TopicInfo, lane: int, span: Span, ends: tuple[int, int], patience: float
    ) -> None:
        self._topic, self._forked = topic.name, False
        self._ends, self._patience, self._ready, self._closed = ends, patience, asyncio.Event(), False
        self._core = new_core(
            brokers, lane, "index", ends[0], span.read, span.partitions, topic.versions, control=span.control,
            stop=ends[1], **table_of(topic),
        )  # fmt: skip
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
