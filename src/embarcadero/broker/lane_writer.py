"""One lane of orders 0 and 1: the order index that this broker incarnation writes, and nobody else ever does.

Entries of one read of a socket are staged, written as one slice, flushed, and only then published by the frontier. No
sequencer is asked. Positions are given when a batch is staged, so its ack is ready when its entry is.
"""

from __future__ import annotations

import struct

import numpy as np

from embarcadero.broker.durable import HeldLane
from embarcadero.config import FabricSizes
from embarcadero.fabric.layout import ORDER, RegionKind
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import create_ring
from embarcadero.invariants import invariant
from embarcadero.types import EntryKind, Outcome, TopicLane
from embarcadero.wire.codec import PACKED_ACK, BatchHeader
from embarcadero.wire.frames import NO_ACK, WANT_DURABLE

_ENTRY = struct.Struct("<QQQQIIIIIHHHBBI")
_BATCH, _ORDERED = int(EntryKind.BATCH), int(Outcome.ORDERED)
invariant(_ENTRY.size == ORDER.itemsize, "packed entries are the table's own")


def lane_slots(sizes: FabricSizes) -> int:
    """Slots of a lane's ring: fewer than a topic's one lane of orders 2 and 5 has, since every broker has one."""
    return sizes.order_slots // 2


def lane_margin(sizes: FabricSizes) -> int:
    """How many entries a broker may write beyond what it knows to be acked; readers keep that far from its lap."""
    return min(sizes.round_entries, lane_slots(sizes) // 4)


class LaneWriter:
    """Writes one lane. Old slots are reused as the ring goes round: retention is what fits the ring and the log.

    Of a topic with replicas (`held`) a slot is reused only once its entry is durable.
    """

    def __init__(self, fabric: Fabric, lane: TopicLane, sizes: FabricSizes, held: HeldLane | None = None) -> None:
        self.lane, self.held = lane, held
        self._not_durable_max = lane_slots(sizes) - lane_margin(sizes)
        self._ring = create_ring(
            fabric, lane.region, RegionKind.ORDER, ORDER, lane_slots(sizes), "index", lane.broker, lane.incarnation
        )
        self.next_seq = 0
        self._append_us = 0
        self._staged = bytearray()
        self._acks = bytearray()
        self._durable_acks = bytearray()  # those that are to wait for disks

    @property
    def full(self) -> bool:
        """Whether there is no slot for another entry: the oldest ones are not durable yet."""
        return self.held is not None and self.next - self.held.through >= self._not_durable_max

    @property
    def next(self) -> int:
        """Index of the next batch."""
        return self._ring.next + len(self._staged) // ORDER.itemsize

    def stage(self, header: BatchHeader, location: int, wall_us: int) -> None:
        """Give a batch its position. Its payload is kept until that is durable, if it is to become so."""
        lane, index, seq = self.lane, self.next, self.next_seq
        self._append_us = max(self._append_us, wall_us)
        self._staged += _ENTRY.pack(
            index, seq, header.session_seq, self._append_us, header.session, location, header.length, header.count,
            header.crc, lane.handle, header.partition, header.schema, _BATCH, 0, 0,
        )  # fmt: skip
        self.next_seq += header.count
        if self.held is not None:
            self.held.keep(index, location)
        if not header.flags & NO_ACK:
            session, sequence = header.session, header.session_seq
            acks = self._acks if self.held is None or not header.flags & WANT_DURABLE else self._durable_acks
            acks += PACKED_ACK.pack(lane.topic, session, sequence, index, seq, lane.lane, _ORDERED)

    def publish(self) -> tuple[bytearray, bytearray]:
        """Write all staged entries, flush, then move the frontier.

        Returns their acks, which must not leave yet; and apart those that have to wait for disks as well.
        """
        entries = np.frombuffer(self._staged, dtype=ORDER)
        stop = self._ring.next + len(entries)
        self._ring.write(entries, stop - self._ring.slots)
        self._ring.publish()
        acks, self._acks, self._staged = self._acks, bytearray(), bytearray()
        durable_acks, self._durable_acks = self._durable_acks, bytearray()
        return acks, durable_acks
