"""What callers get: futures of records that they publish, batches and records that they read, topics."""

from __future__ import annotations

import logging
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from embarcadero.client.arguments import timeout_s
from embarcadero.config.key import Duration
from embarcadero.errors import BadValue, Corrupt, EmbarcaderoError, TimedOut, fresh, invariant
from embarcadero.fabric.layout import ORDER
from embarcadero.forks import RefusingLock
from embarcadero.orders import order_label
from embarcadero.types import (
    NO_INDEX,
    NO_SESSION,
    EntryKind,
    Gap,
    GapKind,
    Position,
    Range,
    StagedBatch,
    Tier,
    Topic,
    public_names,
)
from embarcadero.wire.messages import TopicIs
from embarcadero.wire.schemas import RAW, TopicSchemas, decode_batch, decode_versions, named

FutureType = TypeVar("FutureType", bound="RecordFuture")

_LOG: Final = logging.getLogger("embarcadero.client")


class Receipt(NamedTuple):
    """What was stored of one batch, beside its position."""

    topic_id: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int


class BatchResult:
    """What became of a batch. Settles once; may be waited for and called back from any thread.

    `condition` is shared by all results of a publisher, so a result costs no lock of its own. `receipt` is there once
    one batch is stored; a table that became several has none.
    """

    __slots__ = ("_callbacks", "condition", "done", "error", "position", "receipt")

    def __init__(self, condition: Waitable) -> None:
        self.condition = condition
        self.done = False
        self.position: Position | None = None
        self.receipt: Receipt | None = None
        self.error: EmbarcaderoError | None = None
        self._callbacks: list[Callable[[], object]] = []

    def settle(
        self, position: Position | None, error: EmbarcaderoError | None, receipt: Receipt | None = None
    ) -> None:
        """The batch has ended. Later calls change nothing."""
        with self.condition.lock:
            if self.done:
                return
            self.position, self.error, self.receipt, self.done = position, error, receipt, True
            callbacks, self._callbacks = self._callbacks, []
            self.condition.notify_all()
        for callback in callbacks:
            _call(callback)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back once it has ended: in the client's own thread, or at once if it has."""
        with self.condition.lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        _call(callback)

    def wait(self, timeout: Duration | None) -> None:
        """Wait until it has ended. Ctrl-C gets through."""
        if self.done:
            return
        seconds = timeout_s(timeout)
        if not self.condition.wait_for(lambda: self.done, seconds):
            raise TimedOut(f"no outcome within {seconds:g} s", "the record may still be stored; ask again later")


    def waited_for(self) -> None:
        """A caller had to wait for this batch."""
        if self.receipt is not None and self.condition.lone_waits is not None:
            self.condition.lone_waits.waited(self.receipt.count)


def _call(callback: Callable[[], object]) -> None:
    """A callback that fails is its author's trouble: others are called, other batches end, connections stay."""
    try:
        callback()
    except Exception:
        _LOG.exception("a callback of a published record failed")


class LoneWaits:
    """Notice a program that waits for every record before it sends the next one, and log how to avoid the linger."""

    def __init__(self, topic: str, linger_ms: float) -> None:
        self._topic, self._linger_ms, self._streak, self._logged = topic, linger_ms, 0, linger_ms <= 0

    def waited(self, records: int) -> None:
        """A caller waited for a batch with this many records."""
        self._streak = self._streak + 1 if records == 1 else 0
        if self._streak >= _LONE_WAITS_MAX and not self._logged:
            self._logged = True
            _LOG.warning(
                "topic %r: the program waited for each of the last %d records before it sent the next one. Each wait "
                "includes linger_ms=%g. Send several records before you wait for their results, or open the publisher "
                "with linger_ms=0",
                self._topic,
                self._streak,
                self._linger_ms,
            )


