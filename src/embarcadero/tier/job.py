"""The tier job: write durable spans to files, commit the files, publish the frontiers, trim the brokers.

Theory of operation. The table is the truth. One cycle has these steps: plan spans from the table's frontiers up to the
durable end; write them; commit them on top of exactly those frontiers; publish the new frontiers in the store; trim the
brokers beyond the hot retention, never above the frontier in the store; delete garbage. A job that dies at any point
leaves unnamed files, a table that is ahead of the store, or a missing trim. The next job begins by reading the table,
so no record is duplicated or missing. The lease only keeps two jobs from doing the same work.

An engine writes the files: the job's own process, the workers of Spark, or the suitable one of the two.

| engine | used by `up --tier` |
| --- | --- |
| spark | by default if PySpark and Java are installed |
| process | by default otherwise |
| auto | Spark when more than `TIER_SPARK_BYTES` of a topic wait, the process for small amounts |

A Spark session needs a GB beside the brokers: it starts with the first files to write, and ends after
`TIER_SPARK_IDLE_S` without files (spark/tiering.py).

`TierJobs` runs the jobs of several topics in turn, in one process: `up --tier` uses it. If a topic fails, the failure
is logged and retried later, and the other topics continue.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from threading import Event, Thread
from time import monotonic
from typing import Final, Protocol

import msgspec

from embarcadero.client.api.sync_log import Log
from embarcadero.client.results import TopicInfo
from embarcadero.env import Journal
from embarcadero.errors import (
    BadTable,
    Corrupt,
    Deposed,
    EmbarcaderoError,
    OutcomeUnknown,
    Refused,
    Retriable,
    TierUnavailable,
    Trimmed,
    UnknownSchema,
    UnknownTopic,
)
from embarcadero.limits import TIER_FILES_MAX, TIER_LEASE_S, TIER_ORPHANS_S, TIER_SPARK_BYTES
from embarcadero.tier.columns import records_schema
from embarcadero.tier.parquet import FileFacts, FileSpan, write_span
from embarcadero.tier.snapshots import LaneFrontiers, LoadedTable
from embarcadero.tier.storage import NAMESPACE, Storage, TierSettings
from embarcadero.tier.table import TierTable, collect_data, collect_metadata, drop_below, expire_snapshots, table_name
from embarcadero.types import LanePosition, Tail, Tier
from embarcadero.wire.schemas import TopicSchemas


class SpanWork(msgspec.Struct, frozen=True, kw_only=True):
    """A span to write to files."""

    topic: str
    span: FileSpan
    location: str
    epoch: int
    properties: dict[str, str]
    entries_location: str = ""  # of the table of control entries; empty: the topic's table has them
    waiting: int = 0  # approximate bytes of the topic's payloads that wait for tiering


def do_work(log: Log, work: SpanWork) -> FileFacts:
    """Read a span and write its files. The schema is fetched now, so it is as new as every batch of the span."""
    span, schemas = work.span, log.describe(work.topic).versions
    scan = log.scan(work.topic, lane=span.lane, start=span.start, stop=span.stop, control=True)
    storage = Storage(work.properties)
    return write_span(storage, work.location, span, work.epoch, schemas, scan, work.entries_location)


class EngineKind(StrEnum):
    """The values of `tier.engine`."""

    SPARK = "spark"
    PROCESS = "process"
    AUTO = "auto"


class Engine(Protocol):
    """Writes the files of spans."""

    @property
    def name(self) -> str:
        """The kind of engine that wrote last; before the first write, its own kind."""
        ...

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        """Write the files of all spans, in any order."""
        ...

    def release_idle(self) -> float | None:
        """Release idle memory; return the seconds until the next release is due, or None if there is nothing."""
        ...

    def close(self) -> None:
        """Release everything now."""
        ...


class ProcessEngine:
    """Writes files in this process, one by one."""

    def __init__(self, log: Log) -> None:
        self._log = log

    @property
    def name(self) -> str:
        return EngineKind.PROCESS

    def write(self, works: list[SpanWork]) -> Iterator[FileFacts]:
        for work in works:
            yield do_work(self._log, work)

    def release_idle(self) -> float | None:
        return None

    def close(self) -> None:
        return None


class AutoEngine:
    """Passes large amounts to one engine, and small amounts to another."""

    def __init__(self, large: Engine, small: Engine, limit_bytes: int = TIER_SPARK_BYTES) -> None:
        self._large, self._small, self._limit_bytes = large, small, limit_bytes
        self._last: Engine | None = None

    @property
    def name(self) -> str:
        return EngineKind.AUTO if self._last is None else self._last.name

    def write(self, works: list[SpanWork]) -> Iterable[FileFacts]:
        waiting = max((work.waiting for work in works), default=0)
        self._last = self._large if waiting > self._limit_bytes else self._small
        return self._last.write(works)

    def release_idle(self) -> float | None:
        return self._large.release_idle()

    def close(self) -> None:
        self._large.close()


# --- jobs -------------------------------------------------------------------------------------------------------------
STEPS: Final = (
    "open", "create", "repair", "plan", "write", "commit", "records", "advance", "trim", "drop", "collect",
)  # fmt: skip
"""The steps of a job, in this order; each is announced before it runs."""
_REST_S_MIN: Final = 0.1


@dataclass(frozen=True, slots=True)
class CyclePlan:
    """The plan of one cycle."""

    base: LoadedTable
    spans: list[FileSpan]
    waiting: int  # approximate bytes of payloads that wait for tiering, in these spans and later ones
    starts: dict[int, LanePosition]
    schemas: TopicSchemas

    def after(self) -> dict[int, LanePosition]:
        """Frontiers after the commit of all spans."""
        return self.base.frontiers | {span.lane: LanePosition(span.stop, span.stop_seq) for span in self.spans}


@dataclass(frozen=True, slots=True)
class Cycle:
    """The result of one cycle."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    frontiers: dict[int, LanePosition] = field(default_factory=dict)
    trimmed: dict[int, int] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    more: bool = False  # more durable records wait than one cycle handles


