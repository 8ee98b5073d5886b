"""What the mirrors of lost fabrics tell about lanes: how far each was ordered, exactly.

Theory of operation. A writer's entries are in the mirror before anybody sees them (fabric/mirror.py), and the processes
of a lost generation are gone for good before the next one begins, so its mirror does not change any more. A lane is
read as a takeover reads it: the newest whole checkpoint, and the valid contiguous entries after it, in the ring of
the newest epoch that started; never the frontier, which only has to be at or below that end. The mirror's own epoch
table is asked, too, which epoch that is: starts are not synced, so the store may have forgotten it with its power. One
that was open and had not started has ordered nothing of its own. A broker's lane ends behind the valid entries at its
frontier. Everything acked, read or copied to a disk is below this end, and positions from there on were never handed
out.

The newest lost generation that has the lane's ring speaks for it. One that has none never began it: its recovery was
not done when that generation went, and the one before speaks. A generation without a mirror, or with a damaged one,
could say anything: then nothing is known, and positions go on above the ceiling as they do without a mirror.

What was ordered beyond the end that disks have is lost but for its numbers. Sessions come back as of what is on disk,
and not as of the mirror: a batch that was ordered and lost is no duplicate when its publisher sends it again, but gets
a new position, so that what nobody was promised is not lost at all. Only handles are counted on from the mirror's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.durability import RangeWord
from embarcadero.fabric.epochs import EpochTable
from embarcadero.fabric.layout import ORDER, Entries, join
from embarcadero.fabric.names import (
    EPOCHS_REGION,
    checkpoint_region,
    frontiers_region,
    order_region,
    ranges_region,
)
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import RingReader, attach_ring
from embarcadero.fabric.tagged import TaggedReader
from embarcadero.placement.records import Past
from embarcadero.sequencer.checkpoint import read_checkpoint
from embarcadero.sequencer.takeover import valid_from, valid_suffix
from embarcadero.types import EntryKind, Range, TopicLane

Mirrors = Callable[[Past], Fabric | None]
"""The mirror of an earlier generation; None when there is none (any more)."""


@dataclass(frozen=True, slots=True)
class LaneRemains:
    """Where a lane's order ended, and the newest entries before that."""

    end: int
    end_seq: int
    entries: Entries
    append_us: int = 0
    next_handle: int = 0

    def lost_above(self, kept: int) -> tuple[int, int]:
        """How many batches and records were ordered from an index on, as far as the ring tells."""
        lost = self.entries[(self.entries["index"] >= kept) & (self.entries["kind"] == EntryKind.BATCH)]
        return len(lost), int(lost["count"].sum(dtype=np.uint64))


class Remains:
    """The mirrors of generations that have not been recovered yet. Workers ask it: it touches no store."""

    def __init__(self, past: Sequence[Past] = (), mirrors: Mirrors | None = None) -> None:
        self._past, self._mirrors = past, mirrors

    def lane(self, ranges: Sequence[Range]) -> LaneRemains | None:
        """Where a lane of the sequencer ended; None if nobody knows. `ranges`: all that it has in the store."""
        last = ranges[-1]
        for fabric, epoch in self._newest_first():
            if fabric is None:
                return None
            if not fabric.exists(name := order_region(epoch, last.lane)):
                continue
            number = _open_range(fabric, epoch, last.lane)
            if number == 0:
                continue  # it was about to begin
            if number not in {range_.number for range_ in ranges}:
                return None  # of a topic that had this lane before
            return _at_least(_read_lane(fabric, name, checkpoint_region(epoch, last.lane)), last)
        return self._never_begun(last)

    def broker_lane(self, lane: TopicLane, range_: Range) -> LaneRemains | None:
        """Where a lane of a broker ended; None if nobody knows."""
        for fabric, _ in self._newest_first():
            if fabric is None:
                return None
            if fabric.exists(lane.region):
                return _read_broker_lane(attach_ring(fabric, lane.region, ORDER))
        return self._never_begun(range_)

    def _newest_first(self) -> list[tuple[Fabric | None, int]]:
        return [self._open(past) for past in reversed(self._past)]

    def _open(self, past: Past) -> tuple[Fabric | None, int]:
        """A mirror, and its newest epoch. Without what that one made first it is not whole."""
        found = None if self._mirrors is None or not past.mirror else self._mirrors(past)
        if found is None or not found.exists(EPOCHS_REGION):
            return None, past.epoch
        epoch = max(past.epoch, EpochTable(found, found.attach(EPOCHS_REGION)).last_started())
        return found if found.exists(frontiers_region(epoch)) else None, epoch

    def _never_begun(self, range_: Range) -> LaneRemains | None:
        """No generation that could have ordered something in this range ever began to."""
        return _nothing_above(range_) if self._past else None


def _nothing_above(range_: Range) -> LaneRemains:
    return LaneRemains(range_.start, range_.start_seq, np.empty(0, dtype=ORDER))


def _at_least(found: LaneRemains | None, range_: Range) -> LaneRemains | None:
    """A range that was opened above what a mirror knows, for a lane that had no time to begin there, is empty."""
    if found is None or found.end >= range_.start:
        return found
    return replace(_nothing_above(range_), append_us=found.append_us, next_handle=found.next_handle)


def _open_range(fabric: Fabric, epoch: int, lane: int) -> int:
    """The number of the range that the epoch's sequencer last said was open in a lane; 0: none."""
    name = ranges_region(epoch)
    word = TaggedReader(fabric.attach(name)).load((lane, 0)) if fabric.exists(name) else None
    return RangeWord.decode(word).number if word else 0


def _read_lane(fabric: Fabric, name: str, checkpoints: str) -> LaneRemains | None:
    ring = attach_ring(fabric, name, ORDER)
    checkpoint = read_checkpoint(fabric, checkpoints) if fabric.exists(checkpoints) else None
    if checkpoint is None:
        return None
    start, header = checkpoint.index, checkpoint.header
    after = valid_from(ring, start)
    end, last = start + len(after), after[-1:]
    if ring.frontier.load() > end:
        return None  # an entry that was published is damaged
    before = valid_suffix(ring, max(0, min(start, end - ring.slots)), start)
    entries = join([before, after])
    opened = entries[entries["kind"] == EntryKind.SESSION_OPEN]["session"]
    return LaneRemains(
        end, int(last["seq"][0]) + int(last["count"][0]) if len(last) else int(header["seq"]), entries,
        append_us=int(last["append_us"][0]) if len(last) else int(header["append_us"]),
        next_handle=max(int(header["next_handle"]), int(opened.max(initial=0)) + 1 if len(opened) else 0),
    )  # fmt: skip


def _read_broker_lane(ring: RingReader) -> LaneRemains | None:
    end = ring.valid_end(ring.frontier.load())
    entries = valid_suffix(ring, max(0, end - ring.slots), end)
    if end and not len(entries):
        return None
    seq = int(entries["seq"][-1]) + int(entries["count"][-1]) if end else 0
    return LaneRemains(end, seq, entries)


def told_by(remains: Remains, ranges: Sequence[Range], lane: TopicLane | None) -> LaneRemains | None:
    """Where a lane ended, as far as mirrors tell; a mirror that can't be read tells nothing."""
    try:
        return remains.lane(ranges) if lane is None else remains.broker_lane(lane, ranges[-1])
    except EmbarcaderoError:
        return None
