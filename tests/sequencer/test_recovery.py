"""Recovery of lanes after the fabric was lost: ends, ceilings, sessions; and the state after a clean stop."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from embarcadero.fabric.layout import ORDER, RangeWord, RegionKind
from embarcadero.fabric.lines import create_ring
from embarcadero.limits import CEILING_AHEAD, CEILING_AHEAD_HANDLES, RECOVERY_REPLIES_S, RECOVERY_STUCK_S
from embarcadero.sequencer.order.batches import control_entry
from embarcadero.sequencer.order.sessions import SessionTable
from embarcadero.sequencer.ranges.recovery import LaneRecovery
from embarcadero.sequencer.ranges.recovery_sources import rows_for
from embarcadero.types import NO_SESSION, EntryKind, Outcome, Range
from embarcadero_proof.bugs.table import injected
from tests.sequencer.cluster import Crash
from tests.sequencer.replicated import ReplicatedCluster


def loaded(order: int = 5, replicas: int = 3, durable_on: int = 2) -> tuple[ReplicatedCluster, int, int, Range]:
    """A lane with a named session and six batches; (cluster, lane, session, its range)."""
    cluster = ReplicatedCluster(replicas=4)
    lane = cluster.replicated(order, replicas, durable_on)
    session = cluster.open(lane, name=77)
    cluster.brokers[0].batches(lane, session, *range(6))
    cluster.run(2)
    return cluster, lane, session, cluster.open_range(lane)


def reply(cluster: ReplicatedCluster, range_: Range, *lines: int | None) -> None:
    """Lines of a range of the previous run, one per replica that it names, by their new incarnations."""
    now = {replica.number: replica for replica in cluster.replicas}
    for ref, line in zip(range_.replicas, lines, strict=True):
        if line is not None:
            now[ref.replica].line(range_, line)


def disks_of(range_: Range) -> dict[int, str]:
    return {ref.replica: ref.disk for ref in range_.replicas}


def test_the_end_is_the_largest_reply_and_the_next_range_is_above_the_ceiling() -> None:
    """Two of three answer within a second or so; positions that may have been handed out are never reused."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 5, 4, 2)
    ceiling = cluster.directory.ranges.ceiling(lane)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, None, 4, 2)
    cluster.wait(RECOVERY_REPLIES_S + 0.2)

    assert cluster.word(lane) == (RangeWord(range_.number, True), 4)  # copies must be completed up to there
    assert cluster.directory.ranges.all(lane)[-1].open
    assert lane not in cluster.sequencer.lanes
    reply(cluster, range_, None, 4, 4)
    cluster.wait(0.3)
    sealed, opened = cluster.directory.ranges.all(lane)
    assert (sealed.end, sealed.end_seq) == (4, 6)
    assert (opened.start, opened.start_seq) == ceiling
    assert opened.start >= CEILING_AHEAD
    assert cluster.word(lane) == (RangeWord(opened.number, False), 0)
    assert cluster.sequencer.counters.recovered == 1


def test_with_all_replies_recovery_does_not_wait() -> None:
    """Once every copy has answered, recovery does not wait for time to pass; the largest is the end."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 6, 5, 2)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 6, 5, 2)
    cluster.run(3)
    assert cluster.word(lane) == (RangeWord(range_.number, True), 6)
    reply(cluster, range_, 6, 6, 2)
    cluster.run(3)

    assert cluster.directory.ranges.all(lane)[0].end == 6


def handles_after_a_loss() -> tuple[int, int]:
    """The handle of a session that is lost with the fabric, and of the next session that is opened."""
    cluster, lane, _, range_ = loaded()
    lost = cluster.open(lane, name=78)
    cluster.lines(lane, 6, 6, 6)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 6, 6, 6)
    cluster.run(6)
    return lost, cluster.open(lane, name=79)


def test_the_handle_of_a_lost_session_is_never_handed_out_again() -> None:
    """Its publisher still has it, and would write into another's session."""
    lost, opened = handles_after_a_loss()
    assert opened > lost

    with injected("handles-reused"):
        lost, opened = handles_after_a_loss()
    assert opened == lost


