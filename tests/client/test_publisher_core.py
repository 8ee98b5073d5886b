"""The publisher's core against a cluster in memory: every batch ends once, nothing is lost, nothing is stored twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.session import PublisherSettings
from embarcadero.errors import (
    Backpressure,
    BadValue,
    Conflict,
    InvariantBroken,
    OutcomeUnknown,
    SessionFenced,
    TimedOut,
    UnknownSession,
    UnknownTopic,
    Unreachable,
)
from embarcadero.limits import SESSION_WINDOW
from embarcadero.types import NO_SESSION, Outcome, Position
from embarcadero.wire import messages as m
from embarcadero.wire.codec import ACK
from tests.client.fake_cluster import LANE, FakeCluster, FakeConnection, World

RESEND_US = 3_000_000
DELIVERY_US = 60_000_000


def make_core(**changes: object) -> PublisherCore:
    options: dict[str, object] = {
        "topic": "t", "window_bytes": 1 << 20, "resend_after_us": RESEND_US, "delivery_timeout_us": DELIVERY_US,
    }  # fmt: skip
    return PublisherCore(PublisherSettings(**(options | changes)))  # type: ignore[arg-type]


def make_world(order: int = 5, wires: int = 2, **changes: object) -> World:
    return World(make_core(**changes), FakeCluster(order), wires)


def add(world: World, payload: bytes, count: int = 1) -> object:
    batch = world.core.add(payload, count, 0, 0, world.now)
    world.collect()
    return batch


def test_batches_settle_with_their_positions_in_order() -> None:
    """Added batches are in the log once, in order, and every batch has its actual position."""
    world = make_world()
    batches = [add(world, b"payload %d" % n, count=n + 1) for n in range(10)]
    world.settle()
    assert [stored.payload for stored in world.cluster.log] == [b"payload %d" % n for n in range(10)]
    assert [b.position for b in batches] == [Position(LANE, n, n * (n + 1) // 2) for n in range(10)]
    assert world.core.take_settled() == batches
    assert world.core.unsettled == 0


def test_batches_go_round_robin_over_all_links() -> None:
    """Two links with equal credit get every other batch."""
    world = make_world()
    world.settle()
    for n in range(6):
        add(world, b"%d" % n)
    assert [len(wire.outward) for wire in world.wires.values()] == [6, 6]


def test_a_link_without_credit_is_skipped() -> None:
    """All batches go to the link that has credit, and none waits for the other one."""
    world = make_world(wires=1)
    poor = world.connect(credit=10)
    batches = [add(world, b"x" * 100) for _ in range(5)]
    world.settle()
    assert all(b.done for b in batches)
    assert world.wires[poor].far.received_bytes == 0


def test_sending_waits_for_credit_and_continues_with_it() -> None:
    """Not one byte is sent beyond the credit; the fake broker refuses to take more."""
    world = make_world(wires=0)
    number = world.connect(credit=2 * (64 + 100))
    batches = [add(world, b"x" * 100) for _ in range(5)]
    world.settle()
    assert [b.done for b in batches] == [True, True, False, False, False]
    world.wires[number].far.grant()
    world.settle()
    assert [b.done for b in batches] == [True, True, True, True, False]


def test_the_window_bounds_bytes_and_sequences() -> None:
    """`has_room` is false at the byte window and at the session window, and add without space is a bug."""
    world = make_world(wires=0, window_bytes=250)
    assert world.core.has_room(1000), "a batch larger than the window may go alone"
    add(world, b"x" * 100)
    assert world.core.has_room(150)
    assert not world.core.has_room(151)
    with pytest.raises(InvariantBroken):
        add(world, b"x" * 151)
    many = make_world(wires=0)
    for _ in range(SESSION_WINDOW):
        assert many.core.has_room(1)
        add(many, b"x")
    assert not many.core.has_room(1)


def test_batches_of_a_lost_link_go_out_on_another_with_the_same_stamp() -> None:
    """After a cut the same sequence, CRC and payload arrive through the other link, and settle."""
    world = make_world(wires=1)
    world.settle()
    batch = add(world, b"once")
    other = world.connect()
    world.cut(1)
    world.settle()
    assert batch.done
    assert batch.error is None
    assert [s.payload for s in world.cluster.log] == [b"once"]
    assert world.wires[other].far.received_bytes == 64 + 4


def test_a_batch_whose_ack_was_lost_is_answered_with_its_first_position() -> None:
    """Stored, ack lost, sent again: DUP_OF gives the position of the first copy, and the log has it once."""
    world = make_world(wires=2)
    world.settle()
    batch = add(world, b"once")
    carrier = next(n for n, wire in world.wires.items() if wire.outward)
    for _ in range(2):
        world.outward(carrier)
    assert len(world.cluster.log) == 1
    world.cut(carrier)
    world.settle()
    assert batch.position == Position(LANE, 0, 0)
    assert len(world.cluster.log) == 1
    assert len(world.cluster.frames) == 2


def test_back_pressure_is_waited_out() -> None:
    """A refused batch is sent again later, invisible to the caller."""
    world = make_world()
    world.settle()
    world.cluster.backpressure = 3
    batches = [add(world, b"%d" % n) for n in range(4)]
    world.run(lambda: all(b.done for b in batches))
    assert [b.error for b in batches] == [None] * 4
    assert [s.payload for s in world.cluster.log] == [b"0", b"1", b"2", b"3"]


def test_a_fenced_session_is_continued_with_the_same_sequences() -> None:
    """After a fence the publisher reopens by itself, and the same futures settle without a hole or a copy."""
    world = make_world()
    first = add(world, b"first")
    world.settle()
    world.cluster.fence_all()
    rest = [add(world, b"%d" % n) for n in range(3)]
    world.settle()
    assert first.done
    assert all(b.done and b.error is None for b in rest)
    assert [s.payload for s in world.cluster.log] == [b"first", b"0", b"1", b"2"]
    assert [s.session_seq for s in world.cluster.log] == [0, 1, 2, 3]
    assert world.core.session == 1


def test_an_unanswered_batch_before_the_reopen_is_sent_again_too() -> None:
    """One link reported the fence, the other is slow: its batches in flight are sent again in the new session."""
    world = make_world(wires=2)
    world.settle()
    world.cluster.fence_all()
    told, slow = add(world, b"told"), add(world, b"slow")
    slow_wire = slow.link
    world.wires[slow_wire].outward.clear()  # it will never arrive
    while world.wires[told.link or 1].outward:
        world.outward(told.link or 1)
    world.settle()
    assert world.core.session == 1
    assert [s.payload for s in world.cluster.log] == [b"told", b"slow"]
    assert slow.position == Position(LANE, 1, 1)


def test_a_session_that_was_forgotten_while_fenced_fails_as_fenced() -> None:
    """The cluster dropped the old session: it can't be continued, and the publisher reports that it is fenced."""
    world = make_world(wires=1)
    world.settle()
    world.cluster.fence_all()
    late = add(world, b"late")
    world.outward(1)
    world.outward(1)
    world.cluster.sessions.clear()
    world.settle()
    assert isinstance(world.core.failed, SessionFenced)
    assert isinstance(late.error, SessionFenced)


