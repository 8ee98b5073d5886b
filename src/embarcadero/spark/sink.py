"""The sink: `df.write` and `df.writeStream` of format "embarcadero". A write is in the topic as a whole, or not at all.

Spark makes a writer on the driver for every write and every micro-batch, and sends it to the tasks. To commit, it makes
another writer in another process. Tasks turn their rows into batches of the topic and stage them; no reader sees them
yet.

PySpark ends the rows of a task as if they were complete when an operator before the sink fails. So a task can't know
whether it has all of its rows. Only the driver's `commit` proves it. `staging/commit.py` has the protocol, and the
argument why every row is in the topic once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from embarcadero.client.api.sync_log import Log, Publisher
from embarcadero.client.encoding import encoded, fitted
from embarcadero.client.results import RecordFuture, TopicInfo
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
from embarcadero.limits import (
    DELIVERY_TIMEOUT_S,
    MIB,
    STAGED_INLINE_ALL_BYTES,
    STAGED_INLINE_BYTES,
    STAGED_PATIENCE_S,
    STAGED_SILENT_S,
)
from embarcadero.spark.processes import shared_log
from embarcadero.spark.shape import FrameShape, Routes, WriteOptions, check_frame, new_columns, shape_of, write_options
from embarcadero.spark.versions import DataSourceStreamArrowWriter, to_arrow
from embarcadero.staging.commit import commit, drop
from embarcadero.staging.ledger import TopicLedger, ack_of, open_home, open_staging
from embarcadero.staging.manifest import (
    FACTS,
    REFERENCE,
    Begun,
    InlineBatch,
    Manifest,
    ManifestPart,
    Target,
    check_write,
    encode_fact,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


# --- tasks ------------------------------------------------------------------------------------------------------------
_GROUP_BYTES_MIN: Final = 8 * MIB  # rows are turned into batches in groups of this many bytes,
_GROUP_BYTES_MAX: Final = 64 * MIB  # or more, if they go to many partitions
_REFRESH_S: Final = 3_600.0  # a long task announces at this interval that its write continues
_OVERHEAD_BYTES: Final = 8 * 1024  # of an Arrow message; and for each column:
_COLUMN_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class WriteWork:
    """The write a task works for. `run` names a run of a stream's driver; `attempt` differs for each try of Spark."""

    write: str
    epoch: int
    attempt: str
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """A task's report to the driver: the batches of its rows, and the topics into which they go."""

    work: WriteWork
    targets: tuple[Target, ...]
    parts: tuple[ManifestPart, ...]
    announced_s: float = 0.0  # when the task last announced its write, by its clock; 0: it staged nothing


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded batch."""

    payload: pa.Buffer
    count: int
    partition: int
    target: Target


class Stager:
    """Keeps the batches of one task: a few in memory, more in the staging topic of `home`."""

    def __init__(self, log: Log, home: TopicInfo, work: WriteWork, keep_bytes: int = STAGED_INLINE_BYTES) -> None:
        check_write(work.write, work.epoch)
        self._log, self._home, self._work, self._keep_bytes = log, home, work, keep_bytes
        self._kept: list[Encoded] = []
        self._kept_bytes = 0
        self._publisher: Publisher | None = None
        self._announce_at = 0.0
        self._announced_s = 0.0
        self._sent: list[tuple[RecordFuture, Encoded]] = []

    def add(self, batch: Encoded) -> None:
        """Add a batch."""
        if self._publisher is not None:
            self._stage(self._publisher, batch)
            return
        self._kept.append(batch)
        self._kept_bytes += batch.payload.size
        if self._kept_bytes > self._keep_bytes:
            self._publisher = self._open()
            for each in self._kept:
                self._stage(self._publisher, each)
            self._kept.clear()

    def _open(self) -> Publisher:
        staging = self._log.run(lambda twin: open_staging(twin, self._home))
        return self._log.publisher(staging, ack=ack_of(staging), linger_ms=0, compression=None)

    def _stage(self, publisher: Publisher, batch: Encoded) -> None:
        if time.monotonic() >= self._announce_at:
            self._announce(publisher)
        future = publisher.publish_encoded(batch.payload, batch.count, timeout=DELIVERY_TIMEOUT_S)
        self._sent.append((future, replace(batch, payload=None)))

    def _announce(self, publisher: Publisher) -> None:
        """Announce that the write continues. The sweep keeps only batches staged after it could read this fact."""
        self._announce_at, announced_s = time.monotonic() + _REFRESH_S, time.time()
        fact = encode_fact(Begun(self._work.write, self._work.epoch, self._work.attempt), int(announced_s * 1e6))
        publisher.publish_encoded(fact, 1, partition=FACTS, timeout=DELIVERY_TIMEOUT_S).result(DELIVERY_TIMEOUT_S)
        self._announced_s = announced_s

    def finish(self) -> Staged:
        """Wait until everything is staged. Return references to it."""
        targets = tuple(dict.fromkeys(batch.target for batch in (*self._kept, *(batch for _, batch in self._sent))))
        if self._publisher is not None:
            self._publisher.flush()
        parts = [self._part(number, target) for number, target in enumerate(targets)]
        return Staged(self._work, targets, tuple(parts), self._announced_s)

    def _part(self, number: int, target: Target) -> ManifestPart:
        kept = [batch for batch in self._kept if batch.target == target]
        sent = [(future.staged(), batch.partition) for future, batch in self._sent if batch.target == target]
        rows = np.empty(len(sent), dtype=REFERENCE)
        for row, (staged, partition) in enumerate(sent):
            rows[row] = staged.index, staged.lane, staged.size, staged.count, staged.crc, partition
        inline = [InlineBatch(batch.payload.to_pybytes(), batch.count, batch.partition) for batch in kept]
        return ManifestPart(rows.tobytes(), inline, number)

    def close(self) -> None:
        """Close the publisher of the staging topic. The sweep removes staged batches that no manifest names."""
        if self._publisher is not None:
            self._publisher.close(0 if self._sent and not self._sent[-1][0].done() else DELIVERY_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Writes the rows of a task. It is sent to tasks, so it holds plain data only."""

    options: WriteOptions
    shape: FrameShape | Routes

    def write(self, work: WriteWork, task: int, rows: Iterator[pa.RecordBatch]) -> Staged:
        """Stage all rows of one task."""
        return self.stage(work, self.batches(shared_log(self.options.brokers), task, rows))

    def stage(self, work: WriteWork, batches: Iterable[Encoded]) -> Staged:
        """Stage batches of one task."""
        settle_down()
        stager = Stager(shared_log(self.options.brokers), self.shape.topic, work)
        try:
            for batch in batches:
                stager.add(batch)
            return stager.finish()
        finally:
            stager.close()

    def batches(self, log: Log, task: int, rows: Iterator[pa.RecordBatch]) -> Iterator[Encoded]:
        """Encode all rows as batches of their topics. With `orderBy` all rows are gathered and sorted first."""
        split = self.shape.splitter(log)
        size = min(_GROUP_BYTES_MAX, max(_GROUP_BYTES_MIN, self.options.batch_bytes * self.shape.spread))
        for group in _groups(rows, None if self.options.order_by else size):
            for shape, part in split(group):
                yield from self._encode(log, task, shape, part)

    def _encode(self, log: Log, task: int, shape: FrameShape, group: list[pa.RecordBatch]) -> Iterator[Encoded]:
        made = shape.rows(group)
        partitions = shape.partitions(group, made, task)
        made, partitions = in_order(made, shape.order_by, partitions)
        versions = shape.topic.versions
        limits = log.limits
        fitted(made, versions, 0, limits.record_bytes)
        target = Target(shape.topic.name, shape.topic.id, versions.version)
        most = limits.frame_bytes - _OVERHEAD_BYTES - _COLUMN_OVERHEAD_BYTES * made.num_columns
        wanted = min(most, self.options.batch_bytes)
        for partition, part in _by_partition(made, partitions):
            for piece in cut(part, wanted, most, limits.records):
                yield Encoded(encoded(piece, self.options.compression), piece.num_rows, partition, target)


