"""Reading a topic's table without a catalog and without Spark: pyarrow over the files that a metadata file names.

The store tells readers which metadata file is the newest (`Tier.metadata`); that file and all it names never change, so
what was learned from it is kept. Files are sorted by index and do not overlap; a hole between two rows is a loss.
Page checksums of Parquet are verified: wrong bytes are a BadTable that names the file, never rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.errors import BadTable, BadValue, NotAvailable
from embarcadero.limits import TABLE_CACHE_BYTES, TABLE_FOOTERS_MAX, TABLE_PIECE_BYTES
from embarcadero.tier.layouts import Layout, constant, layout_of, physical, row_schema
from embarcadero.tier.parquet import Footer, read_footer, span_of
from embarcadero.tier.row_groups import dictionary_columns, group_bytes, pieces
from embarcadero.tier.row_merge import merged
from embarcadero.tier.snapshots import loaded
from embarcadero.tier.storage import Properties, Storage, reading
from embarcadero.types import Tier

from pyiceberg.catalog.noop import NoopCatalog  # isort: skip - storage.py says what is missing
from pyiceberg.conversions import from_bytes  # isort: skip
from pyiceberg.io.pyarrow import schema_to_pyarrow  # isort: skip
from pyiceberg.serializers import FromInputFile  # isort: skip
from pyiceberg.table import StaticTable, Table  # isort: skip

_MANIFESTS_MAX: Final = 4_096  # whose contents are kept
_TABLES_MAX: Final = 64  # metadata files whose contents are kept
_ANY: Final = (1 << 63) - 1
_PLACE: Final = ("_lane", "_index", "_seq")


@dataclass(frozen=True, slots=True)
class ColdFile:
    """A file of a table: rows of batches [first_index, stop_index) of a lane, records [first_seq, stop_seq)."""

    path: str
    bytes: int
    lane: int
    first_index: int
    stop_index: int
    first_seq: int
    stop_seq: int
    rows: int


class Manifests:
    """What manifests say about files; a manifest never changes, so each is read once."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[ColdFile]] = OrderedDict()
        self._lock = Lock()

    def files(self, table: Table) -> list[ColdFile]:
        """All files of the newest snapshot of a table."""
        snapshot = table.current_snapshot()
        if snapshot is None:
            return []
        ids = {name: table.schema().find_field(name).field_id for name in _PLACE}
        layout = layout_of(table.properties, str(table.name()))
        found: list[ColdFile] = []
        for manifest in snapshot.manifests(table.io):
            with self._lock:
                known = self._known.get(manifest.manifest_path)
            if known is None:
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                known = [_cold_file(entry.data_file, ids, table, layout) for entry in entries]
                with self._lock:
                    self._known[manifest.manifest_path] = known
                    while len(self._known) > _MANIFESTS_MAX:
                        self._known.popitem(last=False)
            found += known
        return found


def _cold_file(file: Any, ids: dict[str, int], table: Table, layout: Layout) -> ColdFile:
    bounds = {}
    for name, number in ids.items():
        kind: Any = table.schema().find_type(name)
        low, high = (file.lower_bounds or {}).get(number), (file.upper_bounds or {}).get(number)
        if low is None or high is None:
            raise BadTable(f"{file.file_path} has no bounds of {name}", "write it again with statistics")
        bounds[name] = int(from_bytes(kind, low)), int(from_bytes(kind, high)) + 1
    lanes, (first, stop), (first_seq, stop_seq) = bounds["_lane"], bounds["_index"], bounds["_seq"]
    if lanes[1] - lanes[0] != 1:
        raise BadTable(f"{file.file_path} has rows of several lanes", "compact tables lane by lane, sorted by _index")
    if (span := span_of(file.file_path)) is not None:  # an entry without records has the seq of the record after it
        first_seq, stop_seq = span.start_seq, span.stop_seq
        if layout is Layout.SPLIT:  # control entries of the span are in another file
            first, stop = span.start, span.stop
    return ColdFile(
        file.file_path, int(file.file_size_in_bytes), lanes[0], first, stop, first_seq, stop_seq, int(file.record_count)
    )


_shared_manifests: Final = Manifests()


class _Facts(NamedTuple):
    """What the footer of a file says: names of columns, and row groups (first and last index, bytes in memory)."""

    names: list[str]
    groups: list[tuple[int, int, int]]
    dictionaries: list[str]  # columns to be read as such: nobody knows yet how large they are without


