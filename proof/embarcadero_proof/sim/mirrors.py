"""Mirrors of a run's fabrics: one incoherent memory for each generation. Few of them are lost."""

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
"""The location of a mirror in the store."""


class Mirrors:
    """All mirrors of a run. A run without mirrors makes the same random choices as before mirrors were added."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.on = world.plan.durable.mirror
        self._rng = random.Random(f"{world.seed}:mirrors")
        self._by_generation: dict[int, IncoherentMemory] = {}
        self._now: IncoherentMemory | None = None

    def begin(self, generation: int) -> None:
        """Begin a new generation. Words in caches of the predecessor's hosts are lost, or written."""
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
        """Return how a host opens mirrors of earlier generations."""

        def find(past: EarlierGeneration) -> Fabric | None:
            memory = self._by_generation.get(past.generation)
            return None if memory is None else memory.host(host)

        return find

    def interrupt(self, hook: Callable[[str], None] | None) -> None:
        """Let the run act between two primitives here, too."""
        if self._now is not None:
            self._now.interrupt = hook

    def churn(self) -> None:
        """Let some cache evict or refresh a line."""
        if self._now is not None:
            self._now.churn(1)

    def crash(self, host: str) -> None:
        """Lose a host."""
        if self._now is not None:
            self._now.crash(host)

    def fabric_lost(self) -> None:
        """Record how far lanes were written before the fabric is lost, and whether the mirror survives."""
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
    """Return the end of the newest whole entry in a ring."""
    entries = data[SLOTS_OFFSET : len(data) - (len(data) - SLOTS_OFFSET) % ORDER.itemsize].view(ORDER)
    whole = entries[sealed(entries)]
    return int(whole["index"].max()) + 1 if len(whole) else 0
