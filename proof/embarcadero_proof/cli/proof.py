"""sim, fuzz, bench: the simulator, the fuzzers and the benchmark laboratory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from embarcadero.cli.output import Json
from embarcadero.errors import BadValue

Report = Annotated[Path | None, typer.Option(show_default=False, help="Write a JSON report to this file.")]


def sim(
    seeds: Annotated[str, typer.Option(help="Seeds FIRST:LAST, the last one excluded; each is one run.")] = "0:100",
    report: Report = None,
    bugs: Annotated[bool, typer.Option("--bugs", help="Inject each known bug, and check that it is caught.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Crash and pause at each named step of the protocol.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Explore all interleavings of small scopes instead of seeds.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes. 0: one per core.")] = 0,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print the transcript of a single seed, or of each scope.")
    ] = False,
    shrink: Annotated[bool, typer.Option("--shrink", help="Shrink failing runs, and print their transcripts.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Record each seed in this folder or .jsonl file, and continue from it."),
    ] = None,
    show: Annotated[
        Path | None, typer.Option(show_default=False, help="Only show the seeds recorded in this folder or file.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate whole clusters: incoherent memory, crashes, a bad network. Same seed, same history.

    With --results a run can be stopped and started again: seeds that are recorded for this commit do not run twice.

    Examples:

        embarcadero-proof sim --seeds 0:2000 --results build/sim --report build/sim.json

        embarcadero-proof sim --show build/sim

        embarcadero-proof sim --seeds 17:18 --trace

        embarcadero-proof sim --seeds 123:124 --shrink

        embarcadero-proof sim --bugs

        embarcadero-proof sim --steps --report build/sim-steps.json

        embarcadero-proof sim --exhaustive
    """
    if exhaustive:
        from embarcadero_proof.sim.exhaustive.scopes import run_cli as explore

        raise typer.Exit(explore(jobs=jobs, report=report, json=json, stories=trace))
    first, last = _span(seeds)
    if steps:
        from embarcadero_proof.sim.step_run import run_cli as run_steps

        raise typer.Exit(run_steps(jobs=jobs, first_seed=first, report=report, json_out=json))
    from embarcadero_proof.sim.run import run_cli

    raise typer.Exit(
        run_cli(
            first, last, jobs=jobs, report=report, json=json, trace=trace, bugs=bugs, results=results, show=show,
            smaller=shrink,
        )
    )  # fmt: skip


def _span(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise BadValue(f"--seeds {text!r} is not a range of seeds", "use FIRST:LAST, such as 0:100")
    return int(first), int(last)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A short run, to check that everything works.")] = False,
    full: Annotated[bool, typer.Option("--full", help="A long run: up to 50 M records and 10,000 sessions.")] = False,
    only: Annotated[str, typer.Option(help="Only these rows, with commas, such as latency,send.")] = "",
    trials: Annotated[int | None, typer.Option(show_default=False, help="Number of measurements of each row.")] = None,
    total_mib: Annotated[
        int | None, typer.Option(show_default=False, help="MiB that each publish measurement sends.")
    ] = None,
    record_bytes: Annotated[int | None, typer.Option(show_default=False, help="Size of a record's value.")] = None,
    batch_kib: Annotated[
        list[int] | None, typer.Option(show_default=False, help="Size of a batch; give it again for more sizes.")
    ] = None,
    brokers: Annotated[int | None, typer.Option(show_default=False, help="How many brokers.")] = None,
    publishers: Annotated[int | None, typer.Option(show_default=False, help="How many publisher processes.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, the figures and the plots.")] = Path("build/bench"),
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNG files (needs matplotlib).")] = True,
    json: Json = False,
) -> None:
    """Measure as ratios to the raw speed of this machine, and compare with our goals.

    Rows: publish, read, send, latency, sequencer, mirror, idle, memory, flat, durable, warm, restart, recovery,
    spark (where PySpark and Java are installed); and stress, by name only.

    Examples:

        embarcadero-proof bench --quick

        embarcadero-proof bench --only latency,send --trials 5

        embarcadero-proof bench --only publish --batch-kib 256 --batch-kib 1024 --total-mib 4096

        embarcadero-proof bench --only stress --total-mib 9600 --out build/stress
    """
    from embarcadero.limits import KIB, MIB
    from embarcadero_proof.lab.run import run_cli
    from embarcadero_proof.lab.settings import FULL, QUICK, USUAL, chosen

    if quick and full:
        raise BadValue("--quick and --full exclude each other", "choose one")
    settings = chosen(
        QUICK if quick else FULL if full else USUAL,
        trials=trials,
        total_bytes=None if total_mib is None else total_mib * MIB,
        record_bytes=record_bytes,
        batch_bytes=tuple(size * KIB for size in batch_kib or ()),
        brokers=brokers,
        publishers=publishers,
        only=tuple(name.strip() for name in only.split(",") if name.strip()),
    )
    raise typer.Exit(run_cli(settings, out, json, plots))


