"""The directory: what topics may look like, and numbers that name things for life."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import BadName, BadValue, Corrupt, TooMany, TopicExists, UnknownTopic
from embarcadero.fabric import leader as fabric_epochs
from embarcadero.limits import (
    BROKER_LANES_FIRST,
    EPOCHS_AHEAD_MAX,
    EPOCHS_MAX,
    LANES_MAX,
    PARTITIONS_MAX,
    REGION_HANDLES,
    TOPICS_MAX,
)
from embarcadero.placement import directory as placement_directory
from embarcadero.placement import members, ranges
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore, Put
from embarcadero.types import Member, MemberState, staging_topic
from embarcadero_proof.bugs.table import injected
from embarcadero_proof.sim.incoherent import IncoherentMemory


@pytest.fixture
def directory() -> Directory:
    return Directory(MemoryStore())


def register(directory: Directory, broker: int) -> Member:
    return directory.members.register(broker, "127.0.0.1", 9092 + broker, 1000 + broker)


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_created_topic_is_found(directory: Directory) -> None:
    """A topic is returned as created by name and in the list, with every requested value."""
    created = directory.topics.create("orders", order=5, partitions=7, on_gap="skip", gap_timeout_ms=9)
    assert (created.order, created.partitions, created.on_gap, created.gap_timeout_ms) == (5, 7, "skip", 9)
    assert directory.topics.get("orders") == created
    assert directory.topics.all() == [created]


def test_gap_timeout_follows_on_gap(directory: Directory) -> None:
    """Without an explicit gap timeout a fencing topic waits long and a skipping one briefly."""
    assert directory.topics.create("a", on_gap="fence").gap_timeout_ms == 30_000
    assert directory.topics.create("b", on_gap="skip").gap_timeout_ms == 5


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "a\n", "x" * 250, "topic\0"])
def test_bad_names_are_refused(directory: Directory, name: str) -> None:
    """A name with other characters, too long or empty is refused, and the error lists the allowed ones."""
    with pytest.raises(BadName, match="A-Z a-z 0-9"):
        directory.topics.create(name)
    assert directory.topics.all() == []


@pytest.mark.parametrize("name", ["__orders", "__staged.12", "__staged.00000000000000FF", "__jobs.1", "__"])
def test_names_that_belong_to_the_cluster_are_refused(directory: Directory, name: str) -> None:
    """A topic that starts with two underscores is internal to the cluster, or invalid."""
    with pytest.raises(BadName, match="belong to the cluster"):
        directory.topics.create(name)
    assert directory.topics.create(staging_topic(255)).hidden
    assert not directory.topics.create("orders").hidden


@pytest.mark.parametrize("name", ["a", "...", "Orders_2024-01.eu", "x" * 249])
def test_good_names_are_taken(directory: Directory, name: str) -> None:
    """Letters, digits, dot, underscore and dash make a name."""
    assert directory.topics.create(name).name == name


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"order": 3}, BadValue, "use .total. .*2.*strong.*5.*local.*1.*none.*0"),
        ({"order": -1}, BadValue, "use .total. .*2.*strong.*5.*local.*1.*none.*0"),
        ({"replicas": 1}, BadValue, "1 replicas, and 0 are live"),
        ({"durable_on": 1}, BadValue, "no replica is live.*durable_on=0"),
        ({"replicas": -1}, BadValue, "0 .* to 7"),
        ({"replicas": 8}, BadValue, "0 .* to 7"),
        ({"replicas": 0, "durable_on": 1}, BadValue, "durable_on 1 needs replicas"),
        ({"replicas": 2, "durable_on": 3}, BadValue, "use 1 to 2"),
        ({"replicas": 2, "durable_on": 0}, BadValue, "use 1 to 2"),
        ({"retention_bytes": -1}, BadValue, "retention_bytes -1"),
        ({"retention_s": 1 << 60}, BadValue, "retention_s"),
        ({"partitions": 0}, BadValue, f"1 to {PARTITIONS_MAX}"),
        ({"partitions": PARTITIONS_MAX + 1}, BadValue, f"1 to {PARTITIONS_MAX}"),
        ({"on_gap": "wait"}, BadValue, "fence.*skip"),
        ({"gap_timeout_ms": 0}, BadValue, "gap_timeout_ms 0"),
    ],
)
def test_bad_values_are_refused(
    directory: Directory, arguments: dict[str, int | str], error: type[Exception], says: str
) -> None:
    """Each option out of range is refused with the allowed range, and nothing is created."""
    before = directory.revision()
    with pytest.raises(error, match=says):
        directory.topics.create("a", **arguments)  # type: ignore[arg-type]
    assert directory.revision() == before


def test_a_name_is_taken_once(directory: Directory) -> None:
    """Creating a topic again is refused, and leaves it unchanged."""
    first = directory.topics.create("a", order=5)
    with pytest.raises(TopicExists):
        directory.topics.create("a", order=2)
    assert directory.topics.get("a") == first


def test_an_unknown_topic_is_named_with_those_that_exist(directory: Directory) -> None:
    """Asking for, or deleting, a missing topic lists the existing ones."""
    directory.topics.create("orders")
    for call in (directory.topics.get, directory.topics.delete):
        with pytest.raises(UnknownTopic, match=r"'order'.*orders"):
            call("order")


def test_a_lane_is_never_used_again(directory: Directory) -> None:
    """A topic created after a deletion gets a lane that no topic had."""
    lanes = []
    for _ in range(5):
        lanes.append(directory.topics.create("a").lane)
        directory.topics.delete("a")
    assert len(set(lanes)) == 5


def test_a_trim_only_goes_up_and_ends_with_its_topic(directory: Directory) -> None:
    """Every directory over the store sees it; a deleted topic and an empty fabric start at the beginning again."""
    lane, other = directory.topics.create("a").lane, directory.topics.create("b").lane
    assert directory.topics.trims() == {}
    assert [directory.topics.trim("a", lane, index) for index in (7, 3, 9)] == [7, 7, 9]
    directory.topics.trim("b", other, 2)
    assert directory.topics.trims() == {lane: 9, other: 2}
    with pytest.raises(UnknownTopic):
        directory.topics.trim("nobody", lane, 20)
    directory.topics.delete("a")
    assert directory.topics.trims() == {other: 2}
    directory.begin_generation()
    assert directory.topics.trims() == {}


def test_topics_are_bounded() -> None:
    """At the maximum of topics the next is refused; deleting one makes space."""
    assert TOPICS_MAX < LANES_MAX
    directory = Directory(MemoryStore(), topics_max=3)
    for name in "abc":
        directory.topics.create(name)
    with pytest.raises(TooMany, match="delete topics"):
        directory.topics.create("d")
    directory.topics.delete("a")
    assert directory.topics.create("d").name == "d"


def test_lanes_are_bounded(directory: Directory) -> None:
    """When all lanes of a generation are used, creating is refused instead of using one again."""
    for _ in range(LANES_MAX):
        lane = directory.topics.create("a").lane
        directory.topics.delete("a")
    assert lane == LANES_MAX - 1
    with pytest.raises(TooMany, match="restart the cluster"):
        directory.topics.create("a")
    directory.begin_generation()
    assert directory.topics.create("a").lane == 0


# --- members ----------------------------------------------------------------------------------------------------------


def test_registering_again_is_a_new_incarnation(directory: Directory) -> None:
    """A broker that comes back has the next incarnation and another handle; the earlier incarnation is dead."""
    first, other, second = register(directory, 0), register(directory, 1), register(directory, 0)
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert len({first.handle, other.handle, second.handle}) == 3
    states = {(m.broker, m.incarnation): m.state for m in directory.members.all()}
    assert states == {(0, 1): MemberState.DEAD, (0, 2): MemberState.LIVE, (1, 1): MemberState.LIVE}


def test_a_dead_member_stays_dead(directory: Directory) -> None:
    """Marking dead is idempotent, touches one incarnation only, and unknown ones are ignored."""
    first, second = register(directory, 0), register(directory, 0)
    directory.members.mark_dead(0, first.incarnation)
    directory.members.mark_dead(0, 99)
    assert [m.state for m in directory.members.all()] == [MemberState.DEAD, MemberState.LIVE]
    directory.members.mark_dead(0, second.incarnation)
    assert [m.state for m in directory.members.all()] == [MemberState.DEAD, MemberState.DEAD]


def test_only_the_dead_are_removed(directory: Directory) -> None:
    """A live member can't be removed; a removed member is gone, and its number is not given again."""
    member = register(directory, 0)
    assert not directory.members.mark_removed(0, 1, epoch=0)
    assert directory.members.all() == [member]
    directory.members.mark_dead(0, 1)
    assert directory.members.mark_removed(0, 1, epoch=0)
    assert directory.members.all() == []
    assert register(directory, 0).incarnation == 2


