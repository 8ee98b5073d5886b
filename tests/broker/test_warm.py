"""Reads across memory, segment files and lost positions: the source is invisible to readers, and no bytes are wrong."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from embarcadero.broker.read import disk
from embarcadero.broker.read.disk import Segments
from embarcadero.client.read.spans import tail_of, with_lags
from embarcadero.errors import Backpressure
from embarcadero.limits import WARM_JOBS_MAX
from embarcadero.storage.reading import RangeReader
from embarcadero.types import Gap, GapKind, Range, ReaderProgress
from embarcadero.wire import messages as m
from embarcadero_proof.bugs.table import injected
from tests.broker.disks import DiskWorld, Hand, payload, texts
from tests.broker.harness import Client


@pytest.fixture
def world(tmp_path: Path) -> DiskWorld:
    """Two brokers, three replicas."""
    return DiskWorld(tmp_path)


class Later:
    """Workers that run one job when a test asks for it."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.most = 0

    def run(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.jobs.append((job, done))
        self.most = max(self.most, len(self.jobs))

    def step(self) -> None:
        """Run the oldest job."""
        job, done = self.jobs.pop(0)
        try:
            result: Any = job()
        except Exception as error:
            result = error
        done(result)


def fill(world: DiskWorld, range_: Range, batches: int, size: int = 1_500, copies: int = 3) -> Client:
    """Publish batches, made durable a few at a time: far more than memory can hold."""
    client = Client(world.brokers[0])
    opened = world.open(client)
    for sequence in range(batches):
        client.batch(opened, sequence, payload(sequence, size), count=2)
        world.run(1, client)
        if sequence % 10 == 9:
            for replica in world.of(range_)[:copies]:
                replica.copy(range_, sequence + 1)
    world.run(3, client)
    assert len(client.acks) == batches
    return client


def scan(world: DiskWorld, client: Client, lane: int, **options: Any) -> tuple[list[bytes], list[Gap]]:
    """Read a lane to its end, fetch by fetch."""
    found, gaps, index = [], [], 0
    ask = {"by": "index", "start": 0} | options
    for _ in range(500):
        answer = world.fetch(client, lane, **ask)
        assert answer is not None
        assert not isinstance(answer, m.Failed), answer
        found += texts(answer)
        gaps += [answer.gap] if answer.gap is not None else []
        if not answer.payloads and answer.gap is None:
            return found, gaps
        index = answer.next_index
        ask |= {"by": "index", "start": index}
    raise AssertionError("it never ends")


def test_evicted_records_are_read_from_files_transparently(world: DiskWorld) -> None:
    """Far more was published than the log holds; all of it is read, from the start, in order, once."""
    range_ = world.topic()
    fill(world, range_, 120)
    reader = Client(world.brokers[1])
    expected = [payload(sequence, 1_500) for sequence in range(120)]
    assert scan(world, reader, range_.lane, max_bytes=8_000) == (expected, [])
    assert scan(world, reader, range_.lane, by="earliest", max_bytes=100_000)[0] == expected
    assert world.brokers[1].readers.disks.jobs > 0
    assert world.brokers[1].readers.disks.ahead_used > 0
    assert scan(world, reader, range_.lane, read="ordered", max_bytes=8_000) == (expected, [])


def test_a_broker_holds_nothing_of_a_deleted_topic(world: DiskWorld) -> None:
    """Open files take the space of removed ones; counts, frontiers and positions of readers are small, but many."""
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
    copies.give_back(range_, range_.replicas[0], held[0], good=True)  # a worker read it meanwhile
    assert not copies._idle


def test_an_empty_ring_of_a_new_sequencer_does_not_mislead_readers(world: DiskWorld) -> None:
    """A new sequencer's ring is empty at first: its first index is not known yet, and earlier entries are on disk."""
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
    """By seq, by time, by index; the start of the lane is the start of the files."""
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


def test_trims_reach_into_files(world: DiskWorld) -> None:
    """Trimmed records are one TRIMMED gap, wherever they were stored; the start moves."""
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
    """By index, seq and time; in files, in memory, and when the files are gone.

    A fetch from there continues at the start.
    """
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


def test_segments_dropped_by_retention_everywhere_are_trimmed(world: DiskWorld) -> None:
    """Whole segments are gone from all copies: readers get a TRIMMED gap up to the new start."""
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
    """Flip a bit in the first payload that contains a text."""
    for file in sorted(path.rglob("*.log")):
        data = bytearray(file.read_bytes())
        if (at := data.find(text)) >= 0:
            data[at + 3] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("not there")


def test_a_bad_copy_is_skipped_and_without_a_good_one_the_reader_gets_an_error(world: DiskWorld) -> None:
    """A flipped bit in one copy costs only another read; in all copies it is Corrupt, never wrong bytes."""
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


def test_missing_files_and_replicas_that_are_behind_are_skipped(world: DiskWorld) -> None:
    """One copy was deleted, one is short: the third serves. With no copy it is an error."""
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


def test_unreadable_disks_of_replicas_are_no_reason_to_retry(world: DiskWorld) -> None:
    """Only a failing disk of the store is. Without a good copy the answer is Corrupt, with the list of disks."""
    range_ = world.topic()
    fill(world, range_, 100)
    world.brokers[1].readers.disks.copies.members = {}
    answer = world.fetch(Client(world.brokers[1]), range_.lane, start=0)
    assert answer.code == "Corrupt"
    assert answer.message.count("is not known") == 3


def test_files_deleted_by_hand_are_never_a_gap_and_never_skipped(world: DiskWorld) -> None:
    """The first file of one copy is gone: the start and all positions are found in the others.

    If it is gone from all copies: an error.
    """
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
    """A waiting reader is woken when enough disks have it; an ordered reader gets it immediately."""
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
    """With the bound switched off a durable reader gets records that are on no disk: the test above would fail."""
    range_ = world.topic()
    writer = Client(world.brokers[0])
    world.publish(writer, world.open(writer), 0, 1)
    with injected("serve-above-durable"):
        assert texts(world.fetch(writer, range_.lane)) == [payload(0)]


def test_an_end_that_other_brokers_may_have_counted_further_is_not_reported(world: DiskWorld) -> None:
    """While a range is closing no broker can count, so a tail reported now might be lower than an earlier one."""
    range_ = world.topic()
    writer = Client(world.brokers[0])
    world.publish(writer, world.open(writer), 0, 2)
    world.hand.word(range_.lane, range_.number, closing=True)
    assert world.ask(writer, m.GetTail(lane=range_.lane)).code == "Retriable"
    world.hand.word(range_.lane, range_.number)
    assert world.ask(writer, m.GetTail(lane=range_.lane)).index == 2


def test_lost_positions_are_a_gap_and_lookups_skip_them(world: DiskWorld) -> None:
    """After a restart the lane continues at its ceiling: sealed part from files, a LOST gap, then new records."""
    old = world.topic()
    fill(world, old, 20, size=100)
    new = world.restart(old, 18, 36)
    lane, (writer, reader) = new.lane, (Client(broker) for broker in world.brokers)
    assert scan(world, reader, lane, by="earliest")[0] == [payload(sequence, 100) for sequence in range(18)]
    world.publish(writer, world.open(writer), 100, 2)
    for replica in world.of(new)[:2]:
        replica.copy(new, new.start + 2)
    world.run()
    found, gaps = scan(world, reader, lane)
    assert found == [*(payload(sequence, 100) for sequence in range(18)), payload(100), payload(101)]
    assert gaps == [Gap(GapKind.LOST, 18, new.start)]
    for start, read in ((19, "durable"), (20, "ordered"), (new.start - 1, "ordered")):
        inside = world.fetch(reader, lane, start=start, read=read)
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)
    for by, value in (("seq", 36), ("seq", 40), ("index", 18), ("index", new.start - 1)):
        place = world.ask(reader, m.Find(lane=lane, by=by, start=value))
        assert (place.index, place.seq) == (new.start, new.start_seq)
    assert texts(world.fetch(reader, lane, by="seq", start=36, max_bytes=1)) == [payload(100)]
    assert world.ask(reader, m.Find(lane=lane, by="seq", start=35)).index == 17
    tail = world.ask(reader, m.GetTail(lane=lane))
    assert (tail.index, tail.durable_index, tail.start_index) == (new.start + 2, new.start + 2, 0)


