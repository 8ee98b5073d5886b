"""What a task of a write does: it turns its rows into batches of the topic and stages them. No reader sees them yet."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embarcadero.client.futures import RecordFuture
from embarcadero.client.sync import Log, Publisher
from embarcadero.client.tables import encoded, fitted
from embarcadero.errors import BadValue
from embarcadero.limits import DELIVERY_TIMEOUT_S, MIB, STAGED_INLINE_BYTES
from embarcadero.spark.connections import shared_log
from embarcadero.spark.shape import Shape
from embarcadero.spark.write_options import WriteOptions
from embarcadero.staging.ledger import ack_of, open_staging
from embarcadero.staging.manifest import FACTS, REFERENCE, Begun, Inline, Part, check_write, encode_fact

_GROUP_BYTES_MIN: Final = 8 * MIB  # so many bytes of rows are turned into batches at once,
_GROUP_BYTES_MAX: Final = 64 * MIB  # or more, if they go to many partitions
_REFRESH_S: Final = 3_600.0  # so often a task that goes on and on says that its write is not over
_OVERHEAD_BYTES: Final = 8 * 1024  # of an Arrow message, and for each column of it:
_COLUMN_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Staged:
    """What a task tells the driver: the batches of its rows. `schema` is the version in which they are encoded."""

    write: str
    epoch: int
    schema: int
    part: Part
    records: int
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """One batch as it is sent."""

    payload: pa.Buffer
    count: int
    partition: int


class Stager:
    """Keeps the batches of one task: a few in memory, more in the staging topic."""

    def __init__(
        self, log: Log, shape: Shape, write: str, epoch: int, keep_bytes: int = STAGED_INLINE_BYTES
    ) -> None:
        check_write(write, epoch)
        self._log, self._target, self._begun, self._keep_bytes = log, shape.topic, Begun(write, epoch), keep_bytes
        self._kept: list[Encoded] = []
        self._kept_bytes = 0
        self._publisher: Publisher | None = None
        self._begun_s = 0.0
        self._sent: list[tuple[RecordFuture, int]] = []  # and the partition of the target

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
        staging = self._log.thread.wait(open_staging(self._log.twin, self._target))
        return self._log.publisher(staging, ack=ack_of(staging), linger_ms=0, compression=None)

    def _stage(self, publisher: Publisher, batch: Encoded) -> None:
        if time.monotonic() > self._begun_s + _REFRESH_S or not self._begun_s:
            self._begun_s = time.monotonic()
            fact = encode_fact(self._begun, time.time_ns() // 1000)
            publisher.publish_encoded(fact, 1, partition=FACTS, timeout=DELIVERY_TIMEOUT_S)
        future = publisher.publish_encoded(batch.payload, batch.count, timeout=DELIVERY_TIMEOUT_S)
        self._sent.append((future, batch.partition))

    def finish(self) -> Part:
        """Wait until everything is staged. Return what names it."""
        if self._publisher is None:
            kept = [Inline(each.payload.to_pybytes(), each.count, each.partition) for each in self._kept]
            return Part(inline=kept)
        self._publisher.flush()
        rows = np.empty(len(self._sent), dtype=REFERENCE)
        for row, (future, partition) in enumerate(self._sent):
            staged = future.staged()
            rows[row] = staged.index, staged.lane, staged.size, staged.count, staged.crc, partition
        return Part(references=rows.tobytes())

    def close(self) -> None:
        """Let go of the staging topic. What was staged and is not in a manifest is swept away."""
        if self._publisher is not None:
            self._publisher.close(0 if self._sent and not self._sent[-1][0].done() else DELIVERY_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Writes the rows of a task. It is sent to tasks, so it holds plain facts only."""

    options: WriteOptions
    shape: Shape

    def write(
        self, write: str, epoch: int, task: int, rows: Iterator[pa.RecordBatch], run: str | None = None
    ) -> Staged:
        """Stage all rows of one task of an epoch."""
        settle_down()
        log = shared_log(self.options.brokers)
        stager, records = Stager(log, self.shape, write, epoch), 0
        try:
            for batch in self.batches(log, task, rows):
                stager.add(batch)
                records += batch.count
            part = stager.finish()
        finally:
            stager.close()
        return Staged(write, epoch, self.shape.topic.versions.version, part, records, run)

    def batches(self, log: Log, task: int, rows: Iterator[pa.RecordBatch]) -> Iterator[Encoded]:
        """All rows as batches of the topic. With `orderBy` they are sorted first, so all of them are gathered."""
        partitions = self.shape.topic.partitions
        size = min(_GROUP_BYTES_MAX, max(_GROUP_BYTES_MIN, self.options.batch_bytes * partitions))
        for group in _groups(rows, None if self.shape.order_by else size):
            yield from self._encode(log, task, group)

    def _encode(self, log: Log, task: int, group: list[pa.RecordBatch]) -> Iterator[Encoded]:
        made = self.shape.rows(group)
        partitions = self.shape.partitions(group, made, task)
        made, partitions = in_order(made, self.shape.order_by, partitions)
        fitted(made, self.shape.topic.versions, 0, log.brokers.record_bytes_max)
        most = log.brokers.frame_bytes_max - _OVERHEAD_BYTES - _COLUMN_OVERHEAD_BYTES * made.num_columns
        wanted = min(most, self.options.batch_bytes)
        for partition, part in _by_partition(made, partitions):
            for piece in cut(part, wanted, most, log.brokers.records_max):
                yield Encoded(encoded(piece, self.options.compression), piece.num_rows, partition)


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