def test_headers_carry_the_lowest_unsettled_sequence() -> None:
    """Hundreds of batches, far beyond the window.

    The `low` of each header was the lowest unsettled sequence when sent.
    """
    world = make_world(order=2, wires=1)
    world.settle()
    for n in range(SESSION_WINDOW + 50):
        add(world, b"%d" % n)
        world.settle()
    assert [header.low for header, _ in world.cluster.frames] == list(range(SESSION_WINDOW + 50))


def test_credit_never_shrinks() -> None:
    """Credit is a total: receiving an older total after a newer one changes nothing."""
    link = Link(1, 0)
    link.grant(100)
    link.grant(40)
    assert link.room() == 100


def test_another_holder_of_the_name_fences_permanently() -> None:
    """When a second publisher opens the same name, the first one fails with SessionFenced and stores nothing more."""
    world = make_world(session_name="n")
    add(world, b"mine")
    world.settle()
    world.cluster.open(m.OpenSession(topic="t", name="n"))
    late = add(world, b"late")
    world.settle()
    assert isinstance(world.core.failed, SessionFenced)
    assert isinstance(late.error, SessionFenced)
    assert [s.payload for s in world.cluster.log] == [b"mine"]


def test_a_named_session_continues_where_it_stopped() -> None:
    """The second holder's sequences start after those the first one stored, also for batches added before the open."""
    cluster = FakeCluster(5)
    first = World(make_core(session_name="n"), cluster, 1)
    for n in range(3):
        add(first, b"%d" % n)
    first.settle()
    second = World(make_core(session_name="n"), cluster)
    early = add(second, b"3")
    second.connect()
    second.settle()
    late = add(second, b"4")
    second.settle()
    assert (early.sequence, late.sequence) == (3, 4)
    assert [s.session_seq for s in cluster.log] == [0, 1, 2, 3, 4]
    assert late.position == Position(LANE, 4, 4)


