"""Open ranges: range words, seals, replacement of replicas, adoption by a successor, and logs of dead brokers."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest

from embarcadero.errors import BadValue
from embarcadero.fabric.layout import PENDING, RangeWord
from embarcadero.fabric.region import durable_region
from embarcadero.limits import CHECKPOINT_S, RANGE_GRACE_S, RANGE_RETRY_S, REPLICA_LAG_S, REPLICA_SILENT_S
from embarcadero.sequencer.ranges import keeper as ranges_module
from embarcadero.types import EntryKind, Outcome, ReplicaRef
from embarcadero.wire.messages import AlterTopic
from embarcadero_proof.bugs.table import injected
from tests.sequencer.cluster import Crash
from tests.sequencer.replicated import ReplicatedCluster


def filled(cluster: ReplicatedCluster, batches: int = 6, **options: int) -> tuple[int, int]:
    """A lane with a session and some batches: entry 0 opens the session, each batch has two records."""
    lane = cluster.replicated(**options)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, *range(batches))
    cluster.run(2)
    return lane, session


def settle(cluster: ReplicatedCluster, seconds: float = 0.3) -> None:
    cluster.wait(seconds)


def test_a_new_topic_gets_a_range_word_and_a_successor_publishes_the_same() -> None:
    """The open range is published once its lane starts, and a takeover adopts it without sealing anything."""
    cluster = ReplicatedCluster()
    lane, _ = filled(cluster)
    number = cluster.open_range(lane).number

    assert cluster.word(lane) == (RangeWord(number, False), 0)

    cluster.lines(lane, 3, 3, 2)
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    cluster.run(3)

    assert cluster.word(lane) == (RangeWord(number, False), 0)
    assert len(cluster.directory.ranges.all(lane)) == 1
    assert cluster.sequencer.ranges.durable(lane) == 3


def test_replicas_are_rung_when_a_lane_grows() -> None:
    """Each replica of the lane's range, and no other process."""
    cluster = ReplicatedCluster(replicas=4)
    lane, session = filled(cluster, replicas=2)
    cluster.bells.rung.clear()
    cluster.brokers[0].batches(lane, session, 6)
    cluster.run()

    expected = {ref.region_prefix for ref in cluster.open_range(lane).replicas}
    assert {who for who in cluster.bells.rung if who.startswith("replica-")} == expected


@pytest.mark.parametrize(("replicas", "durable_on", "rung"), [(3, 2, 2), (3, 1, 3), (4, 2, 4), (2, 2, 2), (1, 1, 1)])
def test_a_lone_batch_wakes_enough_replicas(replicas: int, durable_on: int, rung: int) -> None:
    """The others are woken by the first of these, provided that any durable_on replicas include one of these."""
    cluster = ReplicatedCluster(replicas=4)
    lane, session = filled(cluster, replicas=replicas, durable_on=durable_on)
    made = np.zeros(1, dtype=PENDING)
    made["kind"], made["lane"], made["session"], made["session_seq"] = EntryKind.BATCH, lane, session, 6
    made["count"] = 1
    cluster.bells.rung.clear()
    cluster.brokers[0].publish(made)
    cluster.run()

    expected = [ref.region_prefix for ref in cluster.open_range(lane).replicas[:rung]]
    assert [who for who in cluster.bells.rung if who.startswith("replica-")] == expected


