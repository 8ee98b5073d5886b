"""Sources of recovery: a lane's sessions from the disks of its replicas, and its end from mirrors.

Sessions are the newest checkpoint on disk, and the entries after it. This runs beside the rounds, on a worker: it reads
files, and does not touch the sequencer's state.

`DiskSource` reads the folders of replicas, only for lanes that are recovered after a restart. `MirrorSnapshot` reads
the exact end of each lane's order from the mirrors of lost fabrics.

Mirrors. A writer's entries are in the mirror before any process sees them (fabric/shared.py). The processes of a lost
generation are permanently gone before the next generation begins, so its mirror does not change any more. A lane is
read as in a takeover: the newest whole checkpoint, and the valid contiguous entries after it, in the ring of the newest
started epoch. The frontier never determines the end; it must only be at or below it. The newest started epoch comes
from the store and from the mirror's own epoch table, because starts are not synced, and a power failure may remove one
from the store. An epoch that was open and had not started ordered nothing of its own. A broker's lane ends after the
valid entries at its frontier. Everything acked, read or copied to a disk is below this end, and positions from there on
were never handed out.

The newest lost generation that has the lane's ring is the source. A generation without the ring never began the lane,
because it was lost before it had recovered the lane. Then the generation before it is the source. A generation without
a mirror, or with a damaged mirror, gives no information. Then positions continue above the ceiling, as without a
mirror.

Entries that were ordered above the end of the disks are lost; only their number is known. Sessions are restored as of
the disks, not as of the mirror. So a batch that was ordered and lost is not a duplicate when its publisher sends it
again: it gets a new position. Therefore a batch that was never acked as durable is not lost at all. Only handles
continue from the mirror's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from embarcadero.env import Disk
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries, RangeWord, join
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.lines import RingReader, TaggedReader, attach_ring
from embarcadero.fabric.region import (
    EPOCHS_REGION,
    Fabric,
    checkpoint_region,
    frontiers_region,
    order_region,
    ranges_region,
)
from embarcadero.placement.records import EarlierGeneration
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import (
    Checkpoint,
    learn_positions,
    parse_checkpoint,
    read_checkpoint,
    replay,
    restore,
)
from embarcadero.sequencer.order.lane import valid_from, valid_suffix
from embarcadero.sequencer.order.sessions import OPEN, ReorderBuffer, SessionTable
from embarcadero.storage.folder import newest_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.types import (
    NO_SESSION,
    EntryKind,
    Range,
    RangeKey,
    ReplicaMember,
    ReplicaState,
    Topic,
    TopicLane,
)

_CHUNK: Final = 4_096
_POSITIONS: Final = 65_536
"""Number of entries before a checkpoint that are read, for the positions of batches that may be sent again."""

_ROWS_MAX: Final = 1 << 22
_TRIES_MAX: Final = 8


class RecoverySource(Protocol):
    """Reads copies on the disks of replicas. Skips damaged copies; raises BadSegment when no good one is reachable."""

    def checkpoint(self, topic: Topic, at_most: int) -> tuple[int, bytes] | None:
        """Find the newest session checkpoint of a topic at or below an index."""
        ...

    def entries(self, range_: Range, start: int, stop: int) -> Entries:
        """Read all entries [start, stop) of a range."""
        ...


def seq_at_end(source: RecoverySource, range_: Range, end: int) -> int:
    """Compute the seq at `end`, the future end of a range."""
    if end <= range_.start:
        return range_.start_seq
    last = source.entries(range_, end - 1, end)
    return int(last["seq"][0]) + int(last["count"][0])


def restore_lane(
    source: RecoverySource,
    topic: Topic,
    ranges: Sequence[Range],
    end: int,
    sessions: int,
    buffer: ReorderBuffer,
    now_us: int,
) -> LaneOrder:
    """Restore a lane's sessions as of `end`. `ranges` are all of its ranges; the last one ends at or above `end`."""
    saved = _checkpoint(source, topic, ranges, end)
    first = min((range_.start for range_ in ranges), default=0)
    start = saved.index if saved is not None else 0
    if start < first:  # a range is removed only below a checkpoint on enough disks: unreachable replicas have it
        raise BadSegment(
            f"the log of topic {topic.name} begins at {first}, and no reachable replica has a checkpoint of its "
            "sessions at or above that index",
            "start the missing replicas",
        )
    parts = _entries(source, ranges, start, end)
    rows = rows_for(sessions, saved, parts)
    order = LaneOrder(topic, SessionTable(sessions, rows), buffer)
    if saved is not None:
        restore(order, saved, now_us)
        _learn(source, order, ranges, saved.index)
    for part in parts:
        replay(order, part, now_us)
    order.settle_in(now_us)
    return order


