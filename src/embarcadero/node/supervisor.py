"""`embarcadero up`: create the fabric, start node processes, restart them after crashes, stop them in order.

Theory of operation. The supervisor holds the lock of the cluster's folder as long as it lives. Each `up` begins a new
generation with an empty fabric, so this run never reads the state of an earlier one.

When a node process dies, the supervisor immediately marks its brokers and replicas dead in the directory. The sequencer
then closes those broker incarnations and opens ranges on other replicas. The supervisor restarts the process, which
registers new incarnations.

When a broker is stopped or stuck, the sequencer misses its heartbeat and closes it. The supervisor then kills the
process. The supervisor also kills every process that stays stopped, without asking the store: a process that is stopped
in a transaction holds the store's lock.

No publish and no read depends on the supervisor: the cluster works while it is stopped or slow. Node processes die with
it (see process.die_with).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import msgspec

from embarcadero.config import Config
from embarcadero.env import Journal
from embarcadero.errors import BadValue, ClusterError, EmbarcaderoError, FabricFull
from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.leader import create_epochs
from embarcadero.limits import (
    DRAIN_S_MAX,
    GOODBYE_S_MAX,
    REPLICAS_MAX,
    SETTLE_S_MAX,
    STANDBY_SPARE_BYTES_MAX,
    STOPPED_S,
)
from embarcadero.liveness import Pulses, ticks_if_stopped
from embarcadero.node.children import NODE_MODULE, Child, ClientChild, ForkServer
from embarcadero.node.fabric_folder import (
    FabricChoice,
    Home,
    choose_fabric,
    empty,
    fabric_name,
    make_mirror,
    mirror_home,
    open_fabric,
    owned,
    remove_if_clean,
    remove_mirrors,
    remove_strays,
    remove_unowned,
    write_owner,
)
from embarcadero.node.folder import ClusterFolder, ClusterInfo, NodeInfo, data_dir_of
from embarcadero.node.process import SEQUENCER, Role, answers, check_ports, metrics_offset, own_address, parse_cores
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import EarlierGeneration
from embarcadero.placement.store import open_store
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import adopt_folder
from embarcadero.types import Member, MemberState, ReplicaMember, ReplicaState
from embarcadero.watch.endpoints import EndpointFiles
from embarcadero.watch.logs import LogJournal

READY_S_MAX = 60.0
_READY_POLL_S = 0.02
_HELLO_S = 2.0
_LEAVE_S = SETTLE_S_MAX + GOODBYE_S_MAX + 1.0
_STOP_S = 3.0
STOP_S_MAX = 2 * _STOP_S + _LEAVE_S + DRAIN_S_MAX + 3 * _STOP_S + 2.0
"""The maximum duration of an orderly stop: clients, brokers, sequencers, replicas, killed processes, and a margin.
With a shorter timeout, a caller may kill a supervisor while the cluster drains memory to disk."""
_LOOK_S = 0.5
_REST_S = 0.25
_STAGING_LOOK_S = 5.0
_STOPPED_US = int(STOPPED_S * 1_000_000)


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `up`."""

    config: Config
    ready_fd: int | None = None  # for a background supervisor: the pipe that gets "ready" or an error
    stop_with_stdin: bool = False  # stop when standard input ends
    node_module: str = NODE_MODULE  # the module with the `main` of each node process
    restore: bool = False  # the folder is a copy: give it a new identity

    @property
    def data_dir(self) -> Path:
        """The cluster's folder."""
        return data_dir_of(self.config)

    def check(self) -> None:
        """Raise BadValue for impossible options, and for cores that this machine does not have."""
        broker = self.config.broker
        ports = {broker.port + number for number in range(self.config.cluster.brokers)} if broker.port else set[int]()
        if ports & {*self.metrics_ports()}:
            raise BadValue("brokers and metrics can't share ports", "choose another metrics.port, or 0")
        parse_cores(self.config.cluster.pin)

    def nodes(self) -> list[list[Role]]:
        """The roles of each process."""
        cluster = self.config.cluster
        replicas = [Role(replica=number) for number in ClusterFolder(self.data_dir).replicas(cluster.replicas)]
        roles = [SEQUENCER, *map(Role, range(cluster.brokers)), *replicas]
        if cluster.one_process:
            return [roles]
        standbys = [Role(candidate=number) for number in range(1, 1 + cluster.standbys)]
        return [[role] for role in (*roles, *standbys)]

    def metrics_ports(self) -> list[int]:
        """Fixed metrics ports, one for each process; empty if processes choose free ports."""
        metrics, cluster = self.config.metrics, self.config.cluster
        if not (metrics.enabled and metrics.port):
            return []
        if cluster.one_process:
            return [metrics.port]
        standbys = [Role(candidate=number) for number in range(1, 1 + cluster.standbys)]
        others = [metrics_offset(role, cluster.brokers) for role in standbys]
        return [metrics.port + number for number in (*range(1 + cluster.brokers + cluster.replicas), *others)]

    def fabric_bytes(self, topics: int = 0) -> int:
        """Estimate the size of the fabric: broker logs, two more for dead logs and small rings, and order rings.

        Each topic has a ring in the current epoch, a ring in the previous epoch while processes still read it, and a
        spare in each standby, up to the limit of a standby's spares.
        """
        cluster, sizes = self.config.cluster, self.config.fabric
        rings = topics * sizes.order_slots * ORDER.itemsize
        spares = cluster.standbys * min(rings, STANDBY_SPARE_BYTES_MAX)
        return (cluster.brokers + 2) * sizes.log_bytes + 2 * rings + spares


