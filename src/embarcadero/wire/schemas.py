"""A topic's schema and its versions. Columns are only added at the end, so every version is a prefix of the newest.

That makes a history small (the newest schema, and how many columns each version has), and lets a reader that knows an
old version decode a newer batch: its first columns are the ones that the reader knows. Version 0 is raw records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.types as kinds

from embarcadero.errors import BadSchema, Corrupt
from embarcadero.limits import SCHEMA_BYTES_MAX, SCHEMA_COLUMNS_MAX, SCHEMA_DEPTH_MAX, SCHEMA_ROW_BYTES_MAX
from embarcadero.wire.payload import RAW_SCHEMA

SEQ_COLUMN: Final = "_seq"
"""The column that bounded reads add."""

_PLAIN: Final = (
    kinds.is_null, kinds.is_boolean, kinds.is_integer, kinds.is_floating, kinds.is_decimal, kinds.is_temporal,
    kinds.is_binary, kinds.is_string, kinds.is_large_binary, kinds.is_large_string, kinds.is_fixed_size_binary,
)  # fmt: skip
_NESTED: Final = (
    kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list, kinds.is_struct, kinds.is_map,
)  # fmt: skip
_OFFSET_BYTES: Final = 8
_KINDS: Final = "use numbers, bool, dates and times, binary, string, decimal, and list, struct or map of these"


@dataclass(frozen=True, slots=True)
class TopicSchemas:
    """The schemas of a topic: `newest`, and how many of its columns each version has."""

    newest: pa.Schema
    widths: tuple[int, ...] = ()

    @property
    def version(self) -> int:
        """The newest version; 0 for raw records."""
        return len(self.widths)

    @property
    def typed(self) -> bool:
        """Whether the topic has a schema of its own."""
        return bool(self.widths)

    def of(self, version: int) -> pa.Schema:
        """The schema by which to read a batch; of a version newer than we know, only the columns that we know."""
        if not self.typed or version >= self.version:
            if version and not self.typed:
                raise Corrupt(f"a batch of schema version {version} in a topic of raw records", "report it: a bug")
            return self.newest
        if version < 1:
            raise Corrupt("raw records in a topic with a schema", "report it: this is a bug")
        return pa.schema(list(self.newest)[: self.widths[version - 1]])

    def all(self) -> dict[int, pa.Schema]:
        """Every version; empty for raw records."""
        return {version: self.of(version) for version in range(1, self.version + 1)}


RAW: Final = TopicSchemas(RAW_SCHEMA)


def encode_schema(schema: Any) -> bytes:
    """A new or changed schema as an Arrow message; BadSchema says why it can't be a topic's."""
    if not isinstance(schema, pa.Schema):
        raise BadSchema(f"a schema is a pyarrow.Schema, not {type(schema).__name__}", "see pyarrow.schema")
    check_row_bytes(checked_schema(schema.remove_metadata()))
    data: bytes = schema.remove_metadata().serialize().to_pybytes()
    if len(data) > SCHEMA_BYTES_MAX:
        raise BadSchema(f"a schema of {len(data)} bytes", f"use at most {SCHEMA_BYTES_MAX}: fewer or shorter columns")
    return data


def decode_schema(data: bytes) -> pa.Schema:
    """The checked schema in an Arrow message from outside."""
    if len(data) > SCHEMA_BYTES_MAX:
        raise BadSchema(f"a schema of {len(data)} bytes", f"use at most {SCHEMA_BYTES_MAX}")
    try:
        return checked_schema(pa.ipc.read_schema(pa.py_buffer(data)))
    except BadSchema:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # names that are no UTF-8 show when they are looked at
        raise BadSchema(f"no Arrow schema: {error}", "send what pyarrow's Schema.serialize gives") from None


def decode_versions(columns: bytes, widths: Sequence[int]) -> TopicSchemas:
    """What a broker told about a topic's schema."""
    if not columns:
        return RAW
    schema = decode_schema(columns)
    ends = tuple(widths)
    if not ends or ends[0] < 1 or ends[-1] != len(schema) or any(a >= b for a, b in pairwise(ends)):
        raise Corrupt(f"versions of {list(ends)[:8]} columns of a schema of {len(schema)}", "report it: this is a bug")
    return TopicSchemas(schema, ends)


