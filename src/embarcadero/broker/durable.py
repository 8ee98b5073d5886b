"""How far lanes are durable, and the payloads and acks that await durability.

In a topic with replicas, a payload stays in the broker's log until its entry is durable, and an ack=2 leaves only then.
Durability is counted in one place, by the rule of fabric/leader.py. Positions below the counted range are in the lane's
sealed ranges, which are in the store.

A lane whose replicas are dead or slow keeps chunks of the log, and lanes share chunks. All such lanes together may
therefore keep only a part of the log. Above a first mark, clients that feed only lanes with at least an average share
of it get no more credit. Above a second mark, batches of such lanes are refused with BACKPRESSURE. Other clients are
not affected.
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
    """A replica and its health word; -1 and 0 if all replicas are healthy."""

    replica: int
    word: int


NO_TROUBLE: Final = ReplicaTrouble(-1, 0)


class LaneProgress(NamedTuple):
    """How far a lane was durable when last counted, and how many acks wait."""

    through: int
    waiting: int


class _KeptPayload(NamedTuple):
    at_index: int
    location: int


class _WaitingAcks(NamedTuple):
    """Acks that leave when the lane is durable to `need`. `number` keeps the order of acks with the same need."""

    need: int
    number: int
    peer: Peer
    acks: Entries


class DurableFrontiers:
    """The durable frontiers and the ranges of lanes with replicas."""

    def __init__(self, fabric: Fabric, epochs: EpochTable, directory: Directory, steps: Steps = NO_STEPS) -> None:
        self._directory, self.steps = directory, steps
        self._durability = Durability(fabric, epochs, self._range_of, steps)
        self.follow = self._durability.follow
        self._chains: dict[int, LaneRanges] = {}

    def changed(self) -> None:
        """Handle a change of the store: read ranges again, and release lines of removed replicas."""
        self._chains.clear()
        self._durability.lines.forget_removed()

    def _range_of(self, lane: int, number: int) -> Range | None:
        """Return the range to count by. Cached ranges from before it was opened are read again.

        Otherwise records of this range would seem to be durable in the previous one, whose end is not known yet.
        """
        known = self._chains.get(lane)
        if known is not None and (not known.ranges or known.ranges[-1].number < number):
            del self._chains[lane]
        return self._directory.ranges.get(lane, number)

    def chain(self, lane: int) -> LaneRanges:
        """Return a lane's ranges as of the last known change of the store, or of the last count."""
        chain = self._chains.get(lane)
        if chain is None:
            chain = self._chains[lane] = LaneRanges(self._directory.ranges.all(lane))
        return chain

    def through(self, lane: int) -> int:
        """Return the durable frontier as counted now: everything below is durable or lost. It never decreases."""
        return max(self._durability.through(lane), self.chain(lane).settled)

    def known(self, lane: int) -> int:
        """Return the durable frontier as counted last."""
        return max(self._durability.known(lane), self.chain(lane).settled)

    def now(self, lane: int) -> int | None:
        """Return the frontier, or None if another broker may have counted more. For answers about the end of a lane."""
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
        """Forget a removed lane."""
        self._durability.forget(lane)
        self._chains.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Forget all other lanes: they were removed."""
        self._durability.keep(lanes)


@dataclass(frozen=True, slots=True)
class BrokerView:
    """State that the parts of one broker share: context, the last read of the store, the leader, durable frontiers."""

    context: BrokerContext
    store: StoreView
    epoch: LeaderView
    durable: DurableFrontiers


class AwaitingLane:
    """Payloads and acks that wait until one lane is durable: payloads by index, acks by the frontier they need."""

    def __init__(self, lane: int, log: LogWriter, durable: DurableFrontiers, end: Callable[[int], int | None]) -> None:
        self.lane, self._log, self._durable, self._end = lane, log, durable, end
        self._kept: list[_KeptPayload] = []  # a heap
        self._acks: list[_WaitingAcks] = []  # a heap
        self._blocks = 0
        self.chunks: dict[int, int] = {}  # chunks of the log that the lane keeps: number of payloads in each
        self.waiting = 0  # number of acks
        self.gone = False  # the topic was deleted: none of its records will become durable
        self._stood_at, self._since_us = -1, 0  # the durable frontier, and since when it stands still (or was reported)

    def __bool__(self) -> bool:
        return bool(self._kept or self._acks)

    @property
    def through(self) -> int:
        """The durable frontier as counted last."""
        return self._durable.known(self.lane)

    def stalls(self, now_us: int, patience_us: int) -> bool:
        """Return whether something waited for `patience_us` without progress. True once per such period."""
        if not self or self.through != self._stood_at:
            self._stood_at, self._since_us = self.through if self else -1, now_us
            return False
        if now_us - self._since_us < patience_us:
            return False
        self._since_us = now_us
        return True

    def keep(self, index: int, location: int) -> None:
        """Keep the payload that was ordered at this index until it is durable."""
        if self.gone:
            self._log.release(location)
            return
        heapq.heappush(self._kept, _KeptPayload(index, location))
        chunk = self._log.chunk_of(location)
        self.chunks[chunk] = self.chunks.get(chunk, 0) + 1

    def answered(self, outcome: int, index: int, location: int) -> None:
        """Handle a payload's outcome: keep the payload while an entry that is not durable may reference it.

        A duplicate may be one of its own first copy, because a new sequencer decides again on batches that its
        predecessor ordered but did not answer. A payload that may have been ordered before therefore stays until
        everything up to the current end is durable.
        """
        if outcome in _AT_INDEX:
            self.keep(index, location)
        elif outcome in _PERHAPS_ORDERED:
            end = self._end(self.lane)
            self.keep(NO_INDEX if end is None else max(0, end - 1), location)
        else:
            self._log.release(location)

    def hold(self, peer: Peer, acks: Entries) -> None:
        """Send refusals now, and the other acks when their batches are durable."""
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
            self._refuse(peer, acks, Outcome.UNDECIDED)  # a retry finds that the batch is a duplicate
        elif need <= self.through:
            peer.send_acks(acks)
        else:
            self._wait(need, peer, acks)

    def hold_one(self, peer: Peer, outcome: int, index: int, acks: Entries) -> None:
        """Do the same for one ack with this outcome and index. The usual case needs no arrays."""
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
        """Count the durable frontier; free and ack all below. Returns how many payloads and acks were settled."""
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
        """Drop the acks of a closed connection. Its payloads stay until they are durable."""
        for block in [block for block in self._acks if block.peer is peer]:
            self._less(peer, len(block.acks))
        self._acks = [block for block in self._acks if block.peer is not peer]
        heapq.heapify(self._acks)

    def drop(self) -> None:
        """Drop everything after the topic was removed: none of its records will become durable."""
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
        """Return the frontier at which all of these are durable. A duplicate without an index is below the end."""
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
    """All lanes of one broker in which payloads or acks wait for disks."""

    def __init__(self, log: LogWriter, durable: DurableFrontiers, end: Callable[[int], int | None]) -> None:
        self._log, self._durable, self._end = log, durable, end
        self._lanes: dict[int, AwaitingLane] = {}

    def of(self, lane: int) -> AwaitingLane:
        """Return the payloads and acks that wait in a lane."""
        awaiting = self._lanes.get(lane)
        if awaiting is None:
            awaiting = self._lanes[lane] = AwaitingLane(lane, self._log, self._durable, self._end)
        return awaiting

    def settle(self) -> int:
        """Free and ack everything that became durable. Returns how many payloads and acks were settled."""
        settled = 0
        for awaiting in self._lanes.values():
            if awaiting:
                settled += awaiting.settle()
        return settled

    @property
    def waiting(self) -> int:
        """Number of acks that wait for disks."""
        return sum([awaiting.waiting for awaiting in self._lanes.values()])

    @property
    def kept_chunks(self) -> int:
        """Number of chunks of the log that are kept for disks."""
        return len(set().union(*(awaiting.chunks for awaiting in self._lanes.values())))

    def stalled(self, now_us: int, patience_us: int) -> list[int]:
        """Return lanes whose payloads or acks waited this long for disks without progress, each once per period."""
        return [lane for lane, awaiting in self._lanes.items() if awaiting.stalls(now_us, patience_us)]

    def facts(self) -> dict[int, LaneProgress]:
        """Return the progress of each lane."""
        return {lane: LaneProgress(awaiting.through, awaiting.waiting) for lane, awaiting in self._lanes.items()}

    @property
    def pressed(self) -> bool:
        """Whether so much is kept for disks that some clients should get no more credit."""
        return bool(self._lanes) and self.kept_chunks >= KEPT_SHARE_CREDIT * self._log.chunks

    def without_credit(self, lane: int) -> bool:
        """Return whether clients that feed only this lane, or others like it, should get no more credit."""
        return self._keeps_too_much(lane, KEPT_SHARE_CREDIT)

    def crowded(self, lane: int) -> bool:
        """Return whether this lane's batches are refused so that other lanes have space."""
        return self._keeps_too_much(lane, KEPT_SHARE_MAX)

    def _keeps_too_much(self, lane: int, share: float) -> bool:
        awaiting = self._lanes.get(lane)
        if awaiting is None or len(awaiting.chunks) < 2:  # all lanes share the chunk that is being filled
            return False
        if self.kept_chunks < share * self._log.chunks:
            return False
        keepers = [len(other.chunks) for other in self._lanes.values() if other.chunks]
        return len(awaiting.chunks) * len(keepers) >= sum(keepers)

    def disconnected(self, peer: Peer) -> None:
        """Drop the acks of a closed connection."""
        if peer.acks_waiting:
            for awaiting in self._lanes.values():
                awaiting.disconnected(peer)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Forget all other lanes: they were removed."""
        for lane in self._lanes.keys() - lanes:
            self.forget(lane)

    def forget(self, lane: int) -> None:
        """Forget a topic, or a lane of it, that was removed."""
        awaiting = self._lanes.pop(lane, None)
        if awaiting is not None:
            awaiting.drop()
        self._durable.forget(lane)


def one_ack(lane: int, session: int, sequence: int, index: int, seq: int, extra: int, outcome: int) -> Entries:
    """Build the ack of one batch, as an array."""
    return np.frombuffer(bytearray(PACKED_ACK.pack(lane, session, sequence, index, seq, extra, outcome)), dtype=ACK)


class LaneRanges:
    """The ranges of one lane, oldest first, as read from the store at one moment."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges
        self._starts = [range_.start for range_ in ranges]
        self.lost = list(starmap(Span, lost_spans(ranges)))
        self.settled = self._settled()
        """Everything below is durable or lost: it is in sealed ranges, or between them."""

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
        """The replicas of the open range, or an empty list."""
        return self.ranges[-1].replicas if self.ranges and self.ranges[-1].open else []

    def owner(self, index: int) -> Range | None:
        """Return the range that contains an index; None if the index is lost, or outside all ranges."""
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return None
        range_ = self.ranges[at]
        return range_ if range_.end is None or index < range_.end else None

    def lost_at(self, index: int) -> Gap | None:
        """Return the LOST gap that contains an index, or None. It begins at the end of the last sealed range before it.

        A reader of ordered records may be above that end. The gap reports that the records it read there are gone.
        Adjacent gaps of two losses are one gap. A reader inside the second gap got a report of the first one before.
        """
        at = bisect_right(self._starts, index)
        before, after = self.ranges[at - 1 : at], self.ranges[at:]
        if not before or not after or self.owner(index) is not None:
            return None
        stop = next((range_.start for range_ in after if range_.start != range_.end), after[-1].start)
        start = before[0].end
        return Gap(GapKind.LOST, index if start is None else start, stop)

    def never_durable(self, gap: Gap) -> bool:
        """Return whether no record of a LOST gap was ever durable, according to the store's ranges before it.

        An empty range between two losses may have been sealed in order: nothing is missing right after it.
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
        """Spans of seqs between ranges, which restarts skipped."""
        pairs = ((old.end_seq, new.start_seq) for old, new in pairwise(self.ranges))
        return [Span(end, start) for end, start in pairs if end is not None and end < start]

    def batches(self, start: int, stop: int) -> int:
        """Return how many positions of [start, stop) are not lost."""
        return count_outside(start, stop, self.lost)

    def after_lost(self, index: int) -> int:
        """Return the index, or the end of the gap that contains it."""
        gap = self.lost_at(index)
        return index if gap is None else gap.stop

    def until_lost(self, index: int, stop: int) -> int:
        """Return where the first LOST gap above an index begins, or `stop` if that is lower."""
        return next((start for start, _ in self.lost if index < start < stop), stop)

    def seq_at(self, index: int) -> int | None:
        """Return the seq at which an index begins, if a range begins or ends there; otherwise None."""
        for range_ in reversed(self.ranges):
            if index == range_.start:
                return range_.start_seq
            if index == range_.end:
                return range_.end_seq
            if index > range_.start:
                return None
        return None

    def from_index(self, index: int) -> Iterator[Range]:
        """Return the ranges that own positions at or above an index, oldest first."""
        at = max(0, bisect_right(self._starts, index) - 1)
        for range_ in self.ranges[at:]:
            if range_.end is None or (range_.end > index and range_.end > range_.start):
                yield range_