class ProcessEvents(Protocol):
    """Callbacks for changes of the supervised processes."""

    def started(self) -> None:
        """A process was started."""
        ...

    def died(self, child: Child, pid: int, reason: str) -> None:
        """A process ended unexpectedly, and will be restarted."""
        ...

    def not_started(self, child: Child, reason: str) -> None:
        """A process could not be started; the next attempt follows."""
        ...


class NodeProcesses:
    """The node processes of a cluster, and its clients. One task for each process restarts it until the stop."""

    def __init__(self, options: UpOptions, folder: ClusterFolder, journal: Journal) -> None:
        self.options, self.folder, self._journal = options, folder, journal
        self.stop = asyncio.Event()
        self._fork_server = ForkServer(options.config.log, options.node_module)
        roles = options.nodes()
        spare = sum(node[0].candidate is not None for node in roles) > 1
        self.nodes = [self._node(node, _REST_S if spare and node[0].candidate is not None else 0.0) for node in roles]
        self.clients: dict[str, ClientChild] = {}  # by name
        self._keepers: dict[Child, asyncio.Task[None]] = {}

    def _node(self, roles: Sequence[Role], rest_s: float = 0.0) -> Child:
        return Child(self.folder, roles, self._fork_server, rest_s)

    def all(self) -> list[Child]:
        """Return the nodes, then the clients."""
        return [*self.nodes, *self.clients.values()]

    async def load(self) -> None:
        """Start the fork server, which loads all modules while the caller continues."""
        await self._fork_server.start()

    def start(self, events: ProcessEvents) -> None:
        """Start all nodes."""
        for child in self.nodes:
            self._keep(child, events)

    def start_added(self, events: ProcessEvents) -> None:
        """Start a node for each replica whose folder was created since the start (`replica add`)."""
        running = {role.replica for child in self.nodes for role in child.roles}
        for number in self.folder.replicas(0):
            if number not in running and number < REPLICAS_MAX:
                child = self._node([Role(replica=number)])
                self._journal.note("replica added", replica=number)
                self.nodes.append(child)
                self._keep(child, events)

    def start_client(self, name: str, events: ProcessEvents) -> None:
        """Start a client of the cluster."""
        child = self.clients[name] = ClientChild(self.folder, self._fork_server, name)
        self._keep(child, events)

    def _keep(self, child: Child, events: ProcessEvents) -> None:
        kept = child.keep(self.stop, events.started, events.died, events.not_started)
        self._keepers[child] = asyncio.create_task(kept)

    async def stop_in_order(self) -> None:
        """Stop clients, brokers, sequencers, then replicas.

        Brokers need the sequencer to settle the batches they accepted. The sequencer needs replicas to drain to disk.
        Elections are over by now: the leader stays the leader, and standbys just exit.
        """
        self.stop.set()
        brokers = [child for child in self.nodes if all(role.broker is not None for role in child.roles)]
        replicas = [child for child in self.nodes if only_replicas(child)]
        others = [child for child in self.nodes if child not in brokers and child not in replicas]
        await self._end_clients()
        await self._end(brokers, signal.SIGTERM, _LEAVE_S)
        await self._end(others, signal.SIGTERM, DRAIN_S_MAX + (_STOP_S if brokers else _LEAVE_S))
        await self._end(replicas, signal.SIGTERM, _STOP_S)
        await self._end(self.nodes, signal.SIGKILL, _STOP_S)

    async def _end_clients(self) -> None:
        """Stop the clients of the cluster. A later run repeats the unfinished work of a killed client."""
        clients = list(self.clients.values())
        for number in (signal.SIGTERM, signal.SIGKILL) if clients else ():
            for child in clients:
                child.signal(number)
            await asyncio.wait([self._keepers[child] for child in clients], timeout=_STOP_S)

    async def _end(self, children: list[Child], number: signal.Signals, wait_s: float) -> None:
        """Send a signal to these children, and wait for their end."""
        chosen = [self._keepers[child] for child in children]
        if any(not keeper.done() for keeper in chosen):
            for child in children:
                child.signal(number)
            await asyncio.wait(chosen, timeout=wait_s)

    async def close(self) -> None:
        """Stop the fork server, after all nodes have ended."""
        await self._fork_server.close()


