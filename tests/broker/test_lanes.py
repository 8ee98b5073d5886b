"""Orders 0 and 1 on incoherent memory: a lane per broker incarnation, acked by that broker, closed by the sequencer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from embarcadero.broker.own_lanes import lane_margin, lane_slots
from embarcadero.errors import Backpressure, DiskFailed, DiskFull, EmbarcaderoError, FabricFull
from embarcadero.types import Gap, GapKind, Outcome, TopicLane
from embarcadero.wire import messages as m
from embarcadero.wire.codec import NO_ACK
from tests.broker.disks import DiskWorld, payload
from tests.broker.harness import SIZES, Client, World


@pytest.fixture
def world() -> World:
    """Two brokers, a topic of order 0 and one of order 1."""
    world = World()
    world.topic("zero", order=0)
    world.topic("one", order=1)
    return world


def opened(client: Client, topic: str = "zero") -> m.Opened:
    """Open a session; a broker answers by itself, without a sequencer."""
    answer = client.answers[client.ask(m.OpenSession(topic=topic))]
    assert isinstance(answer, m.Opened), answer
    return answer


def lanes(client: Client, topic: str = "zero") -> list[Any]:
    """The lanes of a topic as a broker describes them."""
    answer = client.answers[client.ask(m.DescribeTopic(name=topic))]
    assert isinstance(answer, m.TopicIs)
    return answer.topic.lanes


def outcomes(client: Client) -> list[tuple[int, Outcome]]:
    return [(int(ack["session_seq"]), Outcome(int(ack["outcome"]))) for ack in client.acks]


def payloads(found: Any) -> list[bytes]:
    return [bytes(payload) for payload in found.payloads]


def kill(world: World, number: int) -> None:
    """Kill a broker's process; its end is noticed."""
    broker = world.brokers.pop(number)
    world.directory.members.mark_dead(broker.member.broker, broker.member.incarnation)


def test_a_batch_is_acked_immediately_and_read_at_its_position_through_any_broker(world: World) -> None:
    """No round of the sequencer lies between the batch and its ack; the ack names the lane."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    writer.batch(session, 0, b"hello", count=3)
    writer.batch(session, 1, b"world", count=2)
    writer.pump()

    first, second = writer.acks
    [lane] = lanes(reader)
    found = world.fetch(reader, lane.lane, by="index", start=int(second["index"]))

    assert outcomes(writer) == [(0, Outcome.ORDERED), (1, Outcome.ORDERED)]
    assert int(first["lane"]) == session.lane
    assert int(first["extra"]) == int(second["extra"]) == lane.lane
    assert [(int(a["index"]), int(a["seq"])) for a in writer.acks] == [(0, 0), (1, 3)]
    assert (lane.broker, lane.incarnation, lane.open) == (0, 1, True)
    assert payloads(found) == [b"world"]


def test_each_broker_has_a_lane_of_its_own(world: World) -> None:
    """The same session through two brokers: two lanes, both from index 0."""
    clients = [Client(broker) for broker in world.brokers]
    session = opened(clients[0])
    for client, text in zip(clients, (b"a", b"b"), strict=True):
        client.batch(session, 0, text)
        client.pump()

    assert [lane.broker for lane in lanes(clients[0])] == [0, 1]
    found = [payloads(world.fetch(clients[0], lane.lane, by="earliest")) for lane in lanes(clients[0])]
    assert found == [[b"a"], [b"b"]]


def test_a_closed_incarnation_gets_no_ack_out(world: World) -> None:
    """Batches that a broker writes after it was declared dead are not acked, not served, and above the recorded end."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session, zombie = opened(writer), world.brokers[0]
    writer.batch(session, 0, b"in time")
    writer.pump()
    kill(world, 0)
    world.run()
    writer.batch(session, 1, b"too late")
    writer.pump()
    zombie.poll()
    writer.pump()

    [lane] = lanes(reader)
    found = world.fetch(reader, lane.lane, by="index", start=0)
    end = world.fetch(reader, lane.lane, by="index", start=1)

    assert outcomes(writer) == [(0, Outcome.ORDERED)]
    assert zombie.deposed
    assert (lane.end, lane.end_seq) == (1, 1)
    assert payloads(found) == [b"in time"]
    assert end.gap is not None
    assert (end.gap.kind, end.gap.start, end.gap.stop) == (GapKind.END_OF_LANE, 1, 1)


