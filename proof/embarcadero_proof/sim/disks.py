"""The disks of a run, the replicas that use them, and the view of an observer of all disks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from embarcadero.types import Range, ReplicaMember
from embarcadero_proof.sim.disk import Mount, SimDisk
from embarcadero_proof.sim.history import (
    Copies,
    CopyDiffers,
    DamageLeft,
    LostSpan,
    OnDisk,
    Stopped,
    TailRead,
    TrimmedTo,
)
from embarcadero_proof.sim.plan import COMPARED_FROM_SEED
from embarcadero_proof.sim.truth import Truth, Unequal, owner_of, stored, unequal, whole

if TYPE_CHECKING:
    from embarcadero_proof.sim.process import Process
    from embarcadero_proof.sim.world import World

_UNBOUNDED = 1 << 62


class Disks:
    """One disk for each replica, and the disks that were removed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made = 0
        self.devices: dict[int, SimDisk] = {}
        self.truth = Truth()
        self._ranges: dict[int, list[Range]] = {}
        self._revision = -1
        self._fine: set[tuple[int, int, int | None]] = set()  # (lane, index, digest) found on enough disks; None: any
        self._recorded: set[tuple[int, int, int]] = set()  # recorded lost spans and trims
        self._cut_short: set[int] = set()  # lanes of brokers that were open when the fabric was lost

    # --- using them ---------------------------------------------------------------------------------------------------
    def of_replica(self, replica: int) -> SimDisk:
        """Return a replica's current disk; a new one if there is none."""
        return self.devices.get(replica) or self.replace(replica)

    def replace(self, replica: int) -> SimDisk:
        """Replace a replica's disk by an empty one."""
        self._made += 1
        disk = self.devices[replica] = SimDisk(f"{self._world.seed}:disk-{self._made}")
        disk.on_synced = partial(self.truth.look, replica)
        return disk

    def mount(self, process: Process, find: Callable[[], SimDisk]) -> Mount:
        """Return a disk as this process uses it: each use can be interrupted."""

        def interrupt() -> None:
            if self._world.memory.interrupt is not None:
                self._world.memory.interrupt(process.host)

        return Mount(find, interrupt)

    def seen_by(self, process: Process) -> Callable[[ReplicaMember], Mount]:
        """Return how a process opens the disks of replicas."""
        return lambda member: self.mount(process, lambda: self.of_replica(member.replica))

    # --- looking ------------------------------------------------------------------------------------------------------
    def _ranges_of(self, lane: int) -> list[Range]:
        directory = self._world.directory
        if directory.revision() != self._revision:
            self._revision = directory.revision()
            self._ranges = {}
            for range_ in directory.ranges.all():
                self._ranges.setdefault(range_.lane, []).append(range_)
        return self._ranges.get(lane, [])

    def see_copies(self, who: str, lane: int, index: int, digest: int | None = None) -> None:
        """Record how many replicas have synced the batch at `index`, when a process takes this batch as durable.

        A digest of None: the process learned only that the batch is durable, not its contents.
        """
        if (lane, index, digest) in self._fine:
            return
        ranges = self._ranges_of(lane)
        if not ranges:
            return  # its topic has no replicas
        if index < ranges[0].start or index < self._world.tiering.frontier(lane):
            return  # trimmed, or in the table: replicas may have dropped it
        owner = owner_of(ranges, index)
        copies, needed = (0, 1) if owner is None else (self.truth.copies(owner, index, digest), owner.durable_on)
        if copies >= needed:
            self._fine |= {(lane, index, digest), (lane, index, None)}
        now_us = self._world.queue.now_us
        self._world.seen(Copies(at=now_us, who=who, lane=lane, index=index, copies=copies, needed=needed))

    def see_durable_end(self, who: str, lane: int, end: int) -> None:
        """Check the last entry before `end`, if there is one: a process learned that the lane is durable to there."""
        if owner_of(self._ranges_of(lane), end - 1) is not None:
            self.see_copies(who, lane, end - 1)

    def fabric_lost(self) -> None:
        """Remember the open lanes of brokers: they end at some index, and the entries above are lost."""
        self._cut_short.update(lane.lane for lane in self._world.directory.lanes.all() if lane.open)

    def see_stop(self, clean: bool) -> None:
        """Record that the cluster stops, and the spans that are already lost."""
        numbered = self._world.directory.generation & 0xFFFF_FFFF > 0
        self._world.seen(
            Stopped(at=self._world.queue.now_us, clean=clean, lost=self._lost_spans(), numbered=numbered)
        )  # fmt: skip

    def _lost_spans(self) -> list[tuple[int, int, int]]:
        """List (lane, start, stop) of each span that is lost according to the store."""
        directory = self._world.directory
        spans = [(lane.lane, lane.end, _UNBOUNDED) for lane in directory.lanes.all()
                 if lane.lane in self._cut_short and lane.end is not None]  # fmt: skip
        ranges = directory.ranges.all()
        for before, after in pairwise(ranges):
            if before.lane == after.lane and before.end is not None and before.end < after.start:
                spans.append((before.lane, before.end, after.start))
        last = {range_.lane: range_ for range_ in ranges}
        for closed in directory.lanes.all():  # memory was lost after the close, before all of it was durable
            sealed = last[closed.lane].end if closed.lane in last else None
            if closed.end is not None and sealed is not None and sealed < closed.end:
                spans.append((closed.lane, sealed, closed.end))
        return spans

    def see_gaps(self) -> None:
        """Record the lost and trimmed spans according to the store."""
        directory, now_us = self._world.directory, self._world.queue.now_us
        for span in self._lost_spans():
            if span not in self._recorded:
                self._recorded.add(span)
                self._world.seen(LostSpan(at=now_us, lane=span[0], start=span[1], stop=span[2]))
        for lane, index in sorted(directory.topics.trims().items()):
            if lane in self._world.tiering.lanes:
                continue  # brokers have dropped it; the table has it
            if (lane, index, -1) not in self._recorded:
                self._recorded.add((lane, index, -1))
                self._world.seen(TrimmedTo(at=now_us, lane=lane, index=index))

    def unsettled(self) -> list[tuple[int, str]]:
        """List (replica, range) of copies of sealed ranges that lack entries or have too many."""
        directory = self._world.directory
        trims, found = directory.topics.trims(), []
        for range_ in directory.ranges.all():
            if range_.end is None or range_.start == range_.end:
                continue
            wanted = set(range(max(range_.start, trims.get(range_.lane, 0)), range_.end))
            for ref in range_.replicas:
                there = whole(self.of_replica(ref.replica), range_)
                if wanted - there:
                    found.append((ref.replica, f"range {range_.number} of lane {range_.lane} (not all of it)"))
                elif max(there, default=0) >= range_.end:
                    found.append((ref.replica, f"range {range_.number} of lane {range_.lane} (more than it is)"))
        return found

    def wanting(self) -> bool:
        """Whether some copy is not complete and intact yet: rot in an open range waits for a scrub."""
        return bool(self.unsettled() or self._differing())

    def _differing(self) -> list[Unequal]:
        """List copies below the durable end that are missing or different after all had time to catch up.

        That is after the rest. From some seed on, runs without a rest also take the time.
        """
        world, directory = self._world, self._world.directory
        if not world.rest.taken_us and (world.plan.rest_us or world.seed < COMPARED_FROM_SEED):
            return []
        trims, ends = directory.topics.trims(), dict[int, int]()
        for tail in self._world.history.of(TailRead):
            ends[tail.lane] = tail.durable_index
        found = unequal(self.devices, directory.ranges.all(), ends)
        return [copy for copy in found if copy.at_index >= trims.get(copy.lane, 0)]

    def see_all(self) -> None:
        """Record at the end which batches are on disks."""
        if not self.devices:
            return
        self.see_gaps()
        for replica, what in self.unsettled():
            self._world.seen(DamageLeft(at=self._world.queue.now_us, replica=replica, path=what))
        for replica, lane, index, what in self._differing():
            self._world.seen(
                CopyDiffers(at=self._world.queue.now_us, replica=replica, lane=lane, index=index, what=what)
            )  # fmt: skip
        self._world.tiering.see_all()
        found = stored(list(self.devices.values()), self._world.directory.ranges.all())
        for (lane, index, digest), copies in found.items():
            self._world.seen(
                OnDisk(at=self._world.queue.now_us, lane=lane, index=index, digest=digest, copies=copies)
            )  # fmt: skip
