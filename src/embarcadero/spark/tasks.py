"""What a task does: scan a span of a lane and hand its records to Spark as Arrow, lazily."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from embarcadero.client.batch import Batch
from embarcadero.errors import EmbarcaderoError, RecordsLost, Trimmed
from embarcadero.spark.connections import shared_log
from embarcadero.spark.filters import Condition, passing
from embarcadero.spark.frame import Shaper
from embarcadero.spark.offsets import Span
from embarcadero.spark.options import GO_ON, ReadOptions
from embarcadero.types import Gap, GapKind
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_LOG: Final = logging.getLogger("embarcadero.spark")


@dataclass(frozen=True, slots=True)
class SpanReader:
    """Reads spans of a topic in workers. It is sent to them, so it holds plain facts only."""

    options: ReadOptions
    schemas: TopicSchemas
    schema: StructType
    fail_on_lost: bool  # whether what a crash took is data loss: for a stream it is, a table just does not have it
    conditions: tuple[Condition, ...] = ()
    partitions: tuple[int, ...] | None = None

    def read(self, span: Span) -> Iterator[pa.RecordBatch]:
        """The records of a span as rows of the frame. Raises Trimmed or RecordsLost if some are gone."""
        shaper = Shaper(self.options.topic, self.schemas, self.schema)
        found = shared_log(self.options.brokers).scan(
            self.options.topic, lane=span.lane, start=span.start.index, stop=span.stop.stop, read=self.options.read,
            partitions=self.partitions,
        )  # fmt: skip
        for batches in found:
            self._check_gaps(span, batches)
            for rows in shaper.of_batches(span.lane, batches, span.start.seq, span.stop.seq):
                passed = passing(rows, self.conditions)
                if passed.num_rows:
                    yield passed

    def _check_gaps(self, span: Span, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.gap is None or batch.gap.kind is GapKind.SKIPPED:  # the topic's own rule, and no position is empty
                continue
            if (problem := self._problem(span, batch.gap)) is not None:
                self.lost(problem, fail=self.fail_on_lost or batch.gap.kind is GapKind.TRIMMED)

    def lost(self, problem: EmbarcaderoError, *, fail: bool) -> None:
        """Records are gone: raise it, or say it in the log of the process if the user wants to go on."""
        if fail and self.options.fail_on_data_loss:
            raise problem
        _LOG.warning("%s", problem.message)

    def _problem(self, span: Span, gap: Gap) -> EmbarcaderoError | None:
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {self.options.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            return Trimmed(f"{where} were trimmed before they were read", GO_ON)
        if gap.kind is GapKind.LOST:
            return RecordsLost(f"{where} were lost with the memory of the cluster, before they were durable", GO_ON)
        if gap.start < span.stop.index:
            return RecordsLost(f"lane {span.lane} of topic {self.options.topic!r} ends at index {gap.start}", GO_ON)
        return None
