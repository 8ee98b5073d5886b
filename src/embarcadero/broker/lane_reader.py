"""Readers of lanes: any broker serves any broker's batches, straight from the fabric.

`locate` is the one place that decides whether memory, disks or a gap answer a fetch. The order of loads is the safety
argument: ordered frontier, entries, payload copies (each checked against its chunk after the copy), and last of all the
epoch. Only then is anything served.
Of a topic without replicas, what left memory is one TRIMMED gap: the retained part of a lane is what follows the last
entry whose payload is gone. Of one with replicas (`stored`) it is on disk, and the answer says where to go on.

A lane of orders 0 and 1 may be of any broker incarnation, alive or dead. An open lane ends at its writer's frontier,
and something of it may be served only if the writer still counts as open after it was loaded: a sequencer that closes
an incarnation says so before it looks where its lanes end. A closed lane ends where the store says; what its writer may
have written above that does not exist.
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
    """Where the batches are that a fetch asks for."""

    MEMORY = "memory"
    DISK = "disk"
    GAP = "gap"
    """Nowhere: they were trimmed, or are lost."""
    END = "end"
    """Nowhere: nothing of the lane is above."""


@dataclass(slots=True)
class Location:
    """Where a fetch is answered."""

    source: FetchSource
    index: int  # MEMORY: where to start; GAP and END: where to go on
    bound: int  # nothing at or above this is served
    gap: Gap | None = None
    ask: Fetch | None = None  # DISK: what segment files are to be asked
    ring: RingReader | None = None  # what memory was looked at; None: this rests on what the store says alone
    ordered: int = 0

    def result(self) -> FetchResult:
        """The answer, of what is not in memory."""
        return FetchResult(np.zeros(0, dtype=ORDER), [], self.index, self.bound, self.gap, elsewhere=self.ask)


@dataclass(frozen=True, slots=True)
class Hot:
    """Entries of a span that are in memory, from `start` on; `stop_seq` is the seq at its end, if memory knows it."""

    start: int
    entries: Entries
    stop_seq: int | None


_RETAINED_CACHE_US = 500_000


ON_DISK: Final = -1
"""In place of an index: it is below what memory can tell."""


class KnownPosition(NamedTuple):
    """A position as far as memory knows it: an index or ON_DISK, and the seq if that is still known."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int | None


ON_DISK_POSITION: Final = KnownPosition(ON_DISK, None)


class _Retained(NamedTuple):
    """The first index of what is wholly in memory, as it was found in an epoch."""

    epoch: int
    found_us: int
    first: int


