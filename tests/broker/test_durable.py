"""Acks and payloads that wait for disks, on incoherent memory, with durable lines and range words written by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from embarcadero.broker.broker import Broker
from embarcadero.broker.durable import DurableFrontiers
from embarcadero.errors import Backpressure
from embarcadero.fabric.layout import BrokerLine, Standing, frontier_offset
from embarcadero.fabric.leader import NO_RANGE
from embarcadero.fabric.lines import FrontierReader
from embarcadero.types import NO_INDEX, Gap, GapKind, Outcome, Range, ReplicaRef, Trouble
from embarcadero.wire import messages as m
from embarcadero.wire.codec import WANT_DURABLE
from embarcadero_proof.bugs.table import injected
from tests.broker.disks import DiskWorld, payload, texts
from tests.broker.harness import Client


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    """Two brokers, three replicas."""
    return DiskWorld(tmp_path)


def outcomes(client: Client) -> list[tuple[int, Outcome]]:
    return [(int(ack["session_seq"]), Outcome(int(ack["outcome"]))) for ack in client.acks]


def waiting_line(world: DiskWorld, number: int = 0) -> int:
    """The state of durable waits that broker `number` publishes."""
    region = world.memory.host("replica").attach(f"{world.brokers[number].member.region_prefix}/frontiers")
    return FrontierReader(region, frontier_offset(BrokerLine.DURABLE_WAITING)).load()


@pytest.mark.parametrize("together", [1, 3])
def test_a_durable_ack_waits_for_enough_disks(world: DiskWorld, together: int) -> None:
    """One line of the required two is not enough; ack=1 of the same topic does not wait."""
    range_ = world.topic()
    first, second, _ = world.of(range_)
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(together):
        client.batch(opened, sequence, payload(sequence), flags=WANT_DURABLE)
    client.batch(opened, together, payload(together))
    world.run(3, client)
    assert outcomes(client) == [(together, Outcome.ORDERED)]
    assert waiting_line(world) == together
    first.copy(range_, together + 1)
    world.run(3, client)
    assert len(client.acks) == 1
    second.copy(range_, together + 1)
    world.run(3, client)
    assert sorted(outcomes(client)) == [(s, Outcome.ORDERED) for s in range(together + 1)]
    assert waiting_line(world) == 0


def test_a_broker_announces_that_it_waits_before_the_batch_can_be_ordered(world: DiskWorld) -> None:
    """The result alone wakes no process, so even the fastest replica that syncs the batch has to see it announced."""
    world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    client.batch(opened, 0, payload(0), flags=WANT_DURABLE)
    assert waiting_line(world) == 1
    client.batch(opened, 1, payload(1))
    assert waiting_line(world) == 1


def test_the_injected_bug_of_acking_before_durable_is_detected(world: DiskWorld) -> None:
    """With the rule switched off the ack comes too early: the test above would fail."""
    world.topic()
    client = Client(world.brokers[0])
    with injected("ack-before-durable"):
        world.publish(client, world.open(client), 0, 1, flags=WANT_DURABLE)
    assert outcomes(client) == [(0, Outcome.ORDERED)]


def test_lines_of_a_closing_or_an_old_range_do_not_count(world: DiskWorld) -> None:
    """Once the sequencer publishes "closing", later lines may be above the end at which it seals."""
    old = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    world.publish(client, opened, 0, 2, flags=WANT_DURABLE)
    world.hand.word(old.lane, old.number, closing=True)
    for replica in world.of(old):
        replica.say(old, 2)
    world.run(3, client)
    assert client.acks == []

    refs = [replica.member.ref for replica in world.replicas]
    new = world.directory.ranges.seal_and_open(old.lane, old.number, 1, 2, refs, world.hand.epoch)
    assert new is not None
    world.hand.word(new.lane, new.number)
    world.run(3, client)
    assert outcomes(client) == [(0, Outcome.ORDERED)]
    for replica in world.of(old):
        replica.say(old, 9)
    world.run(3, client)
    assert len(client.acks) == 1
    for replica in world.of(new)[:2]:
        replica.say(new, 2)
    world.run(3, client)
    assert outcomes(client) == [(0, Outcome.ORDERED), (1, Outcome.ORDERED)]


def test_nothing_is_counted_once_a_later_epoch_is_open(world: DiskWorld) -> None:
    """The next leader may seal below the current lines."""
    range_ = world.topic()
    client = Client(world.brokers[0])
    world.publish(client, world.open(client), 0, 1, flags=WANT_DURABLE)
    world.hand._table.open(world.directory.elections.next_epoch())
    for replica in world.of(range_):
        replica.say(range_, 1)
    world.run(3, client)
    assert client.acks == []


def test_duplicates_wait_like_the_first_copy_and_refusals_do_not(world: DiskWorld) -> None:
    """DUP_OF waits for its index. DUP, whose index is unknown, waits for everything ordered when it was answered."""
    range_ = world.topic()
    first, second, _ = world.of(range_)
    client = Client(world.brokers[0])
    opened = world.open(client)
    world.publish(client, opened, 0, 3)
    world.hand.outcomes = {
        10: (Outcome.DUP_OF, 1), 11: (Outcome.DUP, NO_INDEX), 12: (Outcome.FENCED, NO_INDEX),
        13: (Outcome.CONFLICT, NO_INDEX),
    }  # fmt: skip
    client.acks.clear()
    for sequence in world.hand.outcomes:
        client.batch(opened, sequence, payload(sequence), flags=WANT_DURABLE)
        world.run(1)
    world.run(3, client)
    assert outcomes(client) == [(12, Outcome.FENCED), (13, Outcome.CONFLICT)]
    for replica in (first, second):
        replica.copy(range_, 2)
    world.run(3, client)
    assert outcomes(client)[2:] == [(10, Outcome.DUP_OF)]
    for replica in (first, second):
        replica.copy(range_, 3)
    world.run(3, client)
    assert outcomes(client)[3:] == [(11, Outcome.DUP)]


def test_a_payload_stays_in_memory_until_it_is_durable(world: DiskWorld) -> None:
    """However much follows it: a chunk that holds records that are not durable is never reused."""
    range_ = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    world.publish(client, opened, 0, 60, size=2_000)
    stored = [sequence for sequence, outcome in outcomes(client) if outcome == Outcome.ORDERED]
    assert 10 < len(stored) < 40
    for replica in world.of(range_)[:2]:
        replica.copy(range_, len(stored))
    world.run(3, client)
    assert world.brokers[0].awaiting.kept_chunks == 0
    assert not world.brokers[0].ingest.log._held


def test_a_possible_first_copy_is_kept_although_it_is_called_a_duplicate(world: DiskWorld) -> None:
    """A sequencer that takes over may call a batch a duplicate that its predecessor ordered without answering."""
    range_ = world.topic()
    client, other = (Client(broker) for broker in world.brokers)
    opened = world.open(client)
    world.publish(client, opened, 0, 3)
    world.hand.outcomes = {10: (Outcome.DUP_OF, 1), 11: (Outcome.DUP, NO_INDEX), 12: (Outcome.CONFLICT, NO_INDEX)}
    for sequence in world.hand.outcomes:
        other.batch(opened, sequence, payload(sequence))
        world.run(1)
    held = world.brokers[1].awaiting.of(range_.lane)
    for stop, kept in ((1, [1, 2]), (2, [2]), (3, [])):
        for replica in world.of(range_)[:2]:
            replica.copy(range_, stop)
        world.run(2)
        assert sorted(index for index, _ in held._kept) == kept
    assert not held


def test_a_topic_whose_replicas_are_dead_leaves_memory_for_the_others(world: DiskWorld) -> None:
    """Its batches are refused once it fills its share of the log; its publishers get no more credit, others do."""
    world.topic("dead")
    world.topic("memory", replicas=0, durable_on=0)
    stuck, free = Client(world.brokers[0]), Client(world.brokers[0])
    into_dead, into_memory = world.open(stuck, "dead"), world.open(free, "memory")
    for sequence in range(60):
        if stuck.peer.credit.granted - stuck.peer.credit.received < 3_000:
            break
        stuck.batch(into_dead, sequence, payload(sequence, 2_000))
        world.run(1, stuck)
    granted = stuck.peer.credit.granted
    for sequence in range(200):
        free.batch(into_memory, sequence, payload(sequence, 2_000))
        world.run(1, free)
    world.run(3, stuck, free)
    assert outcomes(free) == [(sequence, Outcome.ORDERED) for sequence in range(200)]
    assert stuck.peer.credit.granted == granted
    assert world.brokers[0].awaiting.kept_chunks <= 0.625 * world.brokers[0].ingest.log.chunks
    assert not world.brokers[0].full


def test_a_client_that_also_publishes_to_a_healthy_topic_gets_credit_for_it(world: DiskWorld) -> None:
    """One connection carries all topics of a client: batches of the dead one are refused, the others go through."""
    world.topic("dead")
    world.topic("memory", replicas=0, durable_on=0)
    client = Client(world.brokers[0])
    into_dead, into_memory = world.open(client, "dead"), world.open(client, "memory")
    for sequence in range(100):
        client.batch(into_dead, sequence, payload(sequence, 2_000))
        client.batch(into_memory, sequence, payload(sequence, 2_000))
        world.run(1, client)
    world.run(3, client)
    healthy = [Outcome(int(ack["outcome"])) for ack in client.acks if int(ack["lane"]) == into_memory.lane]
    assert healthy == [Outcome.ORDERED] * 100
    assert outcomes(client).count((99, Outcome.BACKPRESSURE)) == 1


def test_credit_comes_back_when_disks_catch_up(world: DiskWorld) -> None:
    """A publisher to a lane that lagged may send again, without asking."""
    range_ = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    sequence = 0
    while client.peer.credit.granted - client.peer.credit.received >= 3_000 and sequence < 60:
        client.batch(opened, sequence, payload(sequence, 2_000))
        world.run(1, client)
        sequence += 1
    granted = client.peer.credit.granted
    ordered = sum(outcome == Outcome.ORDERED for _, outcome in outcomes(client))
    for replica in world.of(range_)[:2]:
        replica.copy(range_, ordered)
    world.run(3, client)
    assert client.peer.credit.granted > granted


def test_no_wait_is_kept_for_a_client_that_is_gone(world: DiskWorld) -> None:
    """Its payloads still become durable."""
    range_ = world.topic()
    client = Client(world.brokers[0])
    world.publish(client, world.open(client), 0, 2, flags=WANT_DURABLE)
    client.connection.closed()
    world.run(2)
    assert world.brokers[0].awaiting.waiting == 0
    assert waiting_line(world) == 0
    for replica in world.of(range_):
        replica.copy(range_, 2)
    world.run(2)
    assert world.brokers[0].awaiting.kept_chunks == 0


def test_a_deleted_topic_releases_everything(world: DiskWorld) -> None:
    """Waiting acks are answered, retained payloads are freed."""
    world.topic()
    client = Client(world.brokers[0])
    world.publish(client, world.open(client), 0, 2, flags=WANT_DURABLE)
    world.directory.topics.delete("t")
    world.run(3, client)
    assert outcomes(client) == [(0, Outcome.UNKNOWN_TOPIC), (1, Outcome.UNKNOWN_TOPIC)]
    assert world.brokers[0].awaiting.kept_chunks == 0


def test_a_durable_ack_of_a_topic_without_replicas_is_an_error(world: DiskWorld) -> None:
    """A topic without replicas never reports records as durable."""
    world.topic("memory", replicas=0, durable_on=0)
    client = Client(world.brokers[0])
    opened = world.open(client, "memory")
    client.batch(opened, 0, flags=WANT_DURABLE)
    client.pump()
    assert client.peer.closing
    assert [answer.code for answer in client.pushed if isinstance(answer, m.Failed)] == ["BadFrame"]


def test_the_newest_lost_gap_is_reported_when_a_session_opens(world: DiskWorld) -> None:
    """Together with the earlier gaps."""
    range_ = world.topic()
    first = world.lose_memory(range_, 5, 10)
    second = world.lose_memory(first, first.start + 7, first.start_seq + 14)
    ends = [(5, first.start), (first.start + 7, second.start)]
    world.run()
    opened = world.open(Client(world.brokers[0]))
    assert (opened.lost_from, opened.lost_to) == ends[1]
    assert [tuple(span) for span in opened.lost_before] == [ends[0]]


# --- orders 0 and 1 ---------------------------------------------------------------------------------------------------


def broker_lane(world: DiskWorld) -> Range:
    """The open range of the only lane of a broker."""
    [lane] = world.directory.lanes.all()
    range_ = world.directory.ranges.open_range(lane.lane)
    assert range_ is not None
    world.hand.word(lane.lane, range_.number)
    return range_


def test_a_broker_lane_is_acked_and_read_when_durable(world: DiskWorld) -> None:
    """ack=1 comes immediately, ack=2 when enough disks have it; durable readers wait likewise, replicas are woken."""
    world.topic("zero", order=0)
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    opened = writer.answers[writer.ask(m.OpenSession(topic="zero"))]
    assert isinstance(opened, m.Opened)
    writer.batch(opened, 0, payload(0))
    writer.batch(opened, 1, payload(1), flags=WANT_DURABLE)
    writer.pump()
    assert outcomes(writer) == [(0, Outcome.ORDERED)]
    range_ = broker_lane(world)
    assert {ref.region_prefix for ref in range_.replicas} <= set(world.bell.rings)
    [lane] = world.directory.lanes.all()
    request = reader.ask(m.Fetch(lane=lane.lane, max_bytes=1_000, wait_ms=20_000))
    world.run(3, writer, reader)
    assert request not in reader.fetched
    assert texts(world.fetch(reader, lane.lane, read="ordered")) == [payload(0), payload(1)]
    for replica in world.of(range_)[:2]:
        replica.copy(range_, 2, lane.region)
    world.run(3, writer, reader)
    assert outcomes(writer) == [(0, Outcome.ORDERED), (1, Outcome.ORDERED)]
    assert texts(reader.fetched[request]) == [payload(0), payload(1)]


def test_a_broker_without_a_state_in_the_epoch_acks_nothing_of_its_own_lane(world: DiskWorld) -> None:
    """It may have been paused since an earlier epoch closed it. Its writes are not served either."""
    world.topic("zero", order=0)
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    opened = writer.answers[writer.ask(m.OpenSession(topic="zero"))]
    assert isinstance(opened, m.Opened)
    writer.batch(opened, 0, payload(0))
    writer.pump()
    [lane] = world.directory.lanes.all()
    world.hand.count(world.brokers[0].member.handle, Standing.UNLISTED)
    writer.batch(opened, 1, payload(1))
    request = reader.ask(m.Fetch(lane=lane.lane, start=1, max_bytes=1_000, wait_ms=20_000, read="ordered"))
    world.run(3, writer, reader)
    assert outcomes(writer) == [(0, Outcome.ORDERED)]
    assert request not in reader.fetched

    world.hand.count(world.brokers[0].member.handle, Standing.OPEN)
    world.run(3, writer, reader)
    assert outcomes(writer) == [(0, Outcome.ORDERED), (1, Outcome.ORDERED)]


def test_a_reader_above_the_end_of_a_broker_lane_learns_where_it_ends(world: DiskWorld) -> None:
    """Records that were ordered but not durable were lost with the fabric; readers that had read them are informed.

    No durable reader was there.
    """
    world.topic("zero", order=0)
    writer = Client(world.brokers[0])
    opened = writer.answers[writer.ask(m.OpenSession(topic="zero"))]
    for sequence in range(4):
        writer.batch(opened, sequence, payload(sequence))
    writer.pump()
    range_ = broker_lane(world)
    [lane] = world.directory.lanes.all()
    for replica in world.of(range_):
        replica.copy(range_, 2, lane.region)
    fabric = world.memory.host("admin")
    for name in [name for name in fabric.names() if name.startswith("broker-0.1/")]:
        fabric.remove(name)
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    assert world.directory.ranges.seal_recovered(lane.lane, range_.number, 2, 2, [], world.hand.epoch) is not None
    world.run()
    reader = Client(world.brokers[1])
    end = Gap(GapKind.END_OF_LANE, 2, 2)
    for start in (2, 3, 4):
        answer = world.fetch(reader, lane.lane, start=start, read="ordered")
        assert (answer.gap, answer.next_index) == (end, 2)
    assert world.fetch(reader, lane.lane, start=2).gap == end
    beyond = reader.ask(m.Fetch(lane=lane.lane, start=4, max_bytes=1_000))
    world.run(3, reader)
    assert reader.answers[beyond].code == "FuturePosition"


def test_a_reader_learns_the_end_of_a_broker_lane_that_is_wholly_trimmed(world: DiskWorld) -> None:
    """Its ranges are gone from the store: nothing is counted by them any more."""
    world.topic("zero", order=0)
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    opened = writer.answers[writer.ask(m.OpenSession(topic="zero"))]
    for sequence in range(4):
        writer.batch(opened, sequence, payload(sequence))
    range_ = broker_lane(world)
    [lane] = world.directory.lanes.all()
    for replica in world.of(range_):
        replica.copy(range_, 4, lane.region)
    assert len(texts(world.fetch(reader, lane.lane))) == 4
    waiting = reader.ask(m.Fetch(lane=lane.lane, start=4, max_bytes=1_000, wait_ms=20_000))

    world.directory.members.mark_dead(lane.broker, lane.incarnation)
    assert world.directory.lanes.close([msgspec.structs.replace(lane, end=4, end_seq=4)], world.hand.epoch)
    assert world.directory.ranges.seal_clean(lane.lane, range_.number, 4, 4, world.hand.epoch)
    world.hand.words.set((lane.lane, 0), NO_RANGE)
    world.directory.topics.trim("zero", lane.lane, 4)
    world.brokers = world.brokers[1:]
    world.run(3, reader)

    assert reader.fetched[waiting].gap == Gap(GapKind.END_OF_LANE, 4, 4)
    tail = world.ask(reader, m.GetTail(lane=lane.lane))
    assert (tail.index, tail.start_index, tail.durable_index) == (4, 4, 4)
    assert world.fetch(reader, lane.lane, start=1).gap == Gap(GapKind.TRIMMED, 1, 4)


def test_losses_of_a_closed_broker_lane_are_a_gap_up_to_its_end(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end was recorded, then memory was lost before everything was durable. Readers wait until the loss is known.

    The files cannot answer this, and are not searched over and over.
    """
    world.topic("zero", order=0)
    writer = Client(world.brokers[0])
    opened = writer.answers[writer.ask(m.OpenSession(topic="zero"))]
    for sequence in range(4):
        writer.batch(opened, sequence, payload(sequence))
    writer.pump()
    range_ = broker_lane(world)
    [lane] = world.directory.lanes.all()
    for replica in world.of(range_):
        replica.copy(range_, 2, lane.region)
    assert world.directory.lanes.close([msgspec.structs.replace(lane, end=4, end_seq=4)], world.hand.epoch)
    fabric = world.memory.host("admin")
    for name in [name for name in fabric.names() if name.startswith(("broker-0.1/", "replica-"))]:
        fabric.remove(name)
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    reader = Client(world.brokers[1])
    fates = world.ask(reader, m.GetLanes(lane=lane.topic))
    assert (fates.unsure, fates.lanes[0].end) == ([lane.lane], 4), "publishers wait, too"
    asked: list[m.Fetch] = []
    monkeypatch.setattr(world.brokers[1].readers.disks, "fetch", lambda _connection, read, *_: asked.append(read.ask))
    waiting = [
        reader.ask(m.Fetch(lane=lane.lane, start=2, max_bytes=1_000, read=read, wait_ms=20_000))
        for read in ("ordered", "durable")
    ]
    earliest = reader.ask(m.Fetch(lane=lane.lane, by="earliest", max_bytes=1_000, wait_ms=20_000))
    world.run(3, reader)
    assert not any(request in reader.fetched or request in reader.answers for request in [*waiting, earliest])
    assert world.directory.ranges.seal_recovered(lane.lane, range_.number, 2, 2, [], world.hand.epoch) is not None
    fates = world.ask(reader, m.GetLanes(lane=lane.topic))
    assert (fates.unsure, fates.lanes[0].end, fates.lanes[0].kept) == ([], 4, 2)
    world.run(3, reader)
    for request in waiting:
        assert (reader.fetched[request].gap, reader.fetched[request].next_index) == (Gap(GapKind.LOST, 2, 4), 4)
    assert [ask.by for ask in asked] == ["earliest"]
    monkeypatch.undo()
    assert texts(world.fetch(reader, lane.lane, start=0)) == [payload(0), payload(1)]
    assert world.fetch(reader, lane.lane, start=3, read="ordered").gap == Gap(GapKind.LOST, 2, 4)
    assert world.fetch(reader, lane.lane, start=4).gap == Gap(GapKind.END_OF_LANE, 4, 4)
    assert world.fetch(reader, lane.lane, by="time", start=1 << 60, wait_ms=20_000).gap == Gap(GapKind.LOST, 2, 4)


