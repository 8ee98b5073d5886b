"""A target topic and its staging topic, for committers: the Ledger of the protocol over a client of the cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from embarcadero.client.aio import Log
from embarcadero.client.named import HeldName
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadValue, StagedGone, TopicExists, TopicReplaced, UnknownTopic
from embarcadero.limits import DELIVERY_TIMEOUT_S, SESSION_TTL_S
from embarcadero.staging.commit import Prepared
from embarcadero.staging.manifest import FACTS, PARTITIONS, Fact, Manifest, Target, decode_fact, encode_fact
from embarcadero.staging.names import Decision, data_name, decided_name, first_sequence, routed_name, run_name
from embarcadero.staging.publishing import Publication, ack_of
from embarcadero.types import ROUTED_TOPIC, Order, staging_topic

_SCAN_PATIENCE_S: Final = 60.0


async def open_staging(log: Log, target: TopicInfo) -> TopicInfo:
    """Return the staging topic of a target; create it, with the target's replicas, if it does not exist.

    That of a target in memory has replicas, too, if the cluster has any: the memory of a broker is small.
    """
    name = staging_topic(target.id)
    replicas, durable_on = (target.replicas, target.durable_on) if target.replicas else (None, None)
    try:
        return await log.describe(name)
    except UnknownTopic:
        try:
            return await log.create_topic(
                name, order=int(Order.NONE), partitions=PARTITIONS, replicas=replicas, durable_on=durable_on,
                retention_bytes=0, retention_s=0,
            )  # fmt: skip
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
    """Commits writes into one target topic; or, if that is the home of writes into several topics, into all of them."""

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
        target, name = self.target, run_name(manifest.write, run)
        before, _ = await self._log.open_session(target.name, name, manifest.epoch + 1, topic_id=target.id)
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
        name, target = data_name(write), self.target
        await self._log.open_session(target.name, name, first_sequence(epoch + 1), topic_id=target.id)

    # --- batches ------------------------------------------------------------------------------------------------------
    async def publish(self, manifest: Manifest) -> None:
        """Publish all batches that are not published yet, target by target; return when they are durable."""
        home = self.target.name != ROUTED_TOPIC
        for number, target in enumerate(manifest.targets):
            batches = list(manifest.batches(number))
            name = data_name(manifest.write) if home else routed_name(manifest.write)
            publication = Publication(
                self._log, name, first_sequence(manifest.epoch), batches, target.schema, self.staging
            )
            if home:
                self.target = await publication.publish(self.target)
                continue
            try:
                await publication.publish(await self._routed(target))
            except UnknownTopic:
                continue  # it was deleted, and would be without these rows in any case

    async def _routed(self, target: Target) -> TopicInfo:
        found = await self._log.describe(target.topic)
        if found.id != target.id:
            raise TopicReplaced(f"topic {target.topic!r} was deleted, and another one has its name", "")
        return found
