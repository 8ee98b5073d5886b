"""Writing one segment, and the words that range storage uses for its segments and their troubles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from embarcadero.env import Disk, File, Part
from embarcadero.errors import BadValue, EmbarcaderoError
from embarcadero.fabric.layout import ORDER, Entries
from embarcadero.invariants import invariant
from embarcadero.limits import (
    INDEX_EVERY_BYTES,
    KIB,
    LINE_BYTES,
    SEGMENT_AGE_S,
    SEGMENT_BYTES,
    SEGMENT_BYTES_MAX,
)  # fmt: skip
from embarcadero.storage.disk import join
from embarcadero.storage.layout import (
    DAMAGED,
    HEADER_BYTES,
    INDEX_FILE,
    LOG,
    TIME_INDEX_FILE,
    Footer,
    Header,
    encode_footer,
    encode_header,
    segment_name,
)  # fmt: skip
from embarcadero.storage.scan import SparseIndex, write_indexes

_INDEX, _SEQ, _APPEND_US, _COUNT = map((ORDER.names or ()).index, ("index", "seq", "append_us", "count"))
_FEW = 8
"""Up to here plain numbers are quicker than arrays."""
_ZEROS = bytes(LINE_BYTES)
_JOINED_BYTES_MAX = 128 * KIB
"""Up to here copying parts together is quicker than giving them to the system one by one."""


@dataclass(frozen=True, slots=True)
class RangeSettings:
    """How a range's copy is kept. `cluster` is written into every segment."""

    cluster: str = ""
    segment_bytes: int = SEGMENT_BYTES
    segment_age_s: float = SEGMENT_AGE_S
    index_every_bytes: int = INDEX_EVERY_BYTES

    def __post_init__(self) -> None:
        if not HEADER_BYTES < self.segment_bytes <= SEGMENT_BYTES_MAX:
            raise BadValue(f"segments of {self.segment_bytes} bytes", f"at most {SEGMENT_BYTES_MAX}")
        if self.segment_age_s <= 0 or self.index_every_bytes <= 0:
            raise BadValue("segment_age_s and index_every_bytes must be above zero")


class SegmentInfo(NamedTuple):
    """A segment as others may know it. `sealed`: complete, synced, never written again."""

    base_index: int
    base_seq: int
    end_index: int
    end_seq: int
    bytes: int
    last_us: int
    sealed: bool


class DamageKind(StrEnum):
    """What is wrong with a copy."""

    SPAN = "span"  # some records of a segment
    FILE = "file"  # a whole segment is missing or not ours
    TAIL = "tail"  # from here on, and nobody knows how far it went


class Damage(NamedTuple):
    """Indices [first, end) that the copy should have and has not; of a TAIL at least these. `name` is the file that was
    put aside, with the bytes that were found."""

    first: int
    end: int
    kind: DamageKind
    name: str

    def overlaps(self, info: SegmentInfo) -> bool:
        """Whether some of it is in a segment."""
        return self.first < info.end_index and self.end > info.base_index

    def covers(self, other: Damage) -> bool:
        """Whether mending this mends the other. A segment comes back whole; a tail says nothing of what is followed."""
        kinds = (other.kind, DamageKind.FILE) if other.kind is DamageKind.SPAN else (other.kind,)
        return self.kind in kinds and self.first <= other.first and other.end <= self.end

    def is_below(self, start: int) -> bool:
        """Whether a copy that starts there need not have it. Nobody knows that of a tail."""
        return self.kind is not DamageKind.TAIL and self.end <= start


