"""A cluster with disks for broker tests: brokers are real; order, ranges, durable lines and files are made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embarcadero.broker.broker import Broker
from embarcadero.broker.context import BrokerContext
from embarcadero.config import FabricSizes
from embarcadero.env import Env, Inline, Workers
from embarcadero.fabric.layout import (
    ORDER,
    PENDING,
    RESULT,
    SEQUENCER_FRONTIERS_BYTES,
    STANDING_WORD,
    RangeWord,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
)
from embarcadero.fabric.leader import EpochTable, create_durable, create_epochs, create_ranges
from embarcadero.fabric.lines import FrontierWriter, RingReader, RingWriter, attach_ring, create_ring
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import EPOCHS_REGION, Shape
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.layout import range_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.segment import RangeSettings
from embarcadero.types import NO_INDEX, EntryKind, Gap, Outcome, Range, ReplicaMember
from embarcadero.wire import messages as m
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.broker.harness import SIZES, Client, CountingBell, ManualClock

SEGMENTS = RangeSettings(cluster="c", segment_bytes=4_096, index_every_bytes=256)


class Hand:
    """The sequencer's part, by hand: reads published batches, orders them as instructed and writes the results."""

    def __init__(self, world: DiskWorld) -> None:
        self._world, self.fabric = (
            world,
            world.memory.host(f"sequencer-{world.directory.elections.started_epoch() + 1}"),
        )
        self.epoch = world.directory.elections.next_epoch()
        self._table = EpochTable(self.fabric, self.fabric.attach(EPOCHS_REGION, writable=True))
        self._table.open(self.epoch)
        self._frontiers = self.fabric.create(
            f"epoch-{self.epoch}/frontiers", Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self.words = create_ranges(self.fabric, self.epoch)
        self.rings: dict[int, RingWriter] = {}
        self.seqs: dict[int, int] = {}
        self._pending: dict[int, tuple[RingReader, RingWriter, FrontierWriter]] = {}
        self.outcomes: dict[int, tuple[Outcome, int]] = {}  # session sequence -> outcome instead of an order
        self._sessions = 0

    def start(self) -> None:
        """Start the epoch, in the store and in memory."""
        assert self._world.directory.elections.start_epoch(self.epoch, {})
        self._table.start(self.epoch)

    def count(self, handle: int, standing: Standing) -> None:
        """Publish the state that the sequencer assigns to a broker incarnation."""
        line = frontier_offset(SequencerLine.BROKERS + handle) + 8 * STANDING_WORD
        FrontierWriter(self._frontiers, line).restart(standing)

    def open_lane(self, lane: int, index: int = 0, seq: int = 0) -> None:
        """Create a lane's order ring, empty, from an index on."""
        ring = create_ring(self.fabric, f"epoch-{self.epoch}/order-{lane}", RegionKind.ORDER, ORDER,
                           self._world.sizes.order_slots)  # fmt: skip
        ring.next = index
        ring.publish()
        self.rings[lane], self.seqs[lane] = ring, seq

    def word(self, lane: int, number: int, closing: bool = False) -> None:
        """Publish which range is open."""
        word = RangeWord(number, closing).encode()
        if (lane, 0) in self.words:
            self.words.set((lane, 0), word)
        else:
            self.words.add((lane, 0), word)

    def order(self) -> None:
        """Read everything that brokers published, and write the results."""
        for broker in self._world.brokers:
            pending, results, through = self._source(broker)
            found = pending.read(through.value, pending.frontier.load())
            answers = [self._answer(entry) for entry in found]
            if answers:
                results.write(np.concatenate(answers), results.next)
                results.publish()
            through.advance(through.value + len(found))

    def _answer(self, entry: Any) -> Any:
        answer = np.zeros(1, dtype=RESULT)
        for name in ("session_seq", "session"):
            answer[name] = entry[name]
        answer["pending"], answer["index"], answer["seq"] = entry["index"], NO_INDEX, NO_INDEX
        kind = EntryKind(int(entry["kind"]))
        if kind == EntryKind.SESSION_OPEN:
            self._sessions += 1
            answer["outcome"], answer["session"], answer["index"] = Outcome.OPENED, self._sessions, 0
            answer["seq"] = 0
        elif kind != EntryKind.BATCH:
            answer["outcome"] = Outcome.NOTED
        elif int(entry["session_seq"]) in self.outcomes:
            answer["outcome"], answer["index"] = self.outcomes[int(entry["session_seq"])]
        else:
            answer["outcome"] = Outcome.ORDERED
            answer["index"], answer["seq"] = self._append(entry)
        return answer

    def _append(self, pending: Any) -> tuple[int, int]:
        lane = int(pending["lane"])
        ring, seq = self.rings[lane], self.seqs[lane]
        entry = np.zeros(1, dtype=ORDER)
        for name in ("session_seq", "session", "location", "size", "count", "crc", "origin", "partition", "kind"):
            entry[name] = pending[name]
        entry["seq"], entry["append_us"] = seq, self._world.clock.wall_us()
        index = ring.write(entry, max(0, ring.next - ring.slots + 1))
        ring.publish()
        self.seqs[lane] += int(pending["count"])
        return index, seq

    def _source(self, broker: Broker) -> tuple[RingReader, RingWriter, FrontierWriter]:
        handle, prefix = broker.member.handle, broker.member.region_prefix
        if handle not in self._pending:
            name = f"epoch-{self.epoch}/results-{broker.member.broker}.{broker.member.incarnation}"
            self._pending[handle] = (
                attach_ring(self.fabric, f"{prefix}/pending", PENDING),
                create_ring(self.fabric, name, RegionKind.RESULTS, RESULT, 1_024, "position"),
                FrontierWriter(self._frontiers, frontier_offset(SequencerLine.BROKERS + handle)),
            )
        return self._pending[handle]


class HandReplica:
    """A replica's part, by hand: copies the entries that a test names, syncs them and publishes its durable line."""

    def __init__(self, world: DiskWorld, number: int) -> None:
        self._world = world
        self.folder = world.path / f"replica-{number}"
        self.folder.mkdir(exist_ok=True)
        self.disk = RealDisk(self.folder)
        self.member: ReplicaMember = world.directory.replicas.register(
            number, f"disk-{number}", str(self.folder), "h", 0
        )
        self.fabric = world.memory.host(f"replica-{number}.{self.member.incarnation}")
        self.lines = create_durable(self.fabric, self.member.ref)
        self.logs: dict[tuple[int, int], RangeLog] = {}
        self._payloads = BrokerLogs(self.fabric, lambda: None)

    def say(self, range_: Range, through: int) -> None:
        """Publish a durable line, whether or not it is true."""
        tags = (range_.lane, range_.number)
        if tags in self.lines:
            self.lines.set(tags, through)
        else:
            self.lines.add(tags, through)

    def copy(self, range_: Range, stop: int, ring: str | None = None) -> None:
        """Copy entries and payloads below `stop` to disk, sync, and publish the durable line."""
        log = self.log(range_)
        self._payloads.update(self._world.directory.members.all())
        name = ring or f"epoch-{self._world.hand.epoch}/order-{range_.lane}"
        entries = attach_ring(self.fabric, name, ORDER).read(log.end, stop)
        payloads = []
        for entry in entries:
            reader = self._payloads.of(int(entry["origin"]))
            assert reader is not None
            payload = reader.copy(int(entry["location"]), int(entry["size"]))
            assert payload is not None
            payloads.append(payload)
        log.append(entries, payloads)
        log.sync_job()()
        self.say(range_, log.end)

    def log(self, range_: Range) -> RangeLog:
        """This replica's copy of a range."""
        key = (range_.lane, range_.number)
        if key not in self.logs:
            self._world.make_folders(self.disk, range_.lane)
            self.logs[key] = RangeLog.create(
                self.disk, range_folder(*key), range_.lane, range_.number, range_.start, range_.start_seq, SEGMENTS
            )
        return self.logs[key]


class DiskWorld:
    """Brokers, an order made by hand, and replicas with folders."""

    def __init__(
        self, path: Path, brokers: int = 2, replicas: int = 3, sizes: FabricSizes = SIZES,
        workers: Callable[[], Workers] = Inline, seed: int = 1,
    ) -> None:  # fmt: skip
        self.path, self.sizes, self.workers = path, sizes, workers
        self.memory = IncoherentMemory(random.Random(seed), generation=7)
        self.directory = Directory(MemoryStore())
        self.clock, self.bell = ManualClock(), CountingBell()
        create_epochs(self.memory.host("admin"))
        self.brokers: list[Broker] = []
        self.replicas = [HandReplica(self, number) for number in range(replicas)]
        self.hand = Hand(self)
        self.hand.start()
        self.brokers = [self.start_broker(number) for number in range(brokers)]

    def start_broker(self, number: int) -> Broker:
        """A new incarnation of a broker, on a host of its own."""
        member = self.directory.members.register(number, "127.0.0.1", 9092 + number, 1)
        self.hand.count(member.handle, Standing.OPEN)
        fabric = self.memory.host(f"host-{number}.{member.incarnation}")
        env = Env(
            self.clock, self.bell, workers=self.workers(), disks=lambda replica: RealDisk(Path(replica.folder))
        )
        return Broker(BrokerContext(env, fabric, self.directory, member, self.sizes))

    @staticmethod
    def make_folders(disk: RealDisk, lane: int) -> None:
        """Folders in which a range's copy is made."""
        disk.make_folder(f"lane-{lane:010d}")

    def topic(self, name: str = "t", order: int = 5, replicas: int = 3, durable_on: int = 2, say: bool = True) -> Range:
        """Create a topic; its first range is open, and its replicas have started."""
        topic = self.directory.topics.create(
            name, order=order, partitions=4, replicas=replicas, durable_on=durable_on, on_gap="fence",
            gap_timeout_ms=None,
        )  # fmt: skip
        self.hand.open_lane(topic.lane)
        range_ = self.directory.ranges.open_range(topic.lane)
        if range_ is None:
            return Range(lane=topic.lane, number=0, start=0, start_seq=0, replicas=[], durable_on=0)
        self.hand.word(topic.lane, range_.number)
        if say:
            for replica in self.of(range_):
                replica.say(range_, range_.start)
        self.run()
        return range_

    def lose_memory(self, range_: Range, end: int, end_seq: int) -> Range:
        """Lose all memory: seal the range, lose everything above its end, open the next range at the ceiling."""
        refs = [replica.member.ref for replica in self.replicas]
        opened = self.directory.ranges.seal_recovered(range_.lane, range_.number, end, end_seq, refs, self.hand.epoch)
        assert opened is not None
        assert opened.start > end
        return opened

    def restart(self, range_: Range, end: int, end_seq: int) -> Range:
        """Drop everything in memory. Brokers and the order start empty; the lane continues in a new range."""
        self.brokers = [self.start_broker(broker.member.broker) for broker in self.brokers]
        self.hand = Hand(self)
        self.hand.start()
        opened = self.lose_memory(range_, end, end_seq)
        self.hand.open_lane(opened.lane, opened.start, opened.start_seq)
        self.hand.word(opened.lane, opened.number)
        for replica in self.of(opened):
            replica.say(opened, opened.start)
        self.run()
        return opened

    def of(self, range_: Range) -> list[HandReplica]:
        """The replicas of a range, in its order."""
        return [self.replicas[ref.replica] for ref in range_.replicas]

    def run(self, rounds: int = 3, *clients: Client) -> None:
        """Run the brokers and the hand-made sequencer for a while."""
        for _ in range(rounds):
            self.clock.us += 60_000
            self.hand.order()
            for broker in self.brokers:
                broker.poll()
        for client in clients:
            client.pump()

    def open(self, client: Client, topic: str = "t") -> m.Opened:
        """Open a session."""
        request = client.ask(m.OpenSession(topic=topic))
        self.run(3, client)
        opened = client.answers[request]
        assert isinstance(opened, m.Opened), opened
        return opened

    def publish(self, client: Client, opened: m.Opened, first: int, count: int, size: int = 20, **fields: Any) -> None:
        """Publish batches with sequences [first, first + count), each of its own bytes."""
        for sequence in range(first, first + count):
            client.batch(opened, sequence, payload(sequence, size), count=2, **fields)
            self.run(1, client)
        self.run(3, client)

    def ask(self, client: Client, message: m.Message) -> Any:
        """Send a request, and return the answer if there is one."""
        request = client.ask(message)
        self.run(2, client)
        return client.answers.get(request) or client.fetched.get(request)

    def fetch(self, client: Client, lane: int, **options: Any) -> Any:
        """Fetch and return the answer, if there is one."""
        return self.ask(client, m.Fetch(lane=lane, **({"max_bytes": 1 << 20} | options)))


def payload(sequence: int, size: int = 20) -> bytes:
    """The content of batch `sequence` in these tests."""
    return (b"%08d" % sequence).ljust(size, b".")


def texts(found: Any) -> list[bytes]:
    """The payloads of an answer."""
    return [bytes(text) for text in found.payloads]


class Later:
    """Workers that run a job only when a test calls `step`."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.most = 0

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))
        self.most = max(self.most, len(self.jobs))

    def step(self) -> None:
        """Do the oldest job."""
        job, done = self.jobs.pop(0)
        try:
            result: Any = job()
        except Exception as error:
            result = error
        done(result)


def fill(world: DiskWorld, range_: Range, batches: int, size: int = 1_500, copies: int = 3) -> Client:
    """Publish batches, made durable a few at a time: far more than memory keeps."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(batches):
        client.batch(opened, sequence, payload(sequence, size), count=2)
        world.run(1, client)
        if sequence % 10 == 9:
            for replica in world.of(range_)[:copies]:
                replica.copy(range_, sequence + 1)
    world.run(3, client)
    assert len(client.acks) == batches
    return client


def scan(world: DiskWorld, client: Client, lane: int, **options: Any) -> tuple[list[bytes], list[Gap]]:
    """Read a lane to its end, fetch by fetch."""
    found, gaps, index = [], [], 0
    ask = {"by": "index", "start": 0} | options
    for _ in range(500):
        answer = world.fetch(client, lane, **ask)
        assert answer is not None
        assert not isinstance(answer, m.Failed), answer
        found += texts(answer)
        gaps += [answer.gap] if answer.gap is not None else []
        if not answer.payloads and answer.gap is None:
            return found, gaps
        index = answer.next_index
        ask |= {"by": "index", "start": index}
    raise AssertionError("it never ends")
