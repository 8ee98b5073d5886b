"""A sequencer may crash before any single memory primitive; its successor continues as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from embarcadero.errors import FabricFull
from embarcadero.fabric.region import Shape
from embarcadero.limits import EPOCHS_AHEAD_MAX
from embarcadero.types import EntryKind, Outcome
from embarcadero.wire.messages import AlterTopic
from embarcadero_proof.sim.incoherent import IncoherentRegion
from tests.sequencer.cluster import Cluster, Crash

STORED = {Outcome.ORDERED, Outcome.DUP_OF}


class Story:
    """A script that touches every kind of write a sequencer does."""

    def __init__(self, seed: int = 0) -> None:
        self.cluster = cluster = Cluster(seed)
        make = cluster.directory.topics.create
        self.strong = make("strong", order=5, gap_timeout_ms=10_000).lane
        self.skipping = make("skipping", order=5, on_gap="skip", gap_timeout_ms=5).lane
        self.total = make("total", order=2).lane
        lanes = ((0, self.strong), (1, self.strong), (0, self.skipping), (0, self.total))
        asked = [(broker, cluster.brokers[broker].request(EntryKind.SESSION_OPEN, lane)) for broker, lane in lanes]
        cluster.run(2)
        self.a, self.b, self.s, self.t = (cluster.brokers[broker].answers[number][5] for broker, number in asked)
        self.batches: list[tuple[int, int, int, int, int]] = []  # broker, pending index, lane, session, sequence
        self.opens: list[tuple[int, int]] = []

    def send(self, broker: int, lane: int, session: int, *seqs: int, low: int = 0) -> None:
        first = self.cluster.brokers[broker].batches(lane, session, *seqs, low=low)
        self.batches += [(broker, first + at, lane, session, seq) for at, seq in enumerate(seqs)]

    def steps(self) -> Iterator[None]:
        """Publish, step by step; after each the sequencer does a round."""
        one, two = self.cluster.brokers
        self.send(0, self.strong, self.a, 0, 2, 4)
        self.send(1, self.strong, self.b, 0, 1, 2)
        self.send(1, self.total, self.t, 5, 0, 5)
        yield
        self.send(1, self.strong, self.a, 1, 6)
        self.send(0, self.skipping, self.s, 0, 3, 4)
        yield
        self.opens.append((0, one.request(EntryKind.SESSION_OPEN, self.strong, name=77)))
        self.send(0, self.strong, self.a, 3, 3, 5)
        self.cluster.clock.us += 10_000
        yield
        self.send(0, self.total, self.t, *range(1, 5), low=1)
        self.send(1, self.skipping, self.s, 1, 5)
        yield
        self.opens.append((1, two.request(EntryKind.SESSION_OPEN, self.strong, name=77)))
        self.send(1, self.strong, self.b, 5, 7, 3)
        yield
        two.request(EntryKind.SESSION_DETACH, self.strong, self.b)
        self.cluster.clock.us += 1_100_000
        yield
        self.opens += [(0, one.request(EntryKind.SESSION_OPEN, self.strong, name=77)) for _ in range(4)]
        yield  # decides more than a checkpoint covers in one round
        for start in range(7, 23, 8):
            self.send(0, self.strong, self.a, *range(start, start + 8))
            yield
        for _ in range(2):  # a successor does not know how old a gap is, nor which sessions are connected
            self.cluster.clock.us += 11_000_000
            yield

    def play(self, recover: Callable[[], None]) -> None:
        """Run it; `recover` is called after a crash, and makes another sequencer."""
        for _ in self.steps():
            crashed = True
            while crashed:
                try:
                    self.cluster.run(churn=1)
                    crashed = False
                except Crash:
                    recover()
                    self.cluster.read()  # before more is ordered than a ring holds
        self.cluster.memory.interrupt = None
        self.cluster.settle()

    def check(self) -> None:
        """Nothing lost, nothing twice, every result is correct."""
        cluster = self.cluster
        places = {}
        for lane in (self.strong, self.skipping, self.total):
            stored = cluster.stored(lane)
            assert len(set(stored)) == len(stored), "a sequence has two positions"
            for index, entry in enumerate(cluster.entries(lane)):
                if entry["kind"] == EntryKind.BATCH:
                    places[lane, int(entry["session"]), int(entry["session_seq"])] = index, int(entry["seq"])
        for broker, number, lane, session, seq in self.batches:
            outcome = cluster.brokers[broker].outcome(number)
            assert outcome is not None, f"entry {number} of broker {broker} has no answer"
            if outcome in STORED:
                assert cluster.brokers[broker].answers[number][1:3] == places[lane, session, seq]
            elif outcome in (Outcome.FENCED, Outcome.LOST):
                assert (lane, session, seq) not in places
        assert [seq for session, seq in cluster.stored(self.strong) if session == self.a] == list(range(23))
        assert [seq for session, seq in cluster.stored(self.strong) if session == self.b] == [0, 1, 2, 3]
        skipped = [seq for session, seq in cluster.stored(self.skipping) if session == self.s]
        assert skipped == sorted(skipped)
        assert {0, 3, 4, 5} <= set(skipped)
        assert {seq for session, seq in cluster.stored(self.total) if session == self.t} == {0, 1, 2, 3, 4, 5}
        self._check_opens()

    def _check_opens(self) -> None:
        entries = self.cluster.entries(self.strong)
        for broker, number in self.opens:
            outcome, index, _, _, _, session = self.cluster.brokers[broker].answers[number]
            assert outcome == Outcome.OPENED
            assert (int(entries["kind"][index]), int(entries["session"][index])) == (EntryKind.SESSION_OPEN, session)


def crash() -> None:
    raise Crash


def primitives() -> int:
    """The number of memory primitives in the story."""
    story = Story()
    count = story.cluster.at_primitive(0, crash)
    story.play(crash)
    story.check()
    return count[0]


def test_the_story_holds_without_a_crash() -> None:
    """The checks hold when nothing goes wrong, in a story that wraps a ring and writes checkpoints."""
    assert primitives() > 120


@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_any_point_loses_nothing_and_moves_nothing(part: int) -> None:
    """Whatever primitive the crash precedes: no batch lost, no position changed, every entry answered correctly."""
    for number in range(1 + part, primitives() + 1, 4):
        story = Story(seed=number)
        cluster = story.cluster

        def recover(cluster: Cluster = cluster, takes_host: bool = number // 4 % 2 == 0) -> None:
            if takes_host:
                cluster.memory.crash(cluster.host)
            cluster.new_sequencer()

        cluster.at_primitive(number, crash)
        story.play(recover)
        assert cluster.reigns == 2, f"there was a crash before primitive {number}"
        story.check()


@pytest.mark.parametrize("first", [30, 55, 80])
def test_a_crash_in_or_after_a_takeover_is_taken_over_again(first: int) -> None:
    """Whatever primitive of a successor's start another crash precedes, the third one continues nevertheless."""
    for number in range(1, 100, 5):
        story = Story(seed=number)
        cluster = story.cluster

        def recover(cluster: Cluster = cluster, number: int = number) -> None:
            cluster.memory.crash(cluster.host)
            if cluster.reigns == 1:
                cluster.at_primitive(number, crash, cluster.next_host)
            try:
                cluster.new_sequencer()
            except Crash:
                recover(cluster)

        cluster.at_primitive(first, crash)
        story.play(recover)
        assert cluster.reigns == 3
        story.check()


