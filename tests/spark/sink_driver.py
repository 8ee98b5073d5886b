"""A driver in a process of its own, for tests that kill, with injected faults.

It reads a topic if one is named, then runs files -> shuffle -> topic: `python -m tests.spark.sink_driver plan.json`. A
fault strikes once. `batch` and `task` name the work in which it strikes (READ: the read). `when` is the moment: half
(half of its rows are read, or staged), done (all of them are), append, decide, publish, finish (the commit reaches that
step), half without a task (the commit has published some batches), commit (the sink has committed, Spark has not
recorded it yet). `what` is the effect: the task raises, or the driver's or executor's JVM is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import InputPartition, WriterCommitMessage

from embarcadero.spark import session
from embarcadero.spark.read.options import read_options
from embarcadero.spark.read.readers import BatchReader, frame_schema, span_reader
from embarcadero.spark.read.tasks import SpanReader
from embarcadero.spark.sink import StreamSink, stream_writer
from embarcadero.spark.source import EmbarcaderoSource
from embarcadero.staging.ledger import Publication, TopicLedger

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_SENT = 5  # batches of a commit are in flight before it is killed halfway

READ = -1
"""The "batch" of a task that reads."""


@dataclass(frozen=True)
class Fault:
    """A fault and its place; it strikes once."""

    folder: str
    batch: int
    task: int
    when: str
    what: str

    def strikes(self, batch: int, task: int, when: str) -> bool:
        """Whether it is time; true only once."""
        flag = Path(self.folder) / f"struck-{self.batch}-{self.task}-{self.when}"
        if (batch, task, when) != (self.batch, self.task, self.when) or flag.exists():
            return False
        flag.touch()
        return True

    def strike(self) -> None:
        """Strike."""
        if self.what == "executor":  # the worker's parent is Spark's daemon, whose parent is the executor
            daemon = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
            os.kill(int(daemon[1]), signal.SIGKILL)
        elif self.what == "driver":
            os.kill(int((Path(self.folder) / "driver.pid").read_text()), signal.SIGKILL)
        raise RuntimeError("planted")


@dataclass(frozen=True)
class FaultySink(StreamSink):
    """The sink, with faults."""

    faults: tuple[Fault, ...] = ()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task."""
        context = TaskContext.get()
        assert context is not None
        batch, task = int(context.getLocalProperty("streaming.sql.batchId") or 0), context.partitionId()

        def halved() -> Iterator[pa.RecordBatch]:
            for rows in iterator:
                half = rows.num_rows // 2
                yield rows.slice(0, half)
                for fault in self.faults:
                    if fault.strikes(batch, task, "half"):
                        fault.strike()
                yield rows.slice(half)

        made = super().write(halved())
        for fault in self.faults:
            if fault.strikes(batch, task, "done"):
                fault.strike()
        return made

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """On the driver."""
        for step in ("append", "decide", "publish", "finish"):
            self._kill_before(TopicLedger, step, step, batchId)
        self._kill_before(Publication, "_send", "half", batchId, calls=_SENT)
        super().commit(messages, batchId)
        for fault in self.faults:
            if fault.strikes(batchId, -1, "commit"):
                fault.strike()

    def _kill_before(self, kind: type, step: str, when: str, batch: int, calls: int = 1) -> None:
        """Let a fault strike when the commit reaches a step, or reaches it for the n-th time."""
        whole, done = getattr(kind, step), []

        async def struck(*given: Any) -> Any:
            done.append(step)
            for fault in self.faults:
                if len(done) >= calls and fault.strikes(batch, -1, when):
                    fault.strike()
            return await whole(*given)

        setattr(kind, step, struck)


class FaultyReader(BatchReader):
    """The reader, with faults."""

    def __init__(self, reader: SpanReader, faults: tuple[Fault, ...]) -> None:
        super().__init__(reader)
        self._faults = faults

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task: half of its rows are passed on when it strikes."""
        context = TaskContext.get()
        assert context is not None
        for rows in super().read(partition):
            half = rows.num_rows // 2
            yield rows.slice(0, half)
            for fault in self._faults:
                if fault.strikes(READ, context.partitionId(), "half"):
                    fault.strike()
            yield rows.slice(half)


class FaultySource(EmbarcaderoSource):
    """The data source, with faults."""

    def schema(self) -> StructType:
        """As in production, without faults."""
        return frame_schema(self._plain()[0])

    def reader(self, schema: StructType) -> FaultyReader:
        """With the faults that the plan has."""
        options, faults = self._plain()
        return FaultyReader(span_reader(read_options(options, streaming=False), schema, fail_on_lost=False), faults)

    def _plain(self) -> tuple[dict[str, str], tuple[Fault, ...]]:
        """The options that the data source knows, and the faults."""
        options = dict(self.options)
        plan = json.loads(options.pop("plan"))
        return options, tuple(Fault(plan["folder"], **fault) for fault in plan["faults"])

    @classmethod
    def name(cls) -> str:
        """As `format` knows it."""
        return "faulty"

    def streamWriter(self, schema: StructType, overwrite: bool) -> FaultySink:  # noqa: N802
        """With the faults that the plan has."""
        options, faults = self._plain()
        return FaultySink(stream_writer(options, schema, overwrite).tasks, faults)


def main(path: str) -> None:
    """Read the named topic, then run the stream until all files are in the topic."""
    plan = json.loads(Path(path).read_text())
    folder = Path(plan["folder"])
    spark = session("driver", plan["master"], plan["config"])
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    (folder / "driver.pid").write_text(str(gateway.proc.pid))
    spark.dataSource.register(FaultySource)
    if "read" in plan:
        asked = {"brokers": plan["options"]["brokers"], "topic": plan["read"], "minPartitions": "4"}
        frame = spark.read.format("faulty").options(**asked, plan=json.dumps(plan)).load()
        rows = frame.selectExpr("seq", "cast(string(value) as int) number").collect()
        (folder / "read.json").write_text(json.dumps([[row.seq, row.number] for row in rows]))
    files = spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", 1)
    writer = files.parquet(str(folder / "in")).repartition(3, "id").writeStream.format("faulty")
    options = {"checkpointLocation": str(folder / "checkpoint"), "plan": json.dumps(plan), **plan["options"]}
    writer.options(**options).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