def test_no_handle_is_handed_out_that_the_store_has_not_reserved() -> None:
    """A client that opens a session has to wait; more handles exist as soon as the lane has grown."""
    cluster, lane, _, _ = loaded()
    table = cluster.sequencer.lanes[lane].order.table
    assert table.next_handle < table.handles_reserved <= cluster.directory.ranges.handle_ceiling(lane)
    table.handles_reserved = table.next_handle
    asked = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, NO_SESSION, 78)
    cluster.run(1)
    assert cluster.brokers[0].outcome(asked) == Outcome.BACKPRESSURE
    cluster.brokers[0].batches(lane, 0, 6)
    cluster.wait(0.1)
    assert cluster.open(lane, name=78) == table.next_handle - 1


def test_the_smallest_reply_would_lose_durable_records() -> None:
    """The injected bug: records that two replicas had are cut off."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 5, 5, 2)
    cluster.lose_memory(disks_of(range_))
    with injected("failover-statistic"):
        reply(cluster, range_, 5, None, 2)
        cluster.wait(RECOVERY_REPLIES_S + 0.3)

    assert cluster.directory.ranges.all(lane)[0].end == 2


@pytest.mark.parametrize("buggy", [False, True])
def test_a_wiped_disk_is_not_a_reply(buggy: bool) -> None:
    """One honest copy and a replica that forgot: fewer than the two required. Injected: the end is wrong."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 5, 5, 2)
    wiped, behind = range_.replicas[0].replica, range_.replicas[2].replica
    cluster.lose_memory({wiped: "another disk", behind: range_.replicas[2].disk})
    with injected(*["forgetful-counts"] * buggy):
        reply(cluster, range_, None, None, 2)
        cluster.wait(3 * RECOVERY_REPLIES_S)
        if buggy:
            assert cluster.word(lane) == (RangeWord(range_.number, True), 2)
            return
    assert cluster.directory.ranges.all(lane)[-1].number == range_.number
    assert cluster.word(lane) == (RangeWord(range_.number, True), 0)
    (told,) = cluster.diary.of("lane waits for replicas")
    assert told["missing"] == [range_.replicas[0].replica, range_.replicas[1].replica]

    session = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane)
    cluster.run(2)
    assert cluster.brokers[0].outcome(session) == Outcome.BACKPRESSURE
    cluster.replica(range_.replicas[1].replica, range_.replicas[1].disk)
    reply(cluster, range_, None, 5, 2)
    cluster.wait(RECOVERY_REPLIES_S + 0.2)
    reply(cluster, range_, None, 5, 5)
    cluster.wait(0.3)
    assert cluster.directory.ranges.all(lane)[0].end == 5


def test_a_new_disk_may_get_the_copy_of_a_wiped_one() -> None:
    """Two copies are needed and one disk is wiped: the other one knows the end, the new one is the second copy."""
    cluster, lane, _, range_ = loaded(replicas=2, durable_on=2)
    cluster.lines(lane, 5, 4)
    honest, wiped = range_.replicas
    cluster.lose_memory({honest.replica: honest.disk, wiped.replica: "another disk"})
    reply(cluster, range_, 5, None)
    cluster.wait(RECOVERY_REPLIES_S + 0.2)
    assert cluster.word(lane) == (RangeWord(range_.number, True), 5)

    reply(cluster, range_, 5, 4)
    cluster.wait(0.3)
    assert cluster.directory.ranges.all(lane)[-1].number == range_.number
    reply(cluster, range_, 5, 5)
    cluster.wait(0.3)
    assert cluster.directory.ranges.all(lane)[0].end == 5
    assert lane in cluster.sequencer.lanes


def test_records_that_never_were_durable_are_given_up_if_no_replica_can_copy_them() -> None:
    """The only disk that has them is damaged there: the lane continues where another one ends, and not before."""
    cluster, lane, _, range_ = loaded(replicas=2, durable_on=2)
    cluster.lines(lane, 6, 3)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 6, 3)
    cluster.wait(RECOVERY_STUCK_S - 1.0)
    assert cluster.word(lane) == (RangeWord(range_.number, True), 6)
    reply(cluster, range_, 6, 4)  # copying continues, and the patience starts again
    cluster.wait(RECOVERY_STUCK_S - 1.0)
    assert cluster.directory.ranges.all(lane)[0].open
    cluster.wait(2.0)

    assert cluster.directory.ranges.all(lane)[0].end == 4
    assert lane in cluster.sequencer.lanes


