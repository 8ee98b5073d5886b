"""up, down, node, status: the processes of a cluster; replica and sequencer commands; demo: a private cluster."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import (
    READER_COLUMNS,
    TIER_COLUMNS,
    DataDir,
    Json,
    Verbs,
    data_dir_or_default,
    duration_option,
    note,
    print_json,
    print_table,
    reader_row,
    settings,
    tier_facts,
    tier_row,
)
from embarcadero.errors import EmbarcaderoError, UsageError, require_linux
from embarcadero.limits import MIB
from embarcadero.orders import order_label

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from embarcadero.client.api.sync_log import Log
    from embarcadero.config import Config
    from embarcadero.node.cluster_view import ReplicaReport
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.node.report import ClusterReport
    from embarcadero.placement.directory import Directory
    from embarcadero.types import Range

_ASK_S = 3.0
"""The timeout of `status` for a broker."""
_LISTEN_S = 2.0
"""The longest wait of `status` for the heartbeat of a replica."""


class Processes(StrEnum):
    """The assignment of roles to processes."""

    ROLE = "role"
    ONE = "one"


def _option(help: str) -> Any:
    """Declare an option with its default in the configuration."""
    return typer.Option(show_default=False, help=help)


def _flag(name: str, help: str) -> Any:
    """Declare an option that can only be switched on, with its default in the configuration."""
    return typer.Option(name, show_default=False, help=help)


def up(
    brokers: Annotated[int | None, _option("Number of brokers. Default: 4.")] = None,
    replicas: Annotated[int | None, _option("Number of replicas; others with a folder start too. Default: 1.")] = None,
    standbys: Annotated[int | None, _option("Number of standby sequencers, ready to take over. Default: 1.")] = None,
    port: Annotated[
        int | None, _option("Port of broker 0; the others follow. 0 takes free ports. Default: 9092.")
    ] = None,
    host: Annotated[str | None, _option("Address to listen on. Default: 127.0.0.1.")] = None,
    advertised_host: Annotated[str | None, _option("Address for clients. Default: --host.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")] = False,
    processes: Annotated[
        Processes | None, _option("role: a process per role (default). one: a single process.")
    ] = None,
    fabric: Annotated[Path | None, _option("Folder of the fabric. Default: shared memory, if large enough.")] = None,
    log_mib: Annotated[int | None, _option("MiB of payloads per broker; a power of two. Default: 256.")] = None,
    hugepages: Annotated[bool | None, _flag("--hugepages", "Advise huge pages for the fabric.")] = None,
    pin: Annotated[str | None, _option("Cores for the sequencer and brokers, in turn, such as 0,1.")] = None,
    metrics_host: Annotated[str | None, _option("Address to serve metrics on. Default: 127.0.0.1.")] = None,
    metrics_port: Annotated[
        int | None, _option("Port of the sequencer's metrics; brokers follow. 0 takes free ports. Default: 0.")
    ] = None,
    log_level: Annotated[str | None, _option("debug, info, warning or error. Default: info.")] = None,
    log_format: Annotated[str | None, _option("plain, or json: one object per line. Default: plain.")] = None,
    tier: Annotated[
        bool | None, _flag("--tier", "Also keep durable records in Iceberg tables: see the keys tier.*.")
    ] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="The folder is a copy: give it a new identity, then start it.")
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Start a cluster on this machine, and keep it running.

    A process that dies is restarted. Ctrl-C stops the cluster. Topics stay, and so do records on replicas' disks.
    Records of topics without replicas live as long as the cluster runs. Options override the environment, and the
    environment overrides embarcadero.yaml: see `embarcadero config show`.

    Examples:

        embarcadero up

        embarcadero up --brokers 2 --port 0 --detach --json

        embarcadero up --config production.yaml
    """
    require_linux()
    from embarcadero.node.supervisor import UpOptions

    flags = {
        "cluster.data_dir": ("--data-dir", data_dir),
        "cluster.brokers": ("--brokers", brokers),
        "cluster.replicas": ("--replicas", replicas),
        "cluster.standbys": ("--standbys", standbys),
        "cluster.one_process": ("--processes", None if processes is None else processes is Processes.ONE),
        "cluster.fabric_dir": ("--fabric", fabric),
        "cluster.hugepages": ("--hugepages", hugepages),
        "cluster.pin": ("--pin", pin),
        "broker.host": ("--host", host),
        "broker.port": ("--port", port),
        "broker.advertised_host": ("--advertised-host", advertised_host),
        "fabric.log_bytes": ("--log-mib", None if log_mib is None else log_mib * MIB),
        "metrics.host": ("--metrics-host", metrics_host),
        "metrics.port": ("--metrics-port", metrics_port),
        "tier.enabled": ("--tier", tier),
        "log.level": ("--log-level", log_level),
        "log.format": ("--log-format", log_format),
    }
    run = _up_detached if detach else _up_here
    run(UpOptions(config=_with_engine(settings(flags)), restore=restore), json)


