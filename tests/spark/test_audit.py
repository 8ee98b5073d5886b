"""The audit on real Spark: a right log holds, and planted damage is found wherever it is planted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import embarcadero as emb
from embarcadero.audit import task
from embarcadero.audit.plan import lane_facts, spans_of
from embarcadero.audit.runs import problems_of
from embarcadero.spark.auditing import audit
from embarcadero.tier.cold import ColdTable
from embarcadero.tier.job import TierJob
from embarcadero.tier.settings import TierSettings
from embarcadero.types import GapKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from embarcadero.client.batch import Batch

pytestmark = pytest.mark.system
SCHEMA = pa.schema([("number", pa.int64()), ("name", pa.string())])


def _fill(log: emb.Log, topic: str, order: int, batches: int = 40) -> None:
    log.create_topic(topic, order=order, replicas=1, schema=SCHEMA)
    for name in ("first", "second"):
        with log.publisher(topic, ack=2, session=name if order else None) as publisher:
            for number in range(batches // 2):
                rows = {"number": list(range(number, number + 50)), "name": [name] * 50}
                publisher.publish(pa.record_batch(rows, schema=SCHEMA))


@pytest.mark.parametrize("order", [0, 2, 5])
def test_a_right_log_holds(spark: SparkSession, log: emb.Log, topic: str, order: int) -> None:
    """Every entry is looked at, in several spans, and nothing is found."""
    _fill(log, topic, order)
    report = audit(spark, log, topic, span_bytes=8_000)
    assert report.findings == []
    assert report.holds
    assert sum(lane.records for lane in report.lanes) == 2_000
    assert sum(lane.batches for lane in report.lanes) == 40
    assert report.spans > 3
    assert all(lane.entries == lane.stop_index - lane.start_index for lane in report.lanes)


def test_an_empty_topic_holds(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Nothing to look at is nothing wrong."""
    log.create_topic(topic, replicas=1)
    assert audit(spark, log, topic).holds


def test_a_trimmed_topic_holds(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Sessions that were opened before the start are no strangers."""
    _fill(log, topic, 5)
    log.trim(topic, before_index=25)
    report = audit(spark, log, topic)
    assert report.findings == []
    assert report.lanes[0].start_index > 0


def test_a_raw_topic_holds(spark: SparkSession, log: emb.Log, topic: str) -> None:
    """Raw records are looked at in the same way."""
    log.create_topic(topic, order=5, replicas=1)
    with log.publisher(topic, ack=2) as publisher:
        for number in range(1_000):
            publisher.send(b"%d" % number)
    report = audit(spark, log, topic)
    assert report.findings == []
    assert report.lanes[0].records == 1_000


class _Liar:
    """A client whose scans leave out, double or change something: what an audit is for."""

    def __init__(self, log: emb.Log, lie: str) -> None:
        self._log, self._lie = log, lie

    def scan(self, *arguments: object, **options: object) -> Iterator[list[Batch]]:
        """What the log says, with one lie in it."""
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


@pytest.mark.parametrize("lie", LIES)
def test_a_task_finds_what_is_wrong(log: emb.Log, lie: str) -> None:
    """The same task that Spark runs, fed with a lie, tells it by its name."""
    topic = f"lies-{lie}"
    _fill(log, topic, 5)
    about, tail = log.describe(topic), log.tail(topic)
    (facts,) = lane_facts(about, tail)
    (span,) = spans_of(log, about, facts, 1 << 30)
    found, runs = task.look_at(_Liar(log, lie), about, span)  # type: ignore[arg-type]
    problems = problems_of(pa.Table.from_batches([runs]), strong=True, from_start=True)
    kinds = {finding.kind for finding in found.findings} | set(problems.column("kind").to_pylist())
    assert LIES[lie] in kinds


def _tier(log: emb.Log, topic: str, folder: Path, hot_retention_s: int) -> TierSettings:
    settings = TierSettings.local(folder, hot_retention_s=hot_retention_s, file_bytes=10_000)
    with TierJob(log, topic, settings, holder="test") as job:
        job.run_once()
    return settings


def test_a_table_is_compared_with_the_log(spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path) -> None:
    """What is in both is read from both; a table with one other value, and one with a row too few, are found."""
    _fill(log, topic, 5)
    _tier(log, topic, tmp_path, hot_retention_s=3_600)
    _publish_more(log, topic)
    report = audit(spark, log, topic)
    assert report.findings == []
    (lane,) = report.lanes
    assert 0 < lane.in_table == lane.in_both < lane.entries
    for change in (_other_value, _fewer_rows):
        assert _found_with(log, topic, change) & {"table", "rows"}


def test_what_is_only_in_the_table_is_looked_at_there(
    spark: SparkSession, log: emb.Log, topic: str, tmp_path: Path
) -> None:
    """Brokers gave it up: the table is all there is, and a file that is damaged, or gone, is found."""
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
    content[len(content) // 3] ^= 1
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
    """What the tasks find when the table's rows are changed on their way."""
    about, tail = log.describe(topic), log.tail(topic)
    (facts,) = lane_facts(about, tail)
    kinds: set[str] = set()
    real = ColdTable.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColdTable, "rows", lambda *arguments: map(change, real(*arguments)))
        for span in spans_of(log, about, facts, 1 << 30):
            kinds |= {finding.kind for finding in task.look_at(log, about, span)[0].findings}
    return kinds


def test_damage_on_the_disk_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """A bit flipped in the only copy of a segment, after a restart: the audit says what can't be read, and where."""
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
