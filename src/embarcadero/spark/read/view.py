"""A driver's questions to the log: starts and ends of lanes, positions, sizes of spans, and where to cut them.

The arithmetic of plans (sharing a limit among lanes, cutting a lane into tasks) sends no requests.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, FuturePosition, Trimmed, UnknownTopic
from embarcadero.limits import (
    SPARK_TASK_BYTES,
    SPARK_TASK_BYTES_MIN,
    SPARK_TASKS_MAX,
    SPARK_TASKS_USUAL,
)
from embarcadero.spark.processes import known_cores, shared_log
from embarcadero.spark.read.options import GO_ON, ReadOptions, RecordPosition, Where, WhereBy
from embarcadero.spark.read.tasks import TablePart, table_part
from embarcadero.types import Cut, Order, Position, Span, Tail
from embarcadero.wire.schemas import RAW, TopicSchemas

if TYPE_CHECKING:
    from embarcadero.tier.snapshots import TableFile
    from embarcadero.tier.table_reads import TopicTable

LaneKey = tuple[str, int]
"""A lane of a read: the name of its topic, and its number."""
ShareKey = TypeVar("ShareKey", int, LaneKey)
LaneValue = TypeVar("LaneValue")
_TRIES: Final = 4
"""How often pieces are halved to get the requested number of tasks; after that, batches are cut."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


LaneEnds = dict[LaneKey, tuple[RecordPosition, RecordPosition]]
"""By topic and lane: the start and the end of a read or a micro-batch."""
_Measured = dict[LaneKey, list[Cut]]
_Cuts = dict[LaneKey, tuple[RecordPosition, ...]]


