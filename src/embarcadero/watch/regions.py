"""Decode regions of the fabric and segments of replicas' folders, of a running or a stopped cluster.

Read-only. Sparse regions are read as files and never mapped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from embarcadero.env import Disk, File, Missing
from embarcadero.errors import BadRegion, BadSegment, EmbarcaderoError
from embarcadero.fabric.layout import (
    EPOCH_LINE,
    ORDER,
    PENDING,
    RESULT,
    SLOTS_OFFSET,
    STANDING_WORD,
    SUPERBLOCK,
    BrokerLine,
    Entries,
    RangeWord,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
    sealed,
)
from embarcadero.fabric.layout import join as join_entries
from embarcadero.fabric.lines import COUNT_LINE, FIRST_LINE, RingReader
from embarcadero.fabric.region import Region, Shape, read_superblock
from embarcadero.fabric.shared import SharedFabric, SharedRegion, choose
from embarcadero.limits import FRONTIER_BYTES, INDEX_EVERY_BYTES, LANES_MAX, LINE_BYTES
from embarcadero.sequencer.order.checkpoint import read_checkpoint
from embarcadero.sequencer.order.sessions import read_waiting
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
from embarcadero.types import NO_HANDLE, NO_INDEX, NO_SESSION, EntryKind, Outcome, Range

Facts = dict[str, Any]
RINGS: Final = {
    RegionKind.ORDER: (ORDER, "index"),
    RegionKind.PENDING: (PENDING, "index"),
    RegionKind.RESULTS: (RESULT, "position"),
}
_TABLES: Final = frozenset({RegionKind.DURABLE, RegionKind.RANGES})
_SPARSE: Final = _TABLES | {RegionKind.EPOCHS, RegionKind.SEQUENCER_FRONTIERS, RegionKind.CHECKPOINT}
_NOTHING: Final = {"session": NO_SESSION, "origin": NO_HANDLE, "index": NO_INDEX, "seq": NO_INDEX}


class ReadOnlyFabric(SharedFabric):
    """A fabric to inspect. Without a given generation, it takes the generation of the regions it finds."""

    def __init__(self, folder: Path, generation: int | None = None) -> None:
        if not folder.is_dir():
            raise BadRegion(f"there is no fabric in {folder}", "a stopped cluster has none; start it")
        super().__init__(folder, generation or 0)
        self._any_generation = generation is None

    def attach(self, name: str, writable: bool = False) -> SharedRegion:  # noqa: ARG002 - never
        """Map a region. Copy it if it is sparse, because reading a hole in a map would fill it."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                head = np.frombuffer(file.read(SUPERBLOCK.itemsize), dtype=np.uint8)
                if self._any_generation and len(head) == SUPERBLOCK.itemsize:
                    self.generation = int(head.view(SUPERBLOCK)["generation"][0])
                size = path.stat().st_size
                sparse = len(head) == SUPERBLOCK.itemsize and int(head.view(SUPERBLOCK)["kind"][0]) in _SPARSE
                file.seek(0)
                data = np.fromfile(file, dtype=np.uint8) if sparse or size < SUPERBLOCK.itemsize else None
        except OSError as problem:
            raise BadRegion(f"cannot read region {name}: {problem.strerror}", "see `inspect regions`") from None
        try:
            if data is None:
                region = super().attach(name)
            else:
                region = SharedRegion(name, read_superblock(name, data, self.generation), data, choose(True), path)
        except ValueError as problem:
            raise BadRegion(f"region {name}: {problem}", "it was created by another program") from None
        check_shape(name, region.shape)
        return region


