"""A replica's copy of one range: segments that are appended to, synced in groups, rolled over, cut and dropped.

One thread appends; the sync job may run in another. They share two immutable values, each swapped at once: what was
written (the job takes it when it begins, so it covers all that came while the disk was busy) and the tuple of segments
(so a reader has the old one or the new one). Order on disk: records, sync, next segment's header and name, sync,
footer. After a failed sync nothing above `synced` is trusted: `cut(log.synced)` begins anew from there.
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
    """All that was written so far: segments that were rolled over, the active one, and where it ends."""

    rolled: tuple[SegmentWriter, ...]
    active: SegmentWriter
    position: int
    end: int


class RangeLog:
    """One range's copy, open for writing. Made by `create` or `recover`."""

    def __init__(self, disk: Disk, folder: str, start: int, settings: RangeSettings, found: RecoveredRange) -> None:
        self.disk, self.folder, self.settings = disk, folder, settings
        self.start, self._floor = start, found.floor
        self._sealed_segments = found.segments
        self._active = found.active
        self._written = _Written((), found.active, found.active.position, found.active.end)
        self._finished: deque[SegmentWriter] = deque()
        self._syncing = self._failed = False
        self._mark: File | None = None
        self._unmarked: _Written | None = None  # what was synced since the mark was noted
        self.synced = found.active.end
        self.sealed = found.closed
        self.damage: list[Damage] = found.damage
        self.notes: list[str] = found.notes
        """What recovery did, for people."""
        if not self.sealed:
            self._unmarked = self._written
            self.note_mark()

    @classmethod
    def create(
        cls, disk: Disk, folder: str, lane: int, range_number: int, start: int, start_seq: int, settings: RangeSettings
    ) -> RangeLog:
        """Begin a copy; its folder and first segment are synced on return. One that was begun before is recovered."""
        return cls.recover(disk, folder, lane, range_number, start, start_seq, settings)

    @classmethod
    def recover(
        cls, disk: Disk, folder: str, lane: int, range_number: int, start: int, start_seq: int, settings: RangeSettings
    ) -> RangeLog:
        """Open a copy as a crash may have left it. `damage` tells what must come from a peer."""
        first = Header(lane, range_number, start, start_seq, settings.cluster)
        return cls(disk, folder, start, settings, recover_range(disk, folder, first, settings))

    # --- where it is --------------------------------------------------------------------------------------------------
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
        """The lowest index that is kept."""
        return self.segments[0].base_index

    @property
    def dirty(self) -> bool:
        """Whether a sync has something to do."""
        return self.end > self.synced or any(rolled.footer is None for rolled in self._written.rolled)

    @property
    def failed(self) -> bool:
        """A sync failed: nothing above `synced` is trusted until `cut(log.synced)`."""
        return self._failed

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(info.bytes for info in self.segments)

    @property
    def segments(self) -> tuple[SegmentInfo, ...]:
        """All segments, oldest first; the last one is written to unless the range is sealed."""
        self._absorb()
        written = self._written
        return (*self._sealed_segments, *(rolled.info for rolled in written.rolled), written.active.info)

    def _absorb(self) -> None:
        """Take over what the sync job finished."""
        while self._finished:
            done = self._finished.popleft()
            rolled = tuple(one for one in self._written.rolled if one is not done)
            self._sealed_segments = (*self._sealed_segments, done.info)
            self._written = self._written._replace(rolled=rolled)
            done.file.close()

    # --- appending ----------------------------------------------------------------------------------------------------
    def append(self, entries: Entries, payloads: Sequence[Part]) -> None:
        """Write records that continue the log, one write for each segment they go to. Not synced.

        An error may come after some of them are written: go on from `end`.
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
        """How many records go to the active segment; 0: none, begin the next one."""
        room = self.settings.segment_bytes - self._active.position
        count = 0
        for size in bytes_each[done:]:
            if (room := room - size) < 0:
                break
            count += 1
        if count or self._active.may_roll:
            return count
        if self._active.position + bytes_each[done] > SEGMENT_BYTES_MAX:
            raise TooMany(f"{self.folder} has no room for another entry without records", "publish some records")
        return 1

    def _check_open(self) -> None:
        if self.sealed:
            raise BadValue(f"{self.folder} is sealed at {self.end}", "append to the lane's open range")
        if self._failed:
            raise DiskFailed(
                f"a sync in {self.folder} failed: what was written after {self.synced} may be lost",
                "cut the log to what is synced, then append again",
            )

    def roll_if_due(self, now_us: int) -> bool:
        """Begin the next segment if the active one is old. Call it now and then, with any steady clock."""
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
        """A job for a worker: sync whatever is written when it begins; returns the index synced through.

        One job at a time. If it raises, the log has failed. Without `mark`, `note_mark` is to follow: somebody waits
        for the sync, and nobody for the mark.
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
        """Leave a word about how far we are synced. It helps recovery; nothing is lost without it."""
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
        """Drop everything at or above an index, synced on return. Also the way on after a failed sync.

        Where the copy's first segments are missing, what is here may all be above it: then it begins again.
        """
        self._absorb()
        invariant(not self._syncing, "nothing is synced meanwhile")
        if index < self.first and index != self._floor.index:
            raise BadSegment(f"{self.folder} can't be cut at {index}: it begins at {self.first}", "repair it first")
        if self.sealed and index < self.end:
            raise BadValue(f"{self.folder} is sealed at {self.end}, and can't be cut at {index}")
        if index >= self.end and not self._failed:
            return
        if self._failed:
            invariant(index <= self.synced, "after a failed sync only what is synced is kept")
        elif self._written.rolled:
            self._sync()  # segments that stay are finished
        if index < self.first:
            self._begin_again()
            return
        segments = self.segments
        keep = max(number for number, info in enumerate(segments) if info.base_index <= index)
        while keep and not segments[keep - 1].sealed:
            keep -= 1  # nobody vouches for it yet: go on there
        base = segments[keep]
        position, seq, last_us = self._place_of(base, index)
        header = self._active.header
        self._lower(FilePosition(index, base.base_seq, position, header.lane, header.range_number))
        self._close_written()
        for number in range(len(segments) - 1, keep, -1):
            self._strip(segments[number - 1])
            remove_segment(self.disk, self.folder, segments[number].base_seq)
            self.disk.sync_folder(self.folder)
        self._continue(segments, keep, position, index, seq, last_us)

    def begin_at(self, index: int, seq: int) -> None:
        """Drop all that is here, and begin at a position above it: what comes before is trimmed. Synced on return.

        What was missing above, or nobody knows how far, still is: a crash on the way leaves no less on record.
        """
        invariant(not self._syncing and index >= self.end, "it begins above what it has")
        told = [one for one in self.damage if one.kind is DamageKind.TAIL or one.end > index]
        if told:
            self.quarantine(index, max(index + 1, *(one.end for one in told)), DamageKind.TAIL, b"")
        self._note_start(index, seq)
        self._begin_again()
        for damage in [one for one in self.damage if one.first < index]:
            self.healed(damage)

    def _note_start(self, index: int, seq: int) -> None:
        """Before anything goes: only what is below was dropped by us."""
        header = self._active.header
        self._floor = FilePosition(index, seq, HEADER_BYTES, header.lane, header.range_number)
        write_whole(self.disk, join(self.folder, START_FILE), [encode_position(self._floor, START_FILE)])

    def _begin_again(self) -> None:
        """Drop all that is here, and go on where the copy starts."""
        floor, header = self._floor, self._active.header
        self._lower(FilePosition(floor.index, floor.seq, HEADER_BYTES, header.lane, header.range_number))
        self._close_written()
        for info in reversed(self.segments):
            remove_segment(self.disk, self.folder, info.base_seq)
            self.disk.sync_folder(self.folder)
        header = header._replace(base_index=floor.index, base_seq=floor.seq)
        active = begin_segment(self.disk, self.folder, header, self.settings)
        active.file.sync()
        self.disk.sync_folder(self.folder)
        self._go_on(active, ())

    def _close_written(self) -> None:
        for one in (*self._written.rolled, self._active):
            one.file.close()

    def _go_on(self, active: SegmentWriter, before: tuple[SegmentInfo, ...]) -> None:
        """From what is synced, with these segments before it."""
        self._sealed_segments = before
        self._active = active
        self._written = _Written((), active, active.position, active.end)
        self.synced = active.end
        self._failed = False

    def _lower(self, position: FilePosition) -> None:
        """Before anything goes: the mark must not say that it was synced."""
        self._unmarked = None
        self._mark_file().pwrite([encode_position(position, MARK_FILE)], 0)
        self._mark_file().sync()

    def _place_of(self, info: SegmentInfo, index: int) -> tuple[int, int, int]:
        """(position, seq, time of the last record before) of an index in its segment."""
        if index == info.base_index:
            return HEADER_BYTES, info.base_seq, 0
        header = self._active.header
        reader = SegmentReader(self.disk, self.folder, info.base_seq, header.lane, header.range_number)
        try:
            before = reader.locate(index - 1)
            if before is None:
                raise BadSegment(f"{reader.name} can't be cut at {index}: it is damaged before", "repair it first")
            entry = reader.entry(before.position)
            seq = int(entry["seq"][0]) + int(entry["count"][0])
            return before.position + before.bytes, seq, int(entry["append_us"][0])
        finally:
            reader.close()

    def _strip(self, info: SegmentInfo) -> None:
        """Take a segment's footer away, before the segment after it goes."""
        file = self.disk.open(join(self.folder, segment_name(info.base_seq)), writable=True)
        try:
            file.truncate(info.bytes)
            file.sync()
        finally:
            file.close()

    def _continue(
        self, segments: tuple[SegmentInfo, ...], keep: int, position: int, index: int, seq: int, last_us: int
    ) -> None:
        """Go on writing to a segment at a position."""
        base = segments[keep]
        file = self.disk.open(join(self.folder, segment_name(base.base_seq)), writable=True)
        header = self._active.header._replace(base_index=base.base_index, base_seq=base.base_seq)
        file.truncate(position)
        file.pwrite([encode_header(header)], 0)  # a failed sync may have lost it, and the segment's name with it
        file.sync()
        self.disk.sync_folder(self.folder)
        active = SegmentWriter(
            file, header, position, index, seq, SparseIndex(self.settings.index_every_bytes), last_us
        )
        reader = SegmentReader(self.disk, self.folder, base.base_seq, header.lane, header.range_number)
        for entries, positions in reader.walk(HEADER_BYTES, base.base_index):
            active.index.add(entries, positions)
        reader.close()
        self._go_on(active, segments[:keep])

    def seal(self, end: int) -> None:
        """The range ends here for good: what is above goes, the rest is synced and never written again."""
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
        """Drop sealed segments whose records are all below an index, never the last one; returns the bytes freed."""
        segments = self.segments
        sealed = self._sealed_segments
        gone = 0
        while gone < len(sealed) and sealed[gone].end_index <= index:
            gone += 1
        first = segments[gone]
        if self._floor.index < first.base_index <= index:  # also if what was before is only missing
            self._note_start(first.base_index, first.base_seq)
        elif gone:  # what follows is missing, and is still to come back
            self._note_start(segments[gone - 1].end_index, segments[gone - 1].end_seq)
        self._sealed_segments = self._sealed_segments[gone:]
        for damage in [one for one in self.damage if one.is_below(self._floor.index)]:
            self.healed(damage)
        for info in segments[:gone]:
            remove_segment(self.disk, self.folder, info.base_seq)
        return sum(info.bytes for info in segments[:gone])

    # --- damage -------------------------------------------------------------------------------------------------------
    def begin_later(self, damage: Damage, index: int, seq: int) -> Damage:
        """What is missing at the copy's start is trimmed up to this position; returns what is still missing."""
        left = self.quarantine(index, damage.end, DamageKind.FILE, b"")
        self._note_start(index, seq)
        self.healed(damage)
        return left

    def quarantine(self, first: int, end: int, kind: DamageKind, found: bytes) -> Damage:
        """Take note, for good, that [first, end) must come from a peer; what was found is kept to look at."""
        damage = Damage(first, end, kind, damaged_name(first, end, kind))
        if damage not in self.damage:
            write_whole(self.disk, join(self.folder, damage.name), [found])
            self.damage = [*self.damage, damage]
        if kind is DamageKind.FILE:
            self._put_aside(first, end)
        return damage

    def _put_aside(self, first: int, end: int) -> None:
        """Finished segments of this span are not ours, or not there: the peer's take their place."""
        self._absorb()
        gone = [info for info in self._sealed_segments if first <= info.base_index and info.end_index <= end]
        self._sealed_segments = tuple(info for info in self._sealed_segments if info not in gone)
        for info in gone:
            put_segment_aside(self.disk, self.folder, info.base_seq)

    def healed(self, damage: Damage) -> None:
        """A damage was repaired, and that is synced."""
        path = join(self.folder, damage.name)
        if self.disk.exists(path):
            self.disk.rename(path, path.removesuffix(DAMAGED) + MENDED)
            self.disk.sync_folder(self.folder)
        self.damage = [other for other in self.damage if other != damage]

    def header(self, info: SegmentInfo) -> Header:
        """What the header of one of its segments says."""
        return self._active.header._replace(base_index=info.base_index, base_seq=info.base_seq)

    def closes_at(self, end: int) -> bool:
        """Whether a segment that ends here is the last one of a sealed copy: an empty one may follow it."""
        return self.sealed and self.segments[-1].base_index < end

    def adopt(self, made: Sequence[SegmentInfo]) -> None:
        """Segments that were missing, or damaged, are whole again."""
        known = {info.base_seq: info for info in (*self._sealed_segments, *made)}
        known.pop(self._active.header.base_seq, None)
        self._sealed_segments = tuple(sorted(known.values()))

    def finish(self, last: bool) -> tuple[SegmentInfo, ...]:
        """Sync, and leave all segments finished, to become part of another copy, perhaps its end; closes this one."""
        self._sync()
        self._absorb()
        if self._active.end > self._active.header.base_index:
            self._active.finish(self.disk, self.folder, last)
        made = tuple(info for info in self.segments if info.sealed)
        self.close()
        return made

    def close(self) -> None:
        """Let go of all files. What is not synced may be lost."""
        self._absorb()
        self.note_mark()
        self._close_written()
        if self._mark is not None:
            with suppress(EmbarcaderoError):
                self._mark.sync()
            self._mark.close()
            self._mark = None
