"""Filters that Spark pushes down: which of them we answer exactly, what part of the log they leave, which rows.

Exact are comparisons with numbers and times of columns that are never null: places, partitions, sessions, times. They
narrow the span that is read where the log can find the place, and rows outside are dropped before they go to Java.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.arguments import time_us
from embarcadero.errors import BadValue

_OPERATIONS: Final = {
    "EqualTo": "equal", "EqualNullSafe": "equal", "GreaterThan": "greater", "GreaterThanOrEqual": "greater_equal",
    "LessThan": "less", "LessThanOrEqual": "less_equal", "In": "in",
}  # fmt: skip
_ALWAYS_TRUE: Final = "IsNotNull"
_NEVER_NULL: Final = frozenset(
    ["_lane", "_index", "_seq", "_partition", "_session", "_session_seq", "_broker", "_append_time", "timestamp"]
)
"""Columns of rows of the log by which is filtered; `timestamp` is one of raw topics only."""
_NUMBER_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison that rows must pass: of the frame's column `name`, which is `inner` in rows of the log."""

    name: str
    inner: str
    operation: str
    values: tuple[int, ...]  # times in microseconds since 1970


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers that a column can have: low <= number < stop; if `only` is given, these and no others."""

    low: int = 0
    stop: int = _NUMBER_MAX
    only: frozenset[int] | None = None

    def narrowed(self, condition: Condition) -> Bounds:
        """What is left with one more condition."""
        value = condition.values[0] if condition.values else 0
        if condition.operation in ("equal", "in"):
            wanted = frozenset(condition.values)
            only = wanted if self.only is None else self.only & wanted
            low, stop = min(only, default=0), max(only, default=-1) + 1
            return Bounds(max(self.low, low), min(self.stop, stop), only)
        if condition.operation in ("greater", "greater_equal"):
            return Bounds(max(self.low, value + (condition.operation == "greater")), self.stop, self.only)
        return Bounds(self.low, min(self.stop, value + (condition.operation == "less_equal")), self.only)


def understood(filters: Iterable[Any], inner_names: dict[str, str], typed: bool) -> tuple[list[Condition], list[Any]]:
    """Filters that we answer, as conditions, and those that are left to Spark."""
    conditions: list[Condition] = []
    left: list[Any] = []
    for each in filters:
        found = _condition(each, inner_names, typed)
        if found is None:
            left.append(each)
        elif found.operation:
            conditions.append(found)
    return conditions, left


def _condition(each: Any, inner_names: dict[str, str], typed: bool) -> Condition | None:
    """One filter; with no operation if it is always true."""
    kind, path = type(each).__name__, list(getattr(each, "attribute", ()))
    name = path[0] if len(path) == 1 else ""
    inner = inner_names.get(name, "")
    if inner not in _NEVER_NULL or (typed and inner == "timestamp"):
        return None
    if kind == _ALWAYS_TRUE:
        return Condition(name, inner, "", ())
    if kind not in _OPERATIONS:
        return None
    values = [value for value in each.value if value is not None] if kind == "In" else [each.value]
    numbers = [_number(value) for value in values]
    if None in numbers:
        return None
    return Condition(name, inner, _OPERATIONS[kind], tuple(number for number in numbers if number is not None))


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, datetime):
        try:
            return time_us(value if value.tzinfo is not None else value.replace(tzinfo=UTC))
        except BadValue:
            return None
    return None


def bounds(conditions: Sequence[Condition], inner: str) -> Bounds:
    """What all conditions together leave of a column."""
    found = Bounds()
    for condition in conditions:
        if condition.inner == inner:
            found = found.narrowed(condition)
    return found


def passing(rows: pa.RecordBatch, conditions: Sequence[Condition]) -> pa.RecordBatch:
    """The rows that pass all conditions; the very same object if all do."""
    mask: Any = None
    for condition in conditions:
        each = _mask(rows.column(condition.name), condition)
        mask = each if mask is None else pc.and_(mask, each)
    return rows if mask is None or mask.true_count == len(mask) else rows.filter(mask)


def _mask(column: pa.Array, condition: Condition) -> Any:
    numbers = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column.cast(pa.int64())
    if condition.operation == "in":
        return pc.is_in(numbers, value_set=pa.array(condition.values, pa.int64()))
    return getattr(pc, condition.operation)(numbers, pa.scalar(condition.values[0], pa.int64()))