def test_an_abandoned_request_does_not_take_a_name() -> None:
    """A publisher that got its name through another broker keeps it when its first request is executed late."""
    world = make_world(session_name="n")
    [first] = [number for number, wire in world.wires.items() if wire.outward]
    late = list(world.wires[first].outward)
    world.cut(first)
    batch = add(world, b"mine")
    world.settle()
    assert batch.position == Position(LANE, 0, 0)
    stray = FakeConnection(world.cluster, credit=0)
    for frame in late:
        stray.receive(frame)
    more = add(world, b"more")
    world.settle()
    assert any(isinstance(question, m.OpenSession) for question in stray.questions)
    assert more.position == Position(LANE, 1, 1)


@pytest.mark.parametrize("outcome", [Outcome.BACKPRESSURE, Outcome.UNDECIDED])
def test_only_a_copy_that_was_not_stored_leaves_no_doubt(outcome: Outcome) -> None:
    """A publisher that ends reports as failed exactly those batches of which no copy can be in the log."""
    world = make_world(wires=1, session_name="n")
    world.settle()
    batch = add(world, b"once")
    [number] = world.wires
    ack = np.zeros(1, dtype=ACK)
    ack["lane"], ack["session"], ack["outcome"] = world.core.lane, world.core.session, outcome
    world.core.on_acks(number, ack, world.now)
    world.core.fail(SessionFenced("it is over"))
    expected = SessionFenced if outcome is Outcome.BACKPRESSURE else OutcomeUnknown
    assert type(batch.error) is expected


def test_a_name_with_another_holder_is_requested_once_more() -> None:
    """The answer to the first request names the holder; the second request names that holder, and fences it."""
    cluster = FakeCluster(5)
    first = World(make_core(session_name="n"), cluster, 1)
    first.settle()
    second = World(make_core(session_name="n"), cluster, 1)
    second.settle()
    asked = [q.holder for wire in second.wires.values() for q in wire.far.questions if isinstance(q, m.OpenSession)]
    assert asked == [NO_SESSION, 0]
    assert second.core.session == 1


def test_a_reopen_whose_answer_was_lost_is_asked_again() -> None:
    """The cluster continued the session but its answer was lost; asking again still continues it."""
    world = make_world(wires=2)
    world.settle()
    world.cluster.fence_all()
    batch = add(world, b"x")
    for _ in range(3):
        for number in list(world.wires):
            world.outward(number)
            world.outward(number)
            if len(world.cluster.sessions) < 2:
                world.inward(number)
    assert len(world.cluster.sessions) == 2
    resumes = m.OpenSession(topic="t", resume=0, lane=LANE)
    world.cut(next(number for number, wire in world.wires.items() if resumes in wire.far.questions))
    world.settle()
    assert batch.position == Position(LANE, 0, 0)