@pytest.mark.parametrize(("replies", "end"), [((6, 3, None), 6), ((6, 3, 3), 3), ((6, 2, 1), 2)])
def test_possibly_durable_records_are_never_given_up(replies: tuple[int | None, ...], end: int) -> None:
    """Two of three: a disk that does not answer may have been the second with all records."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, *replies)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, *replies)
    cluster.wait(2 * RECOVERY_STUCK_S)
    found = cluster.directory.ranges.all(lane)[0]

    assert cluster.word(lane)[1] == 6 if found.open else found.end == end
    assert found.open == (None in replies)


def test_an_empty_range_needs_no_copies() -> None:
    """Nothing was durable when memory was lost and a disk was wiped: the lane does not wait for empty copies."""
    cluster = ReplicatedCluster(replicas=2)
    lane = cluster.replicated(5, replicas=2, durable_on=2)
    range_ = cluster.open_range(lane)
    honest, wiped = range_.replicas
    cluster.lose_memory({honest.replica: honest.disk, wiped.replica: "another disk"})
    reply(cluster, range_, 0, None)
    cluster.wait(2 * RECOVERY_REPLIES_S)

    assert cluster.directory.ranges.all(lane)[0].end == 0
    assert lane in cluster.sequencer.lanes


def test_an_operator_may_accept_the_loss() -> None:
    """Then the lane continues with the records of the replies, even if more was durable."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 5, 5, 2)
    alive = range_.replicas[2]
    cluster.lose_memory({alive.replica: alive.disk, 3: "new"})
    reply(cluster, range_, None, None, 2)
    cluster.wait(3 * RECOVERY_REPLIES_S)
    assert cluster.directory.ranges.all(lane)[0].open
    cluster.directory.ranges.accept_loss(lane)
    cluster.wait(2 * RECOVERY_REPLIES_S)

    assert cluster.directory.ranges.all(lane)[0].end == 2
    assert lane in cluster.sequencer.lanes


@pytest.mark.parametrize("order", [2, 5])
@pytest.mark.parametrize("checkpoint", ["none", "good", "broken"])
def test_sessions_are_fenced_and_continue(order: int, checkpoint: str) -> None:
    """The log records it, the handle is still known, and durable batches are not stored again."""
    cluster = ReplicatedCluster(replicas=3)
    lane = cluster.replicated(order)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 0, 1, 2)
    cluster.run(2)
    if checkpoint != "none":
        cluster.sequencer.lanes[lane].save(cluster.clock.us)
    cluster.remember(lane)
    cluster.brokers[0].batches(lane, session, 3, 4, 5)
    cluster.run(2)
    cluster.lines(lane, 5, 5, 5)
    if checkpoint == "broken":
        saved = cluster.disks.checkpoints[lane]
        saved[4] = saved[4][:-1] + bytes([saved[4][-1] ^ 1])
    range_ = cluster.open_range(lane)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 5, 5, 5)
    cluster.run(5)
    start = cluster.open_range(lane).start
    assert cluster.sequencer.lanes[lane].order.next_index == start + 1  # a SESSION_FENCE
    late = cluster.brokers[0].batches(lane, session, 5)
    cluster.run(2)
    assert cluster.brokers[0].outcome(late) == Outcome.FENCED
    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(2)
    outcome, _, low, _, expected, opened = cluster.brokers[0].answers[again]
    assert (outcome, expected) == (Outcome.OPENED, 4)
    assert low <= expected
    sent = cluster.brokers[0].batches(lane, opened, 2, 4, 5)
    cluster.run(2)
    outcomes = [cluster.brokers[0].outcome(sent + at) for at in range(3)]
    assert outcomes == [Outcome.DUP_OF, Outcome.ORDERED, Outcome.ORDERED]
    assert cluster.brokers[0].answers[sent][1] == 3  # the position from before the restart
    assert cluster.brokers[0].answers[sent + 1][1] > start


