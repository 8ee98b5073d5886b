"""A small cluster for replica tests: simulated memory, real disks, a sequencer and a broker by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embarcadero.config import Config, FabricSizes
from embarcadero.config.table import ReplicaKeys as Settings
from embarcadero.env import Disk, Env
from embarcadero.fabric.layout import (
    ORDER,
    PENDING,
    SEQUENCER_FRONTIERS_BYTES,
    STANDING_WORD,
    BrokerLine,
    Entries,
    RangeWord,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
)
from embarcadero.fabric.leader import DurableLines, EpochTable, create_epochs, create_ranges, durable_through
from embarcadero.fabric.lines import FrontierWriter, RingWriter, create_ring
from embarcadero.fabric.log import LogWriter, create_log
from embarcadero.fabric.region import EPOCHS_REGION, Shape
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.replica.copies import ReplicaContext
from embarcadero.replica.replica import Replica
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import open_folder
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.types import EntryKind, MemberState, Range, ReplicaMember, ReplicaRef, TopicLane
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.clocks import ManualClock

SIZES = FabricSizes(
    pending_slots=64, order_slots=256, held_slots=64, log_bytes=64 * 1024, chunk_bytes=8 * 1024, sessions=64,
    round_entries=32,
)  # fmt: skip


class Bell:
    """Records which doorbells were rung."""

    def __init__(self) -> None:
        self.rung: list[str] = []

    def ring(self, who: str) -> None:
        self.rung.append(who)


class Slow:
    """Workers that run a job immediately, and deliver its result on request."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append(partial(done, job()))