def only_replicas(child: Child) -> bool:
    """Whether a process hosts replicas and nothing else."""
    return all(role.replica is not None for role in child.roles)


@dataclass(slots=True)
class Generation:
    """One run of a cluster: a number in the store, a fabric, and the fabric's mirror.

    `recovery_sources`: earlier generations whose mirrors are still needed.
    """

    directory: Directory
    home: Home
    fabric: FabricChoice
    mirror: Path | None
    recovery_sources: tuple[EarlierGeneration, ...]

    @classmethod
    def begin(cls, directory: Directory, home: Home, fabric: FabricChoice, mirrors: str) -> Generation:
        """Begin the next generation in the store, with an empty fabric. `mirrors`: the folder of mirrors, or empty."""
        directory.begin_generation(mirrors, home.path)
        sources = directory.earlier_generations()
        if mirrors:
            remove_strays(mirrors, sources)
        made = cls(directory, home, fabric, make_mirror(mirrors, directory.generation) if mirrors else None, sources)
        empty(fabric.folder)
        write_owner(fabric.folder, home)
        create_epochs(open_fabric(str(fabric.folder), made.mirror_folder, directory.generation).fabric)
        return made

    @property
    def mirror_folder(self) -> str:
        """The folder of the fabric's mirror; empty if it has none."""
        return "" if self.mirror is None else str(self.mirror)

    def remove_old_mirrors(self) -> None:
        """Remove mirrors of earlier generations after the sequencer has recovered all lanes."""
        with contextlib.suppress(EmbarcaderoError):  # the store cannot be read: retry in the next look
            if self.recovery_sources and not self.directory.earlier_generations():
                remove_mirrors(self.recovery_sources)
                self.recovery_sources = ()


