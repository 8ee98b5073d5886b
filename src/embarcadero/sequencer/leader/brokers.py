"""All broker incarnations that the sequencer knows: it takes their entries, answers them, closes and cleans them up.

`PendingSource` is one incarnation: entries come from its pending ring, answers go to its results ring. An entry is
taken only when it can be answered. The results ring has a slot for every entry of this broker that is taken and whose
answer the broker has not read. A dead incarnation is closed: "closing" is published in its frontiers line, the valid
prefix of its ring is taken, whatever its frontier is, and it gets no answers.

Lanes of brokers. Topics of orders 0 and 1 are written by brokers. Sequencers only close the lanes of dead brokers, and
manage the ranges of these lanes. "Closing" is published, flushed and fenced, before the lanes are read. Afterwards the
incarnation acks only after checking that line, so every acked entry is among the valid contiguous entries that we find.
The ends go to the store and are never computed again. An incarnation that wakes up later may still write, but no reader
goes above the ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import FabricFull
from embarcadero.fabric.layout import (
    ORDER,
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
    seal,
    sealed,
)
from embarcadero.fabric.lines import FrontierReader, FrontierWriter, RingWriter, attach_ring, create_ring
from embarcadero.fabric.region import (
    Fabric,
    Region,
    broker_frontiers_region,
    is_broker_lane,
    log_region,
    pending_region,
    results_region,
    writer_of,
)
from embarcadero.limits import BROKER_SILENT_S
from embarcadero.liveness import Pulses
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.order.batches import words
from embarcadero.sequencer.order.lane import LedEpoch
from embarcadero.sequencer.order.sessions import U64
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, Member, MemberState, TopicLane

_RUNS_MAX: Final = 256
_SILENT_US: Final = int(BROKER_SILENT_S * 1_000_000)

Answers = list[tuple[npt.NDArray[np.uint16], Entries]]


class BrokerIncarnations:
    """All broker incarnations, each with its `PendingSource`, by region handle."""

    def __init__(self, epoch: LedEpoch, directory: Directory) -> None:
        self._epoch, self._directory = epoch, directory
        self._fabric, self._steps = epoch.fabric, epoch.env.steps
        self.members: list[Member] = []
        self.sources: dict[int, PendingSource] = {}
        self._prefetched: dict[int, PendingSource] = {}  # made before their start positions are known
        self.awaited = False
        self.problems: list[str] = []  # for the log
        self._pulses = Pulses[int]()
        self._rings_unchecked = False  # topics were deleted, or incarnations died, since the last check of their rings
        self._dead: dict[int, int] = {}  # handle of a dead incarnation -> bytes that it keeps, oldest first

    def prefetch(self, members: list[Member]) -> None:
        """Make the sources of live incarnations, before their start positions are known."""
        for member in members:
            if member.state is MemberState.LIVE and self._fabric.exists(pending_region(member.region_prefix)):
                with suppress(FabricFull):  # there may be memory later
                    self._prefetched[member.handle] = self._source(member)

    def _source(self, member: Member) -> PendingSource:
        source = self._prefetched.pop(member.handle, None)
        if source is not None and source.member == member:
            return source
        if source is not None:
            self._fabric.remove(results_region(self._epoch.number, source.member))  # it has died meanwhile
        return PendingSource(self._epoch, member)

    def update(self, members: list[Member], progress: Mapping[int, BrokerProgress]) -> None:
        """Attach new incarnations at the predecessor's progress, and close dead ones."""
        self.members, self.awaited = members, False
        known = {member.handle: member for member in members}
        for handle in [h for h, s in self.sources.items() if _gone(s, known.get(h))]:
            del self.sources[handle]
            self._dead.pop(handle, None)
        for member in members:
            source = self.sources.get(member.handle)
            if source is None:
                source = self._attach(member, progress.get(member.handle) or BrokerProgress())
            if source is not None and member.state is MemberState.DEAD:
                if not source.closing:
                    source.close(whole=True)
                if not source.lanes_closed:
                    self.problems += source.close_lanes(self._directory)

    def learn(self, members: list[Member]) -> None:
        """Note that members or topics in the store have changed. Deleted topics may have left rings behind."""
        self.members = members
        self._rings_unchecked = True

    def _count_as_open(self, member: Member) -> None:
        """Allow a broker to ack entries of its own lanes, and other processes to act on them.

        A broker that the sequencer does not know may not ack: an earlier epoch closed it, or it is too new.
        """
        line = frontier_offset(SequencerLine.BROKERS + member.handle)
        standing = FrontierWriter(self._epoch.frontiers, line + 8 * STANDING_WORD)
        if standing.value == Standing.UNLISTED:
            standing.advance(Standing.OPEN)

    def _attach(self, member: Member, progress: BrokerProgress) -> PendingSource | None:
        if member.state is MemberState.LIVE:
            self._count_as_open(member)
        if not self._fabric.exists(pending_region(member.region_prefix)):
            if member.state is MemberState.LIVE:
                self.awaited = True
            else:
                self._remove(member)  # it died before it had started
            return None
        try:
            source = self._source(member)
            source.inherit(progress)
        except FabricFull:
            self.awaited = True  # its publishers wait for memory
            return None
        self.sources[member.handle] = source
        return source

    def look(self, now_us: int) -> list[Member]:
        """Mark incarnations dead whose heartbeat has stopped: they are paused or stuck, and their clients wait.

        A wrong guess costs the broker a restart: a closed incarnation acts no more.
        """
        live = {handle: source for handle, source in self.sources.items() if not source.closing}
        self._pulses.keep(set(live))
        late = [h for h, source in live.items() if self._pulses.silent_us(h, source.beats(), now_us) > _SILENT_US]
        self._pulses.keep(live.keys() - set(late))  # mark once; the timeout starts again if that has no effect
        silent = [live[handle].member for handle in late]
        for member in silent:
            self._directory.members.mark_dead(member.broker, member.incarnation)
        return silent

    def in_turn(self, turn: int) -> list[PendingSource]:
        """All sources that may have entries, starting with a different one each turn."""
        open_ = [source for source in self.sources.values() if not source.closed]
        first = turn % len(open_) if open_ else 0
        return open_[first:] + open_[:first] if first else open_

    def answer(self, answers: Answers) -> list[PendingSource]:
        """Write answers to their brokers. Answers for closed incarnations are dropped."""
        if not answers:
            return []
        results = answers[0][1] if len(answers) == 1 else join([results for _, results in answers])
        origins = answers[0][0] if len(answers) == 1 else np.concatenate([origins for origins, _ in answers])
        runs = _runs(origins)
        if len(runs) > _RUNS_MAX:
            order = np.argsort(origins, kind="stable")
            results, runs = pick(results, order), _runs(origins[order])
        positions, written = words(results)[:, 0], dict[int, int]()
        mine = []
        for handle, start, stop in runs:
            source = self.sources.get(handle)
            if source is not None and not source.closing:
                first = written.get(handle, source.next_answer)
                written[handle] = first + stop - start
                positions[start:stop] = np.arange(first, first + stop - start, dtype=np.uint64)
                mine.append((source, start, stop))
        seal(results)
        for source, start, stop in mine:
            source.answer(results[start:stop])
        return [self.sources[handle] for handle in written]

    def wake(self, answered: list[PendingSource], grown: bool) -> None:
        """Wake brokers that have answers to relay, or readers to serve."""
        for source in self.sources.values():
            if source in answered or (grown and source.readers_wait()):
                self._epoch.env.bell.ring(source.member.region_prefix)

    # --- dead incarnations --------------------------------------------------------------------------------------------
    def take_drained(self) -> list[PendingSource]:
        """Finish the closing incarnations whose entries were all taken just now, and return them."""
        drained = [source for source in self.sources.values() if source.drained and not source.closed]
        for source in drained:
            source.finish()
            self._dead[source.member.handle] = self._kept_bytes(source.member)
            self._rings_unchecked = True
        return drained

    def remove_stale_rings(self) -> None:
        """Remove rings of deleted topics that belong to dead incarnations. A live broker removes its own."""
        if not self._rings_unchecked:
            return
        if self._dead:
            lanes = {lane.region for lane in self._directory.lanes.all()}
            dead = [member for member in self.members if member.handle in self._dead]
            for name in self._fabric.names():
                if name not in lanes and any(is_broker_lane(name, member.region_prefix) for member in dead):
                    self._fabric.remove(name)
            for member in dead:
                self._dead[member.handle] = self._kept_bytes(member)
        self._rings_unchecked = False

    def _kept_bytes(self, member: Member) -> int:
        """Bytes that a dead incarnation keeps for readers: its log, and the rings of its lanes."""
        kept = 0
        for name in self._fabric.names():
            if name == log_region(member.region_prefix) or is_broker_lane(name, member.region_prefix):
                region = self._fabric.attach(name)
                kept += region.shape.size
                region.close()
        return kept

    def clean_up(
        self, unresolved: npt.NDArray[np.int64], may_go: Callable[[Member], bool] = lambda _: True, keeps: bool = True
    ) -> None:
        """Remove the oldest dead logs while they have too many bytes, unless one of their batches waits.

        `may_go` checks that all required data of an incarnation is on disks. `keeps` is true while readers can find
        records only in these logs.
        """
        for handle in list(self._dead):
            if sum(self._dead.values()) <= (self._epoch.sizes.dead_log_bytes if keeps else -1):
                return
            member = next((m for m in self.members if m.handle == handle), None)
            if member is None or member.state is not MemberState.DEAD or unresolved[handle]:
                continue
            if self.sources[handle].lanes_closed and may_go(member):
                self._remove(member)
                del self._dead[handle], self.sources[handle]

    def _remove(self, member: Member) -> None:
        """Unlink the regions of a dead incarnation, unless a successor of ours may be reading them."""
        if not self._directory.members.mark_removed(member.broker, member.incarnation, self._epoch.number):
            return
        self._steps.at(Step.BURIAL_TOLD)
        self._fabric.remove(pending_region(member.region_prefix))  # made last, removed first: while it exists, all do
        for name in self._fabric.names():
            if writer_of(name) == member.region_prefix:
                self._fabric.remove(name)
        self._fabric.remove(results_region(self._epoch.number, member))
        self._steps.at(Step.BURIAL_DONE)


