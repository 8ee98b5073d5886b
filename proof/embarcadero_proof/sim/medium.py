"""The parts of a disk: files and folders as processes see them, as they are on the medium, and writes under way.

All processes see a write immediately. The write is on the medium once its file was synced; until then a power cut
leaves any part of it, sector by sector. A name is also visible immediately, and permanent once its folder was synced.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

SECTOR_BYTES: Final = 512


class Write(NamedTuple):
    """One write, or (`data` is None) one change of a file's size."""

    offset: int
    data: bytes | None

    def do(self, target: bytearray) -> None:
        """Apply the whole write."""
        if self.data is None:
            _resize(target, self.offset)
        else:
            _resize(target, max(len(target), self.offset))
            target[self.offset : self.offset + len(self.data)] = self.data

    def by_sector(self) -> list[tuple[int, Write]]:
        """Split the write: (sector, the part of this write in it)."""
        data = self.data or b""
        stop = self.offset + len(data)
        parts = []
        for first in range(self.offset // SECTOR_BYTES * SECTOR_BYTES, stop, SECTOR_BYTES):
            start, end = max(first, self.offset), min(first + SECTOR_BYTES, stop)
            parts.append((first, Write(start, data[start - self.offset : end - self.offset])))
        return parts


class SimFile:
    """One file of a disk, independent of its name."""

    def __init__(self) -> None:
        self.live = bytearray()
        self.medium = bytearray()
        self.under_way: list[Write] = []
        self.unspoiled: bytearray | None = None  # the medium as if it had kept all that was written
        self._unsure = False
        self.cuts = 0  # how often it was shortened

    def write(self, write: Write) -> None:
        """Write so that all processes see it."""
        self.cuts += write.data is None and write.offset < len(self.live)
        write.do(self.live)
        self.under_way.append(write)

    def spoil(self) -> None:
        """Remember the intact medium before rot loses or changes part of it."""
        if self.unspoiled is None:
            self.unspoiled = bytearray(self.medium)

    def _keep(self, write: Write) -> None:
        write.do(self.medium)
        if self.unspoiled is not None:
            write.do(self.unspoiled)

    def arrive(self) -> None:
        """Put all writes on the medium."""
        for write in self.under_way:
            self._keep(write)
        self.under_way.clear()

    def _arrive_partly(self, rng: random.Random) -> bool:
        """Leave each sector on the medium in its state at some moment between the writes to it."""
        share = rng.choice([0.0, 0.5, 0.5, 0.9, 1.0])
        writes, self.under_way = self.under_way, []
        missed: set[int] = set()
        for write in writes:
            if write.data is None:
                missed.clear()
                if rng.random() < share:
                    self._keep(write)
            for sector, part in write.by_sector():
                if sector not in missed and rng.random() < share:
                    self._keep(part)
                else:
                    missed.add(sector)
        return bool(writes)

    def fail(self, rng: random.Random) -> None:
        """Fail a sync: some writes have arrived, the rest never will, but may be visible until the cache drops it."""
        self._arrive_partly(rng)
        _resize(self.medium, len(self.live))
        self._unsure = True
        if rng.getrandbits(1):
            self.drop_cache()

    def drop_cache(self) -> None:
        """Drop the data of a failed sync: processes see it no more."""
        if self._unsure:
            self.live = bytearray(self.medium)
            for write in self.under_way:
                write.do(self.live)
            self._unsure = False

    def lose_power(self, rng: random.Random) -> None:
        """Keep any part of the writes under way. A file that grew may keep its new length, with zeros in it."""
        longest = len(self.live)
        if self._arrive_partly(rng) and longest > len(self.medium) and rng.getrandbits(1):
            _resize(self.medium, longest)
        self.live, self._unsure = bytearray(self.medium), False

    def flip(self, position: int, bit: int) -> None:
        """Flip a bit on the medium; the cache does not have that page."""
        self.spoil()
        for target in (self.live, self.medium):
            if position < len(target):
                target[position] ^= 1 << bit


class SimFolder:
    """One folder: names as processes see them, and as they are on the medium."""

    def __init__(self) -> None:
        self.live: dict[str, Node] = {}
        self.medium: dict[str, Node] = {}


Node = SimFile | SimFolder


class Naming(NamedTuple):
    """A change of a name: set, or removed (None)."""

    folder: SimFolder
    name: str
    node: Node | None

    def do(self, on_medium: bool) -> None:
        """Apply the change."""
        names = self.folder.medium if on_medium else self.folder.live
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


class Names:
    """The tree of names. A change of several names at once (a rename) arrives at once, or not at all."""

    def __init__(self) -> None:
        self.root = SimFolder()
        self._under_way: list[tuple[Naming, ...]] = []

    def change(self, *namings: Naming) -> None:
        """Change names so that all processes see it."""
        for naming in namings:
            naming.do(on_medium=False)
        self._under_way.append(namings)

    def arrive(self, folder: SimFolder) -> None:
        """Put the names of one folder on the medium."""
        self._arrive([change for change in self._under_way if any(naming.folder is folder for naming in change)])

    def lose_power(self, rng: random.Random) -> None:
        """Keep any part of the changes."""
        self._arrive([change for change in self._under_way if rng.getrandbits(1)])
        self._under_way.clear()
        for folder in self.folders():
            folder.live = dict(folder.medium)
        for file in self.files():
            file.lose_power(rng)

    def _arrive(self, changes: list[tuple[Naming, ...]]) -> None:
        for change in changes:
            for naming in change:
                naming.do(on_medium=True)
        self._under_way = [change for change in self._under_way if all(change is not done for done in changes)]

    def walk(self, on_medium: bool = False) -> list[tuple[str, Node]]:
        """List all paths below the root, sorted, as seen or as on the medium."""
        found: list[tuple[str, Node]] = []

        def look(folder: SimFolder, prefix: str) -> None:
            names = folder.medium if on_medium else folder.live
            for name in sorted(names):
                found.append((prefix + name, names[name]))
                node = names[name]
                if isinstance(node, SimFolder):
                    look(node, f"{prefix}{name}/")

        look(self.root, "")
        return found

    def files(self, on_medium: bool = False) -> list[SimFile]:
        """List all files."""
        return [node for _, node in self.walk(on_medium) if isinstance(node, SimFile)]

    def folders(self) -> list[SimFolder]:
        """List all folders on the medium, the root first."""
        return [self.root, *(node for _, node in self.walk(on_medium=True) if isinstance(node, SimFolder))]


def _resize(target: bytearray, size: int) -> None:
    if size < len(target):
        del target[size:]
    else:
        target.extend(bytes(size - len(target)))
