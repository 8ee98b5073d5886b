"""A private cluster in child processes, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from embarcadero.config import Config, load
from embarcadero.errors import ClusterError
from embarcadero.forks import abandon, blank, tell_of_forks
from embarcadero.node.background import start
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.report import ClusterReport, report
from embarcadero.node.roles import candidate_role
from embarcadero.node.supervisor import STOP_S_MAX, UpOptions

_RESTART_S = 30.0
_POLL_S = 0.01


class LocalCluster:
    """Brokers, a sequencer and replicas on free ports of this machine. Without `data_dir`, nothing is left of it.

    `restore`: `data_dir` is a copy of another cluster's folder and gets an identity of its own, as `up --restore` does.

    It ends with the block, with `close()`, or with this process, however that ends.
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
        self.folder = ClusterFolder(Path(self._temporary or data_dir or ""))
        chosen = load(chosen, {"cluster.data_dir": self.folder.path})
        options = UpOptions(config=chosen, stop_with_stdin=True, restore=restore)
        self._process: subprocess.Popen[bytes] | None = None
        tell_of_forks(self)
        try:
            self._process, self.note = start(options)
        except BaseException:
            self.close()
            raise

    def _after_fork(self) -> None:
        """In a forked child: the cluster is the parent's. It ends with the parent, even if the child lives on."""
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
        """Where the live brokers listen."""
        return self.report().addresses

    def report(self) -> ClusterReport:
        """What runs now."""
        return report(self.folder)

    def pids(self) -> dict[str, int]:
        """Process ids by role: `supervisor`, `sequencer`, `broker:0`, ...; 0 for one that is down just now.

        `sequencer`, `sequencer:1`, ... are candidates: `report().sequencer` tells which of them reigns.
        """
        info = self.folder.require_running()
        roles = [role for node in info.nodes for role in node.roles.split(",") if role.startswith("sequencer")]
        roles += [f"broker:{number}" for number in range(info.config.cluster.brokers)]
        roles += [f"replica:{number}" for number in self.folder.replicas(info.config.cluster.replicas)]
        return {"supervisor": info.supervisor} | {role: info.pid_of(role) for role in roles}

    def kill_broker(self, broker: int) -> int:
        """SIGKILL a broker's process, and return its id. The supervisor starts it again as a new incarnation."""
        return self._kill(f"broker:{broker}")

    def kill_sequencer(self) -> int:
        """SIGKILL the process of the sequencer that reigns, and return its id. Another takes over in the next epoch."""
        return self._kill(candidate_role(self.report().sequencer.candidate))

    def kill_replica(self, replica: int) -> int:
        """SIGKILL a replica's process, and return its id. The supervisor starts it again as a new incarnation."""
        return self._kill(f"replica:{replica}")

    def kill_all(self) -> list[int]:
        """SIGKILL every process at once, the supervisor too, and return their ids. What is on disk stays.

        A new LocalCluster on the same `data_dir` removes the fabric that is left, and goes on from the disks.
        """
        pids = sorted({pid for pid in self.pids().values() if pid})
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        give_up = time.monotonic() + STOP_S_MAX
        while any(_runs(pid) for pid in pids) and time.monotonic() < give_up:
            time.sleep(_POLL_S)
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
        """Stop all processes and remove what is temporary. Closing twice is fine."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
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


def _runs(pid: int) -> bool:
    """Whether a process is still there, and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