def _gone(source: PendingSource, member: Member | None) -> bool:
    """Whether a source's incarnation is no longer a member, or its handle has a new owner."""
    return member is None or member.incarnation != source.member.incarnation or member.broker != source.member.broker


def _runs(origins: npt.NDArray[np.uint16]) -> list[tuple[int, int, int]]:
    """Runs of equal handles, as (handle, start, stop). Entries are answered in arrival order, so the runs are few."""
    bounds = [0, *((origins[1:] != origins[:-1]).nonzero()[0] + 1).tolist(), len(origins)]
    return [(int(origins[start]), start, stop) for start, stop in itertools.pairwise(bounds)]


class ResultsRead:
    """How far a broker has read the answers of an epoch."""

    def __init__(self, frontiers: Region) -> None:
        self._epoch = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH))
        self._read = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_READ))

    def load(self, epoch: int) -> int:
        """Load the end of the answers that are read. A broker restarts the count, then names the epoch.

        We load the two in the opposite order.
        """
        return self._read.load() if self._epoch.load() == epoch else 0


@dataclass(slots=True)
class BrokerProgress:
    """Progress of an earlier epoch with one broker incarnation: it read the pending ring up to `start`."""

    start: int = 0
    settled: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))  # at or above `start`: decided, waiting
    answers: Entries = field(default_factory=lambda: np.empty(0, dtype=RESULT))  # not yet read by the broker


