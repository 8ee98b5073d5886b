"""Streams with real Spark: queries, checkpoints, progress, and the user's errors when records are gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import embarcadero as emb
from embarcadero.spark.lag import LagListener
from tests.spark.test_source import fill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

WAIT_S = 120


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds: the cluster gets progress within a second."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def streamed(spark: SparkSession, log: emb.Log, topic: str | None, **options: Any) -> DataFrame:
    """A topic as a stream, or the topics that an option chooses."""
    return spark.readStream.format("embarcadero").options(brokers=log.address, **options).load(topic)


def run(frame: DataFrame, folder: Path, each: Callable[[DataFrame, int], None] | None = None) -> StreamingQuery:
    """Run a query over all existing records, to its end; rows go to Parquet files, once per micro-batch."""
    writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", str(folder / "checkpoint"))
    made = writer.format("parquet").option("path", str(folder / "rows")) if each is None else writer.foreachBatch(each)
    query = made.start()
    query.awaitTermination(WAIT_S)
    return query


def test_a_query_reads_each_record_once_over_restarts(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Limits, AvailableNow, a restart from the checkpoint, the lag in the progress and as a metric."""
    listener = LagListener()
    spark.streams.addListener(listener)
    log.create_topic("stream", replicas=1)
    fill(log, "stream", 230)
    frame = streamed(spark, log, "stream", startingOffsets="earliest", maxRecordsPerTrigger=100, columns="seq,value")
    try:
        first = run(frame, tmp_path)
        fill(log, "stream", 40, first=230)
        second = run(frame, tmp_path)
    finally:
        spark.streams.removeListener(listener)

    assert [each.numInputRows for each in first.recentProgress if each.numInputRows] == [100, 100, 30]
    assert [each.numInputRows for each in second.recentProgress if each.numInputRows] == [40]
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted(row.seq for row in rows) == list(range(270))
    assert sorted(int(row.value) for row in rows) == list(range(270))
    lane = log.describe("stream").lane
    assert f'"{lane}": {{"index"' in first.recentProgress[0].sources[0].latestOffset
    lag = listener.lags()[str(second.id), "stream"]
    assert lag.records == 0
    until(lambda: {reader.reader: reader.lag for reader in log.readers("stream")}[lag.reader] == 0)


def test_a_query_of_one_topic_becomes_a_query_of_all_matching_topics(
    spark: SparkSession, log: emb.Log, tmp_path: Path
) -> None:
    """From its checkpoint, in the order of each topic, with limits; a topic is added, and another deleted."""
    counts = {"many-a": 50, "many-b": 90}
    for name, count in counts.items():
        log.create_topic(name, replicas=1)
        fill(log, name, count)
    options = {"startingOffsets": "earliest", "reader": "everything"}

    def everything(**more: Any) -> list[int]:
        frame = streamed(spark, log, None, topicPattern="many-.*", **options, **more)
        done = run(frame.select("topic", "seq", "value"), tmp_path)
        return [each.numInputRows for each in done.recentProgress if each.numInputRows]

    run(streamed(spark, log, "many-a", **options).select("topic", "seq", "value"), tmp_path)
    fill(log, "many-a", 20, first=50)
    assert everything(maxRecordsPerTrigger=60) == [60, 50]
    log.create_topic("many-c", replicas=1)
    fill(log, "many-c", 30)
    assert everything() == [30]
    until(lambda: {each.reader: each.lag for each in log.readers("many-b")} == {"everything": 0})

    log.delete_topic("many-c")
    fill(log, "many-b", 10, first=90)
    with pytest.raises(StreamingQueryException, match=r"topic 'many-c' \(id .* was deleted during .*failOnDataLoss"):
        everything()
    assert everything(failOnDataLoss="false") == [10]
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    found = sorted((row.topic, row.seq, int(row.value)) for row in rows)
    assert found == [(name, n, n) for name, count in (("many-a", 70), ("many-b", 100), ("many-c", 30))
                     for n in range(count)]  # fmt: skip


