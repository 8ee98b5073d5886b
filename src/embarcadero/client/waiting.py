"""Waiting that Ctrl-C can end at any moment without harm.

A signal handler of Python runs between two instructions: after a call returns, or at the start of a function. An
exception that it raises inside `threading.Condition.__enter__`, which is Python code, leaves the lock taken for ever,
and every other thread stuck. `with` on a lock written in C has no such moment, so the lock here is the C one, and a
wait gives it back and takes it again in calls that can't be interrupted halfway.
"""

from __future__ import annotations

import time
from _thread import RLock, allocate_lock, get_ident
from collections.abc import Callable
from typing import Any

_SLICE_S = 1.0
"""Longest sleep: whoever was to wake us may itself have been interrupted."""


class Waitable(RLock):  # type: ignore[misc]  # the C type can be a base
    """A lock that can be waited with; `with` it. Held once at a time, like a plain lock."""

    def __init__(self) -> None:
        self._waiters: list[Any] = []  # locks, each held by who sleeps on it

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """With the lock held: wait until the predicate is true; its last value. The lock is held again at the end."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while not (done := predicate()):
            left = _SLICE_S if give_up is None else min(_SLICE_S, give_up - time.monotonic())
            if left <= 0:
                break
            self._sleep(left)
        return done

    def _sleep(self, seconds: float) -> None:
        waiter = allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        held = (1, get_ident())
        try:
            self._release_save()  # type: ignore[attr-defined]
            waiter.acquire(True, seconds)
        finally:
            self._acquire_restore(held)  # type: ignore[attr-defined]  # one call in C that no signal ends early

    def notify_all(self) -> None:
        """With the lock held: let everybody look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