def check_shape(name: str, shape: Shape) -> None:
    """Raise BadRegion if a superblock contradicts itself: decoding it would read outside the region."""
    slots, size = shape.slots, shape.size
    match shape.kind:
        case RegionKind.ORDER | RegionKind.PENDING | RegionKind.RESULTS:
            right = slots > 0 and slots & (slots - 1) == 0 and size == SLOTS_OFFSET + slots * LINE_BYTES
        case RegionKind.HELD:
            right = size == SLOTS_OFFSET + slots * LINE_BYTES
        case RegionKind.EPOCHS:
            right = size == SUPERBLOCK.itemsize + slots * EPOCH_LINE.itemsize
        case RegionKind.SEQUENCER_FRONTIERS:
            right = size >= frontier_offset(SequencerLine.BROKERS) and size % FRONTIER_BYTES == 0
        case RegionKind.BROKER_FRONTIERS:
            right = slots > BrokerLine.CHUNKS and size == frontier_offset(slots)
        case RegionKind.CHECKPOINT:
            right = size == SUPERBLOCK.itemsize + 2 * (slots + 1) * FRONTIER_BYTES
        case RegionKind.LOG:
            right = shape.slot_bytes > 0 and size == SUPERBLOCK.itemsize + slots * shape.slot_bytes
        case RegionKind.DURABLE | RegionKind.RANGES:
            right = size == frontier_offset(FIRST_LINE + slots)
    if not right:
        raise BadRegion(
            f"region {name}: its superblock contradicts itself ({shape.kind.name}, {slots} slots, {size} bytes)",
            "it was damaged, or created by another program",
        )


def list_regions(fabric: ReadOnlyFabric) -> list[Facts]:
    """List all regions; a damaged region has its problem."""
    found = []
    for name in fabric.names():
        try:
            found.append({"name": name, **_superblock(fabric.attach(name).shape)})
        except EmbarcaderoError as problem:
            found.append({"name": name, "problem": problem.message})
    return found


def _superblock(shape: Shape) -> Facts:
    return {
        "kind": shape.kind.name,
        "bytes": shape.size,
        "slots": shape.slots,
        "slot_bytes": shape.slot_bytes,
        "owner": shape.owner,
        "incarnation": shape.incarnation,
    }


def read_region(fabric: ReadOnlyFabric, name: str, start: int | None, limit: int) -> Facts:
    """Decode a region: superblock, frontiers, and up to `limit` rows (from `start` on, by default the last rows)."""
    region = fabric.attach(name)
    decode: dict[RegionKind, Callable[[], Facts]] = {
        RegionKind.EPOCHS: lambda: _epochs(region, limit),
        RegionKind.HELD: lambda: {"rows": rows(read_waiting(fabric, name)[:limit])},
        RegionKind.SEQUENCER_FRONTIERS: lambda: _sequencer_frontiers(region, limit),
        RegionKind.BROKER_FRONTIERS: lambda: _broker_frontiers(region, limit),
        RegionKind.CHECKPOINT: lambda: _checkpoint(fabric, name, limit),
        RegionKind.LOG: lambda: {"rows": []},
        RegionKind.DURABLE: lambda: _durable(region, limit),
        RegionKind.RANGES: lambda: _ranges(region, limit),
    }
    kind = region.shape.kind
    found = _ring(region, start, limit) if kind in RINGS else decode[kind]()
    return {"name": name, **_superblock(region.shape), **found}


# --- by kind ----------------------------------------------------------------------------------------------------------
def ring_of(region: Region) -> RingReader:
    """Open the ring in a region."""
    return RingReader(region, *RINGS[region.shape.kind])


def valid_entries(ring: RingReader) -> Entries:
    """All valid entries of a ring, oldest first, including entries that are not published yet."""
    entries = ring.load(0, ring.slots)
    numbers = entries[ring.commit]
    fits = sealed(entries) & (numbers % np.uint64(ring.slots) == np.arange(ring.slots, dtype=np.uint64))
    found = np.flatnonzero(fits)
    return entries[found[np.argsort(numbers[found], kind="stable")]]


def _ring(region: Region, start: int | None, limit: int) -> Facts:
    ring = ring_of(region)
    frontier, entries = ring.frontier.load(), valid_entries(ring)
    numbers = entries[ring.commit]
    shown = entries[-limit:] if start is None else entries[numbers >= np.uint64(start)][:limit]
    made = rows(shown)
    for row, number in zip(made, shown[ring.commit].tolist(), strict=True):
        row["published"] = number < frontier
    return {"frontier": frontier, "valid": len(entries), "rows": made}


