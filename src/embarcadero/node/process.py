"""What a process of a cluster does to itself before it works: rights, logging, name, open files, cores, parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from embarcadero.config import Config
from embarcadero.config.table import LogKeys
from embarcadero.errors import BadValue, ClusterError
from embarcadero.limits import FETCH_BYTES_MAX, FILES_PER_REPLICA, FILES_SPARE, FREED_BYTES_KEPT
from embarcadero.node.roles import Role
from embarcadero.watch.logs import set_up_logging

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
        room = end - start
        if start and room > 1:
            title = f"embarcadero {readable}".encode()[: room - 1]
            ctypes.memmove(start, title.ljust(room, b"\0"), room)


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
# Where and before whom node processes run: pinned to cores, in turn; whoever reigns before others, if permitted.
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

    Everybody waits for the one that reigns, and nobody for those that stand by: what they have to get ready would keep
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
