"""Being told at once that a process of this machine is gone. No polling: the kernel tells the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from embarcadero.placement.liveness import process_mark, same_process
from embarcadero.placement.records import pid_of_mark


class ProcessWatch:
    """Follows one process at a time, by what names it for ever: a process that got its number later is another one."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end, self._mark, self._fd = on_end, "", -1

    def follow(self, mark: str) -> None:
        """Tell when this process ends, now if it has. Empty: nobody. Of one on another machine nothing is known."""
        if mark == self._mark:
            return
        self.close()
        self._mark = mark
        here = process_mark(os.getpid()).partition("/")[0]
        if not mark or mark.partition("/")[0] != here:
            return
        with contextlib.suppress(OSError):  # gone, or a kernel that can't do it: then hearts are listened to
            self._fd = os.pidfd_open(pid_of_mark(mark))
        if not same_process(mark):  # looked at after opening: the number may have been given away just before
            self._on_end(mark)
        elif self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        mark = self._mark
        self._let_go()
        self._on_end(mark)

    def close(self) -> None:
        """Follow nobody."""
        self._let_go()
        self._mark = ""

    def _let_go(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
