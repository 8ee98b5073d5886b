"""Each injected bug of the sequencer is detected by a check that holds without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embarcadero.types import Outcome
from embarcadero_proof.bugs.table import injected
from tests.sequencer.cluster import Cluster


def duplicates_have_one_position() -> None:
    """Sending again, in a later round, through another broker, stores nothing."""
    cluster = Cluster()
    for order in (2, 5):
        lane = cluster.topic(order)
        session = cluster.open(lane)
        for broker in cluster.brokers:
            broker.batches(lane, session, 0, 1, 2)
            cluster.run()
        assert len(cluster.stored(lane)) == 3


def waiting_batches_are_ordered() -> None:
    """Batches in the reorder buffer are in the log once their gap is filled."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 1, 2)
    cluster.run()
    cluster.brokers[1].batches(lane, session, 0)
    cluster.run()
    assert [seq for _, seq in cluster.stored(lane)] == [0, 1, 2]


def nothing_invalid_is_below_the_frontier() -> None:
    """A reader finds valid entries up to the frontier at any moment."""
    for moment in range(1, 30):
        cluster = Cluster()
        lane = cluster.topic(5)
        session = cluster.open(lane)
        cluster.brokers[0].batches(lane, session, *range(4))
        cluster.at_primitive(moment, cluster.read)
        cluster.run()


def pending_entries_stay_until_they_are_recorded() -> None:
    """However quickly a broker reuses the slots it is given, every batch is ordered."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, (broker, _) = cluster.open(lane), cluster.brokers
    sent = 0
    for _ in range(12):
        count = min(broker.room, 8)
        broker.batches(lane, session, *range(sent, sent + count))
        sent += count
        cluster.run()
    cluster.settle()
    assert not cluster.sequencer.problems
    assert len(cluster.stored(lane)) == sent
    assert {broker.answers[number][0] for number in range(1, sent + 1)} == {Outcome.ORDERED}


CHECKS: dict[str, Callable[[], None]] = {
    "dedupe-off": duplicates_have_one_position,
    "held-forgotten": waiting_batches_are_ordered,
    "frontier-before-entries": nothing_invalid_is_below_the_frontier,
    "slot-reused-early": pending_entries_stay_until_they_are_recorded,
}


@pytest.mark.parametrize("plant", CHECKS)
def test_an_injected_bug_is_detected(plant: str) -> None:
    """The check holds; with the bug injected it does not."""
    CHECKS[plant]()

    with injected(plant), pytest.raises((AssertionError, KeyError)):
        CHECKS[plant]()
