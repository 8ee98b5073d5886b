"""Reading from a time, and moving the start of a lane: broker and sequencer together on incoherent memory."""

from __future__ import annotations

from typing import Any

import pytest

from embarcadero.types import GapKind
from embarcadero.wire import messages as m
from tests.broker.harness import Client, World


class Lane:
    """A lane with a batch of ten records at each of some times, and a client at each of two brokers."""

    def __init__(self, batches: int = 5) -> None:
        self.world = World()
        self.world.topic()
        self.clients = [Client(broker) for broker in self.world.brokers]
        self.opened = self.world.open(self.clients[0])
        self.lane = self.opened.lane
        for sequence in range(batches):
            self.append(sequence)
        found = self.fetch(by="earliest")
        self.times = [int(us) for us in found.entries["append_us"]]
        self.indices = [int(index) for index in found.entries["index"]]

    def append(self, sequence: int) -> None:
        self.clients[0].batch(self.opened, sequence, b"%d" % sequence, count=10)
        self.world.run(3, *self.clients)

    def fetch(self, broker: int = 0, **options: Any) -> Any:
        return self.world.fetch(self.clients[broker], self.lane, **options)

    def ask(self, message: m.Message, broker: int = 0) -> Any:
        request = self.clients[broker].ask(message)
        return self.clients[broker].answers[request]

    def trim(self, by: str, before: int, broker: int = 0) -> Any:
        return self.ask(m.Trim(lane=self.lane, by=by, before=before), broker)

    def find(self, by: str, start: int, broker: int = 0) -> Any:
        return self.ask(m.Find(lane=self.lane, by=by, start=start), broker)


@pytest.fixture
def lane() -> Lane:
    return Lane()


def _payloads(found: Any) -> list[bytes]:
    return [bytes(payload) for payload in found.payloads]


def _code(answer: Any) -> str:
    assert isinstance(answer, m.Failed), answer
    assert answer.hint
    return answer.code


def test_a_fetch_by_time_starts_at_the_first_batch_appended_since(lane: Lane) -> None:
    """A batch appended at exactly that time is included; a microsecond later the next one comes first."""
    for number, us in enumerate(lane.times):
        assert _payloads(lane.fetch(1, by="time", start=us))[0] == b"%d" % number
        assert _payloads(lane.fetch(1, by="time", start=us - 1))[0] == b"%d" % number
    assert len(_payloads(lane.fetch(by="time", start=0))) == 5


def test_a_fetch_by_a_future_time_waits_and_returns_nothing_older(lane: Lane) -> None:
    """Batches that come before the time are not served, even if the answer was waiting for them."""
    client = lane.clients[1]
    later = lane.world.clock.wall_us() + 200_000
    request = client.ask(m.Fetch(lane=lane.lane, by="time", start=later, max_bytes=1000, wait_ms=20_000))
    lane.append(5)
    lane.world.run(2, client)
    assert request not in client.fetched
    while lane.world.clock.wall_us() < later:
        lane.world.run(1)
    lane.append(6)
    lane.world.run(2, client)
    assert _payloads(client.fetched[request]) == [b"6"]


def test_a_future_time_is_reported_as_the_end(lane: Lane) -> None:
    """A fetch that does not wait is answered empty, at the end of the lane."""
    found = lane.fetch(by="time", start=lane.times[-1] + 1)
    assert (_payloads(found), found.next_index) == ([], found.tail_index)
    place = lane.find("time", lane.times[-1] + 1)
    assert (place.index, place.seq) == (found.tail_index, 50)


def test_find_returns_index_and_seq_of_a_position(lane: Lane) -> None:
    """By time, by seq (the batch that holds it), by index; an invalid request is a typed error."""
    assert lane.find("time", lane.times[3]) == m.PlaceIs(lane=lane.lane, index=lane.indices[3], seq=30)
    assert lane.find("seq", 29) == m.PlaceIs(lane=lane.lane, index=lane.indices[2], seq=20)
    assert lane.find("index", lane.indices[1]) == m.PlaceIs(lane=lane.lane, index=lane.indices[1], seq=10)
    assert _code(lane.find("seq", 51)) == "FuturePosition"
    assert _code(lane.find("phase of the moon", 1)) == "BadValue"


