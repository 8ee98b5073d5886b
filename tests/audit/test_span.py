"""The audit of one span: a correct span has no findings, and damage of each kind is found at its position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.audit.report import AuditSpan, LaneFacts
from embarcadero.audit.span import NO_FLAGS, KnownLosses, SpanAudit, look_at, problems_of, runs_of
from embarcadero.client.results import Batch
from embarcadero.fabric.layout import OPEN_STRONG, OPEN_TAKEN
from embarcadero.tier.columns import KEPT, SYSTEM
from embarcadero.tier.serving import _FetchAnswer
from embarcadero.types import FROM_TABLE, EntryKind, Gap, GapKind
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import RAW
from tests.tier.entries import batch_of, control_of, raw

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.client.results import TopicInfo

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
    audit = SpanAudit(0, 0, end, KnownLosses(0, LOST))
    whole = _rows(rows)
    for first in range(0, len(rows), cut):
        audit.add(whole.slice(first, cut))
    kinds = {finding.kind for finding in audit.finish()}
    problems = problems_of(pa.Table.from_batches([audit.runs()]), all_strong=True, from_start=True)
    return kinds | set(problems.column("kind").to_pylist())


@settings(deadline=None)
@given(cut=st.integers(1, 50))
def test_a_correct_span_has_no_findings(cut: int) -> None:
    """The size of the pieces makes no difference."""
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
    """Also when a piece ends right at the damage."""
    assert kind in _found(DAMAGE[kind](_log()), cut=cut)


def test_a_short_end_is_a_hole() -> None:
    """A span that ends early misses its last batches."""
    assert _found(_log(), stop=20) == {"index-hole"}


def test_lost_positions_are_explained_by_ranges_and_by_nothing_else() -> None:
    """A LOST gap is correct where ranges have a hole, else a finding. So is a TRIMMED one above the start."""
    audit = SpanAudit(0, 40, 60, KnownLosses(0, LOST))
    audit.add_gap(Gap(GapKind.LOST, 40, 60))
    assert (audit.finish(), audit.lost) == ([], 20)
    audit = SpanAudit(0, 0, 60, KnownLosses(0, [(15, 60)]))
    audit.add(_rows(_log()))
    assert (audit.finish(), audit.next_seq) == ([], -1)
    for kind, name in ((GapKind.LOST, "lost"), (GapKind.TRIMMED, "trimmed")):
        audit = SpanAudit(0, 10, 20, KnownLosses(0, LOST))
        audit.add_gap(Gap(kind, 10, 20))
        assert [finding.kind for finding in audit.finish()] == [name]


def test_sessions_are_followed_over_spans() -> None:
    """Runs of many small spans, merged, show problems that no single span could; a correct log has none."""
    rows = _log(40)

    def problems(changed: list[Row]) -> set[str]:
        parts = []
        for start in range(0, 50, 5):
            audit = SpanAudit(0, start, start + 5, KnownLosses(0, []))
            own = [row for row in changed if start <= int(row["_index"] or 0) < start + 5]
            if own:
                audit.add(_rows(own))
            parts.append(audit.runs())
        found = problems_of(pa.Table.from_batches(parts), all_strong=True, from_start=True)
        return set(found.column("kind").to_pylist())

    assert problems(rows) == set()
    again = [{**row, "_session_seq": 0} if row["_index"] == 40 else row for row in rows]
    assert "session-twice" in problems(again)
    swapped = _moved(_moved(rows, "_session_seq", 4, 10), "_session_seq", 24, -10)
    assert "session-order" in problems(swapped)


def _runs(kinds: Sequence[int], sessions: Sequence[int], sequences: Sequence[int], flags: Sequence[int]) -> pa.Table:
    """The runs of these entries, at indices 0, 1, ..., as one span."""
    columns = [np.array(column, np.int64) for column in (kinds, sessions, sequences, [0] * len(kinds), flags)]
    return pa.Table.from_batches([runs_of(0, np.arange(len(kinds)), *columns)])


def _problems(runs: pa.Table, *, all_strong: bool = False, from_start: bool = True) -> list[tuple[str, int]]:
    """Kind and index of each problem."""
    found = problems_of(runs, all_strong=all_strong, from_start=from_start)
    return list(zip(found.column("kind").to_pylist(), found.column("index").to_pylist(), strict=True))


def test_a_handle_that_is_opened_again_starts_a_new_session() -> None:
    """The same session number after another SESSION_OPEN is a new session, whatever its sequences are."""
    runs = _runs([2, 1, 1, 2, 1, 1], [0] * 6, [0, 0, 1, 7, 7, 8], [0] * 6)
    assert _problems(runs, all_strong=True) == []


def test_a_weak_session_promises_one_position_not_an_order() -> None:
    """Sequences may come in any order there; a duplicate is a finding."""
    assert _problems(_runs([1] * 4, [0] * 4, [2, 0, 3, 1], [0] * 4), from_start=False) == []
    twice = _problems(_runs([1] * 4, [0] * 4, [2, 0, 2, 1], [0] * 4), from_start=False)
    assert [kind for kind, _ in twice] == ["session-twice"]


def test_in_a_mixed_topic_only_strong_sessions_must_be_in_order() -> None:
    """The SESSION_OPEN decides: both sessions have sequences 1, 0, 5, and only the strong one promised an order."""
    kinds, sessions = [2, 2, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]
    sequences = [0, 0, 1, 1, 0, 0, 5, 5]
    for strong in (0, 1):
        flags = [OPEN_STRONG | OPEN_TAKEN if session == strong else OPEN_TAKEN for session in (0, 1)]
        found = _problems(_runs(kinds, sessions, sequences, flags + [0] * 6))
        assert found == [("session-order", 2 + strong), ("session-hole", 6 + strong)]
    assert _problems(_runs(kinds, sessions, sequences, [0] * 8)) == []


def test_each_use_of_a_session_number_has_its_own_kind() -> None:
    """A weak session's number is opened again by a strong session: from there on the order counts."""
    for flags, expected in (([0, OPEN_STRONG], ["session-order"]), ([OPEN_STRONG, 0], []), ([0, 0], [])):
        runs = _runs([2, 1, 1, 2, 1, 1], [0] * 6, [0, 0, 1, 5, 6, 5], [flags[0], 0, 0, flags[1], 0, 0])
        assert [kind for kind, _ in _problems(runs)] == expected