def fence_all(order: LaneOrder, now_us: int) -> list[int]:
    """Fence all open sessions, because acked sequences may be lost. Returns their rows."""
    rows: list[int] = np.flatnonzero(order.table.state == OPEN).tolist()
    for row in rows:
        order.table.fence(row, now_us)
    return rows


def _checkpoint(source: RecoverySource, topic: Topic, ranges: Sequence[Range], end: int) -> Checkpoint | None:
    """Find the newest good checkpoint at or below `end` that covers only entries of the lane's ranges.

    A checkpoint from between two ranges covers lost entries: some disk had more than those that replied.
    """
    at_most = end
    for _ in range(_TRIES_MAX):
        found = source.checkpoint(topic, at_most)
        if found is None:
            return None
        index, data = found
        kept = _last_kept(ranges, index, end)
        checkpoint = parse_checkpoint(data)
        if kept == index and checkpoint is not None and checkpoint.index == index:
            return checkpoint
        at_most = min(kept, index - 1)
    return None


def _last_kept(ranges: Sequence[Range], index: int, end: int) -> int:
    """Find the highest index at or below `index` that is in a range, or is the end of one."""
    ends = [end if range_.end is None else range_.end for range_ in ranges if range_.start <= index]
    return min(index, max(ends, default=-1))


def rows_for(sessions: int, saved: Checkpoint | None, parts: list[Entries]) -> int:
    """Compute the number of rows that the table needs, so that no two sessions share a row."""
    if saved is not None:
        return max(sessions, saved.capacity - 1)
    named = [part["session"][part["session"] != NO_SESSION] for part in parts]
    handles = np.unique(np.concatenate([np.empty(0, dtype=np.uint32), *named]))
    while sessions < _ROWS_MAX and len(np.unique(handles & np.uint32((1 << sessions.bit_length()) - 1))) < len(handles):
        sessions *= 2
    return min(sessions, _ROWS_MAX)


def _entries(source: RecoverySource, ranges: Sequence[Range], start: int, stop: int) -> list[Entries]:
    """Read the entries of [start, stop) that are in a range, in pieces."""
    parts: list[Entries] = []
    for range_ in ranges:
        last = stop if range_.end is None else min(stop, range_.end)
        starts = range(max(start, range_.start), last, _CHUNK)
        parts += [source.entries(range_, at, min(at + _CHUNK, last)) for at in starts]
    return parts


def _learn(source: RecoverySource, order: LaneOrder, ranges: Sequence[Range], index: int) -> None:
    """Learn the positions of batches below the checkpoint, as far as the log has them. Useful, but not required."""
    try:
        parts = _entries(source, ranges, max(0, index - _POSITIONS), index)
    except EmbarcaderoError:
        return
    learn_positions(order, np.concatenate([np.empty(0, dtype=ORDER), *parts]))


_DO = "start the missing replicas"


