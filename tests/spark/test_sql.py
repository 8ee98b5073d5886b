"""SQL over topics, and a user's own job, on real Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadValue
from embarcadero.spark.sql import ask, mentioned, run_job

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def shop(log: emb.Log) -> emb.Log:
    """A topic with a schema, one with raw records, and one whose name needs quoting."""
    schema = pa.schema([("city", pa.string()), ("cents", pa.int64())])
    log.create_topic("orders", replicas=1, schema=schema)
    log.create_topic("raw.lines-1", replicas=1)
    with log.publisher("orders", ack=2) as publisher:
        publisher.publish(pa.table({"city": ["Oslo", "Lima", "Oslo"], "cents": [5, 7, 9]}, schema=schema))
    with log.publisher("raw.lines-1", ack=2) as publisher:
        publisher.send(b"hello", key=b"k")
    return log


def test_topics_are_tables(spark: SparkSession, shop: emb.Log) -> None:
    """Typed and raw topics, by name; a query sees records that were published a moment ago."""
    found = ask(spark, shop, "select city, sum(cents) s, max(_seq) m from orders group by city order by city")
    assert [tuple(row) for row in found.collect()] == [("Lima", 7, 1), ("Oslo", 14, 2)]
    found = ask(spark, shop, "select cast(value as string), seq from `raw.lines-1`")
    assert [tuple(row) for row in found.collect()] == [("hello", 0)]


def test_show_tables_shows_all(spark: SparkSession, shop: emb.Log) -> None:
    """A query without a topic sees every topic."""
    names = {row.tableName for row in ask(spark, shop, "show tables").collect()}
    assert {"orders", "raw.lines-1"} <= names


def test_a_query_refers_only_to_the_topics_it_names() -> None:
    """Views are made only for the topics that a query could mean, so that a thousand others cost nothing."""
    assert mentioned("select * from Orders o", ["orders", "payments"]) == ["orders"]
    assert mentioned(" SHOW TABLES", ["orders", "payments"]) == ["orders", "payments"]


@pytest.mark.parametrize("query", ["selec 1", "select * from nowhere", "select cities from orders"])
def test_an_invalid_query_gets_the_reason(spark: SparkSession, shop: emb.Log, query: str) -> None:
    """A typed error with Spark's reason in one piece, and the existing topics."""
    with pytest.raises(BadValue, match="Spark refuses this query") as caught:
        ask(spark, shop, query)
    assert "orders" in caught.value.hint


def test_a_users_own_job(spark: SparkSession, shop: emb.Log, tmp_path: Path) -> None:
    """A file finds spark, log, brokers and all topics ready, its own folder to import from, and its arguments."""
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\nfrom pathlib import Path\nfrom helper import FACTOR\n"
        "total = spark.sql('select sum(cents) from orders').first()[0]\n"
        "text = f'{total * FACTOR} {log.tail(\"orders\").seq} {brokers == log.address}'\n"
        "Path(sys.argv[1]).write_text(text)\n"
    )
    run_job(spark, shop, job, [str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == "42 3 True"
    with pytest.raises(BadValue, match="does not exist"):
        run_job(spark, shop, tmp_path / "absent.py", [])
