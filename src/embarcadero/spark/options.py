"""Options of the source: one table of names, each value checked, every problem named with what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from embarcadero.client.options import broker_addresses, parse_addresses
from embarcadero.client.places import time_us
from embarcadero.config import load
from embarcadero.errors import BadValue
from embarcadero.limits import PARTITIONS_MAX, SPARK_TASKS_MAX

Value = TypeVar("Value")

READ_OPTIONS: Final = {
    "brokers": "addresses of brokers, host:port with commas",
    "topic": "the topic's name",
    "startingOffsets": 'earliest, latest, a seq, or JSON by lane: {"0": {"seq": 1000}}',
    "endingOffsets": "as startingOffsets, exclusive; batch reads only",
    "startingTimestamp": "an ISO time with a zone, or microseconds since 1970; instead of startingOffsets",
    "maxRecordsPerTrigger": "at most so many records in a micro-batch",
    "maxBytesPerTrigger": "at most so many payload bytes in a micro-batch, in whole batches, at least one",
    "minPartitions": "at least so many tasks",
    "partitions": "the topic's partitions to read, numbers with commas",
    "columns": "columns to read, names with commas; default: of a topic with a schema all, else the seven usual ones",
    "read": "durable or ordered",
    "failOnDataLoss": "true or false",
    "pushFilters": "true or false; true only for a frame that is used once, with its filters; batch reads only",
}
"""What a read may be given. Names are the same in upper and lower case, as everywhere in Spark."""

GO_ON: Final = 'to go on with what is there: .option("failOnDataLoss", "false")'
"""What to do about records that are gone."""

_STREAM_ONLY: Final = ("maxRecordsPerTrigger", "maxBytesPerTrigger")
_BATCH_ONLY: Final = ("endingOffsets", "pushFilters")
_NUMBER_MAX: Final = (1 << 63) - 1
_DIGITS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a topic as an option names it: `by` is earliest, latest, seq, time or lanes.

    With "lanes", `lanes` has a place for each lane that was named.
    """

    by: str
    value: int = 0
    lanes: tuple[tuple[int, Where], ...] = ()