def test_a_session_of_unknown_kind_is_not_held_to_an_order() -> None:
    """Its SESSION_OPEN was trimmed, or came from a table, which keeps no flags. In order 5 its kind is known anyway."""
    trimmed = _runs([1] * 3, [0] * 3, [1, 0, 5], [0] * 3)
    of_a_table = _runs([2, 1, 1, 1], [0] * 4, [0, 1, 0, 5], [NO_FLAGS] * 4)
    for runs in (trimmed, of_a_table):
        assert runs.column("strong").null_count == len(runs)
        assert _problems(runs, from_start=False) == []
        assert [kind for kind, _ in _problems(runs, all_strong=True, from_start=False)] == [
            "session-order", "session-hole",
        ]  # fmt: skip


@settings(deadline=None)
@given(order=st.permutations(range(7)), cuts=st.sets(st.integers(1, 7)))
def test_disorder_of_strong_sessions_shows_wherever_spans_are_cut(order: list[int], cuts: set[int]) -> None:
    """Two sessions write in the same order, opened at indices 0 and 1; only the strong one's counts."""
    edges, parts = sorted({0, *cuts, len(order) + 1}), []
    numbers = np.array([0, *order])  # entries of both sessions, starting with their SESSION_OPEN
    for start, stop in pairwise(edges):
        places = np.arange(2 * start, 2 * stop)
        kinds = np.where(places < 2, EntryKind.SESSION_OPEN, EntryKind.BATCH).astype(np.int64)
        flags = np.where(places == 0, OPEN_STRONG, 0).astype(np.int64)
        none = np.zeros(len(places), np.int64)
        parts.append(runs_of(0, places, kinds, places % 2, numbers[places // 2], none, flags))
    found = problems_of(pa.Table.from_batches(parts), all_strong=False, from_start=True)
    assert set(found.column("kind").to_pylist()) == (set() if order == sorted(order) else {"session-order"})
    assert not any("session 1" in detail for detail in found.column("detail").to_pylist())


def test_a_weak_session_stays_few_runs() -> None:
    """In any mix of its sequences: runs of a whole log are merged."""
    sequences = np.random.default_rng(1).permutation(10_000).tolist()
    assert len(_runs([1] * 10_000, [0] * 10_000, sequences, [0] * 10_000)) == 2


def _scanned(flags: tuple[int, int]) -> list[Batch]:
    """The result of a scan of an order-2 topic: two sessions, opened with these flags, both with sequences 1, 0."""
    opened = [control_of(n, 0, EntryKind.SESSION_OPEN, session=n, flags=flags[n]) for n in (0, 1)]
    places = ((2, 0, 1), (3, 1, 1), (4, 0, 0), (5, 1, 0))
    return [
        *opened,
        *(batch_of(raw([b"a"]), n, n - 2, session=session, session_seq=number) for n, session, number in places),
    ]


@pytest.mark.parametrize(("flags", "at"), [((OPEN_STRONG, 0), [2]), ((0, OPEN_STRONG), [3]), ((0, 0), [])])
def test_a_task_reads_from_the_log_which_sessions_are_strong(flags: tuple[int, int], at: list[int]) -> None:
    """Kinds come with the entries that open sessions, in whatever lists the scan has them."""
    batches = _scanned(flags)
    facts = LaneFacts(lane=0, start_index=0, start_seq=0, stop_index=6, lost=[])
    about = cast("TopicInfo", SimpleNamespace(name="mixed", order=2, versions=RAW, tier=None))
    for cut in (1, 4, 6):
        log = cast("Log", SimpleNamespace(scan=lambda *_, **__: iter([batches[:cut], batches[cut:]])))  # noqa: B023
        report, runs = look_at(log, about, AuditSpan(topic="mixed", lane=facts, start=0, stop=6))
        assert report.findings == []
        assert _problems(pa.Table.from_batches([runs])) == [("session-order", index) for index in at]


def test_a_broker_that_serves_a_table_passes_on_the_strong_flag() -> None:
    """Flags of a SESSION_OPEN are kept; those of a batch show that its payload was encoded again."""
    answer = _FetchAnswer(Fetch(lane=0, max_bytes=1 << 20), RAW)
    for batch in _scanned((OPEN_STRONG, 0)):
        answer.add(batch)
    assert answer.found().entries["flags"].tolist() == [OPEN_STRONG, 0, *[FROM_TABLE] * 4]
