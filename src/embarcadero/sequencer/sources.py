"""One broker incarnation as the sequencer sees it: entries come from its pending ring, answers go to its results ring.

An entry is taken only when there is room for its answer: the results ring has a place for everything of this broker
that is taken and not yet read. A dead incarnation is closed: it is told so, the valid prefix of its ring is taken,
whatever its frontier says, and it gets no answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.frontier import FrontierReader, FrontierWriter
from embarcadero.fabric.layout import (
    PENDING,
    RESULT,
    STANDING_WORD,
    BrokerLine,
    Entries,
    Line,
    RegionKind,
    SequencerLine,
    Standing,
    every,
    frontier_offset,
    join,
    pick,
    sealed,
)
from embarcadero.fabric.names import broker_frontiers_region, pending_region, results_region
from embarcadero.fabric.region import Fabric, Region
from embarcadero.fabric.ring import RingWriter, attach_ring, create_ring
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, Member, MemberState

U64 = npt.NDArray[np.uint64]
_NONE: Final[Entries] = np.empty(0, dtype=PENDING)


class ResultsRead:
    """How far a broker has read the answers of an epoch."""

    def __init__(self, frontiers: Region) -> None:
        self._epoch = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH))
        self._read = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_READ))

    def load(self, epoch: int) -> int:
        """Answers below are read. A broker restarts the count, then names the epoch: we load in the opposite order."""
        return self._read.load() if self._epoch.load() == epoch else 0


@dataclass(slots=True)
class BrokerLegacy:
    """What an earlier epoch left of one broker incarnation: it read the pending ring up to `start`."""

    start: int = 0
    settled: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))  # decided on, or waiting, beyond that
    answers: Entries = field(default_factory=lambda: np.empty(0, dtype=RESULT))  # not read by the broker yet


class Source:
    """Reads one broker's pending ring and answers it."""

    def __init__(
        self,
        fabric: Fabric,
        epoch: int,
        member: Member,
        sizes: FabricSizes,
        frontiers: Region,
        steps: Steps = NO_STEPS,
    ) -> None:
        """`inherit` before anything else is asked of it."""
        self.member, self._epoch, self._fabric, self._steps = member, epoch, fabric, steps
        prefix, line = member.region_prefix, frontier_offset(SequencerLine.BROKERS + member.handle)
        self._pending = attach_ring(fabric, pending_region(prefix), PENDING)
        theirs = fabric.attach(broker_frontiers_region(prefix))
        self._results_read = ResultsRead(theirs)
        self._reads_waiting = FrontierReader(theirs, frontier_offset(BrokerLine.READS_WAITING))
        self._heartbeat = FrontierReader(theirs, frontier_offset(BrokerLine.HEARTBEAT))
        self._read_through = FrontierWriter(frontiers, line)
        self._standing = FrontierWriter(frontiers, line + 8 * STANDING_WORD)
        self._read = 0  # our answers below are read, as far as we know
        self.next = 0  # the next pending entry to take
        self.requests = 0  # how many of the entries last taken were not batches
        self._settled: U64 = np.empty(0, dtype=np.uint64)
        self._end: int | None = None  # where the ring ends, once it is closing
        self.closed = False
        self.lanes_closed = False  # the ends of its lanes (orders 0 and 1) are in the store
        self._results = self._make_results(sizes.results_slots) if member.state is MemberState.LIVE else None

    def _make_results(self, slots: int) -> RingWriter:
        name, member = results_region(self._epoch, self.member), self.member
        return create_ring(
            self._fabric, name, RegionKind.RESULTS, RESULT, slots, "position", member.broker, member.incarnation
        )

    def inherit(self, legacy: BrokerLegacy) -> None:
        """Go on where an earlier epoch was, and repeat the answers that were not read."""
        self.next, self._settled = legacy.start, legacy.settled
        self._read_through.restart(legacy.start)
        if self._results is None or not len(legacy.answers):
            return
        if 2 * len(legacy.answers) > self._results.slots:
            self._fabric.remove(results_region(self._epoch, self.member))  # nobody reads it yet
            self._results = self._make_results(1 << (2 * len(legacy.answers)).bit_length())
        self._results.write(legacy.answers, 0)
        self._results.publish()

    # --- taking -------------------------------------------------------------------------------------------------------
    def offer(self, limit: int, unresolved: int) -> int:
        """How many published entries can be taken now, `limit` at most."""
        published = self._pending.frontier.load() if self._end is None else self._end
        if published <= self.next:
            return 0
        count = min(published - self.next, limit, self._pending.slots, self._room(limit, unresolved))
        return max(0, count)

    def slots(self, count: int) -> list[Entries]:
        """The next `count` entries as they are in memory, unchecked."""
        return self._pending.parts(self.next, self.next + count)

    def line(self) -> Line:
        """The next entry as plain numbers, unchecked."""
        return self._pending.line(self.next)

    @property
    def plain(self) -> bool:
        """Whether no entry needs to be left out because an earlier epoch has settled it."""
        return not len(self._settled)

    def take(self, count: int, requests: int) -> tuple[Entries, bool]:
        """At most `count` entries, `requests` of them not batches; and whether the ring is as it should be."""
        entries = self._pending.read(self.next, self.next + count)
        whole = len(entries) == count
        others = np.flatnonzero(entries["kind"] != BATCH_KIND)
        self.requests = min(len(others), requests)
        if len(others) > requests:
            entries = entries[: others[requests]]
        self.next += len(entries)
        entries["origin"] = self.member.handle
        if len(self._settled):
            entries = pick(entries, ~np.isin(entries["index"], self._settled))
            self._settled = self._settled[self._settled >= self.next]
        return entries, whole

    def _room(self, wanted: int, unresolved: int) -> int:
        """For how many more entries there is room for an answer."""
        if self._results is None:
            return wanted
        room = self._results.slots - (self._results.next - self._read) - unresolved
        if room < wanted:
            read = self._results_read.load(self._epoch)
            if self._read < read <= self._results.next:
                room, self._read = room + read - self._read, read
        return room

    def readers_wait(self) -> bool:
        """Whether somebody waits at this broker for the order to grow."""
        return not self.closing and self._reads_waiting.load() > 0

    def beats(self) -> int:
        """How often its heart has beaten."""
        return self._heartbeat.load()

    # --- answering ----------------------------------------------------------------------------------------------------
    @property
    def next_answer(self) -> int:
        """The position of the next answer."""
        return self._results.next if self._results is not None else 0

    def answer(self, results: Entries) -> None:
        """Write and flush answers that have their positions and checks, without publishing them."""
        if self._results is not None:
            self._results.write_sealed(results, self._read)

    def answer_line(self, result: Line) -> None:
        """Write and flush one answer, without publishing it."""
        if self._results is not None:
            self._results.write_line(result, self._read)

    def publish(self) -> None:
        """Let the broker see its answers."""
        if self._results is not None:
            self._results.publish()

    def give_free(self) -> None:
        """All that was taken is recorded: the broker may reuse the slots."""
        self._read_through.advance(max(self.next, self._read_through.value))

    # --- closing ------------------------------------------------------------------------------------------------------
    def close(self, whole: bool) -> None:
        """Tell the incarnation that it is over; a `whole` ring is still read to its valid end."""
        self._standing.restart(Standing.CLOSING)
        self._fabric.fence()
        self._steps.at(Step.CLOSING_SAID)
        self._end = self._pending.valid_end(self.next) if whole else self.next
        self._results = None
        self._steps.at(Step.CLOSING_READ)

    @property
    def closing(self) -> bool:
        """Whether it was told to close."""
        return self._end is not None

    @property
    def drained(self) -> bool:
        """Closing, and everything was taken."""
        return self._end is not None and self.next >= self._end


def take_plain(offers: list[tuple[Source, int]]) -> Entries | None:
    """All that is offered, checked at once, if it is valid batches only; None when each source needs a closer look."""
    entries = join([part for source, count in offers for part in source.slots(count)])
    spans = [np.arange(source.next, source.next + count, dtype=np.uint64) for source, count in offers]
    right = entries["index"] == (spans[0] if len(spans) == 1 else np.concatenate(spans))
    right &= entries["kind"] == BATCH_KIND
    if not (every(right) and every(sealed(entries)) and all(source.plain for source, _ in offers)):
        return None
    at = 0
    for source, count in offers:
        source.next, source.requests = source.next + count, 0
        entries["origin"][at : at + count] = source.member.handle
        at += count
    return entries
