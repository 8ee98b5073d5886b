"""Memory primitives that one role omits on one kind of region: its fabric is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from embarcadero.fabric.region import Bytes, Fabric, Region, Shape

Wrap = Callable[[str, Fabric], Fabric]
"""(role, its host's fabric) -> the fabric for the role"""


@dataclass(frozen=True, slots=True)
class Leak:
    """One primitive that one role omits, on regions whose name contains `region`, from byte `first` on."""

    role: str
    primitive: str
    region: str
    first: int = 0

    def forgets(self, primitive: str, name: str, offset: int) -> bool:
        """Whether this call is omitted."""
        return primitive == self.primitive and self.region in name and offset >= self.first


class LeakyRegion:
    """A region with one primitive omitted."""

    def __init__(self, region: Region, leak: Leak) -> None:
        self._region, self._leak = region, leak
        self.name, self.shape = region.name, region.shape
        self.data: Bytes = region.data
        self.close, self.reserve = region.close, region.reserve

    def flush(self, offset: int, length: int) -> None:
        if not self._leak.forgets("flush", self.name, offset):
            self._region.flush(offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        if not self._leak.forgets("invalidate", self.name, offset):
            self._region.invalidate(offset, length)


class LeakyFabric:
    """A fabric with one primitive omitted."""

    def __init__(self, fabric: Fabric, leak: Leak) -> None:
        self._fabric, self._leak = fabric, leak
        self.generation, self.coherent_only = fabric.generation, fabric.coherent_only
        self.exists, self.names, self.remove, self.fence = fabric.exists, fabric.names, fabric.remove, fabric.fence

    def create(self, name: str, shape: Shape) -> Region:
        return LeakyRegion(self._fabric.create(name, shape), self._leak)

    def attach(self, name: str, writable: bool = False) -> Region:
        return LeakyRegion(self._fabric.attach(name, writable), self._leak)


def wrap_with(leaks: list[Leak]) -> Wrap:
    def wrap(role: str, fabric: Fabric) -> Fabric:
        for leak in leaks:
            if leak.role == role:
                fabric = LeakyFabric(fabric, leak)
        return fabric

    return wrap
