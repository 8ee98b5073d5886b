"""Rounds over the fabric: entries in, results out, and the removal of brokers and topics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from embarcadero.config import FabricSizes
from embarcadero.env import Env
from embarcadero.fabric.layout import (
    ORDER,
    PENDING,
    SLOTS_OFFSET,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
)
from embarcadero.fabric.lines import create_ring
from embarcadero.fabric.region import Shape
from embarcadero.limits import BROKER_SILENT_S, CONTROLS_PER_ROUND_MAX
from embarcadero.sequencer.leader.sequencer import Sequencer, lead
from embarcadero.sequencer.leader.server import serve_sequencer
from embarcadero.types import NO_SESSION, EntryKind, MemberState, Outcome
from embarcadero.wire.messages import AlterTopic
from embarcadero_proof.sim.incoherent import IncoherentHost
from tests.sequencer.cluster import SIZES, STEP_US, Broker, Cluster, Views

BATCH, OPEN, CLOSE = EntryKind.BATCH, EntryKind.SESSION_OPEN, EntryKind.SESSION_CLOSE


def sequencer_word(cluster: Cluster, line: int) -> int:
    """A word of the sequencer's frontiers, as another process reads it."""
    views = Views(cluster.memory.host("stranger"))
    return views.word(f"epoch-{cluster.sequencer.epoch}/frontiers", frontier_offset(line))


def test_altered_topics_are_followed() -> None:
    """A sequencer learns of a change from the store, and applies it to waiting batches."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 1)
    cluster.run()
    cluster.directory.topics.alter(AlterTopic(name="t0", on_gap="skip", gap_timeout_ms=1))
    cluster.run(200)

    assert cluster.stored(lane) == [(session, 1)]


# --- in and out -------------------------------------------------------------------------------------------------------
def test_a_request_never_waits_for_other_entries_to_gather() -> None:
    """The client of a session request waits for this very result; the hash of a name is not a depth."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, *range(10), low=0)
    cluster.run()
    assert cluster.sequencer.depth == 0  # of the first of them
    cluster.brokers[0].batches(lane, session, *range(10, 20), low=4)
    cluster.run()
    assert cluster.sequencer.depth == 6

    cluster.brokers[0].request(OPEN, lane, name=1 << 40)
    cluster.run()
    assert cluster.sequencer.depth == 0