class RecordFuture(msgspec.Struct, eq=False, gc=False):
    """The future position of one record (or of the first record of a table).

    There is one for every record, so it is made in C; it refers to nothing that refers back to it for long.
    """

    _result: BatchResult
    _number: int

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._result.done

    def result(self, timeout: Duration | None = None) -> Position | None:
        """Where the record is. Raises its error, or TimedOut.

        None: it is stored, but so long ago that the cluster no longer names the place; or ack=0, and nobody asked.
        """
        if not self._result.done:
            self._result.wait(timeout)
            self._result.waited_for()
        return self._outcome()

    def exception(self, timeout: Duration | None = None) -> EmbarcaderoError | None:
        """The error with which it ended, or None. Raises TimedOut while it has not ended."""
        self._result.wait(timeout)
        return self._result.error

    def staged(self, schema: int = 0, timeout: Duration | None = None) -> StagedBatch:
        """Name the stored batch, so that it can be published into another topic: see `publish_reference`.

        For batches that were published with `publish_encoded` into a topic of order 0 or 1. `schema` is the version of
        the other topic's schema by which the payload was encoded; 0: raw records. Raises the batch's error, TimedOut,
        or BadValue if its place is not known.

            staged = publisher.publish_encoded(payload, count).staged(schema=1)
        """
        position, receipt = self.result(timeout), self._result.receipt
        if position is None or receipt is None:
            raise BadValue(
                "the place of this batch is not known: it was published with ack=0, or as several batches",
                "stage with publish_encoded and ack=1 or ack=2",
            )
        return StagedBatch(
            receipt.topic_id, position.lane, position.index, receipt.size, receipt.count, receipt.crc, schema
        )

    def __repr__(self) -> str:
        result = self._result
        if not result.done:
            state = "waiting for the outcome"
        elif result.error is not None:
            state = f"failed with {type(result.error).__name__}: {result.error.message}"
        else:
            position = self._outcome()
            state = "done, position not known" if position is None else repr(position)
        return f"<{type(self).__name__} {state}>"

    def __dir__(self) -> list[str]:
        return public_names(self)

    def add_done_callback(self: FutureType, callback: Callable[[FutureType], object]) -> None:
        """Call `callback(self)` once the outcome is known, in the client's own thread: it should be quick.

        What it raises is logged and goes no further.
        """
        self._result.on_done(lambda: callback(self))

    def _outcome(self) -> Position | None:
        if self._result.error is not None:
            raise fresh(self._result.error)
        position = self._result.position
        if position is None or position.seq == NO_INDEX or not self._number:
            return position
        return Position(position.lane, position.index, position.seq + self._number)


class TableResult(BatchResult):
    """The result of a table that became several batches: ends when all have, with the first one's position."""

    __slots__ = ("_parts",)

    def __init__(self, condition: Waitable) -> None:
        super().__init__(condition)
        self._parts: list[BatchResult] = []

    def waited_for(self) -> None:
        """A caller had to wait for this table. Tables do not linger."""

    def add(self, part: BatchResult) -> None:
        """One more batch belongs to the table."""
        self._parts.append(part)

    def complete(self) -> None:
        """All batches of the table were added."""
        for part in self._parts:
            part.on_done(self._part_done)

    def _part_done(self) -> None:
        if all(part.done for part in self._parts):
            error = next((part.error for part in self._parts if part.error is not None), None)
            receipt = self._parts[0].receipt if len(self._parts) == 1 else None
            self.settle(None if error else self._parts[0].position, error, receipt)


_LONE_WAITS_MAX = 20
"""After this many records that a program waited for one by one, a hint is logged."""
_SLICE_S = 1.0
"""Longest sleep: whoever was to wake us may itself have been interrupted."""


class Waitable:
    """Where threads wait for a change of what `lock` guards."""

    def __init__(self) -> None:
        self.lock: Any = allocate_lock()
        self.lone_waits: LoneWaits | None = None
        self._waiters: list[Any] = []  # locks, each held by who sleeps on it

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Without the lock: wait until the predicate, asked with the lock held, is true; its last value."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            waiter = allocate_lock()
            waiter.acquire()
            left = _SLICE_S if give_up is None else min(_SLICE_S, give_up - time.monotonic())
            with self.lock:
                if predicate():
                    return True
                if left <= 0:
                    return False
                self._waiters.append(waiter)
            if not waiter.acquire(True, left):
                with self.lock:
                    if waiter in self._waiters:  # nobody else would take it away while nothing changes
                        self._waiters.remove(waiter)

    def refuse(self, error: EmbarcaderoError) -> None:
        """After a fork, in the child: whoever takes the lock, or waits, gets this error."""
        self.lock = RefusingLock(error)

    def notify_all(self) -> None:
        """With the lock held: let everybody look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KINDS: list[EntryKind | None] = [EntryKind(number) if number in list(EntryKind) else None for number in range(256)]


class OrderEntry(NamedTuple):
    """An order entry as plain numbers; see fabric/layout.py."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    session_seq: int
    append_us: int
    session: int
    location: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int
    origin: int
    partition: int
    schema: int
    kind: int
    flags: int
    check: int


