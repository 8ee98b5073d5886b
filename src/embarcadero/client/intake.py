"""The way in: records of many callers become batches, in order, and the event loop hands these to a publisher's core.

The `Intake` is thread-safe and knows no event loop. Records gather in one open builder per partition. A builder is
sealed when it is full, or when it lingered long enough, or on demand; sealed batches leave in the order of sealing. A
record is one tuple in one list, so an exception between two instructions (Ctrl-C) can't leave half a record behind.
`pending_bytes` counts everything from `add` until its batch is settled: that is the window, and callers wait while it
is full. A builder is given room in advance: most records then cost one lock, one subtraction and one append, in
`Publisher.send` itself. That way in is open (`current`) only while the event loop knows of the builder: an interrupted
call may have begun one and announced it to no one.

The `Pump` is the event loop's half: it seals what lingered, submits and closes. Its `PublisherDriver` runs the core.
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
    by_partition,
    encoded,
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
from embarcadero.wire.schemas import (
    TopicSchemas,
    lone_payload,
    plain_batch,
    raw_batch,
)

Headers = Mapping[str, bytes]
GivenRecord = tuple[bytes, float | int, bytes | None, Headers | None]
"""Value, time, key, headers. A float is a clock's time in seconds, an int is a given one in microseconds."""

FRAME_OVERHEAD_BYTES = 8 * 1024
"""What an Arrow message adds to a batch's columns, at most."""
_NO_MORE = 1 << 62  # bytes of a sealed builder: whatever comes, it is full
_U16, _U32 = (1 << 16) - 1, (1 << 32) - 1
_ANY = -1  # a partition that is chosen when the batch takes its place in the order
_POLL_S = 0.001  # how often a congested publisher is looked at, at most

invariant(FRAME_BYTES_MAX < RECORD_OVERHEAD_BYTES * RECORDS_PER_BATCH_MAX, "a batch is full before it has too many")


class Builder:
    """Records of one batch to be. `room` is how many bytes may be added before anybody has to be asked."""

    __slots__ = ("charged", "opened_s", "partition", "plain", "records", "result", "room", "sealed")

    def __init__(self, partition: int, result: BatchResult) -> None:
        self.partition, self.result = partition, result
        self.records: list[GivenRecord] = []
        self.plain = True  # no record has a key, headers or a given time
        self.room = 0
        self.charged = 0  # bytes of the window that it holds: used ones and room
        self.sealed = False
        self.opened_s = time.monotonic()

    @property
    def used(self) -> int:
        """Bytes of its records."""
        return self.charged - self.room


def _nothing() -> bytes:
    return b""


class Sealed:
    """A batch that gets no more records. `cost` is what it takes of the window."""

    reference: StagedBatch | None = None

    def __init__(self, partition: int, result: BatchResult, count: int, cost: int, make: Callable[[], Any]) -> None:
        self.partition, self.result, self.count, self.cost = partition, result, count, cost
        self._make = make

    @cached_property
    def payload(self) -> memoryview:
        """Its bytes, encoded when first asked for: in the event loop's thread, not in the caller's."""
        make, self._make = self._make, _nothing  # the records are let go
        return memoryview(make())

    @property
    def size(self) -> int:
        """Bytes of its payload, or of the one that it names."""
        return self.payload.nbytes


class SealedReference(Sealed):
    """A batch that names a staged one instead of having a payload."""

    def __init__(self, partition: int, result: BatchResult, staged: StagedBatch) -> None:
        super().__init__(partition, result, staged.count, staged.size, _nothing)
        self.reference = staged

    @property
    def size(self) -> int:
        """Bytes of the payload that it names."""
        return self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """The topic that records are for, and how large records, batches and the window may be."""

    topic: str
    schemas: TopicSchemas
    partitions: int
    partitioner: str
    key: str  # the column of keys
    session: str | None = None
    compression: str | None
    batch_bytes: int
    window_bytes: int
    frame_bytes_max: int
    record_bytes_max: int = RECORD_BYTES_MAX
    records_max: int = RECORDS_PER_BATCH_MAX

    @property
    def piece_bytes(self) -> int:
        """At how many bytes a table is cut."""
        return min(self.batch_bytes, self.frame_bytes_max - FRAME_OVERHEAD_BYTES)

    @property
    def record_bytes(self) -> int:
        """How large a record may be."""
        return min(self.record_bytes_max, self.frame_bytes_max - FRAME_OVERHEAD_BYTES)

    @property
    def key_column(self) -> str | None:
        """The column of keys; None: rows have none."""
        return self.key or (None if self.schemas.typed else "key")


