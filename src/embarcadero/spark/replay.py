"""Replay: copy a range of one topic into another, each record once, with unchanged keys, headers, times and columns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from embarcadero.client.api.sync_log import Log
from embarcadero.client.arguments import parse_time, time_us
from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, TopicExists, UnknownTopic
from embarcadero.limits import SPARK_TASK_BYTES
from embarcadero.spark.jobs import (
    STEP_BYTES,
    Job,
    JobFact,
    Pace,
    ProgressReport,
    RecordRun,
    TopicSource,
    check_target,
    publish_staged,
    stage_spans,
    task_writer,
    write_name,
)
from embarcadero.spark.processes import shared_log
from embarcadero.spark.read.options import EARLIEST, LATEST, RecordPosition, TaskSpan, Where, WhereBy
from embarcadero.spark.sink import Encoded, TaskWriter
from embarcadero.types import Order, Span

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KIND: Final = "replay"
_PIECE_BYTES_MIN: Final = 4096

Bound = str | int | datetime
"""A bound of a range: earliest, latest, a seq, a datetime; as text also an ISO 8601 time, or `10m ago`."""


class _ReplayBegun(msgspec.Struct, frozen=True):
    """The range of a replay. `asked` is the range as given, `ends` are the resolved bounds of each lane."""

    source: str
    source_id: int
    asked: str
    ends: dict[int, tuple[RecordPosition, RecordPosition]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a run: its `steps`; `records` is the number of seqs in the whole range, `ends` its bounds by lane."""

    topic: str
    into: str
    steps: int
    records: int
    ends: dict[int, Span]


def replay(
    spark: SparkSession,
    log: Log,
    topic: str,
    *,
    into: str,
    start: Bound = "earliest",
    end: Bound = "latest",
    rate: int | None = None,
    name: str | None = None,
    step_bytes: int = STEP_BYTES,
    report: ProgressReport | None = None,
) -> Replayed:
    """Copy the durable records from `start` up to `end` (exclusive) into another topic, each once, in their order.

    The range is resolved when the job begins, and kept: `latest` is the end as it was then. Repeat the same call to
    continue a run that was killed; it does nothing if everything is copied.

    Arguments: `into` is created with the source's settings if it does not exist, and must have the same columns if it
    does. `name` distinguishes jobs with the same source and range. `rate` limits records per second; the records of one
    second appear together. `step_bytes` is the payload of one step. `report` is called after each step.

    Returns what this run did. Raises BadValue for a topic that would be copied into itself, an invalid range or rate;
    BadSchema if the columns differ; Trimmed, FuturePosition or UnknownTopic.

        replay(spark, log, "orders", into="orders_test", start="10m ago", rate=1_000)
    """
    check_target(into)
    if into == topic:
        raise _same_topic(topic, into)
    if rate is not None and rate < 1:
        raise BadValue(f"the rate is {rate} records a second", "use 1 or more, or leave it out")
    about = log.describe(topic)
    target = _open_target(log, about, into)
    asked = f"{start} to {end}"
    job = Job.of(log, target, write_name(KIND, name, about.name, asked))
    source = TopicSource(log, about)
    known = job.begun()
    if known is None:
        wanted = _ReplayBegun(about.name, about.id, asked, _ends(source, start, end))
        known = job.begin(msgspec.json.encode(wanted))
    begun = msgspec.json.decode(known, type=_ReplayBegun)
    if (begun.source_id, begun.asked) != (about.id, asked):
        raise BadValue(
            f"replay {name!r} into {into!r} was begun with topic {begun.source!r} from {begun.asked}, but this "
            f"call asks for {topic!r} from {asked}" + (", another topic of that name" if begun.source == topic else ""),
            "give the same topic and range to continue, or another name to begin another replay",
        )
    steps = _Replay(spark, job, source, begun, Pace(step_bytes, rate, report))
    count = job.run(steps)
    ends = {lane: Span(low.seq, high.seq) for lane, (low, high) in begun.ends.items()}
    return Replayed(topic, into, count, steps.total, ends)


def _same_topic(topic: str, into: str) -> BadValue:
    return BadValue(f"topic {topic!r} can't be replayed into {into!r}: it is the same topic", "name another target")


def _open_target(log: Log, about: TopicInfo, name: str) -> TopicInfo:
    """The target; created like the source if it does not exist."""
    try:
        target = log.describe(name)
    except UnknownTopic:
        try:
            target = log.create_topic(
                name,
                order=about.order if about.order > Order.BROKER else int(Order.STRONG),
                partitions=about.partitions,
                replicas=about.replicas,
                durable_on=about.durable_on,
                schema=about.schema,
                partitioner=about.partitioner,
                key=about.key or None,
            )
        except TopicExists:
            target = log.describe(name)
    if target.id == about.id:
        raise _same_topic(about.name, name)
    if (about.schema is None) != (target.schema is None) or not target.versions.newest.equals(about.versions.newest):
        raise BadSchema(
            f"topic {name!r} has columns other than those of topic {about.name!r}",
            f"it has {', '.join(target.versions.newest.names)}; replay into a topic with the same columns and types, "
            'or write a query: df.write.format("embarcadero")',
        )
    return target


