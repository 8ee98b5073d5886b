"""Sealed ranges that shall be on another replica: away from one that is drained, back onto a disk that was wiped.

Nobody directs it. Each replica looks for sealed ranges that name a replica on its way out, and takes those for which
the usual choice falls on itself: it copies the range, and once all of it is on its disk the store says so.
"""

from __future__ import annotations

from typing import Final

from embarcadero.env import Journal
from embarcadero.errors import EmbarcaderoError
from embarcadero.placement.directory import Directory
from embarcadero.replica.copies import Copy
from embarcadero.replica.ranges import Ranges, tags_of
from embarcadero.types import Range, ReplicaMember, ReplicaState

_LOOK_US: Final = 500_000
_AT_ONCE: Final = 4
"""Ranges that one replica takes over at a time; the others may fall to somebody else meanwhile."""


class Moving:
    """What this replica does about it."""

    def __init__(self, ranges: Ranges, directory: Directory, me: ReplicaMember, journal: Journal) -> None:
        self._ranges, self._directory, self._me, self._journal = ranges, directory, me, journal
        self._sealed: list[Range] = []
        self._leaving: set[int] = set()
        self._look_us = 0

    def update(self, members: list[ReplicaMember], ranges: list[Range]) -> None:
        """Take note of who is there, and of all ranges."""
        newest = {member.replica: member for member in members}
        self._leaving = {n for n, member in newest.items() if member.state is ReplicaState.DRAINING}
        self._sealed = [range_ for range_ in ranges if not range_.open]
        known = {tags_of(range_): range_ for range_ in self._sealed}
        for tags, old in list(self._ranges.adopted.items()):
            range_ = known.get(tags)
            if range_ is None or all(ref.replica != old for ref in range_.replicas):
                del self._ranges.adopted[tags]

    def look(self, now_us: int) -> bool:
        """Take over ranges whose replica leaves, if they fall to us. True if the store is to be looked at again."""
        if now_us < self._look_us or not self._leaving or self._me.replica in self._leaving:
            return False
        self._look_us = now_us + _LOOK_US
        before = len(self._ranges.adopted)
        for range_ in self._sealed:
            named = {ref.replica for ref in range_.replicas}
            old = min(named & self._leaving, default=None)
            if old is None or tags_of(range_) in self._ranges.adopted or len(self._ranges.adopted) >= _AT_ONCE:
                continue
            chosen = self._directory.choose_replicas(1, avoid=named)
            if chosen and chosen[0].replica == self._me.replica:
                self._ranges.adopted[tags_of(range_)] = old
        return len(self._ranges.adopted) > before

    def completed(self, copy: Copy) -> None:
        """A sealed range is all here: let the store know, if it looks for it elsewhere."""
        range_ = copy.range_
        old = self._ranges.adopted.get(copy.tags)
        mine = next((ref for ref in range_.replicas if ref.replica == self._me.replica), None)
        if old is None and (mine is None or mine.disk == self._me.disk):
            return
        try:
            self._directory.replace_in_sealed(*copy.tags, self._me.replica if old is None else old, self._me.ref)
        except EmbarcaderoError as error:
            self._journal.warn("can't record a copy", lane=copy.tags[0], range=copy.tags[1], reason=str(error))
        else:
            self._journal.note("copy completed", lane=copy.tags[0], range=copy.tags[1], instead_of=old)
