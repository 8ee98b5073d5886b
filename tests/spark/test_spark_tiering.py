"""Tiering by the workers of Spark: the same job, files written by tasks; errors of tasks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import embarcadero as emb
from embarcadero.errors import OutcomeUnknown
from embarcadero.spark.tiering import SparkEngine
from embarcadero.tier.job import SpanWork, TierJob
from embarcadero.tier.parquet import FileSpan
from embarcadero.tier.storage import TierSettings
from tests.spark.conftest import QUICK_START
from tests.tier.truth import Truth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_workers_write_the_files(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Every record once, in files of several tasks; Spark reads them as a table like any other."""
    log.create_topic(topic, order=5)
    truth = Truth(log, topic, TierSettings.local(tmp_path, file_bytes=65_536, hot_retention_s=0))
    truth.publish(2_000)
    with TierJob(log, topic, truth.settings, SparkEngine(log.address, spark=spark), holder="spark") as job:
        done = job.cycle()
        assert done.files > 2
        truth.publish(10)
        job.cycle()
    assert truth.problems() == []
    assert log.tail(topic).hot_seq == 2_010
    assert log.describe(topic).tier.engine == "spark"  # type: ignore[union-attr]
    frame = spark.read.parquet(f"{truth.settings.warehouse}/embarcadero/{topic}/data")
    assert frame.count() == 2_010
    assert frame.columns[:7] == ["key", "value", "headers", "timestamp", "_seq", "_timestamp", "_partition"]


def test_a_task_that_fails_reports_the_reason(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Nothing is committed, and the error is the task's own."""
    log.create_topic(topic, order=5)
    span = FileSpan(lane=99, start=0, stop=5, start_seq=0, stop_seq=5)
    work = SpanWork(topic=topic, span=span, location=f"file://{tmp_path}/t", epoch=1, properties={})
    with pytest.raises(OutcomeUnknown, match="lane 99 is not a lane"):
        SparkEngine(log.address, spark=spark).write([work])


ENGINE = """
import sys
from pathlib import Path
import embarcadero as emb
from embarcadero.spark.tiering import SparkEngine
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings

def report():
    from pyspark import SparkContext
    gateway = SparkContext._gateway
    print(0 if gateway is None else gateway.proc.pid, engine.release_idle() is None, flush=True)

now = [100.0]
address, topic, folder = sys.argv[1:]
engine = SparkEngine(address, "local[1]", idle_s=60, clock=lambda: now[0])
with emb.connect(address) as log:
    settings = TierSettings.local(Path(folder), hot_retention_s=3_600)
    with TierJob(log, topic, settings, engine, holder="own") as job:
        report()
        for idle_s in (61, 0):
            with log.publisher(topic, ack=2) as publisher:
                publisher.send(b"x").result(10)
            assert job.cycle().files == 1
            report()
            assert job.cycle().files == 0
            now[0] += idle_s
            report()
            report()
    sys.stdin.read()
"""


def test_java_runs_only_while_there_are_files_to_write(log: emb.Log, topic: str, tmp_path: Path) -> None:
    """It starts with the first files, ends when idle, starts again, and never outlives a process that is killed."""
    log.create_topic(topic, order=5)
    command = [sys.executable, "-c", ENGINE, log.address, topic, str(tmp_path)]
    environ = os.environ | {"JDK_JAVA_OPTIONS": QUICK_START}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().split() for _ in range(7)]
        pids = [int(pid) for pid, _ in told]
        assert [bool(pid) for pid in pids] == [False, True, True, False, True, True, True]
        assert [none == "True" for _, none in told] == [True, False, True, True, False, False, False]
        assert [alive(pid) for pid in dict.fromkeys(filter(None, pids))] == [False, True]
        process.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 60
    while alive(pids[-1]):
        assert time.monotonic() < give_up, "Java outlives the job"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie process does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
