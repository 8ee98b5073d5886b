"""Lock-free reading of a range's copy, from any process, while its owner appends, rolls over, cuts and drops.

The owner gives no information. Names, headers and footers locate records; entries and checksums show whether they are
valid. Records that are not there (yet) give an empty result, wrong ones BadSegment, dropped ones Trimmed. One thread at
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
"""Number of segments that a reader keeps open."""
_POSITIONS_MAX = 64
"""Number of remembered positions for sequential reads."""


class RangeReader:
    """One replica's copy of a range, for reading. A missing folder reads as an empty range.

    `start`: where the range starts. A copy that lost its start file is trusted only if it starts there.
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
        """List the segments again."""
        try:
            bases = base_seqs(self._disk.list(self.folder))
        except Missing:
            bases = []
        if self._bases and (not bases or self._bases[-1] not in bases):
            self.close()  # it was cut: the remembered end is no longer valid
        for gone in set(self._open) - set(bases):
            self._open.pop(gone).close()
        self._bases = bases

    def close(self) -> None:
        """Close all files. Reading opens them again."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()
        self._positions.clear()
        self._indices.clear()

    def _look(self, look: Callable[[], T | None]) -> T | None:
        """Return the result of a lookup; if there is none, repeat it with newly opened files.

        A segment that was cut away and created again has the same name: an open file may be the removed one.
        """
        found = look()
        if found is None and self._open:
            self.close()
            found = look()
        return found

    @property
    def first(self) -> int | None:
        """The lowest index in the copy, or None. Raises BadSegment if the first segment is missing.

        The owner writes the start file before it drops anything: a file that is missing above was deleted.
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
            hint = "the replica gets missing records from a peer"
            raise BadSegment(f"{self.folder} starts at {first}, but its {START_FILE} file is missing", hint)
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
        """Return the segment that contains an index, if any. Raises BadSegment if it is unreadable."""
        try:
            number = bisect_right(self._bases, index, key=self._base_index) - 1
        except BadSegment:
            return self._holding_among_readable(index)
        return self._segment(self._bases[number]) if number >= 0 else None

    def _holding_among_readable(self, index: int) -> SegmentReader | None:
        """Do the same when a segment has no readable header."""
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
        """Return checked records from `index` to below `end`, up to `max_bytes`, but at least one if it is here.

        Payloads are views into few buffers. An empty result means that the copy ends here (so far).
        """
        for again in (False, True):
            if again:
                self.close()  # an open file may be a removed one, see _look
                self.refresh()
            try:
                found = self._read(index, end, max_bytes)
            except Missing:
                continue  # dropped between two lookups
            if found is not None:
                return found
        if self._below(index) and (first := self.first) is not None and index < first:
            raise Trimmed(f"{self.folder} starts at {first}; {index} was dropped", f"read from {first} on")
        return NO_ENTRIES, []

    def _below(self, index: int) -> bool:
        """Return whether an index is below the whole copy, or may be because the first file is being dropped."""
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
                    f"record {index} is missing or damaged in {segment.name}",
                    "the replica repairs it from a peer; read from another replica meanwhile",
                )
        return spot

    def entry(self, index: int) -> Entries | None:
        """Return one record's entry, checked; None if it is not here."""
        return self._look(lambda: self._entry(index))

    def _entry(self, index: int) -> Entries | None:
        found = self.entries(index, index + 1)
        return found if len(found) else None

    def entries(self, index: int, end: int) -> Entries:
        """Return checked entries from `index` to `end`, without payloads, as far as they are here."""
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
        """Return where records from `index` on end, up to `end`, according to headers and footers.

        Returns `index` itself if it is not here, or if its segment is unreadable.
        """
        self.refresh()
        try:
            while index < end and (segment := self._holding(index)) is not None and segment.end_index > index:
                index = min(end, segment.end_index)
        except (BadSegment, Missing):
            pass
        return index

    def points(self, index: int, end: int, every: int, max_bytes: int) -> tuple[list[Point], int]:
        """Return records of [index, end) about `every` bytes apart, and the index where the list ends.

        The list ends at `end`, or after `max_bytes`. Dropped records are skipped. Raises BadSegment if the copy ends
        earlier.
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
        """Return the index of the batch that contains a record, or of the first batch if all are later; else None."""
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
        """Return the index of the first batch appended at or after this time; None if it is not here."""
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
        return BadSegment(f"records in or after {segment.name} are missing", "read from another replica")

    def _first_reaching(self, us: int) -> int:
        """Return the number of the last segment that begins before a time. Append times never decrease."""
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
