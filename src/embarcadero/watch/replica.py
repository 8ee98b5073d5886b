"""A replica as the endpoint sees it: what it counts, how far its lanes are behind, and whether it can do its work."""

from __future__ import annotations

from typing import Final

from embarcadero.replica.health import Trouble, health_in_words
from embarcadero.replica.state import Replica
from embarcadero.watch.page import Page

_US: Final = 1e-6


class WatchedReplica:
    """One replica incarnation."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.name = replica, replica.member.ref.region_prefix

    async def unready(self) -> str:
        """A replica is ready while it has its place and its disk takes what is written."""
        replica = self._replica
        if replica.deposed:
            return "another incarnation has its place"
        if replica.health.trouble & ~Trouble.DAMAGED:
            return f"{'; '.join(health_in_words(replica.health.trouble))} ({replica.health.reason})"
        return ""

    def write(self, page: Page) -> None:
        """Everything of a replica."""
        replica, counters = self._replica, self._replica.counters
        number = replica.member.replica
        page.put("embarcadero_replica_entries_total", counters.entries, replica=number)
        page.put("embarcadero_replica_bytes_total", counters.bytes, replica=number)
        page.put("embarcadero_replica_commits_total", counters.commits, replica=number)
        page.histogram("embarcadero_replica_commit_entries", counters.commit_entries, replica=number)
        page.histogram("embarcadero_replica_fsync_latency_seconds", counters.sync_us, _US, replica=number)
        page.put("embarcadero_replica_repaired_entries_total", counters.repaired_entries, replica=number)
        page.put("embarcadero_replica_repaired_bytes_total", counters.repaired_bytes, replica=number)
        page.put("embarcadero_replica_damage_total", counters.damage_found, replica=number)
        page.put("embarcadero_replica_disk_errors_total", counters.disk_errors, replica=number)
        page.put("embarcadero_replica_checkpoints_total", counters.checkpoints, replica=number)
        page.put("embarcadero_replica_dropped_bytes_total", counters.dropped_bytes, replica=number)
        page.put("embarcadero_replica_scrubbed_bytes_total", counters.scrubbed_bytes, replica=number)
        for trouble in Trouble:
            name = (trouble.name or "").lower()
            page.put(
                "embarcadero_replica_trouble", int(trouble in replica.health.trouble), replica=number, trouble=name
            )
        for state, count in replica.count_ranges().items():
            page.put("embarcadero_replica_ranges", count, replica=number, state=state)
        page.put("embarcadero_replica_disk_bytes", replica.disk_bytes(), replica=number)
        page.put("embarcadero_replica_disk_free_bytes", replica.free_bytes(), replica=number)
        for lane, lag in replica.lags().items():
            topic = replica.topics[lane].name if lane in replica.topics else lane
            page.put("embarcadero_replication_lag_batches", lag, replica=number, topic=topic, lane=lane)