def test_a_session_is_ordered_over_several_brokers() -> None:
    """Batches of one session through two brokers form one gap-free sequence, each answered at its own broker."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    one, two = cluster.brokers
    first, second = one.batches(lane, session, 0, 2, 4), two.batches(lane, session, 1, 3)
    cluster.run()

    assert cluster.stored(lane) == [(session, seq) for seq in range(5)]
    assert [one.answers[first + n][1] for n in range(3)] == [1, 3, 5]
    assert [two.answers[second + n][1] for n in range(2)] == [2, 4]


def test_lanes_are_ordered_separately() -> None:
    """Entries of several topics in one ring go to their lanes, each with its own positions."""
    cluster = Cluster()
    lanes = [cluster.topic(5), cluster.topic(2)]
    sessions = [cluster.open(lane) for lane in lanes]
    for seq in range(3):
        for lane, session in zip(lanes, sessions, strict=True):
            cluster.brokers[seq % 2].batches(lane, session, seq)
    cluster.run()

    for lane, session in zip(lanes, sessions, strict=True):
        assert sorted(cluster.stored(lane)) == [(session, seq) for seq in range(3)]
        assert cluster.entries(lane)["seq"].tolist() == [0, 0, 2, 4]


def test_rings_wrap_and_positions_stay() -> None:
    """Many laps of every ring, in rounds of all sizes, with arbitrary cache behavior."""
    cluster = Cluster(seed=3)
    lane = cluster.topic(5)
    session, sent = cluster.open(lane), 0
    while sent < 300:
        broker = cluster.brokers[cluster.rng.randrange(2)]
        count = min(cluster.rng.randint(1, 12), broker.room)
        broker.batches(lane, session, *range(sent, sent + count))
        sent += count
        cluster.run(churn=2)
    cluster.settle()

    assert cluster.stored(lane) == [(session, seq) for seq in range(sent)]


def test_the_lane_line_contains_the_end() -> None:
    """The frontiers region has the ordered index and the next seq of each lane."""
    cluster = Cluster()
    lane = cluster.topic(2)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 0, 1)
    cluster.run()
    views = Views(cluster.memory.host("stranger"))
    name, line = f"epoch-{cluster.sequencer.epoch}/frontiers", frontier_offset(SequencerLine.LANES + lane)

    assert (views.word(name, line), views.word(name, line + 8)) == (3, 4)


def test_an_answered_position_can_be_read_immediately() -> None:
    """At any moment of a round when a broker relays a result, the order already reaches its position."""
    answered_early = 0
    for moment in range(1, 40):
        cluster = Cluster(brokers=1)
        lane = cluster.topic(5)
        session, broker = cluster.open(lane), cluster.brokers[0]
        first = broker.batches(lane, session, 0, 1)

        def look(cluster: Cluster = cluster, broker: Broker = broker) -> None:
            broker.poll()
            cluster.read()

        cluster.at_primitive(moment, look)
        cluster.sequencer.round()
        for number in (first, first + 1):
            if number in broker.answers:
                answered_early += 1
                assert broker.answers[number][1] in cluster.log[lane]

    assert answered_early


def test_requests_do_not_overtake_batches_of_their_session() -> None:
    """A close in the middle of a ring: earlier batches are stored, later ones are refused."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, other = cluster.open(lane), cluster.open(lane)
    broker = cluster.brokers[0]
    before = broker.batches(lane, session, 0, 1)
    broker.batches(lane, other, 0)
    close = broker.request(CLOSE, lane, session)
    after = broker.batches(lane, session, 2)
    cluster.run()

    assert broker.outcome(before + 1) == Outcome.ORDERED
    assert broker.outcome(close) == Outcome.CLOSED
    assert broker.outcome(after) == Outcome.UNKNOWN_SESSION
    assert cluster.stored(lane).count((other, 0)) == 1


