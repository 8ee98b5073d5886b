"""Garbage of a table: files that a crashed or late attempt wrote and no snapshot names.

When is such a file garbage for sure, and not about to be committed? A commit happens only on top of the snapshot that
it was planned from. So a file whose span begins below the frontier of its lane is never committed any more, however
late its writer wakes up: no clock and no grace is needed for data. Metadata files say nothing of frontiers; those that
nothing names go when they are older than a commit of ours by far.
"""

from __future__ import annotations

from collections.abc import Iterator

from embarcadero.limits import TIER_ORPHANS_S
from embarcadero.tier.cold import Manifests
from embarcadero.tier.parquet import data_folder, span_of
from embarcadero.tier.snapshots import Loaded
from embarcadero.tier.storage import Storage, typed_errors
from embarcadero.tier.table import TierTable

from pyiceberg.table import Table  # isort: skip - storage.py says what is missing

_manifests = Manifests()


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


def data_garbage(listed: list[str], now: Loaded | None) -> list[str]:
    """Which of the files that were listed before are garbage, as the table is now."""
    return [] if now is None else garbage(listed, now, now.table)


def garbage(listed: list[str], now: Loaded, table: Table, truth: Table | None = None) -> list[str]:
    """Which files are below the frontiers of `now`, live in no snapshot of a table, nor in the newest of `truth`."""
    below = {name for name in listed if _is_below(name, now)}
    with typed_errors(now.metadata):
        for each in (table, truth):
            below -= {file.path.rsplit("/", 1)[-1] for file in (_manifests.files(each) if each is not None else ())}
        if below:  # the newest snapshot is read in any case; the others only if it leaves something open
            below -= {path.rsplit("/", 1)[-1] for path in _named_data(table)}
    return sorted(below)


def _is_below(name: str, now: Loaded) -> bool:
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


def collect_metadata(table: TierTable, committed: Loaded, committed_s: float) -> list[str]:
    """Delete metadata files that nothing names, much older than a commit of ours (`committed`, at `committed_s`).

    Whoever wrote them planned on top of an older snapshot, and can't commit any more.
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
        storage, folder,
        [name for name, changed_s in storage.list(folder) if name not in named and changed_s < oldest],
    )  # fmt: skip


def _named_metadata(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        yield from (manifest.manifest_path for manifest in snapshot.manifests(table.io))
    for statistics in (*table.metadata.statistics, *table.metadata.partition_statistics):
        yield statistics.statistics_path
