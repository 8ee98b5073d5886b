"""Batches on replicas' disks, for `inspect`: what has left the fabric is looked for in segment files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import Entries
from embarcadero.storage.layout import range_folder
from embarcadero.storage.parse import NO_ENTRIES
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.real import RealDisk
from embarcadero.types import Range


class OnDisk(NamedTuple):
    """A batch's payload, and the replicas whose copy of it is right."""

    payload: bytes
    replicas: list[int]


@dataclass(frozen=True, slots=True)
class Disks:
    """The ranges of a cluster, and the folder of each replica."""

    ranges: Sequence[Range] = ()
    folders: Mapping[int, Path] = field(default_factory=dict)

    def find(self, lane: int, index: int | None, seq: int | None) -> Entries:
        """The entry at an index, or of the batch that holds a seq; none if no disk has it."""
        for reader in self._readers(lane, index):
            with suppress(EmbarcaderoError):
                wanted = reader.find_seq(seq) if index is None and seq is not None else index
                found = None if wanted is None else reader.entry(wanted)
                if found is not None and (seq is None or seq in range(*_seqs(found))):
                    return found
        return NO_ENTRIES

    def payload(self, lane: int, entry: Entries) -> OnDisk | None:
        """A batch's payload from any disk; None if no copy is there and right."""
        index, found, replicas = int(entry["index"][0]), b"", []
        for replica in self._replicas(lane, index):
            for reader in self._readers(lane, index, replica):
                with suppress(EmbarcaderoError):
                    entries, payloads = reader.read(index, index + 1, 1)
                    if payloads and int(entries["crc"][0]) == int(entry["crc"][0]):
                        found = bytes(payloads[0])
                        replicas.append(replica)
        return OnDisk(found, replicas) if replicas else None

    def _of(self, lane: int, index: int | None) -> Iterator[Range]:
        for range_ in self.ranges:
            inside = index is None or (range_.start <= index and (range_.end is None or index < range_.end))
            if range_.lane == lane and inside:
                yield range_

    def _replicas(self, lane: int, index: int) -> list[int]:
        return sorted({ref.replica for range_ in self._of(lane, index) for ref in range_.replicas})

    def _readers(self, lane: int, index: int | None, only: int | None = None) -> Iterator[RangeReader]:
        for range_ in self._of(lane, index):
            for ref in range_.replicas:
                folder = self.folders.get(ref.replica)
                if folder is None or not folder.is_dir() or only not in (None, ref.replica):
                    continue
                disk, number = RealDisk(folder), range_.number
                reader = RangeReader(disk, range_folder(lane, number), lane, number, range_.start)
                try:
                    yield reader
                finally:
                    reader.close()


def _seqs(entry: Entries) -> tuple[int, int]:
    first = int(entry["seq"][0])
    return first, first + int(entry["count"][0])
