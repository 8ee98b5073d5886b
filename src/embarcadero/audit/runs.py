"""Sessions over the whole log: each one's batches as runs of sequences, small enough to be brought together.

A span of the log has, for each session, about one run: sequences without a hole, in the order of the log (orders 0, 1
and 2: sorted, because only one position each is promised there). Runs of a session from all spans, side by side, show
whether a sequence is there twice (P2), out of order, or missing (P3). SESSION_OPEN begins a session's life, with the
sequence it starts from; a handle that is used again begins another one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.types import NO_SESSION, EntryKind

RUNS: Final = pa.schema(
    [
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("session", pa.int64(), nullable=False),
        pa.field("opens", pa.bool_(), nullable=False),  # a SESSION_OPEN: no batch, but where sequences start
        pa.field("first_index", pa.int64(), nullable=False),
        pa.field("last_index", pa.int64(), nullable=False),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("stop_seq", pa.int64(), nullable=False),
    ]
)
PROBLEMS: Final = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("index", pa.int64(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
_SESSIONS: Final = (EntryKind.BATCH, EntryKind.SESSION_OPEN, EntryKind.SKIP)

Int64s = npt.NDArray[np.int64]


def runs_of(
    lane: int, indices: Int64s, kinds: Int64s, sessions: Int64s, sequences: Int64s, skipped: Int64s, *, strong: bool
) -> pa.RecordBatch:
    """The runs of a span's entries, given in the order of the log."""
    own = np.isin(kinds, _SESSIONS) & (sessions != NO_SESSION)
    indices, kinds, sessions = indices[own], kinds[own], sessions[own]
    starts, widths = sequences[own], np.where(kinds == EntryKind.SKIP, skipped[own], 1)
    opens = kinds == EntryKind.SESSION_OPEN
    widths[opens] = 0
    lives = _lives(sessions, opens)
    order = np.lexsort((indices if strong else starts, ~opens, lives, sessions))
    sessions, lives, opens, indices, starts, widths = (
        column[order] for column in (sessions, lives, opens, indices, starts, widths)
    )
    if not len(indices):
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in RUNS], schema=RUNS)
    goes_on = (
        (sessions[1:] == sessions[:-1]) & (lives[1:] == lives[:-1]) & ~opens[1:] & ~opens[:-1]
        & (starts[1:] == starts[:-1] + widths[:-1])
    )  # fmt: skip
    if strong:
        goes_on &= indices[1:] > indices[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    last = np.concatenate((first[1:], [len(indices)])) - 1
    columns: list[Any] = [
        np.full(len(first), lane, np.int32), sessions[first], opens[first], np.minimum.reduceat(indices, first),
        np.maximum.reduceat(indices, first), starts[first], starts[last] + widths[last],
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=RUNS)


def _lives(sessions: Int64s, opens: npt.NDArray[np.bool_]) -> Int64s:
    """How often each entry's session was opened before it, in this span."""
    order = np.argsort(sessions, kind="stable")
    total = np.cumsum(opens[order])
    fresh = np.concatenate(([True], sessions[order][1:] != sessions[order][:-1])) if len(order) else np.zeros(0, bool)
    before = np.maximum.accumulate(np.where(fresh, total - opens[order], 0)) if len(order) else total
    lives = np.empty(len(sessions), np.int64)
    lives[order] = total - before
    return lives


def problems_of(runs: pa.Table, *, strong: bool, from_start: bool) -> pa.Table:
    """What is wrong with sessions, given all runs of them (of any spans, in any order).

    `from_start`: the log is there from its beginning, so each session's SESSION_OPEN has to be, too.
    """
    sorted_runs = runs.sort_by([("lane", "ascending"), ("session", "ascending"), ("first_index", "ascending")])
    lanes, sessions, firsts, lasts, starts, stops = (
        sorted_runs.column(name).to_numpy().astype(np.int64)
        for name in ("lane", "session", "first_index", "last_index", "first_seq", "stop_seq")
    )
    opens = sorted_runs.column("opens").to_numpy(zero_copy_only=False).astype(bool)
    found: list[tuple[str, int, int, str]] = []
    same = np.concatenate(([False], (lanes[1:] == lanes[:-1]) & (sessions[1:] == sessions[:-1])))[: len(lanes)]
    lives = np.cumsum(opens | ~same)
    if from_start:
        for run in np.flatnonzero(~same & ~opens).tolist():
            what = f"session {sessions[run]} has batches before it was opened"
            found.append(("session-strange", int(lanes[run]), int(firsts[run]), what))
    by_sequence = np.lexsort((stops, starts, lives))
    _compare(found, by_sequence, lives, (lanes, sessions, firsts, lasts, starts, stops, opens), strong=strong)
    return pa.Table.from_pylist([dict(zip(PROBLEMS.names, problem, strict=True)) for problem in found], schema=PROBLEMS)


def _compare(
    found: list[tuple[str, int, int, str]], order: Int64s, lives: Int64s, columns: tuple[Any, ...], *, strong: bool
) -> None:
    """Look at each run and at the one before it in the same life of a session, by sequence."""
    lanes, sessions, firsts, lasts, starts, stops, _ = (column[order] for column in columns)
    together = lives[order][1:] == lives[order][:-1]
    reach = _reach(lives[order], stops)
    twice = together & (starts[1:] < reach[:-1])
    late = together & ~twice & (firsts[1:] < lasts[:-1])
    hole = together & (starts[1:] > reach[:-1])
    for run in np.flatnonzero(twice).tolist():
        what = f"session {sessions[run + 1]}: sequence {starts[run + 1]} again, before index {firsts[run]} or there"
        found.append(("session-twice", int(lanes[run + 1]), int(firsts[run + 1]), what))
    if not strong:
        return
    for run in np.flatnonzero(late).tolist():
        what = f"session {sessions[run + 1]}: sequence {starts[run + 1]} comes before {stops[run] - 1}"
        found.append(("session-order", int(lanes[run + 1]), int(firsts[run + 1]), what))
    for run in np.flatnonzero(hole).tolist():
        what = f"session {sessions[run + 1]}: sequences {reach[run]} to {starts[run + 1] - 1} are missing"
        found.append(("session-hole", int(lanes[run + 1]), int(firsts[run + 1]), what))


def _reach(lives: Int64s, stops: Int64s) -> Int64s:
    """For each run: how far sequences go in it and in those before it of the same life."""
    if not len(stops):
        return stops
    far = int(stops.max()) + 1
    return np.maximum.accumulate(stops + lives * far) - lives * far
