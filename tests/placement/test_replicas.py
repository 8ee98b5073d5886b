"""Replicas: incarnations with leases, draining, and the choice of replicas for a range."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.errors import BadValue
from embarcadero.limits import REPLICAS_MAX
from embarcadero.placement.directory import Directory
from embarcadero.placement.members import choose_replicas, open_ranges
from embarcadero.placement.store import MemoryStore
from embarcadero.types import ReplicaMember, ReplicaState
from tests.placement.worlds import add_replica, directory_with, numbers


def states(directory: Directory) -> list[tuple[int, int, str]]:
    return [(member.replica, member.incarnation, member.state.value) for member in directory.replicas.all()]


# --- incarnations and leases ------------------------------------------------------------------------------------------


def test_registering_again_is_a_new_incarnation() -> None:
    """The earlier incarnation is dead, and remembered only as long as an open range names it."""
    directory = directory_with(1)
    add_replica(directory, 0)
    assert states(directory) == [(0, 2, "live")]
    directory.topics.create("t", replicas=1)
    add_replica(directory, 0, disk="another")
    assert states(directory) == [(0, 2, "dead"), (0, 3, "live")]
    assert [member.disk for member in directory.replicas.all()] == ["disk-0", "another"]
    epoch = directory.elections.next_epoch()
    directory.ranges.seal_and_open(0, 1, 5, 5, directory.replicas.choose(1), epoch)
    assert states(directory) == [(0, 3, "live")]
    add_replica(directory, 0)
    assert states(directory) == [(0, 3, "dead"), (0, 4, "live")]


def test_incarnations_go_on_over_generations_and_after_removal() -> None:
    """A zombie is never mistaken for the current incarnation."""
    directory = directory_with(1)
    directory.begin_generation()
    assert add_replica(directory, 0).incarnation == 2
    directory.replicas.remove(0)
    assert directory.replicas.all() == []
    assert add_replica(directory, 0).incarnation == 3


def test_replica_numbers_are_bounded() -> None:
    """A number out of range is refused."""
    for replica in (-1, REPLICAS_MAX):
        with pytest.raises(BadValue, match="use 0 to 63"):
            add_replica(directory_with(0), replica)


def test_a_replica_whose_lease_is_over_counts_as_dead() -> None:
    """For every process, without an explicit report; a late renewal does not bring it back."""
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    directory, other = Directory(store), Directory(store)
    member = directory.replicas.register(0, "d", "/f", "h", 1, lease_s=3.0)
    now[0] = 2.9
    assert directory.replicas.keep_alive(0, 1)
    assert not other.replicas.keep_alive(0, 1)
    now[0] = 5.8
    assert other.replicas.all() == [member]
    now[0] = 5.9
    assert states(other) == [(0, 1, "dead")]
    assert other.replicas.choose(1) == []
    before = other.revision()
    assert other.expire()
    assert other.revision() > before
    assert not directory.replicas.keep_alive(0, 1)
    assert states(directory) == [(0, 1, "dead")]


def test_a_replica_whose_process_is_gone_counts_as_dead() -> None:
    """As far as the store can see processes; the test lists the existing ones."""
    alive = {10, 11}
    directory = Directory(MemoryStore(alive=alive.__contains__))
    for replica in range(2):
        directory.replicas.register(replica, "d", "/f", "h", 10 + replica)
    alive.remove(10)
    assert states(directory) == [(0, 1, "dead"), (1, 1, "live")]
    assert directory.replicas.live_count() == 1


def test_a_dead_replica_stays_dead() -> None:
    """Marking it is idempotent, touches one incarnation, and its renewals have no effect any more."""
    directory = directory_with(2)
    directory.replicas.mark_dead(0, 1)
    directory.replicas.mark_dead(0, 1)
    directory.replicas.mark_dead(0, 7)
    directory.replicas.mark_dead(9, 1)
    assert states(directory) == [(0, 1, "dead"), (1, 1, "live")]
    assert not directory.replicas.keep_alive(0, 1)
    assert directory.replicas.keep_alive(1, 1)


def test_an_incarnation_that_was_replaced_is_not_kept_alive() -> None:
    """Even if it is the same process that tries."""
    store = MemoryStore()
    directory = directory_with(1, store)
    add_replica(directory, 0)
    assert not directory.replicas.keep_alive(0, 1)
    assert directory.replicas.keep_alive(0, 2)
    assert [store.keep_alive(lease) for lease in (1, 2)] == [False, True]


# --- draining ---------------------------------------------------------------------------------------------------------


def test_a_draining_replica_gets_no_ranges_until_draining_ends() -> None:
    """Also as its next incarnation, also after a restart of everything."""
    directory = directory_with(2)
    directory.replicas.drain(0)
    assert states(directory) == [(0, 1, "draining"), (1, 1, "live")]
    assert [ref.replica for ref in directory.replicas.choose(2)] == [1]
    directory.begin_generation()
    assert add_replica(directory, 0).state is ReplicaState.DRAINING
    directory.replicas.undrain(0)
    assert [ref.replica for ref in directory.replicas.choose(2)] == [0]
    with pytest.raises(BadValue, match="no replica 5"):
        directory.replicas.drain(5)


def test_a_replica_whose_ranges_have_no_other_replica_is_not_drained() -> None:
    """The only replica, or all others already have copies: draining would never end."""
    directory = directory_with(1)
    directory.topics.create("t", replicas=1)
    with pytest.raises(BadValue, match="no other replica is live") as caught:
        directory.replicas.drain(0)
    assert "replica add" in caught.value.hint
    add_replica(directory, 1)
    directory.topics.create("both", replicas=2)
    with pytest.raises(BadValue, match="1 of its ranges have no replica to move to: 1 others are live"):
        directory.replicas.drain(0)
    assert directory.replicas.draining() == set()
    assert [state for *_, state in states(directory)] == ["live", "live"]
    add_replica(directory, 2)
    directory.replicas.drain(0)
    assert directory.replicas.draining() == {0}
    directory.replicas.mark_dead(0, 1)
    assert directory.replicas.draining() == {0}


def test_draining_does_not_bring_a_dead_replica_back() -> None:
    """Only the next incarnation is informed."""
    directory = directory_with(1)
    directory.replicas.mark_dead(0, 1)
    directory.replicas.drain(0)
    directory.replicas.undrain(0)
    assert states(directory) == [(0, 1, "dead")]


def test_a_replica_is_removed_only_when_no_range_is_on_it() -> None:
    """Open and sealed ones count; `force` is the operator's consent to a possible loss."""
    directory = directory_with(3)
    directory.topics.create("t", replicas=2)
    epoch = directory.elections.next_epoch()
    directory.replicas.drain(0)
    with pytest.raises(BadValue, match="has 1 ranges, 1 of them open"):
        directory.replicas.remove(0)
    directory.ranges.seal_and_open(0, 1, 5, 5, directory.replicas.choose(2), epoch)
    with pytest.raises(BadValue, match="has 1 ranges, 0 of them open"):
        directory.replicas.remove(0)
    assert directory.ranges.replace_in_sealed(0, 1, 0, directory.replicas.all()[2].ref)
    assert directory.replicas.ranges_on(0) == []
    directory.replicas.remove(0)
    assert [member.replica for member in directory.replicas.all()] == [1, 2]
    directory.replicas.remove(1, force=True)
    with pytest.raises(BadValue, match="no replica 7"):
        directory.replicas.remove(7)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_ranges_are_spread_evenly() -> None:
    """Each next topic goes to those with the fewest open ranges; sealed ranges do not count."""
    directory = directory_with(4)
    for number in range(6):
        directory.topics.create(f"t{number}", replicas=2)
    loads = open_ranges(directory.ranges.all())
    assert set(loads.values()) == {3}
    epoch = directory.elections.next_epoch()
    assert directory.ranges.seal_clean(0, 1, 1, 1, epoch)
    gone = numbers(directory.ranges.get(0, 1))
    directory.topics.create("more", replicas=2)
    assert sorted(numbers(directory.ranges.open_range(6))) == sorted(gone)


