"""A topic as the source of a job: where its lanes are, pieces for tasks, and rows exactly as they were published.

A frame has Spark's types; rows here have the topic's own, so that a copy is equal to what was copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa

from embarcadero.client.results import TopicInfo
from embarcadero.client.sync import Log
from embarcadero.errors import BadSchema, TopicReplaced, Trimmed
from embarcadero.limits import SPARK_TASK_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.offsets import Place, Span
from embarcadero.spark.options import read_options
from embarcadero.spark.view import ReadView, TopicNow
from embarcadero.types import Gap, GapKind

_LOG: Final = logging.getLogger("embarcadero.spark")

_STEP_BATCHES: Final = 100_000  # the list of what a step has written names each batch


class Rows(NamedTuple):
    """Records that follow each other: as columns of the topic, the seq of the first one, their partition."""

    columns: pa.RecordBatch
    seq: int
    partition: int


@dataclass(frozen=True, slots=True)
class TopicRows:
    """Reads spans of a topic in tasks. It is sent to them, so it holds plain facts only."""

    brokers: str
    topic: str
    topic_id: int
    version: int  # of the topic's schema: rows of a newer one would lose columns

    def read(self, span: Span) -> Iterator[Rows]:
        """Read the durable records of a span. Raises Trimmed, TopicReplaced, BadSchema."""
        log = shared_log(self.brokers)
        if log.describe(self.topic).id != self.topic_id:
            raise TopicReplaced(f"topic {self.topic!r} was deleted, and another one has its name", "begin another job")
        for batches in log.scan(self.topic, lane=span.lane, start=span.start.index, stop=span.stop.stop):
            for batch in batches:
                if batch.gap is not None:
                    self._check(span, batch.gap)
                first, stop = max(batch.seq, span.start.seq), min(batch.seq + batch.count, span.stop.seq)
                if batch.count == 0 or first >= stop:
                    continue
                if batch.schema_version > self.version:
                    raise BadSchema(f"topic {self.topic!r} got another column while the job ran", "start it again")
                columns = batch.to_arrow().slice(first - batch.seq, stop - first)
                yield Rows(columns, first, batch.partition)

    def _check(self, span: Span, gap: Gap) -> None:
        """Look at a gap: records that were trimmed end the job; what a crash took before it was durable never was."""
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {self.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            raise Trimmed(
                f"{where} were trimmed before they were read",
                "keep records longer than a job may stand still: a longer retention, or a table (tier)",
            )
        if gap.kind is GapKind.LOST:
            _LOG.warning("%s were lost with the memory of the cluster", where)


class Source:
    """A topic that a job reads, as the driver sees it."""

    def __init__(self, log: Log, about: TopicInfo) -> None:
        self.about, self._log = about, log
        self._read = ReadView(read_options({"brokers": log.address, "topic": about.name}, streaming=False))
        self.view = self._read.topic(about.name)

    @property
    def rows(self) -> TopicRows:
        """What tasks read it by."""
        return TopicRows(self._log.address, self.about.name, self.about.id, self.about.schema_version)

    def now(self) -> TopicNow:
        """The topic and its lanes as they are now. Raises UnknownTopic, TopicReplaced."""
        now = self._read.now()[self.about.name]
        if now.about.id != self.about.id:
            raise TopicReplaced(f"topic {self.about.name!r} was deleted, and another one has its name", "start again")
        return now

    def span(self, lane: int, start: Place, stop: Place) -> Span:
        """A span of the topic."""
        return Span(lane, start, stop, self.about.name)

    def pieces(self, span: Span, piece_bytes: int = SPARK_TASK_BYTES) -> list[Span]:
        """Cut a span into pieces of about so many bytes."""
        return [piece for piece, _ in self._pieces(span, piece_bytes)]

    def step(self, lane: int, start: Place, stop: Place, step_bytes: int) -> Span:
        """The first pieces of a span, about so many bytes together, and not too many batches; at least one piece."""
        end, size = start, 0
        for piece, piece_bytes in self._pieces(self.span(lane, start, stop), min(SPARK_TASK_BYTES, step_bytes)):
            size += piece_bytes
            if end > start and (size > step_bytes or piece.stop.index - start.index > _STEP_BATCHES):
                break
            end = piece.stop
        return self.span(lane, start, end)

    def _pieces(self, span: Span, piece_bytes: int) -> list[tuple[Span, int]]:
        if span.start.seq >= span.stop.seq:
            return []
        cuts = self.view.pieces(self.now(), span.lane, span.start, span.stop, piece_bytes)
        sizes = {cut.seq: cut.bytes for cut in cuts}
        inner = {cut.seq: Place(cut.index, cut.seq) for cut in cuts if span.start.seq < cut.seq < span.stop.seq}
        places = [span.start, *(place for _, place in sorted(inner.items())), span.stop]
        return [(self.span(span.lane, low, high), sizes.get(high.seq, 0)) for low, high in pairwise(places)]
