"""The sink: `df.write` and `df.writeStream` of format "embarcadero". A write is in the topic as a whole, or not at all.

Spark makes a writer on the driver for every write and every micro-batch, sends it to the tasks, and makes one more, in
another process, to commit. Tasks only stage their rows: PySpark ends the rows of a task as if they were complete when
an operator before the sink fails, so a task can't know whether it has all of them. The driver's `commit` proves it.
`staging/commit.py` has the protocol, and the argument why every row is in the topic once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import (
    BadSchema,
    BadValue,
    NotAvailable,
    OutcomeUnknown,
    RecordsLost,
    Retriable,
    StagedGone,
    TopicReplaced,
)
from embarcadero.limits import STAGED_INLINE_ALL_BYTES, STAGED_PATIENCE_S, STAGED_SILENT_S
from embarcadero.spark.connections import shared_log
from embarcadero.spark.versions import DataSourceStreamArrowWriter, to_arrow
from embarcadero.spark.write.options import WriteOptions, write_options
from embarcadero.spark.write.shape import FrameShape, Routes, check_frame, new_columns, shape_of
from embarcadero.spark.write.tasks import Encoded, Staged, Stager, TaskWriter, WriteWork
from embarcadero.staging.commit import commit, drop
from embarcadero.staging.ledger import TopicLedger, open_home
from embarcadero.staging.manifest import Manifest, ManifestPart, Target

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"  # of a stream: its run, another one after each start
_AGAIN_S: Final = 1.0
_LATEST_S: Final = 3_600.0  # longer than a round of the sweep, and than clocks may differ


@dataclass(frozen=True, slots=True)
class StagedMessage(WriterCommitMessage):
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
    attempt = uuid4().hex
    work = WriteWork(options.write_id or attempt, options.batch_id, attempt)
    return BatchSink(TaskWriter(options, _shape(options, schema)), work)


def _shape(options: WriteOptions, schema: StructType) -> FrameShape | Routes:
    log, frame, now_us = shared_log(options.brokers, at_once=True), to_arrow(schema), time.time_ns() // 1000
    if options.topic is None:
        check_frame(frame, options)
        return Routes(log.run(open_home), frame, options, now_us)
    topic = log.describe(options.topic)
    if options.add_columns and (new := new_columns(topic, frame)):
        known = pa.schema([field for field in frame if field.name not in {each.name for each in new}])
        shape_of(topic, known, replace(options, order_by=(), key_column=None), now_us)  # nothing else is wrong
        topic = _add_columns(log, topic, frame, new)
    return shape_of(topic, frame, options, now_us)


def _add_columns(log: Log, topic: TopicInfo, frame: pa.Schema, new: list[pa.Field]) -> TopicInfo:
    """Add columns to a topic. Another writer may add the same ones at the same time."""
    wanted = pa.schema([*topic.versions.newest, *new])
    try:
        return log.alter_topic(topic.name, schema=wanted)
    except BadSchema:
        again = log.describe(topic.name)
        if again.versions.version == topic.versions.version:
            raise
        rest = new_columns(again, frame)
        return _add_columns(log, again, frame, rest) if rest else again


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
        return StagedMessage(self.tasks.write(WriteWork(query, int(batch), run, run), context.partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        """On the driver: all tasks are done, so the rows are complete. Publish them."""
        publish(self.tasks, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002 - Spark's
        """On the driver: the micro-batch has failed."""
        give_up(self.tasks, messages)


@dataclass(frozen=True)
class BatchSink(DataSourceArrowWriter):
    """Writes a frame once."""

    tasks: TaskWriter
    work: WriteWork

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage its rows."""
        return StagedMessage(self.tasks.write(self.work, _context().partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: all tasks are done, so the rows are complete. Publish them."""
        publish(self.tasks, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: the write has failed."""
        give_up(self.tasks, messages)


def publish(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit what the tasks have staged. An epoch without rows needs no commit."""
    staged = [message.staged for message in messages if isinstance(message, StagedMessage) and message.staged.parts]
    if not staged:
        return
    log, home, work = shared_log(tasks.options.brokers), tasks.shape.topic, staged[0].work
    targets = list(dict.fromkeys(target for each in staged for target in each.targets))
    _check_targets(log, home, targets)
    parts = [
        msgspec.structs.replace(part, target=targets.index(each.targets[part.target]))
        for each in staged
        for part in each.parts
    ]
    if sum(len(inline.payload) for part in parts for inline in part.inline) > STAGED_INLINE_ALL_BYTES:
        parts = _staged_now(log, home, work, targets, parts)
    _check_age([each.told_s for each in staged if each.told_s], work)
    manifest = Manifest(work.write, work.epoch, targets, parts, work.attempt)
    _commit(log, home, manifest, work.run)


def _commit(log: Log, home: TopicInfo, manifest: Manifest, run: str | None) -> None:
    """Commit a manifest; while the cluster is away, again. A commit that is repeated stores nothing twice."""
    give_up = time.monotonic() + STAGED_PATIENCE_S
    while True:
        try:
            log.run(lambda twin: commit(TopicLedger(twin, home), manifest, run))
        except (Retriable, OutcomeUnknown, RecordsLost) as error:
            if time.monotonic() > give_up:
                raise OutcomeUnknown(
                    f"epoch {manifest.epoch} of write {manifest.write!r} could not be committed for "
                    f"{STAGED_PATIENCE_S:.0f} s: {error.message}",
                    "either all of its rows will be visible, or none: when the cluster is back, start the query again, "
                    "or repeat the write with the same writeId; without one look at the topic first",
                ) from error
            time.sleep(_AGAIN_S)
        else:
            return


def _check_targets(log: Log, home: TopicInfo, targets: Sequence[Target]) -> None:
    """Raise TopicReplaced or UnknownTopic if a topic was deleted while its rows were staged."""
    for target in targets:
        now = home if target.topic == home.name else log.describe(target.topic)
        if now.id != target.id:
            raise TopicReplaced(
                f"topic {target.topic!r} was deleted while rows for it were staged, and another one has its name",
                "nothing of the write is visible; run it again",
            )


def _check_age(told_s: Sequence[float], work: WriteWork) -> None:
    """Raise StagedGone if no task has staged anything for nearly as long as the sweep waits.

    Else the sweep could give the batches up between the check that they are there and the decision.
    """
    silent_s = time.time() - max(told_s, default=time.time())
    if silent_s > STAGED_SILENT_S - _LATEST_S:
        raise StagedGone(
            f"no task of epoch {work.epoch} of write {work.write!r} has staged rows for {silent_s:.0f} s, and the "
            f"cluster gives them up after {STAGED_SILENT_S:.0f} s",
            "nothing of the write is visible; run it again, in smaller pieces, or materialise slow work before it",
        )


def _staged_now(
    log: Log, home: TopicInfo, work: WriteWork, targets: Sequence[Target], parts: Sequence[ManifestPart]
) -> list[ManifestPart]:
    """Stage what tasks have sent to the driver: all together it is too much for a manifest."""
    stager = Stager(log, home, work, keep_bytes=0)
    try:
        for part in parts:
            for each in part.inline:
                target = targets[part.target]
                stager.add(Encoded(pa.py_buffer(each.payload), each.count, each.partition, target))
        staged = stager.finish()
    finally:
        stager.close()
    now = [
        msgspec.structs.replace(part, target=targets.index(staged.targets[part.target])) for part in staged.parts
    ]
    return [part for part in parts if part.references] + now


def give_up(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Tell the sweep that what the tasks have staged is not needed any more."""
    staged = [message.staged for message in messages if isinstance(message, StagedMessage)]
    if any(part.references for each in staged for part in each.parts):
        log, work = shared_log(tasks.options.brokers), staged[0].work
        home = tasks.shape.topic
        log.run(lambda twin: drop(TopicLedger(twin, home), work.write, work.epoch, work.attempt))


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise NotAvailable("this is not a task of Spark", "write through df.write or df.writeStream")
    return context
