"""Session checkpoints on disk, and the removal of old records.

A checkpoint is the session table as of an index. The leader writes it into the fabric. A replica copies it to disk once
all entries below that index are on its disk. After a loss of the fabric, the sequencer takes the newest checkpoint at
or below the recovered end, and replays the entries after it. Entries below the newest checkpoint may therefore be
removed.

Old records are removed by trims of an operator, and by a topic's limits on bytes and age. Only whole sealed segments
are removed. A limit first becomes a trim in the store, at the start of a segment, so that all replicas and brokers
agree on the lane's start. In lanes with sessions, records are removed only below a checkpoint that is on as many disks
as make a record durable: after a loss of the fabric, one of the answering replicas has it. Only then does the store
forget their ranges, because recovery does not look for entries of a range without a record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import accumulate
from typing import Final

from embarcadero.errors import BadRegion, EmbarcaderoError
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.region import Region, checkpoint_region
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.placement.ranges import below_start
from embarcadero.replica.copies import Copy, ReplicaContext
from embarcadero.replica.ranges import RangeCopies
from embarcadero.sequencer.order.checkpoint import newest_index, read_checkpoint
from embarcadero.steps import Step
from embarcadero.storage.folder import drop_foreign, drop_older, newest_checkpoint, sweep_drafts, write_checkpoint
from embarcadero.storage.layout import lane_folder
from embarcadero.storage.segment import SegmentInfo
from embarcadero.types import NO_INDEX, Range, ReplicaRef, Tier, Topic

CHECKPOINT: Final = 1
"""Index of the durable line's word that holds the index of the newest session checkpoint on this disk."""


class SessionCheckpoints:
    """On-disk checkpoints of all lanes that this replica follows."""

    def __init__(self, context: ReplicaContext) -> None:
        self._fabric, self._disk, self._lines = context.fabric, context.disk, context.lines
        self._journal, self._counters = context.env.journal, context.counters
        self._known: dict[int, int] = {}  # lane -> index of its newest checkpoint on disk; 0: none
        self._regions: dict[int, Region] = {}  # lane -> its checkpoints in the fabric, in the epoch below
        self._epoch = 0
        self._topics: Mapping[int, Topic] = {}  # by lane, as in the store

    def update(self, topics: Mapping[int, Topic]) -> None:
        """Update the topics, by lane."""
        self._topics = topics

    def on_disk(self, lane: int) -> int:
        """Return the index of the newest checkpoint of a lane's topic on this disk, or 0."""
        if (topic := self._topics.get(lane)) is None:
            return 0
        if lane not in self._known:
            found = newest_checkpoint(self._disk, lane_folder(lane), NO_INDEX, topic.checkpoint_ids)
            self._known[lane] = 0 if found is None else found[0]
            with suppress(EmbarcaderoError):  # remaining files do no harm
                drop_foreign(self._disk, lane_folder(lane), topic.checkpoint_ids)
                sweep_drafts(self._disk, lane_folder(lane))
                drop_older(self._disk, lane_folder(lane), self._known[lane])
        return self._known[lane]

    def tidy(self, lane: int) -> None:
        """Check a lane once: after a power loss, removed checkpoints may reappear."""
        with suppress(EmbarcaderoError):
            self.on_disk(lane)

    def forget(self, lane: int) -> None:
        """Forget a lane whose folder was removed."""
        self._known.pop(lane, None)

    def keep(self, lanes: AbstractSet[int]) -> None:
        """Forget all other lanes, and their memory: their topics or copies were removed."""
        self._known = {lane: index for lane, index in self._known.items() if lane in lanes}
        self._regions = {lane: region for lane, region in self._regions.items() if lane in lanes}

    def look(self, copy: Copy, leader: LeaderView) -> bool:
        """Copy the newest checkpoint of a lane if all entries below it are durable here. True if one was written."""
        lane, line = copy.range_.lane, copy.log.synced
        topic = self._topics.get(lane)
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
            return False  # a later epoch has begun, and this epoch's regions are removed
        except EmbarcaderoError as error:
            self._counters.disk_errors += 1
            self._journal.warn("can't save a session checkpoint", lane=lane, reason=str(error))
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


_LOOK_US: Final = 1_000_000
_JUMP_US: Final = 60_000_000
"""Synchronized clocks move by less than this."""


