"""Lanes of brokers, for topics of orders 0 and 1: created, written and acked by the broker itself.

A broker creates its lane of a topic when the first batch arrives. An ack leaves only if, after the flush of its entry,
no sequencer counts this incarnation as closed. While that is unknown (a sequencer takes over), acks wait, and the
broker writes at most a margin of further entries. So it never overwrites slots that readers of a closed lane may read.
"""

from __future__ import annotations

import struct
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from embarcadero.broker.clients import Peer
from embarcadero.broker.context import BrokerContext, lane_margin, lane_slots
from embarcadero.broker.durable import AwaitingDurability, AwaitingLane, BrokerView
from embarcadero.broker.pending import Ingest
from embarcadero.config import FabricSizes
from embarcadero.env import Doorbell
from embarcadero.errors import LATER, BadFrame, BadValue, FabricFull, TooMany, invariant
from embarcadero.fabric.layout import ORDER, BrokerLine, RegionKind, frontier_offset
from embarcadero.fabric.lines import FrontierReader, create_ring
from embarcadero.fabric.log import Reservation
from embarcadero.fabric.region import Fabric, broker_frontiers_region
from embarcadero.limits import FETCH_WAIT_MS_MAX, FETCHES_PARKED_PER_CONNECTION_MAX, SESSIONS_PER_CONNECTION_MAX
from embarcadero.placement.store import rested_us
from embarcadero.steps import Step
from embarcadero.types import EntryKind, LanePosition, Member, Order, Outcome, SessionKey, Topic, TopicLane
from embarcadero.wire import messages as m
from embarcadero.wire.codec import ACK, NO_ACK, PACKED_ACK, WANT_DURABLE, BatchHeader


@dataclass(frozen=True, slots=True)
class _Watch:
    """A subscriber that waits for new lanes of a topic."""

    peer: Peer
    request: int
    ask: m.GetLanes
    deadline_us: int


class ReaderBells:
    """Rings brokers where reads wait, including this one."""

    def __init__(self, fabric: Fabric, bell: Doorbell) -> None:
        self._fabric, self._bell = fabric, bell
        self._live: list[str] = []
        self._waiting_at: dict[str, FrontierReader] = {}  # by region prefix of a live broker: whether reads wait there

    def update(self, members: list[Member]) -> None:
        """Update the list of live brokers."""
        self._live = [member.region_prefix for member in members]
        for prefix in self._waiting_at.keys() - set(self._live):
            del self._waiting_at[prefix]

    def ring(self) -> None:
        """Ring brokers where a read waits."""
        for prefix in self._live:
            waiting = self._waiting_at.get(prefix)
            if waiting is None:
                if not self._fabric.exists(broker_frontiers_region(prefix)):
                    continue
                region = self._fabric.attach(broker_frontiers_region(prefix))
                waiting = FrontierReader(region, frontier_offset(BrokerLine.READS_WAITING))
                self._waiting_at[prefix] = waiting
            if waiting.load():
                self._bell.ring(prefix)


