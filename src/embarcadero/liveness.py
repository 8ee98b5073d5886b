"""Whether a process is still the one that it was, and whether it is alive.

Numbers of processes are used again, so a process is named by a mark: this run of the machine, its number, its start.
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
"""Of /proc/<pid>/stat, counted after the command's name: the processor's time that it has had, in ticks."""
_START_FIELD = 19
"""Likewise: when the process started, in ticks since the machine did."""


@cache
def _boot() -> str:
    """This run of the machine: no process sees another one."""
    return _BOOT.read_text().strip()


def process_mark(pid: int) -> str:
    """What names one process for ever: this run of the machine, its number, and when it started; "" if it is gone.

    Every transaction of a store asks for all who hold leases, so it reads without a file object.
    """
    try:
        fields = _stat(pid)
        boot = _boot()
    except OSError:
        return _mark_without_proc(pid)
    gone = len(fields) <= _START_FIELD or fields[0] in {b"Z", b"X"}
    return "" if gone else f"{boot}/{pid}/{int(fields[_START_FIELD])}"


def ticks_if_stopped(pid: int) -> int | None:
    """The processor's time that a stopped process (SIGSTOP) has had; None if it is not stopped, or gone."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    stopped = len(fields) > _SYSTEM_FIELD and fields[0] == b"T"  # "t" is a debugger's
    return int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD]) if stopped else None


def _stat(pid: int) -> list[bytes]:
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)


def same_process(mark: str) -> bool:
    """Whether the process that was marked is still running."""
    parts = mark.split("/")
    return len(parts) == 3 and parts[1].isdigit() and process_mark(int(parts[1])) == mark


def _mark_without_proc(pid: int) -> str:
    """Where there is no /proc: the number is all there is."""
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
"""A longer time between two looks was a pause of this process: a role that beat meanwhile gets time to do it again."""

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True)
class _Pulse:
    """The last heartbeat of one incarnation, when we looked last, and how long it has been the same."""

    beat: int
    looked_us: int
    silent_us: int = 0


class Pulses(Generic[Who]):
    """The heartbeats of some incarnations."""

    def __init__(self) -> None:
        self._pulses: dict[Who, _Pulse] = {}

    def silent_us(self, who: Who, beat: int, now_us: int) -> int:
        """Look once more: for how long its heart has stood still."""
        pulse = self._pulses.get(who)
        if pulse is None or pulse.beat != beat:
            pulse = self._pulses[who] = _Pulse(beat, now_us)
        pulse.silent_us += min(now_us - pulse.looked_us, _LOOK_US_MAX)
        pulse.looked_us = now_us
        return pulse.silent_us

    def keep(self, known: set[Who]) -> set[Who]:
        """Forget all others. Returns them."""
        gone = self._pulses.keys() - known
        for who in gone:
            del self._pulses[who]
        return gone
