"""Compaction: the newest record of each key of a topic, in another topic that follows it.

Each run appends the newest record of each key that changed since the last run, deletes included. So folding
`<topic>_latest` by key gives the same result as folding the topic. From time to time a step is full: it folds
everything and writes one record for each live key. Records below a full step are trimmed once it is durable and
`keep_s` old.

A step finds the newest positions first, then copies records. Spark groups keys and positions only; tasks copy the
chosen records from one topic to the other. So values never travel through Java.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, Stale, TopicExists, Trimmed, UnknownTopic
from embarcadero.limits import TOPIC_NAME_CHARS_MAX
from embarcadero.spark.jobs import (
    STAGED_DDL,
    STEP_BYTES,
    Job,
    JobFact,
    Pace,
    ProgressReport,
    TopicRows,
    TopicSource,
    check_target,
    encode_staged,
    publish_staged,
    task_writer,
    work_of,
)
from embarcadero.spark.read.options import BEGINNING, RecordPosition, TaskSpan
from embarcadero.spark.sink import TaskWriter, WriteWork
from embarcadero.types import Order
from embarcadero.wire.schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EMPTY: Final = "empty"
NULLS: Final = "nulls"
NONE: Final = "none"
COLUMN: Final = "column"
_HINT: Final = "use none, a boolean column (deleted), or a column and its value (op=d)"
SUFFIX: Final = "_latest"
WRITE: Final = "job/compact"
"""Name of the write that compacts a topic: there is one in each target."""

KEEP_S: Final = 3_600.0
"""The records before a full step stay this long, for readers that are still reading them."""

_GROWTH: Final = 2  # a step is full when the target has this many records for each live key,
_SMALL: Final = 10_000  # and this many more
_OFFSET_BITS: Final = 40  # of a position: the number of a record in a piece; the other bits number the pieces
_OFFSET_MASK: Final = (1 << _OFFSET_BITS) - 1
_GROUPS_MAX: Final = 4_096


class Deletes(msgspec.Struct, frozen=True):
    """A record deletes its key if its value is empty (rule `empty`: topics without a schema), if all columns but the
    key are null (`nulls`), if a column is true or has a value (`column`); or never (`none`).
    """

    rule: str
    key: str
    column: str = ""
    value: str = ""

    def __str__(self) -> str:
        return self.rule if self.rule != COLUMN else f"{self.column}={self.value}" if self.value else self.column

    def kept(self, rows: pa.RecordBatch) -> pa.Array:
        """Whether each row is kept."""
        return pc.invert(self._deleting(rows))

    def _deleting(self, rows: pa.RecordBatch) -> pa.Array:
        if self.rule == EMPTY:
            return pc.equal(pc.binary_length(rows.column("value")), 0)
        found = pa.repeat(pa.scalar(self.rule == NULLS), rows.num_rows)
        if self.rule == NULLS:
            for name in rows.schema.names:
                found = found if name == self.key else pc.and_(found, rows.column(name).is_null())
        elif self.rule == COLUMN:
            column = rows.column(self.column)
            found = column if not self.value else pc.equal(pc.cast(column, pa.string()), self.value)
        return pc.fill_null(found, False)

    def sql(self, names: list[str]) -> str:
        """Return the same rule as a condition of Spark SQL, over a frame with these columns."""
        if self.rule == EMPTY:
            return "length(value) = 0"
        if self.rule == NULLS:
            return " and ".join(f"`{name}` is null" for name in names if name != self.key)
        if self.rule == NONE:
            return "false"
        if not self.value:
            return f"`{self.column}`"
        value = self.value.replace("\\", "\\\\").replace("'", "\\'")
        return f"cast(`{self.column}` as string) = '{value}'"


def deletes_of(schemas: TopicSchemas, key: str, text: str | None) -> Deletes:
    """Return the rule that a caller names, or the default of a topic. BadValue if the topic can't have this rule."""
    if text == NONE:
        return Deletes(NONE, key)
    if not schemas.typed:
        if text not in (None, EMPTY):
            raise BadValue(
                f"deletes {text!r} can't be used with a topic without a schema", "use empty (default) or none"
            )
        return Deletes(EMPTY, key)
    fields = {field.name: field for field in schemas.newest if field.name != key}
    if text is None or text == NULLS:
        can = bool(fields) and all(field.nullable for field in fields.values())
        if text == NULLS and not can:
            raise BadValue(f"deletes {text!r}: a column other than the key {key!r} is not nullable", _HINT)
        return Deletes(NULLS if can else NONE, key)
    column, equals, value = text.partition("=")
    if column not in fields:
        raise BadValue(f"deletes {text!r}: there is no column {column!r} other than the key", _HINT)
    kind = fields[column].type
    if not equals and not kinds.is_boolean(kind):
        raise BadValue(f"deletes {text!r}: column {column!r} is {kind}, not bool", _HINT)
    if equals and not (value and (kinds.is_integer(kind) or kinds.is_string(kind) or kinds.is_large_string(kind))):
        raise BadValue(
            f"deletes {text!r}: a value can be compared with a column of text or integers only, not with {kind}", _HINT
        )
    return Deletes(COLUMN, key, column, value)


