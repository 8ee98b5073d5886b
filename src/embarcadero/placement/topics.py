"""Topics in the directory, and their readers; the limits of a topic's settings, and which settings may change.

A topic has a lane of its own, and if it has replicas, it has ranges from the start. Positions of readers are stored
only for people to see; nothing depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Final, NamedTuple

import msgspec

from embarcadero.env import Ids
from embarcadero.errors import Backpressure, BadName, BadSchema, BadValue, TooMany, TopicExists, UnknownTopic
from embarcadero.limits import (
    BROKER_LANES_FIRST,
    COPIES_DEFAULT,
    COPIES_MAX,
    GAP_TIMEOUT_FENCE_MS,
    GAP_TIMEOUT_MS_MAX,
    GAP_TIMEOUT_SKIP_MS,
    LANES_MAX,
    PARTITIONS_MAX,
    READER_KEPT_S,
    READERS_PER_TOPIC_MAX,
    RETENTION_BYTES_MAX,
    RETENTION_S_MAX,
    SESSION_TTL_S,
    SESSION_TTL_S_MAX,
    TOPIC_NAME_CHARS_MAX,
)
from embarcadero.orders import parse_order
from embarcadero.placement.members import ReplicaMembers
from embarcadero.placement.ranges import begin_chain, drop_trimmed_of_broker, forget_lane
from embarcadero.placement.records import (
    TRIES_MAX,
    ClusterRecord,
    Decider,
    DecisionPlan,
    LaneStart,
    ReaderNote,
    Retired,
    check_id,
    decode,
    reader_key,
    readers_prefix,
    tier_key,
    tierer_key,
    trim_key,
)
from embarcadero.placement.tiers import trim_table
from embarcadero.types import (
    CRC32C,
    HIDDEN_PREFIX,
    JOBS_PREFIX,
    PARTITIONERS,
    ROUTED_TOPIC,
    STAGING_PREFIX,
    OnGap,
    Order,
    ReplicaRef,
    Tier,
    Topic,
    TopicLane,
)
from embarcadero.wire.messages import AlterTopic

_NAMES_SHOWN: Final = 5
"""Number of existing topics that an error lists."""


def next_lane(first: int, taken: AbstractSet[int]) -> int:
    """Find the first lane from `first` on, cyclically, that is not taken. Free lanes are counted elsewhere."""
    lanes = ((first + offset) % LANES_MAX for offset in range(LANES_MAX))
    return next((lane for lane in lanes if lane not in taken), first)


def _too_few_live(wanted: str, live: int) -> BadValue:
    """Make the error for a topic that asks for more replicas than may get ranges now."""
    fewer = f", or ask for {live} or fewer" if live else ""
    return BadValue(
        f"{wanted}, and {live} are live and not drained",
        f"start the replicas that are down, or `embarcadero replica add`{fewer}",
    )


class Topics:
    """Topics. Each has a lane of its own, a schema if it is typed, and an id that is never reused."""

    def __init__(self, decider: Decider, replicas: ReplicaMembers, topics_max: int, ids: Ids) -> None:
        self._decider, self._replicas = decider, replicas
        self._topics_max, self._ids = topics_max, ids

    def create(
        self,
        name: str,
        order: int = Order.TOTAL,
        partitions: int = 1,
        replicas: int | None = None,
        durable_on: int | None = None,
        on_gap: str = OnGap.FENCE.value,
        gap_timeout_ms: int | None = None,
        session_ttl_s: int | None = None,
        columns: bytes = b"",
        retention_bytes: int = 0,
        retention_s: int = 0,
        partitioner: str = CRC32C,
        key: str = "",
        created_us: int = 0,
    ) -> Topic:
        """Create a topic on a lane of its own. `columns` is its schema, if it has one.

        `partitioner` maps keys to partitions; `key` names the column of the schema with the keys. `replicas=None` means
        as many as are live, up to COPIES_DEFAULT; `durable_on=None` means the majority of them. With replicas, the lane
        of a topic of order 2 or 5 has its first range from the start.
        """
        schema = first_version(columns, key)
        check_partitioner(partitioner)

        def plan_it(plan: DecisionPlan) -> Topic:
            cluster = plan.cluster()
            copies = checked_copies(replicas, durable_on, self._replicas.live_count())
            topic = new_topic(
                name,
                self._free_lane(cluster),
                order,
                partitions,
                copies,
                on_gap,
                gap_timeout_ms,
                session_ttl_s,
                checked_retention(retention_bytes, retention_s),
            )
            if plan.read(f"topics/{name}", Topic):
                raise TopicExists(f"topic {name!r} exists", "use it, or choose another name")
            self._check_limits(cluster)
            self._count_lane(plan, cluster, topic.lane)
            topic = msgspec.structs.replace(
                topic, id=self._ids(), partitioner=partitioner, key=key, created_us=created_us
            )
            if schema.widths:
                topic = msgspec.structs.replace(topic, schema_version=len(schema.widths))
                plan.put(f"schemas/{name}", schema)
            plan.put(f"topics/{name}", topic)
            if topic.replicas:
                chosen = self._all_wanted(plan, topic)
                if topic.order > Order.BROKER:
                    begin_chain(plan, topic, topic.lane, chosen)
            return topic

        return self._decider.decide(plan_it)

    def alter(self, ask: AlterTopic) -> Topic:
        """Change a topic. Raises BadValue or BadSchema, with the reason, for a change that is not possible.

        A change of the number of copies is refused while fewer replicas are live than make a record durable, because
        the next range could not open. An increase is refused until enough replicas for all copies are live.
        """

        def plan_it(plan: DecisionPlan) -> Topic:
            topic = plan.read(f"topics/{ask.name}", Topic)
            if topic is None:
                raise self._unknown(ask.name)
            check_id(topic, ask.topic_id)
            changed = altered(topic, ask)
            if changed.replicas > topic.replicas:
                self._all_wanted(plan, changed)
            elif (changed.replicas, changed.durable_on) != (topic.replicas, topic.durable_on):
                self._enough_live(plan, changed)
            if ask.columns:
                known = plan.read(f"schemas/{ask.name}", SchemaHistory) or SchemaHistory()
                schema = next_version(known, ask.columns)
                changed = msgspec.structs.replace(changed, schema_version=len(schema.widths))
                if schema is not known:
                    plan.put(f"schemas/{ask.name}", schema)
            if changed != topic:
                plan.put(f"topics/{ask.name}", changed)
            return changed

        return self._decider.decide(plan_it)

    def described(self, name: str) -> tuple[Topic, SchemaHistory]:
        """Read a topic and its schema, as of one moment."""
        for _ in range(TRIES_MAX):
            topic, schema = self.get(name), self._decider.one(f"schemas/{name}", SchemaHistory) or SchemaHistory()
            if len(schema.widths) == topic.schema_version:
                return topic, schema
        raise Backpressure(f"topic {name!r} changed during {TRIES_MAX} attempts to read it", "try again")

    def all(self) -> list[Topic]:
        """All topics, by name."""
        return self._decider.all("topics/", Topic)

    def get(self, name: str) -> Topic:
        """Read one topic. Raises UnknownTopic."""
        if (found := self._decider.one(f"topics/{name}", Topic)) is None:
            raise self._unknown(name)
        return found

    def delete(self, name: str, topic_id: int = 0) -> None:
        """Delete a topic. Its lane is not used again in this generation.

        Raises UnknownTopic. Raises TopicReplaced if the topic of this name has another id than `topic_id` (0: any).
        """

        def plan_it(plan: DecisionPlan) -> None:
            if (topic := plan.read(f"topics/{name}", Topic)) is None:
                raise self._unknown(name)
            check_id(topic, topic_id)
            plan.delete(f"topics/{name}")
            plan.delete(f"schemas/{name}")
            forget_readers(plan, name)
            plan.delete(tier_key(name))
            plan.delete(tierer_key(name))
            forget_lane(plan, topic.lane)
            for key, lane in plan.list(f"lanes/{topic.lane:05}/", TopicLane):
                plan.delete(key)
                forget_lane(plan, lane.lane)

        self._decider.decide(plan_it)

    def trim(
        self, name: str, lane: int, index: int, *, seq: int | None = None, cold: bool = True, topic_id: int = 0
    ) -> int:
        """Start a lane of a topic at `index`, whose first record is `seq`. A lower start changes nothing.

        In a topic with a table the lane starts there for all readers. Without `cold`, only records in the table are
        trimmed, and only from brokers and replicas. Returns the start of the brokers' part. Ranges below it are
        forgotten. For lanes with sessions this happens later, when replicas have a checkpoint of the sessions.
        """

        def plan_it(plan: DecisionPlan) -> int:
            if (topic := plan.read(f"topics/{name}", Topic)) is None:
                raise self._unknown(name)
            check_id(topic, topic_id)
            before = plan.read(trim_key(lane), LaneStart) or LaneStart(0)
            wanted = trim_table(plan, name, lane, index, seq, cold)
            if wanted > before.index:
                plan.put(trim_key(lane), LaneStart(wanted))
            start = max(wanted, before.index)
            if lane >= BROKER_LANES_FIRST:
                drop_trimmed_of_broker(plan, topic, lane, start)
            return start

        return self._decider.decide(plan_it)

    def give_ids(self) -> None:
        """Give an id to each topic that an earlier version made without one."""
        if any(topic.id == 0 for topic in self.all()):
            self._decider.decide(self.all_with_ids)

    def all_with_ids(self, plan: DecisionPlan) -> list[Topic]:
        """Read all topics. Topics without an id, and their tables, get one."""
        topics = [topic for _, topic in plan.list("topics/", Topic)]
        return [topic if topic.id else self._identified(plan, topic) for topic in topics]

    def _identified(self, plan: DecisionPlan, topic: Topic) -> Topic:
        identified = msgspec.structs.replace(topic, id=self._ids(), had_no_id=True)
        plan.put(f"topics/{topic.name}", identified)
        if (tier := plan.read(tier_key(topic.name), Tier)) is not None:
            plan.put(tier_key(topic.name), msgspec.structs.replace(tier, topic_id=identified.id))
        return identified

    def trims(self) -> dict[int, int]:
        """Trimmed lanes, and their starts."""
        found = ((item.key, decode(item.key, item.value, LaneStart)) for item in self._decider.store.list("trims/"))
        return {int(key.removeprefix("trims/")): trim.index for key, trim in found}

    # --- inside -------------------------------------------------------------------------------------------------------
    def _free_lane(self, cluster: ClusterRecord) -> int:
        """Find the next lane that no topic has, or had in this generation."""
        taken = {topic.lane for topic in self.all()}
        for item in self._decider.store.list("retired/"):  # after the topics: one deleted just now is found here
            if decode(item.key, item.value, Retired).generation == cluster.generation:
                taken.add(int(item.key.removeprefix("retired/")))
        return next_lane(cluster.next_lane, taken)

    def _count_lane(self, plan: DecisionPlan, cluster: ClusterRecord, lane: int) -> None:
        after = (lane + 1) % LANES_MAX
        plan.put("cluster", msgspec.structs.replace(cluster, next_lane=after, lanes_left=cluster.lanes_left - 1))

    def _check_limits(self, cluster: ClusterRecord) -> None:
        if len(self._decider.store.list("topics/")) >= self._topics_max:
            raise TooMany(f"the cluster has the maximum of {self._topics_max} topics", "delete topics you do not need")
        if cluster.lanes_left <= 0:
            raise TooMany(
                f"all {LANES_MAX} lanes were used (lanes of deleted topics count until a restart)",
                "restart the cluster: then lanes of deleted topics are free again",
            )

    def _all_wanted(self, plan: DecisionPlan, topic: Topic) -> list[ReplicaRef]:
        chosen = self._replicas.pick(plan, topic.replicas)
        if len(chosen) < topic.replicas:
            raise _too_few_live(f"topic {topic.name!r} needs {topic.replicas} replicas", len(chosen))
        return chosen

    def _enough_live(self, plan: DecisionPlan, topic: Topic) -> None:
        if (live := len(self._replicas.pick(plan, topic.durable_on))) < topic.durable_on:
            raise _too_few_live(f"topic {topic.name!r} must be durable on {topic.durable_on} replicas", live)

    def _unknown(self, name: str) -> UnknownTopic:
        names = [topic.name for topic in self.all() if not topic.hidden]
        if not names:
            return UnknownTopic(f"there is no topic {name!r}", "create it first: there is no topic yet")
        close = get_close_matches(name, names, 1)
        shown = ", ".join(names[:_NAMES_SHOWN])
        if (more := len(names) - _NAMES_SHOWN) > 0:
            shown += f", and {more} more: `embarcadero topic list` lists them all"
        asked = f"did you mean {close[0]}? " if close else ""
        return UnknownTopic(f"there is no topic {name!r}", f"{asked}existing topics: {shown}")


# --- readers ----------------------------------------------------------------------------------------------------------
class Readers:
    """Positions of readers, for people to see. Their number is bounded, and they are forgotten after a day."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def note(self, notes: Mapping[tuple[str, str], ReaderNote], now_us: int) -> None:
        """Store reports of readers, by topic and reader. Reports for deleted topics, and old ones, are dropped."""

        def plan_it(plan: DecisionPlan) -> None:
            for topic in {topic for topic, _ in notes}:
                if (found := plan.read(f"topics/{topic}", Topic)) is not None:
                    new = {reader: note for (of, reader), note in notes.items() if of == topic}
                    new = {reader: note for reader, note in new.items() if note.topic_id in (0, found.id)}
                    self._keep(plan, topic, new, now_us)

        self._decider.decide(plan_it)

    def _keep(self, plan: DecisionPlan, topic: str, new: Mapping[str, ReaderNote], now_us: int) -> None:
        for reader, note in new.items():
            plan.put(reader_key(topic, reader), note)
        others = [note for note in self._notes(topic) if note.reader not in new]
        fresh = [note for note in others if now_us - note.at_us < READER_KEPT_S * 1_000_000]
        fresh.sort(key=lambda note: note.at_us, reverse=True)
        kept = {note.reader for note in fresh[: max(0, READERS_PER_TOPIC_MAX - len(new))]}
        for note in others:
            if note.reader not in kept:
                plan.delete(reader_key(topic, note.reader))

    def of(self, topic: str, now_us: int) -> list[ReaderNote]:
        """Reports from readers of a topic within the last day, newest first."""
        fresh = [note for note in self._notes(topic) if now_us - note.at_us < READER_KEPT_S * 1_000_000]
        return sorted(fresh, key=lambda note: note.at_us, reverse=True)

    def remove(self, topic: str, reader: str) -> bool:
        """Forget a reader's report. True if there was one."""
        known = [False]

        def plan_it(plan: DecisionPlan) -> None:
            known[0] = plan.read(reader_key(topic, reader), ReaderNote) is not None
            if known[0]:
                plan.delete(reader_key(topic, reader))

        self._decider.decide(plan_it)
        return known[0]

    def _notes(self, topic: str) -> list[ReaderNote]:
        return self._decider.all(readers_prefix(topic), ReaderNote)


