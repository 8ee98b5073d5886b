"""The audit of a topic's two tables: positions have no holes or duplicates across both, and each file is unchanged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embarcadero.audit.report import LaneFacts, SpanReport, report_of, spans_of
from embarcadero.audit.span import look_at
from embarcadero.tier.parquet import FileSpan, write_span
from embarcadero.tier.snapshots import LoadedTable
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import EntriesTable, TierTable
from embarcadero.types import EntryKind
from embarcadero.wire.schemas import RAW
from embarcadero_proof.bugs.table import injected
from tests.tier.entries import control_of
from tests.tier.test_job import Crash
from tests.tier.test_layouts import commit, now_of, write
from tests.tier.test_table import cold, tier_of

LOG: Any = SimpleNamespace(table_properties=())


@pytest.fixture
def table(tmp_path: Path) -> TierTable:
    made = TierTable(TierSettings.local(tmp_path), "orders")
    made.create("orders", "id-1", RAW)
    return made


def audited(loaded: LoadedTable) -> tuple[list[SpanReport], list[str]]:
    """Results of the tasks over all spans of a topic that only its table has, and the kinds of problems found."""
    stop, seq = loaded.frontiers[0]
    about: Any = SimpleNamespace(name="orders", order=5, tier=tier_of(loaded), versions=RAW)
    facts = LaneFacts(lane=0, start_index=0, start_seq=0, stop_index=stop, lost=[], frontier=stop, hot_index=stop)
    found = [look_at(LOG, about, span)[0] for span in spans_of(LOG, about, facts, 1 << 20)]
    report = report_of(about, [facts], found, [], {}, 0.0)
    assert report.lanes[0].stop_seq == seq or report.findings
    return found, [finding.kind for finding in report.findings]


def close_sessions(table: TierTable, start: int, seq: int) -> LoadedTable:
    """A span that has control entries only."""
    span = FileSpan(lane=0, start=start, stop=start + 2, start_seq=seq, stop_seq=seq)
    log = [control_of(start + n, seq, EntryKind.SESSION_CLOSE, session=n) for n in range(2)]
    now = now_of(table)
    facts = write_span(table.storage, now.table.location(), span, 1, RAW, [list(log)], now.entries_location)
    return table.commit({0: (start, seq)}, [facts], {0: (start + 2, seq)}, {0: (0, 0)}, RAW, 1)


def test_both_tables_are_one_log(table: TierTable) -> None:
    """Each file covers one span: either records with the entries among them, or entries where there are no records."""
    commit(table, write(table, 0, 2))
    found, wrong = audited(close_sessions(table, 6, 6))
    assert wrong == []
    assert [(span.start, span.stop, span.entries, span.records) for span in found] == [(0, 6, 6, 6), (6, 8, 2, 0)]


def test_missing_and_duplicate_entries_are_found(table: TierTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of records without its entries, and entries that a failed attempt and its retry both added."""
    commit(table, write(table, 0))
    with monkeypatch.context() as patch:
        patch.setattr(TierTable, "_commit_entries", lambda _self, now, *_: now.entries)
        assert "table" in audited(commit(table, write(table, 1)))[1]

    def die(_name: str) -> None:
        raise Crash

    with pytest.raises(Crash):
        commit(table, write(table, 2), step=die)
    monkeypatch.setattr(EntriesTable, "at", lambda self, _metadata, _properties: self.load())
    late = commit(table, write(table, 2))
    assert [cold(late).doubles(0, *span)[0][0] for span in ((0, 99), (6, 7))] == [6, 6]
    assert audited(late)[1].count("table") == 2


def test_duplicate_records_are_found(table: TierTable) -> None:
    """A commit that did not check the frontiers: readers take each record once, but the table has it twice."""
    commit(table, write(table, 0))
    with injected("tier-blind-commit"):
        loaded = commit(table, write(table, 0))
    assert loaded.table.scan().to_arrow().num_rows == 6
    assert set(audited(loaded)[1]) == {"table"}


def test_an_entries_file_that_was_changed_is_found(table: TierTable) -> None:
    """One file lost rows, another is gone."""
    facts = write(table, 0, 2)
    loaded = commit(table, facts)
    path = Path(facts.entries_path.removeprefix("file://"))
    fewer = Path(write(table, 0).entries_path.removeprefix("file://"))
    path.write_bytes(fewer.read_bytes())
    assert "checksum" in audited(loaded)[1]
    path.unlink()
    assert "checksum" in audited(now_of(table))[1]
