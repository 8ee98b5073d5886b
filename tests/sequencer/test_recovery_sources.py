"""Reading back the disks of replicas: the best checkpoint, and entries from any good copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.errors import BadSegment
from embarcadero.sequencer.ranges.recovery_sources import DiskSource
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.folder import write_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder
from embarcadero.storage.range_log import RangeLog
from embarcadero.types import Range, ReplicaMember, ReplicaRef, ReplicaState, Topic
from tests.storage.records import LANE, RANGE, SMALL, START, START_SEQ, Source


def member(number: int, root: Path, state: ReplicaState = ReplicaState.LIVE) -> ReplicaMember:
    """A replica with a folder."""
    folder = root / f"replica-{number}"
    folder.mkdir(exist_ok=True)
    return ReplicaMember(
        replica=number, incarnation=1, disk=f"d{number}", folder=str(folder), host="h", pid=1, state=state
    )


def fill(who: ReplicaMember, source: Source, end: int) -> None:
    """Give a replica a copy of a range up to an index."""
    disk = RealDisk(Path(who.folder))
    log = RangeLog.create(disk, range_folder(LANE, RANGE), LANE, RANGE, START, START_SEQ, SMALL)
    log.append(*source.span(START, end))
    log.sync_job()()
    log.close()


def spoil(who: ReplicaMember) -> None:
    """Turn bits in the middle of every segment."""
    for path in (Path(who.folder) / range_folder(LANE, RANGE)).glob("*.log"):
        data = bytearray(path.read_bytes())
        data[160] ^= 0xFF
        path.write_bytes(bytes(data))


TOPIC = Topic(name="t", lane=LANE)
RANGE_ = Range(
    lane=LANE, number=RANGE, start=START, start_seq=START_SEQ, durable_on=2,
    replicas=[ReplicaRef(replica=number, incarnation=1, disk=f"d{number}") for number in range(3)],
)  # fmt: skip


def test_entries_come_from_a_good_copy(tmp_path: Path) -> None:
    """One is too short, one is damaged, one is whole."""
    members, source = [member(number, tmp_path) for number in range(4)], Source()
    fill(members[0], source, START + 20)
    fill(members[1], source, START + 60)
    spoil(members[1])
    fill(members[2], source, START + 60)
    past = DiskSource(lambda: members, lambda who: RealDisk(Path(who.folder)))

    found = past.entries(RANGE_, START + 10, START + 55)
    assert found.tobytes() == source.span(START + 10, START + 55)[0].tobytes()
    with pytest.raises(BadSegment, match="no reachable replica"):
        past.entries(RANGE_, START + 10, START + 61)


def test_the_newest_checkpoint_of_those_that_are_up(tmp_path: Path) -> None:
    """At or below the requested index; a replica that is down is not asked."""
    members = [member(number, tmp_path, ReplicaState.DEAD if number == 2 else ReplicaState.LIVE) for number in range(3)]
    for who, index in zip(members, (40, 70, 60), strict=True):
        write_checkpoint(RealDisk(Path(who.folder)), lane_folder(LANE), index, b"%d" % index, 0)
    past = DiskSource(lambda: members, lambda who: RealDisk(Path(who.folder)))

    assert past.checkpoint(TOPIC, 100) == (70, b"70")
    assert past.checkpoint(TOPIC, 69) == (40, b"40")
    assert past.checkpoint(TOPIC, 39) is None
    assert DiskSource(lambda: members, None).checkpoint(TOPIC, 100) is None
