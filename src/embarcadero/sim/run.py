"""Running seeds: one, or thousands on all cores; reports, and the story of a seed that failed."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from embarcadero.sim.checkers import CHECKERS
from embarcadero.sim.checkers.ledger import Violation
from embarcadero.sim.durable import Bias
from embarcadero.sim.exhaustive.scopes import CASES, VARIANTS, explore_case
from embarcadero.sim.history import Delivered, Sent, Settled, TailRead, Verdict
from embarcadero.sim.plan import make_plan
from embarcadero.sim.plants import PLANTS, bias_of, planted
from embarcadero.sim.watch import Watch
from embarcadero.sim.world import World

ACKS_MIN = 100
"""A seed with fewer acks shows nothing, so it fails."""

PLANT_SEEDS = 200
"""A planted bug has to be caught within this many seeds."""

_STORY_BEFORE, _STORY_AFTER = 60, 5
_SUMS = ("sent", "stored", "failed", "unknown", "delivered", "tails", "primitives", "steps")


class SeedReport(msgspec.Struct, kw_only=True):
    """What came of one seed."""

    seed: int
    trace: str
    violations: list[Violation]
    failures: list[str]  # tracebacks of roles
    simulated_us: int
    cpu_s: float
    steps: int
    sent: int
    stored: int
    failed: int
    unknown: int
    delivered: int
    tails: int
    faults: dict[str, int]
    primitives: int

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations


class RunReport(msgspec.Struct, kw_only=True):
    """What came of many seeds."""

    first: int
    last: int
    seeds: int
    failing: dict[int, str]  # seed -> its first violation
    verdicts: dict[str, int]  # promise -> seeds that broke it
    simulated_hours: float
    wall_s: float
    cpu_s_per_seed: float
    sent: int
    stored: int
    failed: int
    unknown: int
    delivered: int
    tails: int
    primitives: int
    steps: int
    faults: dict[str, int]

    @property
    def good(self) -> bool:
        """Whether every seed kept every promise."""
        return not self.failing

    def table(self) -> Table:
        """For people."""
        table = Table(title=f"{self.seeds} seeds, {self.simulated_hours:.1f} simulated hours in {self.wall_s:.0f} s")
        table.add_column("what")
        table.add_column("how much", justify="right")
        for name in _SUMS:
            table.add_row(name, f"{getattr(self, name):,}")
        for kind, count in self.faults.items():
            table.add_row(f"fault: {kind}", f"{count:,}")
        for promise, count in self.verdicts.items():
            table.add_row(promise, "[green]holds" if not count else f"[red]broken by {count} seeds")
        table.add_row("CPU seconds per seed", f"{self.cpu_s_per_seed:.2f}")
        return table


class PlantReport(msgspec.Struct, kw_only=True):
    """Which seed caught a planted bug, and how."""

    name: str
    seed: int | None
    promise: str = ""
    sentence: str = ""
    seeds_needed: int = 0  # how many were run until one caught it

    @property
    def caught(self) -> bool:
        """Whether anything caught it."""
        return bool(self.promise)


class PlantsReport(msgspec.Struct, kw_only=True):
    """What came of all planted bugs."""

    plants: list[PlantReport]

    @property
    def good(self) -> bool:
        """Whether each was caught."""
        return all(plant.caught for plant in self.plants)

    def table(self) -> Table:
        """For people."""
        table = Table(
            "planted bug", "what it is", "patch point", "caught by", "seed", "seeds needed", "how", title="planted bugs"
        )
        for plant in self.plants:
            known, caught = PLANTS[plant.name], plant.promise if plant.caught else "[red]survives"
            seed, needed = ("", "") if plant.seed is None else (str(plant.seed), str(plant.seeds_needed))
            table.add_row(plant.name, known.what, known.where, caught, seed, needed, plant.sentence)
        return table


@contextmanager
def _no_collector() -> Iterator[None]:
    """A world keeps nearly all that it makes until its end: looking for garbage meanwhile is a tenth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_world(
    seed: int, plants: Sequence[str] = (), keep_trace: bool = False, bias: Bias | None = None
) -> World:  # fmt: skip
    """Run one seed's world to its end; with a bias, or with the one of the planted bugs."""
    with planted(plants) as wrap, _no_collector():
        world = World(make_plan(seed, bias=bias or bias_of(plants)), wrap, keep_trace)
        world.run()
    return world


