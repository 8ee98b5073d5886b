"""One client's connection, without a socket: bytes in, frames out. The driver moves the bytes; the simulator does too.

A connection parses and frames. Batches go to admission, requests to a table of handlers, and replies leave through the
connection's peer. A mistake of the peer ends its connection with one typed error; a refusal of one batch is an ack with
that outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from embarcadero.broker.clients import Peer, Transport, UnreadBytes
from embarcadero.broker.context import BrokerContext
from embarcadero.broker.net.requests import Requests
from embarcadero.broker.write.admission import Admission
from embarcadero.errors import BadFrame, BadVersion, EmbarcaderoError
from embarcadero.limits import CONTROL_BYTES_MAX, HELLO_BYTES_MAX
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    REFERENCE,
    BatchHeader,
    BatchReceived,
    ControlReceived,
    Event,
    FrameKind,
    FrameReceiver,
    parse_reference,
)


@dataclass(frozen=True, slots=True)
class Services:
    """What the connections of one broker lead to."""

    context: BrokerContext
    unread: UnreadBytes
    admission: Admission
    requests: Requests
    closed: Callable[[Peer], None]  # told of a peer whose transport is gone
    scratch: memoryview


class Connection:
    """Parses what one client sends. Its `peer` is all that other parts of the broker know of it."""

    def __init__(self, number: int, services: Services, transport: Transport) -> None:
        self._services, self._admission = services, services.admission
        self.peer = Peer(number, self, services.unread, services.context.counters, transport)
        self._receiver = FrameReceiver(
            allowed=frozenset({FrameKind.CONTROL, FrameKind.BATCH}),
            scratch=services.scratch,
            admit=self._admit,
            full=partial(services.unread.stops, self.peer),
            control_bytes_max=HELLO_BYTES_MAX,
        )
        self.get_buffer = self._receiver.get_buffer
        self._references: deque[bytearray] = deque()  # bodies of batches by reference that are not taken yet, in order

    # --- bytes in -----------------------------------------------------------------------------------------------------
    def received(self, count: int) -> None:
        """`count` bytes were put into the buffer that get_buffer gave."""
        if not self.peer.closing:
            self._take(partial(self._receiver.received, count))

    def go_on(self) -> None:
        """Take the requests that waited until the peer has read more."""
        if not self.peer.closing:
            self._take(self._receiver.go_on)
            self.peer.transport.on_output()  # the driver may read from the socket again

    def _take(self, events: Callable[[], list[Event]]) -> None:
        peer = self.peer
        try:
            found = events()
            while found:
                for event in found:
                    if peer.closing:
                        break
                    if isinstance(event, BatchReceived):
                        self._batch(event.header)
                    elif isinstance(event, ControlReceived):
                        self._control(event.request, event.message)
                found = [] if peer.closing else self._receiver.go_on()
        except EmbarcaderoError as error:
            self.hang_up(error)
        self._admission.after_receive(peer)

    @property
    def stopped(self) -> bool:
        """Whether requests wait until the peer has read more: the driver should not read more of them."""
        return self._receiver.stopped

    @property
    def waiting_bytes(self) -> int:
        """Requests that came and are not parsed yet."""
        return self._receiver.waiting_bytes

    # --- its end ------------------------------------------------------------------------------------------------------
    def closed(self) -> None:
        """The transport is gone."""
        if not self.peer.gone:
            self.peer.gone = self.peer.closing = True
            self._drop_input()
            self.peer.drop_output()
            self._services.closed(self.peer)

    def abort(self, error: EmbarcaderoError) -> None:
        """End the connection without a word: the peer does not read."""
        self.note_end(error)
        self._drop_input()
        self.peer.closing = self.peer.aborted = True
        self.peer.drop_output()
        self.peer.transport.on_output()

    def hang_up(self, error: EmbarcaderoError) -> None:
        """Tell the peer why, and end the connection."""
        self.note_end(error)
        self._drop_input()
        self.peer.fail(0, error)
        self.peer.closing = True

    def note_end(self, error: EmbarcaderoError) -> None:
        """Count and log that the connection is ended because of what its peer did."""
        context, name = self._services.context, type(error).__name__
        context.counters.hung_up[name] += 1
        context.env.journal.warn(
            "connection ended",
            peer=self.peer.transport.address,
            client=self.peer.client,
            error=name,
            reason=error.message,
        )

    def _drop_input(self) -> None:
        self._receiver.drop()
        self._references.clear()
        self._admission.drop(self.peer)

    # --- frames -------------------------------------------------------------------------------------------------------
    def _admit(self, header: BatchHeader) -> memoryview | None:
        """Check a batch before a byte of it is stored; None refuses this batch only."""
        if not self.peer.greeted:
            raise BadFrame("a batch before the hello", "send Hello first")
        if header.flags & REFERENCE:
            self._references.append(body := bytearray(header.length))
            return memoryview(body)
        return self._admission.admit(self.peer, header)

    def _batch(self, header: BatchHeader) -> None:
        if header.flags & REFERENCE:
            self._admission.take_reference(self.peer, header, parse_reference(self._references.popleft()))
        else:
            self._admission.take_arrived(self.peer, header)

    def _control(self, request: int, message: m.AnyMessage) -> None:
        if isinstance(message, m.Hello):
            self._hello(request, message)
        elif not self.peer.greeted:
            raise BadFrame(f"{type(message).__name__} before the hello", "send Hello first")
        else:
            try:
                self._services.requests.handle(self.peer, request, message)
            except EmbarcaderoError as error:
                self.peer.fail(request, error)

    def _hello(self, request: int, hello: m.Hello) -> None:
        if PROTOCOL_VERSION not in hello.versions:
            raise BadVersion(
                f"the client speaks versions {hello.versions[:8]}, this broker {PROTOCOL_VERSION}",
                "use a client of the same release",
            )
        self.peer.greeted, self.peer.client = True, hello.client[:100]
        self._receiver.control_bytes_max = CONTROL_BYTES_MAX
        self.peer.answer(request, self._services.requests.welcome())
        self._admission.credit.grant(self.peer)
