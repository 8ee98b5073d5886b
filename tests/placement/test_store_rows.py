"""Deleted topics leave no rows in the store, yet none of their lanes and ranges is reused too early."""

from __future__ import annotations

import msgspec

from embarcadero.placement.directory import Directory
from embarcadero.placement.records import ClusterRecord, MirroredEnd, ReaderNote, Retired, retired_key
from embarcadero.placement.store import Check, MemoryStore, Put
from embarcadero.types import Member
from embarcadero.wire.messages import OpenTier


def begun() -> tuple[Directory, Member]:
    directory = Directory(MemoryStore())
    directory.begin_generation()
    directory.replicas.register(0, disk="d0", folder="/r0", host="h", pid=1)
    return directory, directory.members.register(0, "h", 1, 1)


def rows(directory: Directory) -> set[str]:
    return {item.key for item in directory._decider.store.list("")}


def test_the_store_has_the_same_rows_after_any_number_of_topics() -> None:
    """Topics of all orders, with lanes, trims, schemas, tables and readers."""
    directory, member = begun()
    before = rows(directory)
    for number in range(30):
        topic = directory.topics.create(f"t{number}", order=(2, 5, 0, 1)[number % 4], replicas=1)
        lane = directory.lanes.make(topic, member) if topic.order <= 1 else None
        directory.topics.trim(topic.name, topic.lane if lane is None else lane.lane, 5)
        directory.readers.note({(topic.name, "r"): ReaderNote(reader="r", places={}, at_us=1)}, 1)
        tier = directory.tiers.open(OpenTier(topic=topic.name, holder="a", id="x", warehouse="w", table="n.t"))
        directory.tiers.close(topic.name, tier.epoch)
        directory.topics.delete(topic.name)
    assert rows(directory) == before


def test_a_lane_that_a_mirror_saved_leaves_no_row() -> None:
    """Simulator seeds 150037 and 150139."""
    directory, _ = begun()
    before = rows(directory)
    topic = directory.topics.create("t", replicas=1)
    saved = MirroredEnd(lane=topic.lane, index=3, seq=3)
    (range_,), refs = directory.ranges.all(topic.lane), [member.ref for member in directory.replicas.all()]
    directory.ranges.seal_recovered(topic.lane, range_.number, 0, 0, refs, directory.elections.started_epoch(), saved)
    assert directory.mirrored_ends() == [saved]
    directory.topics.delete("t")
    assert rows(directory) == before


def test_ranges_of_a_reused_lane_continue_the_numbers() -> None:
    """A disk may still have files of the ranges of the topic that had the lane before, and any lane may be that one."""
    directory, _ = begun()
    topic = directory.topics.create("t", replicas=1)
    (first,) = directory.ranges.all(topic.lane)
    directory.topics.delete("t")
    numbers = set()
    for _ in range(5):
        directory.begin_generation()
        directory.replicas.register(0, disk="d0", folder="/r0", host="h", pid=1)
        again = directory.topics.create("t", replicas=1)
        (range_,) = directory.ranges.all(again.lane)
        numbers.add(range_.number)
        directory.topics.delete("t")
    assert first.number == 1
    assert numbers == {2, 3, 4, 5, 6}


def test_a_lane_that_is_not_due_yet_is_remembered_until_the_next_generation() -> None:
    """A topic of an earlier generation keeps its lane, which is ahead of all lanes handed out now."""
    directory, _ = begun()
    kept = [directory.topics.create(f"kept-{number}", replicas=1) for number in range(3)]
    cluster = directory._decider.one("cluster", ClusterRecord)
    assert cluster is not None
    item = directory._decider.store.get("cluster")
    assert item is not None
    directory._decider.store.transact(  # as if all other lanes had been used
        [Check("cluster", item.revision)],
        [Put("cluster", msgspec.json.encode(msgspec.structs.replace(cluster, next_lane=0)))],
    )
    directory.begin_generation()
    directory.replicas.register(0, disk="d0", folder="/r0", host="h", pid=1)
    directory.topics.delete("kept-1")
    assert directory._decider.one(retired_key(kept[1].lane), Retired) is not None
    assert directory.topics.create("new", replicas=1).lane == 3
    directory.begin_generation()
    assert not directory._decider.store.list("retired/")
