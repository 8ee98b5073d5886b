"""Ranges: created, cut at their end, completed from peers, removed; and a replica's report after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from embarcadero.errors import DiskFailed, NotAvailable
from embarcadero.limits import CEILING_AHEAD, REPLACE_AFTER_S
from embarcadero.placement.topics import Topics
from embarcadero.storage.layout import range_folder
from embarcadero.types import ReplicaRef, TopicLane, Trouble
from embarcadero_proof.bugs.table import injected
from tests.replica.harness import Reign, Slow, World, Writer


def written(world: World, lane: int, count: int = 10) -> Writer:
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(*(bytes([n + 1]) * 300 for n in range(count)))
    world.poll()
    return writer


def refs(world: World, *numbers: int) -> list[ReplicaRef]:
    return [world.replicas[number].member.ref for number in numbers]


def test_a_sealed_range_is_cut_above_its_end_and_the_next_one_begins_there(tmp_path: Path) -> None:
    """Records above the end belong to the next range: they are copied there from the fabric."""
    world = World(tmp_path)
    lane = world.topic()
    writer = written(world, lane)
    assert world.directory.ranges.seal_and_open(lane, 1, 6, 12, refs(world, 0), world.reign.number)
    world.settle()

    assert world.files(0, lane, 1) == writer.written[:6]
    assert world.files(0, lane, 2) == writer.written[6:]
    assert world.durable(lane, 2) == 10
    assert world.replicas[0].count_ranges() == {"open": 1, "complete": 1, "incomplete": 0, "not opened": 0}


def test_unsynced_records_are_synced_when_their_range_is_sealed(tmp_path: Path) -> None:
    """A sync was in progress, more was appended meanwhile, the range was sealed: all of it still reaches the disk."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer, late = written(world, lane, 4), world.replicas[1]
    late.commits._workers, usual = Slow(), late.commits._workers
    slow = late.commits._workers
    for _ in range(2):
        writer.batches(b"x" * 300)
        world.poll()
    assert len(slow.jobs) == 1
    assert world.directory.ranges.seal_and_open(lane, 1, 6, 12, refs(world, 0, 1), world.reign.number)
    world.poll(20)
    late.commits._workers = usual
    slow.jobs.pop()()
    world.settle()

    assert late.ranges.copies[lane, 1].log.synced == 6
    assert late.count_ranges()["complete"] == 1


def test_a_late_replica_completes_its_sealed_range_from_peers(tmp_path: Path) -> None:
    """It was dead when the range was sealed.

    Its next incarnation gets the missing records, and cuts none that count.
    """
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=3, durable_on=2)
    writer = written(world, lane, 4)
    world.kill_replica(2)
    writer.batches(*(bytes([n + 1]) * 500 for n in range(20)))
    world.poll()
    assert world.durable(lane) == 24
    assert world.directory.ranges.seal_and_open(lane, 1, 24, 48, refs(world, 0, 1), world.reign.number)
    world.start_replica(2)
    world.settle()

    assert world.files(2, lane) == writer.written
    assert world.replicas[2].count_ranges()["complete"] == 1
    assert world.line(world.replicas[2].member.ref, lane, 2) is None


