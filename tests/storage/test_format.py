"""The format of version 1 stays readable: a folder that this code once wrote is still read, byte for byte.

The fixture was made by `python -m tests.storage.test_format <folder>`; it is never made again. A new format gets a
fixture of its own, and this one stays.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import newest_checkpoint, open_folder, read_identity, write_checkpoint
from embarcadero.storage.layout import (
    FOOTER,
    HEADER,
    INDEX,
    MARK_FILE,
    START_FILE,
    begun_name,
    decode_position,
    lane_folder,
)
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.verify import verify_folder
from tests.storage.records import FOLDER, LANE, RANGE, SMALL, START, START_SEQ, Source, fill, matches, open_reader

FIXTURE = Path(__file__).parent / "fixtures" / "format-1"
SETTINGS = replace(SMALL, segment_bytes=4_096)
COUNT = 40


def write_fixture(folder: Path) -> None:
    """A replica's folder with an identity, three segments, indexes, and a checkpoint."""
    disk = RealDisk(folder, create=True)
    open_folder(disk, SETTINGS.cluster, 3, 1)
    log = RangeLog.create(disk, FOLDER, LANE, RANGE, START, START_SEQ, SETTINGS)
    fill(log, Source(seed=4), COUNT)
    log.close()
    write_checkpoint(disk, lane_folder(LANE), START + COUNT, b"a session table", 0)
    disk.close()
    (folder / "lock").unlink()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_version_1_is_still_read() -> None:
    """Without writing anything: records, identity, checkpoint, and all checksums."""
    disk = RealDisk(FIXTURE)
    identity = read_identity(disk)

    assert identity is not None
    assert (identity.format, identity.cluster, identity.replica) == (1, SETTINGS.cluster, 3)
    assert matches(open_reader(disk), Source(seed=4), START, START + COUNT)
    assert newest_checkpoint(disk, lane_folder(LANE), 1 << 60, (0,)) == (START + COUNT, b"a session table")
    report = verify_folder(disk)
    assert (report.findings, report.batches) == ([], COUNT)


def test_version_1_is_still_recovered_and_appended_to(tmp_path: Path) -> None:
    """A replica that starts on it continues."""
    shutil.copytree(FIXTURE, tmp_path / "copy")
    disk = RealDisk(tmp_path / "copy")
    assert open_folder(disk, SETTINGS.cluster, 3, 2).generation == 2
    log = RangeLog.recover(disk, FOLDER, LANE, RANGE, START, START_SEQ, SETTINGS)
    assert (log.end, log.damage, log.notes) == (START + COUNT, [], [])
    fill(log, Source(seed=4), 20)

    assert matches(open_reader(disk), Source(seed=4), START, log.end)


def test_version_1_is_still_written_byte_for_byte(tmp_path: Path) -> None:
    """An accidental change of the format is detected here.

    Three things differ. The disk id is random. Start file and mark now name their owner, in bytes that were zero and
    never read. The start of a copy has been recorded since.
    """
    write_fixture(tmp_path / "new")
    made, kept = files(tmp_path / "new"), files(FIXTURE)
    assert made.pop(begun_name(FOLDER)) == b""
    assert made.keys() == kept.keys()
    places = [f"{FOLDER}/{START_FILE}", f"{FOLDER}/{MARK_FILE}"]
    for name, file in zip(places, (START_FILE, MARK_FILE), strict=True):
        there, before = decode_position(made[name], file), decode_position(kept[name], file)
        assert there is not None
        assert before is not None
        assert (there[:3], there[3:], before[3:]) == (before[:3], (LANE, RANGE), (0, 0))
    for name in ("identity.json", *places):
        del made[name], kept[name]

    assert made == kept


def test_sizes_of_the_layout() -> None:
    """As documented in the table."""
    assert (HEADER.itemsize, FOOTER.itemsize, INDEX.itemsize) == (128, 72, 12)


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]))