invariant(OrderEntry._fields == ORDER.names, "an OrderEntry has the fields of the layout")


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of a batch. In a topic with a schema `value` is the row as a dict, and there is no key or header.

    Made in C and unknown to the garbage collector, which would take most of the time when there are millions.
    """

    seq: int
    key: bytes | None
    value: Any
    headers: dict[str, bytes] | None
    timestamp_us: int  # microseconds since 1970

    @property
    def timestamp(self) -> datetime:
        """The publisher's time in UTC (with a schema: when the batch was ordered)."""
        return _datetime(self.timestamp_us)


class Batch:
    """An immutable batch, or (when `gap` is set) a typed hole with no records.

    `session` and `session_seq` name the publisher's stream and the batch's number in it; `append_time` (`append_us` in
    microseconds since 1970) was set by the lane's writer and never goes back; `broker` is the broker that took the
    batch in; `schema_version` is the version of the topic's schema that its publisher used (0: raw records); `crc` is
    the CRC32C of the payload. `kind` is the kind of its entry, None for a hole in the log itself. One who reads with
    control=True also gets the entries that open, fence and close sessions: no records, and fields as in their entry.
    """

    __slots__ = (
        "_arrow",
        "_schemas",
        "append_us",
        "broker",
        "count",
        "crc",
        "flags",
        "gap",
        "index",
        "kind",
        "lane",
        "partition",
        "payload",
        "schema_version",
        "seq",
        "session",
        "session_seq",
    )

    def __init__(
        self,
        lane: int,
        entry: OrderEntry,
        payload: Any,
        brokers: Mapping[int, int],
        schemas: TopicSchemas = RAW,
    ) -> None:
        self.lane, self.index, self.seq, self.count = lane, entry.index, entry.seq, entry.count
        self.session, self.session_seq, self.partition = entry.session, entry.session_seq, entry.partition
        self.broker = brokers.get(entry.origin, entry.origin)
        self.payload = payload
        self.gap: Gap | None = None
        self.schema_version, self._schemas = entry.schema, schemas
        self.append_us, self.crc, self.flags, self.kind = entry.append_us, entry.crc, entry.flags, _KINDS[entry.kind]
        self._arrow: pa.RecordBatch | None = None

    @classmethod
    def of_entry(
        cls, lane: int, entry: OrderEntry, payload: Any, brokers: Mapping[int, int], schemas: TopicSchemas = RAW
    ) -> Batch:
        """The batch of an order entry; a SKIP becomes a gap."""
        if entry.kind != EntryKind.SKIP:
            return cls(lane, entry, payload, brokers, schemas)
        batch = cls(lane, entry, b"", brokers)
        batch.gap = Gap(GapKind.SKIPPED, entry.session_seq, entry.session_seq + entry.location, entry.session)
        return batch

    @classmethod
    def of_gap(cls, lane: int, gap: Gap, seq: int | None) -> Batch:
        """A hole in the log itself; `seq` is where it begins, if known."""
        fields = dict.fromkeys(OrderEntry._fields, 0)
        fields |= {"index": gap.start, "seq": NO_INDEX if seq is None else seq, "session": NO_SESSION}
        batch = cls(lane, OrderEntry(**fields), b"", {})
        batch.gap = gap
        return batch

    @property
    def append_time(self) -> datetime:
        """When it was ordered, in UTC."""
        return _datetime(self.append_us)

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return len(self.payload)

    def seq_of(self, i: int) -> int:
        """The seq of its record number `i`."""
        if not 0 <= i < self.count:
            raise IndexError(f"record {i} of a batch of {self.count}")
        return self.seq + i

    def to_arrow(self) -> pa.RecordBatch:
        """Its records as columns of the newest schema that its reader knows; those added since are null.

        Fully checked once, so a hostile publisher can't harm whoever reads the columns; not copied unless compressed.
        A gap has no rows. Corrupt, if the payload is not what its entry says.

            batch.to_arrow().column("price")        # a pyarrow Array
        """
        if self._arrow is None:
            self._arrow = self._decoded()
        return self._arrow

    def _decoded(self) -> pa.RecordBatch:
        newest = self._schemas.newest
        if not self.count:
            return pa.RecordBatch.from_pylist([], schema=newest)
        schema = self._schemas.of(self.schema_version)
        batch = decode_batch(self.payload, schema, self.count, full=True)
        if len(schema) == len(newest):
            return batch
        added = list(newest)[len(schema) :]
        nulls = pa.nulls(self.count, pa.struct(added))  # its columns share their buffers
        columns = [*batch.columns, *map(nulls.field, range(len(added)))]
        return pa.RecordBatch.from_arrays(columns, schema=newest)

    def records(self) -> list[Record]:
        """Its records as objects, at a few million a second; `to_arrow` is far quicker still.

            for record in batch.records():
                print(record.seq, record.key, record.value, record.timestamp)
        """
        if not self.count:
            return []
        seqs = range(self.seq, self.seq + self.count)
        if self._schemas.typed:
            rows = self._rows()
            return list(map(Record, seqs, repeat(None), rows, repeat(None), repeat(self.append_us)))
        key, value, headers, timestamp = self.to_arrow().columns
        times = timestamp.view(pa.int64()).to_numpy().tolist()
        return list(map(Record, seqs, _bytes(key), _bytes(value), _headers(headers), times))

    def _rows(self) -> list[dict[str, Any]]:
        columns = self.to_arrow()
        try:
            found: list[dict[str, Any]] = columns.to_pylist()
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError, LookupError, ImportError) as error:
            raise BadValue(f"{self!r} has a value that Python's types can't hold: {error}", "use to_arrow()") from None
        return found

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records())

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        if self.gap is not None:
            what = f"gap={self.gap.kind.name} {self.gap.start} to {self.gap.stop}"
        elif self.kind is EntryKind.BATCH:
            what = f"count={self.count}"
        else:
            what = "no entry" if self.kind is None else f"kind={self.kind.name}"
        return f"Batch(lane={self.lane}, index={self.index}, seq={self.seq}, {what})"

    def __dir__(self) -> list[str]:
        return public_names(self, ("payload", "of_entry", "of_gap"))


