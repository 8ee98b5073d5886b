"""Progress that readers report: sent to one broker, visible at all of them, bounded, and written seldom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from embarcadero.errors import Backpressure
from embarcadero.limits import READER_KEPT_S, READERS_PER_TOPIC_MAX
from embarcadero.placement.records import ReaderNote
from embarcadero.wire import messages as m
from tests.broker.harness import Client, World


class Readers:
    """A topic, and a client at each of two brokers."""

    def __init__(self) -> None:
        self.world = World()
        self.lane = self.world.topic()
        self.clients = [Client(broker) for broker in self.world.brokers]

    def ask(self, message: m.Message, broker: int = 0) -> Any:
        return self.clients[broker].answers[self.clients[broker].ask(message)]

    def note(self, reader: str, index: int, broker: int = 0, topic: str = "t") -> Any:
        return self.ask(m.NoteProgress(topic=topic, reader=reader, places={self.lane: (index, index * 10)}), broker)

    def seen(self, broker: int = 0) -> dict[str, int]:
        """By reader: the index that it reported."""
        answer = self.ask(m.GetReaders(topic="t"), broker)
        return {reader.reader: reader.places[self.lane][0] for reader in answer.readers}

    def pass_s(self, seconds: float) -> None:
        self.world.clock.us += int(seconds * 1_000_000)
        self.world.run(1)


@pytest.fixture
def readers() -> Readers:
    return Readers()


def test_progress_reported_to_one_broker_is_visible_at_all(readers: Readers) -> None:
    """Name, position and age. The newest report counts, and the latest reporter comes first."""
    assert readers.note("a", 1) == m.Done()
    readers.note("b", 5, broker=1)
    readers.pass_s(2)
    readers.note("a", 2, broker=1)
    for broker in (0, 1):
        assert list(readers.seen(broker).items()) == [("a", 2), ("b", 5)]
    answer = readers.ask(m.GetReaders(topic="t"))
    assert [round(reader.ago_s) for reader in answer.readers] == [0, 2]


def test_the_store_is_written_once_a_second_at_most(readers: Readers) -> None:
    """A reader that reports every batch costs a commit a second; its last report is stored nevertheless."""
    readers.note("a", 0)
    before = readers.world.directory.revision()
    for index in range(1, 50):
        readers.note("a", index)
    assert readers.world.directory.revision() == before
    assert readers.seen(1) == {"a": 0}
    readers.pass_s(1.1)
    assert readers.world.directory.revision() == before + 1
    assert readers.seen(1) == {"a": 49}


def test_a_locked_store_is_used_half_of_the_time_at_most(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for it delays all clients of the broker. Reports are written once it answers."""
    tries = []

    def locked(*_: object) -> None:
        tries.append(readers.world.clock.us)
        readers.world.clock.us += 5_000_000
        raise Backpressure("the store stayed locked", "try again")

    with monkeypatch.context() as patch:
        patch.setattr(readers.world.brokers[0].requests.notes._directory.readers, "note", locked)
        readers.note("a", 1)
        for _ in range(60):
            readers.pass_s(0.2)
    assert len(tries) > 1
    assert all(second - first > 10_000_000 for first, second in pairwise(tries))
    readers.pass_s(6)
    assert readers.seen(1) == {"a": 1}


def test_silent_readers_are_forgotten_and_others_go_with_their_topic(readers: Readers) -> None:
    """After a day without a report, or immediately when the topic is deleted."""
    readers.note("a", 1)
    readers.pass_s(READER_KEPT_S / 2)
    readers.note("b", 1)
    readers.pass_s(READER_KEPT_S / 2 + 1)
    assert set(readers.seen()) == {"b"}
    readers.note("b", 2)
    assert len(readers.world.directory._decider.store.list("readers/")) == 1
    readers.ask(m.DeleteTopic(name="t"))
    assert readers.world.directory._decider.store.list("readers/") == []


def test_a_reader_can_be_removed_and_comes_back_if_it_is_alive(readers: Readers) -> None:
    """Also pending writes are dropped. Nothing is removed from another topic of that name."""
    readers.note("a", 1)
    readers.note("b", 1)  # waits to be written
    assert readers.ask(m.RemoveReader(topic="t", reader="b")) == m.Done()
    assert readers.ask(m.RemoveReader(topic="t", reader="a"), broker=1) == m.Done()
    assert readers.seen() == {}
    readers.pass_s(2)
    assert readers.seen(1) == {}
    readers.note("a", 5)
    assert readers.seen(1) == {"a": 5}

    refused = readers.ask(m.RemoveReader(topic="t", reader="b"))
    assert (refused.code, refused.message) == ("BadValue", "topic 't' has no reader 'b'")
    assert readers.ask(m.RemoveReader(topic="nothing", reader="a")).code == "UnknownTopic"
    assert readers.ask(m.RemoveReader(topic="t", reader="a", topic_id=99)).code == "TopicReplaced"
    assert readers.seen() == {"a": 5}


def test_readers_of_a_topic_are_bounded(readers: Readers) -> None:
    """Above the bound, readers that were silent the longest are removed."""
    now = readers.world.clock.wall_us()
    notes = {
        ("t", f"r{number}"): ReaderNote(reader=f"r{number}", places={readers.lane: (0, 0)}, at_us=now + number)
        for number in range(READERS_PER_TOPIC_MAX)
    }
    readers.world.directory.readers.note(notes, now)
    readers.pass_s(1)
    readers.note("new", 1)
    left = set(readers.seen())
    assert len(readers.world.directory.readers.of("t", now)) == READERS_PER_TOPIC_MAX
    assert "r0" not in left
    assert {"new", "r1"} <= left


def test_invalid_reports_are_refused(readers: Readers) -> None:
    """A missing topic, an empty or too long name, too many lanes."""
    assert readers.note("a", 1, topic="nothing").code == "UnknownTopic"
    assert readers.ask(m.GetReaders(topic="nothing")).code == "UnknownTopic"
    assert readers.note("", 1).code == "BadName"
    assert readers.note("x" * 256, 1).code == "BadName"
    many = dict.fromkeys(range(1025), (0, 0))
    assert readers.ask(m.NoteProgress(topic="t", reader="a", places=many)).code == "BadValue"
