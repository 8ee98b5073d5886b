"""What a task does: scan a span of a lane and hand its records to Spark as Arrow, lazily."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from embarcadero.client.sync import Log
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
    """Reads spans of topics in workers. It is sent to them, so it holds plain facts only."""

    options: ReadOptions
    schemas: TopicSchemas
    schema: StructType
    fail_on_lost: bool  # whether what a crash took is data loss: for a stream that reads what is not durable it is
    conditions: tuple[Condition, ...] = ()
    partitions: tuple[int, ...] | None = None
    table_properties: tuple[str, ...] = ()  # by which files of a topic's table are reached

    def read(self, span: Span) -> Iterator[pa.RecordBatch]:
        """The records of a span as rows of the frame. Raises Trimmed or RecordsLost if some are gone."""
        shaper = Shaper(span.topic, self.schemas, self.schema)
        for rows in self._rows(span, shaper):
            passed = passing(rows, self.conditions)
            if passed.num_rows:
                yield passed

    def _rows(self, span: Span, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        """Rows of the table below its frontier, and of brokers from there on. Where that is, is asked once.

        Brokers also give the rows of a table whose files this machine can't see.
        """
        log, at = shared_log(self.options.brokers, self.table_properties), span.start.index
        tier = log.describe(span.topic).tier
        frontier = 0 if tier is None else min(tier.frontier(span.lane)[0], span.stop.stop)
        if tier is not None and at < frontier:
            from embarcadero.spark.cold import open_table, table_rows, table_visible

            if table_visible(tier.id, tier.metadata, span.topic):
                table, at = open_table(tier, self.table_properties), frontier
                gone, durable = partial(self._gone, span), self.options.read == "durable"
                found = table_rows(table, span, frontier, shaper.wanted, self.partitions, gone, durable)
                yield from map(shaper.shaped, found)
        if at < span.stop.stop:
            yield from self._scanned(log, span, at, shaper)

    def _scanned(self, log: Log, span: Span, start: int, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        found = log.scan(
            span.topic, lane=span.lane, start=start, stop=span.stop.stop, read=self.options.read,
            partitions=self.partitions,
        )  # fmt: skip
        for batches in found:
            for batch in batches:
                if batch.gap is not None:
                    self._gone(span, batch.gap)
            yield from shaper.of_batches(span.lane, batches, span.start.seq, span.stop.seq)

    def _gone(self, span: Span, gap: Gap) -> None:
        """A gap. What a session skipped is none for us: that is the topic's own rule, and no position is empty.

        Nor is what a restart passed over, if nothing there was durable.
        """
        problem = None if gap.kind in (GapKind.SKIPPED, GapKind.NEVER_DURABLE) else self._problem(span, gap)
        if problem is not None:
            self.lost(problem, fail=self.fail_on_lost or gap.kind is GapKind.TRIMMED)

    def lost(self, problem: EmbarcaderoError, *, fail: bool) -> None:
        """Records are gone: raise it, or say it in the log of the process if the user wants to go on."""
        if fail and self.options.fail_on_data_loss:
            raise problem
        _LOG.warning("%s", problem.message)

    def _problem(self, span: Span, gap: Gap) -> EmbarcaderoError | None:
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {span.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            return Trimmed(f"{where} were trimmed before they were read", GO_ON)
        if gap.kind is GapKind.LOST:
            return RecordsLost(f"{where} were lost with the memory of the cluster", GO_ON)
        if gap.start < span.stop.index:
            return RecordsLost(f"lane {span.lane} of topic {span.topic!r} ends at index {gap.start}", GO_ON)
        return None
