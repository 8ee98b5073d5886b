"""One broker, put together: no sockets, no clock of its own, no threads. The simulator runs the same code.

A broker owns three regions (log, pending ring, frontiers) of one incarnation. `admission.py` takes batches in,
`connection.py` requests, and `fetches.py` and `positions.py` serve reads of the data of any broker.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Final

from embarcadero import limits
from embarcadero.broker.admission import Admission, AttachedSessions, OutcomeCounts, WritePath
from embarcadero.broker.clients import Peer, Transport, UnreadBytes
from embarcadero.broker.connection import Connection, Requests, Services
from embarcadero.broker.context import BrokerContext, BrokerCounters, StoreView
from embarcadero.broker.disk_reads import TableJobs
from embarcadero.broker.durable import AwaitingDurability, BrokerView, DurableFrontiers
from embarcadero.broker.fetches import Fetches
from embarcadero.broker.lane_reader import LaneReaders
from embarcadero.broker.own_lanes import OwnLanes
from embarcadero.broker.pending import Ingest, Relay, Waiting
from embarcadero.broker.positions import Positions
from embarcadero.config.table import BrokerKeys as BrokerSettings
from embarcadero.env import Inline, Journal
from embarcadero.fabric.layout import BrokerLine, frontier_offset
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.lines import FrontierWriter
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import Fabric, Region
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState
from embarcadero.wire import messages as m

_LONE: Final = 2
"""What one batch counts for when it becomes durable: a payload and an ack."""


def _nothing() -> None:
    """Write no output: there is no driver."""


class AnnouncedLines:
    """The lines in which this broker publishes its heartbeat, and how much waits here."""

    def __init__(self, fabric: Fabric, frontiers: Region) -> None:
        self._fabric = fabric
        self._heartbeat = FrontierWriter(frontiers, frontier_offset(BrokerLine.HEARTBEAT))
        self._reads = FrontierWriter(frontiers, frontier_offset(BrokerLine.READS_WAITING))
        self._disks = FrontierWriter(frontiers, frontier_offset(BrokerLine.DURABLE_WAITING))

    def beat(self) -> None:
        """Advance the heartbeat."""
        self._heartbeat.advance(self._heartbeat.value + 1)

    def announce(self, reads: int, for_disks: int) -> None:
        """Publish how many reads wait, and how much waits for disks; the latter before anything is counted again."""
        if self._reads.value != reads:
            self._reads.restart(reads)
        if self._disks.value != for_disks:
            self._disks.restart(for_disks)
            self._fabric.fence()


class Broker:
    """One incarnation of one broker.

    `metrics` is the address of its process's metrics, for `GetStatus`.
    """

    def __init__(self, context: BrokerContext, tables: TableJobs | None = None, metrics: str = "") -> None:
        self._metrics, member = metrics, context.member
        env, fabric, directory = context.env, context.fabric, context.directory
        self._addresses: list[m.BrokerAddress] = []  # of live brokers, as clients know them
        epoch = LeaderView(fabric, member, env.steps)
        self._view = view = BrokerView(
            context,
            StoreView(directory, self._store_changed, self._advance),
            epoch,
            DurableFrontiers(fabric, epoch.table, directory, env.steps),
        )
        ingest = Ingest(fabric, member, context.sizes, context.config.limits.frame_bytes, env.steps)
        self._lines = AnnouncedLines(fabric, ingest.frontiers)
        awaiting = AwaitingDurability(ingest.log, view.durable, epoch.ordered_end)
        waiting: dict[int, Waiting] = {}
        sessions = AttachedSessions(ingest, waiting, self.settings.sessions_per_connection)
        outcomes = OutcomeCounts(view, sessions)
        relay = Relay(ingest.frontiers, ingest.log.release, waiting, outcomes, env.steps)
        lanes = OwnLanes(view, ingest, awaiting)
        self._path = path = WritePath(ingest, sessions, relay, awaiting, lanes)
        self.unread = UnreadBytes(self.settings, path.largest_frame, env.clock)
        self._logs = BrokerLogs(fabric, view.store.refresh)
        self.readers = LaneReaders(view, self._logs, tables or TableJobs(Inline(), None))
        self.fetches = Fetches(view, self.readers, self.unread, self._announce)
        self.peers: dict[int, Peer] = {}  # by connection
        self.admission = Admission(view, path, self.readers, self.peers, self._announce)
        positions = Positions(context, view.store, self.readers)
        self.requests = Requests(view, self.admission, self.fetches, positions, self.status)
        scratch = memoryview(bytearray(limits.SCRATCH_BYTES))
        self._services = Services(context, self.unread, self.admission, self.requests, self._disconnected, scratch)
        self._store_poll_us = 0
        self.deposed = False
        self.refresh()

    # --- the world around ---------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Learn from the store: topics, members, the newest epoch."""
        self.store.refresh()

    def _store_changed(self) -> None:
        """Let all parts learn what the store has now."""
        store, me = self.store, (self.member.broker, self.member.incarnation)
        self.durable.changed()
        self.epoch.keep(store.lanes.keys())
        self._logs.update(store.members)
        self.lanes.update()
        self.readers.update()
        self._forget_lanes(store.lanes.keys() | store.broker_lanes.keys())
        self.deposed |= all((o.broker, o.incarnation) != me or o.state != MemberState.LIVE for o in store.members)
        if (now := self._live_addresses()) != self._addresses:
            self._addresses = now
            self._push_members()

    def _push_members(self) -> None:
        members = m.MembersAre(brokers=self._addresses)
        for peer in self.peers.values():
            if peer.greeted:
                peer.answer(0, members)

    def _forget_lanes(self, lanes: AbstractSet[int]) -> None:
        """Drop all that has to do with other lanes: their topics are gone, and clients need not say so."""
        self.counters.keep(lanes)
        self.awaiting.keep(lanes)
        self.durable.keep(lanes)
        for peer in self.peers.values():
            peer.lanes &= lanes
            for lane in peer.reading.keys() - lanes:
                del peer.reading[lane]
            for key in [key for key in peer.turns if key.lane not in lanes]:
                del peer.turns[key]
            for key in [key for key in peer.sessions if key.lane not in lanes]:
                self.sessions.forget(peer, key)

    def _advance(self, hint: int) -> bool:
        moved = self.epoch.advance(hint)
        if moved:
            self.durable.follow(self.epoch.number)
            self.journal.note("follows epoch", epoch=self.epoch.number)
        return moved

    def leave(self) -> None:
        """Grant no more credit and announce the departure; what was granted may still come, and is settled."""
        self.admission.credit.leave()
        self._addresses = self._live_addresses()
        self._push_members()

    @property
    def leaving(self) -> bool:
        """Whether it was told to leave."""
        return self.admission.credit.leaving

    def _live_addresses(self) -> list[m.BrokerAddress]:
        return self.store.addresses(but=self.member if self.leaving else None)

    @property
    def taken(self) -> int:
        """How much was taken in, ever: batches and requests."""
        return self.ingest.next + self.lanes.taken

    @property
    def unanswered(self) -> int:
        """How much of what was taken has no outcome yet."""
        return len(self.relay.waiting) + self.lanes.unacked + self.awaiting.waiting

    @property
    def unsettled(self) -> int:
        """The same, and what is still on its way in."""
        calls = self._view.context.store_calls
        arriving = self.ingest.arriving + self.admission.references.waiting
        return self.unanswered + arriving + calls.running + calls.waiting

    # --- polling ------------------------------------------------------------------------------------------------------
    def poll(self, on_settled: Callable[[], None] = _nothing) -> bool:
        """One pass: the store (now and then), the epoch, outcomes, waiting reads, credit. True if there may be more.

        After a lone outcome, or a lone batch that became durable, there is not: the writer of the next one rings.
        `on_settled` is told when acks are on their way out: before anything else is done.
        """
        view, path = self._view, self._path
        now_us = view.context.env.clock.now_us()
        if now_us >= self._store_poll_us:
            self._store_poll_us = now_us + int(self.settings.store_poll_ms * 1_000)
            self.refresh()
            self._lines.beat()
            self.deposed |= view.epoch.closing()
            self.admission.end_slow(now_us)
            self.requests.notes.poll(now_us)
        if self.deposed:
            return False
        moved = self._advance(0)
        through = view.epoch.read_through()
        if through > path.ingest.free_below and view.epoch.may_act():
            path.ingest.free(through)
            view.context.env.steps.at(Step.SLOTS_FREE)
        moved |= path.relay.poll(view.epoch) > 1
        moved |= path.lanes.poll()
        moved |= self.requests.watches.poll(now_us)
        self.deposed |= path.lanes.closed
        path.sessions.stage_owed()
        self.admission.publish()
        self._announce()
        if settled := path.awaiting.settle():
            moved |= settled > _LONE
            on_settled()
        moved |= self.fetches.retry(now_us)
        view.context.store_calls.start()
        self._announce()
        self.admission.credit.regulate(now_us)
        return moved

    def next_deadline_us(self) -> int | None:
        """When the next waiting read gives up."""
        ends = (self.fetches.next_deadline_us(), self.requests.watches.next_deadline_us())
        return min((end for end in ends if end is not None), default=None)

    def _announce(self) -> None:
        """Publish what waits here: the sequencer and the replicas ring only brokers where something does.

        What waits for disks is counted again after that: for what became durable before they saw it they do not ring.
        """
        path = self._path
        for_disks = path.awaiting.waiting + path.relay.for_disks + self.fetches.waiting_for_disks
        self._lines.announce(self.fetches.waiting, for_disks + self.admission.credit.starving)

    # --- connections --------------------------------------------------------------------------------------------------
    def connect(self, transport: Transport | None = None) -> Connection:
        """A client connected."""
        self.counters.connections += 1
        connection = Connection(self.counters.connections, self._services, transport or Transport())
        self.peers[connection.peer.number] = connection.peer
        return connection

    def _disconnected(self, peer: Peer) -> None:
        """Its transport is gone; what it sent stays on its way."""
        self.peers.pop(peer.number, None)
        self.fetches.disconnected(peer)
        self.admission.disconnected(peer)
        self.requests.disconnected(peer)

    # --- facts --------------------------------------------------------------------------------------------------------
    @property
    def store(self) -> StoreView:
        """What it knows of the store."""
        return self._view.store

    @property
    def epoch(self) -> LeaderView:
        """The leader, as it knows it."""
        return self._view.epoch

    @property
    def durable(self) -> DurableFrontiers:
        """How far lanes are durable."""
        return self._view.durable

    @property
    def ingest(self) -> Ingest:
        """Its log and its pending ring."""
        return self._path.ingest

    @property
    def sessions(self) -> AttachedSessions:
        """Which connections feed which sessions."""
        return self._path.sessions

    @property
    def relay(self) -> Relay:
        """Results on their way back."""
        return self._path.relay

    @property
    def awaiting(self) -> AwaitingDurability:
        """Payloads and acks that await durability."""
        return self._path.awaiting

    @property
    def lanes(self) -> OwnLanes:
        """Its own lanes, of topics of orders 0 and 1."""
        return self._path.lanes

    @property
    def member(self) -> Member:
        """Which broker this is."""
        return self._view.context.member

    @property
    def settings(self) -> BrokerSettings:
        """Its configuration."""
        return self._view.context.settings

    @property
    def journal(self) -> Journal:
        """Where it reports events."""
        return self._view.context.env.journal

    @property
    def counters(self) -> BrokerCounters:
        """What it counts."""
        return self._view.context.counters

    @property
    def full(self) -> bool:
        """Whether we grant no credit because we are above the mark."""
        return self.admission.credit.full

    @property
    def fetches_waiting(self) -> int:
        """Long polls that wait."""
        return self.fetches.waiting

    def credit_bytes(self) -> int:
        """What all clients together may send now."""
        return sum(peer.credit.granted - peer.credit.received for peer in self.peers.values())

    def reader_lags(self) -> dict[int, list[int]]:
        """By topic's lane: how many batches each reader of one of its lanes here is behind.

        Readers that stopped asking are not counted.
        """
        lags: dict[int, list[int]] = {}
        since_us = self._view.context.env.clock.now_us() - 2 * limits.FETCH_WAIT_MS_MAX * 1000
        for peer in self.peers.values():
            for lane, last in peer.reading.items():
                lag = self.readers.lag(lane, last.next_index) if last.at_us > since_us else None
                if lag is not None:
                    lags.setdefault(self.store.topic_lane(lane), []).append(lag)
        return lags

    def status(self) -> dict[str, object]:
        """Facts about this broker, for `GetStatus`."""
        return {
            "broker": self.member.broker,
            "incarnation": self.member.incarnation,
            "address": self.member.address,
            "epoch": self.epoch.number,
            "metrics": self._metrics,
            "brokers": [member.address for member in self.store.live()],
            "connections": len(self.peers),
            "pending": self.ingest.next - self.ingest.free_below,
            "unresolved": self.unanswered,
            "log_occupied": round(self.ingest.log.occupied(), 4),
            "full": self.full,
            "fetches_waiting": self.fetches.waiting,
            "unread_bytes": self.unread.used,
            "acks_waiting_for_disks": self.awaiting.waiting,
            "log_kept_for_disks": round(self.awaiting.kept_chunks / self.ingest.log.chunks, 4),
            "durable": {str(lane): facts.through for lane, facts in self.awaiting.facts().items()},
            "warm_jobs": self.readers.disks.running + self.readers.disks.waiting,
        }
