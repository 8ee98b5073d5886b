"""Spark over the log: a data source, a sink, jobs, and a session configured for them. Needs the extra `spark`.

    spark = embarcadero.spark.session()
    spark.read.format("embarcadero").option("brokers", "127.0.0.1:9092").option("topic", "orders").load()
"""

from __future__ import annotations

from embarcadero.spark.processes import session

__all__ = ["session"]
