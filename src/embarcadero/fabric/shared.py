"""The fabric of real processes, and its primitives.

Every region is a file on a memory file system, mapped by all processes that use it. The primitives are chosen for the
machine and the kind of memory.

Coherent (the default): all roles share one host with coherent caches. On x86-64, stores become visible in program order
and loads happen in program order, so flush and invalidate do nothing (a Python call already keeps the interpreter from
reordering). Only the full fence is real. Dropping cache lines would empty the cache without any use.

Incoherent (memory shared by several hosts): the native module writes back and drops cache lines.

A region appears whole. Its file is made under a hidden name, sized, given its superblock, and only then linked to its
name. (A link fails when the name is taken; a rename would replace the file.) Regions get their memory immediately, so
that a full file system is an error here and not a SIGBUS later. Only checkpoints stay sparse: they are large tables of
which few rows are used, and their writer reserves the rows that it is about to write.

Allocating and zeroing memory is by far the slowest part of making a region. A standby sequencer, which has to be quick
at a takeover, therefore makes spares: files without a name, which end with their process unless they become regions.

With a mirror, all metadata is in a second fabric first, so losing the first fabric loses no ordered entry: see
`MirroredFabric`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import platform
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from embarcadero.errors import BadRegion, EmbarcaderoError, FabricFull, NotAvailable
from embarcadero.fabric.layout import SUPERBLOCK, RegionKind
from embarcadero.fabric.region import Bytes, Fabric, Region, Shape, check_name, read_superblock, write_superblock
from embarcadero.limits import LINE_BYTES

SpanPrimitive = Callable[[Bytes, int, int], None]


class Native(Protocol):
    """Interface of the C module (native/primitives.c)."""

    coherent_only: bool
    write_back: str

    def flush(self, buffer: Bytes, offset: int, length: int, /) -> None: ...
    def invalidate(self, buffer: Bytes, offset: int, length: int, /) -> None: ...
    def fence(self) -> None: ...


class Primitives(NamedTuple):
    """Functions that flush and invalidate a span of a buffer, and a fence."""

    flush: SpanPrimitive
    invalidate: SpanPrimitive
    fence: Callable[[], None]


def _load_native() -> Native | None:
    try:
        return cast(Native, importlib.import_module("embarcadero.fabric._native"))
    except ImportError:
        return None


NATIVE = _load_native()
native_available = NATIVE is not None
strongly_ordered = platform.machine() in ("x86_64", "AMD64")

_BUILD_HINT = "install a C compiler and Python's headers, then install embarcadero again"
_fence_lock = threading.Lock()


def ordered_by_hardware(buffer: Bytes, offset: int, length: int) -> None:
    """Do nothing: coherent x86-64 memory keeps the order of stores and the order of loads."""


def _fence_by_lock() -> None:
    """Fence by taking a lock: an atomic read-modify-write is a full fence on x86-64."""
    with _fence_lock:
        pass


def choose(coherent: bool) -> Primitives:
    """Choose the primitives for a fabric. Raises NotAvailable when this machine does not support it."""
    if coherent and strongly_ordered:
        return Primitives(ordered_by_hardware, ordered_by_hardware, NATIVE.fence if NATIVE else _fence_by_lock)
    if NATIVE is None:
        problem = "on this processor" if coherent else "with incoherent memory"
        raise NotAvailable(f"the native module is missing; it is needed {problem}", _BUILD_HINT)
    if not coherent and NATIVE.coherent_only:
        raise NotAvailable("incoherent memory needs an x86-64 processor", "run all roles on one coherent host")
    return Primitives(NATIVE.flush, NATIVE.invalidate, NATIVE.fence)


def describe(coherent: bool = True) -> str:
    """Describe the primitives on this machine in one sentence, for `status`."""
    if NATIVE is None:
        return "All roles must share one coherent x86-64 host: the native module is missing."
    if coherent:
        return "All roles share one coherent host; cache lines are left alone."
    return f"Memory is treated as incoherent; cache lines are written back with {NATIVE.write_back}."


_SPARSE = frozenset({RegionKind.CHECKPOINT})
_SPARSE_NAMES = "checkpoint-"
_MANY_NAMES = "order-"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class SharedRegion:
    """One mapped file. `data` keeps the mapping alive, and so does every view of it."""

    __slots__ = ("_flush", "_invalidate", "_path", "data", "name", "shape")

    def __init__(self, name: str, shape: Shape, data: Bytes, primitives: Primitives, path: Path) -> None:
        self.name, self.shape, self.data, self._path = name, shape, data, path
        self._flush, self._invalidate = primitives.flush, primitives.invalidate

    def flush(self, offset: int, length: int) -> None:
        self._flush(self.data, offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        self._invalidate(self.data, offset, length)

    def reserve(self, offset: int, length: int) -> None:
        with _full_is_typed(self.name, length):
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                raise BadRegion(f"region {self.name} was removed", "its writer was replaced") from None
            try:
                os.posix_fallocate(fd, offset, length)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Release the mapping. It ends with its last view, since unmapping memory in use would crash the process."""
        self.data = _NOTHING