def test_a_micro_batch_that_failed_is_run_again_with_the_same_tasks(
    spark: SparkSession, log: emb.Log, tmp_path: Path
) -> None:
    """Though the topic has grown meanwhile: the tasks are defined in the checkpoint. The sink relies on it."""
    log.create_topic("again", replicas=1)
    fill(log, "again", 100)
    frame = streamed(spark, log, "again", startingOffsets="earliest", minPartitions=5, columns="seq")
    tasks: list[tuple[int, list[tuple[int, int]]]] = []

    def look(rows: DataFrame, number: int) -> None:
        found = rows.selectExpr("spark_partition_id() as task", "seq").collect()
        tasks.append((number, sorted((row.task, row.seq) for row in found)))
        if len(tasks) == 1:
            raise RuntimeError("planted")

    with pytest.raises(StreamingQueryException, match="planted"):
        run(frame, tmp_path, look)
    fill(log, "again", 400, first=100)
    run(frame, tmp_path, look)

    assert tasks[0] == tasks[1]
    assert {task for task, _ in tasks[0][1]} == set(range(5))
    assert [number for number, _ in tasks] == [0, 0, 1]
    assert [seq for _, seq in tasks[1][1]] + sorted(seq for _, seq in tasks[2][1]) == list(range(500))


def test_a_typed_stream_continues_when_the_topic_gets_a_column(
    spark: SparkSession, log: emb.Log, tmp_path: Path
) -> None:
    """With its own columns; a query that is loaded again sees the new one."""
    schema = pa.schema([("n", pa.int64())])
    log.create_topic("typed", replicas=1, schema=schema)
    wider = schema.append(pa.field("name", pa.string()))
    with log.publisher("typed", ack=2) as publisher:
        publisher.publish(pa.table({"n": [1]}, schema)).result()
    frame = streamed(spark, log, "typed", startingOffsets="earliest").select("n", "_seq")
    run(frame, tmp_path)
    log.alter_topic("typed", schema=wider)
    with log.publisher("typed", ack=2) as publisher:
        publisher.publish(pa.table({"n": [2], "name": ["two"]}, wider)).result()
    run(frame, tmp_path)

    rows = spark.read.parquet(str(tmp_path / "rows")).orderBy("_seq").collect()
    assert [(row.n, row._seq) for row in rows] == [(1, 0), (2, 1)]
    assert "name" in streamed(spark, log, "typed").columns


def test_records_trimmed_under_a_query_stop_it_with_our_message(
    spark: SparkSession, log: emb.Log, tmp_path: Path
) -> None:
    """And with failOnDataLoss=false it continues with the remaining records."""
    log.create_topic("cut", replicas=1)
    fill(log, "cut", 60)
    options = {"startingOffsets": "earliest", "columns": "seq"}
    run(streamed(spark, log, "cut", **options), tmp_path)
    fill(log, "cut", 60, first=60)
    log.trim("cut", before_seq=90)

    with pytest.raises(StreamingQueryException, match=r"records \[60, 90\) of lane .*were trimmed .*failOnDataLoss"):
        run(streamed(spark, log, "cut", **options), tmp_path)
    run(streamed(spark, log, "cut", failOnDataLoss="false", **options), tmp_path)
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted(row.seq for row in rows) == [*range(60), *range(90, 120)]


def test_a_topic_deleted_under_a_running_query_stops_it_with_our_message(
    spark: SparkSession, log: emb.Log, tmp_path: Path
) -> None:
    """A query that keeps running, not a restarted one."""
    log.create_topic("doomed", replicas=1)
    frame = streamed(spark, log, "doomed", startingOffsets="earliest", columns="seq")
    query = (
        frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "rows"))
    )  # fmt: skip
    fill(log, "doomed", 10)
    query.processAllAvailable()
    log.delete_topic("doomed")

    with pytest.raises(StreamingQueryException, match=r"(?s)UnknownTopic.*doomed"):
        query.awaitTermination(WAIT_S)
    assert spark.read.parquet(str(tmp_path / "rows")).count() == 10


def test_a_stream_refuses_options_of_batch_reads(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Before anything runs."""
    log.create_topic("refused", replicas=1)
    with pytest.raises(Exception, match="'endingOffsets' can't be used with a stream"):
        run(streamed(spark, log, "refused", endingOffsets="5"), tmp_path)
