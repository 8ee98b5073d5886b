"""Objects that must change in a forked child: the child has their memory, and none of the threads that served them.

A fork copies one thread only. Locks that other threads held stay locked in the child, event loops share their epoll
descriptor with the parent, and sockets are the parent's. So each object that registers here is told, in the child and
before anything else runs there, to let go of all that without a system call that the parent could notice.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from embarcadero.errors import EmbarcaderoError


class Forkable(Protocol):
    """Something that has to know of a fork."""

    def _after_fork(self) -> None:
        """In the child, in its only thread: take no lock, wait for nothing."""
        ...


_KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()
_ABANDONED: list[object] = []  # of the parent: kept, because destructors would act on what it still uses


def tell_of_forks(known: Forkable) -> None:
    """Have `known._after_fork()` called in every child that is forked while `known` lives."""
    _KNOWN.add(known)


def abandon(*things: object) -> None:
    """Keep objects of the parent process for as long as the child lives, unused."""
    _ABANDONED.extend(things)


def blank(descriptor: int) -> None:
    """Let go of a descriptor without freeing its number, which objects of the parent still have."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)


class RefusingLock:
    """Stands where a lock was: taking it raises an error."""

    def __init__(self, error: EmbarcaderoError) -> None:
        self._error = error

    def __enter__(self) -> None:
        raise type(self._error)(self._error.message, self._error.hint)

    def __exit__(self, *_: object) -> None: ...


def _in_child() -> None:
    """Tell every object, whatever becomes of the others. Python prints what is raised here, and runs the child."""
    failures: list[Exception] = []
    for known in list(_KNOWN):
        try:
            known._after_fork()
        except Exception as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("objects of embarcadero that may not work in this forked child", failures)


def in_each_child(call: Callable[[], object]) -> None:
    """Have a function called in every forked child. Windows has no forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


in_each_child(_in_child)
