"""Calls of planners and tasks: several topics looked at in one round trip, limits of batches, work on the event loop.

A stream of Spark asks these for every micro-batch. They are for programs that build on the client, not for people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from embarcadero.client.arguments import AS_CONFIGURED, Timeout
from embarcadero.client.read.spans import lanes_of, tail_of
from embarcadero.client.results import TopicInfo
from embarcadero.errors import Refused, UnknownTopic
from embarcadero.types import Tail
from embarcadero.wire import messages as m

if TYPE_CHECKING:
    from embarcadero.client import aio
    from embarcadero.client.net.brokers import Brokers
    from embarcadero.client.thread import LoopThread

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Answer = TypeVar("Answer", bound=m.Message)
Result = TypeVar("Result")
Survey = dict[str, tuple[TopicInfo, list[Tail]]]
"""By name: a topic, and the tails of its lanes."""
_AT_ONCE: Final = 32
"""So many topics are asked for at once."""


class BatchLimits(NamedTuple):
    """What the brokers of a cluster take in one batch."""

    record_bytes: int  # of one record
    frame_bytes: int  # of a batch with its overhead
    records: int


class _Asks(Protocol):
    async def _ask(self, message: m.Message, kind: type[Answer], timeout: Timeout, *, again: bool = True) -> Answer: ...


class SurveyCalls:
    """The part of a Log for planners and tasks."""

    brokers: Brokers

    async def survey(
        self: _Asks, topics: Mapping[str, Collection[int]], *, missing_ok: bool = False,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Survey:  # fmt: skip
        """Look at several topics and the tails of their lanes: in one round trip if each has the lanes given for it.

        A topic that does not exist is UnknownTopic; with `missing_ok` it is left out.

            about, tails = (await log.survey({"orders": [0]}))["orders"]
        """
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(topic: str, expected: Collection[int]) -> tuple[TopicInfo, list[Tail]] | None:
            async with turns:
                try:
                    return await _survey(self, topic, expected, timeout)
                except UnknownTopic:
                    if missing_ok:
                        return None
                    raise

        found = await asyncio.gather(*(one(topic, expected) for topic, expected in topics.items()))
        return {topic: each for topic, each in zip(topics, found, strict=True) if each is not None}

    @property
    def limits(self) -> BatchLimits:
        """What the brokers take in one batch."""
        brokers = self.brokers
        return BatchLimits(brokers.record_bytes_max, brokers.frame_bytes_max, brokers.records_max)

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` of `tier.properties`."""
        return tuple(self.brokers.table_properties)

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Reach the files of tables by these `key=value` from now on, in place of the configured ones."""
        self.brokers.table_properties = properties


class SyncSurveyCalls:
    """The same for the synchronous client."""

    _log: aio.Log
    thread: LoopThread

    def survey(
        self, topics: Mapping[str, Collection[int]], *, missing_ok: bool = False, timeout: Timeout = AS_CONFIGURED
    ) -> Survey:
        """Look at several topics and the tails of their lanes: in one round trip if each has the lanes given for it.

        A topic that does not exist is UnknownTopic; with `missing_ok` it is left out.

            about, tails = log.survey({"orders": [0]})["orders"]
        """
        return self.thread.wait(self._log.survey(topics, missing_ok=missing_ok, timeout=timeout))

    def run(self, call: Callable[[aio.Log], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine of the asyncio client on this log's event loop, and wait for it. Raises Closed.

            held = log.run(lambda twin: twin.held_name("orders", "job-7/progress"))
        """
        return self.thread.wait(call(self._log))

    @property
    def ended(self) -> bool:
        """Whether this log was closed, or its thread has died: every call raises Closed then."""
        return not self.thread.alive

    @property
    def limits(self) -> BatchLimits:
        """What the brokers take in one batch."""
        return self._log.limits

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` of `tier.properties`."""
        return self._log.table_properties

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Reach the files of tables by these `key=value` from now on, in place of the configured ones."""
        self._log.use_table_properties(properties)


async def _survey(
    log: _Asks, topic: str, expected: Collection[int], timeout: Timeout
) -> tuple[TopicInfo, list[Tail]]:
    asked = asyncio.gather(*(_tail(log, lane, timeout) for lane in expected))
    try:
        about = TopicInfo.told(await log._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout))
        known = {tail.lane: tail for tail in await asked if tail is not None}
    finally:
        asked.cancel()
    missing = [lane for lane in lanes_of(about, None) if lane not in known]
    more = await asyncio.gather(*(log._ask(m.GetTail(lane=lane), m.TailIs, timeout) for lane in missing))
    known |= {tail.lane: tail for tail in more}
    return about, [tail_of(about, known[lane]) for lane in lanes_of(about, None)]


async def _tail(log: _Asks, lane: int, timeout: Timeout) -> m.TailIs | None:
    """The tail of a lane that may be gone."""
    try:
        return await log._ask(m.GetTail(lane=lane), m.TailIs, timeout)
    except Refused:
        return None
