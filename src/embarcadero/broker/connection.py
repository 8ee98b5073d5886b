"""One client's connection, without a socket, and the requests that arrive over it. A driver moves the bytes.

A connection parses and frames. Batches go to admission, requests to a table of handlers, and replies leave through the
connection's peer. A protocol error of the peer ends its connection with one typed error. A refused batch gets an ack
with that outcome.

Store calls that commit, or read much of the store, run on a worker, one at a time: a commit waits for a disk. A
connection with several store calls under way is not read further. Readers report their progress often, so notes are
written at most once a second.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import msgspec

from embarcadero import limits
from embarcadero.broker.admission import Admission, peer_number
from embarcadero.broker.clients import Peer, Transport, UnreadBytes
from embarcadero.broker.context import BrokerContext
from embarcadero.broker.disk_reads import raise_unknown, typed
from embarcadero.broker.durable import BrokerView
from embarcadero.broker.fetches import Fetches
from embarcadero.broker.own_lanes import LaneWatches
from embarcadero.broker.pending import Entry
from embarcadero.broker.positions import Positions
from embarcadero.config import Config
from embarcadero.errors import (
    Backpressure,
    BadFrame,
    BadName,
    BadValue,
    BadVersion,
    Deposed,
    EmbarcaderoError,
    Retriable,
    TooMany,
    UnknownSession,
    UnknownTopic,
)
from embarcadero.fabric.layout import OPEN_STRONG
from embarcadero.limits import (
    CONTROL_BYTES_MAX,
    COPIES_DEFAULT,
    HELLO_BYTES_MAX,
    READER_LANES_MAX,
    READER_NAME_BYTES_MAX,
    READER_NOTES_S,
    READERS_ANSWER_BYTES_MAX,
    READERS_PER_TOPIC_MAX,
)
from embarcadero.orders import session_order
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import ReaderNote, check_id
from embarcadero.placement.store import rested_us
from embarcadero.types import (
    CRC32C,
    NO_SESSION,
    EntryKind,
    LanePosition,
    OnGap,
    Order,
    ReaderProgress,
    Topic,
    TopicLane,
)
from embarcadero.wire import messages as m
from embarcadero.wire.codec import (
    PROTOCOL_VERSION,
    REFERENCE,
    BatchHeader,
    BatchReceived,
    ControlReceived,
    Event,
    FrameKind,
    FrameReceiver,
    parse_reference,
)
from embarcadero.wire.messages import CreateTopic


def check_partitions(partitions: int | None, config: Config) -> None:
    """Refuse more partitions than this cluster allows."""
    most = config.limits.partitions
    if partitions is not None and partitions > most:
        raise BadValue(f"partitions={partitions} is out of range", f"use 1 to {most}")


def _copies(ask: CreateTopic, config: Config, live: int) -> tuple[int | None, int | None]:
    """Return replicas and durable_on as requested or configured; None for the directory's default."""
    usual_replicas, usual_durable_on = config.topic.replicas, config.topic.durable_on
    replicas = int(usual_replicas) if ask.replicas is None and usual_replicas.isdigit() else ask.replicas
    if ask.durable_on is not None or not usual_durable_on.isdigit():
        return replicas, ask.durable_on
    return replicas, min(int(usual_durable_on), min(live, COPIES_DEFAULT) if replicas is None else replicas)


def with_defaults(ask: CreateTopic, config: Config, live: int = 0) -> dict[str, Any]:
    """Return the settings of the requested topic. Raises BadValue above a cluster limit. `live`: live replicas."""
    usual = config.topic
    replicas, durable_on = _copies(ask, config, live)
    on_gap = usual.on_gap if ask.on_gap is None else ask.on_gap
    gap_timeout_ms = usual.gap_timeout_skip_ms if on_gap == OnGap.SKIP else usual.gap_timeout_fence_ms
    partitions = usual.partitions if ask.partitions is None else ask.partitions
    check_partitions(partitions, config)
    return {
        "order": usual.order if ask.order is None else ask.order,
        "partitions": partitions,
        "partitioner": CRC32C if ask.partitioner is None else ask.partitioner,
        "key": ask.key,
        "on_gap": on_gap,
        "gap_timeout_ms": gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms,
        "session_ttl_s": usual.session_ttl_s if ask.session_ttl_s is None else ask.session_ttl_s,
        "replicas": replicas,
        "durable_on": durable_on,
        "retention_bytes": usual.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        "retention_s": usual.retention_s if ask.retention_s is None else ask.retention_s,
    }


