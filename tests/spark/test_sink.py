"""The sink in a real Spark session: rows arrive once, columns are checked, shuffles and restarts change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.types import ROUTED_TOPIC
from embarcadero.wire.partitioners import MURMUR2, partition_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


def save(log: emb.Log, topic: str, frame: DataFrame, mode: str = "append", **options: Any) -> None:
    """A batch write."""
    given = {"brokers": log.address, "topic": topic} | options
    frame.write.format("embarcadero").options(**given).mode(mode).save()


def refusal(call: Callable[[], None]) -> str:
    """The error from Spark when a write is refused."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark has several kinds, and passes ours on as text
        call()
    return str(caught.value)


def ids(log: emb.Log, topic: str) -> list[int]:
    """All ids of a topic, sorted."""
    return sorted(log.read(topic).column("id").to_pylist()) if log.tail(topic).seq else []


def test_raw_records_with_keys_headers_and_times(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """All columns arrive, and keys are in the partition where every client looks for them."""
    log.create_topic(topic, replicas=1, partitions=4)
    frame = spark.range(50).selectExpr(
        "concat('value ', id) value", "if(id % 10 = 0, null, cast(id as string)) key",
        "map('n', cast(cast(id as string) as binary)) headers", "timestamp_micros(id) timestamp",
    )  # fmt: skip
    save(log, topic, frame)

    found = log.read(topic).sort_by("timestamp")
    assert found.column("value").to_pylist() == [b"value %d" % n for n in range(50)]
    assert found.column("key").to_pylist() == [None if n % 10 == 0 else b"%d" % n for n in range(50)]
    assert found.column("timestamp").cast(pa.int64()).to_pylist() == list(range(50))
    assert dict(found.column("headers")[7].as_py()) == {"n": b"7"}
    with log.subscribe(topic) as subscriber:
        seen = 0
        while seen < 50:
            batch = subscriber.poll(10)
            assert batch is not None
            seen += batch.count
            keys = [key for key in batch.to_arrow().column("key").to_pylist() if key is not None]
            assert {partition_of(key, 4, MURMUR2) for key in keys} <= {batch.partition}


def test_rows_go_to_the_partition_that_their_column_names(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """And with an order: rows of one task are sorted by it."""
    log.create_topic(topic, replicas=1, partitions=3, schema=SCHEMA)
    frame = spark.range(30).coalesce(1).selectExpr("id", "string(100 - id) name", "cast(id % 3 as int) _partition")
    save(log, topic, frame, orderBy="name")

    for partition in range(3):
        with log.subscribe(topic, partitions=[partition]) as subscriber:
            batch = subscriber.poll(10)
            assert batch is not None
            names = batch.to_arrow().column("name").to_pylist()
            assert names == sorted(names)
            assert {number % 3 for number in batch.to_arrow().column("id").to_pylist()} == {partition}


def test_bad_writes_are_refused_before_any_task_runs(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Types, columns, modes, topics, brokers: each is named with the remedy."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    good = spark.range(3).selectExpr("id", "string(id) name")

    assert "column 'name' is int64 in the frame and string in the topic" in refusal(
        lambda: save(log, topic, spark.range(3).selectExpr("id", "id name"))
    )
    assert 'use mode("append"); to start empty' in refusal(lambda: save(log, topic, good, "overwrite"))
    assert "option 'topic' is missing, and the frame has no column 'topic'" in refusal(
        lambda: good.selectExpr("name value").write.format("embarcadero").options(brokers=log.address)
        .mode("append").save()
    )
    assert [each.name for each in log.topics(hidden=True) if each.name == ROUTED_TOPIC] == []
    assert "there is no topic 'nowhere'" in refusal(lambda: save(log, "nowhere", good))
    assert "did you mean 'orderBy'" in refusal(lambda: save(log, topic, good, oderBy="id"))
    assert "Append" in refusal(lambda: save(log, topic, good, "error"))
    assert "no broker" in refusal(lambda: save(log, topic, good, brokers="127.0.0.1:1")).lower()
    assert log.tail(topic).seq == 0


def test_a_write_with_an_id_is_done_once(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Again, from another session of Spark and in another order: nothing is added. With the next number it is."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)

    def frame(session: SparkSession) -> DataFrame:
        return session.range(200).repartition(3).selectExpr("id", "string(id) name")

    save(log, topic, frame(spark), writeId="job")
    save(log, topic, frame(spark.newSession()).orderBy("name").repartition(3, "id"), writeId="other")
    assert ids(log, topic) == sorted([*range(200)] * 2)
    for _ in range(2):
        save(log, topic, frame(spark.newSession()), writeId="job")
    assert log.tail(topic).seq == 400
    save(log, topic, frame(spark), writeId="job", batchId="1")
    assert log.tail(topic).seq == 600


def test_a_write_with_an_id_and_other_rows_keeps_the_first(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """The id names the write: rows stored under it stay, whatever the rows and tasks of another run are."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    save(log, topic, spark.range(0, 200, 1, 3).selectExpr("id", "string(id) name"), writeId="job")
    save(log, topic, spark.range(0, 300, 1, 2).selectExpr("id", "string(rand()) name"), writeId="job")
    assert ids(log, topic) == list(range(200))


def failing_once(folder: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for mapInArrow that fails once, after it has passed on most of its rows."""
    flag = str(folder / "failed")

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pathlib import Path

        for batch in batches:
            yield batch
            if not Path(flag).exists():
                Path(flag).touch()
                raise ValueError("planted")

    return passed_on


def test_an_operator_that_fails_once_leaves_no_rows(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """Spark ends the rows of a failed task as if they were complete; none of them are ever seen."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    frame = spark.range(0, 20_000, 1, 4).selectExpr("id", "concat('a name ', id) name")
    broken = frame.mapInArrow(failing_once(tmp_path), frame.schema)
    assert "planted" in refusal(lambda: save(log, topic, broken))  # local[2] does not run a task again
    assert log.tail(topic).seq == 0
    save(log, topic, broken)
    assert ids(log, topic) == list(range(20_000))


def test_writes_without_an_id_are_separate(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Each is written exactly once, and each is a separate write."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    for _ in range(2):
        save(log, topic, spark.range(10).selectExpr("id", "string(id) name"))
    assert ids(log, topic) == sorted([*range(10)] * 2)


def test_rows_choose_their_topic(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """By the column `topic`, in one commit; a row without a topic fails the write."""
    names = [f"{topic}.{letter}" for letter in "ab"]
    for name in names:
        log.create_topic(name, replicas=1)
    frame = spark.range(40).selectExpr(f"concat('{topic}.', if(id % 4 = 0, 'a', 'b')) topic", "string(id) value")
    writer = frame.write.format("embarcadero").options(brokers=log.address, writeId=topic).mode("append")
    for _ in range(2):
        writer.save()
    assert [log.tail(name).durable_seq for name in names] == [10, 30]
    lost = frame.selectExpr("if(value = '7', null, topic) topic", "value").write.format("embarcadero")
    assert "column 'topic' is null, first in value '7'" in refusal(
        lambda: lost.options(brokers=log.address).mode("append").save()
    )
    assert [log.tail(name).durable_seq for name in names] == [10, 30]


def test_new_columns_are_added_on_request(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """At the end, of any type that Spark has, once; without the option the error names it."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    frame = spark.range(3).selectExpr(
        "id", "string(id) name", "cast(id as byte) small", "cast(id as decimal(9, 2)) price", "timestamp_micros(id) at",
        "cast('2026-01-02' as timestamp_ntz) local", "date '2026-01-02' day", "array(id) many", "map('k', id) lots",
        "named_struct('x', id, 'y', array('z')) more", "float(id) f", "binary('b') bytes", "id > 1 yes",
    )  # fmt: skip
    said = refusal(lambda: save(log, topic, frame))
    assert "column 'small' is unknown" in said
    assert "addColumns=true" in said
    bad = frame.withColumn("name", frame.id)
    assert "'name' is int64" in refusal(lambda: save(log, topic, bad, addColumns="true"))
    assert log.describe(topic).schema == SCHEMA
    for _ in range(2):
        save(log, topic, frame, addColumns="true")
    save(log, topic, frame.select("id", "name"), addColumns="true")
    found = log.read(topic)
    assert found.schema.names[: len(frame.columns)] == frame.columns
    assert log.describe(topic).schema.names == frame.columns
    assert found.column("many").to_pylist() == [[0], [1], [2]] * 2 + [None] * 3
    assert found.column("yes").to_pylist() == [False, False, True] * 2 + [None] * 3
    again = spark.read.format("embarcadero").options(brokers=log.address, topic=topic).load().select(*frame.columns)
    save(log, topic, again.limit(3))


# --- streams ---
def stream(spark: SparkSession, log: emb.Log, topic: str, folder: Path, **options: Any) -> StreamingQuery:
    """A query over the files of a folder, one file a micro-batch, shuffled into three tasks."""
    files = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", 1)
    writer = files.parquet(str(folder / "in")).repartition(3, "id").writeStream.format("embarcadero")
    options = {"brokers": log.address, "topic": topic, "checkpointLocation": str(folder / "checkpoint")} | options
    return writer.options(**options).trigger(availableNow=True).start()


def feed(spark: SparkSession, folder: Path, first: int, count: int) -> None:
    """One more file."""
    frame = spark.range(first, first + count).selectExpr("id", "string(id) name")
    frame.coalesce(1).write.mode("append").parquet(str(folder / "in"))


def test_a_stream_survives_rollbacks_of_sparks_commit_log(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """A micro-batch whose end Spark did not record is run again on restart, and adds nothing."""
    log.create_topic(topic, replicas=1, partitions=2, schema=SCHEMA)
    for number in range(2):
        feed(spark, tmp_path, 100 * number, 100)
    stream(spark, log, topic, tmp_path).awaitTermination()
    assert ids(log, topic) == list(range(200))

    for _ in range(2):
        commits = tmp_path / "checkpoint" / "commits"
        newest = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
        for file in (commits / str(newest), commits / f".{newest}.crc"):
            file.unlink(missing_ok=True)
        stream(spark, log, topic, tmp_path).awaitTermination()
        assert ids(log, topic) == list(range(200))
    feed(spark, tmp_path, 200, 100)
    stream(spark, log, topic, tmp_path).awaitTermination()
    assert ids(log, topic) == list(range(300))


def test_invalid_streams_are_refused(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """Before a task runs: an option of batch writes, a mode that takes rows back."""
    log.create_topic(topic, replicas=1)
    feed(spark, tmp_path, 0, 1)
    files = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "in"))

    def run(frame: DataFrame, mode: str = "append", **options: str) -> str:
        given = {"brokers": log.address, "topic": topic, "checkpointLocation": str(tmp_path / mode / "".join(options))}
        writer = frame.writeStream.format("embarcadero").outputMode(mode).options(**given, **options)
        return refusal(lambda: writer.trigger(availableNow=True).start().awaitTermination())

    raw = files.selectExpr("name value", "timestamp_micros(id) timestamp")
    assert "can't be used with a stream" in run(raw, writeId="w")
    counts = files.groupBy("name").count().selectExpr("name value", "timestamp_micros(0) timestamp")
    assert 'outputMode("append")' in run(counts, "complete")
    assert log.tail(topic).seq == 0


def test_a_stream_whose_code_failed_continues_with_the_corrected_code(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """The failed micro-batch was never visible, and runs again with other rows, in another number of tasks."""
    log.create_topic(topic, replicas=1, schema=SCHEMA)
    feed(spark, tmp_path, 0, 20_000)
    files = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "in"))

    def run(frame: DataFrame) -> None:
        options = {"brokers": log.address, "topic": topic, "checkpointLocation": str(tmp_path / "checkpoint")}
        writer = frame.writeStream.format("embarcadero").options(**options).trigger(availableNow=True)
        writer.start().awaitTermination()

    broken = files.repartition(3, "id").mapInArrow(failing_once(tmp_path), files.schema)
    assert "planted" in refusal(lambda: run(broken))
    assert log.tail(topic).seq == 0
    run(files.selectExpr("id + 100000 id", "string(rand()) name").repartition(2))
    assert ids(log, topic) == list(range(100_000, 120_000))
