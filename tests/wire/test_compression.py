"""Compressed payloads: complete, or Corrupt; their claimed unpacked size is never trusted."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import Corrupt
from embarcadero.limits import BATCH_BUFFERS_MAX, DECODED_BYTES_MAX, HEADERS_PER_BATCH_MAX, LIST_ENTRIES_MAX
from embarcadero.wire.schemas import COMPRESSIONS, RAW_SCHEMA, decode_batch, encode_batch, raw_batch
from embarcadero_proof.fuzz.samples import TYPED_SCHEMA, many_headers, many_tags, old_compressed, overlapping

SCHEMA = pa.schema([("s", pa.string()), ("n", pa.list_(pa.int64())), ("b", pa.bool_())])
ROWS = [{"s": "x" * 50, "n": list(range(9)), "b": True}, {}, {"s": ""}] * 20
SAMPLE = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)
ENCODED = {compression: encode_batch(SAMPLE, compression).to_pybytes() for compression in COMPRESSIONS}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_batches_survive(compression: str) -> None:
    """Compressed batches are restored, and are smaller on the wire."""
    assert decode_batch(ENCODED[compression], SCHEMA, 60, full=True) == SAMPLE
    assert len(ENCODED[compression]) < encode_batch(SAMPLE).size


def body_at(payload: bytes) -> int:
    """The start of a message's body."""
    return 8 + int(struct.unpack_from("<i", payload, 4)[0])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("claim", [DECODED_BYTES_MAX + 1, 1 << 40, (1 << 63) - 1, -2, -(1 << 63)])
def test_a_claim_beyond_the_limit_is_not_trusted(compression: str, claim: int) -> None:
    """The length in front of a buffer is read before memory is allocated."""
    bomb = bytearray(ENCODED[compression])
    struct.pack_into("<q", bomb, body_at(bomb), claim)
    held = pa.total_allocated_bytes()
    with pytest.raises(Corrupt, match="unpacks to"):
        decode_batch(bytes(bomb), SCHEMA, 60)
    assert pa.total_allocated_bytes() <= held


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_many_buffers_below_the_limit_are_a_bomb_together(compression: str) -> None:
    """The limit is for all buffers of a batch, not for each."""
    half = pa.array([bytes(DECODED_BYTES_MAX // 2)])
    bomb = encode_batch(pa.record_batch({"a": half, "b": half}), compression)
    assert bomb.size < 1 << 20
    with pytest.raises(Corrupt, match="unpacks to"):
        decode_batch(bomb, pa.schema([("a", pa.binary()), ("b", pa.binary())]), 1)


def test_too_many_buffers_are_refused() -> None:
    """Reading all their lengths is work as well."""
    columns = BATCH_BUFFERS_MAX // 2 + 1
    batch = pa.RecordBatch.from_arrays([pa.array([1])] * columns, names=[str(n) for n in range(columns)])
    with pytest.raises(Corrupt, match="buffers"):
        decode_batch(encode_batch(batch, "lz4"), batch.schema, 1)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_compression_of_arrow_0_17_is_refused_before_it_is_unpacked(compression: str) -> None:
    """Arrow's reader still unpacks it, to whatever the payload claims."""
    bomb = old_compressed(raw_batch([None], [bytes(DECODED_BYTES_MAX + 1)], [None], [1]), compression)
    assert len(bomb) < 1 << 20
    held = pa.total_allocated_bytes()
    with pytest.raises(Corrupt, match="experimental compression"):
        decode_batch(bomb, RAW_SCHEMA, 1)
    assert pa.total_allocated_bytes() <= held


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_record_with_millions_of_empty_headers_is_refused(compression: str) -> None:
    """Empty headers have no bytes of their own, but a reader makes an object of each."""
    bomb = encode_batch(many_headers(HEADERS_PER_BATCH_MAX + 1), compression)
    assert bomb.size < 1 << 20
    with pytest.raises(Corrupt, match="entries together"):
        decode_batch(bomb, RAW_SCHEMA, 1)
    assert decode_batch(encode_batch(many_headers(HEADERS_PER_BATCH_MAX), compression), RAW_SCHEMA, 1, full=True)


def nulls(kind: pa.DataType, entries: int) -> pa.RecordBatch:
    """One record: a list of that many nulls, which need no bytes at all."""
    ends = pa.array([0, entries], pa.int64() if pa.types.is_large_list(kind) else pa.int32()).buffers()[1]
    buffers = [None] if pa.types.is_fixed_size_list(kind) else [None, ends]
    return pa.record_batch({"a": pa.Array.from_buffers(kind, 1, buffers, children=[pa.nulls(entries)])})


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.null()), pa.large_list(pa.null()), pa.list_(pa.null(), LIST_ENTRIES_MAX + 1)],
    ids=["list", "large list", "fixed size list"],
)
def test_a_list_of_nulls_without_end_is_refused(kind: pa.DataType) -> None:
    """It takes no buffer, so that adding up buffers finds nothing."""
    bomb = nulls(kind, LIST_ENTRIES_MAX + 1)
    with pytest.raises(Corrupt, match="entries together"):
        decode_batch(bomb.serialize(), bomb.schema, 1)


