"""Requests that a stopped broker executes late change the intended topic, or none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest

import embarcadero as emb
from embarcadero.errors import TopicReplaced
from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster, halt
from embarcadero.wire import messages as m

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two brokers: one is stopped, the other continues."""
    with LocalCluster(brokers=2, replicas=1, log_bytes=32 * MIB) as cluster:
        yield cluster


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    halt(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def late(log: emb.Log, pool: ThreadPoolExecutor, message: m.Message) -> Future[m.AnyMessage]:
    """Send a request to broker 0, and wait for its answer in another thread."""
    (connection,) = [each for each in log.brokers.live() if each.broker == 0]
    return pool.submit(log.thread.wait, connection.ask(message, 60.0))


@pytest.mark.parametrize("kind", ["delete", "alter", "trim"])
def test_a_late_request_leaves_the_next_topic_of_that_name_alone(cluster: LocalCluster, kind: str) -> None:
    """It lies in the socket of a stopped broker while the topic is deleted and created again through another one."""
    name, addresses = f"orders-{kind}", cluster.addresses
    with emb.connect(addresses) as log, ThreadPoolExecutor(1) as pool:
        first = log.create_topic(name, replicas=1)
        while len(log.brokers.live()) < 2:
            log.status()
        asks = {
            "delete": m.DeleteTopic(name=name, topic_id=first.id),
            "alter": m.AlterTopic(name=name, partitions=8, topic_id=first.id),
            "trim": m.Trim(lane=first.lane, by="index", before=0, topic_id=first.id),
        }
        with stopped(cluster.pids()["broker:0"]), emb.connect(addresses[1]) as other:  # broker 0 welcomes no client now
            answer = late(log, pool, asks[kind])
            other.delete_topic(name)
            second = other.create_topic(name, replicas=1)
            with other.publisher(name, ack=2) as publisher:
                publisher.send(b"keep me").result()
        with pytest.raises(emb.errors.Refused):
            answer.result(60)
        if kind != "trim":  # its lane is gone, too
            assert isinstance(answer.exception(), TopicReplaced)
        assert log.describe(name).id == second.id != first.id
        assert log.describe(name).partitions == 1
        assert log.read(name)["value"].to_pylist() == [b"keep me"]
        log.delete_topic(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.delete_topic("paused"), lambda log: log.alter_topic("paused", partitions=8),
        lambda log: log.trim("paused", before_seq=1),
    ],
)  # fmt: skip
def test_a_call_that_waits_for_a_paused_broker_changes_no_later_topic(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, change: Callable[[emb.Log], object]
) -> None:
    """The call first asks which topic it means. The broker answers when it wakes: with the next topic of that name."""
    addresses = cluster.addresses
    with emb.connect(addresses) as log, emb.connect(addresses[1]) as other, ThreadPoolExecutor(1) as pool:
        log.create_topic("paused", replicas=1)
        while len(log.brokers.live()) < 2 or other.brokers.live()[0].broker != 1:
            log.status()
        paused, awake = log.brokers.live()[0], other.brokers.live()[0]
        if paused.broker != 0:
            paused = log.brokers.live()[1]

        asked = Event()

        async def ask_paused(*_: object) -> object:
            asked.set()
            return paused

        async def ask_awake(*_: object) -> object:
            return awake

        monkeypatch.setattr(log.brokers, "_any", ask_paused)
        monkeypatch.setattr(other.brokers, "_any", ask_awake)
        with stopped(cluster.pids()["broker:0"]):
            answer = pool.submit(change, log)
            assert asked.wait(60)
            other.delete_topic("paused")
            other.create_topic("paused", replicas=1)
            with other.publisher("paused", ack=2) as publisher:
                publisher.send(b"keep me").result()
                publisher.send(b"keep me, too").result()
        with pytest.raises(TopicReplaced, match="was created while this call waited"):
            answer.result(60)
        assert other.describe("paused").partitions == 1
        assert other.read("paused")["value"].to_pylist() == [b"keep me", b"keep me, too"]
        other.delete_topic("paused")


def test_a_call_may_name_the_id_of_its_topic(cluster: LocalCluster) -> None:
    """`delete_topic` with the id of a deleted topic is refused, and names the topic that has the name now."""
    with emb.connect(cluster.addresses) as log:
        first = log.create_topic("certain", replicas=1)
        log.delete_topic("certain", topic_id=first.id)
        second = log.create_topic("certain", replicas=1)
        with pytest.raises(TopicReplaced, match=f"{second.id:016x}"):
            log.delete_topic("certain", topic_id=first.id)
        log.delete_topic("certain")
        assert "certain" not in [topic.name for topic in log.topics()]
