"""Tables of topics in the store: one writer at a time, frontiers that never go back, trims that stop at them."""

from __future__ import annotations

import pytest

from embarcadero.errors import BadValue, Deposed, TierBusy, UnknownTopic
from embarcadero.limits import HOT_RETENTION_S, TIER_LEASE_S
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import MemoryStore
from embarcadero.types import Tier
from embarcadero.wire.messages import AdvanceTier, OpenTier
from embarcadero_proof.bugs.table import injected
from tests.placement.worlds import directory_with


class Clock:
    """Time for the leases of a store."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    made = directory_with(1, MemoryStore(clock))
    made.topics.create("t", replicas=1)
    return made


def opened(directory: Directory, holder: str = "a", topic: str = "t", **more: object) -> Tier:
    ask = OpenTier(topic=topic, holder=holder, id=holder * 8, warehouse="file:///w", table="embarcadero.t", **more)  # type: ignore[arg-type]
    return directory.tiers.open(ask)


def advanced(directory: Directory, epoch: int, index: int, seq: int, metadata: str = "m", start: int = 0) -> Tier:
    lane = directory.topics.get("t").lane
    ask = AdvanceTier(
        topic="t", epoch=epoch, metadata=metadata, frontiers={lane: (index, seq)}, starts={lane: (start, start * 10)}
    )
    return directory.tiers.advance(ask, 7)


def test_one_holder_at_a_time(directory: Directory, clock: Clock) -> None:
    """Another job has to wait until the lease ends, or takes over; the same job may start again. Epochs grow."""
    assert opened(directory).epoch == 1
    with pytest.raises(TierBusy, match="'a' tiers topic 't'"):
        opened(directory, "b")
    assert opened(directory).epoch == 2
    clock.now_s += TIER_LEASE_S / 2
    assert directory.tiers.keep_alive("t", 2)
    assert not directory.tiers.keep_alive("t", 1)
    clock.now_s += TIER_LEASE_S * 0.75
    with pytest.raises(TierBusy):
        opened(directory, "b")
    assert opened(directory, "b", take_over=True).epoch == 3
    clock.now_s += TIER_LEASE_S * 2
    assert opened(directory, "a").epoch == 4
    directory.tiers.close("t", 4)
    assert opened(directory, "b").epoch == 5


def test_the_table_of_a_topic_never_changes(directory: Directory) -> None:
    """A later job gets the topic's existing table, not the table that it would have created."""
    first = opened(directory, hot_retention_s=60)
    second = opened(directory, "b", take_over=True)
    assert (second.id, second.table, second.hot_retention_s) == (first.id, first.table, 60)
    directory.topics.create("u", replicas=1)
    assert opened(directory, topic="u").hot_retention_s == HOT_RETENTION_S


def test_a_deposed_holder_has_no_effect(directory: Directory) -> None:
    """Its epoch is a condition of every change."""
    opened(directory)
    advanced(directory, 1, 5, 50)
    opened(directory, "b", take_over=True)
    with pytest.raises(Deposed, match="epoch 1"):
        advanced(directory, 1, 9, 90)
    directory.tiers.close("t", 1)
    with pytest.raises(TierBusy):
        opened(directory, "c")
    tier = directory.tiers.get("t")
    assert tier is not None
    assert tier.frontier(directory.topics.get("t").lane) == (5, 50)


def test_frontiers_never_go_back(directory: Directory, clock: Clock) -> None:
    """Nor does a repeated report change a lane's start; a lease without a holder is started again."""
    opened(directory)
    lane = directory.topics.get("t").lane
    advanced(directory, 1, 5, 50, start=2)
    clock.now_s += TIER_LEASE_S * 2
    told = advanced(directory, 1, 3, 30, "n", start=1)
    assert (told.frontier(lane), told.start(lane), told.metadata, told.advanced_us) == ((5, 50), (2, 20), "n", 7)
    with pytest.raises(TierBusy):
        opened(directory, "b")


def test_trims_of_a_tiering_job_stop_at_the_frontier(directory: Directory) -> None:
    """Records that are not in the table stay with the brokers. The injected bug shows the effect of the rule."""
    lane = directory.topics.get("t").lane
    with pytest.raises(BadValue, match="no table"):
        directory.topics.trim("t", lane, 5, cold=False)
    opened(directory)
    assert directory.topics.trim("t", lane, 5, seq=50, cold=False) == 0
    advanced(directory, 1, 4, 40)
    assert directory.topics.trim("t", lane, 9, seq=90, cold=False) == 4
    assert directory.tiers.all()["t"].start(lane) == (0, 0)
    with injected("trim-above-tier"):
        assert directory.topics.trim("t", lane, 9, seq=90, cold=False) == 9


def test_an_ordinary_trim_is_for_all_readers(directory: Directory) -> None:
    """It moves the start of the part in the table as well, also below the brokers' records, and never back."""
    lane = directory.topics.get("t").lane
    opened(directory)
    advanced(directory, 1, 20, 200)
    directory.topics.trim("t", lane, 15, seq=150, cold=False)
    assert directory.topics.trim("t", lane, 6, seq=60) == 15
    assert directory.tiers.all()["t"].start(lane) == (6, 60)
    directory.topics.trim("t", lane, 3, seq=30)
    assert directory.tiers.all()["t"].start(lane) == (6, 60)
    assert directory.topics.trim("t", lane, 30, seq=300) == 30
    assert directory.tiers.all()["t"].start(lane) == (20, 200)


def test_topics_without_a_table(directory: Directory) -> None:
    """A topic without replicas is never durable; a deleted topic takes its table's record with it."""
    directory.topics.create("m", replicas=0)
    with pytest.raises(BadValue, match="no replicas"):
        opened(directory, topic="m")
    with pytest.raises(UnknownTopic):
        opened(directory, topic="nobody")
    with pytest.raises(BadValue, match="bytes"):
        opened(directory, "a" * 5_000)
    with pytest.raises(BadValue, match="hot_retention_s"):
        opened(directory, hot_retention_s=1 << 62)
    opened(directory)
    with pytest.raises(BadValue, match="lane 99"):
        directory.tiers.advance(AdvanceTier(topic="t", epoch=1, metadata="", frontiers={99: (1, 1)}), 0)
    directory.topics.delete("t")
    assert directory.tiers.get("t") is None
    directory.topics.create("t", replicas=1)
    assert opened(directory, "b").epoch == 1


def test_lanes_in_the_table_are_remembered(directory: Directory) -> None:
    """A new generation keeps the table of a topic with replicas, and its frontiers."""
    opened(directory)
    advanced(directory, 1, 5, 50)
    directory.begin_generation()
    tier = directory.tiers.get("t")
    assert tier is not None
    assert tier.frontier(directory.topics.get("t").lane) == (5, 50)
