"""up, down, node, status: a cluster's processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, note, print_json, print_table
from embarcadero.limits import LOG_BYTES, MIB

if TYPE_CHECKING:
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.node.report import ClusterReport


def up(
    brokers: Annotated[int, typer.Option(help="How many brokers.")] = 4,
    port: Annotated[int, typer.Option(help="Port of broker 0; the others follow. 0 takes free ports.")] = 9092,
    host: Annotated[str, typer.Option(help="Address to listen on, and the one that clients are told.")] = "127.0.0.1",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")] = False,
    processes: Annotated[str, typer.Option(help="role: a process per role. one: a single process.")] = "role",
    fabric: Annotated[
        Path | None, typer.Option(show_default=False, help="Folder of the fabric. Default: shared memory with room.")
    ] = None,
    log_mib: Annotated[int, typer.Option(help="MiB of payloads per broker; a power of two.")] = LOG_BYTES // MIB,
    hugepages: Annotated[bool, typer.Option("--hugepages", help="Advise huge pages for the fabric.")] = False,
    pin: Annotated[str, typer.Option(help="Cores for the sequencer and brokers, in turn, such as 0,1.")] = "",
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Start a cluster on this machine, and keep it running.

    A process that dies is started again. Ctrl-C stops all of it. Topics stay; without replicas their records live
    as long as the cluster runs.

    Examples:

        embarcadero up

        embarcadero up --brokers 2 --port 0 --detach --json
    """
    from embarcadero.node.supervisor import UpOptions

    options = UpOptions(
        data_dir=str(data_dir_or_default(data_dir)),
        brokers=brokers,
        host=host,
        port=port,
        processes=processes,
        fabric=str(fabric or ""),
        log_bytes=log_mib * MIB,
        hugepages=hugepages,
        pin=pin,
    )
    if detach:
        _up_detached(options, json)
    else:
        _up_here(options, json)


def _up_detached(options: Any, json: bool) -> None:
    from embarcadero.node.background import start

    process, remark = start(options)
    process.returncode = 0  # it goes on without us: its end is not ours to wait for
    _print_started(_folder(Path(options.data_dir)), remark, json)


def _up_here(options: Any, json: bool) -> None:
    import asyncio
    import logging

    from embarcadero.node.cluster import FabricChoice
    from embarcadero.node.supervisor import Supervisor

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    def on_ready(choice: FabricChoice) -> None:
        _print_started(_folder(Path(options.data_dir)), choice.note, json)
        if not json:
            note("Ctrl-C stops the cluster.")

    asyncio.run(Supervisor(options).run(on_ready))


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

    Example:

        embarcadero down
    """
    from embarcadero.node.background import stop

    folder = _folder(data_dir)
    pid = stop(folder)
    if json:
        print_json({"stopped": pid, "data_dir": str(folder.path)})
    else:
        print(f"stopped the cluster in {folder.path}")


def node(
    roles: Annotated[str, typer.Option(help="Roles of this process: broker:<number> and sequencer, with commas.")],
    data_dir: DataDir = None,
) -> None:
    """Host roles of a running cluster in this process, in the foreground.

    `up` starts nodes by itself. Use this to run one under another process manager, or to add a broker by hand.

    Example:

        embarcadero node --roles broker:4
    """
    import logging

    from embarcadero.node.node import run_node
    from embarcadero.node.roles import parse_roles

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run_node(_folder(data_dir), parse_roles(roles))


def status(data_dir: DataDir = None, json: Json = False) -> None:
    """Show brokers, the sequencer, topics with their ends, and the fabric of a running cluster.

    Example:

        embarcadero status --json
    """
    from embarcadero.fabric.primitives import describe
    from embarcadero.node.report import report

    running = report(_folder(data_dir))
    topics = _topics(running)
    if json:
        print_json({"cluster": running, "topics": topics, "primitives": describe()})
        return
    _print_processes(running)
    rows = [[t["name"], t["order"], t["partitions"], t["index"], t["seq"], len(t["lanes"])] for t in topics]
    print_table("topics", ["name", "order", "partitions", "next index", "next seq", "lanes"], rows)
    print(f"fabric: {running.fabric}. {describe()}")


def _topics(running: ClusterReport) -> list[dict[str, Any]]:
    """All topics with their ends, as a broker tells them."""
    import embarcadero

    found: list[dict[str, Any]] = []
    with embarcadero.connect(running.addresses) as log:
        for topic in log.topics():
            end = log.tail(topic.name)
            found.append(
                {
                    "name": topic.name,
                    "order": topic.order,
                    "partitions": topic.partitions,
                    "index": end.index,
                    "seq": end.seq,
                    "lanes": list(end.lanes) or [end],
                }
            )
    return found


def _print_processes(running: ClusterReport) -> None:
    rows = [[f"broker {b.id}", b.incarnation, b.address, b.pid, b.state] for b in running.brokers]
    sequencer = running.sequencer
    state = "live" if sequencer.pid else "starting"
    rows.append(["sequencer", f"epoch {sequencer.epoch}", "", sequencer.pid or "", state])
    rows.append(["supervisor", "", "", running.supervisor.pid, "live"])
    title = f"cluster {running.cluster} in {running.data_dir}"
    print_table(title, ["role", "incarnation", "address", "pid", "state"], rows)


def _folder(data_dir: Path | None) -> ClusterFolder:
    from embarcadero.node.cluster import ClusterFolder

    return ClusterFolder(data_dir_or_default(data_dir))