@cache
def settle_down() -> None:
    """Freeze all objects loaded so far: Spark makes each worker collect garbage after every task."""
    gc.freeze()


def in_order(
    rows: pa.RecordBatch, order_by: tuple[str, ...], partitions: npt.NDArray[np.int32]
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32]]:
    """Sort rows by their partition, then by the named columns (nulls first), then by arrival."""
    if order_by:
        columns = [key for name in order_by for key in (rows.column(name).is_valid(), rows.column(name))]
        keys = pa.table(columns, names=[str(number) for number in range(len(columns))])
        order = np.asarray(pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names]))
        rows, partitions = rows.take(pa.array(order)), partitions[order]
    if len(partitions) and (partitions != partitions[0]).any():
        order = np.argsort(partitions, kind="stable")
        rows, partitions = rows.take(pa.array(order)), partitions[order]
    return rows, partitions


def _groups(rows: Iterator[pa.RecordBatch], most: int | None) -> Iterator[list[pa.RecordBatch]]:
    """Group rows by about `most` bytes; None: all rows in one group."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        if not batch.num_rows:
            continue
        group.append(batch)
        size += batch.nbytes
        if most is not None and size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group


def _by_partition(rows: pa.RecordBatch, partitions: npt.NDArray[np.int32]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split rows that are sorted by their partition, partition by partition."""
    starts = np.flatnonzero(np.diff(partitions, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(partitions)], strict=True):
        yield int(partitions[start]), rows.slice(start, stop - start)


