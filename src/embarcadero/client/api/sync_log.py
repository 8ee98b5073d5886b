"""The client for threads: its Log. Generated from `aio_log` and `aio_calls` by `make faces`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from embarcadero.client.api.aio_calls import BatchLimits, HeldName, Places, Survey
from embarcadero.client.api.aio_log import open_log
from embarcadero.client.api.sync_streams import Publisher, Subscriber
from embarcadero.client.api.threads import ThreadedLog, opened
from embarcadero.client.arguments import AS_CONFIGURED, Place, PublisherArguments, Timeout, TopicChanges
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.config import Config
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Cut, Position, ReaderProgress, Tail, Tier, Topic


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
    return Log(*opened(open_log(addresses, config, timeout)))


class Log(ThreadedLog):
    """A client of one cluster. Its publishers and subscribers share one thread and one connection per broker."""

    @property
    def address(self) -> str:
        """The addresses it was connected with, as `connect` takes them."""
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
        )

    def alter_topic(
        self, name: str, *, timeout: Timeout = AS_CONFIGURED, **changes: Unpack[TopicChanges]
    ) -> TopicInfo:
        """Change a topic that exists: only what is given. BadValue or BadSchema says what can't change, and why.

        `schema` may add columns that may be null. That makes a new version: publishers that know an older one go on,
        and readers get nulls where a batch is older than the column. `partitions` grow by whole multiples, `on_gap` may
        become "skip"; open publishers go on with the settings they began with. `replicas` and `durable_on` count for
        what is published once the cluster has moved on to its next replicas. TopicReplaced if the topic was deleted
        meanwhile, and another one has its name.

            known = log.describe("ticks").schema
            log.alter_topic("ticks", schema=known.append(pa.field("venue", pa.string())))
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

        The topic is the one that has the name when the call begins, or the one with `topic_id` (`describe(...).id`). A
        call that waits for a paused broker never deletes the next topic of that name: TopicReplaced.

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
                topic, before_seq=before_seq, before_index=before_index, before_time=before_time, lane=lane,
                cold=cold, timeout=timeout,
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
        self,
        topic: str,
        reader: str,
        places: Mapping[int, tuple[int, int]],
        *,
        topic_id: int = 0,
        timeout: Timeout = AS_CONFIGURED,
    ) -> None:
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

    def remove_reader(
        self, topic: str, reader: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """Forget how far a reader is. BadValue, if the topic has no reader of that name.

        Nothing is lost by it: a reader that is alive comes back with the next `note_progress`.

            log.remove_reader("orders", "billing")
        """
        self.thread.wait(self._log.remove_reader(topic, reader, topic_id=topic_id, timeout=timeout))

    def status(self, *, timeout: Timeout = AS_CONFIGURED) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
        return self.thread.wait(self._log.status(timeout=timeout))

    def publisher(
        self, topic: str | TopicInfo, *, timeout: Timeout = AS_CONFIGURED, **options: Unpack[PublisherArguments]
    ) -> Publisher:
        """Open a publisher into a topic, with the newest version of its schema as it is now. Raises UnknownTopic.

        What `describe` returned is taken as it is: no broker is asked, and its newest version counts.

            with log.publisher("ticks", compression="zstd", linger_ms=5) as publisher: ...
        """
        return self._open_publisher(Publisher, topic, options, timeout)

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
        return self._open_subscriber(Subscriber, topic, start, read, partitions, group, timeout)

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
        return self._scan(
            topic, lane=lane, start=start, stop=stop, read=read, partitions=partitions, control=control,
            timeout=timeout,
        )

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
        return self.thread.wait(
            self._log.measure(
                topic, start, stop, piece_bytes, lane=lane, pieces_max=pieces_max, table=table, timeout=timeout,
            )
        )

    def close(self, timeout: float | None = CLOSE_TIMEOUT_S) -> None:
        """Close all publishers and subscribers, and hang up.

        Waits for the outcomes of all publishers, at most `timeout` seconds. Raises what they have to report, also those
        whose own `close` was interrupted: RecordsLost names all records that are lost; the error of a publisher that
        failed, as its cause if there is also a loss; of several that failed, ManyErrors. Closing twice is fine.
        """
        self._close(timeout)

    def survey(
        self,
        topics: Mapping[str, Collection[int]],
        *,
        missing_ok: bool = False,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Survey:
        """Look at several topics and the tails of their lanes: in one round trip if each has the lanes given for it.

        A topic that does not exist is UnknownTopic; with `missing_ok` it is left out.

            about, tails = log.survey({"orders": [0]})["orders"]
        """
        return self.thread.wait(self._log.survey(topics, missing_ok=missing_ok, timeout=timeout))

    @property
    def limits(self) -> BatchLimits:
        """What the brokers take in one batch."""
        return self._log.limits

    @property
    def table_properties(self) -> tuple[str, ...]:
        """How this client reaches the files of tables: `key=value` of `tier.properties`."""
        return self._log.table_properties

    def use_table_properties(self, properties: Sequence[str]) -> None:
        """Reach the files of tables by these `key=value` from now on, in place of the configured ones."""
        self._log.use_table_properties(properties)

    def open_tier(
        self,
        topic: str,
        holder: str,
        *,
        table_id: str,
        warehouse: str,
        table: str,
        hot_retention_s: int | None = None,
        take_over: bool = False,
        properties: Mapping[str, str] | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Begin an epoch of writing a topic's table: those before are over. `table_id`, `warehouse` and `table` count
        for a topic that has no table yet. Clients are told those of `properties` that say where the store is (endpoint,
        region, addressing); secrets are left out. Raises TierBusy while another holder is at it, unless `take_over`;
        here and below TopicReplaced if the topic with `topic_id` (0: any) is deleted and another one has its name.
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
        frontiers: Places,
        starts: Places | None = None,
        topic_id: int = 0,
        engine: str = "",
        timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:
        """Tell that everything below these places is in the table. Raises Deposed if the epoch is over."""
        return self.thread.wait(
            self._log.advance_tier(
                topic, epoch, metadata=metadata, frontiers=frontiers, starts=starts, topic_id=topic_id, engine=engine,
                timeout=timeout,
            )
        )

    def keep_tier(
        self, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch is there. Raises Deposed if the epoch, or its lease, is over."""
        self.thread.wait(self._log.keep_tier(topic, epoch, topic_id=topic_id, timeout=timeout))

    def close_tier(
        self, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch leaves, and another may begin at once."""
        self.thread.wait(self._log.close_tier(topic, epoch, topic_id=topic_id, timeout=timeout))

    def held_name(
        self, topic: str, name: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Look at a named session without taking its name. A name that no session holds is opened, at sequence 0.

            held = log.held_name("orders", "job-7/progress")
        """
        return self.thread.wait(self._log.held_name(topic, name, topic_id=topic_id, timeout=timeout))

    def move_name(
        self, topic: str, name: str, at: int, holder: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> HeldName:
        """Move a named session on to the sequence `at` if the session `holder` still holds the name: compare and move.

        Returns what holds the name afterwards. It is at `at` if the call moved it, or another caller moved it there.

            held = log.held_name("orders", "job-7/progress")
            won = log.move_name("orders", "job-7/progress", 42, held.session).expected == 42
        """
        return self.thread.wait(self._log.move_name(topic, name, at, holder, topic_id=topic_id, timeout=timeout))

    def open_session(
        self, topic: str, name: str, at: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> tuple[int, int]:
        """Move a named session on to the sequence `at`; (where it was before, where it is now).

        It never goes back, so a name alone is a number that only grows, kept in the log for as long as sessions are.

            before, now = log.open_session("orders", "job-7/progress", 42)
        """
        return self.thread.wait(self._log.open_session(topic, name, at, topic_id=topic_id, timeout=timeout))
