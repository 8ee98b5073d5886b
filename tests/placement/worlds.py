"""A store with replicas in it, and directories over it."""

from __future__ import annotations

from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.types import Member, Range, ReplicaMember


def add_replica(directory: Directory, replica: int, host: str = "", disk: str = "") -> ReplicaMember:
    """Start an incarnation of a replica, by default on a host of its own."""
    return directory.replicas.register(
        replica, disk or f"disk-{replica}", f"/data/replica-{replica}", host or f"host-{replica}", 1_000 + replica
    )


def add_broker(directory: Directory, broker: int = 0) -> Member:
    """Start an incarnation of a broker."""
    return directory.members.register(broker, "127.0.0.1", 9_092 + broker, 2_000 + broker)


def directory_with(replicas: int, store: MemoryStore | None = None) -> Directory:
    """A directory over a store with this many live replicas."""
    directory = Directory(store or MemoryStore())
    for replica in range(replicas):
        add_replica(directory, replica)
    return directory


def numbers(range_: Range | None) -> list[int]:
    """The replicas of a range."""
    return [] if range_ is None else [ref.replica for ref in range_.replicas]
