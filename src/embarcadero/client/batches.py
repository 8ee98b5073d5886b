"""Batches of a publisher on their way: stamped, in the window, on a route; and the errors they may end with."""

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
    Outcome.CONFLICT: (Conflict, "was stored before with other bytes", "two publishers use one session's sequences"),
    Outcome.LOST: (Lost, "was declared lost before it came", "send the records again as a new batch"),
    Outcome.STALE: (Stale, "is below the session's window", "it was settled long ago"),
    Outcome.UNKNOWN_SCHEMA: (UnknownSchema, "has a schema that its topic has not", "open the publisher again"),
    Outcome.UNKNOWN_TOPIC: (UnknownTopic, "has no topic any more", "the topic was deleted"),
    Outcome.NO_REFERENCE: (BadReference, "names a staged batch that is not there", "stage its records again"),
}
FINAL_REFUSALS = frozenset({Outcome.CONFLICT, Outcome.LOST})
"""Refusals that hold for every copy of the batch that was ever sent."""


_FAULTS = {
    ReferenceFault.GONE: (
        "lane {0.lane} has no batch at index {0.index}: it was trimmed, or lost",
        "stage its records again",
    ),
    ReferenceFault.ANOTHER_TOPIC: (
        "lane {0.lane} is not one of the topic with id {0.topic_id:016x}: that was deleted, or made again",
        "stage its records again",
    ),
    ReferenceFault.DIFFERS: (
        "the batch at index {0.index} of lane {0.lane} has not the size {0.size}, the count {0.count} and the checksum "
        "{0.crc:08x}",
        "publish what `staged()` of its future returned, unchanged",
    ),
}


@dataclass(slots=True, eq=False)
class OutBatch:
    """One stamped batch. It ends exactly once: with a position (None: stored too long ago to name it) or an error."""

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
    token: Any = None  # the driver's
    link: int | None = None  # the connection it is in flight on
    sent: bool = False
    doubts: int = 0  # copies sent that were not answered
    refusals: int = 0  # times the cluster asked to send it again later
    reference: StagedBatch | None = None  # it names this one instead of carrying it: `payload` is the frame's body

    def goes_out(self, link: int) -> None:
        """A copy is sent on a connection."""
        self.link, self.sent = link, True
        self.doubts += 1

    def comes_back(self) -> None:
        """The connection of the copy in flight is gone: what became of that copy is not known."""
        self.link = None

    def refused(self, verdict: Outcome) -> None:
        """The cluster answered the copy in flight, and did not store it. UNDECIDED leaves the copy in doubt."""
        self.link = None
        self.doubts -= verdict is not Outcome.UNDECIDED

    def put_off(self) -> None:
        """The cluster asked to send it again later."""
        self.refusals += 1

    def never_stored(self) -> None:
        """No copy that was sent is in the log."""
        self.doubts = 0

    def end(self, position: Position | None, error: EmbarcaderoError | None) -> None:
        """The batch has its outcome."""
        self.link, self.position, self.error, self.done = None, position, error, True


def refusal(outcome: Outcome, batch: OutBatch, extra: int = 0) -> EmbarcaderoError:
    """The error of a batch that the cluster refused for good. `extra` is the ack's."""
    kind, problem, hint = REFUSALS[outcome]
    if outcome is Outcome.NO_REFERENCE and batch.reference is not None and extra in _FAULTS:
        why, hint = _FAULTS[ReferenceFault(extra)]
        problem = f"{problem}: {why.format(batch.reference)}"
    if batch.doubts and outcome not in FINAL_REFUSALS:
        unknown = f"batch {batch.sequence} {problem}, but nobody told what became of an earlier copy"
        return OutcomeUnknown(unknown, "read the log to find out")
    return kind(f"batch {batch.sequence} {problem}", hint)


