"""The same jobs on every PySpark 4: tables, streams, the sink, filters, views, limits."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark
import pytest

import embarcadero as emb
from embarcadero.spark.versions import ADMISSION_CONTROL, FILTERS
from tests.matrix.frames import load, orders, run, sizes, stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_this_is_the_requested_pyspark(spark: SparkSession) -> None:
    """On both sides: the package and the JVM."""
    assert os.environ["MATRIX_PYSPARK"] == pyspark.__version__ == spark.version


def test_read_raw(spark: SparkSession, log: emb.Log) -> None:
    """Each record once, with its key, headers and time."""
    log.create_topic("raw", replicas=1)
    with log.publisher("raw", ack=2) as publisher:
        for number in range(300):
            publisher.send(b"%d" % number, key=b"k%d" % (number % 7), headers={"n": b"1"})
    rows = load(spark, log, "raw", minPartitions=3).orderBy("seq").collect()

    assert [(row.seq, int(row.value)) for row in rows] == [(number, number) for number in range(300)]
    assert (rows[8].key, rows[8].headers, rows[8].topic) == (b"k1", {"n": b"1"}, "raw")
    assert rows[0].timestamp.year >= 2026


def test_read_typed(spark: SparkSession, log: emb.Log) -> None:
    """Every kind of column, with and without values; times with a zone and without."""
    inner = pa.struct([("a", pa.int8()), ("at", pa.timestamp("us"))])
    schema = pa.schema(
        [
            ("n", pa.int64()), ("name", pa.string()), ("price", pa.decimal128(12, 2)), ("size", pa.uint16()),
            ("at", pa.timestamp("us", tz="UTC")), ("local", pa.timestamp("us")), ("day", pa.date32()),
            ("tags", pa.list_(pa.string())), ("lots", pa.map_(pa.string(), pa.int32())), ("more", inner),
        ]
    )  # fmt: skip
    local = datetime(2026, 1, 2, 3, 4, 5)
    row = {
        "n": 1, "name": "EMB", "price": Decimal("12.50"), "size": 65_535, "at": local.replace(tzinfo=UTC),
        "local": local, "day": date(2026, 1, 2), "tags": ["x", None], "lots": [("k", 1)],
        "more": {"a": 7, "at": local},
    }  # fmt: skip
    log.create_topic("typed", replicas=1, schema=schema)
    with log.publisher("typed", ack=2) as publisher:
        publisher.publish(pa.Table.from_pylist([row, {"n": 2}], schema)).result()
    frame = load(spark, log, "typed").orderBy("n")
    first, second = frame.collect()

    kinds = dict(frame.dtypes)
    assert (kinds["at"], kinds["local"], kinds["more"]) == (
        "timestamp", "timestamp_ntz", "struct<a:int,at:timestamp_ntz>"
    )  # fmt: skip
    assert (first.name, first.price, first.size, first.day) == ("EMB", Decimal("12.50"), 65_535, date(2026, 1, 2))
    assert (first.local, first.tags, first.lots, first.more.a) == (local, ["x", None], {"k": 1}, 7)
    assert frame.selectExpr("unix_micros(at) as us").first().us == int(local.replace(tzinfo=UTC).timestamp()) * 10**6
    assert [second[name] for name in schema.names] == [2, *[None] * 9]
    frame.select(*schema.names).write.format("embarcadero").options(brokers=log.address, topic="typed").mode(
        "append"
    ).save()
    assert load(spark, log, "typed").where("n = 1 and local is not null").count() == 2


def test_write(spark: SparkSession, log: emb.Log) -> None:
    """A batch write under a name stores its rows once, however often it is run."""
    orders(log, "source", 500)
    log.create_topic("written", replicas=1)
    rows = load(spark, log, "source").selectExpr(
        "city as key", "cast(id as string) as value", "_timestamp as timestamp"
    )
    for _ in range(2):
        given = {"brokers": log.address, "topic": "written", "writeId": "once"}
        rows.repartition(3, "key").write.format("embarcadero").options(**given).mode("append").save()

    assert sorted(int(row.value) for row in load(spark, log, "written").collect()) == list(range(500))


def test_stream_to_files(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Over a restart with new rows, and one without: each row once, in as many tasks as requested."""
    orders(log, "flow", 200)
    target = {"path": str(tmp_path / "rows")}
    counts = []
    for more in (0, 70, 0):
        if more:
            orders(log, "flow", more, first=200)
        frame = stream(spark, log, "flow", minPartitions=4).selectExpr("id", "spark_partition_id() as task")
        counts.append(sizes(run(frame, tmp_path / "checkpoint", "parquet", **target)))
    rows = spark.read.parquet(target["path"]).collect()

    assert counts == [[200], [70], []]
    assert sorted(row.id for row in rows) == list(range(270))
    assert {row.task for row in rows if row.id < 200} == {0, 1, 2, 3}