def fuzz(
    target: Annotated[
        list[str] | None, typer.Option(show_default=False, help="Only this target; may be repeated.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, show_default="10", help="The most time for each target.")
    ] = None,
    inputs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="The most inputs for each target.")
    ] = None,
    seed: Annotated[str, typer.Option(help="Same seed, same inputs.")] = "0",
    jobs: Annotated[int, typer.Option(help="Processes. 0: one per core.")] = 0,
    report: Annotated[Path, typer.Option(help="File of the report; findings are saved beside it.")] = Path(
        "build/fuzz/report.json"
    ),
    input: Annotated[
        Path | None, typer.Option(show_default=False, help="Run one saved input of a target again.")
    ] = None,
    json: Json = False,
) -> None:
    """Give hostile and damaged inputs to every decoder and every recovery: they succeed or raise a typed error.

    The fuzzer changes real inputs, and often corrects their lengths and checksums, to reach deep code. Memory and time
    of each input are bounded. Findings are shrunk and saved.

    Examples:

        embarcadero-proof fuzz --seconds 30

        embarcadero-proof fuzz --target recovery --inputs 100000 --seed 7

        embarcadero-proof fuzz --target recovery --input build/fuzz/recovery/untyped-0123456789ab
    """
    from embarcadero.cli.output import print_json, print_table
    from embarcadero_proof.fuzz.run import COLUMNS, Settings, again, run_cli

    if input is not None:
        if not target or len(target) != 1 or not input.is_file():
            raise BadValue("--input needs one --target, and an existing file", "name both as a finding does")
        raise typer.Exit(again(target[0], input))
    settings = Settings(
        targets=tuple(target or ()), inputs=inputs, seed=seed, jobs=jobs,
        seconds=10.0 if seconds is None and inputs is None else seconds,
    )  # fmt: skip
    show = (lambda report, _: print_json(report)) if json else (lambda _, rows: print_table("fuzz", COLUMNS, rows))
    raise typer.Exit(run_cli(settings, report, show))


def structure(
    crossing: Annotated[
        bool, typer.Option("--crossing/--no-crossing", help="Also trace a cluster: the files that one record crosses.")
    ] = True,
    json: Json = False,
) -> None:
    """Measure the structure of the product: sizes, names with several meanings, import cycles, files per record.

    A file on the path counts if a function in it runs that does not run on an idle cluster; the number in brackets
    counts all files with code that runs.

    Example:

        embarcadero-proof structure --no-crossing
    """
    from embarcadero.cli.output import print_json, print_table
    from embarcadero_proof.structure import measures

    rows = measures().table()
    if crossing:
        from embarcadero_proof.crossing import crossings

        rows += crossings().table()
    if json:
        print_json(dict(rows))
    else:
        print_table("structure of the product", ["measure", "found"], rows)
