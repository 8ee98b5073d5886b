"""Run the demo, and show its second act in a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embarcadero.demo import durable
from embarcadero.errors import NotAvailable

if TYPE_CHECKING:
    from embarcadero.demo.pipeline import Pipeline  # the extra `spark` may be missing

    Act = Callable[[Path, int, Callable[[Pipeline], None]], Pipeline]
_REPORT_EVERY_S: Final = 5.0


def run_cli(brokers: int, seconds: float, steps: int, report: Path, json_out: bool) -> int:
    """Run both acts; return 0 if every promise held. Without Spark or Java, report that and run only the first act."""
    first = durable.run_cli(brokers, seconds, json_out)
    console = Console(stderr=json_out)
    try:
        pipeline = _second_act(console, steps, report)
    except NotAvailable as missing:
        why = f"{escape(missing.message)}\n{escape(missing.hint)}"  # [spark] is not a style
        console.print(f"\n[yellow]The demo skips the pipeline on Spark:[/] {why}", soft_wrap=True)
        return first
    return first or _show(console, pipeline, report, json_out)


def run_act(act: Act, steps: int, report: Path, json_out: bool) -> int:
    """Run one act of the pipeline; return 0 if every promise held. Raise NotAvailable without Spark or Java."""
    console = Console(stderr=json_out)
    _check_spark()
    return _show(console, _watched(console, act, steps, report), report, json_out)


def _show(console: Console, pipeline: Pipeline, report: Path, json_out: bool) -> int:
    facts = pipeline.facts
    if json_out:
        checks = [{"what": check.what, "holds": check.holds, "found": check.detail} for check in facts.checks]
        shown: dict[str, Any] = {"ok": facts.holds, "seconds": round(facts.seconds, 1), "report": str(report)}
        print(json.dumps(shown | {"figures": facts.cards, "checks": checks}))  # noqa: T201 - asked for
    else:
        _summary(console, pipeline, report)
    return 0 if facts.holds else 1


def _check_spark() -> None:
    from embarcadero.spark.processes import find_java
    from embarcadero.spark.versions import check_pyspark

    check_pyspark()
    find_java()


def _second_act(console: Console, steps: int, report: Path) -> Pipeline:
    _check_spark()
    from embarcadero.demo.pipeline import run_here

    console.print("\n[bold]Second act:[/] the data pipeline. A cluster and Spark start; this takes a few seconds ...")
    return _watched(console, run_here, steps, report)


def _watched(console: Console, act: Act, steps: int, report: Path) -> Pipeline:
    if not console.is_terminal:
        return _plainly(console, act, steps, report)
    with Live(console=console, refresh_per_second=8) as live:
        return act(report, steps, lambda pipeline: live.update(_screen(pipeline)))


def _plainly(console: Console, act: Act, steps: int, report: Path) -> Pipeline:
    """Without a terminal: print the story as it happens, and a progress line every few seconds."""
    shown, last = 0, time.monotonic()

    def watch(pipeline: Pipeline) -> None:
        nonlocal shown, last
        while shown < len(pipeline.facts.story):
            moment, line = pipeline.facts.story[shown]
            console.print(f"{moment:5.1f} s  {line}", markup=False, soft_wrap=True)
            shown += 1
        if time.monotonic() - last > _REPORT_EVERY_S:
            last = time.monotonic()
            console.print(f"{pipeline.elapsed:5.1f} s  {_progress(pipeline)}")

    pipeline = act(report, steps, watch)
    watch(pipeline)
    return pipeline


def _progress(pipeline: Pipeline) -> str:
    return (
        f"{pipeline.phase}: {pipeline.published:,} orders published, {pipeline.aggregated:,} aggregated, "
        f"{pipeline.tiered_files} files in the table"
    )


def _screen(pipeline: Pipeline) -> Panel:
    from embarcadero.demo.pipeline import ORDERS_A_STEP

    whole = pipeline.steps * ORDERS_A_STEP
    latest = pipeline.facts.samples[-1] if pipeline.facts.samples else None
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("published", pipeline.published),
        ("aggregated by Spark", pipeline.aggregated),
        ("in the table", 0 if latest is None else latest.tiered),
        ("only in the table", 0 if latest is None else latest.released),
    ):
        table.add_row(name, ProgressBar(total=whole, completed=min(value, whole), width=44), f"{value:,}")
    story = [Text(f"{moment:5.1f} s  {line}") for moment, line in pipeline.facts.story[-7:]]
    return Panel(Group(table, Text(), *story), title=f"Embarcadero and Spark: {pipeline.phase}")


def _summary(console: Console, pipeline: Pipeline, report: Path) -> None:
    facts = pipeline.facts
    table = Table(title="Checks", title_justify="left", box=None, pad_edge=False)
    for column in ("", "check", "result"):
        table.add_column(column)
    for check in facts.checks:
        style = "green" if check.holds else "bold red"
        table.add_row(Text("yes" if check.holds else "NO", style=style), Text(check.what), Text(check.detail))
    console.print(table)
    if facts.holds:
        console.print(
            f"\n[bold green]All promises held[/], from publisher to table, in {facts.seconds:.0f} s: "
            f"{facts.cards['orders and payments']} records, each once."
        )
    else:
        console.print("\n[bold red]A promise did not hold.[/]")
    console.print(f"The report, with pictures: [bold]{escape(str(report.resolve()))}[/]", soft_wrap=True)
    console.print("Next: [bold]embarcadero up[/], then [bold]embarcadero --help[/]. The tour is in README.md.")
