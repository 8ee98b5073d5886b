"""The Iceberg table of a topic: made, loaded, and committed to on top of just the frontiers that were planned from.

Theory of operation. Lane frontiers are properties of every snapshot that we commit. A commit loads the table anew,
checks that the frontiers are those from which its files were planned, and swaps the catalog's pointer on condition that
the snapshot is still the one that was checked. PyIceberg would retry a lost race on top of whatever is there by then,
adding the same rows again; so retries are off, and that is checked, too.

Control entries have a table of their own (`EntriesTable`), which is committed first; the other one is the truth. A
table of an earlier version has everything in one table, and keeps it so.

Control entries are in `<name>__entries`, beside the table of records. Two tables can't be committed at once, so one of
them is the truth: the table of records. Its snapshots have the frontiers, and name the metadata file of the control
entries that belong to them (`ENTRIES`). A commit adds control entries first, on top of exactly those that the table of
records names; then it commits the records, and with them the new frontiers and the new metadata file, in one swap of
one pointer.

- A reader follows the metadata file that the table of records names, never the catalog's entry of this table. So it
  sees all control entries below the frontiers and none above, whatever was added here since: no hole, no double.
- A job that dies between the two commits leaves entries here that no snapshot of records names. The next commit takes
  them out first (`_restored`): the files of this table are made those of the truth again. Entries are never added on
  top of entries of an attempt that failed, so none is there twice.
- A late job (deposed, or paused) may add entries here at any moment. Its commit of records then fails, because the
  frontiers or the snapshot are no longer those that it planned from. If its commit of records comes first, ours fails,
  and what it named is the truth for the next one.
- The other order would not do. Records first would move the frontiers before the control entries are there: a reader
  would take the missing indices for lost ones.

Other engines that read this table by its name may see entries above the frontier after a crash, until the next commit.

Upkeep: files below the topic's start go, and old snapshots; both are commits of their own and change no frontier. Files
leave the folder once no snapshot names them. Files that a crashed or late attempt wrote are garbage, too. When is such
a file garbage for sure, and not about to be committed? A commit happens only on top of the snapshot that it was planned
from. So a file whose span begins below the frontier of its lane is never committed any more, however late its writer
wakes up: no clock and no grace is needed for data. Metadata files say nothing of frontiers; those that nothing names go
when they are older than a commit of ours by far.
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

from pyiceberg import expressions  # isort: skip - storage.py says what is missing
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
        """Make it, unless it is there."""
        return self._catalog.create_table_if_not_exists(self.identifier, entries_schema(), properties=dict(properties))

    def load(self) -> Table:
        """The table as the catalog has it: it may be ahead of the truth. BadTable, if it is gone."""
        with typed_errors(self.identifier):
            try:
                return self._catalog.load_table(self.identifier)
            except NoSuchTableError:
                raise BadTable(f"table {self.identifier} is gone from its catalog", "restore the catalog") from None

    def truth(self, metadata: str) -> Table | None:
        """The table as the table of records names it; None while nothing was committed."""
        return static_table(metadata, self._storage) if metadata else None

    def add(self, metadata: str, paths: Sequence[str], properties: Mapping[str, str]) -> Table:
        """Add files to the control entries that `metadata` names. CommitFailedException, if another came first."""
        table = self.at(metadata, properties)
        if paths:
            with table.transaction() as transaction:
                transaction.add_files(list(paths), snapshot_properties=dict(properties), check_duplicate_files=False)
        return table

    def at(self, metadata: str, properties: Mapping[str, str]) -> Table:
        """The table with exactly the control entries that `metadata` names, ready for a commit on top."""
        table = self.load()
        if table.metadata_location == metadata:
            return table
        truth = self.truth(metadata)
        known, ours = (None if each is None else newest_of_ours(each) for each in (truth, table))
        if (known and known[0].snapshot_id) == (ours and ours[0].snapshot_id):
            return table  # the same, or compacted since
        return self._restored(table, truth, properties)

    def _restored(self, table: Table, truth: Table | None, properties: Mapping[str, str]) -> Table:
        """Take out what an attempt that failed left here, and put back what it took out."""
        wanted, there = _data_files(truth), _data_files(table)
        left = {snapshot.snapshot_id for snapshot in table.metadata.snapshots}
        left -= {snapshot.snapshot_id for snapshot in truth.metadata.snapshots} if truth is not None else set()
        with (
            table.transaction() as transaction,
            transaction.update_snapshot(snapshot_properties=dict(properties)).overwrite() as change,
        ):
            for path in there.keys() - wanted.keys():
                change.delete_data_file(there[path])
            for path in wanted.keys() - there.keys():
                change.append_data_file(wanted[path])
        for number in left:  # no snapshot of records names them
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
        raise BadTable(f"table {'.'.join(table.name())} is not that of topic {topic!r}", "drop or rename it")


@contextmanager
def _swapping(identifier: str, hint: str) -> Iterator[None]:
    """A lost race for a catalog's pointer as Deposed."""
    with typed_errors(identifier):
        try:
            yield
        except CommitFailedException as error:
            raise Deposed(f"another commit to {identifier} came first: {error}", hint) from error