class Watchdog:
    """Kills stopped and silent processes: they cannot exit by themselves, and other processes wait for them."""

    def __init__(self, processes: NodeProcesses, directory: Directory, journal: Journal) -> None:
        self._processes, self._directory, self._journal = processes, directory, journal
        self._pulses: Pulses[int] = Pulses()  # of processes that are stopped

    def look(self, now_us: int) -> None:
        """Check all processes once."""
        self._end_replaced()
        self._end_stopped(now_us)

    def _end_replaced(self) -> None:
        """Kill brokers that the sequencer has closed because they were silent."""
        with contextlib.suppress(EmbarcaderoError):  # the store is busy: retry in the next look
            closed = {member.pid for member in self._directory.members.newest() if member.state is not MemberState.LIVE}
            for child in self._processes.nodes:
                if child.pid in closed and any(role.broker is not None for role in child.roles):
                    self._journal.warn("broker was silent", node=child.name, pid=child.pid, then="starting it again")
                    child.signal(signal.SIGKILL)

    def _end_stopped(self, now_us: int) -> None:
        """Kill a process that stays stopped: it may hold the store's lock and block everyone else."""
        children = self._processes.all()
        ticks = {child.pid: ticks_if_stopped(child.pid) for child in children if child.pid}
        stopped = {pid: beat for pid, beat in ticks.items() if beat is not None}
        self._pulses.keep(set(stopped))
        for child in children:
            if child.pid in stopped and self._pulses.silent_us(child.pid, stopped[child.pid], now_us) >= _STOPPED_US:
                self._journal.warn("node was stopped", node=child.name, pid=child.pid, then="starting it again")
                child.signal(signal.SIGKILL)