def _with_engine(config: Config) -> Config:
    """Return the configuration. Raise NotAvailable before the start if Spark is requested but not installed."""
    if config.tier.enabled and (config.tier.engine == "spark" or config.tier.master):
        from embarcadero.spark.tiering import chosen_kind

        chosen_kind(config.tier)
    return config


def _up_detached(options: Any, json: bool) -> None:
    from embarcadero.node.background import start

    process, remark = start(options)
    process.returncode = 0  # it continues after this command, which does not wait for its end
    _print_started(_folder(options.data_dir), remark, json or options.config.log.format == "json")


def _up_here(options: Any, json: bool) -> None:
    import asyncio
    import logging

    from embarcadero.config.secrets import secret_values
    from embarcadero.node.fabric_folder import FabricChoice
    from embarcadero.node.process import be_private, start_logging
    from embarcadero.node.supervisor import Supervisor

    be_private()
    start_logging("supervisor", options.config.log, secret_values(options.config))

    json = json or options.config.log.format == "json"  # a program reads the output

    def on_ready(choice: FabricChoice) -> None:
        remark = choice.note
        if remark and json:
            logging.warning("%s", remark)
            remark = ""
        _print_started(_folder(options.data_dir), remark, json)
        if not json:
            note("Ctrl-C stops the cluster.")

    try:
        asyncio.run(Supervisor(options).run(on_ready))
    except EmbarcaderoError as error:
        if not json:
            raise
        logging.error("%s", error)  # noqa: TRY400 - a typed error needs no traceback
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None


def _print_started(folder: ClusterFolder, remark: str, json: bool) -> None:
    from embarcadero.node.report import report

    running = report(folder)
    if json:
        print_json(running)
    else:
        _print_processes(running)
    if remark:
        note(remark)


def down(data_dir: DataDir = None, json: Json = False) -> None:
    """Stop the cluster of a folder, with all its processes.

    Brokers stop accepting requests, settle the requests that they accepted, and close their connections. Then the other
    processes stop. The command prints how many requests were settled meanwhile, and how many were not.

    Example:

        embarcadero down
    """
    from embarcadero.node.background import stop
    from embarcadero.watch.endpoints import EndpointFiles

    folder = _folder(data_dir)
    pid = stop(folder)
    nodes = EndpointFiles(folder.path).read()
    left = [broker for node in nodes for broker in (node.left or {}).values()]
    settled, unsettled = (sum(broker[what] for broker in left) for what in ("settled", "unsettled"))
    killed = [node.roles for node in nodes if node.left is None]
    if json:
        facts = {"stopped": pid, "data_dir": str(folder.path), "settled": settled, "unsettled": unsettled}
        print_json(facts | {"killed": killed})
        return
    print(f"stopped the cluster in {folder.path}; requests settled: {settled}, not settled: {unsettled}")
    if killed:
        note(f"these processes did not stop in time and were killed: {', '.join(killed)}")


def node(
    roles: Annotated[
        str,
        typer.Option(
            help="Roles of this process, separated by commas: broker:<number>, replica:<number>, sequencer, "
            "sequencer:<number>."
        ),
    ],
    data_dir: DataDir = None,
) -> None:
    """Host roles of a running cluster in this process, in the foreground.

    `up` starts nodes by itself. Use this to run a node under another process manager, or to add a broker by hand. The
    node has the configuration of the cluster. embarcadero.yaml and the environment of this process override it, except
    for the keys cluster.* and fabric.*.

    Example:

        embarcadero node --roles broker:4
    """
    import msgspec

    from embarcadero.cli.processes import SURROUNDINGS
    from embarcadero.node.node import run_node
    from embarcadero.node.process import parse_roles

    wanted, folder = parse_roles(roles), _folder(data_dir)
    cluster = folder.require_running().config
    config = msgspec.structs.replace(settings(base=cluster), cluster=cluster.cluster, fabric=cluster.fabric)
    run_node(folder, wanted, SURROUNDINGS, config)


