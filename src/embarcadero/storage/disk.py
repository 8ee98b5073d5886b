"""Small files of a disk, whole. The seam itself (`Disk`, `File`) is in env.py; `real.py` is the operating system's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from embarcadero.env import Disk, Part
from embarcadero.errors import DiskFailed, EmbarcaderoError


def write_whole(disk: Disk, path: str, parts: Sequence[Part]) -> None:
    """Put a whole file under a name at once: others see the earlier one or this one, also after a crash."""
    folder = path.rpartition("/")[0]
    draft = f"{path}.tmp"
    file = disk.open(draft, create=True)
    try:
        file.pwrite(parts, 0)
        file.sync()
    except EmbarcaderoError:
        with suppress(EmbarcaderoError):
            disk.remove(draft)
        raise
    finally:
        file.close()
    disk.rename(draft, path)
    disk.sync_folder(folder)


def read_whole(disk: Disk, path: str, bytes_max: int) -> bytes:
    """A small file's bytes. Missing if there is none; DiskFailed if it is longer than anything we wrote."""
    file = disk.open(path)
    try:
        size = file.size()
        if size > bytes_max:
            raise DiskFailed(f"{path} has {size} bytes, at most {bytes_max} were expected", "is it ours?")
        return file.pread(size, 0)
    finally:
        file.close()


def join(folder: str, name: str) -> str:
    """A path below a folder; "" is the root."""
    return f"{folder}/{name}" if folder else name