def test_slots_of_a_broker_lane_are_reused_only_when_durable(world: DiskWorld) -> None:
    """With its ring full of entries that are not durable, batches are refused; nothing is overwritten."""
    world.topic("zero", order=0)
    client = Client(world.brokers[0])
    opened = client.answers[client.ask(m.OpenSession(topic="zero"))]
    assert isinstance(opened, m.Opened)
    for sequence in range(130):
        client.batch(opened, sequence, b"%d" % sequence)
        world.run(1, client)
    taken = sum(outcome == Outcome.ORDERED for _, outcome in outcomes(client))
    assert taken < 128
    assert {outcome for _, outcome in outcomes(client)[taken:]} == {Outcome.BACKPRESSURE}
    range_ = broker_lane(world)
    [lane] = world.directory.lanes.all()
    for replica in world.of(range_)[:2]:
        replica.copy(range_, taken, lane.region)
    world.run(3)
    client.acks.clear()
    client.batch(opened, 500, b"continues")
    world.run(1, client)
    assert outcomes(client) == [(500, Outcome.ORDERED)]


def test_ranges_are_looked_up_again_when_a_newer_one_decides() -> None:
    """Otherwise durable records of the new range would seem to be in the previous one, beyond its end (seed 488)."""
    refs = [ReplicaRef(replica=0, incarnation=1, disk="d")]
    first = Range(lane=0, number=1, start=0, start_seq=0, replicas=refs, durable_on=1)
    ranges = [first]

    class Store:
        """Exactly the requested bytes."""

        def all(self, lane: int) -> list[Range]:
            return [range_ for range_ in ranges if range_.lane == lane]

        def get(self, lane: int, number: int) -> Range | None:
            return next((range_ for range_ in self.all(lane) if range_.number == number), None)

    frontiers = DurableFrontiers(None, None, SimpleNamespace(ranges=Store()))  # type: ignore[arg-type]
    assert frontiers.chain(0).owner(20) == first
    ranges[:] = [
        msgspec.structs.replace(first, end=10, end_seq=10),
        Range(lane=0, number=2, start=100, start_seq=100, replicas=refs, durable_on=1),
    ]
    assert frontiers._range_of(0, 2) == ranges[1]
    assert frontiers.chain(0).owner(20) is None
    assert frontiers.chain(0).lost == [(10, 100)]


