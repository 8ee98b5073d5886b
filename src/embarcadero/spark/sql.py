"""SQL over topics: each topic is a view, always current, whether its records are in memory, on disk or in a table."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from embarcadero.client.api.sync_log import Log
from embarcadero.errors import BadValue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAMES_SHOWN: Final = 20  # topics that an error names
_LOOKS_AROUND: Final = re.compile(r"^\s*show\b", re.IGNORECASE)


def view(spark: SparkSession, log: Log, topic: str, read: str = "durable") -> DataFrame:
    """Register a topic as a temporary view of its own name, and return the frame that the view reads.

    `read` is "durable" or "ordered". Raises UnknownTopic if the topic does not exist.

        view(spark, log, "orders")
        spark.sql("select city, sum(amount_cents) from orders group by city").show()
    """
    frame = spark.read.format("embarcadero").option("brokers", log.address).option("topic", topic)
    found = frame.option("read", read).load()
    found.createOrReplaceTempView(f"`{topic}`")
    return found


def views(spark: SparkSession, log: Log, query: str | None = None, read: str = "durable") -> list[str]:
    """Register every topic as a view; with a `query` only topics that it could name. Return the names of the views."""
    topics = [topic.name for topic in log.topics()]
    wanted = topics if query is None else mentioned(query, topics)
    for topic in wanted:
        view(spark, log, topic, read)
    return wanted


def mentioned(query: str, topics: Iterable[str]) -> list[str]:
    """The topics whose names are in a query; all topics for a query that lists them (`show tables`)."""
    if _LOOKS_AROUND.match(query):
        return list(topics)
    text = query.lower()
    return [topic for topic in topics if topic.lower() in text]


def ask(spark: SparkSession, log: Log, query: str, read: str = "durable") -> DataFrame:
    """Run a query over topics and return its result as a frame.

    Every topic whose name is in the query becomes a view first. `read` is "durable" or "ordered". Raises BadValue with
    Spark's reason and the names of all topics if the query is wrong.

        ask(spark, log, "select city, count(*) from orders group by city").show()
    """
    from pyspark.errors import AnalysisException, ParseException

    views(spark, log, query, read)
    try:
        return spark.sql(query)
    except (AnalysisException, ParseException) as error:
        first = str(error).split("\n\n", 1)[0].split("; line ", 1)[0].strip()
        known = sorted(topic.name for topic in log.topics())
        more = len(known) - _NAMES_SHOWN
        names = ", ".join(known[:_NAMES_SHOWN]) or "none"
        names += f" and {more} more (`embarcadero topic list`)" if more > 0 else ""
        hint = f"topics are: {names}; names with dots or dashes need `backticks`"
        raise BadValue(f"Spark refuses this query: {first}", hint) from None


def run_job(spark: SparkSession, log: Log, file: Path, arguments: list[str]) -> None:
    """Run a Python file as a program with `spark`, `log` and `brokers` as globals; `sys.argv` has its arguments.

    Every topic is a view. Raises BadValue if there is no such file, and any error of the program, SystemExit as well.
    """
    if not file.is_file():
        raise BadValue(f"file {file} does not exist", "name a Python file; it finds `spark`, `log` and `brokers` ready")
    views(spark, log)
    before, folder = sys.argv, str(file.resolve().parent)
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(
            str(file), init_globals={"spark": spark, "log": log, "brokers": log.address}, run_name="__main__"
        )
    finally:
        sys.argv = before
        sys.path.remove(folder)
