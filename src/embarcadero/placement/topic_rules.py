"""What a topic may look like, and what may change about one. Every refusal names the value, and what is allowed."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from embarcadero.errors import BadName, BadSchema, BadValue
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
from embarcadero.wire.messages import AlterTopic

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


class CopyCounts(NamedTuple):
    """How many replicas have each record, and how many of them make it durable."""

    replicas: int
    durable_on: int


def checked_copies(replicas: int | None, durable_on: int | None, live: int) -> CopyCounts:
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
    return CopyCounts(copies, enough)


def price(replicas: int, durable_on: int) -> str:
    """What a choice of replicas costs and gives, in one sentence."""
    if replicas == 0:
        return "records are in memory only: they end with the cluster's memory"
    needed = replicas - durable_on + 1
    which = (
        "its one replica"
        if replicas == 1
        else "both replicas"
        if needed == replicas == 2
        else f"all {replicas} replicas"
        if needed == replicas
        else f"any {needed} of {replicas} replicas"
    )
    recovery = f"after a loss of memory, recovery needs {which}"
    if durable_on < replicas:
        return f"durable records are on {durable_on} of {replicas} disks; {recovery}"
    disks = "one disk" if replicas == 1 else f"all {replicas} disks, so the slowest one sets the pace"
    return f"durable records are on {disks}; {recovery}"


class RetentionLimits(NamedTuple):
    """Beyond these, the oldest records go; 0: no bound."""

    bytes: int
    seconds: int


def checked_retention(retention_bytes: int, retention_s: int) -> RetentionLimits:
    """How much, and for how long, a topic keeps."""
    if not 0 <= retention_bytes <= RETENTION_BYTES_MAX:
        raise BadValue(
            f"retention_bytes {retention_bytes} is out of range", f"use 0 (no bound) to {RETENTION_BYTES_MAX}"
        )
    if not 0 <= retention_s <= RETENTION_S_MAX:
        raise BadValue(f"retention_s {retention_s} is out of range", f"use 0 (no bound) to {RETENTION_S_MAX}")
    return RetentionLimits(retention_bytes, retention_s)


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
    copies: CopyCounts,
    on_gap: str,
    gap_timeout_ms: int | None,
    session_ttl_s: int | None,
    retention: RetentionLimits,
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


# --- changes of a topic -----------------------------------------------------------------------------------------------
class SchemaHistory(msgspec.Struct, frozen=True):
    """A topic's newest schema as an Arrow message, and how many of its columns each version has."""

    columns: bytes = b""
    widths: list[int] = []


def altered(topic: Topic, ask: AlterTopic) -> Topic:
    """The topic with all changes but that of its schema."""
    if ask.order not in (None, topic.order):
        why = "what is stored was acked by the rules of the old order"
        raise BadValue(f"order of topic {topic.name!r} can't change: {why}", "create another topic")
    partitions = topic.partitions if ask.partitions is None else _grown(topic, ask.partitions)
    on_gap, gap_timeout_ms = _gap(topic, ask)
    ttl_s = topic.session_ttl_s if ask.session_ttl_s is None else checked_ttl(ask.session_ttl_s)
    copies = _copies(topic, ask)
    kept = checked_retention(
        topic.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        topic.retention_s if ask.retention_s is None else ask.retention_s,
    )
    return msgspec.structs.replace(
        topic,
        partitions=partitions,
        first_partitions=topic.first_partitions or topic.partitions,
        on_gap=on_gap.value,
        gap_timeout_ms=gap_timeout_ms,
        session_ttl_s=ttl_s,
        replicas=copies.replicas,
        durable_on=copies.durable_on,
        retention_bytes=kept.bytes,
        retention_s=kept.seconds,
    )


def _grown(topic: Topic, partitions: int) -> int:
    """Partitions grow by whole multiples: the keys of one partition then move to few others, and never mix."""
    has = topic.partitions
    if has <= partitions <= PARTITIONS_MAX and partitions % has == 0:
        return partitions
    next_counts = ", ".join(str(has * times) for times in (2, 3, 4) if has * times <= PARTITIONS_MAX)
    raise BadValue(
        f"topic {topic.name!r} has {has} partitions and can't have {partitions}",
        f"partitions grow by whole multiples, up to {PARTITIONS_MAX}: {next_counts or 'it has as many as it can'}",
    )


def _copies(topic: Topic, ask: AlterTopic) -> CopyCounts:
    """The copies a topic is to have. Topics in memory stay in memory, and topics on disks stay on disks.

    A topic that is durable on the majority of its copies stays so, unless `durable_on` is given.
    """
    replicas = topic.replicas if ask.replicas is None else ask.replicas
    if (replicas == 0) != (topic.replicas == 0):
        kind = "are on disks" if topic.replicas else "are in memory only"
        raise BadValue(
            f"replicas of topic {topic.name!r} can't become {replicas}: the records it has {kind}",
            "create another topic",
        )
    durable_on = topic.durable_on if ask.durable_on is None else ask.durable_on
    if ask.durable_on is None and durable_on == checked_copies(topic.replicas, None, live=0).durable_on:
        return checked_copies(replicas, None, live=0)
    return checked_copies(replicas, durable_on, live=0)


def _gap(topic: Topic, ask: AlterTopic) -> tuple[OnGap, int]:
    if ask.on_gap in (None, topic.on_gap):
        return checked_gap(topic.on_gap, topic.gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms)
    if topic.on_gap == OnGap.SKIP:
        raise BadValue(
            f"on_gap of topic {topic.name!r} can't become {ask.on_gap!r}: what was skipped is not remembered for ever",
            "a late copy of a skipped batch could be taken for a stored one; create another topic",
        )
    return checked_gap(str(ask.on_gap), ask.gap_timeout_ms)


def first_version(columns: bytes, key: str = "") -> SchemaHistory:
    """The schema of a new topic; without columns it has none. BadSchema if `key` is no column that can be a key."""
    if not columns and key:
        raise BadSchema(f"key {key!r} of a topic of raw records", "give it a schema; each raw record has a key")
    if not columns:
        return SchemaHistory()
    from embarcadero.wire.partitioners import check_key  # brokers load Arrow only when a schema comes
    from embarcadero.wire.schemas import check_row_bytes, decode_schema

    schema = decode_schema(columns)
    check_row_bytes(schema)
    if key:
        check_key(schema, key)
    return SchemaHistory(columns, [len(schema)])


def next_version(known: SchemaHistory, columns: bytes) -> SchemaHistory:
    """The history with a changed schema; the same if nothing changed."""
    from embarcadero.wire.schemas import decode_schema, decode_versions, encode_schema, evolve

    if not known.columns:
        raise BadSchema("a topic of raw records can't get a schema", "create another topic with that schema")
    before = decode_versions(known.columns, known.widths)
    after = evolve(before, decode_schema(columns))
    return known if after is before else SchemaHistory(encode_schema(after.newest), list(after.widths))
