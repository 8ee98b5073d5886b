"""Copy from other replicas' files the records that left the fabric or were damaged.

There are three reasons. A sealed range is incomplete here. A lane is in recovery and its end is above this copy. Or
this replica was so slow that enough others had the records on disk, and their memory was reused. Workers read files of
peers, check them entry by entry and payload by payload, and append the records like any others. Everything in a peer's
file of a range is in the one order, so any peer may provide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from embarcadero.errors import EmbarcaderoError, NotAvailable, Trimmed
from embarcadero.fabric.layout import Entries
from embarcadero.limits import REPAIR_STEP_BYTES
from embarcadero.replica.copies import Commits, Copy, ReplicaContext
from embarcadero.replica.ranges import RangeCopies
from embarcadero.storage.layout import range_folder
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.repair import Found, Scrub, heal_tails, mend
from embarcadero.storage.segment import Damage
from embarcadero.types import LanePosition, Range, RangeKey, ReplicaMember, ReplicaState

_TRY_AGAIN_US: Final = 500_000
_DEBT_US_MAX: Final = 1_000_000
_IDLE_US: Final = 100_000
_SCRUB_ANYWAY_US: Final = 10_000_000


class RepairPiece(NamedTuple):
    """Records of a peer's copy; or none if that begins later: then its first index and seq."""

    entries: Entries
    payloads: list[memoryview]
    begins: LanePosition | None = None


class _Source(NamedTuple):
    member: ReplicaMember
    tags: RangeKey
    start: int  # of the range


class _Tried(NamedTuple):
    """Attempts to complete a copy: how many peers failed to help, and the time of the next attempt."""

    peers: int
    again_us: int


_NOT_TRIED: Final = _Tried(0, 0)