class LaneRetention:
    """Applies trims and limits to all lanes, periodically."""

    def __init__(self, context: ReplicaContext, ranges: RangeCopies, sessions: SessionCheckpoints) -> None:
        self._me, self._ranges, self._sessions = context.member.ref, ranges, sessions
        self._lines, self._directory = context.all_lines, context.directory
        self._clock, self._journal, self._counters = context.env.clock, context.env.journal, context.counters
        self._topics: dict[int, Topic] = {}
        self._chains: dict[int, list[Range]] = {}  # ranges by lane, oldest first
        self._trims: dict[int, int] = {}
        self._tiers: dict[str, Tier] = {}
        self._look_us = 0
        self._offset_us: int | None = None  # smallest offset of the wall clock to the monotonic clock
        self._jumped = False

    def update(
        self, topics: dict[int, Topic], ranges: list[Range], trims: dict[int, int], tiers: dict[str, Tier] | None = None
    ) -> None:
        """Update topics by lane, ranges, starts of lanes, and tables."""
        if trims != self._trims:
            self._look_us = 0
        self._topics, self._trims, self._tiers = topics, trims, tiers or {}
        self._chains = {}
        for range_ in ranges:
            self._chains.setdefault(range_.lane, []).append(range_)

    def _open(self, lane: int) -> Range | None:
        chain = self._chains.get(lane)
        return chain[-1] if chain and chain[-1].open else None

    def checkpoint(self, lane: int) -> int:
        """Return the index below which a lane's entries are not needed for its sessions.

        Enough disks have a checkpoint at this index.
        """
        if (open_ := self._open(lane)) is None:
            return 0
        found = sorted((self._checkpoint_of(ref, open_) for ref in open_.replicas), reverse=True)
        enough = max(1, open_.durable_on)
        return found[enough - 1] if len(found) >= enough else 0

    def _checkpoint_of(self, ref: ReplicaRef, open_: Range) -> int:
        if ref == self._me:
            return self._sessions.on_disk(open_.lane)
        table = self._lines.of(ref)
        return (table.load(open_.key, CHECKPOINT) or 0) if table is not None else 0

    def look(self, now_us: int) -> bool:
        """Request trims for exceeded limits, and drop trimmed segments. True if damage was dropped too."""
        if now_us < self._look_us:
            return False
        self._look_us = now_us + _LOOK_US
        healed = False
        by_lane: dict[int, list[Copy]] = defaultdict(list)
        for tags in sorted(self._ranges.copies):
            by_lane[tags[0]].append(self._ranges.copies[tags])
        for lane, copies in by_lane.items():
            topic, trim = self._topics.get(lane), self._trims.get(lane, 0)
            bounded = topic is not None and (topic.retention_bytes or topic.retention_s)
            if not trim and not bounded:
                continue
            needed = None if lane >= BROKER_LANES_FIRST else self.checkpoint(lane)
            if topic is not None and bounded:
                trim = self._demanded(topic, lane, copies, trim, needed)
            if needed is not None:
                self._forget(lane, min(trim, needed), needed)
            healed |= self._drop(copies, trim if needed is None else min(trim, needed))
        return healed

    def _demanded(self, topic: Topic, lane: int, copies: list[Copy], trim: int, needed: int | None) -> int:
        """Trim a lane by its topic's limits. Returns the lane's start.

        If the topic has a table, only records in the table are removed, and they stay there.
        """
        tier = self._tiers.get(topic.name)
        if tier is not None:
            in_table = tier.frontier(lane).index
            needed = in_table if needed is None else min(needed, in_table)
        sealed = [info for copy in copies if copy.whole for info in copy.log.segments if info.sealed]
        over = {info.end_index for info in self._over(topic, copies, sealed)}
        wanted = max((end for end in over if needed is None or end <= needed), default=0)
        if wanted <= trim:
            return trim
        try:
            trim = self._directory.topics.trim(topic.name, lane, wanted, cold=tier is None, topic_id=topic.id)
        except EmbarcaderoError as error:
            self._journal.warn("can't trim", topic=topic.name, lane=lane, reason=str(error))
        else:
            self._journal.note("trimmed by retention", topic=topic.name, lane=lane, start=trim)
        return trim

    def _forget(self, lane: int, below: int, covered: int) -> None:
        """Remove ranges from the store that are no longer needed."""
        open_ = self._open(lane)
        if open_ is None or not below_start(self._chains[lane], below):
            return
        try:
            self._directory.ranges.forget_trimmed(lane, open_.number, covered)
        except EmbarcaderoError as error:
            self._journal.warn("can't trim", lane=lane, reason=str(error))

    def _wall_us(self) -> int:
        """Return the time for retention by age. If a clock is set forward, records age only by elapsed time."""
        now_us, wall_us = self._clock.now_us(), self._clock.wall_us()
        offset_us = wall_us - now_us
        if self._offset_us is None or offset_us < self._offset_us:
            self._offset_us = offset_us
        ahead = offset_us - self._offset_us > _JUMP_US
        if ahead and not self._jumped:
            do = "retention uses the earlier time; if the clock is right now, restart the replica"
            self._journal.warn("the clock was set forward", seconds=(offset_us - self._offset_us) // 1_000_000, do=do)
        self._jumped = ahead
        return now_us + self._offset_us

    def _over(self, topic: Topic, copies: list[Copy], sealed: list[SegmentInfo]) -> list[SegmentInfo]:
        """Return the sealed segments that exceed the limits, oldest first, with all older ones."""
        old = 0
        if topic.retention_s:
            oldest_us = self._wall_us() - topic.retention_s * 1_000_000
            old = next((n for n, info in enumerate(sealed) if info.last_us >= oldest_us), len(sealed))
        large = 0
        if topic.retention_bytes:
            active = sum(info.bytes for copy in copies for info in copy.log.segments if not info.sealed)
            kept = list(accumulate((info.bytes for info in reversed(sealed)), initial=active))
            large = sum(total >= topic.retention_bytes for total in kept[:-1])
        return sealed[: max(old, large)]

    def _drop(self, copies: list[Copy], below: int) -> bool:
        healed = False
        for copy in copies:
            if copy.busy or copy.doubtful:
                continue
            damage = copy.log.damage
            try:
                freed = copy.log.drop_below(below)
            except EmbarcaderoError as error:
                self._journal.warn("can't drop segments", lane=copy.tags[0], range=copy.tags[1], reason=str(error))
                continue
            healed |= copy.log.damage != damage
            self._counters.dropped_bytes += freed
            if freed:
                self._journal.note("segments dropped", lane=copy.tags[0], range=copy.tags[1], bytes=freed, below=below)
        return healed
