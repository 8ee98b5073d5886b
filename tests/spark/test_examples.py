"""The Spark examples have the documented results, also when a step fails. Those of Connect: tests/matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

import embarcadero as emb
from tests.examples.test_examples import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_json_is_queried_as_variant(spark: SparkSession, log: emb.Log) -> None:
    """Paths into it, a row for each item; a record that is not JSON is null."""
    example = load("spark_json")
    example.fill(log)
    events = example.events(spark, log.address)

    assert [(row.user, row.cents) for row in example.spent(events).collect()] == [("ann", 500), ("bob", 750)]
    assert [row.seq for row in events.where("event is null").collect()] == [3]
    schema = events.selectExpr("schema_of_variant_agg(event)").first()
    assert schema is not None
    assert "user: OBJECT<name: STRING, vip: BOOLEAN>" in schema[0]


def test_windows_are_in_the_iceberg_table_exactly_once(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """The driver dies between the commit to the table and that to the checkpoint: the micro-batch runs again."""
    example = load("spark_windows")
    example.publish(log, range(10))
    failed: list[int] = []

    def dies_afterwards(folder: Path, rows: DataFrame, number: int) -> None:
        example.append(folder, rows, number)
        if example.newest_batch(example.open_table(folder), query_of(folder)) == number:
            failed.append(number)
            raise RuntimeError("planted")

    def query_of(folder: Path) -> str:
        return str(json.loads((folder / "checkpoint" / "metadata").read_text())["id"])

    with pytest.raises(StreamingQueryException, match="planted"):
        example.run(spark, log.address, tmp_path, dies_afterwards)
    assert len(failed) == 1
    example.run(spark, log.address, tmp_path)
    example.publish(log, range(10, 15))
    example.run(spark, log.address, tmp_path)

    rows = example.open_table(tmp_path).scan().to_arrow().sort_by([("minute", "ascending"), ("page", "ascending")])
    minutes = [(row["minute"] - example.START).total_seconds() / 60 for row in rows.to_pylist()]
    assert minutes == [float(minute) for minute in range(12) for _ in range(2)]
    assert rows["page"].to_pylist() == ["/", "/cart"] * 12
    assert rows["views"].to_pylist() == [4, 2] * 12
