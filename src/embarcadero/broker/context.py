"""What all parts of one broker share: what its process gives it, what it knows of the store, and what it counts.

Counters are plain numbers, touched once per batch, per fetch or per read of results, never per record.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from embarcadero.config import DEFAULTS, Config, FabricSizes
from embarcadero.config.table import BrokerKeys as BrokerSettings
from embarcadero.env import LATENCY_US, Env, Histogram, Workers
from embarcadero.errors import TooMany
from embarcadero.fabric.layout import Entries
from embarcadero.fabric.region import Fabric
from embarcadero.limits import STORE_CALLS_MAX, WARM_JOBS_QUEUED_MAX
from embarcadero.placement.directory import Directory, StoreChange, StoreWatch
from embarcadero.types import REQUEST_OUTCOMES, Member, MemberState, Outcome, Topic, TopicLane
from embarcadero.wire import messages as m

_IS_BATCH: Final = np.ones(256, dtype=bool)
_IS_BATCH[list(REQUEST_OUTCOMES)] = False
_BATCH_OUTCOMES: Final = frozenset(np.flatnonzero(_IS_BATCH).tolist())
_FEW: Final = 8
"""Up to here, plain numbers are quicker than arrays."""


class Traffic:
    """Batches of one lane that came in or went out."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.batches = self.records = self.bytes = 0

    def add(self, batches: int, records: int, size: int) -> None:
        """Count more of them."""
        self.batches += batches
        self.records += records
        self.bytes += size


class BrokerCounters:
    """All counters of one broker incarnation."""

    def __init__(self, unanswered_max: int) -> None:
        self.came_in: defaultdict[int, Traffic] = defaultdict(Traffic)  # by lane
        self.went_out: defaultdict[int, Traffic] = defaultdict(Traffic)
        self.outcomes: Counter[int] = Counter()
        self.hung_up: Counter[str] = Counter()  # connections that we ended, by the error's name
        self.connections = 0  # all that ever were
        self.backpressure = 0  # how often we stopped granting credit
        self.publish_us = Histogram(LATENCY_US)  # from a whole batch to its outcome
        self.delivery_us = Histogram(LATENCY_US)  # from the append time to the answer of a waiting read
        self._mask = (1 << (unanswered_max - 1).bit_length()) - 1
        self._since_us = array("q", bytes(8 * (self._mask + 1)))  # when a pending entry was published; 0: answered
        self._many_us = np.frombuffer(self._since_us, dtype=np.int64)
        self._next = 0

    def published(self, stop: int, now_us: int) -> None:
        """Pending entries below `stop` are published."""
        if stop - self._next == 1:
            self._since_us[self._next & self._mask] = now_us
        else:
            self._many_us[np.arange(self._next, stop) & self._mask] = now_us
        self._next = stop

    def answered_one(self, pending: int, outcome: int, now_us: int) -> None:
        """One result came alone."""
        self._answered(pending & self._mask, outcome, now_us)

    def answered(self, results: Entries, now_us: int) -> None:
        """Results came; those that a later sequencer repeats are counted once."""
        if len(results) <= _FEW:
            for pending, outcome in zip(results["pending"].tolist(), results["outcome"].tolist(), strict=True):
                self._answered(pending & self._mask, outcome, now_us)
            return
        at, outcomes = results["pending"].astype(np.int64) & self._mask, results["outcome"]
        since = self._many_us[at]
        self._many_us[at] = 0
        first = since > 0
        for outcome, count in enumerate(np.bincount(outcomes[first]).tolist()):
            if count:
                self.outcomes[outcome] += count
        self.publish_us.add_many(now_us - since[first & _IS_BATCH[outcomes]])

    def ordered_here(self, batches: int, took_us: int) -> None:
        """Batches of orders 0 and 1 are acked, that long after they were written."""
        self.outcomes[int(Outcome.ORDERED)] += batches
        self.publish_us.add(took_us, batches)

    def _answered(self, at: int, outcome: int, now_us: int) -> None:
        since_us, self._since_us[at] = self._since_us[at], 0
        if since_us:
            self.outcomes[outcome] += 1
            if outcome in _BATCH_OUTCOMES:
                self.publish_us.add(now_us - since_us)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the counts of other lanes: their topics are gone, or a client made them up."""
        for counts in (self.came_in, self.went_out):
            for lane in counts.keys() - lanes:
                del counts[lane]


def lane_slots(sizes: FabricSizes) -> int:
    """Slots of a lane's ring: fewer than a topic's one lane of orders 2 and 5 has, since every broker has one."""
    return sizes.order_slots // 2


def lane_margin(sizes: FabricSizes) -> int:
    """How many entries a broker may write beyond what it knows to be acked; readers keep that far from its lap."""
    return min(sizes.round_entries, lane_slots(sizes) // 4)


JobDone = Callable[[Any], None]
"""Takes the result of a job, or the error that it raised."""


class _Job(NamedTuple):
    job: Callable[[], Any]
    done: JobDone
    may_start: Callable[[], bool]


def _always() -> bool:
    """A job that does not wait for memory."""
    return True


class FairJobs:
    """Jobs on workers for all clients of one broker: a few run at once, and clients take turns."""

    def __init__(self, workers: Workers, running_max: int) -> None:
        self._workers, self._running_max = workers, running_max
        self._queues: dict[int, deque[_Job]] = {}  # by connection; the next one's turn first
        self.running = 0
        self.jobs = 0  # all that ever were

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return sum(map(len, self._queues.values()))

    def run(self, client: int, job: Callable[[], Any], done: JobDone, may_start: Callable[[], bool] = _always) -> None:
        """Run a job when it is the turn of its client, a connection's number; `done` gets its result or its error.

        `may_start` is asked just before that, and again later if it says no: there is no room for the result yet.
        Raises TooMany.
        """
        if len(self._queues.get(client, ())) >= WARM_JOBS_QUEUED_MAX:
            problem = f"{WARM_JOBS_QUEUED_MAX} reads of this connection wait for their turn"
            raise TooMany(problem, "wait for their answers")
        self._queues.setdefault(client, deque()).append(_Job(job, done, may_start))
        self.start()

    def disconnected(self, client: int) -> None:
        """Drop the jobs of a client that is gone; the result of one that runs is ignored."""
        self._queues.pop(client, None)

    def start(self) -> None:
        """Start the jobs whose turn it is."""
        while self.running < self._running_max and (number := self._next()) is not None:
            queue = self._queues.pop(number)
            job, done, _ = queue.popleft()
            if queue:
                self._queues[number] = queue  # behind the others
            self.running += 1
            self.jobs += 1
            self._workers.run(job, lambda result, done=done: self._ended(result, done))  # type: ignore[misc]

    def _next(self) -> int | None:
        return next((number for number, queue in self._queues.items() if queue[0].may_start()), None)

    def _ended(self, result: Any, done: JobDone) -> None:
        self.running -= 1
        try:
            done(result)
        finally:
            self.start()


@dataclass(frozen=True, slots=True)
class BrokerContext:
    """The identity of this broker, and what it has around it."""

    env: Env
    fabric: Fabric
    directory: Directory
    member: Member
    sizes: FabricSizes
    config: Config = DEFAULTS
    counters: BrokerCounters = field(init=False)
    store_calls: FairJobs = field(init=False)
    """Transactions and wide reads of the store, for clients. One at a time, so their order is that of the requests."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", BrokerCounters(self.sizes.results_slots))
        object.__setattr__(self, "store_calls", FairJobs(self.env.workers, STORE_CALLS_MAX))

    @property
    def settings(self) -> BrokerSettings:
        """The configuration of brokers."""
        return self.config.broker


