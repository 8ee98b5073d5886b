"""Regions that exist at the beginning."""

from __future__ import annotations

import numpy as np

from embarcadero.fabric.region import Bytes, Shape, write_superblock
from embarcadero_proof.sim.exhaustive.actor import GENERATION, Lines


class FirstRegion:
    """A region that is filled at the beginning, by the same code that fills it later."""

    def __init__(self, lines: Lines, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        self.data: Bytes = np.zeros(shape.size, dtype=np.uint8)
        write_superblock(self.data, shape, GENERATION)
        self._lines = lines
        self.keep()

    def keep(self) -> None:
        """Take the stored bytes as the initial contents."""
        used = np.flatnonzero(self.data)
        self._lines.regions[self.name] = self.shape, self.data[: int(used[-1]) + 1].tobytes()

    def flush(self, offset: int, length: int) -> None:
        """Keep the stored bytes."""
        self.keep()

    def invalidate(self, offset: int, length: int) -> None:
        """Do nothing: there is no other actor yet."""

    def reserve(self, offset: int, length: int) -> None:
        """Memory always has space."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class FirstFabric:
    """The fabric at the beginning."""

    generation = GENERATION
    coherent_only = False

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._regions: dict[str, FirstRegion] = {}

    def create(self, name: str, shape: Shape) -> FirstRegion:
        region = self._regions[name] = FirstRegion(self._lines, name, shape)
        return region

    def attach(self, name: str, writable: bool = False) -> FirstRegion:
        return self._regions[name]

    def exists(self, name: str) -> bool:
        return name in self._regions

    def names(self) -> list[str]:
        return sorted(self._regions)

    def remove(self, name: str) -> None:
        self._regions.pop(name)

    def fence(self) -> None:
        """Do nothing: there is no other actor yet."""


def make_region(lines: Lines, name: str, shape: Shape) -> FirstRegion:
    """Make an empty region."""
    return FirstFabric(lines).create(name, shape)
