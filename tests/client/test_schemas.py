"""Schemas: which schemas a topic may have, how they change, how data is fitted to them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.client.arguments import parse_schema
from embarcadero.client.encoding import encoded, fitted, list_entries, pieces
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.errors import BadSchema, BadValue, Corrupt
from embarcadero.limits import LIST_ENTRIES_MAX, RECORDS_PER_BATCH_MAX, SCHEMA_COLUMNS_MAX
from embarcadero.placement.topics import first_version
from embarcadero.types import EntryKind
from embarcadero.wire.schemas import (
    RAW,
    TopicSchemas,
    checked_schema,
    decode_batch,
    decode_schema,
    decode_versions,
    encode_schema,
    evolve,
    named,
)

V1 = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
V2 = V1.append(pa.field("price", pa.float64()))
TYPED = TopicSchemas(V1, (2,))
NEWER = TopicSchemas(V2, (2, 3))


def batch_of(data: pa.RecordBatch, version: int, schemas: TopicSchemas) -> Batch:
    """A batch as a reader with these `schemas` gets it."""
    fields = dict.fromkeys(OrderEntry._fields, 0) | {"count": data.num_rows, "schema": version, "kind": EntryKind.BATCH}
    return Batch.of_entry(0, OrderEntry(**fields), encoded(data, None), {}, schemas)


# --- schemas ---
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (pa.schema([]), "0 columns"),
        (pa.schema([(f"c{n}", pa.int8()) for n in range(SCHEMA_COLUMNS_MAX + 1)]), "1025 columns"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "'a' occurs twice"),
        (pa.schema([("_seq", pa.int8())]), "'_seq' is not allowed"),
        (pa.schema([("", pa.int8())]), "'' is not allowed"),
        (pa.schema([("c", pa.dictionary(pa.int8(), pa.string()))]), "'c' is dictionary"),
        (pa.schema([("c", pa.list_(pa.dictionary(pa.int8(), pa.string())))]), "'c' is dictionary"),
        (pa.schema([("c", pa.uuid())]), "'c' is extension"),
        (pa.schema([("c", pa.string_view())]), "'c' is string_view"),
        (pa.schema([("c", pa.dense_union([pa.field("x", pa.int8())]))]), "'c' is dense_union"),
        (pa.schema([("c", pa.run_end_encoded(pa.int16(), pa.int8()))]), "'c' is run_end"),
        (pa.schema([("x" * 70_000, pa.int8())]), "schema has 7"),
        (pa.schema([("c", pa.binary(2**31 - 1))]), "rows have 2,147,483,647 bytes"),
        (pa.schema([("a", pa.binary(40_000)), ("b", pa.binary(40_001))]), "80,001 bytes .* 40,001 of them in .* 'b'"),
        (pa.schema([("c", pa.list_(pa.int64(), 2**30))]), "rows have 8,589,934,592 bytes"),
        (pa.schema([("c", pa.list_(pa.null(), 2**30))]), "rows have 1,073,741,824 bytes"),
        (pa.schema([("c", pa.list_(pa.list_(pa.bool_(), 2**20), 2**20))]), "rows have 1,099,511,627,776 bytes"),
        (pa.schema([("c", pa.list_(pa.struct([("x", pa.list_(pa.string(), 9_000))])))]), "rows have 72,000 bytes"),
        ("id:int64", "is a str"),
    ],
)
def test_schemas_that_no_topic_may_have_are_refused_by_column(schema: Any, words: str) -> None:
    """Unknown or unsafe types, double and reserved names, too many columns, too many bytes."""
    with pytest.raises(BadSchema, match=words):
        encode_schema(schema)


def test_types_nested_too_deep_are_refused() -> None:
    """A schema can't make its readers recurse."""
    kind = pa.int8()
    for _ in range(20):
        kind = pa.list_(kind)
    with pytest.raises(BadSchema, match="deep"):
        encode_schema(pa.schema([("c", kind)]))


@given(st.binary(max_size=300) | st.integers(0, 200).map(lambda n: encode_schema(V2)[:n]))
@settings(deadline=None)
def test_arbitrary_bytes_are_no_schema(noise: bytes) -> None:
    """Any bytes that a client sends as a schema are a schema or BadSchema."""
    try:
        checked_schema(decode_schema(noise))
    except BadSchema as error:
        assert error.hint  # noqa: PT017  # the property is that nothing else is raised


