"""What snapshots of a topic's table say about the log: properties of the snapshots that a tiering job committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from embarcadero.tier.layouts import Layout, layout_of

from pyiceberg.table import Table  # isort: skip - storage.py says what is missing
from pyiceberg.table.snapshots import Snapshot  # isort: skip

Places = Mapping[int, tuple[int, int]]

ID: Final = "embarcadero.id"
TOPIC: Final = "embarcadero.topic"
TOPIC_ID: Final = "embarcadero.topic-id"
EPOCH: Final = "embarcadero.epoch"
LANE: Final = "embarcadero.lane-"
START: Final = "embarcadero.start-"
ENTRIES: Final = "embarcadero.entries"  # the metadata file of the table of control entries, as of this commit
ENTRIES_TABLE: Final = "embarcadero.entries-table"
ENTRIES_LOCATION: Final = "embarcadero.entries-location"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The table as it was at one moment."""

    table: Table
    frontiers: dict[int, tuple[int, int]]
    starts: dict[int, tuple[int, int]]
    entries: str = ""  # the metadata file of the control entries below the frontiers

    @property
    def id(self) -> str:
        """What tells it from another table of the same name."""
        return self.table.properties.get(ID, "")

    @property
    def metadata(self) -> str:
        """The file that describes it."""
        return self.table.metadata_location

    @property
    def layout(self) -> Layout:
        """How it keeps rows. BadTable, if a newer version made it."""
        return layout_of(self.table.properties, self.metadata)

    @property
    def entries_table(self) -> str:
        """The name of the table of control entries; empty if they are in this table."""
        return self.table.properties.get(ENTRIES_TABLE, "")

    @property
    def entries_location(self) -> str:
        """Where that table has its files."""
        return self.table.properties.get(ENTRIES_LOCATION, "")


def snapshot_properties(frontiers: Places, starts: Places, epoch: int, entries: str = "") -> dict[str, str]:
    """What our snapshots say about the log."""
    properties = {EPOCH: str(epoch)} | ({ENTRIES: entries} if entries else {})
    properties |= {f"{LANE}{lane}": f"{index},{seq}" for lane, (index, seq) in frontiers.items()}
    return properties | {f"{START}{lane}": f"{index},{seq}" for lane, (index, seq) in starts.items()}


def newest_of_ours(table: Table) -> tuple[Snapshot, dict[str, str]] | None:
    """The newest snapshot that a tiering job committed, and its properties: others may have compacted it since."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary: Any = snapshot.summary
        facts = dict(summary.additional_properties) if summary is not None else {}
        if EPOCH in facts:
            return snapshot, facts
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return None


def loaded(table: Table) -> Loaded:
    """A table with the frontiers of its newest snapshot that has any.

    If snapshots have none, those are asked that the newest commit of ours left as properties of the table.
    """
    ours = newest_of_ours(table)
    facts = table.properties if ours is None else ours[1]
    return Loaded(table, _places(facts, LANE), _places(facts, START), facts.get(ENTRIES, ""))


def _places(facts: Mapping[str, str], prefix: str) -> dict[int, tuple[int, int]]:
    found = {}
    for name, value in facts.items():
        if name.startswith(prefix):
            index, _, seq = value.partition(",")
            found[int(name.removeprefix(prefix))] = (int(index), int(seq))
    return found
