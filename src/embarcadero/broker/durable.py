"""How far lanes are durable, and what awaits that: payloads that our log must keep, and acks that may not leave yet.

Of a topic with replicas a payload is kept until its entry is durable, and an ack that was asked to mean "durable" goes
out only then. How far a lane is durable is counted in one place, by the rule of fabric/leader.py; below that are
the lane's sealed ranges, of which the store tells.

A lane whose replicas are dead or slow keeps chunks of the log, and chunks are shared. So all such lanes together may
keep a part of the log only: above a first mark clients that feed nothing but lanes which keep their share or more of it
get no more credit, above a second one batches of such lanes are answered BACKPRESSURE. All other clients go on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Final, NamedTuple

import numpy as np

from embarcadero.broker.clients import Peer
from embarcadero.broker.context import BrokerContext, StoreView
from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.layout import Entries
from embarcadero.fabric.leader import Durability, EpochTable, LeaderView
from embarcadero.fabric.log import LogWriter
from embarcadero.fabric.region import Fabric
from embarcadero.limits import DURABLE_ACKS_PER_CONNECTION_MAX, KEPT_SHARE_CREDIT, KEPT_SHARE_MAX
from embarcadero.placement.directory import Directory
from embarcadero.steps import Step
from embarcadero.types import NO_INDEX, Gap, GapKind, Outcome, Range, ReplicaRef, Span, count_outside, lost_spans
from embarcadero.wire.codec import ACK, PACKED_ACK

_STORED: Final = np.zeros(256, dtype=bool)
_STORED[[Outcome.ORDERED, Outcome.DUP_OF, Outcome.DUP]] = True
_AT_INDEX: Final = frozenset({int(Outcome.ORDERED), int(Outcome.DUP_OF)})
_PERHAPS_ORDERED: Final = frozenset(map(int, (Outcome.DUP, Outcome.STALE, Outcome.FENCED, Outcome.UNKNOWN_SESSION)))


class ReplicaTrouble(NamedTuple):
    """A replica, and its health word; -1 and 0 if all are well."""

    replica: int
    word: int


NO_TROUBLE: Final = ReplicaTrouble(-1, 0)


class LaneProgress(NamedTuple):
    """How far a lane is durable as counted last, and how many acks wait for more."""

    through: int
    waiting: int


class _KeptPayload(NamedTuple):
    at_index: int
    location: int


class _WaitingAcks(NamedTuple):
    """Acks that leave when the lane is durable to `need`. `number` keeps those of one need in the order they came."""

    need: int
    number: int
    peer: Peer
    acks: Entries


class DurableFrontiers:
    """How far lanes with replicas are durable, and their ranges."""

    def __init__(self, fabric: Fabric, epochs: EpochTable, directory: Directory, steps: Steps = NO_STEPS) -> None:
        self._directory, self.steps = directory, steps
        self._durability = Durability(fabric, epochs, self._range_of, steps)
        self.follow = self._durability.follow
        self._chains: dict[int, LaneRanges] = {}

    def changed(self) -> None:
        """The store has changed: ranges are looked up again, and lines of replicas that are gone are let go."""
        self._chains.clear()
        self._durability.lines.forget_removed()

    def _range_of(self, lane: int, number: int) -> Range | None:
        """The range that is to be counted by. Ranges that were looked up before it was opened are looked up again.

        Else what is counted of it would seem to be durable in the one before, of which the end is not known yet.
        """
        known = self._chains.get(lane)
        if known is not None and (not known.ranges or known.ranges[-1].number < number):
            del self._chains[lane]
        return self._directory.ranges.get(lane, number)

    def chain(self, lane: int) -> LaneRanges:
        """A lane's ranges, as the store had them at the last change we know of, or when they were counted by."""
        chain = self._chains.get(lane)
        if chain is None:
            chain = self._chains[lane] = LaneRanges(self._directory.ranges.all(lane))
        return chain

    def through(self, lane: int) -> int:
        """Everything below is durable (or lost), as counted now. It never goes back."""
        return max(self._durability.through(lane), self.chain(lane).settled)

    def known(self, lane: int) -> int:
        """The same, as counted last."""
        return max(self._durability.known(lane), self.chain(lane).settled)

    def now(self, lane: int) -> int | None:
        """The same, but None unless it is all that anybody may have counted before: for answers about the end."""
        ranges = self.chain(lane).ranges
        if ranges and ranges[-1].end is not None:
            return self.known(lane)
        return self.known(lane) if self._durability.countable(lane) else None

    def trouble(self, lane: int) -> ReplicaTrouble:
        """Return a replica of the lane's open range that is in trouble."""
        for ref in self.chain(lane).replicas:
            table = self._durability.lines.of(ref)
            if table is not None and (word := table.health.load()):
                return ReplicaTrouble(ref.replica, word)
        return NO_TROUBLE

    def forget(self, lane: int) -> None:
        """The lane is gone."""
        self._durability.forget(lane)
        self._chains.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop what is known of other lanes, which are gone."""
        self._durability.keep(lanes)


@dataclass(frozen=True, slots=True)
class BrokerView:
    """What the parts of one broker share: its context, the store as it was read last, the leader, durable frontiers."""

    context: BrokerContext
    store: StoreView
    epoch: LeaderView
    durable: DurableFrontiers


class AwaitingLane:
    """What waits until one lane is durable: payloads, by (index, location); acks, by the frontier that they need."""

    def __init__(self, lane: int, log: LogWriter, durable: DurableFrontiers, end: Callable[[int], int | None]) -> None:
        self.lane, self._log, self._durable, self._end = lane, log, durable, end
        self._kept: list[_KeptPayload] = []  # a heap
        self._acks: list[_WaitingAcks] = []  # a heap
        self._blocks = 0
        self.chunks: dict[int, int] = {}  # chunks of the log that it keeps: how many payloads in each
        self.waiting = 0  # acks
        self.gone = False  # the topic was deleted: nothing of it will become durable
        self._stood_at, self._since_us = -1, 0  # where the lane is durable to, and since when (or reported since when)

    def __bool__(self) -> bool:
        return bool(self._kept or self._acks)

    @property
    def through(self) -> int:
        """How far the lane was durable when that was counted last."""
        return self._durable.known(self.lane)

    def stalls(self, now_us: int, patience_us: int) -> bool:
        """Whether something has waited for so long without any progress; true once in that time."""
        if not self or self.through != self._stood_at:
            self._stood_at, self._since_us = self.through if self else -1, now_us
            return False
        if now_us - self._since_us < patience_us:
            return False
        self._since_us = now_us
        return True

    def keep(self, index: int, location: int) -> None:
        """A payload was ordered at this index: it stays until that is durable."""
        if self.gone:
            self._log.release(location)
            return
        heapq.heappush(self._kept, _KeptPayload(index, location))
        chunk = self._log.chunk_of(location)
        self.chunks[chunk] = self.chunks.get(chunk, 0) + 1

    def answered(self, outcome: int, index: int, location: int) -> None:
        """A payload's outcome is known: it stays as long as an entry that is not durable may name it.

        A duplicate may be that of its own first copy: a sequencer that takes over decides anew what its predecessor had
        ordered but not answered. So what may have been ordered before stays until everything up to here is durable.
        """
        if outcome in _AT_INDEX:
            self.keep(index, location)
        elif outcome in _PERHAPS_ORDERED:
            end = self._end(self.lane)
            self.keep(NO_INDEX if end is None else max(0, end - 1), location)
        else:
            self._log.release(location)

    def hold(self, peer: Peer, acks: Entries) -> None:
        """Send refusals now, and the others when what they speak of is durable."""
        if peer.gone:
            return
        stored = _STORED[acks["outcome"]]
        if not stored.all():
            peer.send_acks(acks[~stored])
            acks = acks[stored]
        if not len(acks):
            return
        need = None if self.gone else self._need(acks)
        if self.gone:
            self._refuse(peer, acks, Outcome.UNKNOWN_TOPIC)
        elif need is None or peer.acks_waiting + len(acks) > DURABLE_ACKS_PER_CONNECTION_MAX:
            self._refuse(peer, acks, Outcome.UNDECIDED)  # sent again, it is found to be a duplicate
        elif need <= self.through:
            peer.send_acks(acks)
        else:
            self._wait(need, peer, acks)

    def hold_one(self, peer: Peer, outcome: int, index: int, acks: Entries) -> None:
        """The same for one ack, whose outcome and index are these; the usual ones without arrays."""
        waits = outcome in _AT_INDEX and not self.gone and not peer.gone
        if not waits or index < self.through or peer.acks_waiting >= DURABLE_ACKS_PER_CONNECTION_MAX:
            self.hold(peer, acks)
            return
        self._wait(index + 1, peer, acks)

    def _wait(self, need: int, peer: Peer, acks: Entries) -> None:
        self._blocks += 1
        heapq.heappush(self._acks, _WaitingAcks(need, self._blocks, peer, acks))
        self.waiting += len(acks)
        peer.acks_waiting += len(acks)

    def settle(self) -> int:
        """Count how far the lane is durable; free and ack what is below. How many payloads and acks there were."""
        through = self._durable.through(self.lane)
        kept, before = self._kept, len(self._kept) + self.waiting
        ready: dict[Peer, list[Entries]] = {}
        while kept and kept[0].at_index < through:
            self._free(heapq.heappop(kept).location)
        while self._acks and self._acks[0].need <= through:
            _, _, peer, acks = heapq.heappop(self._acks)
            self._less(peer, len(acks))
            ready.setdefault(peer, []).append(acks)
        for peer, blocks in ready.items():
            if not peer.gone:
                peer.send_acks(blocks[0] if len(blocks) == 1 else np.concatenate(blocks))
        if ready:
            self._durable.steps.at(Step.ACK_DURABLE)
        return before - len(kept) - self.waiting

    def disconnected(self, peer: Peer) -> None:
        """Drop the acks of a client that is gone; its payloads stay until they are durable."""
        for block in [block for block in self._acks if block.peer is peer]:
            self._less(peer, len(block.acks))
        self._acks = [block for block in self._acks if block.peer is not peer]
        heapq.heapify(self._acks)

    def drop(self) -> None:
        """The topic is gone: nothing of it will become durable any more."""
        self.gone = True
        for _, location in self._kept:
            self._free(location)
        self._kept.clear()
        for _, _, peer, acks in self._acks:
            self._less(peer, len(acks))
            self._refuse(peer, acks, Outcome.UNKNOWN_TOPIC)
        self._acks.clear()

    @staticmethod
    def _refuse(peer: Peer, acks: Entries, outcome: Outcome) -> None:
        acks["outcome"], acks["index"], acks["seq"] = int(outcome), NO_INDEX, NO_INDEX
        if not peer.gone:
            peer.send_acks(acks)

    def _need(self, acks: Entries) -> int | None:
        """The frontier at which all of these are durable. A duplicate without an index is somewhere below the end."""
        unnamed = acks["outcome"] == int(Outcome.DUP)
        need = int(acks["index"][~unnamed].max(initial=0)) + 1
        if not unnamed.any():
            return need
        end = self._end(self.lane)
        return None if end is None else max(need, end)

    def _less(self, peer: Peer, count: int) -> None:
        self.waiting -= count
        peer.acks_waiting -= count

    def _free(self, location: int) -> None:
        chunk = self._log.chunk_of(location)
        self.chunks[chunk] -= 1
        if not self.chunks[chunk]:
            del self.chunks[chunk]
        self._log.release(location)


class AwaitingDurability:
    """All lanes of one broker in which something waits for disks."""

    def __init__(self, log: LogWriter, durable: DurableFrontiers, end: Callable[[int], int | None]) -> None:
        self._log, self._durable, self._end = log, durable, end
        self._lanes: dict[int, AwaitingLane] = {}

    def of(self, lane: int) -> AwaitingLane:
        """What waits in a lane."""
        awaiting = self._lanes.get(lane)
        if awaiting is None:
            awaiting = self._lanes[lane] = AwaitingLane(lane, self._log, self._durable, self._end)
        return awaiting

    def settle(self) -> int:
        """Free and ack what has become durable; how many payloads and acks there were."""
        settled = 0
        for awaiting in self._lanes.values():
            if awaiting:
                settled += awaiting.settle()
        return settled

    @property
    def waiting(self) -> int:
        """Acks that wait for disks."""
        return sum([awaiting.waiting for awaiting in self._lanes.values()])

    @property
    def kept_chunks(self) -> int:
        """Chunks of the log that are kept for disks."""
        return len(set().union(*(awaiting.chunks for awaiting in self._lanes.values())))

    def stalled(self, now_us: int, patience_us: int) -> list[int]:
        """Lanes in which something has waited for disks for so long without any progress; each once in that time."""
        return [lane for lane, awaiting in self._lanes.items() if awaiting.stalls(now_us, patience_us)]

    def facts(self) -> dict[int, LaneProgress]:
        """Return the progress of each lane."""
        return {lane: LaneProgress(awaiting.through, awaiting.waiting) for lane, awaiting in self._lanes.items()}

    @property
    def pressed(self) -> bool:
        """Whether so much is kept for disks that some should get no more credit."""
        return bool(self._lanes) and self.kept_chunks >= KEPT_SHARE_CREDIT * self._log.chunks

    def without_credit(self, lane: int) -> bool:
        """Whether clients that feed only this lane, or others like it, should get no more credit."""
        return self._keeps_too_much(lane, KEPT_SHARE_CREDIT)

    def crowded(self, lane: int) -> bool:
        """Whether this lane's batches can't be taken now, so that others can."""
        return self._keeps_too_much(lane, KEPT_SHARE_MAX)

    def _keeps_too_much(self, lane: int, share: float) -> bool:
        awaiting = self._lanes.get(lane)
        if awaiting is None or len(awaiting.chunks) < 2:  # one chunk is being filled, by all lanes
            return False
        if self.kept_chunks < share * self._log.chunks:
            return False
        keepers = [len(other.chunks) for other in self._lanes.values() if other.chunks]
        return len(awaiting.chunks) * len(keepers) >= sum(keepers)

    def disconnected(self, peer: Peer) -> None:
        """A client is gone."""
        if peer.acks_waiting:
            for awaiting in self._lanes.values():
                awaiting.disconnected(peer)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop what waits in other lanes, which are gone."""
        for lane in self._lanes.keys() - lanes:
            self.forget(lane)

    def forget(self, lane: int) -> None:
        """A topic, or a lane of it, is gone."""
        awaiting = self._lanes.pop(lane, None)
        if awaiting is not None:
            awaiting.drop()
        self._durable.forget(lane)


