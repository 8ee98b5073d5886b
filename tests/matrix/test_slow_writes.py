"""Writes that take minutes: a large write, a driver killed at every step, a long outage during a commit.

With one PySpark only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.types import staging_topic
from tests.matrix.frames import load
from tests.spark.test_sink import ids, save, stream
from tests.spark.test_sink_kills import ROWS, drive, output, prepare, struck

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LARGE_MB: Final = int(os.environ.get("LARGE_MB", "5000"))
AWAY_S: Final = os.environ.get("AWAY_S", "180")
SWEPT_S: Final = 600.0
STEPS: Final = ["done", "append", "decide", "publish", "half", "finish", "commit"]
"""Steps before which the driver is killed.

All tasks have staged, the manifest, the decision, the first batch, the third batch, the end of the epoch; Spark's own
note that the micro-batch is over.
"""


@pytest.mark.timeout(3_600)
def test_a_large_write(spark: SparkSession, log: emb.Log) -> None:
    """5 GB in one commit, on brokers with little memory: each row once, and staged batches are dropped soon."""
    log.create_topic("large", replicas=1, schema=pa.schema([("id", pa.int64()), ("text", pa.string())]))
    rows = LARGE_MB * 1000
    save(log, "large", spark.range(0, rows, 1, 16).selectExpr("id", "repeat(chr(65 + id % 26), 990) text"))

    found = load(spark, log, "large", columns="id").selectExpr("count(*) n", "sum(id) s", "max(id) m").first()
    assert found is not None
    assert (found.n, found.s, found.m) == (rows, rows * (rows - 1) // 2, rows - 1)
    staging, give_up = staging_topic(log.describe("large").id), time.monotonic() + SWEPT_S
    while any(lane.start_index < lane.index for lane in log.tail(staging).lanes):
        assert time.monotonic() < give_up, "staged batches are still there"
        time.sleep(1)


@pytest.mark.timeout(1_800)
def test_a_driver_that_is_killed_at_every_step(spark: SparkSession, log: emb.Log, tmp_path: Path) -> None:
    """Seven runs of one query, each killed at another step of its first micro-batch; in the end each row is there once.

    Epochs that the sweep completes meanwhile are already done for the next driver.
    """
    prepare(log, "killed", tmp_path, len(STEPS) + 1, order=5)
    for number, step in enumerate(STEPS):
        fault = {"batch": number, "task": 0 if step == "done" else -1, "when": step, "what": "driver"}
        assert drive(log, "killed", tmp_path, [fault], "local[2,4]") != 0, output(tmp_path)
        assert len(struck(tmp_path)) == number + 1, (step, output(tmp_path))
        seen = ids(log, "killed")
        assert seen[: number * ROWS] == list(range(number * ROWS))
    stream(spark, log, "killed", tmp_path, batchBytes="2000").awaitTermination()
    assert ids(log, "killed") == list(range((len(STEPS) + 1) * ROWS))


@pytest.mark.timeout(3_600)
def test_a_commit_during_an_outage_of_all_brokers() -> None:
    """The tests of `make test`, with three minutes, and the clients' default timeouts."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1800"]
    ended = subprocess.run(
        [*command, "tests/spark/test_commit_trouble.py", "-k", "outlives", "-m", ""], cwd=root, check=False,
        env=os.environ | {"AWAY_S": AWAY_S}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