def test_an_unknown_session_ends_the_publisher() -> None:
    """The cluster forgot the session: batches it refused have that error, batches in doubt an unknown outcome."""
    world = make_world(wires=2)
    world.settle()
    doubtful = add(world, b"maybe")
    carrier = next(n for n, wire in world.wires.items() if wire.outward)
    world.cut(carrier)
    world.cluster.sessions.clear()
    refused = add(world, b"refused")
    world.settle()
    assert isinstance(world.core.failed, UnknownSession)
    assert type(doubtful.error) is OutcomeUnknown
    assert isinstance(refused.error, UnknownSession | OutcomeUnknown)
    after = add(world, b"after")
    assert isinstance(after.error, UnknownSession)
    assert world.cluster.log == []


def test_an_unknown_topic_fails_the_publisher_immediately() -> None:
    """The open is refused, and batches that waited for it failed definitely."""
    world = make_world(topic="nope")
    batch = add(world, b"x")
    world.settle()
    assert isinstance(world.core.failed, UnknownTopic)
    assert isinstance(batch.error, UnknownTopic)
    assert world.core.closed


def test_a_sequence_stored_with_other_bytes_is_a_conflict() -> None:
    """Only that batch fails; the next one is stored."""
    world = make_world(order=2, wires=1)
    world.settle()
    world.cluster.put(b"other")
    world.cluster.sessions[0].window[0] = 0
    bad, good = add(world, b"mine"), add(world, b"good")
    world.settle()
    assert isinstance(bad.error, Conflict)
    assert good.error is None
    assert good.position == Position(LANE, 1, 1)


def test_a_deleted_topic_fails_its_batches() -> None:
    """Each batch ends with UnknownTopic; the log has none of them."""
    world = make_world(wires=1)
    world.settle()
    world.cluster.topics.clear()
    batch = add(world, b"x")
    world.settle()
    assert isinstance(batch.error, UnknownTopic)


