"""Keys: how their values are written, read, checked and shown. table.py declares the sections with these functions.

Values are written as `16MiB`, `256 MB`, `30s`, `2h` or `80%`. A plain number is in the key's own unit. A section is a
frozen struct. Each field has a `Rule` in its annotation, and its default is the key's default:

    credit_bytes: Annotated[int, size("Bytes that ...", 64 * KIB, GIB)] = limits.CREDIT_BYTES
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final

BYTES: Final = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3.6e3, "d": 86.4e3, "w": 604.8e3}
PERCENT: Final = {"%": 0.01}

_QUANTITY = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*([^\s\d]*)", re.ASCII)


class BadQuantity(ValueError):
    """A value is not valid. `what` states the problem, `right` states what is valid."""

    def __init__(self, what: str, right: str) -> None:
        super().__init__(f"{what}: {right}")
        self.what, self.right = what, right


def quantity(text: str, units: Mapping[str, float], own: float, example: str) -> float:
    """Parse a number with one of `units`, and convert it to `own`. Without a unit it is in `own` already."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise BadQuantity(f"{text!r} is not a number", f"write a number such as {example}")
    number, unit = float(found[1].replace("_", "")), found[2]
    if unit:
        by_lower = {name.lower(): factor for name, factor in units.items()}
        if unit.lower() not in by_lower:
            known = f"use {', '.join(units)}" if units else "write a plain number"
            raise BadQuantity(f"{unit!r} is not a valid unit", f"{known}, such as {example}")
        number = number * by_lower[unit.lower()] / own
    if not math.isfinite(number):
        raise BadQuantity(f"{text!r} is too large", f"write a number such as {example}")
    return number


# --- durations and times ----------------------------------------------------------------------------------------------
_WORDS: Final = {"microsecond": "us", "millisecond": "ms", "second": "s", "minute": "m", "hour": "h"} | {
    "day": "d",
    "week": "w",
}
_NUMBER: Final = r"(\d[\d_]*(?:\.\d+)?)"
_PART: Final = re.compile(rf"{_NUMBER}\s*([a-z]+)\s*", re.ASCII | re.IGNORECASE)
_ISO: Final = re.compile(
    rf"P(?:{_NUMBER}W)?(?:{_NUMBER}D)?(?:T(?=\d)(?:{_NUMBER}H)?(?:{_NUMBER}M)?(?:{_NUMBER}S)?)?",
    re.ASCII | re.IGNORECASE,
)
_ISO_UNITS: Final = ("w", "d", "h", "m", "s")
_AGO: Final = re.compile(r"(.*\S)\s+ago", re.IGNORECASE)

DURATION_FORMS: Final = "30s, 10m, 2h, 7d, 1h30m, 10 minutes, or ISO 8601 (PT10M)"
"""The forms of a duration, for help texts."""
TIME_FORMS: Final = (
    'write 2026-01-31T12:00:00Z (with Z or +02:00 at the end), or an age such as "10m ago", "2 hours ago", "7d ago"'
)
"""The forms of a time, for hints."""

Duration = float | str | timedelta
"""A duration as callers give it: a number in the parameter's own unit, a text such as `10m`, or a timedelta."""


def duration(given: Duration, own: float = 1.0, example: str = "30s") -> float:
    """Return a duration in units of `own` seconds. A plain number is in this unit already. Raises BadQuantity.

        duration("1h30m")             # 5400.0
        duration("20ms", own=1e-3)    # 20.0
        duration("PT10M")             # 600.0, ISO 8601
        duration("10 minutes")        # 600.0
    """
    if isinstance(given, timedelta):
        return given.total_seconds() / own
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise BadQuantity(f"{given!r} is not a duration", f"write a number, or a text such as {example!r}")
    if not isinstance(given, str):
        return given
    parts = _iso_parts(given.strip()) or _unit_parts(given.strip())
    if not parts:
        return quantity(given, SECONDS, own, example)
    total = sum(float(number.replace("_", "")) * SECONDS[unit] for number, unit in parts) / own
    if not math.isfinite(total):
        raise BadQuantity(f"{given!r} is too large", f"write a number such as {example}")
    return total


def _iso_parts(text: str) -> list[tuple[str, str]]:
    found = _ISO.fullmatch(text)
    return [] if found is None else [(n, unit) for n, unit in zip(found.groups(), _ISO_UNITS, strict=True) if n]


def _unit_parts(text: str) -> list[tuple[str, str]]:
    """Parse numbers with units: `1h30m`, `10 minutes`. Empty for any other text."""
    found, at = [], 0
    for part in _PART.finditer(text):
        unit = part[2].lower()
        unit = unit if unit in SECONDS else _WORDS.get(unit.removesuffix("s"), "")
        if part.start() != at or not unit:
            return []
        found.append((part[1], unit))
        at = part.end()
    return found if at == len(text) else []


