"""What a new sequencer learns from the last started one.

Theory of operation. Our epoch line is open already, so nobody acts any more on what the predecessor writes, but it may
still be writing: it may be paused in the middle of a round. It writes entries, then answers, then waiting batches, then
"read through". We read in the opposite order, so whatever "read through" covers is found in one of the others:
1. read-through marks, 2. waiting batches, 3. answers, 4. checkpoints and order rings, whose valid contiguous entries
(never the frontier) tell where the order ends.
A batch that has an answer is settled. One that waits and has none waits on, or is decided in our first round. What was
taken but left no trace is still in its pending ring, and is taken again: if it was ordered, the answer is DUP_OF.
"""

from __future__ import annotations

import numpy as np

from embarcadero.config import FabricSizes
from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import Corrupt
from embarcadero.fabric.frontier import FrontierReader
from embarcadero.fabric.layout import (
    ORDER,
    RESULT,
    Entries,
    SequencerLine,
    frontier_offset,
    join,
    pick,
    sealed,
)
from embarcadero.fabric.region import Fabric
from embarcadero.fabric.ring import RingReader, attach_ring
from embarcadero.plants import planted
from embarcadero.sequencer.checkpoint import read_checkpoint, restore
from embarcadero.sequencer.control import attach
from embarcadero.sequencer.held import HeldSlots, Slots, read_held
from embarcadero.sequencer.lane import checkpoint_region, order_region
from embarcadero.sequencer.order import LaneOrder
from embarcadero.sequencer.replay import learn_positions, replay
from embarcadero.sequencer.sessions import OPEN, SessionTable, W
from embarcadero.sequencer.sources import BrokerLegacy, ResultsRead, results_region
from embarcadero.steps import Step
from embarcadero.types import NO_HANDLE, Member, MemberState, Topic

_CHUNK = 4_096
_TRIES_MAX = 4
_REHEARSED_LANES = 4


class Legacy:
    """All that the predecessor left. Waiting batches are in `waiting`, by handle the rest."""

    def __init__(self, fabric: Fabric, epoch: int, members: list[Member], steps: Steps = NO_STEPS) -> None:
        self._fabric, self._epoch, self._steps = fabric, epoch, steps
        frontiers = fabric.attach(f"epoch-{epoch}/frontiers")
        self.brokers = {
            member.handle: BrokerLegacy(
                FrontierReader(frontiers, frontier_offset(SequencerLine.BROKERS + member.handle)).load()
            )
            for member in members
        }
        steps.at(Step.TAKEOVER_MARKS_READ)
        self.waiting = read_held(fabric, f"epoch-{epoch}/held")
        if planted("held-not-read"):
            self.waiting = self.waiting[:0]
        steps.at(Step.TAKEOVER_HELD_READ)
        for member in members:
            self._read_broker(member)
        if planted("takeover-reads-forwards"):
            for handle, legacy in self.brokers.items():
                legacy.start = FrontierReader(frontiers, frontier_offset(SequencerLine.BROKERS + handle)).load()
        steps.at(Step.TAKEOVER_ANSWERS_READ)

    def _read_broker(self, member: Member) -> None:
        legacy, name = self.brokers[member.handle], results_region(self._epoch, member)
        ours = self.waiting["origin"] == member.handle
        answered = np.empty(0, dtype=np.uint64)
        if member.state is MemberState.LIVE and self._fabric.exists(name):
            ring = attach_ring(self._fabric, name, RESULT, "position")
            frontiers = self._fabric.attach(f"{member.region_prefix}/frontiers")
            start = ResultsRead(frontiers).load(self._epoch)
            end = ring.valid_end(start)
            legacy.answers = ring.read(start, start if planted("answers-not-repeated") else end)
            answered = valid_suffix(ring, max(0, end - ring.slots), end)["pending"]
        self.waiting = pick(self.waiting, ~(ours & np.isin(self.waiting["index"], answered)))
        held = self.waiting["index"][self.waiting["origin"] == member.handle]
        settled = np.union1d(answered, held)
        legacy.settled = settled[settled >= legacy.start]

    def lane(self, topic: Topic, sizes: FabricSizes, held: HeldSlots, now_us: int) -> tuple[LaneOrder, Entries] | None:
        """A lane as it was, and the entries to be issued again; None when the predecessor did not have it."""
        name = order_region(self._epoch, topic.lane)
        if not self._fabric.exists(name):
            return None
        ring = attach_ring(self._fabric, name, ORDER)
        for _ in range(_TRIES_MAX):
            found = self._try_lane(ring, topic, sizes, held, now_us)
            if found is not None:
                self._steps.at(Step.TAKEOVER_READ)
                return found
        raise Corrupt(f"the order ring of topic {topic.name} has a hole behind its checkpoint", "restart the cluster")

    def _try_lane(
        self, ring: RingReader, topic: Topic, sizes: FabricSizes, held: HeldSlots, now_us: int
    ) -> tuple[LaneOrder, Entries] | None:
        """None when the predecessor, still running, reused slots while we read them. It ends after that round."""
        region, checkpoint = checkpoint_region(self._epoch, topic.lane), None
        rows = sizes.sessions
        if self._fabric.exists(region):
            checkpoint = read_checkpoint(self._fabric, region)
            rows = max(rows, self._fabric.attach(region).shape.slots - 1)
        order = LaneOrder(topic, SessionTable(rows), held)
        order.table.sessions_max = sizes.sessions
        start = 0
        if checkpoint is not None:
            restore(order, checkpoint, now_us)
            start = checkpoint.index
        after = valid_from(ring, start)
        if planted("ordered-end-from-frontier"):
            after = after[: max(0, ring.frontier.load() - start)]
        end = start + len(after)
        if ring.frontier.load() > end:
            return None
        before = valid_suffix(ring, max(0, min(start, end - ring.slots + sizes.round_entries)), start)
        learn_positions(order, before)
        replay(order, after, now_us)
        for row in np.flatnonzero(order.table.state == OPEN).tolist():
            attach(order, int(order.table.handle[row]), NO_HANDLE)  # who is connected is not known: do not hurry
        order.idle_due_us = now_us
        readable = join([before, after])
        return order, readable[max(0, len(readable) - (ring.slots - sizes.round_entries)) :]


