"""How a decision over the store is made: read, decide, one transaction that checks just what was read; else again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec

from embarcadero.errors import Backpressure, Corrupt, TopicReplaced
from embarcadero.placement.records import ClusterRecord, Epochs
from embarcadero.placement.store import ABSENT, NO_LEASE, Check, Delete, Put, Store, Write
from embarcadero.types import Topic, id_text

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
