"""Run seeds: one, or thousands on all cores; reports, and the story of a seed that failed."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from embarcadero_proof.bugs.bug import ROLE
from embarcadero_proof.bugs.table import BUGS, bias_of, injected
from embarcadero_proof.sim.checkers import CHECKERS
from embarcadero_proof.sim.checkers.ledger import Violation
from embarcadero_proof.sim.durable import Bias
from embarcadero_proof.sim.exhaustive.scopes import CASES, VARIANTS, explore_case
from embarcadero_proof.sim.history import Copies, Delivered, History, RoleFailed, Sent, Settled, TailRead, Verdict
from embarcadero_proof.sim.plan import Plan, make_plan
from embarcadero_proof.sim.pool import worker_pool
from embarcadero_proof.sim.record import Record, code_version, load, newest
from embarcadero_proof.sim.reports import RunReport, SeedReport, acks_in_trouble, summary, unread
from embarcadero_proof.sim.shrink import TRIES, Outcome, Shrinker, left_out
from embarcadero_proof.sim.transcript import transcript
from embarcadero_proof.sim.watch import Watch
from embarcadero_proof.sim.world import ACKS_MIN, World

BUG_SEEDS = 200
"""An injected bug has to be caught within this many seeds."""

_STORY_BEFORE, _STORY_AFTER = 60, 5


class BugReport(msgspec.Struct, kw_only=True):
    """Which seed caught an injected bug, and how."""

    name: str
    seed: int | None
    promise: str = ""  # the checkers that must catch the bug, and did
    sentence: str = ""
    seeds_needed: int = 0  # number of runs until a seed caught it
    broken: dict[str, int] = {}  # violations of that seed by checker; if no seed caught it, of the first with any

    @property
    def caught(self) -> bool:
        """Whether every checker that must catch the bug did."""
        return bool(self.promise)

    @property
    def verdict(self) -> str:
        """The result in words."""
        others = ", ".join(self.broken)
        if not self.caught:
            return f"[red]caught only by {others}" if others else "[red]not caught"
        return self.promise if self.promise == others or not others else f"{self.promise} (all: {others})"


class BugsReport(msgspec.Struct, kw_only=True):
    """Results of all injected bugs."""

    bugs: list[BugReport]

    @property
    def good(self) -> bool:
        """Whether each bug was caught by the right checkers, and no checker is superfluous."""
        return all(bug.caught for bug in self.bugs) and not self.idle

    @property
    def idle(self) -> list[str]:
        """Promises whose checkers could be turned off while every bug is still noticed."""
        alone = {promise for bug in self.bugs if len(bug.broken) == 1 for promise in bug.broken}
        return [promise for promise in CHECKERS if promise not in alone]

    def table(self) -> Table:
        """A table for the terminal."""
        idle = f"no bug is noticed only by the checkers of {', '.join(self.idle)}" if self.idle else None
        table = Table("injected bug", "description", "patch point", "caught by", "seed", "seeds needed", "violation",
                      title="injected bugs", caption=idle)  # fmt: skip
        for bug in self.bugs:
            known = BUGS[bug.name]
            seed, needed = ("", "") if bug.seed is None else (str(bug.seed), str(bug.seeds_needed))
            table.add_row(bug.name, known.what, known.where, bug.verdict, seed, needed, bug.sentence)
        return table


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector, which takes a tenth of the time: a run keeps nearly all objects until its end.

    The same holds for its checkers. The caller drops the run before the collector is on again, which visits it once.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_world(
    seed: int, bugs: Sequence[str] = (), keep_trace: bool = False, bias: Bias | None = None, swarm: bool = True
) -> World:  # fmt: skip
    """Run one seed to its end. With a bias, or with injected bugs and their bias, it has no swarm."""
    plan = make_plan(seed, bias=bias or bias_of(bugs), swarm=swarm and not bugs)
    return run_plan(plan, bugs, keep_trace)


def run_plan(plan: Plan, bugs: Sequence[str] = (), keep_trace: bool = False) -> World:
    """Run a plan."""
    with injected(*bugs) as wrap, _no_collector():
        world = World(plan, wrap, keep_trace)
        world.run()
    return world


@_no_collector()
def run_seed(seed: int, bugs: Sequence[str] = (), bias: Bias | None = None, swarm: bool = True) -> SeedReport:
    """Run one seed and give its history to all checkers."""
    began = time.process_time()
    world = run_world(seed, bugs, bias=bias, swarm=swarm)
    history = world.history
    verdicts = Counter(settled.verdict for settled in history.of(Settled))
    return SeedReport(
        seed=seed,
        trace=world.trace.digest(),
        violations=_violations(world),
        failures=world.failures,
        simulated_us=world.queue.now_us,
        cpu_s=time.process_time() - began,
        events=world.queue.done,
        sent=len(history.of(Sent)),
        stored=verdicts[Verdict.STORED],
        failed=verdicts[Verdict.FAILED],
        unknown=verdicts[Verdict.UNKNOWN],
        delivered=len(history.of(Delivered)),
        tails=len(history.of(TailRead)),
        faults={**world.faults.counts, "frame": world.network.frames_spoilt},
        primitives=world.interrupts.primitives,
        rest_us=world.rest.taken_us,
        durable=bool(history.of(Copies)),
        stored_in_trouble=acks_in_trouble(history),
    )


def _violations(world: World) -> list[Violation]:
    """List all violations of a finished run, first that it had to be given up."""
    found = [Violation("RUN", world.queue.now_us, world.endless)] if world.endless else []
    found += [violation for check in CHECKERS.values() for violation in check(world.history)]
    stored = sum(settled.verdict is Verdict.STORED for settled in world.history.of(Settled))
    if stored < ACKS_MIN:
        few = f"only {stored} batches were acked; a seed needs {ACKS_MIN} to show anything"
        found.append(Violation("RUN", world.queue.now_us, few))
    return found + unread(world.history)


def run_seeds(seeds: Sequence[int], jobs: int = 0, swarm: bool = True) -> Iterable[SeedReport]:
    """Run many seeds on `jobs` processes (0: one per core); yield reports as seeds finish."""
    jobs, run = jobs or os.cpu_count() or 1, partial(run_seed, swarm=swarm)
    if jobs == 1 or len(seeds) == 1:
        yield from map(run, seeds)
        return
    with worker_pool(jobs) as pool:
        waiting, left = {pool.submit(run, seed) for seed in seeds[: 2 * jobs]}, seeds[2 * jobs :]
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                waiting |= {pool.submit(run, seed) for seed in left[: len(done)]}
                left = left[len(done) :]
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def story(seed: int, bugs: Sequence[str] = ()) -> str:
    """Run a seed again and describe the steps around its first violation."""
    world = run_world(seed, bugs, keep_trace=True)
    violations, steps = _violations(world), world.trace.steps
    if not violations:
        around = steps[-_STORY_BEFORE:]
        head = f"seed {seed}: every promise holds; its last steps:"
    else:
        first = violations[0] if world.endless else min(violations, key=lambda violation: violation.at)
        position = sum(step.at <= first.at for step in steps)
        around = steps[max(0, position - _STORY_BEFORE) : position + _STORY_AFTER]
        broken = [f"  {v.promise} at {v.at} us: {v.sentence}" for v in violations[:10]]
        head = "\n".join([f"seed {seed} breaks promises, {len(violations)} times:", *broken])
    lines = [f"  {step.at / 1e6:12.6f}  {step.who:<14} {step.what[:220]}" for step in around]
    replay = f"replay it: embarcadero-proof sim --seeds {seed}:{seed + 1} --trace"
    return "\n".join([head, *lines, *world.failures, replay])


def shrink(
    seed: int, bugs: Sequence[str] = (), tries: int = TRIES, progress: Callable[[str], None] = lambda _line: None
) -> tuple[Shrinker | None, str]:
    """Make a failing run as small as possible, and return its story; None if every promise holds."""
    bias, swarm = bias_of(bugs), not bugs

    def run(plan: Plan) -> Outcome:
        world = run_plan(plan, bugs)
        return Outcome(_violations(world), tuple(world.faults.happened), world.faults.numbered)

    first = run(make_plan(seed, bias=bias, swarm=swarm))
    if not first.violations:
        return None, f"seed {seed}: every promise holds"
    shrinker = Shrinker(seed, first, run, bias, swarm, tries, progress)
    shrinker.shrink()
    world = run_plan(shrinker.plan(shrinker.cuts), bugs, keep_trace=True)
    broken = [v for v in _violations(world) if v.promise == shrinker.promise]
    title = f"seed {seed}, {first.faults} faults at first, made smaller in {shrinker.tries} tries, without: "
    return shrinker, transcript(world, broken, title + (", ".join(left_out(shrinker.cuts)) or "nothing"))


def _shrink_all(console: Console, first: int, last: int) -> int:
    """Run `--shrink`: print the smallest story of each failing seed. Returns the exit code."""
    code, stderr = 0, Console(stderr=True)
    for seed in range(first, last):
        shrinker, text = shrink(seed, progress=lambda line: stderr.print(line, markup=False, highlight=False))
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        code = code if shrinker is None else 1
    return code


def run_cli(first: int, last: int, *, jobs: int = 0, report: Path | None = None, json: bool = False,
            trace: bool = False, bugs: bool = False, results: Path | None = None,
            show: Path | None = None, smaller: bool = False) -> int:  # fmt: skip
    """Run `embarcadero-proof sim`: seeds, injected bugs, or a recorded report. Returns the exit code."""
    console = Console(stderr=json)
    if smaller:
        return _shrink_all(console, first, last)
    result: RunReport | BugsReport
    if show is not None:
        result = summary(sorted(load(newest(show)), key=lambda report: report.seed), 0.0)
    else:
        result = _run_bugs(console, jobs) if bugs else _run_seeds(console, first, last, jobs, results)
    encoded = msgspec.json.encode(result)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(msgspec.json.format(encoded, indent=2))
    if json:
        print(encoded.decode())
    else:
        console.print(result.table())
    if isinstance(result, RunReport) and show is None:
        for seed in [*result.failing][:3] or ([first] if trace and last - first == 1 else []):
            console.print(story(seed), markup=False, highlight=False)
    return 0 if result.good else 1


def _run_seeds(console: Console, first: int, last: int, jobs: int, results: Path | None) -> RunReport:
    """Run the seeds that have no result yet, and record each result immediately."""
    began = time.monotonic()
    record = Record(results, code_version()) if results is not None else None
    left: Sequence[int] = range(first, last) if record is None else record.missing(first, last)
    done: list[SeedReport] = []
    try:
        with Watch(console, last - first, last - first - len(left)) as watch:
            for report in run_seeds(left, jobs):
                done.append(report)
                if record is not None:
                    record.add(report)
                watch.seed_done(report.seed, report.events, report.simulated_us, report.first_violation)
    except KeyboardInterrupt:
        if record is None:
            raise
        console.print(f"stopped; {len(record.reports):,} seeds are recorded, run the same command again to continue")
    everything = sorted(done, key=lambda report: report.seed) if record is None else record.all()
    return summary(everything, time.monotonic() - began, " ".join(["embarcadero", *sys.argv[1:]]))


def _run_bugs(console: Console, jobs: int) -> BugsReport:
    result = BugsReport(bugs=[])
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("injected bugs", total=len(HUNTED))
        for bug in hunt_all(jobs):
            result.bugs.append(bug)
            progress.update(task, advance=1, description=bug.name)
    return result


@lru_cache(maxsize=1_000)
def _holds(seed: int, bias: Bias | None) -> bool:
    """Whether a seed keeps every promise without injected bugs; several bugs may need the same seed."""
    return run_seed(seed, bias=bias, swarm=False).holds


HUNTED: Final = [name for name, bug in BUGS.items() if bug.by or bug.scope]
"""Bugs that seeds or scopes catch. Unit tests catch the others."""


def hunt_all(jobs: int = 0, seeds: int = BUG_SEEDS, names: Sequence[str] = ()) -> Iterable[BugReport]:
    """Hunt injected bugs (default: all of HUNTED), each in a process of its own."""
    with worker_pool(jobs) as pool:
        yield from pool.map(partial(hunt, seeds=seeds), names or HUNTED)


def hunt(name: str, seeds: int = BUG_SEEDS) -> BugReport:
    """Run seeds with an injected bug until its checkers catch it: first its witnesses, then all others below `seeds`.

    A seed counts only if it keeps every promise without the bug. Some bugs are also searched for in small scopes, or
    only there.
    """
    bug, tried = BUGS[name], 0
    scoped = _hunt_exhaustively(name, bug.scope) if bug.scope else None
    if scoped is not None and not (scoped.caught and bug.by):
        return scoped
    missed = BugReport(name=name, seed=None)
    for seed in (*bug.witnesses, *(seed for seed in range(seeds) if seed not in bug.witnesses)):
        if bug.lanes and not make_plan(seed, bias=bug.bias, swarm=False).has_lanes:
            continue
        world = run_world(seed, (name,))
        found = caught_by(world.history, _violations(world))
        tried += 1
        if not found or not _holds(seed, bug.bias):
            continue
        broken = {checker: len(violations) for checker, violations in found.items()}
        if all(checker in found for checker in bug.checkers):
            sentence = found[bug.checkers[0]][0].sentence
            promise = bug.by if scoped is None else f"{bug.by}; {scoped.promise}"
            return BugReport(
                name=name, seed=seed, promise=promise, sentence=sentence, seeds_needed=tried, broken=broken
            )  # fmt: skip
        missed.broken = missed.broken or broken
    return missed


def caught_by(history: History, violations: list[Violation]) -> dict[str, list[Violation]]:
    """Group violations by checker. A failed role is counted separately from P8: the role noticed, not a checker."""
    failed = {f"{role.process} failed: {role.error}" for role in history.of(RoleFailed)}
    found: dict[str, list[Violation]] = {}
    for violation in violations:
        by_itself = violation.promise == "P8" and violation.sentence in failed
        found.setdefault(ROLE if by_itself else violation.promise, []).append(violation)
    return found


def _hunt_exhaustively(name: str, scope: str) -> BugReport:
    """Explore all interleavings of a scope, without the bug and with it."""
    case, variant = CASES[scope], VARIANTS[name]
    found = explore_case(case, variant).wrong if explore_case(case).good else ""
    return BugReport(name=name, seed=None, promise=found and f"exhaustive: {scope}", sentence=found)
