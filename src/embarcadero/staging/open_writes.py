"""Which writes of a staging topic are open: a fold of its facts, in any order.

Facts come from several lanes, which are read one after the other, so their order here is not that in which they were
appended: a later task may be heard of first, and a failure before the work that failed. Each fact therefore names its
attempt, and the earliest and the latest times count.

An attempt is open from its first fact until its epoch or a later one is done, or until it was dropped before it had a
manifest. One with a manifest may be decided, so a drop does not end it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from embarcadero.client.named import HeldName
from embarcadero.limits import STAGED_SILENT_S
from embarcadero.staging.manifest import Dropped, Fact, Manifest

COMPLETE_AFTER_S: Final = 30.0
"""A decided epoch in which nothing happens for so long is completed: its committer has had time to go on."""

SILENT_S: Final = STAGED_SILENT_S
"""A write without a fact for so long is forgotten, and what it staged is given up."""

_MARGIN_S: Final = 60.0  # clocks of brokers may differ; what was appended so shortly before a write began is kept
_OVER_S: Final = 3_600.0  # so long it is known that a write is over: a fact of it may come late
_SECOND: Final = 1_000_000


@dataclass(slots=True)
class Attempt:
    """What the facts tell of one attempt. Times are those at which facts were appended, in microseconds."""

    began_us: int
    manifest_us: int | None = None  # of its newest manifest
    dropped: bool = False

    @property
    def open(self) -> bool:
        """Whether what it staged may still be needed."""
        return not self.dropped or self.manifest_us is not None


@dataclass(slots=True)
class OpenWrite:
    """What is known of one write."""

    last_us: int  # when its newest fact was appended
    attempts: dict[tuple[int, str], Attempt] = field(default_factory=dict)  # by epoch and attempt
    over: int = -1  # this epoch and all before it are done
    seen: tuple[int, int] | None = None  # decision and published sequence, when they were last looked at
    since_us: int = 0  # when they were first seen like that
    trouble: str = ""  # that was reported

    @property
    def open(self) -> bool:
        """Whether what it staged may still be needed."""
        return any(attempt.open for attempt in self.attempts.values())

    @property
    def manifests(self) -> list[int]:
        """When the newest manifests of its attempts came."""
        return [attempt.manifest_us for attempt in self.attempts.values() if attempt.manifest_us is not None]


class OpenWrites:
    """The open writes of one staging topic."""

    def __init__(self) -> None:
        self.writes: dict[str, OpenWrite] = {}

    def take(self, fact: Fact, at_us: int) -> None:
        """Take a fact that was appended at `at_us`."""
        known = self.writes.setdefault(fact.write, OpenWrite(at_us))
        known.last_us = max(known.last_us, at_us)
        if fact.epoch <= known.over:
            return
        attempt = known.attempts.setdefault((fact.epoch, fact.attempt), Attempt(at_us))
        attempt.began_us = min(attempt.began_us, at_us)
        if isinstance(fact, Dropped):
            attempt.dropped = True
        elif isinstance(fact, Manifest):
            attempt.manifest_us = max(at_us, attempt.manifest_us or 0)

    def with_manifests(self) -> list[str]:
        """Return writes that may be decided, and not done."""
        return [write for write, known in self.writes.items() if known.manifests]

    def stands_still(self, write: str, decided: HeldName, data: HeldName, now_us: int) -> bool:
        """Note how far the newest decision of a write is. Return whether it was so for COMPLETE_AFTER_S."""
        known, seen = self.writes[write], (decided.expected, data.expected)
        if known.seen != seen:
            known.since_us = min(known.manifests) if known.seen is None else now_us
            known.seen = seen
        return now_us - known.since_us >= int(COMPLETE_AFTER_S * _SECOND)

    def done(self, write: str, epoch: int) -> None:
        """An epoch of a write is done, and so are all before it."""
        known = self.writes[write]
        known.over = max(known.over, epoch)
        known.attempts = {key: attempt for key, attempt in known.attempts.items() if key[0] > known.over}

    def forget(self, now_us: int, needed: set[str]) -> None:
        """Forget writes that are over, and those that were silent for too long and are not `needed`."""
        for write, known in list(self.writes.items()):
            silent_s = SILENT_S if known.open else _OVER_S
            if write not in needed and known.last_us < now_us - int(silent_s * _SECOND):
                del self.writes[write]

    def horizon_us(self, now_us: int) -> int:
        """Everything that was appended before this time is garbage."""
        attempts = [attempt for known in self.writes.values() for attempt in known.attempts.values()]
        began = [attempt.began_us for attempt in attempts if attempt.open]
        return min([now_us, *began]) - int(_MARGIN_S * _SECOND)
