"""top: the cluster as it is now, in the terminal."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, print_json
from embarcadero.errors import NotRunning

if TYPE_CHECKING:
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.watch.scrape import Scrape
    from embarcadero.watch.top import Picture

_HISTORY = 120


def top(
    once: Annotated[bool, typer.Option("--once", help="Show one picture, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two pictures.")] = 1.0,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Watch the running cluster: brokers, topics, the sequencer, rates and latencies. Ctrl-C ends it.

    With --json every picture is an object on a line of its own.

    Examples:

        embarcadero top

        embarcadero top --once --json
    """
    from embarcadero.node.cluster import ClusterFolder

    watcher = _Watcher(ClusterFolder(data_dir_or_default(data_dir)))
    try:
        watcher.look()
        if json or once:
            _plain(watcher, interval, json=json, once=once)
        else:
            _live(watcher, interval)
    except KeyboardInterrupt:
        return


class _Watcher:
    """Looks at the cluster again and again."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._before: dict[str, Scrape] = {}
        self.history: list[float] = []

    def look(self) -> Picture:
        """The cluster now, with rates since the last look. NotRunning when there is none."""
        from embarcadero.placement.directory import Directory
        from embarcadero.placement.embedded import SqliteStore
        from embarcadero.watch.places import Places
        from embarcadero.watch.scrape import scrape_all
        from embarcadero.watch.top import Facts, picture

        if self._folder.running_pid() is None:
            raise NotRunning(f"no cluster is running in {self._folder.path}", "start one with `embarcadero up`")
        with closing(SqliteStore(self._folder.store_path)) as store:
            directory = Directory(store)
            facts = Facts(
                cluster=directory.cluster_id,
                members=directory.members(),
                topics=directory.topics(),
                lanes=directory.lanes(),
                epoch=directory.started_epoch(),
            )
        now = scrape_all(Places(self._folder.path).read())
        seen = picture(facts, datetime.now(UTC).strftime("%H:%M:%SZ"), self._before, now)
        self._before = now
        self.history = [*self.history[-_HISTORY:], seen.in_records_s]
        return seen


def _plain(watcher: _Watcher, interval: float, *, json: bool, once: bool) -> None:
    from rich.console import Console

    from embarcadero.watch.view import view

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

    from embarcadero.watch.view import view

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(view(watcher.look(), watcher.history, console.width), refresh=True)
            time.sleep(interval)
