"""P9: every resource has a bound, and a stuck session does not stop the others."""

from __future__ import annotations

from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.history import Died, Fault, Healed, History, Sampled, Sent, Settled, Stuck

ANSWER_US = 3_000_000
"""Limit for another stream's batch while one stream is stuck and there is no other fault."""

CALM_US = 2_000_000
"""Time after the last other fault until the other streams are judged."""


def check(history: History) -> list[Violation]:
    """Return all violations of P9."""
    return [*_bounds(history), *_others_continue(history)]


def _bounds(history: History) -> list[Violation]:
    return [
        Violation("P9", s.at, f"{s.process}: {s.what} is {s.value:g}, its bound is {s.bound:g}")
        for s in history.of(Sampled)
        if s.value > s.bound
    ]


def _others_continue(history: History) -> list[Violation]:
    """While a stream is stuck and there is no other fault, batches of other streams are answered."""
    found: list[Violation] = []
    settled = {(event.process, event.number): event.at for event in history.of(Settled)}
    dead = {event.process for event in history.of(Died)}
    end = history.events[-1].at if history.events else 0
    for stuck in history.of(Stuck):
        if _broken(history, stuck.at, stuck.until):
            continue
        for sent in history.of(Sent):
            judged = stuck.at <= sent.at and sent.at + ANSWER_US <= min(stuck.until, end)
            if not judged or sent.process in dead or _is_stuck(history, sent):
                continue
            if settled.get((sent.process, sent.number), end + 1) > sent.at + ANSWER_US:
                found.append(Violation("P9", sent.at, (
                    f"{stuck.stream} was stuck from {stuck.at} to {stuck.until} us; meanwhile batch {sent.number} of "
                    f"{sent.stream}, sent at {sent.at} us, got no answer for {ANSWER_US} us")))  # fmt: skip
    return found


def _is_stuck(history: History, sent: Sent) -> bool:
    """Whether the batch's own stream had been stuck by then. It lost credit too, so it may take long to recover."""
    return any(stuck.stream == sent.stream and stuck.at < sent.at + ANSWER_US for stuck in history.of(Stuck))


def _broken(history: History, start: int, stop: int) -> bool:
    """Whether there was another fault shortly before or during [start, stop)."""
    if any(fault.at < stop and fault.until + CALM_US > start for fault in history.of(Fault)):
        return True
    return any(start < healed.at < stop for healed in history.of(Healed))
