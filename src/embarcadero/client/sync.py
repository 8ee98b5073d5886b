"""The synchronous client: the calls of `aio`, for programs with threads or without.

One background thread per Log runs an event loop; everything here is thread-safe. `send` only appends to a list under a
lock; sealing, encoding and sending happen in the background thread. Ctrl-C gets through every wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from time import time as now_s
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client import aio
from embarcadero.client.arguments import (
    AS_CONFIGURED,
    Place,
    PublisherArguments,
    PublisherOptions,
    Timeout,
    TopicChanges,
    check_read,
    check_timeout,
    close_patience,
    patience_s,
    place,
    publisher_options,
)
from embarcadero.client.encoded import SyncEncodedCalls
from embarcadero.client.named import SyncPublisherCalls, SyncSessionCalls
from embarcadero.client.net import lifetime
from embarcadero.client.read.spans import Span, reader_core
from embarcadero.client.results import Batch, RecordFuture, TableResult, TopicInfo
from embarcadero.client.surveys import SyncSurveyCalls
from embarcadero.client.sync_subscriber import Exit, Subscriber
from embarcadero.client.thread import LoopThread
from embarcadero.client.tiers import SyncTierCalls
from embarcadero.config import Config
from embarcadero.errors import (
    Backpressure,
    EmbarcaderoError,
    OutcomeUnknown,
    TimedOut,
    as_reported,
    fresh,
    raise_as_one,
)
from embarcadero.forks import tell_of_forks
from embarcadero.limits import CLOSE_TIMEOUT_S, RECORD_OVERHEAD_BYTES
from embarcadero.types import Cut, Position, ReaderProgress, Tail, Topic

if TYPE_CHECKING:
    from embarcadero.client.publish.intake import Record, Sealed
    from embarcadero.client.publish.pump import Pump


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    config: str | Path | Config | None = None,
    timeout: Timeout = AS_CONFIGURED,
) -> Log:
    """Connect to a cluster by the addresses (`host:port`) of one or several of its brokers. Raises Unreachable.

    `config` names an `embarcadero.yaml`; without addresses those of its `client.brokers` are used. Without a `timeout`
    it takes at most `client.connect_timeout_s`.

        with emb.connect("127.0.0.1:9092", timeout=2.0) as log: ...
        with emb.connect(config="embarcadero.yaml") as log: ...
    """
    thread = LoopThread()
    try:
        return Log(thread, thread.wait(aio.connect(addresses, config=config, timeout=timeout)))
    except BaseException:
        thread.stop()
        raise


class Log(SyncTierCalls, SyncSessionCalls, SyncSurveyCalls):
    """A client of one cluster. Its publishers and subscribers share one thread and one connection per broker."""

    def __init__(self, thread: LoopThread, log: aio.Log) -> None:
        self.cluster: Any = None  # the LocalCluster that `local` started
        self.thread, self._log, self.brokers = thread, log, log.brokers
        thread.at_end = log.brokers.hang_up
        self._parts: set[Publisher | Subscriber] = set()
        self._closed = False
        log.finalizer.detach()
        self._finalizer = lifetime.close_when_dropped(self, log.brokers, thread.end)

        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: connect again with the first call. Publishers, subscribers and the cluster are not its."""
        self._parts = set()
        self._finalizer.detach()

    @property
    def address(self) -> str:
        """The addresses it was connected with, as `connect` takes them."""
        return self._log.address

    # --- topics ---
    def create_topic(
        self,
        name: str,
        *,
        order: int | str | None = None,
        partitions: int | None = None,
        replicas: int | None = None,
        durable_on: int | None = None,
        schema: pa.Schema | None = None,
        on_gap: str | None = None,
        gap_timeout_ms: int | None = None,
        session_ttl_s: int | None = None,
        retention_bytes: int | None = None,
        retention_s: int | None = None,
        partitioner: str | None = None,
        key: str | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> TopicInfo:
        """Create a topic; None: the cluster's default. Raises TopicExists, BadName, BadValue, BadSchema.

        With a `schema`, records are rows of these columns, `publish` takes them and checks them, and `send` is refused.
        `replicas` have each record on disk, and it is durable once `durable_on` of them have synced it. Beyond
        `retention_bytes`, or after `retention_s`, the oldest records go; 0: never. With several `partitions` a record's
        key chooses one: by `partitioner` "murmur2", as Kafka's Java clients do, or "crc32c". `key` names the column of
        the schema that has keys: binary, string or integers; rows whose key is null take turns.

            log.create_topic("orders", order=5, replicas=3, durable_on=2)
            log.create_topic("ticks", schema=pa.schema([("symbol", pa.string()), ("price", pa.float64())]))
            log.create_topic("trades", schema=schema, partitions=8, key="symbol")
        """
        return self.thread.wait(
            self._log.create_topic(
                name, order=order, partitions=partitions, replicas=replicas, durable_on=durable_on, schema=schema,
                on_gap=on_gap, gap_timeout_ms=gap_timeout_ms, session_ttl_s=session_ttl_s,
                retention_bytes=retention_bytes, retention_s=retention_s, partitioner=partitioner, key=key,
                timeout=timeout,
            )
        )  # fmt: skip

    def alter_topic(
        self, name: str, *, timeout: Timeout = AS_CONFIGURED, **changes: Unpack[TopicChanges]
    ) -> TopicInfo:
        """Change a topic that exists: only what is given. BadValue or BadSchema says what can't change, and why.

        `schema` may add columns that may be null. That makes a new version: publishers that know an older one go on,
        and readers get nulls where a batch is older than the column. `partitions` grow by whole multiples, `on_gap` may
        become "skip"; open publishers go on with the settings they began with. `replicas` and `durable_on` count for
        what is published once the cluster has moved on to its next replicas. TopicReplaced if the topic was deleted
        meanwhile, and another one has its name.

            log.alter_topic("ticks", schema=log.describe("ticks").schema.append(pa.field("venue", pa.string())))
            log.alter_topic("orders", gap_timeout_ms=60_000)
        """
        return self.thread.wait(self._log.alter_topic(name, timeout=timeout, **changes))

    def describe(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> TopicInfo:
        """A topic's settings, its `schema` (None: raw records) and all versions of it (`schemas`). Raises UnknownTopic.

            log.describe("ticks").schemas[1]
        """
        return self.thread.wait(self._log.describe(topic, timeout=timeout))

    def topics(self, *, hidden: bool = False, timeout: Timeout = AS_CONFIGURED) -> list[Topic]:
        """List all topics; with `hidden`, also those that the cluster made for itself (`__staged...`)."""
        return self.thread.wait(self._log.topics(hidden=hidden, timeout=timeout))

    def delete_topic(self, topic: str, *, topic_id: int | None = None, timeout: Timeout = AS_CONFIGURED) -> None:
        """Delete a topic with all its records. Raises UnknownTopic.

        The topic is the one that has the name now, or the one with `topic_id` (`describe(...).id`). A request that
        comes late never deletes the next topic of that name: TopicReplaced.

            log.delete_topic("orders")
        """
        self.thread.wait(self._log.delete_topic(topic, topic_id=topic_id, timeout=timeout))

    def tail(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> Tail:
        """Where the topic ends, and where its readable part starts: everything acked before this call is below the end.

        `seq` and `index` are where ordered records end, `durable_seq` and `durable_index` where durable ones do; in a
        topic without replicas these are the same. Of a topic of order 0 or 1 the numbers are sums over all lanes;
        `lanes` has the tail of each.

            end = log.tail("orders").seq
        """
        return self.thread.wait(self._log.tail(topic, timeout=timeout))

    def trim(
        self,
        topic: str,
        *,
        before_seq: int | None = None,
        before_index: int | None = None,
        before_time: datetime | None = None,
        lane: int | None = None,
        cold: bool = True,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Position:
        """Give up the records before a place; returns where the topic starts now.

        No batch is split: one that holds a record to be kept stays whole. Trimming less than before changes nothing;
        trimming beyond the end raises FuturePosition. Readers below the start get a TRIMMED gap. Orders 0 and 1: a time
        trims all lanes (or `lane`), and sums over them are returned; a seq or an index is in one lane, so say which.
        Without `cold` a topic with a table keeps what is in the table, and brokers forget no more than that.

            start = log.trim("orders", before_time=datetime.now(UTC) - timedelta(days=7))
        """
        return self.thread.wait(
            self._log.trim(
                topic,
                before_seq=before_seq,
                before_index=before_index,
                before_time=before_time,
                lane=lane,
                cold=cold,
                timeout=timeout,
            )
        )

    def position_at(
        self, topic: str, time: datetime, *, lane: int | None = None, timeout: Timeout = AS_CONFIGURED
    ) -> Position:
        """Where the first batch is that was appended at or after a time; the topic's end if there is none yet.

        Raises Trimmed when batches of that time are gone. Orders 0 and 1: `lane` says in which lane.

            position = log.position_at("orders", datetime(2026, 1, 31, tzinfo=UTC))
        """
        return self.thread.wait(self._log.position_at(topic, time, lane=lane, timeout=timeout))

    def position_of(
        self,
        topic: str,
        *,
        seq: int | None = None,
        index: int | None = None,
        lane: int | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Position:
        """Where the batch is that holds a record, or has an index; of the end, the end. The batch's seq is its first.

        Raises FuturePosition beyond the end, Trimmed below the start. Orders 0 and 1: `lane` says in which lane.

            position = log.position_of("orders", seq=1_000)
        """
        return self.thread.wait(self._log.position_of(topic, seq=seq, index=index, lane=lane, timeout=timeout))

    def note_progress(
        self, topic: str, reader: str, places: Mapping[int, tuple[int, int]], *, topic_id: int = 0,
        timeout: Timeout = AS_CONFIGURED,
    ) -> None:  # fmt: skip
        """Let others see how far a reader is: by lane, the index and seq behind all that it has dealt with.

        `status` and `topic describe` show it, with its lag. Nothing depends on it; it is forgotten after a day. With
        the `topic_id` of the topic that was read, TopicReplaced if that is deleted and another topic has its name.

            log.note_progress("orders", "billing", {batch.lane: (batch.index + 1, batch.seq + batch.count)})
        """
        self.thread.wait(self._log.note_progress(topic, reader, places, topic_id=topic_id, timeout=timeout))

    def readers(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> list[ReaderProgress]:
        """The readers of a topic that told how far they are (`note_progress`), and how many records they are behind.

            for reader in log.readers("orders"):
                print(reader.reader, reader.lag, reader.ago_s)
        """
        return self.thread.wait(self._log.readers(topic, timeout=timeout))

    def remove_reader(self, topic: str, reader: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED) -> None:
        """Forget how far a reader is. BadValue, if the topic has no reader of that name.

        Nothing is lost by it: a reader that is alive comes back with the next `note_progress`.

            log.remove_reader("orders", "billing")
        """
        self.thread.wait(self._log.remove_reader(topic, reader, topic_id=topic_id, timeout=timeout))

    def status(self, *, timeout: Timeout = AS_CONFIGURED) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
        return self.thread.wait(self._log.status(timeout=timeout))

    # --- records ---
    def publisher(
        self, topic: str | TopicInfo, *, timeout: Timeout = AS_CONFIGURED, **options: Unpack[PublisherArguments]
    ) -> Publisher:
        """A publisher into a topic, with the newest version of its schema as it is now. Raises UnknownTopic.

        It may be used by many threads. What `describe` told is taken at its word: nobody is asked, and its newest
        version counts.

            with log.publisher("ticks", compression="zstd", linger_ms=5) as publisher: ...
        """
        chosen = publisher_options(self.brokers.settings, options)
        return self._register(Publisher(self, self.thread.wait(self._pump(topic, chosen, timeout))))

    async def _pump(self, topic: str | TopicInfo, options: PublisherOptions, patience: Timeout) -> Pump:
        from embarcadero.client.publish.pump import Pump  # not for those who only read

        known = topic if isinstance(topic, TopicInfo) else await self._log.describe(topic, timeout=patience)
        await self.brokers.ready(patience_s(patience, self.brokers.settings.connect_timeout_s))
        return Pump(self.brokers, known, options)

    def subscribe(
        self,
        topic: str,
        *,
        start: Place = "earliest",
        read: str = "durable",
        partitions: Sequence[int] | None = None,
        group: str | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Subscriber:
        """A reader of a topic from "earliest", "latest", the batch that holds the record of seq `start`, or a time.

        A datetime (with a time zone) starts at the first batch appended at or after it; if there is none yet the
        subscriber waits for it. Batches below the start of the topic come as one TRIMMED gap. It gives every batch the
        newest schema that the topic has now, for as long as it lives; subscribe again to see columns added later.
        `read`: "durable" gives only what no crash can take back; "ordered" gives records as soon as they have a place
        (in a topic without replicas both are the same). What a crash took all the same comes as one LOST gap.

            for batch in log.subscribe("orders", start=datetime.now(UTC) - timedelta(minutes=10)): ...
        """
        check_read(read, group)
        wanted = None if partitions is None else list(partitions)
        return self._register(self.thread.wait(self._subscribe(topic, place(start), read, wanted, timeout)))

    async def _subscribe(
        self, topic: str, where: tuple[str, int], read: str, partitions: list[int] | None, patience: Timeout
    ) -> Subscriber:
        described = await self._log.describe(topic, timeout=patience)
        return Subscriber(self, reader_core(self.brokers, described, *where, read, partitions), described.name)

    def read(
        self,
        topic: str,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        *,
        lane: int | None = None,
        read: str = "durable",
        timeout: Timeout = AS_CONFIGURED,
    ) -> pa.Table:
        """Records with start <= seq < end as a table, with a column `_seq`; by default all there are now.

        A datetime stands for the first batch appended at or after it, or for the end of the topic. With a schema the
        table has the newest one; columns that a batch was published without are null. A topic of order 0 or 1 is read
        lane by lane, with a column `_lane`; a seq is then a place in one lane, so say which (`lane`). With
        read="durable" it waits until all of it is durable; read="ordered" does not. Records that a crash took are
        missing, and their seqs are not used again. `timeout` is how long it may take without any progress. Raises
        FuturePosition beyond the end, Trimmed below the start.

            log.read("ticks", 1_000, 2_000).to_pandas()
            log.read("orders", start=datetime(2026, 1, 31, tzinfo=UTC))
        """
        return self.thread.wait(self._log.read(topic, start, end, lane=lane, read=read, timeout=timeout))

    def scan(
        self,
        topic: str,
        *,
        lane: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        read: str = "durable",
        partitions: Sequence[int] | None = None,
        control: bool = False,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Iterator[list[Batch]]:
        """The batches with start <= index < stop, in lists as they arrive; fetched ahead, within bounds.

        None: from the earliest batch, up to the frontier of `read` as it is now. It ends at `stop`, waiting for batches
        to come; after `timeout` seconds without any progress it raises TimedOut. Gaps come as batches with `.gap`,
        within the span. `control` gives the entries of sessions, too (`batch.kind`), so that each index comes. Orders 0
        and 1: say which `lane`. Leaving the loop stops the fetching.

            for batches in log.scan("orders", start=1_000, stop=2_000):
                rows += sum(batch.count for batch in batches)
        """
        wanted = None if partitions is None else list(partitions)
        return self._scan(topic, lane, Span(start, stop, read, wanted, control).checked(), timeout)

    def _scan(self, topic: str, lane: int | None, span: Span, timeout: Timeout) -> Iterator[list[Batch]]:
        scan = self.thread.wait(self._log.begin_scan(topic, lane, span, timeout))
        try:
            while taken := self.thread.wait(scan.next()):
                yield taken
        finally:
            self.thread.call(lambda: self._log.end_scan(scan))

    def measure(
        self,
        topic: str | TopicInfo,
        start: int,
        stop: int,
        piece_bytes: int,
        *,
        lane: int | None = None,
        pieces_max: int | None = None,
        table: bool = True,
        timeout: Timeout = AS_CONFIGURED,
    ) -> list[Cut]:
        """Cut the batches with start <= index < stop into pieces of about `piece_bytes`, to be read side by side.

        Each Cut is where a piece ends: the index and seq behind its last batch, and about how many bytes it has. The
        last one ends at `stop`, unless there are `pieces_max` before. Without `table` only what brokers have is cut;
        below that is Trimmed. Raises FuturePosition beyond the end, Trimmed if nothing is left.

            for cut in log.measure("orders", 0, log.tail("orders").durable_index, 64 << 20): ...
        """
        cuts = self._log.measure(
            topic, start, stop, piece_bytes, lane=lane, pieces_max=pieces_max, table=table, timeout=timeout
        )
        return self.thread.wait(cuts)

    def _register(self, part: PartType) -> PartType:
        self._parts.add(part)
        return part

    def forget(self, part: Publisher | Subscriber) -> None:
        """A publisher or subscriber is closed."""
        self._parts.discard(part)

    def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:
        """Close all publishers and subscribers, hang up, and stop the cluster if it is a private one.

        Waits for the outcomes of all publishers, at most `timeout` seconds. Raises what they have to report:
        RecordsLost names all records that are lost; the error of a publisher that failed, as its cause if there is also
        a loss; of several that failed, ManyErrors. Closing twice is fine; Ctrl-C while it waits ends the waiting, not
        the closing.
        """
        check_timeout(timeout)
        if self._closed:
            return
        try:
            self._closed = True
            problems = self._close(timeout)
        except BaseException:
            self._closed = not self.thread.alive  # Ctrl-C may come before the thread was stopped: let the caller repeat
            raise
        raise_as_one(problems)

    def _close(self, timeout: float | None) -> list[EmbarcaderoError]:
        self._finalizer.detach()
        if self.thread.lapsed:  # in a forked child that never used it
            self.thread.stop()
            return []
        self.thread.after_end = lambda: None  # the cluster is stopped here
        try:
            problems = self.thread.wait(self._close_parts(timeout))
        finally:
            try:
                self.thread.stop()
            finally:
                if self.cluster is not None:
                    self.cluster.close()
        return problems

    async def _close_parts(self, patience: float | None) -> list[EmbarcaderoError]:
        """Close all publishers at once and all subscribers, then hang up; what was lost, and what failed."""
        publishers = [part for part in self._parts if isinstance(part, Publisher)]

        async def close(subscriber: Subscriber) -> None:
            subscriber.close()

        closed = [close(part) for part in self._parts if isinstance(part, Subscriber)]
        closed += [publisher.pump.close(patience) for publisher in publishers]
        ended = await asyncio.gather(*closed, return_exceptions=True)
        ended += await asyncio.gather(self._log.close(patience), return_exceptions=True)
        problems = [problem for publisher in publishers for problem in publisher.pump.problems()]
        failures = [as_reported(error) for error in ended if isinstance(error, Exception)]
        if not publishers:
            return failures
        from embarcadero.client.publish.losses import losses_first

        return losses_first(problems + failures)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


class Publisher(SyncEncodedCalls, SyncPublisherCalls):
    """Publishes records into one topic; thread-safe. `with` it, or close it: closing waits for every outcome."""

    def __init__(self, log: Log, pump: Pump) -> None:
        self._log, self._thread, self.pump, self._intake = log, log.thread, pump, pump.intake
        self._lock, self._condition, self._future = pump.intake.lock, pump.intake.condition, pump.intake.future
        self._closed = False
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: refuse every call. The session is the parent's."""
        self.pump._after_fork()
        self._lock = self._condition.lock
        self._closed = True

    def send(
        self,
        value: bytes,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: Any = None,
        *,
        timeout: float | None = None,
    ) -> RecordFuture:
        """Take a record; waits while the window is full. The future's result is the record's Position.

        `timestamp` is a datetime with a time zone or microseconds since 1970; None: now. When there is no room within
        `timeout` seconds it raises Backpressure: the record was not taken. Without a `timeout` it does so once the
        cluster has had no room for `broker.backpressure_after_s`; the message says why, what was taken before is not
        lost, and the publisher goes on when there is room. Topics with a schema and named sessions need `publish`.
        Raises RecordsLost, once, when earlier records are lost that were acked with ack=1; this one was not
        taken, and the publisher goes on.

            future = publisher.send(b"two coffees", key=b"table 4", headers={"trace": b"1"})
            future.result()                     # Position(lane=0, index=17, seq=4242)
        """
        intake = self._intake
        plain = key is None and headers is None and timestamp is None and type(value) is bytes
        if plain:
            record: Record = (value, now_s(), None, None)
            size = len(value) + RECORD_OVERHEAD_BYTES
        else:
            record, size = intake.checked(value, key, headers, timestamp)
        with self._lock:
            builder = intake.current
            if builder is not None and size <= builder.room:  # nearly every record goes this way: it is kept short
                builder.room -= size
                if not plain:
                    builder.plain = False
                records = builder.records
                number = len(records)
                records.append(record)
                return self._future(builder.result, number)
        return self._send_first(record, size, timeout)

    def _send_first(self, record: Record, size: int, timeout: float | None) -> RecordFuture:
        """Send a record for which there is no open batch with room."""
        self.pump.raise_lost()
        intake = self._intake
        intake.check_size(size)
        while True:
            with self._lock:
                if intake.refusal is None and not intake.waits(patient=True):
                    future = intake.add(record, size)
                    if intake.news:
                        self.pump.tell(self._thread.call)
                    return future
            timeout = self._room(timeout)

    def publish(
        self,
        data: Any,
        *,
        partition: int | None = None,
        session_seq: int | None = None,
        timeout: float | None = None,
    ) -> RecordFuture:
        """Take rows: a pyarrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, a dict of columns.

        They are checked against the topic's schema before anything is sent (BadSchema names the column and both types);
        columns may be in any order, and those that may be null may be missing. Arrow must have the topic's very types;
        everything else is converted where that loses nothing. Without a schema a topic takes `value`, and if you like
        `key`, `headers` and `timestamp`.

        A RecordBatch that fits a frame (8 MiB) stays one batch; everything else is cut by `batch_bytes`, and other
        publishers' batches may come between. There is one future: its result is the Position of the first record, there
        once all of the rows are stored. Waits while the window is full. `session_seq` says which batch of the session
        the first one must become; OutOfSequence when another one is next.

            publisher.publish(pa.table({"symbol": ["EMB"], "price": [12.5]})).result()
            publisher.publish([{"symbol": "EMB", "price": 12.5}, {"symbol": "ARC", "price": 3.25}])
            publisher.publish(data_frame, partition=3)
        """
        check_timeout(timeout)
        self.pump.raise_lost()
        first = None if session_seq is None else self._thread.wait(self.pump.first_sequence(timeout))
        intake, whole = self._intake, TableResult(self._condition)
        for number, piece in enumerate(intake.pieces(data, partition)):
            claim = None if number or session_seq is None or first is None else (session_seq, first)
            try:
                self._add_piece(piece, whole, claim, timeout, patient=number > 0)
            except Backpressure as error:
                if not number:
                    raise
                raise OutcomeUnknown(f"a part of the table was taken: {error.message}", "read the log") from None
        whole.complete()
        return RecordFuture(whole, 0)

    def _add_piece(
        self, piece: Sealed, whole: TableResult, claim: tuple[int, int] | None, timeout: float | None,
        patient: bool = False,
    ) -> None:  # fmt: skip
        """Take a piece of a table as soon as there is room; `claim` is the sequence that it must have."""
        while True:
            timeout = self._room(timeout, patient)
            with self._lock:
                if self._intake.waits(patient=True) or self._intake.refusal is not None:
                    continue
                if claim is not None:
                    self.pump.continues(*claim)
                whole.add(piece.result)
                self._intake.add_piece(piece)
                self.pump.tell(self._thread.call)
                return

    def next_session_seq(self, timeout: float | None = None) -> int:
        """The sequence that the next batch of this session gets; waits until the session is open.

            with log.publisher("orders", session="job-7") as publisher:
                done = publisher.next_session_seq()     # so many batches are in the log already
        """
        check_timeout(timeout)
        first = self._thread.wait(self.pump.first_sequence(timeout))
        with self._lock:
            return self.pump.next_sequence(first)

    def _room(self, timeout: float | None, patient: bool = False) -> float | None:
        """Wait until there is room; what is left of the time. Raises why nothing is taken, now or any more.

        A caller that gave no time is not `patient`: it does not wait for a cluster that has been full for long.
        """
        check_timeout(timeout)
        began, intake = monotonic(), self._intake
        patient |= timeout is not None
        if not self._condition.wait_for(lambda: not intake.waits(patient), timeout):
            full = f"no room in the window for {timeout:g} s"
            raise fresh(intake.pressure or Backpressure(full, "the record was not taken; try again"))
        if (why := intake.refusal or (None if patient else intake.pressure)) is not None:
            raise fresh(why)
        return None if timeout is None else max(0.0, timeout - (monotonic() - began))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything taken so far has its outcome. Raises TimedOut, RecordsLost, or why it failed.

            publisher.flush(timeout=10)
        """
        check_timeout(timeout)
        with self._lock:
            self._intake.seal()
            waiting = list(self._intake.unsettled)
        self._thread.call(self.pump.poke)
        if not self._condition.wait_for(lambda: not [result for result in waiting if not result.done], timeout):
            raise TimedOut(f"not everything was settled within {timeout:g} s", "flush again")
        self.pump.raise_problem()

    def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, at most `timeout` seconds; what is left then has an unknown outcome.

        Raises RecordsLost, or why the publisher failed, if it did; if both, the failure is the cause of the
        RecordsLost. Raises LossUnknown if records were acked with ack=1 and no broker could say in time whether they
        are lost (the cluster is down). Closing twice is fine.
        """
        check_timeout(timeout)
        if self._closed or not self._thread.alive:
            return
        try:
            self._closed = True
            self._thread.wait(self.pump.close(timeout))
            self._log.forget(self)
        except BaseException:
            self._closed = False  # Ctrl-C: closing again, or closing the log, waits for the records
            raise
        self.pump.raise_problem()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *failure: *Exit) -> None:
        _close_after(self, failure[1])


PartType = TypeVar("PartType", Publisher, Subscriber)


def _close_after(part: Log | Publisher, error: BaseException | None) -> None:
    """Close; a failure to close does not hide the error that ended the block, but is noted there."""
    try:
        part.close(close_patience(error))
    except EmbarcaderoError as problem:
        if error is None:
            raise
        error.add_note(f"closing reported {type(problem).__name__}: {problem}")


__all__ = ["Log", "Publisher", "Subscriber", "connect"]
