"""Giving up old records: by trims that somebody asked for, and by a topic's bounds on bytes and age.

Only whole sealed segments go. A bound becomes a trim in the store first, at the start of a segment, so that all
replicas and brokers agree where a lane starts. Records of lanes with sessions go only below a checkpoint of these that
is on as many disks as make a record durable: after a loss of the fabric one of those who reply has it. The store
forgets their ranges only then too, since nobody would look for entries of a range that is not there.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Final

from embarcadero.env import Clock, Journal
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.durability import DurableLines
from embarcadero.limits import BROKER_LANES_FIRST
from embarcadero.placement.directory import Directory
from embarcadero.placement.ranges import below_start
from embarcadero.replica.copies import Copy
from embarcadero.replica.counters import ReplicaCounters
from embarcadero.replica.ranges import Ranges
from embarcadero.replica.sessions import CHECKPOINT, Sessions
from embarcadero.storage.writing import SegmentInfo
from embarcadero.types import Range, ReplicaRef, Tier, Topic

_LOOK_US: Final = 1_000_000
_JUMP_US: Final = 60_000_000
"""Clocks that are kept right move by less than this."""


class Retention:
    """Looks at all lanes now and then."""

    def __init__(
        self, me: ReplicaRef, ranges: Ranges, sessions: Sessions, lines: DurableLines, directory: Directory,
        clock: Clock, journal: Journal, counters: ReplicaCounters,
    ) -> None:  # fmt: skip
        self._me, self._ranges, self._sessions, self._lines, self._directory = me, ranges, sessions, lines, directory
        self._clock, self._journal, self._counters = clock, journal, counters
        self._topics: dict[int, Topic] = {}
        self._chains: dict[int, list[Range]] = {}  # ranges by lane, oldest first
        self._trims: dict[int, int] = {}
        self._tiers: dict[str, Tier] = {}
        self._look_us = 0
        self._offset_us: int | None = None  # of the wall clock to the steady one, the smallest that was seen
        self._jumped = False

    def update(
        self, topics: dict[int, Topic], ranges: list[Range], trims: dict[int, int], tiers: dict[str, Tier] | None = None
    ) -> None:
        """Take note of topics by lane, of all ranges, of where lanes start, and of what is in tables."""
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
        """Entries of a lane below this index are not needed to know its sessions: enough disks have a checkpoint."""
        if (open_ := self._open(lane)) is None:
            return 0
        found = sorted((self._checkpoint_of(ref, open_) for ref in open_.replicas), reverse=True)
        enough = max(1, open_.durable_on)
        return found[enough - 1] if len(found) >= enough else 0

    def _checkpoint_of(self, ref: ReplicaRef, open_: Range) -> int:
        if ref == self._me:
            return self._sessions.on_disk(open_.lane)
        table = self._lines.of(ref)
        return (table.load((open_.lane, open_.number), CHECKPOINT) or 0) if table is not None else 0

    def look(self, now_us: int) -> bool:
        """Ask for trims that bounds demand, and drop what is trimmed. True if damage went with it."""
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
        """Trim a lane as its topic's bounds ask for; returns where it starts then.

        Of a topic with a table only what is in the table goes, and stays there.
        """
        tier = self._tiers.get(topic.name)
        if tier is not None:
            in_table = tier.frontier(lane)[0]
            needed = in_table if needed is None else min(needed, in_table)
        sealed = [info for copy in copies if copy.whole for info in copy.log.segments if info.sealed]
        over = {info.end_index for info in self._over(topic, copies, sealed)}
        wanted = max((end for end in over if needed is None or end <= needed), default=0)
        if wanted <= trim:
            return trim
        try:
            trim = self._directory.trim(topic.name, lane, wanted, cold=tier is None, topic_id=topic.id)
        except EmbarcaderoError as error:
            self._journal.warn("can't trim", topic=topic.name, lane=lane, reason=str(error))
        else:
            self._journal.note("trimmed by retention", topic=topic.name, lane=lane, start=trim)
        return trim

    def _forget(self, lane: int, below: int, covered: int) -> None:
        """Have the store forget ranges that nobody needs any more."""
        open_ = self._open(lane)
        if open_ is None or not below_start(self._chains[lane], below):
            return
        try:
            self._directory.forget_trimmed(lane, open_.number, covered)
        except EmbarcaderoError as error:
            self._journal.warn("can't trim", lane=lane, reason=str(error))

    def _wall_us(self) -> int:
        """The time by which records are old. A clock that is set forward makes nothing old: only time that passes does.

        One that is set back keeps records longer. After a restart of the replica its clock is believed again.
        """
        now_us, wall_us = self._clock.now_us(), self._clock.wall_us()
        offset_us = wall_us - now_us
        if self._offset_us is None or offset_us < self._offset_us:
            self._offset_us = offset_us
        ahead = offset_us - self._offset_us > _JUMP_US
        if ahead and not self._jumped:
            do = "retention goes by the time before; if the clock is right now, restart the replica"
            self._journal.warn("the clock was set forward", seconds=(offset_us - self._offset_us) // 1_000_000, do=do)
        self._jumped = ahead
        return now_us + self._offset_us

    def _over(self, topic: Topic, copies: list[Copy], sealed: list[SegmentInfo]) -> list[SegmentInfo]:
        """Sealed segments beyond the bounds, oldest first; all before the last one are beyond too."""
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
