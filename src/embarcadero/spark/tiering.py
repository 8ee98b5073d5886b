"""The tiering job's files written by the workers of Spark: one task a span, each read from the brokers by itself.

Planning and committing stay where they are (tier/job.py). A task that is tried again, or twice at once, writes another
file under another name; the driver hears of one file a span, commits that, and the others are garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from embarcadero.errors import EmbarcaderoError, OutcomeUnknown
from embarcadero.tier.job import Run, Work, do_work
from embarcadero.tier.parquet import FileFacts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ANSWER: Final = "number long, facts string"


def spark_run(brokers: str, master: str | None = None, spark: SparkSession | None = None) -> Run:
    """Have spans written by a session that is there (`spark`), or by one of a master, begun with the first spans."""

    def run(works: list[Work]) -> Iterable[FileFacts]:
        from embarcadero.spark.session import session

        return _written(spark or session("embarcadero tier", master), brokers, works)

    return run


def _written(spark: SparkSession, brokers: str, works: list[Work]) -> list[FileFacts]:
    texts = [msgspec.json.encode(work) for work in works]

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from embarcadero.spark.connections import shared_log

        for batch in batches:
            for number in batch.column(0).to_pylist():
                facts = do_work(shared_log(brokers), msgspec.json.decode(texts[number], type=Work))
                yield pa.RecordBatch.from_pydict({"number": [number], "facts": [msgspec.json.encode(facts).decode()]})

    from pyspark.errors import PySparkException

    frame: Any = spark.range(0, len(works), 1, len(works))
    try:
        rows = frame.mapInArrow(write, _ANSWER).collect()
    except PySparkException as error:
        raise _told(error) from error
    return [msgspec.json.decode(row.facts, type=FileFacts) for row in sorted(rows, key=lambda row: int(row.number))]


def _told(error: Exception) -> EmbarcaderoError:
    """What went wrong in a task, in the last line of its traceback that names an error."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith("embarcadero.errors.")]
    reason = reasons[-1].removeprefix("embarcadero.errors.") if reasons else lines[0] if lines else "no reason given"
    return OutcomeUnknown(f"Spark did not write all files: {reason[:500]}", "nothing was committed; it is tried again")
