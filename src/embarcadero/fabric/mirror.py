"""A fabric with a mirror: all metadata is in a second fabric first, so losing the first one loses no ordered entry.

Theory of operation. What a writer of a mirrored region has in its hands (`data`) is its region in the *mirror*. Nobody
else looks there while the cluster lives: everybody attaches regions of the first fabric. `flush` writes the lines back
to the mirror, and only then copies them to the first fabric and writes them back there. So

1. Whatever anybody has ever seen in the first fabric was in the mirror before: a line gets there by `flush` alone, and
   by then it is in the mirror's memory, out of its writer's cache. This holds although memory shows stores before they
   are flushed, and although a cache writes back a dirty line when it likes: both happen to the mirror, which is ahead.
2. The mirror is never in a state that the first fabric could not be in. A writer stores and flushes in the same order
   as without a mirror (entries, flush, *then* results or frontiers, flush), and each of these steps is in the mirror
   before the next begins. So one who reads the mirror by the rules of a takeover (checkpoint, then the valid contiguous
   entries after it, never the frontier) finds every entry that anybody acted on, and at most a round that nobody did.
3. One writer a line, still: the mirror's region has the same name and the same writer. In the one region with several
   writers, the epoch table, a flush copies whole lines of 64 bytes, which are the writer's own; it never copies what it
   did not write, so nobody rolls back another's line. Its writers read others' lines in the mirror: an epoch is
   open there no later than in the first fabric, and `open` returns only when it is in both, so whoever loads the table
   after loading something else sees as much as before.

Regions are made in the mirror first and removed there first: a region of the first fabric that anybody needs is in
both. A crash in between leaves a region that nobody knows of in the mirror, or one that is removed again in the first.
Payload logs are not mirrored: they are what makes a fabric large, and what is durable is on disks. After a loss the
next generation's sequencer reads the mirror (`ranges/recovery_sources.py`) and knows where lanes ended; payloads that
were on no disk are gone, and their publishers are told.

The mirror is only as good as its place: a folder on another memory module, which outlives the first one and the
processes that wrote it.
"""

from __future__ import annotations

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.region import Bytes, Fabric, Region, Shape
from embarcadero.limits import LINE_BYTES

_NOT_MIRRORED = frozenset({RegionKind.LOG})
_LINE_MASK = ~(LINE_BYTES - 1)


class MirroredRegion:
    """A region as its writer has it: `data` is the mirror's, and a flush goes to the mirror, then to the first fabric.

    Lines are copied by whole machine words, so a reader never sees half of a frontier.
    """

    __slots__ = ("_flush_first", "_flush_mirror", "_from", "_mirror", "_primary", "_to", "data", "name", "shape")

    def __init__(self, mirror: Region, primary: Region) -> None:
        self._mirror, self._primary = mirror, primary
        self.name, self.shape = primary.name, primary.shape
        self.data: Bytes = mirror.data
        self._from, self._to = mirror.data.data, primary.data.data
        self._flush_mirror, self._flush_first = mirror.flush, primary.flush

    def flush(self, offset: int, length: int) -> None:
        self._flush_mirror(offset, length)
        start, stop = offset & _LINE_MASK, offset + length + LINE_BYTES - 1 & _LINE_MASK
        self._to[start:stop] = self._from[start:stop]
        self._flush_first(offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        self._mirror.invalidate(offset, length)

    def reserve(self, offset: int, length: int) -> None:
        self._mirror.reserve(offset, length)
        self._primary.reserve(offset, length)

    def close(self) -> None:
        self._from, self._to = self.data[:0].data, self.data[:0].data
        self.data = self.data[:0]
        self._mirror.close()
        self._primary.close()


class MirroredFabric:
    """A fabric whose writers write to a mirror first. To readers it is the first fabric."""

    def __init__(self, primary: Fabric, mirror: Fabric) -> None:
        self._primary, self._mirror = primary, mirror
        self.generation, self.coherent_only = primary.generation, primary.coherent_only
        self.fence = primary.fence
        self.exists, self.names = primary.exists, primary.names

    def create(self, name: str, shape: Shape) -> Region:
        if shape.kind in _NOT_MIRRORED:
            return self._primary.create(name, shape)
        mirror = self._mirror.create(name, shape)
        try:
            return MirroredRegion(mirror, self._primary.create(name, shape))
        except EmbarcaderoError:
            self._mirror.remove(name)  # else the same name could not be tried again when there is room
            raise

    def attach(self, name: str, writable: bool = False) -> Region:
        if not writable:
            return self._primary.attach(name)
        primary = self._primary.attach(name, writable=True)
        if primary.shape.kind in _NOT_MIRRORED:
            return primary
        return MirroredRegion(self._mirror.attach(name, writable=True), primary)

    def remove(self, name: str) -> None:
        self._mirror.remove(name)
        self._primary.remove(name)
