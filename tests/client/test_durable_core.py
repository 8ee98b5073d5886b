"""Cores and durability: ack=2 waits for the disk, and after a restart of everything, losses are reported once."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.session import AckedBatches, PublisherSettings
from embarcadero.errors import BadFrame, DiskFailed, FuturePosition, RecordsLost, SessionFenced, fresh
from embarcadero.limits import ORDER_SLOTS
from embarcadero.types import Gap, GapKind, Order, Position, TopicLane
from embarcadero.wire import messages as m
from embarcadero.wire.codec import WANT_DURABLE
from tests.client.fake_cluster import LANE, FakeCluster, World, subscriber_core

RESEND_US = 3_000_000
DELIVERY_US = 60_000_000


def publishing(order: int = 5, wires: int = 2, **changes: Any) -> World:
    """A publisher into a topic with replicas."""
    options: dict[str, Any] = {
        "topic": "t", "window_bytes": 1 << 20, "resend_after_us": RESEND_US, "delivery_timeout_us": DELIVERY_US,
        "order": order, "replicated": True,
    }  # fmt: skip
    return World(PublisherCore(PublisherSettings(**(options | changes))), FakeCluster(order, replicas=1), wires)


def reading(cluster: FakeCluster, **changes: Any) -> World:
    return World(subscriber_core(silent_after_us=RESEND_US, **changes), cluster, 1)


def add(world: World, payload: bytes, count: int = 1) -> Any:
    batch = world.core.add(payload, count, 0, 0, world.now)
    world.collect()
    return batch


def start_anew(world: World, end: int | None = None) -> None:
    """Lose everything from `end` on; connect new brokers."""
    for number in list(world.wires):
        world.cut(number)
    world.cluster.start_anew(end)
    world.connect()
    world.connect()


def stored(world: World) -> list[bytes]:
    return [entry.payload for entry in world.cluster.log if not entry.lost]


# --- ack=2 ------------------------------------------------------------------------------------------------------------
def test_a_durable_batch_is_settled_when_it_is_durable_and_not_before() -> None:
    """Ordered is not enough: the ack comes with the disk, batch by batch."""
    world = publishing(durable=True)
    batches = [add(world, b"%d" % n) for n in range(3)]
    world.settle()
    assert len(world.cluster.log) == 3
    assert {header.flags for header, _ in world.cluster.frames} == {WANT_DURABLE}
    assert [batch.done for batch in batches] == [False] * 3
    world.cluster.make_durable(below=2)
    world.settle()
    assert [batch.done for batch in batches] == [True, True, False]
    assert batches[1].position == Position(LANE, 1, 1)
    world.cluster.make_durable()
    world.settle()
    assert batches[2].done


def test_the_window_holds_batches_until_durable_and_close_waits_for_them() -> None:
    """Back-pressure works as usual: unsettled batches take space."""
    world = publishing(durable=True, window_bytes=250)
    add(world, b"x" * 200)
    world.settle()
    assert not world.core.has_room(100)
    world.core.close(world.now)
    world.collect()
    world.settle()
    assert not world.core.closed
    world.cluster.make_durable()
    world.settle()
    assert world.core.closed
    assert world.core.failed is None


def test_a_slow_disk_is_not_a_silent_broker() -> None:
    """While durability takes time the broker answers pings: no link is given up, nothing is sent twice."""
    world = publishing(durable=True, wires=1)
    batch = add(world, b"x")
    world.settle()
    for _ in range(10):
        world.advance(RESEND_US // 2)
        world.settle()
    assert list(world.wires) == [1]
    assert len(world.cluster.frames) == 1
    world.run(lambda: batch.done)
    assert batch.error is not None, "after the delivery timeout it ends all the same"
    assert "no outcome" in str(batch.error)


def test_without_durable_the_flag_is_not_set() -> None:
    """ack=1 is answered when ordered, in a topic with replicas as well."""
    world = publishing()
    batch = add(world, b"x")
    world.settle()
    assert batch.done
    assert [header.flags for header, _ in world.cluster.frames] == [0]


# --- restarts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [2, 5])
def test_acked_and_lost_records_are_reported_once_with_their_positions(order: int) -> None:
    """Acked with ack=1, not durable, lost with the fabric: the publisher names the records, and continues."""
    world = publishing(order)
    batches = [add(world, b"%d" % n, count=n + 1) for n in range(6)]
    world.settle()
    world.cluster.make_durable(below=4)
    start_anew(world)
    world.settle()
    lost = world.core.take_losses()
    assert isinstance(lost, RecordsLost)
    assert lost.positions == tuple(batch.position for batch in batches[4:])
    assert lost.counts == (5, 6)
    assert "11 records" in str(lost)
    assert "ack=2" in str(lost)
    assert world.core.take_losses() is None
    after = add(world, b"after")
    world.settle()
    assert after.position is not None
    assert after.position.index >= world.cluster.lost[0][1], "positions are never used again"
    assert stored(world) == [b"0", b"1", b"2", b"3", b"after"]
    assert world.core.take_losses() is None


@pytest.mark.parametrize("durable", range(5))
def test_a_lost_batch_between_other_acked_batches_leaves_no_gap(durable: int) -> None:
    """Acks come through two brokers.

    A session of order 5 would wait for a batch that is never sent again, until it is fenced.
    """
    world = publishing()
    world.settle()
    batches = [add(world, b"%d" % n) for n in range(4)]
    one, other = (batches[0].link, batches[1].link)
    assert one != other
    for number in (one, other):
        while world.wires[number].outward:
            world.outward(number)
    world.inward(other)
    assert [batch.done for batch in batches] == [False, True, False, True]
    world.cluster.make_durable(below=durable)
    start_anew(world)
    last = add(world, b"last")
    world.settle()
    assert last.position is not None
    assert stored(world) == [b"%d" % n for n in range(4) if n < durable or n % 2 == 0] + [b"last"]
    told = world.core.take_losses()
    assert (told.positions if told else ()) == tuple(batches[n].position for n in (1, 3) if n >= durable)


@pytest.mark.parametrize("order", [2, 5])
def test_unacked_batches_are_sent_again_and_stored_once(order: int) -> None:
    """Acks that were lost in flight: DUP_OF settles batches on disk, the others get a new position."""
    world = publishing(order, wires=1)
    world.settle()
    batches = [add(world, b"%d" % n) for n in range(6)]
    while world.wires[1].outward:
        world.outward(1)  # all are ordered, and no ack comes back
    world.cluster.make_durable(below=3)
    start_anew(world)
    world.settle()
    assert all(batch.done and batch.error is None for batch in batches)
    assert [batch.position.index for batch in batches[:3]] == [0, 1, 2]
    assert stored(world) == [b"%d" % n for n in range(6)]
    assert world.core.take_losses() is None


def test_nothing_is_sent_to_a_new_cluster_before_the_session_is_open_there() -> None:
    """The old handle could belong to any session by now."""
    world = publishing()
    add(world, b"0")
    world.settle()
    world.cluster.make_durable()
    world.cluster.frames.clear()
    start_anew(world)
    add(world, b"1")
    world.settle()
    assert [header.session for header, _ in world.cluster.frames] == [1]
    assert [header.session_seq for header, _ in world.cluster.frames] == [1]


def test_an_idle_publisher_learns_of_a_loss_before_it_is_closed() -> None:
    """Nothing is unsettled, so nothing would be sent: the session is opened again nevertheless."""
    world = publishing()
    add(world, b"0")
    world.settle()
    for number in list(world.wires):
        world.cut(number)
    world.core.close(world.now)
    world.collect()
    world.cluster.start_anew()
    world.connect()
    world.settle()
    assert world.core.closed
    assert world.core.failed is None
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (Position(LANE, 0, 0),)


def test_losing_an_acked_record_that_should_be_durable_is_another_message() -> None:
    """It never happens; if it does, the message does not call it expected."""
    world = publishing(durable=True)
    world.cluster.at_once = True
    add(world, b"0")
    world.settle()
    start_anew(world, end=0)
    world.settle()
    lost = world.core.take_losses()
    assert lost is not None
    assert "promise is broken" in str(lost)
    assert "ack=2" in lost.message


def test_two_consecutive_restarts_are_reported_together() -> None:
    """Losses of an earlier restart that could not be reported meanwhile are in `lost_before`."""
    world = publishing()
    first = [add(world, b"%d" % n) for n in range(2)]
    world.settle()
    for number in list(world.wires):
        world.cut(number)
    world.cluster.start_anew(end=1)
    world.cluster.start_anew()
    world.connect()
    world.settle()
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (first[1].position,)


def test_an_unclaimed_loss_grows_with_the_next() -> None:
    """Two reports become one."""
    world = publishing()
    positions = []
    for n in range(2):
        positions.append(add(world, b"%d" % n))
        world.settle()
        start_anew(world, end=len(world.cluster.log) - 1)
        world.settle()
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == tuple(batch.position for batch in positions)
    again = pickle.loads(pickle.dumps(fresh(lost)))
    assert (again.positions, again.counts, str(again)) == (lost.positions, lost.counts, str(lost))


def test_connections_to_a_cluster_that_is_gone_are_given_up() -> None:
    """A host that vanished closes none of them: the client would never connect to that broker again."""
    world = publishing()
    add(world, b"a")
    world.settle()
    silent = list(world.wires)
    world.cluster.start_anew(None)
    world.connect()
    assert not set(silent) & set(world.wires)
    world.core.on_connected(Link(99, world.now, world.cluster.generation - 1), world.now)
    assert world.core.take_abandoned() == [99]
    add(world, b"b")
    world.settle()
    assert b"b" in stored(world)


def test_a_clean_restart_loses_nothing() -> None:
    """All records were durable: the session continues, without a report."""
    world = publishing()
    for n in range(3):
        add(world, b"%d" % n)
    world.settle()
    world.cluster.make_durable()
    start_anew(world)
    add(world, b"3")
    world.settle()
    assert world.core.take_losses() is None
    assert stored(world) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("order", [2, 5])
def test_a_session_that_was_itself_lost_is_replaced_by_a_new_one(order: int) -> None:
    """Nothing of it is in the log, so everything may start again; numbers of batches, too."""
    world = publishing(order)
    first = add(world, b"0")
    world.settle()
    for number in list(world.wires):
        world.cut(number)
    waiting = add(world, b"1")
    world.cluster.start_anew(end=0)
    world.connect()
    world.settle()
    assert world.core.failed is None
    assert waiting.position is not None
    assert stored(world) == [b"1"]
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (first.position,)
    assert world.core.first_sequence is not None
    assert world.core.first_sequence + 2 == 1, "the next batch is the second of its session"


def test_a_lost_continued_session_is_looked_up_under_its_predecessor() -> None:
    """Its batches are there, and must not be stored twice."""
    world = publishing()
    for n in range(2):
        add(world, b"%d" % n)
    world.settle()
    world.cluster.make_durable()
    world.cluster.fence_all()
    add(world, b"2")
    world.settle()  # it is the second session that stored this one
    assert len(world.cluster.sessions) == 2
    start_anew(world)
    batch = add(world, b"3")
    world.settle()
    assert [q.resume for w in world.wires.values() for q in w.far.questions if isinstance(q, m.OpenSession)] == [1, 0]
    assert batch.position is not None
    assert stored(world) == [b"0", b"1", b"3"]
    lost = world.core.take_losses()
    assert lost is not None
    assert [position.index for position in lost.positions] == [2]


def test_a_session_that_is_gone_for_other_reasons_is_not_replaced() -> None:
    """A new session would not know the stored batches: the publisher ends, and gives the new session back."""
    world = publishing()
    add(world, b"0")
    world.settle()
    world.cluster.make_durable()
    world.cluster.sessions.clear()
    late = add(world, b"1")
    world.settle()
    assert isinstance(world.core.failed, SessionFenced)
    assert late.done
    assert late.error is not None
    assert stored(world) == [b"0"]
    assert not world.cluster.sessions


def test_a_handle_that_now_belongs_to_another_session_is_not_taken() -> None:
    """The session was lost, and the next session opened got its handle: no batch of this publisher may go there."""
    world = publishing(2)
    mine = add(world, b"mine 0")
    world.settle()
    for number in list(world.wires):
        world.cut(number)
    world.cluster.start_anew(end=0)
    other = World(PublisherCore(PublisherSettings(
        topic="t", window_bytes=1 << 20, resend_after_us=RESEND_US, delivery_timeout_us=DELIVERY_US, replicated=True,
    )), world.cluster, 1)  # fmt: skip
    theirs = [add(other, b"theirs 0")]
    other.settle()
    assert other.core.session == world.core.session
    more = add(world, b"mine 1")
    world.connect()
    world.settle()
    theirs.append(add(other, b"theirs 1"))
    other.settle()
    world.settle()
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (mine.position,)
    assert all(batch.position is not None for batch in [more, *theirs])
    assert stored(world) == [b"theirs 0", b"mine 1", b"theirs 1"]
    assert other.core.take_losses() is None


@pytest.mark.parametrize("taken", [False, True])
def test_a_lost_named_session_is_not_taken_from_its_next_holder(taken: bool) -> None:
    """The name may belong to another publisher by now. Batch 0 is lost, so batch 1 can't be stored after it either."""
    world = publishing(session_name="job")
    add(world, b"0")
    world.settle()
    for number in list(world.wires):
        world.cut(number)
    world.cluster.start_anew(end=0)
    world.cluster.next_handle = 5  # a handle is not used again, though its session is lost
    if taken:
        other = world.cluster.open(m.OpenSession(topic="t", name="job"))
        assert isinstance(other, m.Opened)
    batch = add(world, b"1")
    world.connect()
    world.settle()
    assert isinstance(world.core.failed, SessionFenced)
    assert ("continues at 0" in str(world.core.failed)) is not taken
    assert stored(world) == []
    assert isinstance(batch.error, SessionFenced)
    lost = world.core.take_losses()
    assert lost is not None
    assert [position.index for position in lost.positions] == [0]
    assert len(world.cluster.sessions) == 1
    assert not any(session.fenced for session in world.cluster.sessions.values())


