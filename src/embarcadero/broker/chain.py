"""A lane's ranges as one line of positions: who owns an index, and which positions are lost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from embarcadero.placement.ranges import lost_spans
from embarcadero.types import Gap, GapKind, Range, ReplicaRef, count_outside


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
        """The LOST gap that an index is in, if it is in one: from the end at which the range before it was sealed.

        A reader of what is only ordered may be above that end: it learns that what it read there is gone. Gaps with
        nothing between them, of two losses in a row, are one. A reader in the second was told of the first before.
        """
        at = bisect_right(self._starts, index)
        before, after = self.ranges[at - 1 : at], self.ranges[at:]
        if not before or not after or self.owner(index) is not None:
            return None
        stop = next((range_.start for range_ in after if range_.start != range_.end), after[-1].start)
        start = before[0].end
        return Gap(GapKind.LOST, index if start is None else start, stop)

    def never_durable(self, gap: Gap) -> bool:
        """Whether nothing in a LOST gap ever was durable, as those say who sealed the ranges before it.

        An empty range between two losses may have been sealed in order: nothing is missing right behind it.
        """
        following = [*(range_.start for range_ in self.ranges[1:]), gap.stop]
        sealed = [
            range_
            for range_, start in zip(self.ranges, following, strict=True)
            if range_.end is not None and gap.start <= range_.end < min(start, gap.stop)
        ]
        return bool(sealed) and all(range_.never_durable for range_ in sealed)

    @property
    def seq_holes(self) -> list[tuple[int, int]]:
        """Spans of seqs between ranges: restarts passed over them."""
        pairs = ((old.end_seq, new.start_seq) for old, new in pairwise(self.ranges))
        return [(end, start) for end, start in pairs if end is not None and end < start]

    def batches(self, start: int, stop: int) -> int:
        """How many positions of [start, stop) are not lost."""
        return count_outside(start, stop, self.lost)

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
