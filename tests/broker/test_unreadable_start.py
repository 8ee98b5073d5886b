"""No copy of a lane's oldest records can be read: after a trim above them the lane works again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embarcadero.storage.layout import range_folder
from embarcadero.wire import messages as m
from tests.broker.disks import DiskWorld, fill, payload, texts
from tests.broker.harness import Client

SEALED, END = 100, 400


class Damaged:
    """Two ranges, mostly in files only. Those of the first, sealed range are gone from all replicas."""

    def __init__(self, path: Path) -> None:
        world = self.world = DiskWorld(path)
        self.range = world.topic()
        lane = self.range.lane
        self.client: Client = fill(world, self.range, SEALED, size=400)
        opened = world.directory.ranges.seal_and_open(
            lane, 1, SEALED, 2 * SEALED, self.range.replicas, world.hand.epoch
        )
        assert opened is not None
        world.hand.word(lane, opened.number)
        for replica in world.of(opened):
            replica.say(opened, SEALED)
        session = world.open(self.client)
        for first in range(SEALED, END, 10):
            world.publish(self.client, session, first, 10, size=400)
            for replica in world.of(opened):
                replica.copy(opened, first + 10)
        world.run(3, self.client)
        for replica in world.of(self.range):
            shutil.rmtree(replica.folder / range_folder(lane, self.range.number))

    def trim(self, by: str, before: int) -> m.Message:
        return self.world.ask(self.client, m.Trim(lane=self.range.lane, by=by, before=before))  # type: ignore[no-any-return]

    def tail(self) -> m.Message:
        return self.world.ask(self.client, m.GetTail(lane=self.range.lane))  # type: ignore[no-any-return]


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path)


@pytest.mark.parametrize("start", [SEALED, SEALED + 30, END - 1])
@pytest.mark.parametrize("by", ["index", "seq"])
def test_a_lane_can_be_trimmed_above_unreadable_records(damaged: Damaged, by: str, start: int) -> None:
    """Its start is unknown, and a trim does not need it: this is how an operator removes the damaged part."""
    assert damaged.tail().code in ("Corrupt", "BadSegment")  # type: ignore[union-attr]
    before = start if by == "index" else 2 * start + 1
    assert damaged.trim(by, before) == m.PlaceIs(lane=damaged.range.lane, index=start, seq=2 * start)
    tail = damaged.tail()
    assert isinstance(tail, m.TailIs)
    assert tail.start_index == start
    found = damaged.world.fetch(damaged.client, damaged.range.lane, by="earliest", max_bytes=1)
    assert texts(found) == [payload(start, 400)]


def test_a_position_without_a_copy_cannot_be_trimmed_at(damaged: Damaged) -> None:
    """Whether a batch starts there is unknown. Nothing changes."""
    for by, before in (("index", 30), ("seq", 61)):
        assert isinstance(damaged.trim(by, before), m.Failed)
    assert damaged.world.directory.topics.trims() == {}
