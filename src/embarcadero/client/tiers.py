"""What clients ask about tables of topics: who writes one, and how far it is. Jobs that tier use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from embarcadero.client.arguments import AS_CONFIGURED, Timeout
from embarcadero.client.read.cold import find_place
from embarcadero.client.results import TopicInfo
from embarcadero.errors import Trimmed
from embarcadero.placement.tier import public_properties
from embarcadero.types import Tier
from embarcadero.wire import messages as m

if TYPE_CHECKING:
    from embarcadero.client import aio
    from embarcadero.client.net.brokers import Brokers
    from embarcadero.client.thread import LoopThread

# ruff: noqa: ASYNC109 - the end of a wait has a meaning of its own here, so calls take a `timeout`

Places = Mapping[int, tuple[int, int]]
"""By lane: (index, seq)."""

Answer = TypeVar("Answer", bound=m.Message)


class _Asks(Protocol):
    async def _ask(self, message: m.Message, kind: type[Answer], timeout: Timeout, *, again: bool = True) -> Answer: ...


async def trim_ask(brokers: Brokers, about: TopicInfo, ask: m.Trim) -> m.Trim:
    """The question to trim before a place that only the topic's table has: brokers can't tell its index and seq."""
    if about.tier is None or not ask.cold or about.tier.start(ask.lane) >= about.tier.frontier(ask.lane):
        return ask
    tail = await brokers.ask(m.GetTail(lane=ask.lane), brokers.settings.request_timeout_s)
    try:
        index, seq = await find_place(brokers, about, ask.lane, ask.by, ask.before)
    except Trimmed:  # less than before: nothing changes
        return m.Trim(lane=ask.lane, by="index", before=0, topic_id=ask.topic_id)
    if not isinstance(tail, m.TailIs) or tail.hot_index is None or index >= tail.hot_index:
        return ask
    return m.Trim(lane=ask.lane, by="index", before=index, seq=seq, topic_id=ask.topic_id)


class TierCalls:
    """The part of a Log about tables of topics."""

    async def open_tier(
        self: _Asks, topic: str, holder: str, *, table_id: str, warehouse: str, table: str,
        hot_retention_s: int | None = None, take_over: bool = False, properties: Mapping[str, str] | None = None,
        topic_id: int = 0, engine: str = "", timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:  # fmt: skip
        """Begin an epoch of writing a topic's table: those before are over. `table_id`, `warehouse` and `table` count
        for a topic that has no table yet. Clients are told those of `properties` that say where the store is (endpoint,
        region, addressing); secrets are left out. Raises TierBusy while another holder is at it, unless `take_over`;
        here and below TopicReplaced if the topic with `topic_id` (0: any) is deleted and another one has its name.
        """
        ask = m.OpenTier(
            topic=topic, holder=holder, id=table_id, warehouse=warehouse, table=table, hot_retention_s=hot_retention_s,
            take_over=take_over, properties=public_properties(properties or {}), topic_id=topic_id,
            engine=engine,
        )  # fmt: skip
        return (await self._ask(ask, m.TierIs, timeout)).tier

    async def advance_tier(
        self: _Asks, topic: str, epoch: int, *, metadata: str, frontiers: Places, starts: Places | None = None,
        topic_id: int = 0, engine: str = "", timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:  # fmt: skip
        """Tell that everything below these places is in the table. Raises Deposed if the epoch is over."""
        ask = m.AdvanceTier(
            topic=topic, epoch=epoch, metadata=metadata, frontiers=dict(frontiers), starts=dict(starts or {}),
            topic_id=topic_id, engine=engine,
        )  # fmt: skip
        return (await self._ask(ask, m.TierIs, timeout)).tier

    async def keep_tier(
        self: _Asks, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch is there. Raises Deposed if the epoch, or its lease, is over."""
        await self._ask(m.KeepTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)

    async def close_tier(
        self: _Asks, topic: str, epoch: int, *, topic_id: int = 0, timeout: Timeout = AS_CONFIGURED
    ) -> None:
        """The holder of an epoch leaves, and another may begin at once."""
        await self._ask(m.CloseTier(topic=topic, epoch=epoch, topic_id=topic_id), m.Done, timeout)


class SyncTierCalls:
    """The same for the synchronous client."""

    _log: aio.Log
    thread: LoopThread

    def open_tier(
        self, topic: str, holder: str, *, table_id: str, warehouse: str, table: str,
        hot_retention_s: int | None = None, take_over: bool = False, properties: Mapping[str, str] | None = None,
        topic_id: int = 0, engine: str = "", timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:  # fmt: skip
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
        )  # fmt: skip

    def advance_tier(
        self, topic: str, epoch: int, *, metadata: str, frontiers: Places, starts: Places | None = None,
        topic_id: int = 0, engine: str = "", timeout: Timeout = AS_CONFIGURED,
    ) -> Tier:  # fmt: skip
        """Tell that everything below these places is in the table. Raises Deposed if the epoch is over."""
        return self.thread.wait(
            self._log.advance_tier(
                topic, epoch, metadata=metadata, frontiers=frontiers, starts=starts, topic_id=topic_id, engine=engine,
                timeout=timeout,
            )
        )  # fmt: skip

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
