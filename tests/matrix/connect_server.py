"""A Spark Connect server for tests, as a process of its own: its clients start no JVM."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import pyspark

from embarcadero.spark.processes import find_java, prepare
from tests.spark.conftest import QUICK_START

WAIT_S = 120


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """Its address; tables and logs are in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = dict(os.environ) | {"JAVA_HOME": str(find_java())}
    prepare(environ, "local[2]")
    log4j = f"-Dlog4j2.configurationFile={files('embarcadero.spark') / 'log4j2.properties'}"
    config = {
        "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"{log4j} {QUICK_START}", "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": 2, "spark.sql.warehouse.dir": folder / "warehouse",
    }  # fmt: skip
    command = [f"{pyspark.__path__[0]}/bin/spark-submit", "--master", "local[2]"]
    command += [word for key, value in config.items() for word in ("--conf", f"{key}={value}")]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(server, port, folder)
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(WAIT_S)


def _wait(server: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    give_up = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            told = (folder / "server.log").read_text()
            assert server.poll() is None, told
            assert time.monotonic() < give_up, told
            time.sleep(0.1)
