"""A cluster in memory that speaks the protocol: one lane, any number of connections, faults on demand.

It keeps the promises of a real cluster (one position per sequence, fencing, continued sessions), so a client's tests
can check the content of `log`. It is simple rather than fast, and has no regions or sequencers. With `replicas`,
batches become durable when a test calls for it, and `start_anew` loses the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embarcadero.client.arguments import Lookup
from embarcadero.client.link import Link
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.subscriber import ReaderSettings, SubscriberCore
from embarcadero.errors import (
    EmbarcaderoError,
    FuturePosition,
    SessionFenced,
    TopicExists,
    UnknownSession,
    UnknownTopic,
)
from embarcadero.fabric.layout import ORDER, seal
from embarcadero.limits import CONTROL_BYTES_MAX, CREDIT_BYTES, FETCH_ENTRIES_MAX, SESSION_WINDOW
from embarcadero.types import (
    NO_INDEX,
    NO_SESSION,
    EntryKind,
    Gap,
    GapKind,
    Outcome,
    Range,
    ReferenceFault,
    Topic,
    TopicLane,
)
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    ACK,
    PAYLOAD_ALIGN,
    REFERENCE,
    WANT_DURABLE,
    AcksReceived,
    BatchHeader,
    BatchReceived,
    ControlReceived,
    CreditReceived,
    Event,
    FetchedReceived,
    FrameKind,
    FrameReceiver,
    FullReceived,
    ack_frame,
    control_frame,
    credit_frame,
    fetched_header,
    parse_reference,
    payload_crc,
)

LANE = 7


@dataclass
class Stored:
    """One entry of the log."""

    session: int
    session_seq: int
    payload: bytes
    count: int
    seq: int
    partition: int
    crc: int
    kind: EntryKind = EntryKind.BATCH
    skipped: int = 0
    lost: bool = False


@dataclass
class FakeSession:
    """One session; `window` is shared along a chain of continued sessions."""

    name: str
    fenced: bool = False
    continued_by_name: bool = False
    expected: int = 0
    opened_at: int = 0
    window: dict[int, int] = field(default_factory=dict)  # sequence -> index
    held: dict[int, tuple[FakeConnection, BatchHeader, bytes]] = field(default_factory=dict)


class FakeCluster:
    """State that all fake brokers share."""

    def __init__(self, order: int = 2, partitions: int = 1, replicas: int = 0) -> None:
        self.topics = {
            "t": Topic(
                name="t", lane=LANE, order=order, partitions=partitions, replicas=replicas, durable_on=replicas
            )
        }  # fmt: skip
        self.replicas = replicas
        self.durable = 0  # with replicas: batches below are on disk
        self.at_once = False  # batches are durable as soon as they are ordered
        self.generation = 1
        self.lost: list[tuple[int, int]] = []
        self.lanes: list[TopicLane] = []  # of a topic of order 0 or 1
        self._undurable: list[tuple[FakeConnection, BatchHeader, Outcome, int]] = []
        self.order = order
        self.tells_order = 0  # of opened sessions; 0: a broker of an earlier version
        self.asked_orders: list[int | None] = []
        self.log: list[Stored] = []
        self.next_seq = 0
        self.start_index = 0  # everything below is trimmed
        self.sessions: dict[int, FakeSession] = {}
        self.next_handle = 0
        self.frames: list[tuple[BatchHeader, bytes]] = []  # every received batch frame, in order
        self.backpressure = 0  # number of further batches to refuse
        self.connections: list[FakeConnection] = []
        self.origin = 0  # region handle in order entries
        self.fails: EmbarcaderoError | None = None  # answers to requests about lanes
        self.unsure: list[int] = []  # lanes of brokers that are not recovered yet
        self.addresses: list[m.BrokerAddress] = []
        self.staged: dict[tuple[int, int], bytes] = {}  # (lane, index) -> the batch that references may name
        self.references = True  # brokers accept batches by reference; False: an earlier version
        self.recovering = False  # the range that was open when the fabric was lost is not sealed yet

    # --- sessions ---
    def open(self, ask: m.OpenSession) -> m.Message:
        if ask.topic not in self.topics:
            raise UnknownTopic(f"there is no topic {ask.topic!r}")
        if ask.lane not in (None, self.topics[ask.topic].lane):
            raise UnknownSession(f"topic {ask.topic!r} was made again")
        earlier = None
        if ask.resume is not None:
            earlier = self._continued(ask.resume)
        elif ask.name:
            named = [handle for handle, session in self.sessions.items() if session.name == ask.name]
            holder = named[-1] if named else NO_SESSION
            if ask.holder not in (None, holder):
                return m.NameHeld(session=holder, expected=self.sessions[holder].expected if named else 0)
            earlier = self.sessions.get(holder)
            if earlier is not None:
                earlier.continued_by_name = True
        self.asked_orders.append(ask.order)
        session = FakeSession(ask.name)
        if earlier is not None:
            self.fence(earlier)
            session.expected, session.window = earlier.expected, earlier.window
        reached = session.expected
        session.expected = max(session.expected, ask.at or 0)
        handle = self.next_handle
        self.next_handle += 1
        session.opened_at = len(self.log)
        self.sessions[handle] = session
        *before, (lost_from, lost_to) = self.lost or [(0, 0)]
        return m.Opened(
            lane=LANE, session=handle, index=session.opened_at, expected=session.expected, low=0,
            lost_from=lost_from, lost_to=lost_to, lost_before=before, reached=reached, order=self.tells_order,
        )  # fmt: skip

    def _continued(self, handle: int) -> FakeSession:
        """The newest session of the chain; refused if another holder has opened its name."""
        if handle not in self.sessions:
            raise UnknownSession(f"session {handle} is not known")
        if self.sessions[handle].continued_by_name:
            raise SessionFenced(f"session {handle} was taken over")
        window = self.sessions[handle].window
        return next(s for s in reversed(self.sessions.values()) if s.window is window)

    def fence(self, session: FakeSession) -> None:
        """No more batches are accepted; batches in the reorder buffer are refused."""
        session.fenced = True
        for connection, header, _ in session.held.values():
            connection.ack(header, Outcome.FENCED, extra=session.expected)
        session.held.clear()

    def fence_all(self) -> None:
        for session in self.sessions.values():
            if not session.fenced:
                self.fence(session)

    # --- batches ---
    def batch(self, connection: FakeConnection, header: BatchHeader, payload: bytes) -> None:
        self.frames.append((header, payload))
        if header.lane not in {topic.lane for topic in self.topics.values()}:
            connection.ack(header, Outcome.UNKNOWN_TOPIC)
        elif (session := self.sessions.get(header.session)) is None:
            connection.ack(header, Outcome.UNKNOWN_SESSION)
        elif header.session_seq in session.window:
            index = session.window[header.session_seq]
            same = self.log[index].crc == header.crc
            self._stored(connection, header, Outcome.DUP_OF if same else Outcome.CONFLICT, index)
        elif session.fenced:
            connection.ack(header, Outcome.FENCED, extra=session.expected)
        elif self.backpressure or header.session_seq >= header.low + SESSION_WINDOW:
            self.backpressure -= 1
            connection.ack(header, Outcome.BACKPRESSURE)
        elif self.order == 2:
            self._store(connection, session, header, payload)
        else:
            session.held[header.session_seq] = (connection, header, payload)
            while session.expected in session.held:
                self._store(*self._unhold(session))

    @staticmethod
    def _unhold(session: FakeSession) -> tuple[FakeConnection, FakeSession, BatchHeader, bytes]:
        connection, header, payload = session.held.pop(session.expected)
        return connection, session, header, payload

    def _store(self, connection: FakeConnection, session: FakeSession, header: BatchHeader, payload: bytes) -> None:
        index = len(self.log)
        self.log.append(
            Stored(
                header.session,
                header.session_seq,
                payload,
                header.count,
                self.next_seq,
                header.partition,
                header.crc,
            )
        )
        self.next_seq += header.count
        session.window[header.session_seq] = index
        session.expected = max(session.expected, header.session_seq + 1)
        self._stored(connection, header, Outcome.ORDERED, index)
        if self.at_once:
            self.make_durable()
        self.wake()

    def _stored(self, connection: FakeConnection, header: BatchHeader, outcome: Outcome, index: int) -> None:
        """Ack now, or (if the batch requests it) once it is durable."""
        if header.flags & WANT_DURABLE and outcome.stored and index >= self.durable:
            self._undurable.append((connection, header, outcome, index))
        else:
            connection.ack(header, outcome, index)

    # --- disks ---
    def make_durable(self, below: int | None = None) -> None:
        """Batches with an index below this (all, by default) are on disk; waiting clients are informed."""
        self.durable = len(self.log) if below is None else below
        waiting, self._undurable = self._undurable, []
        for connection, header, outcome, index in waiting:
            self._stored(connection, header, outcome, index)
        self.wake()

    def start_anew(self, end: int | None = None, skipped: int = 100) -> None:
        """Lose the fabric, and with it batches from `end` on (by default those that are not durable).

        The test cuts connections itself. `skipped` positions are never used.
        """
        end = self.durable if end is None else end
        ceiling = len(self.log) + skipped
        self.lost.append((end, ceiling))
        self.next_seq += 10 * skipped
        nothing = Stored(0, 0, b"", 0, self.next_seq, 0, 0, EntryKind.SESSION_FENCE, lost=True)
        self.log[end:] = [nothing] * (ceiling - end)
        self.durable = max(self.durable, ceiling)
        self._undurable.clear()
        self.generation += 1
        self.sessions = {handle: s for handle, s in self.sessions.items() if s.opened_at < end}
        self.next_handle = max(self.sessions, default=-1) + 1  # lost handles are used again
        for session in self.sessions.values():
            session.held.clear()
            session.fenced = True
            for sequence in [sequence for sequence, index in session.window.items() if index >= end]:
                del session.window[sequence]
            session.expected = min(session.expected, max(session.window, default=-1) + 1)

    def ranges(self) -> list[Range]:
        """The topic's ranges, with the LOST gaps between them. While it recovers, the newest loss is not known."""
        lost = self.lost[:-1] if self.recovering else self.lost
        starts, ends = [0, *(stop for _, stop in lost)], [*(start for start, _ in lost), None]
        return [
            Range(lane=LANE, number=number, start=start, start_seq=0, replicas=[], durable_on=1, end=end)
            for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
        ]

    def end_for(self, ask: m.Fetch) -> int:
        """Where the log ends for a reader."""
        return self.durable if self.replicas and ask.read == "durable" else len(self.log)

    def skip(self, session: int, first: int, count: int) -> None:
        """Declare sequences lost."""
        self.log.append(Stored(session, first, b"", 0, self.next_seq, 0, 0, EntryKind.SKIP, count))
        self.wake()

    def put(self, payload: bytes, count: int = 1, partition: int = 0) -> None:
        """Append a batch without a publisher."""
        self.log.append(Stored(0, len(self.log), payload, count, self.next_seq, partition, payload_crc(payload)))
        self.next_seq += count
        self.wake()

    def session_entry(self, kind: EntryKind) -> None:
        """A session was opened, fenced or closed."""
        self.log.append(Stored(0, len(self.log), b"", 0, self.next_seq, 0, 0, kind))
        self.wake()

    # --- reads ---
    def wake(self) -> None:
        for connection in self.connections:
            connection.serve_parked()

    def seq_at(self, index: int) -> int:
        return self.log[index].seq if index < len(self.log) else self.next_seq

    def resolve(self, ask: m.Fetch) -> int:
        if ask.by == "earliest":
            return self.start_index
        if ask.by == "latest":
            return self.end_for(ask)
        if ask.by == "seq":
            if ask.start > self.next_seq:
                raise FuturePosition(f"seq {ask.start} is beyond {self.next_seq}")
            return next((i for i, s in enumerate(self.log) if s.seq + s.count > ask.start), len(self.log))
        if ask.by == "time":  # batch n was appended at 1_000_000 + n
            return min(max(0, ask.start - 1_000_000), len(self.log))
        if ask.start > len(self.log):
            raise FuturePosition(f"index {ask.start} is beyond {len(self.log)}")
        return ask.start

    def entries(self, indices: list[int]) -> np.ndarray[Any, Any]:
        entries = np.zeros(len(indices), dtype=ORDER)
        for row, index in enumerate(indices):
            stored = self.log[index]
            for name in ("session", "session_seq", "seq", "count", "partition", "crc", "kind"):
                entries[name][row] = getattr(stored, name)
            entries["index"][row], entries["size"][row] = index, len(stored.payload)
            entries["origin"][row] = self.origin
            entries["append_us"][row], entries["location"][row] = 1_000_000 + index, stored.skipped
        return seal(entries)


