"""Session checkpoints on disk: copies of those that the sequencer writes into the fabric, once what they speak of is.

A checkpoint is the session table as of an index. After a loss of the fabric the sequencer takes the newest one at or
below the recovered end, and replays the entries after it; so entries below the newest one may go.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

from embarcadero.env import Clock, Disk, Journal
from embarcadero.errors import BadRegion, EmbarcaderoError
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.names import checkpoint_region
from embarcadero.fabric.region import Fabric, Region
from embarcadero.fabric.tagged import TaggedWriter
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.replica.copies import Copy
from embarcadero.replica.counters import ReplicaCounters
from embarcadero.sequencer.order.checkpoint import newest_index, read_checkpoint
from embarcadero.steps import Step
from embarcadero.storage.checkpoints import (
    drop_foreign,
    drop_older,
    newest_checkpoint,
    sweep_drafts,
    write_checkpoint,
)
from embarcadero.storage.layout import lane_folder
from embarcadero.types import NO_INDEX, Topic

CHECKPOINT: Final = 1
"""Which value of a durable line says as of which index a session checkpoint is on this disk."""


class Sessions:
    """On-disk checkpoints of all lanes that this replica follows."""

    def __init__(
        self, fabric: Fabric, disk: Disk, lines: TaggedWriter, clock: Clock, journal: Journal, counters: ReplicaCounters
    ) -> None:  # fmt: skip
        self._fabric, self._disk, self._lines = fabric, disk, lines
        self._clock, self._journal, self._counters = clock, journal, counters
        self._known: dict[int, int] = {}  # lane -> index of its newest checkpoint on disk; 0: none
        self._regions: dict[int, Region] = {}  # lane -> its checkpoints in the fabric, of the epoch below
        self._epoch = 0
        self.topics: Mapping[int, Topic] = {}  # by lane, as the store has them

    def on_disk(self, lane: int) -> int:
        """As of which index the newest checkpoint of a lane's topic on this disk is; 0 if there is none."""
        if (topic := self.topics.get(lane)) is None:
            return 0
        if lane not in self._known:
            found = newest_checkpoint(self._disk, lane_folder(lane), NO_INDEX, topic.checkpoint_ids)
            self._known[lane] = 0 if found is None else found[0]
            with suppress(EmbarcaderoError):  # files that stay harm nothing
                drop_foreign(self._disk, lane_folder(lane), topic.checkpoint_ids)
                sweep_drafts(self._disk, lane_folder(lane))
                drop_older(self._disk, lane_folder(lane), self._known[lane])
        return self._known[lane]

    def tidy(self, lane: int) -> None:
        """Look at a lane once, though nobody asks: a loss of power brings back checkpoints that were removed."""
        with suppress(EmbarcaderoError):
            self.on_disk(lane)

    def forget(self, lane: int) -> None:
        """The lane's folder was removed: look again what is there."""
        self._known.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Drop all that is known of other lanes, and their memory: their topics are gone, or their copies are."""
        self._known = {lane: index for lane, index in self._known.items() if lane in lanes}
        self._regions = {lane: region for lane, region in self._regions.items() if lane in lanes}

    def look(self, copy: Copy, leader: LeaderView) -> bool:
        """Copy the newest checkpoint of a lane if it speaks of what is durable here. True if something was written."""
        lane, line = copy.range_.lane, copy.log.synced
        topic = self.topics.get(lane)
        if topic is None or lane >= BROKER_LANES_FIRST or not leader.number or copy.tags not in self._lines:
            return False
        try:
            name = checkpoint_region(leader.number, lane)
            index = self._newest_in_fabric(leader.number, lane)
            if index is None or not self.on_disk(lane) < index <= line:
                return False
            found = read_checkpoint(self._fabric, name)
            leader.steps.at(Step.REPLICA_CHECKPOINT_READ)
            if found is None or not self.on_disk(lane) < found.index <= line or not leader.may_act():
                return False
            data = found.header.tobytes() + found.rows.tobytes()
            write_checkpoint(self._disk, lane_folder(lane), found.index, data, topic.id)
            drop_older(self._disk, lane_folder(lane), found.index)
        except BadRegion:
            return False  # a later epoch has begun, and this one's regions go
        except EmbarcaderoError as error:
            self._counters.disk_errors += 1
            self._journal.warn("can't keep sessions", lane=lane, reason=str(error))
            return False
        leader.steps.at(Step.REPLICA_CHECKPOINT)
        self._known[lane] = found.index
        self._lines.set(copy.tags, found.index, CHECKPOINT)
        self._counters.checkpoints += 1
        return True

    def _newest_in_fabric(self, epoch: int, lane: int) -> int | None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._regions.clear()
        if lane not in self._regions:
            if not self._fabric.exists(name := checkpoint_region(epoch, lane)):
                return None
            self._regions[lane] = self._fabric.attach(name)
        return newest_index(self._regions[lane])
