"""The scopes, their sizes, and the steps that are left out on purpose: each of these must have a counterexample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from embarcadero_proof.bugs.table import injected
from embarcadero_proof.sim.exhaustive.actor import Leak
from embarcadero_proof.sim.exhaustive.explore import Explorer, Found, Placement, Scope
from embarcadero_proof.sim.exhaustive.ring import ring_scope
from embarcadero_proof.sim.exhaustive.seal import seal_scope
from embarcadero_proof.sim.exhaustive.takeover import (
    ack_scope,
    answers_scope,
    prefetched_scope,
    read_scope,
    rivals_scope,
)
from embarcadero_proof.sim.exhaustive.writes import commit_scope, routed_scope, sweep_scope
from embarcadero_proof.sim.pool import worker_pool

_SLOTS, _FRONTIER = 256, 128
"""Offsets of the slots and of the frontier in a ring, in bytes."""


class Case(NamedTuple):
    """A scope of one size, in one placement."""

    name: str
    scope: Callable[[], Scope]
    placement: Placement
    small: bool = True  # fast enough for every run of the tests


def _ring() -> Scope:
    return ring_scope(3, 2)


def _slices() -> Scope:
    return ring_scope(4, 2, 2)


def _long_ring() -> Scope:
    return ring_scope(5, 2)


def _seal() -> Scope:
    return seal_scope(1, 2, 1)


def _seal_twice() -> Scope:
    return seal_scope(2, 2, 1)


def _seal_both() -> Scope:
    return seal_scope(1, 2, 2)


def _ack() -> Scope:
    return ack_scope(1)


def _read() -> Scope:
    return read_scope(1)


def _prefetched() -> Scope:
    return prefetched_scope(1)


def _answers() -> Scope:
    return answers_scope(1)


_ONE_3, _THREE, _OLD_WITH_BROKER = Placement((0, 0, 0)), Placement((0, 1, 2)), Placement((0, 1, 0))
CASES: Final = {
    case.name: case
    for case in (
        Case("ring", _ring, Placement((0, 1))),
        Case("ring, torn", _ring, Placement((0, 1), tear=True)),
        Case("ring, fetches", _ring, Placement((0, 1), fetch=True)),
        Case("ring, one host", _ring, Placement((0, 0))),
        Case("ring, one host, torn", _ring, Placement((0, 0), tear=True), small=False),
        Case("ring of slices", _slices, Placement((0, 1), tear=True)),
        Case("ring of slices, one host", _slices, Placement((0, 0))),
        Case("long ring", _long_ring, Placement((0, 1), tear=True), small=False),
        Case("long ring, one host", _long_ring, Placement((0, 0)), small=False),
        Case("seal", _seal, Placement((0, 1, 2, 3)), small=False),
        Case("seal, one host", _seal, Placement((0, 0, 0, 0))),
        Case("seal, both count", _seal_both, Placement((0, 0, 0, 0)), small=False),
        Case("seal, two entries", _seal_twice, Placement((0, 0, 0, 0)), small=False),
        Case("ack", _ack, _THREE, small=False),
        Case("ack, one host", _ack, _ONE_3, small=False),
        Case("ack, old with broker", _ack, _OLD_WITH_BROKER, small=False),
        Case("read", _read, _THREE, small=False),
        Case("read, one host", _read, _ONE_3, small=False),
        Case("prefetched", _prefetched, _THREE, small=False),
        Case("prefetched, one host", _prefetched, _ONE_3, small=False),
        Case("answers", _answers, _THREE, small=False),
        Case("answers, one host", _answers, _ONE_3, small=False),
        Case("rivals", rivals_scope, _THREE, small=False),
        Case("commit", commit_scope, _ONE_3),
        Case("sweep", sweep_scope, _ONE_3),
        Case("routed", routed_scope, _ONE_3, small=False),
    )
}


class Variant(NamedTuple):
    """A step left out: by a leak, in an actor's own code, or by an injected bug of role code."""

    name: str
    case: str
    leak: Leak | None = None
    left_out: str = ""
    bug: str = ""
    small: bool = True


