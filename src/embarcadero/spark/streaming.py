"""Streams: micro-batches of a topic, exactly where the last one ended.

Theory of operation. Spark keeps the reader in one Python process of the driver for as long as the query runs, and asks
it for the end of the next micro-batch, then for its tasks. All that tasks depend on is in the offsets (offsets.py), and
Spark writes these to the checkpoint before a task runs: a micro-batch that is run again has the same tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from embarcadero.errors import EmbarcaderoError, RecordsLost, Trimmed
from embarcadero.spark.offsets import LaneOffset, Offset, Place, parse_offset, spans
from embarcadero.spark.options import EARLIEST, GO_ON, read_options
from embarcadero.spark.planning import shares, within_bytes
from embarcadero.spark.reading import span_reader
from embarcadero.spark.tasks import SpanReader
from embarcadero.spark.view import Ends, TopicNow, TopicView
from embarcadero.types import id_text

_FINE = 16
"""A limit on bytes is kept to about one part in so many."""

_NOTE_S = 1.0  # so long a query waits for its progress to be taken note of
_NOTE_AGAIN_S = 30.0

def stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """The reader of a stream. BadSchema, if the topic is not what the frame was made of.

    What a crash took was not durable: a stream of durable records never had it, and loses nothing.
    """
    options = read_options(given, streaming=True)
    return StreamReader(span_reader(options, schema, fail_on_lost=options.read == "ordered"))


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream of one topic. Sent to workers it is only its SpanReader; the rest is for the driver."""

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader
        self._view = TopicView(reader.options)
        self._until: dict[int, Place] | None = None  # AvailableNow: nothing above is read
        self._seen: TopicNow | None = None  # as the last question found the topic
        self._noted: dict[int, tuple[int, int]] | None = None  # what the cluster knows; None: it could not be told
        self._topic_id = 0  # as the last question found it
        self._silent_until_s = 0.0  # it is not told the same again, nor asked again if it could not, for a while

    # --- ends of micro-batches ----------------------------------------------------------------------------------------
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Where a new query starts."""
        now = self._view.now()
        places = self._view.resolve(self._reader.options.starting, now, "startingOffsets", rest=EARLIEST)
        lanes = {lane: LaneOffset(place) for lane, place in places.items()}
        return Offset(self._reader.options.topic, f"spark-{uuid4().hex[:12]}", lanes, now.about.id).told()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From now on, act as if nothing came any more."""
        self._until = {lane: each.end for lane, each in self._view.now().lanes.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that Spark hands back to us. It knows one; the other one we keep ourselves."""
        options = self._reader.options
        if options.max_records is not None:
            return ReadMaxRows(options.max_records)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next micro-batch, with its tasks; `start` itself if there is nothing to read."""
        begun = parse_offset(start, self._reader.options.topic)
        now = self._seen = self._view.now(begun.lanes)
        begun, self._topic_id = self._same_topic(begun, now.about.id), now.about.id
        kept = self._kept(begun, now)
        ends = self._ends(begun, now)
        if not isinstance(limit, ReadAllAvailable):
            ends = self._limited(now, ends)
        growing = {lane: (low, high) for lane, (low, high) in ends.items() if low.seq < high.seq}
        moved = {lane: low for lane, (low, _) in ends.items() if lane in kept and low != begun.of(lane)}
        if not growing and not moved and kept == begun.lanes.keys():
            self._note(begun)  # Spark commits a micro-batch with the next one, and none has come
            return start
        cuts = self._view.cuts(now, growing)
        lanes = {lane: begun.lanes[lane] for lane in kept} | {lane: LaneOffset(low) for lane, low in moved.items()}
        for lane, (_, high) in growing.items():
            lanes[lane] = LaneOffset(high, cuts[lane], now.lanes[lane].closed and high == now.lanes[lane].end)
        return Offset(begun.topic, begun.reader, lanes, now.about.id).told()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the topic ends: as the question for a micro-batch just found it, if there was one."""
        now, self._seen = self._seen or self._view.now(), None
        lanes = {lane: LaneOffset(each.end, holes=each.holes) for lane, each in now.lanes.items()}
        return Offset(self._reader.options.topic, "", lanes, now.about.id).told()

    def _same_topic(self, read: Offset, topic_id: int) -> Offset:
        """The offset, if it is one of the topic with this id. Else everything read is lost; go on from the beginning.

        An offset of an earlier version does not say which topic it is of, and is believed.
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
        """Lanes of the last offset that the topic still has. Others were read to their end, or something is lost."""
        kept = begun.lanes.keys() & now.lanes.keys()
        for lane in sorted(begun.lanes.keys() - kept):
            if not begun.lanes[lane].ended:
                self._lost(
                    RecordsLost(
                        f"lane {lane} of topic {begun.topic!r} is gone, and was read up to seq {begun.of(lane).seq}: "
                        "the topic was made anew, or nothing of the lane is left",
                        f"start with a new checkpointLocation; {GO_ON}",
                    )
                )
        return kept

    def _ends(self, begun: Offset, now: TopicNow) -> Ends:
        """What there is to read, by lane."""
        ends: Ends = {}
        for lane, each in now.lanes.items():
            low, high = begun.of(lane), each.end
            if self._until is not None:
                high = min(high, self._until.get(lane, low))
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
            ends[lane] = low, high
        return ends

    def _lost(self, problem: EmbarcaderoError) -> None:
        self._reader.lost(problem, fail=True)

    def _limited(self, now: TopicNow, ends: Ends) -> Ends:
        """Ends such that no limit is passed: exactly as many records as allowed, and no more bytes in whole batches."""
        options, limited = self._reader.options, dict(ends)
        waiting = {lane: high.seq - low.seq for lane, (low, high) in ends.items() if low.seq < high.seq}
        if options.max_records is not None:
            for lane, share in shares(options.max_records, waiting).items():
                low, high = limited[lane]
                limited[lane] = low, high if share == waiting[lane] else self._view.place_of(lane, low.seq + share)
        if options.max_bytes is not None:
            for lane, records in waiting.items():
                low, high = limited[lane]
                share = max(1, options.max_bytes * records // sum(waiting.values()))
                if low.seq < high.seq:
                    fine = max(1, share // _FINE)
                    end = within_bytes(self._view.first_pieces(now, lane, low, high, fine, 2 * _FINE), share)
                    limited[lane] = low, min(high, Place(end.index, end.seq))
        return limited

    # --- tasks --------------------------------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks between two offsets; nothing but the offsets decides."""
        topic = self._reader.options.topic
        begun, until = parse_offset(start, topic), parse_offset(end, topic)
        if until.topic_id not in (0, self._topic_id):  # a micro-batch that was planned before this reader began
            self._topic_id = self._view.describe().id
            until = self._same_topic(until, self._topic_id)
        return [InputPartition(span) for span in spans(begun, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return self._reader.read(partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        """Tell the cluster how far this query is."""
        self._note(parse_offset(end, self._reader.options.topic))

    def _note(self, read: Offset) -> None:
        """For those who look after the query. It does not fail because of that."""
        places = read.places()
        if monotonic() < self._silent_until_s and self._noted in (None, places):
            return
        try:
            self._view.log.note_progress(
                read.topic, read.reader, places, topic_id=read.topic_id, timeout=_NOTE_S
            )  # fmt: skip
            self._noted = places
        except EmbarcaderoError:
            self._noted = None
        self._silent_until_s = monotonic() + _NOTE_AGAIN_S
