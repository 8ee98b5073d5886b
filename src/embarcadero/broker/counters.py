"""What a broker counts: plain numbers, touched once per batch, per fetch or per read of results, never per record."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

import numpy as np

from embarcadero.fabric.layout import Entries
from embarcadero.meters import LATENCY_US, Histogram
from embarcadero.types import Outcome

_REQUESTS: Final = frozenset({int(Outcome.OPENED), int(Outcome.CLOSED), int(Outcome.NOTED)})
_FEW: Final = 8
"""Up to here, plain numbers are quicker than arrays."""


class Traffic:
    """Batches of one lane that came in or went out."""

    __slots__ = ("batches", "bytes", "records")

    def __init__(self) -> None:
        self.batches = self.records = self.bytes = 0

    def add(self, batches: int, records: int, size: int) -> None:
        """Count more of them."""
        self.batches += batches
        self.records += records
        self.bytes += size


class BrokerCounters:
    """All counters of one broker incarnation."""

    def __init__(self, unanswered_max: int) -> None:
        self.came_in: defaultdict[int, Traffic] = defaultdict(Traffic)  # by lane
        self.went_out: defaultdict[int, Traffic] = defaultdict(Traffic)
        self.outcomes: Counter[int] = Counter()
        self.hung_up: Counter[str] = Counter()  # connections that we ended, by the error's name
        self.connections = 0  # all that ever were
        self.backpressure = 0  # how often we stopped granting credit
        self.publish_us = Histogram(LATENCY_US)  # from a whole batch to its outcome
        self.delivery_us = Histogram(LATENCY_US)  # from the append time to the answer of a waiting read
        self._mask = (1 << (unanswered_max - 1).bit_length()) - 1
        self._published_us = np.zeros(self._mask + 1, dtype=np.int64)  # 0: answered
        self._next = 0

    def published(self, stop: int, now_us: int) -> None:
        """Pending entries below `stop` are published."""
        if stop - self._next == 1:
            self._published_us[self._next & self._mask] = now_us
        else:
            self._published_us[np.arange(self._next, stop) & self._mask] = now_us
        self._next = stop

    def answered(self, results: Entries, now_us: int) -> None:
        """Results came; those that a later sequencer repeats are counted once."""
        at = results["pending"].astype(np.int64) & self._mask
        since, outcomes = self._published_us[at], results["outcome"]
        self._published_us[at] = 0
        if len(results) <= _FEW:
            for us, outcome in zip(since.tolist(), outcomes.tolist(), strict=True):
                self._answered(us, outcome, now_us)
            return
        for outcome, count in enumerate(np.bincount(outcomes[since > 0]).tolist()):
            if count:
                self.outcomes[outcome] += count
        batches = (since > 0) & ~np.isin(outcomes, list(_REQUESTS))
        self.publish_us.add_many(now_us - since[batches])

    def _answered(self, since_us: int, outcome: int, now_us: int) -> None:
        if since_us:
            self.outcomes[outcome] += 1
            if outcome not in _REQUESTS:
                self.publish_us.add(now_us - since_us)

    def forget(self, lane: int) -> None:
        """A topic is gone."""
        self.came_in.pop(lane, None)
        self.went_out.pop(lane, None)
