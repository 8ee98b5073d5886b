"""Read a topic's table without a catalog and without Spark: pyarrow over the files that a metadata file names.

The store names the newest metadata file for readers (`Tier.metadata`). That file and its files never change, so their
contents are cached. Files are sorted by index and do not overlap; a hole between two rows is a loss. Page checksums of
Parquet are verified: wrong bytes raise a BadTable that names the file, and never become rows.

`table_batches` returns the same batches as a broker. Records have the types of the topic. If the table kept the
payload of a batch (columns do not hold it exactly, or it is damaged), the batch has that payload. Holes are gaps:
TRIMMED below the start, LOST or NEVER_DURABLE between two rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.client.encoding import encoded
from embarcadero.client.results import Batch, OrderEntry
from embarcadero.errors import BadTable, BadValue, TierUnavailable
from embarcadero.limits import TABLE_PIECE_BYTES
from embarcadero.tier.columns import Int64s, Layout, constant, from_table, layout_of, physical, row_schema
from embarcadero.tier.parquet import SpanFooter, read_footer
from embarcadero.tier.row_groups import GroupCache, RowGroupFile, merged, pieces
from embarcadero.tier.snapshots import TableFile, loaded, shared_manifests, static_table
from embarcadero.tier.storage import Properties, Storage, reading
from embarcadero.types import Cut, EntryKind, Gap, GapKind, LanePosition, Tier

from pyiceberg.io.pyarrow import schema_to_pyarrow  # isort: skip

from embarcadero.wire.schemas import TopicSchemas

_TABLES_MAX: Final = 64  # metadata files with cached contents
_ANY: Final = (1 << 63) - 1
_ENTRY: Final = {
    "index": "_index", "seq": "_seq", "session_seq": "_session_seq", "append_us": "_append_time",
    "session": "_session", "size": "_size", "count": "_count", "crc": "_crc", "origin": "_broker",
    "partition": "_partition", "schema": "_schema_version", "kind": "_kind",
}  # fmt: skip
_KEPT: Final = ("_skipped", "_payload")
_WORD: Final = 1 << 64


class _Contents(NamedTuple):
    """The contents of a metadata file: files by lane, in order, and the columns of rows."""

    lanes: dict[int, list[TableFile]]
    schema: pa.Schema
    layout: Layout = Layout.WHOLE
    entries: dict[int, list[TableFile]] = {}  # files of control entries, if they have a separate table


@lru_cache(maxsize=_TABLES_MAX)
def _contents(metadata: str, storage: Storage) -> _Contents:
    """Read a metadata file once, because it never changes; failures are not cached.

    All files are read with the reader's own properties: the table's properties must not decide where keys are sent.
    Control entries come from the metadata file that the table's snapshot names: entries added to their table since then
    are not part of the topic's table yet.
    """
    if not metadata:
        return _Contents({}, pa.schema([]))
    table = static_table(metadata, storage)
    entries = loaded(table).entries
    with reading(metadata):
        layout = layout_of(table.properties, metadata)
        schema = row_schema(schema_to_pyarrow(table.schema(), include_field_ids=False), layout)
        lanes = _by_lane(shared_manifests.files(table))
    if not entries:
        return _Contents(lanes, schema, layout)
    with reading(entries):
        return _Contents(lanes, schema, layout, _by_lane(shared_manifests.files(static_table(entries, storage))))


def _by_lane(files: Iterable[TableFile]) -> dict[int, list[TableFile]]:
    """Group files by lane, in order. Files of one span (one for each day) all have its end: cut each at the next."""
    lanes: dict[int, list[TableFile]] = {}
    for file in sorted(files, key=lambda file: (file.lane, file.first_index)):
        own = lanes.setdefault(file.lane, [])
        if own and own[-1].first_index < file.first_index and own[-1].stop_index == file.stop_index:
            own[-1] = replace(own[-1], stop_index=file.first_index, stop_seq=min(own[-1].stop_seq, file.first_seq))
        own.append(file)
    return lanes


class TopicTable:
    """The part of a topic in its table, as of one metadata file. Cheap to create, and safe to share between threads."""

    def __init__(
        self,
        tier: Tier,
        properties: Properties | None = None,
        cache: GroupCache | None = None,
        group_bytes_max: int = _ANY,
        storage: Storage | None = None,
    ) -> None:
        """`properties` of the caller (keys, for example) override the topic's record (`tier.properties`).

        `storage`: used instead of a storage with these properties. A row group that needs more than `group_bytes_max`
        of memory is refused with NotAvailable before it is read.
        """
        self.tier = tier
        self.storage = storage or Storage({**tier.properties, **(properties or {})})
        self._contents: _Contents | None = None
        self._cache, self._group_bytes_max = cache, group_bytes_max

    # --- contents -----------------------------------------------------------------------------------------------------
    def _look(self) -> _Contents:
        if self._contents is None:
            self._contents = _contents(self.tier.metadata, self.storage)
        return self._contents

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table's rows; empty before the first commit."""
        return self._look().schema

    @property
    def layout(self) -> Layout:
        """The layout of the table's rows."""
        return self._look().layout

    def files(self, lane: int, start: int, stop: int) -> list[TableFile]:
        """Files with records of batches [start, stop) of a lane, in order."""
        return _between(self._look().lanes.get(lane, []), start, stop)

    def position_after(self, lane: int, index: int) -> LanePosition:
        """The start of the first file with records from an index on; the frontier if there is none."""
        found = self._look().lanes.get(lane, [])
        at = bisect_left(found, index, key=lambda file: file.first_index)
        return LanePosition(found[at].first_index, found[at].first_seq) if at < len(found) else self.tier.frontier(lane)

    def parts(self, lane: int, start: int, stop: int) -> list[TableFile]:
        """The files whose footers cover all entries of [start, stop): files with records, and files with the control
        entries of spans without records."""
        found = self.files(lane, start, stop)
        ends = [file.first_index for file in found]
        for file in _between(self._look().entries.get(lane, []), start, stop):
            after = bisect_left(ends, file.stop_index)
            if not after or found[after - 1].stop_index <= file.first_index:
                found.append(file)
        return sorted(found, key=lambda file: file.first_index)

    def doubles(self, lane: int, start: int, stop: int) -> list[tuple[int, str]]:
        """Files that begin in [start, stop) before the end of the previous file: the index, and both names.

        A reader still returns each index once. A count of the table's rows does not.
        """
        contents = self._look()
        return [
            (file.first_index, f"{before.path} and {file.path}")
            for files in (contents.lanes.get(lane, []), contents.entries.get(lane, []))
            for before, file in pairwise(files)
            if start <= file.first_index < min(stop, before.stop_index)
        ]

    # --- rows ---------------------------------------------------------------------------------------------------------
    def rows(self, lane: int, start: int, stop: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of batches [start, stop) of a lane, at most a row group at a time, sorted by index and seq.

        `columns` None: all columns of the table. Entries without records are rows too (`_kind`). Rows below the table's
        start (`tier.start`), or at or above its frontier, are not included. BadTable names a missing or damaged file.
        """
        low, high = max(start, self.tier.start(lane)[0]), min(stop, self.tier.frontier(lane)[0])
        if unknown := [name for name in columns or () if name not in self.schema.names and self.schema.names]:
            what = f"the table has no column {', '.join(unknown)}"
            raise BadValue(what, f"its columns are {', '.join(self.schema.names)}")
        names = self.schema.names if columns is None else list(columns)
        entries = _between(self._look().entries.get(lane, []), low, high)
        if not entries:
            yield from self._rows_of(self.files(lane, low, high), low, high, names)
            return
        wanted = list(dict.fromkeys([*names, "_index"]))
        records = self._rows_of(self.files(lane, low, high), low, high, wanted)
        for found in merged(records, self._rows_of(entries, low, high, wanted)):
            yield found.select(names) if wanted != names else found

    def _rows_of(
        self, files: Sequence[TableFile], start: int, stop: int, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        at = start
        for file in files:
            yield from self.file_rows(file, at, stop, names)
            at = max(at, file.stop_index)

    def footer(self, path: str) -> SpanFooter | None:
        """The footer of a file that a tier job wrote; None for files of other programs. BadTable if it is damaged."""
        with self.storage.open(path) as stream, reading(path):
            return read_footer(pq.ParquetFile(stream), path)

    def file_rows(self, file: TableFile, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of one file with start <= index < stop; columns that were added after the file are null."""
        with RowGroupFile(self.storage, file, self._cache, self._group_bytes_max) as parquet:
            facts, layout = parquet.facts(), self.layout
            wanted = tuple(
                name
                for name in dict.fromkeys(physical(each, layout) for each in [*columns, "_index"])
                if name in facts.names
            )
            for number, (first, last, _) in enumerate(facts.groups):
                if first < stop and last >= start:
                    with reading(file.path):
                        group = parquet.group(number, wanted)
                        indices = group.column("_index").to_numpy()
                        low, high = np.searchsorted(indices, [start, stop]).tolist()
                        parts = pieces(group.slice(low, high - low), TABLE_PIECE_BYTES)
                    yield from self._decoded(file.path, parts, columns)

    def _decoded(self, path: str, parts: Iterator[pa.Table], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        while True:
            with reading(path):
                if (part := next(parts, None)) is None:
                    return
                names = [physical(field.name, self.layout) for field in schema]
                arrays = [
                    part.column(name).cast(field.type)
                    if name in part.column_names
                    else constant(field, self.layout, part.num_rows)
                    for name, field in zip(names, schema, strict=True)
                ]
                batches = pa.table(arrays, schema=schema).combine_chunks().to_batches()
            yield from batches

    # --- positions ----------------------------------------------------------------------------------------------------
    def find(self, lane: int, by: str, value: int) -> LanePosition | None:
        """The position of the batch at an index, with a seq, or of the first batch since a time (us).

        None if it is not below the frontier. A position below the start is moved to the start.
        """
        low, high = self.tier.start(lane)[0], self.tier.frontier(lane)[0]
        if by == "index":
            low = max(low, value)
        elif by == "seq":
            files = self.files(lane, low, high)
            low = next((max(low, file.first_index) for file in files if file.stop_seq > value), high)
        for group in self.rows(lane, low, high, ["_index", "_seq", "_count", "_append_time"]) if low < high else ():
            index, seq, count, time = (column.to_numpy() for column in map(_as_integers, group.columns))
            if by == "index":
                hits = index >= value
            elif by == "seq":
                hits = (seq >= value) & (count > 0)
            else:
                hits = time >= value
            if hits.any():
                found = int(index[int(np.argmax(hits))])
                return LanePosition(found, int(seq[int(np.searchsorted(index, found))]))
        return None


def _between(files: Sequence[TableFile], start: int, stop: int) -> list[TableFile]:
    """The files of one lane that have rows of [start, stop)."""
    first = bisect_left(files, start + 1, key=lambda file: file.stop_index)
    return [file for file in files[first:] if file.first_index < stop]


def _as_integers(column: pa.Array) -> pa.Array:
    return column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column


@contextmanager
def naming_the_store(tier: Tier) -> Iterator[None]:
    """Add the table and the store to an error of the store."""
    try:
        yield
    except TierUnavailable as error:
        problem = f"table {tier.table} cannot be read from its store ({tier.store}): {error.message}"
        hint = "check that the store is up, and check its address and your keys (tier.properties); then continue"
        raise TierUnavailable(problem, hint) from error


def table_cuts(table: TopicTable, lane: int, start: int, stop: int, piece_bytes: int) -> list[Cut]:
    """Group files with batches [start, stop) of a lane into pieces of about `piece_bytes`."""
    cuts: list[Cut] = []
    size = 0
    files = table.files(lane, start, stop)
    for number, file in enumerate(files):
        size += file.bytes
        if size >= piece_bytes or number == len(files) - 1:
            cuts.append(Cut(file.stop_index, file.stop_seq, size))
            size = 0
    reached, end = cuts[-1].index if cuts else start, min(stop, table.tier.frontier(lane)[0])
    if reached < end and table.layout is Layout.SPLIT:  # the rest has only control entries
        cuts.append(Cut(*table.position_after(lane, max(reached, end)), 0))
    return cuts


class TableBatch(Batch):
    """A batch with records as columns. Its payload is encoded on first use."""

    __slots__ = ("_made", "_size")

    def __init__(
        self, lane: int, entry: OrderEntry, arrow: pa.RecordBatch | None, kept: Any, schemas: TopicSchemas
    ) -> None:
        super().__init__(lane, entry, b"", {}, schemas)
        self._arrow, self._made, self._size = arrow, kept, entry.size

    @property
    def payload(self) -> Any:
        """The records, encoded now by Arrow: not the published bytes, unless the table kept them."""
        if self._made is None:
            self._made = encoded(self.to_arrow(), None) if self._arrow is not None else b""
        return self._made

    @payload.setter
    def payload(self, _value: Any) -> None:
        """Ignore the initial value of the base class."""

    @property
    def kept(self) -> Any:
        """The published payload if the table kept it; else None."""
        return self._made if self._arrow is None else None

    @property
    def size(self) -> int:
        """The size of the published payload in bytes."""
        return self._size


def table_batches(
    table: TopicTable,
    lane: int,
    start: int,
    stop: int,
    schemas: TopicSchemas,
    *,
    partitions: Collection[int] | None = None,
    control: bool = False,
    durable: bool = False,
) -> Iterator[list[Batch]]:
    """Yield batches and gaps with start <= index < stop of a lane, up to the table's frontier (`tier.frontier`).

    `durable`: for a reader of durable records that knows NEVER_DURABLE.

    Yields a list for each row group, lazily. Each index appears once, in a batch or in a gap. Session entries (without
    `control`) and other partitions are left out.
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
            f"lane {lane}: a batch between index {index[0]} and {index[-1]} is incomplete",
            "sort the table by _index, _seq",
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
        found.append(TableBatch(lane, entry, arrow, payload, schemas))
    return found


def _topic_columns(group: pa.RecordBatch, schemas: TopicSchemas) -> pa.RecordBatch:
    """Convert the topic's own columns to the types of the topic; rows without records have nulls."""
    schema = schemas.newest
    arrays = [
        from_table(group.column(field.name), field.type)
        if field.name in group.schema.names
        else pa.nulls(group.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _numbers(column: pa.Array) -> Int64s:
    if column.null_count:
        raise BadTable("a row of the table has no position in the log", "another program wrote it; remove the row")
    plain = column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column
    found: Int64s = plain.to_numpy().astype(np.int64)
    return found
