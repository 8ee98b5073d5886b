"""Facts about a history that several checkers need, computed once: the sender and the positions of each batch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

import msgspec

from embarcadero.types import Ack, GapKind
from embarcadero_proof.sim.history import (
    ByReference,
    Delivered,
    FabricLost,
    GapSeen,
    History,
    LaneMade,
    LostSpan,
    Moved,
    Passed,
    Sent,
    SessionOpened,
    Settled,
    Stopped,
    TopicMade,
    TrimmedTo,
    Verdict,
)


class Violation(NamedTuple):
    """One broken promise: its name, its time, and a sentence."""

    promise: str
    at: int
    sentence: str


class Claim(msgspec.Struct, frozen=True):
    """Evidence that batch `number` of `stream` is at `index`: a reader that found it, or an ack."""

    at: int
    index: int
    seq: int
    who: str
    digest: int


Batch = tuple[str, int]
"""(stream, number)"""

Span = tuple[int, int, int]
"""(lane, start, stop)"""

Read = Moved | Delivered | Passed | GapSeen
"""Actions of a reader of a lane."""


class Loss(NamedTuple):
    """When a span was first known to be lost, and when the fabric that held it was lost. None: no fabric was lost."""

    known_us: int
    cause_us: int | None


class Ledger:
    """Facts of one history."""

    def __init__(self, history: History) -> None:
        self.history, self.events = history, len(history)
        self.covered: dict[int, list[tuple[int, int]]] = {}  # by lane; see `covered`
        self.reads: list[Read] = history.some(Moved, Delivered, Passed, GapSeen)
        self.reads_of: dict[int, list[Read]] = defaultdict(list)  # by lane
        for read in self.reads:
            self.reads_of[read.lane].append(read)
        self.first_sent: dict[Batch, Sent] = {}
        self.batch_of: dict[int, Batch] = {}
        self.sent_by: dict[tuple[str, int], Sent] = {}  # by (process, number)
        for sent in history.of(Sent):
            self.sent_by.setdefault((sent.process, sent.number), sent)
            self.first_sent.setdefault((sent.stream, sent.number), sent)
            self.batch_of.setdefault(sent.digest, (sent.stream, sent.number))
        self.claims: dict[int, dict[int, list[Claim]]] = defaultdict(lambda: defaultdict(list))
        """lane -> index -> batches that readers and acks name there"""
        self._collect_claims()
        self.broker_lanes = {made.lane: made for made in history.of(LaneMade)}
        """Lanes of topics of orders 0 and 1, where a batch that is sent again may be stored again."""
        topics = {topic.lane for topic in history.of(TopicMade) if topic.replicas}
        self.replicated = topics | {made.lane for made in self.broker_lanes.values() if made.topic in topics}
        """Lanes of topics with replicas."""
        self.lost: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """lane -> spans of indices that were lost with the fabric"""
        for span in history.of(LostSpan):
            self.lost[span.lane] = merge([*self.lost[span.lane], (span.start, span.stop)])
        self.losses = self._causes_of_losses()
        self.trimmed: dict[int, int] = defaultdict(int)
        """lane -> everything below this index was trimmed at the end"""
        for trim in history.of(TrimmedTo):
            self.trimmed[trim.lane] = max(self.trimmed[trim.lane], trim.index)
        self._last_loss_us = max((lost.at for lost in history.of(FabricLost)), default=-1)
        self._opened_us: dict[str, list[int]] = defaultdict(list)  # by process
        for opened in history.of(SessionOpened):
            self._opened_us[opened.process].append(opened.at)
        self.known = {lane: sorted(at_index) for lane, at_index in self.claims.items()}
        self.stream_of = self._streams_of_sessions()
        self.numbered = self._numbers_of_sessions()
        """(lane, session) -> (sequence, number) of batches that readers found, sorted. They are equal before a loss"""

    def _collect_claims(self) -> None:
        for found in self.history.of(Delivered):
            claim = Claim(found.at, found.index, found.seq, f"reader {found.reader}", found.digest)
            self.claims[found.lane][found.index].append(claim)
        for ack in self.history.of(Settled):
            sent = self.first_sent.get((ack.stream, ack.number))
            if ack.verdict is Verdict.STORED and ack.index is not None and sent is not None:
                seq = -1 if ack.seq is None else ack.seq
                claim = Claim(ack.at, ack.index, seq, f"the ack to {ack.process}", sent.digest)
                self.claims[ack.lane][ack.index].append(claim)

    def _streams_of_sessions(self) -> dict[tuple[int, int], str]:
        """Map (lane, session) -> stream, from the answers to its publisher and from batches that readers found."""
        streams = {(opened.lane, opened.session): opened.stream for opened in self.history.of(SessionOpened)}
        for found in self.history.of(Delivered):
            batch = self.batch_of.get(found.digest)
            if batch is not None:
                streams.setdefault((found.lane, found.session), batch[0])
        return streams

    def _numbers_of_sessions(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        numbered: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        for found in self.history.of(Delivered):
            batch = self.batch_of.get(found.digest)
            if batch is not None:
                numbered[found.lane, found.session].add((found.session_seq, batch[1]))
        return {session: sorted(pairs) for session, pairs in numbered.items()}

    def _causes_of_losses(self) -> dict[Span, Loss]:
        """Assign each lost span to the last loss of the fabric, unless the cluster has stopped cleanly since."""
        losses: dict[Span, Loss] = {}
        lost_us: int | None = None
        for event in self.history.some(FabricLost, LostSpan, Stopped):
            if isinstance(event, FabricLost):
                lost_us = event.at
            elif isinstance(event, LostSpan):
                losses.setdefault((event.lane, event.start, event.stop), Loss(event.at, lost_us))
            elif isinstance(event, Stopped):
                for span in event.lost:
                    losses.setdefault(span, Loss(event.at, lost_us))
                lost_us = None if event.clean else lost_us
        return losses

    def went_us(self, lane: int, index: int) -> int | None:
        """Return when the fabric that held this index was lost; None if it is not lost, or without a cause."""
        here = [loss for (of, start, stop), loss in self.losses.items() if of == lane and start <= index < stop]
        return max((loss.cause_us for loss in here if loss.cause_us is not None), default=None)

    def given_after(self, ack: Settled, at: int) -> bool:
        """Whether an ack was not just in flight at this moment: its batch was sent, or its session opened, later."""
        sent = self.sent_by.get((ack.process, ack.number))
        return (sent is not None and sent.at > at) or any(at < us <= ack.at for us in self._opened_us[ack.process])

    def lasts(self, ack: Settled) -> bool:
        """Whether an acked batch must exist at the end: it was durable, or no fabric was lost after the ack."""
        return ack.ack == Ack.DURABLE or self.given_after(ack, self._last_loss_us)

    def ahead(self, lane: int, session: int, sequence: int) -> tuple[int, int]:
        """Return the smallest and the largest lead of a batch's number over its sequence.

        A session that continues after a loss closes the gap: the next batches get the sequences of the lost ones.
        """
        pairs = self.numbered.get((lane, session), [])
        position = bisect_left(pairs, (sequence, -1))
        around = pairs[max(0, position - 1) : position + 1]
        steps = [number - at for at, number in around] or [0]
        return min(steps), max(steps)

    def is_lost(self, lane: int, index: int) -> bool:
        """Whether the entry at this index was lost with the fabric. Its publisher may have stored it again."""
        spans = self.lost.get(lane)
        return spans is not None and inside(spans, index, index + 1)

    def is_kept(self, lane: int, index: int) -> bool:
        """Whether the entry at this index is on disks at the end, neither trimmed nor lost."""
        return lane in self.replicated and index >= self.trimmed[lane] and not self.is_lost(lane, index)

    def lost_until(self, lane: int, index: int) -> int | None:
        """Return the end of the lost span that contains this index; None if the index is not lost."""
        return next((stop for start, stop in self.lost.get(lane, []) if start <= index < stop), None)

    def index_of(self, lane: int) -> dict[int, int]:
        """Map digest -> its first index, for all batches known to be stored in a lane and not lost."""
        indices: dict[int, int] = {}
        for index in sorted(self.claims[lane]):
            if self.is_lost(lane, index):
                continue
            for claim in self.claims[lane][index]:
                indices.setdefault(claim.digest, index)
        return indices

    def may_be_trimmed(self, lane: int, sent: Sent) -> bool:
        """Whether a batch stored in a lane may be in the trimmed part: then no reader needs to have seen it there.

        Its index is above all batches that were known in the lane when it was first sent.
        """
        if not self.trimmed[lane]:
            return False
        before = (i for i, claims in self.claims[lane].items() if any(claim.at < sent.at for claim in claims))
        position = self.index_of(lane).get(sent.digest, max(before, default=-1) + 1)
        return position < self.trimmed[lane]

    def lanes_of(self, topic: int) -> list[int]:
        """Return the lanes of a topic, given the topic's own lane."""
        return [topic, *(made.lane for made in self.broker_lanes.values() if made.topic == topic)]

    def known_between(self, lane: int, start: int, stop: int) -> list[int]:
        """Return the indices in [start, stop) where a process ever found a batch."""
        known = self.known.get(lane, [])
        return known[bisect_left(known, start) : bisect_left(known, stop)]

    def partition_at(self, lane: int, index: int) -> int | None:
        """Return the partition of the batch at a known index."""
        for claim in self.claims[lane][index]:
            batch = self.batch_of.get(claim.digest)
            if batch is not None:
                return self.first_sent[batch].partition
        return None

    def name(self, digest: int) -> str:
        """Describe a batch in words."""
        batch = self.batch_of.get(digest)
        return "content never sent" if batch is None else f"batch {batch[1]} of {batch[0]}"


