"""Reading a range's copy, from any process, without a lock, while its owner appends, rolls over, cuts and drops.

Nothing here is told by the owner: names, headers and footers say where records are, entries and checksums whether they
are right. What is not there (yet) is "nothing", what is wrong is BadSegment, what was dropped is Trimmed. One thread at
a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from embarcadero.env import Disk, Missing
from embarcadero.errors import BadSegment, Trimmed
from embarcadero.fabric.layout import Entries, join, sealed
from embarcadero.storage.layout import START_FILE, base_seqs, segment_name
from embarcadero.storage.scan import NO_ENTRIES
from embarcadero.storage.segment import Point, SegmentReader, Spot, read_position

T = TypeVar("T")

_OPEN_MAX = 16
"""Segments that a reader keeps open."""
_POSITIONS_MAX = 64
"""Positions from which reads are expected to go on."""


class RangeReader:
    """One replica's copy of a range, for reading. A folder that is not there reads as an empty range.

    `start`: where the range begins. A copy that has lost its own note of that is believed only if it starts there.
    """

    def __init__(self, disk: Disk, folder: str, lane: int, range_number: int, start: int) -> None:
        self._disk, self.folder, self._lane, self._range_number = disk, folder, lane, range_number
        self._start = start
        self._open: OrderedDict[int, SegmentReader] = OrderedDict()
        self._positions: OrderedDict[int, tuple[int, Spot]] = OrderedDict()
        self._bases: list[int] = []
        self._indices: dict[int, int] = {}
        self.refresh()

    # --- segments -----------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Look again which segments there are."""
        try:
            bases = base_seqs(self._disk.list(self.folder))
        except Missing:
            bases = []
        if self._bases and (not bases or self._bases[-1] not in bases):
            self.close()  # it was cut: what we remember of its end is no longer so
        for gone in set(self._open) - set(bases):
            self._open.pop(gone).close()
        self._bases = bases

    def close(self) -> None:
        """Let go of all files. Reading opens them again."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()
        self._positions.clear()
        self._indices.clear()

    def _look(self, look: Callable[[], T | None]) -> T | None:
        """What a look finds; where that is nothing, what it finds in files that were opened anew.

        A segment that was cut away and made again has the same name: what we had open may be the one that is gone.
        """
        found = look()
        if found is None and self._open:
            self.close()
            found = look()
        return found

    @property
    def first(self) -> int | None:
        """The lowest index that is kept here; None if nothing is. BadSegment if it should be here, and is not.

        The owner notes where its copy starts before it drops anything: a file that is missing above was deleted.
        """
        start = read_position(self._disk, self.folder, START_FILE, self._lane, self._range_number)
        if start is None:
            return self._first_without_note()
        if start.seq not in self._bases:
            self.refresh()
        if start.seq not in self._bases:
            raise self._missing(start.seq)
        return start.index

    def _first_without_note(self) -> int | None:
        if not self._bases:
            return None
        first = self._base_index(self._bases[0])
        if first > self._start:
            hint = "the replica gets what is missing from a peer"
            raise BadSegment(f"{self.folder} begins at {first}, and {START_FILE} is missing: was more there?", hint)
        return first

    def _missing(self, seq: int) -> BadSegment:
        return BadSegment(f"{segment_name(seq)} of {self.folder} is missing", "the replica gets it from a peer")

    def _segment(self, base: int) -> SegmentReader:
        segment = self._open.get(base)
        if segment is None:
            segment = self._open[base] = SegmentReader(self._disk, self.folder, base, self._lane, self._range_number)
            self._indices[base] = segment.header.base_index
            if len(self._open) > _OPEN_MAX:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(base)
        return segment

    def _base_index(self, base: int) -> int:
        if base not in self._indices:
            self._segment(base)
        return self._indices[base]

    def _holding(self, index: int) -> SegmentReader | None:
        """The segment that holds an index, if any does; BadSegment if that one can't be read."""
        try:
            number = bisect_right(self._bases, index, key=self._base_index) - 1
        except BadSegment:
            return self._holding_among_readable(index)
        return self._segment(self._bases[number]) if number >= 0 else None

    def _holding_among_readable(self, index: int) -> SegmentReader | None:
        """The same, where a segment has no header to go by."""
        found: SegmentReader | None = None
        bad: BadSegment | None = None
        for base in self._bases:
            try:
                if self._base_index(base) > index:
                    break
                found, bad = self._segment(base), None
            except BadSegment as error:
                bad = error
        if bad is not None and (found is None or index >= found.end_index):
            raise bad
        return found

    # --- reading ------------------------------------------------------------------------------------------------------
    def read(self, index: int, end: int, max_bytes: int) -> tuple[Entries, list[memoryview]]:
        """Records from `index` on, below `end`: as many as are here and fit `max_bytes`, at least one if it is here.

        All are checked. Payloads are views into few buffers. Nothing: the copy ends here (so far).
        """
        for again in (False, True):
            if again:
                self.close()  # what we have open may be gone, see _look
                self.refresh()
            try:
                found = self._read(index, end, max_bytes)
            except Missing:
                continue  # dropped between two looks
            if found is not None:
                return found
        if self._below(index) and (first := self.first) is not None and index < first:
            raise Trimmed(f"{self.folder} begins at {first}, {index} was dropped", f"read from {first} on")
        return NO_ENTRIES, []

    def _below(self, index: int) -> bool:
        """Whether an index is below all that is here; perhaps, if the first file goes at this very moment."""
        try:
            return bool(self._bases) and index < self._base_index(self._bases[0])
        except Missing:
            return True

    def _read(self, index: int, end: int, max_bytes: int) -> tuple[Entries, list[memoryview]] | None:
        if index >= end:
            return NO_ENTRIES, []
        known = self._positions.pop(index, None)
        if known is not None and known[0] in self._open:
            segment, spot = self._segment(known[0]), known[1]
        else:
            holding = self._holding(index)
            located = None if holding is None else self._locate(holding, index)
            if holding is None or located is None:
                return None
            segment, spot = holding, located
        piece = segment.read(spot, index, end, max_bytes)
        if not piece.payloads:
            return None
        if segment.footer is None or piece.position < segment.footer.bytes:
            stride = max(64, (piece.position - spot.position) // len(piece.payloads))
            self._remember(index + len(piece.payloads), segment, Spot(piece.position, stride))
        return piece.entries, piece.payloads

    def _remember(self, index: int, segment: SegmentReader, spot: Spot) -> None:
        self._positions[index] = segment.header.base_seq, spot
        if len(self._positions) > _POSITIONS_MAX:
            self._positions.popitem(last=False)

    def _locate(self, segment: SegmentReader, index: int) -> Spot | None:
        spot = segment.locate(index)
        if spot is None:
            segment.refresh()
            if segment.footer is not None and segment.header.base_index <= index < segment.footer.end_index:
                raise BadSegment(
                    f"record {index} is not in {segment.name} as it should be",
                    "the replica repairs it from a peer; read from another replica meanwhile",
                )
        return spot

    def entry(self, index: int) -> Entries | None:
        """One record's entry, checked; None if it is not here."""
        return self._look(lambda: self._entry(index))

    def _entry(self, index: int) -> Entries | None:
        found = self.entries(index, index + 1)
        return found if len(found) else None

    def entries(self, index: int, end: int) -> Entries:
        """Entries from `index` to `end`, without payloads, as far as they are here."""
        found: list[Entries] = []
        self.refresh()
        while index < end:
            segment = self._holding(index)
            spot = None if segment is None else self._locate(segment, index)
            if segment is None or spot is None:
                break
            before = index
            for entries, _ in segment.walk(spot.position, index):
                found.append(entries[: end - index])
                index += len(found[-1])
                if index >= end:
                    break
            if index == before or (segment.footer is not None and index < min(end, segment.footer.end_index)):
                raise BadSegment(f"record {index} in {segment.name} is damaged", "read from another replica")
            if segment.footer is None:
                break
        return join(found) if found else NO_ENTRIES

    def covered(self, index: int, end: int) -> int:
        """Where records from `index` on end, at most at `end`: by headers and footers, without a look at records.

        `index` itself if it is not here, or the segment that should have it can't be read.
        """
        self.refresh()
        try:
            while index < end and (segment := self._holding(index)) is not None and segment.end_index > index:
                index = min(end, segment.end_index)
        except (BadSegment, Missing):
            pass
        return index

    def points(self, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
        """Records of [index, end) about so many bytes apart, and where they end: there, or behind `max_bytes`.

        What was dropped is passed over; BadSegment if the copy ends before.
        """
        self.refresh()
        found: list[Point] = []
        at, left = max(index, self.first or 0), max_bytes
        while at < end and left > 0:
            segment = self._holding(at)
            stop = at if segment is None else min(end, segment.end_index)
            if segment is None or stop <= at:
                raise BadSegment(f"{self.folder} ends before {at}", "read from another replica")
            found += segment.points(at, stop, every)
            at, left = stop, max_bytes - sum(point.bytes for point in found)
        return found, at

    # --- finding ------------------------------------------------------------------------------------------------------
    def find_seq(self, seq: int) -> int | None:
        """Index of the batch that holds a record, or of the first one if all come after it; None if it is not here."""
        return self._look(lambda: self._find_seq(seq))

    def _find_seq(self, seq: int) -> int | None:
        self.refresh()
        number = bisect_right(self._bases, seq) - 1
        if number < 0:
            return self.first
        segment = self._segment(self._bases[number])
        found = segment.index_of_seq(seq)
        if found is not None:
            return found
        if number + 1 < len(self._bases) or (segment.footer is not None and seq < segment.footer.end_seq):
            raise self._hole(segment)
        return None

    def find_time(self, us: int) -> int | None:
        """Index of the first batch that was appended at this time or later; None if that is not here."""
        return self._look(lambda: self._find_time(us))

    def _find_time(self, us: int) -> int | None:
        self.refresh()
        before: SegmentReader | None = None
        for base in self._bases[self._first_reaching(us) :]:
            segment = self._segment(base)
            first = segment.header.base_index
            if before is not None and before.end_index != first:
                raise self._hole(before)
            found = segment.index_of_time(us)
            if found is None and segment.footer is not None and segment.footer.last_us >= us:
                raise self._hole(segment)
            if found is not None:
                return self.first if before is None and found == first else found
            before = segment
        return None

    def _hole(self, segment: SegmentReader) -> BadSegment:
        return BadSegment(f"records of {segment.name}, or behind it, are missing", "read from another replica")

    def _first_reaching(self, us: int) -> int:
        """The number of the last segment that begins before a time: append times never go back."""
        low, high = 0, len(self._bases)
        while low < high:
            middle = (low + high) // 2
            segment = self._segment(self._bases[middle])
            entry = segment.entry(128)
            if len(entry) and np.count_nonzero(sealed(entry)) and int(entry["append_us"][0]) < us:
                low = middle + 1
            else:
                high = middle
        return max(0, low - 1)
