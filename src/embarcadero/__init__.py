"""Embarcadero, a distributed shared log for Python and Spark: publish to any broker, read one total order.

    import embarcadero as emb

    with emb.local(brokers=4) as log:
        log.create_topic("orders")
        with log.publisher("orders") as publisher:
            position = publisher.send(b"value", key=b"k").result()
        for batch in log.subscribe("orders"):
            print(batch.records())

`emb.aio` has the same API for asyncio. Error classes are in `emb.errors`; all are subclasses of `EmbarcaderoError`.
The heavy modules load when a name from them is first used.
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
    from pathlib import Path

    from embarcadero import aio
    from embarcadero.client.api.sync_log import Log, Publisher, Subscriber, connect
    from embarcadero.client.arguments import AS_CONFIGURED
    from embarcadero.client.results import Batch, Record, RecordFuture, TopicInfo
    from embarcadero.config import Config
    from embarcadero.wire.schemas import RAW_SCHEMA

__version__ = "0.1.0"

_LAZY = {
    "aio": "embarcadero.aio",
    "Batch": "embarcadero.client.results",
    "Record": "embarcadero.client.results",
    "RecordFuture": "embarcadero.client.results",
    "Log": "embarcadero.client.api.sync_log",
    "Publisher": "embarcadero.client.api.sync_log",
    "Subscriber": "embarcadero.client.api.sync_log",
    "AS_CONFIGURED": "embarcadero.client.arguments",
    "connect": "embarcadero.client.api.sync_log",
    "TopicInfo": "embarcadero.client.results",
    "RAW_SCHEMA": "embarcadero.wire.schemas",
}
"""Modules that load on first use. Arrow and the event loop load with the first client, not with every command."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'embarcadero' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    found = module if name == "aio" else getattr(module, name)
    globals()[name] = found
    return found


def local(
    brokers: int | None = None,
    *,
    replicas: int = 0,
    data_dir: str | None = None,
    log_bytes: int | None = None,
    config: str | Path | Config | None = None,
) -> Log:
    """Start a private cluster in child processes and connect to it. Closing the log stops the cluster.

    Args:
        brokers: Number of brokers. None: the configured number.
        replicas: Number of replicas. 0: all records stay in memory.
        data_dir: A folder that keeps the files of the cluster. None: a temporary folder, which is removed.
        log_bytes: Memory for payloads, per broker.
        config: Path of an `embarcadero.yaml`, or a `Config`. Its ports and folders are ignored: a private cluster
            uses free ones.

    Returns:
        A connected `Log`. `log.address` has the addresses of the brokers; `log.cluster` controls the processes.

    Raises:
        ClusterError: The cluster did not start.

    Example:
        with emb.local(brokers=2) as log:
            log.create_topic("orders")
    """
    from embarcadero.client.api.aio_log import open_log
    from embarcadero.client.api.sync_log import Log
    from embarcadero.client.api.threads import opened

    errors.require_linux()
    from embarcadero.node.local import LocalCluster

    cluster = LocalCluster(brokers, data_dir, log_bytes, config, replicas)
    try:
        return Log(*opened(open_log(cluster.addresses, config, cluster=cluster)))
    except BaseException:
        cluster.close()
        raise


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
