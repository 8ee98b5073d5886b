"""Progress of a run of many seeds: a bar on a terminal, else occasional lines; failing seeds immediately."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0


class Watch:
    """Shows the progress of a run. Its lines go to stderr, unless `console` is a terminal."""

    def __init__(
        self, console: Console, seeds: int, before: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._clock, self._began = clock, clock()
        self._printed = self._began
        self._seeds, self._done = seeds, before  # seeds of an earlier run count as done
        self._failed: list[int] = []
        self._events = self._simulated_us = 0
        self._console = console if console.is_terminal else Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("", total=seeds, completed=before)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._progress.stop()

    def seed_done(self, seed: int, events: int, simulated_us: int, violation: str) -> None:
        """Count a finished seed; `violation` describes its failure, if it failed."""
        self._done += 1
        self._events += events
        self._simulated_us += simulated_us
        if violation:
            self._failed.append(seed)
            self._print(f"seed {seed} fails: {violation}")
        self._progress.update(self._task, advance=1, description=self.facts())
        if self._progress.disable and self._clock() - self._printed >= LINE_EVERY_S:
            self._printed = self._clock()
            self._print(f"{self._done} of {self._seeds} seeds, {self.facts()}")

    def facts(self) -> str:
        """All figures in one line."""
        passed_s = max(1e-3, self._clock() - self._began)
        failed = f"{len(self._failed)} failed" if self._failed else "all hold"
        ratio = self._simulated_us / 1e6 / passed_s
        return f"{failed}, {self._events / passed_s:,.0f} events/s, {ratio:.0f} x real time"

    def _print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
