"""Reading what only a topic's table has, where brokers do not: on worker threads, without Spark.

Brokers that can read tables are asked first. A client that reads a table itself needs an extra (`embarcadero[spark]`),
which is loaded when the first table is read, and the keys of the store; where the store is, the cluster tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from embarcadero.client.net.connection import now_us
from embarcadero.client.read.subscriber import ColdAsk
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.errors import (
    BadTable,
    EmbarcaderoError,
    NotAvailable,
    TierUnavailable,
    TooMany,
    Trimmed,
)
from embarcadero.limits import PIECES_MAX
from embarcadero.types import Cut, Tier
from embarcadero.wire import messages as m

if TYPE_CHECKING:
    from embarcadero.client.net.brokers import BrokerPool
    from embarcadero.tier.table_reads import TopicTable

Answer = TypeVar("Answer", bound=m.Message)
Told = TypeVar("Told", m.PlaceIs, m.PiecesAre)
Seen = TypeVar("Seen")
Place = tuple[int, int]
"""Index and seq."""


def open_table(tier: Tier, brokers: BrokerPool) -> TopicTable:
    """A topic's table as a metadata file describes it. NotAvailable without the extra.

    A store that does not answer is reported as soon as a broker reports it.
    """
    from embarcadero.config.secrets import parse_properties
    from embarcadero.tier.storage import FOR_READERS
    from embarcadero.tier.table_reads import TopicTable

    return TopicTable(tier, {**FOR_READERS, **parse_properties(brokers.table_properties)})


class ColdReads:
    """What the cores of one driver ask of a topic's table. `run` is called when there may be something new."""

    def __init__(self, brokers: BrokerPool, topic: str, run: Callable[[], None]) -> None:
        self._brokers, self._topic, self._run = brokers, topic, run
        self._tasks: set[asyncio.Task[None]] = set()
        self.moved = asyncio.Event()  # batches were taken: there may be room for more

    def begin(self, asks: Iterable[ColdAsk]) -> None:
        """Answer questions, each in its own time."""
        for ask in asks:
            task = asyncio.get_running_loop().create_task(self._answer(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Nobody waits for answers any more."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, ask: ColdAsk) -> None:
        try:
            if ask.by == "span":
                await self._read(ask)
            else:
                ask.core.on_place(ask, await self._place(ask), now_us())
        except EmbarcaderoError as error:
            ask.core.on_cold_failed(ask, error, now_us())
        except ImportError as error:
            missing = NotAvailable(f"tables need PyIceberg: {error}", 'pip install "embarcadero[spark]"')
            ask.core.on_cold_failed(ask, missing, now_us())
        except Exception as error:  # whatever it is, the reader must not wait for ever
            problem = f"the table of {self._topic!r} can't be read, lane {ask.lane}, {ask.by} {ask.start}: {error!r}"
            bad = BadTable(problem, "see whether somebody else has written to it, and restore what they changed")
            ask.core.on_cold_failed(ask, bad, now_us())
        self._run()

    async def _read(self, ask: ColdAsk) -> None:
        """Hand on what the table has of a span, as far as the store says now that it is in there.

        A file may be compacted away, or collected, after a read was planned: then the newest metadata is read.
        """
        tier = (await describe(self._brokers, self._topic)).tier
        reached = at = ask.start
        while tier is not None and (reached := max(at, min(ask.stop, tier.frontier(ask.lane)[0]))) > at:
            try:
                lists = await asyncio.to_thread(self._open, tier, ask, at, reached)
                while (batches := await asyncio.to_thread(_next, tier, lists)) is not None:
                    ask.core.on_cold(ask, batches)
                    last = batches[-1]
                    at = last.gap.stop if last.kind is None and last.gap is not None else last.index + 1
                    self._run()
                    while ask.core.wants(ask) and not ask.core.has_room:
                        self.moved.clear()
                        await self.moved.wait()
                    if not ask.core.wants(ask):
                        return
                break
            except BadTable:
                planned, tier = tier, (await describe(self._brokers, self._topic)).tier
                if tier is None or tier.metadata == planned.metadata:
                    raise
        ask.core.on_cold_end(ask, reached, now_us())

    def _open(self, tier: Tier, ask: ColdAsk, start: int, stop: int) -> Iterator[list[Batch]]:
        """On a worker thread."""
        table = open_table(tier, self._brokers)
        from embarcadero.tier.table_reads import table_batches

        return table_batches(
            table,
            ask.lane,
            start,
            stop,
            ask.schemas,
            partitions=ask.partitions,
            control=ask.control,
            durable=ask.durable,
        )

    async def _place(self, ask: ColdAsk) -> int | None:
        """The index at which a reader starts; None if brokers can tell as well."""
        about = await describe(self._brokers, self._topic)
        if about.tier is None:
            return None
        if ask.by == "earliest":
            return (await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)).start_index
        try:
            place = await find_place(self._brokers, about, ask.lane, ask.by, ask.start)
        except Trimmed:  # a reader from below the start begins there
            return (await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)).start_index
        if ask.by == "time":  # one that has not come yet stays a time: nothing older may slip in
            tail = await self._brokers.ask(m.GetTail(lane=ask.lane), m.TailIs)
            return None if place[0] >= tail.index else place[0]
        return place[0]


