"""Spark workers write the files of the tiering job: one task per span, each reading from the brokers directly.

Planning and committing stay in tier/job.py. A task that Spark repeats, or runs twice at the same time, writes another
file under another name. The driver gets one file per span and commits it; the other files are garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from embarcadero.client.api.sync_log import Log
from embarcadero.config.table import TierKeys as TierConfig
from embarcadero.errors import EmbarcaderoError, NotAvailable, OutcomeUnknown
from embarcadero.limits import TIER_SPARK_IDLE_S
from embarcadero.spark.processes import check_installed
from embarcadero.tier.job import AutoEngine, Engine, EngineKind, ProcessEngine, SpanWork, do_work
from embarcadero.tier.parquet import FileFacts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER: Final = "local[*]"
_ANSWER: Final = "number long, facts string"


class SparkEngine:
    """Writes files with an existing session (`spark`), or with its own session on a master.

    Its own session begins with the first files, and ends, with its Java process, after `idle_s` without any.
    """

    def __init__(
        self,
        brokers: str,
        master: str | None = None,
        spark: SparkSession | None = None,
        idle_s: float = TIER_SPARK_IDLE_S,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._brokers, self._master, self._given = brokers, master, spark
        self._idle_s, self._clock = idle_s, clock
        self._own: SparkSession | None = None
        self._used_s = 0.0

    @property
    def name(self) -> str:
        """The name that `status` shows."""
        return "spark"

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        """Write the files of all spans, one task a span. Raises OutcomeUnknown with the reason if that fails."""
        try:
            return _written(self._given or self._session(), self._brokers, works)
        except EmbarcaderoError:
            raise
        except Exception as error:  # the Java process did not start, or died: each library raises another type
            self.close()
            raise OutcomeUnknown(
                f"Spark does not answer: {type(error).__name__}: {error}"[:500],
                "nothing was committed, and Spark is started again; if this error persists, see the log of the job",
            ) from error
        finally:
            self._used_s = self._clock()

    def _session(self) -> SparkSession:
        if self._own is None:
            from embarcadero.spark.processes import session

            self._own = session("embarcadero tier", self._master)
        return self._own

    def release_idle(self) -> float | None:
        """End an own session that was idle for long. Return the seconds until then; None if there is no session."""
        if self._own is None:
            return None
        remaining_s = self._used_s + self._idle_s - self._clock()
        if remaining_s > 0:
            return remaining_s
        self.close()
        return None

    def close(self) -> None:
        """End an own session."""
        if self._own is not None:
            from embarcadero.spark.processes import end_session

            own, self._own = self._own, None
            end_session(own)


def chosen_kind(config: TierConfig) -> EngineKind:
    """The engine of `up --tier`, as configured and as this machine allows.

    Raises NotAvailable if `tier.engine` or `tier.master` asks for Spark, and PySpark or Java is missing.
    """
    wanted = config.engine or (EngineKind.SPARK if config.master else "")
    if wanted == EngineKind.PROCESS:
        return EngineKind.PROCESS
    try:
        check_installed()
    except NotAvailable as error:
        if wanted != EngineKind.SPARK:
            return EngineKind.PROCESS
        key = f"tier.engine is {config.engine}" if config.engine else f"tier.master is {config.master}"
        raise NotAvailable(f"{key}, and {error.message}", f"{error.hint}; or set tier.engine to process") from None
    return EngineKind(wanted or EngineKind.SPARK)


def engine_of(kind: EngineKind, log: Log, config: TierConfig) -> Engine:
    """The engine of this kind. Spark is not started yet."""
    if kind is EngineKind.PROCESS:
        return ProcessEngine(log)
    spark = SparkEngine(log.address, config.master or _MASTER)
    return spark if kind is EngineKind.SPARK else AutoEngine(spark, ProcessEngine(log))


def _written(spark: SparkSession, brokers: str, works: list[SpanWork]) -> list[FileFacts]:
    texts = [msgspec.json.encode(work) for work in works]

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from embarcadero.spark.processes import shared_log

        for batch in batches:
            for number in batch.column(0).to_pylist():
                facts = do_work(shared_log(brokers), msgspec.json.decode(texts[number], type=SpanWork))
                yield pa.RecordBatch.from_pydict({"number": [number], "facts": [msgspec.json.encode(facts).decode()]})

    from pyspark.errors import PySparkException

    frame: Any = spark.range(0, len(works), 1, len(works))
    try:
        rows = frame.mapInArrow(write, _ANSWER).collect()
    except PySparkException as error:
        raise _task_failure(error) from error
    return [msgspec.json.decode(row.facts, type=FileFacts) for row in sorted(rows, key=lambda row: int(row.number))]


def _task_failure(error: Exception) -> EmbarcaderoError:
    """The error of a failed task: the last line of its traceback that names one."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line.startswith("embarcadero.errors.")]
    reason = reasons[-1].removeprefix("embarcadero.errors.") if reasons else lines[0] if lines else "no reason given"
    return OutcomeUnknown(
        f"Spark did not write all files: {reason[:500]}", "nothing was committed; the job tries again"
    )