def test_metadata_does_not_travel() -> None:
    """What pandas notes about its index is not part of a topic's schema."""
    assert decode_schema(encode_schema(V1.with_metadata({"pandas": "x" * 100_000}))).equals(V1, check_metadata=True)


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([(f"c{n}", pa.decimal256(76, 2)) for n in range(SCHEMA_COLUMNS_MAX)]),
        pa.schema([("vector", pa.list_(pa.float32(), 16_384))]),
        pa.schema([("c", pa.binary(65_536)), ("n", pa.null())]),
        pa.schema([("m", pa.map_(pa.string(), pa.list_(pa.float64()))), ("s", pa.large_string()), ("d", pa.date32())]),
    ],
)
def test_rows_of_usual_width_are_taken(schema: pa.Schema) -> None:
    """As many columns of numbers as a schema may have, and vectors."""
    assert decode_schema(encode_schema(schema)) == schema


def test_a_wide_schema_of_an_earlier_version_is_read_and_not_widened() -> None:
    """A topic's existing schema stays; neither a new topic nor a new version gets more than the limit."""
    wide = pa.schema([("id", pa.int64()), ("c", pa.binary(100_000))])
    data = wide.serialize().to_pybytes()
    known = decode_versions(data, [2])
    assert known.newest == wide
    assert evolve(known, wide) is known
    for ask in (lambda: evolve(known, wide.append(pa.field("x", pa.int8()))), lambda: first_version(data)):
        with pytest.raises(BadSchema, match="rows have 100,0"):
            ask()


def test_nulls_of_added_columns_share_their_memory() -> None:
    """A batch of many small rows does not take gigabytes because columns were added to the topic later."""
    old = pa.schema([("n", pa.null())])
    newest = pa.schema([*old, *(pa.field(f"c{n}", pa.int64()) for n in range(200)), ("s", pa.string())])
    batch = batch_of(pa.record_batch([pa.nulls(100_000)], schema=old), 1, TopicSchemas(newest, (1, len(newest))))
    before = pa.total_allocated_bytes()
    found = batch.to_arrow()
    assert pa.total_allocated_bytes() - before < 4 * 8 * 100_000
    found.validate(full=True)
    assert (found.schema, found.num_rows) == (newest, 100_000)
    assert {column.null_count for column in found.columns} == {100_000}


# --- evolution ---
def test_added_nullable_columns_make_a_version() -> None:
    """New columns go to the end, wherever they were written; the same schema again changes nothing."""
    wanted = pa.schema([("price", pa.float64()), V1.field("name"), V1.field("id")])
    after = evolve(TYPED, wanted)
    assert (after.version, after.newest) == (2, V2)
    assert after.all() == {1: V1, 2: V2}
    assert evolve(after, wanted) is after
    assert decode_versions(encode_schema(after.newest), after.widths) == after


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (pa.schema([V1.field("id")]), "'name' can't be removed"),
        (pa.schema([V1.field("id"), ("name", pa.int8())]), "'name' is string and can't become int8"),
        (pa.schema([V1.field("id"), V1.field("name").with_nullable(False)]), "'name' is nullable and can't become not"),
        (pa.schema([V1.field("id").with_nullable(True), V1.field("name")]), "'id' is not null and can't"),
        (pa.schema([V1.field("id"), ("title", pa.string())]), "'name' can't be renamed to 'title'"),
        (V1.append(pa.field("x", pa.int8(), nullable=False)), "'x' must be nullable"),
    ],
)
def test_other_changes_are_refused_with_the_reason(wanted: pa.Schema, reason: str) -> None:
    """Removed, changed, renamed; nullability; and new columns that older records can't have."""
    with pytest.raises(BadSchema, match=reason):
        evolve(TYPED, wanted)


def test_raw_topics_get_no_schema() -> None:
    """Their records have no columns to extend."""
    with pytest.raises(BadSchema, match="raw records"):
        evolve(RAW, V1)


@pytest.mark.parametrize("widths", [[], [0, 2], [2, 2], [1], [3, 2]])
def test_versions_that_contradict_the_schema_are_corrupt(widths: list[int]) -> None:
    """A client verifies every broker's answer."""
    with pytest.raises(Corrupt):
        decode_versions(encode_schema(V1), widths)


def test_readers_get_every_batch_as_the_newest_schema_that_they_know() -> None:
    """Older batches get nulls; of newer ones a reader sees the columns that it knows."""
    old = pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=V1)
    new = pa.RecordBatch.from_pylist([{"id": 2, "name": None, "price": 0.5}], schema=V2)
    assert batch_of(old, 1, NEWER).to_arrow() == pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=V2)
    assert batch_of(new, 2, NEWER).to_arrow() == new
    assert batch_of(new, 2, TYPED).to_arrow() == pa.RecordBatch.from_pylist([{"id": 2, "name": None}], schema=V1)
    assert batch_of(new, 2, NEWER).records()[0].value == {"id": 2, "name": None, "price": 0.5}
    assert batch_of(old, 1, NEWER).records()[0].timestamp.year == 1970


