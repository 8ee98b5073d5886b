"""The seam in a real process: doorbells, worker threads, ends of other processes.

Doorbells ring between processes of one host: named pipes in the fabric's folder, hidden from those who list regions.

A bell only shortens a sleep. It may be lost (no listener, a full pipe); every sleeper also wakes by itself. A pipe and
not a datagram socket: one read takes all rings at once, and a ring costs a third.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from embarcadero.limits import KIB
from embarcadero.liveness import process_mark, same_process
from embarcadero.placement.records import pid_of_mark

_AT_ONCE: Final = 64 * KIB
"""All that a pipe holds."""
_RINGERS_MAX: Final = 1_024
"""Open ends that a bell keeps; beyond that they are opened anew."""


class PipeBell:
    """One role's bell: it hears its own name and can ring others."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder, self._mine = folder, _place(folder, who)
        with contextlib.suppress(FileExistsError):  # of one who had this name before us
            os.mkfifo(self._mine, 0o600)
        self._fd = os.open(self._mine, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # a writer too: else it would "end"
        self._ringers: dict[str, int] = {}
        self._taken = (bytearray(_AT_ONCE),)  # rings say nothing
        self._loop: asyncio.AbstractEventLoop | None = None
        self.rung = False  # since the last wait
        self._sleeper: asyncio.Future[None] | None = None
        self._on_ring: Callable[[], bool] | None = None

    def ring(self, who: str) -> None:
        """Wake `who`, if it listens."""
        fd = self._ringers.get(who)
        try:
            if fd is None:
                fd = self._open(who)
            os.write(fd, b"!")
        except BlockingIOError:
            pass  # it has rings enough
        except OSError:
            if fd is not None:
                os.close(self._ringers.pop(who))  # whoever heard it is gone

    def _open(self, who: str) -> int:
        if len(self._ringers) >= _RINGERS_MAX:
            self._let_go()
        fd = os.open(_place(self._folder, who), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ringers[who] = fd
        return fd

    def _let_go(self) -> None:
        for fd in self._ringers.values():
            os.close(fd)
        self._ringers.clear()

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None:
        """Sleep until rung or until the time is over.

        `on_ring` is called by each ring that finds us asleep, and we sleep on unless it says that there is more to do:
        somebody waits for what it does, and to get there through a future, a task and a new timer takes longer.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._heard)
        if self.rung or timeout_s <= 0:
            await asyncio.sleep(0)
        else:
            self._sleeper, self._on_ring = self._loop.create_future(), on_ring
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await self._sleeper
            finally:
                timer.cancel()
        self.rung = False

    def wake(self) -> None:
        """Ring for ourselves: something is to be seen to at once."""
        self.rung = True
        self._wake()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def _heard(self) -> None:
        try:
            os.readv(self._fd, self._taken)
        except BlockingIOError:
            return
        sleeper = self._sleeper
        if sleeper is None or sleeper.done():
            self.rung = True
        elif self._on_ring is None:
            sleeper.set_result(None)
        else:
            self._answer(sleeper, self._on_ring)

    @staticmethod
    def _answer(sleeper: asyncio.Future[None], on_ring: Callable[[], bool]) -> None:
        try:
            if on_ring() and not sleeper.done():
                sleeper.set_result(None)
        except Exception as error:
            if sleeper.done():
                raise
            sleeper.set_exception(error)  # whoever waits is whose work failed

    def close(self) -> None:
        """Stop listening."""
        if self._fd < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._let_go()


def ring_once(folder: Path, who: str) -> None:
    """Wake `who`, if it listens, for one who has no bell."""
    with contextlib.suppress(OSError):
        fd = os.open(_place(folder, who), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b"!")
        finally:
            os.close(fd)


def _place(folder: Path, who: str) -> str:
    return f"{folder}/.bell-{who}"


# --- workers ----------------------------------------------------------------------------------------------------------
# Worker threads beside an event loop: what may block runs there, and results come back on the loop.
T = TypeVar("T")


class ThreadWorkers:
    """Workers for processes whose event loop has other work to do meanwhile. Made and used on the event loop."""

    def __init__(self, threads: int, name: str, on_done: Callable[[], None] = lambda: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._on_done = on_done  # usually wakes the role's loop
        self._closed = False

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job` in a thread; then `done`, on the event loop. After `close` nothing is run and nothing is told."""
        if not self._closed:
            self._pool.submit(self._work, job, done)

    def _work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this any more
            self._loop.call_soon_threadsafe(self._tell, done, result)

    def _tell(self, done: Callable[[T | Exception], None], result: T | Exception) -> None:
        if not self._closed:
            done(result)
            self._on_done()

    def close(self) -> None:
        """Wait for jobs that run; drop those that wait."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


# --- pidfd ------------------------------------------------------------------------------------------------------------
# Being told at once that a process of this machine is gone. No polling: the kernel tells the event loop.
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