class TierJob:
    """Writes the table of one topic, in the epochs of one holder."""

    def __init__(
        self,
        log: Log,
        topic: str,
        settings: TierSettings,
        engine: Engine | None = None,
        *,
        holder: str,
    ) -> None:
        self._log, self.topic, self._settings, self._holder = log, topic, settings, holder
        self._engine = engine or ProcessEngine(log)
        self._table = TierTable(settings, table_name(topic))
        self._tier: Tier | None = None
        self._keeper: _Keeper | None = None
        self._swept_s = 0.0
        self._littered = True  # an attempt may have left unnamed files
        self._dropped: dict[int, LanePosition] = {}  # starts below which files were dropped

    @property
    def table(self) -> str:
        """The name of the table in its catalog."""
        return self._table.identifier

    # --- beginning and ending -----------------------------------------------------------------------------------------
    def step(self, name: str) -> None:
        """Called before each of STEPS. Does nothing; tests inject crashes and delays here."""

    def open(self, *, take_over: bool = False) -> Tier:
        """Begin an epoch, create the table if needed, and bring the store up to date with the table.

        `take_over`: take the lease from another holder; without it, raise TierBusy while another holder has the lease.
        """
        about = self._log.describe(self.topic)
        if about.tier is None:
            records_schema(about.versions)  # refuses a topic that no table can hold
        self._table = TierTable(self._settings, self._name(about))
        self.step("open")
        tier = self._log.open_tier(
            self.topic,
            self._holder,
            table_id=secrets.token_hex(8),
            warehouse=self._settings.warehouse,
            table=self._table.identifier,
            hot_retention_s=self._settings.hot_retention_s,
            take_over=take_over,
            properties=self._settings.properties,
            topic_id=about.id,
            engine=self._engine.name,
        )
        try:
            found = self._found(tier, about.versions)
            self.step("repair")
            self._tier = self._publish(tier, found)
        except EmbarcaderoError:
            with suppress(EmbarcaderoError):  # the lease expires anyway
                self._log.close_tier(self.topic, tier.epoch, topic_id=tier.topic_id)
            raise
        self._keeper = _Keeper(self._log, self.topic, tier)
        return self._tier

    def _found(self, tier: Tier, schemas: TopicSchemas) -> LoadedTable:
        """Load the topic's table, or create it for a new tier. BadTable if it is another table, or behind."""
        self._table = TierTable(self._settings, tier.table)
        found = self._table.load()
        if found is None:
            if tier.metadata:
                raise BadTable(
                    f"table {tier.table} of topic {self.topic!r} is not in the catalog",
                    f"check the catalog in tier.properties; the newest metadata file is {tier.metadata}",
                )
            self.step("create")
            found = self._table.create(self.topic, tier.id, schemas, tier.topic_id)
        self._check(found, tier)
        return found

    def _name(self, about: TopicInfo) -> str:
        """The name of the topic's table; for a new table, a name that no other topic's table has."""
        if about.tier is not None:
            return about.tier.table
        name = table_name(self.topic)
        free = TierTable(self._settings, name).is_free()
        return f"{NAMESPACE}.{name}" if free else f"{NAMESPACE}.{name}_{secrets.token_hex(4)}"

    def _check(self, found: LoadedTable, tier: Tier) -> None:
        if found.id != tier.id:
            raise BadTable(f"table {tier.table} does not belong to topic {self.topic!r}", "restore the right table")
        behind = [lane for lane, position in tier.frontiers.items() if found.frontiers.get(lane, (0, 0)) < position]
        if behind:
            raise BadTable(
                f"the catalog is behind: {tier.table} ends at {found.frontiers}, but {tier.frontiers} was committed",
                f"restore the catalog; the newest metadata file is {tier.metadata}",
            )

    def close(self) -> None:
        """Release the lease, so that another holder can begin immediately."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._tier is not None:
            self._log.close_tier(self.topic, self._tier.epoch, topic_id=self._tier.topic_id)

    def __enter__(self) -> TierJob:
        if self._tier is None:
            self.open()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except Retriable:
            return  # the lease expires anyway

    # --- one cycle ----------------------------------------------------------------------------------------------------
    def cycle(self) -> Cycle:
        """Tier records that are durable now, up to a number of files; trim and clean up.

        Raises Deposed if another job has taken over.
        """
        try:
            return self._cycle()
        except BaseException:
            self._littered = True
            raise

    def _cycle(self) -> Cycle:
        tier = self._mine()
        self.step("plan")
        plan = self._plan(tier)
        facts = self._write(plan, tier) if plan.spans else []
        done = Cycle(frontiers=plan.base.frontiers)
        committed = plan.base
        if files := [each for each in facts if each.written]:
            self.step("commit")
            self._mine()
            with self._still_mine(tier):
                committed = self._table.commit(
                    plan.base.frontiers, files, plan.after(), plan.starts, plan.schemas, tier.epoch, self.step
                )
            self.step("advance")
            tier = self._tier = self._publish(tier, committed)
            done = Cycle(
                files=sum(len(each.paths) for each in files),
                rows=sum(each.rows for each in files),
                bytes=sum(each.bytes for each in files),
                frontiers=committed.frontiers,
                more=len(plan.spans) >= TIER_FILES_MAX,
            )
        self.step("trim")
        trimmed = self._trim(tier, tier.frontiers)
        self._expire()
        self.step("drop")
        committed = self._drop(committed)
        self.step("collect")
        collected = self._collect(committed, bool(files)) if files or self._littered else []
        return Cycle(done.files, done.rows, done.bytes, done.frontiers, trimmed, collected, done.more)

    def _mine(self) -> Tier:
        if self._tier is None:
            raise Deposed("the tier job is not open", "call open() first")
        if self._keeper is not None:
            self._keeper.check()
        return self._tier

    @contextmanager
    def _still_mine(self, tier: Tier) -> Iterator[None]:
        """Convert a lost race: Deposed if another job has the tier, TierUnavailable if another program committed."""
        try:
            yield
        except Deposed as error:
            self._log.keep_tier(self.topic, tier.epoch, topic_id=tier.topic_id)
            raise TierUnavailable(f"another program changed the table: {error.message}", "try again") from error

    def _plan(self, tier: Tier) -> CyclePlan:
        """Plan spans from the table's frontiers to the durable end, each of about the size of a file."""
        base = self._table.load()
        if base is None:
            raise BadTable(f"table {tier.table} is missing in its catalog", "restore the catalog")
        self._check(base, tier)
        tail = self._log.tail(self.topic)
        about = self._log.describe(self.topic)  # after the tail: no batch below it has a newer schema
        starts, spans, waiting = base.starts | tier.starts, list[FileSpan](), 0
        for lane in tail.lanes or (tail,):
            begin = max(base.frontier(lane.lane), LanePosition(lane.hot_index, lane.hot_seq))
            starts.setdefault(lane.lane, begin)
            found, size = self._cut(lane, begin, TIER_FILES_MAX - len(spans))
            spans, waiting = spans + found, waiting + size
        return CyclePlan(base, spans, waiting, starts, about.versions)

    def _cut(self, lane: Tail, begin: LanePosition, most: int) -> tuple[list[FileSpan], int]:
        """The next spans of a lane, and the bytes that wait in the whole lane."""
        (start, start_seq), spans = begin, list[FileSpan]()
        if start >= lane.durable_index or most <= 0:
            return [], 0
        cuts = self._log.measure(self.topic, start, lane.durable_index, self._settings.file_bytes, lane=lane.lane)
        for cut in cuts[:most]:
            spans.append(FileSpan(lane=lane.lane, start=start, stop=cut.index, start_seq=start_seq, stop_seq=cut.seq))
            start, start_seq = cut.index, cut.seq
        return spans, sum(cut.bytes for cut in cuts)

    def _write(self, plan: CyclePlan, tier: Tier) -> list[FileFacts]:
        location, entries = plan.base.table.location(), plan.base.entries_location
        works = [
            SpanWork(
                topic=self.topic,
                span=span,
                location=location,
                epoch=tier.epoch,
                properties=self._settings.properties,
                entries_location=entries,
                waiting=plan.waiting,
            )
            for span in plan.spans
        ]
        facts: list[FileFacts] = []
        self.step("write")
        for each in self._engine.write(works):
            facts.append(each)
            self.step("write")
        return checked_facts(plan.spans, facts)

    def _publish(self, tier: Tier, found: LoadedTable) -> Tier:
        if found.frontiers == tier.frontiers and found.metadata == tier.metadata:
            return tier
        return self._log.advance_tier(
            self.topic,
            tier.epoch,
            metadata=found.metadata,
            frontiers=found.frontiers,
            starts=found.starts,
            topic_id=tier.topic_id,
            engine=self._engine.name,
        )

    # --- afterwards ---------------------------------------------------------------------------------------------------
    def _trim(self, tier: Tier, upto: LaneFrontiers) -> dict[int, int]:
        """Trim brokers: remove records in the table that are older than the hot retention. Returns the new starts."""
        cutoff = datetime.now(UTC) - timedelta(seconds=tier.hot_retention_s)
        trimmed: dict[int, int] = {}
        tail = self._log.tail(self.topic)
        for lane in tail.lanes or (tail,):
            index = upto.get(lane.lane, (0, 0))[0]
            if tier.hot_retention_s:
                try:
                    index = min(index, self._log.position_at(self.topic, cutoff, lane=lane.lane).index)
                except Trimmed:
                    continue
            if index > lane.hot_index:
                self._log.trim(self.topic, before_index=index, lane=lane.lane, cold=False)
                trimmed[lane.lane] = index
        return trimmed

    def _expire(self) -> None:
        """Apply the topic's retention by age, which is for all readers: it also moves the start of the table."""
        about = self._log.describe(self.topic)
        if about.retention_s and about.tier is not None and about.tier.frontiers:
            self._log.trim(self.topic, before_time=datetime.now(UTC) - timedelta(seconds=about.retention_s))

    def _drop(self, committed: LoadedTable) -> LoadedTable:
        """Drop files below the start, expire old snapshots, and publish the new metadata file in the store."""
        tier = self._tier = self._log.describe(self.topic).tier or self._mine()
        kept = committed
        if tier.starts != self._dropped:
            with self._still_mine(tier):
                kept = drop_below(self._table, committed, tier.starts, tier.epoch)
            self._dropped = tier.starts
        with self._still_mine(tier):
            kept = expire_snapshots(self._table, kept)
        if kept is not committed:
            self._littered = True
            self._tier = self._publish(tier, kept)
        return kept

    def _collect(self, committed: LoadedTable, ours: bool) -> list[str]:
        """Collect garbage after failures, and otherwise rarely: listing a large table is slow.

        Metadata is collected only after a commit of this job: no process can commit files written before that commit.
        """
        due = time.time() - self._swept_s > TIER_ORPHANS_S
        gone = collect_data(self._table) if due or self._littered else []
        self._littered = False
        if due and ours:
            self._swept_s = time.time()
            gone += collect_metadata(self._table, committed, self._swept_s)
        return gone

    # --- many cycles --------------------------------------------------------------------------------------------------
    def follow(self, stop: Event, report: Callable[[Cycle], None] = lambda _cycle: None) -> None:
        """Run cycles until `stop`, and retry after temporary errors. Raises Deposed and permanent errors."""
        while not stop.is_set():
            try:
                done = self.cycle()
            except (Retriable, OutcomeUnknown, Trimmed, UnknownSchema):  # the next cycle plans a changed span again
                stop.wait(min(self._settings.interval_s, _RETRY_S))
                continue
            report(done)
            if not done.more:
                stop.wait(self._settings.interval_s)

    def run_once(self) -> list[Cycle]:
        """Run cycles until the table has every record that was durable at the start of the last cycle."""
        done = [self.cycle()]
        while done[-1].more:
            done.append(self.cycle())
        return done


