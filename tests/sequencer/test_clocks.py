"""Wall clocks that jump: append times never go back, and no process is declared dead or late because of it."""

from __future__ import annotations

import numpy as np
import pytest

from embarcadero.fabric.layout import ORDER
from embarcadero.limits import RECOVERY_REPLIES_S
from tests.sequencer.replicated import ReplicatedCluster

YEAR_US = 365 * 86_400 * 1_000_000


def publish(cluster: ReplicatedCluster, lane: int, session: int, first: int) -> list[int]:
    """Two batches; when everything so far was appended."""
    cluster.brokers[0].batches(lane, session, first, first + 1)
    cluster.run(2)
    return all_times(cluster, lane)


def all_times(cluster: ReplicatedCluster, lane: int) -> list[int]:
    """Append times by position."""
    seen = cluster.log[lane]
    entries = np.frombuffer(b"".join(seen[index] + bytes(4) for index in sorted(seen)), dtype=ORDER)
    return [int(us) for us in entries["append_us"]]


def jump(cluster: ReplicatedCluster, by_us: int) -> None:
    """Set the wall clock; steady time continues."""
    before = cluster.clock.wall_us() - cluster.clock.now_us()
    cluster.clock.wall_us = lambda: before + by_us + cluster.clock.now_us()  # type: ignore[method-assign]


@pytest.mark.parametrize("years", [-1, 1])
def test_append_times_never_go_back_and_ranges_stay(years: int) -> None:
    """Backwards, forwards and back, over a takeover and over a loss of all memory."""
    cluster = ReplicatedCluster()
    lane = cluster.replicated()
    session = cluster.open(lane, name=5)
    publish(cluster, lane, session, 0)
    range_ = cluster.open_range(lane)
    jump(cluster, years * YEAR_US)
    publish(cluster, lane, session, 2)
    cluster.memory.crash(cluster.host)
    cluster.new_sequencer()
    cluster.run(3)
    jump(cluster, -2 * years * YEAR_US)
    cluster.wait(1)
    times = publish(cluster, lane, session, 4)
    assert times == sorted(times)
    assert len(times) > 6
    assert [one.number for one in cluster.directory.ranges.all(lane)] == [range_.number], (
        "silence is not measured by it"
    )

    cluster.remember(lane)
    cluster.lines(lane, *[len(times)] * 3)
    cluster.lose_memory({ref.replica: ref.disk for ref in range_.replicas})
    jump(cluster, -5 * YEAR_US)
    for ref in range_.replicas:
        next(one for one in cluster.replicas if one.number == ref.replica).line(range_, len(times))
    cluster.wait(RECOVERY_REPLIES_S + 0.5)
    again = cluster.open(lane, name=5)
    cluster.brokers[0].batches(lane, again, 6)
    cluster.run(2)
    after = all_times(cluster, lane)
    assert len(after) >= 2, "a fence, and the batch"
    assert times + after == sorted(times + after)
