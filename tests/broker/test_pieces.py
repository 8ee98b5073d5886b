"""Cutting a span into pieces, reading up to a stop, and entries of sessions: from memory and from segment files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.broker.disk_reads import Segments
from embarcadero.broker.durable import LaneRanges
from embarcadero.broker.positions import cuts
from embarcadero.config import FabricSizes
from embarcadero.limits import FETCH_ENTRIES_MAX
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.reading import RangeReader
from embarcadero.types import Cut, EntryKind, LanePosition, Range, ReplicaRef
from embarcadero.wire import messages as m
from tests.broker.disks import DiskWorld, fill, texts
from tests.broker.harness import Client, World
from tests.broker.test_places import Lane
from tests.storage import records

BATCHES = 120
SMALL = FabricSizes(
    pending_slots=64, order_slots=64, held_slots=64, log_bytes=64 * 1024, chunk_bytes=8 * 1024, sessions=64,
    round_entries=16,
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    """Two brokers, three replicas; memory keeps few entries."""
    return DiskWorld(tmp_path, sizes=SMALL)


def _measure(world: DiskWorld, client: Client, lane: int, **options: Any) -> Any:
    ask = m.Measure(lane=lane, **({"start": 0, "piece_bytes": 20_000, "pieces_max": 1_000} | options))
    return world.ask(client, ask)


@given(
    st.lists(st.integers(0, 500), max_size=60), st.integers(1, 1_000), st.integers(1, 80), st.integers(0, 10)
)  # fmt: skip
def test_pieces_cover_a_span_once_and_in_order(sizes: list[int], piece_bytes: int, most: int, first: int) -> None:
    """Every piece ends where a batch starts, no piece is empty, sizes add up, and one more batch would be too much."""
    indices = np.arange(first, first + len(sizes), dtype=np.int64)
    end = LanePosition(first + len(sizes), -1)
    found = cuts(indices, indices * 10, np.array(sizes, dtype=np.int64), end, piece_bytes, most)
    ends = [cut.index for cut in found]
    assert 1 <= len(found) <= most
    assert ends == sorted(set(ends))
    assert all(cut.seq == (cut.index * 10 if cut.index < first + len(sizes) else -1) for cut in found)
    assert [cut.bytes for cut in found] == [
        sum(sizes[start - first : stop - first]) for start, stop in zip([first, *ends], ends, strict=False)
    ]
    assert all(cut.bytes < piece_bytes + 500 for cut in found)
    if len(found) < most:
        assert ends[-1] == first + len(sizes)


def test_a_lane_in_memory_is_measured_by_its_entries() -> None:
    """Index, seq and size of each piece are exact; positions beyond the end and invalid spans are typed errors."""
    lane = Lane(batches=6)
    end = lane.indices[-1] + 1
    ask = m.Measure(lane=lane.lane, start=0, stop=end, piece_bytes=2, pieces_max=100)
    expected = [Cut(lane.indices[2], 20, 2), Cut(lane.indices[4], 40, 2), Cut(end, 60, 2)]
    for broker in (0, 1):
        assert lane.ask(ask, broker) == m.PiecesAre(lane=lane.lane, cuts=expected)
    for wrong, code in (({"stop": end + 1}, "FuturePosition"), ({"start": end + 1}, "BadValue"),
                        ({"piece_bytes": 0}, "BadValue")):  # fmt: skip
        asked = m.Measure(**({"lane": lane.lane, "start": 0, "stop": end, "piece_bytes": 1, "pieces_max": 1} | wrong))
        assert lane.ask(asked).code == code


def test_files_are_measured_by_their_indexes(world: DiskWorld) -> None:
    """Most of the lane left memory: pieces are about equal, and cuts lie at batch boundaries, with their seq."""
    range_ = world.topic()
    client = fill(world, range_, BATCHES)
    tail = world.ask(client, m.GetTail(lane=range_.lane))
    jobs = world.brokers[0].readers.disks.jobs
    found = _measure(world, client, range_.lane, stop=tail.index)
    assert world.brokers[0].readers.disks.jobs == jobs + 1
    assert isinstance(found, m.PiecesAre), found
    assert len(found.cuts) > BATCHES * 1_500 // 20_000 - 3
    assert (found.cuts[-1].index, found.cuts[-1].seq) == (tail.index, tail.seq)
    for cut in found.cuts[:-1]:
        place = world.ask(client, m.Find(lane=range_.lane, by="index", start=cut.index))
        assert (place.index, place.seq) == (cut.index, cut.seq)
        assert cut.bytes < 30_000


def test_a_long_span_is_measured_in_several_answers(world: DiskWorld) -> None:
    """With a bound on pieces, successive answers cover the whole: no piece twice, none missing."""
    range_ = world.topic()
    client = fill(world, range_, BATCHES)
    stop = world.ask(client, m.GetTail(lane=range_.lane)).index
    at, found = 0, []
    while at < stop:
        answer = _measure(world, client, range_.lane, start=at, stop=stop, pieces_max=2)
        assert 1 <= len(answer.cuts) <= 2
        found += answer.cuts
        at = found[-1].index
    assert len(found) > 5
    assert sum(cut.bytes for cut in found) >= BATCHES * 1_500


def test_trimmed_records_are_not_measured(world: DiskWorld) -> None:
    """The first piece starts where the lane does; a span that is wholly gone is Trimmed."""
    range_ = world.topic()
    client = fill(world, range_, BATCHES)
    stop = world.ask(client, m.GetTail(lane=range_.lane)).index
    world.ask(client, m.Trim(lane=range_.lane, by="index", before=90))
    left = _measure(world, client, range_.lane, stop=stop)
    assert sum(cut.bytes for cut in left.cuts) < 32 * 1_600
    assert _measure(world, client, range_.lane, stop=50).code == "Trimmed"


def test_a_reader_may_request_entries_of_sessions_too() -> None:
    """By `control` every index comes, once and in order; without it only batches do."""
    lane = Lane()
    everything = lane.fetch(by="earliest", control=True)
    assert everything.entries["index"].tolist() == list(range(6))
    kinds = everything.entries["kind"].tolist()
    assert kinds == [EntryKind.SESSION_OPEN] + [EntryKind.BATCH] * 5
    assert [bytes(payload) for payload in everything.payloads] == [b"", b"0", b"1", b"2", b"3", b"4"]
    assert lane.fetch(by="earliest", control=True, partitions=[3]).entries["kind"].tolist() == [EntryKind.SESSION_OPEN]
    assert lane.fetch(by="earliest", partitions=[3]).entries["kind"].tolist() == []


class OneCopy:
    """The one replica's copy of the one range of the storage tests."""

    def __init__(self, disk: RealDisk) -> None:
        self._disk = disk

    def replicas(self, range_: Range) -> list[ReplicaRef]:
        return range_.replicas

    def borrow(self, range_: Range, ref: ReplicaRef) -> RangeReader:
        return records.open_reader(self._disk)

    def give_back(self, range_: Range, ref: ReplicaRef, files: Any, good: bool) -> None:
        files.close()


