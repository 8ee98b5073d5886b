"""Commits during a full disk and an outage of the whole cluster, without Spark.

All processes are away for AWAY_S seconds. `make matrix` sets it to three minutes, longer than a publisher waits for one
batch; here that wait is short.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

import embarcadero as emb
from embarcadero.errors import BadValue, OutcomeUnknown
from embarcadero.node.local import RestartableCluster
from embarcadero.spark import processes, sink
from embarcadero.spark.shape import WriteOptions, shape_of
from embarcadero.spark.sink import StagedMessage, TaskWriter, WriteWork
from embarcadero.staging.ledger import TopicLedger
from embarcadero.staging.manifest import REFERENCE, Manifest, ManifestPart, Target
from tests.spark.test_staged_writes import LITTLE, MUCH, SCHEMA, rows

AWAY_S: Final = float(os.environ.get("AWAY_S", "1.5"))
_SHORT: Final = {"EMBARCADERO_CLIENT_DELIVERY_TIMEOUT_S": "1", "EMBARCADERO_CLIENT_REQUEST_TIMEOUT_S": "1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableCluster]:
    """Two brokers and a replica."""
    made = RestartableCluster(tmp_path_factory.mktemp("away") / "cluster", 2, 1)
    made.start()
    yield made
    made.end()


@pytest.fixture
def address(cluster: RestartableCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The cluster's brokers, and a client with a short timeout, unless the outage is long."""
    if AWAY_S < 60:
        for name, value in _SHORT.items():
            monkeypatch.setenv(name, value)
    yield ",".join(cluster.addresses)
    while processes._CLIENTS:
        processes._CLIENTS.popitem()[1].close(0)


def written(
    address: str, topic: str, *tasks: range, text: str, write: str = "w"
) -> tuple[TaskWriter, list[StagedMessage]]:
    """A writer, and its tasks' messages to the driver."""
    with emb.connect(address) as log:
        options = WriteOptions(brokers=address, topic=topic, batch_bytes=200 * len(text))
        writer = TaskWriter(options, shape_of(log.describe(topic), SCHEMA, options, 0))
    work = WriteWork(write, 0, "attempt")
    return writer, [
        StagedMessage(writer.write(work, number, rows(*ids, text=text))) for number, ids in enumerate(tasks)
    ]


def stored(address: str, topic: str) -> list[int]:
    """The ids in the topic."""
    with emb.connect(address) as log:
        return list(log.read(topic).column("id").to_pylist()) if log.tail(topic).seq else []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("step", "text"), [("append", LITTLE), ("publish", MUCH)], ids=["append", "publish"])
def test_a_commit_survives_an_outage_of_the_cluster(
    cluster: RestartableCluster, address: str, monkeypatch: pytest.MonkeyPatch, step: str, text: str
) -> None:
    """All of its processes die, and their memory is lost: before the decision, or after it.

    The commit continues by itself when the cluster is back.
    """
    topic = f"away-{step}"
    with emb.connect(address) as log:
        log.create_topic(topic, order=5, replicas=1, schema=SCHEMA)
    writer, messages = written(address, topic, range(1_500), range(1_500, 3_000), text=text)
    whole: Callable[..., Any] = getattr(TopicLedger, step)
    starter = threading.Thread(target=lambda: (time.sleep(AWAY_S), cluster.start()))
    calls = []

    async def away(ledger: TopicLedger, *given: Any) -> None:
        calls.append(step)
        if len(calls) == 1:
            cluster.kill_all()
            starter.start()
        await whole(ledger, *given)

    monkeypatch.setattr(TopicLedger, step, away)
    sink.publish(writer, messages)
    starter.join()
    assert sorted(stored(address, topic)) == list(range(3_000))


def test_a_commit_gives_up_in_the_end(
    cluster: RestartableCluster, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error explains the state; the sweep, or the same write again, completes a decided commit."""
    with emb.connect(address) as log:
        log.create_topic("late", order=5, replicas=1, schema=SCHEMA)
    writer, messages = written(address, "late", range(50), text=LITTLE)

    async def never(*_: object) -> None:
        raise OutcomeUnknown("no answer", "")

    with monkeypatch.context() as patch:
        patch.setattr(sink, "STAGED_PATIENCE_S", 0)
        patch.setattr(TopicLedger, "publish", never)
        with pytest.raises(OutcomeUnknown, match="either all of its rows will be visible, or none"):
            sink.publish(writer, messages)
    assert stored(address, "late") == []
    sink.give_up(writer, messages)  # as Spark does when a commit has failed
    sink.publish(*written(address, "late", range(70, 80), text=LITTLE))
    assert stored(address, "late") == list(range(50))


def test_a_disk_that_is_full_fails_the_task_and_shows_nothing(cluster: RestartableCluster, address: str) -> None:
    """No file of the replica may grow while the rows are staged. When there is space again, the write is repeated."""
    with emb.connect(address) as log:
        log.create_topic("full", order=5, replicas=1, schema=SCHEMA)
    replica = cluster.pids()["replica:0"]
    before = resource.prlimit(replica, resource.RLIMIT_FSIZE)
    if AWAY_S < 60:
        resource.prlimit(replica, resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            with pytest.raises(OutcomeUnknown):
                written(address, "full", range(500), text=MUCH)
        finally:
            resource.prlimit(replica, resource.RLIMIT_FSIZE, before)
    assert stored(address, "full") == []
    sink.publish(*written(address, "full", range(500), text=MUCH))
    assert stored(address, "full") == list(range(500))


def test_the_manifest_of_a_large_write_fits() -> None:
    """A write of 5 GB in batches of 1 MiB; and the maximum number of batches."""
    def of(batches: int) -> Manifest:
        return Manifest("w", 0, [Target("t", 1, 1)], [ManifestPart(b"\xff" * (REFERENCE.itemsize * batches))])

    of(5 * 1024).check()
    of(290_000).check()
    with pytest.raises(BadValue, match="larger batches"):
        of(300_000).check()
