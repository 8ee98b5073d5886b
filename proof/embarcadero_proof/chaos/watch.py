"""One observer of a real cluster: all events of its threads go, by one clock, into the history that checkers read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero_proof.sim.history import Event, Fault, History, LaneMade


class Observer:
    """Events of many threads, in the order of their observation."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns, self._began_ns = clock_ns, clock_ns()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._lanes: set[int] = set()

    def now_us(self) -> int:
        """The observer's clock: microseconds since it began."""
        return (self._clock_ns() - self._began_ns) // 1000

    def saw(self, kind: type[Event], /, **fields: Any) -> int:
        """Record an event now; return its time."""
        with self._lock:
            at = self.now_us()
            self._events.append(kind(at=at, **fields))
        return at

    def saw_lane(self, lane: int, topic: int, order: int) -> None:
        """Record a lane of a broker once, before anything about it."""
        if lane < BROKER_LANES_FIRST:
            return
        with self._lock:
            if lane not in self._lanes:
                self._lanes.add(lane)
                self._events.append(LaneMade(at=self.now_us(), lane=lane, topic=topic, order=order))

    def broke(self, kind: str, target: str, began_us: int) -> None:
        """Record the end of a fault that began at `began_us`."""
        with self._lock:
            self._events.append(Fault(at=began_us, kind=kind, target=target, until=self.now_us()))

    def of(self, kind: type[Event]) -> list[Any]:
        """Return the events of one kind so far."""
        with self._lock:
            return [event for event in self._events if type(event) is kind]

    def history(self) -> History:
        """Return all events by time; faults were recorded when they were over."""
        with self._lock:
            return History(sorted(self._events, key=lambda event: event.at))
