"""The seam in a real process: doorbells, worker threads, notification of process ends.

Doorbells connect processes of one host: named pipes in the fabric's folder. Listings of regions do not show them.

A ring only shortens a sleep. A ring may be lost (no listener, a full pipe): every sleeper also wakes on a timer. Bells
are pipes and not datagram sockets, because one read takes all pending rings, and a ring costs a third.
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
"""The capacity of a pipe."""
_RINGERS_MAX: Final = 1_024
"""Open pipe ends that a bell keeps; beyond this number, it closes all and reopens them on demand."""


class PipeBell:
    """A role's doorbell: it waits for rings of its own name, and can ring other roles."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder, self._mine = folder, _bell_path(folder, who)
        with contextlib.suppress(FileExistsError):  # left by an earlier process of this name
            os.mkfifo(self._mine, 0o600)
        self._fd = os.open(self._mine, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # also a writer: prevents end-of-file
        self._ringers: dict[str, int] = {}
        self._taken = (bytearray(_AT_ONCE),)  # the bytes have no meaning
        self._loop: asyncio.AbstractEventLoop | None = None
        self.rung = False  # since the last wait
        self._sleeper: asyncio.Future[None] | None = None
        self._on_ring: Callable[[], bool] | None = None

    def ring(self, who: str) -> None:
        """Wake the role `who`, if it listens."""
        fd = self._ringers.get(who)
        try:
            if fd is None:
                fd = self._open(who)
            os.write(fd, b"!")
        except BlockingIOError:
            pass  # the pipe is full: the listener has rings enough
        except OSError:
            if fd is not None:
                os.close(self._ringers.pop(who))  # the listener has closed its end

    def _open(self, who: str) -> int:
        if len(self._ringers) >= _RINGERS_MAX:
            self._let_go()
        fd = os.open(_bell_path(self._folder, who), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ringers[who] = fd
        return fd

    def _let_go(self) -> None:
        for fd in self._ringers.values():
            os.close(fd)
        self._ringers.clear()

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None:
        """Sleep until a ring or until the timeout.

        Each ring during the sleep calls `on_ring`, and the sleep continues unless it returns True. `on_ring` does work
        that another process waits for: a future, a task and a new timer would take longer.
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
        """Ring this bell: there is work to do now."""
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
            sleeper.set_exception(error)  # `on_ring` did the sleeper's work and failed

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
    """Wake the role `who`, if it listens. For processes without a bell of their own."""
    with contextlib.suppress(OSError):
        fd = os.open(_bell_path(folder, who), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fd, b"!")
        finally:
            os.close(fd)


def _bell_path(folder: Path, who: str) -> str:
    return f"{folder}/.bell-{who}"


# --- workers ----------------------------------------------------------------------------------------------------------
# Worker threads beside an event loop: blocking jobs run there, and results return to the loop.
T = TypeVar("T")


class ThreadWorkers:
    """Worker threads that keep blocking jobs off the event loop. Create and use it on the event loop."""

    def __init__(self, threads: int, name: str, on_done: Callable[[], None] = lambda: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._on_done = on_done  # usually wakes the role's loop
        self._closed = False

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job` in a thread, then `done` on the event loop. After `close`, neither runs."""
        if not self._closed:
            self._pool.submit(self._work, job, done)

    def _work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nothing waits for the result
            self._loop.call_soon_threadsafe(self._report, done, result)

    def _report(self, done: Callable[[T | Exception], None], result: T | Exception) -> None:
        if not self._closed:
            done(result)
            self._on_done()

    def close(self) -> None:
        """Wait for running jobs; drop queued jobs."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)


# --- pidfd ------------------------------------------------------------------------------------------------------------
# Immediate notification that a process of this machine has ended. No polling: the kernel wakes the event loop.
class ProcessWatch:
    """Follows one process at a time by its mark. A later process with the same pid has a different mark."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end, self._mark, self._fd = on_end, "", -1

    def follow(self, mark: str) -> None:
        """Call `on_end` when this process ends, or now if it has ended.

        An empty mark, or the mark of a process on another machine, follows no process.
        """
        if mark == self._mark:
            return
        self.close()
        self._mark = mark
        here = process_mark(os.getpid()).partition("/")[0]
        if not mark or mark.partition("/")[0] != here:
            return
        with contextlib.suppress(OSError):  # the process ended, or the kernel is old: then only heartbeats count
            self._fd = os.pidfd_open(pid_of_mark(mark))
        if not same_process(mark):  # checked after opening: the kernel may have reused the pid just before
            self._on_end(mark)
        elif self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._ended)

    def _ended(self) -> None:
        mark = self._mark
        self._let_go()
        self._on_end(mark)

    def close(self) -> None:
        """Follow no process."""
        self._let_go()
        self._mark = ""

    def _let_go(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
