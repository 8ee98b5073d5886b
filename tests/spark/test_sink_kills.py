"""Exactly once when things die: tasks, the driver between the sink's commit and Spark's, an executor in the middle."""

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
from tests.spark.test_sink import ids, stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
ROWS = 300  # of a file
JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def prepare(log: emb.Log, topic: str, folder: Path, files: int, **settings: Any) -> None:
    """A topic, and files whose rows are to be in it."""
    log.create_topic(topic, replicas=1, schema=SCHEMA, **settings)
    (folder / "in").mkdir()
    for number in range(files):
        ids = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"id": list(ids), "name": [f"row {n} " + "x" * 100 for n in ids]}, schema=SCHEMA)
        pq.write_table(table, folder / "in" / f"{number}.parquet")
        os.utime(folder / "in" / f"{number}.parquet", (number, 1_000_000 + number))


def drive(log: emb.Log, topic: str, folder: Path, faults: list[dict[str, Any]], master: str, **config: str) -> int:
    """One life of a driver; its exit code."""
    plan = {
        "folder": str(folder), "faults": faults, "master": master, "config": config | {JAVA_OPTIONS: QUICK_START},
        "options": {"brokers": log.address, "topic": topic, "batchBytes": "2000"},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan))
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "SPARK_WORKER_DIR": str(folder / "workers"),
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.spark.sink_driver", str(folder / "plan.json")]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, timeout=300, check=False)
    (folder / "output.txt").write_bytes(ended.stdout + ended.stderr)
    return ended.returncode


def struck(folder: Path) -> set[str]:
    """The faults that happened."""
    return {flag.name for flag in folder.glob("struck-*")}


@pytest.mark.timeout(600)
def test_whatever_dies_every_row_is_there_once(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """Three lives of one query. An executor is killed after half of its task's batches, and the driver after a task; a
    task of the second driver fails after half of its batches, and that driver is killed between two commits."""
    prepare(log, topic, tmp_path, 4, order=5)
    paths = {"spark.executorEnv.PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "spark.executor.memory": "512m"}
    faults = [
        {"batch": 0, "task": 1, "when": "half", "what": "executor"},
        {"batch": 1, "task": 0, "when": "done", "what": "driver"},
    ]
    assert drive(log, topic, tmp_path, faults, "local-cluster[2,1,1024]", **paths) != 0
    assert struck(tmp_path) == {"struck-0-1-half", "struck-1-0-done"}, (tmp_path / "output.txt").read_text()[-3000:]
    faults = [
        {"batch": 1, "task": 1, "when": "half", "what": "task"},
        {"batch": 2, "task": -1, "when": "commit", "what": "driver"},
    ]
    assert drive(log, topic, tmp_path, faults, "local[2,3]") != 0
    assert len(struck(tmp_path)) == 4, (tmp_path / "output.txt").read_text()[-3000:]
    assert ids(log, topic) == list(range(3 * ROWS))
    stream(spark, log, topic, tmp_path, batchBytes="2000").awaitTermination()

    assert ids(log, topic) == list(range(4 * ROWS))
