"""What callers may ask for, and how they write it. A refusal names the value and what is allowed; nothing was sent."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

import pyarrow as pa

from embarcadero.config import Config
from embarcadero.config.key import BadQuantity, Duration, duration, moment, whole
from embarcadero.config.table import ClientKeys
from embarcadero.errors import BadName, BadSchema, BadValue, NotAvailable
from embarcadero.limits import (
    BATCH_BYTES_DEFAULT,
    CLOSE_INTERRUPTED_S,
    CLOSE_TIMEOUT_S,
    DELIVERY_TIMEOUT_S,
    FRAME_BYTES_MAX,
    LINGER_MS_DEFAULT,
    PORT_DEFAULT,
    SESSION_NAME_BYTES_MAX,
    SESSION_SEQUENCE_MAX,
    WINDOW_BYTES_DEFAULT,
)
from embarcadero.orders import parse_order, session_order
from embarcadero.types import Ack, Order, Topic
from embarcadero.wire.schemas import COMPRESSIONS, encode_schema

_PORT_DIGITS_MAX: Final = 9  # Python refuses to read numbers of thousands of digits


def parse_addresses(addresses: str | Sequence[str]) -> list[tuple[str, int]]:
    """`host:port`, several with commas or as a list."""
    texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = [_address(text.strip()) for text in texts if text.strip()]
    if not found:
        raise BadValue("no broker address", "give at least one host:port")
    return list(dict.fromkeys(found))


def _address(text: str) -> tuple[str, int]:
    scheme, found, rest = text.partition("://")
    if found:
        place = rest.partition("/")[0].rpartition("@")[2]
        right = place if ":" in place else f"{place or '127.0.0.1'}:{PORT_DEFAULT}"
        hint = f"write host:port without {scheme}://, such as {right}; brokers listen on port {PORT_DEFAULT} by default"
        raise BadValue(f"{text!r} is a URL, not a broker address", hint)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    digits = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS_MAX
    if not colon or not host or not digits or not 0 < int(port) < 65_536:
        raise BadValue(f"{text!r} is no broker address", "write host:port, for example 127.0.0.1:9092")
    return host, int(port)


def broker_addresses(config: Config) -> list[str]:
    """Where a client looks for brokers when it is given no addresses."""
    host = config.broker.advertised_host or config.broker.host
    port = config.broker.advertised_port or config.broker.port or PORT_DEFAULT
    return config.client.brokers or [f"{host}:{port}"]


def checked_ack(ack: int) -> Ack:
    """When a publish counts as done."""
    if isinstance(ack, bool) or ack not in list(Ack):
        raise BadValue(f"ack {ack!r} does not exist", "use 0 (sent), 1 (ordered) or 2 (durable)")
    return Ack(ack)


def checked_durable(ack: int, topic: Topic) -> None:
    """Nothing is ever durable in a topic without replicas."""
    if ack == Ack.DURABLE and topic.replicas == 0:
        raise BadValue(
            f"ack=2 waits until records are durable, and topic {topic.name!r} has no replicas",
            "create it with replicas=..., or use ack=1",
        )


def asked_order(order: int | str | None, topic: Topic) -> int | None:
    """Return the order to ask for: without a choice a session is strong where that is possible. Raises BadValue."""
    if order is not None:
        return int(session_order(topic.name, topic.order, order))
    return None if topic.order <= Order.BROKER else int(Order.STRONG)


def check_partitions(topic: str, partitions: int, asked: Collection[int] | None) -> None:
    """Refuse to read partitions that a topic does not have: no record would ever come. Raises BadValue."""
    for partition in asked or ():
        if isinstance(partition, bool) or not isinstance(partition, int) or not 0 <= partition < partitions:
            has = f"partitions 0 to {partitions - 1}" if partitions > 1 else "only partition 0"
            problem = f"topic {topic!r} has {has}, and no partition {partition!r}"
            raise BadValue(problem, "leave partitions out to read all")


def check_read(read: str, group: str | None = None) -> None:
    """Which frontier a reader sees, and with whom it shares."""
    if read not in ("ordered", "durable"):
        raise BadValue(f"unknown read mode {read!r}", 'use read="durable" or read="ordered"')
    if group is not None:
        raise NotAvailable("consumer groups come with a later version", "use one subscriber per process")


class Configured(Enum):
    """Stands for a value that the configuration has."""

    AS_CONFIGURED = "as configured"

    def __repr__(self) -> str:
        return self.name


AS_CONFIGURED: Final = Configured.AS_CONFIGURED
Timeout = Duration | Configured | None
"""How long a request may take: seconds, "10s", None for no limit, or the configured time."""


def patience_s(timeout: Timeout, configured_s: float) -> float:
    """Return the seconds to wait; inf for no limit."""
    if timeout is None:
        return inf
    seconds = timeout_s(configured_s if isinstance(timeout, Configured) else timeout)
    return inf if seconds is None else seconds


def timeout_s(timeout: Duration | None) -> float | None:
    """Return a timeout in seconds; None means no limit. Raises BadValue.

        timeout_s("2m")    # 120.0
    """
    if timeout is None:
        return None
    try:
        seconds = duration(timeout)
    except BadQuantity:
        seconds = -1.0
    if not seconds >= 0:
        raise BadValue(f"timeout {timeout!r}", 'use seconds, a text such as "10s", or None for no limit')
    return seconds


def in_unit(name: str, given: Duration, own: float) -> float:
    """Return a duration that a caller gave, in units of `own` seconds. BadValue names the argument.

        in_unit("linger_ms", "1s", 1e-3)    # 1000.0
    """
    try:
        return duration(given, own, "20ms" if own < 1 else "10m")
    except BadQuantity as error:
        raise BadValue(f"{name}: {error.what}", error.right) from None


def whole_in_unit(name: str, given: Duration | None, own: float) -> int | None:
    """Return the same as a whole number; None stays None."""
    if given is None:
        return None
    try:
        return whole(in_unit(name, given, own), given, "milliseconds" if own < 1 else "seconds")
    except BadQuantity as error:
        raise BadValue(f"{name}: {error.what}", error.right) from None


class TopicChanges(TypedDict, total=False):
    """What `alter_topic` may be given; what can't change is there so that the refusal says why."""

    schema: pa.Schema
    partitions: int
    on_gap: str
    gap_timeout_ms: Duration
    session_ttl_s: Duration
    order: int | str
    replicas: int
    durable_on: int
    retention_bytes: int
    retention_s: Duration