def no_references(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch by reference when no connected broker takes any."""
    if batch.doubts:
        return OutcomeUnknown(
            f"batch {batch.sequence} was sent by reference, and the brokers that are left take no references",
            "read the log to find out",
        )
    return NotAvailable(
        f"batch {batch.sequence} names a staged batch, and no connected broker takes batches by reference",
        "upgrade the brokers, or publish the bytes themselves: publish_encoded(payload, count)",
    )


def beyond_window(batch: OutBatch) -> EmbarcaderoError:
    """The error of a batch that could not be recognised if it came again."""
    return BadValue(
        f"batch {batch.sequence} is the {SESSION_WINDOW + 1}th or a later one of a session opened at a sequence",
        f"send at most {SESSION_WINDOW} batches: make them larger, or spread the records over more sessions",
    )


def ended_with(cause: EmbarcaderoError, batch: OutBatch) -> EmbarcaderoError:
    """The error of an unsettled batch when its publisher ends: the cause itself only if no copy can be in the log."""
    if not batch.doubts and isinstance(cause, BadReference):
        return Refused(f"batch {batch.sequence} was not sent, as its session ended: {cause.message}", cause.hint)
    if not batch.doubts:
        return cause
    kind = TimedOut if isinstance(cause, TimedOut) else OutcomeUnknown
    return kind(
        f"batch {batch.sequence} was sent but its outcome is not known: {cause.message}", "read the log to find out"
    )


def no_room(topic: str, full: FullReceived) -> Backpressure:
    """The error of a call for whose record the cluster has had no room for long. The publisher goes on."""
    again = "the record was not taken, and nothing is lost; try again later"
    if full.lane < 0:
        problem, why = f"the brokers' memory has no room for a batch of {topic!r}", "publish less, or make it larger"
    elif full.replica < 0:
        problem, why = f"the replicas' disks do not keep up with {topic!r}", "see: embarcadero status"
    else:
        words = health_in_words(full.trouble) or ["in trouble"]
        problem = f"records of {topic!r} do not become durable: replica {full.replica}: {words[0].partition(': ')[0]}"
        why = words[0].partition(": ")[2] or "see: embarcadero status"
    return Backpressure(problem, f"{again}. {why}")


def undelivered(topic: str, oldest: OutBatch, timeout_us: int, usable: int, full: int) -> EmbarcaderoError:
    """Why a publisher ends whose oldest batch has waited too long. `usable`: links that its open session can use."""
    seconds = timeout_us / 1e6
    if oldest.doubts:
        return TimedOut(f"no outcome within {seconds:g} s", "see whether the cluster is up: embarcadero status")
    if not usable:
        return Unreachable(
            f"no broker took a batch of {topic!r} within {seconds:g} s", "see whether it is up: embarcadero status"
        )
    if oldest.reference is not None and oldest.refusals and not full:
        staged = f"the staged batch at index {oldest.reference.index} of lane {oldest.reference.lane}"
        return Backpressure(
            f"{staged} could not be read for {seconds:g} s, and was not published into {topic!r}",
            "it is not durable yet, or its replicas are in trouble: embarcadero status",
        )
    return Backpressure(
        f"the cluster had no room for a batch of {topic!r} for {seconds:g} s ({full} of {usable} brokers full)",
        "publish less, or make the brokers' logs larger",
    )


class BatchWindow:
    """Batches of one session that have no outcome yet, by their sequence; `low` and `next` bound these sequences.

    A batch waits in the queue (a heap, so that the oldest goes first), is in flight, or waits out a refusal. `at`: the
    session was opened at that sequence, and it must be possible to recognise all of its batches again.
    """

    def __init__(self, bytes_max: int, at: int | None) -> None:
        self._bytes_max, self._at = bytes_max, at
        self.first: int | None = None  # the sequence of the first batch; known once the session is open
        self.low = self.next = 0
        self._unsettled: dict[int, OutBatch] = {}
        self._bytes = 0
        self._queue: list[int] = []
        self._later: list[tuple[int, int]] = []  # (when, sequence) of batches that wait out a refusal
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
        """Whether a session opened at a sequence has had all batches that can be recognised again."""
        return self._at is not None and self._added >= SESSION_WINDOW

    def has_room(self, size: int) -> bool:
        """Whether `add` may take a batch of `size` bytes now. One that is larger than the window goes alone."""
        if not self._unsettled or self.complete:
            return True
        return self.next - self.low < SESSION_WINDOW and self._bytes + size <= self._bytes_max

    def get(self, sequence: int) -> OutBatch | None:
        """The unsettled batch with a sequence."""
        return self._unsettled.get(sequence)

    def unsettled(self) -> list[OutBatch]:
        """All batches without an outcome."""
        return list(self._unsettled.values())

    def add(self, batch: OutBatch) -> bool:
        """Take the batch that has the sequence `next`. False if it is one too many to be recognised again."""
        recognised = not self.complete
        self.next += 1
        self._unsettled[batch.sequence] = batch
        self._bytes += batch.size
        return recognised

    def settle(self, batch: OutBatch, position: Position | None, error: EmbarcaderoError | None) -> None:
        """Give a batch its outcome."""
        del self._unsettled[batch.sequence]
        self._bytes -= batch.size
        batch.end(position, error)
        self._settled.append(batch)
        while self.low < self.next and self.low not in self._unsettled:
            self.low += 1

    def take_settled(self) -> list[OutBatch]:
        """Batches that finished since the last call, in the order of finishing."""
        settled, self._settled = self._settled, []
        return settled

    # --- what is to be sent ---
    def queue(self, batch: OutBatch) -> None:
        """The batch is to be sent, or sent again."""
        heappush(self._queue, batch.sequence)

    def queue_all(self) -> None:
        """Everything unsettled is to be sent again."""
        for batch in self._unsettled.values():
            batch.comes_back()
        self._later.clear()
        self._queue = list(self._unsettled)
        heapify(self._queue)

    def queue_none(self) -> None:
        """Nothing is sent any more."""
        self._queue.clear()
        self._later.clear()

    def queued(self) -> OutBatch | None:
        """The oldest batch that is to be sent."""
        while self._queue:
            batch = self._unsettled.get(self._queue[0])
            if batch is not None and batch.link is None:
                return batch
            heappop(self._queue)  # settled, or sent again, since it was queued
        return None

    def take_queued(self) -> None:
        """The batch that `queued` returned is sent."""
        heappop(self._queue)

    def defer(self, batch: OutBatch, until_us: int) -> None:
        """The cluster asked to send the batch again later."""
        heappush(self._later, (until_us, batch.sequence))

    def queue_due(self, now_us: int) -> None:
        """Queue the deferred batches whose time has come."""
        while self._later and self._later[0][0] <= now_us:
            heappush(self._queue, heappop(self._later)[1])

    @property
    def due_us(self) -> int | None:
        """When the first deferred batch is to be queued."""
        return self._later[0][0] if self._later else None

    def defers_before(self, sequence: int) -> bool:
        """Whether an older batch waits out a refusal."""
        return any(deferred < sequence for _, deferred in self._later)

    # --- numbers ---
    def outside(self, expected: int) -> list[int]:
        """Numbers of unsettled batches that are not in a session which expects the sequence `expected` next."""
        return [sequence for sequence in self._unsettled if sequence >= expected]

    def renumber(self, expected: int, outside: Iterable[int]) -> None:
        """Number the batches that are not in the session from `expected` on.

        When first opened, a named session goes on behind its last holder's batches. Later, only batches move whose
        numbers the caller does not know: after a loss, a strong session has no gap, so they take the lost numbers.
        """
        moving = [self._unsettled.pop(sequence) for sequence in sorted(outside)]
        for number, batch in enumerate(moving, expected):
            batch.sequence = number
            self._unsettled[number] = batch
        by, self.next = expected + len(moving) - self.next, expected + len(moving)
        self.low = min(self._unsettled, default=self.next)
        self.first = (self.first or 0) + by


class LinkRoute:
    """What this publisher has on one link."""

    __slots__ = ("asked", "carried", "full", "in_flight", "link", "since_us")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_flight: dict[int, OutBatch] = {}
        self.asked: int | None = None  # our request that it has not answered
        self.since_us = 0  # since when it has owed us something without a break
        self.full: FullReceived | None = None  # why the broker has no room for us, and has said so
        self.carried = False  # batches without acks went out, and it has not said that they arrived

    @property
    def owes(self) -> bool:
        """Whether the broker has something to answer."""
        return bool(self.in_flight) or self.asked is not None

    def _starts_owing(self, now_us: int) -> None:
        if not self.owes:
            self.since_us = now_us

    def ask(self, owner: object, now_us: int) -> int:
        """A request goes out: its number."""
        self._starts_owing(now_us)
        self.asked = self.link.ask(owner)
        return self.asked

    def answered(self, request: int) -> bool:
        """Whether this answers our request, once."""
        if self.asked != request:
            return False
        self.asked = None
        return True

    def carry(self, batch: OutBatch, unanswered: bool, now_us: int) -> None:
        """A batch goes out; an `unanswered` one gets no ack."""
        self.link.spend(_HEADER_BYTES + batch.size)
        self._starts_owing(now_us)
        self.in_flight[batch.sequence] = batch
        self.carried |= unanswered
        batch.goes_out(self.link.number)

    def arrived(self) -> None:
        """The broker answered to something that was sent after all batches."""
        self.carried = False

    def credited(self) -> None:
        """The broker has room in its memory."""
        if self.full is not None and self.full.lane < 0:
            self.full = None


class LinkRoutes:
    """All links of a publisher, and the choice of one for the next batch.

    `pinned`: one link takes all batches for as long as it is there and not full for long.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._routes: dict[int, LinkRoute] = {}
        self._turn = 0
        self._pin = -1
        self.full_us = 0  # when a broker last said that it has no room for us

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[LinkRoute]:
        return iter(list(self._routes.values()))

    def get(self, number: int) -> LinkRoute | None:
        """What is on a link."""
        return self._routes.get(number)

    def add(self, link: Link) -> None:
        """A connection is ready for use."""
        self._routes[link.number] = LinkRoute(link)

    def remove(self, number: int) -> LinkRoute | None:
        """A connection is gone: what was on it."""
        return self._routes.pop(number, None)

    @property
    def asking(self) -> bool:
        """Whether a request is under way."""
        return any(route.asked is not None for route in self._routes.values())

    @property
    def carried(self) -> bool:
        """Whether batches without acks went out that may not have arrived yet."""
        return any(route.carried for route in self._routes.values())

    @property
    def references(self) -> bool:
        """Whether a broker takes batches by reference."""
        return any(route.link.references for route in self._routes.values())

    def forget_requests(self) -> None:
        """Answers that still come change nothing."""
        for route in self._routes.values():
            route.asked = None

    def begin_at(self, turn: int) -> None:
        """Publishers begin at different brokers. What was in flight does not count any more."""
        self._turn = turn
        for route in self._routes.values():
            route.in_flight.clear()

    def landed(self, batch: OutBatch) -> None:
        """The batch has its outcome."""
        if batch.link is not None and (route := self._routes.get(batch.link)) is not None:
            route.in_flight.pop(batch.sequence, None)

    # --- the choice ---
    def choose(self, size: int, by_reference: bool, alone: bool) -> LinkRoute | None:
        """The link for a batch frame of `size` bytes, if one has the credit."""
        return self._pick_pinned(size, by_reference) if self._pinned else self.pick(size, by_reference, alone)

    def pick(self, size: int, by_reference: bool, alone: bool) -> LinkRoute | None:
        """The next link, round-robin, with credit for `size` bytes; a batch that is alone takes the last one again.

        One at a time, batches gain nothing from many brokers, and a broker that has just worked is a quick one.
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
        """The session's own link, if it has credit for `size` bytes; another one once that is gone or long full."""
        if self._pin not in self._routes or (by_reference and not self._routes[self._pin].link.references):
            links = [number for number, route in self._routes.items() if route.link.references or not by_reference]
            self._pin = links[self._turn % len(links)] if links else -1
        route = self._routes.get(self._pin)
        return route if route is not None and route.link.room() >= size else None

    # --- brokers without room ---
    def is_full(self, route: LinkRoute, full: FullReceived, now_us: int) -> None:
        """There has been no room for long, in the broker or in a lane. A pinned session looks for another broker."""
        self.full_us = now_us
        if route.full is None or full.lane >= 0:  # the cause in a lane says more than that memory is full
            route.full = full
        if self._pin == route.link.number and full.lane < 0:
            self._pin, self._turn = -1, self._turn + 1

    def has_room(self, route: LinkRoute) -> None:
        """A batch that came this way is stored: its broker has room, and the lane's disks go on for all brokers."""
        if not self.full_us:
            return
        route.full = None
        for other in self._routes.values():
            if other.full is not None and other.full.lane >= 0:
                other.full = None

    def why_waiting(self, oldest: OutBatch, durable: bool) -> FullReceived | None:
        """Why the oldest batch does not get on, if its broker has said that it is full."""
        if oldest.link is not None:
            full = self._routes[oldest.link].full if oldest.link in self._routes else None
            slow_disks = full is not None and full.lane >= 0 and not durable  # they do not delay this ack
            return None if slow_disks else full
        if oldest.refusals or all(route.link.room() < oldest.size for route in self._routes.values()):
            return next((route.full for route in self._routes.values() if route.full is not None), None)
        return None
