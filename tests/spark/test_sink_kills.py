"""Exactly once under kills: tasks, the driver between two commits, executors during reads and writes.

The two commits are the sink's and Spark's. One cluster of executors serves all of it: it takes long to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embarcadero as emb
from tests.spark.conftest import QUICK_START
from tests.spark.sink_driver import READ
from tests.spark.test_sink import ids, stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
ROWS = 300  # of a file
TOPIC = "written"
READ_TOPIC, READ_ROWS = "read", 2_000
JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def prepare(log: emb.Log, topic: str, folder: Path, files: int, **settings: Any) -> None:
    """A topic, and files whose rows belong in it."""
    log.create_topic(topic, replicas=1, schema=SCHEMA, **settings)
    (folder / "in").mkdir()
    for number in range(files):
        ids = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"id": list(ids), "name": [f"row {n} " + "x" * 100 for n in ids]}, schema=SCHEMA)
        pq.write_table(table, folder / "in" / f"{number}.parquet")
        os.utime(folder / "in" / f"{number}.parquet", (number, 1_000_000 + number))


def drive(
    log: emb.Log, topic: str, folder: Path, faults: list[dict[str, Any]], master: str, read: str | None = None,
    **config: str,
) -> int:  # fmt: skip
    """One run of a driver, which reads a topic first if one is named; its exit code."""
    plan = {
        "folder": str(folder), "faults": faults, "master": master, "config": config | {JAVA_OPTIONS: QUICK_START},
        "options": {"brokers": log.address, "topic": topic, "batchBytes": "2000"},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan if read is None else plan | {"read": read}))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "SPARK_WORKER_DIR": str(folder / "workers"),
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # executors run the first python3 there
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.spark.sink_driver", str(folder / "plan.json")]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=300, check=False)
    (folder / "output.txt").write_bytes(ended.stdout + ended.stderr)
    return ended.returncode


def struck(folder: Path) -> set[str]:
    """The faults that happened."""
    return {flag.name for flag in folder.glob("struck-*")}


@pytest.fixture(scope="module")
def first_life(log: emb.Log, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver after the kills.

    Two executors were each killed halfway: the first while it read a topic, the second while it staged rows. Then the
    driver was killed after a task had staged all of its rows.
    """
    folder = tmp_path_factory.mktemp("lives")
    prepare(log, TOPIC, folder, 4, order=5)
    log.create_topic(READ_TOPIC, replicas=1, order=5)
    with log.publisher(READ_TOPIC, ack=2, batch_bytes=1_000) as publisher:
        for future in [publisher.send(b"%d" % number) for number in range(READ_ROWS)]:
            future.result(60)
    paths = {"spark.executorEnv.PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "spark.executor.memory": "512m"}
    faults = [
        {"batch": READ, "task": 1, "when": "half", "what": "executor"},
        {"batch": 0, "task": 1, "when": "half", "what": "executor"},
        {"batch": 1, "task": 0, "when": "done", "what": "driver"},
    ]
    assert drive(log, TOPIC, folder, faults, "local-cluster[2,1,1024]", read=READ_TOPIC, **paths) != 0
    return folder


def output(folder: Path) -> str:
    """The last lines of a driver's log."""
    return (folder / "output.txt").read_text()[-3000:]


@pytest.mark.timeout(600)
def test_a_read_whose_executor_is_killed_has_every_record_once(first_life: Path) -> None:
    """Half of a task's rows were passed on when its executor died."""
    assert f"struck-{READ}-1-half" in struck(first_life), output(first_life)

    rows = json.loads((first_life / "read.json").read_text())
    assert sorted(rows) == [[number, number] for number in range(READ_ROWS)]


@pytest.mark.timeout(600)
def test_under_all_kills_every_row_is_there_once(spark: SparkSession, log: emb.Log, first_life: Path) -> None:
    """Three runs of one query: the first is above.

    A task of the second driver fails in the middle, and that driver is killed after the decision on its last
    micro-batch, before any of its rows is published.
    """
    before = struck(first_life)
    assert {"struck-0-1-half", "struck-1-0-done"} <= before, output(first_life)
    faults = [
        {"batch": 1, "task": 1, "when": "half", "what": "task"},
        {"batch": 2, "task": -1, "when": "publish", "what": "driver"},
    ]
    assert ids(log, TOPIC) == list(range(ROWS))
    assert drive(log, TOPIC, first_life, faults, "local[2,3]") != 0
    assert len(struck(first_life) - before) == 2, output(first_life)
    assert ids(log, TOPIC) in (list(range(2 * ROWS)), list(range(3 * ROWS)))  # the sweep may have been faster
    stream(spark, log, TOPIC, first_life, batchBytes="2000").awaitTermination()

    assert ids(log, TOPIC) == list(range(4 * ROWS))
