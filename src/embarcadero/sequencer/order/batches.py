"""Ordering of one lane's batches: arrays in, decisions out. No fabric, no clock.

Theory of operation. A step takes many batches and decides in four phases, each a few array operations:
1. choose the batches that are new and may be ordered now. Every sequence that can be new is within one window of its
   session, so (row, sequence mod W) identifies it. A batch claims its slot by writing its own number there; of several
   equal batches, the first keeps the slot. For weak sessions, all new batches are ordered in arrival order. For strong
   sessions, the contiguous prefix from `expected` on is ordered. That needs no sorting when every batch follows its
   predecessor in the round. Otherwise batches are sorted by (row, sequence), together with the waiting batches of
   sessions whose gap was closed just now. A step with both kinds is ordered in arrival order if possible; otherwise
   weak batches come first, then strong ones.
2. append: one addition gives all indices, one cumulative sum all seqs; the windows store them.
3. hold: a strong session's batch after a gap waits in the reorder buffer. When the buffer is full, sessions with the
   oldest gaps are fenced.
4. settle: all other batches are answered from the current windows, so a duplicate within the step is no special case.
The window of a step begins at `expected` (strong) or `low` (weak) as they are when the step begins. Sessions share
nothing except the sequence of positions: no session waits for another.

Rounds of one batch. A publisher that waits for each answer makes rounds of one entry. For one entry, plain numbers are
several times faster than arrays (`order_one`). Only the common case is decided this way: the next batch of a strong
session, or a batch that is new in the window of a weak session. For any other batch nothing is changed, and the round
continues in the usual way.

`Decisions` has the decisions of a lane: order entries to append, and outcomes of pending entries. Entries are built by
whole columns. Bytes 28 to 55 of a pending entry (session to flags) are bytes 32 to 59 of its order entry, so they are
copied as one block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.env import COUNTS, Histogram, Journal, SilentJournal
from embarcadero.errors import invariant
from embarcadero.fabric.layout import (
    OPEN_STRONG,
    OPEN_TAKEN,
    ORDER,
    PENDING,
    RESULT,
    Entries,
    Flags,
    Line,
    every,
    fold_line,
    join,
    pick,
)
from embarcadero.limits import GAP_TIMEOUT_DEPARTED_MS, SESSION_SEQUENCE_MAX
from embarcadero.sequencer.order.sessions import (
    FENCED,
    I64,
    LOST,
    NEVER,
    U64,
    W_MASK,
    ReorderBuffer,
    SessionTable,
    W,
)
from embarcadero.types import (
    BATCH_KIND,
    NO_HANDLE,
    NO_INDEX,
    NO_SESSION,
    EntryKind,
    LanePosition,
    OnGap,
    Order,
    Outcome,
    Topic,
)

_WAITS: Final = 255
"""Internal marker, not an outcome: the batch waits for its gap to close."""

_ID_BITS: Final = 24
_AHEAD_BITS: Final = 8
_ID_MASK: Final = (1 << _ID_BITS) - 1
_AHEAD_MASK: Final = (1 << _AHEAD_BITS) - 1
_NONE: Final[I64] = np.empty(0, dtype=np.int64)
invariant(W == 1 << _AHEAD_BITS, "how far ahead a sequence is fits its part of a sort key")


class _Step:
    """Columns of the batches that one step decides on, and their outcomes."""

    def __init__(self, entries: Entries, table: SessionTable) -> None:
        count = len(entries)
        self.entries, self.came = entries, count
        self.sessions = entries["session"].astype(np.int64)
        self.rows = self.sessions & table.mask
        self.seqs = entries["session_seq"].astype(np.int64)
        if int(self.seqs.view(np.uint64).max(initial=0)) > SESSION_SEQUENCE_MAX:  # no publisher reaches it
            self.seqs[self.seqs.view(np.uint64) > SESSION_SEQUENCE_MAX] = SESSION_SEQUENCE_MAX + 1
        self.slots = self.rows * W + (self.seqs & W_MASK)
        self.crcs = entries["crc"].astype(np.uint32)
        self.outcome = np.zeros(count, dtype=np.uint8)
        self.index = np.full(count, NO_INDEX, dtype=np.uint64)
        self.seq = np.full(count, NO_INDEX, dtype=np.uint64)
        self.extra = np.zeros(count, dtype=np.uint64)

    def join_waiting(self, entries: Entries, rows: I64, seqs: I64) -> None:
        """Add batches that have been waiting to the step."""
        count = len(entries)
        self.entries = join([self.entries, entries])
        self.rows, self.seqs = np.concatenate([self.rows, rows]), np.concatenate([self.seqs, seqs])
        self.slots = np.concatenate([self.slots, rows * W + (seqs & W_MASK)])
        self.crcs = np.concatenate([self.crcs, entries["crc"]])
        self.outcome = np.concatenate([self.outcome, np.full(count, _WAITS, dtype=np.uint8)])
        nowhere = np.full(count, NO_INDEX, dtype=np.uint64)
        self.index, self.seq = np.concatenate([self.index, nowhere]), np.concatenate([self.seq, nowhere])
        self.extra = np.concatenate([self.extra, np.zeros(count, dtype=np.uint64)])


class LaneTerms(NamedTuple):
    """Settings and services of the leader for the orders of its lanes."""

    free_slots: Callable[[int], None] = lambda _count: None
    """Called when more slots of the reorder buffer are needed than are free; may fence sessions of any lane."""
    journal: Journal = SilentJournal()
    peer_share: float = 1.0  # maximum share of a table for the sessions of one address
    departed_timeout_ms: int = GAP_TIMEOUT_DEPARTED_MS  # how long a gap may stay open after its connections are gone


class LaneOrder:
    """The order of one lane: its sessions and counters."""

    def __init__(self, topic: Topic, table: SessionTable, buffer: ReorderBuffer) -> None:
        self.table, self.buffer = table, buffer
        self.all_strong = topic.order == Order.STRONG  # the topic takes no weak sessions
        self.next_index = self.next_seq = self.append_us = 0
        self.due_us = NEVER  # no gap times out before this time
        self.idle_due_us = NEVER  # no session expires before this time
        self.out = Decisions()
        self.counters = LaneCounters()
        self.terms = LaneTerms()
        self.reserve: Callable[[int], None] = lambda _count: None
        """Called with a number of order entries before they are decided, while sessions and decisions agree."""
        self._follow(topic)

    def begin(self, terms: LaneTerms, reserve: Callable[[int], None]) -> None:
        """Start ordering as a lane of a leader."""
        self.terms, self.reserve = terms, reserve
        self._follow(self.topic)

    def end(self) -> None:
        """Release the lane and its leader. In a reference cycle, their memory would wait for the garbage collector."""
        self.terms, self.reserve = LaneTerms(), lambda _count: None

    def alter(self, topic: Topic) -> None:
        """Adopt an altered topic. Its new timeouts apply from the next round on, also to batches that wait already."""
        self._follow(topic)
        self.due_us = self.idle_due_us = 0

    def resume(self, position: LanePosition, append_us: int) -> None:
        """Continue at this position, and not before this time."""
        self.next_index, self.next_seq = position
        self.append_us = append_us

    def not_before(self, wall_us: int) -> None:
        """Append no entry with an earlier time."""
        self.append_us = max(self.append_us, wall_us)

    def settle_in(self, now_us: int) -> None:
        """Take over sessions whose connections are unknown. Their gaps get the full timeout."""
        self.table.assume_connected(NO_HANDLE)
        self.idle_due_us = now_us

    def _follow(self, topic: Topic) -> None:
        self.topic = topic
        self.skips = topic.on_gap == OnGap.SKIP
        self.gap_timeout_us = topic.gap_timeout_ms * 1000
        self.departed_timeout_us = min(self.gap_timeout_us, self.terms.departed_timeout_ms * 1000)

    # --- the step -----------------------------------------------------------------------------------------------------
    def order(self, entries: Entries, now_us: int) -> None:
        """Decide on batches of this lane, in arrival order."""
        if not len(entries):
            return
        self.reserve(len(entries) + self.table.waiting.total)
        step, table = _Step(entries, self.table), self.table
        is_open: Flags = table.live.take(step.rows) == step.sessions
        chosen, waiting, woken = self._choose(step, is_open)
        self._append(step, chosen)
        came = step.rows[: step.came]
        table.touch(came if every(is_open) else came[is_open], now_us)
        if chosen is not None:
            self._restart_gaps(woken, now_us)  # before the search for the oldest gap
            if len(waiting):
                self._hold(step, waiting, now_us)
            self._settle(step, (step.outcome == 0).nonzero()[0])
        self._answer(step)

    def ordered_before(self, entries: Entries) -> Flags:
        """Flag the batches that already have a position: deciding on them again needs no new one."""
        step, table = _Step(entries, self.table), self.table
        found: Flags = table.handle.take(step.rows) == step.sessions
        found &= table.windows.tag.take(step.slots) == step.seqs + 1
        found &= ~table.strong.take(step.rows) | (step.seqs < table.expected.take(step.rows))  # other batches wait
        found &= entries["kind"] == BATCH_KIND
        return found

    def release(self, rows: I64, now_us: int) -> None:
        """Order the batches that waited directly after a gap at `expected` which was closed in these sessions."""
        step = _Step(self.buffer.entries[:0], self.table)
        chosen, _, woken = self._sorted_prefixes(step, _NONE, _NONE, rows)
        self._append(step, chosen)
        self._restart_gaps(woken, now_us)
        self._answer(step)

    def _answer(self, step: _Step) -> None:
        """Answer new batches in arrival order, and then batches that waited."""
        decided = step.outcome != _WAITS
        for part in (slice(0, step.came), slice(step.came, len(decided))):
            if part.start == part.stop:
                continue
            if every(decided[part]):
                self.out.answer(
                    step.entries[part], step.outcome[part], step.index[part], step.seq[part], step.extra[part]
                )
            else:
                at = decided[part].nonzero()[0] + part.start
                self.out.answer(pick(step.entries, at), step.outcome[at], step.index[at], step.seq[at], step.extra[at])

    # --- choose -------------------------------------------------------------------------------------------------------
    def _choose(self, step: _Step, is_open: Flags) -> tuple[I64 | None, I64, I64]:
        """Choose (batches to order, or None for all; batches to hold; rows whose waiting batches were released)."""
        if self.all_strong:
            return self._choose_strong(step, is_open)
        strong = self.table.strong.take(step.rows)
        if every(strong):
            return self._choose_strong(step, is_open)
        if not np.count_nonzero(strong):
            return self._choose_weak(step, is_open), _NONE, _NONE
        if self._all_new(step, is_open, strong):
            return None, _NONE, _NONE
        weak = self._choose_weak(step, is_open & ~strong)
        chosen, waiting, woken = self._choose_strong(step, is_open & strong)
        if weak is not None and chosen is not None:
            chosen = np.concatenate([weak, chosen])
        return chosen, waiting, woken

    def _all_new(self, step: _Step, is_open: Flags, strong: Flags) -> bool:
        """Choose a whole step of both kinds of sessions, if all batches are new, and strong sessions are in order."""
        table = self.table
        if not every(is_open) or np.count_nonzero(table.waiting.count.take(step.rows)):
            return False
        self._raise_lows(step, ~strong)
        ahead = step.seqs - np.where(strong, table.expected.take(step.rows), table.low.take(step.rows))
        if not every(ahead.view(np.uint64) < W):
            return False
        if np.count_nonzero(table.windows.tag.take(step.slots) == step.seqs + 1):
            return False
        ahead[~strong] = 0
        if not self._in_order(step, ahead):
            return False
        table.expect_after(step.rows, step.seqs)
        return True

    def _raise_lows(self, step: _Step, of: Flags) -> None:
        """Move the windows of these weak sessions up to the lowest sequence that their publishers may still send."""
        lows = np.minimum(words(step.entries)[:, 2].astype(np.int64), step.seqs)
        lows[step.seqs > SESSION_SEQUENCE_MAX] = 0
        whole = every(of)
        self.table.raise_lows(step.rows if whole else step.rows[of], lows if whole else lows[of])

    def _choose_weak(self, step: _Step, is_open: Flags) -> I64 | None:
        """Choose batches of weak sessions: all new ones in [low, low + W). None means all."""
        table = self.table
        self._raise_lows(step, is_open)
        near = (step.seqs - table.low.take(step.rows)).view(np.uint64) < W
        new = is_open & near & (table.windows.tag.take(step.slots) != step.seqs + 1)
        chosen = None
        if not (every(new) and every(table.windows.claim(step.slots))):
            chosen = new.nonzero()[0]
            chosen = chosen[table.windows.claim(step.slots[chosen])]
        rows, seqs = (step.rows, step.seqs) if chosen is None else (step.rows[chosen], step.seqs[chosen])
        table.expect_after(rows, seqs)
        return chosen

    def _choose_strong(self, step: _Step, is_open: Flags) -> tuple[I64 | None, I64, I64]:
        """Choose batches of strong sessions: contiguous prefixes from `expected` on. The others wait."""
        table = self.table
        ahead = step.seqs - table.expected.take(step.rows)
        new = is_open & (ahead.view(np.uint64) < W)
        if every(new) and not np.count_nonzero(table.waiting.count.take(step.rows)) and self._in_order(step, ahead):
            table.expect_next(step.rows, step.seqs)
            return None, _NONE, _NONE
        new &= table.windows.tag.take(step.slots) != step.seqs + 1  # these wait already
        fresh = new.nonzero()[0]
        fresh = fresh[table.windows.claim(step.slots[fresh])]
        fronts = step.rows[fresh[ahead[fresh] == 0]]
        return self._sorted_prefixes(step, fresh, ahead[fresh], fronts[table.waiting.count.take(fronts) > 0])

    def _in_order(self, step: _Step, ahead: I64) -> bool:
        """Whether every batch is its session's next or follows its predecessor. No batch waits in these sessions."""
        windows = self.table.windows
        numbers = windows.claim_all(step.slots)
        if numbers is None:
            return False
        before = step.rows * W + ((step.seqs - 1) & W_MASK)
        predecessor = windows.index.take(before)
        follows = predecessor < numbers
        follows &= step.slots.take(predecessor.view(np.int64), mode="clip") == before
        follows |= ahead == 0
        return every(follows)

    def _sorted_prefixes(self, step: _Step, fresh: I64, ahead: I64, woken: I64) -> tuple[I64, I64, I64]:
        """Choose contiguous prefixes of the fresh batches and the waiting batches of the woken sessions."""
        table = self.table
        keys = (step.rows[fresh] << (_ID_BITS + _AHEAD_BITS)) | (ahead << _ID_BITS) | fresh
        buffered = _NONE
        if len(woken):
            rows, seqs, buffered = table.waiting_of(woken)
            numbers = np.arange(step.came, step.came + len(rows))
            waited = (rows << (_ID_BITS + _AHEAD_BITS)) | ((seqs - table.expected[rows]) << _ID_BITS) | numbers
            keys = np.concatenate([keys, waited])
            step.join_waiting(pick(self.buffer.entries, buffered), rows, seqs)
        keys.sort()
        prefix = _rank_in_group(keys >> (_ID_BITS + _AHEAD_BITS)) == (keys >> _ID_BITS & _AHEAD_MASK)
        numbers = keys & _ID_MASK
        chosen, waiting = numbers[prefix], numbers[~prefix]
        table.expect_next(step.rows[chosen], step.seqs[chosen])
        released = chosen[chosen >= step.came]
        if len(released):
            table.waiting.end(step.rows[released])
            self.buffer.release(buffered[released - step.came])
            self.counters.cascades.add(len(released))
        return chosen, waiting[waiting < step.came], woken

    # --- append, hold, settle -----------------------------------------------------------------------------------------
    def _append(self, step: _Step, chosen: I64 | None) -> None:
        """Give positions to the chosen batches, in this order, and store them in the windows."""
        if chosen is None:
            pending, slots, seqs, crcs = step.entries, step.slots, step.seqs, step.crcs
        elif len(chosen):
            pending, slots = pick(step.entries, chosen), step.slots[chosen]
            seqs, crcs = step.seqs[chosen], step.crcs[chosen]
        else:
            return
        count = len(pending)
        index = np.arange(self.next_index, self.next_index + count, dtype=np.uint64)
        counts = pending["count"].astype(np.uint64)
        ends = np.cumsum(counts)
        first = ends - counts + np.uint64(self.next_seq)
        self.out.order.append(order_entries(pending, index, first, self.append_us))
        self.next_index += count
        self.next_seq += int(ends[-1])
        self.table.windows.store(slots, seqs, index, first, crcs)
        if chosen is None:
            step.outcome.fill(Outcome.ORDERED)
            step.index, step.seq = index, first
        else:
            step.outcome[chosen], step.index[chosen], step.seq[chosen] = Outcome.ORDERED, index, first

    def append_control(self, entry: Entries) -> int:
        """Append one entry that is not a batch. Returns its index."""
        index = self.next_index
        entry["index"], entry["seq"], entry["append_us"] = index, self.next_seq, self.append_us
        self.out.order.append(entry)
        self.next_index += 1
        return index

    def _hold(self, step: _Step, waiting: I64, now_us: int) -> None:
        """Put batches into the reorder buffer. Batches that do not fit are settled afterwards."""
        table = self.table
        if len(waiting) > self.buffer.free:
            table.windows.clear(step.slots[waiting])  # batches that cannot wait have claimed their slots too
            self.terms.free_slots(len(waiting))
            waiting = waiting[table.live.take(step.rows[waiting]) == step.sessions[waiting]][: self.buffer.free]
        rows = step.rows[waiting]
        buffered = self.buffer.hold(pick(step.entries, waiting))
        table.hold(rows, step.seqs[waiting], buffered, step.crcs[waiting], now_us)
        step.outcome[waiting] = _WAITS
        self.look_for_gaps(now_us)

    def look_for_idle(self, due_us: int) -> None:
        """Check for idle sessions at this time at the latest."""
        self.idle_due_us = min(self.idle_due_us, due_us)

    def end_of_gaps(self, due_us: int) -> None:
        """Note that no gap times out before this time: all were checked."""
        self.due_us = due_us

    def end_of_idle(self, due_us: int) -> None:
        """Note that no session expires before this time: all were checked."""
        self.idle_due_us = due_us

    def _restart_gaps(self, woken: I64, now_us: int) -> None:
        """Restart the gaps of sessions whose `expected` has moved: a remaining gap is a new one."""
        if len(woken) and self.table.waiting.restart_gaps(woken, now_us):
            self.look_for_gaps(now_us)

    def look_for_gaps(self, now_us: int) -> None:
        """Schedule a check of gaps: one has opened, or its session has lost its last connection."""
        self.due_us = min(self.due_us, now_us + self.departed_timeout_us)

    def _settle(self, step: _Step, rest: I64) -> None:
        """Answer batches that were neither ordered nor held, from the current sessions."""
        if not len(rest):
            return
        table, rows, seqs, slots = self.table, step.rows[rest], step.seqs[rest], step.slots[rest]
        known = table.handle.take(rows) == step.sessions[rest]
        windows, expected, index = table.windows, table.expected.take(rows), table.windows.index.take(slots)
        hit, same = windows.tag.take(slots) == seqs + 1, windows.crc.take(slots) == step.crcs[rest]
        below = seqs < table.low.take(rows)  # strong: only in a session that was opened at a sequence
        strong, late = table.strong.take(rows), seqs < expected
        found, old = hit & np.where(strong, late, ~below), np.where(strong, late & ~hit, below)
        outcome = np.select(
            [
                ~known,
                found & (index == LOST),
                found & (index == NO_INDEX),
                found & same,
                found,
                old & below,
                old,
                table.state.take(rows) == FENCED,
                hit & ~same,
                hit,
            ],
            [
                Outcome.UNKNOWN_SESSION,
                Outcome.LOST,
                Outcome.DUP,
                Outcome.DUP_OF,
                Outcome.CONFLICT,
                Outcome.STALE,
                Outcome.STALE if self.skips else Outcome.DUP,
                Outcome.FENCED,
                Outcome.CONFLICT,
                Outcome.UNDECIDED,
            ],
            Outcome.BACKPRESSURE,
        ).astype(np.uint8)
        step.outcome[rest] = outcome
        there = outcome == Outcome.DUP_OF
        step.index[rest[there]], step.seq[rest[there]] = index[there], windows.seq.take(slots[there])
        fenced = outcome == Outcome.FENCED
        step.extra[rest[fenced]] = expected[fenced]


