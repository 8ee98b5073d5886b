"""P4: nothing above the frontier is served, no reader's prefix changes, skips or goes back, and tails are correct.

Also, a lane does not start above its first readable entry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import NamedTuple

from embarcadero.types import Ack, GapKind
from embarcadero_proof.sim.checkers.ledger import Ledger, Violation, inside, ledger_of
from embarcadero_proof.sim.history import (
    Delivered,
    Event,
    FabricLost,
    GapSeen,
    History,
    LaneMade,
    Moved,
    OrderedTo,
    Passed,
    Settled,
    StartRead,
    StillThere,
    TailRead,
    TieredTo,
    TopicMade,
    TrimAsked,
    Verdict,
)


def check(history: History) -> list[Violation]:
    """Return all violations of P4."""
    ledger = ledger_of(history)
    return [
        *_readers_walk(ledger),
        *_prefix_stays(history),
        *_below_frontier(history),
        *_trimmed_is_gone(history),
        *_ends_are_ends(ledger),
        *_tails(ledger),
        *_starts(ledger),
    ]


class _Walk:
    """One reader's way through a lane."""

    def __init__(self, ledger: Ledger, reader: str, lane: int) -> None:
        self.ledger, self.reader, self.lane = ledger, reader, lane
        self.next: int | None = None
        self.ended = False
        self.partitions: tuple[int, ...] | None = None
        self.found: list[Violation] = []

    def advance(self, at: int, index: int, to: int) -> None:
        """Move on: the reader got everything below `index`, and the entries in [index, to)."""
        if self.next is not None:
            if index < self.next:
                self._violation(at, f"went back from index {self.next} to {index} without a seek")
            for skipped in self.ledger.known_between(self.lane, self.next, index):
                if self.ended and self.ledger.is_lost(self.lane, skipped):
                    continue  # between the end on the disks and the recorded end
                if self.partitions is None or self.ledger.partition_at(self.lane, skipped) in self.partitions:
                    self._violation(at, f"continued at index {to} without the batch at index {skipped}")
        self.next = max(to, self.next or 0)

    def gap(self, event: GapSeen) -> None:
        """Pass a gap, or the end of the lane; the end is below the reader if it received lost records."""
        if self.next is not None and event.start > self.next:
            self.advance(event.at, event.start, event.start)
        self.ended = event.kind == GapKind.END_OF_LANE.name
        self.next = event.stop if self.ended else max(event.stop, self.next or 0)

    def _violation(self, at: int, what: str) -> None:
        self.found.append(Violation("P4", at, f"reader {self.reader} of lane {self.lane} {what}"))


def _readers_walk(ledger: Ledger) -> list[Violation]:
    walks: dict[tuple[str, int], _Walk] = {}
    for event in ledger.reads:
        key = (event.reader, event.lane)
        if key not in walks:
            walks[key] = _Walk(ledger, *key)
        walk = walks[key]
        if isinstance(event, Moved):
            walk.next, walk.partitions, walk.ended = event.index, event.partitions, False
        elif isinstance(event, Delivered):
            if walk.partitions is not None and event.partition not in walk.partitions:
                walk.found.append(Violation("P4", event.at, (
                    f"reader {event.reader} asked for partitions {walk.partitions}, but got index {event.index} of "
                    f"partition {event.partition}")))  # fmt: skip
            walk.advance(event.at, event.index, event.index + 1)
        elif isinstance(event, Passed):
            walk.advance(event.at, event.index, event.index)
        elif event.session is None:
            walk.gap(event)
    return [violation for walk in walks.values() for violation in walk.found]


def _prefix_stays(history: History) -> list[Violation]:
    found: list[Violation] = []
    first: dict[tuple[str, int, int], Delivered] = {}
    for event in history.of(Delivered):
        other = first.setdefault((event.reader, event.lane, event.index), event)
        if other.digest != event.digest or other.seq != event.seq:
            found.append(Violation("P4", event.at, (
                f"reader {event.reader} read index {event.index} of lane {event.lane} twice and got two batches")))
    return found


def _below_frontier(history: History) -> list[Violation]:
    found: list[Violation] = []
    frontier: dict[int, int] = {}
    events: list[OrderedTo | Delivered] = history.some(OrderedTo, Delivered)
    for event in events:
        if isinstance(event, OrderedTo):
            if event.index < frontier.get(event.lane, 0):
                found.append(Violation("P4", event.at, (
                    f"the ordered frontier of lane {event.lane} went back: {frontier[event.lane]}, {event.index}")))
            frontier[event.lane] = max(event.index, frontier.get(event.lane, 0))
        elif event.index >= frontier.get(event.lane, event.index + 1):
            found.append(Violation("P4", event.at, (
                f"reader {event.reader} got index {event.index} of lane {event.lane}, but only {frontier[event.lane]} "
                "entries are ordered")))  # fmt: skip
    return found


def _trimmed_is_gone(history: History) -> list[Violation]:
    return [
        Violation("P4", e.at, (
            f"reader {e.reader} learned that index {e.index} of lane {e.lane} is trimmed, or that the lane begins "
            "above it; it is there"))
        for e in history.of(StillThere)
    ]  # fmt: skip


