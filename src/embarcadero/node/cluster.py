"""A cluster's folder: what it is, where its fabric is, and who runs it.

<data_dir>/lock           held (flock) by the running supervisor, with its process id inside
<data_dir>/cluster.json   what the supervisor started: a ClusterInfo
<data_dir>/store.db       the placement store
<data_dir>/logs/          one log a process
<data_dir>/replica-<r>/   a replica's segments; while it is there, `up` starts that replica
<data_dir>/fabric/        the fabric, only where no memory file system has room
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from embarcadero.config import Config, FabricSizes
from embarcadero.errors import AlreadyRunning, ClusterError, Corrupt, NotRunning
from embarcadero.limits import MIB

SHARED_MEMORY = Path("/dev/shm")
_LOCK_TRIES, _LOCK_RETRY_S = 5, 0.05
_REPLICA_FOLDER = re.compile(r"replica-(0|[1-9][0-9]?)", re.ASCII)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node process: its roles as the command line names them, and its process id (0 while it is down)."""

    roles: str
    pid: int


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor runs. Node processes take their configuration from here."""

    version: str
    id: str
    generation: int
    fabric: str
    config: Config
    supervisor: int
    nodes: list[NodeInfo]
    mirror: str = ""  # folder of the fabric's mirror; empty: it has none

    @property
    def sizes(self) -> FabricSizes:
        """Sizes of the fabric's regions."""
        return self.config.fabric

    def pid_of(self, role: str) -> int:
        """Process id of the node that hosts a role; 0 while it is down."""
        return next((node.pid for node in self.nodes if role in node.roles.split(",")), 0)


_INFO = msgspec.json.Decoder(ClusterInfo)  # made here: two threads that are the first to decode a type crash msgspec


class FabricChoice(NamedTuple):
    """Where a fabric goes, and what the user should know about it."""

    folder: Path
    note: str = ""


def default_data_dir() -> Path:
    """$EMBARCADERO_DATA_DIR, else a folder for state in the user's home."""
    if given := os.environ.get("EMBARCADERO_DATA_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "embarcadero" / "default"


def data_dir_of(config: Config) -> Path:
    """The folder of a cluster with this configuration."""
    return Path(config.cluster.data_dir or default_data_dir())


def fabric_name(cluster_id: str) -> str:
    """Name of the folder that a cluster's fabric has, wherever it is."""
    return f"embarcadero-{cluster_id}"


def choose_fabric(data_dir: Path, cluster_id: str, wanted: Path | None, need_bytes: int) -> FabricChoice:
    """The folder for a fabric: in `wanted` if given, else in shared memory if that has room, else on disk."""
    name = fabric_name(cluster_id)
    if wanted is not None:
        return FabricChoice(wanted / name)
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free >= need_bytes:
            return FabricChoice(SHARED_MEMORY / name)
        why = f"{SHARED_MEMORY} has {free // MIB} MiB free, this cluster wants {need_bytes // MIB}"
    else:
        why = f"{SHARED_MEMORY} can't be written"
    return FabricChoice(data_dir / "fabric" / name, f"{why}: the fabric is on disk, in {data_dir}, and slower")


class ClusterFolder:
    """One cluster's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def store_path(self) -> Path:
        return self.path / "store.db"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_of(self, roles: str) -> Path:
        """Where the node that hosts these roles logs."""
        return self.logs / f"{'node' if ',' in roles else roles.replace(':', '-')}.log"

    def replica(self, number: int) -> Path:
        """Folder of a replica."""
        return self.path / f"replica-{number}"

    def replicas(self, configured: int) -> list[int]:
        """Numbers of replicas to run: as many as are configured, and all that have a folder."""
        found = (_REPLICA_FOLDER.fullmatch(path.name) for path in self.path.glob("replica-*") if path.is_dir())
        return sorted({*range(configured), *(int(match[1]) for match in found if match)})

    def create(self) -> None:
        """Make the folder, readable by its owner only."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ClusterError(f"can't make {self.path}: {error.strerror}", "choose another --data-dir") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one supervisor of this folder."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_RETRY_S)  # a passing `running_pid` holds it for a moment
            else:
                return
        pid = os.pread(descriptor, 32, 0).decode() or "unknown"
        raise AlreadyRunning(
            f"a cluster is running in {self.path} (supervisor pid {pid})",
            "use it, stop it with `embarcadero down`, or choose another --data-dir",
        )

    def running_pid(self) -> int | None:
        """Process id of the running supervisor, or None."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(descriptor, 32, 0) or 0) or None
        else:
            return None
        finally:
            os.close(descriptor)

    def replica_in_use(self, number: int) -> bool:
        """Whether a process holds a replica's folder."""
        try:
            descriptor = os.open(self.replica(number) / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def require_running(self) -> ClusterInfo:
        """What runs here, or NotRunning."""
        if self.running_pid() is None:
            raise NotRunning(f"no cluster is running in {self.path}", "start one with `embarcadero up`")
        return self.read_info()

    def read_info(self) -> ClusterInfo:
        """What was last started here."""
        try:
            return _INFO.decode((self.path / "cluster.json").read_bytes())
        except FileNotFoundError:
            raise NotRunning(f"{self.path} has no cluster yet", "start one with `embarcadero up`") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"{self.path / 'cluster.json'} makes no sense: {error}"
            raise Corrupt(what, "stop the cluster and remove that file") from error

    def write_info(self, info: ClusterInfo) -> None:
        """Replace cluster.json, whole."""
        content = msgspec.json.format(msgspec.json.encode(info), indent=2)
        temporary = self.path / "cluster.json.new"
        temporary.write_bytes(content + b"\n")
        temporary.replace(self.path / "cluster.json")
