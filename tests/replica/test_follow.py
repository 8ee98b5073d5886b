"""Following: ordered records reach the disk, and the durable line moves only afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embarcadero.fabric.layout import Standing
from embarcadero.replica.copies import BrokerRegions
from embarcadero.storage.disk import RealFile
from embarcadero.storage.layout import MARK_FILE
from embarcadero.storage.segment import read_position
from embarcadero.types import TopicLane
from embarcadero.wire.codec import payload_crc
from tests.replica.harness import SIZES, Reign, World


def payload(number: int, size: int = 100) -> bytes:
    return bytes([number % 251 + 1]) * size


def test_ordered_entries_are_on_disk_with_their_payloads(tmp_path: Path) -> None:
    """Entries are kept exactly as ordered, session entries too, and the line counts them."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"one", b"", b"three" * 50)
    world.poll()

    assert world.files(0, lane) == writer.written
    assert world.durable(lane) == 3
    assert world.line(world.range_(lane).replicas[0], lane) == 3


def test_a_line_is_there_before_anything_is_ordered(tmp_path: Path) -> None:
    """A replica that has started a range publishes a line: with its start."""
    world = World(tmp_path)
    lane = world.topic()
    world.poll(2)

    assert world.line(world.range_(lane).replicas[0], lane) == 0
    assert "sequencer" in world.bell.rung


def test_the_line_moves_only_after_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While fdatasync has not returned, nothing counts."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    seen: list[int] = []
    sync = RealFile.sync

    def slow(file: RealFile) -> None:
        seen.append(world.durable(lane))
        sync(file)

    monkeypatch.setattr(RealFile, "sync", slow)
    writer.batches(b"x")
    world.poll()

    assert seen == [0]
    assert world.durable(lane) == 1


def test_one_sync_for_all_pending_batches(tmp_path: Path) -> None:
    """A hundred batches that are pending together are one commit."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(*(payload(n) for n in range(100)))
    before = world.replicas[0].counters.commits
    world.poll()

    assert world.replicas[0].counters.commits == before + 1
    assert world.durable(lane) == 100


def test_brokers_are_rung_if_they_wait(tmp_path: Path) -> None:
    """And only then."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"x")
    world.poll()
    assert world.broker.member.region_prefix not in world.bell.rung

    world.broker.waiting.restart(1)
    writer.batches(b"y")
    world.poll()
    assert world.broker.member.region_prefix in world.bell.rung


def test_nothing_is_appended_for_a_deposed_sequencer(tmp_path: Path) -> None:
    """A later epoch is open: later entries of the deposed epoch are ignored, those of the new epoch are copied."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"one", b"two")
    world.poll()
    successor = Reign(world)
    writer.batches(b"never ordered")
    world.poll(3)
    assert world.durable(lane) == 2

    theirs = successor.lane(lane)
    theirs.inherit(writer, 2)
    successor.start()
    theirs.batches(b"three")
    world.poll(3)
    assert [held for _, held in world.files(0, lane)] == [b"one", b"two", b"three"]


def broker_lane(world: World, order: int = 0) -> TopicLane:
    world.topic(order=order)
    lane = world.directory.lanes.make(world.directory.topics.get("t"), world.broker.member)
    assert lane is not None
    return lane


def test_lanes_of_brokers_are_followed(tmp_path: Path) -> None:
    """Orders 0 and 1: the sequencer's order does not matter, only that it still counts the broker as open."""
    world = World(tmp_path)
    lane = broker_lane(world)
    writer = world.broker.lane(lane)
    world.settle()
    writer.batches(b"a", b"b")
    world.poll()
    assert world.files(0, lane.lane) == writer.written
    assert world.durable(lane.lane) == 2

    for standing in (Standing.CLOSING, Standing.UNLISTED):  # an earlier epoch may have closed the latter
        world.reign.count(world.broker.member.handle, standing)
        writer.batches(b"after it was closed")
        world.poll(3)
        assert world.durable(lane.lane) == 2


def test_a_closed_lane_is_followed_to_its_end(tmp_path: Path) -> None:
    """The store has its end: everything below is copied, and nothing above."""
    world = World(tmp_path)
    lane = broker_lane(world, order=1)
    writer = world.broker.lane(lane)
    writer.batches(b"a", b"b", b"above the end")
    world.reign.close_broker(world.broker.member.handle)
    ended = TopicLane(
        lane=lane.lane, topic=lane.topic, broker=lane.broker, incarnation=lane.incarnation, handle=lane.handle,
        end=2, end_seq=4,
    )  # fmt: skip
    assert world.directory.lanes.close([ended], world.reign.number)
    world.settle()

    assert [held for _, held in world.files(0, lane.lane)] == [b"a", b"b"]


