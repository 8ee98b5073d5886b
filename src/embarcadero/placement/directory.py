"""The directory: topics, members and epochs, as decisions over a store.

Theory of operation. Every method that changes something reads what its decision rests on, then asks the store for one
transaction conditional on just that. If somebody else was quicker the method reads and decides again, so several
processes may share a directory without a lock. Numbers that name things for life (lanes, incarnations, region handles,
epochs) come from counters in the store and are never handed out twice while anything may still speak of them.

    key                              value
    cluster                          id, generation, counters of lanes and region handles
    topics/<name>                    Topic
    schemas/<name>                   its newest schema, and the width of each version
    lanes/<topic's lane>/<lane>      TopicLane: a broker's lane in a topic of order 0 or 1
    incarnations/<broker>            the newest incarnation of that broker
    members/<broker>/<incarnation>   Member
    epochs                           newest epoch handed out, newest started
    starts/<epoch>                   where each lane ended when that epoch started
    trims/<lane>                     index below which a lane was trimmed
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from embarcadero.errors import Backpressure, BadValue, Corrupt, TooMany, TopicExists, UnknownTopic
from embarcadero.limits import (
    BROKER_LANES_FIRST,
    BROKER_LANES_KEPT_MAX,
    BROKERS_MAX,
    EPOCHS_AHEAD_MAX,
    EPOCHS_MAX,
    LANES_MAX,
    REGION_HANDLES,
    TOPICS_MAX,
)
from embarcadero.placement.altering import SchemaHistory, altered, first_version, next_version
from embarcadero.placement.rules import new_topic
from embarcadero.placement.store import ABSENT, Check, Delete, Put, Store, Write
from embarcadero.types import Member, MemberState, OnGap, Order, Topic, TopicLane
from embarcadero.wire.messages import AlterTopic

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

TRIES_MAX = 1_000
STARTS_KEPT = 16
"""Ends of this many started epochs are kept for those who are late to learn of them."""


class _Cluster(msgspec.Struct, frozen=True):
    """The cluster itself, and the counters that all of it shares."""

    id: str
    generation: int
    next_lane: int = 0
    lanes_left: int = LANES_MAX
    next_handle: int = 0
    next_broker_lane: int = BROKER_LANES_FIRST


class _Epochs(msgspec.Struct, frozen=True):
    handed_out: int = 0
    started: int = 0


class _Start(msgspec.Struct, frozen=True):
    ends: dict[int, int]


class _Trim(msgspec.Struct, frozen=True):
    index: int


class _Incarnation(msgspec.Struct, frozen=True):
    newest: int = 0


def _put(key: str, value: msgspec.Struct) -> Put:
    return Put(key, msgspec.json.encode(value))


def _decode(key: str, value: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        hint = "restore the store from a backup, or remove the cluster's folder"
        raise Corrupt(f"the store's value of {key!r} makes no sense: {error}", hint) from error


def _trim_key(lane: int) -> str:
    return f"trims/{lane:05}"


def _lane_key(lane: TopicLane) -> str:
    return f"lanes/{lane.topic:05}/{lane.lane:010}"


def _member_key(broker: int, incarnation: int) -> str:
    return f"members/{broker:05}/{incarnation:010}"


def _key_of(member: Member) -> str:
    return _member_key(member.broker, member.incarnation)


class _Plan:
    """A decision in the making: what it read (to be checked) and what it wants to write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.checks: list[Check] = []
        self.writes: list[Write] = []

    def read(self, key: str, kind: type[S]) -> S | None:
        """A value, which must not change until the plan is carried out."""
        item = self._store.get(key)
        self.checks.append(Check(key, item.revision if item else ABSENT))
        return _decode(key, item.value, kind) if item else None

    def list(self, prefix: str, kind: type[S]) -> Iterator[tuple[str, S]]:
        """All values under a prefix; none of them may change until then. New ones may come."""
        for item in self._store.list(prefix):
            self.checks.append(Check(item.key, item.revision))
            yield item.key, _decode(item.key, item.value, kind)

    def put(self, key: str, value: msgspec.Struct) -> None:
        self.writes.append(_put(key, value))

    def delete(self, key: str) -> None:
        self.writes.append(Delete(key))


