"""What a topic may look like. Every refusal names the value, and what is allowed."""

from __future__ import annotations

import re
from typing import NamedTuple

from embarcadero.errors import BadName, BadValue
from embarcadero.limits import (
    COPIES_DEFAULT,
    COPIES_MAX,
    GAP_TIMEOUT_FENCE_MS,
    GAP_TIMEOUT_MS_MAX,
    GAP_TIMEOUT_SKIP_MS,
    PARTITIONS_MAX,
    RETENTION_BYTES_MAX,
    RETENTION_S_MAX,
    SESSION_TTL_S,
    SESSION_TTL_S_MAX,
    TOPIC_NAME_CHARS_MAX,
)
from embarcadero.orders import parse_order
from embarcadero.types import (
    HIDDEN_PREFIX,
    JOBS_PREFIX,
    PARTITIONERS,
    ROUTED_TOPIC,
    STAGING_PREFIX,
    OnGap,
    Order,
    Topic,
)

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_CHARS_MAX}}}")
_HIDDEN_NAME = re.compile(
    rf"({re.escape(STAGING_PREFIX)}|{re.escape(JOBS_PREFIX)})[0-9a-f]{{16}}|{re.escape(ROUTED_TOPIC)}"
)
_GAP_TIMEOUT_MS = {OnGap.FENCE: GAP_TIMEOUT_FENCE_MS, OnGap.SKIP: GAP_TIMEOUT_SKIP_MS}


def check_topic_name(name: str) -> None:
    """Letters, digits and `._-`, so that a name is also a file name and fits a URL."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = name if len(name) <= 60 else name[:60] + "..."
        raise BadName(
            f"{shown!r} is not a topic name",
            f'use 1 to {TOPIC_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ - (and not "." or "..")',
        )
    if name.startswith(HIDDEN_PREFIX) and not _HIDDEN_NAME.fullmatch(name):
        raise BadName(
            f"{name!r} is not a name for a topic of yours",
            f"names that begin with {HIDDEN_PREFIX} belong to the cluster; choose another beginning",
        )


def _checked_order(order: int) -> Order:
    return parse_order(order)


def checked_ttl(session_ttl_s: int) -> int:
    """How long an idle session is kept."""
    if not 1 <= session_ttl_s <= SESSION_TTL_S_MAX:
        raise BadValue(f"session_ttl_s {session_ttl_s} is out of range", f"use 1 to {SESSION_TTL_S_MAX}")
    return session_ttl_s


def checked_gap(on_gap: str, gap_timeout_ms: int | None) -> tuple[OnGap, int]:
    """What happens to a gap, and when; None: the usual time of that kind."""
    if on_gap not in list(OnGap):
        raise BadValue(f"on_gap {on_gap!r} does not exist", 'use "fence" (nothing is lost) or "skip" (low delay)')
    kind = OnGap(on_gap)
    timeout_ms = _GAP_TIMEOUT_MS[kind] if gap_timeout_ms is None else gap_timeout_ms
    if not 1 <= timeout_ms <= GAP_TIMEOUT_MS_MAX:
        raise BadValue(f"gap_timeout_ms {timeout_ms} is out of range", f"use 1 to {GAP_TIMEOUT_MS_MAX}")
    return kind, timeout_ms


class Copies(NamedTuple):
    """How many replicas have each record, and how many of them make it durable."""

    replicas: int
    durable_on: int


def checked_copies(replicas: int | None, durable_on: int | None, live: int) -> Copies:
    """What was asked for. None: as many replicas as are live, up to the usual number; durable on the majority."""
    copies = min(live, COPIES_DEFAULT) if replicas is None else replicas
    if not 0 <= copies <= COPIES_MAX:
        raise BadValue(f"replicas {copies} is out of range", f"use 0 (memory only) to {COPIES_MAX}")
    enough = (copies // 2 + 1 if copies else 0) if durable_on is None else durable_on
    if copies == 0 and enough != 0:
        usual = ", and no replica is live" if replicas is None else ""
        raise BadValue(
            f"durable_on {enough} needs replicas{usual}", "use replicas=1 or more, or durable_on=0 (memory only)"
        )
    if copies and not 1 <= enough <= copies:
        raise BadValue(f"durable_on {enough} of {copies} replicas is out of range", f"use 1 to {copies}")
    return Copies(copies, enough)


def price(replicas: int, durable_on: int) -> str:
    """What a choice of replicas costs and gives, in one sentence."""
    if replicas == 0:
        return "records are in memory only: they end with the cluster's memory"
    needed = replicas - durable_on + 1
    which = (
        "its one replica" if replicas == 1
        else "both replicas" if needed == replicas == 2
        else f"all {replicas} replicas" if needed == replicas
        else f"any {needed} of {replicas} replicas"
    )  # fmt: skip
    recovery = f"after a loss of memory, recovery needs {which}"
    if durable_on < replicas:
        return f"durable records are on {durable_on} of {replicas} disks; {recovery}"
    disks = "one disk" if replicas == 1 else f"all {replicas} disks, so the slowest one sets the pace"
    return f"durable records are on {disks}; {recovery}"


class Retention(NamedTuple):
    """Beyond these, the oldest records go; 0: no bound."""

    bytes: int
    seconds: int


def checked_retention(retention_bytes: int, retention_s: int) -> Retention:
    """How much, and for how long, a topic keeps."""
    if not 0 <= retention_bytes <= RETENTION_BYTES_MAX:
        raise BadValue(
            f"retention_bytes {retention_bytes} is out of range", f"use 0 (no bound) to {RETENTION_BYTES_MAX}"
        )
    if not 0 <= retention_s <= RETENTION_S_MAX:
        raise BadValue(f"retention_s {retention_s} is out of range", f"use 0 (no bound) to {RETENTION_S_MAX}")
    return Retention(retention_bytes, retention_s)


def checked_hot_retention(hot_retention_s: int) -> int:
    """How long brokers keep what is in the topic's table."""
    if not 0 <= hot_retention_s <= RETENTION_S_MAX:
        raise BadValue(f"hot_retention_s {hot_retention_s} is out of range", f"use 0 to {RETENTION_S_MAX}")
    return hot_retention_s


def check_partitioner(partitioner: str) -> None:
    """Refuse a partitioner that does not exist."""
    if partitioner not in PARTITIONERS:
        raise BadValue(f"partitioner {partitioner!r} does not exist", f"use {' or '.join(map(repr, PARTITIONERS))}")


def new_topic(
    name: str,
    lane: int,
    order: int,
    partitions: int,
    copies: Copies,
    on_gap: str,
    gap_timeout_ms: int | None,
    session_ttl_s: int | None,
    retention: Retention,
) -> Topic:
    """The topic that was asked for, or the error that says why not."""
    check_topic_name(name)
    level = _checked_order(order)
    kind, timeout_ms = checked_gap(on_gap, gap_timeout_ms)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise BadValue(f"partitions {partitions} is out of range", f"use 1 to {PARTITIONS_MAX}")
    return Topic(
        name=name,
        lane=lane,
        order=int(level),
        partitions=partitions,
        first_partitions=partitions,
        replicas=copies.replicas,
        durable_on=copies.durable_on,
        on_gap=kind.value,
        gap_timeout_ms=timeout_ms,
        session_ttl_s=checked_ttl(SESSION_TTL_S if session_ttl_s is None else session_ttl_s),
        retention_bytes=retention.bytes,
        retention_s=retention.seconds,
    )
