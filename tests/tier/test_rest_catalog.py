"""Tables in a REST catalog: made, committed, read; of two jobs one commits; a catalog that is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from examples.rest_catalog import RestCatalog
from pyiceberg.catalog import load_catalog

from embarcadero.client.api.sync_log import Log
from embarcadero.errors import Deposed, TierUnavailable
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import TierTable
from embarcadero.wire.schemas import RAW
from tests.tier.test_layouts import commit, indices, now_of, write
from tests.tier.truth import Truth


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[RestCatalog]:
    with RestCatalog(tmp_path / "catalog") as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def settings_of(catalog: RestCatalog, tmp_path: Path, **more: Any) -> TierSettings:
    return TierSettings(f"file://{tmp_path}/catalog/warehouse", {"type": "rest", "uri": catalog.uri}, **more)


def test_a_topic_is_tiered_to_a_rest_catalog(log: Log, catalog: RestCatalog, tmp_path: Path) -> None:
    """Twice, with a trim in between; any client of the catalog finds both tables."""
    log.create_topic("rest", order=5)
    truth = Truth(log, "rest", settings_of(catalog, tmp_path, file_bytes=65_536, hot_retention_s=0))
    truth.publish(400)
    with TierJob(log, "rest", truth.settings, holder="a") as job:
        assert job.cycle().rows == 400
        log.trim("rest", before_seq=350)
        truth.publish(10)
        assert job.cycle().rows == 10
    start = log.tail("rest").start_seq
    assert log.read("rest").column("_seq").to_pylist() == list(range(start, 410))
    reader = load_catalog("any", type="rest", uri=catalog.uri)
    assert sorted(reader.list_tables("embarcadero")) == [("embarcadero", "rest"), ("embarcadero", "rest__entries")]
    found = reader.load_table("embarcadero.rest").scan("_seq >= 400").to_arrow()
    assert found.column("_seq").to_pylist() == list(range(400, 410))


def test_one_of_two_jobs_commits(catalog: RestCatalog, tmp_path: Path) -> None:
    """The catalog checks the state they planned from; and an unreachable catalog is waited for."""
    table = TierTable(settings_of(catalog, tmp_path), "orders")
    table.create("orders", "id-1", RAW)
    commit(table, write(table, 0))
    other = TierTable(table.settings, "orders")
    mine, theirs = write(table, 1), write(other, 1, epoch=2)

    def meanwhile(_name: str) -> None:
        commit(other, theirs)

    with pytest.raises(Deposed, match="came first"):
        commit(table, mine, step=meanwhile)
    assert indices(now_of(table)) == list(range(6))
    assert table.is_free() is False
    assert TierTable(table.settings, "others").is_free()
    away = TierTable(TierSettings(table.settings.warehouse, {"type": "rest", "uri": "http://127.0.0.1:9"}), "orders")
    with pytest.raises(TierUnavailable):
        away.load()
