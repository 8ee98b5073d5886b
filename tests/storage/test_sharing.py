"""Several users of the same files: a writer, its sync jobs in another thread, and readers with views of their own."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from embarcadero.errors import BadSegment, Trimmed
from embarcadero.storage.disk import RealDisk
from tests.storage.records import START, Source, matches, open_log, open_reader

TOTAL = 1_500


def follow(folder: Path, source: Source, synced: list[int], stop: threading.Event) -> int:
    """Read everything that is synced, from the start of the copy; returns the number of correct records."""
    reader, index, right = open_reader(RealDisk(folder)), START, 0
    while index < START + TOTAL and not stop.is_set():
        try:
            entries, payloads = reader.read(index, synced[0], 2_000)
        except Trimmed:
            reader.refresh()
            index = max(index, reader.first or index)
            continue
        expected, bodies = source.span(index, index + len(entries))
        assert entries.tobytes() == expected.tobytes()
        assert [bytes(one) for one in payloads] == bodies
        index, right = index + len(entries), right + len(entries)
    return right


def test_readers_follow_a_writer_that_rolls_and_drops(tmp_path: Path) -> None:
    """Group commit in a worker, roll-over, dropping: two readers get every retained record, and none is wrong."""
    source, synced, stop = Source(), [START], threading.Event()
    source.span(START, START + TOTAL)  # made before threads share it
    log = open_log(RealDisk(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(follow, tmp_path, source, synced, stop) for _ in range(2)]
        try:
            pending: Future[int] | None = None
            while log.synced < START + TOTAL:
                if log.end < START + TOTAL:
                    log.append(*source.span(log.end, min(START + TOTAL, log.end + 3)))
                if pending is None and log.dirty:
                    pending = pool.submit(log.sync_job())
                if pending is not None and pending.done():
                    synced[0], pending = pending.result(), None
                    log.drop_below(log.end - 400)
            synced[0] = log.synced
            counts = [reader.result(timeout=60) for reader in readers]
        finally:
            stop.set()

    assert log.first > START
    assert all(count >= START + TOTAL - log.first for count in counts)


def test_a_damaged_header_hides_only_its_own_segment(tmp_path: Path) -> None:
    """Readers skip it."""
    source, log = Source(), open_log(RealDisk(tmp_path))
    while len(log.segments) < 6:
        log.append(*source.span(log.end, log.end + 5))
        log.sync_job()()
    infos = log.segments
    path = next(tmp_path.rglob(f"{infos[2].base_seq:020d}.log"))
    path.write_bytes(b"\xff" * 50 + path.read_bytes()[50:])
    reader = open_reader(RealDisk(tmp_path))

    for number, info in enumerate(infos):
        for index in range(info.base_index, info.end_index):
            if number == 2:
                with pytest.raises(BadSegment):
                    reader.read(index, index + 1, 10)
            else:
                entries, _ = reader.read(index, index + 1, 10)
                assert int(entries["index"][0]) == index


def test_a_header_that_was_never_synced_hides_nothing_before_it(tmp_path: Path) -> None:
    """Power failed right after a roll-over: the previous segment has no footer yet, and all its records."""
    source, log = Source(), open_log(RealDisk(tmp_path))
    while len(log.segments) < 2:
        log.append(*source.span(log.end, log.end + 1))
    first, last = log.segments
    path = next(tmp_path.rglob(f"{last.base_seq:020d}.log"))
    path.write_bytes(bytes(path.stat().st_size))
    reader = open_reader(RealDisk(tmp_path))

    for index in range(first.base_index, first.end_index):
        entries, _ = reader.read(index, index + 1, 10)
        assert int(entries["index"][0]) == index
    with pytest.raises(BadSegment):
        reader.read(last.base_index, last.end_index, 10)


@pytest.mark.parametrize("first", ["read", "entry", "find_seq", "find_time"])
def test_a_segment_that_was_cut_and_created_again_is_read_again(tmp_path: Path, first: str) -> None:
    """It starts like the segment that a reader had open; records that only the new one has are found, too."""
    source, log = Source(), open_log(RealDisk(tmp_path))
    while len(log.segments) < 2:
        log.append(*source.span(log.end, log.end + 1))
    base, reader = log.segments[-1].base_index, open_reader(RealDisk(tmp_path))
    assert matches(reader, source, base, log.end)
    log.cut(base - 1)
    assert len(log.segments) == 1
    while log.end < base + 8:
        log.append(*source.span(log.end, log.end + 1))
    assert [info.base_index for info in log.segments][1:] == [base]
    reader.refresh()

    last, _ = source.span(log.end - 1, log.end)
    if first == "read":
        entries, _ = reader.read(log.end - 1, log.end, 10)
        assert entries.tobytes() == last.tobytes()
    elif first == "entry":
        assert reader.entry(log.end - 1) is not None
    elif first == "find_seq":
        assert reader.find_seq(int(last["seq"][0])) == log.end - 1
    else:
        assert reader.find_time(int(last["append_us"][0])) is not None
    assert matches(reader, source, START, log.end)
