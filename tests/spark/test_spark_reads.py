"""Batch reads with real Spark: the user's code, and its results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException

import embarcadero as emb

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def load(spark: SparkSession, log: emb.Log, topic: str, **options: Any) -> DataFrame:
    """A topic as a frame."""
    return spark.read.format("embarcadero").options(brokers=log.address, **options).load(topic)


@pytest.fixture(scope="module")
def orders(log: emb.Log) -> str:
    """A topic of 1,000 raw records in batches of 10, over 4 partitions."""
    log.create_topic("orders", replicas=1, partitions=4)
    with log.publisher("orders", ack=2) as publisher:
        for first in range(0, 1_000, 10):
            values = [b"value-%d" % number for number in range(first, first + 10)]
            table = pa.record_batch({"value": pa.array(values, pa.binary())})
            publisher.publish(table, partition=first // 10 % 4)
            publisher.flush()
    return "orders"


def test_a_raw_topic_is_a_table_with_all_metadata_of_the_log(spark: SparkSession, log: emb.Log, orders: str) -> None:
    """Each record once, with its position, its publisher and its columns."""
    named = "topic,partition,lane,seq,index,key,value,headers,timestamp,session,session_seq,broker"
    frame = load(spark, log, orders, minPartitions=3, columns=named).orderBy("seq")
    usual = ["topic", "partition", "seq", "key", "value", "headers", "timestamp"]
    rows = frame.collect()
    known = {batch.seq: batch for batches in log.scan(orders) for batch in batches}

    assert load(spark, log, orders).columns == usual
    assert frame.columns == named.split(",")
    assert [row.seq for row in rows] == list(range(1_000))
    assert [bytes(row.value) for row in rows[:3]] == [b"value-0", b"value-1", b"value-2"]
    assert {row.topic for row in rows} == {orders}
    for row in rows[::10]:
        batch = known[row.seq]
        assert (row["index"], row.partition, row.session, row.session_seq, row.broker, row.lane) == (
            batch.index, batch.partition, batch.session, batch.session_seq, batch.broker, batch.lane,
        )  # fmt: skip
    assert frame.rdd.getNumPartitions() >= 1
    assert load(spark, log, orders, minPartitions=3).rdd.getNumPartitions() >= 3


@pytest.fixture
def pushdown(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[bool]:
    """Whether the session pushes filters down to Python sources."""
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, str(request.param).lower())
    yield request.param
    spark.conf.set(PUSHDOWN, before)


@pytest.mark.parametrize("pushdown", [True, False], indirect=True)
def test_filters_give_the_same_rows_pushed_down_or_not(
    spark: SparkSession, log: emb.Log, orders: str, pushdown: bool
) -> None:
    """With the flag off a reader must not even define the method.

    With it on, Spark applies only the remaining filters.
    """
    wanted = [seq for seq in range(105, 222) if seq // 10 % 4 in (1, 2)]
    text = "seq >= 105 and seq < 222 and partition in (1, 2) and timestamp > '2020-01-01' and value is not null"
    some = load(spark, log, orders, pushFilters="true").filter(text)

    assert sorted(row.seq for row in some.collect()) == wanted
    plan = some._jdf.queryExecution().optimizedPlan().toString().splitlines()
    left = " ".join(line for line in plan if "Filter" in line)  # filters that Spark applies itself
    assert "isnotnull(value" in left
    assert all((name in left) != pushdown for name in ("seq#", "timestamp#", "partition#"))


@pytest.mark.parametrize("pushdown", [True, False], indirect=True)
def test_a_frame_can_be_reused(spark: SparkSession, log: emb.Log, orders: str, pushdown: bool) -> None:
    """Spark keeps a plan with pushed filters for the whole frame; by default there is none."""
    frame = load(spark, log, orders, columns="seq,timestamp")

    assert frame.filter("seq >= 990").count() == 10
    assert frame.count() == 1_000
    assert frame.filter("seq = 17 or seq = 18").count() == 2
    assert frame.filter("seq < 10").union(frame.filter("seq > 995")).count() == 14


def test_a_typed_topic_has_its_own_columns_and_gets_new_ones(spark: SparkSession, log: emb.Log) -> None:
    """Older records have null in a column added later; a frame loaded before keeps its columns."""
    first = pa.schema(
        [
            ("symbol", pa.string()), ("price", pa.float64()), ("size", pa.uint16()),
            ("at", pa.timestamp("ms", tz="UTC")), ("tags", pa.list_(pa.string())),
            ("more", pa.struct([("a", pa.int8())])), ("clock", pa.time32("s")),
            ("big", pa.uint64()), ("day", pa.date32()), ("lots", pa.map_(pa.string(), pa.int32())),
        ]
    )  # fmt: skip
    log.create_topic("ticks", replicas=1, schema=first)
    row = {
        "symbol": "EMB", "price": 12.5, "size": 65_535, "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "tags": ["x", None], "more": {"a": 7}, "clock": 3_661,
        "big": 2**64 - 1, "day": datetime(2026, 1, 2).date(), "lots": [("k", 1)],
    }  # fmt: skip
    with log.publisher("ticks", ack=2) as publisher:
        publisher.publish(pa.Table.from_pylist([row], first)).result()
    old = load(spark, log, "ticks")
    log.alter_topic("ticks", schema=first.append(pa.field("venue", pa.string())))
    with log.publisher("ticks", ack=2) as publisher:
        publisher.publish(pa.Table.from_pylist([row | {"venue": "XETR"}], log.describe("ticks").schema)).result()

    rows = load(spark, log, "ticks").orderBy("_seq").collect()
    assert [each.venue for each in rows] == [None, "XETR"]
    assert [(each._seq, each._topic) for each in rows] == [(0, "ticks"), (1, "ticks")]
    assert (rows[0].symbol, rows[0].size, int(rows[0].big), rows[0].tags) == ("EMB", 65_535, 2**64 - 1, ["x", None])
    assert rows[0].lots == {"k": 1}
    assert rows[0].more.a == 7
    assert rows[0].clock == 3_661_000_000
    assert "venue" not in old.columns
    assert old.count() == 2
    times = load(spark, log, "ticks").filter("_timestamp > '2020-01-01' and _seq > 0").collect()
    assert [each._seq for each in times] == [1]


@pytest.mark.parametrize("order", [0, 1])
def test_topics_without_a_total_order_are_read_lane_by_lane(spark: SparkSession, log: emb.Log, order: int) -> None:
    """Each record once; its lane determines its order."""
    topic = f"unordered-{order}"
    log.create_topic(topic, order=order, replicas=1)
    for turn in range(4):
        with log.publisher(topic, ack=2, batch_bytes=200) as publisher:
            for number in range(25):
                publisher.send(b"%d" % (turn * 25 + number))
    lanes = [tail.lane for tail in log.tail(topic).lanes]
    rows = load(spark, log, topic, minPartitions=5, columns="lane,seq,value").collect()

    assert sorted(int(row.value) for row in rows) == list(range(100))
    assert {row.lane for row in rows} == set(lanes)
    ending = f'{{"{lanes[0]}": {{"seq": 3}}}}'
    one = load(spark, log, topic, endingOffsets=ending, columns="lane,seq").filter(f"lane = {lanes[0]}")
    assert sorted(row.seq for row in one.collect()) == [0, 1, 2]
    with pytest.raises(PySparkException, match="a seq is a position in one of its lanes"):
        load(spark, log, topic, startingOffsets="3").count()


def test_a_topic_can_be_a_view_in_sql(spark: SparkSession, log: emb.Log, orders: str) -> None:
    """Any session knows the format by itself."""
    spark.sql(
        f"create or replace temporary view orders_view using embarcadero "
        f"options (brokers '{log.address}', topic '{orders}', columns 'seq,value')"
    )

    assert spark.sql("select count(*), min(seq), max(seq) from orders_view").first() == (1_000, 0, 999)
    assert spark.table("orders_view").columns == ["seq", "value"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"minPartition": "5"}, "option 'minpartition' does not exist .*did you mean 'minPartitions'"),
        ({"startingOffsets": "soon"}, "option 'startingOffsets' is 'soon': it is not a position"),
        ({"columns": "seq,colour"}, "there is no column 'colour' .*columns are topic, partition"),
        ({"topic": "nowhere"}, "no topic 'nowhere'|topic 'nowhere'"),
        ({"brokers": "127.0.0.1:1"}, "127.0.0.1:1"),
        ({"brokers": "127.0.0.1"}, "'127.0.0.1' is no broker address"),
    ],
)
def test_errors_are_raised_when_the_frame_is_loaded(
    spark: SparkSession, log: emb.Log, orders: str, options: dict[str, str], says: str
) -> None:
    """Our message is in Spark's error, with the allowed values."""
    with pytest.raises(AnalysisException, match=f"(?s)embarcadero.errors.*({says})"):
        spark.read.format("embarcadero").options(**({"brokers": log.address, "topic": orders} | options)).load()


def test_a_batch_read_refuses_options_of_streams(spark: SparkSession, log: emb.Log, orders: str) -> None:
    """The frame could still become a stream; the read can't."""
    with pytest.raises(AnalysisException, match="'maxRecordsPerTrigger' can't be used with a batch read"):
        load(spark, log, orders, maxRecordsPerTrigger="5").count()
    with pytest.raises(AnalysisException, match="seq 5000 is beyond the end of lane"):
        load(spark, log, orders, startingOffsets="5000").count()


def test_a_topic_recreated_with_another_schema_is_noticed(spark: SparkSession, log: emb.Log) -> None:
    """A frame is a promise about columns; the error names the column and both types."""
    log.create_topic("drift", schema=pa.schema([("a", pa.int64())]))
    frame = load(spark, log, "drift")
    log.delete_topic("drift")
    log.create_topic("drift", schema=pa.schema([("a", pa.string())]))

    with pytest.raises(AnalysisException, match="column 'a' is string in topic 'drift', not bigint"):
        frame.count()
    with pytest.raises(AnalysisException, match="topic 'drift' has no column 'b'"):
        spark.read.format("embarcadero").schema("b long").options(brokers=log.address).load("drift").count()
