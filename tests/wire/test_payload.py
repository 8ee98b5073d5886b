"""Payloads: records to Arrow and back, and only Corrupt for invalid ones."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import BadValue, Corrupt
from embarcadero.limits import DECODED_BYTES_MAX
from embarcadero.wire.schemas import RAW_SCHEMA, decode_batch, encode_batch, plain_batch, raw_batch

records = st.lists(
    st.tuples(
        st.none() | st.binary(max_size=10),
        st.binary(max_size=30),
        st.none() | st.dictionaries(st.text(max_size=5), st.binary(max_size=5), max_size=3),
        st.integers(-(2**63), 2**63 - 1),
    ),
    max_size=20,
)

SAMPLE = raw_batch(
    [None, b"k", b"", None], [b"v", b"", b"vv" * 50, b"w"], [None, {}, {"a": b"1", "b": b""}, None], [1, 2, 3, 4]
)
ENCODED = encode_batch(SAMPLE).to_pybytes()


def columns(batch: pa.RecordBatch) -> tuple[Any, ...]:
    """A batch as the four lists it was made of."""
    keys, values, headers, stamps = batch.columns
    pairs = [None if row is None else dict(row) for row in headers.to_pylist()]
    return keys.to_pylist(), values.to_pylist(), pairs, stamps.cast(pa.int64()).to_pylist()


@given(records)
@settings(deadline=None, max_examples=200)
def test_records_survive(rows: list[Any]) -> None:
    """Null keys, empty values, headers and any timestamp are restored unchanged, also under the full check."""
    lists = tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [], [])
    payload = encode_batch(raw_batch(*lists))
    assert columns(decode_batch(payload, RAW_SCHEMA, len(rows))) == lists
    assert columns(decode_batch(memoryview(payload), RAW_SCHEMA, len(rows), full=True)) == lists


def test_decoding_copies_nothing() -> None:
    """A decoded column refers to the received bytes."""
    received = bytearray(ENCODED)
    values = decode_batch(memoryview(received).toreadonly(), RAW_SCHEMA, 4).column(1)
    received[received.index(b"vvw")] = ord("X")
    assert values[2].as_py().endswith(b"vXv")


def test_the_schema_is_not_sent() -> None:
    """A payload has no field names: the topic knows its schema."""
    assert b"timestamp" not in ENCODED


@pytest.mark.parametrize(
    "lists",
    [
        ([None], [None], [None], [1]),
        ([None], [b"a", b"b"], [None], [1]),
        ([None], [3], [None], [1]),
        ([1.5], [b"a"], [None], [1]),
        ([None], [b"a"], ["x"], [1]),
        ([None], [b"a"], [{"x": 1}], [1]),
        ([None], [b"a"], [None], [2**63]),
        ([None], [b"a"], [None], ["now"]),
        ([None], [b"a"], [None], [None]),
    ],
)
def test_records_of_wrong_types_are_the_callers_mistake(lists: Any) -> None:
    """An invalid record is a BadValue, never an error of Arrow."""
    with pytest.raises(BadValue):
        raw_batch(*lists)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_another_number_of_records_is_corrupt(count: int) -> None:
    """The entry's count and the payload's must agree."""
    with pytest.raises(Corrupt, match=f"has 4 records, and its entry has {count}"):
        decode_batch(ENCODED, RAW_SCHEMA, count)


@given(st.binary(max_size=200), st.booleans())
@settings(deadline=None, max_examples=300)
def test_arbitrary_bytes_are_corrupt(noise: bytes, full: bool) -> None:
    """Random bytes, also after the start of a message, are Corrupt and nothing else."""
    for start in (b"", b"\xff\xff\xff\xff", ENCODED[:8], ENCODED[:40]):
        with pytest.raises(Corrupt):
            decode_batch(start + noise, RAW_SCHEMA, 4, full=full)


edits = st.lists(
    st.tuples(
        st.integers(0, len(ENCODED) - 1),
        st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little")]),
    ),
    min_size=1,
    max_size=4,
)


@given(edits, st.integers(0, len(ENCODED)))
@settings(deadline=None, max_examples=500)
def test_a_changed_message_is_corrupt_or_safe(changes: list[tuple[int, bytes]], cut: int) -> None:
    """A changed or cut message is Corrupt, or passes the full check and can be read to its end."""
    changed = bytearray(ENCODED)
    for at, new in changes:
        changed[at : at + len(new)] = new[: len(changed) - at]
    for data in (bytes(changed), bytes(changed[:cut])):
        try:
            columns(decode_batch(data, RAW_SCHEMA, 4, full=True))
        except Corrupt as error:
            assert error.hint  # noqa: PT017  # the property is that nothing else is raised


def other_message(batch: pa.RecordBatch, compression: str | None, skip: int) -> bytes:
    """A message of a stream with this batch: 0 is the schema, 1 the batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    for _ in range(skip):
        reader.read_next_message()
    return bytes(reader.read_next_message().serialize().to_pybytes())


def test_a_schema_message_is_corrupt() -> None:
    """Only record batches are payloads."""
    with pytest.raises(Corrupt, match="schema message"):
        decode_batch(other_message(SAMPLE, None, 0), RAW_SCHEMA, 4)


def test_a_batch_of_another_schema_is_corrupt() -> None:
    """A batch with fewer columns than the schema does not decode."""
    other = pa.record_batch({"n": pa.array([1, 2, 3, 4])})
    with pytest.raises(Corrupt):
        decode_batch(encode_batch(other), RAW_SCHEMA, 4)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_bomb_is_not_unpacked(compression: str) -> None:
    """A few bytes that would unpack to many megabytes are refused before memory is allocated."""
    bomb = other_message(raw_batch([None], [bytes(DECODED_BYTES_MAX)], [None], [1]), compression, 1)
    assert len(bomb) < 1 << 20
    held = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="unpacks to"):
            decode_batch(bomb, RAW_SCHEMA, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() <= held


def test_nulls_in_a_required_column_are_corrupt() -> None:
    """The full check finds a record without a value."""
    arrays = [pa.nulls(1, field.type) for field in RAW_SCHEMA]
    payload = pa.RecordBatch.from_arrays(arrays, names=RAW_SCHEMA.names).serialize()
    with pytest.raises(Corrupt, match="has nulls in a column"):
        decode_batch(payload, RAW_SCHEMA, 1, full=True)


@given(st.lists(st.tuples(st.binary(max_size=30), st.floats(0, 4e9)), max_size=20))
@settings(deadline=None)
def test_plain_records_are_raw_records(rows: list[tuple[bytes, float]]) -> None:
    """The fast path gives the same result as the general path, with times to the microsecond."""
    values, times = [row[0] for row in rows], [row[1] for row in rows]
    nothing = [None] * len(rows)
    general = raw_batch(nothing, values, nothing, [round(when * 1e6) for when in times])
    plain = decode_batch(encode_batch(plain_batch(values, times)), RAW_SCHEMA, len(rows), full=True)
    assert plain == general