class LaneWatches:
    """Requests of subscribers for the lanes of a topic, including those that wait for new lanes."""

    def __init__(self, view: BrokerView) -> None:
        self._store, self._directory = view.store, view.context.directory
        self._watches: list[_Watch] = []

    def check(self, peer: Peer, ask: m.GetLanes) -> None:
        """Check the limits of waiting requests. Raises BadFrame, TooMany."""
        if ask.wait_ms > FETCH_WAIT_MS_MAX:
            raise BadFrame(f"wait_ms={ask.wait_ms} is above the maximum", f"wait at most {FETCH_WAIT_MS_MAX} ms")
        if peer.parked >= FETCHES_PARKED_PER_CONNECTION_MAX:
            raise TooMany(f"{peer.parked} requests of this connection wait, the maximum", "wait for an answer")

    def watch(self, peer: Peer, request: int, ask: m.GetLanes, now_us: int) -> None:
        """Answer with lanes above a number when there are any, or when the client's wait ends."""
        if found := self._above(ask):
            peer.answer(request, m.LanesAre(lane=ask.lane, lanes=found))
            return
        peer.parked += 1
        self._watches.append(_Watch(peer, request, ask, now_us + ask.wait_ms * 1000))

    def poll(self, now_us: int) -> bool:
        """Answer subscribers whose lanes appeared, or whose wait ended. Returns whether there were any."""
        waiting, self._watches = self._watches, []
        for watch in waiting:
            found = self._above(watch.ask)
            if found or now_us >= watch.deadline_us:
                watch.peer.parked -= 1
                watch.peer.answer(watch.request, m.LanesAre(lane=watch.ask.lane, lanes=found))
            else:
                self._watches.append(watch)
        return len(self._watches) != len(waiting)

    def next_deadline_us(self) -> int | None:
        """Return when the next subscriber gives up."""
        return min((watch.deadline_us for watch in self._watches), default=None)

    def fates(self, ask: m.GetLanes) -> m.LanesAre:
        """On a worker: list the lanes above a number from the store, and those whose last range may not be sealed.

        Ranges are read before the lanes: if a range is sealed, the store also has the record of its losses.
        """
        sealed = {lane.lane for lane in self._stored(ask) if self._directory.ranges.open_range(lane.lane) is None}
        lanes = self._stored(ask)
        return m.LanesAre(lane=ask.lane, lanes=lanes, unsure=[one.lane for one in lanes if one.lane not in sealed])

    def _stored(self, ask: m.GetLanes) -> list[TopicLane]:
        return [lane for lane in self._directory.lanes.all(ask.lane) if lane.lane > ask.above]

    def _above(self, ask: m.GetLanes) -> list[TopicLane]:
        return [lane for lane in self._store.broker_lanes.values() if lane.topic == ask.lane and lane.lane > ask.above]

    def disconnected(self, peer: Peer) -> None:
        """Drop the waiting requests of a closed connection."""
        self._watches = [watch for watch in self._watches if watch.peer is not peer]


class OwnLaneMaker:
    """Creates lanes of this broker, each when the first batch of its topic arrives."""

    def __init__(self, context: BrokerContext) -> None:
        self._context, self._clock = context, context.env.clock
        self._store_us = 0  # after a failure, the store is not asked for lanes until this time
        self._without_memory: dict[int, TopicLane] = {}  # own lanes that found no memory yet, by topic

    def keep(self, topics: AbstractSet[int]) -> None:
        """Forget lanes of other topics, which were removed."""
        for topic in self._without_memory.keys() - topics:
            del self._without_memory[topic]

    def make(self, topic: Topic, awaiting: AwaitingDurability) -> LaneWriter | None:
        """Create the own lane of a topic. None: not possible now.

        This store call stays on the broker's thread. A batch without ack is not sent again, so the broker must not
        refuse it while the lane is being created.
        """
        lane, began_us = self._without_memory.get(topic.lane), self._clock.now_us()
        if lane is None and began_us < self._store_us:
            return None
        try:
            if lane is None and (lane := self._context.directory.lanes.make(topic, self._context.member)) is None:
                return None
            self._without_memory[topic.lane] = lane
            self._context.env.steps.at(Step.LANE_MADE)
            awaiting_lane = awaiting.of(lane.lane) if topic.replicas else None
            writer = LaneWriter(self._context.fabric, lane, self._context.sizes, awaiting_lane)
        except LATER:
            self._store_us = rested_us(began_us, self._clock.now_us())
            return None
        except (FabricFull, BadValue):
            return None
        del self._without_memory[topic.lane]
        return writer


class _Unacked(NamedTuple):
    """Acks that wait until no sequencer counts this incarnation as closed."""

    peer: Peer
    acks: bytearray
    awaiting: AwaitingLane | None  # where they then wait for disks