class FakeConnection:
    """One client connection: bytes in, bytes out (`output`)."""

    def __init__(self, cluster: FakeCluster, broker: int = 0, credit: int = CREDIT_BYTES, greeted: bool = True) -> None:
        self.cluster, self.broker, self.credit = cluster, broker, credit
        self.output: list[bytes] = []
        self.received_bytes = self.granted = 0
        self.damage = 0  # how many more payloads are served with a wrong bit
        self.mute = False  # accepts everything, answers nothing
        self.parked: list[tuple[int, m.Fetch]] = []
        self.questions: list[m.AnyMessage] = []
        self._payloads: list[np.ndarray[Any, Any]] = []
        self._scratch = memoryview(bytearray(1 << 16))
        self._receiver = FrameReceiver(
            allowed=frozenset({FrameKind.CONTROL, FrameKind.BATCH}), scratch=self._scratch, admit=self._admit,
            control_bytes_max=CONTROL_BYTES_MAX,
        )  # fmt: skip
        cluster.connections.append(self)
        if greeted:
            self.grant()

    def close(self) -> None:
        self.cluster.connections.remove(self)
        self.mute = True

    def grant(self, more: int | None = None) -> None:
        """Without `more`: as much as the client has used, plus `credit`."""
        self.granted = self.received_bytes + self.credit if more is None else self.granted + more
        self._say(credit_frame(self.granted))

    def receive(self, data: Any) -> None:
        """Bytes from the client."""
        data = memoryview(data).cast("B")
        while len(data):
            room = self._receiver.get_buffer()
            n = min(len(room), len(data))
            room[:n] = data[:n]
            for event in self._receiver.received(n):
                if isinstance(event, BatchReceived):
                    self._batch(event.header, self._payloads.pop(0).tobytes())
                elif isinstance(event, ControlReceived):
                    self._control(event.request, event.message)
            data = data[n:]

    def _admit(self, header: BatchHeader) -> memoryview:
        self._spend(64 if header.flags & REFERENCE else 64 + header.length)
        self._payloads.append(np.empty(header.length, dtype=np.uint8))
        return self._payloads[-1].data

    def _spend(self, size: int) -> None:
        self.received_bytes += size
        assert self.received_bytes <= self.granted, "the client sent more than it was granted"

    def _batch(self, header: BatchHeader, payload: bytes) -> None:
        if header.flags & REFERENCE:
            assert self.cluster.references, "an old broker would take the reference for a payload"
            reference = parse_reference(payload)
            self._spend(reference.size)
            header = header._replace(length=reference.size, flags=header.flags & ~REFERENCE)
            staged = self.cluster.staged.get((reference.lane, reference.index))
            if staged is None or payload_crc(staged) != header.crc:
                fault = ReferenceFault.GONE if staged is None else ReferenceFault.DIFFERS
                self.ack(header, Outcome.NO_REFERENCE, extra=int(fault))
                return
            payload = staged
        self.cluster.batch(self, header, payload)

    def ack(self, header: BatchHeader, outcome: Outcome, index: int = NO_INDEX, extra: int = 0) -> None:
        ack = np.zeros(1, dtype=ACK)
        ack["lane"], ack["session"], ack["session_seq"] = header.lane, header.session, header.session_seq
        ack["index"], ack["extra"], ack["outcome"] = index, extra, outcome
        ack["seq"] = NO_INDEX if index == NO_INDEX else self.cluster.log[index].seq
        self._say(ack_frame(ack))

    def _say(self, frame: bytes) -> None:
        if not self.mute:
            self.output.append(frame)

    def _control(self, request: int, message: m.AnyMessage) -> None:
        self.questions.append(message)
        try:
            answer = self._answer(request, message)
        except EmbarcaderoError as error:
            answer = m.Failed(code=type(error).__name__, message=error.message, hint=error.hint)
        if answer is not None:
            self._say(control_frame(answer, request))
        if isinstance(message, m.Hello):
            self.grant()

    def _answer(self, request: int, message: m.AnyMessage) -> m.Message | None:
        cluster = self.cluster
        match message:
            case m.Hello():
                return m.Welcome(
                    version=1, cluster="fake", broker=self.broker, incarnation=1, brokers=cluster.addresses,
                    generation=cluster.generation, references=cluster.references,
                )  # fmt: skip
            case m.GetLanes():
                if cluster.fails is not None:
                    raise cluster.fails
                lanes = [lane for lane in cluster.lanes if lane.lane > message.above]
                return m.LanesAre(lane=LANE, lanes=lanes, unsure=cluster.unsure)
            case m.OpenSession():
                return cluster.open(message)
            case m.CloseSession():
                if cluster.sessions.pop(message.session, None) is None:
                    raise UnknownSession("no such session")
                return m.Done()
            case m.Fetch():
                self.parked.append((request, message))
                self.serve_parked()
                return None
            case m.Ping():
                return m.Pong()
            case m.GetStatus():
                return m.StatusIs(facts={"broker": self.broker})
            case m.GetTail():
                start = cluster.start_index
                return m.TailIs(
                    lane=LANE, index=len(cluster.log), seq=cluster.next_seq, start_index=start,
                    start_seq=cluster.seq_at(start), durable_index=cluster.durable,
                    durable_seq=cluster.seq_at(cluster.durable),
                )  # fmt: skip
        return self._topics(message)

    def _topics(self, message: m.AnyMessage) -> m.Message:
        topics = self.cluster.topics
        match message:
            case m.ListTopics():
                return m.TopicsAre(topics=list(topics.values()))
            case m.CreateTopic():
                if message.name in topics:
                    raise TopicExists(f"there is a topic {message.name!r}")
                topics[message.name] = Topic(
                    name=message.name, lane=LANE + len(topics), order=message.order, partitions=message.partitions
                )
                return m.TopicIs(topic=topics[message.name])
            case m.DescribeTopic() | m.DeleteTopic() if message.name not in topics:
                raise UnknownTopic(f"there is no topic {message.name!r}")
            case m.DescribeTopic():
                if self.cluster.fails is not None:
                    raise self.cluster.fails
                ranges = self.cluster.ranges() if self.cluster.replicas else []
                return m.TopicIs(topic=topics[message.name], ranges=ranges)
            case m.DeleteTopic():
                del topics[message.name]
                return m.Done()
        raise AssertionError(message)

    def serve_parked(self, over: bool = False) -> None:
        """Answer the fetches that have a result; all of them when their time is `over`."""
        waiting, self.parked = self.parked, []
        for request, ask in waiting:
            try:
                served = self._serve(request, ask, over or ask.wait_ms == 0)
            except EmbarcaderoError as error:
                self._say(control_frame(m.Failed(code=type(error).__name__, message=error.message), request))
                continue
            if not served:
                self.parked.append((request, ask))

    def _serve(self, request: int, ask: m.Fetch, over: bool) -> bool:
        cluster = self.cluster
        start = cluster.resolve(ask)
        gap, picked, size, at, end = None, [], 0, start, cluster.end_for(ask)
        stop = end if ask.stop is None else min(end, ask.stop)
        hole = next((hole for hole in cluster.lost if hole[0] <= start < hole[1]), None)
        if hole is not None:
            gap, at = Gap(GapKind.LOST, *hole), hole[1]
        elif start < cluster.start_index:
            gap, at = Gap(GapKind.TRIMMED, start, cluster.start_index), cluster.start_index
        else:
            while at < stop and (not picked or size + len(cluster.log[at].payload) <= ask.max_bytes):
                if len(picked) == FETCH_ENTRIES_MAX:
                    break
                stored = cluster.log[at]
                if stored.lost:
                    break
                if not ask.control and stored.kind not in (EntryKind.BATCH, EntryKind.SKIP):
                    at += 1
                    continue
                if stored.kind != EntryKind.BATCH or ask.partitions is None or stored.partition in ask.partitions:
                    picked.append(at)
                    size += len(stored.payload)
                at += 1
        if not picked and gap is None and not over and at != ask.stop:
            return False
        body = cluster.entries(picked).tobytes()
        for payload in map(self._payload_of, picked):
            body += payload + bytes(-len(payload) % PAYLOAD_ALIGN)
        header = fetched_header(
            request=request, next_index=at, tail_index=end, count=len(picked), length=len(body), gap=gap
        )
        self._say(header + body)
        return True

    def _payload_of(self, index: int) -> bytes:
        payload = self.cluster.log[index].payload
        if self.damage and payload:
            self.damage -= 1
            return bytes([payload[0] ^ 1]) + payload[1:]
        return payload


