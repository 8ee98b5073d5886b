"""P5: A deposed process has no effect. Its late writes go to regions that no one reads, and no ack depends on them.

Sequencers: an epoch starts at the end of the order, as recorded in the store. Every index that a process learned before
is below this end, or it came from an already deposed sequencer. Publishers: when a session continues another one, all
batches of the earlier session come before its own. Brokers: a closed lane has one end (P4). Replicas: durable batches
are on disks that count (P6). Clients: a request for a deleted topic does not touch the next topic of its name.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from embarcadero_proof.sim.checkers.ledger import Ledger, Violation, ledger_of
from embarcadero_proof.sim.history import (
    ChangeAsked,
    DeleteAsked,
    Delivered,
    EpochStarted,
    History,
    PassingChanged,
    PassingGone,
    Settled,
    TailRead,
    Verdict,
)

_Evidence = Settled | Delivered | TailRead
"""Events by which a process learned how far a lane reaches."""

_Request = DeleteAsked | ChangeAsked
_Effect = PassingGone | PassingChanged
_DELETED = "deleted"


def check(history: History) -> list[Violation]:
    """Return all violations of P5."""
    return [
        *_epochs_start_above_all(history),
        *_sessions_take_turns(ledger_of(history)),
        *_late_requests_do_nothing(history),
    ]


def _late_requests_do_nothing(history: History) -> list[Violation]:
    asked: set[tuple[int, str]] = set()  # topic, and the requested change
    found: list[Violation] = []
    events: list[_Request | _Effect] = history.some(DeleteAsked, ChangeAsked, PassingGone, PassingChanged)
    for event in events:
        what = event.change.value if isinstance(event, ChangeAsked | PassingChanged) else _DELETED
        if isinstance(event, _Request):
            asked.add((event.topic, what))
        elif (event.topic, what) not in asked:
            sentence = f"topic {event.topic} is {what}; that was requested only for earlier topics"
            found.append(Violation("P5", event.at, sentence))
    return found


def _epochs_start_above_all(history: History) -> list[Violation]:
    found: list[Violation] = []
    furthest: dict[int, tuple[int, _Evidence]] = {}  # by lane: the furthest known end, and its event
    events: list[EpochStarted | _Evidence] = history.some(EpochStarted, Settled, Delivered, TailRead)
    for event in events:
        if isinstance(event, EpochStarted):
            for lane, end in event.ends.items():
                if lane in furthest and furthest[lane][0] > end:
                    found.append(Violation("P5", event.at, (
                        f"epoch {event.epoch} of lane {lane} starts at {end}, but before that "
                        f"{_in_words(furthest[lane][1])}")))  # fmt: skip
        elif (goes_to := _goes_to(event)) and (event.lane not in furthest or goes_to > furthest[event.lane][0]):
            furthest[event.lane] = goes_to, event
    return found


def _goes_to(event: _Evidence) -> int:
    """Return the smallest end of a lane that is consistent with this event."""
    if isinstance(event, TailRead):
        return event.index
    if event.index is None or (isinstance(event, Settled) and event.verdict is not Verdict.STORED):
        return 0
    return event.index + 1


def _in_words(event: _Evidence) -> str:
    if isinstance(event, Settled):
        return f"{event.process} had an ack for index {event.index}"
    if isinstance(event, Delivered):
        return f"reader {event.reader} had got index {event.index}"
    return f"{event.process} had got {event.index} as its end"


def _sessions_take_turns(ledger: Ledger) -> list[Violation]:
    """Batches of a continued session come before those of its successor. Lanes of brokers have no such sessions."""
    spans: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(dict)
    for event in ledger.history.of(Delivered):
        stream = ledger.stream_of.get((event.lane, event.session))
        if stream is not None and event.lane not in ledger.broker_lanes:
            span = spans[event.lane, stream].setdefault(event.session, [event.index, event.index, event.at])
            span[:] = min(span[0], event.index), max(span[1], event.index), event.at
    found: list[Violation] = []
    for (lane, stream), sessions in spans.items():
        for (earlier, span), (later, after) in pairwise(sorted(sessions.items())):  # handles are never reused
            if after[0] <= span[1]:
                found.append(Violation("P5", max(span[2], after[2]), (
                    f"session {earlier} of {stream} in lane {lane} has a batch at index {span[1]}, though session "
                    f"{later} continues it from index {after[0]}")))  # fmt: skip
    return found