class DiskSource:
    """Reads from any replica that has a good copy. Entries may also come from folders of replicas that are down.

    Workers call it, so it gets the members from memory, never from the store.
    """

    def __init__(
        self, members: Callable[[], list[ReplicaMember]], disks: Callable[[ReplicaMember], Disk] | None
    ) -> None:
        self._members, self._disks = members, disks
        self._opened: dict[tuple[int, int], Disk] = {}

    def _all(self, first: list[int], live: bool = False) -> Iterator[Disk]:
        """Yield the disks of these replicas, and then of all others, if they can be opened."""
        newest = {member.replica: member for member in self._members()}
        numbers = [*first, *(number for number in newest if number not in first)]
        for member in (newest[number] for number in numbers if number in newest):
            if live and member.state is ReplicaState.DEAD:
                continue
            key = (member.replica, member.incarnation)
            if self._disks is not None and key not in self._opened:
                try:
                    self._opened[key] = self._disks(member)
                except (EmbarcaderoError, OSError):
                    continue
            if key in self._opened:
                yield self._opened[key]

    def checkpoint(self, topic: Topic, at_most: int) -> tuple[int, bytes] | None:
        """Find the newest session checkpoint of a topic at or below an index.

        Reads only replicas that are up. The folders of the others may belong to another topic.
        """
        best: tuple[int, bytes] | None = None
        for disk in self._all([], live=True):
            try:
                found = newest_checkpoint(disk, lane_folder(topic.lane), at_most, topic.checkpoint_ids)
            except EmbarcaderoError:
                continue
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        return best

    def entries(self, range_: Range, start: int, stop: int) -> Entries:
        """Read all entries [start, stop) of a range from one good copy."""
        for disk in self._all([ref.replica for ref in range_.replicas]):
            lane, number = range_.lane, range_.number
            reader = RangeReader(disk, range_folder(lane, number), lane, number, range_.start)
            try:
                found = reader.entries(start, stop)
            except EmbarcaderoError:
                continue
            finally:
                reader.close()
            if len(found) == stop - start and int(found["index"][0]) == start:
                return found
        raise BadSegment(f"no reachable replica has entries {start} to {stop} of lane {range_.lane}", _DO)


Mirrors = Callable[[EarlierGeneration], Fabric | None]
"""Opens the mirror of an earlier generation; None when there is none (any more)."""


@dataclass(frozen=True, slots=True)
class LaneSnapshot:
    """The end of a lane's order, and the newest entries before it."""

    end: int
    end_seq: int
    entries: Entries
    append_us: int = 0
    next_handle: int = 0

    def lost_above(self, kept: int) -> tuple[int, int]:
        """Count the batches and records that were ordered from an index on, as far as the ring goes."""
        lost = self.entries[(self.entries["index"] >= kept) & (self.entries["kind"] == EntryKind.BATCH)]
        return len(lost), int(lost["count"].sum(dtype=np.uint64))


