"""The fabric is lost and its mirror is not: lanes continue exactly where their order ended."""

from __future__ import annotations

import pytest

from embarcadero.fabric.layout import ORDER, SLOTS_OFFSET, RegionKind
from embarcadero.fabric.lines import create_ring
from embarcadero.limits import CEILING_AHEAD, PAST_GENERATIONS_MAX
from embarcadero.sequencer.order.batches import control_entry
from embarcadero.types import EntryKind, Outcome, Range
from tests.sequencer.replicated import ReplicatedCluster
from tests.sequencer.test_recovery import disks_of, reply

ORDERED = 7  # the entry of a session and six batches


def mirrored(order: int = 5) -> tuple[ReplicatedCluster, int, int, Range]:
    """A lane with a session and six batches in a cluster with a mirror; (cluster, lane, session, its range)."""
    cluster = ReplicatedCluster(replicas=3)
    cluster.mirror = "somewhere"
    cluster.lose_memory()
    lane = cluster.replicated(order)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, *range(6))
    cluster.run(2)
    return cluster, lane, session, cluster.open_range(lane)


def lose(cluster: ReplicatedCluster, range_: Range, end: int) -> None:
    """Lose all memory except the mirror; disks have the lane up to `end`."""
    cluster.lose_memory(disks_of(range_))
    reply(cluster, range_, end, end, end)
    cluster.run(6)


@pytest.mark.parametrize("order", [2, 5])
def test_the_next_range_opens_where_the_order_ended(order: int) -> None:
    """Ordered entries that are on no disk are a LOST gap with exact bounds, and its size is reported."""
    cluster, lane, session, range_ = mirrored(order)
    cluster.lines(lane, 5, 4, 4)
    lose(cluster, range_, 4)
    sealed, opened = cluster.directory.ranges.all(lane)
    assert (sealed.end, sealed.end_seq) == (4, 6)
    assert (opened.start, opened.start_seq) == (ORDERED + 1, 12)  # a reader at ORDERED learns of the loss
    (saved,) = cluster.directory.mirrored_ends()
    assert (saved.kept, saved.index, saved.batches, saved.records) == (4, ORDERED, 3, 6)
    assert cluster.directory.ranges.ceiling(lane)[0] >= CEILING_AHEAD  # it is never lowered

    again = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, session)
    cluster.run(2)
    outcome, _, _, _, expected, resumed = cluster.brokers[0].answers[again]
    assert (outcome, expected) == (Outcome.OPENED, 3)
    sent = cluster.brokers[0].batches(lane, resumed, 2, 3, 4, 5)
    cluster.run(2)
    outcomes = [cluster.brokers[0].outcome(sent + at) for at in range(4)]
    assert outcomes == [Outcome.DUP_OF, Outcome.ORDERED, Outcome.ORDERED, Outcome.ORDERED]
    assert cluster.brokers[0].answers[sent + 1][1] > ORDERED  # a new position: the old one was promised to no client


def test_handles_continue_from_the_mirror() -> None:
    """A session that was opened in the lost part is gone, but its handle is not given to another session."""
    cluster, lane, _, range_ = mirrored()
    gone = cluster.open(lane)
    cluster.lines(lane, 4, 4, 4)
    lose(cluster, range_, 4)
    request = cluster.brokers[0].request(EntryKind.SESSION_OPEN, lane, gone)
    cluster.run(2)
    assert cluster.brokers[0].outcome(request) == Outcome.UNKNOWN_SESSION
    assert cluster.open(lane) > gone


def test_sessions_continue_unchanged_when_nothing_is_lost() -> None:
    """All ordered entries are on disk: no gap, and no session is fenced."""
    cluster, lane, session, range_ = mirrored()
    cluster.lines(lane, ORDERED, ORDERED, ORDERED)
    lose(cluster, range_, ORDERED)
    assert [(r.start, r.end) for r in cluster.directory.ranges.all(lane)] == [(0, ORDERED), (ORDERED, None)]
    sent = cluster.brokers[0].batches(lane, session, 5, 6)
    cluster.run(2)
    assert [cluster.brokers[0].outcome(sent + at) for at in range(2)] == [Outcome.DUP_OF, Outcome.ORDERED]
    assert cluster.brokers[0].answers[sent + 1][1] == ORDERED


def test_a_second_loss_before_the_lane_is_back() -> None:
    """The mirror of the generation that ordered last counts; when all is done, no generation is remembered."""
    cluster, lane, _, range_ = mirrored()
    cluster.lines(lane, 4, 4, 4)
    cluster.lose_memory(disks_of(range_))  # no replica answers
    cluster.run(4)
    assert [past.generation for past in cluster.directory.earlier_generations()] == [1]
    lose(cluster, range_, 4)
    assert cluster.directory.ranges.all(lane)[-1].start == ORDERED + 1
    assert cluster.directory.earlier_generations() == ()


