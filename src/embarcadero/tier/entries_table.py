"""The table of a topic's control entries: `<name>__entries`, beside the table of its records.

Theory of operation. Two tables can't be committed at once, so one of them is the truth: the table of records. Its
snapshots have the frontiers, and name the metadata file of the control entries that belong to them (`ENTRIES`). A
commit adds control entries here first, on top of exactly those that the table of records names; then it commits the
records, and with them the new frontiers and the new metadata file, in one swap of one pointer.

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
from embarcadero.tier.cold import static_table
from embarcadero.tier.layouts import entries_schema
from embarcadero.tier.snapshots import newest_of_ours
from embarcadero.tier.storage import Storage, typed_errors

from pyiceberg.catalog import Catalog  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import NoSuchTableError  # isort: skip
from pyiceberg.table import Table  # isort: skip

SUFFIX: Final = "__entries"


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
