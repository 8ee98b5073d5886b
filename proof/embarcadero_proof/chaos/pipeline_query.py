"""A Spark driver in its own process whose query has an operator that fails now and then.

pipeline_rounds.py kills and restarts it. Every start of the query has its own stamp, which is a column of its rows. So
a check can find out whether all rows of a micro-batch come from one start. A failed query restarts immediately.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from embarcadero.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[2,2]"
INJECTED: Final = "the operator fails"
COLUMNS: Final = "id bigint, file int, text string"
_BATCH_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Plan:
    """The configuration of the driver, read from a file."""

    folder: str
    addresses: list[str]
    topic: str
    seed: int
    failing: float  # share of the attempts of tasks that fail


def operator(plan: Plan, stamp: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for mapInArrow that raises in some attempts of tasks, after it has yielded some rows."""
    folder, seed, failing = plan.folder, plan.seed, plan.failing  # Spark sends plain values to its workers

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is None:
            raise RuntimeError("not a task of Spark")
        batch = context.getLocalProperty("streaming.sql.batchId")
        rng = random.Random(f"{seed} {stamp} {batch} {context.partitionId()} {context.attemptNumber()}")
        fails, after = rng.random() < failing, rng.randrange(3)
        for number, rows in enumerate(batches):
            if not (fails and number >= after):
                yield rows
                continue
            with (Path(folder) / "failures").open("a") as failures:
                failures.write(f"{stamp} {batch} {context.partitionId()}\n")
            raise ValueError(INJECTED)

    return passed_on


def run_query(spark: SparkSession, plan: Plan, stamp: str) -> None:
    """Run the query until it fails."""
    folder = Path(plan.folder)
    files = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    rows = files.repartition(3, "id").mapInArrow(operator(plan, stamp), files.schema)
    options = {
        "brokers": ",".join(plan.addresses), "topic": plan.topic, "checkpointLocation": str(folder / "checkpoint"),
        "batchBytes": str(_BATCH_BYTES),
    }  # fmt: skip
    stamped = rows.selectExpr("*", f"'{stamp}' stamp")
    stamped.writeStream.format("embarcadero").options(**options).start().awaitTermination()


def main(path: str, life: str) -> int:
    """Run the query again and again; end when killed, or when it fails for any other reason than the injected error."""
    from pyspark.errors import PySparkException

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that kills this one
    plan = msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    spark = session("rounds", MASTER, {"spark.sql.shuffle.partitions": "3"})
    start = 0
    while True:
        start += 1
        try:
            run_query(spark, plan, f"{life}.{start}")
        except PySparkException as error:
            if INJECTED not in str(error):
                raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
