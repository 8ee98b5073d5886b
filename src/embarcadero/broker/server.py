"""The broker's asyncio driver: sockets in and out, and a poll loop that sleeps when idle. It decides nothing."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol, cast

from embarcadero.broker.connection import Connection
from embarcadero.broker.state import Broker
from embarcadero.errors import TooMany
from embarcadero.limits import CONNECTIONS_PER_BROKER_MAX, HELLO_TIMEOUT_S, IDLE_WAIT_S_MAX, SEND_QUEUE_BYTES_MAX


class WakingBell(Protocol):
    """A doorbell that its owner can wait for."""

    def ring(self, who: str) -> None: ...
    async def wait(self, timeout_s: float) -> None: ...


class BrokerProtocol(asyncio.BufferedProtocol):
    """Moves bytes between a socket and a Connection. Payloads go from the kernel straight into the broker's log."""

    def __init__(self, broker: Broker, connections_max: int = CONNECTIONS_PER_BROKER_MAX) -> None:
        self._broker, self._connections_max = broker, connections_max
        self._connection: Connection | None = None
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._flush_planned = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=SEND_QUEUE_BYTES_MAX // 8)
        self._connection = self._broker.connect()
        self._connection.on_output = self._plan_flush
        if len(self._broker.connections) > self._connections_max:
            problem = f"this broker has all the connections it may have ({self._connections_max})"
            self._connection.fail(0, TooMany(problem, "close some, or try another broker"))
            self._connection.closing = True
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._check_hello)

    def _check_hello(self) -> None:
        if self._connection is not None and not self._connection.greeted and self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._live().get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        connection = self._live()
        connection.received(nbytes)
        self._flush()

    def _live(self) -> Connection:
        if self._connection is None:
            raise ConnectionResetError("the connection is closed")
        return self._connection

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._connection is None or self._transport is None:
            return
        if output := self._connection.take_output():
            self._transport.writelines(output)
            if self._transport.get_write_buffer_size() > SEND_QUEUE_BYTES_MAX:
                self._transport.abort()  # a peer that does not read is let go
                return
        if self._connection.closing:
            self._transport.close()

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.blocked = True

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.blocked = False

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._connection is not None:
            self._connection.on_output = lambda: None
            self._connection.closed()
            self._connection = None
        self._transport = None


async def serve_broker(
    broker: Broker,
    sock: socket.socket,
    bell: WakingBell,
    stop: asyncio.Event,
    connections_max: int = CONNECTIONS_PER_BROKER_MAX,
) -> None:
    """Serve until told to stop, or until somebody else has taken this broker's place."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BrokerProtocol(broker, connections_max), sock=sock)
    try:
        while not stop.is_set() and not broker.deposed:
            more = broker.poll()
            await bell.wait(0 if more else IDLE_WAIT_S_MAX)
    finally:
        server.close()
        for connection in list(broker.connections.values()):
            connection.closing = True
            connection.on_output()
