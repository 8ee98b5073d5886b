"""What the configuration says about new topics: defaults for what was not asked for, and limits."""

from __future__ import annotations

from typing import Any

from embarcadero.config import Config
from embarcadero.errors import BadValue
from embarcadero.types import OnGap
from embarcadero.wire.messages import CreateTopic


def check_partitions(partitions: int | None, config: Config) -> None:
    """Refuse more than this cluster allows."""
    most = config.limits.partitions
    if partitions is not None and partitions > most:
        raise BadValue(f"partitions {partitions} is out of range", f"this cluster takes 1 to {most}")


def with_defaults(ask: CreateTopic, config: Config) -> dict[str, Any]:
    """The settings of the topic that was asked for; BadValue above a limit of this cluster."""
    usual = config.topic
    on_gap = usual.on_gap if ask.on_gap is None else ask.on_gap
    gap_timeout_ms = usual.gap_timeout_skip_ms if on_gap == OnGap.SKIP else usual.gap_timeout_fence_ms
    partitions = usual.partitions if ask.partitions is None else ask.partitions
    check_partitions(partitions, config)
    return {
        "order": usual.order if ask.order is None else ask.order,
        "partitions": partitions,
        "on_gap": on_gap,
        "gap_timeout_ms": gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms,
        "session_ttl_s": usual.session_ttl_s if ask.session_ttl_s is None else ask.session_ttl_s,
    }