def lose_and_go_on(world: DiskWorld, old: Range) -> tuple[Range, Client, Client]:
    """A lane with 20 batches, of which 18 survive a loss, and two new ones above the ceiling; a writer, a reader."""
    fill(world, old, 20, size=100)
    new = world.restart(old, 18, 36)
    writer, reader = (Client(broker) for broker in world.brokers)
    world.publish(writer, world.open(writer), 100, 2)
    for replica in world.of(new)[:2]:
        replica.copy(new, new.start + 2)
    world.run()
    return new, writer, reader


@pytest.mark.parametrize("start", [18, 19, 1_000])
def test_a_loss_above_a_trim_is_still_reported_as_lost(world: DiskWorld, start: int) -> None:
    """Only trimmed records are TRIMMED. The rest of a LOST gap stays LOST, though its range is removed."""
    new, writer, reader = lose_and_go_on(world, world.topic())
    lane = new.lane
    world.directory.topics.trim("t", lane, start)
    world.run()
    found, gaps = scan(world, reader, lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, start), Gap(GapKind.LOST, start, new.start)]
    inside = world.fetch(reader, lane, start=2_000)
    assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, start, new.start), new.start)
    assert (opened := world.open(writer)).lost_to == new.start
    assert opened.lost_from == 18
    for by, value in (("earliest", 0), ("seq", 3), ("seq", 36), ("time", 0)):
        assert texts(world.fetch(reader, lane, by=by, start=value, max_bytes=1)) == [payload(100)]
    assert world.ask(reader, m.GetTail(lane=lane)).start_index == new.start


