"""One lane of one epoch: its order, the requests that open and end its sessions, its bounds, and its regions.

Entries are written and flushed before anything that refers to them. Readers trust slots up to one round behind the
frontier's lap, so at most one round is ever written ahead of the frontier. A slot is reused only when a checkpoint
covers it and, in a lane with replicas, it is durable. A checkpoint is taken when the table and the written entries
agree. While a lane with replicas has no capacity left, new entries are answered BACKPRESSURE, and no other lane waits.

`LaneCapacity` has two bounds for the order of a lane with replicas. The first is the ceiling. Positions are reserved in
the store ahead of ordering, so no position is handed out twice, whatever is lost. The second is one lap above the
durable end. A replica and a successor must find [durable, ordered end) in the ring, where readers trust all but one
round. Batches leave the last few positions to control entries.

Sessions are opened, continued, fenced, closed and attached one at a time, at control rate. Timeouts are handled in the
same way. Every change of the table is an entry in the log, so a replay of the log gives the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import Env
from embarcadero.fabric.layout import (
    OPEN_STRONG,
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
from embarcadero.limits import ABANDONED_S, CHECKPOINT_S, EXPIRED_PER_ROUND_MAX, FENCED_KEPT_S, RECORDS_PER_BATCH_MAX
from embarcadero.sequencer.order.batches import (
    FenceReason,
    LaneOrder,
    LaneTerms,
    OpenedFacts,
    control_entry,
    open_entry,
    order_line,
    order_one,
)
from embarcadero.sequencer.order.checkpoint import CheckpointWriter
from embarcadero.sequencer.order.sessions import FENCED, I64, NEVER, OPEN, TAKEN, W
from embarcadero.steps import Step
from embarcadero.types import BATCH_KIND, NO_SESSION, EntryKind, LanePosition, Order, Outcome

_CHECKPOINT_US: Final = int(CHECKPOINT_S * 1_000_000)
_KEPT_US: Final = FENCED_KEPT_S * 1_000_000
_ABANDONED_US: Final = int(ABANDONED_S * 1_000_000)

CONTROL_ENTRIES: Final = 4
"""Maximum number of order entries that one session request needs."""

_SPARE_MAX: Final = 512


# --- requests of sessions ---------------------------------------------------------------------------------------------
def control(lane: LaneOrder, entry: Entries, now_us: int) -> None:
    """Decide on one entry that is not a batch."""
    lane.reserve(4)
    kind, session, origin = int(entry["kind"][0]), int(entry["session"][0]), int(entry["origin"][0])
    if kind == EntryKind.SESSION_OPEN:
        _open(lane, entry, now_us)
    elif kind == EntryKind.SESSION_CLOSE:
        _close(lane, entry, session)
    elif kind == EntryKind.SESSION_ATTACH:
        if (row := lane.table.row_of(session)) is not None:
            lane.table.connections.attach(row, origin)
        lane.out.answer_one(entry, Outcome.NOTED)
    elif kind == EntryKind.SESSION_DETACH:
        if (row := lane.table.row_of(session)) is not None:
            _detach(lane, row, origin, now_us)
        lane.out.answer_one(entry, Outcome.NOTED)
    else:
        lane.out.answer_one(entry, Outcome.UNKNOWN_SESSION)


def touched_session(lane: LaneOrder, entry: Entries) -> int | None:
    """Find the session whose batches a request must not overtake."""
    table, session = lane.table, int(entry["session"][0])
    if int(entry["kind"][0]) != EntryKind.SESSION_OPEN:
        return session
    if session == NO_SESSION:
        return table.by_name.get(int(entry["session_seq"][0]))
    row = table.row_of(session)
    newest = table.newest(row) if row is not None else None
    return int(table.handle[newest]) if newest is not None else None


# --- opening and closing ----------------------------------------------------------------------------------------------
def _open(lane: LaneOrder, entry: Entries, now_us: int) -> None:
    table = lane.table
    name, resumed = int(entry["session_seq"][0]), int(entry["session"][0])
    row, earlier, taken = None, None, False
    outlived: list[int] = []
    if resumed != NO_SESSION:
        row = table.row_of(resumed)
        earlier = table.newest(row) if row is not None else None
        if row is None or earlier is None:
            lane.out.answer_one(entry, Outcome.UNKNOWN_SESSION)
            return
        if int(table.successor[earlier]) == TAKEN:
            lane.out.answer_one(entry, Outcome.FENCED, extra=int(table.expected[earlier]))
            return
        outlived = table.before(row)
    elif (holder := table.by_name.get(name, NO_SESSION)) != _expected_holder(entry, holder):
        holders = table.row_of(holder)
        expected = 0 if holders is None else int(table.expected[holders])
        lane.out.answer_one(entry, Outcome.NAME_HELD, session=holder, extra=expected)
        return
    elif holder != NO_SESSION:
        earlier, taken = table.row_of(holder), True
    handle, peer = table.free_handle(), int(entry["size"][0])
    shared = earlier is None and table.has_its_share(peer, lane.terms.peer_share)
    crowded = shared or table.used >= table.sessions_max
    stay = [one for one in (row, earlier) if one is not None]
    victim = _victim(lane, stay, peer * shared, now_us) if crowded else None
    if handle is None or (crowded and victim is None):
        lane.out.answer_one(entry, Outcome.TOO_MANY_SESSIONS, extra=int(shared))
        return
    if handle >= table.handles_reserved:
        lane.out.answer_one(entry, Outcome.BACKPRESSURE)  # until the store has reserved more
        return
    at = int(entry["low"][0]) - 1  # -1: at its current sequence
    if earlier is not None and table.state[earlier] == OPEN:
        fence(lane, earlier, now_us, FenceReason.REPLACED if at < 0 else FenceReason.MOVED)
    continued = int(table.handle[earlier]) if earlier is not None else None
    strong = lane.all_strong or bool(int(entry["flags"][0]) & OPEN_STRONG)
    if earlier is not None:
        strong = bool(table.strong[earlier])  # the two kinds have different windows, so a session keeps its kind
    row = table.open(handle, name, now_us, earlier, taken, strong=strong, peer=peer)
    reached = int(table.expected[row])
    table.advance(row, at)
    expected = int(table.expected[row])
    facts = OpenedFacts(int(table.name[row]), continued, taken, strong and not lane.all_strong)
    index = lane.append_control(open_entry(handle, expected, facts))
    if taken and at >= 0 and earlier is not None:
        outlived = [earlier]
    _make_way(lane, outlived, victim, now_us)
    lane.counters.opened += 1
    table.connections.attach(row, int(entry["origin"][0]))
    lane.look_for_idle(now_us + min(lane.topic.session_ttl_s * 1_000_000, _KEPT_US))
    low = max(0, expected - W) if strong else int(table.low[row])
    lane.out.answer_one(
        entry,
        Outcome.OPENED,
        session=handle,
        extra=expected,
        seq=low,
        index=index,
        session_seq=reached,
        order=Order.STRONG if strong else Order.TOTAL,
    )


def _expected_holder(entry: Entries, holder: int) -> int:
    """The session that must hold the name for this request to succeed. Without a condition, that is `holder`."""
    asked = int(entry["crc"][0])
    return holder if asked == 0 else asked if asked == NO_SESSION else asked - 1


def _victim(lane: LaneOrder, but: list[int], peer: int, now_us: int) -> int | None:
    """Choose the session to evict from a full table. With `peer`, only sessions of that address."""
    table = lane.table
    if (fenced := table.oldest_fenced(but, peer)) is not None:
        return fenced
    return but[-1] if but else table.oldest_abandoned(now_us - _ABANDONED_US, peer)


def _make_way(lane: LaneOrder, outlived: list[int], victim: int | None, now_us: int) -> None:
    """Forget outlived sessions, or the victim if the table is full. So continued sessions never fill the table.

    A publisher that moves its name to a later sequence does not return to the earlier one. A publisher that continues a
    session knows that session, so it never asks for those before it in the chain. Two of them are forgotten each time,
    since a request whose answer is lost adds one more.
    """
    for row in outlived[:2] or ([] if victim is None else [victim]):
        if lane.table.state[row] == OPEN:
            fence(lane, row, now_us, FenceReason.ABANDONED)
        _forget(lane, row)


def _close(lane: LaneOrder, entry: Entries, session: int) -> None:
    """Close a session. An unknown session counts as closed."""
    row = lane.table.row_of(session)
    if row is None:
        lane.out.answer_one(entry, Outcome.CLOSED)
        return
    lane.counters.closed += 1
    _refuse_waiting(lane, row)
    lane.out.answer_one(entry, Outcome.CLOSED, index=_forget(lane, row))


def _forget(lane: LaneOrder, row: int) -> int:
    table = lane.table
    index = lane.append_control(
        control_entry(EntryKind.SESSION_CLOSE, int(table.handle[row]), int(table.expected[row]))
    )
    table.forget(row)
    return index


def fence(lane: LaneOrder, row: int, now_us: int, why: FenceReason) -> None:
    """Order nothing more of this session. Refuse its waiting batches, with the sequence at which it can continue."""
    table = lane.table
    lane.counters.fenced[why] += 1
    if why is not FenceReason.MOVED:  # routine for sessions whose name moves
        lane.terms.journal.note(
            "session fenced",
            topic=lane.topic.name,
            session=int(table.handle[row]),
            why=why.value,
            expected=int(table.expected[row]),
            waiting=int(table.waiting.count[row]),
        )
    lane.reserve(4)
    _refuse_waiting(lane, row)
    lane.append_control(control_entry(EntryKind.SESSION_FENCE, int(table.handle[row]), int(table.expected[row])))
    table.fence(row, now_us)
    lane.look_for_idle(now_us + _KEPT_US)


def _refuse_waiting(lane: LaneOrder, row: int) -> None:
    if lane.table.waiting.count[row]:
        slots = lane.table.drop_waiting(row)
        refused = pick(lane.buffer.entries, slots)
        lane.buffer.release(slots)
        lane.out.answer_all(refused, Outcome.FENCED, extra=int(lane.table.expected[row]))


# --- connections ------------------------------------------------------------------------------------------------------
def _detach(lane: LaneOrder, row: int, origin: int, now_us: int) -> None:
    """Note that a broker has no connection of this session any more. Without connections, gaps time out sooner."""
    if lane.table.connections.detach(row, origin, now_us):
        lane.look_for_gaps(now_us)


def detach_broker(lane: LaneOrder, origin: int, now_us: int) -> None:
    """Detach a broker incarnation that is gone from all sessions of a lane."""
    for row in lane.table.connections.rows_of(origin):
        _detach(lane, row, origin, now_us)


# --- time -------------------------------------------------------------------------------------------------------------
def expire(lane: LaneOrder, now_us: int, most: int = EXPIRED_PER_ROUND_MAX) -> int:
    """End gaps and sessions that have timed out, at most `most` of each. Returns how many."""
    done = 0
    if now_us >= lane.due_us:
        done += _end_gaps(lane, now_us, most)
    if now_us >= lane.idle_due_us:
        done += _end_sessions(lane, now_us, most)
    return done


def _end_gaps(lane: LaneOrder, now_us: int, most: int) -> int:
    table = lane.table
    rows = np.flatnonzero(table.waiting.gap_us < NEVER)
    since, departed = table.waiting.gap_us[rows], table.connections.departed_us[rows]
    deadline = since + lane.gap_timeout_us
    gone = departed < NEVER
    deadline[gone] = np.minimum(deadline, np.maximum(since, departed) + lane.departed_timeout_us)[gone]
    due = rows[deadline <= now_us][:most]
    later = deadline[~np.isin(rows, due)]
    lane.end_of_gaps(int(later.min()) if len(later) else NEVER)
    lane.counters.gap_timeouts += len(due)
    if lane.skips and len(due):
        _skip(lane, due, now_us)
    else:
        for row in due.tolist():
            fence(lane, row, now_us, FenceReason.GAP)
    return len(due)


def _skip(lane: LaneOrder, rows: I64, now_us: int) -> None:
    """Declare the missing sequences before the first waiting batch lost, and continue after them."""
    table = lane.table
    lane.reserve(len(rows) + table.waiting.total)
    for row in rows.tolist():
        expected = int(table.expected[row])
        front = int(table.waiting_of(np.array([row]))[1].min())
        lane.append_control(control_entry(EntryKind.SKIP, int(table.handle[row]), expected, location=front - expected))
        table.mark_lost(row, expected, front)
        lane.counters.skips += 1
    table.touch(rows, now_us)
    lane.release(rows, now_us)


def _end_sessions(lane: LaneOrder, now_us: int, most: int) -> int:
    table, ttl_us = lane.table, lane.topic.session_ttl_s * 1_000_000
    rows = np.flatnonzero(table.state)
    long = (table.state[rows] == OPEN) | table.awaited(rows)
    deadline = table.active_us[rows] + np.where(long, ttl_us, _KEPT_US)
    due = rows[deadline <= now_us][:most]
    later = deadline[~np.isin(rows, due)]
    lane.end_of_idle(int(later.min()) if len(later) else NEVER)
    lane.reserve(2 * len(due))
    for row in due.tolist():
        if table.state[row] == FENCED:
            _forget(lane, row)
        else:
            fence(lane, row, now_us, FenceReason.IDLE)
    return len(due)


# --- bounds -----------------------------------------------------------------------------------------------------------
class LaneCapacity:
    """The bounds of one lane. Its batches must stop at `stop_index` and `stop_seq`, as known at the last refresh."""

    def __init__(self, slots: int, round_entries: int, find_durable: Callable[[], int]) -> None:
        self._lap, self._find = slots - round_entries, find_durable
        self._spare = min(_SPARE_MAX, round_entries // 2)  # less than a round: waiting batches never fill the lap
        self.durable = 0
        self.ceiling = LanePosition(0, 0)
        self.stop_index = self.stop_seq = 0
        self.refresh()

    def raise_to(self, ceiling: LanePosition) -> None:
        """Raise the ceiling: the store has reserved positions up to here."""
        self.ceiling = ceiling
        self._bound()

    def refresh(self) -> None:
        """Count how far the lane is durable now."""
        self.durable = max(self.durable, self._find())
        self._bound()

    def _bound(self) -> None:
        index, seq = self.ceiling
        self._stop = min(self.durable + self._lap, index)
        self.stop_index, self.stop_seq = self._stop - self._spare, seq

    def controls(self, next_index: int) -> int:
        """The capacity for more entries of any kind."""
        if next_index + CONTROL_ENTRIES > self._stop:
            self.refresh()
        return max(0, self._stop - next_index)

    def admits(self, next_index: int, next_seq: int, entries: Entries, waiting: int, records: int) -> bool:
        """Whether there is capacity for all of these entries, whatever the decisions on them are.

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
        """Flag the entries for which there is capacity: requests first, then batches in arrival order."""
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


