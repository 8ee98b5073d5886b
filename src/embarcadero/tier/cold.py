"""Reading a topic's table without a catalog and without Spark: pyarrow over the files that a metadata file names.

The store tells readers which metadata file is the newest (`Tier.metadata`); that file and all it names never change, so
what was learned from it is kept. Files are sorted by index and do not overlap; a hole between two rows is a loss.
Page checksums of Parquet are verified: wrong bytes are a BadTable that names the file, never rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embarcadero.errors import BadTable, BadValue
from embarcadero.tier.parquet import Footer, read_footer, span_of
from embarcadero.tier.storage import Properties, Storage, reading
from embarcadero.types import Tier

from pyiceberg.conversions import from_bytes  # isort: skip - storage.py says what is missing
from pyiceberg.io.pyarrow import schema_to_pyarrow  # isort: skip
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
        found: list[ColdFile] = []
        for manifest in snapshot.manifests(table.io):
            with self._lock:
                known = self._known.get(manifest.manifest_path)
            if known is None:
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                known = [_cold_file(entry.data_file, ids, table) for entry in entries]
                with self._lock:
                    self._known[manifest.manifest_path] = known
                    while len(self._known) > _MANIFESTS_MAX:
                        self._known.popitem(last=False)
            found += known
        return found


def _cold_file(file: Any, ids: dict[str, int], table: Table) -> ColdFile:
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
    return ColdFile(
        file.file_path, int(file.file_size_in_bytes), lanes[0], first, stop, first_seq, stop_seq, int(file.record_count)
    )


_shared_manifests: Final = Manifests()


class _Contents(NamedTuple):
    """What a metadata file says: files by lane, in their order, and columns."""

    lanes: dict[int, list[ColdFile]]
    schema: pa.Schema


@lru_cache(maxsize=_TABLES_MAX)
def _contents(metadata: str, properties: tuple[tuple[str, str], ...]) -> _Contents:
    """A metadata file never changes, so it is read once; failures are not kept."""
    if not metadata:
        return _Contents({}, pa.schema([]))
    lanes: dict[int, list[ColdFile]] = {}
    with reading(metadata):
        table = StaticTable.from_metadata(metadata, dict(properties))
        files = _shared_manifests.files(table)
        schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    for file in sorted(files, key=lambda file: (file.lane, file.first_index)):
        lanes.setdefault(file.lane, []).append(file)
    return _Contents(lanes, schema)


class ColdTable:
    """The part of a topic that is in its table, as of one metadata file. Cheap to make; safe to share by threads."""

    def __init__(self, tier: Tier, properties: Properties | None = None) -> None:
        self.tier = tier
        self.storage = Storage(properties or {})
        self._contents: _Contents | None = None

    # --- what there is ------------------------------------------------------------------------------------------------
    def _look(self) -> _Contents:
        if self._contents is None:
            self._contents = _contents(self.tier.metadata, tuple(sorted(self.storage.properties.items())))
        return self._contents

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table; empty while nothing was committed to it."""
        return self._look().schema

    def files(self, lane: int, start: int, stop: int) -> list[ColdFile]:
        """Files with rows of batches [start, stop) of a lane, in their order."""
        found = self._look().lanes.get(lane, [])
        first = bisect_left(found, start + 1, key=lambda file: file.stop_index)
        return [file for file in found[first:] if file.first_index < stop]

    # --- rows ---------------------------------------------------------------------------------------------------------
    def rows(self, lane: int, start: int, stop: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Rows of batches [start, stop) of a lane, lazily, a row group at a time, sorted by index and seq.

        `columns` None: all of the table. Entries without records are rows, too (`_kind`). What is below the table's
        start (`tier.start`), or not below its frontier, is not there. BadTable names a missing or damaged file.
        """
        low, high = max(start, self.tier.start(lane)[0]), min(stop, self.tier.frontier(lane)[0])
        if unknown := [name for name in columns or () if name not in self.schema.names and self.schema.names]:
            raise BadValue(f"no such columns: {', '.join(unknown)}", f"there are {', '.join(self.schema.names)}")
        names = self.schema.names if columns is None else list(columns)
        at = low
        for file in self.files(lane, low, high):
            yield from self.file_rows(file, max(at, low), high, names)
            at = max(at, file.stop_index)

    def footer(self, path: str) -> Footer | None:
        """What a file of ours says about itself; None for the files of others. BadTable, if it is damaged."""
        with self.storage.open(path) as stream, reading(path):
            return read_footer(pq.ParquetFile(stream), path)

    def file_rows(self, file: ColdFile, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Rows of one file with start <= index < stop; columns that are younger than the file are null."""
        with self.storage.open(file.path) as stream:
            with reading(file.path):
                parquet = pq.ParquetFile(stream, page_checksum_verification=True, pre_buffer=True)
                names, rows, groups = parquet.schema_arrow.names, parquet.metadata.num_rows, _groups(parquet, file.path)
            if rows != file.rows or "_index" not in names:
                raise BadTable(f"{file.path} has {rows} rows, its table says {file.rows}", "restore it from a copy")
            wanted = [name for name in dict.fromkeys([*columns, "_index"]) if name in names]
            for number, (first, last) in enumerate(groups):
                if first < stop and last >= start:
                    with reading(file.path):
                        group = parquet.read_row_group(number, columns=wanted).combine_chunks()
                        batches = self._cut(group, start, stop, columns)
                    yield from batches

    def _cut(self, group: pa.Table, start: int, stop: int, columns: Sequence[str]) -> list[pa.RecordBatch]:
        indices = group.column("_index").to_numpy()
        first, last = np.searchsorted(indices, [start, stop]).tolist()
        schema = pa.schema([self.schema.field(name) for name in columns])
        cut: list[pa.RecordBatch] = []
        for batch in group.slice(first, last - first).to_batches():
            arrays = [
                batch.column(field.name).cast(field.type)
                if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]  # fmt: skip
            if batch.num_rows:
                cut.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        return cut

    # --- places -------------------------------------------------------------------------------------------------------
    def find(self, lane: int, by: str, value: int) -> tuple[int, int] | None:
        """The place, (index, seq), of the batch with an index, with a seq in it, or the first since a time (us).

        None if that is not below the frontier. What is below the start is found at the start.
        """
        low, high = self.tier.start(lane), self.tier.frontier(lane)
        if by == "index" and value >= high[0]:
            return None
        for file in self.files(lane, low[0], high[0]):
            if (by == "index" and file.stop_index <= value) or (by == "seq" and file.stop_seq <= value):
                continue
            for group in self.file_rows(file, low[0], high[0], ["_index", "_seq", "_count", "_append_time"]):
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


def _numbers(column: pa.Array) -> pa.Array:
    return column.view(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _groups(parquet: pq.ParquetFile, path: str) -> list[tuple[int, int]]:
    """First and last index of each row group; of a file that is not ours they are not known before it is read."""
    footer = read_footer(parquet, path)
    if footer is not None:
        return [(first, last) for first, last, _ in footer.groups]
    return [(0, _ANY)] * parquet.metadata.num_row_groups
