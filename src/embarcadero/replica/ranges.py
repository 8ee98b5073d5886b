"""The ranges that this replica has, and the ones it must have.

An open range that names this incarnation is followed. An open range that names an earlier incarnation with this disk is
kept unchanged, and its end is published: after a loss of the fabric, these lines determine the lane's end. For an open
range that names another disk of the same replica number, this replica publishes nothing, because the records were on a
lost disk. Once the end is known, the range is copied again, so that enough copies exist to seal it. A sealed range is
cut at its end and completed from other replicas' files. Ranges that no longer belong here are removed.

Some ranges must move to another disk: sealed ones of a drained or dead replica, and all ranges of a wiped disk.

Each replica looks for sealed ranges that name a replica which is drained, or which has been dead for
`placement.replace_after_s` by the local clock. It takes those for which the usual choice selects this replica: it
copies the range from peers. Once the whole copy is synced here, the store's record names this replica instead.

A few ranges are copied at a time. If no replica's files have the records of one, and this replica has none of them, it
drops the range and retries later, first soon and then rarely, so that other ranges make progress. A copy that has some
records stays: they may be the last ones in existence. While no source has its missing records, it does not count among
the few.

An open range that names a lost disk of this replica is copied when the sequencer, while recovering its lane, publishes
the end. The range is sealed only when enough disks have it, and perhaps too few others remain. Such a copy's line is
not an answer about where the range ends: the sequencer recognizes it by the disk's id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from embarcadero.env import Missing
from embarcadero.errors import BadSegment, DiskFailed, EmbarcaderoError
from embarcadero.replica.copies import Copy, ReplicaContext
from embarcadero.steps import Step
from embarcadero.storage.layout import begun_range, lane_folder, range_folder, repair_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.recovery import remove_range
from embarcadero.storage.segment import Damage, DamageKind, RangeSettings
from embarcadero.types import Range, RangeKey, ReplicaMember, ReplicaState

_LANE: Final = re.compile(r"lane-(\d{10})", re.ASCII)
_RANGE: Final = re.compile(r"range-(\d{10})", re.ASCII)
_REMOVE_AGAIN_US: Final = 1_000_000
_NO_RANGE: Final = 0
"""Ranges count from 1. This number stands for the lane's folder itself."""


def tags_of(range_: Range) -> RangeKey:
    """Return the key of a range."""
    return range_.key


def _cut_unsynced(log: RangeLog, synced: int) -> None:
    """Keep only synced data. If damage prevents that, cut before the damage: the rest that counted is missing."""
    index = min(max(synced, log.first), log.end)
    try:
        log.cut(index)
    except BadSegment:
        base = max(info.base_index for info in log.segments if info.base_index <= index)
        in_the_way = [one.first for one in log.damage if base <= one.first < index]
        if not in_the_way:
            raise
        _cut_from(log, min(in_the_way), synced)


def _cut_from(log: RangeLog, first: int, counted: int) -> None:
    """Cut a log where damage begins. In-place damage above is dropped; data that counted becomes a missing tail."""
    if first < counted:
        log.quarantine(first, counted, DamageKind.TAIL, b"")
    log.cut(first)
    for one in [one for one in log.damage if one.first >= first and one.kind is not DamageKind.TAIL]:
        log.healed(one)


