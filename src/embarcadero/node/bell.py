"""Doorbells between processes of one host: datagrams on Unix sockets in the fabric's folder.

A bell only shortens a sleep. It may be lost (no listener, full queue); every sleeper also wakes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path


class SocketBell:
    """One role's bell: it hears its own name and can ring others."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder / "bells"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / who
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(self._path))
        self._rung: asyncio.Event | None = None

    def ring(self, who: str) -> None:
        """Wake `who`, if it listens."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", str(self._folder / who))

    async def wait(self, timeout_s: float) -> None:
        """Sleep until rung or until the time is over."""
        if self._rung is None:
            self._rung = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._heard)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()

    def _heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
                if self._rung is not None:
                    self._rung.set()

    def close(self) -> None:
        """Stop listening."""
        if self._rung is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._path.unlink(missing_ok=True)
