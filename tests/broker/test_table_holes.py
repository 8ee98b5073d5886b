"""Positions skipped by a loss of memory stay known when they are in a table and their ranges are forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.client.reads import tail_of, with_lags
from embarcadero.types import Gap, GapKind, Hole, ReaderProgress, Tier
from embarcadero.wire import messages as m
from tests.broker.disks import DiskWorld
from tests.broker.test_lost_ranges import lose_and_go_on


@pytest.mark.parametrize("steps", [1, 2])
def test_a_tail_counts_no_records_in_holes_that_only_the_table_knows(tmp_path: Path, steps: int) -> None:
    """Seqs jump by billions at a restart; so did the lag, once the ranges beside the hole were trimmed away."""
    world = DiskWorld(tmp_path)
    new, _, reader = lose_and_go_on(world, world.topic())
    directory, lane = world.directory, new.lane
    tier = directory.tiers.open(m.OpenTier(topic="t", holder="job", id="1", warehouse="s3://w", table="ns.t"))
    for place in [(5, 10), (new.start + 1, new.start_seq + 2)][-steps:]:
        directory.tiers.advance(m.AdvanceTier(topic="t", epoch=tier.epoch, metadata="m", frontiers={lane: place}), 0)
    directory.topics.trim("t", lane, new.start + 1, seq=new.start_seq + 2, cold=False)
    assert directory.ranges.forget_trimmed(lane, new.number, new.start + 2)
    world.run()
    assert len(directory.ranges.all(lane)) == 1
    tail = tail_of(directory.topics.all()[0], world.ask(reader, m.GetTail(lane=lane)))
    assert tail.holes == ((36, new.start_seq),)
    assert tail.records(tail.start_seq, tail.seq) == 40
    (progress,) = with_lags([ReaderProgress(reader="r", places={lane: (5, 10)})], tail)
    assert progress.lag == 30
    tier_now = directory.tiers.get("t")
    assert tier_now is not None
    assert tier_now.gap(lane, 18, new.start, durable=True) == Gap(GapKind.NEVER_DURABLE, 18, new.start)
    assert tier_now.gap(lane, 18, new.start, durable=False) == Gap(GapKind.LOST, 18, new.start)
    directory.tiers.advance(
        m.AdvanceTier(
            topic="t", epoch=tier.epoch, metadata="m", frontiers={lane: (new.start + 2, new.start_seq + 4)}
        ), 0,
    )  # fmt: skip
    directory.topics.trim("t", lane, new.start + 1, seq=new.start_seq + 2)
    tier_now = directory.tiers.advance(
        m.AdvanceTier(
            topic="t", epoch=tier.epoch, metadata="m", frontiers={lane: (new.start + 3, new.start_seq + 6)}
        ), 0,
    )  # fmt: skip
    assert not tier_now.holes


@pytest.mark.parametrize(
    ("start", "stop", "kind"),
    [
        (18, 40, GapKind.NEVER_DURABLE), (20, 30, GapKind.NEVER_DURABLE), (18, 60, GapKind.NEVER_DURABLE),
        (18, 61, GapKind.LOST), (17, 30, GapKind.LOST), (70, 80, GapKind.LOST), (90, 91, GapKind.LOST),
    ],
)  # fmt: skip
def test_a_gap_is_lost_unless_all_of_it_never_was_durable(start: int, stop: int, kind: GapKind) -> None:
    """Two consecutive losses are one gap; a loss that an operator accepted may include durable records."""
    holes = [Hole(18, 40, 0, 0, True), Hole(40, 60, 0, 0, True), Hole(70, 80, 0, 0, False)]
    tier = Tier(id="1", warehouse="w", table="t", holes={7: holes})
    assert tier.gap(7, start, stop, durable=True) == Gap(kind, start, stop)
    assert tier.gap(8, start, stop, durable=True).kind is GapKind.LOST