def test_impossible_versions_are_corrupt() -> None:
    """Raw records in a typed topic, and typed records in a raw topic."""
    data = pa.RecordBatch.from_pylist([{"id": 1, "name": "a"}], schema=V1)
    for schemas, version in ((TYPED, 0), (RAW, 1)):
        with pytest.raises(Corrupt):
            batch_of(data, version, schemas).to_arrow()


# --- data ---
ROWS = [{"id": 1, "name": "a"}, {"id": 2, "name": None}]
WANTED = pa.Table.from_pylist(ROWS, schema=V1)


@pytest.mark.parametrize(
    "data",
    [
        WANTED,
        WANTED.select(["name", "id"]),
        WANTED.combine_chunks().to_batches()[0],
        ROWS,
        tuple(ROWS),
        [{"id": 1, "name": "a"}, {"id": 2}],
        {"name": ["a", None], "id": [1, 2]},
        {"name": ("a", None), "id": pa.array([1, 2])},
        pd.DataFrame({"name": ["a", None], "id": [1, 2]}, index=[7, 8]),
        pd.DataFrame({"name": ["a", None], "id": [1.0, 2.0]}),
        pl.DataFrame({"name": ["a", None], "id": [1, 2]}),
        pl.DataFrame({"name": ["a", None], "id": pl.Series([1, 2], dtype=pl.UInt8)}),
    ],
    ids=lambda data: type(data).__module__.split(".")[0] + "." + type(data).__name__,
)
def test_rows_columns_and_frames_fit_a_schema(data: Any) -> None:
    """Any container of rows, with columns in any order, becomes the topic's columns."""
    found = fitted(data, TYPED, 0)
    assert found.schema == V1
    assert found.to_pylist() == ROWS


NOON = datetime(2024, 1, 1, 12, 0, 0, 1500)


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        (pa.int64(), 1.5, 2.0),
        (pa.int8(), Decimal("1.25"), Decimal(1)),
        (pa.list_(pa.int8()), [1, 1.5], [1, 2.0]),
        (pa.struct([("x", pa.int8())]), {"x": 1.5}, {"x": 1}),
        (pa.struct([("x", pa.int8())]), {"x": 1, "y": 2}, {"x": 1}),
        (pa.map_(pa.string(), pa.int8()), {"x": 1.5}, {"x": 1}),
        (pa.timestamp("ms"), NOON, NOON.replace(microsecond=1000)),
        (pa.timestamp("s"), NOON, NOON.replace(microsecond=0)),
        (pa.time32("ms"), NOON.time(), NOON.replace(microsecond=0).time()),
        (pa.duration("s"), timedelta(seconds=1.5), timedelta(seconds=2)),
        (pa.date32(), NOON, NOON.date()),
    ],
)
def test_values_are_converted_only_without_loss(kind: pa.DataType, value: Any, kept: Any) -> None:
    """Arrow would truncate these silently, which would be noticed only when the records are needed."""
    schemas = TopicSchemas(pa.schema([("c", kind)]), (1,))
    with pytest.raises(BadSchema, match="'c' can't become"):
        fitted([{"c": value}], schemas, 0)
    with pytest.raises(BadSchema, match="'c' can't become"):
        fitted({"c": iter([value])}, schemas, 0)
    assert fitted({"c": [kept, None]}, schemas, 0).num_rows == 2


def test_values_beyond_pythons_types_are_a_typed_error() -> None:
    """A time in the year 100,000 is valid in Arrow, and has no datetime."""
    schemas = TopicSchemas(pa.schema([("t", pa.timestamp("s"))]), (1,))
    data = pa.record_batch({"t": pa.array([1 << 50]).view(pa.timestamp("s"))})
    with pytest.raises(BadValue, match="to_arrow"):
        batch_of(data, 1, schemas).records()
    assert batch_of(data, 1, schemas).to_arrow() == data


