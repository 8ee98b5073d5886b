"""Arrow payloads, schemas, batches of a reader, and a subscriber that checks everything."""

from __future__ import annotations

from random import Random
from typing import Final

import numpy as np
import pyarrow as pa

from embarcadero.client.arguments import Lookup, parse_schema
from embarcadero.client.link import Link
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, seal, sealed
from embarcadero.limits import (
    CONTROL_BYTES_MAX,
    DECODED_BYTES_MAX,
    FETCH_BYTES_MAX,
    FRAME_BYTES_MAX,
    HEADERS_PER_BATCH_MAX,
    LIST_ENTRIES_MAX,
    MIB,
    SCRATCH_BYTES,
)
from embarcadero.types import Gap, GapKind
from embarcadero.wire.codec import FetchedReceived, FrameReceiver, payload_crc
from embarcadero.wire.schemas import (
    RAW,
    TopicSchemas,
    checked_schema,
    decode_batch,
    decode_schema,
    decode_versions,
    encode_batch,
    encode_schema,
    raw_batch,
)
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.samples import (
    COUNT_AND_SCHEMA,
    TYPED_SCHEMA,
    entries_for,
    fetched_frame,
    many_headers,
    many_tags,
    old_compressed,
    overlapping,
    raw_payload,
    typed_payload,
)
from embarcadero_proof.fuzz.target import Inputs, Target, agree
from embarcadero_proof.fuzz.targets.wire import FROM_BROKERS, mend_frames

TYPED: Final = TopicSchemas(TYPED_SCHEMA, (2, len(TYPED_SCHEMA)))
_DECODED: Final = DECODED_BYTES_MAX + DECODED_BYTES_MAX // 2  # bytes, and Arrow's own memory while it unpacks


# --- payloads ---------------------------------------------------------------------------------------------------------
def _payloads() -> Inputs:
    made = []
    for count in (1, 2, 30):
        for compression in (None, "lz4", "zstd"):
            made.append(COUNT_AND_SCHEMA.pack(count, 0) + raw_payload(count, compression))
            made.append(COUNT_AND_SCHEMA.pack(count, 2) + typed_payload(count, compression))
    made += [COUNT_AND_SCHEMA.pack(1, version) + payload for version, payload in _bombs()]
    return made


def _bombs() -> list[tuple[int, bytes]]:
    """Make small payloads, by schema version, that unpack to far more than allowed; and some at the limit."""
    long = raw_batch([None], [bytes(2 * DECODED_BYTES_MAX)], [None], [0])
    wide = pa.RecordBatch.from_pylist([{"id": 1, "name": "x" * 3_000}], schema=TYPED_SCHEMA)
    bombs = [(0, old_compressed(long, "zstd")), (0, old_compressed(raw_batch([b"k"], [b"v"], [None], [0]), "lz4"))]
    bombs += [(0, bytes(encode_batch(many_headers(count), "zstd"))) for count in (1_000, 4 * HEADERS_PER_BATCH_MAX)]
    bombs += [(2, bytes(encode_batch(many_tags(count), "zstd"))) for count in (1_000, LIST_ENTRIES_MAX + 1)]
    return [*bombs, (2, overlapping(wide))]


def _payload(data: bytes) -> str:
    """Use a batch as a reader does: columns and records; no access may be outside of the payload."""
    if len(data) < COUNT_AND_SCHEMA.size:
        return "short"
    count, version = COUNT_AND_SCHEMA.unpack_from(data)
    payload = data[COUNT_AND_SCHEMA.size :]
    schemas = TYPED if version else RAW
    fields = {"index": 5, "seq": 50, "count": count, "schema": version, "append_us": 1 << 50, "kind": 1}
    entry = OrderEntry(**(dict.fromkeys(OrderEntry._fields, 0) | fields))
    batch = Batch.of_entry(0, entry, payload, {}, schemas)
    columns = batch.to_arrow()
    agree(columns.num_rows == count and columns.schema.equals(schemas.newest), "a batch that differs from its header")
    records = batch.records()
    agree(len(records) == count, f"{len(records)} records of {count}")
    if not version and count:
        again = decode_batch(raw_batch(
            [r.key for r in records], [r.value for r in records], [r.headers for r in records],
            [r.timestamp_us for r in records],
        ).serialize(), RAW.newest, count)  # fmt: skip
        agree(again.column("value").equals(columns.column("value")), "records differ from columns")
    return f"version {min(version, 3)}"


