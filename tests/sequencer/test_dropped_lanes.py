"""A dropped lane is freed immediately: its rings and checkpoints are megabytes of shared memory."""

from __future__ import annotations

import gc
import weakref

from tests.sequencer.cluster import Cluster


def test_the_memory_of_a_deleted_topic_does_not_wait_for_the_garbage_collector() -> None:
    """A sequencer makes little garbage, so the collector of cycles runs late or never."""
    cluster = Cluster()
    number = cluster.topic(5)
    session = cluster.open(number)
    cluster.brokers[0].batches(number, session, 0, 1, 3)
    cluster.run()
    lane = weakref.ref(cluster.sequencer.lanes[number])
    gc.collect()
    gc.disable()
    try:
        cluster.directory.topics.delete("t0")
        cluster.run()
        assert lane() is None
    finally:
        gc.enable()
