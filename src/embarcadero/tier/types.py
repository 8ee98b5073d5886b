"""Types that Iceberg, Spark and Parquet readers all have, and the way to them and back from the types of topics."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.errors import BadSchema

_DIGITS_MAX: Final = 38  # of a decimal in Iceberg and Spark
_UINT64_DIGITS: Final = 20
_ELEMENT, _KEY, _VALUE = "element", "key", "value"

_SAME: Final = (
    kinds.is_boolean, kinds.is_int32, kinds.is_int64, kinds.is_float32, kinds.is_float64, kinds.is_string,
    kinds.is_binary, kinds.is_date32,
)  # fmt: skip


def table_type(kind: pa.DataType, column: str = "") -> pa.DataType:
    """The type of a table's column for a type of a topic. Every value fits, with two exceptions.

    Nanoseconds of times lose what is below a microsecond (`to_table` tells), and times beyond the years that 64 bits
    of microseconds can count do not fit. BadSchema names the column if there is no such type.

        table_type(pa.uint32())                  # int64
        table_type(pa.list_(pa.float16(), 3))    # list<element: float>
    """
    if any(is_kind(kind) for is_kind in _SAME):
        return kind
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return pa.list_(pa.field(_ELEMENT, _nested(kind.value_type, column)))
    if kinds.is_map(kind):
        key, item = _nested(kind.key_type, column), _nested(kind.item_type, column)
        return pa.map_(pa.field(_KEY, key, nullable=False), pa.field(_VALUE, item))
    if kinds.is_struct(kind):
        return _struct_type(kind, column)
    return _plain_type(kind, column)


def _struct_type(kind: pa.StructType, column: str) -> pa.DataType:
    names = [kind.field(number).name for number in range(kind.num_fields)]
    if not names or "" in names or len({name.lower() for name in names}) < len(names):
        raise BadSchema(
            f"column {column!r} is {kind}, which no table can hold",
            "give a struct at least one field, each with a name of its own (upper and lower case are the same)",
        )
    fields = [kind.field(number) for number in range(kind.num_fields)]
    return pa.struct([pa.field(field.name, _nested(field.type, column)) for field in fields])


def _nested(kind: pa.DataType, column: str) -> pa.DataType:
    if kinds.is_null(kind):
        raise BadSchema(f"column {column!r} has nulls only within another type", "use the type that they are nulls of")
    return table_type(kind, column)


def _plain_type(kind: pa.DataType, column: str) -> pa.DataType:
    if kinds.is_integer(kind):
        if kinds.is_uint64(kind):
            return pa.decimal128(_UINT64_DIGITS, 0)
        return pa.int64() if kinds.is_uint32(kind) else pa.int32()
    if kinds.is_decimal(kind):
        return _decimal_type(kind, column)
    if kinds.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if kinds.is_time(kind):
        return pa.time64("us")
    for is_kind, becomes in (
        (kinds.is_float16, pa.float32()),
        (kinds.is_large_string, pa.string()),
        (kinds.is_null, pa.string()),
        (kinds.is_large_binary, pa.binary()),
        (kinds.is_fixed_size_binary, pa.binary()),
        (kinds.is_date64, pa.date32()),
        (kinds.is_duration, pa.int64()),
    ):
        if is_kind(kind):
            return becomes
    raise BadSchema(
        f"column {column!r} is {kind}, which Spark and Iceberg do not have",
        "use a duration, or numbers of months, days and nanoseconds in columns of their own",
    )


def _decimal_type(kind: pa.DataType, column: str) -> pa.DataType:
    """Iceberg and Spark want 0 <= scale <= precision."""
    scale = max(kind.scale, 0)
    digits = max(kind.precision - min(kind.scale, 0), scale)
    if digits > _DIGITS_MAX:
        raise BadSchema(
            f"column {column!r} is {kind}: Spark and Iceberg have decimals of {_DIGITS_MAX} digits",
            "use a smaller precision, or a string",
        )
    return pa.decimal128(digits, scale)


def cuts_nanoseconds(kind: pa.DataType) -> bool:
    """Whether the table's type for it may lose what is below a microsecond."""
    if (kinds.is_timestamp(kind) or kinds.is_time(kind)) and kind.unit == "ns":
        return True
    return any(cuts_nanoseconds(kind.field(number).type) for number in range(kind.num_fields))


def to_table(array: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, bool]:
    """A column in its table type, and whether nothing was lost. ArrowInvalid, if a value has no place there."""
    if array.type == wanted:
        return array, True
    if cuts_nanoseconds(array.type):
        try:
            return pc.cast(array, wanted), True
        except pa.ArrowInvalid:
            return _without_nanoseconds(array, wanted), False
    return pc.cast(array, wanted), True


def _without_nanoseconds(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return pc.cast(array, options=pc.CastOptions(target_type=wanted, allow_time_truncate=True))


def from_table(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """A column of a table in the type that its topic has for it."""
    if array.type == wanted:
        return array
    return pa.nulls(len(array), wanted) if kinds.is_null(wanted) else pc.cast(array, wanted)
