"""The sweep: it completes decisions whose committer died, and gives up what no write needs any more.

It reads the facts of every staging topic, in their order. A write is open from its first fact until its newest
decision is done (and durable), until it is dropped, or until it was silent for SILENT_S. Staging topics are trimmed by
time: what was appended before the oldest open write began is garbage. A staging topic whose target is deleted is
deleted, too. The sweep keeps nothing on disk: when it starts, it reads the facts from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from embarcadero.client.aio import Log
from embarcadero.env import Journal
from embarcadero.errors import Corrupt, EmbarcaderoError, StagedGone
from embarcadero.plants import planted
from embarcadero.staging.commit import Ledger, complete
from embarcadero.staging.ledger import TopicLedger
from embarcadero.staging.manifest import FACTS, Begun, Dropped, Fact, Manifest, decode_fact
from embarcadero.staging.names import Decision
from embarcadero.types import STAGING_PREFIX, Topic, id_text

COMPLETE_AFTER_S: Final = 30.0
"""A manifest of this age is completed if it was decided: its committer has had time to do it."""

SILENT_S: Final = 86_400.0
"""A write without a fact for so long is forgotten, and what it staged is given up."""

_MARGIN_S: Final = 60.0  # clocks of brokers may differ; what was appended so shortly before a write began is kept
_SECOND: Final = 1_000_000


@dataclass(slots=True)
class OpenWrite:
    """What the facts tell of one write. Times are those at which the facts were appended, in microseconds."""

    last_us: int
    epochs: dict[int, int] = field(default_factory=dict)  # open epoch -> when it began
    manifests: dict[int, int] = field(default_factory=dict)  # epoch -> when its newest manifest came

    def close(self, epoch: int) -> None:
        """Everything up to this epoch is over."""
        self.epochs = {each: at for each, at in self.epochs.items() if each > epoch}
        self.manifests = {each: at for each, at in self.manifests.items() if each > epoch}


class OpenWrites:
    """The open writes of one staging topic: a fold of its facts."""

    def __init__(self) -> None:
        self.writes: dict[str, OpenWrite] = {}

    def take(self, fact: Fact, at_us: int) -> None:
        """Take the next fact, which was appended at `at_us`."""
        known = self.writes.setdefault(fact.write, OpenWrite(at_us))
        known.last_us = max(known.last_us, at_us)
        if isinstance(fact, Dropped):
            if fact.epoch not in known.manifests:
                known.epochs.pop(fact.epoch, None)
            return
        known.epochs.setdefault(fact.epoch, at_us)
        if isinstance(fact, Manifest):
            known.manifests[fact.epoch] = at_us

    def due(self, now_us: int) -> list[str]:
        """Writes with a manifest that is old enough to be looked after."""
        ripe_us = now_us - int(COMPLETE_AFTER_S * _SECOND)
        oldest = {write: min(known.manifests.values(), default=now_us) for write, known in self.writes.items()}
        return [write for write, at_us in oldest.items() if at_us <= ripe_us]

    def done(self, write: str, newest: Decision | None) -> None:
        """A write was looked after: its newest decision is done."""
        if newest is not None:
            self.writes[write].close(newest.epoch)

    def forget_silent(self, now_us: int) -> None:
        """Forget writes that are over, and those that were silent for too long."""
        oldest_us = now_us - int(SILENT_S * _SECOND)
        for write, known in list(self.writes.items()):
            if not known.epochs or known.last_us < oldest_us:
                del self.writes[write]

    def horizon_us(self, now_us: int) -> int:
        """Everything that was appended before this time is garbage."""
        began = [at for known in self.writes.values() for at in known.epochs.values()]
        if planted("sweep-drops-decided"):
            began = []
        return min([now_us, *began]) - int(_MARGIN_S * _SECOND)


async def look_after(ledger: Ledger, writes: OpenWrites, now_us: int, journal: Journal) -> list[str]:
    """Complete what was decided and is not done. Return the writes that were looked after; trouble is reported."""
    seen = []
    for write in writes.due(now_us):
        try:
            writes.done(write, await complete(ledger, write))
        except StagedGone as error:
            journal.warn("a decided write can't be completed", write=write, reason=error.message)
        except (EmbarcaderoError, TimeoutError) as error:
            journal.warn("can't complete a write yet", write=write, reason=str(error))
            continue
        seen.append(write)
    writes.forget_silent(now_us)
    return seen


class StagingSweep:
    """The sweep of one staging topic."""

    def __init__(self, log: Log, staging: Topic, target: str, journal: Journal) -> None:
        self._log, self._staging, self._target, self._journal = log, staging, target, journal
        self._next: dict[int, int] = {}  # lane -> the next index to read
        self._writes = OpenWrites()
        self._trimmed_us = 0

    async def round(self, now_us: int) -> None:
        """Read new facts, complete what is due, trim what no write needs."""
        await self._read()
        ledger = TopicLedger(self._log, await self._log.describe(self._target))
        seen = await look_after(ledger, self._writes, now_us, self._journal)
        if seen and not await self._settled():
            return  # a loss of memory now could bring an epoch back that is done
        horizon_us = self._writes.horizon_us(now_us)
        if horizon_us >= self._trimmed_us + int(_MARGIN_S * _SECOND):
            await self._log.trim(self._staging.name, before_time=datetime.fromtimestamp(horizon_us / _SECOND, UTC))
            self._trimmed_us = horizon_us

    async def _settled(self) -> bool:
        """Whether everything that is ordered in the target is durable."""
        tail = await self._log.tail(self._target)
        return tail.durable_index >= tail.index

    async def _read(self) -> None:
        tail = await self._log.tail(self._staging.name)
        for lane in tail.lanes:
            start = max(self._next.get(lane.lane, 0), lane.start_index)
            if start >= lane.durable_index:
                continue
            scan = self._log.scan(
                self._staging.name, lane=lane.lane, start=start, stop=lane.durable_index, partitions=[FACTS]
            )
            async for batches in scan:
                for batch in batches:
                    if not batch.count:
                        continue
                    try:
                        self._writes.take(decode_fact(batch), batch.append_us)
                    except Corrupt as error:
                        self._journal.warn("a staged fact can't be read", topic=self._staging.name, reason=str(error))
            self._next[lane.lane] = lane.durable_index


class Sweeper:
    """The sweep of all staging topics of a cluster."""

    def __init__(self, log: Log, journal: Journal, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._log, self._journal, self._now_us = log, journal, now_us
        self._sweeps: dict[int, StagingSweep] = {}

    async def round(self) -> int:
        """Sweep all staging topics once. Return how many there are; trouble with one is reported, others go on."""
        topics = await self._log.topics(hidden=True)
        targets = {id_text(topic.id): topic.name for topic in topics if not topic.hidden}
        staging = [topic for topic in topics if topic.name.startswith(STAGING_PREFIX)]
        for gone in self._sweeps.keys() - {topic.id for topic in staging}:
            del self._sweeps[gone]
        for topic in staging:
            target = targets.get(topic.name.removeprefix(STAGING_PREFIX))
            try:
                if target is None:
                    await self._log.delete_topic(topic.name, topic_id=topic.id)
                    continue
                sweep = self._sweeps.setdefault(topic.id, StagingSweep(self._log, topic, target, self._journal))
                await sweep.round(self._now_us())
            except (EmbarcaderoError, TimeoutError) as error:
                self._journal.warn("can't sweep", topic=topic.name, target=target, reason=str(error))
        return len(staging)


__all__ = ["COMPLETE_AFTER_S", "SILENT_S", "Begun", "OpenWrites", "Sweeper", "look_after"]
