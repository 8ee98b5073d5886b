"""Which ranges this replica has, and which it must have.

An open range that names this incarnation is followed. An open range that names an earlier incarnation with this very
disk is kept as it is, and how far it goes is told: after a loss of the fabric these are the replies by which the lane's
end is found. One that names another disk of the same number says nothing: the records were on a disk that is gone. Once
the end is known it is filled again, so that there are enough copies to seal it. A sealed range is cut above its end and
completed from other replicas' files. What is no more ours is removed.

Ranges that shall be on another disk: sealed ones of a replica that is drained or dead, and all of a wiped disk.

Each replica looks for sealed ranges that name a replica which is drained, or which has been dead for
`placement.replace_after_s` by its own clock. It takes those for which the usual choice falls on itself: it copies the
range from peers, and once the whole copy is synced here, the range's record in the store names this replica instead.

A few ranges are copied at a time. If no replica's files have the records of one, and nothing of it is here, the replica
drops it and tries again later, first soon and then rarely, so that the other ranges get their turn. A copy that has
some records stays: they may be the last ones there are. While no source has the rest it does not count among the few.

An open range that names a disk of ours which is gone is copied when the sequencer, recovering its lane, says where it
ends: it is sealed only when enough disks have it, and perhaps too few others are left. How far such a copy goes is no
reply to the question where the range ends; the sequencer knows by the disk's id.
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
"""Ranges count from 1: this one stands for what lies beside the ranges of a lane."""


def tags_of(range_: Range) -> RangeKey:
    """How a range is called in tables."""
    return range_.key


def _cut_doubts(log: RangeLog, synced: int) -> None:
    """Keep only what was synced. If damage is in the way, only what is before it: the rest that counted is missing."""
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
    """Cut a log where damage begins: what is to be mended in place goes. What had counted is a tail that is missing."""
    if first < counted:
        log.quarantine(first, counted, DamageKind.TAIL, b"")
    log.cut(first)
    for one in [one for one in log.damage if one.first >= first and one.kind is not DamageKind.TAIL]:
        log.healed(one)


class RangeCopies:
    """All copies of this replica. Opening, cutting and removing happen a little at a time."""

    def __init__(self, context: ReplicaContext, folder_gone: Callable[[int], None]) -> None:
        """`folder_gone` is told of lanes whose checkpoints may be gone."""
        env, settings = context.env, context.config.replica
        self._steps, self._clock, self._journal = env.steps, env.clock, env.journal
        self._disk, self._me = context.disk, context.member
        self._health, self._counters, self._folder_gone = context.health, context.counters, folder_gone
        self._settings = RangeSettings(
            cluster=context.directory.log_id, segment_bytes=settings.segment_bytes, segment_age_s=settings.segment_s
        )
        self.copies: dict[RangeKey, Copy] = {}
        self.adopted: dict[RangeKey, int] = {}  # ranges that we complete in place of another replica, by its number
        self.refilled: set[RangeKey] = set()  # open ranges of a lost disk, whose end is known: copied onto this one
        self._trims: dict[int, int] = {}
        self._wanted: dict[RangeKey, Range] = {}  # to be opened
        self._leaving: list[Copy] = []  # to be closed and removed, once no worker has them
        self._on_disk = set(self._folders())
        self._surplus: list[RangeKey] = []  # folders to be removed
        self._remove_us = 0  # not before: that failed
        self._doubts: dict[RangeKey, int] = {}  # copies closed after a failed sync -> up to where they are trusted

    def _folders(self) -> Iterator[RangeKey]:
        """Copies that are here, or were once. The folder of a lane without ranges is listed as its range 0.

        A crash after the last range of a lane was removed leaves that folder, with session checkpoints in it.
        """
        yield from filter(None, map(begun_range, self._disk.list("")))
        for lane in filter(None, map(_LANE.fullmatch, self._disk.list(""))):
            numbers = [int(number[1]) for number in filter(None, map(_RANGE.fullmatch, self._disk.list(lane[0])))]
            yield from (RangeKey(int(lane[1]), number) for number in numbers or [_NO_RANGE])

    # --- what the store says ------------------------------------------------------------------------------------------
    def update(self, ranges: list[Range], trims: dict[int, int]) -> None:
        """Take note of all ranges of the store, and of where lanes start."""
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
        """Whether a worker may still be busy with a copy that was given up: its folder may not be used yet."""
        return any(copy.tags == tags for copy in self._leaving)

    def follows(self, copy: Copy) -> bool:
        """Whether a copy grows with its lane: its range is open, and names this incarnation."""
        return copy.range_.open and self._me.ref in copy.range_.replicas

    @property
    def opening(self) -> int:
        """How many copies are still to be opened."""
        return len(self._wanted)

    # --- a little at a time -------------------------------------------------------------------------------------------
    def step(self) -> bool:
        """Open, mend or remove one thing. True if something was done."""
        now_us = self._clock.now_us()
        for tags, range_ in self._wanted.items():
            if self._health.may_try(tags, now_us) and not self._is_open_here(tags):
                self._open(tags, range_)
                return True
        return self._restart_doubtful(now_us) or self._remove_one()

    def _open(self, tags: RangeKey, range_: Range) -> None:
        self._on_disk.add(tags)  # also if it fails: some of it may be there
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
        """Open a copy, or begin one. What a failed sync left in doubt is cut, though it looks well."""
        folder, tags = range_folder(*tags_of(range_)), tags_of(range_)
        log = RangeLog.recover(self._disk, folder, *tags, range_.start, range_.start_seq, self._settings)
        if (synced := self._doubts.get(tags)) is not None:
            try:
                _cut_doubts(log, synced)
            except EmbarcaderoError:
                with suppress(EmbarcaderoError):
                    log.close()
                raise
            del self._doubts[tags]
        return log

    def _restart_doubtful(self, now_us: int) -> bool:
        """After a sync failed: begin again from what was synced before."""
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
        """Something failed half-way: the next try begins with what is on disk, and trusts no more of it."""
        with suppress(EmbarcaderoError):
            copy.log.close()
        self._doubts[copy.tags] = synced
        del self.copies[copy.tags]
        self._wanted[copy.tags] = copy.range_

    def miss_folders(self) -> int:
        """Begin copies anew whose folders were removed from outside; returns how many. Peers have the records.

        What such a copy told about an open range stays told, so it lacks a tail until it reaches that far again.
        """
        gone = [copy for copy in self.copies.values() if not copy.busy and self._is_gone(copy)]
        for copy in gone:
            self._journal.warn("a folder is gone", lane=copy.tags[0], range=copy.tags[1], has=copy.log.synced)
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
                self._failed(copy.tags, error, "begin again")
                del self.copies[copy.tags]
                self._wanted[copy.tags] = copy.range_
        return len(gone)

    def _is_gone(self, copy: Copy) -> bool:
        with suppress(EmbarcaderoError):
            return not self._disk.exists(range_folder(*copy.tags))
        return False

    def trimmed(self, lane: int) -> int:
        """The index at which a lane starts: what is below is not needed."""
        return self._trims.get(lane, 0)

    def begin_at(self, copy: Copy, index: int, seq: int) -> bool:
        """Another copy begins later than this one ends: since what was before is trimmed, this one begins there too.

        A peer's word is not enough: its first files may just be gone.
        """
        range_, trimmed = copy.range_, self.trimmed(copy.tags[0])
        if not copy.log.end < index <= trimmed or (range_.end is not None and index > range_.end):
            return False
        try:
            copy.log.begin_at(index, seq)
            copy.behind = False
        except EmbarcaderoError as error:
            self._failed(copy.tags, error, "begin again")
            del self.copies[copy.tags]
            self._wanted[copy.tags] = range_
        return True

    def accept_loss(self, copy: Copy) -> bool:
        """An operator's word: go on with what is whole, and forget what came after it. False if it did not work."""
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
        """A sealed range: cut what is above its end, and finish it once it is all there."""
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
        """Damage that goes on above the end of a range, as it is decided: no peer has all of it. It is copied anew.

        While the range is open the copy says nothing until it reaches that end again: what it had may have counted.
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
                if copy.tags not in self._wanted:  # it may be ours again since
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
        remove_range(self._disk, repair_folder(folder))  # first: without its range it would not be looked for
        remove_range(self._disk, folder)
        ours = self._on_disk | self._wanted.keys() | self.copies.keys()
        if not any(other[0] == tags[0] for other in ours - {tags}):
            with suppress(Missing):
                for name in self._disk.list(lane):
                    self._disk.remove(f"{lane}/{name}")
            self._folder_gone(tags[0])
            with suppress(DiskFailed):
                self._disk.remove_folder(lane)

    def close(self) -> None:
        """Let go of all files."""
        for copy in [*self.copies.values(), *self._leaving]:
            with suppress(EmbarcaderoError):
                copy.log.close()


_LOOK_US: Final = 500_000
_AT_ONCE: Final = 4
"""Ranges that one replica takes over at a time; the others may fall to other replicas meanwhile."""
_AGAIN_US_FIRST: Final = 1_000_000
_AGAIN_US_MAX: Final = 60_000_000


class _Failure(NamedTuple):
    """A range that no source could help with: when to try again, and how long to wait after the next failure."""

    again_us: int
    wait_us: int


_NO_FAILURE: Final = _Failure(0, _AGAIN_US_FIRST)


class Moving:
    """What this replica does about it."""

    def __init__(self, context: ReplicaContext, ranges: RangeCopies) -> None:
        self._replace_after_us = int(context.config.placement.replace_after_s * 1_000_000)
        self._dead: set[int] = set()
        self._dead_since_us: dict[int, int] = {}
        self._drained: set[int] = set()
        self._ranges, self._leader, self._directory = ranges, context.leader, context.directory
        self._me, self._journal = context.member, context.env.journal
        self._sealed: list[Range] = []
        self._bereft: list[Range] = []  # open ranges that name a disk of ours which is gone
        self._leaving: set[int] = set()
        self._unrecorded: dict[RangeKey, Copy] = {}  # complete copies that the store did not take yet
        self._look_us = 0
        self._members: list[ReplicaMember] = []
        self._stalled: dict[RangeKey, int] = {}  # adopted ranges that no source can help with -> where their copies end
        self._failures: dict[RangeKey, _Failure] = {}  # ranges that were dropped for it

    def update(self, members: list[ReplicaMember], ranges: list[Range]) -> None:
        """Take note of all replicas and ranges."""
        if members != self._members:  # a replica that came back may have what was missing: try at once
            self._failures = {tags: failure._replace(again_us=0) for tags, failure in self._failures.items()}
            self._members = members
        newest = {member.replica: member for member in members}
        self._dead = {n for n, member in newest.items() if member.state is ReplicaState.DEAD}
        self._drained = self._directory.replicas.draining()
        self._sealed = [range_ for range_ in ranges if not range_.open]
        self._bereft = [range_ for range_ in ranges if range_.open and self._had_it(range_)]
        self._ranges.refilled.intersection_update(map(tags_of, self._bereft))
        known = {tags_of(range_): range_ for range_ in self._sealed}
        for tags, old in list(self._ranges.adopted.items()):
            range_ = known.get(tags)
            if range_ is None or all(ref.replica != old for ref in range_.replicas):
                del self._ranges.adopted[tags]
        self._stalled = {tags: end for tags, end in self._stalled.items() if tags in self._ranges.adopted}
        self._failures = {tags: failure for tags, failure in self._failures.items() if tags in known}

    def _had_it(self, range_: Range) -> bool:
        return any(ref.replica == self._me.replica and ref.disk != self._me.disk for ref in range_.replicas)

    def look(self, now_us: int) -> bool:
        """Decide what shall be here from now on. True if that changed: copies are to be opened, or removed."""
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
        """No replica that the store names has what this copy lacks, as far as could be read just now."""
        if copy.tags in self._ranges.adopted:
            self._stalled[copy.tags] = copy.log.end

    def _drop_empty(self, now_us: int) -> bool:
        """Drop adopted ranges that no source could help with, unless some of their records are here."""
        before = len(self._ranges.adopted)
        for tags, end in list(self._stalled.items()):
            copy = self._ranges.copies.get(tags)
            if copy is None or copy.log.end > end:
                del self._stalled[tags]  # it goes on
            elif copy.log.end == copy.log.first and not copy.log.damage and not copy.complete:
                wait_us = self._failures.get(tags, _NO_FAILURE).wait_us
                self._failures[tags] = _Failure(now_us + wait_us, min(2 * wait_us, _AGAIN_US_MAX))
                del self._stalled[tags], self._ranges.adopted[tags]
        return len(self._ranges.adopted) < before

    def _take_over(self, now_us: int) -> bool:
        """Adopt sealed ranges of replicas that are drained, or dead for long, if the choice falls on this replica.

        Those that never failed come first, then those that have waited longest.
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
        """Sealed ranges to be adopted now, each with the replica that it leaves."""
        found = list[tuple[int, Range, int]]()
        for range_ in self._sealed:
            old = min({ref.replica for ref in range_.replicas} & self._leaving, default=None)
            again_us = self._failures.get(tags_of(range_), _NO_FAILURE).again_us
            if old is not None and again_us <= now_us and tags_of(range_) not in self._ranges.adopted:
                found.append((again_us, range_, old))
        return [(range_, old) for _, range_, old in sorted(found, key=lambda one: one[0])]

    def _record_again(self) -> None:
        """Let the store know of copies that are still here and whole."""
        unrecorded, self._unrecorded = self._unrecorded, {}
        for tags, copy in unrecorded.items():
            if copy.complete and self._ranges.copies.get(tags) is copy:
                self.completed(copy)

    def completed(self, copy: Copy) -> None:
        """A sealed range is all here: let the store know, if it looks for it elsewhere; again, if it is not heard."""
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
