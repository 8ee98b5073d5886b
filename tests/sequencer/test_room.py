"""Space in the order ring, ceilings, and retained logs of dead brokers: everything about entries not yet durable."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.lines import attach_ring
from embarcadero.sequencer.ranges import keeper as ranges_module
from embarcadero.types import EntryKind, LanePosition, Outcome
from embarcadero_proof.bugs.table import injected
from tests.sequencer.cluster import SIZES
from tests.sequencer.replicated import ReplicatedCluster

LAP = SIZES.order_slots - SIZES.round_entries
SPARE = SIZES.round_entries // 2


def fill(cluster: ReplicatedCluster, lane: int, session: int, order: int = 5, one_by_one: bool = False) -> list[int]:
    """Send until the lane refuses; the outcomes so far."""
    outcomes: list[int] = []
    sent = 0
    while Outcome.BACKPRESSURE not in outcomes and sent < 3 * LAP:
        some = 1 if one_by_one else 3
        seqs = range(sent, sent + some)
        first = cluster.brokers[0].batches(lane, session, *seqs, low=0 if order == 5 else sent)
        cluster.run(2)
        outcomes += [cluster.brokers[0].answers[first + at][0] for at in range(some)]
        sent += some
    return outcomes


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("order", [2, 5])
def test_a_lane_without_space_refuses_and_no_other_lane_waits(order: int, one_by_one: bool) -> None:
    """A lap ahead of the durable end, batches get BACKPRESSURE; another lane continues; so does this one later."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated(order)
    session = cluster.open(lane)
    outcomes = fill(cluster, lane, session, order, one_by_one)

    assert outcomes.count(Outcome.ORDERED) == LAP - SPARE - 1  # entry 0 opens the session
    assert outcomes[-1] == Outcome.BACKPRESSURE
    other = cluster.topic(5, replicas=0)
    elsewhere = cluster.open(other)
    sent = cluster.brokers[1].batches(other, elsewhere, *range(8))
    cluster.run(2)
    assert cluster.brokers[1].outcome(sent + 7) == Outcome.ORDERED

    stored = outcomes.count(Outcome.ORDERED)
    cluster.lines(lane, 4, 4, 0)
    again = cluster.brokers[0].batches(lane, session, *range(stored, stored + 6), low=0 if order == 5 else stored)
    cluster.run(2)
    got = [cluster.brokers[0].outcome(again + at) for at in range(6)]
    assert got == [Outcome.ORDERED] * 4 + [Outcome.BACKPRESSURE] * 2


@pytest.mark.parametrize("order", [2, 5])
def test_a_full_lane_knows_its_ordered_entries(order: int) -> None:
    """A successor finds entries without results: if it refused them, their payloads would go before disks have them."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated(order)
    session = cluster.open(lane)
    stored = fill(cluster, lane, session, order).count(Outcome.ORDERED)
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    again = cluster.brokers[0].batches(lane, session, stored - 2, stored - 1, stored, low=stored - 2)
    cluster.run(3)
    got = [cluster.brokers[0].outcome(again + at) for at in range(3)]
    assert got == [Outcome.DUP_OF, Outcome.DUP_OF, Outcome.BACKPRESSURE]


def test_requests_have_a_reserve_and_then_wait_too() -> None:
    """A full lane still opens a session; when the reserve is used up, that is refused as well, and sent again."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    fill(cluster, lane, cluster.open(lane))
    asked = [cluster.brokers[1].request(EntryKind.SESSION_OPEN, lane) for _ in range(3)]
    cluster.run(3)
    outcomes = [cluster.brokers[1].outcome(number) for number in asked]

    assert outcomes[0] == Outcome.OPENED
    assert outcomes[-1] == Outcome.BACKPRESSURE
    assert cluster.sequencer.lanes[lane].order.next_index <= LAP
    cluster.lines(lane, 10, 10, 10)
    assert cluster.open(lane, broker=1)


def test_waiting_batches_count_as_if_they_came_now() -> None:
    """Batches that wait for a gap have reserved slots in the ring: when the gap closes, all of them fit."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    session = cluster.open(lane)
    held = cluster.brokers[1].batches(lane, session, *range(1, 8))
    cluster.run(2)
    other = cluster.open(lane)
    outcomes = fill(cluster, lane, other)
    assert outcomes.count(Outcome.ORDERED) == LAP - SPARE - 2 - 7
    filler = cluster.brokers[1].batches(lane, session, 0)
    cluster.run(2)
    assert cluster.brokers[1].outcome(filler) == Outcome.BACKPRESSURE

    end = cluster.sequencer.lanes[lane].order.next_index
    cluster.lines(lane, end, end, end)
    filler = cluster.brokers[1].batches(lane, session, 0)
    cluster.run(2)
    assert cluster.brokers[1].outcome(filler) == Outcome.ORDERED
    assert cluster.brokers[1].outcome(held + 6) == Outcome.ORDERED


def test_timeouts_wait_for_space_too() -> None:
    """A gap that times out while the lane is full is ended as soon as there is space."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated(gap_timeout_ms=1_000)
    session = cluster.open(lane)
    waiting = cluster.brokers[1].batches(lane, session, 1)
    cluster.run(2)
    other = cluster.open(lane)
    fill(cluster, lane, other)
    for _ in range(2):  # use up the reserve
        cluster.brokers[1].request(EntryKind.SESSION_OPEN, lane)
        cluster.run(2)
    cluster.wait(3)
    before = cluster.sequencer.lanes[lane].order.next_index
    assert before <= LAP
    assert cluster.brokers[1].outcome(waiting) is None or before < LAP
    cluster.lines(lane, before, before, before)
    cluster.wait(1)
    assert cluster.brokers[1].outcome(waiting) == Outcome.FENCED


