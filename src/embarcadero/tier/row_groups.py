"""Row groups of files: reading, size in memory, and decoding in pieces.

Parquet stores the sizes of encoded pages. A frequent value is in them once, so a group of two megabytes may decode to
hundreds. The tier job records the decoded size of each group in the footer (`SpanFooter.decoded`). If it is not known,
text and bytes are read as dictionaries: then this module can compute the size of a group, and decodes it piece by
piece.

`merged` combines records and control entries of a lane into one stream of rows, in the order of the log. Both inputs
are sorted by `_index`, and no index is in both. Control entries are rare: rows of records are passed on as slices
between two entries, and copied only where entries are dense.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from embarcadero.errors import BadTable, NotAvailable
from embarcadero.limits import TABLE_CACHE_BYTES, TABLE_FOOTERS_MAX
from embarcadero.tier.columns import Int64s
from embarcadero.tier.parquet import read_footer
from embarcadero.tier.snapshots import TableFile
from embarcadero.tier.storage import Storage, reading

_BYTES: Final = "BYTE_ARRAY"
_INDEX_BYTES: Final = 4  # the size of a dictionary index, and of an offset
_VALUE_BYTES: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, _BYTES: _INDEX_BYTES}
_DECIMAL_BYTES: Final = 16
_TEXTS: Final = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary)

_INDEX_MAX: Final = (1 << 63) - 1
_SLICES_MAX: Final = 16
"""With more slices than this, rows and entries are copied together: many small slices take longer."""


def dictionary_columns(metadata: pq.FileMetaData) -> list[str]:
    """The columns of text and bytes with a dictionary in any row group, in the format of `read_dictionary`."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(metadata.num_columns)]
    return sorted(
        {column.path_in_schema for column in columns if column.physical_type == _BYTES and column.has_dictionary_page}
    )


def group_bytes(metadata: pq.FileMetaData, number: int) -> int:
    """The maximum size of a row group in memory, in bytes, with its dictionaries not decoded."""
    total, group = 0, metadata.row_group(number)
    for at in range(metadata.num_columns):
        column = group.column(at)
        width = _VALUE_BYTES.get(column.physical_type) or max(_DECIMAL_BYTES, metadata.schema.column(at).length)
        values = column.num_values * width
        pages = column.total_uncompressed_size
        total += pages + values if column.physical_type == _BYTES else max(pages, values)
    return total


def pieces(group: pa.Table, bytes_max: int) -> Iterator[pa.Table]:
    """Split rows that are sorted by `_index` into parts that decode to about `bytes_max`. Batches stay whole."""
    sizes = sum((_column_bytes(column) for column in group.columns), np.zeros(group.num_rows, np.int64))
    indices = group.column("_index").to_numpy()
    ends = np.append(np.flatnonzero(indices[1:] != indices[:-1]) + 1, group.num_rows)  # of batches
    upto = np.cumsum(sizes)[ends - 1] if group.num_rows else sizes
    first = taken = 0
    while first < group.num_rows:
        at = int(np.searchsorted(upto, taken + bytes_max, side="right")) - 1
        at = max(at, int(np.searchsorted(ends, first, side="right")))  # at least one batch
        yield group.slice(first, int(ends[at]) - first)
        first, taken = int(ends[at]), int(upto[at])


def _column_bytes(column: pa.ChunkedArray) -> Int64s:
    """The bytes that decoding of dictionaries adds to each row. Other columns are not copied."""
    if not _has_dictionary(column.type):
        return np.zeros(len(column), np.int64)
    return np.concatenate([np.zeros(0, np.int64), *(_row_bytes(chunk) for chunk in column.chunks)])


