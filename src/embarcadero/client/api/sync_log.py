"""The synchronous client: Log, Publisher and Subscriber. `make faces` generates it.

The sources are `aio_log`, `aio_calls` and `aio_streams`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from embarcadero.client.api.aio_calls import HeldName, LanePositions, Survey
from embarcadero.client.api.aio_log import open_log
from embarcadero.client.api.threads import ThreadedLog, ThreadedPublisher, ThreadedSubscriber, opened
from embarcadero.client.arguments import (
    AS_CONFIGURED,
    Moment,
    PublisherArguments,
    StartPosition,
    Timeout,
    TopicChanges,
)
from embarcadero.client.brokers import BatchLimits
from embarcadero.client.results import Batch, RecordFuture, TopicInfo
from embarcadero.config import Config
from embarcadero.config.key import Duration
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Cut, Position, ReaderProgress, StagedBatch, Tail, Tier, Topic


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    config: str | Path | Config | None = None,
    timeout: Timeout = AS_CONFIGURED,
) -> Log:
    """Connect to a cluster.

    Args:
        addresses: `host:port` of one or more brokers, as a list or separated by commas. None: `client.brokers` of the
            configuration.
        config: Path of an `embarcadero.yaml`, or a `Config`.
        timeout: Seconds. By default `client.connect_timeout_s`; None means no limit.

    Returns:
        A `Log`. It closes at the end of a `with` block, or when the program calls `close`.

    Raises:
        Unreachable: No broker answered within the timeout.
        BadValue: An address is not valid.
        BadConfiguration: The configuration is not valid.

    Example:
        with emb.connect("127.0.0.1:9092", timeout=2.0) as log: ...
        with emb.connect(config="embarcadero.yaml") as log: ...
    """
    return Log(*opened(open_log(addresses, config, timeout)))


class Log(ThreadedLog):
    """A client of one cluster. Its publishers and subscribers share one thread and one connection per broker.

    Requests have a `timeout` in seconds. The default is `client.request_timeout_s`; None means no limit. A request
    that gets no answer in time raises TimedOut.
    """

    @property
    def address(self) -> str:
        """The addresses that this client was given, in the form that `connect` accepts."""
        return self._log.address

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
        gap_timeout_ms: Duration | None = None,
        session_ttl_s: Duration | None = None,
        retention_bytes: int | None = None,
        retention_s: Duration | None = None,
        partitioner: str | None = None,
        key: str | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> TopicInfo:
        """Create a topic. Options that are None get the default of the cluster.

        Args:
            name: 1 to 249 characters of `A-Z a-z 0-9 . _ -`.
            order: 0 "none", 1 "local", 2 "total" or 5 "strong".
            partitions: Number of partitions.
            replicas: Number of replicas that keep each record on disk.
            durable_on: Number of replicas that must sync a record before it is durable.
            schema: Columns of the records. Such a topic accepts rows with `publish` and refuses `send`.
            on_gap: "fence" or "skip": what happens if a gap in a session does not close.
            gap_timeout_ms: Time until `on_gap` applies.
            session_ttl_s: Time after which an idle session expires.
            retention_bytes: The oldest records are removed above this size. 0: never.
            retention_s: Records are removed after this time. 0: never.
            partitioner: How a key chooses a partition: "murmur2" (as Kafka's Java clients) or "crc32c".
            key: Column of `schema` that has the keys: binary, string or integer. Rows with a null key rotate over the
                partitions.

        Returns:
            The new topic.

        Raises:
            TopicExists: A topic with this name exists.
            BadName, BadValue, BadSchema: An argument is not valid.
            OutcomeUnknown: The connection broke during the request. Check with `describe`.

        Example:
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
        )

    def alter_topic(
        self, name: str, *, timeout: Timeout = AS_CONFIGURED, **changes: Unpack[TopicChanges]
    ) -> TopicInfo:
        """Change options of an existing topic. Options that are not given keep their values.

        Open publishers keep the settings with which they were opened.

        Args:
            name: The topic.
            changes: Options of `create_topic`. `schema` can only add nullable columns: this creates a new version, and
                readers get nulls where a batch is older than a column. `partitions` can only grow by whole multiples.
                `on_gap` can only become "skip". `replicas` and `durable_on` apply to records published after the
                cluster has opened the next range of the topic, on other replicas.

        Returns:
            The changed topic.

        Raises:
            BadValue, BadSchema: This option cannot change, or not to this value. The message has the reason.
            UnknownTopic: There is no such topic.
            TopicReplaced: The topic was deleted during the call, and another topic has its name.

        Example:
            known = log.describe("ticks").schema
            log.alter_topic("ticks", schema=known.append(pa.field("venue", pa.string())))
            log.alter_topic("orders", gap_timeout_ms=60_000)
        """
        return self.thread.wait(self._log.alter_topic(name, timeout=timeout, **changes))

    def describe(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> TopicInfo:
        """Look up a topic.

        Returns:
            Its settings, its `schema` (None: raw records) and all versions of the schema (`schemas`).

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            log.describe("ticks").schemas[1]
        """
        return self.thread.wait(self._log.describe(topic, timeout=timeout))

    def topics(self, *, hidden: bool = False, timeout: Timeout = AS_CONFIGURED) -> list[Topic]:
        """List all topics.

        Args:
            hidden: Include the topics that the cluster creates for its own use (`__staged...`).

        Example:
            names = [topic.name for topic in log.topics()]
        """
        return self.thread.wait(self._log.topics(hidden=hidden, timeout=timeout))

    def delete_topic(self, topic: str, *, topic_id: int | None = None, timeout: Timeout = AS_CONFIGURED) -> None:
        """Delete a topic with all its records.

        The call deletes the topic that has this name when the call begins. If a paused broker answers late, the call
        never deletes a later topic of the same name.

        Args:
            topic: The name.
            topic_id: Delete only the topic with this id (`describe(...).id`).

        Raises:
            UnknownTopic: There is no such topic.
            TopicReplaced: Another topic has this name now.

        Example:
            log.delete_topic("orders")
        """
        self.thread.wait(self._log.delete_topic(topic, topic_id=topic_id, timeout=timeout))

    def tail(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> Tail:
        """Return the ends of a topic and the start of its readable part. Every batch acked before the call is below.

        Returns:
            A `Tail`. `index` and `seq` are the ordered end. `durable_index` and `durable_seq` are the durable end (the
            high watermark); without replicas it equals the ordered end. In a topic of order 0 or 1, the numbers are
            sums over all lanes, and `lanes` has the tail of each lane.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            end = log.tail("orders").seq
        """
        return self.thread.wait(self._log.tail(topic, timeout=timeout))

    def trim(
        self,
        topic: str,
        *,
        before_seq: int | None = None,
        before_index: int | None = None,
        before_time: Moment | None = None,
        lane: int | None = None,
        cold: bool = True,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Position:
        """Remove the records before a position, permanently and for all readers.

        A batch is never split: it stays if one of its records is at or after the position. A position below the
        current start changes nothing. Readers below the new start get a TRIMMED gap.

        Args:
            topic: The topic.
            before_seq, before_index, before_time: The position. Give exactly one. A time needs a time zone.
            lane: In a topic of order 0 or 1, required with a seq or an index. A time trims all lanes by default.
            cold: Also remove the records from the table of the topic. False: remove only the copies of brokers and
                replicas, and only as far as the table has the records.

        Returns:
            The new start of the topic. For several lanes, index and seq are sums over the lanes.

        Raises:
            FuturePosition: The position is beyond the end.
            TopicReplaced: The topic was deleted during the call, and another topic has its name.

        Example:
            start = log.trim("orders", before_time=datetime.now(UTC) - timedelta(days=7))
        """
        return self.thread.wait(
            self._log.trim(
                topic, before_seq=before_seq, before_index=before_index, before_time=before_time, lane=lane,
                cold=cold, timeout=timeout,
            )
        )

    def position_at(
        self, topic: str, time: Moment, *, lane: int | None = None, timeout: Timeout = AS_CONFIGURED
    ) -> Position:
        """Find the first batch that was appended at or after a time.

        Args:
            topic: The topic.
            time: A datetime with a time zone.
            lane: Required in a topic of order 0 or 1.

        Returns:
            The position of the batch, or the end of the topic if there is no such batch yet.

        Raises:
            Trimmed: Batches of that time were removed.

        Example:
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
        """Find the batch that has an index, or that contains the record with a seq.

        Args:
            topic: The topic.
            seq, index: What to look for. Give exactly one.
            lane: Required in a topic of order 0 or 1.

        Returns:
            The position of the batch, with the seq of its first record. For the end of the topic, the end.

        Raises:
            FuturePosition: The position is beyond the end.
            Trimmed: The position is below the start.

        Example:
            position = log.position_of("orders", seq=1_000)
        """
        return self.thread.wait(self._log.position_of(topic, seq=seq, index=index, lane=lane, timeout=timeout))

    def status(self, *, timeout: Timeout = AS_CONFIGURED) -> list[dict[str, Any]]:
        """Return the status of each connected broker, as a dict. Brokers that do not answer are left out.

        Example:
            for broker in log.status():
                print(broker)
        """
        return self.thread.wait(self._log.status(timeout=timeout))

    def publisher(
        self, topic: str | TopicInfo, *, timeout: Timeout = AS_CONFIGURED, **options: Unpack[PublisherArguments]
    ) -> Publisher:
        """Open a publisher into a topic. It uses the newest version of the topic's schema.

        Args:
            topic: A name, or the result of `describe`. With the latter no broker is asked for the topic.
            ack: When the outcome of a record is known: 0 the batch was handed to a connection, 1 (default) it is
                ordered, 2 it is durable.
            session: A name, so that a later publisher can continue the session. The earlier holder is fenced.
            order: "strong" or "total", in a topic of order 2. By default "strong".
            session_at: Sequence of the first batch, in a named session.
            linger_ms: How long a record may wait for other records of its batch.
            batch_bytes: Size of a batch, at most 8 MiB.
            window_bytes: Bytes that may be without an outcome. Above that, `send` and `publish` wait.
            compression: "lz4", "zstd" or None.
            delivery_timeout: Seconds without an outcome after which the publisher fails. The time when the cluster is
                full does not count.

        Raises:
            UnknownTopic: There is no such topic.
            BadValue, BadName: An option is not valid.

        Example:
            with log.publisher("ticks", compression="zstd", linger_ms=5) as publisher: ...
        """
        return self._open_publisher(Publisher, topic, options, timeout)

    def subscribe(
        self,
        topic: str,
        *,
        start: StartPosition = "earliest",
        read: str = "durable",
        partitions: Sequence[int] | None = None,
        group: str | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Subscriber:
        """Open a subscriber, which reads every batch of a topic in order.

        All batches have the newest schema of the topic at the time of this call. Subscribe again to see columns that
        are added later.

        Args:
            topic: The topic.
            start: "earliest", "latest", the seq of a record (reading starts with its batch), or a datetime with a time
                zone (reading starts with the first batch appended at or after it). Records below the start of the
                topic appear as one TRIMMED gap.
            read: "durable" returns records once no crash can lose them. "ordered" returns them once they are ordered;
                records that a crash lost appear as a LOST gap. Without replicas both are the same.
            partitions: Read only these partitions.
            group: Not available yet.

        Raises:
            UnknownTopic: There is no such topic.
            BadValue: An argument is not valid.
            NotAvailable: `group` was given.

        Example:
            for batch in log.subscribe("orders", start=datetime.now(UTC) - timedelta(minutes=10)): ...
        """
        return self._open_subscriber(Subscriber, topic, start, read, partitions, group, timeout)

    def read(
        self,
        topic: str,
        start: int | Moment | None = None,
        end: int | Moment | None = None,
        *,
        lane: int | None = None,
        read: str = "durable",
        timeout: Timeout = AS_CONFIGURED,
    ) -> pa.Table:
        """Read the records with start <= seq < end into an Arrow table. By default all records of the topic.

        Args:
            topic: The topic.
            start, end: A seq, or a datetime with a time zone: the first batch appended at or after it, or the end of
                the topic if there is none.
            lane: Read only this lane. In a topic of order 0 or 1, required with a seq.
            read: "durable" waits until all these records are durable, "ordered" does not.
            timeout: Seconds without any progress after which the call ends.

        Returns:
            A table with a column `_seq`; in a topic of order 0 or 1 also `_lane`, lane after lane. It has the newest
            schema, with nulls where a batch is older than a column. Records that a crash lost are missing, and their
            seqs are never used again.

        Raises:
            FuturePosition: `start` or `end` is beyond the end of the topic.
            Trimmed: `start` is below the start of the topic.
            TimedOut: There was no progress within the timeout.

        Example:
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
        """Read the batches with start <= index < stop, in lists as they arrive, with bounded read-ahead.

        The scan waits for batches below `stop` that do not exist yet. Leaving the loop stops it.

        Args:
            topic: The topic.
            lane: Required in a topic of order 0 or 1.
            start: First index. None: the earliest batch.
            stop: Index after the last batch. None: the end for `read` at the time of the call.
            read: "durable" or "ordered", as for `subscribe`.
            partitions: Read only these partitions.
            control: Include the entries of sessions (`batch.kind`), so that every index appears.
            timeout: Seconds without any progress after which the scan raises TimedOut.

        Returns:
            An iterator over lists of batches. A gap is a batch with `.gap`, limited to the span.

        Raises:
            UnknownTopic, BadValue: An argument is not valid.
            TimedOut: There was no progress within the timeout.

        Example:
            for batches in log.scan("orders", start=1_000, stop=2_000):
                rows += sum(batch.count for batch in batches)
        """
        return self._scan(
            topic, lane=lane, start=start, stop=stop, read=read, partitions=partitions, control=control,
            timeout=timeout,
        )

    def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Close all publishers and subscribers, then disconnect. A second call does nothing.

        This also reports the errors of publishers whose own `close` was interrupted.

        Args:
            timeout: Seconds to wait for the outcomes of all publishers. None means no limit.

        Raises:
            RecordsLost: Acked records are lost; `positions` names all of them. If publishers failed as well, their
                error is the cause.
            ManyErrors: Several publishers failed. If only one failed, its error is raised.

        Example:
            log.close(timeout=5)
        """
        self._close(timeout)

    def survey(
        self,
        topics: Mapping[str, Collection[int]],
        *,
        missing_ok: bool = False,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Survey:
        """Look up several topics and the tails of their lanes, in one round trip if the expected lanes are right.

        Args:
            topics: By name, the lanes that the caller expects.
            missing_ok: Leave out topics that do not exist.

        Returns:
            By name, the topic and the tails of its lanes.

        Raises:
            UnknownTopic: A topic does not exist, and `missing_ok` is not set.

        Example:
            about, tails = log.survey({"orders": [0]})["orders"]
        """
        return self.thread.wait(self._log.survey(topics, missing_ok=missing_ok, timeout=timeout))

    @property
    def limits(self) -> BatchLimits:
        """The largest batch and record that the brokers accept."""
        return self._log.limits

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` pairs, by default of `tier.properties`."""
        return self._log.table_properties

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Replace the configured `key=value` pairs with which this client reaches the files of tables."""
        self._log.use_table_properties(properties)

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
        """Divide the batches with start <= index < stop into pieces of about `piece_bytes`, for parallel readers.

        Args:
            topic: A name, or the result of `describe`.
            start, stop: The first index, and the index after the last batch.
            piece_bytes: Size of a piece.
            lane: Required in a topic of order 0 or 1.
            pieces_max: Return at most this many pieces, from `start` on.
            table: Include the records that only the table of the topic has. False: such a `start` raises Trimmed.

        Returns:
            A `Cut` per piece: the index and seq after its last batch, and its approximate size. The last piece ends at
            `stop`, unless `pieces_max` was reached.

        Raises:
            FuturePosition: `stop` is beyond the end.
            Trimmed: The whole span was removed.

        Example:
            for cut in log.measure("orders", 0, log.tail("orders").durable_index, 64 << 20): ...
        """
        return self.thread.wait(
            self._log.measure(
                topic, start, stop, piece_bytes, lane=lane, pieces_max=pieces_max, table=table, timeout=timeout,
            )
        )

    def open_tier(
        self,
        topic: str,
        holder: str,
        *,
        table_id: str,
        warehouse: str,
        table: str,
        hot_retention_s: Duration | None = None,
        take_over: bool = False,
        properties: Mapping[str, str] | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Begin an epoch of writing a topic's table. All earlier epochs end.

        Args:
            topic: The topic.
            holder: Name of the job that writes the table.
            table_id, warehouse, table: Identity and location, used if the topic has no table yet.
            hot_retention_s: How long brokers and replicas keep records that are in the table.
            take_over: End the epoch of another active holder.
            properties: How to reach the store. Other clients get endpoint, region and addressing; secrets are removed.
            topic_id: Id of the topic (0: any).
            engine: The program that writes the table, for `status`.

        Returns:
            The table, with its epoch.

        Raises:
            TierBusy: Another holder writes the table, and `take_over` is not set.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            tier = log.open_tier("orders", "job-7", table_id="t1", warehouse="/data", table="embarcadero.orders")
        """
        return self.thread.wait(
            self._log.open_tier(
                topic, holder, table_id=table_id, warehouse=warehouse, table=table, hot_retention_s=hot_retention_s,
                take_over=take_over, properties=properties, topic_id=topic_id, engine=engine, timeout=timeout,
            )
        )

    def advance_tier(
        self,
        topic: str,
        epoch: int,
        *,
        metadata: str,
        frontiers: LanePositions,
        starts: LanePositions | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Announce that the table has every record below these positions.

        Args:
            topic, epoch: The topic, and the epoch that `open_tier` returned.
            metadata: Location of the table's newest metadata file.
            frontiers: By lane, the index and seq up to which the table has the records.
            starts: By lane, where the table begins. Lanes that are not named keep their start.
            topic_id, engine: As for `open_tier`.

        Raises:
            Deposed: Another job has begun a later epoch, or the lease has expired.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            log.advance_tier("orders", tier.epoch, metadata=path, frontiers={0: (index, seq)})
        """
        return self.thread.wait(
            self._log.advance_tier(
                topic, epoch, metadata=metadata, frontiers=frontiers, starts=starts, topic_id=topic_id, engine=engine,
                timeout=timeout,
            )
        )

    def keep_tier(
        self, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """Renew the lease of an epoch.

        Raises:
            Deposed: Another job has begun a later epoch, or the lease has expired.
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            log.keep_tier("orders", tier.epoch)
        """
        self.thread.wait(self._log.keep_tier(topic, epoch, topic_id=topic_id, timeout=timeout))

    def close_tier(
        self, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """End an epoch, so that another job can begin one immediately. An epoch that has ended is ignored.

        Raises:
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            log.close_tier("orders", tier.epoch)
        """
        self.thread.wait(self._log.close_tier(topic, epoch, topic_id=topic_id, timeout=timeout))

    def held_name(
        self, topic: str, name: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Look up a named session without taking its name. A name without a session is opened at sequence 0.

        Returns:
            The session that holds the name, and its next expected sequence.

        Raises:
            NotAvailable: A broker has a version without this call.

        Example:
            held = log.held_name("orders", "job-7/progress")
        """
        return self.thread.wait(self._log.held_name(topic, name, topic_id=topic_id, timeout=timeout))

    def move_name(
        self, topic: str, name: str, at: int, holder: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Move a named session forward to the sequence `at` if the session `holder` still has the name.

        This is a compare-and-move: a delayed duplicate of the request changes nothing.

        Returns:
            The session that has the name afterwards. Its `expected` is `at` if this call moved it, or if another caller
            moved it there.

        Raises:
            NotAvailable: A broker has a version without this call.

        Example:
            held = log.held_name("orders", "job-7/progress")
            won = log.move_name("orders", "job-7/progress", 42, held.session).expected == 42
        """
        return self.thread.wait(self._log.move_name(topic, name, at, holder, topic_id=topic_id, timeout=timeout))

    def open_session(
        self, topic: str, name: str, at: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> tuple[int, int]:
        """Move a named session forward to the sequence `at` without publishing. It never goes back.

        So a name is a counter that only grows. The log keeps it as long as it keeps sessions.

        Returns:
            The sequence before the call and the sequence after it.

        Raises:
            BadName, BadValue: The name or the sequence is not valid.

        Example:
            before, now = log.open_session("orders", "job-7/progress", 42)
        """
        return self.thread.wait(self._log.open_session(topic, name, at, topic_id=topic_id, timeout=timeout))

    def note_progress(
        self,
        topic: str,
        reader: str,
        places: Mapping[int, tuple[int, int]],
        *,
        topic_id: int = 0,
        timeout: Timeout = AS_CONFIGURED,
    ) -> None:
        """Publish the progress of a reader, so that `status` and `topic describe` show its lag.

        It is only information: no retention depends on it. The cluster forgets it after a day.

        Args:
            topic: The topic.
            reader: A name for the reader.
            places: By lane, the index and the seq after the last record that the reader has processed.
            topic_id: Id of the topic that was read (0: any).

        Raises:
            TopicReplaced: The topic with `topic_id` was deleted, and another topic has its name.

        Example:
            log.note_progress("orders", "billing", {batch.lane: (batch.index + 1, batch.seq + batch.count)})
        """
        self.thread.wait(self._log.note_progress(topic, reader, places, topic_id=topic_id, timeout=timeout))

    def readers(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> list[ReaderProgress]:
        """List the readers that published their progress with `note_progress`, with their lag in records.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            for reader in log.readers("orders"):
                print(reader.reader, reader.lag, reader.ago_s)
        """
        return self.thread.wait(self._log.readers(topic, timeout=timeout))

    def remove_reader(
        self, topic: str, reader: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """Remove a reader from the list of `readers`. An active reader appears again with its next `note_progress`.

        Raises:
            BadValue: The topic has no reader of this name.

        Example:
            log.remove_reader("orders", "billing")
        """
        self.thread.wait(self._log.remove_reader(topic, reader, topic_id=topic_id, timeout=timeout))


class Publisher(ThreadedPublisher):
    """Publishes records into one topic; thread-safe. Close it, or use it with `with`: both wait for every outcome."""

    def publish(
        self,
        data: Any,
        *,
        partition: int | None = None,
        session_seq: int | None = None,
        timeout: Duration | None = None,
    ) -> RecordFuture:
        """Publish rows. Wait while the window is full.

        The rows are checked against the topic's schema before they are sent. Columns may be in any order, and nullable
        columns may be missing. Arrow data must have exactly the types of the topic; other data is converted if nothing
        is lost. A topic without a schema accepts the column `value` and optionally `key`, `headers` and `timestamp`.

        A RecordBatch that fits a frame (8 MiB) stays one batch. Other data is split by `batch_bytes`, and batches of
        other publishers may come between.

        Args:
            data: A pyarrow Table or RecordBatch, a pandas or polars DataFrame, a list of dicts, or a dict of columns.
            partition: The partition of all rows. None: by key.
            session_seq: The sequence that the first batch must get.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            One future. It completes when all rows are stored, with the `Position` of the first row.

        Raises:
            BadSchema: The data does not fit the schema. The message names the column and both types.
            OutOfSequence: The session has another next sequence than `session_seq`.
            Backpressure: There was no space in time, and no row was accepted.
            OutcomeUnknown: There was no space in time after some of the rows were accepted.
            RecordsLost: As for `send`.

        Example:
            publisher.publish(pa.table({"symbol": ["EMB"], "price": [12.5]})).result()
            publisher.publish([{"symbol": "EMB", "price": 12.5}, {"symbol": "ARC", "price": 3.25}])
            publisher.publish(data_frame, partition=3)
        """
        return self._publish(data, partition=partition, session_seq=session_seq, timeout=timeout)

    def publish_encoded(
        self, payload: pa.Buffer, count: int, *, partition: int = 0, timeout: Duration | None = None
    ) -> RecordFuture:
        """Publish one batch that the caller has encoded, for programs that must know its bytes before it is sent.

        Nothing is checked here.

        Args:
            payload: The result of `encode_batch`, in the topic's schema.
            count: Number of records.
            partition: The partition of the batch.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            A future. Its result is the `Position` of the first record.

        Raises:
            Backpressure, RecordsLost: As for `send`.

        Example:
            publisher.publish_encoded(encode_batch(record_batch), record_batch.num_rows)
        """
        return self._publish_encoded(payload, count, partition=partition, timeout=timeout)

    def publish_reference(
        self, reference: StagedBatch, *, partition: int = 0, timeout: Duration | None = None
    ) -> RecordFuture:
        """Publish a batch that is staged in a topic of order 0 or 1. A broker copies its bytes inside the cluster.

        The batch uses one sequence of the session, and as much of the window as its bytes would.

        Args:
            reference: The result of `staged()` of the staged batch's future.
            partition: The partition of the batch.
            timeout: Seconds to wait for space in the window, as for `send`.

        Returns:
            A future. It ends with BadReference if the staged batch is gone or differs from the reference, and with
            NotAvailable if the connected brokers have a version without references.

        Raises:
            Backpressure, RecordsLost: As for `send`.

        Example:
            staged = staging.publish_encoded(payload, count).staged(schema=1)   # once it is awaited
            position = publisher.publish_reference(staged).result()
        """
        return self._publish_reference(reference, partition=partition, timeout=timeout)

    def next_session_seq(self, timeout: Duration | None = None) -> int:
        """Wait until the session is open, and return the sequence of its next batch.

        Raises:
            TimedOut: The session was not open in time.

        Example:
            with log.publisher("orders", session="job-7") as publisher:
                done = publisher.next_session_seq()     # the log has this number of batches
        """
        return self._next_session_seq(timeout)

    def already_in(self, timeout: Duration | None = None) -> int:
        """Return how many sequences from `session_at` on an earlier holder of this session has used.

        The log has some or all of these batches.

        Raises:
            TimedOut: The session was not open in time.

        Example:
            with log.publisher("orders", session="job-7", session_at=4096) as publisher:
                used = publisher.already_in()           # 4096 to 4096 + used - 1 were used before
        """
        return self._already_in(timeout)

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until every record so far has an outcome.

        Args:
            timeout: Seconds. None means no limit.

        Raises:
            TimedOut: Some records have no outcome yet.
            RecordsLost: Acked records are lost.
            EmbarcaderoError: The error with which the publisher failed.

        Example:
            publisher.flush(timeout=10)
        """
        self._flush(timeout)

    def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Wait for every outcome, then close. A second call does nothing.

        Args:
            timeout: Seconds. Later, the remaining records end with `OutcomeUnknown`. None means no limit.

        Raises:
            RecordsLost: Acked records are lost. If the publisher failed as well, its error is the cause.
            LossUnknown: The cluster is down, and no broker could answer in time whether records that were acked with
                ack=1 are lost.
            EmbarcaderoError: The error with which the publisher failed.

        Example:
            publisher.close(timeout=5)
        """
        self._close(timeout)


class Subscriber(ThreadedSubscriber):
    """Reads one topic in order, with bounded read-ahead.

    In a topic of order 0 or 1 it reads all lanes, each in its own order (`batch.lane`). `for` returns batches
    until the subscriber is closed.
    """

    def poll(self, timeout: Duration | None = None) -> Batch | None:
        """Return the next batch. A gap is a batch with `batch.gap`.

        Args:
            timeout: Seconds. None means no limit.

        Returns:
            A batch, or None if there was none in time.

        Raises:
            Closed: The subscriber is closed.
            TierUnavailable: A store did not answer for some seconds. The next poll continues at the same position.
            EmbarcaderoError: The error that ended the reading.

        Example:
            batch = subscriber.poll(timeout=1.0)
        """
        return self._poll(timeout)

    def seek(
        self,
        where: str | Position | None = None,
        *,
        seq: int | None = None,
        index: int | None = None,
        time: Moment | None = None,
        lane: int | None = None,
    ) -> None:
        """Continue at another position. Give exactly one.

        Args:
            where: "earliest", "latest" or a `Position`.
            seq: Continue with the batch that contains this record.
            index: Continue with this batch.
            time: Continue with the first batch appended at or after this datetime (with a time zone).
            lane: In a topic of order 0 or 1, required with a seq or an index. The other lanes are not affected.

        Raises:
            BadValue: The position is not valid.

        Example:
            subscriber.seek(time=datetime.now(UTC) - timedelta(hours=1))
            subscriber.seek(seq=1_000, lane=4_097)
        """
        self._seek(where, seq=seq, index=index, time=time, lane=lane)

    @property
    def paused(self) -> bool:
        """Whether the subscriber is paused."""
        return self._paused

    def pause(self) -> None:
        """Stop fetching and keep the position. Until `resume`, `poll` returns no batch.

        Example:
            subscriber.pause()      # while the disk is full, until subscriber.resume()
        """
        self._pause()

    def resume(self) -> None:
        """Continue after `pause`, at the same position."""
        self._resume()

    def position(self) -> int | None:
        """Return the index of the next batch, or None while it is not known. For orders 0 and 1 use `positions()`."""
        return self._position()

    def positions(self) -> dict[int, int | None]:
        """Return, by lane, the index of the next batch, or None while it is not known."""
        return self._positions()

    def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Stop reading. A second call does nothing, and neither does a call in a forked child."""
        self._close(timeout)
