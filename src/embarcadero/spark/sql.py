"""SQL over topics: each one is a view, always current, wherever its records are."""

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
        known = sorted(topic.name for topic in log.topics())
        more = len(known) - _NAMES_SHOWN
        names = ", ".join(known[:_NAMES_SHOWN]) or "none"
        names += f" and {more} more (`embarcadero topic list`)" if more > 0 else ""
        hint = f"topics are: {names}; names with dots or dashes need `backticks`"
        raise BadValue(f"this query can't be asked: {first}", hint) from None


def run_job(spark: SparkSession, log: Log, file: Path, arguments: list[str]) -> None:
    """Run a Python file as a program with `spark`, `log` and `brokers` at hand; `sys.argv` has its arguments.

    Whatever it raises is raised here; SystemExit as well.
    """
    if not file.is_file():
        raise BadValue(f"no file {file}", "name a Python file; it finds `spark`, `log` and `brokers` ready")
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