class Intake:
    """Gathers records into batches for one publisher."""

    def __init__(self, settings: IntakeSettings, future: type[RecordFuture] = RecordFuture) -> None:
        self.future, self._settings = future, settings
        self.condition = Waitable()
        self.sealed_total = 0  # batches sealed so far: each takes one sequence of the session
        self._partitions, self.window_bytes = settings.partitions, settings.window_bytes
        self._record_bytes_max = settings.record_bytes
        # a batch is full before it has too many records
        self._batch_bytes = min(settings.piece_bytes, RECORD_OVERHEAD_BYTES * settings.records_max)
        self._open: dict[int, Builder] = {}
        self.current: Builder | None = None  # the quick way in: the builder of a topic with one partition
        self._keyless = 0  # partition of records without a key; moves on with each batch
        self._sealed: deque[Sealed] = deque()
        self.unsettled: dict[BatchResult, None] = {}
        self.pending_bytes = 0
        self._sealed_records = 0  # of batches that are sealed and not settled
        self.news = False  # a batch was begun or sealed since the event loop last looked
        self.refusal: EmbarcaderoError | None = None  # why nothing more is taken
        self.pressure: Backpressure | None = None  # why the cluster has had no room for long; the publisher lives
        self._lost: RecordsLost | None = None  # what the next call has to report

    @property
    def lock(self) -> Any:
        """Guards everything here."""
        return self.condition.lock

    def refuse_all(self, error: EmbarcaderoError) -> None:
        """After a fork, in the child: every call gets this error."""
        self.condition.refuse(error)

    # --- all below: call with `lock` held; `condition` is where to wait, without it ---
    def is_full(self) -> bool:
        """Whether adding has to wait. Room that was given and not used does not count."""
        if (builder := self._open.get(0)) is not None:
            self._take_room(builder)
        return self.pending_bytes >= self.window_bytes and self.refusal is None

    def end(self, why: EmbarcaderoError) -> None:
        """Nothing more is taken; what gathers is sealed."""
        self.refusal = self.refusal or why
        self.seal()
        self.condition.notify_all()

    @property
    def gathering(self) -> bool:
        """Whether any record waits for its batch to be sealed."""
        return bool(self._open)

    def add(self, record: GivenRecord, size: int) -> RecordFuture:
        """Put a record into its batch, as the last one; its batch gets room for more, so that most need not ask."""
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
        """Room for this record; with one partition also for those that will follow, as far as batch and window go."""
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
        """The event loop knows of every builder, and will seal it in time."""
        self.news = False
        if self._partitions == 1 and self._lost is None and self.pressure is None:
            self.current = self._open.get(0)

    def lose(self, lost: RecordsLost) -> None:
        """Acked records are lost: the quick way in is closed until a caller has heard of it."""
        self._lost = merged(self._lost, lost)
        self.current = None

    def press(self, pressure: Backpressure | None) -> None:
        """While there is a reason, nothing new is taken."""
        self.pressure = pressure
        self.current = None if pressure is not None else self.current

    def waits(self, patient: bool) -> bool:
        """Whether adding has to wait for room. `patient`: also while the cluster says that it has none."""
        if self.refusal is not None:
            return False
        return patient if self.pressure is not None else self.is_full()

    def take_lost(self) -> RecordsLost | None:
        """What to tell the caller, once."""
        lost, self._lost = self._lost, None
        return lost

    def _partition_for(self, key: bytes | None) -> int:
        return self._keyless if key is None else partition_of(key, self._partitions, self._settings.partitioner)

    def _next_builder(self, key: bytes | None, size: int, builder: Builder | None) -> Builder:
        """A builder with room; sealing a full one moves keyless records on to another partition, maybe full as well."""
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
        """Ctrl-C may end any call here: what is done again next time loses no batch and queues none twice."""
        self.current = None
        self.news = True
        self._take_room(builder)
        records = builder.records
        if not records:  # interrupted before its first record
            self.unsettled.pop(builder.result, None)
            self.pending_bytes, builder.charged = self.pending_bytes - builder.charged, 0
        elif not builder.sealed:
            make = partial(_payload, records, builder.plain, self._settings.compression)
            sealed = Sealed(builder.partition, builder.result, len(records), builder.charged, make)
            builder.sealed, builder.charged = True, _NO_MORE
            self.sealed_total += 1
            self._sealed_records += sealed.count
            self._sealed.append(sealed)
        if self._open.pop(builder.partition, None) is not None and builder.partition == self._keyless:
            self._keyless = (self._keyless + 1) % self._partitions

    def seal(self, opened_before_s: float = float("inf")) -> None:
        """Seal builders that were opened before a time; all of them by default."""
        for builder in [b for b in self._open.values() if b.opened_s <= opened_before_s]:
            self._seal(builder)

    def oldest_s(self) -> float | None:
        """When the oldest open builder was opened."""
        return min((builder.opened_s for builder in self._open.values()), default=None)

    def add_piece(self, piece: Sealed) -> None:
        """Put a piece of a table behind everything added before."""
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
        """Whether there is something to take."""
        return bool(self._sealed)

    def take_sealed(self) -> list[Sealed]:
        """All sealed batches, in order."""
        sealed, self._sealed = self._sealed, deque()
        return list(sealed)

    def settled(self, sealed: Sealed) -> None:
        """A batch was settled: its bytes are free again."""
        self.pending_bytes -= sealed.cost
        self._sealed_records -= sealed.count
        self.unsettled.pop(sealed.result, None)
        self.condition.notify_all()

    # --- no lock needed ---
    @property
    def pending_records(self) -> int:
        """Records that were taken and have no outcome."""
        return self._sealed_records + sum(len(builder.records) for builder in list(self._open.values()))

    def checked(self, value: Any, key: Any, headers: Any, timestamp: Any) -> tuple[GivenRecord, int]:
        """A record, and how many bytes it counts for. BadValue before anything is sent."""
        if type(value) is not bytes:
            value = given_bytes("value", value)
        size = len(value)
        if key is not None:
            if type(key) is not bytes:
                key = given_bytes("key", key)
            size += len(key)
        if headers is not None:
            headers = dict(headers) if isinstance(headers, Mapping) else headers  # the caller may go on changing it
            size += headers_size(headers)
        when = time.time() if timestamp is None else given_microseconds(timestamp)
        return (value, when, key, headers), size + RECORD_OVERHEAD_BYTES

    def check_size(self, size: int) -> None:
        """BadValue, if a record can't be taken at all. One that found room in a batch need not be asked about."""
        if self._settings.schemas.typed:
            raise BadSchema(f"topic {self._settings.topic!r} has a schema, and send() takes raw bytes", "use publish()")
        if self._settings.session is not None:
            raise BadValue(
                f"send() in session {self._settings.session!r}: it cuts batches by time, and a session counts batches, "
                "so after a restart nobody could tell which records are stored",
                "publish() batches of your own (publish(rows, session_seq=n)) and go on at next_session_seq(), or open "
                "the publisher without a session name",
            )
        if size > self._record_bytes_max + RECORD_OVERHEAD_BYTES:
            raise BadValue(
                f"a record of {size - RECORD_OVERHEAD_BYTES} bytes",
                f"records have at most {self._record_bytes_max} bytes",
            )

    def pieces(self, data: Any, partition: int | None) -> Iterator[Sealed]:
        """A table as sealed batches, one by one, so that a large one needs no second copy of itself."""
        if partition is not None and not 0 <= partition < self._partitions:
            raise BadValue(f"partition {partition} of {self._partitions}", f"use 0 to {self._partitions - 1}")
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
        """A batch whose bytes are made already."""
        return Sealed(partition, BatchResult(self.condition), count, payload.size, lambda: payload)

    def reference_piece(self, staged: StagedBatch, partition: int) -> Sealed:
        """A batch that names a staged one. Raises BadValue for what no frame can name."""
        self._check_staged(staged)
        if not 0 <= partition < self._partitions:
            raise BadValue(f"partition {partition} of {self._partitions}", f"use 0 to {self._partitions - 1}")
        return SealedReference(partition, BatchResult(self.condition), staged)

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
                raise BadValue(f"a staged batch with {name} {value}", f"{name} is {least} to {most}")


