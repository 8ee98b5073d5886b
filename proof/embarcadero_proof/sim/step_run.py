"""Every step of the protocol, one after the other: in one run a role ends at the step; in another it stops there past
every lease, is replaced, and continues. A role has to reach the step, and every promise has to hold.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from embarcadero.placement.records import Chain, chain_key
from embarcadero.placement.store import Put
from embarcadero.steps import Step
from embarcadero.types import Order
from embarcadero_proof.bugs.table import injected
from embarcadero_proof.machine import commit
from embarcadero_proof.sim.checkers import CHECKERS, check_all
from embarcadero_proof.sim.durable import Bias
from embarcadero_proof.sim.plan import SECOND_US, Plan, make_plan
from embarcadero_proof.sim.pool import worker_pool
from embarcadero_proof.sim.reports import acks_in_trouble, unread
from embarcadero_proof.sim.steps import StepFault, Way
from embarcadero_proof.sim.world import World

SEEDS_MAX: Final = 12
"""Most runs to find one that reaches a step."""

ACKS_MIN: Final = 30
"""A run with fewer acks before healing shows nothing, so it fails."""

_PHASE_US: Final = 14 * SECOND_US
_TRIGGERS: Final = {
    "takeover": ("sequencer-crash",),
    "round.held": ("cut", "lost-batch"),
    "seal": ("replica-crash",),
    "seal.last": ("broker-crash",),
    "recovery": ("cluster-loss",),
    "closing": ("broker-crash",),
    "burial": ("broker-crash",),
    "read.disk": ("sequencer-crash",),
    "replica.seal": ("replica-crash",),
    "replica.counting": ("replica-crash",),
}
"""Faults that make a role reach the steps whose names begin with the key; the longest matching key counts."""

_LANES: Final = ("lane.", "closing.lanes", "seal.last")
"""Steps of runs with a topic of order 0 or 1."""

CASES: Final = tuple(product(Step, Way))
_SEEDS_APART: Final = 3


class StepReport(msgspec.Struct, kw_only=True):
    """Results of one step."""

    step: str
    role: str
    way: str
    seed: int
    reached: int = 0  # how often a role reached the step
    struck: int = 0  # how often the fault struck there
    acks: int = 0  # before healing
    violations: list[str] = []
    failures: list[str] = []
    cpu_s: float = 0.0
    faults: dict[str, int] = {}
    broken: list[str] = []  # promises

    @property
    def good(self) -> bool:
        """Whether a role was struck there, and every promise was kept."""
        return self.struck > 0 and not self.violations


class StepsReport(msgspec.Struct, kw_only=True):
    """Results of all steps."""

    commit: str
    command: str
    cases: list[StepReport]
    seconds: float = 0.0
    faults: dict[str, int] = {}
    verdicts: dict[str, int] = {}  # promise -> cases that broke it

    @property
    def good(self) -> bool:
        """Whether every case is good."""
        return all(case.good for case in self.cases)

    def table(self) -> Table:
        """A table for the terminal."""
        table = Table("step", "role", "way", "seed", "reached", "struck", "acks", "verdict", title="steps")
        for case in self.cases:
            verdict = "[green]holds" if case.good else f"[red]{(case.violations or ['no role reached it'])[0]}"
            table.add_row(case.step, case.role, case.way, str(case.seed), str(case.reached), str(case.struck),
                          str(case.acks), verdict)  # fmt: skip
        return table


class LowWorld(World):
    """A run whose lanes begin with ceilings so low that the sequencer has to raise them immediately."""

    def start_roles(self) -> None:
        for topic in self.plan.topics if self.queue.now_us == 0 else ():
            if (found := self.store.get(key := chain_key(topic.lane))) is not None:
                low = msgspec.structs.replace(msgspec.json.decode(found.value, type=Chain), index=64, seq=64)
                self.store.transact([], [Put(key, msgspec.json.encode(low))])
        super().start_roles()


# --- runs -------------------------------------------------------------------------------------------------------------
def _triggers(step: Step) -> tuple[str, ...]:
    fitting = [start for start in _TRIGGERS if step.value.startswith(start)]
    return _TRIGGERS[max(fitting, key=len)] if fitting else ()


def step_plan(step: Step, way: Way, seed: int) -> Plan | None:
    """Return a small run that is likely to reach the step; None if this seed's run cannot have it."""
    plan = make_plan(seed, bias=Bias(faults=_triggers(step), every_s=3.0, interrupt_rate=0.000_5))
    if step.value.startswith(_LANES) and not plan.has_lanes:
        return None
    strong = any(topic.order is Order.STRONG for topic in plan.topics) or any(stream.strong for stream in plan.streams)
    if step is Step.ROUND_HELD and not strong:
        return None
    rng = random.Random(f"{seed}:{step.value}:{way.value}")
    shrink = _PHASE_US / plan.fault_phase_us
    for number, stream in enumerate(plan.streams):
        stream.ack = 1 + number % 2
        stream.batches = max(24, stream.batches * 6 // 10)
        stream.burst = min(stream.burst, 8)
        stream.think_us = max(1, _PHASE_US * 7 // 10 // max(1, stream.batches // stream.burst))
    for reader in plan.readers:
        reader.start_us = int(reader.start_us * shrink)
    plan.fault_phase_us = _PHASE_US
    plan.sizes = replace(plan.sizes, order_slots=4 * plan.sizes.round_entries, log_bytes=8 * plan.sizes.chunk_bytes)
    first_us = SECOND_US if _triggers(step) else rng.randrange(_PHASE_US // 2)
    if step.value.startswith("ceiling"):
        first_us = 0
    plan.steps = [StepFault(step, way, first_us, rng.randint(1, 2))]
    return plan


def run_step(step: Step, way: Way, first_seed: int = 0, bugs: Sequence[str] = ()) -> StepReport:
    """Run seeds until one reaches the step, and give its history to all checkers."""
    began = time.process_time()
    report = StepReport(step=step.value, role=step.role, way=way.value, seed=first_seed)
    tried, seed = 0, first_seed
    while tried < SEEDS_MAX and not report.struck:
        if (plan := step_plan(step, way, seed)) is not None:
            tried += 1
            with injected(*bugs) as wrap:
                world = (LowWorld if step.value.startswith("ceiling") else World)(plan, wrap)
                world.run()
            report = _reported(world, step, way, seed)
        seed += 1
    report.cpu_s = round(time.process_time() - began, 2)
    return report


def _reported(world: World, step: Step, way: Way, seed: int) -> StepReport:
    found = [*check_all(world.history), *unread(world.history)]
    sentences = [f"{violation.promise}: {violation.sentence}" for violation in found]
    acks = acks_in_trouble(world.history)
    if world.endless:
        sentences.insert(0, f"RUN: {world.endless}")
    if acks < ACKS_MIN:
        sentences.append(f"RUN: only {acks} batches were acked before healing; {ACKS_MIN} are needed")
    return StepReport(
        step=step.value, role=step.role, way=way.value, seed=seed, reached=world.step_faults.counts[step.value],
        struck=sum(world.step_faults.struck.values()), acks=acks, violations=sentences, failures=world.failures,
        faults=dict(world.faults.counts), broken=sorted({line.partition(":")[0] for line in sentences}),
    )  # fmt: skip


def run_steps(
    cases: Sequence[tuple[Step, Way]] = CASES, jobs: int = 0, first_seed: int = 0
) -> Iterable[StepReport]:
    """Run many cases on `jobs` processes (0: one per core), in order, each beginning with a seed of its own."""
    jobs = jobs or os.cpu_count() or 1
    steps, ways = [step for step, _ in cases], [way for _, way in cases]
    seeds = [first_seed + _SEEDS_APART * CASES.index(case) for case in cases]
    if jobs == 1 or len(cases) == 1:
        yield from map(run_step, steps, ways, seeds)
        return
    with worker_pool(jobs) as pool:
        yield from pool.map(run_step, steps, ways, seeds)


def run_cli(*, jobs: int = 0, first_seed: int = 0, report: Path | None = None, json_out: bool = False) -> int:
    """Run `embarcadero-proof sim --steps`: all steps, crashed and paused. Returns the exit code."""
    console, began = Console(stderr=json_out), time.monotonic()
    result = StepsReport(
        commit=commit(), command=f"embarcadero-proof sim --steps --seeds {first_seed}:{first_seed + 1}", cases=[]
    )
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("steps", total=len(CASES))
        for case in run_steps(jobs=jobs, first_seed=first_seed):
            result.cases.append(case)
            progress.update(task, advance=1, description=f"{case.step} {case.way}")
    faults: Counter[str] = Counter()
    for case in result.cases:
        faults.update(case.faults)
    broken = Counter(promise for case in result.cases for promise in case.broken)
    result.faults, result.verdicts = dict(sorted(faults.items())), {name: broken[name] for name in (*CHECKERS, "RUN")}
    result.seconds = round(time.monotonic() - began, 1)
    encoded = msgspec.to_builtins(result)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(encoded, indent=1) + "\n")
    if json_out:
        print(json.dumps(encoded))
    else:
        console.print(result.table())
    return 0 if result.good else 1
