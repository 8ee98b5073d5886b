"""Trims and retention: whole sealed segments are dropped, never entries that sessions need."""

from __future__ import annotations

from pathlib import Path

from embarcadero.replica.retention import CHECKPOINT
from embarcadero.storage.folder import write_checkpoint
from embarcadero.storage.layout import lane_folder, range_folder
from embarcadero.storage.segment import DamageKind
from embarcadero.types import TopicLane
from embarcadero.wire.messages import AdvanceTier, OpenTier
from tests.replica.harness import Slow, World, Writer

SEGMENT = 64 * 1024


def filled(path: Path, order: int = 0, batches: int = 60, **topic: int) -> tuple[World, int, Writer]:
    """A lane with some segments of 64 KiB, each of about 15 batches of 4,000 bytes."""
    world = World(path, segment_bytes=SEGMENT)
    lane = world.topic(order=order, **topic)
    if order == 0:
        made = world.directory.lanes.make(world.directory.topics.get("t"), world.broker.member)
        assert isinstance(made, TopicLane)
        lane, writer = made.lane, world.broker.lane(made)
    else:
        writer = world.reign.lane(lane)
    world.settle()
    for number in range(batches):
        writer.batches(bytes([number + 1]) * 4_000)
        world.poll()
    return world, lane, writer


def segments(world: World, lane: int) -> list[tuple[int, int]]:
    copy = world.replicas[0].ranges.copies[lane, 1]
    return [(info.base_index, info.end_index) for info in copy.log.segments]


def test_a_trim_drops_whole_segments(tmp_path: Path) -> None:
    """Those below the trim; the segment that contains it stays."""
    world, lane, writer = filled(tmp_path)
    before = segments(world, lane)
    assert len(before) > 3
    world.directory.topics.trim("t", lane, before[2][0] + 1)
    world.poll(10, step_us=500_000)

    assert segments(world, lane) == before[2:]
    assert world.files(0, lane) == writer.written[before[2][0] :]
    assert world.replicas[0].counters.dropped_bytes > SEGMENT


