"""Publishers that a program does not close: store their records anyway, or report that they were not stored.

There are three cases.

- A Log is dropped (garbage collected): its event loop closes it in the background.
- An event loop ends: `asyncio.run` cancels all tasks and waits for them, and one of these tasks closes the publishers.
- The program ends: `atexit` runs after the program's threads have ended, while daemon threads still run. So the
  background thread of a synchronous client can close its publishers.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from embarcadero.errors import EmbarcaderoError
from embarcadero.forks import in_each_child
from embarcadero.limits import CLOSE_INTERRUPTED_S, CLOSE_TIMEOUT_S, EXIT_FLUSH_S

_LOG: Final = logging.getLogger("embarcadero.client")
_HINT: Final = "call close() on the publisher, or use it in a `with` block, and check the error"
_MARGIN_S: Final = 1.0  # for the event loop, after the timeout of the publishers


class OpenPublisher(Protocol):
    """A publisher that is not closed, as this module sees it."""

    topic: str
    loop: asyncio.AbstractEventLoop

    @property
    def unstored(self) -> int:
        """Number of records with an error or without an outcome."""
        ...

    @property
    def failure(self) -> EmbarcaderoError | None:
        """The error with which it failed, if it did."""
        ...

    def reports(self) -> list[EmbarcaderoError]:
        """Return losses that no caller has received yet."""
        ...

    async def close(self, timeout: float | None) -> None:  # noqa: ASYNC109 - open batches get their own error then
        """Settle every batch within the timeout."""
        ...


class OpenClient(Protocol):
    """A client as this module sees it: its event loop, and its publishers that are not closed."""

    loop: asyncio.AbstractEventLoop
    pumps: set[OpenPublisher]

    async def close(self) -> None:
        """Drop all connections."""
        ...


_OPEN: set[OpenPublisher] = set()
"""Every publisher of this process that is not closed. A forked child starts with none."""
_hooked_into = 0  # the process that has the hook of multiprocessing


def opened(pump: OpenPublisher) -> None:
    """Register a publisher."""
    _OPEN.add(pump)
    _hook_into_multiprocessing()


def closed(pump: OpenPublisher) -> None:
    """Remove a closed publisher: its caller has received the outcomes of its records."""
    _OPEN.discard(pump)


def close_when_dropped(log: Any, brokers: OpenClient, then: Callable[[], object]) -> weakref.finalize[Any, Any]:
    """Close a client and its publishers in the background when its Log is garbage collected; call `then` last.

    Publishers belong to their Log: a publisher that is dropped alone is closed with its Log. The caller detaches the
    returned finalizer when it closes the client.
    """
    loop = brokers.loop

    async def close() -> None:
        await close_and_report(brokers.pumps, CLOSE_TIMEOUT_S)
        await brokers.close()
        then()

    def dropped() -> None:
        """Hand over to the event loop only: this runs in any thread, at any moment, maybe with locks held."""
        pumps = list(brokers.pumps)
        if not _schedule(loop, lambda: loop.create_task(close())):
            for pump in pumps:
                closed(pump)
                _report(pump)
        if pumps:
            topics = ", ".join(sorted({repr(pump.topic) for pump in pumps}))
            warnings.warn(f"a Log with open publishers into {topics} was dropped: {_HINT}", ResourceWarning, 2)

    finalizer = weakref.finalize(log, dropped)
    finalizer.atexit = False
    return finalizer


def _schedule(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop is closed
        return False
    return True


async def guard(pumps: set[OpenPublisher]) -> None:
    """Close publishers when their event loop ends: `asyncio.run` cancels this task, and waits for it."""
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        await asyncio.sleep(0)  # tasks that were cancelled at the same time may still send
        await close_and_report(pumps, EXIT_FLUSH_S)
        raise


async def close_and_report(pumps: Iterable[OpenPublisher], patience_s: float | None) -> None:
    """Close publishers concurrently, and report records that were not stored."""
    chosen = list(pumps)
    await asyncio.gather(*(pump.close(patience_s) for pump in chosen), return_exceptions=True)
    for pump in chosen:
        _report(pump)


def _report(pump: OpenPublisher) -> None:
    """Log if records were not stored. Without a logging configuration this goes to stderr."""
    why = f": {pump.failure}" if pump.failure is not None else ""
    if pump.unstored:
        problem = "%d records for topic %r were not stored, or their outcome is not known%s; %s"
        _LOG.error(problem, pump.unstored, pump.topic, why, _HINT)
    for report in pump.reports():
        _LOG.error("%s", report)


def close_all() -> None:
    """Close all publishers of this process, within a timeout, and report records that were not stored, at exit."""
    interrupted = isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
    patience_s = CLOSE_INTERRUPTED_S if interrupted else EXIT_FLUSH_S
    by_loop: dict[asyncio.AbstractEventLoop, list[OpenPublisher]] = {}
    for pump in list(_OPEN):
        by_loop.setdefault(pump.loop, []).append(pump)
    deadline = time.monotonic() + patience_s + _MARGIN_S  # for all of them together
    waits = [_start_closing(loop, pumps, patience_s) for loop, pumps in by_loop.items()]
    for done, pumps in waits:
        if not done.wait(max(0.0, deadline - time.monotonic())):  # the loop has stopped, or does not answer
            for pump in pumps:
                _report(pump)
    _OPEN.clear()


def _start_closing(
    loop: asyncio.AbstractEventLoop, pumps: list[OpenPublisher], patience_s: float
) -> tuple[threading.Event, list[OpenPublisher]]:
    """Schedule the close of publishers in a loop that runs in another thread. A stopped loop is not used."""
    done = threading.Event()

    def start() -> None:
        task = loop.create_task(close_and_report(pumps, patience_s))
        task.add_done_callback(lambda _: done.set())

    if not loop.is_running() or not _schedule(loop, start):
        for pump in pumps:
            _report(pump)
        done.set()
    return done, pumps


def _hook_into_multiprocessing() -> None:
    """Register `close_all` in a child of multiprocessing: it runs no `atexit`, only finalizers of multiprocessing."""
    global _hooked_into  # noqa: PLW0603 - one hook per process
    if "multiprocessing.process" not in sys.modules or _hooked_into == os.getpid():
        return
    from multiprocessing import process, util

    if process.parent_process() is not None:
        _hooked_into = os.getpid()
        util.Finalize(None, close_all, exitpriority=100)


atexit.register(close_all)
in_each_child(_OPEN.clear)
