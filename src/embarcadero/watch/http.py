"""A node's metrics port: /metrics, /health, /ready and /targets over HTTP, in the node's own event loop.

Nothing is kept up to date for it: counters are read when somebody asks. Requests are small, bounded and few.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from typing import Any

import msgspec

from embarcadero.limits import WATCH_CONNECTIONS_MAX, WATCH_REQUEST_BYTES_MAX, WATCH_REQUEST_S_MAX
from embarcadero.watch.endpoints import EndpointFiles, targets
from embarcadero.watch.metrics import CONTENT_TYPE, Page
from embarcadero.watch.roles import WatchedRole, write_process

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_JSON = "application/json"
_HOST = re.compile(rb"\r\nhost:[ \t]*\[?([0-9A-Za-z.:_-]{1,253}?)\]?(?::\d+)?\r\n", re.IGNORECASE)

HttpAnswer = tuple[int, str, bytes]


class Endpoint:
    """Answers for all roles of this process."""

    def __init__(self, version: str, endpoint_files: EndpointFiles) -> None:
        self._version, self._endpoint_files = version, endpoint_files
        self.roles: list[tuple[WatchedRole, asyncio.Task[Any]]] = []
        self.leaving = False
        self._open = 0

    async def serve(self, sock: socket.socket) -> asyncio.Server:
        """Listen; the caller closes the server."""
        return await asyncio.start_server(self._serve_one, sock=sock, limit=WATCH_REQUEST_BYTES_MAX)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= WATCH_CONNECTIONS_MAX:
                async with asyncio.timeout(WATCH_REQUEST_S_MAX):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_response(*await self._answer(head), body_too=not head.startswith(b"HEAD")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a peer that does not ask properly gets no answer
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> HttpAnswer:
        method, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return 405, _JSON, b'{"error":"only GET"}'
        match path:
            case b"/metrics":
                return 200, CONTENT_TYPE, self.page()
            case b"/health":
                return _verdict("healthy", {role.name: _ended(task) for role, task in self.roles})
            case b"/ready":
                return _verdict("ready", {role.name: await self._unready(role, task) for role, task in self.roles})
            case b"/targets":
                return 200, _JSON, msgspec.json.encode(targets(self._endpoint_files.read(), _host(head)))
        return 404, _JSON, b'{"error":"there are /metrics, /health, /ready and /targets"}'

    async def _unready(self, role: WatchedRole, task: asyncio.Task[Any]) -> str:
        return "leaving" if self.leaving else _ended(task) or await role.unready()

    def page(self) -> bytes:
        """All metrics of this process."""
        page = Page()
        write_process(page)
        for role, _ in self.roles:
            page.put("embarcadero_up", 1, role=role.name, version=self._version)
            role.write(page)
        return page.text()


def _host(head: bytes) -> str:
    """The host by which the peer reached this process, of its `Host` header; empty if it sent none that makes sense."""
    found = _HOST.search(head)
    return found[1].decode() if found else ""


def _ended(task: asyncio.Task[Any]) -> str:
    return "its task has ended" if task.done() else ""


def _verdict(what: str, problems: dict[str, str]) -> HttpAnswer:
    """200 when all roles are well, else 503; the body says which is not, and why."""
    good = bool(problems) and not any(problems.values())
    body = {what: good, "roles": {name: why or "ok" for name, why in problems.items()}}
    return 200 if good else 503, _JSON, msgspec.json.encode(body)


def _response(status: int, kind: str, body: bytes, *, body_too: bool) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head + body if body_too else head
