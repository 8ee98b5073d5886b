"""Reading what only a topic's table has: beside the event loop, on worker threads, without Spark.

Tables come with an extra (`embarcadero[spark]`); it is loaded when the first of them is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from embarcadero.client.batch import Batch
from embarcadero.client.connection import now_us
from embarcadero.client.subscriber import ColdAsk
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadFrame, BadTable, EmbarcaderoError, Trimmed
from embarcadero.types import Cut, Tier
from embarcadero.wire import messages as m

if TYPE_CHECKING:
    from embarcadero.client.brokers import Brokers
    from embarcadero.tier.cold import ColdTable

Answer = TypeVar("Answer", bound=m.Message)
Place = tuple[int, int]
"""Index and seq."""


def open_table(tier: Tier, brokers: Brokers) -> ColdTable:
    """A topic's table as a metadata file describes it. NotAvailable without the extra."""
    from embarcadero.tier.cold import ColdTable
    from embarcadero.tier.settings import parse_properties

    return ColdTable(tier, parse_properties(brokers.table_properties))


class ColdReads:
    """What the cores of one driver ask of a topic's table. `run` is called when there may be something new."""

    def __init__(self, brokers: Brokers, topic: str, run: Callable[[], None]) -> None:
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
        except Exception as error:  # whatever it is, the reader must not wait for ever
            problem = f"the table of {self._topic!r} can't be read, lane {ask.lane}, {ask.by} {ask.start}: {error!r}"
            bad = BadTable(problem, "see whether somebody else has written to it, and restore what they changed")
            ask.core.on_cold_failed(ask, bad, now_us())
        self._run()

    async def _read(self, ask: ColdAsk) -> None:
        """Hand on what the table has of a span, as far as the store says now that it is in there."""
        tier = (await describe(self._brokers, self._topic)).tier
        reached = ask.start if tier is None else max(ask.start, min(ask.stop, tier.frontier(ask.lane)[0]))
        if tier is not None and reached > ask.start:
            lists = await asyncio.to_thread(self._open, tier, ask, reached)
            while (batches := await asyncio.to_thread(next, lists, None)) is not None:
                ask.core.on_cold(ask, batches)
                self._run()
                while ask.core.wants(ask) and not ask.core.has_room:
                    self.moved.clear()
                    await self.moved.wait()
                if not ask.core.wants(ask):
                    return
        ask.core.on_cold_end(ask, reached, now_us())

    def _open(self, tier: Tier, ask: ColdAsk, stop: int) -> Iterator[list[Batch]]:
        """On a worker thread."""
        table = open_table(tier, self._brokers)
        from embarcadero.tier.batches import cold_batches

        return cold_batches(
            table, ask.lane, ask.start, stop, ask.schemas, partitions=ask.partitions, control=ask.control
        )

    async def _place(self, ask: ColdAsk) -> int | None:
        """The index at which a reader starts; None if brokers can tell as well."""
        about = await describe(self._brokers, self._topic)
        if about.tier is None:
            return None
        if ask.by == "earliest":
            return (await _asked(self._brokers, m.GetTail(lane=ask.lane), m.TailIs)).start_index
        try:
            place = await find_place(self._brokers, about, ask.lane, ask.by, ask.start)
        except Trimmed:  # a reader from below the start begins there
            return (await _asked(self._brokers, m.GetTail(lane=ask.lane), m.TailIs)).start_index
        if ask.by == "time":  # one that has not come yet stays a time: nothing older may slip in
            tail = await _asked(self._brokers, m.GetTail(lane=ask.lane), m.TailIs)
            return None if place[0] >= tail.index else place[0]
        return place[0]


async def describe(brokers: Brokers, topic: str) -> TopicInfo:
    """The topic as the store has it now."""
    return TopicInfo.told(await _asked(brokers, m.DescribeTopic(name=topic), m.TopicIs))


async def find_place(
    brokers: Brokers, about: TopicInfo, lane: int, by: str, value: int, patience: float | None = None
) -> Place:
    """Where an index, a seq or a time is, whether brokers still have it or only the topic's table has.

    Raises Trimmed if nobody has it, FuturePosition.
    """
    try:
        hot = await _asked(brokers, m.Find(lane=lane, by=by, start=value), m.PlaceIs, patience)
    except Trimmed:
        if about.tier is None:
            raise
        hot = None
    if about.tier is None or (hot is not None and await _is_exact(brokers, lane, by, value, hot)):
        return (0, 0) if hot is None else (hot.index, hot.seq)
    tier = (await describe(brokers, about.name)).tier  # as it is after brokers have let go of what they had
    cold = None if tier is None else await asyncio.to_thread(lambda: open_table(tier, brokers).find(lane, by, value))
    if cold is not None and not _below(tier, lane, by, value):
        return cold
    if hot is None and by == "time":  # brokers can't know that what they gave up is older; the table does
        tail = await _asked(brokers, m.GetTail(lane=lane), m.TailIs)
        return (tail.start_index, tail.start_seq) if tail.hot_index is None else (tail.hot_index, tail.hot_seq or 0)
    if hot is None or _below(tier, lane, by, value):
        raise Trimmed(f"the batch with {by} {value} of lane {lane} is trimmed", "start at what tail() tells")
    return hot.index, hot.seq


async def cold_cuts(brokers: Brokers, topic: str, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Pieces of that part of a span that only the topic's table has, from `start` on. There, a piece is whole files."""
    tier = (await describe(brokers, topic)).tier
    tail = await _asked(brokers, m.GetTail(lane=lane), m.TailIs)
    hot = tail.start_index if tail.hot_index is None else tail.hot_index
    if tier is None or start >= min(stop, hot):
        return []
    files = await asyncio.to_thread(lambda: open_table(tier, brokers).files(lane, start, min(stop, hot)))
    cuts: list[Cut] = []
    size = 0
    for number, file in enumerate(files):
        size += file.bytes
        if size >= piece_bytes or number == len(files) - 1:
            cuts.append(Cut(file.stop_index, file.stop_seq, size))
            size = 0
    if cuts and cuts[-1].index > stop:  # in the midst of a file
        index, seq = await find_place(brokers, await describe(brokers, topic), lane, "index", stop)
        cuts[-1] = Cut(stop, seq if index == stop else cuts[-1].seq, cuts[-1].bytes)
    return cuts


async def _is_exact(brokers: Brokers, lane: int, by: str, value: int, hot: m.PlaceIs) -> bool:
    """Whether the place that brokers told is the one asked for, and not just the first that they have."""
    if by == "index":
        return hot.index == value
    if by == "seq":
        return hot.seq <= value
    tail = await _asked(brokers, m.GetTail(lane=lane), m.TailIs)
    return hot.index > (tail.start_index if tail.hot_index is None else tail.hot_index)


def _below(tier: Tier | None, lane: int, by: str, value: int) -> bool:
    """Whether a place is below the start of the part that is in the table, and so below that of the topic."""
    index, seq = (0, 0) if tier is None else tier.start(lane)
    return value < {"index": index, "seq": seq}.get(by, 0)


async def _asked(brokers: Brokers, message: m.Message, kind: type[Answer], patience: float | None = None) -> Answer:
    answer = await brokers.ask(message, brokers.settings.request_timeout_s if patience is None else patience)
    if not isinstance(answer, kind):
        raise BadFrame(f"{type(message).__name__} was answered with {type(answer).__name__}", "report it: a bug")
    return answer
