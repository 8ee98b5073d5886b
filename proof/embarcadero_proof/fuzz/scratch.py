"""A folder for the files of targets that need real ones; in memory if there is a memory file system."""

from __future__ import annotations

import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_given: list[Path] = []
_made: list[tempfile.TemporaryDirectory[str]] = []


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder; the caller removes it."""
    return tempfile.TemporaryDirectory(prefix="embarcadero-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None)


def use(path: Path) -> None:
    """Use a folder for the files of this process. The caller removes them, also if this process dies."""
    path.mkdir(parents=True, exist_ok=True)
    _given[:] = [path]


def folder() -> Path:
    """Return the folder for files of this process; by default it is removed with the process."""
    if not _given:
        _made.append(new_folder())
        _given.append(Path(_made[0].name))
    return _given[0]
