"""The Iceberg table of a topic: create it, load it, and commit files on top of the frontiers used for planning.

Theory of operation. Lane frontiers are properties of every snapshot that a tier job commits. A commit loads the table
again and checks that its frontiers equal the frontiers used for planning. Then it swaps the catalog's pointer, on the
condition that the snapshot is still the checked one. PyIceberg would retry a lost race on top of any newer snapshot,
and so add the same rows again. Therefore retries are off, and a commit checks that too.

Control entries are in a separate table, `<name>__entries` (`EntriesTable`), beside the table of records. Tables of
earlier versions have everything in one table, and keep that layout. Two tables cannot be committed atomically, so one
of them is the truth: the table of records. Its snapshots have the frontiers, and name the metadata file of the control
entries that belong to them (`ENTRIES`). A commit first adds control entries, on top of exactly the entries that the
table of records names. Then it commits the records, with the new frontiers and the new metadata file, in one swap of
one pointer.

- A reader follows the metadata file that the table of records names, never the catalog's entry of `<name>__entries`. So
  it sees all control entries below the frontiers and none above, even if entries were added since: no hole, no
  duplicate.
- A job that dies between the two commits leaves entries that no snapshot of records names. The next commit removes them
  first (`_restored`): it makes the files of the entries table equal to the truth again. Entries are never added on top
  of the entries of a failed attempt, so there are no duplicates.
- A late job (deposed or paused) may add entries at any time. Its commit of records then fails, because the frontiers or
  the snapshot differ from its plan. If its commit of records comes first, the other job's commit fails, and the
  metadata file that the late job named is the truth for the next commit.
- The opposite order would be wrong. Committing records first would move the frontiers before the control entries exist,
  and a reader would report the missing indices as lost.

Other engines that read the entries table by its name may see entries above the frontier after a crash, until the next
commit.

Maintenance removes files below the topic's start, and old snapshots; both are separate commits that change no frontier.
A file is deleted once no snapshot names it. Files of a crashed or late attempt are garbage too. A commit happens only
on top of the snapshot used for planning. So a file whose span begins below the frontier of its lane can never be
committed any more, however late its writer continues: garbage collection of data needs no clock and no grace period.
Metadata files have no frontiers; unnamed ones are deleted when they are much older than a commit of this job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from embarcadero.errors import BadTable, Deposed, TierUnavailable
from embarcadero.limits import TIER_ORPHANS_S, TIER_SNAPSHOTS_KEPT
from embarcadero.tier.columns import DAY, LAYOUT, TIMESTAMP, Layout, entries_schema, file_schema, records_schema
from embarcadero.tier.parquet import FileFacts, data_folder, span_of
from embarcadero.tier.snapshots import (
    ENTRIES_LOCATION,
    ENTRIES_TABLE,
    ID,
    TOPIC,
    TOPIC_ID,
    LaneFrontiers,
    LoadedTable,
    Manifests,
    loaded,
    newest_of_ours,
    snapshot_properties,
    static_table,
)
from embarcadero.tier.storage import NAMESPACE, Storage, TierSettings, typed_errors
from embarcadero.types import id_text
from embarcadero.wire.schemas import TopicSchemas

from pyiceberg import expressions  # isort: skip - storage.py reports a missing package
from pyiceberg.catalog import Catalog, load_catalog  # isort: skip
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError  # isort: skip
from pyiceberg.partitioning import PartitionField, PartitionSpec  # isort: skip
from pyiceberg.schema import assign_fresh_schema_ids  # isort: skip
from pyiceberg.table import Table, Transaction  # isort: skip
from pyiceberg.transforms import DayTransform  # isort: skip

SUFFIX: Final = "__entries"
_RETRIES: Final = "commit.retry.num-retries"
_PROPERTIES: Final = {
    _RETRIES: "0",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "50",
    "write.metadata.delete-after-commit.enabled": "false",  # readers find the table by a metadata file
}


class EntriesTable:
    """The control entries of one topic, in a catalog."""

    def __init__(self, catalog: Catalog, storage: Storage, identifier: str) -> None:
        self.identifier = identifier
        self._catalog, self._storage = catalog, storage

    def create(self, properties: Mapping[str, str]) -> Table:
        """Create the table, unless it exists."""
        return self._catalog.create_table_if_not_exists(self.identifier, entries_schema(), properties=dict(properties))

    def load(self) -> Table:
        """Load the catalog's version of the table, which may be ahead of the truth. BadTable if it is missing."""
        with typed_errors(self.identifier):
            try:
                return self._catalog.load_table(self.identifier)
            except NoSuchTableError:
                what = f"table {self.identifier} is missing in its catalog"
                raise BadTable(what, "restore the catalog") from None

    def truth(self, metadata: str) -> Table | None:
        """Load the version that the table of records names; None before the first commit."""
        return static_table(metadata, self._storage) if metadata else None

    def add(self, metadata: str, paths: Sequence[str], properties: Mapping[str, str]) -> Table:
        """Add files to the control entries that `metadata` names. CommitFailedException if another commit was first."""
        table = self.at(metadata, properties)
        if paths:
            with table.transaction() as transaction:
                transaction.add_files(list(paths), snapshot_properties=dict(properties), check_duplicate_files=False)
        return table

    def at(self, metadata: str, properties: Mapping[str, str]) -> Table:
        """Return the table with exactly the control entries that `metadata` names, ready for the next commit."""
        table = self.load()
        if table.metadata_location == metadata:
            return table
        truth = self.truth(metadata)
        known, ours = (None if each is None else newest_of_ours(each) for each in (truth, table))
        if (known and known[0].snapshot_id) == (ours and ours[0].snapshot_id):
            return table  # unchanged, or compacted since
        return self._restored(table, truth, properties)

    def _restored(self, table: Table, truth: Table | None, properties: Mapping[str, str]) -> Table:
        """Undo the changes of a failed attempt: remove the files that it added, and add the files that it removed."""
        wanted, there = _data_files(truth), _data_files(table)
        unnamed = {snapshot.snapshot_id for snapshot in table.metadata.snapshots}
        unnamed -= {snapshot.snapshot_id for snapshot in truth.metadata.snapshots} if truth is not None else set()
        with (
            table.transaction() as transaction,
            transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite() as change,
        ):
            for path in there.keys() - wanted.keys():
                change.delete_data_file(there[path])
            for path in wanted.keys() - there.keys():
                change.append_data_file(wanted[path])
        for number in unnamed:  # no snapshot of records names them
            table.maintenance.expire_snapshots().by_id(number).commit()
        return table


