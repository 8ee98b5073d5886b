"""What a key is: how its value is written, read, checked and shown. Sections are declared with these, in table.py.

Values are written as people write them: `16MiB`, `256 MB`, `30s`, `2h`, `80%`. A plain number is in the key's own unit.
A section is a frozen struct; each field carries a `Rule` in its annotation, and its default is the key's default:

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
    """A value that can't be read: what is wrong, and what would be right."""

    def __init__(self, what: str, right: str) -> None:
        super().__init__(f"{what}: {right}")
        self.what, self.right = what, right


def quantity(text: str, units: Mapping[str, float], own: float, example: str) -> float:
    """A number with one of `units`, in units of `own`; without a unit it is taken as it is."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise BadQuantity(f"{text!r} is no number", f"write one such as {example}")
    number, unit = float(found[1].replace("_", "")), found[2]
    if unit:
        by_lower = {name.lower(): factor for name, factor in units.items()}
        if unit.lower() not in by_lower:
            known = f"use {', '.join(units)}" if units else "it takes a plain number"
            raise BadQuantity(f"{unit!r} is no unit here", f"{known}, such as {example}")
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
"""How people may write a duration, for help texts."""
TIME_FORMS: Final = (
    'write 2026-01-31T12:00:00Z (with Z or +02:00 at the end), or an age such as "10m ago", "2 hours ago", "7d ago"'
)
"""How people may write a time, for hints."""

Duration = float | str | timedelta
"""A duration as callers give it: a number in the parameter's own unit, a text such as `10m`, or a timedelta."""


def duration(given: Duration, own: float = 1.0, example: str = "30s") -> float:
    """Return a duration in units of `own` seconds. A number without a unit already is. Raises BadQuantity.

        duration("1h30m")             # 5400.0
        duration("20ms", own=1e-3)    # 20.0
        duration("PT10M")             # 600.0, ISO 8601
        duration("10 minutes")        # 600.0
    """
    if isinstance(given, timedelta):
        return given.total_seconds() / own
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise BadQuantity(f"{given!r} is no duration", f"write a number, or a text such as {example!r}")
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
    """Numbers with units: `1h30m`, `10 minutes`. Empty if it is anything else."""
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
        raise BadQuantity(f"{text!r} is no time", TIME_FORMS) from None
    if when.tzinfo is None:
        raise BadQuantity(f"{text!r} has no time zone", TIME_FORMS)
    return when


def _age_s(text: str) -> float:
    parts = _iso_parts(text) or _unit_parts(text)
    if not parts:
        raise BadQuantity(f"'{text} ago' is no time", TIME_FORMS)
    return duration(text)


def whole(number: float, text: object, unit: str) -> int:
    """A number that must have no fraction; rounding errors of unit changes are not the user's."""
    if abs(number - round(number)) > 1e-9 * max(1.0, abs(number)):
        raise BadQuantity(f"{text!r} is not whole", f"write whole {unit}" if unit else "write a whole number")
    return round(number)


def yes_or_no(text: str) -> bool:
    """`true` or `false`, and the usual other words for them."""
    lower = text.strip().lower()
    if lower in {"true", "yes", "on", "1"}:
        return True
    if lower in {"false", "no", "off", "0"}:
        return False
    raise BadQuantity(f"{text!r} is neither true nor false", "write true or false")


def absolute(text: str) -> str:
    """A path from the root on, without space around it; `~` is the user's home. Nothing stays nothing."""
    text = text.strip()
    try:
        found = str(Path(text).expanduser().absolute()) if text else ""
        return found if found == found.strip() else absolute(found)  # a name that ends in space, before a last slash
    except RuntimeError:
        raise BadQuantity(f"{text!r} begins with the home of nobody", "write ~/ for your own") from None


