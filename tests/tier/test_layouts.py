"""A table of records and a table of control entries: one log to readers, whatever dies between their two commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.exceptions import CommitFailedException

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import Batch
from embarcadero.errors import BadSchema, BadTable
from embarcadero.tier import parquet
from embarcadero.tier.columns import EntriesHash, Layout, records_schema, rows
from embarcadero.tier.job import TierJob
from embarcadero.tier.parquet import FileFacts, FileSpan, write_span
from embarcadero.tier.row_groups import merged
from embarcadero.tier.snapshots import LoadedTable, snapshot_properties
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table import EntriesTable, TierTable, collect_data
from embarcadero.tier.table_reads import TopicTable, table_cuts
from embarcadero.types import EntryKind, Tier
from embarcadero.wire.schemas import RAW, TopicSchemas
from tests.tier.entries import batch_of, control_of, raw
from tests.tier.old_layout import create_old
from tests.tier.test_job import Crash, crash_at, job
from tests.tier.test_table import cold, taken
from tests.tier.truth import Truth

DAY_US = 86_400_000_000


def session(first: int, seq: int, records: int = 3) -> list[Batch]:
    """A session with one batch: three entries from an index on."""
    return [
        control_of(first, seq, EntryKind.SESSION_OPEN, session=first),
        batch_of(raw([b"%d" % (seq + n) for n in range(records)]), first + 1, seq),
        control_of(first + 2, seq + records, EntryKind.SESSION_CLOSE, session=first),
    ]


def span_of_sessions(first: int, count: int = 1) -> tuple[FileSpan, list[Batch]]:
    """Sessions number `first` and so on of a lane without other entries."""
    log = [entry for number in range(first, first + count) for entry in session(3 * number, 3 * number)]
    start, stop = 3 * first, 3 * (first + count)
    return FileSpan(lane=0, start=start, stop=stop, start_seq=start, stop_seq=stop), log


@pytest.fixture
def table(tmp_path: Path) -> TierTable:
    made = TierTable(TierSettings.local(tmp_path), "orders")
    made.create("orders", "id-1", RAW)
    return made


def write(table: TierTable, first: int, count: int = 1, epoch: int = 1) -> FileFacts:
    span, log = span_of_sessions(first, count)
    now = now_of(table)
    location = now.table.location()
    return write_span(table.storage, location, span, epoch, RAW, [list(log)], now.entries_location)


def commit(table: TierTable, facts: FileFacts, **more: Any) -> LoadedTable:
    span = facts.span
    before = {0: (span.start, span.start_seq)} if span.start else {}
    return table.commit(before, [facts], {0: (span.stop, span.stop_seq)}, {0: (0, 0)}, RAW, 1, **more)


def now_of(table: TierTable) -> LoadedTable:
    now = table.load()
    assert now is not None
    return now


def indices(loaded: LoadedTable) -> list[int]:
    """All batches, entries and gaps that a reader of everything gets."""
    return [batch.index for batch in taken(cold(loaded), control=True, stop=1 << 40)]


# --- the users' view
# ------------------------------------------------------------------------------------------------------
def test_the_table_is_the_topic(log: Log, tmp_path: Path) -> None:
    """Its own columns come first, `count(*)` is its number of records, and a day is a partition."""
    log.create_topic("sales", order=5, schema=pa.schema([("city", pa.string()), ("cents", pa.int64())]))
    for _ in range(3):  # each with a session of its own
        with log.publisher("sales", ack=2) as publisher:
            publisher.publish([{"city": "Rome", "cents": 5}] * 10)
    Truth(log, "sales", TierSettings.local(tmp_path)).publish(0)
    with TierJob(log, "sales", TierSettings.local(tmp_path), holder="a") as job:
        job.run_once()
        assert job.table == "embarcadero.sales"
    now = now_of(TierTable(TierSettings.local(tmp_path), "sales"))
    found = now.table.scan().to_arrow()
    assert found.schema.names[:5] == ["city", "cents", "_seq", "_timestamp", "_partition"]
    assert found.num_rows == log.tail("sales").seq == 30
    assert duckdb.sql("select count(*), sum(cents), count(distinct _seq) from found").fetchall() == [(30, 150, 30)]
    day = found["_timestamp"][0].as_py().date()
    assert [str(field) for field in now.table.spec().fields] == ["1000: _timestamp_day: day(4)"]
    assert len(list(now.table.scan(f"_timestamp < '{day}T00:00:00+00:00'").plan_files())) == 0
    entries = TierTable(TierSettings.local(tmp_path), "").catalog().load_table("embarcadero.sales__entries")
    kinds = entries.scan().to_arrow().column("_kind").to_pylist()
    assert set(kinds) >= {int(EntryKind.SESSION_OPEN)}
    assert int(EntryKind.BATCH) not in kinds
    assert len(kinds) + len(set(found["_index"].to_pylist())) == log.tail("sales").index


def test_days_have_files_of_their_own(table: TierTable) -> None:
    """A span over midnight becomes a file for each day; readers get the same entries, in pieces that meet."""
    noon = 1_700_000_000_000_000 // DAY_US * DAY_US + DAY_US // 2
    log = []
    for number in range(4):
        log += session(3 * number, 3 * number)
    days = [0, 0, 0, 0, 1, 1, 1, 3, 3, 3, 3, 3]  # of each entry
    log = [
        batch_of(raw([b"x"] * 3), entry.index, entry.seq, append_us=noon + day * DAY_US) if entry.count
        else control_of(entry.index, entry.seq, EntryKind(entry.kind or 0), append_us=noon + day * DAY_US)
        for entry, day in zip(log, days, strict=True)
    ]  # fmt: skip
    span, _ = span_of_sessions(0, 4)
    now = now_of(table)
    facts = write_span(table.storage, now.table.location(), span, 1, RAW, [list(log)], now.entries_location)
    loaded = commit(table, facts)
    assert (len(facts.paths), facts.rows, facts.entries) == (3, 12, 12)
    assert indices(loaded) == list(range(12))
    reader = cold(loaded)
    assert [(file.first_index, file.stop_index) for file in reader.files(0, 0, 99)] == [(0, 4), (4, 7), (7, 12)]
    assert [cut.index for cut in table_cuts(reader, 0, 0, 12, 1)] == [4, 7, 12]
    for file in reader.files(0, 0, 99):
        footer, digest = reader.footer(file.path), EntriesHash()
        for found in reader.rows(0, file.first_index, file.stop_index):
            digest.add(found)
        assert footer is not None
        assert (footer.entries, footer.hash) == (digest.entries, digest.hex)
    assert len(list(loaded.table.scan(f"_timestamp >= '{np.datetime64(noon + DAY_US, 'us')}+00:00'").plan_files())) == 2


def test_system_names_are_reserved(log: Log, tmp_path: Path) -> None:
    """A topic's column can't be `_timestamp`; and a topic's name may be that of another one's entries."""
    with pytest.raises(BadSchema, match="'_timestamp'"):
        records_schema(TopicSchemas(pa.schema([("_timestamp", TIME)]), (1,)))
    for name in ("pair__entries", "pair"):
        log.create_topic(name, order=5)
        truth = Truth(log, name, TierSettings.local(tmp_path))
        truth.publish(5)
        with TierJob(log, name, truth.settings, holder="a") as job:
            assert job.cycle().rows == 5
            assert (job.table == "embarcadero.pair__entries") == (name == "pair__entries")
        assert truth.problems() == []


TIME = pa.timestamp("us")


# --- merging ----------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=60), st.integers(1, 30), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_rows_of_both_tables_come_in_the_order_of_the_log(
    entries: list[tuple[bool, int]], many: int, few: int
) -> None:
    """However entries lie among batches, and however both are cut; batches are never cut."""
    log: list[Batch] = []
    for index, (is_batch, count) in enumerate(entries):
        seq = sum(batch.count for batch in log)
        log.append(
            batch_of(raw([b"%d" % index] * count), index, seq) if is_batch
            else control_of(index, seq, EntryKind.SESSION_OPEN)
        )  # fmt: skip
    whole = rows(0, log, RAW, control=True)
    kinds = whole.column("_kind").to_numpy()
    batches = [rows(0, [batch], RAW, control=True) for batch in log if batch.count]
    groups = [pa.Table.from_batches(batches[at : at + many]) for at in range(0, len(batches), many)]
    control = whole.filter(pa.array(kinds != int(EntryKind.BATCH)))
    found = list(merged(
        (group.combine_chunks().to_batches()[0] for group in groups),
        (control.slice(at, few) for at in range(0, control.num_rows, few)),
    ))  # fmt: skip
    assert pa.Table.from_batches(found, whole.schema).equals(pa.Table.from_batches([whole]))
    firsts = [part.column("_index")[0].as_py() for part in found if part.num_rows]
    assert len(firsts) == len(set(firsts))


# --- the two commits --------------------------------------------------------------------------------------------------
def die(name: str) -> None:
    assert name == "records"
    raise Crash


def test_entries_above_the_frontier_are_not_read(table: TierTable) -> None:
    """A job dies between the commits: readers see nothing of it, and the next commit adds the entries once."""
    first = commit(table, write(table, 0))
    with pytest.raises(Crash):
        commit(table, write(table, 1), step=die)
    assert now_of(table).frontiers == first.frontiers
    assert indices(now_of(table)) == [0, 1, 2]
    ahead = table.entries(first).load()
    assert sorted(ahead.scan().to_arrow()["_index"].to_pylist()) == [0, 2, 3, 5]  # they are in the table, by its name
    with pytest.raises(Crash):  # again: leftovers of another attempt are removed first
        commit(table, write(table, 1, 2), step=die)
    loaded = commit(table, write(table, 1))
    assert indices(loaded) == list(range(6))
    assert sorted(table.entries(loaded).load().scan().to_arrow()["_index"].to_pylist()) == [0, 2, 3, 5]


def test_without_that_rule_entries_are_duplicated(table: TierTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of the test above is detected: a commit on top of any content of the table of entries."""
    commit(table, write(table, 0))
    with pytest.raises(Crash):
        commit(table, write(table, 1), step=die)
    monkeypatch.setattr(EntriesTable, "at", lambda self, _metadata, _properties: self.load())
    loaded = commit(table, write(table, 1))
    assert sorted(table.entries(loaded).load().scan().to_arrow()["_index"].to_pylist()) == [0, 2, 3, 3, 5, 5]


