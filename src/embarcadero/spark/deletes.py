"""Which records of a compacted topic delete their key: one rule, for rows in tasks and for queries."""

from __future__ import annotations

from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.errors import BadValue
from embarcadero.wire.schemas import TopicSchemas

EMPTY: Final = "empty"
NULLS: Final = "nulls"
NONE: Final = "none"
COLUMN: Final = "column"
_HINT: Final = "use none, a boolean column (deleted), or a column and its value (op=d)"


class Deletes(msgspec.Struct, frozen=True):
    """A record deletes its key if its value is empty (rule `empty`: topics without a schema), if all columns but the
    key are null (`nulls`), if a column is true or has a value (`column`); or never (`none`).
    """

    rule: str
    key: str
    column: str = ""
    value: str = ""

    def __str__(self) -> str:
        return self.rule if self.rule != COLUMN else f"{self.column}={self.value}" if self.value else self.column

    def kept(self, rows: pa.RecordBatch) -> pa.Array:
        """Whether each row stays."""
        return pc.invert(self._deleting(rows))

    def _deleting(self, rows: pa.RecordBatch) -> pa.Array:
        if self.rule == EMPTY:
            return pc.equal(pc.binary_length(rows.column("value")), 0)
        found = pa.repeat(pa.scalar(self.rule == NULLS), rows.num_rows)
        if self.rule == NULLS:
            for name in rows.schema.names:
                found = found if name == self.key else pc.and_(found, rows.column(name).is_null())
        elif self.rule == COLUMN:
            column = rows.column(self.column)
            found = column if not self.value else pc.equal(pc.cast(column, pa.string()), self.value)
        return pc.fill_null(found, False)

    def sql(self, names: list[str]) -> str:
        """The same as a condition of Spark SQL, over a frame with these columns."""
        if self.rule == EMPTY:
            return "length(value) = 0"
        if self.rule == NULLS:
            return " and ".join(f"`{name}` is null" for name in names if name != self.key)
        if self.rule == NONE:
            return "false"
        if not self.value:
            return f"`{self.column}`"
        value = self.value.replace("\\", "\\\\").replace("'", "\\'")
        return f"cast(`{self.column}` as string) = '{value}'"


def deletes_of(schemas: TopicSchemas, key: str, text: str | None) -> Deletes:
    """The rule that a caller names, or the usual one of a topic. BadValue, if it can't be one of this topic."""
    if text == NONE:
        return Deletes(NONE, key)
    if not schemas.typed:
        if text not in (None, EMPTY):
            raise BadValue(f"deletes {text!r} does not go with a topic without a schema", "use empty (usual) or none")
        return Deletes(EMPTY, key)
    fields = {field.name: field for field in schemas.newest if field.name != key}
    if text is None or text == NULLS:
        can = bool(fields) and all(field.nullable for field in fields.values())
        if text == NULLS and not can:
            raise BadValue(f"deletes {text!r}: not all columns but the key {key!r} may be null", _HINT)
        return Deletes(NULLS if can else NONE, key)
    column, equals, value = text.partition("=")
    if column not in fields:
        raise BadValue(f"deletes {text!r}: there is no column {column!r} beside the key", _HINT)
    kind = fields[column].type
    if not equals and not kinds.is_boolean(kind):
        raise BadValue(f"deletes {text!r}: column {column!r} is {kind}, not bool", _HINT)
    if equals and not (value and (kinds.is_integer(kind) or kinds.is_string(kind) or kinds.is_large_string(kind))):
        raise BadValue(f"deletes {text!r}: a column of text or integers and a value are needed, not {kind}", _HINT)
    return Deletes(COLUMN, key, column, value)
