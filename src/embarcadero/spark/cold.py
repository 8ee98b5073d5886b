"""The part of a topic that is in its table, for Spark: pieces for tasks, and rows straight from Parquet.

Below the tier frontier tasks read the table and leave brokers alone, if they can see its files. Rows of the table are
rows of the log, so nothing is decoded twice: what a reader must not see (entries without records, rows outside of the
span) is cut out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.errors import Corrupt
from embarcadero.limits import SPARK_ROWS_BYTES
from embarcadero.spark.offsets import Span
from embarcadero.tier.settings import parse_properties
from embarcadero.tier.snapshots import TableFile
from embarcadero.tier.storage import reading
from embarcadero.tier.table_reads import TopicTable
from embarcadero.types import Cut, EntryKind, Gap, GapKind, Tier

_LOG: Final = logging.getLogger("embarcadero.spark")
_ALWAYS: Final = ("_index", "_seq", "_kind", "_damage")
_RUNS_MAX: Final = 16
"""So many runs of rows of a row group are handed on as they lie; more are copied together."""

Mask = npt.NDArray[np.bool_]


def open_table(tier: Tier, properties: Sequence[str]) -> TopicTable:
    """A topic's table as of what the store says; `properties` are those of the configuration (`tier.properties`)."""
    return TopicTable(tier, parse_properties(properties))


@lru_cache(maxsize=64)
def table_visible(tier_id: str, metadata: str, topic: str) -> bool:
    """Whether this process can see the files of a table. A folder of another machine it can't: brokers read it then."""
    scheme, _, rest = metadata.partition("://")
    if (scheme != "file" and not metadata.startswith("/")) or Path(unquote(rest) or metadata).exists():
        return True
    _LOG.warning(
        "the table of topic %r (%s) is in a folder that this machine can't see (%s): brokers read it for this job; "
        "a warehouse in an object store or a shared folder is read faster", topic, tier_id, metadata,
    )  # fmt: skip
    return False


# --- planning ---------------------------------------------------------------------------------------------------------
def table_pieces(table: TopicTable, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Pieces of batches [start, stop): files, and row groups of files that are too large for one piece.

    `stop` is at most the frontier. Bytes are those of files.
    """
    found: list[Cut] = []
    for file in table.files(lane, start, stop):
        whole = [Cut(file.stop_index, file.stop_seq, file.bytes)]
        found += whole if file.bytes <= piece_bytes else _groups(table, file)
    joined: list[Cut] = []
    for cut in found:
        if cut.index <= start or cut.index > stop:
            continue
        if joined and joined[-1].bytes + cut.bytes <= piece_bytes:
            joined[-1] = Cut(cut.index, cut.seq, joined[-1].bytes + cut.bytes)
        else:
            joined.append(cut)
    return joined


def _groups(table: TopicTable, file: TableFile) -> list[Cut]:
    """The row groups of a file. Each has whole batches; the next one's first row tells where one ends."""
    with table.storage.open(file.path) as stream, reading(file.path):
        facts = pq.ParquetFile(stream).metadata
        names = [facts.schema.column(number).path for number in range(facts.num_columns)]
        place = [names.index("_index"), names.index("_seq")]
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        firsts = [[group.column(column).statistics.min for column in place] for group in groups]
        sizes = [sum(group.column(column).total_compressed_size for column in range(len(names))) for group in groups]
    ends = [*firsts[1:], [file.stop_index, file.stop_seq]]
    return [Cut(index, seq, size) for (index, seq), size in zip(ends, sizes, strict=True)]


def payload_pieces(table: TopicTable, lane: int, start: int, stop: int, piece_bytes: int, most: int) -> list[Cut]:
    """The first pieces of batches [start, stop) by the bytes that were published: for limits, which count those."""
    found: list[Cut] = []
    last = Cut(*table.tier.frontier(lane), 0)  # if the table has nothing of the span
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


# --- rows -------------------------------------------------------------------------------------------------------------
def table_rows(
    table: TopicTable, span: Span, stop: int, columns: dict[str, pa.DataType], partitions: Sequence[int] | None,
    gone: Callable[[Gap], None], durable: bool = False,
) -> Iterator[pa.RecordBatch]:  # fmt: skip
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


def _wanted(group: pa.RecordBatch, span: Span, partitions: Sequence[int] | None) -> Mask:
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
    ]  # fmt: skip
    if not arrays:
        return rows
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
