"""The folders that the cluster id names: the fabric, and its mirrors. Their location and their owner.

A copy of a data folder has the cluster id of its original, so both would use the same folder in shared memory. The
supervisor therefore holds a lock (flock) on that folder as long as it lives, and a hidden file inside names the data
folder it belongs to. The kernel releases the lock when the process dies: a folder without a lock is a leftover.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from embarcadero.errors import BadValue, ClusterError, WrongFolder
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.shared import MirroredFabric, SharedFabric
from embarcadero.limits import MIB
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import EarlierGeneration

OWNER_FILE = ".owner"
RESTORE_HINT = "`embarcadero up --restore` gives the copy a new identity"


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a data folder, and its inode: a copy has another inode, a move keeps it."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, folder: Path) -> Home:
        """Return the home of an existing folder."""
        found = folder.stat()
        return cls(path=str(folder), device=found.st_dev, inode=found.st_ino)

    def same_folder(self, other: Home) -> bool:
        """Whether both are the same folder, also by different paths."""
        return (self.device, self.inode) == (other.device, other.inode)

    def still_there(self) -> bool:
        """Whether the folder is still at its path."""
        try:
            return Home.of(Path(self.path)) == self
        except OSError:
            return False


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the owner file: the data folder of a fabric, and the supervisor that created it."""

    home: Home
    pid: int


@contextmanager
def owned(folder: Path, home: Home) -> Iterator[None]:
    """Own a folder until the block ends, and make it private. Raise WrongFolder if another supervisor owns it."""
    descriptor = _take(folder, home)
    try:
        yield
    finally:
        os.close(descriptor)


def write_owner(folder: Path, home: Home) -> None:
    """Write the owner file into a folder that the caller owns."""
    path = folder / OWNER_FILE
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(Owner(home=home, pid=os.getpid())))


def empty(folder: Path) -> None:
    """Remove the contents of a folder that the caller owns, but not the folder itself."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_unowned(folder: Path) -> None:
    """Remove the fabric of a killed supervisor, unless a running supervisor owns it by now."""
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
            raise ClusterError(f"cannot create {folder}: {error.strerror}", "choose another folder") from error
        try:
            _lock(descriptor, folder, home)
            os.fchmod(descriptor, 0o700)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # its last owner removed it after it was opened here: create it again
        except OSError as error:
            os.close(descriptor)
            raise ClusterError(f"cannot use {folder}: {error.strerror}", "choose another folder") from error
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
        raise WrongFolder(
            f"{folder} is in use by {_owner(folder)}; the cluster in {home.path} has the same id",
            f"{RESTORE_HINT}; or stop the other cluster",
        ) from None


def _owner(folder: Path) -> str:
    try:
        owner = msgspec.json.decode((folder / OWNER_FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return "another cluster"
    return f"the cluster in {owner.home.path} (supervisor pid {owner.pid})"


SHARED_MEMORY = Path("/dev/shm")


class FabricChoice(NamedTuple):
    """The folder of a fabric, and a note for the user."""

    folder: Path
    note: str = ""


def fabric_name(cluster_id: str) -> str:
    """The name of a cluster's fabric folder, in every location."""
    return f"embarcadero-{cluster_id}"


def choose_fabric(data_dir: Path, cluster_id: str, wanted: Path | None, need_bytes: int) -> FabricChoice:
    """Choose the folder for a fabric: in `wanted` if given, else in shared memory if it has space, else on disk."""
    name = fabric_name(cluster_id)
    if wanted is not None:
        if file_system(wanted) == "hugetlbfs":
            what = f"{wanted} is on hugetlbfs, which supports only whole huge pages and no pipes"
            raise BadValue(what, "use a tmpfs mounted with huge=advise, and --hugepages")
        return FabricChoice(wanted / name)
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free >= need_bytes:
            return FabricChoice(SHARED_MEMORY / name)
        why = f"{SHARED_MEMORY} has {free // MIB} MiB free, and this cluster needs {need_bytes // MIB} MiB"
    else:
        why = f"{SHARED_MEMORY} is not writable"
    return FabricChoice(data_dir / "fabric" / name, f"{why}: the fabric is on disk, in {data_dir}, and is slower")


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """The type of a folder's file system, such as `tmpfs`; empty if it is unknown."""
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    above = {str(path) for path in (folder, *folder.parents)}
    found = [(len(fields[1]), fields[2]) for fields in lines if len(fields) > 2 and fields[1] in above]
    return max(found, default=(0, ""))[1]


# --- mirrors ----------------------------------------------------------------------------------------------------------
# Mirrors of the fabric: `<fabric.mirror>/embarcadero-<cluster>-mirror/generation-<n>/`.
#
# Each generation has its own folder, because its mirror is needed until a later generation has recovered all lanes. The
# store lists the generations that are still needed (`Directory.earlier_generations`); the supervisor removes the rest.
# The superblock of a region names its generation, so a misplaced folder is refused.
_NUMBER = 0xFFFF_FFFF


def mirror_home(wanted: str, cluster_id: str) -> str:
    """The folder of all mirrors of a cluster; empty if it has none."""
    return str(Path(wanted).expanduser().absolute() / f"{fabric_name(cluster_id)}-mirror") if wanted else ""


def mirror_folder(home: str, generation: int) -> Path:
    """The folder of one generation's mirror."""
    return Path(home) / f"generation-{generation & _NUMBER}"


def make_mirror(home: str, generation: int) -> Path:
    """Create an empty folder for the mirror of a new generation."""
    folder = mirror_folder(home, generation)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ClusterError(f"cannot create {folder}: {error.strerror}", "choose another fabric.mirror") from error
    return folder


class OpenFabric(NamedTuple):
    """A fabric for its writers, and its parts: the first copy and the mirror."""

    fabric: Fabric
    parts: list[SharedFabric]


def open_fabric(folder: str, mirror: str, generation: int, *, hugepages: bool = False) -> OpenFabric:
    """Open the fabric of a running cluster; `mirror`: the folder of its mirror, or empty."""
    parts = [SharedFabric(Path(part), generation, hugepages=hugepages) for part in (folder, mirror) if part]
    return OpenFabric(MirroredFabric(*parts) if mirror else parts[0], parts)


def open_earlier_mirror(earlier: EarlierGeneration, generation: int) -> SharedFabric | None:
    """Open the mirror of an earlier generation, if it still exists. `generation`: the current generation."""
    folder = mirror_folder(earlier.mirror, earlier.generation)
    return SharedFabric(folder, generation & ~_NUMBER | earlier.generation) if folder.is_dir() else None


def remove_mirrors(generations: Iterable[EarlierGeneration]) -> None:
    """Remove mirrors of earlier generations."""
    for one in generations:
        if one.mirror:
            shutil.rmtree(mirror_folder(one.mirror, one.generation), ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(one.mirror).rmdir()  # only if it is empty


def remove_strays(home: str, needed: Iterable[EarlierGeneration]) -> None:
    """Remove mirrors that recovery does not need: their generation ended cleanly, or never began."""
    kept = {mirror_folder(home, one.generation) for one in needed if one.mirror == home}
    for folder in Path(home).glob("generation-*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def remove_if_clean(directory: Directory, folder: Path) -> None:
    """Remove the mirror when a cluster stops, unless a lane still has an open range and needs recovery."""
    if any(range_.open for range_ in directory.ranges.all()):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