def test_trimmed_damage_does_not_keep_a_copy_from_counting(tmp_path: Path) -> None:
    """No peer could repair it, and it is no longer needed: records that came meanwhile count, also after a restart."""
    world, lane, writer = filled(tmp_path)
    second = segments(world, lane)[1][0]
    path = min((world.folder(0) / range_folder(lane, 1)).glob("*.log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    world.poll(20, step_us=500_000)
    assert world.replicas[0].counters.damage_found == 1
    writer.batches(b"later")
    world.poll(5)
    assert world.durable(lane) == 60

    world.directory.topics.trim("t", lane, second)
    world.poll(10, step_us=500_000)
    assert world.durable(lane) == 61
    world.kill_replica(0)
    world.start_replica(0)
    assert world.replicas[0].ranges.copies[lane, 1].whole


def test_nothing_is_dropped_while_it_is_scrubbed(tmp_path: Path) -> None:
    """The findings of a scrub are recorded before the segment is dropped: no record of a dropped segment remains."""
    world, lane, _ = filled(tmp_path)
    replica, before = world.replicas[0], segments(world, lane)
    path = min((world.folder(0) / range_folder(lane, 1)).glob("*.log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    scrubber, slow = replica.scrubber, Slow()
    usual, scrubber._workers = scrubber._workers, slow
    world.poll(3, step_us=500_000)
    assert len(slow.jobs) == 1
    world.directory.topics.trim("t", lane, before[1][0])
    world.poll(10, step_us=500_000)
    assert segments(world, lane) == before

    scrubber._workers = usual
    slow.jobs.pop()()
    world.poll(10, step_us=500_000)
    assert replica.counters.damage_found == 1
    assert segments(world, lane) == before[1:]
    assert replica.ranges.copies[lane, 1].whole


def test_a_loss_can_be_accepted_though_the_copy_starts_above_it(tmp_path: Path) -> None:
    """The length of a lost tail is unknown, but the records appended after it are intact."""
    world, lane, writer = filled(tmp_path)
    copy = world.replicas[0].ranges.copies[lane, 1]
    world.directory.topics.trim("t", lane, segments(world, lane)[1][0])
    world.poll(10, step_us=500_000)
    copy.log.quarantine(1, 2, DamageKind.TAIL, b"")
    assert copy.log.first > 2
    assert world.replicas[0].ranges.accept_loss(copy)
    assert copy.whole
    assert world.files(0, lane) == writer.written[copy.log.first :]


def test_retention_by_bytes_becomes_a_trim(tmp_path: Path) -> None:
    """At the start of a segment, so that all agree where the lane starts; at least the configured bytes are kept."""
    world, lane, _ = filled(tmp_path, retention_bytes=2 * SEGMENT)
    world.poll(10, step_us=500_000)

    start = world.directory.topics.trims()[lane]
    kept = segments(world, lane)
    assert start == kept[0][0] > 0
    held = sum(path.stat().st_size for path in (world.folder(0) / range_folder(lane, 1)).glob("*.log"))
    assert 2 * SEGMENT - 4_096 <= held <= 4 * SEGMENT


def test_retention_stops_at_the_frontier_of_the_table(tmp_path: Path) -> None:
    """Records that are not in the topic's table yet stay on disk whatever the bounds; those in it stay in the table."""
    world, lane, writer = filled(tmp_path, batches=5, retention_bytes=SEGMENT)
    world.directory.tiers.open(OpenTier(topic="t", holder="a", id="i", warehouse="w", table="t"))
    for number in range(60):
        writer.batches(bytes([number + 1]) * 4_000)
        world.poll()
    world.poll(10, step_us=500_000)
    assert lane not in world.directory.topics.trims()

    place = (segments(world, lane)[1][1] + 3, 0)
    world.directory.tiers.advance(AdvanceTier(topic="t", epoch=1, metadata="m", frontiers={lane: place}), 0)
    world.poll(10, step_us=500_000)
    assert 0 < world.directory.topics.trims()[lane] <= place[0]
    assert world.directory.tiers.all()["t"].start(lane) == (0, 0)


def test_retention_by_age_becomes_a_trim(tmp_path: Path) -> None:
    """Segments whose newest record is older are dropped, also the last one: it is closed by its age."""
    world, lane, _ = filled(tmp_path, retention_s=3_600)
    world.poll(4, step_us=500_000)
    assert lane not in world.directory.topics.trims()

    before = segments(world, lane)
    world.poll(10, step_us=1_000_000_000)
    assert world.directory.topics.trims()[lane] == before[-1][1] == 60
    assert segments(world, lane) == [(60, 60)]


def test_records_of_a_slow_topic_expire_too(tmp_path: Path) -> None:
    """They never fill a segment: it is closed by its age, and dropped when its last record is old enough."""
    world = World(tmp_path, segment_s=60)
    world.topic(order=0, retention_s=3_600)
    made = world.directory.lanes.make(world.directory.topics.get("t"), world.broker.member)
    assert isinstance(made, TopicLane)
    lane, writer = made.lane, world.broker.lane(made)
    world.settle()
    for _ in range(2):
        writer.batches(b"seldom")
        world.poll(10, step_us=20_000_000)
    assert segments(world, lane) == [(0, 1), (1, 2), (2, 2)]
    assert world.files(0, lane) == writer.written
    world.poll(10, step_us=1_000_000_000)
    assert world.directory.topics.trims()[lane] == 2
    assert segments(world, lane) == [(2, 2)]
    writer.batches(b"next")
    world.poll(5)
    assert world.durable(lane) == 3


def test_a_clock_change_makes_no_record_old(tmp_path: Path) -> None:
    """Forward: records do not become old immediately, and it is reported.

    Back: they are kept longer. Passing time counts.
    """
    world, lane, _ = filled(tmp_path, retention_s=3_600)
    world.poll(4, step_us=500_000)
    before, right = segments(world, lane), world.clock.wall_us
    for years in (10, -1):
        world.clock.wall_us = lambda years=years: right() + years * 365 * 86_400_000_000  # type: ignore[method-assign]
        world.poll(10, step_us=1_000_000)
        assert lane not in world.directory.topics.trims()
        assert segments(world, lane) == before
    world.clock.wall_us = right  # type: ignore[method-assign]
    world.replicas[0].retention._offset_us = None  # as after a restart
    world.poll(10, step_us=1_000_000_000)
    assert segments(world, lane) == [(60, 60)]


def test_entries_stay_until_a_checkpoint_covers_them(tmp_path: Path) -> None:
    """Orders 2 and 5: sessions are made of entries, so a checkpoint comes first."""
    world, lane, _ = filled(tmp_path, order=2)
    before = segments(world, lane)
    world.directory.topics.trim("t", lane, before[3][0])
    world.poll(10, step_us=500_000)
    assert segments(world, lane) == before

    sessions = world.replicas[0].sessions
    write_checkpoint(sessions._disk, lane_folder(lane), before[1][1], b"a table", world.directory.topics.get("t").id)
    sessions.forget(lane)
    world.poll(10, step_us=500_000)
    assert segments(world, lane) == before[2:]
    assert world.line(world.replicas[0].member.ref, lane, word=CHECKPOINT) == 0


def test_a_range_that_is_trimmed_away_below_lost_positions_leaves_the_disks(tmp_path: Path) -> None:
    """Though the store remembers its end; not before a checkpoint covers its session entries."""
    world, lane, _ = filled(tmp_path, order=2)
    replica, end = world.replicas[0], segments(world, lane)[-1][1]
    assert world.directory.ranges.seal_recovered(lane, 1, end, 2 * end, [replica.member.ref], world.reign.number)
    world.settle()
    assert world.directory.topics.trim("t", lane, end + 5) == end + 5
    world.poll(10, step_us=500_000)
    folder = world.folder(0) / range_folder(lane, 1)
    assert folder.is_dir()

    write_checkpoint(replica.sessions._disk, lane_folder(lane), end, b"a table", world.directory.topics.get("t").id)
    replica.sessions.forget(lane)
    world.poll(10, step_us=500_000)
    assert not folder.exists()
    assert [range_.number for range_ in world.directory.ranges.all(lane)] == [1, 2]


def test_one_checkpoint_is_not_enough_where_two_copies_are_required(tmp_path: Path) -> None:
    """The only disk that has it may be lost: segments and ranges stay until another disk has the checkpoint too."""
    world = World(tmp_path, replicas=2, segment_bytes=SEGMENT)
    lane = world.topic(order=2, replicas=2, durable_on=2)
    writer = world.reign.lane(lane)
    world.settle()
    for number in range(60):
        writer.batches(bytes([number + 1]) * 4_000)
        world.poll()
    refs = [replica.member.ref for replica in world.replicas.values()]
    assert world.directory.ranges.seal_and_open(lane, 1, 60, 120, refs, world.reign.number)
    world.settle()
    world.directory.topics.trim("t", lane, 60)
    before = segments(world, lane)
    for number, replica in world.replicas.items():
        write_checkpoint(replica.sessions._disk, lane_folder(lane), 60, b"a table", world.directory.topics.get("t").id)
        replica.sessions.forget(lane)
        replica.lines.set((lane, 2), 60, CHECKPOINT)
        world.poll(10, step_us=500_000)
        assert [range_.number for range_ in world.directory.ranges.all(lane)] == ([1, 2] if number == 0 else [2])
        assert number or segments(world, lane) == before
    assert not any((world.folder(number) / range_folder(lane, 1)).exists() for number in world.replicas)


def test_a_checkpoint_removed_with_its_folder_is_not_reported(tmp_path: Path) -> None:
    """A replica that left a lane and returns to it starts without a checkpoint."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(order=2, replicas=1, durable_on=1)
    world.reign.lane(lane).batches(b"a", b"b")
    world.settle()
    range_ = world.directory.ranges.open_range(lane)
    assert range_ is not None
    (first,) = range_.replicas
    here, other = world.replicas[first.replica], world.replicas[1 - first.replica]
    write_checkpoint(here.sessions._disk, lane_folder(lane), 2, b"a table", world.directory.topics.get("t").id)
    here.sessions.forget(lane)
    assert here.sessions.on_disk(lane) == 2
    assert world.directory.ranges.seal_and_open(lane, 1, 2, 4, [other.member.ref], world.reign.number)
    assert world.directory.ranges.replace_in_sealed(lane, 1, first.replica, other.member.ref)
    world.poll(10, step_us=500_000)
    assert not (world.folder(first.replica) / lane_folder(lane)).exists()
    assert here.sessions.on_disk(lane) == 0


def test_a_copy_that_was_trimmed_can_be_copied(tmp_path: Path) -> None:
    """A disk that was wiped gets the records that the others still have."""
    world = World(tmp_path, replicas=2, segment_bytes=SEGMENT)
    world.topic(order=0, replicas=2, durable_on=2)
    made = world.directory.lanes.make(world.directory.topics.get("t"), world.broker.member)
    assert made is not None
    lane, writer = made.lane, world.broker.lane(made)
    world.settle()
    for number in range(60):
        writer.batches(bytes([number + 1]) * 4_000)
        world.poll()
    start = segments(world, lane)[2][0]
    world.directory.topics.trim("t", lane, start)
    world.poll(10, step_us=500_000)
    refs = [replica.member.ref for replica in world.replicas.values()]
    assert world.directory.ranges.seal_and_open(lane, 1, 60, 120, refs, world.reign.number)
    world.settle()
    world.kill_replica(1)
    for path in sorted(world.folder(1).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    world.start_replica(1)
    world.poll(20, step_us=500_000)
    world.settle()

    assert world.files(1, lane) == writer.written[start:]
    assert world.replicas[1].count_ranges()["complete"] == 1
