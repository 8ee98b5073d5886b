"""Whether a process is still the one that it was: its number alone is not enough, since numbers are used again."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STAT_BYTES_MAX = 4_096
_START_FIELD = 19
"""Of /proc/<pid>/stat, counted after the command's name: when the process started, in ticks since the machine did."""


@cache
def _boot() -> str:
    """This run of the machine: no process sees another one."""
    return _BOOT.read_text().strip()


def process_mark(pid: int) -> str:
    """What names one process for ever: this run of the machine, its number, and when it started; "" if it is gone.

    Every transaction of a store asks for all who hold leases, so it reads without a file object.
    """
    try:
        stat = _read(f"/proc/{pid}/stat")
        boot = _boot()
    except OSError:
        return _mark_without_proc(pid)
    fields = stat.rpartition(b")")[2].split()
    gone = len(fields) <= _START_FIELD or fields[0] in {b"Z", b"X"}
    return "" if gone else f"{boot}/{pid}/{int(fields[_START_FIELD])}"


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX)
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