def _has_dictionary(kind: pa.DataType) -> bool:
    if kinds.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _row_bytes(array: Any) -> Int64s:
    kind = array.type
    if kinds.is_dictionary(kind):
        if not any(is_text(kind.value_type) for is_text in _TEXTS):
            return np.zeros(len(array), np.int64)
        lengths = np.append(_plain(pc.binary_length(array.dictionary)), 0)
        return lengths[_plain(array.indices, len(lengths) - 1)]
    if kinds.is_struct(kind):
        return sum(map(_row_bytes, array.flatten()), np.zeros(len(array), np.int64))
    if kinds.is_map(kind):
        return _of_lists(array, _row_bytes(array.keys) + _row_bytes(array.items))
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return _of_lists(array, _row_bytes(array.values))
    return np.zeros(len(array), np.int64)


def _of_lists(array: Any, values: Int64s) -> Int64s:
    upto = np.concatenate(([0], np.cumsum(values)))
    offsets = array.offsets.to_numpy()
    found: Int64s = upto[offsets[1:]] - upto[offsets[:-1]]
    return found


def _plain(array: pa.Array, instead: int = 0) -> Int64s:
    found: Int64s = pc.fill_null(array, pa.scalar(instead, array.type)).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


class _Facts(NamedTuple):
    """Facts from the footer of a file: names of columns, and row groups (first and last index, bytes in memory)."""

    names: list[str]
    groups: list[tuple[int, int, int]]
    dictionaries: list[str]  # columns to read as dictionaries, because their decoded size is not known


class GroupCache:
    """A bounded cache of footers and decoded row groups. Files never change. Safe for threads."""

    def __init__(self, bytes_max: int = TABLE_CACHE_BYTES, footers_max: int = TABLE_FOOTERS_MAX) -> None:
        self._bytes_max, self._footers_max = bytes_max, footers_max
        self._footers: OrderedDict[str, _Facts] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0  # the size of the cached row groups

    def facts(self, path: str) -> _Facts | None:
        """The footer of a file, if it is cached."""
        with self._lock:
            return self._footers.get(path)

    def keep_facts(self, path: str, facts: _Facts) -> None:
        """Cache the footer of a file."""
        with self._lock:
            self._footers[path] = facts
            while len(self._footers) > self._footers_max:
                self._footers.popitem(last=False)

    def group(self, path: str, number: int, columns: tuple[str, ...]) -> pa.Table | None:
        """Columns of a row group, if they are cached."""
        with self._lock:
            found = self._groups.get((path, number, columns))
            if found is not None:
                self._groups.move_to_end((path, number, columns))
            return found

    def keep_group(self, path: str, number: int, columns: tuple[str, ...], group: pa.Table) -> None:
        """Cache columns of a row group, unless it is too large."""
        if group.nbytes > self._bytes_max:
            return
        with self._lock:
            before = self._groups.pop((path, number, columns), None)
            self._groups[path, number, columns] = group
            self.bytes += group.nbytes - (0 if before is None else before.nbytes)
            while self.bytes > self._bytes_max:
                self.bytes -= self._groups.popitem(last=False)[1].nbytes