@pytest.mark.parametrize(("by", "kept"), [("seq", 2), ("index", 2), ("time", 2)])
def test_trim_moves_the_start_for_all_brokers_and_splits_no_batch(lane: Lane, by: str, kept: int) -> None:
    """A seq in the middle of a batch keeps the batch; every broker starts there, whichever broker trimmed."""
    before = {"seq": 10 * kept + 9, "index": lane.indices[kept], "time": lane.times[kept]}[by]
    answer = lane.trim(by, before)
    assert answer == m.PlaceIs(lane=lane.lane, index=lane.indices[kept], seq=10 * kept)
    for broker in (0, 1):
        tail = lane.ask(m.GetTail(lane=lane.lane), broker)
        assert (tail.start_index, tail.start_seq) == (lane.indices[kept], 10 * kept)
        assert _payloads(lane.fetch(broker, by="earliest"))[0] == b"%d" % kept


def test_reading_below_the_start_is_one_gap_by_index_seq_and_time(lane: Lane) -> None:
    """A reader learns exactly which records it missed, and continues at the start."""
    lane.trim("index", lane.indices[3])
    lane.world.run()  # a fetch by index notices the trim when the store is next read
    for by, start in (("index", lane.indices[1]), ("seq", 15), ("time", lane.times[1])):
        found = lane.fetch(1, by=by, start=start)
        assert (found.gap.kind, found.gap.start, found.gap.stop) == (
            GapKind.TRIMMED, lane.indices[1], lane.indices[3],
        ), by  # fmt: skip
        assert found.next_index == lane.indices[3]
    assert _code(lane.find("seq", 15)) == "Trimmed"
    assert _code(lane.find("time", lane.times[1])) == "Trimmed"


def test_trimming_beyond_the_end_is_refused(lane: Lane) -> None:
    """Nothing changes. All of a lane may be trimmed, but no future positions."""
    tail = lane.ask(m.GetTail(lane=lane.lane))
    assert _code(lane.trim("seq", 51)) == "FuturePosition"
    assert _code(lane.trim("index", tail.index + 1)) == "FuturePosition"
    assert _code(lane.trim("time", lane.world.clock.wall_us() + 1)) == "FuturePosition"
    assert _code(lane.trim("color", 1)) == "BadValue"
    assert lane.ask(m.GetTail(lane=lane.lane)).start_index == 0
    assert lane.trim("time", lane.world.clock.wall_us()).index == tail.index
    lane.append(5)
    assert _payloads(lane.fetch(1, by="earliest")) == [b"5"]


def test_trimming_less_than_before_changes_nothing(lane: Lane) -> None:
    """The answer contains the current start."""
    lane.trim("seq", 30)
    assert lane.trim("seq", 10, broker=1) == m.PlaceIs(lane=lane.lane, index=lane.indices[3], seq=30)
    assert lane.trim("time", 0).seq == 30
    assert lane.trim("seq", 40, broker=1).seq == 40
    for broker in (0, 1):
        assert lane.ask(m.GetTail(lane=lane.lane), broker).start_seq == 40


def test_a_topic_that_is_gone_can_t_be_trimmed(lane: Lane) -> None:
    """A typed error; and a new topic of that name starts at its beginning."""
    lane.trim("seq", 30)
    lane.ask(m.DeleteTopic(name="t"))
    assert _code(lane.trim("seq", 40)) == "UnknownTopic"
    assert lane.world.directory.topics.trims() == {}


def test_a_reader_that_is_overtaken_by_a_trim_gets_a_gap(lane: Lane) -> None:
    """It was reading below; the next fetch by index names the missed records."""
    found = lane.fetch(1, by="earliest", max_bytes=1)
    lane.trim("seq", 40)
    lane.world.run()
    after = lane.fetch(1, by="index", start=found.next_index)
    assert (after.gap.start, after.gap.stop) == (found.next_index, lane.indices[4])


def test_times_whose_batches_left_the_ring_are_a_gap() -> None:
    """The evicted batches may have been as new as the requested time, so the reader gets a gap."""
    lane = Lane(batches=1)
    for sequence in range(1, 300):
        lane.append(sequence)
    found = lane.fetch(by="time", start=lane.times[0])
    assert found.gap is not None
    assert found.gap.kind == GapKind.TRIMMED
    assert _code(lane.find("time", lane.times[0])) == "Trimmed"
    assert lane.trim("time", lane.times[0]).index == found.next_index
