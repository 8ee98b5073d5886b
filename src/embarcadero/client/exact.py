"""Whether a Python value survives as a type of Arrow, which would silently cut 1.5 to 1 and a time to its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, time, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

_UNITS_US = {"s": 1_000_000, "ms": 1_000}


def may_lose(kind: pa.DataType) -> bool:
    """Whether values of this type have to be looked at one by one."""
    if kind.num_fields:
        return True
    return bool(kinds.is_integer(kind) or kinds.is_date(kind)) or getattr(kind, "unit", "us") in _UNITS_US


def loses(value: Any, kind: pa.DataType) -> bool:
    """Whether something of a value would be gone. Values of a wrong kind are not judged: Arrow refuses those."""
    if value is None or isinstance(value, str | bytes):
        return False
    if kinds.is_integer(kind):
        return not isinstance(value, int) and hasattr(value, "__int__") and bool(value != int(value))
    if kinds.is_date(kind):
        return isinstance(value, datetime) and value.time() != time()
    if kinds.is_struct(kind):
        return isinstance(value, Mapping) and _loses_fields(value, kind)
    if kinds.is_map(kind):
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        return any(loses(key, kind.key_type) or loses(item, kind.item_type) for key, item in pairs)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return may_lose(kind.value_type) and any(loses(item, kind.value_type) for item in value)
    unit_us = _UNITS_US.get(getattr(kind, "unit", ""), 1)
    return unit_us > 1 and _microseconds(value) % unit_us != 0


def _loses_fields(value: Mapping[Any, Any], kind: pa.DataType) -> bool:
    fields = {kind.field(number).name: kind.field(number).type for number in range(kind.num_fields)}
    return any(name not in fields or loses(item, fields[name]) for name, item in value.items())


def _microseconds(value: Any) -> int:
    if isinstance(value, timedelta):
        return value.microseconds
    return value.microsecond if isinstance(value, datetime | time) else 0
