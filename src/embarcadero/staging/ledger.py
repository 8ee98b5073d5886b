"""A target topic and its staging topic, for committers: the Ledger of the protocol over a client of the cluster."""

from __future__ import annotations

import asyncio
import time
from random import random
from typing import Final

import msgspec
import pyarrow as pa

from embarcadero.client.aio import Log, Publisher, RecordAwaitable
from embarcadero.client.named import HeldName
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import (
    BadValue,
    SessionFenced,
    StagedGone,
    TopicExists,
    TopicReplaced,
    UnknownSession,
    UnknownTopic,
)
from embarcadero.limits import DELIVERY_TIMEOUT_S, STAGED_FENCED_TRIES
from embarcadero.staging.commit import Prepared
from embarcadero.staging.manifest import FACTS, PARTITIONS, Fact, Inline, Manifest, Reference, decode_fact, encode_fact
from embarcadero.staging.names import Decision, data_name, decided_name, first_sequence, run_name
from embarcadero.types import Ack, Order, StagedBatch, staging_topic
from embarcadero.wire.schemas import TopicSchemas

_BACK_OFF_S: Final = 0.05  # after the session was taken over, the first time
_SCAN_PATIENCE_S: Final = 60.0


def ack_of(topic: TopicInfo) -> int:
    """The ack that makes a batch in a topic as safe as the topic can."""
    return int(Ack.DURABLE if topic.replicas else Ack.ORDERED)


def at_version(topic: TopicInfo, version: int) -> TopicInfo:
    """The topic as a publisher sees it that encodes by an earlier version of its schema."""
    versions = topic.versions
    if version == versions.version:
        return topic
    return msgspec.structs.replace(topic, versions=TopicSchemas(versions.of(version), versions.widths[:version]))


async def open_staging(log: Log, target: TopicInfo) -> TopicInfo:
    """Return the staging topic of a target; create it, with the target's replicas, if it does not exist."""
    name = staging_topic(target.id)
    try:
        return await log.describe(name)
    except UnknownTopic:
        try:
            return await log.create_topic(
                name, order=int(Order.NONE), partitions=PARTITIONS, replicas=target.replicas,
                durable_on=target.durable_on, retention_bytes=0, retention_s=0,
            )  # fmt: skip
        except TopicExists:
            return await log.describe(name)


class TopicLedger:
    """Commits writes into one target topic."""

    def __init__(self, log: Log, target: TopicInfo) -> None:
        if target.order <= Order.BROKER:
            raise BadValue(
                f"topic {target.name!r} has order {target.order}, in which a write can't be stored once",
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
        """Wait until everything that is ordered in the target now is durable, or lost."""
        if not self.target.replicas:
            return
        tail = await self._log.tail(self.target.name)
        if tail.durable_index < tail.index:
            scan = self._log.scan(
                self.target.name, start=tail.index - 1, stop=tail.index, control=True, timeout=_SCAN_PATIENCE_S
            )  # fmt: skip
            async for _ in scan:
                pass

    async def find(self, write: str, decision: Decision) -> Manifest | None:
        """Look through the facts of the staging topic for the manifest that was decided."""
        try:
            staging = await self._log.describe(staging_topic(self.target.id))
        except UnknownTopic:
            return None
        for lane in staging.lanes:
            scan = self._log.scan(staging.name, lane=lane.lane, partitions=[FACTS], timeout=_SCAN_PATIENCE_S)
            async for batches in scan:
                for batch in batches:
                    fact = decode_fact(batch) if batch.count else None
                    if (
                        isinstance(fact, Manifest)
                        and (fact.write, fact.epoch, fact.digest) == (write, decision.epoch, decision.digest)
                    ):  # fmt: skip
                        return fact
        return None

    async def prepare(self, manifest: Manifest, run: str | None) -> Prepared:
        """Append the manifest; note the run, and look at the names and at what is staged, meanwhile."""
        before, (decided, data), gone, _ = await asyncio.gather(
            self._begin_run(manifest, run), self.held(manifest.write), self._missing(manifest), self.append(manifest)
        )
        return Prepared(before, decided, data, gone)

    async def _begin_run(self, manifest: Manifest, run: str | None) -> int:
        if run is None:
            return 0
        name = run_name(manifest.write, run)
        before, _ = await self._log.open_session(self.target.name, name, manifest.epoch + 1)
        return before

    async def _missing(self, manifest: Manifest) -> StagedGone | None:
        """The error that names a staged batch which can't be read any more, if there is one."""
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
            f"batches that were staged for epoch {manifest.epoch} of write {manifest.write!r} are gone, at index "
            f"{lost[0][1]} of lane {lost[0][0]} of topic {staging.name!r} and perhaps elsewhere",
            "nothing of the write is visible; run it again. Do not delete or trim staging topics while writes go on. "
            "A topic without replicas stages in memory: give it replicas, or write less at once",
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
        """Move `decided` to a decision if `holder` still holds the name; return what holds it now."""
        name, target = decided_name(write), self.target
        return await self._log.move_name(target.name, name, decision.number, holder, topic_id=target.id)

    async def finish(self, write: str, epoch: int) -> None:
        """Move `data` to the first sequence of the next epoch."""
        await self._log.open_session(self.target.name, data_name(write), first_sequence(epoch + 1))

    # --- batches ------------------------------------------------------------------------------------------------------
    async def publish(self, manifest: Manifest) -> None:
        """Publish all batches that are not published yet; return when they are durable.

        Another committer of the same manifest may take the session over. Both publish the same batches under the same
        sequences, so this one takes it back after a while, and both come to an end.
        """
        for tries in range(STAGED_FENCED_TRIES):
            try:
                await self._publish_rest(manifest)
                return
            except (SessionFenced, UnknownSession) as error:
                if isinstance(error, TopicReplaced):
                    raise
                await asyncio.sleep(_BACK_OFF_S * (1 << min(tries, 6)) * (0.5 + random()))
        raise SessionFenced(
            f"other processes took the session of write {manifest.write!r} over {STAGED_FENCED_TRIES} times",
            "see whether two queries run with copies of one checkpoint",
        )

    async def _publish_rest(self, manifest: Manifest) -> None:
        name, first = data_name(manifest.write), first_sequence(manifest.epoch)
        await self._log.open_session(self.target.name, name, first)
        target = at_version(self.target, manifest.schema)
        publisher = await self._log.publisher(
            target, session=name, ack=ack_of(target), order=int(Order.STRONG), linger_ms=0
        )
        async with publisher:
            published = await publisher.next_session_seq(DELIVERY_TIMEOUT_S) - first
            if published >= first_sequence(1):
                return  # another committer has finished the epoch
            waiting = [
                await self._send(publisher, batch, manifest.schema)
                for number, batch in enumerate(manifest.batches())
                if number >= published
            ]
            await publisher.flush()
            await asyncio.gather(*waiting)

    async def _send(self, publisher: Publisher, batch: Reference | Inline, schema: int) -> RecordAwaitable:
        if isinstance(batch, Inline):
            payload = pa.py_buffer(batch.payload)
            return await publisher.publish_encoded(
                payload, batch.count, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S
            )
        staging = await self.staging()
        staged = StagedBatch(staging.id, batch.lane, batch.index, batch.size, batch.count, batch.crc, schema)
        return await publisher.publish_reference(staged, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S)
