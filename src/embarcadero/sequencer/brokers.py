"""All broker incarnations that the sequencer knows: who is attached, who is closing, whose regions may go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import FabricFull
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.layout import (
    STANDING_WORD,
    Entries,
    SequencerLine,
    Standing,
    frontier_offset,
    join,
    pick,
    seal,
)
from embarcadero.fabric.names import is_broker_lane, log_region, pending_region, results_region, writer_of
from embarcadero.fabric.region import Fabric, Region
from embarcadero.limits import BROKER_SILENT_S
from embarcadero.placement.directory import Directory
from embarcadero.sequencer.broker_lanes import close_lanes
from embarcadero.sequencer.decisions import words
from embarcadero.sequencer.pulses import Pulses
from embarcadero.sequencer.sources import BrokerLegacy, Source
from embarcadero.steps import Step
from embarcadero.types import Member, MemberState

_RUNS_MAX: Final = 256
_SILENT_US: Final = int(BROKER_SILENT_S * 1_000_000)

Answers = list[tuple[npt.NDArray[np.uint16], Entries]]


class Brokers:
    """Sources by region handle."""

    def __init__(
        self, fabric: Fabric, epoch: int, sizes: FabricSizes, frontiers: Region, directory: Directory,
        steps: Steps = NO_STEPS,
    ) -> None:  # fmt: skip
        self._fabric, self._epoch, self._sizes, self._frontiers = fabric, epoch, sizes, frontiers
        self._directory, self._steps = directory, steps
        self.members: list[Member] = []
        self.sources: dict[int, Source] = {}
        self._early: dict[int, Source] = {}  # made before it is known where they go on
        self.awaited = False
        self.problems: list[str] = []  # for the log
        self._pulses = Pulses[int]()
        self.rings_unchecked = False  # topics were deleted, or incarnations died, since the last look at their rings
        self._dead: dict[int, int] = {}  # handle of a dead incarnation -> bytes that it keeps, oldest first

    def foresee(self, members: list[Member]) -> None:
        """Make what live incarnations will need, before it is known where each goes on."""
        for member in members:
            if member.state is MemberState.LIVE and self._fabric.exists(pending_region(member.region_prefix)):
                with suppress(FabricFull):  # later there may be room
                    self._early[member.handle] = self._source(member)

    def _source(self, member: Member) -> Source:
        early = self._early.pop(member.handle, None)
        if early is not None and early.member == member:
            return early
        if early is not None:
            self._fabric.remove(results_region(self._epoch, early.member))  # it has died since
        return Source(self._fabric, self._epoch, member, self._sizes, self._frontiers, self._steps)

    def update(self, members: list[Member], legacies: dict[int, BrokerLegacy]) -> None:
        """Attach new incarnations, close dead ones."""
        self.members, self.awaited = members, False
        known = {member.handle: member for member in members}
        for handle in [h for h, s in self.sources.items() if _gone(s, known.get(h))]:
            del self.sources[handle]
            self._dead.pop(handle, None)
        for member in members:
            source = self.sources.get(member.handle)
            if source is None:
                source = self._attach(member, legacies.get(member.handle) or BrokerLegacy())
            if source is not None and member.state is MemberState.DEAD:
                if not source.closing:
                    source.close(whole=True)
                if not source.lanes_closed:
                    closed = close_lanes(self._fabric, self._directory, member, self._epoch, self._steps)
                    source.lanes_closed = closed[0]
                    self.problems += closed[1]

    def _count_as_open(self, member: Member) -> None:
        """From now on it may ack what it writes to lanes of its own, and others may act on that.

        Nobody may who was not heard of: it was closed in an earlier epoch and is forgotten since, or it is too new.
        """
        line = frontier_offset(SequencerLine.BROKERS + member.handle)
        standing = FrontierWriter(self._frontiers, line + 8 * STANDING_WORD)
        if standing.value == Standing.UNHEARD:
            standing.advance(Standing.OPEN)

    def _attach(self, member: Member, legacy: BrokerLegacy) -> Source | None:
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
            source.inherit(legacy)
        except FabricFull:
            self.awaited = True  # its publishers wait until there is room
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
            self._directory.mark_dead(member.broker, member.incarnation)
        return silent

    def in_turn(self, turn: int) -> list[Source]:
        """All sources that may have entries, beginning with another one each turn."""
        open_ = [source for source in self.sources.values() if not source.closed]
        first = turn % len(open_) if open_ else 0
        return open_[first:] + open_[:first] if first else open_

    def answer(self, answers: Answers) -> list[Source]:
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

    # --- the dead -----------------------------------------------------------------------------------------------------
    def take_drained(self) -> list[Source]:
        """Closing incarnations of which everything was taken just now."""
        drained = [source for source in self.sources.values() if source.drained and not source.closed]
        for source in drained:
            source.closed = True
            self._dead[source.member.handle] = self._kept_bytes(source.member)
            self.rings_unchecked = True
        return drained

    def remove_stale_rings(self) -> None:
        """Remove the rings of deleted topics that dead incarnations left. A living broker removes its own."""
        if not self.rings_unchecked:
            return
        if self._dead:
            lanes = {lane.region for lane in self._directory.lanes()}
            dead = [member for member in self.members if member.handle in self._dead]
            for name in self._fabric.names():
                if name not in lanes and any(is_broker_lane(name, member.region_prefix) for member in dead):
                    self._fabric.remove(name)
            for member in dead:
                self._dead[member.handle] = self._kept_bytes(member)
        self.rings_unchecked = False

    def _kept_bytes(self, member: Member) -> int:
        """What a dead incarnation keeps for readers: its log, and the rings of its lanes."""
        kept = 0
        for name in self._fabric.names():
            if name == log_region(member.region_prefix) or is_broker_lane(name, member.region_prefix):
                region = self._fabric.attach(name)
                kept += region.shape.size
                region.close()
        return kept

    def bury(
        self, unresolved: npt.NDArray[np.int64], may_go: Callable[[Member], bool] = lambda _: True, keeps: bool = True
    ) -> None:
        """Let the oldest dead logs go while there are too many bytes of them, unless one of their batches waits.

        `may_go` is asked whether everything of an incarnation is where it has to be; `keeps` says whether readers have
        no other place to find its records.
        """
        for handle in list(self._dead):
            if sum(self._dead.values()) <= (self._sizes.dead_log_bytes if keeps else -1):
                return
            member = next((m for m in self.members if m.handle == handle), None)
            if member is None or member.state is not MemberState.DEAD or unresolved[handle]:
                continue
            if self.sources[handle].lanes_closed and may_go(member):
                self._remove(member)
                del self._dead[handle], self.sources[handle]

    def _remove(self, member: Member) -> None:
        """Unlink a dead incarnation's regions, unless a successor of ours may be reading them."""
        if not self._directory.mark_removed(member.broker, member.incarnation, self._epoch):
            return
        self._steps.at(Step.BURIAL_TOLD)
        self._fabric.remove(pending_region(member.region_prefix))  # made last, gone first: with it all others are there
        for name in self._fabric.names():
            if writer_of(name) == member.region_prefix:
                self._fabric.remove(name)
        self._fabric.remove(results_region(self._epoch, member))
        self._steps.at(Step.BURIAL_DONE)


def _gone(source: Source, member: Member | None) -> bool:
    """Whether a source's incarnation is not a member any more, or its handle has a new owner."""
    return member is None or member.incarnation != source.member.incarnation or member.broker != source.member.broker


def _runs(origins: npt.NDArray[np.uint16]) -> list[tuple[int, int, int]]:
    """Runs of equal handles, as (handle, start, stop). Entries are answered as they came: the runs are few."""
    bounds = [0, *((origins[1:] != origins[:-1]).nonzero()[0] + 1).tolist(), len(origins)]
    return [(int(origins[start]), start, stop) for start, stop in itertools.pairwise(bounds)]
