"""Lanes of brokers, as sequencers see them: where those of a dead one end, and their ranges. Topics of orders 0
and 1 are written by brokers; sequencers only close their lanes, and look after their replicas.

The incarnation was told that it is closing, flushed and fenced, before its lanes are read. What it acks afterwards it
acks only after looking, so everything acked is in the valid contiguous entries that we find. The ends go to the store
and are never computed again; an incarnation that wakes up later may write on, but nobody reads above the ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import attach_ring
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.ranges import RangeKeeper
from embarcadero.sequencer.recovery import Recovery
from embarcadero.steps import Step
from embarcadero.types import Member, Topic, TopicLane


def close_lanes(
    fabric: Fabric, directory: Directory, member: Member, epoch: int, steps: Steps = NO_STEPS
) -> tuple[bool, list[str]]:
    """Record where the lanes of a closing incarnation end; and what is wrong with them, for the log.

    False: a later sequencer has to do it.
    """
    whose, problems = (member.broker, member.incarnation), list[str]()
    open_ = [lane for lane in directory.lanes() if lane.open and (lane.broker, lane.incarnation) == whose]
    ends = [_closed(fabric, lane, problems) for lane in open_]
    if not ends:
        return True, problems
    steps.at(Step.CLOSING_LANES_READ)
    told = directory.close_lanes(ends, epoch)
    steps.at(Step.CLOSING_LANES_TOLD)
    return told, problems


def _closed(fabric: Fabric, lane: TopicLane, problems: list[str]) -> TopicLane:
    end = end_seq = 0
    if fabric.exists(lane.region):
        ring = attach_ring(fabric, lane.region, ORDER)
        published = ring.frontier.load()
        end = ring.valid_end(published)
        last = ring.read(max(0, end - 1), end)
        end_seq = int(last["seq"][0]) + int(last["count"][0]) if len(last) else 0
        start = max(0, end - ring.slots // 2)
        if (valid := start + len(ring.read(start, end))) < end:
            problems.append(f"{lane.region}: entry {valid} is below the frontier {published} and not valid")
    return msgspec.structs.replace(lane, end=end, end_seq=end_seq)


class BrokerRanges:
    """Sees to it that every lane of a broker with an open range is looked after, or recovered."""

    def __init__(self, fabric: Fabric, directory: Directory, keeper: RangeKeeper, recovery: Recovery) -> None:
        self._fabric, self._directory, self._keeper, self._recovery = fabric, directory, keeper, recovery
        self._over: set[int] = set()  # lanes whose last range is sealed

    def update(self, topics: Mapping[int, Topic], members: Sequence[Member], now_us: int) -> None:
        """Take note of what the store has."""
        mine = {number: topic for number, topic in topics.items() if topic.replicas and topic.order in (0, 1)}
        lanes = {lane.lane: lane for lane in self._directory.lanes() if lane.topic in mine} if mine else {}
        ours = [number for number, kept in self._keeper.kept.items() if kept.broker_lane is not None]
        for number in ours:
            if number not in lanes:
                self._keeper.drop(number)
        for number in [number for number in self._recovery.lanes if number not in lanes and number not in topics]:
            self._recovery.drop(number)
        self._keeper.keep_only(topics.keys() | lanes.keys())
        self._over &= lanes.keys()
        here = {(member.broker, member.incarnation) for member in members}
        for number, lane in lanes.items():
            topic = mine[lane.topic]
            if number in self._keeper.kept:
                self._keeper.follow(number, topic, lane)
            elif number not in self._over and number not in self._recovery.lanes:
                self._begin(lane, topic, (lane.broker, lane.incarnation) in here, now_us)

    def _begin(self, lane: TopicLane, topic: Topic, here: bool, now_us: int) -> None:
        range_ = self._directory.open_range(lane.lane)
        if range_ is None:
            self._over.add(lane.lane)
        elif here or self._fabric.exists(lane.region):
            self._keeper.keep(range_, topic, broker_lane=lane)
        else:
            self._recovery.add(topic, self._directory.ranges(lane.lane), lane, now_us)
