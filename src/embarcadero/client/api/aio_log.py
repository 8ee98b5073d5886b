"""The asyncio client. The client for threads is generated from its classes; both share everything below them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar, Unpack

import pyarrow as pa

from embarcadero.client import lifetime
from embarcadero.client.api.aio_calls import SessionCalls, SurveyCalls, TierCalls, trim_ask
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
    check_piece_bytes,
    find_position,
    joined,
    lane_of,
    lanes_of,
    read_span,
    reader_core,
    seq_span,
    table_only_cuts,
    tail_of,
    with_lags,
)
from embarcadero.client.results import Batch, TopicInfo
from embarcadero.config import Config, load
from embarcadero.config.key import Duration
from embarcadero.errors import (
    EmbarcaderoError,
    TopicReplaced,
    Unreachable,
    as_reported,
    invariant,
    raise_as_one,
)
from embarcadero.forks import tell_of_forks
from embarcadero.limits import CLOSE_TIMEOUT_S, PIECES_MAX
from embarcadero.orders import parse_order
from embarcadero.types import MURMUR2, Cut, LanePosition, Order, Position, ReaderProgress, Tail, Topic, public_names
from embarcadero.wire import messages as m
from embarcadero.wire.schemas import encode_schema

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Answer = TypeVar("Answer", bound=m.Message)
_LOOKS_MAX = 5  # at a topic that may have been created just before a call, or after it began


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    config: str | Path | Config | None = None,
    timeout: Timeout = AS_CONFIGURED,
) -> Opening[Log]:
    """Connect to a cluster by the addresses (`host:port`) of one or several of its brokers. Raises Unreachable.

    `config` names an `embarcadero.yaml`; without addresses those of its `client.brokers` are used. Without a `timeout`
    it takes at most `client.connect_timeout_s`.

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
    """Connect as `connect` does, to the private `cluster` of the caller if there is one."""
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
        raise Unreachable(f"no broker answers at {name} within {patience:g} s", NO_BROKER_HINT) from None
    except BaseException:
        await brokers.close()
        raise
    return Log(brokers, name)