def test_records_first_would_be_a_hole(table: TierTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the other order a job that dies in between leaves indices below the frontier that no reader finds."""
    commit(table, write(table, 0))
    monkeypatch.setattr(TierTable, "_commit_entries", lambda _self, now, *_: now.entries)
    loaded = commit(table, write(table, 1))
    assert any(batch.gap is not None for batch in taken(cold(loaded), control=True))


def test_a_late_job_whose_commit_of_records_wins(table: TierTable) -> None:
    """Its entries came first; this job removed them and added its own. Then the late job commits its records.

    This job's records are refused. The late job's entries are the truth for readers, and for the next commit.
    """
    commit(table, write(table, 0))
    late, other = write(table, 1, 2, epoch=2), TierTable(table.settings, "orders")
    ours, planned = [write(other, 1, epoch=3)], now_of(other)
    after = snapshot_properties({0: (6, 6)}, {0: (0, 0)}, 3)

    def meanwhile(_name: str) -> None:
        after["embarcadero.entries"] = other._commit_entries(planned, ours, after)

    loaded = commit(table, late, step=meanwhile)
    with pytest.raises(CommitFailedException):
        other._commit_records(planned, ours, after, RAW)
    assert indices(now_of(other)) == indices(loaded) == list(range(9))
    assert set(collect_data(other)) == {path.rsplit("/", 1)[-1] for path in (*ours[0].paths,)}  # not the late one's
    assert indices(commit(table, write(table, 3))) == list(range(12))
    assert sorted(table.entries(now_of(table)).load().scan().to_arrow()["_index"].to_pylist()) == [
        0, 2, 3, 5, 6, 8, 9, 11,
    ]  # fmt: skip
    collect_data(other)
    assert indices(now_of(other)) == list(range(12))


def test_a_span_without_records_moves_the_frontier(table: TierTable) -> None:
    """Sessions open and close without records: entries only, and readers continue after them."""
    span = FileSpan(lane=0, start=0, stop=2, start_seq=0, stop_seq=0)
    now = now_of(table)
    log = [control_of(0, 0, EntryKind.SESSION_OPEN), control_of(1, 0, EntryKind.SESSION_CLOSE)]
    facts = write_span(table.storage, now.table.location(), span, 1, RAW, [list(log)], now.entries_location)
    loaded = commit(table, facts)
    assert (facts.paths, loaded.frontiers, indices(loaded)) == ([], {0: (2, 0)}, [0, 1])
    reader = cold(loaded)
    assert [cut.index for cut in table_cuts(reader, 0, 0, 2, 1)] == [2]
    (part,) = reader.parts(0, 0, 2)
    footer = reader.footer(part.path)
    assert footer is not None
    assert footer.entries == 2


# --- tables of earlier versions ---------------------------------------------------------------------------------------
@pytest.fixture
def truth(log: Log, request: pytest.FixtureRequest, tmp_path: Path) -> Truth:
    log.create_topic(request.node.name[:60], order=5)
    return Truth(log, request.node.name[:60], TierSettings.local(tmp_path, file_bytes=65_536, hot_retention_s=0))


def test_an_old_table_keeps_its_layout(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read, appended to in its own layout, and trimmed; there is no second table."""
    monkeypatch.setattr(
        TierTable, "create",
        lambda self, topic, table_id, schemas, topic_id=0: create_old(self, topic, table_id, schemas, topic_id),
    )  # fmt: skip
    truth.publish(400)
    with TierJob(truth.log, truth.topic, truth.settings, holder="earlier") as job:
        assert job.cycle().rows == 402
    monkeypatch.undo()
    truth.publish(500)
    with TierJob(truth.log, truth.topic, truth.settings, holder="now") as job:
        assert job.cycle().rows == 502
        table = TierTable(truth.settings, job.table)
    assert truth.problems() == []
    now = now_of(table)
    assert now.layout is Layout.WHOLE
    assert now.table.schema().column_names[:3] == ["_lane", "_index", "_seq"]
    assert not table.catalog().table_exists(f"{table.identifier}__entries")
    assert truth.log.tail(truth.topic).hot_seq == 900
    assert truth.log.read(truth.topic).column("_seq").to_pylist() == list(range(900))
    assert truth.data_files() == truth.named_files()
    truth.log.trim(truth.topic, before_seq=450)
    truth.publish(1)
    with TierJob(truth.log, truth.topic, truth.settings, holder="now") as job:
        job.cycle()
    start = truth.log.tail(truth.topic).start_seq
    assert truth.log.read(truth.topic).column("_seq").to_pylist() == list(range(start, 901))


def test_an_old_table_does_not_take_files_of_the_new_layout(table: TierTable, tmp_path: Path) -> None:
    """The commit is refused as a whole, and nothing changed."""
    old = TierTable(TierSettings.local(tmp_path / "old"), "orders")
    create_old(old, "orders", "id-1", RAW)
    span, log = span_of_sessions(0)
    wrong = write_span(old.storage, now_of(old).table.location(), span, 1, RAW, [list(log)], f"file://{tmp_path}/e")
    with pytest.raises(ValueError, match="_timestamp"):
        commit(old, wrong)
    assert now_of(old).frontiers == {}


def test_a_table_of_a_later_version_is_refused(table: TierTable) -> None:
    """By the job and by readers, with the remedy."""
    loaded = commit(table, write(table, 0))
    with loaded.table.transaction() as transaction:
        transaction.set_properties({"embarcadero.layout": "7"})
    later = now_of(table)
    with pytest.raises(BadTable, match="layout '7'; this version knows 1, 2") as caught:
        commit(table, write(table, 1))
    assert "upgrade" in caught.value.hint
    tier = Tier(id="id-1", warehouse="", table="orders", metadata=later.metadata, frontiers=later.frontiers)
    with pytest.raises(BadTable, match="layout '7'"):
        taken(TopicTable(tier))


def test_a_killed_job_leaves_no_duplicates(truth: Truth) -> None:
    """With real records: killed between the commits, twice; then all of it is there once, and no garbage stays."""
    for _ in range(2):
        truth.publish(300)
        dying = job(truth, step=crash_at("records", 1))
        dying.open()
        with pytest.raises(Crash):
            dying.cycle()
        assert truth.problems() == []
    with job(truth) as last:
        assert last.run_once()[0].rows == 600
    assert truth.problems() == []
    assert truth.data_files() == truth.named_files()
    assert parquet.span_of("nothing") is None
