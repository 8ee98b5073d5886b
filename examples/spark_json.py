"""JSON in raw topics, queried without a schema: with Spark's Variant (PySpark 4.0 or newer).

    python examples/spark_json.py [ADDRESS]      # without an address: a private cluster
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession

import embarcadero as emb
from embarcadero.spark import session

TOPIC = "events"
EVENTS = [
    {"kind": "view", "user": {"name": "ann"}, "page": "/"},
    {"kind": "order", "user": {"name": "ann", "vip": True}, "items": [{"sku": "a", "cents": 500}]},
    {"kind": "order", "user": {"name": "bob"}, "items": [{"sku": "a", "cents": 500}, {"sku": "b", "cents": 250}]},
]


def fill(log: emb.Log) -> None:
    if TOPIC not in [topic.name for topic in log.topics()]:
        log.create_topic(TOPIC)
        with log.publisher(TOPIC, ack=2) as publisher:
            for event in EVENTS:
                publisher.send(json.dumps(event).encode())
            publisher.send(b"{not json")


def events(spark: SparkSession, brokers: str) -> DataFrame:
    """Each record as a Variant. `parse_json` ends the query at bad JSON; `try_parse_json` gives null for it."""
    rows = spark.read.format("embarcadero").options(brokers=brokers, topic=TOPIC, columns="seq,value").load()
    return rows.selectExpr("seq", "try_parse_json(cast(value as string)) as event")


def spent(events: DataFrame) -> DataFrame:
    """Cents by user: a path into each event, then a row for each item."""
    events.createOrReplaceTempView("parsed_events")
    return events.sparkSession.sql("""
        select event:user.name::string as user, sum(item.value:cents::bigint) as cents
        from parsed_events, lateral variant_explode(event:items) as item
        where event:kind::string = 'order' group by all order by user
    """)


def main(address: str = "") -> None:
    with emb.connect(address) if address else emb.local(brokers=2, replicas=1) as log:
        fill(log)
        spark = session("json")
        parsed = events(spark, log.address)
        print(parsed.selectExpr("schema_of_variant_agg(event)").first()[0])
        for row in spent(parsed).collect():
            print(f"{row.user}: {row.cents} cents")
        print(f"{parsed.where('event is null').count()} record is no JSON")
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
