"""The view of the leader: which epoch it follows, when a process may act, and when it releases memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from embarcadero.fabric.layout import (
    ORDER,
    SEQUENCER_FRONTIERS_BYTES,
    STANDING_WORD,
    RangeWord,
    RegionKind,
    SequencerLine,
    Standing,
    frontier_offset,
)
from embarcadero.fabric.leader import EpochTable, LeaderView, create_epochs, create_ranges
from embarcadero.fabric.lines import FrontierWriter, create_ring
from embarcadero.fabric.region import EPOCHS_REGION, Region, Shape, frontiers_region, order_region
from embarcadero.fabric.shared import SharedFabric
from embarcadero.types import Member

SLOTS = 1 << 17
"""An order ring of 8 MiB, as real ones are."""


class Leader:
    """One epoch after another."""

    def __init__(self, fabric: SharedFabric) -> None:
        self.fabric = fabric
        create_epochs(fabric)
        self.table = EpochTable(fabric, fabric.attach(EPOCHS_REGION, writable=True))
        self.frontiers: Region | None = None

    def open(self, epoch: int) -> None:
        self.table.open(epoch)
        shape = Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        self.frontiers = self.fabric.create(frontiers_region(epoch), shape)

    def start(self, epoch: int) -> None:
        self.open(epoch)
        self.table.start(epoch)

    def order(self, epoch: int, lane: int) -> None:
        create_ring(self.fabric, order_region(epoch, lane), RegionKind.ORDER, ORDER, SLOTS)

    def write(self, line: int, value: int, word: int = 0) -> None:
        assert self.frontiers is not None
        FrontierWriter(self.frontiers, frontier_offset(line) + 8 * word).restart(value)


@pytest.fixture
def leader(tmp_path: Path) -> Leader:
    return Leader(SharedFabric(tmp_path / "fabric", generation=7))


def mapped(name: str) -> bool:
    """Whether this process has a region in its memory."""
    gc.collect()
    return f"/{name}\n" in Path("/proc/self/maps").read_text()


def broker(handle: int) -> Member:
    return Member(broker=handle, incarnation=1, handle=handle, host="", port=0, pid=0)


@pytest.mark.parametrize("by", ["forget", "keep", "advance"])
def test_a_deleted_topic_uses_no_memory(leader: Leader, by: str) -> None:
    """A mapping keeps the megabytes of an order ring, though its region is unlinked."""
    leader.start(1)
    for lane in (1, 2):
        leader.order(1, lane)
    view = LeaderView(leader.fabric)
    assert view.advance(0)
    assert view.order(1) is not None
    assert view.order(2) is not None
    assert [mapped(order_region(1, lane)) for lane in (1, 2)] == [True, True]
    if by == "forget":
        view.forget(1)
    elif by == "keep":
        view.keep({2})
    else:
        leader.start(2)
        assert view.advance(0)
    assert [mapped(order_region(1, lane)) for lane in (1, 2)] == [False, by != "advance"]


def test_range_words_of_deleted_lanes_are_released(leader: Leader) -> None:
    """Those of the other lanes are still known."""
    leader.start(1)
    words = create_ranges(leader.fabric, 1)
    for lane in (1, 2):
        words.add((lane, 0), RangeWord(lane, closing=False).encode())
    view = LeaderView(leader.fabric)
    view.advance(0)
    assert view.word(1) == RangeWord(1, closing=False)
    view.keep_words({2})
    assert (view.word(1), view.word(2)) == (None, RangeWord(2, closing=False))


def test_a_superseded_epoch_is_no_reason_to_act(leader: Leader) -> None:
    """Neither its order nor its state of brokers counts."""
    view = LeaderView(leader.fabric, broker(3))
    assert (view.may_act(), view.still_open(), view.counts_as_open(4)) == (False, False, False)
    leader.start(1)
    for handle in (3, 4):
        leader.write(SequencerLine.BROKERS + handle, Standing.OPEN, STANDING_WORD)
    assert view.advance(0)
    assert (view.may_act(), view.still_open(), view.counts_as_open(4)) == (True, True, True)
    leader.open(2)
    assert (view.may_act(), view.still_open(), view.counts_as_open(4)) == (False, False, False)
    assert not view.advance(0)
    assert view.number == 1


def test_a_closed_broker_notices_it(leader: Leader) -> None:
    """A broker that the leader does not know is neither open nor closing."""
    leader.start(1)
    view = LeaderView(leader.fabric, broker(3))
    view.advance(0)
    assert (view.still_open(), view.closing()) == (False, False)
    leader.write(SequencerLine.BROKERS + 3, Standing.CLOSING, STANDING_WORD)
    assert (view.still_open(), view.closing()) == (False, True)


def test_heartbeats_of_an_epoch_that_has_not_started_are_seen(leader: Leader) -> None:
    """A standby watches the leader that was elected last; followers watch the leader that they follow."""
    leader.start(1)
    leader.write(SequencerLine.HEARTBEAT, 5)
    view = LeaderView(leader.fabric)
    view.advance(0)
    assert (view.beats(0), view.beats(1), view.beats(2)) == (-1, 5, -1)
    leader.open(2)
    leader.write(SequencerLine.HEARTBEAT, 7)
    assert (view.beats(2), view.heartbeat()) == (7, (1, 5))
