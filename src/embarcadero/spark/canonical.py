"""Rows in an order, and in bytes, that depend on nothing but the rows.

A task that runs again after a shuffle gets the same rows in another order, in other Arrow batches, with other garbage
under its nulls. Its batches must come out as the same bytes all the same: that is how they are recognised. So rows are
sorted by the columns that were asked for, then by everything else, and nothing that is null leaves a trace.

Sorting goes from cheap to dear: columns of fixed width first, then the first bytes of texts, then whole texts and what
is nested. Most rows are told apart early, and whether they are is a fact about the rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

Key = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

_PREFIX: Final = 8
_ODD: Final = np.uint64(0x9E37_79B9_7F4A_7C15)


def in_order(
    batch: pa.RecordBatch, order_by: Sequence[str] = (), first: Key | None = None
) -> tuple[pa.RecordBatch, Any]:
    """Rows sorted by `first` (a number for each row), by the named columns, by all others; and `first` sorted alike."""
    order = _order(batch, order_by, first)
    columns = [canonical(column.take(order)) for column in batch.columns]
    made = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
    return made, None if first is None else first[order]


def _order(batch: pa.RecordBatch, order_by: Sequence[str], first: Key | None) -> Any:
    keys: list[Key] = [] if first is None else [first]
    for name in order_by:
        keys += _whole(batch.column(name))
    for level in (_cheap, _prefixes, _whole):
        for column in batch.columns:
            keys += level(column)
        order = np.lexsort(keys[::-1]) if keys else np.arange(batch.num_rows)
        if keys and not _ties(keys, order):
            break
    return order


def _ties(keys: Sequence[Key], order: Key) -> bool:
    """Whether two rows are still equal."""
    equal = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        sorted_key = key[order]
        equal &= sorted_key[1:] == sorted_key[:-1]
        if not equal.any():
            return False
    return bool(equal.any())


# --- keys -------------------------------------------------------------------------------------------------------------
def _cheap(column: pa.Array) -> list[Key]:
    """Numbers that order a column of fixed width; nothing for others."""
    if not _is_fixed(column.type):
        return []
    keys = _words(column)
    if column.null_count:
        valid = _valid(column)
        keys = [valid, *(np.where(valid, key, key.dtype.type(0)) for key in keys)]
    return keys


def _prefixes(column: pa.Array) -> list[Key]:
    """The first bytes of texts as a number, and their lengths."""
    if not _is_text(column.type):
        return []
    starts, lengths, data = _text(column)
    prefix = np.zeros(len(column), dtype=np.uint64)
    for at in range(_PREFIX):
        there = lengths > at
        prefix <<= np.uint64(8)
        prefix[there] |= data[starts[there] + at]
    return [prefix, lengths]


def _whole(column: pa.Array) -> list[Key]:
    """The place of each value among all values, for texts; a hash, for what is nested; numbers as they are."""
    if _is_fixed(column.type):
        return _cheap(column)
    if _is_text(column.type):
        return [_ranks(column)]
    return [] if kinds.is_null(column.type) else [_hashes(column)]


def _ranks(column: pa.Array) -> Hashes:
    """0 for null, else the place among the different values. Those are found first: comparing equal texts is dear."""
    different = column.dictionary_encode()
    ranks = np.asarray(pc.rank(different.dictionary, sort_keys="ascending", tiebreaker="dense")).astype(np.uint64)
    found: Hashes = np.append(ranks, np.uint64(0))[np.asarray(different.indices.fill_null(len(ranks)))]
    return found


def _hashes(column: pa.Array) -> Hashes:
    """A number for each value that is the same for equal values, of any type."""
    valid, kind = _valid(column), column.type
    found = np.zeros(len(column), dtype=np.uint64)
    if kinds.is_struct(kind):
        for number, child in enumerate(column.flatten()):
            found = _mixed(found * _ODD + _hashes(child) + np.uint64(number + 1))
    elif kinds.is_fixed_size_list(kind):
        return _hashes(column.cast(pa.list_(kind.value_type)))
    elif _is_list(kind):
        found = _list_hashes(column)
    elif _is_text(kind):
        found = _ranks(column)
    elif not kinds.is_null(kind):
        for word in _words(column):
            found = _mixed(found * _ODD + word.astype(np.int64, copy=False).view(np.uint64))
    return np.where(valid, _mixed(found + np.uint64(1)), np.uint64(0))


def _list_hashes(column: pa.Array) -> Hashes:
    offsets = np.asarray(column.offsets).astype(np.int64)
    lengths = np.diff(offsets)
    starts = offsets[:-1] - offsets[0]
    inner = _hashes(_inside(column, offsets))
    place = np.arange(len(inner)) - np.repeat(starts, lengths)
    terms = np.append(_mixed(inner + place.astype(np.uint64) * _ODD), np.uint64(0))
    sums = np.add.reduceat(terms, np.minimum(starts, len(inner))) if len(lengths) else terms[:0]
    return np.where(lengths > 0, sums, np.uint64(0)) + lengths.astype(np.uint64)


def _mixed(numbers: Hashes) -> Hashes:
    """Spread what differs in few bits over all of them."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return numbers ^ (numbers >> np.uint64(31))


