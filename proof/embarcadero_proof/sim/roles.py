"""The cluster's roles as simulated processes: production role code, driven by the event queue.

Pollers sleep longer and longer while nothing happens, and a doorbell (which may be lost) wakes them. So quiet times
cost nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import msgspec

from embarcadero.broker.broker import Broker
from embarcadero.broker.clients import Transport
from embarcadero.broker.connection import Connection
from embarcadero.broker.context import BrokerContext, lane_margin
from embarcadero.broker.disk_reads import TableJobs
from embarcadero.config import DEFAULTS
from embarcadero.env import Env
from embarcadero.errors import DiskFailed, DiskFull, WrongFolder
from embarcadero.limits import HELLO_TIMEOUT_S
from embarcadero.placement.directory import Directory
from embarcadero.replica.copies import ReplicaContext
from embarcadero.replica.replica import Replica
from embarcadero.sequencer.leader.leadership import ClusterParts
from embarcadero.sequencer.leader.sequencer import Sequencer, StandbySequencer
from embarcadero.storage.folder import open_folder
from embarcadero.types import Member, ReplicaMember
from embarcadero_proof.sim.history import EpochStarted, RoleFailed, Sampled
from embarcadero_proof.sim.network import Address, Wire
from embarcadero_proof.sim.process import Process
from embarcadero_proof.sim.steps import SimSteps
from embarcadero_proof.sim.workers import SimWorkers

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_SLEEP_FIRST_US = 800
_BREATH_US = 30_000
"""Time between being ready for a planned move and beginning it. Meanwhile the leader continues."""


class SimBell:
    """A doorbell to other processes of the cluster. A ring may be lost."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def ring(self, who: str) -> None:
        world = self._process.world
        sleeper = world.pollers.get(who)
        if sleeper is not None and self._process.rng.random() >= world.plan.bell_loss:
            sleeper.wake(self._process.rng.randrange(5, 1_200))


class SimJournal:
    """The journal of a role: its notes go into the trace."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def note(self, event: str, /, **facts: object) -> None:
        text = ", ".join(f"{name}={value}" for name, value in facts.items())
        self._process.world.note(self._process.name, f"JOURNAL {event}: {text}")

    def warn(self, event: str, /, **facts: object) -> None:
        self.note(event, **facts)


class Poller(Process):
    """A process with a loop: step, and sleep if the step moved nothing."""

    def __init__(self, world: World, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.directory = Directory(world.store_of(self), ids=world.ids)
        self.fabric = world.fabric_of(self.role, host)
        self.bell = SimBell(self)
        self.journal = SimJournal(self)
        self.steps = SimSteps(self)
        self.workers = SimWorkers(self, self.job_us)
        self._sleep_us = _SLEEP_FIRST_US
        self._planned_us: int | None = None

    def start(self) -> None:
        """Begin. Others may already know this process: it can be interrupted or crash from its first instruction on."""
        self.submit(self._boot)

    @abstractmethod
    def _boot(self) -> None: ...

    def wake(self, delay_us: int) -> None:
        """Step after a delay, if that is earlier than planned."""
        when_us = self.world.queue.now_us + delay_us
        if self._planned_us is None or when_us < self._planned_us:
            self._planned_us = when_us
            self.world.queue.at(when_us, lambda: self._due(when_us))

    def _due(self, when_us: int) -> None:
        if when_us == self._planned_us:
            self.submit(self._poll)

    def _poll(self) -> None:
        self._planned_us = None
        moved = self.step()
        if not self.alive:
            return
        self._sleep_us = _SLEEP_FIRST_US if moved else min(16 * self._sleep_us, self.world.plan.sleep_max_us)
        deadline = self.deadline_us()
        until_us = self._sleep_us if deadline is None else self.clock.queue_time(deadline) - self.world.queue.now_us
        self.wake(max(_SLEEP_FIRST_US // 4, min(self._sleep_us, until_us)))

    def job_us(self) -> int:
        """Return how long the next job on a worker thread takes."""
        return self.rng.randrange(1, 2 * self.world.plan.durable.job_us)

    @abstractmethod
    def step(self) -> bool:
        """Run one pass of the role; True if something moved."""

    @abstractmethod
    def deadline_us(self) -> int | None:
        """Return the latest time of the role's next call, by its own clock."""

    def sample(self, what: str, value: float, bound: float) -> None:
        """Record how full a resource is."""
        self.world.seen(Sampled(at=self.world.queue.now_us, process=self.name, what=what, value=value, bound=bound))


