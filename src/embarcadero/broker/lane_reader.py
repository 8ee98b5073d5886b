"""Readers of lanes: any broker serves any broker's batches, straight from the fabric.

`locate` is the only place that decides whether memory, disks or a gap answer a fetch. The order of loads is the safety
argument: ordered frontier, entries, payload copies (each checked against its chunk after the copy), and the epoch last.
Only then is the answer served.

In a topic without replicas, everything that left memory is one TRIMMED gap. The retained part of a lane begins after
the last entry whose payload is gone. In a topic with replicas (`stored`) those records are on disk, and the answer
names the files to read.

A lane of orders 0 and 1 may belong to any broker incarnation, alive or dead. An open lane ends at its writer's
frontier. Its records may be served only if the writer still counts as open after they were loaded: a sequencer that
closes an incarnation announces that before it reads where the lanes end. A closed lane ends at the end in the store.
Entries that its writer may have written above that do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from embarcadero.broker.clients import Peer
from embarcadero.broker.context import StoreView, lane_margin
from embarcadero.broker.disk_reads import (
    DiskCopies,
    DiskReads,
    FetchResult,
    Segments,
    TableJobs,
    at_index,
    no_disks,
    wanted_entries,
)
from embarcadero.broker.durable import BrokerView, DurableFrontiers, LaneRanges
from embarcadero.errors import BadValue, EmbarcaderoError, FuturePosition, UnknownTopic
from embarcadero.fabric.layout import ORDER, Entries, join, pick
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.lines import RingReader
from embarcadero.fabric.log import BrokerLogs
from embarcadero.fabric.region import Fabric, attach_unless_removed
from embarcadero.limits import FETCH_ENTRIES_MAX
from embarcadero.steps import Step
from embarcadero.types import EntryKind, Gap, GapKind, LanePosition, Order, Span, Tier, TopicLane
from embarcadero.wire.codec import payload_crc
from embarcadero.wire.messages import Fetch


class FetchSource(Enum):
    """The source of the batches that a fetch asks for."""

    MEMORY = "memory"
    DISK = "disk"
    GAP = "gap"
    """None: the batches were trimmed, or are lost."""
    END = "end"
    """None: the lane has no batch at or above the position."""


@dataclass(slots=True)
class Location:
    """Where a fetch is answered."""

    source: FetchSource
    index: int  # MEMORY: where to start; GAP and END: where to continue
    bound: int  # positions at or above this are not served
    gap: Gap | None = None
    ask: Fetch | None = None  # DISK: the fetch to run on segment files
    ring: RingReader | None = None  # the ring that was read; None if the answer rests only on the store
    ordered: int = 0

    def result(self) -> FetchResult:
        """Return the result of a fetch that is not answered from memory."""
        return FetchResult(np.zeros(0, dtype=ORDER), [], self.index, self.bound, self.gap, elsewhere=self.ask)


@dataclass(frozen=True, slots=True)
class Hot:
    """Entries of a span that are in memory, from `start` on. `stop_seq` is the seq at its end, if memory has it."""

    start: int
    entries: Entries
    stop_seq: int | None


_RETAINED_CACHE_US = 500_000


ON_DISK: Final = -1
"""Used as an index: the position is below the part that memory knows."""


class KnownPosition(NamedTuple):
    """A position as far as memory knows it: an index or ON_DISK, and the seq if it is still known."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int | None


ON_DISK_POSITION: Final = KnownPosition(ON_DISK, None)


class _Retained(NamedTuple):
    """The first index of the part that is completely in memory, as found in an epoch."""

    epoch: int
    found_us: int
    first: int


