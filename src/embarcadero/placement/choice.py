"""Which replicas get a range: those named first, then spread over hosts, then the least loaded. No clock, no dice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState


def load(ranges: Iterable[Range]) -> Counter[int]:
    """How many open ranges each replica has."""
    return Counter(ref.replica for range_ in ranges if range_.open for ref in range_.replicas)


def choose(
    members: Iterable[ReplicaMember],
    loads: Counter[int],
    count: int,
    keep: Sequence[ReplicaRef] = (),
    avoid: AbstractSet[int] = frozenset(),
) -> list[ReplicaRef]:
    """At most `count` live replicas, as many as there are; the same answer for the same store.

    A replica to be kept is kept in its newest incarnation: its disk has what came before, or it can copy it.
    """
    able = {m.replica: m for m in members if m.state is ReplicaState.LIVE and m.replica not in avoid}
    wanted = [able.pop(ref.replica) for ref in keep if ref.replica in able]
    chosen = wanted[:count]
    hosts = Counter(member.host for member in chosen)
    while able and len(chosen) < count:
        best = min(able.values(), key=lambda m: (hosts[m.host], loads[m.replica], m.replica))
        chosen.append(able.pop(best.replica))
        hosts[best.host] += 1
    return [member.ref for member in chosen]
