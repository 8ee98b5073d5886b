"""Whole clusters that go and come back: every process at once, and the fabric with them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from embarcadero.fabric.epochs import create_epochs
from embarcadero.fabric.incoherent import IncoherentMemory
from embarcadero.sim.history import FabricLost
from embarcadero.sim.plan import SECOND_US
from embarcadero.sim.process import Process

if TYPE_CHECKING:
    from embarcadero.sim.world import World


class Restarts:
    """Ends a cluster and begins the next generation on the same disks."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.up = True  # there is a cluster, or one is coming up

    def lose_everything(self) -> tuple[str, int] | None:
        """All processes are killed and the fabric is gone; often the power too, with what disks had not synced."""
        world = self._world
        if not self.up:
            return None
        world.see_frontiers()
        world.disks.fabric_lost()
        world.seen(FabricLost(at=world.queue.now_us))
        self._end(power_cut=self._rng.random() < 0.6)
        down_us = self._rng.randrange(SECOND_US // 10, 4 * SECOND_US)
        world.queue.after(down_us, self.begin)
        return "cluster", down_us + 5 * SECOND_US

    def _end(self, power_cut: bool) -> None:
        world, self.up = self._world, False
        for process in self._roles():
            process.die(silently=power_cut)
        world.network.listening.clear()
        if power_cut:
            for disk in world.disks.devices.values():
                disk.lose_power()

    def _roles(self) -> list[Process]:
        world = self._world
        return [process for process in world.processes if process.alive and process.role in (
            "broker", "sequencer", "replica")]  # fmt: skip

    def begin(self) -> None:
        """Start the next generation, as `up` does on an old data folder."""
        world = self._world
        if self.up or world.over():
            return
        self.up = True
        generation = world.directory.begin_generation()
        world.note("cluster", f"begins generation {generation & 0xFFFF_FFFF}")
        memory = IncoherentMemory(random.Random(f"{world.seed}:memory:{generation}"), generation)
        create_epochs(memory.host(world.hosts[0]))
        memory.interrupt = world.memory.interrupt
        world.memory = memory
        world.start_roles()
