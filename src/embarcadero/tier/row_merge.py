"""Records and control entries of a lane as one stream of rows, in the order of the log.

Both come sorted by `_index`, and no index is in both. Control entries are few: rows of records are handed on as they
lie, in slices between two entries, and copied only where entries are dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

_SLICES_MAX: Final = 16
"""Rows between which more entries lie are copied together with them: many small slices take longer."""


def merged(records: Iterator[pa.RecordBatch], entries: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of both by `_index`, lazily. Both have the same columns, one of them `_index`; no batch is cut."""
    waiting = next(entries, None)
    for rows in records:
        if not rows.num_rows:
            continue
        last = int(rows.column("_index")[-1].as_py())
        before: list[pa.RecordBatch] = []
        while waiting is not None:
            count = int(np.searchsorted(waiting.column("_index").to_numpy(), last))
            before.append(waiting.slice(0, count))
            if count < waiting.num_rows:
                waiting = waiting.slice(count)
                break
            waiting = next(entries, None)
        yield from _interleaved(rows, [part for part in before if part.num_rows])
    while waiting is not None:
        if waiting.num_rows:
            yield waiting
        waiting = next(entries, None)


def _interleaved(rows: pa.RecordBatch, before: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of records with the entries that come before the last of them."""
    if not before:
        yield rows
        return
    (entries,) = pa.Table.from_batches(before).combine_chunks().to_batches()
    places = np.searchsorted(rows.column("_index").to_numpy(), entries.column("_index").to_numpy())
    starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    if len(starts) > _SLICES_MAX:
        both = pa.Table.from_batches([rows, entries]).combine_chunks()
        order = np.argsort(both.column("_index").to_numpy(), kind="stable")
        yield from both.take(order).combine_chunks().to_batches()
        return
    at = 0
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(places)], strict=True):
        place = int(places[start])
        if place > at:
            yield rows.slice(at, place - at)
        yield entries.slice(start, stop - start)
        at = place
    yield rows.slice(at)
