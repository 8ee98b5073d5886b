"""Times as people write them: ISO with a time zone, or so long ago."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from embarcadero.errors import BadValue

_AGO = re.compile(r"(\d{1,9})\s*(ms|s|m|h|d)\s+ago", re.ASCII)
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_HINT = "write 2026-01-31T12:00:00Z (with Z or +02:00 at the end), or 500ms, 30s, 10m, 2h, 7d ago"


def parse_time(text: str) -> datetime:
    """A time such as `2026-01-31T12:00:00Z` or `10m ago`."""
    if ago := _AGO.fullmatch(text.strip()):
        try:
            return datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])})
        except OverflowError:
            raise BadValue(f"{text!r} is too long ago", _HINT) from None
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadValue(f"{text!r} is no time", _HINT) from None
    if when.tzinfo is None:
        raise BadValue(f"{text!r} has no time zone", _HINT)
    return when
