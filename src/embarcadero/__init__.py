"""Embarcadero: a distributed shared log for Python and Spark. Publish to any broker; read one total order.

    import embarcadero as emb

    with emb.local(brokers=4) as log:
        log.create_topic("orders")
        with log.publisher("orders") as publisher:
            position = publisher.send(b"value", key=b"k").result()
        for batch in log.subscribe("orders"):
            print(batch.records())

`emb.aio` is the asyncio twin. Errors are in `emb.errors`, all below `EmbarcaderoError`. Names load when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from embarcadero import errors
from embarcadero.errors import EmbarcaderoError, OutcomeUnknown, Refused, Retriable, UsageError
from embarcadero.types import (
    Cut,
    EntryKind,
    Gap,
    GapKind,
    Position,
    ReaderProgress,
    StagedBatch,
    Tail,
    Topic,
    TopicLane,
)

if TYPE_CHECKING:
    from embarcadero.client import aio
    from embarcadero.client.batch import Batch, Record
    from embarcadero.client.futures import RecordFuture
    from embarcadero.client.options import AS_CONFIGURED
    from embarcadero.client.sync import Log, Publisher, Subscriber, connect, local
    from embarcadero.client.topics import TopicInfo
    from embarcadero.wire.payload import RAW_SCHEMA

__version__ = "0.1.0"

_LAZY = {
    "aio": "embarcadero.client.aio",
    "Batch": "embarcadero.client.batch",
    "Record": "embarcadero.client.batch",
    "RecordFuture": "embarcadero.client.futures",
    "Log": "embarcadero.client.sync",
    "Publisher": "embarcadero.client.sync",
    "Subscriber": "embarcadero.client.sync",
    "AS_CONFIGURED": "embarcadero.client.options",
    "connect": "embarcadero.client.sync",
    "local": "embarcadero.client.sync",
    "TopicInfo": "embarcadero.client.topics",
    "RAW_SCHEMA": "embarcadero.wire.payload",
}
"""Where heavy names live: arrow and the event loop load when a client is first used, not for every command."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'embarcadero' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    found = module if name == "aio" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AS_CONFIGURED",
    "RAW_SCHEMA",
    "Batch",
    "Cut",
    "EmbarcaderoError",
    "EntryKind",
    "Gap",
    "GapKind",
    "Log",
    "OutcomeUnknown",
    "Position",
    "Publisher",
    "ReaderProgress",
    "Record",
    "RecordFuture",
    "Refused",
    "Retriable",
    "StagedBatch",
    "Subscriber",
    "Tail",
    "Topic",
    "TopicInfo",
    "TopicLane",
    "UsageError",
    "__version__",
    "aio",
    "connect",
    "errors",
    "local",
]
