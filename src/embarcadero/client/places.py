"""Places in a log as callers name them: a seq, an index, a time, "earliest", "latest". What is none is refused here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from embarcadero.errors import BadValue

Place = str | int | datetime
"""Where a reader starts."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def place(start: Place) -> tuple[str, int]:
    """Where to read from: "earliest", "latest", the seq of a record, or an append time."""
    if isinstance(start, datetime):
        return "time", time_us(start)
    if isinstance(start, str):
        if start not in ("earliest", "latest"):
            hint = 'use "earliest", "latest", the seq of a record, or a datetime with a time zone'
            raise BadValue(f"{start!r} is no place in a log", hint)
        return start, 0
    return "seq", _number("seq", start)


def seek_place(where: str | None, seq: int | None, index: int | None, time: datetime | None) -> tuple[str, int]:
    """Where to seek: exactly one of the four."""
    if [where, seq, index, time].count(None) != 3:
        hint = 'use seek("earliest"), seek("latest"), seek(seq=...), seek(index=...) or seek(time=...)'
        raise BadValue("seek to one place", hint)
    if index is not None:
        return "index", _number("index", index)
    if time is not None:
        return "time", time_us(time)
    return place(seq if where is None and seq is not None else where or "")


def trim_place(seq: int | None, index: int | None, time: datetime | None) -> tuple[str, int]:
    """What to trim before: exactly one of the three."""
    if [seq, index, time].count(None) != 2:
        raise BadValue("trim before one place", "use before_seq=..., before_index=... or before_time=...")
    return seek_place(None, seq, index, time)


def time_us(when: Any) -> int:
    """Microseconds since 1970 of a datetime with a time zone."""
    if not isinstance(when, datetime):
        raise BadValue(f"{when!r} is no time", "use a datetime with a time zone: datetime.now(UTC)")
    if when.tzinfo is None or when.utcoffset() is None:
        raise BadValue(
            f"{when.isoformat()} has no time zone",
            "use datetime.now(UTC), or .replace(tzinfo=UTC) if it is in UTC, or .astimezone() if it is local time",
        )
    if when < _EPOCH:
        raise BadValue(f"{when.isoformat()} is before 1970", 'use a time from 1970 on, or "earliest"')
    return (when - _EPOCH) // _MICROSECOND


def _number(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise BadValue(f"{what} {value!r} is no place in a log", f"use a {what} from 0 on")
    return value
