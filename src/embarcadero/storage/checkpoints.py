"""Session checkpoints on disk: a lane's session table as of a durable index, beside its ranges.

A checkpoint carries the id of its topic. Lane numbers come again after a restart, so a file that a crash left behind
when its topic was deleted may lie in the folder of the next topic of that lane: its id says that it is not that one's.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress

from embarcadero.env import Disk, Missing
from embarcadero.errors import BadValue, DiskFailed
from embarcadero.limits import LINE_BYTES, SESSIONS_FILE_BYTES_MAX
from embarcadero.storage.disk import join, read_whole, write_whole
from embarcadero.storage.layout import decode_checkpoint, encode_checkpoint
from embarcadero.storage.recovery import make_folders
from embarcadero.wire.codec import payload_crc

_NAME = re.compile(r"sessions-(\d{20})\.checkpoint")
_DRAFT = re.compile(_NAME.pattern + r"\.tmp")


def _name(index: int) -> str:
    return f"sessions-{index:020d}.checkpoint"


def write_checkpoint(disk: Disk, lane_folder: str, index: int, data: bytes, topic_id: int) -> None:
    """Keep a lane's session table as of an index; on disk on return."""
    if len(data) > SESSIONS_FILE_BYTES_MAX:
        raise BadValue(f"a checkpoint of {len(data)} bytes", f"at most {SESSIONS_FILE_BYTES_MAX}")
    make_folders(disk, lane_folder)
    write_whole(disk, join(lane_folder, _name(index)), [encode_checkpoint(index, data, topic_id), data])


def checkpoints(disk: Disk, lane_folder: str) -> list[int]:
    """The indices of all checkpoints of a lane, oldest first."""
    try:
        names = disk.list(lane_folder)
    except Missing:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_checkpoint(disk: Disk, lane_folder: str, index: int, topic_ids: Collection[int] | None) -> bytes | None:
    """The checkpoint of an index; None if it can't be read, is damaged, or of a topic with none of these ids.

    `topic_ids` None: of any topic. Raises BadSegment if a newer program wrote it.
    """
    path = join(lane_folder, _name(index))
    try:
        data = read_whole(disk, path, SESSIONS_FILE_BYTES_MAX + LINE_BYTES)
    except DiskFailed:  # a bad sector, or longer than ours are: as good as damaged, and no reason to stop
        return None
    header, table = decode_checkpoint(data[:LINE_BYTES], path), data[LINE_BYTES:]
    if header is None or header[:3] != (index, len(table), payload_crc(table)):
        return None
    return table if topic_ids is None or header.topic_id in topic_ids else None


def newest_checkpoint(
    disk: Disk, lane_folder: str, at_most: int, topic_ids: Collection[int]
) -> tuple[int, bytes] | None:
    """The newest undamaged checkpoint of a topic with one of these ids at or below an index, and that index."""
    for index in reversed(checkpoints(disk, lane_folder)):
        if index <= at_most and (data := read_checkpoint(disk, lane_folder, index, topic_ids)) is not None:
            return index, data
    return None


def drop_foreign(disk: Disk, lane_folder: str, topic_ids: Collection[int]) -> int:
    """Remove undamaged checkpoints of topics with other ids than these; returns how many."""
    gone = 0
    for index in checkpoints(disk, lane_folder):
        path = join(lane_folder, _name(index))
        with suppress(DiskFailed):
            header = decode_checkpoint(read_whole(disk, path, SESSIONS_FILE_BYTES_MAX + LINE_BYTES)[:LINE_BYTES], path)
            if header is not None and header.topic_id not in topic_ids:
                disk.remove(path)
                gone += 1
    return gone


def sweep_drafts(disk: Disk, lane_folder: str) -> None:
    """Remove what a crash left of checkpoints that were being written. Only their writer may, while it writes none."""
    with suppress(Missing):
        for name in filter(_DRAFT.fullmatch, disk.list(lane_folder)):
            disk.remove(join(lane_folder, name))


def drop_older(disk: Disk, lane_folder: str, index: int) -> int:
    """Remove checkpoints below an index; returns how many."""
    gone = [older for older in checkpoints(disk, lane_folder) if older < index]
    for older in gone:
        disk.remove(join(lane_folder, _name(older)))
    return len(gone)
