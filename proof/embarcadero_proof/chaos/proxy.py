"""A TCP proxy between clients and brokers that can impair connections: cut, delay, drip, or carry one way only.

It runs on an event loop in its own thread; any thread may change its moods.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from embarcadero.limits import KIB

_READ_BYTES: Final = 64 * KIB
_DRIP_BYTES: Final = 7
_DRIPS: Final = 40
"""So many drips of each piece are sent separately, and the rest immediately: all of it would take too long."""

_RESET: Final = struct.pack("ii", 1, 0)
_START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Mood:
    """The treatment of connections to one broker."""

    refuse: bool = False  # no connection is accepted
    deaf: bool = False  # nothing goes from clients to the broker
    mute: bool = False  # nothing goes from the broker to clients
    delay_s: float = 0.0  # delay of each piece
    drip: bool = False  # pieces are sent in small parts


FAIR: Final = Mood()


def merged(moods: Iterable[Mood]) -> Mood:
    """Combine several moods."""
    found = FAIR
    for mood in moods:
        found = Mood(
            found.refuse or mood.refuse, found.deaf or mood.deaf, found.mute or mood.mute,
            max(found.delay_s, mood.delay_s), found.drip or mood.drip,
        )  # fmt: skip
    return found


class _Gate:
    """The path to one broker, with its mood and its connections."""

    def __init__(self, port: int, upstream: int) -> None:
        self.port, self.upstream, self.mood = port, upstream, FAIR
        self._moods: dict[object, Mood] = {}
        self.changed = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None] | None] = set()

    def set(self, source: object, mood: Mood) -> None:
        """Set the mood that one source asks for; FAIR: none any more."""
        self._moods[source] = mood
        self.mood = merged(self._moods.values())
        self.changed.set()
        self.changed = asyncio.Event()
        if mood.refuse:
            self.reset()

    def reset(self) -> None:
        """Cut every connection immediately, with a reset instead of an orderly close."""
        for writer in list(self.writers):
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection, from its beginning to its end."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        self.tasks.add(task)
        self.writers.add(writer)
        back: asyncio.StreamWriter | None = None
        try:
            if self.mood.refuse:
                return
            answers, back = await asyncio.open_connection("127.0.0.1", self.upstream)
            self.writers.add(back)
            ways = [asyncio.create_task(self._carry(reader, back, up=True)),
                    asyncio.create_task(self._carry(answers, writer, up=False))]  # fmt: skip
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # the broker is down
        finally:
            for end in (writer, back):
                if end is not None:
                    self.writers.discard(end)
                    end.close()
            self.tasks.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                while self.mood.deaf if up else self.mood.mute:
                    await self.changed.wait()
                if self.mood.delay_s:
                    await asyncio.sleep(self.mood.delay_s)
                if self.mood.drip:
                    data = await self._drip(data, writer)
                writer.write(data)
                await writer.drain()

    @staticmethod
    async def _drip(data: bytes, writer: asyncio.StreamWriter) -> bytes:
        for start in range(0, min(len(data), _DRIP_BYTES * _DRIPS), _DRIP_BYTES):
            writer.write(data[start : start + _DRIP_BYTES])
            await writer.drain()
            await asyncio.sleep(0)
        return data[_DRIP_BYTES * _DRIPS :]


class Proxy:
    """Forwards ports from `first` on to brokers from `upstream` on."""

    def __init__(self, first: int, upstream: int, count: int) -> None:
        self._pairs = [(first + number, upstream + number) for number in range(count)]
        self._gates: list[_Gate] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="proxy", daemon=True)

    def start(self) -> None:
        """Listen. Raises OSError if a port is taken."""
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise TimeoutError(f"the proxy was not ready within {_START_S:.0f} s")
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """Cut all connections and stop."""
        self._call(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(_START_S)

    def treat(self, broker: int, source: object, mood: Mood) -> None:
        """Set the mood of connections to a broker for `source`, until its next call; a mood that refuses cuts, too."""
        self._call(lambda: self._gates[broker].set(source, mood))

    def cut(self, broker: int) -> None:
        """Reset all connections to a broker; it accepts new ones."""
        self._call(self._gates[broker].reset)

    def carries(self, broker: int) -> int:
        """Return the number of open connections to a broker, including those being opened."""
        return len(self._gates[broker].tasks)

    def _call(self, action: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    async def _run(self) -> None:
        servers, self._loop = [], asyncio.get_running_loop()
        try:
            for port, upstream in self._pairs:
                gate = _Gate(port, upstream)
                servers.append(await asyncio.start_server(gate.connected, "127.0.0.1", port))
                self._gates.append(gate)
        except OSError as error:
            self._failed = error
            self._stop.set()
        finally:
            self._ready.set()
        await self._stop.wait()
        for server, gate in zip(servers, self._gates, strict=True):
            server.close()
            gate.set(self, Mood(refuse=True))
            await asyncio.gather(*filter(None, gate.tasks), return_exceptions=True)
        await asyncio.sleep(0.01)  # the transports' last callbacks
