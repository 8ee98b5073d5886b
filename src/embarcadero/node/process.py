"""One process of a cluster: its roles, its setup, and its listening ports.

The command line names roles `broker:<number>`, `replica:<number>` and `sequencer`, joined by commas. `sequencer` is the
first sequencer; the others are `sequencer:1`, `sequencer:2`, ... Any of them can lead, and the rest stand by.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import random
import resource
import signal
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from embarcadero.config import Config
from embarcadero.config.table import BrokerKeys, LogKeys
from embarcadero.errors import BadValue, ClusterError, EmbarcaderoError, PortInUse, ProtocolError, Unreachable
from embarcadero.limits import (
    BROKERS_MAX,
    CANDIDATES_MAX,
    CONTROL_BYTES_MAX,
    FETCH_BYTES_MAX,
    FILES_PER_REPLICA,
    FILES_SPARE,
    FREED_BYTES_KEPT,
    REPLICAS_MAX,
)
from embarcadero.types import Member
from embarcadero.watch.logs import set_up_logging
from embarcadero.wire.codec import PROTOCOL_VERSION, SHORT_HEADER, control_frame, decode_control
from embarcadero.wire.messages import Hello, Welcome


# --- roles ------------------------------------------------------------------------------------------------------------
class Role(NamedTuple):
    """One role of a node process: a broker, a replica, or a sequencer candidate."""

    broker: int | None = None
    replica: int | None = None
    candidate: int | None = None

    def __str__(self) -> str:
        if self.replica is not None:
            return f"replica:{self.replica}"
        return candidate_role(self.candidate or 0) if self.broker is None else f"broker:{self.broker}"


SEQUENCER = Role(candidate=0)
_DIGITS_MAX = 9  # Python refuses to read numbers of thousands of digits


def candidate_role(candidate: int) -> str:
    """The name of a sequencer on the command line."""
    return f"sequencer:{candidate}" if candidate else "sequencer"


def metrics_offset(role: Role, brokers: int) -> int:
    """The distance of a role's metrics port from the port of the first sequencer.

    Brokers follow the first sequencer, then replicas. The other sequencers follow after the maximum number of replicas.
    """
    if role.replica is not None:
        return 1 + brokers + role.replica
    if role.broker is not None:
        return 1 + role.broker
    return brokers + REPLICAS_MAX + role.candidate if role.candidate else 0


def parse_roles(text: str) -> list[Role]:
    """Parse roles such as `broker:0,broker:1,sequencer,replica:0`."""
    roles = [_parse(part.strip()) for part in text.split(",")]
    if len(set(roles)) != len(roles):
        raise BadValue(f"{text!r} names a role twice", "name each role once")
    return roles


def _parse(text: str) -> Role:
    kind, _, digits = text.partition(":")
    if text == "sequencer":
        return SEQUENCER
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX else None
    if number is not None and kind == "broker" and number < BROKERS_MAX:
        return Role(broker=number)
    if number is not None and kind == "replica" and number < REPLICAS_MAX:
        return Role(replica=number)
    if number is not None and kind == "sequencer" and 0 < number < CANDIDATES_MAX:
        return Role(candidate=number)
    raise BadValue(
        f"{text!r} is not a role",
        f"use sequencer, sequencer:1 to sequencer:{CANDIDATES_MAX - 1}, broker:0 to broker:{BROKERS_MAX - 1}, or "
        f"replica:0 to replica:{REPLICAS_MAX - 1}, separated by commas",
    )


# --- the process itself -----------------------------------------------------------------------------------------------
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OTHERS = 0o077


def be_private() -> None:
    """Create all files of this process without rights for other users."""
    os.umask(_OTHERS)


def start_logging(what: str, settings: LogKeys, secrets: Sequence[str] = ()) -> None:
    """Set up logging from the configuration and mask its secrets. Lines without a role show `what`."""
    set_up_logging(f"{what}-{os.getpid()}", settings.level, settings.format, settings.file, secrets)


def keep_freed_memory() -> None:
    """Make the C library keep some freed memory instead of returning it to the kernel.

    A broker copies each payload that it serves. Memory that was returned to the kernel comes back page by page, zeroed:
    this takes longer than copying, checking and sending the payload.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has it
        mallopt(_M_MMAP_THRESHOLD, FETCH_BYTES_MAX)
        mallopt(_M_TRIM_THRESHOLD, FREED_BYTES_KEPT)


# --- title ------------------------------------------------------------------------------------------------------------
# The name of a process in `ps` and `top`.
_PR_SET_NAME = 15
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46
"""Fields of /proc/self/stat, counted after the command's name: the addresses of this process's arguments in memory."""


def name_process(name: str) -> None:
    """Set the title of this process to `embarcadero <name>`, such as `embarcadero broker 0`.

    The short name (`ps -o comm`, `top`) has 15 characters at most. The command line (`ps -f`) is overwritten in place,
    so a long name is cut to the length of the original arguments.
    """
    readable = name.replace(":", " ").replace(",", ", ")
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"emb-{name}".encode()[:15])
    with contextlib.suppress(OSError, ValueError, IndexError):  # a system without /proc keeps the command line
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        capacity = end - start
        if start and capacity > 1:
            title = f"embarcadero {readable}".encode()[: capacity - 1]
            ctypes.memmove(start, title.ljust(capacity, b"\0"), capacity)


