"""The common part of jobs: steps that are planned durably, written once, and found again by the next start.

A job is a named write into one topic. Each step is an epoch of that write. The job records the step's plan
(`JobLedger`); tasks stage its rows, which are committed as a whole (staging/commit.py); then the job records the step
as done. A process that is killed at any point leaves at most a plan. The next start runs that plan, or finds its rows
in the topic.

`TopicSource` is a topic that a job reads: the ends of its lanes, pieces for tasks, and rows exactly as they were
published. A frame has Spark's types; rows here have the topic's own, so a copy equals its source.

Theory of operation. The facts of the jobs that write into one topic are in a hidden topic beside it:

    begun       the job's definition: its source, its range. Epoch 0.
    planned     what the step of an epoch reads, recorded before the step runs.
    done        the step of an epoch is in the topic, as a whole and durable.

The hidden topic has one total order, and the first record of each fact counts. A process appends its own version, waits
until it is durable, reads the topic, and continues with the version that came first. So all processes of a job, now and
after any crash, run the same steps over the same records, and the commit protocol puts each step into the target once.
A job's frontier is in its newest plan, and that plan counts only once its epoch is done: frontier and output move
together.

The ledger keeps itself small. A checkpoint has all facts below a seq that are still needed; once it is durable, the
topic is trimmed below that seq. Of several checkpoints the one with the highest seq counts: no trim went beyond it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from uuid import uuid4

import msgspec
import pyarrow as pa

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import (
    BadName,
    BadSchema,
    BadValue,
    Corrupt,
    EmbarcaderoError,
    OutcomeUnknown,
    Stale,
    TopicExists,
    TopicReplaced,
    Trimmed,
    UnknownTopic,
    from_wire,
)
from embarcadero.limits import GIB, SPARK_TASK_BYTES
from embarcadero.spark.processes import shared_log
from embarcadero.spark.read.options import RecordPosition, TaskSpan, read_options
from embarcadero.spark.read.view import ReadView, TopicNow
from embarcadero.spark.shape import FrameShape, WriteOptions
from embarcadero.spark.sink import Encoded, Staged, StagedMessage, TaskWriter, WriteWork, publish
from embarcadero.staging.ledger import ack_of
from embarcadero.staging.manifest import data_name, first_sequence
from embarcadero.types import HIDDEN_PREFIX, Gap, GapKind, Order, jobs_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- recorded facts ---------------------------------------------------------------------------------------------------
BEGUN: Final = "begun"
PLANNED: Final = "planned"
DONE: Final = "done"

CHECKPOINT_RECORDS: Final = 500
"""A checkpoint replaces the ledger's records when there are more than this."""

_TRIES: Final = 5  # a checkpoint may trim the records during a read
_SECOND: Final = 1_000_000


class JobFact(msgspec.Struct, frozen=True, tag="fact"):
    """One fact of a job. `at_us` is the time of the process that recorded it, in microseconds since 1970."""

    job: str
    kind: str
    epoch: int
    body: bytes
    at_us: int


class JobCheckpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """All facts recorded below seq `below` that are still needed."""

    below: int
    facts: list[JobFact]


_DECODER: Final = msgspec.msgpack.Decoder(JobFact | JobCheckpoint)


class _Key(NamedTuple):
    job: str
    kind: str
    epoch: int


