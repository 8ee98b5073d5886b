"""Objects that the asyncio client opens: with `async with`, or awaited; and in tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.errors import Closed, UnknownTopic
from tests.client.fake_server import FakeServer


def run(body: Callable[[FakeServer], Coroutine[Any, Any, None]]) -> None:
    """Run a test's body beside a fake broker."""
    with FakeServer() as server:
        asyncio.run(asyncio.wait_for(body(server), 30))


def test_each_is_opened_and_closed_by_async_with() -> None:
    """The form that people type."""

    async def body(server: FakeServer) -> None:
        async with emb.aio.connect(server.addresses) as log:
            async with log.publisher("t") as publisher:
                position = await (await publisher.send(b"1"))
            async with log.subscribe("t") as subscriber:
                batch = await subscriber.poll(timeout=10)
            with pytest.raises(Closed):
                await publisher.send(b"2")
            with pytest.raises(Closed):
                await subscriber.poll()
        assert position is not None
        assert batch is not None
        assert [record.value for record in batch.records()] == [b"1"]

    run(body)


def test_each_may_be_awaited() -> None:
    """The form of earlier versions: awaited, then closed explicitly or by `async with`."""

    async def body(server: FakeServer) -> None:
        log = await emb.aio.connect(server.addresses)
        async with log, await log.publisher("t") as publisher:
            await (await publisher.send(b"1"))
            subscriber = await log.subscribe("t")
            async for batch in subscriber:
                assert batch.count == 1
                break
            await subscriber.close()

    run(body)


def test_each_may_be_a_task() -> None:
    """They are coroutines, so every function that accepts a coroutine accepts them."""

    async def body(server: FakeServer) -> None:
        async with emb.aio.connect(server.addresses) as log:
            task = asyncio.create_task(log.publisher("t"))
            both = await asyncio.gather(task, asyncio.wait_for(log.subscribe("t"), 10))
            assert [type(each) for each in both] == [emb.aio.Publisher, emb.aio.Subscriber]

    run(body)


def test_a_failing_opening_raises_in_both_forms() -> None:
    """The error comes when it is awaited, and the block is not entered."""

    async def body(server: FakeServer) -> None:
        async with emb.aio.connect(server.addresses) as log:
            with pytest.raises(UnknownTopic):
                await log.publisher("nonsense")
            with pytest.raises(UnknownTopic):
                async with log.subscribe("nonsense"):
                    pytest.fail("it was entered")

    run(body)


def test_an_unused_opening_can_be_closed() -> None:
    """Closing it before it has started does nothing, and gives no warning."""

    async def body(server: FakeServer) -> None:
        async with emb.aio.connect(server.addresses) as log:
            log.publisher("t").close()

    run(body)
