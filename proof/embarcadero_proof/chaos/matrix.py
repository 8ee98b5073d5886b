"""`chaos matrix`: one case after the other, each on its own cluster; a report, plots and an index page."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from embarcadero.errors import EmbarcaderoError, NotAvailable
from embarcadero.node.local import ended_by_signals
from embarcadero_proof.chaos.case import Outcome, Performance
from embarcadero_proof.chaos.cases import CASES, Case
from embarcadero_proof.chaos.page import index_page
from embarcadero_proof.chaos.plots import draw_timeline
from embarcadero_proof.chaos.timeline import timeline
from embarcadero_proof.chaos.verdict import PROMISES, Judgement
from embarcadero_proof.machine import commit, machine_facts
from embarcadero_proof.sim.history import dump


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run."""

    cases: tuple[Case, ...] = CASES
    seconds: float = 8.0  # with faults, in each case
    seed: int = 0
    report: Path = Path("build/chaos/matrix.json")
    histories: bool = False  # keep all histories, not only those of failed cases


def run(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run all cases. The report is saved after each case, so Ctrl-C loses only the current one."""
    folder = settings.report.parent / settings.report.stem
    folder.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), list[dict[str, Any]]()
    task = progress.add_task("starting", total=len(settings.cases))
    result: dict[str, Any] = {}
    for case in settings.cases:
        progress.update(task, description=case.name)
        with tempfile.TemporaryDirectory(prefix="embarcadero-chaos-") as data_dir:
            outcome = _perform(case, Path(data_dir), settings)
            rows.append(_row(outcome, folder, Path(data_dir), settings.histories))
        progress.advance(task)
        result = _report(settings, rows, time.monotonic() - began)
        settings.report.write_text(json.dumps(result, indent=1) + "\n")
        settings.report.with_suffix(".html").write_text(index_page(result))
    return result


def _perform(case: Case, folder: Path, settings: Settings) -> Outcome:
    """Run one case. If it raises, that is its result, and the other cases continue."""
    try:
        return Performance(case, folder, settings.seconds, settings.seed).run()
    except (EmbarcaderoError, OSError) as error:
        return Outcome(case.name, case.words, judgement=Judgement(problems=[f"{type(error).__name__}: {error}"]))


def _row(outcome: Outcome, folder: Path, data_dir: Path, keep: bool) -> dict[str, Any]:
    """Return a case as a row of the report. For a failed case, keep history and logs."""
    found = outcome.judgement
    if keep or not found.good:
        (folder / f"{outcome.case}.jsonl").write_bytes(dump(outcome.history))
    if not found.good:
        logs = sorted((data_dir / "logs").glob("*.log"))
        (folder / f"{outcome.case}.log").write_text("".join(f"--- {p.name}\n{p.read_text()}\n" for p in logs))
    row = {"case": outcome.case, "words": outcome.words, "good": found.good, "kills": outcome.kills,
           "seconds": outcome.seconds, **asdict(found)}  # fmt: skip
    return {**row, "plot": _draw(outcome, folder)}


def _draw(outcome: Outcome, folder: Path) -> str:
    found, name = outcome.judgement, f"{outcome.case}.png"
    if not outcome.history:
        return ""
    verdict = "all promises kept" if found.good else f"{len(found.problems)} problems"
    try:
        draw_timeline(
            timeline(outcome.history), f"{outcome.case}: {outcome.words}", f"{verdict}; {found.acked:,} batches acked",
            found.good, folder / name,
        )  # fmt: skip
    except NotAvailable:
        return ""
    return f"{folder.name}/{name}"


def _report(settings: Settings, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    names = " ".join(f"--case {case.name}" for case in settings.cases) if settings.cases != CASES else ""
    options = f"--seconds {settings.seconds:g} --seed {settings.seed} {names}".strip()
    return {
        "command": f"embarcadero-proof chaos matrix {options}",
        "commit": commit(),
        "machine": machine_facts(),
        "good": all(row["good"] for row in rows),
        "kills": sum(row["kills"] for row in rows),
        "acked": sum(row["acked"] for row in rows),
        "delivered": sum(row["delivered"] for row in rows),
        "faults": _summed(row["faults"] for row in rows),
        "promises": _summed(row["promises"] for row in rows),
        "seconds": round(seconds, 1),
        "cases": rows,
    }


def _summed(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            total[name] = total.get(name, 0) + count
    return total


def run_cli(settings: Settings, json_out: bool) -> int:
    """Run, print a table, save; return 0 when every case kept every promise under enough load."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ended_by_signals(), Progress(*columns, console=console) as bar:
        result = run(settings, bar)
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        _print(Console(), result, settings.report)
    return 0 if result["good"] else 1


def _print(console: Console, result: dict[str, Any], path: Path) -> None:
    table = Table(Column("case", no_wrap=True), Column("", no_wrap=True), *PROMISES, "faults", "kill -9", "acked",
                  box=None, pad_edge=False)  # fmt: skip
    for row in result["cases"]:
        kept = ["[green]ok[/]" if not row["promises"].get(p) else f"[red]{row['promises'][p]}[/]" for p in PROMISES]
        verdict = "[green]good[/]" if row["good"] else "[bold red]BAD[/]"
        faults = str(sum(row["faults"].values()))
        table.add_row(row["case"], verdict, *kept, faults, str(row["kills"]), f"{row['acked']:,}")
    console.print(table)
    for row in result["cases"]:
        for problem in row["problems"][:5]:
            console.print(f"[red]{row['case']}: {problem}[/]", highlight=False)
    good = sum(row["good"] for row in result["cases"])
    console.print(
        f"{good} of {len(result['cases'])} cases kept all promises; {result['kills']:,} processes killed, "
        f"{result['acked']:,} batches acked, {result['seconds']:,.0f} s; see {path.with_suffix('.html')}"
    )


def list_cli(json_out: bool) -> None:
    """Print the names and descriptions of the cases."""
    if json_out:
        print(json.dumps([{"case": case.name, "words": case.words} for case in CASES]))  # noqa: T201
        return
    table = Table(Column("case", no_wrap=True), "what happens", box=None, pad_edge=False)
    for case in CASES:
        table.add_row(case.name, case.words)
    Console().print(table)