def test_a_name_is_taken_after_the_batches_before_it() -> None:
    """Opening a name in the same ring fences its holder after the batches that came before."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, broker = cluster.open(lane, name=9), cluster.brokers[0]
    broker.batches(lane, session, 0)
    opened = broker.request(OPEN, lane, name=9)
    late = broker.batches(lane, session, 1)
    cluster.run()

    assert broker.answers[opened][4] == 1
    assert broker.outcome(late) == Outcome.FENCED


def test_a_round_handles_a_bounded_number_of_requests() -> None:
    """Requests cost more than batches, so a round handles a few of them; all are answered in the end."""
    sizes = FabricSizes(
        pending_slots=1024, order_slots=2048, held_slots=8, log_bytes=4096, chunk_bytes=1024, sessions=512,
        round_entries=512,
    )  # fmt: skip
    cluster = Cluster(sizes=sizes)
    lane = cluster.topic(5)
    asks = np.zeros(200, dtype=PENDING)
    asks["kind"], asks["lane"], asks["session"] = OPEN, lane, NO_SESSION
    firsts = [broker.publish(asks) for broker in cluster.brokers]

    assert cluster.run() == CONTROLS_PER_ROUND_MAX
    assert cluster.sequencer.more
    cluster.settle()
    assert not cluster.sequencer.more
    for first, broker in zip(firsts, cluster.brokers, strict=True):
        assert [broker.outcome(first + n) for n in range(200)] == [Outcome.OPENED] * 200


def test_a_broker_that_does_not_read_is_not_served_beyond_its_space() -> None:
    """The results ring never overflows; the others continue; when the broker reads again it gets everything."""
    cluster = Cluster()
    lane = cluster.topic(2)
    lazy, busy = cluster.brokers
    slow, quick = cluster.open(lane), cluster.open(lane, broker=1)
    lazy.reading = False
    sent = 0
    for _ in range(40):
        for _ in range(min(lazy.room, 8)):
            lazy.batches(lane, slow, sent, low=max(0, sent - 200))
            sent += 1
        cluster.run()
    before = len(busy.answers)
    busy.batches(lane, quick, 0)
    cluster.run()

    assert lazy.room == 0
    assert len(busy.answers) == before + 1
    lazy.reading = True
    cluster.run(20)
    assert [lazy.outcome(number) for number in range(1, sent + 1)] == [Outcome.ORDERED] * sent


# --- waiting ----------------------------------------------------------------------------------------------------------
def test_at_the_bound_the_oldest_gap_of_any_topic_is_fenced() -> None:
    """Waiting batches of all topics share a bound; at it, only the session that waits longest is fenced."""
    cluster = Cluster()
    first, second = cluster.topic(5), cluster.topic(5)
    oldest, newer, newest = cluster.open(first), cluster.open(second), cluster.open(second)
    one = cluster.brokers[0]
    waiting = one.batches(first, oldest, 1, 2, 3)
    cluster.run()
    kept = one.batches(second, newer, 1, 2, 3)
    cluster.run()
    last = one.batches(second, newest, 1, 2, 3)
    cluster.run()

    assert [one.outcome(waiting + n) for n in range(3)] == [Outcome.FENCED] * 3
    assert [one.outcome(n) for n in (*range(kept, kept + 3), *range(last, last + 3))] == [None] * 6
    one.batches(second, newer, 0)
    cluster.run()
    assert one.outcome(kept) == Outcome.ORDERED


def test_a_gap_that_closes_in_the_same_round_is_not_the_oldest() -> None:
    """When space is needed while the longest wait ends, the next session is fenced. The served one stays open."""
    cluster = Cluster()
    lane = cluster.topic(5)
    served, other, newest = cluster.open(lane), cluster.open(lane), cluster.open(lane)
    one = cluster.brokers[0]
    one.batches(lane, served, 1, 2, 3)
    cluster.run()
    refused = one.batches(lane, other, 1, 2, 3)
    cluster.run()
    closing = one.batches(lane, served, 0)
    waiting = one.batches(lane, newest, 1, 2, 3, 4, 5, 6)
    cluster.run()

    assert one.outcome(closing) == Outcome.ORDERED
    assert [one.outcome(refused + n) for n in range(3)] == [Outcome.FENCED] * 3
    assert [one.outcome(waiting + n) for n in range(6)] == [None] * 6
    still = one.batches(lane, served, 4)
    cluster.run()
    assert one.outcome(still) == Outcome.ORDERED


def test_a_gap_does_not_block_its_ring() -> None:
    """While a session waits, its broker's pending slots are free and all others continue."""
    cluster = Cluster()
    lane = cluster.topic(5)
    stuck, other = cluster.open(lane), cluster.open(lane)
    broker = cluster.brokers[0]
    broker.batches(lane, stuck, 1, 2)
    cluster.run()

    assert broker.room == broker.ring.slots
    broker.batches(lane, other, *range(8))
    cluster.run()
    assert (other, 7) in cluster.stored(lane)


def test_the_next_deadline_is_when_a_gap_times_out() -> None:
    """Without gaps only the expiry of sessions is due; with a gap, its timeout is, and a round at that time ends it."""
    cluster = Cluster()
    assert cluster.sequencer.next_deadline_us() is None
    lane = cluster.topic(5, gap_timeout_ms=500)
    session, broker = cluster.open(lane), cluster.brokers[0]
    waiting = broker.batches(lane, session, 1)
    cluster.run()
    deadline = cluster.sequencer.next_deadline_us()

    assert deadline == cluster.clock.us + 500_000
    cluster.clock.us = deadline - STEP_US
    cluster.run()
    assert broker.outcome(waiting) == Outcome.FENCED


# --- topics -----------------------------------------------------------------------------------------------------------
def test_an_unknown_lane_is_answered() -> None:
    """Entries of a lane without a topic are refused, also when the number is absurd."""
    cluster = Cluster()
    broker = cluster.brokers[0]
    numbers = [broker.batches(lane, 0, 0) for lane in (7, 4_000_000_000)]
    cluster.run()

    assert [broker.outcome(number) for number in numbers] == [Outcome.UNKNOWN_TOPIC] * 2


