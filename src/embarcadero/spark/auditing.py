"""The audit as a Spark job: one task per span, then one per group of sessions. The driver merges the findings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from embarcadero.audit.report import (
    AuditFinding,
    AuditReport,
    AuditSpan,
    SessionCounts,
    SpanReport,
    lane_facts,
    report_of,
    spans_of,
)
from embarcadero.audit.span import PROBLEMS, RUNS, look_at, problems_of
from embarcadero.client.api.sync_log import Log
from embarcadero.limits import MIB
from embarcadero.spark.processes import shared_log
from embarcadero.types import Order

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPAN_BYTES: Final = 64 * MIB
_ANSWERS: Final = pa.schema([*(field.with_nullable(True) for field in RUNS), pa.field("report", pa.binary())])
_ANSWERS_DDL: Final = (
    "lane int, session long, opens boolean, first_index long, last_index long, first_seq long, stop_seq long, "
    "strong boolean, report binary"
)
_UNREAD: Final = ("unread", "checksum")
_UNKNOWN: Final = "not min_by(opens, first_index) or bool_or(opens and strong is null)"
"""Of the runs of one session: whether some of its batches do not follow a SESSION_OPEN that names its kind."""
_PROBLEMS_DDL: Final = "kind string, lane int, index long, detail string"


def audit(spark: SparkSession, log: Log, topic: str, span_bytes: int = SPAN_BYTES) -> AuditReport:
    """Check all durable records of a topic: positions, sessions, gaps, checksums, and table against log.

    `span_bytes` is the size of a task. Returns a report with all findings about the log. Raises UnknownTopic.

        report = audit(embarcadero.spark.session(), emb.connect("127.0.0.1:9092"), "orders")
        assert report.holds, report.findings
    """
    began = time.monotonic()
    about, tail = log.describe(topic), log.tail(topic)
    facts = lane_facts(about, tail)
    spans = [span for lane in facts for span in spans_of(log, about, lane, span_bytes)]
    if not spans:
        return report_of(about, facts, [], [], {}, time.monotonic() - began)
    answers = _look(spark, log.address, spans).cache()
    try:
        reports = [
            msgspec.json.decode(row.report, type=SpanReport)
            for row in answers.where("report is not null").select("report").collect()
        ]
        unread = {report.lane for report in reports for found in report.findings if found.kind in _UNREAD}
        whole = {lane.lane for lane in facts if not lane.start_index} - unread
        counts, problems = _sessions(answers, int(about.order), whole)
    finally:
        answers.unpersist()
    return report_of(about, facts, reports, problems, counts, time.monotonic() - began)


def _look(spark: SparkSession, address: str, spans: list[AuditSpan]) -> DataFrame:
    """Return a row for each run of a session, and one with the report of each span."""
    encoded = [msgspec.json.encode(span) for span in spans]

    def look(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        log = shared_log(address)
        for part in parts:
            for number in part.column(0).to_pylist():
                span = msgspec.json.decode(encoded[number], type=AuditSpan)
                report, runs = look_at(log, log.describe(span.topic), span)
                yield pa.RecordBatch.from_arrays([*runs.columns, pa.nulls(len(runs), pa.binary())], schema=_ANSWERS)
                last = [None] * len(RUNS) + [msgspec.json.encode(report)]
                cells = [pa.array([value], field.type) for value, field in zip(last, _ANSWERS, strict=True)]
                yield pa.RecordBatch.from_arrays(cells, schema=_ANSWERS)

    return spark.range(0, len(spans), 1, len(spans)).mapInArrow(look, _ANSWERS_DDL)


def _sessions(answers: DataFrame, order: int, whole: set[int]) -> tuple[dict[int, SessionCounts], list[AuditFinding]]:
    """Count each lane's sessions, and those of unknown kind among them; find problems of sessions.

    `whole`: lanes that are complete from their start.
    """
    from pyspark.sql import functions as f

    runs = answers.where("report is null").drop("report")
    sessions = runs.groupBy("lane", "session").agg(f.expr(_UNKNOWN).alias("unknown"))
    totals = sessions.groupBy("lane").agg(f.expr("count(*)").alias("all"), f.expr("count_if(unknown)").alias("unknown"))
    mixed = order == Order.TOTAL  # in order 5 all sessions are strong; below 2 none is
    counts = {row["lane"]: SessionCounts(row["all"], row["unknown"] if mixed else 0) for row in totals.collect()}
    if order < Order.TOTAL:
        return counts, []  # in these orders nothing is promised: a batch may have many positions

    def compare(own: pa.Table) -> pa.Table:
        exact = pa.table([own.column(field.name).cast(field.type) for field in RUNS], schema=RUNS)
        from_start = own.column("lane")[0].as_py() in whole
        return problems_of(exact, all_strong=not mixed, from_start=from_start).cast(
            pa.schema([field.with_nullable(True) for field in PROBLEMS])
        )

    found = runs.groupBy("lane", "session").applyInArrow(compare, _PROBLEMS_DDL).limit(1_000).collect()
    return counts, [AuditFinding(**row.asDict()) for row in found]
