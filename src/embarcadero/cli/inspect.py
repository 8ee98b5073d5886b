"""top, inspect, verify: the live state of a cluster; its regions, segments and records; a check of its disks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from embarcadero.cli.output import (
    DataDir,
    Json,
    data_dir_or_default,
    duration_option,
    note,
    print_json,
    print_table,
    stderr_is_terminal,
)
from embarcadero.errors import BadFrame, BadValue, NotRunning, OutcomeUnknown, Retriable, Unreachable
from embarcadero.types import Member

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.placement.directory import Stored
    from embarcadero.storage.verify import Report
    from embarcadero.watch.endpoints import NodeEndpoint, Scrape
    from embarcadero.watch.regions import ReadOnlyFabric
    from embarcadero.watch.top import Picture, StoreFacts
    from embarcadero.watch.trace import TraceSource

# --- top --------------------------------------------------------------------------------------------------------------
_HISTORY = 120


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the state once, and exit.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            parser=duration_option(1.0, 0.1, 60.0), metavar="DURATION", help="Time between two updates: 500ms, 5s."
        ),
    ] = 1.0,
    brokers: Annotated[
        str | None,
        typer.Option("--brokers", show_default=False, help="Watch through these brokers: host:port, with commas."),
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Watch the running cluster: brokers, topics, the sequencer, rates and latencies. Ctrl-C stops it.

    With --json, every update is one object on one line.

    Examples:

        embarcadero top

        embarcadero top --once --json

        embarcadero top --brokers log.example.com:9092
    """
    from embarcadero.node.folder import ClusterFolder

    if brokers:
        with connected(brokers) as log:
            _watch(_RemoteWatcher(log), interval, json=json, once=once)
    else:
        _watch(_Watcher(ClusterFolder(data_dir_or_default(data_dir))), interval, json=json, once=once)


def _watch(watcher: _Watcher, interval: float, *, json: bool, once: bool) -> None:
    try:
        watcher.look()
        if json or once:
            _plain(watcher, interval, json=json, once=once)
        else:
            _live(watcher, interval)
    except KeyboardInterrupt:
        return


class _Watcher:
    """Reads the state of the cluster repeatedly."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self._before: dict[str, Scrape] = {}
        self.history: list[float] = []

    def look(self) -> Picture:
        """Return the current state, with rates since the last call. Raise NotRunning if no cluster runs."""
        from embarcadero.placement.directory import Directory
        from embarcadero.placement.store import open_store
        from embarcadero.watch.endpoints import EndpointFiles
        from embarcadero.watch.top import StoreFacts

        if self._folder.running_pid() is None:
            raise NotRunning(f"no cluster is running in {self._folder.path}", "start one with `embarcadero up`")
        with closing(open_store(self._folder.store_path)) as store:
            directory = Directory(store)
            facts = StoreFacts(
                cluster=directory.cluster_id,
                members=directory.members.all(),
                topics=directory.topics.all(),
                lanes=directory.lanes.all(),
                epoch=directory.elections.started_epoch(),
            )
        return self._seen(facts, [node for node in EndpointFiles(self._folder.path).read() if node.running])

    def _seen(self, facts: StoreFacts, nodes: list[NodeEndpoint]) -> Picture:
        from embarcadero.watch.endpoints import scrape_all
        from embarcadero.watch.top import picture

        now = scrape_all(nodes)
        seen = picture(facts, datetime.now(UTC).strftime("%H:%M:%SZ"), self._before, now)
        self._before = now
        self.history = [*self.history[-_HISTORY:], seen.in_records_s]
        return seen


class _RemoteWatcher(_Watcher):
    """Reads the state of a cluster through its brokers and metrics."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._start()

    def look(self) -> Picture:
        """Return the current state. Raise Unreachable if no broker or no metrics port can be reached."""
        found = statuses(self._log)
        nodes = remote_endpoints(found)
        if not nodes:
            named = ", ".join(sorted({str(status.get("metrics") or "none") for status in found}))
            hint = "`top` reads metrics: serve them on an address that this machine reaches (metrics.host)"
            raise Unreachable(f"no metrics port can be reached from here; brokers name {named}", hint)
        return self._seen(remote_facts(self._log, found), nodes)


