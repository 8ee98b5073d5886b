"""A Spark session that is ready for the log: Java is found, workers run this Python, nothing listens to the network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from embarcadero.spark.interpreter import on_this_machine, prepare
from embarcadero.spark.java import find_java
from embarcadero.spark.versions import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNDER_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit, which then has chosen Java and the master

_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Rows go to Python in batches of 10,000 by default. Spark asks after each row how large the batch is by now, and
    # for a map or a list without values that takes as long as the batch has rows: half of the JVM's time at 1,000.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "400",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_ON_THIS_MACHINE: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"


def session(
    app: str = "embarcadero", master: str | None = None, config: Mapping[str, str] | None = None
) -> SparkSession:
    """A Spark session, or the one that there is, with our defaults below `config`.

    `master` is any URL that Spark knows; None: what `spark-submit` chose, else all cores of this machine. Raises
    NotAvailable with what to install when Java or PySpark are missing or too old.

        spark = embarcadero.spark.session(config={"spark.driver.memory": "4g", "spark.ui.enabled": "true"})
        spark = embarcadero.spark.session(master="spark://10.0.0.7:7077")
    """
    check_pyspark()
    if _UNDER_SUBMIT not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
        master = "local[*]" if master is None else master
        prepare(os.environ, master)
    local = on_this_machine(master)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings(local, config or {}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def settings(local: bool, config: Mapping[str, str]) -> dict[str, str]:
    """What a session is started with: our defaults, and the caller's word above them."""
    quiet = f"-Dlog4j2.configurationFile={files('embarcadero.spark') / 'log4j2.properties'}"
    chosen = {**_ALWAYS, **(_ON_THIS_MACHINE if local else {}), **config}
    if "log4j" not in chosen.get(_JAVA_OPTIONS, ""):
        chosen[_JAVA_OPTIONS] = f"{chosen.get(_JAVA_OPTIONS, '')} {quiet}".strip()
    return chosen
