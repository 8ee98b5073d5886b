"""A cluster with replicas whose durable lines are written by hand, and whose disks are dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embarcadero.env import Env, SilentBell
from embarcadero.errors import BadSegment
from embarcadero.fabric.layout import ORDER, Entries, RangeWord, sealed
from embarcadero.fabric.leader import Durability, EpochTable, create_durable, create_epochs
from embarcadero.fabric.lines import TaggedReader, attach_ring
from embarcadero.fabric.region import EPOCHS_REGION, Fabric, checkpoint_region, ranges_region
from embarcadero.fabric.shared import MirroredFabric
from embarcadero.placement.records import EarlierGeneration
from embarcadero.sequencer.leader.sequencer import Sequencer, lead
from embarcadero.sequencer.order.checkpoint import read_checkpoint
from embarcadero.sequencer.ranges import recovery
from embarcadero.types import Range, Topic
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.sequencer.cluster import Broker, Cluster, Views


class HandReplica:
    """A replica incarnation reduced to its durable lines."""

    def __init__(self, cluster: ReplicatedCluster, number: int, disk: str = "") -> None:
        self.cluster, self.number = cluster, number
        register = cluster.directory.replicas.register
        self.member = register(number, disk or f"disk-{number}", f"/replica-{number}", f"host-{number}", 0)
        self.fabric = cluster.memory.host(self.member.ref.region_prefix)
        self.table = create_durable(self.fabric, self.member.ref)
        self.alive = True

    def beat(self) -> None:
        """Send a heartbeat."""
        self.table.heartbeat.advance(self.table.heartbeat.value + 1)

    def line(self, range_: Range, value: int) -> None:
        """Publish a durable line; the entries below it are on the simulated disk."""
        tags = (range_.lane, range_.number)
        if tags not in self.table:
            self.table.add(tags, value)
        self.table.set(tags, value)
        self.cluster.remember(range_.lane)

    def die(self) -> None:
        """Stop, and mark it dead in the store."""
        self.alive = False
        self.cluster.directory.replicas.mark_dead(self.number, self.member.incarnation)


class Disks:
    """Content of all disks: every entry ever ordered, since tests control each replica's share by its line."""

    def __init__(self) -> None:
        self.log: dict[int, dict[int, bytes]] = {}
        self.checkpoints: dict[int, dict[int, bytes]] = {}
        self.broken = False

    def checkpoint(self, topic: Topic, at_most: int) -> tuple[int, bytes] | None:
        found = {index: data for index, data in self.checkpoints.get(topic.lane, {}).items() if index <= at_most}
        return max(found.items()) if found else None

    def entries(self, range_: Range, start: int, stop: int) -> Entries:
        log = self.log.get(range_.lane, {})
        if self.broken or any(index not in log for index in range(start, stop)):
            raise BadSegment("not there", "look elsewhere")
        return np.frombuffer(b"".join(log[index] for index in range(start, stop)), dtype=ORDER)


class Bells(SilentBell):
    """Records which doorbells were rung."""

    def __init__(self) -> None:
        self.rung: list[str] = []

    def ring(self, who: str) -> None:
        self.rung.append(who)