def test_a_name_finds_its_session_again() -> None:
    """A client that only knows the name learns which batches are stored."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 4, 4, 4)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 4, 4, 4)
    cluster.run(5)
    asked = cluster.brokers[1].request(EntryKind.SESSION_OPEN, lane, name=77)
    cluster.run(2)

    assert cluster.brokers[1].answers[asked][0] == Outcome.OPENED
    assert cluster.brokers[1].answers[asked][4] == 3


@pytest.mark.parametrize("order", [2, 5])
def test_a_trimmed_range_that_no_checkpoint_on_disk_covers_still_defines_sessions(order: int) -> None:
    """Its entries are above the newest checkpoint on disk: the batches they stored must not be stored twice."""
    cluster = ReplicatedCluster(replicas=3)
    lane = cluster.replicated(order)
    session = cluster.open(lane, name=77)
    cluster.brokers[0].batches(lane, session, 0, 1, 2)
    cluster.run(2)
    cluster.sequencer.lanes[lane].save(cluster.clock.us)
    cluster.remember(lane)
    cluster.brokers[0].batches(lane, session, 3, 4, 5)
    cluster.run(2)
    cluster.lines(lane, 7, 7, 7)
    kept = cluster.sequencer.ranges.lanes[lane]
    assert cluster.sequencer.ranges.seal(kept, list(kept.range_.replicas), "test")
    range_ = cluster.open_range(lane)
    assert (range_.number, range_.start) == (2, 7)
    cluster.lines(lane, 7, 7, 7)
    assert cluster.directory.topics.trim("t0", lane, 7) == 7
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 7, 7, 7)
    cluster.run(5)

    asked = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, name=77)
    cluster.run(2)
    outcome, _, _, _, expected, opened = cluster.brokers[0].answers[asked]
    assert (outcome, expected) == (Outcome.OPENED, 6)
    sent = cluster.brokers[0].batches(lane, opened, 4, 6)
    cluster.run(2)
    assert [cluster.brokers[0].outcome(sent + at) for at in range(2)] == [Outcome.DUP_OF, Outcome.ORDERED]


def test_a_lane_waits_for_a_checkpoint_that_covers_forgotten_ranges() -> None:
    """The replicas that reply have an older checkpoint: continuing from it would leave out the entries in between."""
    cluster, lane, _, range_ = loaded()
    cluster.sequencer.lanes[lane].save(cluster.clock.us)
    cluster.lines(lane, 7, 7, 7)
    kept = cluster.sequencer.ranges.lanes[lane]
    assert cluster.sequencer.ranges.seal(kept, list(range_.replicas), "test")
    second = cluster.open_range(lane)
    cluster.lines(lane, 7, 7, 7)
    newest = max(cluster.disks.checkpoints[lane])
    cluster.directory.topics.trim("t0", lane, 7)
    assert cluster.directory.ranges.forget_trimmed(lane, second.number, newest)
    assert [range_.number for range_ in cluster.directory.ranges.all(lane)] == [2]
    away = cluster.disks.checkpoints[lane].pop(newest)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, second, 7, 7, 7)
    cluster.wait(2)
    assert lane not in cluster.sequencer.lanes
    assert len(cluster.diary.of("lane can't be read")) == 1

    cluster.disks.checkpoints[lane][newest] = away
    cluster.wait(1)
    asked = cluster.brokers[1].request(EntryKind.SESSION_OPEN, lane, name=77)
    cluster.run(2)
    assert cluster.brokers[1].answers[asked][4] == 6


def test_lanes_are_recovered_independently() -> None:
    """One has all its copies, the other has none: the first one works, the second answers BACKPRESSURE."""
    cluster, lane, _, range_ = loaded()
    other = cluster.replicated(2, replicas=1, durable_on=1)
    other_range = cluster.open_range(other)
    cluster.lines(lane, 3, 3, 3)
    alone = next(ref for ref in range_.replicas if ref not in other_range.replicas)
    cluster.lose_memory({ref.replica: ref.disk for ref in range_.replicas if ref not in other_range.replicas})
    assert alone.replica in {replica.number for replica in cluster.replicas}
    kept = [ref for ref in range_.replicas if ref not in other_range.replicas]
    reply(cluster, range_, *[3 if ref in kept else None for ref in range_.replicas])
    cluster.wait(RECOVERY_REPLIES_S + 0.5)

    assert cluster.open(lane)
    asked = cluster.brokers[0].request(EntryKind.SESSION_OPEN, other)
    cluster.run(2)
    assert cluster.brokers[0].outcome(asked) == Outcome.BACKPRESSURE


@pytest.mark.parametrize("number", range(1, 60, 2))
def test_a_crash_in_the_middle_of_a_recovery(number: int) -> None:
    """Wherever the first sequencer dies, the next one recovers the lane: one seal, nothing twice."""
    cluster, lane, session, range_ = loaded()
    cluster.lines(lane, 5, 5, 5)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 5, 5, 5)

    def crash() -> None:
        raise Crash

    cluster.at_primitive(number, crash)
    try:
        cluster.run(4)
    except Crash:
        cluster.memory.crash(cluster.host)
        cluster.new_sequencer()
    cluster.memory.interrupt = None
    for replica in cluster.replicas:
        if (opened := cluster.open_range(lane)).number > range_.number:
            replica.line(opened, opened.start)
    cluster.wait(1)
    chain = cluster.directory.ranges.all(lane)
    assert [r.end for r in chain][:1] == [5]
    assert chain[-1].start >= CEILING_AHEAD
    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(3)
    assert cluster.brokers[0].answers[again][0] == Outcome.OPENED
    assert cluster.brokers[0].answers[again][4] == 4


def test_unreadable_files_are_read_again() -> None:
    """The lane waits and reports it once; it is recovered when a good copy is within reach."""
    cluster, lane, _, range_ = loaded()
    cluster.lines(lane, 5, 5, 5)
    cluster.lose_memory(disks_of(range_))
    cluster.disks.broken = True
    reply(cluster, range_, 5, 5, 5)
    cluster.wait(2)
    assert lane not in cluster.sequencer.lanes
    assert len(cluster.diary.of("lane can't be read")) == 1
    cluster.disks.broken = False
    cluster.wait(1)

    assert lane in cluster.sequencer.lanes


def test_memory_lost_twice() -> None:
    """The second recovery replays over the gap of the first one: continued sessions have their state."""
    cluster, lane, session, range_ = loaded()
    cluster.lines(lane, 5, 5, 5)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 5, 5, 5)
    cluster.run(5)
    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(2)
    opened = cluster.brokers[0].answers[again][5]
    cluster.brokers[0].batches(lane, opened, 4, 5)
    cluster.run(2)
    second = cluster.open_range(lane)
    end = cluster.sequencer.lanes[lane].order.next_index
    cluster.lines(lane, end, end, end)
    cluster.disks.checkpoints.clear()
    cluster.lose_memory(disks_of(range_))
    reply(cluster, second, end, end, end)
    cluster.run(5)

    assert [(r.start, r.end) for r in cluster.directory.ranges.all(lane)] == [
        (0, 5), (second.start, end), (second.start + CEILING_AHEAD, None)
    ]  # fmt: skip
    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(2)
    assert cluster.brokers[0].answers[again][4] == 6


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("order", [2, 5])
def test_a_checkpoint_of_lost_entries_is_not_used_later(order: int, memory: bool) -> None:
    """One disk had more than those that replied, and returns when the next range is open: a resend is stored.

    The sequencer that opened that range died before the lane started, or memory was lost once more.
    """
    cluster, lane, session, range_ = loaded(order)
    cluster.sequencer.lanes[lane].save(cluster.clock.us)
    cluster.lines(lane, 7, 4, 4)
    lost = cluster.disks.checkpoints[lane].pop(7)
    longest, *others = disks_of(range_).items()
    cluster.lose_memory(dict([*others, (3, "new")]))
    reply(cluster, range_, None, 4, 4)
    with patch.object(LaneRecovery, "_begin", side_effect=Crash), pytest.raises(Crash):
        cluster.wait(RECOVERY_REPLIES_S + 0.5)
    second = cluster.open_range(lane)
    cluster.memory.crash(cluster.host)
    cluster.disks.checkpoints[lane][7] = lost
    if memory:
        cluster.lose_memory(dict([longest, *others, (3, "new")]))
        reply(cluster, second, *[second.start] * 3)
    else:
        cluster.replica(*longest)
        cluster.new_sequencer()
    cluster.wait(1)

    assert cluster.directory.ranges.all(lane)[0].end == 4
    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(2)
    opened = cluster.brokers[0].answers[again][5]
    sent = cluster.brokers[0].batches(lane, opened, 2, 3, 4)
    cluster.run(2)
    outcomes = [cluster.brokers[0].outcome(sent + at) for at in range(3)]
    assert outcomes == [Outcome.DUP_OF, Outcome.ORDERED, Outcome.ORDERED]
    assert cluster.brokers[0].answers[sent + 1][1] > second.start


def test_more_sessions_than_fit_the_ring_are_fenced_in_portions() -> None:
    """Fences are entries too: they wait for space, and nothing else is accepted before."""
    cluster, lane, _, range_ = loaded()
    for _ in range(6):
        cluster.open(lane)
    end = cluster.sequencer.lanes[lane].order.next_index
    cluster.lines(lane, end, end, end)
    cluster.lose_memory(disks_of(range_))
    with patch("embarcadero.sequencer.order.lane.LaneCapacity.controls", return_value=2):
        reply(cluster, range_, end, end, end)
        cluster.run(3)
        asked = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane)
        cluster.run(1)
        assert cluster.brokers[0].outcome(asked) == Outcome.BACKPRESSURE
        cluster.run(4)

    order = cluster.sequencer.lanes[lane].order
    assert order.next_index - cluster.open_range(lane).start == 7
    assert cluster.open(lane)


def test_a_lane_of_a_broker_is_sealed_and_closed() -> None:
    """Its incarnation is gone with the memory: nothing is continued."""
    cluster = ReplicatedCluster(replicas=3)
    topic = cluster.directory.topics.create("loose", order=0, replicas=3, durable_on=2)
    broker = cluster.brokers[0]
    lane = cluster.directory.lanes.make(topic, broker.member)
    assert lane is not None
    ring = create_ring(broker.fabric, lane.region, RegionKind.ORDER, ORDER, 32)
    for _ in range(5):
        ring.write(control_entry(EntryKind.BATCH, 0, 0, count=2, seq=2 * ring.next), 0)
    ring.publish()
    cluster.wait(0.3)
    range_ = cluster.open_range(lane.lane)
    assert cluster.word(lane.lane) == (RangeWord(range_.number, False), 0)
    cluster.lines(lane.lane, 4, 3, 1)
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, 4, 3, 1)
    cluster.run(3)
    reply(cluster, range_, 4, 4, 1)
    cluster.run(3)

    (sealed,) = cluster.directory.ranges.all(lane.lane)
    assert (sealed.end, sealed.end_seq) == (4, 8)
    (closed,) = cluster.directory.lanes.all()
    assert (closed.end, closed.end_seq) == (4, 8)
    assert cluster.word(lane.lane) == (RangeWord(0, False), 0)


def test_the_last_range_of_a_closed_lane_is_sealed_at_its_end() -> None:
    """Once all of it is durable; until then replicas may be replaced as elsewhere, and its broker's log stays."""
    cluster = ReplicatedCluster(replicas=4)
    topic = cluster.directory.topics.create("loose", order=1, replicas=3, durable_on=2)
    broker = cluster.brokers[0]
    lane = cluster.directory.lanes.make(topic, broker.member)
    assert lane is not None
    ring = create_ring(broker.fabric, lane.region, RegionKind.ORDER, ORDER, 32)
    for _ in range(5):
        ring.write(control_entry(EntryKind.BATCH, 0, 0, count=2, seq=2 * ring.next), 0)
    ring.publish()
    cluster.wait(0.3)
    cluster.lines(lane.lane, 3, 3, 1)
    cluster.directory.members.mark_dead(broker.member.broker, broker.member.incarnation)
    cluster.wait(0.3)
    first = cluster.open_range(lane.lane)
    next(r for r in cluster.replicas if r.member.ref == first.replicas[0]).die()
    cluster.wait(0.3)
    sealed, opened = cluster.directory.ranges.all(lane.lane)
    assert (sealed.end, sealed.end_seq, opened.start) == (3, 6, 3)
    assert cluster.memory.host("looker").exists(lane.region)
    cluster.lines(lane.lane, 5, 5, 3)
    cluster.wait(0.5)

    assert [(r.end, r.end_seq) for r in cluster.directory.ranges.all(lane.lane)] == [(3, 6), (5, 10)]
    assert cluster.word(lane.lane) == (RangeWord(0, False), 0)
    assert not cluster.memory.host("looker").exists(lane.region)