def run_seed(seed: int, plants: Sequence[str] = (), bias: Bias | None = None) -> SeedReport:
    """Run one seed and let all checkers look at its history."""
    began = time.process_time()
    world = run_world(seed, plants, bias=bias)
    history = world.history
    verdicts = Counter(settled.verdict for settled in history.of(Settled))
    return SeedReport(
        seed=seed,
        trace=world.trace.digest(),
        violations=_violations(world),
        failures=world.failures,
        simulated_us=world.queue.now_us,
        cpu_s=time.process_time() - began,
        steps=world.trace.count,
        sent=len(history.of(Sent)),
        stored=verdicts[Verdict.STORED],
        failed=verdicts[Verdict.FAILED],
        unknown=verdicts[Verdict.UNKNOWN],
        delivered=len(history.of(Delivered)),
        tails=len(history.of(TailRead)),
        faults={**world.faults.counts, "frame": world.network.frames_spoilt},
        primitives=world.interrupts.primitives,
    )


def _violations(world: World) -> list[Violation]:
    """Everything that is wrong with a world that was run; first of all that it had to be given up."""
    found = [Violation("RUN", world.queue.now_us, world.endless)] if world.endless else []
    found += [violation for check in CHECKERS.values() for violation in check(world.history)]
    stored = sum(settled.verdict is Verdict.STORED for settled in world.history.of(Settled))
    if stored < ACKS_MIN:
        few = f"only {stored} batches were acked; a seed needs {ACKS_MIN} to show anything"
        found.append(Violation("RUN", world.queue.now_us, few))
    return found


