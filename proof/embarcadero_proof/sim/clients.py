"""Simulated client processes: connections, reconnecting and timers around the sans-I/O cores of the client library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from embarcadero.client.link import Link
from embarcadero.errors import EmbarcaderoError, ProtocolError, from_wire
from embarcadero.limits import CONNECT_TIMEOUT_S, CONTROL_BYTES_MAX
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    AcksReceived,
    ControlReceived,
    CreditReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    FullReceived,
    control_frame,
)
from embarcadero_proof.sim.history import Answered, Asked, RoleFailed, StartRead, TailRead
from embarcadero_proof.sim.network import Address, Wire
from embarcadero_proof.sim.process import Process

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_ALLOWED = frozenset(FrameKind) - {FrameKind.BATCH}
_SCRATCH_BYTES = 64 * 1024
_HELLO = 1 << 62
"""Request number of the hello: cores number theirs from 1."""


class Core(Protocol):
    """The common interface of publisher and subscriber cores."""

    def on_connected(self, link: Link, now_us: int) -> None: ...
    def on_disconnected(self, conn: int, now_us: int) -> None: ...
    def on_control(self, conn: int, request: int, message: m.AnyMessage, now_us: int) -> None: ...
    def take_output(self) -> Sequence[tuple[int, list[Any]]]: ...
    def take_abandoned(self) -> list[int]: ...
    def on_timer(self, now_us: int) -> None: ...
    def next_timer_us(self) -> int | None: ...


class _Conn:
    """The client's end of a connection."""

    def __init__(self, wire: Wire, address: Address, scratch: memoryview) -> None:
        self.wire, self.address = wire, address
        self.receiver = FrameReceiver(allowed=_ALLOWED, scratch=scratch, control_bytes_max=CONTROL_BYTES_MAX)
        self.link: Link | None = None


