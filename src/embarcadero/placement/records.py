"""What the store holds besides the types that all folders know, under which keys, and how decisions are made over it.

key                              value
cluster                          Cluster: id, generation, counters of lanes and region handles
topics/<name>                    Topic
schemas/<name>                   its newest schema, and the width of each version
lanes/<topic's lane>/<lane>      TopicLane: a broker's lane in a topic of order 0 or 1
incarnations/<broker>            the newest incarnation of that broker
members/<broker>/<incarnation>   Member
epochs                           newest epoch handed out, newest started, and in which generation
starts/<epoch>                   where each lane ended when that epoch started
reign                            LeadershipRecord: who won the last election of sequencers
candidates/<candidate>           under a lease: this sequencer process is there, and may win the next one
hand-over                        HandOver: a planned move of the sequencer was asked for
stopping                         Stopping: the cluster of that generation stops in order; there are no more elections
trims/<lane>                     index below which a lane was trimmed
tiers/<name>                     Tier: the table of a topic, and how far the topic is in it
tierer/<name>                    under a lease: the job that writes that table
chains/<lane>                    Chain: whose ranges they are, the last one, the ceiling
ranges/<lane>/<number>           Range
retired/<lane>                   a lane of a deleted topic whose turn may come in this generation: it is not used again
replica/<replica>                the newest incarnation of that replica, and whether it is being drained
replicas/<replica>/<incarnation> ReplicaMember
readers/<topic>/<reader>         ReaderNote: how far a reader says it is
present/<replica>/<incarnation>  under a lease: this incarnation is there
saved/<lane>                     MirroredEnd: what a mirror had of a lane when the fabric was lost

A decision is read, decide, one transaction that checks just what was read; and if another process was quicker, again.
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
"""Keys of values that roles read when they need them, or, for the newest epoch, learn from the fabric."""


class EarlierGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A generation before this one whose lanes have not all been recovered yet."""

    generation: int
    epoch: int  # the newest that it started
    mirror: str  # where its fabric was mirrored; empty: nowhere, or too long ago


class ClusterRecord(msgspec.Struct, frozen=True):
    """The cluster itself, and the counters that all of it shares."""

    id: str
    generation: int
    next_lane: int = 0
    lanes_left: int = LANES_MAX
    next_handle: int = 0
    next_broker_lane: int = BROKER_LANES_FIRST
    mirror: str = ""  # where this generation's fabric is mirrored; empty: nowhere
    past: tuple[EarlierGeneration, ...] = ()  # oldest first
    first_lane: int = -1  # the next lane when this generation began; -1: not known
    last_range: int = 0  # the highest number of a range of a deleted topic: ranges of new topics count on from there
    log: str = ""  # the id that segments carry: that of the first original of a restored copy; empty: `id`
    copied_from: tuple[str, ...] = ()  # a restore is under way: replicas' folders with these ids become ours


class Epochs(msgspec.Struct, frozen=True):
    """Epochs begin anew with each generation, so the generation belongs to them."""

    handed_out: int = 0
    started: int = 0
    generation: int = 0


class LeadershipRecord(msgspec.Struct, frozen=True):
    """Who has which epoch. `mark` names one process for ever: run of its machine, process id, when it started."""

    epoch: int
    candidate: int
    mark: str

    @property
    def pid(self) -> int:
        """Its process id; 0 if it has none that means something here."""
        return pid_of_mark(self.mark)


class CandidateNote(msgspec.Struct, frozen=True):
    """The value under the lease of a standby, or of the leader."""

    candidate: int
    mark: str

    @property
    def pid(self) -> int:
        """Its process id; 0 if it has none that means something here."""
        return pid_of_mark(self.mark)


class HandOver(msgspec.Struct, frozen=True):
    """Candidate `to` shall take over from the sequencer of this epoch, and from no other."""

    to: int
    epoch: int


class Stopping(msgspec.Struct, frozen=True):
    """This generation stops in order."""

    generation: int


class EpochStart(msgspec.Struct, frozen=True):
    """Where lanes ended when an epoch started."""

    ends: dict[int, int]


class LaneStart(msgspec.Struct, frozen=True):
    """Where a lane starts."""

    index: int


class Tierer(msgspec.Struct, frozen=True):
    """The value under a tiering job's lease."""

    holder: str
    epoch: int


