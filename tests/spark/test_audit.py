"""The audit on real Spark: a correct log passes, and injected damage is found at any position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import embarcadero as emb
from embarcadero.audit.report import lane_facts, spans_of
from embarcadero.audit.span import look_at, problems_of, runs_of
from embarcadero.fabric.layout import OPEN_STRONG
from embarcadero.spark.auditing import _sessions, audit
from embarcadero.tier import columns
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings
from embarcadero.tier.table_reads import TopicTable
from embarcadero.types import GapKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from embarcadero.client.results import Batch

pytestmark = pytest.mark.system
SCHEMA = pa.schema([("number", pa.int64()), ("name", pa.string())])


def _fill(log: emb.Log, topic: str, order: int, batches: int = 40, publisher_order: str | None = None) -> None:
    log.create_topic(topic, order=order, replicas=1, schema=SCHEMA)
    for name in ("first", "second"):
        with log.publisher(topic, ack=2, session=name if order else None, order=publisher_order) as publisher:
            for number in range(batches // 2):
                rows = {"number": list(range(number, number + 50)), "name": [name] * 50}
                publisher.publish(pa.record_batch(rows, schema=SCHEMA))


@pytest.mark.parametrize("order", [0, 2, 5])
def test_a_correct_log_passes(spark: SparkSession, log: emb.Log, topic: str, order: int) -> None:
    """Every entry is checked, in several spans, and nothing is found."""
    _fill(log, topic, order)
    report = audit(spark, log, topic, span_bytes=8_000)
    assert report.findings == []
    assert report.holds
    assert sum(lane.records for lane in report.lanes) == 2_000
    assert sum(lane.batches for lane in report.lanes) == 40
    assert report.spans > 3
    assert all(lane.entries == lane.stop_index - lane.start_index for lane in report.lanes)
    assert order == 0 or [lane.sessions for lane in report.lanes] == [2]
    assert all(lane.sessions_unknown == 0 for lane in report.lanes)


def test_an_empty_topic_passes(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """No entries, no findings."""
    log.create_topic(topic, replicas=1)
    assert audit(spark, log, topic).holds


@pytest.mark.parametrize(("order", "unknown"), [(2, 1), (5, 0)])
def test_a_trimmed_topic_passes(spark: SparkSession, log: emb.Log, topic: str, order: int, unknown: int) -> None:
    """Sessions that were opened before the start are accepted. In order 2 their kind is unknown: reported so."""
    _fill(log, topic, order)
    log.trim(topic, before_index=25)
    report = audit(spark, log, topic)
    assert report.findings == []
    assert report.lanes[0].start_index > 0
    assert report.lanes[0].sessions_unknown == unknown


def test_a_raw_topic_passes(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Raw records are checked in the same way."""
    log.create_topic(topic, order=5, replicas=1)
    with log.publisher(topic, ack=2) as publisher:
        for number in range(1_000):
            publisher.send(b"%d" % number)
    report = audit(spark, log, topic)
    assert report.findings == []
    assert report.lanes[0].records == 1_000


class _Liar:
    """A client whose scans leave out, duplicate or change something, which an audit has to find."""

    def __init__(self, log: emb.Log, lie: str) -> None:
        self._log, self._lie = log, lie

    def scan(self, *arguments: object, **options: object) -> Iterator[list[Batch]]:
        """The content of the log, with one deviation."""
        for batches in self._log.scan(*arguments, **options):  # type: ignore[arg-type]
            changed = list(batches)
            if self._lie == "missing" and len(changed) > 5:
                del changed[5]
            elif self._lie == "twice" and len(changed) > 6:
                changed.insert(6, changed[4])
            elif self._lie == "swapped" and len(changed) > 6:
                changed[5].session_seq, changed[6].session_seq = changed[6].session_seq, changed[5].session_seq
            elif self._lie == "trimmed":
                changed = [emb.Batch.of_gap(changed[0].lane, emb.Gap(GapKind.TRIMMED, 0, 3), 0)]
            yield changed


LIES = {"missing": "index-hole", "twice": "index-twice", "swapped": "session-order", "trimmed": "trimmed"}