def rehearse(
    fabric: Fabric, epoch: int, members: list[Member], topics: list[Topic], sizes: FabricSizes, now_us: int
) -> None:
    """Read what a takeover would read, of some lanes, for nothing: the code and the memory for it are warm then.

    Raises whatever a takeover might: the one that reigns goes on meanwhile.
    """
    legacy, held = Legacy(fabric, epoch, members), HeldSlots(sizes.held_slots)
    for topic in topics[:_REHEARSED_LANES]:
        legacy.lane(topic, sizes, held, now_us)


def valid_from(ring: RingReader, start: int) -> Entries:
    """The valid contiguous entries from `start` on."""
    parts, end = [np.empty(0, dtype=ORDER)], start
    while len(found := ring.read(end, min(end + _CHUNK, start + ring.slots))):
        parts.append(found)
        end += len(found)
    return join(parts)


def valid_suffix(ring: RingReader, start: int, end: int) -> Entries:
    """The longest run of valid entries that ends at `end`."""
    entries = ring.load(start, end)
    wrong = (entries[ring.commit] != np.arange(start, end, dtype=np.uint64)) | ~sealed(entries)
    bad = np.flatnonzero(wrong)
    return entries[bad[-1] + 1 :] if len(bad) else entries


def readmit(orders: dict[int, LaneOrder], held: HeldSlots, waiting: Entries, now_us: int) -> Slots:
    """Put waiting batches into held slots. Returns the slots of those that wait no longer and must be decided."""
    slots = held.hold(waiting)
    undecided = np.ones(len(slots), dtype=bool)
    for lane in np.unique(waiting["lane"]).tolist():
        order = orders.get(lane)
        if order is None or not order.strong:
            continue
        table, mine = order.table, np.flatnonzero(waiting["lane"] == lane)
        sessions, seqs = (waiting[name][mine].astype(np.int64) for name in ("session", "session_seq"))
        rows = sessions & table.mask
        ahead = seqs - table.expected[rows]
        _, firsts = np.unique(rows * (2 * W) + np.clip(ahead, 0, W), return_index=True)
        waits = (table.live[rows] == sessions) & (ahead > 0) & (ahead < W) & np.isin(np.arange(len(mine)), firsts)
        table.hold(rows[waits], seqs[waits], slots[mine[waits]], waiting["crc"][mine[waits]])
        table.gap_us[rows[waits]] = now_us
        order.due_us = min(order.due_us, now_us + order.departed_timeout_us)
        undecided[mine[waits]] = False
    return slots[undecided]
