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
from enum import Enum
from pathlib import Path
from typing import Any, Final

BYTES: Final = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
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


def whole(number: float, text: str, unit: str) -> int:
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
        units: dict[Kind, tuple[dict[str, float], float, str]] = {
            Kind.SIZE: (dict(BYTES), 1, "16MiB"),
            Kind.SECONDS: (SECONDS, 1, "30s"),
            Kind.MILLISECONDS: (SECONDS, 1e-3, "5ms"),
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
