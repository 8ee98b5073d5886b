"""An observer of all disks: the batches that are on the medium, independent of the reports of processes.

It parses segments by itself, so that a bug of the storage code cannot hide: a header of 128 bytes, then records of a
64-byte order entry and its payload, padded to 64 bytes.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from embarcadero.fabric.layout import LINE, fold_line
from embarcadero.limits import LINE_BYTES
from embarcadero.types import EntryKind, Range
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.sim.disk import SimDisk
from embarcadero_proof.sim.medium import SimFile, SimFolder
from embarcadero_proof.sim.tables import digest_of

_HEADER_BYTES = 128
_FIELDS = struct.Struct("<Q32xI4xI6xB")
"""index, size, crc and kind of an order entry"""
_OWNER = struct.Struct("<QQ")
"""lane and range in a segment's header"""

_LANE, _RANGE = re.compile(r"lane-(\d{10})"), re.compile(r"range-(\d{10})")
_SEGMENT = re.compile(r"(\d{20})\.log")

_EntryKey = tuple[int, int, int]
"""(lane, range, index)"""


class Record(NamedTuple):
    """One whole record in a segment."""

    at_index: int
    kind: int
    payload: bytes
    end: int  # where the next record begins


def records(data: bytes | bytearray, at: int = _HEADER_BYTES) -> Iterator[Record]:
    """Yield the whole, undamaged records from a position on, up to the first damaged one."""
    while at + LINE_BYTES <= len(data):
        line = list(LINE.unpack_from(data, at))
        if line[7] >> 32 != fold_line(line):
            return
        index, size, crc, kind = _FIELDS.unpack_from(data, at)
        payload = bytes(data[at + LINE_BYTES : at + LINE_BYTES + size])
        if len(payload) < size or (kind == EntryKind.BATCH and payload_crc(payload) != crc):
            return
        at += LINE_BYTES + -(-size // LINE_BYTES) * LINE_BYTES
        yield Record(index, kind, payload, at)


def segments(disk: SimDisk) -> Iterator[tuple[int, int, SimFile]]:
    """Yield (lane, range, file) of all segments that would remain after a power cut."""
    for lane, lane_folder in _folders(disk.names.root, _LANE):
        for number, range_folder in _folders(lane_folder, _RANGE):
            for name, node in range_folder.medium.items():
                if isinstance(node, SimFile) and _number(_SEGMENT, name) is not None:
                    yield lane, number, node


def _folders(folder: SimFolder, pattern: re.Pattern[str]) -> Iterator[tuple[int, SimFolder]]:
    for name, node in folder.medium.items():
        if isinstance(node, SimFolder) and (number := _number(pattern, name)) is not None:
            yield number, node


@lru_cache(maxsize=10_000)
def _number(pattern: re.Pattern[str], name: str) -> int | None:
    """Return the number in a name; None if it is another kind of name."""
    match = pattern.fullmatch(name)
    return None if match is None else int(match[1])


def _is_of(file: SimFile, lane: int, number: int) -> bool:
    """Whether a segment's header names this range: two files may have been swapped."""
    return len(file.medium) >= _HEADER_BYTES and _OWNER.unpack_from(file.medium, 16) == (lane, number)


class Unequal(NamedTuple):
    """A copy that is incomplete or different after all had time to catch up."""

    replica: int
    lane: int
    at_index: int
    what: str


def unequal(disks: dict[int, SimDisk], ranges: list[Range], ends: dict[int, int]) -> list[Unequal]:
    """List copies that lack entries below the durable end (`ends`, by lane), or have other bytes there than a peer."""
    found: list[Unequal] = []
    for range_ in ranges:
        end = range_.end if range_.end is not None else ends.get(range_.lane, 0)
        first: dict[int, bytes] = {}
        for ref in range_.replicas if range_.start < end else ():
            there = _raw(disks[ref.replica], range_) if ref.replica in disks else {}
            for index in range(range_.start, end):
                if index not in there and range_.open:
                    found.append(Unequal(ref.replica, range_.lane, index, "lacks"))
                elif there.get(index) != first.setdefault(index, there.get(index, b"")):
                    what = "has other bytes at" if index in there else "lacks"
                    found.append(Unequal(ref.replica, range_.lane, index, what))
    return found


def _raw(disk: SimDisk, range_: Range) -> dict[int, bytes]:
    """Map index -> entry and payload, of one range on one disk. Padding is neither read nor checked."""
    raw: dict[int, bytes] = {}
    for lane, number, file in segments(disk):
        at = _HEADER_BYTES
        for record in records(file.medium) if (lane, number) == (range_.lane, range_.number) else ():
            raw[record.at_index] = bytes(file.medium[at : at + LINE_BYTES]) + record.payload
            at = record.end
    return raw


class Truth:
    """All entries ever synced, with their replicas, even if the disk has damaged them, or records before them, since.

    A replica may have had several disks, wiped or replaced: it counts once.
    """

    def __init__(self) -> None:
        self._synced: dict[_EntryKey, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        """digest -> replicas, by position"""
        self._known: dict[SimFile, tuple[int, int]] = {}  # segments whose names are on the medium: (lane, range)
        self._read: dict[SimFile, tuple[int, int]] = {}  # (cuts, read through)

    def look(self, replica: int, disk: SimDisk, file: SimFile | None) -> None:
        """Look at a disk of a replica after the sync of a file, or (None) of names."""
        if file is not None:
            if file in self._known:
                self._look_into(replica, file)
            return
        for lane, number, named in segments(disk):
            self._known[named] = (lane, number)
            self._look_into(replica, named)

    def _look_into(self, replica: int, file: SimFile) -> None:
        cuts, through = self._read.get(file, (0, _HEADER_BYTES))
        if cuts != file.cuts:
            through = _HEADER_BYTES
        lane, number = self._known[file]
        for found in records(file.medium if file.unspoiled is None else file.unspoiled, through):
            self._synced[lane, number, found.at_index][digest_of(found.payload, lane)].add(replica)
            through = found.end
        self._read[file] = (file.cuts, through)

    def copies(self, range_: Range, index: int, digest: int | None = None) -> int:
        """Count the replicas of this range that have synced the entry at `index` as a part of it.

        The entry must be the batch with this digest; None: the content that most of them have there.
        """
        members = {ref.replica for ref in range_.replicas}
        contents = self._synced.get((range_.lane, range_.number, index), {})
        return max((len(members & who) for key, who in contents.items() if digest in (None, key)), default=0)


def owner_of(ranges: list[Range], index: int) -> Range | None:
    """Find the range that owns an index, among one lane's ranges."""
    return next((r for r in ranges if r.start <= index and (r.end is None or index < r.end)), None)


def whole(disk: SimDisk, range_: Range) -> set[int]:
    """Return the indices of a range that are on this disk, undamaged."""
    wanted = (range_.lane, range_.number)
    return {
        record.at_index
        for lane, number, file in segments(disk)
        if (lane, number) == wanted
        for record in records(file.medium)
    }


def stored(disks: list[SimDisk], ranges: list[Range]) -> dict[tuple[int, int, int], int]:
    """Map (lane, index, digest) -> the number of disks with that batch, as a part of the range that owns it."""
    by_key = {(range_.lane, range_.number): range_ for range_ in ranges}
    found: dict[tuple[int, int, int], int] = defaultdict(int)
    for disk in disks:
        seen: set[tuple[int, int, int]] = set()
        for lane, number, file in segments(disk):
            range_ = by_key.get((lane, number))
            for record in records(file.medium) if _is_of(file, lane, number) else ():
                owned = range_ is not None and range_.start <= record.at_index
                if owned and record.kind == EntryKind.BATCH and (range_.end is None or record.at_index < range_.end):  # type: ignore[union-attr]
                    seen.add((lane, record.at_index, digest_of(record.payload, lane)))
        for at_index in seen:
            found[at_index] += 1
    return dict(sorted(found.items()))