def forget_readers(plan: DecisionPlan, topic: str) -> None:
    """Forget the readers of a topic that is deleted, or has lost all its records."""
    for key in plan.keys(readers_prefix(topic)):
        plan.delete(key)


# --- settings of a topic ----------------------------------------------------------------------------------------------
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_CHARS_MAX}}}")
_HIDDEN_NAME = re.compile(
    rf"({re.escape(STAGING_PREFIX)}|{re.escape(JOBS_PREFIX)})[0-9a-f]{{16}}|{re.escape(ROUTED_TOPIC)}"
)
_GAP_TIMEOUT_MS = {OnGap.FENCE: GAP_TIMEOUT_FENCE_MS, OnGap.SKIP: GAP_TIMEOUT_SKIP_MS}


def check_topic_name(name: str) -> None:
    """Check a topic's name: letters, digits and `._-`, so that it is also a file name and fits a URL."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = name if len(name) <= 60 else name[:60] + "..."
        raise BadName(
            f"{shown!r} is not a topic name",
            f'use 1 to {TOPIC_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ - (and not "." or "..")',
        )
    if name.startswith(HIDDEN_PREFIX) and not _HIDDEN_NAME.fullmatch(name):
        raise BadName(
            f"topic name {name!r} is reserved",
            f"names that begin with {HIDDEN_PREFIX} belong to the cluster; choose another name",
        )


def _checked_order(order: int) -> Order:
    return parse_order(order)


def checked_ttl(session_ttl_s: int) -> int:
    """Check how long an idle session is kept."""
    if not 1 <= session_ttl_s <= SESSION_TTL_S_MAX:
        raise BadValue(f"session_ttl_s {session_ttl_s} is out of range", f"use 1 to {SESSION_TTL_S_MAX}")
    return session_ttl_s


def checked_gap(on_gap: str, gap_timeout_ms: int | None) -> tuple[OnGap, int]:
    """Check the handling of gaps, and its timeout; None: the default for that kind."""
    if on_gap not in list(OnGap):
        raise BadValue(f"on_gap {on_gap!r} does not exist", 'use "fence" (nothing is lost) or "skip" (low delay)')
    kind = OnGap(on_gap)
    timeout_ms = _GAP_TIMEOUT_MS[kind] if gap_timeout_ms is None else gap_timeout_ms
    if not 1 <= timeout_ms <= GAP_TIMEOUT_MS_MAX:
        raise BadValue(f"gap_timeout_ms {timeout_ms} is out of range", f"use 1 to {GAP_TIMEOUT_MS_MAX}")
    return kind, timeout_ms


class CopyCounts(NamedTuple):
    """The number of replicas that keep each record, and the number that makes it durable."""

    replicas: int
    durable_on: int


def checked_copies(replicas: int | None, durable_on: int | None, live: int) -> CopyCounts:
    """Check the numbers of copies. None: as many replicas as are live, up to the default; durable on the majority."""
    copies = min(live, COPIES_DEFAULT) if replicas is None else replicas
    if not 0 <= copies <= COPIES_MAX:
        raise BadValue(f"replicas {copies} is out of range", f"use 0 (memory only) to {COPIES_MAX}")
    enough = (copies // 2 + 1 if copies else 0) if durable_on is None else durable_on
    if copies == 0 and enough != 0:
        usual = ", and no replica is live" if replicas is None else ""
        raise BadValue(
            f"durable_on {enough} needs replicas{usual}", "use replicas=1 or more, or durable_on=0 (memory only)"
        )
    if copies and not 1 <= enough <= copies:
        raise BadValue(f"durable_on {enough} of {copies} replicas is out of range", f"use 1 to {copies}")
    return CopyCounts(copies, enough)


class RetentionLimits(NamedTuple):
    """Limits beyond which the oldest records are removed; 0: no limit."""

    bytes: int
    seconds: int


def checked_retention(retention_bytes: int, retention_s: int) -> RetentionLimits:
    """Check how much a topic keeps, and for how long."""
    if not 0 <= retention_bytes <= RETENTION_BYTES_MAX:
        raise BadValue(
            f"retention_bytes {retention_bytes} is out of range", f"use 0 (no bound) to {RETENTION_BYTES_MAX}"
        )
    if not 0 <= retention_s <= RETENTION_S_MAX:
        raise BadValue(f"retention_s {retention_s} is out of range", f"use 0 (no bound) to {RETENTION_S_MAX}")
    return RetentionLimits(retention_bytes, retention_s)


def check_partitioner(partitioner: str) -> None:
    """Refuse a partitioner that does not exist."""
    if partitioner not in PARTITIONERS:
        raise BadValue(f"partitioner {partitioner!r} does not exist", f"use {' or '.join(map(repr, PARTITIONERS))}")


def new_topic(
    name: str,
    lane: int,
    order: int,
    partitions: int,
    copies: CopyCounts,
    on_gap: str,
    gap_timeout_ms: int | None,
    session_ttl_s: int | None,
    retention: RetentionLimits,
) -> Topic:
    """Make a topic from its checked settings. Raises BadName or BadValue."""
    check_topic_name(name)
    level = _checked_order(order)
    kind, timeout_ms = checked_gap(on_gap, gap_timeout_ms)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise BadValue(f"partitions {partitions} is out of range", f"use 1 to {PARTITIONS_MAX}")
    return Topic(
        name=name,
        lane=lane,
        order=int(level),
        partitions=partitions,
        first_partitions=partitions,
        replicas=copies.replicas,
        durable_on=copies.durable_on,
        on_gap=kind.value,
        gap_timeout_ms=timeout_ms,
        session_ttl_s=checked_ttl(SESSION_TTL_S if session_ttl_s is None else session_ttl_s),
        retention_bytes=retention.bytes,
        retention_s=retention.seconds,
    )


# --- changes of a topic -----------------------------------------------------------------------------------------------
class SchemaHistory(msgspec.Struct, frozen=True):
    """A topic's newest schema as an Arrow message, and the number of columns of each version."""

    columns: bytes = b""
    widths: list[int] = []


