"""Memory of row groups: what one takes when it is read, and pieces of it that are decoded one after the other.

Parquet's own sizes are those of encoded pages. A value that comes often is in them once, and a group of two megabytes
may decode to hundreds. The tiering job notes the decoded size of each group in the footer (`Footer.decoded`). Where it
is not known, text and bytes are read as dictionaries: then a group takes what this module tells, and values are copied
into their rows piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

_BYTES: Final = "BYTE_ARRAY"
_INDEX_BYTES: Final = 4  # of a value in a dictionary, and of an offset
_VALUE_BYTES: Final = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, _BYTES: _INDEX_BYTES}
_DECIMAL_BYTES: Final = 16
_TEXTS: Final = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary)

Int64s = npt.NDArray[np.int64]


def dictionary_columns(metadata: pq.FileMetaData) -> list[str]:
    """The columns of text and bytes that have a dictionary in any row group, as `read_dictionary` wants them."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(metadata.num_columns)]
    return sorted({
        column.path_in_schema for column in columns if column.physical_type == _BYTES and column.has_dictionary_page
    })  # fmt: skip


def group_bytes(metadata: pq.FileMetaData, number: int) -> int:
    """Bytes that a row group takes, at most, while its dictionaries are kept as such."""
    total, group = 0, metadata.row_group(number)
    for at in range(metadata.num_columns):
        column = group.column(at)
        width = _VALUE_BYTES.get(column.physical_type) or max(_DECIMAL_BYTES, metadata.schema.column(at).length)
        values = column.num_values * width
        pages = column.total_uncompressed_size
        total += pages + values if column.physical_type == _BYTES else max(pages, values)
    return total


def pieces(group: pa.Table, bytes_max: int) -> Iterator[pa.Table]:
    """Cut rows that are sorted by `_index` into parts that decode to about `bytes_max`. No batch is cut."""
    sizes = sum((_column_bytes(column) for column in group.columns), np.zeros(group.num_rows, np.int64))
    indices = group.column("_index").to_numpy()
    ends = np.append(np.flatnonzero(indices[1:] != indices[:-1]) + 1, group.num_rows)  # of batches
    upto = np.cumsum(sizes)[ends - 1] if group.num_rows else sizes
    first = taken = 0
    while first < group.num_rows:
        at = int(np.searchsorted(upto, taken + bytes_max, side="right")) - 1
        at = max(at, int(np.searchsorted(ends, first, side="right")))  # one batch at least
        yield group.slice(first, int(ends[at]) - first)
        first, taken = int(ends[at]), int(upto[at])


def _column_bytes(column: pa.ChunkedArray) -> Int64s:
    """Bytes that dictionaries add to each row once they are decoded. Other columns are not copied."""
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
