"""Shrink a failing run: leave something out, run it again, and keep the cut if the same promise is still broken.

These can be left out: the rest at the end, faults (from the last on, by kind, one by one), streams, readers, brokers,
hosts, bad weather, interrupts, time. A smaller run is another run, so no cut is certain to work. The shrinker tries all
cuts, largest first, until no more succeeds or the tries are used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.durable import Bias
from embarcadero_proof.sim.network import Weather
from embarcadero_proof.sim.plan import SECOND_US, Plan, make_plan

TRIES: Final = 150
"""Most runs to shrink one run."""

_PHASE_US_MIN: Final = 2 * SECOND_US


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parts of a seed's run that are left out."""

    rest: bool = False
    faults_max: int | None = None  # later faults do not happen
    faults: frozenset[int] = frozenset()  # these faults do not happen either, counted from 0
    kinds: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    brokers: int | None = None
    hosts: int | None = None
    weather: bool = False
    interrupts: bool = False
    phase_us: int | None = None

    def applied(self, plan: Plan) -> Plan:
        """Apply the cuts to a plan."""
        plan.rest_us = 0 if self.rest else plan.rest_us
        plan.faults_max, plan.faults_off = self.faults_max, self.faults
        plan.faults = {kind: every for kind, every in plan.faults.items() if kind not in self.kinds}
        plan.streams = [stream for stream in plan.streams if stream.name not in self.streams]
        plan.readers = [reader for reader in plan.readers if reader.name not in self.readers]
        plan.brokers, plan.hosts = self.brokers or plan.brokers, self.hosts or plan.hosts
        if self.weather:
            plan.weather, plan.bell_loss = Weather(plan.weather.latency_us, plan.weather.jitter_us), 0.0
        plan.interrupt_rate = 0.0 if self.interrupts else plan.interrupt_rate
        plan.fault_phase_us = self.phase_us or plan.fault_phase_us
        return plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one try."""

    violations: list[Violation]
    happened: tuple[int, ...]  # numbers of the faults that happened
    numbered: int  # faults that were due

    @property
    def faults(self) -> int:
        """The number of faults."""
        return len(self.happened)


Run = Callable[[Plan], Outcome]


class Shrinker:
    """Shrinks the run of one seed as long as it breaks the promise that `first` broke."""

    def __init__(self, seed: int, first: Outcome, run: Run, bias: Bias | None = None, swarm: bool = True,
                 tries: int = TRIES, progress: Callable[[str], None] = lambda _line: None) -> None:  # fmt: skip
        self._seed, self._run, self._bias, self._swarm = seed, run, bias, swarm
        self.first = self.outcome = first
        self.promise = first_promise(first.violations)
        self._progress, self._tries_max = progress, tries
        self.cuts = Cuts()
        self.tries = 0

    def plan(self, cuts: Cuts) -> Plan:
        """Return the plan of the seed's run with these cuts."""
        return cuts.applied(make_plan(self._seed, bias=self._bias, swarm=self._swarm))

    def shrink(self) -> None:
        """Apply all cuts that keep the violation."""
        for step in (self._rest, self._fault_count, self._kinds, self._single_faults, self._cast, self._time,
                     self._kinds, self._single_faults):  # fmt: skip
            step()

    def _try(self, what: str, **changes: object) -> bool:
        """Run with one more cut. If the run still breaks the promise, keep the cut and return True."""
        if self.tries >= self._tries_max:
            return False
        self.tries += 1
        cuts = replace(self.cuts, **changes)  # type: ignore[arg-type]
        outcome = self._run(self.plan(cuts))
        if not any(violation.promise == self.promise for violation in outcome.violations):
            return False
        self.cuts, self.outcome = cuts, outcome
        self._progress(f"without {what}: {outcome.faults} faults, {self.promise} is still broken")
        return True

    # --- steps --------------------------------------------------------------------------------------------------------
    def _rest(self) -> None:
        if self.plan(self.cuts).rest_us:
            self._try("the rest at the end", rest=True)

    def _fault_count(self) -> None:
        """Find the smallest number of first faults that is enough. Up to the last of them, the run is the same."""
        fewest, enough = 0, self.outcome.numbered
        while fewest < enough:
            middle = (fewest + enough) // 2
            if self._try(f"faults after the first {middle}", faults_max=middle):
                enough = middle
            else:
                fewest = middle + 1

    def _kinds(self) -> None:
        for kind in sorted(self.plan(self.cuts).faults):
            self._try(kind, kinds=self.cuts.kinds | {kind})

    def _single_faults(self) -> None:
        for number in sorted(self.outcome.happened, reverse=True):
            if number in self.outcome.happened:
                self._try(f"fault {number}", faults=self.cuts.faults | {number})

    def _cast(self) -> None:
        self._try("bad weather", weather=True)
        self._try("interrupts", interrupts=True)
        plan = self.plan(self.cuts)
        for stream in plan.streams[::-1]:
            if len(self.plan(self.cuts).streams) > 1:
                self._try(f"stream {stream.name}", streams=self.cuts.streams | {stream.name})
        for reader in plan.readers[::-1]:
            self._try(f"reader {reader.name}", readers=self.cuts.readers | {reader.name})
        for hosts in range(1, plan.hosts):
            if self._try(f"more than {hosts} hosts", hosts=hosts):
                break
        for brokers in range(1, plan.brokers):
            if self._try(f"more than {brokers} brokers", brokers=brokers):
                break

    def _time(self) -> None:
        while (phase_us := self.plan(self.cuts).fault_phase_us // 2) >= _PHASE_US_MIN:
            if not self._try(f"everything after {phase_us / SECOND_US:.1f} s", phase_us=phase_us):
                return


def left_out(cuts: Cuts) -> Iterator[str]:
    """Yield the cuts in words."""
    if cuts.rest:
        yield "the rest at the end"
    if cuts.faults_max is not None:
        yield f"faults after the first {cuts.faults_max}"
    if cuts.faults:
        yield f"{len(cuts.faults)} single faults"
    yield from sorted(cuts.kinds)
    yield from (f"stream {name}" for name in sorted(cuts.streams))
    yield from (f"reader {name}" for name in sorted(cuts.readers))
    for flag, what in ((cuts.weather, "bad weather"), (cuts.interrupts, "interrupts"), (cuts.brokers, "brokers"),
                       (cuts.hosts, "hosts"), (cuts.phase_us, "time")):  # fmt: skip
        if flag:
            yield what


def first_promise(violations: Sequence[Violation]) -> str:
    """Return the first broken promise of the log, else of the run."""
    return next((v.promise for v in violations if v.promise != "RUN"), violations[0].promise)
