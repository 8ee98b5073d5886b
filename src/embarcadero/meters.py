"""Histograms that cost next to nothing: plain counts between fixed bounds, read when somebody scrapes."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LATENCY_US: Final = (
    50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000,
)  # fmt: skip
"""Bounds of times, in microseconds."""

COUNTS: Final = tuple(1 << power for power in range(15))
"""Bounds of sizes: powers of two up to the largest round."""

_FEW: Final = 8


class Histogram:
    """How many observations were at or below each bound; `counts` has one more place, for those above all."""

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds, self._bounds = bounds, np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int, times: int = 1) -> None:
        """One observation, or several alike."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_many(self, values: npt.NDArray[Any]) -> None:
        """Many at once."""
        if len(values) <= _FEW:
            for value in values.tolist():
                self.add(value)
            return
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.counts))
        self.counts = [mine + more for mine, more in zip(self.counts, found.tolist(), strict=True)]
        self.total += int(values.sum())
