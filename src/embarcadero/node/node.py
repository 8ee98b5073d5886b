"""A node process: any set of roles on one event loop.

A role whose task ends before the node was told to stop takes the whole process with it: half a process helps nobody,
and the supervisor starts it again as a new incarnation.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from embarcadero.broker.server import serve_broker
from embarcadero.broker.state import Broker
from embarcadero.env import SystemClock
from embarcadero.errors import ClusterError, EmbarcaderoError, PortInUse
from embarcadero.fabric.shared import SharedFabric
from embarcadero.node.bell import SocketBell
from embarcadero.node.children import die_with
from embarcadero.node.cluster import ClusterFolder, ClusterInfo
from embarcadero.node.files import connections_for
from embarcadero.node.pinning import pin
from embarcadero.node.ports import listen
from embarcadero.node.roles import Role, parse_roles
from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore
from embarcadero.sequencer.server import serve_sequencer
from embarcadero.sequencer.state import Sequencer

log = logging.getLogger("embarcadero.node")

_STOP_S = 2.0


class Node:
    """The roles of this process, between `open` and `close`."""

    def __init__(self, folder: ClusterFolder, roles: Sequence[Role]) -> None:
        self._info: ClusterInfo = folder.require_running()
        self._roles = roles
        self._open = ExitStack()
        store = SqliteStore(folder.store_path)
        self._open.callback(store.close)
        self._directory = Directory(store)
        if self._directory.generation != self._info.generation:
            raise ClusterError("the store and cluster.json are of different runs", "restart the cluster")
        self._fabric = SharedFabric(
            Path(self._info.fabric), self._info.generation, hugepages=self._info.hugepages
        )
        pin(roles, self._info.cores)
        self._connections_max = connections_for(sum(role.broker is not None for role in roles))
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Host the roles until told to stop. Raises ClusterError when a role ended by itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        with self._open:
            tasks = [asyncio.create_task(work, name=name) for name, work in map(self._make, self._roles)]
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()] if not self._stop.is_set() else []
            self._stop.set()
            await asyncio.wait(tasks, timeout=_STOP_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
        for task in ended:
            if (error := task.exception()) is not None:
                raise ClusterError(f"{task.get_name()} died: {error!r}", "see the log") from error
            raise ClusterError(f"{task.get_name()} was replaced by a newer one", "nothing to do: that one goes on")

    def _make(self, role: Role) -> tuple[str, Coroutine[None, None, None]]:
        return self._make_sequencer() if role.broker is None else self._make_broker(role.broker)

    def _make_broker(self, number: int) -> tuple[str, Coroutine[None, None, None]]:
        sock = self._open.enter_context(self._listener(number))
        host, port = sock.getsockname()[:2]
        member = self._directory.register_broker(number, host, port, os.getpid())
        self._open.callback(self._directory.mark_dead, number, member.incarnation)
        name = member.region_prefix
        bell = SocketBell(Path(self._info.fabric), name)
        self._open.callback(bell.close)
        broker = Broker(self._fabric, self._directory, SystemClock(), bell, member, self._info.sizes)
        log.info("%s listens on %s", name, member.address)
        return name, serve_broker(broker, sock, bell, self._stop, self._connections_max)

    def _listener(self, number: int) -> socket.socket:
        if self._info.port:
            return listen(self._info.host, self._info.port + number)
        before = [member.port for member in self._directory.members() if member.broker == number]
        try:
            return listen(self._info.host, before[-1] if before else 0)
        except PortInUse:
            return listen(self._info.host, 0)

    def _make_sequencer(self) -> tuple[str, Coroutine[None, None, None]]:
        bell = SocketBell(Path(self._info.fabric), "sequencer")
        self._open.callback(bell.close)
        sequencer = Sequencer(self._fabric, self._directory, SystemClock(), bell, self._info.sizes)
        log.info("sequencer of epoch %d", sequencer.epoch)
        return f"sequencer of epoch {sequencer.epoch}", serve_sequencer(sequencer, bell, self._stop)


def run_node(folder: ClusterFolder, roles: Sequence[Role]) -> None:
    """Host roles in this process until SIGTERM or SIGINT."""

    async def run() -> None:
        await Node(folder, roles).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def main(arguments: Sequence[str] | None = None) -> int:
    """The program that a supervisor starts: as `embarcadero node`, but quick to load."""
    parser = argparse.ArgumentParser(prog="embarcadero.node")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--roles", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        die_with(given.parent)
        run_node(ClusterFolder(given.data_dir), parse_roles(given.roles))
    except EmbarcaderoError as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=error.__cause__)  # noqa: TRY400 - the cause's trace, if there is one
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
