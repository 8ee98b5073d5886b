"""Whose heart still beats, by our own clock: others may have any, and a pause of ours is not their silence."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_LOOK_US_MAX: Final = 500_000
"""What lies further between two looks was a pause of ours: whoever beat meanwhile gets the time to do it again."""

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True)
class _Pulse:
    """The last heartbeat of one incarnation, when we looked last, and how long it has been the same."""

    beat: int
    looked_us: int
    silent_us: int = 0


class Pulses(Generic[Who]):
    """The heartbeats of some incarnations."""

    def __init__(self) -> None:
        self._pulses: dict[Who, _Pulse] = {}

    def silent_us(self, who: Who, beat: int, now_us: int) -> int:
        """Look once more: for how long its heart has stood still."""
        pulse = self._pulses.get(who)
        if pulse is None or pulse.beat != beat:
            pulse = self._pulses[who] = _Pulse(beat, now_us)
        pulse.silent_us += min(now_us - pulse.looked_us, _LOOK_US_MAX)
        pulse.looked_us = now_us
        return pulse.silent_us

    def keep(self, known: set[Who]) -> set[Who]:
        """Forget all others. Returns them."""
        gone = self._pulses.keys() - known
        for who in gone:
            del self._pulses[who]
        return gone
