"""One connection to one broker over asyncio: bytes in both directions, and nothing decided."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple, Protocol, cast

from embarcadero.client.net.link import Link
from embarcadero.errors import BadVersion, EmbarcaderoError, Unreachable, fresh, from_wire
from embarcadero.forks import abandon, blank, tell_of_forks
from embarcadero.limits import CONNECT_TIMEOUT_S, CONTROL_BYTES_MAX
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    ControlReceived,
    CreditReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    control_frame,
)
from embarcadero.wire.messages import AnyMessage, Failed, Hello, Message, Welcome
from embarcadero.wire.sockets import prepare, write_frames

RECEIVES = frozenset({FrameKind.CONTROL, FrameKind.ACK, FrameKind.CREDIT, FrameKind.FULL, FrameKind.FETCHED})


def now_us() -> int:
    """The clock of all client drivers."""
    return time.monotonic_ns() // 1000


class Owned(NamedTuple):
    """A frame, and the core that asked for it if it is an answer."""

    event: Event
    owner: object | None


class Listener(Protocol):
    """Who hears what a connection receives."""

    def on_events(self, connection: BrokerConnection, events: list[Owned], now_us: int) -> None:
        """Frames came in; answers to `Connection.ask` are not among them."""
        ...

    def on_lost(self, connection: BrokerConnection) -> None:
        """The connection is gone."""
        ...


class BrokerConnection(asyncio.BufferedProtocol):
    """Moves bytes between a socket and frames. Owner of its Link."""

    def __init__(self, number: int, listener: Listener, scratch: memoryview) -> None:
        self.link = Link(number, now_us())
        self.broker = -1
        self.address = ("", 0)
        self.error: EmbarcaderoError | None = None  # why it ended, if anybody told
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._receiver = FrameReceiver(allowed=RECEIVES, scratch=scratch, control_bytes_max=CONTROL_BYTES_MAX)
        self.lost = asyncio.get_running_loop().create_future()
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: the socket is the parent's. Without a copy here it ends when the parent closes it."""
        if self._descriptor >= 0:
            blank(self._descriptor)
        abandon(self, self._transport)
        self._transport, self._descriptor = None, -1

    # --- asyncio.BufferedProtocol ---
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = prepare(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now = now_us()
        try:
            events = self._receiver.received(nbytes)
        except EmbarcaderoError as error:
            self.drop(error)
            return
        self.link.heard(now)
        if heard := [owned for event in events if (owned := self._sort(event)) is not None]:
            self._listener.on_events(self, heard, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._descriptor = None, -1
        if self.error is None and exc is not None:
            self.error = Unreachable(f"the connection broke: {exc}")
        if not self.lost.done():
            self.lost.set_result(None)
        gone = self.error or Unreachable("the broker hung up", "see its log")
        for owner in self.link.owners():
            if isinstance(owner, asyncio.Future) and not owner.done():
                owner.set_exception(fresh(gone))
        self._listener.on_lost(self)

    # --- for drivers ---
    @property
    def usable(self) -> bool:
        """Whether frames may still be written."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, buffers: list[Any]) -> None:
        """Write frames; nothing waits. What may be queued is bounded by credit."""
        if self._transport is not None and not self._transport.is_closing():
            write_frames(self._transport, self._descriptor, buffers)

    def drop(self, error: EmbarcaderoError | None = None) -> None:
        """Hang up at once."""
        self.error = self.error or error
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, message: Message, timeout: float) -> AnyMessage:  # noqa: ASYNC109 - it must end the request too
        """Ask a question. Raises the error in a Failed, Unreachable when the connection goes, or TimeoutError."""
        if not self.usable:
            raise fresh(self.error or Unreachable("the connection is closed"))
        answer: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        request = self.link.ask(answer)
        self.write([control_frame(message, request)])
        try:
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may swallow a cancellation
                found = await answer
        finally:
            self.link.owner(request)
        if isinstance(found, Failed):
            raise from_wire(found.code, found.message, found.hint)
        return found

    def _sort(self, event: Event) -> Owned | None:
        """Settle what is between the broker and this connection; everything else has an owner or concerns all."""
        if isinstance(event, CreditReceived):
            self.link.grant(event.total)  # here, because it may come before anybody uses the connection
        if not isinstance(event, ControlReceived | FetchedReceived):
            return Owned(event, None)
        owner = self.link.owner(event.request)
        if isinstance(event, ControlReceived):
            message = event.message
            if event.request == 0 and isinstance(message, Failed):  # why the broker is about to hang up
                self.error = from_wire(message.code, message.message, message.hint)
                return None
            if isinstance(owner, asyncio.Future):
                if not owner.done():
                    owner.set_result(message)
                return None
        return Owned(event, owner)


async def open_connection(
    number: int, host: str, port: int, listener: Listener, scratch: memoryview, patience_s: float = CONNECT_TIMEOUT_S
) -> tuple[BrokerConnection, Welcome]:
    """Connect and say hello. Raises Unreachable, or what the broker said against us."""
    loop = asyncio.get_running_loop()
    connection = None
    try:
        async with asyncio.timeout(patience_s):
            _, connection = await loop.create_connection(
                lambda: BrokerConnection(number, listener, scratch), host, port
            )
            hello = Hello(versions=[PROTOCOL_VERSION], client="embarcadero-python")
            welcome = await connection.ask(hello, patience_s)
    except BaseException as error:
        if connection is not None:
            connection.drop()
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{host}:{port} does not answer within {patience_s:g} s") from None
        if isinstance(error, OSError) and not isinstance(error, EmbarcaderoError):
            raise Unreachable(f"{host}:{port}: {error.strerror or error}") from None
        raise
    if not isinstance(welcome, Welcome):
        connection.drop()
        raise Unreachable(f"{host}:{port} answers a hello with {type(welcome).__name__}", "is it a broker?")
    if welcome.version != PROTOCOL_VERSION:
        connection.drop()
        raise BadVersion(
            f"{host}:{port} chose protocol version {welcome.version}, this client speaks {PROTOCOL_VERSION}",
            "use a client of the same release",
        )
    connection.broker, connection.address = welcome.broker, (host, port)
    link = connection.link
    link.generation, link.tables, link.references = welcome.generation, welcome.tables, welcome.references
    return connection, welcome
