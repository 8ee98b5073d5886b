"""Invariants that are always on: `python -O` strips `assert`, so the system does not use it."""

from __future__ import annotations


class InvariantBroken(AssertionError):
    """A bug in Embarcadero itself. Please report it with the message and the traceback."""


def invariant(holds: bool | object, message: str) -> None:
    """Stop at once when something that must always hold does not."""
    if not holds:
        raise InvariantBroken(message)
