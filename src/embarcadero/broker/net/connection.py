"""One client's connection, without a socket: bytes in, frames out. The driver moves the bytes; the simulator does too.

A mistake of the peer ends its connection with one typed error; a refusal of one batch is an ack with that outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from embarcadero.broker.clients import SMALL_BYTES
from embarcadero.errors import (
    BadFrame,
    BadVersion,
    ChecksumMismatch,
    DiskFailed,
    DiskFull,
    EmbarcaderoError,
    FrameTooLarge,
    OverCredit,
    Retriable,
    TimedOut,
    TooMany,
)
from embarcadero.fabric.layout import Entries
from embarcadero.fabric.log import Reservation
from embarcadero.limits import (
    CONTROL_BYTES_MAX,
    FETCH_BYTES_MAX,
    FETCH_WAIT_MS_MAX,
    FETCHES_PARKED_PER_CONNECTION_MAX,
    HELLO_BYTES_MAX,
)
from embarcadero.types import NO_INDEX, Outcome
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    ACK,
    NO_ACK,
    PAYLOAD_ALIGN,
    PROTOCOL_VERSION,
    REFERENCE,
    BatchHeader,
    FrameKind,
    ack_frame,
    control_frame,
    credit_frame,
    fetched_header,
    full_frame,
    one_ack_frame,
    parse_reference,
    payload_crc,
)
from embarcadero.wire.receiver import BatchReceived, ControlReceived, Event, FrameReceiver

if TYPE_CHECKING:
    from embarcadero.broker.broker import Broker
    from embarcadero.broker.read.results import FetchResult

_HEADER_BYTES = 64
_PADDING = bytes(PAYLOAD_ALIGN)


def _nothing() -> None:
    """The default hook: nobody listens."""


def _none() -> int:
    """The default transport: it keeps no byte."""
    return 0


class Connection:
    """State of one client connection.

    `closing`: send what is queued, then hang up. `aborted`: hang up at once, the peer does not read.
    """

    def __init__(self, broker: Broker, number: int, scratch: memoryview) -> None:
        self._broker, self.number = broker, number
        self._receiver = FrameReceiver(
            allowed=frozenset({FrameKind.CONTROL, FrameKind.BATCH}),
            scratch=scratch,
            admit=self._admit,
            full=lambda: broker.unread.stops(self),
            control_bytes_max=HELLO_BYTES_MAX,
        )
        self.get_buffer = self._receiver.get_buffer
        self.greeted = self.closing = self.gone = self.aborted = False
        self.client = self.peer = self.host = ""  # what it calls itself; where it is, with and without its port
        self.reading: dict[int, tuple[int, int]] = {}  # lane -> next index of its last fetch, and when that was
        self.parked = 0  # long polls that wait
        self.acks_waiting = 0  # acks that wait for disks
        self.lanes: set[int] = set()  # lanes of brokers that it feeds (orders 0 and 1)
        self.received_bytes = self.granted_bytes = 0
        self.staging_bytes = 0  # of what was received: batches that wait for a staged one
        self.opened: set[tuple[int, int]] = set()  # (lane, session) that it opened and did not close
        self.sessions: dict[tuple[int, int], None] = {}  # (lane, session) that it feeds (orders 2 and 5), oldest first
        self.turns: dict[tuple[int, int], int] = {}  # order 1: (lane, session) -> the sequence whose turn it is
        self.on_output: Callable[[], None] = _nothing
        self.socket_bytes: Callable[[], int] = _none  # that the transport has and the peer's system has not
        self.given_bytes = 0  # all that was ever sent
        self.reading_bytes = self.reserved_bytes = 0  # of reads of files: what was asked for, and what may come
        self.prompt = False  # whether the peer read its last answer soon
        self._arriving: deque[Reservation] = deque()  # room given to batches that are not whole yet, in order
        self._references: deque[bytearray] = deque()  # bodies of batches by reference that are not taken yet, in order
        self._output: list[bytes | memoryview] = []
        self._output_bytes = 0

    # --- bytes in -----------------------------------------------------------------------------------------------------
    def received(self, count: int) -> None:
        """`count` bytes were put into the buffer that get_buffer gave."""
        if not self.closing:
            self._take(partial(self._receiver.received, count))

    def go_on(self) -> None:
        """Take the requests that waited until the peer has read more."""
        if not self.closing:
            self._take(self._receiver.go_on)
            self.on_output()  # the driver may read from the socket again

    def _take(self, events: Callable[[], list[Event]]) -> None:
        try:
            found = events()
            while found:
                for event in found:
                    if self.closing:
                        break
                    if isinstance(event, BatchReceived):
                        self._batch(event.header)
                    elif isinstance(event, ControlReceived):
                        self._control(event.request, event.message)
                found = [] if self.closing else self._receiver.go_on()
        except EmbarcaderoError as error:
            self.hang_up(error)
        self._broker.after_receive(self)

    @property
    def stopped(self) -> bool:
        """Whether requests wait until the peer has read more: the driver should not read more of them."""
        return self._receiver.stopped

    def closed(self) -> None:
        """The transport is gone."""
        if not self.gone:
            self.gone = self.closing = True
            self._drop_input()
            self._output.clear()
            self._broker.disconnected(self)

    @property
    def arriving(self) -> Reservation | None:
        """The batch under way, if one is."""
        return self._arriving[0] if self._arriving else None

    def unread_bytes(self) -> int:
        """What was sent to the peer and has not left the process."""
        return self._output_bytes + self.socket_bytes()

    @property
    def held_bytes(self) -> int:
        """What the connection holds: answers, room for those that are being read, and requests that wait."""
        return self.unread_bytes() + self.reserved_bytes + self._receiver.waiting_bytes

    @property
    def full(self) -> bool:
        """Whether the peer's requests wait until it has read more."""
        return self._broker.unread.full(self)

    @property
    def clogged(self) -> bool:
        """Whether the peer gets no further answer to a fetch until it has read more."""
        return self.unread_bytes() + self.reading_bytes > self._broker.settings.send_queue_bytes // 8

    def abort(self, error: EmbarcaderoError) -> None:
        """End the connection without a word: the peer does not read."""
        self._broker.hung_up(self, error)
        self._drop_input()
        self.closing = self.aborted = True
        self._output.clear()
        self._output_bytes = 0
        self.on_output()

    def too_slow(self) -> None:
        """The batch under way has held its room for too long."""
        self.hang_up(TimedOut("a batch took too long to arrive", "send it at once, over a faster connection"))

    def hang_up(self, error: EmbarcaderoError) -> None:
        """Tell the peer why, and end the connection."""
        self._broker.hung_up(self, error)
        self._drop_input()
        self.fail(0, error)
        self.closing = True

    def _drop_input(self) -> None:
        self._receiver.drop()
        self._references.clear()
        while self._arriving:
            self._broker.ingest.abandon(self._arriving.popleft())
        self._broker.references.drop(self)

    # --- batches ------------------------------------------------------------------------------------------------------
    def _admit(self, header: BatchHeader) -> memoryview | None:
        """Check a batch before a byte of it is stored; None refuses this batch only."""
        if not self.greeted:
            raise BadFrame("a batch before the hello", "send Hello first")
        if header.flags & REFERENCE:
            self._references.append(body := bytearray(header.length))
            return memoryview(body)
        outcome = self._check(header)
        if outcome is None:
            reservation = self._broker.ingest.reserve(header.length)
            if reservation is not None:
                self._arriving.append(reservation)
                return reservation.view
            outcome = Outcome.BACKPRESSURE
        self.refuse(header, outcome)
        return None

    def _check(self, header: BatchHeader) -> Outcome | None:
        """Why a batch of `header.length` bytes can't be taken; None when it can. Counts its credit."""
        self.received_bytes += _HEADER_BYTES + header.length
        if self.received_bytes > self.granted_bytes:
            raise OverCredit(
                f"{self.received_bytes} bytes sent, {self.granted_bytes} granted", "wait for credit before sending"
            )
        if header.length > self._broker.ingest.frame_bytes_max:
            raise FrameTooLarge(
                f"a batch of {header.length} bytes; this cluster takes {self._broker.ingest.frame_bytes_max}",
                "make smaller batches (batch_bytes)",
            )
        if header.count > self._broker.config.limits.records_per_batch:
            raise FrameTooLarge(
                f"a batch of {header.count} records; this cluster takes {self._broker.config.limits.records_per_batch}",
                "make smaller batches",
            )
        outcome = self._broker.check_batch(self, header)
        if outcome is None and not self._broker.peers.may_send(self, header.length):
            outcome = Outcome.BACKPRESSURE
        return outcome

    def _batch_by_reference(self, header: BatchHeader) -> None:
        """Take a batch that names a staged one: from here on it has that one's size."""
        reference = parse_reference(self._references.popleft())
        header = header._replace(length=reference.size, flags=header.flags & ~REFERENCE)
        outcome = self._check(header)
        if outcome is None:
            self._broker.references.received(self, header, reference)
        else:
            self.refuse(header, outcome)

    def _batch(self, header: BatchHeader) -> None:
        if header.flags & REFERENCE:
            self._batch_by_reference(header)
            return
        arrived = self._arriving[0]  # until somebody has it: hanging up gives its room back
        if payload_crc(arrived.view) != header.crc:
            raise ChecksumMismatch(
                f"batch {header.session_seq} of session {header.session}: payload checksum differs",
                "the bytes changed on the way; send it again",
            )
        if not self._broker.references.follows(self, header, arrived):
            self._broker.take_batch(self, header, arrived)
        self._arriving.popleft()

    def refuse(self, header: BatchHeader, outcome: Outcome, extra: int = 0) -> None:
        """Tell the publisher that its batch was not taken, unless it wants no acks."""
        if header.flags & NO_ACK:
            return
        ack = np.zeros(1, dtype=ACK)
        ack["lane"], ack["session"], ack["session_seq"] = header.lane, header.session, header.session_seq
        ack["index"] = ack["seq"] = NO_INDEX
        ack["outcome"], ack["extra"] = int(outcome), extra
        self._broker.counters.outcomes[int(outcome)] += 1
        self.send_acks(ack)

    # --- control ------------------------------------------------------------------------------------------------------
    def _control(self, request: int, message: m.AnyMessage) -> None:
        if isinstance(message, m.Hello):
            self._hello(request, message)
        elif not self.greeted:
            raise BadFrame(f"{type(message).__name__} before the hello", "send Hello first")
        else:
            try:
                if isinstance(message, m.Fetch):
                    self._fetch(request, message)
                else:
                    self._broker.control(self, request, message)
            except EmbarcaderoError as error:
                self.fail(request, error)

    def _hello(self, request: int, hello: m.Hello) -> None:
        if PROTOCOL_VERSION not in hello.versions:
            raise BadVersion(
                f"the client speaks versions {hello.versions[:8]}, this broker {PROTOCOL_VERSION}",
                "use a client of the same release",
            )
        self.greeted, self.client = True, hello.client[:100]
        self._receiver.control_bytes_max = CONTROL_BYTES_MAX
        self.answer(request, self._broker.welcome())
        self._broker.grant(self)

    def _fetch(self, request: int, ask: m.Fetch) -> None:
        if not 0 < ask.max_bytes <= FETCH_BYTES_MAX or not 0 <= ask.wait_ms <= FETCH_WAIT_MS_MAX or ask.start < 0:
            raise BadFrame(
                f"fetch of {ask.max_bytes} bytes from {ask.start}, waiting {ask.wait_ms} ms",
                f"ask for 1 to {FETCH_BYTES_MAX} bytes, wait at most {FETCH_WAIT_MS_MAX} ms",
            )
        if self.parked >= FETCHES_PARKED_PER_CONNECTION_MAX:
            raise TooMany(f"{self.parked} fetches of this connection wait", "wait for their answers")
        self._broker.fetch(self, request, ask)

    # --- frames out ---------------------------------------------------------------------------------------------------
    def take_output(self) -> list[bytes | memoryview]:
        """What is to be written, in order."""
        output, self._output, self._output_bytes = self._output, [], 0
        return output

    def _send(self, *buffers: bytes | memoryview) -> None:
        if self.gone or self.aborted:
            return
        size = sum(map(len, buffers))
        self._output += buffers
        self._output_bytes += size
        self.given_bytes += size
        unread = self.unread_bytes()
        if unread > SMALL_BYTES:
            self._broker.unread.given(self, size)
            if not self.closing and unread > self._broker.settings.send_queue_bytes:
                self.abort(TooMany("the client does not read what it asked for"))
                return
        self.on_output()

    def answer(self, request: int, message: m.Message) -> None:
        """Answer a control message, or push one (request 0)."""
        self._send(control_frame(message, request))

    def fail(self, request: int, error: EmbarcaderoError) -> None:
        """Tell the peer what went wrong; request 0 means the connection itself.

        A disk that fails here is the store's: copies that can't be read are Corrupt before they get here. The call did
        nothing and may be made again, also by clients that go on by themselves.
        """
        kind = Retriable if isinstance(error, DiskFull | DiskFailed) else type(error)
        self.answer(request, m.Failed(code=kind.__name__, message=error.message, hint=error.hint))

    def send_acks(self, acks: Entries) -> None:
        """Outcomes of this client's batches."""
        self._send(ack_frame(acks))

    def send_ack(self, lane: int, session: int, sequence: int, index: int, seq: int, extra: int, outcome: int) -> None:
        """The outcome of one batch."""
        self._send(one_ack_frame(lane, session, sequence, index, seq, extra, outcome))

    def send_credit(self, granted_bytes: int) -> None:
        """The client may have sent this many bytes in all."""
        self.granted_bytes = granted_bytes
        self._send(credit_frame(granted_bytes))

    def send_full(self, lane: int = -1, replica: int = -1, trouble: int = 0) -> None:
        """There has been no room for too long, in the broker or in a lane; `full_frame` has the meaning."""
        self._send(full_frame(lane, replica, trouble))

    def send_found(self, request: int, found: FetchResult) -> None:
        """The answer to a fetch."""
        body: list[bytes | memoryview] = []
        for payload in found.payloads:
            body.append(payload)
            if pad := -len(payload) % PAYLOAD_ALIGN:
                body.append(_PADDING[:pad])
        entries = found.entries.tobytes()
        length = len(entries) + sum(map(len, body))
        header = fetched_header(
            request=request,
            next_index=found.next_index,
            tail_index=found.tail_index,
            count=len(found.entries),
            gap=found.gap,
            length=length,
        )
        self._send(header, entries, *body)
