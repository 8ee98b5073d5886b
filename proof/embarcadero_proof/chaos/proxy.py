"""A TCP proxy between clients and brokers that can treat connections badly: cut, delay, drip, or carry one way only.

It runs on an event loop in a thread of its own; its moods are changed from any thread.
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
"""Of each piece that is read, so much goes drop by drop, and the rest at once: all of it would take for ever."""

_RESET: Final = struct.pack("ii", 1, 0)
_START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Mood:
    """How connections to one broker are treated."""

    refuse: bool = False  # no connection is taken
    deaf: bool = False  # nothing goes from clients to the broker
    mute: bool = False  # nothing goes from the broker to clients
    delay_s: float = 0.0  # each piece waits so long
    drip: bool = False  # pieces go out in drops


FAIR: Final = Mood()


def merged(moods: Iterable[Mood]) -> Mood:
    """Several at once."""
    found = FAIR
    for mood in moods:
        found = Mood(
            found.refuse or mood.refuse, found.deaf or mood.deaf, found.mute or mood.mute,
            max(found.delay_s, mood.delay_s), found.drip or mood.drip,
        )  # fmt: skip
    return found


class _Gate:
    """The way to one broker, with its mood and its connections."""

    def __init__(self, port: int, upstream: int) -> None:
        self.port, self.upstream, self.mood = port, upstream, FAIR
        self._moods: dict[object, Mood] = {}
        self.changed = asyncio.Event()
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[None] | None] = set()

    def set(self, who: object, mood: Mood) -> None:
        """What one source of mistreatment wants; FAIR: nothing any more."""
        self._moods[who] = mood
        self.mood = merged(self._moods.values())
        self.changed.set()
        self.changed = asyncio.Event()
        if mood.refuse:
            self.reset()

    def reset(self) -> None:
        """Cut every connection at once, with a reset rather than a goodbye."""
        for writer in list(self.writers):
            sock: socket.socket | None = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its beginning to its end."""
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
    """Ports from `first` on lead to brokers from `upstream` on."""

    def __init__(self, first: int, upstream: int, count: int) -> None:
        self._pairs = [(first + number, upstream + number) for number in range(count)]
        self._gates: list[_Gate] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name="proxy", daemon=True)

    def start(self) -> None:
        """Listen; OSError if a port is taken."""
        self._thread.start()
        if not self._ready.wait(_START_S):
            raise TimeoutError(f"the proxy was not ready within {_START_S:.0f} s")
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """Cut everything and end."""
        self._tell(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(_START_S)

    def treat(self, broker: int, who: object, mood: Mood) -> None:
        """Treat connections to a broker like this for `who`, until the next call; a mood that refuses cuts, too."""
        self._tell(lambda: self._gates[broker].set(who, mood))

    def cut(self, broker: int) -> None:
        """Reset all connections to a broker; new ones may come."""
        self._tell(self._gates[broker].reset)

    def carries(self, broker: int) -> int:
        """How many connections lead to a broker now, or are about to."""
        return len(self._gates[broker].tasks)

    def _tell(self, what: Callable[[], object]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

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
