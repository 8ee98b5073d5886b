"""The result of one trial: values and curves by name, and reasons for missing values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Announce = Callable[[str], None]
"""Reports the current step of a measurement."""


@dataclass(slots=True)
class Trial:
    """One pass over all rows."""

    number: int = 0
    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)  # name: [x values, y values]
    missing: dict[str, str] = field(default_factory=dict)  # row: the reason why it has no value
    failed: dict[str, str] = field(default_factory=dict)  # family: the error

    def as_dict(self) -> dict[str, Any]:
        """Return the trial for the report."""
        return asdict(self)

    def turned(self, things: Sequence[Any]) -> list[Any]:
        """Return the same things, beginning with another one in each trial, so that none is always first."""
        first = self.number % len(things)
        return [*things[first:], *things[:first]]


def summary(trials: list[Trial], key: str) -> dict[str, float] | None:
    """Return median and range of one row over all trials that have it."""
    values = [trial.values[key] for trial in trials if key in trial.values]
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
