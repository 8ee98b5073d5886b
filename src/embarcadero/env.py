"""The seam: what role logic needs from the world. Real processes and the simulator implement it.

Memory is `fabric.region.Fabric`; disks are `storage.disk.Disk`; the network is frames in and frames out (sans-I/O);
time is a `Clock`; what may block goes to `Workers`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Time as one process sees it."""

    def now_us(self) -> int:
        """Monotonic microseconds, for time-outs; means nothing on another host."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970, for time stamps people read; never for safety."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


Ids = Callable[[], int]
"""Draws ids that never come twice: positive, 63 bits, so that signed 64-bit columns and Java's long hold them."""


def random_id() -> int:
    """Draw an id from the operating system's random numbers."""
    return secrets.randbits(63) or 1


class Journal(Protocol):
    """Where a role tells what happened. Drivers write it down; facts are plain values, never payloads."""

    def note(self, event: str, /, **facts: object) -> None:
        """Something that operators may want to know."""
        ...

    def warn(self, event: str, /, **facts: object) -> None:
        """Something that operators should look at."""
        ...


class SilentJournal:
    """A journal that nobody reads."""

    def note(self, event: str, /, **facts: object) -> None:
        pass

    def warn(self, event: str, /, **facts: object) -> None:
        pass


class Doorbell(Protocol):
    """Wakes a sleeping role on the same host. May be lost: nothing depends on it but latency."""

    def ring(self, who: str) -> None:
        """Wake `who`: "sequencer", or "broker-<b>.<inc>"."""
        ...


class SilentBell:
    """A doorbell that nobody hears."""

    def ring(self, who: str) -> None:
        pass


class Steps(Protocol):
    """Is told whenever a role gets to a named step of the protocol (steps.py)."""

    def at(self, name: str) -> None:
        """The role is at this step. Whoever implements this may end it here, or keep it here for a while."""
        ...


class NoSteps:
    """Nobody cares how far a role is."""

    def at(self, name: str) -> None:
        pass


NO_STEPS: Final[Steps] = NoSteps()


class Workers(Protocol):
    """Runs what may block (disk reads, fdatasync) beside the role, and tells it the result in its own thread."""

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job`; later `done(result)`, or `done(error)` with what it raised. Jobs may run in any order."""
        ...


class Inline:
    """Workers that do it at once: for processes that have nothing else to do meanwhile."""

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        done(result)
