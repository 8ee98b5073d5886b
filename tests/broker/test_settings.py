"""The configuration of brokers, limits and new topics takes effect."""

from __future__ import annotations

from typing import Any

import pytest

from embarcadero.config import load
from embarcadero.limits import KIB, SESSION_TTL_S
from embarcadero.types import Outcome, Topic
from embarcadero.wire import messages as m
from tests.broker.harness import Client, World


def world_with(**flags: Any) -> World:
    """A cluster of one broker, configured: `broker__water_low=...` stands for broker.water_low."""
    return World(brokers=1, config=load(flags={name.replace("__", "."): value for name, value in flags.items()}))


def asked(world: World, client: Client, message: m.Message) -> Any:
    request = client.ask(message)
    world.run(6, client)
    return client.answers[request]


def filled(world: World, share: float) -> tuple[Client, int]:
    """A client that sent batches of 1 KiB until a share of the broker's log is in use, without a sequencer's round."""
    world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    broker, sent = world.brokers[0], 0
    while broker.ingest.occupancy() < share:
        client.batch(opened, sent, bytes(1000))
        sent += 1
        broker.poll()
        client.pump()
    return client, sent


@pytest.mark.parametrize(("mark", "full"), [(0.3, True), (0.9, False)])
def test_above_the_high_mark_no_credit_is_granted(mark: float, full: bool) -> None:
    """The same load is above a low mark and below a high one."""
    world = world_with(broker__water_high=mark, broker__water_low=0.1)
    filled(world, 0.35)

    assert world.brokers[0].status()["full"] is full


@pytest.mark.parametrize(("after_s", "reported"), [(1, True), (60, False)])
def test_a_full_broker_reports_it_after_the_configured_time(after_s: float, reported: bool) -> None:
    """Two seconds above the mark may be long or short, as configured."""
    world = world_with(broker__water_high=0.3, broker__water_low=0.1, broker__backpressure_after_s=after_s)
    client, _ = filled(world, 0.35)
    world.clock.us += 2_000_000
    world.brokers[0].poll()
    client.pump()

    assert client.full is reported


def test_credit_is_as_configured_but_never_less_than_a_batch() -> None:
    """A connection may have this many bytes in flight."""
    sizes = {"limits__frame_bytes": 16 * KIB}
    least = world_with(**sizes, broker__credit_bytes=64 * KIB)
    client = Client(least.brokers[0])
    least.run(2, client)

    assert client.credit == max(8 * KIB + 64, min(64 * KIB, least.sizes.log_bytes // 4))


def test_a_batch_has_a_maximum_number_of_records() -> None:
    """One record more ends the connection with a typed error, like any violated limit of the protocol."""
    world = world_with(limits__records_per_batch=10)
    world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0, count=10)
    world.run(6, client)
    client.batch(opened, 1, count=11)
    client.pump()

    assert [Outcome(int(ack["outcome"])) for ack in client.acks] == [Outcome.ORDERED]
    assert isinstance(client.pushed[-1], m.Failed)
    assert (client.pushed[-1].code, client.peer.closing) == ("FrameTooLarge", True)


def test_the_welcome_contains_the_limits() -> None:
    """Clients learn the cluster's limits; the largest batch fits a chunk of the log, whatever the configuration."""
    world = world_with(limits__records_per_batch=10, limits__record_bytes=2 * KIB)
    welcome = Client(world.brokers[0]).answers[1]

    assert isinstance(welcome, m.Welcome)
    assert (welcome.records_max, welcome.record_bytes_max) == (10, 2 * KIB)
    assert welcome.frame_bytes_max == world.sizes.chunk_bytes


def test_topics_are_made_with_the_clusters_defaults() -> None:
    """Options of create_topic override the configured defaults."""
    world = world_with(
        topic__order=5, topic__partitions=3, topic__on_gap="skip", topic__gap_timeout_skip_ms=77,
        topic__gap_timeout_fence_ms=88, topic__session_ttl_s=99,
    )  # fmt: skip
    client = Client(world.brokers[0])
    usual: Topic = asked(world, client, m.CreateTopic(name="usual")).topic
    fenced: Topic = asked(world, client, m.CreateTopic(name="fenced", order=2, on_gap="fence", partitions=1)).topic
    own: Topic = asked(world, client, m.CreateTopic(name="own", gap_timeout_ms=5, session_ttl_s=6)).topic

    assert (usual.order, usual.partitions, usual.on_gap, usual.gap_timeout_ms) == (5, 3, "skip", 77)
    assert usual.session_ttl_s == 99
    assert (fenced.order, fenced.partitions, fenced.on_gap, fenced.gap_timeout_ms) == (2, 1, "fence", 88)
    assert (own.gap_timeout_ms, own.session_ttl_s) == (5, 6)


def test_without_a_configuration_topics_are_as_documented() -> None:
    """Order 2, one partition, fences after 30 s, sessions live for a day."""
    world = world_with()
    topic: Topic = asked(world, Client(world.brokers[0]), m.CreateTopic(name="t")).topic

    assert (topic.order, topic.partitions, topic.on_gap, topic.gap_timeout_ms) == (2, 1, "fence", 30_000)
    assert topic.session_ttl_s == SESSION_TTL_S


def test_topics_and_partitions_have_the_configured_limits() -> None:
    """One more than allowed is refused with a typed error, and nothing is made."""
    world = world_with(limits__topics=2, limits__partitions=4)
    client = Client(world.brokers[0])

    assert asked(world, client, m.CreateTopic(name="wide", partitions=5)).code == "BadValue"
    for name in ("a", "b"):
        assert asked(world, client, m.CreateTopic(name=name, partitions=4)).topic.name == name
    assert asked(world, client, m.AlterTopic(name="a", partitions=5)).code == "BadValue"
    assert asked(world, client, m.CreateTopic(name="c")).code == "TooMany"
    assert asked(world, client, m.CreateTopic(name="d", session_ttl_s=0)).code == "BadValue"


@pytest.mark.parametrize(("patience_ms", "fenced"), [(100, True), (60_000, False)])
def test_a_gap_of_a_departed_publisher_lasts_as_long_as_configured(patience_ms: int, fenced: bool) -> None:
    """Batch 1 waits for batch 0, which will never come: the publisher has disconnected."""
    world = world_with(sequencer__departed_gap_timeout_ms=patience_ms)
    lane = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 1)
    world.run(3, client)
    client.connection.closed()
    world.run(20)
    waiting = int(world.sequencer.lanes[lane].order.table.waiting.total)

    assert (waiting == 0) is fenced


