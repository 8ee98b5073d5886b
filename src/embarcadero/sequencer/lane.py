"""One lane of one epoch: its order, and the regions it is written to.

Entries are written and flushed before anything that speaks of them. Readers trust slots up to one round behind the
frontier's lap, so no more than a round is ever written ahead of the frontier. A slot is reused only when a checkpoint
covers it; a checkpoint is taken when the table and the written entries agree.
"""

from __future__ import annotations

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import Clock
from embarcadero.fabric.layout import (
    ORDER,
    Entries,
    Line,
    RegionKind,
    SequencerLine,
    every,
    frontier_offset,
    join,
    pick,
)
from embarcadero.fabric.region import Fabric, Region
from embarcadero.fabric.ring import create_ring
from embarcadero.plants import planted
from embarcadero.sequencer.checkpoint import CheckpointWriter
from embarcadero.sequencer.control import control, expire, touched_session
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.single import order_line, order_one
from embarcadero.types import EntryKind


def order_region(epoch: int, lane: int) -> str:
    """Name of a lane's order ring."""
    return f"epoch-{epoch}/order-{lane}"


def checkpoint_region(epoch: int, lane: int) -> str:
    """Name of a lane's checkpoints."""
    return f"epoch-{epoch}/checkpoint-{lane}"


class Lane:
    """The one writer of a lane in its epoch."""

    def __init__(self, fabric: Fabric, epoch: int, order: LaneOrder, sizes: FabricSizes, frontiers: Region) -> None:
        lane = order.topic.lane
        self.order, self.regions = order, (order_region(epoch, lane), checkpoint_region(epoch, lane))
        self._round_entries = sizes.round_entries
        self._ring = create_ring(fabric, self.regions[0], RegionKind.ORDER, ORDER, sizes.order_slots, owner=epoch)
        self._checkpoint = CheckpointWriter(fabric, self.regions[1], order.table.capacity)
        self._frontiers, self._line = frontiers, frontier_offset(SequencerLine.LANES + lane)
        self._words = frontiers.data[self._line : self._line + 16].view(np.uint64)
        self._now_us = 0
        self.clock: Clock | None = None  # only to count how long checkpoints take
        self._unpublished = False
        order.reserve = self._reserve

    def inherit(self, entries: Entries, now_us: int) -> None:
        """Re-issue what an earlier epoch ordered, unchanged, as far as readers may still ask for it."""
        entries = entries[-(self._ring.slots - self._round_entries) :]
        first = self.order.next_index - len(entries)
        self._ring.next = self._checkpoint.index = first
        if len(entries):
            self._ring.write(entries, first)
        self._write_checkpoint(now_us)
        self.publish()

    # --- deciding -----------------------------------------------------------------------------------------------------
    def decide(self, entries: Entries, now_us: int, wall_us: int) -> None:
        """Order batches and carry out requests. A request does not overtake earlier batches of its session."""
        self._begin(now_us, wall_us)
        is_batch = entries["kind"] == EntryKind.BATCH
        if every(is_batch):
            self.order.order(entries, now_us)
            return
        batches, done = np.flatnonzero(is_batch), 0
        sessions = entries["session"][batches]
        for at in np.flatnonzero(~is_batch).tolist():
            request, before = entries[at : at + 1], int(np.searchsorted(batches, at))
            session = touched_session(self.order, request)
            if session is not None and np.any(sessions[done:before] == session):
                self.order.order(pick(entries, batches[done:before]), now_us)
                done = before
            control(self.order, request, now_us)
        if done < len(batches):
            self.order.order(pick(entries, batches[done:]), now_us)

    def decide_one(self, pending: Line, origin: int, now_us: int, wall_us: int) -> tuple[int, int] | None:
        """Order, write and flush a batch that is alone in its round. None: nothing was done, it needs `decide`."""
        self._begin(now_us, wall_us)
        if (place := order_one(self.order, pending, now_us)) is not None:
            self._ring.write_line(order_line(pending, origin, *place, self.order.append_us), self._checkpoint.index)
        return place

    def expire(self, now_us: int, wall_us: int) -> int:
        """End gaps and sessions whose time is over. Returns how many."""
        if now_us < self.order.due_us and now_us < self.order.idle_due_us:
            return 0
        self._begin(now_us, wall_us)
        return expire(self.order, now_us)

    def _begin(self, now_us: int, wall_us: int) -> None:
        self._now_us = now_us
        self.order.append_us = max(self.order.append_us, wall_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _reserve(self, count: int) -> None:
        """Make sure that `count` more decisions fit the ring. Table and decisions agree at this moment."""
        uncovered = self.order.next_index - self._checkpoint.index
        if uncovered + count > self._ring.slots or uncovered >= self._ring.slots // 4:
            self.write()
            self._write_checkpoint(self._now_us)

    def _write_checkpoint(self, now_us: int) -> None:
        counters, began = self.order.counters, self.clock.now_us() if self.clock else 0
        self._checkpoint.write(self.order, now_us)
        counters.checkpoints += 1
        counters.checkpoint_at_us, counters.checkpoint_sessions = now_us, self.order.table.used
        counters.checkpoint_us = self.clock.now_us() - began if self.clock else 0

    def write(self) -> bool:
        """Write and flush all entries decided so far. True if there is something to publish now."""
        blocks = self.order.out.take_order()
        if not blocks:
            return self._unpublished
        entries = blocks[0] if len(blocks) == 1 else join(blocks)
        for start in range(0, len(entries), self._round_entries):
            part = entries[start : start + self._round_entries]
            if self._ring.next + len(part) - self._ring.frontier.value > self._round_entries:
                self._ring.publish()
            if planted("frontier-before-entries"):
                self._ring.frontier.advance(self._ring.next + len(part))
            self._ring.write(part, self._checkpoint.index)
        self._unpublished = True
        return True

    def publish(self) -> None:
        """Let readers see all that was written."""
        self._ring.publish()
        self._words[1], self._words[0] = self.order.next_seq, self._ring.next
        self._frontiers.flush(self._line, 16)
        self._unpublished = False
