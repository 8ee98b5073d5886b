"""Short frames go to the system at once: uvloop would write them after all that its callers still have to do.

Somebody waits for each of them. Longer ones go together, when the loop has time: there it is the bytes that count.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from embarcadero.limits import KIB

_BYTES_MAX: Final = 16 * KIB
_BUFFERS_MAX: Final = 4


def write_frames(transport: asyncio.Transport, descriptor: int, buffers: list[Any]) -> None:
    """Write buffers, in order, after all that was written before. `descriptor`: the transport's socket; -1: none."""
    if len(buffers) <= _BUFFERS_MAX and descriptor >= 0 and not transport.get_write_buffer_size():
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size <= _BYTES_MAX:
            try:
                done = os.writev(descriptor, buffers)
            except OSError:
                done = 0  # full, or broken: the transport finds out
            if done == size:
                return
            if done:
                buffers = [b"".join(buffers)[done:]]
    transport.writelines(buffers)


def descriptor_of(transport: asyncio.Transport) -> int:
    """The descriptor of a transport's socket; -1 if it has none."""
    sock = transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())
