"""Records of the store that only this folder uses, the keys of all records, and how decisions are made over them.

key                              value
cluster                          Cluster: id, generation, counters of lanes and region handles
topics/<name>                    Topic
schemas/<name>                   the topic's newest schema, and the width of each version
lanes/<topic's lane>/<lane>      TopicLane: a broker's lane in a topic of order 0 or 1
incarnations/<broker>            the newest incarnation of that broker
members/<broker>/<incarnation>   Member
epochs                           newest epoch handed out, newest started, and their generation
starts/<epoch>                   the end of each lane when that epoch started
reign                            LeadershipRecord: the winner of the last election of sequencers
candidates/<candidate>           under a lease: this sequencer process is alive, and may win the next election
hand-over                        HandOver: an operator asked for a planned move of the sequencer
stopping                         Stopping: a clean stop of that generation has begun; there are no more elections
trims/<lane>                     index below which a lane was trimmed
tiers/<name>                     Tier: the table of a topic, and its frontiers
tierer/<name>                    under a lease: the job that writes that table
chains/<lane>                    Chain: the topic of the ranges, the last one, the ceiling
ranges/<lane>/<number>           Range
retired/<lane>                   a lane of a deleted topic that this generation would otherwise hand out again
replica/<replica>                the newest incarnation of that replica, and whether it is being drained
replicas/<replica>/<incarnation> ReplicaMember
readers/<topic>/<reader>         ReaderNote: the position that a reader reported
present/<replica>/<incarnation>  under a lease: this incarnation is alive
saved/<lane>                     MirroredEnd: the end of a lane in a mirror when the fabric was lost

A decision: read, decide, one transaction that checks exactly the values read. If another process was faster, again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec

from embarcadero.errors import Backpressure, Corrupt, TopicReplaced
from embarcadero.limits import BROKER_LANES_FIRST, LANES_MAX
from embarcadero.placement.store import ABSENT, NO_LEASE, Check, Delete, Put, Store, Write
from embarcadero.types import LanePosition, Topic, TopicLane, id_text

NOT_WORKED_BY: Final = ("epochs", "starts/", "reign", "candidates/", "hand-over", "readers/")
"""Keys of values that roles read only on demand. (The newest epoch they get from the fabric.)"""


class EarlierGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier generation whose lanes have not all been recovered yet."""

    generation: int
    epoch: int  # the newest that it started
    mirror: str  # the folder of its fabric's mirror; empty: none, or too long ago


class ClusterRecord(msgspec.Struct, frozen=True):
    """The cluster itself, and its shared counters."""

    id: str
    generation: int
    next_lane: int = 0
    lanes_left: int = LANES_MAX
    next_handle: int = 0
    next_broker_lane: int = BROKER_LANES_FIRST
    mirror: str = ""  # the folder of this generation's mirror; empty: none
    past: tuple[EarlierGeneration, ...] = ()  # oldest first
    first_lane: int = -1  # the next lane when this generation began; -1: unknown
    last_range: int = 0  # highest range number of a deleted topic: ranges of new topics continue from there
    log: str = ""  # the id in segments: that of the first original of a restored copy; empty: `id`
    copied_from: tuple[str, ...] = ()  # during a restore: replicas' folders with these ids become ours


class Epochs(msgspec.Struct, frozen=True):
    """The newest epochs. Epochs start again with each generation, so the generation is part of the record."""

    handed_out: int = 0
    started: int = 0
    generation: int = 0


class LeadershipRecord(msgspec.Struct, frozen=True):
    """The winner of an election. `mark` identifies one process forever: run of its machine, process id, start time."""

    epoch: int
    candidate: int
    mark: str

    @property
    def pid(self) -> int:
        """The process id; 0 if there is none that is valid here."""
        return pid_of_mark(self.mark)


class CandidateNote(msgspec.Struct, frozen=True):
    """The value under the lease of a standby or the leader."""

    candidate: int
    mark: str

    @property
    def pid(self) -> int:
        """The process id; 0 if there is none that is valid here."""
        return pid_of_mark(self.mark)


class HandOver(msgspec.Struct, frozen=True):
    """A request that sequencer `to` takes over from the sequencer of this epoch, and from no other."""

    to: int
    epoch: int


class Stopping(msgspec.Struct, frozen=True):
    """A clean stop of this generation has begun."""

    generation: int


class EpochStart(msgspec.Struct, frozen=True):
    """The ends of lanes when an epoch started."""

    ends: dict[int, int]


class LaneStart(msgspec.Struct, frozen=True):
    """The start of a lane."""

    index: int


class Tierer(msgspec.Struct, frozen=True):
    """The value under a tiering job's lease."""

    holder: str
    epoch: int


