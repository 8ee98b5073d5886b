"""The broker's logic: no sockets, no clock of its own, no threads. The driver and the simulator run the same code.

A broker owns three regions (log, pending ring, frontiers) of one incarnation. It takes batches in (ingest.py), relays
outcomes (relay.py), serves reads of any broker's data (reader.py), and keeps its clients within credit:
above the high water mark no credit is granted, below the low one it is again; control frames always flow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Final

import msgspec

from embarcadero import limits
from embarcadero.broker.clients import UnreadBytes
from embarcadero.broker.counters import BrokerCounters
from embarcadero.broker.durable import DurableFrontiers, HeldLanes
from embarcadero.broker.net.connection import Connection
from embarcadero.broker.net.requests import ReaderNotes, answer_tier, check_partitions, with_defaults
from embarcadero.broker.read.disk import DiskCopies, DiskReads, TableJobs
from embarcadero.broker.read.fetches import Reads
from embarcadero.broker.read.results import TableReader
from embarcadero.broker.write.admission import Peers, peer_number
from embarcadero.broker.write.lanes import BrokerLanes
from embarcadero.broker.write.pending import Entry, Ingest, Relay, Waiting
from embarcadero.broker.write.references import References
from embarcadero.config import DEFAULTS, Config, FabricSizes
from embarcadero.env import NO_STEPS, Clock, Disk, Doorbell, Inline, Journal, SilentJournal, Steps, Workers
from embarcadero.errors import (
    Backpressure,
    BadFrame,
    BadName,
    DiskFailed,
    EmbarcaderoError,
    Retriable,
    UnknownSession,
    UnknownTopic,
)
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.layout import OPEN_STRONG, BrokerLine, Entries, frontier_offset
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.log import BrokerLogs, Reservation
from embarcadero.fabric.region import Fabric
from embarcadero.orders import session_order
from embarcadero.placement.decisions import check_id
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import NOT_SEEN
from embarcadero.steps import Step
from embarcadero.types import NO_SESSION, EntryKind, Member, MemberState, Order, Outcome, ReplicaMember, Topic
from embarcadero.wire import messages as m
from embarcadero.wire.codec import HEADER_BYTES, PROTOCOL_VERSION, WANT_DURABLE, BatchHeader, FrameKind

_LONE: Final = 2
"""What one batch counts for when it becomes durable: a payload and an ack."""


def _nothing() -> None:
    """Nobody writes what we have to say."""


def no_disks(member: ReplicaMember) -> Disk:
    """For brokers of clusters without replicas."""
    raise DiskFailed(f"this broker can't reach the disk of replica {member.replica}", "run it on the replica's host")


class Broker:
    """One incarnation of one broker."""

    def __init__(
        self,
        fabric: Fabric,
        directory: Directory,
        clock: Clock,
        bell: Doorbell,
        member: Member,
        sizes: FabricSizes,
        journal: Journal | None = None,
        config: Config = DEFAULTS,
        workers: Workers | None = None,
        disks: Callable[[ReplicaMember], Disk] = no_disks,
        steps: Steps | None = None,
        tables: TableReader | None = None,
        table_workers: Workers | None = None,
    ) -> None:
        self._steps = steps = steps or NO_STEPS
        self.member, self.sizes, self.config, self.settings = member, sizes, config, config.broker
        self.journal = journal or SilentJournal()
        self.counters = BrokerCounters(sizes.results_slots)
        self._directory, self._clock, self._bell = directory, clock, bell
        self.ingest = Ingest(fabric, member, sizes, config.limits.frame_bytes, steps)
        self.epoch = LeaderView(fabric, member, steps)
        self.relay = Relay(self.ingest.frontiers, self.ingest.log.release, steps)
        self.relay.on_results, self.relay.on_result = self._count_results, self._count_result
        self.relay.on_ended, self.relay.on_opened = self._forget_session, self._opened
        self._heartbeat = FrontierWriter(self.ingest.frontiers, frontier_offset(BrokerLine.HEARTBEAT))
        self._reads_waiting = FrontierWriter(self.ingest.frontiers, frontier_offset(BrokerLine.READS_WAITING))
        self._durable_waiting = FrontierWriter(self.ingest.frontiers, frontier_offset(BrokerLine.DURABLE_WAITING))
        self._fabric = fabric
        self.durable = DurableFrontiers(fabric, self.epoch.table, directory, steps)
        self.held = HeldLanes(self.ingest.log, self.durable, self.epoch.ordered_end)
        self.relay.lost = lambda lane: self.durable.chain(lane).lost
        self._logs = BrokerLogs(fabric, self.refresh)
        self.lanes = BrokerLanes(
            fabric, directory, clock, bell, member, sizes, self.ingest, self.epoch, self._logs, self.counters,
            self.durable, self.held, steps,
        )  # fmt: skip
        self.peers = Peers(self.settings, sizes.log_bytes, sizes.chunk_bytes)
        self.unread = UnreadBytes(self.settings, self._largest_frame, clock)
        self.reads = Reads(
            directory, clock, self.epoch, self._logs, self.lanes, sizes.round_entries, self.durable,
            DiskReads(workers or Inline(), DiskCopies(disks)), TableJobs(table_workers or Inline(), tables),
            self.counters, self.refresh, self.unread,
        )  # fmt: skip
        self.references = References(
            clock, self.reads, self.lanes, self.ingest, self._topic_with, self.refresh,
            self.take_batch, self.after_receive,
        )  # fmt: skip
        self._reader_notes = ReaderNotes(directory, clock)
        self._topics: dict[str, Topic] = {}
        self._lanes: dict[int, Topic] = {}
        self._members: list[Member] = []
        self._revision, self._outline = -1, NOT_SEEN
        self._store_poll_us = 0
        self._scratch = memoryview(bytearray(limits.SCRATCH_BYTES))
        self.connections: dict[int, Connection] = {}
        self._attached: dict[tuple[int, int], int] = {}  # (lane, session) -> connections that feed it
        self._owed: deque[Entry] = deque()  # detach entries that have no slot yet
        self._connected = 0
        self._above_since_us: int | None = None
        self._told_full_us = 0
        self._starving: dict[int, int] = {}  # connections without credit as their lane is behind with disks: since when
        self.deposed = self.leaving = False
        self.metrics = ""  # host:port of this process's metrics, for `GetStatus`; the node knows it
        self.on_settled: Callable[[], None] = _nothing  # acks are on their way out: before anything else is done
        self._least_credit_bytes = max(self._largest_frame, self.settings.credit_bytes // 2)
        self.refresh()

    # --- the world around ---------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Learn from the store: topics, members, the newest epoch."""
        revision = self._directory.revision()
        if revision == self._revision:
            return
        if (outline := self._directory.outline()) == self._outline:
            self._advance(self._directory.started_epoch())
        else:
            self._outline = NOT_SEEN  # the store may cease to answer half-way: then all of it is read again
            self._read_all()
        self._revision, self._outline = revision, outline

    def _read_all(self) -> None:
        self._topics = {topic.name: topic for topic in self._directory.topics()}
        self.durable.changed()
        lanes, trims = {topic.lane: topic for topic in self._topics.values()}, self._directory.trims()
        for lane in self._lanes.keys() - lanes.keys():
            self.epoch.forget(lane)
        self._lanes = lanes
        before, self._members = self._live_addresses(), self._directory.members()
        self._logs.update(self._members)
        self.lanes.update(lanes, self._members, trims)
        self.reads.update(lanes, trims)
        self._forget_lanes(lanes.keys() | self.lanes.known.keys())
        me = (self.member.broker, self.member.incarnation)
        self.deposed |= all((o.broker, o.incarnation) != me or o.state != MemberState.LIVE for o in self._members)
        self._advance(self._directory.started_epoch())
        if (now := self._live_addresses()) != before:
            for connection in self.connections.values():
                if connection.greeted:
                    connection.answer(0, m.MembersAre(brokers=now))

    def _forget_lanes(self, lanes: AbstractSet[int]) -> None:
        """Drop all that has to do with other lanes: their topics are gone, and clients need not say so."""
        self.counters.keep(lanes)
        self.held.keep(lanes)
        self.durable.keep(lanes)
        for connection in self.connections.values():
            connection.lanes &= lanes
            for lane in connection.reading.keys() - lanes:
                del connection.reading[lane]
            for key in [key for key in connection.turns if key[0] not in lanes]:
                del connection.turns[key]
            for key in [key for key in connection.sessions if key[0] not in lanes]:
                self._forget_session(connection, key)

    def _advance(self, hint: int) -> bool:
        moved = self.epoch.advance(hint)
        if moved:
            self.durable.follow(self.epoch.number)
            self.journal.note("follows epoch", epoch=self.epoch.number)
        return moved

    def leave(self) -> None:
        """Grant no more credit and tell clients that we go; what was granted may still come, and is settled."""
        self.leaving = True
        members = m.MembersAre(brokers=self._live_addresses())
        for connection in self.connections.values():
            if connection.greeted:
                connection.answer(0, members)

    @property
    def taken(self) -> int:
        """How much was taken in, ever: batches and requests."""
        return self.ingest.next + self.lanes.taken

    @property
    def unanswered(self) -> int:
        """How much of what was taken has no outcome yet."""
        return len(self.relay.waiting) + self.lanes.unacked + self.held.waiting

    @property
    def unsettled(self) -> int:
        """The same, and what is still on its way in."""
        return self.unanswered + self.ingest.arriving + self.references.waiting

    def _live_addresses(self) -> list[m.BrokerAddress]:
        return [
            m.BrokerAddress(broker=o.broker, incarnation=o.incarnation, host=o.host, port=o.port, handle=o.handle)
            for o in self._members
            if o.state == MemberState.LIVE and not (self.leaving and o.handle == self.member.handle)
        ]

    def welcome(self) -> m.Welcome:
        """The answer to a hello."""
        self.refresh()
        return m.Welcome(
            version=PROTOCOL_VERSION,
            cluster=self._directory.cluster_id,
            broker=self.member.broker,
            incarnation=self.member.incarnation,
            brokers=self._live_addresses(),
            frame_bytes_max=self.ingest.frame_bytes_max,
            record_bytes_max=self.config.limits.record_bytes,
            records_max=self.config.limits.records_per_batch,
            generation=self._directory.generation & 0xFFFF_FFFF,
            tables=self.reads.tables.offered,
            references=True,
        )

    def poll(self) -> bool:
        """One pass: the store (now and then), the epoch, outcomes, waiting reads, credit. True if there may be more.

        After a lone outcome, or a lone batch that became durable, there is not: whoever writes the next one rings.
        """
        now_us = self._clock.now_us()
        if now_us >= self._store_poll_us:
            self._store_poll_us = now_us + int(self.settings.store_poll_ms * 1_000)
            self.refresh()
            self._heartbeat.advance(self._heartbeat.value + 1)
            self.deposed |= self.epoch.closing()
            for connection in self.peers.too_slow(now_us, self.ingest.occupancy()):
                connection.too_slow()
            self._reader_notes.poll(now_us)
        if self.deposed:
            return False
        moved = self._advance(0)
        through = self.epoch.read_through()
        if through > self.ingest.free_below and self.epoch.may_act():
            self.ingest.free_below = through
            self._steps.at(Step.SLOTS_FREE)
        moved |= self.relay.poll(self.epoch) > 1
        moved |= self.lanes.poll(now_us)
        self.deposed |= self.lanes.closed
        self._pay_owed()
        self._tell_waiting()
        if settled := self.held.settle():
            moved |= settled > _LONE
            self.on_settled()
        moved |= self.reads.retry(now_us)
        self._tell_waiting()
        self._regulate(now_us)
        return moved

    def next_deadline_us(self) -> int | None:
        """When the next waiting read gives up."""
        ends = (self.reads.next_deadline_us(), self.lanes.next_deadline_us())
        return min((end for end in ends if end is not None), default=None)

    # --- connections --------------------------------------------------------------------------------------------------
    def connect(self) -> Connection:
        """A client connected."""
        self._connected += 1
        self.counters.connections += 1
        connection = Connection(self, self._connected, self._scratch)
        self.connections[connection.number] = connection
        return connection

    def disconnected(self, connection: Connection) -> None:
        """Its transport is gone; what it sent stays on its way."""
        self.connections.pop(connection.number, None)
        self.peers.disconnected(connection)
        self.reads.disconnected(connection)
        self.lanes.disconnected(connection)
        self.held.disconnected(connection)
        for key in list(connection.sessions):
            self._leave_session(connection, key)
        self._pay_owed()

    def after_receive(self, connection: Connection) -> None:
        """A read of a socket was taken apart: publish what it brought, top up credit."""
        self.peers.received(connection, self._clock.now_us())
        if self.relay.for_disks:
            self._tell_waiting()  # before anybody can order it, and replicas sync it
        self._publish()
        if self.lanes.publish(connection):
            self._tell_waiting()
            self.held.settle()  # what became durable before that rang nobody
        self.grant(connection)

    def _publish(self) -> None:
        if not self.ingest.publish():
            return
        self.counters.published(self.ingest.next, self._clock.now_us())
        if self.epoch.sequencer_sleeps():
            self._bell.ring("sequencer")

    def _opened(self, connection: Connection, key: tuple[int, int]) -> None:
        """A session was opened: the sequencer counts it as connected here until a detach entry."""
        if connection.gone:
            self._owed.append(Entry(EntryKind.SESSION_DETACH, *key))
            return
        if key not in connection.sessions:
            self._attached[key] = self._attached.get(key, 0) + 1
            self._remember(connection, key)

    def _pay_owed(self) -> None:
        self._stage_owed()
        self._publish()

    def _stage_owed(self) -> None:
        while self._owed and (pending := self.ingest.stage_control(self._owed[0])) is not None:
            entry = self._owed.popleft()
            self.relay.waiting[pending] = Waiting(entry.kind, entry.lane, None, None)

    # --- credit -------------------------------------------------------------------------------------------------------
    def _credit_window(self) -> tuple[int, int]:
        """How much credit a connection gets, and what it must not fall below: the largest frame always fits it."""
        share = self.sizes.log_bytes // 4 // max(1, len(self.connections))
        window = max(self._largest_frame, min(self.settings.credit_bytes, share))
        return window, max(self._largest_frame, window // 2)

    @property
    def _largest_frame(self) -> int:
        return self.ingest.frame_bytes_max + HEADER_BYTES[FrameKind.BATCH]

    def grant(self, connection: Connection) -> None:
        """Top up a connection's credit, unless we are above the mark."""
        taken = connection.received_bytes - connection.staging_bytes
        left = connection.granted_bytes - taken
        if left >= self._least_credit_bytes and connection.number not in self._starving:
            return  # whatever its share is, that is enough
        if not connection.greeted or connection.closing or self._above_since_us is not None or self.leaving:
            return
        if (self.held.pressed or self._starving) and self._behind_with_disks(connection):
            return
        window, least = self._credit_window()
        if left < least:
            connection.send_credit(taken + window)

    def _behind_with_disks(self, connection: Connection) -> bool:
        """Whether a connection gets no credit because all lanes that it feeds keep too much of the log."""
        lanes = self._fed_by(connection)
        behind = bool(lanes) and all(map(self.held.without_credit, lanes))
        if behind:
            self._starving.setdefault(connection.number, self._clock.now_us())
        else:
            self._starving.pop(connection.number, None)
        return behind

    def _feed_starving(self, now_us: int) -> None:
        """Credit for those whose lanes caught up; a word for those who have waited for long."""
        patience_us = int(self.settings.backpressure_after_s * 1_000_000)
        for number, since_us in list(self._starving.items()):
            connection = self.connections.get(number)
            if connection is None:
                del self._starving[number]
                continue
            self.grant(connection)
            if number in self._starving and now_us - since_us >= patience_us:
                self._starving[number] = now_us
                for lane in self._fed_by(connection):
                    self._send_stalled(connection, lane)

    def _tell_stalled(self, now_us: int) -> None:
        """Tell those who feed a lane that its disks stand still, and which replica is in trouble."""
        for lane in self.held.stalled(now_us, int(self.settings.backpressure_after_s * 1_000_000)):
            for connection in self.connections.values():
                if lane in self._fed_by(connection):
                    self._send_stalled(connection, lane)

    def _send_stalled(self, connection: Connection, lane: int) -> None:
        """Tell a client that the disks of a lane do not keep up, and which replica is in trouble."""
        of_broker = self.lanes.known.get(lane)
        replica, trouble = self.durable.trouble(lane)
        connection.send_full(lane if of_broker is None else of_broker.topic, replica, trouble)

    @staticmethod
    def _fed_by(connection: Connection) -> set[int]:
        """Lanes that a connection's publishers feed."""
        return connection.lanes | {lane for lane, _ in connection.sessions}

    def _regulate(self, now_us: int) -> None:
        self._tell_stalled(now_us)
        if self._starving:
            self._feed_starving(now_us)
        occupancy = self.ingest.occupancy()
        if self._above_since_us is None:
            if occupancy >= self.settings.water_high:
                self._above_since_us = self._told_full_us = now_us
                self.counters.backpressure += 1
                self.journal.warn("backpressure on", occupied=round(occupancy, 3), unresolved=len(self.relay.waiting))
        elif occupancy <= self.settings.water_low:
            self._above_since_us = None
            self.journal.note("backpressure off", occupied=round(occupancy, 3))
            for connection in self.connections.values():
                self.grant(connection)
        elif now_us - self._told_full_us >= self.settings.backpressure_after_s * 1_000_000:
            self._told_full_us = now_us  # and again each time: publishers go on waiting as long as they are told
            for connection in self.connections.values():
                if connection.greeted:
                    connection.send_full()

    # --- batches ------------------------------------------------------------------------------------------------------
    def check_batch(self, connection: Connection, header: BatchHeader) -> Outcome | None:
        """Why a batch can't be taken, from its header alone; None when it can."""
        topic = self._lanes.get(header.lane)
        if topic is None or header.partition >= topic.partitions or header.schema > topic.schema_version:
            self.refresh()  # the topic may be new, or altered since we looked
            if (topic := self._lanes.get(header.lane)) is None:
                return Outcome.UNKNOWN_TOPIC
        if header.partition >= topic.partitions:
            raise BadFrame(
                f"partition {header.partition} of topic {topic.name}, which has {topic.partitions}",
                "use partitions below that number",
            )
        if header.schema > topic.schema_version or bool(header.schema) != bool(topic.schema_version):
            return Outcome.UNKNOWN_SCHEMA
        if header.session == NO_SESSION:
            return Outcome.UNKNOWN_SESSION
        if header.flags & WANT_DURABLE and not topic.replicas:
            raise BadFrame(f"a durable ack of topic {topic.name}, which has no replicas", "use ack=1")
        if topic.order <= Order.BROKER:
            return self.lanes.check(topic)
        if topic.replicas and self.held.crowded(header.lane):
            return Outcome.BACKPRESSURE
        return None if self._attach(connection, header.lane, header.session) else Outcome.BACKPRESSURE

    def _attach(self, connection: Connection, lane: int, session: int) -> bool:
        """Tell the sequencer that the session's publisher is here. False when there is no slot for that now."""
        key = (lane, session)
        if key in connection.sessions:
            return True
        if key not in self._attached:
            self._stage_owed()  # a detach of the same session that came later would undo this
            entry = Entry(EntryKind.SESSION_ATTACH, lane, session)
            if self._owed or (pending := self.ingest.stage_control(entry)) is None:
                return False
            self.relay.waiting[pending] = Waiting(EntryKind.SESSION_ATTACH, lane, None, None)
            self._attached[key] = 0
        self._attached[key] += 1
        self._remember(connection, key)
        return True

    def _remember(self, connection: Connection, key: tuple[int, int]) -> None:
        """A session is fed by a connection. Of too many, the first one counts as left, until it sends again."""
        connection.sessions[key] = None
        if len(connection.sessions) > self.settings.sessions_per_connection:
            self._leave_session(connection, next(iter(connection.sessions)))

    def _leave_session(self, connection: Connection, key: tuple[int, int]) -> None:
        """A connection feeds a session no longer. The sequencer is told if no other connection does."""
        self._forget_session(connection, key)
        if key not in self._attached:
            self._owed.append(Entry(EntryKind.SESSION_DETACH, *key))

    def _forget_session(self, connection: Connection, key: tuple[int, int]) -> None:
        """Have a session in mind no longer: it ended, or its connection did. Another batch would attach it again."""
        if key not in connection.sessions:
            return
        del connection.sessions[key]
        self._attached[key] -= 1
        if not self._attached[key]:
            del self._attached[key]

    def take_batch(self, connection: Connection, header: BatchHeader, arrived: Reservation) -> None:
        """A whole, right batch: stage its entry."""
        topic = self._lanes.get(header.lane)
        if topic is not None and topic.order <= Order.BROKER:
            if self.lanes.take(connection, topic, header, arrived):
                self.counters.came_in[header.lane].add(1, header.count, header.length)
            return
        waiting = Waiting(EntryKind.BATCH, header.lane, arrived.location, connection)
        if topic is not None and topic.replicas:
            waiting.held, waiting.durable = self.held.of(header.lane), bool(header.flags & WANT_DURABLE)
        pending = self.ingest.stage_batch(
            arrived,
            Entry(
                EntryKind.BATCH, header.lane, header.session, header.session_seq, header.low, arrived.location,
                header.length, header.count, header.crc, header.partition, header.schema, waiting.durable,
            ),
        )  # fmt: skip
        self.relay.wait(pending, waiting)
        self.counters.came_in[header.lane].add(1, header.count, header.length)

    # --- control ------------------------------------------------------------------------------------------------------
    def control(self, connection: Connection, request: int, message: m.AnyMessage) -> None:
        """Answer a control message; errors are answered by the connection."""
        match message:
            case m.OpenSession():
                self._open_session(connection, request, message)
            case m.CloseSession():
                self._close_session(connection, request, message)
            case m.CreateTopic():
                self._create_topic(message)
                connection.answer(request, self._described(message.name))
            case m.AlterTopic():
                check_partitions(message.partitions, self.config)
                self._directory.alter_topic(message)
                self._bell.ring("sequencer")
                connection.answer(request, self._described(message.name))
            case m.DescribeTopic():
                connection.answer(request, self._described(message.name))
            case m.ListTopics():
                connection.answer(request, m.TopicsAre(topics=self._list_topics()))
            case m.GetLanes():
                self.refresh()
                if message.lane not in self._lanes:
                    raise UnknownTopic(f"there is no topic with lane {message.lane}", "look it up again by name")
                self.lanes.watch(connection, request, message, self._clock.now_us())
            case m.DeleteTopic():
                self._directory.delete_topic(message.name, message.topic_id)
                self._bell.ring("sequencer")
                connection.answer(request, m.Done())
            case m.GetTail():
                self.reads.tail(connection, request, message.lane)
            case m.Find():
                self.reads.find(connection, request, message)
            case m.Trim():
                self.reads.trim(connection, request, message)
            case m.Measure():
                self.reads.measure(connection, request, message)
            case m.NoteProgress() | m.RemoveReader():
                self._reader_notes.take(message)
                connection.answer(request, m.Done())
            case m.GetReaders():
                connection.answer(request, self._reader_notes.readers(message.topic))
            case m.OpenTier() | m.AdvanceTier() | m.KeepTier() | m.CloseTier():
                connection.answer(request, answer_tier(self._directory, message, self._clock.wall_us()))
            case m.GetStatus():
                connection.answer(request, m.StatusIs(facts=self.status()))
            case m.Ping():
                connection.answer(request, m.Pong())
            case _:
                raise BadFrame(f"{type(message).__name__} is not a question", "see the protocol's table of messages")

    def _described(self, name: str) -> m.TopicIs:
        """A topic with its schema, all its lanes and its ranges, as the store has them now."""
        topic, schema = self._directory.described(name)
        if topic.order <= Order.BROKER:
            topic = msgspec.structs.replace(topic, lanes=self._directory.lanes(topic.lane))
        age_us = self._clock.wall_us() - topic.created_us
        lanes = [topic.lane, *(lane.lane for lane in topic.lanes)] if topic.replicas else []
        ranges = [range_ for lane in lanes for range_ in self._directory.ranges(lane)]
        return m.TopicIs(
            topic=topic, columns=schema.columns, widths=schema.widths, ranges=ranges[-limits.RANGES_LISTED_MAX :],
            tier=self._directory.tier(name), age_us=age_us if topic.created_us and age_us >= 0 else None,
        )  # fmt: skip

    def _create_topic(self, ask: m.CreateTopic) -> None:
        settings = with_defaults(ask, self.config, self._directory.live_replicas())
        self._directory.create_topic(ask.name, columns=ask.columns, created_us=self._clock.wall_us(), **settings)
        self._bell.ring("sequencer")

    def _list_topics(self) -> list[Topic]:
        """All topics, with their lanes unless these would not fit the answer."""
        topics, lanes = self._directory.topics(), self._directory.lanes()
        if len(lanes) > limits.LANES_LISTED_MAX:
            return topics
        return [
            msgspec.structs.replace(topic, lanes=[lane for lane in lanes if lane.topic == topic.lane])
            if topic.order <= Order.BROKER else topic
            for topic in topics
        ]  # fmt: skip

    def _open_session(self, connection: Connection, request: int, ask: m.OpenSession) -> None:
        if len(ask.name.encode()) > limits.SESSION_NAME_BYTES_MAX:
            raise BadName(
                f"a session name of {len(ask.name.encode())} bytes", f"use at most {limits.SESSION_NAME_BYTES_MAX}"
            )
        if self.leaving:
            raise Retriable("this broker is leaving", "ask another")
        self.refresh()
        if (topic := self._topics.get(ask.topic)) is None:
            raise UnknownTopic(f"there is no topic {ask.topic!r}", "create it first")
        check_id(topic, ask.topic_id)
        if ask.lane not in (None, topic.lane):
            raise UnknownSession(f"topic {ask.topic!r} was made again since", "open a new publisher")
        if topic.order <= Order.BROKER:
            connection.answer(request, self.lanes.open_session(topic, ask))
            return
        asked = topic.order if ask.order is None else session_order(topic.name, topic.order, ask.order)
        flags = OPEN_STRONG if asked == Order.STRONG != topic.order else 0
        name_hash = int.from_bytes(blake2b(ask.name.encode(), digest_size=8).digest(), "little") if ask.name else 0
        earlier = NO_SESSION if ask.resume is None else ask.resume
        at = 0 if ask.at is None else ask.at + 1
        holder = 0 if ask.holder is None else min(ask.holder + 1, NO_SESSION)
        entry = Entry(
            EntryKind.SESSION_OPEN, topic.lane, earlier, session_seq=name_hash, low=at, crc=holder, flags=flags,
            size=peer_number(connection.host),
        )  # fmt: skip
        self._request(connection, request, entry)

    def _close_session(self, connection: Connection, request: int, ask: m.CloseSession) -> None:
        if (topic := self._lanes.get(ask.lane)) is not None and topic.order <= Order.BROKER:
            connection.answer(request, m.Done())
            return
        self._request(connection, request, Entry(EntryKind.SESSION_CLOSE, ask.lane, ask.session))

    def _request(self, connection: Connection, request: int, entry: Entry) -> None:
        """Pass a session request on to the sequencer; its outcome is the answer."""
        pending = self.ingest.stage_control(entry)
        if pending is None:
            raise Backpressure("the broker has no room for session requests now", "try again, or another broker")
        self.relay.waiting[pending] = Waiting(entry.kind, entry.lane, None, connection, request)

    # --- reads --------------------------------------------------------------------------------------------------------
    def fetch(self, connection: Connection, request: int, ask: m.Fetch) -> None:
        """Answer now, or when there is something, or when the client's patience is over."""
        self.reads.fetch(connection, request, ask)
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        """Say who waits here: the sequencer and the replicas ring only where somebody does.

        What waits for disks is counted again after that: what became durable before they saw it rings nobody.
        """
        if self._reads_waiting.value != self.reads.waiting:
            self._reads_waiting.restart(self.reads.waiting)
        waiting = self.held.waiting + self.relay.for_disks + self.reads.waiting_for_disks + len(self._starving)
        if self._durable_waiting.value != waiting:
            self._durable_waiting.restart(waiting)
            self._fabric.fence()

    # --- what is counted ----------------------------------------------------------------------------------------------
    def _count_results(self, results: Entries) -> None:
        self.counters.answered(results, self._clock.now_us())

    def _count_result(self, pending: int, outcome: int) -> None:
        self.counters.answered_one(pending, outcome, self._clock.now_us())

    def hung_up(self, connection: Connection, error: EmbarcaderoError) -> None:
        """A connection is ended because of what its peer did."""
        self.counters.hung_up[type(error).__name__] += 1
        self.journal.warn(
            "connection ended", peer=connection.peer, client=connection.client, error=type(error).__name__,
            reason=error.message,
        )  # fmt: skip

    # --- facts --------------------------------------------------------------------------------------------------------
    @property
    def full(self) -> bool:
        """Whether we grant no credit because we are above the mark."""
        return self._above_since_us is not None

    @property
    def fetches_waiting(self) -> int:
        """Long polls that wait."""
        return self.reads.waiting

    def credit_bytes(self) -> int:
        """What all clients together may send now."""
        return sum(connection.granted_bytes - connection.received_bytes for connection in self.connections.values())

    def topic_of(self, lane: int) -> str | None:
        """The topic that a lane belongs to."""
        topic = self._lanes.get(self._topic_lane(lane))
        return topic.name if topic is not None else None

    def _topic_with(self, lane: int) -> Topic | None:
        """The topic whose own lane this is."""
        return self._lanes.get(lane)

    def _topic_lane(self, lane: int) -> int:
        """A lane of some broker belongs to a topic that is known by another lane number."""
        of_broker = self.lanes.known.get(lane)
        return lane if of_broker is None else of_broker.topic

    def reader_lags(self) -> dict[int, list[int]]:
        """By topic's lane: how many batches each reader of one of its lanes here is behind.

        Those who stopped asking are not counted.
        """
        lags: dict[int, list[int]] = {}
        since_us = self._clock.now_us() - 2 * limits.FETCH_WAIT_MS_MAX * 1000
        for connection in self.connections.values():
            for lane, (next_index, at_us) in connection.reading.items():
                lag = self.reads.lag(lane, next_index) if at_us > since_us else None
                if lag is not None:
                    lags.setdefault(self._topic_lane(lane), []).append(lag)
        return lags

    def status(self) -> dict[str, object]:
        """What this broker says about itself."""
        return {
            "broker": self.member.broker,
            "incarnation": self.member.incarnation,
            "address": self.member.address,
            "epoch": self.epoch.number,
            "metrics": self.metrics,
            "brokers": [member.address for member in self._members if member.state is MemberState.LIVE],
            "connections": len(self.connections),
            "pending": self.ingest.next - self.ingest.free_below,
            "unresolved": self.unanswered,
            "log_occupied": round(self.ingest.log.occupied(), 4),
            "full": self._above_since_us is not None,
            "fetches_waiting": self.reads.waiting,
            "unread_bytes": self.unread.used,
            "acks_waiting_for_disks": self.held.waiting,
            "log_kept_for_disks": round(self.held.kept_chunks / self.ingest.log.chunks, 4),
            "durable": {str(lane): through for lane, (through, _) in self.held.facts().items()},
            "warm_jobs": self.reads.warm.running + self.reads.warm.waiting,
        }
