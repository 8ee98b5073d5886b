"""Sessions over the whole log: each one's batches as runs of sequences, small enough to be brought together.

A span of the log has, for each session, about one run: sequences without a hole, sorted. A run ends before the first
sequence that the log has too early, so disorder within a span shows as two runs that overlap. Runs of a session from
all spans, side by side, show whether a sequence is there twice (P2), out of order, or missing (P3).

SESSION_OPEN begins a session's life, with the sequence it starts from; a handle that is used again begins another one.
In order 2 it also says whether the session is strong. Only strong sessions are promised an order without holes. A
session whose kind no entry says (its SESSION_OPEN was trimmed, or is in an older file of its table) counts as weak.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embarcadero.fabric.layout import OPEN_STRONG
from embarcadero.tier.columns import Int64s
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
        pa.field("strong", pa.bool_()),  # of a SESSION_OPEN, by its flags; null: they are not known
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
NO_FLAGS: Final = -1
"""The flags of an entry that was read from where they are not kept."""
_SESSIONS: Final = (EntryKind.BATCH, EntryKind.SESSION_OPEN, EntryKind.SKIP)



def runs_of(
    lane: int, indices: Int64s, kinds: Int64s, sessions: Int64s, sequences: Int64s, skipped: Int64s, flags: Int64s
) -> pa.RecordBatch:
    """The runs of a span's entries, given in the order of the log. `flags`: NO_FLAGS where they are not known."""
    own = np.isin(kinds, _SESSIONS) & (sessions != NO_SESSION)
    indices, kinds, sessions, flags = indices[own], kinds[own], sessions[own], flags[own]
    starts, widths = sequences[own], np.where(kinds == EntryKind.SKIP, skipped[own], 1)
    opens = kinds == EntryKind.SESSION_OPEN
    widths[opens] = 0
    lives = _lives(sessions, opens)
    order = np.lexsort((indices, starts, ~opens, lives, sessions))
    sessions, lives, opens, indices, starts, widths, flags = (
        column[order] for column in (sessions, lives, opens, indices, starts, widths, flags)
    )
    if not len(indices):
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in RUNS], schema=RUNS)
    goes_on = (
        (sessions[1:] == sessions[:-1])
        & (lives[1:] == lives[:-1])
        & ~opens[1:]
        & ~opens[:-1]
        & (starts[1:] == starts[:-1] + widths[:-1])
    )
    early = np.flatnonzero(goes_on & (indices[1:] < indices[:-1]))
    _, first_early = np.unique(np.cumsum(~goes_on)[early], return_index=True)
    goes_on[early[first_early]] = False  # only the first of each run: sessions that promise no order stay few runs
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    last = np.concatenate((first[1:], [len(indices)])) - 1
    numbers: list[Any] = [
        np.full(len(first), lane, np.int32),
        sessions[first],
        opens[first],
        np.minimum.reduceat(indices, first),
        np.maximum.reduceat(indices, first),
        starts[first],
        starts[last] + widths[last],
    ]
    unknown = ~opens[first] | (flags[first] == NO_FLAGS)
    columns = [*map(pa.array, numbers), pa.array(flags[first] & OPEN_STRONG != 0, mask=unknown)]
    return pa.RecordBatch.from_arrays(columns, schema=RUNS)


def _lives(sessions: Int64s, opens: npt.NDArray[np.bool_]) -> Int64s:
    """How often each entry's session was opened before it, in this span."""
    order = np.argsort(sessions, kind="stable")
    total = np.cumsum(opens[order])
    fresh = np.concatenate(([True], sessions[order][1:] != sessions[order][:-1])) if len(order) else np.zeros(0, bool)
    before = np.maximum.accumulate(np.where(fresh, total - opens[order], 0)) if len(order) else total
    lives = np.empty(len(sessions), np.int64)
    lives[order] = total - before
    return lives


def problems_of(runs: pa.Table, *, all_strong: bool, from_start: bool) -> pa.Table:
    """What is wrong with sessions, given all runs of them (of any spans, in any order).

    `all_strong`: every session is strong (order 5); otherwise its SESSION_OPEN says so. `from_start`: the log is there
    from its beginning, so each session's SESSION_OPEN has to be, too.
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
    told = sorted_runs.column("strong").fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    strong = all_strong | told[opens | ~same][lives - 1]  # as the first run of its life says
    if from_start:
        for run in np.flatnonzero(~same & ~opens).tolist():
            what = f"session {sessions[run]} has batches before it was opened"
            found.append(("session-strange", int(lanes[run]), int(firsts[run]), what))
    by_sequence = np.lexsort((stops, starts, lives))
    _compare(found, by_sequence, lives, (lanes, sessions, firsts, lasts, starts, stops, strong))
    return pa.Table.from_pylist([dict(zip(PROBLEMS.names, problem, strict=True)) for problem in found], schema=PROBLEMS)


def _compare(
    found: list[tuple[str, int, int, str]], order: Int64s, lives: Int64s, columns: tuple[Any, ...]
) -> None:
    """Look at each run and at the one before it in the same life of a session, by sequence."""
    lanes, sessions, firsts, lasts, starts, stops, strong = (column[order] for column in columns)
    together = lives[order][1:] == lives[order][:-1]
    reach = _reach(lives[order], stops)
    twice = together & (starts[1:] < reach[:-1])
    late = together & strong[1:] & ~twice & (firsts[1:] < lasts[:-1])
    hole = together & strong[1:] & (starts[1:] > reach[:-1])
    for run in np.flatnonzero(twice).tolist():
        what = f"session {sessions[run + 1]}: sequence {starts[run + 1]} again, before index {firsts[run]} or there"
        found.append(("session-twice", int(lanes[run + 1]), int(firsts[run + 1]), what))
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
