"""An object store that becomes unreachable during reads, and clients that can reach neither store nor folder."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.client.api.sync_log import Log
from embarcadero.client.link import Link
from embarcadero.config import load
from embarcadero.errors import NotAvailable, TierUnavailable
from embarcadero.node.local import LocalCluster
from embarcadero.tier import table_reads
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings, sqlite_catalog
from tests.tier.object_store import ObjectStore, available, object_store
from tests.tier.truth import await_durable

pytestmark = [pytest.mark.system, pytest.mark.skipif(not available(), reason="SeaweedFS is not installed")]

RECORDS = 500
VALUES = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("weed"), "warehouse") as store:
        yield store


@pytest.fixture(scope="module")
def log(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Log]:
    """A cluster whose brokers have the keys of the store, and a topic that only its table has."""
    properties = store.properties()
    pairs = [f"{key}={value}" for key, value in properties.items()]
    config = load(None, {"tier.warehouse": "s3://warehouse/away", "tier.properties": pairs})
    with emb.local(brokers=2, replicas=1, config=config) as log:
        tiered(log, "far", at(store, tmp_path_factory.mktemp("catalog")))
        yield log


def at(store: ObjectStore, catalog: Path) -> TierSettings:
    """Tables in the warehouse of the cluster."""
    properties = {**store.properties(), **sqlite_catalog(catalog)}
    return TierSettings("s3://warehouse/away", properties, hot_retention_s=0)


def tiered(log: Log, topic: str, settings: TierSettings) -> None:
    """Make a topic that only its table has."""
    log.create_topic(topic)
    with log.publisher(topic, ack=2) as publisher:
        for value in VALUES:
            publisher.send(value)
    await_durable(log, topic)
    with TierJob(log, topic, settings, holder="a") as job:
        job.cycle()
    assert log.tail(topic).hot_seq == RECORDS


def _forget_files() -> None:
    """Metadata that was read before must not hide that the store is away."""
    table_reads._contents.cache_clear()
    table_reads.shared_manifests._known.clear()


def _until_reported(subscriber: Any) -> TierUnavailable:
    """Poll as a program does, with a time limit for each poll."""
    for _ in range(60):
        try:
            assert subscriber.poll(1) is None
        except TierUnavailable as error:
            return error
    raise AssertionError("nothing was reported")


def _values(subscriber: Any) -> list[bytes]:
    """All records read from here on; the store may be reported once more while it starts."""
    found: list[bytes] = []
    while len(found) < RECORDS:
        try:
            batch = subscriber.poll(60)
        except TierUnavailable:
            continue
        assert batch is not None
        found += [record.value for record in batch.records()]
    return found


@pytest.mark.parametrize("direct", [False, True], ids=["through-brokers", "by-the-client"])
def test_a_store_that_is_away_is_named_and_reading_continues_when_it_is_back(
    log: Log, store: ObjectStore, direct: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Polls do not return None without end: they raise, name the store, and the same subscriber continues."""
    _forget_files()
    keys = [f"{key}={value}" for key, value in store.properties().items() if "key" in key]
    address = f"http://127.0.0.1:{store.port}"
    with emb.connect(log.address) as client:
        if direct:
            monkeypatch.setattr(Link, "tables", property(lambda _: False, lambda *_: None))
            client.brokers.use_table_properties(keys)  # where the store is, the cluster tells
        with client.subscribe("far", start="earliest") as subscriber:
            with caplog.at_level(logging.WARNING, "embarcadero.client"), store.away("warehouse"):
                error = _until_reported(subscriber)
                assert address in error.message
                assert "s3://warehouse/away" in error.message
                assert "embarcadero.far" in error.message
                assert "store is up" in error.hint
                assert address in caplog.text
                _until_reported(subscriber)  # it is tried again, and reported again
                with pytest.raises(TierUnavailable, match="warehouse"):
                    client.read("far", timeout=60)
            assert _values(subscriber) == VALUES


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_tail_ends_with_an_error_that_names_the_store(
    log: Log, store: ObjectStore, hangs: bool, tmp_path: Path
) -> None:
    """It used to print "not durable yet" and end normally, or wait without end: all of it is durable."""
    topic = "hangs" if hangs else "refuses"
    tiered(log, topic, at(store, tmp_path))  # no broker has read it before
    with store.stopped() if hangs else store.away("warehouse"):
        shown = CliRunner().invoke(app, ["tail", topic, "--brokers", log.address])
    assert shown.exit_code == 1
    assert f"http://127.0.0.1:{store.port}" in shown.output
    assert f"embarcadero.{topic} cannot be read from its store" in shown.output
    assert "not durable yet" not in shown.output
    assert VALUES[-1].decode() not in shown.stdout.split()


def test_a_client_without_keys_and_without_pyiceberg_reads_through_brokers(log: Log) -> None:
    """It knows only the brokers' addresses."""
    code = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "import embarcadero as emb\n"
        f"with emb.connect({log.address!r}) as log:\n"
        "    print(log.read('far').num_rows, log.describe('far').tier.properties)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.startswith(f"{RECORDS} ")
    assert "s3.endpoint" in shown.stdout
    assert "secret" not in shown.stdout


@pytest.fixture
def near(tmp_path: Path) -> Iterator[Log]:
    """A cluster with a table in its own folder, which is the default, and a topic that only this table has."""
    with LocalCluster(2, replicas=1, data_dir=tmp_path / "data") as cluster, emb.connect(cluster.addresses) as log:
        tiered(log, "near", TierSettings.of(load(None, {"tier.hot_retention_s": 0}), cluster.data_dir))
        yield log


def test_the_folder_of_a_file_tier_may_be_hidden_from_clients(near: Log) -> None:
    """A client of another machine can't see it, and reads through brokers."""
    code = (
        "import builtins, io, os, sys\n"
        "import pyarrow.fs as fs\n"
        "class Hidden(fs.LocalFileSystem):\n"
        "    def open_input_file(self, path): raise FileNotFoundError(path)\n"
        "    def open_input_stream(self, path): raise FileNotFoundError(path)\n"
        "fs.LocalFileSystem = Hidden\n"
        "import pyiceberg.io.pyarrow as io; io.LocalFileSystem = Hidden\n"
        "import embarcadero as emb\n"
        f"with emb.connect({near.address!r}) as log:\n"
        "    print(log.read('near').num_rows)\n"
        "    with log.subscribe('near') as subscriber:\n"
        "        count = 0\n"
        "        while count < 500: count += subscriber.poll(60).count\n"
        "        print(count)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(RECORDS), str(RECORDS)]


def test_a_table_elsewhere_is_left_to_clients(near: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with another warehouse than the cluster's: brokers refuse to look there, clients that can read it do."""
    tiered(near, "other", TierSettings.local(tmp_path / "other", hot_retention_s=0))
    assert near.read("other").num_rows == RECORDS
    with near.subscribe("other", start="earliest") as subscriber:
        assert _values(subscriber) == VALUES
    monkeypatch.setitem(sys.modules, "embarcadero.tier.table_reads", None)
    with pytest.raises(NotAvailable):
        near.read("other", timeout=60)