def test_a_deleted_topic_loses_its_regions_and_its_waiting_batches_are_answered() -> None:
    """Its regions are removed, waiting batches are answered, later ones refused; other topics are not touched."""
    cluster = Cluster()
    lane, other = cluster.topic(5), cluster.topic(5)
    session, kept = cluster.open(lane), cluster.open(other)
    broker = cluster.brokers[0]
    waiting = broker.batches(lane, session, 1)
    also = broker.batches(other, kept, 1)
    cluster.run()
    cluster.directory.topics.delete("t0")
    late = broker.batches(lane, session, 0)
    cluster.run()

    assert broker.outcome(waiting) == broker.outcome(late) == Outcome.UNKNOWN_TOPIC
    assert broker.outcome(also) is None
    names = cluster.memory.host("x").names()
    assert not [name for name in names if name.endswith((f"order-{lane}", f"checkpoint-{lane}"))]
    assert [name for name in names if name.endswith(f"order-{other}")]


# --- brokers ----------------------------------------------------------------------------------------------------------
def test_all_valid_entries_of_a_dead_broker_are_ordered() -> None:
    """It is marked closing; entries beyond its frontier count too; it gets no results; its successor is attached."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, dead = cluster.open(lane), cluster.brokers[0]
    first = dead.batches(lane, session, 0, 1)
    entries = np.zeros(2, dtype=PENDING)
    entries["kind"], entries["lane"], entries["session"], entries["session_seq"] = BATCH, lane, session, [2, 3]
    entries["count"] = 1
    dead.ring.write(entries, 0)  # flushed, but not published
    cluster.brokers[0] = Broker(cluster, 0, "broker-0-again")
    cluster.run()
    dead.poll()

    assert cluster.stored(lane) == [(session, sequence) for sequence in range(4)]
    assert dead.closing()
    assert dead.outcome(first) is None
    number = cluster.brokers[0].batches(lane, session, 3, 4, crc=0)
    cluster.run()
    assert [cluster.brokers[0].outcome(number + n) for n in (0, 1)] == [Outcome.DUP_OF, Outcome.ORDERED]


def test_nothing_more_is_taken_from_a_closed_broker() -> None:
    """Entries that a dead incarnation writes after its end are not ordered."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, dead = cluster.open(lane), cluster.brokers[0]
    cluster.directory.members.mark_dead(0, dead.member.incarnation)
    cluster.run(2)
    dead.batches(lane, session, 0)
    cluster.run(2)

    assert cluster.stored(lane) == []


def test_a_dead_broker_takes_its_connections_with_it() -> None:
    """Sessions that were connected only there have a second to close their gaps."""
    cluster = Cluster()
    lane = cluster.topic(5, gap_timeout_ms=30_000)
    session = cluster.open(lane)
    both = cluster.open(lane)
    cluster.brokers[1].request(EntryKind.SESSION_ATTACH, lane, both)
    number = cluster.brokers[1].batches(lane, session, 1)
    other = cluster.brokers[1].batches(lane, both, 1)
    cluster.run()
    cluster.directory.members.mark_dead(0, cluster.brokers[0].member.incarnation)
    cluster.run(2)
    cluster.clock.us += 1_000_000
    cluster.run()

    assert cluster.brokers[1].outcome(number) == Outcome.FENCED
    assert cluster.brokers[1].outcome(other) is None


def test_a_dead_broker_is_closed_though_every_round_is_one_batch() -> None:
    """A publisher that waits for each result keeps the sequencer busy, and no one else waits."""
    cluster = Cluster()
    lane = cluster.topic(5)
    dead = cluster.sequencer.brokers.sources[cluster.brokers[0].member.handle]
    session = cluster.open(lane)
    cluster.directory.members.mark_dead(0, cluster.brokers[0].member.incarnation)
    for sequence in range(16):
        cluster.brokers[1].batches(lane, session, sequence)
        assert cluster.run() == 1

    assert dead.closed
    assert cluster.stored(lane) == [(session, sequence) for sequence in range(16)]


