"""Simulated connections of clients and brokers: bytes in order, late, in pieces, stuck, or lost with the connection.

A seed may exceed the faults of TCP: it may also drop, repeat or reorder whole BATCH and ACK frames. No promise may
depend on a good network.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from embarcadero.errors import invariant
from embarcadero.wire.codec import HEADER_BYTES, FrameKind
from embarcadero_proof.sim.history import Stuck

if TYPE_CHECKING:
    from embarcadero.broker.connection import Connection
    from embarcadero_proof.sim.clients import ClientProcess
    from embarcadero_proof.sim.roles import BrokerProcess
    from embarcadero_proof.sim.world import World

Address = tuple[str, int]

_PREFIX = struct.Struct("<HBBI")
_FAULTY_KINDS = (FrameKind.BATCH, FrameKind.ACK)


@dataclass(slots=True)
class Weather:
    """How bad the network of a seed is."""

    latency_us: int = 200
    jitter_us: int = 100
    spike_rate: float = 0.0  # share of sends that are much later
    spike_us: int = 0
    dribble_rate: float = 0.0  # share of sends that arrive in pieces
    drop_rate: float = 0.0  # of BATCH and ACK frames
    repeat_rate: float = 0.0
    reorder_rate: float = 0.0

    @property
    def spoils_frames(self) -> bool:
        """Whether whole frames are dropped, repeated or reordered."""
        return self.drop_rate + self.repeat_rate + self.reorder_rate > 0


class Partition(NamedTuple):
    """A partition between these clients and these brokers (None: all of them): until when, and in which direction."""

    until_us: int
    clients: frozenset[str] | None
    brokers: frozenset[str] | None
    way: str

    def parts(self, wire: Wire) -> bool:
        """Whether a connection crosses it."""
        return (self.clients is None or wire.client.name in self.clients) and (
            self.brokers is None or wire.broker.name in self.brokers)  # fmt: skip


class Half:
    """One direction of a connection."""

    def __init__(self, wire: Wire, name: str, hand_over: Callable[[bytes], None]) -> None:
        self._wire, self._name, self._hand_over = wire, name, hand_over
        self._under_way: deque[bytes] = deque()
        self.last_arrival_us = 0
        self.stuck_until_us = 0

    def send(self, data: bytes) -> None:
        """Send bytes."""
        network, wire = self._wire.network, self._wire
        if wire.is_cut:
            return
        if network.weather.spoils_frames or wire.loses_next or network.queue.now_us < wire.loses_acks_until_us:
            data = network.spoil(wire, data)
        for piece in network.pieces(data):
            arrival_us = max(network.arrival_us(), self.last_arrival_us + 1, self.stuck_until_us)
            self.last_arrival_us = arrival_us
            self._under_way.append(piece)
            network.queue.at(arrival_us, self._arrive)

    def _arrive(self) -> None:
        wire = self._wire
        if wire.is_cut:
            return
        now_us = wire.network.queue.now_us
        if now_us < self.stuck_until_us:
            self.last_arrival_us = max(self.last_arrival_us, self.stuck_until_us)
            wire.network.queue.at(self.stuck_until_us, self._arrive)
            return
        data = self._under_way.popleft()
        wire.network.note(f"wire-{wire.number}", f"{self._name} {len(data)} bytes {crc32(data):08x}")
        self._hand_over(data)


class Wire:
    """One connection. Both ends are processes; either may be dead, paused or unaware that it is cut."""

    def __init__(self, network: Network, number: int, client: ClientProcess, broker: BrokerProcess) -> None:
        self.network, self.number, self.client, self.broker = network, number, client, broker
        self.up = Half(self, "up", lambda data: broker.submit(lambda: broker.bytes_in(self, data)))
        self.down = Half(self, "down", lambda data: client.submit(lambda: client.bytes_in(self, data)))
        self.is_cut = False
        self.loses_next = False  # the next BATCH frame is lost
        self.loses_acks_until_us = 0  # until then ACK frames are lost
        self.connection: Connection | None = None  # the broker's end

    def clog(self, way: str, until_us: int) -> None:
        """Block `up`, `down` or both directions until then."""
        for half, name in ((self.up, "up"), (self.down, "down")):
            if way in (name, "both"):
                half.stuck_until_us = max(half.stuck_until_us, until_us)

    def finish(self) -> None:
        """Close the connection from the broker's end: data already sent still arrives."""
        last_us = self.down.last_arrival_us - self.network.queue.now_us
        self.network.queue.after(max(last_us, 0) + 1, lambda: self.cut(1, 1))

    def cut(self, client_learns_us: int | None, broker_learns_us: int | None) -> None:
        """Lose all data in flight. Each end is informed some time later (None: never, the other end is only silent)."""
        if self.is_cut:
            return
        self.is_cut = True
        self.network.wires.pop(self.number, None)
        self.network.note(f"wire-{self.number}", f"cut between {self.client.name} and {self.broker.name}")
        if client_learns_us is not None:
            self.network.queue.after(client_learns_us, lambda: self.client.submit(lambda: self.client.wire_lost(self)))
        if broker_learns_us is not None:
            self.network.queue.after(broker_learns_us, lambda: self.broker.submit(lambda: self.broker.wire_lost(self)))