@pytest.mark.parametrize("part", range(2))
def test_a_sequencer_paused_beyond_its_end_has_no_effect(part: int) -> None:
    """Paused before any primitive, replaced, and resumed in the middle of its round: no process notices it."""
    total = primitives()
    for number in range(1 + part, total + 1, 6):
        story = Story(seed=number)
        cluster = story.cluster

        def replace(cluster: Cluster = cluster) -> None:
            cluster.new_sequencer()
            cluster.run(2)

        zombie = cluster.sequencer
        cluster.at_primitive(number, replace)
        story.play(crash)
        assert cluster.reigns == 2
        assert zombie.round() == 0
        assert zombie.deposed
        story.check()


def test_a_checkpoint_never_runs_ahead_of_the_order() -> None:
    """One round decides more than a checkpoint covers; wherever it ends, the successor finds a table that fits."""
    crashed, number = True, 0
    while crashed:
        number += 1
        cluster = Cluster(seed=number)
        lane = cluster.topic(5)
        broker = cluster.brokers[0]
        asked = [broker.request(EntryKind.SESSION_OPEN, lane, name=9) for _ in range(8)]
        cluster.at_primitive(number, crash)
        try:
            cluster.run()
            crashed = False
        except Crash:
            cluster.memory.crash(cluster.host)
            cluster.new_sequencer()
            cluster.read()
        cluster.memory.interrupt = None
        cluster.settle()
        entries = cluster.entries(lane)
        for ask in asked:
            outcome, index, _, _, _, session = broker.answers[ask]
            assert outcome == Outcome.OPENED
            assert (int(entries["kind"][index]), int(entries["session"][index])) == (EntryKind.SESSION_OPEN, session)
    assert number > 10