class _CompactionBegun(msgspec.Struct, frozen=True):
    """The definition of a compaction."""

    source: str
    source_id: int
    deletes: Deletes


class _CompactionStep(msgspec.Struct, frozen=True):
    """Compact [start, stop) of the source; a full step also folds [base_start, base_stop) of the target."""

    lane: int
    start: RecordPosition
    stop: RecordPosition
    base: tuple[int, RecordPosition, RecordPosition] | None  # lane, start, stop


class _Done(msgspec.Struct, frozen=True):
    """The source is compacted below `stop`. The newest full step has `live` records from seq `base` on."""

    stop: RecordPosition
    base: int
    live: int
    full_us: int


@dataclass(frozen=True, slots=True)
class Compacted:
    """Result of a run: its `steps`; the target now follows the source up to `seq`, and has `records`."""

    topic: str
    into: str
    steps: int
    seq: int
    records: int


def latest_name(topic: str) -> str:
    """The name of the topic that has the newest record of each key."""
    if len(topic) + len(SUFFIX) > TOPIC_NAME_CHARS_MAX:
        raise BadValue(f"topic {topic!r} has a name of {len(topic)} characters", "name the target: into=...")
    return topic + SUFFIX


def compact(
    spark: SparkSession,
    log: Log,
    topic: str,
    *,
    into: str | None = None,
    deletes: str | None = None,
    full: bool = False,
    keep_s: float = KEEP_S,
    step_bytes: int = STEP_BYTES,
    report: ProgressReport | None = None,
) -> Compacted:
    """Bring `<topic>_latest` (or `into`) up to the durable end of a topic: the newest record of each key.

    A run reads only records since the last run. If it is killed, the next run continues; two runs at the same time do
    nothing twice.

    Arguments: `deletes` names the records that delete their key (see `Deletes`). `full` rewrites everything, which also
    happens automatically from time to time; the first run that ends `keep_s` later or more trims the records before it.
    `step_bytes` is the payload of one step. `report` is called after each step.

    Returns what this run did. Raises BadValue for a topic whose records have no keys, Trimmed if records were trimmed
    before they were compacted.

        compact(embarcadero.spark.session(), emb.connect(), "customers")
        latest(spark, log, "customers").show()
    """
    target_name = into or latest_name(topic)
    check_target(target_name)
    about = log.describe(topic)
    if target_name == topic:
        raise BadValue(f"topic {topic!r} can't be compacted into itself", "name another target")
    rule = _checked_source(log, about, target_name, deletes)
    target = _open_target(log, about, target_name)
    job = Job.of(log, target, WRITE, repeatable=True)
    _begin(job, about, rule)
    steps = _Compaction(spark, job, TopicSource(log, about), _Request(rule, full, Pace(step_bytes, report=report)))
    count = job.run(steps)
    _trim(job, keep_s)
    tail = log.tail(target.name)
    return Compacted(topic, target.name, count, steps.newest.stop.seq, tail.records(tail.start_seq, tail.seq))


