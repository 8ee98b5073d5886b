"""Batches of a publisher: their stamps, the window, the routes, and the errors with which they may end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from embarcadero.client.link import Link
from embarcadero.errors import (
    Backpressure,
    BadReference,
    BadValue,
    Conflict,
    EmbarcaderoError,
    Lost,
    NotAvailable,
    OutcomeUnknown,
    Refused,
    Stale,
    TimedOut,
    UnknownSchema,
    UnknownTopic,
    Unreachable,
)
from embarcadero.limits import SESSION_WINDOW
from embarcadero.types import (
    Outcome,
    Position,
    ReferenceFault,
    StagedBatch,
    health_in_words,
)
from embarcadero.wire.codec import HEADER_BYTES, FrameKind, FullReceived

_HEADER_BYTES = HEADER_BYTES[FrameKind.BATCH]

REFUSALS: dict[Outcome, tuple[type[EmbarcaderoError], str, str]] = {
    Outcome.CONFLICT: (
        Conflict,
        "was stored before with other bytes",
        "give each publisher a session of its own, and repeat the work identically",
    ),
    Outcome.LOST: (Lost, "was declared lost before it arrived", "send the records again as a new batch"),
    Outcome.STALE: (Stale, "is below the session's window", "its outcome was decided long ago: read the log"),
    Outcome.UNKNOWN_SCHEMA: (UnknownSchema, "has a schema version that the topic lacks", "open the publisher again"),
    Outcome.UNKNOWN_TOPIC: (UnknownTopic, "belongs to a topic that was deleted", "create the topic again"),
    Outcome.NO_REFERENCE: (BadReference, "references a staged batch that does not exist", "stage its records again"),
}
FINAL_REFUSALS = frozenset({Outcome.CONFLICT, Outcome.LOST})
"""Refusals that apply to every copy of the batch."""


_FAULTS = {
    ReferenceFault.GONE: (
        "lane {0.lane} has no batch at index {0.index}: it was trimmed or lost",
        "stage its records again",
    ),
    ReferenceFault.ANOTHER_TOPIC: (
        "lane {0.lane} does not belong to the topic with id {0.topic_id:016x}: the topic was deleted or created again",
        "stage its records again",
    ),
    ReferenceFault.DIFFERS: (
        "the batch at index {0.index} of lane {0.lane} does not have size {0.size}, count {0.count} and checksum "
        "{0.crc:08x}",
        "pass the result of `staged()` unchanged",
    ),
}


@dataclass(slots=True, eq=False)
class OutBatch:
    """A stamped batch. It ends exactly once, with a position (None: stored too long ago to know it) or an error."""

    sequence: int
    payload: Any
    size: int
    count: int
    partition: int
    schema: int
    crc: int
    added_us: int
    position: Position | None = None
    error: EmbarcaderoError | None = None
    done: bool = False
    token: Any = None  # belongs to the driver
    link: int | None = None  # the connection on which it is in flight
    sent: bool = False
    doubts: int = 0  # copies without an answer
    refusals: int = 0  # how often the cluster asked for a later retry
    reference: StagedBatch | None = None  # the staged batch that it references: `payload` is then the frame's body

    def on_sent(self, link: int) -> None:
        """Note that a copy is sent on a connection."""
        self.link, self.sent = link, True
        self.doubts += 1

    def on_link_lost(self) -> None:
        """Note that the connection was lost: the outcome of the copy in flight is not known."""
        self.link = None

    def refused(self, verdict: Outcome) -> None:
        """Note that the cluster did not store the copy in flight. UNDECIDED leaves the copy in doubt."""
        self.link = None
        self.doubts -= verdict is not Outcome.UNDECIDED

    def deferred(self) -> None:
        """Note that the cluster asked for a later retry."""
        self.refusals += 1

    def never_stored(self) -> None:
        """Note that the log has no copy of the batch."""
        self.doubts = 0

    def end(self, position: Position | None, error: EmbarcaderoError | None) -> None:
        """Set the outcome."""
        self.link, self.position, self.error, self.done = None, position, error, True


def refusal(outcome: Outcome, batch: OutBatch, extra: int = 0) -> EmbarcaderoError:
    """Return the error of a batch that the cluster refused permanently. `extra` is a field of the ack."""
    kind, problem, hint = REFUSALS[outcome]
    if outcome is Outcome.NO_REFERENCE and batch.reference is not None and extra in _FAULTS:
        why, hint = _FAULTS[ReferenceFault(extra)]
        problem = f"{problem}: {why.format(batch.reference)}"
    if batch.doubts and outcome not in FINAL_REFUSALS:
        unknown = f"batch {batch.sequence} {problem}, and the outcome of an earlier copy is not known"
        return OutcomeUnknown(unknown, "read the log to find out if it is stored")
    return kind(f"batch {batch.sequence} {problem}", hint)


def no_references(batch: OutBatch) -> EmbarcaderoError:
    """Return the error of a batch by reference when no connected broker accepts references."""
    if batch.doubts:
        return OutcomeUnknown(
            f"batch {batch.sequence} was sent by reference, and the connected brokers do not accept references",
            "read the log to find out if it is stored",
        )
    return NotAvailable(
        f"batch {batch.sequence} references a staged batch, and no connected broker accepts references",
        "upgrade the brokers, or publish the bytes with publish_encoded(payload, count)",
    )


def beyond_window(batch: OutBatch) -> EmbarcaderoError:
    """Return the error of a batch whose retry could not be recognised."""
    return BadValue(
        f"batch {batch.sequence} is above the limit of {SESSION_WINDOW} batches for a session opened at a sequence",
        f"send at most {SESSION_WINDOW} batches: make them larger, or spread the records over more sessions",
    )


def ended_with(cause: EmbarcaderoError, batch: OutBatch) -> EmbarcaderoError:
    """Return the error of an unsettled batch when its publisher ends: the cause only if the log has no copy."""
    if not batch.doubts and isinstance(cause, BadReference):
        return Refused(f"batch {batch.sequence} was not sent because its session ended: {cause.message}", cause.hint)
    if not batch.doubts:
        return cause
    kind = TimedOut if isinstance(cause, TimedOut) else OutcomeUnknown
    problem = f"batch {batch.sequence} was sent, and its outcome is not known: {cause.message}"
    return kind(problem, "read the log to find out if it is stored")


def cluster_full(topic: str, full: FullReceived) -> Backpressure:
    """Return the error of a call for which the cluster has been full for too long. The publisher continues."""
    again = "the record was not accepted, earlier records are not lost: send it again later"
    if full.lane < 0:
        problem = f"the brokers' memory has no space for a batch of {topic!r}"
        why = "publish less, or enlarge fabric.log_bytes"
    elif full.replica < 0:
        problem, why = f"the replicas' disks do not keep up with {topic!r}", "see `embarcadero status`"
    else:
        words = health_in_words(full.trouble) or ["in trouble"]
        problem = f"records of {topic!r} do not become durable: replica {full.replica}: {words[0].partition(': ')[0]}"
        why = words[0].partition(": ")[2] or "see `embarcadero status`"
    return Backpressure(problem, f"{again}. {why}")


def undelivered(topic: str, oldest: OutBatch, timeout_us: int, usable: int, full: int) -> EmbarcaderoError:
    """Return the error of a publisher whose oldest batch has waited too long. `usable`: links of its open session."""
    seconds = timeout_us / 1e6
    if oldest.doubts:
        problem = f"a batch of {topic!r} has no outcome after {seconds:g} s"
        return TimedOut(problem, "check whether the cluster is up: `embarcadero status`")
    if not usable:
        problem = f"no broker accepted a batch of {topic!r} within {seconds:g} s"
        return Unreachable(problem, "check whether the cluster is up: `embarcadero status`")
    if oldest.reference is not None and oldest.refusals and not full:
        staged = f"the staged batch at index {oldest.reference.index} of lane {oldest.reference.lane}"
        return Backpressure(
            f"{staged} was not readable for {seconds:g} s, and was not published into {topic!r}",
            "it is not durable yet, or its replicas are in trouble: see `embarcadero status`",
        )
    return Backpressure(
        f"the cluster had no space for a batch of {topic!r} for {seconds:g} s ({full} of {usable} brokers are full)",
        "publish less, or enlarge fabric.log_bytes",
    )


class BatchWindow:
    """Batches of one session without an outcome, by sequence. `low` and `next` bound these sequences.

    A batch is queued (a heap, so that the oldest goes first), in flight, or deferred after a refusal. `at`: the session
    was opened at that sequence, and every batch must be recognisable when it is sent again.
    """

    def __init__(self, bytes_max: int, at: int | None) -> None:
        self._bytes_max, self._at = bytes_max, at
        self.first: int | None = None  # the sequence of the first batch; None before the session is open
        self.low = self.next = 0
        self._unsettled: dict[int, OutBatch] = {}
        self._bytes = 0
        self._queue: list[int] = []
        self._later: list[tuple[int, int]] = []  # (when, sequence) of deferred batches
        self._settled: list[OutBatch] = []

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def oldest(self) -> OutBatch | None:
        """The unsettled batch with the lowest sequence."""
        return self._unsettled.get(self.low)

    @property
    def _added(self) -> int:
        return self.next - (self.first or 0)

    @property
    def complete(self) -> bool:
        """Whether a session opened at a sequence has reached its limit of recognisable batches."""
        return self._at is not None and self._added >= SESSION_WINDOW

    def has_room(self, size: int) -> bool:
        """Whether `add` accepts a batch of `size` bytes now. A batch larger than the window is accepted alone."""
        if not self._unsettled or self.complete:
            return True
        return self.next - self.low < SESSION_WINDOW and self._bytes + size <= self._bytes_max

    def get(self, sequence: int) -> OutBatch | None:
        """Return the unsettled batch with a sequence."""
        return self._unsettled.get(sequence)

    def unsettled(self) -> list[OutBatch]:
        """Return all batches without an outcome."""
        return list(self._unsettled.values())

    def add(self, batch: OutBatch) -> bool:
        """Add the batch with the sequence `next`. False if it is above the limit of recognisable batches."""
        recognised = not self.complete
        self.next += 1
        self._unsettled[batch.sequence] = batch
        self._bytes += batch.size
        return recognised

    def settle(self, batch: OutBatch, position: Position | None, error: EmbarcaderoError | None) -> None:
        """Set the outcome of a batch."""
        del self._unsettled[batch.sequence]
        self._bytes -= batch.size
        batch.end(position, error)
        self._settled.append(batch)
        while self.low < self.next and self.low not in self._unsettled:
            self.low += 1

    def take_settled(self) -> list[OutBatch]:
        """Take the batches that were settled since the last call, in the order of settling."""
        settled, self._settled = self._settled, []
        return settled

    # --- the queue ---
    def queue(self, batch: OutBatch) -> None:
        """Queue a batch to be sent, or sent again."""
        heappush(self._queue, batch.sequence)

    def queue_all(self) -> None:
        """Queue every unsettled batch again."""
        for batch in self._unsettled.values():
            batch.on_link_lost()
        self._later.clear()
        self._queue = list(self._unsettled)
        heapify(self._queue)

    def queue_none(self) -> None:
        """Clear the queue: no batch is sent any more."""
        self._queue.clear()
        self._later.clear()

    def queued(self) -> OutBatch | None:
        """Return the oldest queued batch."""
        while self._queue:
            batch = self._unsettled.get(self._queue[0])
            if batch is not None and batch.link is None:
                return batch
            heappop(self._queue)  # it was settled, or sent again, after it was queued
        return None

    def take_queued(self) -> None:
        """Remove the batch that `queued` returned: it is sent."""
        heappop(self._queue)

    def defer(self, batch: OutBatch, until_us: int) -> None:
        """Send the batch again later, as the cluster asked."""
        heappush(self._later, (until_us, batch.sequence))

    def queue_due(self, now_us: int) -> None:
        """Queue the deferred batches that are due."""
        while self._later and self._later[0][0] <= now_us:
            heappush(self._queue, heappop(self._later)[1])

    @property
    def due_us(self) -> int | None:
        """When the first deferred batch is due."""
        return self._later[0][0] if self._later else None

    def defers_before(self, sequence: int) -> bool:
        """Whether an older batch is deferred."""
        return any(deferred < sequence for _, deferred in self._later)

    # --- sequences ---
    def outside(self, expected: int) -> list[int]:
        """Return the sequences of unsettled batches at or above `expected`, the next sequence of the session."""
        return [sequence for sequence in self._unsettled if sequence >= expected]

    def renumber(self, expected: int, outside: Iterable[int]) -> None:
        """Renumber the batches that the session does not have, from `expected` on.

        When it is first opened, a named session continues after the batches of its last holder. Later, this renumbers
        only batches whose sequences the caller does not know. A strong session has no gap after a loss, so these
        batches take the lost sequences.
        """
        moving = [self._unsettled.pop(sequence) for sequence in sorted(outside)]
        for number, batch in enumerate(moving, expected):
            batch.sequence = number
            self._unsettled[number] = batch
        by, self.next = expected + len(moving) - self.next, expected + len(moving)
        self.low = min(self._unsettled, default=self.next)
        self.first = (self.first or 0) + by


class LinkRoute:
    """The state of a publisher on one link."""

    __slots__ = ("asked", "carried", "full", "in_flight", "link", "since_us")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_flight: dict[int, OutBatch] = {}
        self.asked: int | None = None  # the open request
        self.since_us = 0  # since when the broker has owed an answer without interruption
        self.full: FullReceived | None = None  # why the broker is full, as it reported
        self.carried = False  # batches without acks were sent, and their arrival is not confirmed

    @property
    def owes(self) -> bool:
        """Whether the broker owes an answer."""
        return bool(self.in_flight) or self.asked is not None

    def _starts_owing(self, now_us: int) -> None:
        if not self.owes:
            self.since_us = now_us

    def ask(self, owner: object, now_us: int) -> int:
        """Return the number of a request that is sent now."""
        self._starts_owing(now_us)
        self.asked = self.link.ask(owner)
        return self.asked

    def answered(self, request: int) -> bool:
        """Whether this answers the open request, which is then closed."""
        if self.asked != request:
            return False
        self.asked = None
        return True

    def carry(self, batch: OutBatch, unanswered: bool, now_us: int) -> None:
        """Note that a batch is sent. An `unanswered` batch gets no ack."""
        self.link.spend(_HEADER_BYTES + batch.size)
        self._starts_owing(now_us)
        self.in_flight[batch.sequence] = batch
        self.carried |= unanswered
        batch.on_sent(self.link.number)

    def arrived(self) -> None:
        """Note that the broker answered a request that was sent after all batches."""
        self.carried = False

    def credited(self) -> None:
        """Note that the broker has space in its memory."""
        if self.full is not None and self.full.lane < 0:
            self.full = None


class LinkRoutes:
    """All links of a publisher, and the choice of a link for the next batch.

    `pinned`: one link carries all batches, as long as it exists and is not full for too long.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._routes: dict[int, LinkRoute] = {}
        self._turn = 0
        self._pin = -1
        self.full_us = 0  # when a broker last reported that it is full

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[LinkRoute]:
        return iter(list(self._routes.values()))

    def get(self, number: int) -> LinkRoute | None:
        """Return the route of a link."""
        return self._routes.get(number)

    def add(self, link: Link) -> None:
        """Add a connection that is ready for use."""
        self._routes[link.number] = LinkRoute(link)

    def remove(self, number: int) -> LinkRoute | None:
        """Remove the route of a lost connection and return it."""
        return self._routes.pop(number, None)

    @property
    def asking(self) -> bool:
        """Whether a request is open."""
        return any(route.asked is not None for route in self._routes.values())

    @property
    def carried(self) -> bool:
        """Whether batches without acks were sent that may not have arrived yet."""
        return any(route.carried for route in self._routes.values())

    @property
    def references(self) -> bool:
        """Whether a broker accepts batches by reference."""
        return any(route.link.references for route in self._routes.values())

    def forget_requests(self) -> None:
        """Close all requests. Later answers are ignored."""
        for route in self._routes.values():
            route.asked = None

    def begin_at(self, turn: int) -> None:
        """Start the rotation at a link that differs between publishers. Clear the batches in flight."""
        self._turn = turn
        for route in self._routes.values():
            route.in_flight.clear()

    def landed(self, batch: OutBatch) -> None:
        """Remove a batch with an outcome from its link."""
        if batch.link is not None and (route := self._routes.get(batch.link)) is not None:
            route.in_flight.pop(batch.sequence, None)

    # --- the choice ---
    def choose(self, size: int, by_reference: bool, alone: bool) -> LinkRoute | None:
        """Return a link with credit for a batch frame of `size` bytes."""
        return self._pick_pinned(size, by_reference) if self._pinned else self.pick(size, by_reference, alone)

    def pick(self, size: int, by_reference: bool, alone: bool) -> LinkRoute | None:
        """Return the next link, round-robin, with credit for `size` bytes. A lone batch uses the last link again.

        Batches that are sent one at a time gain nothing from many brokers, and a broker that was just active is fast.
        """
        routes = list(self._routes.values())
        first = self._turn - alone
        for step in range(len(routes)):
            at = (first + step) % len(routes)
            if routes[at].link.room() >= size and (routes[at].link.references or not by_reference):
                self._turn = at + 1
                return routes[at]
        return None

    def _pick_pinned(self, size: int, by_reference: bool) -> LinkRoute | None:
        """Return the session's link if it has credit for `size` bytes. Choose another when it is lost or full."""
        if self._pin not in self._routes or (by_reference and not self._routes[self._pin].link.references):
            links = [number for number, route in self._routes.items() if route.link.references or not by_reference]
            self._pin = links[self._turn % len(links)] if links else -1
        route = self._routes.get(self._pin)
        return route if route is not None and route.link.room() >= size else None

    # --- full brokers ---
    def is_full(self, route: LinkRoute, full: FullReceived, now_us: int) -> None:
        """Note that a broker or a lane has been full for too long. A pinned session chooses another broker."""
        self.full_us = now_us
        if route.full is None or full.lane >= 0:  # a cause in a lane is more specific than full memory
            route.full = full
        if self._pin == route.link.number and full.lane < 0:
            self._pin, self._turn = -1, self._turn + 1

    def has_room(self, route: LinkRoute) -> None:
        """Note that a batch of this route is stored: the broker has space, and the disks of the lane make progress."""
        if not self.full_us:
            return
        route.full = None
        for other in self._routes.values():
            if other.full is not None and other.full.lane >= 0:
                other.full = None

    def why_waiting(self, oldest: OutBatch, durable: bool) -> FullReceived | None:
        """Return why the oldest batch waits, if its broker has reported that it is full."""
        if oldest.link is not None:
            full = self._routes[oldest.link].full if oldest.link in self._routes else None
            slow_disks = full is not None and full.lane >= 0 and not durable  # slow disks do not delay this ack
            return None if slow_disks else full
        if oldest.refusals or all(route.link.room() < oldest.size for route in self._routes.values()):
            return next((route.full for route in self._routes.values() if route.full is not None), None)
        return None
