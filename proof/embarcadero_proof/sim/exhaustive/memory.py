"""Memory as a value: two models, both as bad as the rules of fabric/region.py allow.

Coherent: all actors are on one host. Each has a store buffer, first in, first out, which drains at any time, line by
line or word by word. Loads see the actor's own buffer, then memory. Flush and invalidate do nothing (fabric/shared.py,
`choose(coherent=True)`); a fence drains the buffer.

Incoherent: each host has a private copy of every line. A dirty line may be written back at any time, whole or, torn,
word by word. A clean line is stale until it is invalidated, or fetched again by chance. Flush writes back; invalidate
writes back and takes. A host that crashes loses its dirty lines. Actors of one host share its copies.

In native/primitives.c, `flush` ends with a store fence, and `invalidate` is between two full fences. So a requested
write-back is complete before any later load that could notice it. Here it takes effect immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from embarcadero.limits import LINE_BYTES

WORDS = LINE_BYTES // 8
_ALL = (1 << WORDS) - 1

Cache = tuple[tuple[bytes, ...], tuple[int, ...]]
"""Lines as a host sees them, and the dirty words of each."""

Watched = Callable[[int], bool]
"""Whether an actor will ever read a line."""

Store = tuple[int, int, bytes]
"""An entry of a store buffer: line, mask of words, the line with these words."""


class Memory(NamedTuple):
    """The shared lines, and the private state of each host and actor."""

    shared: tuple[bytes, ...]
    caches: tuple[Cache, ...] = ()  # by host
    buffers: tuple[tuple[Store, ...], ...] = ()  # by actor


def merge(under: bytes, over: bytes, mask: int) -> bytes:
    """Return a line with the words replaced that the mask names."""
    if mask == _ALL:
        return over
    parts = [(over if mask >> word & 1 else under)[8 * word : 8 * word + 8] for word in range(WORDS)]
    return b"".join(parts)


def different(one: bytes, other: bytes) -> int:
    """Return the mask of words that differ."""
    return sum(1 << word for word in range(WORDS) if one[8 * word : 8 * word + 8] != other[8 * word : 8 * word + 8])


def put(lines: tuple[bytes, ...], number: int, line: bytes) -> tuple[bytes, ...]:
    """Return the lines with one line replaced."""
    return (*lines[:number], line, *lines[number + 1 :])


class Coherent:
    """Coherent memory of one host."""

    coherent = True

    def __init__(self, actors: int, tear: bool) -> None:
        self._actors, self._tear = actors, tear

    def first(self, lines: list[bytes]) -> Memory:
        """Return the initial memory."""
        return Memory(tuple(lines), (), ((),) * self._actors)

    def load(self, memory: Memory, actor: int, number: int) -> bytes:
        """Return a line as an actor sees it."""
        line = memory.shared[number]
        for stored, mask, data in memory.buffers[actor]:
            if stored == number:
                line = merge(line, data, mask)
        return line

    def store(self, memory: Memory, actor: int, number: int, line: bytes, before: bytes) -> Memory:
        """Store the words of a line that differ from the actor's view."""
        mask = different(line, before)
        masks = [1 << word for word in range(WORDS) if mask >> word & 1] if self._tear else [mask]
        mine = (*memory.buffers[actor], *((number, one, line) for one in masks))
        return memory._replace(buffers=(*memory.buffers[:actor], mine, *memory.buffers[actor + 1 :]))

    def drain(self, memory: Memory, actor: int) -> Memory:
        """Move the oldest store of a buffer to memory."""
        (number, mask, data), *rest = memory.buffers[actor]
        buffers = (*memory.buffers[:actor], tuple(rest), *memory.buffers[actor + 1 :])
        shared = put(memory.shared, number, merge(memory.shared[number], data, mask))
        return Memory(shared, (), buffers)

    def primitive(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> Memory:
        """Drain the buffer in a fence; other primitives do nothing."""
        while kind == "fence" and memory.buffers[actor]:
            memory = self.drain(memory, actor)
        return memory

    def by_itself(self, memory: Memory, watched: Watched) -> Iterator[tuple[str, int, int, int, Memory]]:
        """Yield the actions of memory on its own: (action, actor, line, words, memory afterwards)."""
        for actor, buffer in enumerate(memory.buffers):
            if buffer:
                yield "drain", actor, buffer[0][0], buffer[0][1], self.drain(memory, actor)

    def written_by(self, memory: Memory, actor: int, kind: str, lines: tuple[int, ...]) -> list[int]:
        """Return the lines that reach memory by this primitive."""
        return [number for number, _, _ in memory.buffers[actor]] if kind == "fence" else []

    def stored_by_others(self, memory: Memory, actor: int, lines: tuple[int, ...]) -> bool:
        """Whether other actors' stores to these lines are in flight."""
        others = [buffer for other, buffer in enumerate(memory.buffers) if other != actor]
        return any(store[0] in lines for buffer in others for store in buffer)

    def settled(self, memory: Memory) -> bool:
        """Whether no more action is certain to happen."""
        return not any(memory.buffers)

    def crash(self, memory: Memory, actor: int) -> Memory:
        """End a process. Its stores are in flight, and arrive."""
        return memory


class Incoherent:
    """Incoherent memory of several hosts; `hosts` has the host of each actor."""

    coherent = False

    def __init__(self, hosts: tuple[int, ...], tear: bool, fetch: bool) -> None:
        self._hosts, self._tear, self._fetch = hosts, tear, fetch

    def first(self, lines: list[bytes]) -> Memory:
        """Return the initial memory: all caches are fresh."""
        cache = tuple(lines), (0,) * len(lines)
        return Memory(tuple(lines), (cache,) * (max(self._hosts) + 1))

    def load(self, memory: Memory, actor: int, number: int) -> bytes:
        """Return a line as an actor sees it."""
        return memory.caches[self._hosts[actor]][0][number]

    def store(self, memory: Memory, actor: int, number: int, line: bytes, before: bytes) -> Memory:
        """Store the words of a line that differ from the actor's view."""
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
        """Yield the actions of caches on lines that several read: (action, host, line, words, memory afterwards)."""
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
        """Return the lines that reach memory by this primitive."""
        dirty = memory.caches[self._hosts[actor]][1]
        return [number for number in lines if kind == "flush" or dirty[number]]

    def stored_by_others(self, memory: Memory, actor: int, lines: tuple[int, ...]) -> bool:
        """Whether other hosts' stores to these lines are in flight."""
        mine = self._hosts[actor]
        others = [masks for host, (_, masks) in enumerate(memory.caches) if host != mine]
        return any(masks[number] for masks in others for number in lines)

    def settled(self, memory: Memory) -> bool:
        """Always: caches are never forced to act."""
        return True

    def crash(self, memory: Memory, actor: int) -> Memory:
        """End an actor; its host too, if no other actor is there."""
        host = self._hosts[actor]
        if self._hosts.count(host) > 1:
            return memory
        mine, dirty = memory.caches[host]
        for number, mask in enumerate(dirty):
            if mask:
                mine = put(mine, number, memory.shared[number])
        return self._with(memory, host, (mine, (0,) * len(dirty)))
