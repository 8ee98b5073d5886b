"""A cluster that can be killed whole. Its ports stay the same over restarts, so clients find it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from embarcadero.config import load
from embarcadero.errors import ClusterError
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.ports import ReservedPorts
from embarcadero.node.report import ClusterReport, report
from embarcadero.node.supervisor import STOP_S_MAX, UpOptions

_GONE_S: Final = 30.0


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: everything that it started is stopped before it goes."""

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_whole(folder: ClusterFolder) -> bool:
    """Whether all runs, nothing is degraded, and every sequencer that does not reign is ready to take over."""
    if any(not node.pid for node in folder.require_running().nodes):
        return False
    found = report(folder)
    return not found.degraded and all(standby.state == "stands by" for standby in found.sequencer.standbys)


class MortalCluster:
    """A cluster in a folder, running or not."""

    def __init__(self, folder: Path, brokers: int, replicas: int, *, by_proxy: bool = False, **more: Any) -> None:
        """`by_proxy`: clients are told ports of their own, on which something has to lead to `ports`.

        `more`: other keys of the configuration, with two underscores for the dot.
        """
        self._ports = ReservedPorts(2 * brokers if by_proxy else brokers)
        port = self._ports.first
        self.folder = ClusterFolder(folder)
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
        self.ever: set[int] = set()  # process ids that it was seen to have
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; returns how many seconds it took to be ready."""
        began = time.monotonic()
        self._process, _ = start(self._options())
        return time.monotonic() - began

    def _options(self) -> UpOptions:
        return UpOptions(config=self.config, stop_with_stdin=True)

    def report(self) -> ClusterReport:
        """What runs now."""
        return report(self.folder)

    def kill_broker(self, broker: int) -> int:
        """SIGKILL a broker's process, and return its id. The supervisor starts it again."""
        pid = self.folder.require_running().pid_of(f"broker:{broker}")
        os.kill(pid, signal.SIGKILL)
        return pid

    def pids(self) -> dict[str, int]:
        """Process ids of all roles that run, and of the supervisor."""
        info = self.folder.require_running()
        roles = {role: node.pid for node in info.nodes for role in node.roles.split(",") if node.pid}
        found = {"supervisor": info.supervisor, **roles}
        self.ever.update(found.values())
        return found

    def reigning(self) -> str:
        """The role of the sequencer that reigns: `sequencer`, or that of another candidate."""
        pid = self.report().sequencer.pid
        names = [role for role, known in self.pids().items() if known == pid and role.startswith("sequencer")]
        return names[0] if names else "sequencer"

    def kill_all(self, only_supervisor: bool = False) -> int:
        """SIGKILL every process, the supervisor first, and remove the fabric. Returns how many were killed.

        `only_supervisor`: the others end by themselves, since they end with it.
        """
        info = self.folder.require_running()
        pids = [info.supervisor, *(node.pid for node in info.nodes if node.pid)]
        for pid in pids[:1] if only_supervisor else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        wait_until_gone(pids)
        shutil.rmtree(info.fabric, ignore_errors=True)
        self._process = None
        return 1 if only_supervisor else len(pids)

    def wipe(self, replica: int) -> None:
        """Take a replica's disk away: its folder is gone."""
        shutil.rmtree(self.folder.path / f"replica-{replica}")

    def stop(self) -> None:
        """Stop it in order, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            process.wait(STOP_S_MAX)

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in: what does not stop in order is killed."""
        try:
            pids = list(self.pids().values()) if self._process is not None else []
        except ClusterError:
            pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self._kill(pids)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until_gone(pids)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Until processes that were killed have ended: that takes a moment, too."""
    give_up = time.monotonic() + _GONE_S
    while any(runs(pid) for pid in pids):
        if time.monotonic() > give_up:
            raise ClusterError("killed processes do not end", "see `ps`")
        time.sleep(0.005)


def runs(pid: int) -> bool:
    """Whether a process still executes; a zombie that nobody waits for does not."""
    return state_of(pid) not in "ZX"


def halt(pid: int) -> None:
    """SIGSTOP, and wait until it stands still: when `kill` returns, the signal may still be on its way."""
    os.kill(pid, signal.SIGSTOP)
    give_up = time.monotonic() + _GONE_S
    while state_of(pid) not in "TZX":
        if time.monotonic() > give_up:
            raise ClusterError(f"process {pid} does not stand still", "see `ps`")
        time.sleep(0.001)


def state_of(pid: int) -> str:
    """One letter, as in /proc: T is stopped, Z and X are gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