def rows(entries: Entries) -> list[Facts]:
    """Convert entries to plain values: kinds and outcomes by name, missing values as None."""
    names = [name for name in entries.dtype.names or () if not name.startswith("pad") and name != "check"]
    made = []
    for values in zip(*(entries[name].tolist() for name in names), strict=True):
        row: Facts = dict(zip(names, values, strict=True))
        for name, nothing in _NOTHING.items():
            if row.get(name) == nothing:
                row[name] = None
        if "kind" in row:
            row["kind"] = _name(EntryKind, row["kind"])
        if "outcome" in row:
            row["outcome"] = _name(Outcome, row["outcome"])
        made.append(row)
    return made


def _name(kinds: type[EntryKind] | type[Outcome], number: int) -> str:
    return kinds(number).name if number in set(kinds) else str(number)


def _epochs(region: Region, limit: int) -> Facts:
    lines = region.data[SUPERBLOCK.itemsize :].view(EPOCH_LINE)
    opened = np.flatnonzero(lines["epoch"])[-limit:].tolist()
    return {"rows": [{"epoch": e, "open": True, "started": int(lines["started"][e]) == e + 1} for e in opened]}


def _words(region: Region, line: int) -> list[int]:
    offset = frontier_offset(line)
    found: list[int] = region.data[offset : offset + 16].view(np.uint64).tolist()
    return found


