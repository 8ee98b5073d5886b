"""Open a range's copy after a crash, or after manual changes to its files.

Finished segments are trusted for now by their names, headers, footers and sizes: two short reads each. Only segments
without a footer are scanned, in practice the active one. A torn end is cut. Damage before a later record, and files
that are missing or do not belong here, are put aside and recorded as damage, to be repaired from a peer. Data that was
written but perhaps never synced is written again and synced before it counts: after a failed sync, a system may treat
lost pages as clean ones.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from embarcadero.env import Disk, File, Missing
from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, every, sealed
from embarcadero.limits import LINE_BYTES, SCAN_BYTES
from embarcadero.storage.disk import join, write_whole
from embarcadero.storage.layout import (
    DAMAGED,
    FOOTER_BYTES,
    HEADER_BYTES,
    MARK_FILE,
    MENDED,
    START_FILE,
    FilePosition,
    Footer,
    Header,
    base_seqs,
    begun_name,
    damaged_name,
    damaged_span,
    decode_header,
    encode_header,
    encode_position,
    segment_name,
    was_header,
)  # fmt: skip
from embarcadero.storage.scan import SegmentScan, SparseIndex, Wrong, scan_segment
from embarcadero.storage.segment import (
    Damage,
    DamageKind,
    RangeSettings,
    SegmentInfo,
    SegmentWriter,
    begin_segment,
    put_segment_aside,
    read_footer,
    read_position,
    remove_lone_indexes,
    remove_segment,
)  # fmt: skip


@dataclass(slots=True)
class RecoveredRange:
    """The recovered state: finished segments, the active one, damage. `closed`: the range is sealed."""

    floor: FilePosition  # where the copy starts, or should start
    segments: tuple[SegmentInfo, ...]
    active: SegmentWriter
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    closed: bool = False


class Seen(NamedTuple):
    """A segment file, known by its first and last bytes."""

    base_seq: int
    size: int
    header: Header
    footer: Footer | None


def recover_range(disk: Disk, folder: str, first: Header, settings: RangeSettings) -> RecoveredRange:
    """Open the copy in a folder, or create it. `first` is the expected header of the range's first segment."""
    for _, path in _way_to(folder):
        if not disk.exists(path):
            disk.make_folder(path)
    return _Recovery(disk, folder, first, settings).run()


def make_folders(disk: Disk, folder: str) -> None:
    """Create a folder and its parents, synced."""
    for parent, path in _way_to(folder):
        if not disk.exists(path):
            disk.make_folder(path)
        disk.sync_folder(parent)  # also if it exists: its creator may have ended before its name was synced


def _way_to(folder: str) -> list[tuple[str, str]]:
    """Return a folder and its parents, outermost first, each with the folder that contains it."""
    names = folder.split("/")
    return [("/".join(names[:depth]), "/".join(names[: depth + 1])) for depth in range(len(names))]


