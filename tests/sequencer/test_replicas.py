"""Incarnations of replicas that the store no longer lists."""

from __future__ import annotations

from unittest.mock import Mock

from embarcadero.sequencer.ranges.keeper import Replicas
from embarcadero.types import ReplicaMember


def member(replica: int, incarnation: int) -> ReplicaMember:
    """An incarnation as the store lists it."""
    return ReplicaMember(replica=replica, incarnation=incarnation, disk="d", folder="/", host="h", pid=1)


def gone(replicas: Replicas, *members: ReplicaMember) -> set[str]:
    """Those that are no longer listed, by the names of their regions."""
    return {ref.region_prefix for ref in replicas.update(list(members))}


def test_incarnations_that_came_and_went_between_two_polls_are_gone_too() -> None:
    """No other process removes their regions before the next takeover.

    An incarnation that is still listed is not gone.
    """
    replicas = Replicas(Mock(), 0)
    assert not gone(replicas, member(0, 3), member(1, 1))
    assert not gone(replicas, member(0, 3), member(1, 1))
    assert gone(replicas, member(0, 6), member(1, 1)) == {"replica-0.3", "replica-0.4", "replica-0.5"}
    assert gone(replicas, member(0, 6), member(1, 2), member(1, 4)) == {"replica-1.1", "replica-1.3"}
    assert not gone(replicas, member(0, 6), member(1, 2), member(1, 4), member(2, 9))
