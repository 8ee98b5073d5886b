"""Calls for programs that build on the client: planners and tasks, jobs that write tables, owners of named sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from embarcadero.client.arguments import AS_CONFIGURED, PublisherOptions, Timeout, whole_in_unit
from embarcadero.client.brokers import BatchLimits, BrokerPool
from embarcadero.client.reads import (
    LaneSpan,
    check_piece_bytes,
    find_position,
    lane_of,
    lanes_of,
    table_only_cuts,
    tail_of,
    with_lags,
)
from embarcadero.client.results import TopicInfo
from embarcadero.config.key import Duration
from embarcadero.config.secrets import public_properties
from embarcadero.errors import BadFrame, NotAvailable, Refused, Trimmed, UnknownTopic, invariant
from embarcadero.limits import PIECES_MAX
from embarcadero.types import NO_SESSION, Cut, LanePosition, Order, ReaderProgress, Tail, Tier
from embarcadero.wire import messages as m

# ruff: noqa: ASYNC109 - a timeout ends these calls with a typed error, so they take a `timeout` argument

LanePositions = Mapping[int, LanePosition]
"""By lane: index and seq."""

Answer = TypeVar("Answer", bound=m.Message)
Survey = dict[str, tuple[TopicInfo, list[Tail]]]
"""By name: a topic, and the tails of its lanes."""
_CONCURRENT_TOPICS: Final = 32


class _Asks(Protocol):
    """What these calls need of a Log."""

    brokers: BrokerPool

    async def describe(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> TopicInfo: ...

    async def tail(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> Tail: ...

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
        """Begin an epoch of writing a topic's table. All earlier epochs end.

        Args:
            topic: The topic.
            holder: Name of the job that writes the table.
            table_id, warehouse, table: Identity and location, used if the topic has no table yet.
            hot_retention_s: How long brokers and replicas keep records that are in the table.
            take_over: End the epoch of another active holder.
            properties: How to reach the store. Other clients get endpoint, region and addressing; secrets are removed.
            topic_id: Id of the topic (0: any).
            engine: The program that writes the table, for `status`.

        Returns:
            The table, with its epoch.

        Raises:
            TierBusy: Another holder writes the table, and `take_over` is not set.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            tier = await log.open_tier("orders", "job-7", table_id="t1", warehouse="/data", table="embarcadero.orders")
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
        """Announce that the table has every record below these positions.

        Args:
            topic, epoch: The topic, and the epoch that `open_tier` returned.
            metadata: Location of the table's newest metadata file.
            frontiers: By lane, the index and seq up to which the table has the records.
            starts: By lane, where the table begins. Lanes that are not named keep their start.
            topic_id, engine: As for `open_tier`.

        Raises:
            Deposed: Another job has begun a later epoch, or the lease has expired.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            await log.advance_tier("orders", tier.epoch, metadata=path, frontiers={0: (index, seq)})
        """
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
        """Renew the lease of an epoch.

        Raises:
            Deposed: Another job has begun a later epoch, or the lease has expired.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            await log.keep_tier("orders", tier.epoch)
        """
        await self._ask(m.KeepTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)

    async def close_tier(
        self: _Asks, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """End an epoch, so that another job can begin one immediately. An epoch that has ended is ignored.

        Raises:
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            await log.close_tier("orders", tier.epoch)
        """
        await self._ask(m.CloseTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)


class HeldName(NamedTuple):
    """The session that holds a name, and its next expected sequence."""

    session: int
    expected: int


class SessionCalls:
    """The part of a Log about named sessions."""

    async def held_name(
        self: _Asks, topic: str, name: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Look up a named session without taking its name. A name without a session is opened at sequence 0.

        Returns:
            The session that holds the name, and its next expected sequence.

        Raises:
            NotAvailable: A broker has a version without this call.

        Example:
            held = await log.held_name("orders", "job-7/progress")
        """
        return await _ask_for_name(self, topic, name, None, NO_SESSION, topic_id, timeout)

    async def move_name(
        self: _Asks, topic: str, name: str, at: int, holder: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Move a named session forward to the sequence `at` if the session `holder` still has the name.

        This is a compare-and-move: a delayed duplicate of the request changes nothing.

        Returns:
            The session that has the name afterwards. Its `expected` is `at` if this call moved it, or if another caller
            moved it there.

        Raises:
            NotAvailable: A broker has a version without this call.

        Example:
            held = await log.held_name("orders", "job-7/progress")
            won = (await log.move_name("orders", "job-7/progress", 42, held.session)).expected == 42
        """
        return await _ask_for_name(self, topic, name, at, holder, topic_id, timeout)

    async def open_session(
        self: _Asks, topic: str, name: str, at: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> tuple[int, int]:
        """Move a named session forward to the sequence `at` without publishing. It never goes back.

        So a name is a counter that only grows. The log keeps it as long as it keeps sessions.

        Returns:
            The sequence before the call and the sequence after it.

        Raises:
            BadName, BadValue: The name or the sequence is not valid.

        Example:
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
        raise BadFrame(f"a broker answered OpenSession with {type(answer).__name__}", "report it: this is a bug")
    if answer.expected is None:
        raise NotAvailable("a broker of an earlier version cannot look up named sessions", "upgrade all brokers")
    return HeldName(answer.session, answer.expected)


async def trim_ask(brokers: BrokerPool, about: TopicInfo, ask: m.Trim) -> m.Trim:
    """Complete a trim request with index and seq if only the topic's table has the position: brokers cannot find it."""
    if about.tier is None or not ask.cold or about.tier.start(ask.lane) >= about.tier.frontier(ask.lane):
        return ask
    tail = await brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)
    try:
        index, seq = await find_position(brokers, about, ask.lane, ask.by, ask.before)
    except Trimmed:  # below the current start: nothing changes
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
        """Look up several topics and the tails of their lanes, in one round trip if the expected lanes are right.

        Args:
            topics: By name, the lanes that the caller expects.
            missing_ok: Leave out topics that do not exist.

        Returns:
            By name, the topic and the tails of its lanes.

        Raises:
            UnknownTopic: A topic does not exist, and `missing_ok` is not set.

        Example:
            about, tails = (await log.survey({"orders": [0]}))["orders"]
        """
        turns = asyncio.Semaphore(_CONCURRENT_TOPICS)

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
        """The largest batch and record that the brokers accept."""
        return self.brokers.limits

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` pairs, by default of `tier.properties`."""
        return tuple(self.brokers.table_properties)

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Replace the configured `key=value` pairs with which this client reaches the files of tables."""
        self.brokers.use_table_properties(properties)

    async def measure(
        self: _Asks,
        topic: str | TopicInfo,
        start: int,
        stop: int,
        piece_bytes: int,
        *,
        lane: int | None = None,
        pieces_max: int | None = None,
        table: bool = True,
        timeout: Timeout = AS_CONFIGURED,
    ) -> list[Cut]:
        """Divide the batches with start <= index < stop into pieces of about `piece_bytes`, for parallel readers.

        Args:
            topic: A name, or the result of `describe`.
            start, stop: The first index, and the index after the last batch.
            piece_bytes: Size of a piece.
            lane: Required in a topic of order 0 or 1.
            pieces_max: Return at most this many pieces, from `start` on.
            table: Include the records that only the table of the topic has. False: such a `start` raises Trimmed.

        Returns:
            A `Cut` per piece: the index and seq after its last batch, and its approximate size. The last piece ends at
            `stop`, unless `pieces_max` was reached.

        Raises:
            FuturePosition: `stop` is beyond the end.
            Trimmed: The whole span was removed.

        Example:
            for cut in await log.measure("orders", 0, (await log.tail("orders")).durable_index, 64 << 20): ...
        """
        check_piece_bytes(piece_bytes)
        LaneSpan(start, stop, "ordered", None, False).checked()
        about = await self.describe(topic, timeout=timeout) if isinstance(topic, str) else topic
        number = lane_of(about, lane, "an index")
        cuts: list[Cut] = []
        at = start
        tiered, most = table and about.tier is not None, pieces_max or PIECES_MAX
        while at < stop and (pieces_max is None or len(cuts) < pieces_max):
            if tiered and (cold := await table_only_cuts(self.brokers, about.name, number, at, stop, piece_bytes)):
                cuts, at = cuts + cold, cold[-1].index
                continue
            ask = m.Measure(lane=number, start=at, stop=stop, piece_bytes=piece_bytes, pieces_max=most)
            cuts += (await self._ask(ask, m.PiecesAre, timeout)).cuts
            invariant(bool(cuts) and cuts[-1].index > at, "each answer to Measure advances the span")
            at = cuts[-1].index
        return cuts


class ReaderCalls:
    """The part of a Log about the progress of readers."""

    async def note_progress(
        self: _Asks,
        topic: str,
        reader: str,
        places: Mapping[int, tuple[int, int]],
        *,
        topic_id: int = 0,
        timeout: Timeout = AS_CONFIGURED,
    ) -> None:
        """Publish the progress of a reader, so that `status` and `topic describe` show its lag.

        It is only information: no retention depends on it. The cluster forgets it after a day.

        Args:
            topic: The topic.
            reader: A name for the reader.
            places: By lane, the index and the seq after the last record that the reader has processed.
            topic_id: Id of the topic that was read (0: any).

        Raises:
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            await log.note_progress("orders", "billing", {batch.lane: (batch.index + 1, batch.seq + batch.count)})
        """
        positions = {lane: LanePosition(*at) for lane, at in places.items()}
        ask = m.NoteProgress(topic=topic, reader=reader, places=positions, topic_id=topic_id)
        await self._ask(ask, m.Done, timeout)

    async def readers(self: _Asks, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> list[ReaderProgress]:
        """List the readers that published their progress with `note_progress`, with their lag in records.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            for reader in await log.readers("orders"):
                print(reader.reader, reader.lag, reader.ago_s)
        """
        known = (await self._ask(m.GetReaders(topic=topic), m.ReadersAre, timeout)).readers
        return with_lags(known, await self.tail(topic, timeout=timeout)) if known else []

    async def remove_reader(
        self: _Asks, topic: str, reader: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """Remove a reader from the list of `readers`. An active reader appears again with its next `note_progress`.

        Raises:
            BadValue: The topic has no reader of this name.

        Example:
            await log.remove_reader("orders", "billing")
        """
        await self._ask(m.RemoveReader(topic=topic, reader=reader, topic_id=topic_id), m.Done, timeout)


async def _survey(log: _Asks, topic: str, expected: Collection[int], timeout: Timeout) -> tuple[TopicInfo, list[Tail]]:
    asked = asyncio.gather(*(_tail(log, lane, timeout) for lane in expected))
    try:
        about = TopicInfo.of(await log._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout))
        known = {tail.lane: tail for tail in await asked if tail is not None}
    finally:
        asked.cancel()
    missing = [lane for lane in lanes_of(about, None) if lane not in known]
    more = await asyncio.gather(*(log._ask(m.GetTail(lane=lane), m.TailIs, timeout) for lane in missing))
    known |= {tail.lane: tail for tail in more}
    return about, [tail_of(about, known[lane]) for lane in lanes_of(about, None)]


async def _tail(log: _Asks, lane: int, timeout: Timeout) -> m.TailIs | None:
    """Return the tail of a lane, or None if the lane no longer exists."""
    try:
        return await log._ask(m.GetTail(lane=lane), m.TailIs, timeout)
    except Refused:
        return None