class Incarnation(msgspec.Struct, frozen=True):
    """The newest incarnation of a broker."""

    newest: int = 0
    port: int = 0  # of the newest one that listened: the next one tries it first


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The ranges of one lane. Positions below the ceiling may have been handed out; those above never were.

    So may handles of sessions below `handle`.
    """

    topic: str
    last: int
    index: int
    seq: int
    handle: int = 0
    loss_accepted: bool = False


class MirroredEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the mirror of a lost fabric had of a lane: it was ordered up to (index, seq)."""

    lane: int
    index: int
    seq: int
    kept: int = 0  # how far disks had it: [kept, index) is lost
    batches: int = 0  # that many batches and records were in there
    records: int = 0

    @property
    def start(self) -> int:
        """Where positions go on. After a loss one is left out.

        A reader of all that was ordered is at that position, and would miss the loss if the next batch came there.
        """
        return self.index + (self.index > self.kept)


class ReaderNote(msgspec.Struct, frozen=True, kw_only=True):
    """What one reader of a topic reported last: by lane its next position, and when; of which topic, 0: not known."""

    reader: str
    places: dict[int, LanePosition]
    at_us: int
    topic_id: int = 0


class Retired(msgspec.Struct, frozen=True):
    """A lane whose topic is gone, and whose turn to be handed out could come again in this generation.

    Disks may still hold ranges of deleted topics. Their numbers are not used again: see `Cluster.last_range`; records
    of earlier versions have the last number of their lane.
    """

    last: int
    generation: int


class ReplicaNote(msgspec.Struct, frozen=True):
    """What is known of a replica over all its incarnations."""

    newest: int = 0
    draining: bool = False


class Presence(msgspec.Struct, frozen=True):
    """The value under a replica's lease."""

    pid: int


def pid_of_mark(mark: str) -> int:
    """The process id in what names one process for ever."""
    parts = mark.split("/")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0


def candidate_key(candidate: int) -> str:
    """The key of a standby's sign of life."""
    return f"candidates/{candidate:05}"


def trim_key(lane: int) -> str:
    """Where a lane's trim is."""
    return f"trims/{lane:05}"


def tier_key(topic: str) -> str:
    """Where the table of a topic is described."""
    return f"tiers/{topic}"


def tierer_key(topic: str) -> str:
    """The key of the sign of life of the job that writes it."""
    return f"tierer/{topic}"


def lane_key(lane: TopicLane) -> str:
    """Where a broker's lane is."""
    return f"lanes/{lane.topic:05}/{lane.lane:010}"


def member_key(broker: int, incarnation: int) -> str:
    """Where a broker incarnation is."""
    return f"members/{broker:05}/{incarnation:010}"


def chain_key(lane: int) -> str:
    """Where a lane's chain of ranges is."""
    return f"chains/{lane:010}"


def ranges_prefix(lane: int) -> str:
    """Where all ranges of a lane are."""
    return f"ranges/{lane:010}/"


def range_key(lane: int, number: int) -> str:
    """Where a range is."""
    return f"{ranges_prefix(lane)}{number:010}"


def retired_key(lane: int) -> str:
    """Where the last number of a deleted topic's ranges is."""
    return f"retired/{lane:010}"


def note_key(replica: int) -> str:
    """Where that is which all incarnations of a replica share."""
    return f"replica/{replica:05}"


def replica_key(replica: int, incarnation: int) -> str:
    """Where a replica incarnation is."""
    return f"replicas/{replica:05}/{incarnation:010}"


def presence_key(replica: int, incarnation: int) -> str:
    """Where its sign of life is."""
    return f"present/{replica:05}/{incarnation:010}"


def saved_key(lane: int) -> str:
    """The key of what a mirror had of a lane."""
    return f"saved/{lane:010}"


def readers_prefix(topic: str) -> str:
    """Where the readers of a topic are."""
    return f"readers/{topic}/"


def reader_key(topic: str, reader: str) -> str:
    """Where it is how far a reader is."""
    return f"{readers_prefix(topic)}{reader}"


# --- decisions --------------------------------------------------------------------------------------------------------
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

TRIES_MAX = 1_000

_MAKING: Final = Lock()


@cache
def _decoder_of(kind: type[S]) -> msgspec.json.Decoder[Any]:
    """Made by one thread at a time: what the library learns of a type for the first time, it learns without a lock."""
    with _MAKING:
        return msgspec.json.Decoder(kind)


def decode(key: str, value: bytes, kind: type[S]) -> S:
    """A value of the store as what it should be."""
    try:
        found: S = _decoder_of(kind).decode(value)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "restore the store from a backup, or remove the cluster's folder"
        raise Corrupt(f"the store's value of {key!r} makes no sense: {error}", hint) from error