class Repair:
    """Completes copies, a piece at a time."""

    def __init__(
        self,
        context: ReplicaContext,
        ranges: RangeCopies,
        commits: Commits,
        on_change: Callable[[], None],
        on_give_up: Callable[[Copy], None],
    ) -> None:
        """`on_change` is called when a copy starts to count or is lost; `on_give_up` when no source can help."""
        env = context.env
        self._ranges, self._commits, self._leader, self._lines = ranges, commits, context.leader, context.all_lines
        self._workers, self._me, self._disks, self._clock = env.workers, context.member, env.disks, env.clock
        self._journal, self._counters = env.journal, context.counters
        self._bytes_per_s = context.config.replica.repair_bytes_per_s
        self._on_change, self._on_give_up = on_change, on_give_up
        self._members: dict[int, ReplicaMember] = {}
        self._readers: dict[_Source, RangeReader] = {}
        self._in_use: set[_Source] = set()  # a worker uses its reader now
        self._tried: dict[RangeKey, _Tried] = {}
        self._gave_up_us: dict[RangeKey, int] = {}  # when no peer could help with a copy that has had no progress since
        self._free_us = 0  # when the byte rate allows the next piece

    def update(self, members: list[ReplicaMember]) -> None:
        """Update the known replicas."""
        self._members = {member.replica: member for member in members}  # oldest first: the newest one is kept
        known = set(self._members.values())
        self._close_readers([source for source in list(self._readers) if source.member not in known])

    def next_deadline_us(self) -> int | None:
        """Return when the next retry is due, if any."""
        return min((tried.again_us for tried in self._tried.values()), default=None)

    # --- small steps --------------------------------------------------------------------------------------------------
    def step(self, copies: list[Copy], now_us: int) -> bool:
        """Read one piece for each copy of an open range that lacks records, and for one sealed range.

        Copies that no peer could help with come last, in turn, so that they never delay the others.
        """
        moved, asking = False, {copy.tags for copy in copies}
        if gone := self._tried.keys() - asking:  # their topics were deleted, or the copies are complete
            for tags in gone:
                del self._tried[tags]
        if self._gave_up_us:
            self._gave_up_us = {tags: us for tags, us in self._gave_up_us.items() if tags in asking}
            copies = sorted(copies, key=lambda copy: self._gave_up_us.get(copy.tags, 0))
        for copy in copies:
            if copy.busy or copy.doubtful or now_us < self._tried.get(copy.tags, _NOT_TRIED).again_us:
                continue
            if not self._commits.may_try(copy, now_us):
                continue
            damage, goal = copy.in_place, self._goal(copy)
            if damage is None and (goal is None or goal <= copy.log.end):
                if copy.behind and copy.range_.open:
                    self._give_up(copy, now_us, "neither the fabric nor another replica has the next records")
                self._heal(copy, self._commits.published(copy) if goal is None and self._ranges.follows(copy) else goal)
                asking.discard(copy.tags)
                continue
            if damage is not None and goal is not None and self._is_above(copy, damage, goal):
                self._ranges.cut_damaged_end(copy, damage, goal)
                self._healed(copy)
                moved = True
                continue
            if copy.range_.open or now_us >= self._free_us:
                self._ask(copy, damage, goal, now_us)
                moved = True
                if not copy.range_.open:
                    break
        self._close_readers([source for source in list(self._readers) if source.tags not in asking])
        return moved

    def _close_readers(self, sources: list[_Source]) -> None:
        """Close files of peers that no copy needs any more, unless a worker is about to read them."""
        for source in sources:
            if source not in self._in_use:
                self._readers.pop(source).close()

    def _is_above(self, copy: Copy, damage: Damage, end: int) -> bool:
        """Return whether damage extends past the end that a range has or gets: it is not repaired in place."""
        if copy.range_.open and (self._ranges.follows(copy) or copy.tags in self._commits.lines):
            return False
        return damage.end > end or damage.first >= copy.log.end

    def _goal(self, copy: Copy) -> int | None:
        """Return the index up to which peers' files are needed, or None if the copy is complete or no peer has more."""
        range_ = copy.range_
        if range_.end is not None:
            return range_.end
        if not self._ranges.follows(copy):
            return self._leader.asked(range_) or None
        return max(self._durable_elsewhere(range_), default=None) if copy.behind else None

    def _heal(self, copy: Copy, goal: int | None) -> None:
        """Clear the damage of a tail once the copy reaches an end that another replica or the store has.

        For a copy that follows its lane, no broker counted more than the copy's own durable line.
        """
        if goal is not None and copy.log.damage and copy.log.synced >= goal:
            try:
                heal_tails(copy.log, goal)
            except EmbarcaderoError as error:
                self._journal.warn("can't note a repair", lane=copy.tags[0], range=copy.tags[1], reason=str(error))
                return
            self._healed(copy)

    def _healed(self, copy: Copy) -> None:
        """Publish a copy after a repair or a cut. It counts again once no part of it is damaged."""
        self._commits.publish(copy)
        self._on_change()

    def _durable_elsewhere(self, range_: Range) -> Iterator[int]:
        for ref in range_.replicas:
            table = self._lines.of(ref) if ref.replica != self._me.replica else None
            line = None if table is None else table.load(range_.key)
            if line is not None:
                yield line

    # --- reading ------------------------------------------------------------------------------------------------------
    def _ask(self, copy: Copy, damage: Damage | None, goal: int | None, now_us: int) -> None:
        """Read on a worker from the next peer that has not failed."""
        sources = self._sources(copy.range_)
        tried = self._tried.get(copy.tags, _NOT_TRIED).peers
        if tried >= len(sources):
            self._give_up(copy, now_us, "no other replica could help" if sources else "no other replica has one")
            return
        copy.reading = True
        source, start = sources[tried], copy.log.end
        self._in_use.add(source)
        if damage is not None:
            self._workers.run(partial(self._mend, source, copy, damage), partial(self._mended, copy, source, tried))
        elif goal is not None:
            job = partial(self._piece, source, start, goal)
            self._workers.run(job, partial(self._arrived, copy, source, start, tried))

    def _sources(self, range_: Range) -> list[_Source]:
        """Return the replicas that may have the records, live ones first; always in the same order."""
        named = [self._members.get(ref.replica) for ref in range_.replicas if ref.replica != self._me.replica]
        found = [member for member in named if member is not None]
        found.sort(key=lambda member: member.state is ReplicaState.DEAD)
        return [_Source(member, range_.key, range_.start) for member in found] if self._disks else []

    def _reader(self, source: _Source) -> RangeReader:
        """On a worker: return a reader. One job reads one range, so a reader has one user at a time."""
        reader = self._readers.get(source)
        if reader is not None:
            reader.refresh()
            return reader
        if self._disks is None:
            raise NotAvailable("this replica has no access to files of other replicas")
        lane, number = source.tags
        reader = RangeReader(self._disks(source.member), range_folder(lane, number), lane, number, source.start)
        self._readers[source] = reader
        return reader

    def _piece(self, source: _Source, start: int, goal: int) -> RepairPiece:
        """On a worker: read some records from a peer's files."""
        reader = self._reader(source)
        try:
            return RepairPiece(*reader.read(start, goal, REPAIR_STEP_BYTES))
        except Trimmed:
            first = reader.first
            entry = None if first is None else reader.entry(first)
            if entry is None:
                raise
            return RepairPiece(entry[:0], [], LanePosition(int(entry["index"][0]), int(entry["seq"][0])))

    def _mend(self, source: _Source, copy: Copy, damage: Damage) -> bool:
        """On a worker: repair in place. No other job uses the copy meanwhile."""
        return mend(copy.log, self._reader(source), damage, self._ranges.trimmed(copy.range_.lane))

    def _mended(self, copy: Copy, source: _Source, tried: int, result: bool | Exception) -> None:
        copy.reading = False
        self._in_use.discard(source)
        if result is not True:
            self._try_next_peer(copy, source, tried, result)
            return
        self._reset_attempts(copy)
        self._journal.note("damage repaired", lane=copy.tags[0], range=copy.tags[1], peer=source.member.replica)
        self._healed(copy)

    def _arrived(self, copy: Copy, source: _Source, start: int, tried: int, result: RepairPiece | Exception) -> None:
        copy.reading = False
        self._in_use.discard(source)
        if copy.doubtful or copy.log.end != start:
            return
        if isinstance(result, Exception) or not len(result.entries):
            begins = result.begins if isinstance(result, RepairPiece) else None
            if begins is not None and self._ranges.begin_at(copy, *begins):
                return
            self._try_next_peer(copy, source, tried, result)
            return
        if self._commits.append(copy, result.entries, result.payloads):
            self._reset_attempts(copy)
            copy.behind = False
            size = int(result.entries["size"].sum())
            self._counters.repaired_entries += len(result.entries)
            self._counters.repaired_bytes += size
            now_us = self._clock.now_us()
            self._free_us = max(self._free_us, now_us - _DEBT_US_MAX) + size * 1_000_000 // self._bytes_per_s
            self._commits.sync(copy)

    def _reset_attempts(self, copy: Copy) -> None:
        """Reset the attempts after a peer helped: the next one starts with the first peer."""
        self._tried.pop(copy.tags, None)
        self._gave_up_us.pop(copy.tags, None)

    def _try_next_peer(self, copy: Copy, source: _Source, tried: int, result: object) -> None:
        """Record that this peer could not help, so that the next one is tried."""
        if (reader := self._readers.pop(source, None)) is not None:
            reader.close()
        if isinstance(result, Exception):
            self._journal.note("a peer's copy can't be used", peer=source.member.replica, reason=str(result))
        self._tried[copy.tags] = _Tried(tried + 1, 0)

    def _give_up(self, copy: Copy, now_us: int, reason: str) -> None:
        """Give up for now. A peer may return, or be repaired; and the fabric may have the records after all."""
        copy.behind = False
        self._tried[copy.tags] = _Tried(0, now_us + _TRY_AGAIN_US)
        self._gave_up_us[copy.tags] = now_us
        self._journal.warn(
            "can't complete a copy",
            lane=copy.tags[0],
            range=copy.tags[1],
            has=copy.log.end,
            reason=reason,
        )
        self._on_give_up(copy)

    def close(self) -> None:
        """Close peers' files."""
        while self._readers:
            self._readers.popitem()[1].close()


