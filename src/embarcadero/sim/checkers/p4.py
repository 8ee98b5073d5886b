"""P4: nothing above the frontier is served, no reader's prefix changes, skips or goes back, and a tail is the tail."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from embarcadero.sim.checkers.ledger import Ledger, Violation
from embarcadero.sim.history import (
    Delivered,
    GapSeen,
    History,
    Moved,
    OrderedTo,
    Passed,
    Settled,
    StillThere,
    TailRead,
    Verdict,
)
from embarcadero.types import GapKind


def check(history: History) -> list[Violation]:
    """All violations of P4."""
    ledger = Ledger(history)
    return [
        *_readers_walk(ledger),
        *_prefix_stays(history),
        *_below_frontier(history),
        *_trimmed_is_gone(history),
        *_ends_are_ends(ledger),
        *_tails(history),
    ]


class _Walk:
    """One reader on its way through a lane."""

    def __init__(self, ledger: Ledger, reader: str, lane: int) -> None:
        self.ledger, self.reader, self.lane = ledger, reader, lane
        self.next: int | None = None
        self.partitions: tuple[int, ...] | None = None
        self.found: list[Violation] = []

    def advance(self, at: int, index: int, to: int) -> None:
        """The reader got everything below `index`, and what is in [index, to)."""
        if self.next is not None:
            if index < self.next:
                self._violation(at, f"went back from index {self.next} to {index} without a seek")
            for skipped in self.ledger.known_between(self.lane, self.next, index):
                if self.partitions is None or self.ledger.partition_at(self.lane, skipped) in self.partitions:
                    self._violation(at, f"went on to index {to} without the batch at index {skipped}")
        self.next = max(to, self.next or 0)

    def gap(self, event: GapSeen) -> None:
        """A span of indices was declared gone."""
        if self.next is not None and event.start > self.next:
            self.advance(event.at, event.start, event.start)
        self.next = max(event.stop, self.next or 0)

    def _violation(self, at: int, what: str) -> None:
        self.found.append(Violation("P4", at, f"reader {self.reader} of lane {self.lane} {what}"))


def _readers_walk(ledger: Ledger) -> list[Violation]:
    walks: dict[tuple[str, int], _Walk] = {}
    for event in ledger.history:
        if not isinstance(event, Moved | Delivered | GapSeen | Passed):
            continue
        key = (event.reader, event.lane)
        if key not in walks:
            walks[key] = _Walk(ledger, *key)
        walk = walks[key]
        if isinstance(event, Moved):
            walk.next, walk.partitions = event.index, event.partitions
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
    for event in history:
        if isinstance(event, OrderedTo):
            if event.index < frontier.get(event.lane, 0):
                found.append(Violation("P4", event.at, (
                    f"the ordered frontier of lane {event.lane} went back: {frontier[event.lane]}, {event.index}")))
            frontier[event.lane] = max(event.index, frontier.get(event.lane, 0))
        elif isinstance(event, Delivered) and event.lane in frontier and event.index >= frontier[event.lane]:
            found.append(Violation("P4", event.at, (
                f"reader {event.reader} got index {event.index} of lane {event.lane}, but only {frontier[event.lane]} "
                "entries are ordered")))  # fmt: skip
    return found


def _trimmed_is_gone(history: History) -> list[Violation]:
    return [
        Violation("P4", e.at, f"reader {e.reader} was told that index {e.index} of lane {e.lane} is trimmed; it is not")
        for e in history.of(StillThere)
    ]


def _ends_are_ends(ledger: Ledger) -> list[Violation]:
    """A closed lane has one end, and nobody ever got or was acked anything at or above it that is not lost."""
    found: list[Violation] = []
    ends: dict[int, GapSeen] = {}
    for event in ledger.history.of(GapSeen):
        if event.kind != GapKind.END_OF_LANE.name:
            continue
        first = ends.setdefault(event.lane, event)
        if first.start != event.start:
            found.append(Violation("P4", event.at, (
                f"lane {event.lane} ends at {first.start} ({first.reader}) and at {event.start} ({event.reader})")))
    for lane, end in ends.items():
        for index in ledger.known.get(lane, []):
            if index >= end.start and not ledger.is_lost(lane, index):
                claim = ledger.claims[lane][index][0]
                found.append(Violation("P4", max(claim.at, end.at), (
                    f"lane {lane} ends at index {end.start}, but {claim.who} says that {ledger.name(claim.digest)} is "
                    f"at index {index}")))  # fmt: skip
    return found


def _tails(history: History) -> list[Violation]:
    """A tail covers all that was acked, read, or told as the tail before it was asked for."""
    seen: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # lane -> (at, tail at least, why)
    for event in history:
        if isinstance(event, Settled) and event.verdict is Verdict.STORED and event.index is not None:
            seen[event.lane].append((event.at, event.index + 1, f"index {event.index} had been acked"))
        elif isinstance(event, Delivered):
            seen[event.lane].append((event.at, event.index + 1, f"index {event.index} had been read"))
        elif isinstance(event, TailRead):
            seen[event.lane].append((event.at, event.index, f"the tail had been told as {event.index}"))
    floors = {lane: _floors(facts) for lane, facts in seen.items()}
    found: list[Violation] = []
    for tail in history.of(TailRead):
        times, best = floors[tail.lane]
        before = bisect_left(times, tail.began)
        if before and best[before - 1][0] > tail.index:
            found.append(Violation("P4", tail.at, (
                f"{tail.process} was told that lane {tail.lane} ends at {tail.index}, but {best[before - 1][1]} before "
                "it asked")))  # fmt: skip
    return found


def _floors(facts: list[tuple[int, int, str]]) -> tuple[list[int], list[tuple[int, str]]]:
    """Times, and at each the highest tail known so far and why."""
    facts.sort(key=lambda fact: fact[0])
    best: list[tuple[int, str]] = []
    for _, index, why in facts:
        best.append((index, why) if not best or index > best[-1][0] else best[-1])
    return [at for at, _, _ in facts], best
