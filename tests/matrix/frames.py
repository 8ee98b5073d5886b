"""Shared by all tests of the matrix: a topic with rows, a frame of it, a query over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import embarcadero as emb

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

ORDERS = pa.schema([("id", pa.int64()), ("city", pa.string()), ("cents", pa.int64())])
CITIES = ["Rome", "Oslo", "Lima"]
WAIT_S = 120


def orders(log: emb.Log, topic: str, count: int, first: int = 0) -> None:
    """Rows with growing ids in a topic, which is created if it is not there."""
    if topic not in [known.name for known in log.topics()]:
        log.create_topic(topic, replicas=1, schema=ORDERS)
    with log.publisher(topic, ack=2) as publisher:
        rows = [{"id": n, "city": CITIES[n % 3], "cents": 100 * n} for n in range(first, first + count)]
        publisher.publish(pa.Table.from_pylist(rows, ORDERS)).result()


def load(spark: SparkSession, log: emb.Log, topic: str, **options: Any) -> DataFrame:
    """A topic as a frame."""
    return spark.read.format("embarcadero").options(brokers=log.address, **options).load(topic)


def stream(spark: SparkSession, log: emb.Log, topic: str, **options: Any) -> DataFrame:
    """A topic as a stream, from its beginning."""
    given = {"brokers": log.address, "startingOffsets": "earliest"} | options
    return spark.readStream.format("embarcadero").options(**given).load(topic)


def run(frame: DataFrame, checkpoint: Path, form: str, **options: Any) -> StreamingQuery:
    """Read the existing rows to the end, and stop."""
    writer = frame.writeStream.format(form).options(checkpointLocation=str(checkpoint), **options)
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S)
    return query


def sizes(query: StreamingQuery) -> list[int]:
    """Rows of its micro-batches, without the empty ones."""
    return [batch["numInputRows"] for batch in query.recentProgress if batch["numInputRows"]]
