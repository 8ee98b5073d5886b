"""The background thread of a synchronous client: one event loop, shared by a log's publishers and subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from _thread import allocate_lock
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from embarcadero.errors import Closed
from embarcadero.forks import abandon, blank, tell_of_forks

Result = TypeVar("Result")
_JOIN_S = 5.0
_LOOK_S = 1.0  # how often a waiting caller looks whether the thread is still there


class _Call(Generic[Result]):
    """A coroutine that a caller waits for. Only locks written in C: see waiting.py."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[Result] | None = None
        self._given_up = False
        self.ended = allocate_lock()
        self.ended.acquire()

    # --- event loop ---
    def start(self) -> None:
        if self._given_up:
            self._coroutine.close()
            return
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(lambda _: self.ended.release())

    def give_up(self) -> None:
        self._given_up = True
        if self._task is not None:
            self._task.cancel()

    # --- caller, once it has ended ---
    def result(self) -> Result:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            return self._task.result()
        if self._task is None:
            self._coroutine.close()  # the loop ended before it came to this call
        raise Closed("the log was closed meanwhile", "connect again")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it exists: it has no build for Windows."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _waiting_descriptor(loop: asyncio.AbstractEventLoop) -> int | None:
    """The descriptor on which an event loop waits (epoll, kqueue); None: it has none that a fork would share."""
    backend = getattr(loop, "_get_backend_id", None)  # uvloop
    backend = backend or getattr(getattr(loop, "_selector", None), "fileno", None)  # asyncio
    return None if backend is None else int(backend())


class LoopThread:
    """A daemon thread that runs an event loop until stopped."""

    def __init__(self) -> None:
        self.alive = True  # asked instead of the Thread, whose own answer is wrong after an interrupt (Python 3.11)
        self.at_end: Callable[[], object] = lambda: None  # called in the loop before it ends
        self.after_end: Callable[[], object] = lambda: None  # called in the thread after it
        self._start()
        tell_of_forks(self)

    def _start(self) -> None:
        self._loop = _new_event_loop()
        self._over = allocate_lock()
        self._over.acquire()
        self._ending = False
        self._lapsed: Any = None  # after a fork: the lock of the thread that starts it again
        self._thread = threading.Thread(target=self._run, name="embarcadero-client", daemon=True)
        self._thread.start()

    def _after_fork(self) -> None:
        """In a forked child there is no such thread. The first call there starts one, with an event loop of its own."""
        if self.alive:
            abandon(self._loop, self._thread)
            if (descriptor := _waiting_descriptor(self._loop)) is not None:
                blank(descriptor)
            self.after_end = lambda: None
            self._lapsed = allocate_lock()

    @property
    def lapsed(self) -> bool:
        """Whether the process was forked, and no call was made in the child yet."""
        return self._lapsed is not None

    def _start_again(self) -> None:
        if (lock := self._lapsed) is not None:
            with lock:
                if self._lapsed is lock and self.alive:
                    self._start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._cancel_tasks()
            self.at_end()
            self._loop.run_until_complete(asyncio.sleep(0))  # connections that were dropped are closed now
            self._cancel_tasks()  # of calls that came meanwhile
            self._loop.close()
            self.alive = False
            self._over.release()
            self.after_end()

    def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function soon; does not wait. After the end it does nothing."""
        if self._lapsed is not None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for it. Ctrl-C cancels it and gets through."""
        if not self.alive:
            coroutine.close()
            raise Closed("the log is closed", "connect again")
        self._start_again()
        call = _Call(coroutine)
        try:
            self.call(call.start)
            while self.alive and not call.ended.acquire(True, _LOOK_S):
                continue
            return call.result()
        except BaseException:
            self.call(call.give_up)
            raise

    def end(self) -> None:
        """In the loop: end it."""
        if not self._ending:
            self._ending = True
            self._loop.stop()

    def stop(self) -> None:
        """End the loop and the thread."""
        if self._lapsed is not None:
            self.alive = False
            return
        self.call(self.end)
        if threading.current_thread() is not self._thread and self._over.acquire(True, _JOIN_S):
            self._over.release()  # for whoever stops it again
