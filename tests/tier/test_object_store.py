"""A warehouse on a real S3-compatible store: tiered, read back; and a store that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embarcadero.client.api.sync_log import Log
from embarcadero.errors import BadTable, TierUnavailable
from embarcadero.tier.job import TierJob
from embarcadero.tier.parquet import data_folder
from embarcadero.tier.storage import TierSettings, sqlite_catalog
from embarcadero.tier.table_reads import TopicTable, table_batches
from tests.tier.object_store import ObjectStore, available, object_store
from tests.tier.truth import await_durable

pytestmark = pytest.mark.skipif(not available(), reason="SeaweedFS is not installed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("weed"), "warehouse") as store:
        yield store


def test_tiered_to_an_object_store(log: Log, store: ObjectStore, tmp_path: Path) -> None:
    """Files, metadata and garbage are there; readers get every record.

    A store that hangs or refuses is a typed error, and the interrupted work is done once it is back.
    """
    log.create_topic("far")
    with log.publisher("far", ack=2) as publisher:
        for number in range(1_000):
            publisher.send(b"%d" % number)
    await_durable(log, "far")
    quick = store.properties(**{"s3.connect-timeout": "2", "s3.request-timeout": "2"})
    settings = TierSettings("s3://warehouse/tables", {**quick, **sqlite_catalog(tmp_path)}, hot_retention_s=0)
    with TierJob(log, "far", settings, holder="a") as job:
        with store.stopped(), pytest.raises(TierUnavailable):
            job.cycle()
        assert job.cycle().rows == 1_000
    tier, lane = log.describe("far").tier, log.describe("far").lane
    assert tier is not None
    assert tier.metadata.startswith("s3://warehouse/tables/")
    assert log.tail("far").hot_seq == 1_000

    usual = store.properties()
    table = TopicTable(tier, usual)
    found = [batch for batches in table_batches(table, lane, 0, 99, log.describe("far").versions) for batch in batches]
    assert [record.value for batch in found for record in batch.records()] == [b"%d" % n for n in range(1_000)]

    with pytest.raises(TierUnavailable, match="tables"):
        list(TopicTable(tier, usual | {"s3.secret-access-key": "wrong"}).rows(lane, 0, 99))
    (file,) = table.files(lane, 0, 99)
    table.storage.delete(file.path)
    assert table.storage.list(data_folder("s3://warehouse/tables/embarcadero/far")) == []
    with pytest.raises(BadTable, match="is missing") as caught:
        list(table.rows(lane, 0, 99))
    assert file.path in caught.value.message