class StoredLane:
    """The ranges and the durable frontier of one lane, for its readers."""

    def __init__(self, lane: int, durable: DurableFrontiers) -> None:
        self._lane, self._durable = lane, durable

    @property
    def chain(self) -> LaneRanges:
        """The lane's ranges."""
        return self._durable.chain(self._lane)

    def bound(self, ordered: int, read: str) -> int:
        """Return the bound of a read: positions at or above it are not served."""
        if read == "ordered":
            return ordered
        return min(ordered, self._durable.through(self._lane))

    def through(self) -> int:
        """Return the durable frontier as counted now."""
        return self._durable.through(self._lane)

    def known(self) -> int:
        """Return the durable frontier as counted last."""
        return self._durable.known(self._lane)

    def now(self) -> int | None:
        """Return the durable frontier, or None if another broker may have counted more."""
        return self._durable.now(self._lane)

    def where(self, index: int, bound: int, hot_from: int, trimmed: int, ask: Fetch) -> Location:
        """Locate an index. At or above the bound, memory decides.

        between two ranges      ordered reads: a LOST gap, because they may have read there
        below the trim          a TRIMMED gap
        between two ranges      durable reads: a LOST gap, or NEVER_DURABLE
        no longer in memory     segment files of the range that owns it (disk_reads.py)
        otherwise               order ring and broker logs
        """
        if index >= bound:
            return Location(FetchSource.MEMORY, index, bound)
        gap, start = self.chain.lost_at(index), max(trimmed, self.chain.start)
        if gap is not None and ask.read == "ordered":  # it may have read there, even if records were trimmed since
            return Location(FetchSource.GAP, gap.stop, bound, gap._replace(kind=self.kind_for(ask, gap)))
        if index < start:
            return Location(FetchSource.GAP, start, bound, Gap(GapKind.TRIMMED, index, start))
        if gap is not None:
            gap = gap._replace(kind=self.kind_for(ask, gap), start=max(gap.start, trimmed))
            return Location(FetchSource.GAP, gap.stop, bound, gap)
        if index < hot_from:
            return Location(FetchSource.DISK, index, bound, ask=at_index(ask, index))
        return Location(FetchSource.MEMORY, index, bound)

    def kind_for(self, ask: Fetch, gap: Gap) -> GapKind:
        """Return the kind of a LOST gap for a reader: NEVER_DURABLE for a durable read if no record was durable."""
        never = ask.read == "durable" and ask.never_durable and self.chain.never_durable(gap)
        return GapKind.NEVER_DURABLE if never else gap.kind

    def without_memory(self, ask: Fetch, trimmed: int, end: int) -> Location | None:
        """Locate a fetch in a lane without memory: one in recovery, or closed and removed. All below `end` is on disk.

        None above that: the position can't be determined yet.
        """
        if ask.by == "latest" or (ask.by == "index" and ask.start >= end):
            return None
        if ask.by == "seq" and (end_seq := self.chain.seq_at(end)) is not None and ask.start >= end_seq:
            return None
        if ask.by == "index":
            return self.where(ask.start, end, end, trimmed, ask)
        return Location(FetchSource.DISK, 0, end, ask=ask)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a lane ends: in order, and on disk."""

    index: int
    seq: int
    durable_index: int
    durable_seq: int


@dataclass(frozen=True, slots=True)
class FabricReads:
    """Shared inputs of all lane readers: the fabric, the leader, logs of brokers."""

    fabric: Fabric
    epoch: LeaderView
    logs: BrokerLogs


class LaneReader:
    """Reads one lane in the current epoch."""

    def __init__(self, reads: FabricReads, lane: int, margin: int, stored: StoredLane | None = None) -> None:
        self._epoch, self._logs, self.lane, self._margin, self.stored = reads.epoch, reads.logs, lane, margin, stored
        self._begins = (-1, 0)  # epoch, first index that its ring ever had
        self._retained: _Retained | None = None
        self.trimmed = 0  # the store's trim: positions below this are trimmed

    def ring(self) -> RingReader | None:
        """Return the lane's order ring, or None before its region exists."""
        return self._epoch.order(self.lane)

    def ordered(self) -> int | None:
        """Load the ordered frontier; check `may_serve` before acting on it. None before the lane's region exists."""
        ring = self.ring()
        ordered = None if ring is None else ring.frontier.load()
        least = self.trimmed if self.stored is None else max(self.trimmed, self.stored.chain.settled)
        return None if ordered is None or ordered < least else ordered

    def news(self, read: str) -> int | None:
        """Return a number that changes when a waiting fetch should be tried again."""
        return self.ordered() if self.stored is None or read == "ordered" else self.stored.known()

    def follow(self, store: StoreView) -> bool:
        """Update the lane from the store. False if the lane was removed."""
        self.trimmed = store.trims.get(self.lane, 0)
        return self.lane in store.lanes

    @property
    def closed(self) -> bool:
        """Whether no record will ever be appended: lanes of brokers only."""
        return False

    def may_serve(self) -> bool:
        """Check the epoch: the last step before a read is served."""
        return self._epoch.may_act()

    def ends(self) -> Ends | None:
        """Return both ends of the lane, linearizable. None while they can't be determined."""
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            return None
        durable = ordered if self.stored is None else self.stored.now()
        if durable is None:
            return None
        durable = min(durable, ordered)
        seq, durable_seq = self._seq_at(ring, ordered, ordered), self._seq_at(ring, durable, ordered)
        self._epoch.steps.at(Step.READ_ENDS)
        if seq is None or durable_seq is None or not self.may_serve():
            return None
        return Ends(ordered, seq, durable, durable_seq)

    def seq_holes(self) -> list[Span]:
        """Return the spans of seqs that restarts skipped, oldest first."""
        return [] if self.stored is None else self.stored.chain.seq_holes

    def start(self, now_us: int) -> LanePosition | None:
        """Return the first position from which everything is in memory. None while it can't be determined."""
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            return None
        start = self._first_retained(ring, ordered, now_us)
        seq = self._seq_at(ring, start, ordered)
        return None if seq is None or not self.may_serve() else LanePosition(start, seq)

    def locate(self, ask: Fetch, now_us: int) -> Location | None:
        """Locate a fetch: in memory, on disk, or in a gap. None while that can't be determined.

        No other code decides this. The records of a TRIMMED gap may be in the topic's table. Raises FuturePosition.
        """
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            if self.stored is None:
                return None
            return self.stored.without_memory(ask, self.trimmed, self.stored.chain.settled)
        bound = ordered if self.stored is None else self.stored.bound(ordered, ask.read)
        self._epoch.steps.at(Step.READ_FRONTIER)
        start = self._resolve(ring, ordered, bound, ask, now_us)
        if start is None:
            return None
        if self.stored is None:
            location = Location(FetchSource.MEMORY, start, bound)
        elif start == ON_DISK:
            location = Location(FetchSource.DISK, 0, bound, ask=ask)
        else:
            memory_from = max(self._ring_floor(ring, ordered), self._known_retained())
            location = self.stored.where(start, bound, memory_from, self.trimmed, ask)
        location.ring, location.ordered = ring, ordered
        return location

    def fetch(self, ask: Fetch, now_us: int) -> FetchResult | None:
        """Answer a fetch from the current state. None while that can't be determined. Raises FuturePosition."""
        at = self.locate(ask, now_us)
        if at is None or at.ring is None:
            return None if at is None else at.result()
        if at.source is FetchSource.MEMORY:
            found = self._collect(at.ring, at.ordered, at.bound, at.index, ask, now_us)
            found.to_come = ask.by == "time" and at.index >= at.bound
        else:
            found = at.result()
        if found.payloads:
            self._epoch.steps.at(Step.READ_PAYLOAD)
        if not self.may_serve():
            return None
        if found.payloads:
            self._epoch.steps.at(Step.READ_CHECKED)
        return found

    def position(self, by: str, value: int) -> KnownPosition | None:
        """Find a position in memory, or return ON_DISK. None while that can't be determined."""
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            return None
        index = self._resolve(ring, ordered, ordered, Fetch(lane=self.lane, by=by, start=value, max_bytes=1), 0)
        if index is None or index == ON_DISK:
            return None if index is None or not self.may_serve() else ON_DISK_POSITION
        if self.stored is not None:
            index = self.stored.chain.after_lost(index)
        floor = self._ring_floor(ring, ordered)
        if self.stored is not None and index < floor:
            return ON_DISK_POSITION if self.may_serve() else None
        seq = self._seq_at(ring, index, ordered) if index >= floor else None
        return KnownPosition(index, seq) if self.may_serve() else None

    def measured(self, start: int, stop: int) -> Hot | None:
        """Return the entries of a span in memory. None while that can't be determined. Raises FuturePosition."""
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            return None
        if stop > ordered:
            self._resolve(ring, ordered, ordered, Fetch(lane=self.lane, start=stop, max_bytes=1), 0)
            return None
        floor = self._ring_floor(ring, ordered)
        first = min(stop, max(start, self._readable_from(ring, ordered)))
        entries = ring.read(first, stop)
        if len(entries) < stop - first or not self.may_serve():
            return None  # the writer overwrote entries since the frontier was loaded, or a later epoch opened
        return Hot(first, entries, self._seq_at(ring, stop, ordered) if stop >= floor else None)

    def _ring_floor(self, ring: RingReader, ordered: int) -> int:
        """Return the first index that is still in the ring. Entries that are not durable yet stay, however old."""
        floor = ordered - ring.slots + self._margin
        if self.stored is None:
            return max(0, floor)
        floor = max(0, ordered - ring.slots, min(floor, self.stored.known()))
        return max(floor, self._ring_begin(ring, floor, ordered))

    def _ring_begin(self, ring: RingReader, floor: int, ordered: int) -> int:
        """Return the first index of this epoch's ring: after a restart of the cluster, a lane has an empty ring."""
        if self._begins[0] != self._epoch.number:
            low, high = floor, ordered
            while low < high:  # all entries from some index on are present
                middle = (low + high) // 2
                low, high = (low, middle) if len(ring.read(middle, middle + 1)) else (middle + 1, high)
            if low == ordered:
                return low  # the ring is empty: its sequencer may continue above this index
            self._begins = self._epoch.number, low
        return self._begins[1]

    def _readable_from(self, ring: RingReader, ordered: int) -> int:
        return max(self._ring_floor(ring, ordered), self.trimmed)

    def _first_retained(self, ring: RingReader, ordered: int, now_us: int) -> int:
        """Return the start of the suffix that is completely in memory. It only grows, so it is cached for a while."""
        known = self._retained
        floor = self._readable_from(ring, ordered)
        if known and known.epoch == self._epoch.number and now_us - known.found_us < _RETAINED_CACHE_US:
            return max(known.first, floor)
        entries = ring.read(floor, ordered)
        gone = np.flatnonzero(self._logs.gone(entries))
        first = floor + int(gone[-1]) + 1 if len(gone) else floor
        self._retained = _Retained(self._epoch.number, now_us, first)
        return first

    def _known_retained(self) -> int:
        """Return the cached start of the suffix that is completely in memory, or 0."""
        return self._retained.first if self._retained is not None and self._retained.epoch == self._epoch.number else 0

    def memory_from(self, now_us: int) -> int:
        """Return the index from which everything is in memory, or 0 if that is unknown."""
        ring, ordered = self.ring(), self.ordered()
        return 0 if ring is None or ordered is None else self._first_retained(ring, ordered, now_us)

    def _seq_at(self, ring: RingReader, index: int, ordered: int) -> int | None:
        """Return the seq at which the entry of `index` begins, or would begin."""
        if index == 0:
            return 0
        after = index < ordered
        entries = ring.read(index if after else index - 1, index + 1 if after else index)
        if not len(entries):
            return None if self.stored is None else self.stored.chain.seq_at(index)
        return int(entries["seq"][0]) + (0 if after else int(entries["count"][0]))

    def _resolve(self, ring: RingReader, ordered: int, bound: int, ask: Fetch, now_us: int) -> int | None:
        """Return the index at which a fetch starts, or ON_DISK, or None while that can't be determined.

        Raises FuturePosition.
        """
        try:
            return self._index_of(ring, ordered, bound, ask, now_us)
        except FuturePosition:
            if self.may_serve():
                raise
            return None  # the known end is that of a sequencer that has a successor

    def _index_of(self, ring: RingReader, ordered: int, bound: int, ask: Fetch, now_us: int) -> int | None:
        if ask.by == "earliest":
            first = self._first_retained(ring, ordered, now_us)
            return first if self.stored is None or first <= max(self.trimmed, self.stored.chain.start) else ON_DISK
        if ask.by == "latest":
            return bound
        if ask.by == "seq":
            return self._find_seq(ring, ordered, ask.start)
        if ask.by == "time":
            return self._find_time(ring, ordered, ask.start)
        if ask.start > ordered:
            raise FuturePosition(
                f"index {ask.start} is beyond the end of the log ({ordered})", "read from 'latest', or wait for it"
            )
        return ask.start

    def _find_seq(self, ring: RingReader, ordered: int, seq: int) -> int | None:
        """Return the index whose batch contains record `seq`: a floor search in the readable part."""
        next_seq = self._seq_at(ring, ordered, ordered)
        if next_seq is None:
            return None
        if seq > next_seq:
            raise FuturePosition(
                f"seq {seq} is beyond the end of the log ({next_seq})", "read from 'latest', or wait for it"
            )
        floor = self._ring_floor(ring, ordered)
        entries = ring.read(floor, ordered)
        if len(entries) < ordered - floor:
            return None  # the writer overwrote entries since the frontier was loaded
        if self.stored is not None and seq < (int(entries["seq"][0]) if len(entries) else next_seq):
            return ON_DISK
        if floor > 0 and len(entries) and seq < int(entries["seq"][0]):
            return floor - 1  # no longer in memory: the fetch reports the gap
        ends = entries["seq"] + entries["count"]
        return floor + int(np.searchsorted(ends, np.uint64(seq), side="right"))

    def _find_time(self, ring: RingReader, ordered: int, us: int) -> int | None:
        """Return the first index appended at or after a time, or the end. Append times never decrease."""
        floor = self._ring_floor(ring, ordered)
        entries = ring.read(floor, ordered)
        if len(entries) < ordered - floor:
            return None  # the writer overwrote entries since the frontier was loaded
        row = int(np.searchsorted(entries["append_us"], np.uint64(us)))
        if row == 0 and floor > 0:
            if self.stored is not None:
                return ON_DISK
            return floor - 1  # entries that left the ring may be as recent: the fetch reports the gap
        return floor + row

    def _collect(self, ring: RingReader, ordered: int, bound: int, start: int, ask: Fetch, now_us: int) -> FetchResult:
        found = FetchResult(np.zeros(0, dtype=ring.dtype), [], start, bound)
        taken: list[Entries] = []
        budget = ask.max_bytes
        stop, taking = bound if ask.stop is None else min(bound, ask.stop), FETCH_ENTRIES_MAX
        while found.next_index < stop and taking:
            first = found.next_index
            if first < self._readable_from(ring, ordered):
                self._left_memory(found, ring, ordered, ask, now_us)
                break
            entries = ring.read(first, min(stop, first + min(taking, ring.slots)))
            if not len(entries):
                break  # the writer overwrote entries since the frontier was loaded: the next try sees that
            self._epoch.steps.at(Step.READ_ENTRIES)
            wanted = pick(entries, wanted_entries(entries, ask))
            copied, budget = self._copy(wanted, found, budget)
            taken.append(wanted[:copied])
            taking -= copied
            if copied < len(wanted):
                if budget >= 0:  # stopped by a payload that left memory, not by the byte limit
                    self._left_memory(found, ring, ordered, ask, now_us)
                break
            found.next_index = first + len(entries)
        if taken:
            found.entries = taken[0] if len(taken) == 1 else join(taken)
        return found

    def _copy(self, entries: Entries, found: FetchResult, budget: int) -> tuple[int, int]:
        """Copy payloads until the bytes run out or one left memory. Returns the count, and the bytes left or -1."""
        names = ("kind", "origin", "location", "size", "crc", "index")
        rows = zip(*(entries[name].tolist() for name in names), strict=True)
        for done, (kind, origin, location, size, crc, index) in enumerate(rows):
            if size > budget and found.payloads:
                return done, -1
            payload = self._payload(origin, location, size, crc) if kind == EntryKind.BATCH else b""
            if payload is None:
                return done, max(budget, 0)
            found.payloads.append(payload)
            found.next_index = index + 1
            budget = max(0, budget - size)
        return len(entries), budget

    def _payload(self, origin: int, location: int, size: int, crc: int) -> bytes | None:
        """Copy a payload. None if it left memory. Locations wrap around in the long run: the checksum detects it."""
        log = self._logs.of(origin)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def _left_memory(self, found: FetchResult, ring: RingReader, ordered: int, ask: Fetch, now_us: int) -> None:
        """Handle a next entry that left memory: serve the copied batches, or report the gap, or read from disk."""
        if found.payloads:
            return
        if self.stored is not None:
            self._first_retained(ring, ordered, now_us)  # caches the start for the next fetch
            found.elsewhere = at_index(ask, found.next_index)
            return
        self._retained = None
        start = max(self._first_retained(ring, ordered, now_us), found.next_index + 1)
        found.gap = Gap(GapKind.TRIMMED, found.next_index, start)
        found.next_index = start


