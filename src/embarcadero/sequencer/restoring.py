"""A lane's sessions from what replicas have on disk: the newest checkpoint, and the entries after it.

This runs beside the rounds, on a worker: it reads files, and touches nothing that the sequencer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.sequencer.checkpoint import Checkpoint, parse_checkpoint, restore
from embarcadero.sequencer.control import attach
from embarcadero.sequencer.held import HeldSlots
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.replay import learn_positions, replay
from embarcadero.sequencer.sessions import OPEN, SessionTable
from embarcadero.types import NO_HANDLE, NO_SESSION, Range, Topic

_CHUNK: Final = 4_096
_POSITIONS: Final = 65_536
"""How many entries before a checkpoint are looked at, for the positions of batches that may come again."""

_ROWS_MAX: Final = 1 << 22
_TRIES_MAX: Final = 8


class Past(Protocol):
    """What replicas have on disk. Damaged copies are passed over; BadSegment when no good one is within reach."""

    def checkpoint(self, topic: Topic, at_most: int) -> tuple[int, bytes] | None:
        """The newest session checkpoint of a topic at or below an index."""
        ...

    def entries(self, range_: Range, start: int, stop: int) -> Entries:
        """The entries [start, stop) of a range: all of them."""
        ...


def seq_at_end(past: Past, range_: Range, end: int) -> int:
    """The seq at which a range that is to end at `end` ends."""
    if end <= range_.start:
        return range_.start_seq
    last = past.entries(range_, end - 1, end)
    return int(last["seq"][0]) + int(last["count"][0])


def restore_lane(
    past: Past, topic: Topic, ranges: Sequence[Range], end: int, sessions: int, held: HeldSlots, now_us: int
) -> LaneOrder:
    """The lane's sessions as of `end`; all ranges of it that there are, the last one of them ending at or above."""
    saved = _checkpoint(past, topic, ranges, end)
    first = min((range_.start for range_ in ranges), default=0)
    start = saved.index if saved is not None else 0
    if start < first:  # a range is forgotten only below a checkpoint on enough disks: it is on others than these
        raise BadSegment(
            f"the log of topic {topic.name} begins at {first}, and no replica within reach has a checkpoint of its "
            "sessions from there on",
            "start the replicas that are missing",
        )
    parts = _entries(past, ranges, start, end)
    rows = rows_for(sessions, saved, parts)
    order = LaneOrder(topic, SessionTable(rows), held)
    order.table.sessions_max = sessions
    if saved is not None:
        restore(order, saved, now_us)
        _learn(past, order, ranges, saved.index)
    for part in parts:
        replay(order, part, now_us)
    for row in np.flatnonzero(order.table.state == OPEN).tolist():
        attach(order, int(order.table.handle[row]), NO_HANDLE)  # who will come back is not known: do not hurry
    order.idle_due_us = now_us
    return order


def fence_all(order: LaneOrder, now_us: int) -> list[int]:
    """End all sessions, because sequences may be lost that their publishers were told are in. Returns the rows."""
    rows: list[int] = np.flatnonzero(order.table.state == OPEN).tolist()
    for row in rows:
        order.table.fence(row, now_us)
    return rows


def _checkpoint(past: Past, topic: Topic, ranges: Sequence[Range], end: int) -> Checkpoint | None:
    """The newest good one at or below `end` that speaks only of what the lane has.

    One from between two ranges speaks of what was lost: some disk had more than those that replied.
    """
    at_most = end
    for _ in range(_TRIES_MAX):
        found = past.checkpoint(topic, at_most)
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
    """The highest index at or below one at which some range is, or ends."""
    ends = [end if range_.end is None else range_.end for range_ in ranges if range_.start <= index]
    return min(index, max(ends, default=-1))


def rows_for(sessions: int, saved: Checkpoint | None, parts: list[Entries]) -> int:
    """How many sessions the table must have rows for: none may be in another's row."""
    if saved is not None:
        return max(sessions, saved.capacity - 1)
    named = [part["session"][part["session"] != NO_SESSION] for part in parts]
    handles = np.unique(np.concatenate([np.empty(0, dtype=np.uint32), *named]))
    while sessions < _ROWS_MAX and len(np.unique(handles & np.uint32((1 << sessions.bit_length()) - 1))) < len(handles):
        sessions *= 2
    return min(sessions, _ROWS_MAX)


def _entries(past: Past, ranges: Sequence[Range], start: int, stop: int) -> list[Entries]:
    """The entries of [start, stop) as far as they were ever in a range, in pieces."""
    parts: list[Entries] = []
    for range_ in ranges:
        last = stop if range_.end is None else min(stop, range_.end)
        starts = range(max(start, range_.start), last, _CHUNK)
        parts += [past.entries(range_, at, min(at + _CHUNK, last)) for at in starts]
    return parts


def _learn(past: Past, order: LaneOrder, ranges: Sequence[Range], index: int) -> None:
    """Where the batches below the checkpoint are, as far as it can be told: good to know, but not needed."""
    try:
        parts = _entries(past, ranges, max(0, index - _POSITIONS), index)
    except EmbarcaderoError:
        return
    learn_positions(order, np.concatenate([np.empty(0, dtype=ORDER), *parts]))
