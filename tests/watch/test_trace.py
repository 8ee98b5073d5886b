"""Following a batch: its first records by the schema of its topic, wherever its payload is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.types import EntryKind, Topic
from embarcadero.watch.regions import OnDisk, ReadOnlyFabric, ReplicaFolders
from embarcadero.watch.trace import TraceSource, find_batch
from embarcadero.wire.schemas import TopicSchemas, encode_batch, raw_batch

COLUMNS = pa.schema([("city", pa.string()), ("sold", pa.int64()), ("price", pa.decimal128(9, 2)), ("tag", pa.binary())])
SCHEMAS = TopicSchemas(COLUMNS, (2, 4))


class Disks(ReplicaFolders):
    """All replicas have this payload."""

    payloads: list[bytes] = []

    def payload(self, lane: int, entry: Entries) -> OnDisk | None:
        return OnDisk(self.payloads[0], [0, 1])


class Scene(TraceSource):
    """A topic of which the order ring has one entry, and no broker's log has the payload."""

    def order(self, topic: Topic, lane: int | None) -> tuple[int, Entries]:
        entries = np.zeros(1, dtype=ORDER)
        entries["kind"], entries["count"], entries["schema"] = EntryKind.BATCH, 2, topic.schema_version
        return topic.lane, entries


def shown(tmp_path: Path, topic: Topic, records: pa.RecordBatch, schemas: TopicSchemas | None) -> dict[str, Any]:
    disks = Disks()
    disks.payloads[:] = [encode_batch(records).to_pybytes()]
    known = {} if schemas is None else {topic.name: schemas}
    scene = Scene(ReadOnlyFabric(tmp_path), [topic], [], 1, [], disks, known)
    return find_batch(scene, topic.name, index=0)["payload"]


@pytest.mark.parametrize("version", [1, 2])
def test_typed_records_on_disk_are_shown_by_their_schema(tmp_path: Path, version: int) -> None:
    """Each version of it; a later column is not there. It said that the payload is no batch of its topic's schema."""
    rows: list[dict[str, Any]] = [{"city": "Recife", "sold": 3, "price": 1, "tag": b"\xff"}, {"city": None, "sold": 4}]
    topic = Topic(name="sales", lane=3, schema_version=version)
    found = shown(tmp_path, topic, pa.RecordBatch.from_pylist(rows, SCHEMAS.of(version)), SCHEMAS)
    assert (found["state"], found["replicas"]) == ("on disk", [0, 1])
    later = [{"price": "1.00", "tag": "ff"}, {"price": None, "tag": None}] if version == 2 else [{}, {}]
    assert found["records"] == [{"city": "Recife", "sold": 3} | later[0], {"city": None, "sold": 4} | later[1]]


def test_raw_records_on_disk(tmp_path: Path) -> None:
    """Key, value and time of each."""
    records = raw_batch([b"k", None], [b"one", b"two"], [None, None], [0, 1])
    found = shown(tmp_path, Topic(name="raw", lane=1), records, None)
    assert [(row["key"], row["value"]) for row in found["records"]] == [("k", "one"), (None, "two")]
