"""A node process: any set of roles on one event loop.

If the task of a role ends before the node is asked to stop, the whole process exits, and the supervisor restarts it
with new incarnations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from embarcadero.broker.broker import Broker
from embarcadero.broker.context import BrokerContext
from embarcadero.broker.disk_reads import TableJobs, TableReader
from embarcadero.broker.server import Left, serve_broker
from embarcadero.config import DEFAULTS, Config
from embarcadero.config.secrets import secret_values
from embarcadero.env import NO_STEPS, Env, Inline, Steps, SystemClock, Workers
from embarcadero.errors import ClusterError, EmbarcaderoError, FabricFull, PortInUse
from embarcadero.limits import DRAIN_S_MAX, GOODBYE_S_MAX, SETTLE_S_MAX, STORE_CALLS_MAX, TABLE_JOBS_MAX, WARM_JOBS_MAX
from embarcadero.node.env import PipeBell, ThreadWorkers
from embarcadero.node.fabric_folder import open_earlier_mirror, open_fabric
from embarcadero.node.folder import ClusterFolder, ClusterInfo
from embarcadero.node.process import (
    Role,
    advertised_address,
    be_private,
    candidate_role,
    die_with,
    keep_freed_memory,
    listen,
    metrics_offset,
    parse_cores,
    parse_roles,
    pin,
    ranking,
    start_logging,
    within_open_files,
)
from embarcadero.node.standby import ProcessServices, SharedState, Standby, candidate_bell
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import open_store
from embarcadero.replica.copies import ReplicaContext
from embarcadero.replica.replica import Replica, serve_replica
from embarcadero.sequencer.leader.server import serve_standby
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import open_folder
from embarcadero.types import ReplicaMember
from embarcadero.watch.endpoints import Endpoint, EndpointFiles, NodeEndpoint
from embarcadero.watch.logs import LogJournal
from embarcadero.watch.metrics import WatchedBroker, WatchedReplica, WatchedRole

log = logging.getLogger("embarcadero.node")

_STOP_S = 0.5
_REPLICA_THREADS = 2


def _no_steps(_role: str, _folder: Path) -> Steps:
    return NO_STEPS


def _real_disk(folder: Path, cached: bool) -> RealDisk:
    return RealDisk(folder, create=True, cached=cached)


class Surroundings(NamedTuple):
    """Services of the process for its roles, beside memory and time. The proof passes its own, which inject faults."""

    tables: Callable[[Config, Path], TableReader | None]
    """(configuration, cluster folder) -> the brokers' reader of tables; None: this process cannot read tables"""
    steps: Callable[[str, Path], Steps] = _no_steps
    """(role, cluster folder) -> the object that is notified when the role reaches a named step"""
    disk: Callable[[Path, bool], RealDisk] = _real_disk
    """(folder, cached) -> the disk of a replica of this process"""


class _Made(NamedTuple):
    """A role that is ready to run."""

    name: str
    work: Coroutine[None, None, Any]
    watched: WatchedRole


