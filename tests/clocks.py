"""Clocks for tests."""

from __future__ import annotations


class ManualClock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.us = 1_000_000

    def now_us(self) -> int:
        return self.us

    def wall_us(self) -> int:
        return 1_700_000_000_000_000 + self.us
