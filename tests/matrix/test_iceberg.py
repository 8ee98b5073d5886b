"""Iceberg's Spark runtime and a topic in one session: append, a stream into a partitioned table, MERGE."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import embarcadero as emb
from embarcadero.spark import session
from tests.matrix.frames import load, orders, run, stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with a catalog `lake` in a folder."""
    config = {
        "spark.jars.packages": PACKAGE,
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(tmp_path_factory.mktemp("warehouse")),
    }
    made = session("iceberg", "local[2]", config)
    yield made
    made.stop()


def test_append_stream_and_merge(lake: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """The table has each row of the topic once, and after the MERGE the newest row of each key."""
    orders(log, "orders", 300)
    lake.sql("create table lake.shop.orders (id bigint, city string, cents bigint) using iceberg partitioned by (city)")
    load(lake, log, "orders").select("id", "city", "cents").writeTo("lake.shop.orders").append()
    assert lake.sql("select count(*), count(distinct id) from lake.shop.orders").first() == (300, 300)

    lake.sql("create table lake.shop.flow (id bigint, city string, cents bigint) using iceberg partitioned by (city)")
    for more in (0, 60):
        if more:
            orders(log, "orders", more, first=300)
        frame = stream(lake, log, "orders").select("id", "city", "cents")
        run(frame, tmp_path, "iceberg", path="lake.shop.flow", **{"fanout-enabled": "true"})
    assert lake.sql("select count(*), count(distinct id) from lake.shop.flow").first() == (360, 360)

    load(lake, log, "orders").createOrReplaceTempView("changes")
    lake.sql(
        "merge into lake.shop.orders as old using (select id, city, cents + 1 as cents from changes) as new "
        "on old.id = new.id when matched then update set cents = new.cents when not matched then insert *"
    )
    assert lake.sql("select count(*), sum(cents) from lake.shop.orders").first() == (360, 100 * 360 * 359 // 2 + 360)
