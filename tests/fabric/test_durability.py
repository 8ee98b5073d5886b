"""Durable lines and the rule for counting them, on incoherent memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.errors import TooMany
from embarcadero.fabric.layout import RangeWord, RegionKind
from embarcadero.fabric.leader import (
    Durability,
    EpochTable,
    create_durable,
    create_epochs,
    create_ranges,
    durable_through,
)
from embarcadero.fabric.lines import TaggedReader, create_tagged
from embarcadero.fabric.region import EPOCHS_REGION, durable_region
from embarcadero.types import Range, ReplicaRef
from embarcadero_proof.sim.incoherent import IncoherentMemory

LANE = 3


def a_range(number: int = 1, start: int = 0, durable_on: int = 2, replicas: int = 3) -> Range:
    refs = [ReplicaRef(replica=r, incarnation=1, disk=f"d{r}") for r in range(replicas)]
    return Range(lane=LANE, number=number, start=start, start_seq=start, replicas=refs, durable_on=durable_on)


class Cluster:
    """A sequencer, replicas, and a counter, each on a host of its own."""

    def __init__(self, range_: Range) -> None:
        self.memory = IncoherentMemory(random.Random(1), 7)
        create_epochs(self.memory.host("maker"))
        self.ranges = {range_.number: range_}
        self.epochs = EpochTable(self._host("s"), self._host("s").attach(EPOCHS_REGION, writable=True))
        self.epochs.open(1)
        self.words = create_ranges(self._host("s"), 1)
        self.words.add((LANE, 0), RangeWord(range_.number, False).encode())
        self.lines = [create_durable(self._host(f"r{ref.replica}"), ref) for ref in range_.replicas]
        for line in self.lines:
            line.add((LANE, range_.number), range_.start)
        here = self._host("b")
        self.counts = Durability(here, EpochTable(here, here.attach(EPOCHS_REGION)), lambda _, n: self.ranges.get(n))
        self.counts.follow(1)

    def _host(self, name: str):  # type: ignore[no-untyped-def]
        return self.memory.host(name)

    def synced(self, *through: int, number: int = 1) -> None:
        for line, value in zip(self.lines, through, strict=True):
            line.set((LANE, number), value)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=5), st.data())
def test_durable_is_the_largest_index_that_enough_replicas_have(lines: list[int | None], data: st.DataObject) -> None:
    """Of R lines at least A reach it, and no larger index has that many; below A lines it is the start."""
    durable_on = data.draw(st.integers(1, len(lines)))
    through = durable_through(a_range(start=2, durable_on=durable_on, replicas=len(lines)), lines)

    reach = [sum(line is not None and line >= index for line in lines) for index in range(22)]
    assert through >= 2
    assert through == 2 or (reach[through] >= durable_on > reach[through + 1])


def test_lines_of_the_open_range_are_counted() -> None:
    """One slow replica of three changes nothing; a counted position stays counted."""
    cluster = Cluster(a_range())
    cluster.synced(5, 9, 0)
    assert cluster.counts.through(LANE) == 5
    cluster.synced(5, 9, 7)
    assert cluster.counts.through(LANE) == 7
    assert cluster.counts.through(LANE + 1) == 0


def test_a_closing_range_is_not_counted() -> None:
    """From "closing" on, nothing above the earlier count is durable until the next range allows it."""
    cluster = Cluster(a_range())
    cluster.synced(4, 4, 4)
    assert cluster.counts.through(LANE) == 4
    cluster.words.set((LANE, 0), RangeWord(1, True).encode())
    cluster.synced(9, 9, 9)
    assert cluster.counts.through(LANE) == 4


@pytest.mark.parametrize("change", ["closing", "epoch"])
def test_a_change_while_lines_are_loaded_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealer that starts after the first load may have read the lines before they moved: nothing is counted."""
    cluster = Cluster(a_range())
    load = cluster.counts.lines.load

    def load_too_late(range_: Range) -> list[int | None]:
        cluster.synced(4, 4, 4)
        lines = load(range_)
        if change == "closing":
            cluster.words.set((LANE, 0), RangeWord(1, True).encode())
        else:
            cluster.epochs.open(2)
        return lines

    monkeypatch.setattr(cluster.counts.lines, "load", load_too_late)
    assert cluster.counts.through(LANE) == 0


def test_lines_of_an_old_range_do_not_count_for_the_next_one() -> None:
    """A replica of two ranges has a line for each."""
    cluster = Cluster(a_range())
    cluster.synced(9, 9, 4)
    cluster.ranges[2] = a_range(number=2, start=4)
    cluster.words.set((LANE, 0), RangeWord(2, False).encode())
    assert cluster.counts.through(LANE) == 4
    for line in cluster.lines:
        line.add((LANE, 2), 4)
    cluster.synced(6, 6, 4, number=2)
    assert cluster.counts.through(LANE) == 6


def test_lines_of_an_old_incarnation_do_not_count() -> None:
    """The range names incarnations; the lines of an earlier one are in another region."""
    range_ = a_range(durable_on=1, replicas=1)
    cluster = Cluster(range_)
    cluster.synced(9)
    later = ReplicaRef(replica=0, incarnation=2, disk="d0")
    cluster.ranges[2] = Range(lane=LANE, number=2, start=3, start_seq=3, replicas=[later], durable_on=1)
    cluster.words.set((LANE, 0), RangeWord(2, False).encode())
    assert cluster.counts.through(LANE) == 3


def test_removed_lines_are_released() -> None:
    """The remaining lines are not loaded again."""
    range_ = a_range()
    cluster = Cluster(range_)
    lines, (gone, *others) = cluster.counts.lines, range_.replicas
    before = [lines.of(ref) for ref in range_.replicas]
    cluster.memory.host("s").remove(durable_region(gone))
    assert lines.of(gone) is before[0]
    lines.forget_removed()
    assert lines.of(gone) is None
    assert [lines.of(ref) for ref in others] == before[1:]


def test_nothing_is_counted_for_a_deposed_sequencer() -> None:
    """Once a later epoch is open, the range line of the earlier one proves nothing."""
    cluster = Cluster(a_range())
    cluster.synced(4, 4, 4)
    cluster.epochs.open(2)
    assert cluster.counts.through(LANE) == 0


def test_a_full_table_is_a_typed_error() -> None:
    """Lines are never reused: a full table raises an error."""
    host = IncoherentMemory(random.Random(1), 7).host("h")
    table = create_tagged(host, "t", RegionKind.DURABLE, 2)
    table.add((1, 1), 5)
    table.add((2, 1), 6, 7)
    with pytest.raises(TooMany):
        table.add((3, 1))
    reader = TaggedReader(host.attach("t"))
    assert reader.keys() == [(1, 1), (2, 1)]
    assert (reader.load((2, 1)), reader.load((2, 1), 1), reader.load((9, 9))) == (6, 7, None)
