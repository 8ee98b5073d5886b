"""Ranges and ceilings: one transaction each, by the leader; positions and numbers are handed out once."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from embarcadero.errors import Backpressure, BadValue
from embarcadero.limits import BROKER_LANES_FIRST, CEILING_AHEAD, CEILING_AHEAD_SEQ, LANES_MAX
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.types import ReplicaRef, lost_spans
from embarcadero.wire.messages import AlterTopic
from tests.placement.worlds import add_broker, add_replica, directory_with, numbers


@pytest.fixture
def directory() -> Directory:
    """Five live replicas, and a topic `t` (lane 0) on three of them; epoch 1 leads."""
    made = directory_with(5)
    made.topics.create("t", order=5, replicas=3)
    made.elections.next_epoch()
    return made


def refs(directory: Directory, *chosen: int) -> list[ReplicaRef]:
    newest = {member.replica: member.ref for member in directory.replicas.all()}
    return [newest[replica] for replica in chosen]


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_topic_with_replicas_has_its_first_range_immediately(directory: Directory) -> None:
    """Open, from 0, on R replicas, durable on the majority, with positions reserved ahead."""
    (first,) = directory.ranges.all(0)
    assert (first.number, first.start, first.start_seq, first.end, first.durable_on) == (1, 0, 0, None, 2)
    assert numbers(first) == [0, 1, 2]
    assert directory.ranges.open_range(0) == directory.ranges.get(0, 1) == first
    assert directory.ranges.ceiling(0) == (CEILING_AHEAD, CEILING_AHEAD_SEQ)


def test_a_topic_in_memory_has_no_ranges(directory: Directory) -> None:
    """R=0: nothing to seal, nothing reserved."""
    lane = directory.topics.create("m", replicas=0).lane
    assert (directory.ranges.all(lane), directory.ranges.open_range(lane), directory.ranges.ceiling(lane)) == (
        [],
        None,
        (0, 0),
    )
    assert not directory.ranges.raise_ceiling(lane, 5, 5, 1)


@pytest.mark.parametrize(("live", "expected"), [(0, (0, 0)), (1, (1, 1)), (2, (2, 2)), (3, (3, 2)), (5, (3, 2))])
def test_the_default_copies_follow_the_live_replicas(live: int, expected: tuple[int, int]) -> None:
    """As many as there are live replicas, at most three; durable on the majority."""
    topic = directory_with(live).topics.create("t")
    assert (topic.replicas, topic.durable_on) == expected


def test_too_few_live_replicas_are_counted_in_the_refusal(directory: Directory) -> None:
    """Dead and draining ones do not count, and nothing is created."""
    directory.replicas.mark_dead(0, 1)
    directory.replicas.drain(1)
    with pytest.raises(BadValue, match="needs 4 replicas, and 3 are live"):
        directory.topics.create("u", replicas=4)
    assert [topic.name for topic in directory.topics.all()] == ["t"]


def test_a_lane_of_a_broker_has_ranges_of_its_own() -> None:
    """Range 1 comes with the lane; on fewer replicas than requested if necessary, never on fewer than durable_on."""
    directory = directory_with(3)
    topic, member = directory.topics.create("t", order=1, replicas=3), add_broker(directory)
    assert directory.ranges.all() == []
    lane = directory.lanes.make(topic, member)
    assert lane is not None
    assert numbers(directory.ranges.open_range(lane.lane)) == [0, 1, 2]
    directory.replicas.mark_dead(2, 1)
    second = directory.lanes.make(topic, member)
    assert second is not None
    assert numbers(directory.ranges.open_range(second.lane)) == [0, 1]
    directory.replicas.mark_dead(1, 1)
    with pytest.raises(Backpressure, match="needs 2 live replicas, and there are 1"):
        directory.lanes.make(topic, member)
    assert len(directory.lanes.all()) == 2


# --- sealing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [True, False])
def test_no_range_opens_on_an_incarnation_that_is_gone(directory: Directory, again: bool) -> None:
    """It was chosen before it was replaced: the caller chooses again, and its lines are no longer counted."""
    chosen = refs(directory, 0, 1, 4)
    if again:
        add_replica(directory, 4)
    else:
        directory.replicas.mark_dead(4, 1)
    assert directory.ranges.seal_and_open(0, 1, 5, 5, chosen, 1) is None
    assert directory.ranges.open_range(0) == directory.ranges.get(0, 1)


def test_seal_and_open_is_one_step(directory: Directory) -> None:
    """The old range ends where the new one starts; positions do not move, and more are reserved."""
    opened = directory.ranges.seal_and_open(0, 1, 100, 900, refs(directory, 0, 1, 3), 1)
    first, second = directory.ranges.all(0)
    assert opened == second == directory.ranges.open_range(0)
    assert (first.end, first.end_seq, second.number, second.start, second.start_seq) == (100, 900, 2, 100, 900)
    assert numbers(second) == [0, 1, 3]
    assert directory.ranges.ceiling(0) == (100 + CEILING_AHEAD, 900 + CEILING_AHEAD_SEQ)
    assert lost_spans(directory.ranges.all(0)) == []


def test_after_a_loss_of_memory_the_next_range_starts_at_the_ceiling(directory: Directory) -> None:
    """So no position that may have been handed out is reused; the positions between are lost."""
    assert directory.ranges.raise_ceiling(0, 9_000_000, 10**12, 1)
    opened = directory.ranges.seal_recovered(0, 1, 100, 900, refs(directory, 0, 1, 2), 1)
    assert opened is not None
    assert (opened.start, opened.start_seq) == (9_000_000, 10**12)
    assert lost_spans(directory.ranges.all(0)) == [(100, 9_000_000)]
    assert directory.ranges.ceiling(0) == (9_000_000 + CEILING_AHEAD, 10**12 + CEILING_AHEAD_SEQ)


def test_after_a_clean_stop_the_next_range_starts_where_the_last_one_ends(directory: Directory) -> None:
    """Nothing is between them; an open range is not opened again."""
    assert directory.ranges.reopen(0, refs(directory, 0, 1, 2), 1) is None
    assert directory.ranges.seal_clean(0, 1, 100, 900, 1)
    assert directory.ranges.open_range(0) is None
    directory.begin_generation()
    add_replica(directory, 0)
    add_replica(directory, 1)
    epoch = directory.elections.next_epoch()
    opened = directory.ranges.reopen(0, refs(directory, 0, 1), epoch)
    assert opened is not None
    assert (opened.number, opened.start, opened.start_seq) == (2, 100, 900)
    assert [ref.incarnation for ref in opened.replicas] == [2, 2]
    assert directory.ranges.reopen(0, refs(directory, 0, 1), epoch) is None


def test_a_recovered_lane_of_a_broker_is_closed_and_not_continued() -> None:
    """Its range is sealed, its end recorded; an end recorded earlier stays, and losses below it are reported."""
    directory = directory_with(1)
    topic, member = directory.topics.create("t", order=0, replicas=1), add_broker(directory)
    made = [directory.lanes.make(topic, member) for _ in range(2)]
    lanes = [lane.lane for lane in made if lane is not None]
    epoch = directory.elections.next_epoch()
    sealed = directory.ranges.seal_recovered(lanes[0], 1, 7, 70, [], epoch)
    assert sealed is not None
    assert (sealed.end, sealed.end_seq) == (7, 70)
    assert directory.ranges.open_range(lanes[0]) is None
    assert directory.ranges.seal_recovered(lanes[0], 1, 9, 90, [], epoch) is None
    assert [(lane.lane, lane.end, lane.end_seq) for lane in directory.lanes.all()] == [
        (BROKER_LANES_FIRST, 7, 70), (BROKER_LANES_FIRST + 1, None, None)
    ]  # fmt: skip
    closed = msgspec.structs.replace(directory.lanes.all()[1], end=9, end_seq=90)
    assert directory.lanes.close([closed], epoch)
    assert directory.ranges.seal_recovered(lanes[1], 1, 8, 80, [], epoch) is not None
    assert directory.lanes.all()[1] == msgspec.structs.replace(closed, kept=8)


Sealer = Callable[[Directory, int], object]
SEALERS: list[Sealer] = [
    lambda directory, epoch: directory.ranges.seal_and_open(0, 1, 10, 10, refs(directory, 0, 1), epoch),
    lambda directory, epoch: directory.ranges.seal_recovered(0, 1, 10, 10, refs(directory, 0, 1), epoch),
    lambda directory, epoch: directory.ranges.seal_clean(0, 1, 10, 10, epoch),
    lambda directory, epoch: directory.ranges.raise_ceiling(0, 1 << 50, 1 << 60, epoch),
    lambda directory, epoch: directory.ranges.reopen(1, refs(directory, 0, 1), epoch),
]


@pytest.mark.parametrize("seal", SEALERS)
def test_a_deposed_sequencer_has_no_effect(directory: Directory, seal: Sealer) -> None:
    """Once a later epoch is handed out, started or not, or a later generation has begun."""
    assert directory.topics.create("u", replicas=3).lane == 1
    assert directory.ranges.seal_clean(1, 1, 5, 5, 1)
    zombie = Directory(directory._decider.store)
    directory.elections.next_epoch()
    before = directory.revision()
    assert not seal(directory, 1)
    assert directory.revision() == before
    directory.begin_generation()
    assert directory.elections.next_epoch() == 1
    before = directory.revision()
    assert not seal(zombie, 1)
    assert directory.revision() == before
    add_replica(directory, 0)
    add_replica(directory, 1)
    assert seal(directory, 1)


def test_only_the_open_range_is_sealed_and_never_before_its_start(directory: Directory) -> None:
    """A sealed range, a range that never existed, and an end below the start: nothing changes."""
    chosen = refs(directory, 0, 1, 2)
    assert directory.ranges.seal_and_open(0, 1, 100, 100, chosen, 1) is not None
    before = directory.ranges.all()
    for number in (1, 3):
        assert directory.ranges.seal_and_open(0, number, 200, 200, chosen, 1) is None
        assert not directory.ranges.seal_clean(0, number, 200, 200, 1)
    for end, end_seq in ((99, 100), (100, 99)):
        with pytest.raises(BadValue, match="can't end"):
            directory.ranges.seal_and_open(0, 2, end, end_seq, chosen, 1)
    assert directory.ranges.all() == before


def test_a_range_is_not_sealed_when_the_next_could_not_be_durable(directory: Directory) -> None:
    """With fewer replicas than durable_on, or the same one counted twice, the open range stays unchanged."""
    one = refs(directory, 0)
    for few in ([], one, one * 2):
        assert directory.ranges.seal_and_open(0, 1, 10, 10, few, 1) is None
        assert directory.ranges.seal_recovered(0, 1, 10, 10, few, 1) is None
    assert [range_.open for range_ in directory.ranges.all(0)] == [True]


def test_altered_copies_count_from_the_next_range_on(directory: Directory) -> None:
    """The open range keeps its promises."""
    directory.topics.alter(AlterTopic(name="t", replicas=5, durable_on=4))
    assert [range_.durable_on for range_ in directory.ranges.all(0)] == [2]
    opened = directory.ranges.seal_and_open(0, 1, 10, 10, refs(directory, 0, 1, 2, 3, 4), 1)
    assert opened is not None
    assert opened.durable_on == 4
    with pytest.raises(BadValue, match="durable_on 4 of 2"):
        directory.topics.alter(AlterTopic(name="t", replicas=2))
    with pytest.raises(BadValue, match="are on disks"):
        directory.topics.alter(AlterTopic(name="t", replicas=0, durable_on=0))
    with pytest.raises(BadValue, match="6 replicas, and 5 are live"):
        directory.topics.alter(AlterTopic(name="t", replicas=6))


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"durable_on": 3}, "durable on 3 replicas, and 2 are live"),
        ({"replicas": 4}, "4 replicas, and 2 are live"),
        ({"replicas": 4, "durable_on": 1}, "4 replicas, and 2 are live"),
        ({"durable_on": 1}, ""),
        ({"replicas": 2}, ""),
        ({"replicas": 3, "durable_on": 2}, ""),
    ],
)
@pytest.mark.parametrize("drained", [False, True])
def test_unavailable_copies_are_refused(
    directory: Directory, change: dict[str, int], refused: str, drained: bool
) -> None:
    """The next range would never open, and ack=2 would keep meaning fewer copies than the topic declares.

    A topic that lacks a copy may still get fewer of them, or be durable on fewer: that takes effect with the live
    replicas.
    """
    if drained:
        directory.replicas.drain(2)
    for replica in (3, 4) if drained else (2, 3, 4):
        directory.replicas.mark_dead(replica, 1)
    before = directory.topics.get("t")
    if not refused:
        assert directory.topics.alter(AlterTopic(name="t", **change)) == directory.topics.get("t")
        return
    with pytest.raises(BadValue, match=refused) as caught:
        directory.topics.alter(AlterTopic(name="t", retention_s=60, **change))
    assert "`embarcadero replica add`" in caught.value.hint
    assert "2 or fewer" in caught.value.hint
    assert directory.topics.get("t") == before


def test_a_topic_that_lacks_copies_may_change_otherwise(directory: Directory) -> None:
    """Only requests for other copies need live replicas."""
    for replica in range(5):
        directory.replicas.mark_dead(replica, 1)
    assert directory.topics.alter(AlterTopic(name="t", retention_s=60, replicas=3, durable_on=2)).retention_s == 60
    with pytest.raises(BadValue, match="durable on 1 replicas, and 0 are live") as caught:
        directory.topics.alter(AlterTopic(name="t", durable_on=1))
    assert caught.value.hint == "start the replicas that are down, or `embarcadero replica add`"


@pytest.mark.parametrize(("replicas", "durable_on"), [(1, 1), (2, 2), (5, 3)])
def test_a_topic_that_is_durable_on_the_majority_stays_so(directory: Directory, replicas: int, durable_on: int) -> None:
    """`alter --replicas 3` of a topic with one copy does not leave it durable on 1 of 3."""
    assert directory.topics.get("t").durable_on == 2
    assert directory.topics.alter(AlterTopic(name="t", replicas=replicas)).durable_on == durable_on
    assert directory.topics.alter(AlterTopic(name="t", replicas=3)).durable_on == 2
    assert directory.topics.alter(AlterTopic(name="t", replicas=3, durable_on=1)).durable_on == 1
    assert directory.topics.alter(AlterTopic(name="t", replicas=5)).durable_on == 1  # an explicit choice


# --- ceilings and losses ----------------------------------------------------------------------------------------------


def test_a_ceiling_is_never_lowered(directory: Directory) -> None:
    """Neither half of it; requesting less is no change."""
    index, seq = directory.ranges.ceiling(0)
    assert directory.ranges.raise_ceiling(0, index + 5, 0, 1)
    assert directory.ranges.raise_ceiling(0, 0, seq + 7, 1)
    before = directory.revision()
    assert directory.ranges.raise_ceiling(0, 1, 1, 1)
    assert directory.ranges.ceiling(0) == (index + 5, seq + 7)
    assert directory.revision() == before


def test_a_loss_is_accepted_once(directory: Directory) -> None:
    """For the open range of that lane; after its recovery the acceptance is used up."""
    assert not directory.ranges.loss_accepted(0)
    directory.ranges.accept_loss(0)
    assert directory.ranges.loss_accepted(0)
    directory.ranges.raise_ceiling(0, 1 << 40, 1 << 50, 1)
    assert directory.ranges.loss_accepted(0)
    directory.ranges.seal_recovered(0, 1, 10, 10, refs(directory, 0, 1), 1)
    assert not directory.ranges.loss_accepted(0)
    with pytest.raises(BadValue, match="lane 77 has no ranges"):
        directory.ranges.accept_loss(77)


# --- sealed ranges move -----------------------------------------------------------------------------------------------


def test_a_copied_sealed_range_is_found_on_its_new_replica(directory: Directory) -> None:
    """The named replica is replaced in its position; open ranges, unknown replicas and duplicates are refused."""
    moved = refs(directory, 4)[0]
    assert not directory.ranges.replace_in_sealed(0, 1, 2, moved)
    directory.ranges.seal_and_open(0, 1, 10, 10, refs(directory, 0, 1, 2), 1)
    stranger = ReplicaRef(replica=9, incarnation=1, disk="nobody")
    for old, new in ((3, moved), (2, refs(directory, 0)[0]), (2, stranger), (2, refs(directory, 2)[0])):
        assert not directory.ranges.replace_in_sealed(0, 1, old, new)
    assert directory.ranges.replace_in_sealed(0, 1, 2, moved)
    assert not directory.ranges.replace_in_sealed(0, 1, 2, moved)
    wiped = add_replica(directory, 0, disk="new")
    assert directory.ranges.replace_in_sealed(0, 1, 0, wiped.ref)
    sealed = directory.ranges.get(0, 1)
    assert sealed is not None
    assert sealed.replicas == [wiped.ref, refs(directory, 1)[0], moved]
    assert (sealed.start, sealed.end) == (0, 10)


# --- trims, deletion, generations -------------------------------------------------------------------------------------


def stored(directory: Directory) -> list[int]:
    return [range_.number for range_ in directory.ranges.all(0)]


def test_ranges_below_the_start_of_a_lane_are_forgotten(directory: Directory) -> None:
    """Only sealed ranges that are wholly below it; the last range stays, so that numbers continue."""
    chosen = refs(directory, 0, 1, 2)
    for number in range(1, 4):
        directory.ranges.seal_and_open(0, number, 10 * number, 10 * number, chosen, 1)
    directory.topics.trim("t", 0, 25)
    assert directory.ranges.forget_trimmed(0, 4, 100)
    assert stored(directory) == [3, 4]
    directory.topics.trim("t", 0, 30)
    assert directory.ranges.forget_trimmed(0, 4, 100)
    assert stored(directory) == [4]
    directory.ranges.seal_clean(0, 4, 30, 30, 1)
    opened = directory.ranges.reopen(0, chosen, 1)
    assert opened is not None
    assert opened.number == 5


def test_a_range_is_forgotten_only_below_a_checkpoint_of_the_sessions(directory: Directory) -> None:
    """The checkpoint must be on enough disks of the open range.

    If another range is open by now, nothing is forgotten.
    """
    chosen = refs(directory, 0, 1, 2)
    for number in range(1, 4):
        directory.ranges.seal_and_open(0, number, 10 * number, 10 * number, chosen, 1)
    assert not directory.ranges.forget_trimmed(0, 4, 100)
    directory.topics.trim("t", 0, 30)
    assert stored(directory) == [1, 2, 3, 4]
    for number, covered, left in ((4, 9, [1, 2, 3, 4]), (3, 30, [1, 2, 3, 4]), (4, 29, [3, 4]), (4, 30, [4])):
        assert directory.ranges.forget_trimmed(0, number, covered) is (number == 4)
        assert stored(directory) == left
    before = directory.revision()
    assert directory.ranges.forget_trimmed(0, 4, 30)
    assert directory.revision() == before


@pytest.mark.parametrize("start", [100, 5_000, 8_999_999])
def test_lost_positions_are_known_until_they_are_trimmed_too(directory: Directory, start: int) -> None:
    """Of the range below them only its end stays, without replicas. A trim that changes nothing writes nothing."""
    chosen = refs(directory, 0, 1, 2)
    directory.ranges.raise_ceiling(0, 9_000_000, 10**12, 1)
    directory.ranges.seal_and_open(0, 1, 50, 450, chosen, 1)
    directory.ranges.seal_recovered(0, 2, 100, 900, chosen, 1)

    def trim(index: int) -> None:
        directory.topics.trim("t", 0, index)
        assert directory.ranges.forget_trimmed(0, 3, 9_000_000)

    trim(99)
    assert stored(directory) == [2, 3]
    trim(start)
    kept, opened = directory.ranges.all(0)
    assert (kept.start, kept.start_seq, kept.end, kept.end_seq, kept.replicas) == (100, 900, 100, 900, [])
    assert lost_spans([kept, opened]) == [(100, 9_000_000)]
    before = directory.revision()
    trim(start)
    assert directory.revision() == before
    trim(9_000_000)
    assert directory.ranges.all(0) == [opened]


def test_an_empty_closed_lane_is_removed() -> None:
    """Not while its range is open, nor before all of it is trimmed."""
    directory = directory_with(1)
    topic, member = directory.topics.create("t", order=0, replicas=1), add_broker(directory)
    lane = directory.lanes.make(topic, member)
    assert lane is not None
    epoch = directory.elections.next_epoch()
    directory.topics.trim("t", lane.lane, 5)
    assert not directory.lanes.all()[0].removed
    directory.members.mark_dead(0, 1)
    directory.ranges.seal_recovered(lane.lane, 1, 8, 80, [], epoch)
    directory.members.mark_removed(0, 1, epoch)
    assert not directory.lanes.all()[0].removed
    directory.topics.trim("t", lane.lane, 8)
    assert directory.lanes.all()[0].removed
    assert directory.ranges.all() == []


def test_a_lane_that_was_trimmed_before_it_was_sealed_is_removed_with_the_next_trim() -> None:
    """Though that trim does not move its start."""
    directory = directory_with(1)
    lane = directory.lanes.make(directory.topics.create("t", order=0, replicas=1), add_broker(directory))
    assert lane is not None
    directory.topics.trim("t", lane.lane, 8)
    assert directory.ranges.seal_recovered(lane.lane, 1, 8, 80, [], directory.elections.next_epoch()) is not None
    assert directory.topics.trim("t", lane.lane, 3) == 8
    assert directory.lanes.all()[0].removed
    before = directory.revision()
    directory.topics.trim("t", lane.lane, 8)
    assert directory.revision() == before


def test_numbers_of_ranges_are_for_life() -> None:
    """A disk may still hold ranges of a deleted topic: a topic that gets its lane later continues the numbers."""
    directory = directory_with(1)
    directory.topics.create("t", replicas=1)
    directory.elections.next_epoch()
    directory.ranges.seal_and_open(0, 1, 10, 10, refs(directory, 0), 1)
    directory.topics.delete("t")
    assert (directory.ranges.all(), directory.ranges.ceiling(0)) == ([], (0, 0))
    for _ in range(LANES_MAX - 1):
        assert directory.topics.create("x", replicas=0).lane != 0
        directory.topics.delete("x")
    directory.begin_generation()
    add_replica(directory, 0)
    assert directory.topics.create("again", replicas=1).lane == 0
    assert [(range_.number, range_.start) for range_ in directory.ranges.all(0)] == [(3, 0)]


def test_a_kept_lane_is_not_given_again_in_the_generation_of_its_deletion() -> None:
    """Lanes of topics on disk stay over generations; new ones skip them, and a deleted one rests."""
    directory = directory_with(1)
    directory.topics.create("kept", replicas=1)

    def made(count: int) -> list[int]:
        lanes = []
        for _ in range(count):
            lanes.append(directory.topics.create("x", replicas=0).lane)
            directory.topics.delete("x")
        return lanes

    assert made(LANES_MAX - 2) == list(range(1, LANES_MAX - 1))
    directory.begin_generation()
    add_replica(directory, 0)
    assert directory.topics.get("kept").lane == 0
    assert made(1) == [LANES_MAX - 1]
    directory.topics.delete("kept")
    assert made(2) == [1, 2]
    directory.begin_generation()
    assert 0 in made(LANES_MAX)


def test_a_new_generation_keeps_topics_on_disk() -> None:
    """Lanes, ranges, ceilings, trims of topics with replicas; those in memory start empty beside them."""
    directory = directory_with(2)
    for name in "abc":
        directory.topics.create(name, order=0 if name == "c" else 2, replicas=2)
        directory.topics.create(f"{name}-memory", order=0 if name == "c" else 2, replicas=0)
    broker = add_broker(directory)
    lanes = [directory.lanes.make(directory.topics.get(name), broker) for name in ("c", "c-memory")]
    directory.elections.next_epoch()
    directory.ranges.raise_ceiling(0, 1 << 40, 1 << 50, 1)
    for name in ("a", "a-memory"):
        directory.topics.trim(name, directory.topics.get(name).lane, 5)
    before = {topic.name: topic for topic in directory.topics.all()}
    ranges, ceiling = directory.ranges.all(), directory.ranges.ceiling(0)
    directory.begin_generation()
    after = {topic.name: topic for topic in directory.topics.all()}
    assert [after[name] == before[name] for name in "abc"] == [True] * 3
    assert len({topic.lane for topic in after.values()}) == 6
    assert all(after[f"{name}-memory"].lane != before[f"{name}-memory"].lane for name in "abc")
    assert (directory.ranges.all(), directory.ranges.ceiling(0)) == (ranges, ceiling)
    assert directory.topics.trims() == {before["a"].lane: 5}
    assert directory.lanes.all() == lanes[:1]
    assert {member.state.value for member in directory.replicas.all()} == {"dead"}
    assert directory.members.all() == []


def test_deleting_a_topic_forgets_its_ranges() -> None:
    """Those of all its lanes; others stay."""
    directory = directory_with(1)
    topic, member = directory.topics.create("t", order=0, replicas=1), add_broker(directory)
    directory.topics.create("u", replicas=1)
    directory.lanes.make(topic, member)
    directory.topics.delete("t")
    assert [range_.lane for range_ in directory.ranges.all()] == [directory.topics.get("u").lane]


def test_a_store_of_one_process_is_enough_for_all_of_this() -> None:
    """No directory has private state: another one over the same store sees and does the same."""
    store = MemoryStore()
    one = directory_with(3, store)
    one.topics.create("t", replicas=3)
    two = Directory(store)
    epoch = two.elections.next_epoch()
    assert two.ranges.seal_and_open(0, 1, 10, 10, refs(two, 0, 1), epoch) == one.ranges.open_range(0)
    assert one.replicas.all() == two.replicas.all()
