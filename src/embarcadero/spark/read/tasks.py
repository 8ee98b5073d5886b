"""What a task does: it reads a span of a lane, from its table and from brokers, and hands rows to Spark as Arrow.

Rows of the table are rows of the log, so nothing is decoded twice: what a reader must not see (entries without records,
rows outside of the span) is cut out. `table_part` is the one place that decides what is read where.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.client.api.sync_log import Log
from embarcadero.errors import Corrupt, EmbarcaderoError, RecordsLost, Trimmed
from embarcadero.limits import SPARK_ROWS_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.read.frame import Condition, Shaper, passing
from embarcadero.spark.read.offsets import TaskSpan
from embarcadero.spark.read.options import GO_ON, ReadOptions
from embarcadero.types import EntryKind, Gap, GapKind, Tier
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from embarcadero.tier.table_reads import TopicTable

_LOG: Final = logging.getLogger("embarcadero.spark")
_ALWAYS: Final = ("_index", "_seq", "_kind", "_damage")
_RUNS_MAX: Final = 16
"""So many runs of rows of a row group are handed on as they lie; more are copied together."""

Mask = npt.NDArray[np.bool_]


_WORKER: Final = "pyspark.worker"
"""The module that the daemon imports in each worker, and that no other process imports."""


@cache
def _freeze() -> None:
    """Take what was imported out of garbage collection: Spark's workers collect after each task, for up to 30 ms.

    Other processes collect when they end: libraries report then what they believe to be leaks.
    """
    if _WORKER in sys.modules:
        gc.freeze()


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

    def read(self, span: TaskSpan) -> Iterator[pa.RecordBatch]:
        """The records of a span as rows of the frame. Raises Trimmed or RecordsLost if some are gone."""
        shaper = Shaper(span.topic, self.schemas, self.schema)
        for rows in self._rows(span, shaper):
            _freeze()  # when the first rows are here, everything is imported
            passed = passing(rows, self.conditions)
            if passed.num_rows:
                yield passed

    def _rows(self, span: TaskSpan, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        """Rows of the table below its frontier, and of brokers from there on. Where that is, is asked once.

        Brokers also give the rows of a table whose files this machine can't see.
        """
        log, at, stop = shared_log(self.options.brokers, self.table_properties), span.start.index, span.stop.stop
        tier = log.describe(span.topic).tier
        table, frontier = table_part(tier, span.topic, span.lane, at, stop, self.table_properties)
        if table is not None:
            at = frontier
            gone, durable = partial(self._gone, span), self.options.read == "durable"
            found = table_rows(table, span, frontier, shaper.wanted, self.partitions, gone, durable)
            yield from map(shaper.shaped, found)
        if at < stop:
            yield from self._scanned(log, span, at, shaper)

    def _scanned(self, log: Log, span: TaskSpan, start: int, shaper: Shaper) -> Iterator[pa.RecordBatch]:
        found = log.scan(
            span.topic,
            lane=span.lane,
            start=start,
            stop=span.stop.stop,
            read=self.options.read,
            partitions=self.partitions,
        )
        for batches in found:
            for batch in batches:
                if batch.gap is not None:
                    self._gone(span, batch.gap)
            yield from shaper.of_batches(span.lane, batches, span.start.seq, span.stop.seq)

    def _gone(self, span: TaskSpan, gap: Gap) -> None:
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

    def _problem(self, span: TaskSpan, gap: Gap) -> EmbarcaderoError | None:
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {span.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            return Trimmed(f"{where} were trimmed before they were read", GO_ON)
        if gap.kind is GapKind.LOST:
            return RecordsLost(f"{where} were lost with the memory of the cluster", GO_ON)
        if gap.start < span.stop.index:
            return RecordsLost(f"lane {span.lane} of topic {span.topic!r} ends at index {gap.start}", GO_ON)
        return None


class TablePart(NamedTuple):
    """The part of a span that is read from its table: what is below `frontier`.

    Without a `table` its files can't be seen here, and brokers read them for this process.
    """

    table: TopicTable | None
    frontier: int


def table_part(
    tier: Tier | None, topic: str, lane: int, start: int, stop: int, properties: Sequence[str]
) -> TablePart:
    """Decide where batches [start, stop) of a lane are read: below the tier's frontier from the table, else by brokers.

    Brokers find what is in memory or on a disk, and tell gaps. A frontier at `start` says that the table has nothing.
    """
    frontier = 0 if tier is None else min(tier.frontier(lane)[0], stop)
    if tier is None or start >= frontier:
        return TablePart(None, start)
    visible = table_visible(tier.id, tier.metadata, topic)
    return TablePart(open_table(tier, properties) if visible else None, frontier)


def open_table(tier: Tier, properties: Sequence[str]) -> TopicTable:
    """A topic's table as of what the store says; `properties` are those of the configuration (`tier.properties`)."""
    from embarcadero.config.secrets import parse_properties
    from embarcadero.tier.table_reads import TopicTable  # wants PyIceberg, which only tiered topics need

    return TopicTable(tier, parse_properties(properties))


