"""The sequencer: one reign over all lanes.

Each round takes published entries of all brokers, orders them lane by lane, and writes, in this order: order entries,
answers, frontiers, waiting batches, read-through marks; then it clears the slots of batches that wait no longer. Each
kind is flushed before the next is written, so at any crash a successor finds every entry in one of these places.
A round begins with the question whether a later epoch is open; if so, this reign is over.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import Clock, Doorbell
from embarcadero.errors import BadRegion
from embarcadero.fabric.epochs import EPOCHS_REGION, EpochTable
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.layout import (
    SEQUENCER_FRONTIERS_BYTES,
    Entries,
    RegionKind,
    SequencerLine,
    frontier_offset,
    join,
    pick,
)
from embarcadero.fabric.region import Fabric, Shape
from embarcadero.limits import CONTROLS_PER_ROUND_MAX, HEARTBEAT_S
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.brokers import Brokers
from embarcadero.sequencer.control import detach_broker, fence
from embarcadero.sequencer.decisions import Decisions
from embarcadero.sequencer.held import HeldSlots, Slots, create_held
from embarcadero.sequencer.lane import Lane
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.sessions import NEVER, SessionTable
from embarcadero.sequencer.sources import Source
from embarcadero.sequencer.takeover import Legacy, readmit
from embarcadero.types import Order, Outcome, Topic

_LOOK_US: Final = 2_000
"""Looking whether the store has changed is cheap, but not as cheap as an empty round."""


class Sequencer:
    """The sequencer of one epoch. `deposed` is set when a later one has begun."""

    def __init__(self, fabric: Fabric, directory: Directory, clock: Clock, bell: Doorbell, sizes: FabricSizes) -> None:
        self._fabric, self._directory, self._clock, self._bell, self._sizes = fabric, directory, clock, bell, sizes
        self.deposed = False
        self.more = False  # the last round left published entries behind, for the next one
        self.problems: list[str] = []
        self.lanes: dict[int, Lane] = {}
        self._epochs = EpochTable(fabric, fabric.attach(EPOCHS_REGION, writable=True))
        last = directory.started_epoch()
        self.epoch = directory.next_epoch(last if self._epochs.superseded(last) else None)
        self._epochs.open(self.epoch)
        earlier = directory.started_epoch()
        self._frontiers = fabric.create(
            f"epoch-{self.epoch}/frontiers", Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self._heartbeat = FrontierWriter(self._frontiers, frontier_offset(SequencerLine.HEARTBEAT))
        self._beat_us = 0
        self._now_us, self._wall_us = clock.now_us(), clock.wall_us()
        self._refused = Decisions()
        self._backlog: Slots = np.empty(0, dtype=np.int64)
        self._revision = -1
        self._look_us = 0  # when to look into the store next
        self.brokers = Brokers(fabric, self.epoch, sizes, self._frontiers, directory)
        try:
            self._begin(earlier)
        except BadRegion:
            if not self._epochs.superseded(self.epoch):
                raise
            self.deposed = True  # our predecessor's regions are gone because others went past us

    # --- beginning ----------------------------------------------------------------------------------------------------
    def _begin(self, earlier: int) -> None:
        members = self._directory.members()
        legacy = Legacy(self._fabric, earlier, members) if earlier else None
        slots = min(self._sizes.held_slots, self._sizes.order_slots - 2 * self._sizes.round_entries)
        slots = max(slots, len(legacy.waiting) if legacy else 0)
        self._held, self._held_region = HeldSlots(slots), create_held(self._fabric, f"epoch-{self.epoch}/held", slots)
        for topic in self._directory.topics():
            self._make_lane(topic, legacy)
        if legacy:
            orders = {number: lane.order for number, lane in self.lanes.items()}
            self._backlog = readmit(orders, self._held, legacy.waiting, self._now_us)
            self._write_held()
        self.brokers.update(members, legacy.brokers if legacy else {})
        ends = {number: lane.order.next_index for number, lane in self.lanes.items()}
        if not self._directory.start_epoch(self.epoch, ends):
            self.deposed = True
            return
        self._epochs.start(self.epoch)
        self._sweep(earlier)
        self._ring_bells(list(self.brokers.sources.values()), grown=True)

    def _make_lane(self, topic: Topic, legacy: Legacy | None = None) -> None:
        if topic.order not in (Order.TOTAL, Order.STRONG):
            return
        inherited = legacy.lane(topic, self._sizes, self._held, self._now_us) if legacy else None
        if inherited is None:
            order, entries = LaneOrder(topic, SessionTable(self._sizes.sessions), self._held), None
        else:
            order, entries = inherited
        order.make_room = self._make_room
        lane = self.lanes[topic.lane] = Lane(self._fabric, self.epoch, order, self._sizes, self._frontiers)
        if entries is not None:
            lane.inherit(entries, self._now_us)

    def _sweep(self, earlier: int) -> None:
        """Remove what epochs before our predecessor and unknown broker incarnations left behind."""
        names = self._fabric.names()
        prefixes = {member.region_prefix for member in self._directory.members()}
        for name in names:
            owner = name.split("/")[0]
            number = owner.removeprefix("epoch-")
            old = (
                owner.startswith("epoch-") and number.isdigit() and int(number) < self.epoch and int(number) != earlier
            )
            if old or (owner.startswith("broker-") and owner not in prefixes):
                self._fabric.remove(name)

    # --- the round ----------------------------------------------------------------------------------------------------
    def round(self) -> int:
        """One pass over all rings. Returns how much there was to do: 0 when idle."""
        if self.deposed or self._epochs.superseded(self.epoch):
            self.deposed = True
            return 0
        try:
            return self._round()
        except BadRegion:
            if not self._epochs.superseded(self.epoch):
                raise
            self.deposed = True  # regions that we read are gone because a successor needs them no more
            return 0

    def _round(self) -> int:
        self._now_us, self._wall_us = self._clock.now_us(), self._clock.wall_us()
        if self._now_us >= self._look_us:
            self._look_us = self._now_us + _LOOK_US
            self._refresh()
        self._beat()
        entries = self._take()
        if entries is not None:
            self._decide(entries)
        work = sum(lane.expire(self._now_us, self._wall_us) for lane in self.lanes.values())
        work += len(entries) if entries is not None else 0
        if len(self._backlog):
            self._held.release(self._backlog)
            self._backlog = self._backlog[:0]
        self._write()
        self._finish_closing()
        return work

    def next_deadline_us(self) -> int | None:
        """When time will have something to do, at the earliest; None when it has not."""
        due = min((min(lane.order.due_us, lane.order.idle_due_us) for lane in self.lanes.values()), default=NEVER)
        return None if due == NEVER else due

    def _refresh(self) -> None:
        """Learn of topics and brokers that came or went."""
        revision = self._directory.revision()
        if revision == self._revision and not self.brokers.awaited:
            return
        if revision != self._revision:
            self._revision = revision
            topics = {topic.lane: topic for topic in self._directory.topics()}
            for number in self.lanes.keys() - topics.keys():
                self._drop_lane(number)
            for number in topics.keys() - self.lanes.keys():
                self._make_lane(topics[number])
            self.brokers.members = self._directory.members()
        self.brokers.update(self.brokers.members, {})
        while self.brokers.problems:
            self.problems.append(self.brokers.problems.pop())

    def _drop_lane(self, number: int) -> None:
        lane = self.lanes.pop(number)
        slots = self._held.of_lane(number)
        self._refused.answers += lane.order.out.take_answers()
        self._refused.answer_all(pick(self._held.entries, slots), Outcome.UNKNOWN_TOPIC)
        self._held.release(slots)
        for name in lane.regions:
            self._fabric.remove(name)

    def _beat(self) -> None:
        if self._now_us >= self._beat_us:
            self._beat_us = self._now_us + int(HEARTBEAT_S * 1_000_000)
            self._heartbeat.advance(self._heartbeat.value + 1)

    def _take(self) -> Entries | None:
        """Published entries of all brokers, each round beginning with another one."""
        parts = [pick(self._held.entries, self._backlog)] if len(self._backlog) else []
        room, requests = self._sizes.round_entries, CONTROLS_PER_ROUND_MAX
        for source in self.brokers.in_turn():
            unresolved = int(self._held.by_origin[source.member.handle])
            entries, whole = source.take(room, requests, unresolved)
            if not whole:
                self.problems.append(f"{source.member.region_prefix}: pending entry {source.next} is not valid; closed")
                source.close(whole=False)
            if len(entries):
                parts.append(entries)
                room -= len(entries)
                requests -= source.requests
        self.more = room <= 0 or requests <= 0
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else join(parts)

    def _decide(self, entries: Entries) -> None:
        lanes = entries["lane"]
        if (lanes == lanes[0]).all():
            self._decide_lane(int(lanes[0]), entries)
            return
        keys = lanes.astype(np.int64) << 32 | np.arange(len(entries))
        keys.sort()
        for run in np.split(keys, np.flatnonzero(np.diff(keys >> 32)) + 1):
            self._decide_lane(int(run[0] >> 32), pick(entries, run & 0xFFFF_FFFF))

    def _decide_lane(self, number: int, entries: Entries) -> None:
        if number not in self.lanes:
            self._refresh()
        lane = self.lanes.get(number)
        if lane is None:
            self._refused.answer_all(entries, Outcome.UNKNOWN_TOPIC)
        else:
            lane.decide(entries, self._now_us, self._wall_us)

    def _make_room(self, count: int) -> None:
        """Fence the sessions with the oldest gaps, of any lane, until so many held slots are free."""
        while self._held.free < count:
            waiting = [lane.order for lane in self.lanes.values() if lane.order.table.waiting]
            if not waiting:
                return
            oldest = min(waiting, key=lambda order: int(order.table.gap_us.min()))
            fence(oldest, int(oldest.table.gap_us.argmin()), self._now_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        written = [lane for lane in self.lanes.values() if lane.write()]
        answers = self._refused.take_answers()
        for lane in self.lanes.values():
            answers += lane.order.out.take_answers()
        answered = self.brokers.answer(answers)
        for lane in written:
            lane.publish()
        for source in answered:
            source.publish()
        freed = self._write_held()
        for source in self.brokers.sources.values():
            source.give_free()
        self._held_region.zero(freed)
        self._ring_bells(answered, bool(written))

    def _write_held(self) -> Slots:
        """Copy new waiting batches to the fabric. Returns the slots that are to be cleared."""
        taken, freed = self._held.take_dirty()
        if len(taken):
            self._held_region.write(taken, pick(self._held.entries, taken))
        return freed

    def _ring_bells(self, answered: list[Source], grown: bool) -> None:
        """Wake brokers that have answers to relay, or readers to serve."""
        for source in self.brokers.sources.values():
            if source in answered or (grown and source.readers_wait()):
                self._bell.ring(source.member.region_prefix)

    def _finish_closing(self) -> None:
        for source in self.brokers.take_drained():
            for lane in self.lanes.values():
                detach_broker(lane.order, source.member.handle, self._now_us)
        self.brokers.bury(self._held.by_origin)