@pytest.mark.parametrize("order", [0, 1])
def test_a_broker_announces_that_its_own_lanes_wait(world: DiskWorld, order: int) -> None:
    """No sequencer orders its own lane: the replica that it wakes must find the announcement immediately."""
    world.directory.topics.create("own", order=order, replicas=3, durable_on=2)
    world.run(3)
    client = Client(world.brokers[0])
    opened = world.open(client, "own")
    client.batch(opened, 0, payload(0), flags=WANT_DURABLE)
    assert waiting_line(world) >= 1


def silence(patch: pytest.MonkeyPatch, broker: Broker, lane: int) -> None:
    """Make the store fail for a lane's ranges, and drop the cached ones."""
    known = broker._view.context.directory.ranges.all

    def ranges(of: int) -> list[Range]:
        if of == lane:
            raise Backpressure("the store does not answer")
        return known(of)

    patch.setattr(broker._view.context.directory.ranges, "all", ranges)
    broker.durable.changed()


def test_a_store_that_does_not_answer_one_client_keeps_no_acks_from_others(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acks that waited for a new leader are still there once the ranges of their lane can be read."""
    broker, lanes = world.brokers[0], []
    first, second = Client(broker), Client(broker)
    for client, topic in ((first, "one"), (second, "two")):
        world.topic(topic, order=0)
        lanes.append(world.open(client, topic))
        client.batch(lanes[-1], 0, payload(0))
        client.pump()
        assert outcomes(client) == [(0, Outcome.ORDERED)]
    with monkeypatch.context() as patch:
        patch.setattr(broker.epoch, "still_open", lambda: False)
        first.batch(lanes[0], 1, payload(1), flags=WANT_DURABLE)
        first.batch(lanes[0], 2, payload(2))
    with monkeypatch.context() as patch:
        silence(patch, broker, int(first.acks[0]["extra"]))
        with pytest.raises(Backpressure):
            second.batch(lanes[1], 1, payload(1))
    second.connection.closed()
    world.run(1, first)
    assert outcomes(first) == [(0, Outcome.ORDERED), (2, Outcome.ORDERED)]
    assert broker.awaiting.waiting == 1


def test_a_batch_received_while_the_store_fails_leaves_nothing_behind(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends, as it is unknown whether there is a slot for it; its memory is free again."""
    world.topic("zero", order=0)
    client, broker = Client(world.brokers[0]), world.brokers[0]
    opened = world.open(client, "zero")
    client.batch(opened, 0, payload(0))
    client.pump()
    with monkeypatch.context() as patch:
        silence(patch, broker, int(client.acks[0]["extra"]))
        client.batch(opened, 1, payload(1))
    assert client.peer.closing
    assert (broker.ingest.arriving, broker.unsettled) == (0, 0)


def test_publishers_without_credit_learn_which_replica_is_in_trouble(world: DiskWorld) -> None:
    """While a lane retains much of the memory, publishers are still informed about its disk trouble."""
    range_ = world.topic("stuck")
    stuck = Client(world.brokers[0])
    opened, sequence = world.open(stuck, "stuck"), 0
    while stuck.peer.credit.granted - stuck.peer.credit.received >= 3_000:
        stuck.batch(opened, sequence, payload(sequence, 2_000), flags=WANT_DURABLE)
        world.run(1, stuck)
        sequence += 1
    world.of(range_)[1].lines.health.restart(int(Trouble.DISK_FULL))
    for _ in range(3):
        stuck.full = False
        world.clock.us += 11_000_000
        world.run(3, stuck)
        assert stuck.full
        assert stuck.why_full == (opened.lane, range_.replicas[1].replica, int(Trouble.DISK_FULL))


def test_publishers_of_a_stalled_lane_learn_which_replica_is_in_trouble(world: DiskWorld) -> None:
    """The report repeats as long as the stall lasts. Publishers of other topics get none, and it stops on recovery."""
    range_ = world.topic("stuck")
    world.topic("memory", replicas=0, durable_on=0)
    stuck, free = Client(world.brokers[0]), Client(world.brokers[0])
    opened, _ = world.open(stuck, "stuck"), world.open(free, "memory")
    stuck.batch(opened, 0, payload(0), flags=WANT_DURABLE)
    world.run(3, stuck, free)
    assert not stuck.full
    world.of(range_)[1].lines.health.restart(int(Trouble.DISK_FULL))
    for _ in range(2):
        stuck.full = False
        world.clock.us += 11_000_000
        world.run(1, stuck, free)
        assert stuck.full
        assert stuck.why_full == (opened.lane, range_.replicas[1].replica, int(Trouble.DISK_FULL))
        assert not free.full
    stuck.full = False
    for replica in world.of(range_)[:2]:
        replica.copy(range_, 2)
    world.run(3, stuck, free)
    world.clock.us += 11_000_000
    world.run(3, stuck, free)
    assert outcomes(stuck) == [(0, Outcome.ORDERED)]
    assert not stuck.full
