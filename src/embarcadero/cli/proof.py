"""sim, bench, demo: how we know. The work is done in their own packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embarcadero.cli.output import Json
from embarcadero.errors import BadValue

Report = Annotated[Path | None, typer.Option(show_default=False, help="Write a JSON report to this file.")]


def sim(
    seeds: Annotated[str, typer.Option(help="Seeds FIRST:LAST, the last one excluded; each is one world.")] = "0:100",
    report: Report = None,
    plants: Annotated[bool, typer.Option("--plants", help="Plant each known bug, and see that it is caught.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes. 0: one per core.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Tell the story of a single seed.")] = False,
    json: Json = False,
) -> None:
    """Simulate whole clusters: incoherent memory, crashes, a bad network. Same seed, same history.

    Examples:

        embarcadero sim --seeds 0:2000 --report build/sim.json

        embarcadero sim --seeds 17:18 --trace

        embarcadero sim --plants
    """
    first, last = _span(seeds)
    from embarcadero.sim.run import run_cli

    raise typer.Exit(run_cli(first, last, jobs=jobs, report=report, json=json, trace=trace, plants=plants))


def _span(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise BadValue(f"--seeds {text!r} is not a span", "use FIRST:LAST, such as 0:100")
    return int(first), int(last)


def bench(
    report: Report = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")] = False,
    stress: Annotated[
        bool, typer.Option("--stress", help="Instead: 10 GB out of order, and one stuck session beside others.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure publishing, as ratios to the raw limits of this machine.

    Examples:

        embarcadero bench --quick

        embarcadero bench --stress --report build/stress.json
    """
    from embarcadero.bench.run import run_cli

    raise typer.Exit(run_cli(report, quick, json, stress))


def demo(
    brokers: Annotated[int, typer.Option(help="How many brokers.")] = 4,
    seconds: Annotated[float, typer.Option(help="How long to publish.")] = 20.0,
    json: Json = False,
) -> None:
    """Watch a private cluster at work: publishers, a broker killed on the way, one order for all readers.

    Example:

        embarcadero demo --brokers 4 --seconds 20
    """
    from embarcadero.demo import run_cli

    raise typer.Exit(run_cli(brokers, seconds, json))
