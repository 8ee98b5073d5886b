"""Segments of replicas' folders, decoded: of a running cluster or a stopped one. Nothing is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from embarcadero.env import Disk, File, Missing
from embarcadero.errors import BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import Entries, sealed
from embarcadero.fabric.layout import join as join_entries
from embarcadero.limits import INDEX_EVERY_BYTES
from embarcadero.storage.disk import RealDisk, join
from embarcadero.storage.layout import (
    FOOTER_BYTES,
    HEADER_BYTES,
    INDEX_FILE,
    LOG,
    TIME_INDEX_FILE,
    Footer,
    Header,
    base_seqs,
    decode_header,
    range_folder,
    segment_name,
)
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.scan import NO_ENTRIES, SegmentScan, scan_segment
from embarcadero.storage.segment import SegmentReader, read_footer
from embarcadero.storage.verify import index_problem, replica_folders
from embarcadero.types import Range
from embarcadero.watch.regions import Facts, rows

_LANE = re.compile(r"lane-(\d{10})")
_RANGE = re.compile(r"range-(\d{10})")
_PLACE = re.compile(r"lane-(\d{10})/range-(\d{10})/(\d{20})\.log$")
_NEVER_INDEX = 1 << 63


def list_segments(disk: Disk, topics: Mapping[int, str]) -> list[Facts]:
    """All segments of a data directory; a damaged one is named with its problem."""
    found = []
    for replica in replica_folders(disk):
        for folder, number, range_number in _copies(disk, replica):
            names: list[str] = []
            with suppress(Missing):
                names = disk.list(folder)
            for base in base_seqs(names):
                what = {
                    "replica": int(replica.partition("-")[2]),
                    "lane": number,
                    "topic": topics.get(number, ""),
                    "range": range_number,
                    "base_seq": base,
                }
                with suppress(Missing):  # a running replica dropped it
                    found.append(what | _outline(disk, folder, base, number, range_number))
    return found


def _copies(disk: Disk, replica: str) -> Iterator[tuple[str, int, int]]:
    for name in disk.list(replica):
        if (lane := _LANE.fullmatch(name)) is None:
            continue
        with suppress(Missing):
            for inner in disk.list(join(replica, name)):
                if (number := _RANGE.fullmatch(inner)) is not None:
                    yield join(join(replica, name), inner), int(lane[1]), int(number[1])


def _outline(disk: Disk, folder: str, base: int, lane: int, range_number: int) -> Facts:
    """What a list says about a segment: from its header and footer; the active one is walked through, by entries."""
    file = join(folder, segment_name(base))
    try:
        segment = SegmentReader(disk, folder, base, lane, range_number)
    except BadSegment as error:
        return {"state": "damaged", "file": file, "problem": error.message}
    try:
        first = segment.entry(HEADER_BYTES)
        first_us = int(first["append_us"][0]) if len(first) and bool(sealed(first)[0]) else None
        size, end, last_us = segment.data_end, segment.header.base_index, None
        if (footer := segment.footer) is not None:
            size, end, last_us = footer.bytes + FOOTER_BYTES, footer.end_index, footer.last_us
        else:
            for entries, _ in segment.walk(HEADER_BYTES, end):
                end, last_us = int(entries["index"][-1]) + 1, int(entries["append_us"][-1])
        return {
            "base_index": segment.header.base_index,
            "batches": end - segment.header.base_index,
            "bytes": size,
            "state": "active" if footer is None else "sealed",
            "first_time": in_words(first_us),
            "last_time": in_words(last_us or None),
            "file": file,
        }
    finally:
        segment.close()


def in_words(us: int | None) -> str | None:
    """A time for people."""
    return None if us is None else datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%fZ")


def read_segment(path: Path, start: int | None, limit: int) -> Facts:
    """One segment: header, footer, what is wrong, how its indexes agree, and up to `limit` entries.

    The last entries, or those from an index on.
    """
    disk, name = RealDisk(path.parent), path.name
    if path.suffix != LOG or not path.exists():
        raise BadSegment(f"{path} is no segment", "`embarcadero inspect segments` lists them")
    file = disk.open(name)
    try:
        size = file.size()
        header = decode_header(file.pread(HEADER_BYTES, 0), str(path))
        if header is None:
            raise BadSegment(f"the header of {path} is damaged", "`embarcadero verify` says what to do")
        footer = read_footer(file.pread(FOOTER_BYTES, max(0, size - FOOTER_BYTES)), size, header)
        limit_index = _NEVER_INDEX if footer is None else footer.end_index
        scan = scan_segment(file, header, INDEX_EVERY_BYTES, 0 if footer is None else footer.bytes, limit_index)
        first = max(header.base_index, scan.end - limit) if start is None else start
        return {
            "file": str(path),
            **_header(header),
            "bytes": size,
            "state": "active" if footer is None else "sealed",
            "batches": scan.end - header.base_index,
            "end_index": scan.end,
            "end_seq": scan.end_seq,
            "footer": None if footer is None else footer._asdict(),
            "problems": _problems(path, header, footer, scan),
            "indexes": _indexes(disk, file, footer),
            "rows": rows(_entries(disk, header, first, limit)),
        }
    finally:
        file.close()


def _header(header: Header) -> Facts:
    facts: dict[str, Any] = header._asdict()
    facts["range"] = facts.pop("range_number")
    return facts


def _problems(path: Path, header: Header, footer: Footer | None, scan: SegmentScan) -> list[str]:
    found = []
    place = _PLACE.search(path.as_posix())
    if place and tuple(map(int, place.groups())) != (header.lane, header.range_number, header.base_seq):
        found.append("its header names another place than its path")
    for wrong in scan.wrong:
        upto = "the end" if wrong.end is None else wrong.end
        found.append(f"entries {wrong.first} to {upto}, at byte {wrong.position}, are damaged")
    if footer is not None and not scan.wrong and (scan.end, scan.end_seq) != (footer.end_index, footer.end_seq):
        found.append(f"entries end at {scan.end}, the footer says {footer.end_index}")
    if scan.cut:
        found.append(f"{scan.cut} bytes at the end are torn, or were being written")
    return found


def _indexes(disk: Disk, file: File, footer: Footer | None) -> dict[str, str]:
    if footer is None:
        return {suffix[1:]: "in memory while it grows" for suffix in (INDEX_FILE, TIME_INDEX_FILE)}
    return {
        suffix[1:]: index_problem(disk, "", file, footer, suffix) or "agrees"
        for suffix in (INDEX_FILE, TIME_INDEX_FILE)
    }


def _entries(disk: Disk, header: Header, first: int, limit: int) -> Entries:
    """Up to `limit` valid entries from an index on."""
    segment = SegmentReader(disk, "", header.base_seq, header.lane, header.range_number)
    found: list[Entries] = []
    try:
        spot = segment.locate(max(first, header.base_index)) if limit else None
        left, index = limit, max(first, header.base_index)
        for entries, _ in segment.walk(spot.position, index) if spot is not None else ():
            found.append(entries[:left])
            if (left := left - len(found[-1])) <= 0:
                break
    except EmbarcaderoError:
        return NO_ENTRIES
    finally:
        segment.close()
    return join_entries(found) if found else NO_ENTRIES


# --- stored -----------------------------------------------------------------------------------------------------------
# Batches on replicas' disks, for `inspect`: what has left the fabric is looked for in segment files.
class OnDisk(NamedTuple):
    """A batch's payload, and the replicas whose copy of it is right."""

    payload: bytes
    replicas: list[int]


