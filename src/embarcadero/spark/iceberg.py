"""A snapshot of an Iceberg table as a frame: PyIceberg plans its files and applies its deletes, tasks read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import pyarrow as pa

from embarcadero.errors import BadTable, BadValue
from embarcadero.spark.read.frame import frame_type
from embarcadero.spark.versions import from_arrow, to_arrow
from embarcadero.tier.columns import table_type
from embarcadero.tier.storage import NAMESPACE, Storage, reading, typed_errors

from pyiceberg.catalog import load_catalog  # isort: skip - storage.py says what is missing
from pyiceberg.catalog.noop import NoopCatalog  # isort: skip
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError  # isort: skip
from pyiceberg.expressions import AlwaysTrue  # isort: skip
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow  # isort: skip
from pyiceberg.serializers import FromInputFile  # isort: skip
from pyiceberg.table import DataScan, StaticTable  # isort: skip

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One snapshot of a table. It is sent to tasks; `properties` may have keys, so it is neither shown nor recorded."""

    table: str
    uuid: str
    id: int
    metadata: str
    properties: tuple[tuple[str, str], ...] = field(repr=False)

    def files(self) -> list[tuple[str, int]]:
        """Data files with their sizes, by path."""
        with reading(self.table):
            tasks = list(_scan(self).plan_files())
        return sorted((task.file.file_path, task.file.file_size_in_bytes) for task in tasks)

    def struct(self) -> StructType:
        """Its columns, as frames have them. BadSchema names a column of a type that a topic can't have."""
        from pyspark.sql.types import StructField, StructType

        columns = schema_to_pyarrow(_scan(self).projection(), include_field_ids=False)
        types = {each.name: frame_type(table_type(each.type, each.name)) for each in columns}
        return StructType([StructField(name, from_arrow(kind)) for name, kind in types.items()])

    def frame(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame:
        """The rows of some of its files, a task a file."""
        schema, wanted = to_arrow(self.struct()), list(paths)

        def read(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for part in parts:
                for number in part.column(0).to_pylist():
                    yield from _rows(self, wanted[number], schema)

        return spark.range(0, len(wanted), 1, len(wanted)).mapInArrow(read, self.struct())


def open_snapshot(name: str, catalog: Mapping[str, str], snapshot_id: int | None) -> Snapshot:
    """A snapshot of a table in a catalog; None: the current one. BadValue or BadTable, if it is not there.

    `catalog` has PyIceberg's properties. `name` among them is the catalog's own name, by which a database of several
    catalogs keeps its tables apart.
    """
    properties = {"name": NAMESPACE, **catalog}
    with typed_errors(name):
        try:
            table = load_catalog(properties.pop("name"), **properties).load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            hint = "write namespace.table, and name the catalog by its properties (tier.properties)"
            raise BadValue(f"there is no table {name!r} in the catalog", hint) from None
    found = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if found is None:
        if snapshot_id is None:
            raise BadValue(f"table {name!r} is empty: it has no snapshot", "load it when something is in it")
        raise BadTable(f"table {name!r} has no snapshot {snapshot_id} any more", "begin another load, by another name")
    told = tuple(sorted((key, str(value)) for key, value in table.io.properties.items()))
    return Snapshot(name, str(table.metadata.table_uuid), found.snapshot_id, table.metadata_location, told)


@lru_cache(maxsize=16)
def _scan(snapshot: Snapshot) -> DataScan:
    """A scan of the snapshot; what manifests say is kept by PyIceberg while this process lives."""
    storage = Storage(dict(snapshot.properties))
    with reading(snapshot.metadata):
        metadata = FromInputFile.table_metadata(storage.io.new_input(snapshot.metadata))
    name = ("static-table", snapshot.metadata)
    table = StaticTable(name, metadata, snapshot.metadata, storage.io, NoopCatalog("static-table"))
    return table.scan(snapshot_id=snapshot.id)


def _rows(snapshot: Snapshot, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    scan = _scan(snapshot)
    tasks = [task for task in scan.plan_files() if task.file.file_path == path]
    rows = ArrowScan(scan.table_metadata, scan.io, scan.projection(), AlwaysTrue()).to_record_batches(tasks)
    while True:
        with reading(path):
            if (batch := next(rows, None)) is None:
                return
            cast = pa.Table.from_batches([batch]).cast(schema).to_batches()
        yield from cast