class RangeCopies:
    """All copies of this replica. They are opened, cut and removed in small steps."""

    def __init__(self, context: ReplicaContext, folder_gone: Callable[[int], None]) -> None:
        """`folder_gone` is called with lanes whose checkpoints may be missing."""
        env, settings = context.env, context.config.replica
        self._steps, self._clock, self._journal = env.steps, env.clock, env.journal
        self._disk, self._me = context.disk, context.member
        self._health, self._counters, self._folder_gone = context.health, context.counters, folder_gone
        self._settings = RangeSettings(
            cluster=context.directory.log_id, segment_bytes=settings.segment_bytes, segment_age_s=settings.segment_s
        )
        self.copies: dict[RangeKey, Copy] = {}
        self.adopted: dict[RangeKey, int] = {}  # ranges that this replica completes for another one: that one's number
        self.refilled: set[RangeKey] = set()  # open ranges of a lost disk with a known end: copied onto this disk
        self._trims: dict[int, int] = {}
        self._wanted: dict[RangeKey, Range] = {}  # to be opened
        self._leaving: list[Copy] = []  # to be closed and removed once no worker uses them
        self._on_disk = set(self._folders())
        self._surplus: list[RangeKey] = []  # folders to remove
        self._remove_us = 0  # after a failure: no removal before this time
        self._doubts: dict[RangeKey, int] = {}  # copies closed after a failed sync -> end of their trusted part

    def _folders(self) -> Iterator[RangeKey]:
        """Yield copies that exist here, or once did. The folder of a lane without ranges is listed as its range 0.

        A crash after the last range of a lane was removed leaves that folder, with session checkpoints in it.
        """
        yield from filter(None, map(begun_range, self._disk.list("")))
        for lane in filter(None, map(_LANE.fullmatch, self._disk.list(""))):
            numbers = [int(number[1]) for number in filter(None, map(_RANGE.fullmatch, self._disk.list(lane[0])))]
            yield from (RangeKey(int(lane[1]), number) for number in numbers or [_NO_RANGE])

    # --- changes in the store -----------------------------------------------------------------------------------------
    def update(self, ranges: list[Range], trims: dict[int, int]) -> None:
        """Update the ranges of the store, and the starts of lanes."""
        self._trims = trims
        mine = {tags_of(range_): range_ for range_ in ranges if self._is_mine(range_)}
        for tags in [tags for tags in self.copies if tags not in mine]:
            self._leaving.append(self.copies.pop(tags))
        self._surplus = [tags for tags in self._on_disk if tags not in mine and not self._is_open_here(tags)]
        self._wanted = {tags: range_ for tags, range_ in mine.items() if tags not in self.copies}
        self._doubts = {tags: synced for tags, synced in self._doubts.items() if tags in mine}
        self._health.keep({*mine, *(copy.tags for copy in self._leaving)})
        for tags, copy in self.copies.items():
            copy.range_ = mine[tags]
        for tags, range_ in list(self._wanted.items()):
            if range_.open and not self._is_open_here(tags):
                self._open(tags, range_)

    def _is_mine(self, range_: Range) -> bool:
        if tags_of(range_) in self.adopted:
            return not range_.open
        mine = next((ref for ref in range_.replicas if ref.replica == self._me.replica), None)
        if mine is None:
            return False
        if not range_.open or mine.disk == self._me.disk:
            return True
        return tags_of(range_) in self.refilled

    def _is_open_here(self, tags: RangeKey) -> bool:
        """Return whether a worker may still use a removed copy. Its folder must not be used yet."""
        return any(copy.tags == tags for copy in self._leaving)

    def follows(self, copy: Copy) -> bool:
        """Return whether a copy grows with its lane: its range is open, and names this incarnation."""
        return copy.range_.open and self._me.ref in copy.range_.replicas

    @property
    def opening(self) -> int:
        """Number of copies to open."""
        return len(self._wanted)

    # --- small steps --------------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Open, repair or remove one copy. Returns whether there was one."""
        now_us = self._clock.now_us()
        for tags, range_ in self._wanted.items():
            if self._health.may_try(tags, now_us) and not self._is_open_here(tags):
                self._open(tags, range_)
                return True
        return self._restart_doubtful(now_us) or self._remove_one()

    def _open(self, tags: RangeKey, range_: Range) -> None:
        self._on_disk.add(tags)  # even if it fails: the folder may exist
        try:
            log = self._recover(range_)
        except EmbarcaderoError as error:
            self._failed(tags, error, "open")
            return
        del self._wanted[tags]
        self._health.worked(tags)
        self.copies[tags] = Copy(range_, log)
        if log.damage:
            self._counters.damage_found += len(log.damage)
            self._journal.warn("damage found", lane=tags[0], range=tags[1], pieces=len(log.damage))

    def _recover(self, range_: Range) -> RangeLog:
        """Open or create a copy. Data that a failed sync left in doubt is cut, even if it looks valid."""
        folder, tags = range_folder(*tags_of(range_)), tags_of(range_)
        log = RangeLog.recover(self._disk, folder, *tags, range_.start, range_.start_seq, self._settings)
        if (synced := self._doubts.get(tags)) is not None:
            try:
                _cut_unsynced(log, synced)
            except EmbarcaderoError:
                with suppress(EmbarcaderoError):
                    log.close()
                raise
            del self._doubts[tags]
        return log

    def _restart_doubtful(self, now_us: int) -> bool:
        """Continue from the last synced data after a failed sync."""
        for copy in self.copies.values():
            if copy.doubtful and not copy.busy and self._health.may_try(copy.tags, now_us):
                synced = copy.log.synced
                try:
                    copy.log.cut(synced)
                except EmbarcaderoError as error:
                    self._failed(copy.tags, error, "cut")
                    self._reopen(copy, synced)
                else:
                    copy.behind = False
                return True
        return False

    def _reopen(self, copy: Copy, synced: int) -> None:
        """Close a copy after a failed step. The next try starts from the files, and trusts only the synced part."""
        with suppress(EmbarcaderoError):
            copy.log.close()
        self._doubts[copy.tags] = synced
        del self.copies[copy.tags]
        self._wanted[copy.tags] = copy.range_

    def miss_folders(self) -> int:
        """Start copies again whose folders were removed externally. Returns how many. Peers have the records.

        The published line of an open range stays valid, so such a copy lacks a tail until it reaches that line again.
        """
        gone = [copy for copy in self.copies.values() if not copy.busy and self._is_gone(copy)]
        for copy in gone:
            self._journal.warn("a folder is missing", lane=copy.tags[0], range=copy.tags[1], has=copy.log.synced)
            self._counters.damage_found += 1
            self._folder_gone(copy.tags[0])
            synced = copy.log.synced
            with suppress(EmbarcaderoError):
                copy.log.close()
            try:
                copy.log, copy.complete = self._recover(copy.range_), False
                if copy.range_.open:
                    copy.log.quarantine(copy.range_.start, synced, DamageKind.TAIL, b"")
            except EmbarcaderoError as error:
                self._failed(copy.tags, error, "create again")
                del self.copies[copy.tags]
                self._wanted[copy.tags] = copy.range_
        return len(gone)

    def _is_gone(self, copy: Copy) -> bool:
        with suppress(EmbarcaderoError):
            return not self._disk.exists(range_folder(*copy.tags))
        return False

    def trimmed(self, lane: int) -> int:
        """Return the index at which a lane starts. Lower entries are not needed."""
        return self._trims.get(lane, 0)

    def begin_at(self, copy: Copy, index: int, seq: int) -> bool:
        """Continue this copy where a peer's copy begins, if everything between is trimmed.

        The peer's files alone are no proof: its first files may merely be missing.
        """
        range_, trimmed = copy.range_, self.trimmed(copy.tags[0])
        if not copy.log.end < index <= trimmed or (range_.end is not None and index > range_.end):
            return False
        try:
            copy.log.begin_at(index, seq)
            copy.behind = False
        except EmbarcaderoError as error:
            self._failed(copy.tags, error, "create again")
            del self.copies[copy.tags]
            self._wanted[copy.tags] = range_
        return True

    def accept_loss(self, copy: Copy) -> bool:
        """Keep the undamaged part of a copy, as an operator decided, and forget the rest. False if a write failed."""
        inside = [damage.first for damage in copy.log.damage if damage.kind is not DamageKind.TAIL]
        try:
            copy.log.cut(min([*inside, copy.log.end]))
            for damage in list(copy.log.damage):
                copy.log.healed(damage)
        except EmbarcaderoError as error:
            self._failed(copy.tags, error, "cut")
            return False
        self._journal.warn("loss accepted", lane=copy.tags[0], range=copy.tags[1], has=copy.log.end)
        return True

    def _failed(self, tags: RangeKey, error: Exception, doing: str) -> None:
        self._counters.disk_errors += 1
        self._health.failed(tags, error, doing, self._clock.now_us())

    def settle(self, copy: Copy) -> None:
        """Cut a sealed range at its end, and finish it once it is complete."""
        end = copy.range_.end
        if end is None or copy.complete or copy.busy or not copy.whole:
            return
        if not self._health.may_try(copy.tags, self._clock.now_us()):
            return
        self._steps.at(Step.REPLICA_SEALING)
        try:
            if copy.log.end > end:
                copy.log.cut(end)
            if copy.log.end == end and not copy.log.dirty:
                copy.log.seal(end)
                copy.complete = True
                self._health.worked(copy.tags)
                self._steps.at(Step.REPLICA_SEALED)
        except EmbarcaderoError as error:
            self._failed(copy.tags, error, "seal")
            self._reopen(copy, copy.log.synced)

    def cut_damaged_end(self, copy: Copy, damage: Damage, end: int) -> None:
        """Cut damage that extends past the decided end of a range: no peer has all of it, so it is copied again.

        While the range is open, the copy publishes nothing until it reaches that end again: its damaged part may have
        counted.
        """
        try:
            _cut_from(copy.log, damage.first, end if copy.range_.open else damage.first)
        except EmbarcaderoError as error:
            self._failed(copy.tags, error, "cut")
            self._reopen(copy, copy.log.synced)

    def _remove_one(self) -> bool:
        for copy in self._leaving:
            if not copy.busy:
                self._leaving.remove(copy)
                with suppress(EmbarcaderoError):
                    copy.log.close()
                if copy.tags not in self._wanted:  # this replica may need it again by now
                    self._surplus.append(copy.tags)
                self._health.worked(copy.tags)
                return True
        if not self._surplus or self._clock.now_us() < self._remove_us:
            return False
        tags = self._surplus.pop(0)
        try:
            self._remove_folder(tags)
        except EmbarcaderoError as error:
            self._journal.warn("can't remove a range", lane=tags[0], range=tags[1], reason=str(error))
            self._surplus.append(tags)
            self._remove_us = self._clock.now_us() + _REMOVE_AGAIN_US
        else:
            self._on_disk.discard(tags)
            if tags[1] == _NO_RANGE:
                self._journal.note("leftovers of a lane removed", lane=tags[0])
            else:
                self._counters.ranges_removed += 1
                self._journal.note("range removed", lane=tags[0], range=tags[1])
        return True

    def _remove_folder(self, tags: RangeKey) -> None:
        folder, lane = range_folder(*tags), lane_folder(tags[0])
        remove_range(self._disk, repair_folder(folder))  # first: it would not be found without its range
        remove_range(self._disk, folder)
        kept = self._on_disk | self._wanted.keys() | self.copies.keys()
        if not any(other[0] == tags[0] for other in kept - {tags}):
            with suppress(Missing):
                for name in self._disk.list(lane):
                    self._disk.remove(f"{lane}/{name}")
            self._folder_gone(tags[0])
            with suppress(DiskFailed):
                self._disk.remove_folder(lane)

    def close(self) -> None:
        """Close all files."""
        for copy in [*self.copies.values(), *self._leaving]:
            with suppress(EmbarcaderoError):
                copy.log.close()