class RowGroupFile:
    """A file of a table. It is opened on the first cache miss."""

    def __init__(self, storage: Storage, file: TableFile, cache: GroupCache | None, group_bytes_max: int) -> None:
        self._storage, self._file, self._cache, self._group_bytes_max = storage, file, cache, group_bytes_max
        self._stream: Any = None
        self._parquet: pq.ParquetFile | None = None
        self._as_dictionaries = False

    def __enter__(self) -> RowGroupFile:
        return self

    def __exit__(self, *_failure: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def _open(self, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
        """Open the file for its footer; open it again to read columns as dictionaries."""
        if self._parquet is None:
            self._stream = self._storage.open(self._file.path)
        if self._parquet is None or (dictionaries and not self._as_dictionaries):
            known, self._as_dictionaries = self._parquet, bool(dictionaries)
            with reading(self._file.path):
                self._parquet = pq.ParquetFile(
                    self._stream,
                    page_checksum_verification=True,
                    pre_buffer=True,
                    read_dictionary=list(dictionaries),
                    metadata=None if known is None else known.metadata,
                )
        return self._parquet

    def facts(self) -> _Facts:
        """Read the footer. BadTable if it contradicts the table."""
        path = self._file.path
        known = None if self._cache is None else self._cache.facts(path)
        if known is not None:
            return known
        parquet = self._open()
        with reading(path):
            facts, rows = _facts(parquet, path), parquet.metadata.num_rows
        if rows != self._file.rows or "_index" not in facts.names:
            what = f"{path} has {rows} rows, but {self._file.rows} in the metadata of its table"
            raise BadTable(what, "restore it from a copy")
        if self._cache is not None:
            self._cache.keep_facts(path, facts)
        return facts

    def group(self, number: int, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of a row group. NotAvailable if it needs more memory than this reader may use."""
        path, facts = self._file.path, self.facts()
        if (size := facts.groups[number][2]) > self._group_bytes_max:
            raise NotAvailable(
                f"row group {number} of {path} needs {size} bytes of memory; a broker reads at most "
                f"{self._group_bytes_max}",
                'read the table in the client (install "embarcadero[iceberg]"), or write it with smaller row groups',
            )
        known = None if self._cache is None else self._cache.group(path, number, columns)
        if known is not None:
            return known
        group = self._open(facts.dictionaries).read_row_group(number, columns=list(columns)).combine_chunks()
        if self._cache is not None:
            self._cache.keep_group(path, number, columns, group)
        return group


def _facts(parquet: pq.ParquetFile, path: str) -> _Facts:
    """Columns and row groups of a file: first and last index of each group, and its size in memory.

    The indices in a file of another program are unknown before it is read.
    """
    footer, metadata = read_footer(parquet, path), parquet.metadata
    numbers = range(metadata.num_row_groups)
    spans = [(0, _INDEX_MAX)] * len(numbers) if footer is None else [(first, last) for first, last, _ in footer.groups]
    known = [] if footer is None else footer.decoded
    sizes = known or [group_bytes(metadata, number) for number in numbers]
    groups = [(first, last, size) for (first, last), size in zip(spans, sizes, strict=True)]
    return _Facts(parquet.schema_arrow.names, groups, [] if known else dictionary_columns(metadata))


def merged(records: Iterator[pa.RecordBatch], entries: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge both streams of rows by `_index`, lazily. Both have the same columns with `_index`; batches stay whole."""
    waiting = next(entries, None)
    for rows in records:
        if not rows.num_rows:
            continue
        last = int(rows.column("_index")[-1].as_py())
        before: list[pa.RecordBatch] = []
        while waiting is not None:
            count = int(np.searchsorted(waiting.column("_index").to_numpy(), last))
            before.append(waiting.slice(0, count))
            if count < waiting.num_rows:
                waiting = waiting.slice(count)
                break
            waiting = next(entries, None)
        yield from _interleaved(rows, [part for part in before if part.num_rows])
    while waiting is not None:
        if waiting.num_rows:
            yield waiting
        waiting = next(entries, None)


def _interleaved(rows: pa.RecordBatch, before: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge rows of records with the entries before the last of them."""
    if not before:
        yield rows
        return
    (entries,) = pa.Table.from_batches(before).combine_chunks().to_batches()
    positions = np.searchsorted(rows.column("_index").to_numpy(), entries.column("_index").to_numpy())
    starts = np.flatnonzero(np.concatenate(([True], positions[1:] != positions[:-1])))
    if len(starts) > _SLICES_MAX:
        both = pa.Table.from_batches([rows, entries]).combine_chunks()
        order = np.argsort(both.column("_index").to_numpy(), kind="stable")
        yield from both.take(order).combine_chunks().to_batches()
        return
    at = 0
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(positions)], strict=True):
        position = int(positions[start])
        if position > at:
            yield rows.slice(at, position - at)
        yield entries.slice(start, stop - start)
        at = position
    yield rows.slice(at)
