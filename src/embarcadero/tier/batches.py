"""Batches out of a table, for readers that know nothing of tables: what they would have got from a broker.

Records come in the types of the topic again. A batch whose payload was kept (columns did not tell it exactly, or it is
damaged) has that very payload. Holes are gaps: TRIMMED below the start, LOST or NEVER_DURABLE between two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.client.batch import Batch, OrderEntry
from embarcadero.client.tables import encoded
from embarcadero.errors import BadTable
from embarcadero.tier.cold import ColdTable
from embarcadero.tier.storage import reading
from embarcadero.tier.types import from_table
from embarcadero.types import EntryKind, Gap, GapKind
from embarcadero.wire.schemas import TopicSchemas

_ENTRY: Final = {
    "index": "_index", "seq": "_seq", "session_seq": "_session_seq", "append_us": "_append_time",
    "session": "_session", "size": "_size", "count": "_count", "crc": "_crc", "origin": "_broker",
    "partition": "_partition", "schema": "_schema_version", "kind": "_kind",
}  # fmt: skip
_KEPT: Final = ("_skipped", "_payload")
_WORD: Final = 1 << 64

Int64s = npt.NDArray[np.int64]


class ColdBatch(Batch):
    """A batch whose records came as columns. Its payload is made when somebody asks for it."""

    __slots__ = ("_made", "_size")

    def __init__(
        self, lane: int, entry: OrderEntry, arrow: pa.RecordBatch | None, kept: Any, schemas: TopicSchemas
    ) -> None:
        super().__init__(lane, entry, b"", None, {}, schemas)
        self._arrow, self._made, self._size = arrow, kept, entry.size

    @property
    def payload(self) -> Any:
        """Its records as Arrow encodes them now: not the bytes that were published, unless those were kept."""
        if self._made is None:
            self._made = encoded(self.to_arrow(), None) if self._arrow is not None else b""
        return self._made

    @payload.setter
    def payload(self, _value: Any) -> None:
        """What the base class begins with."""

    @property
    def kept(self) -> Any:
        """The payload that was published, if the table has it; else None."""
        return self._made if self._arrow is None else None

    @property
    def size(self) -> int:
        """Bytes of the payload that was published."""
        return self._size


def cold_batches(
    table: ColdTable,
    lane: int,
    start: int,
    stop: int,
    schemas: TopicSchemas,
    *,
    partitions: Collection[int] | None = None,
    control: bool = False,
    durable: bool = False,
) -> Iterator[list[Batch]]:
    """Batches and gaps with start <= index < stop of a lane, as far as the table has them (`tier.frontier`).

    `durable`: for a reader of durable records, who knows NEVER_DURABLE.

    In lists, lazily, a row group at a time. Each index comes once: in a batch, in a gap, or (entries of sessions
    without `control`, other partitions) not at all.
    """
    low, high = table.tier.start(lane)[0], min(stop, table.tier.frontier(lane)[0])
    at = start
    if at < min(low, high):
        at = min(low, high)
        yield [Batch.of_gap(lane, Gap(GapKind.TRIMMED, start, at), None)]
    names = [*_ENTRY.values(), *_KEPT, *(name for name in schemas.newest.names if name in table.schema.names)]
    for group in table.rows(lane, at, high, names) if at < high else ():
        with reading(f"table {table.tier.table}, lane {lane}, from index {at} on,"):  # values may not fit the topic
            found = _batches(lane, group, schemas, at, partial(table.tier.gap, lane, durable=durable))
        at = int(group.column("_index")[-1].as_py()) + 1
        if wanted := [batch for batch in found if _wanted(batch, partitions, control)]:
            yield wanted
    if at < high:
        yield [Batch.of_gap(lane, table.tier.gap(lane, at, high, durable), None)]


def _wanted(batch: Batch, partitions: Collection[int] | None, control: bool) -> bool:
    if batch.kind is None or batch.kind is EntryKind.SKIP:
        return True
    if batch.kind is not EntryKind.BATCH:
        return control
    return partitions is None or batch.partition in partitions


def _batches(
    lane: int, group: pa.RecordBatch, schemas: TopicSchemas, at: int, gap: Callable[[int, int], Gap]
) -> list[Batch]:
    """Batches of a row group, and the holes between them."""
    numbers = {field: _numbers(group.column(name)) for field, name in _ENTRY.items()}
    index = numbers["index"]
    starts = np.flatnonzero(np.concatenate(([True], index[1:] != index[:-1])))
    stops = np.append(starts[1:], len(index))
    if (stops - starts != np.maximum(numbers["count"][starts], 1)).any():
        raise BadTable(
            f"lane {lane}: a batch between {index[0]} and {index[-1]} is cut", "sort the table by _index, _seq"
        )
    columns = _topic_columns(group, schemas)
    skipped, kept = (group.column(name) for name in _KEPT)
    facts = {field: column[starts].tolist() for field, column in numbers.items()}
    found: list[Batch] = []
    for number, (first, last) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        values = {field: column[number] % _WORD for field, column in facts.items()}
        if values["index"] > at:
            found.append(Batch.of_gap(lane, gap(at, values["index"]), None))
        at = values["index"] + 1
        many = skipped[first].as_py() or 0
        opens = values["kind"] == EntryKind.SESSION_OPEN
        entry = OrderEntry(**values, location=0 if opens else many, flags=many if opens else 0, check=0)
        if entry.kind != EntryKind.BATCH:
            found.append(Batch.of_entry(lane, entry, b"", {}, schemas))
            continue
        payload = kept[first].as_py()
        arrow = columns.slice(first, last - first) if payload is None else None
        found.append(ColdBatch(lane, entry, arrow, payload, schemas))
    return found


def _topic_columns(group: pa.RecordBatch, schemas: TopicSchemas) -> pa.RecordBatch:
    """The topic's own columns in its own types; rows without records have nulls wherever that is."""
    schema = schemas.newest
    arrays = [
        from_table(group.column(field.name), field.type)
        if field.name in group.schema.names else pa.nulls(group.num_rows, field.type)
        for field in schema
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _numbers(column: pa.Array) -> Int64s:
    if column.null_count:
        raise BadTable("a row of a table has no place in the log", "it was not written by a tiering job")
    plain = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    found: Int64s = plain.to_numpy().astype(np.int64)
    return found
