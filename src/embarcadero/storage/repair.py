"""Repair from a peer: what a copy lacks is read from another replica's files, checked, and put where it belongs.

A damaged span is written again in place: records are the same bytes on every replica, so they take the same room. A
segment that is gone is written beside the copy and moved in when it is whole. A damaged tail is appended again; only
somebody who knows where the range ends can say when it is whole.
"""

from __future__ import annotations

from contextlib import suppress

from embarcadero.env import Disk
from embarcadero.errors import BadSegment
from embarcadero.fabric.layout import Entries, every, sealed
from embarcadero.limits import SCAN_BYTES
from embarcadero.storage.disk import join
from embarcadero.storage.layout import HEADER_BYTES, base_seqs, record_bytes, repair_folder, segment_name
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.reading import RangeReader
from embarcadero.storage.recovery import begin_nothing, remove_range
from embarcadero.storage.scan import scan_segment
from embarcadero.storage.segment import SegmentReader
from embarcadero.storage.writing import Damage, DamageKind, SegmentInfo, record_parts


def copy_span(peer: RangeReader, log: RangeLog, end: int, max_bytes: int = SCAN_BYTES, pieces: int = 1 << 62) -> int:
    """Append what a peer has, from the log's end up to `end`; returns where the log ends then. Not synced.

    `pieces`: stop after so many reads, for callers with other things to do.
    """
    while log.end < end and pieces > 0:
        entries, payloads = peer.read(log.end, end, max_bytes)
        if not len(entries):
            break
        log.append(entries, payloads)
        pieces -= 1
    return log.end


def heal_tails(log: RangeLog, end: int) -> None:
    """The log is synced through `end`, and nobody ever counted more than that: no tail is missing."""
    if log.synced >= end:
        for damage in [one for one in log.damage if one.kind is DamageKind.TAIL]:
            log.healed(damage)


def mend(log: RangeLog, peer: RangeReader, damage: Damage, trimmed: int = 0) -> bool:
    """Repair a SPAN or FILE from a peer, synced on return. False if this peer lacks it, or it is a TAIL.

    BadSegment if the peer's records are damaged too. A TAIL needs `copy_span` and `heal_tails`. `trimmed`: nobody needs
    what is below, and peers may have dropped it.
    """
    if damage.kind is DamageKind.TAIL:
        return False
    is_first = damage.kind is DamageKind.FILE and damage.end <= log.first
    if is_first and damage.first < (start := _start_of(peer)) <= trimmed:
        if start >= damage.end:
            log.healed(damage)  # nobody needs it; the rest of the hole, if there is more, tells where the copy starts
            return True
        first = peer.entry(start)
        if first is None or int(first["seq"][0]) == log.segments[0].base_seq:  # a file is known by its first seq
            return False
        damage = log.begin_later(damage, start, int(first["seq"][0]))
    entries = peer.entries(damage.first, damage.end)
    if len(entries) < damage.end - damage.first:
        return False
    done = _mend_span(log, peer, damage, entries) if damage.kind is DamageKind.SPAN else _mend_file(log, peer, damage)
    if done:
        log.healed(damage)
    return done


def _start_of(peer: RangeReader) -> int:
    """Where a peer's copy starts; 0 if that can't be told: it may have what is asked for all the same."""
    with suppress(BadSegment):
        return peer.first or 0
    return 0


def _holding(log: RangeLog, index: int) -> SegmentInfo | None:
    held = [info for info in log.segments if info.base_index <= index < info.end_index]
    return held[0] if held else None


def _mend_span(log: RangeLog, peer: RangeReader, damage: Damage, entries: Entries) -> bool:
    info = _holding(log, damage.first)
    if info is None:
        return False
    header = log.header(info)
    reader = SegmentReader(log.disk, log.folder, info.base_seq, header.lane, header.range_number)
    try:
        position = _end_of(reader, damage.first - 1)
        if position is None:
            return False  # damaged before, too: that comes first
        stop = position + sum(record_bytes(size) for size in entries["size"].tolist())
        fits = _fits(reader, stop, damage.end, info)
    finally:
        reader.close()
    if not fits:
        return take_anew(log, peer, info)
    _write_over(log.disk, join(log.folder, segment_name(info.base_seq)), position, peer, damage)
    if not info.sealed:
        return True
    if (made := finish_segment(log, info)) is not None:
        if made != info:  # recovery had not seen all of it
            log.adopt([made])
        return True
    return any(one != damage and one.overlaps(info) for one in log.damage)  # it is finished when those are mended


