"""Tiers in the directory: the table of a topic, its frontiers, and the job that may advance them.

One job at a time writes a table. It holds a lease, and its epoch is a condition of every change. So a job that was
paused while a successor took over changes nothing here. The lease does not ensure that the table has each row once. The
table itself does: a commit succeeds only on top of the frontiers from which it was planned.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from embarcadero.config.secrets import public_properties
from embarcadero.errors import BadValue, Deposed, TierBusy, UnknownTopic
from embarcadero.limits import (
    HOT_RETENTION_S,
    RETENTION_S_MAX,
    TIER_HOLES_MAX,
    TIER_LANES_MAX,
    TIER_LEASE_S,
    TIER_TEXT_BYTES_MAX,
)
from embarcadero.placement.records import (
    Decider,
    DecisionPlan,
    Tierer,
    check_id,
    decode,
    ranges_prefix,
    tier_key,
    tierer_key,
)
from embarcadero.types import FIRST_POSITION, Hole, LanePosition, Range, Tier, Topic, TopicLane
from embarcadero.wire.messages import AdvanceTier, OpenTier


class Tiers:
    """Tables of topics."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def get(self, topic: str) -> Tier | None:
        """Read the record of a topic's table; None while it has none."""
        return self._decider.one(tier_key(topic), Tier)

    def all(self) -> dict[str, Tier]:
        """All tables, by topic."""
        found = self._decider.store.list("tiers/")
        return {item.key.removeprefix("tiers/"): decode(item.key, item.value, Tier) for item in found}

    def open(self, ask: OpenTier) -> Tier:
        """Begin an epoch of writing a topic's table. Raises TierBusy while another holder lives, without `take_over`.

        The same holder may open it again: its earlier epoch ends. A topic that has a table keeps it, even if the
        request names another one.
        """
        for text in (ask.holder, ask.id, ask.warehouse, ask.table, ask.engine):
            _check_text(text)
        lease = self._decider.store.grant(TIER_LEASE_S)

        def plan_it(plan: DecisionPlan) -> tuple[Tier, int]:
            topic = _tiered_topic(plan, ask.topic, ask.topic_id)
            known = plan.read(tier_key(ask.topic), Tier)
            busy = plan.read(tierer_key(ask.topic), Tierer)
            if busy is not None and busy.holder != ask.holder and not ask.take_over:
                raise TierBusy(
                    f"job {busy.holder!r} tiers topic {ask.topic!r}",
                    f"stop that job, wait until it has been silent for {TIER_LEASE_S:g} s, or take over",
                )
            before = known or _new(ask)
            kept_s = before.hot_retention_s if ask.hot_retention_s is None else ask.hot_retention_s
            opened = msgspec.structs.replace(
                before,
                epoch=before.epoch + 1,
                holder=ask.holder,
                lease=lease,
                topic_id=topic.id,
                hot_retention_s=checked_hot_retention(kept_s),
                properties=public_properties(ask.properties) or before.properties,
                engine=ask.engine,
            )
            plan.put(tier_key(ask.topic), opened)
            plan.put(tierer_key(ask.topic), Tierer(ask.holder, opened.epoch), lease)
            return opened, before.lease

        opened, ended = self._decider.decide(plan_it)
        if ended:
            self._decider.store.revoke(ended)
        return opened

    def advance(self, ask: AdvanceTier, now_us: int) -> Tier:
        """Advance the frontiers of a table. Frontiers never go back; a lane's start is stored only the first time.

        Raises Deposed if the epoch is not the newest. A lease that ended while no other job came is renewed.
        """
        _check_text(ask.metadata)
        _check_text(ask.engine)
        renewed = self.keep_alive(ask.topic, ask.epoch, ask.topic_id)
        lease = 0 if renewed else self._decider.store.grant(TIER_LEASE_S)

        def plan_it(plan: DecisionPlan) -> Tier:
            topic = _tiered_topic(plan, ask.topic, ask.topic_id)
            tier = _mine(plan, ask.topic, ask.epoch)
            frontiers, starts, holes = dict(tier.frontiers), dict(tier.starts), dict(tier.holes)
            for lane, position in ask.frontiers.items():
                _check_lane(plan, topic, tier, lane)
                frontiers[lane] = max(frontiers.get(lane, FIRST_POSITION), position)
                starts.setdefault(lane, ask.starts.get(lane, FIRST_POSITION))
                holes[lane] = _holes(plan, tier, lane, starts[lane], frontiers[lane])
            if len(frontiers) > TIER_LANES_MAX:
                raise BadValue(
                    f"the table of {ask.topic!r} has {len(frontiers)} lanes, and may have {TIER_LANES_MAX}",
                    "create another topic",
                )
            advanced = msgspec.structs.replace(
                tier,
                metadata=ask.metadata or tier.metadata,
                frontiers=frontiers,
                starts=starts,
                advanced_us=now_us,
                lease=lease or tier.lease,
                engine=ask.engine or tier.engine,
                holes={lane: each for lane, each in holes.items() if each},
            )
            plan.put(tier_key(ask.topic), advanced)
            if lease:
                plan.put(tierer_key(ask.topic), Tierer(tier.holder, tier.epoch), lease)
            return advanced

        return self._decider.decide(plan_it)

    def keep_alive(self, topic: str, epoch: int, topic_id: int = 0) -> bool:
        """Keep the lease of an epoch alive. False when the lease or the epoch has ended, or the topic was replaced."""
        tier = self._tier_of(topic, epoch, topic_id)
        return tier is not None and self._decider.store.keep_alive(tier.lease)

    def close(self, topic: str, epoch: int, topic_id: int = 0) -> None:
        """End the lease of an epoch, so that another job may begin immediately. An epoch that is over has no lease."""
        if (tier := self._tier_of(topic, epoch, topic_id)) is not None:
            self._decider.store.revoke(tier.lease)

    def _tier_of(self, topic: str, epoch: int, topic_id: int) -> Tier | None:
        """The table's record, if this epoch of this topic is the newest. Epochs of a new topic start again at 1."""
        tier = self.get(topic)
        mine = tier is not None and tier.epoch == epoch and topic_id in (0, tier.topic_id)
        return tier if mine else None