# --- clean stops ------------------------------------------------------------------------------------------------------
def drained(cluster: ReplicatedCluster, lane: int, saves: bool = True, most: int = 400) -> bool:
    """Let the sequencer drain; replicas save its checkpoint if they do. True if it finished."""
    for _ in range(most):
        cluster.clock.us += 20_000
        for replica in cluster.replicas:
            replica.beat()
        if cluster.sequencer.drain():
            return True
        if saves and (kept := cluster.sequencer.ranges.lanes.get(lane)) is not None:
            cluster.remember(lane)
            index = max(cluster.disks.checkpoints.get(lane, {0: b""}))
            cluster.replicas[0].table.set((lane, kept.range_.number), index, word=1)
    return False


@pytest.mark.parametrize("saves", [True, False])
def test_after_a_clean_stop_nothing_is_missing(saves: bool) -> None:
    """The range is sealed at its end, and the next run continues at that very index with open sessions."""
    cluster, lane, session, range_ = loaded()
    cluster.lines(lane, 7, 7, 6)
    assert drained(cluster, lane, saves)
    assert [(r.end, r.end_seq) for r in cluster.directory.ranges.all(lane)] == [(7, 12)]
    cluster.lose_memory(disks_of(range_))
    cluster.run(5)

    opened = cluster.open_range(lane)
    assert (opened.start, opened.start_seq) == (7, 12)
    sent = cluster.brokers[0].batches(lane, session, 6, 5)
    cluster.run(3)
    assert cluster.brokers[0].answers[sent][:3] == (Outcome.ORDERED, 7, 12)
    assert cluster.brokers[0].answers[sent + 1][:2] == (Outcome.DUP_OF, 6)


