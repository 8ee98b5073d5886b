"""What a task of a write does: its rows are put in their order, cut into batches, and each of those is stored once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.client.sync import Log, Publisher
from embarcadero.client.tables import encoded, fitted
from embarcadero.errors import BadValue, EmbarcaderoError, SessionFenced, UnknownSession
from embarcadero.limits import FRAME_BYTES_MAX, SESSION_WINDOW, SPARK_STAGED_BYTES_MAX
from embarcadero.spark.canonical import in_order
from embarcadero.spark.connections import shared_log
from embarcadero.spark.shape import Shape
from embarcadero.spark.work import Encoded, Work, begin, check_count, claim, digest_of, send, wait_for_neighbours
from embarcadero.spark.write_options import WriteOptions

_TASK_BYTES_MAX: Final = FRAME_BYTES_MAX * SESSION_WINDOW  # more can't be in so many batches
_FEW: Final = SESSION_WINDOW // 4  # batches of a task, if they need not be larger than asked for
_OVERHEAD_BYTES: Final = 8 * 1024  # of an Arrow message, and for each column of it:
_COLUMN_OVERHEAD_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Written:
    """What a task tells the driver. `staged`: batches that the driver has to write, if it has `tasks` tasks."""

    work: Work
    batches: int
    records: int
    tasks: int = 0
    staged: tuple[tuple[bytes, int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class TaskWriter:
    """Writes the rows of a task. It is sent to tasks, so it holds plain facts only."""

    options: WriteOptions
    shape: Shape

    def write(self, work: Work, rows: Iterator[pa.RecordBatch]) -> Written:
        """Have all rows in the log, once; or hand them to the driver, if only it can know whether that is right."""
        log, topic = shared_log(self.options.brokers), self.shape.topic
        work = replace(work, order=self.options.order)
        settle_down()
        batches = self.encode(log, work, rows)
        records = sum(batch.count for batch in batches)
        publisher = begin(log, topic, work)  # its session opens meanwhile
        try:
            tasks = claim(log, topic.name, work, digest_of(batches))
            if not tasks or _all_in(publisher, batches) or wait_for_neighbours(log, topic.name, work, tasks):
                send(log, topic, work, batches, publisher)
                return Written(work, len(batches), records)
            return Written(work, len(batches), records, tasks, _staged(batches, work))
        finally:
            with suppress(EmbarcaderoError):
                publisher.close(0)

    def complete(self, written: Written) -> None:
        """On the driver: write what a task staged."""
        if written.staged is not None:
            batches = [Encoded(pa.py_buffer(payload), count, partition) for payload, count, partition in written.staged]
            send(shared_log(self.options.brokers), self.shape.topic, written.work, batches)

    def encode(self, log: Log, work: Work, rows: Iterator[pa.RecordBatch]) -> list[Encoded]:
        """All rows as batches: the same rows are always the same bytes."""
        gathered = _gathered(rows, work)
        if not gathered:
            return []
        made = self.shape.rows(gathered)
        partitions = self.shape.partitions(gathered, made, work.task)
        ordered, partitions = in_order(made, self.shape.order_by, partitions)
        fitted(ordered, self.shape.topic.versions, 0, log.brokers.record_bytes_max)
        most = log.brokers.frame_bytes_max - _OVERHEAD_BYTES - _COLUMN_OVERHEAD_BYTES * ordered.num_columns
        wanted = min(most, max(self.options.batch_bytes, ordered.nbytes // _FEW))
        batches = [
            Encoded(encoded(piece, self.options.compression), piece.num_rows, partition)
            for partition, part in _by_partition(ordered, partitions)
            for piece in cut(part, wanted, most, log.brokers.records_max)
        ]
        check_count(batches, work)
        return batches


@cache
def settle_down() -> None:
    """All that this worker has loaded stays: Spark has it collect its garbage after every task, before the next one."""
    gc.freeze()


def _all_in(publisher: Publisher, batches: Sequence[Encoded]) -> bool:
    """Whether an earlier attempt got to the end of these."""
    try:
        return publisher.already_in() >= len(batches)
    except (SessionFenced, UnknownSession):  # another attempt is about to
        return False


def _gathered(rows: Iterator[pa.RecordBatch], work: Work) -> list[pa.RecordBatch]:
    gathered, size = [], 0
    for batch in rows:
        if not batch.num_rows:
            continue
        gathered.append(batch)
        size += batch.nbytes
        if size > _TASK_BYTES_MAX:
            raise BadValue(
                f"{work.told} has more than {_TASK_BYTES_MAX} bytes of rows, too many to be recognised again",
                "repartition the frame into more tasks",
            )
    return gathered


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


def _staged(batches: Sequence[Encoded], work: Work) -> tuple[tuple[bytes, int, int], ...]:
    size = sum(batch.payload.size for batch in batches)
    if size > SPARK_STAGED_BYTES_MAX:
        raise BadValue(
            f"{work.told} runs again before a later task that had begun, and has {size} bytes",
            f"the driver may take {SPARK_STAGED_BYTES_MAX}; run it with as many cores as before",
        )
    return tuple((batch.payload.to_pybytes(), batch.count, batch.partition) for batch in batches)
