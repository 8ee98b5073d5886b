"""One trigger of AvailableNow over all of a topic: Embarcadero's source beside Kafka's, in turns in one session.

`python -m tests.peers.streams results megabytes...` writes JSON: the seconds of each round by size and contestant.
Records have 1,000 bytes; rows go nowhere (`noop`). Each query begins with a checkpoint of its own, and reads from the
earliest record. The first rounds are not counted: the JVM compiles all paths in them. Embarcadero has one replica,
Kafka one node. *Nothing* is a Python source that yields Embarcadero's Arrow batches of the same rows from memory, in
as many tasks: what Spark itself takes to read rows from Python, and so the least time of any source in Python.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

import embarcadero as emb
from embarcadero.spark import session
from embarcadero_proof.lab.nothing import Nothing, keep
from tests.matrix.frames import run
from tests.peers.kafka import broker, download

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD_BYTES: Final = 1_000
PARTITIONS: Final = 4
ROUNDS: Final = 7
WARM_ROUNDS: Final = 5
TASK_BYTES: Final = 32 << 20
_BATCH: Final = 1_000
COLUMNS: Final = ["topic", "partition", "key", "value", "timestamp"]
"""What both have. Kafka's `offset` is `seq` here."""


def fill(log: emb.Log, topic: str, records: int) -> None:
    """Publish records of random bytes; return when all are durable."""
    log.create_topic(topic, replicas=1, partitions=PARTITIONS)
    with log.publisher(topic, ack=2) as publisher:
        for _ in range(records // _BATCH):
            values = pa.array([os.urandom(RECORD_BYTES) for _ in range(_BATCH)], pa.binary())
            publisher.publish(pa.record_batch({"value": values}))


def ours(spark: SparkSession, log: emb.Log, topic: str) -> DataFrame:
    """A topic of Embarcadero as a stream."""
    options = {"brokers": log.address, "startingOffsets": "earliest", "columns": ",".join([*COLUMNS, "seq"])}
    return spark.readStream.format("embarcadero").options(**options).load(topic)


def theirs(spark: SparkSession, address: str, topic: str) -> DataFrame:
    """A topic of Kafka as a stream."""
    options = {"kafka.bootstrap.servers": address, "subscribe": topic, "startingOffsets": "earliest"}
    return spark.readStream.format("kafka").options(**options).load().select(*COLUMNS, "offset")


def nothing(spark: SparkSession, records: int, file: Path) -> DataFrame:
    """A stream of rows that a Python source has in memory: the columns of `ours`, in tasks of about 32 MiB."""
    arrays = [
        pa.array(["topic"] * _BATCH), pa.array([0] * _BATCH, pa.int32()), pa.nulls(_BATCH, pa.binary()),
        pa.array([os.urandom(RECORD_BYTES) for _ in range(_BATCH)], pa.binary()),
        pa.array([0] * _BATCH, pa.timestamp("us", "UTC")), pa.array(range(_BATCH), pa.int64()),
    ]  # fmt: skip
    keep([pa.record_batch(arrays, [*COLUMNS, "seq"])], str(file))
    batches = records // _BATCH
    tasks = 2 * max(1, round(batches * _BATCH * RECORD_BYTES / TASK_BYTES / 2))
    options = {"file": str(file), "tasks": str(tasks), "batches": str(-(-batches // tasks))}
    ddl = "topic string, partition int, key binary, value binary, timestamp timestamp, seq bigint"
    return spark.readStream.format("nothing").schema(ddl).options(**options).load()


def seconds(frame: DataFrame, records: int) -> float:
    """Seconds from the start of a query to its end. RuntimeError, if it has not read all records."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        query = run(frame, Path(folder), "noop")
        spent = time.perf_counter() - began
    read = sum(each["numInputRows"] for each in query.recentProgress)
    if read < records:
        raise RuntimeError(f"{read} of {records} records were read")
    return spent


def compare(spark: SparkSession, log: emb.Log, kafka: Any, megabytes: int) -> dict[str, list[float]]:
    """Run all in turns, in the opposite order in every other round."""
    records, topic = megabytes * 1_000_000 // RECORD_BYTES // _BATCH * _BATCH, f"m{megabytes}"
    fill(log, topic, records)
    kafka.fill(topic, records, RECORD_BYTES)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        frames = {
            "embarcadero": ours(spark, log, topic),
            "kafka": theirs(spark, kafka.address, topic),
            "nothing": nothing(spark, records, Path(folder) / "rows.arrow"),
        }
        for number in range(WARM_ROUNDS + ROUNDS):
            for name in sorted(frames, reverse=bool(number % 2)):
                spent = seconds(frames[name], records)
                if number >= WARM_ROUNDS:
                    found.setdefault(name, []).append(spent)
    return found


def main() -> None:
    """Start everything, measure each size, print."""
    jars, connector = download()
    config = {"spark.jars": ",".join(map(str, connector)), "spark.driver.memory": "2g"}
    with (
        tempfile.TemporaryDirectory() as folder,
        broker(jars, Path(folder), PARTITIONS) as kafka,
        emb.local(brokers=2, replicas=1) as log,
    ):
        spark = session("peers", "local[2]", config)
        spark.dataSource.register(Nothing)
        found = {size: compare(spark, log, kafka, int(size)) for size in sys.argv[2:]}
        Path(sys.argv[1]).write_text(json.dumps(found))
        spark.stop()


if __name__ == "__main__":
    main()
