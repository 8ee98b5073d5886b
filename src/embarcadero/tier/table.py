"""The Iceberg table of a topic: made, loaded, and committed to on top of just the frontiers that were planned from.

Theory of operation. Lane frontiers are properties of every snapshot that we commit. A commit loads the table anew,
checks that the frontiers are those from which its files were planned, and swaps the catalog's pointer on condition that
the snapshot is still the one that was checked. PyIceberg would retry a lost race on top of whatever is there by then,
adding the same rows again; so retries are off, and that is checked, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from embarcadero.errors import BadTable, Deposed, TierUnavailable
from embarcadero.invariants import invariant
from embarcadero.plants import planted
from embarcadero.tier.parquet import FileFacts
from embarcadero.tier.settings import NAMESPACE, TierSettings
from embarcadero.tier.storage import Storage, typed_errors
from embarcadero.types import id_text

from pyiceberg.catalog import Catalog, load_catalog  # isort: skip - storage.py says what is missing
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError  # isort: skip
from pyiceberg.table import Table  # isort: skip

Places = Mapping[int, tuple[int, int]]

ID: Final = "embarcadero.id"
TOPIC: Final = "embarcadero.topic"
TOPIC_ID: Final = "embarcadero.topic-id"
EPOCH: Final = "embarcadero.epoch"
LANE: Final = "embarcadero.lane-"
START: Final = "embarcadero.start-"
_RETRIES: Final = "commit.retry.num-retries"
_PROPERTIES: Final = {
    _RETRIES: "0",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "50",
    "write.metadata.delete-after-commit.enabled": "false",  # readers find the table by a metadata file
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The table as it was at one moment."""

    table: Table
    frontiers: dict[int, tuple[int, int]]
    starts: dict[int, tuple[int, int]]

    @property
    def id(self) -> str:
        """What tells it from another table of the same name."""
        return self.table.properties.get(ID, "")

    @property
    def metadata(self) -> str:
        """The file that describes it."""
        return self.table.metadata_location


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
    def load(self) -> Loaded | None:
        """The table as it is now; None if there is none."""
        with typed_errors(self.identifier):
            try:
                table = self.catalog().load_table(self.identifier)
            except NoSuchTableError:
                return None
        return loaded(table)

    def create(self, topic: str, table_id: str, schema: pa.Schema, topic_id: int = 0) -> Loaded:
        """Make the table. Another one who was quicker made it: that is fine if it is for the same topic."""
        with typed_errors(self.identifier):
            catalog = self.catalog()
            catalog.create_namespace_if_not_exists(NAMESPACE)
            properties = {**_PROPERTIES, ID: table_id, TOPIC: topic, TOPIC_ID: id_text(topic_id)}
            catalog.create_table_if_not_exists(self.identifier, schema, properties=properties)
        found = self.load()
        invariant(found is not None, "a table that was made is there")
        if found is None or found.id != table_id:
            raise BadTable(f"table {self.identifier} is not that of topic {topic!r}", "drop or rename it")
        return found

    # --- committing ---------------------------------------------------------------------------------------------------
    def commit(
        self, before: Places, files: Sequence[FileFacts], after: Places, starts: Places, schema: pa.Schema, epoch: int
    ) -> Loaded:
        """Add files, on condition that the table's frontiers are `before`; they are `after` then.

        Deposed, if they are not, or another commit came between: nothing was added. Other errors tell nothing about
        the outcome: load the table to learn it.
        """
        now = self.load()
        if now is None:
            raise BadTable(f"table {self.identifier} is gone from its catalog", "restore the catalog")
        if now.frontiers != dict(before) and not planted("tier-blind-commit"):
            raise Deposed(f"table {self.identifier} is at {now.frontiers}, not at {dict(before)}", "plan again")
        self._check_retries(now.table)
        properties = snapshot_properties(after, starts, epoch)
        with typed_errors(self.identifier):
            try:
                with now.table.transaction() as transaction:
                    if missing := [field for field in schema if field.name not in now.table.schema().column_names]:
                        with transaction.update_schema() as update:
                            update.union_by_name(pa.schema(missing))
                    transaction.set_properties(properties)
                    paths = [facts.path for facts in files]
                    transaction.add_files(paths, snapshot_properties=properties, check_duplicate_files=False)
            except CommitFailedException as error:
                raise Deposed(f"another commit to {self.identifier} came first: {error}", "plan again") from error
        self.storage.sync(self.metadata_files(now.table))
        return loaded(now.table)

    def _check_retries(self, table: Table) -> None:
        if table.properties.get(_RETRIES) != "0" and not planted("tier-commit-retries"):
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


def snapshot_properties(frontiers: Places, starts: Places, epoch: int) -> dict[str, str]:
    """What our snapshots say about the log."""
    properties = {EPOCH: str(epoch)}
    properties |= {f"{LANE}{lane}": f"{index},{seq}" for lane, (index, seq) in frontiers.items()}
    return properties | {f"{START}{lane}": f"{index},{seq}" for lane, (index, seq) in starts.items()}


def loaded(table: Table) -> Loaded:
    """A table with the frontiers of its newest snapshot that has any: others may compact it, and know of none.

    Then those are asked that the newest commit of ours left as properties of the table.
    """
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary: Any = snapshot.summary
        facts = dict(summary.additional_properties) if summary is not None else {}
        if EPOCH in facts:
            return Loaded(table, _places(facts, LANE), _places(facts, START))
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return Loaded(table, _places(table.properties, LANE), _places(table.properties, START))


def _places(facts: Mapping[str, str], prefix: str) -> dict[int, tuple[int, int]]:
    found = {}
    for name, value in facts.items():
        if name.startswith(prefix):
            index, _, seq = value.partition(",")
            found[int(name.removeprefix(prefix))] = (int(index), int(seq))
    return found