def _data_files(table: Table | None) -> dict[str, Any]:
    """The files of the newest snapshot of a table, by path."""
    snapshot = None if table is None else table.current_snapshot()
    if table is None or snapshot is None:
        return {}
    return {
        entry.data_file.file_path: entry.data_file
        for manifest in snapshot.manifests(table.io)
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
    }


def _check_id(table: Table, topic: str, table_id: str) -> None:
    if table.properties.get(ID) != table_id:
        raise BadTable(f"table {'.'.join(table.name())} does not belong to topic {topic!r}", "drop or rename it")


@contextmanager
def _swapping(identifier: str, hint: str) -> Iterator[None]:
    """Convert a lost race for the catalog's pointer to Deposed."""
    with typed_errors(identifier):
        try:
            yield
        except CommitFailedException as error:
            raise Deposed(f"another commit to {identifier} came first: {error}", hint) from error


def table_name(topic: str) -> str:
    """Convert a topic's name to an identifier that every engine accepts; two topics may get the same one."""
    return re.sub(r"[^A-Za-z0-9_]", "_", topic).lower()


class TierTable:
    """The table of one topic, in any catalog."""

    def __init__(self, settings: TierSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.storage = Storage(settings.properties)
        self._catalog: Catalog | None = None

    @property
    def identifier(self) -> str:
        """Its name in the catalog."""
        return self.name if "." in self.name else f"{NAMESPACE}.{self.name}"

    def catalog(self) -> Catalog:
        """The catalog, opened on first use."""
        if self._catalog is None:
            self._make_folders()
            with typed_errors(self.identifier):
                self._catalog = load_catalog(NAMESPACE, **{**self.storage.properties, **self.settings.catalog})
        return self._catalog

    def _make_folders(self) -> None:
        uri = self.settings.properties.get("uri", "")
        if uri.startswith("sqlite:///"):
            folder = Path(uri.removeprefix("sqlite:///").partition("?")[0]).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                what = f"cannot create the catalog's folder {folder}: {error}"
                raise TierUnavailable(what, "check the uri in tier.properties") from None

    # --- loading ------------------------------------------------------------------------------------------------------
    def load(self) -> LoadedTable | None:
        """Load the current table; None if there is none."""
        with typed_errors(self.identifier):
            try:
                table = self.catalog().load_table(self.identifier)
            except NoSuchTableError:
                return None
        return loaded(table)

    def entries(self, now: LoadedTable) -> EntriesTable:
        """The table of control entries that belongs to this one."""
        return EntriesTable(self.catalog(), self.storage, now.entries_table)

    def is_free(self) -> bool:
        """Whether the catalog has neither this table nor a table for its control entries."""
        with typed_errors(self.identifier):
            return not any(map(self.catalog().table_exists, (self.identifier, f"{self.identifier}{SUFFIX}")))

    def create(self, topic: str, table_id: str, schemas: TopicSchemas, topic_id: int = 0) -> LoadedTable:
        """Create the table. If another job created it first, it must be for the same topic.

        The table of control entries comes first: a table of records always has one.
        """
        schema = records_schema(schemas)
        with typed_errors(self.identifier):
            catalog = self.catalog()
            catalog.create_namespace_if_not_exists(NAMESPACE)
            properties = {**_PROPERTIES, ID: table_id, TOPIC: topic, TOPIC_ID: id_text(topic_id)}
            entries = EntriesTable(catalog, self.storage, f"{self.identifier}{SUFFIX}").create(properties)
            _check_id(entries, topic, table_id)
            properties |= {
                LAYOUT: str(int(Layout.SPLIT)),
                ENTRIES_TABLE: f"{self.identifier}{SUFFIX}",
                ENTRIES_LOCATION: entries.location(),
            }
            numbered = assign_fresh_schema_ids(Catalog._convert_schema_if_needed(schema))
            spec = PartitionSpec(PartitionField(numbered.find_field(TIMESTAMP).field_id, 1_000, DayTransform(), DAY))
            catalog.create_table_if_not_exists(self.identifier, numbered, partition_spec=spec, properties=properties)
            made = catalog.load_table(self.identifier)
        _check_id(made, topic, table_id)
        return loaded(made)

    # --- committing ---------------------------------------------------------------------------------------------------
    def commit(
        self,
        before: LaneFrontiers,
        files: Sequence[FileFacts],
        after: LaneFrontiers,
        starts: LaneFrontiers,
        schemas: TopicSchemas,
        epoch: int,
        step: Callable[[str], None] = lambda _name: None,
    ) -> LoadedTable:
        """Add files, on the condition that the table's frontiers are `before`; set them to `after`.

        Raises Deposed if they differ, or if another commit came between: then readers see no change. After other errors
        the outcome is unknown: load the table to learn it. `step` is called with "records" between the two commits.
        """
        now = self.load()
        if now is None:
            raise BadTable(f"table {self.identifier} is missing in its catalog", "restore the catalog")
        if now.frontiers != dict(before):
            raise Deposed(f"table {self.identifier} is at {now.frontiers}, not at {dict(before)}", "plan again")
        with _swapping(self.identifier, "plan again"):
            if now.layout is Layout.WHOLE:
                return self._commit_records(now, files, snapshot_properties(after, starts, epoch), schemas)
            entries = self._commit_entries(now, files, snapshot_properties(after, starts, epoch))
            step("records")
            return self._commit_records(now, files, snapshot_properties(after, starts, epoch, entries), schemas)

    def _commit_entries(self, now: LoadedTable, files: Sequence[FileFacts], properties: Mapping[str, str]) -> str:
        """Add control entries to the entries of `now`; return the metadata file with all of them."""
        entries = self.entries(now)
        self._check_retries(entries.load())
        table = entries.add(now.entries, [facts.entries_path for facts in files if facts.entries_path], properties)
        self.storage.sync(self.metadata_files(table))
        return table.metadata_location

    def _commit_records(
        self, now: LoadedTable, files: Sequence[FileFacts], properties: Mapping[str, str], schemas: TopicSchemas
    ) -> LoadedTable:
        self._check_retries(now.table)
        with now.table.transaction() as transaction:
            self._add_columns(transaction, now, file_schema(schemas, now.layout))
            transaction.set_properties(dict(properties))
            paths = [path for facts in files for path in facts.paths]
            transaction.add_files(paths, snapshot_properties=dict(properties), check_duplicate_files=False)
        self.storage.sync(self.metadata_files(now.table))
        return loaded(now.table)

    @staticmethod
    def _add_columns(transaction: Transaction, now: LoadedTable, schema: pa.Schema) -> None:
        """Add the topic's new columns, after its other columns and before the columns of the log."""
        there = now.table.schema().column_names
        if not (missing := [field for field in schema if field.name not in there]):
            return
        with transaction.update_schema() as update:
            update.union_by_name(pa.schema(missing))
            for field in missing if now.layout is Layout.SPLIT else ():
                update.move_before(field.name, "_seq")

    def _check_retries(self, table: Table) -> None:
        if table.properties.get(_RETRIES) != "0":
            with typed_errors(self.identifier), table.transaction() as transaction:
                transaction.set_properties({_RETRIES: "0"})

    def metadata_files(self, table: Table) -> Iterator[str]:
        """The metadata files of the newest snapshot."""
        yield table.metadata_location
        if (snapshot := table.current_snapshot()) is not None:
            yield snapshot.manifest_list
            for manifest in snapshot.manifests(table.io):
                if manifest.added_snapshot_id == snapshot.snapshot_id:
                    yield manifest.manifest_path


# --- maintenance ------------------------------------------------------------------------------------------------------
_manifests = Manifests()


def drop_below(table: TierTable, now: LoadedTable, starts: LaneFrontiers, epoch: int) -> LoadedTable:
    """Drop files that are wholly below the start. No file is rewritten: a file with a row to keep stays whole.

    As in a commit, control entries are changed first, and the table of records then names the remaining ones.
    """
    records, entries = _stops(now.table, starts), _stops(_truth(table, now), starts)
    if not (records or entries):
        return now
    kept = snapshot_properties(now.frontiers, now.starts, epoch, now.entries)
    with _swapping(table.identifier, "try again"):
        if entries:
            changed = table.entries(now).at(now.entries, kept)
            changed.delete(_below(entries), snapshot_properties=kept)
            table.storage.sync(table.metadata_files(changed))
            kept = snapshot_properties(now.frontiers, now.starts, epoch, changed.metadata_location)
        with now.table.transaction() as transaction:
            if now.entries:
                transaction.set_properties(kept)
            if records:
                transaction.delete(_below(records), snapshot_properties=kept)
            else:
                transaction.add_files([], snapshot_properties=kept)
    table.storage.sync(table.metadata_files(now.table))
    return loaded(now.table)


def _truth(table: TierTable, now: LoadedTable) -> Table | None:
    """The control entries that belong to a table, if they are in a separate table."""
    return table.entries(now).truth(now.entries)


def _stops(table: Table | None, starts: LaneFrontiers) -> dict[int, int]:
    """For each lane, the end of the files that are wholly below its start."""
    stops: dict[int, int] = {}
    if table is None:
        return stops
    with typed_errors(table.metadata_location):
        for file in _manifests.files(table):
            if file.stop_index <= starts.get(file.lane, (0, 0))[0]:
                stops[file.lane] = max(stops.get(file.lane, 0), file.stop_index)
    return stops


def _below(stops: Mapping[int, int]) -> Any:
    terms: Any = expressions  # their constructors take names, which their type hints do not show
    parts = [terms.And(terms.EqualTo("_lane", lane), terms.LessThan("_index", stop)) for lane, stop in stops.items()]
    return reduce(terms.Or, parts)


def expire_snapshots(table: TierTable, now: LoadedTable) -> LoadedTable:
    """Expire old snapshots, if there are many. No read of the table is expected to last `TIER_ORPHANS_S`."""
    oldest = datetime.now(UTC) - timedelta(seconds=TIER_ORPHANS_S)
    with _swapping(table.identifier, "try again"):
        if now.entries and _is_due(entries := table.entries(now).load(), oldest) and _names(now, entries, table):
            entries.maintenance.expire_snapshots().older_than(oldest).commit()
            table.storage.sync(table.metadata_files(entries))
        if not _is_due(now.table, oldest):
            return now
        now.table.maintenance.expire_snapshots().older_than(oldest).commit()
    table.storage.sync(table.metadata_files(now.table))
    return loaded(now.table)


def _is_due(table: Table, oldest: datetime) -> bool:
    snapshots = table.metadata.snapshots
    if len(snapshots) <= TIER_SNAPSHOTS_KEPT:
        return False
    return any(snapshot.timestamp_ms < oldest.timestamp() * 1_000 for snapshot in snapshots)


def _names(now: LoadedTable, entries: Table, table: TierTable) -> bool:
    """Whether the table of records names the newest control entries: only then older snapshots may expire."""
    truth, current = table.entries(now).truth(now.entries), entries.current_snapshot()
    named = None if truth is None else truth.current_snapshot()
    return named is not None and current is not None and named.snapshot_id == current.snapshot_id


def collect_data(table: TierTable) -> list[str]:
    """Delete data files that no snapshot names or will name; return their names.

    Files are listed before the tables are loaded, so the loaded tables name every file committed in between.
    """
    now = table.load()
    if now is None:
        return []
    folder, gone = data_folder(now.table.location()), list[str]()
    listed = [name for name, _ in table.storage.list(folder)]
    if now.entries_location:
        entries_folder = data_folder(now.entries_location)
        entries_listed = [name for name, _ in table.storage.list(entries_folder)]
        if (after := table.load()) is not None:
            entries = table.entries(after)
            below = garbage(entries_listed, after, entries.load(), entries.truth(after.entries))
            gone += _delete(table.storage, entries_folder, below)
    return gone + _delete(table.storage, folder, data_garbage(listed, table.load()))


def _delete(storage: Storage, folder: str, names: list[str]) -> list[str]:
    for name in names:
        storage.delete(f"{folder}/{name}")
    return names


def data_garbage(listed: list[str], now: LoadedTable | None) -> list[str]:
    """The listed files that are garbage, according to the current table."""
    return [] if now is None else garbage(listed, now, now.table)


def garbage(listed: list[str], now: LoadedTable, table: Table, truth: Table | None = None) -> list[str]:
    """The files below the frontiers of `now` that are in no snapshot of `table`, and not in the newest of `truth`."""
    below = {name for name in listed if _is_below(name, now)}
    with typed_errors(now.metadata):
        for each in (table, truth):
            below -= {file.path.rsplit("/", 1)[-1] for file in (_manifests.files(each) if each is not None else ())}
        if below:  # the newest snapshot is always read; older ones only if candidates remain
            below -= {path.rsplit("/", 1)[-1] for path in _named_data(table)}
    return sorted(below)


def _is_below(name: str, now: LoadedTable) -> bool:
    span = span_of(name)
    return span is not None and span.start < now.frontier(span.lane).index


def _named_data(table: Table) -> Iterator[str]:
    """Data files that are live in any snapshot; a shared manifest is read once."""
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    yield entry.data_file.file_path


def collect_metadata(table: TierTable, committed: LoadedTable, committed_s: float) -> list[str]:
    """Delete unnamed metadata files that are much older than this job's commit (`committed`, at `committed_s`).

    Their writer planned on top of an older snapshot, and cannot commit any more.
    """
    gone = _collect_metadata(table.storage, [committed.table], committed_s)
    if committed.entries:
        entries = table.entries(committed)
        both = [entries.load(), entries.truth(committed.entries)]
        gone += _collect_metadata(table.storage, [each for each in both if each is not None], committed_s)
    return gone


def _collect_metadata(storage: Storage, tables: list[Table], committed_s: float) -> list[str]:
    """Delete unnamed metadata files of one table, given its catalog version and the version named by records."""
    folder = f"{tables[0].location().rstrip('/')}/metadata"
    with typed_errors(tables[0].metadata_location):
        named = {path.rsplit("/", 1)[-1] for table in tables for path in _named_metadata(table)}
    oldest = committed_s - TIER_ORPHANS_S
    return _delete(
        storage,
        folder,
        [name for name, changed_s in storage.list(folder) if name not in named and changed_s < oldest],
    )


def _named_metadata(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        yield from (manifest.manifest_path for manifest in snapshot.manifests(table.io))
    for statistics in (*table.metadata.statistics, *table.metadata.partition_statistics):
        yield statistics.statistics_path