def latest(spark: SparkSession, log: Log, topic: str, *, into: str | None = None) -> DataFrame:
    """Return the newest record of each key of a topic as of its last compaction: one row for each live key.

    The columns are the topic's own. Raises UnknownTopic if the topic was never compacted.

        latest(spark, log, "customers").createOrReplaceTempView("customers_now")
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    name = into or latest_name(topic)
    try:
        target = log.describe(name)
    except UnknownTopic as error:
        raise UnknownTopic(error.message, f"compact it first: embarcadero pipeline compact {topic}") from None
    begun = Job.of(log, target, WRITE, repeatable=True).begun()
    if begun is None:
        raise BadValue(f"topic {name!r} is not the target of a compaction", "name the topic that was compacted")
    rule = msgspec.json.decode(begun, type=_CompactionBegun).deletes
    key, seq = _key(target), "_seq" if target.versions.typed else "seq"
    own = target.versions.newest.names
    frame = spark.read.format("embarcadero").options(brokers=log.address, topic=name, columns=",".join([*own, seq]))
    newest = f.row_number().over(Window.partitionBy(f.col(f"`{key}`")).orderBy(f.col(seq).desc()))
    found = frame.load().withColumn("__newest", newest).where("__newest = 1")
    found = found.where(f"not coalesce({rule.sql(own)}, false)")
    return found.select(*(f"`{name}`" for name in own))


# --- before the first step --------------------------------------------------------------------------------------------
def _key(topic: TopicInfo) -> str:
    """The key column."""
    return topic.key if topic.versions.typed else "key"


def _checked_source(log: Log, about: TopicInfo, target: str, deletes: str | None) -> Deletes:
    """Check that a topic can be compacted; return its rule for deletes."""
    if about.order <= Order.BROKER:
        raise BadValue(
            f"topic {about.name!r} has order {about.order}: it does not order the records of a key",
            "compact a topic of order 2 or 5",
        )
    if not _key(about):
        raise BadValue(
            f"topic {about.name!r} has no keys: its schema has no key column",
            "create a topic with key=..., and load this one into it: embarcadero pipeline load",
        )
    rule = deletes_of(about.versions, _key(about), deletes)
    try:
        log.describe(target)
    except UnknownTopic:
        if not about.versions.typed:
            _check_keys(log, about)
    return rule


def _check_keys(log: Log, about: TopicInfo) -> None:
    """Raise BadValue if a topic has records, and none of them has a key. Reads until it finds a key."""
    records = 0
    for batches in log.scan(about.name):
        for batch in batches:
            records += batch.count
            if batch.count and batch.to_arrow().column("key").null_count < batch.count:
                return
    if records:
        raise BadValue(
            f"topic {about.name!r} has no keys: none of its {records} records has one", "publish records with keys"
        )


def _open_target(log: Log, about: TopicInfo, name: str) -> TopicInfo:
    """Return the target; create it like the source if it does not exist, and add the source's new columns."""
    schema = about.schema
    try:
        target = log.describe(name)
    except UnknownTopic:
        try:
            target = log.create_topic(
                name,
                order=about.order,
                partitions=about.partitions,
                replicas=about.replicas,
                durable_on=about.durable_on,
                schema=schema,
                partitioner=about.partitioner,
                key=about.key or None,
                retention_bytes=0,
                retention_s=0,
            )
        except TopicExists:
            target = log.describe(name)
    if target.id == about.id:
        raise BadValue(f"topic {about.name!r} can't be compacted into itself", "name another target")
    if (target.schema is None) != (schema is None) or _key(target) != _key(about):
        raise BadSchema(
            f"topic {name!r} has columns or a key other than those of topic {about.name!r}", "name another target"
        )
    if schema is not None and not schema.equals(target.schema):
        target = log.alter_topic(name, schema=schema)  # raises BadSchema if the change is not only new columns
    return target