def _rank_in_group(groups: I64) -> I64:
    """Compute each element's number within its run of equal groups."""
    count = len(groups)
    if not count:
        return _NONE
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    return np.arange(count) - np.repeat(starts, np.diff(np.concatenate([starts, [count]])))


_LOW: Final = 0xFFFF_FFFF
_BATCH: Final = int(EntryKind.BATCH)
_ORDERED: Final = int(Outcome.ORDERED) << 32


def is_batch(line: Line, index: int) -> bool:
    """Whether a pending entry is a valid batch with this index."""
    return line[0] == index and line[6] >> 48 & 0xFF == _BATCH and fold_line(line) == line[7] >> 32


def order_one(lane: LaneOrder, line: Line, now_us: int) -> tuple[int, int] | None:
    """Give a batch its index and seq in the common case. Returns None, with no effect, otherwise."""
    table, session, sequence, extent = lane.table, line[3] >> 32, line[1], line[5]
    row = session & table.mask
    if table.live.item(row) != session or sequence > SESSION_SEQUENCE_MAX:
        return None
    if table.strong.item(row):
        low = -1
        if table.expected.item(row) != sequence or table.waiting.count.item(row):
            return None
    else:
        low, slot = max(table.low.item(row), min(line[2], sequence)), row * W + (sequence & W_MASK)
        if not 0 <= sequence - low < W or table.windows.tag.item(slot) == sequence + 1:
            return None
    lane.reserve(1)
    index, seq = lane.next_index, lane.next_seq
    lane.next_index, lane.next_seq = index + 1, seq + (extent & _LOW)
    table.append_one(row, low, sequence, index, seq, extent >> 32, now_us)
    return index, seq


