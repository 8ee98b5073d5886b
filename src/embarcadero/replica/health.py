"""Whether a replica's disk can be relied on. A copy that can't be written stops counting, says so, and tries again."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntFlag

from embarcadero.env import Journal
from embarcadero.errors import BadSegment, DiskFull, EmbarcaderoError
from embarcadero.fabric.frontier import FrontierWriter
from embarcadero.fabric.tagged import Tags

_RETRY_US_FIRST = 100_000
_RETRY_US_MAX = 3_000_000
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


class Trouble(IntFlag):
    """Bits of the health word in a replica's durable lines; 0 is well."""

    DISK_FULL = 1
    DISK_FAILED = 2
    READ_ONLY = 4
    DAMAGED = 8  # a copy is incomplete or damaged, and being repaired


WHAT_TO_DO = {
    Trouble.DISK_FULL: "free some room; it goes on by itself",
    Trouble.DISK_FAILED: "look at the disk; `replica drain` moves its copies elsewhere",
    Trouble.READ_ONLY: "make the folder writable; it goes on by itself",
    Trouble.DAMAGED: "nothing, while other replicas have the records: it is repaired from them",
}
"""What an operator can do about each trouble."""


def trouble_of(error: Exception) -> Trouble:
    """Which trouble an error of the disk means."""
    if isinstance(error, DiskFull):
        return Trouble.DISK_FULL
    if isinstance(error, BadSegment):
        return Trouble.DAMAGED
    cause = error.__cause__ if isinstance(error, EmbarcaderoError) else error
    return Trouble.READ_ONLY if isinstance(cause, OSError) and cause.errno in _REFUSED else Trouble.DISK_FAILED


def health_in_words(word: int) -> list[str]:
    """Each trouble of a health word, with what to do about it."""
    return [f"{(bit.name or '').lower().replace('_', ' ')}: {WHAT_TO_DO[bit]}" for bit in Trouble if word & bit]


@dataclass(slots=True)
class _Ill:
    trouble: Trouble
    retry_us: int
    wait_us: int


class Health:
    """What is wrong with which copy; together they are the health word that others see."""

    def __init__(self, word: FrontierWriter, journal: Journal) -> None:
        self._word, self._journal = word, journal
        self._ill: dict[Tags, _Ill] = {}
        self._lacking = False
        self.reason = ""  # of the last trouble

    @property
    def trouble(self) -> Trouble:
        """What is wrong now."""
        return Trouble(self._word.value)

    def may_try(self, tags: Tags, now_us: int) -> bool:
        """Whether a copy is well, or it is time to try again."""
        ill = self._ill.get(tags)
        return ill is None or now_us >= ill.retry_us

    def failed(self, tags: Tags, error: Exception, doing: str, now_us: int) -> None:
        """Something failed: this copy counts no further until it succeeds."""
        before, found = self._ill.get(tags), trouble_of(error)
        self.reason = str(error)
        if before is None or before.trouble != found:
            self._journal.warn(
                "disk trouble", trouble=found.name, doing=doing, lane=tags[0], range=tags[1], reason=self.reason
            )  # fmt: skip
        wait_us = min(2 * before.wait_us, _RETRY_US_MAX) if before else _RETRY_US_FIRST
        self._ill[tags] = _Ill(found, now_us + wait_us, wait_us)
        self._tell()

    def worked(self, tags: Tags) -> None:
        """It succeeded, or the copy is gone."""
        if (ill := self._ill.pop(tags, None)) is not None:
            self._journal.note("disk trouble is over", was=ill.trouble.name, lane=tags[0], range=tags[1])
            self._tell()

    def keep(self, tags: set[Tags]) -> None:
        """All others are not ours any more: what was wrong with them never succeeds, and is over."""
        for gone in self._ill.keys() - tags:
            self.worked(gone)

    def lacking(self, now: bool) -> None:
        """Whether copies are damaged or incomplete, and being repaired."""
        if now != self._lacking:
            self._lacking = now
            self._tell()

    def _tell(self) -> None:
        word = int(Trouble.DAMAGED) if self._lacking else 0
        for ill in self._ill.values():
            word |= ill.trouble
        if word != self._word.value:
            self._word.restart(word)
