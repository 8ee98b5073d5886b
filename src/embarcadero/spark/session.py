"""A Spark session that is ready for the log: Java is found, workers run this Python, nothing listens to the network.

Or one on a Spark Connect server, which has all that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from embarcadero.errors import BadValue, NotAvailable
from embarcadero.spark.machine import find_java, on_this_machine, prepare, unix_sockets
from embarcadero.spark.versions import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNDER_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit, which then has chosen Java and the master

_REMOTE: Final = re.compile(r"sc://[^\s/:;]+(:\d{1,5})?(/.*)?|sc://\[[0-9A-Fa-f:.]+\](:\d{1,5})?(/.*)?")
_ALWAYS_SQL: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Rows go to Python in batches of 10,000 by default. Spark asks after each row how large the batch is by now, and
    # for a map or a list without values that takes as long as the batch has rows: half of the JVM's time at 1,000.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "400",
}
_ALWAYS: Final = {
    **_ALWAYS_SQL,
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
    app: str = "embarcadero",
    master: str | None = None,
    config: Mapping[str, str] | None = None,
    *,
    remote: str | None = None,
    topics: bool = False,
    brokers: str | None = None,
) -> SparkSession:
    """A Spark session, or the one that there is, with our defaults below `config`.

    `master` is any URL that Spark knows; None: what `spark-submit` chose, else all cores of this machine. `remote` is
    the address of a Spark Connect server instead: its machines need embarcadero, this one needs no Java. With `topics`
    every topic of the cluster at `brokers` (None: as `embarcadero.connect()`) is a temporary view of its name. Raises
    NotAvailable with what to install when Java or packages are missing or too old, BadValue for a bad address.

        spark = embarcadero.spark.session(config={"spark.driver.memory": "4g", "spark.ui.enabled": "true"})
        spark = embarcadero.spark.session(master="spark://10.0.0.7:7077")
        spark = embarcadero.spark.session(remote="sc://10.0.0.7:15002", topics=True, brokers="10.0.0.8:9092")
        spark.sql("select city, count(*) from orders group by city").show()
    """
    check_pyspark()
    if brokers is not None and not topics:
        raise BadValue(f"brokers {brokers!r} without topics=True", "views need them; a read has the option `brokers`")
    if remote is not None:
        made = _remote_session(app, master, config or {}, remote)
    else:
        made = _own_session(app, master, config or {})
    if topics:
        _register_topics(made, brokers)
    return made


def _own_session(app: str, master: str | None, config: Mapping[str, str]) -> SparkSession:
    """A session whose driver runs beside this process."""
    if _UNDER_SUBMIT not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java())
        master = "local[*]" if master is None else master
        prepare(os.environ, master)
    local = on_this_machine(master)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if master is not None:
        builder = builder.master(master)
    for key, value in settings(local, {**unix_sockets(os.environ), **config}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _remote_session(app: str, master: str | None, config: Mapping[str, str], remote: str) -> SparkSession:
    """A session on a Spark Connect server. It has its own master, Java and workers; only SQL settings can be ours."""
    if master is not None:
        raise BadValue(f"master {master!r} and remote {remote!r} are two places", "give one: a server has its master")
    if not _REMOTE.fullmatch(remote):
        raise BadValue(
            f"remote {remote!r} is no address of a Spark Connect server",
            "use sc://host:port; the port of a server is 15002 unless spark.connect.grpc.binding.port says another",
        )
    try:
        import pyspark.sql.connect.session  # noqa: F401 - it looks for gRPC
    except ImportError as error:
        raise NotAvailable(
            f"a session on a Spark Connect server needs more packages: {error}",
            'pip install "embarcadero[spark-connect]"',
        ) from None
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).remote(remote)
    for key, value in {**_ALWAYS_SQL, **config}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _register_topics(spark: SparkSession, brokers: str | None) -> None:
    """Every topic as a temporary view of its name."""
    from embarcadero.client.api.sync_log import connect
    from embarcadero.spark.sql import views

    with connect(brokers) as log:
        views(spark, log)


def settings(local: bool, config: Mapping[str, str]) -> dict[str, str]:
    """What a session is started with: our defaults, and the caller's word above them."""
    quiet = f"-Dlog4j2.configurationFile={files('embarcadero.spark') / 'log4j2.properties'}"
    chosen = {**_ALWAYS, **(_ON_THIS_MACHINE if local else {}), **config}
    if "log4j" not in chosen.get(_JAVA_OPTIONS, ""):
        chosen[_JAVA_OPTIONS] = f"{chosen.get(_JAVA_OPTIONS, '')} {quiet}".strip()
    return chosen