def test_evicted_records_come_from_another_replica(tmp_path: Path) -> None:
    """A replica that was paused while the others were fast enough reads their files, and then follows again."""
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=3, durable_on=2)
    writer = world.reign.lane(lane)
    world.settle()
    sleeper = world.replicas.pop(2)
    for number in range(40):
        writer.batches(*(payload(number, 400) for _ in range(8)))
        world.poll()
    assert world.durable(lane) == 320  # more than a lap of the ring, and of the log
    world.replicas[2] = sleeper
    world.settle()

    assert world.files(2, lane) == writer.written
    assert sleeper.counters.repaired_entries > 0
    writer.batches(b"last")
    world.poll()
    assert world.line(sleeper.member.ref, lane) == 321


@pytest.mark.parametrize("gone", ["frontiers", "log"])
def test_a_log_that_is_being_removed_has_no_payloads(tmp_path: Path, gone: str) -> None:
    """During a cleanup some regions still exist: a replica that needs the log then looks for another copy."""
    world = World(tmp_path)
    member, brokers = world.broker.member, BrokerRegions(world.memory.host("reader"), lambda: None)
    location = world.broker.store(b"payload")
    world.memory.host("sequencer").remove(f"{member.region_prefix}/{gone}")
    brokers.update([member], [])
    assert brokers.payload(member.handle, location, 7, payload_crc(b"payload")) is None


def test_a_payload_that_is_overwritten_is_never_stored(tmp_path: Path) -> None:
    """Without peers, a replica that was too slow waits; it does not store other bytes, and does not skip."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    sleeper = world.replicas.pop(0)
    for number in range(30):
        writer.batches(*(payload(number, 400) for _ in range(8)))
    world.replicas[0] = sleeper
    world.poll(20)

    assert world.durable(lane) == 0
    assert world.files(0, lane) == []
    assert world.notes[0].count("can't complete a copy") > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 30), st.lists(st.lists(st.integers(0, 900), min_size=1, max_size=12), max_size=15))
def test_files_are_the_order_whatever_memory_does(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rounds: list[list[int]]
) -> None:
    """Lines evicted and fetched at any time, entries published late: the files are a prefix of the order."""
    world = World(tmp_path_factory.mktemp("world"), seed=seed)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    for sizes in rounds:
        writer.batches(*(payload(n, size) for n, size in enumerate(sizes)), publish=world.rng.random() < 0.7)
        world.poll(churn=8)
        assert world.durable(lane) <= writer.ring.frontier.value
        held = world.files(0, lane)
        assert held == writer.written[: len(held)]
        assert len(held) >= world.durable(lane)
    writer.ring.publish()
    world.settle()

    assert world.files(0, lane) == writer.written
    assert world.durable(lane) == len(writer.written) == int(np.uint64(writer.ring.next))
    assert SIZES.order_slots >= len(writer.written)


# --- wake-ups -------------------------------------------------------------------------------------------------------
def test_brokers_are_woken_when_enough_replicas_have_it(tmp_path: Path) -> None:
    """Not by the first of two required replicas.

    Replicas that were not woken for a lone batch are woken by the first.
    """
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=3, durable_on=2)
    writer = world.reign.lane(lane)
    world.settle()
    world.broker.waiting.restart(1)
    first, second, third = (world.replicas[ref.replica] for ref in world.range_(lane).replicas)
    broker, last = world.broker.member.region_prefix, third.member.ref.region_prefix

    writer.batches(b"alone")
    world.bell.rung.clear()
    first.poll()
    assert world.bell.rung == [last]
    second.poll()
    assert world.bell.rung == [last, broker, last]
    world.bell.rung.clear()
    third.poll()
    assert set(world.bell.rung) <= {broker}


def test_replicas_wake_no_others_for_many_batches_at_once(tmp_path: Path) -> None:
    """The process that ordered them has woken all."""
    world = World(tmp_path, replicas=3)
    lane = world.topic(replicas=3, durable_on=2)
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"one", b"two")
    world.bell.rung.clear()
    world.replicas[world.range_(lane).replicas[0].replica].poll()

    assert not world.bell.rung


def test_the_watermark_is_noted_after_the_bells(tmp_path: Path) -> None:
    """It records the synced position, once no process waits for this replica."""
    world = World(tmp_path)
    lane = world.topic()
    writer = world.reign.lane(lane)
    world.settle()
    writer.batches(b"x")
    world.poll()
    copy = world.replicas[0].ranges.copies[lane, 1]
    mark = read_position(copy.log.disk, copy.log.folder, MARK_FILE, lane, 1)

    assert mark is not None
    assert mark.index == 1
