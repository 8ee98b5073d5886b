"""A small cluster in plain memory, in the middle of its work: the contents of its regions are the start of mutation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any, Final

import numpy as np

from embarcadero.broker.broker import Broker
from embarcadero.broker.connection import Connection
from embarcadero.broker.context import BrokerContext
from embarcadero.config import FabricSizes
from embarcadero.env import Env
from embarcadero.errors import BadRegion
from embarcadero.fabric.leader import create_durable, create_epochs
from embarcadero.fabric.region import Bytes, Shape, check_name, read_superblock, write_superblock
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.sequencer.leader.sequencer import lead
from embarcadero.types import RangeKey, ReplicaRef
from embarcadero.wire import messages
from embarcadero.wire.codec import PROTOCOL_VERSION, control_frame
from embarcadero_proof.fuzz.samples import US, batch_frame, raw_payload

SIZES: Final = FabricSizes(
    pending_slots=64, order_slots=256, held_slots=64, log_bytes=64 * 1024, chunk_bytes=8 * 1024, sessions=64,
    round_entries=32,
)  # fmt: skip
GENERATION: Final = 7
Images = dict[str, Bytes]


class PlainRegion:
    """One region, as plain bytes."""

    def __init__(self, name: str, data: Bytes, generation: int = GENERATION) -> None:
        self.name, self.data = name, data
        self.shape = read_superblock(name, data, generation)

    def flush(self, offset: int, length: int) -> None:
        """Do nothing: there is one copy."""

    def invalidate(self, offset: int, length: int) -> None:
        """Do nothing: there is one copy."""

    def reserve(self, offset: int, length: int) -> None:
        """Do nothing: the memory exists."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class PlainFabric:
    """Regions in a dict; attaching checks them as a real fabric does."""

    coherent_only = True

    def __init__(self, images: Images | None = None, generation: int = GENERATION) -> None:
        self.images: Images = {} if images is None else images
        self.generation = generation

    def create(self, name: str, shape: Shape) -> PlainRegion:
        """Create a region."""
        data = np.zeros(shape.size, dtype=np.uint8)
        write_superblock(data, shape, self.generation)
        self.images[check_name(name)] = data
        return PlainRegion(name, data, self.generation)

    def attach(self, name: str, writable: bool = False) -> PlainRegion:  # noqa: ARG002 - the interface
        """Attach to a region."""
        if name not in self.images:
            raise BadRegion(f"region {name} is missing", "start the cluster again")
        return PlainRegion(name, self.images[name], self.generation)

    def exists(self, name: str) -> bool:
        """Whether there is such a region."""
        return name in self.images

    def names(self) -> list[str]:
        """Return the names of all regions."""
        return sorted(self.images)

    def remove(self, name: str) -> None:
        """Remove a region."""
        self.images.pop(name, None)

    def fence(self) -> None:
        """Do nothing."""


class _Clock:
    """A clock that moves only when the test moves it."""

    us = US

    def now_us(self) -> int:
        """Monotonic time."""
        return self.us

    def wall_us(self) -> int:
        """Time of day."""
        return self.us


class World:
    """A sequencer and a broker, run step by step; topics of orders 2, 5 and 0."""

    def __init__(self) -> None:
        self.fabric, self.clock = PlainFabric(), _Clock()
        self.directory = Directory(MemoryStore(), "0badcafe", ids=count(1).__next__)
        create_epochs(self.fabric)
        self.sequencer = lead(Env(self.clock), self.fabric, self.directory, SIZES)
        member = self.directory.members.register(0, "127.0.0.1", 9092, 1)
        self.broker = Broker(BrokerContext(Env(self.clock), self.fabric, self.directory, member, SIZES))
        for name, order in (("total", 2), ("strong", 5), ("loose", 0)):
            self.directory.topics.create(
                name, order=order, partitions=2, replicas=0, durable_on=0, on_gap="fence", gap_timeout_ms=None
            )  # fmt: skip
        self.turn()

    def turn(self, rounds: int = 6) -> None:
        """Run sequencer and broker for some rounds."""
        for _ in range(rounds):
            self.clock.us += 20_000
            self.sequencer.round()
            self.broker.poll()

    def connect(self) -> Connection:
        """Connect a client that has sent its hello."""
        connection = self.broker.connect()
        send(connection, control_frame(messages.Hello(versions=[PROTOCOL_VERSION], client="fuzz"), 1))
        return connection

    def work(self) -> None:
        """Open sessions, send batches, a duplicate, and batches that wait for a gap to close."""
        connection = self.connect()
        for request, topic in enumerate(("total", "strong", "strong"), 2):
            send(connection, control_frame(messages.OpenSession(topic=topic, name=f"s{request}"), request))
        self.turn()
        for session, lane in ((0, 0), (0, 1), (1, 1)):
            for sequence in (0, 1, 2, 2, 5, 6):
                payload = raw_payload(1 + sequence)
                send(connection, batch_frame(
                    payload, session=session, lane=lane, session_seq=sequence, low=0, count=1 + sequence
                ))  # fmt: skip
        self.turn(3)


def send(connection: Connection, data: bytes) -> None:
    """Send bytes from a client, in reads of the usual size."""
    rest = memoryview(data)
    while rest and not connection.peer.closing:
        buffer = connection.get_buffer()
        size = min(len(buffer), len(rest))
        buffer[:size] = rest[:size]
        connection.received(size)
        rest = rest[size:]


@cache
def worked() -> tuple[World, Images]:
    """Return a cluster after some work, and images of all its regions, with durable lines of a replica."""
    world = World()
    world.work()
    lines = create_durable(world.fabric, ReplicaRef(replica=0, incarnation=1, disk="d" * 32))
    for lane in (0, 1):
        lines.add(RangeKey(lane, 1), 5 + lane, 2)
    return world, {name: data.copy() for name, data in world.fabric.images.items()}


def busy_lines(image: Bytes, line: int = 64) -> Iterator[Any]:
    """Yield the offsets of the lines of a region that are not all zero."""
    whole = image[: len(image) // line * line].view(np.uint64).reshape(-1, line // 8)
    yield from (np.flatnonzero(whole.any(axis=1)) * line).tolist()
