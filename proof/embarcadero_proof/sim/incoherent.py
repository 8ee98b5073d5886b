"""Simulated memory that is as bad as the rules allow: a store by one host is invisible to others until both act.

Every host has a private copy of every region it maps. Role code loads from it and stores to it directly, as to real
memory. A word is dirty when it differs from `base`, the copy as it was when that word last met the shared words.
- flush writes the dirty words of its lines to the shared words; invalidate does that too, then takes the shared words.
- A newly mapped region reads as zeros after its superblock, however much was written there: no data is fresh by luck.
- `churn` does what caches do on their own: it writes back a dirty line, torn at 8 bytes, or fetches a clean line again.
- `crash` loses a host's cache; a coin toss decides for each dirty word whether it has reached memory.
- `interrupt` is called before every primitive. So a simulator can act in the middle of a role's step: churn, crash the
  host (by raising), or let another host run.
Every random choice comes from one generator: same seed, same run. `sabotage` injects bugs: then "flush" and
"invalidate" do nothing half of the time, to show that the checkers notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import numpy.typing as npt

from embarcadero.errors import BadRegion, InvariantBroken
from embarcadero.fabric.layout import SUPERBLOCK
from embarcadero.fabric.region import Bytes, Shape, check_name, read_superblock, write_superblock
from embarcadero.limits import LINE_BYTES

Words = npt.NDArray[np.uint64]

_LINE_WORDS = LINE_BYTES // 8
_LINE_MASK = -LINE_BYTES
_HEAD_BYTES = SUPERBLOCK.itemsize
_REACH_BYTES_MIN = 65_536


class _Medium:
    """The shared words of one region, and the hosts that map it."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.map = _blank(size)
        self.words = _words_of(self.map)
        self.copies: dict[str, _Copy] = {}
        # Large tables are mostly unused: churn and crash look no further than the furthest line that was touched.
        self.reach = min(self.words.nbytes, _REACH_BYTES_MIN)