def test_a_lane_that_was_trimmed_to_its_end_before_a_loss(world: DiskWorld) -> None:
    """All durable records are trimmed, then the rest is lost: the two gaps stay distinct, and readers can continue."""
    old = world.topic()
    world.directory.topics.trim("t", old.lane, 18)
    new, _, reader = lose_and_go_on(world, old)
    found, gaps = scan(world, reader, new.lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, 18), Gap(GapKind.LOST, 18, new.start)]
    for by, value in (("earliest", 0), ("seq", 3), ("seq", 36), ("time", 0)):
        assert texts(world.fetch(reader, new.lane, by=by, start=value, max_bytes=1)) == [payload(100)]


def test_dropped_records_below_lost_positions_are_trimmed_up_to_them(world: DiskWorld) -> None:
    """A broker that does not know of the trim yet uses the files, which start above everything in them."""
    old = world.topic()
    new, _, reader = lose_and_go_on(world, old)
    for replica in world.of(old):
        log = replica.log(old)
        log.cut(18)
        assert not log.roll_if_due(0)
        assert log.roll_if_due(10**15)
        log.sync_job()()
        assert log.drop_below(18)
    found, gaps = scan(world, reader, new.lane)
    assert found == [payload(100), payload(101)]
    assert gaps == [Gap(GapKind.TRIMMED, 0, 18), Gap(GapKind.LOST, 18, new.start)]


def test_trimming_less_than_before_changes_nothing_when_files_are_gone(world: DiskWorld) -> None:
    """An index whose range is forgotten is below the start, not at the end of the durable part."""
    new, _, reader = lose_and_go_on(world, world.topic())
    lane, start = new.lane, new.start + 1
    for before in (start, 5, 0, 18, start - 1):
        place = world.ask(reader, m.Trim(lane=lane, by="index", before=before))
        assert (place.index, world.directory.topics.trims()[lane]) == (start, start)
    for index in (0, 5, 18, start - 1):
        assert world.ask(reader, m.Find(lane=lane, by="index", start=index)).code == "Trimmed"
    assert texts(world.fetch(reader, lane, by="earliest")) == [payload(101)]