def _words(column: pa.Array) -> list[Key]:
    """A column of fixed width as numbers that have its order, the most significant first. Nulls are anything."""
    kind = column.type
    if kinds.is_boolean(kind):
        return [np.asarray(column.fill_null(False)).astype(np.int8)]
    width = kind.bit_width // 8
    raw = np.frombuffer(column.buffers()[1] or b"", dtype=np.uint8)[column.offset * width :][: len(column) * width]
    if width > 8:  # decimals: little-endian words
        words = raw.view(np.uint64).reshape(len(column), width // 8)
        return [words[:, -1].view(np.int64), *(words[:, at] for at in range(width // 8 - 2, -1, -1))]
    if kinds.is_unsigned_integer(kind):
        return [raw.view(f"<u{width}")]
    numbers = raw.view(f"<i{width}")
    if kinds.is_floating(kind):  # a total order: as numbers, with -0.0 before 0.0 and NaNs by their bits
        return [np.where(numbers < 0, numbers ^ np.iinfo(numbers.dtype).max, numbers)]
    return [numbers]


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(kinds.is_primitive(kind) or kinds.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    known = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary, kinds.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in known) and not kinds.is_decimal(kind)


def _is_list(kind: pa.DataType) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind))


def _valid(column: pa.Array) -> npt.NDArray[np.bool_]:
    if not column.null_count:
        return np.ones(len(column), dtype=bool)
    return np.asarray(column.is_valid(), dtype=bool)


def _text(column: pa.Array) -> tuple[Key, Key, Key]:
    """Where each text starts, how long it is (0 for null), and all bytes."""
    kind = column.type
    if kinds.is_fixed_size_binary(kind):
        raw = np.frombuffer(column.buffers()[1] or b"\0", dtype=np.uint8)
        starts = (np.arange(len(column)) + column.offset) * kind.byte_width
        lengths = np.full(len(column), kind.byte_width, dtype=np.int64)
    else:
        large = kinds.is_large_string(kind) or kinds.is_large_binary(kind)
        ends = np.frombuffer(column.buffers()[1] or bytes(8), dtype=np.int64 if large else np.int32)
        ends = ends[column.offset : column.offset + len(column) + 1].astype(np.int64)
        raw = np.frombuffer(column.buffers()[2] or b"\0", dtype=np.uint8)
        starts, lengths = ends[:-1], np.diff(ends)
    return starts, np.where(_valid(column), lengths, 0), raw


# --- nothing under nulls ----------------------------------------------------------------------------------------------
def canonical(column: pa.Array) -> pa.Array:
    """A fresh column (of `take`), with zeros under its nulls."""
    kind = column.type
    if kinds.is_null(kind) or not _has_nulls(column):
        return column
    if kinds.is_struct(kind):
        children = [canonical(child) for child in column.flatten()]
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(~_valid(column)))
    if kinds.is_nested(kind):
        return _canonical_list(column)
    if not column.null_count:
        return column
    if kinds.is_fixed_size_binary(kind) and not kinds.is_decimal(kind):
        return _filled(column, pa.scalar(bytes(kind.byte_width), kind))
    return _filled(column, _zero(kind))


def _zero(kind: pa.DataType) -> pa.Scalar:
    if _is_text(kind):
        return pa.scalar(b"" if kinds.is_binary(kind) or kinds.is_large_binary(kind) else "", kind)
    if kinds.is_decimal(kind) or kinds.is_boolean(kind):
        return pa.scalar(0, pa.int32()).cast(kind)
    return pa.scalar(0, f"int{kind.bit_width}" if not kinds.is_floating(kind) else pa.int32()).cast(kind)


def _filled(column: pa.Array, zero: pa.Scalar) -> pa.Array:
    buffers = column.fill_null(zero).buffers()
    return pa.Array.from_buffers(column.type, len(column), [_bits(column), *buffers[1:]])


def _canonical_list(column: pa.Array) -> pa.Array:
    """Lists and maps without what lies under their nulls."""
    kind, valid = column.type, _valid(column)
    if kinds.is_fixed_size_list(kind):
        width = kind.list_size
        values = column.values.slice(column.offset * width, len(column) * width)
        hidden = pa.array(np.repeat(~valid, width))
        child = canonical(pc.if_else(hidden, pa.scalar(None, kind.value_type), values))
        return pa.Array.from_buffers(kind, len(column), [_bits(column)], children=[child])
    offsets = np.asarray(column.offsets)
    inner, lengths = _inside(column, offsets), np.diff(offsets)
    if lengths[~valid].any():
        inner = inner.filter(pa.array(np.repeat(valid, lengths)))
    fresh = np.zeros(len(column) + 1, dtype=offsets.dtype)
    np.cumsum(np.where(valid, lengths, 0), out=fresh[1:])
    return pa.Array.from_buffers(kind, len(column), [_bits(column), pa.py_buffer(fresh)], children=[canonical(inner)])


def _inside(column: pa.Array, offsets: Key) -> pa.Array:
    """The elements of all lists, or the entries of all maps."""
    kind, start = column.type, int(offsets[0])
    if not kinds.is_map(kind):
        return column.values.slice(start, int(offsets[-1]) - start)
    entries = pa.StructArray.from_arrays([column.keys, column.items], fields=[kind.key_field, kind.item_field])
    return entries.slice(start, int(offsets[-1]) - start)


def _bits(column: pa.Array) -> pa.Buffer | None:
    """Which rows are there, a bit for each; None: all."""
    if not column.null_count:
        return None
    return pa.py_buffer(np.packbits(_valid(column), bitorder="little"))


def _has_nulls(column: pa.Array) -> bool:
    return bool(column.null_count) or any(_has_nulls(child) for child in _children(column))


def _children(column: pa.Array) -> Iterator[pa.Array]:
    kind = column.type
    if kinds.is_struct(kind):
        yield from (column.field(number) for number in range(kind.num_fields))
    elif kinds.is_map(kind):
        yield from (column.keys, column.items)
    elif kinds.is_nested(kind):
        yield column.values
