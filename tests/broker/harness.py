"""A small cluster for broker tests: simulated memory, a real sequencer, brokers, and clients that speak frames."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from embarcadero.broker.broker import Broker
from embarcadero.broker.connection import Connection
from embarcadero.broker.context import BrokerContext
from embarcadero.config import DEFAULTS, Config, FabricSizes
from embarcadero.env import Env, Inline, Workers
from embarcadero.fabric.leader import create_epochs
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.sequencer.leader.sequencer import lead
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    AcksReceived,
    ControlReceived,
    CreditReceived,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    FullReceived,
    batch_header,
    control_frame,
    payload_crc,
)
from embarcadero_proof.sim.incoherent import IncoherentMemory
from tests.clocks import ManualClock

SIZES = FabricSizes(
    pending_slots=64, order_slots=256, held_slots=64, log_bytes=64 * 1024, chunk_bytes=8 * 1024, sessions=64,
    round_entries=32,
)  # fmt: skip


class Client:
    """One connection to one broker, speaking frames."""

    def __init__(self, broker: Broker, greet: bool = True) -> None:
        self.connection: Connection = broker.connect()
        self.peer = self.connection.peer
        self._receiver = FrameReceiver(
            allowed=frozenset(set(FrameKind) - {FrameKind.BATCH}),
            scratch=memoryview(bytearray(65536)),
            control_bytes_max=1 << 20,
        )
        self.acks: list[Any] = []
        self.answers: dict[int, m.AnyMessage] = {}
        self.pushed: list[m.AnyMessage] = []
        self.fetched: dict[int, FetchedReceived] = {}
        self.credit = 0
        self.full = False
        self._request = 0
        if greet:
            self.ask(m.Hello(versions=[PROTOCOL_VERSION], client="test"))

    def send(self, data: bytes | memoryview) -> None:
        """Put bytes on the wire."""
        rest = memoryview(data)
        while rest and not self.peer.closing:
            buffer = self.connection.get_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            self.connection.received(count)
            rest = rest[count:]

    def ask(self, message: m.Message) -> int:
        """Send a control message; its number identifies the answer."""
        self._request += 1
        self.send(control_frame(message, self._request))
        self.pump()
        return self._request

    def batch(
        self, opened: m.Opened, sequence: int, payload: bytes = b"payload", count: int = 1, **fields: Any
    ) -> None:
        """Send one batch; `fields` override the correct values."""
        header: dict[str, Any] = {
            "session_seq": sequence, "low": 0, "lane": opened.lane, "session": opened.session, "count": count,
            "crc": payload_crc(payload), "length": len(payload),
        }  # fmt: skip
        header.update(fields)
        self.send(batch_header(**header))
        self.send(payload)

    def pump(self) -> None:
        """Read the broker's output."""
        for chunk in self.peer.take_output():
            rest = memoryview(bytes(chunk))
            while rest:
                buffer = self._receiver.get_buffer()
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                rest = rest[count:]
                for event in self._receiver.received(count):
                    self._take(event)

    def _take(self, event: Any) -> None:
        match event:
            case AcksReceived(acks):
                self.acks.extend(np.array(acks))
            case ControlReceived(0, message):
                self.pushed.append(message)
            case ControlReceived(request, message):
                self.answers[request] = message
            case CreditReceived(total):
                self.credit = total
            case FullReceived():
                self.full, self.why_full = True, event
            case FetchedReceived():
                self.fetched[event.request] = event


class CountingBell:
    """Counts the doorbells that were rung."""

    def __init__(self) -> None:
        self.rings: list[str] = []

    def ring(self, who: str) -> None:
        self.rings.append(who)


class Diary:
    """A journal that records warnings."""

    def __init__(self) -> None:
        self.warnings: list[tuple[str, dict[str, object]]] = []

    def note(self, event: str, /, **facts: object) -> None:
        pass

    def warn(self, event: str, /, **facts: object) -> None:
        self.warnings.append((event, facts))


class World:
    """Sequencer and brokers, each on its own host, driven by hand."""

    def __init__(
        self,
        brokers: int = 2,
        seed: int = 1,
        sizes: FabricSizes = SIZES,
        config: Config = DEFAULTS,
        workers: Callable[[], Workers] = Inline,
    ) -> None:
        self.config, self.workers = config, workers
        self.memory = IncoherentMemory(random.Random(seed), generation=7)
        self.directory = Directory(MemoryStore(), topics_max=config.limits.topics)
        self.clock = ManualClock()
        self.bell = CountingBell()  # of all brokers
        self.diary = Diary()  # of the sequencer
        self.sizes = sizes
        create_epochs(self.memory.host("admin"))
        env = Env(self.clock, journal=self.diary)
        self.sequencer = lead(env, self.memory.host("sequencer"), self.directory, sizes, config.sequencer)
        self.brokers = [self.start_broker(number) for number in range(brokers)]
        self.run()

    def start_broker(self, number: int) -> Broker:
        """A new incarnation of a broker, on a host of its own."""
        member = self.directory.members.register(number, "127.0.0.1", 9092 + number, 1)
        fabric = self.memory.host(f"host-{number}.{member.incarnation}")
        env = Env(self.clock, self.bell, workers=self.workers())
        return Broker(BrokerContext(env, fabric, self.directory, member, self.sizes, self.config))

    def restart_sequencer(self) -> None:
        """Stop the sequencer; the next one takes over."""
        fabric = self.memory.host(f"sequencer-{self.directory.elections.started_epoch() + 1}")
        self.sequencer = lead(Env(self.clock), fabric, self.directory, self.sizes)

    def run(self, rounds: int = 6, *clients: Client) -> None:
        """Run the brokers and the sequencer for a while."""
        for _ in range(rounds):
            self.clock.us += 20_000
            self.sequencer.round()
            for broker in self.brokers:
                broker.poll()
        for client in clients:
            client.pump()

    def topic(self, name: str = "t", **options: Any) -> int:
        """Create a topic and wait until brokers know it."""
        options = {"order": 5, "partitions": 4, "replicas": 0, "durable_on": 0, "on_gap": "fence",
                   "gap_timeout_ms": None} | options  # fmt: skip
        lane = self.directory.topics.create(name, **options).lane
        self.run()
        return lane

    def open(self, client: Client, topic: str = "t", **options: Any) -> m.Opened:
        """Open a session."""
        request = client.ask(m.OpenSession(topic=topic, **options))
        self.run(6, client)
        opened = client.answers[request]
        assert isinstance(opened, m.Opened), opened
        return opened

    def fetch(self, client: Client, lane: int, **options: Any) -> Any:
        """Fetch and return the answer, if there is one."""
        request = client.ask(m.Fetch(lane=lane, **({"max_bytes": 1 << 20} | options)))
        self.run(2, client)
        return client.fetched.get(request) or client.answers.get(request)
