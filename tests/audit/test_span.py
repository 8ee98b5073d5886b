"""The audit's eyes: a right span has no findings, and damage of each kind is found where it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.audit.runs import problems_of, runs_of
from embarcadero.audit.span import Explained, SpanAudit
from embarcadero.tier.columns import KEPT, SYSTEM
from embarcadero.types import EntryKind, Gap, GapKind

Row = dict[str, int | str | None]
LOST = [(40, 60)]


def _entry(index: int, seq: int, kind: EntryKind, session: int, sequence: int, count: int = 0) -> Row:
    row: Row = dict.fromkeys([*SYSTEM.names, *KEPT.names])
    row |= {
        "_lane": 0, "_index": index, "_seq": seq, "_kind": int(kind), "_partition": 0, "_session": session,
        "_session_seq": sequence, "_broker": 0, "_append_time": 1_000 + index, "_crc": index * 7, "_size": 64,
        "_count": count, "_schema_version": 0,
    }  # fmt: skip
    return row


def _log(batches: int = 12, count: int = 3) -> list[Row]:
    """Two sessions, opened at indices 0 and 1, take turns; one sequence was skipped at the end."""
    rows = [_entry(session, 0, EntryKind.SESSION_OPEN, session, 0) for session in (0, 1)]
    for number in range(batches):
        index, session = number + 2, number % 2
        for record in range(count):
            seq = number * count + record
            rows.append(_entry(index, seq, EntryKind.BATCH, session, number // 2, count))
    skip = _entry(batches + 2, batches * count, EntryKind.SKIP, 0, batches // 2)
    return [*rows, {**skip, "_skipped": 4}]


def _rows(rows: list[Row]) -> pa.RecordBatch:
    schema = pa.schema([*SYSTEM, *KEPT])
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def _found(rows: list[Row], stop: int | None = None, *, cut: int = 10_000) -> set[str]:
    """Kinds of findings, when rows come in pieces of `cut`."""
    end = int(rows[-1]["_index"] or 0) + 1 if stop is None else stop
    audit = SpanAudit(0, 0, end, Explained(0, LOST), strong=True)
    whole = _rows(rows)
    for first in range(0, len(rows), cut):
        audit.add(whole.slice(first, cut))
    kinds = {finding.kind for finding in audit.finish()}
    problems = problems_of(pa.Table.from_batches([audit.runs()]), strong=True, from_start=True)
    return kinds | set(problems.column("kind").to_pylist())


@settings(deadline=None)
@given(cut=st.integers(1, 50))
def test_a_right_span_has_no_findings(cut: int) -> None:
    """However the rows are cut into pieces."""
    assert _found(_log(), cut=cut) == set()


def _without(index: int) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row for row in rows if row["_index"] != index]


def _moved(rows: list[Row], name: str, index: int, by: int) -> list[Row]:
    return [{**row, name: int(row[name] or 0) + by} if row["_index"] == index else row for row in rows]


DAMAGE: dict[str, Callable[[list[Row]], list[Row]]] = {
    "index-hole": _without(6),
    "index-twice": lambda rows: [*rows[:11], *rows[5:8], *rows[11:]],
    "seq-hole": lambda rows: [
        {**row, "_seq": int(row["_seq"] or 0) + 1} if int(row["_index"] or 0) > 6 else row for row in rows
    ],
    "rows": lambda rows: rows[:9] + rows[10:],
    "row-order": lambda rows: [*rows[:8], rows[9], rows[8], *rows[10:]],
    "session-twice": lambda rows: _moved(rows, "_session_seq", 8, -1),
    "session-hole": lambda rows: [row for row in rows if row["_index"] != 14] + [
        _entry(14, 36, EntryKind.BATCH, 0, 9, 0)
    ],
    "session-order": lambda rows: _moved(_moved(rows, "_session_seq", 6, 1), "_session_seq", 8, -1),
    "session-strange": lambda rows: [{**row, "_session": 9} if row["_index"] == 5 else row for row in rows],
    "damage": lambda rows: [{**row, "_damage": "not Arrow"} if row["_index"] == 5 else row for row in rows],
}  # fmt: skip


@pytest.mark.parametrize("cut", [1, 4, 1000])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_each_kind_is_found(kind: str, cut: int) -> None:
    """Also when the pieces end at the worst place."""
    assert kind in _found(DAMAGE[kind](_log()), cut=cut)


def test_a_short_end_is_a_hole() -> None:
    """A span that ends early misses its last batches."""
    assert _found(_log(), stop=20) == {"index-hole"}


def test_lost_positions_are_explained_by_ranges_and_by_nothing_else() -> None:
    """A LOST gap where ranges have a hole is fine; elsewhere it is a finding; so is a TRIMMED one above the start."""
    audit = SpanAudit(0, 40, 60, Explained(0, LOST), strong=True)
    audit.add_gap(Gap(GapKind.LOST, 40, 60))
    assert (audit.finish(), audit.lost) == ([], 20)
    audit = SpanAudit(0, 0, 60, Explained(0, [(15, 60)]), strong=True)
    audit.add(_rows(_log()))
    assert (audit.finish(), audit.next_seq) == ([], -1)
    for kind, name in ((GapKind.LOST, "lost"), (GapKind.TRIMMED, "trimmed")):
        audit = SpanAudit(0, 10, 20, Explained(0, LOST), strong=True)
        audit.add_gap(Gap(kind, 10, 20))
        assert [finding.kind for finding in audit.finish()] == [name]


def test_sessions_are_followed_over_spans() -> None:
    """Runs of many small spans, brought together, show what no span alone could; a right log has nothing to show."""
    rows = _log(40)

    def problems(changed: list[Row]) -> set[str]:
        parts = []
        for start in range(0, 50, 5):
            audit = SpanAudit(0, start, start + 5, Explained(0, []), strong=True)
            own = [row for row in changed if start <= int(row["_index"] or 0) < start + 5]
            if own:
                audit.add(_rows(own))
            parts.append(audit.runs())
        found = problems_of(pa.Table.from_batches(parts), strong=True, from_start=True)
        return set(found.column("kind").to_pylist())

    assert problems(rows) == set()
    again = [{**row, "_session_seq": 0} if row["_index"] == 40 else row for row in rows]
    assert "session-twice" in problems(again)
    swapped = _moved(_moved(rows, "_session_seq", 4, 10), "_session_seq", 24, -10)
    assert "session-order" in problems(swapped)


def test_a_handle_that_is_opened_again_begins_again() -> None:
    """The same session number with a SESSION_OPEN in between is another life, whatever its sequences are."""
    kinds = np.array([2, 1, 1, 2, 1, 1], np.int64)
    sequences = np.array([0, 0, 1, 7, 7, 8], np.int64)
    runs = runs_of(
        0, np.arange(6), kinds, np.zeros(6, np.int64), sequences, np.zeros(6, np.int64), strong=True
    )  # fmt: skip
    assert problems_of(pa.Table.from_batches([runs]), strong=True, from_start=True).num_rows == 0


def test_order_2_promises_one_position_not_an_order() -> None:
    """Sequences in any order are fine there; one that comes twice is not."""
    kinds, sessions, none = np.full(4, 1), np.zeros(4, np.int64), np.zeros(4, np.int64)
    mixed = runs_of(0, np.arange(4), kinds, sessions, np.array([2, 0, 3, 1]), none, strong=False)
    assert problems_of(pa.Table.from_batches([mixed]), strong=False, from_start=False).num_rows == 0
    twice = runs_of(0, np.arange(4), kinds, sessions, np.array([2, 0, 2, 1]), none, strong=False)
    found = problems_of(pa.Table.from_batches([twice]), strong=False, from_start=False)
    assert found.column("kind").to_pylist() == ["session-twice"]
