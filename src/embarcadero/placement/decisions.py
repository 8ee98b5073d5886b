"""How a decision over the store is made: read, decide, one transaction that checks just what was read; else again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec

from embarcadero.env import Ids
from embarcadero.errors import Backpressure, Corrupt, TopicReplaced
from embarcadero.placement.records import Cluster, Epochs
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


class Plan:
    """A decision in the making: what it read (to be checked) and what it wants to write."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.checks: list[Check] = []
        self.writes: list[Write] = []

    def read(self, key: str, kind: type[S]) -> S | None:
        """A value, which must not change until the plan is carried out."""
        item = self._store.get(key)
        self.checks.append(Check(key, item.revision if item else ABSENT))
        return decode(key, item.value, kind) if item else None

    def list(self, prefix: str, kind: type[S]) -> Iterator[tuple[str, S]]:
        """All values under a prefix; none of them may change until then. New ones may come."""
        for item in self._store.list(prefix):
            self.checks.append(Check(item.key, item.revision))
            yield item.key, decode(item.key, item.value, kind)

    def put(self, key: str, value: msgspec.Struct, lease: int = NO_LEASE, *, volatile: bool = False) -> None:
        """Write a value."""
        self.writes.append(Put(key, msgspec.json.encode(value), lease, volatile))

    def delete(self, key: str, *, volatile: bool = False) -> None:
        """Remove a value."""
        self.writes.append(Delete(key, volatile))


class Decisions:
    """What the parts of the directory share."""

    _store: Store
    _cluster: Cluster
    _ids: Ids

    def _decide(self, plan_it: Callable[[Plan], T]) -> T:
        """Decide, and carry the decision out if what it rests on still holds; else decide again."""
        for _ in range(TRIES_MAX):
            plan = Plan(self._store)
            result = plan_it(plan)
            if not plan.writes or self._store.transact(plan.checks, plan.writes):
                return result
        raise Backpressure(f"the store changed under {TRIES_MAX} attempts in a row", "try again")

    def _one(self, key: str, kind: type[S]) -> S | None:
        """A value as it is now."""
        item = self._store.get(key)
        return decode(key, item.value, kind) if item else None

    def _all(self, prefix: str, kind: type[S]) -> list[S]:
        """All values under a prefix as they are now."""
        return [decode(item.key, item.value, kind) for item in self._store.list(prefix)]

    def _counters(self, plan: Plan) -> Cluster:
        cluster = plan.read("cluster", Cluster)
        if cluster is None:
            raise Corrupt("the store has lost its cluster record", "stop the cluster and remove its folder")
        return cluster

    def _reigns(self, plan: Plan, epoch: int) -> bool:
        """Whether this epoch of this generation is the newest handed out; what is decided holds only while it is."""
        epochs = plan.read("epochs", Epochs) or Epochs()
        return (epochs.generation, epochs.handed_out) == (self._cluster.generation, epoch)
