"""The cluster in memory behind real sockets on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from embarcadero.node.process import ReservedPorts
from embarcadero.wire.codec import control_frame
from embarcadero.wire.messages import BrokerAddress, MembersAre
from tests.client.fake_cluster import FakeCluster, FakeConnection

Result = TypeVar("Result")


class _Socket(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, server: FakeServer, broker: int) -> None:
        self.server, self.broker = server, broker
        self.far: FakeConnection | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.far = FakeConnection(self.server.cluster, self.broker, self.server.credit, greeted=False)
        self.server.sockets.append(self)
        self.server.accepted += 1

    def data_received(self, data: bytes) -> None:
        if self.far is not None and not self.server.deaf:
            self.far.receive(data)
            if self.server.credit and self.far.granted - self.far.received_bytes < self.server.credit // 2:
                self.far.grant()
            self.server.flush()
            if self.server.curt:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.far is not None:
            self.far.close()
            self.far = None
            self.server.sockets.remove(self)


class FakeServer:
    """`brokers` fake brokers on free ports; use it in a `with` block."""

    def __init__(
        self, brokers: int = 2, order: int = 2, partitions: int = 1, credit: int = 16 << 20, replicas: int = 0
    ) -> None:
        self.cluster = FakeCluster(order, partitions, replicas)
        self.credit = credit
        self.deaf = False  # takes connections, ignores bytes
        self.curt = False  # hangs up after the first answer
        self.accepted = 0  # connections, in all
        self.sockets: list[_Socket] = []
        self._brokers = brokers
        self._ports = ReservedPorts(brokers)  # also while no broker listens
        self._servers: dict[int, asyncio.Server] = {}
        self._fronts: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        for broker in range(self._brokers):
            self._wait(self._listen(broker, self._ports.first + broker))
        self.cluster.addresses = [self._address(broker) for broker in self._servers]
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ports.release()

    async def _listen(self, broker: int, port: int) -> None:
        self._servers[broker] = await self._loop.create_server(lambda: _Socket(self, broker), "127.0.0.1", port)

    async def _end(self) -> None:
        for server in [*self._servers.values(), *self._fronts]:
            server.close()
        for socket in list(self.sockets):
            socket.transport.abort()
        await asyncio.sleep(0)

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _address(self, broker: int) -> BrokerAddress:
        port = self._servers[broker].sockets[0].getsockname()[1]
        return BrokerAddress(broker=broker, incarnation=1, host="127.0.0.1", port=port, handle=10 + broker)

    @property
    def addresses(self) -> list[str]:
        return [f"{address.host}:{address.port}" for address in self.cluster.addresses]

    def flush(self) -> None:
        """Send the pending output of the fake brokers; in the server's thread."""
        for socket in list(self.sockets):
            if socket.far is not None and socket.far.output:
                socket.transport.write(b"".join(socket.far.output))
                socket.far.output.clear()

    def do(self, function: Callable[[], Result]) -> Result:
        """Call a function in the server's thread, then return its result."""

        async def run() -> Result:
            result = function()
            self.flush()
            return result

        found: Result = self._wait(run())
        return found

    def cut(self, broker: int | None = None) -> None:
        """Break the connections of one broker, or of all."""

        def abort() -> None:
            for socket in list(self.sockets):
                if broker in (None, socket.broker):
                    socket.transport.abort()

        self.do(abort)

    def front(self, broker: int) -> str:
        """One more address at which a broker answers, and which it does not publish."""
        known = self._servers[broker]
        self._wait(self._listen(broker, 0))
        self._fronts.append(self._servers[broker])
        self._servers[broker] = known
        return f"127.0.0.1:{self._fronts[-1].sockets[0].getsockname()[1]}"

    def start_anew(self, end: int | None = None) -> None:
        """All brokers lose the fabric and come back at the old ports; batches from `end` on are lost."""

        def restart() -> None:
            self.cluster.start_anew(end)
            for socket in list(self.sockets):
                socket.transport.abort()

        self.do(restart)

    def stop(self, broker: int) -> None:
        """Stop listening on a broker's port."""
        self.do(self._servers[broker].close)
        self.cut(broker)

    def start(self, broker: int) -> None:
        """Listen again, at the old port."""
        self._wait(self._listen(broker, self.cluster.addresses[broker].port))

    def tell_members(self, brokers: list[int]) -> None:
        """Push a new list of live brokers."""
        self.cluster.addresses = [self._address(broker) for broker in brokers]
        frame = control_frame(MembersAre(brokers=self.cluster.addresses))
        self.do(lambda: [socket.far.output.append(frame) for socket in self.sockets if socket.far is not None])
