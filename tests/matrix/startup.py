"""The cost of Python when Spark starts: `python -m tests.matrix.startup` prints CPU seconds, as JSON.

`first_query`: of all Python processes of a new session, until its first query over a topic has ended. `first_offset`:
of the process that plans a stream, until it has reported its first offset. Driver and JVM do not count.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import embarcadero as emb
from embarcadero.spark import session
from tests.matrix.frames import load, orders, stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SOURCE: Final = "python_streaming_source_runner"
_ROUNDS: Final = 5


def times(pid: int) -> tuple[int, float, float]:
    """The parent of a process, its CPU seconds, and those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    own, ended = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return int(fields[1]), own / _TICKS, ended / _TICKS


def below(pid: int) -> Iterator[int]:
    """All descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents.setdefault(times(int(entry.name))[0], []).append(int(entry.name))
            except OSError:
                continue
    waiting = [pid]
    while waiting:
        found = parents.get(waiting.pop(), [])
        waiting += found
        yield from found


def jvm(spark: SparkSession) -> int:
    """The process of the session's JVM."""
    return int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]


def python_seconds(spark: SparkSession) -> float:
    """CPU seconds of all Python processes that the JVM has started."""
    java = jvm(spark)
    return times(java)[2] + sum(sum(times(pid)[1:]) for pid in below(java))


def first_query(spark: SparkSession, log: emb.Log) -> float:
    """Count the rows of a topic; this is the first query of the session."""
    assert load(spark, log, "orders").groupBy("city").count().count() == 3
    return python_seconds(spark)


def first_offset(spark: SparkSession, log: emb.Log) -> float:
    """Start a stream and wait until Spark knows an offset."""
    with tempfile.TemporaryDirectory() as folder:
        query = stream(spark, log, "orders").writeStream.format("noop").option("checkpointLocation", folder).start()
        while not query.recentProgress:
            time.sleep(0.01)
        source = [pid for pid in below(jvm(spark)) if _SOURCE in Path(f"/proc/{pid}/cmdline").read_text()]
        spent = sum(times(pid)[1] for pid in source)
        query.stop()
    return spent


def main() -> None:
    """Measure once in this process: a session is new only once."""
    with emb.local(brokers=2, replicas=1) as log:
        orders(log, "orders", 3_000)
        spark = session("startup", "local[2]")
        told = {"first_query": [first_query(spark, log)], "first_offset": []}
        told["first_offset"] = [first_offset(spark, log) for _ in range(_ROUNDS)]
        spark.stop()
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
