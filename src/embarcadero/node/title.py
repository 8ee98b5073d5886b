"""The name of a process, as `ps` and `top` show it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

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