class PendingSource:
    """Reads one broker's pending ring and answers it."""

    def __init__(self, epoch: LedEpoch, member: Member) -> None:
        """Attach the broker's regions. Call `inherit` before any other method."""
        self.member, self._epoch = member, epoch.number
        fabric, frontiers = epoch.fabric, epoch.frontiers
        self._fabric, self._steps = fabric, epoch.env.steps
        prefix, line = member.region_prefix, frontier_offset(SequencerLine.BROKERS + member.handle)
        self._pending = attach_ring(fabric, pending_region(prefix), PENDING)
        theirs = fabric.attach(broker_frontiers_region(prefix))
        self._results_read = ResultsRead(theirs)
        self._reads_waiting = FrontierReader(theirs, frontier_offset(BrokerLine.READS_WAITING))
        self._heartbeat = FrontierReader(theirs, frontier_offset(BrokerLine.HEARTBEAT))
        self._read_through = FrontierWriter(frontiers, line)
        self._standing = FrontierWriter(frontiers, line + 8 * STANDING_WORD)
        self._read = 0  # the broker has read our answers below this, as far as we know
        self.next = 0  # the next pending entry to take
        self.requests = 0  # number of entries in the last take that were not batches
        self._settled: U64 = np.empty(0, dtype=np.uint64)
        self._end: int | None = None  # end of the ring, once it is closing
        self.closed = False
        self.lanes_closed = False  # the ends of its lanes (orders 0 and 1) are in the store
        self._results = self._make_results(epoch.sizes.results_slots) if member.state is MemberState.LIVE else None

    def _make_results(self, slots: int) -> RingWriter:
        name, member = results_region(self._epoch, self.member), self.member
        return create_ring(
            self._fabric, name, RegionKind.RESULTS, RESULT, slots, "position", member.broker, member.incarnation
        )

    def inherit(self, progress: BrokerProgress) -> None:
        """Continue at the progress of an earlier epoch, and repeat the answers that were not read."""
        self.next, self._settled = progress.start, progress.settled
        self._read_through.restart(progress.start)
        if self._results is None or not len(progress.answers):
            return
        if 2 * len(progress.answers) > self._results.slots:
            self._fabric.remove(results_region(self._epoch, self.member))  # no broker reads it yet
            self._results = self._make_results(1 << (2 * len(progress.answers)).bit_length())
        self._results.write(progress.answers, 0)
        self._results.publish()

    # --- taking -------------------------------------------------------------------------------------------------------
    def offer(self, limit: int, unresolved: int) -> int:
        """Count the published entries that can be taken now, at most `limit`."""
        published = self._pending.frontier.load() if self._end is None else self._end
        if published <= self.next:
            return 0
        count = min(published - self.next, limit, self._pending.slots, self._capacity(limit, unresolved))
        return max(0, count)

    def slots(self, count: int) -> list[Entries]:
        """View the next `count` entries in memory, unchecked."""
        return self._pending.parts(self.next, self.next + count)

    def line(self) -> Line:
        """The next entry as plain numbers, unchecked."""
        return self._pending.line(self.next)

    def pass_over(self, count: int) -> None:
        """Move past the next `count` entries, which were taken from memory and are all batches."""
        self.next, self.requests = self.next + count, 0

    @property
    def plain(self) -> bool:
        """Whether no entry has to be skipped as settled by an earlier epoch."""
        return not len(self._settled)

    def take(self, count: int, requests: int) -> tuple[Entries, bool]:
        """Take at most `count` entries, of which at most `requests` are not batches.

        The second result is false when the ring has an entry that is not valid.
        """
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

    def _capacity(self, wanted: int, unresolved: int) -> int:
        """Count how many more entries can be answered."""
        if self._results is None:
            return wanted
        capacity = self._results.slots - (self._results.next - self._read) - unresolved
        if capacity < wanted:
            read = self._results_read.load(self._epoch)
            if self._read < read <= self._results.next:
                capacity, self._read = capacity + read - self._read, read
        return capacity

    def readers_wait(self) -> bool:
        """Whether a reader waits at this broker for the order to grow."""
        return not self.closing and self._reads_waiting.load() > 0

    def beats(self) -> int:
        """The broker's heartbeat count."""
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
        """Publish the answers to the broker."""
        if self._results is not None:
            self._results.publish()

    def give_free(self) -> None:
        """Free the slots of all taken entries, which are recorded by now: the broker may reuse them."""
        self._read_through.advance(max(self.next, self._read_through.value))

    # --- closing ------------------------------------------------------------------------------------------------------
    def close(self, whole: bool) -> None:
        """Publish that the incarnation is closing; a `whole` ring is still read to its valid end."""
        self._standing.restart(Standing.CLOSING)
        self._fabric.fence()
        self._steps.at(Step.CLOSING_SAID)
        self._end = self._pending.valid_end(self.next) if whole else self.next
        self._results = None
        self._steps.at(Step.CLOSING_READ)

    def close_lanes(self, directory: Directory) -> list[str]:
        """Record the ends of this closing incarnation's lanes. Returns problems with them, for the log."""
        self.lanes_closed, problems = close_lanes(self._fabric, directory, self.member, self._epoch, self._steps)
        return problems

    def finish(self) -> None:
        """Close the source: all of its entries were taken."""
        self.closed = True

    @property
    def closing(self) -> bool:
        """Whether the incarnation is closing."""
        return self._end is not None

    @property
    def drained(self) -> bool:
        """Whether it is closing and all of its entries were taken."""
        return self._end is not None and self.next >= self._end


