"""What may change about a topic that exists. Every refusal says why; nothing of a refused change is done."""

from __future__ import annotations

import msgspec

from embarcadero.errors import BadSchema, BadValue
from embarcadero.limits import PARTITIONS_MAX
from embarcadero.placement.rules import Copies, checked_copies, checked_gap, checked_retention, checked_ttl
from embarcadero.types import OnGap, Topic
from embarcadero.wire.messages import AlterTopic


class SchemaHistory(msgspec.Struct, frozen=True):
    """A topic's newest schema as an Arrow message, and how many of its columns each version has."""

    columns: bytes = b""
    widths: list[int] = []


def altered(topic: Topic, ask: AlterTopic) -> Topic:
    """The topic with all changes but that of its schema."""
    if ask.order not in (None, topic.order):
        why = "what is stored was acked by the rules of the old order"
        raise BadValue(f"order of topic {topic.name!r} can't change: {why}", "create another topic")
    partitions = topic.partitions if ask.partitions is None else ask.partitions
    if not topic.partitions <= partitions <= PARTITIONS_MAX:
        raise BadValue(
            f"topic {topic.name!r} has {topic.partitions} partitions and can't have {partitions}",
            f"partitions only grow, up to {PARTITIONS_MAX}: stored batches keep their tags",
        )
    on_gap, gap_timeout_ms = _gap(topic, ask)
    ttl_s = topic.session_ttl_s if ask.session_ttl_s is None else checked_ttl(ask.session_ttl_s)
    copies = _copies(topic, ask)
    kept = checked_retention(
        topic.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        topic.retention_s if ask.retention_s is None else ask.retention_s,
    )
    return msgspec.structs.replace(
        topic, partitions=partitions, on_gap=on_gap.value, gap_timeout_ms=gap_timeout_ms, session_ttl_s=ttl_s,
        replicas=copies.replicas, durable_on=copies.durable_on, retention_bytes=kept.bytes, retention_s=kept.seconds,
    )  # fmt: skip


def _copies(topic: Topic, ask: AlterTopic) -> Copies:
    """They count from the next range on. What is only in memory can't become durable, nor the other way round."""
    replicas = topic.replicas if ask.replicas is None else ask.replicas
    if (replicas == 0) != (topic.replicas == 0):
        kind = "are on disks" if topic.replicas else "are in memory only"
        raise BadValue(
            f"replicas of topic {topic.name!r} can't become {replicas}: the records it has {kind}",
            "create another topic",
        )
    return checked_copies(replicas, topic.durable_on if ask.durable_on is None else ask.durable_on, live=replicas)


def _gap(topic: Topic, ask: AlterTopic) -> tuple[OnGap, int]:
    if ask.on_gap in (None, topic.on_gap):
        return checked_gap(topic.on_gap, topic.gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms)
    if topic.on_gap == OnGap.SKIP:
        raise BadValue(
            f"on_gap of topic {topic.name!r} can't become {ask.on_gap!r}: what was skipped is not remembered for ever",
            "a late copy of a skipped batch could be taken for a stored one; create another topic",
        )
    return checked_gap(str(ask.on_gap), ask.gap_timeout_ms)


def first_version(columns: bytes) -> SchemaHistory:
    """The schema of a new topic; without columns it has none."""
    if not columns:
        return SchemaHistory()
    from embarcadero.wire.schemas import decode_schema  # brokers load Arrow only when a schema comes

    return SchemaHistory(columns, [len(decode_schema(columns))])


def next_version(known: SchemaHistory, columns: bytes) -> SchemaHistory:
    """The history with a changed schema; the same if nothing changed."""
    from embarcadero.wire.schemas import decode_schema, decode_versions, encode_schema, evolve

    if not known.columns:
        raise BadSchema("a topic of raw records can't get a schema", "create another topic with that schema")
    before = decode_versions(known.columns, known.widths)
    after = evolve(before, decode_schema(columns))
    return known if after is before else SchemaHistory(encode_schema(after.newest), list(after.widths))
