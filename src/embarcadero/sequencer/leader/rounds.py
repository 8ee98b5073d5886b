"""Rounds: what brokers published is taken, ordered lane by lane, and answered.

Each round takes published entries of all brokers, orders them lane by lane, and writes, in this order: order entries,
answers, frontiers, waiting batches, read-through marks; then it clears the slots of batches that wait no longer. Each
kind is flushed before the next is written, so at any crash a successor finds every entry in one of these places.
A round begins with the question whether a later epoch is open; if so, this leadership is over.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from embarcadero.fabric.layout import Entries, every, join, pick
from embarcadero.sequencer.leader.brokers import BrokerIncarnations, PendingSource, take_plain
from embarcadero.sequencer.leader.lanes import LeaderLanes
from embarcadero.sequencer.leader.leadership import Leadership
from embarcadero.sequencer.leader.upkeep import Upkeep
from embarcadero.sequencer.order.batches import is_batch, result_line
from embarcadero.sequencer.order.lane import Lane
from embarcadero.sequencer.order.sessions import NEVER
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, Outcome

_LOOK_US: Final = 2_000
"""Looking whether the store has changed is cheap, but not as cheap as an empty round."""
_LOOK_LONE_US: Final = 10_000
"""While batches come one by one, a publisher waits for each, and for the processor that we would use."""


class Rounds:
    """Does rounds, one after another."""

    def __init__(self, leader: Leadership, lanes: LeaderLanes, brokers: BrokerIncarnations, upkeep: Upkeep) -> None:
        self._leader, self._lanes, self._brokers, self._upkeep = leader, lanes, brokers, upkeep
        self._steps, self._bell = leader.env.steps, leader.env.bell
        self._buffer, self._refused = lanes.buffer, lanes.refused
        self.more = False  # the last round left published entries behind, for the next one
        self.depth = 0  # how many batches every publisher heard in the last round had in flight, at least
        self._look_us = 0  # when to look into the store next

    def next(self) -> int:
        """One pass over all rings. Returns how much there was to do: 0 when idle."""
        leader, upkeep = self._leader, self._upkeep
        leader.tick()
        offers = self._offers()
        lone = len(offers) == 1 and offers[0][1] == 1 and self._one_batch(offers[0][0])
        if leader.now_us >= self._look_us + (_LOOK_LONE_US if lone else 0):
            self._look_us = leader.now_us + _LOOK_US
            leader.ask_store(upkeep.refresh)
            offers = self._offers() if not lone else []
        upkeep.beat()
        leader.ask_store(upkeep.look_after_ranges)
        if lone:
            return 1
        entries = self._take(offers)
        if entries is not None:
            self._steps.at(Step.ROUND_TAKEN)
            self.depth = _depth(entries)
            self._decide(entries)
        lanes = self._lanes.by_number.values()
        work = sum(lane.expire(leader.now_us, leader.wall_us) for lane in lanes)
        work += len(entries) if entries is not None else 0
        self._lanes.release_backlog()
        self._write()
        upkeep.finish_closing()
        self._count(len(entries) if entries is not None else 0)
        return work

    def behind(self) -> bool:
        """Whether more was published since the round began."""
        return any(source.offer(1, 0) for source in self._brokers.sources.values())

    def next_deadline_us(self) -> int | None:
        """When time will have something to do, at the earliest; None when it has not."""
        due = min((lane.due_us for lane in self._lanes.by_number.values()), default=NEVER)
        return None if due == NEVER else due

    def _is_due(self) -> bool:
        """Whether time has something to do."""
        due = self.next_deadline_us()
        return due is not None and due <= self._leader.now_us

    def _count(self, entries: int) -> None:
        counters = self._leader.counters
        if entries:
            counters.entries += entries
            counters.round_entries.add(entries)
            counters.round_us.add(self._leader.env.clock.now_us() - self._leader.now_us)
        counters.rounds += 1

    # --- taking -------------------------------------------------------------------------------------------------------
    def _offers(self) -> list[tuple[PendingSource, int]]:
        """How many entries to take of which brokers, each round beginning with another one."""
        room, offers = self._leader.sizes.round_entries, []
        for source in self._brokers.in_turn(self._leader.counters.rounds):
            if count := source.offer(room, int(self._buffer.by_origin[source.member.handle])):
                offers.append((source, count))
                room -= count
        self.more = room <= 0
        return offers

    def _take(self, offers: list[tuple[PendingSource, int]]) -> Entries | None:
        """The entries that were offered."""
        backlog = self._lanes.backlog
        parts = [pick(self._buffer.entries, backlog)] if len(backlog) else []
        requests = self._leader.settings.controls_per_round
        if offers and (plain := take_plain(offers)) is not None:
            return join([*parts, plain]) if parts else plain
        for source, count in offers:
            entries, whole = source.take(count, requests)
            if not whole:
                self._leader.problems.append(
                    f"{source.member.region_prefix}: pending entry {source.next} is not valid; closed"
                )
                source.close(whole=False)
            if len(entries):
                parts.append(entries)
                requests -= source.requests
        self.more |= requests <= 0
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else join(parts)

    # --- deciding -----------------------------------------------------------------------------------------------------
    def _one_batch(self, source: PendingSource) -> bool:
        """A whole round for one batch, if it is as common as can be. The order of stores is that of every round."""
        line, handle = source.line(), source.member.handle
        lane = self._lanes.by_number.get(line[3] & 0xFFFF_FFFF)
        if lane is None or len(self._lanes.backlog) or not (source.plain and is_batch(line, source.next)):
            return False
        if self._is_due():
            return False
        self._steps.at(Step.ROUND_TAKEN)
        place = lane.decide_one(line, handle, self._leader.now_us, self._leader.wall_us)
        if place is None:
            return False
        self._steps.at(Step.ROUND_ENTRIES)
        self.depth = line[1] - line[2]
        source.next, source.requests = source.next + 1, 0
        source.answer_line(result_line(line, *place))
        self._steps.at(Step.ROUND_RESULTS)
        lane.publish()
        source.publish()
        self._steps.at(Step.ROUND_FRONTIERS)
        source.give_free()
        self._steps.at(Step.ROUND_READ_THROUGH)
        if lane.room is not None:
            self._lanes.ranges.grew(lane.order.topic.lane)
        for who in lane.first_bells:
            self._bell.ring(who)
        # An ack that waits for one disk finds its broker prepared; for several, they need the processors more.
        rings = not line[7] & 0xFF or len(lane.first_bells) <= 1
        self._brokers.wake([source] if rings else [], grown=True)
        self._upkeep.finish_closing()
        self._count(1)
        return True

    def _decide(self, entries: Entries) -> None:
        lanes = entries["lane"]
        if every(lanes == lanes[0]):
            self._decide_lane(int(lanes[0]), entries)
            return
        keys = lanes.astype(np.int64) << 32 | np.arange(len(entries))
        keys.sort()
        for run in np.split(keys, np.flatnonzero(np.diff(keys >> 32)) + 1):
            self._decide_lane(int(run[0] >> 32), pick(entries, run & 0xFFFF_FFFF))

    def _decide_lane(self, number: int, entries: Entries) -> None:
        leader, lanes = self._leader, self._lanes
        if number not in lanes.by_number:
            leader.ask_store(self._upkeep.meet_new_topic)
        lane = lanes.by_number.get(number)
        if lane is None:
            waits = leader.store_is_failing or number in lanes.roomless or number in lanes.recovery.lanes
            self._refused.answer_all(entries, Outcome.BACKPRESSURE if waits else Outcome.UNKNOWN_TOPIC)
        else:
            lane.decide(entries, leader.now_us, leader.wall_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _write(self) -> None:
        lanes = self._lanes.by_number.values()
        written = [lane for lane in lanes if lane.write()]
        if written:
            self._steps.at(Step.ROUND_ENTRIES)
        answers = self._refused.take_answers()
        for lane in lanes:
            answers += lane.order.out.take_answers()
        answered = self._brokers.answer(answers)
        if answered:
            self._steps.at(Step.ROUND_RESULTS)
        for lane in written:
            lane.publish()
        for source in answered:
            source.publish()
        if answered or written:
            self._steps.at(Step.ROUND_FRONTIERS)
        freed = self._lanes.write_buffer()
        for source in self._brokers.sources.values():
            source.give_free()
        if answered or len(freed):
            self._steps.at(Step.ROUND_READ_THROUGH)
        self._lanes.clear_slots(freed)
        self._ring_replicas(written)
        self._brokers.wake(answered, bool(written))

    def _ring_replicas(self, lanes: list[Lane]) -> None:
        """Wake the replicas of lanes that got entries."""
        for lane in lanes:
            if lane.room is not None:
                self._lanes.ranges.grew(lane.order.topic.lane)
        for who in dict.fromkeys(who for lane in lanes for who in lane.bells):  # in one order, whatever hashes are
            self._bell.ring(who)


def _depth(entries: Entries) -> int:
    """How many batches each of these publishers has in flight, at least; 0 if a request waits for its answer."""
    if (entries["kind"] != BATCH_KIND).any():
        return 0
    return int((entries["session_seq"] - entries["low"]).min())
