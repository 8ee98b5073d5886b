"""What a sequencer counts: plain numbers, touched once per round or per session request."""

from __future__ import annotations

from collections import Counter

from embarcadero.meters import COUNTS, LATENCY_US, Histogram


class LaneCounters:
    """Counters of one lane."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.fenced: Counter[str] = Counter()  # by reason: gap, overflow, idle, replaced, moved, restart
        self.gap_timeouts = self.skips = 0
        self.cascades = Histogram(COUNTS)  # waiting batches that one round released
        self.checkpoints = self.checkpoint_us = self.checkpoint_sessions = 0  # how many; the last one's duration, rows
        self.checkpoint_at_us = 0
        self.roomless = 0  # entries refused because the lane's ring, or what is reserved for it, was full


class SequencerCounters:
    """Counters of one reign."""

    def __init__(self) -> None:
        self.rounds = self.entries = 0
        self.round_us = Histogram(LATENCY_US)  # of rounds with work
        self.round_entries = Histogram(COUNTS)
        self.brokers_closed = 0
        self.seals = self.seals_failed = 0  # ranges that were sealed and replaced, in this reign
        self.recovered = 0  # lanes that a restart brought back
        self.recovery_us = 0  # from the start of the reign to the last lane that came back
