"""The sweep: it completes decisions whose committer died, and trims staged batches that no write needs any more.

It reads the facts of every staging topic (`OpenWrites`). It completes an epoch when its decision and its published
batches have not moved for COMPLETE_AFTER_S; while they move, a committer is at work. Staging topics are trimmed by
time: batches that were appended before the oldest open write began are garbage. A decided write is never forgotten
before it is done.

A staging topic whose target is deleted is deleted, too, and so are the facts of its jobs (`spark/jobs.py`). The sweep
keeps nothing on disk: when it starts, it reads the facts from the beginning.

`OpenWrites` folds facts in any order. It reads one lane after the other, so facts do not arrive in the order in which
they were appended. A later task may appear first, and a failure before the work that failed. Each fact therefore names
its attempt, and the earliest and the latest times count.

An attempt is open from its first fact until its epoch or a later one is done, or until it was dropped before it had a
manifest. An attempt with a manifest may be decided, so a drop does not end it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

from embarcadero.client.api.aio_calls import HeldName
from embarcadero.client.api.aio_log import Log
from embarcadero.env import Journal
from embarcadero.errors import Corrupt, EmbarcaderoError, StagedGone
from embarcadero.limits import STAGED_SILENT_S
from embarcadero.staging.commit import Ledger, complete, is_done
from embarcadero.staging.ledger import TopicLedger
from embarcadero.staging.manifest import FACTS, Decision, Dropped, Fact, Manifest, decode_fact
from embarcadero.types import JOBS_PREFIX, STAGING_PREFIX, Topic, id_text

COMPLETE_AFTER_S: Final = 30.0
"""A decided epoch without progress for this long is completed: its committer has had time to continue."""

SILENT_S: Final = STAGED_SILENT_S
"""A write without a fact for this long is forgotten, and its staged batches are trimmed."""

_MARGIN_S: Final = 60.0  # clocks of brokers may differ: keep batches appended this shortly before a write began
_OVER_S: Final = 3_600.0  # remember a finished write for this long: a fact of it may arrive late
_SECOND: Final = 1_000_000
_TRIM_EVERY_S: Final = 60.0
_AT_ONCE: Final = 8  # staging topics swept in parallel, so that one with a problem does not delay the others


@dataclass(slots=True)
class Attempt:
    """State of one attempt, from its facts. Times are those at which facts were appended, in microseconds."""

    began_us: int
    manifest_us: int | None = None  # of its newest manifest
    dropped: bool = False

    @property
    def open(self) -> bool:
        """Whether its staged batches may still be needed."""
        return not self.dropped or self.manifest_us is not None

    def take(self, fact: Fact, at_us: int) -> None:
        """Add a fact that was appended at `at_us`."""
        self.began_us = min(self.began_us, at_us)
        if isinstance(fact, Dropped):
            self.dropped = True
        elif isinstance(fact, Manifest):
            self.manifest_us = max(at_us, self.manifest_us or 0)


class WriteProgress(NamedTuple):
    """Progress of a write: its newest decision, and the next sequence that its batches get."""

    decision: int
    published: int


@dataclass(slots=True)
class OpenWrite:
    """Known state of one write."""

    last_us: int  # when its newest fact was appended
    attempts: dict[tuple[int, str], Attempt] = field(default_factory=dict)  # by epoch and attempt
    over: int = -1  # this epoch and all before it are done
    progress: WriteProgress | None = None  # as of the last look
    since_us: int = 0  # when this progress was first seen
    trouble: str = ""  # the last problem that was reported

    @property
    def open(self) -> bool:
        """Whether its staged batches may still be needed."""
        return any(attempt.open for attempt in self.attempts.values())

    @property
    def manifests(self) -> list[int]:
        """Times of the newest manifests of its attempts."""
        return [attempt.manifest_us for attempt in self.attempts.values() if attempt.manifest_us is not None]

    def take(self, fact: Fact, at_us: int) -> None:
        """Add a fact that was appended at `at_us`."""
        self.last_us = max(self.last_us, at_us)
        if fact.epoch > self.over:
            self.attempts.setdefault((fact.epoch, fact.attempt), Attempt(at_us)).take(fact, at_us)

    def stands_still(self, progress: WriteProgress, now_us: int) -> bool:
        """Record the progress of the newest decision. Return whether it has not changed for COMPLETE_AFTER_S."""
        if self.progress != progress:
            self.since_us = min(self.manifests) if self.progress is None else now_us
            self.progress = progress
        return now_us - self.since_us >= int(COMPLETE_AFTER_S * _SECOND)

    def done(self, epoch: int) -> None:
        """Record that an epoch is done, and so are all before it."""
        self.over = max(self.over, epoch)
        self.attempts = {key: attempt for key, attempt in self.attempts.items() if key[0] > self.over}

    def is_new_trouble(self, reason: str) -> bool:
        """Record a problem. Return whether it differs from the last one."""
        known, self.trouble = self.trouble, reason
        return known != reason


class OpenWrites:
    """The open writes of one staging topic."""

    def __init__(self) -> None:
        self.writes: dict[str, OpenWrite] = {}

    def take(self, fact: Fact, at_us: int) -> None:
        """Add a fact that was appended at `at_us`."""
        self.writes.setdefault(fact.write, OpenWrite(at_us)).take(fact, at_us)

    def with_manifests(self) -> list[str]:
        """Return writes that may be decided, and not done."""
        return [write for write, known in self.writes.items() if known.manifests]

    def stands_still(self, write: str, decided: HeldName, data: HeldName, now_us: int) -> bool:
        """Record the progress of a write's newest decision. Return whether it is unchanged for COMPLETE_AFTER_S."""
        return self.writes[write].stands_still(WriteProgress(decided.expected, data.expected), now_us)

    def done(self, write: str, epoch: int) -> None:
        """Record that an epoch of a write is done, and so are all before it."""
        self.writes[write].done(epoch)

    def forget(self, now_us: int, needed: set[str]) -> None:
        """Forget finished writes, and those without facts for too long that are not `needed`."""
        for write, known in list(self.writes.items()):
            silent_s = SILENT_S if known.open else _OVER_S
            if write not in needed and known.last_us < now_us - int(silent_s * _SECOND):
                del self.writes[write]

    def horizon_us(self, now_us: int) -> int:
        """Return the time before which everything that was appended is garbage."""
        attempts = [attempt for known in self.writes.values() for attempt in known.attempts.values()]
        began = [attempt.began_us for attempt in attempts if attempt.open]
        return min([now_us, *began]) - int(_MARGIN_S * _SECOND)