def test_the_number_of_session_requests_in_a_round_is_as_configured() -> None:
    """With one request a round, three requests take three rounds."""
    world = world_with(sequencer__controls_per_round=1)
    world.topic()
    client = Client(world.brokers[0])
    requests = [client.ask(m.OpenSession(topic="t")) for _ in range(3)]
    opened = []
    for _ in range(3):
        world.sequencer.round()
        world.brokers[0].poll()
        client.pump()
        opened.append(sum(request in client.answers for request in requests))

    assert opened == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "ask", "copies"),
    [
        ({}, {}, (3, 2)),
        ({}, {"replicas": 2}, (2, 2)),
        ({}, {"replicas": 2, "durable_on": 1}, (2, 1)),
        ({}, {"replicas": 0}, (0, 0)),
        ({"topic__replicas": "1"}, {}, (1, 1)),
        ({"topic__replicas": "0"}, {}, (0, 0)),
        ({"topic__replicas": "0"}, {"replicas": 3}, (3, 2)),
        ({"topic__durable_on": "3"}, {}, (3, 3)),
        ({"topic__durable_on": "3"}, {"replicas": 2}, (2, 2)),
        ({"topic__durable_on": "3"}, {"replicas": 0}, (0, 0)),
        ({"topic__durable_on": "1"}, {"durable_on": 2}, (3, 2)),
    ],
)
def test_the_number_of_copies_is_as_requested_or_as_configured(
    settings: dict[str, Any], ask: dict[str, int], copies: tuple[int, int]
) -> None:
    """Otherwise as many as there are live replicas, at most three, durable on the majority.

    `describe` lists the ranges.
    """
    world = world_with(**settings)
    for replica in range(4):
        world.directory.replicas.register(replica, f"d{replica}", "/f", f"h{replica}", 1)
    client = Client(world.brokers[0])
    topic: Topic = asked(world, client, m.CreateTopic(name="t", **ask)).topic
    described = asked(world, client, m.DescribeTopic(name="t"))

    assert (topic.replicas, topic.durable_on) == copies
    assert [len(range_.replicas) for range_ in described.ranges] == [copies[0]] * bool(copies[0])


def test_retention_is_as_requested_or_as_configured() -> None:
    """And can be altered."""
    world = world_with(topic__retention_bytes=1_000, topic__retention_s=60)
    client = Client(world.brokers[0])
    usual: Topic = asked(world, client, m.CreateTopic(name="usual")).topic
    own: Topic = asked(world, client, m.CreateTopic(name="own", retention_bytes=0, retention_s=5)).topic
    altered: Topic = asked(world, client, m.AlterTopic(name="own", retention_bytes=7)).topic

    assert (usual.retention_bytes, usual.retention_s) == (1_000, 60)
    assert (own.retention_bytes, own.retention_s) == (0, 5)
    assert (altered.retention_bytes, altered.retention_s) == (7, 5)
