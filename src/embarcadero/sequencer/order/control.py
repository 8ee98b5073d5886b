"""What is done to single sessions: opened, continued, fenced, closed, attached; and what time does to them.

Everything here happens at control rate, one session at a time, and everything that changes the table is an entry in the
log, so that a replay of the log gives the same table.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from embarcadero.fabric.layout import OPEN_STRONG, Entries, pick
from embarcadero.limits import ABANDONED_S, EXPIRED_PER_ROUND_MAX, FENCED_KEPT_S
from embarcadero.sequencer.order.batches import LaneOrder, OpenedFacts, control_entry, open_entry
from embarcadero.sequencer.order.sessions import FENCED, LOST, NEVER, OPEN, TAKEN, W_MASK, Ints, W
from embarcadero.types import NO_SESSION, EntryKind, Order, Outcome

_KEPT_US: Final = FENCED_KEPT_S * 1_000_000
_ABANDONED_US: Final = int(ABANDONED_S * 1_000_000)


def control(lane: LaneOrder, entry: Entries, now_us: int) -> None:
    """Decide on one entry that is not a batch."""
    lane.reserve(4)
    kind, session, origin = int(entry["kind"][0]), int(entry["session"][0]), int(entry["origin"][0])
    if kind == EntryKind.SESSION_OPEN:
        _open(lane, entry, now_us)
    elif kind == EntryKind.SESSION_CLOSE:
        _close(lane, entry, session)
    elif kind == EntryKind.SESSION_ATTACH:
        attach(lane, session, origin)
        lane.out.answer_one(entry, Outcome.NOTED)
    elif kind == EntryKind.SESSION_DETACH:
        if (row := lane.table.row_of(session)) is not None:
            _detach(lane, row, origin, now_us)
        lane.out.answer_one(entry, Outcome.NOTED)
    else:
        lane.out.answer_one(entry, Outcome.UNKNOWN_SESSION)


def touched_session(lane: LaneOrder, entry: Entries) -> int | None:
    """The session whose batches a request must not overtake."""
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
        held = table.row_of(holder)
        expected = 0 if held is None else int(table.expected[held])
        lane.out.answer_one(entry, Outcome.NAME_HELD, session=holder, extra=expected)
        return
    elif holder != NO_SESSION:
        earlier, taken = table.row_of(holder), True
    handle, peer = table.free_handle(), int(entry["size"][0])
    shared = earlier is None and table.has_its_share(peer, lane.peer_share)
    crowded = shared or table.used >= table.sessions_max
    stay = [one for one in (row, earlier) if one is not None]
    victim = _victim(lane, stay, peer * shared, now_us) if crowded else None
    if handle is None or (crowded and victim is None):
        lane.out.answer_one(entry, Outcome.TOO_MANY_SESSIONS, extra=int(shared))
        return
    if handle >= table.handles_reserved:
        lane.out.answer_one(entry, Outcome.BACKPRESSURE)  # until the store has reserved more
        return
    at = int(entry["low"][0]) - 1  # -1: wherever it is
    if earlier is not None and table.state[earlier] == OPEN:
        fence(lane, earlier, now_us, "replaced" if at < 0 else "moved")
    continued = int(table.handle[earlier]) if earlier is not None else None
    strong = lane.all_strong or bool(int(entry["flags"][0]) & OPEN_STRONG)
    if earlier is not None:
        strong = bool(table.strong[earlier])  # windows of the two kinds differ, so a session keeps its kind
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
    attach(lane, handle, int(entry["origin"][0]))
    lane.idle_due_us = min(lane.idle_due_us, now_us + min(lane.topic.session_ttl_s * 1_000_000, _KEPT_US))
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
    """The session that has to hold the name for this request to be carried out; `holder` does if it names none."""
    asked = int(entry["crc"][0])
    return holder if asked == 0 else asked if asked == NO_SESSION else asked - 1


def _victim(lane: LaneOrder, but: list[int], peer: int, now_us: int) -> int | None:
    """The session that leaves a full table for another one; with `peer`, one of that address."""
    table = lane.table
    if (fenced := table.oldest_fenced(but, peer)) is not None:
        return fenced
    return but[-1] if but else table.oldest_abandoned(now_us - _ABANDONED_US, peer)


def _make_way(lane: LaneOrder, outlived: list[int], victim: int | None, now_us: int) -> None:
    """Forget what has to leave: those who were outlived, or one if the table is full. So nobody fills it by going on.

    Who moves on in its name does not come back to where it was; and who continues a session knows of that one, so it
    never asks for those before it. Two of them leave, since a request whose answer is lost makes one more.
    """
    for row in outlived[:2] or ([] if victim is None else [victim]):
        if lane.table.state[row] == OPEN:
            fence(lane, row, now_us, "abandoned")
        _forget(lane, row)


def _close(lane: LaneOrder, entry: Entries, session: int) -> None:
    """Closing a session that is not there is done already."""
    row = lane.table.row_of(session)
    if row is None:
        lane.out.answer_one(entry, Outcome.CLOSED)
        return
    lane.counters.closed += 1
    _refuse_held(lane, row)
    lane.out.answer_one(entry, Outcome.CLOSED, index=_forget(lane, row))


def _forget(lane: LaneOrder, row: int) -> int:
    table = lane.table
    index = lane.append_control(
        control_entry(EntryKind.SESSION_CLOSE, int(table.handle[row]), int(table.expected[row]))
    )
    table.forget(row)
    return index


def fence(lane: LaneOrder, row: int, now_us: int, why: str) -> None:
    """Nothing more of this session; what waits is refused, and its publisher told where to go on."""
    table = lane.table
    lane.counters.fenced[why] += 1
    if why != "moved":  # that is how some sessions live
        lane.journal.note(
            "session fenced",
            topic=lane.topic.name,
            session=int(table.handle[row]),
            why=why,
            expected=int(table.expected[row]),
            waiting=int(table.held[row]),
        )
    lane.reserve(4)
    _refuse_held(lane, row)
    lane.append_control(control_entry(EntryKind.SESSION_FENCE, int(table.handle[row]), int(table.expected[row])))
    table.fence(row, now_us)
    lane.idle_due_us = min(lane.idle_due_us, now_us + _KEPT_US)


def _refuse_held(lane: LaneOrder, row: int) -> None:
    if lane.table.held[row]:
        slots = lane.table.drop_held(row)
        refused = pick(lane.held.entries, slots)
        lane.held.release(slots)
        lane.out.answer_all(refused, Outcome.FENCED, extra=int(lane.table.expected[row]))


# --- who is connected -------------------------------------------------------------------------------------------------
def attach(lane: LaneOrder, session: int, origin: int) -> None:
    """A broker has a connection of this session."""
    row = lane.table.row_of(session)
    if row is not None:
        lane.table.attached.setdefault(row, set()).add(origin)
        lane.table.departed_us[row] = NEVER


def _detach(lane: LaneOrder, row: int, origin: int, now_us: int) -> None:
    """A broker has no connection of this session any more. When none has, its gaps time out sooner."""
    brokers = lane.table.attached.get(row, set())
    brokers.discard(origin)
    if not brokers:
        lane.table.departed_us[row] = now_us
        lane.due_us = min(lane.due_us, now_us + lane.departed_timeout_us)


def detach_broker(lane: LaneOrder, origin: int, now_us: int) -> None:
    """A broker incarnation is gone, and all connections with it."""
    for row in [row for row, brokers in lane.table.attached.items() if origin in brokers]:
        _detach(lane, row, origin, now_us)


# --- time -------------------------------------------------------------------------------------------------------------
def expire(lane: LaneOrder, now_us: int, most: int = EXPIRED_PER_ROUND_MAX) -> int:
    """End gaps and sessions whose time is over, at most so many of each. Returns how many."""
    done = 0
    if now_us >= lane.due_us:
        done += _end_gaps(lane, now_us, most)
    if now_us >= lane.idle_due_us:
        done += _end_sessions(lane, now_us, most)
    return done


def _end_gaps(lane: LaneOrder, now_us: int, most: int) -> int:
    table = lane.table
    rows = np.flatnonzero(table.gap_us < NEVER)
    since, departed = table.gap_us[rows], table.departed_us[rows]
    deadline = since + lane.gap_timeout_us
    gone = departed < NEVER
    deadline[gone] = np.minimum(deadline, np.maximum(since, departed) + lane.departed_timeout_us)[gone]
    due = rows[deadline <= now_us][:most]
    later = deadline[~np.isin(rows, due)]
    lane.due_us = int(later.min()) if len(later) else NEVER
    lane.counters.gap_timeouts += len(due)
    if lane.skips and len(due):
        _skip(lane, due, now_us)
    else:
        for row in due.tolist():
            fence(lane, row, now_us, "gap")
    return len(due)


def _skip(lane: LaneOrder, rows: Ints, now_us: int) -> None:
    """Declare the missing sequences in front of what waits lost, and go on behind them."""
    table = lane.table
    lane.reserve(len(rows) + table.waiting)
    for row in rows.tolist():
        expected = int(table.expected[row])
        front = int(table.held_of(np.array([row]))[1].min())
        lane.append_control(control_entry(EntryKind.SKIP, int(table.handle[row]), expected, location=front - expected))
        mark_lost(lane, row, expected, front)
        lane.counters.skips += 1
        table.active_us[row] = now_us
    lane.release(rows, now_us)


def mark_lost(lane: LaneOrder, row: int, expected: int, front: int) -> None:
    """The sequences [expected, front) of this session will never come."""
    lost = np.arange(expected, front)
    slots = row * W + (lost & W_MASK)
    lane.table.tag[slots], lane.table.index[slots] = lost + 1, LOST
    lane.table.expected[row] = front


def _end_sessions(lane: LaneOrder, now_us: int, most: int) -> int:
    table, ttl_us = lane.table, lane.topic.session_ttl_s * 1_000_000
    rows = np.flatnonzero(table.state)
    long = (table.state[rows] == OPEN) | table.awaited(rows)
    deadline = table.active_us[rows] + np.where(long, ttl_us, _KEPT_US)
    due = rows[deadline <= now_us][:most]
    later = deadline[~np.isin(rows, due)]
    lane.idle_due_us = int(later.min()) if len(later) else NEVER
    lane.reserve(2 * len(due))
    for row in due.tolist():
        if table.state[row] == FENCED:
            _forget(lane, row)
        else:
            fence(lane, row, now_us, "idle")
    return len(due)