_CLOSED = -2
"""`news` of a closed lane: no fetch waits there."""


class BrokerLaneReader(LaneReader):
    """Reads one lane of a broker. `lane_is` is its record in the store; the broker keeps it current."""

    def __init__(self, reads: FabricReads, lane_is: TopicLane, margin: int, stored: StoredLane | None = None) -> None:
        super().__init__(reads, lane_is.lane, margin, stored)
        self._fabric, self.lane_is = reads.fabric, lane_is
        self._basis = lane_is  # the record that the last `ordered` used
        self._attached: RingReader | None = None

    def ring(self) -> RingReader | None:
        if self._attached is None and (regions := attach_unless_removed(self._fabric, self.lane_is.region)):
            self._attached = RingReader(regions[0], ORDER)
        return self._attached

    def ordered(self) -> int | None:
        self._basis = self.lane_is
        return super().ordered() if self._basis.end is None else self._basis.end

    def news(self, read: str) -> int | None:
        end = self.lane_is.end
        if end is None or self._kept(read, end) is None:
            return super().news(read)
        if self.stored is not None and read != "ordered" and self.stored.known() < end:
            return super().news(read)
        return _CLOSED

    def follow(self, store: StoreView) -> bool:
        self.trimmed = store.trims.get(self.lane, 0)
        lane_is, before = store.broker_lanes.get(self.lane), self.lane_is
        if lane_is is None or (lane_is.removed and not before.removed):
            return False  # the next reader finds that disks and memory have no records any more
        self.lane_is = lane_is
        return True

    @property
    def closed(self) -> bool:
        return self.lane_is.end is not None

    def may_serve(self) -> bool:
        if not self._basis.open:
            return True
        return self._epoch.counts_as_open(self._basis.handle)

    def ends(self) -> Ends | None:
        end, end_seq = self.lane_is.end, self.lane_is.end_seq or 0
        if self._is_unwritten():
            return Ends(0, 0, 0, 0)
        if end is not None and (end == 0 or self.ring() is None):
            if end and self.stored is not None and self.stored.chain.replicas:
                return None  # memory is lost, and the end of the disks is not known yet
            return Ends(end, end_seq, end, end_seq)
        return super().ends()

    def seq_holes(self) -> list[Span]:
        end_seq, holes = self.lane_is.end_seq, super().seq_holes()
        last = self.stored.chain.ranges[-1:] if self.stored is not None else []
        sealed = last[0].end_seq if last else None
        return holes if sealed is None or end_seq is None or sealed >= end_seq else [*holes, Span(sealed, end_seq)]

    def _is_unwritten(self) -> bool:
        """Return whether its writer has found no memory for it yet. Then no record in it was ever acked."""
        self._basis = self.lane_is
        return self._basis.open and self.ring() is None and self.may_serve()

    def start(self, now_us: int) -> LanePosition | None:
        end = self.lane_is.end
        if self._is_unwritten():
            return LanePosition(0, 0)
        if end is not None and (end == 0 or self.ring() is None):
            return LanePosition(end, self.lane_is.end_seq or 0)
        return super().start(now_us)

    def position(self, by: str, value: int) -> KnownPosition | None:
        end = self.lane_is.end
        if end is None or self.ring() is not None:
            return super().position(by, value)
        index = self._index_without_ring(by, value, end)
        if self.stored is not None and index < end:
            return ON_DISK_POSITION
        return KnownPosition(index, self.lane_is.end_seq if index == end else None)

    def measured(self, start: int, stop: int) -> Hot | None:
        end = self.lane_is.end
        if end is None or self.ring() is not None:
            return super().measured(start, stop)
        if stop > end:
            self._index_without_ring("index", stop, end)
        return Hot(stop, np.zeros(0, dtype=ORDER), self.lane_is.end_seq if stop == end else None)

    def fetch(self, ask: Fetch, now_us: int) -> FetchResult | None:
        end, found = self.lane_is.end, super().fetch(ask, now_us)
        answered = found is None or end is None or not found.empty or found.elsewhere is not None
        if found is not None and end is not None and not answered and found.next_index == end:
            last = self._kept(ask.read, end)
            found.gap = None if last is None else Gap(GapKind.END_OF_LANE, last, last)
        return found

    def _kept(self, read: str, end: int) -> int | None:
        """Return where the lane ends for a reader. Ordered reads may have gone above the end of the disks."""
        if read != "ordered" or end == 0:
            return end
        if self.stored is not None and (ranges := self.stored.chain.ranges):
            return None if ranges[-1].end is None else min(ranges[-1].end, end)
        return end if self.lane_is.kept is None else min(self.lane_is.kept, end)  # trimmed, or without replicas

    def locate(self, ask: Fetch, now_us: int) -> Location | None:
        end = self.lane_is.end
        return super().locate(ask, now_us) if end is None or self.ring() is not None else self._without_ring(ask, end)

    def _without_ring(self, ask: Fetch, end: int) -> Location | None:
        """Locate a fetch in a lane that has no memory (any more): everything below its end is on disk, trimmed or lost.

        A reader of ordered records gets all lost records as a gap, even if they were trimmed: it may have read them.
        """
        replicated = self.stored is not None or self.lane_is.removed  # or may have been replicated
        if replicated and ask.by == "index" and ask.start > end and ask.read == "ordered":
            ask = at_index(ask, end)
        start, kept = self._index_without_ring(ask.by, ask.start, end), self._kept(ask.read, end)
        if ask.by == "index" and kept is not None and kept <= start < end:
            return self._lost(ask, kept, end)
        if self.stored is not None and start < end:
            return self._below_end(self.stored, ask, end)
        gap = Gap(GapKind.TRIMMED, start, end) if start < end else None
        return Location(FetchSource.END if gap is None else FetchSource.GAP, end, end, gap)

    def _below_end(self, stored: StoredLane, ask: Fetch, end: int) -> Location | None:
        """Locate a fetch on disk or in a LOST gap: memory may be lost before all below the recorded end was durable."""
        by_index, recovering = ask.by == "index", bool(stored.chain.replicas)
        through = stored.through()
        if by_index and ask.start < max(self.trimmed, through):
            return stored.without_memory(ask, self.trimmed, end)
        if recovering:
            return None
        if by_index:
            return self._lost(ask, through, end, self.trimmed)
        return stored.without_memory(ask, self.trimmed, end)

    def _lost(self, ask: Fetch, kept: int, end: int, trimmed: int = 0) -> Location:
        gap = Gap(GapKind.LOST, kept, end)
        kind = GapKind.LOST if self.stored is None else self.stored.kind_for(ask, gap)
        return Location(FetchSource.GAP, end, end, Gap(kind, max(kept, trimmed), end))

    def _index_without_ring(self, by: str, value: int, end: int) -> int:
        by_seq = 0 if value < (self.lane_is.end_seq or 0) else end
        others = 0 if self.stored is not None and by != "latest" else end
        index = {"index": value, "seq": by_seq}.get(by, others)
        if index > end:
            raise FuturePosition(f"index {index} is beyond the end of the lane ({end})", "the lane is closed")
        return index