def ledger_of(history: History) -> Ledger:
    """Return the ledger of a history. It is computed once for all checkers, and again only if the history has grown."""
    known = history.worked_out.get("ledger")
    if isinstance(known, Ledger) and known.events == len(history):
        return known
    history.worked_out.clear()
    ledger = history.worked_out["ledger"] = Ledger(history)
    return ledger


def covered(history: History, lane: int) -> list[tuple[int, int]]:
    """Return the index spans that some unfiltered reader read without a gap, merged and sorted.

    Every batch stored in such a span was delivered to that reader, or P4 is broken. Lost spans are gaps.
    """
    ledger = ledger_of(history)
    if lane not in ledger.covered:
        ledger.covered[lane] = _covered(ledger.reads_of.get(lane, []))
    return ledger.covered[lane]


def _covered(reads: list[Read]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    position: dict[str, int | None] = {}
    filtered: dict[str, bool] = {}

    def advance(reader: str, index: int) -> None:
        was = position.get(reader)
        if was is not None and index > was and not filtered.get(reader):
            spans.append((was, index))
        position[reader] = index

    for event in reads:
        if isinstance(event, Moved):
            position[event.reader], filtered[event.reader] = event.index, event.partitions is not None
        elif isinstance(event, Delivered):
            if position.get(event.reader) is None:
                position[event.reader] = event.index
            advance(event.reader, event.index + 1)
        elif isinstance(event, Passed):
            advance(event.reader, event.index)
        elif event.session is None:
            was = position.get(event.reader)
            if was is None and event.kind == GapKind.END_OF_LANE.name:
                continue  # it began at the end; in a lane with losses that may be above the reported end
            if was is not None:
                advance(event.reader, max(event.start, was))
            position[event.reader] = max(event.stop, was or 0)  # the end of a lane with losses may be lower
    return merge(spans)


def merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping or touching spans."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def inside(spans: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether [start, stop) lies within one of the merged spans."""
    position = bisect_left(spans, (start + 1, 0)) - 1
    return position >= 0 and spans[position][0] <= start and stop <= spans[position][1]


def refused_streams(history: History) -> set[str]:
    """Return streams with possibly refused batches by reference: a wrong one, or one whose staged batch is gone."""
    named = history.of(ByReference)
    ledger = ledger_of(history) if named else None
    return {
        event.stream
        for event in named
        if ledger is not None and not (event.right and ledger.is_kept(event.lane, event.index))
    }
