"""The way in: reserve room in the log, receive, check, publish a pending entry.

Order of stores: payload, flush, entry, flush, and only then the published frontier. Entries are staged while one read
of a socket is taken apart, and written as one slice. Room in the pending ring is promised at admission, so a batch that
was received can always be published; a part of the ring is kept for control entries.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.fabric.layout import LINE, PENDING, RegionKind
from embarcadero.fabric.log import LogWriter, Reservation, create_log
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import create_ring
from embarcadero.invariants import invariant
from embarcadero.limits import FRAME_BYTES_MAX
from embarcadero.steps import Step
from embarcadero.types import EntryKind, Member

_ENTRY = struct.Struct("<QQQIIIIIIHHHBBII")
invariant(_ENTRY.size == PENDING.itemsize, "the packed entry is the table's entry")


@dataclass(slots=True)
class Entry:
    """What a broker puts into a pending entry."""

    kind: EntryKind
    lane: int
    session: int
    session_seq: int = 0
    low: int = 0
    location: int = 0
    size: int = 0
    count: int = 0
    crc: int = 0
    partition: int = 0
    schema: int = 0
    waits: bool = False  # for disks: its ack comes when a replica rings
    flags: int = 0  # of a SESSION_OPEN: OPEN_STRONG


class Ingest:
    """Log and pending ring of one broker incarnation: the only writer of both."""

    def __init__(
        self, fabric: Fabric, member: Member, sizes: FabricSizes, frame_bytes_max: int = FRAME_BYTES_MAX,
        steps: Steps = NO_STEPS,
    ) -> None:  # fmt: skip
        prefix, self._steps = member.region_prefix, steps
        self.frontiers, log = create_log(fabric, prefix, sizes, member.broker, member.incarnation)
        self.log = LogWriter(log, self.frontiers, steps)
        self._ring = create_ring(
            fabric, f"{prefix}/pending", RegionKind.PENDING, PENDING, sizes.pending_slots, "index",
            member.broker, member.incarnation,
        )  # fmt: skip
        self._handle = member.handle
        self._control_slots = max(4, sizes.pending_slots // 16)
        self._staged = bytearray()
        self._promised = 0  # slots promised to batches that are still being received
        self.free_below = 0  # pending slots of indices below are free; the sequencer says so
        self.frame_bytes_max = min(frame_bytes_max, sizes.chunk_bytes)

    @property
    def next(self) -> int:
        """Index of the next pending entry."""
        return self._ring.next + len(self._staged) // PENDING.itemsize

    @property
    def arriving(self) -> int:
        """Batches that are being received."""
        return self._promised

    @property
    def used_slots(self) -> int:
        """Pending slots that are taken or promised."""
        return self.next - self.free_below + self._promised

    def occupancy(self) -> float:
        """How full we are, 0 to 1: ring or log, whichever is fuller."""
        return max(self.used_slots / self._ring.slots, self.log.occupied())

    def reserve(self, size: int) -> Reservation | None:
        """Room in the log and a slot for a batch; None when there is none now."""
        if self.used_slots + self._control_slots >= self._ring.slots:
            return None
        reservation = self.log.reserve(size)
        if reservation is not None:
            self._promised += 1
        return reservation

    def abandon(self, reservation: Reservation) -> None:
        """The batch will not come: its connection is gone, or its bytes are wrong."""
        self._promised -= 1
        self.log.release(reservation.location)

    def stage_batch(self, reservation: Reservation, entry: Entry) -> int:
        """The payload is whole and right: flush it, stage its entry. Returns the pending index."""
        self.log.flush(reservation)
        self._steps.at(Step.INGEST_PAYLOAD)
        self._promised -= 1
        return self._stage(entry)

    def keep(self, reservation: Reservation) -> None:
        """The payload is whole and right, and its entry goes to a lane of our own: flush it, give its slot back."""
        self.log.flush(reservation)
        self._promised -= 1

    def stage_control(self, entry: Entry) -> int | None:
        """Stage a control entry without payload; None when even the slots kept for control are taken."""
        return self._stage(entry) if self.used_slots < self._ring.slots else None

    def _stage(self, entry: Entry) -> int:
        index = self.next
        self._staged += _ENTRY.pack(
            index, entry.session_seq, entry.low, entry.lane, entry.session, entry.location, entry.size, entry.count,
            entry.crc, self._handle, entry.partition, entry.schema, entry.kind, entry.flags, entry.waits, 0,
        )  # fmt: skip
        return index

    def publish(self) -> bool:
        """Write all staged entries, flush, then move the frontier. True if there were any."""
        if not self._staged:
            return False
        if len(self._staged) == LINE.size:
            self._ring.write_line(list(LINE.unpack(self._staged)), self.free_below)
        else:
            self._ring.write(np.frombuffer(self._staged, dtype=PENDING), self.free_below)
        self._staged = bytearray()
        self._steps.at(Step.INGEST_ENTRIES)
        self._ring.publish()
        self._steps.at(Step.INGEST_PUBLISHED)
        return True
