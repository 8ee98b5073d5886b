"""Simulated time: a queue that jumps from event to event, the trace of a run, and clocks that drift."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from typing import NamedTuple

Action = Callable[[], None]

_LINES_AT_ONCE = 1_000


class Step(NamedTuple):
    """One line of the trace."""

    at: int
    who: str
    what: str


class Trace:
    """The trace of a run. All marked notes go into `digest`: same seed, same digest. Lines are kept only on request."""

    def __init__(self, keep: bool) -> None:
        self._hash = blake2b(digest_size=16)
        self._lines: list[str] = []  # not yet in the hash: hashing many at once is far faster
        self.steps: list[Step] = []
        self.count = 0
        self._keep = keep

    def note(self, at: int, who: str, what: str, marked: bool = True) -> None:
        """Add a line; without `marked` it is not part of the digest."""
        self.count += 1
        if marked:
            self._lines.append(f"{at} {who} {what}\n")
            if len(self._lines) >= _LINES_AT_ONCE:
                self._digest_lines()
        if self._keep:
            self.steps.append(Step(at, who, what))

    def digest(self) -> str:
        """Return the hash of all marked notes so far."""
        self._digest_lines()
        return self._hash.hexdigest()

    def _digest_lines(self) -> None:
        self._hash.update("".join(self._lines).encode())
        self._lines.clear()


class EventQueue:
    """Actions by simulated microseconds; actions of the same moment run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_us = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._planned = 0
        self.done = 0  # actions so far

    def at(self, when_us: int, action: Action) -> None:
        """Plan an action; one in the past runs now."""
        self._planned += 1
        heappush(self._heap, (max(when_us, self.now_us), self._planned, action))

    def after(self, delay_us: int, action: Action) -> None:
        """Plan an action after a delay."""
        self.at(self.now_us + delay_us, action)

    def run(self, until_us: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Run planned actions up to `until_us`, or until `stop`. May be called from within an action."""
        heap = self._heap
        while heap and heap[0][0] <= until_us and not stop():
            when_us, _, action = heappop(heap)
            self.now_us = max(self.now_us, when_us)
            self.done += 1
            action()
        if not stop():
            self.now_us = max(self.now_us, until_us)


class SimClock:
    """The clock of one process, with its own start, rate and date."""

    def __init__(self, queue: EventQueue, rng: random.Random) -> None:
        self._queue = queue
        self._start_us = rng.randrange(1, 10**12)
        self._drift_ppm = rng.randint(-500, 500)
        self._wall_us = 1_760_000_000_000_000 + rng.randint(-288_000_000, 288_000_000)
        self._frozen_us = self._frozen_until_us = 0

    def now_us(self) -> int:
        elapsed = self._queue.now_us
        return self._start_us + elapsed + elapsed * self._drift_ppm // 1_000_000

    def wall_us(self) -> int:
        """Return the date; it may jump, go back, or stand still."""
        return self._wall_us + (self._queue.now_us if self._queue.now_us >= self._frozen_until_us else self._frozen_us)

    def shift(self, by_us: int) -> None:
        """Set the date, as an operator does."""
        self._wall_us += by_us

    def freeze(self, until_us: int) -> None:
        """Freeze the date until then."""
        self._frozen_us, self._frozen_until_us = self._queue.now_us, until_us

    def queue_time(self, local_us: int) -> int:
        """Return the simulated time at which this clock will show `local_us`; rather a little late than early."""
        local = local_us - self._start_us
        return max(0, local - local * self._drift_ppm // 1_000_000 + 1)
