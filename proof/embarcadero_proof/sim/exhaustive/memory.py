"""Memory as a value: two models, both as bad as the rules of fabric/region.py allow.

Coherent: all actors are on one host. Each has a store buffer, first in, first out, which drains at any time, line by
line or word by word; loads see the actor's own buffer, then memory. Flush and invalidate do nothing
(fabric/shared.py, `choose(coherent=True)`); a fence drains the buffer.
Incoherent: each host has a private copy of every line. A dirty line may be written back at any time, whole or, torn,
word by word; a clean one is stale until it is invalidated, or fetched anew by chance. Flush writes back, invalidate
writes back and takes. A host that crashes loses what is dirty. Actors of one host share its copies.
(`flush` ends with a store fence and `invalidate` is between two full ones, native/primitives.c: so a write-back that
was asked for is done before anything that could notice is loaded, and takes effect at once here.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from embarcadero.limits import LINE_BYTES

WORDS = LINE_BYTES // 8
_ALL = (1 << WORDS) - 1

Cache = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Lines as a host sees them, and which words of each are dirty."""

Watched = Callable[[int], bool]
"""Whether an actor will ever look at a line."""

Store = tuple[int, int, bytes]
"""In a store buffer: line, which words, the line that has them."""


class Memory(NamedTuple):
    """What all hosts share, and what each keeps to itself."""

    shared: tuple[bytes, ...]
    caches: tuple[Cache, ...] = ()  # by host
    buffers: tuple[tuple[Store, ...], ...] = ()  # by actor


def merge(under: bytes, over: bytes, mask: int) -> bytes:
    """A line with those words replaced that the mask names."""
    if mask == _ALL:
        return over
    parts = [(over if mask >> word & 1 else under)[8 * word : 8 * word + 8] for word in range(WORDS)]
    return b"".join(parts)


def different(one: bytes, other: bytes) -> int:
    """Which words differ."""
    return sum(1 << word for word in range(WORDS) if one[8 * word : 8 * word + 8] != other[8 * word : 8 * word + 8])


def put(lines: tuple[bytes, ...], number: int, line: bytes) -> tuple[bytes, ...]:
    """The same lines, but this one."""
    return (*lines[:number], line, *lines[number + 1 :])


