"""Metrics endpoints: their addresses, the server of a node, and a client for all nodes.

Each process writes a small file, <data_dir>/watch/<node>.json, with the address of its metrics and the result of an
orderly stop. It serves /metrics, /health, /ready and /targets over HTTP, in its event loop. A request reads the
counters; without requests there is no work. Requests are small, bounded and rare.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import msgspec

from embarcadero.limits import MIB, WATCH_CONNECTIONS_MAX, WATCH_REQUEST_BYTES_MAX, WATCH_REQUEST_S_MAX
from embarcadero.watch.metrics import CONTENT_TYPE, Page, WatchedRole, write_process
from embarcadero.wire.codec import MAGIC


class NodeEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node process. `left`: for each broker after an orderly stop, its counts of settled and unsettled requests."""

    roles: str
    pid: int
    host: str
    port: int
    left: dict[str, dict[str, int]] | None = None

    @property
    def address(self) -> str:
        """The host:port of its metrics; empty if it serves none."""
        if not self.port:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of its metrics."""
        return f"http://{self.address}/metrics"

    @property
    def running(self) -> bool:
        """Whether its process is running."""
        return self.left is None and Path(f"/proc/{self.pid}").exists()


_DECODER: Final = msgspec.json.Decoder(NodeEndpoint)


class EndpointFiles:
    """The endpoint files of one cluster."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "watch"

    def write(self, node: NodeEndpoint) -> None:
        """Replace the file of a node atomically."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{node.roles.replace(':', '-').replace(',', '+')[:100]}.json"
        hidden = path.with_suffix(f".{os.getpid()}.new")
        hidden.write_bytes(msgspec.json.encode(node))
        hidden.replace(path)

    def clear(self) -> None:
        """Remove the files of an earlier run."""
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    def read(self) -> list[NodeEndpoint]:
        """Read the files of all nodes of this run, by role; skip invalid files."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                found.append(_DECODER.decode(path.read_bytes()))
        return found


# --- targets ----------------------------------------------------------------------------------------------------------
# Discovery for Prometheus: the current addresses of the metrics of all processes of a cluster.
#
# Every process serves the document at `/targets`, in the format of `http_sd_configs`, built from the endpoint files. A
# process that restarts on another port appears as soon as it serves. A process that died keeps its address, so that
# Prometheus sees it as down.
ANY: Final = frozenset({"0.0.0.0", "::"})


class TargetGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its address, and the labels of all its metrics."""

    targets: list[str]
    labels: dict[str, str]


_GROUPS: Final = msgspec.json.Decoder(list[TargetGroup])
NODE: Final = "node"
"""The label with the roles of a process, such as `broker:0`."""


def targets(nodes: Iterable[NodeEndpoint], asked: str) -> list[TargetGroup]:
    """List all processes with metrics, except after an orderly stop. `asked`: the host name in the peer's request."""
    return [
        TargetGroup(targets=[_reached(node, asked).address], labels={NODE: node.roles})
        for node in nodes
        if node.left is None and node.port
    ]


def _reached(node: NodeEndpoint, asked: str) -> NodeEndpoint:
    """Replace a wildcard address by the host name that the peer used."""
    return msgspec.structs.replace(node, host=asked) if node.host in ANY and asked else node


def endpoints_of(document: bytes) -> list[NodeEndpoint]:
    """Parse the processes in a `/targets` document. Raise msgspec.MsgspecError if it is invalid."""
    found = []
    for group in _GROUPS.decode(document):
        for target in group.targets:
            host, _, port = target.rpartition(":")
            if port.isdigit():
                found.append(
                    NodeEndpoint(roles=group.labels.get(NODE, ""), pid=0, host=host.strip("[]"), port=int(port))
                )
    return found


# --- scrape -----------------------------------------------------------------------------------------------------------
# Read the metrics of all nodes of a cluster, each with a timeout; skip nodes that do not answer.
_TIMEOUT_S: Final = 1.5
_PAGE_BYTES_MAX: Final = 16 * MIB

Labels = dict[str, str]


class Scrape(NamedTuple):
    """The answer of one node: samples by name."""

    node: NodeEndpoint
    at: float
    samples: dict[str, list[tuple[Labels, float]]]


def scrape_all(nodes: Iterable[NodeEndpoint]) -> dict[str, Scrape]:
    """Scrape all nodes; return the nodes that answer, by their roles."""
    running = [node for node in nodes if node.port]
    if not running:
        return {}
    with ThreadPoolExecutor(max_workers=min(16, len(running))) as pool:
        return {found.node.roles: found for found in pool.map(_scrape, running) if found is not None}


def _scrape(node: NodeEndpoint) -> Scrape | None:
    try:
        with urlopen(node.url, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_PAGE_BYTES_MAX).decode()
        return Scrape(node, time.monotonic(), parse(text))
    except (OSError, ValueError):
        return None


def parse(text: str) -> dict[str, list[tuple[Labels, float]]]:
    """Parse a page of metrics into samples by name."""
    from prometheus_client.parser import text_string_to_metric_families

    found: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return dict(found)


