"""Planted bugs: each name disables one rule, so that tests can show that their checkers notice. Empty in production."""

from __future__ import annotations

ACTIVE: set[str] = set()


def planted(name: str) -> bool:
    """Whether this bug is planted now."""
    return name in ACTIVE
