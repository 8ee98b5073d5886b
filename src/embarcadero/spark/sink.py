"""The sink: `df.write` and `df.writeStream` of format "embarcadero", each row in the topic exactly once.

Spark makes a writer on the driver for every write and every micro-batch, sends it to the tasks, and makes one more, in
another process, to commit. Rows are in the log, and seen by readers, when their task is done; the commit only completes
what tasks had to leave to the driver. `work.py` tells why nothing is written twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from embarcadero.errors import BadValue, Conflict, NotAvailable
from embarcadero.spark.connections import shared_log
from embarcadero.spark.shape import Shape, shape_of
from embarcadero.spark.work import Work
from embarcadero.spark.write_options import WriteOptions, write_options
from embarcadero.spark.writing import TaskWriter, Written

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"  # of a stream: its run, another one after each start


@dataclass(frozen=True, slots=True)
class Message(WriterCommitMessage):
    """What a task tells the driver."""

    written: Written


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """The writer of a stream. Raises what is wrong with options, topic or columns before any task runs."""
    options = write_options(given, streaming=True)
    if overwrite:
        raise BadValue("a topic keeps what was written into it", 'use outputMode("append") or outputMode("update")')
    return StreamSink(TaskWriter(options, _shape(options, schema, None)))


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """The writer of a batch write. Raises what is wrong with options, topic or columns before any task runs."""
    options = write_options(given, streaming=False)
    if overwrite:
        raise BadValue(
            "a topic can't be overwritten: readers have seen what is in it",
            'use mode("append"); to begin anew, create another topic, or trim this one: embarcadero topic trim',
        )
    # What is never done again by another driver may have the time at which it was begun.
    now_us = time.time_ns() // 1000 if options.write_id is None else None
    return BatchSink(TaskWriter(options, _shape(options, schema, now_us)), options.write_id, uuid4().hex)


def _shape(options: WriteOptions, schema: StructType, now_us: int | None) -> Shape:
    from pyspark.sql.pandas.types import to_arrow_schema

    topic = shared_log(options.brokers, at_once=True).describe(options.topic)
    return shape_of(topic, to_arrow_schema(schema, timezone="UTC"), options, now_us)


@dataclass(frozen=True)
class StreamSink(DataSourceStreamArrowWriter):
    """Writes micro-batches: the query's id and the number of the micro-batch name the work."""

    tasks: TaskWriter

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: have its rows in the topic."""
        context = _context()
        query, batch, run = (context.getLocalProperty(name) for name in (_QUERY, _BATCH, _RUN))
        if query is None or batch is None or run is None:
            raise NotAvailable(
                "the task does not know its query and micro-batch", "use Spark 4.3 or newer, and no continuous mode"
            )
        work = Work(query, int(batch), context.partitionId(), run)
        return Message(self.tasks.write(work, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        """On the driver: all tasks are done."""
        complete(self.tasks, messages)


@dataclass(frozen=True)
class BatchSink(DataSourceArrowWriter):
    """Writes a frame once: `write_id` names the work, or nobody does it again but this driver."""

    tasks: TaskWriter
    write_id: str | None
    run: str

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: have its rows in the topic."""
        task, number = _context().partitionId(), self.tasks.options.batch_id
        named = self.write_id is not None
        work = Work(self.write_id or self.run, number, task, self.run if named else None)
        return Message(self.tasks.write(work, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: all tasks are done."""
        complete(self.tasks, messages)


def complete(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Write what tasks left to the driver. Conflict, if an earlier run of this work had more tasks than this one."""
    told = [message.written for message in messages if isinstance(message, Message)]
    for written in told:
        if written.tasks > len(messages):
            raise Conflict(
                f"batch {written.work.number} of {written.work.write!r} was begun by {written.tasks} tasks or more, "
                f"and now it has {len(messages)}: rows would be there twice",
                "run it with as many tasks as before: the same number of cores, minPartitions, or repartition(n)",
            )
    for written in told:
        tasks.complete(written)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise NotAvailable("this is not a task of Spark", "write through df.write or df.writeStream")
    return context