def moment(text: str, now: datetime | None = None) -> datetime:
    """Return the time that a text stands for: ISO 8601 with a time zone, or an age. Raises BadQuantity.

        moment("2026-01-31T12:00:00Z")
        moment("10 minutes ago")
    """
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        try:
            return (now or datetime.now(UTC)) - timedelta(seconds=_age_s(ago[1]))
        except OverflowError:
            raise BadQuantity(f"{text!r} is too long ago", TIME_FORMS) from None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        if _unit_parts(text) or _iso_parts(text):
            raise BadQuantity(f"{text!r} is a duration, not a time", f'write "{text} ago"') from None
        raise BadQuantity(f"{text!r} is not a time", TIME_FORMS) from None
    if when.tzinfo is None:
        raise BadQuantity(f"{text!r} has no time zone", TIME_FORMS)
    return when


def _age_s(text: str) -> float:
    parts = _iso_parts(text) or _unit_parts(text)
    if not parts:
        raise BadQuantity(f"'{text} ago' is not a time", TIME_FORMS)
    return duration(text)


def whole(number: float, text: object, unit: str) -> int:
    """Check that a number has no fraction. Rounding errors of unit conversions are ignored."""
    if abs(number - round(number)) > 1e-9 * max(1.0, abs(number)):
        right = f"write a whole number of {unit}" if unit else "write a whole number"
        raise BadQuantity(f"{text!r} is not a whole number", right)
    return round(number)


def yes_or_no(text: str) -> bool:
    """Parse `true` or `false`, or the usual other words for them."""
    lower = text.strip().lower()
    if lower in {"true", "yes", "on", "1"}:
        return True
    if lower in {"false", "no", "off", "0"}:
        return False
    raise BadQuantity(f"{text!r} is neither true nor false", "write true or false")


def absolute(text: str) -> str:
    """Make a path absolute, without surrounding space. `~` is the user's home. An empty text stays empty."""
    text = text.strip()
    try:
        found = str(Path(text).expanduser().absolute()) if text else ""
        return found if found == found.strip() else absolute(found)  # a name that ends in space, before a last slash
    except RuntimeError:
        raise BadQuantity(f"{text!r} begins with the home of an unknown user", "write ~/ for your own home") from None