@lru_cache(maxsize=64)
def table_visible(tier_id: str, metadata: str, topic: str) -> bool:
    """Whether this process can see the files of a table. A folder of another machine it can't: brokers read it then."""
    scheme, _, rest = metadata.partition("://")
    if (scheme != "file" and not metadata.startswith("/")) or Path(unquote(rest) or metadata).exists():
        return True
    _LOG.warning(
        "the table of topic %r (%s) is in a folder that this machine can't see (%s): brokers read it for this job; "
        "a warehouse in an object store or a shared folder is read faster",
        topic,
        tier_id,
        metadata,
    )
    return False




def table_rows(
    table: TopicTable,
    span: TaskSpan,
    stop: int,
    columns: dict[str, pa.DataType],
    partitions: Sequence[int] | None,
    gone: Callable[[Gap], None],
    durable: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Records of a span below index `stop`, with the wanted columns; `gone` is told of holes.

    `durable`: only durable records are read, so a hole in which nothing ever was durable is NEVER_DURABLE.

    A column that is younger than the table is null. Corrupt, if a batch was damaged when it was tiered.
    """
    there = table.schema.names
    names = list(dict.fromkeys([*(name for name in columns if name in there), *_ALWAYS, "_partition"]))
    at, low = span.start.index, table.tier.start(span.lane)[0]
    if at < min(low, stop):
        gone(Gap(GapKind.TRIMMED, at, min(low, stop)))
        at = min(low, stop)
    for group in table.rows(span.lane, at, stop, names) if at < stop else ():
        indices = group.column("_index").to_numpy()
        for start, end in _holes(indices, at):
            gone(table.tier.gap(span.lane, start, end, durable))
        at = int(indices[-1]) + 1
        for rows in _runs(group, _wanted(group, span, partitions)):
            _check_damage(rows)
            yield from _portions(_with_columns(rows, columns))
    if at < stop:
        gone(table.tier.gap(span.lane, at, stop, durable))


def _holes(indices: npt.NDArray[np.int64], at: int) -> list[tuple[int, int]]:
    """Every entry of the log is in a table: an index that is not there was lost."""
    before = np.concatenate(([at - 1], indices[:-1]))
    return [(int(before[row]) + 1, int(indices[row])) for row in np.flatnonzero(indices > before + 1).tolist()]


def _wanted(group: pa.RecordBatch, span: TaskSpan, partitions: Sequence[int] | None) -> Mask:
    kinds, seqs = group.column("_kind").to_numpy(), group.column("_seq").to_numpy()
    wanted: Mask = (kinds == EntryKind.BATCH) & (seqs >= span.start.seq) & (seqs < span.stop.seq)
    if partitions is not None:
        wanted &= np.isin(group.column("_partition").to_numpy(), partitions)
    return wanted


def _runs(group: pa.RecordBatch, wanted: Mask) -> Iterator[pa.RecordBatch]:
    """The wanted rows, as they lie if they are in a few runs."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])).astype(np.int8))).tolist()
    if len(edges) > 2 * _RUNS_MAX:
        yield group.filter(pa.array(wanted))
        return
    for number, (first, last) in enumerate(pairwise(edges)):
        if number % 2 == 0:
            yield group.slice(first, last - first)


def _portions(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Rows of a row group, as many at a time as batches of the log have: whole, they are long on their way to Java."""
    portions = max(1, -(-rows.nbytes // SPARK_ROWS_BYTES))
    step = max(1, -(-rows.num_rows // portions))
    for start in range(0, rows.num_rows, step):
        yield rows.slice(start, step)


def _check_damage(rows: pa.RecordBatch) -> None:
    damage: Any = rows.column("_damage")
    if damage.null_count < len(damage):
        row = next(number for number, each in enumerate(damage) if each.is_valid)
        raise Corrupt(
            f"the batch at index {rows.column('_index')[row]} is damaged: {damage[row]}",
            "it was so before it was tiered; read around it, or leave out the topic's own columns",
        )


def _with_columns(rows: pa.RecordBatch, columns: dict[str, pa.DataType]) -> pa.RecordBatch:
    arrays = [
        rows.column(name) if name in rows.schema.names else pa.nulls(rows.num_rows, kind)
        for name, kind in columns.items()
    ]
    if not arrays:
        return rows
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