def test_a_wiped_disk_is_filled_again(tmp_path: Path) -> None:
    """The store learns the new disk once it holds the whole sealed range; it publishes no line for the open one."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, 0, 1), world.reign.number)
    world.settle()
    world.kill_replica(1)
    shutil.rmtree(world.folder(1))
    world.start_replica(1)
    world.settle()

    mine = world.replicas[1].member.ref
    assert mine in world.range_(lane, 1).replicas
    assert world.files(1, lane) == writer.written
    assert world.line(mine, lane, 2) is None


def test_a_range_that_is_no_longer_assigned_is_removed(tmp_path: Path) -> None:
    """The topic was deleted: so are its files, with all folders."""
    world = World(tmp_path)
    lane = world.topic()
    written(world, lane)
    world.directory.topics.delete("t")
    world.settle()

    assert not any(name.startswith("lane-") for name in (path.name for path in world.folder(0).iterdir()))


@pytest.mark.parametrize("refused", [0, 3])
def test_a_drained_replica_gives_its_ranges_away(tmp_path: Path, refused: int) -> None:
    """Another one copies the sealed range; then the store and the disks agree that the drained one has nothing.

    A store that is out of reach when the copy is complete is updated later.
    """
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    before = {ref.replica for ref in world.range_(lane).replicas}
    spare = ({0, 1, 2} - before).pop()
    leaving = min(before)
    assert world.directory.ranges.seal_and_open(
        lane, 1, 10, 20, refs(world, *sorted(before - {leaving}), spare), world.reign.number
    )  # fmt: skip
    world.directory.replicas.drain(leaving)
    answers, usual = [NotAvailable("busy", "wait")] * refused, world.directory.ranges.replace_in_sealed

    def replace(*what: Any) -> bool:
        if answers:
            raise answers.pop()
        return usual(*what)

    with patch.object(world.directory.ranges, "replace_in_sealed", replace):
        for _ in range(5):
            world.poll(20, step_us=200_000)
        world.settle()

    assert not world.directory.replicas.ranges_on(leaving)
    assert world.files(spare, lane) == writer.written
    assert not (world.folder(leaving) / range_folder(lane, 1)).exists()
    assert world.notes[spare].count("can't record a copy") == refused
    assert world.notes[spare].count("copy completed") == 1


@pytest.mark.parametrize("drained", [False, True])
def test_sealed_ranges_of_a_dead_replica_are_copied_again(tmp_path: Path, drained: bool) -> None:
    """After a while, or immediately if it is drained.

    The store names the new copy once it is complete, and not before.
    """
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    before = {ref.replica for ref in world.range_(lane).replicas}
    spare, dead = ({0, 1, 2} - before).pop(), min(before)
    rest = refs(world, *sorted(before - {dead}), spare)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, rest, world.reign.number)
    world.settle()
    world.kill_replica(dead)
    if drained:
        world.directory.replicas.drain(dead)
    else:
        world.poll(20, step_us=1_000_000)
        assert {ref.replica for ref in world.directory.ranges.all(lane)[0].replicas} == before
        world.clock.us += int(REPLACE_AFTER_S * 1_000_000)
    usual, told = world.directory.ranges.replace_in_sealed, []

    def replace(*what: Any) -> bool:
        told.append(world.files(spare, lane) == writer.written)
        return usual(*what)

    with patch.object(world.directory.ranges, "replace_in_sealed", replace):
        for _ in range(5):
            world.poll(20, step_us=200_000)
        world.settle()
    assert told == [True]
    assert not world.directory.replicas.ranges_on(dead)
    assert {ref.replica for ref in world.directory.ranges.all(lane)[0].replicas} == before - {dead} | {spare}


def test_a_replica_that_comes_back_in_time_keeps_its_ranges(tmp_path: Path) -> None:
    """A restart is no reason to copy its ranges."""
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=2, durable_on=2)
    written(world, lane)
    before = {ref.replica for ref in world.range_(lane).replicas}
    spare, dead = ({0, 1, 2} - before).pop(), min(before)
    rest = refs(world, *sorted(before - {dead}), spare)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, rest, world.reign.number)
    world.settle()
    for _ in range(3):
        world.kill_replica(dead)
        world.poll(5, step_us=int(REPLACE_AFTER_S * 100_000))
        world.start_replica(dead)
        world.poll(5, step_us=int(REPLACE_AFTER_S * 100_000))
    assert {ref.replica for ref in world.directory.ranges.all(lane)[0].replicas} == before


def test_a_copy_that_could_not_be_opened_leaves_nothing_when_it_is_no_longer_assigned(tmp_path: Path) -> None:
    """Its folder was made, then the disk failed, and then its topic was deleted."""
    world = World(tmp_path, replicas=1)
    with patch("embarcadero.storage.recovery.begin_segment", side_effect=DiskFailed("input/output error")):
        lane = world.topic(replicas=1, durable_on=1)
        world.poll(5)
    assert (world.folder(0) / range_folder(lane, 1)).exists()
    assert not world.replicas[0].ranges.copies
    world.directory.topics.delete("t")
    world.settle()
    assert not (world.folder(0) / range_folder(lane, 1)).exists()


def test_a_copy_that_could_not_be_removed_is_removed_later(tmp_path: Path) -> None:
    """The disk was read-only for a while, and the store does not change any more."""
    world = World(tmp_path, replicas=1)
    lane = world.topic(replicas=1, durable_on=1)
    written(world, lane)
    replica = world.replicas[0]
    with patch.object(replica.ranges, "_remove_folder", side_effect=DiskFailed("read-only file system")) as failing:
        world.directory.topics.delete("t")
        world.settle()
        assert failing.call_count
    assert (world.folder(0) / range_folder(lane, 1)).exists()
    world.clock.us += 1_000_000
    world.settle()
    assert replica.counters.ranges_removed == 1
    assert not (world.folder(0) / range_folder(lane, 1)).exists()


# --- after a restart --------------------------------------------------------------------------------------------------
def test_a_reassigned_range_stays_while_its_old_copy_is_being_removed(tmp_path: Path) -> None:
    """A worker was removing it when another replica was faster; then that one is drained, too."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, 0, 1), world.reign.number)
    world.settle()
    ranges, all_ranges = world.replicas[1].ranges, world.directory.ranges.all()
    for open_ in (False, True):
        tags = lane, 2 if open_ else 1
        others = [range_ for range_ in all_ranges if (range_.lane, range_.number) != tags]
        busy = ranges.copies[tags]
        busy.reading = True
        ranges.update(others, {})
        ranges.update(all_ranges, {})
        world.poll(5)
        assert tags not in ranges.copies
        busy.reading = False
        world.settle()
        assert ranges.copies[tags] is not busy
    assert world.files(1, lane, 1) == writer.written
    assert world.replicas[1].counters.ranges_removed == 0


