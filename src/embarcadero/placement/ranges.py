"""Ranges and ceilings in the directory: each change is one transaction of the one who reigns, or nothing.

A lane's chain record names its topic, its last range and its ceiling; every change of the chain goes through it, so two
who want to change it end up one after the other, and the second sees what the first did. Positions below the ceiling
may have been handed out; a range that opens after a loss of memory starts at the ceiling, so none is handed out twice.
A ceiling is never lowered. Numbers of ranges are for life too: a lane that a new topic gets goes on counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from embarcadero.errors import BadValue
from embarcadero.limits import BROKER_LANES_FIRST, CEILING_AHEAD, CEILING_AHEAD_SEQ, LANES_MAX
from embarcadero.placement.decisions import Plan
from embarcadero.placement.records import (
    Chain,
    Retired,
    Saved,
    Trim,
    chain_key,
    lane_key,
    range_key,
    ranges_prefix,
    replica_key,
    retired_key,
    saved_key,
    trim_key,
)
from embarcadero.placement.replicas import Replicas
from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState, Topic, TopicLane


def below_start(ranges: Sequence[Range], start: int) -> list[tuple[Range, Range | None]]:
    """Sealed ranges of one lane that are wholly below its start, each with what is left of it in the store.

    Of one that is followed by lost positions its end stays until these are below too: else nobody knew of them.
    """
    found: list[tuple[Range, Range | None]] = []
    for range_, following in pairwise(ranges):
        if following.start <= start:
            found.append((range_, None))
        elif range_.end is not None and range_.end <= start and range_.replicas:
            found.append((range_, _only_end(range_)))
    return found


def _only_end(range_: Range) -> Range:
    """What is left of a sealed range that is trimmed away: an empty one at its end, without copies."""
    end = range_.start if range_.end is None else range_.end
    end_seq = range_.start_seq if range_.end_seq is None else range_.end_seq
    return msgspec.structs.replace(range_, start=end, start_seq=end_seq, replicas=[], durable_on=0)


class Ranges(Replicas):
    """The directory's part about ranges. Methods that take an epoch do nothing once a later one is handed out."""

    def ranges(self, lane: int | None = None) -> list[Range]:
        """Ranges of a lane, oldest first; of all lanes, by lane. Trimmed ones go in time, or only their ends stay."""
        return self._all("ranges/" if lane is None else ranges_prefix(lane), Range)

    def range_of(self, lane: int, number: int) -> Range | None:
        """One range; None if there never was one, or it was trimmed away."""
        return self._one(range_key(lane, number), Range)

    def open_range(self, lane: int) -> Range | None:
        """The range that may still grow, if the lane has one."""
        chain = self._one(chain_key(lane), Chain)
        last = None if chain is None else self.range_of(lane, chain.last)
        return last if last is not None and last.open else None

    def seal_and_open(
        self, lane: int, number: int, end: int, end_seq: int, refs: Sequence[ReplicaRef], epoch: int
    ) -> Range | None:
        """Seal an open range at `end` and open the next one there, on `refs`. Returns the new one.

        None, and nothing changes: when the range is not the open one, a later epoch is handed out, the topic is gone,
        one of `refs` is, or they are fewer than the topic's `durable_on`.
        """

        def plan_it(plan: Plan) -> Range | None:
            found = self._open_last(plan, lane, number, epoch)
            if found is None:
                return None
            chain, range_ = found
            opened = self._open(plan, chain, lane, (end, end_seq), refs)
            if opened is not None:
                self._seal(plan, range_, end, end_seq)
            return opened

        return self._decide(plan_it)

    def seal_recovered(
        self, lane: int, number: int, end: int, end_seq: int, refs: Sequence[ReplicaRef], epoch: int,
        saved: Saved | None = None,
    ) -> Range | None:  # fmt: skip
        """After a loss of memory: seal at what was recovered, and open the next range at the ceiling, on `refs`.

        If a mirror told how far the lane was ordered (`saved`), no position above that was ever handed out, and the
        next range opens there: at `saved.start`. A broker's lane is never continued: with no `refs` its range is
        sealed, the lane is closed where it is not yet, and the sealed range is returned. None as in `seal_and_open`.
        """

        def plan_it(plan: Plan) -> Range | None:
            found = self._open_last(plan, lane, number, epoch)
            if found is None:
                return None
            chain, range_ = found
            if lane >= BROKER_LANES_FIRST and not refs:
                sealed = self._seal(plan, range_, end, end_seq, never_durable=not chain.loss_accepted)
                self._close_lane(plan, chain.topic, lane, sealed, saved)
                plan.put(chain_key(lane), msgspec.structs.replace(chain, loss_accepted=False))
                return sealed
            above = (chain.index, chain.seq) if saved is None else (saved.start, saved.seq)
            opened = self._open(plan, chain, lane, (max(above[0], end), max(above[1], end_seq)), refs)
            if opened is not None:
                self._seal(plan, range_, end, end_seq, never_durable=not chain.loss_accepted)
                if saved is not None:
                    plan.put(saved_key(lane), saved)
            return opened

        return self._decide(plan_it)

    def seal_clean(self, lane: int, number: int, end: int, end_seq: int, epoch: int) -> bool:
        """Seal a range that is wholly durable and will not grow: at a clean stop, or when its lane is closed."""

        def plan_it(plan: Plan) -> bool:
            found = self._open_last(plan, lane, number, epoch)
            if found is not None:
                self._seal(plan, found[1], end, end_seq)
            return found is not None

        return self._decide(plan_it)

    def reopen(self, lane: int, refs: Sequence[ReplicaRef], epoch: int) -> Range | None:
        """After a clean stop: open the next range where the last one ends. None if that is open, or as above."""

        def plan_it(plan: Plan) -> Range | None:
            if not self._reigns(plan, epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
                return None
            last = plan.read(range_key(lane, chain.last), Range)
            if last is None or last.end is None or last.end_seq is None:
                return None
            return self._open(plan, chain, lane, (last.end, last.end_seq), refs)

        return self._decide(plan_it)

    def replace_in_sealed(self, lane: int, number: int, old: int, new: ReplicaRef) -> bool:
        """A whole copy of a sealed range is on `new` now: look for it there instead of on replica `old`.

        Where `new` is a later incarnation of `old`, its disk was wiped and has been filled again.
        """

        def plan_it(plan: Plan) -> bool:
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

        return self._decide(plan_it)

    def forget_trimmed(self, lane: int, number: int, covered: int) -> bool:
        """Forget ranges of a lane with sessions that are below its start, as far as a checkpoint covers them.

        `covered`: one of its sessions as of that index is on enough disks of range `number`. False, and nothing
        changes, when that is not the open one any more: others have to have a checkpoint then.
        """

        def plan_it(plan: Plan) -> bool:
            chain, trim = plan.read(chain_key(lane), Chain), plan.read(trim_key(lane), Trim)
            last = None if chain is None else plan.read(range_key(lane, chain.last), Range)
            if trim is None or last is None or last.number != number or not last.open:
                return False
            self._drop_trimmed(plan, lane, min(trim.index, covered))
            return True

        return self._decide(plan_it)

    # --- ceilings and losses ------------------------------------------------------------------------------------------
    def ceiling(self, lane: int) -> tuple[int, int]:
        """The index and seq below which positions may be handed out; (0, 0) for a lane without ranges."""
        chain = self._one(chain_key(lane), Chain)
        return (0, 0) if chain is None else (chain.index, chain.seq)

    def handle_ceiling(self, lane: int) -> int:
        """Below which handles of sessions may be handed out; 0 for a lane without ranges."""
        chain = self._one(chain_key(lane), Chain)
        return 0 if chain is None else chain.handle

    def raise_ceiling(self, lane: int, index: int, seq: int, epoch: int, handle: int = 0) -> bool:
        """Reserve positions and handles up to here. It never goes down: True also when it is higher already."""

        def plan_it(plan: Plan) -> bool:
            if not self._reigns(plan, epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
                return False
            raised = msgspec.structs.replace(
                chain, index=max(index, chain.index), seq=max(seq, chain.seq), handle=max(handle, chain.handle)
            )
            if raised != chain:
                plan.put(chain_key(lane), raised)
            return True

        return self._decide(plan_it)

    def accept_loss(self, lane: int) -> None:
        """An operator's word: recover this lane from the replicas that answer, though they are too few to be sure."""

        def plan_it(plan: Plan) -> None:
            if (chain := plan.read(chain_key(lane), Chain)) is None:
                raise BadValue(f"lane {lane} has no ranges", "`embarcadero status` lists those that have")
            plan.put(chain_key(lane), msgspec.structs.replace(chain, loss_accepted=True))

        self._decide(plan_it)

    def loss_accepted(self, lane: int) -> bool:
        """Whether an operator gave that word; it counts once, for the open range."""
        chain = self._one(chain_key(lane), Chain)
        return chain is not None and chain.loss_accepted

    # --- inside -------------------------------------------------------------------------------------------------------
    def _open_last(self, plan: Plan, lane: int, number: int, epoch: int) -> tuple[Chain, Range] | None:
        """The chain and its open range, if that is the one meant and the caller reigns."""
        if not self._reigns(plan, epoch) or (chain := plan.read(chain_key(lane), Chain)) is None:
            return None
        range_ = plan.read(range_key(lane, number), Range)
        return None if range_ is None or not range_.open or number != chain.last else (chain, range_)

    @staticmethod
    def _seal(plan: Plan, range_: Range, end: int, end_seq: int, never_durable: bool = False) -> Range:
        if end < range_.start or end_seq < range_.start_seq:
            raise BadValue(
                f"range {range_.number} of lane {range_.lane} can't end at ({end}, {end_seq})",
                f"it starts at ({range_.start}, {range_.start_seq})",
            )
        sealed = msgspec.structs.replace(range_, end=end, end_seq=end_seq, never_durable=never_durable)
        plan.put(range_key(range_.lane, range_.number), sealed)
        return sealed

    def _open(
        self, plan: Plan, chain: Chain, lane: int, start: tuple[int, int], refs: Sequence[ReplicaRef]
    ) -> Range | None:
        """The next range of a chain; None when the topic is gone, or needs more replicas to be durable.

        Nor on one that is gone: once no open range names a dead incarnation, none ever will, and its lines may go.
        """
        topic = plan.read(f"topics/{chain.topic}", Topic)
        if topic is None or len({ref.replica for ref in refs}) < max(1, topic.durable_on):
            return None
        members = [plan.read(replica_key(ref.replica, ref.incarnation), ReplicaMember) for ref in refs]
        if any(member is None or member.state is ReplicaState.DEAD for member in members):
            return None
        return self._put_range(plan, chain, lane, start, refs, topic.durable_on)

    @staticmethod
    def _put_range(
        plan: Plan, chain: Chain, lane: int, start: tuple[int, int], refs: Sequence[ReplicaRef], durable_on: int
    ) -> Range:
        index, seq = start
        made = Range(
            lane=lane, number=chain.last + 1, start=index, start_seq=seq, replicas=list(refs), durable_on=durable_on
        )  # fmt: skip
        plan.put(range_key(lane, made.number), made)
        plan.put(chain_key(lane), Chain(
            topic=chain.topic, last=made.number,
            index=max(chain.index, index + CEILING_AHEAD), seq=max(chain.seq, seq + CEILING_AHEAD_SEQ),
            handle=chain.handle,
        ))  # fmt: skip
        return made

    def _first_range(self, plan: Plan, topic: Topic, lane: int, refs: Sequence[ReplicaRef]) -> None:
        """Begin the chain of a new lane. Lanes of brokers never come again, so their ranges count from 1."""
        last = 0
        if lane < BROKER_LANES_FIRST:
            retired = plan.read(retired_key(lane), Retired)
            if retired is not None:
                plan.delete(retired_key(lane))
            last = max(self._counters(plan).last_range, retired.last if retired else 0)
        chain = Chain(topic=topic.name, last=last, index=0, seq=0)
        self._put_range(plan, chain, lane, (0, 0), refs, topic.durable_on)

    def _drop_chain(self, plan: Plan, lane: int) -> None:
        """Forget a lane's ranges. Lanes of topics come again one day: remember how far their ranges were counted.

        Lanes are handed out in turn, from where the generation began: one that was passed since does not come again in
        it. Only a lane that is still ahead is remembered by itself.
        """
        if (chain := plan.read(chain_key(lane), Chain)) is None:
            return
        plan.delete(chain_key(lane))
        for key, _ in plan.list(ranges_prefix(lane), Range):
            plan.delete(key)
        if lane >= BROKER_LANES_FIRST:
            return
        cluster = self._counters(plan)
        if chain.last > cluster.last_range:
            plan.put("cluster", msgspec.structs.replace(cluster, last_range=chain.last))
        passed = (cluster.next_lane - cluster.first_lane) % LANES_MAX
        if cluster.first_lane < 0 or (lane - cluster.first_lane) % LANES_MAX >= passed:
            plan.put(retired_key(lane), Retired(chain.last, self._cluster.generation))

    def _drop_trimmed(self, plan: Plan, lane: int, start: int) -> list[Range]:
        """Forget ranges below the start of their lane; returns all that there were."""
        found = [range_ for _, range_ in plan.list(ranges_prefix(lane), Range)]
        for range_, left in below_start(found, start):
            if left is None:
                plan.delete(range_key(lane, range_.number))
            else:
                plan.put(range_key(lane, range_.number), left)
        return found

    def _drop_of_broker(self, plan: Plan, topic: Topic, lane: int, start: int) -> None:
        """The same for a lane of a broker; a closed one goes with its last range."""
        if plan.read(chain_key(lane), Chain) is None:
            return
        found, closed = self._drop_trimmed(plan, lane, start), self._broker_lane(plan, topic, lane)
        if closed is not None and closed.end is not None and closed.end <= start and not any(r.open for r in found):
            plan.put(lane_key(closed), msgspec.structs.replace(closed, removed=True))
            self._drop_chain(plan, lane)

    @staticmethod
    def _broker_lane(plan: Plan, topic: Topic, lane: int) -> TopicLane | None:
        return plan.read(f"lanes/{topic.lane:05}/{lane:010}", TopicLane)

    def _close_lane(self, plan: Plan, topic_name: str, lane: int, sealed: Range, saved: Saved | None) -> None:
        """Record where a broker's lane ends, and from where on it is lost; an end that is recorded stays."""
        topic = plan.read(f"topics/{topic_name}", Topic)
        found = None if topic is None else self._broker_lane(plan, topic, lane)
        if found is None:
            return
        if found.end is None and saved is not None:
            found = msgspec.structs.replace(found, end=saved.start, end_seq=saved.seq)
            plan.put(saved_key(lane), saved)
        elif found.end is None:
            found = msgspec.structs.replace(found, end=sealed.end, end_seq=sealed.end_seq)
        lost = sealed.end is not None and found.end is not None and sealed.end < found.end
        plan.put(lane_key(found), msgspec.structs.replace(found, kept=sealed.end if lost else found.kept))

    def _forget_lane(self, plan: Plan, lane: int) -> None:
        """All about a lane but its own record."""
        plan.delete(trim_key(lane))
        plan.delete(saved_key(lane))
        self._drop_chain(plan, lane)