@pytest.mark.parametrize("trouble", ["gone", "damaged", "behind", "gap"])
def test_an_untrusted_mirror_is_ignored(trouble: str) -> None:
    """It is gone, a published entry is damaged, disks have more, or a later generation had none: ceiling."""
    cluster, lane, _, range_ = mirrored()
    cluster.lines(lane, 4, 4, 4)
    ceiling, newest = cluster.directory.ranges.ceiling(lane), cluster.mirrors[1]
    ring = f"epoch-{cluster.sequencer.epoch}/order-{lane}"
    if trouble == "gone":
        del cluster.mirrors[1]
    elif trouble == "damaged":
        newest.regions[ring].words[(SLOTS_OFFSET + 5 * 64) // 8 + 1] ^= 1
    elif trouble == "behind":
        for name in [name for name in newest.regions if f"-{lane}" in name]:
            del newest.regions[name]
    elif trouble == "gap":
        cluster.lose_memory(disks_of(range_))
        cluster.run(4)
        del cluster.mirrors[2]
    lose(cluster, range_, 4)
    assert (cluster.directory.ranges.all(lane)[-1].start, cluster.directory.mirrored_ends()) == (ceiling[0], [])
    assert bool(cluster.diary.of("mirror has less than disks")) == (trouble == "behind")


@pytest.mark.parametrize("whole", [True, False])
def test_an_epoch_that_the_store_has_forgotten_counts_too(whole: bool) -> None:
    """Its start was not synced when the power failed, and it had ordered. If its entries are missing: the ceiling."""
    cluster, lane, session, range_ = mirrored()
    cluster.lines(lane, 4, 4, 4)
    forgotten = cluster.directory.elections.newest_epochs()
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    cluster.brokers[0].batches(lane, session, 6, 7, 8)
    cluster.run(2)
    ceiling = cluster.directory.ranges.ceiling(lane)
    cluster.directory._decider.decide(lambda plan: plan.put("epochs", forgotten))
    if not whole:
        del cluster.mirrors[1].regions[f"epoch-{cluster.sequencer.epoch}/frontiers"]
    lose(cluster, range_, 4)
    assert cluster.directory.ranges.all(lane)[-1].start == (ORDERED + 3 + 1 if whole else ceiling[0])


def test_a_lane_of_a_broker_ends_where_it_was_written_to() -> None:
    """Its readers get a LOST gap up to the exact end, its publishers the position from which it is lost."""
    cluster = ReplicatedCluster(replicas=3)
    cluster.mirror = "somewhere"
    cluster.lose_memory()
    topic = cluster.directory.topics.create("loose", order=0, replicas=3, durable_on=2)
    lane = cluster.directory.lanes.make(topic, cluster.brokers[0].member)
    assert lane is not None
    ring = create_ring(cluster.writer("broker-0"), lane.region, RegionKind.ORDER, ORDER, 32)
    for _ in range(6):
        if ring.next == 5:
            ring.publish()  # the last entry is not: it counts nevertheless
        ring.write(control_entry(EntryKind.BATCH, 0, 0, count=2, seq=2 * ring.next), 0)
    cluster.wait(0.3)
    range_ = cluster.open_range(lane.lane)
    cluster.lines(lane.lane, 4, 4, 1)
    lose(cluster, range_, 4)
    (sealed,) = cluster.directory.ranges.all(lane.lane)
    (closed,) = cluster.directory.lanes.all()
    assert (sealed.end, sealed.end_seq) == (4, 8)
    assert (closed.kept, closed.end, closed.end_seq) == (4, 7, 12)
    assert [(saved.kept, saved.index, saved.batches) for saved in cluster.directory.mirrored_ends()] == [(4, 6, 2)]


def test_lost_generations_are_bounded() -> None:
    """Of too many, the oldest stay listed without a mirror; those in which nothing could be ordered are not listed."""
    cluster, _, _, range_ = mirrored()
    for _ in range(PAST_GENERATIONS_MAX + 3):
        cluster.lose_memory(disks_of(range_))
        cluster.run(2)
    cluster.directory.begin_generation("elsewhere")
    count = len(cluster.directory.earlier_generations())
    cluster.directory.begin_generation("elsewhere")
    past = cluster.directory.earlier_generations()
    assert len(past) == count == PAST_GENERATIONS_MAX
    assert [bool(one.mirror) for one in past] == [False] + [True] * (PAST_GENERATIONS_MAX - 1)
