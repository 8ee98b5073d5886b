"""The readers that Spark calls: a topic, or a part of it, as a DataFrame; topics as a stream of micro-batches.

Theory of operation. Spark keeps the reader of a stream in one Python process of the driver for as long as the query
runs. It asks the reader for the end of the next micro-batch, then for its tasks. From 4.2 on Spark passes the end of
the last micro-batch and the limit of the next one (`LimitedReader`); earlier versions only ask where the topic ends
(`UnlimitedReader`). Tasks are planned from the two offsets, which Spark writes to the checkpoint before a task runs.
The same offsets give the same rows, and while the log between them stays where it is, the same tasks.

A query of several topics looks at each of them with every micro-batch. It reads a new topic from its earliest record.
With `LimitedReader` the topic's first position is in the end of its first micro-batch, so that the same records are
read again after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from embarcadero.errors import BadValue, EmbarcaderoError, RecordsLost, Trimmed, UnknownTopic
from embarcadero.spark.processes import shared_log
from embarcadero.spark.read.options import (
    EARLIEST,
    GO_ON,
    LATEST,
    LaneOffset,
    Offset,
    ReadOptions,
    RecordPosition,
    StreamOffset,
    TaskSpan,
    WhereBy,
    parse_stream_offset,
    read_options,
    spans,
)
from embarcadero.spark.read.tasks import (
    Bounds,
    SpanReader,
    bounds,
    check_schema,
    column_names,
    spark_schema,
    understood,
)
from embarcadero.spark.read.view import (
    LaneEnds,
    LaneKey,
    LaneNow,
    ReadView,
    TopicNow,
    TopicsNow,
    TopicView,
    by_topic,
    lane_shares,
    within_bytes,
)
from embarcadero.spark.versions import (
    ADMISSION_CONTROL,
    Filter,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    check_options,
)
from embarcadero.types import LanePosition, id_text

# --- tables -----------------------------------------------------------------------------------------------------------
_PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def checked_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """Return the options of a read. Raises BadValue for a wrong option, NotAvailable if PySpark is too old for one."""
    options = read_options(given, streaming=streaming)
    check_options(options)
    return options


def frame_schema(given: Mapping[str, str]) -> StructType:
    """Return the columns of a topic as `load()` has them. All options are checked here, before anything is planned."""
    options = checked_options(given, streaming=None)
    shared_log(options.brokers, at_once=True)
    return spark_schema(ReadView(options).schemas(), options.columns)


def batch_reader(given: Mapping[str, str], schema: StructType) -> BatchReader:
    """Return a reader with or without push-down, as the user asks and the session allows.

    With `spark.sql.python.filterPushdown.enabled` off, Spark refuses every reader that defines `pushFilters`, and it
    does not expose the flag. But filters are pushed in a separate process, and only that process asks for them.

    With the flag on, Spark 4.3 keeps the plan that it made with filters for the whole frame. The next query over the
    same frame, or its other side in a join, gets only rows that passed these filters. So the user has to confirm that a
    frame is used once (`pushFilters`). All other frames are planned without filters, which Spark then applies itself.
    """
    options = checked_options(given, streaming=False)
    reader = span_reader(options, schema, fail_on_lost=False)
    return PushingReader(reader) if options.push_filters and filters_are_pushed() else BatchReader(reader)


def span_reader(options: ReadOptions, schema: StructType, *, fail_on_lost: bool) -> SpanReader:
    """Return the reader for workers. BadSchema if the topic does not, or not any more, have the frame's columns."""
    view = ReadView(options)
    schemas = view.schemas()
    check_schema(schema, schemas, options.pattern or ",".join(options.topics))
    return SpanReader(
        options, schemas, schema, fail_on_lost, partitions=options.partitions, table_properties=view.table_properties
    )