class StoredLane:
    """What readers of one lane have to know of its ranges and its durable frontier."""

    def __init__(self, lane: int, durable: DurableFrontiers) -> None:
        self._lane, self._durable = lane, durable

    @property
    def chain(self) -> LaneRanges:
        """The lane's ranges."""
        return self._durable.chain(self._lane)

    def bound(self, ordered: int, read: str) -> int:
        """Nothing at or above this is served."""
        if read == "ordered":
            return ordered
        return min(ordered, self._durable.through(self._lane))

    def through(self) -> int:
        """How far the lane is durable, as counted now."""
        return self._durable.through(self._lane)

    def known(self) -> int:
        """The same, as counted last."""
        return self._durable.known(self._lane)

    def now(self) -> int | None:
        """The same, or None if others may have counted more."""
        return self._durable.now(self._lane)

    def where(self, index: int, bound: int, hot_from: int, trimmed: int, ask: Fetch) -> Location:
        """Where an index is. At the end it is for memory to say what there is.

        between two ranges      a LOST gap for readers of what is ordered, which may have read there
        below the trim          a TRIMMED gap
        between two ranges      a LOST gap, or NEVER_DURABLE
        not in memory any more  segment files of the range that owns it (disk.py)
        else                    order ring and broker logs
        """
        if index >= bound:
            return Location(FetchSource.MEMORY, index, bound)
        gap, start = self.chain.lost_at(index), max(trimmed, self.chain.start)
        if gap is not None and ask.read == "ordered":  # it may have read there, whatever was trimmed since
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
        """What a LOST gap is to a reader: one of durable records has lost nothing, if nothing there was durable."""
        never = ask.read == "durable" and ask.never_durable and self.chain.never_durable(gap)
        return GapKind.NEVER_DURABLE if never else gap.kind

    def without_memory(self, ask: Fetch, trimmed: int, end: int) -> Location | None:
        """The lane has no memory (it is being recovered, or is closed and gone): what is below `end` is on disk.

        None for what is not: where that is can't be told yet.
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
    """What all readers of lanes read: the fabric, the leader, logs of brokers."""

    fabric: Fabric
    epoch: LeaderView
    logs: BrokerLogs


class LaneReader:
    """Reads one lane in the current epoch."""

    def __init__(self, reads: FabricReads, lane: int, margin: int, stored: StoredLane | None = None) -> None:
        self._epoch, self._logs, self.lane, self._margin, self.stored = reads.epoch, reads.logs, lane, margin, stored
        self._begins = (-1, 0)  # epoch, the first index that its ring ever had
        self._retained: _Retained | None = None
        self.trimmed = 0  # the lane was trimmed below this index; the store says so

    def ring(self) -> RingReader | None:
        """The lane's order ring; None before its region exists."""
        return self._epoch.order(self.lane)

    def ordered(self) -> int | None:
        """The ordered frontier as loaded now; not yet to be acted on. None before the lane's region is there."""
        ring = self.ring()
        ordered = None if ring is None else ring.frontier.load()
        least = self.trimmed if self.stored is None else max(self.trimmed, self.stored.chain.settled)
        return None if ordered is None or ordered < least else ordered

    def news(self, read: str) -> int | None:
        """A number that changes when a waiting fetch should be tried again."""
        return self.ordered() if self.stored is None or read == "ordered" else self.stored.known()

    def follow(self, store: StoreView) -> bool:
        """Learn what the store says of the lane. False: it is gone."""
        self.trimmed = store.trims.get(self.lane, 0)
        return self.lane in store.lanes

    @property
    def closed(self) -> bool:
        """Whether nothing will ever be appended: lanes of brokers only."""
        return False

    def may_serve(self) -> bool:
        """The last question before anything is served."""
        return self._epoch.may_act()

    def ends(self) -> Ends | None:
        """Both ends of the lane, linearizable; None while they can't be told."""
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
        """Spans of seqs that restarts passed over, oldest first."""
        return [] if self.stored is None else self.stored.chain.seq_holes

    def start(self, now_us: int) -> LanePosition | None:
        """The position of the first entry that is in memory with all that follow; None while it can't be told."""
        ring, ordered = self.ring(), self.ordered()
        if ring is None or ordered is None:
            return None
        start = self._first_retained(ring, ordered, now_us)
        seq = self._seq_at(ring, start, ordered)
        return None if seq is None or not self.may_serve() else LanePosition(start, seq)

    def locate(self, ask: Fetch, now_us: int) -> Location | None:
        """Where a fetch is answered: from memory, from disk, or by a gap. None while it can't be told.

        This is decided here and nowhere else; a gap of what was trimmed may be in the topic's table. Raises
        FuturePosition.
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
        """Answer a fetch from what there is now; None while it can't be told. Raises FuturePosition."""
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
        """Find a position in memory, or ON_DISK; None while it can't be told.

        Raises FuturePosition.
        """
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
        """What memory knows of the batches of a span; None while it can't be told. Raises FuturePosition."""
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
            return None  # overtaken by the writer since the frontier was loaded, or by another epoch
        return Hot(first, entries, self._seq_at(ring, stop, ordered) if stop >= floor else None)

    def _ring_floor(self, ring: RingReader, ordered: int) -> int:
        """Entries from here on are still in the ring. Those that are not durable yet are, however old."""
        floor = ordered - ring.slots + self._margin
        if self.stored is None:
            return max(0, floor)
        floor = max(0, ordered - ring.slots, min(floor, self.stored.known()))
        return max(floor, self._ring_begin(ring, floor, ordered))

    def _ring_begin(self, ring: RingReader, floor: int, ordered: int) -> int:
        """The first index of this epoch's ring: after a restart of the cluster a lane goes on in an empty one."""
        if self._begins[0] != self._epoch.number:
            low, high = floor, ordered
            while low < high:  # all entries from some index on are there
                middle = (low + high) // 2
                low, high = (low, middle) if len(ring.read(middle, middle + 1)) else (middle + 1, high)
            if low == ordered:
                return low  # nothing is in it yet: what its sequencer goes on with may begin above
            self._begins = self._epoch.number, low
        return self._begins[1]

    def _readable_from(self, ring: RingReader, ordered: int) -> int:
        return max(self._ring_floor(ring, ordered), self.trimmed)

    def _first_retained(self, ring: RingReader, ordered: int, now_us: int) -> int:
        """First index of the suffix that is wholly in memory. It only grows, so an answer may be used for a while."""
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
        """The same, as far as it is known."""
        return self._retained.first if self._retained is not None and self._retained.epoch == self._epoch.number else 0

    def memory_from(self, now_us: int) -> int:
        """From here on everything is in memory, as far as that can be told."""
        ring, ordered = self.ring(), self.ordered()
        return 0 if ring is None or ordered is None else self._first_retained(ring, ordered, now_us)

    def _seq_at(self, ring: RingReader, index: int, ordered: int) -> int | None:
        """The seq at which the entry of `index` begins, or would begin."""
        if index == 0:
            return 0
        after = index < ordered
        entries = ring.read(index if after else index - 1, index + 1 if after else index)
        if not len(entries):
            return None if self.stored is None else self.stored.chain.seq_at(index)
        return int(entries["seq"][0]) + (0 if after else int(entries["count"][0]))

    def _resolve(self, ring: RingReader, ordered: int, bound: int, ask: Fetch, now_us: int) -> int | None:
        """The index at which a fetch starts, or ON_DISK; None while it can't be told. Raises FuturePosition."""
        try:
            return self._index_of(ring, ordered, bound, ask, now_us)
        except FuturePosition:
            if self.may_serve():
                raise
            return None  # the end that we know is on the word of a sequencer that has a successor

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
        """The index whose batch holds record `seq`: floor search in what is readable."""
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
            return None  # overtaken by the writer since the frontier was loaded
        if self.stored is not None and seq < (int(entries["seq"][0]) if len(entries) else next_seq):
            return ON_DISK
        if floor > 0 and len(entries) and seq < int(entries["seq"][0]):
            return floor - 1  # gone: the fetch will tell the gap
        ends = entries["seq"] + entries["count"]
        return floor + int(np.searchsorted(ends, np.uint64(seq), side="right"))

    def _find_time(self, ring: RingReader, ordered: int, us: int) -> int | None:
        """The first index appended at or after a time; the end if there is none yet. Append times never go back."""
        floor = self._ring_floor(ring, ordered)
        entries = ring.read(floor, ordered)
        if len(entries) < ordered - floor:
            return None  # overtaken by the writer since the frontier was loaded
        row = int(np.searchsorted(entries["append_us"], np.uint64(us)))
        if row == 0 and floor > 0:
            if self.stored is not None:
                return ON_DISK
            return floor - 1  # what left the ring may be as young: the fetch will tell the gap
        return floor + row

    def _collect(self, ring: RingReader, ordered: int, bound: int, start: int, ask: Fetch, now_us: int) -> FetchResult:
        found = FetchResult(np.zeros(0, dtype=ring.dtype), [], start, bound)
        taken: list[Entries] = []
        room = ask.max_bytes
        stop, taking = bound if ask.stop is None else min(bound, ask.stop), FETCH_ENTRIES_MAX
        while found.next_index < stop and taking:
            first = found.next_index
            if first < self._readable_from(ring, ordered):
                self._gone(found, ring, ordered, ask, now_us)
                break
            entries = ring.read(first, min(stop, first + min(taking, ring.slots)))
            if not len(entries):
                break  # overtaken by the writer since the frontier was loaded: the next try sees that
            self._epoch.steps.at(Step.READ_ENTRIES)
            wanted = pick(entries, wanted_entries(entries, ask))
            copied, room = self._copy(wanted, found, room)
            taken.append(wanted[:copied])
            taking -= copied
            if copied < len(wanted):
                if room >= 0:  # stopped by a payload that is gone, not by the byte limit
                    self._gone(found, ring, ordered, ask, now_us)
                break
            found.next_index = first + len(entries)
        if taken:
            found.entries = taken[0] if len(taken) == 1 else join(taken)
        return found

    def _copy(self, entries: Entries, found: FetchResult, room: int) -> tuple[int, int]:
        """Copy payloads until the bytes run out or one is gone: (how many, bytes left; -1 when they ran out)."""
        names = ("kind", "origin", "location", "size", "crc", "index")
        rows = zip(*(entries[name].tolist() for name in names), strict=True)
        for done, (kind, origin, location, size, crc, index) in enumerate(rows):
            if size > room and found.payloads:
                return done, -1
            payload = self._payload(origin, location, size, crc) if kind == EntryKind.BATCH else b""
            if payload is None:
                return done, max(room, 0)
            found.payloads.append(payload)
            found.next_index = index + 1
            room = max(0, room - size)
        return len(entries), room

    def _payload(self, origin: int, location: int, size: int, crc: int) -> bytes | None:
        """A copy of a payload; None when it left memory. Very old locations come round again: the checksum tells."""
        log = self._logs.of(origin)
        payload = None if log is None else log.copy(location, size)
        return payload if payload is not None and payload_crc(payload) == crc else None

    def _gone(self, found: FetchResult, ring: RingReader, ordered: int, ask: Fetch, now_us: int) -> None:
        """What comes next left memory. Serve what we have; with nothing in hand, tell the gap, or look on disk."""
        if found.payloads:
            return
        if self.stored is not None:
            self._first_retained(ring, ordered, now_us)  # so that the next one need not find out again
            found.elsewhere = at_index(ask, found.next_index)
            return
        self._retained = None
        start = max(self._first_retained(ring, ordered, now_us), found.next_index + 1)
        found.gap = Gap(GapKind.TRIMMED, found.next_index, start)
        found.next_index = start


