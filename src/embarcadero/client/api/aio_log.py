"""The asyncio client. The synchronous client is generated from these classes, and both share the modules below them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client import lifetime
from embarcadero.client.api.aio_calls import ReaderCalls, SessionCalls, SurveyCalls, TierCalls, trim_ask
from embarcadero.client.api.aio_streams import Opening, Publisher, Subscriber
from embarcadero.client.arguments import (
    AS_CONFIGURED,
    Moment,
    PublisherArguments,
    StartPosition,
    Timeout,
    TopicChanges,
    broker_addresses,
    check_read,
    checked_changes,
    close_patience,
    parse_addresses,
    patience_s,
    publisher_options,
    seek_lookup,
    start_lookup,
    time_us,
    timeout_s,
    trim_lookup,
    whole_in_unit,
)
from embarcadero.client.brokers import NO_BROKER_HINT, BrokerPool
from embarcadero.client.reads import (
    LaneSpan,
    Scan,
    find_position,
    joined,
    lane_of,
    lanes_of,
    read_span,
    reader_core,
    seq_span,
    tail_of,
)
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.config import Config, load
from embarcadero.config.key import Duration
from embarcadero.errors import (
    EmbarcaderoError,
    TopicReplaced,
    Unreachable,
    as_reported,
    raise_as_one,
)
from embarcadero.forks import tell_of_forks
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.orders import parse_order
from embarcadero.types import MURMUR2, Order, Position, Tail, Topic, public_names
from embarcadero.wire import messages as m
from embarcadero.wire.schemas import encode_schema

# ruff: noqa: ASYNC109 - a timeout ends these calls with a typed error, so they take a `timeout` argument

Answer = TypeVar("Answer", bound=m.Message)
_LOOKS_MAX = 5  # DescribeTopic requests, when a topic may have been created just before or after a call began


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    config: str | Path | Config | None = None,
    timeout: Timeout = AS_CONFIGURED,
) -> Opening[Log]:
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
        async with emb.aio.connect("127.0.0.1:9092", timeout=2.0) as log: ...
        async with emb.aio.connect(config="embarcadero.yaml") as log: ...
    """
    return Opening(open_log(addresses, config, timeout), "Log")


async def open_log(
    addresses: str | Sequence[str] | None,
    config: str | Path | Config | None,
    timeout: Timeout = AS_CONFIGURED,
    cluster: Any = None,
) -> Log:
    """Connect as `connect` does. `cluster` is the private cluster that the caller has started, if any."""
    chosen = load(config)
    patience = patience_s(timeout, chosen.client.connect_timeout_s)
    seeds = parse_addresses(broker_addresses(chosen) if addresses is None else addresses)
    name = ",".join(f"{host}:{port}" for host, port in seeds)
    brokers = BrokerPool(seeds, chosen.client, chosen.tier.properties, cluster)
    try:
        async with asyncio.timeout(patience):
            await brokers.start(patience)
    except TimeoutError as error:
        await brokers.close()
        if isinstance(error, EmbarcaderoError):
            raise
        raise Unreachable(f"no broker answered at {name} within {patience:g} s", NO_BROKER_HINT) from None
    except BaseException:
        await brokers.close()
        raise
    return Log(brokers, name)


