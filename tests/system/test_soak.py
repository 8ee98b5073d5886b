"""A short soak: topics, sessions, connections and subscribers came and went, and no role keeps anything of them.

Counts are compared, never times. `make soak` does it for longer, and checks memory and disks, too.
"""

from __future__ import annotations

import os
import time

import pytest

from embarcadero.limits import MIB
from embarcadero_proof.chaos.soak import Churn, Series, Watch, settled, slope, small_cluster

SLACK = {"descriptors": 4, "mappings of removed files": 3, "mapped shared memory": 16 * MIB, "store rows": 0}
"""Files and pipes that are opened once, for all topics.

Leftovers of one kind of topic are more, after this many.
"""
TOPICS = 56


def test_the_slope_is_that_of_most_samples() -> None:
    """A few outliers do not change it; growth shows."""
    at_s = [float(number) for number in range(40)]
    flat, growing = [10.0] * 40, [10.0 + number for number in range(40)]
    for wild in (3, 17, 30):
        flat[wild] = growing[wild] = 1_000.0
    assert slope(at_s, flat) == 0
    assert slope(at_s, growing) == pytest.approx(1.0)
    assert Series("broker:0", "descriptors", at_s, flat).flat
    assert not Series("broker:0", "descriptors", at_s, growing).flat


@pytest.mark.system
def test_every_role_is_unchanged_after_topics_came_and_went() -> None:
    """No role has a descriptor, a mapping, or a row in the store for a deleted topic."""
    with small_cluster(brokers=2, replicas=2) as cluster:
        churn, watch = Churn(cluster, seed=0), Watch(cluster, os.getpid())
        try:
            churn.round(14)  # pools and caches fill, and each kind of topic was there
            watch.look()
            base = settled_base(watch)
            churn.round(TOPICS)
            assert settled(watch, base, SLACK) == {}
            assert not watch.restarts
        finally:
            churn.close()


def settled_base(watch: Watch) -> dict[tuple[str, str], float]:
    """The resources of every role once the topics are gone: as soon as they no longer fall."""
    before: dict[tuple[str, str], float] = {}
    while True:
        watch.look()
        now = watch.now([*SLACK])
        if before and not any(now[key] < value for key, value in before.items()):
            return now
        before = now
        time.sleep(0.5)
