"""Topics in the directory, and their readers.

A topic has a lane of its own, and where it has replicas, ranges from its first moment. How far readers are is noted for
people to see; nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from embarcadero.env import Ids
from embarcadero.errors import Backpressure, BadValue, TooMany, TopicExists, UnknownTopic
from embarcadero.limits import BROKER_LANES_FIRST, LANES_MAX, READER_KEPT_S, READERS_PER_TOPIC_MAX
from embarcadero.placement.decisions import TRIES_MAX, Decider, DecisionPlan, check_id, decode
from embarcadero.placement.members import ReplicaMembers
from embarcadero.placement.ranges import begin_chain, drop_trimmed_of_broker, forget_lane
from embarcadero.placement.records import (
    ClusterRecord,
    LaneStart,
    ReaderNote,
    Retired,
    reader_key,
    readers_prefix,
    tier_key,
    tierer_key,
    trim_key,
)
from embarcadero.placement.tiers import trim_table
from embarcadero.placement.topic_rules import (
    SchemaHistory,
    altered,
    check_partitioner,
    checked_copies,
    checked_retention,
    first_version,
    new_topic,
    next_version,
)
from embarcadero.types import CRC32C, OnGap, Order, ReplicaRef, Tier, Topic, TopicLane
from embarcadero.wire.messages import AlterTopic


def next_lane(first: int, taken: AbstractSet[int]) -> int:
    """The first lane from `first` on, round and round, that is not taken; lanes are counted apart from this."""
    lanes = ((first + offset) % LANES_MAX for offset in range(LANES_MAX))
    return next((lane for lane in lanes if lane not in taken), first)


def _too_few_live(wanted: str, live: int) -> BadValue:
    """The error for a topic that asks for more replicas than may get ranges now."""
    fewer = f", or ask for {live} or fewer" if live else ""
    return BadValue(
        f"{wanted}, and {live} are live and not drained",
        f"bring back those that are down, or `embarcadero replica add`{fewer}",
    )


class Topics:
    """Topics: each has a lane of its own, a schema if it is typed, and an id that never comes again."""

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
        """Create a topic on a lane of its own; `columns` is its schema, if it has one.

        `partitioner` says how keys choose partitions; `key` names the column of the schema that has them.
        `replicas` None: as many as are live, up to COPIES_DEFAULT; `durable_on` None: the majority of them. With
        replicas, the lane of a topic of order 2 or 5 has its first range from the start.
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
            self._check_room(cluster)
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
        """Change a topic as asked; BadValue or BadSchema names what can't change, and why.

        Other copies than the topic has are refused while too few replicas are live for the next range to open with
        them: as many as make a record durable. More copies than before are refused until all of them can be had.
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
        """A topic and its schema, as of one moment."""
        for _ in range(TRIES_MAX):
            topic, schema = self.get(name), self._decider.one(f"schemas/{name}", SchemaHistory) or SchemaHistory()
            if len(schema.widths) == topic.schema_version:
                return topic, schema
        raise Backpressure(f"topic {name!r} changed under {TRIES_MAX} attempts to read it", "try again")

    def all(self) -> list[Topic]:
        """All topics, by name."""
        return self._decider.all("topics/", Topic)

    def get(self, name: str) -> Topic:
        """One topic."""
        if (found := self._decider.one(f"topics/{name}", Topic)) is None:
            raise self._unknown(name)
        return found

    def delete(self, name: str, topic_id: int = 0) -> None:
        """Delete a topic. Its lane is not used again in this generation.

        Raises UnknownTopic; TopicReplaced if the name belongs to another topic than the one with `topic_id` (0: any).
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
        """Start a lane of a topic at `index`, whose first record is `seq`; going back changes nothing.

        In a topic with a table it starts there for all readers; without `cold` only what brokers have is given up, and
        nothing that is not in the table. Returns where the brokers' part starts. Its ranges below are forgotten: of
        lanes with sessions later, by replicas that have a checkpoint of these.
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
        """Give an id to each topic that an earlier version made: its record had none."""
        if any(topic.id == 0 for topic in self.all()):
            self._decider.decide(self.all_with_ids)

    def all_with_ids(self, plan: DecisionPlan) -> list[Topic]:
        """Read all topics; those without an id, and their tables, get one."""
        topics = [topic for _, topic in plan.list("topics/", Topic)]
        return [topic if topic.id else self._identified(plan, topic) for topic in topics]

    def _identified(self, plan: DecisionPlan, topic: Topic) -> Topic:
        identified = msgspec.structs.replace(topic, id=self._ids(), had_no_id=True)
        plan.put(f"topics/{topic.name}", identified)
        if (tier := plan.read(tier_key(topic.name), Tier)) is not None:
            plan.put(tier_key(topic.name), msgspec.structs.replace(tier, topic_id=identified.id))
        return identified

    def trims(self) -> dict[int, int]:
        """Lanes that were trimmed, and where they start."""
        found = ((item.key, decode(item.key, item.value, LaneStart)) for item in self._decider.store.list("trims/"))
        return {int(key.removeprefix("trims/")): trim.index for key, trim in found}

    # --- inside -------------------------------------------------------------------------------------------------------
    def _free_lane(self, cluster: ClusterRecord) -> int:
        """The next lane that no topic has, and that none had in this generation."""
        taken = {topic.lane for topic in self.all()}
        for item in self._decider.store.list("retired/"):  # after the topics: one that has just gone is found here
            if decode(item.key, item.value, Retired).generation == cluster.generation:
                taken.add(int(item.key.removeprefix("retired/")))
        return next_lane(cluster.next_lane, taken)

    def _count_lane(self, plan: DecisionPlan, cluster: ClusterRecord, lane: int) -> None:
        after = (lane + 1) % LANES_MAX
        plan.put("cluster", msgspec.structs.replace(cluster, next_lane=after, lanes_left=cluster.lanes_left - 1))

    def _check_room(self, cluster: ClusterRecord) -> None:
        if len(self._decider.store.list("topics/")) >= self._topics_max:
            raise TooMany(f"there are {self._topics_max} topics already", "delete topics that nobody needs")
        if cluster.lanes_left <= 0:
            raise TooMany(
                f"all {LANES_MAX} lanes were used (deleted topics leave theirs behind)",
                "restart the cluster: that numbers lanes anew",
            )

    def _all_wanted(self, plan: DecisionPlan, topic: Topic) -> list[ReplicaRef]:
        chosen = self._replicas.pick(plan, topic.replicas)
        if len(chosen) < topic.replicas:
            raise _too_few_live(f"topic {topic.name!r} is to have {topic.replicas} replicas", len(chosen))
        return chosen

    def _enough_live(self, plan: DecisionPlan, topic: Topic) -> None:
        if (live := len(self._replicas.pick(plan, topic.durable_on))) < topic.durable_on:
            raise _too_few_live(f"topic {topic.name!r} is to be durable on {topic.durable_on} replicas", live)

    def _unknown(self, name: str) -> UnknownTopic:
        some = ", ".join(topic.name for topic in self.all()[:5])
        return UnknownTopic(f"there is no topic {name!r}", f"existing topics: {some}" if some else "create it first")


# --- readers ----------------------------------------------------------------------------------------------------------
class Readers:
    """How far readers are, for people to see. Notes are few, bounded, and forgotten after a day."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def note(self, notes: Mapping[tuple[str, str], ReaderNote], now_us: int) -> None:
        """Keep what readers told, by topic and reader. Of topics that are gone nothing is kept, nor what is too old."""

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
        """What readers of a topic told within a day, the newest first."""
        fresh = [note for note in self._notes(topic) if now_us - note.at_us < READER_KEPT_S * 1_000_000]
        return sorted(fresh, key=lambda note: note.at_us, reverse=True)

    def remove(self, topic: str, reader: str) -> bool:
        """Forget what a reader told; whether there was anything."""
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
    """Forget the readers of a topic: it is gone, or all that was in it."""
    for key in plan.keys(readers_prefix(topic)):
        plan.delete(key)
