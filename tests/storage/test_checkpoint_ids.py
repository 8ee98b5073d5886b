"""Session checkpoints carry the id of their topic: the next topic of a lane reads none of an earlier one."""

from __future__ import annotations

from pathlib import Path

from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import checkpoints, drop_foreign, newest_checkpoint, write_checkpoint
from embarcadero.storage.layout import LINE_BYTES, decode_checkpoint, encode_checkpoint
from embarcadero.types import Topic

FOLDER = "lane-0000000003"


def test_a_checkpoint_of_another_topic_is_skipped(tmp_path: Path) -> None:
    """The newest one is in the same folder, under a higher index, and belongs to the topic that had the lane before."""
    disk = RealDisk(tmp_path)
    write_checkpoint(disk, FOLDER, 90, b"of a deleted topic", 7)
    write_checkpoint(disk, FOLDER, 10, b"ours", 8)

    assert newest_checkpoint(disk, FOLDER, 100, (8,)) == (10, b"ours")
    assert drop_foreign(disk, FOLDER, (8,)) == 1
    assert checkpoints(disk, FOLDER) == [10]


def test_a_checkpoint_without_an_id_is_read_only_for_topics_that_are_as_old(tmp_path: Path) -> None:
    """An earlier version wrote it. A topic that got its id when it was created has no such files."""
    disk = RealDisk(tmp_path)
    write_checkpoint(disk, FOLDER, 90, b"as before", 0)

    old, new = Topic(name="t", lane=3, id=8, had_no_id=True), Topic(name="t", lane=3, id=8)
    assert newest_checkpoint(disk, FOLDER, 100, old.checkpoint_ids) == (90, b"as before")
    assert newest_checkpoint(disk, FOLDER, 100, new.checkpoint_ids) is None


def test_a_header_of_an_earlier_version_has_no_id() -> None:
    """The id is stored where earlier versions wrote zeros."""
    before, after = encode_checkpoint(5, b"x"), encode_checkpoint(5, b"x", (1 << 63) - 1)
    assert before[32:40] == bytes(8)
    assert len(before) == len(after) == LINE_BYTES
    told, now = decode_checkpoint(before, "f"), decode_checkpoint(after, "f")
    assert told is not None
    assert told.topic_id == 0
    assert now is not None
    assert now.topic_id == (1 << 63) - 1