def test_sessions_of_a_recreated_topic_are_not_touched() -> None:
    """Handles start again there, and its sessions may have the same names: none belongs to this publisher."""
    world = publishing(session_name="job")
    add(world, b"0")
    world.settle()
    world.cluster.make_durable()
    lane = world.cluster.topics["t"].lane + 1
    world.cluster.topics["t"] = msgspec.structs.replace(world.cluster.topics["t"], lane=lane)
    for number in list(world.wires):
        world.cut(number)
    world.cluster.start_anew(None)
    world.cluster.sessions[0].fenced = False  # as if another publisher opened it there
    batch = add(world, b"1")
    world.connect()
    world.settle()
    assert isinstance(batch.error, SessionFenced)
    assert [session.fenced for session in world.cluster.sessions.values()] == [False]


def test_a_lost_named_session_is_opened_over_the_previous_holder_of_the_name() -> None:
    """The previous session is still in the log, and its stored batches still count."""
    cluster = FakeCluster(5, replicas=1)
    before = cluster.open(m.OpenSession(topic="t", name="job"))
    assert isinstance(before, m.Opened)
    world = publishing(session_name="job")
    world.cluster = cluster
    for number in list(world.wires):
        world.cut(number)
    world.connect()
    world.settle()
    assert world.core.session == 1
    for number in list(world.wires):
        world.cut(number)
    cluster.sessions[0].opened_at = -1  # it was opened long before the lost batches
    cluster.start_anew(end=0)
    batch = add(world, b"1")
    world.connect()
    world.settle()
    assert world.core.failed is None
    assert batch.position is not None


