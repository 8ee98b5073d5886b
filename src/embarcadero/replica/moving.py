"""Ranges that shall be on another disk: sealed ones of a replica that is drained or dead, and all of a wiped disk.

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

from typing import Final, NamedTuple

from embarcadero.env import Journal
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.leader import LeaderView
from embarcadero.fabric.tagged import Tags
from embarcadero.placement.directory import Directory
from embarcadero.replica.copies import Copy
from embarcadero.replica.ranges import Ranges, tags_of
from embarcadero.types import Range, ReplicaMember, ReplicaState

_LOOK_US: Final = 500_000
_AT_ONCE: Final = 4
"""Ranges that one replica takes over at a time; the others may fall to somebody else meanwhile."""
_AGAIN_US_FIRST: Final = 1_000_000
_AGAIN_US_MAX: Final = 60_000_000


class _Failure(NamedTuple):
    """A range that no source could help with: when to try again, and how long to wait after the next failure."""

    again_us: int
    wait_us: int


_NO_FAILURE: Final = _Failure(0, _AGAIN_US_FIRST)


class Moving:
    """What this replica does about it."""

    def __init__(
        self, ranges: Ranges, leader: LeaderView, directory: Directory, me: ReplicaMember, journal: Journal,
        replace_after_s: float,
    ) -> None:  # fmt: skip
        self._replace_after_us = int(replace_after_s * 1_000_000)
        self._dead: set[int] = set()
        self._dead_since_us: dict[int, int] = {}
        self._drained: set[int] = set()
        self._ranges, self._leader, self._directory, self._me, self._journal = ranges, leader, directory, me, journal
        self._sealed: list[Range] = []
        self._bereft: list[Range] = []  # open ranges that name a disk of ours which is gone
        self._leaving: set[int] = set()
        self._untold: dict[Tags, Copy] = {}  # complete copies that the store could not be told of yet
        self._look_us = 0
        self._members: list[ReplicaMember] = []
        self._stalled: dict[Tags, int] = {}  # adopted ranges that no source could help with -> where their copies end
        self._failures: dict[Tags, _Failure] = {}  # ranges that were dropped for it

    def update(self, members: list[ReplicaMember], ranges: list[Range]) -> None:
        """Take note of who is there, and of all ranges."""
        if members != self._members:  # a replica that came back may have what was missing: try at once
            self._failures = {tags: failure._replace(again_us=0) for tags, failure in self._failures.items()}
            self._members = members
        newest = {member.replica: member for member in members}
        self._dead = {n for n, member in newest.items() if member.state is ReplicaState.DEAD}
        self._drained = self._directory.draining_replicas()
        self._sealed = [range_ for range_ in ranges if not range_.open]
        self._bereft = [range_ for range_ in ranges if range_.open and self._had_it(range_)]
        self._ranges.refilled &= {tags_of(range_) for range_ in self._bereft}
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
        self._ranges.refilled |= refill
        if now_us < self._look_us:
            return bool(refill)
        self._look_us = now_us + _LOOK_US
        self._dead_since_us = {n: self._dead_since_us.get(n, now_us) for n in self._dead}
        due_us = now_us - self._replace_after_us
        self._leaving = self._drained | {n for n, since_us in self._dead_since_us.items() if since_us <= due_us}
        self._tell_again()
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
            chosen = self._directory.choose_replicas(1, avoid={ref.replica for ref in range_.replicas})
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

    def _tell_again(self) -> None:
        """Let the store know of copies that are still here and whole."""
        untold, self._untold = self._untold, {}
        for tags, copy in untold.items():
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
            self._directory.replace_in_sealed(*copy.tags, self._me.replica if old is None else old, self._me.ref)
        except EmbarcaderoError as error:
            self._untold[copy.tags] = copy
            self._journal.warn("can't record a copy", lane=copy.tags[0], range=copy.tags[1], reason=str(error))
        else:
            self._journal.note("copy completed", lane=copy.tags[0], range=copy.tags[1], instead_of=old)
