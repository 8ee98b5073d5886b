"""The asyncio API: the calls of `embarcadero` for programs with an event loop.

    async with emb.aio.connect("127.0.0.1:9092") as log:
        async with log.publisher("orders") as publisher:
            future = await publisher.send(b"value")     # waits for room only
            position = await future                     # waits for the outcome
        async with log.subscribe("orders") as subscriber:
            async for batch in subscriber: ...

What opens something can be awaited as well: `log = await emb.aio.connect(...)`, and closed with `await log.close()`.
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
    """A private cluster in child processes for as long as the block lasts; `options` as for `embarcadero.local`."""
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
