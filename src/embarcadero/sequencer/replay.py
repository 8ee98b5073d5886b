"""From order entries back to the session table: what a takeover does with the entries after a checkpoint."""

from __future__ import annotations

import numpy as np

from embarcadero.errors import Corrupt
from embarcadero.fabric.layout import Entries, pick
from embarcadero.limits import SESSION_SEQUENCE_MAX
from embarcadero.sequencer.control import mark_lost
from embarcadero.sequencer.decisions import opened_facts
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.sessions import W_MASK, W
from embarcadero.types import NO_INDEX, EntryKind


def replay(order: LaneOrder, entries: Entries, now_us: int) -> None:
    """Apply ordered entries to the table, in their order."""
    if not len(entries):
        return
    controls = np.flatnonzero(entries["kind"] != EntryKind.BATCH)
    done = 0
    for at in controls.tolist():
        _replay_batches(order, entries[done:at], now_us)
        _replay_control(order, entries[at], now_us)
        done = at + 1
    _replay_batches(order, entries[done:], now_us)
    rows = np.flatnonzero(order.table.state)  # few of very many: the memory of the others is not touched
    rows = rows[~order.table.strong[rows]]
    if len(rows):  # entries do not carry `low` of weak sessions, but it is never more than a window behind
        order.table.low[rows] = np.maximum(order.table.low[rows], order.table.expected[rows] - W)
    last = entries[-1]
    order.next_index, order.append_us = int(last["index"]) + 1, int(last["append_us"])
    order.next_seq = int(last["seq"]) + int(last["count"])


def _replay_batches(order: LaneOrder, entries: Entries, now_us: int) -> None:
    if not len(entries):
        return
    table = order.table
    _possible(order, int(entries["session_seq"].max()))
    rows = entries["session"].astype(np.int64) & table.mask
    seqs = entries["session_seq"].astype(np.int64)
    slots = rows * W + (seqs & W_MASK)
    table.tag[slots], table.index[slots] = seqs + 1, entries["index"]
    table.seq[slots], table.crc[slots] = entries["seq"], entries["crc"]
    np.maximum.at(table.expected, rows, seqs + 1)
    table.active_us[rows] = now_us


def _replay_control(order: LaneOrder, entry: np.void, now_us: int) -> None:
    table, kind, session = order.table, int(entry["kind"]), int(entry["session"])
    if kind == EntryKind.SESSION_OPEN:
        name, continued, taken, strong = opened_facts(entry)
        strong = order.all_strong or strong
        earlier = table.row_of(continued) if continued is not None else None
        if earlier is not None:
            table.fence(earlier, now_us)  # usually an entry has said so before; after a restart it may be missing
        opened = table.open(session, name, now_us, earlier, taken, strong=strong)
        table.advance(opened, _possible(order, int(entry["session_seq"])))
        return
    row = table.row_of(session)
    if row is None:
        return
    if kind == EntryKind.SESSION_FENCE:
        table.fence(row, now_us)
    elif kind == EntryKind.SESSION_CLOSE:
        table.forget(row)
    elif kind == EntryKind.SKIP:
        first = int(entry["session_seq"])
        mark_lost(order, row, first, first + int(entry["location"]))


def _possible(order: LaneOrder, sequence: int) -> int:
    if sequence > SESSION_SEQUENCE_MAX + 1:
        what = f"the order ring of topic {order.topic.name} has session sequence {sequence}, which nobody gets to"
        raise Corrupt(what, "restart the cluster")
    return sequence


def learn_positions(order: LaneOrder, entries: Entries) -> None:
    """Entries below the checkpoint, if still in the ring, say where sequences are that the table only knows as stored.

    A session knows the positions of those it continues, so each entry also counts for its session's successors.
    """
    successors = {
        continued: int(entry["session"])
        for entry in entries[entries["kind"] == EntryKind.SESSION_OPEN]
        if (continued := opened_facts(entry).continued) is not None
    }
    batches = pick(entries, entries["kind"] == EntryKind.BATCH)
    sessions = batches["session"].astype(np.int64)
    table = order.table
    while len(batches):
        rows = sessions & table.mask
        seqs = batches["session_seq"].astype(np.int64)
        slots = rows * W + (seqs & W_MASK)
        known = (table.handle[rows] == sessions) & (table.tag[slots] == seqs + 1) & (table.index[slots] == NO_INDEX)
        at = slots[known]
        table.index[at], table.seq[at] = batches["index"][known], batches["seq"][known]
        table.crc[at] = batches["crc"][known]
        if not successors:
            return
        heirs, which = np.unique(sessions, return_inverse=True)
        sessions = np.array([successors.get(heir, -1) for heir in heirs.tolist()], dtype=np.int64)[which]
        batches, sessions = pick(batches, sessions >= 0), sessions[sessions >= 0]
