"""The replicas of a seed's plan: their number, the topics that use them, and their faults.

Damage is bounded so that promises can hold. A batch is durable on A disks, so at most A - 1 replicas of a run are its
victims: only their disks rot or are replaced by empty ones. All other faults may hit any replica.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from embarcadero.limits import KIB, REPLACE_AFTER_S

REPLICAS_SHARE: Final = 0.5
"""Share of the runs that have replicas."""

MIRROR_SHARE: Final = 0.4
"""Share of the runs that lose their fabric and have a mirror of it."""

REPLICA_FAULT_KINDS: Final = (
    "replica-crash", "replica-crash-inside", "replica-pause", "power-cut", "sync-fails", "disk-full", "disk-read-only",
    "slow-disk", "bit-flip", "wipe", "replica-zombie", "trim",
)  # fmt: skip
"""Occasional faults of a run with replicas. Of these, bit-flip, wipe and replica-zombie hit victims."""

VICTIM_KINDS: Final = ("bit-flip", "wipe", "replica-zombie")

CLUSTER_FAULT_KINDS: Final = ("cluster-loss", "clean-restart")
"""Faults that hit the whole cluster: all processes end and the fabric is lost; or it is stopped and started."""


@dataclass(frozen=True, slots=True)
class Bias:
    """Runs with replicas where some faults are certain: an injected bug is found there sooner."""

    faults: tuple[str, ...]
    copies: tuple[int, int] | None = None  # (R, A) of all topics
    every_s: float = 4.0
    interrupt_rate: float | None = None  # per memory primitive
    job_us: int | None = None
    mirror: bool = False  # the fabric has a mirror
    replace_after_s: float | None = None  # delay until sealed ranges of a dead replica are copied again


SEGMENT_S: Final = 100.0
"""An active segment is closed at this age. A scrub finds rot in it only then, and runs wait for that."""

AGES_FROM_SEED: Final = 40_000
"""From this seed on segments may also be closed by their age during the phase with faults."""

STOPS_FROM_SEED: Final = 70_000
"""From this seed on some runs are stopped in order and started again, and never lose their fabric."""

STOPS_SHARE: Final = 0.4

REPLACED_FROM_SEED: Final = 120_000
"""From this seed on some runs copy sealed ranges of dead replicas to others during the phase with faults."""

TABLES_FROM_SEED: Final = 140_000
"""From this seed on some runs with replicas have a tiering job, and readers get old records through brokers."""

TABLES_SHARE: Final = 0.5


@dataclass(slots=True)
class DurablePlan:
    """Disks and replicas of a seed; without replicas nothing."""

    replicas: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)  # (R, A) by topic
    victims: list[int] = field(default_factory=list)
    segment_bytes: int = 64 * KIB
    segment_s: float = SEGMENT_S
    job_us: int = 200  # mean duration of a job on a worker thread
    faults: dict[str, float] = field(default_factory=dict)
    mirror: bool = False  # the fabric has a mirror
    mirror_dies: float = 0.0  # how often it is lost with the fabric
    replace_after_s: float = REPLACE_AFTER_S


def make_durable(seed: int, topics: int, quiet: bool, bias: Bias | None = None) -> DurablePlan:
    """Draw the plan. A run without replicas makes the same random choices as before replicas were added."""
    rng = random.Random(f"{seed}:durable")
    if rng.random() >= REPLICAS_SHARE and bias is None:
        return DurablePlan()
    replicas = rng.choice([1, 2, 3, 3, 3, 4] if bias is None else [3])
    restarts = not quiet and rng.random() < 0.4
    sets = [(r, a) for r in range(1, min(replicas, 3) + 1) for a in range(1, r + 1)]
    copies = [rng.choice([(3, 2), *sets] if replicas >= 3 else sets) for _ in range(topics)]
    if not restarts and topics > 1 and rng.random() < 0.3:
        copies[rng.randrange(topics)] = (0, 0)  # records in memory only do not survive the fabric
    if bias is not None:
        copies = [bias.copies or (3, 2)] * topics
    least = min((a for _, a in copies if a), default=0)
    plan = DurablePlan(
        replicas=replicas,
        copies=copies,
        victims=sorted(rng.sample(range(replicas), max(0, least - 1))),
        segment_bytes=rng.choice([4, 16, 64]) * KIB,
        job_us=(bias.job_us if bias is not None else None) or rng.choice([50, 500, 5_000]),
        faults={} if quiet else _faults(rng, restarts, victims=least > 1) if bias is None else dict.fromkeys(
            bias.faults, bias.every_s),
    )  # fmt: skip
    if seed >= AGES_FROM_SEED:
        plan.segment_s = random.Random(f"{seed}:age").choice([1.0, 5.0, SEGMENT_S])
    if seed >= STOPS_FROM_SEED and not quiet and not restarts and bias is None:
        _add_stops(random.Random(f"{seed}:stops"), plan)
    if seed >= REPLACED_FROM_SEED:
        plan.replace_after_s = random.Random(f"{seed}:replace").choice([0.2, 1.0, REPLACE_AFTER_S])
    if bias is not None and bias.replace_after_s is not None:
        plan.replace_after_s = bias.replace_after_s
    if seed >= TABLES_FROM_SEED and not quiet and bias is None:
        _add_tables(random.Random(f"{seed}:tables"), plan)
    _add_mirror(random.Random(f"{seed}:mirror"), plan, bias)
    return plan


def _add_tables(rng: random.Random, plan: DurablePlan) -> None:
    """Add a tiering job, except where an operator trims: there the trim decides which records may be missing."""
    if rng.random() < TABLES_SHARE and "trim" not in plan.faults:
        plan.faults["tier"] = rng.choice([0.5, 2.0])
        plan.faults["store-away"] = rng.choice([2.0, 6.0])


def _add_stops(rng: random.Random, plan: DurablePlan) -> None:
    """Add clean restarts, except where a topic is in memory only: its records end with each stop."""
    if rng.random() < STOPS_SHARE and all(r for r, _ in plan.copies):
        plan.faults["clean-restart"] = rng.choice([2.0, 5.0])


def _add_mirror(rng: random.Random, plan: DurablePlan, bias: Bias | None) -> None:
    """Add a mirror to some runs that lose their fabric; in few of them the mirror is lost as well, sometimes."""
    drawn, dies = rng.random(), rng.random()
    plan.mirror = bias.mirror if bias is not None else "cluster-loss" in plan.faults and drawn < MIRROR_SHARE
    plan.mirror_dies = 0.3 if plan.mirror and bias is None and dies < 0.2 else 0.0


def _faults(rng: random.Random, restarts: bool, victims: bool) -> dict[str, float]:
    kinds = [kind for kind in REPLICA_FAULT_KINDS if victims or kind not in VICTIM_KINDS]
    faults = {kind: rng.choice([2.0, 5.0, 12.0]) for kind in sorted(rng.sample(kinds, rng.randint(1, 4)))}
    if restarts:
        faults["cluster-loss"] = rng.choice([6.0, 15.0])
        if rng.random() < 0.5:
            faults["clean-restart"] = 10.0
    return faults