def test_a_broker_that_does_not_know_the_end_yet_serves_nothing_above_it(world: World) -> None:
    """Its copy of the store is old; the closing line in the sequencer's frontiers is not."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    writer.batch(session, 0)
    [lane] = lanes(reader)
    assert world.fetch(reader, lane.lane, by="index", start=0).entries["index"].tolist() == [0]
    kill(world, 0)
    for _ in range(3):
        world.clock.us += 20_000
        world.sequencer.round()
    assert not world.directory.lanes.all()[0].open
    writer.batch(session, 1, b"no reader ever gets this")
    late = reader.ask(m.Fetch(lane=lane.lane, by="index", start=1, max_bytes=1000, wait_ms=10_000))
    reader.pump()
    assert late not in reader.fetched
    world.run(6, reader)
    assert reader.fetched[late].gap == Gap(GapKind.END_OF_LANE, 1, 1)


def test_a_lane_ends_after_its_last_valid_entry_whatever_the_frontier_is(world: World) -> None:
    """Entries that reached memory count, published or not: their ack may already be in flight."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    for sequence in range(3):
        writer.batch(session, sequence, b"%d" % sequence)
    [ring] = [w._ring for w in world.brokers[0].lanes._writers.values()]
    ring.frontier.restart(1)
    kill(world, 0)
    world.run()

    assert [(lane.end, lane.end_seq) for lane in lanes(reader)] == [(3, 3)]
    assert payloads(world.fetch(reader, lanes(reader)[0].lane, by="earliest")) == [b"0", b"1", b"2"]


def test_a_new_incarnation_makes_a_new_lane(world: World) -> None:
    """A lane is never continued by another incarnation; waiting subscribers are informed of the new lane."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    writer.batch(session, 0, b"old")
    world.run(6, writer)
    [old] = lanes(reader)
    watch = reader.ask(m.GetLanes(lane=session.lane, above=old.lane, wait_ms=10_000))
    world.brokers[0] = world.start_broker(0)
    world.run()
    assert watch not in reader.answers
    again = Client(world.brokers[0])
    again.batch(session, 1, b"new")
    world.run(6, again, reader)

    answer = reader.answers[watch]
    assert isinstance(answer, m.LanesAre)
    assert [(lane.broker, lane.incarnation) for lane in answer.lanes] == [(0, 2)]
    assert int(again.acks[0]["index"]) == 0
    assert [lane.end for lane in lanes(reader)] == [1, None]


def test_acks_wait_during_a_takeover_and_writes_stay_within_a_margin(world: World) -> None:
    """A later epoch that is only open may still close this broker.

    No ack leaves before it has started with the broker open.
    """
    client = Client(world.brokers[0])
    session = opened(client)
    client.batch(session, 0)
    client.pump()
    epochs = world.sequencer.leadership.epochs
    epochs.open(world.directory.elections.next_epoch())
    margin = lane_margin(SIZES)
    for sequence in range(1, margin + 3):
        client.batch(session, sequence)
    client.pump()
    assert outcomes(client) == [(0, Outcome.ORDERED), *((margin + n, Outcome.BACKPRESSURE) for n in (1, 2))]

    world.restart_sequencer()
    world.run(6, client)
    stored = [sequence for sequence, outcome in outcomes(client) if outcome is Outcome.ORDERED]
    assert stored == list(range(margin + 1))


def test_a_successor_closes_the_lanes_that_the_sequencer_left_open(world: World) -> None:
    """A broker that dies while there is no sequencer is closed by the next one before it starts."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    writer.batch(opened(writer), 0, b"last words")
    kill(world, 0)
    world.restart_sequencer()
    world.run()

    assert [lane.end for lane in lanes(reader)] == [1]
    assert payloads(world.fetch(reader, lanes(reader)[0].lane, by="earliest")) == [b"last words"]