class ClientProcess(Process):
    """A process that talks to all brokers it knows."""

    role = "client"

    def __init__(self, world: World, name: str, core: Core) -> None:
        super().__init__(world, name, f"client-{name}")
        self.core = core
        self._conns: dict[int, _Conn] = {}
        self._known = dict.fromkeys(world.bootstrap)  # each is connected, or connecting
        self._tries: dict[Address, int] = {}
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._timer_us: int | None = None
        self.finished = False

    def start(self) -> None:
        """Connect to all brokers."""
        self.submit(self._connect_all)

    # --- connecting ---------------------------------------------------------------------------------------------------
    def _connect_all(self) -> None:
        for address in self._known:
            self.world.network.connect(self, address)

    def refused(self, address: Address) -> None:
        """Retry: no process listens there."""
        self._again(address)

    def _again(self, address: Address) -> None:
        """Try that broker again, a little later each time."""
        self._tries[address] = tries = self._tries.get(address, 0) + 1
        wait_us = self.rng.randrange(1_000, min(50_000 << min(tries, 6), 2_000_000))
        self.world.queue.after(wait_us, lambda: self.submit(lambda: self._connect(address)))

    def _connect(self, address: Address) -> None:
        if not self.finished:
            self.world.network.connect(self, address)

    def wire_made(self, wire: Wire, address: Address) -> None:
        """Send the hello on a new connection."""
        if wire.is_cut or self.finished:
            wire.cut(None, 1_000)
            self._again(address)
            return
        self._conns[wire.number] = _Conn(wire, address, self._scratch)
        wire.up.send(control_frame(m.Hello(versions=[PROTOCOL_VERSION], client=self.name), _HELLO))
        give_up_us = int(CONNECT_TIMEOUT_S * 1e6)
        self.world.queue.after(give_up_us, lambda: self.submit(lambda: self._check_welcome(wire)))

    def _check_welcome(self, wire: Wire) -> None:
        conn = self._conns.get(wire.number)
        if conn is not None and conn.link is None:
            self._drop(wire.number)

    def wire_lost(self, wire: Wire) -> None:
        """Handle the loss of a connection."""
        conn = self._conns.pop(wire.number, None)
        if conn is not None:
            if conn.link is not None:
                self.core.on_disconnected(wire.number, self.clock.now_us())
            self._again(conn.address)

    def _drop(self, number: int) -> None:
        if (conn := self._conns.get(number)) is not None:
            conn.wire.cut(None, self.rng.randrange(500, 20_000))
            self.wire_lost(conn.wire)

    def disconnect(self) -> None:
        """Close all connections permanently."""
        self.finished = True
        for number in list(self._conns):
            self._drop(number)

    # --- bytes in -----------------------------------------------------------------------------------------------------
    def bytes_in(self, wire: Wire, data: bytes) -> None:
        """Receive bytes from a broker."""
        rest = memoryview(data)
        try:
            while rest and (conn := self._conns.get(wire.number)) is not None:
                buffer = conn.receiver.get_buffer()
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                rest = rest[count:]
                for event in conn.receiver.received(count):
                    self._event(conn, event)
        except EmbarcaderoError as error:
            self._protocol_error(error)
            self._drop(wire.number)

    def _event(self, conn: _Conn, event: Event) -> None:
        now_us = self.clock.now_us()
        if isinstance(event, ControlReceived):
            self._control(conn, event, now_us)
        elif conn.link is not None:
            self.on_event(conn.wire.number, event, now_us)

    def _control(self, conn: _Conn, event: ControlReceived, now_us: int) -> None:
        message = event.message
        if isinstance(message, m.Welcome) and conn.link is None:
            self._learn(message.brokers)
            conn.link = Link(conn.wire.number, now_us, message.generation)
            conn.link.tables, conn.link.references = message.tables, message.references
            self._tries.pop(conn.address, None)
            self.core.on_connected(conn.link, now_us)
        elif isinstance(message, m.MembersAre):
            self._learn(message.brokers)
        elif isinstance(message, m.Failed) and event.request == 0:
            self._protocol_error(from_wire(message.code, message.message, message.hint))
        elif conn.link is not None and conn.link.owner(event.request) is self.core:
            self.core.on_control(conn.wire.number, event.request, message, now_us)
            self.on_answer(message)

    def _learn(self, brokers: list[m.BrokerAddress]) -> None:
        for address in ((broker.host, broker.port) for broker in brokers):
            if address not in self._known:
                self._known[address] = None
                self._connect(address)

    def _protocol_error(self, error: EmbarcaderoError) -> None:
        """Record an error about frames: a correct client never gets one on a network that spoils no frames."""
        if isinstance(error, ProtocolError) and not self.world.network.ever_spoils:
            what = f"{type(error).__name__}: {error}"
            self.world.seen(RoleFailed(at=self.world.queue.now_us, process=self.name, error=what))

    # --- after each action --------------------------------------------------------------------------------------------
    def after_action(self) -> None:
        self.harvest()
        while (output := self.core.take_output()) or (abandoned := self.core.take_abandoned()):
            for number, buffers in output:
                if (conn := self._conns.get(number)) is not None:
                    conn.wire.up.send(b"".join(buffers))
            if not output:
                for number in abandoned:
                    self.world.note(self.name, f"gives up wire-{number}")
                    self._drop(number)
        self._plan_timer()

    def _plan_timer(self) -> None:
        due = self.core.next_timer_us()
        if due is None or self.finished:
            return
        when_us = max(self.clock.queue_time(due), self.world.queue.now_us + 100)
        if self._timer_us is None or when_us < self._timer_us:
            self._timer_us = when_us
            self.world.queue.at(when_us, lambda: self._timer_due(when_us))

    def _timer_due(self, when_us: int) -> None:
        if self._timer_us == when_us:
            self.submit(self._timer)

    def _timer(self) -> None:
        self._timer_us = None
        if not self.finished:
            self.core.on_timer(self.clock.now_us())

    def on_death(self, silently: bool) -> None:
        self.world.network.process_died(self, silently or self.rng.random() < 0.3)

    # --- for subclasses -----------------------------------------------------------------------------------------------
    def on_event(self, number: int, event: AcksReceived | CreditReceived | FullReceived | FetchedReceived | Any,
                 now_us: int) -> None:  # fmt: skip
        """Hook: handle an event that is not a control message."""

    def on_answer(self, message: m.AnyMessage) -> None:
        """Hook: called after the core received a control answer."""

    def harvest(self) -> None:
        """Hook: take the results that the core has ready."""

    def stuck_for_us(self) -> tuple[str, int, int] | None:
        """Return (stream, lane, how long it may be stuck) when one of its frames is lost."""
        return None


def start_read(world: World, who: str, began_us: int, tail: m.TailIs) -> StartRead:
    """The start of a lane, as a broker reported it: for all readers, and for readers of brokers only."""
    hot = tail.start_index if tail.hot_index is None else tail.hot_index
    return StartRead(
        at=world.queue.now_us, process=who, began=began_us, lane=tail.lane, index=tail.start_index, hot_index=hot
    )