class Directory:
    """Topics, members and epochs of one cluster. Any number of processes may have one over the same store."""

    def __init__(self, store: Store, cluster_id: str | None = None, topics_max: int = TOPICS_MAX) -> None:
        self._store, self._topics_max = store, topics_max
        self._cluster = self._decide(lambda plan: self._found(plan, cluster_id or secrets.token_hex(4)))

    # --- the cluster --------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        """Eight hexadecimal digits, for the life of the store."""
        return self._cluster.id

    @property
    def generation(self) -> int:
        """Number of the fabric: the cluster's id above, how often it was begun below."""
        return int(self._cluster.id, 16) << 32 | self._cluster.generation

    def revision(self) -> int:
        """Grows with every change; cheap."""
        return self._store.revision()

    def begin_generation(self) -> int:
        """Start over with an empty fabric: topics stay but get new lanes; members and epochs are forgotten.

        The new lanes are not those of the generation before, so a client that slept through the restart is told
        "unknown" instead of reading or writing another topic.
        """

        def plan_it(plan: _Plan) -> _Cluster:
            cluster = self._counters(plan)
            topics = list(plan.list("topics/", Topic))
            for offset, (key, topic) in enumerate(topics):
                lane = (cluster.next_lane + offset) % LANES_MAX
                plan.put(key, msgspec.structs.replace(topic, lane=lane))
            forgotten = (
                plan.list("members/", Member), plan.list("starts/", _Start), plan.list("trims/", _Trim),
                plan.list("lanes/", TopicLane),
            )  # fmt: skip
            for key, _ in itertools.chain(*forgotten):
                plan.delete(key)
            plan.read("epochs", _Epochs)
            plan.put("epochs", _Epochs())
            begun = msgspec.structs.replace(
                cluster,
                generation=cluster.generation + 1,
                next_lane=(cluster.next_lane + len(topics)) % LANES_MAX,
                lanes_left=LANES_MAX - len(topics),
            )
            plan.put("cluster", begun)
            return begun

        self._cluster = self._decide(plan_it)
        return self.generation

    # --- topics -------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        order: int = Order.TOTAL,
        partitions: int = 1,
        replicas: int = 0,
        durable_on: int = 0,
        on_gap: str = OnGap.FENCE.value,
        gap_timeout_ms: int | None = None,
        session_ttl_s: int | None = None,
        columns: bytes = b"",
    ) -> Topic:
        """Create a topic on a lane of its own; `columns` is its schema, if it has one."""
        schema = first_version(columns)

        def plan_it(plan: _Plan) -> Topic:
            cluster = self._counters(plan)
            topic = new_topic(
                name, cluster.next_lane, order, partitions, replicas, durable_on, on_gap, gap_timeout_ms, session_ttl_s
            )
            if plan.read(f"topics/{name}", Topic):
                raise TopicExists(f"topic {name!r} exists", "use it, or choose another name")
            if len(self._store.list("topics/")) >= self._topics_max:
                raise TooMany(f"there are {self._topics_max} topics already", "delete topics that nobody needs")
            if cluster.lanes_left == 0:
                raise TooMany(
                    f"all {LANES_MAX} lanes were used (deleted topics leave theirs behind)",
                    "restart the cluster: that numbers lanes anew",
                )
            advanced = (cluster.next_lane + 1) % LANES_MAX
            plan.put(
                "cluster", msgspec.structs.replace(cluster, next_lane=advanced, lanes_left=cluster.lanes_left - 1)
            )
            if schema.widths:
                topic = msgspec.structs.replace(topic, schema_version=len(schema.widths))
                plan.put(f"schemas/{name}", schema)
            plan.put(f"topics/{name}", topic)
            return topic

        return self._decide(plan_it)

    def alter_topic(self, ask: AlterTopic) -> Topic:
        """Change a topic as asked; BadValue or BadSchema names what can't change, and why."""

        def plan_it(plan: _Plan) -> Topic:
            topic = plan.read(f"topics/{ask.name}", Topic)
            if topic is None:
                raise self._unknown(ask.name)
            changed = altered(topic, ask)
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
            topic, item = self.topic(name), self._store.get(f"schemas/{name}")
            schema = _decode(item.key, item.value, SchemaHistory) if item else SchemaHistory()
            if len(schema.widths) == topic.schema_version:
                return topic, schema
        raise Backpressure(f"topic {name!r} changed under {TRIES_MAX} attempts to read it", "try again")

    def topics(self) -> list[Topic]:
        """All topics, by name."""
        return [_decode(item.key, item.value, Topic) for item in self._store.list("topics/")]

    def topic(self, name: str) -> Topic:
        """One topic."""
        item = self._store.get(f"topics/{name}")
        if item is None:
            raise self._unknown(name)
        return _decode(item.key, item.value, Topic)

    def delete_topic(self, name: str) -> None:
        """Delete a topic. Its lane is not used again in this generation."""

        def plan_it(plan: _Plan) -> None:
            if (topic := plan.read(f"topics/{name}", Topic)) is None:
                raise self._unknown(name)
            plan.delete(f"topics/{name}")
            plan.delete(f"schemas/{name}")
            plan.delete(_trim_key(topic.lane))
            for key, lane in plan.list(f"lanes/{topic.lane:05}/", TopicLane):
                plan.delete(key)
                plan.delete(_trim_key(lane.lane))

        self._decide(plan_it)

    def trim(self, name: str, lane: int, index: int) -> int:
        """Start a lane of a topic at `index`; going back changes nothing. Returns where it starts."""

        def plan_it(plan: _Plan) -> int:
            if plan.read(f"topics/{name}", Topic) is None:
                raise self._unknown(name)
            before = plan.read(_trim_key(lane), _Trim) or _Trim(0)
            if index > before.index:
                plan.put(_trim_key(lane), _Trim(index))
            return max(index, before.index)

        return self._decide(plan_it)

    def trims(self) -> dict[int, int]:
        """Lanes that were trimmed, and where they start."""
        found = ((item.key, _decode(item.key, item.value, _Trim)) for item in self._store.list("trims/"))
        return {int(key.removeprefix("trims/")): trim.index for key, trim in found}

    # --- lanes of brokers (orders 0 and 1) ----------------------------------------------------------------------------

    def make_lane(self, topic: Topic, member: Member) -> TopicLane | None:
        """Number a lane for a live incarnation's batches of a topic; None when the topic or the incarnation is gone."""

        def plan_it(plan: _Plan) -> TopicLane | None:
            cluster = self._counters(plan)
            found, owner = plan.read(f"topics/{topic.name}", Topic), plan.read(_key_of(member), Member)
            if found is None or found.lane != topic.lane or owner is None or owner.state is not MemberState.LIVE:
                return None
            gone = [(key, old) for key, old in plan.list(f"lanes/{topic.lane:05}/", TopicLane) if old.removed]
            for key, old in gone[:-BROKER_LANES_KEPT_MAX]:
                plan.delete(key)
                plan.delete(_trim_key(old.lane))
            lane = TopicLane(
                lane=cluster.next_broker_lane, topic=topic.lane, broker=member.broker,
                incarnation=member.incarnation, handle=member.handle,
            )  # fmt: skip
            plan.put("cluster", msgspec.structs.replace(cluster, next_broker_lane=lane.lane + 1))
            plan.put(_lane_key(lane), lane)
            return lane

        return self._decide(plan_it)

    def lanes(self, topic: int | None = None) -> list[TopicLane]:
        """Lanes of brokers, oldest first within a topic; `topic`: of the topic with this lane number only."""
        prefix = "lanes/" if topic is None else f"lanes/{topic:05}/"
        return [_decode(item.key, item.value, TopicLane) for item in self._store.list(prefix)]

    def close_lanes(self, ends: list[TopicLane], epoch: int) -> bool:
        """Record where lanes of a dead incarnation end. Ends that are recorded stay.

        Only the sequencer of the newest epoch may: once a later one is handed out, False, and nothing changes.
        """

        def plan_it(plan: _Plan) -> bool:
            if (plan.read("epochs", _Epochs) or _Epochs()).handed_out != epoch:
                return False
            for lane in ends:
                found = plan.read(_lane_key(lane), TopicLane)
                if found is not None and found.open:
                    plan.put(_lane_key(lane), lane)
            return True

        return self._decide(plan_it)

    # --- members ------------------------------------------------------------------------------------------------------

    def register_broker(self, broker: int, host: str, port: int, pid: int) -> Member:
        """A broker begins a new incarnation; its earlier one is dead from here on."""
        if not 0 <= broker < BROKERS_MAX:
            raise BadValue(f"broker {broker} is out of range", f"use 0 to {BROKERS_MAX - 1}")

        def plan_it(plan: _Plan) -> Member:
            cluster = self._counters(plan)
            newest = (plan.read(f"incarnations/{broker}", _Incarnation) or _Incarnation()).newest
            used = set()
            for key, old in plan.list("members/", Member):
                if old.state is MemberState.REMOVED:
                    plan.delete(key)
                    continue
                used.add(old.handle)
                if old.broker == broker and old.state is MemberState.LIVE:
                    plan.put(key, msgspec.structs.replace(old, state=MemberState.DEAD))
            handle = _free_handle(cluster.next_handle, used)
            member = Member(broker=broker, incarnation=newest + 1, handle=handle, host=host, port=port, pid=pid)
            plan.put("cluster", msgspec.structs.replace(cluster, next_handle=(handle + 1) % REGION_HANDLES))
            plan.put(f"incarnations/{broker}", _Incarnation(newest + 1))
            plan.put(_member_key(broker, newest + 1), member)
            return member

        return self._decide(plan_it)

    def mark_dead(self, broker: int, incarnation: int) -> None:
        """This incarnation is gone. Doing it again, or for one long gone, is fine."""
        self._decide(lambda plan: self._mark(plan, broker, incarnation, MemberState.LIVE, MemberState.DEAD))

    def mark_removed(self, broker: int, incarnation: int, epoch: int) -> bool:
        """Nothing needs the regions of this dead incarnation any more: anyone may unlink them.

        Only the sequencer of the newest epoch knows. Once a later one is handed out: False, and nothing changes.
        """

        def plan_it(plan: _Plan) -> bool:
            if (plan.read("epochs", _Epochs) or _Epochs()).handed_out != epoch:
                return False
            if not self._mark(plan, broker, incarnation, MemberState.DEAD, MemberState.REMOVED):
                return False
            for key, lane in plan.list("lanes/", TopicLane):
                if (lane.broker, lane.incarnation) == (broker, incarnation):
                    plan.put(key, msgspec.structs.replace(lane, removed=True, end=lane.end or 0))
            return True

        return self._decide(plan_it)

    def members(self) -> list[Member]:
        """All incarnations that are live or whose regions still hold data, oldest first within a broker."""
        everyone = (_decode(item.key, item.value, Member) for item in self._store.list("members/"))
        return [member for member in everyone if member.state is not MemberState.REMOVED]

    # --- epochs -------------------------------------------------------------------------------------------------------

    def next_epoch(self, superseded: int | None = None) -> int:
        """Hand out the next epoch. Few run ahead of the last started one, since everybody checks that many lines.

        `superseded` is an epoch for which the caller saw the line of a later one open, among those that everybody
        checks. If that is the last started one, nobody acts on its word any more, and more may run ahead.
        """

        def plan_it(plan: _Plan) -> int:
            epochs = plan.read("epochs", _Epochs) or _Epochs()
            epoch = epochs.handed_out + 1
            if epoch > epochs.started + EPOCHS_AHEAD_MAX and superseded != epochs.started:
                raise TooMany(
                    f"{EPOCHS_AHEAD_MAX} sequencers took an epoch after {epochs.started} and none of them started it",
                    "see the sequencers' logs, then restart the cluster",
                )
            if epoch >= EPOCHS_MAX:
                raise TooMany(f"all {EPOCHS_MAX} epochs of this fabric are used", "restart the cluster")
            plan.put("epochs", msgspec.structs.replace(epochs, handed_out=epoch))
            return epoch

        return self._decide(plan_it)

    def start_epoch(self, epoch: int, ends: dict[int, int]) -> bool:
        """Start an epoch at these ends (lane -> index). Unless it is the newest handed out: False, nothing changes."""

        def plan_it(plan: _Plan) -> bool:
            epochs = plan.read("epochs", _Epochs) or _Epochs()
            if epoch != epochs.handed_out or epoch <= epochs.started:
                return False
            plan.put("epochs", msgspec.structs.replace(epochs, started=epoch))
            plan.put(f"starts/{epoch:010}", _Start(ends))
            for key, _ in list(plan.list("starts/", _Start))[: -STARTS_KEPT + 1]:
                plan.delete(key)
            return True

        return self._decide(plan_it)

    def started_epoch(self) -> int:
        """The newest started epoch; 0 when none has started."""
        item = self._store.get("epochs")
        return _decode(item.key, item.value, _Epochs).started if item else 0

    def epoch_ends(self, epoch: int) -> dict[int, int] | None:
        """Where each lane ended when this epoch started; None if it never started, or long ago."""
        item = self._store.get(f"starts/{epoch:010}")
        return _decode(item.key, item.value, _Start).ends if item else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _decide(self, plan_it: Callable[[_Plan], T]) -> T:
        """Decide, and carry the decision out if what it rests on still holds; else decide again."""
        for _ in range(TRIES_MAX):
            plan = _Plan(self._store)
            result = plan_it(plan)
            if not plan.writes or self._store.transact(plan.checks, plan.writes):
                return result
        raise Backpressure(f"the store changed under {TRIES_MAX} attempts in a row", "try again")

    def _found(self, plan: _Plan, cluster_id: str) -> _Cluster:
        cluster = plan.read("cluster", _Cluster)
        if cluster is None:
            cluster = _Cluster(id=cluster_id, generation=0)
            plan.put("cluster", cluster)
        return cluster

    def _counters(self, plan: _Plan) -> _Cluster:
        cluster = plan.read("cluster", _Cluster)
        if cluster is None:
            raise Corrupt("the store has lost its cluster record", "stop the cluster and remove its folder")
        return cluster

    @staticmethod
    def _mark(plan: _Plan, broker: int, incarnation: int, before: MemberState, after: MemberState) -> bool:
        key = _member_key(broker, incarnation)
        member = plan.read(key, Member)
        if member is None or member.state is not before:
            return False
        plan.put(key, msgspec.structs.replace(member, state=after))
        return True

    def _unknown(self, name: str) -> UnknownTopic:
        some = ", ".join(topic.name for topic in self.topics()[:5])
        return UnknownTopic(f"there is no topic {name!r}", f"existing topics: {some}" if some else "create it first")


def _free_handle(first: int, used: set[int]) -> int:
    for offset in range(REGION_HANDLES):
        handle = (first + offset) % REGION_HANDLES
        if handle not in used:
            return handle
    raise TooMany(f"all {REGION_HANDLES} region handles are in use", "restart the cluster")
