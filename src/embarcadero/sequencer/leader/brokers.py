"""All broker incarnations that the sequencer knows: it takes their entries, answers them, closes and cleans them up.

`PendingSource` is one of them: entries come from its pending ring, answers go to its results ring. An entry is taken
only when it can be answered: the results ring has a slot for everything of this broker that is taken and not yet read.
A dead incarnation is closed: its frontiers line says so, the valid prefix of its ring is taken, whatever its frontier
says, and it gets no answers.

Lanes of brokers. Topics of orders 0 and 1 are written by brokers; sequencers only close the lanes of dead ones, and
look after their replicas. The line says "closing", flushed and fenced, before the lanes are read. What the incarnation
acks afterwards it acks only after looking at that line, so everything acked is in the valid contiguous entries that we
find. The ends go to the store and are never computed again; an incarnation that wakes up later may write on, but no
reader goes above the ends.
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
    """Sources by region handle."""

    def __init__(self, epoch: LedEpoch, directory: Directory) -> None:
        self._epoch, self._directory = epoch, directory
        self._fabric, self._steps = epoch.fabric, epoch.env.steps
        self.members: list[Member] = []
        self.sources: dict[int, PendingSource] = {}
        self._prefetched: dict[int, PendingSource] = {}  # made before it is known where they go on
        self.awaited = False
        self.problems: list[str] = []  # for the log
        self._pulses = Pulses[int]()
        self._rings_unchecked = False  # topics were deleted, or incarnations died, since the last look at their rings
        self._dead: dict[int, int] = {}  # handle of a dead incarnation -> bytes that it keeps, oldest first

    def prefetch(self, members: list[Member]) -> None:
        """Make what live incarnations will need, before it is known where each goes on."""
        for member in members:
            if member.state is MemberState.LIVE and self._fabric.exists(pending_region(member.region_prefix)):
                with suppress(FabricFull):  # later there may be memory
                    self._prefetched[member.handle] = self._source(member)

    def _source(self, member: Member) -> PendingSource:
        source = self._prefetched.pop(member.handle, None)
        if source is not None and source.member == member:
            return source
        if source is not None:
            self._fabric.remove(results_region(self._epoch.number, source.member))  # it has died since
        return PendingSource(self._epoch, member)

    def update(self, members: list[Member], progress: Mapping[int, BrokerProgress]) -> None:
        """Attach new incarnations where a predecessor left them, and close dead ones."""
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
        """The store's members have changed, or its topics: deleted ones may have left rings."""
        self.members = members
        self._rings_unchecked = True

    def _count_as_open(self, member: Member) -> None:
        """From now on this broker may ack what it writes to lanes of its own, and others may act on that.

        A broker that the sequencer does not know may not: it was closed in an earlier epoch, or it is too new.
        """
        line = frontier_offset(SequencerLine.BROKERS + member.handle)
        standing = FrontierWriter(self._epoch.frontiers, line + 8 * STANDING_WORD)
        if standing.value == Standing.UNHEARD:
            standing.advance(Standing.OPEN)

    def _attach(self, member: Member, progress: BrokerProgress) -> PendingSource | None:
        if member.state is MemberState.LIVE:
            self._count_as_open(member)
        if not self._fabric.exists(pending_region(member.region_prefix)):
            if member.state is MemberState.LIVE:
                self.awaited = True
            else:
                self._remove(member)  # it died before it began
            return None
        try:
            source = self._source(member)
            source.inherit(progress)
        except FabricFull:
            self.awaited = True  # its publishers wait until there is memory
            return None
        self.sources[member.handle] = source
        return source

    def look(self, now_us: int) -> list[Member]:
        """Have incarnations closed whose heart stands still: they are stopped, or stuck, and their clients wait.

        Being wrong costs them a new start: an incarnation that is closed acts no more.
        """
        live = {handle: source for handle, source in self.sources.items() if not source.closing}
        self._pulses.keep(set(live))
        late = [h for h, source in live.items() if self._pulses.silent_us(h, source.beats(), now_us) > _SILENT_US]
        self._pulses.keep(live.keys() - set(late))  # asked for once, and again if that was in vain
        silent = [live[handle].member for handle in late]
        for member in silent:
            self._directory.members.mark_dead(member.broker, member.incarnation)
        return silent

    def in_turn(self, turn: int) -> list[PendingSource]:
        """All sources that may have entries, beginning with another one each turn."""
        open_ = [source for source in self.sources.values() if not source.closed]
        first = turn % len(open_) if open_ else 0
        return open_[first:] + open_[:first] if first else open_

    def answer(self, answers: Answers) -> list[PendingSource]:
        """Write answers to the brokers they are for; those of closed incarnations are dropped."""
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
        """Ring brokers that have answers to relay, or readers to serve."""
        for source in self.sources.values():
            if source in answered or (grown and source.readers_wait()):
                self._epoch.env.bell.ring(source.member.region_prefix)

    # --- the dead -----------------------------------------------------------------------------------------------------
    def take_drained(self) -> list[PendingSource]:
        """Closing incarnations of which everything was taken just now."""
        drained = [source for source in self.sources.values() if source.drained and not source.closed]
        for source in drained:
            source.finish()
            self._dead[source.member.handle] = self._kept_bytes(source.member)
            self._rings_unchecked = True
        return drained

    def remove_stale_rings(self) -> None:
        """Remove the rings of deleted topics that dead incarnations left. A living broker removes its own."""
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
        """What a dead incarnation keeps for readers: its log, and the rings of its lanes."""
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
        """Let the oldest dead logs go while there are too many bytes of them, unless one of their batches waits.

        `may_go` is asked whether everything of an incarnation is where it has to be; `keeps` says whether readers have
        no other place to find its records.
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
        """Unlink a dead incarnation's regions, unless a successor of ours may be reading them."""
        if not self._directory.members.mark_removed(member.broker, member.incarnation, self._epoch.number):
            return
        self._steps.at(Step.BURIAL_TOLD)
        self._fabric.remove(pending_region(member.region_prefix))  # made last, gone first: with it all others are there
        for name in self._fabric.names():
            if writer_of(name) == member.region_prefix:
                self._fabric.remove(name)
        self._fabric.remove(results_region(self._epoch.number, member))
        self._steps.at(Step.BURIAL_DONE)


