"""Loading: copy the rows of files or of an Iceberg table into a topic, each once.

The job records its input when it begins: the list of files with sizes and times, or the snapshot of the table. Steps
follow from that record alone, so a job that continues loads exactly the missing files. It refuses files that changed
since then. A table may change; the job keeps reading its recorded snapshot. PyIceberg plans the files of a snapshot and
applies its deletes; tasks read them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadTable, BadValue, TopicExists, UnknownTopic
from embarcadero.spark.jobs import (
    STEP_BYTES,
    Job,
    JobFact,
    JobProgress,
    ProgressReport,
    check_target,
    typed,
    write_name,
)
from embarcadero.spark.processes import on_this_machine
from embarcadero.spark.read.tasks import arrow_schema, frame_type
from embarcadero.spark.versions import from_arrow, to_arrow
from embarcadero.tier.columns import table_type
from embarcadero.tier.storage import NAMESPACE, Storage, reading, typed_errors

from pyiceberg.catalog import load_catalog  # isort: skip - storage.py reports missing packages
from pyiceberg.catalog.noop import NoopCatalog  # isort: skip
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError  # isort: skip
from pyiceberg.expressions import AlwaysTrue  # isort: skip
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow  # isort: skip
from pyiceberg.serializers import FromInputFile  # isort: skip
from pyiceberg.table import DataScan, StaticTable  # isort: skip

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")  # of a path that starts with a store
KIND: Final = "load"
FORMATS: Final = ("parquet", "csv", "json")
_USUAL: Final[dict[str, dict[str, str]]] = {
    # Columns are checked against the header of each file, and a row that can't be read is an error, not nulls.
    "csv": {"header": "true", "inferSchema": "true", "enforceSchema": "false", "mode": "FAILFAST"},
    "json": {"mode": "FAILFAST"},
    "parquet": {},
}
_ENDINGS: Final = {"parquet": "parquet", "csv": "csv", "json": "json", "jsonl": "json", "ndjson": "json"}
_NAMED_MAX: Final = 3  # files that an error names
_PATTERN: Final = frozenset("*?[{")


class SourceFile(NamedTuple):
    """One file as it was when the job began."""

    path: str
    bytes: int
    changed_us: int


class _LoadBegun(msgspec.Struct, frozen=True):
    """The input of a load. `schema` is the frame's, as JSON; `steps` has the number of files of each step.

    `snapshot` has the id of the table and of its snapshot. It has no secrets: no keys of a catalog.
    """

    format: str
    roots: list[str]
    options: dict[str, str]
    columns: list[str]
    files: list[SourceFile]
    steps: list[int]
    schema: str
    snapshot: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a run: its `steps`, and the number of `files` of the whole load."""

    into: str
    steps: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSource:
    """Files that Spark reads: paths, folders or patterns, all of one format (None: from their names).

    `options` are those of Spark's reader, such as `{"sep": ";"}`. CSV files have a header by default.
    """

    paths: Sequence[str]
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """An Iceberg table: its name in a catalog, and PyIceberg's properties of that catalog."""

    name: str
    catalog: Mapping[str, str]
    snapshot: int | None = None


def load(
    spark: SparkSession,
    log: Log,
    into: str,
    source: FilesSource | TableSource,
    *,
    key: str | None = None,
    columns: Sequence[str] = (),
    name: str | None = None,
    step_bytes: int = STEP_BYTES,
    report: ProgressReport | None = None,
) -> Loaded:
    """Load all rows of files or of a table into a topic, each once; create the topic if it does not exist.

    Repeat the same call to continue a run that was killed; it does nothing if everything is loaded. Files that changed
    between two starts are refused; of a table, the snapshot of the first start is loaded. A row of CSV or JSON that
    can't be read ends the load.

    Arguments: a new topic has the columns of the source (or `columns` of them), and `key` as its key. `name`
    distinguishes jobs that load the same source into one topic. `step_bytes` is the size of one step. `report` is
    called after each step.

    Returns what this run did. Raises BadValue, BadSchema, BadTable or Stale.

        load(spark, log, "orders", FilesSource(paths=["s3a://lake/orders/"], format="parquet"), key="id")
    """
    check_target(into)
    source = _from_here(spark, source)
    kind = _kind(source)
    write = write_name(KIND, name, kind, *_asked(source))
    target = _known(log, into)
    known = None if target is None else Job.of(log, target, write).begun()
    wanted = _begun(spark, source, kind, columns, target, step_bytes) if known is None else None
    if target is not None and key is not None and key != target.key:
        raise BadValue(f"topic {into!r} has {target.key or 'no column'!r} as its key, not {key!r}", "leave the key out")
    if target is None and wanted is not None:
        target = _create(log, into, wanted, key)
    if target is None:
        raise UnknownTopic(f"there is no topic {into!r}", "it was deleted just now: start again")
    job = Job.of(log, target, write)
    if wanted is not None:
        known = job.begin(_packed(wanted))
    begun = _unpacked(known or b"")
    _check_same(spark, begun, source, kind, columns, name)
    steps = _Load(spark, job, begun, source, report)
    return Loaded(into, job.run(steps), len(begun.files))