class OwnLanes:
    """Lanes of orders 0 and 1 of one broker incarnation."""

    def __init__(self, view: BrokerView, ingest: Ingest, awaiting: AwaitingDurability) -> None:
        context = view.context
        self._view, self._clock, self._steps = view, context.env.clock, context.env.steps
        self._ingest, self._awaiting, self._margin = ingest, awaiting, lane_margin(context.sizes)
        self._bells, self._maker = ReaderBells(context.fabric, context.env.bell), OwnLaneMaker(context)
        self._writers: dict[int, LaneWriter] = {}  # by the topic's lane number
        self._staged: dict[LaneWriter, None] = {}  # lanes with entries from the current socket read
        self._staged_count = 0
        self._locations: list[int] = []  # payloads to release once their entries are written
        self._unacked: list[_Unacked] = []
        self.unacked = 0  # entries written since the incarnation was last known to be open
        self._unacked_since_us = 0
        self.taken = 0  # total of batches that got a position
        self._sessions = 0
        self.closed = False  # a sequencer closed this incarnation

    # --- changes in the store -----------------------------------------------------------------------------------------
    def update(self) -> None:
        """Handle a change of the store: release lanes of removed topics, and update the list of live brokers."""
        store = self._view.store
        for topic in self._writers.keys() - store.lanes.keys():
            writer = self._writers.pop(topic)
            self._view.context.fabric.remove(writer.lane.region)
            if writer.awaiting is not None:
                self._awaiting.forget(writer.lane.lane)
        self._maker.keep(store.lanes.keys())
        self._bells.update(store.live())

    def poll(self) -> bool:
        """Send acks that waited. Returns whether there were any."""
        return self._settle()

    def frontiers(self) -> dict[int, LanePosition]:
        """Return by topic's lane the next position of the own lane."""
        return {topic: LanePosition(writer.next, writer.next_seq) for topic, writer in self._writers.items()}

    # --- publishers ---------------------------------------------------------------------------------------------------
    def open_session(self, topic: Topic, ask: m.OpenSession) -> m.Opened:
        """Number a session of order 0 or 1. No other state of it is kept."""
        if ask.name or ask.at is not None:
            raise BadValue(
                f"topic {topic.name!r} has order {topic.order}, which has no named sessions",
                "omit session and session_at, or use order 2 or 5",
            )
        self._sessions += 1
        session = self._view.context.member.handle << 16 | self._sessions & 0xFFFF
        return m.Opened(lane=topic.lane, session=session, index=0, expected=0, low=0)

    def check(self, topic: Topic) -> Outcome | None:
        """Return the outcome that refuses a batch, or None to accept it. Creates the lane for the first batch."""
        if self.closed:
            return Outcome.BACKPRESSURE
        if (writer := self._writers.get(topic.lane)) is not None:
            crowded = writer.awaiting is not None and self._awaiting.crowded(writer.lane.lane)
            return Outcome.BACKPRESSURE if crowded else None
        if (made := self._maker.make(topic, self._awaiting)) is None:
            return Outcome.BACKPRESSURE
        self._writers[topic.lane] = made
        return None

    def take(self, peer: Peer, topic: Topic, header: BatchHeader, arrived: Reservation) -> bool:
        """Give a complete batch a position in the own lane, or refuse it (False)."""
        writer, wants_ack = self._writers.get(topic.lane), not header.flags & NO_ACK
        full = self.unacked + self._staged_count >= self._margin or (writer is not None and writer.full)
        out_of_turn = wants_ack and topic.order == Order.BROKER and not self._in_turn(peer, header)
        if writer is None or full or out_of_turn:
            self._ingest.abandon(arrived)
            peer.refuse(header, Outcome.UNKNOWN_TOPIC if writer is None else Outcome.BACKPRESSURE)
            return False
        if wants_ack and topic.order == Order.BROKER:
            key = SessionKey(header.lane, header.session)
            peer.turns[key] = max(peer.turns.get(key, 0), header.session_seq + 1)
        self._ingest.keep(arrived)
        writer.stage(header, arrived.location, self._clock.wall_us())
        self._staged[writer] = None
        self._staged_count += 1
        if writer.awaiting is None:
            self._locations.append(arrived.location)
        peer.lanes.add(writer.lane.lane)
        self.taken += 1
        return True

    @staticmethod
    def _in_turn(peer: Peer, header: BatchHeader) -> bool:
        """Order 1: return whether a batch is in turn. If it overtook an earlier one, it must be sent again."""
        turns = peer.turns
        if len(turns) > SESSIONS_PER_CONNECTION_MAX:
            del turns[next(iter(turns))]
        return header.session_seq <= turns.get(SessionKey(header.lane, header.session), header.low)

    def publish(self, peer: Peer) -> bool:
        """Write the batches of one socket read, then ack them if allowed. Returns whether any waits for disks."""
        if not self._staged:
            return False
        self._steps.at(Step.LANE_STAGED)
        acks: list[bytearray] = []
        for writer in self._staged:
            soon, later = writer.publish()
            acks.append(soon)
            if later:
                self._unacked.append(_Unacked(peer, later, writer.awaiting))
        self._steps.at(Step.LANE_PUBLISHED)
        with_replicas = [writer for writer in self._staged if writer.awaiting is not None]
        self._staged.clear()
        if not self.unacked:
            self._unacked_since_us = self._clock.now_us()
        self.unacked += self._staged_count
        self._staged_count = 0
        for location in self._locations:
            self._ingest.log.release(location)
        self._locations.clear()
        self._unacked.append(_Unacked(peer, acks[0] if len(acks) == 1 else bytearray().join(acks), None))
        self._settle()
        self._wake_replicas(with_replicas)
        self._bells.ring()
        return bool(with_replicas)

    def _settle(self) -> bool:
        """Send all waiting acks if no sequencer counts this incarnation as closed. Entries were flushed before."""
        if not self._unacked:
            return False
        if not self._view.epoch.still_open():
            self.closed |= self._view.epoch.closing()
            return False
        self._steps.at(Step.LANE_CHECKED)
        for one in self._unacked:
            if one.awaiting is not None:
                self._view.durable.chain(one.awaiting.lane)  # may raise: call it before taking the acks out
        self._view.context.counters.ordered_here(self.unacked, self._clock.now_us() - self._unacked_since_us)
        settled, self._unacked, self.unacked = self._unacked, [], 0
        for peer, acks, awaiting in settled:
            if awaiting is not None:
                awaiting.hold(peer, np.frombuffer(acks, dtype=ACK))
            elif acks:
                peer.send_acks(np.frombuffer(acks, dtype=ACK))
        return True

    def _wake_replicas(self, writers: list[LaneWriter]) -> None:
        """Ring the replicas of the written lanes."""
        for writer in writers:
            for ref in self._view.durable.chain(writer.lane.lane).replicas:
                self._view.context.env.bell.ring(ref.region_prefix)


