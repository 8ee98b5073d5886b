"""`embarcadero bench`: the figures of this version, measured side by side, repeated, with median and spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from embarcadero.bench.publish import publish_throughput
from embarcadero.bench.raw import raw_receive
from embarcadero.bench.sequencer import sequencer_alone
from embarcadero.bench.stress import beside_a_stuck_session, out_of_order
from embarcadero.limits import MIB

BROKERS, PUBLISHERS = 4, 2
RECORD_BYTES, SMALL_BATCH_RECORDS = 1024, 64
BATCH_RECORDS = {"1MiB": 1000, "4MiB": 4000}  # records in a batch; the client's default is 1 MiB

Trial = dict[str, float]


def machine_facts() -> dict[str, Any]:
    """Where and on what these figures were measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else ""
    return {
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _measure_publish(total_bytes: int, trial: Trial, tick: Callable[[str], None]) -> None:
    """Raw, order 2 and order 5 right after each other, so that they meet the same noise."""
    from embarcadero.node.local import LocalCluster

    shared = Path("/dev/shm")
    for size, count in BATCH_RECORDS.items():
        frame = count * (RECORD_BYTES + 8)  # records with their offsets and time stamps, roughly
        batches = max(BROKERS, total_bytes // PUBLISHERS // frame // BROKERS * BROKERS)
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            tick(f"raw loopback receive, {size}")
            raw = trial[f"raw_{size}_bytes_per_s"] = raw_receive(Path(folder), BROKERS, PUBLISHERS, frame, batches)
        for order in (2, 5):
            tick(f"publish, order {order}, {size}")
            with LocalCluster(brokers=BROKERS) as cluster:
                speed = _publish(cluster.addresses, order, batches, count)
            trial[f"order{order}_{size}_bytes_per_s"] = speed
            trial[f"order{order}_{size}_to_raw"] = speed / raw


def _publish(addresses: list[str], order: int, batches: int, count: int) -> float:
    import embarcadero as emb

    with emb.connect(addresses) as log:
        log.create_topic("bench", order=order)
    return publish_throughput(addresses, "bench", PUBLISHERS, batches, count, RECORD_BYTES)


def _measure_sequencer(seconds: float, trial: Trial, tick: Callable[[str], None]) -> None:
    for name, order, reordered in (("order2", 2, 0.0), ("order5", 5, 0.0), ("order5_reordered", 5, 0.5)):
        tick(f"sequencer alone, {name}")
        trial[f"sequencer_{name}_per_s"] = sequencer_alone(seconds, order, reordered)


def measure(total_bytes: int, seconds: float, tick: Callable[[str], None]) -> Trial:
    """The figures of this version, once."""
    trial: Trial = {}
    _measure_publish(total_bytes, trial, tick)
    _measure_sequencer(seconds, trial, tick)
    return trial


def measure_stress(total_bytes: int, beside_bytes: int, tick: Callable[[str], None]) -> Trial:
    """Small batches in shuffled windows over rings of 8,192 slots; then the same beside a stuck session."""
    from embarcadero.node.local import LocalCluster

    trial: Trial = {}
    size = SMALL_BATCH_RECORDS * RECORD_BYTES
    with LocalCluster(brokers=BROKERS) as cluster:
        import embarcadero as emb

        with emb.connect(cluster.addresses) as log:
            log.create_topic("shuffled", order=5)
            log.create_topic("stuck", order=5)
        tick("out of order")
        each = total_bytes // size // PUBLISHERS
        trial["shuffled_bytes_per_s"] = out_of_order(
            cluster.addresses, "shuffled", PUBLISHERS, each, SMALL_BATCH_RECORDS
        )
        trial["shuffled_batches"] = float(each * PUBLISHERS)
        tick("beside a stuck session")
        trial["beside_stuck_to_without"] = beside_a_stuck_session(
            cluster.addresses, "stuck", PUBLISHERS, beside_bytes // size // PUBLISHERS, SMALL_BATCH_RECORDS
        )
    return trial


def summarise(trials: list[Trial]) -> dict[str, dict[str, float]]:
    """Median and range of every figure."""
    return {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for name in trials[0]
        if (values := [trial[name] for trial in trials])
    }


def _unit(name: str, value: float) -> str:
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("_per_s"):
        return f"{value / 1e6:.2f} M batches/s"
    return f"{value:,.0f}" if name.endswith("_batches") else f"{value:.2f}"


LABELS = {
    "raw_1MiB_bytes_per_s": "raw loopback TCP receive, 1 MiB batches",
    "order2_1MiB_bytes_per_s": "publish, order 2, ack 1",
    "order2_1MiB_to_raw": "  ratio to raw",
    "order5_1MiB_bytes_per_s": "publish, order 5, ack 1",
    "order5_1MiB_to_raw": "  ratio to raw",
    "raw_4MiB_bytes_per_s": "raw loopback TCP receive, 4 MiB batches",
    "order2_4MiB_bytes_per_s": "publish, order 2, ack 1",
    "order2_4MiB_to_raw": "  ratio to raw",
    "order5_4MiB_bytes_per_s": "publish, order 5, ack 1",
    "order5_4MiB_to_raw": "  ratio to raw",
    "sequencer_order2_per_s": "sequencer alone, order 2",
    "sequencer_order5_per_s": "sequencer alone, order 5, in order",
    "shuffled_bytes_per_s": "order 5, everything out of order, 64 KiB batches",
    "shuffled_batches": "  batches",
    "beside_stuck_to_without": "throughput beside a stuck session / without",
    "sequencer_order5_reordered_per_s": "sequencer alone, order 5, half reordered",
}


def run_cli(report_path: Path | None, quick: bool, json_out: bool, stress: bool = False) -> int:
    """Measure, print a table, save a report."""
    trials, total, seconds = (1, 512 * MIB, 1.0) if quick else (3, 2048 * MIB, 3.0)
    if stress:
        trials, total = (1, 512 * MIB) if quick else (3, 10_000_000_000)
    console = Console(stderr=json_out)
    with Progress(
        TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn(), console=Console(file=sys.stderr)
    ) as progress:
        task = progress.add_task("starting", total=trials * (2 if stress else 9))

        def tick(what: str) -> None:
            progress.update(task, description=what, advance=1)

        results = [
            measure_stress(total, total // 10, tick) if stress else measure(total, seconds, tick) for _ in range(trials)
        ]
    report = {
        "machine": machine_facts(),
        "settings": {
            "brokers": BROKERS, "publishers": PUBLISHERS, "record_bytes": RECORD_BYTES, "batch_records": BATCH_RECORDS,
            "bytes_per_trial": total, "trials": trials,
        },
        "summary": summarise(results),
        "trials": results,
    }  # fmt: skip
    if report_path is not None:
        report_path.parent.mkdir(parents=True, exist_ok=True)
        report_path.write_text(json.dumps(report, indent=2) + "\n")
    if json_out:
        print(json.dumps(report))  # noqa: T201 - asked for
    else:
        console.print(_table(report))
        if report_path is not None:
            console.print(f"saved: {report_path}")
    return 0


def _table(report: dict[str, Any]) -> Table:
    facts = report["machine"]
    table = Table(title=f"Embarcadero {facts['commit']} on {facts['cores']} cores, {facts['cpu'] or facts['machine']}")
    for column in ("what", "median", "from", "to"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, values in report["summary"].items():
        table.add_row(LABELS.get(name, name), *(_unit(name, values[key]) for key in ("median", "min", "max")))
    return table
