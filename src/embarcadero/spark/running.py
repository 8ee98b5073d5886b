"""A user's own job with everything ready: a Spark session, a client, and each topic as a view."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from embarcadero.client.sync import Log
from embarcadero.errors import BadValue
from embarcadero.spark.sql import views

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
