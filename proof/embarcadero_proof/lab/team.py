"""Worker processes of a measurement: each does one task, meets the others on request, and answers with one value.

Workers end with the `with` block, and with the parent however it ends. Ctrl-C does not end them: only the parent
handles it, once.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from embarcadero.errors import EmbarcaderoError, TimedOut
from embarcadero.node.process import die_with

READY_S = 60.0
RESULT_S = 600.0


class Seat:
    """A worker's side of the link."""

    def __init__(self, link: Connection[Any, Any]) -> None:
        self._link = link

    def meet(self, value: Any = None) -> None:
        """Send the parent a value, and wait for its signal to continue."""
        self._link.send(("ready", value))
        self._link.recv()


def _main(link: Connection[Any, Any], parent: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with(parent)
    try:
        link.send(("done", work(Seat(link), *arguments)))
    except Exception as error:
        if not isinstance(error, EmbarcaderoError):
            error = EmbarcaderoError(f"{type(error).__name__}: {error}", "report it: this is a bug")
        link.send(("failed", error))


class Worker:
    """The parent's side of the link to one worker."""

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        context = mp.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, os.getpid(), work, arguments), daemon=True)
        resource_tracker.ensure_running()  # otherwise the first start begins it, which unblocks the signal
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the worker
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def ready(self, timeout: float = READY_S) -> Any:
        """Return the worker's value when it is ready."""
        return self._receive("ready", timeout)

    def go(self) -> None:
        """Let the worker continue."""
        self._link.send(None)

    def result(self, timeout: float = RESULT_S) -> Any:
        """Return the worker's result."""
        return self._receive("done", timeout)

    def _receive(self, expected: str, timeout: float) -> Any:
        if not any(
            wait([self._link], 1.0) for _ in range(math.ceil(timeout))
        ):  # a pause of all processes counts as one step
            raise TimedOut(f"a worker was not {expected} within {timeout:g} s", "measure less, or find out why")
        try:
            kind, value = self._link.recv()
        except EOFError:
            raise EmbarcaderoError("a worker process ended too early", "was it killed?") from None
        if kind == "failed":
            raise value
        return value

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._link.close()


class Team:
    """Several workers that start together."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def add(self, work: Callable[..., Any], *arguments: Any) -> Worker:
        """Start `work(seat, *arguments)` in its own process."""
        self._workers.append(Worker(work, arguments))
        return self._workers[-1]

    def meet(self) -> list[Any]:
        """Wait until all workers are ready, let all continue, and return their values."""
        values = [worker.ready() for worker in self._workers]
        for worker in self._workers:
            worker.go()
        return values

    def results(self, timeout: float = RESULT_S) -> list[Any]:
        """Return the results of all workers."""
        return [worker.result(timeout) for worker in self._workers]

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()


def alone(work: Callable[..., Any], *arguments: Any, timeout: float = RESULT_S) -> Any:
    """Run one task in its own process; it does not wait for others."""
    with Team() as team:
        return team.add(work, *arguments).result(timeout)
