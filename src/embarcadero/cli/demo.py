"""demo: watch a private cluster at work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embarcadero.cli.output import Json


def demo(
    brokers: Annotated[int, typer.Option(help="How many brokers the first act has.")] = 4,
    seconds: Annotated[float, typer.Option(help="How long the first act publishes.")] = 8.0,
    steps: Annotated[int, typer.Option(min=20, help="How long the second act's shop is open, in its minutes.")] = 100,
    report: Annotated[Path, typer.Option(help="Where the page with pictures goes.")] = Path("build/demo/report.html"),
    json: Json = False,
) -> None:
    """Watch a private cluster at work, and then a whole data pipeline on Spark; processes are killed on the way.

    First act: durable publishers; a broker is killed, then the sequencer, then everything; one order for all readers.
    Second act: a shop's orders through a streaming query into a table, under the same kills, with SQL and an audit at
    the end; a page tells it with pictures. How long acks paused when the sequencer was killed is told in both.

    Example:

        embarcadero demo --seconds 20 --steps 240
    """
    from embarcadero.demo.screen import run_cli

    raise typer.Exit(run_cli(brokers, seconds, steps, report, json))
