"""A job on a Spark Connect server: this process reads and writes topics, and needs no Java.

    python examples/spark_connect.py REMOTE [ADDRESS]      # sc://127.0.0.1:15002; without an address: a private cluster

The server and its workers need `pip install "embarcadero[spark]"`, this process "embarcadero[spark-connect]". A server
on this machine, from the same environment:

    export PYSPARK_PYTHON=$(which python) PYSPARK_DRIVER_PYTHON=$(which python)
    $(python -c "import pyspark; print(pyspark.__path__[0])")/sbin/start-connect-server.sh
"""

from __future__ import annotations

import sys
import tempfile

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import embarcadero as emb
from embarcadero.spark import session

ORDERS = pa.schema([("id", pa.int64()), ("city", pa.string()), ("cents", pa.int64())])
CITIES = ("Rome", "Oslo", "Lima")


def fill(log: emb.Log) -> None:
    known = [topic.name for topic in log.topics()]
    if "orders" not in known:
        log.create_topic("orders", schema=ORDERS)
        with log.publisher("orders", ack=2) as publisher:
            publisher.publish([{"id": n, "city": CITIES[n % 3], "cents": 100 * n} for n in range(1000)])
    if "large" not in known:
        log.create_topic("large", schema=ORDERS)


def copy_large(spark: SparkSession, brokers: str, checkpoint: str) -> None:
    """A stream from topic to topic. It runs in the server, also when this process has gone."""
    orders = (
        spark.readStream.format("embarcadero")
        .options(brokers=brokers, topic="orders", startingOffsets="earliest", reader="large-orders")
        .load()
    )
    query = (
        orders.where("cents >= 50000").select(*ORDERS.names)
        .writeStream.format("embarcadero").options(brokers=brokers, topic="large", checkpointLocation=checkpoint)
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()


def main(remote: str, address: str = "") -> None:
    with emb.connect(address) if address else emb.local(brokers=2, replicas=1) as log:
        fill(log)
        spark = session("connect", remote=remote, topics=True, brokers=log.address)
        with tempfile.TemporaryDirectory() as folder:  # of the server, which is on this machine
            copy_large(spark, log.address, f"{folder}/checkpoint")
        large: DataFrame = spark.sql("select city, count(*) as orders from large group by city order by city")
        for row in large.collect():
            print(f"{row.city}: {row.orders} large orders")
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