class _Copy:
    """One host's cache of one region. Spans are of bytes, and of whole lines; `shared` is where write-backs go.

    Roles call the primitives all the time on a few lines that no host has changed. For these, slices of maps (bytes)
    are several times faster than arrays.
    """

    def __init__(self, medium: _Medium) -> None:
        self.medium, self.shared, self._shared = medium, medium.words, medium.map
        self._mine, self._base = _blank(medium.size), _blank(medium.size)
        self.words, self.base = _words_of(self._mine), _words_of(self._base)
        self.take(0, _HEAD_BYTES)

    @property
    def data(self) -> Bytes:
        return self.words.view(np.uint8)[: self.medium.size]

    def write_back(self, start: int, stop: int) -> None:
        mine, base = self._mine[start:stop], self._base[start:stop]
        if mine == base:
            return
        if self._shared[start:stop] == base:  # no other host wrote there: usual, since lines have one writer
            self._shared[start:stop] = mine
        else:
            words = slice(start // 8, stop // 8)
            np.putmask(self.shared[words], self.words[words] != self.base[words], self.words[words])
        self._base[start:stop] = mine

    def take(self, start: int, stop: int) -> None:
        self._mine[start:stop] = self._base[start:stop] = self._shared[start:stop]

    def renew(self, start: int, stop: int) -> None:
        """Write back, then take."""
        if self._mine[start:stop] == self._base[start:stop] == self._shared[start:stop]:
            return
        self.write_back(start, stop)
        self.take(start, stop)

    def scatter(self, words: slice, rng: random.Random) -> None:
        """Write each dirty word back, or not."""
        for word in np.flatnonzero(self.words[words] != self.base[words]) + words.start:
            if rng.getrandbits(1):
                self.shared[word] = self.base[word] = self.words[word]

    def stir(self, rng: random.Random) -> None:
        """Write back or refresh one line that differs from memory, if there is one."""
        reach = self.medium.reach // 8
        different = (self.words[:reach] != self.shared[:reach]).nonzero()[0]
        if not len(different):
            return
        first = int(rng.choice(different)) // _LINE_WORDS * _LINE_WORDS
        line = slice(first, first + _LINE_WORDS)
        if np.array_equal(self.words[line], self.base[line]):
            self.take(8 * line.start, 8 * line.stop)
        else:
            self.scatter(line, rng)

    def lose(self, rng: random.Random) -> None:
        """Lose the host. Later writes of its roles to this cache have no effect."""
        self.scatter(slice(0, self.medium.reach // 8), rng)
        self.shared, self._shared = self.words, self._mine


class IncoherentRegion:
    """One region as one host sees it."""

    __slots__ = ("_copy", "_host", "_medium", "_memory", "data", "name", "shape")

    def __init__(self, host: IncoherentHost, shape: Shape, copy: _Copy, writable: bool) -> None:
        self._host, self._memory, self._copy, self._medium = host, host.memory, copy, copy.medium
        self.name, self.shape = copy.medium.name, shape
        self.data = copy.data
        self.data.flags.writeable = writable

    def flush(self, offset: int, length: int) -> None:
        stop = self._last_line(offset, length)
        memory = self._memory
        if memory.interrupt is not None:
            memory.interrupt(self._host.name)
        if not memory.sabotage or self._host.works("flush"):
            self._copy.write_back(offset & _LINE_MASK, stop)

    def invalidate(self, offset: int, length: int) -> None:
        end = offset + length
        stop = end + LINE_BYTES - 1 & _LINE_MASK
        medium = self._medium
        if stop > medium.reach or offset < 0 or length < 0 or end > medium.size:
            self._last_line(offset, length)
        memory = self._memory
        if memory.interrupt is not None:
            memory.interrupt(self._host.name)
        if not memory.sabotage or self._host.works("invalidate"):
            self._copy.renew(offset & _LINE_MASK, stop)

    def reserve(self, offset: int, length: int) -> None:
        """Memory always has space."""

    def close(self) -> None:
        """Do nothing: the cache belongs to the host."""

    def _last_line(self, offset: int, length: int) -> int:
        """Return the end of the last line that a span touches."""
        medium, end = self._medium, offset + length
        if offset < 0 or length < 0 or end > medium.size:
            raise InvariantBroken(f"span [{offset}, {end}) is outside region {self.name} of {medium.size} bytes")
        stop = end + LINE_BYTES - 1 & _LINE_MASK
        medium.reach = max(medium.reach, stop)
        return stop


class IncoherentHost:
    """The fabric as one host sees it. All roles on the host share its caches."""

    coherent_only = False

    def __init__(self, memory: IncoherentMemory, name: str) -> None:
        self.memory, self.name = memory, name
        self.generation = memory.generation

    def create(self, name: str, shape: Shape) -> IncoherentRegion:
        regions = self.memory.regions
        if check_name(name) in regions:
            raise BadRegion(f"region {name} exists already", "every incarnation makes its own regions, once")
        medium = _Medium(name, shape.size)
        write_superblock(medium.words.view(np.uint8), shape, self.generation)
        regions[name] = medium
        return IncoherentRegion(self, shape, self._copy(medium), writable=True)

    def attach(self, name: str, writable: bool = False) -> IncoherentRegion:
        medium = self.memory.regions.get(check_name(name))
        if medium is None:
            raise BadRegion(f"region {name} does not exist", "is the cluster up?")
        copy = self._copy(medium)
        copy.renew(0, _HEAD_BYTES)
        return IncoherentRegion(self, read_superblock(name, copy.data, self.generation), copy, writable)

    def exists(self, name: str) -> bool:
        return check_name(name) in self.memory.regions

    def names(self) -> list[str]:
        return sorted(self.memory.regions)

    def remove(self, name: str) -> None:
        self.memory.regions.pop(check_name(name), None)
        self.memory.all_copies = None

    def fence(self) -> None:
        """Only let the simulator act: write-backs here are done when flush returns."""
        if self.memory.interrupt is not None:
            self.memory.interrupt(self.name)

    def works(self, primitive: str) -> bool:
        """Whether a primitive that may be sabotaged takes effect."""
        return primitive not in self.memory.sabotage or self.memory.rng.getrandbits(1) == 1

    def _copy(self, medium: _Medium) -> _Copy:
        copy = medium.copies.get(self.name)
        if copy is None:
            copy = medium.copies[self.name] = _Copy(medium)
            self.memory.all_copies = None
        return copy


class IncoherentMemory:
    """The medium that hosts share. `host` gives one host's view of it."""

    def __init__(self, rng: random.Random, generation: int) -> None:
        self.rng, self.generation = rng, generation
        self.regions: dict[str, _Medium] = {}
        self.all_copies: list[_Copy] | None = None  # None: to collect again
        self.sabotage: set[str] = set()
        self.interrupt: Callable[[str], None] | None = None
        self._hosts: dict[str, IncoherentHost] = {}

    def host(self, name: str) -> IncoherentHost:
        """The fabric as host `name` sees it."""
        return self._hosts.setdefault(name, IncoherentHost(self, name))

    def churn(self, n: int) -> None:
        """Let some host's cache evict or refresh some line, n times."""
        if self.all_copies is None:
            self.all_copies = [copy for medium in self.regions.values() for copy in medium.copies.values()]
        copies = self.all_copies
        for _ in range(n if copies else 0):
            self.rng.choice(copies).stir(self.rng)

    def crash(self, host: str) -> None:
        """Lose a host with its cache; after a restart it maps everything again."""
        self.all_copies = None
        for medium in self.regions.values():
            copy = medium.copies.pop(host, None)
            if copy is not None:
                copy.lose(self.rng)


def _blank(size: int) -> mmap:
    """Zeroed whole lines for `size` bytes. Large maps are mostly unused: the operating system gives memory lazily.

    The maps are private, since then pages that are only read take no memory.
    """
    return mmap(-1, size + LINE_BYTES - 1 & _LINE_MASK, flags=MAP_PRIVATE | MAP_ANONYMOUS)


def _words_of(memory: mmap) -> Words:
    return np.frombuffer(memory, dtype=np.uint64)