class RunningCluster:
    """A generation with its processes, from the start of the first process until all are asked to stop."""

    def __init__(self, processes: NodeProcesses, generation: Generation, journal: Journal) -> None:
        self._processes, self._generation, self._journal = processes, generation, journal
        self._directory, self._config = generation.directory, processes.options.config
        self._watchdog = Watchdog(processes, generation.directory, journal)
        self.failure: EmbarcaderoError | None = None
        self.ready = False
        self._missing: set[str] = set()  # replicas that did not start
        self._info_is_old = False  # cluster.json could not be written
        self._staging_seen_s = 0.0  # when the store was last asked for staging topics
        self._version = version("embarcadero")

    # --- beginning ----------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start all nodes, and wait until the cluster serves. If it cannot, record the failure and stop."""
        self._processes.start(self)
        await self._until_ready()
        if not self._processes.stop.is_set():
            fabric = str(self._generation.fabric.folder)
            self._journal.note("ready", fabric=fabric, brokers=self._config.cluster.brokers)
            if self._config.tier.enabled:
                self._processes.start_client("tier", self)

    async def _until_ready(self) -> None:
        """Wait until every broker answers a hello, replicas and sequencers are registered, and an epoch has started."""
        give_up = time.monotonic() + READY_S_MAX
        waiting, stop = list(self._processes.nodes), self._processes.stop
        while (waiting or not self._directory.elections.started_epoch()) and not stop.is_set():
            if time.monotonic() > give_up:
                names = ", ".join(child.name for child in waiting) or "the sequencer"
                logs = self._processes.folder.logs
                what = f"{names} did not become ready within {READY_S_MAX:.0f} s"
                self._fail(ClusterError(what, f"see {logs}"))
                return
            waiting = [child for child in waiting if child.name not in self._missing and not await self._answers(child)]
            await asyncio.sleep(_READY_POLL_S)
        self.ready = True

    async def _answers(self, child: Child) -> bool:
        members, replicas = self._live(child.pid), self._live_replicas(child.pid)
        if len(members) < sum(role.broker is not None for role in child.roles):
            return False
        if len(replicas) < sum(role.replica is not None for role in child.roles):
            return False
        standing = [candidate for candidate in self._directory.elections.candidates() if candidate.pid == child.pid]
        if len(standing) < sum(role.candidate is not None for role in child.roles):
            return False
        return all([await answers(*own_address(self._config.broker, member), _HELLO_S) for member in members])

    def _live(self, pid: int) -> list[Member]:
        return [m for m in self._directory.members.all() if m.pid == pid and m.state is MemberState.LIVE]

    def _live_replicas(self, pid: int) -> list[ReplicaMember]:
        return [m for m in self._directory.replicas.all() if m.pid == pid and m.state is not ReplicaState.DEAD]

    def _fail(self, error: EmbarcaderoError) -> None:
        self.failure = self.failure or error
        self._processes.stop.set()

    # --- while it runs ------------------------------------------------------------------------------------------------
    async def until_stopped(self) -> None:
        """Wait for the stop. Regularly check for new replica folders, staged writes, and stopped processes."""
        stop = self._processes.stop
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
            if not stop.is_set():
                self._processes.start_added(self)
                self._start_sweep()
                self._generation.remove_old_mirrors()
                if self._info_is_old:
                    self.started()
                self._watchdog.look(time.monotonic_ns() // 1_000)

    def _start_sweep(self) -> None:
        """Start the sweep of staged writes, once a topic for staged batches exists."""
        if "sweep" in self._processes.clients or time.monotonic() < self._staging_seen_s + _STAGING_LOOK_S:
            return
        self._staging_seen_s = time.monotonic()
        with contextlib.suppress(EmbarcaderoError):  # the store is busy: retry in the next look
            if any(topic.hidden for topic in self._directory.topics.all()):
                self._processes.start_client("sweep", self)

    def started(self) -> None:
        """Write the running processes to cluster.json, or retry later: a full disk must not stop the cluster."""
        try:
            self.write_info()
            self._info_is_old = False
        except OSError as error:
            self._info_is_old = True
            self._journal.warn("can't write cluster.json", error=error.strerror, then="trying again")

    def write_info(self) -> None:
        """Write cluster.json."""
        generation = self._generation
        self._processes.folder.write_info(
            ClusterInfo(
                version=self._version,
                id=self._directory.cluster_id,
                generation=self._directory.generation,
                fabric=str(generation.fabric.folder),
                mirror=generation.mirror_folder,
                home=generation.home,
                config=self._config,
                supervisor=os.getpid(),
                nodes=[NodeInfo(roles=child.name, pid=child.pid) for child in self._processes.all()],
            )
        )

    def not_started(self, child: Child, reason: str) -> None:
        """Stop the cluster if a first start fails; retry later starts."""
        if self.ready:
            self._journal.warn("can't start node", node=child.name, reason=reason, then="trying again")
        else:
            what = f"cannot start {child.name}: {reason}"
            self._fail(ClusterError(what, "check this machine's limits on processes and memory"))

    def died(self, child: Child, pid: int, reason: str) -> None:
        """Mark the brokers and replicas of a dead node as dead. If the cluster is still starting, stop it."""
        if isinstance(child, ClientChild):
            words = child.last_words() or reason
            self._journal.warn("client ended", process=child.name, pid=pid, reason=words, then="starting it again")
            return
        if not self.ready and self._goes_without(child):
            self._journal.warn("replica does not start", node=child.name, reason=child.last_words() or reason)
            return
        if not self.ready:
            words = child.last_words()
            kind = FabricFull if words.startswith(f"{FabricFull.__name__}: ") else ClusterError
            self._fail(kind(f"{child.name} did not start: {words or reason}", str(child.log_path)))
            return
        self._journal.warn("node ended", node=child.name, pid=pid, reason=reason, then="starting it again")
        try:
            for member in self._live(pid):
                self._directory.members.mark_dead(member.broker, member.incarnation)
            for replica in self._live_replicas(pid):
                self._directory.replicas.mark_dead(replica.replica, replica.incarnation)
        except EmbarcaderoError as error:
            # harmless: the restarted node registers new incarnations
            self._journal.warn("can't mark members dead", node=child.name, reason=error.message)
        self.started()

    def _goes_without(self, child: Child) -> bool:
        """Whether the cluster starts without this node: a replica, unless every replica fails. Retries continue."""
        if any(role.replica is None for role in child.roles):
            return False
        self._missing.add(child.name)
        return any(only_replicas(other) and other.name not in self._missing for other in self._processes.nodes)

    # --- ending -------------------------------------------------------------------------------------------------------
    async def stop(self) -> None:
        """Stop all processes in order."""
        self._processes.stop.set()
        self._journal.note("stopping", nodes=sum(bool(child.pid) for child in self._processes.nodes))
        with contextlib.suppress(EmbarcaderoError):  # if this fails, a standby takes over and then drains itself
            self._directory.elections.end()
        await self._processes.stop_in_order()
        stuck = [child.name for child in self._processes.nodes if child.pid]
        if stuck:
            self._journal.warn("nodes did not end", nodes=",".join(stuck))
        else:
            self._journal.note("stopped")


class Supervisor:
    """One run of a cluster: takes the folders and the identity, and runs the cluster until a stop request."""

    def __init__(self, options: UpOptions) -> None:
        options.check()
        self._options, self._config = options, options.config
        self._folder = ClusterFolder(options.data_dir)
        self._journal = LogJournal(f"supervisor-{os.getpid()}")
        self._processes = NodeProcesses(options, self._folder, self._journal)

    async def run(self, on_ready: Callable[[FabricChoice], None]) -> None:
        """Run the cluster until SIGTERM, SIGINT or the end of standard input."""
        try:
            failure = await self._run(on_ready)
        finally:
            await self._processes.close()
        if failure is not None:
            raise failure

    async def _run(self, on_ready: Callable[[FabricChoice], None]) -> EmbarcaderoError | None:
        with ExitStack() as stack:
            self._own_folder(stack)
            self._check_ports()
            await self._processes.load()
            generation = self._begin_generation(stack)
            EndpointFiles(self._folder.path).clear()
            stack.callback(shutil.rmtree, generation.fabric.folder, ignore_errors=True)
            if generation.mirror is not None:
                stack.callback(remove_if_clean, generation.directory, generation.mirror)
            cluster = RunningCluster(self._processes, generation, self._journal)
            cluster.write_info()
            self._watch_for_stop()
            try:
                await cluster.start()
                if not self._processes.stop.is_set():
                    on_ready(generation.fabric)
                await cluster.until_stopped()
            finally:
                await cluster.stop()
        return cluster.failure

    def _own_folder(self, stack: ExitStack) -> None:
        """Take the lock of the cluster's folder. Refuse a copy; with `--restore`, refuse everything but a copy."""
        if self._options.restore:
            self._folder.require_copy()
        self._folder.create()
        stack.enter_context(self._folder.locked())
        if not self._options.restore:
            self._folder.refuse_copy()
        if not self._folder.private:
            self._journal.warn("other users may read the data folder", folder=str(self._folder.path))

    def _check_ports(self) -> None:
        broker = self._config.broker
        if broker.port:
            check_ports(broker.host, [broker.port + number for number in range(self._config.cluster.brokers)])
        if ports := self._options.metrics_ports():
            check_ports(self._config.metrics.host, ports)

    def _begin_generation(self, stack: ExitStack) -> Generation:
        """Take ownership of the folders that the cluster id names, before changing them or the store."""
        home = Home.of(self._folder.path)
        directory = Directory(stack.enter_context(closing(open_store(self._folder.store_path))))
        self._take_identity(directory)
        mirrors = mirror_home(self._config.fabric.mirror, directory.cluster_id)
        self._remove_leftovers(directory.cluster_id)
        folder = self._config.cluster.fabric_dir
        wanted = Path(folder).expanduser().absolute() if folder else None
        need = self._options.fabric_bytes(len(directory.topics.all()))
        fabric = choose_fabric(self._folder.path, directory.cluster_id, wanted, need)
        stack.enter_context(owned(fabric.folder, home))
        if mirrors:
            stack.enter_context(owned(Path(mirrors), home))
        return Generation.begin(directory, home, fabric, mirrors)

    def _take_identity(self, directory: Directory) -> None:
        """With `--restore`, become a new cluster; then write the new id to replicas' folders, also after a crash."""
        if self._options.restore:
            before, after = directory.restore()
            self._journal.note("restored", cluster=after, copy_of=before)
        if copied := directory.copied_from:
            for number in self._folder.replicas(0):
                with closing(RealDisk(str(self._folder.replica(number)))) as disk:
                    adopt_folder(disk, copied, directory.cluster_id, directory.log_id)
            directory.finish_restore()

    def _remove_leftovers(self, cluster_id: str) -> None:
        """Remove the fabric that this folder's last supervisor left when it was killed."""
        try:
            before = Path(self._folder.read_info().fabric)
        except EmbarcaderoError:
            return
        if before.name == fabric_name(cluster_id):
            remove_unowned(before)

    def _watch_for_stop(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._processes.stop.set)
        if self._options.stop_with_stdin:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._processes.stop.set()
