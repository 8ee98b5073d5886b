"""One lane of one epoch: its order, and the regions it is written to.

Entries are written and flushed before anything that speaks of them. Readers trust slots up to one round behind the
frontier's lap, so no more than a round is ever written ahead of the frontier. A slot is reused only when a checkpoint
covers it and, in a lane with replicas, it is durable; a checkpoint is taken when the table and the written entries
agree. While such a lane has no room, what comes is answered BACKPRESSURE, and nobody else waits.

How far a lane with replicas may be ordered.

Not beyond its ceiling: positions are reserved in the store ahead of ordering, so none is handed out twice, whatever is
lost. And not a lap ahead of what is durable: a replica, and a successor, must find [durable, ordered end) in the
ring, where readers trust all but one round. Batches leave the last few places to control entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import Env
from embarcadero.fabric.layout import (
    ORDER,
    Entries,
    Flags,
    Line,
    RegionKind,
    SequencerLine,
    every,
    frontier_offset,
    join,
    pick,
    sealed,
)
from embarcadero.fabric.lines import RingReader, create_ring
from embarcadero.fabric.region import Fabric, Region, checkpoint_region, order_region
from embarcadero.limits import CHECKPOINT_S, EXPIRED_PER_ROUND_MAX, RECORDS_PER_BATCH_MAX
from embarcadero.sequencer.order.batches import LaneOrder, control_entry, order_line, order_one
from embarcadero.sequencer.order.checkpoint import CheckpointWriter
from embarcadero.sequencer.order.control import control, expire, touched_session
from embarcadero.sequencer.order.sessions import NEVER
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, EntryKind, Outcome

_CHECKPOINT_US: Final = int(CHECKPOINT_S * 1_000_000)


def valid_from(ring: RingReader, start: int) -> Entries:
    """The valid contiguous entries from `start` on."""
    return join([np.empty(0, dtype=ORDER), *ring.valid_runs(start)])


def valid_suffix(ring: RingReader, start: int, end: int) -> Entries:
    """The longest run of valid entries that ends at `end`."""
    entries = ring.load(start, end)
    wrong = (entries[ring.commit] != np.arange(start, end, dtype=np.uint64)) | ~sealed(entries)
    bad = np.flatnonzero(wrong)
    return entries[bad[-1] + 1 :] if len(bad) else entries


class Lane:
    """The one writer of a lane in its epoch."""

    def __init__(
        self, env: Env, fabric: Fabric, epoch: int, order: LaneOrder, sizes: FabricSizes, frontiers: Region
    ) -> None:
        lane, self._steps, self._clock = order.topic.lane, env.steps, env.clock
        self.order, self.regions = order, (order_region(epoch, lane), checkpoint_region(epoch, lane))
        self._round_entries = sizes.round_entries
        self._ring = create_ring(fabric, self.regions[0], RegionKind.ORDER, ORDER, sizes.order_slots, owner=epoch)
        self._checkpoint = CheckpointWriter(fabric, self.regions[1], order.table.capacity, env.steps)
        self._frontiers, self._line = frontiers, frontier_offset(SequencerLine.LANES + lane)
        self._words = frontiers.data[self._line : self._line + 16].view(np.uint64)
        self._now_us = 0
        self._unpublished = False
        self.room: Room | None = None  # bounds, if the lane has replicas
        self.bells: tuple[str, ...] = ()  # whom to wake when it grows
        self.first_bells: tuple[str, ...] = ()  # whom to wake when it grows by a batch that came alone
        self.unfenced: list[int] = []  # rows of sessions that a restart ended: first of all the log has to say so
        order.reserve = self._reserve

    def close(self) -> None:
        """Let go of the order: each names the other, and memory that is in a cycle waits for the garbage collector."""
        self.order.reserve = self.order.make_room = lambda _count: None

    def inherit(self, entries: Entries, now_us: int) -> None:
        """Re-issue what an earlier epoch ordered, unchanged, as far as readers may still ask for it."""
        entries = entries[-(self._ring.slots - self._round_entries) :]
        first = self.order.next_index - len(entries)
        self._ring.next = self._checkpoint.index = first
        if len(entries):
            self._ring.write(entries, first)
        self._write_checkpoint(now_us)
        self.publish()

    def inherit_more(self, entries: Entries) -> None:
        """The same of what it has ordered since; the checkpoint covers all that was inherited before."""
        if len(entries):
            self._ring.write(entries, self._checkpoint.index)
        self.publish()

    @property
    def slots(self) -> int:
        """How many entries the ring has."""
        return self._ring.slots

    # --- deciding -----------------------------------------------------------------------------------------------------
    def decide(self, entries: Entries, now_us: int, wall_us: int) -> None:
        """Order batches and carry out requests. A request does not overtake earlier batches of its session."""
        self._begin(now_us, wall_us)
        if self.room is not None and not len(entries := self._admit(self.room, entries)):
            return
        is_batch = entries["kind"] == BATCH_KIND
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
        room, order = self.room, self.order
        if room is not None:
            if order.next_index >= room.stop_index or order.next_seq + (pending[5] & 0xFFFF_FFFF) > room.stop_seq:
                return None
            if self.unfenced:
                return None
        self._begin(now_us, wall_us)
        if (place := order_one(self.order, pending, now_us)) is not None:
            self._ring.write_line(order_line(pending, origin, *place, self.order.append_us), self.free_below)
            if self._ring.next > self._ring.slots:
                self._steps.at(Step.SLOT_REUSED)
        return place

    def _admit(self, room: Room, entries: Entries) -> Entries:
        """What there is room for, and what needs none; the rest is answered.

        A batch that our predecessor ordered and did not answer is not refused: its broker would free the payload.
        """
        order, waiting = self.order, self.order.table.waiting
        if self.unfenced:
            order.out.answer_all(entries, Outcome.BACKPRESSURE)
            return entries[:0]
        records = waiting * RECORDS_PER_BATCH_MAX
        if order.next_seq + records > room.stop_seq:
            records = int(order.held.entries["count"][order.held.of_lane(order.topic.lane)].sum(dtype=np.uint64))
        if room.admits(order.next_index, order.next_seq, entries, waiting, records):
            return entries
        admitted = room.admitted(order.next_index, order.next_seq, entries, waiting, records)
        admitted |= order.ordered_before(entries)
        order.counters.roomless += len(entries) - int(np.count_nonzero(admitted))
        order.out.answer_all(pick(entries, ~admitted), Outcome.BACKPRESSURE)
        return pick(entries, admitted)

    def expire(self, now_us: int, wall_us: int) -> int:
        """End gaps and sessions whose time is over. Returns how many."""
        if self.unfenced:
            return self._tell_fences(now_us, wall_us)
        if now_us < self.due_us:
            return 0
        most = EXPIRED_PER_ROUND_MAX
        if self.room is not None:
            most = min(most, (self.room.controls(self.order.next_index) - self.order.table.waiting) // 2)
        if most <= 0:
            return 0
        self._begin(now_us, wall_us)
        return expire(self.order, now_us, most)

    @property
    def due_us(self) -> int:
        """When time has something to do here, at the earliest."""
        return NEVER if self.unfenced else min(self.order.due_us, self.order.idle_due_us)

    @property
    def can_fence(self) -> bool:
        """Whether a session's end can be told in the log now."""
        return self.room is None or self.room.controls(self.order.next_index) > 0

    def _tell_fences(self, now_us: int, wall_us: int) -> int:
        """Let the log say that sessions ended with a restart, as far as there is room."""
        count = len(self.unfenced)
        if self.room is not None:
            count = min(count, self.room.controls(self.order.next_index), self._round_entries)
        self._begin(now_us, wall_us)
        table = self.order.table
        for row in self.unfenced[:count]:
            self.order.reserve(1)
            self.order.append_control(
                control_entry(EntryKind.SESSION_FENCE, int(table.handle[row]), int(table.expected[row]))
            )
            self.order.counters.fenced["restart"] += 1
        del self.unfenced[:count]
        return count

    def _begin(self, now_us: int, wall_us: int) -> None:
        self._now_us = now_us
        self.order.append_us = max(self.order.append_us, wall_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    @property
    def free_below(self) -> int:
        """Slots of indices below it may be reused."""
        return self._checkpoint.index if self.room is None else min(self._checkpoint.index, self.room.durable)

    def seq_at(self, index: int) -> int | None:
        """The seq at which an index that is still in the ring begins; all was written. None when it is not there."""
        if index == self._ring.next:
            return self.order.next_seq
        if index > self._ring.next:
            return None
        entries = RingReader(self._ring.region, ORDER).read(index, index + 1)
        return int(entries["seq"][0]) if len(entries) else None

    def save(self, now_us: int) -> None:
        """Write a checkpoint of everything decided so far."""
        self.write()
        self._write_checkpoint(now_us)

    def save_if_due(self, now_us: int) -> bool:
        """Write a checkpoint if the last one is old. True if nothing is left for a next one."""
        if now_us - self.order.counters.checkpoint_at_us >= _CHECKPOINT_US:
            self.save(now_us)
        return self._checkpoint.index >= self.order.next_index

    def _reserve(self, count: int) -> None:
        """Make sure that `count` more decisions fit the ring. Table and decisions agree at this moment."""
        uncovered = self.order.next_index - self._checkpoint.index
        if uncovered + count > self._ring.slots or uncovered >= self._ring.slots // 4:
            self.save(self._now_us)

    def _write_checkpoint(self, now_us: int) -> None:
        counters, began = self.order.counters, self._clock.now_us()
        self._checkpoint.write(self.order, now_us)
        counters.checkpoints += 1
        counters.checkpoint_at_us, counters.checkpoint_sessions = now_us, self.order.table.used
        counters.checkpoint_us = self._clock.now_us() - began

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
            self._ring.write(part, self.free_below)
            if self._ring.next > self._ring.slots:
                self._steps.at(Step.SLOT_REUSED)
        self._unpublished = True
        return True

    def publish(self) -> None:
        """Let readers see all that was written."""
        self._ring.publish()
        self._words[1], self._words[0] = self.order.next_seq, self._ring.next
        self._frontiers.flush(self._line, 16)
        self._unpublished = False


CONTROL_ENTRIES: Final = 4
"""Order entries that one session request may need."""

_SPARE_MAX: Final = 512


class Room:
    """The bounds of one lane. `stop_index` and `stop_seq` are where its batches have to stop, as far as is known."""

    def __init__(self, slots: int, round_entries: int, find_durable: Callable[[], int]) -> None:
        self._lap, self._find = slots - round_entries, find_durable
        self._spare = min(_SPARE_MAX, round_entries // 2)  # less than a round: what waits always leaves room for some
        self.durable = 0
        self.ceiling = (0, 0)
        self.stop_index = self.stop_seq = 0
        self.refresh()

    def raise_to(self, index: int, seq: int) -> None:
        """The store has reserved positions up to here."""
        self.ceiling = (index, seq)
        self._bound()

    def refresh(self) -> None:
        """Look how far the lane is durable now."""
        self.durable = max(self.durable, self._find())
        self._bound()

    def _bound(self) -> None:
        index, seq = self.ceiling
        self._stop = min(self.durable + self._lap, index)
        self.stop_index, self.stop_seq = self._stop - self._spare, seq

    def controls(self, next_index: int) -> int:
        """For how many more entries of any kind there is room."""
        if next_index + CONTROL_ENTRIES > self._stop:
            self.refresh()
        return max(0, self._stop - next_index)

    def admits(self, next_index: int, next_seq: int, entries: Entries, waiting: int, records: int) -> bool:
        """Whether all of these can be decided on, whatever they turn out to need.

        `waiting` batches with `records` records may be ordered together with them.
        """
        most = waiting + CONTROL_ENTRIES * len(entries)
        if next_index + most > self.stop_index and not self._look_again(next_index, entries, waiting):
            return False
        return next_seq + records + int(entries["count"].sum(dtype=np.uint64)) <= self.stop_seq

    def _look_again(self, next_index: int, entries: Entries, waiting: int) -> bool:
        most = waiting + _needs(entries)
        if next_index + most > self.stop_index:
            self.refresh()
        return next_index + most <= self.stop_index

    def admitted(self, next_index: int, next_seq: int, entries: Entries, waiting: int, records: int) -> Flags:
        """Which of these can be decided on (flags): requests first, then batches as they came."""
        is_batch = entries["kind"] == EntryKind.BATCH
        requests = min(int(np.count_nonzero(~is_batch)), self.controls(next_index) // CONTROL_ENTRIES)
        batches = max(0, self.stop_index - next_index - CONTROL_ENTRIES * requests - waiting)
        counts = np.where(is_batch, entries["count"], 0).astype(np.int64)
        fits = np.cumsum(counts) + (next_seq + records) <= self.stop_seq
        rank = np.where(is_batch, np.cumsum(is_batch) - 1, np.cumsum(~is_batch) - 1)
        admitted: Flags = np.where(is_batch, (rank < batches) & fits, rank < requests)
        return admitted


def _needs(entries: Entries) -> int:
    batches = int(np.count_nonzero(entries["kind"] == EntryKind.BATCH))
    return batches + CONTROL_ENTRIES * (len(entries) - batches)
