"""Durations and times as people write them: one parser for the configuration, the command line and the client."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.client.arguments import (
    PublisherOptions,
    checked_changes,
    in_unit,
    patience_s,
    publisher_options,
    start_lookup,
    time_us,
    timeout_s,
    trim_lookup,
    whole_in_unit,
)
from embarcadero.config import DEFAULTS
from embarcadero.config.key import SECONDS, BadQuantity, duration, moment
from embarcadero.config.table import KEYS
from embarcadero.errors import BadValue

NOW = datetime(2026, 11, 19, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("7d", 604_800),
        ("10m", 600),
        ("10min", 600),
        ("2 weeks", 1_209_600),
        ("1h30m", 5_400),
        ("1 hour 30 minutes", 5_400),
        ("10 minutes", 600),
        ("1 day", 86_400),
        ("PT10M", 600),
        ("P7D", 604_800),
        ("P1DT2H", 93_600),
        ("P2W", 1_209_600),
        ("PT0.5S", 0.5),
        ("250ms", 0.25),
        ("2H", 7_200),
        ("30", 30),
        (30, 30),
        (0.5, 0.5),
        (timedelta(minutes=2), 120),
    ],
)
def test_a_duration_is_read_in_any_form(given: Any, seconds: float) -> None:
    """Units, words, ISO 8601, timedelta; a plain number is in the unit of its place."""
    assert duration(given) == pytest.approx(seconds)
    assert in_unit("linger_ms", given, 1e-3) == pytest.approx(
        seconds if given in ("30", 30, 0.5) else seconds * 1_000
    )


@given(st.sampled_from(sorted(SECONDS)), st.integers(0, 10**6))
def test_parts_of_a_duration_add_up(unit: str, number: int) -> None:
    """One unit after the other, with and without spaces."""
    assert duration(f"{number}{unit}") == pytest.approx(number * SECONDS[unit])
    assert duration(f"{number} {unit} {number}s") == pytest.approx(number * SECONDS[unit] + number)


@pytest.mark.parametrize("wrong", ["", "P", "PT", "PDT", "many", "5 parsecs", "1h 5", "ms", "10m ago", True, None, [5]])
def test_anything_else_is_no_duration(wrong: Any) -> None:
    """The error shows a form that works."""
    with pytest.raises(BadQuantity, match="30s"):
        duration(wrong)
    with pytest.raises(BadValue, match="linger_ms"):
        in_unit("linger_ms", wrong, 1e-3)


@given(st.text(max_size=30))
def test_any_text_is_a_duration_and_a_time_or_a_problem(text: str) -> None:
    """No text makes reading fail in another way."""
    for read in (duration, moment):
        with contextlib.suppress(BadQuantity):
            read(text)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("10m ago", NOW - timedelta(minutes=10)),
        ("10 minutes ago", NOW - timedelta(minutes=10)),
        ("1h30m ago", NOW - timedelta(minutes=90)),
        ("2 Hours Ago", NOW - timedelta(hours=2)),
        ("P1D ago", NOW - timedelta(days=1)),
        ("500 ms ago", NOW - timedelta(milliseconds=500)),
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00:00+02:00", datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=2)))),
    ],
)
def test_a_time_is_an_age_or_iso_8601(text: str, when: datetime) -> None:
    """With a time zone, always."""
    assert moment(text, NOW) == when


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yesterday", "is not a time"),
        ("5 ago", "is not a time"),
        ("10 parsecs ago", "is not a time"),
        ("2026-01-31T12:00:00", "has no time zone"),
        ("999999999999d ago", "is too long ago"),
        ("10m", "a duration, not a time: write \"10m ago\""),
        ("PT10M", "write \"PT10M ago\""),
    ],
)
def test_anything_else_is_no_time(text: str, message: str) -> None:
    """The hint names the forms that exist."""
    with pytest.raises(BadQuantity, match=message):
        moment(text)
    with pytest.raises(BadValue):
        time_us(text)


def test_keys_of_the_configuration_take_them() -> None:
    """In seconds and in milliseconds."""
    assert KEYS["topic.retention_s"].read("7 days") == 604_800
    assert KEYS["topic.session_ttl_s"].read("P1D") == 86_400
    assert KEYS["topic.gap_timeout_fence_ms"].read("1m") == 60_000
    assert KEYS["client.linger_ms"].read("0.5ms") == 0.5


def test_keywords_of_the_client_take_them() -> None:
    """Old forms keep working."""
    changed = checked_changes({"retention_s": "7d", "gap_timeout_ms": timedelta(seconds=2), "session_ttl_s": 60})
    assert changed == {"retention_s": 604_800, "gap_timeout_ms": 2_000, "session_ttl_s": 60}
    chosen = publisher_options(DEFAULTS.client, {"linger_ms": "1s", "delivery_timeout": "2m"})
    assert (chosen.linger_ms, chosen.delivery_timeout) == (1_000, 120)
    assert publisher_options(DEFAULTS.client, {}) == PublisherOptions()
    assert (timeout_s("2m"), timeout_s(1.5), timeout_s(None)) == (120, 1.5, None)
    assert patience_s("500ms", 30) == 0.5
    for wrong in ("soon", "-1s", -1, True):
        with pytest.raises(BadValue, match='"10s"'):
            timeout_s(wrong)
    with pytest.raises(BadValue, match=r"retention_s: '1\.5' is not a whole number"):
        whole_in_unit("retention_s", "1.5", 1.0)


def test_positions_by_time_may_be_text() -> None:
    """Wherever a datetime is taken."""
    for text in ("10 minutes ago", "2026-01-31T12:00:00Z"):
        assert start_lookup(text).by == "time"
        assert trim_lookup(None, None, text).by == "time"
    assert start_lookup("earliest") == ("earliest", 0)
    with pytest.raises(BadValue, match=r"yesterday.*earliest.*datetime.*ago"):
        start_lookup("yesterday")