class GroupCache:
    """Footers and decoded row groups that were read last, within bounds. Files never change. Safe for threads."""

    def __init__(self, bytes_max: int = TABLE_CACHE_BYTES, footers_max: int = TABLE_FOOTERS_MAX) -> None:
        self._bytes_max, self._footers_max = bytes_max, footers_max
        self._footers: OrderedDict[str, _Facts] = OrderedDict()
        self._groups: OrderedDict[tuple[str, int, tuple[str, ...]], pa.Table] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0  # of the row groups that are kept

    def facts(self, path: str) -> _Facts | None:
        """The footer of a file, if it is kept."""
        with self._lock:
            return self._footers.get(path)

    def keep_facts(self, path: str, facts: _Facts) -> None:
        """Keep the footer of a file."""
        with self._lock:
            self._footers[path] = facts
            while len(self._footers) > self._footers_max:
                self._footers.popitem(last=False)

    def group(self, path: str, number: int, columns: tuple[str, ...]) -> pa.Table | None:
        """Columns of a row group, if they are kept."""
        with self._lock:
            found = self._groups.get((path, number, columns))
            if found is not None:
                self._groups.move_to_end((path, number, columns))
            return found

    def keep_group(self, path: str, number: int, columns: tuple[str, ...], group: pa.Table) -> None:
        """Keep columns of a row group, unless it is too large."""
        if group.nbytes > self._bytes_max:
            return
        with self._lock:
            before = self._groups.pop((path, number, columns), None)
            self._groups[path, number, columns] = group
            self.bytes += group.nbytes - (0 if before is None else before.nbytes)
            while self.bytes > self._bytes_max:
                self.bytes -= self._groups.popitem(last=False)[1].nbytes


