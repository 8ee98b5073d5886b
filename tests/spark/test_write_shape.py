"""Options of the sink, and how a frame's columns become a topic's: checked before any task runs."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue
from embarcadero.spark import sink
from embarcadero.spark.shape import FrameShape, WriteOptions, new_columns, shape_of, write_options
from embarcadero.spark.sink import TaskWriter, WriteWork, cut, in_order
from embarcadero.wire.partitioners import CRC32C, partition_of, partitions_of
from embarcadero.wire.schemas import RAW, RAW_SCHEMA, TopicSchemas

US = pa.timestamp("us", "UTC")
FRAME = pa.schema([("value", pa.binary()), ("timestamp", US)])
GIVEN = {"brokers": "127.0.0.1:9092", "topic": "t"}
WIDE = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string()), ("small", pa.uint8())])


def topic(schema: pa.Schema | None = None, widths: tuple[int, ...] = (), **changes: Any) -> TopicInfo:
    versions = RAW if schema is None else TopicSchemas(schema, widths or (len(schema),))
    return TopicInfo(**{"name": "t", "lane": 0} | changes, versions=versions)


def shaped(info: TopicInfo, frame: pa.Schema, now_us: int = 0, **changes: Any) -> FrameShape:
    return shape_of(info, frame, WriteOptions(brokers="b:1", topic="t", **changes), now_us)


# --- options ---
def test_options_are_found_in_any_case() -> None:
    """As everywhere in Spark."""
    options = write_options(
        {"BROKERS": "127.0.0.1:9092", "topic": "t", "writeid": "w", "BatchID": "7", "orderby": "a, b",
         "batchbytes": "4096", "compression": "zstd"}, streaming=False,
    )  # fmt: skip
    assert (options.write_id, options.batch_id, options.order_by) == ("w", 7, ("a", "b"))
    assert (options.batch_bytes, options.compression) == (4096, "zstd")


@pytest.mark.parametrize(
    ("wrong", "streaming", "words"),
    [
        ({"topik": "x"}, False, "did you mean 'topic'"),
        ({"writeId": "w"}, True, "can't be used with a stream"),
        ({"batchId": "3"}, False, "without 'writeId'"),
        ({"writeId": "w", "batchId": "-1"}, False, "it is not a number from 0"),
        ({"writeId": ""}, False, "it does not have 1 to 128 bytes"),
        ({"orderBy": "a,,b"}, False, "it has an empty"),
        ({"batchBytes": "0"}, False, "the size of batches in bytes"),
        ({"addColumns": "yes"}, False, "adds missing columns to a topic with a schema"),
        ({"topic": ""}, False, "option 'topic' is missing"),
        ({"compression": "gzip"}, False, "lz4, zstd or none"),
        ({"brokers": "nowhere"}, False, "host:port"),
    ],
)
def test_a_wrong_option_is_named_with_the_allowed_values(wrong: dict[str, str], streaming: bool, words: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(BadValue) as caught:
        write_options(GIVEN | wrong, streaming=streaming)
    assert words in str(caught.value)


# --- columns ---
@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pa.schema([("timestamp", US)]), "column 'value' is missing"),
        (FRAME.append(pa.field("colour", pa.string())), "column 'colour' is unknown"),
        (pa.schema([("value", pa.int64()), ("timestamp", US)]), "column 'value' is int64, not binary or string"),
        (pa.schema([("value", pa.binary()), ("timestamp", pa.string())]), "column 'timestamp' is string, not time"),
        (FRAME.append(pa.field("headers", pa.map_(pa.string(), pa.int32()))), "column 'headers' is map<string, int32>"),
        (FRAME.append(pa.field("partition", pa.string())), "column 'partition' is string, not a number"),
    ],
)
def test_a_frame_that_does_not_fit_a_raw_topic(frame: pa.Schema, words: str) -> None:
    """The error names the column and the problem."""
    with pytest.raises(BadSchema) as caught:
        shaped(topic(), frame)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pa.schema([("id", pa.string())]), "column 'id' is string in the frame and int64 in the topic"),
        (pa.schema([("name", pa.string())]), "column 'id' is missing, and may not be null"),
        (pa.schema([("id", pa.int64()), ("nam", pa.string())]), "column 'nam' is unknown"),
        (pa.schema([("id", pa.int64()), ("small", pa.int64())]), "column 'small' is int64 in the frame and uint8"),
    ],
)
def test_a_frame_that_does_not_fit_a_schema(frame: pa.Schema, words: str) -> None:
    """The error names both types, and the topic's columns."""
    with pytest.raises(BadSchema) as caught:
        shaped(topic(WIDE), frame)
    assert words in str(caught.value)
    assert "it has: id int64" in str(caught.value)


