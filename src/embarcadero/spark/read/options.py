"""Options of the source, and offsets of its streams: text that Spark keeps, checked when it comes back.

Options are one table of names (`READ_OPTIONS`). Each value is checked, and an error names the option and the allowed
values. An offset has the read position of each lane. Of one topic:

    {"topic": "orders", "id": "5c07e6a91b2f43d8", "reader": "spark-5f0c",
     "0": {"index": 120, "seq": 48000}}

Of several topics, by their ids:

    {"reader": "spark-5f0c", "topics": {
      "5c07e6a91b2f43d8": {"topic": "clicks", "3": {"index": 7, "seq": 70, "first": [2, 20]}},
      "01d27aa0f1e1b3c4": {"topic": "orders", "0": {"index": 120, "seq": 48000}}}}

A position may be inside a batch (`within` counts the records of the batch below it), so limits on records are exact.
Lanes of topics of orders 0 and 1 come and go: a lane that was read to its end is kept, with `ended`, until the topic
drops it. `id` is the topic's id: a topic that was deleted and created again has another one. `first` is the first
position read of a topic that is newer than the query. Earlier versions also wrote the cuts of a micro-batch into tasks
(`cuts`), and the first ones wrote no `id`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from embarcadero.client.arguments import broker_addresses, parse_addresses, time_us
from embarcadero.config import load
from embarcadero.errors import BadValue
from embarcadero.limits import PARTITIONS_MAX, READER_NAME_BYTES_MAX, SPARK_TASKS_MAX, TOPICS_MAX
from embarcadero.types import LanePosition, Span, id_text

# --- options ----------------------------------------------------------------------------------------------------------
OptionValue = TypeVar("OptionValue")

READ_OPTIONS: Final = {
    "brokers": "addresses of brokers, host:port with commas",
    "topic": "the topic's name, or several raw topics with commas",
    "topics": "the same as topic",
    "topicPattern": "a regular expression that the whole name of a raw topic matches; instead of topic",
    "startingOffsets": 'earliest, latest, a seq, or JSON by lane: {"0": {"seq": 1000}}; of several topics JSON by '
    'topic, then lane: {"orders": {"0": {"seq": 1000}}, "clicks": "earliest"}',
    "endingOffsets": "as startingOffsets, exclusive; batch reads only",
    "startingTimestamp": 'a time with a zone (2026-01-31T12:00:00Z), an age ("10m ago"), or microseconds since 1970; '
    "instead of startingOffsets",
    "endingTimestamp": "as startingTimestamp: the first batch appended then or later ends the read; batch reads only",
    "maxRecordsPerTrigger": "the most records in a micro-batch",
    "maxBytesPerTrigger": "the most payload bytes in a micro-batch, in whole batches, at least one of each lane",
    "minPartitions": "the least number of tasks",
    "partitions": "the topic's partitions to read, numbers with commas",
    "columns": "columns to read, names with commas; default: of a topic with a schema all, else seven columns",
    "read": "durable or ordered",
    "failOnDataLoss": "true or false",
    "reader": f"the name of a stream in status and topic describe: 1 to {READER_NAME_BYTES_MAX} of A-Z a-z 0-9 . _ -",
    "pushFilters": "true or false; true only for a frame that is used once, with its filters; batch reads only",
}
"""Options of a read. Names are the same in upper and lower case, as everywhere in Spark."""

GO_ON: Final = 'to continue without these records: .option("failOnDataLoss", "false")'
"""Hint for errors about missing records."""

_STREAM_ONLY: Final = ("maxRecordsPerTrigger", "maxBytesPerTrigger", "reader")
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "pushFilters")
_CHOICES: Final = ("topic", "topics", "topicPattern")
_READER_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{READER_NAME_BYTES_MAX}}}")
_NUMBER_MAX: Final = (1 << 63) - 1
_DIGITS_MAX: Final = 40


class WhereBy(StrEnum):
    """How an option names a position."""

    EARLIEST = "earliest"
    LATEST = "latest"
    SEQ = "seq"
    INDEX = "index"
    TIME = "time"
    LANES = "lanes"  # one for each named lane
    TOPICS = "topics"  # one for each topic


_ENDS: Final = (WhereBy.EARLIEST, WhereBy.LATEST)


@dataclass(frozen=True, slots=True)
class Where:
    """A position as an option names it."""

    by: WhereBy
    value: int = 0
    lanes: tuple[tuple[int, Where], ...] = ()
    topics: tuple[tuple[str, Where], ...] = ()


EARLIEST: Final = Where(WhereBy.EARLIEST)
LATEST: Final = Where(WhereBy.LATEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a read, checked. Either `topics` or `pattern` selects the topics."""

    brokers: str
    topics: tuple[str, ...]
    starting: Where
    pattern: str | None = None
    ending: Where = LATEST
    max_records: int | None = None
    max_bytes: int | None = None
    min_partitions: int | None = None
    partitions: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    read: str = "durable"
    fail_on_data_loss: bool = True
    push_filters: bool = False
    reader: str | None = None

    @property
    def several(self) -> bool:
        """Whether more than one topic may be read: then all of them must be raw topics."""
        return self.pattern is not None or len(self.topics) > 1

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Return the sorted names that are in `topics` or match the pattern."""
        if self.pattern is None:
            return sorted(set(names) & set(self.topics))
        matches = re.compile(self.pattern).fullmatch
        return sorted(name for name in names if matches(name))


def read_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """Return the options of a batch read or of a stream (None: it may become either).

    BadValue names the wrong option and the allowed values.
    """
    options = named(given, READ_OPTIONS)
    for name in () if streaming is None else _BATCH_ONLY if streaming else _STREAM_ONLY:
        if name in options:
            kind = "a stream" if streaming else "a batch read"
            raise BadValue(f"option {name!r} can't be used with {kind}", f"leave it out; it is: {READ_OPTIONS[name]}")
    for end in ("starting", "ending"):
        if f"{end}Offsets" in options and f"{end}Timestamp" in options:
            raise BadValue(f"{end}Offsets and {end}Timestamp are both given", "give one of them")
    topics, pattern = _chosen(options)
    where = partial(_where, topics=None if pattern is not None else topics)
    starting = _checked(options, "startingTimestamp", _time) or _checked(options, "startingOffsets", where)
    ending = _checked(options, "endingTimestamp", _time) or _checked(options, "endingOffsets", where)
    if starting and ending and starting.by == ending.by == WhereBy.TIME and ending.value < starting.value:
        raise BadValue(
            f"endingTimestamp {options['endingTimestamp']!r} is before startingTimestamp "
            f"{options['startingTimestamp']!r}",
            "the end is exclusive and at least the start",
        )
    return ReadOptions(
        brokers=brokers_of(options),
        topics=topics,
        pattern=pattern,
        starting=starting or (LATEST if streaming else EARLIEST),
        ending=ending or LATEST,
        max_records=_checked(options, "maxRecordsPerTrigger", _positive),
        max_bytes=_checked(options, "maxBytesPerTrigger", _positive),
        min_partitions=_checked(options, "minPartitions", _tasks),
        partitions=_checked(options, "partitions", _partitions),
        columns=_checked(options, "columns", _names),
        read=_checked(options, "read", _read) or "durable",
        fail_on_data_loss=_checked(options, "failOnDataLoss", _flag) is not False,
        push_filters=_checked(options, "pushFilters", _flag) is True,
        reader=_checked(options, "reader", _reader),
    )


def _chosen(options: Mapping[str, str]) -> tuple[tuple[str, ...], str | None]:
    """Return the named topics, or the pattern."""
    given = [name for name in _CHOICES if name in options]
    if len(given) > 1:
        problem = f"options {given[0]!r} and {given[1]!r} both choose topics"
        raise BadValue(problem, f"give one of {', '.join(_CHOICES)}")
    if given == ["topicPattern"]:
        return (), _checked(options, "topicPattern", _pattern)
    if given == ["topics"]:
        return _checked(options, "topics", _topics) or (), None
    topic_of(options)
    return _checked(options, "topic", _topics) or (), None


def named(given: Mapping[str, str], allowed: Mapping[str, str]) -> dict[str, str]:
    """Return options under their proper names; `path`, which Spark makes of `load("orders")`, is the topic."""
    proper = {name.lower(): name for name in allowed} | {"path": "topic"}
    found: dict[str, str] = {}
    for key, value in given.items():
        name = proper.get(key.lower())
        if name is None:
            near = get_close_matches(key.lower(), proper, 1)
            hint = f"did you mean {proper[near[0]]!r}? " if near else ""
            raise BadValue(f"option {key!r} does not exist", f"{hint}options are {', '.join(allowed)}")
        if found.setdefault(name, str(value)) != str(value):
            raise BadValue(f"option {name!r} is given twice: {found[name]!r} and {value!r}", "give it once")
    return found


def brokers_of(options: Mapping[str, str]) -> str:
    """Return the addresses of brokers; without the option those that `embarcadero.connect()` would use."""
    if "brokers" not in options:
        return ",".join(broker_addresses(load()))
    try:
        return ",".join(f"{host}:{port}" for host, port in parse_addresses(options["brokers"]))
    except BadValue as error:
        raise BadValue(f"option 'brokers': {error.message}", error.hint) from None


def topic_of(options: Mapping[str, str]) -> str:
    """Return the topic's name, which every read and write needs."""
    if not options.get("topic"):
        raise BadValue("option 'topic' is missing", 'add .option("topic", "orders")')
    return options["topic"]


