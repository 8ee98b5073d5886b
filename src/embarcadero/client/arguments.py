"""The arguments of callers, and their checks. An error has the value and the allowed values; nothing was sent."""

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
    """Parse `host:port`; several are separated by commas, or in a list."""
    texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = [_address(text.strip()) for text in texts if text.strip()]
    if not found:
        raise BadValue("there is no broker address", "pass at least one host:port")
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
    """Return the configured addresses of brokers, for a client without explicit addresses."""
    host = config.broker.advertised_host or config.broker.host
    port = config.broker.advertised_port or config.broker.port or PORT_DEFAULT
    return config.client.brokers or [f"{host}:{port}"]


def checked_ack(ack: int) -> Ack:
    """Check and convert an `ack`. Raises BadValue."""
    if isinstance(ack, bool) or ack not in list(Ack):
        raise BadValue(f"unknown ack {ack!r}", "use 0 (sent), 1 (ordered) or 2 (durable)")
    return Ack(ack)


def checked_durable(ack: int, topic: Topic) -> None:
    """Raise BadValue for ack=2 in a topic without replicas: no record is ever durable there."""
    if ack == Ack.DURABLE and topic.replicas == 0:
        raise BadValue(
            f"ack=2 waits until records are durable, and topic {topic.name!r} has no replicas",
            "create it with replicas=..., or use ack=1",
        )


def asked_order(order: int | str | None, topic: Topic) -> int | None:
    """Return the order to request. By default a session is strong where that is possible. Raises BadValue."""
    if order is not None:
        return int(session_order(topic.name, topic.order, order))
    return None if topic.order <= Order.BROKER else int(Order.STRONG)


def check_partitions(topic: str, partitions: int, asked: Collection[int] | None) -> None:
    """Refuse partitions that a topic does not have: no record would arrive. Raises BadValue."""
    for partition in asked or ():
        if isinstance(partition, bool) or not isinstance(partition, int) or not 0 <= partition < partitions:
            has = f"partitions 0 to {partitions - 1}" if partitions > 1 else "only partition 0"
            problem = f"topic {topic!r} has {has}, and no partition {partition!r}"
            raise BadValue(problem, "leave partitions out to read all")


def check_read(read: str, group: str | None = None) -> None:
    """Check the arguments `read` and `group` of a reader. Raises BadValue, NotAvailable."""
    if read not in ("ordered", "durable"):
        raise BadValue(f"unknown read mode {read!r}", 'use read="durable" or read="ordered"')
    if group is not None:
        hint = "use one subscriber per process; with partitions=... they can divide a topic"
        raise NotAvailable("this version has no consumer groups", hint)


class Configured(Enum):
    """The type of AS_CONFIGURED, which stands for a configured value."""

    AS_CONFIGURED = "as configured"

    def __repr__(self) -> str:
        return self.name


AS_CONFIGURED: Final = Configured.AS_CONFIGURED
Timeout = Duration | Configured | None
"""The timeout of a request: seconds, a text such as "10s", None for no limit, or AS_CONFIGURED."""


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
        raise BadValue(f"timeout {timeout!r} is not valid", 'use seconds, a text such as "10s", or None for no limit')
    return seconds


def in_unit(name: str, given: Duration, own: float) -> float:
    """Return the duration that a caller gave, in units of `own` seconds. BadValue names the argument.

        in_unit("linger_ms", "1s", 1e-3)    # 1000.0
    """
    try:
        return duration(given, own, "20ms" if own < 1 else "10m")
    except BadQuantity as error:
        raise BadValue(f"{name}: {error.what}", error.right) from None


def whole_in_unit(name: str, given: Duration | None, own: float) -> int | None:
    """Return the duration as a whole number, or None for None. BadValue names the argument."""
    if given is None:
        return None
    try:
        return whole(in_unit(name, given, own), given, "milliseconds" if own < 1 else "seconds")
    except BadQuantity as error:
        raise BadValue(f"{name}: {error.what}", error.right) from None


