"""The intake of a publisher: records of many callers become batches, in order, and go to the publisher's core.

The `Intake` is thread-safe and knows no event loop. Records gather in one open builder per partition. A builder is
sealed when it is full, after the linger time, or on demand. Sealed batches leave in the order of sealing. A record is
one tuple in one list, so an exception between two instructions (Ctrl-C) cannot leave half a record.

`pending_bytes` counts every record from `add` until its batch is settled. This is the window: callers wait while it is
full. A builder gets space in advance, so most records cost one lock, one subtraction and one append, in
`Publisher.send` itself. This fast path (`current`) is open only while the event loop knows the builder. An interrupted
call may have created a builder that the event loop does not know.

The `Pump` runs in the event loop: it seals batches after their linger time, submits them, and closes the publisher. Its
`PublisherDriver` runs the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import pyarrow as pa

from embarcadero.client import lifetime
from embarcadero.client.arguments import PublisherOptions, asked_order, checked_ack, checked_durable
from embarcadero.client.batches import OutBatch
from embarcadero.client.brokers import BrokerPool, CoreDriver, now_us
from embarcadero.client.encoding import (
    GivenRecord,
    by_partition,
    encoded_records,
    fitted,
    given_bytes,
    given_microseconds,
    headers_size,
    pieces,
)
from embarcadero.client.publisher import PublisherCore
from embarcadero.client.results import BatchResult, LoneWaits, Receipt, RecordFuture, TopicInfo, Waitable
from embarcadero.client.session import PublisherSettings, merged
from embarcadero.errors import (
    Backpressure,
    BadSchema,
    BadValue,
    Closed,
    EmbarcaderoError,
    Forked,
    OutOfSequence,
    RecordsLost,
    TimedOut,
    fresh,
    invariant,
    raise_as_one,
)
from embarcadero.forks import abandon, tell_of_forks
from embarcadero.limits import FRAME_BYTES_MAX, RECORD_BYTES_MAX, RECORD_OVERHEAD_BYTES, RECORDS_PER_BATCH_MAX
from embarcadero.types import NO_INDEX, Ack, StagedBatch
from embarcadero.wire.partitioners import partition_of
from embarcadero.wire.schemas import TopicSchemas

FRAME_OVERHEAD_BYTES = 8 * 1024
"""The most that an Arrow message adds to the columns of a batch."""
_NO_MORE = 1 << 62  # bytes of a sealed builder: no record fits
_U16, _U32 = (1 << 16) - 1, (1 << 32) - 1
_ANY = -1  # the partition is chosen when the batch gets its number
_POLL_S = 0.001  # shortest interval between two looks at a congested publisher

invariant(FRAME_BYTES_MAX < RECORD_OVERHEAD_BYTES * RECORDS_PER_BATCH_MAX, "a batch is full before it has too many")


class Builder:
    """Records of a batch that is still open. `room` is the number of bytes that may be added without another check."""

    __slots__ = ("charged", "opened_s", "partition", "plain", "records", "result", "room", "sealed")

    def __init__(self, partition: int, result: BatchResult) -> None:
        self.partition, self.result = partition, result
        self.records: list[GivenRecord] = []
        self.plain = True  # no record has a key, headers or a given time
        self.room = 0
        self.charged = 0  # its bytes of the window: used ones and room
        self.sealed = False
        self.opened_s = time.monotonic()

    @property
    def used(self) -> int:
        """Bytes of its records."""
        return self.charged - self.room


def _nothing() -> bytes:
    return b""


class Sealed:
    """A batch that gets no more records. `cost` is its bytes of the window."""

    reference: StagedBatch | None = None

    def __init__(self, partition: int, result: BatchResult, count: int, cost: int, make: Callable[[], Any]) -> None:
        self.partition, self.result, self.count, self.cost = partition, result, count, cost
        self._make = make

    @cached_property
    def payload(self) -> memoryview:
        """Its bytes, encoded on first use: in the event loop's thread, not in the caller's."""
        make, self._make = self._make, _nothing  # releases the records
        return memoryview(make())

    @property
    def size(self) -> int:
        """Size of its payload, or of the payload that it references."""
        return self.payload.nbytes


class SealedReference(Sealed):
    """A batch that references a staged batch instead of carrying a payload."""

    def __init__(self, partition: int, result: BatchResult, staged: StagedBatch) -> None:
        super().__init__(partition, result, staged.count, staged.size, _nothing)
        self.reference = staged

    @property
    def size(self) -> int:
        """Size of the payload that it references."""
        return self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """The topic, and the largest sizes of records, batches and the window."""

    topic: str
    schemas: TopicSchemas
    partitions: int
    partitioner: str
    key: str  # name of the key column
    session: str | None = None
    compression: str | None
    batch_bytes: int
    window_bytes: int
    frame_bytes_max: int
    record_bytes_max: int = RECORD_BYTES_MAX
    records_max: int = RECORDS_PER_BATCH_MAX

    @property
    def piece_bytes(self) -> int:
        """Size of the batches into which a table is split."""
        return min(self.batch_bytes, self.frame_bytes_max - FRAME_OVERHEAD_BYTES)

    @property
    def record_bytes(self) -> int:
        """Largest size of a record."""
        return min(self.record_bytes_max, self.frame_bytes_max - FRAME_OVERHEAD_BYTES)

    @property
    def key_column(self) -> str | None:
        """Name of the key column. None: rows have no key."""
        return self.key or (None if self.schemas.typed else "key")


class Intake:
    """Gathers records into batches for one publisher."""

    def __init__(self, settings: IntakeSettings, future: type[RecordFuture] = RecordFuture) -> None:
        self.future, self._settings = future, settings
        self.condition = Waitable()
        self.sealed_total = 0  # batches sealed so far: each takes one sequence of the session
        self._partitions, self.window_bytes = settings.partitions, settings.window_bytes
        self._record_bytes_max = settings.record_bytes
        # full by bytes before it has too many records
        self._batch_bytes = min(settings.piece_bytes, RECORD_OVERHEAD_BYTES * settings.records_max)
        self._open: dict[int, Builder] = {}
        self.current: Builder | None = None  # the fast path: the builder of a topic with one partition
        self._keyless = 0  # partition of records without a key; rotates with each batch
        self._sealed: deque[Sealed] = deque()
        self.unsettled: dict[BatchResult, None] = {}
        self.pending_bytes = 0
        self._sealed_records = 0  # of batches that are sealed and not settled
        self.news = False  # a batch was created or sealed since the event loop last looked
        self.refusal: EmbarcaderoError | None = None  # why no record is accepted any more
        self.pressure: Backpressure | None = None  # why the cluster has been full for too long; not permanent
        self._lost: RecordsLost | None = None  # losses that the next call reports

    @property
    def lock(self) -> Any:
        """Guards everything here."""
        return self.condition.lock

    def refuse_all(self, error: EmbarcaderoError) -> None:
        """After a fork, in the child: every call raises this error."""
        self.condition.refuse(error)

    # --- all below: call with `lock` held; wait on `condition` without it ---
    def is_full(self) -> bool:
        """Whether adding must wait. Space that a builder has reserved and not used does not count."""
        if (builder := self._open.get(0)) is not None:
            self._take_room(builder)
        return self.pending_bytes >= self.window_bytes and self.refusal is None

    def end(self, why: EmbarcaderoError) -> None:
        """Accept no more records, and seal the open batches."""
        self.refusal = self.refusal or why
        self.seal()
        self.condition.notify_all()

    @property
    def gathering(self) -> bool:
        """Whether a batch is open."""
        return bool(self._open)

    def add(self, record: GivenRecord, size: int) -> RecordFuture:
        """Append a record to its batch. The batch reserves space for later records, which then take the fast path."""
        key = record[2]
        builder = self._open.get(0 if self._partitions == 1 else self._partition_for(key))
        if builder is None or builder.used + size > self._batch_bytes:
            builder = self._next_builder(key, size, builder)
        if size > builder.room:
            self._give_room(builder, size)
        builder.room -= size
        if key is not None or record[3] is not None or type(record[1]) is int:
            builder.plain = False
        number = len(builder.records)
        builder.records.append(record)
        if builder.used >= self._batch_bytes:
            self._seal(builder)
        return self.future(builder.result, number)

    def _give_room(self, builder: Builder, size: int) -> None:
        """Reserve space for this record. With one partition, also for later ones, within the batch and the window."""
        more = size - builder.room
        if self._partitions == 1:
            free = min(self._batch_bytes - builder.charged, self.window_bytes - self.pending_bytes)
            more = max(more, min(free, self._record_bytes_max - builder.room))
        builder.room += more
        builder.charged += more
        self.pending_bytes += more

    def _take_room(self, builder: Builder) -> None:
        self.pending_bytes -= builder.room
        builder.charged -= builder.room
        builder.room = 0

    def announced(self) -> None:
        """Open the fast path: the event loop knows every builder, and seals it in time."""
        self.news = False
        if self._partitions == 1 and self._lost is None and self.pressure is None:
            self.current = self._open.get(0)

    def lose(self, lost: RecordsLost) -> None:
        """Note that acked records are lost. The fast path stays closed until a caller has received the error."""
        self._lost = merged(self._lost, lost)
        self.current = None

    def press(self, pressure: Backpressure | None) -> None:
        """Set why the cluster accepts no new records, or None when it accepts them again."""
        self.pressure = pressure
        self.current = None if pressure is not None else self.current

    def waits(self, patient: bool) -> bool:
        """Whether adding must wait for space. `patient`: also while the cluster has been full for too long."""
        if self.refusal is not None:
            return False
        return patient if self.pressure is not None else self.is_full()

    def take_lost(self) -> RecordsLost | None:
        """Return the losses that no caller has received yet. Each is returned once."""
        lost, self._lost = self._lost, None
        return lost

    def _partition_for(self, key: bytes | None) -> int:
        return self._keyless if key is None else partition_of(key, self._partitions, self._settings.partitioner)

    def _next_builder(self, key: bytes | None, size: int, builder: Builder | None) -> Builder:
        """Return a builder with space. Sealing a full one moves keyless records to the next partition."""
        while builder is not None and builder.used + size > self._batch_bytes:
            self._seal(builder)
            builder = self._open.get(self._partition_for(key))
        if builder is None:
            partition = self._partition_for(key)
            builder = self._open[partition] = Builder(partition, BatchResult(self.condition))
            self.unsettled[builder.result] = None
            self.news = True
        return builder

    def _seal(self, builder: Builder) -> None:
        """Seal a builder. Ctrl-C may interrupt it anywhere: another call loses no batch and queues none twice."""
        self.current = None
        self.news = True
        self._take_room(builder)
        records = builder.records
        if not records:  # interrupted before its first record
            self.unsettled.pop(builder.result, None)
            self.pending_bytes, builder.charged = self.pending_bytes - builder.charged, 0
        elif not builder.sealed:
            make = partial(encoded_records, records, builder.plain, self._settings.compression)
            sealed = Sealed(builder.partition, builder.result, len(records), builder.charged, make)
            builder.sealed, builder.charged = True, _NO_MORE
            self.sealed_total += 1
            self._sealed_records += sealed.count
            self._sealed.append(sealed)
        if self._open.pop(builder.partition, None) is not None and builder.partition == self._keyless:
            self._keyless = (self._keyless + 1) % self._partitions

    def seal(self, opened_before_s: float = float("inf")) -> None:
        """Seal the builders that were opened before a time, by default all."""
        for builder in [b for b in self._open.values() if b.opened_s <= opened_before_s]:
            self._seal(builder)

    def oldest_s(self) -> float | None:
        """Return when the oldest open builder was opened."""
        return min((builder.opened_s for builder in self._open.values()), default=None)

    def add_piece(self, piece: Sealed) -> None:
        """Queue a piece of a table after everything that was added before."""
        self.seal()
        if piece.partition == _ANY:
            piece.partition, self._keyless = self._keyless, (self._keyless + 1) % self._partitions
        self.pending_bytes += piece.cost
        self.unsettled[piece.result] = None
        self.news = True
        self.sealed_total += 1
        self._sealed_records += piece.count
        self._sealed.append(piece)

    @property
    def has_sealed(self) -> bool:
        """Whether there are sealed batches."""
        return bool(self._sealed)

    def take_sealed(self) -> list[Sealed]:
        """Take all sealed batches, in order."""
        sealed, self._sealed = self._sealed, deque()
        return list(sealed)

    def settled(self, sealed: Sealed) -> None:
        """Release the bytes of a settled batch."""
        self.pending_bytes -= sealed.cost
        self._sealed_records -= sealed.count
        self.unsettled.pop(sealed.result, None)
        self.condition.notify_all()

    # --- no lock needed ---
    @property
    def pending_records(self) -> int:
        """Number of accepted records without an outcome."""
        return self._sealed_records + sum(len(builder.records) for builder in list(self._open.values()))

    def checked(self, value: Any, key: Any, headers: Any, timestamp: Any) -> tuple[GivenRecord, int]:
        """Check a record. Return it and the bytes that it counts for. Raises BadValue."""
        if type(value) is not bytes:
            value = given_bytes("value", value)
        size = len(value)
        if key is not None:
            if type(key) is not bytes:
                key = given_bytes("key", key)
            size += len(key)
        if headers is not None:
            headers = dict(headers) if isinstance(headers, Mapping) else headers  # the caller may change it later
            size += headers_size(headers)
        when = time.time() if timestamp is None else given_microseconds(timestamp)
        return (value, when, key, headers), size + RECORD_OVERHEAD_BYTES

    def check_size(self, size: int) -> None:
        """Raise BadValue if this publisher can never accept the record. Records on the fast path need no check."""
        if self._settings.schemas.typed:
            problem = f"topic {self._settings.topic!r} has a schema, and send() accepts raw bytes only"
            raise BadSchema(problem, "use publish()")
        if self._settings.session is not None:
            raise BadValue(
                f"send() does not work in session {self._settings.session!r}: it forms batches by time, and a session "
                "counts batches, so after a restart the program could not know which records are stored",
                "publish() your own batches with publish(rows, session_seq=n) and continue at next_session_seq(), or "
                "open the publisher without a session name",
            )
        if size > self._record_bytes_max + RECORD_OVERHEAD_BYTES:
            raise BadValue(
                f"the record has {size - RECORD_OVERHEAD_BYTES} bytes, and the limit is {self._record_bytes_max}",
                "split it into several records, or store it elsewhere and publish its address",
            )

    def pieces(self, data: Any, partition: int | None) -> Iterator[Sealed]:
        """Split a table into sealed batches, one by one, so that a large table is not copied as a whole."""
        if partition is not None:
            self._check_partition(partition)
        settings = self._settings
        table = fitted(data, settings.schemas, time.time_ns() // 1000, self._record_bytes_max)
        groups: list[tuple[int | None, Any]] = [(partition, table)]
        if partition is None:
            groups = by_partition(table, self._partitions, settings.key_column, settings.partitioner)
        for group, rows in groups:
            sizes = settings.piece_bytes, settings.frame_bytes_max
            for count, payload in pieces(rows, *sizes, settings.compression, settings.records_max):
                yield self.encoded_piece(payload, count, _ANY if group is None else group)

    def encoded_piece(self, payload: pa.Buffer, count: int, partition: int) -> Sealed:
        """Make a sealed batch of encoded bytes."""
        return Sealed(partition, BatchResult(self.condition), count, payload.size, lambda: payload)

    def reference_piece(self, staged: StagedBatch, partition: int) -> Sealed:
        """Make a batch that references a staged one. Raises BadValue if a field is out of its range."""
        self._check_staged(staged)
        self._check_partition(partition)
        return SealedReference(partition, BatchResult(self.condition), staged)

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self._partitions:
            problem = f"partition {partition} does not exist: the topic has {self._partitions}"
            raise BadValue(problem, f"use 0 to {self._partitions - 1}")

    def _check_staged(self, staged: StagedBatch) -> None:
        ranges = {
            "size": (1, self._settings.frame_bytes_max),
            "count": (1, self._settings.records_max),
            "lane": (0, _U32),
            "crc": (0, _U32),
            "index": (0, NO_INDEX - 1),
            "topic_id": (0, NO_INDEX),
            "schema": (0, _U16),
        }
        for name, (least, most) in ranges.items():
            if not least <= (value := getattr(staged, name)) <= most:
                raise BadValue(f"the staged batch has {name} {value}", f"{name} must be {least} to {most}")


class DriverListener(Protocol):
    """Receives the events of a publisher's driver, on the event loop."""

    def on_settled(self, sealed: Sealed) -> None:
        """A batch has an outcome."""
        ...

    def on_lost(self, lost: RecordsLost) -> None:
        """Acked records are lost."""
        ...

    def on_pressure(self, pressure: Backpressure | None) -> None:
        """The cluster has been full for too long, or has space again."""
        ...


