"""P8: every call ends, and once nothing is broken any more readers reach the end of the log."""

from __future__ import annotations

from collections import Counter

from embarcadero.sim.checkers.ledger import Violation
from embarcadero.sim.history import (
    Answered,
    Asked,
    Began,
    Delivered,
    Died,
    Ended,
    GapSeen,
    Healed,
    History,
    LostSpan,
    Moved,
    Passed,
    RoleFailed,
    Sent,
    Settled,
    TailRead,
    Verdict,
)


def check(history: History) -> list[Violation]:
    """All violations of P8."""
    found = [Violation("P8", f.at, f"{f.process} failed: {f.error}") for f in history.of(RoleFailed)]
    found += _settled_once(history)
    if history.of(Ended):
        end = history.of(Ended)[-1].at
        dead = {death.process for death in history.of(Died)}
        for ends in (_publishes_end, _calls_end, _readers_arrive):
            found += ends(history, dead, end)
        found += _newcomers_succeed(history, dead)
    return found


def _settled_once(history: History) -> list[Violation]:
    """A call has one end."""
    found: list[Violation] = []
    seen: dict[tuple[str, int], Settled] = {}
    for event in history.of(Settled):
        other = seen.setdefault((event.process, event.number), event)
        if other is not event:
            found.append(Violation("P8", event.at, (
                f"{event.process} was told twice what became of batch {event.number}: {other.verdict.value}, then "
                f"{event.verdict.value}")))  # fmt: skip
    return found


def _publishes_end(history: History, dead: set[str], end: int) -> list[Violation]:
    settled = {(event.process, event.number) for event in history.of(Settled)}
    return [
        Violation("P8", end, f"{sent.process} never learnt what became of batch {sent.number}, sent at {sent.at} us")
        for sent in history.of(Sent)
        if sent.process not in dead and (sent.process, sent.number) not in settled
    ]


def _calls_end(history: History, dead: set[str], end: int) -> list[Violation]:
    answered = {(event.process, event.call, event.number) for event in history.of(Answered)}
    return [
        Violation("P8", end, f"{asked.process} got no answer to {asked.call} {asked.number}, asked at {asked.at} us")
        for asked in history.of(Asked)
        if asked.process not in dead and (asked.process, asked.call, asked.number) not in answered
    ]


def _newcomers_succeed(history: History, dead: set[str]) -> list[Violation]:
    """Of a stream that begins when nothing is broken any more all is stored, but for what a gap cost it.

    With several processes one may fence the other, so those streams are left out.
    """
    if not history.of(Healed):
        return []
    healed_us = history.of(Healed)[-1].at
    processes = Counter(began.stream for began in history.of(Began))
    new = {began.stream for began in history.of(Began) if began.at > healed_us and processes[began.stream] == 1}
    return [
        Violation("P8", s.at, f"all is well, yet batch {s.number} of {s.process} ended as {s.verdict} ({s.error})")
        for s in history.of(Settled)
        if s.stream in new and s.process not in dead and s.verdict is not Verdict.STORED and s.error != "Lost"
    ]


def _readers_arrive(history: History, dead: set[str], end: int) -> list[Violation]:
    """Each living reader is at or beyond the last tail that anyone was told, as far as it was not lost since."""
    tails: dict[int, int] = {}
    for tail in history.of(TailRead):
        lost = [s.start for s in history.of(LostSpan) if s.lane == tail.lane and s.start < tail.index < s.stop]
        tails[tail.lane] = max(min([tail.index, *lost]), tails.get(tail.lane, 0))
    place: dict[tuple[str, int], int] = {}
    for event in history:
        if isinstance(event, Moved):
            place[event.reader, event.lane] = event.index or 0
        elif isinstance(event, Delivered):
            place[event.reader, event.lane] = event.index + 1
        elif isinstance(event, Passed):
            place[event.reader, event.lane] = event.index
        elif isinstance(event, GapSeen) and event.session is None:
            place[event.reader, event.lane] = event.stop
    return [
        Violation("P8", end, f"reader {reader} of lane {lane} stopped at {index}; the log ends at {tails[lane]}")
        for (reader, lane), index in place.items()
        if reader not in dead and index < tails.get(lane, 0)
    ]
