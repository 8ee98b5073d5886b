"""Mirrors of a run's fabrics: incoherent memory too, one for each generation, of which few are lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from embarcadero.fabric.layout import ORDER, SLOTS_OFFSET, sealed
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.shared import MirroredFabric
from embarcadero.placement.records import EarlierGeneration
from embarcadero_proof.sim.history import MirrorLeft, WrittenTo
from embarcadero_proof.sim.incoherent import IncoherentMemory

if TYPE_CHECKING:
    from embarcadero_proof.sim.world import World

MIRROR: Final = "mirror"
"""What the store has for the place of a mirror."""


class Mirrors:
    """All mirrors of a run. Runs that have none are as they were before there were any."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.on = world.plan.durable.mirror
        self._rng = random.Random(f"{world.seed}:mirrors")
        self._by_generation: dict[int, IncoherentMemory] = {}
        self._now: IncoherentMemory | None = None

    def begin(self, generation: int) -> None:
        """A new generation begins. What its predecessor's hosts had in their caches is gone, or written."""
        if not self.on:
            return
        if self._now is not None:
            self._now.interrupt = None
            for host in self._world.hosts:
                self._now.crash(host)
        self._now = IncoherentMemory(random.Random(f"{self._world.seed}:mirror:{generation}"), generation)
        self._by_generation[generation & 0xFFFF_FFFF] = self._now

    def of(self, fabric: Fabric, host: str) -> Fabric:
        """A host's fabric, with the mirror of this generation."""
        return fabric if self._now is None else MirroredFabric(fabric, self._now.host(host))

    def seen_by(self, host: str) -> Callable[[EarlierGeneration], Fabric | None]:
        """How a host opens mirrors of earlier generations."""

        def find(past: EarlierGeneration) -> Fabric | None:
            memory = self._by_generation.get(past.generation)
            return None if memory is None else memory.host(host)

        return find

    def interrupt(self, hook: Callable[[str], None] | None) -> None:
        """Let the run do something between two primitives here, too."""
        if self._now is not None:
            self._now.interrupt = hook

    def churn(self) -> None:
        """Some cache does something of its own."""
        if self._now is not None:
            self._now.churn(1)

    def crash(self, host: str) -> None:
        """A host is gone."""
        if self._now is not None:
            self._now.crash(host)

    def fabric_lost(self) -> None:
        """The fabric is about to be lost: put on record how far lanes were written, and whether the mirror is left."""
        world, mirror = self._world, self._now
        if mirror is None:
            return
        for topic in world.plan.topics:
            for lane in world.lanes_of(topic) if topic.replicas else ():
                medium = mirror.regions.get(world.order_ring(lane))
                if medium is not None:
                    seen = [medium.words, *(copy.words for copy in medium.copies.values())]
                    end = max(_written(words.view(np.uint8)) for words in seen)
                    world.seen(WrittenTo(at=world.queue.now_us, lane=lane, index=end))
        if self._rng.random() < world.plan.durable.mirror_dies:
            world.note("mirror", "is lost as well")
            self._by_generation.pop(mirror.generation & 0xFFFF_FFFF, None)
        else:
            world.seen(MirrorLeft(at=world.queue.now_us))


def _written(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """The end of the newest whole entry in a ring."""
    entries = data[SLOTS_OFFSET : len(data) - (len(data) - SLOTS_OFFSET) % ORDER.itemsize].view(ORDER)
    whole = entries[sealed(entries)]
    return int(whole["index"].max()) + 1 if len(whole) else 0