@pytest.mark.parametrize("trim", [19, 30, 1_000])
def test_a_trim_does_not_hide_from_a_reader_that_records_were_taken_back(world: DiskWorld, trim: int) -> None:
    """It has read records above the surviving end. Also below the trim, these positions are lost and never reused."""
    new, _, reader = lose_and_go_on(world, world.topic())
    world.directory.topics.trim("t", new.lane, trim)
    world.run()
    for start in (19, 25, 30):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)


def test_two_consecutive_losses_are_one_gap_and_a_reader_between_them_gets_the_second(world: DiskWorld) -> None:
    """Nothing became durable between the two: one gap from the sealed end, for a reader that was not there before."""
    old = world.topic()
    fill(world, old, 20, size=100)
    between = world.restart(old, 18, 36)
    new = world.restart(between, between.start, between.start_seq)
    reader = Client(world.brokers[1])
    for start in (18, 19, between.start - 1):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, 18, new.start), new.start)
    for start in (between.start, between.start + 3):
        inside = world.fetch(reader, new.lane, start=start, read="ordered")
        assert (inside.gap, inside.next_index) == (Gap(GapKind.LOST, between.start, new.start), new.start)


@pytest.mark.parametrize("accepted", [False, True])
def test_a_reader_of_durable_records_gets_lost_only_if_durable_records_may_be_lost(
    world: DiskWorld, accepted: bool
) -> None:
    """Enough disks answered: nothing above the end was durable.

    This does not hold if an operator accepted a loss. Readers of ordered records get LOST, and so do clients of earlier
    versions, which do not know the kind.
    """
    old = world.topic()
    fill(world, old, 20, size=100)
    if accepted:
        world.directory.ranges.accept_loss(old.lane)
    new = world.restart(old, 18, 36)
    reader = Client(world.brokers[1])
    kinds = {
        (read, known): world.fetch(reader, new.lane, start=18, read=read, never_durable=known).gap.kind
        for read in ("durable", "ordered")
        for known in (False, True)
    }
    kind = GapKind.LOST if accepted else GapKind.NEVER_DURABLE
    assert kinds.pop(("durable", True)) is kind
    assert set(kinds.values()) == {GapKind.LOST}
    world.directory.topics.trim("t", new.lane, 1_000)
    world.run()
    gap = world.fetch(reader, new.lane, start=1_000, never_durable=True).gap
    assert gap == Gap(kind, 1_000, new.start)


def test_a_tail_and_the_lag_of_readers_count_records_and_not_the_hole_of_a_restart(world: DiskWorld) -> None:
    """36 records survived, 4 came later; the seqs between are a hole of billions."""
    new, _, reader = lose_and_go_on(world, world.topic())
    tail = tail_of(world.directory.topics.all()[0], world.ask(reader, m.GetTail(lane=new.lane)))
    assert tail.holes == ((36, new.start_seq),)
    assert tail.records(0, tail.seq) == 36 + 4
    places = (0, 0), (18, 36), (new.start, tail.seq)
    readers = [ReaderProgress(reader="r", places={new.lane: place}) for place in places]
    assert [progress.lag for progress in with_lags(readers, tail)] == [40, 4, 0]
    assert world.fetch(reader, new.lane, start=16, max_bytes=1).next_index == 17
    assert world.brokers[1].reader_lags() == {new.lane: [1 + 2]}
    world.directory.topics.trim("t", new.lane, new.start + 1)
    world.run()
    tail = tail_of(world.directory.topics.all()[0], world.ask(reader, m.GetTail(lane=new.lane)))
    assert (tail.holes, tail.records(tail.start_seq, tail.seq)) == ((), 2)


def test_a_clean_restart_between_two_losses_does_not_make_records_lost_that_never_were_durable(
    world: DiskWorld
) -> None:
    """The cluster was killed, started, stopped cleanly, started, and killed again, with nothing published between."""
    old = world.topic()
    fill(world, old, 20, size=100)
    between, refs = world.restart(old, 18, 36), [replica.member.ref for replica in world.replicas]
    start = between.start, between.start_seq
    assert world.directory.ranges.seal_clean(old.lane, between.number, *start, world.hand.epoch)
    again = world.directory.ranges.reopen(old.lane, refs, world.hand.epoch)
    assert again is not None
    new = world.restart(again, *start)
    gap = world.fetch(Client(world.brokers[1]), new.lane, start=18, never_durable=True).gap
    assert gap == Gap(GapKind.NEVER_DURABLE, 18, new.start)