def test_a_stop_waits_a_bounded_time_for_durability() -> None:
    """Records that do not become durable in time stay in an open range."""
    cluster, lane, _, _ = loaded()
    cluster.lines(lane, 7, 5, 5)
    assert not drained(cluster, lane, most=50)
    assert drained(cluster, lane)
    assert cluster.open_range(lane)
    assert cluster.diary.of("ranges left open")


def test_a_successor_in_the_same_run_continues_after_a_clean_stop() -> None:
    """Only the sequencer was stopped: its successor opens the next range where the last one ends."""
    cluster, lane, session, _ = loaded()
    cluster.lines(lane, 7, 7, 7)
    assert drained(cluster, lane)
    cluster.new_sequencer()
    cluster.wait(0.3)

    assert [(r.start, r.end) for r in cluster.directory.ranges.all(lane)] == [(0, 7), (7, None)]
    sent = cluster.brokers[0].batches(lane, session, 6)
    cluster.run(3)
    assert cluster.brokers[0].answers[sent][:2] == (Outcome.ORDERED, 7)


@pytest.mark.parametrize("opened", [5, 131, 70_000])
def test_skipped_handles_make_no_table_larger(opened: int) -> None:
    """Without a checkpoint the table is made for the handles of the log; those after a loss continue in turn."""
    table = SessionTable(100)
    table.next_handle = opened
    table.pass_over(CEILING_AHEAD_HANDLES * 3)
    assert table.next_handle >= CEILING_AHEAD_HANDLES * 3

    entries = np.zeros(opened + 20, dtype=ORDER)
    entries["session"] = [*range(opened), *range(table.next_handle, table.next_handle + 20)]
    assert rows_for(100, None, [entries]) <= max(100, 2 * (opened + 20))
