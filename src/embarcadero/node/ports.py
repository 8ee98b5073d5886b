"""Sockets: bind a broker's port, and see whether a broker answers on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import time
import weakref
from pathlib import Path
from typing import Final

from embarcadero.config.table import BrokerKeys
from embarcadero.errors import ClusterError, EmbarcaderoError, PortInUse, ProtocolError, Unreachable
from embarcadero.limits import CONTROL_BYTES_MAX
from embarcadero.types import Member
from embarcadero.wire.codec import PROTOCOL_VERSION, SHORT_HEADER, control_frame, decode_control
from embarcadero.wire.messages import Hello, Welcome

_BACKLOG = 1_024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program",
                "choose another with --port (0 takes free ones), or stop that program",
            ) from error
        if error.errno == errno.EACCES:
            raise PortInUse(f"port {port} needs privileges", "choose a --port above 1023") from error
        raise ClusterError(f"can't listen on {host}:{port}: {error.strerror or error}", "check --host") from error
    return sock


def check_ports(host: str, ports: list[int]) -> None:
    """Raise PortInUse if one of them can't be had."""
    for port in ports:
        listen(host, port).close()


def advertised_address(settings: BrokerKeys, number: int, host: str, port: int) -> tuple[str, int]:
    """What clients are told about a broker that listens on this address."""
    return settings.advertised_host or host, settings.advertised_port + number if settings.advertised_port else port


def own_address(settings: BrokerKeys, member: Member) -> tuple[str, int]:
    """Where this machine reaches a broker of its own, whatever clients are told."""
    loopback = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
    host = loopback.get(settings.host, settings.host)
    return host, settings.port + member.broker if settings.port else member.port


async def hello(host: str, port: int, timeout_s: float) -> Welcome:
    """Ask a broker who it is. Unreachable if nobody answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _hello(host, port)
    except (OSError, TimeoutError, EOFError) as error:
        raise Unreachable(f"no broker answers on {host}:{port}", "see `embarcadero status`") from error


async def _hello(host: str, port: int) -> Welcome:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(control_frame(Hello(versions=[PROTOCOL_VERSION], client="embarcadero"), 1))
        header = await reader.readexactly(SHORT_HEADER.itemsize)
        length = int.from_bytes(header[4:8], "little")
        if length > CONTROL_BYTES_MAX:
            raise ProtocolError(f"{host}:{port} is not a broker", "choose another address")
        answer = decode_control(await reader.readexactly(length))
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"{host}:{port} answers a hello with {type(answer).__name__}", "choose another address")
    return answer


async def answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether a broker says hello on this address."""
    try:
        await hello(host, port, timeout_s)
    except EmbarcaderoError:
        return False
    return True


# --- ports ------------------------------------------------------------------------------------------------------------
# Ports that stay ours while nobody listens on them: a cluster that is killed whole has to get them back.
_PORTS: Final = (20_000, 30_000)  # usually below where the kernel takes ports for outgoing connections
_BLOCK: Final = 20
_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_POLL_S: Final = 0.05


def wait_until_free(host: str, ports: list[int], patience_s: float) -> None:
    """Wait until these ports can be had. PortInUse, if another program still has one when the time is over.

    Where ports of outgoing connections are taken from the same range, another program may have one for a while.
    """
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return check_ports(host, ports)
        except PortInUse:
            if time.monotonic() > give_up:
                raise
            time.sleep(_POLL_S)


def outgoing_ports() -> range:
    """The ports that the kernel takes for outgoing connections."""
    try:
        first, last = map(int, _OUTGOING.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)


def _blocks() -> list[int]:
    """First ports of all blocks in random order, blocks without ports of outgoing connections first."""
    blocks, outgoing = list(range(*_PORTS, _BLOCK)), outgoing_ports()
    random.shuffle(blocks)
    return sorted(blocks, key=lambda first: first in outgoing or first + _BLOCK - 1 in outgoing)


class ReservedPorts:
    """Ports in a row on the loopback interface. While this object lives, no other one has them, in any process.

    The name of a socket in the kernel stands for a block of ports: it goes with its process, however that ends.
    """

    def __init__(self, count: int) -> None:
        if not 0 < count <= _BLOCK:
            raise ValueError(f"{count} ports in a row: 1 to {_BLOCK} can be reserved")
        for first in _blocks():
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
