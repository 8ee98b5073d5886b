"""Calls of programs that build on the client: planners and tasks, jobs that write tables, owners of named sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from embarcadero.client.arguments import AS_CONFIGURED, PublisherOptions, Timeout, whole_in_unit
from embarcadero.client.brokers import BatchLimits, BrokerPool
from embarcadero.client.reads import find_position, lanes_of, tail_of
from embarcadero.client.results import TopicInfo
from embarcadero.config.key import Duration
from embarcadero.config.secrets import public_properties
from embarcadero.errors import BadFrame, NotAvailable, Refused, Trimmed, UnknownTopic
from embarcadero.types import NO_SESSION, LanePosition, Order, Tail, Tier
from embarcadero.wire import messages as m

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

LanePositions = Mapping[int, LanePosition]
"""By lane: index and seq."""

Answer = TypeVar("Answer", bound=m.Message)
Survey = dict[str, tuple[TopicInfo, list[Tail]]]
"""By name: a topic, and the tails of its lanes."""
_AT_ONCE: Final = 32
"""So many topics are asked for at once."""


class _Asks(Protocol):
    async def _ask(self, message: m.Message, kind: type[Answer], timeout: Timeout, *, again: bool = True) -> Answer: ...


class TierCalls:
    """The part of a Log about tables of topics."""

    async def open_tier(
        self: _Asks,
        topic: str,
        holder: str,
        *,
        table_id: str,
        warehouse: str,
        table: str,
        hot_retention_s: Duration | None = None,
        take_over: bool = False,
        properties: Mapping[str, str] | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Begin an epoch of writing a topic's table: those before are over. `table_id`, `warehouse` and `table` count
        for a topic that has no table yet. Clients are told those of `properties` that say where the store is (endpoint,
        region, addressing); secrets are left out. Raises TierBusy while another holder is at it, unless `take_over`;
        here and below TopicReplaced if the topic with `topic_id` (0: any) is deleted and another one has its name.
        """
        ask = m.OpenTier(
            topic=topic,
            holder=holder,
            id=table_id,
            warehouse=warehouse,
            table=table,
            hot_retention_s=whole_in_unit("hot_retention_s", hot_retention_s, 1.0),
            take_over=take_over,
            properties=public_properties(properties or {}),
            topic_id=topic_id,
            engine=engine,
        )
        return (await self._ask(ask, m.TierIs, timeout)).tier

    async def advance_tier(
        self: _Asks,
        topic: str,
        epoch: int,
        *,
        metadata: str,
        frontiers: LanePositions,
        starts: LanePositions | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Announce that everything below these positions is in the table. Raises Deposed if the epoch is over."""
        ask = m.AdvanceTier(
            topic=topic,
            epoch=epoch,
            metadata=metadata,
            frontiers={lane: LanePosition(*at) for lane, at in frontiers.items()},
            starts={lane: LanePosition(*at) for lane, at in (starts or {}).items()},
            topic_id=topic_id,
            engine=engine,
        )
        return (await self._ask(ask, m.TierIs, timeout)).tier

    async def keep_tier(
        self: _Asks, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch is there. Raises Deposed if the epoch, or its lease, is over."""
        await self._ask(m.KeepTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)

    async def close_tier(
        self: _Asks, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch leaves, and another may begin at once."""
        await self._ask(m.CloseTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)


class HeldName(NamedTuple):
    """Which session holds a name, and the sequence that it expects next."""

    session: int
    expected: int


class SessionCalls:
    """The part of a Log about named sessions."""

    async def held_name(
        self: _Asks, topic: str, name: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Look at a named session without taking its name. A name that no session holds is opened, at sequence 0.

            held = await log.held_name("orders", "job-7/progress")
        """
        return await _ask_for_name(self, topic, name, None, NO_SESSION, topic_id, timeout)

    async def move_name(
        self: _Asks, topic: str, name: str, at: int, holder: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Move a named session on to the sequence `at` if the session `holder` still holds the name: compare and move.

        Returns what holds the name afterwards. It is at `at` if the call moved it, or another caller moved it there.

            held = await log.held_name("orders", "job-7/progress")
            won = (await log.move_name("orders", "job-7/progress", 42, held.session)).expected == 42
        """
        return await _ask_for_name(self, topic, name, at, holder, topic_id, timeout)

    async def open_session(
        self: _Asks, topic: str, name: str, at: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> tuple[int, int]:
        """Move a named session on to the sequence `at`; (where it was before, where it is now).

        It never goes back, so a name alone is a number that only grows, kept in the log for as long as sessions are.

            before, now = await log.open_session("orders", "job-7/progress", 42)
        """
        PublisherOptions(session=name, session_at=at)  # checks both
        ask = m.OpenSession(topic=topic, name=name, at=at, topic_id=topic_id, order=int(Order.STRONG))
        opened = await self._ask(ask, m.Opened, timeout)
        return opened.reached, opened.expected


async def _ask_for_name(
    log: _Asks, topic: str, name: str, at: int | None, holder: int, topic_id: int, timeout: Timeout
) -> HeldName:
    PublisherOptions(session=name, session_at=at)  # checks both
    ask = m.OpenSession(topic=topic, name=name, at=at, holder=holder, topic_id=topic_id, order=int(Order.STRONG))
    answer = await log._ask(ask, m.Message, timeout)
    if isinstance(answer, m.Opened):
        return HeldName(answer.session, answer.expected)
    if not isinstance(answer, m.NameHeld):
        raise BadFrame(f"OpenSession was answered with {type(answer).__name__}", "report it: a bug")
    if answer.expected is None:
        raise NotAvailable("a broker of an earlier version can't tell where a named session is", "upgrade all brokers")
    return HeldName(answer.session, answer.expected)


async def trim_ask(brokers: BrokerPool, about: TopicInfo, ask: m.Trim) -> m.Trim:
    """The question to trim before a position that only the topic's table has: brokers can't tell its index and seq."""
    if about.tier is None or not ask.cold or about.tier.start(ask.lane) >= about.tier.frontier(ask.lane):
        return ask
    tail = await brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)
    try:
        index, seq = await find_position(brokers, about, ask.lane, ask.by, ask.before)
    except Trimmed:  # less than before: nothing changes
        return m.Trim(lane=ask.lane, by="index", before=0, topic_id=ask.topic_id)
    if tail.hot_index is None or index >= tail.hot_index:
        return ask
    return m.Trim(lane=ask.lane, by="index", before=index, seq=seq, topic_id=ask.topic_id)


class SurveyCalls:
    """The part of a Log for planners and tasks."""

    brokers: BrokerPool

    async def survey(
        self: _Asks,
        topics: Mapping[str, Collection[int]],
        *,
        missing_ok: bool = False,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Survey:
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
        return self.brokers.limits

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` of `tier.properties`."""
        return tuple(self.brokers.table_properties)

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Reach the files of tables by these `key=value` from now on, in place of the configured ones."""
        self.brokers.use_table_properties(properties)


async def _survey(log: _Asks, topic: str, expected: Collection[int], timeout: Timeout) -> tuple[TopicInfo, list[Tail]]:
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