def test_a_broken_ring_closes_its_broker_and_no_other() -> None:
    """An entry below the frontier that is not valid: earlier entries count, the broker is closed and named."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, (bad, good) = cluster.open(lane), cluster.brokers
    first = bad.ring.next
    entries = np.zeros(3, dtype=PENDING)
    entries["kind"], entries["lane"], entries["session"], entries["session_seq"] = BATCH, lane, session, [0, 1, 2]
    bad.ring.write(entries, 0)
    offset = SLOTS_OFFSET + (first + 1) * PENDING.itemsize
    bad.ring.region.data[offset + 8] ^= 1
    bad.ring.region.flush(offset, 64)
    bad.ring.publish()
    number = good.batches(lane, session, 1)
    cluster.run(2)

    assert cluster.stored(lane) == [(session, 0), (session, 1)]
    assert good.outcome(number) == Outcome.ORDERED
    assert bad.closing()
    assert "broker-0.1" in cluster.sequencer.problems[0]
    good.batches(lane, session, 2)
    cluster.run()
    assert (session, 2) in cluster.stored(lane)


def test_old_dead_logs_are_removed() -> None:
    """Logs of dead incarnations are kept up to a bound.

    Beyond it the oldest are removed, unless a batch of theirs waits.
    """
    log_bytes = Cluster().memory.regions["broker-0.1/log"].size
    cluster = Cluster(sizes=replace(SIZES, dead_log_bytes=2 * log_bytes))
    lane = cluster.topic(5)
    session = cluster.open(lane)
    cluster.brokers[0].batches(lane, session, 1)  # waits, and keeps the first incarnation's log
    cluster.run()
    for attempt in range(4):
        cluster.brokers[0] = Broker(cluster, 0, f"again-{attempt}")
        cluster.run(3)
    kept = [m.incarnation for m in cluster.directory.members.all() if m.broker == 0 and m.state is MemberState.DEAD]
    names = cluster.memory.host("x").names()

    assert kept == [1, 4]
    assert "broker-0.1/log" in names
    assert not [name for name in names if name.startswith(("broker-0.2/", "broker-0.3/"))]


def test_rings_of_deleted_topics_that_a_dead_broker_left_are_removed() -> None:
    """Simulator seeds 150050 and 150057: the broker that would remove its ring died before the topic was deleted."""
    cluster = Cluster()
    topics = [cluster.directory.topics.create(name, order=0) for name in ("gone", "kept")]
    dead = cluster.brokers[0]
    lanes = [lane for topic in topics if (lane := cluster.directory.lanes.make(topic, dead.member)) is not None]
    for lane in lanes:
        create_ring(dead.fabric, lane.region, RegionKind.ORDER, ORDER, 32)
    cluster.brokers[0] = Broker(cluster, 0, "again")
    cluster.run(3)
    fabric = cluster.memory.host("x")
    assert [fabric.exists(lane.region) for lane in lanes] == [True, True]
    cluster.directory.topics.delete("gone")
    cluster.run(3)
    assert [fabric.exists(lane.region) for lane in lanes] == [False, True]


def test_the_region_by_which_readers_know_a_broker_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is created last, too: while it exists so do the others."""
    removed: list[str] = []
    remove = IncoherentHost.remove
    monkeypatch.setattr(IncoherentHost, "remove", lambda host, name: (removed.append(name), remove(host, name)))
    cluster = Cluster(sizes=replace(SIZES, dead_log_bytes=0))
    cluster.brokers[0] = Broker(cluster, 0, "again")
    cluster.run(3)
    buried = dict.fromkeys(name for name in removed if name.startswith("broker-0.1/"))

    assert list(buried) == [f"broker-0.1/{name}" for name in ("pending", "frontiers", "log")]


def test_a_broker_that_died_before_it_started_is_forgotten() -> None:
    """A member without rings is removed once it is dead."""
    cluster = Cluster()
    member = cluster.directory.members.register(5, "localhost", 1, 1)
    cluster.run(2)
    cluster.directory.members.mark_dead(5, member.incarnation)
    cluster.run(2)

    assert [m.broker for m in cluster.directory.members.all()] == [0, 1]


# --- leaders ----------------------------------------------------------------------------------------------------------
def test_the_heartbeat_counts() -> None:
    """A living sequencer moves its heartbeat line."""
    cluster = Cluster()
    before = sequencer_word(cluster, SequencerLine.HEARTBEAT)
    cluster.clock.us += 200_000
    cluster.run()

    assert sequencer_word(cluster, SequencerLine.HEARTBEAT) == before + 1