def test_order_1_accepts_a_session_in_its_order_only(world: World) -> None:
    """A batch that overtook another must be sent again; a new connection starts at the lowest unsettled one."""
    client = Client(world.brokers[0])
    session = opened(client, "one")
    for sequence in (1, 0, 2, 4, 3, 4):
        client.batch(session, sequence, b"%d" % sequence)
    client.pump()
    late, good = Outcome.BACKPRESSURE, Outcome.ORDERED
    assert outcomes(client) == [(1, late), (0, good), (2, late), (4, late), (3, late), (4, late)]

    other = Client(world.brokers[1])
    for sequence in (2, 1, 2):
        other.batch(session, sequence, b"%d" % sequence, low=1)
    other.pump()
    found = [payloads(world.fetch(other, lane.lane, by="earliest")) for lane in lanes(other, "one")]
    assert found == [[b"0"], [b"1", b"2"]]


def test_a_batch_that_wants_no_ack_gets_none(world: World) -> None:
    """It is in the log nevertheless."""
    client = Client(world.brokers[0])
    session = opened(client)
    client.batch(session, 0, b"quiet", flags=NO_ACK)
    client.batch(session, 1, b"loud")
    client.pump()

    assert outcomes(client) == [(1, Outcome.ORDERED)]
    assert payloads(world.fetch(client, lanes(client)[0].lane, by="earliest")) == [b"quiet", b"loud"]


def test_a_fetch_that_waits_is_answered_when_the_lane_grows_and_when_it_ends(world: World) -> None:
    """Long polls on a lane of another broker."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    writer.batch(session, 0)
    [lane] = lanes(reader)
    grows = reader.ask(m.Fetch(lane=lane.lane, by="index", start=1, max_bytes=1000, wait_ms=10_000))
    world.run(3, reader)
    assert grows not in reader.fetched
    writer.batch(session, 1, b"news")
    world.run(3, reader)
    assert payloads(reader.fetched[grows]) == [b"news"]
    ends = reader.ask(m.Fetch(lane=lane.lane, by="index", start=2, max_bytes=1000, wait_ms=10_000))
    kill(world, 0)
    world.run(6, reader)
    assert reader.fetched[ends].gap is not None
    assert reader.fetched[ends].gap.kind is GapKind.END_OF_LANE


def test_evicted_batches_of_a_lane_are_a_trimmed_gap(world: World) -> None:
    """The ring and the log wrap around; the retained part of a lane is a suffix."""
    client = Client(world.brokers[0])
    session, count = opened(client), 3 * lane_slots(SIZES)
    for sequence in range(count):
        client.batch(session, sequence, b"%d" % sequence)
        client.pump()
    [lane] = lanes(client)
    found = world.fetch(client, lane.lane, by="index", start=0)
    assert found.gap is not None
    assert found.gap.kind is GapKind.TRIMMED
    rest = world.fetch(client, lane.lane, by="index", start=found.next_index)
    assert payloads(rest) == [b"%d" % n for n in range(found.next_index, count)]
    tail = client.answers[client.ask(m.GetTail(lane=lane.lane))]
    assert isinstance(tail, m.TailIs)
    assert (tail.index, tail.seq, tail.start_index) == (count, count, found.next_index)


def test_a_lane_whose_memory_is_gone_is_trimmed_to_its_end(world: World) -> None:
    """Its end and its gap are still reported."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    writer.batch(opened(writer), 0, count=4)
    kill(world, 0)
    world.run()
    assert world.directory.members.mark_removed(0, 1, world.directory.elections.started_epoch())
    for name in world.memory.host("admin").names():
        if name.startswith("broker-0.1/"):
            world.memory.host("admin").remove(name)
    world.run()

    [lane] = lanes(reader)
    gone, end = (world.fetch(reader, lane.lane, by="index", start=start) for start in (0, 1))
    assert lane.removed
    assert (gone.gap.kind, gone.gap.start, gone.gap.stop) == (GapKind.TRIMMED, 0, 1)
    assert end.gap.kind is GapKind.END_OF_LANE
    assert isinstance(world.fetch(reader, lane.lane, by="index", start=2), m.Failed)
    by_time, by_seq = (reader.answers[reader.ask(m.Find(lane=lane.lane, by=by, start=3))] for by in ("time", "seq"))
    assert isinstance(by_time, m.PlaceIs)
    assert isinstance(by_seq, m.Failed)
    assert (by_time.index, by_time.seq, by_seq.code) == (1, 4, "Trimmed")