def _ends_are_ends(ledger: Ledger) -> list[Violation]:
    """A closed lane has one end; nothing at or above it was read or acked, except lost entries.

    After a loss, readers of ordered records get a lower end than others: everything between is lost.
    """
    found: list[Violation] = []
    ends: dict[int, GapSeen] = {}
    for event in ledger.history.of(GapSeen):
        if event.kind != GapKind.END_OF_LANE.name:
            continue
        first = ends.setdefault(event.lane, event)
        low, high = sorted((first.start, event.start))
        if event.start == low:
            ends[event.lane] = event
        if low < high and not inside(ledger.lost.get(event.lane, []), low, high):
            found.append(Violation("P4", event.at, (
                f"lane {event.lane} ends at {first.start} ({first.reader}) and at {event.start} ({event.reader})")))
    for lane, end in ends.items():
        for index in ledger.known.get(lane, []):
            if index >= end.start and not ledger.is_lost(lane, index):
                claim = ledger.claims[lane][index][0]
                found.append(Violation("P4", max(claim.at, end.at), (
                    f"lane {lane} ends at index {end.start}, but {claim.who} has {ledger.name(claim.digest)} "
                    f"at index {index}")))  # fmt: skip
    return found


_ALWAYS = -1


class _Fact(NamedTuple):
    """From `at` on, the tail of a lane is at least this."""

    at: int
    lane: int
    tail: int
    durable: bool
    event: Settled | Delivered | TailRead

    def since(self, made: LaneMade) -> int:
        """Return when it became true: a tail at its request, a position of this lane when the lane was made."""
        return min(self.at, self.event.began if isinstance(self.event, TailRead) else made.at)

    @property
    def why(self) -> str:
        """The evidence in words."""
        if isinstance(self.event, TailRead):
            phrase = "the durable end had been reported as" if self.durable else "the tail had been reported as"
            return f"{phrase} {self.tail}"
        return f"index {self.event.index} had been {'acked' if isinstance(self.event, Settled) else 'read'}"


def _tails(ledger: Ledger) -> list[Violation]:
    """A tail covers everything that was acked, read, or reported as the tail before the request.

    Lanes of topics continue above a loss. A broker's lane ends below its lost entries. There a lost entry counts only
    for requests that were answered before the loss, and a durable entry counts always. Answers may have been in flight
    when the fabric was lost.
    """
    losses = [event.at for event in ledger.history.of(FabricLost)]
    seen: dict[tuple[int, int], list[_Fact]] = defaultdict(list)  # by lane and losses before it, if it can be lost
    for event in ledger.history.some(Settled, Delivered, TailRead):
        for fact in _facts(event):
            made = ledger.broker_lanes.get(fact.lane)
            goes = made is not None and not fact.durable and ledger.is_lost(fact.lane, fact.tail - 1)
            since = bisect_left(losses, fact.since(made)) if made is not None and goes else _ALWAYS
            seen[fact.lane, since].append(fact)
    floors = {key: _floors(facts) for key, facts in seen.items()}
    found: list[Violation] = []
    for tail in ledger.history.of(TailRead):
        for since in (_ALWAYS, bisect_right(losses, tail.at)):
            times, best = floors.get((tail.lane, since), ([], []))
            before = bisect_left(times, tail.began)
            if before and best[before - 1].tail > tail.index:
                found.append(Violation("P4", tail.at, (
                    f"{tail.process} got {tail.index} as the end of lane {tail.lane}, but {best[before - 1].why} "
                    "before it asked")))  # fmt: skip
                break
    return found


def _facts(event: Event) -> list[_Fact]:
    """List the facts about tails that an event proves."""
    if isinstance(event, Settled) and event.verdict is Verdict.STORED and event.index is not None:
        return [_Fact(event.at, event.lane, event.index + 1, event.ack == Ack.DURABLE, event)]
    if isinstance(event, Delivered):
        return [_Fact(event.at, event.lane, event.index + 1, event.durable, event)]
    if isinstance(event, TailRead):
        return [
            _Fact(event.at, event.lane, event.index, False, event),
            _Fact(event.at, event.lane, event.durable_index, True, event),
        ]
    return []


def _floors(facts: list[_Fact]) -> tuple[list[int], list[_Fact]]:
    """Return times, and for each the fact with the highest tail so far."""
    facts.sort(key=lambda fact: fact.at)
    best: list[_Fact] = []
    for fact in facts:
        best.append(fact if not best or fact.tail > best[-1].tail else best[-1])
    return [fact.at for fact in facts], best


def _start(event: StartRead, tiered: set[int]) -> int:
    return event.index if event.lane in tiered else max(event.index, event.hot_index)


def _starts(ledger: Ledger) -> list[Violation]:
    """A lane of a topic with replicas starts at or below each entry acked or read before, unless trimmed or lost. This
    holds also for readers of brokers only, unless the topic has a table."""
    replicated = {topic.lane for topic in ledger.history.of(TopicMade) if topic.replicas}
    replicated |= {lane for lane, made in ledger.broker_lanes.items() if made.topic in replicated}
    known: dict[int, list[tuple[int, int]]] = defaultdict(list)  # lane -> (index, since when it is known)
    for event in ledger.history.some(Settled, Delivered):
        for fact in _facts(event):
            if fact.lane in replicated and not ledger.is_lost(fact.lane, fact.tail - 1):
                known[fact.lane].append((fact.tail - 1, fact.at))
    for facts in known.values():
        facts.sort()
    asked: dict[int, int] = defaultdict(int)
    found: list[Violation] = []
    tiered = {event.lane for event in ledger.history.of(TieredTo)}
    for event in ledger.history.some(TrimAsked, StartRead):
        if isinstance(event, TrimAsked):
            asked[event.lane] = max(asked[event.lane], event.index)
        elif isinstance(event, StartRead) and (start := _start(event, tiered)) > asked[event.lane]:
            facts = known[event.lane]
            below = facts[bisect_left(facts, (asked[event.lane], -1)) : bisect_left(facts, (start, -1))]
            hidden = next((index for index, at in below if at < event.began), None)
            if hidden is not None:
                found.append(Violation("P4", event.at, (
                    f"{event.process} got {start} as the start of lane {event.lane}, but index {hidden} had been "
                    "acked or read before it asked, and is neither trimmed nor lost")))  # fmt: skip
    return found