# --- files ------------------------------------------------------------------------------------------------------------
# Open files: raise the limit as far as allowed, and limit connections so that some files always remain spare.
def within_open_files(config: Config, brokers: int, replicas: int) -> Config:
    """Reduce the maximum number of connections to the limit of open files of a process with these roles."""
    most = connections_for(brokers, config.broker.max_connections, replicas)
    return msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, max_connections=most))


def connections_for(brokers: int, most: int, replicas: int) -> int:
    """The maximum number of connections of each broker in this process: `most`, or fewer if open files are limited.

    Raises the limit of open files as far as allowed. Some files stay reserved for replicas, regions, the store, and
    new connections, which the broker accepts only to refuse them.
    """
    wanted = brokers * most + replicas * FILES_PER_REPLICA + FILES_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = wanted if soft == resource.RLIM_INFINITY else soft
    return max(1, min(most, (files - min(FILES_SPARE, files // 2)) // max(1, brokers)))


# --- pinning ----------------------------------------------------------------------------------------------------------
# Cores of node processes, assigned in turn; and a higher priority for the leading sequencer, if permitted.
#
# Sequencers get the first core of the list (one leads, the others sleep), brokers get the following cores. Replicas
# start from the last core.
def parse_cores(text: str) -> list[int]:
    """Parse cores such as `0,2,3`; empty means no pinning. This process must be allowed to use each of them."""
    usable = os.sched_getaffinity(0)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    known = {str(core) for core in usable}
    wrong = [part for part in parts if part not in known]
    if wrong:
        what = f"this process cannot use core {', '.join(wrong)}"
        raise BadValue(what, f"choose from {', '.join(map(str, sorted(usable)))}")
    return [int(part) for part in parts]


def cores_for(roles: Sequence[Role], cores: Sequence[int]) -> set[int]:
    """The cores of a process that hosts these roles."""
    return {cores[_turn(role) % len(cores)] for role in roles}


def _turn(role: Role) -> int:
    if role.replica is not None:
        return -1 - role.replica
    return 0 if role.broker is None else role.broker + 1


def pin(roles: Sequence[Role], cores: Sequence[int]) -> None:
    """Pin this process, if cores were given."""
    if cores:
        os.sched_setaffinity(0, cores_for(roles, cores))


def ranking(roles: Sequence[Role], nice: int) -> Callable[[bool], None]:
    """Return a function that raises the priority of this process (True) or restores it (False).

    It has an effect only in a process that hosts nothing but a sequencer. All processes wait for the leader, but none
    waits for a standby, and a standby's preparations would take the processor from brokers. Raising the priority needs
    a privilege; without it, nothing changes. Kernels with autogroups rank sessions, so the session is ranked too.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if not nice or any(role.candidate is None for role in roles):
        return lambda _: None

    def rank(first: bool) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, nice if first else usual)
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice if first else usual))

    return rank


_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even if the parent was killed itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        what = f"the supervisor (pid {parent}) has already ended"
        raise ClusterError(what, "start the cluster with `embarcadero up`")


# --- listening --------------------------------------------------------------------------------------------------------
_BACKLOG = 1_024


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free port."""
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
                "choose another port with --port (0 takes free ports), or stop that program",
            ) from error
        if error.errno == errno.EACCES:
            raise PortInUse(f"port {port} needs privileges", "choose a --port above 1023") from error
        raise ClusterError(f"cannot listen on {host}:{port}: {error.strerror or error}", "check --host") from error
    return sock


def check_ports(host: str, ports: list[int]) -> None:
    """Raise PortInUse if one of these ports is not available."""
    for port in ports:
        listen(host, port).close()


def advertised_address(settings: BrokerKeys, number: int, host: str, port: int) -> tuple[str, int]:
    """The address that clients get for a broker that listens on this address."""
    return settings.advertised_host or host, settings.advertised_port + number if settings.advertised_port else port


def own_address(settings: BrokerKeys, member: Member) -> tuple[str, int]:
    """The address at which this machine reaches its own broker, independent of the advertised address."""
    loopback = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
    host = loopback.get(settings.host, settings.host)
    return host, settings.port + member.broker if settings.port else member.port


async def hello(host: str, port: int, timeout_s: float) -> Welcome:
    """Send a hello to a broker. Raise Unreachable if it does not answer in time."""
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
    """Whether a broker answers a hello on this address."""
    try:
        await hello(host, port, timeout_s)
    except EmbarcaderoError:
        return False
    return True


# --- ports ------------------------------------------------------------------------------------------------------------
# Ports that stay reserved while no process listens on them: a cluster needs them again after all its processes died.
_PORTS: Final = (20_000, 30_000)  # usually below the kernel's range of ports for outgoing connections
_BLOCK: Final = 20
_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_POLL_S: Final = 0.05


def wait_until_free(host: str, ports: list[int], patience_s: float) -> None:
    """Wait until these ports are available. Raise PortInUse if another program still has one at the end.

    If the kernel takes ports of outgoing connections from the same range, another program may have one for a while.
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
    """The kernel's range of ports for outgoing connections."""
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
    """Consecutive ports on the loopback interface, reserved against all other ReservedPorts of all processes.

    A named socket in the kernel represents a block of ports. The kernel removes it with the process, even after a
    crash.
    """

    def __init__(self, count: int) -> None:
        if not 0 < count <= _BLOCK:
            raise ValueError(f"cannot reserve {count} consecutive ports; reserve 1 to {_BLOCK}")
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
        what = f"cannot find {count} consecutive free ports from {_PORTS[0]} to {_PORTS[1]}"
        raise PortInUse(what, "stop other programs")
