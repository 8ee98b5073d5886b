"""One broker, assembled from its parts: no sockets, no clock of its own, no threads.

The simulator runs the same code. A broker owns three regions (log, pending ring, frontiers) of one incarnation.
`admission.py` takes batches in and `connection.py` requests. `fetches.py` and `positions.py` serve reads of the data of
any broker.
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
"""How much one batch counts when it becomes durable: a payload and an ack."""


def _nothing() -> None:
    """Do nothing: the default without a driver."""


class AnnouncedLines:
    """The lines in which this broker publishes its heartbeat and its waiting counts."""

    def __init__(self, fabric: Fabric, frontiers: Region) -> None:
        self._fabric = fabric
        self._heartbeat = FrontierWriter(frontiers, frontier_offset(BrokerLine.HEARTBEAT))
        self._reads = FrontierWriter(frontiers, frontier_offset(BrokerLine.READS_WAITING))
        self._disks = FrontierWriter(frontiers, frontier_offset(BrokerLine.DURABLE_WAITING))

    def beat(self) -> None:
        """Advance the heartbeat."""
        self._heartbeat.advance(self._heartbeat.value + 1)

    def announce(self, reads: int, for_disks: int) -> None:
        """Publish the number of waiting reads and of waits for disks. Call this before counting durable lines again."""
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

    # --- changes in the store -----------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Learn from the store: topics, members, the newest epoch."""
        self.store.refresh()

    def _store_changed(self) -> None:
        """Pass a change of the store on to all parts."""
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
        """Drop the state of removed lanes. Their topics were deleted, and clients may stay connected."""
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
        """Grant no more credit and announce the departure. Batches within granted credit are still settled."""
        self.admission.credit.leave()
        self._addresses = self._live_addresses()
        self._push_members()

    @property
    def leaving(self) -> bool:
        """Whether this broker was asked to leave."""
        return self.admission.credit.leaving

    def _live_addresses(self) -> list[m.BrokerAddress]:
        return self.store.addresses(excluding=self.member if self.leaving else None)

    @property
    def taken(self) -> int:
        """Number of batches and requests taken since the start."""
        return self.ingest.next + self.lanes.taken

    @property
    def unanswered(self) -> int:
        """Number of taken batches and requests that have no outcome yet."""
        return len(self.relay.waiting) + self.lanes.unacked + self.awaiting.waiting

    @property
    def unsettled(self) -> int:
        """The same, plus batches and calls that are still arriving or running."""
        calls = self._view.context.store_calls
        arriving = self.ingest.arriving + self.admission.references.waiting
        return self.unanswered + arriving + calls.running + calls.waiting

    # --- polling ------------------------------------------------------------------------------------------------------
    def poll(self, on_settled: Callable[[], None] = _nothing) -> bool:
        """Run one pass: the store, the epoch, outcomes, waiting reads, credit. True if there may be more work.

        The store is polled only now and then. After a single outcome, or a single batch that became durable, the result
        is False: the writer of the next one rings. `on_settled` is called when acks are queued, before any other work.
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
        """Return when the next waiting read gives up."""
        ends = (self.fetches.next_deadline_us(), self.requests.watches.next_deadline_us())
        return min((end for end in ends if end is not None), default=None)

    def _announce(self) -> None:
        """Publish the waiting counts: the sequencer and the replicas ring only brokers with waiting work.

        Count durable lines again afterwards. Replicas do not ring for records that became durable before they saw the
        count.
        """
        path = self._path
        for_disks = path.awaiting.waiting + path.relay.for_disks + self.fetches.waiting_for_disks
        self._lines.announce(self.fetches.waiting, for_disks + self.admission.credit.starving)

    # --- connections --------------------------------------------------------------------------------------------------
    def connect(self, transport: Transport | None = None) -> Connection:
        """Create the connection of a new client."""
        self.counters.connections += 1
        connection = Connection(self.counters.connections, self._services, transport or Transport())
        self.peers[connection.peer.number] = connection.peer
        return connection

    def _disconnected(self, peer: Peer) -> None:
        """Forget a client whose transport is closed. The batches and requests it sent are still processed."""
        self.peers.pop(peer.number, None)
        self.fetches.disconnected(peer)
        self.admission.disconnected(peer)
        self.requests.disconnected(peer)

    # --- facts --------------------------------------------------------------------------------------------------------
    @property
    def store(self) -> StoreView:
        """The view of the store."""
        return self._view.store

    @property
    def epoch(self) -> LeaderView:
        """The view of the leader."""
        return self._view.epoch

    @property
    def durable(self) -> DurableFrontiers:
        """The durable frontiers of lanes."""
        return self._view.durable

    @property
    def ingest(self) -> Ingest:
        """The log and the pending ring."""
        return self._path.ingest

    @property
    def sessions(self) -> AttachedSessions:
        """Which connections feed which sessions."""
        return self._path.sessions

    @property
    def relay(self) -> Relay:
        """The relay of results."""
        return self._path.relay

    @property
    def awaiting(self) -> AwaitingDurability:
        """The payloads and acks that await durability."""
        return self._path.awaiting

    @property
    def lanes(self) -> OwnLanes:
        """The broker's own lanes, for topics of orders 0 and 1."""
        return self._path.lanes

    @property
    def member(self) -> Member:
        """The identity of this broker."""
        return self._view.context.member

    @property
    def settings(self) -> BrokerSettings:
        """The broker's configuration."""
        return self._view.context.settings

    @property
    def journal(self) -> Journal:
        """The journal of events."""
        return self._view.context.env.journal

    @property
    def counters(self) -> BrokerCounters:
        """The broker's counters."""
        return self._view.context.counters

    @property
    def full(self) -> bool:
        """Whether the broker is above its high water mark and grants no credit."""
        return self.admission.credit.full

    @property
    def fetches_waiting(self) -> int:
        """Number of waiting long polls."""
        return self.fetches.waiting

    def credit_bytes(self) -> int:
        """Return how many bytes all clients together may send now."""
        return sum(peer.credit.granted - peer.credit.received for peer in self.peers.values())

    def reader_lags(self) -> dict[int, list[int]]:
        """Return by topic's lane how many batches each reader of one of its lanes here is behind.

        Readers that stopped fetching are not counted.
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
        """Return facts about this broker for `GetStatus`."""
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