class Coherent:
    """One host."""

    coherent = True

    def __init__(self, actors: int, tear: bool) -> None:
        self._actors, self._tear = actors, tear

    def first(self, lines: list[bytes]) -> Memory:
        """As it is at the beginning."""
        return Memory(tuple(lines), (), ((),) * self._actors)

    def load(self, memory: Memory, actor: int, number: int) -> bytes:
        """A line as an actor sees it."""
        line = memory.shared[number]
        for stored, mask, data in memory.buffers[actor]:
            if stored == number:
                line = merge(line, data, mask)
        return line

    def store(self, memory: Memory, actor: int, number: int, line: bytes, before: bytes) -> Memory:
        """An actor stores the words of a line that differ from what it saw."""
        mask = different(line, before)
        masks = [1 << word for word in range(WORDS) if mask >> word & 1] if self._tear else [mask]
        mine = (*memory.buffers[actor], *((number, one, line) for one in masks))
        return memory._replace(buffers=(*memory.buffers[:actor], mine, *memory.buffers[actor + 1 :]))

    def drain(self, memory: Memory, actor: int) -> Memory:
        """The oldest store of a buffer reaches memory."""
        (number, mask, data), *rest = memory.buffers[actor]
        buffers = (*memory.buffers[:actor], tuple(rest), *memory.buffers[actor + 1 :])
        shared = put(memory.shared, number, merge(memory.shared[number], data, mask))
        return Memory(shared, (), buffers)

    def primitive(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> Memory:
        """Only fences do something."""
        while kind == "fence" and memory.buffers[actor]:
            memory = self.drain(memory, actor)
        return memory

    def by_itself(self, memory: Memory, watched: Watched) -> Iterator[tuple[str, int, int, int, Memory]]:
        """What memory does on its own: (what, actor, line, words, memory then)."""
        for actor, buffer in enumerate(memory.buffers):
            if buffer:
                yield "drain", actor, buffer[0][0], buffer[0][1], self.drain(memory, actor)

    def written_by(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> list[int]:
        """Lines that reach memory by this primitive."""
        return [number for number, _, _ in memory.buffers[actor]] if kind == "fence" else []

    def stored_by_others(self, memory: Memory, actor: int, lines: tuple[int, ...]) -> bool:
        """Whether stores of others to these lines are on their way."""
        others = [buffer for other, buffer in enumerate(memory.buffers) if other != actor]
        return any(store[0] in lines for buffer in others for store in buffer)

    def settled(self, memory: Memory) -> bool:
        """Whether nothing is left that is certain to happen."""
        return not any(memory.buffers)

    def crash(self, memory: Memory, actor: int) -> Memory:
        """A process is gone. What it stored is on its way, and arrives."""
        return memory


class Incoherent:
    """Several hosts; `hosts` says on which each actor is."""

    coherent = False

    def __init__(self, hosts: tuple[int, ...], tear: bool, fetch: bool) -> None:
        self._hosts, self._tear, self._fetch = hosts, tear, fetch

    def first(self, lines: list[bytes]) -> Memory:
        """As it is at the beginning: all caches are fresh."""
        cache = tuple(lines), (0,) * len(lines)
        return Memory(tuple(lines), (cache,) * (max(self._hosts) + 1))

    def load(self, memory: Memory, actor: int, number: int) -> bytes:
        """A line as an actor sees it."""
        return memory.caches[self._hosts[actor]][0][number]

    def store(self, memory: Memory, actor: int, number: int, line: bytes, before: bytes) -> Memory:
        """An actor stores the words of a line that differ from what it saw."""
        host = self._hosts[actor]
        mine, dirty = memory.caches[host]
        mask = different(line, before)
        masks = (*dirty[:number], dirty[number] | mask, *dirty[number + 1 :])
        return self._with(memory, host, (put(mine, number, merge(mine[number], line, mask)), masks))

    @staticmethod
    def _with(memory: Memory, host: int, cache: Cache) -> Memory:
        return memory._replace(caches=(*memory.caches[:host], cache, *memory.caches[host + 1 :]))

    def _write_back(self, memory: Memory, host: int, number: int, mask: int) -> Memory:
        mine, dirty = memory.caches[host]
        shared = put(memory.shared, number, merge(memory.shared[number], mine[number], mask))
        masks = (*dirty[:number], dirty[number] & ~mask, *dirty[number + 1 :])
        return self._with(memory._replace(shared=shared), host, (mine, masks))

    def _take(self, memory: Memory, host: int, number: int) -> Memory:
        mine, dirty = memory.caches[host]
        return self._with(memory, host, (put(mine, number, memory.shared[number]), dirty))

    def primitive(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> Memory:
        """Flush and invalidate."""
        host = self._hosts[actor]
        for number in lines:
            mine, dirty = memory.caches[host]
            if dirty[number]:
                memory = self._write_back(memory, host, number, dirty[number])
            if kind == "invalidate" and mine[number] != memory.shared[number]:
                memory = self._take(memory, host, number)
        return memory

    def by_itself(self, memory: Memory, watched: Watched) -> Iterator[tuple[str, int, int, int, Memory]]:
        """What caches do on their own to lines that several look at: (what, host, line, words, memory then)."""
        for host, (mine, dirty) in enumerate(memory.caches):
            for number, mask in enumerate(dirty):
                if not mask and (not self._fetch or mine[number] == memory.shared[number]):
                    continue
                if not watched(number):
                    continue
                if mask:
                    yield "write back", host, number, mask, self._write_back(memory, host, number, mask)
                    if self._tear and mask & (mask - 1):
                        for word in range(WORDS):
                            if mask >> word & 1:
                                yield "tear", host, number, word, self._write_back(memory, host, number, 1 << word)
                else:
                    yield "fetch", host, number, 0, self._take(memory, host, number)

    def written_by(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> list[int]:
        """Lines that reach memory by this primitive."""
        dirty = memory.caches[self._hosts[actor]][1]
        return [number for number in lines if kind == "flush" or dirty[number]]

    def stored_by_others(self, memory: Memory, actor: int, lines: tuple[int, ...]) -> bool:
        """Whether stores of others to these lines are on their way."""
        mine = self._hosts[actor]
        others = [masks for host, (_, masks) in enumerate(memory.caches) if host != mine]
        return any(masks[number] for masks in others for number in lines)

    def settled(self, memory: Memory) -> bool:
        """Caches need not do anything, ever."""
        return True

    def crash(self, memory: Memory, actor: int) -> Memory:
        """An actor is gone; with its host, if it is alone there."""
        host = self._hosts[actor]
        if self._hosts.count(host) > 1:
            return memory
        mine, dirty = memory.caches[host]
        for number, mask in enumerate(dirty):
            if mask:
                mine = put(mine, number, memory.shared[number])
        return self._with(memory, host, (mine, (0,) * len(dirty)))