def take_plain(offers: list[tuple[PendingSource, int]]) -> Entries | None:
    """Take all offered entries, checked together, if they are valid batches only.

    Returns None when the sources must be taken one by one.
    """
    entries = join([part for source, count in offers for part in source.slots(count)])
    spans = [np.arange(source.next, source.next + count, dtype=np.uint64) for source, count in offers]
    right = entries["index"] == (spans[0] if len(spans) == 1 else np.concatenate(spans))
    right &= entries["kind"] == BATCH_KIND
    if not (every(right) and every(sealed(entries)) and all(source.plain for source, _ in offers)):
        return None
    at = 0
    for source, count in offers:
        source.pass_over(count)
        entries["origin"][at : at + count] = source.member.handle
        at += count
    return entries


def close_lanes(
    fabric: Fabric, directory: Directory, member: Member, epoch: int, steps: Steps = NO_STEPS
) -> tuple[bool, list[str]]:
    """Record the ends of a closing incarnation's lanes. Also returns problems with them, for the log.

    The first result is false when a later sequencer has to do it.
    """
    owner, problems = (member.broker, member.incarnation), list[str]()
    open_ = [lane for lane in directory.lanes.all() if lane.open and (lane.broker, lane.incarnation) == owner]
    ends = [_closed(fabric, lane, problems) for lane in open_]
    if not ends:
        return True, problems
    steps.at(Step.CLOSING_LANES_READ)
    recorded = directory.lanes.close(ends, epoch)
    steps.at(Step.CLOSING_LANES_TOLD)
    return recorded, problems


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
            problems.append(f"{lane.region}: entry {valid} is below the frontier {published} and is not valid")
    return msgspec.structs.replace(lane, end=end, end_seq=end_seq)