class _Recovery:
    """One pass over a folder."""

    def __init__(self, disk: Disk, folder: str, first: Header, settings: RangeSettings) -> None:
        self._disk, self._folder, self._first, self._settings = disk, folder, first, settings
        self._damage: list[Damage] = []
        self._notes: list[str] = []
        self._start = read_position(disk, folder, START_FILE, first.lane, first.range_number)
        self._mark = read_position(disk, folder, MARK_FILE, first.lane, first.range_number)
        self._begun = disk.exists(begun_name(folder))
        self._infos: list[SegmentInfo] = []
        self._floor = self._start or FilePosition(first.base_index, first.base_seq, HEADER_BYTES)
        self._index, self._seq = self._floor.index, self._floor.seq
        """Where the next segment should start."""

    def run(self) -> RecoveredRange:
        self._sweep()
        for name in self._disk.list(self._folder):
            if (span := damaged_span(name)) is not None:
                self._load_damage(Damage(span[0], span[1], DamageKind(span[2]), name))
        seen = self._in_order([one for base_seq in self._bases() if (one := self._see(base_seq)) is not None])
        active: SegmentWriter | None = None
        closed = False
        for number, one in enumerate(seen):
            if not self._follows(one):
                continue
            later = seen[number + 1 :]
            if one.footer is not None:
                closed = one.footer.last and not later
                self._trust(one.footer, closed)
                active = self._closed(one.footer, one.header) if closed else None
                continue
            active = self._open(one, later)
            if active is not None:
                break
        if active is None:
            active = self._begin()
        self._settle(active, closed)
        return RecoveredRange(self._floor, tuple(self._infos), active, self._damage, self._notes, closed)

    # --- files --------------------------------------------------------------------------------------------------------
    def _path(self, base_seq: int) -> str:
        return join(self._folder, segment_name(base_seq))

    def _bases(self) -> list[int]:
        return base_seqs(self._disk.list(self._folder))

    def _sweep(self) -> None:
        """Finish interrupted work: remove drafts, and segments that were being dropped or put aside."""
        for name in self._disk.list(self._folder):
            if name.endswith(".tmp"):
                self._disk.remove(join(self._folder, name))
        for base_seq in self._bases():
            if self._start is not None and base_seq < self._start.seq:
                remove_segment(self._disk, self._folder, base_seq)
        remove_lone_indexes(self._disk, self._folder)

    def _see(self, base_seq: int) -> Seen | None:
        """Read a segment's header and footer. A file that does not match its name is put aside."""
        file = self._disk.open(self._path(base_seq), writable=True)
        try:
            size = file.size()
            raw = file.pread(HEADER_BYTES, 0)
            header = decode_header(raw, self._path(base_seq))
            if header is None:
                header = self._mend_header(file, raw, base_seq)
            if header is not None and header._replace(base_index=0) == self._first._replace(
                base_index=0, base_seq=base_seq
            ):
                tail = file.pread(FOOTER_BYTES, max(0, size - FOOTER_BYTES))
                return Seen(base_seq, size, header, read_footer(tail, size, header))
        finally:
            file.close()
        if any(raw):
            self._put_aside(base_seq, header)
        else:
            self._disk.remove(self._path(base_seq))  # a crash came before its header was synced
        return None

    def _mend_header(self, file: File, raw: bytes, base_seq: int) -> Header | None:
        """Rewrite a damaged header from the first record, if it was this segment's header."""
        entry = np.frombuffer(file.pread(LINE_BYTES, HEADER_BYTES), dtype=np.uint8)
        if not any(raw) or len(entry) < LINE_BYTES:
            return None
        first = entry.view(ORDER)
        if not every(sealed(first)) or int(first["seq"][0]) != base_seq:
            return None
        header = self._first._replace(base_index=int(first["index"][0]), base_seq=base_seq)
        if not was_header(raw, header):
            return None
        file.pwrite([encode_header(header)], 0)
        file.sync()
        self._notes.append(f"the damaged header of {self._path(base_seq)} was rewritten from its first record")
        return header

    def _put_aside(self, base_seq: int, header: Header | None) -> None:
        problem = "is damaged from its start" if header is None else f"belongs to another range ({header})"
        self._notes.append(f"{self._path(base_seq)} {problem}; it was put aside")
        put_segment_aside(self._disk, self._folder, base_seq)

    # --- the chain ----------------------------------------------------------------------------------------------------
    def _in_order(self, seen: list[Seen]) -> list[Seen]:
        """Return segments by their base seqs, without those whose indexes contradict an earlier one."""
        kept: list[Seen] = []
        for one in seen:
            if kept and one.header.base_index < kept[-1].header.base_index:
                self._put_aside(one.base_seq, one.header)
            else:
                kept.append(one)
        return kept

    def _follows(self, one: Seen) -> bool:
        """Return whether a segment continues the chain, perhaps after a gap that is damage."""
        if one.header.base_index < self._index or one.base_seq < self._seq:
            self._put_aside(one.base_seq, one.header)
            return False
        if one.header.base_index > self._index:
            self._note_damage(self._index, one.header.base_index, DamageKind.FILE, b"")
            self._notes.append(f"segment {segment_name(self._seq)} of {self._folder} is missing")
        self._index, self._seq = one.header.base_index, one.base_seq
        return True

    def _trust(self, footer: Footer, closed: bool) -> None:
        if not closed:  # also one marked as last, if another segment follows
            self._infos.append(SegmentInfo(*footer[:-1], True))
        self._index, self._seq = footer.end_index, footer.end_seq

    def _closed(self, footer: Footer, header: Header) -> SegmentWriter:
        """Open the last segment of a sealed range."""
        file = self._disk.open(self._path(footer.base_seq))
        file.close()  # it is never written again
        active = open_as_empty(file, header, self._settings)
        active.position, active.end, active.end_seq = footer.bytes, footer.end_index, footer.end_seq
        active.last_us, active.footer = footer.last_us, footer
        return active

    def _open(self, one: Seen, later: list[Seen]) -> SegmentWriter | None:
        """Scan a segment without a footer. None: it is complete, and others follow."""
        file = self._disk.open(self._path(one.base_seq), writable=True)
        limit = later[0].header.base_index if later else 1 << 63
        vouched = any(other.footer is not None for other in later)
        synced = one.size if vouched else self._synced(one.base_seq)
        scan = scan_segment(file, one.header, self._settings.index_every_bytes, synced, limit)
        for wrong in scan.wrong:
            self._put_span_aside(file, wrong, limit if later else None)
        active = open_as_empty(file, one.header, self._settings)
        active.position, active.end, active.end_seq = scan.position, scan.end, scan.end_seq
        active.last_us, active.index = scan.last_us, scan.sparse
        short = later and scan.end < limit
        damaged = bool(scan.wrong) and scan.wrong[-1].end is None  # damaged up to its end: such data is never cut
        if later and (not short or damaged or vouched):
            self._complete(file, active, scan, one, later[0])
            return None
        if short:
            self._notes.append(f"{self._folder}: data after {scan.end} was never synced and is torn")
            for other in reversed(later):
                remove_segment(self._disk, self._folder, other.base_seq)
        file.truncate(scan.position)
        self._write_again(file, min(scan.position, self._synced(one.base_seq)), scan.position)
        self._index, self._seq = scan.end, scan.end_seq
        return active

    def _complete(self, file: File, active: SegmentWriter, scan: SegmentScan, one: Seen, after: Seen) -> None:
        """Finish a segment that only lacks its footer. Missing records are noted as damage."""
        size = file.size()
        if scan.end < after.header.base_index:
            self._note_damage(scan.end, after.header.base_index, DamageKind.SPAN, b"")
        else:
            size = scan.position
            file.truncate(size)
            self._write_again(file, HEADER_BYTES, size)
            self._sync_following(after)
            active.finish(self._disk, self._folder, last=False)
        info = SegmentInfo(
            one.header.base_index, one.base_seq, after.header.base_index, after.base_seq, size, scan.last_us, True
        )
        file.close()
        self._infos.append(info)
        self._index, self._seq = after.header.base_index, after.base_seq

    def _sync_following(self, after: Seen) -> None:
        """Sync the next segment's header and name, before a footer claims that it follows."""
        file = self._disk.open(self._path(after.base_seq), writable=True)
        try:
            file.pwrite([encode_header(after.header)], 0)
            file.sync()
        finally:
            file.close()
        self._disk.sync_folder(self._folder)

    def _synced(self, base_seq: int) -> int:
        """Return how many bytes of a segment are known to have been synced."""
        mark = self._mark
        if mark is None or mark.seq < base_seq:
            return 0
        return mark.position if mark.seq == base_seq else 1 << 63

    def _begin(self) -> SegmentWriter:
        """Continue with an empty segment: the first one, or the replacement of a missing one at the end."""
        if self._begun or self._start is not None or self._infos:
            known = self._mark.index if self._mark is not None else 0
            self._note_damage(self._index, max(self._index + 1, known), DamageKind.TAIL, b"")
            self._notes.append(f"segment {segment_name(self._seq)} of {self._folder} is missing, its end is unknown")
        header = self._first._replace(base_index=self._index, base_seq=self._seq)
        return begin_segment(self._disk, self._folder, header, self._settings)

    # --- damage -------------------------------------------------------------------------------------------------------
    def _put_span_aside(self, file: File, wrong: Wrong, limit: int | None) -> None:
        found = file.pread(wrong.stop - wrong.position, wrong.position)
        if wrong.end is None and limit is None:
            known = self._mark.index if self._mark is not None else 0
            self._note_damage(wrong.first, max(wrong.first + 1, known), DamageKind.TAIL, found)
        else:
            self._note_damage(wrong.first, wrong.end or limit or wrong.first + 1, DamageKind.SPAN, found)
        self._notes.append(f"{self._folder}: records from {wrong.first} on are damaged; they were put aside")

    def _load_damage(self, damage: Damage) -> None:
        """Load noted damage. Damage below the copy's start is cleared, which a crash may have prevented."""
        self._damage.append(damage)
        if damage.is_below(self._floor.index):
            self._clear_damage(damage)

    def _note_damage(self, first: int, end: int, kind: DamageKind, found: bytes) -> None:
        damage = Damage(first, end, kind, damaged_name(first, end, kind))
        if any(other.covers(damage) for other in self._damage):
            return
        write_whole(self._disk, join(self._folder, damage.name), [found])
        for less in [other for other in self._damage if damage.covers(other)]:
            self._clear_damage(less)
        self._damage.append(damage)

    def _clear_damage(self, damage: Damage) -> None:
        path = join(self._folder, damage.name)
        self._disk.rename(path, path.removesuffix(DAMAGED) + MENDED)
        self._damage = [other for other in self._damage if other != damage]

    # --- done ---------------------------------------------------------------------------------------------------------
    def _write_again(self, file: File, start: int, stop: int) -> None:
        start = 0 if start <= HEADER_BYTES else start  # includes the header
        for position in range(start, stop, SCAN_BYTES):
            file.pwrite([file.pread(min(SCAN_BYTES, stop - position), position)], position)
        file.sync()

    def _settle(self, active: SegmentWriter, closed: bool) -> None:
        """Sync everything, including names, before the copy counts."""
        if not closed:
            active.file.sync()
        self._disk.sync_folder(self._folder)
        for parent, _ in reversed(_way_to(self._folder)):  # last: a journal wrote these with the file, so it is cheap
            self._disk.sync_folder(parent)
        if self._start is None:
            first = self._infos[0] if self._infos else active.info
            at = min(first.base_index, self._first.base_index), min(first.base_seq, self._first.base_seq)
            start = FilePosition(*at, HEADER_BYTES, self._first.lane, self._first.range_number)
            write_whole(self._disk, join(self._folder, START_FILE), [encode_position(start, START_FILE)])
        if not self._begun:  # after everything else: an incomplete copy must not count as missing later
            with suppress(EmbarcaderoError):
                self._disk.open(begun_name(self._folder), create=True).close()
                self._disk.sync_folder("")


def open_as_empty(file: File, header: Header, settings: RangeSettings) -> SegmentWriter:
    """Open an existing segment as if it were empty."""
    index = SparseIndex(settings.index_every_bytes)
    return SegmentWriter(file, header, HEADER_BYTES, header.base_index, header.base_seq, index)


def remove_range(disk: Disk, folder: str) -> None:
    """Remove a copy permanently."""
    with suppress(Missing):
        disk.remove(join(folder, START_FILE))
        disk.sync_folder(folder)
    with suppress(Missing):
        for name in disk.list(folder):
            with suppress(Missing):
                disk.remove(join(folder, name))
        disk.remove_folder(folder)
        disk.sync_folder(folder.rpartition("/")[0])
    with suppress(Missing):
        disk.remove(begun_name(folder))  # last: as long as files remain, the copy still counts as begun
        disk.sync_folder("")
