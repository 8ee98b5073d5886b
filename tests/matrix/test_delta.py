"""Delta and a topic in one session: append, a stream into a table, MERGE."""

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

PACKAGE = "io.delta:delta-spark_4.2_2.13:4.4.0"


@pytest.fixture(scope="module")
def lake() -> Iterator[SparkSession]:
    """A session that knows Delta tables."""
    config = {
        "spark.jars.packages": PACKAGE,
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }
    made = session("delta", "local[2]", config)
    yield made
    made.stop()


def test_append_stream_and_merge(lake: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """The table has each row of the topic once, and after the MERGE the newest row of each key."""
    orders(log, "orders", 300)
    table, flow = str(tmp_path / "orders"), str(tmp_path / "flow")
    load(lake, log, "orders").select("id", "city", "cents").write.format("delta").partitionBy("city").save(table)
    assert lake.read.format("delta").load(table).distinct().count() == 300

    for more in (0, 60):
        if more:
            orders(log, "orders", more, first=300)
        frame = stream(lake, log, "orders").select("id", "city", "cents")
        run(frame, tmp_path / "checkpoint", "delta", path=flow)
    assert lake.sql(f"select count(*), count(distinct id) from delta.`{flow}`").first() == (360, 360)

    load(lake, log, "orders").createOrReplaceTempView("changes")
    lake.sql(
        f"merge into delta.`{table}` as old using (select id, city, cents + 1 as cents from changes) as new "
        "on old.id = new.id when matched then update set cents = new.cents when not matched then insert *"
    )
    found = lake.sql(f"select count(*), sum(cents) from delta.`{table}`").first()
    assert found == (360, 100 * 360 * 359 // 2 + 360)
