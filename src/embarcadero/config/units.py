"""Values as people write them: `16MiB`, `256 MB`, `30s`, `2h`, `80%`. A plain number is in the key's own unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

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