def one_ack(lane: int, session: int, sequence: int, index: int, seq: int, extra: int, outcome: int) -> Entries:
    """The outcome of one batch, as an array."""
    return np.frombuffer(bytearray(PACKED_ACK.pack(lane, session, sequence, index, seq, extra, outcome)), dtype=ACK)


class LaneRanges:
    """The ranges of one lane, oldest first, as the store had them at one moment."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges
        self._starts = [range_.start for range_ in ranges]
        self.lost = list(starmap(Span, lost_spans(ranges)))
        self.settled = self._settled()
        """Everything below is durable, or lost: it is in sealed ranges, or between them."""

    def _settled(self) -> int:
        if not self.ranges:
            return 0
        last = self.ranges[-1]
        return last.start if last.end is None else last.end

    @property
    def start(self) -> int:
        """The first index that any range owns."""
        return self._starts[0] if self._starts else 0

    @property
    def replicas(self) -> list[ReplicaRef]:
        """The replicas that take what is appended now."""
        return self.ranges[-1].replicas if self.ranges and self.ranges[-1].open else []

    def owner(self, index: int) -> Range | None:
        """The range that an index is in; None if it is lost, or outside all ranges."""
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return None
        range_ = self.ranges[at]
        return range_ if range_.end is None or index < range_.end else None

    def lost_at(self, index: int) -> Gap | None:
        """The LOST gap that an index is in, if it is in one: from the end at which the range before it was sealed.

        A reader of what is only ordered may be above that end: it learns that what it read there is gone. Gaps with
        nothing between them, of two losses in a row, are one. A reader in the second was told of the first before.
        """
        at = bisect_right(self._starts, index)
        before, after = self.ranges[at - 1 : at], self.ranges[at:]
        if not before or not after or self.owner(index) is not None:
            return None
        stop = next((range_.start for range_ in after if range_.start != range_.end), after[-1].start)
        start = before[0].end
        return Gap(GapKind.LOST, index if start is None else start, stop)

    def never_durable(self, gap: Gap) -> bool:
        """Whether nothing in a LOST gap ever was durable, as the store says of the ranges before it.

        An empty range between two losses may have been sealed in order: nothing is missing right behind it.
        """
        following = [*(range_.start for range_ in self.ranges[1:]), gap.stop]
        sealed = [
            range_
            for range_, start in zip(self.ranges, following, strict=True)
            if range_.end is not None and gap.start <= range_.end < min(start, gap.stop)
        ]
        return bool(sealed) and all(range_.never_durable for range_ in sealed)

    @property
    def seq_holes(self) -> list[Span]:
        """Spans of seqs between ranges: restarts passed over them."""
        pairs = ((old.end_seq, new.start_seq) for old, new in pairwise(self.ranges))
        return [Span(end, start) for end, start in pairs if end is not None and end < start]

    def batches(self, start: int, stop: int) -> int:
        """How many positions of [start, stop) are not lost."""
        return count_outside(start, stop, self.lost)

    def after_lost(self, index: int) -> int:
        """The same index, or the end of the gap that it is in."""
        gap = self.lost_at(index)
        return index if gap is None else gap.stop

    def until_lost(self, index: int, stop: int) -> int:
        """Where the first LOST gap above an index begins, or `stop` if that is lower."""
        return next((start for start, _ in self.lost if index < start < stop), stop)

    def seq_at(self, index: int) -> int | None:
        """The seq at which an index begins, where ranges begin or end; None elsewhere."""
        for range_ in reversed(self.ranges):
            if index == range_.start:
                return range_.start_seq
            if index == range_.end:
                return range_.end_seq
            if index > range_.start:
                return None
        return None

    def from_index(self, index: int) -> Iterator[Range]:
        """Ranges that own something at or above an index, oldest first."""
        at = max(0, bisect_right(self._starts, index) - 1)
        for range_ in self.ranges[at:]:
            if range_.end is None or (range_.end > index and range_.end > range_.start):
                yield range_
