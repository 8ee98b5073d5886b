"""Rows with system columns: correct positions, cut as requested, and nothing lost when control entries are kept."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import BadSchema, BadValue, Corrupt, UnknownSchema
from embarcadero.tier.columns import KEPT, SYSTEM, EntriesHash, from_table, rows, table_schema, table_type, to_table
from embarcadero.types import EntryKind, GapKind
from embarcadero.wire.schemas import RAW, TopicSchemas
from tests.tier.entries import batch_of, control_of, hole, raw

LOG = [
    control_of(5, 10, EntryKind.SESSION_OPEN, session=3, flags=2),
    batch_of(raw([b"a", b"b"], [b"k", None]), 6, 10, partition=4),
    hole(7, 9),
    control_of(9, 12, EntryKind.SKIP, session=3, session_seq=8, location=5),
    batch_of(raw([b"c"]), 10, 12),
]


def typed(*fields: pa.Field) -> TopicSchemas:
    return TopicSchemas(pa.schema(list(fields)), (len(fields),))


def test_records_have_their_positions() -> None:
    """Without control only records are rows; system columns repeat the values of their batch."""
    found = rows(7, LOG, RAW)
    assert found.schema == table_schema(RAW, control=False)
    assert found.column("_seq").to_pylist() == [10, 11, 12]
    assert found.column("_index").to_pylist() == [6, 6, 10]
    assert found.column("_lane").to_pylist() == [7, 7, 7]
    assert found.column("_partition").to_pylist() == [4, 4, 0]
    assert found.column("_count").to_pylist() == [2, 2, 1]
    assert found.column("_crc").to_pylist() == [LOG[1].crc, LOG[1].crc, LOG[4].crc]
    assert found.column("_append_time").cast(pa.int64()).to_pylist()[2] == 1_700_000_000_000_010
    assert found.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert found.column("key").to_pylist() == [b"k", None, None]
    assert found.column("headers").to_pylist() == [[("trace", b"1")], None, [("trace", b"1")]]


def test_with_control_every_entry_is_there() -> None:
    """Session entries and skips are rows with the next seq; holes in the log are holes in `_index`."""
    found = rows(0, LOG, RAW, control=True)
    assert found.schema == table_schema(RAW, control=True)
    assert found.column("_index").to_pylist() == [5, 6, 6, 9, 10]
    assert found.column("_seq").to_pylist() == [10, 10, 11, 12, 12]
    assert found.column("_kind").to_pylist() == [2, 1, 1, 5, 1]
    assert found.column("_skipped").to_pylist() == [2, None, None, 5, None]
    assert found.column("_session_seq").to_pylist()[3] == 8
    assert found.column("value").to_pylist() == [None, b"a", b"b", None, b"c"]
    assert found.column("_damage").null_count == found.column("_payload").null_count == 5


def test_only_requested_columns() -> None:
    """Columns in the requested order; none at all for a count; unknown ones are named."""
    assert rows(0, LOG, RAW, ["value", "_seq"]).schema.names == ["value", "_seq"]
    assert rows(0, LOG, RAW, []).num_rows == 3
    assert rows(0, [], RAW, control=True).schema == table_schema(RAW, control=True)
    with pytest.raises(BadValue, match="there is no column price"):
        rows(0, LOG, RAW, ["price"])


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.integers(1, 5), max_size=6))
@settings(max_examples=50, deadline=None)
def test_cuts_by_seq(start: int, stop: int, counts: list[int]) -> None:
    """Exactly the rows with start <= seq < stop, also inside a batch."""
    batches, seq = [], 3
    for index, count in enumerate(counts):
        batches.append(batch_of(raw([b"%d" % n for n in range(count)]), index, seq))
        seq += count
    found = rows(0, batches, RAW, ["_seq"], start, stop)
    assert found.column(0).to_pylist() == [n for n in range(3, seq) if start <= n < stop]


def test_older_versions_have_nulls() -> None:
    """A batch published before a column was added has nulls there; one of a version unknown to us is refused."""
    price, note = pa.field("price", pa.uint64()), pa.field("note", pa.large_string())
    both = TopicSchemas(pa.schema([price, note]), (1, 2))
    old = batch_of(pa.record_batch({"price": pa.array([2**64 - 1], pa.uint64())}), 0, 0, both, schema=1)
    new = batch_of(
        pa.record_batch([pa.array([1], pa.uint64()), pa.array(["x"], note.type)], schema=both.newest), 1, 1, both
    )
    found = rows(0, [old, new], both, ["price", "note", "_schema_version"])
    assert found.schema.types == [pa.decimal128(20, 0), pa.string(), pa.int32()]
    assert [str(value) for value in found.column("price").to_pylist()] == ["18446744073709551615", "1"]
    assert found.column("note").to_pylist() == [None, "x"]
    with pytest.raises(UnknownSchema, match="version 2"):
        rows(0, [new], TopicSchemas(pa.schema([price]), (1,)), control=True)


def test_a_payload_that_is_no_batch_is_kept_unchanged() -> None:
    """A hostile publisher can neither stop the tier nor make it lose bytes: the row has the reason and the payload."""
    bad = batch_of(raw([b"a", b"b", b"c"]), 1, 2, payload=b"\0" * 64)
    good = batch_of(raw([b"x", b"y"]), 2, 5)
    found = rows(0, [batch_of(raw([b"w"]), 0, 1), bad, good], RAW, control=True)
    assert found.column("value").to_pylist() == [b"w", None, None, None, b"x", b"y"]
    assert found.column("_payload").to_pylist() == [None, b"\0" * 64, None, None, None, None]
    assert [bool(text) for text in found.column("_damage").to_pylist()] == [False, True, True, True, False, False]
    with pytest.raises(Corrupt):
        rows(0, [bad], RAW)


def test_nanoseconds_are_kept_in_the_payload() -> None:
    """Columns have microseconds; a batch with a finer time keeps its payload, and others do not."""
    schemas = typed(pa.field("at", pa.timestamp("ns")))
    exact = batch_of(pa.record_batch({"at": pa.array([1_000, None], pa.timestamp("ns"))}), 0, 0, schemas)
    finer = batch_of(pa.record_batch({"at": pa.array([1_001, 2_000], pa.timestamp("ns"))}), 1, 2, schemas)
    found = rows(0, [exact, finer], schemas, control=True)
    assert found.column("at").cast(pa.int64()).to_pylist() == [1, None, 1, 2]
    assert [value is not None for value in found.column("_payload").to_pylist()] == [False, False, True, False]
    assert found.column("_damage").null_count == 4
    assert rows(0, [finer], schemas, ["at"]).num_rows == 2
    beyond = batch_of(
        pa.record_batch({"at": pa.array([2**60], pa.timestamp("s"))}), 0, 0, typed(pa.field("at", pa.timestamp("s")))
    )
    with pytest.raises(BadValue, match="no table can hold"):
        rows(0, [beyond], typed(pa.field("at", pa.timestamp("s"))))


@pytest.mark.parametrize(
    "array",
    [
        pa.array([0, None, 255], pa.uint8()),
        pa.array([-(2**15), None], pa.int16()),
        pa.array([2**32 - 1], pa.uint32()),
        pa.array([2**64 - 1, None], pa.uint64()),
        pa.array([1.5, None], pa.float16()),
        pa.array([None], pa.null()),
        pa.array([100, None], pa.decimal128(5, -2)),
        pa.array([1], pa.decimal256(30, 2)),
        pa.array([1], pa.decimal32(5, 2)),
        pa.array([86_400_000], pa.date64()),
        pa.array([5, None], pa.time32("ms")),
        pa.array([5], pa.timestamp("s", "Asia/Tokyo")),
        pa.array([7, None], pa.duration("ns")),
        pa.array([b"ab", None], pa.binary(2)),
        pa.array(["x"], pa.large_string()),
        pa.array([[1, 2**64 - 1], None], pa.list_(pa.uint64(), 2)),
        pa.array([[1.0], None], pa.large_list(pa.float16())),
        pa.array([[("a", 1)], None], pa.map_(pa.large_string(), pa.uint8())),
        pa.array([{"a": 1, "b": [b"xy"]}, None], pa.struct([("a", pa.uint8()), ("b", pa.list_(pa.binary(2)))])),
        pa.array([5_000, None], pa.timestamp("ns")),
        pa.array([5_000, None], pa.time64("ns")),
    ],
    ids=lambda array: str(array.type),
)
def test_types_go_there_and_back(array: pa.Array) -> None:
    """Every type of a topic has a table type without loss."""
    stored, exact = to_table(array, table_type(array.type))
    stored.validate(full=True)
    assert exact
    assert from_table(stored, array.type).equals(array)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.month_day_nano_interval(), "Spark and Iceberg do not have"),
        (pa.decimal256(60, 2), "38 digits"),
        (pa.struct([]), "no table can hold"),
        (pa.struct([("a", pa.int8()), ("A", pa.int8())]), "no table can hold"),
        (pa.list_(pa.null()), "nests the type null"),
    ],
    ids=str,
)
def test_types_that_no_table_has(kind: pa.DataType, says: str) -> None:
    """The refusal names the column, the type and the remedy."""
    with pytest.raises(BadSchema, match=says) as caught:
        table_schema(typed(pa.field("cost", kind)), control=True)
    assert "'cost'" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["_lane", "_INDEX", "_payload"])
def test_names_of_system_columns_are_reserved(name: str) -> None:
    """A topic's column can't hide a system column, whatever its case: Spark ignores case."""
    with pytest.raises(BadSchema, match="system column"):
        table_schema(typed(pa.field(name, pa.int8())), control=False)


def test_the_hash_of_entries_does_not_depend_on_cuts() -> None:
    """Rows cut anywhere, also inside a batch, hash the same; another CRC, or one entry less, does not."""
    whole = rows(0, LOG, RAW, control=True)
    expected = EntriesHash()
    expected.add(whole)
    for cut in range(whole.num_rows + 1):
        parts = EntriesHash()
        parts.add(whole.slice(0, cut))
        parts.add(whole.slice(cut))
        assert (parts.hex, parts.entries) == (expected.hex, 4)
    less = EntriesHash()
    less.add(rows(0, LOG[:-1], RAW, control=True))
    other = EntriesHash()
    other.add(rows(0, [*LOG[:-1], batch_of(raw([b"d"]), 10, 12)], RAW, control=True))
    assert len({expected.hex, less.hex, other.hex}) == 3


def test_system_columns_are_types_that_iceberg_has() -> None:
    """No unsigned and no small integers; table types stay unchanged."""
    for field in [*SYSTEM, *KEPT]:
        assert table_type(field.type) == field.type
    assert np.iinfo(np.int32).max >= 65_535


def test_gaps_have_no_rows() -> None:
    """A trimmed or lost span, and the end of a lane, are no entries."""
    gaps = [hole(0, 5, kind) for kind in (GapKind.TRIMMED, GapKind.LOST, GapKind.END_OF_LANE)]
    assert rows(0, gaps, RAW, control=True).num_rows == rows(0, gaps, RAW).num_rows == 0