@pytest.mark.parametrize("seed", range(6))
def test_a_successor_has_everything_that_is_not_durable(seed: int) -> None:
    """A full ring, a crash: [durable, end) is in the successor's ring, at the same positions."""
    cluster = ReplicatedCluster(seed)
    lane = cluster.replicated()
    session = cluster.open(lane)
    fill(cluster, lane, session)
    durable = 5
    cluster.lines(lane, durable, durable, 0)
    for start in range(19, 26, 3):
        cluster.brokers[0].batches(lane, session, *range(start, start + 3))
        cluster.run(2)
    end = cluster.sequencer.lanes[lane].order.next_index
    assert end - durable == LAP - SPARE
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    fabric = cluster.memory.host("looker")
    ring = attach_ring(fabric, f"epoch-{cluster.sequencer.epoch}/order-{lane}", ORDER)

    found = ring.read(durable, end)
    assert len(found) == end - durable
    assert [entry.tobytes()[:60] for entry in found] == [cluster.log[lane][index] for index in range(durable, end)]
    cluster.run(3)
    sent = cluster.brokers[1].batches(lane, session, end)
    cluster.run(2)
    assert cluster.brokers[1].outcome(sent) == Outcome.BACKPRESSURE


# --- ceilings ---------------------------------------------------------------------------------------------------------
def order_some(cluster: ReplicatedCluster, raising: bool) -> int:
    """Order far beyond a low ceiling, all of it durable immediately. Returns the end of the order."""
    with (
        patch.object(ranges_module, "CEILING_AHEAD", 10),
        patch.object(ranges_module, "CEILING_AHEAD_SEQ", 1_000),
        patch("embarcadero.placement.ranges.CEILING_AHEAD", 10),
        patch("embarcadero.placement.ranges.CEILING_AHEAD_SEQ", 1_000),
    ):
        lane = cluster.replicated()
        session = cluster.open(lane)
        if not raising:
            patcher = patch.object(cluster.directory.ranges, "raise_ceiling", return_value=False)
            patcher.start()
        done = 0
        for _ in range(20):
            cluster.brokers[0].batches(lane, session, *range(done, done + 3))
            cluster.clock.us += 20_000
            cluster.run(2)
            order = cluster.sequencer.lanes[lane].order
            done = int(order.table.expected[session & order.table.mask])
            if raising:
                assert order.next_index <= cluster.directory.ranges.ceiling(lane)[0]
            cluster.lines(lane, *[order.next_index] * 3)
        if not raising:
            patcher.stop()
        return cluster.sequencer.lanes[lane].order.next_index - cluster.directory.ranges.ceiling(lane)[0]


def test_the_ceiling_is_raised_ahead_of_the_order() -> None:
    """Reserved positions are always ahead; ordering continues."""
    cluster = ReplicatedCluster()
    assert order_some(cluster, raising=True) <= 0
    assert cluster.sequencer.lanes[0].order.next_index > 30


def test_nothing_is_ordered_above_the_ceiling() -> None:
    """While the store refuses to reserve more, batches are refused too; with the rule switched off they are not."""
    assert order_some(ReplicatedCluster(), raising=False) <= 0
    with injected("ceiling-ignored"):
        assert order_some(ReplicatedCluster(), raising=False) > 0


def test_records_have_a_ceiling_of_their_own() -> None:
    """Few batches with many records stop at the seq that is reserved."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    session = cluster.open(lane)
    capacity = cluster.sequencer.lanes[lane].capacity
    assert capacity is not None
    with patch.object(cluster.directory.ranges, "raise_ceiling", return_value=False):
        capacity.raise_to(LanePosition(1_000, 5))
        sent = cluster.brokers[0].batches(lane, session, 0, 1, 2, 3)
        cluster.run(2)
        alone = cluster.brokers[0].batches(lane, session, 2)
        cluster.run(2)

    assert [cluster.brokers[0].outcome(sent + at) for at in range(4)] == [Outcome.ORDERED] * 2 + [
        Outcome.BACKPRESSURE
    ] * 2
    assert cluster.brokers[0].outcome(alone) == Outcome.BACKPRESSURE


# --- dead brokers -----------------------------------------------------------------------------------------------------
def test_a_dead_brokers_log_stays_until_all_of_it_is_durable() -> None:
    """Replicas copy from it; then it is removed immediately, since every topic is on disk."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 0, 1, 2)
    cluster.run(2)
    dead = cluster.brokers[0].member
    cluster.directory.members.mark_dead(dead.broker, dead.incarnation)
    cluster.wait(0.5)
    looker = cluster.memory.host("looker")
    assert looker.exists(f"{dead.region_prefix}/log")
    cluster.lines(lane, 4, 3, 3)
    cluster.wait(0.5)
    assert looker.exists(f"{dead.region_prefix}/log")
    cluster.lines(lane, 4, 4, 3)
    cluster.wait(0.5)

    assert not looker.exists(f"{dead.region_prefix}/log")
    assert dead.handle not in {member.handle for member in cluster.directory.members.all()}


def test_a_dead_brokers_log_stays_for_readers_of_topics_without_replicas() -> None:
    """Their records are nowhere else."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    cluster.topic(5, replicas=0)
    cluster.open(lane)
    dead = cluster.brokers[0].member
    cluster.directory.members.mark_dead(dead.broker, dead.incarnation)
    cluster.lines(lane, 1, 1, 1)
    cluster.wait(0.5)

    assert cluster.memory.host("looker").exists(f"{dead.region_prefix}/log")
