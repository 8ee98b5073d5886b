"""State that all parts of one broker share: services of the process, a view of the store, and counters.

Counters are plain numbers, updated once per batch, per fetch or per read of results, never per record.
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
"""Up to this many results, plain numbers are faster than arrays."""


class Traffic:
    """Batches of one lane that arrived or were sent."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.batches = self.records = self.bytes = 0

    def add(self, batches: int, records: int, size: int) -> None:
        """Count more batches."""
        self.batches += batches
        self.records += records
        self.bytes += size


class BrokerCounters:
    """All counters of one broker incarnation."""

    def __init__(self, unanswered_max: int) -> None:
        self.came_in: defaultdict[int, Traffic] = defaultdict(Traffic)  # by lane
        self.went_out: defaultdict[int, Traffic] = defaultdict(Traffic)
        self.outcomes: Counter[int] = Counter()
        self.hung_up: Counter[str] = Counter()  # connections that the broker ended, by the error's name
        self.connections = 0  # total
        self.backpressure = 0  # how often the broker stopped granting credit
        self.publish_us = Histogram(LATENCY_US)  # from a complete batch to its outcome
        self.delivery_us = Histogram(LATENCY_US)  # from the append time to the answer of a waiting read
        self._mask = (1 << (unanswered_max - 1).bit_length()) - 1
        self._since_us = array("q", bytes(8 * (self._mask + 1)))  # when a pending entry was published; 0: answered
        self._many_us = np.frombuffer(self._since_us, dtype=np.int64)
        self._next = 0

    def published(self, stop: int, now_us: int) -> None:
        """Note the time when pending entries below `stop` were published."""
        if stop - self._next == 1:
            self._since_us[self._next & self._mask] = now_us
        else:
            self._many_us[np.arange(self._next, stop) & self._mask] = now_us
        self._next = stop

    def answered_one(self, pending: int, outcome: int, now_us: int) -> None:
        """Count a single result."""
        self._answered(pending & self._mask, outcome, now_us)

    def answered(self, results: Entries, now_us: int) -> None:
        """Count results. Results that a later sequencer repeats are counted once."""
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
        """Count acked batches of orders 0 and 1, acked `took_us` after they were written."""
        self.outcomes[int(Outcome.ORDERED)] += batches
        self.publish_us.add(took_us, batches)

    def _answered(self, at: int, outcome: int, now_us: int) -> None:
        since_us, self._since_us[at] = self._since_us[at], 0
        if since_us:
            self.outcomes[outcome] += 1
            if outcome in _BATCH_OUTCOMES:
                self.publish_us.add(now_us - since_us)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop the counts of other lanes: their topics were deleted, or a client made them up."""
        for counts in (self.came_in, self.went_out):
            for lane in counts.keys() - lanes:
                del counts[lane]


def lane_slots(sizes: FabricSizes) -> int:
    """Return the slots of a broker's lane: fewer than a topic's only lane has, since every broker has one."""
    return sizes.order_slots // 2


def lane_margin(sizes: FabricSizes) -> int:
    """Return how many entries a broker may write beyond those known to be acked. Readers stay that far from its lap."""
    return min(sizes.round_entries, lane_slots(sizes) // 4)


JobDone = Callable[[Any], None]
"""Takes the result of a job, or the error that it raised."""


class _Job(NamedTuple):
    job: Callable[[], Any]
    done: JobDone
    may_start: Callable[[], bool]


def _always() -> bool:
    """Return True: the job does not wait for memory."""
    return True


class FairJobs:
    """Jobs on workers for all clients of one broker: a few run at a time, and clients take turns."""

    def __init__(self, workers: Workers, running_max: int) -> None:
        self._workers, self._running_max = workers, running_max
        self._queues: dict[int, deque[_Job]] = {}  # by connection; the next one in turn first
        self.running = 0
        self.jobs = 0  # total

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for their turn."""
        return sum(map(len, self._queues.values()))

    def run(self, client: int, job: Callable[[], Any], done: JobDone, may_start: Callable[[], bool] = _always) -> None:
        """Run a job in the turn of its client, a connection's number. `done` gets its result or its error.

        `may_start` is called just before the start, and again later if it returns False because the result has no
        memory. Raises TooMany.
        """
        if len(self._queues.get(client, ())) >= WARM_JOBS_QUEUED_MAX:
            problem = f"this connection already has {WARM_JOBS_QUEUED_MAX} waiting reads, the maximum"
            raise TooMany(problem, "wait for an answer before sending more")
        self._queues.setdefault(client, deque()).append(_Job(job, done, may_start))
        self.start()

    def disconnected(self, client: int) -> None:
        """Drop the jobs of a closed connection. The result of a running job is ignored."""
        self._queues.pop(client, None)

    def start(self) -> None:
        """Start the next jobs in turn, up to the maximum."""
        while self.running < self._running_max and (number := self._next()) is not None:
            queue = self._queues.pop(number)
            job, done, _ = queue.popleft()
            if queue:
                self._queues[number] = queue  # back of the queue
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
    """The identity of this broker, and the services it uses."""

    env: Env
    fabric: Fabric
    directory: Directory
    member: Member
    sizes: FabricSizes
    config: Config = DEFAULTS
    counters: BrokerCounters = field(init=False)
    store_calls: FairJobs = field(init=False)
    """Transactions and wide reads of the store, for clients. They run one at a time, in the order of the requests."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counters", BrokerCounters(self.sizes.results_slots))
        object.__setattr__(self, "store_calls", FairJobs(self.env.workers, STORE_CALLS_MAX))

    @property
    def settings(self) -> BrokerSettings:
        """The configuration of brokers."""
        return self.config.broker


class StoreView:
    """Topics, members and trims as of the last read of the store."""

    def __init__(self, directory: Directory, changed: Callable[[], None], moved: Callable[[int], object]) -> None:
        self._directory, self._changed, self._moved = directory, changed, moved
        self.topics: dict[str, Topic] = {}  # by name
        self.lanes: dict[int, Topic] = {}  # by the topic's own lane
        self.trims: dict[int, int] = {}  # lane -> index below which it was trimmed
        self.members: list[Member] = []
        self.broker_lanes: dict[int, TopicLane] = {}  # lanes of orders 0 and 1, each with its broker
        self._watch = StoreWatch(directory)

    def refresh(self) -> None:
        """Read topics, members and the newest epoch from the store if it changed."""
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
        """Return the lane number that identifies a lane's topic. Lanes of brokers have numbers of their own."""
        of_broker = self.broker_lanes.get(lane)
        return lane if of_broker is None else of_broker.topic

    def topic_name(self, lane: int) -> str | None:
        """Return the name of the topic that a lane belongs to."""
        topic = self.lanes.get(self.topic_lane(lane))
        return None if topic is None else topic.name

    def live(self) -> list[Member]:
        """Return the live brokers, according to the store."""
        return [member for member in self.members if member.state is MemberState.LIVE]

    def addresses(self, excluding: Member | None = None) -> list[m.BrokerAddress]:
        """Return the addresses of live brokers, without the excluded one."""
        return [
            m.BrokerAddress(broker=o.broker, incarnation=o.incarnation, host=o.host, port=o.port, handle=o.handle)
            for o in self.live()
            if excluding is None or o.handle != excluding.handle
        ]