class MirrorSnapshot:
    """The mirrors of generations that are not recovered yet. Workers call it, so it does not use the store."""

    def __init__(self, earlier: Sequence[EarlierGeneration] = (), mirrors: Mirrors | None = None) -> None:
        self._earlier, self._mirrors = earlier, mirrors

    def lane(self, ranges: Sequence[Range]) -> LaneSnapshot | None:
        """Find the end of a sequencer's lane; None if no mirror has it. `ranges` are all of its ranges in the store."""
        last = ranges[-1]
        for fabric, epoch in self._newest_first():
            if fabric is None:
                return None
            if not fabric.exists(name := order_region(epoch, last.lane)):
                continue
            number = _open_range(fabric, epoch, last.lane)
            if number == 0:
                continue  # the lane was about to begin
            if number not in {range_.number for range_ in ranges}:
                return None  # the ring is of a topic that had this lane before
            return _at_least(_read_lane(fabric, name, checkpoint_region(epoch, last.lane)), last)
        return self._never_begun(last)

    def broker_lane(self, lane: TopicLane, range_: Range) -> LaneSnapshot | None:
        """Find the end of a broker's lane; None if no mirror has it."""
        for fabric, _ in self._newest_first():
            if fabric is None:
                return None
            if fabric.exists(lane.region):
                return _read_broker_lane(attach_ring(fabric, lane.region, ORDER))
        return self._never_begun(range_)

    def _newest_first(self) -> list[tuple[Fabric | None, int]]:
        return [self._open(generation) for generation in reversed(self._earlier)]

    def _open(self, generation: EarlierGeneration) -> tuple[Fabric | None, int]:
        """Open a mirror, and find its newest started epoch. A mirror without that epoch's frontiers is not whole."""
        found = None if self._mirrors is None or not generation.mirror else self._mirrors(generation)
        if found is None or not found.exists(EPOCHS_REGION):
            return None, generation.epoch
        epoch = max(generation.epoch, EpochTable(found, found.attach(EPOCHS_REGION)).last_started())
        return found if found.exists(frontiers_region(epoch)) else None, epoch

    def _never_begun(self, range_: Range) -> LaneSnapshot | None:
        """Snapshot of a range that no earlier generation has begun."""
        return _nothing_above(range_) if self._earlier else None


def _nothing_above(range_: Range) -> LaneSnapshot:
    return LaneSnapshot(range_.start, range_.start_seq, np.empty(0, dtype=ORDER))


def _at_least(found: LaneSnapshot | None, range_: Range) -> LaneSnapshot | None:
    """Correct a snapshot that ends below the range: the range was opened, but the lane never began, so it is empty."""
    if found is None or found.end >= range_.start:
        return found
    return replace(_nothing_above(range_), append_us=found.append_us, next_handle=found.next_handle)


def _open_range(fabric: Fabric, epoch: int, lane: int) -> int:
    """The number of the open range that the epoch's sequencer last published for a lane; 0: none."""
    name = ranges_region(epoch)
    word = TaggedReader(fabric.attach(name)).load(RangeKey(lane, 0)) if fabric.exists(name) else None
    return RangeWord.decode(word).number if word else 0


def _read_lane(fabric: Fabric, name: str, checkpoints: str) -> LaneSnapshot | None:
    ring = attach_ring(fabric, name, ORDER)
    checkpoint = read_checkpoint(fabric, checkpoints) if fabric.exists(checkpoints) else None
    if checkpoint is None:
        return None
    start, header = checkpoint.index, checkpoint.header
    after = valid_from(ring, start)
    end, last = start + len(after), after[-1:]
    if ring.frontier.load() > end:
        return None  # a published entry is damaged
    before = valid_suffix(ring, max(0, min(start, end - ring.slots)), start)
    entries = join([before, after])
    opened = entries[entries["kind"] == EntryKind.SESSION_OPEN]["session"]
    return LaneSnapshot(
        end,
        int(last["seq"][0]) + int(last["count"][0]) if len(last) else int(header["seq"]),
        entries,
        append_us=int(last["append_us"][0]) if len(last) else int(header["append_us"]),
        next_handle=max(int(header["next_handle"]), int(opened.max(initial=0)) + 1 if len(opened) else 0),
    )


def _read_broker_lane(ring: RingReader) -> LaneSnapshot | None:
    end = ring.valid_end(ring.frontier.load())
    entries = valid_suffix(ring, max(0, end - ring.slots), end)
    if end and not len(entries):
        return None
    seq = int(entries["seq"][-1]) + int(entries["count"][-1]) if end else 0
    return LaneSnapshot(end, seq, entries)


def snapshot_of(mirrors: MirrorSnapshot, ranges: Sequence[Range], lane: TopicLane | None) -> LaneSnapshot | None:
    """Find the end of a lane in the mirrors. A mirror that cannot be read counts as missing."""
    try:
        return mirrors.lane(ranges) if lane is None else mirrors.broker_lane(lane, ranges[-1])
    except EmbarcaderoError:
        return None