def show_bytes(value: int) -> str:
    """Bytes in the largest unit that fits evenly: `16 MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % BYTES[unit] == 0:
            return f"{value // BYTES[unit]} {unit}"
    return f"{value} B"


# --- keys -------------------------------------------------------------------------------------------------------------
Value = str | int | float | bool | list[str]

PREFIX: Final = "EMBARCADERO_"


class Kind(Enum):
    """How a value is written."""

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
    """All about a key but its name and default."""

    kind: Kind
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    numbers: tuple[tuple[str, int], ...] = ()  # choices of a number that are words, and what they stand for
    power_of_two: bool = False
    fixed: str = ""  # why it can't be changed; empty for keys that can be set
    variable: str = ""  # a second, shorter environment variable
    secret: bool = False  # values are masked wherever they are shown, and kept in a file of their own
    default_text: str = ""  # where the default is more than a value
    stands_for: tuple[str, ...] = ()  # names that the first designs gave it


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    section: str
    name: str
    rule: Rule
    default: Any
    integral: bool

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variables(self) -> list[str]:
        """Its environment variables; the first wins."""
        own = f"{PREFIX}{self.section}_{self.name}".upper()
        return [own, self.rule.variable] if self.rule.variable else [own]

    @property
    def unit(self) -> str:
        """The unit of a plain number."""
        return {Kind.SIZE: "bytes", Kind.SECONDS: "s", Kind.MILLISECONDS: "ms"}.get(self.rule.kind, "")

    @property
    def range(self) -> str:
        """What is allowed, in words."""
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
        """A value as people read it; reading it again gives the same value."""
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
        """The value that a text stands for. Raises BadQuantity."""
        if isinstance(text, list):
            if self.rule.kind is not Kind.LIST:
                raise BadQuantity("is a list", "write a single value")
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
        if not text and self.default == "":  # none is chosen: `default_text` says what that means
            return text
        if text.lower() not in self.rule.choices:
            raise BadQuantity(f"{text!r} does not exist", f"use {' or '.join(self.rule.choices)}")
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
            raise BadQuantity(f"{text!r} can't be set", f"it is {self._number(self.default)}: {rule.fixed}")
        if rule.least is not None and rule.most is not None and not rule.least <= value <= rule.most:
            raise BadQuantity(f"{self._number(value)} is out of range", f"use {self.range}")
        if rule.power_of_two and int(value) & (int(value) - 1):
            below = 1 << (int(value).bit_length() - 1)
            near = f"{self._number(below)} or {self._number(2 * below)}"
            raise BadQuantity(f"{text!r} is no power of two", f"it must be a power of two: use {near}")
        return value


# --- rules, by what they are for ---
def size(meaning: str, least: int, most: int, **more: Any) -> Rule:
    """Bytes."""
    return Rule(kind=Kind.SIZE, meaning=meaning, least=least, most=most, **more)


def count(meaning: str, least: int, most: int, **more: Any) -> Rule:
    """A whole number."""
    return Rule(kind=Kind.COUNT, meaning=meaning, least=least, most=most, **more)


def seconds(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """A time for people and networks."""
    return Rule(kind=Kind.SECONDS, meaning=meaning, least=least, most=most, **more)


def milliseconds(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """A short time."""
    return Rule(kind=Kind.MILLISECONDS, meaning=meaning, least=least, most=most, **more)


def share(meaning: str, least: float, most: float, **more: Any) -> Rule:
    """A part of a whole, 0 to 1."""
    return Rule(kind=Kind.SHARE, meaning=meaning, least=least, most=most, **more)


def text(meaning: str, **more: Any) -> Rule:
    """Any text."""
    return Rule(kind=Kind.TEXT, meaning=meaning, **more)


def path(meaning: str, **more: Any) -> Rule:
    """A file or folder; in a file, relative to that file's folder."""
    return Rule(kind=Kind.PATH, meaning=meaning, **more)


def flag(meaning: str, **more: Any) -> Rule:
    """true or false."""
    return Rule(kind=Kind.FLAG, meaning=meaning, **more)


def choice(meaning: str, *choices: str, **more: Any) -> Rule:
    """One of a few words."""
    return Rule(kind=Kind.CHOICE, meaning=meaning, choices=choices, **more)


def several(meaning: str, **more: Any) -> Rule:
    """Texts, with commas or as a list."""
    return Rule(kind=Kind.LIST, meaning=meaning, **more)
