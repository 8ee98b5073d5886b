"""Worker threads beside an event loop: what may block runs there, and results come back on the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
