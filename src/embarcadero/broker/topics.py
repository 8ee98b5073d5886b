"""What the configuration says about new topics: defaults for what was not asked for, and limits."""

from __future__ import annotations

from typing import Any

from embarcadero.config import Config
from embarcadero.errors import BadValue
from embarcadero.limits import COPIES_DEFAULT
from embarcadero.types import CRC32C, OnGap
from embarcadero.wire.messages import CreateTopic


def check_partitions(partitions: int | None, config: Config) -> None:
    """Refuse more than this cluster allows."""
    most = config.limits.partitions
    if partitions is not None and partitions > most:
        raise BadValue(f"partitions {partitions} is out of range", f"this cluster takes 1 to {most}")


def _copies(ask: CreateTopic, config: Config, live: int) -> tuple[int | None, int | None]:
    """Replicas and durable_on, asked for or configured; None where the directory's usual choice is wanted."""
    usual_replicas, usual_durable_on = config.topic.replicas, config.topic.durable_on
    replicas = int(usual_replicas) if ask.replicas is None and usual_replicas.isdigit() else ask.replicas
    if ask.durable_on is not None or not usual_durable_on.isdigit():
        return replicas, ask.durable_on
    return replicas, min(int(usual_durable_on), min(live, COPIES_DEFAULT) if replicas is None else replicas)


def with_defaults(ask: CreateTopic, config: Config, live: int = 0) -> dict[str, Any]:
    """The settings of the topic that was asked for; BadValue above a limit of this cluster. `live`: its replicas."""
    usual = config.topic
    replicas, durable_on = _copies(ask, config, live)
    on_gap = usual.on_gap if ask.on_gap is None else ask.on_gap
    gap_timeout_ms = usual.gap_timeout_skip_ms if on_gap == OnGap.SKIP else usual.gap_timeout_fence_ms
    partitions = usual.partitions if ask.partitions is None else ask.partitions
    check_partitions(partitions, config)
    return {
        "order": usual.order if ask.order is None else ask.order,
        "partitions": partitions,
        "partitioner": CRC32C if ask.partitioner is None else ask.partitioner,
        "key": ask.key,
        "on_gap": on_gap,
        "gap_timeout_ms": gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms,
        "session_ttl_s": usual.session_ttl_s if ask.session_ttl_s is None else ask.session_ttl_s,
        "replicas": replicas,
        "durable_on": durable_on,
        "retention_bytes": usual.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        "retention_s": usual.retention_s if ask.retention_s is None else ask.retention_s,
    }