def checked_changes(changes: TopicChanges) -> dict[str, Any]:
    """Changes of a topic as they travel."""
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    for name in ("partitioner", "key"):
        if name in given:
            why = "records that are stored would be in other partitions than later ones of their key"
            raise BadValue(f"{name} of a topic can't change: {why}", "create another topic")
    if unknown := given.keys() - TopicChanges.__annotations__.keys():
        raise BadValue(f"a topic has no {sorted(unknown)[0]!r}", f"use {', '.join(TopicChanges.__annotations__)}")
    if not given:
        raise BadValue("nothing to alter", f"give one of {', '.join(TopicChanges.__annotations__)}")
    if "order" in given:
        given["order"] = int(parse_order(given["order"]))
    for name, own in (("gap_timeout_ms", 1e-3), ("session_ttl_s", 1.0), ("retention_s", 1.0)):
        if name in given:
            given[name] = whole_in_unit(name, given[name], own)
    if "schema" in given:
        given["columns"] = encode_schema(given.pop("schema"))
    return given


def close_patience(error: BaseException | None) -> float:
    """How long to wait for outcomes at the end of a block: not for long when Ctrl-C or a cancellation ended it."""
    return CLOSE_TIMEOUT_S if error is None or isinstance(error, Exception) else CLOSE_INTERRUPTED_S