def fair_shares(limit: int, waiting: Mapping[str, int]) -> dict[str, int]:
    """Share a limit evenly among topics. Unused parts go to the others, so a backlog delays only its own topic.

    If there is less than one for each, the topics with the most records get it. Shares add up to the limit, or to all
    waiting records.
    """
    given: dict[str, int] = {}
    remaining = limit
    for number, topic in enumerate(sorted(waiting, key=lambda topic: (waiting[topic], topic))):
        given[topic] = min(waiting[topic], remaining // (len(waiting) - number))
        remaining -= given[topic]
    return given


def shares(limit: int, waiting: Mapping[ShareKey, int]) -> dict[ShareKey, int]:
    """Share a limit among lanes in proportion to their records. Shares add up to the limit, or to all records."""
    total = sum(waiting.values())
    if total <= limit:
        return dict(waiting)
    exact = {lane: limit * amount for lane, amount in waiting.items()}
    given = {lane: amount // total for lane, amount in exact.items()}
    remaining = limit - sum(given.values())
    for lane in sorted(exact, key=lambda lane: (-(exact[lane] % total), lane))[:remaining]:
        given[lane] += 1
    return given


def lane_shares(limit: int, waiting: Mapping[LaneKey, int]) -> dict[LaneKey, int]:
    """Share a limit evenly among topics, and a topic's share among its lanes in proportion to their records."""
    found: dict[LaneKey, int] = {}
    topics = by_topic(waiting)
    fair = fair_shares(limit, {topic: sum(lanes.values()) for topic, lanes in topics.items()})
    for topic, lanes in topics.items():
        found |= {(topic, lane): share for lane, share in shares(fair[topic], lanes).items()}
    return found


def by_topic(values: Mapping[LaneKey, LaneValue]) -> dict[str, dict[int, LaneValue]]:
    """Regroup values of lanes by topic, then by lane."""
    found: dict[str, dict[int, LaneValue]] = {}
    for (topic, lane), value in values.items():
        found.setdefault(topic, {})[lane] = value
    return found


def task_bytes(total: int, tasks_min: int | None, cores: int | None = None) -> int:
    """Bytes for one task of a read of `total` bytes, such that all known cores are busy until the end."""
    together = cores or 1
    usual = -(-SPARK_TASKS_USUAL // together) * together
    tasks = max(-(-total // SPARK_TASK_BYTES), min(usual, total // SPARK_TASK_BYTES_MIN), 1)
    if tasks > together:
        tasks = min(-(-tasks // together) * together, SPARK_TASKS_MAX)
    bounded = max(SPARK_TASK_BYTES_MIN, -(-total // min(tasks, SPARK_TASKS_MAX)))
    return bounded if tasks_min is None else max(1, min(bounded, total // tasks_min))


def within_bytes(pieces: Sequence[Cut], limit: int) -> Cut:
    """Return the end of a read of at most `limit` bytes, and its bytes; it has at least the first piece."""
    end, total = pieces[0], pieces[0].bytes
    for piece in pieces[1:]:
        if total + piece.bytes > limit:
            break
        end, total = piece, total + piece.bytes
    return Cut(end.index, end.seq, total)


def cut_positions(start: RecordPosition, stop: RecordPosition, pieces: Sequence[Cut]) -> tuple[RecordPosition, ...]:
    """Positions strictly between start and stop at which to cut, from measured pieces; thinned out if too many."""
    by_seq = {cut.seq: cut for cut in reversed(pieces) if start.seq < cut.seq < stop.seq}  # at records only
    inner = [RecordPosition(cut.index, cut.seq) for _, cut in sorted(by_seq.items())]
    every = -(-(len(inner) + 1) // SPARK_TASKS_MAX)
    return tuple(inner[every - 1 :: every])


def tightened(stop: RecordPosition, pieces: Sequence[Cut]) -> RecordPosition:
    """Return the same position without preceding entries that have no records."""
    return next((RecordPosition(cut.index, cut.seq) for cut in pieces if cut.seq == stop.seq), stop)


def finer(
    start: RecordPosition, stop: RecordPosition, cuts: Sequence[RecordPosition], tasks_min: int
) -> tuple[RecordPosition, ...]:
    """Add cuts inside of batches if there are too few tasks: pieces of one batch are cut by seq."""
    edges = [start, *cuts, stop]
    single = [number for number in range(len(edges) - 1) if edges[number].index == edges[number + 1].stop - 1]
    missing = tasks_min - (len(edges) - 1)
    if missing <= 0 or not single:
        return tuple(cuts)
    extra = shares(missing, {number: edges[number + 1].seq - edges[number].seq - 1 for number in single})
    found: list[RecordPosition] = []
    for number, (low, high) in enumerate(pairwise(edges)):
        parts = extra.get(number, 0) + 1
        base = low.seq - low.within
        steps = {low.seq + (high.seq - low.seq) * part // parts for part in range(1, parts)}
        found += [RecordPosition(low.index, seq, seq - base) for seq in sorted(steps)]
        found += [high]
    return tuple(found[:-1])


def table_pieces(table: TopicTable, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Cut batches [start, stop) into pieces: files, and row groups of files that are too large for one piece.

    `stop` is at most the frontier. Bytes are those of files.
    """
    found: list[Cut] = []
    for file in table.files(lane, start, stop):
        whole = [Cut(file.stop_index, file.stop_seq, file.bytes)]
        found += whole if file.bytes <= piece_bytes else _row_groups(table, file)
    joined: list[Cut] = []
    for cut in found:
        if cut.index <= start or cut.index > stop:
            continue
        if joined and joined[-1].bytes + cut.bytes <= piece_bytes:
            joined[-1] = Cut(cut.index, cut.seq, joined[-1].bytes + cut.bytes)
        else:
            joined.append(cut)
    return joined


def _row_groups(table: TopicTable, file: TableFile) -> list[Cut]:
    """Return the row groups of a file. Each has whole batches; it ends at the first row of the next one."""
    import pyarrow.parquet as pq

    from embarcadero.tier.storage import reading  # needs PyIceberg, which only tiered topics require

    with table.storage.open(file.path) as stream, reading(file.path):
        facts = pq.ParquetFile(stream).metadata
        names = [facts.schema.column(number).path for number in range(facts.num_columns)]
        columns = [names.index("_index"), names.index("_seq")]
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        firsts = [[group.column(column).statistics.min for column in columns] for group in groups]
        sizes = [sum(group.column(column).total_compressed_size for column in range(len(names))) for group in groups]
    ends = [*firsts[1:], [file.stop_index, file.stop_seq]]
    return [Cut(index, seq, size) for (index, seq), size in zip(ends, sizes, strict=True)]


def payload_pieces(table: TopicTable, lane: int, start: int, stop: int, piece_bytes: int, most: int) -> list[Cut]:
    """The first pieces of batches [start, stop), measured in published bytes, which limits count."""
    found: list[Cut] = []
    last = Cut(*table.tier.frontier(lane), 0)  # if the table has no part of the span
    size = 0
    for group in table.rows(lane, start, stop, ["_index", "_seq", "_size", "_count"]):
        index, seq, sizes, counts = (column.to_numpy() for column in group.columns)
        first = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
        entries = zip(*(column[first].tolist() for column in (index, seq, sizes, counts)), strict=True)
        for at, begins, many, count in entries:
            size += many
            last = Cut(at + 1, begins + count, size)
            if size >= piece_bytes:
                found.append(last)
                size = 0
                if len(found) >= most:
                    return found
    return [*found, last] if size or not found else found


@dataclass(frozen=True, slots=True)
class LaneNow:
    """A lane as it is now: its readable start, its end for this reader, and whether that end is final."""

    lane: int
    start: RecordPosition
    end: RecordPosition
    ordered: RecordPosition  # its end for readers of records that are not durable yet
    closed: bool
    holes: tuple[Span, ...] = ()  # seqs that restarts skipped


@dataclass(frozen=True, slots=True)
class TopicNow:
    """A topic and its lanes at one moment."""

    about: TopicInfo
    lanes: dict[int, LaneNow]


TopicsNow = dict[str, TopicNow]
"""The topics of a read by name, at the same moment."""


class ReadView:
    """Questions about all topics of one read, over the single client of this process."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    @property
    def log(self) -> Log:
        """The client."""
        return shared_log(self.options.brokers)

    @property
    def table_properties(self) -> tuple[str, ...]:
        """The properties for files of tables, from the configuration of this process."""
        return self.log.table_properties

    def topic(self, name: str) -> TopicView:
        """Return a view of one of the topics."""
        return TopicView(self.options, name)

    def schemas(self) -> TopicSchemas:
        """Return the schemas of the topic; of several, the raw schema. Raises UnknownTopic, BadSchema."""
        if not self.options.several:
            return self.log.describe(self.options.topics[0]).versions
        topics = {topic.name: topic for topic in self.log.topics(hidden=self.options.pattern is None)}
        if missing := [name for name in self.options.topics if name not in topics]:
            raise UnknownTopic(f"there is no topic {missing[0]!r}", "see `embarcadero topic list`")
        for name in self.options.chosen(topics):
            self._check_raw(name, topics[name].schema_version > 0)
        return RAW

    def _check_raw(self, name: str, typed: bool) -> None:
        if typed:
            raise BadSchema(
                f"topic {name!r} has a schema, and a read of several topics takes raw topics only",
                "read topics with a schema one by one; with union() or unionByName() they become one frame",
            )

    def now(self, expected: Mapping[str, Collection[int]] | None = None) -> TopicsNow:
        """Look up the topics and their lanes: faster if the lanes are the expected ones.

        Raises UnknownTopic if the only topic does not exist. Of several topics, missing ones are left out.
        """
        known, names, log = expected or {}, self.options.topics, self.log
        if self.options.pattern is not None:
            names = tuple(self.options.chosen(topic.name for topic in log.topics()))
        several = self.options.several
        found = log.survey({name: known.get(name, ()) for name in sorted(names)}, missing_ok=several)
        for name, (about, _) in found.items() if several else ():
            self._check_raw(name, about.versions.typed)
        return {name: self.topic(name).seen(about, tails) for name, (about, tails) in found.items()}

    def resolve(self, where: Where, now: TopicsNow, option: str, *, rest: Where) -> dict[LaneKey, RecordPosition]:
        """Resolve an option to positions by topic and lane; lanes that the option does not name are at `rest`."""
        named = dict(where.topics)
        if unknown := sorted(named.keys() - now.keys()):
            raise BadValue(
                f"option {option!r} names topic {unknown[0]!r}, but the topics are {', '.join(now) or 'none yet'}",
                "leave it out, or create the topic first",
            )
        found: dict[LaneKey, RecordPosition] = {}
        for name, topic in now.items():
            one = named.get(name, rest) if where.by == WhereBy.TOPICS else where
            positions = self.topic(name).resolve(one, topic, option, rest=rest)
            found |= {(name, lane): position for lane, position in positions.items()}
        return found

    # --- tasks --------------------------------------------------------------------------------------------------------
    def cuts(self, now: TopicsNow, ends: LaneEnds) -> _Cuts:
        """Cut spans of lanes into tasks of about the same size: at least `minPartitions` in all."""
        wanted, piece = self.options.min_partitions or 1, SPARK_TASK_BYTES
        measured = self._all_pieces(now, ends, piece)
        sizes = [sum(cut.bytes for cut in pieces) for pieces in measured.values()]
        size = task_bytes(sum(sizes), self.options.min_partitions, known_cores(os.environ))
        if size < min(piece, max(sizes, default=0)):
            measured, piece = self._all_pieces(now, ends, size), size
        found = _cut(ends, measured)
        for _ in range(_TRIES):  # batches, files and row groups are not all of the same size
            if _tasks(found) >= wanted or piece == 1:
                break
            piece = max(1, piece // 2)
            measured = self._all_pieces(now, ends, piece)
            found = _cut(ends, measured)
        return self._finer(ends, measured, found, wanted - _tasks(found))

    def _all_pieces(self, now: TopicsNow, ends: LaneEnds, piece: int) -> _Measured:
        return {
            (topic, lane): self.topic(topic).pieces(now[topic], lane, *span, piece)
            for (topic, lane), span in ends.items()
        }

    def _finer(self, ends: LaneEnds, measured: _Measured, found: _Cuts, missing: int) -> _Cuts:
        """Cut batches by seq, for more tasks than there are batches."""
        if missing <= 0:
            return found
        extra = shares(missing, {key: high.seq - low.seq for key, (low, high) in ends.items()})
        finest: _Cuts = {}
        for key, cuts in found.items():
            low, high = ends[key]
            tight = low if low.within else self.topic(key[0]).position_of(key[1], low.seq)
            finest[key] = finer(tight, tightened(high, measured[key]), cuts, len(cuts) + 1 + extra[key])
        return finest


class TopicView:
    """Questions about one topic, over the single client of this process."""

    def __init__(self, options: ReadOptions, topic: str) -> None:
        self.options, self._topic = options, topic

    @property
    def log(self) -> Log:
        """The client."""
        return shared_log(self.options.brokers)

    @property
    def table_properties(self) -> tuple[str, ...]:
        """The properties for files of tables, from the configuration of this process."""
        return self.log.table_properties

    def seen(self, about: TopicInfo, tails: Collection[Tail]) -> TopicNow:
        """Return the topic as brokers reported it."""
        last = {lane.lane: lane.end for lane in about.lanes}
        return TopicNow(about, {tail.lane: self._lane(tail, last.get(tail.lane)) for tail in tails})

    def _lane(self, tail: Tail, last: int | None) -> LaneNow:
        durable = self.options.read == "durable"
        ordered = RecordPosition(tail.index, tail.seq)
        end = RecordPosition(tail.durable_index, tail.durable_seq) if durable else ordered
        start = RecordPosition(tail.start_index, tail.start_seq)
        closed = last is not None and end.index >= last
        return LaneNow(tail.lane, min(start, end), end, ordered, closed, tail.holes)

    # --- positions ----------------------------------------------------------------------------------------------------
    def position_of(self, lane: int, seq: int) -> RecordPosition:
        """Return the position of a record: in its batch, or after lost records. Raises Trimmed, FuturePosition."""
        return _record_position(self.log.position_of(self._topic, seq=seq, lane=lane), seq)

    def position_at_index(self, lane: int, index: int) -> RecordPosition:
        """Return the position of a batch, or the one after lost records. Raises Trimmed, FuturePosition."""
        return _record_position(self.log.position_of(self._topic, index=index, lane=lane))

    def position_at(self, now: LaneNow, us: int) -> RecordPosition:
        """Return the first batch appended at or after a time; the start of the lane if that was trimmed."""
        try:
            found = self.log.position_at(self._topic, _EPOCH + timedelta(microseconds=us), lane=now.lane)
        except Trimmed:
            return now.start
        return min(max(_record_position(found), now.start), now.end)

    def resolve(self, where: Where, now: TopicNow, option: str, *, rest: Where) -> dict[int, RecordPosition]:
        """Resolve an option to positions by lane; lanes that the option does not name are at `rest`."""
        if where.by == WhereBy.LANES:
            named = dict(where.lanes)
            if unknown := named.keys() - now.lanes.keys():
                raise BadValue(
                    f"option {option!r} names lane {min(unknown)}, but the lanes of topic {self._topic!r} are "
                    f"{', '.join(map(str, sorted(now.lanes))) or 'none yet'}",
                    "name one of these lanes: those of orders 0 and 1 come with brokers, and go with their last record",
                )
            return {lane: self._resolved(named.get(lane, rest), each, option) for lane, each in now.lanes.items()}
        if where.by == WhereBy.SEQ and now.about.order <= Order.BROKER:
            raise BadValue(
                f"topic {self._topic!r} has order {now.about.order}: a seq is a position in one of its lanes",
                f'use JSON by lane: .option("{option}", \'{{"{min(now.lanes, default=4096)}": {{"seq": 1000}}}}\')',
            )
        return {lane: self._resolved(where, each, option) for lane, each in now.lanes.items()}

    def _resolved(self, where: Where, now: LaneNow, option: str) -> RecordPosition:
        if where.by in (WhereBy.EARLIEST, WhereBy.LATEST):
            return now.start if where.by == WhereBy.EARLIEST else now.end
        if where.by == WhereBy.TIME:
            return self.position_at(now, where.value)
        unit, number = ("seq", 1) if where.by == WhereBy.SEQ else ("index", 0)
        first, last = now.start[number], now.end[number]
        if where.value > last:
            raise FuturePosition(
                f"option {option!r}: {unit} {where.value} is beyond the end of lane {now.lane} ({last})",
                f'use at most {last}, or "latest"',
            )
        if where.value < first:
            if self.options.fail_on_data_loss:
                raise Trimmed(
                    f"option {option!r}: records before {unit} {first} of lane {now.lane} are trimmed",
                    f'use at least {first}, or "earliest"; {GO_ON}',
                )
            return now.start
        if where.value == last:
            return now.end
        if where.by == WhereBy.SEQ:
            return self.position_of(now.lane, where.value)
        return self.position_at_index(now.lane, where.value)

    # --- sizes --------------------------------------------------------------------------------------------------------
    def pieces(self, now: TopicNow, lane: int, start: RecordPosition, stop: RecordPosition, piece: int) -> list[Cut]:
        """Cut a span into pieces: of its table below the frontier, of brokers above it."""
        table, frontier = self._table_part(now, lane, start, stop)
        found: list[Cut] = []
        if table is not None:
            found = table_pieces(table, lane, start.index, frontier, piece)
        elif start.index < frontier:
            found = self.log.measure(self._topic, start.index, frontier, piece, lane=lane)
        return found + self._measured(now, lane, max(start.index, frontier), stop, piece)

    def _table_part(self, now: TopicNow, lane: int, start: RecordPosition, stop: RecordPosition) -> TablePart:
        return table_part(now.about.tier, self._topic, lane, start.index, stop.stop, self.table_properties)

    def first_pieces(
        self, now: TopicNow, lane: int, start: RecordPosition, stop: RecordPosition, piece: int, most: int
    ) -> list[Cut]:
        """Return the first pieces of a span, measured in published payload bytes."""
        table, frontier = self._table_part(now, lane, start, stop)
        if start.index >= frontier:
            return self._measured(now, lane, start.index, stop, piece, most)
        if table is None:
            return self.log.measure(self._topic, start.index, frontier, piece, lane=lane)[:most]
        return payload_pieces(table, lane, start.index, frontier, piece, most)

    def _measured(
        self, now: TopicNow, lane: int, start: int, stop: RecordPosition, piece: int, most: int | None = None
    ) -> list[Cut]:
        if start >= stop.stop:
            return []
        try:
            return self.log.measure(now.about, start, stop.stop, piece, lane=lane, pieces_max=most, table=False)
        except Trimmed:  # brokers dropped it since the look-up; tasks find it in the table, or report the loss
            return [Cut(stop.stop, stop.seq, 0)]


def _cut(ends: LaneEnds, measured: _Measured) -> _Cuts:
    return {key: cut_positions(*span, measured[key]) for key, span in ends.items()}


def _tasks(cuts: _Cuts) -> int:
    return sum(len(each) + 1 for each in cuts.values())


def _record_position(found: Position, seq: int | None = None) -> RecordPosition:
    """The position of a batch, or of a record in it; lost records are skipped."""
    if seq is None or seq <= found.seq:
        return RecordPosition(found.index, found.seq)
    return RecordPosition(found.index, seq, seq - found.seq)