def test_missing_columns_that_may_be_null_are_null() -> None:
    """A program that does not know a new column yet keeps working."""
    assert fitted([{"id": 1}], NEWER, 0).to_pylist() == [{"id": 1, "name": None, "price": None}]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pa.table({"id": pa.array([1], pa.int32()), "name": ["a"]}), "'id' is int32, not int64"),
        (pa.table({"id": ["1"], "name": ["a"]}), "'id' is string, not int64"),
        (pa.table({"name": ["a"]}), "'id' is missing"),
        (pa.table({"id": [1], "nam": ["a"]}), "'nam' is unknown"),
        (pa.table({"id": pa.array([None], pa.int64())}), "'id' has nulls"),
        (pa.Table.from_arrays([pa.array([1]), pa.array([1])], names=["id", "id"]), "'id' is there twice"),
        ([{"id": "x"}], "'id' can't become int64"),
        ([{"id": 1 << 70}], "'id' can't become int64"),
        ([{"id": 1, "name": object()}], "'name' can't become string"),
        ([{"id": 1, "other": object()}], "'other' can't become Arrow"),
        ([{"id": 1}, 5], "row 1 is int"),
        ([{"id": 1, 5: 1}], "column 5"),
        ({"id": 1}, "'id' is one int"),
        ({"id": [1, 2], "name": ["a"]}, "different lengths"),
        (pd.DataFrame({"id": ["x"]}), "'id' can't become int64"),
        (pd.DataFrame({"id": [1.5]}), "'id' can't become int64"),
        (pd.DataFrame([[1, 2]], columns=["id", "id"]), "twice"),
        (pd.DataFrame({"id": [1], "name": [pd.Period("2024")]}), "'name' can't become string"),
        (pl.Series([1]), "Series can't be published"),
        (pl.DataFrame({"id": [1.5]}), "'id' is double, not int64"),
        (pl.DataFrame({"id": [1], "name": [object()]}, schema_overrides={"name": pl.Object}), "'name' holds Python"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_column(data: Any, words: str) -> None:
    """Before anything is sent, with the column and both types."""
    with pytest.raises(BadValue, match=words):
        fitted(data, TYPED, 0)


@pytest.mark.parametrize("data", [[], {"id": []}, V1.empty_table(), pd.DataFrame({"id": []}), pl.DataFrame({"id": []})])
def test_no_rows_are_refused(data: Any) -> None:
    """A batch has at least one record."""
    with pytest.raises(BadValue, match="has no records"):
        fitted(data, TYPED, 0)


@pytest.mark.parametrize("data", [5, "text", b"bytes", None, object()])
def test_values_that_are_not_tables_are_refused(data: Any) -> None:
    """The hint lists what can be published."""
    with pytest.raises(BadValue, match="list of dicts"):
        fitted(data, TYPED, 0)


def test_raw_records_are_completed() -> None:
    """Text or bytes as values, headers as dicts; omitted fields are null or now."""
    found = fitted([{"value": "a", "headers": {"h": b"1"}}, {"value": "b", "key": "k"}], RAW, 5).to_pylist()
    assert [row["value"] for row in found] == [b"a", b"b"]
    assert [row["key"] for row in found] == [None, b"k"]
    assert found[0]["headers"] == [("h", b"1")]
    assert fitted({"value": [b"a"]}, RAW, 5).column("timestamp").cast(pa.int64()).to_pylist() == [5]


@pytest.mark.parametrize("stamp", [-(1 << 63), (1 << 63) - 1, -62_135_596_800_000_001, 253_402_300_800_000_000])
def test_timestamps_out_of_range_are_refused(stamp: int) -> None:
    """A table with times outside the range of datetime is not sent."""
    times = pa.array([stamp], pa.int64()).view(pa.timestamp("us", tz="UTC"))
    with pytest.raises(BadValue, match="years 1 to 9999"):
        fitted(pa.table({"value": [b"x"], "timestamp": times}), RAW, 0)


# --- cutting ---
def test_ten_million_rows_are_cut() -> None:
    """No batch has more records than one may have, however small they are."""
    batch = pa.record_batch({"b": pa.nulls(10_000_000, pa.null())})
    counts = [count for count, _ in pieces(batch, 1 << 20, 8 << 20, None)]
    assert sum(counts) == 10_000_000
    assert max(counts) <= RECORDS_PER_BATCH_MAX


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_tables_are_cut_by_batch_bytes_and_record_batches_by_the_frame(compression: str | None) -> None:
    """A table of many chunks becomes batches of about the requested size; a record batch that fits stays whole."""
    table = pa.concat_tables([pa.table({"x": pa.array([bytes([n % 251]) * 100 for n in range(500)])})] * 20)
    parts = list(pieces(table, 100_000, 1 << 20, compression))
    assert 8 <= len(parts) <= 20
    decoded = [decode_batch(payload, table.schema, count, full=True) for count, payload in parts]
    assert pa.Table.from_batches(decoded).equals(table.combine_chunks())
    whole = table.slice(0, 5000).combine_chunks().to_batches()[0]
    assert [count for count, _ in pieces(whole, 1000, 1 << 20, compression)] == [5000]


def test_incompressible_data_is_not_compressed() -> None:
    """Compression never makes a batch larger than its frame."""
    import numpy as np

    noise = pa.record_batch({"x": pa.array([np.random.default_rng(1).bytes(5000)])})
    assert encoded(noise, "lz4").size == encoded(noise, None).size


def test_a_record_larger_than_a_frame_is_refused() -> None:
    """Compressed or not, at some size a single row can't be a batch."""
    row = pa.record_batch({"x": pa.array([bytes(40 << 20)])})
    for compression in (None, "zstd"):
        with pytest.raises(BadValue, match="limit of a batch"):
            list(pieces(row, 1 << 20, 8 << 20, compression))


# --- text ---
def test_schemas_are_written_in_a_short_form(tmp_path: Path) -> None:
    """Names and types; files of JSON and Arrow give the same schema."""
    wanted = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False), ("at", pa.timestamp("us", tz="UTC")),
            ("tags", pa.list_(pa.string())), ("d", pa.decimal128(10, 2)), ("m", pa.map_(pa.string(), pa.int8())),
            ("s", pa.struct([("x", pa.float64()), ("y", pa.bool_())])),
        ]
    )  # fmt: skip
    text = "id:int64!, at:timestamp[us, UTC], tags:list<string>, d:decimal(10,2), m:map<string, int8>"
    assert parse_schema(text + ", s:struct<x:double, y:bool>") == wanted
    assert parse_schema(named(V2)) == V2
    by_name, listed = tmp_path / "a.json", tmp_path / "b.json"
    by_name.write_text(json.dumps({"id": "int64!", "name": "string"}))
    fields = [{"name": "id", "type": "int64", "nullable": False}, {"name": "name", "type": "string"}]
    listed.write_text(json.dumps({"fields": fields}))
    alone, whole = tmp_path / "c.arrow", tmp_path / "d.arrow"
    alone.write_bytes(V1.serialize().to_pybytes())
    with pa.OSFile(str(whole), "wb") as sink, pa.ipc.new_file(sink, V1):
        pass
    assert [parse_schema(str(path)) for path in (by_name, listed, alone, whole)] == [V1] * 4


