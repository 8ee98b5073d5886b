"""Ownership of folders that the cluster id names: the fabric, and the home of its mirrors.

A copy of a data folder has the cluster id of its original, so both would use the same folder in shared memory. The
supervisor therefore holds a lock (flock) on that folder itself for as long as it lives, and a hidden file inside says
which data folder it belongs to. The kernel drops the lock when the process dies: a folder without a lock is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from embarcadero.errors import ClusterError, WrongFolder

OWNER_FILE = ".owner"
RESTORE_HINT = "`embarcadero up --restore` gives a copy an identity of its own"


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """Where a data folder is, and what tells it from its copies: a copy has another inode, a move keeps it."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, folder: Path) -> Home:
        """The home of a folder that exists."""
        found = folder.stat()
        return cls(path=str(folder), device=found.st_dev, inode=found.st_ino)

    def same_folder(self, other: Home) -> bool:
        """Whether both are one folder, whatever path leads there."""
        return (self.device, self.inode) == (other.device, other.inode)

    def still_there(self) -> bool:
        """Whether the folder is where it was."""
        try:
            return Home.of(Path(self.path)) == self
        except OSError:
            return False


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the owner file: which data folder a fabric belongs to, and the supervisor that made it."""

    home: Home
    pid: int


@contextmanager
def owned(folder: Path, home: Home) -> Iterator[None]:
    """Own a folder, made private if it is new, until the block ends. WrongFolder while another supervisor owns it."""
    descriptor = _take(folder, home)
    try:
        yield
    finally:
        os.close(descriptor)


def write_owner(folder: Path, home: Home) -> None:
    """Note in a folder that the caller owns which data folder it belongs to."""
    path = folder / OWNER_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(Owner(home=home, pid=os.getpid())))


def empty(folder: Path) -> None:
    """Remove all that is in a folder, but not the folder itself, which the caller owns."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_unowned(folder: Path) -> None:
    """Remove the fabric that a killed supervisor left, unless a running one owns it by now."""
    with contextlib.suppress(OSError):
        descriptor = _open(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _take(folder: Path, home: Home) -> int:
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _open(folder)
        except OSError as error:
            raise ClusterError(f"can't make {folder}: {error.strerror}", "choose another folder") from error
        try:
            _lock(descriptor, folder, home)
            os.fchmod(descriptor, 0o700)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # its last owner removed it after it was opened here: make it again
        except OSError as error:
            os.close(descriptor)
            raise ClusterError(f"can't use {folder}: {error.strerror}", "choose another folder") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(descriptor: int, folder: Path, home: Home) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrongFolder(f"{folder} is in use by {_owner(folder)}; the cluster in {home.path} has the same id",
                          f"{RESTORE_HINT}; or stop the other cluster") from None  # fmt: skip


def _owner(folder: Path) -> str:
    try:
        owner = msgspec.json.decode((folder / OWNER_FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return "another cluster"
    return f"the cluster in {owner.home.path} (supervisor pid {owner.pid})"
