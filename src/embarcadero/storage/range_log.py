"""A replica's copy of one range: segments that are appended to, synced in groups, rolled over, cut and dropped.

One thread appends. The sync job may run in another thread. They share two immutable values, each replaced atomically.
The first is the written state: the job loads it when it starts, so it covers everything that arrived while the disk was
busy. The second is the tuple of segments: a reader sees the old one or the new one. Order on disk: records, sync, the
next segment's header and name, sync, footer. After a failed sync nothing above `synced` is trusted: `cut(log.synced)`
restarts from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from embarcadero.env import Disk, File, Part
from embarcadero.errors import BadSegment, BadValue, DiskFailed, EmbarcaderoError, TooMany, invariant
from embarcadero.fabric.layout import Entries
from embarcadero.limits import LINE_BYTES, SEGMENT_BYTES_MAX
from embarcadero.storage.disk import join, write_whole
from embarcadero.storage.layout import (
    DAMAGED,
    HEADER_BYTES,
    MARK_FILE,
    MENDED,
    START_FILE,
    FilePosition,
    Header,
    damaged_name,
    encode_header,
    encode_position,
    segment_name,
)  # fmt: skip
from embarcadero.storage.recovery import RecoveredRange, recover_range
from embarcadero.storage.scan import SparseIndex
from embarcadero.storage.segment import (
    Damage,
    DamageKind,
    RangeSettings,
    SegmentInfo,
    SegmentReader,
    SegmentWriter,
    begin_segment,
    check_records,
    put_segment_aside,
    remove_segment,
)  # fmt: skip


class _Written(NamedTuple):
    """The written state: rolled segments, the active segment, and where it ends."""

    rolled: tuple[SegmentWriter, ...]
    active: SegmentWriter
    position: int
    end: int


class RangeLog:
    """One range's copy, open for writing. Created by `create` or `recover`."""

    def __init__(self, disk: Disk, folder: str, start: int, settings: RangeSettings, found: RecoveredRange) -> None:
        self.disk, self.folder, self.settings = disk, folder, settings
        self.start, self._floor = start, found.floor
        self._sealed_segments = found.segments
        self._active = found.active
        self._written = _Written((), found.active, found.active.position, found.active.end)
        self._finished: deque[SegmentWriter] = deque()
        self._syncing = self._failed = False
        self._mark: File | None = None
        self._unmarked: _Written | None = None  # the synced state that is not yet in the mark
        self.synced = found.active.end
        self.sealed = found.closed
        self.damage: list[Damage] = found.damage
        self.notes: list[str] = found.notes
        """Actions of recovery, for people."""
        if not self.sealed:
            self._unmarked = self._written
            self.note_mark()

    @classmethod
    def create(
        cls, disk: Disk, folder: str, lane: int, range_number: int, start: int, start_seq: int, settings: RangeSettings
    ) -> RangeLog:
        """Create a copy. Its folder and first segment are synced on return. An existing one is recovered."""
        return cls.recover(disk, folder, lane, range_number, start, start_seq, settings)

    @classmethod
    def recover(
        cls, disk: Disk, folder: str, lane: int, range_number: int, start: int, start_seq: int, settings: RangeSettings
    ) -> RangeLog:
        """Open a copy as a crash may have left it. `damage` lists the parts that must come from a peer."""
        first = Header(lane, range_number, start, start_seq, settings.cluster)
        return cls(disk, folder, start, settings, recover_range(disk, folder, first, settings))

    # --- positions ----------------------------------------------------------------------------------------------------
    @property
    def end(self) -> int:
        """The next index to append."""
        return self._active.end

    @property
    def end_seq(self) -> int:
        """The next seq to append."""
        return self._active.end_seq

    @property
    def first(self) -> int:
        """The lowest index in the copy."""
        return self.segments[0].base_index

    @property
    def dirty(self) -> bool:
        """Whether there is data to sync."""
        return self.end > self.synced or any(rolled.footer is None for rolled in self._written.rolled)

    @property
    def failed(self) -> bool:
        """Whether a sync failed: nothing above `synced` is trusted until `cut(log.synced)`."""
        return self._failed

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(info.bytes for info in self.segments)

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """All segments, oldest first. The last one is active unless the range is sealed."""
        self._absorb()
        written = self._written
        return (*self._sealed_segments, *(rolled.info for rolled in written.rolled), written.active.info)

    def _absorb(self) -> None:
        """Adopt the segments that the sync job finished."""
        while self._finished:
            done = self._finished.popleft()
            rolled = tuple(one for one in self._written.rolled if one is not done)
            self._sealed_segments = (*self._sealed_segments, done.info)
            self._written = self._written._replace(rolled=rolled)
            done.file.close()

    # --- appending ----------------------------------------------------------------------------------------------------
    def append(self, entries: Entries, payloads: Sequence[Part]) -> None:
        """Append records that continue the log, with one write per segment. They are not synced.

        If it raises, some records may have been written: continue from `end`.
        """
        self._check_open()
        sizes = check_records(entries, payloads, self.end, self.end_seq)
        bytes_each = [LINE_BYTES + -(-size // LINE_BYTES) * LINE_BYTES for size in sizes]
        done = 0
        while done < len(bytes_each):
            count = self._fitting(bytes_each, done)
            if count == 0:
                self._roll()
                continue
            upto = done + count
            if count == len(bytes_each):
                self._active.write(entries, payloads, bytes_each)
            else:
                self._active.write(entries[done:upto], payloads[done:upto], bytes_each[done:upto])
            written = self._written
            self._written = _Written(written.rolled, written.active, self._active.position, self._active.end)
            done = upto

    def _fitting(self, bytes_each: Sequence[int], done: int) -> int:
        """Return how many records fit into the active segment; 0 means that a new segment is needed."""
        budget = self.settings.segment_bytes - self._active.position
        count = 0
        for size in bytes_each[done:]:
            if (budget := budget - size) < 0:
                break
            count += 1
        if count or self._active.may_roll:
            return count
        if self._active.position + bytes_each[done] > SEGMENT_BYTES_MAX:
            raise TooMany(f"{self.folder} has no space for another entry without records", "publish some records")
        return 1

    def _check_open(self) -> None:
        if self.sealed:
            raise BadValue(f"{self.folder} is sealed at {self.end}", "append to the lane's open range")
        if self._failed:
            raise DiskFailed(
                f"a sync in {self.folder} failed: data written after {self.synced} may be lost",
                "cut the log at its synced end, then append again",
            )

    def roll_if_due(self, now_us: int) -> bool:
        """Start the next segment if the active one is old. Call it regularly, with any monotonic clock."""
        active = self._active
        if self.sealed or self._failed or not active.may_roll:
            return False
        if active.opened_us is None:
            active.opened_us = now_us
        if now_us - active.opened_us < self.settings.segment_age_s * 1e6:
            return False
        self._roll()
        return True

    def _roll(self) -> None:
        old = self._active
        header = old.header._replace(base_index=old.end, base_seq=old.end_seq)
        new = begin_segment(self.disk, self.folder, header, self.settings)
        new.last_us = old.last_us
        self._absorb()
        self._active = new
        self._written = _Written((*self._written.rolled, old), new, new.position, new.end)

    # --- syncing ------------------------------------------------------------------------------------------------------
    def sync_job(self, mark: bool = True) -> Callable[[], int]:
        """Return a job for a worker that syncs everything written before it starts. It returns the synced index.

        Run one job at a time. If it raises, the log has failed. Without `mark`, call `note_mark` later: brokers wait
        for the sync, but not for the mark.
        """
        return self._sync if mark else self._sync_only

    def _sync(self) -> int:
        end = self._sync_only()
        self.note_mark()
        return end

    def _sync_only(self) -> int:
        invariant(not self._syncing, "one sync job at a time")
        written = self._written
        if self.sealed:
            return written.end
        self._syncing = True
        try:
            if self._failed:
                self._check_open()
            following = (*written.rolled, written.active)[1:]
            for rolled, after in zip(written.rolled, following, strict=True):
                if rolled.footer is None:
                    rolled.file.sync()
                    after.file.sync()
                    self.disk.sync_folder(self.folder)
                    rolled.finish(self.disk, self.folder, last=False)
                    self._finished.append(rolled)
            written.active.file.sync()
        except EmbarcaderoError:
            self._failed = True
            raise
        finally:
            self._syncing = False
        self.synced = max(self.synced, written.end)
        self._unmarked = written
        return written.end

    def note_mark(self) -> None:
        """Write the mark: how far the copy is synced. It helps recovery, but no data depends on it."""
        written, self._unmarked = self._unmarked, None
        if written is None:
            return
        header = written.active.header
        position = FilePosition(written.end, header.base_seq, written.position, header.lane, header.range_number)
        with suppress(EmbarcaderoError):
            self._mark_file().pwrite([encode_position(position, MARK_FILE)], 0)

    def _mark_file(self) -> File:
        if self._mark is None:
            self._mark = self.disk.open(join(self.folder, MARK_FILE), create=True)
        return self._mark

    # --- cutting, sealing, dropping -----------------------------------------------------------------------------------
    def cut(self, index: int) -> None:
        """Drop everything at or above an index. Synced on return. This is also how to continue after a failed sync.

        If the copy's first segments are missing, the whole copy may be above the index: then it starts again.
        """
        self._absorb()
        invariant(not self._syncing, "nothing is synced meanwhile")
        if index < self.first and index != self._floor.index:
            raise BadSegment(f"{self.folder} can't be cut at {index}: it starts at {self.first}", "repair it first")
        if self.sealed and index < self.end:
            raise BadValue(f"{self.folder} is sealed at {self.end}, and can't be cut at {index}")
        if index >= self.end and not self._failed:
            return
        if self._failed:
            invariant(index <= self.synced, "after a failed sync only synced data is kept")
        elif self._written.rolled:
            self._sync()  # finishes the segments that stay
        if index < self.first:
            self._restart()
            return
        segments = self.segments
        keep = max(number for number, info in enumerate(segments) if info.base_index <= index)
        while keep and not segments[keep - 1].sealed:
            keep -= 1  # this segment is not verified as finished: continue there
        base = segments[keep]
        position, seq, last_us = self._position_of(base, index)
        header = self._active.header
        self._lower_mark(FilePosition(index, base.base_seq, position, header.lane, header.range_number))
        self._close_written()
        for number in range(len(segments) - 1, keep, -1):
            self._remove_footer(segments[number - 1])
            remove_segment(self.disk, self.folder, segments[number].base_seq)
            self.disk.sync_folder(self.folder)
        self._continue(segments, keep, position, index, seq, last_us)

    def begin_at(self, index: int, seq: int) -> None:
        """Drop the whole copy, and start at a higher position: everything below is trimmed. Synced on return.

        Missing parts above that position, and tails of unknown length, are still recorded as missing. A crash at any
        point leaves at least this record.
        """
        invariant(not self._syncing and index >= self.end, "a new start is above the copy's end")
        missing = [one for one in self.damage if one.kind is DamageKind.TAIL or one.end > index]
        if missing:
            self.quarantine(index, max(index + 1, *(one.end for one in missing)), DamageKind.TAIL, b"")
        self._note_start(index, seq)
        self._restart()
        for damage in [one for one in self.damage if one.first < index]:
            self.healed(damage)

    def _note_start(self, index: int, seq: int) -> None:
        """Write the start file before dropping anything: only entries below were dropped by the replica."""
        header = self._active.header
        self._floor = FilePosition(index, seq, HEADER_BYTES, header.lane, header.range_number)
        write_whole(self.disk, join(self.folder, START_FILE), [encode_position(self._floor, START_FILE)])

    def _restart(self) -> None:
        """Drop the whole copy, and continue at its start position."""
        floor, header = self._floor, self._active.header
        self._lower_mark(FilePosition(floor.index, floor.seq, HEADER_BYTES, header.lane, header.range_number))
        self._close_written()
        for info in reversed(self.segments):
            remove_segment(self.disk, self.folder, info.base_seq)
            self.disk.sync_folder(self.folder)
        header = header._replace(base_index=floor.index, base_seq=floor.seq)
        active = begin_segment(self.disk, self.folder, header, self.settings)
        active.file.sync()
        self.disk.sync_folder(self.folder)
        self._continue_from(active, ())

    def _close_written(self) -> None:
        for one in (*self._written.rolled, self._active):
            one.file.close()

    def _continue_from(self, active: SegmentWriter, before: tuple[SegmentInfo, ...]) -> None:
        """Continue from the synced data, after these segments."""
        self._sealed_segments = before
        self._active = active
        self._written = _Written((), active, active.position, active.end)
        self.synced = active.end
        self._failed = False

    def _lower_mark(self, position: FilePosition) -> None:
        """Lower the mark before dropping data: it must not claim that dropped data was synced."""
        self._unmarked = None
        self._mark_file().pwrite([encode_position(position, MARK_FILE)], 0)
        self._mark_file().sync()

    def _position_of(self, info: SegmentInfo, index: int) -> tuple[int, int, int]:
        """Return (position, seq, time of the last record before) of an index in its segment."""
        if index == info.base_index:
            return HEADER_BYTES, info.base_seq, 0
        header = self._active.header
        reader = SegmentReader(self.disk, self.folder, info.base_seq, header.lane, header.range_number)
        try:
            before = reader.locate(index - 1)
            if before is None:
                raise BadSegment(f"{reader.name} can't be cut at {index}: it is damaged below that", "repair it first")
            entry = reader.entry(before.position)
            seq = int(entry["seq"][0]) + int(entry["count"][0])
            return before.position + before.bytes, seq, int(entry["append_us"][0])
        finally:
            reader.close()

    def _remove_footer(self, info: SegmentInfo) -> None:
        """Remove a segment's footer before the segment after it is removed."""
        file = self.disk.open(join(self.folder, segment_name(info.base_seq)), writable=True)
        try:
            file.truncate(info.bytes)
            file.sync()
        finally:
            file.close()

    def _continue(
        self, segments: tuple[SegmentInfo, ...], keep: int, position: int, index: int, seq: int, last_us: int
    ) -> None:
        """Continue writing to a segment at a position."""
        base = segments[keep]
        file = self.disk.open(join(self.folder, segment_name(base.base_seq)), writable=True)
        header = self._active.header._replace(base_index=base.base_index, base_seq=base.base_seq)
        file.truncate(position)
        file.pwrite([encode_header(header)], 0)  # a failed sync may have lost the header, and the segment's name
        file.sync()
        self.disk.sync_folder(self.folder)
        active = SegmentWriter(
            file, header, position, index, seq, SparseIndex(self.settings.index_every_bytes), last_us
        )
        reader = SegmentReader(self.disk, self.folder, base.base_seq, header.lane, header.range_number)
        for entries, positions in reader.walk(HEADER_BYTES, base.base_index):
            active.index.add(entries, positions)
        reader.close()
        self._continue_from(active, segments[:keep])

    def seal(self, end: int) -> None:
        """Seal the range permanently at `end`: drop records above; the rest is synced and never written again."""
        if self.sealed and end == self.end:
            return
        if end > self.end:
            raise BadValue(f"{self.folder} ends at {self.end} and can't be sealed at {end}", "repair it from a peer")
        self.cut(end)
        self._sync()
        self._absorb()
        self._active.finish(self.disk, self.folder, last=True)
        self.sealed = True
        for damage in [one for one in self.damage if one.kind is DamageKind.TAIL or one.first >= end]:
            self.healed(damage)
        self.close()

    def drop_below(self, index: int) -> int:
        """Drop sealed segments with all records below an index, except the last. Returns the bytes freed."""
        segments = self.segments
        sealed = self._sealed_segments
        gone = 0
        while gone < len(sealed) and sealed[gone].end_index <= index:
            gone += 1
        first = segments[gone]
        if self._floor.index < first.base_index <= index:  # also if the earlier segments are only missing
            self._note_start(first.base_index, first.base_seq)
        elif gone:  # the next segments are missing, and will return from a peer
            self._note_start(segments[gone - 1].end_index, segments[gone - 1].end_seq)
        self._sealed_segments = self._sealed_segments[gone:]
        for damage in [one for one in self.damage if one.is_below(self._floor.index)]:
            self.healed(damage)
        for info in segments[:gone]:
            remove_segment(self.disk, self.folder, info.base_seq)
        return sum(info.bytes for info in segments[:gone])

    # --- damage -------------------------------------------------------------------------------------------------------
    def begin_later(self, damage: Damage, index: int, seq: int) -> Damage:
        """Shorten a damage at the copy's start whose first part is trimmed up to this position. Returns the rest."""
        rest = self.quarantine(index, damage.end, DamageKind.FILE, b"")
        self._note_start(index, seq)
        self.healed(damage)
        return rest

    def quarantine(self, first: int, end: int, kind: DamageKind, found: bytes) -> Damage:
        """Record permanently that [first, end) must come from a peer. The damaged bytes are kept for inspection."""
        damage = Damage(first, end, kind, damaged_name(first, end, kind))
        if damage not in self.damage:
            write_whole(self.disk, join(self.folder, damage.name), [found])
            self.damage = [*self.damage, damage]
        if kind is DamageKind.FILE:
            self._put_aside(first, end)
        return damage

    def _put_aside(self, first: int, end: int) -> None:
        """Put finished segments of this span aside, if they are there: the peer's take their place."""
        self._absorb()
        gone = [info for info in self._sealed_segments if first <= info.base_index and info.end_index <= end]
        self._sealed_segments = tuple(info for info in self._sealed_segments if info not in gone)
        for info in gone:
            put_segment_aside(self.disk, self.folder, info.base_seq)

    def healed(self, damage: Damage) -> None:
        """Mark a damage as repaired, after the repair was synced."""
        path = join(self.folder, damage.name)
        if self.disk.exists(path):
            self.disk.rename(path, path.removesuffix(DAMAGED) + MENDED)
            self.disk.sync_folder(self.folder)
        self.damage = [other for other in self.damage if other != damage]

    def header(self, info: SegmentInfo) -> Header:
        """Return the header of one of its segments."""
        return self._active.header._replace(base_index=info.base_index, base_seq=info.base_seq)

    def closes_at(self, end: int) -> bool:
        """Return whether a segment that ends here is the last one of a sealed copy; an empty one may follow."""
        return self.sealed and self.segments[-1].base_index < end

    def adopt(self, made: Sequence[SegmentInfo]) -> None:
        """Add repaired segments."""
        known = {info.base_seq: info for info in (*self._sealed_segments, *made)}
        known.pop(self._active.header.base_seq, None)
        self._sealed_segments = tuple(sorted(known.values()))

    def finish(self, last: bool) -> tuple[SegmentInfo, ...]:
        """Sync, finish all segments for use in another copy, and close this one. `last`: they may be its end."""
        self._sync()
        self._absorb()
        if self._active.end > self._active.header.base_index:
            self._active.finish(self.disk, self.folder, last)
        made = tuple(info for info in self.segments if info.sealed)
        self.close()
        return made

    def close(self) -> None:
        """Close all files. Data that is not synced may be lost."""
        self._absorb()
        self.note_mark()
        self._close_written()
        if self._mark is not None:
            with suppress(EmbarcaderoError):
                self._mark.sync()
            self._mark.close()
            self._mark = None