class PublisherDriver(CoreDriver):
    """Feeds sealed batches to a publisher's core, in order, as its window allows."""

    core: PublisherCore

    def __init__(
        self,
        brokers: BrokerPool,
        core: PublisherCore,
        ack: Ack,
        schema: int,
        listener: DriverListener,
    ) -> None:
        super().__init__(brokers)
        self.core, self._ack, self._schema, self._listener = core, ack, schema, listener
        self._pressure: Backpressure | None = None
        self._queue: deque[Sealed] = deque()
        self._unsent: deque[OutBatch] = deque()  # ack=0: batches that no connection has yet
        self._closing = False
        self.ended = self._loop.create_future()  # the publisher accepts no more batches: it failed, or was closed
        self.final = self._loop.create_future()  # ended, and the lost acked records are known
        self.opened = asyncio.Event()  # the session is open, or will never open
        brokers.attach(self)

    @property
    def congested(self) -> bool:
        """Whether sealed batches wait here."""
        return bool(self._queue)

    def submit(self, batches: list[Sealed]) -> None:
        """Accept batches, in order."""
        self._queue.extend(batches)
        self.run()

    def run(self) -> None:
        """Do everything that is possible now."""
        if (lost := self.core.take_losses()) is not None:
            self._listener.on_lost(lost)  # before any later batch is settled
        while True:
            self._feed()
            super().run()
            settled = self.core.take_settled()
            for batch in settled:
                receipt = Receipt(self.core.topic_id, batch.size, batch.count, batch.crc) if batch.position else None
                batch.token.result.settle(batch.position, batch.error, receipt)
                self._listener.on_settled(batch.token)
            while self._unsent and self._unsent[0].sent:
                self._unsent.popleft().token.result.settle(None, None)
            if not settled or not self._queue:
                break  # only settling frees space
        if self._closing and not self._queue and not self.core.closed:
            self._closing = False
            self.core.close(now_us())
            super().run()
        if (pressure := self.core.pressure()) is not None or self._pressure is not None:
            self._pressure = pressure
            self._listener.on_pressure(pressure)
        if (self.core.closed or self.core.failed is not None) and not self.ended.done():
            self.ended.set_result(None)
        if self.core.closed and not self.final.done():
            self.final.set_result(None)
        if self.core.first_sequence is not None or self.core.closed:
            self.opened.set()

    def _feed(self) -> None:
        while self._queue and self.core.has_room(self._queue[0].size):
            sealed = self._queue.popleft()
            if sealed.reference is not None:
                batch = self.core.add_reference(sealed.reference, sealed.partition, now_us(), sealed)
            else:
                payload, count, partition = sealed.payload, sealed.count, sealed.partition
                batch = self.core.add(payload, count, partition, self._schema, now_us(), sealed)
            if self._ack == Ack.NONE:
                self._unsent.append(batch)

    def close(self) -> None:
        """Close the session once every batch is settled. Then `final` is done."""
        self._closing = True
        self.run()

    def fail(self, error: EmbarcaderoError) -> None:
        """End immediately: every batch ends with the error, or with an unknown outcome."""
        self.core.give_up(error)
        self.run()


