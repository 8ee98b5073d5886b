"""Whether a process is still the one that it was: its number alone is not enough, since numbers are used again."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_START_FIELD = 19
"""Of /proc/<pid>/stat, counted after the command's name: when the process started, in ticks since the machine did."""


def process_mark(pid: int) -> str:
    """What names one process for ever: this run of the machine, its number, and when it started; "" if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        boot = _BOOT.read_text().strip()
    except OSError:
        return _mark_without_proc(pid)
    fields = stat.rpartition(")")[2].split()
    gone = len(fields) <= _START_FIELD or fields[0] in {"Z", "X"}
    return "" if gone else f"{boot}/{pid}/{fields[_START_FIELD]}"


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