def test_a_restarted_replica_reports_the_end_of_its_copy(tmp_path: Path) -> None:
    """The fabric is gone; the reply is the end of the files, and nothing is appended to that range."""
    world = World(tmp_path, replicas=1)
    lane = world.topic()
    writer = written(world, lane)
    world.lose_fabric(1)
    world.settle()

    ref = world.replicas[0].member.ref
    assert world.line(ref, lane) == 10
    assert world.files(0, lane) == writer.written
    assert world.range_(lane).replicas[0].incarnation != ref.incarnation


def test_a_replica_without_the_disk_does_not_reply(tmp_path: Path) -> None:
    """A wiped disk has another id: the replica that lost its range is not mistaken for an empty one."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    written(world, lane)
    for number in list(world.replicas):
        world.kill_replica(number, known=False)
    shutil.rmtree(world.folder(1))
    world.directory.begin_generation()
    world._begin(2)
    world.settle()

    assert world.line(world.replicas[0].member.ref, lane) == 10
    assert world.line(world.replicas[1].member.ref, lane) is None


@pytest.mark.parametrize("of_lane", [False, True])
def test_a_replica_without_the_folder_of_its_range_does_not_reply(tmp_path: Path, of_lane: bool) -> None:
    """It was removed while the replica was down, and the disk is still the same: that is not an empty copy."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    for number in list(world.replicas):
        world.kill_replica(number, known=False)
    gone = world.folder(1) / range_folder(lane, 1)
    shutil.rmtree(gone.parent if of_lane else gone)
    world.directory.begin_generation()
    world._begin(2)
    world.settle()
    whole, emptied = world.replicas[0].member.ref, world.replicas[1].member.ref
    assert (world.line(whole, lane), world.line(emptied, lane)) == (10, None)

    world.reign.say(lane, 1, closing=True, target=10)
    world.poll(5, step_us=100_000)
    world.settle()
    assert world.line(emptied, lane) == 10
    assert world.files(1, lane) == writer.written


def test_a_missing_copy_is_forgotten_with_its_range(tmp_path: Path) -> None:
    """Its folder is gone, and it is no longer needed: no name remains that could be confused with a later range."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=1)
    written(world, lane)
    (owner,) = (ref.replica for ref in world.range_(lane).replicas)
    assert list(world.folder(owner).glob("*.begun"))
    world.kill_replica(owner, known=False)
    shutil.rmtree(world.folder(owner) / range_folder(lane, 1))
    world.directory.topics.delete("t")
    world.start_replica(owner)
    world.poll(20)
    world.settle()

    assert not list(world.folder(owner).glob("*.begun"))


def test_a_new_disk_is_filled_once_the_end_of_a_recovering_lane_is_known(tmp_path: Path) -> None:
    """Not before: its line is no reply. Then it is one of the copies that the seal waits for, and stays."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    for number in list(world.replicas):
        world.kill_replica(number, known=False)
    shutil.rmtree(world.folder(1))
    world.directory.begin_generation()
    world._begin(2)
    world.settle()
    old, new = world.replicas[0].member.ref, world.replicas[1].member.ref
    world.reign.say(lane, 1, closing=True)
    world.poll(5, step_us=100_000)
    assert world.line(new, lane) is None

    world.reign.say(lane, 1, closing=True, target=10)
    world.poll(5, step_us=100_000)
    world.settle()
    assert world.line(new, lane) == 10
    assert world.files(1, lane) == writer.written
    assert world.directory.ranges.seal_recovered(lane, 1, 10, 20, [old, new], world.reign.number)
    world.settle()
    assert new in world.range_(lane, 1).replicas
    assert world.files(1, lane) == writer.written