class Pump:
    """The part of a publisher in the event loop. `moved` is set when space may be free, or the publisher ended."""

    def __init__(
        self,
        brokers: BrokerPool,
        topic: TopicInfo,
        options: PublisherOptions,
        future: type[RecordFuture] = RecordFuture,
    ) -> None:
        checked_durable(options.ack, topic)
        wanted = IntakeSettings(
            topic=topic.name,
            schemas=topic.versions,
            compression=options.compression,
            partitions=topic.partitions,
            partitioner=topic.partitioner,
            key=topic.key,
            batch_bytes=options.batch_bytes,
            frame_bytes_max=brokers.limits.frame_bytes,
            window_bytes=options.window_bytes,
            record_bytes_max=brokers.limits.record_bytes,
            records_max=brokers.limits.records,
            session=options.session,
        )
        self.intake = Intake(wanted, future)
        settings = PublisherSettings(
            topic=topic.name,
            session_name=options.session or "",
            window_bytes=options.window_bytes,
            resend_after_us=int(brokers.settings.resend_after_s * 1e6),
            delivery_timeout_us=int(options.delivery_timeout * 1e6),
            order=topic.order,
            acks=options.ack != Ack.NONE,
            durable=options.ack == Ack.DURABLE,
            replicated=topic.replicas > 0,
            session_at=options.session_at,
            topic_id=topic.id,
            session_order=asked_order(options.order, topic),
            order_required=options.order is not None,
        )
        self.topic, self.loop = topic.name, asyncio.get_running_loop()
        session = f", session {options.session!r}" if options.session else ""
        self.label = f"topic {topic.name!r}, ack={int(options.ack)}{session}"
        self.intake.condition.lone_waits = LoneWaits(topic.name, options.linger_ms)
        self._failed_records = 0  # of batches that ended with an error
        self._linger_s, self._patience_s = options.linger_ms / 1000, options.delivery_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._poked = False
        self.moved = asyncio.Event()
        self.driver = PublisherDriver(
            brokers, PublisherCore(settings), checked_ack(options.ack), topic.versions.version, self
        )
        self.driver.ended.add_done_callback(self._ended)
        self.forked = False
        tell_of_forks(self)
        self._open_pumps = brokers.pumps
        self._open_pumps.add(self)
        lifetime.opened(self)

    @property
    def failure(self) -> EmbarcaderoError | None:
        """The error with which it failed, if it did."""
        return self.driver.core.failed

    @property
    def state(self) -> str:
        """The state of the publisher in a few words, for people."""
        if self.forked:
            return "of the parent process"
        if (why := self.failure or self.intake.refusal) is not None:
            return "closed" if isinstance(why, Closed) else f"failed with {type(why).__name__}: {why.message}"
        waiting = self.intake.pending_records
        return f"{waiting:,} record{'s' * (waiting != 1)} without an outcome"

    def reports(self) -> list[EmbarcaderoError]:
        """Return losses that no caller has received yet, and possible losses."""
        return [report for report in (self.take_lost(), self.driver.core.unknown) if report is not None]

    @property
    def unstored(self) -> int:
        """Number of records with an error or without an outcome. Takes no lock: the program may be ending."""
        return self._failed_records + self.intake.pending_records

    def _after_fork(self) -> None:
        """In a forked child, refuse every call. Session and records stay with the parent."""
        self.forked = True
        problem = f"this publisher into {self.topic!r} was opened before the process was forked"
        self.intake.refuse_all(Forked(problem, "open another one in the child: log.publisher(...)"))
        abandon(self)

    # --- any thread, with the intake's lock held ---
    def wake(self, call: Callable[[Callable[[], object]], object]) -> None:
        """Wake the event loop for new batches, unless it will run anyway. `call` schedules a function there."""
        if not self._poked and (self.intake.has_sealed or (self._timer is None and self.intake.gathering)):
            call(self.poke)  # before the flag: a Ctrl-C between them causes a second call, never a missing one
            self._poked = True
        self.intake.announced()

    def next_sequence(self, first: int) -> int:
        """Return the sequence of the next batch of a publisher whose first batch had `first`."""
        self.intake.seal()
        return first + self.intake.sealed_total

    def continues(self, session_seq: int, first: int) -> None:
        """Raise OutOfSequence unless this is the next sequence of a session whose first batch had `first`."""
        expected = self.next_sequence(first)
        if session_seq != expected:
            what = "leaves a gap" if session_seq > expected else "goes back"
            raise OutOfSequence(
                f"session_seq {session_seq} {what}: the next sequence of this session is {expected}",
                f"publish with session_seq={expected}, or without session_seq",
            )

    # --- event loop ---
    def poke(self) -> None:
        """Submit sealed batches, and set the timer that seals the open ones."""
        intake = self.intake
        with intake.lock:
            self._poked = False
            self._seal_lingered()
            sealed = intake.take_sealed()
            oldest_s = intake.oldest_s()
            if oldest_s is not None and self._timer is None:
                wait_s = max(oldest_s + self._linger_s - time.monotonic(), 0.0)
                self._timer = self.loop.call_later(wait_s or max(self._linger_s, _POLL_S), self._ring)
            intake.announced()
        if sealed:
            self.driver.submit(sealed)

    def _seal_lingered(self) -> None:
        """Seal batches after the linger time. While earlier batches wait here, open ones keep growing instead."""
        if not self.driver.congested:
            self.intake.seal(time.monotonic() - self._linger_s)

    def _ring(self) -> None:
        self._timer = None
        self.poke()

    def on_settled(self, sealed: Sealed) -> None:
        """Free the window space of a batch that has its outcome."""
        with self.intake.lock:
            self.intake.settled(sealed)
            self._failed_records += sealed.count if sealed.result.error is not None else 0
        self.moved.set()

    def on_lost(self, lost: RecordsLost) -> None:
        """Note that acked records are lost: the next call reports it."""
        with self.intake.lock:
            self.intake.lose(lost)

    def on_pressure(self, pressure: Backpressure | None) -> None:
        """The cluster has been full for too long, or has space again: refuse callers, or accept them again."""
        with self.intake.lock:
            self.intake.press(pressure)
            self.intake.condition.notify_all()
        self.moved.set()

    def raise_lost(self) -> None:
        """Raise a loss, once. The publisher continues. Any thread, without the lock."""
        if (lost := self.take_lost()) is not None:
            raise lost

    def take_lost(self) -> RecordsLost | None:
        """Return losses that no caller has received yet. Any thread, without the lock."""
        with self.intake.lock:
            return self.intake.take_lost()

    def problems(self) -> list[EmbarcaderoError]:
        """Return new losses, possible losses, and the error of the publisher. Any thread, without the lock."""
        if self.forked:
            return []  # the parent reports them
        core = self.driver.core
        return [*filter(None, [self.take_lost()]), *(fresh(each) for each in (core.unknown, core.failed) if each)]

    def raise_problem(self) -> None:
        """Raise losses, and the error of the publisher. Any thread, without the lock."""
        raise_as_one(self.problems())

    def _ended(self, _: Any) -> None:
        """The publisher failed or was closed: end the open batches as well."""
        with self.intake.lock:
            self.intake.end(self.driver.core.failed or Closed("the publisher is closed", "open another one"))
        self.poke()
        self.moved.set()

    async def first_sequence(self, timeout: float | None) -> int:  # noqa: ASYNC109 - the timeout has its own error
        """Wait until the session is open, and return the sequence of the first batch. Sequences are fixed then."""
        patience = self._patience_s if timeout is None else timeout
        with self.intake.lock:
            pass  # raises in a forked child
        try:
            async with asyncio.timeout(patience):
                await self.driver.opened.wait()
        except TimeoutError:
            problem = f"the session was not open after {patience:g} s, and no record was accepted"
            raise Backpressure(problem, "call again later") from None
        core = self.driver.core
        if (first := core.first_sequence) is None or core.failed is not None:
            raise fresh(core.failed or self.intake.refusal or Closed("the publisher is closed", "open another one"))
        core.keep_numbers()  # the caller relies on these numbers from now on
        return first

    async def already_in(self, timeout: float | None) -> int:  # noqa: ASYNC109 - as above
        """Return how many sequences from the first batch on the session had used when it was opened."""
        first, found = await self.first_sequence(timeout), self.driver.core.found
        return max(0, (found or 0) - first)

    async def close(self, timeout: float | None) -> None:  # noqa: ASYNC109 - the timeout has its own error
        """Settle every batch, find losses, close the session. After `timeout` the rest ends with an unknown outcome.

        In a forked child this does nothing: the parent closes the publisher.
        """
        if self.forked:
            return
        with self.intake.lock:
            self.intake.end(Closed("the publisher is closed", "open another one"))
        self.moved.set()
        self.poke()
        self.driver.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may swallow a cancellation
                    await asyncio.shield(self.driver.final)
        finally:
            if not self.driver.final.done():  # the timeout passed, or this task was cancelled
                problem = "the batch had no outcome when the publisher was closed"
                self.driver.fail(TimedOut(problem, "read the log to find out if it is stored"))
            if self._timer is not None:
                self._timer.cancel()
            self.driver.stop()
        self._open_pumps.discard(self)  # not after a cancelled close: the caller has not received the losses
        lifetime.closed(self)