class JobLedger:
    """The facts of all jobs that write into one target topic, as one process has read them."""

    def __init__(self, log: Log, target: TopicInfo) -> None:
        self._log, self._target = log, target
        self._name = jobs_topic(target.id)
        self._next = 0
        self._facts: dict[_Key, JobFact] = {}
        self._newest: dict[str, JobFact] = {}  # by job: the newest epoch that is done

    # --- recorded facts -----------------------------------------------------------------------------------------------
    def get(self, job: str, kind: str, epoch: int = 0) -> JobFact | None:
        """Return a fact, if it was recorded before the last `refresh`."""
        return self._facts.get(_Key(job, kind, epoch))

    def newest_done(self, job: str) -> JobFact | None:
        """Return the newest epoch of a job that is done; None if no epoch is done."""
        return self._newest.get(job)

    def refresh(self) -> None:
        """Read new records. Without a ledger there are no facts."""
        for _ in range(_TRIES):
            try:
                self._read()
                return
            except UnknownTopic:
                return
            except Trimmed:  # by a checkpoint that was written meanwhile: the next round reads it
                continue
        raise Corrupt(
            f"topic {self._name!r} was trimmed while it was read", "do not trim topics of the cluster by hand"
        )

    def _read(self) -> None:
        tail = self._log.tail(self._name)
        if tail.start_seq > self._next:  # the checkpoint that allowed the trim is above
            self._next, self._facts, self._newest = tail.start_seq, {}, {}
        if tail.seq <= self._next:
            return
        table = self._log.read(self._name, self._next, tail.seq)
        seqs, values = table.column("_seq").to_pylist(), table.column("value").to_pylist()
        found = [(seq, _decode(value, self._name)) for seq, value in zip(seqs, values, strict=True)]
        checkpoints = [each for _, each in found if isinstance(each, JobCheckpoint)]
        newest = max(checkpoints, key=lambda each: each.below, default=None)
        if newest is not None and not self._facts:
            for fact in newest.facts:
                self._keep(fact)
            found = [(seq, each) for seq, each in found if seq >= newest.below]
        for _, each in found:
            if isinstance(each, JobFact):
                self._keep(each)
        self._next = tail.seq

    def _keep(self, fact: JobFact) -> None:
        """Keep a fact; only the first record of a fact counts."""
        kept = self._facts.setdefault(_Key(fact.job, fact.kind, fact.epoch), fact)
        newest = self._newest.get(fact.job)
        if fact.kind == DONE and (newest is None or newest.epoch < fact.epoch):
            self._newest[fact.job] = kept

    # --- recording ----------------------------------------------------------------------------------------------------
    def settle(self, job: str, kind: str, body: bytes, epoch: int = 0) -> JobFact:
        """Record a fact unless it is already recorded. Return the fact that counts; another process may have won."""
        self.refresh()
        if (known := self.get(job, kind, epoch)) is not None:
            return known
        self._append(JobFact(job, kind, epoch, body, time.time_ns() // 1000))
        self.refresh()
        settled = self.get(job, kind, epoch)
        if settled is None:
            raise Corrupt(
                f"a fact of job {job!r} is not in topic {self._name!r} although it was acked",
                "look for lost records: embarcadero verify",
            )
        return settled

    def _append(self, record: JobFact | JobCheckpoint) -> None:
        with self._log.publisher(self._open(), ack=ack_of(self._target), linger_ms=0) as publisher:
            publisher.send(msgspec.msgpack.encode(record)).result()

    def _open(self) -> TopicInfo:
        """Return the ledger's topic; create it, with the target's replicas, if it does not exist."""
        try:
            return self._log.describe(self._name)
        except UnknownTopic:
            target = self._target
            try:
                return self._log.create_topic(
                    self._name,
                    order=int(Order.TOTAL),
                    partitions=1,
                    replicas=target.replicas,
                    durable_on=target.durable_on,
                    retention_bytes=0,
                    retention_s=0,
                )
            except TopicExists:
                return self._log.describe(self._name)

    # --- staying small ------------------------------------------------------------------------------------------------
    def checkpoint(self, records: int = CHECKPOINT_RECORDS) -> None:
        """Replace the ledger's records with a checkpoint if there are more than `records`."""
        self.refresh()
        try:
            start = self._log.tail(self._name).start_seq
        except UnknownTopic:
            return
        if self._next - start <= records:
            return
        below = self._next
        self._append(JobCheckpoint(below, self._needed()))
        self._log.trim(self._name, before_seq=below)

    def _needed(self) -> list[JobFact]:
        """Facts that a process may still ask for: none of epochs before the newest done epoch."""
        newest = {job: fact.epoch for job, fact in self._newest.items()}
        return [fact for fact in self._facts.values() if fact.kind == BEGUN or fact.epoch >= newest.get(fact.job, 0)]


def age_s(fact: JobFact) -> float:
    """Age of a fact, by the clocks of the two processes."""
    return (time.time_ns() // 1000 - fact.at_us) / _SECOND


def _decode(value: bytes, topic: str) -> JobFact | JobCheckpoint:
    try:
        record: JobFact | JobCheckpoint = _DECODER.decode(value)
        return record
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"topic {topic!r} has a record that is not a fact of a job: {error}",
            "a later version of Embarcadero wrote it, or another program: use that version, or delete the topic",
        ) from error


# --- reading a topic --------------------------------------------------------------------------------------------------
_LOG: Final = logging.getLogger("embarcadero.spark")

_STEP_BATCHES: Final = 100_000  # the manifest of a step names each of its batches
STEP_BYTES: Final = 1 * GIB
"""Payload that one step reads, if there is that much: the most that a killed process has to repeat."""

NAME_BYTES_MAX: Final = 80
_CHECKPOINT_STEPS: Final = 100  # steps between two checks of the ledger's length
_TTL_SHARE: Final = 0.9  # of a topic's session_ttl_s: clocks of two processes differ
STAGED_DDL: Final = "number long, staged binary"
"""Schema of a task's report to the driver: its number, and its staged batches."""

_TYPED: Final = re.compile(r"embarcadero\.errors\.(\w+): (.*)")


class RecordRun(NamedTuple):
    """Consecutive records: as columns of the topic, the seq of the first one, their partition."""

    columns: pa.RecordBatch
    seq: int
    partition: int


@dataclass(frozen=True, slots=True)
class TopicRows:
    """Reads spans of a topic in tasks. It is sent to them, so it holds plain data only."""

    brokers: str
    topic: str
    topic_id: int
    version: int  # of the topic's schema: rows of a newer one would lose columns

    def read(self, span: TaskSpan) -> Iterator[RecordRun]:
        """Read the durable records of a span. Raises Trimmed, TopicReplaced, BadSchema."""
        log = shared_log(self.brokers)
        if log.describe(self.topic).id != self.topic_id:
            raise TopicReplaced(f"topic {self.topic!r} was deleted, and another one has its name", "begin another job")
        for batches in log.scan(self.topic, lane=span.lane, start=span.start.index, stop=span.stop.stop):
            for batch in batches:
                if batch.gap is not None:
                    self._check(span, batch.gap)
                first, stop = max(batch.seq, span.start.seq), min(batch.seq + batch.count, span.stop.seq)
                if batch.count == 0 or first >= stop:
                    continue
                if batch.schema_version > self.version:
                    raise BadSchema(f"topic {self.topic!r} got another column while the job ran", "start it again")
                columns = batch.to_arrow().slice(first - batch.seq, stop - first)
                yield RecordRun(columns, first, batch.partition)

    def _check(self, span: TaskSpan, gap: Gap) -> None:
        """Check a gap: trimmed records end the job. Records that a crash took before they were durable do not."""
        where = f"batches [{gap.start}, {gap.stop}) of lane {span.lane} of topic {self.topic!r}"
        if gap.kind is GapKind.TRIMMED:
            raise Trimmed(
                f"{where} were trimmed before they were read",
                "keep records longer than a job may be stopped: set a longer retention, or add a table (tier)",
            )
        if gap.kind is GapKind.LOST:
            _LOG.warning("%s were lost with the memory of the cluster", where)


class TopicSource:
    """A topic that a job reads, as the driver sees it."""

    def __init__(self, log: Log, about: TopicInfo) -> None:
        self.about, self._log = about, log
        self._read = ReadView(read_options({"brokers": log.address, "topic": about.name}, streaming=False))
        self.view = self._read.topic(about.name)

    @property
    def rows(self) -> TopicRows:
        """Return the reader that tasks use."""
        return TopicRows(self._log.address, self.about.name, self.about.id, self.about.schema_version)

    def now(self) -> TopicNow:
        """The topic and its lanes as they are now. Raises UnknownTopic, TopicReplaced."""
        now = self._read.now()[self.about.name]
        if now.about.id != self.about.id:
            raise TopicReplaced(f"topic {self.about.name!r} was deleted, and another one has its name", "start again")
        return now

    def span(self, lane: int, start: RecordPosition, stop: RecordPosition) -> TaskSpan:
        """Return a span of the topic."""
        return TaskSpan(lane, start, stop, self.about.name)

    def pieces(self, span: TaskSpan, piece_bytes: int = SPARK_TASK_BYTES) -> list[TaskSpan]:
        """Cut a span into pieces of about `piece_bytes`."""
        return [piece for piece, _ in self._pieces(span, piece_bytes)]

    def step(self, lane: int, start: RecordPosition, stop: RecordPosition, step_bytes: int) -> TaskSpan:
        """Return the first pieces of a span as one step: about `step_bytes`, limited batches, at least one piece."""
        end, size = start, 0
        for piece, piece_bytes in self._pieces(self.span(lane, start, stop), min(SPARK_TASK_BYTES, step_bytes)):
            size += piece_bytes
            if end > start and (size > step_bytes or piece.stop.index - start.index > _STEP_BATCHES):
                break
            end = piece.stop
        return self.span(lane, start, end)

    def _pieces(self, span: TaskSpan, piece_bytes: int) -> list[tuple[TaskSpan, int]]:
        if span.start.seq >= span.stop.seq:
            return []
        cuts = self.view.pieces(self.now(), span.lane, span.start, span.stop, piece_bytes)
        sizes = {cut.seq: cut.bytes for cut in cuts}
        within = [cut for cut in cuts if span.start.seq < cut.seq < span.stop.seq]
        inner = {cut.seq: RecordPosition(cut.index, cut.seq) for cut in within}
        edges = [span.start, *(position for _, position in sorted(inner.items())), span.stop]
        return [(self.span(span.lane, low, high), sizes.get(high.seq, 0)) for low, high in pairwise(edges)]


class JobProgress(NamedTuple):
    """Progress of a job: steps done by this process, and how many of the source's records are done."""

    steps: int
    done: int
    total: int


ProgressReport = Callable[[JobProgress], None]
"""Called when a job begins and after each step."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The size of steps, the records copied per second (None: no limit), and the callback for progress."""

    step_bytes: int = STEP_BYTES
    rate: int | None = None
    report: ProgressReport | None = None

    def announce(self, steps: int, done: int, total: int) -> None:
        """Report progress."""
        if self.report is not None:
            self.report(JobProgress(steps, done, total))


class JobSteps(Protocol):
    """The part of a job that depends on its kind."""

    def plan(self, newest: JobFact | None) -> bytes | None:
        """Plan the step after the newest done step; None if no step remains."""

    def write(self, epoch: int, plan: bytes) -> None:
        """Write the rows of a step into the target, as one epoch of the job's write."""

    def done(self, epoch: int, plan: bytes) -> bytes:
        """Return the body of the fact that records a step as done."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job: `write` names its write into `target`. `repeatable`: storing rows of a step twice does no harm."""

    log: Log
    target: TopicInfo
    write: str
    ledger: JobLedger
    repeatable: bool = False

    @classmethod
    def of(cls, log: Log, target: TopicInfo, write: str, *, repeatable: bool = False) -> Job:
        """Open the job of this name, and read its facts."""
        if target.order <= Order.BROKER:
            raise BadValue(
                f"topic {target.name!r} has order {target.order}, which can't store a write exactly once",
                "write into a topic of order 2 or 5",
            )
        job = cls(log, target, write, JobLedger(log, target), repeatable)
        job.ledger.refresh()
        return job

    def begun(self) -> bytes | None:
        """Return the job's definition, if it was begun."""
        fact = self.ledger.get(self.write, BEGUN)
        return None if fact is None else fact.body

    def begin(self, wanted: bytes) -> bytes:
        """Record the job's definition; return the first recorded one, which may differ from `wanted`."""
        return self.ledger.settle(self.write, BEGUN, wanted).body

    def run(self, steps: JobSteps) -> int:
        """Run all remaining steps. Return how many this process ran or found done."""
        count = 0
        while True:
            if count % _CHECKPOINT_STEPS == 0:
                self.ledger.checkpoint()
            self.ledger.refresh()
            newest = self.ledger.newest_done(self.write)
            epoch = 0 if newest is None else newest.epoch + 1
            planned = self.ledger.get(self.write, PLANNED, epoch)
            found = planned is not None  # an earlier start, or another process, has planned it
            if planned is None:
                wanted = steps.plan(newest)
                if wanted is None:
                    return count
                planned = self.ledger.settle(self.write, PLANNED, wanted, epoch)
            if not (found and self._in_target(planned)):
                try:
                    steps.write(epoch, planned.body)
                except Exception as error:
                    if self._done_meanwhile(epoch):
                        continue
                    raise typed(error) from error
            self.ledger.settle(self.write, DONE, steps.done(epoch, planned.body), epoch)
            count += 1

    def _in_target(self, planned: JobFact) -> bool:
        """Whether a step is already in the target. Raises Stale if the target may have forgotten that."""
        target, log = self.target, self.log
        held = log.run(lambda twin: twin.held_name(target.name, data_name(self.write), topic_id=target.id))
        if held.expected >= first_sequence(planned.epoch + 1):
            return True
        silent_s = age_s(planned)
        if self.repeatable or held.expected or silent_s < _TTL_SHARE * target.session_ttl_s:
            return False
        raise Stale(
            f"step {planned.epoch} of job {self.write!r} was begun {silent_s:.0f} s ago, and topic {target.name!r} "
            f"remembers writes for {target.session_ttl_s} s: it is unknown whether the step is in the topic",
            "look at the newest records of the topic; then begin another job (another name) with the missing records. "
            "Start jobs again sooner, or give the topic a longer session_ttl_s",
        )

    def _done_meanwhile(self, epoch: int) -> bool:
        """Whether another process did a step; then the error of this process does not matter."""
        try:
            self.ledger.refresh()
        except EmbarcaderoError:
            return False
        newest = self.ledger.newest_done(self.write)
        return newest is not None and newest.epoch >= epoch


# --- names ------------------------------------------------------------------------------------------------------------
def write_name(kind: str, name: str | None, *arguments: str) -> str:
    """The name of a job's write: its own name, or a hash of its arguments, so that the same command continues."""
    if name is None:
        name = blake2b("\0".join(arguments).encode(), digest_size=8).hexdigest()
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX or "/" in name:
        raise BadName(f"{name!r} is not a valid name of a job", f"use 1 to {NAME_BYTES_MAX} bytes without '/'")
    return f"job/{kind}/{name}"


def check_target(name: str) -> None:
    """Refuse a target that belongs to the cluster."""
    if name.startswith(HIDDEN_PREFIX):
        raise BadName(
            f"{name!r} is a hidden topic of the cluster", "name a topic of your own: jobs write only into those"
        )


# --- writing ----------------------------------------------------------------------------------------------------------
def task_writer(log: Log, target: TopicInfo, *, keyed: bool = True) -> TaskWriter:
    """Return a writer for tasks whose rows have the target's columns; keys choose partitions if `keyed`."""
    info = msgspec.structs.replace(target, ranges=[], lanes=[])
    key = (target.key or None) if target.versions.typed else "key"
    shape = FrameShape(info, tuple(target.versions.newest.names), None, key if keyed else None, (), 0)
    return TaskWriter(WriteOptions(brokers=log.address, topic=target.name), shape)


def work_of(write: str, epoch: int) -> WriteWork:
    """The work of one step's tasks; each try is another attempt."""
    return WriteWork(write, epoch, uuid4().hex)


def encode_staged(staged: Staged) -> bytes:
    """Encode a task's report to the driver as a cell of a frame."""
    return msgspec.msgpack.encode(staged)


def publish_staged(tasks: TaskWriter, answers: Sequence[tuple[int, bytes]]) -> None:
    """Commit the tasks' staged batches, in the order of the tasks' numbers."""
    decoded = [msgspec.msgpack.decode(staged, type=Staged) for _, staged in sorted(answers)]
    publish(tasks, [StagedMessage(staged) for staged in decoded])


def stage_spans(
    spark: SparkSession,
    tasks: TaskWriter,
    write: str,
    epoch: int,
    spans: Sequence[TaskSpan],
    batches: Callable[[TaskSpan], Iterator[Encoded]],
) -> list[tuple[int, bytes]]:
    """Run a task for each span that stages its batches; return the reports of the tasks with their numbers."""
    work = work_of(write, epoch)

    def stage(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for number in part.column(0).to_pylist():
                staged = tasks.stage(work, batches(spans[number]))
                yield pa.RecordBatch.from_pydict({"number": [number], "staged": [encode_staged(staged)]})

    found = spark.range(0, len(spans), 1, len(spans)).mapInArrow(stage, STAGED_DDL).collect()
    return [(row.number, bytes(row.staged)) for row in found]


# --- errors -----------------------------------------------------------------------------------------------------------
def typed(error: Exception) -> EmbarcaderoError:
    """Convert an error from Spark into a typed one: the last typed error in its traceback, if there is one."""
    if isinstance(error, EmbarcaderoError):
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [match for line in lines if (match := _TYPED.search(line))]
    if named:
        return from_wire(named[-1][1], named[-1][2])
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    reason = (causes[-1:] or lines or [type(error).__name__])[0]
    return OutcomeUnknown(
        f"Spark did not complete a step of the job: {reason[:500]}",
        "the topic has all rows of the step or none, and no row twice; start the job again",
    )
