"""Writing frames to sockets, and socket options.

Short frames are written immediately, because a peer waits for each of them, and uvloop would write them only after all
other callbacks. Longer frames are written together by the event loop: for them, throughput matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any, Final

from embarcadero.limits import KIB, PEER_PROBE_S, PEER_PROBES, PEER_SILENT_S

_BYTES_MAX: Final = 16 * KIB
_BUFFERS_MAX: Final = 4
_CAN_GATHER: Final = hasattr(os, "writev")  # Windows has no such call


def write_frames(transport: asyncio.Transport, descriptor: int, buffers: list[Any]) -> None:
    """Write buffers, in order, after all earlier ones. `descriptor`: the transport's socket; -1: none."""
    if _CAN_GATHER and len(buffers) <= _BUFFERS_MAX and descriptor >= 0 and not transport.get_write_buffer_size():
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size <= _BYTES_MAX:
            try:
                done = os.writev(descriptor, buffers)
            except OSError:
                done = 0  # the socket is full or broken: the transport handles both
            if done == size:
                return
            if done:
                buffers = [b"".join(buffers)[done:]]
    transport.writelines(buffers)


def prepare(transport: asyncio.Transport) -> int:
    """Send bytes without delay, and let the system probe silent peers.

    A host that vanishes does not close its connections. Without probes they would stay open, and count, without end.
    Returns the descriptor of the transport's socket; -1 if it has none.
    """
    sock = transport.get_extra_info("socket")
    if sock is None:
        return -1
    for level, name, value in (
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", PEER_SILENT_S),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", PEER_PROBE_S),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", PEER_PROBES),
    ):
        option = getattr(socket, name, None)  # not every system has all options; macOS calls the third TCP_KEEPALIVE
        if option is not None:
            with contextlib.suppress(OSError):  # the peer may be gone already: the next read reports it
                sock.setsockopt(level, option, value)
    return int(sock.fileno())
