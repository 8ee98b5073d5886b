"""Tiering by the workers of Spark: the same job, files written by tasks; what tasks say when they fail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import embarcadero as emb
from embarcadero.errors import OutcomeUnknown
from embarcadero.spark.tiering import spark_run
from embarcadero.tier.job import TierJob, Work
from embarcadero.tier.parquet import Span
from embarcadero.tier.settings import TierSettings
from tests.tier.truth import Truth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_workers_write_the_files(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Every record once, in files of several tasks; Spark reads them as a table like any other."""
    log.create_topic(topic, order=5)
    truth = Truth(log, topic, TierSettings.local(tmp_path, file_bytes=65_536, hot_retention_s=0))
    truth.publish(2_000)
    with TierJob(log, topic, truth.settings, spark_run(log.address, spark=spark), holder="spark") as job:
        done = job.cycle()
        assert done.files > 2
        truth.publish(10)
        job.cycle()
    assert truth.problems() == []
    assert log.tail(topic).hot_seq == 2_010
    frame = spark.read.parquet(f"{truth.settings.warehouse}/embarcadero/{topic}/data")
    assert frame.count() == 2_010
    assert frame.columns[:7] == ["key", "value", "headers", "timestamp", "_seq", "_timestamp", "_partition"]


def test_a_task_that_fails_tells_why(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Nothing is committed, and the error is the one that the task met."""
    log.create_topic(topic, order=5)
    span = Span(lane=99, start=0, stop=5, start_seq=0, stop_seq=5)
    work = Work(topic=topic, span=span, location=f"file://{tmp_path}/t", epoch=1, properties={})
    with pytest.raises(OutcomeUnknown, match="lane 99 is not a lane"):
        spark_run(log.address, spark=spark)([work])
