"""The seam: what role logic needs from the world. Real processes and the simulator implement it.

Memory is `fabric.region.Fabric`; the network is frames in and frames out (sans-I/O); all else that a role gets from its
process is in one `Env`: time is a `Clock`, disks are `Disk`, what may block goes to `Workers`. What a
role counts goes to histograms that cost next to nothing; they are read when the metrics are scraped.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from embarcadero.errors import DiskFailed
from embarcadero.types import ReplicaMember

T = TypeVar("T")

Part = bytes | bytearray | memoryview


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
    """Where a role reports what happened. Drivers write it down; facts are plain values, never payloads."""

    def note(self, event: str, /, **facts: object) -> None:
        """Something that operators may want to know."""
        ...

    def warn(self, event: str, /, **facts: object) -> None:
        """Something that operators should look at."""
        ...


class SilentJournal:
    """A journal that is not read."""

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
    """A doorbell that wakes no role."""

    def ring(self, who: str) -> None:
        pass


class Steps(Protocol):
    """Is called whenever a role gets to a named step of the protocol (steps.py)."""

    def at(self, name: str) -> None:
        """The role is at this step. The implementation may end it here, or keep it here for a while."""
        ...


class NoSteps:
    """Steps are not observed: in production."""

    def at(self, name: str) -> None:
        pass


NO_STEPS: Final[Steps] = NoSteps()


class Workers(Protocol):
    """Runs what may block (disk reads, fdatasync) beside the role, and passes it the result in its own thread."""

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


# --- disks ------------------------------------------------------------------------------------------------------------
class Missing(DiskFailed):
    """There is no such file or folder: never written, dropped meanwhile, or deleted from outside."""


class File(Protocol):
    """One open file. Offsets are given with each call, so that threads need not share a position."""

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        """Write all parts, one after another, from `offset` on; what is between the end and there reads as zeros."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """So many bytes; fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Return once everything written before this call is on the disk. After an error nothing is known."""
        ...

    def size(self) -> int:
        """How long the file is now."""
        ...

    def truncate(self, size: int) -> None:
        """Make it this long."""
        ...

    def close(self) -> None:
        """Let go of it. Closing twice is harmless."""
        ...


class Lock(Protocol):
    """A folder that is ours until we close this, or end."""

    def close(self) -> None:
        """Give it back."""
        ...


class Disk(Protocol):
    """Files below one folder. One suite of tests holds for the operating system's and for the simulator's.

    Paths are relative, with `/`, below the disk's root. What was written counts as kept only after `sync` of the file,
    and a name only after `sync_folder` of its folder. Everything the world does wrong arrives as a typed error:
    DiskFull, DiskFailed (and its Missing), WrongFolder.
    """

    def open(self, path: str, create: bool = False, writable: bool = False) -> File:
        """Open a file. `create` makes a new, empty one in place of what may be there, and implies `writable`."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; "" is the root. Missing if there is no such folder."""
        ...

    def make_folder(self, path: str) -> None:
        """Have a folder; its parent exists. One that is there already is fine."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what has it."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        ...

    def sync_folder(self, path: str) -> None:
        """Return once the names in this folder are on the disk."""
        ...

    def free_bytes(self) -> int:
        """Room that is left."""
        ...

    def lock(self, path: str) -> Lock:
        """Be the only holder of this file, until the lock or the disk is closed. WrongFolder if another one is."""
        ...

    def make_id(self) -> str:
        """A fresh random id, 32 hexadecimal digits."""
        ...

    def close(self) -> None:
        """Let go of all locks."""
        ...


Disks = Callable[[ReplicaMember], Disk]
"""Opens the disk of a replica, for reading."""


# --- histograms -------------------------------------------------------------------------------------------------------
LATENCY_US: Final = (
    50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
    1_000_000, 2_000_000, 5_000_000, 10_000_000,
)  # fmt: skip
"""Bounds of times, in microseconds."""

COUNTS: Final = tuple(1 << power for power in range(15))
"""Bounds of sizes: powers of two up to the largest round."""

_FEW: Final = 8


class Histogram:
    """How many observations were at or below each bound; `counts` has one more entry, for those above all bounds."""

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds, self._bounds = bounds, np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int, times: int = 1) -> None:
        """One observation, or several alike."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_many(self, values: npt.NDArray[Any]) -> None:
        """Many at once."""
        if len(values) <= _FEW:
            for value in values.tolist():
                self.add(value)
            return
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.counts))
        self.counts = [mine + more for mine, more in zip(self.counts, found.tolist(), strict=True)]
        self.total += int(values.sum())


# --- together ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Env:
    """What a role gets from its process. Roles take it as their first argument, and hand it to their parts."""

    clock: Clock
    bell: Doorbell = field(default_factory=SilentBell)
    journal: Journal = field(default_factory=SilentJournal)
    workers: Workers = field(default_factory=Inline)
    steps: Steps = NO_STEPS
    disks: Disks | None = None  # None: replicas' disks are out of reach