def _from_here(spark: SparkSession, source: FilesSource | TableSource) -> FilesSource | TableSource:
    """Make paths absolute: a local JVM may have been started in another folder than this process."""
    if isinstance(source, TableSource) or not on_this_machine(spark.conf.get("spark.master", None)):
        return source
    return replace(
        source, paths=[path if _SCHEME.match(path) else os.path.join(os.getcwd(), path) for path in source.paths]
    )


def _kind(source: FilesSource | TableSource) -> str:
    """The format of a source; a `TableSource` has its own."""
    if isinstance(source, TableSource):
        return "iceberg"
    if not source.paths:
        raise BadValue("there are no files to load", "name files, folders or patterns")
    found = source.format
    if found is None:
        ends = {path.rstrip("/").rpartition("/")[2].rpartition(".")[2].lower() for path in source.paths}
        found = _ENDINGS.get(ends.pop()) if len(ends) == 1 else None
    if found not in FORMATS:
        raise BadValue(
            f"the format of {', '.join(source.paths)[:200]} is {source.format or 'not clear from the names'}",
            f"set format to one of: {', '.join(FORMATS)}",
        )
    return found


def _asked(source: FilesSource | TableSource) -> list[str]:
    return [source.name, str(source.snapshot)] if isinstance(source, TableSource) else sorted(source.paths)


def _known(log: Log, into: str) -> TopicInfo | None:
    try:
        return log.describe(into)
    except UnknownTopic:
        return None


# --- the source -------------------------------------------------------------------------------------------------------
def _begun(
    spark: SparkSession,
    source: FilesSource | TableSource,
    kind: str,
    columns: Sequence[str],
    target: TopicInfo | None,
    step_bytes: int,
) -> _LoadBegun:
    """Look up the source as it is now."""
    if isinstance(source, TableSource):
        snapshot = _snapshot(source)
        files = [SourceFile(path, size, 0) for path, size in snapshot.files()]
        schema = snapshot.struct()
        steps, pinned = _steps(files, step_bytes), (snapshot.uuid, snapshot.id)
        return _LoadBegun(kind, [source.name], {}, list(columns), files, steps, schema.json(), pinned)
    try:
        files = _files(spark, source.paths)
        if not files:
            raise BadValue(f"there are no files at {', '.join(source.paths)[:200]}", "check the paths")
        schema = _files_schema(spark, source, kind, [file.path for file in files], target)
    except Exception as error:
        raise _unreadable(error, source.paths) from error
    return _LoadBegun(
        kind, list(source.paths), dict(source.options), list(columns), files, _steps(files, step_bytes), schema.json()
    )


def _snapshot(source: TableSource, pinned: int | None = None) -> Snapshot:
    return open_snapshot(source.name, source.catalog, source.snapshot if pinned is None else pinned)


def _unreadable(error: Exception, paths: Sequence[str]) -> Exception:
    found = typed(error)
    if isinstance(error, type(found)):
        return found
    return BadValue(f"{', '.join(paths)[:200]} can't be read: {found.message}", "check paths, format and options")


def _files(spark: SparkSession, paths: Sequence[str]) -> list[SourceFile]:
    """List all files with sizes and times, by path, as Spark would list them for a read."""
    listed = (
        spark.read.format("binaryFile")
        .load(list(paths))
        .selectExpr("path", "length", "unix_micros(modificationTime) changed")
    )
    return sorted(SourceFile(row.path, int(row.length), int(row.changed)) for row in listed.collect())


