"""One who sees into all disks: which batches are on the medium, whatever anybody says about it.

It reads segments by itself, so that a mistake of the storage code does not hide from it: a header of 128 bytes, then
records of a 64-byte order entry and its payload, padded to 64 bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from embarcadero.fabric.layout import ORDER, sealed
from embarcadero.limits import LINE_BYTES
from embarcadero.sim.disk import SimDisk
from embarcadero.sim.medium import SimFile
from embarcadero.sim.workload import digest_of
from embarcadero.types import EntryKind, Range
from embarcadero.wire.codec import payload_crc

_HEADER_BYTES = 128
_SEGMENT = re.compile(r"^lane-(\d{10})/range-(\d{10})/\d{20}\.log$")

Place = tuple[int, int, int]
"""(lane, range, index)"""


class Record(NamedTuple):
    """One whole record in a segment."""

    place: int
    kind: int
    digest: int
    end: int  # where the next one begins


def records(data: bytes | bytearray, at: int = _HEADER_BYTES) -> Iterator[Record]:
    """The whole, undamaged records from a position on, up to the first that is not."""
    while at + LINE_BYTES <= len(data):
        entry = np.frombuffer(data, dtype=ORDER, count=1, offset=at)
        size = int(entry["size"][0])
        payload = bytes(data[at + LINE_BYTES : at + LINE_BYTES + size])
        if not sealed(entry)[0] or len(payload) < size:
            return
        kind = int(entry["kind"][0])
        if kind == EntryKind.BATCH and payload_crc(payload) != int(entry["crc"][0]):
            return
        at += LINE_BYTES + -(-size // LINE_BYTES) * LINE_BYTES
        yield Record(int(entry["index"][0]), kind, digest_of(payload), at)


def segments(disk: SimDisk) -> Iterator[tuple[int, int, str, SimFile]]:
    """(lane, range, path, file) of all segments that a power cut would leave there."""
    for path, node in disk.names.walk(on_medium=True):
        if isinstance(node, SimFile) and (match := _SEGMENT.match(path)):
            yield int(match[1]), int(match[2]), path, node


class Truth:
    """What was ever synced, and where."""

    def __init__(self) -> None:
        self._synced: dict[Place, set[SimDisk]] = defaultdict(set)
        self._known: dict[SimFile, tuple[int, int]] = {}  # segments whose names are on the medium: (lane, range)
        self._read: dict[SimFile, tuple[int, int]] = {}  # (cuts, read through)

    def look(self, disk: SimDisk, file: SimFile | None) -> None:
        """A file was synced on this disk, or (None) names were."""
        if file is not None:
            if file in self._known:
                self._look_into(disk, file)
            return
        for lane, number, _, named in segments(disk):
            self._known[named] = (lane, number)
            self._look_into(disk, named)

    def _look_into(self, disk: SimDisk, file: SimFile) -> None:
        cuts, through = self._read.get(file, (0, _HEADER_BYTES))
        if cuts != file.cuts:
            through = _HEADER_BYTES
        lane, number = self._known[file]
        for found in records(file.medium, through):
            self._synced[lane, number, found.place].add(disk)
            through = found.end
        self._read[file] = (file.cuts, through)

    def copies(self, range_: Range, index: int) -> int:
        """On how many disks the entry at `index` was synced as a part of this range."""
        return len(self._synced.get((range_.lane, range_.number, index), ()))


def owner_of(ranges: list[Range], index: int) -> Range | None:
    """The range that owns an index, of one lane's ranges."""
    return next((r for r in ranges if r.start <= index and (r.end is None or index < r.end)), None)


def whole(disk: SimDisk, range_: Range) -> set[int]:
    """The indices of a range that are on this disk, undamaged."""
    wanted = (range_.lane, range_.number)
    return {
        record.place
        for lane, number, _, file in segments(disk)
        if (lane, number) == wanted
        for record in records(file.medium)
    }


def stored(disks: list[SimDisk], ranges: list[Range]) -> dict[tuple[int, int, int], int]:
    """(lane, index, digest) -> on how many disks that batch is, as a part of the range that owns it."""
    by_key = {(range_.lane, range_.number): range_ for range_ in ranges}
    found: dict[tuple[int, int, int], int] = defaultdict(int)
    for disk in disks:
        seen: set[tuple[int, int, int]] = set()
        for lane, number, _, file in segments(disk):
            range_ = by_key.get((lane, number))
            for record in records(file.medium):
                owned = range_ is not None and range_.start <= record.place
                if owned and record.kind == EntryKind.BATCH and (range_.end is None or record.place < range_.end):  # type: ignore[union-attr]
                    seen.add((lane, record.place, record.digest))
        for place in seen:
            found[place] += 1
    return dict(sorted(found.items()))
