"""Everything a broker answers about what is stored: fetches that wait, ends and positions of lanes, trims.

A fetch is answered from memory (reader.py) where memory has it, else from segment files (warm.py), else, for a client
that asks for that, from the topic's table (tables.py). While a fetch waits, or its file is being read, it is parked
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from embarcadero.broker.clients import UnreadBytes
from embarcadero.broker.counters import BrokerCounters
from embarcadero.broker.durable import ON_DISK, DurableFrontiers, StoredLane, at_index
from embarcadero.broker.net.connection import Connection
from embarcadero.broker.read import positions
from embarcadero.broker.read.disk import DiskReads, FairJobs, Place, Segments, TableJobs
from embarcadero.broker.read.lane_reader import LaneReader
from embarcadero.broker.read.positions import check_measure, pieces
from embarcadero.broker.read.results import FetchResult
from embarcadero.broker.write.lanes import BrokerLanes
from embarcadero.env import Clock
from embarcadero.errors import (
    BadTable,
    BadValue,
    Corrupt,
    EmbarcaderoError,
    Retriable,
    TimedOut,
    UnknownTopic,
)
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.log import BrokerLogs
from embarcadero.limits import TAIL_HOLES_MAX
from embarcadero.placement.directory import Directory
from embarcadero.steps import Step
from embarcadero.types import Cut, Gap, GapKind, Order, Tier, Topic, united
from embarcadero.wire import messages as m
from embarcadero.wire.schemas import decode_versions

_WAYS = ("index", "seq", "time", "earliest", "latest")
_MODES = ("durable", "ordered")
_NOT_TRIED = -1


@dataclass(slots=True, eq=False)
class Parked:
    """A fetch that waits for records, or for a file."""

    connection: Connection
    request: int
    ask: m.Fetch
    deadline_us: int
    begun: int | None = None  # the index that was asked for, if it was one
    seen: int = _NOT_TRIED  # frontier when it was last tried
    on_disk: bool = False  # its file is being read
    done: bool = False


@dataclass(slots=True)
class _Read:
    """A fetch from a file or a table, and the room for its result."""

    unread: UnreadBytes
    connection: Connection
    ask: m.Fetch
    started: bool = False

    def may_start(self) -> bool:
        """Reserve room, if there is some for at least one batch: so much is read."""
        room = 0 if self.connection.clogged else self.unread.allowed(self.connection, self.ask.max_bytes)
        if room:
            self.ask, self.started = _with_room(self.ask, room), True
            self.unread.reserve(self.connection, room)
        return self.started

    def end(self) -> None:
        """The result is there: from now on it counts as what is sent."""
        if self.started:
            self.unread.release(self.connection, self.ask.max_bytes)


class Reads:
    """Readers of all lanes, and those who wait for them."""

    def __init__(
        self, directory: Directory, clock: Clock, epoch: LeaderView, logs: BrokerLogs, lanes: BrokerLanes, margin: int,
        durable: DurableFrontiers, warm: DiskReads, tables: TableJobs, counters: BrokerCounters,
        refresh: Callable[[], None], unread: UnreadBytes,
    ) -> None:  # fmt: skip
        self._directory, self._clock, self._epoch, self._logs = directory, clock, epoch, logs
        self._lanes, self._margin, self._durable, self.warm = lanes, margin, durable, warm
        self.tables, self._counters, self._refresh, self._unread = tables, counters, refresh, unread
        self._readers: dict[int, LaneReader] = {}
        self._topics: dict[int, Topic] = {}
        self._trims: dict[int, int] = {}  # lane -> index below which it was trimmed
        self._parked: list[Parked] = []
        self._for_disks: dict[Parked, None] = {}  # as they came: a set's order differs from process to process

    # --- the world around ---------------------------------------------------------------------------------------------
    def update(self, topics: dict[int, Topic], trims: dict[int, int]) -> None:
        """The store has changed."""
        self._topics, self._trims = topics, trims
        for lane in self._readers.keys() - topics.keys():
            del self._readers[lane]
        for lane, reader in self._readers.items():
            reader.trimmed = trims.get(lane, 0)
        members = {member.replica: member for member in self._directory.replicas()}
        self.warm.copies.keep(topics.keys() | self._lanes.known.keys(), members)

    def disconnected(self, connection: Connection) -> None:
        """A client is gone."""
        self._parked = [parked for parked in self._parked if parked.connection is not connection]
        self._for_disks = {parked: None for parked in self._for_disks if parked.connection is not connection}
        self.warm.disconnected(connection)
        self.tables.disconnected(connection)

    @property
    def waiting(self) -> int:
        """Fetches that wait."""
        return len(self._parked)

    @property
    def waiting_for_disks(self) -> int:
        """Those of them that wait until more is durable."""
        return len(self._for_disks)

    def _waits_for_disks(self, parked: Parked) -> bool:
        reader = self._readers.get(parked.ask.lane) or self._lanes.readers.get(parked.ask.lane)
        return reader is not None and reader.stored is not None and parked.ask.read == "durable"

    def next_deadline_us(self) -> int | None:
        """When the next waiting read gives up."""
        return min((parked.deadline_us for parked in self._parked if not parked.on_disk), default=None)

    # --- readers ------------------------------------------------------------------------------------------------------
    def reader(self, lane: int) -> LaneReader:
        """The reader of a lane. Raises UnknownTopic."""
        if (known := self._readers.get(lane) or self._lanes.reader(lane)) is not None:
            return known
        if lane not in self._topics:
            self._refresh()
            if (known := self._lanes.reader(lane)) is not None:
                return known
            if lane not in self._topics:
                raise UnknownTopic(f"there is no topic with lane {lane}", "it was deleted; look it up again by name")
        if (topic := self._topics[lane]).order <= Order.BROKER:
            raise BadValue(f"topic {topic.name!r} has order {topic.order}: it has a lane per broker", "ask for a lane")
        stored = StoredLane(lane, self._durable) if topic.replicas else None
        reader = self._readers[lane] = LaneReader(self._epoch, self._logs, lane, self._margin, stored)
        reader.trimmed = self._trims.get(lane, 0)
        return reader

    def ordered(self, lane: int) -> int | None:
        """The ordered frontier of a lane that is being read."""
        reader = self._readers.get(lane) or self._lanes.readers.get(lane)
        return None if reader is None else reader.ordered()

    def lag(self, lane: int, index: int) -> int | None:
        """How many batches a reader at an index is behind the order; positions that are lost do not count."""
        reader, ordered = self._readers.get(lane) or self._lanes.readers.get(lane), self.ordered(lane)
        if reader is None or ordered is None:
            return None
        return max(0, ordered - index) if reader.stored is None else reader.stored.chain.batches(index, ordered)

    def _fresh_reader(self, lane: int) -> LaneReader:
        """A reader that knows of every trim that was answered before now, by whichever broker."""
        self._refresh()
        return self.reader(lane)

    def durable_files(self, lane: int) -> Segments:
        """The files of a lane with replicas, as far as they are durable: for jobs beside the broker."""
        reader = self._fresh_reader(lane)
        if (stored := reader.stored) is None:
            raise BadValue(f"lane {lane} has no replicas", "ask for a lane of a topic with replicas")
        return self.segments(lane, stored, stored.through(), reader.trimmed)

    def segments(self, lane: int, stored: StoredLane, bound: int, trimmed: int) -> Segments:
        """A lane's files, below a bound that is no higher than what is durable.

        First it is counted, then ranges are looked at: what is counted by a new range says nothing of the old one.
        """
        durable = stored.through()
        return Segments(lane, stored.chain, min(bound, durable), trimmed, self.warm.copies)

    # --- ends and positions -------------------------------------------------------------------------------------------
    def tail(self, connection: Connection, request: int, lane: int) -> None:
        """Answer with both ends of a lane, and with where its readable part starts."""

        def answer(reader: LaneReader, start: Place) -> m.TailIs:
            ends = reader.ends()
            if ends is None:
                raise Retriable("the end of the log can't be told while a sequencer takes over", "try again")
            tier = self._tier(lane)
            cold = _cold_start(tier, lane, start)
            hot = (None, None) if cold is start else (start.index, start.seq)
            in_table = [] if tier is None else [(hole.start_seq, hole.stop_seq) for hole in tier.holes.get(lane, ())]
            holes = [hole for hole in united([*in_table, *reader.seq_holes()]) if hole[1] > cold.seq][-TAIL_HOLES_MAX:]
            return m.TailIs(
                lane=lane, index=ends.index, seq=ends.seq, start_index=cold.index, start_seq=cold.seq,
                durable_index=ends.durable_index, durable_seq=ends.durable_seq,
                hot_index=hot[0], hot_seq=hot[1], holes=holes,
            )  # fmt: skip

        self._with_start(connection, request, lane, answer)

    def find(self, connection: Connection, request: int, ask: m.Find) -> None:
        """Answer where a place is."""
        if ask.table:
            self._find_in_table(connection, request, ask)
            return
        self._locate(connection, request, ask.lane, ask.by, ask.start, positions.found)

    def _find_in_table(self, connection: Connection, request: int, ask: m.Find, last: bool = False) -> None:
        """Answer where a place is in the topic's table; a table that changed meanwhile is asked once more."""
        positions.check_way(ask.by)
        self._fresh_reader(ask.lane)
        tables, tier = self.tables.reader, self._tier(ask.lane)

        def answer(found: tuple[int, int] | None) -> m.PlaceIs:
            index, seq = found or (0, 0)
            return m.PlaceIs(lane=ask.lane, index=index, seq=seq, table=True, missing=found is None)

        if tier is None:
            connection.answer(request, answer(None))
            return
        job = partial(tables.find, tier, ask.lane, ask.by, ask.start)
        again = None if last else partial(self._find_in_table, connection, request, ask, last=True)
        self._answer_later(connection, request, job, answer, again, self.tables)

    def trim(self, connection: Connection, request: int, ask: m.Trim) -> None:
        """Move the start of a lane, and answer where it is then."""
        positions.check_trim(ask, self._clock)

        def trim_it(_reader: LaneReader, start: Place, index: int, seq: int | None) -> None:
            if index < start.index:
                seq = ask.seq if ask.by == "index" and index == ask.before else None
            name = self._topic_name(ask.lane)
            self._directory.trim(name, ask.lane, index, seq=seq, cold=ask.cold, topic_id=ask.topic_id)
            self._with_start(connection, request, ask.lane, self._place_now)

        self._locate(connection, request, ask.lane, ask.by, ask.before, trim_it, trims=True)

    def _place_now(self, reader: LaneReader, start: Place) -> m.PlaceIs:
        """Where a lane starts for readers, whether brokers still have that or not."""
        return positions.place_is(reader, _cold_start(self._tier(reader.lane), reader.lane, start))

    def _topic_name(self, lane: int) -> str:
        of_broker = self._lanes.known.get(lane)
        topic = self._topics.get(lane if of_broker is None else of_broker.topic)
        return "" if topic is None else topic.name

    def _tier(self, lane: int) -> Tier | None:
        """The table of a lane's topic, as the store has it now."""
        return self._directory.tier(self._topic_name(lane))

    def tiered(self, lane: int) -> int | None:
        """Batches of a lane below this index are in its topic's table; None if it has none, or nobody can tell now."""
        try:
            tier = self._tier(lane)
        except EmbarcaderoError:
            return None
        return None if tier is None else tier.frontier(lane)[0]

    def _with_start(
        self, connection: Connection, request: int, lane: int, answer: Callable[[LaneReader, Place], m.Message],
        last: bool = False,
    ) -> None:  # fmt: skip
        """Answer with what needs to know where the readable part of a lane starts."""
        reader = self._fresh_reader(lane)

        if (stored := reader.stored) is None:
            connection.answer(request, answer(reader, self._memory_start(reader)))
            return
        segments = self.segments(lane, stored, stored.through(), reader.trimmed)

        def with_first(first: Place | None) -> m.Message:
            message = answer(reader, first or self._start_above(reader, segments))
            self._check_unchanged(stored, segments)
            return message

        again = None if last else partial(self._with_start, connection, request, lane, answer, last=True)
        self._answer_later(connection, request, segments.first, with_first, again)

    def _memory_start(self, reader: LaneReader) -> Place:
        start = reader.start(self._clock.now_us())
        if start is None:
            raise Retriable("the start of the log can't be told while a sequencer takes over", "try again")
        return Place(*start)

    def _start_above(self, reader: LaneReader, segments: Segments) -> Place:
        """The start of a lane whose files have nothing below the bound of the search: it is in memory.

        Raises Retriable if memory starts above that bound: then the files between were not searched. It does so after
        a loss of memory, when the lane goes on at its ceiling, and when others counted more as durable than we did.
        """
        start = self._memory_start(reader)
        if not segments.reach(start.index, reader.trimmed):
            raise Retriable("the start of the log can't be told: its files were searched too early", "try again")
        return start

    def _check_unchanged(self, stored: StoredLane, segments: Segments) -> None:
        """Raise Retriable if the ranges have changed since they were read: files and memory are of two moments then.

        To be called once everything else is loaded. A lane goes on in memory only after the store has its new range.
        """
        self._refresh()
        if stored.chain.ranges != segments.chain.ranges:
            raise Retriable("the ranges of the log changed while they were looked at", "try again")

    def _locate(
        self, connection: Connection, request: int, lane: int, by: str, value: int,
        answer: Callable[[LaneReader, Place, int, int | None], m.Message | None], last: bool = False,
        trims: bool = False,
    ) -> None:  # fmt: skip
        """Answer with what needs to know where a place is, and where the lane starts.

        If no copy of the start can be read, only a trim goes on: it needs no seq there, and is how to get rid of it.
        """
        positions.check_way(by)
        reader = self._fresh_reader(lane)
        place, stored = reader.locate(by, value), reader.stored
        if place is None:
            raise Retriable("a place can't be told while a sequencer takes over", "try again")
        if stored is None:
            message = answer(reader, self._memory_start(reader), *place)
            if message is not None:
                connection.answer(request, message)
            return
        segments = self.segments(lane, stored, stored.through(), reader.trimmed)
        if by == "index" and value < max(reader.trimmed, stored.chain.start):
            place = value, None  # files that had it may be gone: not to be taken for a place above all that is there
        on_disk = place[0] == ON_DISK

        def look() -> tuple[Place | None, Place | None]:
            try:
                first = segments.first()
            except Corrupt:
                if not trims:
                    raise
                first = Place(max(reader.trimmed, stored.chain.start), 0)
            return first, segments.locate(by, value) if on_disk else None

        def with_places(found: tuple[Place | None, Place | None]) -> m.Message | None:
            index, seq = place
            if on_disk:  # nothing as young: the end, as far as it is durable
                index, seq = segments.bound, stored.chain.seq_at(segments.bound)
            if found[1] is not None:
                index, seq = found[1].index, None if found[1].instead else found[1].seq
            start = found[0] or self._start_above(reader, segments)
            self._check_unchanged(stored, segments)
            return answer(reader, start, index, seq)

        again = None if last else partial(
            self._locate, connection, request, lane, by, value, answer, last=True, trims=trims
        )  # fmt: skip
        self._answer_later(connection, request, look, with_places, again)

    def _answer_later(
        self, connection: Connection, request: int, job: Callable[[], object],
        answer: Callable[..., m.Message | None], again: Callable[[], None] | None, queue: FairJobs | None = None,
    ) -> None:  # fmt: skip
        """Run a job on segment files (or in another queue); its result becomes the answer.

        `again` asks once more if no copy was good: it may have been trimmed and dropped, or compacted, meanwhile.
        """

        def done(result: object) -> None:
            if connection.gone:
                return
            try:
                if isinstance(result, Corrupt) and again is not None:
                    again()
                    return
                if isinstance(result, Exception):
                    raise result
                message = answer(result)
            except Exception as error:
                connection.fail(request, _typed(error))
                _raise_unknown(error)
                return
            if message is not None:
                connection.answer(request, message)

        (queue or self.warm).run(connection, job, done, lambda: not connection.full)

    def measure(self, connection: Connection, request: int, ask: m.Measure, last: bool = False) -> None:
        """Answer with pieces of a span."""
        if ask.table:
            self._measure_table(connection, request, ask)
            return
        reader = self._fresh_reader(ask.lane)
        check_measure(ask, reader.trimmed)
        if (hot := reader.measured(ask.start, ask.stop)) is None:
            raise Retriable("a span can't be measured while a sequencer takes over", "try again")

        def answer(found: list[Cut]) -> m.PiecesAre:
            return m.PiecesAre(lane=ask.lane, cuts=found)

        if (stored := reader.stored) is None or hot.start <= ask.start:
            connection.answer(request, answer(pieces(ask, hot, None)))
            return
        segments = self.segments(ask.lane, stored, stored.through(), reader.trimmed)
        again = None if last else partial(self.measure, connection, request, ask, last=True)
        self._answer_later(connection, request, partial(pieces, ask, hot, segments), answer, again)

    def _measure_table(self, connection: Connection, request: int, ask: m.Measure, last: bool = False) -> None:
        """Answer with files of the topic's table; a table that changed meanwhile is asked once more."""
        self._fresh_reader(ask.lane)
        check_measure(ask, 0)
        tables, tier = self.tables.reader, self._tier(ask.lane)

        def answer(cuts: list[Cut]) -> m.PiecesAre:
            return m.PiecesAre(lane=ask.lane, cuts=cuts[: ask.pieces_max], table=True)

        if tier is None:
            connection.answer(request, answer([]))
            return
        job = partial(tables.cuts, tier, ask.lane, ask.start, ask.stop, ask.piece_bytes)
        again = None if last else partial(self._measure_table, connection, request, ask, last=True)
        self._answer_later(connection, request, job, answer, again, self.tables)

    # --- fetches ------------------------------------------------------------------------------------------------------
    def fetch(self, connection: Connection, request: int, ask: m.Fetch) -> None:
        """Answer now, or when there is something, or when the client's patience is over."""
        if ask.read not in _MODES or ask.by not in _WAYS:
            raise BadValue(
                f"fetch by {ask.by!r}, read {ask.read!r}", f"by {', '.join(_WAYS)}; read {' or '.join(_MODES)}"
            )
        if ask.by != "index":
            self._refresh()  # a new reader knows of every trim that was answered before
        now_us = self._clock.now_us()
        begun = ask.start if ask.by == "index" else None
        parked = Parked(connection, request, ask, now_us + ask.wait_ms * 1000, begun)
        if not self._try(parked, now_us):
            connection.parked += 1
            self._parked.append(parked)
            if self._waits_for_disks(parked):
                self._for_disks[parked] = None

    def retry(self, now_us: int) -> bool:
        """Try all that wait. True if something was answered."""
        self.warm.poll(now_us)
        if (slowest := self._unread.look(now_us)) is not None:
            slowest.abort(TimedOut(f"the client holds {slowest.unread_bytes()} bytes that it does not read"))
        went_on = self._unread.go_on()
        self.warm.start()
        self.tables.start()
        if not self._parked:
            return went_on
        for lane in {parked.ask.lane for parked in self._for_disks}:
            self._durable.through(lane)
        waiting, self._parked = self._parked, []
        for parked in waiting:
            try:
                done = parked.done or self._try(parked, now_us)
            except EmbarcaderoError as error:
                parked.connection.fail(parked.request, error)
                done = True
            if done:
                parked.connection.parked -= 1
                self._for_disks.pop(parked, None)
            else:
                self._parked.append(parked)
        return went_on or len(self._parked) != len(waiting)

    def _try(self, parked: Parked, now_us: int) -> bool:
        """Answer a fetch if there is something to say, or if its time is over."""
        if parked.connection.clogged or parked.on_disk:
            return False
        reader, ask = self.reader(parked.ask.lane), parked.ask
        over = now_us >= parked.deadline_us
        if not over and reader.news(ask.read) == parked.seen:
            return False
        room = self._unread.allowed(parked.connection, ask.max_bytes)
        if not room:
            return False
        ask = _with_room(ask, room)
        found = reader.fetch(ask, now_us)
        if found is None:
            if over:
                raise Retriable("nothing can be read while a sequencer takes over", "try again")
            return False
        if found.elsewhere is not None and reader.stored is not None:
            self._from_disk(parked, reader, reader.stored, found, found.elsewhere)
            return parked.done
        if found.empty and not over and not found.over(ask):
            self._wait_for_more(parked, found)
            return False
        if self._from_table(parked, ask, found):
            return parked.done
        self._send(parked, found, now_us)
        return True

    @staticmethod
    def _wait_for_more(parked: Parked, found: FetchResult) -> None:
        parked.seen = found.tail_index
        if not found.to_come:
            parked.ask = at_index(parked.ask, found.next_index)

    def _send(self, parked: Parked, found: FetchResult, now_us: int) -> None:
        if found.gap is not None and parked.begun is not None and found.gap.start > parked.begun:
            # entries that are not for readers came first: a gap begins where the reader is
            found = FetchResult(found.entries[:0], [], found.gap.start, found.tail_index)
        parked.connection.send_found(parked.request, found)
        self._unread.hold(parked.connection)
        lane, entries = parked.ask.lane, found.entries
        parked.connection.reading[lane] = (found.next_index, now_us)
        if len(entries):
            size, of_broker = int(entries["size"].sum()), self._lanes.known.get(lane)
            topic = lane if of_broker is None else of_broker.topic
            self._counters.went_out[topic].add(len(entries), int(entries["count"].sum()), size)
            if parked.seen >= 0:  # it waited: what it gets now is new
                self._counters.delivery_us.add(max(0, self._clock.wall_us() - int(entries["append_us"][0])))

    def _from_disk(
        self, parked: Parked, reader: LaneReader, stored: StoredLane, found: FetchResult, ask: m.Fetch
    ) -> None:
        """Have a fetch answered from segment files."""
        segments, tail = self.segments(ask.lane, stored, found.tail_index, reader.trimmed), found.tail_index
        chain, trimmed, parked.on_disk = stored.chain, reader.trimmed, True
        read = _Read(self._unread, parked.connection, ask)

        def done(result: FetchResult | Exception) -> None:
            read.end()
            parked.on_disk, now_us = False, self._clock.now_us()
            self._epoch.steps.at(Step.READ_DISK)
            if parked.connection.gone or parked.done:
                return
            try:
                if isinstance(result, Corrupt) and (self._changed(stored, chain) or reader.trimmed > trimmed):
                    parked.seen = _NOT_TRIED  # sealed meanwhile, and goes on in the next range; or it was trimmed
                elif isinstance(result, Exception):
                    raise result
                elif not parked.connection.clogged and reader.trimmed <= _first_index(result):
                    self._answer_from_disk(parked, reader, read.ask, result, tail, now_us)
                else:
                    parked.seen = _NOT_TRIED  # it has to be read again
            except Exception as error:
                self._fail(parked, error)

        self.warm.fetch(parked.connection, read, segments, done)

    # --- tables -------------------------------------------------------------------------------------------------------
    def _from_table(self, parked: Parked, ask: m.Fetch, found: FetchResult) -> bool:
        """Have a fetch answered from the topic's table, if brokers have nothing there any more. False: they answer.

        The tier is looked at after `found`: brokers drop only what is below the frontier that the store had before.
        """
        gap = found.gap
        if not ask.table or not self.tables.offered or gap is None or gap.kind is not GapKind.TRIMMED:
            return False
        if (tier := self._tier(ask.lane)) is None:
            return False
        start, frontier = tier.start(ask.lane)[0], tier.frontier(ask.lane)[0]
        if gap.start < start:  # trimmed from the table, too
            found.gap = Gap(GapKind.TRIMMED, gap.start, min(start, gap.stop))
            found.next_index = found.gap.stop
            return False
        stop = min(gap.stop, frontier, gap.stop if ask.stop is None else ask.stop)
        if gap.start >= stop:
            return False
        _, schema = self._directory.described(self._topic_name(ask.lane))
        schemas = decode_versions(schema.columns, schema.widths)
        tables, parked.on_disk = self.tables.reader, True
        read = _Read(self._unread, parked.connection, at_index(ask, gap.start))
        done = partial(self._table_read, parked, read, tier, found.tail_index)
        self.tables.run(
            parked.connection, lambda: tables.fetch(tier, schemas, read.ask, stop), done, read.may_start
        )  # fmt: skip
        return True

    def _table_read(self, parked: Parked, read: _Read, tier: Tier, tail: int, result: FetchResult | Exception) -> None:
        """Send what was read in a table, unless the table or its start changed meanwhile: then it is read again."""
        read.end()
        parked.on_disk = False
        if parked.connection.gone or parked.done:
            return
        try:
            now = self._tier(parked.ask.lane)
            moved = now is None or now.metadata != tier.metadata
            if isinstance(result, BadTable) and moved:
                parked.seen = _NOT_TRIED  # files were compacted or collected after the read was planned
            elif isinstance(result, Exception):
                raise result
            elif parked.connection.clogged or now is None or now.start(parked.ask.lane)[0] > _first_index(result):
                parked.seen = _NOT_TRIED
            else:
                result.tail_index = max(result.tail_index, tail)
                self._send(parked, result, self._clock.now_us())
                parked.done = True
        except Exception as error:
            self._fail(parked, error)

    def _changed(self, stored: StoredLane, chain: object) -> bool:
        self._refresh()
        return stored.chain is not chain

    def _answer_from_disk(
        self, parked: Parked, reader: LaneReader, ask: m.Fetch, found: FetchResult, tail: int, now_us: int
    ) -> None:
        found.tail_index = max(found.tail_index, tail)
        found.to_come = found.to_come and not reader.closed  # there it goes on at the end, which is told
        if found.empty and now_us < parked.deadline_us and not found.over(ask):
            self._wait_for_more(parked, found)
            parked.seen = _NOT_TRIED if not found.to_come else parked.seen
            return
        if self._from_table(parked, ask, found):
            return
        self._send(parked, found, now_us)
        parked.done = True
        stored, following = reader.stored, at_index(ask, found.next_index)
        if stored is None or not found.payloads or stored.chain.owner(found.next_index) is None or found.over(ask):
            return
        segments = self.segments(ask.lane, stored, tail, reader.trimmed)
        if found.next_index < min(segments.bound, reader.memory_from(now_us) or segments.bound):
            self.warm.read_ahead(parked.connection, following, segments, now_us, self._unread.most(ask.max_bytes))

    @staticmethod
    def _fail(parked: Parked, error: Exception) -> None:
        if not parked.done:
            parked.connection.fail(parked.request, _typed(error))
            parked.done = True
        _raise_unknown(error)


def _with_room(ask: m.Fetch, room: int) -> m.Fetch:
    """A fetch that asks for at most so many bytes."""
    return ask if ask.max_bytes <= room else msgspec.structs.replace(ask, max_bytes=room)


def _typed(error: Exception) -> EmbarcaderoError:
    """What a client is told: also of an error that nobody thought of, for nobody else answers it."""
    if isinstance(error, EmbarcaderoError):
        return error
    return Corrupt(f"this can't be read: {error!r}", "look at the broker's log, and report it: this is a bug")


def _raise_unknown(error: Exception) -> None:
    """Let what is a bug be seen: on an event loop that is a line in the log, with its place."""
    if not isinstance(error, EmbarcaderoError):
        raise error


def _first_index(found: FetchResult) -> int:
    """Where an answer begins: what was trimmed since must not be in it."""
    return int(found.entries["index"][0]) if len(found.entries) else found.next_index


def _cold_start(tier: Tier | None, lane: int, hot: Place) -> Place:
    """Where the lane's part in the topic's table starts, if that is below what brokers have; else `hot` itself."""
    if tier is None or tier.start(lane) >= min(tier.frontier(lane), (hot.index, hot.seq)):
        return hot
    return Place(*tier.start(lane))