# --- the range --------------------------------------------------------------------------------------------------------
def _ends(source: TopicSource, start: Bound, end: Bound) -> dict[int, tuple[RecordPosition, RecordPosition]]:
    """Resolve the range's bounds in each lane, now. Raises FuturePosition, Trimmed or BadValue for an invalid one."""
    now = source.now()
    starts = source.view.resolve(_where("start", start), now, "start", rest=EARLIEST)
    stops = source.view.resolve(_where("end", end), now, "end", rest=LATEST)
    for lane, position in starts.items():
        if stops[lane].seq < position.seq:
            raise BadValue(
                f"the range ends (at seq {stops[lane].seq}) before it starts (at seq {position.seq})",
                "the end is exclusive and at least the start",
            )
    return {lane: (position, stops[lane]) for lane, position in starts.items()}


def _where(what: str, bound: Bound) -> Where:
    if isinstance(bound, bool):
        raise BadValue(f"{what} is {bound!r}", "use earliest, latest, a seq, or a time")
    if isinstance(bound, str):
        text = bound.strip()
        if text in (WhereBy.EARLIEST, WhereBy.LATEST):
            return Where(WhereBy(text))
        bound = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else _time(what, text)
    if isinstance(bound, datetime):
        if bound > datetime.now(UTC):
            raise BadValue(f"{what} is {bound.isoformat()}, which is in the future", "use a time that has passed")
        return Where(WhereBy.TIME, time_us(bound))
    if bound < 0:
        raise BadValue(f"{what} is {bound}", "a seq is at least 0")
    return Where(WhereBy.SEQ, bound)


def _time(what: str, text: str) -> datetime:
    try:
        return parse_time(text)
    except BadValue as error:
        raise BadValue(f"{what}: {error.message}", f"use earliest, latest, a seq, or a time: {error.hint}") from None


# --- steps ------------------------------------------------------------------------------------------------------------
class _Replay:
    """The steps of a run: spans of one lane, lane after lane."""

    def __init__(self, spark: SparkSession, job: Job, source: TopicSource, begun: _ReplayBegun, pace: Pace) -> None:
        self._spark, self._job, self._source, self._begun, self._pace = spark, job, source, begun, pace
        self.total = sum(high.seq - low.seq for low, high in begun.ends.values())
        self._steps, self._next_s = 0, 0.0

    def plan(self, newest: JobFact | None) -> bytes | None:
        """Return the next span after the newest done step; None if everything is copied."""
        lanes = sorted(self._begun.ends)
        after = None if newest is None else msgspec.json.decode(newest.body, type=TaskSpan)
        done = 0
        for lane in lanes:
            low, high = self._begun.ends[lane]
            if after is not None and lane <= after.lane:
                low = after.stop if lane == after.lane else high
            done += low.seq - self._begun.ends[lane][0].seq
            if low.seq < high.seq:
                self._pace.announce(self._steps, done, self.total)
                self._wait()
                return msgspec.json.encode(self._span(lane, low, high))
        self._pace.announce(self._steps, done, self.total)
        return None

    def _wait(self) -> None:
        """With a rate, wait until a second has passed since the last portion began."""
        if self._pace.rate is None:
            return
        now_s = time.monotonic()
        if now_s < self._next_s:
            time.sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + 1.0

    def _span(self, lane: int, low: RecordPosition, high: RecordPosition) -> TaskSpan:
        rate = self._pace.rate
        if rate is not None and high.seq - low.seq > rate:
            high = self._source.view.position_of(lane, low.seq + rate)
        return self._source.step(lane, low, high, self._pace.step_bytes)

    def write(self, epoch: int, plan: bytes) -> None:
        """Have tasks stage the records of a span, then commit them in their order."""
        span = msgspec.json.decode(plan, type=TaskSpan)
        about, target = self._source.about, self._job.target
        # Where the partitions of the target differ, keys choose them, and order is kept within each.
        same = (about.partitions, about.partitioner) == (target.partitions, target.partitioner)
        tasks, reader = task_writer(self._job.log, target, keyed=not same), self._source.rows

        def batches(piece: TaskSpan) -> Iterator[Encoded]:
            return _encoded(tasks, reader.read(piece))

        size = max(_PIECE_BYTES_MIN, min(SPARK_TASK_BYTES, self._pace.step_bytes))
        pieces = self._source.pieces(span, size)
        if pieces:
            publish_staged(tasks, stage_spans(self._spark, tasks, self._job.write, epoch, pieces, batches))

    def done(self, epoch: int, plan: bytes) -> bytes:  # noqa: ARG002 - see JobSteps
        """Return the span that was copied."""
        self._steps += 1
        return plan


def _encoded(tasks: TaskWriter, found: Iterator[RecordRun]) -> Iterator[Encoded]:
    """Batches for the target, with the records in their order: runs of records that have the same partition."""
    log = shared_log(tasks.options.brokers)
    for partition, run in groupby(found, lambda rows: rows.partition):
        yield from tasks.batches(log, partition, (rows.columns for rows in run))
