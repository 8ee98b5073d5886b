"""replica list, add, drain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, note, print_json, print_table
from embarcadero.cli.settings import Verbs

if TYPE_CHECKING:
    from pathlib import Path

    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.node.scene import ReplicaReport

app = Verbs(help="List, add and drain replicas.", no_args_is_help=True, rich_markup_mode=None)

_COLUMNS = ["replica", "incarnation", "pid", "state", "health", "lag", "open", "sealed", "folder"]
_POLL_S = 0.1
_START_S = 60.0


def _folder(data_dir: Path | None) -> ClusterFolder:
    from embarcadero.node.cluster import ClusterFolder

    return ClusterFolder(data_dir_or_default(data_dir))


def _find(folder: ClusterFolder, number: int) -> ReplicaReport | None:
    from embarcadero.node.report import report

    return next((replica for replica in report(folder).replicas if replica.id == number), None)


def _row(replica: ReplicaReport) -> list[object]:
    health = "; ".join(replica.health) or "ok"
    return [
        replica.id, replica.incarnation, replica.pid, replica.state, health, replica.lag, replica.open_ranges,
        replica.sealed_ranges, replica.folder,
    ]  # fmt: skip


@app.command("list")
def list_replicas(data_dir: DataDir = None, json: Json = False) -> None:
    """List the replicas of a running cluster.

    `lag` is how many batches the worst lane of a replica is behind the order.
    """
    from embarcadero.node.report import report

    running = report(_folder(data_dir))
    if json:
        print_json(running.replicas)
    else:
        print_table("replicas", _COLUMNS, [_row(replica) for replica in running.replicas])


@app.command()
def add(data_dir: DataDir = None, json: Json = False) -> None:
    """Start one more replica, for as long as its folder is there.

    New ranges are placed on it from now on. It makes the folder of the next replica in the cluster's folder; the
    supervisor sees it, and starts the replica now and with every `up`.

    Example:

        embarcadero replica add
    """
    from embarcadero.errors import ClusterError, TooMany
    from embarcadero.limits import REPLICAS_MAX

    folder = _folder(data_dir)
    number = max(folder.replicas(folder.require_running().config.cluster.replicas), default=-1) + 1
    if number >= REPLICAS_MAX:
        raise TooMany(f"there are {REPLICAS_MAX} replicas already", "use those")
    folder.replica(number).mkdir(mode=0o700)
    give_up = time.monotonic() + _START_S
    while (found := _find(folder, number)) is None or found.state != "live":
        if time.monotonic() > give_up:
            raise ClusterError(f"replica {number} did not start within {_START_S:.0f} s", f"see {folder.logs}")
        time.sleep(_POLL_S)
    if json:
        print_json(found)
    else:
        print(f"replica {number} runs, in {found.folder}")


@app.command()
def drain(
    replica: Annotated[int, typer.Argument(help="Its number.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it have ranges again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when no range is left on it.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Move everything away from a replica: it gets no new ranges, and others copy those that it has.

    It is refused when no other live replica could take its ranges. A dead replica can be drained, too: its ranges are
    copied from their other copies, or from its folder. When nothing is left on it, stop the cluster and remove its
    folder, or leave it for `--undo`.

    Example:

        embarcadero replica drain 2
    """
    from contextlib import closing

    from embarcadero.placement.directory import Directory
    from embarcadero.placement.embedded import SqliteStore

    folder = _folder(data_dir)
    folder.require_running()
    with closing(SqliteStore(folder.store_path)) as store:
        directory = Directory(store)
        directory.undrain_replica(replica) if undo else directory.drain_replica(replica)
        left = len(directory.ranges_on(replica))
        waits_for = ""
        while wait and left and not undo:
            time.sleep(_POLL_S)
            if (why := directory.drain_blocked(replica)) != waits_for and not json:
                note(f"replica {replica}: {why or 'its ranges move again'}")
            waits_for = why
            if (now := len(directory.ranges_on(replica))) != left and not json:
                note(f"{now} ranges left on replica {replica}")
            left = now
    facts: dict[str, Any] = {"replica": replica, "draining": not undo, "ranges": left}
    if json:
        print_json(facts)
    elif undo:
        print(f"replica {replica} may have ranges again")
    else:
        print(f"replica {replica} is drained: {left} ranges are on it")