def test_the_injected_bug_of_a_forgetful_replica_is_detected(tmp_path: Path) -> None:
    """With the rule off, the wiped replica claims to have an empty copy."""
    with injected("forgotten-range-counts"), pytest.raises(AssertionError):
        test_a_replica_without_the_disk_does_not_reply(tmp_path)


def test_replicas_reach_the_target_of_a_recovering_lane(tmp_path: Path) -> None:
    """The shorter copy gets the tail from the longer one, synced, before its line moves."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane, 4)
    world.kill_replica(1, known=False)
    writer.batches(*(bytes([n + 1]) * 500 for n in range(20)))
    world.poll()
    world.lose_fabric(2)
    world.settle()
    short, long = world.replicas[1].member.ref, world.replicas[0].member.ref
    assert (world.line(short, lane), world.line(long, lane)) == (4, 24)

    world.reign.say(lane, 1, closing=True, target=24)
    world.settle()
    assert (world.line(short, lane), world.line(long, lane)) == (24, 24)
    opened = world.directory.ranges.seal_recovered(lane, 1, 24, 48, [short, long], world.reign.number)
    assert opened is not None
    assert opened.start >= CEILING_AHEAD
    world.settle()
    assert world.files(1, lane, 1) == writer.written
    assert world.replicas[1].count_ranges()["complete"] == 1


def damage_middle(world: World, replica: int, lane: int, records: int = 1) -> None:
    """Flip a bit in the payload of the third record, and in some after it."""
    path = next((world.folder(replica) / range_folder(lane, 1)).glob("*.log"))
    data = bytearray(path.read_bytes())
    for number in range(2, 2 + records):
        data[128 + number * (64 + 320) + 100] ^= 1
    path.write_bytes(data)


def test_a_damaged_copy_does_not_reply_until_it_is_repaired(tmp_path: Path) -> None:
    """Damage in the middle is never cut: it is repaired from a peer, and then the copy counts."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    for number in list(world.replicas):
        world.kill_replica(number, known=False)
    damage_middle(world, 1, lane)
    away = world.folder(0).rename(tmp_path / "away")
    world.directory.begin_generation()
    world._begin(0)
    damaged = world.start_replica(1).member.ref
    world.poll(10)
    assert world.line(damaged, lane) is None

    away.rename(world.folder(0))
    world.start_replica(0)
    world.poll(300, step_us=50_000)
    world.settle()
    assert world.line(damaged, lane) == 10
    assert world.files(1, lane) == writer.written


def test_a_damaged_copy_that_is_the_only_one_waits_for_the_operator(tmp_path: Path) -> None:
    """Then the undamaged part counts, and no more."""
    world = World(tmp_path)
    lane = world.topic()
    writer = written(world, lane)
    world.kill_replica(0, known=False)
    damage_middle(world, 0, lane)
    world.directory.begin_generation()
    world._begin(1)
    world.poll(20)
    ref = world.replicas[0].member.ref
    assert world.line(ref, lane) is None

    world.directory.ranges.accept_loss(lane)
    world.poll(20)
    assert world.line(ref, lane) == 2
    assert world.files(0, lane) == writer.written[:2]


def test_a_lost_segment_that_extended_beyond_the_end_is_copied_up_to_the_end(tmp_path: Path) -> None:
    """The range was sealed in the middle of it, so no peer has all records that the copy had there."""
    world = World(tmp_path, replicas=2, segment_bytes=2_048)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane, 14)
    world.kill_replica(1)
    segments = sorted((world.folder(1) / range_folder(lane, 1)).glob("*.log"))
    assert len(segments) >= 3
    segments[1].write_bytes(bytes(500))
    assert world.directory.ranges.seal_and_open(lane, 1, 6, 12, refs(world, 0), world.reign.number)
    world.settle()
    world.start_replica(1)
    world.poll(60, step_us=200_000)
    world.settle()

    assert world.files(1, lane) == writer.written[:6]
    assert world.replicas[1].count_ranges()["complete"] == 1


