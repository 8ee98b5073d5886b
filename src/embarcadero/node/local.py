"""Small clusters of real processes: a private cluster for a `with` block, and a cluster to kill and restart."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from embarcadero.config import Config, load
from embarcadero.errors import ClusterError
from embarcadero.forks import abandon, blank, tell_of_forks
from embarcadero.node.background import start
from embarcadero.node.children import NODE_MODULE
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.process import ReservedPorts, candidate_role, wait_until_free
from embarcadero.node.report import ClusterReport, report
from embarcadero.node.supervisor import STOP_S_MAX, UpOptions

_RESTART_S: Final = 30.0
_GONE_S: Final = 30.0
_POLL_S: Final = 0.01


class ClusterProcesses:
    """The processes of a cluster that a program starts and owns: a background supervisor and its children."""

    def __init__(self, folder: ClusterFolder) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def report(self) -> ClusterReport:
        """Report the current state of the cluster."""
        return report(self.folder)

    def _start(self, options: UpOptions) -> str:
        """Start the supervisor, wait until the cluster is ready, and return its note for the user."""
        self._process, note = start(options)
        return note

    def _stop(self) -> None:
        """Stop all processes in order, if they run. Raise subprocess.TimeoutExpired if they do not end in time."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            process.wait(STOP_S_MAX)

    def _wait_killed(self) -> None:
        """Wait for the end of the killed supervisor."""
        process, self._process = self._process, None
        if process is not None:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class LocalCluster(ClusterProcesses):
    """Brokers, a sequencer and replicas on free ports of this machine, for tests and programs.

    The cluster ends with the `with` block, with `close()`, or with this process, even if this process is killed.
    Without `data_dir`, its folder is temporary and is removed at the end.

        with LocalCluster() as cluster, embarcadero.connect(cluster.addresses) as log:
            ...

    Args:
        brokers: the number of brokers; default: `cluster.brokers` of the configuration.
        data_dir: the cluster's folder; default: a temporary folder.
        log_bytes: the size of each broker's log in memory.
        config: a configuration file, or a Config.
        replicas: the number of replicas. Without replicas, records live in memory only.
        standbys: the number of standby sequencers.
        restore: `data_dir` is a copy of another cluster's folder; give it a new identity, as `up --restore` does.

    Raises:
        AlreadyRunning: a cluster runs in `data_dir`.
        BadConfiguration, BadValue: the configuration is wrong.
        ClusterError: the cluster does not start, with the reason in the message.
    """

    def __init__(
        self,
        brokers: int | None = None,
        data_dir: Path | str | None = None,
        log_bytes: int | None = None,
        config: str | Path | Config | None = None,
        replicas: int = 0,
        standbys: int | None = None,
        restore: bool = False,
    ) -> None:
        flags = {
            "cluster.brokers": brokers,
            "cluster.replicas": replicas,
            "cluster.standbys": standbys,
            "fabric.log_bytes": log_bytes,
            "broker.port": 0,
            "metrics.port": 0,
        }
        chosen = load(config, flags | {"broker.advertised_port": 0})
        self._temporary = tempfile.mkdtemp(prefix="embarcadero-") if data_dir is None else None
        super().__init__(ClusterFolder(Path(self._temporary or data_dir or "")))
        chosen = load(chosen, {"cluster.data_dir": self.folder.path})
        options = UpOptions(config=chosen, stop_with_stdin=True, restore=restore)
        tell_of_forks(self)
        try:
            self.note = self._start(options)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LocalCluster in {self.folder.path}, {'stopped' if self._process is None else 'running'}>"

    def _after_fork(self) -> None:
        """Disown the cluster in a forked child: it belongs to the parent and ends with the parent."""
        process, self._process, self._temporary = self._process, None, None
        if process is not None and process.stdin is not None:
            blank(process.stdin.fileno())
        abandon(process)

    @property
    def data_dir(self) -> Path:
        """Its folder."""
        return self.folder.path

    @property
    def addresses(self) -> list[str]:
        """Addresses of the live brokers."""
        return self.report().addresses

    def pids(self) -> dict[str, int]:
        """Process ids by role: `supervisor`, `sequencer`, `broker:0`, ...; 0 while a process is down.

        Any of `sequencer`, `sequencer:1`, ... may be the leader: see `report().sequencer`.
        """
        info = self.folder.require_running()
        roles = [role for node in info.nodes for role in node.roles.split(",") if role.startswith("sequencer")]
        roles += [f"broker:{number}" for number in range(info.config.cluster.brokers)]
        roles += [f"replica:{number}" for number in self.folder.replicas(info.config.cluster.replicas)]
        return {"supervisor": info.supervisor} | {role: info.pid_of(role) for role in roles}

    def kill_broker(self, broker: int) -> int:
        """SIGKILL a broker's process, and return its id. The supervisor restarts it as a new incarnation."""
        return self._kill(f"broker:{broker}")

    def kill_sequencer(self) -> int:
        """SIGKILL the process of the leader, and return its id. A standby takes over with the next epoch."""
        return self._kill(candidate_role(self.report().sequencer.candidate))

    def kill_replica(self, replica: int) -> int:
        """SIGKILL a replica's process, and return its id. The supervisor restarts it as a new incarnation."""
        return self._kill(f"replica:{replica}")

    def kill_all(self) -> list[int]:
        """SIGKILL all processes including the supervisor, and return their ids. Files on disk stay.

        A new LocalCluster on the same `data_dir` removes the leftover fabric and recovers from the disks.
        """
        pids = sorted({pid for pid in self.pids().values() if pid})
        kill(pids)
        self._wait_killed()
        wait_until_gone(pids)
        return pids

    def _kill(self, role: str) -> int:
        if role not in self.pids():
            raise ClusterError(f"this cluster has no {role}", f"it has {', '.join(self.pids())}")
        give_up = time.monotonic() + _RESTART_S
        while not (pid := self.pids()[role]):
            if time.monotonic() > give_up:
                raise ClusterError(f"{role} has been down for {_RESTART_S:.0f} s", f"see {self.folder.logs}")
            time.sleep(_POLL_S)
        os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        """Stop all processes and remove temporary files. It is safe to call this twice."""
        process = self._process
        try:
            self._stop()
        except subprocess.TimeoutExpired:
            if process is not None:
                process.kill()
                process.wait()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RestartableCluster(ClusterProcesses):
    """A cluster in a folder, running or stopped. Its ports stay the same, so clients find it again after a restart."""

    node_module = NODE_MODULE  # a subclass may set a module that injects faults
    ports_patience_s = 10.0  # the time that `start` waits for a port that another program took meanwhile

    def __init__(self, folder: Path, brokers: int, replicas: int, *, by_proxy: bool = False, **more: Any) -> None:
        """`by_proxy`: advertise other ports to clients; the caller's proxy must forward them to the broker ports.

        `more`: other keys of the configuration, with two underscores for the dot.
        """
        self._ports = ReservedPorts(2 * brokers if by_proxy else brokers)
        port = self._ports.first
        super().__init__(ClusterFolder(folder))
        self.brokers, self.replicas = brokers, replicas
        self.port, self.told_port = port, port + brokers if by_proxy else port
        self.addresses = [f"127.0.0.1:{self.told_port + number}" for number in range(brokers)]
        self.config = load(
            None,
            {
                "cluster.data_dir": folder,
                "cluster.brokers": brokers,
                "cluster.replicas": replicas,
                "broker.port": port,
                "metrics.port": 0,
                **({"broker.advertised_port": self.told_port} if by_proxy else {}),
                **{key.replace("__", "."): value for key, value in more.items()},
            },
        )
        self.ever: set[int] = set()  # all process ids seen so far

    def start(self) -> float:
        """Start the cluster; return the seconds until it is ready. Raise PortInUse if another program has a port."""
        wait_until_free("127.0.0.1", [self.port + number for number in range(self.brokers)], self.ports_patience_s)
        began = time.monotonic()
        self._start(UpOptions(config=self.config, stop_with_stdin=True, node_module=self.node_module))
        return time.monotonic() - began

    def kill_broker(self, broker: int) -> int:
        """SIGKILL a broker's process, and return its id. The supervisor restarts it."""
        pid = self.folder.require_running().pid_of(f"broker:{broker}")
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int]:
        """Process ids of all running roles, and of the supervisor."""
        info = self.folder.require_running()
        roles = {role: node.pid for node in info.nodes for role in node.roles.split(",") if node.pid}
        found = {"supervisor": info.supervisor, **roles}
        self.ever.update(found.values())
        return found

    def leader(self) -> str:
        """The role of the leader: `sequencer`, or `sequencer:1`, ..."""
        pid = self.report().sequencer.pid
        names = [role for role, known in self.pids().items() if known == pid and role.startswith("sequencer")]
        return names[0] if names else "sequencer"

    def kill_all(self, only_supervisor: bool = False) -> int:
        """SIGKILL every process, the supervisor first, and remove the fabric. Return the number of kills.

        `only_supervisor`: the other processes end by themselves, because they die with the supervisor.
        """
        info = self.folder.require_running()
        pids = [info.supervisor, *(node.pid for node in info.nodes if node.pid)]
        kill(pids[:1] if only_supervisor else pids)
        self._wait_killed()
        wait_until_gone(pids)
        shutil.rmtree(info.fabric, ignore_errors=True)
        return 1 if only_supervisor else len(pids)

    def wipe(self, replica: int) -> None:
        """Remove a replica's folder, as if its disk was lost."""
        shutil.rmtree(self.folder.path / f"replica-{replica}")

    def stop(self) -> None:
        """Stop the cluster in order, if it runs."""
        self._stop()

    def end(self) -> None:
        """Stop the cluster in any state: resume paused processes, stop in order, then kill the rest."""
        try:
            pids = list(self.pids().values()) if self._process is not None else []
        except ClusterError:
            pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        try:
            self._stop()
        except subprocess.TimeoutExpired:
            kill(pids)
            wait_until_gone(pids)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, so that it stops everything it started."""

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_whole(folder: ClusterFolder) -> bool:
    """Whether all processes run, nothing is degraded, and every standby is ready to take over."""
    if any(not node.pid for node in folder.require_running().nodes):
        return False
    found = report(folder)
    return not found.degraded and all(standby.state == "stands by" for standby in found.sequencer.standbys)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL processes; ignore processes that have already ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until killed processes have ended, which takes a moment."""
    give_up = time.monotonic() + _GONE_S
    while any(runs(pid) for pid in pids):
        if time.monotonic() > give_up:
            raise ClusterError(f"killed processes still run after {_GONE_S:.0f} s", "see `ps`")
        time.sleep(0.005)


def runs(pid: int) -> bool:
    """Whether a process still executes; a zombie does not."""
    return state_of(pid) not in "ZX"


def halt(pid: int) -> None:
    """SIGSTOP a process, and wait until it is stopped: the signal may arrive after `kill` returns."""
    os.kill(pid, signal.SIGSTOP)
    give_up = time.monotonic() + _GONE_S
    while state_of(pid) not in "TZX":
        if time.monotonic() > give_up:
            raise ClusterError(f"process {pid} did not stop within {_GONE_S:.0f} s of SIGSTOP", "see `ps`")
        time.sleep(0.001)


def state_of(pid: int) -> str:
    """The state of a process as one letter of /proc: T is stopped, Z and X are dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