def test_several_problems_are_reported_together() -> None:
    """Columns, order and key."""
    with pytest.raises(BadSchema) as caught:
        shaped(topic(WIDE), pa.schema([("name", pa.int32())]), order_by=("x",), key_column="y")
    option = "': there is no column '"
    for words in ("'id' is missing", "'name' is int32", f"'orderBy{option}x'", f"'keyColumn{option}y'"):
        assert words in str(caught.value)


def test_topics_without_duplicate_detection_are_refused() -> None:
    """Orders 0 and 1 have no named sessions."""
    with pytest.raises(BadValue, match="order 2 or 5"):
        shaped(topic(order=1), FRAME)


def test_topics_that_forget_writes_too_soon_are_refused() -> None:
    """The cluster would forget that a write was decided before it has completed it."""
    shaped(topic(session_ttl_s=600), FRAME)
    with pytest.raises(BadValue, match=r"session_ttl_s of 599.*at least 600: embarcadero topic alter t"):
        shaped(topic(session_ttl_s=599), FRAME)


def test_the_clusters_own_topics_are_refused() -> None:
    """Whatever their order."""
    with pytest.raises(BadValue, match="'__routed' is a hidden topic of the cluster"):
        shaped(topic(name="__routed"), FRAME)


def test_the_option_wins_over_a_column_topic() -> None:
    """A raw topic has the column, and ignores its content."""
    shape = shaped(topic(), FRAME.append(pa.field("topic", pa.string())))
    assert "topic" in shape.names


def test_new_columns_are_added_at_the_end_and_may_be_null() -> None:
    """Columns of the topic, and the column that chooses a partition, do not count."""
    frame = pa.schema([("small", pa.int16()), pa.field("x", pa.int8(), nullable=False), ("_partition", pa.int32())])
    assert new_columns(topic(WIDE), frame) == [pa.field("x", pa.int8())]
    assert new_columns(topic(), frame) == []


def test_spark_types_become_the_topics_own() -> None:
    """Narrower types and those of a read; a value that does not fit is named."""
    shape = shaped(topic(WIDE), pa.schema([("small", pa.int32()), ("id", pa.int16())]))
    made = shape.rows([pa.RecordBatch.from_pydict({"small": [1, 255], "id": [5, 6]})])
    assert made.schema == WIDE
    assert made.to_pydict() == {"id": [5, 6], "name": [None, None], "small": [1, 255]}
    with pytest.raises(BadSchema, match="'small' is uint8 in topic 't'; a value does not fit"):
        shape.rows([pa.RecordBatch.from_pydict({"small": [256], "id": [5]})])
    with pytest.raises(BadSchema, match="'id' has nulls"):
        shape.rows([pa.RecordBatch.from_pydict({"small": [1], "id": pa.array([None], pa.int16())})])


@pytest.mark.parametrize(
    ("kind", "have", "good", "bad"),
    [
        (pa.time32("s"), pa.int64(), 5_000_000, 5_000_001),
        (pa.duration("ms"), pa.int64(), 7, None),
        (pa.uint64(), pa.decimal128(20, 0), (1 << 64) - 1, -1),
        (pa.float16(), pa.float32(), 1.5, 1.1),
        (pa.timestamp("s"), pa.timestamp("us"), 3_000_000, 3_000_001),
        (pa.list_(pa.uint8()), pa.list_(pa.int32()), [1, 2], [256]),
        (pa.large_string(), pa.string(), "a", None),
        (pa.binary(2), pa.binary(), b"ab", b"abc"),
    ],
)
def test_types_that_spark_lacks_come_back_from_a_read(
    kind: pa.DataType, have: pa.DataType, good: Any, bad: Any
) -> None:
    """Without loss, or with an error."""
    shape = shaped(topic(pa.schema([("c", kind)])), pa.schema([("c", have)]))
    made = shape.rows([pa.RecordBatch.from_arrays([pa.array([good, None], have)], names=["c"])])
    assert made.schema.types == [kind]
    assert made.column(0).is_valid().to_pylist() == [True, False]
    if bad is not None:
        with pytest.raises(BadSchema, match="a value does not fit"):
            shape.rows([pa.RecordBatch.from_arrays([pa.array([bad], have)], names=["c"])])


def test_raw_records_without_a_time_get_the_time_of_the_write() -> None:
    """Text becomes bytes."""
    shape = shaped(topic(), pa.schema([("value", pa.string())]), now_us=5_000_000)
    made = shape.rows([pa.RecordBatch.from_pydict({"value": ["a"]})])
    assert made.schema == RAW_SCHEMA
    assert made.column("value").to_pylist() == [b"a"]
    assert made.column("timestamp").cast(pa.int64()).to_pylist() == [5_000_000]


