"""The background thread of a synchronous client: one event loop, shared by a log's publishers and subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from embarcadero.errors import Closed

Result = TypeVar("Result")
_JOIN_S = 5.0


class LoopThread:
    """A daemon thread that runs an event loop until stopped."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="embarcadero-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def call(self, function: Callable[[], object]) -> None:
        """Have the loop call a function soon; does not wait. After the end it does nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and wait for it. Ctrl-C cancels it and gets through."""
        if not self._thread.is_alive():
            coroutine.close()
            raise Closed("the log is closed", "connect again")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and the thread."""
        self.call(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
