"""verify: is everything that should be on disk there, and right? Offline, and nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from embarcadero.cli.output import (
    DataDir,
    Json,
    data_dir_or_default,
    note,
    print_json,
    print_table,
    stderr_is_terminal,
)

if TYPE_CHECKING:
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.placement.offline import Stored
    from embarcadero.storage.findings import Report

_COLUMNS = ["severity", "file", "what", "what to do"]
_SHOWN_MAX = 200
_ENDING_S = 2.0
_POLL_S = 0.02


def verify(data_dir: DataDir = None, json: Json = False) -> None:
    """Check a stopped cluster's folder: every checksum, index, identity, session checkpoint, and the chain of ranges.

    Nothing is changed. The exit code is 0 when no record is missing or wrong (warnings and notes may be there), else 1.
    A running cluster is refused: its files grow. Replicas then check their own copies, in the background.

    Examples:

        embarcadero verify

        embarcadero verify --data-dir /backup/embarcadero --json
    """
    from embarcadero.node.cluster import ClusterFolder

    folder = ClusterFolder(data_dir_or_default(data_dir))
    _require_stopped(folder)
    report = _verify(folder)
    _require_stopped(folder)
    if json:
        print_json(_facts(folder, report))
    else:
        _print(folder, report)
    raise typer.Exit(0 if report.ok else 1)


def _require_stopped(folder: ClusterFolder) -> None:
    from embarcadero.errors import AlreadyRunning, NotRunning

    if (pid := folder.running_pid()) is not None:
        raise AlreadyRunning(
            f"a cluster is running in {folder.path} (supervisor pid {pid}), and its files grow",
            "stop it with `embarcadero down` first; while it runs, `embarcadero status` tells what replicas find",
        )
    give_up = time.monotonic() + _ENDING_S  # one that was just killed may take a moment
    while (number := next(filter(folder.replica_in_use, folder.replicas(0)), None)) is not None:
        if time.monotonic() > give_up:
            hint = "wait until its process has ended"
            raise AlreadyRunning(f"replica {number} of {folder.path} is still running", hint)
        time.sleep(_POLL_S)
    if not folder.store_path.exists() and not folder.replicas(0):
        raise NotRunning(f"{folder.path} has neither a store nor a replica's folder", "choose another --data-dir")


def _verify(folder: ClusterFolder) -> Report:
    from embarcadero.errors import EmbarcaderoError
    from embarcadero.placement.offline import read_stored
    from embarcadero.storage.findings import Severity
    from embarcadero.storage.real import RealDisk
    from embarcadero.storage.verify import verify_data_dir

    stored: Stored | None = None
    unread: EmbarcaderoError | None = None
    if folder.store_path.exists():
        try:
            stored = read_stored(folder.store_path)
        except EmbarcaderoError as error:
            unread = error
    with ExitStack() as stack:
        advance = _progress(stack, folder)
        disk = RealDisk(folder.path)
        if stored is None:
            report = verify_data_dir(disk, progress=advance)
        else:
            report = verify_data_dir(disk, stored.ranges, advance, stored.trims, stored.cluster)
    name = folder.store_path.name
    if unread is not None:
        report.add(Severity.ERROR, name, unread.message, unread.hint)
    elif stored is None:
        problem = "it is missing: copies can't be compared with the ranges that it names"
        report.add(Severity.WARNING, name, problem, "restore it before you start a cluster here")
    return report


def _progress(stack: ExitStack, folder: ClusterFolder) -> Callable[[int], None] | None:
    """A bar on a terminal; elsewhere nothing."""
    if not stderr_is_terminal():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    total = sum(_size(path) for number in folder.replicas(0) for path in folder.replica(number).rglob("*.log"))
    task = bar.add_task("verify", total=total)
    return lambda size: bar.advance(task, size)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _facts(folder: ClusterFolder, report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok, "data_dir": str(folder.path), "replicas": report.replicas, "ranges": report.ranges,
        "segments": report.segments, "batches": report.batches, "bytes": report.bytes,
        "findings": [finding._asdict() for finding in report.findings],
    }  # fmt: skip


def _print(folder: ClusterFolder, report: Report) -> None:
    worst_first = sorted(report.findings, key=lambda finding: ["error", "warning", "note"].index(finding.severity))
    if worst_first:
        print_table("findings", _COLUMNS, worst_first[:_SHOWN_MAX])
    if (more := len(worst_first) - _SHOWN_MAX) > 0:
        note(f"and {more} more: --json has all of them")
    print(
        f"{folder.path}: {report.replicas} replicas, {report.ranges} ranges, {report.segments} segments, "
        f"{report.batches:,} batches, {report.bytes:,} bytes"
    )
    others = len(worst_first) - report.errors
    if report.ok:
        print("nothing is missing or wrong" + (f"; {others} warnings and notes" if others else ""))
    else:
        print(f"{report.errors} errors, {others} warnings and notes")
