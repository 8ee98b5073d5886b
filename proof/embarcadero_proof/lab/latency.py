"""The round trip of one record: publish with ack 1 and no linger, alternating with a bare uvloop echo.

Both clients run in one event loop and alternate after 50 round trips, so that both have the same noise.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import numpy as np
import uvloop

from embarcadero_proof.lab.processes import cluster_with
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.team import Seat, Team
from embarcadero_proof.lab.trial import Announce, Trial

_TURN = 50
_WARM_UP_TURNS = 2
_POINTS = [*np.linspace(0, 0.99, 100).tolist(), 0.995, 0.999]
"""The quantiles of a curve."""


class _Echo(asyncio.Protocol):
    """Sends back all bytes that it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Asker(asyncio.Protocol):
    """Sends a message and waits until as many bytes are back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._missing = 0

    def ask(self, message: bytes) -> asyncio.Future[None]:
        self._missing = len(message)
        self._answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if not self._missing:
            self._answer.set_result(None)


async def _serve(sock: socket.socket) -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, sock=sock)
    await server.serve_forever()


def _echo_server(seat: Seat) -> None:
    """Report the port, and answer until the process is ended."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        seat.meet(sock.getsockname()[1])
        uvloop.run(_serve(sock))


async def _in_turns(addresses: list[str], echo_port: int, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round trip: acks, echoes."""
    import embarcadero as emb

    message, clock = bytes(size), time.perf_counter
    acks: list[float] = []
    echoes: list[float] = []
    transport, asker = await asyncio.get_running_loop().create_connection(_Asker, "127.0.0.1", echo_port)
    async with (
        await emb.aio.connect(addresses) as log,
        await log.publisher("latency", ack=1, linger_ms=0) as publisher,
    ):
        for _ in range(_WARM_UP_TURNS + -(-rounds // _TURN)):
            for _ in range(_TURN):
                began = clock()
                await asker.ask(message)
                echoes.append(clock() - began)
            for _ in range(_TURN):
                began = clock()
                await (await publisher.send(message))
                acks.append(clock() - began)
    transport.close()
    return acks[_WARM_UP_TURNS * _TURN :], echoes[_WARM_UP_TURNS * _TURN :]


def with_threads(addresses: list[str], size: int, rounds: int) -> list[float]:
    """Return the seconds of each round trip of the synchronous client."""
    import embarcadero as emb

    message, clock = bytes(size), time.perf_counter
    times: list[float] = []
    with emb.connect(addresses) as log, log.publisher("latency", ack=1, linger_ms=0) as publisher:
        for _ in range(_WARM_UP_TURNS * _TURN + rounds):
            began = clock()
            publisher.send(message).result()
            times.append(clock() - began)
    return times[_WARM_UP_TURNS * _TURN :]


def _client(seat: Seat, addresses: list[str], echo_port: int, size: int, rounds: int) -> dict[str, list[float]]:
    acks, echoes = uvloop.run(_in_turns(addresses, echo_port, size, rounds))
    seat.meet()
    return {"ack": acks, "echo": echoes, "ack_sync": with_threads(addresses, size, rounds)}


def measure(settings: Settings, trial: Trial, announce: Announce) -> None:
    """Measure a cluster with default settings, an echo server, and one client process."""
    with cluster_with(settings.brokers, latency=5) as cluster, Team() as team:
        announce("round trips, asyncio")
        echo = team.add(_echo_server)
        port = echo.ready()
        echo.go()
        client = team.add(_client, cluster.addresses, port, settings.record_bytes, settings.round_trips)
        client.ready()
        announce("round trips, threads")
        client.go()
        found = client.result()
    for name, times in found.items():
        trial.values[f"{name}_p50"], trial.values[f"{name}_p99"] = map(float, np.quantile(times, [0.5, 0.99]))
        trial.curves[f"latency_{name}"] = [_POINTS, np.quantile(times, _POINTS).tolist()]
    trial.values["ack_to_echo_p50"] = trial.values["ack_p50"] / trial.values["echo_p50"]
