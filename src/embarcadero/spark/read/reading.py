"""Batch reads: a topic, or a part of it, as a DataFrame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from embarcadero.errors import BadValue, UnknownTopic
from embarcadero.spark.connections import shared_log
from embarcadero.spark.read.frame import Bounds, bounds, check_schema, column_names, spark_schema, understood
from embarcadero.spark.read.offsets import LaneOffset, Offset, RecordPosition, TaskSpan, spans
from embarcadero.spark.read.options import EARLIEST, LATEST, ReadOptions, read_options
from embarcadero.spark.read.tasks import SpanReader
from embarcadero.spark.read.view import LaneEnds, LaneKey, LaneNow, ReadView, TopicView
from embarcadero.spark.versions import Filter, check_options

_PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def checked_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """The options of a read. BadValue says what is wrong with one, NotAvailable which PySpark it needs."""
    options = read_options(given, streaming=streaming)
    check_options(options)
    return options


def frame_schema(given: Mapping[str, str]) -> StructType:
    """The columns of a topic as `load()` has them. All options are checked here, before anything is planned."""
    options = checked_options(given, streaming=None)
    shared_log(options.brokers, at_once=True)
    return spark_schema(ReadView(options).schemas(), options.columns)


def batch_reader(given: Mapping[str, str], schema: StructType) -> BatchReader:
    """A reader with or without push-down, as the user wants it and the session allows.

    With `spark.sql.python.filterPushdown.enabled` off, Spark refuses every reader that defines `pushFilters`, and it
    does not tell us the flag. But filters are pushed in a process of their own, and only that process asks for them.

    With the flag on, Spark 4.3 keeps the plan that it made with filters for the whole frame: the next query over the
    same frame, or its other side in a join, gets the rows that passed them. So the user has to say that a frame is used
    once (`pushFilters`); all others are planned without filters, which Spark then applies itself.
    """
    options = checked_options(given, streaming=False)
    reader = span_reader(options, schema, fail_on_lost=False)
    return PushingReader(reader) if options.push_filters and filters_are_pushed() else BatchReader(reader)


def span_reader(options: ReadOptions, schema: StructType, *, fail_on_lost: bool) -> SpanReader:
    """What is sent to workers. BadSchema, if the topic is not (any more) what the frame was made of."""
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

    def partitions(self) -> list[InputPartition]:  # Spark insists on a list
        """Spans of the topics as they are now, one a task."""
        options, view = self._reader.options, ReadView(self._reader.options)
        now = view.now()
        if options.pattern is not None and not now:
            raise UnknownTopic(f"no topic has a name that matches {options.pattern!r}", "see `embarcadero topic list`")
        if missing := [name for name in options.topics if name not in now]:
            raise UnknownTopic(f"there is no topic {missing[0]!r}", "see `embarcadero topic list`")
        starts = view.resolve(options.starting, now, "startingOffsets", rest=EARLIEST)
        stops = view.resolve(options.ending, now, "endingOffsets", rest=LATEST)
        _check_ends(starts, stops, "endingTimestamp" if options.ending.by == "time" else "endingOffsets")
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
        """The part of a lane that filters leave."""
        conditions = self._reader.conditions
        if not _allows(bounds(conditions, "_lane"), now.lane):
            return start, start
        start, stop = _clipped(start, stop, bounds(conditions, "_seq"), 1, partial(view.place_of, now.lane))
        start, stop = _clipped(start, stop, bounds(conditions, "_index"), 0, partial(view.place_at_index, now.lane))
        times = bounds(conditions, "_append_time")
        if times.low:
            start = max(start, view.place_at(now, times.low))
        if times.stop < Bounds().stop:
            stop = min(stop, view.place_at(now, times.stop))
        return start, max(start, stop)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one span; of nothing, nothing: Spark plans a task even then."""
        if partition.value is not None:
            yield from self._reader.read(partition.value)


class PushingReader(BatchReader):
    """A reader that Spark may push filters to."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters that we answer exactly; the others are Spark's."""
        names = column_names(self._reader.schemas)
        conditions, left = understood(filters, names, self._reader.schemas.typed)
        only = bounds(conditions, "_partition").only
        partitions = self._reader.partitions
        if only is not None:
            partitions = tuple(sorted(only if partitions is None else only & set(partitions)))
        self._reader = replace(self._reader, conditions=tuple(conditions), partitions=partitions)
        return left


def _allows(found: Bounds, number: int) -> bool:
    return found.low <= number < found.stop and (found.only is None or number in found.only)


def _clipped(
    start: RecordPosition, stop: RecordPosition, found: Bounds, number: int, place_of: Callable[[int], RecordPosition]
) -> tuple[RecordPosition, RecordPosition]:
    """A span clipped to bounds of its seq (number 1) or index (number 0)."""
    low, high = start[number], stop[number]
    if found.low > low:
        start = stop if found.low >= high else place_of(found.low)
    if found.stop < high:
        stop = start if found.stop <= start[number] else place_of(found.stop)
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