def run_seeds(seeds: Sequence[int], jobs: int = 0, plants: Sequence[str] = ()) -> Iterable[SeedReport]:
    """Run many seeds on `jobs` processes (0: one per core); reports come as they are done."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1 or len(seeds) == 1:
        yield from map(partial(run_seed, plants=plants), seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting, left = {pool.submit(run_seed, seed, plants) for seed in seeds[: 4 * jobs]}, seeds[4 * jobs :]
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting |= {pool.submit(run_seed, seed, plants) for seed in left[: len(done)]}
            left = left[len(done) :]
            yield from (future.result() for future in done)


def summary(first: int, last: int, reports: Sequence[SeedReport], wall_s: float) -> RunReport:
    """All seeds in one report."""
    faults: Counter[str] = Counter()
    for report in reports:
        faults.update(report.faults)
    broken = Counter(p for report in reports for p in {violation.promise for violation in report.violations})
    return RunReport(
        first=first,
        last=last,
        seeds=len(reports),
        failing={report.seed: _first_violation(report) for report in reports if not report.holds},
        verdicts={promise: broken[promise] for promise in (*CHECKERS, "RUN")},
        simulated_hours=sum(report.simulated_us for report in reports) / 3.6e9,
        wall_s=wall_s,
        cpu_s_per_seed=sum(report.cpu_s for report in reports) / max(1, len(reports)),
        **{name: sum(getattr(report, name) for report in reports) for name in _SUMS},
        faults=dict(sorted(faults.items())),
    )  # fmt: skip


def story(seed: int, plants: Sequence[str] = ()) -> str:
    """Run a seed again and tell what happened around its first violation."""
    world = run_world(seed, plants, keep_trace=True)
    violations, steps = _violations(world), world.trace.steps
    if not violations:
        around = steps[-_STORY_BEFORE:]
        head = f"seed {seed}: every promise holds; its last steps:"
    else:
        first = violations[0] if world.endless else min(violations, key=lambda violation: violation.at)
        place = sum(step.at <= first.at for step in steps)
        around = steps[max(0, place - _STORY_BEFORE) : place + _STORY_AFTER]
        broken = [f"  {v.promise} at {v.at} us: {v.sentence}" for v in violations[:10]]
        head = "\n".join([f"seed {seed} breaks promises, {len(violations)} times:", *broken])
    lines = [f"  {step.at / 1e6:12.6f}  {step.who:<14} {step.what[:220]}" for step in around]
    return "\n".join([head, *lines, *world.failures, f"replay it: embarcadero sim --seeds {seed}:{seed + 1} --trace"])


def run_cli(first: int, last: int, *, jobs: int = 0, report: Path | None = None, json: bool = False,
            trace: bool = False, plants: bool = False) -> int:  # fmt: skip
    """`embarcadero sim`: run seeds, or the planted bugs. Returns the exit code."""
    console = Console(stderr=json)
    result = _run_plants(console, jobs) if plants else _run_seeds(console, first, last, jobs)
    encoded = msgspec.json.encode(result)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(msgspec.json.format(encoded, indent=2))
    if json:
        print(encoded.decode())
    else:
        console.print(result.table())
    if isinstance(result, RunReport):
        for seed in [*result.failing][:3] or ([first] if trace and last - first == 1 else []):
            console.print(story(seed), markup=False, highlight=False)
    return 0 if result.good else 1


def _run_seeds(console: Console, first: int, last: int, jobs: int) -> RunReport:
    began = time.monotonic()
    reports: list[SeedReport] = []
    with Watch(console, last - first) as watch:
        for report in run_seeds(range(first, last), jobs):
            reports.append(report)
            watch.seed_done(report.seed, report.steps, report.simulated_us, _first_violation(report))
    reports.sort(key=lambda report: report.seed)
    return summary(first, last, reports, time.monotonic() - began)


def _first_violation(report: SeedReport) -> str:
    """In words; empty if every promise holds."""
    return "" if report.holds else ": ".join(map(str, report.violations[0][::2]))


def _run_plants(console: Console, jobs: int) -> PlantsReport:
    result = PlantsReport(plants=[])
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("planted bugs", total=len(PLANTS))
        for plant in hunt_all(jobs):
            result.plants.append(plant)
            progress.update(task, advance=1, description=plant.name)
    return result


@lru_cache(maxsize=1_000)
def _holds(seed: int, bias: Bias | None) -> bool:
    """Whether a seed keeps every promise when nothing is planted; several plants may ask for the same one."""
    return run_seed(seed, bias=bias).holds


def hunt_all(jobs: int = 0, seeds: int = PLANT_SEEDS, names: Sequence[str] = ()) -> Iterable[PlantReport]:
    """Hunt planted bugs (all, if none is named), each in a process of its own."""
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(hunt, seeds=seeds), names or PLANTS)


def hunt(name: str, seeds: int = PLANT_SEEDS) -> PlantReport:
    """Run seeds with a planted bug until one breaks a promise: those known to catch it, then all others below `seeds`.

    A seed counts only if it keeps every promise without the bug. Some are looked for in small scopes instead.
    """
    plant, tried = PLANTS[name], 0
    if plant.scope:
        return _hunt_exhaustively(name, plant.scope)
    for seed in (*plant.witnesses, *(seed for seed in range(seeds) if seed not in plant.witnesses)):
        if plant.lanes and not make_plan(seed, bias=plant.bias).has_lanes:
            continue
        report = run_seed(seed, (name,))
        tried += 1
        if not report.holds and _holds(seed, plant.bias):
            first = report.violations[0]
            return PlantReport(
                name=name, seed=seed, promise=first.promise, sentence=first.sentence, seeds_needed=tried
            )  # fmt: skip
    return PlantReport(name=name, seed=None)


def _hunt_exhaustively(name: str, scope: str) -> PlantReport:
    """Look at all interleavings of a scope, without the bug and with it."""
    case, variant = CASES[scope], VARIANTS[name]
    found = explore_case(case, variant).wrong if explore_case(case).good else ""
    return PlantReport(name=name, seed=None, promise=found and f"exhaustive: {scope}", sentence=found)
