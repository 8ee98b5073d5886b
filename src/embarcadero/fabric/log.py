"""The broker's log: payloads in chunks, received in place, freed chunk by chunk.

A location is the address of a payload in 32 bits: chunk number, then 64-byte unit in the chunk. Chunk number n is in
slot n mod chunks. A slot's chunk line has the number of its live chunk. To reuse a slot the writer first adds `chunks`
to its line and flushes it, and only then overwrites the slot. So a reader copies first and loads the line afterwards.
If the location's chunk number is still the live one, no byte of the copy can be of a later chunk.

    location   | chunk number, modulo 2^(32 - unit bits) | unit in chunk |

Chunk numbers wrap: after 256 GiB of payloads an old location may look live. Every reader checks the payload's CRC
against the entry, which distinguishes the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import FrameTooLarge, invariant
from embarcadero.fabric.layout import SUPERBLOCK, BrokerLine, Entries, RegionKind, frontier_offset
from embarcadero.fabric.lines import FrontierReader, FrontierWriter
from embarcadero.fabric.region import (
    Fabric,
    Region,
    Shape,
    attach_unless_removed,
    broker_frontiers_region,
    log_region,
    pending_region,
    require_shape,
)
from embarcadero.limits import FRONTIER_BYTES, LINE_BYTES
from embarcadero.steps import Step
from embarcadero.types import EntryKind, Member

LOCATION_BITS = 32
_PAYLOAD_OFFSET = SUPERBLOCK.itemsize


class Reservation(NamedTuple):
    """Space for one payload: receive into `view`, flush, then publish `location`."""

    location: int
    view: memoryview
    size: int


class _BrokerLog:
    def __init__(self, log: Region, frontiers: Region) -> None:
        self._log, self._frontiers = log, frontiers
        self.chunks, self.chunk_bytes = log.shape.slots, log.shape.slot_bytes
        powers = all(number > 0 and number & (number - 1) == 0 for number in (self.chunks, self.chunk_bytes))
        require_shape(log, powers and self.chunk_bytes >= LINE_BYTES)
        require_shape(log, _PAYLOAD_OFFSET + self.chunks * self.chunk_bytes <= log.shape.size)
        require_shape(frontiers, _chunk_line(self.chunks) <= frontiers.shape.size)
        self._memory = log.data.data
        self._unit_bits = (self.chunk_bytes // LINE_BYTES).bit_length() - 1
        self._unit_mask = (1 << self._unit_bits) - 1
        self._number_mask = (1 << (LOCATION_BITS - self._unit_bits)) - 1

    def _slot(self, location: int) -> int:
        return (location >> self._unit_bits) & (self.chunks - 1)

    def _offset(self, location: int) -> int:
        """Byte offset of a location in the region."""
        unit = location & self._unit_mask
        return _PAYLOAD_OFFSET + self._slot(location) * self.chunk_bytes + unit * LINE_BYTES


class LogWriter(_BrokerLog):
    """The broker's side. Counts the unresolved reservations of each chunk: such a chunk is not reused."""

    def __init__(self, log: Region, frontiers: Region, steps: Steps = NO_STEPS) -> None:
        super().__init__(log, frontiers)
        self._steps = steps
        self._live = [FrontierWriter(frontiers, _chunk_line(slot)) for slot in range(self.chunks)]
        self._unresolved = [0] * self.chunks
        self._current, self._filled = 0, 0  # the slot being filled, and its filled bytes
        self._by_age = deque(range(1, self.chunks))  # the other slots, least recently filled first
        self._fresh = set(self._by_age)  # slots that were never used: nothing to free there
        self._held = 0  # slots with unresolved reservations

    def reserve(self, size: int) -> Reservation | None:
        """Reserve space for `size` bytes. Returns None while every chunk has an unresolved reservation."""
        if not 0 < size <= self.chunk_bytes:
            raise FrameTooLarge(
                f"the payload has {size} bytes; this log takes 1 to {self.chunk_bytes}", "send smaller batches"
            )
        if self._filled + size > self.chunk_bytes and not self._next_chunk():
            return None
        slot, unit = self._current, self._filled // LINE_BYTES
        self._filled += -(-size // LINE_BYTES) * LINE_BYTES
        self._held += self._unresolved[slot] == 0
        self._unresolved[slot] += 1
        location = (self._live[slot].value & self._number_mask) << self._unit_bits | unit
        offset = self._offset(location)
        return Reservation(location, self._memory[offset : offset + size], size)

    def flush(self, reservation: Reservation) -> None:
        """Write back a received payload. Write its entry only after this."""
        self._log.flush(self._offset(reservation.location), reservation.size)

    def chunk_of(self, location: int) -> int:
        """The chunk slot of a location."""
        return self._slot(location)

    def release(self, location: int) -> None:
        """Release a reservation: its entry is resolved, or will never be published."""
        slot = self._slot(location)
        invariant(location >> self._unit_bits == self._live[slot].value & self._number_mask, "a released chunk is live")
        invariant(self._unresolved[slot] > 0, "a reservation is released once")
        self._unresolved[slot] -= 1
        self._held -= self._unresolved[slot] == 0

    def occupied(self) -> float:
        """Share of the log that unresolved payloads keep: whole chunks, and the filled part of the current one."""
        if not self._unresolved[self._current]:
            return self._held / self.chunks
        return (self._held - 1 + self._filled / self.chunk_bytes) / self.chunks

    def _next_chunk(self) -> bool:
        slot = next((slot for slot in self._by_age if not self._unresolved[slot]), None)
        if slot is None:
            return False
        if slot in self._fresh:
            self._fresh.discard(slot)
        else:
            # The line is flushed and fenced: all readers can see that the chunk is freed before a byte is overwritten.
            self._live[slot].advance(self._live[slot].value + self.chunks)
            self._steps.at(Step.CHUNK_FREED)
        self._by_age.remove(slot)
        self._by_age.append(self._current)
        self._current, self._filled = slot, 0
        return True


class LogReader(_BrokerLog):
    """The readers' side: copies payloads that are still in the log."""

    def __init__(self, log: Region, frontiers: Region) -> None:
        super().__init__(log, frontiers)
        first, last = _chunk_line(0), _chunk_line(self.chunks)
        self._live = [FrontierReader(frontiers, _chunk_line(slot)) for slot in range(self.chunks)]
        self._lines = frontiers.data[first:last].view(np.uint64)[:: FRONTIER_BYTES // 8]
        self._span = (first, last - first)

    def copy(self, location: int, size: int) -> bytes | None:
        """Copy the payload; None when its chunk was freed. The caller checks the CRC."""
        unit = location & self._unit_mask
        invariant(0 < size <= self.chunk_bytes - unit * LINE_BYTES, "a payload lies in one chunk")
        offset = self._offset(location)
        self._log.invalidate(offset, size)
        payload = bytes(self._memory[offset : offset + size])
        live = self._live[self._slot(location)].load()  # after the copy: a load before it would prove nothing
        return payload if live & self._number_mask == location >> self._unit_bits else None

    def freed(self, locations: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Flag the locations that are permanently gone. The others may be freed at any time."""
        self._frontiers.invalidate(*self._span)
        live = (self._lines & np.uint64(self._number_mask)).astype(np.uint32)
        numbers = locations >> np.uint32(self._unit_bits)
        there: npt.NDArray[np.bool_] = live[numbers & np.uint32(self.chunks - 1)] == numbers
        return ~there


class BrokerLogs:
    """Logs of all broker incarnations whose regions still hold data, by region handle.

    For an unknown handle it calls `refresh`, which reads the store and calls `update`.
    """

    def __init__(self, fabric: Fabric, refresh: Callable[[], None]) -> None:
        self._fabric, self._refresh = fabric, refresh
        self._members: dict[int, Member] = {}
        self._readers: dict[int, LogReader] = {}

    def update(self, members: list[Member]) -> None:
        """Replace the known incarnations, and drop the logs of removed ones."""
        self._members = {member.handle: member for member in members}
        for handle in [h for h in self._readers if h not in self._members]:
            del self._readers[handle]

    def of(self, handle: int) -> LogReader | None:
        """The log of a broker incarnation; None when it was removed."""
        reader = self._readers.get(handle)
        if reader is None and handle not in self._members:
            self._refresh()  # an unknown broker may be new: only the store knows whether it was removed
        if reader is None and (member := self._members.get(handle)) is not None:
            prefix = member.region_prefix
            if self._fabric.exists(pending_region(prefix)):
                regions = attach_unless_removed(self._fabric, log_region(prefix), broker_frontiers_region(prefix))
                if regions is not None:
                    reader = self._readers[handle] = LogReader(*regions)
        return reader

    def gone(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Flag the entries whose payload is gone."""
        gone = np.zeros(len(entries), dtype=bool)
        batches = entries["kind"] == EntryKind.BATCH
        for handle in np.unique(entries["origin"][batches]):
            mine = batches & (entries["origin"] == handle)
            log = self.of(int(handle))
            gone[mine] = True if log is None else log.freed(entries["location"][mine])
        return gone


def _chunk_line(slot: int) -> int:
    return frontier_offset(BrokerLine.CHUNKS + slot)


def create_log(fabric: Fabric, prefix: str, sizes: FabricSizes, owner: int, incarnation: int) -> tuple[Region, Region]:
    """Make a broker's frontiers and its log. At first slot s holds chunk number s."""
    chunks = sizes.log_bytes // sizes.chunk_bytes
    lines = BrokerLine.CHUNKS + chunks
    frontiers = fabric.create(
        broker_frontiers_region(prefix),
        Shape(RegionKind.BROKER_FRONTIERS, frontier_offset(lines), lines, FRONTIER_BYTES, owner, incarnation),
    )
    for slot in range(chunks):
        FrontierWriter(frontiers, _chunk_line(slot)).advance(slot)
    log = fabric.create(
        log_region(prefix),
        Shape(RegionKind.LOG, _PAYLOAD_OFFSET + sizes.log_bytes, chunks, sizes.chunk_bytes, owner, incarnation),
    )
    return frontiers, log
