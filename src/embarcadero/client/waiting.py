"""Waiting that Ctrl-C can end at any moment without harm.

A signal handler of Python runs between two instructions: after a call returns, or at the start of a function. An
exception that it raises inside `threading.Condition`, which is Python code, may leave the lock taken for ever, and
every other thread stuck. `with` on a lock written in C has no such moment. So a lock is only ever taken by `with`, it
is always the C one, and nobody holds it while waiting: whoever is woken takes it again and looks again.
"""

from __future__ import annotations

import time
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any

from embarcadero.errors import EmbarcaderoError
from embarcadero.forks import RefusingLock

_SLICE_S = 1.0
"""Longest sleep: whoever was to wake us may itself have been interrupted."""


class Waitable:
    """Where threads wait for a change of what `lock` guards."""

    def __init__(self) -> None:
        self.lock: Any = allocate_lock()
        self._waiters: list[Any] = []  # locks, each held by who sleeps on it

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Without the lock: wait until the predicate, asked with the lock held, is true; its last value."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            waiter = allocate_lock()
            waiter.acquire()
            left = _SLICE_S if give_up is None else min(_SLICE_S, give_up - time.monotonic())
            with self.lock:
                if predicate():
                    return True
                if left <= 0:
                    return False
                self._waiters.append(waiter)
            if not waiter.acquire(True, left):
                with self.lock:
                    if waiter in self._waiters:  # nobody else would take it away while nothing changes
                        self._waiters.remove(waiter)

    def refuse(self, error: EmbarcaderoError) -> None:
        """After a fork, in the child: whoever takes the lock, or waits, gets this error."""
        self.lock = RefusingLock(error)

    def notify_all(self) -> None:
        """With the lock held: let everybody look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
