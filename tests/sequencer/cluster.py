"""A small cluster for tests: simulated memory, sequencers that may crash, and brokers reduced to their rings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import Doorbell, Env, SilentBell
from embarcadero.fabric.layout import (
    ORDER,
    PENDING,
    RESULT,
    STANDING_WORD,
    BrokerLine,
    Entries,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
    join,
)
from embarcadero.fabric.leader import EpochTable, create_epochs
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, RingReader, attach_ring, create_ring
from embarcadero.fabric.log import create_log
from embarcadero.fabric.region import EPOCHS_REGION
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.sequencer.leader.leadership import ClusterParts
from embarcadero.sequencer.leader.sequencer import Sequencer, lead
from embarcadero.types import NO_SESSION, EntryKind, Outcome
from embarcadero_proof.sim.incoherent import IncoherentHost, IncoherentMemory, IncoherentRegion
from tests.clocks import ManualClock

SIZES = FabricSizes(
    pending_slots=16, order_slots=32, held_slots=8, log_bytes=4096, chunk_bytes=1024, sessions=8, round_entries=8
)


STEP_US = 2_000
"""Time between two rounds: enough for the sequencer to read the store each time."""


class Crash(Exception):
    """Kill the process."""


class Views:
    """The regions that one host has mapped: attached once, as in a process."""

    def __init__(self, fabric: IncoherentHost) -> None:
        self.fabric = fabric
        self._rings: dict[str, RingReader] = {}
        self._regions: dict[str, IncoherentRegion] = {}

    def ring(self, name: str, dtype: np.dtype[np.void], commit: str = "index") -> RingReader | None:
        """A ring, if it exists."""
        if name not in self._rings and self.fabric.exists(name):
            self._rings[name] = attach_ring(self.fabric, name, dtype, commit)
        return self._rings.get(name)

    def word(self, name: str, offset: int) -> int:
        """A frontier word; 0 if the region does not exist."""
        if name not in self._regions and self.fabric.exists(name):
            self._regions[name] = self.fabric.attach(name)
        return FrontierReader(self._regions[name], offset).load() if name in self._regions else 0


class Broker:
    """Publishes pending entries and reads results, by the rules."""

    def __init__(self, cluster: Cluster, number: int, host: str) -> None:
        self.cluster, self.host = cluster, host
        self.member = cluster.directory.members.register(number, "localhost", 9000 + number, 1)
        self.fabric = cluster.memory.host(host)
        self._views = Views(self.fabric)
        prefix, sizes = self.member.region_prefix, cluster.sizes
        frontiers, _ = create_log(self.fabric, prefix, sizes, number, self.member.incarnation)
        self.ring = create_ring(self.fabric, f"{prefix}/pending", RegionKind.PENDING, PENDING, sizes.pending_slots)
        self._read = FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_READ))
        self._read_epoch = FrontierWriter(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH))
        self._heartbeat = FrontierWriter(frontiers, frontier_offset(BrokerLine.HEARTBEAT))
        self.stopped = False
        self._table = EpochTable(self.fabric, self.fabric.attach(EPOCHS_REGION))
        self.free_below = 0
        self.reading = True
        self.answers: dict[int, tuple[int, ...]] = {}
        self.answered: list[int] = []  # pending indices, in the order of their first answers

    @property
    def room(self) -> int:
        """Free pending slots."""
        return self.ring.slots - (self.ring.next - self.free_below)

    def publish(self, *entries: Entries) -> int:
        """Write and publish entries; the pending index of the first."""
        made = join(entries)
        first = self.ring.write(made, self.free_below)
        self.ring.publish()
        return first

    def batches(self, lane: int, session: int, *seqs: int, crc: int | None = None, low: int = 0) -> int:
        """Publish batches of one session."""
        made = np.zeros(len(seqs), dtype=PENDING)
        made["kind"], made["lane"], made["session"], made["session_seq"] = EntryKind.BATCH, lane, session, seqs
        made["count"], made["crc"], made["low"] = 2, [s % 97 if crc is None else crc for s in seqs], low
        return self.publish(made)

    def request(self, kind: EntryKind, lane: int, session: int = NO_SESSION, name: int = 0) -> int:
        """Publish a request; its pending index."""
        made = np.zeros(1, dtype=PENDING)
        made["kind"], made["lane"], made["session"], made["session_seq"] = kind, lane, session, name
        return self.publish(made)

    def poll(self) -> None:
        """Read results and free slots, if the epoch may be acted on."""
        if self.stopped:
            return
        self._heartbeat.advance(self._heartbeat.value + 1)
        epoch = self.cluster.directory.elections.started_epoch()
        line = frontier_offset(SequencerLine.BROKERS + self.member.handle)
        through = self._views.word(f"epoch-{epoch}/frontiers", line)
        if epoch and not self._table.superseded(epoch):
            self.free_below = max(self.free_below, through)
        name = f"epoch-{epoch}/results-{self.member.broker}.{self.member.incarnation}"
        ring = self._views.ring(name, RESULT, "position")
        if self.reading and ring is not None:
            self._take_answers(epoch, ring)

    def _take_answers(self, epoch: int, ring: RingReader) -> None:
        if self._read_epoch.value != epoch:
            self._read.restart(0)
            self._read_epoch.advance(epoch)
        found = ring.read(self._read.value, ring.frontier.load())
        if self._table.superseded(epoch):
            return
        for result in found:
            fields = tuple(int(result[name]) for name in ("outcome", "index", "seq", "session_seq", "extra", "session"))
            number = int(result["pending"])
            assert self.answers.setdefault(number, fields) == fields, f"{number} was answered in two ways"
            self.answered.append(number)
        self._read.advance(self._read.value + len(found))

    def standing(self) -> Standing:
        """The state that the newest sequencer assigns to this incarnation."""
        epoch = self.cluster.directory.elections.started_epoch()
        line = frontier_offset(SequencerLine.BROKERS + self.member.handle) + 8 * STANDING_WORD
        return Standing(self._views.word(f"epoch-{epoch}/frontiers", line))

    def closing(self) -> bool:
        """Whether the sequencer closed this incarnation."""
        return self.standing() is Standing.CLOSING

    def outcome(self, number: int) -> Outcome | None:
        """The outcome of an entry, as far as known."""
        return Outcome(self.answers[number][0]) if number in self.answers else None


class Cluster:
    """Brokers, one sequencer at a time, and a reader that remembers every position it saw."""

    def __init__(self, seed: int = 0, brokers: int = 2, sizes: FabricSizes = SIZES) -> None:
        self.rng = random.Random(seed)
        self.directory = Directory(MemoryStore())
        self.memory = IncoherentMemory(self.rng, self.directory.generation)
        self.clock, self.sizes = ManualClock(), sizes
        create_epochs(self.memory.host("admin"))
        self.reigns = 0
        self.sequencer = self.new_sequencer()
        self.brokers = [Broker(self, number, f"broker-{number}") for number in range(brokers)]
        reader = self.memory.host("reader")
        self._views, self._reader_table = Views(reader), EpochTable(reader, reader.attach(EPOCHS_REGION))
        self.log: dict[int, dict[int, bytes]] = {}  # lane -> index -> entry
        self.run(2)

    @property
    def host(self) -> str:
        """Where the newest sequencer runs."""
        return f"sequencer-{self.reigns}"

    @property
    def next_host(self) -> str:
        """Where the next sequencer will run."""
        return f"sequencer-{self.reigns + 1}"

    def new_sequencer(self) -> Sequencer:
        """The next sequencer, on a host of its own."""
        self.reigns += 1
        fabric = self.memory.host(self.host)
        self.sequencer = lead(Env(self.clock), fabric, self.directory, self.sizes)
        return self.sequencer

    def ready_sequencer(self, bell: Doorbell | None = None) -> Sequencer:
        """A standby that prepares a takeover on a host of its own, while the leader continues."""
        fabric = self.memory.host(f"ready-{self.reigns}")
        return Sequencer(Env(self.clock, bell or SilentBell()), ClusterParts(fabric, self.directory, self.sizes))

    def run(self, rounds: int = 1, churn: int = 0) -> int:
        """Rounds, with brokers and the reader in between. Returns the amount of work done."""
        work = 0
        for _ in range(rounds):
            self.clock.us += STEP_US
            self.memory.churn(churn)
            work += self.sequencer.round()
            self.memory.churn(churn)
            for broker in self.brokers:
                broker.poll()
            self.read()
        return work

    def settle(self) -> None:
        """Run until nothing happens any more."""
        while self.run():
            pass
        self.run()

    def topic(self, order: int = 5, **options: Any) -> int:
        """Create a topic; its lane."""
        lane = self.directory.topics.create(f"t{len(self.directory.topics.all())}", order=order, **options).lane
        self.run()
        return lane

    def open(self, lane: int, name: int = 0, broker: int = 0) -> int:
        """Open a session; its handle."""
        number = self.brokers[broker].request(EntryKind.SESSION_OPEN, lane, NO_SESSION, name)
        self.run(2)
        assert self.brokers[broker].outcome(number) == Outcome.OPENED
        return self.brokers[broker].answers[number][5]

    # --- the reader ---
    def read(self) -> None:
        """Read all lanes to their frontiers, by the rules, and check that no position ever changes."""
        epoch = self.directory.elections.started_epoch()
        for topic in self.directory.topics.all():
            seen, ring = (
                self.log.setdefault(topic.lane, {}),
                self._views.ring(f"epoch-{epoch}/order-{topic.lane}", ORDER),
            )
            if ring is None:
                continue
            ordered = ring.frontier.load()
            start = max(0, ordered - ring.slots + self.sizes.round_entries)
            entries = ring.read(start, ordered)
            if self._reader_table.superseded(epoch):
                continue
            assert len(entries) == ordered - start, "everything below the frontier is valid"
            assert ordered >= len(seen), "the end never moves back"
            for index, entry in enumerate(entries, start):
                raw = entry.tobytes()[:60]
                assert seen.setdefault(index, raw) == raw, f"position {index} changed"

    def entries(self, lane: int) -> Entries:
        """All entries of a lane that were ever seen, in order; there are no holes."""
        seen = self.log.get(lane, {})
        assert sorted(seen) == list(range(len(seen)))
        return np.frombuffer(b"".join(seen[i] + b"\0\0\0\0" for i in range(len(seen))), dtype=ORDER)

    def stored(self, lane: int) -> list[tuple[int, int]]:
        """(session, sequence) of all batches of a lane, in order."""
        batches = self.entries(lane)
        batches = batches[batches["kind"] == EntryKind.BATCH]
        return list(zip(batches["session"].tolist(), batches["session_seq"].tolist(), strict=True))

    # --- faults ---
    def at_primitive(self, number: int, action: Callable[[], None], host: str | None = None) -> list[int]:
        """Run a function before the n-th memory primitive of the sequencer's (or another) host from now on.

        The primitives are counted in the returned list.
        """
        count, victim = [0], host or self.host

        def interrupt(host: str) -> None:
            if host == victim:
                count[0] += 1
                if self.rng.random() < 0.05:
                    self.memory.churn(2)
                if count[0] == number:
                    self.memory.interrupt = None
                    action()

        self.memory.interrupt = interrupt
        return count