def test_a_broker_whose_ack_waits_for_one_disk_is_rung() -> None:
    """While that disk is busy it passes on the outcome, and has only the ack to send then."""
    cluster = ReplicatedCluster(replicas=1)
    lane, session = filled(cluster, replicas=1, durable_on=1)
    broker, made = cluster.brokers[0], np.zeros(1, dtype=PENDING)
    made["kind"], made["lane"], made["session"], made["session_seq"] = EntryKind.BATCH, lane, session, 6
    made["count"], made["waits"] = 1, True
    cluster.bells.rung.clear()
    broker.publish(made)
    cluster.run()

    assert [who.split("-")[0] for who in cluster.bells.rung] == ["replica", "broker"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_broker_whose_ack_waits_for_disks_is_not_rung_for_the_result(waits: bool) -> None:
    """A lone batch: its broker is rung if the result lets an ack out; otherwise a replica rings there, later."""
    cluster = ReplicatedCluster(replicas=2)
    lane, session = filled(cluster, replicas=2)
    broker, made = cluster.brokers[0], np.zeros(1, dtype=PENDING)
    made["kind"], made["lane"], made["session"], made["session_seq"] = EntryKind.BATCH, lane, session, 6
    made["count"], made["waits"] = 1, waits
    cluster.bells.rung.clear()
    number = broker.publish(made)
    cluster.run()

    assert broker.outcome(number) == Outcome.ORDERED
    assert (broker.member.region_prefix in cluster.bells.rung) is not waits
    assert any(who.startswith("replica-") for who in cluster.bells.rung)


def test_a_range_is_sealed_at_the_a_th_largest_line_of_all_replicas() -> None:
    """Not at the frontier, the largest or the smallest line; seq and index of the next range are those at the end."""
    cluster = ReplicatedCluster(replicas=4)
    lane, _ = filled(cluster)
    before = cluster.open_range(lane)
    cluster.lines(lane, 6, 4, 1)
    victim = next(r for r in cluster.replicas if r.member.ref == before.replicas[2])
    victim.die()
    settle(cluster)

    sealed, opened = cluster.directory.ranges.all(lane)
    assert (sealed.end, sealed.end_seq) == (4, 6)  # entry 0 has no records, entries 1 to 3 have two each
    assert (opened.start, opened.start_seq, opened.number) == (4, 6, before.number + 1)
    assert set(before.replicas[:2]) < set(opened.replicas)
    assert victim.member.ref not in opened.replicas
    assert len(opened.replicas) == 3
    assert cluster.word(lane) == (RangeWord(opened.number, False), 0)
    assert cluster.sequencer.counters.seals == 1


def test_a_seal_at_the_frontier_is_detected() -> None:
    """The injected bug: the end is where the order ends, though only one replica has it."""
    cluster = ReplicatedCluster(replicas=4)
    lane, _ = filled(cluster)
    cluster.lines(lane, 6, 4, 1)
    with injected("seal-at-frontier"):
        cluster.replicas[0].die()
        settle(cluster)

    assert cluster.directory.ranges.all(lane)[0].end == 7


def seal_while_counting(seed: int) -> tuple[int, int]:
    """Seal while lines grow and a counter runs, before each primitive of the sealer. (end, most that was counted)"""
    cluster = ReplicatedCluster(seed, replicas=4)
    lane, _ = filled(cluster)
    range_ = cluster.open_range(lane)
    cluster.lines(lane, 1, 1, 1)
    rest = [r for r in cluster.replicas if r.member.ref in range_.replicas]
    rest[2].die()
    counter, best, step = cluster.counter(), [0], [0]

    def act() -> None:
        step[0] += 1
        if step[0] % 7 == 0 and rest[0].table.value((lane, range_.number)) < 7:
            for replica in rest[:2]:
                replica.table.set((lane, range_.number), replica.table.value((lane, range_.number)) + 1)
        if step[0] % 3 == seed % 3:
            best[0] = max(best[0], counter.through(lane))

    cluster.at_each_primitive(act, cluster.host)
    settle(cluster, 0.5)
    cluster.memory.interrupt = None
    end = cluster.directory.ranges.all(lane)[0].end
    assert end is not None
    return end, best[0]


def test_counted_positions_are_never_above_the_end() -> None:
    """At any moment, a counter's number is at or below the end of the sealed range."""
    found = [seal_while_counting(seed) for seed in range(12)]

    assert all(counted <= end for end, counted in found)
    assert any(counted > 1 for _, counted in found)


def test_a_range_word_that_closes_after_the_lines_were_read_is_detected() -> None:
    """The injected bug: read lines first, then publish "closing"."""
    keeper, close = ranges_module.RangeKeeper, ranges_module.RangeKeeper._close
    assert close is keeper._close

    def late(self: ranges_module.RangeKeeper, kept: ranges_module.LaneRange) -> tuple[int, int | None]:
        end = ranges_module.durable_through(kept.range_, self.lines.load(kept.range_))
        close(self, kept)
        return end, kept.seq_at(end)

    with patch.object(keeper, "_close", late):
        found = [seal_while_counting(seed) for seed in range(12)]

    assert any(counted > end for end, counted in found)


def test_nothing_is_sealed_while_no_better_set_exists() -> None:
    """Two of three are gone and two are needed: the range waits, reports it once, and continues when one comes back."""
    cluster = ReplicatedCluster()
    lane, session = filled(cluster)
    cluster.lines(lane, 3, 3, 3)
    for replica in cluster.replicas[:2]:
        replica.die()
    settle(cluster, 3)

    assert len(cluster.directory.ranges.all(lane)) == 1
    assert len(cluster.diary.of("range waits")) == 1
    number = cluster.brokers[0].batches(lane, session, 6)
    cluster.run(2)
    assert cluster.brokers[0].outcome(number) == Outcome.ORDERED

    cluster.replica(0)
    settle(cluster)
    sealed, opened = cluster.directory.ranges.all(lane)
    assert sealed.end == 3
    assert {ref.replica for ref in opened.replicas} == {0, 2}


def test_a_range_with_too_few_replicas_is_widened_after_a_delay() -> None:
    """One dies and there is no spare.

    After a grace period two continue; when it is back there are three again, once.
    """
    cluster = ReplicatedCluster()
    lane, _ = filled(cluster)
    cluster.lines(lane, 3, 3, 3)
    cluster.replicas[1].die()
    settle(cluster, RANGE_GRACE_S / 2)
    assert len(cluster.directory.ranges.all(lane)) == 1
    settle(cluster, RANGE_GRACE_S)
    assert [len(r.replicas) for r in cluster.directory.ranges.all(lane)] == [3, 2]

    cluster.replica(1)
    settle(cluster, 3 * RANGE_GRACE_S)
    assert [len(r.replicas) for r in cluster.directory.ranges.all(lane)] == [3, 2, 3]


def test_a_new_incarnation_replaces_the_old_one() -> None:
    """A restarted replica is a new replica to a range: one seal, no narrow range in between."""
    cluster = ReplicatedCluster()
    lane, _ = filled(cluster)
    cluster.lines(lane, 3, 2, 3)
    cluster.replica(1)
    settle(cluster)

    sealed, opened = cluster.directory.ranges.all(lane)
    assert sealed.end == 3
    assert {(ref.replica, ref.incarnation) for ref in opened.replicas} == {(0, 1), (1, 2), (2, 1)}


def _with_lines(cluster: ReplicatedCluster) -> set[str]:
    """Replica incarnations whose durable lines exist."""
    return {name.split("/")[0] for name in cluster.memory.host("looker").names() if name.endswith("/durable")}


def test_a_replica_that_dies_repeatedly_leaves_no_lines_behind() -> None:
    """Only those of existing incarnations, or of those that open ranges name, keep their memory."""
    cluster = ReplicatedCluster()
    lane, _ = filled(cluster)
    cluster.lines(lane, 3, 2, 3)
    for _ in range(4):
        cluster.replica(1)
        settle(cluster, 4 * RANGE_RETRY_S)
    assert _with_lines(cluster) == {"replica-0.1", "replica-1.5", "replica-2.1"}
    assert _with_lines(cluster) == {ref.region_prefix for ref in cluster.open_range(lane).replicas}


def test_lines_named_by_an_open_range_stay() -> None:
    """They cannot be replaced, as their positions were counted.

    Once the range continues on others, they are removed.
    """
    cluster = ReplicatedCluster(replicas=2)
    lane, _ = filled(cluster, replicas=2)
    cluster.lines(lane, 3, 3)
    for replica in list(cluster.replicas):
        replica.die()
    settle(cluster)
    cluster.directory.replicas.remove(0, force=True)  # the store no longer lists it
    settle(cluster)
    assert _with_lines(cluster) == {"replica-0.1", "replica-1.1"}
    for number in range(2):
        cluster.replica(number)
    settle(cluster, 4 * RANGE_RETRY_S)
    assert cluster.open_range(lane).start == 3
    assert _with_lines(cluster) == {"replica-0.2", "replica-1.2"}


def test_a_replica_that_comes_while_old_regions_are_swept_keeps_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its region is found, and so is its name in the store."""
    cluster = ReplicatedCluster()
    cluster.new_sequencer()
    fabric = cluster.sequencer.leadership.fabric
    names = fabric.names

    def late_names() -> list[str]:
        cluster.replica(3)
        return names()

    monkeypatch.setattr(fabric, "names", late_names)
    settle(cluster, 0.5)
    assert "replica-3.1" in _with_lines(cluster)


@pytest.mark.parametrize("durable_on", [2, 3])
def test_ranges_that_can_wait_change_one_at_a_time(durable_on: int) -> None:
    """The next lane once all replicas have started the previous range, or are late. Stuck lanes: immediately."""
    cluster = ReplicatedCluster()
    lanes = [filled(cluster, durable_on=durable_on)[0] for _ in range(3)]
    for lane in lanes:
        cluster.lines(lane, 3, 3, 3)
    cluster.replica(1)

    def changed() -> list[int]:
        return [lane for lane in lanes if len(cluster.directory.ranges.all(lane)) == 2]

    settle(cluster, RANGE_RETRY_S / 2)
    assert len(changed()) == (1 if durable_on == 2 else 3)
    if durable_on == 2:
        cluster.lines(changed()[0], 3, 3, 3)
        settle(cluster, RANGE_RETRY_S / 2)
        assert len(changed()) == 2
        settle(cluster, RANGE_RETRY_S)
        assert len(changed()) == 3


@pytest.mark.parametrize(
    ("change", "copies", "durable_on"),
    [({"durable_on": 3}, 3, 3), ({"durable_on": 1}, 3, 1), ({"replicas": 2}, 2, 2), ({"replicas": 4}, 4, 3)],
)
def test_altered_copies_take_effect(change: dict[str, int], copies: int, durable_on: int) -> None:
    """The open range is sealed at its durable end, and the next one has the requested copies."""
    cluster = ReplicatedCluster(replicas=4)
    lane, _ = filled(cluster)
    cluster.lines(lane, 5, 5, 5)
    cluster.directory.topics.alter(AlterTopic(name="t0", **change))
    settle(cluster, 2 * RANGE_GRACE_S)

    assert [r.end for r in cluster.directory.ranges.all(lane)] == [5, None]
    opened = cluster.open_range(lane)
    assert (len(opened.replicas), opened.durable_on) == (copies, durable_on)
    settle(cluster, 2 * RANGE_GRACE_S)
    assert cluster.open_range(lane) == opened


@pytest.mark.parametrize("change", [{"durable_on": 3}, {"durable_on": 1}, {"replicas": 2, "durable_on": 1}])
def test_copies_accepted_while_a_replica_is_dead_take_effect(change: dict[str, int]) -> None:
    """Impossible settings are refused: the range does not differ from the topic for long."""
    cluster = ReplicatedCluster(replicas=3)
    lane, _ = filled(cluster)
    cluster.lines(lane, 5, 5, 5)
    cluster.replicas[2].die()
    settle(cluster, 2 * RANGE_GRACE_S)
    assert (len(cluster.open_range(lane).replicas), cluster.open_range(lane).durable_on) == (2, 2)
    with suppress(BadValue):
        cluster.directory.topics.alter(AlterTopic(name="t0", **change))
    settle(cluster, 2 * RANGE_GRACE_S)

    assert cluster.open_range(lane).durable_on == cluster.directory.topics.get("t0").durable_on


@pytest.mark.parametrize("trouble", ["silent", "unhealthy", "draining"])
def test_a_replica_in_trouble_is_replaced(trouble: str) -> None:
    """It sends no heartbeat by the local clock, its disk is full, or it is being drained."""
    cluster = ReplicatedCluster(replicas=4)
    lane, _ = filled(cluster)
    cluster.lines(lane, 5, 5, 5)
    victim = next(r for r in cluster.replicas if r.member.ref in cluster.open_range(lane).replicas)
    if trouble == "silent":
        victim.alive = False
        settle(cluster, REPLICA_SILENT_S / 2)
        assert len(cluster.directory.ranges.all(lane)) == 1
        settle(cluster, REPLICA_SILENT_S)
    elif trouble == "unhealthy":
        victim.table.health.restart(8)  # it repairs a copy, which is no reason to replace it
        settle(cluster)
        assert len(cluster.directory.ranges.all(lane)) == 1
        victim.table.health.restart(1)
    else:
        cluster.directory.replicas.drain(victim.number)
    settle(cluster)

    assert [r.end for r in cluster.directory.ranges.all(lane)] == [5, None]
    assert victim.member.ref not in cluster.open_range(lane).replicas
    assert trouble in str(cluster.diary.of("range sealed")[0]["why"])


def test_a_replica_that_lags_is_replaced_while_others_keep_up() -> None:
    """It lags by more than half a ring for a while; then it gets no range of this lane for a while."""
    cluster = ReplicatedCluster(replicas=4)
    lane, session = filled(cluster)
    late = cluster.open_range(lane).replicas[2]
    sent = 6
    for _ in range(int(REPLICA_LAG_S / 0.5) + 4):
        cluster.brokers[0].batches(lane, session, *range(sent, sent + 4))
        sent += 4
        settle(cluster, 0.5)
        if late not in cluster.open_range(lane).replicas:
            break
        end = cluster.sequencer.lanes[lane].order.next_index
        cluster.lines(lane, end, end, 1)

    assert late not in cluster.open_range(lane).replicas
    assert "late" in str(cluster.diary.of("range sealed")[0]["why"])


def test_if_all_replicas_lag_none_is_replaced() -> None:
    """A disk that is slow for all of them is no reason to move."""
    cluster = ReplicatedCluster(replicas=4)
    lane, session = filled(cluster)
    cluster.brokers[0].batches(lane, session, *range(6, 14))
    cluster.run(2)
    cluster.brokers[0].batches(lane, session, *range(14, 20))
    settle(cluster, 2 * REPLICA_LAG_S)

    assert len(cluster.directory.ranges.all(lane)) == 1


@pytest.mark.parametrize("number", range(1, 40))
def test_a_crash_in_the_middle_of_a_seal(number: int) -> None:
    """Wherever the sealer dies, its successor continues with the state of the store, and the chain has no hole."""
    cluster = ReplicatedCluster(number, replicas=4)
    lane, session = filled(cluster)
    cluster.lines(lane, 5, 4, 1)
    cluster.replicas[2].die()

    def crash() -> None:
        raise Crash

    cluster.at_primitive(number, crash)
    try:
        settle(cluster)
    except Crash:
        cluster.memory.crash(cluster.host)
        cluster.new_sequencer()
    cluster.memory.interrupt = None
    settle(cluster)
    chain = cluster.directory.ranges.all(lane)
    assert [(r.start, r.end) for r in chain] == [(0, 4), (4, None)]
    assert cluster.word(lane) == (RangeWord(chain[-1].number, False), 0)
    sent = cluster.brokers[0].batches(lane, session, 6)
    cluster.run(3)
    assert cluster.brokers[0].outcome(sent) == Outcome.ORDERED


def test_a_deposed_sequencer_seals_nothing() -> None:
    """Its transaction is refused: the store knows of a later epoch."""
    cluster = ReplicatedCluster(replicas=4)
    lane, _ = filled(cluster)
    cluster.lines(lane, 5, 4, 1)
    zombie = cluster.sequencer
    cluster.new_sequencer()
    cluster.replicas[0].die()
    zombie.ranges.look(cluster.clock.us + 10_000_000)

    assert len(cluster.directory.ranges.all(lane)) == 1


def test_an_idle_lane_gets_a_last_checkpoint() -> None:
    """Retention drops only entries that a checkpoint covers: a lane that grew once and is idle is covered, too."""
    cluster = ReplicatedCluster()
    lane, _ = filled(cluster)
    saved = cluster.sequencer.lanes[lane].order.counters
    cluster.wait(CHECKPOINT_S + 0.5, step=0.25)
    count = saved.checkpoints
    assert cluster.sequencer.lanes[lane]._checkpoint.index == cluster.sequencer.lanes[lane].order.next_index
    cluster.wait(2 * CHECKPOINT_S, step=0.25)
    assert saved.checkpoints == count, "and no more"


def test_lines_named_by_an_open_range_stay_even_if_their_replica_is_unknown() -> None:
    """The disk of an incarnation that came and went unnoticed is unknown; its synced positions count nevertheless."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    named = cluster.open_range(lane).replicas[0]
    keeper = cluster.sequencer.ranges
    keeper._gone = {ReplicaRef(replica=named.replica, incarnation=named.incarnation, disk="")}
    keeper._remove_lines()
    assert cluster.memory.host("looker").exists(durable_region(named))
    assert keeper._gone
    cluster.directory.topics.delete(cluster.directory.topics.all()[0].name)
    keeper._remove_lines()
    assert not cluster.memory.host("looker").exists(durable_region(named))
    assert not keeper._gone