@dataclass(slots=True)
class Writing:
    """A segment that is written to. Everything in it below `position` is whole."""

    file: File
    header: Header
    position: int
    end: int
    end_seq: int
    index: SparseIndex
    last_us: int = 0
    opened_us: int | None = None
    footer: Footer | None = field(default=None)

    @property
    def may_roll(self) -> bool:
        """Two segments never share a base seq."""
        return self.end_seq > self.header.base_seq

    @property
    def info(self) -> SegmentInfo:
        """As others may know it."""
        return SegmentInfo(
            self.header.base_index,
            self.header.base_seq,
            self.end,
            self.end_seq,
            self.position,
            self.last_us,
            self.footer is not None,
        )

    def write(self, entries: Entries, payloads: Sequence[Part], bytes_each: Sequence[int]) -> None:
        """Add records (which follow the last one) with one write."""
        total = sum(bytes_each)
        parts = record_parts(entries, payloads)
        try:
            self.file.pwrite([b"".join(parts)] if total <= _JOINED_BYTES_MAX else parts, self.position)
        except EmbarcaderoError:
            with suppress(EmbarcaderoError):
                self.file.truncate(self.position)  # half a record is of no use to anybody
            raise
        positions, position = [], self.position
        for size in bytes_each:
            positions.append(position)
            position += size
        self.index.add(entries, positions)
        self.position = position
        last = entries[-1].item()
        self.end = last[_INDEX] + 1
        self.end_seq = last[_SEQ] + last[_COUNT]
        self.last_us = last[_APPEND_US]

    def finish(self, disk: Disk, folder: str, last: bool) -> None:
        """Everything is synced, and so is the next segment's header: say so, and leave the indexes."""
        footer = Footer(
            self.header.base_index, self.header.base_seq, self.end, self.end_seq, self.position, self.last_us, last
        )
        if self.file.size() > self.position:
            self.file.truncate(self.position)  # a write that failed left something there
        self.file.pwrite([encode_footer(footer)], self.position)
        self.file.sync()
        with suppress(EmbarcaderoError):  # they are caches
            write_indexes(disk, folder, self.index, footer)
        self.footer = footer


def check_records(entries: Entries, payloads: Sequence[Part], index: int, seq: int) -> list[int]:
    """The payloads' sizes, if the records continue a log that ends at this index and seq."""
    sizes: list[int] = entries["size"].tolist()
    invariant(sizes == list(map(len, payloads)), "each entry has its payload")
    if len(sizes) <= _FEW:
        for row in entries.tolist():
            invariant(row[_INDEX] == index and row[_SEQ] == seq, "records continue the log")
            index, seq = index + 1, seq + row[_COUNT]
        return sizes
    seqs = np.cumsum(entries["count"], dtype=np.uint64)
    seqs += np.uint64(seq) - entries["count"]
    invariant(
        (entries["index"] == np.arange(index, index + len(sizes), dtype=np.uint64)).all()
        and (entries["seq"] == seqs).all(),
        "records continue the log",
    )
    return sizes


def record_parts(entries: Entries, payloads: Sequence[Part]) -> list[Part]:
    """Records as they lie in a segment: entry, payload, padding."""
    lines = memoryview(np.ascontiguousarray(entries).view(np.uint8))  # type: ignore[arg-type]
    parts: list[Part] = []
    for number, payload in enumerate(payloads):
        parts.append(lines[number * LINE_BYTES : (number + 1) * LINE_BYTES])
        if size := len(payload):
            parts.append(payload)
            if size % LINE_BYTES:
                parts.append(_ZEROS[size % LINE_BYTES :])
    return parts


def begin_segment(disk: Disk, folder: str, header: Header, settings: RangeSettings) -> Writing:
    """A new, empty segment. Neither its header nor its name is synced yet."""
    path = join(folder, segment_name(header.base_seq))
    file = disk.open(path, create=True)
    try:
        file.pwrite([encode_header(header)], 0)
    except EmbarcaderoError:
        file.close()
        with suppress(EmbarcaderoError):
            disk.remove(path)
        raise
    index = SparseIndex(settings.index_every_bytes)
    return Writing(file, header, HEADER_BYTES, header.base_index, header.base_seq, index)


def remove_segment(disk: Disk, folder: str, base_seq: int) -> None:
    """Remove a segment's files; the log last, so that what is left behind is never without it."""
    _remove_files(disk, folder, base_seq, (INDEX_FILE, TIME_INDEX_FILE, LOG))


def put_segment_aside(disk: Disk, folder: str, base_seq: int) -> None:
    """Keep a segment that is not what its name says, to be looked at; its indexes are of no use."""
    path = join(folder, segment_name(base_seq))
    if disk.exists(path):
        disk.rename(path, path + DAMAGED)
    _remove_files(disk, folder, base_seq, (INDEX_FILE, TIME_INDEX_FILE))
    disk.sync_folder(folder)


def remove_lone_indexes(disk: Disk, folder: str) -> None:
    """Remove indexes whose segment is gone: somebody's hand took it, or a crash came while it was put aside."""
    names = set(disk.list(folder))
    for name in sorted(names):
        base, _, suffix = name.partition(".")
        if f".{suffix}" in (INDEX_FILE, TIME_INDEX_FILE) and base + LOG not in names:
            disk.remove(join(folder, name))


def _remove_files(disk: Disk, folder: str, base_seq: int, suffixes: Sequence[str]) -> None:
    names = set(disk.list(folder))
    for suffix in suffixes:
        if (name := segment_name(base_seq, suffix)) in names:
            disk.remove(join(folder, name))