async def look_after(ledger: Ledger, writes: OpenWrites, now_us: int, journal: Journal) -> bool:
    """Complete decisions without progress. Return whether an epoch was found done; problems are reported."""
    found, needed = False, set[str]()
    for write in writes.with_manifests():
        try:
            decided, data = await ledger.held(write)
            newest = Decision.of(decided.expected)
            if not newest.digest:
                continue  # an attempt has a manifest, but it was not decided
            if not is_done(newest, data):
                needed.add(write)
                if not writes.stands_still(write, decided, data, now_us):
                    continue
                await complete(ledger, write)
            writes.done(write, newest.epoch)
            needed.discard(write)
            found = True
        except (EmbarcaderoError, TimeoutError) as error:
            gone = isinstance(error, StagedGone)
            (needed.discard if gone else needed.add)(write)
            _report(writes, write, gone, str(error), journal)
    writes.forget(now_us, needed)
    return found


def _report(writes: OpenWrites, write: str, gone: bool, reason: str, journal: Journal) -> None:
    """Report a problem of a write once."""
    if writes.writes[write].is_new_trouble(reason):
        if gone:
            journal.warn("a decided write can't be completed", write=write, reason=reason)
        else:
            journal.warn("can't complete a write yet", write=write, reason=reason)


class StagingSweep:
    """The sweep of one staging topic."""

    def __init__(self, log: Log, staging: Topic, target: str, journal: Journal) -> None:
        self._log, self._staging, self._target, self._journal = log, staging, target, journal
        self._next: dict[int, int] = {}  # lane -> the next index to read
        self._writes = OpenWrites()
        self._empty = False  # whether nothing was staged at the last look
        self._unsettled = False  # whether an epoch was found done that may not be durable yet
        self._trimmed_us = 0

    async def round(self, now_us: int) -> None:
        """Read new facts, complete epochs without progress, trim batches that no write needs."""
        await self._read()
        ledger = TopicLedger(self._log, await self._log.describe(self._target))
        self._unsettled |= await look_after(ledger, self._writes, now_us, self._journal)
        if self._unsettled and not await self._settled():
            return  # a loss of memory now could undo an epoch that is done
        self._unsettled = False
        horizon_us = self._writes.horizon_us(now_us)
        if not self._empty and horizon_us >= self._trimmed_us + int(_TRIM_EVERY_S * _SECOND):
            await self._log.trim(self._staging.name, before_time=datetime.fromtimestamp(horizon_us / _SECOND, UTC))
            self._trimmed_us = horizon_us

    async def _settled(self) -> bool:
        """Whether everything ordered in the target is durable."""
        tail = await self._log.tail(self._target)
        return tail.durable_index >= tail.index

    async def _read(self) -> None:
        tail = await self._log.tail(self._staging.name)
        self._empty = all(lane.start_index >= lane.index for lane in tail.lanes)
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


class StagingSweeper:
    """The sweep of all staging topics of a cluster."""

    def __init__(self, log: Log, journal: Journal, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._log, self._journal, self._now_us = log, journal, now_us
        self._sweeps: dict[int, StagingSweep] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def round(self) -> int:
        """Sweep all staging topics once. Return their number. A problem with one is reported; the others continue."""
        topics = await self._log.topics(hidden=True)
        staging = [topic for topic in topics if topic.name.startswith(STAGING_PREFIX)]
        targets = {id_text(topic.id): topic.name for topic in topics if topic not in staging}
        for gone in self._sweeps.keys() - {topic.id for topic in staging}:
            del self._sweeps[gone]
        for topic in topics:
            if topic.name.startswith(JOBS_PREFIX) and topic.name.removeprefix(JOBS_PREFIX) not in targets:
                await self._delete(topic)
        await asyncio.gather(
            *(self._sweep(topic, targets.get(topic.name.removeprefix(STAGING_PREFIX))) for topic in staging)
        )
        return len(staging)

    async def _delete(self, topic: Topic) -> None:
        """Delete a topic whose target is deleted; a problem is reported, and the next round tries again."""
        try:
            await self._log.delete_topic(topic.name, topic_id=topic.id)
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't delete the facts of jobs", topic=topic.name, reason=str(error))

    async def _sweep(self, topic: Topic, target: str | None) -> None:
        async with self._turns:
            try:
                if target is None:
                    await self._log.delete_topic(topic.name, topic_id=topic.id)
                    return
                sweep = self._sweeps.setdefault(topic.id, StagingSweep(self._log, topic, target, self._journal))
                await sweep.round(self._now_us())
            except (EmbarcaderoError, TimeoutError) as error:
                self._journal.warn("can't sweep", topic=topic.name, target=target, reason=str(error))
