"""Page views by minute, from a stream into an Iceberg table, exactly once.

    python examples/spark_windows.py [ADDRESS]      # without an address: a private cluster

A watermark limits how late a view may be: an older window is final, and its rows are written. Spark runs a micro-batch
again if the driver died after writing the rows and before Spark recorded that.

The sink therefore records the micro-batch together with its rows: one commit adds the rows and a snapshot whose
properties are the query's id and the number of the micro-batch. A micro-batch whose number is not above the newest one
in the table is skipped. Maintenance of the table must keep the newest snapshot of each query.

PyIceberg writes, so this works with every PySpark 4: Iceberg's own runtime for Spark ends at PySpark 4.1.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import embarcadero as emb
from embarcadero.spark import session

TOPIC, TABLE = "views", "shop.views_by_minute"
START = datetime(2026, 1, 31, 12, tzinfo=UTC)
QUERY, BATCH = "query-id", "micro-batch"
Write = Callable[[Path, DataFrame, int], None]
COLUMNS = pa.schema([("minute", pa.timestamp("us", tz="UTC")), ("page", pa.string()), ("views", pa.int64())])


def publish(log: emb.Log, minutes: range) -> None:
    """Publish six views of two pages in each minute."""
    if TOPIC not in [topic.name for topic in log.topics()]:
        log.create_topic(TOPIC)
    with log.publisher(TOPIC, ack=2) as publisher:
        for minute in minutes:
            for view in range(6):
                at = START + timedelta(minutes=minute, seconds=10 * view)
                publisher.send(b"view", key=b"/cart" if view % 3 == 2 else b"/", timestamp=at)


def counts(spark: SparkSession, brokers: str) -> DataFrame:
    """Count views by minute and page. A view may be two minutes late."""
    views = (
        spark.readStream.format("embarcadero")
        .options(brokers=brokers, topic=TOPIC, startingOffsets="earliest", columns="key,timestamp", reader="by-minute")
        .load()
    )
    minutes = views.withWatermark("timestamp", "2 minutes").groupBy(f.window("timestamp", "1 minute"), "key").count()
    return minutes.selectExpr("window.start as minute", "cast(key as string) as page", "count as views")


def open_table(folder: Path) -> Table:
    """Open the table, in a catalog in SQLite. A commit is not retried: after a conflict, that could add rows twice."""
    files = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
    catalog: Catalog = load_catalog("shop", type="sql", **files)
    catalog.create_namespace_if_not_exists("shop")
    return catalog.create_table_if_not_exists(TABLE, COLUMNS, properties={"commit.retry.num-retries": "0"})


def newest_batch(table: Table, query: str) -> int:
    """Return the newest micro-batch of a query in the table; -1: none."""
    snapshots = {snapshot.snapshot_id: snapshot for snapshot in table.snapshots()}
    at = table.current_snapshot()
    while at is not None:
        properties = at.summary.additional_properties if at.summary is not None else {}
        if properties.get(QUERY) == query:
            return int(properties[BATCH])
        at = None if at.parent_snapshot_id is None else snapshots.get(at.parent_snapshot_id)
    return -1


def append(folder: Path, rows: DataFrame, number: int) -> None:
    """Add the rows of a micro-batch to the table, once.

    The rows are computed even if the table has them: Spark records the counts of open windows during the computation.
    """
    query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    table, found = open_table(folder), rows.toArrow().cast(COLUMNS)
    if found.num_rows and number > newest_batch(table, query):
        table.append(found, snapshot_properties={QUERY: query, BATCH: str(number)})


def run(spark: SparkSession, brokers: str, folder: Path, write: Write = append) -> None:
    """Bring the table up to date with the topic, then end."""
    query = (
        counts(spark, brokers)
        .writeStream.option("checkpointLocation", str(folder / "checkpoint")).outputMode("append")
        .foreachBatch(lambda rows, number: write(folder, rows, number))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()


def main(address: str = "") -> None:
    cluster = emb.connect(address) if address else emb.local(brokers=2, replicas=1)
    with cluster as log, tempfile.TemporaryDirectory() as folder:
        spark = session("windows")
        for minutes in (range(10), range(10, 20)):
            publish(log, minutes)
            run(spark, log.address, Path(folder))
            views = open_table(Path(folder)).scan().to_arrow()
            print(f"{views.num_rows} rows, {sum(views['views'].to_pylist())} views in windows that are complete")
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