class Network:
    """All connections, and the process that listens at each address."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world, self.queue, self.weather = world, world.queue, weather
        self.rng = random.Random(f"{world.seed}:network")
        self.wires: dict[int, Wire] = {}
        self.listening: dict[Address, BrokerProcess] = {}
        self._made = 0
        self.ever_spoils = weather.spoils_frames
        self.frames_spoilt = 0
        self._partitions: list[Partition] = []

    def note(self, who: str, what: str) -> None:
        """Write a line into the trace."""
        self._world.trace.note(self.queue.now_us, who, what)

    # --- connecting ---------------------------------------------------------------------------------------------------
    def connect(self, client: ClientProcess, address: Address) -> None:
        """Try to reach the process that listens at `address`; the client is informed of the result."""
        self.queue.at(self.arrival_us(), lambda: self._accept(client, address))

    def _accept(self, client: ClientProcess, address: Address) -> None:
        broker = self.listening.get(address)
        if broker is None or not broker.alive:
            self.queue.at(self.arrival_us(), lambda: client.submit(lambda: client.refused(address)))
            return
        self._made += 1
        wire = self.wires[self._made] = Wire(self, self._made, client, broker)
        self.note(f"wire-{wire.number}", f"connects {client.name} to {broker.name}")
        for partition in self._partitions:
            self._apply(partition, wire)
        broker.submit(lambda: broker.wire_made(wire))  # a paused process accepts later; its kernel has done so already
        self.queue.at(self.arrival_us(), lambda: client.submit(lambda: client.wire_made(wire, address)))

    def process_died(self, process: object, silently: bool) -> None:
        """End the connections of a process: with a reset that the peers see, or silently if the host is gone."""
        for wire in list(self.wires.values()):
            learns_us = None if silently else self.rng.randrange(100, 50_000)
            if wire.broker is process:
                wire.cut(learns_us, None)
            elif wire.client is process:
                wire.cut(None, learns_us)

    def part(self, partition: Partition) -> None:
        """Part clients and brokers for a while, also on new connections."""
        self._partitions = [p for p in self._partitions if p.until_us > self.queue.now_us] + [partition]
        for wire in self.wires.values():
            self._apply(partition, wire)

    def _apply(self, partition: Partition, wire: Wire) -> None:
        if partition.until_us > self.queue.now_us and partition.parts(wire):
            wire.clog(partition.way, partition.until_us)

    def calm(self) -> None:
        """Make the network good from here on, and release stuck data."""
        self.weather = Weather(self.weather.latency_us, self.weather.jitter_us)
        self._partitions.clear()
        for wire in self.wires.values():
            wire.up.stuck_until_us = wire.down.stuck_until_us = wire.loses_acks_until_us = 0

    # --- weather ------------------------------------------------------------------------------------------------------
    def arrival_us(self) -> int:
        """Return when data sent now arrives, if nothing blocks it."""
        weather, rng = self.weather, self.rng
        delay = weather.latency_us + int(rng.expovariate(1.0) * weather.jitter_us)
        if weather.spike_rate and rng.random() < weather.spike_rate:
            delay += rng.randrange(1, weather.spike_us)
        return self.queue.now_us + delay

    def pieces(self, data: bytes) -> list[bytes]:
        """Return the pieces in which a send arrives: whole, or cut anywhere."""
        if not data:
            return []
        if not self.weather.dribble_rate or self.rng.random() >= self.weather.dribble_rate:
            return [data]
        cuts = sorted(self.rng.randrange(len(data)) for _ in range(self.rng.randint(1, 6)))
        spans = zip([0, *cuts], [*cuts, len(data)], strict=True)
        return [data[start:stop] for start, stop in spans if start < stop]

    def spoil(self, wire: Wire, data: bytes) -> bytes:
        """Drop, repeat or swap some whole BATCH and ACK frames."""
        weather, rng = self.weather, self.rng
        frames: list[bytes] = []
        for kind, frame in split_frames(data):
            if kind not in _FAULTY_KINDS:
                frames.append(frame)
                continue
            dice = rng.random()
            lost = kind is FrameKind.ACK and self.queue.now_us < wire.loses_acks_until_us
            if lost or dice < weather.drop_rate or (wire.loses_next and kind is FrameKind.BATCH):
                wire.loses_next = wire.loses_next and lost
                self._spoilt(wire, kind, "drops")
                if kind is FrameKind.BATCH and wire.connection is not None:
                    credit = wire.connection.peer.credit  # it is lost after the socket, so it has used its credit
                    credit.received += len(frame)
                continue
            frames.append(frame)
            if dice < weather.drop_rate + weather.repeat_rate:
                self._spoilt(wire, kind, "repeats")
                frames.append(frame)
            elif dice < weather.drop_rate + weather.repeat_rate + weather.reorder_rate and len(frames) > 1:
                self._spoilt(wire, kind, "reorders")
                frames[-2:] = [frames[-1], frames[-2]]
        return b"".join(frames)

    def _spoilt(self, wire: Wire, kind: FrameKind, what: str) -> None:
        self.frames_spoilt += 1
        self.ever_spoils = True
        self.note(f"wire-{wire.number}", f"{what} a {kind.name} frame of {wire.client.name}")
        if (stuck := wire.client.stuck_for_us()) is not None:
            stream, lane, for_us = stuck
            self._world.seen(Stuck(at=self.queue.now_us, stream=stream, lane=lane, until=self.queue.now_us + for_us))


def split_frames(data: bytes) -> list[tuple[FrameKind, bytes]]:
    """Split one send into whole frames."""
    frames, at = [], 0
    while at < len(data):
        _, _, number, length = _PREFIX.unpack_from(data, at)
        kind = FrameKind(number)
        stop = at + HEADER_BYTES[kind] + length
        invariant(stop <= len(data), "a send has whole frames")
        frames.append((kind, data[at:stop]))
        at = stop
    return frames
