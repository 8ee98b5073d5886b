"""Publishing what was decided: the batches of one epoch, in one topic, each once, by any number of committers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import random
from typing import Final

import msgspec
import pyarrow as pa

from embarcadero.client.aio import Log, Publisher, RecordAwaitable
from embarcadero.client.topics import TopicInfo
from embarcadero.errors import BadReference, SessionFenced, StagedGone, UnknownSession
from embarcadero.limits import DELIVERY_TIMEOUT_S, STAGED_FENCED_TRIES
from embarcadero.staging.manifest import Inline, Reference
from embarcadero.types import Ack, Order, StagedBatch
from embarcadero.wire.schemas import TopicSchemas

_PAUSE_S: Final = 0.1  # so long another committer may stand still, the first time that it took the session over
_PAUSE_S_MAX: Final = 3.2


def ack_of(topic: TopicInfo) -> int:
    """The ack that makes a batch in a topic as safe as the topic can."""
    return int(Ack.DURABLE if topic.replicas else Ack.ORDERED)


def at_version(topic: TopicInfo, version: int) -> TopicInfo:
    """The topic as a publisher sees it that encodes by an earlier version of its schema."""
    versions = topic.versions
    if version == versions.version:
        return topic
    return msgspec.structs.replace(topic, versions=TopicSchemas(versions.of(version), versions.widths[:version]))


class Publication:
    """The batches of an epoch in one topic: batch n has the sequence `first` + n of the session `name`."""

    def __init__(
        self, log: Log, name: str, first: int, batches: Sequence[Reference | Inline], schema: int,
        staging: Callable[[], Awaitable[TopicInfo]],
    ) -> None:  # fmt: skip
        self._log, self._name, self._first, self._batches = log, name, first, batches
        self._schema, self._staging = schema, staging

    async def publish(self, topic: TopicInfo) -> TopicInfo:
        """Publish all batches that are not published yet; return when they are durable, with the topic as it is now.

        Another committer of the same manifest may take the session over: both publish the same batches under the same
        sequences. This one then waits while the other one gets on, and takes over when it stands still.
        """
        if self._schema > topic.versions.version:
            topic = await self._log.describe(topic.name)  # columns came since it was looked at
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
                    f"a batch that was staged for topic {topic.name!r} is gone after the write was decided: "
                    f"{error.message}",
                    "the staging topic was deleted or trimmed by hand, or it was in memory only, and there was too "
                    "little of it; rows before that batch are in the topic; begin another write or checkpoint",
                ) from error
        raise SessionFenced(
            f"other processes took the session {self._name!r} over {STAGED_FENCED_TRIES} times",
            "see whether two queries run with copies of one checkpoint",
        )

    async def _let_pass(self, topic: TopicInfo, pause_s: float) -> int:
        """Wait while another committer publishes. Return the sequence that it has come to."""
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

    async def _send(self, publisher: Publisher, batch: Reference | Inline) -> RecordAwaitable:
        if isinstance(batch, Inline):
            payload = pa.py_buffer(batch.payload)
            return await publisher.publish_encoded(
                payload, batch.count, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S
            )
        staging = await self._staging()
        staged = StagedBatch(staging.id, batch.lane, batch.index, batch.size, batch.count, batch.crc, self._schema)
        return await publisher.publish_reference(staged, partition=batch.partition, timeout=DELIVERY_TIMEOUT_S)