def _bytes(column: pa.Array) -> Iterable[Any]:
    """Through numpy: several times faster than to_pylist."""
    if column.null_count == len(column):
        return repeat(None)
    found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _headers(column: pa.Array) -> Iterable[dict[str, bytes] | None]:
    if column.null_count == len(column):
        return repeat(None)
    return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]


def _datetime(microseconds: int) -> datetime:
    try:
        return _EPOCH + timedelta(0, 0, microseconds)
    except OverflowError:
        raise Corrupt(f"a time of {microseconds} us is beyond the years 1 to 9999", "see timestamp_us") from None


class TopicInfo(Topic, frozen=True, kw_only=True):
    """A topic's settings. `schema` is its newest schema (None: raw records), `schemas` every version by number.

    `ranges` tells where it is on disks, oldest first by lane; of very many, the newest. `tier` is its table, if it has
    one, and how far it is in there.
    """

    versions: TopicSchemas
    ranges: list[Range] = []
    tier: Tier | None = None

    @property
    def schema(self) -> pa.Schema | None:
        """The newest schema; None for a topic of raw records."""
        return self.versions.newest if self.versions.typed else None

    @property
    def schemas(self) -> dict[int, pa.Schema]:
        """Every version of the schema, from 1 on; empty for a topic of raw records."""
        return self.versions.all()

    def __repr__(self) -> str:
        columns = None if self.schema is None else named(self.schema)
        return (
            f"TopicInfo(name={self.name!r}, order={order_label(self.order)}, partitions={self.partitions}, "
            f"replicas={self.replicas}, durable_on={self.durable_on}, schema={columns})"
        )

    def __dir__(self) -> list[str]:
        return public_names(self, ("checkpoint_ids", "had_no_id", "told", "versions"))

    @classmethod
    def told(cls, answer: TopicIs) -> TopicInfo:
        """What a broker told about a topic."""
        settings = {name: getattr(answer.topic, name) for name in Topic.__struct_fields__}
        versions = decode_versions(answer.columns, answer.widths)
        return cls(**settings, versions=versions, ranges=answer.ranges, tier=answer.tier)
