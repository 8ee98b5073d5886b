"""A range's copy in normal operation: appending, group commit, rolling over, cutting, sealing, dropping, reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embarcadero.errors import BadSegment, BadValue, InvariantBroken, Trimmed
from embarcadero.storage.disk import RealDisk, RealFile, join
from embarcadero.storage.layout import INDEX, INDEX_FILE, TIME_INDEX_FILE, segment_name
from embarcadero.storage.recovery import remove_range
from tests.storage.crash_disk import World
from tests.storage.records import FOLDER, SMALL, START, START_SEQ, Source, fill, matches, open_log, open_reader


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(tmp_path)


def test_records_are_read_back_as_ordered(disk: RealDisk) -> None:
    """Entries and payloads byte for byte, over several segments, for readers that started before and after."""
    source, early = Source(), open_reader(disk)
    log = open_log(disk)
    fill(log, source, 200)

    assert len(log.segments) > 3
    assert (log.start, log.end, log.synced) == (START, START + 200, START + 200)
    assert matches(early, source, START, log.end)
    assert matches(open_reader(disk), source, START, log.end)


def test_a_sync_job_covers_records_written_before_it_starts(disk: RealDisk) -> None:
    """Group commit: records that came between the request and the run are covered; later ones are not."""
    source, log = Source(), open_log(disk)
    fill(log, source, 5, sync=False)
    job = log.sync_job()
    fill(log, source, 60, sync=False)
    assert log.dirty

    assert job() == START + 65
    assert (log.synced, log.dirty) == (START + 65, False)
    fill(log, source, 1, sync=False)
    assert (log.synced, log.dirty) == (START + 65, True)


def test_readers_never_notice_roll_over(disk: RealDisk) -> None:
    """The tuple of segments is swapped atomically; a reader continues from index to index meanwhile."""
    source, log, reader = Source(), open_log(disk), open_reader(disk)
    before = log.segments
    for _ in range(40):
        fill(log, source, 5)
        assert matches(reader, source, log.end - 5, log.end)

    assert len(before) == 1
    assert len(log.segments) > 3
    assert all(info.sealed for info in log.segments[:-1])
    assert not log.segments[-1].sealed


def test_segments_roll_by_age_but_never_share_a_base(disk: RealDisk) -> None:
    """An old segment is closed once it has a record; control entries alone do not advance the seq."""
    source, log = Source(), open_log(disk, replace(SMALL, segment_age_s=10.0))
    assert not log.roll_if_due(0)
    fill(log, source, 10)
    assert not log.roll_if_due(1_000_000)
    assert not log.roll_if_due(10_000_000)
    assert log.roll_if_due(11_000_000)
    assert not log.roll_if_due(99_000_000)
    fill(log, source, 10)

    bases = [info.base_seq for info in log.segments]
    assert len(bases) == len(set(bases)) == 2
    assert matches(open_reader(disk), source, START, log.end)


def test_wrong_records_are_never_written(disk: RealDisk) -> None:
    """Records that do not continue the log, or have another payload's size, are a bug of the caller."""
    source, log = Source(), open_log(disk)
    fill(log, source, 10)
    entries, payloads = source.span(START + 11, START + 12)
    with pytest.raises(InvariantBroken):
        log.append(entries, payloads)
    entries, payloads = source.span(START + 10, START + 30)
    with pytest.raises(InvariantBroken):
        log.append(entries, [*payloads[:-1], b"another"])

    assert log.end == START + 10


def test_finding_by_index_seq_and_time(disk: RealDisk) -> None:
    """Floor search over sparse indexes: of finished segments from files, of the active one from the records."""
    source, log = Source(), open_log(disk)
    fill(log, source, 300)
    reader = open_reader(disk)
    entries, _ = source.span(START, log.end)

    for number, entry in enumerate(entries):
        index = START + number
        found = reader.entry(index)
        assert found is not None
        assert found.tobytes() == entry.tobytes()
        if entry["count"]:
            assert reader.find_seq(int(entry["seq"])) == index
            assert reader.find_seq(int(entry["seq"]) + int(entry["count"]) - 1) == index
        us = int(entry["append_us"])
        assert reader.find_time(us) == START + int((entries["append_us"] >= us).argmax())
    assert reader.find_seq(0) == START
    assert reader.find_seq(log.end_seq) is None
    assert reader.find_time(0) == START
    assert reader.find_time(1 << 60) is None
    assert reader.entry(log.end) is None
    assert reader.entries(START + 5, log.end).tobytes() == entries[5:].tobytes()