class TopicChanges(TypedDict, total=False):
    """The options of `alter_topic`. Options that cannot change are included, so that the error has the reason."""

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
    """Check the changes of a topic, and convert them for the wire. Raises BadValue."""
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    for name in ("partitioner", "key"):
        if name in given:
            why = "stored records would be in other partitions than later records with the same key"
            raise BadValue(f"the {name} of a topic cannot change: {why}", "create another topic")
    if unknown := given.keys() - TopicChanges.__annotations__.keys():
        problem = f"a topic has no option {sorted(unknown)[0]!r}"
        raise BadValue(problem, f"use {', '.join(TopicChanges.__annotations__)}")
    if not given:
        problem = "alter_topic was called without a change"
        raise BadValue(problem, f"pass one of {', '.join(TopicChanges.__annotations__)}")
    if "order" in given:
        given["order"] = int(parse_order(given["order"]))
    for name, own in (("gap_timeout_ms", 1e-3), ("session_ttl_s", 1.0), ("retention_s", 1.0)):
        if name in given:
            given[name] = whole_in_unit(name, given[name], own)
    if "schema" in given:
        given["columns"] = encode_schema(given.pop("schema"))
    return given


def close_patience(error: BaseException | None) -> float:
    """Return the timeout for outcomes at the end of a block: a short one after Ctrl-C or a cancellation."""
    return CLOSE_TIMEOUT_S if error is None or isinstance(error, Exception) else CLOSE_INTERRUPTED_S


class PublisherArguments(TypedDict, total=False):
    """The options of a publisher, as callers pass them."""

    ack: int  # 0: handed to a connection; 1: ordered (default); 2: durable, in a topic with replicas
    session: str | None  # a name under which the session can be continued later
    order: int | str | None  # of the session; None: "strong" in topics of orders 2 and 5, otherwise as the topic
    session_at: int | None  # sequence of the first batch, even if the log has it; needs a name, orders 2 and 5
    linger_ms: Duration  # how long a record may wait for others
    batch_bytes: int
    window_bytes: int  # bytes that may be without an outcome; above that, callers wait
    compression: str | None  # "lz4", "zstd" or None
    delivery_timeout: Duration  # seconds without an outcome after which the publisher fails


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """The checked options of a publisher."""

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
            problem = f"the session name has {len(self.session.encode())} bytes"
            raise BadName(problem, f"use 1 to {SESSION_NAME_BYTES_MAX} bytes, or None")
        if self.session_at is not None and not (self.session and 0 <= self.session_at <= SESSION_SEQUENCE_MAX):
            raise BadValue(
                f"session_at {self.session_at} of session {self.session!r} is not valid",
                f"use 0 to {SESSION_SEQUENCE_MAX}, and give the session a name",
            )
        if not 0 <= self.linger_ms <= 60_000:
            raise BadValue(f"linger_ms {self.linger_ms} is out of range", "use 0 to 60000")
        if not 0 < self.batch_bytes <= FRAME_BYTES_MAX:
            raise BadValue(f"batch_bytes {self.batch_bytes} is out of range", f"use 1 to {FRAME_BYTES_MAX}")
        if self.window_bytes <= 0:
            raise BadValue(f"window_bytes {self.window_bytes} is out of range", "use at least 1")
        if self.compression not in (None, *COMPRESSIONS):
            raise BadValue(f"unknown compression {self.compression!r}", 'use "lz4", "zstd", or None')
        if not self.delivery_timeout > 0:
            raise BadValue(f"delivery_timeout {self.delivery_timeout} is out of range", "use seconds above 0")


def publisher_options(usual: ClientKeys, asked: PublisherArguments) -> PublisherOptions:
    """Complete the options of a caller with the configured defaults."""
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
"""The start of a reader, as callers write it."""