class Node:
    """The roles of this process, between `open` and `close`."""

    def __init__(
        self, folder: ClusterFolder, roles: Sequence[Role], config: Config, surroundings: Surroundings
    ) -> None:
        self._surroundings = surroundings
        self._info: ClusterInfo = folder.require_running()
        brokers = sum(role.broker is not None for role in roles)
        replicas = sum(role.replica is not None for role in roles)
        self._config = within_open_files(config, brokers, replicas)
        self._endpoint_files = EndpointFiles(folder.path)
        self._roles, self._folder = roles, folder
        self._open = ExitStack()
        store = open_store(folder.store_path)
        self._open.callback(store.close)
        self._directory = Directory(store, topics_max=self._config.limits.topics)
        if self._directory.generation != self._info.generation:
            raise ClusterError("the store and cluster.json belong to different runs", "restart the cluster")
        self._directory.topics.give_ids()
        self._fabric, self._parts = open_fabric(
            self._info.fabric, self._info.mirror, self._info.generation, hugepages=self._config.cluster.hugepages
        )
        pin(roles, parse_cores(self._config.cluster.pin))
        self._stop = asyncio.Event()  # stops the brokers; then the sequencer stops, then the replicas
        self._stop_sequencer = asyncio.Event()
        self._stop_replicas = asyncio.Event()
        self._endpoint = Endpoint(self._info.version, self._endpoint_files)
        self._metrics = ""  # the address of this process's metrics

    async def run(self) -> None:
        """Host the roles until a stop request. Raise ClusterError if a role ends by itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        with self._open:
            endpoint = await self._be_watched()
            made = [self._make(role) for role in self._roles]
            gc.freeze()  # loaded objects stay: collecting them again and again would pause every batch in flight
            tasks = [asyncio.create_task(role.work, name=role.name) for role in made]
            self._endpoint.host((role.watched, task) for role, task in zip(made, tasks, strict=True))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            ended = [task for task in tasks if task.done()] if not self._stop.is_set() else []
            left = await self._leave(tasks)
            if not ended:  # if a role ended by itself, the process restarts: keep its endpoint
                with contextlib.suppress(OSError):
                    self._endpoint_files.write(msgspec.structs.replace(endpoint, left=left))
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
        for task in ended:
            if isinstance(error := task.exception(), FabricFull):
                raise error  # for the operator: memory has to be freed
            if error is not None:
                raise ClusterError(f"{task.get_name()} died: {error!r}", "see the log") from error
            what = f"a newer incarnation has replaced {task.get_name()}"
            raise ClusterError(what, "no action is needed: the newer incarnation works")

    async def _leave(self, tasks: list[asyncio.Task[Any]]) -> dict[str, dict[str, int]]:
        """Stop brokers, then sequencers, then replicas; return each broker's counts of settled and unsettled requests.

        Brokers need the sequencer to settle the batches they accepted. The sequencer needs replicas to drain to disk.
        """
        self._stop.set()
        self._endpoint.leave()
        of_role = list(zip(tasks, self._roles, strict=True))
        brokers = [task for task, role in of_role if role.broker is not None]
        sequencers = [task for task, role in of_role if role.candidate is not None]
        if brokers:
            await asyncio.wait(brokers, timeout=SETTLE_S_MAX + GOODBYE_S_MAX + _STOP_S)
        self._stop_sequencer.set()
        if sequencers:
            await asyncio.wait(sequencers, timeout=DRAIN_S_MAX + _STOP_S)
        self._stop_replicas.set()
        await asyncio.wait(tasks, timeout=_STOP_S)
        left = {}
        for task in tasks:
            task.cancel()
            if task.done() and not task.cancelled() and not task.exception() and isinstance(task.result(), Left):
                left[task.get_name()] = task.result()._asdict()
        return left

    async def _be_watched(self) -> NodeEndpoint:
        """Open the metrics port of this process, if enabled, and publish its address."""
        metrics, first = self._config.metrics, self._roles[0]
        host, port = "", 0
        if metrics.enabled:
            ours = metrics.port + metrics_offset(first, self._config.cluster.brokers) if metrics.port else 0
            sock = self._open.enter_context(listen(metrics.host, ours))
            server = await self._endpoint.serve(sock)
            self._open.callback(server.close)
            host, port = sock.getsockname()[:2]
        endpoint = NodeEndpoint(roles=",".join(map(str, self._roles)), pid=os.getpid(), host=host, port=port)
        self._endpoint_files.write(endpoint)
        self._metrics = endpoint.address
        return endpoint

    def _make(self, role: Role) -> _Made:
        if role.replica is not None:
            return self._make_replica(role.replica)
        return self._make_sequencer(role.candidate or 0) if role.broker is None else self._make_broker(role.broker)

    def _make_broker(self, number: int) -> _Made:
        sock = self._open.enter_context(self._listener(number))
        host, port = advertised_address(self._config.broker, number, *sock.getsockname()[:2])
        member = self._directory.members.register(number, host, port, os.getpid())
        self._open.callback(self._directory.members.mark_dead, number, member.incarnation)
        name = member.region_prefix
        bell = PipeBell(Path(self._info.fabric), name)
        self._open.callback(bell.close)
        journal = LogJournal(name)
        workers = self._threads(WARM_JOBS_MAX + STORE_CALLS_MAX, name, bell.wake)
        steps = self._surroundings.steps(f"broker:{number}", self._folder.path)
        env = Env(SystemClock(), bell, journal, workers, steps, self._disks)
        context = BrokerContext(env, self._fabric, self._directory, member, self._info.sizes, self._config)
        table_workers = self._threads(TABLE_JOBS_MAX, f"{name}-tables", bell.wake)
        tables = TableJobs(table_workers, self._surroundings.tables(self._config, self._folder.path))
        broker = Broker(context, tables, self._metrics)
        on = ":".join(map(str, sock.getsockname()[:2]))
        journal.note("listening", on=on, address=member.address, pid=os.getpid())
        return _Made(name, serve_broker(broker, sock, bell, self._stop), WatchedBroker(broker))

    def _listener(self, number: int) -> socket.socket:
        host, first = self._config.broker.host, self._config.broker.port
        if first:
            return listen(host, first + number)
        try:
            return listen(host, self._directory.members.last_port(number))
        except PortInUse:
            return listen(host, 0)

    def _make_sequencer(self, number: int) -> _Made:
        bell = PipeBell(Path(self._info.fabric), candidate_bell(number))
        self._open.callback(bell.close)
        shared = SharedState(
            self._fabric,
            self._parts,
            self._directory,
            self._info.sizes,
            lambda earlier: open_earlier_mirror(earlier, self._info.generation),
        )
        process = ProcessServices(
            bell,
            lambda wake: self._threads(1, "sequencer", wake),
            self._surroundings.steps(candidate_role(number), self._folder.path),
            self._disks,
            ranking(self._roles, self._config.sequencer.nice),
        )
        standby = Standby(number, self._config.sequencer, shared, process)
        self._open.callback(standby.close)
        work = serve_standby(standby.candidate, standby, bell, self._stop_sequencer)
        return _Made(candidate_role(number), work, standby.watched)

    def _make_replica(self, number: int) -> _Made:
        """Create a replica. Alone in its process it writes and syncs inline; beside other roles, in threads."""
        path = self._folder.replica(number)
        disk = self._open.enter_context(closing(self._surroundings.disk(path, self._config.replica.cached)))
        generation = self._info.generation & 0xFFFF_FFFF
        identity = open_folder(disk, self._directory.cluster_id, number, generation)
        member = self._directory.replicas.register(number, identity.disk, str(path), socket.gethostname(), os.getpid())
        self._open.callback(self._directory.replicas.mark_dead, number, member.incarnation)
        name = member.ref.region_prefix
        bell = PipeBell(Path(self._info.fabric), name)
        self._open.callback(bell.close)
        journal, clock = LogJournal(name), SystemClock()
        workers: Workers = Inline() if len(self._roles) == 1 else self._threads(_REPLICA_THREADS, name, bell.wake)
        steps = self._surroundings.steps(f"replica:{number}", self._folder.path)
        replica = Replica(
            ReplicaContext.create(
                Env(clock, bell, journal, workers, steps, self._disks),
                self._fabric,
                self._directory,
                disk,
                member,
                self._config,
            )
        )
        journal.note("has its folder", folder=str(path), disk=identity.disk, ranges=replica.ranges.opening)
        return _Made(name, serve_replica(replica, bell, self._stop_replicas), WatchedReplica(replica))

    def _threads(self, count: int, name: str, wake: Callable[[], None]) -> ThreadWorkers:
        workers = ThreadWorkers(count, name, wake)
        self._open.callback(workers.close)
        return workers

    def _disks(self, member: ReplicaMember) -> RealDisk:
        """Open the files of any replica, for reading."""
        return RealDisk(member.folder)


def run_node(
    folder: ClusterFolder, roles: Sequence[Role], surroundings: Surroundings, config: Config | None = None
) -> None:
    """Host roles in this process until SIGTERM or SIGINT. `config` defaults to the configuration of the cluster."""

    config = config or folder.require_running().config
    be_private()
    start_logging("node", config.log, secret_values(config))
    keep_freed_memory()

    async def run() -> None:
        await Node(folder, roles, config, surroundings).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def main(arguments: Sequence[str] | None, surroundings: Surroundings) -> int:
    """Run the program that a supervisor starts: like `embarcadero node`, but fast to load."""
    parser = argparse.ArgumentParser(prog="embarcadero.node")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--roles", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args(arguments)
    folder = ClusterFolder(given.data_dir)
    if not logging.root.handlers:  # a fork of the fork server has its handlers already
        start_logging("node", DEFAULTS.log)
    try:
        die_with(given.parent)
        run_node(folder, parse_roles(given.roles), surroundings)
    except EmbarcaderoError as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=error.__cause__)  # noqa: TRY400 - the trace of the cause, if any
        return 1
    return 0
