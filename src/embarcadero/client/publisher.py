"""The publisher, sans I/O: calls become frames, frames become settled batches. No clock, no randomness, no sockets.

Theory of operation. A batch gets its session sequence and CRC once, in `add`. A retry changes only the header's session
and `low`. So every batch can safely be sent twice: the sequencer answers DUP_OF. A batch is in exactly one state:
queued (a heap by sequence, so the oldest goes first), in flight on one link, deferred after a refusal, or settled. When
a link is lost, its batches return to the queue.

Fences and restarts. When the session is fenced, the publisher sends nothing until it has continued the session. Then it
queues every unsettled batch again. The same happens when the whole cluster has restarted with empty memory (a link of a
later generation). Batches that were acked as ordered, and were not durable, may then be lost. The publisher asks where
the topic's ranges (orders 0 and 1: its lanes) end, before it opens its session again and before a failure or close is
final. `take_losses` has the report. A failure or close is final only when a broker of the generation that acked the
last batch has answered, or the losses are known.

Sequences. If the caller knows the sequences of its batches (a named session, or `session_seq`), they never change: a
publisher whose acked batches are lost reports them and ends. A session may be opened at a sequence (`session_at`). Its
batches are numbered from there even if the log has some of them, and `low` stays there, so that repeated work is
recognised batch by batch. All these batches must fit the sequencer's window.

Outcomes. `doubts` counts the copies of a batch without an answer. If the publisher must end, a batch without doubts has
failed for certain; a batch with doubts has an unknown outcome (P8).

Parts. `TRANSITIONS` has the states of a publisher. `BatchWindow` has the batches, `LinkRoutes` the links,
`PublisherSession` the session, `Losses` the acked batches that may be lost, and `PublisherRequests` the open request.
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
    cluster_full,
    ended_with,
    no_references,
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
    """The state of a publisher. It sends batches while its session is `usable`."""

    OPENING = "opening"  # the first session is not open yet: batches wait
    OPEN = "open"
    FENCED = "fenced"  # the session was fenced, or the cluster restarted: batches wait until it is continued
    CLOSING = "closing"  # no batch is added any more; the session is open
    CLOSING_FENCED = "closing, fenced"  # no batch is added any more; the others wait until the session is open
    FAILED = "failed"  # every batch has its outcome; the lost acked batches are not known yet
    CLOSED = "closed"

    @property
    def usable(self) -> bool:
        """Whether the session is open."""
        return self in (PublisherState.OPEN, PublisherState.CLOSING)

    @property
    def closing(self) -> bool:
        """Whether the caller has closed the publisher."""
        return self in (PublisherState.CLOSING, PublisherState.CLOSING_FENCED)


class PublisherEvent(Enum):
    """An event that changes the state of a publisher."""

    OPENED = "the session is open"
    FENCED = "the session must be continued before the next batch is sent"
    CLOSE = "the caller closes the publisher"
    FAIL = "the publisher fails"
    END = "all outcomes and losses are known"


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
"""The next state, by state and event. An event that is not listed changes nothing."""


class PublisherRequests:
    """The open request (one at a time), and the back-off after refusals."""

    def __init__(self) -> None:
        self.question: Message | None = None
        self.from_us = 0
        self._refusals = 0

    def ask(self, message: Message) -> None:
        """Note that a request is sent."""
        self.question = message

    @property
    def about_losses(self) -> bool:
        """Whether the open request asks which acked batches are lost."""
        return isinstance(self.question, GetLanes | DescribeTopic)

    def back_off(self, now_us: int) -> None:
        """Wait longer after each refusal, up to a limit."""
        self._refusals += 1
        self.from_us = now_us + _backoff_us(self._refusals)

    def succeeded(self) -> None:
        """Make the next back-off short."""
        self._refusals = 0

    def begin_again(self) -> None:
        """End the back-off: ask immediately."""
        self.from_us = self._refusals = 0

    def on_timer(self, now_us: int) -> None:
        """Clear a back-off that has ended."""
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
        self.unknown: LossUnknown | None = None  # acked batches about which no broker answered before the end

    def _happens(self, event: PublisherEvent) -> None:
        self._state = TRANSITIONS[self._state].get(event, self._state)

    # --- for the driver ---
    @property
    def topic(self) -> str:
        """The name of the topic."""
        return self._settings.topic

    @property
    def topic_id(self) -> int:
        """The id of the topic; 0 if it is not known."""
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
        """The lane and session in the acks of this publisher."""
        return SessionKey(self._session.lane, self._session.handle)

    @property
    def closed(self) -> bool:
        """Whether the publisher has ended, and all outcomes and losses are final."""
        return self._state is PublisherState.CLOSED

    @property
    def first_sequence(self) -> int | None:
        """The current sequence of the first batch. None before the session is open."""
        return self._window.first

    @property
    def found(self) -> int | None:
        """The sequence that the session expected when this publisher opened it."""
        return self._session.found

    @property
    def unsettled(self) -> int:
        """Number of batches without an outcome."""
        return len(self._window)

    def has_room(self, size: int) -> bool:
        """Whether `add` accepts a batch of `size` bytes now. A batch larger than the window is accepted alone."""
        return self.failed is not None or self._window.has_room(size)

    def keep_numbers(self) -> None:
        """Fix the sequences of the batches: the caller relies on them from now on."""
        self._session.keep_numbers()

    def add(self, payload: Any, count: int, partition: int, schema: int, now_us: int, token: Any = None) -> OutBatch:
        """Accept and stamp a batch. After a failure of the publisher the batch settles immediately with its error."""
        size, crc = memoryview(payload).nbytes, payload_crc(payload)
        return self._take(
            OutBatch(self._window.next, payload, size, count, partition, schema, crc, now_us, token=token)
        )

    def add_reference(self, staged: StagedBatch, partition: int, now_us: int, token: Any = None) -> OutBatch:
        """Accept a batch that references a staged one. Stamps, retries and outcomes are as for other batches."""
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
        invariant(self.has_room(batch.size), "the driver checks has_room before it adds a batch")
        invariant(not self._state.closing, "no batch is added after close")
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
        """Close the session once every batch is settled. Then `closed` is true. A named session stays open."""
        self._happens(PublisherEvent.CLOSE)
        self._pump(now_us)

    def fail(self, error: EmbarcaderoError) -> None:
        """End every unsettled batch now. `closed` is true once the lost acked batches are known."""
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
        """End now. Unsettled batches end with `error`, and `unknown` names acked batches that may be lost."""
        if self.closed:
            return
        self.unknown = self._losses.unknown()
        if self.unsettled or self.unknown is None:
            self.fail(error)
        self._happens(PublisherEvent.END)

    def take_settled(self) -> list[OutBatch]:
        """Take the batches that were settled since the last call, in the order of settling."""
        return self._window.take_settled()

    def take_losses(self) -> RecordsLost | None:
        """Take the lost acked batches that were not reported yet."""
        return self._losses.take_report()

    def pressure(self) -> Backpressure | None:
        """Return why new records are refused: the oldest batch waits, and its broker has reported that it is full."""
        if not self._routes.full_us or not self._state.usable or (oldest := self._window.oldest) is None:
            return None
        full = self._routes.why_waiting(oldest, self._settings.durable)
        return None if full is None else cluster_full(self.topic, full)

    # --- events of connections ---
    def on_connected(self, link: Link, now_us: int) -> None:
        """A connection is ready for use."""
        if 0 < link.generation < self._generation:
            self._abandoned.append(link.number)  # of an earlier generation of the cluster
            return
        if link.generation > self._generation:
            if self._generation and self._settings.replicated:
                self._cluster_restarted()
            self._generation = link.generation
        self._routes.add(link)
        self._pump(now_us)

    def _cluster_restarted(self) -> None:
        """Drop connections to brokers of the earlier generation, and send nothing before the session is open again.

        Without this, a connection to a vanished host would stay open, and its keeper would never reconnect.
        """
        for route in self._routes:
            self._unroute(route)
            self._abandoned.append(route.link.number)
        self._output.clear()
        self._happens(PublisherEvent.FENCED)
        self._requests.begin_again()
        self._losses.doubt_all()

    def on_disconnected(self, conn: int, now_us: int) -> None:
        """A connection was lost: send its batches in flight on other connections, with the same stamps."""
        if (route := self._routes.get(conn)) is not None:
            self._output.pop(conn, None)
            self._unroute(route)
            self._pump(now_us)

    def _unroute(self, route: LinkRoute) -> None:
        self._routes.remove(route.link.number)
        for batch in route.in_flight.values():
            batch.on_link_lost()
            self._window.queue(batch)

    def on_credit(self, conn: int, total_bytes: int, now_us: int) -> None:
        """The broker granted bytes, for all publishers on the connection."""
        if (route := self._routes.get(conn)) is not None:
            route.link.heard(now_us)
            route.link.grant(total_bytes)
            route.credited()
            self._pump(now_us)

    def on_full(self, conn: int, now_us: int, full: FullReceived = NO_MEMORY) -> None:
        """The broker or a lane has been full for too long. Batches wait, and do not fail in this time."""
        if (route := self._routes.get(conn)) is None:
            return
        route.link.heard(now_us)
        if full.lane in (-1, self.lane):  # otherwise it is for another publisher on the connection
            self._routes.is_full(route, full, now_us)

    def on_control(self, conn: int, request: int, message: AnyMessage, now_us: int) -> None:
        """Handle the answer to the open request. Other answers are ignored."""
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
        """Handle outcomes of batches. Outcomes of other sessions are ignored."""
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
            elif route.in_flight.pop(batch.sequence, None) is not None:  # otherwise it answers an earlier copy
                self._not_stored(batch, Outcome(outcome), extra, now_us)
        self._pump(now_us)

    # --- time ---
    def on_timer(self, now_us: int) -> None:
        """Do everything that is due. An early call does nothing."""
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
        """Return when `on_timer` must run, if no other event comes first."""
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
        """Return when delivery of the oldest batch has failed. Time in which the cluster is full does not count."""
        return max(oldest.added_us, self._routes.full_us) + self._settings.delivery_timeout_us

    # --- session ---
    def _opened(self, route: LinkRoute, message: Opened) -> None:
        session, expected = self._session, message.expected
        first = session.handle == NO_SESSION
        lost = [*message.lost_before, Span(message.lost_from, message.lost_to)]
        renewed = not first and session.chain.resume() is None and not self._by_brokers
        ours = self._by_brokers  # orders 0 and 1: a session is only a number, and any number will do
        answer = Answer.OURS if ours else session.chain.opened(message.session, message.index, lost)
        if answer is Answer.UNRELATED or (not first and message.lane != session.lane):
            self._disown(route, message)
            return
        if answer is Answer.REASSIGNED:
            self._session_gone()
            return
        if not self._by_brokers:
            self._losses.lost_in(session.lane, lost)  # for clusters that do not number their generations
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
        """Whether the session has the order that the caller requires. If not, the publisher fails."""
        asked = self._settings
        if not asked.order_required or order == asked.session_order:
            return True
        what = f"session {asked.session_name!r}" if asked.session_name else "a session"
        wanted = order_label(asked.session_order or 0)
        self.fail(
            BadValue(
                f"{what} into {self.topic!r} has order {order_label(order)}, not {wanted}",
                "a session keeps the order with which it was first opened: omit `order`, or use another session",
            )
        )
        return False

    def _check_numbers(self, expected: int, lost_some: bool, renewed: bool) -> None:
        """Fail if acked batches of the session are lost: sequences that the caller knows never change to fill a gap."""
        outside = self._window.outside(expected)
        hole = expected + len(outside) < self._window.next and (self._session.strong or renewed)
        if lost_some or hole:
            for batch in self._window.unsettled():
                if batch.sequence >= expected:
                    batch.never_stored()
            again = "open the session again and publish from next_session_seq() on"
            if self._settings.session_at is not None:
                again = f"open the session at {self._settings.session_at} again and send all its batches again"
            self.fail(
                SessionFenced(
                    f"acked batches of {self._session.label} into {self.topic!r} were lost with the cluster's memory: "
                    f"the session continues at {expected}, and this publisher was at {self._window.next}",
                    again,
                )
            )

    def _disown(self, route: LinkRoute, message: Opened) -> None:
        """Close an opened session that does not continue the session of this publisher, and fail."""
        self._fenced()
        self._write(
            route.link.number,
            control_frame(CloseSession(lane=message.lane, session=message.session), route.link.ask(self)),
        )

    def _fenced(self) -> None:
        self.fail(
            SessionFenced(
                f"the session of this publisher into {self.topic!r} was taken over, or has expired",
                "another publisher opened the same session name, or this one paused for too long; open a new publisher",
            )
        )

    def _refused(self, error: EmbarcaderoError, now_us: int) -> None:
        if isinstance(error, Retriable | OutcomeUnknown):
            self._requests.back_off(now_us)
        elif self._requests.about_losses and not isinstance(error, UnknownTopic):
            self._requests.back_off(now_us)  # an error of the store does not decide about losses
        elif self._requests.about_losses:
            self._losses.forget_doubts()
        elif self._state.usable or self._state is PublisherState.FAILED:
            self._happens(PublisherEvent.END)  # the request was the close; a session that is gone needs no close
        elif self.session == NO_SESSION or not isinstance(error, UnknownSession | SessionFenced):
            self.fail(error)
        elif isinstance(error, UnknownSession):
            self._session_gone()
        else:
            self._fenced()

    def _session_gone(self) -> None:
        """Try the session before it with the next request. If there is none, fail."""
        if not self._session.gone():
            self._fenced()

    # --- losses ---
    def _ranges_known(self, message: TopicIs, now_us: int) -> None:
        """Compare batches in doubt with the ranges of the topic, unless another topic has its name now."""
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
        """Ask which of the batches in doubt are lost. This needs no session."""
        if self._by_brokers:
            self._ask(GetLanes(lane=self.lane, above=min(self._losses.doubts.lanes()) - 1), now_us)
        else:
            self._ask(DescribeTopic(name=self.topic), now_us)

    def _ask(self, message: Message, now_us: int) -> None:
        """Send a request, unless another one is open or the back-off has not ended."""
        if now_us < self._requests.from_us or self._routes.asking:
            return
        if (route := self._routes.pick(0, False, self._alone)) is not None:
            self._requests.ask(message)
            self._write(route.link.number, control_frame(message, route.ask(self, now_us)))

    # --- sending and settling ---
    @property
    def _alone(self) -> bool:
        """Whether exactly one batch has no outcome. Without acks this is not known."""
        return len(self._window) == 1 and not self._flags & NO_ACK

    def _pump(self, now_us: int) -> None:
        """Do everything that is possible now."""
        if self.closed:
            return
        if self._state.usable:
            self._send(now_us)
        usable = self._state.usable
        ending = self._state is PublisherState.FAILED or (self._state.closing and not self._window)
        if self._losses.doubts and (ending or usable or not self._by_brokers):
            self._ask_for_losses(now_us)  # orders 0 and 1 open a session at the same time: it has another lane
        elif ending:
            self._end(now_us)
        elif not usable:
            self._ask(self._session.request(), now_us)

    def _end(self, now_us: int) -> None:
        """After the last outcome, close the session, or check that the memory with the acked batches still exists."""
        if self._routes.carried:
            self._ask_whether_arrived(now_us)
        elif self._state.usable and not self._settings.session_name:
            self._ask(CloseSession(lane=self.lane, session=self.session), now_us)
        elif self._losses.in_doubt:
            self._ask(Ping(), now_us)
        elif self.failed is not None or not self._routes.asking:
            self._happens(PublisherEvent.END)  # no session to close, or a later holder of its name continues it

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
        """Ping brokers after batches without acks: the answer shows that the batches have arrived."""
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
            self._happens(PublisherEvent.FENCED)  # once it is open again, every unsettled batch is queued
        elif verdict is Outcome.UNKNOWN_SESSION:
            problem = f"the session of this publisher into {self.topic!r} does not exist any more"
            self.fail(UnknownSession(problem, "open a new publisher"))
        elif verdict in REFUSALS:
            error = refusal(verdict, batch, extra)
            self._settle(batch, None, error)
            if verdict is Outcome.NO_REFERENCE and (self._session.strong or self._settings.pinned):
                self.fail(error)  # later batches would wait for this one, and then skip it
        else:
            batch.deferred()
            self._window.defer(batch, now_us + _backoff_us(batch.refusals))

    def _settle(self, batch: OutBatch, position: Position | None, error: EmbarcaderoError | None) -> None:
        self._routes.landed(batch)
        self._window.settle(batch, position, error)


def _backoff_us(refusals: int) -> int:
    """Return the back-off after this number of refusals: it grows up to a limit."""
    return min(_BACKOFF_LAST_US, _BACKOFF_FIRST_US << min(refusals - 1, 16))