def status(
    brokers: Annotated[
        str | None,
        typer.Option("--brokers", show_default=False, help="Ask these brokers: host:port, separated by commas."),
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show brokers, sequencers, replicas, topics with their ends, and degraded parts of a running cluster.

    With --brokers it asks these brokers, from any machine. Processes, replicas and degraded parts are visible only in
    the cluster's folder.

    Examples:

        embarcadero status --json

        embarcadero status --brokers log.example.com:9092
    """
    if brokers:
        _remote_status(brokers, json)
        return
    import msgspec

    from embarcadero.fabric.shared import describe
    from embarcadero.node.report import report

    running = report(_folder(data_dir), _LISTEN_S)
    topics, silence = _topics(running)
    if silence:
        running = msgspec.structs.replace(running, degraded=[silence, *running.degraded])
    if json:
        print_json({"cluster": running, "topics": topics, "primitives": describe()})
        return
    _print_processes(running)
    _print_topics(topics)
    if running.lanes:
        _print_lanes(running)
    if readers := [[topic["name"], *reader_row(reader)] for topic in topics for reader in topic["readers"]]:
        print_table("readers", ["topic", *READER_COLUMNS], readers)
    if tiers := [[topic["name"], *tier_row(topic["tier"])] for topic in topics if topic["tier"]]:
        print_table("tables", ["topic", *TIER_COLUMNS], tiers)
    print(f"fabric: {running.fabric}. {describe()}")
    _print_mirror(running)
    for problem in running.degraded:
        note(f"degraded: {problem}")


def _remote_status(brokers: str, json: bool) -> None:
    """Print the status from brokers and metrics, without the cluster's folder."""
    from embarcadero.cli.inspect import connected, remote_endpoints, statuses

    with connected(brokers) as log:
        found = statuses(log)
        topics, silence = _topics_of(log, set())
    endpoints = remote_endpoints(found)
    if json:
        nodes = [{"roles": node.roles, "metrics": node.address} for node in endpoints]
        print_json({"brokers": found, "topics": topics, "nodes": nodes, "missing": [silence] if silence else []})
        return
    rows = [
        [f"broker {s['broker']}", s["incarnation"], s["address"], s["epoch"], s["connections"], s.get("metrics", "")]
        for s in found
    ]
    print_table("brokers", ["role", "incarnation", "address", "follows epoch", "connections", "metrics"], rows)
    _print_topics(topics)
    if endpoints:
        print_table("metrics", ["roles", "address"], [[node.roles, node.address] for node in endpoints])
    for problem in filter(None, [silence]):
        note(f"degraded: {problem}")
    note("for replicas and degraded parts, run `embarcadero status` on the cluster's machine")


def _topics(running: ClusterReport) -> tuple[list[dict[str, Any]], str]:
    """Ask a broker for all topics with their ends; also return the reason if it cannot answer.

    The end of a lane in recovery is not known yet, so the brokers are not asked for it.
    """
    import embarcadero
    from embarcadero.errors import OutcomeUnknown, Retriable

    unknown = {lane.topic for lane in running.lanes if lane.state in ("recovering", "waiting")}
    if not running.addresses:
        return [], "no broker is live: publishing and reading wait; the supervisor restarts brokers, see logs/"
    try:
        with embarcadero.connect(running.addresses, timeout=_ASK_S) as log:
            return _topics_of(log, unknown)
    except (Retriable, OutcomeUnknown) as error:
        return [], f"no broker answers for the ends of topics: {error.message}"


def _topics_of(log: Log, unknown: AbstractSet[str]) -> tuple[list[dict[str, Any]], str]:
    """Ask for all topics, with the ends of those not in `unknown`; also return the reason if a broker cannot answer."""
    from embarcadero.errors import Corrupt, OutcomeUnknown, Retriable

    found: list[dict[str, Any]] = []
    damaged: list[str] = []
    try:
        for topic in log.topics(timeout=_ASK_S):
            about = {"name": topic.name, "order": topic.order, "partitions": topic.partitions}
            found.append(about | {"index": None, "seq": None, "lanes": [], "readers": [], "tier": None})
            if topic.name not in unknown:
                try:
                    found[-1] |= _ends(log, topic.name)
                except Corrupt as error:  # only this topic: show the other topics and the degraded parts
                    damaged.append(f"topic {topic.name}: {error.message}")
    except (Retriable, OutcomeUnknown) as error:
        return found, f"no broker answers for the ends of topics: {error.message}"
    return found, "; ".join(damaged)


def _ends(log: Log, name: str) -> dict[str, Any]:
    """The ends of a topic and its lanes, its readers, and its table."""
    end = log.tail(name, timeout=_ASK_S)
    readers = log.readers(name, timeout=_ASK_S)
    table = tier_facts(log.describe(name, timeout=_ASK_S).tier, end)
    return {
        "index": end.index,
        "seq": end.seq,
        "lanes": list(end.lanes) or [end],
        "readers": readers,
        "tier": table,
    }


def _print_topics(topics: list[dict[str, Any]]) -> None:
    rows = [
        [
            t["name"],
            order_label(t["order"]),
            t["partitions"],
            *("?" if t[end] is None else t[end] for end in ("index", "seq")),
            len(t["lanes"]),
        ]
        for t in topics
    ]
    print_table("topics", ["name", "order", "partitions", "next index", "next seq", "lanes"], rows)


def _print_processes(running: ClusterReport) -> None:
    rows: list[list[object]] = [
        [f"broker {b.id}", b.incarnation, b.address, b.pid, b.state, b.metrics] for b in running.brokers
    ]
    sequencer = running.sequencer
    state = "live" if sequencer.pid else "starting"
    number = sequencer.candidate
    rows.append([f"sequencer {number}", f"epoch {sequencer.epoch}", "", sequencer.pid or "", state, sequencer.metrics])
    rows += [[f"sequencer {s.candidate}", "", "", s.pid or "", s.state, s.metrics] for s in sequencer.standbys]
    for replica in running.replicas:
        where = f"{replica.open_ranges} open, {replica.sealed_ranges} sealed ranges, lag {replica.lag}"
        state = "; ".join(replica.health) if replica.health and replica.state == "live" else replica.state
        rows.append([f"replica {replica.id}", replica.incarnation, where, replica.pid, state, replica.metrics])
    rows.append(["supervisor", "", "", running.supervisor.pid, "live", ""])
    title = f"cluster {running.cluster} in {running.data_dir}"
    print_table(title, ["role", "incarnation", "address", "pid", "state", "metrics"], rows)


def _print_mirror(running: ClusterReport) -> None:
    if running.mirror.folder:
        print(f"mirror: {running.mirror.folder}. Losing the fabric loses no ordered entry.")
    for lane in running.mirror.saved:
        lost = f"{lane.batches:,} batches ({lane.records:,} records) were not on disk yet, and are lost"
        mirror = f"by the mirror, lane {lane.lane} of {lane.topic} was ordered up to index {lane.ordered:,}"
        note(f"the fabric was lost before this run; {mirror}: {lost if lane.batches else 'nothing is lost'}")


def _print_lanes(running: ClusterReport) -> None:
    rows = []
    for lane in running.lanes:
        copies = f"{lane.durable_on} of {len(lane.replicas)} ({', '.join(map(str, lane.replicas))})"
        behind = "" if lane.ordered is None else max(0, lane.ordered - lane.durable)
        ordered = "" if lane.ordered is None else lane.ordered
        rows.append([lane.topic, lane.lane, lane.ranges, lane.range, lane.state, copies, ordered, lane.durable, behind])
    columns = ["topic", "lane", "ranges", "last", "state", "durable on", "ordered", "durable", "behind"]
    print_table("lanes on disk", columns, rows)


def _folder(data_dir: Path | None) -> ClusterFolder:
    from embarcadero.node.folder import ClusterFolder

    return ClusterFolder(data_dir_or_default(data_dir))


def demo(
    brokers: Annotated[int, typer.Option(help="Number of brokers in the first act.")] = 4,
    seconds: Annotated[
        float,
        typer.Option(parser=duration_option(), metavar="DURATION", help="Time that the first act publishes: 8, 1m."),
    ] = 8.0,
    steps: Annotated[int, typer.Option(min=20, help="Minutes of the shop's day in the second act.")] = 100,
    report: Annotated[Path, typer.Option(help="File for the report, with pictures.")] = Path("build/demo/report.html"),
    json: Json = False,
) -> None:
    """Run a private cluster, then a whole data pipeline on Spark, and kill processes meanwhile.

    First act: durable publishers and two readers. The demo kills a broker, then the sequencer, then all processes. Both
    readers see one order. Second act: a shop's orders go through a streaming query into a table, with the same kills,
    and with SQL and an audit at the end. A page with pictures reports the results. Both acts report the pause of acks
    after the kill of the sequencer.

    Example:

        embarcadero demo --seconds 20 --steps 240
    """
    require_linux()
    from embarcadero.demo.screen import run_cli

    raise typer.Exit(run_cli(brokers, seconds, steps, report, json))


# --- replicas ---------------------------------------------------------------------------------------------------------
replicas = Verbs(help="List, add and drain replicas.", no_args_is_help=True, rich_markup_mode=None)

_COLUMNS = ["replica", "incarnation", "pid", "state", "health", "lag", "open", "sealed", "folder"]
_POLL_S = 0.1
_START_S = 60.0
_LOOK_S = 2.0
_STILL_S = 30.0
"""The time without progress after which `drain` reports it."""


def _find(folder: ClusterFolder, number: int) -> ReplicaReport | None:
    from embarcadero.node.report import report

    return next((replica for replica in report(folder).replicas if replica.id == number), None)


def _row(replica: ReplicaReport) -> list[object]:
    health = "; ".join(replica.health) or "ok"
    return [
        replica.id,
        replica.incarnation,
        replica.pid,
        replica.state,
        health,
        replica.lag,
        replica.open_ranges,
        replica.sealed_ranges,
        replica.folder,
    ]


@replicas.command("list")
def list_replicas(data_dir: DataDir = None, json: Json = False) -> None:
    """List the replicas of a running cluster.

    `lag` is the number of batches that the slowest lane of a replica is behind the order.
    """
    from embarcadero.node.report import report

    running = report(_folder(data_dir))
    if json:
        print_json(running.replicas)
    else:
        print_table("replicas", _COLUMNS, [_row(replica) for replica in running.replicas])


@replicas.command()
def add(data_dir: DataDir = None, json: Json = False) -> None:
    """Add a replica to a running cluster.

    The command creates the folder of the next replica in the cluster's folder. The supervisor finds it, and starts the
    replica now and with every `up`, as long as the folder exists. New ranges can be placed on it immediately.

    Example:

        embarcadero replica add
    """
    from embarcadero.errors import ClusterError, TooMany
    from embarcadero.limits import REPLICAS_MAX

    folder = _folder(data_dir)
    number = max(folder.replicas(folder.require_running().config.cluster.replicas), default=-1) + 1
    if number >= REPLICAS_MAX:
        raise TooMany(f"the cluster already has {REPLICAS_MAX} replicas, the maximum", "use the existing replicas")
    folder.replica(number).mkdir(mode=0o700)
    give_up = time.monotonic() + _START_S
    while (found := _find(folder, number)) is None or found.state != "live":
        if time.monotonic() > give_up:
            raise ClusterError(f"replica {number} did not start within {_START_S:.0f} s", f"see {folder.logs}")
        time.sleep(_POLL_S)
    if json:
        print_json(found)
    else:
        print(f"replica {number} runs in {found.folder}")


@replicas.command()
def drain(
    replica: Annotated[int, typer.Argument(help="Number of the replica.")],
    undo: Annotated[bool, typer.Option("--undo", help="Stop draining: allow new ranges on it again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the replica has no more ranges.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Drain a replica: it gets no new ranges, and other replicas copy its ranges.

    The command is refused if no other live replica can take its ranges. A dead replica can be drained too: its ranges
    are copied from their other copies, or from its folder. If some ranges have no complete copy, all other ranges are
    moved, and an error names the remaining ranges and the next steps. After the drain, stop the cluster and remove the
    folder, or keep it for `--undo`.

    Example:

        embarcadero replica drain 2
    """
    from contextlib import closing

    from embarcadero.node.cluster_view import in_words, topics_by_lane
    from embarcadero.placement.directory import Directory
    from embarcadero.placement.store import open_store

    folder = _folder(data_dir)
    folder.require_running()
    with closing(open_store(folder.store_path)) as store:
        directory = Directory(store)
        directory.replicas.undrain(replica) if undo else directory.replicas.drain(replica)
        stuck = [] if undo else _unreadable(directory, replica)
        if not json:
            for sentence in in_words(stuck, topics_by_lane(directory)):
                note(sentence)
        if wait and not undo:
            _wait_until_moved(directory, replica, stuck, quiet=json)
        remaining = len(directory.replicas.ranges_on(replica))
    facts: dict[str, Any] = {"replica": replica, "draining": not undo, "ranges": remaining, "unreadable": len(stuck)}
    if json:
        print_json(facts)
    elif undo:
        print(f"replica {replica} can get ranges again")
    else:
        print(f"replica {replica} is drained: {remaining} ranges are on it")


def _unreadable(directory: Directory, replica: int) -> list[Range]:
    """Ranges on a replica without a complete copy."""
    from embarcadero.node.cluster_view import unreadable_ranges

    members = {member.replica: member for member in directory.replicas.all()}
    return unreadable_ranges(directory.replicas.ranges_on(replica), members, directory.topics.trims())


def _wait_until_moved(directory: Directory, replica: int, stuck: list[Range], quiet: bool) -> None:
    """Wait until a replica has no ranges. Raise ClusterError if no copy of the remaining ranges is complete.

    Files change while replicas work, so a range counts as unreadable only if two checks in a row agree.
    """
    from embarcadero.errors import ClusterError
    from embarcadero.node.cluster_view import in_words, topics_by_lane

    def inform(text: str) -> None:
        if not quiet:
            note(text)

    remaining, waits_for, reported = len(directory.replicas.ranges_on(replica)), "", False
    looked = moved = time.monotonic()
    while ranges := directory.replicas.ranges_on(replica):
        if (why := directory.replicas.drain_blocked(replica)) != waits_for:
            inform(f"replica {replica}: {why or 'its ranges move again'}")
            waits_for = why
        now = time.monotonic()
        if len(ranges) != remaining:
            inform(f"{len(ranges)} ranges remain on replica {replica}")
            remaining, moved, reported = len(ranges), now, False
        if now - looked >= _LOOK_S:
            before, stuck, looked = stuck, _unreadable(directory, replica), now
            if len(stuck) == len(before) == remaining:
                raise ClusterError(
                    f"{remaining} ranges stay on replica {replica}: no copy of them is complete",
                    "; ".join(in_words(stuck, topics_by_lane(directory))),
                )
        if now - moved >= _STILL_S and not why and not reported:
            reported = True
            inform(f"no range moved for {_STILL_S:.0f} s: if copies are damaged, replicas log `can't complete a copy`")
        time.sleep(_POLL_S)


# --- sequencer --------------------------------------------------------------------------------------------------------
# sequencer hand-over.
sequencer = Verbs(help="Move the sequencer to another process.", no_args_is_help=True, rich_markup_mode=None)


@sequencer.callback()
def about() -> None:
    """Move the sequencer to another process.

    One sequencer is the leader. The others are standbys (`up --standbys`): when the leader dies, a standby takes over
    immediately. `embarcadero status` shows the leader and the standbys.
    """


@sequencer.command("hand-over")
def hand_over(
    to: Annotated[
        int | None, typer.Option(show_default=False, help="Number of the new leader. Default: any standby.")
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Hand over leadership from the leading sequencer to a standby.

    The standby prepares while the leader still works, so there is no delay to detect a failure. Publishers and readers
    see a pause of a few milliseconds and no error. The earlier leader becomes a standby. Use this before maintenance of
    the machine, the core or the process of a sequencer.

    Examples:

        embarcadero sequencer hand-over

        embarcadero sequencer hand-over --to 1 --json
    """
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.node.standby import hand_over as carry_out

    done = carry_out(ClusterFolder(data_dir_or_default(data_dir)), to)
    if json:
        print_json(done)
    else:
        took = done.seconds * 1_000
        print(f"sequencer {done.now} leads now, in epoch {done.epoch}; before: sequencer {done.before}; {took:.0f} ms")
