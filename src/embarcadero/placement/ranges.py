"""Ranges and ceilings in the directory: each change is one transaction of the leader.

A lane's chain record names its topic, its last range and its ceiling. Every change of the chain includes this record,
so two processes that change it do so one after the other, and the second sees the change of the first. Positions below
the ceiling may have been handed out. A range that opens after a loss of memory starts at the ceiling, so no position is
handed out twice. A ceiling is never lowered. Range numbers are never reused either: a lane that a new topic gets
continues the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from embarcadero.errors import Backpressure, BadValue
from embarcadero.limits import BROKER_LANES_FIRST, BROKER_LANES_KEPT_MAX, CEILING_AHEAD, CEILING_AHEAD_SEQ, LANES_MAX
from embarcadero.placement.members import ReplicaMembers
from embarcadero.placement.records import (
    Chain,
    Decider,
    DecisionPlan,
    LaneStart,
    MirroredEnd,
    Retired,
    chain_key,
    lane_key,
    member_key,
    range_key,
    ranges_prefix,
    replica_key,
    retired_key,
    saved_key,
    tier_key,
    trim_key,
)
from embarcadero.types import (
    FIRST_POSITION,
    LanePosition,
    Member,
    MemberState,
    Range,
    ReplicaMember,
    ReplicaRef,
    ReplicaState,
    Tier,
    Topic,
    TopicLane,
)


def below_start(ranges: Sequence[Range], start: int) -> list[tuple[Range, Range | None]]:
    """Find sealed ranges of one lane that are wholly below its start, each with its remaining record in the store.

    If lost positions follow a range, its end stays in the store until these are below the start too. Otherwise the loss
    would be forgotten.
    """
    found: list[tuple[Range, Range | None]] = []
    for range_, following in pairwise(ranges):
        if following.start <= start:
            found.append((range_, None))
        elif range_.end is not None and range_.end <= start and range_.replicas:
            found.append((range_, _only_end(range_)))
    return found


def _only_end(range_: Range) -> Range:
    """Make the remaining record of a trimmed range: an empty range at its end, without copies."""
    end = range_.start if range_.end is None else range_.end
    end_seq = range_.start_seq if range_.end_seq is None else range_.end_seq
    return msgspec.structs.replace(range_, start=end, start_seq=end_seq, replicas=[], durable_on=0)


class RangeChains:
    """Ranges of lanes. Methods with an epoch do nothing once a later epoch is handed out."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def all(self, lane: int | None = None) -> list[Range]:
        """Ranges of a lane, oldest first; without `lane`, of all lanes, by lane.

        Trimmed ranges are removed in time, or only their ends stay.
        """
        return self._decider.all("ranges/" if lane is None else ranges_prefix(lane), Range)

    def get(self, lane: int, number: int) -> Range | None:
        """Read one range; None if it never existed, or was trimmed."""
        return self._decider.one(range_key(lane, number), Range)

    def open_range(self, lane: int) -> Range | None:
        """Find the range that may still grow, if the lane has one."""
        chain = self._decider.one(chain_key(lane), Chain)
        last = None if chain is None else self.get(lane, chain.last)
        return last if last is not None and last.open else None

    def seal_and_open(
        self, lane: int, number: int, end: int, end_seq: int, refs: Sequence[ReplicaRef], epoch: int
    ) -> Range | None:
        """Seal an open range at `end` and open the next one there, on `refs`. Returns the new range.

        Returns None, without a change, in these cases: the range is not the open one; a later epoch is handed out; the
        topic is deleted; one of `refs` is gone; they are fewer than the topic's `durable_on`.
        """

        def plan_it(plan: DecisionPlan) -> Range | None:
            found = _open_last(plan, lane, number, epoch)
            if found is None:
                return None
            chain, range_ = found
            opened = _open(plan, chain, lane, LanePosition(end, end_seq), refs)
            if opened is not None:
                _seal(plan, range_, end, end_seq)
            return opened

        return self._decider.decide(plan_it)

    def seal_recovered(
        self,
        lane: int,
        number: int,
        end: int,
        end_seq: int,
        refs: Sequence[ReplicaRef],
        epoch: int,
        saved: MirroredEnd | None = None,
    ) -> Range | None:
        """Seal a range at its recovered end after a loss of memory, and open the next one at the ceiling, on `refs`.

        If a mirror had the end of the order (`saved`), no position above it was ever handed out. Then the next range
        opens at `saved.start`. A broker's lane is never continued: without `refs` its range is sealed, the lane is
        closed if it is not closed yet, and the sealed range is returned. None in the cases of `seal_and_open`.
        """

        def plan_it(plan: DecisionPlan) -> Range | None:
            found = _open_last(plan, lane, number, epoch)
            if found is None:
                return None
            chain, range_ = found
            if lane >= BROKER_LANES_FIRST and not refs:
                sealed = _seal(plan, range_, end, end_seq, never_durable=not chain.loss_accepted)
                _close_lane(plan, chain.topic, lane, sealed, saved)
                plan.put(chain_key(lane), msgspec.structs.replace(chain, loss_accepted=False))
                return sealed
            index, seq = (chain.index, chain.seq) if saved is None else (saved.start, saved.seq)
            opened = _open(plan, chain, lane, LanePosition(max(index, end), max(seq, end_seq)), refs)
            if opened is not None:
                _seal(plan, range_, end, end_seq, never_durable=not chain.loss_accepted)
                if saved is not None:
                    plan.put(saved_key(lane), saved)
            return opened

        return self._decider.decide(plan_it)

    def seal_clean(self, lane: int, number: int, end: int, end_seq: int, epoch: int) -> bool:
        """Seal a range that is completely durable and will not grow: at a clean stop, or when its lane is closed."""

        def plan_it(plan: DecisionPlan) -> bool:
            found = _open_last(plan, lane, number, epoch)
            if found is not None:
                _seal(plan, found[1], end, end_seq)
            return found is not None

        return self._decider.decide(plan_it)

    def reopen(self, lane: int, refs: Sequence[ReplicaRef], epoch: int) -> Range | None:
        """Open the next range after a clean stop, at the end of the last one.

        Returns None if the last range is open, and in the cases of `seal_and_open`.
        """

        def plan_it(plan: DecisionPlan) -> Range | None:
            if not plan.leads(epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
                return None
            last = plan.read(range_key(lane, chain.last), Range)
            if last is None or last.end is None or last.end_seq is None:
                return None
            return _open(plan, chain, lane, LanePosition(last.end, last.end_seq), refs)

        return self._decider.decide(plan_it)

    def replace_in_sealed(self, lane: int, number: int, old: int, new: ReplicaRef) -> bool:
        """Record that replica `new`, and no longer `old`, has a complete copy of a sealed range.

        If `new` is a later incarnation of `old`, its disk was wiped and has been filled again.
        """

        def plan_it(plan: DecisionPlan) -> bool:
            key = range_key(lane, number)
            range_ = plan.read(key, Range)
            if (
                range_ is None
                or range_.open
                or plan.read(replica_key(new.replica, new.incarnation), ReplicaMember) is None
            ):
                return False
            numbers = [ref.replica for ref in range_.replicas]
            if old not in numbers or (new.replica != old and new.replica in numbers) or new in range_.replicas:
                return False
            refs = [new if ref.replica == old else ref for ref in range_.replicas]
            plan.put(key, msgspec.structs.replace(range_, replicas=refs))
            return True

        return self._decider.decide(plan_it)

    def forget_trimmed(self, lane: int, number: int, covered: int) -> bool:
        """Forget the ranges below the start of a lane with sessions, as far as a checkpoint covers them.

        A checkpoint of the lane's sessions as of index `covered` is on enough disks of range `number`. Returns False,
        without a change, when that range is no longer the open one: then other disks must have a checkpoint.
        """

        def plan_it(plan: DecisionPlan) -> bool:
            chain, trim = plan.read(chain_key(lane), Chain), plan.read(trim_key(lane), LaneStart)
            last = None if chain is None else plan.read(range_key(lane, chain.last), Range)
            if trim is None or last is None or last.number != number or not last.open:
                return False
            _drop_trimmed(plan, lane, min(trim.index, covered))
            return True

        return self._decider.decide(plan_it)

    # --- ceilings and losses ------------------------------------------------------------------------------------------
    def ceiling(self, lane: int) -> LanePosition:
        """Read the index and seq below which positions may be handed out; (0, 0) for a lane without ranges."""
        chain = self._decider.one(chain_key(lane), Chain)
        return FIRST_POSITION if chain is None else LanePosition(chain.index, chain.seq)

    def handle_ceiling(self, lane: int) -> int:
        """Read the number below which handles of sessions may be handed out; 0 for a lane without ranges."""
        chain = self._decider.one(chain_key(lane), Chain)
        return 0 if chain is None else chain.handle

    def raise_ceiling(self, lane: int, index: int, seq: int, epoch: int, handle: int = 0) -> bool:
        """Reserve positions and handles up to here. A ceiling is never lowered: True also when it is already higher."""

        def plan_it(plan: DecisionPlan) -> bool:
            if not plan.leads(epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
                return False
            raised = msgspec.structs.replace(
                chain, index=max(index, chain.index), seq=max(seq, chain.seq), handle=max(handle, chain.handle)
            )
            if raised != chain:
                plan.put(chain_key(lane), raised)
            return True

        return self._decider.decide(plan_it)

    def accept_loss(self, lane: int) -> None:
        """Record an operator's permission to recover this lane from too few replicas, and so to lose records."""

        def plan_it(plan: DecisionPlan) -> None:
            if (chain := plan.read(chain_key(lane), Chain)) is None:
                raise BadValue(f"lane {lane} has no ranges", "`embarcadero status` lists the lanes that have ranges")
            plan.put(chain_key(lane), msgspec.structs.replace(chain, loss_accepted=True))

        self._decider.decide(plan_it)

    def loss_accepted(self, lane: int) -> bool:
        """Whether an operator has accepted a loss. It applies once, to the open range."""
        chain = self._decider.one(chain_key(lane), Chain)
        return chain is not None and chain.loss_accepted


# --- lanes of brokers -------------------------------------------------------------------------------------------------
class BrokerLanes:
    """Lanes of brokers: topics of orders 0 and 1 have one for each broker incarnation."""

    def __init__(self, decider: Decider, replicas: ReplicaMembers) -> None:
        self._decider, self._replicas = decider, replicas

    def make(self, topic: Topic, member: Member) -> TopicLane | None:
        """Make a lane for a live incarnation's batches of a topic; None when the topic or the incarnation is gone.

        In a topic with replicas the lane gets its first range too. That may have fewer replicas than the topic, but at
        least `durable_on`; otherwise raises Backpressure.
        """

        def plan_it(plan: DecisionPlan) -> TopicLane | None:
            cluster = plan.cluster()
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
                forget_lane(plan, old.lane)
            lane = TopicLane(
                lane=cluster.next_broker_lane,
                topic=topic.lane,
                broker=member.broker,
                incarnation=member.incarnation,
                handle=member.handle,
            )
            plan.put("cluster", msgspec.structs.replace(cluster, next_broker_lane=lane.lane + 1))
            plan.put(lane_key(lane), lane)
            if found.replicas:
                begin_chain(plan, found, lane.lane, self._enough(plan, found))
            return lane

        return self._decider.decide(plan_it)

    def all(self, topic: int | None = None) -> list[TopicLane]:
        """Lanes of brokers, oldest first within a topic. With `topic`, only of the topic with this lane number."""
        prefix = "lanes/" if topic is None else f"lanes/{topic:05}/"
        return self._decider.all(prefix, TopicLane)

    def close(self, ends: list[TopicLane], epoch: int) -> bool:
        """Record the ends of a dead incarnation's lanes. Ends that are already recorded stay.

        Only the sequencer of the newest epoch may do it. Returns False, without a change, once a later epoch is handed
        out.
        """

        def plan_it(plan: DecisionPlan) -> bool:
            if not plan.leads(epoch):
                return False
            for lane in ends:
                found = plan.read(lane_key(lane), TopicLane)
                if found is not None and found.open:
                    plan.put(lane_key(lane), lane)
            return True

        return self._decider.decide(plan_it)

    def _enough(self, plan: DecisionPlan, topic: Topic) -> list[ReplicaRef]:
        chosen = self._replicas.pick(plan, topic.replicas)
        if len(chosen) < topic.durable_on:
            raise Backpressure(
                f"topic {topic.name!r} needs {topic.durable_on} live replicas, and there are {len(chosen)}",
                "start replicas; then the batch is accepted",
            )
        return chosen


# --- parts of a decision ----------------------------------------------------------------------------------------------
def _open_last(plan: DecisionPlan, lane: int, number: int, epoch: int) -> tuple[Chain, Range] | None:
    """Read a chain and its open range, if the range has this number and the caller is the leader."""
    if not plan.leads(epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
        return None
    range_ = plan.read(range_key(lane, number), Range)
    return None if range_ is None or not range_.open or number != chain.last else (chain, range_)


def _seal(plan: DecisionPlan, range_: Range, end: int, end_seq: int, never_durable: bool = False) -> Range:
    if end < range_.start or end_seq < range_.start_seq:
        raise BadValue(
            f"range {range_.number} of lane {range_.lane} can't end at ({end}, {end_seq})",
            f"it starts at ({range_.start}, {range_.start_seq})",
        )
    sealed = msgspec.structs.replace(range_, end=end, end_seq=end_seq, never_durable=never_durable)
    plan.put(range_key(range_.lane, range_.number), sealed)
    return sealed


def _open(plan: DecisionPlan, chain: Chain, lane: int, start: LanePosition, refs: Sequence[ReplicaRef]) -> Range | None:
    """Open the next range of a chain. None when the topic is deleted, or needs more replicas to be durable.

    Also None when one of the replicas is gone. So once no open range names a dead incarnation, none ever will, and its
    lines may be removed.
    """
    topic = plan.read(f"topics/{chain.topic}", Topic)
    if topic is None or len({ref.replica for ref in refs}) < max(1, topic.durable_on):
        return None
    members = [plan.read(replica_key(ref.replica, ref.incarnation), ReplicaMember) for ref in refs]
    if any(member is None or member.state is ReplicaState.DEAD for member in members):
        return None
    return _put_range(plan, chain, lane, start, refs, topic.durable_on)


def _put_range(
    plan: DecisionPlan, chain: Chain, lane: int, start: LanePosition, refs: Sequence[ReplicaRef], durable_on: int
) -> Range:
    index, seq = start
    made = Range(
        lane=lane, number=chain.last + 1, start=index, start_seq=seq, replicas=list(refs), durable_on=durable_on
    )
    plan.put(range_key(lane, made.number), made)
    plan.put(
        chain_key(lane),
        Chain(
            topic=chain.topic,
            last=made.number,
            index=max(chain.index, index + CEILING_AHEAD),
            seq=max(chain.seq, seq + CEILING_AHEAD_SEQ),
            handle=chain.handle,
        ),
    )
    return made


def begin_chain(plan: DecisionPlan, topic: Topic, lane: int, refs: Sequence[ReplicaRef]) -> None:
    """Begin the chain of a new lane. Lanes of brokers are never reused, so their ranges count from 1."""
    last = 0
    if lane < BROKER_LANES_FIRST:
        retired = plan.read(retired_key(lane), Retired)
        if retired is not None:
            plan.delete(retired_key(lane))
        last = max(plan.cluster().last_range, retired.last if retired else 0)
    chain = Chain(topic=topic.name, last=last, index=0, seq=0)
    _put_range(plan, chain, lane, FIRST_POSITION, refs, topic.durable_on)


def _drop_chain(plan: DecisionPlan, lane: int) -> None:
    """Forget a lane's ranges. Lanes of topics are reused later, so remember the last number of their ranges.

    A generation hands out lanes in turn, from its first lane on, and reuses none that it has passed. Only a lane that
    is still ahead gets a record of its own.
    """
    if (chain := plan.read(chain_key(lane), Chain)) is None:
        return
    plan.delete(chain_key(lane))
    for key, _ in plan.list(ranges_prefix(lane), Range):
        plan.delete(key)
    if lane >= BROKER_LANES_FIRST:
        return
    cluster = plan.cluster()
    if chain.last > cluster.last_range:
        plan.put("cluster", msgspec.structs.replace(cluster, last_range=chain.last))
    passed = (cluster.next_lane - cluster.first_lane) % LANES_MAX
    if cluster.first_lane < 0 or (lane - cluster.first_lane) % LANES_MAX >= passed:
        plan.put(retired_key(lane), Retired(chain.last, plan.generation))


def _drop_trimmed(plan: DecisionPlan, lane: int, start: int) -> list[Range]:
    """Forget ranges below the start of their lane. Returns all ranges that the lane had."""
    found = [range_ for _, range_ in plan.list(ranges_prefix(lane), Range)]
    for range_, remaining in below_start(found, start):
        if remaining is None:
            plan.delete(range_key(lane, range_.number))
        else:
            plan.put(range_key(lane, range_.number), remaining)
    return found


def drop_trimmed_of_broker(plan: DecisionPlan, topic: Topic, lane: int, start: int) -> None:
    """Forget ranges below the start of a broker's lane. A closed lane is removed with its last range."""
    if plan.read(chain_key(lane), Chain) is None:
        return
    found, closed = _drop_trimmed(plan, lane, start), _broker_lane(plan, topic, lane)
    if closed is not None and closed.end is not None and closed.end <= start and not any(r.open for r in found):
        plan.put(lane_key(closed), msgspec.structs.replace(closed, removed=True))
        _drop_chain(plan, lane)


def _broker_lane(plan: DecisionPlan, topic: Topic, lane: int) -> TopicLane | None:
    return plan.read(f"lanes/{topic.lane:05}/{lane:010}", TopicLane)


def _close_lane(plan: DecisionPlan, topic_name: str, lane: int, sealed: Range, saved: MirroredEnd | None) -> None:
    """Record the end of a broker's lane, and where its loss begins. An end that is already recorded stays."""
    topic = plan.read(f"topics/{topic_name}", Topic)
    found = None if topic is None else _broker_lane(plan, topic, lane)
    if found is None:
        return
    if found.end is None and saved is not None:
        found = msgspec.structs.replace(found, end=saved.start, end_seq=saved.seq)
        plan.put(saved_key(lane), saved)
    elif found.end is None:
        found = msgspec.structs.replace(found, end=sealed.end, end_seq=sealed.end_seq)
    lost = sealed.end is not None and found.end is not None and sealed.end < found.end
    plan.put(lane_key(found), msgspec.structs.replace(found, kept=sealed.end if lost else found.kept))


def forget_lane(plan: DecisionPlan, lane: int) -> None:
    """Forget everything about a lane except its own record."""
    plan.delete(trim_key(lane))
    plan.delete(saved_key(lane))
    _drop_chain(plan, lane)
