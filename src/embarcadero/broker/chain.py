"""A lane's ranges as one line of positions: who owns an index, and which positions are lost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from embarcadero.placement.ranges import lost_spans
from embarcadero.types import Gap, GapKind, Range, ReplicaRef


class Chain:
    """The ranges of one lane, oldest first, as the store had them at one moment."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges
        self._starts = [range_.start for range_ in ranges]
        self.lost = lost_spans(ranges)
        self.settled = self._settled()
        """Everything below is durable, or lost: it is in sealed ranges, or between them."""

    def _settled(self) -> int:
        if not self.ranges:
            return 0
        last = self.ranges[-1]
        return last.start if last.end is None else last.end

    @property
    def start(self) -> int:
        """The first index that any range owns."""
        return self._starts[0] if self._starts else 0

    @property
    def replicas(self) -> list[ReplicaRef]:
        """Who takes what is appended now."""
        return self.ranges[-1].replicas if self.ranges and self.ranges[-1].open else []

    def owner(self, index: int) -> Range | None:
        """The range that an index is in; None if it is lost, or outside all ranges."""
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return None
        range_ = self.ranges[at]
        return range_ if range_.end is None or index < range_.end else None

    def lost_at(self, index: int) -> Gap | None:
        """The rest of the LOST gap that an index is in, if it is in one."""
        at = bisect_right(self._starts, index)
        if at == 0 or at == len(self.ranges) or self.owner(index) is not None:
            return None
        return Gap(GapKind.LOST, index, self._starts[at])

    def after_lost(self, index: int) -> int:
        """The same index, or the end of the gap that it is in."""
        gap = self.lost_at(index)
        return index if gap is None else gap.stop

    def until_lost(self, index: int, stop: int) -> int:
        """Where the first LOST gap above an index begins, or `stop` if that is lower."""
        return next((start for start, _ in self.lost if index < start < stop), stop)

    def seq_at(self, index: int) -> int | None:
        """The seq at which an index begins, where ranges begin or end; None elsewhere."""
        for range_ in reversed(self.ranges):
            if index == range_.start:
                return range_.start_seq
            if index == range_.end:
                return range_.end_seq
            if index > range_.start:
                return None
        return None

    def from_index(self, index: int) -> Iterator[Range]:
        """Ranges that own something at or above an index, oldest first."""
        at = max(0, bisect_right(self._starts, index) - 1)
        for range_ in self.ranges[at:]:
            if range_.end is None or (range_.end > index and range_.end > range_.start):
                yield range_