def altered(topic: Topic, ask: AlterTopic) -> Topic:
    """Apply all changes to a topic, except that of its schema."""
    if ask.order not in (None, topic.order):
        why = "its records were acked by the rules of the old order"
        raise BadValue(f"order of topic {topic.name!r} can't change: {why}", "create another topic")
    partitions = topic.partitions if ask.partitions is None else _grown(topic, ask.partitions)
    on_gap, gap_timeout_ms = _gap(topic, ask)
    ttl_s = topic.session_ttl_s if ask.session_ttl_s is None else checked_ttl(ask.session_ttl_s)
    copies = _copies(topic, ask)
    kept = checked_retention(
        topic.retention_bytes if ask.retention_bytes is None else ask.retention_bytes,
        topic.retention_s if ask.retention_s is None else ask.retention_s,
    )
    return msgspec.structs.replace(
        topic,
        partitions=partitions,
        first_partitions=topic.first_partitions or topic.partitions,
        on_gap=on_gap.value,
        gap_timeout_ms=gap_timeout_ms,
        session_ttl_s=ttl_s,
        replicas=copies.replicas,
        durable_on=copies.durable_on,
        retention_bytes=kept.bytes,
        retention_s=kept.seconds,
    )


def _grown(topic: Topic, partitions: int) -> int:
    """Check a new number of partitions. Only whole multiples: then keys of different partitions never mix."""
    has = topic.partitions
    if has <= partitions <= PARTITIONS_MAX and partitions % has == 0:
        return partitions
    next_counts = ", ".join(str(has * times) for times in (2, 3, 4) if has * times <= PARTITIONS_MAX)
    raise BadValue(
        f"topic {topic.name!r} has {has} partitions and can't have {partitions}",
        f"partitions grow by whole multiples, up to {PARTITIONS_MAX}: {next_counts or 'it cannot have more'}",
    )