def subscriber_core(lane: int = LANE, by: str = "index", start: int = 0, **settings: Any) -> SubscriberCore:
    """A reader of one lane."""
    return SubscriberCore(ReaderSettings(**settings), lane, Lookup(by, start))


class World:
    """A core, fake brokers, and wires between them on which bytes wait until a test moves them."""

    def __init__(self, core: Any, cluster: FakeCluster, wires: int = 0) -> None:
        self.core, self.cluster, self.now = core, cluster, 1_000_000
        self.wires: dict[int, Wire] = {}
        self.made = 0
        for _ in range(wires):
            self.connect()

    def connect(self, credit: int = CREDIT_BYTES) -> int:
        self.made += 1
        wire = self.wires[self.made] = Wire(self.made, self.cluster, credit, self.now)
        self.core.on_connected(wire.link, self.now)
        self.collect()
        return self.made

    def cut(self, number: int) -> None:
        """Drop all bytes on the wire."""
        wire = self.wires.pop(number)
        wire.far.close()
        self.core.on_disconnected(number, self.now)
        self.collect()

    def collect(self) -> None:
        """Put the core's frames on the wires; close the links that it gave up."""
        for number, frames in self.core.take_output():
            if number in self.wires:
                self.wires[number].outward.extend(bytes(frame) for frame in frames)
        for number in self.core.take_abandoned():
            if number in self.wires:
                self.cut(number)

    def outward(self, number: int) -> None:
        """One buffer reaches the broker."""
        wire = self.wires.get(number)
        if wire is not None and wire.outward:
            wire.far.receive(wire.outward.pop(0))

    def inward(self, number: int) -> None:
        """Deliver a broker's output to the core."""
        wire = self.wires.get(number)
        if wire is None:
            return
        for event in wire.take():
            match event:
                case ControlReceived():
                    self.core.on_control(number, event.request, event.message, self.now)
                case FetchedReceived():
                    self.core.on_fetched(number, event, self.now)
                case AcksReceived():
                    self.core.on_acks(number, event.acks, self.now)
                case CreditReceived() if isinstance(self.core, PublisherCore):
                    self.core.on_credit(number, event.total, self.now)
                case FullReceived() if isinstance(self.core, PublisherCore):
                    self.core.on_full(number, self.now, event)
        self.collect()

    def advance(self, microseconds: int) -> None:
        self.now += microseconds
        self.core.on_timer(self.now)
        self.collect()

    def settle(self, rounds: int = 200) -> None:
        """Move everything until nothing moves."""
        for _ in range(rounds):
            busy = False
            for number in list(self.wires):
                wire = self.wires.get(number)
                while wire is not None and wire.outward:
                    busy = True
                    self.outward(number)
                if wire is not None and wire.far.output:
                    busy = True
                    self.inward(number)
            if not busy:
                return
        raise AssertionError("the world does not come to rest")

    def run(self, until: Any, steps: int = 1000) -> None:
        """Let time pass, timer by timer, until a condition holds."""
        for _ in range(steps):
            self.settle()
            if until():
                return
            due = self.core.next_timer_us()
            assert due is not None, "nothing is due and the condition does not hold"
            assert due > self.now or due == self.core.next_timer_us()
            self.advance(max(1, due - self.now))
        raise AssertionError("the condition never held")


class Wire:
    """One simulated connection."""

    def __init__(self, number: int, cluster: FakeCluster, credit: int, now_us: int) -> None:
        self.link = Link(number, now_us, cluster.generation)
        self.link.references = cluster.references
        self.far = FakeConnection(cluster, credit=credit)
        self.outward: list[bytes] = []
        self._receiver = FrameReceiver(
            allowed=frozenset(
                {FrameKind.CONTROL, FrameKind.ACK, FrameKind.CREDIT, FrameKind.FULL, FrameKind.FETCHED}
            ),
            scratch=memoryview(bytearray(1 << 16)), control_bytes_max=CONTROL_BYTES_MAX,
        )  # fmt: skip

    def take(self) -> list[Event]:
        data = memoryview(b"".join(self.far.output))
        self.far.output.clear()
        events: list[Event] = []
        while data:
            room = self._receiver.get_buffer()
            n = min(len(room), len(data))
            room[:n] = data[:n]
            events += self._receiver.received(n)
            data = data[n:]
        return events
