"""chaos: faults of real processes, and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embarcadero.cli.output import Json

app = typer.Typer(no_args_is_help=True, help="Kill real processes under load, and check all promises.")


@app.callback()
def chaos() -> None:
    """Kill real processes under load, and check all promises."""


@app.command()
def restarts(
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="How often everything is killed.")] = 100,
    seed: Annotated[int, typer.Option(help="Chooses the moments of the kills.")] = 0,
    brokers: Annotated[int, typer.Option(min=1, max=64, help="How many brokers.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=7, help="How many replicas; each topic is on all of them.")] = 3,
    durable_on: Annotated[int, typer.Option(min=1, max=7, help="Copies that make a record durable.")] = 2,
    wipe: Annotated[bool, typer.Option("--wipe", help="Remove one replica's disk in each round.")] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Every other round stops the cluster cleanly instead.")
    ] = False,
    report: Annotated[Path | None, typer.Option(show_default=False, help="Write a JSON report to this file.")] = None,
    json: Json = False,
) -> None:
    """Load with ack 2, kill -9 of all processes, remove the fabric, restart, check; round after round.

    Publishers stay connected all the time. After each restart every topic is read from its beginning: each acked record
    must be at its position, once, in order.

    Examples:

        embarcadero-proof chaos restarts --rounds 20

        embarcadero-proof chaos restarts --rounds 100 --wipe --report build/restarts-wiped.json
    """
    from embarcadero_proof.chaos.restarts import Settings, run_cli

    settings = Settings(
        rounds=rounds, seed=seed, brokers=brokers, replicas=replicas, durable_on=durable_on, wipe=wipe, clean=clean
    )
    raise typer.Exit(run_cli(settings, report, json))


@app.command()
def matrix(
    case: Annotated[
        list[str] | None, typer.Option(show_default=False, help="Run only this case; may be repeated.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only print the cases.")] = False,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="The least time with faults in each case.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Chooses victims and moments.")] = 0,
    report: Annotated[Path, typer.Option(help="File of the report; a page and plots are written beside it.")] = Path(
        "build/chaos/matrix.json"
    ),
    histories: Annotated[bool, typer.Option("--histories", help="Also keep the history of each case.")] = False,
    json: Json = False,
) -> None:
    """Run named cases of faults for real processes under load; the simulator's checkers check each case.

    Processes are killed and paused. A proxy cuts, slows and holds back connections. Disks are full, damaged or gone,
    the store is locked. Publishers and readers stay connected. When all faults are healed, new ones start, everything
    is read back, and disks are checked. A case with too few acks counts as failed.

    Examples:

        embarcadero-proof chaos matrix --list

        embarcadero-proof chaos matrix --case kill-broker --case storm --seconds 20
    """
    from embarcadero_proof.chaos.cases import find
    from embarcadero_proof.chaos.matrix import Settings, list_cli, run_cli

    if list_:
        list_cli(json)
        return
    settings = Settings(
        cases=tuple(find(case or [])), seconds=seconds, seed=seed, report=report, histories=histories
    )
    raise typer.Exit(run_cli(settings, json))


@app.command()
def kills(
    role: Annotated[str, typer.Option(help="sequencer, broker, replica, or hand-over.")] = "sequencer",
    times: Annotated[int, typer.Option(min=1, max=10_000, help="Number of kills.")] = 100,
    log_mib: Annotated[int, typer.Option(min=0, max=100_000, help="Fill the log with this many MiB first.")] = 0,
    seed: Annotated[int, typer.Option(help="Chooses victims and moments.")] = 0,
    apart_s: Annotated[float, typer.Option(min=0, max=600, help="The least time between two kills.")] = 2.0,
    brokers: Annotated[int, typer.Option(min=1, max=16, help="How many brokers.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, max=7, help="How many replicas; each topic is on all of them.")] = 3,
    report: Annotated[Path | None, typer.Option(
        show_default="build/chaos/kills-ROLE.json", help="File of the figures; plots are written beside it.",
    )] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Kill one role again and again under load, and measure how long acks pause: p50, p99 and the longest.

    hand-over: the sequencer is asked to hand over instead. At the end every acked record is checked.

    Examples:

        embarcadero-proof chaos kills --role sequencer --times 100

        embarcadero-proof chaos kills --role sequencer --times 100 --log-mib 1000
    """
    from embarcadero_proof.chaos.kills import Settings, run_cli

    path = report or Path(f"build/chaos/kills-{role}{f'-{log_mib}-mib' if log_mib else ''}.json")
    settings = Settings(
        role=role, times=times, log_mib=log_mib, seed=seed, apart_s=apart_s, brokers=brokers, replicas=replicas,
        report=path,
    )  # fmt: skip
    raise typer.Exit(run_cli(settings, json))