TierQuestion = m.OpenTier | m.AdvanceTier | m.KeepTier | m.CloseTier


def answer_tier(directory: Directory, ask: TierQuestion, wall_us: int) -> m.Message:
    """Answer a request about a tier. Raises TierBusy or Deposed."""
    match ask:
        case m.OpenTier():
            return m.TierIs(tier=directory.tiers.open(ask))
        case m.AdvanceTier():
            return m.TierIs(tier=directory.tiers.advance(ask, wall_us))
        case m.KeepTier():
            if not directory.tiers.keep_alive(ask.topic, ask.epoch, ask.topic_id):
                raise Deposed(f"epoch {ask.epoch} of the table of {ask.topic!r} is over", "open the tier again")
        case m.CloseTier():
            directory.tiers.close(ask.topic, ask.epoch, ask.topic_id)
    return m.Done()


_POSITION_BYTES: Final = 32
_BROKER: Final = 0
"""Turn number of the broker's own store calls. Clients count from 1."""


class ProgressNotes:
    """Progress that readers reported to this broker. Notes wait up to a second for the next write to the store."""

    def __init__(self, context: BrokerContext) -> None:
        self._directory, self._clock, self._calls = context.directory, context.env.clock, context.store_calls
        self._notes: dict[tuple[str, str], ReaderNote] = {}  # by topic and reader
        self._write_from_us = 0

    def check(self, ask: m.NoteProgress) -> None:
        """Check the limits of a note. Raises BadName, BadValue, Backpressure."""
        if not 0 < len(ask.reader.encode()) <= READER_NAME_BYTES_MAX:
            raise BadName(f"the reader name has {len(ask.reader.encode())} bytes", f"use 1 to {READER_NAME_BYTES_MAX}")
        if len(ask.places) > READER_LANES_MAX:
            raise BadValue(f"the note has positions in {len(ask.places)} lanes", f"use at most {READER_LANES_MAX}")
        if len(self._notes) >= READERS_PER_TOPIC_MAX and (ask.topic, ask.reader) not in self._notes:
            raise Backpressure(f"notes of {len(self._notes)} readers wait for the store", "report progress later")

    def keep(self, ask: m.NoteProgress, tried_us: int | None, note: ReaderNote | None) -> m.Done:
        """Keep a note for the next write; None: the store has it. `tried_us`: when the store was asked to take it."""
        self._notes.pop((ask.topic, ask.reader), None)  # an earlier one
        if note is not None:
            self._notes[ask.topic, ask.reader] = note
            if tried_us is not None:
                self._write_from_us = max(self._write_from_us, rested_us(tried_us, self._clock.now_us()))
        return m.Done()

    def forget(self, ask: m.RemoveReader, removed: bool) -> m.Done:
        """Forget a reader that the store may have `removed`. Raises BadValue if the topic has no such reader.

        A note that another broker received within the last second may still be written, and so may the reader's next
        note.
        """
        waiting = self._notes.pop((ask.topic, ask.reader), None)
        if not removed and waiting is None:
            raise BadValue(
                f"topic {ask.topic!r} has no reader {ask.reader[:60]!r}",
                f"list them with `embarcadero topic readers {ask.topic}`",
            )
        return m.Done()

    def due(self, now_us: int) -> bool:
        """Whether notes may be written now; if so, the next write is a second later."""
        if now_us < self._write_from_us:
            return False
        self._write_from_us = now_us + int(READER_NOTES_S * 1_000_000)
        return True

    def poll(self, now_us: int) -> None:
        """Write the waiting notes, if it is time."""
        if self._notes and self.due(now_us):
            self.write()

    def write(self, client: int = _BROKER) -> None:
        """Write the notes that are present when the call starts, in the turn of a client.

        Notes that the store refuses wait for the next write: the store is busy, or its disk is full.
        """
        notes: dict[tuple[str, str], ReaderNote] = {}
        began_us = self._clock.now_us()

        def begin() -> bool:
            notes.update(self._notes)
            self._notes.clear()
            return True

        def write() -> None:
            if notes:
                self._directory.readers.note(notes, self._clock.wall_us())

        def done(result: Exception | None) -> None:
            if result is not None:
                self._notes = notes | self._notes
                self._write_from_us = max(self._write_from_us, rested_us(began_us, self._clock.now_us()))
                raise_unknown(result)

        self._calls.run(client, write, done, begin)

    # --- on a worker --------------------------------------------------------------------------------------------------
    def note(self, ask: m.NoteProgress, due: bool) -> ReaderNote | None:
        """Look up the topic that is read, and write the note if that is `due`. Return it if it still has to be written.

        Raises UnknownTopic.
        """
        topic = self._directory.topics.get(ask.topic)
        check_id(topic, ask.topic_id)
        positions = {lane: LanePosition(*position) for lane, position in ask.places.items()}
        at_us = self._clock.wall_us()
        note = ReaderNote(reader=ask.reader, places=positions, at_us=at_us, topic_id=topic.id)
        if not due:
            return note
        try:
            self._directory.readers.note({(ask.topic, ask.reader): note}, at_us)
        except EmbarcaderoError:  # the store is busy, or its disk is full
            return note
        return None

    def remove(self, ask: m.RemoveReader) -> bool:
        """Remove a reader from the store. Returns False if the store has no reader of that name."""
        check_id(self._directory.topics.get(ask.topic), ask.topic_id)
        return self._directory.readers.remove(ask.topic, ask.reader)

    def readers(self, topic: str) -> m.ReadersAre:
        """List the progress that readers of a topic reported to any broker."""
        self._directory.topics.get(topic)
        now_us, free, found = self._clock.wall_us(), READERS_ANSWER_BYTES_MAX, []
        for note in self._directory.readers.of(topic, now_us):
            free -= len(note.reader.encode()) + _POSITION_BYTES * (1 + len(note.places))
            if free < 0:
                break
            ago_s = max(0, now_us - note.at_us) / 1e6
            found.append(ReaderProgress(reader=note.reader, places=note.places, ago_s=ago_s))
        return m.ReadersAre(topic=topic, readers=found)


