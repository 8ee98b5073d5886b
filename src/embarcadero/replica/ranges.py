"""Which ranges this replica has, and which it must have.

An open range that names this incarnation is followed. An open range that names an earlier incarnation with this very
disk is kept as it is, and how far it goes is told: after a loss of the fabric these are the replies by which the lane's
end is found. One that names another disk of the same number says nothing: the records were on a disk that is gone. Once
the end is known it is filled again, so that there are enough copies to seal it. A sealed range is cut above its end and
completed from other replicas' files. What is no more ours is removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from embarcadero.env import NO_STEPS, Clock, Disk, Journal, Missing, Steps
from embarcadero.errors import BadSegment, DiskFailed, EmbarcaderoError
from embarcadero.fabric.tagged import Tags
from embarcadero.replica.copies import Copy
from embarcadero.replica.counters import ReplicaCounters
from embarcadero.replica.health import Health
from embarcadero.steps import Step
from embarcadero.storage.layout import begun_range, lane_folder, range_folder, repair_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.recovery import remove_range
from embarcadero.storage.writing import Damage, DamageKind, RangeSettings
from embarcadero.types import Range, ReplicaMember

_LANE: Final = re.compile(r"lane-(\d{10})", re.ASCII)
_RANGE: Final = re.compile(r"range-(\d{10})", re.ASCII)
_REMOVE_AGAIN_US: Final = 1_000_000
_NO_RANGE: Final = 0
"""Ranges count from 1: this one stands for what lies beside the ranges of a lane."""


def tags_of(range_: Range) -> Tags:
    """How a range is called in tables."""
    return range_.lane, range_.number


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


class Ranges:
    """All copies of this replica. Opening, cutting and removing happen a little at a time."""

    def __init__(
        self, disk: Disk, member: ReplicaMember, settings: RangeSettings, clock: Clock, health: Health,
        journal: Journal, counters: ReplicaCounters, steps: Steps = NO_STEPS,
    ) -> None:  # fmt: skip
        self._steps = steps
        self._disk, self._me, self._settings, self._clock = disk, member, settings, clock
        self._health, self._journal, self._counters = health, journal, counters
        self.copies: dict[Tags, Copy] = {}
        self.adopted: dict[Tags, int] = {}  # ranges that we complete in place of another replica, by its number
        self.refilled: set[Tags] = set()  # open ranges of a disk that is gone, whose end is known: copied onto this one
        self._trims: dict[int, int] = {}
        self._wanted: dict[Tags, Range] = {}  # to be opened
        self._leaving: list[Copy] = []  # to be closed and removed, once no worker has them
        self._on_disk = set(self._folders())
        self._surplus: list[Tags] = []  # folders to be removed
        self._remove_us = 0  # not before: that failed
        self._doubts: dict[Tags, int] = {}  # copies closed after a failed sync -> up to where they are to be trusted
        self.folder_gone: Callable[[int], None] = lambda _lane: None  # told of lanes whose checkpoints may be gone

    def _folders(self) -> Iterator[Tags]:
        """Copies that are here, or were once. The folder of a lane without ranges is listed as its range 0.

        A crash after the last range of a lane was removed leaves that folder, with session checkpoints in it.
        """
        yield from filter(None, map(begun_range, self._disk.list("")))
        for lane in filter(None, map(_LANE.fullmatch, self._disk.list(""))):
            numbers = [int(number[1]) for number in filter(None, map(_RANGE.fullmatch, self._disk.list(lane[0])))]
            yield from ((int(lane[1]), number) for number in numbers or [_NO_RANGE])

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

    def _is_open_here(self, tags: Tags) -> bool:
        """Whether a worker may still be busy with a copy that was given up: nobody else may have its folder."""
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

    def _open(self, tags: Tags, range_: Range) -> None:
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
        """Begin copies anew whose folders somebody removed; returns how many. Peers have the records.

        What such a copy told about an open range stays told, so it lacks a tail until it reaches that far again.
        """
        gone = [copy for copy in self.copies.values() if not copy.busy and self._is_gone(copy)]
        for copy in gone:
            self._journal.warn("a folder is gone", lane=copy.tags[0], range=copy.tags[1], has=copy.log.synced)
            self._counters.damage_found += 1
            self.folder_gone(copy.tags[0])
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
        """Nobody needs what is below."""
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

    def _failed(self, tags: Tags, error: Exception, doing: str) -> None:
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

    def _remove_folder(self, tags: Tags) -> None:
        folder, lane = range_folder(*tags), lane_folder(tags[0])
        remove_range(self._disk, repair_folder(folder))  # first: without its range nobody would look for it
        remove_range(self._disk, folder)
        ours = self._on_disk | self._wanted.keys() | self.copies.keys()
        if not any(other[0] == tags[0] for other in ours - {tags}):
            with suppress(Missing):
                for name in self._disk.list(lane):
                    self._disk.remove(f"{lane}/{name}")
            self.folder_gone(tags[0])
            with suppress(DiskFailed):
                self._disk.remove_folder(lane)

    def close(self) -> None:
        """Let go of all files."""
        for copy in [*self.copies.values(), *self._leaving]:
            with suppress(EmbarcaderoError):
                copy.log.close()