def checked_schema(schema: pa.Schema) -> pa.Schema:
    """A schema that a topic may have, as it is."""
    if not 1 <= len(schema) <= SCHEMA_COLUMNS_MAX:
        raise BadSchema(f"a schema of {len(schema)} columns", f"use 1 to {SCHEMA_COLUMNS_MAX}")
    seen: set[str] = set()
    for field in schema:
        if not field.name or field.name == SEQ_COLUMN or field.name in seen:
            why = "is there twice" if field.name in seen else "can't be a column's name"
            raise BadSchema(f"{field.name!r} {why}", f"use other names than '' and {SEQ_COLUMN!r}, each once")
        seen.add(field.name)
        _check_type(field.name, field.type, 0)
    return schema


def _check_type(column: str, kind: pa.DataType, depth: int) -> None:
    if depth > SCHEMA_DEPTH_MAX:
        raise BadSchema(f"column {column!r} has types within types {depth} deep", f"use at most {SCHEMA_DEPTH_MAX}")
    if kinds.is_dictionary(kind):
        raise BadSchema(f"column {column!r} is {kind}", f"batches carry no dictionaries; use {kind.value_type}")
    if any(is_kind(kind) for is_kind in _NESTED):
        for number in range(kind.num_fields):
            _check_type(column, kind.field(number).type, depth + 1)
    elif isinstance(kind, pa.BaseExtensionType) or not any(is_kind(kind) for is_kind in _PLAIN):
        raise BadSchema(f"column {column!r} is {kind}, which a topic can't hold", _KINDS)


def check_row_bytes(schema: pa.Schema) -> None:
    """Refuse a new or changed schema whose rows are too wide: a reader has that for each older record, without data.

    Topics that got such a schema from an earlier version keep it.
    """
    widths = {field.name: _row_bytes(field.type) for field in schema}
    if (total := sum(widths.values())) > SCHEMA_ROW_BYTES_MAX:
        column = max(widths, key=widths.__getitem__)
        what = f"rows with {total:,} bytes in columns of fixed width, {widths[column]:,} of them in column {column!r}"
        raise BadSchema(what, f"use at most {SCHEMA_ROW_BYTES_MAX:,}; use binary and list without a size")


def _row_bytes(kind: pa.DataType) -> int:
    """What a row has whatever is in it, also a null. An entry of a list counts as at least one byte."""
    inner = [_row_bytes(kind.field(number).type) for number in range(kind.num_fields)]
    if kinds.is_fixed_size_list(kind):
        return int(kind.list_size) * max(1, *inner)
    if kinds.is_struct(kind):
        return sum(inner)
    if inner:
        return max(_OFFSET_BYTES, *inner)
    if kinds.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    if kinds.is_null(kind):
        return 0
    return (kind.bit_width + 7) // 8 if kinds.is_primitive(kind) or kinds.is_decimal(kind) else _OFFSET_BYTES


def evolve(known: TopicSchemas, wanted: pa.Schema) -> TopicSchemas:
    """The next version, with the new columns at the end; the same object if there are none. BadSchema: all reasons."""
    if not known.typed:
        raise BadSchema("a topic of raw records can't get a schema", "create another topic with that schema")
    added = [field for field in wanted if field.name not in known.newest.names]
    if problems := [*_changes(known.newest, wanted, added), *_unfit(added)]:
        raise BadSchema("; ".join(problems), "a schema changes only by added columns that may be null")
    if not added:
        return known
    newest = pa.schema([*known.newest, *added])
    encode_schema(newest)
    return TopicSchemas(newest, (*known.widths, len(newest)))


def _changes(known: pa.Schema, wanted: pa.Schema, added: list[pa.Field]) -> list[str]:
    problems = []
    for place, field in enumerate(known):
        if field.name in wanted.names:
            new = wanted.field(field.name)
            if new.type != field.type:
                problems.append(f"column {field.name!r} is {field.type} and can't become {new.type}")
            elif new.nullable != field.nullable:
                was, becomes = (("nullable", "not null"), ("not null", "nullable"))[new.nullable]
                problems.append(f"column {field.name!r} is {was} and can't become {becomes}")
        elif place < len(wanted) and wanted.field(place) in added and wanted.field(place).type == field.type:
            problems.append(f"column {field.name!r} can't be renamed to {wanted.field(place).name!r}")
        else:
            problems.append(f"column {field.name!r} can't be removed")
    return problems


def _unfit(added: list[pa.Field]) -> list[str]:
    strict = [field.name for field in added if not field.nullable]
    return [f"new column {name!r} must be nullable: older records have none" for name in strict]


def named(schema: pa.Schema) -> str:
    """A schema in one line, as `topic create --schema` takes it."""
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else '!'}" for field in schema)
