"""Functions to patch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def double(number: int) -> int:
    """Twice a number."""
    return number * 2


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> None:
        """Add a number."""
        self.count += number

    @property
    def negative(self) -> int:
        """The count below zero."""
        return -self.count

    @staticmethod
    def zero() -> int:
        """Do nothing."""
        return 0


@contextmanager
def one() -> Iterator[int]:
    """Return one."""
    yield 1
