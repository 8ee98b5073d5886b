"""Topics in the directory: each has a lane of its own, and where it has replicas, ranges from its first moment."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import msgspec

from embarcadero.errors import Backpressure, BadValue, TooMany, TopicExists, UnknownTopic
from embarcadero.limits import BROKER_LANES_FIRST, LANES_MAX
from embarcadero.placement.altering import SchemaHistory, altered, first_version, next_version
from embarcadero.placement.decisions import TRIES_MAX, Plan, check_id, decode
from embarcadero.placement.progress import Progress
from embarcadero.placement.ranges import Ranges
from embarcadero.placement.records import Cluster, Retired, Trim, tier_key, tierer_key, trim_key
from embarcadero.placement.rules import check_partitioner, checked_copies, checked_retention, new_topic
from embarcadero.placement.tier import Tiers
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


class Topics(Ranges, Tiers, Progress):
    """The directory's part about topics."""

    _topics_max: int

    def create_topic(
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

        def plan_it(plan: Plan) -> Topic:
            cluster = self._counters(plan)
            copies = checked_copies(replicas, durable_on, self.live_replicas())
            topic = new_topic(
                name, self._free_lane(cluster), order, partitions, copies, on_gap, gap_timeout_ms, session_ttl_s,
                checked_retention(retention_bytes, retention_s),
            )  # fmt: skip
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
                    self._first_range(plan, topic, topic.lane, chosen)
            return topic

        return self._decide(plan_it)

    def alter_topic(self, ask: AlterTopic) -> Topic:
        """Change a topic as asked; BadValue or BadSchema names what can't change, and why.

        Other copies than the topic has are refused while too few replicas are live for the next range to open with
        them: as many as make a record durable. More copies than before are refused until all of them can be had.
        """

        def plan_it(plan: Plan) -> Topic:
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

        return self._decide(plan_it)

    def described(self, name: str) -> tuple[Topic, SchemaHistory]:
        """A topic and its schema, as of one moment."""
        for _ in range(TRIES_MAX):
            topic, schema = self.topic(name), self._one(f"schemas/{name}", SchemaHistory) or SchemaHistory()
            if len(schema.widths) == topic.schema_version:
                return topic, schema
        raise Backpressure(f"topic {name!r} changed under {TRIES_MAX} attempts to read it", "try again")

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        return self._all("topics/", Topic)

    def topic(self, name: str) -> Topic:
        """One topic."""
        if (found := self._one(f"topics/{name}", Topic)) is None:
            raise self._unknown(name)
        return found

    def delete_topic(self, name: str, topic_id: int = 0) -> None:
        """Delete a topic. Its lane is not used again in this generation.

        Raises UnknownTopic; TopicReplaced if the name belongs to another topic than the one with `topic_id` (0: any).
        """

        def plan_it(plan: Plan) -> None:
            if (topic := plan.read(f"topics/{name}", Topic)) is None:
                raise self._unknown(name)
            check_id(topic, topic_id)
            plan.delete(f"topics/{name}")
            plan.delete(f"schemas/{name}")
            self._forget_readers(plan, name)
            plan.delete(tier_key(name))
            plan.delete(tierer_key(name))
            self._forget_lane(plan, topic.lane)
            for key, lane in plan.list(f"lanes/{topic.lane:05}/", TopicLane):
                plan.delete(key)
                self._forget_lane(plan, lane.lane)

        self._decide(plan_it)

    def trim(
        self, name: str, lane: int, index: int, *, seq: int | None = None, cold: bool = True, topic_id: int = 0
    ) -> int:
        """Start a lane of a topic at `index`, whose first record is `seq`; going back changes nothing.

        In a topic with a table it starts there for all readers; without `cold` only what brokers have is given up, and
        nothing that is not in the table. Returns where the brokers' part starts. Its ranges below are forgotten: of
        lanes with sessions later, by replicas that have a checkpoint of these.
        """

        def plan_it(plan: Plan) -> int:
            if (topic := plan.read(f"topics/{name}", Topic)) is None:
                raise self._unknown(name)
            check_id(topic, topic_id)
            before = plan.read(trim_key(lane), Trim) or Trim(0)
            wanted = self._trim_tier(plan, name, lane, (index, seq), cold)
            if wanted > before.index:
                plan.put(trim_key(lane), Trim(wanted))
            start = max(wanted, before.index)
            if lane >= BROKER_LANES_FIRST:
                self._drop_of_broker(plan, topic, lane, start)
            return start

        return self._decide(plan_it)

    def give_ids(self) -> None:
        """Give an id to each topic that an earlier version made: its record had none."""
        if any(topic.id == 0 for topic in self.topics()):
            self._decide(self._with_ids)

    def _with_ids(self, plan: Plan) -> list[Topic]:
        """Read all topics; those without an id, and their tables, get one."""
        topics = [topic for _, topic in plan.list("topics/", Topic)]
        return [topic if topic.id else self._identified(plan, topic) for topic in topics]

    def _identified(self, plan: Plan, topic: Topic) -> Topic:
        identified = msgspec.structs.replace(topic, id=self._ids(), had_no_id=True)
        plan.put(f"topics/{topic.name}", identified)
        if (tier := plan.read(tier_key(topic.name), Tier)) is not None:
            plan.put(tier_key(topic.name), msgspec.structs.replace(tier, topic_id=identified.id))
        return identified

    def trims(self) -> dict[int, int]:
        """Lanes that were trimmed, and where they start."""
        found = ((item.key, decode(item.key, item.value, Trim)) for item in self._store.list("trims/"))
        return {int(key.removeprefix("trims/")): trim.index for key, trim in found}

    # --- inside -------------------------------------------------------------------------------------------------------
    def _free_lane(self, cluster: Cluster) -> int:
        """The next lane that no topic has, and that none had in this generation."""
        taken = {topic.lane for topic in self.topics()}
        for item in self._store.list("retired/"):  # after the topics: one that has just gone is found here
            if decode(item.key, item.value, Retired).generation == cluster.generation:
                taken.add(int(item.key.removeprefix("retired/")))
        return next_lane(cluster.next_lane, taken)

    def _count_lane(self, plan: Plan, cluster: Cluster, lane: int) -> None:
        after = (lane + 1) % LANES_MAX
        plan.put("cluster", msgspec.structs.replace(cluster, next_lane=after, lanes_left=cluster.lanes_left - 1))

    def _check_room(self, cluster: Cluster) -> None:
        if len(self._store.list("topics/")) >= self._topics_max:
            raise TooMany(f"there are {self._topics_max} topics already", "delete topics that nobody needs")
        if cluster.lanes_left <= 0:
            raise TooMany(
                f"all {LANES_MAX} lanes were used (deleted topics leave theirs behind)",
                "restart the cluster: that numbers lanes anew",
            )

    def _all_wanted(self, plan: Plan, topic: Topic) -> list[ReplicaRef]:
        chosen = self._pick(plan, topic.replicas)
        if len(chosen) < topic.replicas:
            raise _too_few_live(f"topic {topic.name!r} is to have {topic.replicas} replicas", len(chosen))
        return chosen

    def _enough_live(self, plan: Plan, topic: Topic) -> None:
        if (live := len(self._pick(plan, topic.durable_on))) < topic.durable_on:
            raise _too_few_live(f"topic {topic.name!r} is to be durable on {topic.durable_on} replicas", live)

    def _unknown(self, name: str) -> UnknownTopic:
        some = ", ".join(topic.name for topic in self.topics()[:5])
        return UnknownTopic(f"there is no topic {name!r}", f"existing topics: {some}" if some else "create it first")