class Change:
    """Two scrapes of one node: current values, and rates between them. After a restart, a node counts from zero."""

    def __init__(self, before: Scrape | None, now: Scrape) -> None:
        same = before is not None and before.node.pid == now.node.pid
        self._before, self._now = (before if same else None), now
        self._seconds = max(1e-6, now.at - before.at) if before is not None else 0.0

    def value(self, name: str, **labels: object) -> float:
        """The sum of the current samples with these labels."""
        return _sum(self._now, name, labels)

    def rate(self, name: str, **labels: object) -> float:
        """The growth per second."""
        if not self._seconds:
            return 0.0
        return max(0.0, self.value(name, **labels) - _sum(self._before, name, labels)) / self._seconds

    def labels(self, name: str, label: str) -> set[str]:
        """All values of a label."""
        return {labels[label] for labels, _ in self._now.samples.get(name, [])}

    def buckets(self, name: str) -> dict[float, float]:
        """Observations at or below each bound since the earlier scrape; all observations without an earlier scrape."""
        grown: defaultdict[float, float] = defaultdict(float)
        for scrape, sign in ((self._now, 1), (self._before, -1)):
            for labels, count in scrape.samples.get(f"{name}_bucket", []) if scrape else []:
                grown[float(labels["le"])] += sign * count
        return grown


def _sum(scrape: Scrape | None, name: str, wanted: dict[str, object]) -> float:
    if scrape is None:
        return 0.0
    wanted_text = {label: str(value) for label, value in wanted.items()}
    return sum(value for labels, value in scrape.samples.get(name, []) if wanted_text.items() <= labels.items())


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """The quantile of a histogram, by linear interpolation between bounds; None without observations."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted, low, below = share * total, 0.0, 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= wanted:
            inside = buckets[bound] - below
            return low if math.isinf(bound) or not inside else low + (bound - low) * (wanted - below) / inside
        low, below = bound, buckets[bound]
    return low


# --- server -----------------------------------------------------------------------------------------------------------
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_JSON = "application/json"
_MAGIC = MAGIC.to_bytes(2, "little")
_NO_BROKER = b'{"error":"this port serves metrics; brokers listen on other ports"}'
_HOST = re.compile(rb"\r\nhost:[ \t]*\[?([0-9A-Za-z.:_-]{1,253}?)\]?(?::\d+)?\r\n", re.IGNORECASE)

HttpAnswer = tuple[int, str, bytes]


class Endpoint:
    """The HTTP server of this process, for all its roles."""

    def __init__(self, version: str, endpoint_files: EndpointFiles) -> None:
        self._version, self._endpoint_files = version, endpoint_files
        self._roles: list[tuple[WatchedRole, asyncio.Task[Any]]] = []
        self._leaving = False
        self._open = 0

    def host(self, roles: Iterable[tuple[WatchedRole, asyncio.Task[Any]]]) -> None:
        """Register the roles of this process, each with its task."""
        self._roles = list(roles)

    def leave(self) -> None:
        """Report the process as not ready, because it stops."""
        self._leaving = True

    async def serve(self, sock: socket.socket) -> asyncio.Server:
        """Start the server; the caller closes it."""
        return await asyncio.start_server(self._serve_one, sock=sock, limit=WATCH_REQUEST_BYTES_MAX)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= WATCH_CONNECTIONS_MAX:
                async with asyncio.timeout(WATCH_REQUEST_S_MAX):
                    start = await reader.readexactly(len(_MAGIC))
                    if start == _MAGIC:  # a client of brokers recognises an answer in HTTP
                        writer.write(_response(400, _JSON, _NO_BROKER, body_too=True))
                        return
                    head = start + await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(*await self._answer(head), body_too=not head.startswith(b"HEAD")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a peer with an invalid request gets no answer
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> HttpAnswer:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return 405, _JSON, b'{"error":"the method is not GET or HEAD"}'
        match path:
            case b"/metrics":
                return 200, CONTENT_TYPE, self.page()
            case b"/health":
                return _verdict("healthy", {role.name: _ended(task) for role, task in self._roles})
            case b"/ready":
                return _verdict("ready", {role.name: await self._unready(role, task) for role, task in self._roles})
            case b"/targets":
                return 200, _JSON, msgspec.json.encode(targets(self._endpoint_files.read(), _host(head)))
        return 404, _JSON, b'{"error":"unknown path; use /metrics, /health, /ready or /targets"}'

    async def _unready(self, role: WatchedRole, task: asyncio.Task[Any]) -> str:
        return "leaving" if self._leaving else _ended(task) or await role.unready()

    def page(self) -> bytes:
        """Return all metrics of this process."""
        page = Page()
        write_process(page)
        for role, _ in self._roles:
            page.put("embarcadero_up", 1, role=role.name, version=self._version)
            role.write(page)
        return page.text()


def _host(head: bytes) -> str:
    """The host name in the request's `Host` header; empty without a valid header."""
    found = _HOST.search(head)
    return found[1].decode() if found else ""


def _ended(task: asyncio.Task[Any]) -> str:
    return "its task has ended" if task.done() else ""


def _verdict(what: str, problems: dict[str, str]) -> HttpAnswer:
    """Answer 200 if all roles are well, else 503. The body has the state of each role."""
    good = bool(problems) and not any(problems.values())
    body = {what: good, "roles": {name: why or "ok" for name, why in problems.items()}}
    return 200 if good else 503, _JSON, msgspec.json.encode(body)


def _response(status: int, kind: str, body: bytes, *, body_too: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head + body if body_too else head
