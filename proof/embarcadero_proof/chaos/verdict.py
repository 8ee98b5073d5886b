"""From a history to a verdict: the result of each promise's checker, and whether there was enough load to judge."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from embarcadero_proof.sim.checkers import CHECKERS
from embarcadero_proof.sim.history import Delivered, Fault, Healed, History, Sent, Settled, Verdict

PROMISES: Final = ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8")
"""Promises that can be checked from outside of a real cluster."""

ACKS_LEAST: Final = 100
"""Fewer acked batches than this during faults prove nothing."""

_SHOWN_MAX: Final = 20


@dataclass(slots=True)
class Judgement:
    """The findings about a history."""

    promises: dict[str, int] = field(default_factory=dict)  # promise -> violations
    problems: list[str] = field(default_factory=list)
    sent: int = 0
    acked: int = 0
    acked_in_trouble: int = 0
    unknown: int = 0
    failed: int = 0
    delivered: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether all promises were kept, under enough load."""
        return not self.problems


def judge(history: History, acks_least: int = ACKS_LEAST) -> Judgement:
    """Check a history against all promises that can be checked from outside."""
    ends = Counter(event.verdict for event in history.of(Settled))
    judgement = Judgement(
        sent=len(history.of(Sent)), acked=ends[Verdict.STORED], unknown=ends[Verdict.UNKNOWN],
        failed=ends[Verdict.FAILED], acked_in_trouble=acked_in_trouble(history),
        delivered=len(history.of(Delivered)), faults=dict(Counter(fault.kind for fault in history.of(Fault))),
    )  # fmt: skip
    for promise in PROMISES:
        violations = CHECKERS[promise](history)
        judgement.promises[promise] = len(violations)
        judgement.problems += [f"{v.promise} at {v.at / 1e6:.3f} s: {v.sentence}" for v in violations[:_SHOWN_MAX]]
    if judgement.acked_in_trouble < acks_least:
        judgement.problems.append(
            f"only {judgement.acked_in_trouble} batches were acked during faults, so the case proves nothing"
        )
    return judgement


def acked_in_trouble(history: History) -> int:
    """Count the batches acked from the first fault (or ack, if there is none) until everything was healed."""
    began = min((fault.at for fault in history.of(Fault)), default=0)
    healed = max((event.at for event in history.of(Healed)), default=None)
    return sum(
        event.verdict is Verdict.STORED and began <= event.at and (healed is None or event.at <= healed)
        for event in history.of(Settled)
    )