class Outbox:
    """Outgoing requests of cores that have no timers."""

    def __init__(self) -> None:
        self._output: list[tuple[int, list[Any]]] = []
        self._abandoned: list[int] = []

    def send(self, link: Link, message: m.AnyMessage) -> tuple[int, int]:
        """Send a request. Returns (connection, request), which name its answer."""
        request = link.ask(self)
        self._output.append((link.number, [control_frame(message, request)]))
        return link.number, request

    def take_output(self) -> list[tuple[int, list[Any]]]:
        output, self._output = self._output, []
        return output

    def take_abandoned(self) -> list[int]:
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def on_timer(self, now_us: int) -> None:
        pass

    def next_timer_us(self) -> int | None:
        return None


class ProbeCore(Outbox):
    """Asks for the tail of a lane, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[int, Link] = {}
        self.asked: tuple[int, int] | None = None
        self.answer: m.TailIs | None = None
        self.failed = ""

    def ask(self, number: int, lane: int) -> None:
        """Send the request to one broker."""
        self.answer, self.failed = None, ""
        self.asked = self.send(self.links[number], m.GetTail(lane=lane))

    def give_up(self) -> None:
        """Give up a request without an answer; its connection is not used again."""
        self.failed = "TimedOut"
        if self.asked is not None:
            self._abandoned.append(self.asked[0])

    def on_connected(self, link: Link, now_us: int) -> None:  # noqa: ARG002 - the cores' signature
        self.links[link.number] = link

    def on_disconnected(self, conn: int, now_us: int) -> None:  # noqa: ARG002
        self.links.pop(conn, None)
        if self.asked is not None and self.asked[0] == conn:
            self.failed = "Unreachable"

    def on_control(self, conn: int, request: int, message: m.AnyMessage, now_us: int) -> None:  # noqa: ARG002
        if self.asked == (conn, request):
            if isinstance(message, m.TailIs):
                self.answer = message
            elif isinstance(message, m.Failed):
                self.failed = message.code


class ProbeProcess(ClientProcess):
    """Asks brokers, one after the other, for the ends of lanes."""

    role = "probe"
    _PATIENCE_US = 5_000_000

    def __init__(self, world: World, name: str) -> None:
        self._probe = ProbeCore()
        super().__init__(world, name, self._probe)
        self._number = 0
        self._began_us = 0
        self._lane: int | None = None
        self._last_asked: dict[int, int] = {}

    def start(self) -> None:
        super().start()
        self._plan()

    def _plan(self) -> None:
        self.world.queue.after(self.rng.randrange(50_000, 3_000_000), lambda: self.submit(self._ask))

    def _ask(self) -> None:
        if self._lane is None and self._probe.links:
            lane = self._choose()
            if lane is None:
                self._plan()
                return
            self._lane = lane
            self._number += 1
            self._began_us = self.world.queue.now_us
            self.world.seen(Asked(at=self._began_us, process=self.name, call="tail", number=self._number))
            self._probe.ask(self.rng.choice(list(self._probe.links)), self._lane)
        elif self._lane is not None and self.world.queue.now_us > self._began_us + self._PATIENCE_US:
            self._probe.give_up()
        self._plan()

    def _choose(self) -> int | None:
        """Choose a lane; in a topic with several, the lane whose last request is oldest."""
        lanes = self.world.lanes_of(self.rng.choice(self.world.plan.topics))
        if not lanes:
            return None
        lane = min(lanes, key=lambda lane: self._last_asked.get(lane, 0))
        self._last_asked[lane] = self.world.queue.now_us
        return lane

    @property
    def waits(self) -> bool:
        """Whether a request is open."""
        return self._lane is not None

    def harvest(self) -> None:
        if self._lane is None or not (self._probe.answer or self._probe.failed):
            return
        now_us, tail = self.world.queue.now_us, self._probe.answer
        self.world.seen(Answered(
            at=now_us, process=self.name, call="tail", number=self._number, error=self._probe.failed))  # fmt: skip
        if tail is not None:
            self.world.seen(TailRead(
                at=now_us, process=self.name, began=self._began_us, lane=tail.lane, index=tail.index,
                seq=tail.seq, durable_index=tail.durable_index))  # fmt: skip
            self.world.seen(start_read(self.world, self.name, self._began_us, tail))
            self.world.disks.see_durable_end(self.name, tail.lane, tail.durable_index)
        self._lane = self._probe.asked = self._probe.answer = None
        self._probe.failed = ""