def test_entries_of_sessions_come_from_files_too(tmp_path: Path) -> None:
    """For records that left memory, `control` returns every index; without it, only batches.

    Both continue at the same position.
    """
    disk, source = RealDisk(tmp_path), records.Source()
    log = records.open_log(disk)
    records.fill(log, source, 100)
    range_ = Range(lane=records.LANE, number=records.RANGE, start=records.START, start_seq=records.START_SEQ,
                   replicas=[ReplicaRef(replica=0, incarnation=1, disk="d")], durable_on=1)  # fmt: skip
    segments = Segments(records.LANE, LaneRanges([range_]), log.end, 0, OneCopy(disk))
    entries, _ = source.span(records.START, records.START + 20)
    ask = m.Fetch(lane=records.LANE, start=records.START, stop=records.START + 20, max_bytes=1 << 20, control=True)
    everything = segments.fetch(ask)
    batches = segments.fetch(msgspec.structs.replace(ask, control=False))
    assert everything.entries.tobytes() == entries.tobytes()
    assert set(entries["kind"].tolist()) == {EntryKind.BATCH, EntryKind.SESSION_OPEN}
    assert batches.entries["index"].tolist() == entries["index"][entries["kind"] == EntryKind.BATCH].tolist()
    assert everything.next_index == batches.next_index == records.START + 20