def test_index_files_are_sparse_and_big_endian(disk: RealDisk) -> None:
    """12 bytes an entry, at most one for this many bytes, the segment's end last."""
    source, log = Source(), open_log(disk)
    fill(log, source, 200)
    for info in log.segments[:-1]:
        for suffix in (INDEX_FILE, TIME_INDEX_FILE):
            data = (disk.root / FOLDER / segment_name(info.base_seq, suffix)).read_bytes()
            assert len(data) % INDEX.itemsize == 0
            assert len(data) // INDEX.itemsize <= info.bytes // SMALL.index_every_bytes + 2
        data = (disk.root / FOLDER / segment_name(info.base_seq, INDEX_FILE)).read_bytes()
        assert int.from_bytes(data[:8], "big") == info.base_seq
        assert int.from_bytes(data[8:12], "big") == 128
        assert int.from_bytes(data[-12:-4], "big") == info.end_seq
        assert int.from_bytes(data[-4:], "big") == info.bytes


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_range_is_measured_by_its_sparse_indexes(disk: RealDisk, spoiled: bool) -> None:
    """Points are records with their own seq, some bytes apart; a wrong index file costs points, never correctness."""
    source, log = Source(), open_log(disk)
    fill(log, source, 200)
    if spoiled:
        for info in log.segments[:-1]:
            path = disk.root / FOLDER / segment_name(info.base_seq, INDEX_FILE)
            rows = np.frombuffer(path.read_bytes(), dtype=INDEX).copy()
            rows["position"][1:-1] += 64
            path.write_bytes(rows.tobytes())
    first, end = START + 3, log.end - 3
    points, reached = open_reader(disk).points(first, end, 1_000, 1 << 40)
    assert (points[0].index, reached) == (first, end)
    assert [point.seq for point in points] == [source.seq(point.index) for point in points]
    entries, _ = source.span(first, end)
    taken = int((64 + (entries["size"].astype(np.int64) + 63) // 64 * 64).sum())
    assert sum(point.bytes for point in points) == taken
    assert len(points) > (len(log.segments) if spoiled else taken // 3_000)
    few, reached = open_reader(disk).points(first, end, 1_000, 9_000)
    assert few == points[: len(few)]
    assert reached == points[len(few)].index
    with pytest.raises(BadSegment, match="ends before"):
        open_reader(disk).points(first, log.end + 1, 1_000, 1 << 40)


def test_a_read_returns_at_least_one_record_and_respects_its_bounds(disk: RealDisk) -> None:
    """However few bytes are requested; never beyond the requested end."""
    source, log = Source(size_max=3_000), open_log(disk)
    fill(log, source, 50)
    reader = open_reader(disk)
    entries, _ = reader.read(START, START + 3, 1 << 20)
    assert len(entries) == 3
    entries, payloads = reader.read(START, log.end, 1)
    assert len(entries) == len(payloads) == 1
    assert len(reader.read(START + 5, START + 5, 1)[0]) == 0
    assert len(reader.read(log.end, log.end + 5, 1_000)[0]) == 0


def test_appending_continues_at_a_cut(disk: RealDisk) -> None:
    """In the active segment, in finished ones, at a segment's start, and to nothing at all; readers follow."""
    source, log, reader = Source(), open_log(disk), open_reader(disk)
    fill(log, source, 200)
    for end in (START + 199, log.segments[3].base_index, START + 60, log.segments[1].base_index + 1, START):
        assert matches(reader, source, START, log.end)
        log.cut(end)
        assert (log.end, log.synced) == (end, end)
        assert log.end_seq == source.seq(end)
        again = open_log(disk)
        assert (again.end, again.damage) == (end, [])
        again.close()
        fill(log, source, 130)
        assert matches(reader, source, START, log.end)
        assert matches(open_reader(disk), source, START, log.end)


def test_a_sealed_range_never_changes(disk: RealDisk) -> None:
    """It is cut at its end, stays so after a start, and accepts no more records."""
    source, log = Source(), open_log(disk)
    fill(log, source, 100)
    with pytest.raises(BadValue, match="repair"):
        log.seal(START + 101)
    log.seal(START + 90)
    log.seal(START + 90)
    log.close()
    log = open_log(disk)

    assert (log.sealed, log.end, log.damage) == (True, START + 90, [])
    assert matches(open_reader(disk), source, START, log.end)
    with pytest.raises(BadValue, match="sealed"):
        log.append(*source.span(START + 90, START + 91))
    with pytest.raises(BadValue, match="sealed"):
        log.cut(START + 80)


def test_dropping_takes_whole_finished_segments(disk: RealDisk) -> None:
    """Never the active one; readers get Trimmed; the start is remembered, even after an interruption."""
    source, log, reader = Source(), open_log(disk), open_reader(disk)
    fill(log, source, 200)
    infos = log.segments
    assert log.drop_below(infos[0].end_index - 1) == 0
    freed = log.drop_below(infos[2].end_index)

    assert freed == sum(info.bytes for info in infos[:3])
    assert log.first == infos[3].base_index
    assert matches(reader, source, log.first, log.end)
    with pytest.raises(Trimmed):
        open_reader(disk).read(START, log.end, 100)
    log.drop_below(log.end + 1_000)
    assert len(log.segments) == 1
    log.close()
    log = open_log(disk)
    assert (log.first, log.end, log.damage) == (infos[-1].base_index, START + 200, [])


def test_an_open_reader_survives_dropping(disk: RealDisk) -> None:
    """It may finish its open files; then it learns that the rest is gone."""
    source, log, reader = Source(), open_log(disk), open_reader(disk)
    fill(log, source, 200)
    first = log.segments[0]
    assert matches(reader, source, START, first.end_index)
    log.drop_below(log.end)
    assert matches(reader, source, first.base_index + 1, first.base_index + 2)
    reader.refresh()
    with pytest.raises(Trimmed):
        reader.read(START, START + 1, 1)

    assert matches(reader, source, log.first, log.end)


def test_a_missing_range_reads_as_empty(disk: RealDisk) -> None:
    """No folder: nothing, not an error."""
    reader = open_reader(disk)

    assert reader.first is None
    assert len(reader.read(START, START + 1, 10)[0]) == 0
    assert reader.find_seq(START_SEQ) is None
    assert reader.find_time(0) is None
    remove_range(disk, FOLDER)


def test_a_removed_range_leaves_nothing() -> None:
    """All files and the folder are removed."""
    disk = World().disk()
    log = open_log(disk)
    fill(log, Source(), 50)
    log.close()
    remove_range(disk, FOLDER)

    assert disk.list(FOLDER.rpartition("/")[0]) == []


def test_start_up_reads_only_the_active_segment() -> None:
    """Finished segments cost two short reads each, however long they are."""
    world = World()
    log = open_log(world.disk(), replace(SMALL, segment_bytes=100_000))
    fill(log, Source(size_max=5_000), 2_000)
    sealed = [join(FOLDER, segment_name(info.base_seq)) for info in log.segments[:-1]]
    total = sum(info.bytes for info in log.segments[:-1])
    log.close()
    read: dict[str, int] = {}
    disk = world.disk()
    plain = disk.open

    def counting(path: str, create: bool = False, writable: bool = False):
        file = plain(path, create, writable)
        pread = file.pread

        def counted(size: int, offset: int) -> bytes:
            read[path] = read.get(path, 0) + (data := pread(size, offset)).__len__()
            return data

        file.pread = counted
        return file

    disk.open = counting
    log = open_log(disk, replace(SMALL, segment_bytes=100_000))

    assert log.end == START + 2_000
    assert total > 20 * 100_000
    assert all(read[path] <= 300 for path in sealed)


def test_a_new_copy_is_synced_from_the_file_upwards(disk: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal writes all of it with the first sync, so a caller waits for only one sync."""
    synced = list[str]()
    folders, files = RealDisk.sync_folder, RealFile.sync
    monkeypatch.setattr(RealDisk, "sync_folder", lambda self, path: (synced.append(path), folders(self, path))[1])
    monkeypatch.setattr(RealFile, "sync", lambda self: (synced.append("file"), files(self))[1])
    open_log(disk)

    above = FOLDER.rpartition("/")[0]
    assert synced[:4] == ["file", FOLDER, above, ""]
