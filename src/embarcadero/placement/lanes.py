"""Lanes of brokers in the directory: topics of orders 0 and 1 have one for each broker incarnation."""

from __future__ import annotations

import msgspec

from embarcadero.errors import Backpressure
from embarcadero.limits import BROKER_LANES_KEPT_MAX
from embarcadero.placement.decisions import Plan
from embarcadero.placement.ranges import Ranges
from embarcadero.placement.records import lane_key, member_key, tier_key
from embarcadero.types import Member, MemberState, ReplicaRef, Tier, Topic, TopicLane


class BrokerLanes(Ranges):
    """The directory's part about lanes of brokers."""

    def make_lane(self, topic: Topic, member: Member) -> TopicLane | None:
        """Number a lane for a live incarnation's batches of a topic; None when the topic or the incarnation is gone.

        A topic with replicas has its first range too, on fewer of them if need be, but never fewer than `durable_on`:
        then Backpressure.
        """

        def plan_it(plan: Plan) -> TopicLane | None:
            cluster = self._counters(plan)
            found, owner = (
                plan.read(f"topics/{topic.name}", Topic),
                plan.read(member_key(member.broker, member.incarnation), Member),
            )
            if found is None or found.lane != topic.lane or owner is None or owner.state is not MemberState.LIVE:
                return None
            tier = plan.read(tier_key(topic.name), Tier)
            in_table = frozenset() if tier is None else tier.frontiers.keys()
            lanes = plan.list(f"lanes/{topic.lane:05}/", TopicLane)
            gone = [(key, old) for key, old in lanes if old.removed and old.lane not in in_table]
            for key, old in gone[:-BROKER_LANES_KEPT_MAX]:
                plan.delete(key)
                self._forget_lane(plan, old.lane)
            lane = TopicLane(
                lane=cluster.next_broker_lane, topic=topic.lane, broker=member.broker,
                incarnation=member.incarnation, handle=member.handle,
            )  # fmt: skip
            plan.put("cluster", msgspec.structs.replace(cluster, next_broker_lane=lane.lane + 1))
            plan.put(lane_key(lane), lane)
            if found.replicas:
                self._first_range(plan, found, lane.lane, self._enough(plan, found))
            return lane

        return self._decide(plan_it)

    def lanes(self, topic: int | None = None) -> list[TopicLane]:
        """Lanes of brokers, oldest first within a topic; `topic`: of the topic with this lane number only."""
        prefix = "lanes/" if topic is None else f"lanes/{topic:05}/"
        return self._all(prefix, TopicLane)

    def close_lanes(self, ends: list[TopicLane], epoch: int) -> bool:
        """Record where lanes of a dead incarnation end. Ends that are recorded stay.

        Only the sequencer of the newest epoch may: once a later one is handed out, False, and nothing changes.
        """

        def plan_it(plan: Plan) -> bool:
            if not self._reigns(plan, epoch):
                return False
            for lane in ends:
                found = plan.read(lane_key(lane), TopicLane)
                if found is not None and found.open:
                    plan.put(lane_key(lane), lane)
            return True

        return self._decide(plan_it)

    def _enough(self, plan: Plan, topic: Topic) -> list[ReplicaRef]:
        chosen = self._pick(plan, topic.replicas)
        if len(chosen) < topic.durable_on:
            raise Backpressure(
                f"topic {topic.name!r} needs {topic.durable_on} live replicas, and there are {len(chosen)}",
                "start replicas; the batch is taken then",
            )
        return chosen
