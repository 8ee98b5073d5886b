"""P8: every call ends, and after healing readers reach the end of the log."""

from __future__ import annotations

from collections import Counter

from embarcadero.types import OnGap
from embarcadero_proof.sim.checkers.ledger import Violation, ledger_of, refused_streams
from embarcadero_proof.sim.history import (
    Answered,
    Asked,
    Began,
    Delivered,
    Died,
    Ended,
    Fault,
    Healed,
    History,
    LostSpan,
    Moved,
    Passed,
    RoleFailed,
    Sent,
    Settled,
    Stuck,
    TailRead,
    TopicMade,
    Verdict,
)


def check(history: History) -> list[Violation]:
    """Return all violations of P8."""
    found = [Violation("P8", f.at, f"{f.process} failed: {f.error}") for f in history.of(RoleFailed)]
    found += _settled_once(history)
    if history.of(Ended):
        end = history.of(Ended)[-1].at
        dead = {death.process for death in history.of(Died)}
        for ends in (_publishes_end, _calls_end, _readers_arrive):
            found += ends(history, dead, end)
        found += [*_unbroken_is_stored(history), *_healed_is_stored(history, dead)]
    return found


def _settled_once(history: History) -> list[Violation]:
    """A call has one end."""
    found: list[Violation] = []
    seen: dict[tuple[str, int], Settled] = {}
    for event in history.of(Settled):
        other = seen.setdefault((event.process, event.number), event)
        if other is not event:
            found.append(Violation("P8", event.at, (
                f"{event.process} got two outcomes of batch {event.number}: {other.verdict.value}, then "
                f"{event.verdict.value}")))  # fmt: skip
    return found


def _publishes_end(history: History, dead: set[str], end: int) -> list[Violation]:
    settled = {(event.process, event.number) for event in history.of(Settled)}
    return [
        Violation("P8", end, f"{sent.process} never learned the outcome of batch {sent.number}, sent at {sent.at} us")
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


def _unbroken_is_stored(history: History) -> list[Violation]:
    """In a run without faults every batch is stored, except the batches that a topic with on_gap=skip skipped."""
    if any(history.of(kind) for kind in (Fault, Stuck, Died)):
        return []
    refused = refused_streams(history)
    skips = {topic.lane for topic in history.of(TopicMade) if topic.on_gap == OnGap.SKIP.value}
    return [
        Violation("P8", s.at, f"nothing broke, yet batch {s.number} of {s.process} ended as {s.verdict} ({s.error})")
        for s in history.of(Settled)
        if s.verdict is not Verdict.STORED and not (s.error == "Lost" and s.lane in skips) and s.stream not in refused
    ]


def _healed_is_stored(history: History, dead: set[str]) -> list[Violation]:
    """Batches sent after healing are stored, except those that a gap cost their stream.

    Three groups are left out: streams with several processes, since one may fence the other; streams with a batch lost
    on the way; and publishers with open batches at the time of healing, which may have waited too long already.
    """
    if not history.of(Healed):
        return []
    healed_us = history.of(Healed)[-1].at
    processes = Counter(began.stream for began in history.of(Began))
    judged = {stream for stream, count in processes.items() if count == 1} - {s.stream for s in history.of(Stuck)}
    judged -= refused_streams(history)
    sent_us = {(sent.process, sent.number): sent.at for sent in history.of(Sent)}
    done = {(s.process, s.number) for s in history.of(Settled) if s.at <= healed_us}
    busy = {sent[0] for sent, at in sent_us.items() if at <= healed_us and sent not in done}
    return [
        Violation("P8", s.at, f"all is healed, but batch {s.number} of {s.process} ended as {s.verdict} ({s.error})")
        for s in history.of(Settled)
        if s.stream in judged and s.process not in dead | busy and sent_us.get((s.process, s.number), 0) > healed_us
        and s.verdict is not Verdict.STORED and s.error != "Lost"
    ]  # fmt: skip


def _readers_arrive(history: History, dead: set[str], end: int) -> list[Violation]:
    """Each living reader has reached the last reported tail, except a part that was lost since."""
    tails: dict[int, int] = {}
    for tail in history.of(TailRead):
        lost = [s.start for s in history.of(LostSpan) if s.lane == tail.lane and s.start < tail.index < s.stop]
        tails[tail.lane] = max(min([tail.index, *lost]), tails.get(tail.lane, 0))
    position: dict[tuple[str, int], int] = {}
    for event in ledger_of(history).reads:
        if isinstance(event, Moved):
            position[event.reader, event.lane] = event.index or 0
        elif isinstance(event, Delivered):
            position[event.reader, event.lane] = event.index + 1
        elif isinstance(event, Passed):
            position[event.reader, event.lane] = event.index
        elif event.session is None:
            position[event.reader, event.lane] = event.stop
    return [
        Violation("P8", end, f"reader {reader} of lane {lane} stopped at {index}; the log ends at {tails[lane]}")
        for (reader, lane), index in position.items()
        if reader not in dead and index < tails.get(lane, 0)
    ]