VARIANTS: Final = {
    variant.name: variant
    for variant in (
        Variant("entries not flushed", "ring", Leak("writer", "flush", "ring", _SLOTS)),
        Variant("frontier not flushed", "ring", Leak("writer", "flush", "ring", _FRONTIER, _SLOTS)),
        Variant("entries not invalidated", "ring", Leak("reader", "invalidate", "ring", _SLOTS)),
        Variant("frontier not invalidated", "ring", Leak("reader", "invalidate", "ring", _FRONTIER, _SLOTS)),
        Variant("read frontier not flushed", "ring", Leak("reader", "flush", "read")),
        Variant("read frontier not invalidated", "ring", Leak("writer", "invalidate", "read")),
        Variant("frontier before entries", "ring", left_out="entries before the frontier"),
        Variant("frontier before entries, one host", "ring, one host", left_out="entries before the frontier"),
        Variant("slots reused early", "ring", left_out="waiting for space"),
        Variant("slots reused early, one host", "ring, one host", left_out="waiting for space"),
        Variant("freed before read", "ring, one host", left_out="reading before freeing"),
        Variant("seal-at-frontier", "seal, one host", bug="seal-at-frontier"),
        Variant("range-not-rechecked", "seal, one host", bug="range-not-rechecked"),
        Variant("closing-not-fenced", "seal, one host", bug="closing-not-fenced"),
        Variant("closing-said-late", "seal, one host", bug="closing-said-late"),
        Variant("durable-before-sync", "seal, one host", bug="durable-before-sync"),
        Variant("epoch-opened-late", "ack", bug="epoch-opened-late", small=False),
        Variant("epoch-not-fenced", "ack, one host", bug="epoch-not-fenced", small=False),
        Variant("epoch-checked-first", "ack", bug="epoch-checked-first", small=False),
        Variant("epoch-not-checked", "ack", bug="epoch-not-checked", small=False),
        Variant("ordered-end-from-frontier", "ack", bug="ordered-end-from-frontier", small=False),
        Variant("results-before-entries", "ack", bug="results-before-entries", small=False),
        Variant("epoch checked before reading", "read", left_out="entries before the epoch", small=False),
        Variant("foreseen-is-the-end", "prefetched, one host", bug="foreseen-is-the-end", small=False),
        Variant("published-before-decided", "commit", bug="published-before-decided"),
        Variant("decided-before-manifest", "commit", bug="decided-before-manifest"),
        Variant("published-before-durable", "commit", bug="published-before-durable"),
        Variant("done-before-published", "commit", bug="done-before-published"),
        Variant("newer-manifest-published", "commit", bug="newer-manifest-published"),
        Variant("sweep-drops-decided", "sweep", bug="sweep-drops-decided"),
        Variant("answers-not-repeated", "answers", bug="answers-not-repeated", small=False),
        Variant("takeover-reads-forwards", "answers, one host", bug="takeover-reads-forwards", small=False),
    )
}


class CaseReport(msgspec.Struct, kw_only=True):
    """Results of one case, or of one step left out."""

    name: str
    placement: str
    left_out: str
    states: int
    steps: int
    depth: int
    cpu_s: float
    wrong: str
    story: list[str]

    @property
    def good(self) -> bool:
        """Whether it holds; with a step left out, whether it does not."""
        return bool(self.wrong) == bool(self.left_out)


class ExhaustiveReport(msgspec.Struct, kw_only=True):
    """Results of all cases."""

    cases: list[CaseReport]

    @property
    def good(self) -> bool:
        """Whether every case holds, and every step is needed."""
        return all(case.good for case in self.cases)

    def table(self) -> Table:
        """A table for the terminal."""
        table = Table("scope", "memory", "left out", "states", "steps", "verdict", title="all interleavings")
        for case in self.cases:
            verdict = case.wrong or "holds"
            table.add_row(
                case.name, case.placement, case.left_out, f"{case.states:,}", f"{case.steps:,}",
                f"[green]{verdict}" if case.good else f"[red]{verdict}",
            )  # fmt: skip
        return table


def explore_case(case: Case, variant: Variant | None = None) -> CaseReport:
    """Explore one case, perhaps with a step left out."""
    began = time.process_time()
    leaks = [variant.leak] if variant is not None and variant.leak is not None else []
    left_out = frozenset([variant.left_out] if variant is not None and variant.left_out else [])
    with injected(*([variant.bug] if variant is not None and variant.bug else [])):
        found: Found = Explorer(case.scope(), case.placement, leaks, left_out).explore()
    return CaseReport(
        name=case.name, placement=case.placement.words, left_out="" if variant is None else variant.name,
        states=found.states, steps=found.steps, depth=found.depth, cpu_s=time.process_time() - began,
        wrong=found.wrong, story=list(found.story),
    )  # fmt: skip


def _jobs(small: bool) -> list[tuple[Case, Variant | None]]:
    """List all cases, then all steps left out; with `small` only the fast ones."""
    cases: list[tuple[Case, Variant | None]] = [(case, None) for case in CASES.values() if case.small or not small]
    left_out = [variant for variant in VARIANTS.values() if variant.small or not small]
    return [*cases, *((CASES[variant.case], variant) for variant in left_out)]


def explore_all(small: bool, jobs: int = 1) -> Iterator[CaseReport]:
    """Explore all cases on `jobs` processes (0: one per core); yield their reports in order."""
    todo = _jobs(small)
    if jobs == 1:
        yield from map(explore_case, *zip(*todo, strict=True))
        return
    with worker_pool(jobs) as pool:
        yield from pool.map(explore_case, *zip(*todo, strict=True))


def run_cli(*, jobs: int = 0, report: Path | None = None, json: bool = False, stories: bool = False) -> int:
    """Run `embarcadero-proof sim --exhaustive`. Returns the exit code."""
    console, result = Console(stderr=json), ExhaustiveReport(cases=[])
    for case in explore_all(small=False, jobs=jobs):
        result.cases.append(case)
        line = f"{case.name}, {case.left_out or 'unchanged'}: {case.wrong or 'holds'}"
        console.print(f"{line} ({case.states:,} states, {case.cpu_s:.0f} s)", highlight=False)
        if (stories and case.wrong) or not case.good:
            console.print("\n".join(f"    {line}" for line in case.story), markup=False, highlight=False)
    encoded = msgspec.json.encode(result)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_bytes(msgspec.json.format(encoded, indent=2))
    if json:
        print(encoded.decode())
    else:
        console.print(result.table())
    return 0 if result.good else 1