Handler = Callable[[Peer, int, Any], None]
"""Answers one request of a client, immediately or later. A raised error becomes the answer."""


def _as_it_is(message: m.Message) -> m.Message:
    """Return the result of a call unchanged as the answer."""
    return message


def _with_lanes(topic: Topic, by_topic: Mapping[int, list[TopicLane]]) -> Topic:
    """Add the lanes to a topic of order 0 or 1. Other topics are returned unchanged."""
    return msgspec.structs.replace(topic, lanes=by_topic[topic.lane]) if topic.order <= Order.BROKER else topic


class Requests:
    """Answer requests with a table of handlers by message type."""

    def __init__(
        self,
        view: BrokerView,
        admission: Admission,
        fetches: Fetches,
        positions: Positions,
        status: Callable[[], dict[str, object]],
    ) -> None:
        self._context, self._store = view.context, view.store
        self._directory, self._clock = view.context.directory, view.context.env.clock
        self._admission, self._fetches, self._status = admission, fetches, status
        self.notes, self.watches = ProgressNotes(view.context), LaneWatches(view)
        self._handlers: dict[type[m.Message], Handler] = {
            m.Fetch: fetches.fetch,
            m.OpenSession: self._open_session,
            m.CloseSession: self._close_session,
            m.CreateTopic: self._create_topic,
            m.AlterTopic: self._alter_topic,
            m.DescribeTopic: self._describe_topic,
            m.ListTopics: self._list_topics,
            m.DeleteTopic: self._delete_topic,
            m.GetLanes: self._watch_lanes,
            m.GetTail: positions.tail,
            m.Find: positions.find,
            m.Trim: positions.trim,
            m.Measure: positions.measure,
            m.NoteProgress: self._note_progress,
            m.RemoveReader: self._remove_reader,
            m.GetReaders: self._get_readers,
            m.OpenTier: self._answer_tier,
            m.AdvanceTier: self._answer_tier,
            m.KeepTier: self._answer_tier,
            m.CloseTier: self._answer_tier,
            m.GetStatus: self._get_status,
            m.Ping: self._ping,
        }

    def handle(self, peer: Peer, request: int, message: m.AnyMessage) -> None:
        """Answer a request, immediately or later. Raises the error of an invalid request."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise BadFrame(f"{type(message).__name__} is not a request", "see the protocol's table of messages")
        handler(peer, request, message)

    def disconnected(self, peer: Peer) -> None:
        """Drop the waiting requests of a closed connection. A running store call completes without an answer."""
        self.watches.disconnected(peer)
        self._context.store_calls.disconnected(peer.number)

    def welcome(self) -> m.Welcome:
        """Build the answer to a hello."""
        self._store.refresh()
        context, member, limit = self._context, self._context.member, self._context.config.limits
        return m.Welcome(
            version=PROTOCOL_VERSION,
            cluster=self._directory.cluster_id,
            broker=member.broker,
            incarnation=member.incarnation,
            brokers=self._store.addresses(excluding=member if self._admission.credit.leaving else None),
            frame_bytes_max=self._admission.path.ingest.frame_bytes_max,
            record_bytes_max=limit.record_bytes,
            records_max=limit.records_per_batch,
            generation=context.directory.generation & 0xFFFF_FFFF,
            tables=self._fetches.tables_offered,
            references=True,
        )

    def _call(
        self,
        peer: Peer,
        request: int,
        job: Callable[[], Any],
        answer: Callable[[Any], m.Message] = _as_it_is,
        changes: bool = False,
    ) -> None:
        """Run a store call on a worker. On this thread, `answer` turns its result into the message to send.

        `changes`: ring the sequencer afterwards, because the call changed topics that it works with.
        """
        peer.store_calls += 1

        def done(result: object) -> None:
            peer.store_calls -= 1
            if changes:
                self._context.env.bell.ring("sequencer")
            try:
                if isinstance(result, Exception):
                    raise result
                message = answer(result)
            except Exception as error:
                peer.fail(request, typed(error))
                raise_unknown(error)
            else:
                peer.answer(request, message)

        try:
            self._context.store_calls.run(peer.number, job, done, lambda: not peer.full)
        except TooMany:
            peer.store_calls -= 1
            raise

    # --- topics -------------------------------------------------------------------------------------------------------
    def _create_topic(self, peer: Peer, request: int, ask: m.CreateTopic) -> None:
        now_us = self._clock.wall_us()

        def create() -> m.TopicIs:
            settings = with_defaults(ask, self._context.config, self._directory.replicas.live_count())
            self._directory.topics.create(ask.name, columns=ask.columns, created_us=now_us, **settings)
            return self._described(ask.name)

        self._call(peer, request, create, changes=True)

    def _alter_topic(self, peer: Peer, request: int, ask: m.AlterTopic) -> None:
        check_partitions(ask.partitions, self._context.config)

        def alter() -> m.TopicIs:
            self._directory.topics.alter(ask)
            return self._described(ask.name)

        self._call(peer, request, alter, changes=True)

    def _describe_topic(self, peer: Peer, request: int, ask: m.DescribeTopic) -> None:
        self._call(peer, request, partial(self._described, ask.name))

    def _list_topics(self, peer: Peer, request: int, ask: m.ListTopics) -> None:  # noqa: ARG002 - a handler
        self._call(peer, request, self._listed)

    def _delete_topic(self, peer: Peer, request: int, ask: m.DeleteTopic) -> None:
        job = partial(self._directory.topics.delete, ask.name, ask.topic_id)
        self._call(peer, request, job, lambda _deleted: m.Done(), changes=True)

    def _watch_lanes(self, peer: Peer, request: int, ask: m.GetLanes) -> None:
        self._store.refresh()
        if ask.lane not in self._store.lanes:
            raise UnknownTopic(f"there is no topic with lane {ask.lane}", "look up the topic by name")
        self.watches.check(peer, ask)
        if ask.wait_ms:
            self.watches.watch(peer, request, ask, self._clock.now_us())
        else:
            self._call(peer, request, partial(self.watches.fates, ask))

    def _described(self, name: str) -> m.TopicIs:
        """On a worker: read a topic with its schema, all its lanes and its ranges from the store."""
        topic, schema = self._directory.topics.described(name)
        if topic.order <= Order.BROKER:
            topic = msgspec.structs.replace(topic, lanes=self._directory.lanes.all(topic.lane))
        age_us = self._clock.wall_us() - topic.created_us
        lanes = [topic.lane, *(lane.lane for lane in topic.lanes)] if topic.replicas else []
        ranges = [range_ for lane in lanes for range_ in self._directory.ranges.all(lane)]
        return m.TopicIs(
            topic=topic,
            columns=schema.columns,
            widths=schema.widths,
            ranges=ranges[-limits.RANGES_LISTED_MAX :],
            tier=self._directory.tiers.get(name),
            age_us=age_us if topic.created_us and age_us >= 0 else None,
        )

    def _listed(self) -> m.TopicsAre:
        """On a worker: list all topics, with their lanes unless these would not fit into the answer."""
        topics, lanes = self._directory.topics.all(), self._directory.lanes.all()
        if len(lanes) > limits.LANES_LISTED_MAX:
            return m.TopicsAre(topics=topics)
        by_topic = defaultdict[int, list[TopicLane]](list)
        for lane in lanes:
            by_topic[lane.topic].append(lane)
        return m.TopicsAre(topics=[_with_lanes(topic, by_topic) for topic in topics])

    # --- sessions -----------------------------------------------------------------------------------------------------
    def _open_session(self, peer: Peer, request: int, ask: m.OpenSession) -> None:
        if len(ask.name.encode()) > limits.SESSION_NAME_BYTES_MAX:
            raise BadName(
                f"the session name has {len(ask.name.encode())} bytes", f"use at most {limits.SESSION_NAME_BYTES_MAX}"
            )
        if self._admission.credit.leaving:
            raise Retriable("this broker is leaving", "use another broker")
        self._store.refresh()
        if (topic := self._store.topics.get(ask.topic)) is None:
            raise UnknownTopic(f"there is no topic {ask.topic!r}", "create it first")
        check_id(topic, ask.topic_id)
        if ask.lane not in (None, topic.lane):
            raise UnknownSession(f"topic {ask.topic!r} was deleted and created again", "open a new publisher")
        if topic.order <= Order.BROKER:
            peer.answer(request, self._admission.path.lanes.open_session(topic, ask))
            return
        asked = topic.order if ask.order is None else session_order(topic.name, topic.order, ask.order)
        flags = OPEN_STRONG if asked == Order.STRONG != topic.order else 0
        name_hash = int.from_bytes(blake2b(ask.name.encode(), digest_size=8).digest(), "little") if ask.name else 0
        earlier = NO_SESSION if ask.resume is None else ask.resume
        at = 0 if ask.at is None else ask.at + 1
        holder = 0 if ask.holder is None else min(ask.holder + 1, NO_SESSION)
        entry = Entry(
            EntryKind.SESSION_OPEN,
            topic.lane,
            earlier,
            session_seq=name_hash,
            low=at,
            crc=holder,
            flags=flags,
            size=peer_number(peer.host),
        )
        self._admission.path.sessions.request(peer, request, entry)

    def _close_session(self, peer: Peer, request: int, ask: m.CloseSession) -> None:
        if (topic := self._store.lanes.get(ask.lane)) is not None and topic.order <= Order.BROKER:
            peer.answer(request, m.Done())
            return
        self._admission.path.sessions.request(peer, request, Entry(EntryKind.SESSION_CLOSE, ask.lane, ask.session))

    # --- readers, tables, status --------------------------------------------------------------------------------------
    def _note_progress(self, peer: Peer, request: int, ask: m.NoteProgress) -> None:
        self.notes.check(ask)
        now_us = self._context.env.clock.now_us()
        due = self.notes.due(now_us)  # once it is answered, every broker lists it
        tried_us = now_us if due else None
        self._call(peer, request, partial(self.notes.note, ask, due), partial(self.notes.keep, ask, tried_us))

    def _remove_reader(self, peer: Peer, request: int, ask: m.RemoveReader) -> None:
        self._call(peer, request, partial(self.notes.remove, ask), partial(self.notes.forget, ask))

    def _get_readers(self, peer: Peer, request: int, ask: m.GetReaders) -> None:
        self.notes.write(peer.number)
        self._call(peer, request, partial(self.notes.readers, ask.topic))

    def _answer_tier(self, peer: Peer, request: int, ask: TierQuestion) -> None:
        self._call(peer, request, partial(answer_tier, self._directory, ask, self._clock.wall_us()))

    def _get_status(self, peer: Peer, request: int, ask: m.GetStatus) -> None:  # noqa: ARG002 - a handler
        peer.answer(request, m.StatusIs(facts=self._status()))

    def _ping(self, peer: Peer, request: int, ask: m.Ping) -> None:  # noqa: ARG002 - a handler
        peer.answer(request, m.Pong())


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the broker that its connections use."""

    context: BrokerContext
    unread: UnreadBytes
    admission: Admission
    requests: Requests
    closed: Callable[[Peer], None]  # called with a peer whose transport is closed
    scratch: memoryview


