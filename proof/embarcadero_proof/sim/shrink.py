"""Making a failing run smaller: leave something out, run it again, keep that if the same promise is still broken.

What can be left out: the rest in the end, faults (from the last on, by kind, one by one), streams, readers, brokers,
hosts, bad weather, interrupts, time. A smaller run is another run, so nothing is certain to work; everything is
tried, largest pieces first, until nothing more can go or the tries are used up.
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
"""How many runs there are at most to make one smaller."""

_PHASE_US_MIN: Final = 2 * SECOND_US


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is left out of a seed's run."""

    rest: bool = False
    faults_max: int | None = None  # faults beyond so many do not happen
    faults: frozenset[int] = frozenset()  # neither do those, counted from 0
    kinds: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()
    brokers: int | None = None
    hosts: int | None = None
    weather: bool = False
    interrupts: bool = False
    phase_us: int | None = None

    def applied(self, plan: Plan) -> Plan:
        """A plan without it."""
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
    """What came of one try."""

    violations: list[Violation]
    happened: tuple[int, ...]  # the numbers of the faults that did
    numbered: int  # those that were about to

    @property
    def faults(self) -> int:
        """How many there were."""
        return len(self.happened)


Run = Callable[[Plan], Outcome]


class Shrinker:
    """Makes the run of one seed smaller as long as it breaks the promise that it broke at `first`."""

    def __init__(self, seed: int, first: Outcome, run: Run, bias: Bias | None = None, swarm: bool = True,
                 tries: int = TRIES, told: Callable[[str], None] = lambda _line: None) -> None:  # fmt: skip
        self._seed, self._run, self._bias, self._swarm = seed, run, bias, swarm
        self.first = self.outcome = first
        self.promise = first_promise(first.violations)
        self._told, self._left = told, tries
        self.cuts = Cuts()
        self.tries = 0

    def plan(self, cuts: Cuts) -> Plan:
        """The seed's run without what is cut."""
        return cuts.applied(make_plan(self._seed, bias=self._bias, swarm=self._swarm))

    def shrink(self) -> None:
        """Leave out whatever can be."""
        for step in (self._rest, self._fault_count, self._kinds, self._single_faults, self._cast, self._time,
                     self._kinds, self._single_faults):  # fmt: skip
            step()

    def _try(self, what: str, **changes: object) -> bool:
        """Whether the run still breaks the promise with one more cut; then the cut stays."""
        if self.tries >= self._left:
            return False
        self.tries += 1
        cuts = replace(self.cuts, **changes)  # type: ignore[arg-type]
        outcome = self._run(self.plan(cuts))
        if not any(violation.promise == self.promise for violation in outcome.violations):
            return False
        self.cuts, self.outcome = cuts, outcome
        self._told(f"without {what}: {outcome.faults} faults, {self.promise} is still broken")
        return True

    # --- steps --------------------------------------------------------------------------------------------------------
    def _rest(self) -> None:
        if self.plan(self.cuts).rest_us:
            self._try("the rest in the end", rest=True)

    def _fault_count(self) -> None:
        """The fewest first faults that are enough. Up to the last of them, the run is the same."""
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
            if not self._try(f"what comes after {phase_us / SECOND_US:.1f} s", phase_us=phase_us):
                return


def left_out(cuts: Cuts) -> Iterator[str]:
    """What was cut, in words."""
    if cuts.rest:
        yield "the rest in the end"
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
    """The promise to look at: the first broken one that is about the log, not about the run."""
    return next((v.promise for v in violations if v.promise != "RUN"), violations[0].promise)
