"""Time limits of requests: as configured, a number, or None for no limit."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Callable, Coroutine, Iterator
from math import inf
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.client.arguments import patience_s
from embarcadero.config import load
from embarcadero.errors import BadValue, Unreachable
from tests.client.fake_server import FakeServer

SOON = load(flags={"client.connect_timeout_s": "0.05", "client.request_timeout_s": "0.05"})
ANSWERED_SOON = load(flags={"client.request_timeout_s": "0.05"})


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"127.0.0.1:{sock.getsockname()[1]}"


async def outlasts(call: Callable[..., Coroutine[Any, Any, object]]) -> bool:
    """Whether a call without a time limit outlasts a later call with the configured limit."""
    for_ever = asyncio.ensure_future(call(timeout=None))
    await asyncio.sleep(0)
    with pytest.raises(Unreachable, match=r"within 0\.05 s"):
        await call()
    still = not for_ever.done()
    for_ever.cancel()
    await asyncio.wait({for_ever})
    return still


def test_connect_waits_as_configured_or_without_limit(silent: str) -> None:
    """The caller's limit also applies to each broker's answer."""

    async def main() -> bool:
        return await outlasts(lambda **limit: emb.aio.connect(silent, config=SOON, **limit))

    assert asyncio.run(main())


def test_requests_wait_as_configured_or_without_limit() -> None:
    """No broker is left to answer."""

    async def main() -> bool:
        with FakeServer(order=5) as server:
            log = await emb.aio.connect(server.addresses, config=ANSWERED_SOON)
        async with log:
            while log.brokers.live():  # noqa: ASYNC110 - nothing tells when it has noticed
                await asyncio.sleep(0.01)
            return await outlasts(log.topics)

    assert asyncio.run(main())


def test_a_number_is_a_number_of_seconds() -> None:
    """Whatever the configuration; an invalid limit is refused."""
    assert patience_s(3, 10.0) == 3
    assert patience_s(0, 10.0) == 0
    assert patience_s(None, 10.0) == inf
    assert patience_s(emb.AS_CONFIGURED, 10.0) == 10.0
    for wrong in (-1, float("nan"), "soon", True):
        with pytest.raises(BadValue):
            patience_s(wrong, 10.0)  # type: ignore[arg-type]


def test_help_names_the_configured_default() -> None:
    """In the signatures of both clients."""
    for call in (emb.connect, emb.Log.read, emb.aio.connect, emb.aio.Log.trim):
        assert "AS_CONFIGURED" in str(inspect.signature(call)), call