def test_a_deposed_sequencer_stops() -> None:
    """Once a later epoch is open, rounds do nothing."""
    cluster = Cluster()
    old, lane = cluster.sequencer, cluster.topic(5)
    session = cluster.open(lane)
    cluster.new_sequencer()
    cluster.brokers[0].batches(lane, session, 0)

    assert old.round() == 0
    assert old.deposed
    cluster.run()
    assert cluster.stored(lane) == [(session, 0)]


def test_a_standby_that_was_overtaken_does_not_start() -> None:
    """Of two standbys only the one with the newest epoch starts."""
    cluster = Cluster()
    taken: list[Sequencer] = []

    def overtake() -> None:
        taken.append(cluster.new_sequencer())

    cluster.reigns += 1
    cluster.at_primitive(3, overtake)  # two are for reading the epoch table, before it has its epoch
    slow = lead(Env(cluster.clock), cluster.memory.host(cluster.host), cluster.directory, cluster.sizes)

    assert slow.deposed
    assert not taken[0].deposed
    assert cluster.directory.elections.started_epoch() == taken[0].epoch > slow.epoch


def test_regions_of_old_epochs_are_swept() -> None:
    """Only the last started epoch and its predecessor keep their regions.

    Others are removed when publishers have moved on.
    """
    cluster = Cluster()
    cluster.topic(5)
    for _ in range(3):
        cluster.new_sequencer()
        cluster.run()
        early = _epochs(cluster)
        cluster.clock.us += 1_000_000
        cluster.run()

    assert early == {"epoch-2", "epoch-3", "epoch-4"}
    assert _epochs(cluster) == {"epoch-3", "epoch-4"}


def test_regions_that_a_paused_process_makes_later_are_swept_too() -> None:
    """A broker that was forgotten, or a sequencer of an early epoch, may wake up and make regions at any time."""
    cluster = Cluster()
    cluster.topic(5)
    cluster.new_sequencer()
    cluster.new_sequencer()
    cluster.clock.us += 1_000_000
    cluster.run()
    sleeper, shape = cluster.memory.host("x"), Shape(RegionKind.LOG, 1024)
    names = ["epoch-1/held", "broker-9.9/log", "replica-9.9/durable"]
    for name in names:
        sleeper.create(name, shape)
    kept = [name for name in sleeper.names() if name not in names]
    cluster.clock.us += 3_000_000
    cluster.run()
    assert sorted(sleeper.names()) == sorted(kept)


def test_nothing_of_another_generation_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a fabric has the same name in each, and epochs start again at 1.

    An apparently old region may be in use.
    """
    cluster = Cluster()
    cluster.topic(5)
    cluster.new_sequencer()
    cluster.new_sequencer()
    cluster.clock.us += 1_000_000
    cluster.run()
    later = msgspec.structs.replace(cluster.directory.elections.newest_epochs(), generation=99)
    monkeypatch.setattr(cluster.directory.elections, "newest_epochs", lambda: later)
    cluster.memory.host("x").create("epoch-1/held", Shape(RegionKind.LOG, 1024))
    cluster.clock.us += 3_000_000
    cluster.run()
    assert cluster.memory.host("x").exists("epoch-1/held")


def _epochs(cluster: Cluster) -> set[str]:
    owners = {name.split("/")[0] for name in cluster.memory.host("x").names()}
    return {owner for owner in owners if owner.startswith("epoch-")}


def test_sessions_positions_and_waiting_batches_survive_takeovers() -> None:
    """Over several takeovers duplicates are recognized, gaps close, names and handles continue."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, broker = cluster.open(lane, name=3), cluster.brokers[0]
    broker.batches(lane, session, 0)
    waiting = broker.batches(lane, session, 2)
    cluster.run()
    for _ in range(3):
        cluster.new_sequencer()
        cluster.run()
    again = broker.batches(lane, session, 0, 1)
    cluster.run()

    assert broker.answers[again][:2] == (Outcome.DUP_OF, 1)
    assert broker.outcome(waiting) == Outcome.ORDERED
    newer = cluster.open(lane, name=3)
    assert newer == session + 1
    assert cluster.stored(lane) == [(session, 0), (session, 1), (session, 2)]


