"""The description of an injected bug, and the biased runs that look for bugs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from embarcadero_proof.bugs.leaks import Leak
from embarcadero_proof.bugs.patch import Edit
from embarcadero_proof.sim.durable import Bias

ROLE: Final = "a role"
"""Stands for a promise: a role checks for exactly this error, and fails or reports it before any process acts on it."""


@dataclass(frozen=True, slots=True)
class Bug:
    """An injected bug. A seed, a scope or a test must catch it; otherwise the tests miss such bugs."""

    name: str
    what: str
    by: str = ""  # the promises whose checkers must catch it, each of them; or ROLE
    leak: Leak | None = None  # None: `edits` remove a rule from role code
    edits: tuple[Edit, ...] = ()
    lanes: bool = False  # it needs a run with a topic of order 0 or 1
    bias: Bias | None = None  # it needs a run with replicas and these faults
    witnesses: tuple[int, ...] = ()  # seeds that are known to catch it, the cheapest first
    scope: str = ""  # this scope of sim/exhaustive must catch it, too; or only it, where runs have a second safeguard
    test: str = ""  # the file of the test that catches it, where no run and no scope does

    @property
    def checkers(self) -> list[str]:
        """The checkers that must catch it, each of them."""
        return self.by.split(", ") if self.by else []

    @property
    def where(self) -> str:
        """The functions, or the region, in which it is injected."""
        if self.leak is not None:
            return f"{self.leak.role}: {self.leak.primitive} of {self.leak.region.strip('/-')}"
        return ", ".join(edit.where.removeprefix("embarcadero.") for edit in self.edits)


# --- biased runs ------------------------------------------------------------------------------------------------------
POWER: Final = Bias(("power-cut", "slow-disk"), copies=(2, 2))
SEALS: Final = Bias(("replica-crash", "replica-pause", "slow-disk"), every_s=2.0)
LOSS: Final = Bias(("cluster-loss", "replica-crash"), job_us=100_000)
WIPES: Final = Bias(("cluster-loss", "wipe", "replica-crash"), job_us=20_000)
ROT: Final = Bias(("bit-flip", "cluster-loss", "replica-crash"))
CRASHES: Final = Bias(("sequencer-crash-inside",), interrupt_rate=0.05)
STRIKES: Final = Bias(("sequencer-crash-inside", "sequencer-zombie"), interrupt_rate=0.05)
MOVES: Final = Bias(("hand-over", "sequencer-zombie"), every_s=1.0, interrupt_rate=0.05)
TRIMS: Final = Bias(("trim", "replica-crash"), every_s=1.0)
TABLES: Final = Bias(("tier", "store-away", "broker-crash"), every_s=1.0)
HOLDERS: Final = Bias(("publisher-zombie",), every_s=1.0)
MIRROR: Final = Bias(("cluster-loss", "replica-crash"), job_us=100_000, mirror=True)
ENDS: Final = Bias(("broker-crash-inside", "broker-zombie"), interrupt_rate=0.05)
SLOW: Final = Bias(("slow-disk", "replica-pause"), every_s=2.0)
LATE: Final = Bias(("cluster-loss", "slow-disk", "replica-pause"), every_s=3.0, job_us=400_000)
ENDED: Final = Bias(("broker-crash", "cluster-loss", "slow-disk", "replica-pause"), every_s=2.0, job_us=400_000)
DEATHS: Final = Bias(("replica-crash", "power-cut"), copies=(1, 1), every_s=1.0, replace_after_s=0.2)
