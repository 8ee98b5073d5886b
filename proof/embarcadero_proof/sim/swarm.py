"""Which of the further kinds of faults a seed has. Each kind is on in some runs and off in most.

A run in which everything breaks all the time shows less than many runs with a few kinds of faults each: one fault hides
the effect of another. The generator is separate, so the rest of a run does not depend on it.
"""

from __future__ import annotations

import random
from typing import Final

SHARE: Final = 0.6
"""Share of the runs with faults that have any of these kinds."""

NETWORK_KINDS: Final = ("partition", "swizzle", "acks-lost")
CLOCK_KINDS: Final = ("clock-jump", "clock-frozen", "clock-strobe")
STORE_KINDS: Final = ("store-locked", "store-down")
CLUSTER_KINDS: Final = ("rolling-restart", "garbage")
MEMBER_KINDS: Final = ("replica-drain", "replica-add")
"""Only in runs with replicas."""

VICTIM_KINDS: Final = ("lost-file", "swapped-files", "wrong-sector")
"""Only where some replicas may lose synced data."""

KINDS: Final = (*NETWORK_KINDS, *CLOCK_KINDS, *STORE_KINDS, *CLUSTER_KINDS, *MEMBER_KINDS, *VICTIM_KINDS)

REST_S: Final = (5 * 60, 60 * 60)
"""Shortest and longest rest after all is settled."""

LIGHT_REST_S: Final = (60, 5 * 60)
"""The same where roles wake up often."""


def draw_rest_us(seed: int, lightly: bool = False) -> int:
    """Draw how long no client calls at the end."""
    return random.Random(f"{seed}:rest").randint(*(LIGHT_REST_S if lightly else REST_S)) * 1_000_000


def draw_swarm(seed: int, replicas: int, victims: int) -> dict[str, float]:
    """Draw the kinds of faults: kind -> mean seconds between two of them."""
    rng = random.Random(f"{seed}:swarm")
    if rng.random() >= SHARE:
        return {}
    kinds = [kind for kind in KINDS
             if (replicas or kind not in MEMBER_KINDS) and (victims or kind not in VICTIM_KINDS)]  # fmt: skip
    chosen = rng.sample(kinds, rng.randint(1, 4))
    return {kind: rng.choice([3.0, 8.0, 20.0]) for kind in sorted(chosen)}
