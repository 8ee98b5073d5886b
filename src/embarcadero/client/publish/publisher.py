"""The publisher, sans I/O: calls become frames, frames become settled batches. No clock, no randomness, no sockets.

Theory of operation. Batches get their session sequence and CRC once, in `add`, and keep both for life; only the
header's session and `low` change when a batch is sent again. So sending anything twice is safe: the sequencer answers
DUP_OF. A batch is in exactly one place: queued (a heap by sequence, so the oldest goes first), in flight on one link,
waiting out a refusal, or settled. When a link goes, its batches go back to the queue. When the session is fenced,
nothing is sent until it is open again (continuing the old one), and then everything unsettled is queued again. The same
happens when the whole cluster has restarted with empty memory (a link of a later generation): batches that were acked
as ordered and not yet durable may be lost then. The publisher asks where the topic's ranges (orders 0 and 1: its lanes)
end, before it opens its session again and before any failure or close is final; `take_losses` has the report. A close
or a failure is final only when a broker of the generation that acked the last batch has answered, or the losses are
known. If the caller knows the numbers of its batches (a named session, or `session_seq`), no number ever changes: a
publisher whose acked batches are lost reports them and ends.
A session may be opened at a sequence (`session_at`): its batches are numbered from there whatever is in already, and
keep `low` there, so that work done again is recognised batch by batch. All of it has to fit the sequencer's window.
`doubts` counts copies of a batch that nobody answered. If the publisher has to end, a batch without doubts failed for
certain; one with doubts has an unknown outcome (P8).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from embarcadero.client.link import Link, PublishCore, Silence
from embarcadero.client.publish.batches import (
    REFUSALS,
    AckedBatches,
    Answer,
    LostBatch,
    OutBatch,
    SessionChain,
    beyond_window,
    ended_with,
    loss_unknown,
    merged,
    no_references,
    no_room,
    records_lost,
    refusal,
    undelivered,
)
from embarcadero.errors import (
    Backpressure,
    BadValue,
    EmbarcaderoError,
    LossUnknown,
    OutcomeUnknown,
    RecordsLost,
    Retriable,
    SessionFenced,
    UnknownSession,
    UnknownTopic,
    from_wire,
)
from embarcadero.invariants import invariant
from embarcadero.limits import SESSION_WINDOW
from embarcadero.orders import order_label
from embarcadero.types import NO_INDEX, NO_SESSION, Order, Outcome, Position, Span, StagedBatch
from embarcadero.wire.codec import (
    HEADER_BYTES,
    NO_ACK,
    PACKED_ACK,
    REFERENCE,
    REFERENCE_BODY,
    WANT_DURABLE,
    BatchReference,
    FrameKind,
    batch_header,
    control_frame,
    payload_crc,
    reference_body,
)
from embarcadero.wire.messages import (
    AnyMessage,
    CloseSession,
    DescribeTopic,
    Done,
    Failed,
    GetLanes,
    LanesAre,
    Message,
    NameHeld,
    Opened,
    OpenSession,
    Ping,
    Pong,
    TopicIs,
)
from embarcadero.wire.receiver import FullReceived

_HEADER_BYTES = HEADER_BYTES[FrameKind.BATCH]
_BACKOFF_FIRST_US = 2_000
_BACKOFF_LAST_US = 256_000
NO_MEMORY = FullReceived()
_STORED = frozenset(o.value for o in Outcome if o.stored)


class _Route:
    """What this publisher has on one link."""

    __slots__ = ("asked", "carried", "full", "in_flight", "link", "since_us")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.in_flight: dict[int, OutBatch] = {}
        self.asked: int | None = None  # our open or close request that it has not answered
        self.since_us = 0  # since when it has owed us something without a break
        self.full: FullReceived | None = None  # why the broker has no room for us, and has said so
        self.carried = False  # batches without acks went out, and it has not said that they arrived

    @property
    def owes(self) -> bool:
        return bool(self.in_flight) or self.asked is not None

    def starts_owing(self, now_us: int) -> None:
        if not self.owes:
            self.since_us = now_us


class PublisherCore(PublishCore):
    """One session of one publisher into one topic, over any number of links.

    `durable`: batches are settled when they are durable (ack=2). `replicated`: the topic outlives the fabric.
    `order`: the topic's. `session_order`: what to ask for (None: as the topic). A session that exists under the name
    keeps its order; with `order_required` the publisher fails if that is another one.
    """

    def __init__(
        self,
        *,
        topic: str,
        session_name: str = "",
        window_bytes: int,
        resend_after_us: int,
        delivery_timeout_us: int,
        order: int = int(Order.TOTAL),
        acks: bool = True,
        durable: bool = False,
        replicated: bool = False,
        session_at: int | None = None,
        topic_id: int = 0,
        session_order: int | None = None,
        order_required: bool = False,
    ) -> None:
        super().__init__()
        self._topic_order, self._asked_order, self._order_required = order, session_order, order_required
        self._brokers_order = order <= Order.BROKER  # orders 0 and 1: acks name the lane, and no copy is ever refused
        self._pinned = order == Order.BROKER  # one link for all batches, so that the session's order holds there
        self._pin = -1
        self._strong = order == Order.STRONG  # the session's own order is known once it is open
        self._flags = WANT_DURABLE if durable else 0 if acks or not self._brokers_order else NO_ACK
        self._durable, self._replicated = durable, replicated
        self._remembers = replicated and acks
        self._remembered = AckedBatches()
        self._lost: RecordsLost | None = None
        self._generation = 0  # of the cluster; 0: not told
        self._doubts = AckedBatches()  # acked by an earlier generation; not known yet whether they are lost
        self._lost_some = False  # acked batches were lost, and the session was not opened since
        self._told_full_us = 0  # when a broker last said that it has no room for us
        self._confirmed = False  # a broker answered after the last outcome: the memory that acked everything lives
        self.keeps_numbers = bool(session_name)  # the caller knows which batch has which number
        self.unknown: LossUnknown | None = None  # acked batches of which nobody could be asked before the end
        self.topic, self.topic_id, self._name, self._at = topic, topic_id, session_name, session_at
        self._holder = NO_SESSION  # who has the name, as far as we know: it is taken from nobody else
        self.found: int | None = None  # what the session expected when we opened it
        self._chain = SessionChain()
        self._window_bytes = window_bytes
        self._resend_after_us, self._delivery_timeout_us = resend_after_us, delivery_timeout_us
        self.lane = -1  # not known before the session is open
        self.session = NO_SESSION
        self.first_sequence: int | None = None  # what the first batch gets; known once the session is open
        self.failed: EmbarcaderoError | None = None
        self.closed = False
        self._closing = False
        self._opening = True  # no usable session; nothing may be sent
        self._ask_from_us = 0  # back-off of open and close requests
        self._asks_refused = 0
        self._question: Message | None = None  # the request under way
        self._routes: dict[int, _Route] = {}
        self._turn = 0
        self._low = self._next = 0
        self._unsettled: dict[int, OutBatch] = {}
        self._unsettled_bytes = 0
        self._queue: list[int] = []
        self._later: list[tuple[int, int]] = []  # (when, sequence) of batches that wait out a refusal
        self._settled: list[OutBatch] = []

    # --- what the driver asks for ---
    @property
    def unsettled(self) -> int:
        """How many batches are not settled."""
        return len(self._unsettled)

    def has_room(self, size: int) -> bool:
        """Whether `add` may take a batch of `size` bytes now. One that is larger than the window goes alone."""
        if not self._unsettled or self.failed is not None or self._beyond:
            return True
        return self._next - self._low < SESSION_WINDOW and self._unsettled_bytes + size <= self._window_bytes

    @property
    def _first(self) -> int:
        """The sequence of the first batch that was added, as it is numbered now."""
        return self.first_sequence or 0

    @property
    def _beyond(self) -> bool:
        """Whether a session opened at a sequence has had all batches that can be recognised again."""
        return self._at is not None and self._next - self._first >= SESSION_WINDOW

    def add(self, payload: Any, count: int, partition: int, schema: int, now_us: int) -> OutBatch:
        """Take a batch and stamp it. After a failure it settles at once with that error."""
        size = memoryview(payload).nbytes
        return self._take(OutBatch(self._next, payload, size, count, partition, schema, payload_crc(payload), now_us))

    def add_reference(self, staged: StagedBatch, partition: int, now_us: int) -> OutBatch:
        """Take a batch that names a staged one. It is stamped, sent again and settled like one with a payload."""
        body = reference_body(BatchReference(staged.lane, staged.size, staged.index, staged.topic_id))
        count, schema, crc = staged.count, staged.schema, staged.crc
        return self._take(
            OutBatch(self._next, body, staged.size, count, partition, schema, crc, now_us, reference=staged)
        )

    def _take(self, batch: OutBatch) -> OutBatch:
        now_us = batch.added_us
        invariant(self.has_room(batch.size), "the driver asks has_room before it adds")
        invariant(not self._closing, "nothing is added after close")
        self._next += 1
        self._unsettled[batch.sequence] = batch
        self._unsettled_bytes += batch.size
        if self.failed is not None:
            self._settle(batch, None, ended_with(self.failed, batch))
        elif self._at is not None and self._next - self._first > SESSION_WINDOW:
            self._settle(batch, None, beyond_window(batch))
        else:
            heappush(self._queue, batch.sequence)
            self._pump(now_us)
        return batch

    def close(self, now_us: int) -> None:
        """Close the session once everything is settled; `closed` tells when that is done. A named one stays."""
        self._closing = True
        self._pump(now_us)

    def fail(self, error: EmbarcaderoError) -> None:
        """End the publisher: every unsettled batch ends now. `closed` once it is known which acked ones are lost."""
        if self.failed is not None or self.closed:
            return
        self.failed = error
        for batch in list(self._unsettled.values()):
            self._settle(batch, None, ended_with(error, batch))
        self._queue.clear()
        self._later.clear()
        self._output.clear()
        for route in self._routes.values():
            route.asked = None  # an answer that still comes changes nothing
        self.closed = not self._in_doubt

    def give_up(self, error: EmbarcaderoError) -> None:
        """End now, whatever is not known: unsettled batches with `error`; `unknown` names acked ones in doubt."""
        if self.closed:
            return
        if self._in_doubt and not self._durable:
            self.unknown = loss_unknown(self.topic, [*self._doubts.batches(), *self._remembered.batches()])
        if self._unsettled or self.unknown is None:
            self.fail(error)
        self.closed = True

    @property
    def _in_doubt(self) -> bool:
        """Whether acked batches may be lost with memory without this publisher knowing."""
        unconfirmed = bool(self._remembered) and not self._durable and not self._confirmed
        return bool(self._doubts) or unconfirmed

    def take_settled(self) -> list[OutBatch]:
        """Batches that finished since the last call, in the order of finishing."""
        settled, self._settled = self._settled, []
        return settled

    def take_losses(self) -> RecordsLost | None:
        """What was acked and is lost, as far as nobody was told yet."""
        lost, self._lost = self._lost, None
        return lost

    # --- what the connections tell ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        if 0 < link.generation < self._generation:
            self._abandoned.append(link.number)  # of a cluster that is gone
            return
        if link.generation > self._generation:
            if self._generation and self._replicated:
                self._started_anew()
            self._generation = link.generation
        self._routes[link.number] = _Route(link)
        self._pump(now_us)

    def _started_anew(self) -> None:
        """Earlier connections are to brokers that are gone. Nothing may be sent before the session is open again.

        They are given up: a host that vanished closes none, and nobody would connect there again.
        """
        for route in self._routes.values():
            self._unroute(route)
        self._abandoned += self._routes
        self._routes.clear()
        self._output.clear()
        self._opening = True
        self._ask_from_us = self._asks_refused = 0
        self._doubts.absorb(self._remembered)

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone: what was in flight on it goes out on others, stamped as it is."""
        route = self._routes.pop(conn, None)
        if route is None:
            return
        self._output.pop(conn, None)
        self._unroute(route)
        self._pump(now_us)

    def _unroute(self, route: _Route) -> None:
        for sequence, batch in route.in_flight.items():
            batch.link = None
            heappush(self._queue, sequence)

    def on_credit(self, conn: int, total_bytes: int, now_us: int) -> None:
        """The broker granted bytes (of all publishers on the connection)."""
        if (route := self._routes.get(conn)) is not None:
            route.link.heard(now_us)
            route.link.grant(total_bytes)
            if route.full is not None and route.full.lane < 0:
                route.full = None
            self._pump(now_us)

    def on_full(self, conn: int, now_us: int, full: FullReceived = NO_MEMORY) -> None:
        """There has been no room for long, in the broker or in a lane. What we have waits; nothing fails meanwhile."""
        route = self._routes.get(conn)
        if route is None:
            return
        route.link.heard(now_us)
        if full.lane not in (-1, self.lane):
            return  # of another publisher on the connection
        self._told_full_us = now_us
        if route.full is None or full.lane >= 0:  # the cause in a lane says more than that memory is full
            route.full = full
        if self._pin == conn and full.lane < 0:
            self._pin, self._turn = -1, self._turn + 1

    def _has_room(self, route: _Route) -> None:
        """A batch that came this way is stored: its broker has room, and the lane's disks go on for all brokers."""
        route.full = None
        for other in self._routes.values():
            if other.full is not None and other.full.lane >= 0:
                other.full = None

    def pressure(self) -> Backpressure | None:
        """Why new records can't be taken: the oldest batch does not get on, and its broker has said that it is full."""
        if not self._told_full_us or self._opening or self.failed is not None:
            return None
        oldest = self._unsettled.get(self._low)
        if oldest is None:
            return None
        if oldest.link is not None:
            full = self._routes[oldest.link].full if oldest.link in self._routes else None
            if full is not None and full.lane >= 0 and not self._durable:
                full = None  # slow disks do not delay this ack
        elif oldest.refusals or all(route.link.room() < oldest.size for route in self._routes.values()):
            full = next((route.full for route in self._routes.values() if route.full is not None), None)
        else:
            full = None
        return None if full is None else no_room(self.topic, full)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """An answer to a request of ours; others are ignored."""
        route = self._routes.get(conn)
        if route is None:
            return
        route.link.heard(now_us)
        if route.asked != request:
            return
        route.asked = None
        match message:
            case Opened():
                self._opened(route, message)
            case NameHeld():
                self._name_held(message.session)
            case LanesAre():
                self._lanes_told(message, now_us)
            case TopicIs():
                self._ranges_told(message, now_us)
            case Done():
                self.closed = True
            case Pong():
                route.carried, self._confirmed = False, True
            case Failed():
                self._refused(from_wire(message.code, message.message, message.hint), now_us)
        self._pump(now_us)

    def on_acks(self, conn: int, acks: npt.NDArray[np.void], now_us: int) -> None:
        """Outcomes of batches; those of other sessions are ignored."""
        route = self._routes.get(conn)
        if route is None:
            return
        route.link.heard(now_us)
        if len(acks) > 1:
            acks = acks[(acks["lane"] == self.lane) & (acks["session"] == self.session)]
        for of_lane, of_session, sequence, index, seq, extra, outcome in PACKED_ACK.iter_unpack(acks.data):
            if of_session != self.session or of_lane != self.lane:
                continue
            if (batch := self._unsettled.get(sequence)) is not None:
                lane = extra if self._brokers_order else self.lane
                self._acked(route, batch, outcome, lane, index, seq, now_us, extra)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""
        oldest = self._unsettled.get(self._low)
        if oldest is not None and now_us >= self._deadline_us(oldest):
            usable = [] if self._opening else list(self._routes.values())
            full = sum(route.full is not None for route in usable)
            self.fail(undelivered(self.topic, oldest, self._delivery_timeout_us, len(usable), full))
        for route in list(self._routes.values()):
            if route.owes:
                self._watch(route, now_us)
        while self._later and self._later[0][0] <= now_us:
            heappush(self._queue, heappop(self._later)[1])
        if now_us >= self._ask_from_us:
            self._ask_from_us = 0
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        if self.closed:
            return None
        limit = self._resend_after_us
        times = [route.link.silence_deadline(route.since_us, limit) for route in self._routes.values() if route.owes]
        if (oldest := self._unsettled.get(self._low)) is not None:
            times.append(self._deadline_us(oldest))
        if self._later:
            times.append(self._later[0][0])
        if self._ask_from_us:
            times.append(self._ask_from_us)
        return min(times, default=None)

    def _deadline_us(self, oldest: OutBatch) -> int:
        """When delivery of the oldest batch has failed. Time in which the cluster says it is full does not count."""
        return max(oldest.added_us, self._told_full_us) + self._delivery_timeout_us

    def _watch(self, route: _Route, now_us: int) -> None:
        link = route.link
        silence = link.silence(route.since_us, now_us, self._resend_after_us)
        if silence is Silence.ASK:
            link.pinged(now_us)
            self._write(link.number, control_frame(Ping(), link.ask(self)))
        elif silence is Silence.DEAD:
            self._abandoned.append(link.number)
            self.on_disconnected(link.number, now_us)

    # --- session ---
    def _opened(self, route: _Route, message: Opened) -> None:
        first = self.session == NO_SESSION
        lost = [*message.lost_before, Span(message.lost_from, message.lost_to)]
        renewed = not first and self._chain.resume() is None and not self._brokers_order
        ours = self._brokers_order  # those sessions are numbers only, and each is as good as another
        answer = Answer.OURS if ours else self._chain.opened(message.session, message.index, lost)
        if answer is Answer.STRANGE or (not first and message.lane != self.lane):
            self._disown(route, message)
            return
        if answer is Answer.ANOTHERS:
            self._session_gone()
            return
        if self._remembered and not self._brokers_order:
            self._report(self._remembered.take(self.lane, lost))  # of a cluster that does not number its generations
        lost_some, self._lost_some = self._lost_some, False
        self.lane, self.session = message.lane, message.session
        if not self._order_is(message.order or self._topic_order):
            return
        self._opening = False
        self._ask_from_us = self._asks_refused = 0
        if first:
            self.first_sequence, self.found = 0, message.expected
        if first:
            self._go_on(message.expected if self._at is None else self._at, list(self._unsettled))
        elif self.keeps_numbers and not self._brokers_order:
            self._check_numbers(message.expected, lost_some, renewed)
        elif renewed:
            self._go_on(message.expected, list(self._unsettled))
        elif self._strong:
            self._go_on(message.expected, self._outside(message.expected))
        self._turn = message.session  # publishers begin at different brokers
        for each in self._routes.values():
            each.in_flight.clear()
        for batch in self._unsettled.values():
            batch.link = None
        self._later.clear()
        self._queue = list(self._unsettled)
        heapify(self._queue)

    def _order_is(self, order: int) -> bool:
        """Learn the session's order. False: it is not the one that the caller insists on, and the publisher ends."""
        self._strong = order == Order.STRONG
        if not self._order_required or order == self._asked_order:
            return True
        what = f"session {self._name!r} into {self.topic!r}" if self._name else f"a session into {self.topic!r}"
        self.fail(
            BadValue(
                f"{what} has order {order_label(order)}, not {order_label(self._asked_order or 0)}",
                "a session keeps the order that it was first opened with: leave `order` out, or use another session",
            )
        )
        return False

    def _name_held(self, holder: int) -> None:
        """Who has the name is fenced if it still has it when we ask again, unless it came after us."""
        if self._chain.is_older_than(holder):
            self._fenced()
        self._holder = holder

    def _check_numbers(self, expected: int, lost_some: bool, renewed: bool) -> None:
        """End a session whose acked batches are lost: numbers that the caller knows never move into their places."""
        outside = self._outside(expected)
        hole = expected + len(outside) < self._next and (self._strong or renewed)
        if lost_some or hole:
            for sequence in outside:
                self._unsettled[sequence].doubts = 0  # the session has none of these
            name = f"session {self._name!r}" if self._name else "this session"
            again = "open the session again, and publish from next_session_seq() on"
            if self._at is not None:
                again = f"open the session at {self._at} again, and send all batches again"
            self.fail(
                SessionFenced(
                    f"acked batches of {name} into {self.topic!r} were lost with the cluster's memory: the session "
                    f"goes on at {expected}, this publisher was at {self._next}",
                    again,
                )
            )

    def _outside(self, expected: int) -> list[int]:
        """Numbers of unsettled batches that are not in a session which goes on at `expected`."""
        return [sequence for sequence in self._unsettled if sequence >= expected]

    def _go_on(self, expected: int, outside: list[int]) -> None:
        """Number the batches that are not in the session from `expected` on.

        When first opened, a named session goes on behind its last holder's batches. Later, only batches move whose
        numbers the caller does not know: after a loss, a strong session has no gap, so they take the lost numbers.
        """
        moving = [self._unsettled.pop(sequence) for sequence in sorted(outside)]
        for number, batch in enumerate(moving, expected):
            batch.sequence = number
            self._unsettled[number] = batch
        by, self._next = expected + len(moving) - self._next, expected + len(moving)
        self._low = min(self._unsettled, default=self._next)
        self.first_sequence = (self.first_sequence or 0) + by

    def _disown(self, route: _Route, message: Opened) -> None:
        """A session that is not the continuation of ours: give it back, and end."""
        self._fenced()
        self._write(
            route.link.number,
            control_frame(CloseSession(lane=message.lane, session=message.session), route.link.ask(self)),
        )

    def _fenced(self) -> None:
        self.fail(
            SessionFenced(
                f"the session of this publisher into {self.topic!r} was taken over or forgotten",
                "another publisher opened the same session name, or this one paused for too long; open a new one",
            )
        )

    def _refused(self, error: EmbarcaderoError, now_us: int) -> None:
        if isinstance(error, Retriable | OutcomeUnknown):
            self._back_off(now_us)
        elif isinstance(self._question, GetLanes | DescribeTopic) and not isinstance(error, UnknownTopic):
            self._back_off(now_us)  # a store that fails says nothing about what is lost
        elif isinstance(self._question, GetLanes | DescribeTopic):
            self._doubts = AckedBatches()  # the topic is gone
        elif not self._opening:
            self.closed = True  # it was the close; a session that is gone needs none
        elif self.session == NO_SESSION or not isinstance(error, UnknownSession | SessionFenced):
            self.fail(error)
        elif isinstance(error, UnknownSession):
            self._session_gone()
        else:
            self._fenced()

    def _session_gone(self) -> None:
        """Look for the one before it (the next request asks for that), or end."""
        if not (self._replicated and self._chain.gone()):
            self._fenced()

    def _back_off(self, now_us: int) -> None:
        self._asks_refused += 1
        self._ask_from_us = now_us + _backoff_us(self._asks_refused)

    # --- losses ---
    def _report(self, batches: list[LostBatch]) -> None:
        self._lost_some |= bool(batches)
        if batches:
            self._lost = merged(self._lost, records_lost(self.topic, batches, self._durable))

    def _ranges_told(self, message: TopicIs, now_us: int) -> None:
        """The topic's ranges: acked batches of an earlier generation are in one, between two, or not recovered yet."""
        replaced = self.topic_id and message.topic.id and message.topic.id != self.topic_id
        if replaced or message.topic.lane != self.lane:
            self._doubts = AckedBatches()  # the topic is gone; another one has its name
        self._report(self._doubts.decide(self.lane, message.ranges))
        self._losses_told(now_us)

    def _lanes_told(self, message: LanesAre, now_us: int) -> None:
        """Where the lanes of an earlier generation end. One that is still open has not been recovered yet.

        Nor has one that was closed before all memory was lost, and of which not all was durable.
        """
        lanes = {lane.lane: lane for lane in message.lanes}
        for number in self._doubts.lanes() - set(message.unsure):
            lane = lanes.get(number)
            if lane is not None and lane.end is None:
                continue
            if lane is not None and lane.end is not None:
                kept = lane.end if lane.kept is None else min(lane.kept, lane.end)
                self._report(self._doubts.take(number, [Span(kept, NO_INDEX)]))
            self._doubts.forget(number)
        self._losses_told(now_us)

    def _losses_told(self, now_us: int) -> None:
        if self._doubts:
            self._back_off(now_us)
        else:
            self._asks_refused = 0

    def _ask_for_losses(self, now_us: int) -> None:
        """Ask which of the doubtful batches are lost, independently of any session."""
        if self._brokers_order:
            self._ask(GetLanes(lane=self.lane, above=min(self._doubts.lanes()) - 1), now_us)
        else:
            self._ask(DescribeTopic(name=self.topic), now_us)

    def _ask(self, message: Message, now_us: int) -> None:
        """Send a request unless one is under way or the back-off is not over."""
        if now_us < self._ask_from_us or any(route.asked is not None for route in self._routes.values()):
            return
        if (route := self._pick(0)) is not None:
            route.starts_owing(now_us)
            route.asked, self._question = route.link.ask(self), message
            self._write(route.link.number, control_frame(message, route.asked))

    # --- sending and settling ---
    def _pump(self, now_us: int) -> None:
        """Do all that can be done now."""
        if self.closed:
            return
        if not self._opening and self.failed is None:
            self._send(now_us)
        ending = self.failed is not None or (self._closing and not self._unsettled)
        if self._doubts and (ending or not (self._brokers_order and self._opening)):
            self._ask_for_losses(now_us)  # orders 0 and 1 open a session meanwhile: it has another lane
        elif self._opening and not ending:
            resume = self._chain.resume()  # None: there is nothing to continue
            holder = self._holder if self._name and resume is None else None
            lane = None if self.lane < 0 else self.lane
            ask = OpenSession(
                topic=self.topic, topic_id=self.topic_id, name=self._name, resume=resume, at=self._at, holder=holder,
                lane=lane, order=self._asked_order,
            )  # fmt: skip
            self._ask(ask, now_us)
        elif ending:
            self._end(now_us)

    def _end(self, now_us: int) -> None:
        """Everything has its outcome: close the session, or see that the memory lives that holds the acked batches."""
        if any(route.carried for route in self._routes.values()):
            self._ask_whether_arrived(now_us)
        elif self.failed is None and not self._opening and not self._name:
            self._ask(CloseSession(lane=self.lane, session=self.session), now_us)
        elif self._in_doubt:
            self._ask(Ping(), now_us)
        elif self.failed is not None or not any(route.asked is not None for route in self._routes.values()):
            self.closed = True  # there is no session to close, or one that the next holder of its name continues

    def _send(self, now_us: int) -> None:
        while self._queue:
            batch = self._unsettled.get(self._queue[0])
            if batch is None or batch.link is not None:  # settled, or sent again, since it was queued
                heappop(self._queue)
                continue
            by_reference = batch.reference is not None
            if by_reference and self._routes and not any(route.link.references for route in self._routes.values()):
                self._settle(batch, None, no_references(batch))
                continue
            route = (self._pick_pinned if self._pinned else self._pick)(_HEADER_BYTES + batch.size, by_reference)
            if route is None or (self._pinned and any(later < batch.sequence for _, later in self._later)):
                return
            heappop(self._queue)
            self._transmit(route, batch, now_us)

    def _transmit(self, route: _Route, batch: OutBatch, now_us: int) -> None:
        link = route.link
        link.spend(_HEADER_BYTES + batch.size)
        route.starts_owing(now_us)
        route.in_flight[batch.sequence] = batch
        batch.link, batch.sent = link.number, True
        batch.doubts += 1
        low = self._low if self._at is None else self._at
        length, flags = batch.size, self._flags
        if batch.reference is not None:
            length, flags = REFERENCE_BODY.itemsize, flags | REFERENCE
        header = batch_header(
            session_seq=batch.sequence, low=low, lane=self.lane, session=self.session, count=batch.count,
            crc=batch.crc, length=length, partition=batch.partition, schema=batch.schema, flags=flags,
        )  # fmt: skip
        self._write(link.number, header)
        self._write(link.number, batch.payload)
        if self._flags & NO_ACK:
            route.carried = True
            self._settle(batch, None, None)

    def _pick(self, size: int, by_reference: bool = False) -> _Route | None:
        """The next link, round-robin, with credit for `size` bytes; a batch that is alone takes the last one again.

        One at a time, batches gain nothing from many brokers, and a broker that has just worked is a quick one.
        """
        routes = list(self._routes.values())
        alone = len(self._unsettled) == 1 and not self._flags & NO_ACK  # without acks nobody knows whether it is
        first = self._turn - alone
        for step in range(len(routes)):
            at = (first + step) % len(routes)
            if routes[at].link.room() >= size and (routes[at].link.references or not by_reference):
                self._turn = at + 1
                return routes[at]
        return None

    def _pick_pinned(self, size: int, by_reference: bool = False) -> _Route | None:
        """The session's own link, if it has credit for `size` bytes; another one once that is gone or long full."""
        if self._pin not in self._routes or (by_reference and not self._routes[self._pin].link.references):
            links = [number for number, route in self._routes.items() if route.link.references or not by_reference]
            self._pin = links[self._turn % len(links)] if links else -1
        route = self._routes.get(self._pin)
        return route if route is not None and route.link.room() >= size else None

    def _ask_whether_arrived(self, now_us: int) -> None:
        """Batches without acks are gone from here only when their brokers answer to something sent after them."""
        for route in self._routes.values():
            if route.carried and route.asked is None:
                route.starts_owing(now_us)
                route.asked = route.link.ask(self)
                self._write(route.link.number, control_frame(Ping(), route.asked))

    def _acked(
        self, route: _Route, batch: OutBatch, outcome: int, lane: int, index: int, seq: int, now_us: int, extra: int
    ) -> None:
        if outcome in _STORED:
            position = None if index == NO_INDEX else Position(lane, index, seq)
            if position is not None and self._remembers:
                self._remembered.add(lane, index, seq, batch.count)
            self._settle(batch, position, None)
            if self._told_full_us:
                self._has_room(route)
            return
        if route.in_flight.pop(batch.sequence, None) is None:
            return  # not an answer to a copy that counts
        batch.link, verdict = None, Outcome(outcome)
        batch.doubts -= verdict is not Outcome.UNDECIDED
        if verdict is Outcome.FENCED or (verdict is Outcome.UNKNOWN_SESSION and self._replicated):
            self._opening = True  # once open again, everything unsettled is queued
        elif verdict is Outcome.UNKNOWN_SESSION:
            self.fail(
                UnknownSession(f"the session of this publisher into {self.topic!r} is gone", "open a new publisher")
            )
        elif verdict in REFUSALS:
            error = refusal(verdict, batch, extra)
            self._settle(batch, None, error)
            if verdict is Outcome.NO_REFERENCE and (self._strong or self._pinned):
                self.fail(error)  # what follows would wait for this batch, and then pass over it
        else:
            batch.refusals += 1
            heappush(self._later, (now_us + _backoff_us(batch.refusals), batch.sequence))

    def _settle(self, batch: OutBatch, position: Position | None, error: EmbarcaderoError | None) -> None:
        del self._unsettled[batch.sequence]
        self._unsettled_bytes -= batch.size
        if batch.link is not None and (route := self._routes.get(batch.link)) is not None:
            route.in_flight.pop(batch.sequence, None)
        batch.link, batch.position, batch.error, batch.done = None, position, error, True
        self._settled.append(batch)
        while self._low < self._next and self._low not in self._unsettled:
            self._low += 1


def _backoff_us(refusals: int) -> int:
    """Wait longer after each refusal, up to a bound."""
    return min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(refusals - 1, 16))
