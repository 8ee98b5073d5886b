"""Upkeep of a table: files that are wholly below the topic's start go, and snapshots that are long superseded.

Both are commits of their own and change no frontier. Files leave the folder once no snapshot names them (gc.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from embarcadero.errors import Deposed
from embarcadero.limits import TIER_ORPHANS_S, TIER_SNAPSHOTS_KEPT
from embarcadero.tier.cold import Manifests
from embarcadero.tier.snapshots import Loaded, loaded, snapshot_properties
from embarcadero.tier.storage import typed_errors
from embarcadero.tier.table import TierTable

from pyiceberg import expressions  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import CommitFailedException  # isort: skip
from pyiceberg.table import Table  # isort: skip

_manifests = Manifests()

Starts = Mapping[int, tuple[int, int]]


def drop_below(table: TierTable, now: Loaded, starts: Starts, epoch: int) -> Loaded:
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


def _truth(table: TierTable, now: Loaded) -> Table | None:
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


def expire_snapshots(table: TierTable, now: Loaded) -> Loaded:
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


def _names(now: Loaded, entries: Table, table: TierTable) -> bool:
    """Whether the newest control entries are those that the table of records names: only then older ones may go."""
    truth, current = table.entries(now).truth(now.entries), entries.current_snapshot()
    named = None if truth is None else truth.current_snapshot()
    return named is not None and current is not None and named.snapshot_id == current.snapshot_id