def _payload(records: list[GivenRecord], plain: bool, compression: str | None) -> Any:
    if plain and len(records) == 1 and compression is None:
        return lone_payload(records[0][0], records[0][1])
    return encoded(_batch(records, plain), compression)


def _batch(records: list[GivenRecord], plain: bool) -> pa.RecordBatch:
    """Records as columns. (zip(*records) would walk through all of them at once, ten times slower.)"""
    values, times = [record[0] for record in records], [record[1] for record in records]
    if plain:
        return plain_batch(values, times)
    times_us = [when if type(when) is int else round(when * 1e6) for when in times]
    return raw_batch([record[2] for record in records], values, [record[3] for record in records], times_us)


class DriverListener(Protocol):
    """What a publisher's driver reports to, on the event loop."""

    def on_settled(self, sealed: Sealed) -> None:
        """A batch has its outcome."""
        ...

    def on_lost(self, lost: RecordsLost) -> None:
        """Acked records are lost."""
        ...

    def on_pressure(self, pressure: Backpressure | None) -> None:
        """The cluster has had no room for long, or has some again."""
        ...


class PublisherDriver(CoreDriver):
    """Feeds sealed batches to a publisher's core, in order, as it has room."""

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
        self._unsent: deque[OutBatch] = deque()  # ack=0: batches whose futures wait to be handed to a connection
        self._closing = False
        self.ended = self._loop.create_future()  # the publisher takes nothing more: it failed, or was closed
        self.final = self._loop.create_future()  # and it is known which acked records are lost
        self.opened = asyncio.Event()  # the session is open, or will never be
        brokers.attach(self)

    @property
    def congested(self) -> bool:
        """Whether sealing more batches would only make them wait here."""
        return bool(self._queue)

    def submit(self, batches: list[Sealed]) -> None:
        """Take batches in their order."""
        self._queue.extend(batches)
        self.run()

    def run(self) -> None:
        """Move whatever can move."""
        if (lost := self.core.take_losses()) is not None:
            self._listener.on_lost(lost)  # before anything that was sent later is settled
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
                break  # settling makes room, and nothing else
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
        """Close the session once everything is settled; `final` tells when."""
        self._closing = True
        self.run()

    def fail(self, error: EmbarcaderoError) -> None:
        """End at once, whatever is not known: every batch ends, with the error or with an unknown outcome."""
        self.core.give_up(error)
        self.run()