def _files_schema(
    spark: SparkSession, source: FilesSource, kind: str, files: list[str], target: TopicInfo | None
) -> StructType:
    """The columns of files. Text is read with the types of an existing target, so its numbers stay numbers."""
    reader = spark.read.format(kind).options(**_options(kind, source.options))
    found = reader.load(list(source.paths)).schema
    if len(files) > 1 and (len(source.paths) > 1 or _PATTERN & set(source.paths[0])):
        alone = reader.load(files[:1]).schema
        if missing := [name for name in found.names if name not in alone.names and _in_path(name, files[0])]:
            raise BadValue(
                f"column {missing[0]!r} is in names of folders, but several paths or patterns are given instead of one "
                "folder",
                "give the folder above all of them",
            )
    if target is None or not target.versions.typed or kind == "parquet":
        return found
    from pyspark.sql.types import StructField, StructType

    known = arrow_schema(target.versions)
    own = {name: known.field(name).type for name in target.versions.newest.names}
    fields = [StructField(each.name, from_arrow(own[each.name])) if each.name in own else each for each in found]
    return StructType(fields)


def _in_path(name: str, path: str) -> bool:
    return f"/{name}=" in path


def _options(kind: str, given: Mapping[str, str]) -> dict[str, str]:
    return _USUAL[kind] | dict(given)


def _steps(files: Sequence[SourceFile], step_bytes: int) -> list[int]:
    """Number of files in each step: about `step_bytes`, at least one file."""
    steps: list[int] = []
    size = 0
    for file in files:
        if not steps or size + file.bytes > step_bytes:
            steps.append(0)
            size = 0
        steps[-1] += 1
        size += file.bytes
    return steps


def _check_same(
    spark: SparkSession,
    begun: _LoadBegun,
    source: FilesSource | TableSource,
    kind: str,
    columns: Sequence[str],
    name: str | None,
) -> None:
    """Raise BadValue if the job was begun with another source, or if its files have changed."""
    asked = [source.name] if isinstance(source, TableSource) else list(source.paths)
    options = {} if isinstance(source, TableSource) else dict(source.options)
    if (begun.format, sorted(begun.roots), begun.options, begun.columns) != (kind, sorted(asked), options, [*columns]):
        raise BadValue(
            f"load {name or 'of the same name'!r} was begun with {begun.format} {', '.join(begun.roots)[:200]}, with "
            "other options or columns",
            "give the same to continue, or another name to begin another load",
        )
    if isinstance(source, TableSource):
        return
    now, then = set(_files(spark, source.paths)), set(begun.files)
    if changed := sorted({file.path for file in now ^ then}):
        names = ", ".join(changed[:_NAMED_MAX]) + (" ..." if len(changed) > _NAMED_MAX else "")
        raise BadValue(
            f"{len(changed)} files were added, removed or changed since this load began: {names}",
            "restore them to continue; load new files with another load, under another name or other paths",
        )


def _packed(begun: _LoadBegun) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(begun))


def _unpacked(packed: bytes) -> _LoadBegun:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=_LoadBegun)


# --- the target -------------------------------------------------------------------------------------------------------
def _create(log: Log, into: str, begun: _LoadBegun, key: str | None) -> TopicInfo:
    """Create a topic with the columns of the source."""
    whole = to_arrow(_struct(begun.schema))
    chosen = pa.schema([_field(whole, name) for name in begun.columns]) if begun.columns else whole
    try:
        return log.create_topic(into, schema=chosen, key=key)
    except TopicExists:
        return log.describe(into)


def _field(schema: pa.Schema, name: str) -> pa.Field:
    if name not in schema.names:
        raise BadValue(f"there is no column {name!r} to load", f"there are {', '.join(schema.names)}")
    return schema.field(name)


def _struct(text: str) -> StructType:
    from pyspark.sql.types import StructType

    return StructType.fromJson(msgspec.json.decode(text))