def test_waiting_batches_are_safe_before_a_successors_first_round() -> None:
    """A successor that starts and crashes immediately leaves waiting batches to the next one."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session, broker = cluster.open(lane), cluster.brokers[0]
    waiting = broker.batches(lane, session, 1)
    cluster.run()
    for _ in range(2):
        cluster.memory.crash(cluster.host)
        cluster.new_sequencer()
    broker.batches(lane, session, 0)
    cluster.run()

    assert broker.outcome(waiting) == Outcome.ORDERED
    assert cluster.stored(lane) == [(session, 0), (session, 1)]


def test_a_waiting_batch_of_a_deleted_topic_frees_its_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ordered and not answered when its sequencer died; then its topic was deleted, and the slot was reused."""
    cluster = Cluster()
    gone, lane = cluster.topic(5), cluster.topic(5)
    doomed, one, two = cluster.open(gone), cluster.open(lane), cluster.open(lane)
    broker = cluster.brokers[0]
    broker.batches(gone, doomed, 1)
    cluster.run()
    broker.batches(gone, doomed, 0)
    monkeypatch.setattr(cluster.sequencer.brokers, "answer", lambda _: crash())
    with pytest.raises(Crash):
        cluster.run()
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    cluster.directory.topics.delete("t0")
    broker.batches(lane, one, 1)
    cluster.run()
    broker.batches(lane, two, 1)
    cluster.run()

    assert cluster.sequencer.buffer.used == 2
    broker.batches(lane, one, 0)
    broker.batches(lane, two, 0)
    cluster.settle()
    assert cluster.stored(lane) == [(one, 0), (one, 1), (two, 0), (two, 1)]


@pytest.mark.parametrize("rounds", [0, 1, 2, 4, 9])
def test_the_leader_continues_while_its_successor_prepares(rounds: int) -> None:
    """Everything it orders, answers, holds or overwrites until the successor starts is taken over as before."""
    for ready_at in range(12):
        story = Story(seed=ready_at)
        cluster, ready = story.cluster, None
        for number, _ in enumerate(story.steps()):
            cluster.run(churn=1)
            if number == ready_at:
                ready = cluster.ready_sequencer()
            if ready is not None and number == ready_at + rounds:
                ready.begin()
                cluster.sequencer = ready
        if ready is not None and cluster.sequencer is not ready:
            ready.begin()
            cluster.sequencer = ready
        cluster.settle()
        assert ready is None or cluster.directory.elections.started_epoch() == ready.epoch
        story.check()


def test_only_entries_since_the_preparation_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the epoch line open lanes are not read from their checkpoints: everyone waits for that read."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    ready = cluster.ready_sequencer()
    cluster.brokers[0].batches(lane, session, 0, 1)
    cluster.run()
    monkeypatch.setattr("embarcadero.sequencer.leader.takeover.read_lane", None)
    ready.begin()
    cluster.sequencer = ready
    cluster.settle()
    assert cluster.stored(lane) == [(session, 0), (session, 1)]


