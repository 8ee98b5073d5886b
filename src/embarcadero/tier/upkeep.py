"""Upkeep of a table: files below the topic's start go, and old snapshots, and files that no snapshot names.

Both of the first are commits of their own and change no frontier. Files leave the folder once no snapshot names them.
Files that a crashed or late attempt wrote are garbage, too.

When is such a file garbage for sure, and not about to be committed? A commit happens only on top of the snapshot that
it was planned from. So a file whose span begins below the frontier of its lane is never committed any more, however
late its writer wakes up: no clock and no grace is needed for data. Metadata files say nothing of frontiers; those that
nothing names go when they are older than a commit of ours by far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from embarcadero.errors import Deposed
from embarcadero.limits import TIER_ORPHANS_S, TIER_SNAPSHOTS_KEPT
from embarcadero.tier.snapshots import LoadedTable, Manifests, loaded, snapshot_properties
from embarcadero.tier.storage import typed_errors
from embarcadero.tier.table import TierTable

from pyiceberg import expressions  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import CommitFailedException  # isort: skip
from pyiceberg.table import Table  # isort: skip
from embarcadero.tier.parquet import data_folder, span_of
from embarcadero.tier.storage import Storage

_manifests = Manifests()

Starts = Mapping[int, tuple[int, int]]


def drop_below(table: TierTable, now: LoadedTable, starts: Starts, epoch: int) -> LoadedTable:
    """Drop files of which nothing is left to read. No file is rewritten: one with a row to be kept stays whole.

    As in a commit, control entries go first, and the table of records names those that stay.
    """
    records, entries = _stops(now.table, starts), _stops(_truth(table, now), starts)
    if not (records or entries):
        return now
    kept = snapshot_properties(now.frontiers, now.starts, epoch, now.entries)
    with _swapping(table):
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


def _stops(table: Table | None, starts: Starts) -> dict[int, int]:
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
    terms: Any = expressions  # their constructors take names, which their types do not tell
    parts = [terms.And(terms.EqualTo("_lane", lane), terms.LessThan("_index", stop)) for lane, stop in stops.items()]
    return reduce(terms.Or, parts)


@contextmanager
def _swapping(table: TierTable) -> Iterator[None]:
    with typed_errors(table.identifier):
        try:
            yield
        except CommitFailedException as error:
            raise Deposed(f"another commit to {table.identifier} came first: {error}", "try again") from error


def expire_snapshots(table: TierTable, now: LoadedTable) -> LoadedTable:
    """Forget snapshots that are old, if there are many; what reads the table began less than that long ago."""
    oldest = datetime.now(UTC) - timedelta(seconds=TIER_ORPHANS_S)
    with _swapping(table):
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
    return span is not None and span.start < now.frontiers.get(span.lane, (0, 0))[0]


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
