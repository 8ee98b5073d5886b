"""From a frame's columns to a topic's: checked on the driver before any task runs, converted in the tasks.

A raw topic takes `value`, and optionally `key`, `headers`, `timestamp` and `partition`. A topic with a schema takes its
own columns, and `_partition`. Without the option `topic`, a column `topic` chooses the topic of each row: such rows are
divided first (`Router`), and their topics have no schema. Options are one table of names (`WRITE_OPTIONS`); an error
names the option and the allowed values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from embarcadero.client.results import TopicInfo
from embarcadero.errors import BadSchema, BadValue, UnknownTopic
from embarcadero.limits import BATCH_BYTES_DEFAULT, FRAME_BYTES_MAX, STAGED_TTL_S_MIN, WRITE_NAME_BYTES_MAX
from embarcadero.spark.read.options import brokers_of, named, topic_of
from embarcadero.spark.read.tasks import frame_type
from embarcadero.staging.manifest import EPOCH_MAX
from embarcadero.tier.columns import table_type
from embarcadero.types import HIDDEN_PREFIX, Order
from embarcadero.wire.partitioners import NO_PARTITION, is_key_type, partitions_of
from embarcadero.wire.schemas import COMPRESSIONS, RAW_SCHEMA, TopicSchemas

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log


# --- options ----------------------------------------------------------------------------------------------------------
WRITE_OPTIONS: Final = {
    "brokers": "addresses of brokers, host:port with commas",
    "topic": "the topic's name; without it the column `topic` names the topic of each row",
    "writeId": "a name of this write, the same when it is repeated; batch writes only",
    "batchId": "with writeId: a number that grows from write to write, as in foreachBatch",
    "orderBy": "columns by which the rows of a task are sorted first, names with commas",
    "keyColumn": "of a topic with a schema: the column whose hash chooses the partition",
    "batchBytes": f"the size of batches in bytes, 1 to {FRAME_BYTES_MAX}",
    "compression": "lz4, zstd or none",
    "addColumns": "true or false; true adds missing columns to a topic with a schema",
    "checkpointLocation": "where Spark keeps the state of a stream",
}
"""Options of a write. Names are the same in upper and lower case, as everywhere in Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Options of a write, checked."""

    brokers: str
    topic: str | None
    write_id: str | None = None
    batch_id: int = 0
    order_by: tuple[str, ...] = ()
    key_column: str | None = None
    batch_bytes: int = BATCH_BYTES_DEFAULT
    compression: str | None = None
    add_columns: bool = False


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Return the options of a batch write or of a stream. BadValue names a wrong option and the allowed values."""
    options = named(given, WRITE_OPTIONS)
    for name in ("writeId", "batchId") if streaming else ():
        if name in options:
            raise BadValue(
                f"option {name!r} can't be used with a stream", "leave it out: the checkpoint names the write"
            )
    if "batchId" in options and "writeId" not in options:
        raise BadValue("option 'batchId' is given without 'writeId'", f"it is: {WRITE_OPTIONS['batchId']}")
    compression = _one_of(options, "compression", ("none", *COMPRESSIONS))
    return WriteOptions(
        brokers=brokers_of(options),
        topic=topic_of(options) if "topic" in options else None,
        write_id=_name(options),
        batch_id=_number(options, "batchId", 0, 0, EPOCH_MAX),
        order_by=_columns(options),
        key_column=options.get("keyColumn"),
        batch_bytes=_number(options, "batchBytes", BATCH_BYTES_DEFAULT, 1, FRAME_BYTES_MAX),
        compression=None if compression == "none" else compression,
        add_columns=_one_of(options, "addColumns", ("true", "false")) == "true",
    )


def _bad(options: Mapping[str, str], name: str, problem: str) -> BadValue:
    return BadValue(f"option {name!r} is {options[name]!r}: {problem}", WRITE_OPTIONS[name])


def _name(options: Mapping[str, str]) -> str | None:
    if "writeId" not in options:
        return None
    if not 0 < len(options["writeId"].encode()) <= WRITE_NAME_BYTES_MAX:
        raise _bad(options, "writeId", f"it does not have 1 to {WRITE_NAME_BYTES_MAX} bytes")
    return options["writeId"]


