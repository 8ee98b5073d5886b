"""One process of a cluster: the roles it hosts, what it does to itself before it works, and the ports it listens on.

Roles as the command line names them are `broker:<number>`, `replica:<number>` and `sequencer`, joined by commas. More
sequencers that stand by are `sequencer:1`, `sequencer:2`, ...; `sequencer` is the first of them.
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
    """What the command line calls a sequencer candidate."""
    return f"sequencer:{candidate}" if candidate else "sequencer"


def metrics_offset(role: Role, brokers: int) -> int:
    """How far a role's metrics port is from the first sequencer's.

    Brokers follow it, then replicas; sequencers that stand by come after as many replicas as there can be.
    """
    if role.replica is not None:
        return 1 + brokers + role.replica
    if role.broker is not None:
        return 1 + role.broker
    return brokers + REPLICAS_MAX + role.candidate if role.candidate else 0


def parse_roles(text: str) -> list[Role]:
    """The roles in a text such as `broker:0,broker:1,sequencer,replica:0`."""
    roles = [_parse(part.strip()) for part in text.split(",")]
    if len(set(roles)) != len(roles):
        raise BadValue(f"a role is named twice in {text!r}", "name each role once")
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
        f"replica:0 to replica:{REPLICAS_MAX - 1}, with commas",
    )


# --- the process itself -----------------------------------------------------------------------------------------------
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OTHERS = 0o077


def be_private() -> None:
    """Give no other user any right to the files that this process makes."""
    os.umask(_OTHERS)


def start_logging(what: str, settings: LogKeys, secrets: Sequence[str] = ()) -> None:
    """Log as the configuration says, without its secrets; `what` stands in lines that name no role."""
    set_up_logging(f"{what}-{os.getpid()}", settings.level, settings.format, settings.file, secrets)


def keep_freed_memory() -> None:
    """Have the C library keep some of what is freed.

    A broker copies each payload that it serves. Memory that goes back to the kernel each time comes back page by page,
    zeroed: that takes longer than copying, checking and sending it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have no such thing
        mallopt(_M_MMAP_THRESHOLD, FETCH_BYTES_MAX)
        mallopt(_M_TRIM_THRESHOLD, FREED_BYTES_KEPT)


# --- title ------------------------------------------------------------------------------------------------------------
# The name of a process, as `ps` and `top` show it.
_PR_SET_NAME = 15
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46
"""Fields of /proc/self/stat, counted after the command's name: where the arguments of this process are in memory."""


def name_process(name: str) -> None:
    """Call this process `embarcadero <name>`, such as `embarcadero broker 0`.

    The short name (`ps -o comm`, `top`) has 15 characters at most. The command line (`ps -f`) is overwritten in place,
    so a long name is cut to the length of the arguments that the process was started with.
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
# Open files: as many as the system lets us have, and so many connections that some files are always spare.
def within_open_files(config: Config, brokers: int, replicas: int) -> Config:
    """The configuration of a process with so many roles, with no more connections than its open files allow."""
    most = connections_for(brokers, config.broker.max_connections, replicas)
    return msgspec.structs.replace(config, broker=msgspec.structs.replace(config.broker, max_connections=most))


def connections_for(brokers: int, most: int, replicas: int) -> int:
    """How many connections each of a process's brokers may have: `most`, or what the limit of open files leaves.

    Raises the limit as far as allowed, for what replicas may need too. A part stays for regions, the store and new
    connections that are to be refused.
    """
    wanted = brokers * most + replicas * FILES_PER_REPLICA + FILES_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = wanted if soft == resource.RLIM_INFINITY else soft
    return max(1, min(most, (files - min(FILES_SPARE, files // 2)) // max(1, brokers)))


# --- pinning ----------------------------------------------------------------------------------------------------------
# Where node processes run, pinned to cores in turn; and the leading sequencer before others, if permitted.
#
# Sequencers get the first core of the list (one leads, the others sleep), brokers the following; replicas begin with
# the last one.
def parse_cores(text: str) -> list[int]:
    """Cores in a text such as `0,2,3`; empty means no pinning. All must be ours to use."""
    usable = os.sched_getaffinity(0)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    known = {str(core) for core in usable}
    wrong = [part for part in parts if part not in known]
    if wrong:
        raise BadValue(f"no such core: {', '.join(wrong)}", f"usable here: {', '.join(map(str, sorted(usable)))}")
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
    """Has the kernel prefer this process (True), or treat it as it did before (False), if it only hosts a sequencer.

    All processes wait for the one that leads. None waits for those that stand by: what they get ready would keep
    brokers from the processor. It takes a privilege; without, the process is as it is. Kernels that group processes by
    session rank those groups.
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
    """Have the kernel kill this process when its parent dies, even if the parent can't do it any more."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ClusterError(f"the supervisor (pid {parent}) is gone already", "start the cluster with `embarcadero up`")


# --- listening --------------------------------------------------------------------------------------------------------
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
    """Say hello to a broker. Unreachable if it does not answer in time."""
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
# Ports that stay reserved while no process listens on them: a cluster that is killed whole has to get them back.
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
