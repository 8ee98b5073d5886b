"""What people have becomes Arrow: data frames of pandas and polars, rows, columns. Every refusal names the column."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from embarcadero.client.exact import loses, may_lose
from embarcadero.errors import BadSchema, BadValue

Tabular = Any
"""A pyarrow Table or RecordBatch; pyarrow has no types of its own to check."""

_HINT = "publish takes an Arrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, a dict of columns"
_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def to_arrow(data: Any, wanted: Mapping[str, pa.DataType]) -> Tabular:
    """`data` as Arrow. Arrow comes back as it is; what else there is takes the wanted types where it loses nothing."""
    if isinstance(data, pa.Table | pa.RecordBatch):
        return data
    if _is_frame("pandas", data):
        if not data.columns.is_unique:
            raise BadSchema(f"columns {list(data.columns)} have a name twice", "rename one of them")
        return _table({name: data[name] for name in data.columns}, wanted)  # its index is no column
    if hasattr(data, "__arrow_c_stream__"):  # polars, and others that speak Arrow
        table = _stream(data)
        return _table({name: _cast(name, table.column(name), wanted.get(name)) for name in table.column_names}, wanted)
    if isinstance(data, Mapping):
        return _table(data, wanted)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview):
        return _table(_columns(data), wanted)
    raise BadValue(f"a {type(data).__name__} can't be published", f"{_HINT}; send() takes bytes")


def _stream(data: Any) -> pa.Table:
    if _is_frame("polars", data):
        for name, kind in data.schema.items():
            if str(kind) == "Object":  # polars would hand out the addresses of the objects
                raise BadSchema(f"column {name!r} holds Python objects", "give it a type that Arrow has")
    try:
        return data.to_arrow() if _is_frame("polars", data) else pa.table(data)
    except (*_ERRORS, RuntimeError) as error:
        raise BadValue(f"a {type(data).__name__} can't be published: {error}", _HINT) from None


def _is_frame(library: str, data: Any) -> bool:
    """Whether it is a DataFrame of a library, which its owner has then loaded."""
    module = sys.modules.get(library)
    return module is not None and isinstance(data, module.DataFrame)


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    names: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadValue(f"row {number} is {type(row).__name__}, not a dict", _HINT)
        names.update(dict.fromkeys(row))
    return {name: [row.get(name) for row in rows] for name in names}


def _table(columns: Mapping[Any, Any], wanted: Mapping[str, pa.DataType]) -> pa.Table:
    arrays = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise BadSchema(f"column {name!r} has no text as its name", "rename it")
        arrays[name] = _array(name, values, wanted.get(name))
    lengths = {len(array) for array in arrays.values()}
    if len(lengths) > 1:
        told = ", ".join(f"{name}: {len(array)}" for name, array in arrays.items())
        raise BadSchema(f"columns of different lengths ({told})", "give every column as many values")
    return pa.table(arrays)


def _array(name: str, values: Any, kind: pa.DataType | None) -> Any:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadSchema(
            f"column {name!r} is one {type(values).__name__}, not values", "rows are a list of dicts, columns are lists"
        )
    try:
        if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
            values = list(values)
        if kind is not None and kinds.is_map(kind):
            values = [list(value.items()) if isinstance(value, Mapping) else value for value in values]
        if kind is not None and isinstance(values, Sequence) and may_lose(kind):
            for number, value in enumerate(values):
                if loses(value, kind):
                    raise ValueError(f"{value!r} in row {number} would lose something")
        return pa.array(values, kind)
    except _ERRORS as error:
        what = "Arrow" if kind is None else str(kind)
        raise BadSchema(f"column {name!r} can't become {what}: {error}", "convert it before you publish it") from None


def _cast(name: str, column: Any, kind: pa.DataType | None) -> Any:
    try:
        return column if kind is None or column.type == kind else column.cast(kind)
    except _ERRORS as error:
        raise BadSchema(f"column {name!r} is {column.type}, not {kind}: {error}", "convert it before") from None