class Pump:
    """The event loop's half of a publisher. `moved` is set whenever room may have come free or the end has come."""

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
        """Why it failed, if it did."""
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
        """Losses that no caller has heard of, and losses in doubt."""
        return [report for report in (self.take_lost(), self.driver.core.unknown) if report is not None]

    @property
    def unstored(self) -> int:
        """Records that ended with an error, or have no outcome. Without the lock: the program may be about to end."""
        return self._failed_records + self.intake.pending_records

    def _after_fork(self) -> None:
        """In a forked child: the session is the parent's, and so are the records."""
        self.forked = True
        problem = f"this publisher into {self.topic!r} was opened before the process was forked"
        self.intake.refuse_all(Forked(problem, "open another one in the child: log.publisher(...)"))
        abandon(self)

    # --- any thread, with the intake's lock held ---
    def tell(self, call: Callable[[Callable[[], object]], object]) -> None:
        """Have the event loop look at what is new (`call` makes it call something), unless it will anyway."""
        if not self._poked and (self.intake.has_sealed or (self._timer is None and self.intake.gathering)):
            call(self.poke)  # before the flag: Ctrl-C in between costs a second look, never the only one
            self._poked = True
        self.intake.announced()

    def next_sequence(self, first: int) -> int:
        """The sequence of the next batch of a publisher whose batches began with `first`."""
        self.intake.seal()
        return first + self.intake.sealed_total

    def continues(self, session_seq: int, first: int) -> None:
        """Refuse a sequence that is not the next one of a session whose batches began with `first`."""
        expected = self.next_sequence(first)
        if session_seq != expected:
            what = "leaves a gap" if session_seq > expected else "goes back"
            raise OutOfSequence(
                f"session_seq {session_seq} {what}: the next one of this session is {expected}",
                f"publish with session_seq={expected}, or leave it out",
            )

    # --- event loop ---
    def poke(self) -> None:
        """Take what is sealed, and see that what is not will be."""
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
        """Batches that could not be sent anyway go on growing instead."""
        if not self.driver.congested:
            self.intake.seal(time.monotonic() - self._linger_s)

    def _ring(self) -> None:
        self._timer = None
        self.poke()

    def on_settled(self, sealed: Sealed) -> None:
        """A batch has its outcome: its room in the window is free."""
        with self.intake.lock:
            self.intake.settled(sealed)
            self._failed_records += sealed.count if sealed.result.error is not None else 0
        self.moved.set()

    def on_lost(self, lost: RecordsLost) -> None:
        """Acked records are lost: the next call reports it."""
        with self.intake.lock:
            self.intake.lose(lost)

    def on_pressure(self, pressure: Backpressure | None) -> None:
        """The cluster has had no room for long, or has some again: callers are refused, or go on."""
        with self.intake.lock:
            self.intake.press(pressure)
            self.intake.condition.notify_all()
        self.moved.set()

    def raise_lost(self) -> None:
        """Any thread, without the lock: tell the caller of a loss, once. The publisher goes on."""
        if (lost := self.take_lost()) is not None:
            raise lost

    def take_lost(self) -> RecordsLost | None:
        """Any thread, without the lock: losses that no caller has heard of."""
        with self.intake.lock:
            return self.intake.take_lost()

    def problems(self) -> list[EmbarcaderoError]:
        """Any thread, without the lock: losses that no caller has heard of, losses in doubt, why it failed."""
        if self.forked:
            return []  # they are the parent's
        core = self.driver.core
        return [*filter(None, [self.take_lost()]), *(fresh(each) for each in (core.unknown, core.failed) if each)]

    def raise_problem(self) -> None:
        """Any thread, without the lock: tell the caller of losses and of why the publisher failed."""
        raise_as_one(self.problems())

    def _ended(self, _: Any) -> None:
        """The publisher failed or was closed: whatever still gathers ends as well."""
        with self.intake.lock:
            self.intake.end(self.driver.core.failed or Closed("the publisher is closed", "open another one"))
        self.poke()
        self.moved.set()

    async def first_sequence(self, timeout: float | None) -> int:  # noqa: ASYNC109 - its end has its own error
        """The sequence of the publisher's first batch; waits until its session is open. Numbers stay from then on."""
        patience = self._patience_s if timeout is None else timeout
        with self.intake.lock:
            pass  # raises in a forked child
        try:
            async with asyncio.timeout(patience):
                await self.driver.opened.wait()
        except TimeoutError:
            problem = f"the session was not open within {patience:g} s"
            raise Backpressure(problem, "nothing was taken; try again") from None
        core = self.driver.core
        if (first := core.first_sequence) is None or core.failed is not None:
            raise fresh(core.failed or self.intake.refusal or Closed("the publisher is closed", "open another one"))
        core.keep_numbers()  # the caller goes by these numbers from now on
        return first

    async def already_in(self, timeout: float | None) -> int:  # noqa: ASYNC109 - as above
        """How far beyond its first batch the session was when it was opened."""
        first, found = await self.first_sequence(timeout), self.driver.core.found
        return max(0, (found or 0) - first)

    async def close(self, timeout: float | None) -> None:  # noqa: ASYNC109 - what is left at its end gets its own end
        """Settle everything, learn what is lost, close the session. After `timeout` the rest has an unknown outcome.

        In a forked child it does nothing: the parent closes it.
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
            if not self.driver.final.done():  # the time is over, or we were cancelled
                self.driver.fail(TimedOut("not settled when the publisher was closed", "read the log to find out"))
            if self._timer is not None:
                self._timer.cancel()
            self.driver.stop()
        self._open_pumps.discard(self)  # one whose close was cancelled stays: its caller has not heard what is lost
        lifetime.closed(self)
