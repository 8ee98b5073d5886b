"""One seed, one run: hosts with private caches, brokers, a sequencer, clients, a network, and faults.

Every random choice comes from a generator seeded by the seed and a name, so the same seed gives the same run, event by
event. After a phase with faults the run heals, and then every call and every role has to settle (P8).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from embarcadero.broker.context import lane_margin, lane_slots
from embarcadero.env import Ids
from embarcadero.fabric.layout import ORDER, RING_FRONTIER_OFFSET, SLOTS_OFFSET, BrokerLine, frontier_offset
from embarcadero.fabric.leader import create_epochs
from embarcadero.fabric.log import LogReader
from embarcadero.fabric.region import Fabric
from embarcadero.limits import BROKER_LANES_FIRST, LINE_BYTES
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.types import EntryKind, Member, Order, TopicLane
from embarcadero_proof.bugs.leaks import Wrap
from embarcadero_proof.sim.clients import ProbeProcess
from embarcadero_proof.sim.disk_faults import heal
from embarcadero_proof.sim.disks import Disks
from embarcadero_proof.sim.elections import SimElections
from embarcadero_proof.sim.events import EventQueue, Trace
from embarcadero_proof.sim.faults import Faults, Interrupts
from embarcadero_proof.sim.history import (
    Delivered,
    Ended,
    EpochStarted,
    Event,
    Healed,
    History,
    LaneMade,
    Numbered,
    OrderedTo,
    PublisherEnded,
    Settled,
    StartRead,
    StillThere,
    Stopped,
    TailRead,
    TieredTo,
    TopicMade,
    TrimAsked,
    Verdict,
)
from embarcadero_proof.sim.incoherent import IncoherentMemory
from embarcadero_proof.sim.leftovers import see_leftovers
from embarcadero_proof.sim.mirrors import MIRROR, Mirrors
from embarcadero_proof.sim.network import Address, Network
from embarcadero_proof.sim.passing import PASSING_FROM_SEED, PassingProcess
from embarcadero_proof.sim.plan import SECOND_US, Plan, ReaderPlan, StreamPlan, TopicPlan
from embarcadero_proof.sim.process import Process
from embarcadero_proof.sim.referencing import Staged, publisher_of, stream_of
from embarcadero_proof.sim.rest import Rest
from embarcadero_proof.sim.restart import Restarts
from embarcadero_proof.sim.roles import BrokerProcess, Poller, ReplicaProcess, SequencerProcess
from embarcadero_proof.sim.spans import SPANS_FROM_SEED, SpanProcess
from embarcadero_proof.sim.steps import StepFaults
from embarcadero_proof.sim.store import SimStore
from embarcadero_proof.sim.swarm import STORE_KINDS
from embarcadero_proof.sim.tables import Tiering
from embarcadero_proof.sim.workload import PublisherProcess, Stream, SubscriberProcess

HEAL_US_MAX = 240 * SECOND_US
"""Time limit for everything to settle once all faults have healed."""

REPAIR_US_MAX = 60 * SECOND_US
"""Time limit for the repair of copies after that."""

SCRUB_US_MAX = 200 * SECOND_US
"""Time limit at the end: a scrub may need two passes over all segments, since it skips a damaged copy."""

EVENTS_MAX = 2_000_000
"""A run takes some ten thousand events. A run that exceeds this limit will not end."""

ACKS_MIN = 100
"""A run with fewer acks at the end fails. Missing batches are sent after healing, so that readers have something to
read. So the final count shows little; acks before healing are counted separately (`reports.acks_in_trouble`)."""

NUMBERED_FROM_SEED = 70_000
"""From this seed on the first generation has a number, as `up` gives it. Without it clients do not notice its end."""

_UNMARKED = (Stopped, TrimAsked, TieredTo, StartRead, Numbered, PublisherEnded)
"""Events of checkers that were added later. They are not in digests, so runs recorded before keep theirs."""

_SKIPPED = 4
_LAST_BATCHES = 10
_LOOK_EVERY_US = SECOND_US // 4
_TIDY_US = 5 * SECOND_US
"""After a role or a leader has started: in this time its predecessor is closed and its leftovers are removed."""


class World:
    """The run of one seed. `run` it, then read its `history`."""

    def __init__(self, plan: Plan, wrap: Wrap, keep_trace: bool = False) -> None:
        self.plan, self.seed, self.sizes = plan, plan.seed, plan.sizes
        self.rng = random.Random(f"{plan.seed}:world")
        self._wrap = wrap
        self.queue, self.trace, self.history = EventQueue(), Trace(keep_trace), History()
        self.failures: list[str] = []  # tracebacks
        self.healed = self._over = False
        self.endless = ""  # why the run was given up, if it was
        self.running: list[Process] = []  # the innermost last: the others are interrupted
        self.processes: list[Process] = []
        self.store = MemoryStore()
        ids = random.Random(f"{plan.seed}:ids")
        self.ids: Ids = lambda: ids.getrandbits(63) or 1
        self.directory = Directory(self.store, cluster_id=f"{plan.seed & 0xFFFF_FFFF:08x}", ids=self.ids)
        self.mirrors = Mirrors(self)
        if self.mirrors.on or plan.seed >= NUMBERED_FROM_SEED:
            self.directory.begin_generation(MIRROR if self.mirrors.on else "")
        self.memory = IncoherentMemory(random.Random(f"{plan.seed}:memory"), self.directory.generation)
        self.mirrors.begin(self.directory.generation)
        self.network = Network(self, plan.weather)
        self.disks = Disks(self)
        self.tiering = Tiering(self)
        self.restarts = Restarts(self, random.Random(f"{plan.seed}:restarts"))
        self.elections = SimElections(self)
        self.faults = Faults(self)
        self.interrupts = Interrupts(self)
        self.step_faults = StepFaults(self)
        self.pollers: dict[str, Poller] = {}
        self._stores: dict[Process, SimStore] = {}
        self.brokers: dict[int, BrokerProcess] = {}
        self.replicas: dict[int, ReplicaProcess] = {}
        self.publishers: list[PublisherProcess] = []
        self.staged: list[Staged] = []  # acked, not yet published by reference
        self.subscribers: list[SubscriberProcess] = []
        self.span: SpanProcess | None = None
        self.passing: PassingProcess | None = None
        self.bootstrap: list[Address] = [(f"10.0.0.{broker}", 9092) for broker in range(plan.brokers)]
        self.hosts = [f"host-{number}" for number in range(plan.hosts)]
        self._sequencers = self._replicas = 0
        self._frontiers: dict[int, int] = {}
        self._lanes: dict[int, TopicLane] = {}  # recorded lanes of brokers
        self._quiet_since_us = 0
        self._started_us = 0  # when a role last started
        self._well_us = plan.fault_phase_us
        self._successors = 0  # publishers that are about to begin
        self.rest = Rest(self)

    # --- looking ------------------------------------------------------------------------------------------------------
    def over(self) -> bool:
        """Whether this run has ended, or has exceeded a limit and is given up."""
        if self.queue.done > EVENTS_MAX:
            self.give_up()
        return self._over

    def give_up(self) -> None:
        """End a run that does not end by itself, and report the busiest process."""
        if not self._over:
            busiest = max(self.processes, key=lambda process: process.actions)
            self.endless = (
                f"does not end: {self.queue.done:,} events and {self.interrupts.primitives:,} primitives in "
                f"{self.queue.now_us / SECOND_US:.1f} simulated seconds; the busiest is {busiest.name} "
                f"({busiest.actions:,} actions), at work: {', '.join(p.name for p in self.running) or 'no process'}"
            )
            self._over = True

    def seen(self, event: Event) -> None:
        """Record an event in the history."""
        self.history.add(event)
        self.trace.note(event.at, "history", repr(event), marked=not isinstance(event, _UNMARKED))

    def note(self, who: str, what: str) -> None:
        """Write a line into the trace."""
        self.trace.note(self.queue.now_us, who, what)

    def lanes_of(self, topic: TopicPlan) -> list[int]:
        """List the lanes of a topic that may still have readable entries."""
        if topic.order > Order.BROKER:
            return [topic.lane]
        return [lane.lane for lane in self.directory.lanes.all(topic.lane) if not lane.removed]

    def see_lane(self, lane: int) -> None:
        """Record a broker's lane when it first appears."""
        if lane < BROKER_LANES_FIRST or lane in self._lanes:
            return
        made = self._lanes[lane] = next(found for found in self.directory.lanes.all() if found.lane == lane)
        order = next(topic.order for topic in self.plan.topics if topic.lane == made.topic)
        self.seen(LaneMade(at=self.queue.now_us, lane=lane, topic=made.topic, order=order))

    def order_ring(self, lane: int) -> str:
        """Return the name of the ring to which a lane is written now."""
        if lane in self._lanes:
            return self._lanes[lane].region
        return f"epoch-{self.directory.elections.started_epoch()}/order-{lane}"

    def see_frontier(self, lane: int) -> None:
        """Record how far a lane is ordered, as an observer of all caches."""
        medium, index = self.memory.regions.get(self.order_ring(lane)), -1
        if medium is not None:
            word = RING_FRONTIER_OFFSET // 8
            index = max(int(words[word]) for words in (medium.words, *(copy.words for copy in medium.copies.values())))
        if lane in self._lanes:  # a closed lane ends after its last valid entry, published or not
            ends = (found.end or 0 for found in self.directory.lanes.all(self._lanes[lane].topic) if found.lane == lane)
            index = max(index, *ends, -1)
        if index > self._frontiers.get(lane, -1):
            self._frontiers[lane] = index
            self.seen(OrderedTo(at=self.queue.now_us, lane=lane, index=index))

    def see_frontiers(self) -> None:
        """Record how far all lanes are ordered."""
        for topic in self.plan.topics:
            for lane in self.lanes_of(topic):
                self.see_lane(lane)
                self.see_frontier(lane)

    def see_trimmed(self, reader: str, lane: int, index: int) -> None:
        """Record it if a reader learned that the batch at `index` is gone while it is still in memory."""
        entry = self._entry(lane, index)
        member = self._origin(entry) if entry is not None else None
        if entry is None or int(entry["kind"]) != EntryKind.BATCH or member is None:
            return
        host = self.memory.host(self.hosts[0])
        logs = (host.attach(f"{member.region_prefix}/log"), host.attach(f"{member.region_prefix}/frontiers"))
        if not LogReader(*logs).freed(np.array([entry["location"]], dtype=np.uint32))[0]:
            self.seen(StillThere(at=self.queue.now_us, reader=reader, lane=lane, index=index))

    def see_start(self, reader: str, lane: int, index: int) -> None:
        """Record it if a reader of the earliest record begins at `index` while the batch before is still in memory."""
        for below in range(index - 1, -1, -1):
            entry = self._entry(lane, below)
            if entry is None:
                return
            if int(entry["kind"]) == EntryKind.BATCH:
                if self._in_memory(entry):
                    self.seen(StillThere(at=self.queue.now_us, reader=reader, lane=lane, index=below))
                return

    def _entry(self, lane: int, index: int) -> np.void | None:
        """Return the order entry at an index; None if it is trimmed, or has left the ring."""
        medium = self.memory.regions.get(self.order_ring(lane))
        if medium is None or index < self.directory.topics.trims().get(lane, 0):
            return None
        slots, margin = self.sizes.order_slots, self.sizes.round_entries
        if lane in self._lanes:
            slots, margin = lane_slots(self.sizes), lane_margin(self.sizes)
        entry: np.void = medium.words[SLOTS_OFFSET // 8 :].view(ORDER)[index % slots]
        lapped = index < self._frontiers.get(lane, 0) - slots + margin
        return None if lapped or int(entry["index"]) != index else entry

    def _origin(self, entry: np.void) -> Member | None:
        """Return the broker that received a batch, as long as its memory exists."""
        return next((m for m in self.directory.members.all() if m.handle == int(entry["origin"])), None)

    def _in_memory(self, entry: np.void) -> bool:
        """Whether the payload of a batch is in memory, as an observer of all caches that changes none."""
        member = self._origin(entry)
        medium = self.memory.regions.get(f"{member.region_prefix}/frontiers") if member is not None else None
        if medium is None:
            return False
        chunk = int(entry["location"]) // (self.sizes.chunk_bytes // LINE_BYTES)
        slot = chunk % (self.sizes.log_bytes // self.sizes.chunk_bytes)
        word = frontier_offset(BrokerLine.CHUNKS + slot) // 8
        live = max(int(words[word]) for words in (medium.words, *(copy.words for copy in medium.copies.values())))
        return live == chunk

    # --- running ------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run from the beginning to the end."""
        self._begin()
        self.queue.at(self.plan.fault_phase_us, self._heal)
        self.queue.run(10 * HEAL_US_MAX + self.plan.rest_us, self.over)
        self.give_up()

    def _begin(self) -> None:
        create_epochs(self.bare_fabric(self.hosts[0]))
        for replica in range(self.plan.durable.replicas):
            self.start_replica(replica)
        for topic in self.plan.topics:
            made = self.directory.topics.create(
                topic.name, order=topic.order, partitions=topic.partitions, on_gap=topic.on_gap.value,
                gap_timeout_ms=topic.gap_timeout_ms, replicas=topic.replicas, durable_on=topic.durable_on,
            )  # fmt: skip
            topic.lane, topic.id = made.lane, made.id
            self.seen(TopicMade(
                at=0, lane=made.lane, name=made.name, order=made.order, on_gap=made.on_gap, replicas=made.replicas,
                durable_on=made.durable_on))  # fmt: skip
        self.memory.interrupt = self.interrupts.before_primitive
        self.mirrors.interrupt(self.interrupts.before_primitive)
        self.start_roles()
        for plan in self.plan.streams:
            self.start_stream(plan)
        for reader in self.plan.readers:
            self.queue.at(reader.start_us, lambda reader=reader: self._start_reader(reader))  # type: ignore[misc]
        self.probe = ProbeProcess(self, "probe")
        self.probe.start()
        if self.seed >= SPANS_FROM_SEED and any(topic.replicas for topic in self.plan.topics):
            self.span = SpanProcess(self, "span")
            self.span.start()
        if self.seed >= PASSING_FROM_SEED:
            self.passing = PassingProcess(self, "passing")
            self.passing.start()
        self.faults.start()
        self.queue.after(SECOND_US, self._sample)

    def _sample(self) -> None:
        for broker in self.brokers.values():
            broker.take_samples()
        self.sequencer.take_samples()
        self.queue.after(self.rest.sample_every_us, self._sample)

    def store_of(self, process: Process) -> SimStore | MemoryStore:
        """Return the store as a process reaches it: the same object each time."""
        if not any(kind in self.plan.faults for kind in STORE_KINDS):
            return self.store
        return self._stores.setdefault(process, SimStore(self.store, process))

    def fabric_of(self, role: str, host: str) -> Fabric:
        """Return the fabric as a role on a host sees it."""
        return self._wrap(role, self.bare_fabric(host))

    def bare_fabric(self, host: str) -> Fabric:
        """Return the fabric of a host without injected bugs."""
        return self.mirrors.of(self.memory.host(host), host)

    # --- the cluster --------------------------------------------------------------------------------------------------
    def start_roles(self) -> None:
        """Start every role that does not run. Stop early if the fabric is lost again meanwhile."""
        memory = self.memory
        for process in [replica for replica in self.replicas.values() if not replica.alive]:
            if self.memory is not memory or not self.restarts.up:
                return
            if self.healed or self.rng.random() < 0.6:
                self.start_replica(process.number)
            else:  # this one takes longer: the others must draw no conclusion from its silence
                late_us = self.rng.randrange(8 * SECOND_US)
                self.queue.after(late_us, lambda process=process: self.replace_replica(process))  # type: ignore[misc]
        if self.memory is memory and self.restarts.up:
            self._start_sequencer()
        for broker in range(self.plan.brokers):
            if self.memory is memory and self.restarts.up:
                self._start_broker(broker)

    def start_replica(self, replica: int) -> None:
        """Start a replica on some host."""
        self._started_us = self.queue.now_us
        host = self.rng.choice(self.hosts)
        self._replicas += 1
        process = ReplicaProcess(self, replica, f"replica-{replica}#{self._replicas}", host)
        self.note(process.name, f"starts on {host}")
        self.replicas[replica] = process
        process.start()

    def replica_died(self, process: ReplicaProcess) -> None:
        """Mark a dead replica after a while, as a supervisor does; usually it is started again."""
        if process.member is not None:
            member = process.member
            self.queue.after(self.rng.randrange(50_000, 3 * SECOND_US), lambda: self.directory.replicas.mark_dead(
                member.replica, member.incarnation))  # fmt: skip
        self.queue.after(self.rng.randrange(200_000, 8 * SECOND_US), lambda: self.replace_replica(process))

    def replace_replica(self, process: ReplicaProcess) -> None:
        """Start the next incarnation of a replica, unless it was started already."""
        if self.restarts.up and self.replicas[process.number] is process:
            self.start_replica(process.number)

    def trim(self, rng: random.Random) -> tuple[str, int] | None:
        """Trim a lane, at most up to the last index that a reader of durable records has read."""
        read: dict[int, int] = {}
        for found in self.history.of(Delivered):
            if found.durable:
                read[found.lane] = max(found.index, read.get(found.lane, 0))
        names = {lane: topic.name for topic in self.plan.topics for lane in self.lanes_of(topic) if topic.replicas}
        lanes = [lane for lane in read if lane in names]
        if not lanes or rng.random() < 0.3:
            return None
        lane = rng.choice(lanes)
        start = self.directory.topics.trims().get(lane, 0)
        index = start + (read[lane] - start) * rng.randrange(60) // 100
        self.note("operator", f"trims lane {lane} below {index}")
        self.disks.see_gaps()
        self.seen(TrimAsked(at=self.queue.now_us, lane=lane, index=index))
        self.directory.topics.trim(names[lane], lane, index)
        return f"lane {lane}", 0

    def _start_broker(self, broker: int) -> None:
        self._started_us = self.queue.now_us
        address = self.bootstrap[broker]
        member = self.directory.members.register(broker, address[0], address[1], pid=1)
        host = self.rng.choice(self.hosts)
        self.note(member.region_prefix, f"starts on {host}")
        self.brokers[broker] = BrokerProcess(self, member, host)
        self.brokers[broker].start()

    def _start_sequencer(self) -> None:
        self._started_us = self.queue.now_us
        if self.plan.sequencers:
            self.elections.start_all()
            return
        self._sequencers += 1
        host = self.rng.choice(self.hosts)
        self.note(f"sequencer-{self._sequencers}", f"starts on {host}")
        self.sequencer = SequencerProcess(self, f"sequencer-{self._sequencers}", host)
        self.sequencer.start()

    @property
    def sequencer_may_crash(self) -> bool:
        """Whether this seed has successors for its sequencer."""
        return any(kind.startswith("sequencer-") and kind != "sequencer-pause" for kind in self.plan.faults)

    def may_crash(self, process: Process) -> bool:
        """Whether the run can continue without this process."""
        return not isinstance(process, BrokerProcess) or sum(b.alive for b in self.brokers.values()) > 1

    def broker_died(self, process: BrokerProcess, silently: bool = False) -> None:
        """Mark a dead broker after a while, as a supervisor does; usually a new incarnation is started."""
        self.network.process_died(process, silently)
        if self.network.listening.get(process.address) is process:
            del self.network.listening[process.address]
        member = process.member
        self.queue.after(self.rng.randrange(50_000, 3 * SECOND_US), lambda: self.directory.members.mark_dead(
            member.broker, member.incarnation))  # fmt: skip
        if self.rng.random() < 0.8:
            self.queue.after(self.rng.randrange(200_000, 10 * SECOND_US), lambda: self.replace_broker(process))

    def replace_broker(self, process: BrokerProcess) -> None:
        """Start the next incarnation of a broker, unless it was started already."""
        if self.restarts.up and self.brokers[process.member.broker] is process:
            self._start_broker(process.member.broker)

    def sequencer_died(self, process: SequencerProcess) -> None:
        """Start a successor after a while, as a supervisor does."""
        if self.plan.sequencers:
            self.elections.died(process)
            return
        self.queue.after(self.rng.randrange(50_000, 4 * SECOND_US), lambda: self.replace_sequencer(process))

    def replace_sequencer(self, process: SequencerProcess) -> None:
        """Start a successor, unless it was started already."""
        if self.plan.sequencers:
            self.elections.suspect(process)
        elif self.restarts.up and self.sequencer is process:
            self._start_sequencer()

    def replace(self, process: Process) -> None:
        """Replace a silent process, unless it was replaced already.

        The sequencer notices a silent replica by itself. So a second replica process starts only if the disk of its
        number may be lost: two processes never share a disk.
        """
        if isinstance(process, BrokerProcess):
            self.replace_broker(process)
        elif isinstance(process, SequencerProcess):
            self.replace_sequencer(process)
        elif isinstance(process, ReplicaProcess):
            current = self.restarts.up and self.replicas[process.number] is process
            if current and process.number in self.plan.durable.victims:
                self.disks.replace(process.number)
                self.replace_replica(process)

    def crash_host(self, host: str) -> None:
        """End a host with its cache and all its processes; their peers get no reset."""
        self.memory.crash(host)
        self.mirrors.crash(host)
        for process in self.processes:
            if process.host == host and process.alive:
                process.die(silently=True)
                if isinstance(process, ReplicaProcess):
                    process.device.lose_power()

    # --- clients ------------------------------------------------------------------------------------------------------
    def live_publishers(self) -> Iterator[PublisherProcess]:
        """Publishers that have not finished."""
        return (publisher for publisher in self.publishers if publisher.alive and not publisher.finished)

    def start_stream(self, plan: StreamPlan, in_us: int = 0) -> None:
        """Begin to publish a stream after a delay."""
        stream = stream_of(Stream(plan, self.seed, self.sizes.chunk_bytes))
        self.queue.after(in_us or plan.start_us, lambda: self._start_publisher(stream))

    def _start_publisher(self, stream: Stream) -> None:
        publisher = publisher_of(self, stream)
        self.publishers.append(publisher)
        publisher.start()

    def _start_reader(self, reader: ReaderPlan) -> None:
        subscriber = SubscriberProcess(self, reader)
        self.subscribers.append(subscriber)
        subscriber.start()

    def publisher_ended(self, process: PublisherProcess, failed: bool) -> None:
        """Start a successor if the publisher, or its session, ended before the stream was complete."""
        if failed and process.stream.next_number < process.stream.plan.batches:
            self._successors += 1
            self.queue.after(self.rng.randrange(50_000, 4 * SECOND_US), lambda: self._succeed(process))

    def _succeed(self, process: PublisherProcess) -> None:
        self._successors -= 1
        self.succeed_publisher(process)

    def succeed_publisher(self, process: PublisherProcess) -> None:
        """Continue a stream: the same one if its session has a name, else a new one."""
        stream = process.stream
        if process is not next((p for p in reversed(self.publishers) if p.stream is stream), None):
            return
        if not stream.plan.named:
            left = stream.plan.batches - stream.next_number
            rest = replace(stream.plan, name=f"{stream.plan.name}x", batches=left)
            stream = stream_of(Stream(rest, self.seed, self.sizes.chunk_bytes))
        self._start_publisher(stream)

    # --- the end ------------------------------------------------------------------------------------------------------
    def _heal(self) -> None:
        """End all faults: from here on everything works."""
        self.healed = True
        self.network.calm()
        heal(list(self.disks.devices.values()))
        self.tiering.heal()
        self.faults.swarm.heal()
        for process in self.processes:
            process.unpause()
        self.restarts.heal()
        for replica in self.replicas.values():
            if not replica.alive:
                self.replace_replica(replica)
        for broker in self.brokers.values():
            if not broker.alive:
                self.directory.members.mark_dead(broker.member.broker, broker.member.incarnation)
        if not any(broker.alive for broker in self.brokers.values()):
            self._start_broker(0)
        if not self.sequencer.alive:
            self._start_sequencer()
        self.seen(Healed(at=self.queue.now_us))
        acked = sum(event.verdict is Verdict.STORED for event in self.history.of(Settled))
        # Where few batches got acks, more are sent now; topics that skip gaps may lose some of them.
        batches = max(_LAST_BATCHES, ACKS_MIN + _SKIPPED - acked)
        for number, topic in enumerate(self.plan.topics):
            for read in ("durable", "ordered") if topic.replicas else ("ordered",):
                name = f"audit-{number}-{read}"
                by = self.tiering.start_of(topic)
                self._start_reader(ReaderPlan(name, topic, by, 0, None, 0, 0, 1 << 18, read=read))
            ack = 2 if topic.replicas and number % 2 == 0 else 1
            last = StreamPlan(f"last-{number}", topic, False, batches, 100_000, 4, 1 << 16, 0, 0.0, ack=ack)
            self.start_stream(last, 5 * SECOND_US)
        self.settle_by(7 * SECOND_US)

    def settle_by(self, after_us: int) -> None:
        """From here on nothing is broken: after `after_us` at the earliest, everything has to settle."""
        self._well_us = self.queue.now_us
        self.queue.after(after_us, self._look)

    def _look(self) -> None:
        late, done = self.queue.now_us >= self._well_us + HEAL_US_MAX, self._all_done()
        waits = self.probe.waits or (self.span is not None and self.span.reads)
        if not self.rest.taken and done and not waits:
            self.rest.begin()
        elif (done or late) and not waits:
            for subscriber in self.subscribers:
                subscriber.mark_passed()
                subscriber.mark_missed()
            for broker in self.brokers.values():
                broker.take_last_sample()
            see_leftovers(self)
            self.disks.see_all()
            self.seen(Ended(at=self.queue.now_us))
            self._over = True
        else:
            self.queue.after(_LOOK_EVERY_US, self._look)

    def _all_done(self) -> bool:
        """Whether all publishers are done, and all readers have reached a tail that was requested after that.

        Also, no role has just started: the cleanup after its predecessor has had time to finish.
        """
        epochs = self.history.of(EpochStarted)
        if self.queue.now_us < max(self._started_us, epochs[-1].at if epochs else 0) + _TIDY_US:
            return False
        if self.passing is not None and not self.passing.done:
            return False
        unanswered = any(broker.unanswered for broker in self.brokers.values())
        if unanswered or self._successors or not all(publisher.done for publisher in self.live_publishers()):
            self._quiet_since_us = self.queue.now_us
            return False
        settled = self.history.of(Settled)  # all may have been done before the first look
        quiet_us = max(self._quiet_since_us, settled[-1].at if settled else 0)
        tails = {tail.lane: tail.index for tail in self.history.of(TailRead) if tail.began > quiet_us}
        if any(lane not in tails for topic in self.plan.topics for lane in self.lanes_of(topic)):
            return False
        positions = [
            (lane, reader.positions().get(lane))
            for reader in self.subscribers
            for lane in self.lanes_of(reader.plan.topic)
        ]
        if not all(position is not None and position >= tails[lane] for lane, position in positions):
            return False
        patience_us = SCRUB_US_MAX if self.rest.taken else REPAIR_US_MAX
        return self.queue.now_us > self._well_us + patience_us or not self.disks.wanting()