def _begin(job: Job, about: TopicInfo, rule: Deletes) -> None:
    wanted = _CompactionBegun(about.name, about.id, rule)
    if job.begun() is None and job.log.tail(job.target.name).seq:
        raise BadValue(
            f"topic {job.target.name!r} has records that no compaction wrote", "name another target, or delete it"
        )
    begun = msgspec.json.decode(job.begin(msgspec.json.encode(wanted)), type=_CompactionBegun)
    if begun.source_id != wanted.source_id:
        raise Stale(
            f"topic {job.target.name!r} follows another topic, {begun.source!r} with another id",
            f"delete {job.target.name!r} to start over, or name another target",
        )
    if begun.deletes != wanted.deletes:
        raise BadValue(
            f"the compaction of {about.name!r} was begun with deletes {str(begun.deletes)!r}, not {str(rule)!r}",
            f"give the same, or delete {job.target.name!r} to start over",
        )


# --- steps ------------------------------------------------------------------------------------------------------------
class _Request(NamedTuple):
    """Arguments of one call: the rule for deletes, whether to rewrite everything, the size of steps."""

    deletes: Deletes
    full: bool
    pace: Pace


class _Compaction:
    """The steps of a run."""

    def __init__(self, spark: SparkSession, job: Job, source: TopicSource, request: _Request) -> None:
        self._spark, self._job, self._source = spark, job, source
        self._deletes, self._full, self._pace = request
        self._target = TopicSource(job.log, job.target)
        self._steps = 0
        self.newest = _Done(BEGINNING, 0, 0, 0)

    def plan(self, newest: JobFact | None) -> bytes | None:
        """Plan a step from the frontier on."""
        (lane,) = self._source.now().lanes.values()
        if newest is not None:
            self.newest = msgspec.json.decode(newest.body, type=_Done)
        start, base = self.newest.stop, self.newest
        if newest is None:
            start = lane.start
        elif start.seq < lane.start.seq:
            raise Trimmed(
                f"records {start.seq} to {lane.start.seq} of topic {self._source.about.name!r} were trimmed before "
                "they were compacted",
                f"delete {self._job.target.name!r} to start over with the remaining records; keep records longer, or "
                "compact more often",
            )
        self._pace.announce(self._steps, start.seq, lane.end.seq)
        held = self._job.log.tail(self._job.target.name)
        grown = held.records(base.base, held.durable_seq) if newest is not None else 0
        if start.seq >= lane.end.seq and not (self._full and grown > base.live):
            return None
        is_full = newest is None or self._full or grown > _GROWTH * base.live + _SMALL
        self._full = False  # once is enough
        span = self._source.step(lane.lane, start, lane.end, self._pace.step_bytes)
        low = RecordPosition(held.start_index, held.start_seq)
        high = RecordPosition(held.durable_index, held.durable_seq)
        step = _CompactionStep(lane.lane, span.start, span.stop, (held.lane, low, high) if is_full else None)
        return msgspec.json.encode(step)

    def write(self, epoch: int, plan: bytes) -> None:
        """Find the newest position of each key, then copy these records."""
        step = msgspec.json.decode(plan, type=_CompactionStep)
        pieces = []
        if step.base is not None:
            pieces = [(self._target.rows, piece) for piece in self._target.pieces(self._target.span(*step.base))]
        own = self._source.pieces(self._source.span(step.lane, step.start, step.stop))
        pieces += [(self._source.rows, piece) for piece in own]
        tasks = task_writer(self._job.log, self._job.target)
        if pieces:
            rule = None if step.base is None else self._deletes
            positions = _newest(self._spark, pieces, self._job.target)
            copier = _copier(pieces, tasks, work_of(self._job.write, epoch), rule)
            copied = positions.applyInArrow(copier, STAGED_DDL).collect()
            publish_staged(tasks, [(row.number, bytes(row.staged)) for row in copied])

    def done(self, epoch: int, plan: bytes) -> bytes:  # noqa: ARG002 - see JobSteps
        """Return the frontier, and the size of the newest full step."""
        step = msgspec.json.decode(plan, type=_CompactionStep)
        self._steps += 1
        if step.base is None:
            return msgspec.json.encode(msgspec.structs.replace(self._before(), stop=step.stop))
        held, base = self._job.log.tail(self._job.target.name), step.base[2].seq
        live = held.records(base, held.durable_seq)
        return msgspec.json.encode(_Done(step.stop, base, live, time.time_ns() // 1000))

    def _before(self) -> _Done:
        newest = self._job.ledger.newest_done(self._job.write)
        return self.newest if newest is None else msgspec.json.decode(newest.body, type=_Done)


_Piece = tuple[TopicRows, TaskSpan]


def _newest(spark: SparkSession, pieces: list[_Piece], target: TopicInfo) -> Any:
    """The newest position of each key, grouped by piece. Later pieces have newer records, as have later offsets."""
    key = _key(target)

    def positions(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for number in part.column(0).to_pylist():
                rows, span = pieces[number]
                for columns, seq, _ in rows.read(span):
                    keys = columns.column(key)
                    first = (number << _OFFSET_BITS) + seq - span.start.seq
                    numbers = pa.array(np.arange(first, first + columns.num_rows))
                    found = pa.RecordBatch.from_arrays([plain_key(keys), numbers], names=["key", "position"])
                    yield found.filter(keys.is_valid()) if keys.null_count else found

    kind = "long" if kinds.is_integer(target.versions.newest.field(key).type) else "binary"
    frame: Any = spark.range(0, len(pieces), 1, len(pieces)).mapInArrow(positions, f"key {kind}, position long")
    newest = frame.groupBy("key").max("position").withColumnRenamed("max(position)", "position")
    split = newest.selectExpr(f"shiftright(position, {_OFFSET_BITS}) piece", f"position & {_OFFSET_MASK}L offset")
    return split.repartition(min(len(pieces), _GROUPS_MAX), "piece").groupBy("piece")


def plain_key(keys: pa.Array) -> pa.Array:
    """Keys as Spark groups them: text as bytes, integers as 64 bits; different keys stay different."""
    if keys.type == pa.uint64():
        return keys.view(pa.int64())
    return keys.cast(pa.int64() if kinds.is_integer(keys.type) else pa.binary())


def _copier(
    pieces: list[_Piece], tasks: TaskWriter, work: WriteWork, drop: Deletes | None
) -> Callable[[pa.Table], pa.Table]:
    """Stage the records of one piece at the offsets of a group; a full step skips records that delete."""

    def copy(group: pa.Table) -> pa.Table:
        number = group.column("piece")[0].as_py()
        offsets = np.sort(group.column("offset").to_numpy())
        rows, span = pieces[number]
        staged = tasks.write(work, number, _picked(rows, span, offsets, drop))
        return pa.table({"number": [number], "staged": [encode_staged(staged)]})

    return copy


def _picked(rows: TopicRows, span: TaskSpan, offsets: Any, drop: Deletes | None) -> Iterator[pa.RecordBatch]:
    for columns, seq, _ in rows.read(span):
        first = seq - span.start.seq
        low, high = np.searchsorted(offsets, [first, first + columns.num_rows])
        if low == high:
            continue
        whole = high - low == columns.num_rows
        picked = columns if whole else columns.take(pa.array(offsets[low:high] - first))
        if drop is not None:
            picked = picked.filter(drop.kept(picked))
        if picked.num_rows:
            yield picked


# --- after the last step ----------------------------------------------------------------------------------------------
def _trim(job: Job, keep_s: float) -> None:
    """Trim the records that the newest full step replaced, if it is old enough."""
    newest = job.ledger.newest_done(job.write)
    if newest is None:
        return
    done = msgspec.json.decode(newest.body, type=_Done)
    old = time.time_ns() // 1000 >= done.full_us + int(keep_s * 1e6)
    if old and done.base > job.log.tail(job.target.name).start_seq:
        job.log.trim(job.target.name, before_seq=done.base)
