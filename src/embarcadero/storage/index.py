"""Sparse indexes: seq -> position and append time -> position, at most one entry for every few KiB of a segment.

They are caches. A segment that is written to has its index in memory; a finished one has it in `.index` and
`.timeindex`, 12-byte big-endian entries in ascending order, and a last entry with the segment's end, which ties a file
to its segment. A file that does not fit is not used; and whoever follows an entry checks that it leads to a
valid record of that seq. So a wrong index costs time, never truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from embarcadero.env import Disk
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import Entries
from embarcadero.limits import INDEX_EVERY_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.layout import (
    HEADER_BYTES,
    INDEX,
    INDEX_FILE,
    TIME_INDEX_FILE,
    Footer,
    segment_name,
)  # fmt: skip

Ints = npt.NDArray[np.integer[Any]]
_FEW = 8


class SparseIndex:
    """The index of one segment in memory: points of which index, seq, append time and position are known."""

    def __init__(self, every: int = INDEX_EVERY_BYTES) -> None:
        self._every = every
        self._piece = -1
        self.indices: list[int] = []
        self.seqs: list[int] = []
        self.times: list[int] = []
        self.positions: list[int] = []

    def add(self, entries: Entries, positions: Sequence[int]) -> None:
        """Take note of records that were added to the segment."""
        if len(positions) <= _FEW:
            for number, position in enumerate(positions):
                if position // self._every > self._piece:
                    self._note(entries[number : number + 1], [position])
            return
        pieces = np.asarray(positions) // self._every
        chosen = np.flatnonzero(np.diff(pieces, prepend=self._piece))
        if len(chosen):
            self._note(entries[chosen], [positions[number] for number in chosen.tolist()])

    def _note(self, entries: Entries, positions: Sequence[int]) -> None:
        self.indices += entries["index"].tolist()
        self.seqs += entries["seq"].tolist()
        self.times += entries["append_us"].tolist()
        self.positions += positions
        self._piece = positions[-1] // self._every

    def encode(self, footer: Footer) -> tuple[bytes, bytes]:
        """The contents of `.index` and `.timeindex`."""
        made = []
        for keys, last in ((self.seqs, footer.end_seq), (self.times, footer.last_us)):
            rows = np.zeros(len(keys) + 1, dtype=INDEX)
            rows["key"] = [*keys, last]
            rows["position"] = [*self.positions, footer.bytes]
            made.append(rows.tobytes())
        return made[0], made[1]


class FileIndex:
    """One index file of a finished segment, loaded."""

    def __init__(self, rows: Entries) -> None:
        self.keys: Ints = rows["key"][:-1].astype(np.uint64)
        self.positions: Ints = rows["position"][:-1].astype(np.int64)

    def floor(self, key: int, below: bool = False) -> int | None:
        """Which entry is the last one at (or below, if asked) a key; None if there is none."""
        if key < 0:
            return None
        found = int(np.searchsorted(self.keys, np.uint64(key), side="left" if below else "right")) - 1
        return found if found >= 0 else None


def load_index(disk: Disk, folder: str, footer: Footer, suffix: str) -> FileIndex | None:
    """An index file, if it is there and fits its segment."""
    try:
        file = disk.open(join(folder, segment_name(footer.base_seq, suffix)))
        try:
            size = file.size()
            rows_max = footer.bytes // 64 + 1
            data = file.pread(size, 0) if size % INDEX.itemsize == 0 and size <= rows_max * INDEX.itemsize else b""
        finally:
            file.close()
    except EmbarcaderoError:
        return None
    rows = np.frombuffer(data, dtype=INDEX)
    return FileIndex(rows) if _fits(rows, footer, suffix) else None


def _fits(rows: Entries, footer: Footer, suffix: str) -> bool:
    empty = footer.end_index == footer.base_index
    if len(rows) < (1 if empty else 2):
        return False
    keys, positions = rows["key"].astype(np.uint64), rows["position"].astype(np.int64)
    end_key = footer.end_seq if suffix == INDEX_FILE else footer.last_us
    if int(keys[-1]) != end_key or int(positions[-1]) != footer.bytes or int(positions[0]) != HEADER_BYTES:
        return False
    if suffix == INDEX_FILE and int(keys[0]) != footer.base_seq:
        return False
    return bool((positions[1:] > positions[:-1]).all() and (keys[1:] >= keys[:-1]).all() and not (positions % 64).any())


def write_indexes(disk: Disk, folder: str, index: SparseIndex, footer: Footer) -> None:
    """Leave both index files beside a finished segment. Not synced: they can be made again."""
    for suffix, data in zip((INDEX_FILE, TIME_INDEX_FILE), index.encode(footer), strict=True):
        file = disk.open(join(folder, segment_name(footer.base_seq, suffix)), create=True)
        try:
            file.pwrite([data], 0)
        finally:
            file.close()