def test_a_smaller_table_still_takes_over() -> None:
    """A successor with a smaller configuration keeps all sessions it inherits."""
    cluster = Cluster()
    lane = cluster.topic(5)
    sessions = [cluster.open(lane) for _ in range(8)]
    cluster.sizes = FabricSizes(
        pending_slots=16, order_slots=32, held_slots=8, log_bytes=4096, chunk_bytes=1024, sessions=2, round_entries=8
    )
    cluster.new_sequencer()
    for session in sessions:
        cluster.brokers[0].batches(lane, session, 0)
    cluster.settle()

    assert sorted(cluster.stored(lane)) == [(session, 0) for session in sessions]


# --- the driver -------------------------------------------------------------------------------------------------------
class StubBell:
    """Never rung; counts waits, and ends the test after a few."""

    rung = False

    def __init__(self, at_wait: Any) -> None:
        self.waits: list[float] = []
        self._at_wait = at_wait

    async def wait(self, timeout_s: float, on_ring: Callable[[], bool] | None = None) -> None:
        self.waits.append(timeout_s)
        if len(self.waits) == 6:
            self._at_wait()


def test_the_driver_waits_longer_while_idle_and_stops_on_request() -> None:
    """Idle waits grow, and the loop ends with its stop event."""
    cluster, stop = Cluster(), asyncio.Event()
    bell = StubBell(stop.set)
    asyncio.run(serve_sequencer(cluster.sequencer, bell, stop))

    assert len(bell.waits) == 6
    assert bell.waits == sorted(bell.waits)
    assert bell.waits[-1] > bell.waits[0]


def test_the_driver_ends_with_the_leadership() -> None:
    """A deposed sequencer's loop ends by itself."""
    cluster = Cluster()
    old = cluster.sequencer
    bell = StubBell(cluster.new_sequencer)
    asyncio.run(serve_sequencer(old, bell, asyncio.Event()))

    assert old.deposed


# --- silence ----------------------------------------------------------------------------------------------------------
def let_pass(cluster: Cluster, seconds: float, step_s: float = 0.1) -> None:
    """Advance the time, with a round now and then."""
    for _ in range(round(seconds / step_s)):
        cluster.clock.us += int(step_s * 1e6)
        cluster.run()


def states(cluster: Cluster) -> dict[int, MemberState]:
    return {member.broker: member.state for member in cluster.directory.members.all()}


def test_a_silent_broker_is_closed() -> None:
    """It sends no heartbeat: it is dead in the store, and marked closing. Its earlier entries are ordered."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    stopped = cluster.brokers[0]
    stopped.stopped = True
    stopped.batches(lane, session, 0, 1)
    let_pass(cluster, BROKER_SILENT_S - 0.5)
    assert states(cluster)[0] is MemberState.LIVE

    let_pass(cluster, 1.0)
    assert cluster.stored(lane) == [(session, 0), (session, 1)]
    assert states(cluster) in ({0: MemberState.DEAD, 1: MemberState.LIVE}, {1: MemberState.LIVE})
    assert stopped.closing()
    assert not cluster.brokers[1].closing()


def test_each_epoch_publishes_again_which_brokers_are_open() -> None:
    """An epoch has no state for a broker that an earlier one removed, though it may still be paused somewhere."""
    cluster = Cluster()
    cluster.run()
    asleep, other = cluster.brokers
    assert (asleep.standing(), other.standing()) == (Standing.OPEN, Standing.OPEN)
    again = cluster.brokers[0] = Broker(cluster, 0, "broker-0-again")
    cluster.run(3)
    assert (asleep.standing(), again.standing()) == (Standing.CLOSING, Standing.OPEN)
    cluster.directory.members.mark_removed(0, asleep.member.incarnation, cluster.sequencer.epoch)

    cluster.new_sequencer()
    assert asleep.standing() is Standing.UNLISTED
    assert {broker.standing() for broker in (again, other)} == {Standing.OPEN}


def test_a_pause_of_the_sequencer_is_not_silence_of_others() -> None:
    """It was stopped itself for an hour: every broker that sends heartbeats afterwards stays."""
    cluster = Cluster()
    let_pass(cluster, 1.0)
    for pause_us in (100_000, 3_600_000_000):  # no heartbeats meanwhile: all earlier ones have been seen
        cluster.clock.us += pause_us
        cluster.sequencer.round()
    let_pass(cluster, 1.0)
    assert states(cluster) == {0: MemberState.LIVE, 1: MemberState.LIVE}