def _gone(source: PendingSource, member: Member | None) -> bool:
    """Whether a source's incarnation is not a member any more, or its handle has a new owner."""
    return member is None or member.incarnation != source.member.incarnation or member.broker != source.member.broker


def _runs(origins: npt.NDArray[np.uint16]) -> list[tuple[int, int, int]]:
    """Runs of equal handles, as (handle, start, stop). Entries are answered as they came: the runs are few."""
    bounds = [0, *((origins[1:] != origins[:-1]).nonzero()[0] + 1).tolist(), len(origins)]
    return [(int(origins[start]), start, stop) for start, stop in itertools.pairwise(bounds)]


class ResultsRead:
    """How far a broker has read the answers of an epoch."""

    def __init__(self, frontiers: Region) -> None:
        self._epoch = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_EPOCH))
        self._read = FrontierReader(frontiers, frontier_offset(BrokerLine.RESULTS_READ))

    def load(self, epoch: int) -> int:
        """Answers below are read. A broker restarts the count, then names the epoch: we load in the opposite order."""
        return self._read.load() if self._epoch.load() == epoch else 0


@dataclass(slots=True)
class BrokerProgress:
    """How far an earlier epoch came with one broker incarnation: it read the pending ring up to `start`."""

    start: int = 0
    settled: U64 = field(default_factory=lambda: np.empty(0, dtype=np.uint64))  # decided on, or waiting, beyond that
    answers: Entries = field(default_factory=lambda: np.empty(0, dtype=RESULT))  # not read by the broker yet


class PendingSource:
    """Reads one broker's pending ring and answers it."""

    def __init__(self, epoch: LedEpoch, member: Member) -> None:
        """`inherit` before anything else is asked of it."""
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
        self._read = 0  # our answers below are read, as far as we know
        self.next = 0  # the next pending entry to take
        self.requests = 0  # how many of the entries last taken were not batches
        self._settled: U64 = np.empty(0, dtype=np.uint64)
        self._end: int | None = None  # where the ring ends, once it is closing
        self.closed = False
        self.lanes_closed = False  # the ends of its lanes (orders 0 and 1) are in the store
        self._results = self._make_results(epoch.sizes.results_slots) if member.state is MemberState.LIVE else None

    def _make_results(self, slots: int) -> RingWriter:
        name, member = results_region(self._epoch, self.member), self.member
        return create_ring(
            self._fabric, name, RegionKind.RESULTS, RESULT, slots, "position", member.broker, member.incarnation
        )

    def inherit(self, progress: BrokerProgress) -> None:
        """Go on where an earlier epoch was, and repeat the answers that were not read."""
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
        """How many published entries can be taken now, `limit` at most."""
        published = self._pending.frontier.load() if self._end is None else self._end
        if published <= self.next:
            return 0
        count = min(published - self.next, limit, self._pending.slots, self._capacity(limit, unresolved))
        return max(0, count)

    def slots(self, count: int) -> list[Entries]:
        """The next `count` entries as they are in memory, unchecked."""
        return self._pending.parts(self.next, self.next + count)

    def line(self) -> Line:
        """The next entry as plain numbers, unchecked."""
        return self._pending.line(self.next)

    def pass_over(self, count: int) -> None:
        """The next `count` entries were taken as they are in memory; none of them was a request."""
        self.next, self.requests = self.next + count, 0

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

    def _capacity(self, wanted: int, unresolved: int) -> int:
        """How many more entries can be answered."""
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
        """Publish that the incarnation is closing; a `whole` ring is still read to its valid end."""
        self._standing.restart(Standing.CLOSING)
        self._fabric.fence()
        self._steps.at(Step.CLOSING_SAID)
        self._end = self._pending.valid_end(self.next) if whole else self.next
        self._results = None
        self._steps.at(Step.CLOSING_READ)

    def close_lanes(self, directory: Directory) -> list[str]:
        """Record where the lanes of this closing incarnation end. Returns what is wrong with them, for the log."""
        self.lanes_closed, problems = close_lanes(self._fabric, directory, self.member, self._epoch, self._steps)
        return problems

    def finish(self) -> None:
        """Everything was taken from it: it is closed."""
        self.closed = True

    @property
    def closing(self) -> bool:
        """Whether it is closing."""
        return self._end is not None

    @property
    def drained(self) -> bool:
        """Closing, and everything was taken."""
        return self._end is not None and self.next >= self._end


def take_plain(offers: list[tuple[PendingSource, int]]) -> Entries | None:
    """All that is offered, checked at once, if it is valid batches only; None when each source needs a closer look."""
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
    """Record where the lanes of a closing incarnation end; and what is wrong with them, for the log.

    False: a later sequencer has to do it.
    """
    whose, problems = (member.broker, member.incarnation), list[str]()
    open_ = [lane for lane in directory.lanes.all() if lane.open and (lane.broker, lane.incarnation) == whose]
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
            problems.append(f"{lane.region}: entry {valid} is below the frontier {published} and not valid")
    return msgspec.structs.replace(lane, end=end, end_seq=end_seq)
