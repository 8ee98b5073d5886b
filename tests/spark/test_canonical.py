"""Rows come out in an order and in bytes that depend on the rows alone."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.spark.canonical import in_order

TYPES: list[tuple[pa.DataType, Any]] = [
    (pa.int64(), st.integers(-3, 3)),
    (pa.uint64(), st.sampled_from([0, 1, (1 << 64) - 1])),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("-inf")])),
    (pa.float16(), st.sampled_from([0.0, -0.0, 1.5]).map(np.float16)),
    (pa.string(), st.sampled_from(["", "a", "aaaaaaaab", "aaaaaaaac", "aaaaaaaa"])),
    (pa.large_binary(), st.binary(max_size=10)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal128(20, 2), st.integers(-(10**15), 10**15).map(lambda n: Decimal(n).scaleb(-2))),
    (pa.timestamp("us", "UTC"), st.integers(0, 3)),
    (pa.date32(), st.integers(0, 3)),
    (pa.list_(pa.string()), st.lists(st.sampled_from(["", "a", "b", None]), max_size=3)),
    (pa.list_(pa.int32(), 2), st.lists(st.integers(0, 2), min_size=2, max_size=2)),
    (pa.struct([("a", pa.int32()), ("b", pa.list_(pa.binary()))]),
     st.fixed_dictionaries({"a": st.sampled_from([None, 1, 2]), "b": st.sampled_from([None, [], [b"x", None]])})),
    (pa.map_(pa.string(), pa.binary()),
     st.lists(st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([None, b"", b"1"])), max_size=2)),
    (pa.null(), st.none()),
]  # fmt: skip
SCHEMA = pa.schema([(f"c{number}", kind) for number, (kind, _) in enumerate(TYPES)])
ROW = st.tuples(*(st.one_of(st.none(), values) for _, values in TYPES))


def as_batch(rows: list[Any], chunks: int) -> pa.RecordBatch:
    """Rows as Arrow, put together from pieces of larger arrays, with garbage under nulls of plain columns."""
    arrays = [pa.array([row[at] for row in rows], kind) for at, (kind, _) in enumerate(TYPES)]
    numbers = arrays[0]
    dirty = np.where(np.asarray(numbers.is_valid()), np.asarray(numbers.fill_null(0)), 0x5EAD + chunks)
    mask = np.packbits(np.asarray(numbers.is_valid()), bitorder="little")
    arrays[0] = pa.Array.from_buffers(pa.int64(), len(rows), [pa.py_buffer(mask), pa.py_buffer(dirty.astype(np.int64))])
    table = pa.Table.from_arrays(arrays, schema=SCHEMA)
    cuts = sorted(random.Random(chunks).randint(0, len(rows)) for _ in range(chunks))
    parts = [table.slice(start, stop - start) for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    return pa.concat_tables(parts).combine_chunks().to_batches()[0] if rows else table.to_batches()[0]


@given(rows=st.lists(ROW, min_size=1, max_size=24), seed=st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=60)
def test_shuffled_rows_give_the_same_bytes(rows: list[Any], seed: int) -> None:
    """Whatever the types, ties and nulls: another order, other chunks and other garbage change nothing."""
    shuffled = random.Random(seed).sample(rows, len(rows))
    once, _ = in_order(as_batch(rows, 0))
    again, _ = in_order(as_batch(shuffled, seed % 5))

    assert once.serialize() == again.serialize()
    half = len(rows) // 2
    assert once.slice(half).serialize() == again.slice(half).serialize()
    assert once.slice(0, half).serialize() == again.slice(0, half).serialize()


@given(rows=st.lists(ROW, min_size=1, max_size=24))
@settings(deadline=None, max_examples=30)
def test_no_row_is_changed_or_lost(rows: list[Any]) -> None:
    """What comes out are the rows that went in."""
    batch = as_batch(rows, 0)
    made, _ = in_order(batch)
    made.validate(full=True)

    assert sorted(map(repr, made.to_pylist())) == sorted(map(repr, batch.to_pylist()))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [-1.5, -0.0, 0.0, 2.0]),
        (pa.int8(), [-3, 0, 5]),
        (pa.uint64(), [0, 5, (1 << 64) - 1]),
        (pa.string(), ["", "a", "aaaaaaaaaaaab", "aaaaaaaaaaab", "b"]),
        (pa.decimal128(30, 1), [Decimal("-5.5"), Decimal("0.0"), Decimal(10**25)]),
    ],
)
def test_order_by_is_the_order_that_people_expect(kind: pa.DataType, values: list[Any]) -> None:
    """Numbers as numbers, texts as texts, nulls first."""
    shuffled = random.Random(1).sample([None, *values], len(values) + 1)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(range(len(shuffled))), pa.array(shuffled, kind)], names=["other", "wanted"]
    )
    made, _ = in_order(batch, ["wanted"])

    assert made.column("wanted").to_pylist() == [None, *values]


def test_rows_are_grouped_first() -> None:
    """By the number that each row has, which is sorted with them."""
    batch = pa.RecordBatch.from_pydict({"v": [3, 1, 2, 0]})
    made, first = in_order(batch, first=np.array([1, 0, 1, 0]))

    assert made.column("v").to_pylist() == [0, 1, 2, 3]
    assert first.tolist() == [0, 0, 1, 1]
