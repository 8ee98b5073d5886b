"""Records that left memory are read from the segment files of replicas: reads, positions, trims, damaged copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.storage.reading import RangeReader
from embarcadero.types import Gap, GapKind
from embarcadero.wire import messages as m
from embarcadero_proof.bugs.table import injected
from tests.broker.disks import DiskWorld, Hand, fill, payload, scan, texts
from tests.broker.harness import Client


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    """Two brokers, three replicas."""
    return DiskWorld(tmp_path)


def test_records_that_left_memory_are_read_from_files_transparently(world: DiskWorld) -> None:
    """Publish far more than the log keeps: readers get all of it, from the start, in order, once."""
    range_ = world.topic()
    fill(world, range_, 120)
    reader = Client(world.brokers[1])
    expected = [payload(sequence, 1_500) for sequence in range(120)]
    assert scan(world, reader, range_.lane, max_bytes=8_000) == (expected, [])
    assert scan(world, reader, range_.lane, by="earliest", max_bytes=100_000)[0] == expected
    assert world.brokers[1].readers.disks.jobs > 0
    assert world.brokers[1].readers.disks.ahead_used > 0
    assert scan(world, reader, range_.lane, read="ordered", max_bytes=8_000) == (expected, [])


def test_a_broker_keeps_no_state_of_a_deleted_topic(world: DiskWorld) -> None:
    """Open files keep the space of removed ones; counts, frontiers and positions of readers are small, but many."""
    range_ = world.topic()
    fill(world, range_, 120)
    broker = world.brokers[1]
    reader = Client(broker)
    scan(world, reader, range_.lane, max_bytes=8_000)
    copies, (connection,) = broker.readers.disks.copies, broker.peers.values()
    held = [idle for key, readers in copies._idle.items() if key[0] == range_.lane for idle in readers]
    assert held
    assert range_.lane in connection.reading
    assert range_.lane in broker.counters.went_out

    (topic,) = [topic for topic in world.directory.topics.all() if topic.lane == range_.lane]
    world.directory.topics.delete(topic.name)
    world.run(10, reader)
    assert not copies._idle
    assert not copies._good
    assert range_.lane not in connection.reading
    assert range_.lane not in broker.counters.went_out
    assert range_.lane not in broker.durable._durability._known
    copies.give_back(range_, range_.replicas[0], held[0], good=True)  # a worker had it meanwhile
    assert not copies._idle


def test_a_ring_may_be_read_before_its_lane_continues_there(world: DiskWorld) -> None:
    """A new sequencer's ring is empty at first: its start is not known yet, and earlier records are on disk."""
    range_ = world.topic()
    fill(world, range_, 20)
    world.brokers = [world.start_broker(broker.member.broker) for broker in world.brokers]
    world.hand = Hand(world)
    world.hand.start()
    world.hand.open_lane(range_.lane)
    reader = Client(world.brokers[1])
    assert not world.fetch(reader, range_.lane, by="index", start=0, read="ordered").payloads

    refs = [replica.member.ref for replica in world.replicas]
    opened = world.directory.ranges.seal_and_open(range_.lane, range_.number, 20, 40, refs, world.hand.epoch)
    assert opened is not None
    ring = world.hand.rings[range_.lane]
    ring.next, world.hand.seqs[range_.lane] = opened.start, opened.start_seq
    ring.publish()
    world.hand.word(range_.lane, opened.number)
    for replica in world.of(opened):
        replica.say(opened, opened.start)
    client = Client(world.brokers[0])
    world.publish(client, world.open(client), 20, 5)
    everything = [payload(sequence, 1_500) for sequence in range(20)] + [payload(n) for n in range(20, 25)]
    assert scan(world, reader, range_.lane, read="ordered") == (everything, [])


