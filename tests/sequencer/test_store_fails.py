"""The store is locked, or its disk is full or broken: the leader continues, and work that needs the store waits."""

from __future__ import annotations

from typing import NoReturn

import pytest

from embarcadero.errors import Backpressure, DiskFailed, DiskFull, EmbarcaderoError
from embarcadero.limits import BROKER_SILENT_S, RANGE_RETRY_S
from embarcadero.sequencer.leader.server import _look
from embarcadero.sequencer.ranges import keeper as ranges_module
from embarcadero.types import MemberState, Outcome
from tests.sequencer.replicated import ReplicatedCluster
from tests.sequencer.test_ranges import filled
from tests.sequencer.test_standby import AFTER_US, Standing

ERRORS = [Backpressure, DiskFull, DiskFailed]
READS = ("get", "list", "outline", "transact")


class Failing:
    """A store of which some calls fail for now."""

    def __init__(
        self, cluster: ReplicatedCluster, monkeypatch: pytest.MonkeyPatch, error: type[EmbarcaderoError] = Backpressure
    ) -> None:
        self._store, self._patch, self._error = cluster.directory._decider.store, monkeypatch, error

    def fail(self, *calls: str) -> None:
        def failing(*_: object) -> NoReturn:
            raise self._error("not now", "try again")

        for call in calls:
            self._patch.setattr(self._store, call, failing)

    def heal(self) -> None:
        self._patch.undo()


def _order_one(cluster: ReplicatedCluster, lane: int, session: int, seq: int) -> None:
    number = cluster.brokers[0].batches(lane, session, seq)
    cluster.run(2)
    assert cluster.brokers[0].outcome(number) == Outcome.ORDERED


@pytest.mark.parametrize("error", ERRORS)
def test_a_range_is_sealed_when_the_store_can_be_written_again(
    error: type[EmbarcaderoError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays closing until then; ordering continues, and the journal reports the cause once."""
    cluster = ReplicatedCluster(replicas=4)
    lane, session = filled(cluster)
    cluster.lines(lane, 3, 3, 3)
    store = Failing(cluster, monkeypatch, error)
    cluster.replicas[0].die()
    store.fail("transact")
    cluster.wait(3 * RANGE_RETRY_S)
    found = cluster.word(lane)
    assert found is not None
    assert found[0].closing
    _order_one(cluster, lane, session, 6)
    assert len(cluster.diary.of("store fails")) == 1

    store.heal()
    cluster.wait(3 * RANGE_RETRY_S)
    assert [(r.start, r.end) for r in cluster.directory.ranges.all(lane)] == [(0, 3), (3, None)]
    _order_one(cluster, lane, session, 7)


def test_ceilings_are_raised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing lane requests more positions in every poll until it gets them, even if it stops growing."""
    cluster = ReplicatedCluster()
    lane, session = filled(cluster)
    before = cluster.directory.ranges.ceiling(lane)
    with monkeypatch.context() as larger:
        larger.setattr(ranges_module, "CEILING_AHEAD", 10 * ranges_module.CEILING_AHEAD)
        with monkeypatch.context() as patch:
            Failing(cluster, patch).fail("transact")
            _order_one(cluster, lane, session, 6)
            cluster.wait(1)
        assert cluster.directory.ranges.ceiling(lane) == before
        cluster.wait(1)
    assert cluster.directory.ranges.ceiling(lane)[0] > before[0]


def test_a_silent_broker_is_closed_and_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death can't be recorded, then the ends of its lanes, then its removal: each is tried again."""
    cluster = ReplicatedCluster()
    lane, session = filled(cluster)
    silent = cluster.brokers[1]
    topic = cluster.directory.topics.create("loose", order=0, replicas=0)
    made = cluster.directory.lanes.make(topic, silent.member)
    assert made is not None
    silent.stopped = True

    def state() -> MemberState | None:
        return next((m.state for m in cluster.directory.members.all() if m.handle == silent.member.handle), None)

    with monkeypatch.context() as patch:
        Failing(cluster, patch).fail("transact")
        cluster.wait(2 * BROKER_SILENT_S)
        assert state() is MemberState.LIVE
    cluster.directory.members.mark_dead(silent.member.broker, silent.member.incarnation)
    with monkeypatch.context() as patch:
        Failing(cluster, patch).fail("transact")
        cluster.wait(1)
        assert state() is MemberState.DEAD
        _order_one(cluster, lane, session, 6)
    cluster.wait(1)
    assert [found.open for found in cluster.directory.lanes.all() if found.lane == made.lane] == [False]


def test_a_batch_of_an_undetermined_topic_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store can't be read, an unknown topic may be a new one; afterwards it is found."""
    cluster = ReplicatedCluster()
    new = cluster.directory.topics.create("new", order=5, replicas=3).lane
    with monkeypatch.context() as patch:
        Failing(cluster, patch).fail(*READS)
        number = cluster.brokers[0].batches(new, 0, 0)
        cluster.sequencer.round()
    cluster.wait(0.5)
    assert cluster.brokers[0].outcome(number) == Outcome.BACKPRESSURE
    assert cluster.open(new) == 0


@pytest.mark.parametrize("call", ["ceiling", "handle_ceiling", "reopen", "choose"])
def test_a_lane_comes_back_when_the_store_does(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a clean stop, whichever call of its recovery fails: it starts once, and accepts batches."""
    cluster = ReplicatedCluster()
    lane, session = filled(cluster)
    cluster.lines(lane, 7, 7, 7)
    while not cluster.sequencer.drain():
        cluster.clock.us += 100_000
    with monkeypatch.context() as patch:

        def failing(*_: object, **__: object) -> NoReturn:
            raise Backpressure("not now", "try again")

        part = cluster.directory.replicas if call == "choose" else cluster.directory.ranges
        patch.setattr(part, call, failing)
        cluster.lose_memory()
        cluster.wait(1)
    cluster.wait(3)
    _order_one(cluster, lane, session, 6)


@pytest.mark.parametrize("error", ERRORS)
def test_a_standby_waits_while_the_store_fails(error: type[EmbarcaderoError], monkeypatch: pytest.MonkeyPatch) -> None:
    """No leader is elected, and no process ends; when it becomes possible, one is elected."""
    world = Standing(2)
    world.first()
    world.clocks[1].us += AFTER_US

    def failing(*_: object) -> NoReturn:
        raise error("not now", "try again")

    with monkeypatch.context() as patch:
        patch.setattr(world.directory._decider.store, "transact", failing)
        assert _look(world.candidates[1]) is None
    assert _look(world.candidates[1]) == 2
