"""`embarcadero-proof bench`: all rows, trial after trial, so that compared figures are measured side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from embarcadero.errors import EmbarcaderoError, NotAvailable, invariant
from embarcadero_proof.lab import (
    durable,
    flat,
    idle,
    latency,
    mirror,
    plots,
    publish,
    read,
    records,
    recovery,
    report,
    sequencer,
    spark,
    stress,
    warm,
)
from embarcadero_proof.lab.processes import allow_many_files
from embarcadero_proof.lab.settings import FAMILIES, Settings
from embarcadero_proof.lab.trial import Announce, Trial

_WIDTH: Final = 100  # of the table where no width is known


class Family(NamedTuple):
    """Rows that are measured together. `share`: of the time of a trial, roughly. `once`: in the first trial only."""

    measure: Callable[[Settings, Trial, Announce], None]
    share: float
    once: bool = False


MEASURES: Final = {
    "publish": Family(publish.measure, 30),
    "read": Family(read.measure, 8),
    "send": Family(records.measure, 7),
    "latency": Family(latency.measure, 10),
    "sequencer": Family(sequencer.measure, 9),
    "mirror": Family(mirror.measure, 20),
    "idle": Family(idle.measure_idle, 13),
    "memory": Family(idle.measure_memory, 6),
    "flat": Family(flat.measure, 60, once=True),
    "durable": Family(durable.measure, 25),
    "warm": Family(warm.measure_warm, 15),
    "restart": Family(warm.measure_restart, 15),
    "recovery": Family(recovery.measure_recovery, 3),
    "spark": Family(spark.measure, 150),
    "stress": Family(stress.measure, 60),
}
invariant(tuple(MEASURES) == FAMILIES, "every family is measured, in its order")


def _plan(settings: Settings) -> list[tuple[int, str]]:
    """Return trial numbers and families, in the order of their measurement."""
    return [
        (number, name)
        for number in range(settings.trials)
        for name, family in MEASURES.items()
        if settings.wants(name) and not (family.once and number)
    ]


def measure(settings: Settings, progress: Progress) -> list[Trial]:
    """Measure all rows, `trials` times. A family that fails is reported, and the others continue."""
    plan = _plan(settings)
    trials = [Trial(number) for number in range(settings.trials)]
    task = progress.add_task("starting", total=sum(MEASURES[name].share for _, name in plan))

    for number, name in plan:
        trial = trials[number]

        def announce(what: str, number: int = number) -> None:
            progress.update(task, description=f"trial {number + 1} of {settings.trials}: {what}")

        try:
            MEASURES[name].measure(settings, trial, announce)
        except NotAvailable as error:
            trial.missing |= {key: error.message for key in report.keys_of(settings, name) if key not in trial.values}
        except EmbarcaderoError as error:
            trial.failed[name] = error.message
        progress.advance(task, MEASURES[name].share)
    progress.update(task, description="done")
    return trials


def run_cli(settings: Settings, folder: Path, json_out: bool, with_plots: bool) -> int:
    """Measure, print tables, save a report with plots. Return 1 if a measurement failed."""
    allow_many_files()
    console, notes = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = _WIDTH
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes) as progress:
        trials = measure(settings, progress)
    result = report.build(settings, trials)
    saved = report.save(result, settings, trials, folder)
    if with_plots:
        try:
            saved += plots.draw(result, folder)
        except NotAvailable as error:
            notes.print(f"[yellow]{error.message}[/]; {error.hint}", soft_wrap=True)
    if json_out:
        print(json.dumps(result))  # noqa: T201 - requested
    else:
        for table in report.tables(result, settings):
            console.print(table)
    for complaint in report.complaints(result):
        notes.print(complaint, markup=False, style="yellow", soft_wrap=True)
    notes.print(f"saved in {folder}: {', '.join(path.name for path in saved)}", soft_wrap=True)
    return 1 if any(trial.failed for trial in trials) else 0