class Recovering:
    """A lane of 20 durable batches that is recovered while a broker searches its files for an answer."""

    def __init__(self, path: Path) -> None:
        self.workers: list[Later] = []
        self.world = DiskWorld(path, workers=self._later)
        self.old = self.world.topic()
        client = Client(self.world.brokers[0])
        self.world.publish(client, self.world.open(client), 0, 20)
        for replica in self.world.of(self.old):
            replica.copy(self.old, 20)
        self.world.brokers = [self.world.start_broker(0), self.world.start_broker(1)]
        self.world.hand = Hand(self.world)
        self.world.hand.start()
        self.world.hand.word(self.old.lane, self.old.number, closing=True)
        self.world.run()
        self.reader = Client(self.world.brokers[1])

    def _later(self) -> Later:
        self.workers.append(Later())
        return self.workers[-1]

    def answer(self, message: m.Message) -> Any:
        """Send a request, let the files be searched, recover the lane, and only then give the broker the result."""
        request = self.reader.ask(message)
        job, done = self.workers[-1].jobs.pop(0)
        result = job()
        new = self.world.lose_memory(self.old, 20, 40)
        self.world.hand.open_lane(new.lane, new.start, new.start_seq)
        self.world.hand.word(new.lane, new.number)
        for replica in self.world.of(new):
            replica.say(new, new.start)
        self.world.run()
        done(result)
        self.reader.pump()
        return self.reader.answers[request]


@pytest.mark.parametrize("bug", [False, True])
def test_a_start_found_before_a_recovery_is_not_reported_after_it(tmp_path: Path, bug: bool) -> None:
    """The broker read the ranges before the recovery and memory after it: the lane seemed to start at its ceiling."""
    lane = Recovering(tmp_path)
    with injected(*["start-unsearched"][: int(bug)]):
        tail = lane.answer(m.GetTail(lane=lane.old.lane))
    if bug:
        assert tail.start_index == tail.index > 20
        return
    assert tail.code == "Retriable"
    request = lane.reader.ask(m.GetTail(lane=lane.old.lane))
    lane.workers[-1].step()
    lane.world.run(3, lane.reader)
    tail = lane.reader.answers[request]
    assert (tail.start_index, tail.start_seq) == (0, 0)


def test_a_restarted_lane_without_new_records_reports_its_end(world: DiskWorld) -> None:
    """The ring is empty; both ends are where the new range starts."""
    old = world.topic()
    fill(world, old, 20, size=100)
    new = world.restart(old, 20, 40)
    reader = Client(world.brokers[1])
    tail = world.ask(reader, m.GetTail(lane=new.lane))
    assert (tail.index, tail.seq) == (tail.durable_index, tail.durable_seq) == (new.start, new.start_seq)
    assert (tail.start_index, tail.start_seq) == (0, 0)
    late = world.fetch(reader, new.lane, by="time", start=world.clock.wall_us())
    assert (late.payloads, late.gap) == ([], None)


def test_the_sealed_part_is_readable_while_a_lane_is_recovered(world: DiskWorld) -> None:
    """No order ring yet, the last range not decided: records in sealed ranges are served, the others wait."""
    old = world.topic()
    fill(world, old, 20, size=100)
    refs = [replica.member.ref for replica in world.replicas]
    last = world.directory.ranges.seal_and_open(old.lane, old.number, 15, 30, refs, world.hand.epoch)
    assert last is not None
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    world.hand = type(world.hand)(world)
    world.hand.start()
    world.hand.word(old.lane, last.number, closing=True)
    world.run()
    reader = Client(world.brokers[1])
    answer = world.fetch(reader, old.lane, by="earliest")
    assert texts(answer) == [payload(sequence, 100) for sequence in range(15)]
    assert answer.next_index == 15
    request = reader.ask(m.Fetch(lane=old.lane, start=15, max_bytes=1_000, wait_ms=30_000))
    world.run(3, reader)
    assert request not in reader.fetched
    assert request not in reader.answers
    assert world.ask(reader, m.GetTail(lane=old.lane)).code == "Retriable"