def test_copies_are_on_different_hosts_where_there_are_enough() -> None:
    """Spread takes precedence over open_ranges."""
    directory = Directory(MemoryStore())
    for replica, host in enumerate(["a", "a", "a", "b"]):
        add_replica(directory, replica, host)
    for number in range(3):
        directory.topics.create(f"t{number}", replicas=2)
        hosts = {"b" if replica == 3 else "a" for replica in numbers(directory.ranges.open_range(number))}
        assert hosts == {"a", "b"}
    assert sorted(numbers(directory.ranges.open_range(0)) + numbers(directory.ranges.open_range(1))) == [0, 1, 3, 3]


def test_those_to_keep_come_first_in_their_newest_incarnation() -> None:
    """Those to avoid are never chosen, not even to fill up; dead ones are not kept."""
    directory = directory_with(4)
    old = [member.ref for member in directory.replicas.all()]
    newer = add_replica(directory, 3)
    directory.replicas.mark_dead(2, 1)
    chosen = directory.replicas.choose(3, keep=[old[3], old[2], old[1]], avoid={0})
    assert chosen == [newer.ref, old[1]]
    assert directory.replicas.choose(1, keep=[old[3], old[1]]) == [newer.ref]
    assert directory.replicas.choose(0) == []


MEMBERS = st.lists(
    st.builds(
        ReplicaMember, replica=st.integers(0, 7), incarnation=st.just(1), disk=st.just("d"), folder=st.just("/f"),
        host=st.sampled_from("abc"), pid=st.just(0), state=st.sampled_from(ReplicaState),
    ),
    unique_by=lambda member: member.replica,
)  # fmt: skip


@given(
    members=MEMBERS,
    loads=st.dictionaries(st.integers(0, 7), st.integers(0, 5)),
    count=st.integers(0, 5),
    avoid=st.sets(st.integers(0, 7), max_size=3),
    kept=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_a_choice_is_correct_and_the_same_for_the_same_store(
    members: list[ReplicaMember], loads: dict[int, int], count: int, avoid: set[int], kept: int, order: object
) -> None:
    """Only live ones, none twice, as many as possible, in any order of the members; hosts as even as possible."""
    keep = [member.ref for member in members[:kept]]
    chosen = choose_replicas(members, Counter(loads), count, keep, avoid)
    shuffled = list(members)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_replicas(shuffled, Counter(loads), count, keep, avoid) == chosen
    able = {m.replica: m for m in members if m.state is ReplicaState.LIVE and m.replica not in avoid}
    assert len(chosen) == min(count, len(able)) == len({ref.replica for ref in chosen})
    assert all(able[ref.replica].ref == ref for ref in chosen)
    wanted = [ref for ref in keep if ref.replica in able][:count]
    assert chosen[: len(wanted)] == wanted
    hosts = Counter(able[ref.replica].host for ref in chosen)
    if not wanted and len(chosen) < len(able):
        spare = {m.host for m in able.values() if m.ref not in chosen}
        assert all(hosts[host] >= max(hosts.values(), default=0) - 1 for host in spare)