def _checked(options: Mapping[str, str], name: str, parse: Callable[[str], OptionValue]) -> OptionValue | None:
    """Parse the value of an option, if it is given."""
    if name not in options:
        return None
    try:
        return parse(options[name].strip())
    except BadValue as error:
        raise BadValue(f"option {name!r} is {options[name]!r}: {error.message}", READ_OPTIONS[name]) from None


# --- values -----------------------------------------------------------------------------------------------------------
def _where(text: str, topics: tuple[str, ...] | None) -> Where:
    """Parse a position in one topic, or positions in several. `topics` are the named topics; None: a pattern."""
    several = topics is None or len(topics) > 1
    if text in _ENDS:
        return Where(WhereBy(text))
    if _is_number(text):
        if several:
            raise BadValue("it is a seq, which names a record of one topic, but several topics are read")
        return Where(WhereBy.SEQ, _bounded(int(text), "a seq"))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"it is not a position, and not JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadValue("it is JSON, but not an object of positions by lane")
    if several:
        return _by_topic(_of_report(found), topics)
    if topics is not None and set(found) == set(topics) and not _is_number(topics[0]):
        return _by_topic(found, topics).topics[0][1]
    return _by_lane(found)


def _of_report(found: dict[str, Any]) -> dict[str, Any]:
    """Convert the offset of several topics in a progress report, where ids name topics, to the option's form."""
    topics = found.get("topics")
    if isinstance(topics, dict) and "reader" in found and all(isinstance(each, dict) for each in topics.values()):
        return {str(each.get("topic")): each for each in topics.values()}
    return found