def filters_are_pushed() -> bool:
    """Whether this is the process in which Spark pushes filters down."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHING in sys.modules or (main is not None and main.name == _PUSHING)


class BatchReader(DataSourceReader):
    """Plans tasks of about the same size, and reads them."""

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader

    def partitions(self) -> list[InputPartition]:  # Spark requires a list
        """Plan spans of the topics as they are now, one per task."""
        options, view = self._reader.options, ReadView(self._reader.options)
        now = view.now()
        if options.pattern is not None and not now:
            raise UnknownTopic(f"no topic matches the pattern {options.pattern!r}", "see `embarcadero topic list`")
        if missing := [name for name in options.topics if name not in now]:
            raise UnknownTopic(f"there is no topic {missing[0]!r}", "see `embarcadero topic list`")
        starts = view.resolve(options.starting, now, "startingOffsets", rest=EARLIEST)
        stops = view.resolve(options.ending, now, "endingOffsets", rest=LATEST)
        _check_ends(starts, stops, "endingTimestamp" if options.ending.by == WhereBy.TIME else "endingOffsets")
        ends: LaneEnds = {}
        for (name, lane), start in starts.items():
            first, last = self._narrowed(view.topic(name), now[name].lanes[lane], start, stops[name, lane])
            if first.seq < last.seq:
                ends[name, lane] = first, last
        cuts = view.cuts(now, ends)
        return [InputPartition(span) for name in now for span in _planned(name, ends, cuts)]

    def _narrowed(
        self, view: TopicView, now: LaneNow, start: RecordPosition, stop: RecordPosition
    ) -> tuple[RecordPosition, RecordPosition]:
        """Return the part of a lane that passes the filters."""
        conditions = self._reader.conditions
        if not _allows(bounds(conditions, "_lane"), now.lane):
            return start, start
        start, stop = _clipped(start, stop, bounds(conditions, "_seq"), 1, partial(view.position_of, now.lane))
        start, stop = _clipped(start, stop, bounds(conditions, "_index"), 0, partial(view.position_at_index, now.lane))
        times = bounds(conditions, "_append_time")
        if times.low:
            start = max(start, view.position_at(now, times.low))
        if times.stop < Bounds().stop:
            stop = min(stop, view.position_at(now, times.stop))
        return start, max(start, stop)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one span; nothing without a span: Spark plans a task even then."""
        if partition.value is not None:
            yield from self._reader.read(partition.value)


class PushingReader(BatchReader):
    """A reader that Spark may push filters to."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take filters that this source applies exactly; return the others to Spark."""
        names = column_names(self._reader.schemas)
        conditions, remaining = understood(filters, names, self._reader.schemas.typed)
        only = bounds(conditions, "_partition").only
        partitions = self._reader.partitions
        if only is not None:
            partitions = tuple(sorted(only if partitions is None else only & set(partitions)))
        self._reader = replace(self._reader, conditions=tuple(conditions), partitions=partitions)
        return remaining


def _allows(found: Bounds, number: int) -> bool:
    return found.low <= number < found.stop and (found.only is None or number in found.only)


def _clipped(
    start: RecordPosition,
    stop: RecordPosition,
    found: Bounds,
    number: int,
    position_of: Callable[[int], RecordPosition],
) -> tuple[RecordPosition, RecordPosition]:
    """A span clipped to bounds of its seq (number 1) or index (number 0)."""
    low, high = start[number], stop[number]
    if found.low > low:
        start = stop if found.low >= high else position_of(found.low)
    if found.stop < high:
        stop = start if found.stop <= start[number] else position_of(found.stop)
    return start, stop


def _planned(topic: str, ends: LaneEnds, cuts: Mapping[LaneKey, tuple[RecordPosition, ...]]) -> list[TaskSpan]:
    """The tasks of one topic."""
    mine = {lane: span for (name, lane), span in ends.items() if name == topic}
    first = Offset(topic, "", {lane: LaneOffset(start) for lane, (start, _) in mine.items()})
    last = Offset(topic, "", {lane: LaneOffset(stop, cuts[topic, lane]) for lane, (_, stop) in mine.items()})
    return spans(first, last)


def _check_ends(starts: Mapping[LaneKey, RecordPosition], stops: Mapping[LaneKey, RecordPosition], option: str) -> None:
    for (topic, lane), start in starts.items():
        if stops[topic, lane].seq < start.seq:
            raise BadValue(
                f"{option} (seq {stops[topic, lane].seq}) is before startingOffsets (seq {start.seq}) in lane {lane} "
                f"of topic {topic!r}",
                "the end is exclusive and at least the start",
            )


# --- streams ----------------------------------------------------------------------------------------------------------
_FINE = 16
"""A limit on bytes is exact to about one part in this many."""

_REPORT_S = 1.0  # the longest time that a query waits for its progress report
_REPORT_AGAIN_S = 30.0
_ANY_READER: Final = "spark"  # for queries that can't keep a reader's name: PySpark 4.0 and 4.1


def stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """Return the reader of a stream. BadSchema if the topic does not have the frame's columns.

    A crash takes only records that were not durable. A stream of durable records never had them, and loses nothing.
    """
    options = checked_options(given, streaming=True)
    reader = span_reader(options, schema, fail_on_lost=options.read == "ordered")
    return LimitedReader(reader) if ADMISSION_CONTROL else UnlimitedReader(reader)


class StreamReader(DataSourceStreamReader):
    """One stream of one topic or several: the methods that every version of Spark calls. Tasks use its SpanReader."""

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader
        self._view = ReadView(reader.options)
        self._planned: TopicsNow | None = None  # the topics when the end of the next micro-batch was chosen
        self._reported: dict[
            str, tuple[dict[int, LanePosition], float]
        ] = {}  # by topic: as reported; when to report again
        self._silent_until_s = 0.0  # a progress report failed: no other one is sent before this time
        self._warned: set[str] = set()  # losses that were logged in this process

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Return the start of a new query."""
        return self._initial(f"spark-{uuid4().hex[:12]}").json()

    def _initial(self, reader: str) -> StreamOffset:
        now = self._view.now()
        positions = self._view.resolve(self._reader.options.starting, now, "startingOffsets", rest=EARLIEST)
        return self._offset(reader, now, {key: LaneOffset(position) for key, position in positions.items()})

    def _offset(self, reader: str, now: TopicsNow, lanes: Mapping[LaneKey, LaneOffset]) -> StreamOffset:
        """Return an offset of all topics. A name from the option `reader` replaces any earlier name."""
        name, known = self._reader.options.reader or reader, by_topic(lanes)
        topics = {topic: Offset(topic, name, known.get(topic, {}), each.about.id) for topic, each in now.items()}
        return StreamOffset(name, topics, self._reader.options.several)

    def _parsed(self, given: dict[str, Any]) -> StreamOffset:
        """Parse an offset that Spark kept. BadValue if it belongs to another query."""
        options, found = self._reader.options, parse_stream_offset(given)
        chosen = options.chosen(found.topics)
        dropped = sorted(found.topics.keys() - set(chosen))
        if dropped and not (options.several and chosen):
            what = f"topics that match {options.pattern!r}" if options.pattern else repr(",".join(options.topics))
            raise BadValue(
                f"the checkpoint is of a query that reads topic {dropped[0]!r}, but this query reads {what}",
                "use one checkpointLocation per query",
            )
        for name in dropped:
            self._lost(
                BadValue(
                    f"the checkpoint is of a query that also reads topic {name!r}, but this query does not",
                    f"read this topic, too; or start with a new checkpointLocation; {GO_ON}",
                )
            )
        return replace(found, topics={name: found.topics[name] for name in chosen})

    # --- tasks --------------------------------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the tasks between two offsets. An end from the last version of this source has the cuts between them."""
        begun, until = self._parsed(start), self._parsed(end)
        now, self._planned = self._planned or self._view.now(until.lanes()), None
        self._not_deleted([*begun.topics.values(), *until.topics.values()], now)
        read = {
            name: self._between(begun.topics.get(name), last, now[name])
            for name, last in sorted(until.topics.items())
            if name in now
        }
        cuts: dict[LaneKey, tuple[RecordPosition, ...]] = {}
        if not any(lane.cuts for _, last in read.values() for lane in last.lanes.values()):
            ends = {
                (name, lane): (first.of(lane), offset.position)
                for name, (first, last) in read.items()
                for lane, offset in last.lanes.items()
            }
            cuts = self._view.cuts(now, growing(ends))
        found: list[TaskSpan] = []
        for name, (first, last) in read.items():
            lanes = {lane: replace(each, cuts=cuts.get((name, lane), each.cuts)) for lane, each in last.lanes.items()}
            found += spans(first, replace(last, lanes=lanes))
        return [InputPartition(span) for span in found]

    def _between(self, begun: Offset | None, until: Offset, now: TopicNow) -> tuple[Offset, Offset]:
        """Return the start and the end of a topic's part of a micro-batch, without missing records."""
        if begun is None:  # a new topic: its lanes begin at the positions in the end, or at their start now
            starts = {lane: LaneOffset(now.lanes[lane].start) for lane in until.lanes if lane in now.lanes}
            begun = replace(until, lanes=starts | until.firsts())
        begun, until = self._same_topic(begun, now.about.id), self._same_topic(until, now.about.id)
        self._kept(begun, now)
        until = self._readable(begun, until, now)
        known = {lane: now.lanes[lane] for lane in until.lanes}
        lows = {lane: LaneOffset(low) for lane, (low, _) in self._ends(begun, known).items()}
        return replace(begun, lanes=dict(begun.lanes) | lows), until

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the records of one task."""
        return self._reader.read(partition.value)

    # --- losses -----------------------------------------------------------------------------------------------------
    def _not_deleted(self, read: Iterable[Offset], now: TopicsNow) -> None:
        """Report that topics of the query were deleted: all their unread records are lost."""
        for each in read:
            if each.topic not in now:
                self._lost(
                    RecordsLost(
                        f"topic {each.topic!r} (id {id_text(each.topic_id)}) was deleted during this query, with all "
                        "unread records",
                        f"start with a new checkpointLocation; {GO_ON}",
                    )
                )

    def _same_topic(self, read: Offset, topic_id: int) -> Offset:
        """Return the offset if it belongs to the topic with this id. Otherwise report the loss; return the beginning.

        An offset of an earlier version has no topic id, and is accepted.
        """
        if read.topic_id in (0, topic_id):
            return read
        self._lost(
            RecordsLost(
                f"topic {read.topic!r} was deleted and created again: the query read id {id_text(read.topic_id)}, "
                f"the topic now has id {id_text(topic_id)}",
                f"start with a new checkpointLocation; {GO_ON}",
            )
        )
        return replace(read, lanes={}, topic_id=topic_id)

    def _kept(self, begun: Offset, now: TopicNow) -> set[int]:
        """Return lanes of the last offset that the topic still has. Others were read to their end, or are lost."""
        kept = begun.lanes.keys() & now.lanes.keys()
        for lane in sorted(begun.lanes.keys() - kept):
            if not begun.lanes[lane].ended:
                self._lost(
                    RecordsLost(
                        f"lane {lane} of topic {begun.topic!r} is gone, but was read only to seq {begun.of(lane).seq}: "
                        "the topic was created again, or all records of the lane were removed",
                        f"start with a new checkpointLocation; {GO_ON}",
                    )
                )
        return kept

    def _readable(self, begun: Offset, until: Offset, now: TopicNow) -> Offset:
        """Return the end of a micro-batch without lanes that the topic does not have any more."""
        gone = until.lanes.keys() - now.lanes.keys()
        for lane in sorted(gone):
            low, high = begun.of(lane).seq, until.of(lane).seq
            if low < high:
                self._lost(
                    RecordsLost(
                        f"lane {lane} of topic {begun.topic!r} is gone, and its records [{low}, {high}) were not read",
                        f"start with a new checkpointLocation; {GO_ON}",
                    )
                )
        return replace(until, lanes={lane: end for lane, end in until.lanes.items() if lane not in gone})

    def _ends(self, begun: Offset, lanes: Mapping[int, LaneNow]) -> dict[int, tuple[RecordPosition, RecordPosition]]:
        """Return the readable part of a topic, by lane."""
        ends: dict[int, tuple[RecordPosition, RecordPosition]] = {}
        for lane, each in lanes.items():
            low = begun.of(lane)
            if low.seq < each.start.seq:
                self._lost(
                    Trimmed(
                        f"records [{low.seq}, {each.start.seq}) of lane {lane} of topic {begun.topic!r} were trimmed "
                        "before they were read",
                        GO_ON,
                    )
                )
                low = each.start
            if low.seq > each.ordered.seq:
                self._lost(
                    RecordsLost(
                        f"lane {lane} of topic {begun.topic!r} was read up to seq {low.seq}, and ends at "
                        f"{each.ordered.seq}: records are lost",
                        GO_ON,
                    )
                )
                low = each.ordered
            ends[lane] = low, each.end
        return ends

    def _lost(self, problem: EmbarcaderoError) -> None:
        """Raise an error, or warn of it once: the end of a micro-batch and its tasks are planned by the same rules."""
        if self._reader.options.fail_on_data_loss or problem.message not in self._warned:
            self._warned.add(problem.message)
            self._reader.lost(problem, fail=True)

    # --- progress -----------------------------------------------------------------------------------------------------
    def commit(self, end: dict[str, Any]) -> None:
        """Report the progress of this query to the cluster."""
        self._report(parse_stream_offset(end))

    def _report(self, read: StreamOffset) -> None:
        """Report progress, for operators. A failure does not fail the query, and does not block it for long."""
        reader, now_s = self._reader.options.reader or read.reader, monotonic()
        if now_s < self._silent_until_s:
            return
        for each in read.topics.values():
            positions = each.positions()
            known, new_until_s = self._reported.get(each.topic, ({}, 0.0))
            if known == positions and now_s < new_until_s:
                continue
            try:
                self._view.log.note_progress(each.topic, reader, positions, topic_id=each.topic_id, timeout=_REPORT_S)
            except UnknownTopic:
                continue
            except EmbarcaderoError:
                self._silent_until_s = monotonic() + _REPORT_AGAIN_S
                return
            self._reported[each.topic] = positions, now_s + _REPORT_AGAIN_S


class LimitedReader(StreamReader, SupportsTriggerAvailableNow):
    """A stream for PySpark 4.2 and newer: Spark passes the end of the last micro-batch, and limits the next one."""

    def __init__(self, reader: SpanReader) -> None:
        super().__init__(reader)
        self._until: dict[LaneKey, RecordPosition] | None = None  # AvailableNow: read nothing above
        self._seen: TopicsNow | None = None  # the topics at the last question

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read nothing that is published from now on."""
        self._until = {key: each.end for key, each in lanes_of(self._view.now())}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return a limit that Spark passes back. Spark takes one limit; the reader keeps the other one."""
        options = self._reader.options
        if options.max_records is not None:
            return ReadMaxRows(options.max_records)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch; `start` itself if there is nothing to read."""
        begun = self._parsed(start)
        now = self._seen = self._planned = self._view.now(begun.lanes())
        self._not_deleted(begun.topics.values(), now)
        read = {name: self._continued(begun, topic) for name, topic in now.items()}
        kept = {name: self._kept(read[name], topic) for name, topic in now.items()}
        ends = {
            (name, lane): span
            for name, topic in now.items()
            for lane, span in self._ends(read[name], topic.lanes).items()
        }
        ends = self._bounded(ends)
        if not isinstance(limit, ReadAllAvailable):
            ends = self._limited(now, ends)
        more = growing(ends)
        moved = {
            (name, lane): low
            for (name, lane), (low, _) in ends.items()
            if lane in kept[name] and low != read[name].of(lane)
        }
        gone = begun.topics.keys() - now.keys() or any(kept[name] != read[name].lanes.keys() for name in now)
        if not more and not moved and not gone:
            self._report(begun)  # Spark commits a micro-batch with the next one, and there is none
            return start
        lanes = {(name, lane): read[name].lanes[lane] for name in now for lane in kept[name]}
        lanes |= {key: LaneOffset(low) for key, low in moved.items()}
        for (name, lane), (_, high) in more.items():
            known = read[name].lanes.get(lane)
            lanes[name, lane] = replace(
                lane_end(now[name].lanes[lane], high), first=None if known is None else known.first
            )
        return self._offset(begun.reader, now, lanes).json()

    def _continued(self, begun: StreamOffset, now: TopicNow) -> Offset:
        """Return the read position of a topic. A topic that is new in the query is read from its earliest record."""
        read = begun.topics.get(now.about.name)
        if read is not None:
            return self._same_topic(read.without_cuts(), now.about.id)
        lanes = {lane: LaneOffset(each.start, first=each.start) for lane, each in now.lanes.items()}
        return Offset(now.about.name, begun.reader, lanes, now.about.id)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the topics, from the last question for a micro-batch if there was one."""
        now, self._seen = self._seen or self._view.now(), None
        lanes = {key: LaneOffset(each.end, holes=each.holes) for key, each in lanes_of(now)}
        topics = {name: replace(each, reader="") for name, each in self._offset("", now, lanes).topics.items()}
        return StreamOffset("", topics, self._reader.options.several).json()

    def _bounded(self, ends: LaneEnds) -> LaneEnds:
        """With AvailableNow, leave out records published after the query started."""
        if self._until is None:
            return ends
        return {key: (low, min(high, self._until.get(key, low))) for key, (low, high) in ends.items()}

    def _limited(self, now: TopicsNow, ends: LaneEnds) -> LaneEnds:
        """Apply limits to ends: exactly the allowed records, and at most the allowed bytes, in whole batches."""
        options, limited = self._reader.options, dict(ends)
        waiting = {key: high.seq - low.seq for key, (low, high) in growing(ends).items()}
        if options.max_records is not None:
            for (name, lane), share in lane_shares(options.max_records, waiting).items():
                low, high = limited[name, lane]
                if share < waiting[name, lane]:
                    high = self._view.topic(name).position_of(lane, low.seq + share) if share else low
                limited[name, lane] = low, high
        if options.max_bytes is not None:
            topics, remaining = by_topic(waiting), options.max_bytes
            for number, name in enumerate(sorted(topics, key=lambda name: (sum(topics[name].values()), name))):
                share = remaining // (len(topics) - number)  # unused parts of a share go to topics with more records
                remaining -= self._limit_bytes(now[name], topics[name], share, limited)
        return limited

    def _limit_bytes(self, now: TopicNow, waiting: Mapping[int, int], limit: int, limited: LaneEnds) -> int:
        """Lower the ends of a topic to a limit of bytes, in whole batches, at least one of each lane.

        Return the bytes that will be read.
        """
        name, used = now.about.name, 0
        for lane, records in waiting.items():
            low, high = limited[name, lane]
            share = max(1, limit * records // sum(waiting.values()))
            if low.seq < high.seq:
                fine = max(1, share // _FINE)
                pieces = self._view.topic(name).first_pieces(now, lane, low, high, fine, 2 * _FINE)
                end = within_bytes(pieces, share)
                limited[name, lane] = low, min(high, RecordPosition(end.index, end.seq))
                used += end.bytes
        return used


class UnlimitedReader(StreamReader):
    """A stream for PySpark 4.0 and 4.1: Spark only asks where the topic ends.

    The end depends neither on the read position nor on entries without records. Equal offsets must be equal texts,
    because otherwise Spark runs an empty micro-batch. Losses are found when the tasks are planned.
    """

    def __init__(self, reader: SpanReader) -> None:
        super().__init__(reader)
        self._last: StreamOffset | None = None  # the end of the last planned micro-batch
        self._tight: dict[LaneKey, RecordPosition] = {}  # positions as reported to Spark, by lane

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of a new query."""
        initial = self._initial(_ANY_READER)
        topics = {
            name: replace(each, lanes={lane: self._tight_end(name, lane, end) for lane, end in each.lanes.items()})
            for name, each in initial.topics.items()
        }
        return replace(initial, topics=topics).json()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """Return the ends of the topics now."""
        now = self._planned = self._view.now({name: lanes.keys() for name, lanes in by_topic(self._tight).items()})
        if self._last is not None:
            self._report(self._last)  # Spark asks again when the last micro-batch is done
        lanes = {key: self._tight_end(*key, lane_end(each, each.end)) for key, each in lanes_of(now)}
        return self._offset(_ANY_READER, now, lanes).json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the tasks between two offsets."""
        tasks = super().partitions(start, end)
        self._last = parse_stream_offset(end)
        return tasks

    def _tight_end(self, topic: str, lane: int, end: LaneOffset) -> LaneOffset:
        return replace(end, position=self._tightened(topic, lane, end.position))

    def _tightened(self, topic: str, lane: int, position: RecordPosition) -> RecordPosition:
        """The position right after the preceding record; the same position if that record is gone."""
        known = self._tight.get((topic, lane))
        if known is not None and known.seq == position.seq:
            return known
        tight = position
        if position.seq and not position.within:
            try:
                last = self._view.topic(topic).position_of(lane, position.seq - 1)
            except EmbarcaderoError:
                last = position
            if last.seq == position.seq - 1:
                tight = RecordPosition(last.index + 1, position.seq)
        self._tight[topic, lane] = tight
        return tight


def growing(ends: LaneEnds) -> LaneEnds:
    """Lanes with records to read."""
    return {key: (low, high) for key, (low, high) in ends.items() if low.seq < high.seq}


def lanes_of(now: TopicsNow) -> Iterator[tuple[LaneKey, LaneNow]]:
    """All lanes of all topics."""
    return (((name, lane), each) for name, topic in now.items() for lane, each in topic.lanes.items())


def lane_end(now: LaneNow, position: RecordPosition) -> LaneOffset:
    """The offset of a lane that is read up to a position; a closed lane may have ended there."""
    return LaneOffset(position, ended=now.closed and position == now.end)