@pytest.mark.parametrize("order", [2, 5])
@pytest.mark.parametrize("lie", LIES)
def test_a_task_finds_each_problem(log: emb.Log, lie: str, order: int) -> None:
    """The same span that Spark runs, with a deviation, is reported by its kind: default publishers are strong."""
    assert LIES[lie] in _told(log, f"lies-{lie}-{order}", lie, order)


def test_weak_publishers_promise_no_order(log: emb.Log) -> None:
    """A deviation in a strong session is none in a weak one in the same kind of topic."""
    assert _told(log, "lies-weak", "swapped", 2, "total") == set()


def _told(log: emb.Log, topic: str, lie: str, order: int, publisher_order: str | None = None) -> set[str]:
    """The kinds of findings when scans deviate."""
    _fill(log, topic, order, publisher_order=publisher_order)
    about, tail = log.describe(topic), log.tail(topic)
    (facts,) = lane_facts(about, tail)
    (span,) = spans_of(log, about, facts, 1 << 30)
    found, runs = look_at(_Liar(log, lie), about, span)  # type: ignore[arg-type]
    problems = problems_of(pa.Table.from_batches([runs]), all_strong=order == 5, from_start=True)
    return {finding.kind for finding in found.findings} | set(problems.column("kind").to_pylist())


def _tier(log: emb.Log, topic: str, folder: Path, hot_retention_s: int) -> TierSettings:
    settings = TierSettings.local(folder, hot_retention_s=hot_retention_s, file_bytes=10_000)
    with TierJob(log, topic, settings, holder="test") as job:
        job.run_once()
    return settings