def check_id(topic: Topic, topic_id: int) -> None:
    """Refuse a request that means another topic than the one that has the name now. 0: it does not say which."""
    if topic_id in (0, topic.id):
        return
    raise TopicReplaced(
        f"topic {topic.name!r} has the id {id_text(topic.id)}; the one with id {id_text(topic_id)} is deleted",
        "ask again by name if the new topic is meant",
    )


class DecisionPlan:
    """A decision in the making: what it read (to be checked) and what it wants to write.

    It belongs to a directory of one generation: once that generation is over, no epoch leads in it.
    """

    def __init__(self, store: Store, generation: int) -> None:
        self._store = store
        self.generation = generation
        self.checks: list[Check] = []
        self.writes: list[Write] = []

    def read(self, key: str, kind: type[S]) -> S | None:
        """A value, which must not change until the decision is carried out."""
        item = self._store.get(key)
        self.checks.append(Check(key, item.revision if item else ABSENT))
        return decode(key, item.value, kind) if item else None

    def list(self, prefix: str, kind: type[S]) -> Iterator[tuple[str, S]]:
        """All values under a prefix; none of them may change until then. New ones may come."""
        for item in self._store.list(prefix):
            self.checks.append(Check(item.key, item.revision))
            yield item.key, decode(item.key, item.value, kind)

    def keys(self, prefix: str) -> Iterator[str]:
        """All keys under a prefix; their values may change until then."""
        return (item.key for item in self._store.list(prefix))

    def put(self, key: str, value: msgspec.Struct, lease: int = NO_LEASE, *, volatile: bool = False) -> None:
        """Write a value."""
        self.writes.append(Put(key, msgspec.json.encode(value), lease, volatile))

    def delete(self, key: str, *, volatile: bool = False) -> None:
        """Remove a value."""
        self.writes.append(Delete(key, volatile))

    def cluster(self) -> ClusterRecord:
        """Read the cluster's record, with the counters that all of it shares."""
        cluster = self.read("cluster", ClusterRecord)
        if cluster is None:
            raise Corrupt("the store has lost its cluster record", "stop the cluster and remove its folder")
        return cluster

    def leads(self, epoch: int) -> bool:
        """Whether this epoch of this generation is the newest handed out; what is decided holds only while it is."""
        epochs = self.read("epochs", Epochs) or Epochs()
        return (epochs.generation, epochs.handed_out) == (self.generation, epoch)


class Decider:
    """Reads values of a store, and decides over it for one cluster. All parts of a directory share one."""

    def __init__(self, store: Store, cluster_id: str) -> None:
        self.store = store
        self._generation = -1
        self.cluster = self.decide(lambda plan: _found(plan, cluster_id))
        self._generation = self.cluster.generation

    @property
    def generation(self) -> int:
        """The generation that it decides for, counted from the cluster's first."""
        return self._generation

    def decide(self, decide_on: Callable[[DecisionPlan], T]) -> T:
        """Decide, and carry the decision out if what it rests on still holds; else decide again."""
        for _ in range(TRIES_MAX):
            plan = DecisionPlan(self.store, self._generation)
            result = decide_on(plan)
            if not plan.writes or self.store.transact(plan.checks, plan.writes):
                return result
        raise Backpressure(f"the store changed under {TRIES_MAX} attempts in a row", "try again")

    def decide_cluster(self, decide_on: Callable[[DecisionPlan], ClusterRecord]) -> ClusterRecord:
        """Decide about the cluster itself, and go on in the generation that it has then."""
        self.cluster = self.decide(decide_on)
        self._generation = self.cluster.generation
        return self.cluster

    def one(self, key: str, kind: type[S]) -> S | None:
        """A value as it is now."""
        item = self.store.get(key)
        return decode(key, item.value, kind) if item else None

    def all(self, prefix: str, kind: type[S]) -> list[S]:
        """All values under a prefix as they are now."""
        return [decode(item.key, item.value, kind) for item in self.store.list(prefix)]


def _found(plan: DecisionPlan, cluster_id: str) -> ClusterRecord:
    """Read the cluster's record, or begin one."""
    cluster = plan.read("cluster", ClusterRecord)
    if cluster is None:
        cluster = ClusterRecord(id=cluster_id, generation=0)
        plan.put("cluster", cluster)
    try:
        int(cluster.id, 16)
    except ValueError:
        what = f"the store's cluster has the id {cluster.id[:40]!r}, which is no number"
        raise Corrupt(what, "restore the store from a backup, or remove the cluster's folder") from None
    return cluster
