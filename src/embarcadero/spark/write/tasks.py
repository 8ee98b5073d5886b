"""What a task of a write does: it turns its rows into batches of the topic and stages them. No reader sees them yet."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.api.sync_log import Log, Publisher
from embarcadero.client.encoding import encoded, fitted
from embarcadero.client.results import RecordFuture, TopicInfo
from embarcadero.errors import BadValue
from embarcadero.limits import DELIVERY_TIMEOUT_S, MIB, STAGED_INLINE_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.write.options import WriteOptions
from embarcadero.spark.write.shape import FrameShape, Routes
from embarcadero.staging.ledger import ack_of, open_staging
from embarcadero.staging.manifest import (
    FACTS,
    REFERENCE,
    Begun,
    InlineBatch,
    ManifestPart,
    Target,
    check_write,
    encode_fact,
)

_GROUP_BYTES_MIN: Final = 8 * MIB  # so many bytes of rows are turned into batches at once,
_GROUP_BYTES_MAX: Final = 64 * MIB  # or more, if they go to many partitions
_REFRESH_S: Final = 3_600.0  # so often a task that goes on and on says that its write is not over
_OVERHEAD_BYTES: Final = 8 * 1024  # of an Arrow message, and for each column of it:
_COLUMN_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class WriteWork:
    """What a task works for. `run` names a run of a stream's driver; `attempt` is another one whenever Spark tries."""

    write: str
    epoch: int
    attempt: str
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task tells the driver: the batches of its rows, and the topics into which they go."""

    work: WriteWork
    targets: tuple[Target, ...]
    parts: tuple[ManifestPart, ...]
    told_s: float = 0.0  # when the task last said that its write goes on, by its clock; 0: it staged nothing


@dataclass(frozen=True, slots=True)
class Encoded:
    """One batch as it is sent."""

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
        self._tell_at = 0.0
        self._told_s = 0.0
        self._sent: list[tuple[RecordFuture, Encoded]] = []

    def add(self, batch: Encoded) -> None:
        """Take one more batch."""
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
        if time.monotonic() >= self._tell_at:
            self._tell(publisher)
        future = publisher.publish_encoded(batch.payload, batch.count, timeout=DELIVERY_TIMEOUT_S)
        self._sent.append((future, replace(batch, payload=None)))

    def _tell(self, publisher: Publisher) -> None:
        """Say that the write goes on. The sweep keeps only what was staged after it could read this."""
        self._tell_at, told_s = time.monotonic() + _REFRESH_S, time.time()
        fact = encode_fact(Begun(self._work.write, self._work.epoch, self._work.attempt), int(told_s * 1e6))
        publisher.publish_encoded(fact, 1, partition=FACTS, timeout=DELIVERY_TIMEOUT_S).result(DELIVERY_TIMEOUT_S)
        self._told_s = told_s

    def finish(self) -> Staged:
        """Wait until everything is staged. Return what names it."""
        targets = tuple(dict.fromkeys(batch.target for batch in (*self._kept, *(batch for _, batch in self._sent))))
        if self._publisher is not None:
            self._publisher.flush()
        parts = [self._part(number, target) for number, target in enumerate(targets)]
        return Staged(self._work, targets, tuple(parts), self._told_s)

    def _part(self, number: int, target: Target) -> ManifestPart:
        kept = [batch for batch in self._kept if batch.target == target]
        sent = [(future.staged(), batch.partition) for future, batch in self._sent if batch.target == target]
        rows = np.empty(len(sent), dtype=REFERENCE)
        for row, (staged, partition) in enumerate(sent):
            rows[row] = staged.index, staged.lane, staged.size, staged.count, staged.crc, partition
        inline = [InlineBatch(batch.payload.to_pybytes(), batch.count, batch.partition) for batch in kept]
        return ManifestPart(rows.tobytes(), inline, number)

    def close(self) -> None:
        """Let go of the staging topic. What was staged and is not in a manifest is swept away."""
        if self._publisher is not None:
            self._publisher.close(0 if self._sent and not self._sent[-1][0].done() else DELIVERY_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Writes the rows of a task. It is sent to tasks, so it holds plain facts only."""

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
        """All rows as batches of their topics. With `orderBy` they are sorted first, so all of them are gathered."""
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
    """All that this worker has loaded stays: Spark has it collect its garbage after every task, before the next one."""
    gc.freeze()


def in_order(
    rows: pa.RecordBatch, order_by: tuple[str, ...], partitions: npt.NDArray[np.int32]
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32]]:
    """Rows sorted by their partition, then by the named columns (nulls first), then as they came."""
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
    """Rows in groups of about `most` bytes; None: all of them in one."""
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


def _by_partition(
    rows: pa.RecordBatch, partitions: npt.NDArray[np.int32]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows that are sorted by their partition, partition by partition."""
    starts = np.flatnonzero(np.diff(partitions, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(partitions)], strict=True):
        yield int(partitions[start]), rows.slice(start, stop - start)


def cut(rows: pa.RecordBatch, wanted: int, most: int, records_max: int) -> Iterator[pa.RecordBatch]:
    """Pieces of about `wanted` bytes and never more than `most`, nor of more than `records_max` rows."""
    pieces = max(1, -(-rows.nbytes // wanted), -(-rows.num_rows // records_max))
    step = -(-rows.num_rows // pieces)
    for start in range(0, rows.num_rows, step):
        yield from _halved(rows.slice(start, step), most)


def _halved(piece: pa.RecordBatch, most: int) -> Iterator[pa.RecordBatch]:
    if piece.nbytes <= most:
        yield piece
        return
    if piece.num_rows == 1:
        raise BadValue(f"a row of {piece.nbytes} bytes", f"a batch has at most {most} bytes")
    half = piece.num_rows // 2
    yield from _halved(piece.slice(0, half), most)
    yield from _halved(piece.slice(half), most)