class Diary:
    """A journal for tests to inspect."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, /, **facts: object) -> None:
        self.events.append((event, facts))

    warn = note

    def of(self, event: str) -> list[dict[str, object]]:
        """Facts of all events of one kind."""
        return [facts for name, facts in self.events if name == event]


class ReplicatedCluster(Cluster):
    """Brokers, a sequencer, replicas by hand; and a restart that loses all memory."""

    def __init__(self, seed: int = 0, replicas: int = 3, **options: Any) -> None:
        self.replicas: list[HandReplica] = []
        self.disks, self.bells, self.diary = Disks(), Bells(), Diary()
        self.first: dict[int, int] = {}
        self.mirror = ""  # from the next loss of memory on: where the fabric is mirrored
        self.mirrors: dict[int, IncoherentMemory] = {}
        super().__init__(seed, **options)
        for number in range(replicas):
            self.replica(number)

    def new_sequencer(self) -> Sequencer:
        self.reigns += 1
        fabric = self.writer(self.host)
        before, recovery.DiskSource = recovery.DiskSource, lambda *_: self.disks  # type: ignore[misc, assignment]
        try:
            self.sequencer = lead(
                Env(self.clock, self.bells, self.diary), fabric, self.directory, self.sizes, mirrors=self.mirror_of
            )
        finally:
            recovery.DiskSource = before  # type: ignore[misc]
        return self.sequencer

    def writer(self, host: str) -> Fabric:
        """The fabric as a writer has it: with its mirror, if any."""
        memory = self.mirrors.get(self.directory.generation & 0xFFFF_FFFF)
        fabric = self.memory.host(host)
        return fabric if memory is None else MirroredFabric(fabric, memory.host(host))

    def mirror_of(self, past: EarlierGeneration) -> Fabric | None:
        """The mirror of an earlier generation."""
        return self.mirrors[past.generation].host("later") if past.generation in self.mirrors else None

    def replica(self, number: int, disk: str = "") -> HandReplica:
        """Start a replica, or a new incarnation of one."""
        self.replicas = [replica for replica in self.replicas if replica.number != number]
        made = HandReplica(self, number, disk)
        self.replicas = sorted([*self.replicas, made], key=lambda replica: replica.number)
        return made

    def run(self, rounds: int = 1, churn: int = 0) -> int:
        for replica in self.replicas:
            if replica.alive:
                replica.beat()
        return super().run(rounds, churn)

    def wait(self, seconds: float, step: float = 0.05) -> None:
        """Advance the time, in rounds."""
        for _ in range(int(seconds / step)):
            self.clock.us += int(step * 1_000_000)
            self.run()

    def replicated(self, order: int = 5, replicas: int = 3, durable_on: int = 2, **options: Any) -> int:
        """A topic with replicas, started; its lane."""
        lane = self.topic(order, replicas=replicas, durable_on=durable_on, **options)
        for _ in range(10):
            self.clock.us += 20_000
            self.run()
        return lane

    def open_range(self, lane: int) -> Range:
        """The lane's open range in the store."""
        range_ = self.directory.ranges.open_range(lane)
        assert range_ is not None
        return range_

    def word(self, lane: int) -> tuple[RangeWord, int] | None:
        """The range word and target of the newest started epoch."""
        fabric = self.memory.host("looker")
        name = ranges_region(self.directory.elections.started_epoch())
        table = TaggedReader(fabric.attach(name))
        word = table.load((lane, 0))
        return None if word is None else (RangeWord.decode(word), table.load((lane, 0), 1) or 0)

    def lines(self, lane: int, *values: int | None) -> None:
        """Publish durable lines of the open range, one per replica that it names."""
        range_ = self.open_range(lane)
        by_ref = {replica.member.ref: replica for replica in self.replicas}
        for ref, value in zip(range_.replicas, values, strict=True):
            if value is not None:
                by_ref[ref].line(range_, value)

    def remember(self, lane: int) -> None:
        """Entries ordered so far may be on disks from here on; checkpoints too."""
        epoch = self.directory.elections.started_epoch()
        fabric = self.memory.host("disk")
        topic_lane = f"epoch-{epoch}/order-{lane}"
        broker_lanes = [found.region for found in self.directory.lanes.all() if found.lane == lane]
        for name in [topic_lane, *broker_lanes]:
            if fabric.exists(name):
                ring = attach_ring(fabric, name, ORDER)
                end = ring.frontier.load()
                log = self.disks.log.setdefault(lane, {})
                entries = ring.load(max(0, end - ring.slots), end)
                for entry in entries[sealed(entries)]:
                    log.setdefault(int(entry["index"]), entry.tobytes())
        if fabric.exists(checkpoint_region(epoch, lane)):
            found = read_checkpoint(fabric, checkpoint_region(epoch, lane))
            if found is not None:
                self.disks.checkpoints.setdefault(lane, {})[found.index] = found.data()

    def counter(self, host: str = "counter") -> Durability:
        """A counter of durable lines, as in brokers, on a host of its own."""
        fabric = self.memory.host(host)
        counter = Durability(fabric, EpochTable(fabric, fabric.attach(EPOCHS_REGION)), self.directory.ranges.get)
        counter.follow(self.directory.elections.started_epoch())
        return counter

    def lose_memory(self, replicas: dict[int, str] | None = None, brokers: int = 2) -> None:
        """Stop everything, drop the fabric, and start the cluster again with these replicas (and disks)."""
        self.memory.interrupt = None
        self.directory.begin_generation(self.mirror)
        self.memory = IncoherentMemory(self.rng, self.directory.generation)
        if self.mirror:
            mirror = IncoherentMemory(self.rng, self.directory.generation)
            self.mirrors[self.directory.generation & 0xFFFF_FFFF] = mirror
        create_epochs(self.writer("admin"))
        self.replicas, self.log = [], {}
        for number, disk in (replicas if replicas is not None else dict.fromkeys(range(3), "")).items():
            self.replica(number, disk)
        self.new_sequencer()
        self.brokers = [Broker(self, number, f"broker-{number}") for number in range(brokers)]
        reader = self.memory.host("reader")
        self._views, self._reader_table = Views(reader), EpochTable(reader, reader.attach(EPOCHS_REGION))
        self.run(2)

    def read(self) -> None:
        """Recovered lanes may start anywhere: only existing positions are compared."""
        epoch = self.directory.elections.started_epoch()
        for topic in self.directory.topics.all():
            ring = self._views.ring(f"epoch-{epoch}/order-{topic.lane}", ORDER)
            if ring is None:
                continue
            end = ring.frontier.load()
            seen = self.log.setdefault(topic.lane, {})
            start = max(0, end - ring.slots + self.sizes.round_entries)
            entries = ring.load(start, end)
            if self._reader_table.superseded(epoch):
                continue
            for index, (entry, whole) in enumerate(zip(entries, sealed(entries), strict=True), start):
                if int(entry["index"]) == index and whole:
                    raw = entry.tobytes()[:60]
                    assert seen.setdefault(index, raw) == raw, f"position {index} changed"

    def at_each_primitive(self, action: Callable[[], None], host: str) -> list[int]:
        """Run a function before every memory primitive of a host."""
        count = [0]

        def interrupt(who: str) -> None:
            if who == host:
                count[0] += 1
                self.memory.interrupt = None
                action()
                self.memory.interrupt = interrupt

        self.memory.interrupt = interrupt
        return count
