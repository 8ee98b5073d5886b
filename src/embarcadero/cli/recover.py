"""topic recover: what keeps a topic's lanes from coming back, and an operator's word that losing it is better."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, note, print_json, print_table
from embarcadero.errors import TimedOut, UnknownTopic

if TYPE_CHECKING:
    from embarcadero.node.cluster import ClusterFolder, ClusterInfo
    from embarcadero.placement.directory import Directory

_COLUMNS = ["lane", "range", "copies", "needed", "answered", "missing"]
_POLL_S = 0.1
_WAIT_S = 60.0


def recover(
    name: Annotated[str, typer.Argument(help="Name of the topic.")],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on with the copies that are there. The price: see above.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when the topic takes records again.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show which copies a topic waits for after a loss of memory; with --accept-loss, go on without them.

    A lane whose memory was lost comes back once enough of its replicas have said what they have: so many that no
    durable record can be missing. If those disks are gone for good, --accept-loss recovers what the others have. The
    price: records that were acked with ack=2 may be lost. Their positions become a LOST gap, and are never used again.

    Examples:

        embarcadero topic recover orders

        embarcadero topic recover orders --accept-loss
    """
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.placement.directory import Directory
    from embarcadero.placement.embedded import SqliteStore

    folder = ClusterFolder(data_dir_or_default(data_dir))
    info = folder.require_running()
    with closing(SqliteStore(folder.store_path)) as store:
        directory = Directory(store)
        waiting = _waiting(info, directory, name)
        short = [lane for lane in waiting if lane["answered"] < lane["needed"]]
        if accept_loss and waiting:
            if not yes:
                without = f"without {_missing(short)}" if short else "on fewer disks than it wants"
                question = f"Recover topic {name} {without}? Records acked with ack=2 may be lost."
                typer.confirm(question, abort=True, err=True)
            for lane in waiting:
                directory.accept_loss(lane["lane"])
            if wait:
                _until_recovered(folder, info, directory, name)
    _print(name, waiting, short, accept_loss, json)


def _waiting(info: ClusterInfo, directory: Directory, name: str) -> list[dict[str, Any]]:
    """The topic's lanes that are being recovered: who has answered, who is missing and why."""
    from pathlib import Path

    from embarcadero.fabric.shared import SharedFabric
    from embarcadero.node.scene import LaneState, Scene

    scene = Scene(SharedFabric(Path(info.fabric), info.generation), directory)
    if name not in {topic.name for topic in scene.topics.values()}:
        raise UnknownTopic(f"there is no topic {name}", "`embarcadero topic list` lists them")
    found = []
    for range_ in scene.last.values():
        if scene.topic(range_.lane) != name or scene.state(range_) is not LaneState.RECOVERING:
            continue
        silent = {ref.replica: why for ref in range_.replicas if (why := scene.silence(range_, ref))}
        copies = len(range_.replicas)
        found.append({
            "lane": range_.lane, "range": range_.number, "copies": copies, "needed": copies - range_.durable_on + 1,
            "answered": copies - len(silent), "missing": silent,
        })  # fmt: skip
    return found


def _missing(lanes: list[dict[str, Any]]) -> str:
    found = {number: why for lane in lanes for number, why in lane["missing"].items()}
    return ", ".join(f"replica {number} ({why})" for number, why in sorted(found.items()))


def _until_recovered(folder: ClusterFolder, info: ClusterInfo, directory: Directory, name: str) -> None:
    give_up = time.monotonic() + _WAIT_S
    while _waiting(info, directory, name):
        if time.monotonic() > give_up:
            raise TimedOut(f"topic {name} did not come back within {_WAIT_S:.0f} s", f"see {folder.logs}/sequencer.log")
        time.sleep(_POLL_S)
        folder.require_running()


def _print(name: str, waiting: list[dict[str, Any]], short: list[dict[str, Any]], accepted: bool, json: bool) -> None:
    if json:
        print_json({"topic": name, "waiting": waiting, "accepted": bool(accepted and waiting)})
        return
    if not waiting:
        print(f"topic {name} waits for nothing")
        return
    rows = [[*list(lane.values())[:-1], _missing([lane])] for lane in waiting]
    print_table(f"topic {name}", _COLUMNS, rows)
    if accepted:
        print(f"topic {name} goes on with what the others have")
    elif not short:
        print("enough copies have answered: it comes back by itself, once they are complete")
    else:
        note("start the replicas that are missing; if their disks are gone for good: --accept-loss")
