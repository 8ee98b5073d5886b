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
    partitions = topic.partitions if ask.partitions is None else _grown(topic, ask.partitions)
    on_gap, gap_timeout_ms = _gap(topic, ask)
    ttl_s = topic.session_ttl_s if ask.session_ttl_s is None else checked_ttl(ask.session_ttl_s)
    copies = _copies(topic, ask)
    kept = checked_retention(
        topic.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        topic.retention_s if ask.retention_s is None else ask.retention_s,
    )
    return msgspec.structs.replace(
        topic, partitions=partitions, first_partitions=topic.first_partitions or topic.partitions,
        on_gap=on_gap.value, gap_timeout_ms=gap_timeout_ms, session_ttl_s=ttl_s,
        replicas=copies.replicas, durable_on=copies.durable_on, retention_bytes=kept.bytes, retention_s=kept.seconds,
    )  # fmt: skip


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


def _copies(topic: Topic, ask: AlterTopic) -> Copies:
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