@app.command()
def pipeline(
    steps: Annotated[
        int, typer.Option(min=20, help="How long the shop is open, in steps of about 2,500 orders.")
    ] = 400,
    rounds: Annotated[
        int, typer.Option(min=0, help="Run this many rounds with a failing operator instead of the shop's day.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Chooses failures and kills of the rounds.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(show_default=False, help="File of the page with pictures, or of the rounds' report."),
    ] = None,
    json: Json = False,
) -> None:
    """Run the whole data pipeline with kills: of a broker, an executor, the Spark driver, then of everything.

    A shop publishes about a million orders; a streaming query on Spark aggregates them; they are tiered. At the end
    the shop's own books, the audit, and DuckDB over the table's files must all agree.

    With --rounds: a function of a streaming query raises in some of its tasks, while the driver, a broker, the
    sequencer, the replica or everything is killed. No row of a failed attempt may ever be visible, and each row must be
    in the topic once.

    Examples:

        embarcadero-proof chaos pipeline --steps 400

        embarcadero-proof chaos pipeline --rounds 100
    """
    if rounds:
        from embarcadero_proof.chaos.pipeline_rounds import run_cli

        raise typer.Exit(run_cli(rounds, seed, report or Path("build/chaos/operators.json"), json))
    from embarcadero.demo.screen import run_act
    from embarcadero_proof.chaos.pipeline_day import run_here

    raise typer.Exit(run_act(run_here, steps, report or Path("build/chaos/pipeline.html"), json))


@app.command()
def zombies(
    step: Annotated[
        list[str] | None,
        typer.Option(show_default=False, help="Only this step, or all steps of a group; may be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option(show_default=False, help="Write a JSON report to this file.")] = None,
    json: Json = False,
) -> None:
    """Stop a process at each named step of the protocol (SIGSTOP), replace it, continue it, and check.

    Each step has its own small cluster, with publishers and readers that never stop. The process is stopped for longer
    than any lease. No record that was acked, or shown to any reader, may be lost, changed, moved or repeated.

    Examples:

        embarcadero-proof chaos zombies --step takeover --step ack.loaded

        embarcadero-proof chaos zombies --report build/chaos/zombies.json
    """
    from embarcadero_proof.chaos.zombies import run_cli

    raise typer.Exit(run_cli(step or [], report, json))


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=20, max=7 * 86_400, help="How long.")] = 900.0,
    seed: Annotated[int, typer.Option(help="Chooses the published records.")] = 0,
    brokers: Annotated[int, typer.Option(min=1, max=16, help="How many brokers.")] = 2,
    replicas: Annotated[int, typer.Option(min=2, max=7, help="How many replicas.")] = 2,
    report: Annotated[Path, typer.Option(help="File of the report; a picture is written beside it.")] = Path(
        "build/chaos/soak.json"
    ),
    json: Json = False,
) -> None:
    """Create and remove topics, sessions, connections, subscribers and leaders; memory, files and rows must stay flat.

    Of each role: open descriptors, memory mappings, mapped shared memory, mappings of removed files, anonymous memory;
    of the cluster: disk, fabric and store. A series is flat if its growth is within the limit. The growth is the median
    slope between all pairs of samples of the second half of the run, times the length of that half. Limits: 4
    descriptors, 12 mappings (or 2 %), 4 mappings of removed files, 4 MiB (or 5 %) of memory or disk, 4 MiB (or 2 %) of
    shared memory, 256 KiB (or 5 %) and 8 rows (or 2 %) of the store. A process that ends and restarts fails, too.

    Example:

        embarcadero-proof chaos soak --seconds 900
    """
    from embarcadero_proof.chaos.soak import Settings, run_cli

    settings = Settings(seconds=seconds, seed=seed, brokers=brokers, replicas=replicas, report=report)
    raise typer.Exit(run_cli(settings, json))