EARLIEST: Final = Where("earliest")
LATEST: Final = Where("latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of a read, checked."""

    brokers: str
    topic: str
    starting: Where
    ending: Where = LATEST
    max_records: int | None = None
    max_bytes: int | None = None
    min_partitions: int | None = None
    partitions: tuple[int, ...] | None = None
    columns: tuple[str, ...] | None = None
    read: str = "durable"
    fail_on_data_loss: bool = True
    push_filters: bool = False


def read_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """The options of a batch read or of a stream (None: it may become either).

    BadValue names the option that is wrong and what is allowed.
    """
    options = named(given, READ_OPTIONS)
    for name in () if streaming is None else _BATCH_ONLY if streaming else _STREAM_ONLY:
        if name in options:
            kind = "a stream" if streaming else "a batch read"
            raise BadValue(f"option {name!r} does not go with {kind}", f"leave it out; it is: {READ_OPTIONS[name]}")
    if "startingOffsets" in options and "startingTimestamp" in options:
        raise BadValue("startingOffsets and startingTimestamp are two starts", "give one of them")
    starting = _checked(options, "startingTimestamp", _time) or _checked(options, "startingOffsets", _where)
    return ReadOptions(
        brokers=brokers_of(options),
        topic=topic_of(options),
        starting=starting or (LATEST if streaming else EARLIEST),
        ending=_checked(options, "endingOffsets", _where) or LATEST,
        max_records=_checked(options, "maxRecordsPerTrigger", _positive),
        max_bytes=_checked(options, "maxBytesPerTrigger", _positive),
        min_partitions=_checked(options, "minPartitions", _tasks),
        partitions=_checked(options, "partitions", _partitions),
        columns=_checked(options, "columns", _names),
        read=_checked(options, "read", _read) or "durable",
        fail_on_data_loss=_checked(options, "failOnDataLoss", _flag) is not False,
        push_filters=_checked(options, "pushFilters", _flag) is True,
    )


def named(given: Mapping[str, str], allowed: Mapping[str, str]) -> dict[str, str]:
    """Options under their proper names; `path`, which Spark makes of `load("orders")`, is the topic."""
    proper = {name.lower(): name for name in allowed} | {"path": "topic"}
    found: dict[str, str] = {}
    for key, value in given.items():
        name = proper.get(key.lower())
        if name is None:
            near = get_close_matches(key.lower(), proper, 1)
            hint = f"did you mean {proper[near[0]]!r}? " if near else ""
            raise BadValue(f"option {key!r} does not exist", f"{hint}there are {', '.join(allowed)}")
        if found.setdefault(name, str(value)) != str(value):
            raise BadValue(f"option {name!r} is given twice: {found[name]!r} and {value!r}", "give it once")
    return found


def brokers_of(options: Mapping[str, str]) -> str:
    """Addresses of brokers; without the option those that `embarcadero.connect()` would use."""
    if "brokers" not in options:
        return ",".join(broker_addresses(load()))
    try:
        return ",".join(f"{host}:{port}" for host, port in parse_addresses(options["brokers"]))
    except BadValue as error:
        raise BadValue(f"option 'brokers': {error.message}", error.hint) from None


def topic_of(options: Mapping[str, str]) -> str:
    """The topic's name, which every read and write needs."""
    if not options.get("topic"):
        raise BadValue("option 'topic' is missing", '.option("topic", "orders")')
    return options["topic"]


def _checked(options: Mapping[str, str], name: str, parse: Callable[[str], Value]) -> Value | None:
    """A value, if the option is there."""
    if name not in options:
        return None
    try:
        return parse(options[name].strip())
    except BadValue as error:
        raise BadValue(f"option {name!r} is {options[name]!r}: {error.message}", READ_OPTIONS[name]) from None


# --- values -----------------------------------------------------------------------------------------------------------
def _where(text: str) -> Where:
    if text in ("earliest", "latest"):
        return Where(text)
    if _is_number(text):
        return Where("seq", _bounded(int(text), "a seq"))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"no place, and no JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadValue("JSON, but no object of places by lane")
    # What a progress report shows can be given back as it is: beside lanes, it has words.
    lanes = {key: value for key, value in found.items() if key not in ("topic", "reader", "id")}
    return Where("lanes", lanes=tuple((_lane(key), _place(key, value)) for key, value in lanes.items()))


def _lane(key: str) -> int:
    if not _is_number(key):
        raise BadValue(f"{key!r} is no number of a lane")
    return _bounded(int(key), "a lane")


def _place(lane: str, value: Any) -> Where:
    if value in ("earliest", "latest"):
        return Where(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Where("seq", _bounded(value, f"the seq of lane {lane}"))
    if isinstance(value, dict):
        for by in ("seq", "index"):
            number = value.get(by)
            if isinstance(number, int) and not isinstance(number, bool):
                return Where(by, _bounded(number, f"the {by} of lane {lane}"))
    raise BadValue(f'lane {lane} has {value!r}, which is not a seq, {{"seq": n}}, {{"index": n}}, earliest or latest')


def _is_number(text: str) -> bool:
    """Whether it is digits, and not thousands of them: Python refuses to read those."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX


def _bounded(number: int, what: str) -> int:
    if not 0 <= number <= _NUMBER_MAX:
        raise BadValue(f"{what} is {number}")
    return number


def _time(text: str) -> Where:
    if _is_number(text):
        us = _bounded(int(text), "a time")
    else:
        try:
            us = time_us(datetime.fromisoformat(text))
        except ValueError as error:
            message = error.message if isinstance(error, BadValue) else str(error)
            raise BadValue(f"no time: {message}") from None
    if us > datetime.now(UTC).timestamp() * 1e6:
        raise BadValue("a time that has not come; microseconds are counted, not milliseconds")
    return Where("time", us)


def _positive(text: str) -> int:
    if not _is_number(text) or int(text) < 1:
        raise BadValue("no number above 0")
    return _bounded(int(text), "the number")


def _tasks(text: str) -> int:
    if (number := _positive(text)) > SPARK_TASKS_MAX:
        raise BadValue(f"more than {SPARK_TASKS_MAX}")
    return number


def _partitions(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_number(part) and int(part) < PARTITIONS_MAX for part in parts):
        raise BadValue(f"no list of partitions from 0 to {PARTITIONS_MAX - 1}")
    return tuple(sorted({int(part) for part in parts}))


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise BadValue("an empty name, or one that is there twice")
    return tuple(names)


def _read(text: str) -> str:
    if text not in ("durable", "ordered"):
        raise BadValue("no way to read")
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadValue("neither true nor false")
    return text.lower() == "true"