@dataclass(frozen=True, slots=True)
class ReplicaFolders:
    """The ranges of a cluster, and the folder of each replica."""

    ranges: Sequence[Range] = ()
    folders: Mapping[int, Path] = field(default_factory=dict)

    def find(self, lane: int, index: int | None, seq: int | None) -> Entries:
        """The entry at an index, or of the batch that holds a seq; none if no disk has it."""
        for reader in self._readers(lane, index):
            with suppress(EmbarcaderoError):
                wanted = reader.find_seq(seq) if index is None and seq is not None else index
                found = None if wanted is None else reader.entry(wanted)
                if found is not None and (seq is None or seq in range(*_seqs(found))):
                    return found
        return NO_ENTRIES

    def payload(self, lane: int, entry: Entries) -> OnDisk | None:
        """A batch's payload from any disk; None if no copy is there and right."""
        index, found, replicas = int(entry["index"][0]), b"", []
        for replica in self._replicas(lane, index):
            for reader in self._readers(lane, index, replica):
                with suppress(EmbarcaderoError):
                    entries, payloads = reader.read(index, index + 1, 1)
                    if payloads and int(entries["crc"][0]) == int(entry["crc"][0]):
                        found = bytes(payloads[0])
                        replicas.append(replica)
        return OnDisk(found, replicas) if replicas else None

    def _of(self, lane: int, index: int | None) -> Iterator[Range]:
        for range_ in self.ranges:
            inside = index is None or (range_.start <= index and (range_.end is None or index < range_.end))
            if range_.lane == lane and inside:
                yield range_

    def _replicas(self, lane: int, index: int) -> list[int]:
        return sorted({ref.replica for range_ in self._of(lane, index) for ref in range_.replicas})

    def _readers(self, lane: int, index: int | None, only: int | None = None) -> Iterator[RangeReader]:
        for range_ in self._of(lane, index):
            for ref in range_.replicas:
                folder = self.folders.get(ref.replica)
                if folder is None or not folder.is_dir() or only not in (None, ref.replica):
                    continue
                disk, number = RealDisk(folder), range_.number
                reader = RangeReader(disk, range_folder(lane, number), lane, number, range_.start)
                try:
                    yield reader
                finally:
                    reader.close()


def _seqs(entry: Entries) -> tuple[int, int]:
    first = int(entry["seq"][0])
    return first, first + int(entry["count"][0])
