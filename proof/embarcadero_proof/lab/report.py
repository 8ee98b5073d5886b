"""The results of a run: a table on the screen, and JSON, CSV and Markdown in a folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from embarcadero_proof.lab.rows import Row, rows_for
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.trial import Trial, summary
from embarcadero_proof.machine import commit, configuration, machine_facts

_VERDICTS = {"not available": "n/a"}
_STYLES = {"goal": "bold green", "holds": "green", "misses": "bold red", "failed": "bold red"}


def build(settings: Settings, trials: list[Trial]) -> dict[str, Any]:
    """Return the whole report as plain values."""
    return {
        "commit": commit(),
        "machine": machine_facts(),
        "configuration": configuration(),
        "settings": settings.as_dict(),
        "rows": [_row(row, trials) for row in rows_for(settings)],
        "trials": [trial.as_dict() for trial in trials],
    }


def _row(row: Row, trials: list[Trial]) -> dict[str, Any]:
    found = summary(trials, row.key)
    why = next((trial.missing[row.key] for trial in trials if row.key in trial.missing), "")
    failure = next((trial.failed[row.family] for trial in trials if row.family in trial.failed), "")
    verdict = row.verdict(found["median"]) if found else "not available" if why else "failed"
    return {
        "key": row.key, "family": row.family, "what": row.what, "unit": row.unit, "less_is_better": row.less,
        "at_least": row.at_least, "goal": row.goal, "verdict": verdict, "why": "" if found else why or failure,
        **(found or {"median": None, "min": None, "max": None}),
    }  # fmt: skip


def _paired(report: dict[str, Any], settings: Settings) -> Iterator[tuple[Row, dict[str, Any]]]:
    return zip(rows_for(settings), report["rows"], strict=True)


def save(report: dict[str, Any], settings: Settings, trials: list[Trial], folder: Path) -> list[Path]:
    """Write report.json, figures.csv and figures.md; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("report.json", "figures.csv", "figures.md")]
    paths[0].write_text(json.dumps(report, indent=2) + "\n")
    with paths[1].open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["key", "what", "unit", "median", "min", "max", "at_least", "goal", "verdict"]
        writer.writerow([*names, *(f"trial_{trial.number + 1}" for trial in trials)])
        for row in report["rows"]:
            writer.writerow([*(row[name] for name in names), *(trial.values.get(row["key"]) for trial in trials)])
    paths[2].write_text(_markdown(report, settings))
    return paths


def _cells(row: Row, found: dict[str, Any]) -> list[str]:
    return [row.what, *(row.show(found[name]) for name in ("median", "min", "max"))]


def _trials(settings: Settings) -> str:
    return f"{settings.trials} trial{'s' if settings.trials > 1 else ''}"


def _markdown(report: dict[str, Any], settings: Settings) -> str:
    """Return the figures as a table for the docs."""
    machine = report["machine"]
    about = f"Commit {report['commit']}, {machine['cores']} cores ({machine['cpu']}), Python {machine['python']},"
    lines = [
        f"{about} median and range of {_trials(settings)}.",
        "",
        "| what | median | from | to | at least | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, found in _paired(report, settings):
        cells = [*_cells(row, found), row.bound(row.at_least), row.bound(row.goal), found["verdict"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tables(report: dict[str, Any], settings: Settings) -> Iterator[Table]:
    """Yield rows with targets, then the other figures. Both tables fit 100 columns."""
    title = f"Embarcadero {report['commit']}, {report['machine']['cores']} cores, {_trials(settings)}"
    pairs = list(_paired(report, settings))
    if targets := [pair for pair in pairs if pair[0].at_least is not None]:
        table = _table(title, "at least", "goal", "")
        for number, (row, found) in enumerate(targets):
            verdict = Text(_VERDICTS.get(found["verdict"], found["verdict"]), _STYLES.get(found["verdict"], "yellow"))
            ends = number + 1 == len(targets) or targets[number + 1][0].family != row.family
            table.add_row(*_cells(row, found), row.bound(row.at_least), row.bound(row.goal), verdict, end_section=ends)
        yield table
    if plain := [pair for pair in pairs if pair[0].at_least is None]:
        table = _table("other figures")
        for row, found in plain:
            table.add_row(*_cells(row, found))
        yield table


def _table(title: str, *more: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    for column in ("median", "from", "to", *more):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def complaints(report: dict[str, Any]) -> list[str]:
    """Return the reasons why rows have no value, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in report["rows"]:
        if row["why"]:
            reasons.setdefault(f"{row['verdict']}: {row['why']}", []).append(row["what"])
    return [f"{reason} ({what[0]}{f', {len(what) - 1} more' if what[1:] else ''})" for reason, what in reasons.items()]


def keys_of(settings: Settings, family: str) -> list[str]:
    """Return the keys of a family's rows."""
    return [row.key for row in rows_for(settings) if row.family == family]