class PublisherArguments(TypedDict, total=False):
    """The options of a publisher as callers give them."""

    ack: int  # 0: handed to a connection; 1: ordered (default); 2: durable, in a topic with replicas
    session: str | None  # a name under which the session can be continued later
    order: int | str | None  # of its session; None: "strong" in topics of orders 2 and 5, else as the topic
    session_at: int | None  # the sequence of its first batch, whatever is in already; with a name, orders 2 and 5
    linger_ms: Duration  # how long a record may wait for others
    batch_bytes: int
    window_bytes: int  # how much may be without an outcome before callers have to wait
    compression: str | None  # "lz4" or "zstd"; None: as it is
    delivery_timeout: Duration  # seconds after which the publisher gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How a publisher makes batches and when it gives up."""

    ack: int = int(Ack.ORDERED)
    session: str | None = None
    order: int | str | None = None
    session_at: int | None = None
    linger_ms: float = LINGER_MS_DEFAULT
    batch_bytes: int = BATCH_BYTES_DEFAULT
    window_bytes: int = WINDOW_BYTES_DEFAULT
    compression: str | None = None
    delivery_timeout: float = DELIVERY_TIMEOUT_S

    def __post_init__(self) -> None:
        checked_ack(self.ack)
        if self.order is not None:
            parse_order(self.order)
        if self.session is not None and not 0 < len(self.session.encode()) <= SESSION_NAME_BYTES_MAX:
            raise BadName(
                f"a session name of {len(self.session.encode())} bytes", f"use 1 to {SESSION_NAME_BYTES_MAX}, or None"
            )
        if self.session_at is not None and not (self.session and 0 <= self.session_at <= SESSION_SEQUENCE_MAX):
            raise BadValue(
                f"session_at {self.session_at} of session {self.session!r}",
                f"use 0 to {SESSION_SEQUENCE_MAX}, and give the session a name",
            )
        if not 0 <= self.linger_ms <= 60_000:
            raise BadValue(f"linger_ms {self.linger_ms}", "use 0 to 60000")
        if not 0 < self.batch_bytes <= FRAME_BYTES_MAX:
            raise BadValue(f"batch_bytes {self.batch_bytes}", f"use 1 to {FRAME_BYTES_MAX}")
        if self.window_bytes <= 0:
            raise BadValue(f"window_bytes {self.window_bytes}", "use at least 1")
        if self.compression not in (None, *COMPRESSIONS):
            raise BadValue(f"compression {self.compression!r}", 'use "lz4", "zstd", or None')
        if not self.delivery_timeout > 0:
            raise BadValue(f"delivery_timeout {self.delivery_timeout}", "use seconds above 0")


def publisher_options(usual: ClientKeys, asked: PublisherArguments) -> PublisherOptions:
    """What a caller asked for, and the configuration's word for the rest."""
    defaults: PublisherArguments = {
        "ack": usual.ack,
        "linger_ms": usual.linger_ms,
        "batch_bytes": usual.batch_bytes,
        "window_bytes": usual.window_bytes,
        "delivery_timeout": usual.delivery_timeout_s,
        "compression": None if usual.compression == "none" else usual.compression,
    }
    given: dict[str, Any] = {**defaults, **asked}
    given["linger_ms"] = in_unit("linger_ms", given["linger_ms"], 1e-3)
    given["delivery_timeout"] = in_unit("delivery_timeout", given["delivery_timeout"], 1.0)
    return PublisherOptions(**given)


Moment = datetime | str
"""A time as callers give it: a datetime with a time zone, or a text such as "10m ago"."""

StartPosition = str | int | datetime
"""Where a reader starts, as callers write it."""


class Lookup(NamedTuple):
    """What a position is asked for by: "earliest", "latest", "index", "seq" or "time" (these are words of the wire)."""

    by: str
    value: int


EARLIEST: Final = Lookup("earliest", 0)
FIRST_INDEX: Final = Lookup("index", 0)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def start_lookup(start: StartPosition) -> Lookup:
    """Where to read from: "earliest", "latest", the seq of a record, or an append time."""
    if isinstance(start, datetime):
        return Lookup("time", time_us(start))
    if isinstance(start, str):
        if start in ("earliest", "latest"):
            return Lookup(start, 0)
        try:
            return Lookup("time", time_us(start))
        except BadValue as error:
            hint = (
                f'use "earliest", "latest", the seq of a record, a datetime with a time zone, or a text: {error.hint}'
            )
            raise BadValue(f"start: {error.message}", hint) from None
    return Lookup("seq", _number("seq", start))


def seek_lookup(where: str | None, seq: int | None, index: int | None, time: Moment | None) -> Lookup:
    """Where to seek: exactly one of the four."""
    if [where, seq, index, time].count(None) != 3:
        hint = 'use seek("earliest"), seek("latest"), seek(seq=...), seek(index=...) or seek(time=...)'
        raise BadValue("seek to one place", hint)
    if index is not None:
        return Lookup("index", _number("index", index))
    if time is not None:
        return Lookup("time", time_us(time))
    return start_lookup(seq if where is None and seq is not None else where or "")


def trim_lookup(seq: int | None, index: int | None, time: Moment | None) -> Lookup:
    """What to trim before: exactly one of the three."""
    if [seq, index, time].count(None) != 2:
        raise BadValue("trim before one place", "use before_seq=..., before_index=... or before_time=...")
    return seek_lookup(None, seq, index, time)


