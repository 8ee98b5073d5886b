"""Many small runs of a cluster: replicas and sequencers that die, memory that is lost, clean stops.

Whatever happens, a number that was counted as durable stays below the end of the recovered lane, chains of ranges have
no overlaps, sealed entries are on enough disks, and no position ever has two different entries, not even across
restarts.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from embarcadero.fabric.leader import Durability
from embarcadero.types import NO_SESSION, EntryKind, Outcome, Range
from embarcadero_proof.bugs.table import injected
from tests.sequencer.cluster import Crash
from tests.sequencer.replicated import HandReplica, ReplicatedCluster


class Storm:
    """One cluster. Replicas copy like real ones: only ordered entries, each at its own pace."""

    def __init__(self, seed: int) -> None:
        self.cluster = cluster = ReplicatedCluster(seed, replicas=4)
        self.random = cluster.rng
        self.lane = cluster.replicated(self.random.choice([2, 5]), replicas=3, durable_on=2)
        self.copies: dict[tuple[str, int], int] = {}  # (disk, range number) -> end of the copy
        self.counted = 0
        self.everything: dict[int, bytes] = {}
        self.session, self.next = NO_SESSION, 0
        self.asked: tuple[int, int] | None = None
        self.counter: Durability = cluster.counter()
        for _ in range(3):
            self.publish()
            self.copy()
            self.count()

    # --- steps ---
    def step(self) -> None:
        """Inject a random action."""
        names, weights = zip(*{
            "publish": 10, "copy": 10, "count": 10, "rest": 4, "kill_replica": 1, "start_replica": 2,
            "crash": 1, "lose": 1, "stop": 0.3,
        }.items(), strict=True)  # fmt: skip
        getattr(self, self.random.choices(names, weights)[0])()
        self.look()

    def rest(self) -> None:
        self.cluster.wait(self.random.choice([0.1, 1.2]), step=0.1)

    def publish(self) -> None:
        broker = self.cluster.brokers[0]
        if self.asked is not None:
            answer = broker.answers.get(self.asked[1])
            if answer is not None and answer[0] == Outcome.OPENED:
                self.session, self.next, self.asked = answer[5], answer[4], None
            elif answer is not None:
                self.asked = None
        if self.session == NO_SESSION and self.asked is None and broker.room:
            self.asked = (0, broker.request(EntryKind.SESSION_OPEN, self.lane, NO_SESSION, name=5))
        elif self.session != NO_SESSION and broker.room >= 3:
            first = broker.batches(self.lane, self.session, *range(self.next, self.next + 3), low=self.next)
            self.cluster.run(2)
            outcomes = [broker.outcome(first + at) for at in range(3)]
            self.next += sum(outcome in (Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP) for outcome in outcomes)
            if not all(outcome in (Outcome.ORDERED, Outcome.DUP_OF, Outcome.BACKPRESSURE) for outcome in outcomes):
                self.session = NO_SESSION
        self.cluster.run()

    def copy(self) -> None:
        """Some replicas copy some of the ordered entries, or of those up to their target."""
        for replica in self.cluster.replicas:
            if replica.alive and self.random.random() < 0.6:
                self.copy_one(replica)

    def copy_one(self, replica: HandReplica) -> None:
        range_ = self.cluster.directory.ranges.open_range(self.lane)
        if range_ is None:
            return
        self.publish_line(replica, range_)
        key = (replica.member.disk, range_.number)
        if key not in self.copies:
            return
        word = self.cluster.word(self.lane)
        limit = self.copies[key]
        if word is not None and word[0].number == range_.number and replica.member.ref in range_.replicas:
            lane = self.cluster.sequencer.lanes.get(self.lane)
            limit = lane.order.next_index if lane is not None and not word[0].closing else limit
        if word is not None and word[0].closing and word[1]:
            limit = max(limit, word[1])
        self.copies[key] = self.random.randint(self.copies[key], max(limit, self.copies[key]))
        replica.line(range_, self.copies[key])

    def publish_line(self, replica: HandReplica, range_: Range) -> None:
        """A replica publishes a line for a range only if its very disk is in it."""
        if replica.member.disk in {ref.disk for ref in range_.replicas}:
            self.copies.setdefault((replica.member.disk, range_.number), range_.start)

    def count(self) -> None:
        self.counter.follow(self.cluster.directory.elections.started_epoch())
        self.counted = max(self.counted, self.counter.through(self.lane))

    def kill_replica(self) -> None:
        alive = [replica for replica in self.cluster.replicas if replica.alive]
        if len(alive) > 2:
            self.random.choice(alive).die()

    def start_replica(self) -> None:
        for replica in self.cluster.replicas:
            if not replica.alive:
                self.cluster.replica(replica.number)
                return

    def crash(self) -> None:
        def die() -> None:
            raise Crash

        self.cluster.at_primitive(self.random.randint(1, 60), die)
        try:
            self.cluster.wait(0.2)
        except Crash:
            self.cluster.memory.crash(self.cluster.host)
            self.cluster.memory.interrupt = None
            self.cluster.new_sequencer()
        self.cluster.memory.interrupt = None

    def lose(self) -> None:
        self.remember()
        self.cluster.lose_memory(dict.fromkeys(range(4), ""))
        self.forget_memory()

    def stop(self) -> None:
        for _ in range(600):
            self.cluster.clock.us += 20_000
            self.copy()
            if self.cluster.sequencer.drain():
                break
        self.lose()

    # --- invariants
    # -----------------------------------------------------------------------------------------------------
    def forget_memory(self) -> None:
        self.session, self.asked, self.counter = NO_SESSION, None, self.cluster.counter()

    def remember(self) -> None:
        for index, raw in self.cluster.log.get(self.lane, {}).items():
            assert self.everything.setdefault(index, raw) == raw, f"position {index} was used twice"

    def look(self) -> None:
        self.remember()
        chain = self.cluster.directory.ranges.all(self.lane)
        for range_ in chain:
            if range_.end is not None:
                copies = [self.copies.get((ref.disk, range_.number), range_.start) for ref in range_.replicas]
                assert sum(copy >= range_.end for copy in copies) >= range_.durable_on, "sealed, but not durable"
        for old, new in pairwise(chain):
            assert old.end is not None
            assert old.end <= new.start
            lost = range(old.end, new.start)
            assert self.counted <= old.end or self.counted >= new.start, f"{self.counted} is in the gap {lost}"

    def settle(self) -> None:
        """All replicas are up and fast: the lane continues."""
        for replica in list(self.cluster.replicas):
            if not replica.alive:
                self.cluster.replica(replica.number)
        for _ in range(40):
            for _ in range(3):
                self.copy()
            self.cluster.wait(0.1, step=0.1)
            self.publish()
        self.count()
        self.look()


@pytest.mark.parametrize("seed", range(16))
def test_no_counted_record_is_lost_and_no_position_is_used_twice(seed: int) -> None:
    """A storm of fifty steps; then calm, in which the lane works again."""
    storm = Storm(seed)
    for _ in range(50):
        storm.step()
    storm.settle()

    assert storm.lane in storm.cluster.sequencer.lanes
    assert storm.session != NO_SESSION
    assert storm.counted > 0


@pytest.mark.parametrize("bug", ["failover-statistic", "positions-reused", "seal-at-frontier"])
def test_injected_bugs_are_caught_by_some_storm(bug: str) -> None:
    """Each breaks what must hold in some storm."""
    for seed in range(100):
        try:
            with injected(bug):
                storm = Storm(seed)
                for _ in range(50):
                    storm.step()
        except AssertionError:
            return
    pytest.fail(f"{bug} went unnoticed")