def show_bytes(value: int) -> str:
    """Show bytes in the largest unit without a fraction: `16 MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % BYTES[unit] == 0:
            return f"{value // BYTES[unit]} {unit}"
    return f"{value} B"


# --- keys -------------------------------------------------------------------------------------------------------------
Value = str | int | float | bool | list[str]

PREFIX: Final = "EMBARCADERO_"


class Kind(Enum):
    """The kind of a value."""

    TEXT = "text"
    PATH = "path"
    FLAG = "true or false"
    COUNT = "number"
    SIZE = "bytes"
    SECONDS = "s"
    MILLISECONDS = "ms"
    SHARE = "share"
    CHOICE = "one of"
    LIST = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The facts of a key, except its name and default."""

    kind: Kind
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    numbers: tuple[tuple[str, int], ...] = ()  # choices that are words for numbers
    power_of_two: bool = False
    fixed: str = ""  # why it cannot be changed; empty for keys that can be set
    variable: str = ""  # a second, shorter environment variable
    secret: bool = False  # values are masked in all output, and kept in a separate file
    default_text: str = ""  # describes a default that is not a plain value
    stands_for: tuple[str, ...] = ()  # its names in the first designs


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration."""

    section: str
    name: str
    rule: Rule
    default: Any
    integral: bool

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variables(self) -> list[str]:
        """Its environment variables. The first one takes precedence."""
        own = f"{PREFIX}{self.section}_{self.name}".upper()
        return [own, self.rule.variable] if self.rule.variable else [own]

    @property
    def unit(self) -> str:
        """The unit of a plain number."""
        return {Kind.SIZE: "bytes", Kind.SECONDS: "s", Kind.MILLISECONDS: "ms"}.get(self.rule.kind, "")

    @property
    def range(self) -> str:
        """The allowed values, for people."""
        rule = self.rule
        if rule.fixed:
            return "fixed"
        if rule.choices:
            return ", ".join(rule.choices)
        if rule.kind is Kind.FLAG:
            return "true, false"
        if rule.least is None or rule.most is None:
            return ""
        two = ", a power of two" if rule.power_of_two else ""
        return f"{self._number(rule.least)} to {self._number(rule.most)}{two}"

    def show(self, value: Any) -> str:
        """Show a value for people. `read` of the result returns the same value."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ", ".join(value)
        return value if isinstance(value, str) else self._number(value)

    def _number(self, value: float) -> str:
        if self.rule.kind is Kind.SIZE:
            return show_bytes(int(value))
        text = f"{value:.12g}" if abs(value) < 1e12 else str(int(value))
        return f"{text} {self.unit}".strip()

    # reading
    def read(self, text: str | list[str]) -> Value:
        """Parse and check a value. Raises BadQuantity."""
        if isinstance(text, list):
            if self.rule.kind is not Kind.LIST:
                raise BadQuantity("is a list, not a single value", "write a single value")
            return [part.strip() for part in text]
        match self.rule.kind:
            case Kind.TEXT:
                return text.strip()
            case Kind.PATH:
                return absolute(text)
            case Kind.LIST:
                return [part.strip() for part in text.split(",") if part.strip()]
            case Kind.FLAG:
                return yes_or_no(text)
            case Kind.CHOICE:
                return self._choice(text.strip())
        return self._checked(text)

    def _choice(self, text: str) -> str | int:
        if not text and self.default == "":  # no choice: `default_text` describes the default
            return text
        if text.lower() not in self.rule.choices:
            raise BadQuantity(f"{text!r} is not a choice of this key", f"use {' or '.join(self.rule.choices)}")
        number = dict(self.rule.numbers).get(text.lower(), text)
        return int(number) if self.integral else text.lower()

    def _checked(self, text: str) -> int | float:
        rule = self.rule
        if rule.kind in (Kind.SECONDS, Kind.MILLISECONDS):
            number = duration(text, *((1.0, "30s") if rule.kind is Kind.SECONDS else (1e-3, "5ms")))
        else:
            units: dict[Kind, tuple[dict[str, float], float, str]] = {
                Kind.SIZE: (dict(BYTES), 1, "16MiB"),
                Kind.SHARE: (PERCENT, 1, "0.8 or 80%"),
            }
            number = quantity(text, *units.get(rule.kind, ({}, 1, str(self.default))))
        value = whole(number, text, self.unit) if self.integral else number
        if rule.fixed and value != self.default:
            right = f"it is always {self._number(self.default)}: {rule.fixed}"
            raise BadQuantity(f"the value {text!r} cannot be set", right)
        if rule.least is not None and rule.most is not None and not rule.least <= value <= rule.most:
            raise BadQuantity(f"{self._number(value)} is out of range", f"use {self.range}")
        if rule.power_of_two and int(value) & (int(value) - 1):
            below = 1 << (int(value).bit_length() - 1)
            near = f"{self._number(below)} or {self._number(2 * below)}"
            raise BadQuantity(f"{text!r} is not a power of two", f"use {near}")
        return value


# --- rules, by kind ---
def size(meaning: str, least: int, most: int, **more: Any) -> Rule:
    """Declare a number of bytes."""
    return Rule(kind=Kind.SIZE, meaning=meaning, least=least, most=most, **more)


def count(meaning: str, least: int, most: int, **more: Any) -> Rule:
    """Declare a whole number."""
    return Rule(kind=Kind.COUNT, meaning=meaning, least=least, most=most, **more)


def seconds(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """Declare a time in seconds."""
    return Rule(kind=Kind.SECONDS, meaning=meaning, least=least, most=most, **more)


def milliseconds(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """Declare a time in milliseconds."""
    return Rule(kind=Kind.MILLISECONDS, meaning=meaning, least=least, most=most, **more)


def share(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """Declare a share, 0 to 1."""
    return Rule(kind=Kind.SHARE, meaning=meaning, least=least, most=most, **more)


def text(meaning: str, **more: Any) -> Rule:
    """Declare a text."""
    return Rule(kind=Kind.TEXT, meaning=meaning, **more)


def path(meaning: str, **more: Any) -> Rule:
    """Declare a file or folder. In a configuration file it is relative to that file's folder."""
    return Rule(kind=Kind.PATH, meaning=meaning, **more)


def flag(meaning: str, **more: Any) -> Rule:
    """Declare a flag: true or false."""
    return Rule(kind=Kind.FLAG, meaning=meaning, **more)


def choice(meaning: str, *choices: str, **more: Any) -> Rule:
    """Declare a choice of words."""
    return Rule(kind=Kind.CHOICE, meaning=meaning, choices=choices, **more)


def several(meaning: str, **more: Any) -> Rule:
    """Declare a list of texts. They are written with commas or as a list."""
    return Rule(kind=Kind.LIST, meaning=meaning, **more)
