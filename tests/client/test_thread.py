"""The background thread of a synchronous client, and calls that come while it ends."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from embarcadero.client.api.threads import LoopThread, _Call
from embarcadero.errors import Closed


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_a_call_that_the_loop_never_ran_is_closed() -> None:
    """No coroutine is left."""
    coroutine = for_ever()
    with pytest.raises(Closed):
        _Call(coroutine).result()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_a_call_that_starts_while_the_loop_ends_is_closed() -> None:
    """Its caller does not wait, and gets the reason."""
    thread, coroutine = LoopThread(), for_ever()
    call = _Call(coroutine)
    thread.at_end = lambda: thread.call(call.start)
    thread.stop()
    with pytest.raises(Closed):
        call.result()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_after_the_end_a_call_is_refused() -> None:
    """Its coroutine is closed, too."""
    thread, coroutine = LoopThread(), for_ever()
    thread.stop()
    with pytest.raises(Closed, match="is closed"):
        thread.wait(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
