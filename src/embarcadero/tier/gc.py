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
from embarcadero.tier.storage import Storage, typed_errors
from embarcadero.tier.table import Loaded, TierTable

from pyiceberg.table import Table  # isort: skip - storage.py says what is missing

_manifests = Manifests()


def collect_data(table: TierTable) -> list[str]:
    """Delete files of ours that no snapshot names and none will; returns their names.

    They are listed first, and the table is loaded after that: what was committed in between is named there.
    """
    now = table.load()
    if now is None:
        return []
    folder = data_folder(now.table.location())
    listed = [name for name, _ in table.storage.list(folder)]
    gone = data_garbage(listed, table.load())
    for name in gone:
        table.storage.delete(f"{folder}/{name}")
    return gone


def data_garbage(listed: list[str], now: Loaded | None) -> list[str]:
    """Which of the files that were listed before are garbage, as the table is now."""
    if now is None:
        return []
    below = {name for name in listed if _is_below(name, now)}
    with typed_errors(now.metadata):
        below -= {file.path.rsplit("/", 1)[-1] for file in _manifests.files(now.table)}
        if below:  # the newest snapshot is read in any case; the others only if it leaves something open
            below -= {path.rsplit("/", 1)[-1] for path in _named_data(now.table)}
    return sorted(below)


def _is_below(name: str, now: Loaded) -> bool:
    span = span_of(name)
    return span is not None and span.start < now.frontiers.get(span.lane, (0, 0))[0]


def _named_data(table: Table) -> Iterator[str]:
    """Data files of all snapshots; a manifest that several of them share is read once."""
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
                    yield entry.data_file.file_path


def collect_metadata(storage: Storage, committed: Loaded, committed_s: float) -> list[str]:
    """Delete metadata files that nothing names, much older than a commit of ours (`committed`, at `committed_s`).

    Whoever wrote them planned on top of an older snapshot, and can't commit any more.
    """
    table = committed.table
    folder = f"{table.location().rstrip('/')}/metadata"
    with typed_errors(committed.metadata):
        named = {path.rsplit("/", 1)[-1] for path in _named_metadata(table)}
    oldest = committed_s - TIER_ORPHANS_S
    gone = [name for name, changed_s in storage.list(folder) if name not in named and changed_s < oldest]
    for name in gone:
        storage.delete(f"{folder}/{name}")
    return gone


def _named_metadata(table: Table) -> Iterator[str]:
    yield table.metadata_location
    yield from (entry.metadata_file for entry in table.metadata.metadata_log)
    for snapshot in table.metadata.snapshots:
        yield snapshot.manifest_list
        yield from (manifest.manifest_path for manifest in snapshot.manifests(table.io))
    for statistics in (*table.metadata.statistics, *table.metadata.partition_statistics):
        yield statistics.statistics_path
