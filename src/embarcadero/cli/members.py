"""replica list, add, drain."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import DataDir, Json, Verbs, data_dir_or_default, note, print_json, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from embarcadero.node.cluster_view import ReplicaReport
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.placement.directory import Directory
    from embarcadero.types import Range


replicas = Verbs(help="List, add and drain replicas.", no_args_is_help=True, rich_markup_mode=None)

_COLUMNS = ["replica", "incarnation", "pid", "state", "health", "lag", "open", "sealed", "folder"]
_POLL_S = 0.1
_START_S = 60.0
_LOOK_S = 2.0
_STILL_S = 30.0
"""So long nothing moves before `drain` says so."""


def _folder(data_dir: Path | None) -> ClusterFolder:
    from embarcadero.node.folder import ClusterFolder

    return ClusterFolder(data_dir_or_default(data_dir))


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

    `lag` is how many batches the worst lane of a replica is behind the order.
    """
    from embarcadero.node.report import report

    running = report(_folder(data_dir))
    if json:
        print_json(running.replicas)
    else:
        print_table("replicas", _COLUMNS, [_row(replica) for replica in running.replicas])


@replicas.command()
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


@replicas.command()
def drain(
    replica: Annotated[int, typer.Argument(help="Its number.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it have ranges again.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when no range is left on it.")] = True,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Move everything away from a replica: it gets no new ranges, and others copy those that it has.

    It is refused when no other live replica could take its ranges. A dead replica can be drained, too: its ranges are
    copied from their other copies, or from its folder. If no copy of some ranges is complete, all others are moved, and
    an error names those that stay and what to do. When nothing is left on it, stop the cluster and remove its folder,
    or leave it for `--undo`.

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
        left = len(directory.replicas.ranges_on(replica))
    facts: dict[str, Any] = {"replica": replica, "draining": not undo, "ranges": left, "unreadable": len(stuck)}
    if json:
        print_json(facts)
    elif undo:
        print(f"replica {replica} may have ranges again")
    else:
        print(f"replica {replica} is drained: {left} ranges are on it")


def _unreadable(directory: Directory, replica: int) -> list[Range]:
    """Ranges on a replica of which no copy is complete."""
    from embarcadero.node.cluster_view import unreadable_ranges

    members = {member.replica: member for member in directory.replicas.all()}
    return unreadable_ranges(directory.replicas.ranges_on(replica), members, directory.topics.trims())


def _wait_until_moved(directory: Directory, replica: int, stuck: list[Range], quiet: bool) -> None:
    """Wait until no range is on a replica; ClusterError once those that are left can't be copied from anywhere.

    Files come and go while replicas work: only what is found twice in a row counts.
    """
    from embarcadero.errors import ClusterError
    from embarcadero.node.cluster_view import in_words, topics_by_lane

    def say(text: str) -> None:
        if not quiet:
            note(text)

    left, waits_for, told = len(directory.replicas.ranges_on(replica)), "", False
    looked = moved = time.monotonic()
    while ranges := directory.replicas.ranges_on(replica):
        if (why := directory.replicas.drain_blocked(replica)) != waits_for:
            say(f"replica {replica}: {why or 'its ranges move again'}")
            waits_for = why
        now = time.monotonic()
        if len(ranges) != left:
            say(f"{len(ranges)} ranges left on replica {replica}")
            left, moved, told = len(ranges), now, False
        if now - looked >= _LOOK_S:
            before, stuck, looked = stuck, _unreadable(directory, replica), now
            if len(stuck) == len(before) == left:
                raise ClusterError(
                    f"{left} ranges stay on replica {replica}: no copy of them is complete",
                    "; ".join(in_words(stuck, topics_by_lane(directory))),
                )
        if now - moved >= _STILL_S and not why and not told:
            told = True
            say(f"nothing moved for {_STILL_S:.0f} s: if copies are damaged, replicas log `can't complete a copy`")
        time.sleep(_POLL_S)


# --- sequencer --------------------------------------------------------------------------------------------------------
# sequencer hand-over.
sequencer = Verbs(help="Move the sequencer to another process.", no_args_is_help=True, rich_markup_mode=None)


@sequencer.callback()
def about() -> None:
    """Move the sequencer to another process.

    One sequencer reigns; others stand by (`up --standbys`), and one of them takes over at once when it dies.
    `embarcadero status` shows which is which.
    """


@sequencer.command("hand-over")
def hand_over(
    to: Annotated[
        int | None, typer.Option(show_default=False, help="Number of the one that shall reign. Default: any.")
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Let a sequencer that stands by take over from the one that reigns, in order.

    Nobody has to wait for a failure to be noticed: the one that stands by prepares while the other still works, and
    publishers and readers see a pause of some milliseconds and no error. The one that reigned stands by afterwards. Use
    it before you work on the machine, the core or the process of a sequencer.

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
        print(f"sequencer {done.now} reigns now, in epoch {done.epoch}; before, sequencer {done.before}; {took:.0f} ms")
