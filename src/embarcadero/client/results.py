"""Results for callers: futures of published records, batches and records that were read, topics."""

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
    """Facts of a stored batch, other than its position."""

    topic_id: int
    size: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    crc: int


class BatchResult:
    """The outcome of a batch. It settles once. Any thread may wait for it or add callbacks.

    All results of a publisher share `condition`, so a result needs no lock of its own. A stored batch has a `receipt`;
    a table of several batches has none.
    """

    __slots__ = ("_callbacks", "condition", "done", "error", "position", "receipt")

    def __init__(self, condition: Waitable) -> None:
        self.condition = condition
        self.done = False
        self.position: Position | None = None
        self.receipt: Receipt | None = None
        self.error: EmbarcaderoError | None = None
        self._callbacks: list[Callable[[], object]] = []

    def settle(self, position: Position | None, error: EmbarcaderoError | None, receipt: Receipt | None = None) -> None:
        """Set the outcome. Later calls change nothing."""
        with self.condition.lock:
            if self.done:
                return
            self.position, self.error, self.receipt, self.done = position, error, receipt, True
            callbacks, self._callbacks = self._callbacks, []
            self.condition.notify_all()
        for callback in callbacks:
            _call(callback)

    def on_done(self, callback: Callable[[], object]) -> None:
        """Call back when the outcome is known: in the client's own thread, or immediately if it is known already."""
        with self.condition.lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        _call(callback)

    def wait(self, timeout: Duration | None) -> None:
        """Wait for the outcome. Ctrl-C interrupts the wait."""
        if self.done:
            return
        seconds = timeout_s(timeout)
        if not self.condition.wait_for(lambda: self.done, seconds):
            problem = f"the record has no outcome after {seconds:g} s"
            raise TimedOut(problem, "it may still be stored; call result() again later")

    def waited_for(self) -> None:
        """Count that a caller had to wait for this batch."""
        if self.receipt is not None and self.condition.lone_waits is not None:
            self.condition.lone_waits.waited(self.receipt.count)


def _call(callback: Callable[[], object]) -> None:
    """Call a callback and log its error. Other callbacks, batches and connections are not affected."""
    try:
        callback()
    except Exception:
        _LOG.exception("a callback of a published record failed")


