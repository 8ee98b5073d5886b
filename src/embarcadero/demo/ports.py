"""Ports that stay ours while nobody listens on them: a cluster that is killed whole has to get them back."""

from __future__ import annotations

import random
import socket
import weakref
from typing import Final

from embarcadero.errors import PortInUse
from embarcadero.node.ports import check_ports

_PORTS: Final = (20_000, 30_000)  # below where the kernel takes ports for outgoing connections
_BLOCK: Final = 20


class ReservedPorts:
    """Ports in a row on the loopback interface. While this object lives, no other one has them, in any process.

    The name of a socket in the kernel stands for a block of ports: it goes with its process, however that ends.
    """

    def __init__(self, count: int) -> None:
        if not 0 < count <= _BLOCK:
            raise ValueError(f"{count} ports in a row: 1 to {_BLOCK} can be reserved")
        blocks = list(range(*_PORTS, _BLOCK))
        random.shuffle(blocks)
        for first in blocks:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                held.bind(f"\0embarcadero-ports-{first}")
                check_ports("127.0.0.1", list(range(first, first + count)))
            except (OSError, PortInUse):
                held.close()
                continue
            self.first = first
            self.release = weakref.finalize(self, held.close)
            return
        raise PortInUse(f"no {count} free ports in a row from {_PORTS[0]} to {_PORTS[1]}", "stop other programs")
