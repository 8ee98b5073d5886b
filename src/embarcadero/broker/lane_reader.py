"""Reading a lane of orders 0 and 1, whichever broker incarnation wrote it, alive or dead.

An open lane ends at its writer's frontier, and something of it may be served only if the writer still counts as open
after it was loaded: a sequencer that closes an incarnation says so before it looks where its lanes end. A closed lane
ends where the store says; what its writer may have written above that does not exist.
"""

from __future__ import annotations

import numpy as np

from embarcadero.broker.epoch import EpochView
from embarcadero.broker.found import Found
from embarcadero.broker.pieces import Hot
from embarcadero.broker.reader import Ends, LaneReader, Logs
from embarcadero.broker.stored import ON_DISK, StoredLane, at_index
from embarcadero.errors import FuturePosition
from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.region import Fabric, attach_unless_removed
from embarcadero.fabric.ring import RingReader
from embarcadero.types import Gap, GapKind, TopicLane
from embarcadero.wire.messages import Fetch

_CLOSED = -2
"""News of a closed lane: no fetch waits there."""


class BrokerLaneReader(LaneReader):
    """Reads one lane. `lane_is` is what the store says about it; the broker keeps it up to date."""

    def __init__(
        self, fabric: Fabric, epoch: EpochView, logs: Logs, lane_is: TopicLane, margin: int,
        stored: StoredLane | None = None,
    ) -> None:  # fmt: skip
        super().__init__(epoch, logs, lane_is.lane, margin, stored)
        self._fabric, self.lane_is = fabric, lane_is
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

    def seq_holes(self) -> list[tuple[int, int]]:
        end_seq, holes = self.lane_is.end_seq, super().seq_holes()
        last = self.stored.chain.ranges[-1:] if self.stored is not None else []
        sealed = last[0].end_seq if last else None
        return holes if sealed is None or end_seq is None or sealed >= end_seq else [*holes, (sealed, end_seq)]

    def _is_unwritten(self) -> bool:
        """Whether its writer has found no memory for it yet: then nothing in it was ever acked."""
        self._basis = self.lane_is
        return self._basis.open and self.ring() is None and self.may_serve()

    def start(self, now_us: int) -> tuple[int, int] | None:
        end = self.lane_is.end
        if self._is_unwritten():
            return 0, 0
        if end is not None and (end == 0 or self.ring() is None):
            return end, self.lane_is.end_seq or 0
        return super().start(now_us)

    def locate(self, by: str, value: int) -> tuple[int, int | None] | None:
        end = self.lane_is.end
        if end is None or self.ring() is not None:
            return super().locate(by, value)
        place = self._place_without_ring(by, value, end)
        if self.stored is not None and place < end:
            return ON_DISK, None
        return place, self.lane_is.end_seq if place == end else None

    def measured(self, start: int, stop: int) -> Hot | None:
        end = self.lane_is.end
        if end is None or self.ring() is not None:
            return super().measured(start, stop)
        if stop > end:
            self._place_without_ring("index", stop, end)
        return Hot(stop, np.zeros(0, dtype=ORDER), self.lane_is.end_seq if stop == end else None)

    def fetch(self, ask: Fetch, now_us: int) -> Found | None:
        end = self.lane_is.end
        found = super().fetch(ask, now_us) if end is None or self.ring() is not None else self._without_ring(ask, end)
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

    def _without_ring(self, ask: Fetch, end: int) -> Found | None:
        """The lane's memory is gone, or never was: everything below its end is on disk, trimmed or lost.

        One who reads what is ordered is told of all that is lost, whatever was trimmed: it may have read that.
        """
        replicated = self.stored is not None or self.lane_is.removed  # or may have been
        if replicated and ask.by == "index" and ask.start > end and ask.read == "ordered":
            ask = at_index(ask, end)
        start, kept = self._place_without_ring(ask.by, ask.start, end), self._kept(ask.read, end)
        if ask.by == "index" and kept is not None and kept <= start < end:
            return self._lost(ask, kept, end)
        if self.stored is not None and start < end:
            return self._below_end(self.stored, ask, end)
        gap = Gap(GapKind.TRIMMED, start, end) if start < end else None
        return Found(np.zeros(0, dtype=ORDER), [], end, end, gap)

    def _below_end(self, stored: StoredLane, ask: Fetch, end: int) -> Found | None:
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

    def _lost(self, ask: Fetch, kept: int, end: int, trimmed: int = 0) -> Found:
        gap = Gap(GapKind.LOST, kept, end)
        kind = GapKind.LOST if self.stored is None else self.stored.kind_for(ask, gap)
        return Found(np.zeros(0, dtype=ORDER), [], end, end, Gap(kind, max(kept, trimmed), end))

    def _place_without_ring(self, by: str, value: int, end: int) -> int:
        by_seq = 0 if value < (self.lane_is.end_seq or 0) else end
        others = 0 if self.stored is not None and by != "latest" else end
        place = {"index": value, "seq": by_seq}.get(by, others)
        if place > end:
            raise FuturePosition(f"index {place} is beyond the end of the lane ({end})", "the lane is closed")
        return place