class CoherentRegion(SharedRegion):
    """A mapped file of coherent memory. Flush and invalidate do nothing, with as little cost per call as possible."""

    __slots__ = ()

    def flush(self, offset: int, length: int) -> None:
        pass

    def invalidate(self, offset: int, length: int) -> None:
        pass


class _Spare(NamedTuple):
    """Memory for a future region: zeroed, mapped, without a name."""

    fd: int
    data: Bytes


class SharedFabric:
    """Regions in a folder. `coherent=False` is for memory that several hosts share without coherent caches."""

    def __init__(self, folder: Path, generation: int, *, coherent: bool = True, hugepages: bool = False) -> None:
        self.folder, self.generation, self.coherent_only = folder, generation, coherent
        self._hugepages = hugepages
        self._primitives = choose(coherent)
        self._region = CoherentRegion if self._primitives.flush is ordered_by_hardware else SharedRegion
        self.fence = self._primitives.fence
        self._spares: list[_Spare] = []

    def create(self, name: str, shape: Shape) -> SharedRegion:
        path = self._path(name)
        spare = next((spare for spare in self._spares if len(spare.data) == shape.size), None)
        if spare is not None and shape.kind not in _SPARSE:
            return self._create_from(spare, name, path, shape)
        with _full_is_typed(name, shape.size):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._hidden_file() as (hidden, fd):
                # A sparse page is zeroed in the cache of the host that touches it first: only coherent hosts see that.
                sparse = shape.kind in _SPARSE and self.coherent_only
                if sparse:
                    os.ftruncate(fd, shape.size)
                    os.posix_fallocate(fd, 0, SUPERBLOCK.itemsize)
                data = self._map(fd, shape.size, writable=True) if sparse else self._allocate(fd, shape.size)
                write_superblock(data, shape, self.generation)
                region = self._region(name, shape, data, self._primitives, path)
                region.flush(0, shape.size if not sparse else SUPERBLOCK.itemsize)
                try:
                    os.link(hidden, path)
                except FileExistsError:
                    raise _exists_already(name) from None
        return region

    def _create_from(self, spare: _Spare, name: str, path: Path, shape: Shape) -> SharedRegion:
        """Turn a spare into a region."""
        self._spares.remove(spare)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_superblock(spare.data, shape, self.generation)
            region = self._region(name, shape, spare.data, self._primitives, path)
            region.flush(0, shape.size)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)  # Python follows the link only with a dir_fd
            try:
                os.link(f"/proc/self/fd/{spare.fd}", path, src_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        except FileExistsError:
            raise _exists_already(name) from None
        finally:
            os.close(spare.fd)
        return region

    def keep_spares(self, like: str, bytes_max: int) -> bool:
        """Keep memory ready for regions like those in the folder `like`: the same number of the same sizes.

        Makes at most one spare, and returns whether it did. Gives up spares whose size is not wanted any more. Regions
        beyond `bytes_max`, or without space for a spare, get their memory when they are made.
        """
        wanted = Counter[int]()
        for size in self._sizes_below(like):
            if size + sum(each * count for each, count in wanted.items()) <= bytes_max:
                wanted[size] += 1
        missing = wanted - Counter(len(spare.data) for spare in self._spares)
        for size in missing:
            self.give_up_spares(wanted)
            return self._make_spare(size)
        return False

    def give_up_spares(self, but: Counter[int] | None = None) -> None:
        """Give back the memory of spares, except for those counted in `but` (number by size)."""
        wanted, kept = Counter(but), []
        for spare in self._spares:
            if wanted[len(spare.data)] > 0:
                wanted[len(spare.data)] -= 1
                kept.append(spare)
            else:
                os.close(spare.fd)
        self._spares = kept

    def _make_spare(self, size: int) -> bool:
        try:
            fd = os.open(self.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError:
            return False  # the file system does not support unnamed files
        try:
            self._spares.append(_Spare(fd, self._allocate(fd, size)))
        except OSError:
            os.close(fd)
            return False
        return True

    def _sizes_below(self, like: str) -> list[int]:
        """Sizes of the regions in a folder that are not sparse. Order rings, of which there may be many, come last."""
        try:
            found = [(entry.name, entry.stat().st_size) for entry in os.scandir(self._path(like))]
        except FileNotFoundError:
            return []
        dense = [(name.startswith(_MANY_NAMES), name, size) for name, size in found if _SPARSE_NAMES not in name]
        return [size for _, _, size in sorted(dense)]

    def attach(self, name: str, writable: bool = False) -> SharedRegion:
        path = self._path(name)
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
            try:
                data = self._map(fd, os.fstat(fd).st_size, writable)
            finally:
                os.close(fd)
        except OSError as problem:
            raise BadRegion(f"region {name} cannot be mapped: {problem.strerror}", "is the cluster up?") from None
        self._primitives.invalidate(data, 0, min(len(data), SUPERBLOCK.itemsize))
        return self._region(name, read_superblock(name, data, self.generation), data, self._primitives, path)

    def exists(self, name: str) -> bool:
        return os.path.isfile(f"{self.folder}/{check_name(name)}")

    def names(self) -> list[str]:
        above = len(str(self.folder)) + 1
        return sorted(
            f"{folder}/{file}"[above:]
            for folder, _, files in os.walk(self.folder)
            for file in files
            if not file.startswith(".")
        )

    def remove(self, name: str) -> None:
        path = self._path(name)
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            # A folder belongs to one writer, which is permanently gone when its last region is removed.
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / check_name(name)

    @contextlib.contextmanager
    def _hidden_file(self) -> Iterator[tuple[Path, int]]:
        """Make a file with a hidden name. The file is removed afterwards unless it was linked to another name."""
        hidden = self.folder / f".making-{secrets.token_hex(8)}"
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            yield hidden, fd
        finally:
            os.close(fd)
            hidden.unlink(missing_ok=True)

    def _allocate(self, fd: int, size: int) -> Bytes:
        """Allocate a file's memory, and map it. Raises OSError when there is no space.

        Advice about huge pages applies only to pages that are touched after it, through the mapping that was advised.
        So with huge pages the mapping comes first and touches all pages. `posix_fallocate` afterwards detects a full
        file system.
        """
        if not self._hugepages:
            os.posix_fallocate(fd, 0, size)
            return self._map(fd, size, writable=True, populate=True)
        os.ftruncate(fd, size)
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):  # an old kernel, or no space: `posix_fallocate` allocates the rest
                mapped.madvise(advice)
        os.posix_fallocate(fd, 0, size)
        return np.frombuffer(mapped, dtype=np.uint8)

    def _map(self, fd: int, size: int, writable: bool, populate: bool = False) -> Bytes:
        if size == 0:
            return _NOTHING
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapped = mmap.mmap(fd, size, flags=flags, prot=protection)
        if self._hugepages:
            with contextlib.suppress(OSError):  # only advice: a kernel without huge pages does not follow it
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, dtype=np.uint8)