_LOOK_US: Final = 500_000
_AT_ONCE: Final = 4
"""Ranges that one replica takes over at a time. Other replicas may take the rest meanwhile."""
_AGAIN_US_FIRST: Final = 1_000_000
_AGAIN_US_MAX: Final = 60_000_000


class _Failure(NamedTuple):
    """A range that no source could provide: time of the next try, and the wait after the next failure."""

    again_us: int
    wait_us: int


_NO_FAILURE: Final = _Failure(0, _AGAIN_US_FIRST)


class Moving:
    """Takes over ranges that must move to this replica."""

    def __init__(self, context: ReplicaContext, ranges: RangeCopies) -> None:
        self._replace_after_us = int(context.config.placement.replace_after_s * 1_000_000)
        self._dead: set[int] = set()
        self._dead_since_us: dict[int, int] = {}
        self._drained: set[int] = set()
        self._ranges, self._leader, self._directory = ranges, context.leader, context.directory
        self._me, self._journal = context.member, context.env.journal
        self._sealed: list[Range] = []
        self._bereft: list[Range] = []  # open ranges that name a lost disk of this replica
        self._leaving: set[int] = set()
        self._unrecorded: dict[RangeKey, Copy] = {}  # complete copies that the store has not recorded yet
        self._look_us = 0
        self._members: list[ReplicaMember] = []
        self._stalled: dict[RangeKey, int] = {}  # adopted ranges that no source can provide -> ends of their copies
        self._failures: dict[RangeKey, _Failure] = {}  # ranges that were dropped for this

    def update(self, members: list[ReplicaMember], ranges: list[Range]) -> None:
        """Update the known replicas and ranges."""
        if members != self._members:  # a returning replica may have the missing records: retry immediately
            self._failures = {tags: failure._replace(again_us=0) for tags, failure in self._failures.items()}
            self._members = members
        newest = {member.replica: member for member in members}
        self._dead = {n for n, member in newest.items() if member.state is ReplicaState.DEAD}
        self._drained = self._directory.replicas.draining()
        self._sealed = [range_ for range_ in ranges if not range_.open]
        self._bereft = [range_ for range_ in ranges if range_.open and self._names_lost_disk(range_)]
        self._ranges.refilled.intersection_update(map(tags_of, self._bereft))
        known = {tags_of(range_): range_ for range_ in self._sealed}
        for tags, old in list(self._ranges.adopted.items()):
            range_ = known.get(tags)
            if range_ is None or all(ref.replica != old for ref in range_.replicas):
                del self._ranges.adopted[tags]
        self._stalled = {tags: end for tags, end in self._stalled.items() if tags in self._ranges.adopted}
        self._failures = {tags: failure for tags, failure in self._failures.items() if tags in known}

    def _names_lost_disk(self, range_: Range) -> bool:
        return any(ref.replica == self._me.replica and ref.disk != self._me.disk for ref in range_.replicas)

    def look(self, now_us: int) -> bool:
        """Decide which ranges belong here. True if that changed: copies must be opened or removed."""
        refill = {tags_of(range_) for range_ in self._bereft if self._leader.asked(range_)} - self._ranges.refilled
        self._ranges.refilled.update(refill)
        if now_us < self._look_us:
            return bool(refill)
        self._look_us = now_us + _LOOK_US
        self._dead_since_us = {n: self._dead_since_us.get(n, now_us) for n in self._dead}
        due_us = now_us - self._replace_after_us
        self._leaving = self._drained | {n for n, since_us in self._dead_since_us.items() if since_us <= due_us}
        self._record_again()
        dropped = self._drop_empty(now_us)
        return self._take_over(now_us) or dropped or bool(refill)

    def gave_up(self, copy: Copy) -> None:
        """Note that no replica in the store could provide the missing records of this copy."""
        if copy.tags in self._ranges.adopted:
            self._stalled[copy.tags] = copy.log.end

    def _drop_empty(self, now_us: int) -> bool:
        """Drop adopted ranges that no source can provide, unless some of their records are here."""
        before = len(self._ranges.adopted)
        for tags, end in list(self._stalled.items()):
            copy = self._ranges.copies.get(tags)
            if copy is None or copy.log.end > end:
                del self._stalled[tags]  # it made progress
            elif copy.log.end == copy.log.first and not copy.log.damage and not copy.complete:
                wait_us = self._failures.get(tags, _NO_FAILURE).wait_us
                self._failures[tags] = _Failure(now_us + wait_us, min(2 * wait_us, _AGAIN_US_MAX))
                del self._stalled[tags], self._ranges.adopted[tags]
        return len(self._ranges.adopted) < before

    def _take_over(self, now_us: int) -> bool:
        """Adopt sealed ranges of replicas that are drained, or long dead, if the choice selects this replica.

        Ranges without a failure come first, then those that have waited longest.
        """
        if not self._leaving or self._me.replica in self._leaving:
            return False
        before = len(self._ranges.adopted)
        for range_, old in self._candidates(now_us):
            if len(self._ranges.adopted) - len(self._stalled) >= _AT_ONCE:
                break
            chosen = self._directory.replicas.choose(1, avoid={ref.replica for ref in range_.replicas})
            if chosen and chosen[0].replica == self._me.replica:
                self._ranges.adopted[tags_of(range_)] = old
        return len(self._ranges.adopted) > before

    def _candidates(self, now_us: int) -> list[tuple[Range, int]]:
        """Return the sealed ranges to adopt now, each with the replica that it leaves."""
        found = list[tuple[int, Range, int]]()
        for range_ in self._sealed:
            old = min({ref.replica for ref in range_.replicas} & self._leaving, default=None)
            again_us = self._failures.get(tags_of(range_), _NO_FAILURE).again_us
            if old is not None and again_us <= now_us and tags_of(range_) not in self._ranges.adopted:
                found.append((again_us, range_, old))
        return [(range_, old) for _, range_, old in sorted(found, key=lambda one: one[0])]

    def _record_again(self) -> None:
        """Retry to record complete copies that still exist in the store."""
        unrecorded, self._unrecorded = self._unrecorded, {}
        for tags, copy in unrecorded.items():
            if copy.complete and self._ranges.copies.get(tags) is copy:
                self.completed(copy)

    def completed(self, copy: Copy) -> None:
        """Record a complete copy in the store if the store names another disk for it. A failure is retried."""
        range_ = copy.range_
        old = self._ranges.adopted.get(copy.tags)
        mine = next((ref for ref in range_.replicas if ref.replica == self._me.replica), None)
        if old is None and (mine is None or mine.disk == self._me.disk):
            return
        try:
            self._directory.ranges.replace_in_sealed(*copy.tags, self._me.replica if old is None else old, self._me.ref)
        except EmbarcaderoError as error:
            self._unrecorded[copy.tags] = copy
            self._journal.warn("can't record a copy", lane=copy.tags[0], range=copy.tags[1], reason=str(error))
        else:
            self._journal.note("copy completed", lane=copy.tags[0], range=copy.tags[1], instead_of=old)
