"""The broker's asyncio driver: sockets in and out, and a poll loop that sleeps when idle. It has no logic of its own.

Asked to stop, a broker leaves in this order. It stops listening and settles the batches it took, for a bounded time. It
then ends its half of every connection so that no ack in transit is lost, and waits a moment for its clients to hang up.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from embarcadero.broker.broker import Broker
from embarcadero.broker.clients import Transport
from embarcadero.broker.connection import Connection
from embarcadero.errors import ProtocolError, TooMany
from embarcadero.limits import GOODBYE_S_MAX, SETTLE_S_MAX, UNREAD_PAUSE_BYTES
from embarcadero.wire.sockets import prepare, write_frames


class WakingBell(Protocol):
    """A doorbell that its owner can wait for."""

    def ring(self, who: str) -> None: ...
    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None: ...


class Left(NamedTuple):
    """How a broker left: how much it settled after the request to stop, and how much it could not settle."""

    settled: int
    unsettled: int


class Live(set["BrokerProtocol"]):
    """All protocols that have a transport, and which of them have output to write."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._broker = broker
        self._planned: list[BrokerProtocol] = []
        self._polling = self._poll_planned = False

    def poll(self) -> bool:
        """Run a pass of the broker and write its output immediately. True if there may be more work."""
        self._polling = True
        try:
            more = self._broker.poll(self._flush)
        finally:
            self._polling = False
            self._flush()
        return more

    def rung(self) -> bool:
        """Run a pass when the bell rings during a sleep. True ends the sleep."""
        return self.poll() or self._broker.deposed

    def poll_soon(self) -> None:
        """Retry waiting fetches and requests once, after the current work of the event loop."""
        if not self._poll_planned:
            self._poll_planned = True
            asyncio.get_running_loop().call_soon(self._poll_planned_now)

    def _poll_planned_now(self) -> None:
        self._poll_planned = False
        if not self._broker.deposed:
            self.poll()

    def plan(self, protocol: BrokerProtocol) -> None:
        """Schedule a protocol to write soon."""
        self._planned.append(protocol)
        if len(self._planned) == 1 and not self._polling:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        planned, self._planned = self._planned, []
        for protocol in planned:
            protocol.flush()


