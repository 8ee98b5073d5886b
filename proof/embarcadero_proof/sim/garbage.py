"""Memory that is not zero at first: after a broker's end, the slots that it never wrote may hold anything.

An entry counts only if its commit word is its index and its check fits, so no process may take garbage for an entry.
"""

from __future__ import annotations

import random

import numpy as np

from embarcadero.fabric.layout import SLOTS_OFFSET
from embarcadero.limits import LINE_BYTES
from embarcadero_proof.sim.incoherent import IncoherentMemory

_RINGS = ("/pending", "/order-")


def litter(memory: IncoherentMemory, owner: str, rng: random.Random) -> int:
    """Fill the slots that are still zero in all rings of an owner. Returns the number of slots."""
    dice, filled = np.random.default_rng(rng.getrandbits(64)), 0
    for name in sorted(memory.regions):
        if not name.startswith(f"{owner}/") or not any(ring in name for ring in _RINGS):
            continue
        medium = memory.regions[name]
        lines = slice(SLOTS_OFFSET // 8, medium.size // LINE_BYTES * LINE_BYTES // 8)
        slots = medium.words[lines].reshape(-1, LINE_BYTES // 8)
        free = np.flatnonzero(~slots.any(axis=1))
        slots[free] = dice.integers(0, 1 << 64, size=(len(free), slots.shape[1]), dtype=np.uint64)
        filled += len(free)
        medium.reach = medium.words.nbytes
    return filled