# --- schemas ----------------------------------------------------------------------------------------------------------
def _deep(levels: int) -> pa.DataType:
    kind = pa.int8()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


def _schemas() -> Inputs:
    wide = pa.schema([pa.field(f"c{n}", pa.int32()) for n in range(100)])
    deep = pa.schema([pa.field("deep", _deep(10))])
    deeper = pa.schema([pa.field("deeper", _deep(200))])
    return [encode_schema(TYPED_SCHEMA), encode_schema(wide), encode_schema(deep), deeper.serialize().to_pybytes(),
            pa.schema([pa.field("d", pa.dictionary(pa.int8(), pa.string()))]).serialize().to_pybytes(),
            raw_payload(1)]  # fmt: skip


def _schema(data: bytes) -> str:
    schema = decode_schema(data)
    again = decode_schema(encode_schema(schema))
    agree(again.equals(schema.remove_metadata()), "a schema changes when it is encoded again")
    versions = decode_versions(data, [1, len(schema)] if len(schema) > 1 else [1])
    agree(len(versions.of(1)) == 1, "a version does not have its columns")
    return f"{min(len(schema), 4)} columns"


_TEXTS: Final = (
    "id:int64!, name:string", "at:timestamp[us, UTC], price:decimal(12, 2)!", "tags:list<string>, m:map<string, int8>",
    "s:struct<a:int32, b:list<struct<c:binary>>>, x:time64[us]", "d:decimal128(38,-3), e:timestamp[ns]",
    "a:list<list<list<list<int8>>>>", "a:fixed_size_binary[3]", "x.json",
)  # fmt: skip


def _schema_text(data: bytes) -> str:
    text = data.decode(errors="replace")
    if text.rpartition(".")[2] in {"json", "arrow", "arrows", "feather", "ipc"}:
        return "a file"
    schema = checked_schema(parse_schema(text))
    return f"{min(len(schema), 4)} columns"


# --- a subscriber ---------------------------------------------------------------------------------------------------
def _answers() -> Inputs:
    payloads = [raw_payload(2), b"", raw_payload(3, "lz4")]
    return [
        fetched_frame(payloads, [2, 0, 3]), fetched_frame([], gap=Gap(GapKind.TRIMMED, 10, 50)),
        fetched_frame([], gap=Gap(GapKind.LOST, 100, 150)), fetched_frame([], gap=Gap(GapKind.END_OF_LANE, 100, 100)),
        fetched_frame([raw_payload(1)], [1]) + fetched_frame([raw_payload(1)], [1]),
    ]  # fmt: skip


def _subscriber(data: bytes) -> str:
    """Check that a subscriber delivers only contiguous batches with valid checksums; the rest must be typed errors."""
    core = SubscriberCore(ReaderSettings(silent_after_us=10**9, control=True), 0, Lookup("index", 100))
    core.on_connected(Link(1, 0), 0)
    receiver = FrameReceiver(
        allowed=FROM_BROKERS, scratch=memoryview(bytearray(SCRATCH_BYTES)), control_bytes_max=CONTROL_BYTES_MAX
    )
    delivered: list[Batch] = []
    at, now = 0, 0
    while at < len(data) and core.failed is None:
        buffer = receiver.get_buffer()
        size = min(len(buffer), len(data) - at)
        buffer[:size] = data[at : at + size]
        at += size
        for event in receiver.received(size):
            now += 1_000_000
            core.on_timer(now)
            if isinstance(event, FetchedReceived):
                asked = core._request.under_way
                core.on_fetched(1, event._replace(request=asked.request if asked else 0), now)
            delivered += core.take_batches(100, now)
    return _checked(delivered, core.failed)


