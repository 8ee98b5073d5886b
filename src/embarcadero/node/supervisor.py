"""`embarcadero up`: make the fabric, start node processes, start them again when they die, stop them all together.

Theory of operation. The supervisor holds the lock of the cluster's folder for as long as it lives. Each `up` begins a
new generation: an empty fabric, so nothing of an earlier run can be mistaken for this one. When a node process dies,
its brokers and replicas are marked dead in the directory at once (the sequencer then closes those broker incarnations,
and opens ranges on other replicas) and the process is started again; it registers new incarnations by itself. A broker
that is stopped or stuck is closed by the sequencer, which misses its heartbeat; the supervisor then kills the process.
Any process that stays stopped is killed without asking the store: stopped in a transaction it would hold its lock.
The supervisor is not on the path of a publish or a read: while it is stopped or slow, the cluster goes on. Node
processes die with it (see node.die_with).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path

import msgspec

from embarcadero.config import Config
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
from embarcadero.node.children import Child, ClientChild
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
from embarcadero.node.fork_server import NODE_MODULE, ForkServer
from embarcadero.node.ports import answers, check_ports, own_address
from embarcadero.node.process import parse_cores
from embarcadero.node.roles import SEQUENCER, Role, metrics_offset
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
"""How long a stop in order may take: the tierer, brokers, sequencers, replicas, those that had to be killed, the rest.
Whoever gives up earlier kills a supervisor that drains memory to disk."""
_LOOK_S = 0.5
_REST_S = 0.25
_STAGING_LOOK_S = 5.0
_STOPPED_US = int(STOPPED_S * 1_000_000)


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` was asked for."""

    config: Config
    ready_fd: int | None = None  # for a background supervisor: where to report "ready" or an error
    stop_with_stdin: bool = False  # stop when standard input ends
    node_module: str = NODE_MODULE  # whose `main` each node process runs
    restore: bool = False  # the folder is a copy: give it an identity of its own

    @property
    def data_dir(self) -> Path:
        """The cluster's folder."""
        return data_dir_of(self.config)

    def check(self) -> None:
        """Raise BadValue for what can't be, or what this machine does not have."""
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
        """Fixed ports of metrics, one a process; none when any will do."""
        metrics, cluster = self.config.metrics, self.config.cluster
        if not (metrics.enabled and metrics.port):
            return []
        if cluster.one_process:
            return [metrics.port]
        standbys = [Role(candidate=number) for number in range(1, 1 + cluster.standbys)]
        others = [metrics_offset(role, cluster.brokers) for role in standbys]
        return [metrics.port + number for number in (*range(1 + cluster.brokers + cluster.replicas), *others)]

    def fabric_bytes(self, topics: int = 0) -> int:
        """About what the fabric will want: logs, as much again as two logs for dead ones and rings, and order rings.

        Each topic has a ring in the epoch of the sequencer, in the one before while others still read it, and as a
        spare of each standby, up to what a standby keeps.
        """
        cluster, sizes = self.config.cluster, self.config.fabric
        rings = topics * sizes.order_slots * ORDER.itemsize
        spares = cluster.standbys * min(rings, STANDBY_SPARE_BYTES_MAX)
        return (cluster.brokers + 2) * sizes.log_bytes + 2 * rings + spares