@pytest.mark.parametrize("compression", [None, *COMPRESSIONS])
def test_a_list_of_empty_strings_is_refused(compression: str | None) -> None:
    """A list within a struct, beside other columns: the lengths of all of them are checked."""
    with pytest.raises(Corrupt, match="entries together"):
        decode_batch(encode_batch(many_tags(LIST_ENTRIES_MAX + 1), compression), TYPED_SCHEMA, 1)
    inner = pa.StructArray.from_arrays([nulls(pa.list_(pa.null()), LIST_ENTRIES_MAX + 1).column(0)], names=["x"])
    deep = pa.record_batch({"n": pa.array([1]), "s": inner, "m": pa.array([[1]])})
    with pytest.raises(Corrupt, match="entries together"):
        decode_batch(encode_batch(deep, compression), deep.schema, 1)


def test_buffers_that_overlap_are_added_up() -> None:
    """One buffer may serve many columns: a copy of the columns would contain it many times."""
    many = {str(n): pa.array([bytes(1 << 20)]) for n in range(70)}
    bomb = overlapping(pa.record_batch(many))
    with pytest.raises(Corrupt, match="unpacks to"):
        decode_batch(bomb, pa.record_batch(many).schema, 1)


def test_lengths_are_compared_before_a_batch_is_read() -> None:
    """Columns of nulls may have any number of records, without a byte."""
    bomb = pa.record_batch({"a": pa.Array.from_buffers(pa.null(), 1 << 30, [None])})
    with pytest.raises(Corrupt, match="1073741824 records, and its entry has 1"):
        decode_batch(bomb.serialize(), bomb.schema, 1)


def test_a_reader_of_an_older_schema_reads_a_batch_with_more_columns() -> None:
    """Lengths of columns that it does not know are not taken for those of its own lists."""
    schema = pa.schema([("a", pa.list_(pa.int8()))])
    newer = pa.record_batch({"a": pa.array([[1], [2]], pa.list_(pa.int8())), "b": pa.array([[7] * 9, []])})
    assert decode_batch(newer.serialize(), schema, 2, full=True).to_pydict() == {"a": [[1], [2]]}


@pytest.mark.parametrize("claim", [0, 1, 7, 1000])
def test_a_wrong_claim_is_corrupt(claim: int) -> None:
    """A buffer that unpacks to a length other than its claim, or that claims no length."""
    wrong = bytearray(ENCODED["zstd"])
    at = next(at for at in range(body_at(wrong), len(wrong), 8) if struct.unpack_from("<q", wrong, at)[0] == 61 * 4)
    struct.pack_into("<q", wrong, at, claim)
    with pytest.raises(Corrupt):
        decode_batch(bytes(wrong), SCHEMA, 60, full=True)


edits = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little")]),
    ),
    min_size=1,
    max_size=4,
)


@given(st.sampled_from(COMPRESSIONS), edits, st.integers(0, 2000))
@settings(deadline=None, max_examples=400)
def test_a_changed_payload_is_corrupt_or_safe(compression: str, changes: list[tuple[int, bytes]], cut: int) -> None:
    """Whatever a hostile publisher sends, a reader gets Corrupt, or columns that can be read to their end."""
    changed = bytearray(ENCODED[compression])
    for anywhere, new in changes:
        at = anywhere % len(changed)
        changed[at : at + len(new)] = new[: len(changed) - at]
    for data in (bytes(changed), bytes(changed[: cut % len(changed)])):
        try:
            decode_batch(data, SCHEMA, 60, full=True).to_pylist()
        except Corrupt as error:
            assert error.hint  # noqa: PT017  # the property is that nothing else is raised