class Log(TierCalls, SessionCalls, SurveyCalls, ReaderCalls):
    """A client of one cluster. Its publishers and subscribers share one connection per broker.

    Requests have a `timeout` in seconds. The default is `client.request_timeout_s`; None means no limit. A request
    that gets no answer in time raises TimedOut.
    """

    def __init__(self, brokers: BrokerPool, address: str) -> None:
        self._address = address
        self.cluster = brokers.cluster  # the LocalCluster that `local` started
        self.brokers = brokers
        self._parts: set[Publisher | Subscriber | Scan] = set()
        self._finalizer = lifetime.close_when_dropped(self, brokers, lambda: None)
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child, connect again with the first call. Publishers and subscribers stay with the parent."""
        self._parts = set()
        self._finalizer.detach()

    def __repr__(self) -> str:
        return f"<embarcadero.aio.Log of {self._address}, {self.brokers.state}>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("brokers",))

    @property
    def address(self) -> str:
        """The addresses that this client was given, in the form that `connect` accepts."""
        return self._address

    # --- topics ---
    async def create_topic(
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
            await log.create_topic("orders", order=5, replicas=3, durable_on=2)
            await log.create_topic("ticks", schema=pa.schema([("symbol", pa.string()), ("price", pa.float64())]))
            await log.create_topic("trades", schema=schema, partitions=8, key="symbol")
        """
        level = None if order is None else int(parse_order(order))
        ask = m.CreateTopic(
            name=name,
            order=level,
            partitions=partitions,
            replicas=replicas,
            durable_on=durable_on,
            on_gap=on_gap,
            gap_timeout_ms=whole_in_unit("gap_timeout_ms", gap_timeout_ms, 1e-3),
            session_ttl_s=whole_in_unit("session_ttl_s", session_ttl_s, 1.0),
            retention_bytes=retention_bytes,
            retention_s=whole_in_unit("retention_s", retention_s, 1.0),
            columns=b"" if schema is None else encode_schema(schema),
            partitioner=MURMUR2 if partitioner is None else partitioner,
            key=key or "",
        )
        return TopicInfo.of(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def alter_topic(
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
            known = (await log.describe("ticks")).schema
            await log.alter_topic("ticks", schema=known.append(pa.field("venue", pa.string())))
            await log.alter_topic("orders", gap_timeout_ms=60_000)
        """
        given = checked_changes(changes)
        ask = m.AlterTopic(name=name, topic_id=(await self._meant(name, timeout)).id, **given)
        return TopicInfo.of(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def describe(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> TopicInfo:
        """Look up a topic.

        Returns:
            Its settings, its `schema` (None: raw records) and all versions of the schema (`schemas`).

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            (await log.describe("ticks")).schemas[1]
        """
        return TopicInfo.of(await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout))

    async def topics(self, *, hidden: bool = False, timeout: Timeout = AS_CONFIGURED) -> list[Topic]:
        """List all topics.

        Args:
            hidden: Include the topics that the cluster creates for its own use (`__staged...`).

        Example:
            names = [topic.name for topic in await log.topics()]
        """
        topics = (await self._ask(m.ListTopics(), m.TopicsAre, timeout)).topics
        return [topic for topic in topics if hidden or not topic.hidden]

    async def delete_topic(self, topic: str, *, topic_id: int | None = None, timeout: Timeout = AS_CONFIGURED) -> None:
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
            await log.delete_topic("orders")
        """
        meant = (await self._meant(topic, timeout)).id if topic_id is None else topic_id
        await self._ask(m.DeleteTopic(name=topic, topic_id=meant), m.Done, timeout, again=False)

    async def _meant(self, topic: str, timeout: Timeout) -> TopicInfo:
        """Return the topic that had the name when the call began.

        A paused broker may answer late: raise TopicReplaced if the topic is younger than the call. An answer has the
        age of the topic, but the broker may have sent it at any moment since the request. If the topic may be older or
        younger than the call, ask again: a quick answer decides it.
        """
        began = monotonic()
        for _ in range(_LOOKS_MAX):
            asked = monotonic()
            answer = await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout)
            if answer.age_us is None or monotonic() - answer.age_us / 1e6 <= began:
                return TopicInfo.of(answer)
            if asked - answer.age_us / 1e6 > began:
                break
        raise TopicReplaced(
            f"topic {topic!r} was created while this call waited for a broker; nothing was changed",
            "look at the topic, and call again if it is the right one",
        )

    async def tail(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> Tail:
        """Return the ends of a topic and the start of its readable part. Every batch acked before the call is below.

        Returns:
            A `Tail`. `index` and `seq` are the ordered end. `durable_index` and `durable_seq` are the durable end (the
            high watermark); without replicas it equals the ordered end. In a topic of order 0 or 1, the numbers are
            sums over all lanes, and `lanes` has the tail of each lane.

        Raises:
            UnknownTopic: There is no such topic.

        Example:
            end = (await log.tail("orders")).seq
        """
        about, found = await self._ask_lanes(
            topic, lambda about: lanes_of(about, None), lambda lane: m.GetTail(lane=lane), m.TailIs, timeout
        )
        tails = tuple(tail_of(about, tail) for tail in found)
        if about.order > Order.BROKER:
            return tails[0]
        numbers = (
            "index",
            "seq",
            "start_index",
            "start_seq",
            "durable_index",
            "durable_seq",
            "hot_index",
            "hot_seq",
        )
        sums = {name: sum(getattr(tail, name) for tail in tails) for name in numbers}
        return Tail(about.lane, **sums, lanes=tails)

    async def trim(
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
            start = await log.trim("orders", before_time=datetime.now(UTC) - timedelta(days=7))
        """
        by, before = trim_lookup(before_seq, before_index, before_time)
        about = await self._meant(topic, timeout)
        lanes = lanes_of(about, lane) if by == "time" else [lane_of(about, lane, f"before_{by}")]
        wanted = [m.Trim(lane=each, by=by, before=before, cold=cold, topic_id=about.id) for each in lanes]
        asks = [await trim_ask(self.brokers, about, ask) for ask in wanted]
        found = await asyncio.gather(*(self._ask(ask, m.PlaceIs, timeout) for ask in asks))
        if lane is not None or about.order > Order.BROKER:
            return Position(found[0].lane, found[0].index, found[0].seq)
        return Position(about.lane, sum(start.index for start in found), sum(start.seq for start in found))

    async def position_at(
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
            position = await log.position_at("orders", datetime(2026, 1, 31, tzinfo=UTC))
        """
        return await self._find(topic, "time", time_us(time), lane, timeout)

    async def position_of(
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
            position = await log.position_of("orders", seq=1_000)
        """
        return await self._find(topic, *seek_lookup(None, seq, index, None), lane, timeout)

    async def _find(self, topic: str, by: str, value: int, lane: int | None, timeout: Timeout) -> Position:
        about = await self.describe(topic, timeout=timeout)
        number = lane_of(about, lane, f"a {by}")
        return Position(number, *await find_position(self.brokers, about, number, by, value, self._patience(timeout)))

    async def status(self, *, timeout: Timeout = AS_CONFIGURED) -> list[dict[str, Any]]:
        """Return the status of each connected broker, as a dict. Brokers that do not answer are left out.

        Example:
            for broker in await log.status():
                print(broker)
        """
        asked = [connection.ask(m.GetStatus(), self._patience(timeout)) for connection in self.brokers.live()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer.facts for answer in answers if isinstance(answer, m.StatusIs)]

    def _patience(self, timeout: Timeout) -> float:
        return patience_s(timeout, self.brokers.settings.request_timeout_s)

    async def _ask_lanes(
        self,
        topic: str,
        lanes: Callable[[TopicInfo], list[int]],
        question: Callable[[int], m.Message],
        kind: type[Answer],
        timeout: Timeout,
    ) -> tuple[TopicInfo, list[Answer]]:
        """Ask about lanes of a topic, within `timeout` seconds in total. Return the topic and an answer per lane."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience(timeout)
        about = await self.describe(topic, timeout=timeout)
        left = max(0.0, deadline - loop.time())
        asked = (self._ask(question(lane), kind, left) for lane in lanes(about))
        return about, list(await asyncio.gather(*asked))

    async def _ask(self, message: m.Message, kind: type[Answer], timeout: Timeout, *, again: bool = True) -> Answer:
        return await self.brokers.ask(message, kind, self._patience(timeout), again=again)

    # --- records ---
    def publisher(
        self, topic: str | TopicInfo, *, timeout: Timeout = AS_CONFIGURED, **options: Unpack[PublisherArguments]
    ) -> Opening[Publisher]:
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
            async with log.publisher("ticks", compression="zstd", linger_ms=5) as publisher: ...
        """
        return Opening(self._open_publisher(topic, options, timeout), "Publisher")

    async def _open_publisher(self, topic: str | TopicInfo, options: PublisherArguments, timeout: Timeout) -> Publisher:
        chosen = publisher_options(self.brokers.settings, options)
        about = topic if isinstance(topic, TopicInfo) else await self.describe(topic, timeout=timeout)
        return self._register(Publisher(self.brokers, self._forget, about, chosen))

    def subscribe(
        self,
        topic: str,
        *,
        start: StartPosition = "earliest",
        read: str = "durable",
        partitions: Sequence[int] | None = None,
        group: str | None = None,
        timeout: Timeout = AS_CONFIGURED,
    ) -> Opening[Subscriber]:
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
            async for batch in await log.subscribe("orders", start=datetime.now(UTC) - timedelta(minutes=10)): ...
        """
        return Opening(self._open_subscriber(topic, start, read, partitions, group, timeout), "Subscriber")

    async def _open_subscriber(
        self,
        topic: str,
        start: StartPosition,
        read: str,
        partitions: Sequence[int] | None,
        group: str | None,
        timeout: Timeout,
    ) -> Subscriber:
        check_read(read, group)
        where = start_lookup(start)
        described = await self.describe(topic, timeout=timeout)
        wanted = None if partitions is None else list(partitions)
        core = reader_core(self.brokers, described, where, read, wanted)
        return self._register(Subscriber(self.brokers, self._forget, core, described.name))

    async def read(
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
            (await log.read("ticks", 1_000, 2_000)).to_pandas()
            await log.read("orders", start=datetime(2026, 1, 31, tzinfo=UTC))
        """
        check_read(read)
        about = await self.describe(topic, timeout=timeout)
        by_seq = isinstance(start, int) or isinstance(end, int)
        lanes = [lane_of(about, lane, "a seq")] if by_seq else lanes_of(about, lane)
        parts = {number: await self._read_lane(about, number, start, end, read, timeout) for number in lanes}
        return joined(parts, about.versions) if about.order <= Order.BROKER else parts[about.lane]

    async def _read_lane(
        self,
        topic: TopicInfo,
        lane: int,
        start: int | Moment | None,
        end: int | Moment | None,
        read: str,
        timeout: Timeout,
    ) -> pa.Table:
        first, stop = await self._seq_of(topic, lane, start, timeout), await self._seq_of(topic, lane, end, timeout)
        tail = tail_of(topic, await self._ask(m.GetTail(lane=lane), m.TailIs, timeout))
        patience = self._patience(timeout)
        return await read_span(self.brokers, topic, tail, seq_span(tail, first, stop), patience, read)

    async def _seq_of(self, topic: TopicInfo, lane: int, where: int | Moment | None, timeout: Timeout) -> int | None:
        """Return the seq of the first batch at or after a time. A seq or None is returned unchanged."""
        if not isinstance(where, datetime | str):
            return where
        return (await find_position(self.brokers, topic, lane, "time", time_us(where), self._patience(timeout)))[1]

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
    ) -> AsyncIterator[list[Batch]]:
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
            async for batches in log.scan("orders", start=1_000, stop=2_000):
                rows += sum(batch.count for batch in batches)
        """
        wanted = None if partitions is None else list(partitions)
        return self._scan(topic, lane, LaneSpan(start, stop, read, wanted, control).checked(), timeout)

    async def _scan(self, topic: str, lane: int | None, span: LaneSpan, timeout: Timeout) -> AsyncIterator[list[Batch]]:
        scan = await self._begin_scan(topic, lane, span, timeout)
        try:
            while taken := await scan.next():
                yield taken
        finally:
            self._end_scan(scan)

    async def _begin_scan(self, topic: str, lane: int | None, span: LaneSpan, timeout: Timeout) -> Scan:
        """Begin a scan. The caller drives it and calls `_end_scan`; programs use `scan`."""
        about = await self.describe(topic, timeout=timeout)
        number = lane_of(about, lane, "an index")
        tail = tail_of(about, await self._ask(m.GetTail(lane=number), m.TailIs, timeout))
        patience = self._patience(timeout)
        return self._register(Scan(self.brokers, about, number, span, span.indices(tail), patience))

    def _end_scan(self, scan: Scan) -> None:
        """Stop a scan and its read-ahead."""
        scan.stop()
        self._parts.discard(scan)

    def _register(self, part: PartType) -> PartType:
        self._parts.add(part)
        return part

    def _forget(self, part: Publisher | Subscriber) -> None:
        """Remove a closed publisher or subscriber."""
        self._parts.discard(part)

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Close all publishers and subscribers, then disconnect. A second call does nothing.

        This also reports the errors of publishers whose own `close` was interrupted.

        Args:
            timeout: Seconds to wait for the outcomes of all publishers. None means no limit.

        Raises:
            RecordsLost: Acked records are lost; `positions` names all of them. If publishers failed as well, their
                error is the cause.
            ManyErrors: Several publishers failed. If only one failed, its error is raised.

        Example:
            await log.close(timeout=5)
        """
        timeout = timeout_s(timeout)
        self._finalizer.detach()
        parts = list(self._parts)
        publishers = [part for part in parts if isinstance(part, Publisher)]
        try:
            closed = [part._end(timeout) if isinstance(part, Publisher) else part.close(timeout) for part in parts]
            ended = await asyncio.gather(*closed, return_exceptions=True)
        finally:
            await self.brokers.close()
        problems = [problem for publisher in publishers for problem in publisher._problems()]
        failures = [as_reported(error) for error in ended if isinstance(error, Exception)]
        if publishers:
            from embarcadero.client.session import losses_first

            failures = losses_first(problems + failures)
        raise_as_one(failures)

    async def __aenter__(self) -> Log:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close(close_patience(error))
        except EmbarcaderoError as problem:
            if error is None:
                raise
            error.add_note(f"closing reported {type(problem).__name__}: {problem}")


PartType = TypeVar("PartType", Publisher, Subscriber, Scan)
