"""The identity of processes, and their liveness.

The system reuses process ids, so a process is identified by a mark: the boot of the machine, its id, its start time.
Heartbeat timeouts are measured on the local clock. Time during which this process was paused does not count.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Generic, TypeVar

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STAT_BYTES_MAX = 4_096
_USER_FIELD, _SYSTEM_FIELD = 11, 12
"""Fields of /proc/<pid>/stat, counted after the command's name: the processor time of the process, in ticks."""
_START_FIELD = 19
"""Likewise: the start time of the process, in ticks since the boot."""


@cache
def _boot() -> str:
    """Return the id of this boot of the machine. It does not change while a process runs."""
    return _BOOT.read_text().strip()


def process_mark(pid: int) -> str:
    """Return the unique mark of a process: the boot of the machine, its id and its start time; "" if it has ended.

    Every transaction of a store checks all holders of leases, so this reads without a file object.
    """
    try:
        fields = _stat(pid)
        boot = _boot()
    except OSError:
        return _mark_without_proc(pid)
    gone = len(fields) <= _START_FIELD or fields[0] in {b"Z", b"X"}
    return "" if gone else f"{boot}/{pid}/{int(fields[_START_FIELD])}"


def ticks_if_stopped(pid: int) -> int | None:
    """Return the processor time of a stopped process (SIGSTOP). None: it is not stopped, or has ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    stopped = len(fields) > _SYSTEM_FIELD and fields[0] == b"T"  # "t" is a stop by a debugger
    return int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD]) if stopped else None


def _stat(pid: int) -> list[bytes]:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)


def same_process(mark: str) -> bool:
    """Whether the marked process is still running."""
    parts = mark.split("/")
    return len(parts) == 3 and parts[1].isdigit() and process_mark(int(parts[1])) == mark


def _mark_without_proc(pid: int) -> str:
    """Return a mark on systems without /proc: it has only the process id."""
    if Path("/proc/self/stat").exists():
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return f"-/{pid}/-"


# --- heartbeats -------------------------------------------------------------------------------------------------------
_LOOK_US_MAX: Final = 500_000
"""A longer interval between two looks was a pause of this process. A role then gets time for another heartbeat."""

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True)
class _Pulse:
    """The last heartbeat of an incarnation, the time of the last look, and how long the heartbeat has not changed."""

    beat: int
    looked_us: int
    silent_us: int = 0


class Pulses(Generic[Who]):
    """The heartbeats of several incarnations."""

    def __init__(self) -> None:
        self._pulses: dict[Who, _Pulse] = {}

    def silent_us(self, who: Who, beat: int, now_us: int) -> int:
        """Note a look at a heartbeat, and return for how long it has not changed."""
        pulse = self._pulses.get(who)
        if pulse is None or pulse.beat != beat:
            pulse = self._pulses[who] = _Pulse(beat, now_us)
        pulse.silent_us += min(now_us - pulse.looked_us, _LOOK_US_MAX)
        pulse.looked_us = now_us
        return pulse.silent_us

    def keep(self, known: set[Who]) -> set[Who]:
        """Forget all other incarnations, and return them."""
        gone = self._pulses.keys() - known
        for who in gone:
            del self._pulses[who]
        return gone
