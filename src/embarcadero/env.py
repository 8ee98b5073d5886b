"""The environment of role logic: the interfaces that real processes and the simulator implement.

Memory is `fabric.region.Fabric`; the network is frames in and frames out (sans-I/O). Everything else that a role gets
from its process is in one `Env`: time is a `Clock`, disks are `Disk`, blocking calls go to `Workers`. Roles count in
cheap histograms, which are read when the metrics are scraped.
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
    """The clock of one process."""

    def now_us(self) -> int:
        """Return monotonic microseconds, for timeouts. They have no meaning on another host."""
        ...

    def wall_us(self) -> int:
        """Return microseconds since 1970, for timestamps that people read. No safety property depends on them."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000


Ids = Callable[[], int]
"""Draws unique ids: positive, 63 bits, so that they fit signed 64-bit columns and Java's long."""


def random_id() -> int:
    """Draw an id from the operating system's random numbers."""
    return secrets.randbits(63) or 1


class Journal(Protocol):
    """Receives the log events of a role. Drivers write them. Facts are plain values, never payloads."""

    def note(self, event: str, /, **facts: object) -> None:
        """Log an event that may interest operators."""
        ...

    def warn(self, event: str, /, **facts: object) -> None:
        """Log an event that operators should check."""
        ...


class SilentJournal:
    """A journal that drops all events."""

    def note(self, event: str, /, **facts: object) -> None:
        pass

    def warn(self, event: str, /, **facts: object) -> None:
        pass


class Doorbell(Protocol):
    """Wakes a sleeping role on the same host. A ring may be lost: only latency depends on it."""

    def ring(self, who: str) -> None:
        """Wake `who`: "sequencer", or "broker-<b>.<inc>"."""
        ...


class SilentBell:
    """A doorbell that wakes no role."""

    def ring(self, who: str) -> None:
        pass


class Steps(Protocol):
    """Receives a call at each named step of the protocol (steps.py)."""

    def at(self, name: str) -> None:
        """The role is at this step. The implementation may end the process here, or pause it."""
        ...


class NoSteps:
    """Ignores all steps: the implementation in production."""

    def at(self, name: str) -> None:
        pass


NO_STEPS: Final[Steps] = NoSteps()


class Workers(Protocol):
    """Runs blocking jobs (disk reads, fdatasync) outside the role, and passes results to the role's own thread."""

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job`, and later `done(result)` or `done(error)`. Jobs may run in any order."""
        ...


class Inline:
    """Workers that run each job immediately, for processes without other work."""

    def run(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        try:
            result: T | Exception = job()
        except Exception as error:
            result = error
        done(result)


# --- disks ------------------------------------------------------------------------------------------------------------
class Missing(DiskFailed):
    """There is no such file or folder: never written, dropped in the meantime, or deleted by another program."""


class File(Protocol):
    """An open file. Each call has its own offset, so that threads do not share a position."""

    def pwrite(self, parts: Sequence[Part], offset: int) -> None:
        """Write all parts, one after another, from `offset` on. A hole before `offset` reads as zeros."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Read `size` bytes; fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Return once all earlier writes are on the disk. After an error, the state of these writes is unknown."""
        ...

    def size(self) -> int:
        """Return the current size of the file."""
        ...

    def truncate(self, size: int) -> None:
        """Set the size of the file."""
        ...

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        ...


class Lock(Protocol):
    """A lock on a folder. It is held until it is closed, or the process ends."""

    def close(self) -> None:
        """Release the lock."""
        ...


class Disk(Protocol):
    """Files below one folder. One test suite checks the implementations of the operating system and the simulator.

    Paths are relative, with `/`, below the disk's root. Written data is kept only after `sync` of the file, and a name
    only after `sync_folder` of its folder. Every failure of the environment is a typed error: DiskFull, DiskFailed (and
    its Missing), WrongFolder.
    """

    def open(self, path: str, create: bool = False, writable: bool = False) -> File:
        """Open a file. `create` creates a new, empty file, replaces an existing one, and implies `writable`."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder with this name."""
        ...

    def list(self, folder: str) -> list[str]:
        """List the names in a folder, sorted; "" is the root. Raises Missing if there is no such folder."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder, unless it exists. Its parent must exist."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file. A file with the new name is replaced."""
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
        """Return the free space in bytes."""
        ...

    def lock(self, path: str) -> Lock:
        """Lock this file until the lock or the disk is closed. Raises WrongFolder if another process has the lock."""
        ...

    def make_id(self) -> str:
        """Return a new random id of 32 hexadecimal digits."""
        ...

    def close(self) -> None:
        """Release all locks."""
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
    """Counts of observations at or below each bound. `counts` has one more entry, for those above all bounds."""

    __slots__ = ("_bounds", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds, self._bounds = bounds, np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int, times: int = 1) -> None:
        """Add an observation, or several equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add_many(self, values: npt.NDArray[Any]) -> None:
        """Add many observations."""
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
    """The environment that a process gives to a role. Roles take it as their first argument, and pass it on."""

    clock: Clock
    bell: Doorbell = field(default_factory=SilentBell)
    journal: Journal = field(default_factory=SilentJournal)
    workers: Workers = field(default_factory=Inline)
    steps: Steps = NO_STEPS
    disks: Disks | None = None  # None: the disks of replicas are not reachable
