"""A cluster's folder: its files, its lock, and the description of the running cluster.

<data_dir>/lock           held (flock) by the running supervisor; contains its process id
<data_dir>/cluster.json   the running cluster: a ClusterInfo, without secrets
<data_dir>/secrets.json   the secrets of its configuration, if any
<data_dir>/store.db       the placement store
<data_dir>/logs/          one log for each process
<data_dir>/replica-<r>/   a replica's segments; while it exists, `up` starts that replica
<data_dir>/fabric/        the fabric, only if no memory file system has enough space
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
"""Files that a cluster changes in place; it replaces all other files as a whole."""
_REPLICA_FOLDER = re.compile(r"replica-(0|[1-9][0-9]?)", re.ASCII)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node process: its roles in the syntax of the command line, and its process id (0 while it is down)."""

    roles: str
    pid: int


class ClusterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that a supervisor runs. Node processes read their configuration from here."""

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
_INFO = msgspec.json.Decoder(ClusterInfo)  # at import: msgspec crashes if two threads decode a type for the first time


def default_data_dir() -> Path:
    """Return $EMBARCADERO_DATA_DIR, or a state folder in the user's home."""
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
        """The log file of the node that hosts these roles."""
        return self.logs / f"{'node' if ',' in roles else roles.replace(':', '-')}.log"

    def replica(self, number: int) -> Path:
        """Folder of a replica."""
        return self.path / f"replica-{number}"

    def replicas(self, configured: int) -> list[int]:
        """Numbers of the replicas to run: the configured ones, and all with a folder."""
        found = (_REPLICA_FOLDER.fullmatch(path.name) for path in self.path.glob("replica-*") if path.is_dir())
        return sorted({*range(configured), *(int(match[1]) for match in found if match)})

    def create(self) -> None:
        """Create the folder with rights for its owner only. Remove other users' rights from an existing folder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ClusterError(f"cannot create {self.path}: {error.strerror}", "choose another --data-dir") from error
        for path in (self.path, *self.path.glob("*"), *self.logs.glob("*"), *self.path.glob("watch/*")):
            _make_private(path)

    @property
    def private(self) -> bool:
        """Whether other users have no rights to the folder."""
        return not self.path.stat().st_mode & _OTHERS

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Convert PermissionError into a ClusterError that names the missing right."""
        try:
            yield
        except PermissionError as error:
            what = f"user {_user(os.geteuid())} is not allowed to read {error.filename or self.path}"
            hint = f"run this as {_owner_of(self.path)}; or use `status --brokers`, which asks the brokers"
            raise ClusterError(what, hint) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this folder, as its only supervisor."""
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
                time.sleep(_LOCK_RETRY_S)  # a call of `running_pid` holds it for a moment
            else:
                return
        pid = os.pread(descriptor, 32, 0).decode() or "unknown"
        raise AlreadyRunning(
            f"a cluster is already running in {self.path} (supervisor pid {pid})",
            "use it, stop it with `embarcadero down`, or choose another --data-dir",
        )

    def running_pid(self) -> int | None:
        """Return the process id of the running supervisor, or None."""
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
        """Raise WrongFolder if this folder is a copy, and its original still exists at its path.

        A folder that was moved has no original, and neither has a folder from another machine: both may start.
        """
        info = self._readable_info()
        before = None if info is None else info.home
        if info is None or before is None or not before.still_there() or before.same_folder(Home.of(self.path)):
            return
        original = ClusterFolder(Path(before.path))._readable_info()
        if original is not None and original.id == info.id:
            raise WrongFolder(
                f"{self.path} is a copy of {before.path}, which is still there",
                f"{RESTORE_HINT}; to replace the original by the copy, move the original away",
            )

    def require_copy(self) -> None:
        """Raise an error unless this folder is a copy that shares no files with its original."""
        if not self.store_path.exists():
            raise ClusterError(f"{self.path} contains no cluster", "copy a data folder there, then restore it")
        info = self._readable_info()
        if info is not None and info.home is not None and info.home.same_folder(Home.of(self.path)):
            what = f"{self.path} is not a copy: its cluster was last started in this same folder"
            raise WrongFolder(what, "start it without --restore; if it is a copy nevertheless, remove its cluster.json")
        for path in map(self.replica, self.replicas(0)):
            if path.is_symlink():
                what = f"{path} is a symbolic link to {path.readlink()}, which belongs to the original"
                raise WrongFolder(what, "replace the link by a copy of that folder")
        for path in (path for pattern in _WRITTEN for path in self.path.glob(pattern)):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                what = f"{path} is a hard link to a file with {found.st_nlink} names: the original may write to it"
                raise WrongFolder(what, "copy the files of the stopped original: `cp -a`, without -l")

    def _readable_info(self) -> ClusterInfo | None:
        try:
            return self.read_info()
        except (EmbarcaderoError, OSError):
            return None

    def replica_in_use(self, number: int) -> bool:
        """Whether a process holds the lock of a replica's folder."""
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
        """Return the description of the running cluster; raise NotRunning if none runs."""
        if self.running_pid() is None:
            raise NotRunning(f"no cluster is running in {self.path}", "start one with `embarcadero up`")
        return self.read_info()

    def read_info(self) -> ClusterInfo:
        """Return the description of the cluster that was last started here."""
        try:
            with self._readable():
                info = _INFO.decode((self.path / "cluster.json").read_bytes())
                return msgspec.structs.replace(info, config=join(info.config, self._secrets()))
        except FileNotFoundError:
            raise NotRunning(f"{self.path} contains no cluster yet", "start one with `embarcadero up`") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"{self.path / 'cluster.json'} is not valid: {error}"
            raise Corrupt(what, "stop the cluster and remove that file") from error

    def _secrets(self) -> dict[str, list[str]]:
        try:
            return _SECRETS.decode((self.path / "secrets.json").read_bytes())
        except FileNotFoundError:
            return {}

    def write_info(self, info: ClusterInfo) -> None:
        """Replace cluster.json atomically; write secrets to a separate file."""
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
    """The owner of a folder, or of its nearest ancestor that this process can read."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"user {_user(each.stat().st_uid)}"
    return "its owner"


def _make_private(path: Path) -> None:
    """Remove all rights of other users; skip a folder of another owner."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~_OTHERS)