def test_a_deleted_topic_takes_its_lanes_with_it(world: World) -> None:
    """Its lanes are unknown afterwards, and its region is removed by the broker that made it."""
    client = Client(world.brokers[0])
    session = opened(client)
    client.batch(session, 0)
    client.pump()
    [lane] = lanes(client)
    world.directory.topics.delete("zero")
    world.run()
    client.batch(session, 1)
    client.pump()

    assert outcomes(client)[-1] == (1, Outcome.UNKNOWN_TOPIC)
    assert isinstance(world.fetch(client, lane.lane, by="earliest"), m.Failed)
    assert lane.region not in world.memory.host("admin").names()


def test_named_sessions_are_refused_with_the_reason(world: World) -> None:
    """Orders 0 and 1 keep no sessions."""
    client = Client(world.brokers[0])
    answer = client.answers[client.ask(m.OpenSession(topic="one", name="me"))]
    assert isinstance(answer, m.Failed)
    assert answer.code == "BadValue"
    assert "order 2 or 5" in answer.hint


def test_batches_are_counted_and_settled_before_a_broker_leaves(world: World) -> None:
    """Traffic, outcomes and latencies as of any other topic; a batch that waits for its ack is not settled."""
    broker = world.brokers[0]
    client = Client(broker)
    session = opened(client)
    for sequence in range(3):
        client.batch(session, sequence, count=5)
    client.pump()
    came = broker.counters.came_in[session.lane]
    assert (came.batches, came.records) == (3, 15)
    assert broker.counters.outcomes[int(Outcome.ORDERED)] == sum(broker.counters.publish_us.counts) == 3

    world.sequencer.leadership.epochs.open(world.directory.elections.next_epoch())  # a sequencer takes over: acks wait
    client.batch(session, 3)
    client.pump()
    assert (broker.unsettled, broker.taken - broker.ingest.next, len(client.acks)) == (1, 4, 3)


