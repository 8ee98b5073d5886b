"""The machine and the commit of a measurement: figures mean nothing without them."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from embarcadero import limits

_LIBRARIES = ("numpy", "pyarrow", "uvloop", "msgspec", "google-crc32c")
_CONFIGURED = (
    "LOG_BYTES", "CHUNK_BYTES", "PENDING_SLOTS", "ORDER_SLOTS", "SESSION_WINDOW", "CREDIT_BYTES", "SCRATCH_BYTES",
    "WINDOW_BYTES_DEFAULT", "BATCH_BYTES_DEFAULT", "LINGER_MS_DEFAULT", "FETCH_BYTES_DEFAULT", "PREFETCH_FETCHES",
    "IDLE_WAIT_S_MAX", "HEARTBEAT_S",
)  # fmt: skip


def machine_facts() -> dict[str, Any]:
    """Return the machine, the software and the time."""
    return {
        "cpu": _line_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": _line_of("/proc/meminfo", "MemTotal"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str:
    """Return the commit of the source, with a + if there are uncommitted changes; `unknown` outside a repository."""
    here = Path(__file__).parent
    if not (name := _git(here, "rev-parse", "--short", "HEAD")):
        return "unknown"
    return name + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def configuration() -> dict[str, Any]:
    """Return the sizes and times of cluster and client, the same for all rows: all defaults."""
    return {name.lower(): getattr(limits, name) for name in _CONFIGURED if hasattr(limits, name)}


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=folder)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _line_of(path: str, name: str) -> str:
    """Return the value of a `name: value` line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
