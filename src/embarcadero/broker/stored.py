"""A lane with replicas beside its memory: how far it is durable, and where an index is to be looked for.

between two ranges      a LOST gap for readers of what is ordered, who may have read there
below the trim          a TRIMMED gap
between two ranges      a LOST gap, or NEVER_DURABLE
not in memory any more  segment files of the range that owns it (warm.py)
else                    order ring and broker logs (reader.py)
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from embarcadero.broker.chain import Chain
from embarcadero.broker.durable import DurableFrontiers
from embarcadero.broker.found import Found
from embarcadero.fabric.layout import ORDER
from embarcadero.types import Gap, GapKind
from embarcadero.wire.messages import Fetch

ON_DISK: Final = -1
"""In place of an index: it is below what memory can tell."""


class StoredLane:
    """What readers of one lane have to know of its ranges and its durable frontier."""

    def __init__(self, lane: int, durable: DurableFrontiers) -> None:
        self._lane, self._durable = lane, durable

    @property
    def chain(self) -> Chain:
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

    def not_in_memory(self, index: int, bound: int, hot_from: int, trimmed: int, ask: Fetch) -> Found | None:
        """What to tell a reader of an index that memory does not have; None if it may have it."""
        if index >= bound:
            return None
        nothing = np.zeros(0, dtype=ORDER)
        gap, start = self.chain.lost_at(index), max(trimmed, self.chain.start)
        if gap is not None and ask.read == "ordered":  # it may have read there, whatever was trimmed since
            return Found(nothing, [], gap.stop, bound, gap._replace(kind=self.kind_for(ask, gap)))
        if index < start:
            return Found(nothing, [], start, bound, Gap(GapKind.TRIMMED, index, start))
        if gap is not None:
            gap = gap._replace(kind=self.kind_for(ask, gap), start=max(gap.start, trimmed))
            return Found(nothing, [], gap.stop, bound, gap)
        if index < hot_from:
            return Found(nothing, [], index, bound, elsewhere=at_index(ask, index))
        return None

    def kind_for(self, ask: Fetch, gap: Gap) -> GapKind:
        """What a LOST gap is to a reader: one of durable records has lost nothing, if nothing there was durable."""
        never = ask.read == "durable" and ask.never_durable and self.chain.never_durable(gap)
        return GapKind.NEVER_DURABLE if never else gap.kind

    def without_memory(self, ask: Fetch, trimmed: int, end: int) -> Found | None:
        """The lane has no memory (it is being recovered, or is closed and gone): what is below `end` is on disk.

        None for what is not: where that is can't be told yet.
        """
        if ask.by == "latest" or (ask.by == "index" and ask.start >= end):
            return None
        if ask.by == "seq" and (end_seq := self.chain.seq_at(end)) is not None and ask.start >= end_seq:
            return None
        if ask.by == "index":
            return self.not_in_memory(ask.start, end, end, trimmed, ask)
        return Found(np.zeros(0, dtype=ORDER), [], 0, end, elsewhere=ask)


def at_index(ask: Fetch, index: int) -> Fetch:
    """The same fetch from an index on."""
    return msgspec.structs.replace(ask, by="index", start=index)