def _number(options: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    text = options.get(name, str(usual)).strip()
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise _bad(options, name, f"it is not a number from {least} to {most}")
    return int(text)


def _columns(options: Mapping[str, str]) -> tuple[str, ...]:
    if "orderBy" not in options:
        return ()
    names = [name.strip() for name in options["orderBy"].split(",")]
    if "" in names or len(set(names)) < len(names):
        raise _bad(options, "orderBy", "it has an empty or a repeated name")
    return tuple(names)


def _one_of(options: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    if name in options and options[name] not in allowed:
        raise _bad(options, name, "it is none of the allowed values")
    return options.get(name)


# --- rows -------------------------------------------------------------------------------------------------------------
_RAW_COLUMNS: Final = (*RAW_SCHEMA.names, "partition", "topic")
_TEXT: Final = (kinds.is_binary, kinds.is_string, kinds.is_large_binary, kinds.is_large_string)


Split = Callable[[list[pa.RecordBatch]], Iterable[tuple["FrameShape", list[pa.RecordBatch]]]]
"""Divides rows by their topic."""
COLUMN: Final = "topic"
_SPREAD: Final = 64  # a guess: rows that choose their topic go to about this many topics and partitions
_HOW: Final = "the column 'topic' chooses the topic of each row, unless the option 'topic' is given"


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Conversion of a frame's rows to rows of a topic. It is sent to tasks, so it holds plain data only."""

    topic: TopicInfo
    names: tuple[str, ...]  # the frame's columns
    partition_column: str | None
    key_column: str | None
    order_by: tuple[str, ...]
    now_us: int  # raw records without a time get this one

    @property
    def spread(self) -> int:
        """How many partitions rows may go to."""
        return self.topic.partitions

    def splitter(self, log: Log) -> Split:  # noqa: ARG002 - Routes.splitter needs it
        """Return the function that divides rows by topic: all rows go into this topic."""
        return lambda group: [(self, group)]

    def rows(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """Convert rows to the topic's columns and types. BadSchema names a column whose values do not fit."""
        table = pa.Table.from_batches(batches)
        wanted, count = self.topic.versions.newest, table.num_rows
        columns = [self._column(table, field, count) for field in wanted]
        return pa.RecordBatch.from_arrays(columns, schema=wanted)

    def _column(self, table: pa.Table, field: pa.Field, count: int) -> pa.Array:
        if field.name not in self.names:
            if field.name == "timestamp" and not self.topic.versions.typed:
                return pa.array(np.full(count, self.now_us)).view(field.type)
            return pa.nulls(count, field.type)
        column = whole(table.column(field.name))
        if column.null_count and not field.nullable:
            raise BadSchema(f"column {field.name!r} has nulls, and the topic allows none there", "filter or fill them")
        try:
            return column if column.type == field.type else _cast(column, field.type)
        except pa.ArrowException as error:
            raise BadSchema(
                f"column {field.name!r} is {field.type} in topic {self.topic.name!r}; a value does not fit: {error}",
                "cast or filter it before it is written",
            ) from None

    def partitions(self, batches: Sequence[pa.RecordBatch], rows: pa.RecordBatch, task: int) -> npt.NDArray[np.int32]:
        """The topic's partition of each row: from its column, by its key, or one for all rows of a task."""
        partitions, count = self.topic.partitions, rows.num_rows
        usual = np.full(count, task % partitions, dtype=np.int32)
        if self.partition_column is not None:
            asked = whole(pa.Table.from_batches(batches).column(self.partition_column)).cast(pa.int64())
            return _asked_partitions(asked, partitions)
        if self.key_column is None or partitions == 1:
            return usual
        found = partitions_of(rows.column(self.key_column), partitions, self.topic.partitioner)
        chosen: npt.NDArray[np.int32] = np.where(found == NO_PARTITION, usual, found)
        return chosen


def _asked_partitions(asked: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    if asked.null_count:
        raise BadValue("a row has no partition", "fill the column, or leave it out")
    numbers = np.asarray(asked)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < partitions:
        raise BadValue(
            f"rows name partitions from {numbers.min()} to {numbers.max()}", f"the topic has 0 to {partitions - 1}"
        )
    return numbers.astype(np.int32)


def whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    if kinds.is_null(wanted):
        if column.null_count < len(column):
            raise pa.ArrowInvalid("the topic's column has nulls only")
        return pa.nulls(len(column))
    made = pc.cast(pc.cast(column, table_type(wanted)), wanted)  # through the type that a read returns, and back
    if kinds.is_float16(wanted) and not pc.cast(made, column.type).equals(column):
        raise pa.ArrowInvalid("it would lose digits")
    return made


# --- on the driver ----------------------------------------------------------------------------------------------------
def shape_of(topic: TopicInfo, frame: pa.Schema, options: WriteOptions, now_us: int) -> FrameShape:
    """Plan how a frame is written into a topic. Raises BadSchema or BadValue with all problems together.

    `now_us` is the time of raw records without one.
    """
    check_topic(topic)
    typed = topic.versions.typed
    partition = "_partition" if typed else "partition"
    partition_column = partition if partition in frame.names and partition not in topic.versions.newest.names else None
    schemas = topic.versions
    problems = _typed_problems(schemas, frame, partition_column) if typed else raw_problems(frame)
    if partition_column is not None and not kinds.is_integer(frame.field(partition).type):
        problems.append(f"column {partition!r} is {frame.field(partition).type}, not a number")
    known = schemas.newest.names if typed else RAW_SCHEMA.names
    problems += [f"option 'orderBy': there is no column {name!r}" for name in options.order_by if name not in known]
    key, more = _key_column(topic, schemas, options)
    if problems := problems + more:
        hint = f"it has: {', '.join(f'{field.name} {field.type}' for field in schemas.newest)}"
        raise BadSchema(f"the frame does not fit topic {topic.name!r}: " + "; ".join(problems), hint)
    info = msgspec.structs.replace(topic, ranges=[], lanes=[])
    return FrameShape(info, tuple(frame.names), partition_column, key, options.order_by, now_us)


def check_topic(topic: TopicInfo) -> None:
    """Raise BadValue for a topic into which Spark can't write."""
    if topic.name.startswith(HIDDEN_PREFIX):
        raise BadValue(
            f"topic {topic.name!r} is a hidden topic of the cluster", "write into a topic that you have created"
        )
    if topic.order <= Order.BROKER:
        raise BadValue(
            f"topic {topic.name!r} has order {topic.order}, which does not detect duplicate batches",
            "write into a topic of order 2 or 5",
        )
    if topic.session_ttl_s < STAGED_TTL_S_MIN:
        raise BadValue(
            f"topic {topic.name!r} has a session_ttl_s of {topic.session_ttl_s}: it would forget a write that is still "
            "running",
            f"set at least {STAGED_TTL_S_MIN}: embarcadero topic alter {topic.name} --session-ttl-s 86400",
        )


def _typed_problems(schemas: TopicSchemas, frame: pa.Schema, partition: str | None) -> list[str]:
    problems = []
    for field in schemas.newest:
        if field.name not in frame.names:
            if not field.nullable:
                problems.append(f"column {field.name!r} is missing, and may not be null")
        elif not fits(frame.field(field.name).type, field.type, field.name):
            have = frame.field(field.name).type
            problems.append(f"column {field.name!r} is {have} in the frame and {field.type} in the topic")
    others = [name for name in frame.names if name not in schemas.newest.names and name != partition]
    problems += [f"column {name!r} is unknown" for name in others]
    if others:
        problems.append("to add them to the topic give the option addColumns=true")
    return problems


def new_columns(topic: TopicInfo, frame: pa.Schema) -> list[pa.Field]:
    """Columns of a frame that a topic with a schema lacks, as fields for the topic."""
    known = {*topic.versions.newest.names, "_partition"}
    return [field.with_nullable(True) for field in frame if field.name not in known] if topic.versions.typed else []


def raw_problems(frame: pa.Schema) -> list[str]:
    """Reasons why a frame can't be written into topics without a schema."""
    others = [name for name in frame.names if name not in _RAW_COLUMNS]
    problems = [f"column {name!r} is unknown (there are {', '.join(_RAW_COLUMNS)})" for name in others]
    if "value" not in frame.names:
        problems.append("column 'value' is missing")
    problems += [
        f"column {name!r} is {frame.field(name).type}, not binary or string"
        for name in ("key", "value")
        if name in frame.names and not any(is_kind(frame.field(name).type) for is_kind in _TEXT)
    ]
    for name in ("headers", "timestamp"):
        wanted = RAW_SCHEMA.field(name).type
        if name in frame.names and not fits(frame.field(name).type, wanted, name):
            problems.append(f"column {name!r} is {frame.field(name).type}, not {wanted}")
    return problems


def _key_column(topic: TopicInfo, schemas: TopicSchemas, options: WriteOptions) -> tuple[str | None, list[str]]:
    name = options.key_column or topic.key or None
    if not schemas.typed:
        wrong = name not in (None, "key")
        return "key", ["option 'keyColumn' is for topics with a schema; here it is `key`"] if wrong else []
    if name is None:
        return None, []
    if name not in schemas.newest.names:
        return None, [f"option 'keyColumn': there is no column {name!r}"]
    if not is_key_type(schemas.newest.field(name).type):
        problem = f"{name!r} is {schemas.newest.field(name).type}, not binary, string or an integer"
        return None, [f"option 'keyColumn': {problem}"]
    return name, []


def fits(have: pa.DataType, wanted: pa.DataType, column: str) -> bool:
    """Whether a Spark type suits a topic's column: the type that a read returns for it, or a narrower one."""
    known = frame_type(table_type(wanted, column))
    if _same(have, known) or (_same(have, table_type(have, column)) and _same(table_type(have, column), known)):
        return True
    if kinds.is_integer(have) and kinds.is_integer(known):
        return bool(have.bit_width <= known.bit_width)
    if kinds.is_floating(have) and kinds.is_floating(known):
        return bool(have.bit_width <= known.bit_width)
    return any(is_kind(have) for is_kind in _TEXT[1::2]) and any(is_kind(known) for is_kind in _TEXT[1::2])


def _same(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether types are equal except for the names and nullability of nested fields."""
    if kinds.is_nested(one) or kinds.is_nested(other):
        if type(one) is not type(other) or one.num_fields != other.num_fields:
            return False
        pairs: list[tuple[Any, Any]] = [(one.field(at), other.field(at)) for at in range(one.num_fields)]
        named = all(mine.name == theirs.name for mine, theirs in pairs) or not kinds.is_struct(one)
        return named and all(_same(mine.type, theirs.type) for mine, theirs in pairs)
    return bool(one.equals(other))


@dataclass(frozen=True, slots=True)
class Routes:
    """Conversion of a frame's rows to rows of the topics that they name. It is sent to tasks: plain data only."""

    topic: TopicInfo  # the home of such writes: its log has their decisions
    frame: pa.Schema
    options: WriteOptions
    now_us: int
    spread: int = _SPREAD

    def splitter(self, log: Log) -> Split:
        """Return the function that divides rows by topic."""
        return Router(log, self).split


def check_frame(frame: pa.Schema, options: WriteOptions) -> None:
    """Raise BadValue or BadSchema, with all problems together, for a frame whose rows can't choose their topic."""
    problems = raw_problems(frame)
    if COLUMN not in frame.names:
        raise BadValue("option 'topic' is missing, and the frame has no column 'topic'", _HOW)
    kind = frame.field(COLUMN).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        problems.append(f"column 'topic' is {kind}, not a string")
    if options.key_column not in (None, "key"):
        problems.append("option 'keyColumn' is for topics with a schema; here it is `key`")
    if problems:
        raise BadSchema(f"the frame does not fit topics without a schema: {'; '.join(problems)}", _HOW)


class Router:
    """Divides the rows of one task by their topic. Each topic is looked up once."""

    def __init__(self, log: Log, routes: Routes) -> None:
        self._log, self._routes = log, routes
        self._shapes: dict[str, FrameShape] = {}

    def split(self, group: list[pa.RecordBatch]) -> Iterator[tuple[FrameShape, list[pa.RecordBatch]]]:
        """Divide rows by topic, in the order of their arrival."""
        table = pa.Table.from_batches(group)
        named = whole(table.column(COLUMN))
        if named.null_count:
            row = int(np.flatnonzero(np.asarray(named.is_null()))[0])
            raise BadValue(
                f"{named.null_count} rows have no topic: column 'topic' is null, first in {_shown(table, row)}",
                "fill the column or filter such rows; the option 'topic' sends all rows into one topic",
            )
        names = pc.dictionary_encode(named)
        codes = np.asarray(names.indices)
        for code, name in enumerate(names.dictionary.to_pylist()):
            rows = pa.array(np.flatnonzero(codes == code))
            yield self._shape(name), table.take(rows).combine_chunks().to_batches()

    def _shape(self, name: str) -> FrameShape:
        if name not in self._shapes:
            self._shapes[name] = self._found(name)
        return self._shapes[name]

    def _found(self, name: str) -> FrameShape:
        how = "in column 'topic'"
        if name.startswith(HIDDEN_PREFIX):
            raise BadValue(
                f"topic {name!r} {how} is a hidden topic of the cluster", "name a topic that you have created"
            )
        try:
            topic = self._log.describe(name)
        except UnknownTopic as error:
            raise UnknownTopic(f"there is no topic {name!r}, named {how}", error.hint) from None
        check_topic(topic)
        if topic.versions.typed:
            raise BadSchema(
                f"topic {name!r} {how} has a schema",
                "rows can choose only topics without a schema: write into this topic with the option 'topic'",
            )
        return shape_of(topic, self._routes.frame, self._routes.options, self._routes.now_us)


def _shown(table: pa.Table, row: int) -> str:
    """Describe a row for an error: its key, if it has one, and the beginning of its value."""
    values = [(name, table.column(name)[row].as_py()) for name in ("key", "value") if name in table.column_names]
    return ", ".join(f"{name} {value!r:.40}" for name, value in values)
