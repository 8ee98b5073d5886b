"""Doorbells between processes of one host: datagrams on abstract Unix sockets named after the fabric's folder.

A bell only shortens a sleep. It may be lost (no listener, full queue); every sleeper also wakes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from hashlib import blake2b
from pathlib import Path


class SocketBell:
    """One role's bell: it hears its own name and can ring others."""

    def __init__(self, folder: Path, who: str) -> None:
        self._prefix = f"\0embarcadero-{blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()}-"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._prefix + who)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.rung = False  # since the last wait
        self._sleeper: asyncio.Future[None] | None = None

    def ring(self, who: str) -> None:
        """Wake `who`, if it listens."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", self._prefix + who)

    async def wait(self, timeout_s: float) -> None:
        """Sleep until rung or until the time is over."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._heard)
        if self.rung or timeout_s <= 0:
            await asyncio.sleep(0)
        else:
            self._sleeper = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._sleeper
            finally:
                timer.cancel()
        self.rung = False

    def wake(self) -> None:
        """Ring for ourselves: something is to be seen to at once."""
        self.rung = True
        self._wake()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def _heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
                self.rung = True
        self._wake()

    def close(self) -> None:
        """Stop listening."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