def test_a_silent_link_is_pinged_then_abandoned() -> None:
    """A silent broker is pinged at half time and given up at full time; its batches settle elsewhere."""
    world = make_world(wires=1)
    world.settle()
    world.wires[1].far.mute = True
    batch = add(world, b"x")
    world.settle()
    world.connect()
    world.advance(RESEND_US // 2)
    world.settle()
    assert m.Ping in map(type, world.wires[1].far.questions)
    world.advance(RESEND_US // 2 - 1)
    assert 1 in world.wires
    world.advance(1)
    assert 1 not in world.wires
    world.settle()
    assert batch.position == Position(LANE, 0, 0)


def test_a_live_broker_without_acks_is_kept() -> None:
    """Order 5: a batch in the reorder buffer gets no ack.

    Its broker answers pings, so only the stuck link is given up.
    """
    world = make_world(wires=2)
    world.settle()
    first, second = add(world, b"stuck"), add(world, b"held")
    stuck, live = first.link, second.link
    for _ in range(2):
        while world.wires[live].outward:
            world.outward(live)
        world.inward(live)
        world.advance(RESEND_US // 2)
    assert list(world.wires) == [live]
    world.settle()
    assert stuck not in world.wires
    assert [s.payload for s in world.cluster.log] == [b"stuck", b"held"]
    assert second.position == Position(LANE, 1, 1)


def test_another_broker_gets_the_open_request_when_the_first_is_silent() -> None:
    """A mute first broker delays the session, and does not prevent it."""
    world = make_world(wires=1)
    world.wires[1].far.mute = True
    world.connect()
    batch = add(world, b"x")
    world.run(lambda: batch.done)
    assert batch.error is None


def test_delivery_time_out_without_a_broker_is_unreachable() -> None:
    """Nothing was sent, so nothing was stored: Unreachable, and the publisher has ended."""
    world = make_world(wires=0)
    batch = add(world, b"x")
    assert world.core.next_timer_us() == world.now + DELIVERY_US
    world.advance(DELIVERY_US)
    assert isinstance(batch.error, Unreachable)
    assert isinstance(world.core.failed, Unreachable)
    assert world.core.next_timer_us() is None


def test_delivery_time_out_without_credit_is_backpressure() -> None:
    """A connected cluster without capacity gives Backpressure, and nothing was stored."""
    world = make_world(wires=0)
    world.connect(credit=0)
    batch = add(world, b"x")
    world.settle()
    world.advance(DELIVERY_US)
    assert isinstance(batch.error, Backpressure)


def test_delivery_time_out_after_sending_is_unknown() -> None:
    """A batch that was sent and never answered may be in the log: TimedOut, an OutcomeUnknown."""
    world = make_world(wires=1)
    world.settle()
    sent = add(world, b"sent")
    world.cut(1)
    unsent = add(world, b"unsent")
    world.advance(DELIVERY_US)
    assert isinstance(sent.error, TimedOut)
    assert type(unsent.error) is TimedOut
    assert world.core.unsettled == 0


def test_close_waits_for_unsettled_batches_then_closes_the_session() -> None:
    """CloseSession goes out after the last ack, and `closed` is true after its answer."""
    world = make_world(wires=1)
    batch = add(world, b"x")
    world.core.close(world.now)
    assert not world.core.closed
    world.settle()
    assert batch.done
    assert world.core.closed
    assert world.cluster.sessions == {}


def test_a_named_session_is_left_to_the_next_holder_of_its_name() -> None:
    """Close waits for outcomes, and does not ask a broker to forget the session."""
    world = make_world(wires=1, session_name="job")
    batch = add(world, b"x")
    world.core.close(world.now)
    assert not world.core.closed
    world.settle()
    assert batch.done
    assert world.core.closed
    assert len(world.cluster.sessions) == 1


def test_close_without_a_broker_ends_immediately() -> None:
    """There is no session to close."""
    world = make_world(wires=0)
    world.core.close(world.now)
    assert world.core.closed


def test_a_close_whose_answer_was_lost_is_asked_again() -> None:
    """The second answer reports an unknown session, which is equivalent."""
    world = make_world(wires=2)
    world.settle()
    world.core.close(world.now)
    world.collect()
    asked = next(n for n, wire in world.wires.items() if wire.outward)
    world.outward(asked)
    world.cut(asked)
    world.settle()
    assert world.core.closed


def test_failing_from_outside_ends_every_batch() -> None:
    """A driver that gives up gets an end for each batch: the error itself only where nothing was sent."""
    world = make_world(wires=1)
    world.settle()
    sent = add(world, b"sent")
    world.cut(1)
    unsent = add(world, b"unsent")
    world.core.fail(Unreachable("given up"))
    assert type(sent.error) is OutcomeUnknown
    assert isinstance(unsent.error, Unreachable)
    assert world.core.take_settled() == [sent, unsent]


def test_acks_of_other_sessions_are_ignored() -> None:
    """An ack for the same sequence of another session, or of another lane, settles nothing."""
    world = make_world(wires=1)
    world.settle()
    mine = add(world, b"mine")
    acks = np.zeros(2, dtype=ACK)
    acks["lane"], acks["session"], acks["outcome"] = [LANE, LANE + 1], [99, world.core.session], Outcome.ORDERED
    world.core.on_acks(1, acks, world.now)
    assert not mine.done
    world.settle()
    assert mine.done


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 300)),
        st.tuples(st.just("outward"), st.integers(0, 7)),
        st.tuples(st.just("inward"), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(0, 7)),
        st.tuples(st.just("connect"), st.sampled_from([400, 1000, 100_000])),
        st.tuples(st.just("fence"), st.just(0)),
        st.tuples(st.just("pressure"), st.integers(1, 4)),
        st.tuples(st.just("mute"), st.integers(0, 7)),
        st.tuples(st.just("grant"), st.integers(0, 7)),
        st.tuples(st.just("time"), st.sampled_from([1_000, 50_000, RESEND_US // 2, RESEND_US])),
    ),
    max_size=60,
)


def act(world: World, batches: list[object], action: str, value: int) -> None:
    wires = list(world.wires)
    number = wires[value % len(wires)] if wires else 0
    match action:
        case "add" if world.core.has_room(value):
            batches.append(add(world, b"%d:" % len(batches) + b"x" * value))
        case "outward":
            world.outward(number)
        case "inward":
            world.inward(number)
        case "cut" if wires:
            world.cut(number)
        case "connect" if len(wires) < 4:
            world.connect(credit=value)
        case "fence":
            world.cluster.fence_all()
        case "pressure":
            world.cluster.backpressure += value
        case "mute" if wires:
            world.wires[number].far.mute = True
        case "grant" if wires:
            world.wires[number].far.grant()
        case "time":
            world.advance(value)


@settings(deadline=None, max_examples=250)
@given(order=st.sampled_from([2, 5]), actions=ACTIONS, named=st.booleans())
def test_under_all_faults_every_batch_is_stored_once_and_settles_once(
    order: int, actions: list[tuple[str, int]], named: bool
) -> None:
    """Under cuts, lost acks, fences, refusals, silence and little credit: nothing lost, nothing twice, one end each."""
    core = make_core(session_name="n" if named else "", delivery_timeout_us=10**12, window_bytes=2_000)
    world = World(core, FakeCluster(order), 2)
    batches: list[object] = []
    settled: list[object] = []
    for action, value in actions:
        act(world, batches, action, value)
        settled += core.take_settled()
    for number in list(world.wires):
        world.cut(number)
    world.connect()
    world.run(lambda: core.unsettled == 0)
    settled += core.take_settled()
    assert sorted(map(id, settled)) == sorted(map(id, batches)), "each batch settles exactly once"
    stored = [s.payload for s in world.cluster.log]
    assert sorted(stored) == sorted(b.payload for b in batches), "stored exactly once"
    for batch in batches:
        assert batch.error is None
        assert stored[batch.position.index] == batch.payload
    if order == 5:
        assert stored == [b.payload for b in batches], "submission order is kept"
    stamps = {(h.session_seq, h.crc, h.count, p) for h, p in world.cluster.frames}
    assert len(stamps) == len({h.session_seq for h, _ in world.cluster.frames}), "sent again unchanged"
    assert all(h.low <= h.session_seq < h.low + SESSION_WINDOW for h, _ in world.cluster.frames)


@settings(deadline=None, max_examples=100)
@given(order=st.sampled_from([2, 5]), actions=ACTIONS)
def test_under_permanent_faults_every_batch_still_ends(order: int, actions: list[tuple[str, int]]) -> None:
    """Without a cluster each batch ends once, and only batches that are not in the log ended with a definite error."""
    world = World(make_core(window_bytes=2_000), FakeCluster(order), 2)
    batches: list[object] = []
    for action, value in actions:
        act(world, batches, action, value)
    for number in list(world.wires):
        world.cut(number)
    world.run(lambda: world.core.unsettled == 0)
    assert sorted(map(id, world.core.take_settled())) == sorted(map(id, batches))
    stored = {s.payload for s in world.cluster.log}
    for batch in batches:
        assert batch.done
        if batch.error is not None and not isinstance(batch.error, OutcomeUnknown):
            assert batch.payload not in stored


# --- sessions opened at a sequence ---
@pytest.mark.parametrize("order", [2, 5])
def test_a_session_opened_at_a_sequence_sends_everything_again(order: int) -> None:
    """The second holder's batches have the first one's numbers: stored batches settle at their positions, once."""
    first = make_world(order, session_name="job", session_at=1000)
    batches = []
    for n in range(5):  # one after the other: `low` would move on
        batches.append(add(first, b"%d" % n))
        first.settle()
    second = World(make_core(session_name="job", session_at=1000), first.cluster, 2)
    again = [add(second, b"%d" % n) for n in range(7)]
    second.settle()

    assert [batch.sequence for batch in again] == list(range(1000, 1007))
    assert [batch.position for batch in again[:5]] == [batch.position for batch in batches]
    assert [stored.session_seq for stored in first.cluster.log] == list(range(1000, 1007))
    assert (first.core.found, second.core.found) == (1000, 1005)
    assert {header.low for header, _ in first.cluster.frames} == {1000}


def test_other_bytes_under_the_same_number_are_refused() -> None:
    """Conflict, and stored batches stay unchanged."""
    first = make_world(session_name="job", session_at=1000)
    add(first, b"one")
    first.settle()
    second = World(make_core(session_name="job", session_at=1000), first.cluster, 2)
    batch = add(second, b"two")
    second.settle()

    assert isinstance(batch.error, Conflict)
    assert [stored.payload for stored in first.cluster.log] == [b"one"]


def test_batches_beyond_the_deduplication_window_are_refused() -> None:
    """A window's worth is stored; the next one ends with an error that names the remedy, and nothing hangs."""
    world = make_world(2, session_name="job", session_at=1000)
    batches = []
    for n in range(SESSION_WINDOW + 2):
        assert world.core.has_room(1)
        batches.append(add(world, b"%d" % n))
        world.settle()

    assert all(batch.error is None for batch in batches[:SESSION_WINDOW])
    assert all(isinstance(batch.error, BadValue) for batch in batches[SESSION_WINDOW:])
    assert len(world.cluster.log) == SESSION_WINDOW


def test_the_previous_holder_ends_with_an_error() -> None:
    """A name opened at a sequence by another publisher fences the previous holder."""
    first = make_world(session_name="job", session_at=1000)
    add(first, b"one")
    first.settle()
    second = World(make_core(session_name="job", session_at=2000), first.cluster, 2)
    add(second, b"two")
    second.settle()
    add(first, b"three")
    first.settle()

    assert isinstance(first.core.failed, SessionFenced)
    assert [stored.payload for stored in first.cluster.log] == [b"one", b"two"]


def test_order_5_ends_when_earlier_batches_are_lost() -> None:
    """Numbers can't move down to close the hole: the work has to be done again, from its first batch on."""
    world = World(make_core(order=5, session_name="job", session_at=1000, replicated=True), FakeCluster(5), 2)
    world.cluster.replicas = 1
    add(world, b"one")
    add(world, b"two")
    world.settle()
    world.cluster.start_anew(end=0)
    add(world, b"three")
    world.connect()
    world.settle()

    assert isinstance(world.core.failed, SessionFenced)


@pytest.mark.parametrize(("told", "strong"), [(5, True), (2, False), (0, False)])
def test_a_session_has_the_order_that_its_broker_reports(told: int, strong: bool) -> None:
    """It requests a strong session; after a loss only a strong session renumbers.

    Without a report the order is unknown.
    """
    world = make_world(order=2, session_order=5)
    world.cluster.tells_order = told
    world.settle()
    assert world.cluster.asked_orders == [5]
    assert world.core._session.strong is strong


def test_a_session_of_another_order_ends_a_publisher_that_requires_one() -> None:
    """The name belongs to a weak session, and the caller passed order="strong"."""
    world = make_world(order=2, session_name="till", session_order=5, order_required=True)
    world.cluster.tells_order = 2
    batch = add(world, b"x")
    world.settle()
    assert isinstance(world.core.failed, BadValue)
    assert "'till'" in str(world.core.failed)
    assert isinstance(batch.error, BadValue)
    assert world.cluster.log == []