class _ParquetFile:
    """A file of a table. It is opened when something is read that the cache does not have."""

    def __init__(self, storage: Storage, file: ColdFile, cache: GroupCache | None, group_bytes_max: int) -> None:
        self._storage, self._file, self._cache, self._group_bytes_max = storage, file, cache, group_bytes_max
        self._stream: Any = None
        self._parquet: pq.ParquetFile | None = None
        self._as_dictionaries = False

    def __enter__(self) -> _ParquetFile:
        return self

    def __exit__(self, *_failure: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def _open(self, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
        """Open the file, once for its footer and, if columns are to be read as dictionaries, again for that."""
        if self._parquet is None:
            self._stream = self._storage.open(self._file.path)
        if self._parquet is None or (dictionaries and not self._as_dictionaries):
            known, self._as_dictionaries = self._parquet, bool(dictionaries)
            with reading(self._file.path):
                self._parquet = pq.ParquetFile(
                    self._stream, page_checksum_verification=True, pre_buffer=True, read_dictionary=list(dictionaries),
                    metadata=None if known is None else known.metadata,
                )  # fmt: skip
        return self._parquet

    def facts(self) -> _Facts:
        """What the footer says. BadTable, if it contradicts the table."""
        path = self._file.path
        known = None if self._cache is None else self._cache.facts(path)
        if known is not None:
            return known
        parquet = self._open()
        with reading(path):
            facts, rows = _facts(parquet, path), parquet.metadata.num_rows
        if rows != self._file.rows or "_index" not in facts.names:
            raise BadTable(f"{path} has {rows} rows, its table says {self._file.rows}", "restore it from a copy")
        if self._cache is not None:
            self._cache.keep_facts(path, facts)
        return facts

    def group(self, number: int, columns: tuple[str, ...]) -> pa.Table:
        """Columns of a row group. NotAvailable, if it takes more memory than this reader may use."""
        path, facts = self._file.path, self.facts()
        if (size := facts.groups[number][2]) > self._group_bytes_max:
            raise NotAvailable(
                f"row group {number} of {path} takes {size} bytes of memory; a broker reads at most "
                f"{self._group_bytes_max}",
                'read the table itself (install "embarcadero[spark]"), or write it with smaller row groups',
            )
        known = None if self._cache is None else self._cache.group(path, number, columns)
        if known is not None:
            return known
        group = self._open(facts.dictionaries).read_row_group(number, columns=list(columns)).combine_chunks()
        if self._cache is not None:
            self._cache.keep_group(path, number, columns, group)
        return group


class _Contents(NamedTuple):
    """What a metadata file says: files by lane, in their order, and columns of rows."""

    lanes: dict[int, list[ColdFile]]
    schema: pa.Schema
    layout: Layout = Layout.WHOLE
    entries: dict[int, list[ColdFile]] = {}  # of control entries, where those have a table of their own


@lru_cache(maxsize=_TABLES_MAX)
def _contents(metadata: str, storage: Storage) -> _Contents:
    """A metadata file never changes, so it is read once; failures are not kept.

    All files are read with the reader's own properties: those of the table do not say where its keys go. Control
    entries are those of the metadata file that the table's snapshot names: whatever was added to their table since then
    is not part of the topic's table yet.
    """
    if not metadata:
        return _Contents({}, pa.schema([]))
    table = static_table(metadata, storage)
    entries = loaded(table).entries
    with reading(metadata):
        layout = layout_of(table.properties, metadata)
        schema = row_schema(schema_to_pyarrow(table.schema(), include_field_ids=False), layout)
        lanes = _by_lane(_shared_manifests.files(table))
    if not entries:
        return _Contents(lanes, schema, layout)
    with reading(entries):
        return _Contents(lanes, schema, layout, _by_lane(_shared_manifests.files(static_table(entries, storage))))


def static_table(metadata: str, storage: Storage) -> StaticTable:
    """The table that a metadata file describes, read without a catalog."""
    with reading(metadata):
        return StaticTable(
            ("static-table", metadata), FromInputFile.table_metadata(storage.io.new_input(metadata)), metadata,
            storage.io, NoopCatalog("static-table"),
        )  # fmt: skip


def _by_lane(files: Iterable[ColdFile]) -> dict[int, list[ColdFile]]:
    """Files in their order. Files of the days of one span all tell its end: each ends where the next one begins."""
    lanes: dict[int, list[ColdFile]] = {}
    for file in sorted(files, key=lambda file: (file.lane, file.first_index)):
        own = lanes.setdefault(file.lane, [])
        if own and own[-1].first_index < file.first_index and own[-1].stop_index == file.stop_index:
            own[-1] = replace(own[-1], stop_index=file.first_index, stop_seq=min(own[-1].stop_seq, file.first_seq))
        own.append(file)
    return lanes


class ColdTable:
    """The part of a topic that is in its table, as of one metadata file. Cheap to make; safe to share by threads."""

    def __init__(
        self, tier: Tier, properties: Properties | None = None, cache: GroupCache | None = None,
        group_bytes_max: int = _ANY, storage: Storage | None = None,
    ) -> None:  # fmt: skip
        """`properties` of the caller (keys, for example) go before those that the cluster tells (`tier.properties`).

        `storage`: one to be used in place of one with these properties. A row group that takes more than
        `group_bytes_max` of memory is refused with NotAvailable, before it is read.
        """
        self.tier = tier
        self.storage = storage or Storage({**tier.properties, **(properties or {})})
        self._contents: _Contents | None = None
        self._cache, self._group_bytes_max = cache, group_bytes_max

    # --- what there is ------------------------------------------------------------------------------------------------
    def _look(self) -> _Contents:
        if self._contents is None:
            self._contents = _contents(self.tier.metadata, self.storage)
        return self._contents

    @property
    def schema(self) -> pa.Schema:
        """Columns of rows of the table; empty while nothing was committed to it."""
        return self._look().schema

    @property
    def layout(self) -> Layout:
        """How the table keeps its rows."""
        return self._look().layout

    def files(self, lane: int, start: int, stop: int) -> list[ColdFile]:
        """Files with records of batches [start, stop) of a lane, in their order."""
        return _between(self._look().lanes.get(lane, []), start, stop)

    def place_after(self, lane: int, index: int) -> tuple[int, int]:
        """The place at which the first file with records from an index on begins; else the frontier."""
        found = self._look().lanes.get(lane, [])
        at = bisect_left(found, index, key=lambda file: file.first_index)
        return (found[at].first_index, found[at].first_seq) if at < len(found) else self.tier.frontier(lane)

    def parts(self, lane: int, start: int, stop: int) -> list[ColdFile]:
        """The files whose footers tell of all entries of [start, stop): those with records, and those with control
        entries of spans that have no records."""
        found = self.files(lane, start, stop)
        ends = [file.first_index for file in found]
        for file in _between(self._look().entries.get(lane, []), start, stop):
            after = bisect_left(ends, file.stop_index)
            if not after or found[after - 1].stop_index <= file.first_index:
                found.append(file)
        return sorted(found, key=lambda file: file.first_index)

    def doubles(self, lane: int, start: int, stop: int) -> list[tuple[int, str]]:
        """Files that begin in [start, stop) where another one is not at its end: an index, and both names.

        A reader takes each index once all the same. A count of the table's rows does not.
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
        """Rows of batches [start, stop) of a lane, lazily, a row group or less at a time, sorted by index and seq.

        `columns` None: all of the table. Entries without records are rows, too (`_kind`). What is below the table's
        start (`tier.start`), or not below its frontier, is not there. BadTable names a missing or damaged file.
        """
        low, high = max(start, self.tier.start(lane)[0]), min(stop, self.tier.frontier(lane)[0])
        if unknown := [name for name in columns or () if name not in self.schema.names and self.schema.names]:
            raise BadValue(f"no such columns: {', '.join(unknown)}", f"there are {', '.join(self.schema.names)}")
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
        self, files: Sequence[ColdFile], start: int, stop: int, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        at = start
        for file in files:
            yield from self.file_rows(file, at, stop, names)
            at = max(at, file.stop_index)

    def footer(self, path: str) -> Footer | None:
        """What a file of ours says about itself; None for the files of others. BadTable, if it is damaged."""
        with self.storage.open(path) as stream, reading(path):
            return read_footer(pq.ParquetFile(stream), path)

    def file_rows(self, file: ColdFile, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of one file with start <= index < stop; columns that are younger than the file are null."""
        with _ParquetFile(self.storage, file, self._cache, self._group_bytes_max) as parquet:
            facts, layout = parquet.facts(), self.layout
            wanted = tuple(
                name for name in dict.fromkeys(physical(each, layout) for each in [*columns, "_index"])
                if name in facts.names
            )  # fmt: skip
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
                    if name in part.column_names else constant(field, self.layout, part.num_rows)
                    for name, field in zip(names, schema, strict=True)
                ]  # fmt: skip
                batches = pa.table(arrays, schema=schema).combine_chunks().to_batches()
            yield from batches

    # --- places -------------------------------------------------------------------------------------------------------
    def find(self, lane: int, by: str, value: int) -> tuple[int, int] | None:
        """The place, (index, seq), of the batch with an index, with a seq in it, or the first since a time (us).

        None if that is not below the frontier. What is below the start is found at the start.
        """
        low, high = self.tier.start(lane)[0], self.tier.frontier(lane)[0]
        if by == "index":
            low = max(low, value)
        elif by == "seq":
            files = self.files(lane, low, high)
            low = next((max(low, file.first_index) for file in files if file.stop_seq > value), high)
        for group in self.rows(lane, low, high, ["_index", "_seq", "_count", "_append_time"]) if low < high else ():
            index, seq, count, time = (column.to_numpy() for column in map(_numbers, group.columns))
            if by == "index":
                hits = index >= value
            elif by == "seq":
                hits = (seq >= value) & (count > 0)
            else:
                hits = time >= value
            if hits.any():
                found = int(index[int(np.argmax(hits))])
                return found, int(seq[int(np.searchsorted(index, found))])
        return None


def _between(files: Sequence[ColdFile], start: int, stop: int) -> list[ColdFile]:
    """Files with rows of [start, stop), of those of one lane."""
    first = bisect_left(files, start + 1, key=lambda file: file.stop_index)
    return [file for file in files[first:] if file.first_index < stop]


def _numbers(column: pa.Array) -> pa.Array:
    return column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _facts(parquet: pq.ParquetFile, path: str) -> _Facts:
    """Columns and row groups of a file: first and last index of each group, and the memory that it takes.

    The indices of a file that another program wrote are not known before it is read.
    """
    footer, metadata = read_footer(parquet, path), parquet.metadata
    numbers = range(metadata.num_row_groups)
    spans = [(0, _ANY)] * len(numbers) if footer is None else [(first, last) for first, last, _ in footer.groups]
    known = [] if footer is None else footer.decoded
    sizes = known or [group_bytes(metadata, number) for number in numbers]
    groups = [(first, last, size) for (first, last), size in zip(spans, sizes, strict=True)]
    return _Facts(parquet.schema_arrow.names, groups, [] if known else dictionary_columns(metadata))
