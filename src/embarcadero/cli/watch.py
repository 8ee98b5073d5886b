"""top: the cluster as it is now, in the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, print_json
from embarcadero.errors import BadFrame, NotRunning, OutcomeUnknown, Retriable, Unreachable
from embarcadero.types import Member

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.watch.endpoints import NodeEndpoint, Scrape
    from embarcadero.watch.top import Picture, StoreFacts


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
        return self._seen(facts, [place for place in EndpointFiles(self._folder.path).read() if place.running])

    def _seen(self, facts: StoreFacts, places: list[NodeEndpoint]) -> Picture:
        from embarcadero.watch.endpoints import scrape_all
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
        found = statuses(self._log)
        places = remote_endpoints(found)
        if not places:
            told = ", ".join(sorted({str(status.get("metrics") or "none") for status in found}))
            hint = "`top` reads metrics: serve them on an address that this machine reaches (metrics.host)"
            raise Unreachable(f"no metrics port can be reached from here; brokers name {told}", hint)
        return self._seen(remote_facts(self._log, found), places)


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
# A cluster seen from another machine: what its brokers and its metrics tell, without its folder.
_ASK_S = 3.0
_BYTES_MAX = 1 << 20


@contextmanager
def connected(brokers: str) -> Iterator[Log]:
    """A client of brokers that were named with commas."""
    import embarcadero
    from embarcadero.cli.output import find_brokers, settings

    with embarcadero.connect(find_brokers(brokers, None), config=settings(), timeout=_ASK_S) as log:
        yield log


def statuses(log: Log) -> list[dict[str, Any]]:
    """What all live brokers say about themselves, by number. Unreachable if none answers."""
    found = {str(status["address"]): status for status in log.status(timeout=_ASK_S)}
    if not found:
        raise Unreachable(f"no broker answered within {_ASK_S:g} s", "check the addresses, and `status` over there")
    others = {str(address) for status in found.values() for address in status.get("brokers", ())} - found.keys()
    for address in sorted(others):
        with suppress(Retriable, OutcomeUnknown), connected(address) as other:  # one that is silent is left out
            found |= {str(status["address"]): status for status in other.status(timeout=_ASK_S)}
    return sorted(found.values(), key=lambda status: int(status["broker"]))


def remote_endpoints(found: list[dict[str, Any]]) -> list[NodeEndpoint]:
    """Where all processes serve their metrics, as the first one that can be reached tells; empty: none can.

    On loopback only if brokers are: a loopback address of another machine leads to a cluster on this one.
    """
    from embarcadero.watch.endpoints import ANY

    for status in found:
        broker = str(status["address"]).rpartition(":")[0]
        host, _, port = str(status.get("metrics") or "").rpartition(":")
        if host.strip("[]") in ANY:
            host = broker
        here = _on_loopback(broker)
        with suppress(OSError, ValueError, msgspec.MsgspecError):  # the next one may be reached
            if port and (here or not _on_loopback(host)):
                places = _ask(f"http://{host}:{port}/targets")
                if reached := [place for place in places if here or not _on_loopback(place.host)]:
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
    """What `top` needs to know beside metrics."""
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
        raise BadFrame(f"broker {status['broker']} says that its address is {status['address']!r}", "see its version")
    return Member(
        broker=int(status["broker"]), incarnation=int(status["incarnation"]), handle=0, host=host, port=int(port), pid=0
    )
