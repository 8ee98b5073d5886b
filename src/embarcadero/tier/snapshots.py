"""Snapshots of a topic's table: its files, and the facts about the log in the properties of its snapshots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from embarcadero.errors import BadTable
from embarcadero.tier.columns import Layout, layout_of
from embarcadero.tier.parquet import span_of
from embarcadero.tier.storage import Storage, reading
from embarcadero.types import LanePosition

from pyiceberg.catalog.noop import NoopCatalog  # isort: skip - storage.py reports a missing package
from pyiceberg.conversions import from_bytes  # isort: skip
from pyiceberg.serializers import FromInputFile  # isort: skip
from pyiceberg.table import StaticTable, Table  # isort: skip
from pyiceberg.table.snapshots import Snapshot  # isort: skip

LaneFrontiers = Mapping[int, LanePosition]
"""A position for each lane."""

ID: Final = "embarcadero.id"
TOPIC: Final = "embarcadero.topic"
TOPIC_ID: Final = "embarcadero.topic-id"
EPOCH: Final = "embarcadero.epoch"
LANE: Final = "embarcadero.lane-"
START: Final = "embarcadero.start-"
ENTRIES: Final = "embarcadero.entries"  # the metadata file of the table of control entries, as of this commit
ENTRIES_TABLE: Final = "embarcadero.entries-table"
ENTRIES_LOCATION: Final = "embarcadero.entries-location"
_MANIFESTS_MAX: Final = 4_096  # manifests with cached contents

_POSITION: Final = ("_lane", "_index", "_seq")


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """The table at one moment."""

    table: Table
    frontiers: dict[int, LanePosition]
    starts: dict[int, LanePosition]
    entries: str = ""  # the metadata file of the control entries below the frontiers

    def frontier(self, lane: int) -> LanePosition:
        """The position below which a lane is in the table."""
        return self.frontiers.get(lane, LanePosition(0, 0))

    @property
    def id(self) -> str:
        """Its id, which differs from the id of another table with the same name."""
        return self.table.properties.get(ID, "")

    @property
    def metadata(self) -> str:
        """The metadata file that describes it."""
        return self.table.metadata_location

    @property
    def layout(self) -> Layout:
        """Its layout of rows. BadTable if a newer version created it."""
        return layout_of(self.table.properties, self.metadata)

    @property
    def entries_table(self) -> str:
        """The name of the table of control entries; empty if this table has them."""
        return self.table.properties.get(ENTRIES_TABLE, "")

    @property
    def entries_location(self) -> str:
        """The location of the files of the table of control entries."""
        return self.table.properties.get(ENTRIES_LOCATION, "")


def snapshot_properties(
    frontiers: LaneFrontiers, starts: LaneFrontiers, epoch: int, entries: str = ""
) -> dict[str, str]:
    """The properties of a tier job's snapshots: facts about the log."""
    properties = {EPOCH: str(epoch)} | ({ENTRIES: entries} if entries else {})
    properties |= {f"{LANE}{lane}": f"{index},{seq}" for lane, (index, seq) in frontiers.items()}
    return properties | {f"{START}{lane}": f"{index},{seq}" for lane, (index, seq) in starts.items()}


def newest_of_ours(table: Table) -> tuple[Snapshot, dict[str, str]] | None:
    """The newest snapshot that a tier job committed, and its properties. Other programs may have compacted it since."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary: Any = snapshot.summary
        facts = dict(summary.additional_properties) if summary is not None else {}
        if EPOCH in facts:
            return snapshot, facts
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return None


def loaded(table: Table) -> LoadedTable:
    """Return a table with the frontiers of its newest snapshot from a tier job.

    If no snapshot has frontiers, take them from the table's properties, which the newest commit of a tier job also set.
    """
    ours = newest_of_ours(table)
    facts = table.properties if ours is None else ours[1]
    return LoadedTable(table, _positions(facts, LANE), _positions(facts, START), facts.get(ENTRIES, ""))


def _positions(facts: Mapping[str, str], prefix: str) -> dict[int, LanePosition]:
    found = {}
    for name, value in facts.items():
        if name.startswith(prefix):
            index, _, seq = value.partition(",")
            found[int(name.removeprefix(prefix))] = LanePosition(int(index), int(seq))
    return found


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table: rows of batches [first_index, stop_index) of a lane, records [first_seq, stop_seq)."""

    path: str
    bytes: int
    lane: int
    first_index: int
    stop_index: int
    first_seq: int
    stop_seq: int
    rows: int


class Manifests:
    """A cache of the files in manifests. A manifest never changes, so each is read once."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[TableFile]] = OrderedDict()
        self._lock = Lock()

    def files(self, table: Table) -> list[TableFile]:
        """All files of the newest snapshot of a table."""
        snapshot = table.current_snapshot()
        if snapshot is None:
            return []
        ids = {name: table.schema().find_field(name).field_id for name in _POSITION}
        layout = layout_of(table.properties, str(table.name()))
        found: list[TableFile] = []
        for manifest in snapshot.manifests(table.io):
            with self._lock:
                known = self._known.get(manifest.manifest_path)
            if known is None:
                entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
                known = [_table_file(entry.data_file, ids, table, layout) for entry in entries]
                with self._lock:
                    self._known[manifest.manifest_path] = known
                    while len(self._known) > _MANIFESTS_MAX:
                        self._known.popitem(last=False)
            found += known
        return found


def _table_file(file: Any, ids: dict[str, int], table: Table, layout: Layout) -> TableFile:
    bounds = {}
    for name, number in ids.items():
        kind: Any = table.schema().find_type(name)
        low, high = (file.lower_bounds or {}).get(number), (file.upper_bounds or {}).get(number)
        if low is None or high is None:
            raise BadTable(f"{file.file_path} has no bounds for column {name}", "write it again with statistics")
        bounds[name] = int(from_bytes(kind, low)), int(from_bytes(kind, high)) + 1
    lanes, (first, stop), (first_seq, stop_seq) = bounds["_lane"], bounds["_index"], bounds["_seq"]
    if lanes[1] - lanes[0] != 1:
        raise BadTable(f"{file.file_path} has rows of several lanes", "compact tables lane by lane, sorted by _index")
    if (span := span_of(file.file_path)) is not None:  # an entry without records has the seq of the record after it
        first_seq, stop_seq = span.start_seq, span.stop_seq
        if layout is Layout.SPLIT:  # control entries of the span are in another file
            first, stop = span.start, span.stop
    return TableFile(
        file.file_path, int(file.file_size_in_bytes), lanes[0], first, stop, first_seq, stop_seq, int(file.record_count)
    )


shared_manifests: Final = Manifests()


def static_table(metadata: str, storage: Storage) -> StaticTable:
    """Load the table that a metadata file describes, without a catalog."""
    with reading(metadata):
        return StaticTable(
            ("static-table", metadata),
            FromInputFile.table_metadata(storage.io.new_input(metadata)),
            metadata,
            storage.io,
            NoopCatalog("static-table"),
        )
