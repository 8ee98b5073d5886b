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
from embarcadero.types import (
    Cut,
    EntryKind,
    Gap,
    LanePosition,
    Outcome,
    Range,
    ReaderProgress,
    ReplicaRef,
    Tier,
    Topic,
    TopicLane,
)
from embarcadero.wire import codec, messages
from embarcadero.wire.codec import ACK, REFERENCE
from embarcadero.wire.schemas import encode_batch, raw_batch

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
    """Make a payload of records without a schema."""
    keys = [None if n % 3 == 0 else b"key-%d" % n for n in range(count)]
    headers = [None if n % 2 else {"trace": b"%d" % n, "": b""} for n in range(count)]
    batch = raw_batch(keys, [b"value %d " % n * (n % 5) for n in range(count)], headers, [US + n for n in range(count)])
    return bytes(encode_batch(batch, compression).to_pybytes())


@cache
def typed_payload(count: int, compression: str | None = None) -> bytes:
    """Make a payload of TYPED_SCHEMA."""
    at = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    rows = [
        {"id": n, "name": None if n % 4 == 1 else f"näme {n}", "tags": ["a", None, "b" * n][: n % 4], "at": at,
         "price": None if n % 3 else 5, "box": {"a": n, "b": [("k", 0.5)]} if n % 2 else None, "ok": n % 2 == 0}
        for n in range(count)
    ]  # fmt: skip
    return bytes(encode_batch(pa.RecordBatch.from_pylist(rows, schema=TYPED_SCHEMA), compression).to_pybytes())


def old_compressed(batch: pa.RecordBatch, compression: str) -> bytes:
    """Make a payload as Arrow 0.17 compressed it: the codec is in the message's metadata, not in the batch."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch, custom_metadata={"ARROW:experimental_compression": compression})
    whole = sink.getvalue().to_pybytes()
    made = bytearray(whole[8 + struct.unpack_from("<i", whole, 4)[0] : -8])  # without schema and end of the stream
    (message,) = struct.unpack_from("<I", made, 8)
    header = flatbuffer_field(made, 8 + message, 2)
    table = header + struct.unpack_from("<I", made, header)[0]
    vtable = table - struct.unpack_from("<i", made, table)[0]
    struct.pack_into("<H", made, vtable + 4 + 2 * 3, 0)  # RecordBatch.compression: absent
    return bytes(made)


def flatbuffer_field(data: bytes | bytearray, table: int, number: int) -> int:
    """Return the offset of a field of a flatbuffer table; the field must exist."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    return table + int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])


def overlapping(batch: pa.RecordBatch) -> bytes:
    """Make a payload whose buffers all overlap the largest one: far more columns than bytes."""
    made = bytearray(batch.serialize().to_pybytes())
    (message,) = struct.unpack_from("<I", made, 8)
    header = flatbuffer_field(made, 8 + message, 2)
    field = flatbuffer_field(made, header + struct.unpack_from("<I", made, header)[0], 2)
    vector = field + struct.unpack_from("<I", made, field)[0]
    (count,) = struct.unpack_from("<I", made, vector)
    buffers = np.frombuffer(made, np.int64, 2 * count, vector + 4).reshape(count, 2)
    buffers[:] = buffers[np.argmax(buffers[:, 1])]
    return bytes(made)


def empty_strings(count: int, kind: pa.DataType) -> pa.Array:
    """Make values without a byte; one offset each, all of them 0."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(bytes(4 * (count + 1))), pa.py_buffer(b"")])


def many_headers(count: int) -> pa.RecordBatch:
    """Make one record with that many empty headers."""
    kind = pa.map_(pa.string(), pa.binary())
    pairs = pa.StructArray.from_arrays(
        [empty_strings(count, pa.string()), empty_strings(count, pa.binary())],
        fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())],
    )
    ends = pa.py_buffer(np.array([0, count], np.int32))
    headers = pa.Array.from_buffers(kind, 1, [None, ends], children=[pairs])
    plain = raw_batch([None], [b""], [None], [US])
    return pa.RecordBatch.from_arrays([*plain.columns[:2], headers, plain.column(3)], schema=plain.schema)


def many_tags(count: int) -> pa.RecordBatch:
    """Make one record of TYPED_SCHEMA with that many empty tags."""
    ends = pa.py_buffer(np.array([0, count], np.int32))
    tags = pa.Array.from_buffers(pa.list_(pa.string()), 1, [None, ends], children=[empty_strings(count, pa.string())])
    one = pa.RecordBatch.from_pylist([{"id": 1}], schema=TYPED_SCHEMA)
    return one.set_column(2, TYPED_SCHEMA.field(2), tags)


def batch_frame(payload: bytes, **fields: int) -> bytes:
    """Make a whole batch frame."""
    header = {"session_seq": 5, "low": 3, "lane": 0, "session": 1, "count": 2, "length": len(payload)}
    return codec.batch_header(**header | {"crc": codec.payload_crc(payload)} | fields) + payload


def reference_frame(payload: bytes, at: tuple[int, int, int] = (4_096, 0, 1), **fields: int) -> bytes:
    """Make a whole batch frame that names a staged batch with this payload, by its lane, index and topic id."""
    lane, index, topic_id = at
    body = codec.reference_body(codec.BatchReference(lane, len(payload), index, topic_id))
    return batch_frame(body, **{"crc": codec.payload_crc(payload), "flags": REFERENCE} | fields)


def acks(count: int) -> Entries:
    """Make acks of all outcomes in turn."""
    made = np.zeros(count, dtype=ACK)
    outcomes = list(Outcome)
    for number in range(count):
        made["session_seq"][number], made["index"][number] = number, 100 + number
        made["outcome"][number] = outcomes[number % len(outcomes)]
    return made


def entries_for(payloads: list[bytes], counts: list[int] | None = None, first_index: int = 100) -> Entries:
    """Make sealed order entries; an empty payload gets a SESSION_OPEN."""
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
    """Make a whole fetched frame with these payloads."""
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
_AT: Final = {0: LanePosition(1, 10)}
_END: Final = {0: LanePosition(5, 50)}
TIER: Final = Tier(id="t", warehouse="w", table="n.t", frontiers=_END, starts=_AT, epoch=2)
TOPIC: Final = Topic(name="orders", lane=0, lanes=[LANE])
_VALUES: Final[dict[str, Any]] = {
    "name": "orders", "topic": "orders", "versions": [1], "brokers": [], "columns": b"", "widths": [1, 2],
    "ranges": [RANGE], "tier": TIER, "topics": [TOPIC], "lanes": [LANE], "cuts": [Cut(5, 50, 1_000)],
    "readers": [ReaderProgress(reader="r", places=_AT)], "places": _AT, "frontiers": _END,
    "facts": {"a": 1, "b": [1.5, None, "x"]}, "partitions": [1, 2], "starts": _AT, "lost_before": [(1, 2)],
    "by": "index", "read": "ordered", "on_gap": "fence",
}  # fmt: skip


def _sample(kind: type[messages.Message]) -> messages.Message:
    """Make a message with all its fields."""
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
"""One message of each kind."""
COUNT_AND_SCHEMA: Final = struct.Struct("<IB3x")