def test_topics_and_brokers_change_while_a_successor_prepares() -> None:
    """Regions made for a deleted topic are removed; a new topic is started; a broker that died is closed."""
    cluster = Cluster()
    gone, changed = cluster.topic(5), cluster.topic(5)
    session = cluster.open(changed)
    ready = cluster.ready_sequencer()
    fabric = cluster.memory.host("admin")
    assert fabric.exists(f"epoch-{ready.epoch}/order-{gone}")
    cluster.directory.topics.delete("t0")
    cluster.directory.topics.alter(AlterTopic(name="t1", gap_timeout_ms=77))
    new = cluster.directory.topics.create("new", order=2).lane
    dead = cluster.brokers.pop()
    cluster.directory.members.mark_dead(dead.member.broker, dead.member.incarnation)
    ready.begin()
    cluster.sequencer = ready
    assert not fabric.exists(f"epoch-{ready.epoch}/order-{gone}")
    assert not fabric.exists(f"epoch-{ready.epoch}/checkpoint-{gone}")
    assert ready.lanes[changed].order.gap_timeout_us == 77_000
    cluster.brokers[0].batches(changed, session, 0)
    assert cluster.open(new) == 0
    assert cluster.stored(changed) == [(session, 0)]
    assert ready.brokers.sources[dead.member.handle].closing


def test_regions_without_space_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A successor prepares while the fabric is full; when it starts, there is space."""
    cluster = Cluster()
    lanes = [cluster.topic(5), cluster.topic(5)]
    sessions = [cluster.open(lane) for lane in lanes]
    fabric = cluster.memory.host(f"ready-{cluster.reigns}")
    create = fabric.create

    def full(name: str, shape: Shape) -> IncoherentRegion:
        if name.endswith(f"/checkpoint-{lanes[1]}"):
            raise FabricFull("no room", "make it larger")
        return create(name, shape)

    with monkeypatch.context() as patch:
        patch.setattr(fabric, "create", full)
        ready = cluster.ready_sequencer()
    ready.begin()
    cluster.sequencer = ready
    for lane, session in zip(lanes, sessions, strict=True):
        cluster.brokers[0].batches(lane, session, 0)
        cluster.settle()
        assert cluster.stored(lane) == [(session, 0)]


def test_a_standby_that_prepared_too_late_has_no_effect() -> None:
    """Two prepare; the one with the later epoch starts first, and the other does not start any more."""
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    early, late = cluster.ready_sequencer(), None
    cluster.reigns += 1
    late = cluster.ready_sequencer()
    late.begin()
    early.begin()
    assert early.deposed
    assert cluster.directory.elections.started_epoch() == late.epoch
    cluster.sequencer = late
    cluster.brokers[0].batches(lane, session, 0)
    cluster.settle()
    assert cluster.stored(lane) == [(session, 0)]


class Bells:
    """Records which doorbells were rung."""

    def __init__(self) -> None:
        self.rung: list[str] = []

    def ring(self, who: str) -> None:
        self.rung.append(who)


def test_results_are_written_before_replicas_are_woken_after_a_takeover() -> None:
    """Replicas are woken when the first round is done: until then they would find nothing, and take the processors."""
    cluster, bells = Cluster(), Bells()
    replica = cluster.directory.replicas.register(0, "disk", "folder", "host", 1)
    cluster.directory.topics.create("kept", order=5, replicas=1, durable_on=1)
    cluster.run(3)
    ready = cluster.ready_sequencer(bells)
    ready.begin()
    assert replica.ref.region_prefix not in bells.rung
    ready.round()
    assert bells.rung.count(replica.ref.region_prefix) == 1


def test_any_number_of_sequencers_may_end_before_they_open_their_line() -> None:
    """Few epochs run ahead of the last started one.

    A standby that follows a failed one opens its line before all else.
    """
    cluster = Cluster()
    lane = cluster.topic(5)
    session = cluster.open(lane)
    for _ in range(2 * EPOCHS_AHEAD_MAX):
        cluster.ready_sequencer()
        cluster.reigns += 1
    cluster.new_sequencer()
    cluster.brokers[0].batches(lane, session, 0)
    cluster.run(2)
    assert cluster.stored(lane) == [(session, 0)]
