"""`fuzz`: all targets, each in its own process, some in parallel; a table, a report, and findings as files."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec

from embarcadero.errors import BadValue
from embarcadero_proof.fuzz.campaign import Tally
from embarcadero_proof.fuzz.guard import judge, watched
from embarcadero_proof.fuzz.scratch import new_folder
from embarcadero_proof.fuzz.target import Target
from embarcadero_proof.fuzz.targets import TARGETS
from embarcadero_proof.fuzz.worker import Worker
from embarcadero_proof.machine import commit

COLUMNS: Final = ("target", "inputs", "/s", "/cpu s", "refused", "answers", "MiB", "found")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run. It needs `inputs` or `seconds` to end."""

    targets: tuple[str, ...] = ()
    inputs: int | None = None
    seconds: float | None = None
    seed: str = "0"
    jobs: int = 0


def chosen(names: tuple[str, ...]) -> list[Target]:
    """Return the targets of these names; all without names."""
    if unknown := [name for name in names if name not in TARGETS]:
        raise BadValue(f"there is no target {', '.join(unknown)}", f"targets are {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names or TARGETS]


def run(settings: Settings, folder: Path) -> list[Tally]:
    """Run targets; findings are saved below a folder, and printed immediately."""
    waiting = deque(chosen(settings.targets))
    jobs = settings.jobs or len(os.sched_getaffinity(0))
    working: list[Worker] = []
    tallies: dict[str, Tally] = {}
    with new_folder() as scratch:
        try:
            while waiting or working:
                while waiting and len(working) < jobs:
                    target = waiting.popleft()
                    working.append(Worker(target, settings.seed, settings.inputs, settings.seconds, Path(scratch)))
                for worker in [worker for worker in working if worker.poll()]:
                    working.remove(worker)
                    tallies[worker.target.name] = worker.tally
                    _save(worker.tally, folder)
                    _print(worker.tally)
        finally:
            for worker in working:
                worker.stop()
    return [tallies[target.name] for target in chosen(settings.targets)]


def _save(tally: Tally, folder: Path) -> None:
    for found in tally.findings:
        path = folder / tally.target / f"{found.kind}-{hashlib.sha256(found.data).hexdigest()[:12]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.data)
        found.command = f"embarcadero-proof fuzz --target {tally.target} --input {path}"


def _print(tally: Tally) -> None:
    """Print a line for each finished target, and its findings, on standard error."""
    lines = [f"{tally.target}: {tally.inputs} inputs, {tally.per_s:,.0f} a second"]
    for found in tally.findings:
        lines.append(f"  {found.kind} at {found.where or '?'} ({found.times} times): {found.outcome}")
        lines.append(f"  run again: {found.command}")
    sys.stderr.write("\n".join(lines) + "\n")


def again(name: str, path: Path) -> int:
    """Run one saved input, and print the details of its result."""
    (target,) = chosen((name,))
    with watched():
        verdict = judge(target, path.read_bytes())
    sys.stdout.write(f"{verdict.kind}: {verdict.outcome}\n{verdict.story}".rstrip() + "\n")
    return int(verdict.finding)


def rows(tallies: list[Tally]) -> list[list[object]]:
    """Return tallies as a table of COLUMNS."""
    return [
        [t.target, f"{t.inputs:,}", f"{t.per_s:,.0f}", f"{t.per_cpu_s:,.0f}", f"{t.refused:,}", t.answers,
         f"{t.peak_bytes / (1 << 20):.1f}", len(t.findings)]
        for t in tallies
    ]  # fmt: skip


def report(settings: Settings, tallies: list[Tally], seconds: float) -> dict[str, Any]:
    """Return everything about a run, for a file."""
    facts = []
    for tally in tallies:
        tally_facts = msgspec.to_builtins(tally) | {
            "per_s": round(tally.per_s, 1),
            "per_cpu_s": round(tally.per_cpu_s, 1),
        }
        for found in tally_facts["findings"]:
            found["bytes"] = len(found.pop("data")) * 3 // 4
        facts.append(tally_facts)
    return {
        "what": "fuzz", "commit": commit(), "command": " ".join(["embarcadero", *sys.argv[1:]]), "seed": settings.seed,
        "seconds": round(seconds, 1), "inputs": sum(t.inputs for t in tallies),
        "findings": sum(len(t.findings) for t in tallies),
        "verdict": "failed" if any(t.findings for t in tallies) else "passed", "targets": facts,
    }  # fmt: skip


def run_cli(settings: Settings, path: Path, show: Any) -> int:
    """Run, write the report, show it; return 1 if there are findings."""
    began = time.monotonic()
    tallies = run(settings, path.parent)
    result = report(settings, tallies, time.monotonic() - began)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    show(result, rows(tallies))
    return int(result["verdict"] != "passed")
