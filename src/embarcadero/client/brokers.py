"""The connections of a client: one per live broker, shared by its publishers and subscribers.

A `BrokerConnection` moves bytes between a socket and frames over asyncio, and decides nothing. A `BrokerPool` has the
connections. Any broker names the others (Welcome, MembersAre), and each of them gets a keeper: a task that connects,
and reconnects with growing pauses, as long as the broker is a member.

The addresses of the user are only needed to find the first broker, and again when all connections are lost. The pool
then tries every known address of a broker, because the whole cluster may have restarted. A `CoreDriver` runs one core
on the pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from embarcadero.client import lifetime
from embarcadero.client.link import ClientCore, FetchCore, Link, PublishCore
from embarcadero.config import DEFAULTS
from embarcadero.config.table import ClientKeys
from embarcadero.errors import (
    BadFrame,
    BadMagic,
    BadVersion,
    Closed,
    EmbarcaderoError,
    OutcomeUnknown,
    Retriable,
    TierUnavailable,
    TimedOut,
    TooMany,
    Unreachable,
    fresh,
    from_wire,
)
from embarcadero.forks import abandon, blank, tell_of_forks
from embarcadero.limits import (
    CONNECT_TIMEOUT_S,
    CONTROL_BYTES_MAX,
    FRAME_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORDS_PER_BATCH_MAX,
    SCRATCH_BYTES,
)
from embarcadero.types import NO_HANDLE, SessionKey
from embarcadero.wire.codec import (
    PACKED_ACK,
    PROTOCOL_VERSION,
    AcksReceived,
    ControlReceived,
    CreditReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    FullReceived,
    check_message,
    control_frame,
)
from embarcadero.wire.messages import AnyMessage, BrokerAddress, Failed, Hello, MembersAre, Message, Welcome
from embarcadero.wire.sockets import prepare, write_frames

RECEIVES = frozenset({FrameKind.CONTROL, FrameKind.ACK, FrameKind.CREDIT, FrameKind.FULL, FrameKind.FETCHED})
_PAUSE_FIRST_S = 0.02
_PAUSE_LAST_S = 1.0
_RETRY_S = 0.02
_ADDRESSES_KEPT = 64
_LOG_AGAIN_S = 60.0  # interval at which a client without brokers logs this again
_LOG: Final = logging.getLogger("embarcadero.client")
NO_BROKER_HINT: Final = "start the cluster, or check the addresses: each must have the port of a broker"
_OTHER_PORT: Final = (
    "give the port of a broker, 9092 by default: `embarcadero status` lists the addresses of brokers and of metrics"
)

Address = tuple[str, int]
Answer = TypeVar("Answer", bound=Message)


def now_us() -> int:
    """Return the time of the clock that all client drivers use."""
    return time.monotonic_ns() // 1000


class Owned(NamedTuple):
    """A frame, and the core that owns the request if the frame is an answer."""

    event: Event
    owner: object | None


class Listener(Protocol):
    """Receives the events of a connection."""

    def on_events(self, connection: BrokerConnection, events: list[Owned], now_us: int) -> None:
        """Frames arrived. Answers to `BrokerConnection.ask` are not among them."""
        ...

    def on_lost(self, connection: BrokerConnection) -> None:
        """The connection was lost."""
        ...


class BrokerConnection(asyncio.BufferedProtocol):
    """Moves bytes between a socket and frames. Owns its Link."""

    def __init__(self, number: int, listener: Listener, scratch: memoryview) -> None:
        self.link = Link(number, now_us())
        self.broker = -1
        self.address = ("", 0)
        self.error: EmbarcaderoError | None = None  # why it ended, if known
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._receiver = FrameReceiver(allowed=RECEIVES, scratch=scratch, control_bytes_max=CONTROL_BYTES_MAX)
        self.lost = asyncio.get_running_loop().create_future()
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child, release the copy of the socket, so that the parent can close the connection."""
        if self._descriptor >= 0:
            blank(self._descriptor)
        abandon(self, self._transport)
        self._transport, self._descriptor = None, -1

    # --- asyncio.BufferedProtocol ---
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._descriptor = prepare(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        now = now_us()
        try:
            events = self._receiver.received(nbytes)
        except EmbarcaderoError as error:
            self.drop(error)
            return
        self.link.heard(now)
        if heard := [owned for event in events if (owned := self._sort(event)) is not None]:
            self._listener.on_events(self, heard, now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._descriptor = None, -1
        if self.error is None and exc is not None:
            self.error = Unreachable(f"the connection broke: {exc}")
        if not self.lost.done():
            self.lost.set_result(None)
        gone = self.error or Unreachable("the broker closed the connection", "see its log")
        for owner in self.link.owners():
            if isinstance(owner, asyncio.Future) and not owner.done():
                owner.set_exception(fresh(gone))
        self._listener.on_lost(self)

    def welcomed(self, welcome: Welcome, address: Address) -> None:
        """Take the identity and the abilities of the broker at `address` from its Welcome."""
        self.broker, self.address = welcome.broker, address
        self.link.welcomed(welcome)

    # --- for drivers ---
    @property
    def usable(self) -> bool:
        """Whether frames may still be written."""
        return self._transport is not None and not self._transport.is_closing()

    def write(self, buffers: list[Any]) -> None:
        """Write frames without waiting. Credit limits the size of the queue."""
        if self._transport is not None and not self._transport.is_closing():
            write_frames(self._transport, self._descriptor, buffers)

    def drop(self, error: EmbarcaderoError | None = None) -> None:
        """Abort the connection."""
        self.error = self.error or error
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, message: Message, timeout: float) -> AnyMessage:  # noqa: ASYNC109 - it also ends the request
        """Send a request and wait. Raises the error of a Failed, Unreachable on a lost connection, or TimeoutError."""
        if not self.usable:
            raise fresh(self.error or Unreachable("the connection is closed"))
        answer: asyncio.Future[AnyMessage] = asyncio.get_running_loop().create_future()
        request = self.link.ask(answer)
        self.write([control_frame(message, request)])
        try:
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may swallow a cancellation
                found = await answer
        finally:
            self.link.owner(request)
        if isinstance(found, Failed):
            raise from_wire(found.code, found.message, found.hint)
        return found

    def _sort(self, event: Event) -> Owned | None:
        """Handle frames for this connection itself. Return other frames with their owner, or None for all cores."""
        if isinstance(event, CreditReceived):
            self.link.grant(event.total)  # here, because it may arrive before a core uses the connection
        if not isinstance(event, ControlReceived | FetchedReceived):
            return Owned(event, None)
        owner = self.link.owner(event.request)
        if isinstance(event, ControlReceived):
            message = event.message
            if event.request == 0 and isinstance(message, Failed):  # why the broker will close the connection
                self.error = from_wire(message.code, message.message, message.hint)
                return None
            if isinstance(owner, asyncio.Future):
                if not owner.done():
                    owner.set_result(message)
                return None
        return Owned(event, owner)


async def open_connection(
    number: int, host: str, port: int, listener: Listener, scratch: memoryview, patience_s: float = CONNECT_TIMEOUT_S
) -> tuple[BrokerConnection, Welcome]:
    """Connect and exchange Hello and Welcome. Raises Unreachable, or the broker's reason to refuse."""
    loop = asyncio.get_running_loop()
    connection = None
    try:
        async with asyncio.timeout(patience_s):
            _, connection = await loop.create_connection(
                lambda: BrokerConnection(number, listener, scratch), host, port
            )
            hello = Hello(versions=[PROTOCOL_VERSION], client="embarcadero-python")
            welcome = await connection.ask(hello, patience_s)
    except BaseException as error:
        if connection is not None:
            connection.drop()
        if isinstance(error, BadMagic):
            what = "speaks HTTP, and is not a broker" if "HTTP or another" in error.hint else "is not a broker"
            raise Unreachable(f"{host}:{port} {what}: {error.message}", _OTHER_PORT) from None
        if isinstance(error, TimeoutError):
            raise Unreachable(f"{host}:{port} did not answer within {patience_s:g} s") from None
        if isinstance(error, OSError) and not isinstance(error, EmbarcaderoError):
            raise Unreachable(f"{host}:{port}: {error.strerror or error}") from None
        raise
    if not isinstance(welcome, Welcome):
        connection.drop()
        problem = f"{host}:{port} answered Hello with {type(welcome).__name__}"
        raise Unreachable(problem, "check that the address belongs to a broker")
    if welcome.version != PROTOCOL_VERSION:
        connection.drop()
        raise BadVersion(
            f"{host}:{port} chose protocol version {welcome.version}, and this client supports {PROTOCOL_VERSION}",
            "use a client of the same release",
        )
    connection.welcomed(welcome, (host, port))
    return connection, welcome


class _Pauses:
    """Growing pauses between attempts to connect. They are short again after a stable connection."""

    def __init__(self) -> None:
        self._next = _PAUSE_FIRST_S
        self._since = 0.0

    def connected(self) -> None:
        """Note the time of a connection."""
        self._since = asyncio.get_running_loop().time()

    def lost(self) -> bool:
        """Note that the connection was lost. True if it was stable: pauses are short again, the first is optional."""
        if asyncio.get_running_loop().time() - self._since < _PAUSE_LAST_S:
            return False
        self._next = _PAUSE_FIRST_S
        return True

    async def wait(self) -> None:
        """Wait for the current pause, and make the next one longer."""
        await asyncio.sleep(self._next)
        self._next = min(2 * self._next, _PAUSE_LAST_S)


class _Outage:
    """Logs the loss of all brokers, again from time to time, and the next connection."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._logged = 0.0

    def goes_on(self, error: EmbarcaderoError) -> None:
        """Log, at most once in `_LOG_AGAIN_S`, that another attempt failed."""
        now = asyncio.get_running_loop().time()
        if self._since is None or now - self._logged >= _LOG_AGAIN_S:
            self._since, self._logged = self._since or now, now
            _LOG.warning("lost the connection to all brokers, and %s; trying again", error.message)

    def over(self) -> None:
        """Log that the client is connected again."""
        if self._since is not None:
            _LOG.warning("connected again after %.1f s", asyncio.get_running_loop().time() - self._since)
            self._since = None


class BatchLimits(NamedTuple):
    """The largest batch and record that the brokers of a cluster accept."""

    record_bytes: int  # of one record
    frame_bytes: int  # of a batch with its overhead
    records: int


class AddressBook:
    """Addresses of brokers: the current one by broker id, and all known ones, the newest last."""

    def __init__(self, seeds: list[Address]) -> None:
        self._seeds = seeds
        self._by_broker: dict[int, Address] = {}
        self._ever: dict[Address, None] = {}

    def clear(self) -> None:
        """Forget the broker of each address. Known addresses stay."""
        self._by_broker = {}

    def of(self, broker: int) -> Address:
        """Return the address of a broker."""
        return self._by_broker[broker]

    def found(self, broker: int, address: Address) -> None:
        """Note that a broker answered at an address. An address that a member list has takes precedence."""
        self._by_broker.setdefault(broker, address)

    def member(self, broker: int, address: Address) -> None:
        """Note the address of a broker in a member list."""
        self._by_broker[broker] = address
        self._ever.pop(address, None)
        self._ever[address] = None
        if len(self._ever) > _ADDRESSES_KEPT:
            del self._ever[next(iter(self._ever))]

    def all(self) -> list[Address]:
        """Return all known addresses of brokers, those of the user first."""
        return list(dict.fromkeys([*self._seeds, *self._ever]))

    @property
    def seeds(self) -> list[Address]:
        """The addresses that the user gave."""
        return self._seeds


class BrokerPool:
    """The connections of one client, on one event loop."""

    def __init__(
        self,
        seeds: list[Address],
        settings: ClientKeys = DEFAULTS.client,
        table_properties: Sequence[str] = (),
        cluster: Any = None,
    ) -> None:
        self._addresses, self.settings = AddressBook(seeds), settings
        self._closed = False
        self.cluster = cluster  # the LocalCluster of `local`: it must exist as long as records may be sent
        self.table_properties = table_properties  # key=value pairs to reach tables of topics
        self.limits = BatchLimits(RECORD_BYTES_MAX, FRAME_BYTES_MAX, RECORDS_PER_BATCH_MAX)
        self.loop = asyncio.get_running_loop()
        self._begin()
        tell_of_forks(self)

    def _begin(self) -> None:
        """Start without connections, publishers and readers."""
        self._lapsed = False  # after a fork, before the first connection
        self._starting: asyncio.Task[None] | None = None
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._made = 0
        self._live: dict[int, BrokerConnection] = {}  # by number, ready for use
        self._keepers: dict[int, asyncio.Task[None]] = {}  # by broker
        self._addresses.clear()
        self._drivers: dict[ClientCore, CoreDriver] = {}
        self._sessions: dict[SessionKey, tuple[PublishCore, CoreDriver]] = {}
        self._turn = 0
        self._changed = asyncio.Event()  # a connection was opened or lost
        self._finder: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self.pumps: set[lifetime.OpenPublisher] = set()  # publishers that are not closed
        self.broker_of_handle: dict[int, int] = {}

    # --- forks ---
    def _after_fork(self) -> None:
        """In a forked child, leave all connections to the parent. The first request opens new ones."""
        tasks = [task for task in (*self._keepers.values(), self._finder, self._guard, self._starting) if task]
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it runs in the parent
        abandon(tasks, self._live, self._drivers, self._changed, self.pumps)
        self._begin()
        self._lapsed = True

    async def ready(self, patience_s: float) -> None:
        """In a forked child, connect again on the event loop that runs there. Otherwise do nothing."""
        if not self._lapsed or self._closed:
            return
        if self._starting is None:
            self.loop = asyncio.get_running_loop()
            self._starting = self.loop.create_task(self.start(self.settings.connect_timeout_s))
            self._starting.add_done_callback(self._started)
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.shield(self._starting)
        except TimeoutError as error:
            if isinstance(error, EmbarcaderoError):
                raise
            raise Unreachable(f"no broker answered within {patience_s:g} s", NO_BROKER_HINT) from None

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        self._lapsed = task.cancelled() or task.exception() is not None

    # --- connecting ---
    async def start(self, patience_s: float) -> None:
        """Connect to the first seed that answers. Raises Unreachable with every address that was tried."""
        connection, welcome = await self._find(self._addresses.seeds, patience_s)
        self._adopt(connection, welcome)
        self._finder = asyncio.get_running_loop().create_task(self._find_when_alone())
        self._guard = asyncio.get_running_loop().create_task(lifetime.guard(self.pumps))

    async def _find(self, addresses: list[Address], patience_s: float) -> tuple[BrokerConnection, Welcome]:
        tries = [asyncio.ensure_future(self._open(address, patience_s)) for address in addresses]
        problems: list[EmbarcaderoError] = []
        chosen: BrokerConnection | None = None
        try:
            for done in asyncio.as_completed(tries):
                try:
                    chosen, welcome = await done
                    return chosen, welcome
                except BadVersion:
                    raise
                except EmbarcaderoError as error:
                    problems.append(error)
        finally:
            for outcome in await _cancel(*tries):
                if isinstance(outcome, tuple) and outcome[0] is not chosen:
                    outcome[0].drop()
        tried = ", ".join(f"{host}:{port}" for host, port in addresses)
        if problems and all(isinstance(error, TooMany) for error in problems):
            raise fresh(problems[0])
        why = "; ".join(sorted(error.message for error in problems))
        other = any(error.hint == _OTHER_PORT for error in problems)
        hint = _OTHER_PORT if other else NO_BROKER_HINT
        raise Unreachable(f"no broker answered at {tried}: {why}", hint)

    async def _open(self, address: Address, patience_s: float) -> tuple[BrokerConnection, Welcome]:
        self._made += 1
        return await open_connection(self._made, *address, self, self._scratch, patience_s)

    async def _find_when_alone(self) -> None:
        """When all connections are lost, the members may have moved: try the seeds and every known address."""
        pauses, outage = _Pauses(), _Outage()
        while True:
            pauses.connected()
            while self._live:
                outage.over()
                self._changed.clear()
                await self._changed.wait()
            pauses.lost()
            await pauses.wait()
            if not self._live:
                try:
                    self._adopt(*await self._find(self._addresses.all(), self.settings.connect_timeout_s))
                except EmbarcaderoError as error:
                    outage.goes_on(error)

    def _adopt(self, connection: BrokerConnection, welcome: Welcome) -> None:
        """Use a connection that found its broker, and start a keeper for it."""
        broker = welcome.broker
        self._addresses.found(broker, connection.address)
        if (old := self._keepers.pop(broker, None)) is not None:
            old.cancel()
        self._keepers[broker] = asyncio.get_running_loop().create_task(self._keep(broker, connection))
        self._welcomed(connection, welcome)

    async def _keep(self, broker: int, connection: BrokerConnection | None = None) -> None:
        """Keep a connection to a broker, as long as it is a member."""
        pauses = _Pauses()
        while True:
            if connection is None:
                try:
                    connection, welcome = await self._open(self._addresses.of(broker), self.settings.connect_timeout_s)
                    self._welcomed(connection, welcome)
                except EmbarcaderoError:
                    await pauses.wait()
                    continue
            pauses.connected()
            await connection.lost
            connection = None
            if not pauses.lost():
                await pauses.wait()  # a broker may close the connection after each Welcome

    def _welcomed(self, connection: BrokerConnection, welcome: Welcome) -> None:
        if not connection.usable:
            return
        self.limits = BatchLimits(
            min(RECORD_BYTES_MAX, welcome.record_bytes_max),
            min(FRAME_BYTES_MAX, welcome.frame_bytes_max),
            min(RECORDS_PER_BATCH_MAX, welcome.records_max),
        )
        self._live[connection.link.number] = connection
        self._changed.set()
        self._members(welcome.brokers)
        for driver in list(self._drivers.values()):
            driver.core.on_connected(connection.link, now_us())
            driver.run()

    def _members(self, brokers: list[BrokerAddress]) -> None:
        """Keep one connection to each of these brokers, and none to others."""
        for member in brokers:
            self._addresses.member(member.broker, (member.host, member.port))
            if member.handle != NO_HANDLE:
                self.broker_of_handle[member.handle] = member.broker
            if member.broker not in self._keepers:
                task = asyncio.get_running_loop().create_task(self._keep(member.broker))
                self._keepers[member.broker] = task
        for broker in self._keepers.keys() - {member.broker for member in brokers}:
            if not any(connection.broker == broker for connection in self._live.values()):
                self._keepers.pop(broker).cancel()

    # --- events of connections ---
    def on_events(self, connection: BrokerConnection, events: list[Owned], now: int) -> None:
        """Pass each frame to its core."""
        number = connection.link.number
        if number not in self._live:
            return
        touched: dict[CoreDriver, None] = {}
        for event, owner in events:
            match event:
                case ControlReceived(message=MembersAre(brokers=brokers)):
                    self._members(brokers)
                case ControlReceived() if isinstance(owner, ClientCore):
                    owner.on_control(number, event.request, event.message, now)
                    touched |= self._driver_of(owner)
                case FetchedReceived() if isinstance(owner, FetchCore):
                    owner.on_fetched(number, event, now)
                    touched |= self._driver_of(owner)
                case AcksReceived(acks=acks):
                    for key in {SessionKey(*ack[:2]) for ack in PACKED_ACK.iter_unpack(acks.data)}:
                        if (publisher := self._sessions.get(key)) is not None:
                            publisher[0].on_acks(number, acks, now)
                            touched[publisher[1]] = None
                case CreditReceived() | FullReceived():
                    touched |= self._flow(number, event, now)
        for driver in touched:
            driver.run()

    def _driver_of(self, core: ClientCore) -> dict[CoreDriver, None]:
        driver = self._drivers.get(core)
        if driver is None:
            return {}
        if isinstance(core, PublishCore):
            self._sessions[core.key] = core, driver  # its session may just have been opened
        return {driver: None}

    def _flow(self, number: int, event: CreditReceived | FullReceived, now: int) -> dict[CoreDriver, None]:
        """Pass credit to the publishers. It belongs to the connection, so another publisher is first each time."""
        publishers = [core for core in self._drivers if isinstance(core, PublishCore)]
        first = self.next_turn() % max(1, len(publishers))
        publishers = publishers[first:] + publishers[:first]
        for core in publishers:
            if isinstance(event, CreditReceived):
                core.on_credit(number, event.total, now)
            else:
                core.on_full(number, now, event)
        return {self._drivers[core]: None for core in publishers}

    def on_lost(self, connection: BrokerConnection) -> None:
        """Note that a connection was lost. Its keeper opens a new one."""
        number = connection.link.number
        if self._live.pop(number, None) is None:
            return
        self._changed.set()
        for driver in list(self._drivers.values()):
            driver.core.on_disconnected(number, now_us())
            driver.run()

    # --- for drivers ---
    def attach(self, driver: CoreDriver) -> None:
        """Pass all current and later connections to a core."""
        if self._closed:
            raise Closed("the log is closed", "connect again")
        self._drivers[driver.core] = driver
        for connection in list(self._live.values()):
            driver.core.on_connected(connection.link, now_us())
        driver.run()

    def detach(self, driver: CoreDriver) -> None:
        """Remove a core."""
        self._drivers.pop(driver.core, None)
        for key in [key for key, found in self._sessions.items() if found[1] is driver]:
            del self._sessions[key]

    def write(self, number: int, buffers: list[Any]) -> None:
        """Write frames of a core to a connection."""
        if (connection := self._live.get(number)) is not None:
            connection.write(buffers)

    def abandon(self, number: int) -> None:
        """Drop a connection that a core has abandoned."""
        if (connection := self._live.get(number)) is not None:
            connection.drop(Unreachable("the broker was silent for too long"))

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Use these `key=value` pairs to reach the files of tables."""
        self.table_properties = properties

    # --- requests ---
    def next_turn(self) -> int:
        """Return a number that distributes users over connections."""
        self._turn += 1
        return self._turn

    @property
    def state(self) -> str:
        """The state of the connections in a few words, for people."""
        if self._closed:
            return "closed"
        return f"connected to {len(self._live)} broker{'s' * (len(self._live) != 1)}" if self._live else "not connected"

    def live(self) -> list[BrokerConnection]:
        """Return all usable connections."""
        return list(self._live.values())

    async def ask(
        self,
        message: Message,
        kind: type[Answer],
        timeout: float | None = None,  # noqa: ASYNC109 - it also ends the request
        *,
        again: bool = True,
    ) -> Answer:
        """Send a request to any broker, and expect an answer of this kind. Raises BadFrame for another kind.

        `again`: the request may be repeated, so after a lost answer another broker is asked. The default timeout is
        `client.request_timeout_s`.
        """
        check_message(message)
        answer = await self._ask(message, self.settings.request_timeout_s if timeout is None else timeout, again)
        if not isinstance(answer, kind):
            problem = f"a broker answered {type(message).__name__} with {type(answer).__name__}"
            raise BadFrame(problem, "report it: this is a bug")
        return answer

    async def _ask(self, message: Message, timeout: float, again: bool) -> AnyMessage:  # noqa: ASYNC109
        deadline = asyncio.get_running_loop().time() + timeout
        await self.ready(timeout)
        name = type(message).__name__
        while True:
            connection = await self._any(deadline, f"{name} within {timeout:g} s")
            left = deadline - asyncio.get_running_loop().time()
            try:
                return await connection.ask(message, min(left, self.settings.resend_after_s) if again else left)
            except TimeoutError:
                if not again or left <= self.settings.resend_after_s:
                    problem = f"no broker answered {name} within {timeout:g} s"
                    raise TimedOut(problem, "it may still be carried out: check before you repeat it") from None
            except TierUnavailable:
                raise  # about a store behind the broker: an immediate retry does not help
            except Retriable as error:
                if connection.usable or again:
                    if asyncio.get_running_loop().time() + _RETRY_S > deadline:
                        raise
                    await asyncio.sleep(_RETRY_S)
                    continue
                problem = f"the connection was lost before the answer to {name}: {error.message}"
                raise OutcomeUnknown(problem, "check whether the request was carried out") from None

    async def _any(self, deadline: float, what: str) -> BrokerConnection:
        """Wait for a usable connection, and return the next one in rotation."""
        while not (usable := [connection for connection in self._live.values() if connection.usable]):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                problem = f"no broker is connected: there was no answer to {what}"
                raise Unreachable(problem, NO_BROKER_HINT) from None
        return usable[self.next_turn() % len(usable)]

    async def close(self) -> None:
        """Stop all drivers and tasks, and drop all connections."""
        self._closed = True
        for driver in list(self._drivers.values()):
            driver.stop()
        tasks = [*self._keepers.values(), self._finder, self._guard, self._starting]
        await _cancel(*(task for task in tasks if task is not None))
        self.hang_up()

    def hang_up(self) -> None:
        """Drop all connections."""
        for connection in list(self._live.values()):
            connection.drop()


async def _cancel(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel tasks, and return their results or errors."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class CoreDriver:
    """Runs one core on the connections of `brokers`. Call `run` after every event for the core."""

    core: ClientCore

    def __init__(self, brokers: BrokerPool) -> None:
        self._brokers = brokers
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self.stopped = False

    def run(self) -> None:
        """Write the frames of the core, drop its abandoned connections, and set its next timer."""
        for number, buffers in self.core.take_output():
            self._brokers.write(number, buffers)
        for number in self.core.take_abandoned():
            self._brokers.abandon(number)
        self._plan()

    def _plan(self) -> None:
        due = self.core.next_timer_us()
        if due is None or self.stopped or (self._timer is not None and self._timer_us <= due):
            return  # an early timer is harmless, and cheaper than a new timer each time
        if self._timer is not None:
            self._timer.cancel()
        self._timer_us = due
        self._timer = self._loop.call_later(max(0, due - now_us()) / 1e6, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.core.on_timer(now_us())
        self.run()

    def stop(self) -> None:
        """Release connections and timers."""
        if not self.stopped:
            self.stopped = True
            self._brokers.detach(self)
            if self._timer is not None:
                self._timer.cancel()
