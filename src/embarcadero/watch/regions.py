"""Regions of a running or dead cluster, decoded. Nothing here writes, or makes the file system fill a hole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from embarcadero.errors import BadRegion, EmbarcaderoError
from embarcadero.fabric.frontier import COUNT_LINE, FIRST_LINE
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
from embarcadero.fabric.region import Region, Shape, read_superblock
from embarcadero.fabric.ring import RingReader
from embarcadero.fabric.shared import SharedFabric, SharedRegion, choose
from embarcadero.limits import FRONTIER_BYTES, LANES_MAX, LINE_BYTES
from embarcadero.sequencer.order.checkpoint import read_checkpoint
from embarcadero.sequencer.order.sessions import read_waiting
from embarcadero.types import NO_HANDLE, NO_INDEX, NO_SESSION, EntryKind, Outcome

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
    """A fabric to look at. Its generation is that of the regions found, if it is not given."""

    def __init__(self, folder: Path, generation: int | None = None) -> None:
        if not folder.is_dir():
            raise BadRegion(f"there is no fabric in {folder}", "it goes when its cluster is stopped")
        super().__init__(folder, generation or 0)
        self._any_generation = generation is None

    def attach(self, name: str, writable: bool = False) -> SharedRegion:  # noqa: ARG002 - never
        """Map a region; copy it if it is sparse, because looking at a hole in a map would fill it."""
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
            raise BadRegion(f"region {name} can't be read: {problem.strerror}", "see `inspect regions`") from None
        try:
            if data is None:
                region = super().attach(name)
            else:
                region = SharedRegion(name, read_superblock(name, data, self.generation), data, choose(True), path)
        except ValueError as problem:
            raise BadRegion(f"region {name}: {problem}", "it was made by another program") from None
        check_shape(name, region.shape)
        return region


def check_shape(name: str, shape: Shape) -> None:
    """A superblock that contradicts itself would lead us out of the region."""
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
            "it was damaged, or made by another program",
        )


def list_regions(fabric: ReadOnlyFabric) -> list[Facts]:
    """All regions; a damaged one is named with its problem."""
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
    """A region: its superblock, its frontiers and numbers, and up to `limit` rows (from `start` on, else the last)."""
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
    """The ring in a region."""
    return RingReader(region, *RINGS[region.shape.kind])


def valid_entries(ring: RingReader) -> Entries:
    """All valid entries of a ring, oldest first; also those behind the frontier."""
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
    """Entries as plain values; kinds and outcomes by name, "none" as null."""
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
