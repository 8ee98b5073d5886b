"""Streams: micro-batches of a topic, exactly where the last one ended.

Theory of operation. Spark keeps the reader in one Python process of the driver for as long as the query runs, and asks
it for the end of the next micro-batch, then for its tasks. From 4.2 on Spark tells where the last one ended and how
much the next one may have (`LimitedReader`); earlier versions only ask where the topic ends (`UnlimitedReader`). Tasks
are planned from the two offsets, which Spark writes to the checkpoint before a task runs: the same offsets give the
same rows, and while the log between them stays where it is, the same tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from embarcadero.errors import EmbarcaderoError, RecordsLost, Trimmed
from embarcadero.spark.offsets import LaneOffset, Offset, Place, parse_offset, spans
from embarcadero.spark.options import EARLIEST, GO_ON
from embarcadero.spark.planning import shares, within_bytes
from embarcadero.spark.reading import checked_options, span_reader
from embarcadero.spark.tasks import SpanReader
from embarcadero.spark.versions import (
    ADMISSION_CONTROL,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from embarcadero.spark.view import Ends, LaneNow, TopicNow, TopicView
from embarcadero.types import id_text

_FINE = 16
"""A limit on bytes is kept to about one part in so many."""

_NOTE_S = 1.0  # so long a query waits for its progress to be taken note of
_NOTE_AGAIN_S = 30.0
_ANY_READER: Final = "spark"  # of queries that can't keep a name of their own: PySpark 4.0 and 4.1


def stream_reader(given: Mapping[str, str], schema: StructType) -> StreamReader:
    """The reader of a stream. BadSchema, if the topic is not what the frame was made of.

    What a crash took was not durable: a stream of durable records never had it, and loses nothing.
    """
    options = checked_options(given, streaming=True)
    reader = span_reader(options, schema, fail_on_lost=options.read == "ordered")
    return LimitedReader(reader) if ADMISSION_CONTROL else UnlimitedReader(reader)


class StreamReader(DataSourceStreamReader):
    """One stream of one topic: what every version of Spark asks. Tasks only use its SpanReader."""

    def __init__(self, reader: SpanReader) -> None:
        self._reader = reader
        self._view = TopicView(reader.options)
        self._planned: TopicNow | None = None  # the topic as it was when the end of the next micro-batch was chosen
        self._noted: dict[int, tuple[int, int]] | None = None  # what the cluster knows; None: it could not be told
        self._warned: set[str] = set()  # losses that the log of the process has
        self._silent_until_s = 0.0  # it is not told the same again, nor asked again if it could not, for a while

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's names, here and below
        """Where a new query starts."""
        return self._initial(f"spark-{uuid4().hex[:12]}").told()

    def _initial(self, reader: str) -> Offset:
        now = self._view.now()
        places = self._view.resolve(self._reader.options.starting, now, "startingOffsets", rest=EARLIEST)
        lanes = {lane: LaneOffset(place) for lane, place in places.items()}
        return Offset(self._reader.options.topic, reader, lanes, now.about.id)

    # --- tasks --------------------------------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks between two offsets. An end of the last version of this source has the cuts between them."""
        topic = self._reader.options.topic
        begun, until = parse_offset(start, topic), parse_offset(end, topic)
        now, self._planned = self._planned or self._view.now(until.lanes), None
        begun, until = self._same_topic(begun, now.about.id), self._same_topic(until, now.about.id)
        self._kept(begun, now)
        until = self._readable(begun, until, now)
        known = {lane: now.lanes[lane] for lane in until.lanes}
        lows = {lane: LaneOffset(low) for lane, (low, _) in self._ends(begun, known).items()}
        begun = replace(begun, lanes=dict(begun.lanes) | lows)
        if not any(lane.cuts for lane in until.lanes.values()):
            ends = {lane: (begun.of(lane), offset.place) for lane, offset in until.lanes.items()}
            cuts = self._view.cuts(now, growing(ends))
            lanes = {lane: replace(offset, cuts=cuts.get(lane, ())) for lane, offset in until.lanes.items()}
            until = replace(until, lanes=lanes)
        return [InputPartition(span) for span in spans(begun, until)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of one task."""
        return self._reader.read(partition.value)

    # --- what may be lost ---------------------------------------------------------------------------------------------
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

    def _readable(self, begun: Offset, until: Offset, now: TopicNow) -> Offset:
        """The end of a micro-batch without lanes that the topic has no more."""
        gone = until.lanes.keys() - now.lanes.keys()
        for lane in sorted(gone):
            low, high = begun.of(lane).seq, until.of(lane).seq
            if low < high:
                self._lost(
                    RecordsLost(
                        f"lane {lane} of topic {begun.topic!r} is gone, and records [{low}, {high}) of it were not "
                        "read",
                        f"start with a new checkpointLocation; {GO_ON}",
                    )
                )
        return replace(until, lanes={lane: end for lane, end in until.lanes.items() if lane not in gone})

    def _ends(self, begun: Offset, lanes: Mapping[int, LaneNow]) -> Ends:
        """What there is to read, by lane."""
        ends: Ends = {}
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
        """Raise it, or warn of it once: the end of a micro-batch and its tasks are planned by the same rules."""
        if self._reader.options.fail_on_data_loss or problem.message not in self._warned:
            self._warned.add(problem.message)
            self._reader.lost(problem, fail=True)

    # --- progress -----------------------------------------------------------------------------------------------------
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


class LimitedReader(StreamReader, SupportsTriggerAvailableNow):
    """A stream for PySpark 4.2 and newer: Spark tells where the last micro-batch ended, and limits the next one."""

    def __init__(self, reader: SpanReader) -> None:
        super().__init__(reader)
        self._until: dict[int, Place] | None = None  # AvailableNow: nothing above is read
        self._seen: TopicNow | None = None  # as the last question found the topic

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
        """The end of the next micro-batch; `start` itself if there is nothing to read."""
        begun = parse_offset(start, self._reader.options.topic)
        now = self._seen = self._planned = self._view.now(begun.lanes)
        begun = self._same_topic(begun.without_cuts(), now.about.id)
        kept = self._kept(begun, now)
        ends = self._bounded(self._ends(begun, now.lanes))
        if not isinstance(limit, ReadAllAvailable):
            ends = self._limited(now, ends)
        more = growing(ends)
        moved = {lane: low for lane, (low, _) in ends.items() if lane in kept and low != begun.of(lane)}
        if not more and not moved and kept == begun.lanes.keys():
            self._note(begun)  # Spark commits a micro-batch with the next one, and none has come
            return start
        lanes = {lane: begun.lanes[lane] for lane in kept} | {lane: LaneOffset(low) for lane, low in moved.items()}
        lanes |= {lane: lane_end(now.lanes[lane], high) for lane, (_, high) in more.items()}
        return Offset(begun.topic, begun.reader, lanes, now.about.id).told()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Where the topic ends: as the question for a micro-batch just found it, if there was one."""
        now, self._seen = self._seen or self._view.now(), None
        lanes = {lane: LaneOffset(each.end, holes=each.holes) for lane, each in now.lanes.items()}
        return Offset(self._reader.options.topic, "", lanes, now.about.id).told()

    def _bounded(self, ends: Ends) -> Ends:
        """AvailableNow: nothing that came after the query started."""
        if self._until is None:
            return ends
        return {lane: (low, min(high, self._until.get(lane, low))) for lane, (low, high) in ends.items()}

    def _limited(self, now: TopicNow, ends: Ends) -> Ends:
        """Ends such that no limit is passed: exactly as many records as allowed, and no more bytes in whole batches."""
        options, limited = self._reader.options, dict(ends)
        waiting = {lane: high.seq - low.seq for lane, (low, high) in growing(ends).items()}
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


class UnlimitedReader(StreamReader):
    """A stream for PySpark 4.0 and 4.1: Spark only asks where the topic ends.

    The end does not depend on what was read, nor on entries without records: equal offsets must be equal texts, else
    Spark runs an empty micro-batch. Losses are found when the tasks are planned.
    """

    def __init__(self, reader: SpanReader) -> None:
        super().__init__(reader)
        self._last: Offset | None = None  # the end of the micro-batch that was planned last
        self._tight: dict[int, Place] = {}  # places as they were told, by lane

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query starts."""
        initial = self._initial(_ANY_READER)
        lanes = {lane: LaneOffset(self._tightened(lane, each.place)) for lane, each in initial.lanes.items()}
        return replace(initial, lanes=lanes).told()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """Where the topic ends now."""
        now = self._planned = self._view.now(self._tight)
        if self._last is not None:
            self._note(self._last)  # Spark asks again when the last micro-batch is done
        lanes = {lane: lane_end(each, each.end) for lane, each in now.lanes.items()}
        lanes = {lane: replace(end, place=self._tightened(lane, end.place)) for lane, end in lanes.items()}
        return Offset(self._reader.options.topic, _ANY_READER, lanes, now.about.id).told()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks between two offsets."""
        tasks = super().partitions(start, end)
        self._last = parse_offset(end)
        return tasks

    def _tightened(self, lane: int, place: Place) -> Place:
        """The place right behind the record before it; the very place if that record is gone."""
        known = self._tight.get(lane)
        if known is not None and known.seq == place.seq:
            return known
        tight = place
        if place.seq and not place.within:
            try:
                last = self._view.place_of(lane, place.seq - 1)
            except EmbarcaderoError:
                last = place
            if last.seq == place.seq - 1:
                tight = Place(last.index + 1, place.seq)
        self._tight[lane] = tight
        return tight


def growing(ends: Ends) -> Ends:
    """Lanes of which there is something to read."""
    return {lane: (low, high) for lane, (low, high) in ends.items() if low.seq < high.seq}


def lane_end(now: LaneNow, place: Place) -> LaneOffset:
    """The offset of a lane that is read up to a place: of a closed lane that may be the last one."""
    return LaneOffset(place, ended=now.closed and place == now.end)
