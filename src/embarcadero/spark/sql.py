"""SQL over topics: each one is a view, always current, wherever its records are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from embarcadero.client.sync import Log
from embarcadero.errors import BadValue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOOKS_AROUND: Final = re.compile(r"^\s*show\b", re.IGNORECASE)


def view(spark: SparkSession, log: Log, topic: str, read: str = "durable") -> DataFrame:
    """A topic as a temporary view of its own name; returns what the view reads.

        view(spark, log, "orders")
        spark.sql("select city, sum(amount_cents) from orders group by city").show()
    """
    frame = spark.read.format("embarcadero").option("brokers", log.address).option("topic", topic)
    found = frame.option("read", read).load()
    found.createOrReplaceTempView(f"`{topic}`")
    return found


def views(spark: SparkSession, log: Log, query: str | None = None, read: str = "durable") -> list[str]:
    """Every topic as a view; with a `query` only those that it could mean. Returns their names."""
    topics = [topic.name for topic in log.topics()]
    wanted = topics if query is None else mentioned(query, topics)
    for topic in wanted:
        view(spark, log, topic, read)
    return wanted


def mentioned(query: str, topics: Iterable[str]) -> list[str]:
    """The topics whose names are in a query, and all of them for one that looks around (`show tables`)."""
    if _LOOKS_AROUND.match(query):
        return list(topics)
    text = query.lower()
    return [topic for topic in topics if topic.lower() in text]


def ask(spark: SparkSession, log: Log, query: str, read: str = "durable") -> DataFrame:
    """The answer to a query over topics. BadValue tells what is wrong with the query, and which topics there are."""
    from pyspark.errors import AnalysisException, ParseException

    views(spark, log, query, read)
    try:
        return spark.sql(query)
    except (AnalysisException, ParseException) as error:
        first = str(error).split("\n\n", 1)[0].split("; line ", 1)[0].strip()
        names = ", ".join(sorted(topic.name for topic in log.topics())) or "none"
        hint = f"topics are: {names}; names with dots or dashes need `backticks`"
        raise BadValue(f"this query can't be asked: {first}", hint) from None