# --- steps ------------------------------------------------------------------------------------------------------------
class _Load:
    """The steps of a run: files in the order of their names."""

    def __init__(
        self,
        spark: SparkSession,
        job: Job,
        begun: _LoadBegun,
        source: FilesSource | TableSource,
        report: ProgressReport | None,
    ) -> None:
        self._spark, self._job, self._begun, self._source, self._report = spark, job, begun, source, report
        self._done = 0

    def plan(self, newest: JobFact | None) -> bytes | None:
        """Plan the next files."""
        step = 0 if newest is None else newest.epoch + 1
        if self._report is not None:
            self._report(JobProgress(self._done, sum(self._begun.steps[:step]), len(self._begun.files)))
        return None if step >= len(self._begun.steps) else b""

    def write(self, epoch: int, plan: bytes) -> None:  # noqa: ARG002 - see JobSteps
        """Write the rows of a step's files."""
        first = sum(self._begun.steps[:epoch])
        files = self._begun.files[first : first + self._begun.steps[epoch]]
        frame = self._frame([file.path for file in files])
        if self._begun.columns:
            frame = frame.select(*(f"`{name}`" for name in self._begun.columns))
        options = {
            "brokers": self._job.log.address,
            "topic": self._job.target.name,
            "writeId": self._job.write,
            "batchId": str(epoch),
        }
        frame.write.format("embarcadero").options(**options).mode("append").save()

    def _frame(self, paths: list[str]) -> DataFrame:
        begun = self._begun
        if begun.snapshot is not None and isinstance(self._source, TableSource):
            snapshot = _snapshot(self._source, begun.snapshot[1])
            if snapshot.uuid != begun.snapshot[0]:
                raise BadTable(f"table {snapshot.table!r} was dropped and made again", "begin another load")
            return snapshot.frame(self._spark, paths)
        reader = self._spark.read.format(begun.format).options(**_options(begun.format, begun.options))
        schema = _struct(begun.schema)
        if any(_in_path(name, paths[0]) for name in schema.names):
            reader = reader.option("basePath", begun.roots[0])  # columns in names of folders
        return reader.schema(schema).load(paths)

    def done(self, epoch: int, plan: bytes) -> bytes:  # noqa: ARG002 - see JobSteps
        """Count the step; nothing else is recorded."""
        self._done += 1
        return b""


# --- snapshots of tables ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of a table. It is sent to tasks; `properties` may hold keys, so it is not shown or recorded."""

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
        """Its columns, as frames have them. BadSchema names a column whose type a topic can't have."""
        from pyspark.sql.types import StructField, StructType

        columns = schema_to_pyarrow(_scan(self).projection(), include_field_ids=False)
        types = {each.name: frame_type(table_type(each.type, each.name)) for each in columns}
        return StructType([StructField(name, from_arrow(kind)) for name, kind in types.items()])

    def frame(self, spark: SparkSession, paths: Sequence[str]) -> DataFrame:
        """Read the rows of some of its files, one task per file."""
        schema, wanted = to_arrow(self.struct()), list(paths)

        def read(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for part in parts:
                for number in part.column(0).to_pylist():
                    yield from _rows(self, wanted[number], schema)

        return spark.range(0, len(wanted), 1, len(wanted)).mapInArrow(read, self.struct())


def open_snapshot(name: str, catalog: Mapping[str, str], snapshot_id: int | None) -> Snapshot:
    """Return a snapshot of a table in a catalog; None: the current one. Raises BadValue or BadTable if it is missing.

    `catalog` has PyIceberg's properties. `name` among them is the catalog's own name: a database of several catalogs
    separates their tables by it.
    """
    properties = {"name": NAMESPACE, **catalog}
    with typed_errors(name):
        try:
            table = load_catalog(properties.pop("name"), **properties).load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            hint = "write namespace.table, and give the catalog's properties (tier.properties)"
            raise BadValue(f"there is no table {name!r} in the catalog", hint) from None
    found = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if found is None:
        if snapshot_id is None:
            raise BadValue(f"table {name!r} is empty: it has no snapshot", "load it when it has rows")
        raise BadTable(f"table {name!r} has no snapshot {snapshot_id} any more", "begin another load, by another name")
    io_properties = tuple(sorted((key, str(value)) for key, value in table.io.properties.items()))
    return Snapshot(name, str(table.metadata.table_uuid), found.snapshot_id, table.metadata_location, io_properties)


@lru_cache(maxsize=16)
def _scan(snapshot: Snapshot) -> DataScan:
    """A scan of the snapshot; PyIceberg caches its manifests while this process lives."""
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
