"""The asyncio API: the same calls as `embarcadero`, for programs with an event loop.

    async with emb.aio.connect("127.0.0.1:9092") as log:
        async with log.publisher("orders") as publisher:
            future = await publisher.send(b"value")     # waits for space in the window
            position = await future                     # waits for the outcome
        async with log.subscribe("orders") as subscriber:
            async for batch in subscriber: ...

`connect`, `publisher` and `subscribe` can also be awaited. The program then closes the object itself:
`log = await emb.aio.connect(...)`, `await log.close()`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from embarcadero.client.api.aio_log import Log, connect, open_log
from embarcadero.client.api.aio_streams import Opening, Publisher, RecordAwaitable, Subscriber
from embarcadero.config import Config
from embarcadero.errors import require_linux


@asynccontextmanager
async def local(
    brokers: int | None = None, *, config: str | Path | Config | None = None, **options: Any
) -> AsyncIterator[Log]:
    """Run a private cluster in child processes for the duration of the block, and connect to it.

    Args:
        brokers: Number of brokers. None: the configured number.
        config: Path of an `embarcadero.yaml`, or a `Config`.
        options: `replicas`, `data_dir` and `log_bytes`, as for `embarcadero.local`.

    Returns:
        An asynchronous context manager that yields a connected `Log`.

    Raises:
        ClusterError: The cluster did not start.

    Example:
        async with emb.aio.local(brokers=2) as log:
            await log.create_topic("orders")
    """
    require_linux()
    from embarcadero.node.local import LocalCluster

    cluster = await asyncio.to_thread(LocalCluster, brokers, config=config, **options)
    try:
        async with await open_log(cluster.addresses, config, cluster=cluster) as log:
            yield log
    finally:
        await asyncio.to_thread(cluster.close)


def __dir__() -> list[str]:
    return __all__


__all__ = ["Log", "Opening", "Publisher", "RecordAwaitable", "Subscriber", "connect", "local"]