def test_a_lane_without_space_is_recorded_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are refused until there is memory; then the same lane accepts them."""
    client = Client(world.brokers[0])
    session = opened(client)
    host = type(world.memory.host("admin"))
    create, full = host.create, True

    def no_room(self: object, name: str, shape: object) -> object:
        if full and "broker-0.1/order-" in name:
            raise FabricFull(f"no room for region {name}", "make it larger")
        return create(self, name, shape)

    monkeypatch.setattr(host, "create", no_room)
    for sequence in range(3):
        client.batch(session, sequence)
        client.pump()
    assert {outcome for _, outcome in outcomes(client)} == {Outcome.BACKPRESSURE}
    [lane] = lanes(client)
    for reader in (client, Client(world.brokers[1])):  # all of the topic can be read nevertheless
        tail = reader.answers[reader.ask(m.GetTail(lane=lane.lane))]
        assert isinstance(tail, m.TailIs), tail
        assert (tail.index, tail.start_index) == (0, 0)
    full = False
    client.batch(session, 0)
    client.pump()
    assert outcomes(client)[-1] == (0, Outcome.ORDERED)
    assert len(lanes(client)) == 1


@pytest.mark.parametrize("error", [Backpressure("locked", ""), DiskFull("full", ""), DiskFailed("broken", "")])
def test_a_failing_store_is_not_retried_immediately_and_delays_no_other_client(
    world: World, monkeypatch: pytest.MonkeyPatch, error: EmbarcaderoError
) -> None:
    """Each attempt may take seconds, and all clients of the broker wait that long.

    After one attempt, others are refused immediately.

    The connection stays, and once the store answers the lane is made.
    """
    client = Client(world.brokers[0])
    session = opened(client)
    tries = 0

    def fails(*_: object) -> None:
        nonlocal tries
        tries += 1
        world.clock.us += 5_000_000
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(world.brokers[0]._view.context.directory.lanes, "make", fails)
        for sequence in range(20):
            client.batch(session, sequence)
            client.pump()
            world.clock.us += 200_000
        assert tries == 1
        world.clock.us += 5_000_000
        client.batch(session, 0)
        client.pump()
        assert tries == 2
    assert {outcome for _, outcome in outcomes(client)} == {Outcome.BACKPRESSURE}
    world.clock.us += 6_000_000
    client.batch(session, 0)
    client.pump()
    assert outcomes(client)[-1] == (0, Outcome.ORDERED)


def test_a_lane_is_trimmed_and_searched_by_time_through_any_broker(world: World) -> None:
    """Also when its broker is gone; a topic's own number is not a lane."""
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    session = opened(writer)
    for sequence in range(4):
        writer.batch(session, sequence, b"%d" % sequence, count=2)
        writer.pump()
        world.run()
    [lane] = lanes(reader)
    entries = world.fetch(reader, lane.lane, by="index", start=0).entries
    third = int(entries["append_us"][2])

    def place(ask: m.Message) -> Any:
        return reader.answers[reader.ask(ask)]

    assert place(m.Find(lane=lane.lane, by="time", start=third)).seq == 4
    assert place(m.Trim(lane=lane.lane, by="time", before=third)).index == 2
    assert payloads(world.fetch(reader, lane.lane, by="earliest")) == [b"2", b"3"]
    assert place(m.GetTail(lane=lane.lane)).start_seq == 4
    assert place(m.Trim(lane=session.lane, by="index", before=0)).code == "BadValue"
    kill(world, 0)
    world.run()
    assert place(m.Trim(lane=lane.lane, by="seq", before=6)).index == 3
    assert place(m.Find(lane=lane.lane, by="seq", start=2)).code == "Trimmed"
    assert world.fetch(reader, lane.lane, by="time", start=1 << 60).gap.kind is GapKind.END_OF_LANE