@pytest.mark.parametrize("read", ["durable", "ordered"])
def test_a_seq_above_the_sealed_part_waits_for_the_lane_and_starts_there(world: DiskWorld, read: str) -> None:
    """Not at the start of the range that is being recovered: earlier records were not requested."""
    old = world.topic()
    fill(world, old, 20, size=100)
    refs = [replica.member.ref for replica in world.replicas]
    last = world.directory.ranges.seal_and_open(old.lane, old.number, 15, 30, refs, world.hand.epoch)
    assert last is not None
    for replica in world.of(last):
        replica.copy(last, 18)
        replica.log(old).cut(15)
    world.brokers = [world.start_broker(0), world.start_broker(1)]
    world.hand = type(world.hand)(world)
    world.hand.start()
    world.hand.word(old.lane, last.number, closing=True)
    world.run()
    reader = Client(world.brokers[1])

    def ask(seq: int, wait_ms: int) -> m.Fetch:
        return m.Fetch(lane=old.lane, by="seq", start=seq, max_bytes=1, read=read, wait_ms=wait_ms)

    waiting = {seq: reader.ask(ask(seq, 30_000)) for seq in (29, 30, 33)}
    world.run(3, reader)
    assert texts(reader.fetched[waiting[29]]) == [payload(14, 100)]
    assert not {waiting[30], waiting[33]} & (reader.fetched.keys() | reader.answers.keys())
    assert world.ask(reader, ask(33, 0)).code == "Retriable"

    new = world.lose_memory(last, 18, 36)
    world.hand.open_lane(new.lane, new.start, new.start_seq)
    world.hand.word(new.lane, new.number)
    world.run(3, reader)
    assert texts(reader.fetched[waiting[30]]) == [payload(15, 100)]
    assert texts(reader.fetched[waiting[33]]) == [payload(16, 100)]


def test_a_scan_reads_across_ranges(world: DiskWorld) -> None:
    """A range is sealed and the next one opened on other replicas.

    Readers see one lane, and nothing above the old range's end.
    """
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


def test_few_files_are_read_at_once_and_clients_take_turns(tmp_path: Path) -> None:
    """A client with many fetches does not delay another one; publishing needs no file at all."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    writer = fill(world, range_, 100)
    greedy, modest = Client(world.brokers[1]), Client(world.brokers[1])
    many = [greedy.ask(m.Fetch(lane=range_.lane, start=i, max_bytes=1_000)) for i in range(20)]
    one = modest.ask(m.Fetch(lane=range_.lane, start=50, max_bytes=1_000))
    world.run(2, greedy, modest)
    assert later.most == WARM_JOBS_MAX
    for _ in range(4):
        later.step()
    world.run(1, greedy, modest)
    assert one in modest.fetched
    assert sum(request in greedy.fetched for request in many) < 5
    assert world.brokers[1].status()["warm_jobs"] > 10
    writer.acks.clear()
    world.publish(writer, m.Opened(lane=range_.lane, session=1, index=0, expected=0, low=0), 100, 5)
    assert len(writer.acks) == 5
    while later.jobs:
        later.step()
        world.run(1)
    world.run(2, greedy)
    assert [texts(greedy.fetched[request]) for request in many] == [[payload(i, 1_500)] for i in range(20)]


def test_a_client_that_leaves_has_no_jobs_left(tmp_path: Path) -> None:
    """Its waiting jobs are dropped; the result of a running job is discarded."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client = Client(world.brokers[1])
    for index in range(10):
        client.ask(m.Fetch(lane=range_.lane, start=index, max_bytes=1_000))
    client.connection.closed()
    while later.jobs:
        later.step()
    disk = world.brokers[1].readers.disks
    assert (disk.running, disk.waiting, disk._ahead_bytes) == (0, 0, 0)
    assert world.brokers[1].fetches_waiting == 0