class Scrubber:
    """Scrubs old files, a piece at a time, when the replica is idle; sometimes also when it is never idle."""

    def __init__(self, context: ReplicaContext, ranges: RangeCopies, on_change: Callable[[], None]) -> None:
        """`on_change` is called when a copy is damaged, or its folder is missing."""
        env = context.env
        self._workers, self._journal, self._counters = env.workers, env.journal, context.counters
        self._ranges, self._on_change = ranges, on_change
        self._scrub = Scrub(env.clock, context.config.replica.scrub_bytes_per_s)
        self._under_way, self._busy_us, self._scrubbed_us = False, 0, env.clock.now_us()

    def step(self, now_us: int, idle: bool) -> None:
        """Scrub the next piece, if it is due and the replica was idle."""
        if not idle:
            self._busy_us = now_us
        rested = now_us - self._busy_us >= _IDLE_US or now_us - self._scrubbed_us >= _SCRUB_ANYWAY_US
        if self._under_way or not rested or not self._scrub.due or self._ranges.opening:
            return
        self._under_way, self._scrubbed_us = True, now_us
        copies = [copy for copy in self._ranges.copies.values() if copy.whole and not copy.busy]
        job = self._scrub.job([copy.log for copy in copies])
        for copy in copies:
            copy.scrubbing = copy.log is self._scrub.log
        self._workers.run(job, partial(self._ended, copies))

    def _ended(self, copies: list[Copy], result: list[Found] | Exception) -> None:
        self._under_way = False
        for copy in copies:
            copy.scrubbing = False
        if isinstance(result, Exception):
            self._journal.warn("scrub failed", reason=str(result))
            return
        self._counters.scrubbed_bytes = self._scrub.checked_bytes
        try:
            damage = self._scrub.note([copy.log for copy in copies], result)
        except EmbarcaderoError as error:
            gone = self._ranges.miss_folders()
            self._on_change()
            if not gone:
                self._journal.warn("scrub failed", reason=str(error))
            return
        if damage:
            self._counters.damage_found += len(damage)
            self._journal.warn("damage found by scrub", pieces=len(damage), where=damage[0].name)
            for copy in self._ranges.copies.values():
                copy.complete &= not copy.log.damage
            self._on_change()
