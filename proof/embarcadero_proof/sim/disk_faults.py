"""Faults of replicas and their disks. Faults of all replicas keep synced data; the others hit only victims."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from embarcadero_proof.sim.disk import SimDisk
from embarcadero_proof.sim.plan import SECOND_US
from embarcadero_proof.sim.roles import ReplicaProcess

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

_TROUBLE_US = (SECOND_US // 2, 3 * SECOND_US, 10 * SECOND_US)
_SLOW_US = (50_000, 400_000, 2_000_000)

Done = tuple[str, int] | None
"""(target, duration), or None if there was no target."""


class DiskFaults:
    """Faults of runs with replicas, by kind."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.kinds: dict[str, Callable[[], Done]] = {
            "replica-crash": self._crash,
            "replica-pause": self._pause,
            "replica-zombie": self._zombie,
            "power-cut": self._power_cut,
            "sync-fails": self._sync_fails,
            "disk-full": lambda: self._trouble("full", True),
            "disk-read-only": lambda: self._trouble("read_only", True),
            "slow-disk": lambda: self._trouble("slow_us", rng.choice(_SLOW_US)),
            "bit-flip": self._flip,
            "wipe": self._wipe,
            "trim": self._trim,
            "tier": lambda: world.tiering.tier(rng),
            "store-away": lambda: world.tiering.lose_store(rng),
            "cluster-loss": world.restarts.lose_everything,
            "clean-restart": world.restarts.stop_cleanly,
        }

    def _pick(self, victims: bool = False) -> ReplicaProcess | None:
        replicas = [r for r in self._world.replicas.values() if r.alive
                    and (not victims or r.number in self._world.plan.durable.victims)]  # fmt: skip
        return self._rng.choice(replicas) if replicas else None

    def _crash(self) -> Done:
        """Kill a replica: its writes stay in the cache of its host, synced or not."""
        if (replica := self._pick()) is None:
            return None
        replica.die()
        return replica.name, SECOND_US

    def _pause(self) -> Done:
        if (replica := self._pick()) is None:
            return None
        for_us = self._rng.randint(1, self._rng.choice([SECOND_US // 10, SECOND_US, 5 * SECOND_US, 20 * SECOND_US]))
        replica.pause(for_us)
        return replica.name, for_us

    def _power_cut(self) -> Done:
        """End a replica with all its unsynced data."""
        if (replica := self._pick()) is None:
            return None
        replica.die(silently=True)
        replica.device.lose_power()
        return replica.name, SECOND_US

    def _sync_fails(self) -> Done:
        """Fail the next sync. Later syncs succeed, without the data of the failed one."""
        if (replica := self._pick()) is None:
            return None
        replica.device.failing_syncs += self._rng.randint(1, 2)
        drop_us = self._rng.randrange(10 * SECOND_US)
        self._world.queue.after(drop_us, replica.device.drop_caches)
        return replica.name, 2 * SECOND_US

    def _trouble(self, what: str, value: int | bool) -> Done:
        """Make the disk full, read-only or slow for a while."""
        if (replica := self._pick()) is None:
            return None
        device, for_us = replica.device, self._rng.randrange(1, self._rng.choice(_TROUBLE_US))
        setattr(device, what, value)
        self._world.queue.after(for_us, lambda: setattr(device, what, type(value)(0)))
        return replica.name, for_us

    def _flip(self) -> Done:
        """Flip a bit of a segment, an index or a checkpoint."""
        if (replica := self._pick(victims=True)) is None:
            return None
        path = replica.device.flip_a_bit(lambda path: "/" in path)
        return None if path is None else (f"{replica.name} {path}", SECOND_US)

    def _wipe(self) -> Done:
        """End a replica that returns with an empty disk under its old name."""
        if (replica := self._pick(victims=True)) is None:
            return None
        replica.die(silently=True)
        self._world.disks.replace(replica.number)
        return replica.name, SECOND_US

    def _zombie(self) -> Done:
        """Stop a replica; another takes its number with a disk of its own, and the first one wakes up again."""
        if (replica := self._pick(victims=True)) is None:
            return None
        world, for_us = self._world, self._rng.randrange(1, 15 * SECOND_US)
        replica.pause(for_us)
        world.disks.replace(replica.number)
        world.queue.after(self._rng.randrange(for_us), lambda: world.replace_replica(replica))
        return replica.name, for_us

    def _trim(self) -> Done:
        """Trim a topic, as an operator does, at most up to an index that a reader of durable records has read."""
        return self._world.trim(self._rng)


def heal(disks: list[SimDisk]) -> None:
    """End all faults of these disks."""
    for disk in disks:
        disk.heal()
        disk.drop_caches()