def _plain(watcher: _Watcher, interval: float, *, json: bool, once: bool) -> None:
    from rich.console import Console

    from embarcadero.watch.top import view

    while True:
        time.sleep(interval)
        seen = watcher.look()
        if json:
            print_json(seen)
        else:
            console = Console()
            console.print(view(seen, watcher.history, console.width))
        if once:
            return


def _live(watcher: _Watcher, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from embarcadero.watch.top import view

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(view(watcher.look(), watcher.history, console.width), refresh=True)
            time.sleep(interval)


# --- remote -----------------------------------------------------------------------------------------------------------
# The state of a cluster from another machine: through its brokers and metrics, without its folder.
_ASK_S = 3.0
_BYTES_MAX = 1 << 20


@contextmanager
def connected(brokers: str) -> Iterator[Log]:
    """Connect to brokers given as text, separated by commas."""
    import embarcadero
    from embarcadero.cli.output import find_brokers, settings

    with embarcadero.connect(find_brokers(brokers, None), config=settings(), timeout=_ASK_S) as log:
        yield log


def statuses(log: Log) -> list[dict[str, Any]]:
    """The status of all live brokers, by number. Raise Unreachable if none answers."""
    found = {str(status["address"]): status for status in log.status(timeout=_ASK_S)}
    if not found:
        hint = "check the addresses, and run `embarcadero status` on the cluster's machine"
        raise Unreachable(f"no broker answered within {_ASK_S:g} s", hint)
    others = {str(address) for status in found.values() for address in status.get("brokers", ())} - found.keys()
    for address in sorted(others):
        with suppress(Retriable, OutcomeUnknown), connected(address) as other:  # skip brokers that do not answer
            found |= {str(status["address"]): status for status in other.status(timeout=_ASK_S)}
    return sorted(found.values(), key=lambda status: int(status["broker"]))


def remote_endpoints(found: list[dict[str, Any]]) -> list[NodeEndpoint]:
    """The metrics addresses of all processes, from the first process that can be reached; empty if none can.

    Loopback addresses count only if the brokers are on loopback: another machine's loopback address would lead to a
    cluster on this machine.
    """
    from embarcadero.watch.endpoints import ANY

    for status in found:
        broker = str(status["address"]).rpartition(":")[0]
        host, _, port = str(status.get("metrics") or "").rpartition(":")
        if host.strip("[]") in ANY:
            host = broker
        here = _on_loopback(broker)
        with suppress(OSError, ValueError, msgspec.MsgspecError):  # try the next broker
            if port and (here or not _on_loopback(host)):
                nodes = _ask(f"http://{host}:{port}/targets")
                if reached := [node for node in nodes if here or not _on_loopback(node.host)]:
                    return reached
    return []


def _on_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _ask(url: str) -> list[NodeEndpoint]:
    from urllib.request import urlopen

    from embarcadero.watch.endpoints import endpoints_of

    with urlopen(url, timeout=_ASK_S) as answer:
        return endpoints_of(answer.read(_BYTES_MAX))


def remote_facts(log: Log, found: list[dict[str, Any]]) -> StoreFacts:
    """The facts that `top` needs beside metrics."""
    from embarcadero.watch.top import StoreFacts

    topics = [log.describe(topic.name, timeout=_ASK_S) for topic in log.topics(timeout=_ASK_S)]
    return StoreFacts(
        cluster="",
        members=[_member(status) for status in found],
        topics=list(topics),
        lanes=[lane for topic in topics for lane in topic.lanes],
        epoch=max(int(status["epoch"]) for status in found),
    )


def _member(status: dict[str, Any]) -> Member:
    host, _, port = str(status["address"]).rpartition(":")
    if not port.isdigit():
        what = f"broker {status['broker']} reports the address {status['address']!r}, which is not host:port"
        raise BadFrame(what, "check the version of the broker")
    return Member(
        broker=int(status["broker"]), incarnation=int(status["incarnation"]), handle=0, host=host, port=int(port), pid=0
    )


# --- inspect ----------------------------------------------------------------------------------------------------------
app = typer.Typer(
    help="Inspect a running or dead cluster: regions of the fabric, segments on disk, the stages of one record.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

FabricFolder = Annotated[
    Path | None, typer.Option("--fabric", show_default=False, help="Folder of a fabric. Default: from --data-dir.")
]
_DULL = {"location", "low", "extra", "origin", "partition", "schema", "flags", "waits", "owner", "incarnation"}
"""Columns that are hidden if all their values are zero."""

TopicName = Annotated[str, typer.Argument(help="Name of the topic.")]
LaneOption = Annotated[
    int | None, typer.Option(min=0, show_default=False, help="Orders 0 and 1: the lane of the position.")
]


@app.command()
def regions(fabric: FabricFolder = None, data_dir: DataDir = None, json: Json = False) -> None:
    """List all regions of the fabric: writer, contents and size.

    Example:

        embarcadero inspect regions
    """
    from embarcadero.watch.regions import list_regions

    found = list_regions(_fabric(fabric, data_dir))
    if json:
        print_json(found)
        return
    _print_rows("regions", found)


@app.command()
def region(
    name: Annotated[str, typer.Argument(help="Name of the region, such as epoch-1/order-0. See `inspect regions`.")],
    start: Annotated[int | None, typer.Option("--from", min=0, show_default=False, help="First index of rows.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, max=100_000, help="Number of rows.")] = 20,
    fabric: FabricFolder = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Decode a region: superblock, frontiers, and entries (the last entries, or from an index on).

    Examples:

        embarcadero inspect region epoch-1/order-0 --limit 5

        embarcadero inspect region broker-0.1/frontiers --json
    """
    from embarcadero.watch.regions import read_region

    found = read_region(_fabric(fabric, data_dir), name, start, limit)
    if json:
        print_json(found)
        return
    rows = found.pop("rows")
    _print_facts(f"region {name}", found)
    _print_rows(f"{len(rows)} rows", rows)


@app.command()
def batch(
    topic: TopicName,
    seq: Annotated[int | None, typer.Option(min=0, show_default=False, help="Seq of a record in the batch.")] = None,
    index: Annotated[int | None, typer.Option(min=0, show_default=False, help="Index of the batch.")] = None,
    lane: LaneOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the batch at a position: its entry, the state of its payload, its first records.

    Examples:

        embarcadero inspect batch orders --seq 1000

        embarcadero inspect batch orders --index 12 --json
    """
    from embarcadero.watch.trace import find_batch

    if (seq is None) == (index is None):
        raise BadValue("exactly one of --seq and --index is needed", "give --seq or --index")
    found = find_batch(_scene(data_dir, topic), topic, seq=seq, index=index, lane=lane)
    if json:
        print_json(found)
        return
    _print_facts(f"entry of topic {topic} (lane {found['lane']})", found["entry"])
    records = found["payload"].pop("records", None)
    _print_facts("payload", found["payload"])
    _print_rows("first records", records or [])


@app.command()
def entry(
    topic: TopicName,
    index: Annotated[int, typer.Option(min=0, help="Index of the entry.")],
    lane: LaneOption = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show one entry of a topic's order: a batch, or a session entry (open, fence, close).

    Example:

        embarcadero inspect entry orders --index 0
    """
    from embarcadero.watch.trace import find_batch

    found = find_batch(_scene(data_dir, topic), topic, index=index, lane=lane)["entry"]
    if json:
        print_json(found)
    else:
        _print_facts(f"entry {index} of topic {topic}", found)


@app.command()
def record(
    topic: TopicName,
    session: Annotated[int, typer.Option(min=0, help="Session of the publisher, from `tail --json`.")],
    sequence: Annotated[int, typer.Option(min=0, help="Sequence of the batch in that session.")],
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Follow one record by session and sequence: pending ring, reorder buffer, order ring, results, ack, payload.

    Example:

        embarcadero inspect record orders --session 3 --sequence 17
    """
    from embarcadero.watch.trace import follow

    found = follow(_scene(data_dir, topic), topic, session, sequence)
    if json:
        print_json(found)
        return
    print(f"topic {topic} (lane {found['lane']}), session {session}, sequence {sequence}")
    for stage in ("session_entries", "pending", "held", "ordered", "skipped", "results"):
        _print_rows(stage.replace("_", " "), found[stage])
    payload = {name: value for name, value in (found["payload"] or {}).items() if name != "records"}
    _print_facts("payload", payload)
    print(found["verdict"])


@app.command()
def segments(
    topic: Annotated[str | None, typer.Option(show_default=False, help="Only segments of this topic.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """List all segments on replicas' disks: replica, topic, first position, contents, first and last time.

    Examples:

        embarcadero inspect segments

        embarcadero inspect segments --topic orders --json
    """
    from embarcadero.errors import UnknownTopic
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.storage.disk import RealDisk
    from embarcadero.watch.regions import list_segments

    folder = ClusterFolder(data_dir_or_default(data_dir))
    topics = _topics(folder)
    if topic is not None and topic not in topics.values():
        raise UnknownTopic(f"there is no topic {topic}", "`embarcadero topic list` lists all topics")
    found = list_segments(RealDisk(folder.path), topics)
    found = [one for one in found if topic is None or one["topic"] == topic]
    if json:
        print_json(found)
        return
    _print_rows("segments", found)


@app.command()
def segment(
    file: Annotated[Path, typer.Argument(help="A .log file, from `inspect segments`.")],
    start: Annotated[int | None, typer.Option("--from", min=0, show_default=False, help="First index of rows.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, max=100_000, help="Number of rows.")] = 20,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Decode a segment: header, footer, entries (the last entries, or from an index on), and the state of its indexes.

    The command verifies all checksums. A path is relative to the current folder, or to the cluster's folder.

    Example:

        embarcadero inspect segment replica-0/lane-0000000000/range-0000000001/00000000000000000000.log --limit 5
    """
    from embarcadero.watch.regions import read_segment

    path = file if file.exists() else data_dir_or_default(data_dir) / file
    found = read_segment(path, start, limit)
    if json:
        print_json(found)
        return
    rows, problems, footer = found.pop("rows"), found.pop("problems"), found.pop("footer")
    indexes = found.pop("indexes")
    _print_facts(f"segment {found.pop('file')}", found)
    _print_facts("footer", footer or {})
    _print_facts("indexes", indexes)
    _print_rows("problems", [{"problem": problem} for problem in problems])
    _print_rows(f"{len(rows)} rows", rows)


def _print_facts(title: str, facts: dict[str, Any]) -> None:
    """Print names and values, wrapped."""
    import textwrap

    print(f"{title}:{'' if facts else ' -'}")
    pairs = [f"{name}={value}".replace(" ", "\xa0") for name, value in facts.items() if value is not None]
    for line in textwrap.wrap("  ".join(pairs), 100, break_long_words=False, break_on_hyphens=False):
        print("  " + line.replace("\xa0", " "))


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table in its full width, without empty columns."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    print(f"{title}:{'' if rows else ' -'}")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [n for n in names if any(row.get(n) if n in _DULL else row.get(n) is not None for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        numbers = all(isinstance(row.get(name), int | None) for row in rows)
        table.add_column(name, no_wrap=True, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in columns))
    if rows:
        console = Console(highlight=False, markup=False)
        console.width = max(console.width, Measurement.get(console, console.options.update(width=1_000), table).maximum)
        console.print(table)


def _fabric(fabric: Path | None, data_dir: Path | None) -> ReadOnlyFabric:
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.watch.regions import ReadOnlyFabric

    if fabric is not None:
        return ReadOnlyFabric(fabric)
    info = ClusterFolder(data_dir_or_default(data_dir)).read_info()
    return ReadOnlyFabric(Path(info.fabric), info.generation)


def _scene(data_dir: Path | None, name: str) -> TraceSource:
    """Open the cluster for a trace, with the schema of one topic."""
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.placement.directory import Directory
    from embarcadero.placement.store import open_store
    from embarcadero.watch.regions import ReplicaFolders
    from embarcadero.watch.trace import TraceSource
    from embarcadero.wire.schemas import decode_versions

    folder = ClusterFolder(data_dir_or_default(data_dir))
    _require_store(folder)
    with closing(open_store(folder.store_path)) as store:
        directory = Directory(store)
        topics = directory.topics.all()
        schemas = {}
        if any(topic.name == name and topic.schema_version for topic in topics):
            _, history = directory.topics.described(name)
            schemas[name] = decode_versions(history.columns, history.widths)
        return TraceSource(
            _fabric(None, data_dir),
            topics,
            directory.members.all(),
            directory.elections.started_epoch(),
            directory.lanes.all(),
            ReplicaFolders(directory.ranges.all(), {number: folder.replica(number) for number in folder.replicas(0)}),
            schemas,
        )


def _require_store(folder: ClusterFolder) -> None:
    if not folder.store_path.exists():
        raise NotRunning(f"{folder.path} contains no cluster yet", "start one with `embarcadero up`")


def _topics(folder: ClusterFolder) -> dict[int, str]:
    """The topic name of each lane, from the store."""
    from embarcadero.placement.directory import Directory, read_stored, stored
    from embarcadero.placement.store import open_store

    _require_store(folder)
    if folder.running_pid() is None:
        return read_stored(folder.store_path).topics
    with closing(open_store(folder.store_path)) as store:
        return stored(Directory(store)).topics


# --- verify -----------------------------------------------------------------------------------------------------------
# verify: check that the files on disk are complete and valid. Offline and read-only.
_COLUMNS = ["severity", "file", "problem", "action"]
_SHOWN_MAX = 200
_ENDING_S = 2.0
_POLL_S = 0.02


def verify(data_dir: DataDir = None, json: Json = False) -> None:
    """Check a stopped cluster's folder: every checksum, index, identity, session checkpoint, and the chain of ranges.

    The command changes nothing. The exit code is 0 if no record is missing or wrong, even with warnings and notes; else
    1. It refuses a running cluster, because its files grow; there, replicas check their copies in the background.

    Examples:

        embarcadero verify

        embarcadero verify --data-dir /backup/embarcadero --json
    """
    from embarcadero.node.folder import ClusterFolder

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
            "stop it with `embarcadero down` first; while it runs, `embarcadero status` shows the findings of replicas",
        )
    give_up = time.monotonic() + _ENDING_S  # a process that was just killed may need a moment to end
    while (number := next(filter(folder.replica_in_use, folder.replicas(0)), None)) is not None:
        if time.monotonic() > give_up:
            hint = "wait until its process has ended"
            raise AlreadyRunning(f"replica {number} of {folder.path} is still running", hint)
        time.sleep(_POLL_S)
    if not folder.store_path.exists() and not folder.replicas(0):
        raise NotRunning(f"{folder.path} has neither a store nor a replica's folder", "choose another --data-dir")


def _verify(folder: ClusterFolder) -> Report:
    from embarcadero.errors import EmbarcaderoError
    from embarcadero.placement.directory import read_stored
    from embarcadero.storage.disk import RealDisk
    from embarcadero.storage.verify import Severity, verify_data_dir

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
        problem = "it is missing: copies cannot be compared with the ranges in the store"
        report.add(Severity.WARNING, name, problem, "restore it before you start a cluster here")
    return report


def _progress(stack: ExitStack, folder: ClusterFolder) -> Callable[[int], None] | None:
    """Show a progress bar on a terminal; elsewhere do nothing."""
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
        "ok": report.ok,
        "data_dir": str(folder.path),
        "replicas": report.replicas,
        "ranges": report.ranges,
        "segments": report.segments,
        "batches": report.batches,
        "bytes": report.bytes,
        "findings": [finding._asdict() for finding in report.findings],
    }


def _print(folder: ClusterFolder, report: Report) -> None:
    worst_first = sorted(report.findings, key=lambda finding: ["error", "warning", "note"].index(finding.severity))
    if worst_first:
        print_table("findings", _COLUMNS, worst_first[:_SHOWN_MAX])
    if (more := len(worst_first) - _SHOWN_MAX) > 0:
        note(f"{more} more findings: --json prints all")
    print(
        f"{folder.path}: {report.replicas} replicas, {report.ranges} ranges, {report.segments} segments, "
        f"{report.batches:,} batches, {report.bytes:,} bytes"
    )
    others = len(worst_first) - report.errors
    if report.ok:
        print("no record is missing or wrong" + (f"; {others} warnings and notes" if others else ""))
    else:
        print(f"{report.errors} errors, {others} warnings and notes")