def _sequencer_frontiers(region: Region, limit: int) -> Facts:
    lines = region.data[SUPERBLOCK.itemsize :].view(np.uint64).reshape(-1, FRONTIER_BYTES // 8)
    used = np.flatnonzero(lines[:, 0] | lines[:, STANDING_WORD]).tolist()
    made: list[Facts] = []
    for line in itertools.islice((line for line in used if line >= SequencerLine.LANES), limit):
        first, second = lines[line, 0].item(), lines[line, 1].item()
        if line < SequencerLine.LANES + LANES_MAX:
            made.append({"of": "lane", "number": line - SequencerLine.LANES, "index": first, "seq": second})
        else:
            number = line - SequencerLine.BROKERS
            closing = second == Standing.CLOSING
            made.append({"of": "broker handle", "number": number, "read_through": first, "closing": closing})
    return {"heartbeat": lines[SequencerLine.HEARTBEAT, 0].item(), "rows": made}


def _broker_frontiers(region: Region, limit: int) -> Facts:
    chunks = range(min(limit, region.shape.slots - BrokerLine.CHUNKS))
    return {
        "results_read": _words(region, BrokerLine.RESULTS_READ)[0],
        "results_epoch": _words(region, BrokerLine.RESULTS_EPOCH)[0],
        "reads_waiting": _words(region, BrokerLine.READS_WAITING)[0],
        "durable_waiting": _words(region, BrokerLine.DURABLE_WAITING)[0],
        "heartbeat": _words(region, BrokerLine.HEARTBEAT)[0],
        "rows": [{"slot": slot, "live_chunk": _words(region, BrokerLine.CHUNKS + slot)[0]} for slot in chunks],
    }


def _tagged(region: Region, limit: int) -> list[list[int]]:
    """Tags and values of the last lines of a table."""
    count = min(_words(region, COUNT_LINE)[0], region.shape.slots)
    lines = region.data[SUPERBLOCK.itemsize :].view(np.uint64).reshape(-1, FRONTIER_BYTES // 8)[FIRST_LINE:]
    found: list[list[int]] = lines[max(0, count - limit) : count, :4].tolist()
    return found


def _durable(region: Region, limit: int) -> Facts:
    names = ("lane", "range", "durable", "checkpoint")
    heartbeat, health = _words(region, 0)
    made = [dict(zip(names, line, strict=True)) for line in _tagged(region, limit)]
    return {"heartbeat": heartbeat, "health": health, "rows": made}


def _ranges(region: Region, limit: int) -> Facts:
    made = [(lane, RangeWord.decode(word), target) for lane, _, word, target in _tagged(region, limit)]
    return {
        "rows": [{"lane": lane, "range": w.number, "closing": w.closing, "target": target} for lane, w, target in made]
    }


def _checkpoint(fabric: ReadOnlyFabric, name: str, limit: int) -> Facts:
    found = read_checkpoint(fabric, name)
    if found is None:
        return {"checkpoint": None, "rows": []}
    header = {what: int(found.header[what]) for what in ("number", "index", "seq", "next_handle", "count")}
    made = []
    for row in found.rows[:limit]:
        successor = int(row["successor"])
        made.append(
            {
                "session": int(row["handle"]),
                "state": {1: "open", 2: "fenced"}.get(int(row["state"]), str(int(row["state"]))),
                "expected": int(row["expected"]),
                "low": int(row["low"]),
                "continued_by": None if successor == NO_SESSION else successor,
                "named": bool(row["name"]),
            }
        )
    return {"checkpoint": header, "rows": made}


# --- segments ---------------------------------------------------------------------------------------------------------
_LANE = re.compile(r"lane-(\d{10})")
_RANGE = re.compile(r"range-(\d{10})")
_SEGMENT_PATH = re.compile(r"lane-(\d{10})/range-(\d{10})/(\d{20})\.log$")
_NEVER_INDEX = 1 << 63


def list_segments(disk: Disk, topics: Mapping[int, str]) -> list[Facts]:
    """List all segments of a data directory; a damaged segment has its problem."""
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
    """Describe a segment from its header and footer; an active segment by a walk over its entries."""
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
    """Format a time."""
    return None if us is None else datetime.fromtimestamp(us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S.%fZ")


def read_segment(path: Path, start: int | None, limit: int) -> Facts:
    """Decode one segment: header, footer, problems, the state of its indexes, and up to `limit` entries.

    By default the last entries, else the entries from index `start` on.
    """
    disk, name = RealDisk(path.parent), path.name
    if path.suffix != LOG or not path.exists():
        raise BadSegment(f"{path} is not a segment", "`embarcadero inspect segments` lists segments")
    file = disk.open(name)
    try:
        size = file.size()
        header = decode_header(file.pread(HEADER_BYTES, 0), str(path))
        if header is None:
            raise BadSegment(f"the header of {path} is damaged", "run `embarcadero verify`, which names the next steps")
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
    named = _SEGMENT_PATH.search(path.as_posix())
    if named and tuple(map(int, named.groups())) != (header.lane, header.range_number, header.base_seq):
        found.append("its header does not match its path")
    for wrong in scan.wrong:
        upto = "the end" if wrong.end is None else wrong.end
        found.append(f"entries {wrong.first} to {upto}, at byte {wrong.position}, are damaged")
    if footer is not None and not scan.wrong and (scan.end, scan.end_seq) != (footer.end_index, footer.end_seq):
        found.append(f"entries end at index {scan.end}, but the footer has {footer.end_index}")
    if scan.cut:
        found.append(f"{scan.cut} bytes at the end are torn, or a write is in progress")
    return found


def _indexes(disk: Disk, file: File, footer: Footer | None) -> dict[str, str]:
    if footer is None:
        return {suffix[1:]: "in memory while it grows" for suffix in (INDEX_FILE, TIME_INDEX_FILE)}
    return {
        suffix[1:]: index_problem(disk, "", file, footer, suffix) or "agrees"
        for suffix in (INDEX_FILE, TIME_INDEX_FILE)
    }


def _entries(disk: Disk, header: Header, first: int, limit: int) -> Entries:
    """Read up to `limit` valid entries from an index on."""
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
# Batches on replicas' disks, for `inspect`: batches that have left the fabric are read from segment files.
class OnDisk(NamedTuple):
    """A batch's payload, and the replicas with a valid copy."""

    payload: bytes
    replicas: list[int]


@dataclass(frozen=True, slots=True)
class ReplicaFolders:
    """The ranges of a cluster, and the folder of each replica."""

    ranges: Sequence[Range] = ()
    folders: Mapping[int, Path] = field(default_factory=dict)

    def find(self, lane: int, index: int | None, seq: int | None) -> Entries:
        """Find the entry at an index, or of the batch with a seq; no entries if no disk has it."""
        for reader in self._readers(lane, index):
            with suppress(EmbarcaderoError):
                wanted = reader.find_seq(seq) if index is None and seq is not None else index
                found = None if wanted is None else reader.entry(wanted)
                if found is not None and (seq is None or seq in range(*_seqs(found))):
                    return found
        return NO_ENTRIES

    def payload(self, lane: int, entry: Entries) -> OnDisk | None:
        """Read a batch's payload from any disk; None without a valid copy."""
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