def test_positions_are_found_in_files_too(world: DiskWorld) -> None:
    """By seq, by time, by index; the lane starts where the files start."""
    range_ = world.topic()
    client = fill(world, range_, 300, size=400)
    lane = range_.lane
    tail = world.ask(client, m.GetTail(lane=lane))
    assert (tail.index, tail.seq, tail.start_index, tail.start_seq) == (300, 600, 0, 0)
    assert (tail.durable_index, tail.durable_seq) == (300, 600)
    assert (world.ask(client, m.Find(lane=lane, by="seq", start=7))).index == 3
    assert (world.ask(client, m.Find(lane=lane, by="index", start=5))).seq == 10
    assert (world.ask(client, m.Find(lane=lane, by="seq", start=597))).index == 298
    assert (world.ask(client, m.Find(lane=lane, by="seq", start=600))).index == 300
    assert world.ask(client, m.Find(lane=lane, by="seq", start=601)).code == "FuturePosition"
    entry = world.fetch(client, lane, start=20, max_bytes=1).entries[0]
    assert world.ask(client, m.Find(lane=lane, by="time", start=int(entry["append_us"]))).index == 20
    assert world.fetch(client, lane, by="time", start=int(entry["append_us"]) + 1, max_bytes=1).entries["index"] == [21]
    assert texts(world.fetch(client, lane, by="seq", start=41, max_bytes=1)) == [payload(20, 400)]


def test_trims_apply_to_files(world: DiskWorld) -> None:
    """Trimmed records are one TRIMMED gap, in memory or on disk; the start moves."""
    range_ = world.topic()
    client = fill(world, range_, 100)
    place = world.ask(client, m.Trim(lane=range_.lane, by="seq", before=21))
    assert (place.index, place.seq) == (10, 20)
    found = world.fetch(client, range_.lane, start=3)
    assert (found.gap, found.next_index) == (Gap(GapKind.TRIMMED, 3, 10), 10)
    assert texts(world.fetch(client, range_.lane, by="earliest", max_bytes=1)) == [payload(10, 1_500)]
    assert world.ask(client, m.Find(lane=range_.lane, by="index", start=2)).code == "Trimmed"
    assert world.ask(client, m.GetTail(lane=range_.lane)).start_index == 10


def test_a_position_below_the_start_is_trimmed_for_every_lookup(world: DiskWorld) -> None:
    """By index, seq and time; in files, in memory, and after the files were removed. A fetch continues at the start."""
    range_ = world.topic()
    client = fill(world, range_, 300, size=400)
    lane = range_.lane
    entries = [world.fetch(client, lane, start=index, max_bytes=1).entries[0] for index in (3, 30, 295)]
    times = {int(entry["index"]): int(entry["append_us"]) for entry in entries}

    def found(*places: tuple[str, int]) -> list[str | int]:
        answers = [world.ask(client, m.Find(lane=lane, by=by, start=value)) for by, value in places]
        return [answer.code if isinstance(answer, m.Failed) else answer.index for answer in answers]

    assert found(("seq", 0), ("seq", 41)) == [0, 20]
    for start in (30, 295):  # in files, in memory
        world.directory.topics.trim("t", lane, start)
        below = (("index", 3), ("seq", 0), ("seq", 2 * start - 1), ("time", 0), ("time", times[3]))
        assert found(*below) == ["Trimmed"] * 5
        assert found(("index", start), ("seq", 2 * start), ("seq", 2 * start + 3)) == [start, start, start + 1]
        assert found(("time", times[start])) == [start]
        led = world.fetch(client, lane, by="seq", start=5, max_bytes=1)
        assert led.next_index == start + 1
        place = world.ask(client, m.Trim(lane=lane, by="seq", before=5))  # less than before: nothing changes
        assert (place.index, place.seq) == (start, 2 * start)
    for replica in world.of(range_):
        replica.log(range_).drop_below(295)
    assert found(*below) == ["Trimmed"] * 5
    assert found(("time", times[295])) == [295]


def test_records_that_retention_dropped_everywhere_are_trimmed(world: DiskWorld) -> None:
    """Whole segments were dropped from all copies: a TRIMMED gap up to the rest, where the lane now starts."""
    range_ = world.topic()
    client = fill(world, range_, 100)
    for replica in world.of(range_):
        replica.log(range_).drop_below(30)
    left = world.ask(client, m.GetTail(lane=range_.lane)).start_index
    assert 20 < left <= 30
    found = world.fetch(client, range_.lane, start=3)
    assert (found.gap, found.next_index) == (Gap(GapKind.TRIMMED, 3, left), left)
    expected = [payload(sequence, 1_500) for sequence in range(left, 100)]
    assert scan(world, client, range_.lane, by="earliest", max_bytes=8_000) == (expected, [])