def table_name(topic: str) -> str:
    """A topic's name as part of an identifier that every engine takes; two topics may end up with the same."""
    return re.sub(r"[^A-Za-z0-9_]", "_", topic).lower()


class TierTable:
    """The table of one topic, in whatever catalog."""

    def __init__(self, settings: TierSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.storage = Storage(settings.properties)
        self._catalog: Catalog | None = None

    @property
    def identifier(self) -> str:
        """Its name in the catalog."""
        return self.name if "." in self.name else f"{NAMESPACE}.{self.name}"

    def catalog(self) -> Catalog:
        """The catalog, opened when it is first needed."""
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
                raise TierUnavailable(f"{folder} can't hold a catalog: {error}", "see tier.properties") from None

    # --- loading ------------------------------------------------------------------------------------------------------
    def load(self) -> LoadedTable | None:
        """The table as it is now; None if there is none."""
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
        """Whether neither this table nor one for its control entries is in the catalog."""
        with typed_errors(self.identifier):
            return not any(map(self.catalog().table_exists, (self.identifier, f"{self.identifier}{SUFFIX}")))

    def create(self, topic: str, table_id: str, schemas: TopicSchemas, topic_id: int = 0) -> LoadedTable:
        """Make the table. Another job may have made it first: that is fine if it is for the same topic.

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
        """Add files, on condition that the table's frontiers are `before`; they are `after` then.

        Deposed, if they are not, or another commit came between: nothing was added that a reader sees. Other errors
        say nothing about the outcome: load the table to learn it. `step` is called with "records" between the two.
        """
        now = self.load()
        if now is None:
            raise BadTable(f"table {self.identifier} is gone from its catalog", "restore the catalog")
        if now.frontiers != dict(before):
            raise Deposed(f"table {self.identifier} is at {now.frontiers}, not at {dict(before)}", "plan again")
        with _swapping(self.identifier, "plan again"):
            if now.layout is Layout.WHOLE:
                return self._commit_records(now, files, snapshot_properties(after, starts, epoch), schemas)
            entries = self._commit_entries(now, files, snapshot_properties(after, starts, epoch))
            step("records")
            return self._commit_records(now, files, snapshot_properties(after, starts, epoch, entries), schemas)

    def _commit_entries(self, now: LoadedTable, files: Sequence[FileFacts], properties: Mapping[str, str]) -> str:
        """Add control entries to those that belong to `now`; returns the metadata file that has them all."""
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
        """Columns that the topic got since: behind its others, before those of the log."""
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
        """The files by which the newest snapshot is found."""
        yield table.metadata_location
        if (snapshot := table.current_snapshot()) is not None:
            yield snapshot.manifest_list
            for manifest in snapshot.manifests(table.io):
                if manifest.added_snapshot_id == snapshot.snapshot_id:
                    yield manifest.manifest_path


# --- upkeep -----------------------------------------------------------------------------------------------------------
_manifests = Manifests()


def drop_below(table: TierTable, now: LoadedTable, starts: LaneFrontiers, epoch: int) -> LoadedTable:
    """Drop files of which nothing is left to read. No file is rewritten: one with a row to be kept stays whole.

    As in a commit, control entries go first, and the table of records names those that stay.
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
    """The control entries that belong to a table, where those have a table of their own."""
    return table.entries(now).truth(now.entries)


def _stops(table: Table | None, starts: LaneFrontiers) -> dict[int, int]:
    """Where the files of each lane end that are wholly below its start."""
    stops: dict[int, int] = {}
    if table is None:
        return stops
    with typed_errors(table.metadata_location):
        for file in _manifests.files(table):
            if file.stop_index <= starts.get(file.lane, (0, 0))[0]:
                stops[file.lane] = max(stops.get(file.lane, 0), file.stop_index)
    return stops


def _below(stops: Mapping[int, int]) -> Any:
    terms: Any = expressions  # their constructors take names, which their types do not show
    parts = [terms.And(terms.EqualTo("_lane", lane), terms.LessThan("_index", stop)) for lane, stop in stops.items()]
    return reduce(terms.Or, parts)


def expire_snapshots(table: TierTable, now: LoadedTable) -> LoadedTable:
    """Forget snapshots that are old, if there are many; what reads the table began less than that long ago."""
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
    """Whether the newest control entries are those that the table of records names: only then older ones may go."""
    truth, current = table.entries(now).truth(now.entries), entries.current_snapshot()
    named = None if truth is None else truth.current_snapshot()
    return named is not None and current is not None and named.snapshot_id == current.snapshot_id


def collect_data(table: TierTable) -> list[str]:
    """Delete files of ours that no snapshot names and none will; returns their names.

    They are listed first, and the tables are loaded after that: what was committed in between is named there.
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
    """Which of the files that were listed before are garbage, as the table is now."""
    return [] if now is None else garbage(listed, now, now.table)


def garbage(listed: list[str], now: LoadedTable, table: Table, truth: Table | None = None) -> list[str]:
    """Which files are below the frontiers of `now`, live in no snapshot of a table, nor in the newest of `truth`."""
    below = {name for name in listed if _is_below(name, now)}
    with typed_errors(now.metadata):
        for each in (table, truth):
            below -= {file.path.rsplit("/", 1)[-1] for file in (_manifests.files(each) if each is not None else ())}
        if below:  # the newest snapshot is read in any case; the others only if it leaves something open
            below -= {path.rsplit("/", 1)[-1] for path in _named_data(table)}
    return sorted(below)


def _is_below(name: str, now: LoadedTable) -> bool:
    span = span_of(name)
    return span is not None and span.start < now.frontier(span.lane).index


def _named_data(table: Table) -> Iterator[str]:
    """Data files that are live in any snapshot; a manifest that several of them share is read once."""
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                    yield entry.data_file.file_path


def collect_metadata(table: TierTable, committed: LoadedTable, committed_s: float) -> list[str]:
    """Delete metadata files that nothing names, much older than a commit of ours (`committed`, at `committed_s`).

    Their writer planned on top of an older snapshot, and can't commit any more.
    """
    gone = _collect_metadata(table.storage, [committed.table], committed_s)
    if committed.entries:
        entries = table.entries(committed)
        both = [entries.load(), entries.truth(committed.entries)]
        gone += _collect_metadata(table.storage, [each for each in both if each is not None], committed_s)
    return gone


def _collect_metadata(storage: Storage, tables: list[Table], committed_s: float) -> list[str]:
    """Of one table, as the catalog has it and as others name it."""
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
