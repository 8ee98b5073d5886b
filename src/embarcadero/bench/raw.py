"""The raw limit: the same bytes over the same number of loopback connections, received into shared memory and dropped.

Receivers are built like brokers (uvloop, BufferedProtocol, into a mapped file) but do nothing with what they get.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing as mp
import socket
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import uvloop

_SLOTS = 16


class _Sink(asyncio.BufferedProtocol):
    """Receives frames of a fixed size into slots of a mapped file, one after the other."""

    def __init__(self, memory: memoryview, frame_bytes: int, left: list[int], done: asyncio.Event) -> None:
        self._memory, self._frame, self._left, self._done = memory, frame_bytes, left, done
        self._offset = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        start = (self._left[0] % _SLOTS) * self._frame
        return self._memory[start + self._offset : start + self._frame]

    def buffer_updated(self, nbytes: int) -> None:
        self._offset += nbytes
        if self._offset == self._frame:
            self._offset = 0
            self._left[0] -= 1
            if not self._left[0]:
                self._done.set()


async def _receive(sock: socket.socket, path: Path, frame_bytes: int, frames: int) -> None:
    with path.open("w+b") as file:
        file.truncate(_SLOTS * frame_bytes)
        memory = memoryview(mmap.mmap(file.fileno(), _SLOTS * frame_bytes))
    left, done = [frames], asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Sink(memory, frame_bytes, left, done), sock=sock)
    await done.wait()
    server.close()


def _receiver(port: Any, path: Path, frame_bytes: int, frames: int, done: Any) -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port.put(sock.getsockname()[1])
    uvloop.run(_receive(sock, path, frame_bytes, frames))
    done.put(time.perf_counter())


def _sender(ports: list[int], frame_bytes: int, frames: int, barrier: Barrier, started: Any) -> None:
    links = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    frame = bytes(frame_bytes)
    barrier.wait()
    started.put(time.perf_counter())
    for number in range(frames):
        links[number % len(links)].sendall(frame)
    for link in links:
        link.close()


def raw_receive(folder: Path, receivers: int, senders: int, frame_bytes: int, frames_per_sender: int) -> float:
    """Bytes per second that `receivers` processes get from `senders` processes, one connection for each pair."""
    context = mp.get_context("spawn")
    ports, started, done = context.Queue(), context.Queue(), context.Queue()
    barrier = context.Barrier(senders)
    frames_per_receiver = frames_per_sender // receivers * senders
    workers = [
        context.Process(
            target=_receiver, args=(ports, folder / f"raw-{n}", frame_bytes, frames_per_receiver, done), daemon=True
        )
        for n in range(receivers)
    ]
    for worker in workers:
        worker.start()
    found = [ports.get(timeout=60) for _ in workers]
    feeders = [
        context.Process(
            target=_sender, args=(found, frame_bytes, frames_per_sender // receivers * receivers, barrier, started)
        )
        for _ in range(senders)
    ]
    for feeder in feeders:
        feeder.start()
    start = min(started.get(timeout=60) for _ in feeders)
    end = max(done.get(timeout=300) for _ in workers)
    for process in workers + feeders:
        process.join()
    return float(frames_per_receiver * receivers * frame_bytes / (end - start))
