"""Reading one segment: by its own process or by others, while it grows, is finished or goes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from embarcadero.env import Disk
from embarcadero.errors import BadSegment, DiskFailed
from embarcadero.fabric.layout import ORDER, Entries, sealed
from embarcadero.fabric.layout import join as join_entries
from embarcadero.limits import INDEX_EVERY_BYTES, LINE_BYTES, LOCATE_BYTES, READ_BYTES
from embarcadero.storage.disk import join, read_whole
from embarcadero.storage.layout import (
    FOOTER_BYTES,
    HEADER_BYTES,
    INDEX_FILE,
    TIME_INDEX_FILE,
    FilePosition,
    Footer,
    Header,
    decode_footer,
    decode_header,
    decode_position,
    record_bytes,
    segment_name,
)  # fmt: skip
from embarcadero.storage.scan import (
    NO_ENTRIES,
    RECORD_BYTES_LARGEST,
    FileIndex,
    Parsed,
    SparseIndex,
    intact,
    load_index,
    parse,
    payloads,
)

_REPAIR = "the replica repairs it from a peer; read from another replica meanwhile"


class Piece(NamedTuple):
    """Some records as read, and where the next one is."""

    entries: Entries
    payloads: list[memoryview]
    position: int


class Spot(NamedTuple):
    """Where a record is in its segment, and what it takes there."""

    position: int
    bytes: int


class Point(NamedTuple):
    """A record by which a segment can be cut: its index and seq, and how many bytes there are to the next point."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    seq: int
    bytes: int


def read_footer(disk_bytes: bytes, size: int, header: Header) -> Footer | None:
    """A footer, if these last bytes of a file of this size are one and belong to this header."""
    footer = decode_footer(disk_bytes)
    if footer is None or footer.bytes + FOOTER_BYTES != size:
        return None
    return footer if (footer.base_index, footer.base_seq) == (header.base_index, header.base_seq) else None


def read_position(disk: Disk, folder: str, name: str, lane: int, number: int) -> FilePosition | None:
    """The start file or mark of a range, by its name; None if it is missing, damaged or another's."""
    try:
        position = decode_position(read_whole(disk, join(folder, name), LINE_BYTES), name)
    except DiskFailed:
        return None
    return position if position is not None and position.belongs_to(lane, number) else None


