"""Objects that must change in a forked child: the child has their memory, but not their threads.

A fork copies one thread only. Locks of other threads stay locked in the child, event loops share their epoll descriptor
with the parent, and so do sockets. So each registered object gets a call in the child before other code runs there. It
releases these resources without a system call that affects the parent.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from embarcadero.errors import EmbarcaderoError


class Forkable(Protocol):
    """An object that must change after a fork."""

    def _after_fork(self) -> None:
        """Runs in the child, in its only thread. It takes no lock and does not wait."""
        ...


_KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()
_ABANDONED: list[object] = []  # objects of the parent: their destructors would affect resources that it still uses


def tell_of_forks(known: Forkable) -> None:
    """Register an object: `known._after_fork()` runs in every child that is forked while `known` exists."""
    _KNOWN.add(known)


def abandon(*things: object) -> None:
    """Keep objects of the parent process, unused, as long as the child lives."""
    _ABANDONED.extend(things)


def blank(descriptor: int) -> None:
    """Release a descriptor without freeing its number, which objects of the parent still have."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)


class RefusingLock:
    """Replaces a lock: taking it raises an error."""

    def __init__(self, error: EmbarcaderoError) -> None:
        self._error = error

    def __enter__(self) -> None:
        raise type(self._error)(self._error.message, self._error.hint)

    def __exit__(self, *_: object) -> None: ...


def _in_child() -> None:
    """Call every object, also after the failure of another. Python prints an error from here, and the child runs."""
    failures: list[Exception] = []
    for known in list(_KNOWN):
        try:
            known._after_fork()
        except Exception as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("some objects of embarcadero may not work in this forked child", failures)


def in_each_child(call: Callable[[], object]) -> None:
    """Register a function to call in every forked child. Windows has no forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


in_each_child(_in_child)
