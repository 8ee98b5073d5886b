"""What a process of a cluster does first with its configuration."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from embarcadero.config.table import Log
from embarcadero.limits import FETCH_BYTES_MAX, FREED_BYTES_KEPT
from embarcadero.watch.logs import set_up_logging

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


_OTHERS = 0o077


def be_private() -> None:
    """Give no other user any right to the files that this process makes."""
    os.umask(_OTHERS)


def start_logging(what: str, settings: Log, secrets: Sequence[str] = ()) -> None:
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