def test_a_table_is_compared_with_the_log(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """Records in both are read from both; a table with one other value, and one with a row too few, are found."""
    _fill(log, topic, 5)
    _tier(log, topic, tmp_path, hot_retention_s=3_600)
    _publish_more(log, topic)
    report = audit(spark, log, topic)
    assert report.findings == []
    (lane,) = report.lanes
    assert 0 < lane.in_table == lane.in_both < lane.entries
    for change in (_other_value, _fewer_rows):
        assert _found_with(log, topic, change) & {"table", "rows"}


def test_records_only_in_the_table_are_checked_there(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """Brokers dropped them: only the table has them, and a file that is damaged, or gone, is found."""
    _fill(log, topic, 5)
    _tier(log, topic, tmp_path, hot_retention_s=0)
    _publish_more(log, topic)
    assert log.tail(topic).hot_index > 0
    report = audit(spark, log, topic)
    assert report.findings == []
    (lane,) = report.lanes
    assert (lane.in_both, lane.records) == (0, 2_050)
    file = sorted((tmp_path / "warehouse").rglob("*.parquet"))[0]
    content = bytearray(file.read_bytes())
    group = pq.read_metadata(file).row_group(0)
    pages = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "_crc")
    start = pages.dictionary_page_offset or pages.data_page_offset
    content[start + pages.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    assert {finding.kind for finding in audit(spark, log, topic).findings} == {"checksum"}
    file.unlink()
    assert {finding.kind for finding in audit(spark, log, topic).findings} == {"checksum"}


def _publish_more(log: emb.Log, topic: str) -> None:
    with log.publisher(topic, ack=2) as publisher:
        publisher.publish(pa.record_batch({"number": [1] * 50, "name": ["third"] * 50}, schema=SCHEMA))


def _other_value(rows: pa.RecordBatch) -> pa.RecordBatch:
    place = rows.schema.get_field_index("number")
    return rows.set_column(place, rows.schema.field(place), pc.add(rows.column(place), 1))


def _fewer_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.slice(1)


def _found_with(log: emb.Log, topic: str, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> set[str]:
    """The tasks' findings when the table's rows are changed in flight."""
    about, tail = log.describe(topic), log.tail(topic)
    (facts,) = lane_facts(about, tail)
    kinds: set[str] = set()
    runs: list[pa.RecordBatch] = []
    real = TopicTable.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TopicTable, "rows", lambda *arguments: map(change, real(*arguments)))
        for span in spans_of(log, about, facts, 1 << 30):
            found, own = look_at(log, about, span)
            kinds |= {finding.kind for finding in found.findings}
            runs.append(own)
    problems = problems_of(pa.Table.from_batches(runs), all_strong=False, from_start=True)
    kinds |= set(problems.column("kind").to_pylist())
    return kinds


@pytest.mark.parametrize(("kept", "unknown"), [(True, 0), (False, 2)])
def test_a_table_keeps_which_sessions_are_strong(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool,
    unknown: int,
) -> None:  # fmt: skip
    """For older tables, which do not, the report has the number of sessions whose order was not checked."""
    if not kept:
        real = columns._kept_value
        monkeypatch.setattr(
            columns, "_kept_value",
            lambda name, batch, decoded: (None, 1) if batch.kind == 2 and name == "_skipped"
            else real(name, batch, decoded),
        )  # fmt: skip
    _fill(log, topic, 2)
    _tier(log, topic, tmp_path, hot_retention_s=3_600)
    monkeypatch.undo()
    _publish_more(log, topic)
    assert audit(spark, log, topic).findings == []  # table and log are compared
    _tier(log, topic, tmp_path, hot_retention_s=0)
    _publish_more(log, topic)
    report = audit(spark, log, topic)
    assert report.findings == []
    (lane,) = report.lanes
    assert (lane.in_both, lane.sessions, lane.sessions_unknown) == (0, 4, unknown)
    swapped = {kind for kind in _found_with(log, topic, _other_order) if kind.startswith("session")}
    assert swapped == ({"session-order"} if kept else set())


def _other_order(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Reverse the sequences of batches in each row group that has several of one session."""
    kinds, numbers = rows.column("_kind").to_numpy(), rows.column("_session_seq").to_numpy().copy()
    own = kinds == 1
    sessions = rows.column("_session").to_numpy()
    for session in np.unique(sessions[own]).tolist():
        places = own & (sessions == session)
        numbers[places] = numbers[places][::-1]
    return rows.set_column(rows.schema.get_field_index("_session_seq"), "_session_seq", pa.array(numbers))


def test_spark_merges_runs_of_sessions_of_both_kinds(spark: SparkSession) -> None:
    """Runs of two spans: the disorder of the strong session is found, the weak one is accepted, one is unknown."""
    sessions, none = np.array([0, 1, 2] * 2), np.zeros(6, np.int64)
    kinds, sequences = np.array([2, 2, 1, 1, 1, 1]), np.array([0, 0, 1, 1, 1, 0])
    flags = np.array([OPEN_STRONG, 0, 0, 0, 0, 0])
    spans = [
        runs_of(0, np.arange(6), kinds, sessions, sequences, none, flags),
        runs_of(0, np.arange(6, 8), kinds[4:], sessions[:2], np.zeros(2, np.int64), none[:2], none[:2]),
    ]
    runs = pa.Table.from_batches(spans)
    told = spark.createDataFrame(runs.append_column("report", pa.nulls(len(runs), pa.binary())))
    counts, found = _sessions(told, 2, set())
    assert counts == {0: (3, 1)}
    assert [(one.kind, one.index) for one in found] == [("session-order", 3)]
    assert {one.kind for one in _sessions(told, 5, set())[1]} == {"session-order"}
    assert len(_sessions(told, 5, set())[1]) == 3


def test_damage_on_the_disk_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """A bit flipped in the only copy of a segment, after a restart: the audit names the unreadable records."""
    data = tmp_path / "cluster"
    with emb.local(brokers=1, replicas=1, data_dir=str(data)) as log:
        _fill(log, "orders", 5)
        assert audit(spark, log, "orders").holds
    segment = max(data.glob("replica-0/lane-*/range-*/*.log"), key=lambda path: path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    with emb.local(brokers=1, replicas=1, data_dir=str(data)) as log:
        report = audit(spark, log, "orders")
        assert not report.holds
        assert {finding.kind for finding in report.findings} & {"checksum", "unread", "index-hole"}