def _checked(delivered: list[Batch], failed: EmbarcaderoError | None) -> str:
    position = 100
    for batch in delivered:
        if batch.gap is not None and batch.gap.kind is not GapKind.SKIPPED:
            position = max(position, batch.gap.stop)
            continue
        agree(batch.index >= position, f"index {batch.index} after {position}")
        agree(not batch.count or payload_crc(batch.payload) == batch.crc, "a payload that does not fit its checksum")
        position = batch.index + 1
        repr(batch), len(batch)
        for ask in (lambda batch=batch: batch.append_time, batch.to_arrow, batch.records):
            try:
                ask()
            except EmbarcaderoError:
                continue
    return f"{min(len(delivered), 4)} delivered, then {failed and type(failed).__name__}"


# --- one entry --------------------------------------------------------------------------------------------------------
def _entry_batches() -> Inputs:
    payloads = [raw_payload(2), b""]
    return [entry.tobytes() + payload for entry, payload in zip(entries_for(payloads, [2, 0]), payloads, strict=True)]


def _mend_entry(data: bytes, rng: Random) -> bytes:
    if len(data) < ORDER.itemsize:
        return data
    entry = np.frombuffer(data[: ORDER.itemsize], dtype=ORDER).copy()
    payload = data[ORDER.itemsize :]
    if rng.random() < 0.9:
        entry["size"], entry["crc"] = len(payload), payload_crc(payload)
    if rng.random() < 0.5:
        entry["count"] = rng.randrange(4)

    return seal(entry).tobytes() + payload


def _entry_batch(data: bytes) -> str:
    """Use a batch of any entry: all errors must be typed."""
    if len(data) < ORDER.itemsize:
        return "short"
    entry = np.frombuffer(data[: ORDER.itemsize], dtype=ORDER)
    fits = bool(sealed(entry)[0])
    batch = Batch.of_entry(3, OrderEntry._make(entry.tolist()[0]), data[ORDER.itemsize :], {0: 7}, RAW)
    repr(batch), batch.size, batch.kind, batch.gap, batch.broker
    batch.to_arrow()
    for record in batch.records()[:5]:
        agree(batch.seq <= record.seq < batch.seq + batch.count, "a record outside of its batch")
        _ = record.timestamp
    return f"sealed {fits}, kind {batch.kind}, {batch.append_time.year > 2000}"


def _texts(data: bytes, rng: Random, pool: Inputs) -> bytes:
    words = (b"list<", b">", b",", b":", b"!", b"int64", b"struct<", b"timestamp[", b"decimal(", b"map<", b"<" * 3_000)
    if rng.random() < 0.02:
        return b"a:" + b"list<" * rng.randrange(2_000)
    return mutated(data, rng, pool, words)


_FETCHED_BYTES: Final = FETCH_BYTES_MAX + FRAME_BYTES_MAX + MIB
PAYLOAD: Final = (
    Target("payloads", "Arrow payloads of raw and typed topics, plain and compressed", _payloads, _payload,
           memory_bytes=_DECODED),
    Target("entries-and-payloads", "a batch of any order entry, as a reader gets it", _entry_batches, _entry_batch,
           mend=_mend_entry, memory_bytes=_DECODED),
    Target("subscriber", "answers of brokers to a subscriber: it delivers contiguous batches", _answers, _subscriber,
           mend=mend_frames, memory_bytes=_FETCHED_BYTES + _DECODED),
    Target("schemas", "Arrow schemas from outside", _schemas, _schema),
    Target("schema-texts", "schemas as people write them", lambda: [text.encode() for text in _TEXTS], _schema_text,
           _texts),
)  # fmt: skip
