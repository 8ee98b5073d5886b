"""Where mirrors of the fabric are: `<fabric.mirror>/embarcadero-<cluster>-mirror/generation-<n>/`.

Each generation has a folder of its own, since its mirror is needed until a later generation has recovered all lanes.
The store remembers which those are (`Directory.past`); all others are removed. A region also says in its superblock
which generation it belongs to, so a folder in the wrong place is refused, not believed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from embarcadero.errors import ClusterError
from embarcadero.fabric.mirror import MirroredFabric
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.shared import SharedFabric
from embarcadero.node.cluster import fabric_name
from embarcadero.placement.directory import Directory
from embarcadero.placement.records import Past

_NUMBER = 0xFFFF_FFFF


def mirror_home(wanted: str, cluster_id: str) -> str:
    """The folder of all mirrors of a cluster; empty: it has none."""
    return str(Path(wanted).expanduser().absolute() / f"{fabric_name(cluster_id)}-mirror") if wanted else ""


def mirror_folder(home: str, generation: int) -> Path:
    """The folder of one generation's mirror."""
    return Path(home) / f"generation-{generation & _NUMBER}"


def make_mirror(home: str, generation: int) -> Path:
    """Make the folder of a new generation's mirror, empty."""
    folder = mirror_folder(home, generation)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise ClusterError(f"can't make {folder}: {error.strerror}", "choose another fabric.mirror") from error
    return folder


class OpenFabric(NamedTuple):
    """A fabric as its writers have it, and the folders of which it is made."""

    fabric: Fabric
    parts: list[SharedFabric]


def open_fabric(folder: str, mirror: str, generation: int, *, hugepages: bool = False) -> OpenFabric:
    """The fabric of a running cluster; `mirror`: the folder of its mirror, if it has one."""
    parts = [SharedFabric(Path(part), generation, hugepages=hugepages) for part in (folder, mirror) if part]
    return OpenFabric(MirroredFabric(*parts) if mirror else parts[0], parts)


def open_past(past: Past, generation: int) -> SharedFabric | None:
    """The mirror of an earlier generation of the cluster that is in `generation` now, if it is still there."""
    folder = mirror_folder(past.mirror, past.generation)
    return SharedFabric(folder, generation & ~_NUMBER | past.generation) if folder.is_dir() else None


def remove_mirrors(past: Iterable[Past]) -> None:
    """Remove mirrors of earlier generations."""
    for one in past:
        if one.mirror:
            shutil.rmtree(mirror_folder(one.mirror, one.generation), ignore_errors=True)
            with contextlib.suppress(OSError):
                Path(one.mirror).rmdir()  # unless there are others


def remove_strays(home: str, past: Iterable[Past]) -> None:
    """Remove what is in a home of mirrors and nobody will ask for: generations that ended well, or never began."""
    kept = {mirror_folder(home, one.generation) for one in past if one.mirror == home}
    for folder in Path(home).glob("generation-*"):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def remove_if_clean(directory: Directory, folder: Path) -> None:
    """A cluster stops: its mirror goes too, unless a lane ends with an open range and has to be recovered."""
    if any(range_.open for range_ in directory.ranges()):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
