"""top: the cluster as it is now, in the terminal."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, print_json
from embarcadero.errors import NotRunning, Unreachable

if TYPE_CHECKING:
    from embarcadero.client.sync import Log
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.watch.places import Place
    from embarcadero.watch.scrape import Scrape
    from embarcadero.watch.top import Facts, Picture

_HISTORY = 120


def top(
    once: Annotated[bool, typer.Option("--once", help="Show one picture, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two pictures.")] = 1.0,
    brokers: Annotated[
        str | None,
        typer.Option("--brokers", show_default=False, help="Watch from another machine: host:port, with commas."),
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Watch the running cluster: brokers, topics, the sequencer, rates and latencies. Ctrl-C ends it.

    With --json every picture is an object on a line of its own.

    Examples:

        embarcadero top

        embarcadero top --once --json

        embarcadero top --brokers log.example.com:9092
    """
    from embarcadero.cli.remote import connected
    from embarcadero.node.cluster import ClusterFolder

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
    """Looks at the cluster again and again."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder
        self._start()

    def _start(self) -> None:
        self._before: dict[str, Scrape] = {}
        self.history: list[float] = []

    def look(self) -> Picture:
        """The cluster now, with rates since the last look. NotRunning when there is none."""
        from embarcadero.placement.directory import Directory
        from embarcadero.placement.embedded import SqliteStore
        from embarcadero.watch.places import Places
        from embarcadero.watch.top import Facts

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
        return self._seen(facts, [place for place in Places(self._folder.path).read() if place.running])

    def _seen(self, facts: Facts, places: list[Place]) -> Picture:
        from embarcadero.watch.scrape import scrape_all
        from embarcadero.watch.top import picture

        now = scrape_all(places)
        seen = picture(facts, datetime.now(UTC).strftime("%H:%M:%SZ"), self._before, now)
        self._before = now
        self.history = [*self.history[-_HISTORY:], seen.in_records_s]
        return seen


class _RemoteWatcher(_Watcher):
    """The same through brokers and metrics."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._start()

    def look(self) -> Picture:
        """The cluster now. Unreachable when no broker, or no metrics port, can be reached."""
        from embarcadero.cli.remote import remote_facts, remote_places, statuses

        found = statuses(self._log)
        places = remote_places(found)
        if not places:
            told = ", ".join(sorted({str(status.get("metrics") or "none") for status in found}))
            hint = "`top` reads metrics: serve them on an address that this machine reaches (metrics.host)"
            raise Unreachable(f"no metrics port can be reached from here; brokers name {told}", hint)
        return self._seen(remote_facts(self._log, found), places)


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