class StoreView:
    """Topics, members and trims, as the store had them when it was read last."""

    def __init__(self, directory: Directory, changed: Callable[[], None], moved: Callable[[int], object]) -> None:
        self._directory, self._changed, self._moved = directory, changed, moved
        self.topics: dict[str, Topic] = {}  # by name
        self.lanes: dict[int, Topic] = {}  # by their own lane
        self.trims: dict[int, int] = {}  # lane -> index below which it was trimmed
        self.members: list[Member] = []
        self.broker_lanes: dict[int, TopicLane] = {}  # lanes of orders 0 and 1, each with its broker
        self._watch = StoreWatch(directory)

    def refresh(self) -> None:
        """Learn from the store: topics, members, the newest epoch."""
        change = self._watch.look()
        if change is StoreChange.NOTHING:
            return
        if change is StoreChange.EVERYTHING:
            self._read_all()
        self._moved(self._directory.elections.started_epoch())
        self._watch.done()

    def _read_all(self) -> None:
        topics = {topic.name: topic for topic in self._directory.topics.all()}
        trims, members = self._directory.topics.trims(), self._directory.members.all()
        self.broker_lanes = {lane.lane: lane for lane in self._directory.lanes.all()}
        self.topics, self.trims, self.members = topics, trims, members
        self.lanes = {topic.lane: topic for topic in topics.values()}
        self._changed()

    def topic_lane(self, lane: int) -> int:
        """The number by which a lane's topic is known: lanes of brokers have numbers of their own."""
        of_broker = self.broker_lanes.get(lane)
        return lane if of_broker is None else of_broker.topic

    def topic_name(self, lane: int) -> str | None:
        """The topic that a lane belongs to."""
        topic = self.lanes.get(self.topic_lane(lane))
        return None if topic is None else topic.name

    def live(self) -> list[Member]:
        """Brokers that are alive, as far as the store knows."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def addresses(self, but: Member | None = None) -> list[m.BrokerAddress]:
        """Where clients find the live brokers, one left out."""
        return [
            m.BrokerAddress(broker=o.broker, incarnation=o.incarnation, host=o.host, port=o.port, handle=o.handle)
            for o in self.live()
            if but is None or o.handle != but.handle
        ]