class Notes:
    """A journal that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, /, **facts: object) -> None:
        self.events.append((event, facts))

    warn = note

    def count(self, event: str) -> int:
        return sum(what == event for what, _ in self.events)


class Writer:
    """Orders batches of one lane: the sequencer's part of orders 2 and 5, or a broker's of 0 and 1."""

    def __init__(self, ring: RingWriter, broker: FakeBroker) -> None:
        self.ring, self.broker = ring, broker
        self.seq = 0
        self.written: list[tuple[bytes, bytes]] = []  # entry and payload by index

    def batches(self, *payloads: bytes, publish: bool = True) -> int:
        """Order batches with these payloads (an empty one is a session request); returns the next index."""
        made = np.zeros(len(payloads), dtype=ORDER)
        for number, payload in enumerate(payloads):
            entry = made[number]
            entry["kind"], entry["seq"] = EntryKind.BATCH if payload else EntryKind.SESSION_OPEN, self.seq
            entry["origin"], entry["append_us"] = self.broker.member.handle, 1_700_000_000_000_000 + self.seq
            if payload:
                entry["location"], entry["crc"] = self.broker.store(payload), payload_crc(payload)
                entry["size"], entry["count"] = len(payload), 2
                self.seq += 2
        self.ring.write(made, self.ring.next + len(made) - self.ring.slots)
        self.written += [(made[number].tobytes(), payload) for number, payload in enumerate(payloads)]
        if publish:
            self.ring.publish()
        return self.ring.next

    def inherit(self, other: Writer, count: int) -> None:
        """Write again the entries that an earlier epoch ordered."""
        entries = np.frombuffer(b"".join(entry for entry, _ in other.written[:count]), dtype=ORDER).copy()
        self.ring.write(entries, 0)
        self.ring.publish()
        self.written, self.seq = other.written[:count], sum(2 for _, payload in other.written[:count] if payload)


class FakeBroker:
    """A broker's log and frontiers."""

    def __init__(self, world: World, number: int = 0) -> None:
        self.member = world.directory.members.register(number, "localhost", 9000 + number, 1)
        self.fabric = world.memory.host(f"broker-{number}")
        prefix = self.member.region_prefix
        frontiers, log = create_log(self.fabric, prefix, SIZES, number, self.member.incarnation)
        create_ring(self.fabric, f"{prefix}/pending", RegionKind.PENDING, PENDING, SIZES.pending_slots)
        self.log = LogWriter(log, frontiers)
        self.waiting = FrontierWriter(frontiers, frontier_offset(BrokerLine.DURABLE_WAITING))

    def store(self, payload: bytes) -> int:
        """Put a payload into the log; chunks are freed as it wraps around."""
        place = self.log.reserve(len(payload))
        assert place is not None
        place.view[:] = payload
        self.log.flush(place)
        self.log.release(place.location)
        return place.location

    def lane(self, lane: TopicLane) -> Writer:
        """One of its own lanes."""
        return Writer(create_ring(self.fabric, lane.region, RegionKind.ORDER, ORDER, SIZES.order_slots // 2), self)


class Reign:
    """One epoch: its frontiers, range words, and order rings."""

    def __init__(self, world: World) -> None:
        self.world, self.number = world, world.directory.elections.next_epoch()
        self.fabric = world.memory.host(f"sequencer-{self.number}")
        self._table = EpochTable(self.fabric, self.fabric.attach(EPOCHS_REGION, writable=True))
        self._table.open(self.number)
        self.frontiers = self.fabric.create(
            f"epoch-{self.number}/frontiers", Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self.words = create_ranges(self.fabric, self.number)

    def start(self) -> None:
        for member in self.world.directory.members.all():
            if member.state is MemberState.LIVE:
                self.count(member.handle, Standing.OPEN)
        assert self.world.directory.elections.start_epoch(self.number, {})
        self._table.start(self.number)

    def lane(self, lane: int, start: int = 0) -> Writer:
        name = f"epoch-{self.number}/order-{lane}"
        ring = create_ring(self.fabric, name, RegionKind.ORDER, ORDER, SIZES.order_slots)
        ring.next = start
        ring.publish()
        return Writer(ring, self.world.broker)

    def say(self, lane: int, number: int, closing: bool = False, target: int = 0) -> None:
        """Write a lane's range word."""
        word = RangeWord(number, closing).encode()
        if (lane, 0) not in self.words:
            self.words.add((lane, 0), word, target)
        self.words.set((lane, 0), target, 1)
        self.words.set((lane, 0), word)

    def count(self, handle: int, standing: Standing) -> None:
        """Publish the state that the sequencer assigns to a broker incarnation."""
        line = frontier_offset(SequencerLine.BROKERS + handle) + 8 * STANDING_WORD
        FrontierWriter(self.frontiers, line).restart(standing)

    def close_broker(self, handle: int) -> None:
        self.count(handle, Standing.CLOSING)


class World:
    """Replicas, one leader at a time, one broker."""

    def __init__(self, path: Path, seed: int = 0, replicas: int = 1, **settings: Any) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.store = MemoryStore(alive=lambda _pid: True)
        self.clock, self.settings = ManualClock(), Config(replica=Settings(**settings))
        self.directory = Directory(self.store)
        self.replicas: dict[int, Replica] = {}
        self.notes: dict[int, Notes] = {}
        self.bell = Bell()
        self._begin(replicas)

    def _begin(self, replicas: int) -> None:
        self.memory = IncoherentMemory(self.rng, self.directory.generation)
        self.lines = DurableLines(self.memory.host("counter"))
        create_epochs(self.memory.host("admin"))
        for number in range(replicas):
            self.start_replica(number)
        self.broker = FakeBroker(self)
        self.reign = Reign(self)
        self.reign.start()

    # --- replicas -----------------------------------------------------------------------------------------------------
    def folder(self, number: int) -> Path:
        return self.path / f"replica-{number}"

    def start_replica(self, number: int, disk: Disk | None = None) -> Replica:
        """A new incarnation, on the folder of the last one."""
        files = disk or RealDisk(self.folder(number), create=True)
        identity = open_folder(files, self.directory.cluster_id, number, self.directory.generation & 0xFFFF_FFFF)
        member = self.directory.replicas.register(number, identity.disk, str(self.folder(number)), "here", 1)
        self.notes[number] = Notes()
        fabric = self.memory.host(member.ref.region_prefix)
        self.replicas[number] = Replica(
            ReplicaContext.create(
                Env(self.clock, self.bell, self.notes[number], disks=self.disk_of),
                fabric,
                self.directory,
                files,
                member,
                self.settings,
            )
        )
        return self.replicas[number]

    @staticmethod
    def disk_of(member: ReplicaMember) -> Disk:
        return RealDisk(member.folder)

    def kill_replica(self, number: int, known: bool = True) -> None:
        """Kill the process; its files and its region stay."""
        replica = self.replicas.pop(number)
        replica.close()
        replica._context.disk.close()
        self.memory.crash(replica.member.ref.region_prefix)
        if known:
            self.directory.replicas.mark_dead(number, replica.member.incarnation)

    def lose_fabric(self, replicas: int) -> None:
        """Kill everything, and start the cluster again on the same disks."""
        for number in list(self.replicas):
            self.kill_replica(number, known=False)
        self.directory.begin_generation()
        self._begin(replicas)

    # --- running ------------------------------------------------------------------------------------------------------
    def poll(self, rounds: int = 1, churn: int = 0, step_us: int = 5_000) -> bool:
        """Passes of all replicas."""
        moved = False
        for _ in range(rounds):
            self.clock.us += step_us
            for replica in list(self.replicas.values()):
                self.memory.churn(churn)
                moved |= replica.poll()
        return moved

    def settle(self, rounds_max: int = 500) -> None:
        """Run until nothing moves."""
        for _ in range(rounds_max):
            if not self.poll(3):
                return
        raise AssertionError("it never settles")

    def topic(self, name: str = "t", order: int = 2, replicas: int = 1, durable_on: int = 1, **more: Any) -> int:
        return self.directory.topics.create(name, order=order, replicas=replicas, durable_on=durable_on, **more).lane

    # --- observations
    # ---------------------------------------------------------------------------------------------------
    def range_(self, lane: int, number: int = 1) -> Range:
        found = self.directory.ranges.get(lane, number)
        assert found is not None
        return found

    def line(self, ref: ReplicaRef, lane: int, number: int = 1, word: int = 0) -> int | None:
        table = self.lines.of(ref)
        return None if table is None else table.load((lane, number), word)

    def durable(self, lane: int, number: int = 1) -> int:
        range_ = self.range_(lane, number)
        return durable_through(range_, self.lines.load(range_))

    def files(self, replica: int, lane: int, number: int = 1, end: int = 1 << 40) -> list[tuple[bytes, bytes]]:
        """Entries and payloads in a replica's files."""
        start, found = self.range_(lane, number).start, list[tuple[bytes, bytes]]()
        reader = RangeReader(RealDisk(self.folder(replica)), range_folder(lane, number), lane, number, start)
        start = max(start, reader.first or 0)
        while True:
            entries, payloads = reader.read(start, end, 1 << 20)
            if not len(entries):
                reader.close()
                return found
            found += list(zip(lines_of(entries), map(bytes, payloads), strict=True))
            start += len(entries)


def lines_of(entries: Entries) -> list[bytes]:
    return [entries[number].tobytes() for number in range(len(entries))]