@pytest.mark.parametrize("text", ["", "id", "id:", "id:int63", ":int64", "m:map<string>", "none.json", "none.arrow"])
def test_texts_that_are_no_schema_are_refused(text: str) -> None:
    """With a hint how to write a schema."""
    with pytest.raises(BadSchema):
        parse_schema(text)


def test_files_that_hold_no_schema_are_refused(tmp_path: Path) -> None:
    """JSON of another shape, and bytes of another kind."""
    for name, data in (("a.json", b"[1]"), ("b.json", b"{"), ("c.arrow", b"nothing of the kind")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(BadSchema):
            parse_schema(str(path))


def test_lists_are_cut_so_that_readers_take_them() -> None:
    """A batch with more list entries than readers accept is cut; a record that has more by itself is refused."""
    half = LIST_ENTRIES_MAX // 2 + 1
    bits = pa.Array.from_buffers(pa.bool_(), 2 * half, [None, pa.py_buffer(bytes(half // 4 + 1))])
    kind = pa.list_(pa.bool_())
    ends = pa.array([0, half, 2 * half], pa.int32()).buffers()[1]
    two = pa.record_batch({"a": pa.Array.from_buffers(kind, 2, [None, ends], children=[bits])})
    made = list(pieces(two, 8 << 20, 8 << 20, None))
    assert [count for count, _ in made] == [1, 1]
    for count, payload in made:
        assert decode_batch(payload, two.schema, count, full=True).num_rows == 1
    one = pa.Array.from_buffers(kind, 1, [None, pa.array([0, 2 * half], pa.int32()).buffers()[1]], children=[bits])
    with pytest.raises(BadValue, match="entries in lists and maps"):
        list(pieces(pa.record_batch({"a": one}), 8 << 20, 8 << 20, None))


def test_list_entries_are_counted_as_they_are_sent() -> None:
    """Of a slice, only its own entries; of nested lists, both levels."""
    column = pa.array([[[1, 2], [3]], [], [[4]]], pa.list_(pa.list_(pa.int8())))
    assert [list_entries(column), list_entries(column.slice(2)), list_entries(column.slice(1, 1))] == [7, 2, 0]
    assert list_entries(pa.array([[1, 2], None], pa.list_(pa.int8(), 2)).slice(1)) == 2
    assert (
        list_entries(pa.array([{"m": [("k", [1, 2])]}], pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.int8())))])))
        == 3
    )