class LostEnd:
    """A lane of four batches, usually closed; then memory is lost, and disks have `kept` batches."""

    def __init__(self, path: Path, kept: int, closed: bool = True) -> None:
        self.world = world = DiskWorld(path)
        world.topic("zero", order=0)
        writer = Client(world.brokers[0])
        session = opened(writer)
        for sequence in range(4):
            writer.batch(session, sequence, payload(sequence))
        writer.pump()
        [lane] = world.directory.lanes.all()
        open_range = world.directory.ranges.open_range(lane.lane)
        assert open_range is not None
        self._kept, self._range = kept, open_range
        for replica in world.of(self._range):
            replica.say(self._range, 0)
            if kept:
                replica.copy(self._range, kept, lane.region)
        if closed:
            assert world.directory.lanes.close([msgspec.structs.replace(lane, end=4, end_seq=4)], world.hand.epoch)
        self.lane, self.reader = lane.lane, Client(world.brokers[1])
        world.run(3, self.reader)
        self.before = self.fetch(4)
        fabric = world.memory.host("admin")
        for name in [name for name in fabric.names() if name.startswith(("broker-0.1/", "replica-"))]:
            fabric.remove(name)
        world.brokers = [world.start_broker(0), world.start_broker(1)]
        self.reader = Client(world.brokers[1])

    def recover(self) -> TopicLane:
        """Seal the lane's range where the disks end."""
        where = self.lane, self._range.number, self._kept, self._kept
        assert self.world.directory.ranges.seal_recovered(*where, [], self.world.hand.epoch) is not None
        self.world.run(3, self.reader)
        return self.world.directory.lanes.all()[0]

    def fetch(self, start: int, read: str = "ordered") -> tuple[Gap | None, int] | None:
        """The gap that a reader gets, and where it continues; None if it waits."""
        found = self.world.fetch(self.reader, self.lane, start=start, read=read, wait_ms=20_000)
        return None if found is None else (found.gap, found.next_index)


@pytest.mark.parametrize("kept", [0, 2])
def test_readers_of_ordered_records_learn_at_the_end_of_a_lane_which_were_taken_back(tmp_path: Path, kept: int) -> None:
    """A reader at the recorded end has read all of the lane; the sealed end shows how much of that still exists."""
    case = LostEnd(tmp_path, kept)
    case.recover()
    assert case.fetch(3) == (Gap(GapKind.LOST, kept, 4), 4)
    assert case.fetch(4) == (Gap(GapKind.END_OF_LANE, kept, kept), 4)
    assert case.fetch(4, "durable") == (Gap(GapKind.END_OF_LANE, 4, 4), 4)


def test_the_end_of_a_lane_is_reported_once_no_more_loss_is_possible(tmp_path: Path) -> None:
    """To readers of ordered records, which request nothing more after it. Other readers only read durable records."""
    case = LostEnd(tmp_path, 2)
    assert case.before is None
    waiting = [
        case.reader.ask(m.Fetch(lane=case.lane, start=4, max_bytes=1_000, read=read, wait_ms=20_000))
        for read in ("ordered", "durable")
    ]
    case.world.run(3, case.reader)
    assert [request in case.reader.fetched for request in waiting] == [False, True]
    case.recover()
    assert case.reader.fetched[waiting[0]].gap == Gap(GapKind.END_OF_LANE, 2, 2)


@pytest.mark.parametrize("trim", [3, 4])
def test_a_trim_does_not_hide_the_losses_of_a_broker_lane(tmp_path: Path, trim: int) -> None:
    """Also when the store keeps no ranges of the lane any more."""
    case = LostEnd(tmp_path, 2)
    case.recover()
    case.world.directory.topics.trim("zero", case.lane, trim)
    case.world.run(3, case.reader)
    assert (case.world.directory.ranges.all(case.lane) == []) == (trim == 4)
    assert [case.fetch(start) for start in (2, 3)] == [(Gap(GapKind.LOST, 2, 4), 4)] * 2
    assert case.fetch(4) == (Gap(GapKind.END_OF_LANE, 2, 2), 4)
    assert case.fetch(1) == (Gap(GapKind.TRIMMED, 1, trim), trim)
    assert case.fetch(3, "durable") == (Gap(GapKind.TRIMMED if trim == 4 else GapKind.LOST, 3, 4), 4)


def test_the_end_of_a_wholly_trimmed_lane_is_reported_to_readers_above_it(tmp_path: Path) -> None:
    """It was open when its memory was lost: only the lane's record has its end."""
    case = LostEnd(tmp_path, 2, closed=False)
    case.recover()
    case.world.directory.topics.trim("zero", case.lane, 2)
    case.world.run(3, case.reader)
    assert case.world.directory.ranges.all(case.lane) == []
    assert case.fetch(4) == (Gap(GapKind.END_OF_LANE, 2, 2), 2)
