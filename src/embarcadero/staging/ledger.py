"""A target topic and its staging topic, for committers: the Ledger of the protocol over a client of the cluster.

`Publication` publishes a decided manifest: the batches of one epoch, in one topic, each once. Several committers may do
this at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import random
from typing import Final

import msgspec
import pyarrow as pa

from embarcadero.client.api.aio_calls import HeldName
from embarcadero.client.api.aio_log import Log
from embarcadero.client.api.aio_streams import Publisher, RecordAwaitable
from embarcadero.client.results import TopicInfo
from embarcadero.errors import (
    BadReference,
    BadValue,
    SessionFenced,
    StagedGone,
    TopicExists,
    TopicReplaced,
    UnknownSession,
    UnknownTopic,
)
from embarcadero.limits import DELIVERY_TIMEOUT_S, SESSION_TTL_S, STAGED_FENCED_TRIES
from embarcadero.staging.commit import Prepared
from embarcadero.staging.manifest import (
    FACTS,
    PARTITIONS,
    Decision,
    Fact,
    InlineBatch,
    Manifest,
    Reference,
    Target,
    data_name,
    decided_name,
    decode_fact,
    encode_fact,
    first_sequence,
    routed_name,
    run_name,
)
from embarcadero.types import ROUTED_TOPIC, Ack, Order, StagedBatch, staging_topic
from embarcadero.wire.schemas import TopicSchemas

_PAUSE_S: Final = 0.1  # how long the other committer may make no progress, the first time that it takes over
_PAUSE_S_MAX: Final = 3.2
_SCAN_PATIENCE_S: Final = 60.0


def ack_of(topic: TopicInfo) -> int:
    """The highest ack that a topic offers: durable if it has replicas, else ordered."""
    return int(Ack.DURABLE if topic.replicas else Ack.ORDERED)


def at_version(topic: TopicInfo, version: int) -> TopicInfo:
    """The topic as seen by a publisher that encodes with an earlier version of its schema."""
    versions = topic.versions
    if version == versions.version:
        return topic
    return msgspec.structs.replace(topic, versions=TopicSchemas(versions.of(version), versions.widths[:version]))


class Publication:
    """The batches of a manifest for one of its targets, `number`, in the session `name` of that topic.

    Batch n has the sequence first_sequence(epoch) + n.
    """

    def __init__(
        self, log: Log, manifest: Manifest, number: int, name: str, staging: Callable[[], Awaitable[TopicInfo]]
    ) -> None:
        self._log, self._name, self._staging = log, name, staging
        self._first, self._schema = first_sequence(manifest.epoch), manifest.targets[number].schema
        self._batches = list(manifest.batches(number))

    async def publish(self, topic: TopicInfo) -> TopicInfo:
        """Publish all batches that are not yet published. Return the topic as it is now, when they are durable.

        Another committer of the same manifest may take over the session. Both publish the same batches under the same
        sequences. This committer waits while the other one makes progress, and takes over when it stops.
        """
        if self._schema > topic.versions.version:
            topic = await self._log.describe(topic.name)  # it has got columns since it was looked up
        reached, tries, pause_s = -1, 0, _PAUSE_S
        while tries < STAGED_FENCED_TRIES:
            try:
                await self._publish_rest(topic)
                return topic
            except (SessionFenced, UnknownSession):
                now = await self._let_pass(topic, pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                reached, tries = (now, 0) if now > reached else (reached, tries + 1)
            except BadReference as error:
                raise StagedGone(
                    f"a batch staged for topic {topic.name!r} is gone after the write was decided: {error.message}",
                    "the staging topic was deleted or trimmed by hand, or it was in memory only and ran out of "
                    "space; the rows before that batch are in the topic; begin another write or checkpoint",
                ) from error
        raise SessionFenced(
            f"other processes took over the session {self._name!r} {STAGED_FENCED_TRIES} times",
            "check whether two queries run with copies of one checkpoint",
        )

    async def _let_pass(self, topic: TopicInfo, pause_s: float) -> int:
        """Wait while another committer publishes. Return the sequence that it has reached."""
        reached = -1
        while True:
            held = await self._log.held_name(topic.name, self._name, topic_id=topic.id)
            if held.expected <= reached:
                return reached
            reached = held.expected
            await asyncio.sleep(pause_s * (0.5 + random()))

    async def _publish_rest(self, topic: TopicInfo) -> None:
        await self._log.open_session(topic.name, self._name, self._first, topic_id=topic.id)
        made = at_version(topic, self._schema)
        publisher = await self._log.publisher(
            made, session=self._name, ack=ack_of(made), order=int(Order.STRONG), linger_ms=0
        )
        async with publisher:
            published = await publisher.next_session_seq(DELIVERY_TIMEOUT_S) - self._first
            waiting = [await self._send(publisher, batch) for batch in self._batches[published:]]
            await publisher.flush()
            await asyncio.gather(*waiting)

    async def _send(self, publisher: Publisher, batch: Reference | InlineBatch) -> RecordAwaitable:
        if isinstance(batch, InlineBatch):
            payload = pa.py_buffer(batch.payload)
            return await publisher.publish_encoded(
                payload, batch.count, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S
            )
        staging = await self._staging()
        staged = StagedBatch(staging.id, batch.lane, batch.index, batch.size, batch.count, batch.crc, self._schema)
        return await publisher.publish_reference(staged, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S)


async def open_staging(log: Log, target: TopicInfo) -> TopicInfo:
    """Return the staging topic of a target; create it, with the target's replicas, if it does not exist.

    If the target is in memory only, its staging topic has replicas all the same if the cluster has any: a broker's
    memory is small.
    """
    name = staging_topic(target.id)
    replicas, durable_on = (target.replicas, target.durable_on) if target.replicas else (None, None)
    try:
        return await log.describe(name)
    except UnknownTopic:
        try:
            return await log.create_topic(
                name,
                order=int(Order.NONE),
                partitions=PARTITIONS,
                replicas=replicas,
                durable_on=durable_on,
                retention_bytes=0,
                retention_s=0,
            )
        except TopicExists:
            return await log.describe(name)


async def open_home(log: Log) -> TopicInfo:
    """Return the home of writes into several topics; create it if it does not exist."""
    try:
        return await log.describe(ROUTED_TOPIC)
    except UnknownTopic:
        try:
            return await log.create_topic(
                ROUTED_TOPIC, order=int(Order.TOTAL), partitions=1, session_ttl_s=SESSION_TTL_S
            )
        except TopicExists:
            return await log.describe(ROUTED_TOPIC)


class TopicLedger:
    """Commits writes into one target topic, or, if that is the home of routed writes, into all topics of a write."""

    def __init__(self, log: Log, target: TopicInfo) -> None:
        if target.order <= Order.BROKER:
            raise BadValue(
                f"topic {target.name!r} has order {target.order}, which can't store a write exactly once",
                "write into a topic of order 2 or 5",
            )
        self._log, self.target = log, target
        self._staging: TopicInfo | None = None

    async def staging(self) -> TopicInfo:
        """The staging topic, looked up once."""
        if self._staging is None:
            self._staging = await open_staging(self._log, self.target)
        return self._staging

    # --- facts --------------------------------------------------------------------------------------------------------
    async def append(self, fact: Fact) -> None:
        """Append a fact to the staging topic; return when it is durable."""
        staging = await self.staging()
        publisher = await self._log.publisher(staging, ack=ack_of(staging), linger_ms=0)
        async with publisher:
            payload = encode_fact(fact, time.time_ns() // 1000)
            await (await publisher.publish_encoded(payload, 1, partition=FACTS, timeout=DELIVERY_TIMEOUT_S))

    async def settle(self) -> None:
        """Wait until everything ordered in the target by now is durable, or lost."""
        if not self.target.replicas:
            return
        tail = await self._log.tail(self.target.name)
        if tail.durable_index < tail.index:
            scan = self._log.scan(
                self.target.name, start=tail.index - 1, stop=tail.index, control=True, timeout=_SCAN_PATIENCE_S
            )
            async for _ in scan:
                pass

    async def find(self, write: str, decision: Decision) -> Manifest | None:
        """Look through the facts of the staging topic for the manifest of a decision."""
        try:
            staging = await self._log.describe(staging_topic(self.target.id))
        except UnknownTopic:
            return None
        for lane in staging.lanes:
            scan = self._log.scan(staging.name, lane=lane.lane, partitions=[FACTS], timeout=_SCAN_PATIENCE_S)
            async for batches in scan:
                for batch in batches:
                    fact = decode_fact(batch) if batch.count else None
                    if isinstance(fact, Manifest) and (fact.write, fact.epoch, fact.digest) == (
                        write,
                        decision.epoch,
                        decision.digest,
                    ):
                        return fact
        return None

    async def prepare(self, manifest: Manifest, run: str | None) -> Prepared:
        """Append the manifest; meanwhile record the run, and look at the names and the staged batches."""
        before, (decided, data), gone, _ = await asyncio.gather(
            self._begin_run(manifest, run), self.held(manifest.write), self._missing(manifest), self.append(manifest)
        )
        return Prepared(before, decided, data, gone)

    async def _begin_run(self, manifest: Manifest, run: str | None) -> int:
        if run is None:
            return 0
        target, name = self.target, run_name(manifest.write, run)
        before, _ = await self._log.open_session(target.name, name, manifest.epoch + 1, topic_id=target.id)
        return before

    async def _missing(self, manifest: Manifest) -> StagedGone | None:
        """The error that names a staged batch which can't be read any more; None if all can be read."""
        lowest = manifest.lowest()
        if not lowest:
            return None
        staging = await self.staging()
        tail = await self._log.tail(staging.name)
        starts = {each.lane: each.start_index for each in tail.lanes}
        lost = [(lane, index) for lane, index in lowest.items() if lane not in starts or index < starts[lane]]
        if not lost:
            return None
        return StagedGone(
            f"batches staged for epoch {manifest.epoch} of write {manifest.write!r} are gone, at index "
            f"{lost[0][1]} of lane {lost[0][0]} of topic {staging.name!r} and perhaps elsewhere",
            "nothing of the write is visible; run it again. Do not delete or trim staging topics during writes. "
            "A topic without replicas stages in memory: give it replicas, or write less at a time",
        )

    # --- names --------------------------------------------------------------------------------------------------------
    async def held(self, write: str) -> tuple[HeldName, HeldName]:
        """Look at `decided` and `data`."""
        look, target = self._log.held_name, self.target
        decided, data = await asyncio.gather(
            look(target.name, decided_name(write), topic_id=target.id),
            look(target.name, data_name(write), topic_id=target.id),
        )
        return decided, data

    async def decide(self, write: str, decision: Decision, holder: int) -> HeldName:
        """Move `decided` to a decision if `holder` still holds the name; return its current holder."""
        name, target = decided_name(write), self.target
        return await self._log.move_name(target.name, name, decision.number, holder, topic_id=target.id)

    async def finish(self, write: str, epoch: int) -> None:
        """Move `data` to the first sequence of the next epoch."""
        name, target = data_name(write), self.target
        await self._log.open_session(target.name, name, first_sequence(epoch + 1), topic_id=target.id)

    # --- batches ------------------------------------------------------------------------------------------------------
    async def publish(self, manifest: Manifest) -> None:
        """Publish all batches that are not yet published, target by target; return when they are durable."""
        home = self.target.name != ROUTED_TOPIC
        for number, target in enumerate(manifest.targets):
            name = data_name(manifest.write) if home else routed_name(manifest.write)
            publication = Publication(self._log, manifest, number, name, self.staging)
            if home:
                self.target = await publication.publish(self.target)
                continue
            try:
                await publication.publish(await self._routed(target))
            except UnknownTopic:
                continue  # the topic was deleted, so its rows are gone in any case

    async def _routed(self, target: Target) -> TopicInfo:
        found = await self._log.describe(target.topic)
        if found.id != target.id:
            raise TopicReplaced(f"topic {target.topic!r} was deleted, and another one has its name", "")
        return found