def _copies(topic: Topic, ask: AlterTopic) -> CopyCounts:
    """Check new numbers of copies. Topics in memory stay in memory, and topics on disks stay on disks.

    A topic that is durable on the majority of its copies stays so, unless `durable_on` is given.
    """
    replicas = topic.replicas if ask.replicas is None else ask.replicas
    if (replicas == 0) != (topic.replicas == 0):
        kind = "are on disks" if topic.replicas else "are in memory only"
        raise BadValue(
            f"replicas of topic {topic.name!r} can't become {replicas}: its records {kind}",
            "create another topic",
        )
    durable_on = topic.durable_on if ask.durable_on is None else ask.durable_on
    if ask.durable_on is None and durable_on == checked_copies(topic.replicas, None, live=0).durable_on:
        return checked_copies(replicas, None, live=0)
    return checked_copies(replicas, durable_on, live=0)


def _gap(topic: Topic, ask: AlterTopic) -> tuple[OnGap, int]:
    if ask.on_gap in (None, topic.on_gap):
        return checked_gap(topic.on_gap, topic.gap_timeout_ms if ask.gap_timeout_ms is None else ask.gap_timeout_ms)
    if topic.on_gap == OnGap.SKIP:
        raise BadValue(
            f"on_gap of topic {topic.name!r} can't become {ask.on_gap!r}: skipped batches are not remembered forever",
            "a late copy of a skipped batch could count as stored; create another topic",
        )
    return checked_gap(str(ask.on_gap), ask.gap_timeout_ms)


def first_version(columns: bytes, key: str = "") -> SchemaHistory:
    """Make the schema history of a new topic; without columns it is empty.

    Raises BadSchema if `key` is not a column that can be a key.
    """
    if not columns and key:
        raise BadSchema(
            f"a topic of raw records can't have the key column {key!r}",
            "give it a schema; without one, each record has its own key",
        )
    if not columns:
        return SchemaHistory()
    from embarcadero.wire.partitioners import check_key  # brokers load Arrow only when a schema comes
    from embarcadero.wire.schemas import check_row_bytes, decode_schema

    schema = decode_schema(columns)
    check_row_bytes(schema)
    if key:
        check_key(schema, key)
    return SchemaHistory(columns, [len(schema)])


def next_version(known: SchemaHistory, columns: bytes) -> SchemaHistory:
    """Add a changed schema to a history. Returns the same history if nothing changed."""
    from embarcadero.wire.schemas import decode_schema, decode_versions, encode_schema, evolve

    if not known.columns:
        raise BadSchema("a topic of raw records can't get a schema", "create another topic with that schema")
    before = decode_versions(known.columns, known.widths)
    after = evolve(before, decode_schema(columns))
    return known if after is before else SchemaHistory(encode_schema(after.newest), list(after.widths))
