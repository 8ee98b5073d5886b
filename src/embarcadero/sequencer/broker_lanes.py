"""Where lanes of a dead broker end. Topics of orders 0 and 1 are written by brokers; sequencers only close their lanes.

The incarnation was told that it is closing, flushed and fenced, before its lanes are read. What it acks afterwards it
acks only after looking, so everything acked is in the valid contiguous entries that we find. The ends go to the store
and are never computed again; an incarnation that wakes up later may write on, but nobody reads above the ends.
"""

from __future__ import annotations

import msgspec

from embarcadero.fabric.layout import ORDER
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import attach_ring
from embarcadero.placement.directory import Directory
from embarcadero.types import Member, TopicLane


def close_lanes(fabric: Fabric, directory: Directory, member: Member, epoch: int) -> bool:
    """Record where the lanes of a closing incarnation end. False: a later sequencer has to do it."""
    whose = (member.broker, member.incarnation)
    open_ = [lane for lane in directory.lanes() if lane.open and (lane.broker, lane.incarnation) == whose]
    return not open_ or directory.close_lanes([_closed(fabric, lane) for lane in open_], epoch)


def _closed(fabric: Fabric, lane: TopicLane) -> TopicLane:
    end = end_seq = 0
    if fabric.exists(lane.region):
        ring = attach_ring(fabric, lane.region, ORDER)
        end = ring.valid_end(ring.frontier.load())
        last = ring.read(max(0, end - 1), end)
        end_seq = int(last["seq"][0]) + int(last["count"][0]) if len(last) else 0
    return msgspec.structs.replace(lane, end=end, end_seq=end_seq)
