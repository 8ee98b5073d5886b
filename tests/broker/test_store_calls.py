"""Requests that commit, or read much of the store, run beside the broker's loop: one at a time, and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embarcadero.errors import DiskFull
from embarcadero.limits import STORE_CALLS_MAX, STORE_CALLS_PER_CONNECTION_MAX
from embarcadero.types import Order, Outcome
from embarcadero.wire import messages as m
from tests.broker.disks import DiskWorld, Later
from tests.broker.harness import Client, World


class SlowStore:
    """A broker whose store calls run only when a test lets them; a topic, and two clients."""

    def __init__(self) -> None:
        self.later = Later()
        self.world = World(brokers=1, workers=lambda: self.later)
        self.lane = self.world.topic()
        (self.broker,) = self.world.brokers
        self.client, self.other = Client(self.broker), Client(self.broker)

    def step(self, calls: int = 1) -> None:
        """Let the store answer the oldest calls."""
        for _ in range(calls):
            self.later.step()
        self.world.run(2, self.client, self.other)

    def note(self, index: int) -> m.NoteProgress:
        return m.NoteProgress(topic="t", reader="r", places={self.lane: (index, index)})


@pytest.fixture
def slow() -> SlowStore:
    return SlowStore()


@pytest.mark.parametrize(
    "message",
    [
        m.CreateTopic(name="new", replicas=0),
        m.AlterTopic(name="t", partitions=8),
        m.DescribeTopic(name="t"),
        m.ListTopics(),
        m.DeleteTopic(name="t"),
        m.NoteProgress(topic="t", reader="r", places={}),
        m.GetReaders(topic="t"),
        m.OpenTier(id="1", topic="t", holder="job", warehouse="w", table="x"),
        m.KeepTier(topic="t", epoch=1),
        m.CloseTier(topic="t", epoch=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_publishers_do_not_wait_for_a_call_of_the_store(slow: SlowStore, message: m.Message) -> None:
    """While it is made, batches are acked; its answer comes once the store has answered."""
    opened = slow.world.open(slow.other)
    request = slow.client.ask(message)
    slow.other.batch(opened, 0)
    slow.world.run(4, slow.client, slow.other)
    assert [ack["outcome"] for ack in slow.other.acks] == [Outcome.ORDERED]
    assert request not in slow.client.answers
    assert slow.broker.unsettled
    while slow.later.jobs:
        slow.step()
    assert request in slow.client.answers
    assert not slow.broker.unsettled


def test_a_trim_is_made_beside_the_loop(slow: SlowStore) -> None:
    """Its answer has the start of the lane as it is then."""
    opened = slow.world.open(slow.client)
    for sequence in range(3):
        slow.client.batch(opened, sequence)
    slow.world.run(4, slow.client)
    request = slow.client.ask(m.Trim(lane=slow.lane, by="index", before=2))
    assert slow.world.directory.topics.trims() == {}
    slow.step()
    assert slow.world.directory.topics.trims() == {slow.lane: 2}
    answer = slow.client.answers[request]
    assert isinstance(answer, m.PlaceIs)
    assert answer.index == 2


def test_calls_are_made_one_at_a_time_in_the_order_of_the_requests(slow: SlowStore) -> None:
    """Of one connection; others take turns with it."""
    names = [f"topic-{number}" for number in range(3)]
    requests = [slow.client.ask(m.CreateTopic(name=name, replicas=0)) for name in names]
    missing, there = slow.client.ask(m.DescribeTopic(name="none")), slow.client.ask(m.DescribeTopic(name=names[2]))
    other = slow.other.ask(m.ListTopics())
    assert len(slow.later.jobs) == STORE_CALLS_MAX
    slow.step(3)
    assert other in slow.other.answers
    assert list(slow.client.answers)[-1] == requests[1]
    slow.step(3)
    assert list(slow.client.answers)[-5:] == [*requests, missing, there]
    assert isinstance(slow.client.answers[missing], m.Failed)
    assert isinstance(slow.client.answers[there], m.TopicIs)
    assert slow.later.most == STORE_CALLS_MAX


def test_a_connection_with_several_calls_is_not_read_further(slow: SlowStore) -> None:
    """Further requests wait unparsed, and are taken one after another; none is refused."""
    count = 3 * STORE_CALLS_PER_CONNECTION_MAX
    requests = [slow.client.ask(m.DescribeTopic(name="t")) for _ in range(count)]
    assert slow.client.connection.stopped
    assert slow.broker.unsettled == STORE_CALLS_PER_CONNECTION_MAX
    slow.other.ask(m.Ping())
    assert m.Pong() in slow.other.answers.values()
    for _ in range(count):
        assert slow.broker.unsettled <= STORE_CALLS_PER_CONNECTION_MAX
        slow.step()
    assert all(isinstance(slow.client.answers[request], m.TopicIs) for request in requests)
    assert not slow.client.connection.stopped
    assert not slow.later.jobs


def test_calls_of_a_closed_connection_get_no_answer(slow: SlowStore) -> None:
    """The running call completes, the waiting ones are dropped."""
    slow.client.ask(m.CreateTopic(name="made", replicas=0))
    slow.client.ask(m.CreateTopic(name="dropped", replicas=0))
    slow.client.connection.closed()
    slow.step()
    assert not slow.later.jobs
    assert slow.broker.unsettled == 0
    assert [topic.name for topic in slow.world.directory.topics.all()] == ["made", "t"]
    assert slow.client.peer.take_output() == []


def test_a_store_that_fails_is_an_answer(slow: SlowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is answered too, and then raised to the event loop."""
    errors: list[Exception] = [DiskFull("the disk is full"), ValueError("a bug")]

    def fails(*_: object, **__: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(slow.world.directory.topics, "delete", fails)
    first, second = (slow.client.ask(m.DeleteTopic(name="t")) for _ in range(2))
    slow.step()
    with pytest.raises(ValueError, match="a bug"):
        slow.later.step()
    slow.client.pump()
    failed: list[Any] = [slow.client.answers[request] for request in (first, second)]
    assert [answer.code for answer in failed] == ["Retriable", "Corrupt"]
    third = slow.client.ask(m.DescribeTopic(name="t"))
    slow.step()
    assert isinstance(slow.client.answers[third], m.TopicIs)


def test_the_sequencer_is_rung_once_a_topic_is_there(slow: SlowStore) -> None:
    """Not before: it would not find the topic yet."""
    rings = slow.world.bell.rings
    rings.clear()
    slow.client.ask(m.CreateTopic(name="new", replicas=0))
    assert rings == []
    slow.later.step()
    assert rings == ["sequencer"]


def test_a_note_is_not_lost_when_the_store_is_busy_with_another(slow: SlowStore) -> None:
    """The newest one is written in the end, and a reader that is removed meanwhile stays away."""
    for index in (1, 2):
        slow.client.ask(slow.note(index))
    while slow.later.jobs:
        slow.step()
    slow.world.clock.us += 2_000_000
    slow.client.ask(slow.note(3))
    request = slow.client.ask(m.GetReaders(topic="t"))
    while slow.later.jobs:
        slow.step()
    answer = slow.client.answers[request]
    assert isinstance(answer, m.ReadersAre)
    assert [reader.places[slow.lane][0] for reader in answer.readers] == [3]
    slow.client.ask(slow.note(4))
    slow.client.ask(m.RemoveReader(topic="t", reader="r"))
    slow.world.clock.us += 2_000_000
    while slow.later.jobs:
        slow.step()
    assert slow.world.directory.readers.of("t", slow.world.clock.wall_us()) == []


def test_lanes_of_a_topic_are_read_beside_the_loop(slow: SlowStore) -> None:
    """A subscriber that asks for them without waiting hears what the store has."""
    lane = slow.world.topic("lanes", order=Order.NONE)
    request = slow.client.ask(m.GetLanes(lane=lane, wait_ms=0))
    assert request not in slow.client.answers
    slow.step()
    assert slow.client.answers[request] == m.LanesAre(lane=lane, lanes=[])


def test_reads_of_disks_do_not_keep_calls_of_the_store_back(tmp_path: Path) -> None:
    """They have turns of their own, and workers enough for both."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    client, other = Client(world.brokers[0]), Client(world.brokers[0])
    lane = world.topic().lane
    for _ in range(4):
        client.ask(m.GetTail(lane=lane))
    before = len(later.jobs)
    other.ask(m.ListTopics())
    assert len(later.jobs) == before + 1