class Supervisor:
    """One run of a cluster."""

    def __init__(self, options: UpOptions) -> None:
        options.check()
        self._options = options
        self._config = options.config
        self._folder = ClusterFolder(options.data_dir)
        self._fork_server = ForkServer(self._config.log, options.node_module)
        nodes = options.nodes()
        spare = sum(roles[0].candidate is not None for roles in nodes) > 1
        self._children = [
            Child(self._folder, roles, self._fork_server, _REST_S if spare and roles[0].candidate is not None else 0.0)
            for roles in nodes
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._clients: dict[str, ClientChild] = {}  # by name
        self._client_keepers: list[asyncio.Task[None]] = []
        self._staging_seen_s = 0.0  # when the store was last asked for staging topics
        self._stop = asyncio.Event()
        self._failure: EmbarcaderoError | None = None
        self._ready = False
        self._missing: set[str] = set()  # replicas that did not start
        self._pulses: Pulses[int] = Pulses()  # of processes that are stopped
        self._untold = False  # cluster.json could not be written
        self._mirror: Path | None = None  # folder of the fabric's mirror
        self._past: tuple[EarlierGeneration, ...] = ()  # earlier generations whose mirrors are still needed
        self._journal = LogJournal(f"supervisor-{os.getpid()}")
        self._version = version("embarcadero")

    async def run(self, on_ready: Callable[[FabricChoice], None]) -> None:
        """Run the cluster until SIGTERM, SIGINT or the end of standard input."""
        try:
            await self._run(on_ready)
        finally:
            await self._fork_server.close()
        if self._failure is not None:
            raise self._failure

    async def _run(self, on_ready: Callable[[FabricChoice], None]) -> None:
        broker = self._config.broker
        with ExitStack() as stack:
            if self._options.restore:
                self._folder.require_copy()
            self._folder.create()
            stack.enter_context(self._folder.locked())
            if not self._options.restore:
                self._folder.refuse_copy()
            self._home = Home.of(self._folder.path)
            if not self._folder.private:
                self._journal.warn("other users may read the data folder", folder=str(self._folder.path))
            if broker.port:
                check_ports(broker.host, [broker.port + number for number in range(self._config.cluster.brokers)])
            if ports := self._options.metrics_ports():
                check_ports(self._config.metrics.host, ports)
            await self._fork_server.start()
            self._directory = Directory(stack.enter_context(closing(open_store(self._folder.store_path))))
            self._take_identity()
            home = mirror_home(self._config.fabric.mirror, self._directory.cluster_id)
            self._fabric = self._own_fabric(stack, home)
            self._directory.begin_generation(home, str(self._folder.path))
            self._make_fabric(home)
            EndpointFiles(self._folder.path).clear()
            stack.callback(shutil.rmtree, self._fabric.folder, ignore_errors=True)
            if self._mirror is not None:
                stack.callback(remove_if_clean, self._directory, self._mirror)
            self._write_info()
            self._watch_for_stop()
            self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
            try:
                await self._until_ready()
                if not self._stop.is_set():
                    self._journal.note("ready", fabric=str(self._fabric.folder), brokers=self._config.cluster.brokers)
                    if self._config.tier.enabled:
                        self._start_client("tier")
                    on_ready(self._fabric)
                await self._until_stopped()
            finally:
                await self._stop_all()

    # --- before -------------------------------------------------------------------------------------------------------

    def _take_identity(self) -> None:
        """With `--restore`, become a new cluster; then give replicas' folders the new id, also after a crash here."""
        if self._options.restore:
            before, after = self._directory.restore()
            self._journal.note("restored", cluster=after, copy_of=before)
        if copied := self._directory.copied_from:
            for number in self._folder.replicas(0):
                with closing(RealDisk(str(self._folder.replica(number)))) as disk:
                    adopt_folder(disk, copied, self._directory.cluster_id, self._directory.log_id)
            self._directory.finish_restore()

    def _own_fabric(self, stack: ExitStack, home: str) -> FabricChoice:
        """Own the folders that the cluster's id names, before anything in them or in the store changes."""
        self._remove_leftovers()
        folder = self._config.cluster.fabric_dir
        wanted = Path(folder).expanduser().absolute() if folder else None
        need = self._options.fabric_bytes(len(self._directory.topics.all()))
        choice = choose_fabric(self._folder.path, self._directory.cluster_id, wanted, need)
        stack.enter_context(owned(choice.folder, self._home))
        if home:
            stack.enter_context(owned(Path(home), self._home))
        return choice

    def _make_fabric(self, home: str) -> None:
        self._past = self._directory.earlier_generations()
        if home:
            remove_strays(home, self._past)
            self._mirror = make_mirror(home, self._directory.generation)
        empty(self._fabric.folder)
        write_owner(self._fabric.folder, self._home)
        create_epochs(open_fabric(str(self._fabric.folder), self._mirror_folder, self._directory.generation).fabric)

    @property
    def _mirror_folder(self) -> str:
        return "" if self._mirror is None else str(self._mirror)

    def _forget_past(self) -> None:
        """Mirrors of earlier generations go once the sequencer has recovered all lanes."""
        with contextlib.suppress(EmbarcaderoError):  # the store can't be read: next time
            if self._past and not self._directory.earlier_generations():
                remove_mirrors(self._past)
                self._past = ()

    def _remove_leftovers(self) -> None:
        """Remove the fabric that this folder's last supervisor left when it was killed."""
        try:
            before = Path(self._folder.read_info().fabric)
        except EmbarcaderoError:
            return
        if before.name == fabric_name(self._directory.cluster_id):
            remove_unowned(before)

    def _watch_for_stop(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        if self._options.stop_with_stdin:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._stop.set()

    # --- while it runs ------------------------------------------------------------------------------------------------

    async def _until_stopped(self) -> None:
        """Wait; now and then see whether somebody made the folder of another replica (`replica add`)."""
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK_S)
            if not self._stop.is_set():
                self._start_added()
                self._start_sweep()
                self._forget_past()
                if self._untold:
                    self._tell()
                self._end_replaced()
                self._end_stopped(time.monotonic_ns() // 1_000)

    def _end_replaced(self) -> None:
        """Kill brokers that the sequencer has closed because they were silent: whoever is stopped can't end itself."""
        with contextlib.suppress(EmbarcaderoError):  # the store is busy: next time
            closed = {member.pid for member in self._directory.members.newest() if member.state is not MemberState.LIVE}
            for child in self._children:
                if child.pid in closed and any(role.broker is not None for role in child.roles):
                    self._journal.warn("broker was silent", node=child.name, pid=child.pid, then="starting it again")
                    child.signal(signal.SIGKILL)

    def _end_stopped(self, now_us: int) -> None:
        """Kill who stays stopped: while it holds the store's lock, nobody can write that it is silent."""
        ticks = {child.pid: ticks_if_stopped(child.pid) for child in self._everybody() if child.pid}
        stopped = {pid: beat for pid, beat in ticks.items() if beat is not None}
        self._pulses.keep(set(stopped))
        for child in self._everybody():
            if child.pid in stopped and self._pulses.silent_us(child.pid, stopped[child.pid], now_us) >= _STOPPED_US:
                self._journal.warn("node was stopped", node=child.name, pid=child.pid, then="starting it again")
                child.signal(signal.SIGKILL)

    def _start_added(self) -> None:
        running = {role.replica for child in self._children for role in child.roles}
        for number in self._folder.replicas(0):
            if number not in running and number < REPLICAS_MAX:
                child = Child(self._folder, [Role(replica=number)], self._fork_server)
                self._journal.note("replica added", replica=number)
                self._children.append(child)
                self._keepers.append(asyncio.create_task(self._keep(child)))

    def _start_sweep(self) -> None:
        """Start the process that looks after staged writes, once there is a topic that holds some."""
        if "sweep" in self._clients or time.monotonic() < self._staging_seen_s + _STAGING_LOOK_S:
            return
        self._staging_seen_s = time.monotonic()
        with contextlib.suppress(EmbarcaderoError):  # the store is busy: next time
            if any(topic.hidden for topic in self._directory.topics.all()):
                self._start_client("sweep")

    def _start_client(self, name: str) -> None:
        child = self._clients[name] = ClientChild(self._folder, self._fork_server, name)
        self._client_keepers.append(asyncio.create_task(self._keep(child)))

    async def _keep(self, child: Child) -> None:
        await child.keep(self._stop, self._tell, self._died, self._not_started)

    def _not_started(self, child: Child, reason: str) -> None:
        if self._ready:
            self._journal.warn("can't start node", node=child.name, reason=reason, then="trying again")
        else:
            self._fail(ClusterError(f"can't start {child.name}: {reason}", "see the limits of this machine"))

    def _died(self, child: Child, pid: int, reason: str) -> None:
        if isinstance(child, ClientChild):
            words = child.last_words() or reason
            self._journal.warn("client ended", process=child.name, pid=pid, reason=words, then="starting it again")
            return
        if not self._ready and self._goes_without(child):
            self._journal.warn("replica does not start", node=child.name, reason=child.last_words() or reason)
            return
        if not self._ready:
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
            self._journal.warn("can't mark members dead", node=child.name, reason=error.message)  # they register anew
        self._tell()

    def _goes_without(self, child: Child) -> bool:
        """A cluster starts without a replica that can't (it is tried again and again), unless none of them can."""
        if any(role.replica is None for role in child.roles):
            return False
        self._missing.add(child.name)
        return any(self._is_replica(other) and other.name not in self._missing for other in self._children)

    @staticmethod
    def _is_replica(child: Child) -> bool:
        return all(role.replica is not None for role in child.roles)

    def _fail(self, error: EmbarcaderoError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def _live(self, pid: int) -> list[Member]:
        return [m for m in self._directory.members.all() if m.pid == pid and m.state is MemberState.LIVE]

    def _live_replicas(self, pid: int) -> list[ReplicaMember]:
        return [m for m in self._directory.replicas.all() if m.pid == pid and m.state is not ReplicaState.DEAD]

    async def _until_ready(self) -> None:
        """Wait until every broker says hello, replicas and sequencers are there, and one of these started its epoch."""
        give_up = time.monotonic() + READY_S_MAX
        waiting = list(self._children)
        while (waiting or not self._directory.elections.started_epoch()) and not self._stop.is_set():
            if time.monotonic() > give_up:
                names = ", ".join(child.name for child in waiting) or "the sequencer"
                self._fail(ClusterError(f"{names} took more than {READY_S_MAX:.0f} s", f"see {self._folder.logs}"))
                return
            waiting = [child for child in waiting if child.name not in self._missing and not await self._answers(child)]
            await asyncio.sleep(_READY_POLL_S)
        self._ready = True

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

    def _tell(self) -> None:
        """Write who runs now, or do it later: a full disk is no reason to stop, and take the fabric away."""
        try:
            self._write_info()
            self._untold = False
        except OSError as error:
            self._untold = True
            self._journal.warn("can't write cluster.json", error=error.strerror, then="trying again")

    def _write_info(self) -> None:
        self._folder.write_info(
            ClusterInfo(
                version=self._version,
                id=self._directory.cluster_id,
                generation=self._directory.generation,
                fabric=str(self._fabric.folder),
                mirror=self._mirror_folder,
                home=self._home,
                config=self._config,
                supervisor=os.getpid(),
                nodes=[NodeInfo(roles=child.name, pid=child.pid) for child in self._everybody()],
            )
        )

    def _everybody(self) -> list[Child]:
        return [*self._children, *self._clients.values()]

    # --- after --------------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Brokers first: to settle what they took they need the sequencer, which needs replicas to drain to disk.

        Whoever reigns now is the last one, so sequencers that stand by just leave.
        """
        self._stop.set()
        self._journal.note("stopping", nodes=sum(bool(child.pid) for child in self._children))
        brokers = [child for child in self._children if all(role.broker is not None for role in child.roles)]
        replicas = [child for child in self._children if self._is_replica(child)]
        others = [child for child in self._children if child not in brokers and child not in replicas]
        with contextlib.suppress(EmbarcaderoError):  # without: one that stands by takes over, and drains in its turn
            self._directory.elections.end()
        await self._end_clients()
        await self._end(brokers, signal.SIGTERM, _LEAVE_S)
        await self._end(others, signal.SIGTERM, DRAIN_S_MAX + (_STOP_S if brokers else _LEAVE_S))
        await self._end(replicas, signal.SIGTERM, _STOP_S)
        await self._end(self._children, signal.SIGKILL, _STOP_S)
        stuck = [child.name for child in self._children if child.pid]
        if stuck:
            self._journal.warn("nodes did not end", nodes=",".join(stuck))
        else:
            self._journal.note("stopped")

    async def _end_clients(self) -> None:
        """Stop the clients of the cluster first. What one is killed in the middle of is done again one day."""
        for number in (signal.SIGTERM, signal.SIGKILL) if self._client_keepers else ():
            for child in self._clients.values():
                child.signal(number)
            await asyncio.wait(self._client_keepers, timeout=_STOP_S)

    async def _end(self, children: list[Child], number: signal.Signals, wait_s: float) -> None:
        """Signal some children, and wait for them to end."""
        chosen = [keeper for keeper, child in zip(self._keepers, self._children, strict=True) if child in children]
        if any(not keeper.done() for keeper in chosen):
            for child in children:
                child.signal(number)
            await asyncio.wait(chosen, timeout=wait_s)