class Incarnation(msgspec.Struct, frozen=True):
    """The newest incarnation of a broker."""

    newest: int = 0
    port: int = 0  # the last port: the next incarnation tries it first


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The ranges of one lane. Positions below the ceiling may have been handed out; positions above it never were.

    The same holds for handles of sessions, with `handle`.
    """

    topic: str
    last: int
    index: int
    seq: int
    handle: int = 0
    loss_accepted: bool = False


class MirroredEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a lane in the mirror of a lost fabric: it was ordered up to (index, seq)."""

    lane: int
    index: int
    seq: int
    kept: int = 0  # end of the lane on disks: [kept, index) is lost
    batches: int = 0  # number of lost batches and records
    records: int = 0

    @property
    def start(self) -> int:
        """The index at which positions continue. After a loss one position is skipped.

        A reader of everything ordered is at the skipped position. It would miss the loss if the next batch were there.
        """
        return self.index + (self.index > self.kept)


class ReaderNote(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of one reader of a topic: its next position by lane, the time, the topic's id (0: unknown)."""

    reader: str
    places: dict[int, LanePosition]
    at_us: int
    topic_id: int = 0


class Retired(msgspec.Struct, frozen=True):
    """A lane of a deleted topic that this generation would otherwise hand out again.

    Disks may still hold ranges of deleted topics. Their numbers are not used again: see `ClusterRecord.last_range`.
    Records of earlier versions have the last number of their lane.
    """

    last: int
    generation: int


class ReplicaNote(msgspec.Struct, frozen=True):
    """State that all incarnations of a replica share."""

    newest: int = 0
    draining: bool = False


class Presence(msgspec.Struct, frozen=True):
    """The value under a replica's lease."""

    pid: int


def pid_of_mark(mark: str) -> int:
    """The process id in a mark, which identifies one process forever."""
    parts = mark.split("/")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0


def candidate_key(candidate: int) -> str:
    """Key of a standby's sign of life."""
    return f"candidates/{candidate:05}"


def trim_key(lane: int) -> str:
    """Key of a lane's trim."""
    return f"trims/{lane:05}"


def tier_key(topic: str) -> str:
    """Key of the table of a topic."""
    return f"tiers/{topic}"


def tierer_key(topic: str) -> str:
    """Key of the sign of life of the job that writes the table."""
    return f"tierer/{topic}"


def lane_key(lane: TopicLane) -> str:
    """Key of a broker's lane."""
    return f"lanes/{lane.topic:05}/{lane.lane:010}"


def member_key(broker: int, incarnation: int) -> str:
    """Key of a broker incarnation."""
    return f"members/{broker:05}/{incarnation:010}"


def chain_key(lane: int) -> str:
    """Key of a lane's chain of ranges."""
    return f"chains/{lane:010}"


def ranges_prefix(lane: int) -> str:
    """Prefix of the keys of a lane's ranges."""
    return f"ranges/{lane:010}/"


def range_key(lane: int, number: int) -> str:
    """Key of a range."""
    return f"{ranges_prefix(lane)}{number:010}"


def retired_key(lane: int) -> str:
    """Key of a retired lane."""
    return f"retired/{lane:010}"


def note_key(replica: int) -> str:
    """Key of the state that all incarnations of a replica share."""
    return f"replica/{replica:05}"


def replica_key(replica: int, incarnation: int) -> str:
    """Key of a replica incarnation."""
    return f"replicas/{replica:05}/{incarnation:010}"


def presence_key(replica: int, incarnation: int) -> str:
    """Key of a replica incarnation's sign of life."""
    return f"present/{replica:05}/{incarnation:010}"


def saved_key(lane: int) -> str:
    """Key of the end of a lane in a mirror."""
    return f"saved/{lane:010}"


def readers_prefix(topic: str) -> str:
    """Prefix of the keys of a topic's readers."""
    return f"readers/{topic}/"


def reader_key(topic: str, reader: str) -> str:
    """Key of a reader's report."""
    return f"{readers_prefix(topic)}{reader}"


# --- decisions --------------------------------------------------------------------------------------------------------
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

TRIES_MAX = 1_000

_MAKING: Final = Lock()


@cache
def _decoder_of(kind: type[S]) -> msgspec.json.Decoder[Any]:
    """Make a decoder, one thread at a time: the library inspects a new type without a lock."""
    with _MAKING:
        return msgspec.json.Decoder(kind)


def decode(key: str, value: bytes, kind: type[S]) -> S:
    """Decode a value of the store. Raises Corrupt if it is not a `kind`."""
    try:
        found: S = _decoder_of(kind).decode(value)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "restore the store from a backup, or remove the cluster's folder"
        raise Corrupt(f"the store's value of {key!r} is not valid: {error}", hint) from error


def check_id(topic: Topic, topic_id: int) -> None:
    """Refuse a request with the id of another topic than the current one of that name. 0: the request has no id."""
    if topic_id in (0, topic.id):
        return
    raise TopicReplaced(
        f"topic {topic.name!r} has the id {id_text(topic.id)}; the topic with id {id_text(topic_id)} is deleted",
        "ask again by name if you mean the new topic",
    )


class DecisionPlan:
    """A decision in progress: the values that it read, which are checked, and its writes.

    It belongs to a directory of one generation. Once that generation is over, no epoch leads in it.
    """

    def __init__(self, store: Store, generation: int) -> None:
        self._store = store
        self.generation = generation
        self.checks: list[Check] = []
        self.writes: list[Write] = []

    def read(self, key: str, kind: type[S]) -> S | None:
        """Read a value. It must not change until the decision is committed."""
        item = self._store.get(key)
        self.checks.append(Check(key, item.revision if item else ABSENT))
        return decode(key, item.value, kind) if item else None

    def list(self, prefix: str, kind: type[S]) -> Iterator[tuple[str, S]]:
        """Read all values under a prefix. They must not change until the commit, but new ones may appear."""
        for item in self._store.list(prefix):
            self.checks.append(Check(item.key, item.revision))
            yield item.key, decode(item.key, item.value, kind)

    def keys(self, prefix: str) -> Iterator[str]:
        """Read all keys under a prefix. Their values may change until the commit."""
        return (item.key for item in self._store.list(prefix))

    def put(self, key: str, value: msgspec.Struct, lease: int = NO_LEASE, *, volatile: bool = False) -> None:
        """Write a value."""
        self.writes.append(Put(key, msgspec.json.encode(value), lease, volatile))

    def delete(self, key: str, *, volatile: bool = False) -> None:
        """Remove a value."""
        self.writes.append(Delete(key, volatile))

    def cluster(self) -> ClusterRecord:
        """Read the cluster's record, with its shared counters."""
        cluster = self.read("cluster", ClusterRecord)
        if cluster is None:
            raise Corrupt("the store has lost its cluster record", "stop the cluster and remove its folder")
        return cluster

    def leads(self, epoch: int) -> bool:
        """Whether this epoch of this generation is the newest handed out. The commit checks that it still is."""
        epochs = self.read("epochs", Epochs) or Epochs()
        return (epochs.generation, epochs.handed_out) == (self.generation, epoch)


class Decider:
    """Reads values of a store, and makes the decisions of one cluster. All parts of a directory share a decider."""

    def __init__(self, store: Store, cluster_id: str) -> None:
        self.store = store
        self._generation = -1
        self.cluster = self.decide(lambda plan: _found(plan, cluster_id))
        self._generation = self.cluster.generation

    @property
    def generation(self) -> int:
        """The generation for which it decides, counted from the cluster's first."""
        return self._generation

    def decide(self, decide_on: Callable[[DecisionPlan], T]) -> T:
        """Decide, and commit the decision if the values it read are unchanged; otherwise decide again."""
        for _ in range(TRIES_MAX):
            plan = DecisionPlan(self.store, self._generation)
            result = decide_on(plan)
            if not plan.writes or self.store.transact(plan.checks, plan.writes):
                return result
        raise Backpressure(f"the store changed during {TRIES_MAX} attempts in a row", "try again")

    def decide_cluster(self, decide_on: Callable[[DecisionPlan], ClusterRecord]) -> ClusterRecord:
        """Decide about the cluster itself, and continue in the resulting generation."""
        self.cluster = self.decide(decide_on)
        self._generation = self.cluster.generation
        return self.cluster

    def one(self, key: str, kind: type[S]) -> S | None:
        """Read the current value of a key."""
        item = self.store.get(key)
        return decode(key, item.value, kind) if item else None

    def all(self, prefix: str, kind: type[S]) -> list[S]:
        """Read all current values under a prefix."""
        return [decode(item.key, item.value, kind) for item in self.store.list(prefix)]


def _found(plan: DecisionPlan, cluster_id: str) -> ClusterRecord:
    """Read the cluster's record, or make one."""
    cluster = plan.read("cluster", ClusterRecord)
    if cluster is None:
        cluster = ClusterRecord(id=cluster_id, generation=0)
        plan.put("cluster", cluster)
    try:
        int(cluster.id, 16)
    except ValueError:
        problem = f"the store's cluster has the id {cluster.id[:40]!r}, which is not a hexadecimal number"
        raise Corrupt(problem, "restore the store from a backup, or remove the cluster's folder") from None
    return cluster
