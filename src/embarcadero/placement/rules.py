"""What a topic may look like. Every refusal names the value, and what is allowed."""

from __future__ import annotations

import re

from embarcadero.errors import BadName, BadValue, NotAvailable
from embarcadero.limits import (
    GAP_TIMEOUT_FENCE_MS,
    GAP_TIMEOUT_MS_MAX,
    GAP_TIMEOUT_SKIP_MS,
    PARTITIONS_MAX,
    SESSION_TTL_S,
    SESSION_TTL_S_MAX,
    TOPIC_NAME_CHARS_MAX,
)
from embarcadero.types import OnGap, Order, Topic

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_CHARS_MAX}}}")
_GAP_TIMEOUT_MS = {OnGap.FENCE: GAP_TIMEOUT_FENCE_MS, OnGap.SKIP: GAP_TIMEOUT_SKIP_MS}


def check_topic_name(name: str) -> None:
    """Letters, digits and `._-`, so that a name is also a file name and fits a URL."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = name if len(name) <= 60 else name[:60] + "..."
        raise BadName(
            f"{shown!r} is not a topic name",
            f'use 1 to {TOPIC_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ - (and not "." or "..")',
        )


def _checked_order(order: int) -> Order:
    if order not in list(Order):
        raise BadValue(
            f"order {order} does not exist",
            "use 2 (one total order), 5 (and each session's order too), or 0 and 1 (an order per broker)",
        )
    return Order(order)


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


def new_topic(
    name: str,
    lane: int,
    order: int,
    partitions: int,
    replicas: int,
    durable_on: int,
    on_gap: str,
    gap_timeout_ms: int | None,
    session_ttl_s: int | None = None,
) -> Topic:
    """The topic that was asked for, or the error that says why not."""
    check_topic_name(name)
    level = _checked_order(order)
    kind, timeout_ms = checked_gap(on_gap, gap_timeout_ms)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise BadValue(f"partitions {partitions} is out of range", f"use 1 to {PARTITIONS_MAX}")
    if replicas < 0 or durable_on < 0:
        raise BadValue("replicas and durable_on can't be negative", "use 0")
    if replicas > 0 or durable_on > 0:
        raise NotAvailable("replicas come with a later version", "use replicas=0 and durable_on=0")
    return Topic(
        name=name,
        lane=lane,
        order=int(level),
        partitions=partitions,
        replicas=replicas,
        durable_on=durable_on,
        on_gap=kind.value,
        gap_timeout_ms=timeout_ms,
        session_ttl_s=checked_ttl(SESSION_TTL_S if session_ttl_s is None else session_ttl_s),
    )