class BrokerProcess(Poller):
    """One broker incarnation."""

    role = "broker"

    def __init__(self, world: World, member: Member, host: str) -> None:
        super().__init__(world, member.region_prefix, host)
        self.member = member
        self.broker: Broker | None = None
        self.wires: set[int] = set()  # connections whose end has not been reported to this broker
        self._ready: dict[int, Wire] = {}  # wires with output at the broker's end
        world.pollers[self.name] = self

    @property
    def address(self) -> Address:
        """The address at which it listens."""
        return self.member.host, self.member.port

    def _boot(self) -> None:
        env = Env(self.clock, self.bell, self.journal, self.workers, self.steps, self.world.disks.seen_by(self))
        context = BrokerContext(env, self.fabric, self.directory, self.member, self.world.sizes)
        tables = self.world.tiering.tables if self.world.tiering.on else None
        self.broker = Broker(context, TableJobs(SimWorkers(self, self.world.tiering.read_us), tables))
        listening = self.world.network.listening
        holder = listening.get(self.address)
        if holder is None or not holder.alive or holder.member.incarnation < self.member.incarnation:
            listening[self.address] = self  # a zombie that was stopped before it listened does not regain the port
        self.bell.ring("sequencer")
        self.wake(0)

    def step(self) -> bool:
        if self.broker is None:
            return False
        moved = self.broker.poll()
        if self.broker.deposed:
            self.world.note(self.name, "is deposed and ends")
            self.die()
        return moved

    def deadline_us(self) -> int | None:
        return self.broker.next_deadline_us() if self.broker is not None else None

    # --- connections --------------------------------------------------------------------------------------------------
    def wire_made(self, wire: Wire) -> None:
        """Accept a client's connection."""
        if self.broker is None:
            return
        self.wires.add(wire.number)
        connection = wire.connection = self.broker.connect(Transport(lambda: self._is_ready(wire)))
        patience_us = int(HELLO_TIMEOUT_S * 1e6)
        self.world.queue.after(patience_us, lambda: self.submit(lambda: self._check_hello(wire, connection)))

    def _is_ready(self, wire: Wire) -> None:
        self._ready.setdefault(wire.number, wire)

    def _check_hello(self, wire: Wire, connection: Connection) -> None:
        if not connection.peer.greeted:
            wire.cut(1, 1)

    def bytes_in(self, wire: Wire, data: bytes) -> None:
        """Receive bytes from a client."""
        connection, rest = wire.connection, memoryview(data)
        while connection is not None and rest and not connection.peer.closing:
            buffer = connection.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            connection.received(count)
        self._ready.setdefault(wire.number, wire)

    def wire_lost(self, wire: Wire) -> None:
        """Close a connection that is gone."""
        self.wires.discard(wire.number)
        if wire.connection is not None:
            wire.connection.closed()

    def after_action(self) -> None:
        ready, self._ready = self._ready, {}
        for wire in ready.values():
            connection = wire.connection
            if connection is None or connection.peer.gone:
                continue
            if output := connection.peer.take_output():
                wire.down.send(b"".join(output))
            if connection.peer.closing:
                wire.finish()

    def on_death(self, silently: bool) -> None:
        self.world.broker_died(self, silently)

    def leave(self) -> None:
        """Stop when asked: settle all accepted batches first."""
        if self.world.network.listening.get(self.address) is self:
            del self.world.network.listening[self.address]
        if self.broker is not None:
            self.submit(self.broker.leave)

    @property
    def unanswered(self) -> int:
        """The number of its entries that have no outcome yet."""
        if self.broker is None or not self.alive:
            return 0
        return len(self.broker.relay.waiting) + self.broker.lanes.unacked

    def take_last_sample(self) -> None:
        """Check at the end that every published entry has an outcome."""
        self.sample("entries without an outcome", self.unanswered, 0)

    def take_samples(self) -> None:
        """Record how full the broker is."""
        if self.broker is not None and self.alive:
            ingest, sizes = self.broker.ingest, self.world.sizes
            self.sample("pending slots", ingest.used_slots, sizes.pending_slots)
            self.sample("log", ingest.log.occupied(), 1.0)
            self.sample("entries of lanes without an ack", self.broker.lanes.unacked, lane_margin(sizes))
            self.sample("unresolved entries", len(self.broker.relay.waiting), sizes.results_slots)