@contextlib.contextmanager
def _full_is_typed(name: str, size: int) -> Iterator[None]:
    """Raise FabricFull for errors that mean a full file system."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _NO_ROOM:
            raise
        raise FabricFull(
            f"the fabric has no space for region {name} ({size / (1 << 20):.1f} MiB): {problem.strerror}",
            "make the memory file system larger, or the regions smaller",
        ) from None


def _exists_already(name: str) -> BadRegion:
    return BadRegion(f"region {name} exists already", "stop the cluster that made it, or use another folder")


# --- a mirror ---------------------------------------------------------------------------------------------------------
_NOT_MIRRORED = frozenset({RegionKind.LOG})
_LINE_MASK = ~(LINE_BYTES - 1)


class MirroredRegion:
    """The writer's view of a mirrored region.

    `data` is that of the mirror. A flush goes to the mirror, and then to the first fabric. Lines are copied as whole
    machine words, so a reader never sees half of a frontier.
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
    """A fabric whose writers write to a mirror first. Readers use the first fabric.

    Theory of operation. A writer of a mirrored region has the `data` of the region in the *mirror*. No other process
    reads the mirror while the cluster lives: all attach regions of the first fabric. `flush` writes the lines back to
    the mirror, and only then copies them to the first fabric and writes them back there. So:

    1. Everything that a process has ever seen in the first fabric was in the mirror before. A line gets to the first
       fabric only by `flush`, and by then it is in the mirror's memory, out of its writer's cache. Memory may show
       stores before they are flushed, and a cache may write back a dirty line at any time. Both happen only to the
       mirror, which is ahead.
    2. The mirror is never in a state that the first fabric could not be in. A writer stores and flushes in the same
       order as without a mirror (entries, flush, *then* results or frontiers, flush), and each of these steps is in the
       mirror before the next begins. A reader of the mirror follows the rules of a takeover: checkpoint, then the
       valid contiguous entries after it, never the frontier. So it finds every entry that a process acted on, and at
       most one round on which no process acted.
    3. Every line still has one writer: the mirror's region has the same name and the same writer. The epoch table is
       the one region with several writers. There a flush copies whole lines of 64 bytes, which are the writer's own. It
       never copies another writer's line, so it cannot roll one back. Writers of the table read other lines in the
       mirror. An epoch is open there no later than in the first fabric, and `open` returns only when it is open in
       both. So a process that loads the table after loading something else sees as much as without a mirror.

    Regions are made in the mirror first and removed there first, so a region that is in use is in both. A crash in
    between leaves either an unused region in the mirror, or a region in the first fabric whose removal is repeated.
    Payload logs are not mirrored: they are the largest part of a fabric, and durable payloads are on disks. After a
    loss the next generation's sequencer reads the mirror and knows where lanes ended. Payloads that were on no disk are
    lost, and their publishers are informed.

    The mirror protects only as well as its location does. It should be a folder on another memory module, which
    outlives the first one and the processes that wrote it.
    """

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
            self._mirror.remove(name)  # otherwise a retry, when there is space, would find that the name is taken
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