def test_a_lane_of_a_broker_is_numbered_once_and_for_live_incarnations_only(directory: Directory) -> None:
    """Numbers are never reused; a dead incarnation, or a deleted topic, gets no lane."""
    topic, member = directory.topics.create("t", order=0), register(directory, 0)
    first, second = directory.lanes.make(topic, member), directory.lanes.make(topic, member)
    assert first is not None
    assert second is not None
    assert (first.lane, second.lane) == (BROKER_LANES_FIRST, BROKER_LANES_FIRST + 1)
    assert directory.lanes.all(topic.lane) == [first, second]
    directory.topics.trim("t", first.lane, 3)
    assert directory.topics.trims() == {first.lane: 3}
    directory.topics.delete("t")
    assert directory.topics.trims() == {}
    assert directory.lanes.make(topic, member) is None
    assert directory.lanes.all() == []
    again = directory.topics.create("t", order=0)
    assert directory.lanes.make(topic, member) is None
    directory.members.mark_dead(0, 1)
    assert directory.lanes.make(again, member) is None
    directory.begin_generation()
    lane = directory.lanes.make(directory.topics.get("t"), register(directory, 0))
    assert lane is not None
    assert lane.lane == BROKER_LANES_FIRST + 2


def test_only_the_newest_epoch_closes_lanes_and_ends_stay(directory: Directory) -> None:
    """An end in the store is never replaced, and a sequencer that has a successor records none."""
    lane = directory.lanes.make(directory.topics.create("t", order=1), register(directory, 0))
    assert lane is not None
    old, new = directory.elections.next_epoch(), directory.elections.next_epoch()
    assert not directory.lanes.close([msgspec.structs.replace(lane, end=5, end_seq=50)], old)
    assert directory.lanes.all()[0].open
    assert directory.lanes.close([msgspec.structs.replace(lane, end=7, end_seq=70)], new)
    assert directory.lanes.close([msgspec.structs.replace(lane, end=9, end_seq=90)], new)
    assert [(found.end, found.end_seq) for found in directory.lanes.all()] == [(7, 70)]
    directory.members.mark_dead(0, 1)
    assert directory.members.mark_removed(0, 1, new)
    assert [(found.end, found.removed) for found in directory.lanes.all()] == [(7, True)]