def test_topic_to_topic(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Each row exactly once, over restarts with new rows; the cluster knows the query's progress."""
    orders(log, "from", 300)
    log.create_topic("to", replicas=1, schema=pa.schema([("id", pa.int64()), ("city", pa.string())]))
    for more in (0, 50, 0):
        if more:
            orders(log, "from", more, first=300)
        frame = stream(spark, log, "from").where("city <> 'Oslo'").select("id", "city")
        run(frame, tmp_path / "checkpoint", "embarcadero", brokers=log.address, topic="to")

    assert sorted(row.id for row in load(spark, log, "to").collect()) == [n for n in range(350) if n % 3 != 1]


def test_a_query_that_keeps_running(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Rows come while it runs; when it is idle, the cluster knows its progress."""
    orders(log, "live", 10)
    frame = stream(spark, log, "live").select("id")
    writer = frame.writeStream.format("memory").queryName("live_rows").option("checkpointLocation", str(tmp_path))
    query = writer.start()
    try:
        query.processAllAvailable()
        orders(log, "live", 15, first=10)
        query.processAllAvailable()
        while [reader.lag for reader in log.readers("live")] != [0]:
            query.processAllAvailable()
    finally:
        query.stop()

    assert sorted(row.id for row in spark.table("live_rows").collect()) == list(range(25))


def test_filters(spark: SparkSession, log: emb.Log) -> None:
    """Spark filters; pushed down they give the same rows, or the option is refused."""
    orders(log, "filtered", 400)
    wanted = "_seq between 100 and 199 and city = 'Rome' and _timestamp > '2020-01-01'"
    assert load(spark, log, "filtered").where(wanted).count() == 33
    if FILTERS:
        assert load(spark, log, "filtered", pushFilters="true").where(wanted).count() == 33
    else:
        with pytest.raises(Exception, match=r"NotAvailable.*'pushFilters' needs PySpark 4\.1 or newer"):
            load(spark, log, "filtered", pushFilters="true")


def test_temporary_view(spark: SparkSession, log: emb.Log) -> None:
    """A topic in SQL, without Python."""
    orders(log, "seen", 90)
    spark.sql(
        f"create or replace temporary view seen using embarcadero options (brokers '{log.address}', topic 'seen')"
    )
    assert spark.sql("select count(*), sum(cents) from seen where city = 'Lima'").first() == (30, 136_500)


def test_several_topics(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """A pattern in one stream, over restarts: a topic is added, and another is deleted."""

    def publish(topic: str, count: int) -> None:
        if topic not in [known.name for known in log.topics()]:
            log.create_topic(topic, replicas=1)
        with log.publisher(topic, ack=2) as publisher:
            for number in range(count):
                publisher.send(b"%d" % number)

    def everything(**options: str) -> list[int]:
        given = {"brokers": log.address, "startingOffsets": "earliest", "topicPattern": "many-.*"} | options
        frame = spark.readStream.format("embarcadero").options(**given).load().select("topic", "seq")
        return sizes(run(frame, tmp_path / "checkpoint", "parquet", path=str(tmp_path / "rows")))

    publish("many-a", 40)
    publish("many-b", 30)
    assert everything() == [70]
    publish("many-c", 20)
    publish("many-a", 10)
    assert everything() == [30]
    assert everything() == []
    log.delete_topic("many-b")
    publish("many-c", 5)
    with pytest.raises(Exception, match=r"RecordsLost.*topic 'many-b' .* was deleted during this query"):
        everything()
    assert everything(failOnDataLoss="false") == [5]
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    wanted = {"many-a": 50, "many-b": 30, "many-c": 25}
    assert sorted(rows) == [(name, seq) for name in sorted(wanted) for seq in range(wanted[name])]


def test_limits(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Respected to the record, or refused with the version that supports it."""
    orders(log, "limited", 250)
    if ADMISSION_CONTROL:
        frame = stream(spark, log, "limited", maxRecordsPerTrigger=100).select("id")
        counts = sizes(run(frame, tmp_path / "checkpoint", "parquet", path=str(tmp_path / "rows")))
        assert counts == [100, 100, 50]
    else:
        for name in ("maxRecordsPerTrigger", "maxBytesPerTrigger"):
            with pytest.raises(Exception, match=rf"NotAvailable.*'{name}' needs PySpark 4\.2 or newer, and 4\.[01]"):
                stream(spark, log, "limited", **{name: 100})