# --- partitions ---
def test_keys_choose_the_same_partition_as_every_client() -> None:
    """All lengths together, and slices of larger arrays."""
    rng = random.Random(1)
    keys = [os.urandom(rng.randrange(0, 40)) for _ in range(500)]
    array = pa.array(keys)
    assert partitions_of(array, 7, CRC32C).tolist() == [partition_of(key, 7, CRC32C) for key in keys]
    assert partitions_of(array[100:200], 7, CRC32C).tolist() == [partition_of(key, 7, CRC32C) for key in keys[100:200]]
    assert partitions_of(array[:0], 7, CRC32C).tolist() == []


def test_rows_without_a_key_stay_together() -> None:
    """All of a task go to one partition, others by their key."""
    frame = FRAME.append(pa.field("key", pa.string()))
    shape = shaped(topic(partitions=5), frame)
    batch = pa.RecordBatch.from_pydict({"value": [b"a", b"b"], "timestamp": pa.array([0, 0], US), "key": ["k", None]})
    assert shape.partitions([batch], shape.rows([batch]), 7).tolist() == [partition_of(b"k", 5, CRC32C), 2]


@pytest.mark.parametrize(("asked", "words"), [([0, 5], "0 to 4"), ([-1, 0], "0 to 4"), ([None, 0], "no partition")])
def test_a_partition_that_the_topic_lacks(asked: list[int | None], words: str) -> None:
    """Named with the existing ones."""
    shape = shaped(topic(partitions=5), FRAME.append(pa.field("partition", pa.int32())))
    batch = pa.RecordBatch.from_pydict(
        {"value": [b"a", b"b"], "timestamp": pa.array([0, 0], US), "partition": pa.array(asked, pa.int32())}
    )
    with pytest.raises(BadValue, match=words):
        shape.partitions([batch], shape.rows([batch]), 0)


def test_the_partition_column_of_a_topic_with_a_schema() -> None:
    """It is not a column of the topic, and chooses."""
    shape = shaped(topic(WIDE, partitions=5), pa.schema([("id", pa.int64()), ("_partition", pa.int64())]))
    batch = pa.RecordBatch.from_pydict({"id": [1, 2], "_partition": [4, 0]})
    assert shape.partitions([batch], shape.rows([batch]), 0).tolist() == [4, 0]
    assert shape.rows([batch]).schema == WIDE


# --- a worker ---
def test_a_worker_does_not_scan_its_modules_for_garbage_after_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark collects garbage between two tasks of a worker, and the second one waits for it."""

    def no_rows() -> Iterator[pa.RecordBatch]:
        raise BadValue("no rows", "")
        yield

    monkeypatch.setattr(sink, "shared_log", lambda _: None)
    writer = TaskWriter(write_options(GIVEN, streaming=True), shaped(topic(), FRAME))
    sink.settle_down.cache_clear()
    gc.unfreeze()
    try:
        with pytest.raises(BadValue, match="no rows"):
            writer.write(WriteWork("q", 0, "run"), 0, no_rows())
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


# --- order ---
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [-1.5, 0.0, 2.0]),
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
    made, _ = in_order(batch, ("wanted",), np.zeros(batch.num_rows, dtype=np.int32))
    assert made.column("wanted").to_pylist() == [None, *values]


def test_rows_are_grouped_by_partition_and_keep_their_order() -> None:
    """Without orderBy the rows of a partition keep their order."""
    batch = pa.RecordBatch.from_pydict({"v": [3, 1, 2, 0]})
    made, partitions = in_order(batch, (), np.array([1, 0, 1, 0], dtype=np.int32))
    assert made.column("v").to_pylist() == [1, 0, 3, 2]
    assert partitions.tolist() == [0, 0, 1, 1]
    alone, _ = in_order(batch, (), np.ones(4, dtype=np.int32))
    assert alone is batch


# --- cutting ---
def test_pieces_are_never_larger_than_allowed() -> None:
    """Even if few rows have most of the bytes; all rows are there, in order."""
    rows = pa.RecordBatch.from_pydict({"v": [b"x" * (5_000 if n == 70 else 10) for n in range(100)]})
    pieces = list(cut(rows, 1_000, 6_000, 40))
    assert all(piece.nbytes <= 6_000 and piece.num_rows <= 40 for piece in pieces)
    assert pa.concat_batches(pieces) == rows
    with pytest.raises(BadValue, match="a row has"):
        list(cut(rows, 1_000, 4_000, 40))


def test_numbers_of_a_partition_are_plain() -> None:
    """The number sorted with the rows stays a small integer."""
    shape = shaped(topic(partitions=3), FRAME)
    batch = pa.RecordBatch.from_pydict({"value": [b"a"], "timestamp": pa.array([0], US)})
    assert shape.partitions([batch], shape.rows([batch]), 4).dtype == np.int32