def _mine(plan: DecisionPlan, topic: str, epoch: int) -> Tier:
    tier = plan.read(tier_key(topic), Tier)
    if tier is None or tier.epoch != epoch:
        now = "there is none" if tier is None else f"it is {tier.epoch}, of {tier.holder!r}"
        raise Deposed(f"epoch {epoch} of the table of {topic!r} is over: now {now}", "stop, or open the tier again")
    return tier


def _tiered_topic(plan: DecisionPlan, name: str, topic_id: int) -> Topic:
    topic = plan.read(f"topics/{name}", Topic)
    if topic is None:
        raise UnknownTopic(f"there is no topic {name!r}", "create it first")
    check_id(topic, topic_id)
    if not topic.replicas:
        raise BadValue(
            f"topic {name!r} has no replicas: its records are never durable, and their positions are reused",
            "tier a topic that was created with replicas=1 or more",
        )
    return topic


def _check_lane(plan: DecisionPlan, topic: Topic, tier: Tier, lane: int) -> None:
    if lane == topic.lane or lane in tier.frontiers:
        return
    if plan.read(f"lanes/{topic.lane:05}/{lane:010}", TopicLane) is None:
        raise BadValue(f"lane {lane} is not a lane of topic {topic.name!r}", "describe() lists them")


def trim_table(plan: DecisionPlan, topic: str, lane: int, index: int, seq: int | None, cold: bool) -> int:
    """Apply a trim to a topic's table. Returns the index below which brokers may forget.

    With `cold` the start of the table's part moves. Without it the table is not changed, and the trim stops at the
    frontier: records that are not in the table stay.
    """
    tier = plan.read(tier_key(topic), Tier)
    if not cold:
        if tier is None:
            raise BadValue(f"topic {topic!r} has no table that keeps trimmed records", "trim it with cold=True")
        return min(index, tier.frontier(lane).index)
    if tier is not None and seq is not None and index > tier.starts.get(lane, FIRST_POSITION).index:
        plan.put(tier_key(topic), msgspec.structs.replace(tier, starts=tier.starts | {lane: LanePosition(index, seq)}))
    return index


def _holes(plan: DecisionPlan, tier: Tier, lane: int, first: LanePosition, behind: LanePosition) -> list[Hole]:
    """Find the holes between a lane's start in its table and its frontier: known ones, and those between ranges."""
    (start, _), (frontier, _) = first, behind
    known = [hole for hole in tier.holes.get(lane, ()) if hole.stop > start]
    last = known[-1].stop if known else start
    ranges = [range_ for _, range_ in plan.list(ranges_prefix(lane), Range)]
    found = [
        Hole(old.end, new.start, old.end_seq or 0, new.start_seq, old.never_durable)
        for old, new in pairwise(ranges)
        if old.end is not None and old.end < new.start and last < new.start <= frontier
    ]
    return [*known, *found][-TIER_HOLES_MAX:]


def _new(ask: OpenTier) -> Tier:
    return Tier(id=ask.id, warehouse=ask.warehouse, table=ask.table, hot_retention_s=HOT_RETENTION_S)


def _check_text(text: str) -> None:
    if len(text.encode()) > TIER_TEXT_BYTES_MAX:
        raise BadValue(f"text {text[:60]!r}... has {len(text.encode())} bytes", f"use at most {TIER_TEXT_BYTES_MAX}")


def checked_hot_retention(hot_retention_s: int) -> int:
    """Check how long brokers keep records that are in the topic's table."""
    if not 0 <= hot_retention_s <= RETENTION_S_MAX:
        raise BadValue(f"hot_retention_s {hot_retention_s} is out of range", f"use 0 to {RETENTION_S_MAX}")
    return hot_retention_s