def test_a_client_that_leaves_before_its_next_span_is_read_frees_the_reservation(tmp_path: Path) -> None:
    """It had requested a span for read-ahead, and other clients had their turn first."""
    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client, others, disk = Client(world.brokers[1]), Client(world.brokers[1]), world.brokers[1].readers.disks
    client.ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1_000))
    for index in range(10):
        others.ask(m.Fetch(lane=range_.lane, start=index, max_bytes=1_000))
    later.step()
    assert disk._ahead_bytes == world.brokers[1].unread.most(1_000) > 1_500
    client.ask(m.Fetch(lane=range_.lane, start=1, max_bytes=1_000))
    assert disk.ahead_used == 1
    client.connection.closed()
    others.connection.closed()
    while later.jobs:
        later.step()
    assert (disk.running, disk.waiting, disk._ahead_bytes) == (0, 0, 0)


@pytest.mark.parametrize("call", ["fetch", "first"])
def test_a_read_that_fails_unexpectedly_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """No client is left waiting, and the bug is visible: it is raised where drivers log it."""

    def fails(*_: Any) -> None:
        raise ArithmeticError("an unexpected bug")

    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    client = Client(world.brokers[1])
    ask = {"fetch": m.Fetch(lane=range_.lane, start=0, max_bytes=1_000), "first": m.GetTail(lane=range_.lane)}[call]
    with monkeypatch.context() as patch:
        patch.setattr(Segments, call, fails)
        request = client.ask(ask)
        with pytest.raises(ArithmeticError):
            later.step()
    world.run(2, client)
    failed = client.answers[request]
    assert isinstance(failed, m.Failed)
    assert (failed.code, "an unexpected bug" in failed.message) == ("Corrupt", True)
    assert world.brokers[1].fetches_waiting == world.brokers[1].readers.disks.running == 0


def test_a_store_that_fails_while_a_file_is_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is gone, and it is unknown whether it was trimmed: the client has to ask again, and does not wait for it.
    """

    def locked() -> int:
        raise Backpressure("the store is locked", "try again")

    later = Later()
    world = DiskWorld(tmp_path, workers=lambda: later)
    range_ = world.topic()
    fill(world, range_, 100)
    for replica in world.replicas:
        for file in replica.folder.rglob("*.log"):
            file.unlink()
    client = Client(world.brokers[1])
    request = client.ask(m.Fetch(lane=range_.lane, start=0, max_bytes=1_000, wait_ms=10_000))
    with monkeypatch.context() as patch:
        patch.setattr(world.directory, "revision", locked)
        later.step()
    client.pump()
    assert client.answers[request] == m.Failed(code="Backpressure", message="the store is locked", hint="try again")


def test_an_evicted_reader_of_files_has_one_owner(
    world: DiskWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is about to take it while another finds that too many are cached: exactly one of them gets it."""
    taking, closed = Event(), list[RangeReader]()

    class Shelf(list[RangeReader]):
        def pop(self, _at: Any = -1) -> RangeReader:
            taking.set()
            sleep(0.05)
            return super().pop()

    range_ = world.topic()
    first, second, _ = range_.replicas
    copies = world.brokers[1].readers.disks.copies
    monkeypatch.setattr(RangeReader, "close", lambda files: closed.append(files))  # noqa: PLW0108 - to be bound
    kept, other = copies.borrow(range_, first), copies.borrow(range_, second)
    copies.give_back(range_, first, kept, good=True)
    copies._idle = {key: Shelf(files) for key, files in copies._idle.items()}
    monkeypatch.setattr(disk, "WARM_READERS_MAX", 0)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(copies.borrow, range_, first)
        assert taking.wait(10)
        copies.give_back(range_, second, other, good=True)
        assert taken.result(10) not in closed
    assert (taken.result() is kept) != (kept in closed)


def test_partitions_are_picked_from_files(world: DiskWorld) -> None:
    """A reader of one partition gets only that one, and advances over the others."""
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
