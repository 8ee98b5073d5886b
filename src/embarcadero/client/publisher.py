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
`doubts` counts copies of a batch that were not answered. If the publisher has to end, a batch without doubts failed for
certain; one with doubts has an unknown outcome (P8).

The parts. `TRANSITIONS` is the life of a publisher. The `BatchWindow` has the batches, `LinkRoutes` the links, the
`PublisherSession` how the session is opened, `Losses` what may be lost of acked batches, and `PublisherRequests` the
one request under way.
"""

from __future__ import annotations

from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from embarcadero.client.batches import (
    REFUSALS,
    BatchWindow,
    LinkRoute,
    LinkRoutes,
    OutBatch,
    beyond_window,
    ended_with,
    no_references,
    no_room,
    refusal,
    undelivered,
)
from embarcadero.client.link import Link, PublishCore
from embarcadero.client.session import Answer, Losses, PublisherSession, PublisherSettings
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
    invariant,
)
from embarcadero.orders import order_label
from embarcadero.types import NO_INDEX, NO_SESSION, Outcome, Position, SessionKey, Span, StagedBatch
from embarcadero.wire.codec import (
    HEADER_BYTES,
    NO_ACK,
    PACKED_ACK,
    REFERENCE,
    REFERENCE_BODY,
    BatchReference,
    FrameKind,
    FullReceived,
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
    Ping,
    Pong,
    TopicIs,
)

_HEADER_BYTES = HEADER_BYTES[FrameKind.BATCH]
_BACKOFF_FIRST_US = 2_000
_BACKOFF_LAST_US = 256_000
NO_MEMORY = FullReceived()
_STORED = frozenset(o.value for o in Outcome if o.stored)


class PublisherState(Enum):
    """What a publisher can do now. Batches go out while its session is `usable`."""

    OPENING = "opening"  # the first session is not open yet: batches wait
    OPEN = "open"
    FENCED = "fenced"  # the session was fenced, or the cluster restarted: batches wait until it is continued
    CLOSING = "closing"  # nothing more is added; the session is open
    CLOSING_FENCED = "closing, fenced"  # nothing more is added; what is left waits until the session is open
    FAILED = "failed"  # every batch has its outcome; it is not known yet which acked ones are lost
    CLOSED = "closed"

    @property
    def usable(self) -> bool:
        """Whether the session is open."""
        return self in (PublisherState.OPEN, PublisherState.CLOSING)

    @property
    def closing(self) -> bool:
        """Whether the caller has closed it."""
        return self in (PublisherState.CLOSING, PublisherState.CLOSING_FENCED)


class PublisherEvent(Enum):
    """What changes the state of a publisher."""

    OPENED = "the session is open"
    FENCED = "the session has to be continued before anything more is sent"
    CLOSE = "the caller closes"
    FAIL = "the publisher fails"
    END = "nothing is left to do, or to learn"


_S, _E = PublisherState, PublisherEvent
TRANSITIONS: Final = MappingProxyType({
    _S.OPENING:        {_E.OPENED: _S.OPEN,    _E.CLOSE: _S.CLOSING_FENCED, _E.FAIL: _S.FAILED, _E.END: _S.CLOSED},
    _S.OPEN:           {_E.FENCED: _S.FENCED,  _E.CLOSE: _S.CLOSING,        _E.FAIL: _S.FAILED, _E.END: _S.CLOSED},
    _S.FENCED:         {_E.OPENED: _S.OPEN,    _E.CLOSE: _S.CLOSING_FENCED, _E.FAIL: _S.FAILED, _E.END: _S.CLOSED},
    _S.CLOSING:        {_E.FENCED: _S.CLOSING_FENCED,                       _E.FAIL: _S.FAILED, _E.END: _S.CLOSED},
    _S.CLOSING_FENCED: {_E.OPENED: _S.CLOSING,                              _E.FAIL: _S.FAILED, _E.END: _S.CLOSED},
    _S.FAILED:         {                                                                        _E.END: _S.CLOSED},
    _S.CLOSED:         {},
})  # fmt: skip
"""What each event makes of a publisher. An event that is not listed changes nothing."""


class PublisherRequests:
    """The request that is under way, one at a time, and the back-off after refusals."""

    def __init__(self) -> None:
        self.question: Message | None = None
        self.from_us = 0
        self._refusals = 0

    def ask(self, message: Message) -> None:
        """A request goes out."""
        self.question = message

    @property
    def about_losses(self) -> bool:
        """Whether the request asks which acked batches are lost."""
        return isinstance(self.question, GetLanes | DescribeTopic)

    def back_off(self, now_us: int) -> None:
        """Wait longer after each refusal, up to a bound."""
        self._refusals += 1
        self.from_us = now_us + _backoff_us(self._refusals)

    def succeeded(self) -> None:
        """The next back-off is a short one."""
        self._refusals = 0

    def begin_again(self) -> None:
        """Ask at once."""
        self.from_us = self._refusals = 0

    def on_timer(self, now_us: int) -> None:
        """Forget a back-off that is over."""
        if now_us >= self.from_us:
            self.from_us = 0


class PublisherCore(PublishCore):
    """One session of one publisher into one topic, over any number of links."""

    def __init__(self, settings: PublisherSettings) -> None:
        super().__init__()
        self._settings = settings
        self._state = PublisherState.OPENING
        self._session = PublisherSession(settings)
        self._window = BatchWindow(settings.window_bytes, settings.session_at)
        self._routes = LinkRoutes(settings.pinned)
        self._losses = Losses(settings.topic, durable=settings.durable, remembers=settings.replicated and settings.acks)
        self._requests = PublisherRequests()
        self._generation = 0  # of the cluster; 0: not known
        self._flags = settings.flags
        self._by_brokers = settings.ordered_by_brokers
        self.failed: EmbarcaderoError | None = None
        self.unknown: LossUnknown | None = None  # acked batches of which no broker could be asked before the end

    def _happens(self, event: PublisherEvent) -> None:
        self._state = TRANSITIONS[self._state].get(event, self._state)

    # --- what the driver asks for ---
    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._settings.topic

    @property
    def topic_id(self) -> int:
        """The id of the topic, if it is known."""
        return self._settings.topic_id

    @property
    def lane(self) -> int:
        """The lane of the session; -1 before it is open."""
        return self._session.lane

    @property
    def session(self) -> int:
        """The handle of the session."""
        return self._session.handle

    @property
    def key(self) -> SessionKey:
        """The session that acks name."""
        return SessionKey(self._session.lane, self._session.handle)

    @property
    def closed(self) -> bool:
        """Whether it has ended, and nothing more will be learned."""
        return self._state is PublisherState.CLOSED

    @property
    def first_sequence(self) -> int | None:
        """The sequence of the first batch, as it is numbered now; known once the session is open."""
        return self._window.first

    @property
    def found(self) -> int | None:
        """The sequence that the session expected when this publisher opened it."""
        return self._session.found

    @property
    def unsettled(self) -> int:
        """How many batches are not settled."""
        return len(self._window)

    def has_room(self, size: int) -> bool:
        """Whether `add` may take a batch of `size` bytes now. One that is larger than the window goes alone."""
        return self.failed is not None or self._window.has_room(size)

    def keep_numbers(self) -> None:
        """The caller goes by the numbers of its batches from now on: they never change."""
        self._session.keep_numbers()

    def add(self, payload: Any, count: int, partition: int, schema: int, now_us: int, token: Any = None) -> OutBatch:
        """Take a batch and stamp it. After a failure it settles at once with that error."""
        size, crc = memoryview(payload).nbytes, payload_crc(payload)
        return self._take(
            OutBatch(self._window.next, payload, size, count, partition, schema, crc, now_us, token=token)
        )

    def add_reference(self, staged: StagedBatch, partition: int, now_us: int, token: Any = None) -> OutBatch:
        """Take a batch that names a staged one. It is stamped, sent again and settled like one with a payload."""
        body = reference_body(BatchReference(staged.lane, staged.size, staged.index, staged.topic_id))
        return self._take(
            OutBatch(
                self._window.next,
                body,
                staged.size,
                staged.count,
                partition,
                staged.schema,
                staged.crc,
                now_us,
                token=token,
                reference=staged,
            )
        )

    def _take(self, batch: OutBatch) -> OutBatch:
        invariant(self.has_room(batch.size), "the driver asks has_room before it adds")
        invariant(not self._state.closing, "nothing is added after close")
        recognised = self._window.add(batch)
        if self.failed is not None:
            self._settle(batch, None, ended_with(self.failed, batch))
        elif not recognised:
            self._settle(batch, None, beyond_window(batch))
        else:
            self._window.queue(batch)
            self._pump(batch.added_us)
        return batch

    def close(self, now_us: int) -> None:
        """Close the session once everything is settled; `closed` tells when that is done. A named one stays."""
        self._happens(PublisherEvent.CLOSE)
        self._pump(now_us)

    def fail(self, error: EmbarcaderoError) -> None:
        """End the publisher: every unsettled batch ends now. `closed` once it is known which acked ones are lost."""
        if self.failed is not None or self.closed:
            return
        self.failed = error
        self._happens(PublisherEvent.FAIL)
        for batch in self._window.unsettled():
            self._settle(batch, None, ended_with(error, batch))
        self._window.queue_none()
        self._output.clear()
        self._routes.forget_requests()
        if not self._losses.in_doubt:
            self._happens(PublisherEvent.END)

    def give_up(self, error: EmbarcaderoError) -> None:
        """End now, whatever is not known: unsettled batches with `error`; `unknown` names acked ones in doubt."""
        if self.closed:
            return
        self.unknown = self._losses.unknown()
        if self.unsettled or self.unknown is None:
            self.fail(error)
        self._happens(PublisherEvent.END)

    def take_settled(self) -> list[OutBatch]:
        """Batches that finished since the last call, in the order of finishing."""
        return self._window.take_settled()

    def take_losses(self) -> RecordsLost | None:
        """What was acked and is lost, as far as no caller has heard of it."""
        return self._losses.take_report()

    def pressure(self) -> Backpressure | None:
        """Why new records can't be taken: the oldest batch does not get on, and its broker has said that it is full."""
        if not self._routes.full_us or not self._state.usable or (oldest := self._window.oldest) is None:
            return None
        full = self._routes.why_waiting(oldest, self._settings.durable)
        return None if full is None else no_room(self.topic, full)

    # --- what the connections tell ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        if 0 < link.generation < self._generation:
            self._abandoned.append(link.number)  # of a cluster that is gone
            return
        if link.generation > self._generation:
            if self._generation and self._settings.replicated:
                self._started_anew()
            self._generation = link.generation
        self._routes.add(link)
        self._pump(now_us)

    def _started_anew(self) -> None:
        """Earlier connections are to brokers that are gone. Nothing may be sent before the session is open again.

        They are given up: a host that vanished closes none, and no keeper would connect there again.
        """
        for route in self._routes:
            self._unroute(route)
            self._abandoned.append(route.link.number)
        self._output.clear()
        self._happens(PublisherEvent.FENCED)
        self._requests.begin_again()
        self._losses.doubt_all()

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection is gone: what was in flight on it goes out on others, stamped as it is."""
        if (route := self._routes.get(conn)) is not None:
            self._output.pop(conn, None)
            self._unroute(route)
            self._pump(now_us)

    def _unroute(self, route: LinkRoute) -> None:
        self._routes.remove(route.link.number)
        for batch in route.in_flight.values():
            batch.comes_back()
            self._window.queue(batch)

    def on_credit(self, conn: int, total_bytes: int, now_us: int) -> None:
        """The broker granted bytes (of all publishers on the connection)."""
        if (route := self._routes.get(conn)) is not None:
            route.link.heard(now_us)
            route.link.grant(total_bytes)
            route.credited()
            self._pump(now_us)

    def on_full(self, conn: int, now_us: int, full: FullReceived = NO_MEMORY) -> None:
        """There has been no room for long, in the broker or in a lane. What we have waits; nothing fails meanwhile."""
        if (route := self._routes.get(conn)) is None:
            return
        route.link.heard(now_us)
        if full.lane in (-1, self.lane):  # else of another publisher on the connection
            self._routes.is_full(route, full, now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """An answer to a request of ours; others are ignored."""
        route = self._routes.get(conn)
        if route is None:
            return
        route.link.heard(now_us)
        if not route.answered(request):
            return
        match message:
            case Opened():
                self._opened(route, message)
            case NameHeld():
                if not self._session.held_by(message.session):
                    self._fenced()
            case LanesAre():
                self._losses.decide_by_lanes(message)
                self._losses_known(now_us)
            case TopicIs():
                self._ranges_known(message, now_us)
            case Done():
                self._happens(PublisherEvent.END)
            case Pong():
                route.arrived()
                self._losses.confirm()
            case Failed():
                self._refused(from_wire(message.code, message.message, message.hint), now_us)
        self._pump(now_us)

    def on_acks(self, conn: int, acks: npt.NDArray[np.void], now_us: int) -> None:
        """Outcomes of batches; those of other sessions are ignored."""
        route = self._routes.get(conn)
        if route is None:
            return
        route.link.heard(now_us)
        lane, session = self.key
        if len(acks) > 1:
            acks = acks[(acks["lane"] == lane) & (acks["session"] == session)]
        for of_lane, of_session, sequence, index, seq, extra, outcome in PACKED_ACK.iter_unpack(acks.data):
            if of_session != session or of_lane != lane or (batch := self._window.get(sequence)) is None:
                continue
            if outcome in _STORED:
                stored_in = extra if self._by_brokers else lane
                self._stored(route, batch, None if index == NO_INDEX else Position(stored_in, index, seq))
            elif route.in_flight.pop(batch.sequence, None) is not None:  # else it answers a copy that does not count
                self._not_stored(batch, Outcome(outcome), extra, now_us)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do what is due; calling it early is harmless."""
        oldest = self._window.oldest
        if oldest is not None and now_us >= self._deadline_us(oldest):
            usable = list(self._routes) if self._state.usable else []
            full = sum(route.full is not None for route in usable)
            self.fail(undelivered(self.topic, oldest, self._settings.delivery_timeout_us, len(usable), full))
        for route in self._routes:
            if route.owes:
                silence = route.link.silence(route.since_us, now_us, self._settings.resend_after_us)
                self._judge(route.link, silence, self, now_us)
        self._window.queue_due(now_us)
        self._requests.on_timer(now_us)
        self._pump(now_us)

    def next_timer_us(self) -> int | None:
        """When `on_timer` has something to do, unless something else happens before."""
        if self.closed:
            return None
        limit = self._settings.resend_after_us
        times = [route.link.silence_deadline(route.since_us, limit) for route in self._routes if route.owes]
        if (oldest := self._window.oldest) is not None:
            times.append(self._deadline_us(oldest))
        if (due_us := self._window.due_us) is not None:
            times.append(due_us)
        if self._requests.from_us:
            times.append(self._requests.from_us)
        return min(times, default=None)

    def _deadline_us(self, oldest: OutBatch) -> int:
        """When delivery of the oldest batch has failed. Time in which the cluster says it is full does not count."""
        return max(oldest.added_us, self._routes.full_us) + self._settings.delivery_timeout_us

    # --- session ---
    def _opened(self, route: LinkRoute, message: Opened) -> None:
        session, expected = self._session, message.expected
        first = session.handle == NO_SESSION
        lost = [*message.lost_before, Span(message.lost_from, message.lost_to)]
        renewed = not first and session.chain.resume() is None and not self._by_brokers
        ours = self._by_brokers  # those sessions are numbers only, and each is as good as another
        answer = Answer.OURS if ours else session.chain.opened(message.session, message.index, lost)
        if answer is Answer.STRANGE or (not first and message.lane != session.lane):
            self._disown(route, message)
            return
        if answer is Answer.ANOTHERS:
            self._session_gone()
            return
        if not self._by_brokers:
            self._losses.lost_in(session.lane, lost)  # of a cluster that does not number its generations
        lost_some = self._losses.take_lost_some()
        session.opened(message)
        if not self._order_is(message.order or self._settings.order):
            return
        self._happens(PublisherEvent.OPENED)
        self._requests.begin_again()
        if first:
            at = self._settings.session_at
            self._window.renumber(expected if at is None else at, self._window.outside(0))
        elif session.keeps_numbers and not self._by_brokers:
            self._check_numbers(expected, lost_some, renewed)
        elif renewed:
            self._window.renumber(expected, self._window.outside(0))
        elif session.strong:
            self._window.renumber(expected, self._window.outside(expected))
        self._routes.begin_at(message.session)
        self._window.queue_all()

    def _order_is(self, order: int) -> bool:
        """Whether the session has the order that the caller insists on. If not, the publisher ends."""
        asked = self._settings
        if not asked.order_required or order == asked.session_order:
            return True
        what = f"session {asked.session_name!r}" if asked.session_name else "a session"
        wanted = order_label(asked.session_order or 0)
        self.fail(
            BadValue(
                f"{what} into {self.topic!r} has order {order_label(order)}, not {wanted}",
                "a session keeps the order that it was first opened with: leave `order` out, or use another session",
            )
        )
        return False

    def _check_numbers(self, expected: int, lost_some: bool, renewed: bool) -> None:
        """End a session whose acked batches are lost: numbers that the caller knows never move into their places."""
        outside = self._window.outside(expected)
        hole = expected + len(outside) < self._window.next and (self._session.strong or renewed)
        if lost_some or hole:
            for batch in self._window.unsettled():
                if batch.sequence >= expected:
                    batch.never_stored()
            again = "open the session again, and publish from next_session_seq() on"
            if self._settings.session_at is not None:
                again = f"open the session at {self._settings.session_at} again, and send all batches again"
            self.fail(
                SessionFenced(
                    f"acked batches of {self._session.label} into {self.topic!r} were lost with the cluster's memory: "
                    f"the session goes on at {expected}, this publisher was at {self._window.next}",
                    again,
                )
            )

    def _disown(self, route: LinkRoute, message: Opened) -> None:
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
            self._requests.back_off(now_us)
        elif self._requests.about_losses and not isinstance(error, UnknownTopic):
            self._requests.back_off(now_us)  # a store that fails says nothing about what is lost
        elif self._requests.about_losses:
            self._losses.forget_doubts()
        elif self._state.usable or self._state is PublisherState.FAILED:
            self._happens(PublisherEvent.END)  # it was the close; a session that is gone needs none
        elif self.session == NO_SESSION or not isinstance(error, UnknownSession | SessionFenced):
            self.fail(error)
        elif isinstance(error, UnknownSession):
            self._session_gone()
        else:
            self._fenced()

    def _session_gone(self) -> None:
        """Look for the one before it (the next request asks for that), or end."""
        if not self._session.gone():
            self._fenced()

    # --- losses ---
    def _ranges_known(self, message: TopicIs, now_us: int) -> None:
        """Compare doubtful batches with the ranges of the topic, unless it is gone and another one has its name."""
        replaced = self.topic_id and message.topic.id and message.topic.id != self.topic_id
        if replaced or message.topic.lane != self.lane:
            self._losses.forget_doubts()
        self._losses.decide_by_ranges(self.lane, message.ranges)
        self._losses_known(now_us)

    def _losses_known(self, now_us: int) -> None:
        if self._losses.doubts:
            self._requests.back_off(now_us)
        else:
            self._requests.succeeded()

    def _ask_for_losses(self, now_us: int) -> None:
        """Ask which of the doubtful batches are lost, independently of any session."""
        if self._by_brokers:
            self._ask(GetLanes(lane=self.lane, above=min(self._losses.doubts.lanes()) - 1), now_us)
        else:
            self._ask(DescribeTopic(name=self.topic), now_us)

    def _ask(self, message: Message, now_us: int) -> None:
        """Send a request unless one is under way or the back-off is not over."""
        if now_us < self._requests.from_us or self._routes.asking:
            return
        if (route := self._routes.pick(0, False, self._alone)) is not None:
            self._requests.ask(message)
            self._write(route.link.number, control_frame(message, route.ask(self, now_us)))

    # --- sending and settling ---
    @property
    def _alone(self) -> bool:
        """Whether one batch is under way. Without acks that is not known."""
        return len(self._window) == 1 and not self._flags & NO_ACK

    def _pump(self, now_us: int) -> None:
        """Do all that can be done now."""
        if self.closed:
            return
        if self._state.usable:
            self._send(now_us)
        usable = self._state.usable
        ending = self._state is PublisherState.FAILED or (self._state.closing and not self._window)
        if self._losses.doubts and (ending or usable or not self._by_brokers):
            self._ask_for_losses(now_us)  # orders 0 and 1 open a session meanwhile: it has another lane
        elif ending:
            self._end(now_us)
        elif not usable:
            self._ask(self._session.request(), now_us)

    def _end(self, now_us: int) -> None:
        """Everything has its outcome: close the session, or see that the memory lives that holds the acked batches."""
        if self._routes.carried:
            self._ask_whether_arrived(now_us)
        elif self._state.usable and not self._settings.session_name:
            self._ask(CloseSession(lane=self.lane, session=self.session), now_us)
        elif self._losses.in_doubt:
            self._ask(Ping(), now_us)
        elif self.failed is not None or not self._routes.asking:
            self._happens(PublisherEvent.END)  # no session is to be closed, or the next holder of its name continues it

    def _send(self, now_us: int) -> None:
        while (batch := self._window.queued()) is not None:
            by_reference = batch.reference is not None
            if by_reference and self._routes and not self._routes.references:
                self._settle(batch, None, no_references(batch))
                continue
            route = self._routes.choose(_HEADER_BYTES + batch.size, by_reference, self._alone)
            if route is None or (self._settings.pinned and self._window.defers_before(batch.sequence)):
                return
            self._window.take_queued()
            self._transmit(route, batch, now_us)

    def _transmit(self, route: LinkRoute, batch: OutBatch, now_us: int) -> None:
        unanswered = bool(self._flags & NO_ACK)
        route.carry(batch, unanswered, now_us)
        length, flags = batch.size, self._flags
        if batch.reference is not None:
            length, flags = REFERENCE_BODY.itemsize, flags | REFERENCE
        at = self._settings.session_at
        header = batch_header(
            session_seq=batch.sequence,
            low=self._window.low if at is None else at,
            lane=self.lane,
            session=self.session,
            count=batch.count,
            crc=batch.crc,
            length=length,
            partition=batch.partition,
            schema=batch.schema,
            flags=flags,
        )
        self._write(route.link.number, header)
        self._write(route.link.number, batch.payload)
        if unanswered:
            self._settle(batch, None, None)

    def _ask_whether_arrived(self, now_us: int) -> None:
        """Batches without acks are gone from here only when their brokers answer to something sent after them."""
        for route in self._routes:
            if route.carried and route.asked is None:
                self._write(route.link.number, control_frame(Ping(), route.ask(self, now_us)))

    def _stored(self, route: LinkRoute, batch: OutBatch, position: Position | None) -> None:
        if position is not None:
            self._losses.note_acked(position, batch.count)
        self._settle(batch, position, None)
        self._routes.has_room(route)

    def _not_stored(self, batch: OutBatch, verdict: Outcome, extra: int, now_us: int) -> None:
        batch.refused(verdict)
        if verdict is Outcome.FENCED or (verdict is Outcome.UNKNOWN_SESSION and self._settings.replicated):
            self._happens(PublisherEvent.FENCED)  # once open again, everything unsettled is queued
        elif verdict is Outcome.UNKNOWN_SESSION:
            self.fail(
                UnknownSession(f"the session of this publisher into {self.topic!r} is gone", "open a new publisher")
            )
        elif verdict in REFUSALS:
            error = refusal(verdict, batch, extra)
            self._settle(batch, None, error)
            if verdict is Outcome.NO_REFERENCE and (self._session.strong or self._settings.pinned):
                self.fail(error)  # what follows would wait for this batch, and then pass over it
        else:
            batch.put_off()
            self._window.defer(batch, now_us + _backoff_us(batch.refusals))

    def _settle(self, batch: OutBatch, position: Position | None, error: EmbarcaderoError | None) -> None:
        self._routes.landed(batch)
        self._window.settle(batch, position, error)


def _backoff_us(refusals: int) -> int:
    """Wait longer after each refusal, up to a bound."""
    return min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(refusals - 1, 16))