def test_a_copy_that_lacks_its_start_and_is_all_above_the_end_starts_again(tmp_path: Path) -> None:
    """The range was sealed inside its first segment, which is lost: the remaining files are useless."""
    world = World(tmp_path, replicas=2, segment_bytes=2_048)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane, 14)
    world.kill_replica(1)
    sorted((world.folder(1) / range_folder(lane, 1)).glob("*.log"))[0].unlink()
    assert world.directory.ranges.seal_and_open(lane, 1, 2, 4, refs(world, 0), world.reign.number)
    world.settle()
    world.start_replica(1)
    world.poll(60, step_us=200_000)
    world.settle()

    assert world.files(1, lane) == writer.written[:2]
    assert world.replicas[1].count_ranges()["complete"] == 1


@pytest.mark.parametrize("target", [1, 2, 3, 4, 10])
def test_damage_above_the_end_of_a_recovering_lane_is_cut(tmp_path: Path, target: int) -> None:
    """No peer has all of it, and records above the end never counted. The copy counts once it reaches the end again.

    Records 2 and 3 are damaged. Where the peer has both of them, they are repaired in place.
    """
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane, target)
    world.kill_replica(0, known=False)
    if target < 10:
        writer.batches(*(bytes([n + 1]) * 300 for n in range(target, 10)))
    world.poll()
    world.kill_replica(1, known=False)
    damage_middle(world, 1, lane, records=2)
    world.directory.begin_generation()
    world._begin(2)
    world.poll(10)
    whole, damaged = world.replicas[0].member.ref, world.replicas[1].member.ref
    assert (world.line(whole, lane), world.line(damaged, lane)) == (target, None if target < 4 else 10)

    world.kill_replica(0)
    away = world.folder(0).rename(tmp_path / "away")
    world.reign.say(lane, 1, closing=True, target=target)
    world.poll(40, step_us=100_000)
    if target == 3:  # it had record 2, and that may have counted
        assert world.line(damaged, lane) is None

    away.rename(world.folder(0))
    world.poll(40, step_us=100_000)
    world.settle()
    assert world.line(damaged, lane) == (10 if target >= 4 else max(2, target))
    assert world.files(1, lane) == writer.written[: world.line(damaged, lane)]


def test_a_copy_whose_last_file_is_gone_when_its_range_is_sealed_is_completed(tmp_path: Path) -> None:
    """It can't be cut at its end, as that is missing: it is opened again, and peers have the records."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=1)
    writer = written(world, lane)
    for path in (world.folder(1) / range_folder(lane, 1)).glob("*.log"):
        path.unlink()
    assert world.directory.ranges.seal_and_open(lane, 1, 6, 12, refs(world, 0), world.reign.number)
    world.poll(10, step_us=1_000_000)
    world.settle()

    assert world.files(1, lane, 1) == writer.written[:6]
    assert world.replicas[1].count_ranges() == {"open": 0, "complete": 1, "incomplete": 0, "not opened": 0}


@pytest.mark.parametrize("trimmed", [True, False])
def test_a_copy_that_ends_before_its_peers_start(tmp_path: Path, trimmed: bool) -> None:
    """If the part between was trimmed, the copy starts where they do. If files of the peer are missing, it does not."""
    world = World(tmp_path, replicas=2, segment_bytes=64 * 1024)
    lane = world.topic(order=0, replicas=2, durable_on=1)
    made = world.directory.lanes.make(world.directory.topics.get("t"), world.broker.member)
    assert isinstance(made, TopicLane)
    lane, writer = made.lane, world.broker.lane(made)
    world.settle()
    writer.batches(*[b"a" * 4_000] * 5)
    world.poll(2)
    world.kill_replica(1)
    for number in range(40):
        writer.batches(bytes([number + 1]) * 4_000)
        world.poll()
    segments = world.replicas[0].ranges.copies[lane, 1].log.segments
    assert world.directory.ranges.seal_and_open(lane, 1, 45, 90, refs(world, 0), world.reign.number)
    world.settle()
    begin = segments[1].base_index
    assert begin > 5
    if trimmed:
        world.directory.topics.trim("t", lane, begin + 1)
        world.poll(10, step_us=500_000)
    else:
        files = sorted((world.folder(0) / range_folder(lane, 1)).iterdir())
        for path in [*files[:3], *(path for path in files if path.name == "start")]:
            path.unlink()
    world.start_replica(1)
    world.poll(20, step_us=100_000)

    assert world.files(1, lane, 1) == (writer.written[begin:45] if trimmed else writer.written[:5])
    assert bool(world.notes[1].count("can't complete a copy")) is not trimmed


def test_scrub_finds_rot_in_old_files_and_peers_repair_it(tmp_path: Path) -> None:
    """A sealed range that was complete is complete again."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, 0, 1), world.reign.number)
    world.settle()
    damage_middle(world, 1, lane)
    world.poll(60, step_us=200_000)
    world.settle()

    assert world.replicas[1].counters.damage_found == 1
    assert world.files(1, lane) == writer.written
    assert Trouble.DAMAGED not in world.replicas[1].health.trouble


