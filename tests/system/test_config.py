"""A cluster that is configured by a file: its processes follow the file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import embarcadero as emb
from embarcadero.errors import BadConfiguration, BadValue, TooMany
from embarcadero.limits import MIB
from embarcadero.node.folder import ClusterFolder

pytestmark = pytest.mark.system

TEXT = """\
cluster: {brokers: 1, one_process: true}
broker: {host: 0.0.0.0, advertised_host: localhost, max_connections: 3}
fabric: {log_bytes: 32MiB, sessions: 50}
limits: {record_bytes: 1KiB, records_per_batch: 10, topics: 2}
client: {linger_ms: 0, ack: 0, request_timeout_s: 7s, prefetch: 1, fetch_bytes: 64KiB}
topic: {order: 5, partitions: 2, session_ttl_s: 1h}
log: {level: warning}
metrics: {enabled: false}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "embarcadero.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def log(file: Path) -> Iterator[emb.Log]:
    with emb.local(config=str(file)) as log:
        log.create_topic("t")
        yield log


def test_processes_get_the_configuration_through_the_folder(log: emb.Log) -> None:
    """One process for all roles, on free ports, with the sizes of the file."""
    info = ClusterFolder(log.cluster.data_dir).read_info()

    assert [node.roles for node in info.nodes] == ["sequencer,broker:0"]
    assert (info.config.fabric.log_bytes, info.config.fabric.sessions) == (32 * MIB, 50)
    assert sum(path.stat().st_size for path in Path(info.fabric).glob("broker-*/log")) >= 32 * MIB
    assert info.config.broker.port == 0


def test_clients_get_the_advertised_address(log: emb.Log) -> None:
    """The broker listens on every address, and is known by another."""
    assert log.address.startswith("localhost:")
    with socket.create_connection(("127.0.0.1", int(log.address.rpartition(":")[2])), timeout=10):
        pass


def test_topics_have_the_defaults_of_the_file(log: emb.Log) -> None:
    """And limits apply."""
    topic = log.describe("t")

    assert (topic.order, topic.partitions, topic.session_ttl_s) == (5, 2, 3_600)
    log.create_topic("second", order=2)
    with pytest.raises(TooMany, match="maximum of 2 topics"):
        log.create_topic("third")


def test_clients_respect_the_limits_of_the_cluster(log: emb.Log) -> None:
    """A record above the cluster's limit is refused before it is sent; batches have as many records as allowed."""
    with log.publisher("t", ack=1) as publisher:
        with pytest.raises(BadValue, match="the limit is 1024"):
            publisher.send(bytes(1025))
        with pytest.raises(BadValue, match="the limit is 1024"):
            publisher.publish(pa.table({"value": [bytes(2000)]}))
        publisher.publish(pa.table({"value": [b"x"] * 35}), partition=0).result(timeout=30)
    with log.subscribe("t") as subscriber:
        counts = []
        while sum(counts) < 35:
            batch = subscriber.poll(timeout=30)
            assert batch is not None
            counts.append(batch.count)
    assert max(counts) <= 10


def test_publishers_have_the_defaults_of_the_file(log: emb.Log) -> None:
    """ack=0 from the file: futures have no position; the caller's options win."""
    with log.publisher("t") as publisher:
        assert publisher.send(b"x").result(timeout=30) is None
    with log.publisher("t", ack=1) as publisher:
        assert publisher.send(b"x").result(timeout=30) is not None


def test_the_fourth_connection_is_refused(log: emb.Log) -> None:
    """max_connections is 3, and one is the module's own."""
    refused = pytest.raises(emb.EmbarcaderoError, match="its maximum of 3 connections")
    with emb.connect(log.address), emb.connect(log.address), refused:
        emb.connect(log.address)


def test_the_log_has_only_the_configured_levels(log: emb.Log) -> None:
    """Level warning: a start logs nothing."""
    lines = (ClusterFolder(log.cluster.data_dir).logs / "node.log").read_text()

    assert "INFO" not in lines


def test_metrics_can_be_disabled(log: emb.Log) -> None:
    """No process has a metrics port."""
    report = log.cluster.report()

    assert [report.sequencer.metrics, *(broker.metrics for broker in report.brokers)] == ["", ""]


def test_the_asyncio_client_takes_a_configuration_too(log: emb.Log, file: Path) -> None:
    """aio.connect and aio.local read the same files; settings reach the client."""

    async def main() -> float:
        async with await emb.aio.connect(log.address, config=file) as twin:
            return twin.brokers.settings.request_timeout_s

    assert asyncio.run(main()) == 7.0


def test_a_client_finds_its_brokers_in_the_file(log: emb.Log, tmp_path: Path) -> None:
    """connect(config=...) needs no address if the file has one."""
    path = tmp_path / "client.yaml"
    path.write_text(f"client: {{brokers: ['{log.address}']}}")
    with emb.connect(config=path) as other:
        assert "t" in [topic.name for topic in other.topics()]


def test_a_wrong_file_ends_before_anything_starts(tmp_path: Path) -> None:
    """Neither a process nor a folder is left."""
    path = tmp_path / "bad.yaml"
    path.write_text("broker: {prot: 1}")
    with pytest.raises(BadConfiguration, match=r"did you mean broker\.port"):
        emb.local(config=path, data_dir=str(tmp_path / "data"))
    with pytest.raises(BadConfiguration):
        emb.connect(config=path)
    assert not (tmp_path / "data").exists()