def _next(tier: Tier, lists: Iterator[list[Batch]]) -> list[Batch] | None:
    """On a worker thread."""
    from embarcadero.tier.table_reads import naming_the_store

    with naming_the_store(tier):
        return next(lists, None)


async def describe(brokers: BrokerPool, topic: str) -> TopicInfo:
    """The topic as the store has it now."""
    return TopicInfo.told(await brokers.ask(m.DescribeTopic(name=topic), m.TopicIs))


async def find_place(
    brokers: BrokerPool, about: TopicInfo, lane: int, by: str, value: int, patience: float | None = None
) -> Place:
    """Where an index, a seq or a time is, whether brokers still have it or only the topic's table has.

    Raises Trimmed if nobody has it, FuturePosition.
    """
    try:
        hot = await brokers.ask(m.Find(lane=lane, by=by, start=value), m.PlaceIs, patience)
    except Trimmed:
        if about.tier is None:
            raise
        hot = None
    if about.tier is None or (hot is not None and await _is_exact(brokers, lane, by, value, hot)):
        return (0, 0) if hot is None else (hot.index, hot.seq)
    tier = (await describe(brokers, about.name)).tier  # as it is after brokers have let go of what they had
    cold = None if tier is None else await _find_in_table(brokers, tier, lane, by, value)
    if cold is not None and not _below(tier, lane, by, value):
        return cold
    if hot is None and by == "time":  # brokers can't know that what they gave up is older; the table does
        tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
        return (tail.start_index, tail.start_seq) if tail.hot_index is None else (tail.hot_index, tail.hot_seq or 0)
    if hot is None or _below(tier, lane, by, value):
        raise Trimmed(f"the batch with {by} {value} of lane {lane} is trimmed", "start at what tail() tells")
    return hot.index, hot.seq


async def cold_cuts(brokers: BrokerPool, topic: str, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Pieces of that part of a span that only the topic's table has, from `start` on. There, a piece is whole files."""
    tier = (await describe(brokers, topic)).tier
    tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
    hot = tail.start_index if tail.hot_index is None else tail.hot_index
    if tier is None or start >= min(stop, hot):
        return []
    cuts = await _table_cuts(brokers, tier, lane, start, min(stop, hot), piece_bytes)
    if cuts and cuts[-1].index > stop:  # in the midst of a file
        index, seq = await find_place(brokers, await describe(brokers, topic), lane, "index", stop)
        cuts[-1] = Cut(stop, seq if index == stop else cuts[-1].seq, cuts[-1].bytes)
    return cuts


async def _find_in_table(brokers: BrokerPool, tier: Tier, lane: int, by: str, value: int) -> Place | None:
    """Where a place is in a table: as a broker tells, or as this client sees."""

    def find() -> Place | None:
        return open_table(tier, brokers).find(lane, by, value)

    answer = await _of_table(brokers, tier, m.Find(lane=lane, by=by, start=value, table=True), m.PlaceIs, find)
    if isinstance(answer, m.PlaceIs):
        return None if answer.missing else (answer.index, answer.seq)
    return answer


async def _table_cuts(brokers: BrokerPool, tier: Tier, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Files of a table as pieces of a span: as a broker tells, or as this client sees."""

    def cuts() -> list[Cut]:
        from embarcadero.tier.table_reads import table_cuts

        return table_cuts(open_table(tier, brokers), lane, start, stop, piece_bytes)

    ask = m.Measure(lane=lane, start=start, stop=stop, piece_bytes=piece_bytes, pieces_max=PIECES_MAX, table=True)
    answer = await _of_table(brokers, tier, ask, m.PiecesAre, cuts)
    return answer.cuts if isinstance(answer, m.PiecesAre) else answer


async def _of_table(
    brokers: BrokerPool, tier: Tier, ask: m.Find | m.Measure, kind: type[Told], look: Callable[[], Seen]
) -> Told | Seen:
    """What a broker says about a table; else what this client finds itself, with `look` on a worker thread."""
    refused: EmbarcaderoError | None = None
    if any(connection.link.tables for connection in brokers.live()):
        try:
            answer = await brokers.ask(ask, kind)
            if answer.table:
                return answer
        except (TierUnavailable, BadTable, NotAvailable, TooMany) as error:
            refused = error

    def named() -> Seen:
        from embarcadero.tier.table_reads import naming_the_store

        with naming_the_store(tier):
            return look()

    try:
        return await asyncio.to_thread(named)
    except (EmbarcaderoError, ImportError) as error:
        if refused is not None and not isinstance(refused, NotAvailable):
            raise refused from error
        if isinstance(error, EmbarcaderoError):
            raise
        raise NotAvailable(f"tables need PyIceberg: {error}", 'pip install "embarcadero[spark]"') from error


async def _is_exact(brokers: BrokerPool, lane: int, by: str, value: int, hot: m.PlaceIs) -> bool:
    """Whether the place that brokers told is the one asked for, and not just the first that they have."""
    if by == "index":
        return hot.index == value
    if by == "seq":
        return hot.seq <= value
    tail = await brokers.ask(m.GetTail(lane=lane), m.TailIs)
    return hot.index > (tail.start_index if tail.hot_index is None else tail.hot_index)


def _below(tier: Tier | None, lane: int, by: str, value: int) -> bool:
    """Whether a place is below the start of the part that is in the table, and so below that of the topic."""
    index, seq = (0, 0) if tier is None else tier.start(lane)
    return value < {"index": index, "seq": seq}.get(by, 0)