def take_anew(log: RangeLog, peer: RangeReader, info: SegmentInfo) -> bool:
    """Records take the same room everywhere: a segment in which the peer's do not fit is not ours, header or not."""
    held = len(peer.entries(info.base_index, info.end_index))
    if not info.sealed or held < info.end_index - info.base_index:
        hint = "remove this segment's file and start the replica again: it then gets all of it from its peers"
        raise BadSegment(f"a peer's records do not fit {segment_name(info.base_seq)} of {log.folder}", hint)
    return mend(log, peer, log.quarantine(info.base_index, info.end_index, DamageKind.FILE, b""))


def _end_of(reader: SegmentReader, index: int) -> int | None:
    """Where a record ends, found from the segment's start: indexes may be as wrong as the rest."""
    if index < reader.header.base_index:
        return HEADER_BYTES
    for entries, positions in reader.walk(HEADER_BYTES, reader.header.base_index):
        if index <= int(entries["index"][-1]):
            number = index - int(entries["index"][0])
            return positions[number] + record_bytes(int(entries["size"][number]))
    return None


def _fits(reader: SegmentReader, stop: int, end: int, info: SegmentInfo) -> bool:
    """Whether the record after the span, or the segment's end, is where the span ends."""
    if end >= info.end_index:
        return reader.footer is None or stop == reader.footer.bytes
    entry = reader.entry(stop)
    return len(entry) == 1 and every(sealed(entry)) and int(entry["index"][0]) == end


def _write_over(disk: Disk, path: str, position: int, peer: RangeReader, damage: Damage) -> None:
    file = disk.open(path, writable=True)
    try:
        index = damage.first
        while index < damage.end:
            entries, payloads = peer.read(index, damage.end, SCAN_BYTES)
            if not len(entries):
                raise BadSegment(f"{peer.folder} no longer has record {index}", "try another peer")
            file.pwrite(record_parts(entries, payloads), position)
            position += sum(record_bytes(len(payload)) for payload in payloads)
            index += len(entries)
        file.sync()
    finally:
        file.close()


def finish_segment(log: RangeLog, info: SegmentInfo) -> SegmentInfo | None:
    """Vouch for a sealed segment that is whole again: footer and indexes. None: it is not whole."""
    header = log.header(info)
    file = log.disk.open(join(log.folder, segment_name(info.base_seq)), writable=True)
    try:
        every_bytes = log.settings.index_every_bytes
        scan = scan_segment(file, header, every_bytes, synced=1 << 63, limit=info.end_index)
        if scan.wrong or scan.end < info.end_index:
            return None
        whole = begin_nothing(file, header, log.settings)
        whole.position, whole.end, whole.end_seq = scan.position, scan.end, scan.end_seq
        whole.last_us, whole.index = scan.last_us, scan.sparse
        whole.finish(log.disk, log.folder, last=log.closes_at(info.end_index))
        return whole.info
    finally:
        file.close()


def _mend_file(log: RangeLog, peer: RangeReader, damage: Damage) -> bool:
    """Write missing segments in a folder of their own (where an interrupted repair goes on), then move them in."""
    first = peer.entry(damage.first)
    if first is None:
        return False
    folder = repair_folder(log.folder)
    base = log.header(log.segments[0])._replace(base_index=damage.first, base_seq=int(first["seq"][0]))
    parts = RangeLog.recover(
        log.disk, folder, base.lane, base.range_number, base.base_index, base.base_seq, log.settings
    )  # fmt: skip
    usable, made = not parts.damage and parts.first == damage.first, None
    try:
        if usable and copy_span(peer, parts, damage.end) >= damage.end:
            made = parts.finish(last=log.closes_at(damage.end))
    finally:
        parts.close()
    others = {info.base_seq for info in log.segments if not damage.overlaps(info)}
    if made is not None and any(info.base_seq in others for info in made):
        made, usable = None, False  # cut up otherwise, its last file has no records, and the name of ours that follows
    if not usable:
        remove_range(log.disk, folder)  # what another repair left is of no use: the next try begins anew
    if made is None:
        return False
    _move_in(log, folder)
    log.adopt(made)
    return True


def _move_in(log: RangeLog, folder: str) -> None:
    names = log.disk.list(folder)
    for base_seq in base_seqs(names):
        stem = segment_name(base_seq, "")
        for name in names:
            if name.startswith(stem):
                log.disk.rename(join(folder, name), join(log.folder, name))
    log.disk.sync_folder(log.folder)
    remove_range(log.disk, folder)