def test_links_of_the_old_cluster_are_not_used_any_more() -> None:
    """One of them may not have noticed yet."""
    world = publishing(wires=1)
    add(world, b"0")
    world.settle()
    world.cluster.make_durable()
    old = next(iter(world.wires))
    world.cluster.start_anew()
    world.connect()
    world.settle()
    add(world, b"1")
    assert old not in world.wires
    world.settle()
    assert stored(world) == [b"0", b"1"]


STEPS = (
    "add", "add", "add", "add", "settle", "settle", "durable", "outward", "inward", "cut", "fence", "connect", "anew",
    "time",
)  # fmt: skip


def act(world: World, batches: list[Any], action: str, value: int) -> None:
    cluster, wires = world.cluster, list(world.wires)
    number = wires[value % len(wires)] if wires else 0
    match action:
        case "add" if world.core.has_room(10) and world.core.failed is None:
            batches.append(add(world, b"%d" % len(batches)))
        case "settle":
            world.settle()
        case "durable":
            cluster.make_durable(max(cluster.durable, len(cluster.log) - value))
        case "outward" | "inward":
            getattr(world, action)(number)
        case "cut" if wires:
            world.cut(number)
        case "fence":
            cluster.fence_all()
        case "connect" if len(wires) < 3:
            world.connect()
        case "anew":
            for each in wires:
                world.cut(each)
            cluster.start_anew()
        case "time":
            world.advance(value * RESEND_US // 6)


@settings(deadline=None, max_examples=250)
@given(seed=st.integers(0, 1 << 32), order=st.sampled_from([2, 5]), durable=st.booleans())
def test_every_loss_is_reported_and_nothing_else(seed: int, order: int, durable: bool) -> None:
    """Under cuts, fences and restarts: an acked batch is in the log at its position, or it was reported as lost.

    Nothing is stored twice; ack=2 is never among the lost; order 5 keeps the order of the surviving batches.
    """
    world = publishing(order, durable=durable, delivery_timeout_us=1 << 50)
    batches: list[Any] = []
    chance = Random(seed)
    for _ in range(chance.randrange(100)):
        act(world, batches, chance.choice(STEPS), chance.randrange(6))
    for number in list(world.wires):
        world.cut(number)
    world.connect()
    world.cluster.at_once = True
    world.cluster.make_durable()
    world.run(lambda: world.core.unsettled == 0 and world.core._state.usable)
    assert world.core.failed is None
    lost = world.core.take_losses()
    gone = set(lost.positions) if lost is not None else set()
    assert not (durable and gone)
    for batch in batches:
        assert batch.error is None
        entry = world.cluster.log[batch.position.index]
        assert (batch.position in gone) == entry.lost
        assert entry.lost or (entry.payload, entry.seq) == (batch.payload, batch.position.seq)
    there = stored(world)
    assert len(there) == len(set(there))
    if order == 5:
        assert there == sorted(there, key=int)


# --- orders 0 and 1 ---------------------------------------------------------------------------------------------------
def lane(number: int, **fields: Any) -> TopicLane:
    return TopicLane(lane=number, topic=LANE, broker=0, incarnation=number, handle=number, **fields)


@pytest.mark.parametrize("ends", [{"end": 2, "end_seq": 20}, {"kept": 2, "end": 9, "end_seq": 90}])
@pytest.mark.parametrize("order", [Order.NONE, Order.BROKER])
def test_lanes_that_end_below_an_acked_batch_lost_it(order: Order, ends: dict[str, int]) -> None:
    """The lane of a broker that died with the fabric ends at the recovered position; recovery may take a while.

    If a mirror had its exact end, the lane is kept up to the end of the disks.
    """
    world = publishing(order, wires=1)
    world.settle()
    for index in range(3):
        world.core._losses.remembered.add(40, index, 10 * index, 10)
    world.core._losses.remembered.add(41, 0, 0, 1)
    world.cluster.lanes = [lane(40), lane(41, end=1, end_seq=1)]
    start_anew(world)
    world.settle()
    assert world.core.take_losses() is None, "lane 40 is not recovered yet"
    world.cluster.lanes[0] = lane(40, **ends)
    world.run(lambda: not world.core._losses.doubts)
    lost = world.core.take_losses()
    assert lost is not None
    assert (lost.positions, lost.counts) == ((Position(40, 2, 20),), (10,))
    world.core.close(world.now)
    world.collect()
    world.settle()
    assert world.core.closed


def test_a_lane_that_was_closed_before_the_loss_is_requested_until_it_is_recovered() -> None:
    """Its end was reported long ago, and does not show how much of it was on disks when all memory was lost."""
    world = publishing(Order.NONE, wires=1)
    world.settle()
    world.core._losses.remembered.add(40, 3, 30, 10)
    world.cluster.lanes, world.cluster.unsure = [lane(40, end=5, end_seq=50)], [40]
    start_anew(world)
    world.settle()
    assert world.core._losses.doubts.lanes() == {40}
    world.cluster.lanes, world.cluster.unsure = [lane(40, end=5, end_seq=50, kept=2)], []
    world.run(lambda: not world.core._losses.doubts)
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (Position(40, 3, 30),)


def test_close_waits_for_the_ends_of_lanes() -> None:
    """Otherwise a loss would never be reported."""
    world = publishing(Order.NONE, wires=1)
    world.settle()
    world.core._losses.remembered.add(40, 0, 0, 1)
    world.cluster.lanes = [lane(40)]
    world.core.close(world.now)  # the broker dies before it answers
    start_anew(world)
    world.settle()
    assert not world.core.closed
    world.cluster.lanes = []  # the topic was deleted
    world.run(lambda: world.core.closed)
    assert world.core.take_losses() is None


def test_memory_of_acked_batches_is_bounded() -> None:
    """The newest are kept: as many as may be ordered and not durable."""
    acked = AckedBatches()
    total = 2 * ORDER_SLOTS
    for index in range(total):
        acked.add(1, index, index, 1)
    assert ORDER_SLOTS <= len(acked) <= ORDER_SLOTS * 5 // 4
    assert len(acked.take(1, [(total - ORDER_SLOTS, total)])) == ORDER_SLOTS
    assert len(acked) <= ORDER_SLOTS // 4
    acked.forget(1)
    assert acked.lanes() == set()


# --- reading ----------------------------------------------------------------------------------------------------------
def filled(durable: int = 3, records: int = 5) -> FakeCluster:
    cluster = FakeCluster(replicas=1)
    for n in range(records):
        cluster.put(b"%d" % n)
    cluster.make_durable(durable)
    return cluster


def drain(world: World) -> list[Any]:
    world.settle()
    taken = []
    while more := world.core.take_batches(100, world.now):
        taken += more
        world.collect()
        world.settle()
    return taken


def test_a_durable_reader_sees_durable_batches_and_an_ordered_one_all() -> None:
    """The frontier is the reader's choice; durable is the default."""
    cluster = filled()
    world, eager = reading(cluster), reading(cluster, read="ordered")
    assert [bytes(batch.payload) for batch in drain(world)] == [b"0", b"1", b"2"]
    assert [bytes(batch.payload) for batch in drain(eager)] == [b"0", b"1", b"2", b"3", b"4"]
    cluster.make_durable()
    assert [bytes(batch.payload) for batch in drain(world)] == [b"3", b"4"]


def test_readers_continue_after_a_lost_span() -> None:
    """A typed gap, then later records; a reader that had read a part of the lost span gets the whole gap, too."""
    cluster = filled()
    durable, eager = reading(cluster), reading(cluster, read="ordered")
    drain(durable)
    drain(eager)
    for world in (durable, eager):
        world.cut(1)
    cluster.start_anew()
    cluster.put(b"after")
    cluster.make_durable()
    start, stop = cluster.lost[0]
    assert start == 3
    for world in (durable, eager):
        world.connect()
        gap, after = drain(world)
        assert gap.gap == Gap(GapKind.LOST, start, stop)
        assert (gap.index, gap.count, gap.records()) == (start, 0, [])
        assert bytes(after.payload) == b"after"
        assert after.index == stop


def fetched(world: World, gap: Gap) -> None:
    """Answer the reader's Fetch with a gap."""
    wire = next(iter(world.wires.values()))
    request, _ = wire.far.parked.pop()
    wire.far._say(_gap_frame(request, gap))
    world.settle()


def _gap_frame(request: int, gap: Gap) -> bytes:
    from embarcadero.wire.codec import fetched_header

    return fetched_header(request=request, next_index=gap.stop, tail_index=gap.stop, count=0, length=0, gap=gap)


@pytest.mark.parametrize(
    ("read", "gap", "fine"),
    [
        ("ordered", Gap(GapKind.LOST, 2, 50), True),  # it reports that [2, 3), which was read, is lost as well
        ("ordered", Gap(GapKind.LOST, 1, 2), False),
        ("ordered", Gap(GapKind.TRIMMED, 2, 50), False),
        ("ordered", Gap(GapKind.END_OF_LANE, 2, 2), True),
        ("durable", Gap(GapKind.END_OF_LANE, 2, 2), False),
        ("durable", Gap(GapKind.LOST, 3, 50), True),
        ("durable", Gap(GapKind.LOST, 4, 50), True),  # between them is an entry without records
        ("durable", Gap(GapKind.TRIMMED, 4, 50), False),
    ],
)
def test_gaps_that_start_below_the_position_of_a_reader(read: str, gap: Gap, fine: bool) -> None:
    """Records that were read may be lost later if they were not durable.

    Any other gap is invalid and requested again.
    """
    world = reading(filled(records=3), read=read)
    drain(world)
    fetched(world, gap)
    if fine:
        assert [batch.gap for batch in world.core.take_batches(5, world.now)] == [gap]
        assert world.core.position == gap.stop
        assert world.core.ended == (gap.kind is GapKind.END_OF_LANE)
        return
    assert world.core.ready == 0
    fetched(world, gap)
    assert isinstance(world.core.failed, BadFrame)


def test_a_position_given_by_the_cluster_is_waited_for_and_a_callers_is_not() -> None:
    """While a lane is recovered its reported end may be too low; but a seek beyond the end is an error."""
    world = reading(filled(durable=5))
    drain(world)
    cluster, log = world.cluster, list(world.cluster.log)
    world.cut(1)
    del cluster.log[2:]
    cluster.durable = 2
    world.connect()
    world.settle()
    assert world.core.failed is None
    cluster.log[:] = log
    cluster.durable = 5
    cluster.put(b"more")
    cluster.make_durable()
    world.run(lambda: world.core.ready > 0)
    assert [bytes(batch.payload) for batch in drain(world)] == [b"more"]
    world.core.seek("index", 1_000, world.now)
    world.collect()
    world.settle()
    assert isinstance(world.core.failed, FuturePosition)


def test_a_failing_store_is_no_answer_about_the_fate_of_lanes() -> None:
    """Only a deleted topic is: otherwise a loss would never be reported."""
    world = publishing(Order.NONE, wires=1)
    world.settle()
    world.core._losses.remembered.add(40, 3, 30, 10)
    world.cluster.lanes = [lane(40, end=2, end_seq=20)]
    world.cluster.fails = DiskFailed("the store's disk fails", "look at it")
    start_anew(world)
    world.settle()
    assert world.core._losses.doubts.lanes() == {40}
    world.cluster.fails = None
    world.run(lambda: not world.core._losses.doubts)
    lost = world.core.take_losses()
    assert lost is not None
    assert lost.positions == (Position(40, 3, 30),)
