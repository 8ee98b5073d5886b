"""What a replica counts: plain numbers, touched once per commit or per piece of repair."""

from __future__ import annotations

from embarcadero.meters import COUNTS, LATENCY_US, Histogram


class ReplicaCounters:
    """Counters of one incarnation."""

    def __init__(self) -> None:
        self.entries = self.bytes = 0  # appended from the fabric
        self.commits = 0
        self.commit_entries = Histogram(COUNTS)
        self.sync_us = Histogram(LATENCY_US)
        self.repaired_entries = self.repaired_bytes = 0  # appended from other replicas' files
        self.damage_found = 0
        self.disk_errors = 0
        self.checkpoints = 0
        self.dropped_bytes = 0  # by trims and retention
        self.ranges_removed = 0
        self.scrubbed_bytes = 0