class Connection:
    """Parse the input of one client. Other parts of the broker know only its `peer`."""

    def __init__(self, number: int, services: Services, transport: Transport) -> None:
        self._services, self._admission = services, services.admission
        self.peer = Peer(number, self, services.unread, services.context.counters, transport)
        self._receiver = FrameReceiver(
            allowed=frozenset({FrameKind.CONTROL, FrameKind.BATCH}),
            scratch=services.scratch,
            admit=self._admit,
            full=partial(services.unread.stops, self.peer),
            control_bytes_max=HELLO_BYTES_MAX,
        )
        self.get_buffer = self._receiver.get_buffer
        self._references: deque[bytearray] = deque()  # bodies of batches by reference that are not taken yet, in order

    # --- bytes in -----------------------------------------------------------------------------------------------------
    def received(self, count: int) -> None:
        """Process `count` bytes that were written into the buffer of get_buffer."""
        if not self.peer.closing:
            self._take(partial(self._receiver.received, count))

    def go_on(self) -> None:
        """Resume the requests that waited until the peer has read more."""
        if not self.peer.closing:
            self._take(self._receiver.go_on)
            self.peer.transport.on_output()  # the driver may read from the socket again

    def _take(self, events: Callable[[], list[Event]]) -> None:
        peer = self.peer
        try:
            found = events()
            while found:
                for event in found:
                    if peer.closing:
                        break
                    if isinstance(event, BatchReceived):
                        self._batch(event.header)
                    elif isinstance(event, ControlReceived):
                        self._control(event.request, event.message)
                found = [] if peer.closing else self._receiver.go_on()
        except EmbarcaderoError as error:
            self.hang_up(error)
        self._admission.after_receive(peer)

    @property
    def stopped(self) -> bool:
        """Whether requests wait until the peer has read more. The driver should then stop reading from the socket."""
        return self._receiver.stopped

    @property
    def waiting_bytes(self) -> int:
        """Bytes of requests that arrived and are not parsed yet."""
        return self._receiver.waiting_bytes

    # --- the end of the connection ------------------------------------------------------------------------------------
    def closed(self) -> None:
        """Clean up after the transport closed."""
        if not self.peer.gone:
            self.peer.gone = self.peer.closing = True
            self._drop_input()
            self.peer.drop_output()
            self._services.closed(self.peer)

    def abort(self, error: EmbarcaderoError) -> None:
        """End the connection without sending the error: the peer does not read."""
        self.note_end(error)
        self._drop_input()
        self.peer.closing = self.peer.aborted = True
        self.peer.drop_output()
        self.peer.transport.on_output()

    def hang_up(self, error: EmbarcaderoError) -> None:
        """Send the error to the peer, and end the connection."""
        self.note_end(error)
        self._drop_input()
        self.peer.fail(0, error)
        self.peer.closing = True

    def note_end(self, error: EmbarcaderoError) -> None:
        """Count and log that the connection is ended because of its peer."""
        context, name = self._services.context, type(error).__name__
        context.counters.hung_up[name] += 1
        context.env.journal.warn(
            "connection ended",
            peer=self.peer.transport.address,
            client=self.peer.client,
            error=name,
            reason=error.message,
        )

    def _drop_input(self) -> None:
        self._receiver.drop()
        self._references.clear()
        self._admission.drop(self.peer)

    # --- frames -------------------------------------------------------------------------------------------------------
    def _admit(self, header: BatchHeader) -> memoryview | None:
        """Check a batch before a byte of it is stored. None refuses only this batch."""
        if not self.peer.greeted:
            raise BadFrame("the client sent a batch before its hello", "send Hello first")
        if header.flags & REFERENCE:
            self._references.append(body := bytearray(header.length))
            return memoryview(body)
        return self._admission.admit(self.peer, header)

    def _batch(self, header: BatchHeader) -> None:
        if header.flags & REFERENCE:
            self._admission.take_reference(self.peer, header, parse_reference(self._references.popleft()))
        else:
            self._admission.take_arrived(self.peer, header)

    def _control(self, request: int, message: m.AnyMessage) -> None:
        if isinstance(message, m.Hello):
            self._hello(request, message)
        elif not self.peer.greeted:
            raise BadFrame(f"the client sent {type(message).__name__} before its hello", "send Hello first")
        else:
            try:
                self._services.requests.handle(self.peer, request, message)
            except EmbarcaderoError as error:
                self.peer.fail(request, error)

    def _hello(self, request: int, hello: m.Hello) -> None:
        if PROTOCOL_VERSION not in hello.versions:
            raise BadVersion(
                f"the client speaks versions {hello.versions[:8]}, this broker speaks {PROTOCOL_VERSION}",
                "use a client of the broker's release",
            )
        self.peer.greeted, self.peer.client = True, hello.client[:100]
        self._receiver.control_bytes_max = CONTROL_BYTES_MAX
        self.peer.answer(request, self._services.requests.welcome())
        self._admission.credit.grant(self.peer)
