"""Spark Connect and Declarative Pipelines, as the examples have them, on a server that is a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import embarcadero as emb
from embarcadero.spark.versions import ADMISSION_CONTROL
from tests.examples.test_examples import EXAMPLES, load
from tests.matrix.connect_server import connect_server


@pytest.mark.timeout(600)
def test_a_connect_server_runs_jobs_and_declarative_pipelines(log: emb.Log, tmp_path: Path) -> None:
    """Source, sink, views and errors over the wire; a topic becomes a streaming table, run by run."""
    log.create_topic("clicks")

    def click(first: int, last: int) -> None:
        with log.publisher("clicks", ack=2) as publisher:
            for number in range(first, last):
                publisher.send(b"/" if number % 2 else b"/cart", key=b"ann")

    with connect_server(tmp_path) as remote:
        example = load("spark_connect")  # imported here, so that its errors are visible
        assert run([str(EXAMPLES / f"{example.__name__}.py"), remote, log.address]).splitlines() == [
            "Lima: 167 large orders", "Oslo: 166 large orders", "Rome: 167 large orders"
        ]  # fmt: skip
        assert log.tail("large").durable_seq == 500
        while ADMISSION_CONTROL and {reader.reader for reader in log.readers("orders")} != {"large-orders"}:
            time.sleep(0.05)  # reported within a second; on 4.1 a query with availableNow ends before it can report

        spec = tmp_path / "pipeline" / "spark-pipeline.yml"
        shutil.copytree(EXAMPLES / "spark_pipeline", spec.parent)
        text = spec.read_text().replace("file:///tmp/embarcadero-shop", f"file://{tmp_path}/storage")
        spec.write_text(text.replace("127.0.0.1:9092", log.address))
        for first, last in ((0, 30), (30, 50)):
            click(first, last)
            told = run(["-m", "pyspark.pipelines.cli", "run", "--spec", str(spec)], SPARK_REMOTE=remote)
            assert "Run is COMPLETED" in told
        look = [str(Path(__file__).parent / "connect_look.py"), remote, log.address]
        assert json.loads(run(look)) == {
            "clicks": [[number, "ann"] for number in range(50)],
            "by page": [["/", 25], ["/cart", 25]],
            "views": ["clicks", "large", "orders"],
            "error": "UnknownTopic",
        }


def run(arguments: list[str], **environ: str) -> str:
    """The output of a Python program; a process with a JVM of its own can't have a session on a server as well."""
    without = {key: value for key, value in os.environ.items() if not re.match("PYSPARK|SPARK", key)}
    done = subprocess.run(
        [sys.executable, *arguments], env=without | environ, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)