def _by_topic(found: dict[str, Any], topics: tuple[str, ...] | None) -> Where:
    for name, value in found.items():
        if topics is not None and name not in topics:
            raise BadValue(f"JSON names topic {name!r}, but this read has {', '.join(topics)}")
        if not isinstance(value, dict) and value not in ("earliest", "latest"):
            raise BadValue(f"topic {name!r} has {value!r}, which is neither positions by lane, nor earliest or latest")
    wheres = (
        (name, _by_lane(value) if isinstance(value, dict) else Where(WhereBy(value))) for name, value in found.items()
    )
    return Where(WhereBy.TOPICS, topics=tuple(wheres))


def _by_lane(found: dict[str, Any]) -> Where:
    # The offset in a progress report can be given as an option: beside lanes, it has names.
    lanes = {key: value for key, value in found.items() if key not in ("topic", "reader", "id")}
    return Where(WhereBy.LANES, lanes=tuple((_lane(key), _lane_position(key, value)) for key, value in lanes.items()))


def _lane(key: str) -> int:
    if not _is_number(key):
        raise BadValue(f"{key!r} is not the number of a lane")
    return _bounded(int(key), "a lane")


def _lane_position(lane: str, value: Any) -> Where:
    if value in _ENDS:
        return Where(WhereBy(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Where(WhereBy.SEQ, _bounded(value, f"the seq of lane {lane}"))
    if isinstance(value, dict):
        for by in (WhereBy.SEQ, WhereBy.INDEX):
            number = value.get(by)
            if isinstance(number, int) and not isinstance(number, bool):
                return Where(by, _bounded(number, f"the {by} of lane {lane}"))
    raise BadValue(f'lane {lane} has {value!r}, which is not a seq, {{"seq": n}}, {{"index": n}}, earliest or latest')


def _is_number(text: str) -> bool:
    """Whether a text is a number of limited length: Python refuses to parse thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX


def _bounded(number: int, what: str) -> int:
    if not 0 <= number <= _NUMBER_MAX:
        raise BadValue(f"{what} is {number}, not between 0 and {_NUMBER_MAX}")
    return number


def _time(text: str) -> Where:
    us = _bounded(int(text), "a time") if _is_number(text) else time_us(text)
    if us > datetime.now(UTC).timestamp() * 1e6:
        raise BadValue("it is in the future; a number is in microseconds since 1970")
    return Where(WhereBy.TIME, us)


def _positive(text: str) -> int:
    if not _is_number(text) or int(text) < 1:
        raise BadValue("it is not a number above 0")
    return _bounded(int(text), "the number")


def _tasks(text: str) -> int:
    if (number := _positive(text)) > SPARK_TASKS_MAX:
        raise BadValue(f"it is more than {SPARK_TASKS_MAX}")
    return number


def _partitions(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_number(part) and int(part) < PARTITIONS_MAX for part in parts):
        raise BadValue(f"it is not a list of partitions from 0 to {PARTITIONS_MAX - 1}")
    return tuple(sorted({int(part) for part in parts}))


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise BadValue("it has an empty or a repeated name")
    return tuple(names)


def _topics(text: str) -> tuple[str, ...]:
    names = _names(text)
    if len(names) > TOPICS_MAX:
        raise BadValue(f"it has {len(names)} topics, but a cluster has at most {TOPICS_MAX}")
    return names


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadValue(f"it is not a regular expression: {error}") from None
    if not text:
        raise BadValue("it is empty, and matches no name")
    return text


def _reader(text: str) -> str:
    if not _READER_NAME.fullmatch(text):
        raise BadValue("it is not a valid name of a reader")
    return text


def _read(text: str) -> str:
    if text not in ("durable", "ordered"):
        raise BadValue("it is not a read mode")
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadValue("it is neither true nor false")
    return text.lower() == "true"


# --- offsets ----------------------------------------------------------------------------------------------------------
_TOPIC: Final = "topic"
_READER: Final = "reader"
_ID: Final = "id"
_TOPICS: Final = "topics"
_HINT: Final = "another source wrote this checkpoint; start with a new checkpointLocation"


class RecordPosition(NamedTuple):
    """A position between two records of a lane: `seq` is the next record, `index` its batch, `within` the records of
    that batch below it.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    within: int = 0

    @property
    def stop(self) -> int:
        """The index at which a scan of everything below this position stops."""
        return self.index + (self.within > 0)


BEGINNING: Final = RecordPosition(0, 0)


class TaskSpan(NamedTuple):
    """The part of a lane that one task reads: the records from `start` up to `stop`."""

    lane: int
    start: RecordPosition
    stop: RecordPosition
    topic: str


@dataclass(frozen=True, slots=True)
class LaneOffset:
    """The read position of a lane. `cuts` are the positions at which the last micro-batch was cut into tasks.

    `first`, only in the end of the micro-batch that begins with it: the first position read of a new topic's lane.
    `holes`, only in the offset that reports where a topic ends: seqs that restarts skipped, for counting records.
    """

    position: RecordPosition
    cuts: tuple[RecordPosition, ...] = ()
    ended: bool = False
    holes: tuple[Span, ...] = ()
    first: RecordPosition | None = None

    def json(self) -> dict[str, Any]:
        """Return it as Spark keeps it."""
        found: dict[str, Any] = {"index": self.position.index, "seq": self.position.seq}
        if self.position.within:
            found["within"] = self.position.within
        if self.cuts:
            found["cuts"] = [list(cut if cut.within else cut[:2]) for cut in self.cuts]
        if self.first is not None:
            found["first"] = list(self.first if self.first.within else self.first[:2])
        if self.holes:
            found["holes"] = [list(hole) for hole in self.holes]
        return found | ({"ended": True} if self.ended else {})


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a stream in one topic. `reader` is a name made when the query first started; it never changes."""

    topic: str
    reader: str
    lanes: Mapping[int, LaneOffset] = field(default_factory=dict)
    topic_id: int = 0  # 0: not known, as in offsets of earlier versions

    def json(self) -> dict[str, Any]:
        """Return it as Spark keeps it: a JSON object."""
        identity = {_ID: id_text(self.topic_id)} if self.topic_id else {}
        return {_TOPIC: self.topic, _READER: self.reader, **identity} | self.json_lanes()

    def json_lanes(self) -> dict[str, Any]:
        """Return the lanes as Spark keeps them."""
        return {str(lane): offset.json() for lane, offset in sorted(self.lanes.items())}

    def of(self, lane: int) -> RecordPosition:
        """Return the read position of a lane; the beginning for a new lane."""
        known = self.lanes.get(lane)
        return BEGINNING if known is None else known.position

    def positions(self) -> dict[int, LanePosition]:
        """Return index and seq by lane, as the progress of a reader is reported."""
        return {lane: LanePosition(offset.position.index, offset.position.seq) for lane, offset in self.lanes.items()}

    def without_cuts(self) -> Offset:
        """Return the same position without details of the last micro-batch."""
        lanes = {lane: replace(offset, cuts=(), first=None) for lane, offset in self.lanes.items()}
        return replace(self, lanes=lanes)

    def firsts(self) -> dict[int, LaneOffset]:
        """Return the first positions of the lanes of a new topic."""
        return {lane: LaneOffset(offset.first) for lane, offset in self.lanes.items() if offset.first is not None}


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The position of a stream in its topics, by name. `several` selects the format; the one for one topic is older."""

    reader: str
    topics: Mapping[str, Offset] = field(default_factory=dict)
    several: bool = False

    def json(self) -> dict[str, Any]:
        """Return it as Spark keeps it: a JSON object."""
        if not self.several:
            return next(iter(self.topics.values())).json()
        topics = sorted(self.topics.items())
        found = {id_text(each.topic_id): {_TOPIC: name} | each.json_lanes() for name, each in topics}
        return {_READER: self.reader, _TOPICS: found}

    def lanes(self) -> dict[str, Collection[int]]:
        """Return the lanes of each topic."""
        return {name: each.lanes.keys() for name, each in self.topics.items()}


def parse_stream_offset(given: Any) -> StreamOffset:
    """Parse an offset that Spark kept, of one topic or of several. BadValue if it belongs to another source."""
    if not isinstance(given, dict) or not isinstance(given.get(_TOPICS), dict):
        one = parse_offset(given)
        return StreamOffset(one.reader, {one.topic: one})
    reader = given.get(_READER)
    topics: dict[str, Offset] = {}
    for identity, each in given[_TOPICS].items():
        if not isinstance(each, dict) or _ID in each or _READER in each:
            raise BadValue(f"{str(given)[:200]} is not an offset of this source", _HINT)
        one = parse_offset({**each, _READER: reader, _ID: identity})
        if one.topic in topics or one.topic_id in {known.topic_id for known in topics.values()}:
            raise BadValue(f"{str(given)[:200]} has topic {one.topic!r} twice", _HINT)
        topics[one.topic] = one
    if not isinstance(reader, str):
        raise BadValue(f"{str(given)[:200]} is not an offset of this source", _HINT)
    return StreamOffset(reader, topics, several=True)


def parse_offset(given: Any, topic: str | None = None) -> Offset:
    """Parse an offset of one topic. BadValue if it belongs to another source or topic."""
    if not isinstance(given, dict) or not isinstance(given.get(_TOPIC), str) or not isinstance(given.get(_READER), str):
        raise BadValue(f"{str(given)[:200]} is not an offset of this source", _HINT)
    if topic is not None and given[_TOPIC] != topic:
        raise BadValue(
            f"the checkpoint is of a query that reads topic {given[_TOPIC]!r}, but this query reads {topic!r}",
            "use one checkpointLocation per query",
        )
    lanes = {key: value for key, value in given.items() if key not in (_TOPIC, _READER, _ID)}
    try:
        parsed, topic_id = {int(key): _parse_lane(value) for key, value in lanes.items()}, int(given.get(_ID, "0"), 16)
    except (TypeError, ValueError, KeyError) as error:
        raise BadValue(f"{str(given)[:200]} is not an offset of this source ({error!r})", _HINT) from None
    return Offset(given[_TOPIC], given[_READER], parsed, topic_id)


def _parse_lane(given: Mapping[str, Any]) -> LaneOffset:
    position = RecordPosition(int(given["index"]), int(given["seq"]), int(given.get("within", 0)))
    cuts = tuple(RecordPosition(*(int(number) for number in cut)) for cut in given.get("cuts", ()))
    holes = tuple(Span(int(start), int(stop)) for start, stop in given.get("holes", ()))
    first = None if "first" not in given else RecordPosition(*(int(number) for number in given["first"]))
    return LaneOffset(position, cuts, given.get("ended") is True, holes, first)


def spans(start: Offset, end: Offset) -> list[TaskSpan]:
    """Return the tasks between two offsets, in order of lane and position. They depend on the offsets only."""
    found: list[TaskSpan] = []
    for lane, until in sorted(end.lanes.items()):
        at = start.of(lane)
        for position in (*until.cuts, until.position):
            if at.seq < position.seq:  # entries without records need no task
                found.append(TaskSpan(lane, at, position, end.topic))
                at = position
    return found