def time_us(when: Any) -> int:
    """Microseconds since 1970 of a datetime with a time zone, or of a text such as "10m ago"."""
    if isinstance(when, str):
        when = parse_time(when)
    if not isinstance(when, datetime):
        hint = 'use a datetime with a time zone: datetime.now(UTC), or a text such as "10m ago"'
        raise BadValue(f"{when!r} is no time", hint)
    if when.tzinfo is None or when.utcoffset() is None:
        raise BadValue(
            f"{when.isoformat()} has no time zone",
            "use datetime.now(UTC), or .replace(tzinfo=UTC) if it is in UTC, or .astimezone() if it is local time",
        )
    if when < _EPOCH:
        raise BadValue(f"{when.isoformat()} is before 1970", 'use a time from 1970 on, or "earliest"')
    return (when - _EPOCH) // _MICROSECOND


def _number(what: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise BadValue(f"{what} {value!r} is no place in a log", f"use a {what} from 0 on")
    return value


def parse_time(text: str) -> datetime:
    """A time such as `2026-01-31T12:00:00Z` or `10 minutes ago`. Raises BadValue."""
    try:
        return moment(text)
    except BadQuantity as error:
        raise BadValue(error.what, error.right) from None


_SCHEMA_HINT = 'write "id:int64!, name:string, tags:list<string>"; "!" is for columns that are never null'
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([^\]]+))?\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d{1,2}),\s*(-?\d{1,2})\)")
_SCHEMA_FILE_BYTES_MAX = 1 << 20


def parse_schema(text: str) -> pa.Schema:
    """A schema from its short form, or from a file: .json (types by name, or a list of fields) or .arrow."""
    path = Path(text)
    if path.suffix in {".json", ".arrow", ".arrows", ".feather", ".ipc"}:
        return _from_file(path)
    return pa.schema([_field(part) for part in _parts(text)])


def _from_file(path: Path) -> pa.Schema:
    try:
        if path.suffix != ".json":
            with pa.memory_map(str(path)) as source:
                return _arrow_schema(source)
        with path.open("rb") as file:
            return _from_json(json.loads(file.read(_SCHEMA_FILE_BYTES_MAX)))
    except OSError as error:
        raise BadSchema(f"can't read {path}: {error.strerror or error}", "name a file that exists") from None
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, BadSchema):
            raise
        raise BadSchema(f"{path} holds no schema: {error}", "use JSON, or an Arrow file, stream or schema") from None


def _arrow_schema(source: Any) -> pa.Schema:
    """The schema of an Arrow file; of a stream, or of a schema alone."""
    try:
        return pa.ipc.open_file(source).schema
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.read_schema(source)


def _from_json(found: Any) -> pa.Schema:
    if isinstance(found, dict) and isinstance(found.get("fields"), list):
        found = found["fields"]
    if isinstance(found, dict):
        return pa.schema([_field(f"{name}:{kind}") for name, kind in found.items()])
    if not isinstance(found, list) or not all(isinstance(f, dict) and {"name", "type"} <= f.keys() for f in found):
        raise BadSchema("this JSON is no schema", 'write {"id": "int64!"} or [{"name": "id", "type": "int64"}]')
    return pa.schema([pa.field(str(f["name"]), _type(str(f["type"])), bool(f.get("nullable", True))) for f in found])


def _parts(text: str) -> Iterator[str]:
    """Split at commas that are in no bracket."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "<[(") - (letter in ">])")
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _field(text: str) -> pa.Field:
    name, colon, kind = (part.strip() for part in text.partition(":"))
    if not colon or not name or not kind:
        raise BadSchema(f"{text.strip()!r} is no column", _SCHEMA_HINT)
    return pa.field(name, _type(kind.removesuffix("!").strip()), nullable=not kind.endswith("!"))


def _type(text: str) -> pa.DataType:
    if found := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(found[1], tz=found[2])
    if found := _DECIMAL.fullmatch(text):
        try:
            return pa.decimal128(int(found[1]), int(found[2]))
        except ValueError as error:
            raise BadSchema(f"there is no type {text!r}: {error}", _SCHEMA_HINT) from None
    if text.startswith("list<") and text.endswith(">"):
        return pa.list_(_type(text[5:-1].strip().removeprefix("item: ")))
    if text.startswith("struct<") and text.endswith(">"):
        return pa.struct([_field(part) for part in _parts(text[7:-1])])
    if text.startswith("map<") and text.endswith(">"):
        sides = list(_parts(text[4:-1]))
        if len(sides) == 2:
            return pa.map_(_type(sides[0].strip()), _type(sides[1].strip()))
    try:
        return pa.type_for_alias(text)
    except ValueError:
        hint = f"types are Arrow's: int64, bool, binary ...; {_SCHEMA_HINT}"
        raise BadSchema(f"there is no type {text!r}", hint) from None