class Lookup(NamedTuple):
    """A position to look up, by "earliest", "latest", "index", "seq" or "time" (words of the wire)."""

    by: str
    value: int


EARLIEST: Final = Lookup("earliest", 0)
FIRST_INDEX: Final = Lookup("index", 0)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def start_lookup(start: StartPosition) -> Lookup:
    """Convert a start: "earliest", "latest", the seq of a record, or an append time. Raises BadValue."""
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
    """Convert the target of a seek: exactly one of the four. Raises BadValue."""
    if [where, seq, index, time].count(None) != 3:
        hint = 'use seek("earliest"), seek("latest"), seek(seq=...), seek(index=...) or seek(time=...)'
        raise BadValue("this call needs exactly one position", hint)
    if index is not None:
        return Lookup("index", _number("index", index))
    if time is not None:
        return Lookup("time", time_us(time))
    return start_lookup(seq if where is None and seq is not None else where or "")


def trim_lookup(seq: int | None, index: int | None, time: Moment | None) -> Lookup:
    """Convert the limit of a trim: exactly one of the three. Raises BadValue."""
    if [seq, index, time].count(None) != 2:
        raise BadValue("trim needs exactly one position", "use before_seq=..., before_index=... or before_time=...")
    return seek_lookup(None, seq, index, time)


def time_us(when: Any) -> int:
    """Convert a datetime with a time zone, or a text such as "10m ago", to microseconds since 1970. Raises BadValue."""
    if isinstance(when, str):
        when = parse_time(when)
    if not isinstance(when, datetime):
        hint = 'use a datetime with a time zone: datetime.now(UTC), or a text such as "10m ago"'
        raise BadValue(f"{when!r} is not a time", hint)
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
        raise BadValue(f"{value!r} is not a valid {what}", f"use a {what} from 0 on")
    return value


def parse_time(text: str) -> datetime:
    """Parse a time such as `2026-01-31T12:00:00Z` or `10 minutes ago`. Raises BadValue."""
    try:
        return moment(text)
    except BadQuantity as error:
        raise BadValue(error.what, error.right) from None


_SCHEMA_HINT = 'write "id:int64!, name:string, tags:list<string>"; "!" means that the column is never null'
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([^\]]+))?\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d{1,2}),\s*(-?\d{1,2})\)")
_SCHEMA_FILE_BYTES_MAX = 1 << 20


def parse_schema(text: str) -> pa.Schema:
    """Parse the short form of a schema, or read a file: .json (types by name, or a list of fields) or .arrow."""
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
        raise BadSchema(f"cannot read {path}: {error.strerror or error}", "check the path") from None
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, BadSchema):
            raise
        raise BadSchema(f"{path} has no schema: {error}", "use JSON, or an Arrow file, stream or schema") from None


def _arrow_schema(source: Any) -> pa.Schema:
    """Read the schema of an Arrow file, a stream, or a serialized schema."""
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
        raise BadSchema("this JSON is not a schema", 'write {"id": "int64!"} or [{"name": "id", "type": "int64"}]')
    return pa.schema([pa.field(str(f["name"]), _type(str(f["type"])), bool(f.get("nullable", True))) for f in found])


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside brackets."""
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
        raise BadSchema(f"{text.strip()!r} is not a column", _SCHEMA_HINT)
    return pa.field(name, _type(kind.removesuffix("!").strip()), nullable=not kind.endswith("!"))


def _type(text: str) -> pa.DataType:
    if found := _TIMESTAMP.fullmatch(text):
        return pa.timestamp(found[1], tz=found[2])
    if found := _DECIMAL.fullmatch(text):
        try:
            return pa.decimal128(int(found[1]), int(found[2]))
        except ValueError as error:
            raise BadSchema(f"unknown type {text!r}: {error}", _SCHEMA_HINT) from None
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
        hint = f"use a type of Arrow: int64, bool, binary ...; {_SCHEMA_HINT}"
        raise BadSchema(f"unknown type {text!r}", hint) from None
