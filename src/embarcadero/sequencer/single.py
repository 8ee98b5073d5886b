"""A round that is one batch, in plain numbers.

A publisher that waits for each answer makes rounds of one entry, and for one entry plain numbers are several times
quicker than arrays. Only the common case is decided here: the next batch of a strong session, or a batch that is new in
the window of a weak session. For any other, nothing is changed, and the round goes the usual way.
"""

from __future__ import annotations

from typing import Final

from embarcadero.fabric.layout import Line, fold_line
from embarcadero.limits import SESSION_SEQUENCE_MAX
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.sessions import W_MASK, W
from embarcadero.types import EntryKind, Outcome

_LOW: Final = 0xFFFF_FFFF
_BATCH: Final = int(EntryKind.BATCH)
_ORDERED: Final = int(Outcome.ORDERED) << 32


def is_batch(line: Line, index: int) -> bool:
    """Whether a pending entry is the valid batch of this index."""
    return line[0] == index and line[6] >> 48 & 0xFF == _BATCH and fold_line(line) == line[7] >> 32


def order_one(lane: LaneOrder, line: Line, now_us: int) -> tuple[int, int] | None:
    """Give a batch its index and seq, if it is the common case."""
    table, session, sequence = lane.table, line[3] >> 32, line[1]
    row = session & table.mask
    slot = row * W + (sequence & W_MASK)
    if table.live[row] != session or sequence > SESSION_SEQUENCE_MAX:
        return None
    strong = table.strong[row]
    if strong:
        if table.expected[row] != sequence or table.held[row]:
            return None
        expected = sequence + 1
    else:
        low = max(int(table.low[row]), min(line[2], sequence))
        if not 0 <= sequence - low < W or table.tag[slot] == sequence + 1:
            return None
        expected = max(int(table.expected[row]), sequence + 1)
    lane.reserve(1)
    if not strong:
        table.low[row] = low
    index, seq = lane.next_index, lane.next_seq
    lane.next_index, lane.next_seq = index + 1, seq + (line[5] & _LOW)
    table.expected[row], table.active_us[row] = expected, now_us
    table.tag[slot], table.index[slot], table.seq[slot], table.crc[slot] = sequence + 1, index, seq, line[5] >> 32
    return index, seq


def order_line(pending: Line, origin: int, index: int, seq: int, append_us: int) -> Line:
    """The order entry of a batch: the block that both kinds of entries share is four bytes further on."""
    _, sequence, _, lane, place, extent, tags, _ = pending
    tags = tags & ~0xFFFF | origin
    return [
        index, seq, sequence, append_us, lane >> 32 | (place & _LOW) << 32, place >> 32 | (extent & _LOW) << 32,
        extent >> 32 | (tags & _LOW) << 32, tags >> 32,
    ]  # fmt: skip


def result_line(pending: Line, index: int, seq: int) -> Line:
    """The answer to a batch that was ordered."""
    return [0, pending[0], index, seq, pending[1], 0, pending[3] >> 32 | _ORDERED, 0]
