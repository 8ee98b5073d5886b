"""The raw limit: the same bytes over the same number of loopback connections, received into shared memory and dropped.

One process sends and one receives, so that two cores do not limit them: it is the best result of this machine. The
receiver is built like a broker (uvloop, BufferedProtocol, into a mapped file) but does nothing else.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import tempfile
import time
from pathlib import Path

import uvloop

from embarcadero_proof.lab.team import Seat, Team

_SLOTS = 16
_SHARED = Path("/dev/shm")


class _Sink(asyncio.BufferedProtocol):
    """Receives frames of a fixed size into slots of a mapped file, one after the other."""

    def __init__(self, memory: memoryview, frame_bytes: int, missing: list[int], done: asyncio.Event) -> None:
        self._memory, self._frame, self._missing, self._done = memory, frame_bytes, missing, done
        self._offset = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        start = (self._missing[0] % _SLOTS) * self._frame
        return self._memory[start + self._offset : start + self._frame]

    def buffer_updated(self, nbytes: int) -> None:
        self._offset += nbytes
        if self._offset == self._frame:
            self._offset = 0
            self._missing[0] -= 1
            if not self._missing[0]:
                self._done.set()


async def _receive(sock: socket.socket, memory: memoryview, frame_bytes: int, frames: int) -> float:
    missing, done = [frames], asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Sink(memory, frame_bytes, missing, done), sock=sock)
    await done.wait()
    server.close()
    return time.perf_counter()


def _receiver(seat: Seat, frame_bytes: int, frames: int) -> float:
    """Report the port; answer when the last byte has arrived."""
    with tempfile.TemporaryFile(dir=_SHARED if _SHARED.is_dir() else None) as file:
        file.truncate(_SLOTS * frame_bytes)
        memory = memoryview(mmap.mmap(file.fileno(), _SLOTS * frame_bytes))
        memory[:] = bytes(len(memory))  # no page faults while receiving
        with socket.create_server(("127.0.0.1", 0), backlog=1_024) as sock:
            seat.meet(sock.getsockname()[1])
            return uvloop.run(_receive(sock, memory, frame_bytes, frames))


def _sender(seat: Seat, port: int, connections: int, frame_bytes: int, frames: int) -> float:
    """Send the frames; answer with the time of the start."""
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    frame = bytes(frame_bytes)
    seat.meet()
    began = time.perf_counter()
    for number in range(frames):
        links[number % connections].sendall(frame)
    for link in links:
        link.close()
    return began


def raw_receive(connections: int, frame_bytes: int, frames: int) -> float:
    """Return the bytes per second from one process to another over these connections, in frames of this size."""
    with Team() as team:
        receiver = team.add(_receiver, frame_bytes, frames)
        port = receiver.ready()
        receiver.go()
        sender = team.add(_sender, port, connections, frame_bytes, frames)
        sender.ready()
        sender.go()
        began = sender.result()
        return float(frames * frame_bytes / (receiver.result() - began))