# --- the lane ---------------------------------------------------------------------------------------------------------
def valid_from(ring: RingReader, start: int) -> Entries:
    """Read the valid contiguous entries from `start`."""
    return join([np.empty(0, dtype=ORDER), *ring.valid_runs(start)])


def valid_suffix(ring: RingReader, start: int, end: int) -> Entries:
    """Read the longest run of valid entries that ends at `end`."""
    entries = ring.load(start, end)
    wrong = (entries[ring.commit] != np.arange(start, end, dtype=np.uint64)) | ~sealed(entries)
    bad = np.flatnonzero(wrong)
    return entries[bad[-1] + 1 :] if len(bad) else entries


class LedEpoch(NamedTuple):
    """An epoch that this process leads: its regions and their sizes."""

    env: Env
    fabric: Fabric
    number: int
    sizes: FabricSizes
    frontiers: Region


class Lane:
    """The one writer of a lane in its epoch."""

    def __init__(self, epoch: LedEpoch, order: LaneOrder, terms: LaneTerms | None = None) -> None:
        lane, sizes, fabric = order.topic.lane, epoch.sizes, epoch.fabric
        self._steps, self._clock = epoch.env.steps, epoch.env.clock
        self.order, self.regions = order, (order_region(epoch.number, lane), checkpoint_region(epoch.number, lane))
        self._round_entries = sizes.round_entries
        self._ring = create_ring(
            fabric, self.regions[0], RegionKind.ORDER, ORDER, sizes.order_slots, owner=epoch.number
        )
        self._checkpoint = CheckpointWriter(fabric, self.regions[1], order.table.capacity, self._steps)
        self._frontiers, self._line = epoch.frontiers, frontier_offset(SequencerLine.LANES + lane)
        self._words = self._frontiers.data[self._line : self._line + 16].view(np.uint64)
        self._now_us = 0
        self._unpublished = False
        self.capacity: LaneCapacity | None = None  # bounds, if the lane has replicas
        self.bells: tuple[str, ...] = ()  # of replicas to wake when the lane grows
        self.first_bells: tuple[str, ...] = ()  # of replicas to wake when the lane grows by a lone batch
        self._unreported: list[int] = []  # rows of sessions that a restart fenced, not yet in the log; they come first
        order.begin(terms or LaneTerms(), self._reserve)

    def close(self) -> None:
        """Release the order. Lane and order refer to each other."""
        self.order.end()

    def limit(self, find_durable: Callable[[], int]) -> None:
        """Bound the order of a lane with replicas by its durable end."""
        self.capacity = LaneCapacity(self.slots, self._round_entries, find_durable)

    def wake(self, replicas: Sequence[str], first: Sequence[str]) -> None:
        """Wake these replicas when the lane grows; only those in `first` for a lone batch."""
        self.bells, self.first_bells = tuple(replicas), tuple(first)

    def report_fences(self, rows: list[int]) -> None:
        """Append fences of these sessions, which a restart fenced, to the log before anything else is ordered."""
        self._unreported = rows

    def inherit(self, entries: Entries, now_us: int) -> None:
        """Re-issue the entries of an earlier epoch, unchanged, as far as readers may still need them."""
        entries = entries[-(self._ring.slots - self._round_entries) :]
        first = self.order.next_index - len(entries)
        self._ring.next = self._checkpoint.index = first
        if len(entries):
            self._ring.write(entries, first)
        self._write_checkpoint(now_us)
        self.publish()

    def inherit_more(self, entries: Entries) -> None:
        """Re-issue entries that the earlier epoch ordered since. The checkpoint covers all entries inherited before."""
        if len(entries):
            self._ring.write(entries, self._checkpoint.index)
        self.publish()

    @property
    def slots(self) -> int:
        """The number of slots of the ring."""
        return self._ring.slots

    # --- deciding -----------------------------------------------------------------------------------------------------
    def decide(self, entries: Entries, now_us: int, wall_us: int) -> None:
        """Order batches and process requests. A request does not overtake earlier batches of its session."""
        self._begin(now_us, wall_us)
        if self.capacity is not None and not len(entries := self._admit(self.capacity, entries)):
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
        """Order, write and flush the only batch of a round. Returns None, with no effect, when it needs `decide`."""
        capacity, order = self.capacity, self.order
        if capacity is not None:
            if (
                order.next_index >= capacity.stop_index
                or order.next_seq + (pending[5] & 0xFFFF_FFFF) > capacity.stop_seq
            ):
                return None
            if self._unreported:
                return None
        self._begin(now_us, wall_us)
        if (position := order_one(self.order, pending, now_us)) is not None:
            self._ring.write_line(order_line(pending, origin, *position, self.order.append_us), self.free_below)
            if self._ring.next > self._ring.slots:
                self._steps.at(Step.SLOT_REUSED)
        return position

    def _admit(self, capacity: LaneCapacity, entries: Entries) -> Entries:
        """Select the entries for which there is capacity, or which need none. Answer the others BACKPRESSURE.

        A batch that our predecessor ordered and did not answer is not refused: its broker would free the payload.
        """
        order, waiting = self.order, self.order.table.waiting.total
        if self._unreported:
            order.out.answer_all(entries, Outcome.BACKPRESSURE)
            return entries[:0]
        records = waiting * RECORDS_PER_BATCH_MAX
        if order.next_seq + records > capacity.stop_seq:
            records = int(order.buffer.entries["count"][order.buffer.of_lane(order.topic.lane)].sum(dtype=np.uint64))
        if capacity.admits(order.next_index, order.next_seq, entries, waiting, records):
            return entries
        admitted = capacity.admitted(order.next_index, order.next_seq, entries, waiting, records)
        admitted |= order.ordered_before(entries)
        order.counters.refused += len(entries) - int(np.count_nonzero(admitted))
        order.out.answer_all(pick(entries, ~admitted), Outcome.BACKPRESSURE)
        return pick(entries, admitted)

    def expire(self, now_us: int, wall_us: int) -> int:
        """End gaps and sessions that have timed out. Returns how many."""
        if self._unreported:
            return self._append_fences(now_us, wall_us)
        if now_us < self.due_us:
            return 0
        most = EXPIRED_PER_ROUND_MAX
        if self.capacity is not None:
            most = min(most, (self.capacity.controls(self.order.next_index) - self.order.table.waiting.total) // 2)
        if most <= 0:
            return 0
        self._begin(now_us, wall_us)
        return expire(self.order, now_us, most)

    @property
    def due_us(self) -> int:
        """The earliest deadline of this lane."""
        return NEVER if self._unreported else min(self.order.due_us, self.order.idle_due_us)

    @property
    def can_fence(self) -> bool:
        """Whether there is capacity to fence a session now."""
        return self.capacity is None or self.capacity.controls(self.order.next_index) > 0

    def _append_fences(self, now_us: int, wall_us: int) -> int:
        """Append the fences of sessions that a restart ended, as far as there is capacity."""
        count = len(self._unreported)
        if self.capacity is not None:
            count = min(count, self.capacity.controls(self.order.next_index), self._round_entries)
        self._begin(now_us, wall_us)
        table = self.order.table
        for row in self._unreported[:count]:
            self.order.reserve(1)
            self.order.append_control(
                control_entry(EntryKind.SESSION_FENCE, int(table.handle[row]), int(table.expected[row]))
            )
            self.order.counters.fenced[FenceReason.RESTART] += 1
        del self._unreported[:count]
        return count

    def _begin(self, now_us: int, wall_us: int) -> None:
        self._now_us = now_us
        self.order.not_before(wall_us)

    # --- writing ------------------------------------------------------------------------------------------------------
    @property
    def free_below(self) -> int:
        """Slots of indices below it may be reused."""
        return self._checkpoint.index if self.capacity is None else min(self._checkpoint.index, self.capacity.durable)

    def seq_at(self, index: int) -> int | None:
        """Look up the seq at an index; None when it is not in the ring. All decided entries must be written."""
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
        """Write a checkpoint if the last one is old. True if a checkpoint covers all entries."""
        if now_us - self.order.counters.checkpoint_at_us >= _CHECKPOINT_US:
            self.save(now_us)
        return self._checkpoint.index >= self.order.next_index

    def _reserve(self, count: int) -> None:
        """Ensure that `count` more decisions fit the ring. Table and decisions agree at this moment."""
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
        """Publish all entries that were written."""
        self._ring.publish()
        self._words[1], self._words[0] = self.order.next_seq, self._ring.next
        self._frontiers.flush(self._line, 16)
        self._unpublished = False