def flip(path: Path, text: bytes) -> None:
    """Flip a bit in the first payload that holds a text."""
    for file in sorted(path.rglob("*.log")):
        data = bytearray(file.read_bytes())
        if (at := data.find(text)) >= 0:
            data[at + 3] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("not there")


def test_a_bad_copy_is_skipped_and_without_a_good_one_the_reader_gets_an_error(world: DiskWorld) -> None:
    """A flipped bit in one copy only costs another read; in all copies it is Corrupt, never wrong bytes."""
    range_ = world.topic()
    fill(world, range_, 100)
    replicas = world.of(range_)
    expected = [payload(sequence, 1_500) for sequence in range(100)]
    for replica in replicas[:2]:
        flip(replica.folder, payload(5, 1_500))
        assert scan(world, Client(world.brokers[1]), range_.lane, max_bytes=8_000) == (expected, [])
    flip(replicas[2].folder, payload(5, 1_500))
    reader = Client(world.brokers[1])
    answer = world.fetch(reader, range_.lane, start=5, max_bytes=1_000)
    assert answer.code == "Corrupt"
    assert f"lane {range_.lane}" in answer.message
    assert texts(world.fetch(reader, range_.lane, start=6, max_bytes=1_000)) == [payload(6, 1_500)]


def test_missing_files_and_lagging_replicas_are_skipped(world: DiskWorld) -> None:
    """One copy was deleted, one has few records: the third serves. Without any copy the fetch fails."""
    range_ = world.topic()
    fill(world, range_, 100, copies=2)
    first, second, third = world.of(range_)
    for file in first.folder.rglob("*.log"):
        file.unlink()
    third.say(range_, 0)
    expected = [payload(sequence, 1_500) for sequence in range(100)]
    assert scan(world, Client(world.brokers[1]), range_.lane, max_bytes=8_000) == (expected, [])
    for file in second.folder.rglob("*.log"):
        file.unlink()
    assert world.fetch(Client(world.brokers[1]), range_.lane, start=0).code == "Corrupt"


def test_unreadable_disks_of_replicas_are_not_retriable(world: DiskWorld) -> None:
    """Only errors of the store's disk are retriable. Without a good copy the error is Corrupt and names the disks."""
    range_ = world.topic()
    fill(world, range_, 100)
    world.brokers[1].readers.disks.copies.members = {}
    answer = world.fetch(Client(world.brokers[1]), range_.lane, start=0)
    assert answer.code == "Corrupt"
    assert answer.message.count("is not known") == 3


def test_manually_deleted_files_are_never_a_gap_and_never_skipped(world: DiskWorld) -> None:
    """If one copy lost its first file, the others have the start and all positions. If all lost it: an error."""
    range_ = world.topic()
    client, lane = fill(world, range_, 100), range_.lane
    times = [int(entry["append_us"]) for entry in world.fetch(client, lane, max_bytes=1 << 20).entries]

    for number, replica in enumerate(world.of(range_)):
        min(replica.folder.rglob("*.log")).unlink()
        reader = Client(world.brokers[1])
        first = world.fetch(reader, lane, by="earliest", max_bytes=1)
        places = [world.ask(reader, m.Find(lane=lane, by="seq", start=1)),
                  world.ask(reader, m.Find(lane=lane, by="time", start=times[0])),
                  world.ask(reader, m.GetTail(lane=lane))]  # fmt: skip
        if number < 2:
            assert texts(first) == [payload(0, 1_500)]
            assert [places[0].index, places[1].index, places[2].start_index] == [0, 0, 0]
        else:
            assert [answer.code for answer in (first, *places)] == ["Corrupt"] * 4
            assert world.fetch(reader, lane, start=0).code == "Corrupt"
            assert texts(world.fetch(reader, lane, start=50, max_bytes=1)) == [payload(50, 1_500)]
    for replica in world.of(range_):
        for file in replica.folder.rglob("*.log"):
            file.unlink()
    assert world.ask(Client(world.brokers[1]), m.GetTail(lane=lane)).code == "Corrupt"