def cut(rows: pa.RecordBatch, wanted: int, most: int, records_max: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into pieces of about `wanted` bytes, never more than `most` bytes or `records_max` rows."""
    pieces = max(1, -(-rows.nbytes // wanted), -(-rows.num_rows // records_max))
    step = -(-rows.num_rows // pieces)
    for start in range(0, rows.num_rows, step):
        yield from _halved(rows.slice(start, step), most)


def _halved(piece: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch]:
    if piece.nbytes <= most:
        yield piece
        return
    if piece.num_rows == 1:
        raise BadValue(f"a row has {piece.nbytes} bytes; a batch has at most {most}", "make the row smaller")
    half = piece.num_rows // 2
    yield from _halved(piece.slice(0, half), most)
    yield from _halved(piece.slice(half), most)


# --- the driver -------------------------------------------------------------------------------------------------------
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"  # of a stream: its run; each start has another one
_AGAIN_S: Final = 1.0
_LATEST_S: Final = 3_600.0  # longer than a round of the sweep, and than clocks may differ


@dataclass(frozen=True, slots=True)
class StagedMessage(WriterCommitMessage):
    """A task's report to the driver, as Spark's type."""

    staged: Staged


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Return the writer of a stream. Raises for wrong options, topic or columns before any task runs."""
    options = write_options(given, streaming=True)
    if overwrite:
        raise BadValue(
            "outputMode complete would overwrite the topic, which keeps all records",
            'use outputMode("append") or outputMode("update")',
        )
    return StreamSink(TaskWriter(options, _shape(options, schema)))


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Return the writer of a batch write. Raises for wrong options, topic or columns before any task runs."""
    options = write_options(given, streaming=False)
    if overwrite:
        raise BadValue(
            "a topic can't be overwritten: readers have already read its records",
            'use mode("append"); to start empty, create another topic, or trim this one: embarcadero topic trim',
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
            raise NotAvailable("the task does not know its query and micro-batch", "do not use continuous mode")
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
    """Commit the rows that the tasks have staged. An epoch without rows needs no commit."""
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
    _check_age([each.announced_s for each in staged if each.announced_s], work)
    manifest = Manifest(work.write, work.epoch, targets, parts, work.attempt)
    _commit(log, home, manifest, work.run)


def _commit(log: Log, home: TopicInfo, manifest: Manifest, run: str | None) -> None:
    """Commit a manifest; retry while the cluster is away. A repeated commit stores nothing twice."""
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
                    "or repeat the write with the same writeId; without a writeId look at the topic first",
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


def _check_age(announced_s: Sequence[float], work: WriteWork) -> None:
    """Raise StagedGone if no task has staged rows for nearly as long as the sweep waits.

    Otherwise the sweep could trim the batches after the check that they exist and before the decision.
    """
    silent_s = time.time() - max(announced_s, default=time.time())
    if silent_s > STAGED_SILENT_S - _LATEST_S:
        raise StagedGone(
            f"no task of epoch {work.epoch} of write {work.write!r} has staged rows for {silent_s:.0f} s, and the "
            f"cluster deletes staged rows after {STAGED_SILENT_S:.0f} s",
            "nothing of the write is visible; run it again, in smaller pieces, or materialise slow work before it",
        )


def _staged_now(
    log: Log, home: TopicInfo, work: WriteWork, targets: Sequence[Target], parts: Sequence[ManifestPart]
) -> list[ManifestPart]:
    """Stage inline batches on the driver: all together they are too large for a manifest."""
    stager = Stager(log, home, work, keep_bytes=0)
    try:
        for part in parts:
            for each in part.inline:
                target = targets[part.target]
                stager.add(Encoded(pa.py_buffer(each.payload), each.count, each.partition, target))
        staged = stager.finish()
    finally:
        stager.close()
    now = [msgspec.structs.replace(part, target=targets.index(staged.targets[part.target])) for part in staged.parts]
    return [part for part in parts if part.references] + now


def give_up(tasks: TaskWriter, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Inform the sweep that the staged batches of a failed write are not needed any more."""
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
