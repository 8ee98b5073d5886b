"""The sink: `df.write` and `df.writeStream` of format "embarcadero". A write is in the topic as a whole, or not at all.

Spark makes a writer on the driver for every write and every micro-batch, sends it to the tasks, and makes one more, in
another process, to commit. Tasks only stage their rows: PySpark ends the rows of a task as if they were complete when
an operator before the sink fails, so a task can't know whether it has all of them. The driver's `commit` proves it.
`staging/commit.py` has the protocol, and the argument why every row is in the topic once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from embarcadero.client.sync import Log
from embarcadero.errors import BadValue, NotAvailable
from embarcadero.limits import STAGED_INLINE_ALL_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.shape import Shape, shape_of
from embarcadero.spark.versions import DataSourceStreamArrowWriter, to_arrow
from embarcadero.spark.write_options import WriteOptions, write_options
from embarcadero.spark.writing import Encoded, Staged, Stager, TaskWriter
from embarcadero.staging.commit import commit, drop
from embarcadero.staging.ledger import TopicLedger
from embarcadero.staging.manifest import Manifest, Part

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"  # of a stream: its run, another one after each start


@dataclass(frozen=True, slots=True)
class Message(WriterCommitMessage):
    """What a task tells the driver."""

    staged: Staged


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """The writer of a stream. Raises what is wrong with options, topic or columns before any task runs."""
    options = write_options(given, streaming=True)
    if overwrite:
        raise BadValue("a topic keeps what was written into it", 'use outputMode("append") or outputMode("update")')
    return StreamSink(TaskWriter(options, _shape(options, schema)))


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """The writer of a batch write. Raises what is wrong with options, topic or columns before any task runs."""
    options = write_options(given, streaming=False)
    if overwrite:
        raise BadValue(
            "a topic can't be overwritten: readers have seen what is in it",
            'use mode("append"); to begin anew, create another topic, or trim this one: embarcadero topic trim',
        )
    return BatchSink(TaskWriter(options, _shape(options, schema)), options.write_id or uuid4().hex, options.batch_id)


def _shape(options: WriteOptions, schema: StructType) -> Shape:
    topic = shared_log(options.brokers, at_once=True).describe(options.topic)
    return shape_of(topic, to_arrow(schema), options, time.time_ns() // 1000)


@dataclass(frozen=True)
class StreamSink(DataSourceStreamArrowWriter):
    """Writes micro-batches: the query's id names the write, the number of the micro-batch is the epoch."""

    tasks: TaskWriter

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage its rows."""
        context = _context()
        query, batch, run = (context.getLocalProperty(name) for name in (_QUERY, _BATCH, _RUN))
        if query is None or batch is None or run is None:
            raise NotAvailable("the task does not know its query and micro-batch", "use no continuous mode")
        return Message(self.tasks.write(query, int(batch), context.partitionId(), iterator, run))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        """On the driver: all tasks are done, so the rows are complete. Publish them."""
        publish(self.tasks, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        """On the driver: the micro-batch has failed."""
        give_up(self.tasks, messages)


@dataclass(frozen=True)
class BatchSink(DataSourceArrowWriter):
    """Writes a frame once: `name` and `epoch` name it."""

    tasks: TaskWriter
    name: str
    epoch: int

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage its rows."""
        return Message(self.tasks.write(self.name, self.epoch, _context().partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: all tasks are done, so the rows are complete. Publish them."""
        publish(self.tasks, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: the write has failed."""
        give_up(self.tasks, messages)


def publish(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit what the tasks have staged. An epoch without rows needs no commit."""
    staged = [message.staged for message in messages if isinstance(message, Message)]
    if not any(each.records for each in staged):
        return
    log, first = shared_log(tasks.options.brokers), staged[0]
    parts = [each.part for each in staged if each.records]
    if sum(len(inline.payload) for part in parts for inline in part.inline) > STAGED_INLINE_ALL_BYTES:
        parts = [_staged_now(log, tasks.shape, first, part) for part in parts]
    manifest = Manifest(first.write, first.epoch, first.schema, parts)
    log.thread.wait(commit(TopicLedger(log.twin, tasks.shape.topic), manifest, first.run))


def _staged_now(log: Log, shape: Shape, first: Staged, part: Part) -> Part:
    """Stage what tasks have sent to the driver: all together it is too much for a manifest."""
    if not part.inline:
        return part
    stager = Stager(log, shape, first.write, first.epoch, keep_bytes=0)
    try:
        for each in part.inline:
            stager.add(Encoded(pa.py_buffer(each.payload), each.count, each.partition))
        return stager.finish()
    finally:
        stager.close()


def give_up(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Tell the sweep that what the tasks have staged is not needed any more."""
    staged = [message.staged for message in messages if isinstance(message, Message)]
    if any(each.part.references for each in staged):
        log = shared_log(tasks.options.brokers)
        log.thread.wait(drop(TopicLedger(log.twin, tasks.shape.topic), staged[0].write, staged[0].epoch))


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise NotAvailable("this is not a task of Spark", "write through df.write or df.writeStream")
    return context
