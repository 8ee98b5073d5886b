"""Real inputs, made by our own encoders: messages, payloads, frames, records of one true order."""

from __future__ import annotations

import datetime
import struct
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from embarcadero.fabric.layout import ORDER, Entries, seal
from embarcadero.types import Cut, EntryKind, Gap, Outcome, Range, ReaderProgress, ReplicaRef, Tier, Topic, TopicLane
from embarcadero.wire import codec, messages
from embarcadero.wire.frames import ACK
from embarcadero.wire.payload import encode_batch, raw_batch

US: Final = 1_700_000_000_000_000

TYPED_SCHEMA: Final = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("box", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.map_(pa.string(), pa.float64()))])),
        pa.field("ok", pa.bool_()),
    ]
)


@cache
def raw_payload(count: int, compression: str | None = None) -> bytes:
    """A payload of records without a schema."""
    keys = [None if n % 3 == 0 else b"key-%d" % n for n in range(count)]
    headers = [None if n % 2 else {"trace": b"%d" % n, "": b""} for n in range(count)]
    batch = raw_batch(keys, [b"value %d " % n * (n % 5) for n in range(count)], headers, [US + n for n in range(count)])
    return bytes(encode_batch(batch, compression).to_pybytes())


@cache
def typed_payload(count: int, compression: str | None = None) -> bytes:
    """A payload of TYPED_SCHEMA."""
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    rows = [
        {"id": n, "name": None if n % 4 == 1 else f"näme {n}", "tags": ["a", None, "b" * n][: n % 4], "at": at,
         "price": None if n % 3 else 5, "box": {"a": n, "b": [("k", 0.5)]} if n % 2 else None, "ok": n % 2 == 0}
        for n in range(count)
    ]  # fmt: skip
    return bytes(encode_batch(pa.RecordBatch.from_pylist(rows, schema=TYPED_SCHEMA), compression).to_pybytes())


def batch_frame(payload: bytes, **fields: int) -> bytes:
    """A whole batch frame."""
    header = {"session_seq": 5, "low": 3, "lane": 0, "session": 1, "count": 2, "length": len(payload)}
    return codec.batch_header(**header | {"crc": codec.payload_crc(payload)} | fields) + payload


def acks(count: int) -> Entries:
    """Acks of all outcomes in turn."""
    made = np.zeros(count, dtype=ACK)
    outcomes = list(Outcome)
    for number in range(count):
        made["session_seq"][number], made["index"][number] = number, 100 + number
        made["outcome"][number] = outcomes[number % len(outcomes)]
    return made


def entries_for(payloads: list[bytes], counts: list[int] | None = None, first_index: int = 100) -> Entries:
    """Sealed order entries; an empty payload gets a SESSION_OPEN."""
    entries = np.zeros(len(payloads), dtype=ORDER)
    seq = 1_000
    for number, payload in enumerate(payloads):
        count = (1 if counts is None else counts[number]) if payload else 0
        entries["index"][number], entries["seq"][number] = first_index + number, seq
        entries["kind"][number] = EntryKind.BATCH if payload else EntryKind.SESSION_OPEN
        entries["size"][number], entries["count"][number] = len(payload), count
        entries["crc"][number] = codec.payload_crc(payload)
        entries["append_us"][number] = US + number
        seq += count
    return seal(entries)


def fetched_frame(payloads: list[bytes], counts: list[int] | None = None, gap: Gap | None = None) -> bytes:
    """A whole fetched frame with these payloads."""
    entries = entries_for(payloads, counts)
    body = entries.tobytes() + b"".join(payload + bytes(-len(payload) % 8) for payload in payloads)
    after = 100 + len(payloads) if gap is None else gap.stop
    header = codec.fetched_header(
        request=1, next_index=after, tail_index=300, count=len(entries), length=len(body), gap=gap
    )  # fmt: skip
    return header + body


_REF: Final = ReplicaRef(replica=1, incarnation=2, disk="d" * 32)
RANGE: Final = Range(lane=0, number=1, start=0, start_seq=0, replicas=[_REF], durable_on=1, end=9, end_seq=90)
LANE: Final = TopicLane(lane=4_096, topic=1, broker=2, incarnation=3, handle=4)
TIER: Final = Tier(id="t", warehouse="w", table="n.t", frontiers={0: (5, 50)}, starts={0: (1, 10)}, epoch=2)
TOPIC: Final = Topic(name="orders", lane=0, lanes=[LANE])
_VALUES: Final[dict[str, Any]] = {
    "name": "orders", "topic": "orders", "versions": [1], "brokers": [], "columns": b"", "widths": [1, 2],
    "ranges": [RANGE], "tier": TIER, "topics": [TOPIC], "lanes": [LANE], "cuts": [Cut(5, 50, 1_000)],
    "readers": [ReaderProgress(reader="r", places={0: (1, 2)})], "places": {0: (1, 2)}, "frontiers": {0: (5, 50)},
    "facts": {"a": 1, "b": [1.5, None, "x"]}, "partitions": [1, 2], "starts": {0: (1, 2)}, "lost_before": [(1, 2)],
    "by": "index", "read": "ordered", "on_gap": "fence",
}  # fmt: skip


def _sample(kind: type[messages.Message]) -> messages.Message:
    """A message with all its fields."""
    values: dict[str, Any] = {}
    for number, field in enumerate(msgspec.structs.fields(kind)):
        text = str(field.type)
        if kind is messages.TopicIs and field.name == "topic":
            values["topic"] = TOPIC
        elif field.name == "partitions" and kind is not messages.Fetch:
            values["partitions"] = 3
        elif field.name in _VALUES:
            values[field.name] = _VALUES[field.name]
        elif field.type is bool:
            values[field.name] = True
        elif "str" in text:
            values[field.name] = f"some {field.name}"
        else:
            values[field.name] = 3 + number
    if kind is messages.Welcome or kind is messages.MembersAre:
        values["brokers"] = [messages.BrokerAddress(broker=0, incarnation=1, host="127.0.0.1", port=9092, handle=0)]
    return kind(**values)


MESSAGES: Final = tuple(_sample(kind) for kind in messages.Message.__subclasses__())
"""One of each kind."""
COUNT_AND_SCHEMA: Final = struct.Struct("<IB3x")