class ReplicaProcess(Poller):
    """One run of a replica, from its start to its end. It keeps the disk on which it was started."""

    role = "replica"

    def __init__(self, world: World, number: int, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.number = number
        self.device = world.disks.of_replica(number)
        self._disk = world.disks.mount(self, lambda: self.device)
        self.member: ReplicaMember | None = None
        self.replica: Replica | None = None

    def job_us(self) -> int:
        return super().job_us() + self.device.slow_us

    def _boot(self) -> None:
        world, directory = self.world, self.directory
        try:
            identity = open_folder(self._disk, directory.cluster_id, self.number, directory.generation & 0xFFFF_FFFF)
            self.member = directory.replicas.register(
                self.number, identity.disk, f"/replica-{self.number}", self.host, pid=1
            )
            world.pollers[self.member.ref.region_prefix] = self
            plan = world.plan.durable
            settings = msgspec.structs.replace(
                DEFAULTS.replica, segment_bytes=plan.segment_bytes, segment_s=plan.segment_s
            )
            placement = msgspec.structs.replace(DEFAULTS.placement, replace_after_s=plan.replace_after_s)
            self.replica = Replica(
                ReplicaContext.create(
                    Env(self.clock, self.bell, self.journal, self.workers, self.steps, world.disks.seen_by(self)),
                    self.fabric,
                    directory,
                    self._disk,
                    self.member,
                    msgspec.structs.replace(DEFAULTS, replica=settings, placement=placement),
                )
            )
        except (DiskFailed, DiskFull, WrongFolder) as error:
            world.note(self.name, f"can't start: {error}")
            self.die()  # the supervisor starts it again later
            return
        world.note(self.name, f"is {self.member.ref.region_prefix}")
        self.wake(0)

    def step(self) -> bool:
        if self.replica is None:
            return False
        moved = self.replica.poll()
        if self.replica.deposed:
            self.world.note(self.name, "is deposed and ends")
            self.die()
        return moved

    def deadline_us(self) -> int | None:
        """None: heartbeats and checks of the store may be late, as on a busy host, so that quiet times cost little."""
        return None

    def on_death(self, silently: bool) -> None:  # noqa: ARG002 - the hook's signature
        self._disk.close()
        self.world.replica_died(self)


class SequencerProcess(Poller):
    """One leadership, from its takeover to its end. With a number: a standby, which may lead any number of times."""

    role = "sequencer"

    def __init__(self, world: World, name: str, host: str, number: int | None = None) -> None:
        super().__init__(world, name, host)
        self.sequencer: Sequencer | None = None
        self.number = number
        self.standby: StandbySequencer | None = None
        self._draining = self.drained = False
        self._ready: Sequencer | None = None  # asked to take over while the other leader still leads
        self._begin_us = 0  # when `_ready` begins
        if number is None:
            world.pollers["sequencer"] = self

    def _boot(self) -> None:
        if self.number is None:
            self._lead(None)
        else:
            after_us = int(DEFAULTS.sequencer.takeover_after_ms * 1_000)
            self.directory.elections.register(self.number, self.name, pid=0)
            env = Env(self.clock, self.bell, self.journal)
            cluster = ClusterParts(self.fabric, self.directory, self.world.sizes)
            self.standby = StandbySequencer(env, cluster, self.number, self.name, after_us)
        self.wake(0)

    def _lead(self, epoch: int | None) -> None:
        self.sequencer = self._make(epoch)
        self.sequencer.begin()
        self._started(self.sequencer, f"starts epoch {self.sequencer.epoch}")

    def _make(self, epoch: int | None) -> Sequencer:
        env = Env(self.clock, self.bell, self.journal, self.workers, self.steps, self.world.disks.seen_by(self))
        mirrors = self.world.mirrors.seen_by(self.host)
        cluster = ClusterParts(self.fabric, self.directory, self.world.sizes, mirrors)
        return Sequencer(env, cluster, epoch=epoch)

    def _begin(self, ready: Sequencer) -> bool:
        if self.clock.now_us() < self._begin_us:
            return False
        self._ready = None
        self.world.elections.leads(self)
        ready.begin()
        self.sequencer = ready
        self._started(ready, f"starts epoch {ready.epoch}, as asked")
        return True

    def _started(self, sequencer: Sequencer, what: str) -> None:
        """Record the start of an epoch, unless a later one has started: this process may have stopped in between."""
        self.world.note(self.name, what)
        directory = self.world.directory
        ends = (
            directory.elections.epoch_ends(sequencer.epoch)
            if directory.elections.started_epoch() == sequencer.epoch
            else None
        )
        if ends is not None:
            self.world.seen(EpochStarted(at=self.world.queue.now_us, epoch=sequencer.epoch, ends=ends))

    def _stand_by(self, standby: StandbySequencer) -> bool:
        """Watch the leader. The end of a process on the same host is visible."""
        watched = next((process for process in self.world.processes if process.name == standby.watched), None)
        if watched is not None and watched.host == self.host and not watched.alive:
            standby.process_ended(watched.name)
        if self._draining or (epoch := standby.look()) is None:
            return False
        if standby.hurries:
            self.world.elections.leads(self)
            self._lead(epoch)
        else:
            self._ready, self._begin_us = self._make(epoch), self.clock.now_us() + _BREATH_US
            self.world.note(self.name, f"is ready for epoch {epoch}")
        return True

    def step(self) -> bool:
        if self._ready is not None:
            return self._begin(self._ready)
        if self.sequencer is None:
            return self.standby is not None and self._stand_by(self.standby)
        if self._draining:
            self.drained = self.drained or self.sequencer.drain()
            return False
        moved = self.sequencer.round() > 0
        if (
            self.sequencer.epoch == self.directory.elections.started_epoch()
        ):  # else another leader may reuse its rings while it reads them
            for problem in self.sequencer.problems:
                self.world.seen(RoleFailed(at=self.world.queue.now_us, process=self.name, error=problem))
        self.sequencer.problems.clear()
        if self.sequencer.deposed and self.standby is not None:
            self.world.note(self.name, "is deposed and stands by")
            self.sequencer = None
        elif self.sequencer.deposed:
            self.world.note(self.name, "is deposed and ends")
            self.die()
        return moved

    def deadline_us(self) -> int | None:
        if self._ready is not None:
            return self._begin_us
        if self.sequencer is None and self.standby is not None:
            return self.clock.now_us() + self.standby.wait_us()
        return self.sequencer.next_deadline_us() if self.sequencer is not None else None

    def drain(self) -> None:
        """Stop when asked: make everything that is ordered durable first."""
        self._draining = True
        self.wake(0)

    def take_samples(self) -> None:
        """Record how full the sequencer is."""
        if self.sequencer is None or not self.alive:
            return
        for number, lane in self.sequencer.lanes.items():
            buffer, table = lane.order.buffer, lane.order.table
            self.sample("batches that wait", buffer.used, buffer.slots)
            if weak := int(table.waiting.count[~table.strong].sum()):
                self.sample(f"batches of weak sessions of lane {number} that wait", weak, 0)
            self.sample(f"sessions of lane {number}", table.used, table.sessions_max)

    def on_death(self, silently: bool) -> None:  # noqa: ARG002 - the hook's signature
        self.world.sequencer_died(self)
