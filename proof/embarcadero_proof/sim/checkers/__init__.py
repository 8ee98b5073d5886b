"""One file per promise: a pure function from a history to the list of its violations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from embarcadero_proof.sim.checkers import p1, p2, p3, p4, p5, p6, p7, p8, p9
from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.history import History

CHECKERS: Final[dict[str, Callable[[History], list[Violation]]]] = {
    "P1": p1.check,
    "P2": p2.check,
    "P3": p3.check,
    "P4": p4.check,
    "P5": p5.check,
    "P6": p6.check,
    "P7": p7.check,
    "P8": p8.check,
    "P9": p9.check,
}


def check_all(history: History) -> list[Violation]:
    """Return all violations, in the order of the promises."""
    return [violation for check in CHECKERS.values() for violation in check(history)]
