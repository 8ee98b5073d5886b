"""Which of the further kinds of trouble a seed has: each is on in some runs and off in most.

A run in which everything breaks all the time shows less than many runs that each have a few kinds of trouble: one
fault hides what another one would have shown. The generator is its own, so the rest of a run is drawn as without it.
"""

from __future__ import annotations

import random
from typing import Final

SHARE: Final = 0.6
"""Share of the troubled runs that have any of these."""

NETWORK_KINDS: Final = ("partition", "swizzle", "acks-lost")
CLOCK_KINDS: Final = ("clock-jump", "clock-frozen", "clock-strobe")
STORE_KINDS: Final = ("store-locked", "store-down")
CLUSTER_KINDS: Final = ("rolling-restart", "garbage")
MEMBER_KINDS: Final = ("replica-drain", "replica-add")
"""Only where there are replicas."""

VICTIM_KINDS: Final = ("lost-file", "swapped-files", "wrong-sector")
"""Only where some replicas may lose what they synced."""

KINDS: Final = (*NETWORK_KINDS, *CLOCK_KINDS, *STORE_KINDS, *CLUSTER_KINDS, *MEMBER_KINDS, *VICTIM_KINDS)

REST_S: Final = (5 * 60, 60 * 60)
"""How long a run rests when all is settled, from and to."""

LIGHT_REST_S: Final = (60, 5 * 60)
"""The same where roles sleep lightly."""


def draw_rest_us(seed: int, lightly: bool = False) -> int:
    """How long no client calls in the end."""
    return random.Random(f"{seed}:rest").randint(*(LIGHT_REST_S if lightly else REST_S)) * 1_000_000


def draw_swarm(seed: int, replicas: int, victims: int) -> dict[str, float]:
    """kind -> mean seconds between two of them."""
    rng = random.Random(f"{seed}:swarm")
    if rng.random() >= SHARE:
        return {}
    kinds = [kind for kind in KINDS
             if (replicas or kind not in MEMBER_KINDS) and (victims or kind not in VICTIM_KINDS)]  # fmt: skip
    chosen = rng.sample(kinds, rng.randint(1, 4))
    return {kind: rng.choice([3.0, 8.0, 20.0]) for kind in sorted(chosen)}