def test_nothing_above_the_durable_frontier_is_served_to_a_durable_reader(world: DiskWorld) -> None:
    """A waiting reader is woken when enough disks have the record; an ordered reader gets it immediately."""
    range_ = world.topic()
    first, second, _ = world.of(range_)
    writer, reader = Client(world.brokers[0]), Client(world.brokers[1])
    world.publish(writer, world.open(writer), 0, 3)
    request = reader.ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1_000, wait_ms=30_000))
    first.copy(range_, 3)
    world.run(3, reader)
    assert request not in reader.fetched
    assert len(world.fetch(reader, range_.lane, read="ordered").payloads) == 3
    tail = world.ask(reader, m.GetTail(lane=range_.lane))
    assert (tail.index, tail.seq, tail.durable_index, tail.durable_seq) == (3, 6, 0, 0)
    second.copy(range_, 2)
    world.run(3, reader)
    assert texts(reader.fetched[request]) == [payload(0), payload(1)]
    assert (reader.fetched[request].next_index, reader.fetched[request].tail_index) == (2, 2)
    tail = world.ask(reader, m.GetTail(lane=range_.lane))
    assert (tail.index, tail.durable_index, tail.durable_seq) == (3, 2, 4)
    assert world.fetch(reader, range_.lane, by="latest").next_index == 2
    assert world.fetch(reader, range_.lane, by="latest", read="ordered").next_index == 3


def test_the_injected_bug_of_serving_above_durable_is_detected(world: DiskWorld) -> None:
    """With the bound switched off a durable reader gets records that no disk has: the test above would fail."""
    range_ = world.topic()
    writer = Client(world.brokers[0])
    world.publish(writer, world.open(writer), 0, 1)
    with injected("serve-above-durable"):
        assert texts(world.fetch(writer, range_.lane)) == [payload(0)]


def test_an_end_that_other_brokers_may_have_counted_further_is_not_reported(world: DiskWorld) -> None:
    """While a range is closing no broker can count, so a tail reported now might be below an earlier one."""
    range_ = world.topic()
    writer = Client(world.brokers[0])
    world.publish(writer, world.open(writer), 0, 2)
    world.hand.word(range_.lane, range_.number, closing=True)
    assert world.ask(writer, m.GetTail(lane=range_.lane)).code == "Retriable"
    world.hand.word(range_.lane, range_.number)
    assert world.ask(writer, m.GetTail(lane=range_.lane)).index == 2


def test_a_scan_reads_across_ranges(world: DiskWorld) -> None:
    """A range is sealed and the next one opened elsewhere: readers see one lane, and no record above the sealed end."""
    old = world.topic()
    client = fill(world, old, 50)
    refs = [replica.member.ref for replica in world.replicas]
    world.hand.word(old.lane, old.number, closing=True)
    new = world.directory.ranges.seal_and_open(old.lane, old.number, 40, 80, refs, world.hand.epoch)
    assert new is not None
    for replica in world.of(old):
        source = replica.log(old)
        reader = RangeReader(replica.disk, source.folder, old.lane, old.number, old.start)
        entries, payloads = reader.read(40, 50, 1 << 20)
        replica.log(new).append(entries, payloads)
        replica.log(new).sync_job()()
        source.cut(40)
        replica.say(new, 50)
    world.hand.word(new.lane, new.number)
    world.run(3, client)
    expected = [payload(sequence, 1_500) for sequence in range(50)]
    assert scan(world, client, old.lane, max_bytes=8_000) == (expected, [])


def test_partitions_are_selected_from_files(world: DiskWorld) -> None:
    """A reader of one partition gets only that one, and skips the records of others in between."""
    range_ = world.topic()
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(100):
        client.batch(opened, sequence, payload(sequence, 1_500), partition=sequence % 4)
        world.run(1, client)
        if sequence % 10 == 9:
            for replica in world.of(range_):
                replica.copy(range_, sequence + 1)
    found = []
    index = 0
    while index < 100:
        answer = world.fetch(client, range_.lane, start=index, max_bytes=5_000, partitions=[3], wait_ms=1_000)
        found += texts(answer)
        index = answer.next_index
    assert found == [payload(sequence, 1_500) for sequence in range(3, 100, 4)]