def test_a_peer_that_could_not_help_is_checked_again(tmp_path: Path) -> None:
    """Its file was too short, and another one has its name now."""
    world = World(tmp_path, replicas=2)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane)
    assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, 0, 1), world.reign.number)
    world.settle()
    world.kill_replica(0, known=False)
    [peer] = (world.folder(0) / range_folder(lane, 1)).glob("*.log")
    whole = peer.rename(tmp_path / "whole")
    peer.write_bytes(whole.read_bytes()[:512])
    damage_middle(world, 1, lane)
    world.poll(60, step_us=200_000)
    assert world.notes[1].count("can't complete a copy")
    assert Trouble.DAMAGED in world.replicas[1].health.trouble

    whole.replace(peer)
    world.poll(60, step_us=200_000)
    world.settle()
    assert world.files(1, lane) == writer.written
    assert Trouble.DAMAGED not in world.replicas[1].health.trouble


@pytest.mark.parametrize("sealed", [False, True])
def test_a_folder_that_disappears_while_its_range_is_written_is_restored(tmp_path: Path, sealed: bool) -> None:
    """Open files can still be written, but no others can be created: the copy starts again, and counts again.

    Not before it has everything that it reported: peers have it.
    """
    world = World(tmp_path, replicas=2, segment_bytes=2_048, scrub_bytes_per_s=0)
    lane = world.topic(replicas=2, durable_on=2)
    writer = written(world, lane, 10)
    shutil.rmtree(world.folder(1) / range_folder(lane, 1))
    writer.batches(*(bytes([n + 1]) * 300 for n in range(20)))
    if sealed:
        world.poll(1)
        assert world.directory.ranges.seal_and_open(lane, 1, 10, 20, refs(world, 0, 1), world.reign.number)
    world.poll(100, step_us=100_000)
    world.settle()

    end = 10 if sealed else 30
    assert world.files(1, lane) == world.files(0, lane) == writer.written[:end]
    assert sealed or world.durable(lane) == 30
    assert world.replicas[1].count_ranges()["complete"] == sealed


def test_another_incarnation_deposes_this_one(tmp_path: Path) -> None:
    """Declared dead, or replaced: it writes nothing more."""
    world = World(tmp_path)
    lane = world.topic()
    writer = written(world, lane)
    world.directory.replicas.mark_dead(0, world.replicas[0].member.incarnation)
    world.poll(3, step_us=100_000)
    assert world.replicas[0].deposed

    writer.batches(b"later")
    world.poll(3)
    assert world.durable(lane) == 10


def test_a_later_leader_changes_nothing_on_disk(tmp_path: Path) -> None:
    """The open range is adopted by the successor: the copy keeps growing from the new ring."""
    world = World(tmp_path)
    lane = world.topic()
    writer = written(world, lane)
    successor = Reign(world)
    theirs = successor.lane(lane)
    theirs.inherit(writer, 10)
    successor.start()
    theirs.batches(b"next")
    world.settle()

    assert world.files(0, lane) == theirs.written
    assert world.durable(lane) == 11


def test_an_election_does_not_make_a_replica_read_the_store_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica follows the next epoch without reading topics and ranges, which did not change."""
    world = World(tmp_path)
    lane = world.topic()
    world.settle()
    looked = list[str]()
    monkeypatch.setattr(Topics, "all", lambda _self: looked.append("topics") or [])
    world.reign = Reign(world)
    world.reign.start()
    world.reign.lane(lane)
    world.poll(50)

    assert (world.replicas[0].leader.number, looked) == (2, [])