def order_line(pending: Line, origin: int, index: int, seq: int, append_us: int) -> Line:
    """Make the order entry of a batch. The block that both kinds of entries share moves four bytes up."""
    _, sequence, _, lane, location, extent, tags, _ = pending
    tags = tags & ~0xFFFF | origin
    return [
        index,
        seq,
        sequence,
        append_us,
        lane >> 32 | (location & _LOW) << 32,
        location >> 32 | (extent & _LOW) << 32,
        extent >> 32 | (tags & _LOW) << 32,
        tags >> 32,
    ]


def result_line(pending: Line, index: int, seq: int) -> Line:
    """Make the answer to a batch that was ordered."""
    return [0, pending[0], index, seq, pending[1], 0, pending[3] >> 32 | _ORDERED, 0]


U8 = npt.NDArray[np.uint8]

_SHARED: Final = ("session", "location", "size", "count", "crc", "origin", "partition", "schema", "kind", "flags")


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    fields = dtype.fields
    return fields[name][1] if fields else -1


for _name in _SHARED:
    invariant(_offset(ORDER, _name) == _offset(PENDING, _name) + 4, "pending and order entries share a block of fields")
invariant(_offset(RESULT, "outcome") == _offset(RESULT, "session") + 4, "session and outcome share a word")

_FROM: Final = slice(_offset(PENDING, "session") // 4, _offset(PENDING, "flags") // 4 + 1)
_TO: Final = slice(_offset(ORDER, "session") // 4, _offset(ORDER, "flags") // 4 + 1)


def words(entries: Entries) -> U64:
    """View entries as rows of eight words."""
    return entries.view(np.uint64).reshape(-1, 8)


def order_entries(pending: Entries, index: U64, seq: U64, append_us: int) -> Entries:
    """Make the order entries of ordered batches."""
    made = np.empty(len(pending), dtype=ORDER)
    out, source = words(made), words(pending)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = index, seq, source[:, 1], append_us
    made.view(np.uint32).reshape(-1, 16)[:, _TO] = pending.view(np.uint32).reshape(-1, 16)[:, _FROM]
    return made


def control_entry(kind: EntryKind, session: int, session_seq: int, **fields: int) -> Entries:
    """Make one order entry without a payload. Its index, seq and time are set when it is appended."""
    made = np.zeros(1, dtype=ORDER)
    made["kind"], made["session"], made["session_seq"], made["origin"] = kind, session, session_seq, NO_HANDLE
    for name, value in fields.items():
        made[name] = value
    return made


class OpenedFacts(NamedTuple):
    """The facts in an ordered SESSION_OPEN, apart from its session and next sequence."""

    name: int  # its hash; 0: none
    continued: int | None  # the session that it continues
    taken: bool  # another holder took the name
    strong: bool  # the session is strong although the topic's default is weak


def open_entry(session: int, expected: int, facts: OpenedFacts) -> Entries:
    """Make the order entry of a session's start. It has everything that a replay needs: see `opened_facts`."""
    name, earlier = facts.name, NO_SESSION if facts.continued is None else facts.continued
    return control_entry(
        EntryKind.SESSION_OPEN,
        session,
        expected,
        location=name & 0xFFFF_FFFF,
        crc=name >> 32,
        partition=earlier & 0xFFFF,
        schema=earlier >> 16,
        flags=facts.taken * OPEN_TAKEN | facts.strong * OPEN_STRONG,
    )


def opened_facts(entry: np.void) -> OpenedFacts:
    """Read back the facts that `open_entry` wrote."""
    earlier = int(entry["schema"]) << 16 | int(entry["partition"])
    name, flags = int(entry["crc"]) << 32 | int(entry["location"]), int(entry["flags"])
    continued = None if earlier == NO_SESSION else earlier
    return OpenedFacts(name, continued, bool(flags & OPEN_TAKEN), bool(flags & OPEN_STRONG))


def results(pending: Entries, outcome: U8, index: U64, seq: U64, extra: U64) -> Entries:
    """Make the results of pending entries. Their positions are set when they are written."""
    made = np.empty(len(pending), dtype=RESULT)
    out, source = words(made), words(pending)
    out[:, 1], out[:, 2], out[:, 3], out[:, 4], out[:, 5] = source[:, 0], index, seq, source[:, 1], extra
    out[:, 6] = (source[:, 3] >> np.uint64(32)) | (outcome.astype(np.uint64) << np.uint64(32))
    out[:, 7] = 0
    return made


class Decisions:
    """Collects decisions until they are written. The lane takes the order entries, the sequencer the answers."""

    def __init__(self) -> None:
        self.order: list[Entries] = []
        self.answers: list[tuple[npt.NDArray[np.uint16], Entries]] = []  # region handles, results

    def answer(self, pending: Entries, outcome: U8, index: U64, seq: U64, extra: U64) -> None:
        """Add the outcomes of many entries."""
        if len(pending):
            self.answers.append((pending["origin"], results(pending, outcome, index, seq, extra)))

    def answer_all(self, pending: Entries, outcome: Outcome, extra: int = 0) -> None:
        """Add one refusal for many entries."""
        count = len(pending)
        nowhere = np.full(count, NO_INDEX, dtype=np.uint64)
        self.answer(
            pending, np.full(count, outcome, dtype=np.uint8), nowhere, nowhere, np.full(count, extra, dtype=np.uint64)
        )

    def answer_one(self, pending: Entries, outcome: Outcome, **fields: Any) -> None:
        """Add the outcome of one control entry."""
        self.answer_all(pending, outcome)
        made = self.answers[-1][1]
        for name, value in fields.items():
            made[name] = value

    def take_order(self) -> list[Entries]:
        """Return and clear the collected order entries."""
        taken, self.order = self.order, []
        return taken

    def take_answers(self) -> list[tuple[npt.NDArray[np.uint16], Entries]]:
        """Return and clear the collected answers."""
        taken, self.answers = self.answers, []
        return taken


class FenceReason(StrEnum):
    """Why a session was fenced."""

    GAP = "gap"
    OVERFLOW = "overflow"
    IDLE = "idle"
    REPLACED = "replaced"
    MOVED = "moved"
    ABANDONED = "abandoned"
    RESTART = "restart"


class LaneCounters:
    """Counters of one lane."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.fenced: Counter[FenceReason] = Counter()
        self.gap_timeouts = self.skips = 0
        self.cascades = Histogram(COUNTS)  # waiting batches that one round released
        self.checkpoints = self.checkpoint_us = self.checkpoint_sessions = 0  # number; of the last: duration, rows
        self.checkpoint_at_us = 0
        self.refused = 0  # entries refused because the lane's ring, or its reservation, was full
