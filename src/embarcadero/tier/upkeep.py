"""Upkeep of a table: files that are wholly below the topic's start go, and snapshots that are long superseded.

Both are commits of their own and change no frontier. Files leave the folder once no snapshot names them (gc.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

from embarcadero.errors import Deposed
from embarcadero.limits import TIER_ORPHANS_S, TIER_SNAPSHOTS_KEPT
from embarcadero.tier.cold import Manifests
from embarcadero.tier.storage import typed_errors
from embarcadero.tier.table import Loaded, TierTable, loaded, snapshot_properties

from pyiceberg import expressions  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import CommitFailedException  # isort: skip

_manifests = Manifests()


def drop_below(table: TierTable, now: Loaded, starts: Mapping[int, tuple[int, int]], epoch: int) -> Loaded:
    """Drop files of which nothing is left to read. No file is rewritten: one with a row to be kept stays whole."""
    stops: dict[int, int] = {}
    with typed_errors(now.metadata):
        for file in _manifests.files(now.table):
            if file.stop_index <= starts.get(file.lane, (0, 0))[0]:
                stops[file.lane] = max(stops.get(file.lane, 0), file.stop_index)
    if not stops:
        return now
    terms: Any = expressions  # their constructors take names, which their types do not tell
    parts = [terms.And(terms.EqualTo("_lane", lane), terms.LessThan("_index", stop)) for lane, stop in stops.items()]
    kept = snapshot_properties(now.frontiers, now.starts, epoch)
    with typed_errors(table.identifier):
        try:
            now.table.delete(reduce(terms.Or, parts), snapshot_properties=kept)
        except CommitFailedException as error:
            raise Deposed(f"another commit to {table.identifier} came first: {error}", "try again") from error
    table.storage.sync(table.metadata_files(now.table))
    return loaded(now.table)


def expire_snapshots(table: TierTable, now: Loaded) -> Loaded:
    """Forget snapshots that are old, if there are many; what reads the table began less than that long ago."""
    if len(now.table.metadata.snapshots) <= TIER_SNAPSHOTS_KEPT:
        return now
    oldest = datetime.now(UTC) - timedelta(seconds=TIER_ORPHANS_S)
    if all(snapshot.timestamp_ms >= oldest.timestamp() * 1_000 for snapshot in now.table.metadata.snapshots):
        return now
    with typed_errors(table.identifier):
        try:
            now.table.maintenance.expire_snapshots().older_than(oldest).commit()
        except CommitFailedException as error:
            raise Deposed(f"another commit to {table.identifier} came first: {error}", "try again") from error
    table.storage.sync(table.metadata_files(now.table))
    return loaded(now.table)