def test_ends_of_removed_lanes_are_kept_for_a_bounded_time(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic keeps the ends of its last removed lanes only."""
    monkeypatch.setattr(ranges, "BROKER_LANES_KEPT_MAX", 2)
    topic, epoch = directory.topics.create("t", order=0), directory.elections.next_epoch()
    for incarnation in range(1, 7):
        assert directory.lanes.make(topic, register(directory, 0)) is not None
        directory.members.mark_dead(0, incarnation)
        assert directory.members.mark_removed(0, incarnation, epoch)
    assert [lane.incarnation for lane in directory.lanes.all()] == [4, 5, 6]


def test_only_the_newest_epoch_removes(directory: Directory) -> None:
    """A sequencer whose successor already has an epoch can't remove regions that the successor reads."""
    register(directory, 0)
    directory.members.mark_dead(0, 1)
    old, new = directory.elections.next_epoch(), directory.elections.next_epoch()
    assert not directory.members.mark_removed(0, 1, old)
    assert [m.state for m in directory.members.all()] == [MemberState.DEAD]
    assert directory.members.mark_removed(0, 1, new)
    assert directory.members.all() == []


def test_handles_are_cyclic_and_skip_those_in_use(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles are given cyclically, never a handle that a member still has; without a free one there is an error."""
    assert REGION_HANDLES == 65_535
    monkeypatch.setattr(members, "REGION_HANDLES", 3)
    keeper = register(directory, 7)
    assert keeper.handle == 0
    given_out = []
    for incarnation in range(1, 5):
        given_out.append(register(directory, 0).handle)
        directory.members.mark_dead(0, incarnation)
        directory.members.mark_removed(0, incarnation, epoch=0)
    assert given_out == [1, 2, 1, 2]
    register(directory, 1)
    register(directory, 2)
    with pytest.raises(TooMany, match="handles"):
        register(directory, 3)


def test_broker_numbers_are_bounded(directory: Directory) -> None:
    """A broker number out of range is refused."""
    with pytest.raises(BadValue, match="use 0 to 63"):
        register(directory, 64)


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_epochs_begin_at_one(directory: Directory) -> None:
    """Nothing has started at first; the first epoch is 1."""
    assert directory.elections.started_epoch() == 0
    assert directory.elections.next_epoch() == 1
    assert directory.elections.started_epoch() == 0


def test_only_the_newest_standby_starts(directory: Directory) -> None:
    """A standby with an older epoch can't start; the newest can, once."""
    first, second = directory.elections.next_epoch(), directory.elections.next_epoch()
    assert not directory.elections.start_epoch(first, {0: 5})
    assert directory.elections.start_epoch(second, {0: 7, 3: 9})
    assert not directory.elections.start_epoch(second, {0: 8})
    assert (directory.elections.started_epoch(), directory.elections.epoch_ends(second)) == (2, {0: 7, 3: 9})
    assert directory.elections.epoch_ends(first) is None


def test_a_start_without_its_condition_would_make_an_older_standby_lead(directory: Directory) -> None:
    """The rule of the test above is switched off: so that test can fail."""
    first, _ = directory.elections.next_epoch(), directory.elections.next_epoch()
    with injected("start-unconditional"):
        assert directory.elections.start_epoch(first, {0: 5})


def test_few_epochs_run_ahead(directory: Directory) -> None:
    """No more epochs are handed out beyond the last started one than every process checks."""
    for _ in range(EPOCHS_AHEAD_MAX):
        newest = directory.elections.next_epoch()
    with pytest.raises(TooMany, match="none of them started"):
        directory.elections.next_epoch()
    assert directory.elections.start_epoch(newest, {})
    assert directory.elections.next_epoch() == newest + 1


def test_more_epochs_run_ahead_once_the_last_started_one_is_superseded(directory: Directory) -> None:
    """Sequencers that died before they started do not block the next; a proof about another epoch does not count."""
    assert directory.elections.start_epoch(directory.elections.next_epoch(), {})
    for _ in range(EPOCHS_AHEAD_MAX):
        newest = directory.elections.next_epoch()

    with pytest.raises(TooMany):
        directory.elections.next_epoch(superseded=0)
    assert directory.elections.next_epoch(superseded=1) == newest + 1


def test_epochs_fit_the_table(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last epoch that is handed out has a line after it: every process that acts on it reads that line."""
    assert EPOCHS_MAX == 65_536
    monkeypatch.setattr(placement_directory, "EPOCHS_MAX", 4)
    monkeypatch.setattr(fabric_epochs, "EPOCHS_MAX", 4)
    fabric = IncoherentMemory(random.Random(1), directory.generation).host("anybody")
    fabric_epochs.create_epochs(fabric)
    table = fabric_epochs.EpochTable(fabric, fabric.attach(fabric_epochs.EPOCHS_REGION, writable=True))
    for epoch in (1, 2):
        assert directory.elections.start_epoch(directory.elections.next_epoch(), {})
        assert directory.elections.started_epoch() == epoch
    with pytest.raises(TooMany, match="restart"):
        directory.elections.next_epoch()
    assert (table.superseded(2), table.newest_started(2)) == (False, None)


def test_old_starts_are_forgotten(directory: Directory) -> None:
    """The ends of the last starts are kept, older ones go: the store does not grow with every take-over."""
    for _ in range(placement_directory.STARTS_KEPT + 3):
        epoch = directory.elections.next_epoch()
        directory.elections.start_epoch(epoch, {0: epoch})
    assert directory.elections.epoch_ends(3) is None
    assert directory.elections.epoch_ends(4) == {0: 4}
    assert directory.elections.epoch_ends(epoch) == {0: epoch}


# --- generations ------------------------------------------------------------------------------------------------------


def test_a_new_generation_keeps_topics_on_other_lanes(directory: Directory) -> None:
    """Topics survive with lanes that the last generation did not use; members and epochs are gone."""
    before = {directory.topics.create(name, order=5).lane for name in "abc"}
    register(directory, 0)
    directory.elections.start_epoch(directory.elections.next_epoch(), {0: 1})
    generation, cluster = directory.generation, directory.cluster_id
    assert directory.begin_generation() == directory.generation == generation + 1
    assert [(t.name, t.order) for t in directory.topics.all()] == [("a", 5), ("b", 5), ("c", 5)]
    assert before.isdisjoint(t.lane for t in directory.topics.all())
    assert (directory.members.all(), directory.elections.started_epoch(), directory.elections.epoch_ends(1)) == (
        [],
        0,
        None,
    )
    assert directory.cluster_id == cluster
    assert directory.elections.next_epoch() == 1


def test_incarnations_go_on_over_generations(directory: Directory) -> None:
    """A broker of the new generation is never mistaken for one of the old: its incarnation is higher."""
    register(directory, 0)
    directory.begin_generation()
    assert register(directory, 0).incarnation == 2


def test_many_generations_have_enough_lanes(directory: Directory) -> None:
    """Restarting often does not use up lanes, and two topics never share one."""
    for number in range(100):
        directory.topics.create(f"topic-{number}")
    for _ in range(100):
        old = {topic.lane for topic in directory.topics.all()}
        directory.begin_generation()
        new = {topic.lane for topic in directory.topics.all()}
        assert len(new) == 100
        assert new.isdisjoint(old)
        assert all(0 <= lane < LANES_MAX for lane in new)
    fresh = directory.topics.create("one-more").lane
    assert fresh not in new


def test_generations_of_two_clusters_differ() -> None:
    """The generation number contains the cluster's id, so one cluster refuses the other's regions."""
    one, two = Directory(MemoryStore(), "0000000a"), Directory(MemoryStore(), "0000000b")
    assert (one.generation, two.generation) == (0xA << 32, 0xB << 32)


# --- several processes ------------------------------------------------------------------------------------------------


def test_directories_over_one_store_agree() -> None:
    """A second directory over the same store has the same cluster and sees changes; the revision shows them."""
    store = MemoryStore()
    one, two = Directory(store), Directory(store)
    assert (one.cluster_id, one.generation) == (two.cluster_id, two.generation)
    before = two.revision()
    one.topics.create("a")
    assert two.revision() > before
    assert two.topics.all() == one.topics.all()


class Contended(MemoryStore):
    """A store in which another process commits first, the first few times."""

    quicker = 0

    def transact(self, checks, writes):  # type: ignore[no-untyped-def]
        if self.quicker:
            self.quicker -= 1
            rival, left, self.quicker = Directory(self), self.quicker, 0
            rival.topics.create(f"rival-{left}")
            self.quicker = left
        return super().transact(checks, writes)


def test_an_overtaken_decision_is_made_again() -> None:
    """When others change the store between reading and writing, the decision is repeated on the new state."""
    store = Contended()
    directory = Directory(store)
    store.quicker = 5
    assert directory.topics.create("mine").lane == 5
    assert [t.lane for t in directory.topics.all()] == [5, 4, 3, 2, 1, 0]


@settings(deadline=None, max_examples=20)
@given(plans=st.lists(st.lists(st.sampled_from(["topic", "broker"]), max_size=6), min_size=2, max_size=4))
def test_numbers_for_life_are_unique_under_concurrency(plans: list[list[str]]) -> None:
    """Threads with a directory each never get the same lane, handle, incarnation or epoch."""
    store = MemoryStore()
    numbered: list[int] = []
    handles: list[int] = []
    incarnations: list[int] = []
    reigns: list[int] = []

    def work(name: int, plan: list[str]) -> None:
        mine = Directory(store)
        for step, what in enumerate(plan):
            if what == "topic":
                numbered.append(mine.topics.create(f"t{name}-{step}").lane)
            else:
                member = register(mine, 3)
                handles.append(member.handle)
                incarnations.append(member.incarnation)
        reigns.append(mine.elections.next_epoch())

    threads = [threading.Thread(target=work, args=(name, plan)) for name, plan in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for numbers in (numbered, handles, incarnations, reigns):
        assert len(set(numbers)) == len(numbers)
    assert [m.state for m in Directory(store).members.all()].count(MemberState.LIVE) == bool(handles)
    assert len(numbered) == sum(plan.count("topic") for plan in plans)


def test_an_invalid_value_is_a_typed_error(directory: Directory) -> None:
    """A damaged value is reported with its key, not served."""
    store = MemoryStore()
    damaged = Directory(store)
    assert store.transact([], [Put("topics/a", b'{"name": 7}')])
    with pytest.raises(Corrupt, match="topics/a"):
        damaged.topics.all()