class LoneWaits:
    """Notice a program that waits for every record before it sends the next one, and log how to avoid the linger."""

    def __init__(self, topic: str, linger_ms: float) -> None:
        self._topic, self._linger_ms, self._streak, self._logged = topic, linger_ms, 0, linger_ms <= 0

    def waited(self, records: int) -> None:
        """Count that a caller waited for a batch with this many records."""
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
    """The future position of a record, or of the first record of a table.

    Every record has one, so it is created in C. It is in no long-lived reference cycle.
    """

    _result: BatchResult
    _number: int

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._result.done

    def result(self, timeout: Duration | None = None) -> Position | None:
        """Wait for the outcome and return the position of the record.

        Args:
            timeout: Seconds. None means no limit.

        Returns:
            The position. None with ack=0, or if the record was stored so long ago that the cluster no longer knows the
            position.

        Raises:
            TimedOut: There is no outcome yet.
            EmbarcaderoError: The error of the record.

        Example:
            position = publisher.send(b"value").result(timeout=10)
        """
        if not self._result.done:
            self._result.wait(timeout)
            self._result.waited_for()
        return self._outcome()

    def exception(self, timeout: Duration | None = None) -> EmbarcaderoError | None:
        """Wait for the outcome and return the error of the record, or None. Raises TimedOut."""
        self._result.wait(timeout)
        return self._result.error

    def staged(self, schema: int = 0, timeout: Duration | None = None) -> StagedBatch:
        """Wait for the outcome and return a reference to the stored batch, for `publish_reference`.

        The batch must have been published with `publish_encoded` into a topic of order 0 or 1.

        Args:
            schema: Version of the target topic's schema with which the payload was encoded. 0: raw records.
            timeout: Seconds. None means no limit.

        Raises:
            TimedOut: There is no outcome yet.
            BadValue: The position of the batch is not known.
            EmbarcaderoError: The error of the batch.

        Example:
            staged = publisher.publish_encoded(payload, count).staged(schema=1)
        """
        position, receipt = self.result(timeout), self._result.receipt
        if position is None or receipt is None:
            raise BadValue(
                "the position of this batch is not known: it was published with ack=0, or as several batches",
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
        """Call `callback(self)` when the outcome is known, in the client's own thread. It must be fast.

        An exception of the callback is logged.
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
    """The result of a table of several batches. It ends with the last batch, and has the position of the first."""

    __slots__ = ("_parts",)

    def __init__(self, condition: Waitable) -> None:
        super().__init__(condition)
        self._parts: list[BatchResult] = []

    def waited_for(self) -> None:
        """Do nothing: tables do not linger."""

    def add(self, part: BatchResult) -> None:
        """Add a batch of the table."""
        self._parts.append(part)

    def complete(self) -> None:
        """Note that all batches of the table were added."""
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
"""Longest sleep. The thread that should wake this one may have been interrupted."""


class Waitable:
    """A condition variable for the state that `lock` guards.

    It uses only locks written in C. Ctrl-C may interrupt a thread anywhere: those of `threading.Condition` are written
    in Python, and can be left in a wrong state.
    """

    def __init__(self) -> None:
        self.lock: Any = allocate_lock()
        self.lone_waits: LoneWaits | None = None
        self._waiters: list[Any] = []  # locks, each held by a sleeping thread

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the predicate is true, and return its last value. Call without the lock; the predicate has it."""
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
                    if waiter in self._waiters:  # only notify_all removes it otherwise
                        self._waiters.remove(waiter)

    def refuse(self, error: EmbarcaderoError) -> None:
        """After a fork, in the child: threads that take the lock or wait get this error."""
        self.lock = RefusingLock(error)

    def notify_all(self) -> None:
        """Wake all waiting threads. Call with the lock held."""
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
    """A record of a batch. In a topic with a schema, `value` is the row as a dict, and key and headers are None.

    Records are created in C and not tracked by Python's garbage collector, which is too slow for millions of them.
    """

    seq: int
    key: bytes | None
    value: Any
    headers: dict[str, bytes] | None
    timestamp_us: int  # microseconds since 1970

    @property
    def timestamp(self) -> datetime:
        """The time from the publisher, in UTC. In a topic with a schema: when the batch was ordered."""
        return _datetime(self.timestamp_us)


class Batch:
    """An immutable batch of records, or (when `gap` is set) a typed gap without records.

    - `lane`, `index`, `seq`, `count`: its position, and its number of records.
    - `session`, `session_seq`: the session of its publisher, and its number there.
    - `append_time` (`append_us` in microseconds since 1970): set by the writer of the lane; it never decreases.
    - `broker`: the broker that received it.
    - `schema_version`: the version of the topic's schema that its publisher used (0: raw records).
    - `crc`: the CRC32C of the payload.
    - `kind`: the kind of its entry; None for a gap in the log itself. With control=True a reader also gets the entries
      that open, fence and close sessions: they have no records.

    Example:
        for record in batch:
            print(record.seq, record.value)
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
        """Create the batch of an order entry. A SKIP becomes a gap."""
        if entry.kind != EntryKind.SKIP:
            return cls(lane, entry, payload, brokers, schemas)
        batch = cls(lane, entry, b"", brokers)
        batch.gap = Gap(GapKind.SKIPPED, entry.session_seq, entry.session_seq + entry.location, entry.session)
        return batch

    @classmethod
    def of_gap(cls, lane: int, gap: Gap, seq: int | None) -> Batch:
        """Create a gap in the log itself. `seq` is its first seq, if known."""
        fields = dict.fromkeys(OrderEntry._fields, 0)
        fields |= {"index": gap.start, "seq": NO_INDEX if seq is None else seq, "session": NO_SESSION}
        batch = cls(lane, OrderEntry(**fields), b"", {})
        batch.gap = gap
        return batch

    @property
    def append_time(self) -> datetime:
        """The time when the batch was ordered, in UTC."""
        return _datetime(self.append_us)

    @property
    def size(self) -> int:
        """Size of its payload in bytes."""
        return len(self.payload)

    def seq_of(self, i: int) -> int:
        """Return the seq of record number `i`. Raises IndexError."""
        if not 0 <= i < self.count:
            raise IndexError(f"record {i} does not exist: the batch has {self.count}")
        return self.seq + i

    def to_arrow(self) -> pa.RecordBatch:
        """Return the records as Arrow columns of the newest schema that the reader knows.

        Columns that are newer than the batch are null. The payload is fully checked once, so a hostile publisher cannot
        harm the reader of the columns. It is not copied unless it is compressed. A gap has no rows.

        Raises:
            Corrupt: The payload contradicts its entry.

        Example:
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
        """Return the records as objects. `to_arrow` is much faster for large batches.

        Raises:
            Corrupt: The payload contradicts its entry.
            BadValue: A value does not fit Python's types, for example a nanosecond timestamp.

        Example:
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
            raise BadValue(f"{self!r} has a value that no type of Python fits: {error}", "use to_arrow()") from None
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
    """Convert through numpy, which is several times faster than to_pylist."""
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
        raise Corrupt(f"the time {microseconds} us is not in the years 1 to 9999", "use timestamp_us") from None


class TopicInfo(Topic, frozen=True, kw_only=True):
    """The settings of a topic, with its schemas, its ranges and its table.

    `ranges` has the ranges of each lane on disks, oldest first; of very many, only the newest. `tier` is the table of
    the topic, with its progress, or None.
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
        """All versions of the schema, from 1 on; empty for a topic of raw records."""
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
    def of(cls, answer: TopicIs) -> TopicInfo:
        """Create it from a broker's answer."""
        settings = {name: getattr(answer.topic, name) for name in Topic.__struct_fields__}
        versions = decode_versions(answer.columns, answer.widths)
        return cls(**settings, versions=versions, ranges=answer.ranges, tier=answer.tier)
