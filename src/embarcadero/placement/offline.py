"""What a store says while nobody uses it, without changing a byte of it: a copy is opened in its place.

Opening a SQLite file writes to its folder, and carries over what a killed process left in the log beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from embarcadero.errors import DiskFailed
from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore
from embarcadero.types import Range

_FILES = ("", "-wal", "-revision")


class Stored(NamedTuple):
    """What a store says about records on disk."""

    cluster: str
    ranges: list[Range]
    trims: dict[int, int]  # where lanes start
    topics: dict[int, str]  # lane -> name of its topic


def read_stored(path: Path) -> Stored:
    """Read a store that no process has open. Corrupt, and what to do, if it is damaged; DiskFailed if unreadable."""
    with tempfile.TemporaryDirectory(prefix="embarcadero-") as folder:
        copy = Path(folder) / path.name
        try:
            for suffix in _FILES:
                if (source := path.with_name(path.name + suffix)).exists():
                    shutil.copyfile(source, copy.with_name(copy.name + suffix))
        except OSError as error:
            raise DiskFailed(f"the store {path} can't be read: {error.strerror}", "check its disk") from error
        with closing(SqliteStore(copy)) as store:
            return stored(Directory(store))


def stored(directory: Directory) -> Stored:
    """The same of a directory that is open."""
    topics = {topic.lane: topic.name for topic in directory.topics()}
    topics |= {lane.lane: topics[lane.topic] for lane in directory.lanes() if lane.topic in topics}
    return Stored(directory.cluster_id, directory.ranges(), directory.trims(), topics)
