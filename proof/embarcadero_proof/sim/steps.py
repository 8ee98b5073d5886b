"""Faults at a named step of the protocol: the first role that reaches the armed step ends or stops there.

Ordinary runs draw such a fault occasionally; `step_run.py` has one run for each step.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from embarcadero.steps import Step
from embarcadero_proof.sim.process import INTERRUPT_DEPTH_MAX, Crash

if TYPE_CHECKING:
    from embarcadero_proof.sim.process import Process
    from embarcadero_proof.sim.world import World

STEPS_SHARE: Final = 0.1
"""Share of the runs with other faults that also have faults at a step."""

_SECOND_US: Final = 1_000_000
_PAUSE_US: Final = (6 * _SECOND_US, 15 * _SECOND_US)
"""Longer than any lease, and longer than any heartbeat timeout."""

_REPLACED_US: Final = (_SECOND_US // 20, 2 * _SECOND_US)
_NAP_US: Final = (_SECOND_US // 50, _SECOND_US)


class Way(StrEnum):
    """The kind of a step fault."""

    CRASH = "crash"  # the process ends there
    PAUSE = "pause"  # it stops past every lease, another process replaces it, and then it continues
    NAP = "nap"  # the same, but it continues soon after its replacement began: its clients are still connected


@dataclass(frozen=True, slots=True)
class StepFault:
    """Armed at `after_us`, it strikes the next `times` processes that reach the step."""

    step: Step
    way: Way
    after_us: int
    times: int = 1


def draw_step_faults(seed: int, phase_us: int) -> list[StepFault]:
    """Draw the step faults of a run; most have none. The generator is separate, so other draws do not change."""
    rng = random.Random(f"{seed}:steps")
    if rng.random() >= STEPS_SHARE:
        return []
    return [
        StepFault(rng.choice(list(Step)), rng.choice(list(Way)), rng.randrange(phase_us // 2), rng.randint(1, 2))
        for _ in range(rng.randint(1, 3))
    ]


class SimSteps:
    """The steps of one process."""

    def __init__(self, process: Process) -> None:
        self._process, self._faults = process, process.world.step_faults

    def at(self, name: str) -> None:
        self._faults.counts[name] += 1
        if name in self._faults.armed:
            self._faults.reached(self._process, name)


class StepFaults:
    """All step faults of one run, and how often each step was reached."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, random.Random(f"{world.seed}:step-faults")
        self.counts: Counter[str] = Counter()
        self.struck: Counter[StepFault] = Counter()
        self.armed: dict[str, list[StepFault]] = {}  # by step
        for fault in world.plan.steps:
            self.armed.setdefault(fault.step.value, []).append(fault)

    def reached(self, process: Process, name: str) -> None:
        """Strike a process that reached a step with faults."""
        for fault in self.armed[name]:
            if self.struck[fault] < fault.times and self._may(process, fault):
                self.struck[fault] += 1
                self._strike(process, fault)

    def _may(self, process: Process, fault: StepFault) -> bool:
        world = self._world
        if world.healed or world.queue.now_us < fault.after_us or not process.alive or not world.may_crash(process):
            return False
        if not world.running or world.running[-1] is not process:
            return False
        # An interrupted process waits for those that run inside it: a long pause must not stop others too.
        return len(world.running) <= (INTERRUPT_DEPTH_MAX if fault.way is Way.CRASH else 1)

    def _strike(self, process: Process, fault: StepFault) -> None:
        world, rng = self._world, self._rng
        target = f"{process.name} at {fault.step.value}"
        if fault.way is Way.CRASH:
            world.faults.record("step-crash", target, _SECOND_US)
            raise Crash
        for_us = rng.randrange(*(_PAUSE_US if fault.way is Way.PAUSE else _NAP_US))
        replaced_us = rng.randrange(*_REPLACED_US) if fault.way is Way.PAUSE else rng.randrange(for_us)
        process.pause(for_us)
        world.queue.after(replaced_us, lambda: world.replace(process))
        world.faults.record(f"step-{fault.way.value}", target, for_us)
        process.interrupt(1)