_CLOSED = -2
"""News of a closed lane: no fetch waits there."""


class BrokerLaneReader(LaneReader):
    """Reads one lane. `lane_is` is what the store says about it; the broker keeps it up to date."""

    def __init__(self, reads: FabricReads, lane_is: TopicLane, margin: int, stored: StoredLane | None = None) -> None:
        super().__init__(reads, lane_is.lane, margin, stored)
        self._fabric, self.lane_is = reads.fabric, lane_is
        self._basis = lane_is  # what the last `ordered` went by
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
            return False  # the next one finds that nothing is on disk, or in memory, any more
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
                return None  # memory is lost, and it is not known yet what disks have
            return Ends(end, end_seq, end, end_seq)
        return super().ends()

    def seq_holes(self) -> list[Span]:
        end_seq, holes = self.lane_is.end_seq, super().seq_holes()
        last = self.stored.chain.ranges[-1:] if self.stored is not None else []
        sealed = last[0].end_seq if last else None
        return holes if sealed is None or end_seq is None or sealed >= end_seq else [*holes, Span(sealed, end_seq)]

    def _is_unwritten(self) -> bool:
        """Whether its writer has found no memory for it yet: then nothing in it was ever acked."""
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
        told = found is None or end is None or not found.empty or found.elsewhere is not None
        if found is not None and end is not None and not told and found.next_index == end:
            last = self._kept(ask.read, end)
            found.gap = None if last is None else Gap(GapKind.END_OF_LANE, last, last)
        return found

    def _kept(self, read: str, end: int) -> int | None:
        """Where the lane ends for a reader: of what is ordered it may have read above the end that disks have.

        None until its last range is sealed: with the memory, what disks do not have yet may still be lost.
        """
        if read != "ordered" or end == 0:
            return end
        if self.stored is not None and (ranges := self.stored.chain.ranges):
            return None if ranges[-1].end is None else min(ranges[-1].end, end)
        return end if self.lane_is.kept is None else min(self.lane_is.kept, end)  # it was trimmed, or has no replicas

    def locate(self, ask: Fetch, now_us: int) -> Location | None:
        end = self.lane_is.end
        return super().locate(ask, now_us) if end is None or self.ring() is not None else self._without_ring(ask, end)

    def _without_ring(self, ask: Fetch, end: int) -> Location | None:
        """The lane's memory is gone, or never was: everything below its end is on disk, trimmed or lost.

        A reader of what is ordered gets all that is lost as a gap, whatever was trimmed: it may have read that.
        """
        replicated = self.stored is not None or self.lane_is.removed  # or may have been
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
        """What is on disk, or lost: memory may have gone after the end was recorded, before all was durable.

        The last range is then sealed where disks end. None while it is open: it is not known yet what they have.
        """
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
    """The readers of all lanes, and what they read besides memory: replicas' disks, and tables of topics."""

    def __init__(self, view: BrokerView, logs: BrokerLogs, tables: TableJobs) -> None:
        context = self._context = view.context
        self._store, self._durable = view.store, view.durable
        self._reads = FabricReads(context.fabric, view.epoch, logs)
        self.disks = DiskReads(context.env.workers, DiskCopies(context.env.disks or no_disks))
        self.tables = tables
        self._readers: dict[int, LaneReader] = {}

    def update(self) -> None:
        """The store has changed."""
        for lane, reader in list(self._readers.items()):
            if not reader.follow(self._store):
                del self._readers[lane]
        members = {member.replica: member for member in self._context.directory.replicas.all()}
        self.disks.copies.keep(self._store.lanes.keys() | self._store.broker_lanes.keys(), members)

    def disconnected(self, peer: Peer) -> None:
        """A client is gone."""
        self.disks.disconnected(peer.number)
        self.tables.disconnected(peer.number)

    # --- readers ------------------------------------------------------------------------------------------------------
    def known(self, lane: int) -> LaneReader | None:
        """The reader of a lane that is being read."""
        return self._readers.get(lane)

    def reader(self, lane: int) -> LaneReader:
        """The reader of a lane. Raises UnknownTopic."""
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
            raise UnknownTopic(f"there is no topic with lane {lane}", "it was deleted; look it up again by name")
        if topic.order <= Order.BROKER:
            raise BadValue(f"topic {topic.name!r} has order {topic.order}: it has a lane per broker", "ask for a lane")
        stored = durable if topic.replicas else None
        return LaneReader(self._reads, lane, sizes.round_entries, stored)

    def fresh_reader(self, lane: int) -> LaneReader:
        """A reader that knows of every trim that was answered before now, by whichever broker."""
        self._store.refresh()
        return self.reader(lane)

    def lag(self, lane: int, index: int) -> int | None:
        """How many batches a reader at an index is behind the order; positions that are lost do not count."""
        reader = self._readers.get(lane)
        ordered = None if reader is None else reader.ordered()
        if reader is None or ordered is None:
            return None
        return max(0, ordered - index) if reader.stored is None else reader.stored.chain.batches(index, ordered)

    # --- files and tables ---------------------------------------------------------------------------------------------
    def durable_files(self, lane: int) -> Segments:
        """The files of a lane with replicas, as far as they are durable: for jobs beside the broker."""
        reader = self.fresh_reader(lane)
        if (stored := reader.stored) is None:
            raise BadValue(f"lane {lane} has no replicas", "ask for a lane of a topic with replicas")
        return self.segments(reader, stored)

    def segments(self, reader: LaneReader, stored: StoredLane, bound: int | None = None) -> Segments:
        """A lane's files, as far as they are durable, and below a bound.

        First it is counted, then ranges are looked at: what is counted by a new range says nothing of the old one.
        """
        durable = stored.through()
        below = durable if bound is None else min(bound, durable)
        return Segments(reader.lane, stored.chain, below, reader.trimmed, self.disks.copies)

    def tier(self, lane: int) -> Tier | None:
        """The table of a lane's topic, as the store has it now."""
        return self._context.directory.tiers.get(self._store.topic_name(lane) or "")

    def tiered(self, lane: int) -> int | None:
        """Batches of a lane below this index are in its topic's table; None if it has none, or the store fails."""
        try:
            tier = self.tier(lane)
        except EmbarcaderoError:
            return None
        return None if tier is None else tier.frontier(lane).index
