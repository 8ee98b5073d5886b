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


def close_lanes(fabric: Fabric, directory: Directory, member: Member, epoch: int) -> tuple[bool, list[str]]:
    """Record where the lanes of a closing incarnation end; and what is wrong with them, for the log.

    False: a later sequencer has to do it.
    """
    whose, problems = (member.broker, member.incarnation), list[str]()
    open_ = [lane for lane in directory.lanes() if lane.open and (lane.broker, lane.incarnation) == whose]
    ends = [_closed(fabric, lane, problems) for lane in open_]
    return not ends or directory.close_lanes(ends, epoch), problems


def _closed(fabric: Fabric, lane: TopicLane, problems: list[str]) -> TopicLane:
    end = end_seq = 0
    if fabric.exists(lane.region):
        ring = attach_ring(fabric, lane.region, ORDER)
        published = ring.frontier.load()
        end = ring.valid_end(published)
        last = ring.read(max(0, end - 1), end)
        end_seq = int(last["seq"][0]) + int(last["count"][0]) if len(last) else 0
        start = max(0, end - ring.slots // 2)
        if (valid := start + len(ring.read(start, end))) < end:
            problems.append(f"{lane.region}: entry {valid} is below the frontier {published} and not valid")
    return msgspec.structs.replace(lane, end=end, end_seq=end_seq)