class SegmentReader:
    """One segment, open for reading. Raises Missing if it is gone, BadSegment if it is not what its name says."""

    def __init__(self, disk: Disk, folder: str, base_seq: int, lane: int, range_number: int) -> None:
        self._disk, self._folder = disk, folder
        self.name = join(folder, segment_name(base_seq))
        self._file = disk.open(self.name)
        header = decode_header(self._file.pread(HEADER_BYTES, 0), self.name)
        if header is None:
            raise BadSegment(f"the header of {self.name} is damaged", _REPAIR)
        if (header.lane, header.range_number, header.base_seq) != (lane, range_number, base_seq):
            raise BadSegment(f"{self.name} is a segment of another place: {header}", _REPAIR)
        self.header = header
        self.footer: Footer | None = None
        self._seq_index: FileIndex | None = None
        self._time_index: FileIndex | None = None
        self._looked = self._indexed = False
        self._learned = SparseIndex(INDEX_EVERY_BYTES)
        self._learned_to = HEADER_BYTES, header.base_index
        self.refresh()

    def refresh(self) -> None:
        """See whether it was finished meanwhile."""
        if self.footer is None:
            size = self._file.size()
            if size % LINE_BYTES == FOOTER_BYTES % LINE_BYTES and size >= HEADER_BYTES + FOOTER_BYTES:
                self.footer = read_footer(self._file.pread(FOOTER_BYTES, size - FOOTER_BYTES), size, self.header)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @property
    def data_end(self) -> int:
        """Where records end: for good if it is finished, for now if not."""
        return self._file.size() if self.footer is None else self.footer.bytes

    @property
    def end_index(self) -> int:
        """The index after its last record."""
        if self.footer is not None:
            return self.footer.end_index
        self._learn()
        return self._learned_to[1]

    # --- finding ------------------------------------------------------------------------------------------------------
    def locate(self, index: int) -> Spot | None:
        """Where a record is; None if it is not there (yet)."""
        if index == self.header.base_index:
            entry = self.entry(HEADER_BYTES)
            return Spot(HEADER_BYTES, record_bytes(int(entry["size"][0]))) if len(entry) else None
        found = self._first("index", index)
        return None if found is None or int(found[0]["index"][0]) != index else _spot(*found)

    def entry(self, position: int) -> Entries:
        """The entry at a position, unchecked; none, if the file ends before its end."""
        line = self._file.pread(LINE_BYTES, position)
        return np.frombuffer(line if len(line) == LINE_BYTES else b"", dtype=ORDER)  # a file may end within a line

    def index_of_seq(self, seq: int) -> int | None:
        """The batch that holds a record; None if it comes after all that is here."""
        found = self._first("seq", seq)
        return None if found is None else int(found[0]["index"][0])

    def index_of_time(self, us: int) -> int | None:
        """The first batch appended at this time or later; None if there is none here."""
        found = self._first("append_us", us)
        return None if found is None else int(found[0]["index"][0])

    def _first(self, field: str, value: int) -> tuple[Entries, int] | None:
        """The first entry at or above a value and its position; for seqs: the one that holds it, or is above."""
        for entries, positions in self.walk(*self._floor(field, value)):
            reached = entries[field] + entries["count"] > value if field == "seq" else entries[field] >= value
            if reached.any():
                number = int(reached.argmax())
                return entries[number : number + 1], positions[number]
        return None

    def _floor(self, field: str, value: int) -> tuple[int, int]:
        """Position and index of a record that is not after the one looked for, and near it."""
        self._load_indexes()
        point = self._floor_in_files(field, value) if self._indexed else None
        if point is None:
            self._indexed = False
            self._learn()
            learned = self._learned
            keys = {"index": learned.indices, "seq": learned.seqs, "append_us": learned.times}[field]
            number = (bisect_left if field == "append_us" else bisect_right)(keys, value) - 1
            return (learned.positions[number], learned.indices[number]) if number >= 0 else self._start
        return point

    @property
    def _start(self) -> tuple[int, int]:
        return HEADER_BYTES, self.header.base_index

    def _load_indexes(self) -> None:
        if self.footer is not None and not self._looked:
            self._looked = True
            self._seq_index = load_index(self._disk, self._folder, self.footer, INDEX_FILE)
            self._time_index = load_index(self._disk, self._folder, self.footer, TIME_INDEX_FILE)
            self._indexed = self._seq_index is not None and self._time_index is not None

    def _floor_in_files(self, field: str, value: int) -> tuple[int, int] | None:
        """From the index files; None if they lead to something else than they say."""
        index = self._time_index if field == "append_us" else self._seq_index
        if index is None or self.footer is None:
            return None
        if field == "index":
            return self._floor_by_index(index, value)
        number = index.floor(value, below=field == "append_us")
        if number is None:
            return self._start
        position = int(index.positions[number])
        found = self._index_at(position)
        if found is None or int(self.entry(position)[field][0]) != int(index.keys[number]):
            return None
        return position, found

    def _floor_by_index(self, index: FileIndex, value: int) -> tuple[int, int] | None:
        low, high = 0, len(index.positions)
        best = self._start
        while low < high:
            middle = (low + high) // 2
            position = int(index.positions[middle])
            found = self._index_at(position)
            if found is None:
                return None
            if found <= value:
                low, best = middle + 1, (position, found)
            else:
                high = middle
        return best

    def _index_at(self, position: int) -> int | None:
        """The index of the record at a position; None if no valid entry is there."""
        entry = self.entry(position)
        if not len(entry) or not sealed(entry)[0] or self.footer is None:
            return None
        index = int(entry["index"][0])
        return index if self.header.base_index <= index < self.footer.end_index else None

    def _learn(self) -> None:
        """Index what has not been looked at yet: all of it only where an index file is missing or wrong."""
        position, index = self._learned_to
        for entries, positions in self.walk(position, index, READ_BYTES):
            self._learned.add(entries, positions)
            last = entries[-1:]
            self._learned_to = positions[-1] + record_bytes(int(last["size"][0])), int(last["index"][0]) + 1

    # --- measuring ----------------------------------------------------------------------------------------------------
    def points(self, first: int, stop: int, every: int) -> list[Point]:
        """Records of [first, stop), the first of them and others about so many bytes apart, as the sparse index has it.

        BadSegment if a record is not where it should be. `stop` is at most `end_index`.
        """
        begin = self._position(first)
        end = self.data_end if stop >= self.end_index else self._position(stop)
        self._load_indexes()
        if self._indexed and self._seq_index is not None:
            known = self._seq_index.positions
        else:
            self._learn()
            known = np.array(self._learned.positions, dtype=np.int64)
        at = np.searchsorted(known, np.arange(begin + every, end, every))
        chosen = [int(position) for position in known[np.unique(at[at < len(known)])].tolist() if position < end]
        found = [(position, self.entry(position)) for position in (begin, *chosen)]
        marks = [(at_byte, int(e["index"][0]), int(e["seq"][0])) for at_byte, e in found if len(e) and sealed(e)[0]]
        marks = [mark for mark in marks if first <= mark[1] < stop]  # a wrong index costs a cut, never truth
        if not marks or marks[0][1] != first:
            raise BadSegment(f"record {first} in {self.name} at {begin} is damaged", _REPAIR)
        ends = [*(position for position, _, _ in marks[1:]), end]
        return [Point(index, seq, after - at) for (at, index, seq), after in zip(marks, ends, strict=True)]

    def _position(self, index: int) -> int:
        spot = self.locate(index)
        if spot is None:
            raise BadSegment(f"record {index} is not in {self.name} as it should be", _REPAIR)
        return spot.position

    # --- reading ------------------------------------------------------------------------------------------------------
    def walk(self, position: int, index: int, piece_bytes: int = LOCATE_BYTES) -> Iterator[tuple[Entries, list[int]]]:
        """Entries and their positions from a record on, some at a time, without payloads; as far as they are valid."""
        piece = LOCATE_BYTES
        end = self.data_end
        while position < end:
            data = self._file.pread(min(piece, end - position), position)
            parsed = parse(data, index, self._end_index, whole=False)
            if not parsed.offsets:
                return
            yield parsed.entries, [position + offset for offset in parsed.offsets]
            few = len(parsed.offsets) == 1 and parsed.end > piece
            piece = LINE_BYTES if few else LOCATE_BYTES if piece == LINE_BYTES else piece_bytes
            position += parsed.end
            index += len(parsed.offsets)

    @property
    def _end_index(self) -> int:
        return (1 << 63) if self.footer is None else self.footer.end_index

    def read(self, spot: Spot, index: int, end: int, max_bytes: int) -> Piece:
        """Records `index` to `end` from their place on: as many as fit `max_bytes`, at least one, checked.

        Nothing, if the record is not there yet. BadSegment if it is there, and wrong. Pieces are small enough to be
        checked while they are in the processor's cache.
        """
        found: list[Entries] = []
        views: list[memoryview] = []
        position, room = spot.position, max(1, max_bytes)
        stride = min(max(LINE_BYTES, spot.bytes), RECORD_BYTES_LARGEST)  # a damaged entry may claim anything
        while index < end and room > 0 and (not views or room >= stride):
            count = max(1, min(min(READ_BYTES, room) // stride, end - index))
            piece = self._read_some(position, count * stride, index, end, first=not views)
            if not piece.payloads:
                break
            found.append(piece.entries)
            views += piece.payloads
            taken, index = piece.position - position, index + len(piece.payloads)
            room, position, stride = room - taken, piece.position, taken // len(piece.payloads)
        return Piece(found[0] if len(found) == 1 else join_entries(found) if found else NO_ENTRIES, views, position)

    def _read_some(self, position: int, size: int, index: int, end: int, first: bool) -> Piece:
        data, parsed = self._load(position, size, index, end)
        good = intact(data, parsed.entries, parsed.offsets)
        if not good and first:
            data, parsed = self._load(position, size, index, end)  # it may have been half written
            good = intact(data, parsed.entries, parsed.offsets)
            if not good and self._broken(data, position, parsed):
                raise BadSegment(f"record {index} in {self.name} at {position} is damaged", _REPAIR)
        after = parsed.offsets[good] if good < len(parsed.offsets) else parsed.end
        entries, offsets = parsed.entries[:good], parsed.offsets[:good]
        return Piece(entries, payloads(data, entries, offsets), position + after)

    def _load(self, position: int, size: int, index: int, end: int) -> tuple[bytes, Parsed]:
        size = max(0, min(size, self.data_end - position))
        data = self._file.pread(size, position)
        parsed = parse(data, index, end)
        if not parsed.offsets and size < parsed.wanted <= RECORD_BYTES_LARGEST:
            data = self._file.pread(parsed.wanted, position)
            parsed = parse(data, index, end)
        return data, parsed

    def _broken(self, data: bytes, position: int, parsed: Parsed) -> bool:
        """Whether there is something wrong, and not just nothing (yet)."""
        if self.footer is not None:
            return position < self.footer.bytes
        if parsed.offsets:
            return True  # an entry and all bytes of its payload, and they do not fit
        return not parsed.wanted and len(data) >= LINE_BYTES and any(data[:LINE_BYTES]) and not self._ends_at(position)

    def _ends_at(self, position: int) -> bool:
        """Whether the segment was finished at this position meanwhile."""
        self.refresh()
        return self.footer is not None and self.footer.bytes == position


def _spot(entry: Entries, position: int) -> Spot:
    return Spot(position, record_bytes(int(entry["size"][0])))