def test_read_ahead_is_shared_by_equal_requests_only(world: DiskWorld) -> None:
    """A span read ahead for one kind of reader is not given to a reader with another request."""
    range_ = world.topic()
    fill(world, range_, BATCHES)
    reader = Client(world.brokers[1])
    first = world.fetch(reader, range_.lane, start=0, max_bytes=4_000)
    warm = world.brokers[1].readers.disks
    used = warm.ahead_used
    following = world.fetch(reader, range_.lane, start=first.next_index, max_bytes=4_000, stop=first.next_index + 1)
    assert (len(following.payloads), warm.ahead_used) == (1, used)


def test_a_fetch_ends_at_its_stop_and_does_not_wait_there(world: DiskWorld) -> None:
    """In memory and in files: nothing at or above the stop, and an immediate answer if there is nothing below it."""
    range_ = world.topic()
    fill(world, range_, BATCHES)
    reader = Client(world.brokers[1])
    for first in (3, BATCHES - 10):
        at, indices = first, []
        while at < first + 4:  # an answer may end with its segment
            found = world.fetch(reader, range_.lane, start=at, stop=first + 4, wait_ms=30_000)
            indices += found.entries["index"].tolist()
            at = found.next_index
        assert indices == list(range(first, first + 4))
        at_stop = world.fetch(reader, range_.lane, start=first, stop=first, wait_ms=30_000)
        assert (texts(at_stop), at_stop.next_index) == ([], first)
        none = world.fetch(reader, range_.lane, start=first, stop=first + 1, wait_ms=30_000, partitions=[3])
        assert (texts(none), none.next_index) == ([], first + 1)


def test_a_fetched_frame_never_has_too_many_entries() -> None:
    """Thousands of tiny batches fit the requested bytes, and still come in frames that clients accept."""
    sizes = FabricSizes(
        pending_slots=64, order_slots=8_192, held_slots=64, log_bytes=1 << 20, chunk_bytes=64 * 1024, sessions=64,
        round_entries=32,
    )  # fmt: skip
    world = World(brokers=1, sizes=sizes)
    lane = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    many = FETCH_ENTRIES_MAX + 100
    for sequence in range(many):
        client.batch(opened, sequence, b"x", low=sequence)
        if sequence % 30 == 29:
            world.run(2, client)
    world.run(6, client)
    found = world.fetch(client, lane, by="index", start=0)
    assert len(found.payloads) == FETCH_ENTRIES_MAX
    rest = world.fetch(client, lane, by="index", start=found.next_index)
    assert len(rest.payloads) == many - FETCH_ENTRIES_MAX


def test_a_seq_below_a_lane_that_is_wholly_trimmed_is_trimmed_not_damaged(world: DiskWorld) -> None:
    """Copies that dropped everything are not damaged: Find returns Trimmed, a fetch continues at the end."""
    range_ = world.topic()
    client = fill(world, range_, BATCHES)
    stop = world.ask(client, m.GetTail(lane=range_.lane)).durable_index
    world.ask(client, m.Trim(lane=range_.lane, by="index", before=stop))
    assert world.ask(client, m.Find(lane=range_.lane, by="seq", start=1)).code == "Trimmed"
    found = world.fetch(client, range_.lane, by="seq", start=1)
    assert (found.gap, found.next_index) == (None, stop)