_RETRY_S: Final = 5.0


def checked_facts(spans: Sequence[FileSpan], facts: Sequence[FileFacts]) -> list[FileFacts]:
    """Return the facts in the order of their spans. Corrupt if a span was written twice, or not at all."""
    by_span = {each.span: each for each in facts}
    if len(by_span) != len(facts) or by_span.keys() != set(spans):
        raise Corrupt(f"{len(facts)} files were written for {len(spans)} spans", "report it: this is a bug")
    return [by_span[span] for span in spans]


class _Keeper:
    """Renews the lease while workers are busy, so that no other job takes over."""

    def __init__(self, log: Log, topic: str, tier: Tier) -> None:
        self._log, self._topic, self._tier = log, topic, tier
        self._stop, self._deposed = Event(), Event()
        self._thread = Thread(target=self._keep, name=f"tier-{topic}", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stop.wait(TIER_LEASE_S / 4):
            try:
                self._log.keep_tier(self._topic, self._tier.epoch, topic_id=self._tier.topic_id)
            except Refused:
                self._deposed.set()
                return
            except EmbarcaderoError:
                continue

    def check(self) -> None:
        """Raise Deposed if the lease is lost."""
        if self._deposed.is_set():
            raise Deposed(f"another job tiers topic {self._topic!r}", "stop, or open the tier again")

    def stop(self) -> None:
        """Stop renewing the lease."""
        self._stop.set()
        self._thread.join(timeout=1.0)


class TierJobs:
    """The jobs of one holder: for the topics in the settings, or for all topics with replicas, including new ones."""

    def __init__(
        self,
        log: Log,
        settings: TierSettings,
        journal: Journal,
        *,
        holder: str,
        engine: Engine | None = None,
    ) -> None:
        self._log, self._settings, self._journal, self._holder = log, settings, journal, holder
        self._engine = engine or ProcessEngine(log)
        self._jobs: dict[str, TierJob] = {}

    def follow(self, stop: Event) -> None:
        """Run cycles until `stop`; then release the leases, so that another holder can begin."""
        try:
            while not stop.is_set():
                if not self.look(stop):
                    self._rest(stop)
        finally:
            for topic in list(self._jobs):
                self._leave(topic)
            self._engine.close()

    def _rest(self, stop: Event) -> None:
        """Wait until the next cycle is due; meanwhile the engine may release idle resources."""
        until = monotonic() + self._settings.interval_s
        while not stop.is_set() and (rest_s := until - monotonic()) > 0:
            due_s = self._engine.release_idle()
            stop.wait(rest_s if due_s is None else min(rest_s, max(due_s, _REST_S_MIN)))

    def look(self, stop: Event) -> bool:
        """Run one cycle of each topic. True if there is more to do immediately."""
        try:
            wanted = self._wanted()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't list topics", reason=str(error))
            return False
        for topic in self._jobs.keys() - set(wanted):
            self._leave(topic)
        more = [self._cycle(topic) for topic in wanted if not stop.is_set()]
        return any(more)

    def _wanted(self) -> list[str]:
        return list(self._settings.topics) or [topic.name for topic in self._log.topics() if topic.replicas]

    def _cycle(self, topic: str) -> bool:
        try:
            if topic not in self._jobs:
                job = TierJob(self._log, topic, self._settings, self._engine, holder=self._holder)
                tier = job.open()
                self._jobs[topic] = job
                self._journal.note("tiers", topic=topic, table=tier.table, epoch=tier.epoch, engine=self._engine.name)
            done = self._jobs[topic].cycle()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't tier", topic=topic, reason=str(error))
            if not isinstance(error, UnknownTopic):
                self._leave(topic)
            self._jobs.pop(topic, None)
            return False
        self.report(topic, done)
        return done.more

    def report(self, topic: str, done: Cycle) -> None:
        """Log the result of a cycle that wrote files."""
        if done.files:
            self._journal.note(
                "tiered", topic=topic, files=done.files, rows=done.rows, bytes=done.bytes, engine=self._engine.name
            )

    def _leave(self, topic: str) -> None:
        job = self._jobs.pop(topic, None)
        if job is None:
            return
        try:
            job.close()
        except (EmbarcaderoError, TimeoutError) as error:
            self._journal.warn("can't leave", topic=topic, reason=str(error))  # the lease expires anyway