class LaneReaders:
    """The readers of all lanes, and their other sources: replicas' disks, and tables of topics."""

    def __init__(self, view: BrokerView, logs: BrokerLogs, tables: TableJobs) -> None:
        context = self._context = view.context
        self._store, self._durable = view.store, view.durable
        self._reads = FabricReads(context.fabric, view.epoch, logs)
        self.disks = DiskReads(context.env.workers, DiskCopies(context.env.disks or no_disks))
        self.tables = tables
        self._readers: dict[int, LaneReader] = {}

    def update(self) -> None:
        """Update all readers after a change of the store."""
        for lane, reader in list(self._readers.items()):
            if not reader.follow(self._store):
                del self._readers[lane]
        members = {member.replica: member for member in self._context.directory.replicas.all()}
        self.disks.copies.keep(self._store.lanes.keys() | self._store.broker_lanes.keys(), members)

    def disconnected(self, peer: Peer) -> None:
        """Drop the jobs of a closed connection."""
        self.disks.disconnected(peer.number)
        self.tables.disconnected(peer.number)

    # --- readers ------------------------------------------------------------------------------------------------------
    def known(self, lane: int) -> LaneReader | None:
        """Return the reader of a lane that was read before, or None."""
        return self._readers.get(lane)

    def reader(self, lane: int) -> LaneReader:
        """Return the reader of a lane. Raises UnknownTopic."""
        if (known := self._readers.get(lane)) is not None:
            return known
        if lane not in self._store.lanes and lane not in self._store.broker_lanes:
            self._store.refresh()
        reader = self._readers[lane] = self._new_reader(lane)
        reader.follow(self._store)
        return reader

    def _new_reader(self, lane: int) -> LaneReader:
        durable, sizes = StoredLane(lane, self._durable), self._context.sizes
        if (lane_is := self._store.broker_lanes.get(lane)) is not None:
            stored = durable if durable.chain.ranges else None
            return BrokerLaneReader(self._reads, lane_is, lane_margin(sizes), stored)
        if (topic := self._store.lanes.get(lane)) is None:
            raise UnknownTopic(f"there is no topic with lane {lane}", "the topic was deleted; look it up by name")
        if topic.order <= Order.BROKER:
            raise BadValue(f"topic {topic.name!r} has order {topic.order}: each broker has a lane", "read those lanes")
        stored = durable if topic.replicas else None
        return LaneReader(self._reads, lane, sizes.round_entries, stored)

    def fresh_reader(self, lane: int) -> LaneReader:
        """Return a reader that sees every trim that any broker acknowledged before now."""
        self._store.refresh()
        return self.reader(lane)

    def lag(self, lane: int, index: int) -> int | None:
        """Return how many batches a reader at an index is behind the order. Lost positions do not count."""
        reader = self._readers.get(lane)
        ordered = None if reader is None else reader.ordered()
        if reader is None or ordered is None:
            return None
        return max(0, ordered - index) if reader.stored is None else reader.stored.chain.batches(index, ordered)

    # --- files and tables ---------------------------------------------------------------------------------------------
    def durable_files(self, lane: int) -> Segments:
        """Return the durable files of a lane with replicas, for jobs outside the broker."""
        reader = self.fresh_reader(lane)
        if (stored := reader.stored) is None:
            raise BadValue(f"lane {lane} has no replicas", "use a lane of a topic with replicas")
        return self.segments(reader, stored)

    def segments(self, reader: LaneReader, stored: StoredLane, bound: int | None = None) -> Segments:
        """Return a lane's durable files, below a bound.

        The frontier is counted before ranges are read: a count in a new range does not apply to the old one.
        """
        durable = stored.through()
        below = durable if bound is None else min(bound, durable)
        return Segments(reader.lane, stored.chain, below, reader.trimmed, self.disks.copies)

    def tier(self, lane: int) -> Tier | None:
        """Return the table of a lane's topic as the store has it now."""
        return self._context.directory.tiers.get(self._store.topic_name(lane) or "")

    def tiered(self, lane: int) -> int | None:
        """Return the index below which batches are in the topic's table. None if it has none, or the store fails."""
        try:
            tier = self.tier(lane)
        except EmbarcaderoError:
            return None
        return None if tier is None else tier.frontier(lane).index