class Log(TierCalls, SessionCalls, SurveyCalls):
    """A client of one cluster. Its publishers and subscribers share one connection per broker."""

    def __init__(self, brokers: BrokerPool, address: str) -> None:
        self._address = address
        self.cluster = brokers.cluster  # the LocalCluster that `local` started
        self.brokers = brokers
        self._parts: set[Publisher | Subscriber | Scan] = set()
        self._finalizer = lifetime.close_when_dropped(self, brokers, lambda: None)
        tell_of_forks(self)

    def _after_fork(self) -> None:
        """In a forked child: connect again with the first call. Publishers and subscribers are the parent's."""
        self._parts = set()
        self._finalizer.detach()

    def __repr__(self) -> str:
        return f"<embarcadero.aio.Log of {self._address}, {self.brokers.state}>"

    def __dir__(self) -> list[str]:
        return public_names(self, ("brokers",))

    @property
    def address(self) -> str:
        """The addresses it was connected with, as `connect` takes them."""
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
        """Create a topic; None: the cluster's default. Raises TopicExists, BadName, BadValue, BadSchema.

        With a `schema`, records are rows of these columns, `publish` takes them and checks them, and `send` is refused.
        `replicas` have each record on disk, and it is durable once `durable_on` of them have synced it. Beyond
        `retention_bytes`, or after `retention_s`, the oldest records go; 0: never. With several `partitions` a record's
        key chooses one: by `partitioner` "murmur2", as Kafka's Java clients do, or "crc32c". `key` names the column of
        the schema that has keys: binary, string or integers; rows whose key is null take turns.

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
        return TopicInfo.told(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def alter_topic(
        self, name: str, *, timeout: Timeout = AS_CONFIGURED, **changes: Unpack[TopicChanges]
    ) -> TopicInfo:
        """Change a topic that exists: only what is given. BadValue or BadSchema says what can't change, and why.

        `schema` may add columns that may be null. That makes a new version: publishers that know an older one go on,
        and readers get nulls where a batch is older than the column. `partitions` grow by whole multiples, `on_gap` may
        become "skip"; open publishers go on with the settings they began with. `replicas` and `durable_on` count for
        what is published once the cluster has moved on to its next replicas. TopicReplaced if the topic was deleted
        meanwhile, and another one has its name.

            known = (await log.describe("ticks")).schema
            await log.alter_topic("ticks", schema=known.append(pa.field("venue", pa.string())))
            await log.alter_topic("orders", gap_timeout_ms=60_000)
        """
        given = checked_changes(changes)
        ask = m.AlterTopic(name=name, topic_id=(await self._meant(name, timeout)).id, **given)
        return TopicInfo.told(await self._ask(ask, m.TopicIs, timeout, again=False))

    async def describe(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> TopicInfo:
        """A topic's settings, its `schema` (None: raw records) and all versions of it (`schemas`). Raises UnknownTopic.

            (await log.describe("ticks")).schemas[1]
        """
        return TopicInfo.told(await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout))

    async def topics(self, *, hidden: bool = False, timeout: Timeout = AS_CONFIGURED) -> list[Topic]:
        """List all topics; with `hidden`, also those that the cluster made for itself (`__staged...`)."""
        topics = (await self._ask(m.ListTopics(), m.TopicsAre, timeout)).topics
        return [topic for topic in topics if hidden or not topic.hidden]

    async def delete_topic(self, topic: str, *, topic_id: int | None = None, timeout: Timeout = AS_CONFIGURED) -> None:
        """Delete a topic with all its records. Raises UnknownTopic.

        The topic is the one that has the name when the call begins, or the one with `topic_id` (`describe(...).id`). A
        call that waits for a paused broker never deletes the next topic of that name: TopicReplaced.

            await log.delete_topic("orders")
        """
        meant = (await self._meant(topic, timeout)).id if topic_id is None else topic_id
        await self._ask(m.DeleteTopic(name=topic, topic_id=meant), m.Done, timeout, again=False)

    async def _meant(self, topic: str, timeout: Timeout) -> TopicInfo:
        """Return the topic that a call means: the one that has the name when the call begins.

        A broker that was paused answers late: TopicReplaced if the topic is younger than the call. An answer tells the
        topic's age, but not when it was given, between the question and now. A topic that may be older or younger is
        asked for again: a quick answer tells.
        """
        began = monotonic()
        for _ in range(_LOOKS_MAX):
            asked = monotonic()
            answer = await self._ask(m.DescribeTopic(name=topic), m.TopicIs, timeout)
            if answer.age_us is None or monotonic() - answer.age_us / 1e6 <= began:
                return TopicInfo.told(answer)
            if asked - answer.age_us / 1e6 > began:
                break
        raise TopicReplaced(
            f"topic {topic!r} was created while this call waited for a broker, and nothing was changed",
            "look at the topic, and call again if it is the one that you mean",
        )

    async def tail(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> Tail:
        """Where the topic ends, and where its readable part starts: everything acked before this call is below the end.

        `seq` and `index` are where ordered records end, `durable_seq` and `durable_index` where durable ones do; in a
        topic without replicas these are the same. Of a topic of order 0 or 1 the numbers are sums over all lanes;
        `lanes` has the tail of each.

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
        """Give up the records before a place; returns where the topic starts now.

        No batch is split: one that holds a record to be kept stays whole. Trimming less than before changes nothing;
        trimming beyond the end raises FuturePosition. Readers below the start get a TRIMMED gap. Orders 0 and 1: a time
        trims all lanes (or `lane`), and sums over them are returned; a seq or an index is in one lane, so say which.
        Without `cold` a topic with a table keeps what is in the table, and brokers forget no more than that.

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
        """Where the first batch is that was appended at or after a time; the topic's end if there is none yet.

        Raises Trimmed when batches of that time are gone. Orders 0 and 1: `lane` says in which lane.

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
        """Where the batch is that holds a record, or has an index; of the end, the end. The batch's seq is its first.

        Raises FuturePosition beyond the end, Trimmed below the start. Orders 0 and 1: `lane` says in which lane.

            position = await log.position_of("orders", seq=1_000)
        """
        return await self._find(topic, *seek_lookup(None, seq, index, None), lane, timeout)

    async def _find(self, topic: str, by: str, value: int, lane: int | None, timeout: Timeout) -> Position:
        about = await self.describe(topic, timeout=timeout)
        number = lane_of(about, lane, f"a {by}")
        return Position(number, *await find_position(self.brokers, about, number, by, value, self._patience(timeout)))

    async def note_progress(
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

            await log.note_progress("orders", "billing", {batch.lane: (batch.index + 1, batch.seq + batch.count)})
        """
        positions = {lane: LanePosition(*at) for lane, at in places.items()}
        ask = m.NoteProgress(topic=topic, reader=reader, places=positions, topic_id=topic_id)
        await self._ask(ask, m.Done, timeout)

    async def readers(self, topic: str, *, timeout: Timeout = AS_CONFIGURED) -> list[ReaderProgress]:
        """The readers of a topic that told how far they are (`note_progress`), and how many records they are behind.

            for reader in await log.readers("orders"):
                print(reader.reader, reader.lag, reader.ago_s)
        """
        told = (await self._ask(m.GetReaders(topic=topic), m.ReadersAre, timeout)).readers
        return with_lags(told, await self.tail(topic, timeout=timeout)) if told else []

    async def remove_reader(
        self, topic: str, reader: str, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """Forget how far a reader is. BadValue, if the topic has no reader of that name.

        Nothing is lost by it: a reader that is alive comes back with the next `note_progress`.

            await log.remove_reader("orders", "billing")
        """
        await self._ask(m.RemoveReader(topic=topic, reader=reader, topic_id=topic_id), m.Done, timeout)

    async def status(self, *, timeout: Timeout = AS_CONFIGURED) -> list[dict[str, Any]]:
        """What each broker that we are connected to says about itself."""
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
        """Ask about some lanes of a topic, within `timeout` seconds in all. The topic, and an answer per lane."""
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
        """Open a publisher into a topic, with the newest version of its schema as it is now. Raises UnknownTopic.

        What `describe` returned is taken as it is: no broker is asked, and its newest version counts.

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
        """A reader of a topic from "earliest", "latest", the batch that holds the record of seq `start`, or a time.

        A datetime (with a time zone) starts at the first batch appended at or after it; if there is none yet the
        subscriber waits for it. Batches below the start of the topic come as one TRIMMED gap. It gives every batch the
        newest schema that the topic has now, for as long as it lives; subscribe again to see columns added later.
        `read`: "durable" gives only what no crash can take back; "ordered" gives records as soon as they have a place
        (in a topic without replicas both are the same). What a crash took all the same comes as one LOST gap.

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
        """Records with start <= seq < end as a table, with a column `_seq`; by default all there are now.

        A datetime stands for the first batch appended at or after it, or for the end of the topic. With a schema the
        table has the newest one; columns that a batch was published without are null. A topic of order 0 or 1 is read
        lane by lane, with a column `_lane`; a seq is then a place in one lane, so say which (`lane`). With
        read="durable" it waits until all of it is durable; read="ordered" does not. Records that a crash took are
        missing, and their seqs are not used again. `timeout` is how long it may take without any progress. Raises
        FuturePosition beyond the end, Trimmed below the start.

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
        """The seq at which the batches since a time begin; a seq stays what it is."""
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
        """The batches with start <= index < stop, in lists as they arrive; fetched ahead, within bounds.

        None: from the earliest batch, up to the frontier of `read` as it is now. It ends at `stop`, waiting for batches
        to come; after `timeout` seconds without any progress it raises TimedOut. Gaps come as batches with `.gap`,
        within the span. `control` gives the entries of sessions, too (`batch.kind`), so that each index comes. Orders 0
        and 1: say which `lane`. Leaving the loop stops the fetching.

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
        """A scan that its caller drives, and ends: `scan` is the way to have one."""
        about = await self.describe(topic, timeout=timeout)
        number = lane_of(about, lane, "an index")
        tail = tail_of(about, await self._ask(m.GetTail(lane=number), m.TailIs, timeout))
        patience = self._patience(timeout)
        return self._register(Scan(self.brokers, about, number, span, span.indices(tail), patience))

    def _end_scan(self, scan: Scan) -> None:
        """Stop the fetching of a scan."""
        scan.stop()
        self._parts.discard(scan)

    async def measure(
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

            for cut in await log.measure("orders", 0, (await log.tail("orders")).durable_index, 64 << 20): ...
        """
        check_piece_bytes(piece_bytes)
        LaneSpan(start, stop, "ordered", None, False).checked()
        about = await self.describe(topic, timeout=timeout) if isinstance(topic, str) else topic
        number = lane_of(about, lane, "an index")
        cuts: list[Cut] = []
        at = start
        tiered, most = table and about.tier is not None, pieces_max or PIECES_MAX
        while at < stop and (pieces_max is None or len(cuts) < pieces_max):
            if tiered and (cold := await table_only_cuts(self.brokers, about.name, number, at, stop, piece_bytes)):
                cuts, at = cuts + cold, cold[-1].index
                continue
            ask = m.Measure(lane=number, start=at, stop=stop, piece_bytes=piece_bytes, pieces_max=most)
            cuts += (await self._ask(ask, m.PiecesAre, timeout)).cuts
            invariant(bool(cuts) and cuts[-1].index > at, "a measured span goes on")
            at = cuts[-1].index
        return cuts

    def _register(self, part: PartType) -> PartType:
        self._parts.add(part)
        return part

    def _forget(self, part: Publisher | Subscriber) -> None:
        """A publisher or subscriber is closed."""
        self._parts.discard(part)

    async def close(self, timeout: Duration | None = CLOSE_TIMEOUT_S) -> None:
        """Close all publishers and subscribers, and hang up.

        Waits for the outcomes of all publishers, at most `timeout` seconds. Raises what they have to report, also those
        whose own `close` was interrupted: RecordsLost names all records that are lost; the error of a publisher that
        failed, as its cause if there is also a loss; of several that failed, ManyErrors. Closing twice is fine.
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
