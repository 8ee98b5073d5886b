"""The Iceberg table of a topic: made, loaded, and committed to on top of just the frontiers that were planned from.

Theory of operation. Lane frontiers are properties of every snapshot that we commit. A commit loads the table anew,
checks that the frontiers are those from which its files were planned, and swaps the catalog's pointer on condition that
the snapshot is still the one that was checked. PyIceberg would retry a lost race on top of whatever is there by then,
adding the same rows again; so retries are off, and that is checked, too.

Control entries have a table of their own (`EntriesTable`), which is committed first; the other one is the truth. A
table of an earlier version has everything in one table, and keeps it so (layouts.py).

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from embarcadero.errors import BadTable
from embarcadero.tier.layouts import entries_schema
from embarcadero.tier.snapshots import newest_of_ours, static_table
from embarcadero.tier.storage import Storage, typed_errors

from pyiceberg.catalog import Catalog  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import NoSuchTableError  # isort: skip
from pyiceberg.table import Table  # isort: skip
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from embarcadero.errors import Deposed, TierUnavailable
from embarcadero.tier.layouts import DAY, LAYOUT, TIMESTAMP, Layout, file_schema, records_schema
from embarcadero.tier.parquet import FileFacts
from embarcadero.tier.settings import NAMESPACE, TierSettings
from embarcadero.tier.snapshots import (
    ENTRIES_LOCATION,
    ENTRIES_TABLE,
    ID,
    TOPIC,
    TOPIC_ID,
    LaneFrontiers,
    LoadedTable,
    loaded,
    snapshot_properties,
)
from embarcadero.types import id_text
from embarcadero.wire.schemas import TopicSchemas

from pyiceberg.catalog import load_catalog  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import CommitFailedException  # isort: skip
from pyiceberg.partitioning import PartitionField, PartitionSpec  # isort: skip
from pyiceberg.schema import assign_fresh_schema_ids  # isort: skip
from pyiceberg.table import Transaction  # isort: skip
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
        return self._catalog.create_table_if_not_exists(
            self.identifier, entries_schema(), properties=dict(properties)
        )

    def load(self) -> Table:
        """The table as the catalog has it: it may be ahead of the truth. BadTable, if it is gone."""
        with typed_errors(self.identifier):
            try:
                return self._catalog.load_table(self.identifier)
            except NoSuchTableError:
                raise BadTable(
                    f"table {self.identifier} is gone from its catalog", "restore the catalog"
                ) from None

    def truth(self, metadata: str) -> Table | None:
        """The table as the table of records names it; None while nothing was committed."""
        return static_table(metadata, self._storage) if metadata else None

    def add(self, metadata: str, paths: Sequence[str], properties: Mapping[str, str]) -> Table:
        """Add files to the control entries that `metadata` names. CommitFailedException, if another came first."""
        table = self.at(metadata, properties)
        if paths:
            with table.transaction() as transaction:
                transaction.add_files(
                    list(paths), snapshot_properties=dict(properties), check_duplicate_files=False
                )
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
            spec = PartitionSpec(
                PartitionField(numbered.find_field(TIMESTAMP).field_id, 1_000, DayTransform(), DAY)
            )
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
        tell nothing about the outcome: load the table to learn it. `step` is told "records" between the two commits.
        """
        now = self.load()
        if now is None:
            raise BadTable(f"table {self.identifier} is gone from its catalog", "restore the catalog")
        if now.frontiers != dict(before):
            raise Deposed(f"table {self.identifier} is at {now.frontiers}, not at {dict(before)}", "plan again")
        with self._swapping():
            if now.layout is Layout.WHOLE:
                return self._commit_records(now, files, snapshot_properties(after, starts, epoch), schemas)
            entries = self._commit_entries(now, files, snapshot_properties(after, starts, epoch))
            step("records")
            return self._commit_records(now, files, snapshot_properties(after, starts, epoch, entries), schemas)

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        """A lost race for a catalog's pointer as Deposed."""
        with typed_errors(self.identifier):
            try:
                yield
            except CommitFailedException as error:
                raise Deposed(f"another commit to {self.identifier} came first: {error}", "plan again") from error

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