_ENTRY = struct.Struct("<QQQQIIIIIHHHBBI")
_BATCH, _ORDERED = int(EntryKind.BATCH), int(Outcome.ORDERED)
invariant(_ENTRY.size == ORDER.itemsize, "the packed entry matches the table's entry")


class LaneWriter:
    """Writes one lane. The ring's old slots are reused: retention is bounded by the ring and the log.

    In a topic with replicas (`awaiting`), a slot is reused only after its entry is durable.
    """

    def __init__(
        self, fabric: Fabric, lane: TopicLane, sizes: FabricSizes, awaiting: AwaitingLane | None = None
    ) -> None:
        self.lane, self.awaiting = lane, awaiting
        self._not_durable_max = lane_slots(sizes) - lane_margin(sizes)
        self._ring = create_ring(
            fabric, lane.region, RegionKind.ORDER, ORDER, lane_slots(sizes), "index", lane.broker, lane.incarnation
        )
        self.next_seq = 0
        self._append_us = 0
        self._staged = bytearray()
        self._acks = bytearray()
        self._durable_acks = bytearray()  # acks that also wait for disks

    @property
    def full(self) -> bool:
        """Whether there is no slot for another entry because the oldest ones are not durable yet."""
        return self.awaiting is not None and self.next - self.awaiting.through >= self._not_durable_max

    @property
    def next(self) -> int:
        """Index of the next batch."""
        return self._ring.next + len(self._staged) // ORDER.itemsize

    def stage(self, header: BatchHeader, location: int, wall_us: int) -> None:
        """Give a batch its position. In a topic with replicas, its payload is kept until it is durable."""
        lane, index, seq = self.lane, self.next, self.next_seq
        self._append_us = max(self._append_us, wall_us)
        self._staged += _ENTRY.pack(
            index, seq, header.session_seq, self._append_us, header.session, location, header.length, header.count,
            header.crc, lane.handle, header.partition, header.schema, _BATCH, 0, 0,
        )  # fmt: skip
        self.next_seq += header.count
        if self.awaiting is not None:
            self.awaiting.keep(index, location)
        if not header.flags & NO_ACK:
            session, sequence = header.session, header.session_seq
            acks = self._acks if self.awaiting is None or not header.flags & WANT_DURABLE else self._durable_acks
            acks += PACKED_ACK.pack(lane.topic, session, sequence, index, seq, lane.lane, _ORDERED)

    def publish(self) -> tuple[bytearray, bytearray]:
        """Write all staged entries, flush, then move the frontier.

        Returns their acks, which must not leave yet, and separately the acks that also wait for disks.
        """
        entries = np.frombuffer(self._staged, dtype=ORDER)
        stop = self._ring.next + len(entries)
        self._ring.write(entries, stop - self._ring.slots)
        self._ring.publish()
        acks, self._acks, self._staged = self._acks, bytearray(), bytearray()
        durable_acks, self._durable_acks = self._durable_acks, bytearray()
        return acks, durable_acks
