"""A cluster's folder: what it is, where its fabric is, and who runs it.

<data_dir>/lock           held (flock) by the running supervisor, with its process id inside
<data_dir>/cluster.json   what the supervisor started: a ClusterInfo, without secrets
<data_dir>/secrets.json   the secrets of its configuration, if it has any
<data_dir>/store.db       the placement store
<data_dir>/logs/          one log a process
<data_dir>/replica-<r>/   a replica's segments; while it is there, `up` starts that replica
<data_dir>/fabric/        the fabric, only where no memory file system has enough space
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from embarcadero.config import Config, FabricSizes
from embarcadero.config.secrets import join, split
from embarcadero.errors import (
    AlreadyRunning,
    ClusterError,
    Corrupt,
    EmbarcaderoError,
    NotRunning,
    WrongFolder,
)
from embarcadero.node.fabric_folder import RESTORE_HINT, Home

_OTHERS = 0o077
_LOCK_TRIES, _LOCK_RETRY_S = 5, 0.05
_WRITTEN = ("lock", "store.db*", "replica-*/**/*", "tier/*.db*")
"""Files that a cluster changes in place; others are replaced."""
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
    home: Home | None = None  # the data folder when this was written; None: written by an older version

    @property
    def sizes(self) -> FabricSizes:
        """Sizes of the fabric's regions."""
        return self.config.fabric

    def pid_of(self, role: str) -> int:
        """Process id of the node that hosts a role; 0 while it is down."""
        return next((node.pid for node in self.nodes if role in node.roles.split(",")), 0)


_SECRETS = msgspec.json.Decoder(dict[str, list[str]])
_INFO = msgspec.json.Decoder(ClusterInfo)  # made here: two threads that are the first to decode a type crash msgspec


def default_data_dir() -> Path:
    """$EMBARCADERO_DATA_DIR, else a folder for state in the user's home."""
    if given := os.environ.get("EMBARCADERO_DATA_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "embarcadero" / "default"


def data_dir_of(config: Config) -> Path:
    """The folder of a cluster with this configuration."""
    return Path(config.cluster.data_dir or default_data_dir())


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
        """Make the folder, for its owner only; one that other users may read becomes private."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ClusterError(f"can't make {self.path}: {error.strerror}", "choose another --data-dir") from error
        for path in (self.path, *self.path.glob("*"), *self.logs.glob("*"), *self.path.glob("watch/*")):
            _make_private(path)

    @property
    def private(self) -> bool:
        """Whether no other user has a right to the folder."""
        return not self.path.stat().st_mode & _OTHERS

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Name the missing right when another user's folder can't be read."""
        try:
            yield
        except PermissionError as error:
            what = f"user {_user(os.geteuid())} may not read {error.filename or self.path}"
            hint = f"run this as {_owner_of(self.path)}; from elsewhere, `status --brokers` asks the brokers"
            raise ClusterError(what, hint) from None

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
            with self._readable():
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

    def refuse_copy(self) -> None:
        """Raise WrongFolder if this folder is a copy, and its original is still where it was.

        A folder that was moved has no original, nor has one that came from another machine: those may start.
        """
        info = self._readable_info()
        before = None if info is None else info.home
        if info is None or before is None or not before.still_there() or before.same_folder(Home.of(self.path)):
            return
        original = ClusterFolder(Path(before.path))._readable_info()
        if original is not None and original.id == info.id:
            raise WrongFolder(
                f"{self.path} is a copy of {before.path}, which is still there",
                f"{RESTORE_HINT}; to replace the original by it, move that away",
            )

    def require_copy(self) -> None:
        """Raise unless this folder is a copy that shares no file with its original: only that may be restored."""
        if not self.store_path.exists():
            raise ClusterError(f"{self.path} has no cluster", "copy a data folder there, then restore it")
        info = self._readable_info()
        if info is not None and info.home is not None and info.home.same_folder(Home.of(self.path)):
            what = f"{self.path} is not a copy: its cluster was last started in this very folder"
            raise WrongFolder(what, "start it without --restore; if it is a copy all the same, remove its cluster.json")
        for path in map(self.replica, self.replicas(0)):
            if path.is_symlink():
                what = f"{path} is a symbolic link to {path.readlink()}, which belongs to the original"
                raise WrongFolder(what, "replace the link by a copy of that folder")
        for path in (path for pattern in _WRITTEN for path in self.path.glob(pattern)):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                what = f"{path} is a hard link to a file that has {found.st_nlink} names: the original may write to it"
                raise WrongFolder(what, "copy the files of the stopped original: `cp -a`, without -l")

    def _readable_info(self) -> ClusterInfo | None:
        try:
            return self.read_info()
        except (EmbarcaderoError, OSError):
            return None

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
            with self._readable():
                info = _INFO.decode((self.path / "cluster.json").read_bytes())
                return msgspec.structs.replace(info, config=join(info.config, self._secrets()))
        except FileNotFoundError:
            raise NotRunning(f"{self.path} has no cluster yet", "start one with `embarcadero up`") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"{self.path / 'cluster.json'} makes no sense: {error}"
            raise Corrupt(what, "stop the cluster and remove that file") from error

    def _secrets(self) -> dict[str, list[str]]:
        try:
            return _SECRETS.decode((self.path / "secrets.json").read_bytes())
        except FileNotFoundError:
            return {}

    def write_info(self, info: ClusterInfo) -> None:
        """Replace cluster.json, whole; secrets go to a file of their own."""
        config, secrets = split(info.config)
        if secrets:
            self._replace("secrets.json", msgspec.json.encode(secrets))
        else:
            (self.path / "secrets.json").unlink(missing_ok=True)
        content = msgspec.json.encode(msgspec.structs.replace(info, config=config))
        self._replace("cluster.json", msgspec.json.format(content, indent=2) + b"\n")

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f"{name}.new"
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        temporary.replace(self.path / name)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _owner_of(path: Path) -> str:
    """The user to whom a folder belongs, or the nearest one above it that can be seen."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"user {_user(each.stat().st_uid)}"
    return "its owner"


def _make_private(path: Path) -> None:
    """Take all rights of other users away; a folder of another owner stays as it is."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~_OTHERS)