class BrokerProtocol(asyncio.BufferedProtocol):
    """Moves bytes between a socket and a Connection. Payloads go from the kernel directly into the broker's log."""

    def __init__(self, broker: Broker, live: Live) -> None:
        self._broker, self._live_protocols = broker, live
        self._half_closed = False
        self._connection: Connection | None = None
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._hello_timer: asyncio.TimerHandle | None = None
        self._flush_planned = False
        self._unread = self._paused = False  # the peer does not read; the broker does not read from the peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self._descriptor = prepare(transport)
        transport.set_write_buffer_limits(high=UNREAD_PAUSE_BYTES)
        self._live_protocols.add(self)
        address = _address(transport.get_extra_info("peername"))
        carrier = Transport(self._plan_flush, transport.get_write_buffer_size, address)
        self._connection = self._broker.connect(carrier)
        most = self._broker.settings.max_connections
        if len(self._broker.peers) > most:
            problem = f"this broker has reached its maximum of {most} connections"
            self._connection.hang_up(TooMany(problem, "close some, or use another broker"))
        patience_s = self._broker.settings.hello_timeout_s
        self._hello_timer = asyncio.get_running_loop().call_later(patience_s, self._check_hello)

    def _check_hello(self) -> None:
        if self._connection is not None and not self._connection.peer.greeted and self._transport is not None:
            if not self._connection.peer.closing:
                self._connection.note_end(ProtocolError("the client sent no hello in time"))
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._live().get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        connection, self._flush_planned = self._live(), True
        connection.received(nbytes)
        self.flush()
        if connection.stopped:
            self._live_protocols.poll_soon()  # it may be able to resume now

    def _live(self) -> Connection:
        if self._connection is None:
            raise ConnectionResetError("the connection is closed")
        return self._connection

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            self._live_protocols.plan(self)

    def flush(self) -> None:
        """Write the connection's output."""
        self._flush_planned = False
        if self._connection is None or self._transport is None or self._half_closed or self._transport.is_closing():
            return
        if output := self._connection.peer.take_output():
            write_frames(self._transport, self._descriptor, output)
        if self._connection.peer.aborted:
            self._transport.abort()
        elif self._connection.peer.closing:
            self._transport.close()
            patience_s = self._broker.settings.hello_timeout_s  # time for the peer to read the error
            asyncio.get_running_loop().call_later(patience_s, self._transport.abort)
        else:
            self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        """Read from the socket unless the peer does not read: answers to further requests would only wait here."""
        if self._connection is None or self._transport is None or self._transport.is_closing():
            return
        paused = self._unread or self._connection.stopped
        if paused and not self._paused:
            self._transport.pause_reading()
        elif self._paused and not paused:
            self._transport.resume_reading()
        self._paused = paused

    def say_goodbye(self) -> None:
        """End the broker's half: the client reads all remaining output, then hangs up."""
        self.flush()
        if self._connection is not None and self._transport is not None and not self._transport.is_closing():
            self._half_closed = self._connection.peer.closing = True
            self._transport.write_eof()

    def hang_up(self) -> None:
        """Close the transport."""
        if self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        """Pause reading: the peer does not read."""
        self._unread = True
        self._pause_or_resume()

    def resume_writing(self) -> None:
        """Resume after the peer reads again, and retry waiting fetches and requests soon."""
        self._unread = False
        self._pause_or_resume()
        self._live_protocols.poll_soon()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._connection is not None:
            self._connection.closed()
            self._connection = None
        self._transport, self._descriptor = None, -1
        self._live_protocols.discard(self)


def _address(peer: object) -> str:
    """Format a peer's address as host:port."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "")


async def serve_broker(broker: Broker, sock: socket.socket, bell: WakingBell, stop: asyncio.Event) -> Left | None:
    """Serve until asked to stop, or until another incarnation has replaced this broker (None)."""
    loop, idle_wait_s = asyncio.get_running_loop(), broker.settings.idle_wait_ms / 1_000
    live = Live(broker)
    server = await loop.create_server(lambda: BrokerProtocol(broker, live), sock=sock)
    try:
        while not stop.is_set() and not broker.deposed:
            more = live.poll()
            await bell.wait(0 if more else idle_wait_s, live.rung)
        server.close()
        if broker.deposed:
            broker.journal.warn("deposed", reason="declared dead, or replaced")
            return None
        return await _leave(broker, bell, live)
    finally:
        server.close()
        for protocol in list(live):
            protocol.hang_up()


async def _leave(broker: Broker, bell: WakingBell, live: Live) -> Left:
    """Settle the batches taken so far, then close all connections."""
    loop, idle_wait_s = asyncio.get_running_loop(), broker.settings.idle_wait_ms / 1_000
    connections, give_up = len(live), loop.time() + SETTLE_S_MAX
    settled, came, quiet = broker.unanswered, broker.taken, False
    broker.leave()
    while not quiet and loop.time() < give_up and not broker.deposed:
        more = live.poll()
        await bell.wait(0 if more else idle_wait_s)
        quiet = not more and not broker.unsettled and broker.taken == came
        settled, came = settled + broker.taken - came, broker.taken
    left = Left(settled - broker.unanswered, broker.unsettled)
    for protocol in list(live):
        protocol.say_goodbye()
    give_up = loop.time() + GOODBYE_S_MAX
    while live and loop.time() < give_up:
        await bell.wait(idle_wait_s)
    log = broker.journal.warn if left.unsettled else broker.journal.note
    log("left", connections=connections, settled=left.settled, unsettled=left.unsettled)
    return left
